"""infer beside transformers: both in one process, alternating trial by trial, on the same weights and prompt.

Prints what each needs for the prompt and for a decode step, and how near that comes to the time it takes to read the
weights from memory once, which no engine at batch 1 can beat. Ratios of one run mean something; figures of two runs,
or of a machine that is busy with other work, little.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from infer import KVCache, SamplingParams, Tokenizer, load_model, stream
from infer.bench import describe_machine, fixed_prompt, machine_line
from infer.cli.common import DEFAULT_MODEL
from infer.engine.generate import step
from infer.engine.request import check_request
from infer.loader import open_checkpoint
from infer.machine import resolve_device, resolve_dtype
from infer.models.common import Decoder

REFERENCE = "transformers"
NO_CACHE = "transformers, no cache"


class Trial:
    """One generation: the tokens, and the moment each became known."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._moments = [time.perf_counter()]

    def add(self, token: int) -> None:
        self._moments.append(time.perf_counter())
        self.tokens.append(token)

    @property
    def prefill_s(self) -> float:
        return self._moments[1] - self._moments[0]

    @property
    def steps_s(self) -> list[float]:
        return [after - before for before, after in zip(self._moments[1:-1], self._moments[2:], strict=True)]


class TrialStreamer(transformers.generation.BaseStreamer):
    """Hears from transformers' generate: first the prompt, then each token as it is chosen."""

    def __init__(self) -> None:
        self.trial = Trial()
        self._prompt_seen = False

    def put(self, value: Tensor) -> None:
        if self._prompt_seen:
            self.trial.add(int(value))
        self._prompt_seen = True

    def end(self) -> None:
        pass


def run_infer(model: Decoder, tokenizer: Tokenizer, prompt: list[int], new_tokens: int) -> Trial:
    params = SamplingParams(ignore_eos=True, max_new_tokens=new_tokens)
    trial = Trial()
    for token in stream(model, tokenizer, prompt, params):
        trial.add(token.token_id)
    return trial


@torch.inference_mode()
def run_transformers(model: Any, prompt: list[int], new_tokens: int, *, use_cache: bool) -> Trial:
    ids = torch.tensor([prompt], device=model.device)
    # No eos id at all: forbidding it (min_new_tokens) would make these tokens differ from infer's.
    settings = transformers.GenerationConfig(
        do_sample=False, use_cache=use_cache, max_new_tokens=new_tokens, eos_token_id=None, pad_token_id=0
    )
    streamer = TrialStreamer()
    model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings, streamer=streamer)
    return streamer.trial


def load_transformers(path: Path, dtype: torch.dtype, device: torch.device) -> Any:
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    where = {"pretrained_model_name_or_path": path}
    if path.suffix == ".gguf":
        where = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    with redirect_stderr(io.StringIO()):  # its GGUF reader draws a progress bar that no setting turns off
        model = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=dtype).eval().to(device)
    model.generation_config = transformers.GenerationConfig()  # the checkpoint's own would bring its eos back
    return model


@torch.inference_mode()
def read_weights(model: Decoder) -> float:
    """Seconds to read once, by summing, every weight that a decode step reads; best of three."""
    weights = list(model.parameters())
    if not model.config.tie_word_embeddings:  # then a step reads one row of the embedding, not all
        weights = [weight for weight in weights if weight is not model.embed_tokens.weight]
    return min(_seconds(lambda: [weight.sum() for weight in weights], model.device) for _ in range(3))


class TimedCache(KVCache):
    """Adds up the time that attention takes, in its place between the other work of a step."""

    attend_s = 0.0

    def attend(self, *args: Any, **kwargs: Any) -> Tensor:
        _synchronise(self.device)
        started = time.perf_counter()
        out = super().attend(*args, **kwargs)
        _synchronise(self.device)
        self.attend_s += time.perf_counter() - started
        return out


@torch.inference_mode()
def measure_flatness(
    model: Decoder, tokenizer: Tokenizer, positions: Sequence[int], repeats: int
) -> list[dict[str, float]]:
    """Median time of a decode step, and of the attention in it, at each position; the positions alternate."""
    token = torch.tensor([[0]], device=model.device)
    caches: list[tuple[KVCache, TimedCache]] = []
    for position in positions:
        prompt = torch.tensor([fixed_prompt(tokenizer, position)], device=model.device)
        pair = tuple(
            kind.from_model_config(model.config, position + 1, dtype=model.dtype, device=model.device)
            for kind in (KVCache, TimedCache)
        )
        for cache in pair:
            step(model, cache, prompt)
        caches.append(pair)

    def one_step(cache: KVCache) -> float:
        elapsed = _seconds(lambda: step(model, cache, token), model.device)
        cache.truncate(cache.seq_len - 1)
        return elapsed

    steps: list[list[float]] = [[] for _ in positions]
    attends: list[list[float]] = [[] for _ in positions]
    for _ in range(repeats):
        for i, (plain, timed) in enumerate(caches):
            steps[i].append(one_step(plain))
            timed.attend_s = 0.0
            one_step(timed)
            attends[i].append(timed.attend_s)
    return [
        {"position": position, "step_ms": statistics.median(s) * 1e3, "attention_ms": statistics.median(a) * 1e3}
        for position, s, a in zip(positions, steps, attends, strict=True)
    ]


def _seconds(work: Callable[[], Any], device: torch.device) -> float:
    _synchronise(device)
    started = time.perf_counter()
    work()
    _synchronise(device)
    return time.perf_counter() - started


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def summarise(name: str, trials: Sequence[Trial], prompt_tokens: int, reference: Sequence[int]) -> dict[str, Any]:
    """Medians over the trials, of the mean step in each; and the first token that differs from the reference's."""
    prefill_s = statistics.median(trial.prefill_s for trial in trials)
    step_s = statistics.median(statistics.fmean(trial.steps_s) for trial in trials)
    pairs = zip(trials[0].tokens, reference, strict=True)
    return {
        "engine": name,
        "prefill_tokens_per_s": prompt_tokens / prefill_s,
        "decode_tokens_per_s": 1 / step_s,
        "step_ms": step_s * 1e3,
        "trials_step_ms": [statistics.fmean(trial.steps_s) * 1e3 for trial in trials],
        "first_difference": next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), None),
    }


def compare(args: argparse.Namespace) -> dict[str, Any]:
    load_average = os.getloadavg()[0]
    device = resolve_device(args.device)
    dtype = resolve_dtype(args.dtype, device)
    checkpoint = open_checkpoint(args.model)
    tokenizer = Tokenizer(args.model)
    prompt = fixed_prompt(tokenizer, args.prompt_tokens)
    for tokens, new_tokens in ((prompt, args.new_tokens), ([0] * max(args.positions), 1)):
        check_request(checkpoint.config, tokens, SamplingParams(max_new_tokens=new_tokens))
    model, _ = load_model(args.model, dtype=dtype, device=device)
    reference = load_transformers(checkpoint.path, dtype, device)
    engines: dict[str, Callable[[int], Trial]] = {
        "infer": lambda new_tokens: run_infer(model, tokenizer, prompt, new_tokens),
        REFERENCE: lambda new_tokens: run_transformers(reference, prompt, new_tokens, use_cache=True),
    }
    if args.no_cache:
        engines[NO_CACHE] = lambda new_tokens: run_transformers(reference, prompt, new_tokens, use_cache=False)
    trials: dict[str, list[Trial]] = {name: [] for name in engines}
    for engine in engines.values():
        engine(min(args.new_tokens, 8))  # warm up
    reads = []
    for _ in range(args.trials):
        for name, engine in engines.items():
            trials[name].append(engine(args.new_tokens))
        reads.append(read_weights(model))
    tokens = trials[REFERENCE][0].tokens
    results = [summarise(name, done, args.prompt_tokens, tokens) for name, done in trials.items()]
    speeds = {result["engine"]: result["decode_tokens_per_s"] for result in results}
    read_ms = min(reads) * 1e3
    for result in results:
        result["ratio_to_transformers"] = result["decode_tokens_per_s"] / speeds[REFERENCE]
        result["share_of_read_limit"] = read_ms / result["step_ms"]
    return {
        "model": args.model,
        "dtype": str(dtype).removeprefix("torch."),
        "machine": describe_machine(device) | {"transformers": transformers.__version__},
        "load_average": load_average,
        "prompt_tokens": args.prompt_tokens,
        "new_tokens": args.new_tokens,
        "trials": args.trials,
        "read_limit_ms": read_ms,
        "engines": results,
        "flatness": measure_flatness(model, tokenizer, args.positions, args.steps),
    }


def format_comparison(report: dict[str, Any]) -> str:
    machine = report["machine"]
    lines = [
        f"{report['model']}, {report['dtype']}, {report['prompt_tokens']} prompt + {report['new_tokens']} new tokens, "
        f"median of {report['trials']} trials",
        f"{machine_line(machine)}, transformers {machine['transformers']}",
        f"load average before: {report['load_average']:.2f} (other work makes all of this wrong)",
        "",
        f"{'engine':<24}{'prefill tok/s':>14}{'decode tok/s':>14}{'ms/step':>9}{'ratio':>8}{'of read limit':>15}",
    ]
    for result in report["engines"]:
        lines.append(
            f"{result['engine']:<24}{result['prefill_tokens_per_s']:>14.0f}{result['decode_tokens_per_s']:>14.1f}"
            f"{result['step_ms']:>9.1f}{result['ratio_to_transformers']:>7.2f}x{result['share_of_read_limit']:>14.0%}"
        )
    limit = report["read_limit_ms"]
    lines.append(f"{'reading weights once':<24}{'':>14}{1e3 / limit:>14.1f}{limit:>9.1f}{'':>8}{1:>14.0%}")
    lines += ["", "Read limit: every weight a step reads, summed; the best pass of the run."]
    spread = max(max(r["trials_step_ms"]) / min(r["trials_step_ms"]) for r in report["engines"]) - 1
    if spread > 0.15:
        lines.append(f"One engine's trials lie {spread:.0%} apart: the machine was busy with other work. Run again.")
    lines.append("")
    for result in report["engines"]:
        if result["engine"] != REFERENCE:
            at = result["first_difference"]
            says = (
                f"the same {report['new_tokens']} tokens as"
                if at is None
                else f"other tokens, from new token {at} on, than"
            )
            lines.append(f"{result['engine']} generated {says} {REFERENCE}.")
    lines += ["", f"{'infer at position':<24}{'ms/step':>14}{'attention alone, ms':>22}{'the rest, ms':>15}"]
    for row in report["flatness"]:
        rest = row["step_ms"] - row["attention_ms"]
        lines.append(f"{row['position']:<24}{row['step_ms']:>14.1f}{row['attention_ms']:>22.1f}{rest:>15.1f}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="a folder, a GGUF file or a built-in name (%(default)s)")
    parser.add_argument("--prompt-tokens", type=int, default=64, help="length of the prompt (%(default)s)")
    parser.add_argument("--new-tokens", type=int, default=128, help="tokens to generate, 2 or more (%(default)s)")
    parser.add_argument("--trials", type=int, default=3, help="trials of each engine (%(default)s)")
    parser.add_argument("--no-cache", action="store_true", help="also run transformers without its cache")
    parser.add_argument("--dtype", default="float32", help="(%(default)s)")
    parser.add_argument("--device", default="auto", help="(%(default)s)")
    parser.add_argument(
        "--positions", type=int, nargs="+", default=[64, 1024], help="where to time single steps (64 1024)"
    )
    parser.add_argument("--steps", type=int, default=32, help="steps to time at each position (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    args = parser.parse_args(argv)
    for name, least in (("prompt_tokens", 1), ("new_tokens", 2), ("trials", 1), ("steps", 1)):
        if getattr(args, name) < least:
            parser.error(f"--{name.replace('_', '-')} must be at least {least}, not {getattr(args, name)}")
    if min(args.positions) < 1:
        parser.error(f"--positions must be at least 1, not {min(args.positions)}")
    if args.json and not args.json.parent.is_dir():
        parser.error(f"there is no folder {args.json.parent}")
    try:
        report = compare(args)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    print(format_comparison(report))
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
