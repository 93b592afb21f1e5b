"""What many replicas would do, on paper: measured step times, an arrival trace and a router give latencies and cost.

measure   time passes of the real engine on this machine, and keep them in a report file
run       simulate replicas with such a report: percentiles, goodput, cost per million tokens
check     send the same trace to real servers, and compare what they do with the simulation
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from gpu_shapes import SHAPES, NoText, build
from simulate_steps import CPU, GPU, QUICK, Sample, engine_of, fit, measure, merged, report_values

from infer.engine.llm import LLM
from infer.evaluate.bench import describe_machine, machine_line
from infer.machine import resolve_device

MODEL = "smollm2-135m"


def open_llm(args: argparse.Namespace, device: torch.device) -> LLM:
    if args.shape:
        model = build(args.shape, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
        return LLM(model, NoText(), cache_memory=args.cache_memory)
    return LLM(args.model, device=str(device), quantize=args.quantize or None, cache_memory=args.cache_memory)


def run_measure(args: argparse.Namespace, command: Sequence[str]) -> None:
    device = resolve_device(args.device)
    if args.threads:
        torch.set_num_threads(args.threads)
    machine = describe_machine(device) | {"load_average": os.getloadavg()[0]}
    grid = QUICK if args.quick else GPU if device.type == "cuda" else CPU
    print(f"{machine_line(machine)}, load average before: {machine['load_average']:.2f}\n$ {shlex.join(command)}\n")
    samples: list[Sample] = []
    with open_llm(args, device) as llm:
        engine = engine_of(llm)
        for what, found in measure(llm, grid):
            samples += merged(found)
            seconds, host = sum(sample.seconds for sample in found), sum(sample.host for sample in found)
            print(f"{what}: {len(found)} passes, {seconds:.1f} s, host {host / max(seconds, 1e-9):.1%}", flush=True)
            values: dict[str, Any] = {"benchmark": "steps", "machine": machine, "commands": [shlex.join(command)]}
            values |= report_values(engine, args.shape or args.model, samples)
            values["date"] = datetime.now(UTC).isoformat(timespec="seconds")
            if args.out is not None:  # after each load, so that an end by force loses little
                args.out.write_text(compact(values))
    print(f"\n{fit(engine, samples).line()}")


def compact(values: dict[str, Any]) -> str:
    """JSON with a line for each pass."""
    passes = ",\n  ".join(json.dumps(row) for row in values["passes"])
    rest = json.dumps({key: value for key, value in values.items() if key != "passes"}, indent=1)
    return f'{rest[:-2]},\n "passes": [\n  {passes}\n ]\n}}\n'


def command_line(argv: Sequence[str]) -> list[str]:
    """To run the same again; where the results went is left out."""
    files = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("--out", "--json", "--plot"):
        files.add_argument(name)
    return ["python", "benchmarks/simulate.py", *files.parse_known_args(argv)[1]]


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    commands = parser.add_subparsers(dest="command", required=True)
    steps = commands.add_parser("measure", help="time passes of the real engine", allow_abbrev=False)
    steps.add_argument("model", nargs="?", default=MODEL, help="(%(default)s)")
    steps.add_argument("--shape", choices=SHAPES, help="instead of a model: random weights")
    steps.add_argument("--device", default="auto", help="(%(default)s)")
    steps.add_argument("--quantize", help="int4 or int8")
    steps.add_argument("--threads", type=int, help="of a CPU")
    steps.add_argument("--cache-memory", type=int, metavar="BYTES", help="(half of what is free)")
    steps.add_argument("--quick", action="store_true", help="a few passes, to see that everything runs")
    steps.add_argument("--out", type=Path, metavar="FILE", help="the report")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    parser, argv = make_parser(), sys.argv[1:] if argv is None else list(argv)
    args = parser.parse_args(argv)
    run_measure(args, command_line(argv))


if __name__ == "__main__":
    main()
