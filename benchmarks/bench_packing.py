"""Prompts packed into common passes, against one pass per prompt: seconds for all, and whether bits agree.

On a GPU: random weights in a shape, prompts of 100 to 1,024 tokens. On a CPU: a model, prompts of --tokens each, and
all of them concatenated into one.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from gpu_shapes import SHAPES, build, synchronize

from infer import load_model
from infer.backend import Row, backend_for
from infer.cli.common import DEFAULT_MODEL
from infer.engine.model import make_cache
from infer.engine.runner import PASS_TOKENS
from infer.evaluate.bench import describe_machine, machine_line
from infer.models.common import Decoder

TRIALS = 3
Prompts = Sequence[Sequence[int]]


def packed(model: Decoder, prompts: Prompts) -> list[torch.Tensor]:
    """In passes of at most PASS_TOKENS tokens. Returns the last logits [V] of each prompt."""
    logits, rows, tokens = [], [], 0
    for prompt in prompts:
        if rows and tokens + len(prompt) > PASS_TOKENS:
            logits += backend_for(model).run(rows)
            rows, tokens = [], 0
        rows.append(Row(make_cache(model, len(prompt) + 1, model.device), prompt))
        tokens += len(prompt)
    return [x[0, -1] for x in logits + backend_for(model).run(rows)]


def one_by_one(model: Decoder, prompts: Prompts) -> list[torch.Tensor]:
    return [packed(model, [prompt])[0] for prompt in prompts]


@torch.inference_mode()
def seconds(run: Callable[[Decoder, Prompts], list[torch.Tensor]], model: Decoder, prompts: Prompts) -> float:
    """The median of the trials, after a warm-up."""
    times = []
    for _ in range(TRIALS + 1):
        synchronize(model.device)
        start = time.perf_counter()
        run(model, prompts)
        synchronize(model.device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


@torch.inference_mode()
def same_bits(model: Decoder, prompts: Prompts) -> bool:
    pairs = zip(packed(model, prompts), one_by_one(model, prompts), strict=True)
    return all(torch.equal(a.float(), b.float()) for a, b in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen3-0.6b", help="on a GPU (default %(default)s)")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="on a CPU (default %(default)s)")
    parser.add_argument("--prompts", type=int, help="256 on a GPU, 8 on a CPU")
    parser.add_argument("--tokens", type=int, default=64, help="of each prompt on a CPU (default %(default)s)")
    args = parser.parse_args()
    generator = random.Random(0)
    if args.device == "cpu":
        model, _ = load_model(args.model, device="cpu")
        lengths = [args.tokens] * (args.prompts or 8)
    else:
        model = build(args.shape, torch.device("cuda", torch.cuda.current_device()), torch.bfloat16)
        lengths = [generator.randint(100, 1024) for _ in range(args.prompts or 256)]
    prompts = [[generator.randrange(model.config.vocab_size) for _ in range(length)] for length in lengths]
    print(f"{machine_line(describe_machine(model.device))}: {len(prompts)} prompts, {sum(lengths):,} tokens")
    print(f"packed        {seconds(packed, model, prompts):8.3f} s")
    print(f"one by one    {seconds(one_by_one, model, prompts):8.3f} s")
    if args.device == "cpu":
        print(f"concatenated  {seconds(packed, model, [[token for prompt in prompts for token in prompt]]):8.3f} s")
    print("the same bits" if same_bits(model, prompts) else "OTHER BITS")


if __name__ == "__main__":
    main()
