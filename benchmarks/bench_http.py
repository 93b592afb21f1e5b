"""The overhead of the server over `LLM` in this process: each figure with its goal, and whether texts are equal.

The server is a separate process, started as `infer serve`; clients are in this one, all on loopback.

alone   one client that streams: decode speed, to that of `LLM`
many    64 clients that stream: throughput, to that of `LLM` with the same requests
first   milliseconds that HTTP adds to the first token
start   seconds from the start of `infer serve` to the first response, weights in the page cache, kernels compiled
load    Poisson arrivals at several rates, each request timed from its scheduled arrival
fake    the API with an engine that computes nothing and gives 256 streams 50,000 tokens a second
rough   up to 1,000 connections that disconnect, stall and send garbage; whether the server leaks

The exit status is 1 if a text differs from that of `LLM`, or the server leaks or returns 500. Ratios within one run are
reliable. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
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

import tokenizers
import torch
from gpu_report import Column, Report, Row, Table, command_line, goal_status
from gpu_shapes import SHAPES, build, cache_bytes
from http_client import Connection, Response, ServerProcess, connected, request_once
from http_rough import PATH, Expected, Rough, idle_resources, metrics
from safetensors.torch import save_file
from serving_load import LoadRequest, make_requests, percentile, poisson, serve
from serving_report import LOADED, formatted, goal_row, table_of
from tokenizers import decoders, models

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
MAX_LOAD_AVERAGE = 0.5  # before the run; above, other programs disturb the measurement
IMPORTS = "import infer.server.run, infer.cli.serve, infer.loader, infer.engine.llm"
Lengths = tuple[int, int]  # minimum and maximum number of tokens


@dataclass(frozen=True)
class Sizes:
    """Sizes of the measurements; by default those for a CPU."""

    alone: tuple[int, int, int] = (64, 128, 7)  # prompt and new tokens, repeats
    many: tuple[int, Lengths, Lengths, int] = (64, (16, 64), (48, 64), 3)  # clients, their prompts, new tokens, repeats
    first: tuple[int, int] = (8, 40)  # prompt tokens, repeats
    start: int = 3  # repeats
    load: tuple[int, Lengths, Lengths] = (
        24,
        (32, 128),
        (32, 128),
    )  # requests that measure the maximum throughput; lengths
    rates: tuple[float, ...] = (0.25, 0.5, 0.75, 0.9, 1.1)  # fractions of that
    rate_s: float = 40.0  # seconds of arrivals at each rate
    in_time: tuple[float, float] = (2.0, 0.25)  # targets for goodput: seconds to the first token, and between tokens
    fake: tuple[int, int, float] = (256, 1000, 256 / 50_000)  # streams, tokens per stream, seconds per step
    rough: tuple[int, int] = (1000, 768)  # connections, and cache capacity in tokens: too few for all rows
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
    "of most: relative to the requests per second when all arrive at once. first: time to the first token, from the "
    "scheduled arrival.\nin time/s: goodput, requests per second that meet the targets for the first token and between "
    "tokens.",
)


@dataclass
class Setup:
    """What all items share."""

    shape: str
    model: str  # argument of `infer serve`
    device: torch.device
    options: Sequence[str]  # for `infer serve`
    sizes: Sizes
    rough_s: float
    stack: ExitStack
    texts: list[bool] = field(default_factory=list)  # whether each compared text is correct
    client: float = 0.0  # CPU utilization of this process during the last measurement of a server

    @cached_property
    def llm(self) -> LLM:
        quantize = "int4" if "--quantize" in self.options else None
        return LLM(self.model, quantize=quantize, device=str(self.device), cache_memory=self.sizes.cache_memory)

    @cached_property
    def _ids(self) -> list[int] | None:
        """Tokens of a natural text; None: the model has random weights, and prompts are random."""
        text = TEXT.read_text(encoding="utf-8")
        return None if self.shape in SHAPES else encode_readable(Tokenizer(self.model), text)

    def requests(self, count: int, prompts: Lengths, new: Lengths, *, seed: int, **more: Any) -> list[LoadRequest]:
        requests = make_requests(self.llm.model.config.vocab_size, count, prompts, new, seed=seed, **more)
        ids, draw = self._ids, random.Random(seed)
        if ids is None:
            return requests
        begins = [draw.randrange(len(ids) - len(request.prompt)) for request in requests]
        return [
            LoadRequest(ids[at : at + len(request.prompt)], request.params)
            for at, request in zip(begins, requests, strict=True)
        ]

    def server(self, *more: str, cache_memory: int | None = None) -> ServerProcess:
        memory = cache_memory or self.sizes.cache_memory
        return ServerProcess([self.model, *self.options, "--name", self.shape, "--cache-memory", str(memory), *more])

    @cached_property
    def port(self) -> int:
        """The port of a server that all items share."""
        return self.stack.enter_context(self.server()).port

    def body(self, request: LoadRequest, **more: Any) -> dict[str, Any]:
        params = request.params
        return {
            "model": self.shape,
            "prompt": request.prompt,
            "max_tokens": params.max_new_tokens,
            "temperature": params.temperature,
            "seed": params.seed,
            "ignore_eos": True,
            "stream": True,
            **more,
        }

    def run(self, coroutine: Any) -> Any:
        """Run clients, and measure the CPU utilization of this process."""
        began, used = time.perf_counter(), time.process_time()
        found = asyncio.run(coroutine)
        self.client = (time.process_time() - used) / (time.perf_counter() - began)
        return found

    def compare(self, response: Response, text: str) -> None:
        self.texts.append(not response.failed and response.text == text)

    def clients(self) -> str:
        return f"(client {self.client:.0%} of a core)"


def decode_speed(response: Response, tokens: int) -> float:
    """Decode tokens per second; of the full request if all tokens came in one part, as on a busy machine."""
    first = response.token_times[0]
    return (tokens - 1) / (response.times[-1] - (first if response.times[-1] > first else response.sent))


async def _with_connection(port: int, measure: Callable[[Connection], Awaitable[None]]) -> None:
    async with connected(port) as connection:
        await measure(connection)


def alone(setup: Setup) -> Iterator[Row]:
    """Alternating, over one connection. The first repeat warms up."""
    prompt, new, repeats = setup.sizes.alone
    speeds: dict[str, list[float]] = {"HTTP": [], "LLM": []}

    async def measure(connection: Connection) -> None:
        for repeat in range(repeats + 1):
            [request] = setup.requests(1, (prompt, prompt), (new, new), seed=1000 + repeat, temperature=0.0)
            response = await connection.request(PATH, setup.body(request))
            began = time.perf_counter()
            result = setup.llm.submit(request.prompt, request.params).result()
            seconds = time.perf_counter() - began - result.timing.queue_time_s - result.timing.prefill_time_s
            setup.compare(response, result.text)
            if repeat:
                speeds["HTTP"].append(decode_speed(response, new))
                speeds["LLM"].append((new - 1) / seconds)

    asyncio.run(_with_connection(setup.port, measure))
    ours, theirs = (statistics.median(found) for found in speeds.values())
    ratio = statistics.median(a / b for a, b in zip(*speeds.values(), strict=True))
    what = f"one client, {prompt} + {new} tokens: HTTP ({ours:,.1f} tok/s, decode) to LLM ({theirs:,.1f})"
    goal = goal_status(ratio, ALONE_GOALS[setup.device.type], form=".2f")
    yield goal_row(setup.shape, what, ratio, ".3f", "", goal, speeds=speeds)


async def request_all(port: int, bodies: Sequence[Any]) -> list[Response]:
    """Send all requests at once, over connections that are already open."""
    connections = [await Connection.open(port) for _ in bodies]
    try:
        return list(await asyncio.gather(*(c.request(PATH, body) for c, body in zip(connections, bodies, strict=True))))
    finally:
        for connection in connections:
            connection.close()


def throughput(responses: Sequence[Response], tokens: int) -> float:
    return tokens / (max(response.times[-1] for response in responses) - min(response.sent for response in responses))


def many(setup: Setup) -> Iterator[Row]:
    """Alternating. The first repeat warms up."""
    count, prompts, new, repeats = setup.sizes.many
    speeds: dict[str, list[float]] = {"HTTP": [], "LLM": []}
    for repeat in range(repeats + 1):
        requests = setup.requests(count, prompts, new, seed=2000 + repeat)
        tokens = sum(request.params.max_new_tokens for request in requests)
        responses = setup.run(request_all(setup.port, [setup.body(request) for request in requests]))
        served = serve(setup.llm, requests)
        for response, result in zip(responses, served.results, strict=True):
            setup.compare(response, result.text)
        if repeat:
            speeds["HTTP"].append(throughput(responses, tokens))
            speeds["LLM"].append(served.tokens_per_s)
    ours, theirs = (statistics.median(found) for found in speeds.values())
    ratio = statistics.median(a / b for a, b in zip(*speeds.values(), strict=True))
    what = f"{count} clients: HTTP ({ours:,.1f} tok/s) to LLM ({theirs:,.1f}) {setup.clients()}"
    yield goal_row(setup.shape, what, ratio, ".3f", "", goal_status(ratio, MANY_GOAL, form=".2f"), speeds=speeds)


def first(setup: Setup) -> Iterator[Row]:
    """Alternating, over one connection."""
    prompt, repeats = setup.sizes.first
    http: list[float] = []
    ours: list[float] = []

    async def measure(connection: Connection) -> None:
        for repeat in range(repeats + 2):  # two warm up
            [request] = setup.requests(1, (prompt, prompt), (4, 4), seed=3000 + repeat, temperature=0.0)
            response = await connection.request(PATH, setup.body(request))
            began = time.perf_counter()
            handle = setup.llm.stream(request.prompt, request.params)
            next(piece for piece in handle if piece.text)
            seconds = time.perf_counter() - began
            if repeat > 1:
                http.append(response.token_times[0] - response.sent)
                ours.append(seconds)

    asyncio.run(_with_connection(setup.port, measure))
    added = 1e3 * (statistics.median(http) - statistics.median(ours))
    what = (
        f"first token of {prompt}: HTTP ({1e3 * statistics.median(http):.1f} ms) "
        f"less LLM ({1e3 * statistics.median(ours):.1f})"
    )
    goal = goal_status(added, FIRST_GOAL_MS, form=".0f", lower_is_better=True)
    yield goal_row(setup.shape, what, added, ".2f", " ms", goal, http_s=http, llm_s=ours)


def start(setup: Setup) -> Iterator[Row]:
    """The first repeat fills the page cache."""
    [request] = setup.requests(1, (8, 8), (1, 1), seed=0)
    answered, listening, imports = [], [], []
    for repeat in range(setup.sizes.start + 1):
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", IMPORTS], check=True, timeout=120)
        imported = time.perf_counter() - began
        with setup.server() as server:
            response = asyncio.run(request_once(server.port, PATH, setup.body(request)))
            if repeat:
                imports.append(imported)
                listening.append(server.listening - server.started)
                answered.append(response.times[-1] - server.started)
    seconds = statistics.median(answered)
    imported, ready = statistics.median(imports), statistics.median(listening)
    what = (
        f"to the first response: imports {imported:.1f} s, model and warm-up {ready - imported:.1f}, "
        f"the request {seconds - ready:.2f}"
    )
    goal = goal_status(seconds, START_GOAL_S if setup.device.type == "cpu" else None, form=".0f", lower_is_better=True)
    yield goal_row(setup.shape, what, seconds, ".1f", " s", goal, answered=answered, listening=listening)


async def arrive(port: int, bodies: Sequence[Any], arrivals: Sequence[float]) -> tuple[list[Response], list[float]]:
    """Send each request on a new connection when it is due. Returns responses and due times."""
    begin = time.perf_counter()

    async def one(body: Any, arrival: float) -> Response:
        await asyncio.sleep(begin + arrival - time.perf_counter())
        return await request_once(port, PATH, body)

    responses = await asyncio.gather(*map(one, bodies, arrivals))
    return list(responses), [begin + arrival for arrival in arrivals]


def load(setup: Setup) -> Iterator[Row]:
    count, prompts, new = setup.sizes.load
    for seed in (4000, 4001):  # the first warms up
        requests = setup.requests(count, prompts, new, seed=seed)
        responses = asyncio.run(request_all(setup.port, [setup.body(request) for request in requests]))
    most = throughput(responses, count)
    for i, share in enumerate(setup.sizes.rates):
        rate = share * most
        count = max(16, round(rate * setup.sizes.rate_s))
        requests = setup.requests(count, prompts, new, seed=4100 + i)
        yield _load_row(setup, requests, rate) | {"share": share}


def _load_row(setup: Setup, requests: Sequence[LoadRequest], rate: float) -> Row:
    arrivals = poisson(rate, len(requests), seed=len(requests))
    responses, dues = setup.run(arrive(setup.port, [setup.body(request) for request in requests], arrivals))
    setup.texts += [not response.failed for response in responses]
    firsts = [response.token_times[0] - due for response, due in zip(responses, dues, strict=True)]
    gaps = [[b - a for a, b in pairwise(response.token_times)] for response in responses]
    soon, often = setup.sizes.in_time
    good = sum(f <= soon and statistics.fmean(own or [0.0]) <= often for f, own in zip(firsts, gaps, strict=True))
    seconds = max(response.times[-1] for response in responses) - min(dues)
    between = [gap for own in gaps for gap in own] or [0.0]  # empty if each text came in one part: the machine is busy
    return {
        "shape": setup.shape,
        "rate": rate,
        "requests": len(requests),
        "tokens_per_s": sum(request.params.max_new_tokens for request in requests) / seconds,
        "goodput": good / seconds,
        "client": setup.client,
        **{f"first_p{p}_s": percentile(firsts, p) for p in (50, 90, 99)},
        **{f"between_p{p}_s": percentile(between, p) for p in (50, 90, 99)},
    }


def fake(setup: Setup) -> Iterator[Row]:
    streams, tokens, step_s = setup.sizes.fake
    rate = streams / step_s
    body = {"model": "fake", "prompt": [1, 2, 3], "max_tokens": tokens, "ignore_eos": True, "stream": True, "seed": 1}
    body["stream_options"] = {"include_usage": True}
    with ServerProcess([setup.model, "--step", str(step_s)], FAKE) as server:
        asyncio.run(request_all(server.port, [body | {"max_tokens": 8}] * streams))
        before, began = server.processor_s(), time.perf_counter()
        responses = setup.run(request_all(server.port, [body] * streams))
        seconds = time.perf_counter() - began
        loop, every = ((b - a) / seconds for a, b in zip(before, server.processor_s(), strict=True))
    setup.texts += [
        not response.failed and response.events[-1]["usage"]["completion_tokens"] == tokens for response in responses
    ]
    speed = throughput(responses, streams * tokens)
    what = f"{streams} streams of {rate:,.0f} tok/s: event loop {loop:.0%} of a core, engine {every - loop:.0%}"
    yield goal_row(
        "fake",
        f"{what} {setup.clients()}",
        speed,
        ",.0f",
        " tok/s",
        loop=loop,
        process=every,
        client=setup.client,
        wanted=rate,
    )


def rough(setup: Setup) -> Iterator[Row]:
    """Resources are compared after a first run of a fifth of the time, when the server has seen every case."""
    connections, positions = setup.sizes.rough
    config = setup.llm.model.config
    [request, seeded] = setup.requests(2, (16, 16), (16, 16), seed=5000)
    params = replace(seeded.params, logprobs=2)
    result = setup.llm.generate(seeded.prompt, params)
    logprobs = [each.logprob for each in result.logprobs or []]
    expected = Expected(setup.body(seeded, stream=False, logprobs=2, priority=-1), result.text, logprobs)
    memory = cache_bytes(config, positions, setup.llm.memory.pool.memory.element_size())
    with setup.server("--max-rows", "32", cache_memory=memory) as server:
        clients = Rough(server.port, setup.body(request), expected)

        async def live(seconds: float) -> dict[str, int]:
            await clients.run(connections, seconds)
            return await idle_resources(server)

        asyncio.run(_fills_the_pool(setup, server.port))
        before = setup.run(live(setup.rough_s / 5))
        after = setup.run(live(setup.rough_s))
        full = asyncio.run(_fills_the_memory(setup, server.port))
        counted = asyncio.run(metrics(server.port))
    did = sum(clients.actions.values())
    setup.texts += [True] * (clients.checked - clients.wrong) + [False] * clients.wrong
    yield goal_row(
        setup.shape,
        f"{did:,} connections in {setup.rough_s:.0f} s, {connections} at once; wrong texts of {clients.checked} "
        f"{setup.clients()}",
        clients.wrong,
        "d",
        "",
        goal_status(clients.wrong, 0, form="d", lower_is_better=True),
        did=dict(clients.actions),
        statuses={str(status): n for status, n in clients.statuses.items()},
        preemptions=counted["num_preemptions_total"],
    )
    failed = clients.statuses[500] + clients.statuses[503]
    yield goal_row(
        setup.shape,
        "  responses with 500 or 503",
        failed,
        "d",
        "",
        goal_status(failed, 0, form="d", lower_is_better=True),
    )
    for name, words in (("files", "open files"), ("threads", "threads"), ("tasks", "tasks of the event loop")):
        more = after[name] - before[name]
        goal = goal_status(more, 0, form="d", lower_is_better=True)
        yield goal_row(setup.shape, f"  more {words} than before ({before[name]})", more, "d", "", goal)
    ratio = after["memory"] / before["memory"]
    goal = goal_status(ratio, MEMORY_GOAL, form=".2f", lower_is_better=True)
    yield goal_row(setup.shape, f"  memory, to that before ({before['memory'] / 1e6:,.0f} MB)", ratio, ".3f", "", goal)
    yield goal_row(
        setup.shape, "  a prompt that takes every page is answered", full, "d", "", goal_status(full, 1, form="d")
    )


async def _fills_the_pool(setup: Setup, port: int) -> None:
    """Make the server start all threads of its pool, which it starts on demand."""
    body = {"model": setup.shape, "prompt": "w0 " * 10_000}
    await asyncio.gather(*(request_once(port, "/tokenize", body) for _ in range(32)))


async def _fills_the_memory(setup: Setup, port: int) -> bool:
    card = (await request_once(port, "/v1/models")).json["data"][0]
    [request] = setup.requests(1, (card["max_model_len"] - 1,) * 2, (1, 1), seed=5001)
    return not (await request_once(port, PATH, setup.body(request))).failed


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
    what = f"of {count} responses: complete, and equal to the texts of `LLM` where compared"
    yield "exact", goal_row(setup.shape, what, same, "d", "", goal_status(same, count, form="d"), texts=count)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--device", default="auto", help="(%(default)s)")
    parser.add_argument("--model", default=MODEL, help="in int4 on a CPU (%(default)s)")
    parser.add_argument("--shape", choices=SHAPES, help="instead of a model: random weights")
    parser.add_argument("--only", nargs="+", choices=ITEMS, help="(everything)")
    parser.add_argument("--seconds", type=float, default=30.0, help="of rough (%(default)g)")
    parser.add_argument("--quick", action="store_true", help="a tiny model and tiny loads, as a check")
    parser.add_argument("--out", type=Path, metavar="FILE", help="add the figures to this JSON file")
    return parser


def make_folder(shape: str, folder: Path, dtype: torch.dtype) -> Path:
    """A checkpoint with random weights that `infer serve` can load. Every token of its vocabulary is a word."""
    model = build(shape, torch.device("cpu"), dtype)
    tied = SHAPES[shape].get("tie_word_embeddings")
    weights = {name: tensor for name, tensor in model.state_dict().items() if not (tied and name.startswith("lm_head"))}
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(SHAPES[shape] | {"dtype": str(dtype).rpartition(".")[2]}))
    words = {f"Ġw{i}": i for i in range(SHAPES[shape]["vocab_size"])}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=words, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


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
    args, command = parser.parse_args(argv), command_line("bench_http.py", argv, "--out")
    try:
        device = resolve_device(args.device)
        if args.out is not None and not args.out.parent.is_dir():
            raise ValueError(f"there is no folder {args.out.parent}")
        machine = describe_machine(device) | {"load_average": os.getloadavg()[0]}
        report = Report(machine, command, args.out, "http")
    except (ValueError, OSError) as error:
        parser.error(str(error))
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # the server inherits it
    print(f"{machine_line(machine)}, load average before: {machine['load_average']:.2f}")
    print(f"$ {shlex.join(command)}\n", flush=True)
    passed = True
    with ExitStack() as stack:
        setup = make_setup(args, device, stack)
        stack.callback(setup.llm.close)
        for section, row in measure(setup, [name for name in ITEMS if name in (args.only or ITEMS)]):
            report.add(section, row)
            print(table_of(section, LOAD).line(row), flush=True)
            passed &= section not in ("exact", "rough") or "NO" not in row["goal"]
    print(f"\n{formatted(report.values, LOAD)}")
    if machine["load_average"] > MAX_LOAD_AVERAGE and device.type == "cpu":
        print(f"The load average was {machine['load_average']:.1f} before: run it again on an idle machine.")
    if not passed:
        sys.exit("a text is wrong, or the server failed or leaked")


if __name__ == "__main__":
    main()
