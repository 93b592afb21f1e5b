"""Drafts on a GPU: what a step costs that verifies them, and decoding with them beside decoding without.

Models have random weights. First, captured steps alone: one that verifies drafts for each row beside one that has none.
Then requests: a scripted drafter knows the text and proposes up to four tokens, each right with the given chance. It
takes no time, so this is what the engine makes of drafts. Ways alternate in each trial. A ratio above 1: drafts are
faster. All texts are compared.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from gpu_shapes import SHAPES, NoText, build, lengths, random_prompt
from gpu_steps import LENGTHS, filled, microseconds

from infer import LLM, SamplingParams
from infer.backend import backend_for
from infer.backend.gpu.captured import MAX_VERIFIED, WIDTHS, CapturedStep
from infer.engine.sequence import Sequence as EngineSequence
from infer.evaluate.bench import describe_machine, machine_line
from infer.models.common import Decoder

DRAFTS = 4
KEY = 4  # tokens that tell prompts apart
PROMPT_TOKENS = 64
CACHE_MEMORY = 12 * 10**9


class Scripted:
    """Proposes the tokens of known texts, each right with this chance."""

    def __init__(self, chance: float, vocab_size: int) -> None:
        self.chance, self.vocab_size, self.texts = chance, vocab_size, dict[tuple[int, ...], list[int]]()

    def know(self, text: list[int]) -> None:
        chance = random.Random(repr(text[:KEY]))
        spoiled = [token if chance.random() < self.chance else (token + 1) % self.vocab_size for token in text]
        self.texts[tuple(text[:KEY])] = spoiled

    def __call__(self, sequence: EngineSequence, count: int) -> list[int]:
        text, at = self.texts.get(tuple(sequence.token_ids[:KEY]), []), sequence.num_tokens
        return text[at : at + min(count, DRAFTS)]


@torch.inference_mode()
def step_times(model: Decoder, rows: int, trials: int) -> dict[int, float]:
    """Microseconds of a step, by the tokens of each row: 1 without drafts. Tokens and drafts are arbitrary."""
    backend: Any = backend_for(model)
    positions = lengths(rows, *LENGTHS)
    caches = filled(model, [count + 600 for count in positions])
    step = CapturedStep(model.config, backend.plan, model.device, rows, False)
    step.tables.copy_(torch.from_numpy(backend.tables(caches, [1] * rows)[0]))
    step.capture()
    widths = [1, *(width for width in WIDTHS if rows * width <= MAX_VERIFIED)]
    for width in widths[1:]:
        step.add_verification(width)
        step.verifications[width].drafts.fill_(7)  # type: ignore[union-attr]
    times: dict[int, list[float]] = {width: [] for width in widths}
    for trial in range(trials + 1):
        for width in widths:
            step.positions.copy_(torch.tensor(positions))
            launch = step if width == 1 else Replay(step, width)
            time_us = microseconds(launch)  # type: ignore[arg-type]
            if trial:
                times[width].append(time_us)
    return {width: statistics.median(each) for width, each in times.items()}


class Replay:
    """Launches a step that verifies drafts."""

    def __init__(self, step: CapturedStep, width: int) -> None:
        self.graph: Any = step.verifications[width].graph  # type: ignore[union-attr]

    def launch(self) -> None:
        self.graph.replay()


def run(llm: LLM, prompts: list[list[int]], new_tokens: int) -> tuple[float, list[list[int]], int, int]:
    """Tokens per second after the first of all, the texts, and how many drafts were verified and accepted."""
    results = llm.generate(prompts, SamplingParams(max_new_tokens=new_tokens, ignore_eos=True))
    seconds = max(each.timing.decode_time_s for each in results)
    texts = [each.token_ids for each in results]
    drafted, accepted = (sum(getattr(each, name) for each in results) for name in ("drafted", "accepted"))
    return len(prompts) * (new_tokens - 1) / seconds, texts, drafted, accepted


def measure(model: Decoder, rows: int, chances: Sequence[float], new_tokens: int, trials: int) -> list[dict[str, Any]]:
    """Of each chance, the median speed, and its ratio to the speed without drafts."""
    prompts = [random_prompt(model.config, PROMPT_TOKENS, seed) for seed in range(rows)]
    drafters = [Scripted(chance, model.config.vocab_size) for chance in chances]
    speeds: list[list[float]] = [[] for _ in [None, *drafters]]
    counts = [(0, 0) for _ in speeds]
    with ExitStack() as opened:
        llms = [
            opened.enter_context(LLM(model, NoText(), cache_memory=CACHE_MEMORY, speculate=drafter))
            for drafter in [None, *drafters]
        ]
        _, expected, *_ = run(llms[0], prompts, new_tokens)
        for drafter in drafters:
            for prompt, text in zip(prompts, expected, strict=True):
                drafter.know([*prompt, *text])
        for trial in range(trials + 1):
            for i, llm in enumerate(llms):
                speed, texts, drafted, accepted = run(llm, prompts, new_tokens)
                counts[i] = drafted, accepted
                assert texts == expected, "drafts changed a text"
                if trial:
                    speeds[i].append(speed)
    plain, *others = (statistics.median(each) for each in speeds)
    return [
        {"rows": rows, "chance": chance, "speed": speed, "plain": plain, "ratio": speed / plain,
         "drafted": drafted, "accepted": accepted, "new_tokens": rows * new_tokens}
        for chance, speed, (drafted, accepted) in zip(chances, others, counts[1:], strict=True)
    ]  # fmt: skip


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="llama-8b")
    parser.add_argument("--step-rows", nargs="*", type=int, default=[1, 8, 32], help="rows of bare steps")
    parser.add_argument("--rows", nargs="*", type=int, default=[1, 32, 256], help="requests at once")
    parser.add_argument("--chances", nargs="+", type=float, default=[0.0, 0.5, 0.8, 1.0])
    parser.add_argument("--new-tokens", type=int, default=512)
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write everything into this file")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser()
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("needs a CUDA GPU")
    device = torch.device("cuda", torch.cuda.current_device())
    machine = describe_machine(device)
    model = build(options.shape, device, torch.bfloat16)
    report: dict[str, Any] = {"machine": machine, "shape": options.shape, "steps": {}, "requests": []}
    print(f"{machine_line(machine)}, {options.shape}, bfloat16, random weights\n")
    for rows in options.step_rows:
        times = report["steps"][rows] = step_times(model, rows, options.trials)
        ratios = ", ".join(f"{width - 1} drafts {time / times[1]:.3f}" for width, time in times.items() if width > 1)
        print(f"step of {rows} rows: {times[1]:.0f} us; with {ratios} steps", flush=True)
    for rows in options.rows:
        new_tokens = options.new_tokens if rows < 64 else options.new_tokens // 4
        for each in measure(model, rows, options.chances, new_tokens, options.trials):
            report["requests"].append(each)
            print(
                f"{rows} requests, drafts right {each['chance']:.0%}: {each['ratio']:.2f}x, {each['speed']:,.0f} "
                f"after {each['plain']:,.0f} tok/s; {each['drafted']} drafts, {each['accepted']} accepted, "
                f"{each['new_tokens']} tokens",
                flush=True,
            )
        if options.json is not None:
            options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
