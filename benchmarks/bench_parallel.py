"""Tensor parallel: the speed of several processes against one, and the cost of equal bits.

speed   tokens per second of one request and of eight, and seconds of a prompt, in 1, 2, ... processes that share the
        same cores; and whether they give the same tokens
bits    the communication of a pass. infer gathers activations, four times per block, so that each number is computed
        as in one process. Others split matrices by columns and add partial sums, twice per block: their bits depend on
        the number of processes. Both are measured over the same connections, with random data

Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from gpu_shapes import SHAPES

from infer import LLM, ModelConfig, SamplingParams
from infer.cli.common import DEFAULT_MODEL
from infer.evaluate.bench import describe_machine, machine_line
from infer.evaluate.verify import PROMPTS
from infer.loader.hf_config import config_from_hf
from infer.models.sharding import shard_heads
from infer.nn.sharded import shard_ranges
from infer.parallel.group import ProcessGroup

distributed: Any = torch.distributed
CPU = torch.device("cpu")
TOKENS = (1, 128)  # of a pass


def speed(model: str, counts: list[int], new_tokens: int, repeats: int, quantize: str | None) -> list[dict[str, Any]]:
    params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
    rows: list[dict[str, Any]] = []
    texts: list[list[int]] | None = None
    for count in counts:
        with LLM(model, tensor_parallel=count, quantize=quantize, cache_memory=500_000_000) as llm:
            ids = llm.encode(" ".join(PROMPTS))
            prompt = (ids * (512 // len(ids) + 1))[:512]
            llm.generate(list(PROMPTS), params)
            alone, together, prefill = [], [], []
            for turn in range(repeats):
                alone.append(1 / statistics.median(llm.generate(PROMPTS[0], params).timing.decode_times_s))
                started = time.perf_counter()
                found = [result.token_ids for result in llm.generate(list(PROMPTS), params)]
                together.append(len(PROMPTS) * new_tokens / (time.perf_counter() - started))
                prefill.append(llm.generate([turn + 1, *prompt], max_new_tokens=1).timing.prefill_time_s)
            texts = texts or found
            measured = {"one_tokens_per_s": alone, "eight_tokens_per_s": together, "prompt_512_s": prefill}
            rows.append(
                {"processes": count, "same_tokens": found == texts}
                | {name: statistics.median(values) for name, values in measured.items()}
            )
    return rows


def exchanges(
    config: ModelConfig, group: ProcessGroup, tokens: int, dtype: torch.dtype
) -> dict[str, Callable[[], Any]]:
    """The communication of a block: gathered activations, or added partial sums."""
    count, rank = group.world_size, group.rank
    heads = [len(each.query) * config.computed_head_dim for each in shard_heads(config, count)]
    hidden, inner = (
        [len(each) for each in shard_ranges(size, count)] for size in (config.hidden_size, config.intermediate_size)
    )
    gathered = [(torch.randn(tokens, sizes[rank]).to(dtype), sizes) for sizes in (heads, hidden, inner, hidden)]
    partial = torch.randn(tokens, config.hidden_size)  # float32: rounding would lose digits

    def gather() -> None:
        for x, sizes in gathered:
            group.all_gather(x, sizes)

    def add() -> None:
        for _ in range(2):
            everything = group.all_gather(partial, [config.hidden_size] * count).view(tokens, count, -1)
            sum(everything.unbind(1))

    return {"gathered": gather, "added": add}


def bits(rank: int, count: int, port: int, repeats: int) -> list[dict[str, Any]]:
    """Runs on every rank; rank 0's figures are used."""
    store = distributed.TCPStore("127.0.0.1", port, count, is_master=False, timeout=timedelta(minutes=1))
    torch.set_num_threads(1)
    group = ProcessGroup(store, rank, count, CPU, collectives="gloo", local=True)
    rows = []
    shapes = {"smollm2-135m": ModelConfig.from_pretrained("smollm2-135m")} | {
        name: config_from_hf(SHAPES[name]) for name in ("llama-1b", "llama-8b")
    }
    for name, config in shapes.items():
        for tokens in TOKENS:
            times: dict[str, list[float]] = {"gathered": [], "added": []}
            ways = exchanges(config, group, tokens, torch.bfloat16 if name.startswith("llama") else torch.float32)
            for _ in range(repeats):
                for way, run in ways.items():
                    started = time.perf_counter()
                    run()
                    times[way].append(time.perf_counter() - started)
            median = {f"{way}_us": statistics.median(values) * 1e6 for way, values in times.items()}
            rows.append({"shape": name, "processes": count, "tokens": tokens} | median)
    return rows


def bits_of(count: int, repeats: int) -> list[dict[str, Any]]:
    store = distributed.TCPStore("127.0.0.1", 0, count, is_master=True, wait_for_workers=False)
    command = [
        sys.executable,
        __file__,
        "--port",
        str(store.port),
        "--processes",
        str(count),
        "--repeats",
        str(repeats),
    ]
    others = [subprocess.Popen([*command, "--rank", str(rank)]) for rank in range(1, count)]
    try:
        return bits(0, count, store.port, repeats)
    finally:
        for other in others:
            other.wait(30)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="default %(default)s")
    parser.add_argument("--quantize", help="int4 or int8")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4], help="default 1 2 4")
    parser.add_argument("--new-tokens", type=int, default=24, help="default %(default)s")
    parser.add_argument("--repeats", type=int, default=3, help="trials; the median is used (default %(default)s)")
    parser.add_argument("--report", type=Path, help="write everything measured into this JSON file")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        bits(args.rank, args.processes[0], args.port, args.repeats)
        return
    if min(args.processes) < 1 or args.new_tokens < 2 or args.repeats < 1:
        parser.error("--processes and --repeats must be at least 1, and --new-tokens at least 2")
    machine = describe_machine(CPU)
    print(f"{args.model}, {args.quantize or 'float32'}, {machine_line(machine)}\n")
    print("processes   one request tok/s   eight tok/s   512 tokens of a prompt, s")
    rows = speed(args.model, args.processes, args.new_tokens, args.repeats, args.quantize)
    for row in rows:
        same = "same tokens" if row["same_tokens"] else "OTHER TOKENS"
        figures = f"{row['one_tokens_per_s']:19.1f} {row['eight_tokens_per_s']:13.1f} {row['prompt_512_s']:27.2f}"
        print(f"{row['processes']:>9} {figures}   {same}")
    print("\nexchanged in a block, us   processes   tokens   gathered: same bits   partial sums   ratio")
    exchanged = [row for count in args.processes if count > 1 for row in bits_of(count, 50 * args.repeats)]
    for row in exchanged:
        ours, theirs = row["gathered_us"], row["added_us"]
        print(
            f"{row['shape']:<24} {row['processes']:>11} {row['tokens']:>8} {ours:>21.0f} {theirs:>14.0f} "
            f"{ours / theirs:>7.2f}"
        )
    if args.report is not None:
        report = {"model": args.model, "quantize": args.quantize, "machine": machine}
        args.report.write_text(json.dumps(report | {"speed": rows, "exchanged": exchanged}, indent=1) + "\n")
    if not all(row["same_tokens"] for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
