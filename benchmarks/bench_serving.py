"""`LLM` with many requests: each figure with its goal, a load curve, and whether texts are exact.

On a GPU: random weights in the shapes of published models. On a CPU: SmolLM2 in int4, with smaller loads.

start   extra seconds of a first run with nothing compiled (two fresh processes)
nano    nano-vllm's benchmark: 256 requests at once, output tokens per second
alone   decode speed of one request through `LLM`, relative to `generate`
gaps    the longest wait for a token while long prompts keep arriving, relative to a pass with a chunk of a prompt
prefix  requests with a common prefix, relative to requests without
llama   16 requests, relative to llama.cpp with the same 16 sequences in one batch (CPU, with llama-cpp-python)
load    Poisson arrivals at several rates: throughput and latencies, also as a plot

A few texts of each run are compared with those of `generate` for the same requests alone: the exit status is 1 if one
differs. Ratios within one run are reliable. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from gpu_report import Report, Row, command_line, goal_status
from gpu_shapes import SHAPES, NoText, build
from serving_load import (
    TIMEOUT_S,
    LoadRequest,
    Passes,
    gaps,
    latencies,
    make_requests,
    mixed,
    percentile,
    poisson,
    processor_seconds,
    roofline,
    same_alone,
    serve,
)
from serving_report import formatted, goal_row, plot, table_of

from infer.engine.generate import generate
from infer.engine.llm import LLM
from infer.engine.result import GenerationResult
from infer.evaluate.bench import check_plot, describe_machine, machine_line
from infer.machine import resolve_device
from infer.models.common import Decoder

STARTED = time.perf_counter()
MODEL = "smollm2-135m"
TEXT = Path(__file__).parents[1] / "docs" / "kv-cache.md"
NANO_GOALS = {"qwen3-0.6b": 30_000, "llama-1b": 55_000, "llama-8b": 11_000}  # tok/s on an H200
START_GOAL_S, ALONE_GOAL, GAP_GOAL, PREFIX_GOAL, LLAMA_GOAL = 15.0, 0.98, 2.0, 3.0, 1.5
MAX_OTHERS = 0.1  # CPU share of other programs that is reported if exceeded
Lengths = tuple[int, int]  # minimum and maximum number of tokens


@dataclass(frozen=True)
class Sizes:
    """Sizes of the measurements; by default those for a GPU."""

    nano: tuple[int, Lengths, Lengths] = (256, (100, 1024), (100, 1024))  # requests, their prompts, new tokens
    alone: tuple[int, int, int] = (256, 256, 7)  # prompt and new tokens, repeats
    gaps: tuple[int, int, int] = (32, 8000, 12)  # rows that decode, tokens of a long prompt, long prompts
    prefix: tuple[int, int, int, int, int] = (256, 1000, 32, 64, 3)  # requests, shared, own and new tokens, repeats
    llama: tuple[int, int, int, int] = (16, 64, 128, 3)  # requests, prompt and new tokens, repeats
    load: tuple[int, Lengths, Lengths] = (
        256,
        (100, 1024),
        (100, 1024),
    )  # requests that measure the maximum throughput; lengths
    rates: tuple[float, ...] = (0.25, 0.5, 0.75, 0.9, 1.1)  # fractions of that
    rate_s: float = 20.0  # seconds of arrivals at each rate
    sample: int = 4  # texts of each run that are compared with `generate`


GPU = Sizes()
CPU = Sizes(
    alone=(64, 128, 7),
    gaps=(8, 2048, 4),
    prefix=(16, 256, 16, 16, 3),
    load=(24, (32, 128), (32, 128)),
    rate_s=30.0,
    sample=3,
)
QUICK = Sizes(
    nano=(8, (4, 24), (4, 24)),
    alone=(8, 16, 2),
    gaps=(4, 400, 4),
    prefix=(4, 64, 4, 4, 1),
    load=(8, (4, 24), (4, 24)),
    rates=(0.5, 1.1),
    rate_s=0.2,
    sample=2,
)


@dataclass
class Setup:
    """What all items share."""

    shape: str
    model: Decoder
    tokenizer: Any
    llm: LLM
    sizes: Sizes
    runs: int  # of nano-vllm's benchmark
    judge: bool  # whether the goals for an H200 apply
    served: list[tuple[LoadRequest, GenerationResult]] = field(
        default_factory=list
    )  # compared with `generate` at the end

    def requests(self, count: int, prompts: Lengths, new: Lengths, **more: Any) -> list[LoadRequest]:
        return make_requests(self.model.config.vocab_size, count, prompts, new, **more)

    def sample(self, requests: Sequence[LoadRequest], results: Sequence[GenerationResult]) -> None:
        """Keep a few results, evenly spaced, for `exact`."""
        pairs = list(zip(requests, results, strict=True))
        self.served += pairs[:: max(1, len(pairs) // self.sizes.sample)][: self.sizes.sample]


def start(shape: str, device: torch.device, options: Sequence[str]) -> Row:
    """`nano` in a fresh process: with an empty kernel cache, and with a filled one."""
    command = [sys.executable, str(Path(__file__).resolve()), "--device", str(device), "--shape", shape]
    command += ["--only", "nano", "--runs", "1", *options]
    seconds = []
    with tempfile.TemporaryDirectory() as folder:
        caches = {"TRITON_CACHE_DIR": f"{folder}/triton", "INFER_CACHE": f"{folder}/infer"}
        for case in ("cold", "warm"):
            out = Path(folder) / f"{case}.json"
            done = subprocess.run(
                [*command, "--out", str(out)],
                env=os.environ | caches,
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
                check=False,
            )
            if done.returncode:
                raise RuntimeError(f"the {case} process ended with {done.returncode}: {done.stderr.strip()[-2000:]}")
            seconds.append(json.loads(out.read_text())["sections"]["nano"][0]["since_start_s"])
    added = seconds[0] - seconds[1]
    what = f"a first run with nothing compiled ({seconds[0]:.1f} s since the process began), less {seconds[1]:.1f}"
    goal = goal_status(added, START_GOAL_S, form=".0f", lower_is_better=True)
    return goal_row(shape, what, added, ".1f", " s", goal, seconds=seconds)


def nano(setup: Setup) -> Iterator[Row]:
    """The prompts of each run are new, so that none is in the prefix cache."""
    count, prompts, new = setup.sizes.nano
    goal = NANO_GOALS.get(setup.shape) if setup.judge else None
    for run in range(setup.runs):
        requests = setup.requests(count, prompts, new, seed=run)
        served = serve(setup.llm, requests)
        since_start_s = time.perf_counter() - STARTED
        setup.sample(requests, served.results)
        speed, ran = served.tokens_per_s, "the first run" if run == 0 else f"run {run + 1}"
        yield goal_row(
            setup.shape,
            f"{count} requests at once, {ran}: {served.tokens:,} tokens in {served.seconds:.2f} s",
            speed,
            ",.0f",
            " tok/s",
            goal_status(speed, goal, form=",.0f"),
            seconds=served.seconds,
            since_start_s=since_start_s,
            **latencies(served),
        )
        if setup.judge:
            limit = roofline(setup.model, requests)
            yield goal_row(setup.shape, f"  of the roofline, {limit:,.0f} tok/s", speed / limit, ".1%", limit=limit)


def alone(setup: Setup) -> Iterator[Row]:
    """Decode time is the time of a call without queue and prefill. The first repeat warms up."""
    prompt, new, repeats = setup.sizes.alone
    calls: dict[str, Callable[[LoadRequest], GenerationResult]] = {
        "LLM": lambda request: setup.llm.submit(request.prompt, request.params).result(TIMEOUT_S),
        "generate": lambda request: generate(setup.model, setup.tokenizer, request.prompt, request.params),
    }
    speeds: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(repeats + 1):
        [request] = setup.requests(1, (prompt, prompt), (new, new), seed=1000 + repeat, temperature=0.0)
        for name, call in calls.items():
            began = time.perf_counter()
            timing = call(request).timing
            seconds = time.perf_counter() - began - timing.queue_time_s - timing.prefill_time_s
            speeds[name] += [(new - 1) / seconds] if repeat else []
    ours, theirs = (statistics.median(found) for found in speeds.values())
    ratio = statistics.median(a / b for a, b in zip(*speeds.values(), strict=True))
    what = f"one request of {prompt} + {new} tokens: LLM ({ours:,.1f} tok/s, decode) to generate ({theirs:,.1f})"
    yield goal_row(setup.shape, what, ratio, ".3f", "", goal_status(ratio, ALONE_GOAL, form=".2f"), speeds=speeds)


def long_prompts(setup: Setup) -> Iterator[Row]:
    """At any time one long prompt is prefilled and another waits. The first warms up and is not counted."""
    rows, length, count = setup.sizes.gaps
    context, llm = setup.model.config.max_position_embeddings, setup.llm
    new = min(context, 8192) - 64
    requests = setup.requests(rows, (32, 64), (new, new), seed=2000)
    long = setup.requests(count + 1, (length, length), (1, 1), seed=2001)
    begin, pending = 0.0, deque[Any]()
    with Passes(llm) as passes:
        handles = [llm.submit(request.prompt, request.params) for request in requests]
        sequences = passes.wait_until_decoding(rows)
        for request in long:
            pending.append(llm.submit(request.prompt, request.params))
            if len(pending) > 2:
                pending.popleft().result(TIMEOUT_S)
                begin = begin or time.perf_counter()
        last = [handle.result(TIMEOUT_S) for handle in pending][-1]
        end = time.perf_counter()
        for handle in handles:
            handle.abort()
        setup.sample(requests, [handle.result(TIMEOUT_S) for handle in handles])
    setup.served.append((long[-1], last))
    chunks = mixed(event for event in passes.events if begin <= event.time <= end)
    chunk, found = statistics.median(event.seconds for event in chunks), gaps(sequences, begin, end)
    ratio = max(found) / chunk
    yield goal_row(
        setup.shape,
        f"{rows} rows beside prompts of {length:,}: longest gap ({max(found) * 1e3:,.1f} ms) to a pass with a chunk "
        f"({chunk * 1e3:,.1f})",
        ratio,
        ".2f",
        "",
        goal_status(ratio, GAP_GOAL, form=".1f", lower_is_better=True),
        longest_s=max(found),
        p99_s=percentile(found, 99),
        chunk_s=chunk,
        chunks=len(chunks),
        gaps=len(found),
    )


def prefix(setup: Setup) -> Iterator[Row]:
    """Alternating. The first repeat warms up."""
    count, shared, own, new, repeats = setup.sizes.prefix
    length = shared + own
    speeds: dict[str, list[float]] = {"shared": [], "separate": []}
    for repeat in range(repeats + 1):
        for i, (name, found) in enumerate(speeds.items()):
            requests = setup.requests(count, (length, length), (new, new), seed=3000 + 2 * repeat + i)
            if name == "shared":
                requests = [
                    LoadRequest(requests[0].prompt[:shared] + request.prompt[shared:], request.params)
                    for request in requests
                ]
            served = serve(setup.llm, requests)
            found += [served.tokens_per_s] if repeat else []
            if repeat == repeats:
                setup.sample(requests, served.results)
    together, separate = (statistics.median(found) for found in speeds.values())
    ratio = statistics.median(a / b for a, b in zip(*speeds.values(), strict=True))
    what = (
        f"{count} x {length:,} + {new} tokens: {shared:,} in common ({together:,.0f} tok/s) to none ({separate:,.0f})"
    )
    yield goal_row(setup.shape, what, ratio, ".2f", "", goal_status(ratio, PREFIX_GOAL, form=".1f"), speeds=speeds)


def llama(setup: Setup) -> Iterator[Row]:
    """Alternating with llama.cpp, which runs the same GGUF file, and a Q4_0 quantization of it."""
    from engines import llama_cpp_batch_engine, llama_cpp_quantized

    from infer.engine.text import encode_readable
    from infer.loader.find import open_checkpoint

    count, prompt, new, repeats = setup.sizes.llama
    path = open_checkpoint(MODEL).path
    with tempfile.TemporaryDirectory() as folder:
        files = {"the file": path, "Q4_0": llama_cpp_quantized(path, Path(folder) / "q4_0.gguf")}
        engines = {name: llama_cpp_batch_engine(file, count, prompt + new) for name, file in files.items()}
    ids = encode_readable(setup.tokenizer, TEXT.read_text(encoding="utf-8"))
    [greedy] = setup.requests(1, (1, 1), (new, new), temperature=0.0)
    ours: list[tuple[float, float]] = []  # seconds of a run, and of a step
    theirs: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
    same = dict.fromkeys(engines, 0)
    for repeat in range(repeats + 1):
        begins = [(repeat * count + i) * prompt for i in range(count)]
        requests = [LoadRequest(ids[begin : begin + prompt], greedy.params) for begin in begins]
        served = serve(setup.llm, requests)
        last = max(served.results, key=lambda result: result.timing.queue_time_s + result.timing.prefill_time_s)
        trials = {name: engine([request.prompt for request in requests], new) for name, engine in engines.items()}
        if repeat == 0:  # to warm up
            continue
        ours.append((served.seconds, statistics.fmean(last.timing.decode_times_s)))
        setup.sample(requests, served.results)
        for name, trial in trials.items():
            theirs[name].append((trial.seconds, trial.step_s))
            pairs = zip(trial.tokens, served.results, strict=True)
            same[name] += sum(tokens == result.token_ids for tokens, result in pairs)
    each = f"{count} x {prompt} + {new} tokens"
    for name, times in theirs.items():
        for i, (what, tokens) in enumerate((("with prompts", count * new), ("steps alone", count))):
            speed, other = (tokens / statistics.median(pair[i] for pair in some) for some in (ours, times))
            ratio = statistics.median(b[i] / a[i] for a, b in zip(ours, times, strict=True))
            yield goal_row(
                setup.shape,
                f"{each}, {what}: LLM ({speed:,.1f} tok/s) to llama.cpp, {name} ({other:,.1f})",
                ratio,
                ".2f",
                "",
                goal_status(ratio, LLAMA_GOAL, form=".1f"),
                seconds=[pair[i] for pair in ours],
                llama_cpp_seconds=[pair[i] for pair in times],
                same_texts=same[name],
                texts=count * repeats,
            )


def most_requests(setup: Setup) -> tuple[float, Row]:
    """Requests per second when all arrive at once, and the host's share of that time. The first run warms up."""
    count, prompts, new = setup.sizes.load
    serve(setup.llm, setup.requests(count, prompts, new, seed=4000))
    with Passes(setup.llm) as passes:
        served = serve(setup.llm, setup.requests(count, prompts, new, seed=4001))
    what = f"host between passes, for each row: {count} requests at once, {passes.rows():.0f} rows in a pass"
    return count / served.seconds, goal_row(setup.shape, what, passes.host_us(), ".2f", " us")


def load(setup: Setup, most: float) -> Iterator[Row]:
    _, prompts, new = setup.sizes.load
    for i, share in enumerate(setup.sizes.rates):
        rate = share * most
        count = max(8, round(rate * setup.sizes.rate_s))
        requests = setup.requests(count, prompts, new, seed=4100 + i)
        with Passes(setup.llm) as passes:
            served = serve(setup.llm, requests, poisson(rate, count, seed=4200 + i))
        setup.sample(requests, served.results)
        yield {
            "shape": setup.shape,
            "rate": rate,
            "share": share,
            "requests": count,
            "tokens_per_s": served.tokens_per_s,
            "rows": passes.rows(),
            "latest_s": max(served.late),
            **latencies(served),
        }


def exact(setup: Setup) -> Row:
    """Whether the kept results equal those of `generate` alone."""
    same = sum(same_alone(setup.model, setup.tokenizer, request, result) for request, result in setup.served)
    count = len(setup.served)
    what = f"of {count} texts from these runs: the tokens that `generate` gives alone"
    return goal_row(setup.shape, what, same, "d", "", goal_status(same, count, form="d"), texts=count)


ITEMS: dict[str, Callable[[Setup], Iterator[Row]]] = {
    "nano": nano,
    "alone": alone,
    "gaps": long_prompts,
    "prefix": prefix,
    "llama": llama,
}
NAMES = ("start", *ITEMS, "load")


def make_setup(shape: str, device: torch.device, sizes: Sizes, runs: int) -> Setup:
    if shape in SHAPES:
        model, tokenizer = build(shape, device, torch.bfloat16 if device.type == "cuda" else torch.float32), NoText()
    else:
        from infer.loader.load import load_model
        from infer.loader.tokenizer import Tokenizer

        model, tokenizer = load_model(shape, device=device, quantize="int4")[0], Tokenizer(shape)
    judge = "H200" in describe_machine(device)["name"]
    return Setup(shape, model, tokenizer, LLM(model, tokenizer), sizes, runs, judge)


def measure(setup: Setup, chosen: Sequence[str]) -> Iterator[tuple[str, Row]]:
    """Everything about one model: rows, and the sections that they belong to."""
    for name in chosen:
        for row in ITEMS[name](setup) if name in ITEMS else ():
            yield name, row
    if "load" in chosen:
        most, host = most_requests(setup)
        yield "host", host
        for row in load(setup, most):
            yield "load", row
    yield "exact", exact(setup)


def choose(args: argparse.Namespace, device: torch.device) -> list[str]:
    """The items to run: --only, or all that have goals on this device. Refuses invalid ones."""
    shapes, llama_cpp = args.shape or args.quick or device.type == "cuda", importlib.util.find_spec("llama_cpp")
    chosen = [name for name in NAMES if name in (args.only or NAMES)]
    if not args.only:
        left_out = {"llama"} if shapes or llama_cpp is None else set()
        left_out |= {"start"} if device.type == "cpu" else set()
        left_out |= {"nano"} if device.type == "cpu" and not args.quick else set()
        return [name for name in chosen if name not in left_out]
    if "llama" in chosen and (shapes or llama_cpp is None):
        raise ValueError("llama needs llama-cpp-python, and runs on a CPU with SmolLM2: leave --shape and --quick out")
    if "start" in chosen and not shapes:
        raise ValueError("start needs a --shape: a model would have to be fetched")
    if args.plot is not None and "load" not in chosen:
        raise ValueError("--plot draws the results of load: add it to --only")
    return chosen


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--device", default="auto", help="(%(default)s)")
    parser.add_argument("--shape", nargs="+", choices=SHAPES, help="random weights (llama-1b on a GPU)")
    parser.add_argument("--only", nargs="+", choices=NAMES, help="(all that have goals on the device)")
    parser.add_argument("--runs", type=int, default=2, help="of nano-vllm's benchmark (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="a tiny model and tiny loads, as a check")
    parser.add_argument("--out", type=Path, metavar="FILE", help="add the figures to this JSON file")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the load curve as a PNG")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    parser, argv = make_parser(), sys.argv[1:] if argv is None else argv
    args, command = parser.parse_args(argv), command_line("bench_serving.py", argv, "--out", "--plot")
    try:
        device = resolve_device(args.device)
        chosen = choose(args, device)
        if args.plot is not None:
            check_plot()
        for path in (args.out, args.plot):
            if path is not None and not path.parent.is_dir():
                raise ValueError(f"there is no folder {path.parent}")
        machine = describe_machine(device) | {"load_average": os.getloadavg()[0]}
        report = Report(machine, command, args.out, "serving")
    except (ValueError, OSError, ImportError) as error:
        parser.error(str(error))
    sizes = QUICK if args.quick else GPU if device.type == "cuda" else CPU
    shapes = args.shape or ["tiny" if args.quick else "llama-1b" if device.type == "cuda" else MODEL]
    print(f"{machine_line(machine)}, load average before: {machine['load_average']:.2f}")
    print(f"$ {shlex.join(command)}\n", flush=True)
    passed, others, before = True, [0.0], processor_seconds()

    def report_row(section: str, row: Row) -> None:
        nonlocal before
        busy_s, all_s = (b - a for a, b in zip(before, processor_seconds(), strict=True))
        if all_s > 1:  # rows measured together share one value
            others.append(busy_s / all_s)
            before = processor_seconds()
        row["others"] = others[-1]  # other programs' share of the processors
        report.add(section, row)
        print(table_of(section).line(row), flush=True)

    for shape in shapes:
        if "start" in chosen:  # while the device's memory is free
            report_row("start", start(shape, device, ["--quick"] if args.quick else []))
        setup = make_setup(shape, device, sizes, args.runs)
        with setup.llm:
            for section, row in measure(setup, chosen):
                report_row(section, row)
                passed &= section != "exact" or row["figure"] == row["texts"]
        del setup
        gc.collect()
        torch.cuda.empty_cache()
    print(f"\n{formatted(report.values)}")
    if device.type == "cpu" and max(others) > MAX_OTHERS:
        print(f"Other programs took up to {max(others):.0%} of the processors: run it again.")
    if args.plot is not None:
        plot(report.values, args.plot)
    if not passed:
        sys.exit("a text differs from that of `generate` alone")


if __name__ == "__main__":
    main()
