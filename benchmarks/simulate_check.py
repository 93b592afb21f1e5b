"""The simulation beside real servers: the same requests at the same times, and how far apart the figures are.

For each number of replicas: step times are measured in as many processes at once, with the threads that each replica
has, so that they slow each other down as replicas of one machine do. Then servers are started, and what HTTP and the
clients of this process cost is measured with streams that run at once: seconds more to the first token, and the ratio
of their pace to that of the fitted steps. The traces that are compared come after that.

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
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from bench_deploy import DEPLOY
from gpu_report import Column, Row, Table, judged
from http_client import Answer, ServerProcess, ask_once
from simulate_cluster import ROUTERS, Cluster, run
from simulate_steps import Pass, Sample, Steps, fit, pairs, read_report
from simulate_traces import Arrival, Part, Shape, synthetic

GOAL = 0.15
SHAPE = Shape((16, 0.6), (24, 0.5), chats=0.3, documents=0.3, document=(80, 0.4), think_s=5, asked=10, context=1024)
STREAMS, TOKENS, PROMPT, ROUNDS = 6, 40, 32, 3  # of the streams that the front is measured with
PATH = "/v1/completions"
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
    ),
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


def rows_of(check: Check, replicas: int, say: Any = print) -> Iterator[Row]:
    steps = measured_steps(check, replicas, say)
    with ExitStack() as stack:
        ports, what = start(check, replicas, stack)
        servers = Servers(check, ports, random.Random(0))
        front_s, pace = asyncio.run(servers.front(steps))
        say(f"{what}; HTTP adds {front_s * 1e3:.1f} ms to the first token, passes take {pace:.2f} x the time")
        steps = Paced(steps, pace)
        rates = capacity(check, steps, replicas)
        for seed, share in enumerate(check.shares, 1):
            rate = share * rates
            requests = max(8, round(rate * check.seconds))
            arrivals = own_answers(synthetic(check.trace, rate, requests, SHAPE, seed))
            before = asyncio.run(servers.cached())
            answers = asyncio.run(servers.send(arrivals))
            hits, tokens = np.subtract(asyncio.run(servers.cached()), before)
            simulated = run(Cluster(steps, replicas, check.router, front_s), arrivals).figures(1, 1)
            yield from compared(replicas, rate, figures(arrivals, answers) | {"hits": hits / tokens}, simulated)


def measured_steps(check: Check, replicas: int, say: Any) -> Steps:
    """In as many processes at once."""
    script = str(Path(__file__).with_name("simulate.py"))
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{i}.json" for i in range(replicas)]
        options = [*check.options, "--device", "cpu", *(["--quick"] if check.quick else [])]
        command = [sys.executable, script, "measure", *options]
        began = time.perf_counter()
        running = [subprocess.Popen([*command, "--out", str(path)], stdout=subprocess.DEVNULL) for path in paths]
        try:
            failed = [process for process in running if process.wait(600)]
        finally:
            for process in running:
                process.kill()
                process.wait()
        if failed:
            raise RuntimeError(f"`{' '.join(command)}` failed")
        reports = [read_report(path) for path in paths]
    samples: list[Sample] = [sample for report in reports for sample in report.samples]
    found = fit(reports[0].engine, samples)
    say(f"\n{replicas} replicas: step times in {time.perf_counter() - began:.0f} s, {found.line()}")
    return found.steps


class Paced(Steps):
    """Steps that take longer, or shorter, by a factor."""

    def __init__(self, steps: Steps, pace: float) -> None:
        self.engine, self._steps, self._pace = steps.engine, steps, pace

    def seconds(self, made_of: Any) -> float:
        return self._steps.seconds(made_of) * self._pace


def start(check: Check, replicas: int, stack: ExitStack) -> tuple[list[int], str]:
    """Ports of servers, and what they are."""
    if replicas > 1 and importlib.util.find_spec("ray") is not None:
        server = ServerProcess([*check.options, "--replicas", str(replicas)], DEPLOY)
        return [stack.enter_context(server).port], "infer deploy"
    servers = [stack.enter_context(ServerProcess(check.options)) for _ in range(replicas)]
    return [server.port for server in servers], "infer serve" if replicas == 1 else f"{replicas} x infer serve"


class Servers:
    """Sends requests to servers that run."""

    def __init__(self, check: Check, ports: Sequence[int], draw: random.Random) -> None:
        self._check, self._ports = check, ports
        self._router = ROUTERS[check.router](len(ports), draw)

    async def front(self, steps: Steps) -> tuple[float, float]:
        """Seconds that HTTP adds to the first token of a stream, and the pace of several streams to the fitted steps.

        The first round warms up.
        """
        firsts, paces, keys = list[float](), list[float](), count(10**9)
        prompt = steps.seconds(Pass(tokens=PROMPT, pairs=pairs(PROMPT, PROMPT), prompts=1, begun=1))
        decode = steps.seconds(Pass(STREAMS, STREAMS * (PROMPT + TOKENS // 2)))
        for number in range(ROUNDS + 1):
            for streams in (1, STREAMS):
                parts = [(Part(next(keys), PROMPT),) for _ in range(streams * len(self._ports))]
                answers = await self.send([Arrival(0.0, each, TOKENS, 0) for each in parts])
                for answer in answers if number else ():
                    times = answer.token_times
                    if streams == 1:
                        firsts.append(times[0] - answer.sent - prompt)
                    else:  # in the middle all streams decode
                        begin, end = len(times) // 3, len(times) * 5 // 6
                        paces.append((times[end] - times[begin]) / (end - begin) / decode)
        return max(0.0, statistics.median(firsts)), statistics.median(paces)

    async def send(self, arrivals: Sequence[Arrival]) -> list[Answer]:
        """Each when it is due, over a connection of its own. What came before `sent` is not counted as the server's."""
        queues = np.zeros(len(self._ports), np.int64)
        begin = time.perf_counter() + 0.05

        async def one(arrival: Arrival) -> Answer:
            body = self._body(arrival)
            await asyncio.sleep(begin + arrival.time - time.perf_counter())
            which = self._router.choose(arrival, queues, 1 << 30) if len(queues) > 1 else 0
            queues[which] += 1
            try:
                answer = await ask_once(self._ports[which], PATH, body)
            finally:
                queues[which] -= 1
            if answer.failed:
                raise RuntimeError(f"a stream did not come to its end: status {answer.status}")
            answer.sent = begin + arrival.time
            return answer

        return list(await asyncio.gather(*map(one, arrivals)))

    async def cached(self) -> tuple[float, float]:
        """Tokens of prompts that were in a cache, and all tokens of prompts, so far."""
        text = "".join([(await ask_once(port, "/metrics")).body.decode() for port in self._ports])
        found = [
            re.findall(rf"^infer:prefix_cache_{name}_total(?:{{.*}})? (.*)$", text, re.MULTILINE) for name in CACHED
        ]
        return sum(map(float, found[0])), sum(map(float, found[1]))

    def _body(self, arrival: Arrival) -> dict[str, Any]:
        prompt = [token for part in arrival.parts for token in tokens_of(part)]
        settings = {"max_tokens": arrival.output, "temperature": 0.6, "seed": 1, "ignore_eos": True, "stream": True}
        return {"model": self._check.name, "prompt": prompt, **settings}


def tokens_of(part: Part) -> list[int]:
    """The same for the same key, and of another one from the first on."""
    draw = random.Random(part.key)
    return [draw.randrange(1000, 10_000) for _ in range(part.tokens)]


def own_answers(arrivals: Sequence[Arrival]) -> list[Arrival]:
    """Chats come back with an answer made up: what the model says is not known when the trace is drawn."""
    return [arrival._replace(answer=-arrival.answer) for arrival in arrivals]


def capacity(check: Check, steps: Steps, replicas: int) -> float:
    """Requests per second when all are there at once, simulated."""
    arrivals = [each._replace(time=0.0) for each in synthetic(check.trace, 1.0, 24 * replicas, SHAPE, 99)]
    outcome = run(Cluster(steps, replicas, check.router), arrivals)
    return len(arrivals) / float(outcome.times("ended").max())


def figures(arrivals: Sequence[Arrival], answers: Sequence[Answer]) -> dict[str, float]:
    """As the simulation has them."""
    firsts = [answer.token_times[0] - answer.sent for answer in answers]
    gaps = [b - a for answer in answers for a, b in pairwise(answer.token_times)]
    seconds = max(answer.times[-1] for answer in answers) - min(answer.sent for answer in answers)
    found = {"seconds": seconds, "tokens": float(sum(arrival.output for arrival in arrivals))}
    for name, values in (("first", firsts), ("between", gaps)):
        found |= {f"{name}_p{p}_s": float(np.percentile(values, p)) for p in (50, 90, 99)}
    return found


def compared(replicas: int, rate: float, measured: dict[str, float], simulated: dict[str, Any]) -> Iterator[Row]:
    names = [f"{name}_p{p}_s" for name in ("first", "between") for p in (50, 90, 99)]
    found = [
        (f"{name.split('_')[0]} ms, {name.split('_')[1]}", measured[name] * 1e3, simulated[name] * 1e3)
        for name in names
    ]
    found.append(("tokens/s", measured["tokens"] / measured["seconds"], simulated["tokens"] / simulated["seconds"]))
    found.append(("% of prompts cached", 100 * measured["hits"], 100 * simulated["hits"]))
    for what, real, paper in found:
        ratio = paper / real
        yield {
            "shape": f"{replicas} at {rate:.2f}",
            "replicas": replicas,
            "rate": rate,
            "requests": simulated["requests"],
            "what": f"  {what}",
            "measured": real,
            "simulated": paper,
            "ratio": ratio,
            "goal": judged(max(ratio, 1 / ratio) - 1, GOAL, most=True),
        }
