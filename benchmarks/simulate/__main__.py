"""Simulate many replicas: measured step times, an arrival trace and a router give latencies and cost.

measure   time passes of the real engine on this machine, and write them to a report file
run       simulate replicas with such a report: percentiles, goodput, cost per million tokens
check     send the same trace to real servers, and compare the results with the simulation
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the modules of benchmarks/ when run as a folder

from gpu_report import Column, Report, Row, Table, command_line
from gpu_shapes import SHAPES, NoText, build
from serving_load import processor_seconds

from infer.deploy.prefixes import MAX_CHUNKS
from infer.engine.llm import LLM
from infer.evaluate.bench import check_plot, describe_machine, machine_line
from infer.machine import resolve_device
from simulate.check import CHECKED, Check, measured_steps, rows_of
from simulate.cluster import ROUTERS, Cluster, run
from simulate.steps import (
    CPU,
    GPU,
    QUICK,
    Sample,
    StepReport,
    engine_of,
    fit,
    measure,
    merged,
    read_report,
    report_values,
)
from simulate.traces import SYNTHETIC, Arrival, Shape, at_rate, fitted, read_trace, synthetic

MODEL = "smollm2-135m"
WARM_UP = 0.2  # fraction of a run whose tokens are not counted
RUNS = Table(
    "Simulated",
    (
        Column("router", "router", 12),
        Column("replicas", "replicas", 9, ",d"),
        Column("req/s", "rate", 9, ",.1f"),
        Column("requests", "requests", 10, ",d"),
        Column("tok/s", "tokens_per_s", 12, ",.0f"),
        Column("first ms", "first_p50_s", 10, ",.0f", 1e3),
        Column("p90", "first_p90_s", 9, ",.0f", 1e3),
        Column("p99", "first_p99_s", 9, ",.0f", 1e3),
        Column("between", "between_p50_s", 9, ",.1f", 1e3),
        Column("p99", "between_p99_s", 8, ",.1f", 1e3),
        Column("whole s", "whole_p50_s", 9, ",.1f"),
        Column("p99", "whole_p99_s", 8, ",.1f"),
        Column("good", "good", 7, ".0%"),
        Column("good/s", "goodput", 9, ",.1f"),
        Column("busy", "busy", 6, ".0%"),
        Column("cached", "hits", 8, ".0%"),
        Column("429", "refused", 7, ",d"),
        Column("$/M tok", "cost", 9, ".3f"),
        Column("took s", "took_s", 8, ".1f"),
    ),
    "first: from a request's arrival to its first token; between: two tokens of a request; whole: to the last token; "
    "p50, p90, p99.\ngood: requests whose first token, and whose tokens on average, came soon enough. busy: replicas, "
    "of the time. cached: of prompt\ntokens. $/M tok: for a million output tokens. took: the simulation.",
)


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
    before = processor_seconds()
    with open_llm(args, device) as llm:
        engine = engine_of(llm)
        for what, found in measure(llm, grid):
            samples += merged(found)
            seconds, host = sum(sample.seconds for sample in found), sum(sample.host for sample in found)
            print(f"{what}: {len(found)} passes, {seconds:.1f} s, host {host / max(seconds, 1e-9):.1%}", flush=True)
            values: dict[str, Any] = {"benchmark": "steps", "machine": machine, "commands": [shlex.join(command)]}
            values |= report_values(engine, args.shape or args.model, samples)
            values["date"] = datetime.now(UTC).isoformat(timespec="seconds")
            if args.out is not None:  # after each load, so that an interrupt loses little
                args.out.write_text(compact(values))
    others_s, all_s = (b - a for a, b in zip(before, processor_seconds(), strict=True))
    print(f"\n{fit(engine, samples).line()}; other programs took {others_s / max(all_s, 1e-9):.0%} of the processors")


def compact(values: dict[str, Any]) -> str:
    """JSON with a line for each pass."""
    passes = ",\n  ".join(json.dumps(row) for row in values["passes"])
    rest = json.dumps({key: value for key, value in values.items() if key != "passes"}, indent=1)
    return f'{rest[:-2]},\n "passes": [\n  {passes}\n ]\n}}\n'


def trace_for(args: argparse.Namespace, read: Sequence[Arrival], engine_context: int, replicas: int) -> list[Arrival]:
    """The requests of a file, or synthetic ones whose number and rate grow with the replicas."""
    if read:
        return at_rate(read, args.rate * replicas) if args.rate else list(read)
    shape = Shape(
        tuple(args.prompt),
        tuple(args.output),
        chats=args.chats,
        documents=args.documents,
        document=tuple(args.document),
        context=min(engine_context, args.context),
    )
    return synthetic(args.trace, args.rate * replicas, args.requests * replicas, shape, args.seed)


def run_rows(args: argparse.Namespace, report: StepReport, read: Sequence[Arrival]) -> Iterator[Row]:
    engine = replace(report.engine, **({"pages": args.cache_tokens // report.engine.page} if args.cache_tokens else {}))
    steps = fit(engine, report.samples).steps
    for replicas in args.replicas:
        arrivals = trace_for(args, read, engine.context, replicas)
        for router in args.router:
            began = time.perf_counter()
            cluster = Cluster(
                steps,
                replicas,
                router,
                report.front_s if args.front_ms is None else args.front_ms / 1e3,
                args.max_waiting,
                chunks=args.router_chunks,
                seed=args.seed,
            )
            figures = run(cluster, arrivals).figures(args.ttft, args.tpot, args.price, WARM_UP)
            rate = len(arrivals) / max(arrivals[-1].time, 1e-9)
            yield figures | {"shape": report.model, "rate": rate, "took_s": time.perf_counter() - began}


def run_simulation(
    args: argparse.Namespace, command: Sequence[str], report: StepReport, read: Sequence[Arrival]
) -> None:
    kept = Report(dict(report.machine), command, None, "simulate")
    kept.path = args.json  # overwritten
    print(f"{report.model}: {machine_line(dict(report.machine))}\n$ {shlex.join(command)}")
    print(f"step times: {fit(report.engine, report.samples).line()}\n\n{RUNS.header()}", flush=True)
    for row in run_rows(args, report, read):
        kept.add("run", row)
        print(RUNS.line(row), flush=True)
    print(RUNS.note)
    if args.plot is not None:
        plot(kept.values["sections"]["run"], f"{report.model}: {machine_line(dict(report.machine))}", args.plot)


def plot(rows: Sequence[Row], title: str, path: Path) -> None:
    """Plot figures against the number of replicas, a line per router."""
    from matplotlib.figure import Figure

    panels = (
        ("ms to the first token: p50, p99 (dashed)", (("first_p50_s", "-"), ("first_p99_s", "--")), 1e3),
        ("ms between tokens, p99", (("between_p99_s", "-"),), 1e3),
        ("% of prompt tokens cached", (("hits", "-"),), 100),
        ("% of requests that came soon enough", (("good", "-"),), 100),
    )
    figure = Figure(figsize=(10, 7), dpi=150, layout="constrained")
    counts = sorted({row["replicas"] for row in rows})
    for axes, (label, lines, scale) in zip(figure.subplots(2, 2).flat, panels, strict=True):
        for router, color in zip(ROUTERS, ("#999999", "#cc79a7", "#e69f00", "#d55e00", "#0072b2"), strict=True):
            own = [row for row in rows if row["router"] == router]
            for key, style in lines if own else ():
                values = [row[key] * scale for row in own]
                name = router if style == "-" else None
                axes.plot([row["replicas"] for row in own], values, style, marker="o", ms=4, color=color, label=name)
        axes.set_xscale("log")
        axes.set_xticks(counts, [f"{count:,}" for count in counts])
        axes.xaxis.minorticks_off()
        axes.set_ylabel(label)
        axes.set_xlabel("replicas")
        if len(lines) > 1:
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter("{x:,.0f}")
            axes.yaxis.set_minor_formatter("{x:,.0f}")
            axes.legend(frameon=False)
        else:
            axes.set_ylim(bottom=0)
        axes.grid(True, alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, format="png")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmarks/simulate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    steps = commands.add_parser("measure", help="time passes of the real engine", allow_abbrev=False)
    steps.add_argument("model", nargs="?", default=MODEL, help="(%(default)s)")
    steps.add_argument("--shape", choices=SHAPES, help="instead of a model: random weights")
    steps.add_argument("--device", default="auto", help="(%(default)s)")
    steps.add_argument("--quantize", help="int4 or int8")
    steps.add_argument("--threads", type=int, help="of a CPU")
    steps.add_argument("--cache-memory", type=int, metavar="BYTES", help="(half of what is free)")
    steps.add_argument("--quick", action="store_true", help="a few passes, as a check")
    steps.add_argument("--out", type=Path, metavar="FILE", help="the report")
    add_check(commands.add_parser("check", help="compare with real servers", allow_abbrev=False))
    add_run(commands.add_parser("run", help="simulate replicas", allow_abbrev=False))
    return parser


def add_check(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", nargs="?", default=MODEL, help="(%(default)s)")
    add("--quantize", default="int4", help="empty for none (%(default)s)")
    add("--threads", type=positive(int), default=1, help="of a replica (%(default)s)")
    add("--replicas", type=positive(int), nargs="+", default=[1, 2], help="(%(default)s)")
    add("--trace", choices=SYNTHETIC, default="poisson", help="(%(default)s)")
    add("--router", choices=ROUTERS, default="prefix", help="(%(default)s)")
    add("--shares", type=positive(float), nargs="+", default=[0.35, 0.7], help="of what is possible (%(default)s)")
    add("--seconds", type=positive(float), default=40.0, help="of each trace (%(default)s)")
    add("--quick", action="store_true", help="few step times, as a check")
    add("--json", type=Path, metavar="FILE", help="add the figures to this JSON file")


def run_check(args: argparse.Namespace, command: Sequence[str]) -> None:
    machine = describe_machine(torch.device("cpu")) | {"load_average": os.getloadavg()[0], "threads": args.threads}
    report = Report(machine, command, args.json, "simulate-check")
    print(f"{machine_line(machine)}, load average before: {machine['load_average']:.2f}\n$ {shlex.join(command)}")
    names = ("model", "quantize", "threads", "seconds", "shares", "trace", "router", "quick")
    check = Check(**{name: getattr(args, name) for name in names})
    steps = measured_steps(check)
    for replicas in args.replicas:
        for i, row in enumerate(rows_of(check, steps, replicas)):
            report.add("check", row)
            print(CHECKED.line(row) if i else f"{CHECKED.header()}\n{CHECKED.line(row)}", flush=True)
    print(CHECKED.note)


def add_run(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--steps", type=Path, required=True, metavar="FILE", help="a report of `measure`")
    add(
        "--trace",
        default="bursts",
        help="bursts, poisson, or a file: .csv as Azure's, .jsonl as Mooncake's (%(default)s)",
    )
    add(
        "--rate", type=positive(float), help="requests per second for each replica; of a file: instead of its own times"
    )
    add("--requests", type=positive(int), default=200, help="for each replica, if not from a file (%(default)s)")
    add("--replicas", type=positive(int), nargs="+", default=[1, 4, 16], help="(%(default)s)")
    add("--router", choices=ROUTERS, nargs="+", default=["prefix", "two-choices"], help="(%(default)s)")
    add(
        "--prompt",
        type=positive(float),
        nargs=2,
        default=Shape.prompt,
        metavar=("MEDIAN", "SPREAD"),
        help="tokens %(default)s",
    )
    add(
        "--output",
        type=positive(float),
        nargs=2,
        default=Shape.output,
        metavar=("MEDIAN", "SPREAD"),
        help="tokens %(default)s",
    )
    add(
        "--document",
        type=positive(float),
        nargs=2,
        default=Shape.document,
        metavar=("MEDIAN", "SPREAD"),
        help="%(default)s",
    )
    add("--chats", type=float, default=Shape.chats, help="share of requests in chats (%(default)s)")
    add("--documents", type=float, default=Shape.documents, help="share of requests about documents (%(default)s)")
    add("--context", type=positive(int), default=Shape.context, help="most tokens of a request (%(default)s)")
    add(
        "--ttft",
        type=positive(float),
        default=1.0,
        help="seconds to the first token that are good enough (%(default)s)",
    )
    add(
        "--tpot",
        type=positive(float),
        default=0.1,
        help="mean seconds between tokens that are good enough (%(default)s)",
    )
    add("--price", type=float, default=0.0, help="dollars for an hour of a replica (%(default)s)")
    add("--front-ms", type=float, help="that router and server add to the first token (as the report says)")
    add("--max-waiting", type=int, default=512, help="requests that may wait for a replica (%(default)s)")
    add("--cache-tokens", type=positive(int), help="that a replica's memory holds (as the report says)")
    add(
        "--router-chunks",
        type=positive(int),
        default=MAX_CHUNKS,
        help="chunks of prompts that `prefix` remembers (%(default)s)",
    )
    add("--seed", type=int, default=0, help="(%(default)s)")
    add("--json", type=Path, metavar="FILE", help="keep the figures")
    add("--plot", type=Path, metavar="FILE", help="draw them as a PNG")


class positive:
    """A type of arguments."""

    def __init__(self, kind: type[int] | type[float]) -> None:
        self._kind = kind

    def __call__(self, text: str) -> float:
        value = self._kind(text)
        if value <= 0:
            raise argparse.ArgumentTypeError(f"{text} is not more than 0")
        return value


def main(argv: Sequence[str] | None = None) -> None:
    parser, argv = make_parser(), sys.argv[1:] if argv is None else list(argv)
    args, command = parser.parse_args(argv), command_line("simulate", argv, "--out", "--json", "--plot")
    try:
        for name in ("out", "json", "plot"):
            path = getattr(args, name, None)
            if path is not None and not path.parent.is_dir():
                raise ValueError(f"there is no folder {path.parent}")
        if args.command == "run":
            report, read = read_inputs(args)
    except (ValueError, OSError, ImportError) as error:
        parser.error(str(error))
    if args.command == "measure":
        run_measure(args, command)
    elif args.command == "check":
        run_check(args, command)
    else:
        run_simulation(args, command, report, read)


def read_inputs(args: argparse.Namespace) -> tuple[StepReport, list[Arrival]]:
    """The step report, and the requests of a trace file (none for a synthetic trace)."""
    if args.plot is not None:
        check_plot()
    report, read = read_report(args.steps), list[Arrival]()
    if args.trace not in SYNTHETIC:
        read, too_long = fitted(read_trace(Path(args.trace)), report.engine.context)
        if too_long:
            print(f"{too_long:,} requests are skipped: a context has {report.engine.context:,} tokens", file=sys.stderr)
    elif args.rate is None:
        raise ValueError("--rate is missing: requests per second for each replica")
    return report, read


if __name__ == "__main__":
    main()
