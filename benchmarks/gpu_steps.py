"""Bare decode steps on a GPU: a captured step replayed by itself, and the share of attention.

That is the time of the kernels without the host, in microseconds: complete, and without attention (its results are then
meaningless). Models have random weights; rows have 192 to 640 cached positions, evenly spread; --positions adds single
rows.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from gpu_shapes import SHAPES, build, lengths, step_weight_bytes
from torch import Tensor

from infer.backend import backend_for
from infer.backend.gpu import step as gpu_step
from infer.backend.gpu.captured import CapturedStep
from infer.backend.parts import BlockParts
from infer.cache.base import Cache
from infer.engine.model import make_cache
from infer.evaluate.bench import describe_machine, machine_line
from infer.models.common import Decoder

LENGTHS = 192, 640
REPLAYS = 50


def without_attention() -> AbstractContextManager[Any]:
    """Inside, steps are captured without attention: its output is uninitialized memory."""

    def attend(block: BlockParts, qkv: Tensor, *_: Any, **__: Any) -> Tensor:
        return qkv.new_empty(qkv.shape[0], block.heads * block.head_dim)

    return mock.patch.object(gpu_step, "attend_step", attend)


VARIANTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "as it is": nullcontext,
    "no attention": without_attention,
}


def filled(model: Decoder, positions: Sequence[int]) -> list[Cache]:
    """Caches filled to these positions, with arbitrary contents."""
    caches: list[Cache] = [make_cache(model, count + 1, model.device) for count in positions]
    for cache, count in zip(caches, positions, strict=True):
        cache.advance(count)
    return caches


def captured(model: Decoder, caches: Sequence[Cache]) -> CapturedStep:
    """A greedy step of these rows that feeds the same position each time."""
    backend: Any = backend_for(model)
    if backend.name != "gpu":
        raise RuntimeError(f"these are steps of the GPU's kernels, but {backend.reason}")
    step = CapturedStep(model.config, backend.plan, model.device, len(caches), False)
    step.positions.copy_(torch.tensor([cache.seq_len for cache in caches]))
    step.tables.copy_(torch.from_numpy(backend.tables(caches, [1] * len(caches))[0]))
    step.capture()
    return step


def microseconds(step: CapturedStep) -> float:
    """Mean time of a replayed step."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(REPLAYS):
        step.launch()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / REPLAYS * 1000


@torch.inference_mode()
def measure(model: Decoder, positions: Sequence[int], trials: int) -> dict[str, float]:
    """The median of the trials of each variant, alternating, after a warm-up."""
    caches, steps = filled(model, positions), {}
    for way, within in VARIANTS.items():
        with within():
            steps[way] = captured(model, caches)
    found: dict[str, list[float]] = {way: [] for way in steps}
    for trial in range(trials + 1):
        for way, step in steps.items():
            time_us = microseconds(step)
            if trial:
                found[way].append(time_us)
    return {way: statistics.median(times) for way, times in found.items()}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=["llama-1b", "qwen3-1.7b", "gemma3-1b"])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--positions", nargs="+", type=int, default=[], help="also single rows of these lengths")
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write everything into this file")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser()
    options = parser.parse_args(argv)
    if min(*options.rows, *options.positions, options.trials, 1) < 1:
        parser.error("rows, positions and trials are at least 1")
    if options.json is not None and not options.json.parent.is_dir():
        parser.error(f"there is no folder {options.json.parent}")
    if not torch.cuda.is_available():
        parser.error("needs a CUDA GPU")
    device = torch.device("cuda", torch.cuda.current_device())
    machine = describe_machine(device)
    report: dict[str, Any] = {"machine": machine, "figures": []}
    print(f"{machine_line(machine)}, bfloat16, random weights\n")
    columns = "".join(f"{way:>17}" for way in VARIANTS)
    print(f"{'shape':<15} {'rows':>5} {'positions':>10}{columns}   GB/s of weights, one row")
    for shape in options.shapes:
        model = build(shape, device, torch.bfloat16)
        settings = [lengths(rows, *LENGTHS) for rows in options.rows] + [[count] for count in options.positions]
        for positions in settings:
            times = measure(model, positions, options.trials)
            report["figures"].append({"shape": shape, "positions": positions, "us": times})
            mean = statistics.mean(positions)
            figures = "".join(f"{times[way]:>17,.1f}" for way in VARIANTS)
            speed = step_weight_bytes(model) / times["as it is"] / 1e3
            of_weights = f"{speed:>10,.0f}" if len(positions) == 1 else ""
            print(f"{shape:<15} {len(positions):>5} {mean:>10,.0f}{figures}{of_weights}", flush=True)
            if options.json is not None:
                options.json.write_text(json.dumps(report, indent=1) + "\n")
        del model
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
