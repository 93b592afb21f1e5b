"""Long contexts: memory and time of a sliding-window cache, and of chunked prefill.

Everything is measured in one process, alternating trial by trial and step by step: ratios within one run are
reliable, figures of two runs are not comparable. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import statistics
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from gpu_shapes import SHAPES

from infer import KVCache, ModelConfig, SlidingCache, Tokenizer, load_model
from infer.engine.model import step
from infer.engine.params import check_prefill_chunk
from infer.evaluate.bench import describe_machine, fixed_prompt, machine_line, peak_memory, reset_peak_memory
from infer.loader.hf_config import config_from_hf
from infer.models.common import Decoder


def make(kind: type[KVCache | SlidingCache], model: Decoder, positions: int, chunk: int) -> KVCache | SlidingCache:
    layout = {"prefill_chunk": chunk} if kind is SlidingCache else {}
    return kind.from_model_config(model.config, positions, dtype=model.dtype, device=model.device, **layout)


@torch.inference_mode()
def measure_prefill(
    model: Decoder, cache: KVCache | SlidingCache, prompt: list[int], chunk: int | None
) -> tuple[float, int | None]:
    """Seconds, and peak memory beyond the weights and the cache."""
    tokens = torch.tensor([prompt], device=model.device)
    for tensor in (*cache.k, *cache.v):  # memory is allocated when it is first written
        tensor.zero_()
    release_free_memory()
    reset_peak_memory(model.device)
    before = peak_memory(model.device)
    started = time.perf_counter()
    step(model, cache, tokens, chunk)[0, 0].item()
    elapsed = time.perf_counter() - started
    after = peak_memory(model.device)
    return elapsed, None if before is None or after is None else after - before


def release_free_memory() -> None:
    """Make the C library return free memory: it would hide the peak of the next run."""
    gc.collect()
    with suppress(OSError, AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)


@torch.inference_mode()
def measure_decode(model: Decoder, caches: list[KVCache | SlidingCache], token: int, steps: int) -> list[list[float]]:
    """Seconds of each step with each cache. The order alternates, because it affects the times."""
    fed = torch.tensor([[token]], device=model.device)
    times: list[list[float]] = [[] for _ in caches]
    order = list(range(len(caches)))
    for _ in range(steps):
        for i in order:
            started = time.perf_counter()
            step(model, caches[i], fed)[0, 0].item()
            times[i].append(time.perf_counter() - started)
        order.reverse()
    return times


def cache_sizes() -> dict[str, int]:
    """Bytes for Gemma 3 1B at 32,768 positions in bf16."""
    config = config_from_hf(SHAPES["gemma3-1b"])
    return {
        kind.__name__: kind.from_model_config(config, 32_768, dtype="bfloat16", device="cpu").memory_bytes
        for kind in (SlidingCache, KVCache)
    }


def run(model: Decoder, tokenizer: Tokenizer, context: int, new_tokens: int, chunk: int, trials: int) -> dict[str, Any]:
    prompt, positions = fixed_prompt(tokenizer, context), context + new_tokens
    kinds = (SlidingCache, KVCache)
    prefill: dict[tuple[str, int | None], list[tuple[float, int | None]]] = {}
    for _ in range(trials):
        for kind in kinds:
            for size in (None, chunk):
                cache = make(kind, model, positions, chunk)
                prefill.setdefault((kind.__name__, size), []).append(measure_prefill(model, cache, prompt, size))
    caches = [make(kind, model, positions, chunk) for kind in kinds]
    for cache in caches:
        measure_prefill(model, cache, prompt, chunk)
    times = measure_decode(model, caches, prompt[-1], new_tokens)
    return {
        "context": context,
        "chunk": chunk,
        "prefill": [
            {
                "cache": name,
                "chunk": size,
                "seconds": statistics.median(seconds for seconds, _ in measured),
                "peak_bytes": max((peak for _, peak in measured if peak is not None), default=None),
            }
            for (name, size), measured in prefill.items()
        ],
        "decode": [
            {
                "cache": kind.__name__,
                "cache_bytes": cache.memory_bytes,
                "step_ms": statistics.median(times[i]) * 1e3,
            }
            for i, (kind, cache) in enumerate(zip(kinds, caches, strict=True))
        ],
        "gemma_3_1b_at_32768_bf16": cache_sizes(),
    }


def table(figures: dict[str, Any]) -> str:
    one_pass = {row["cache"]: row["seconds"] for row in figures["prefill"] if row["chunk"] is None}
    lines = [f"prefill of {figures['context']} tokens       seconds    to one   peak memory beyond weights and cache"]
    for row in figures["prefill"]:
        size = "one pass" if row["chunk"] is None else f"chunks of {row['chunk']}"
        peak = "unknown" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e6:,.0f} MB"
        ratio = row["seconds"] / one_pass[row["cache"]]
        lines.append(f"  {row['cache']:<13} {size:<15} {row['seconds']:9.2f}   {ratio:7.2f}x   {peak:>9}")
    base = figures["decode"][-1]
    lines += ["", f"decode at {figures['context']} positions      ms/step   speed      cache"]
    for row in figures["decode"]:
        speed, size = base["step_ms"] / row["step_ms"], row["cache_bytes"] / base["cache_bytes"]
        lines.append(
            f"  {row['cache']:<29} {row['step_ms']:9.2f}   {speed:5.2f}x   "
            f"{row['cache_bytes'] / 1e6:7.1f} MB ({size:.0%})"
        )
    sizes = figures["gemma_3_1b_at_32768_bf16"]
    lines += ["", "cache of Gemma 3 1B at 32,768 positions in bfloat16"]
    lines += [f"  {name:<29} {size / 1e6:7.1f} MB" for name, size in sizes.items()]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gemma-3-270m", help="a model with window layers (default %(default)s)")
    parser.add_argument("--context", type=int, default=4_000, help="tokens to prefill (default %(default)s)")
    parser.add_argument("--new-tokens", type=int, default=64, help="steps to time (default %(default)s)")
    parser.add_argument("--prefill-chunk", type=int, default=512, help="default %(default)s")
    parser.add_argument("--trials", type=int, default=3, help="of each prefill (default %(default)s)")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--report", type=Path, help="write everything measured into this JSON file")
    args = parser.parse_args()
    config = ModelConfig.from_pretrained(args.model)
    check_prefill_chunk(args.prefill_chunk)
    if min(args.context, args.new_tokens, args.trials) < 1:
        parser.error("--context, --new-tokens and --trials must be at least 1")
    if args.context + args.new_tokens > config.max_position_embeddings:
        parser.error(f"{args.context} + {args.new_tokens} tokens exceed the model's {config.max_position_embeddings}")
    model, _ = load_model(args.model, dtype=args.dtype, device=args.device)
    machine = describe_machine(model.device)
    figures = run(model, Tokenizer(args.model), args.context, args.new_tokens, args.prefill_chunk, args.trials)
    print(f"{args.model}, {str(model.dtype).removeprefix('torch.')}, {machine_line(machine)}\n\n{table(figures)}")
    if args.report is not None:
        args.report.write_text(json.dumps({"model": args.model, "machine": machine, **figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
