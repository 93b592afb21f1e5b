"""The simulation against real servers: the same requests at the same times, and the ratio of the figures.

Step times are measured in the same run, with as many threads as each replica has. Then servers are started, and what
HTTP and the clients of this process cost is measured with one stream and with several: seconds more to the first token,
and how passes compare with the fitted steps, as a line. Replicas of one machine share its cores with each other and
with the clients: that line is taken with one server busy and with all of them, and the simulation takes what lies
between, by the share of the time that its replicas are busy. The traces that are compared come after that.

One replica is `infer serve`. Several are `infer deploy` where Ray is installed; else as many `infer serve`, and this
process routes by the rules that the simulation has.
"""

from __future__ import annotations

import asyncio
import importlib.util
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from bench_deploy import DEPLOY
from gpu_report import Column, Row, Table, goal_status
from http_client import Response, ServerProcess, request_once
from serving_load import processor_seconds

from simulate.cluster import PERCENTS, ROUTERS, Cluster, run
from simulate.steps import Pass, Steps, fit, pairs, read_report
from simulate.traces import Arrival, Part, Shape, synthetic

GOAL = 0.15
SHAPE = Shape((16, 0.6), (24, 0.5), chats=0.3, documents=0.3, document=(80, 0.4), think_s=5, asked=10, context=1024)
STREAMS, TOKENS, PROMPT, ROUNDS = 5, 40, 32, 4  # of the streams that the front is measured with
PATH = "/v1/completions"
TIMES = ("first", "between")
CACHED = ("hits", "queries")  # of the metrics
CACHE = 10**9  # bytes of a replica
CHECKED = Table(
    "Simulated, and measured",
    (
        Column("replicas", "replicas", 9, "d"),
        Column("req/s", "rate", 7, ".2f"),
        Column("requests", "requests", 10, "d"),
        Column("  ", "what", 28),
        Column("measured", "measured", 11, ",.1f"),
        Column("simulated", "simulated", 11, ",.1f"),
        Column("ratio", "ratio", 8, ".3f"),
        Column("others", "others", 8, ".0%"),
    ),
    "others: the share of the processors that other programs took.",
)


@dataclass(frozen=True)
class Check:
    model: str
    quantize: str | None
    threads: int
    seconds: float  # of each trace
    shares: Sequence[float]  # of the requests per second that the simulation says are possible
    trace: str = "poisson"
    router: str = "prefix"
    quick: bool = False

    @property
    def name(self) -> str:
        return Path(self.model).name

    @property
    def options(self) -> list[str]:
        quantize = ["--quantize", self.quantize] if self.quantize else []
        return [self.model, *quantize, "--threads", str(self.threads), "--cache-memory", str(CACHE)]


def rows_of(check: Check, steps: Steps, replicas: int, say: Callable[[str], object] = print) -> Iterator[Row]:
    with ExitStack() as stack:
        processes, ports, what = start(check, replicas, stack)
        servers = Servers(check, ports, random.Random(0))
        front = asyncio.run(servers.front(steps))
        say(
            f"\n{what}: HTTP adds {front.first_s * 1e3:.1f} ms to the first token; "
            f"passes take {front.alone}; while all are busy {front.together}"
        )
        rates = capacity(check, PacedSteps(steps, front.together), replicas)
        for seed, share in enumerate(check.shares, 1):
            rate = share * rates
            requests = max(8, round(rate * check.seconds))
            arrivals = own_answers(synthetic(check.trace, rate, requests, SHAPE, seed))
            before = asyncio.run(servers.cached())
            busy = others_s(processes)
            responses = asyncio.run(servers.send(arrivals))
            others = np.subtract(others_s(processes), busy)
            hits, tokens = np.subtract(asyncio.run(servers.cached()), before)
            measured = figures(arrivals, responses) | {"hits": hits / tokens}
            on_paper = simulated(check, steps, front, replicas, arrivals)
            for row in compared(replicas, rate, measured, on_paper):
                yield row | {"others": others[0] / others[1]}


def simulated(check: Check, steps: Steps, front: Front, replicas: int, arrivals: Sequence[Arrival]) -> dict[str, Any]:
    """Replicas slow each other down while they are busy at once: how often they are comes from the simulation."""
    found: dict[str, Any] = {"busy": 0.0}
    for _ in range(ROUNDS):
        pace = Pace(*(a + (b - a) * found["busy"] for a, b in zip(front.alone, front.together, strict=True)))
        found = run(Cluster(PacedSteps(steps, pace), replicas, check.router, front.first_s), arrivals).figures(1, 1)
    return found


def measured_steps(check: Check, say: Callable[[str], object] = print) -> Steps:
    """Measured in a separate process, like the servers."""
    command = [sys.executable, str(Path(__file__).parent), "measure", *check.options]
    with tempfile.TemporaryDirectory() as folder:
        path, began = Path(folder) / "steps.json", time.perf_counter()
        options = ["--device", "cpu", *(["--quick"] if check.quick else []), "--out", str(path)]
        subprocess.run([*command, *options], stdout=subprocess.DEVNULL, check=True, timeout=600)
        report = read_report(path)
    found = fit(report.engine, report.samples)
    say(f"step times in {time.perf_counter() - began:.0f} s, {found.line()}")
    return found.steps


class Pace(NamedTuple):
    """Pass times of a server as a linear function of fitted step times."""

    factor: float
    more_s: float

    def __str__(self) -> str:
        return f"{self.factor:.2f} x their time and {self.more_s * 1e3:.1f} ms"

    @classmethod
    def through(cls, fitted: Sequence[float], measured: Sequence[float]) -> Pace:
        """A line through two points; if its intercept is negative, a line through 0 and the second point."""
        factor = (measured[1] - measured[0]) / (fitted[1] - fitted[0])
        more = measured[0] - factor * fitted[0]
        return cls(factor, more) if more >= 0 else cls(measured[1] / fitted[1], 0.0)


class Front(NamedTuple):
    """The overhead of a server over its engine."""

    first_s: float  # that it adds to the first token
    alone: Pace  # while other servers are idle
    together: Pace  # while all are busy


class PacedSteps(Steps):
    def __init__(self, steps: Steps, pace: Pace) -> None:
        self.engine, self._steps, self._pace = steps.engine, steps, pace

    def seconds(self, made_of: Pass) -> float:
        return self._steps.seconds(made_of) * self._pace.factor + self._pace.more_s


def start(check: Check, replicas: int, stack: ExitStack) -> tuple[list[ServerProcess], list[int], str]:
    """Processes, ports of all replicas, and a description. Behind a common port, Ray routes."""
    if replicas > 1 and importlib.util.find_spec("ray") is not None:
        server = stack.enter_context(ServerProcess([*check.options, "--replicas", str(replicas)], DEPLOY))
        return [server], [server.port] * replicas, f"infer deploy, {replicas} replicas"
    servers = [stack.enter_context(ServerProcess(check.options)) for _ in range(replicas)]
    what = "infer serve" if replicas == 1 else f"{replicas} x infer serve"
    return servers, [server.port for server in servers], what


def others_s(processes: Sequence[ServerProcess]) -> tuple[float, float]:
    """Seconds that other programs have computed so far, and that all processors had."""
    others, every = processor_seconds()
    return others - sum(process.processor_s()[1] for process in processes), every


class Servers:
    """Sends requests to servers that run."""

    def __init__(self, check: Check, ports: Sequence[int], draw: random.Random) -> None:
        self._check, self._ports, self._keys = check, list(ports), count(10**9)
        self._router = ROUTERS[check.router](len(ports), draw)

    async def front(self, steps: Steps) -> Front:
        """Measure one stream and several, to one server, then to all. The first round warms up."""
        fitted = [steps.seconds(Pass(n, n * (PROMPT + TOKENS // 2))) for n in (1, STREAMS)]
        prompt = steps.seconds(Pass(tokens=PROMPT, pairs=pairs(PROMPT, PROMPT), prompts=1, begun=1))
        cases = [(streams, servers) for servers in (1, None) for streams in (1, STREAMS)]
        firsts, gaps = list[float](), [list[float]() for _ in cases]
        for number in range(ROUNDS + 1):
            for found, case in zip(gaps, cases, strict=True):
                responses = await self._streams(*case)
                found += [step_of(response) for response in responses if number]
                firsts += [
                    response.token_times[0] - response.sent - prompt
                    for response in responses
                    if number and case == (1, 1)
                ]
        middle = [statistics.median(found) for found in gaps]
        paces = Pace.through(fitted, middle[:2]), Pace.through(fitted, middle[2:])
        return Front(max(0.0, statistics.median(firsts)), *paces)

    async def _streams(self, count: int, servers: int | None) -> list[Response]:
        """`count` streams to each of the first servers, all at once."""
        ports = self._ports[:servers] * count
        arrivals = [Arrival(0.0, (Part(next(self._keys), PROMPT),), TOKENS, 0) for _ in ports]
        asked = time.perf_counter()
        responses = await asyncio.gather(
            *(request_once(p, PATH, self._body(a)) for p, a in zip(ports, arrivals, strict=True))
        )
        for response in responses:
            response.sent = asked
        return list(responses)

    async def send(self, arrivals: Sequence[Arrival]) -> list[Response]:
        """Send each request when it is due, over a new connection. Latencies count from the due time."""
        queues = np.zeros(len(self._ports), np.int64)
        begin = time.perf_counter() + 0.05

        async def one(arrival: Arrival) -> Response:
            body = self._body(arrival)
            await asyncio.sleep(begin + arrival.time - time.perf_counter())
            which = self._router.choose(arrival, queues, 1 << 30)
            queues[which] += 1
            try:
                response = await request_once(self._ports[which], PATH, body)
            finally:
                queues[which] -= 1
            if response.failed:
                raise RuntimeError(f"a stream ended early: status {response.status}")
            response.sent = begin + arrival.time
            return response

        return list(await asyncio.gather(*map(one, arrivals)))

    async def cached(self) -> tuple[float, float]:
        """Cached prompt tokens, and all prompt tokens, so far."""
        text = "".join([(await request_once(port, "/metrics")).body.decode() for port in {*self._ports}])
        found = [
            re.findall(rf"^infer:prefix_cache_{name}_total(?:{{.*}})? (.*)$", text, re.MULTILINE) for name in CACHED
        ]
        return sum(map(float, found[0])), sum(map(float, found[1]))

    def _body(self, arrival: Arrival) -> dict[str, Any]:
        prompt = [token for part in arrival.parts for token in tokens_of(part)]
        settings = {"max_tokens": arrival.output, "temperature": 0.6, "seed": 1, "ignore_eos": True, "stream": True}
        return {"model": self._check.name, "prompt": prompt, **settings}


def step_of(response: Response) -> float:
    """Seconds between tokens in the middle of a stream, when all others decode too."""
    times = response.token_times
    begin, end = len(times) // 3, len(times) * 5 // 6
    return (times[end] - times[begin]) / (end - begin)


def tokens_of(part: Part) -> list[int]:
    """Random tokens that depend on the key alone."""
    draw = random.Random(part.key)
    return [draw.randrange(1000, 10_000) for _ in range(part.tokens)]


def own_answers(arrivals: Sequence[Arrival]) -> list[Arrival]:
    """Continue chats with random answers: the answers of the model are unknown when the trace is drawn."""
    return [arrival._replace(answer=-arrival.answer) for arrival in arrivals]


def capacity(check: Check, steps: Steps, replicas: int) -> float:
    """Simulated requests per second when all arrive at once."""
    arrivals = [each._replace(time=0.0) for each in synthetic(check.trace, 1.0, 24 * replicas, SHAPE, 99)]
    outcome = run(Cluster(steps, replicas, check.router), arrivals)
    return len(arrivals) / float(outcome.times("ended").max())


def figures(arrivals: Sequence[Arrival], responses: Sequence[Response]) -> dict[str, float]:
    """The measured figures, named as in the simulation."""
    firsts = [response.token_times[0] - response.sent for response in responses]
    gaps = [b - a for response in responses for a, b in pairwise(response.token_times)]
    seconds = max(response.times[-1] for response in responses) - min(response.sent for response in responses)
    found = {"seconds": seconds, "tokens": float(sum(arrival.output for arrival in arrivals))}
    for name, values in zip(TIMES, (firsts, gaps), strict=True):
        found |= {f"{name}_p{p}_s": float(np.percentile(values, p)) for p in PERCENTS}
    return found


def compared(replicas: int, rate: float, measured: dict[str, float], on_paper: dict[str, Any]) -> Iterator[Row]:
    both = measured, on_paper
    found = {f"{name} ms, p{p}": [each[f"{name}_p{p}_s"] * 1e3 for each in both] for name in TIMES for p in PERCENTS}
    found["tokens/s"] = [each["tokens"] / each["seconds"] for each in both]
    found["% of prompts cached"] = [100 * each["hits"] for each in both]
    for what, (real, paper) in found.items():
        ratio = paper / real if real else 1.0
        yield {
            "shape": f"{replicas} at {rate:.2f}",
            "replicas": replicas,
            "rate": rate,
            "requests": on_paper["requests"],
            "what": f"  {what}",
            "measured": real,
            "simulated": paper,
            "ratio": ratio,
            "goal": goal_status(max(ratio, 1 / ratio) - 1, GOAL, lower_is_better=True),
        }
