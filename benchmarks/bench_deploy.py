"""The overhead of Ray for one replica, the gain of a second replica, and the effect of routing by prefix.

overhead   one replica under `infer deploy`, and `infer serve`, alternating: milliseconds to the first token and
           tokens per second, of one stream and of several
scale      streams that two replicas share, and one replica alone, alternating: tokens per second
prefixes   repeated questions about documents: the share of prompt tokens that were in a cache, with
           routing by prefix and without

Figures are medians over the rounds. Each server computes on --threads threads. Without three more cores, Ray's
processes and the clients take CPU time from the engines.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import shlex
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from gpu_report import Report, Row, command_line, goal_status
from http_client import Response, ServerProcess, connected, request_once
from serving_report import GOALS, goal_row

from infer.evaluate.bench import describe_machine, machine_line

MODEL = "smollm2-135m"
FIRST_GOAL_MS, SPEED_GOAL, TOKENS = 10.0, 0.9, 64
STREAMS, SHARED = 8, (16, 64)  # of one replica, and of two
DOCUMENTS, QUESTIONS = 8, ("Who?", "When?", "Where?", "Why?")
DEPLOY = [sys.executable, "-c", "import sys; from infer.cli import main; main(['deploy', *sys.argv[1:]])"]


class Measured:
    """Times of streams that started at once."""

    def __init__(self, responses: Sequence[Response]) -> None:
        if any(response.failed for response in responses):
            raise RuntimeError("a stream ended early")
        self.first_s = statistics.median(response.token_times[0] - response.sent for response in responses)
        seconds = max(response.times[-1] for response in responses) - min(response.sent for response in responses)
        self.tokens_per_s = len(responses) * TOKENS / seconds


class Benchmark:
    def __init__(self, args: argparse.Namespace) -> None:
        self.model, self.rounds, self.shape = args.model, args.rounds, Path(args.model).name
        self.options = [args.model, "--threads", str(args.threads), "--cache-memory", "500MB"]
        self.options += ["--quantize", args.quantize] if args.quantize else []

    def deployed(self, replicas: int, *more: str) -> ServerProcess:
        return ServerProcess([*self.options, "--replicas", str(replicas), *more], DEPLOY)

    def row(self, what: str, figure: float, form: str, unit: str = "", goal: str = "", **more: float) -> Row:
        return goal_row(self.shape, what, figure, form, unit, goal, **more)

    def overhead(self) -> Iterator[Row]:
        with ServerProcess(self.options) as plain, self.deployed(1) as ray:
            for count in (1, STREAMS):
                served, through_ray = self.alternate([plain.port, ray.port], count)
                streams = "one stream" if count == 1 else f"{count} streams"
                first = median(through_ray, first_ms) - median(served, first_ms)
                yield self.row(
                    f"that Ray adds to the first token, {streams} (infer serve: {median(served, first_ms):.1f} ms)",
                    first,
                    ".1f",
                    " ms",
                    goal_status(first, FIRST_GOAL_MS, form=".0f", lower_is_better=True) if count == 1 else "",
                    first_ms=median(served, first_ms),
                )
                speed = median(through_ray, tokens_per_s) / median(served, tokens_per_s)
                yield self.row(
                    f"tokens per second through Ray, {streams} (infer serve: {median(served, tokens_per_s):.0f})",
                    speed,
                    ".2f",
                    "x",
                    goal_status(speed, SPEED_GOAL),
                    tokens_per_s=median(served, tokens_per_s),
                )

    def scale(self) -> Iterator[Row]:
        with self.deployed(1) as single, self.deployed(2) as double:
            for count in SHARED:
                one, two = self.alternate([single.port, double.port], count)
                yield self.row(
                    f"tokens per second of two replicas to one, {count} streams (one: {median(one, tokens_per_s):.0f})",
                    median(two, tokens_per_s) / median(one, tokens_per_s),
                    ".2f",
                    "x",
                    tokens_per_s=median(one, tokens_per_s),
                )

    def prefixes(self) -> Iterator[Row]:
        for words, *more in (("with routing by prefix",), ("without", "--no-prefix-routing")):
            with self.deployed(2, *more) as server:
                rate = asyncio.run(self.hit_rate(server.port))
            yield self.row(f"of prompt tokens were in a cache, {words}", rate, ".0%")

    def alternate(self, ports: Sequence[int], count: int) -> list[list[Measured]]:
        measured: list[list[Measured]] = [[] for _ in ports]
        for number in range(self.rounds + 1):
            for port, found in zip(ports, measured, strict=True):
                found.append(Measured(asyncio.run(self.streams(port, count, number))))
        return [found[1:] for found in measured]  # the first round warms up

    async def streams(self, port: int, count: int, number: int) -> list[Response]:
        async def one(i: int) -> Response:
            async with connected(port) as connection:
                return await connection.request(
                    "/v1/completions", self.body(f"In round {number}, for stream {i},", TOKENS)
                )

        return list(await asyncio.gather(*(one(i) for i in range(count))))

    async def hit_rate(self, port: int) -> float:
        for question in QUESTIONS:
            for document in range(DOCUMENTS):
                prompt = f"Report {document}. " + f"It tells of {document} ships and the sea. " * 60 + question
                async with connected(port) as connection:
                    await connection.request("/v1/completions", self.body(prompt, 1))
        text = (await request_once(port, "/metrics")).body.decode()
        hits, queries = (
            sum(map(float, re.findall(rf"^infer:prefix_cache_{name}_total{{.*}} (.*)$", text, re.MULTILINE)))
            for name in ("hits", "queries")
        )
        return hits / queries

    def body(self, prompt: str, tokens: int) -> dict[str, object]:
        body = {"model": self.shape, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
        return {**body, "stream": True, "ignore_eos": True}


def first_ms(measured: Measured) -> float:
    return measured.first_s * 1e3


def tokens_per_s(measured: Measured) -> float:
    return measured.tokens_per_s


def median(found: Sequence[Measured], of: Callable[[Measured], float]) -> float:
    return statistics.median(map(of, found))


PARTS = {"overhead": Benchmark.overhead, "scale": Benchmark.scale, "prefixes": Benchmark.prefixes}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--model", default=MODEL, help="(%(default)s)")
    parser.add_argument("--quantize", default="int4", help="empty for none (%(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="of a replica (%(default)s)")
    parser.add_argument("--rounds", type=int, default=9, help="(%(default)s)")
    parser.add_argument("--only", nargs="+", choices=PARTS, help="(everything)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="add the figures to this JSON file")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    parser, argv = make_parser(), sys.argv[1:] if argv is None else list(argv)
    args = parser.parse_args(argv)
    command = command_line("bench_deploy.py", argv, "--json")
    machine = describe_machine(torch.device("cpu")) | {"load_average": os.getloadavg()[0]}
    report = Report(machine, command, args.json, "deploy")
    print(f"{machine_line(machine)}, load average before: {machine['load_average']:.2f}\n$ {shlex.join(command)}\n")
    print(GOALS.header(), flush=True)
    benchmark = Benchmark(args)
    for name in args.only or PARTS:
        for row in PARTS[name](benchmark):
            report.add(name, row)
            print(GOALS.line(row), flush=True)


if __name__ == "__main__":
    main()
