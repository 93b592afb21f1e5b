"""What the server costs beside `LLM` in this process: each figure beside its goal, and whether texts stay the same.

The server is a process of its own, started as `infer serve`; clients are in this one, all on loopback.

alone   one client that streams: decode speed, to that of `LLM`
many    64 clients that stream: throughput, to that of `LLM` with the same requests
first   milliseconds that HTTP adds to the first token
start   seconds from the start of `infer serve` to the first answer, weights in the page cache, kernels compiled
load    Poisson arrivals at several rates, each request counted from when it should have been sent
fake    the API in front of an engine that gives 256 streams 50,000 tokens a second, and costs nothing
rough   up to 1,000 connections that talk, vanish, stall and send garbage, and what the server holds after them

The exit status is 1 if a text differs from that of `LLM`, the server fails with a 500, or keeps what it should have
given back. Ratios of one run mean something; figures of a machine that is busy with other work, little.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import resource
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from gpu_report import Column, Report, Row, Table, judged
from gpu_shapes import SHAPES, cache_bytes
from http_client import Answer, Connection, ServerProcess, ask_once, connected
from http_models import make_folder
from http_rough import PATH, Expected, Rough, at_rest, metrics
from serving_load import Ask, make_asks, percentile, poisson, serve
from serving_report import LOADED, formatted, goal_row, table_of

from infer import Tokenizer
from infer.engine.llm import LLM
from infer.engine.text import encode_readable
from infer.evaluate.bench import describe_machine, machine_line
from infer.machine import resolve_device

MODEL = "smollm2-135m"
TEXT = Path(__file__).parents[1] / "docs" / "kv-cache.md"
FAKE = [sys.executable, str(Path(__file__).with_name("http_fake.py"))]
ALONE_GOALS = {"cpu": 0.95, "cuda": 0.90}
MANY_GOAL, FIRST_GOAL_MS, START_GOAL_S, MEMORY_GOAL = 0.90, 5.0, 4.0, 1.05
BUSY = 0.5  # the load average before, from which on other programs were in the way
IMPORTS = "import infer.server.run, infer.cli.serve, infer.loader, infer.engine.llm"
Lengths = tuple[int, int]  # the least and the most tokens


@dataclass(frozen=True)
class Sizes:
    """How much is measured; a CPU's by default."""

    alone: tuple[int, int, int] = (64, 128, 7)  # prompt and new tokens, repeats
    many: tuple[int, Lengths, Lengths, int] = (64, (16, 64), (48, 64), 3)  # clients, their prompts, new tokens, repeats
    first: tuple[int, int] = (8, 40)  # prompt tokens, repeats
    start: int = 3  # repeats
    load: tuple[int, Lengths, Lengths] = (24, (32, 128), (32, 128))  # requests to see the most it can; lengths
    rates: tuple[float, ...] = (0.25, 0.5, 0.75, 0.9, 1.1)  # of that
    rate_s: float = 40.0  # how long requests come at each
    in_time: tuple[float, float] = (2.0, 0.25)  # seconds to the first token, and between tokens, that are good enough
    fake: tuple[int, int, float] = (256, 1000, 256 / 50_000)  # streams, tokens of each, seconds of a step
    rough: tuple[int, int] = (1000, 768)  # connections, tokens that the caches hold: too few for all rows
    cache_memory: int = 10**9


CPU = Sizes()
GPU = replace(
    CPU,
    alone=(256, 256, 7),
    many=(64, (100, 1024), (100, 1024), 3),
    load=(256, (100, 1024), (100, 1024)),
    rate_s=20.0,
    in_time=(0.5, 0.05),
    cache_memory=16 * 10**9,
)
QUICK = Sizes(
    alone=(8, 16, 2),
    many=(8, (4, 24), (4, 24), 1),
    first=(8, 4),
    start=1,
    load=(8, (4, 24), (4, 24)),
    rates=(0.5, 1.1),
    rate_s=0.2,
    fake=(16, 50, 0.005),
    rough=(50, 300),
    cache_memory=10**7,
)

LOAD = Table(
    "Poisson arrivals",
    (
        *LOADED,
        Column("first ms", "first_p50_s", 11, ",.1f", 1e3),
        Column("p90", "first_p90_s", 9, ",.1f", 1e3),
        Column("p99", "first_p99_s", 9, ",.1f", 1e3),
        Column("between ms", "between_p50_s", 12, ",.2f", 1e3),
        Column("p90", "between_p90_s", 9, ",.2f", 1e3),
        Column("p99", "between_p99_s", 9, ",.2f", 1e3),
        Column("in time/s", "goodput", 11, ".2f"),
    ),
    "of most: of the requests per second when all are there at once. first: from when a request should have been sent; "
    "p50, p90, p99.\nin time/s: requests per second whose first token, and whose tokens on average, came soon enough.",
)


@dataclass
class Setup:
    """What all items share."""

    shape: str
    model: str  # as `infer serve` takes it
    device: torch.device
    options: Sequence[str]  # for `infer serve`
    sizes: Sizes
    rough_s: float
    stack: ExitStack
    texts: list[bool] = field(default_factory=list)  # whether each that was compared is the same
    client: float = 0.0  # this process's share of a processor while a server was measured last

    @cached_property
    def llm(self) -> LLM:
        quantize = "int4" if "--quantize" in self.options else None
        return LLM(self.model, quantize=quantize, device=str(self.device), cache_memory=self.sizes.cache_memory)

    @cached_property
    def _ids(self) -> list[int] | None:
        """A text that is known to the model; None: its weights are random, and any tokens do."""
        text = TEXT.read_text(encoding="utf-8")
        return None if self.shape in SHAPES else encode_readable(Tokenizer(self.model), text)

    def asks(self, count: int, prompts: Lengths, new: Lengths, *, seed: int, **more: Any) -> list[Ask]:
        asks = make_asks(self.llm.model.config.vocab_size, count, prompts, new, seed=seed, **more)
        ids, draw = self._ids, random.Random(seed)
        if ids is None:
            return asks
        begins = [draw.randrange(len(ids) - len(ask.prompt)) for ask in asks]
        return [Ask(ids[at : at + len(ask.prompt)], ask.params) for at, ask in zip(begins, asks, strict=True)]

    def server(self, *more: str, cache_memory: int | None = None) -> ServerProcess:
        memory = cache_memory or self.sizes.cache_memory
        return ServerProcess([self.model, *self.options, "--name", self.shape, "--cache-memory", str(memory), *more])

    @cached_property
    def port(self) -> int:
        """Of a server that all items share."""
        return self.stack.enter_context(self.server()).port

    def body(self, ask: Ask, **more: Any) -> dict[str, Any]:
        params = ask.params
        return {
            "model": self.shape,
            "prompt": ask.prompt,
            "max_tokens": params.max_new_tokens,
            "temperature": params.temperature,
            "seed": params.seed,
            "ignore_eos": True,
            "stream": True,
            **more,
        }

    def run(self, coroutine: Any) -> Any:
        """Run clients, and note what they cost themselves."""
        began, used = time.perf_counter(), time.process_time()
        found = asyncio.run(coroutine)
        self.client = (time.process_time() - used) / (time.perf_counter() - began)
        return found

    def compare(self, answer: Answer, text: str) -> None:
        self.texts.append(not answer.failed and answer.text == text)

    def clients(self) -> str:
        return f"(client {self.client:.0%} of a core)"


async def _with_connection(port: int, measure: Callable[[Connection], Awaitable[None]]) -> None:
    async with connected(port) as connection:
        await measure(connection)


def alone(setup: Setup) -> Iterator[Row]:
    """In turns, over one connection. The first of the repeats warms up."""
    prompt, new, repeats = setup.sizes.alone
    speeds: dict[str, list[float]] = {"HTTP": [], "LLM": []}

    async def measure(connection: Connection) -> None:
        for repeat in range(repeats + 1):
            [ask] = setup.asks(1, (prompt, prompt), (new, new), seed=1000 + repeat, temperature=0.0)
            answer = await connection.ask(PATH, setup.body(ask))
            began = time.perf_counter()
            result = setup.llm.submit(ask.prompt, ask.params).result()
            seconds = time.perf_counter() - began - result.timing.queue_time_s - result.timing.prefill_time_s
            setup.compare(answer, result.text)
            if repeat:
                speeds["HTTP"].append((new - 1) / (answer.times[-1] - answer.token_times[0]))
                speeds["LLM"].append((new - 1) / seconds)

    asyncio.run(_with_connection(setup.port, measure))
    ours, theirs = (statistics.median(found) for found in speeds.values())
    ratio = statistics.median(a / b for a, b in zip(*speeds.values(), strict=True))
    what = f"one client, {prompt} + {new} tokens: HTTP ({ours:,.1f} tok/s, decode) to LLM ({theirs:,.1f})"
    goal = judged(ratio, ALONE_GOALS[setup.device.type], form=".2f")
    yield goal_row(setup.shape, what, ratio, ".3f", "", goal, speeds=speeds)


async def ask_all(port: int, bodies: Sequence[Any]) -> list[Answer]:
    """All at once, over connections that are there already."""
    connections = [await Connection.open(port) for _ in bodies]
    try:
        return list(await asyncio.gather(*(c.ask(PATH, body) for c, body in zip(connections, bodies, strict=True))))
    finally:
        for connection in connections:
            connection.close()


def throughput(answers: Sequence[Answer], tokens: int) -> float:
    return tokens / (max(answer.times[-1] for answer in answers) - min(answer.sent for answer in answers))


def many(setup: Setup) -> Iterator[Row]:
    """In turns. The first of the repeats warms up."""
    count, prompts, new, repeats = setup.sizes.many
    speeds: dict[str, list[float]] = {"HTTP": [], "LLM": []}
    for repeat in range(repeats + 1):
        asks = setup.asks(count, prompts, new, seed=2000 + repeat)
        tokens = sum(ask.params.max_new_tokens for ask in asks)
        answers = setup.run(ask_all(setup.port, [setup.body(ask) for ask in asks]))
        served = serve(setup.llm, asks)
        for answer, result in zip(answers, served.results, strict=True):
            setup.compare(answer, result.text)
        if repeat:
            speeds["HTTP"].append(throughput(answers, tokens))
            speeds["LLM"].append(served.tokens_per_s)
    ours, theirs = (statistics.median(found) for found in speeds.values())
    ratio = statistics.median(a / b for a, b in zip(*speeds.values(), strict=True))
    what = f"{count} clients: HTTP ({ours:,.1f} tok/s) to LLM ({theirs:,.1f}) {setup.clients()}"
    yield goal_row(setup.shape, what, ratio, ".3f", "", judged(ratio, MANY_GOAL, form=".2f"), speeds=speeds)


def first(setup: Setup) -> Iterator[Row]:
    """In turns, over one connection."""
    prompt, repeats = setup.sizes.first
    http: list[float] = []
    ours: list[float] = []

    async def measure(connection: Connection) -> None:
        for repeat in range(repeats + 2):  # two warm up
            [ask] = setup.asks(1, (prompt, prompt), (4, 4), seed=3000 + repeat, temperature=0.0)
            answer = await connection.ask(PATH, setup.body(ask))
            began = time.perf_counter()
            handle = setup.llm.stream(ask.prompt, ask.params)
            next(piece for piece in handle if piece.text)
            seconds = time.perf_counter() - began
            if repeat > 1:
                http.append(answer.token_times[0] - answer.sent)
                ours.append(seconds)

    asyncio.run(_with_connection(setup.port, measure))
    added = 1e3 * (statistics.median(http) - statistics.median(ours))
    what = (
        f"first token of {prompt}: HTTP ({1e3 * statistics.median(http):.1f} ms) "
        f"less LLM ({1e3 * statistics.median(ours):.1f})"
    )
    goal = judged(added, FIRST_GOAL_MS, form=".0f", most=True)
    yield goal_row(setup.shape, what, added, ".2f", " ms", goal, http_s=http, llm_s=ours)


def start(setup: Setup) -> Iterator[Row]:
    """The first of the repeats brings everything into the page cache."""
    [ask] = setup.asks(1, (8, 8), (1, 1), seed=0)
    answered, listening, imports = [], [], []
    for repeat in range(setup.sizes.start + 1):
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", IMPORTS], check=True, timeout=120)
        imported = time.perf_counter() - began
        with setup.server() as server:
            answer = asyncio.run(ask_once(server.port, PATH, setup.body(ask)))
            if repeat:
                imports.append(imported)
                listening.append(server.listening - server.started)
                answered.append(answer.times[-1] - server.started)
    seconds = statistics.median(answered)
    imported, ready = statistics.median(imports), statistics.median(listening)
    what = (
        f"to the first answer: imports {imported:.1f} s, model and warm-up {ready - imported:.1f}, "
        f"the request {seconds - ready:.2f}"
    )
    goal = judged(seconds, START_GOAL_S if setup.device.type == "cpu" else None, form=".0f", most=True)
    yield goal_row(setup.shape, what, seconds, ".1f", " s", goal, answered=answered, listening=listening)


async def arrive(port: int, bodies: Sequence[Any], arrivals: Sequence[float]) -> tuple[list[Answer], list[float]]:
    """Each on a connection of its own; with when it should have been sent."""
    begin = time.perf_counter()

    async def one(body: Any, arrival: float) -> Answer:
        await asyncio.sleep(begin + arrival - time.perf_counter())
        return await ask_once(port, PATH, body)

    answers = await asyncio.gather(*map(one, bodies, arrivals))
    return list(answers), [begin + arrival for arrival in arrivals]


def load(setup: Setup) -> Iterator[Row]:
    count, prompts, new = setup.sizes.load
    for seed in (4000, 4001):  # the first warms up
        asks = setup.asks(count, prompts, new, seed=seed)
        answers = asyncio.run(ask_all(setup.port, [setup.body(ask) for ask in asks]))
    most = throughput(answers, count)
    for i, share in enumerate(setup.sizes.rates):
        rate = share * most
        count = max(16, round(rate * setup.sizes.rate_s))
        asks = setup.asks(count, prompts, new, seed=4100 + i)
        yield _load_row(setup, asks, rate) | {"share": share}


def _load_row(setup: Setup, asks: Sequence[Ask], rate: float) -> Row:
    arrivals = poisson(rate, len(asks), seed=len(asks))
    answers, dues = setup.run(arrive(setup.port, [setup.body(ask) for ask in asks], arrivals))
    setup.texts += [not answer.failed for answer in answers]
    firsts = [answer.token_times[0] - due for answer, due in zip(answers, dues, strict=True)]
    gaps = [[b - a for a, b in pairwise(answer.token_times)] for answer in answers]
    soon, often = setup.sizes.in_time
    good = sum(f <= soon and statistics.fmean(own or [0.0]) <= often for f, own in zip(firsts, gaps, strict=True))
    seconds = max(answer.times[-1] for answer in answers) - min(dues)
    between = [gap for own in gaps for gap in own]
    return {
        "shape": setup.shape,
        "rate": rate,
        "requests": len(asks),
        "tokens_per_s": sum(ask.params.max_new_tokens for ask in asks) / seconds,
        "goodput": good / seconds,
        "client": setup.client,
        **{f"first_p{p}_s": percentile(firsts, p) for p in (50, 90, 99)},
        **{f"between_p{p}_s": percentile(between, p) for p in (50, 90, 99)},
    }


def fake(setup: Setup) -> Iterator[Row]:
    streams, tokens, step_s = setup.sizes.fake
    wanted = streams / step_s
    body = {"model": "fake", "prompt": [1, 2, 3], "max_tokens": tokens, "ignore_eos": True, "stream": True, "seed": 1}
    body["stream_options"] = {"include_usage": True}
    with ServerProcess([setup.model, "--step", str(step_s)], FAKE) as server:
        asyncio.run(ask_all(server.port, [body | {"max_tokens": 8}] * streams))
        before, began = server.processor_s(), time.perf_counter()
        answers = setup.run(ask_all(server.port, [body] * streams))
        seconds = time.perf_counter() - began
        loop, every = ((b - a) / seconds for a, b in zip(before, server.processor_s(), strict=True))
    setup.texts += [
        not answer.failed and answer.events[-1]["usage"]["completion_tokens"] == tokens for answer in answers
    ]
    speed = throughput(answers, streams * tokens)
    what = f"{streams} streams of {wanted:,.0f} tok/s: event loop {loop:.0%} of a core, engine {every - loop:.0%}"
    yield goal_row(
        "fake",
        f"{what} {setup.clients()}",
        speed,
        ",.0f",
        " tok/s",
        loop=loop,
        process=every,
        client=setup.client,
        wanted=wanted,
    )


def rough(setup: Setup) -> Iterator[Row]:
    """A fifth of the time first, to see what the server holds once it has seen everything."""
    connections, positions = setup.sizes.rough
    config = setup.llm.model.config
    [ask, seeded] = setup.asks(2, (16, 16), (16, 16), seed=5000)
    params = replace(seeded.params, logprobs=2)
    result = setup.llm.generate(seeded.prompt, params)
    logprobs = [each.logprob for each in result.logprobs or []]
    expected = Expected(setup.body(seeded, stream=False, logprobs=2, priority=-1), result.text, logprobs)
    memory = cache_bytes(config, positions, setup.llm.memory.pool.memory.element_size())
    with setup.server("--max-rows", "32", cache_memory=memory) as server:
        clients = Rough(server.port, setup.body(ask), expected)

        async def live(seconds: float) -> dict[str, int]:
            await clients.run(connections, seconds)
            return await at_rest(server)

        asyncio.run(_fills_the_pool(setup, server.port))
        before = setup.run(live(setup.rough_s / 5))
        after = setup.run(live(setup.rough_s))
        full = asyncio.run(_fills_the_memory(setup, server.port))
        counted = asyncio.run(metrics(server.port))
    did = sum(clients.did.values())
    setup.texts += [True] * (clients.asked - clients.wrong) + [False] * clients.wrong
    yield goal_row(
        setup.shape,
        f"{did:,} connections in {setup.rough_s:.0f} s, {connections} at once; wrong texts of {clients.asked} "
        f"{setup.clients()}",
        clients.wrong,
        "d",
        "",
        judged(clients.wrong, 0, form="d", most=True),
        did=dict(clients.did),
        statuses={str(status): n for status, n in clients.statuses.items()},
        preemptions=counted["num_preemptions_total"],
    )
    failed = clients.statuses[500] + clients.statuses[503]
    yield goal_row(setup.shape, "  answers with 500 or 503", failed, "d", "", judged(failed, 0, form="d", most=True))
    for name, words in (("files", "open files"), ("threads", "threads"), ("tasks", "tasks of the event loop")):
        more = after[name] - before[name]
        goal = judged(more, 0, form="d", most=True)
        yield goal_row(setup.shape, f"  more {words} than before ({before[name]})", more, "d", "", goal)
    ratio = after["memory"] / before["memory"]
    goal = judged(ratio, MEMORY_GOAL, form=".2f", most=True)
    yield goal_row(setup.shape, f"  memory, to that before ({before['memory'] / 1e6:,.0f} MB)", ratio, ".3f", "", goal)
    yield goal_row(
        setup.shape, "  a prompt that takes every page is answered", full, "d", "", judged(full, 1, form="d")
    )


async def _fills_the_pool(setup: Setup, port: int) -> None:
    """Have the server begin all threads that it ever has: it does so as it needs them."""
    body = {"model": setup.shape, "prompt": "w0 " * 10_000}
    await asyncio.gather(*(ask_once(port, "/tokenize", body) for _ in range(32)))


async def _fills_the_memory(setup: Setup, port: int) -> bool:
    card = (await ask_once(port, "/v1/models")).json["data"][0]
    [ask] = setup.asks(1, (card["max_model_len"] - 1,) * 2, (1, 1), seed=5001)
    return not (await ask_once(port, PATH, setup.body(ask))).failed


ITEMS: dict[str, Callable[[Setup], Iterator[Row]]] = {
    "alone": alone,
    "many": many,
    "first": first,
    "start": start,
    "load": load,
    "fake": fake,
    "rough": rough,
}


def measure(setup: Setup, chosen: Sequence[str]) -> Iterator[tuple[str, Row]]:
    for name in chosen:
        for row in ITEMS[name](setup):
            yield name, row
    same, count = sum(setup.texts), len(setup.texts)
    what = f"of {count} answers: whole, and the texts of `LLM` where these are known"
    yield "exact", goal_row(setup.shape, what, same, "d", "", judged(same, count, form="d"), texts=count)


def command_line(argv: Sequence[str]) -> list[str]:
    """To run the same again; where the results went is left out."""
    files = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    files.add_argument("--out")
    return ["python", "benchmarks/bench_http.py", *files.parse_known_args(argv)[1]]


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--device", default="auto", help="(%(default)s)")
    parser.add_argument("--model", default=MODEL, help="in int4 on a CPU (%(default)s)")
    parser.add_argument("--shape", choices=SHAPES, help="instead of a model: random weights")
    parser.add_argument("--only", nargs="+", choices=ITEMS, help="(everything)")
    parser.add_argument("--seconds", type=float, default=30.0, help="of rough (%(default)g)")
    parser.add_argument("--quick", action="store_true", help="a tiny model and tiny loads, to see that everything runs")
    parser.add_argument("--out", type=Path, metavar="FILE", help="keep the figures in FILE, with those it has already")
    return parser


def make_setup(args: argparse.Namespace, device: torch.device, stack: ExitStack) -> Setup:
    sizes = QUICK if args.quick else GPU if device.type == "cuda" else CPU
    shape = "tiny" if args.quick else args.shape
    options = ["--device", str(device)]
    if shape is not None:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        return Setup(shape, str(make_folder(shape, folder, dtype)), device, options, sizes, args.seconds, stack)
    options += ["--quantize", "int4"] if device.type == "cpu" else []
    return Setup(args.model, args.model, device, options, sizes, args.seconds, stack)


def main(argv: Sequence[str] | None = None) -> None:
    parser, argv = make_parser(), sys.argv[1:] if argv is None else argv
    args = parser.parse_args(argv)
    try:
        device = resolve_device(args.device)
        if args.out is not None and not args.out.parent.is_dir():
            raise ValueError(f"there is no folder {args.out.parent}")
        machine = describe_machine(device) | {"load_average": os.getloadavg()[0]}
        report = Report(machine, command_line(argv), args.out, "http")
    except (ValueError, OSError) as error:
        parser.error(str(error))
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # the server has it from here
    print(f"{machine_line(machine)}, load average before: {machine['load_average']:.2f}")
    print(f"$ {shlex.join(command_line(argv))}\n", flush=True)
    well = True
    with ExitStack() as stack:
        setup = make_setup(args, device, stack)
        stack.callback(setup.llm.close)
        for section, row in measure(setup, [name for name in ITEMS if name in (args.only or ITEMS)]):
            report.add(section, row)
            print(table_of(section, LOAD).line(row), flush=True)
            well &= section not in ("exact", "rough") or "NO" not in row["goal"]
    print(f"\n{formatted(report.values, LOAD)}")
    if machine["load_average"] > BUSY and device.type == "cpu":
        print(f"The load average was {machine['load_average']:.1f} before: run it again on a quiet machine.")
    if not well:
        sys.exit("a text is wrong, or the server has failed or leaked")


if __name__ == "__main__":
    main()
