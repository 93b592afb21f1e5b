"""The simulation of replicas: exact where that can be worked out, and pass by pass what the real engine does."""

from __future__ import annotations

import importlib
import json
import math
import random
import statistics
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Collection
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from amount import ALL
from mocks import MockTokenizer
from tiny import make_tiny_model

from infer import SamplingParams
from infer.engine.engine import Engine, Event
from infer.engine.memory import CacheMemory
from infer.engine.sequence import Sequence

if not ALL:
    pytest.skip("benchmarks run in `make test-all`", allow_module_level=True)

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
LETTERS = MockTokenizer([chr(33 + i) for i in range(512)])
NAMES = ("__main__", "check", "steps", "traces", "replica", "cluster")


@pytest.fixture(scope="module")
def sim() -> Iterator[SimpleNamespace]:
    """All names of the simulation's modules."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        modules = {name: importlib.import_module(f"simulate.{name}") for name in NAMES}
        names = {name: value for module in modules.values() for name, value in vars(module).items()}
        yield SimpleNamespace(**names, modules=SimpleNamespace(**modules))


def made_up(sim: SimpleNamespace, fixed: float = 1.0, per_position: float = 0.0, **engine: Any) -> Any:
    """Passes that take the same time, whatever they hold; or longer with the positions attended to."""
    steps = sim.Steps.__new__(sim.Steps)
    steps.engine = sim.Engine(**{"page": 4, "pages": 10_000} | engine)
    steps.seconds = lambda made_of: (
        (fixed if made_of.rows or made_of.tokens else 0.0) + per_position * made_of.positions
    )
    return steps


def arrivals(sim: SimpleNamespace, *requests: tuple[float, int, int]) -> list[Any]:
    """Of times, tokens of prompts, and of answers: prompts have nothing in common."""
    return [
        sim.Arrival(time, (sim.Part(2 * i, prompt),), output, 2 * i + 1)
        for i, (time, prompt, output) in enumerate(requests)
    ]


def served(sim: SimpleNamespace, steps: Any, requests: Collection[Any], replicas: int = 1, **options: Any) -> Any:
    return sim.modules.cluster.run(sim.Cluster(steps, replicas, options.pop("router", "least"), **options), requests)


def test_worked_out_by_hand(sim: SimpleNamespace) -> None:
    """Passes of one second. The second request comes in the pass from 1 to 2, and has two chunks."""
    outcome = served(sim, made_up(sim, prefill_chunk=8), arrivals(sim, (0.0, 5, 4), (1.5, 12, 2), (9.25, 3, 1)))
    assert [(row.first, row.ended) for row in outcome.rows] == [(1.0, 4.0), (4.0, 5.0), (10.25, 10.25)]
    figures = outcome.figures(first_s=1.0, between_s=1.0, price=3600.0)
    assert [figures[f"first_p{p}_s"] for p in (50, 99)] == pytest.approx([1.0, 2.47])
    assert figures["between_p99_s"] == pytest.approx(1.0, rel=0.006)
    assert figures["good"] == pytest.approx(2 / 3)
    assert (figures["tokens"], figures["seconds"]) == (7, 10.25)
    assert figures["busy"] == pytest.approx(5 / 9.25)
    assert figures["cost"] == pytest.approx(9.25 / 6 * 1e6)  # the last token comes after the last arrival


def test_passes_that_grow_longer(sim: SimpleNamespace) -> None:
    """Taken at once or one by one, a stretch of passes ends at the same time."""
    requests = arrivals(sim, (0.0, 7, 300), (20.5, 9, 200))
    steps = made_up(sim, 0.05, 0.001)
    together = served(sim, steps, requests)
    alone = served(sim, steps, requests)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sim.Replica, "_alike", lambda self, takers: 1)
        one_by_one = served(sim, steps, requests)
    for outcome in (together, alone):
        assert [row.ended for row in outcome.rows] == pytest.approx([row.ended for row in one_by_one.rows])
        for percent in (1, 50, 99):
            found, expected = (sim.percentile_of(each.gaps, percent) for each in (outcome, one_by_one))
            assert found == pytest.approx(expected, rel=0.012)
    assert sum(together.gaps.values()) == sum(one_by_one.gaps.values()) == 299 + 199


def test_a_queue_with_one_row(sim: SimpleNamespace) -> None:
    """Poisson arrivals, one at a time, a second each: the mean wait of M/D/1 is load / (2 (1 - load))."""
    draw, load = random.Random(1), 0.6
    times = accumulate(draw.expovariate(load) for _ in range(15_000))
    outcome = served(sim, made_up(sim, max_rows=1), arrivals(sim, *((t, 1, 1) for t in times)), max_waiting=10**6)
    waits = outcome.times("first") - outcome.times("arrival") - 1.0
    # A row that ends lets the next one in without a pause, so passes need not begin on whole seconds.
    assert waits.mean() == pytest.approx(load / (2 * (1 - load)), rel=0.05)


class Asked:
    """A request of the real engine and of the simulation."""

    def __init__(self, before: int, document: int | None, own: int, new: int, after: int | None = None) -> None:
        """before: the pass that it comes before. after: a request whose prompt and answer its prompt begins with."""
        self.before, self.document, self.own, self.new, self.after = before, document, own, new, after


def document(number: int) -> list[int]:
    """Tokens that no other prompt begins with."""
    draw = random.Random(number)
    return [400 + number, *(draw.randrange(400) for _ in range(17 + 9 * number))]


def real_passes(model: Any, asked: Collection[Asked], pages: int, rows: int, chunk: int) -> Any:
    """What the engine computes, step by step; tokens of each request that were cached; and how many were preempted."""
    page_bytes = CacheMemory(model, 10**6, page_size=4).pool.page_bytes
    memory = CacheMemory(model, pages * page_bytes, page_size=4)
    engine = Engine(model, memory, max_rows=rows, prefill_chunk=chunk)
    sequences: list[Sequence] = []
    passes: list[dict[int, int]] = []

    def listen(event: Event) -> None:
        if event.kind == "step":
            passes.append({sequences.index(sequence): n for sequence, n in event.scheduled})

    engine.watch(listen)
    while len(sequences) < len(asked) or not engine.is_idle:
        while len(sequences) < len(asked) and (asked[len(sequences)].before <= len(passes) or engine.is_idle):
            index, ask = len(sequences), asked[len(sequences)]
            own = random.Random(index)
            prompt = [] if ask.document is None else document(ask.document)
            prompt = prompt if ask.after is None else list(sequences[ask.after].token_ids)
            prompt = [*prompt, index, *(own.randrange(400) for _ in range(ask.own - 1))][: len(prompt) + ask.own]
            params = SamplingParams(max_new_tokens=ask.new, ignore_eos=True, temperature=0.0)
            sequences.append(Sequence(model.config, LETTERS, prompt, params))
            engine.check(sequences[-1])
            engine.submit(sequences[-1])
        engine.step()
    preemptions = engine.scheduler.num_preemptions
    engine.close()
    return passes, [sequence.num_cached_tokens for sequence in sequences], preemptions


def simulated_passes(sim: SimpleNamespace, steps: Any, asked: Collection[Asked]) -> Any:
    """The same of the simulation, one pass at a time."""
    replica, passes, rows, now = sim.Replica(steps), list[dict[int, int]](), list[Any](), 0.0
    replica._alike = lambda takers: 1

    def submit(idle: bool) -> None:
        while len(rows) < len(asked) and (asked[len(rows)].before <= len(passes) or idle):
            ask, index = asked[len(rows)], len(rows)
            parts = [] if ask.document is None else [sim.Part(-1 - ask.document, len(document(ask.document)))]
            if ask.after is not None:
                before = rows[ask.after].request
                parts = [*before.parts, sim.Part(before.answer, before.output)]
            parts += [sim.Part(2 * index, ask.own)] if ask.own else []
            rows.append(sim.Row(index, sim.Arrival(now, tuple(parts), ask.new, 2 * index + 1)))
            replica.submit(rows[-1], now)
            idle = False

    while len(rows) < len(asked) or replica.outstanding:
        if replica.due == math.inf:
            submit(idle=True)
        passes.append({row.index: n for row, n in replica._fed.items()})
        now = replica.due
        submit(idle=False)
        replica.finish()
    return passes, [row.known for row in rows], replica.scheduler.num_preemptions


def drawn(seed: int, count: int = 24) -> list[Asked]:
    """Requests about documents, some of them the same; and others."""
    draw, found, before = random.Random(seed), list[Asked](), 0
    for _ in range(count):
        kind = draw.choice([None, 0, 1, 2])
        own = 0 if kind is not None and draw.random() < 0.2 else draw.randrange(1, 40)
        found.append(Asked(before, kind, own, draw.randrange(1, 30)))
        before += draw.choice([0, 0, 1, 2, 5, 12]) if found[1:] else 1
    return found


@pytest.fixture(scope="module")
def model() -> Any:
    return make_tiny_model(vocab_size=512, hidden_size=16, intermediate_size=16, num_hidden_layers=1)


@pytest.mark.parametrize("seed", range(12))
def test_passes_are_the_engines(sim: SimpleNamespace, model: Any, seed: int) -> None:
    """With enough memory: who is fed how much, and what was known."""
    chunk, rows = [(8, 4), (16, 8), (64, 3), (200, 8)][seed % 4]
    asked = drawn(seed)
    steps = made_up(sim, pages=4000, max_rows=rows, prefill_chunk=chunk)
    assert simulated_passes(sim, steps, asked) == real_passes(model, asked, 4000, rows, chunk)


@pytest.mark.parametrize("seed", range(4))
def test_preemptions_are_the_engines(sim: SimpleNamespace, model: Any, seed: int) -> None:
    """Prompts that have nothing in common, and too few pages."""
    asked = [Asked(ask.before, None, ask.own or 9, ask.new) for ask in drawn(seed)]
    steps = made_up(sim, pages=30, max_rows=8, prefill_chunk=16)
    passes, _, preemptions = real_passes(model, asked, 30, 8, 16)
    assert preemptions
    found, _, simulated = simulated_passes(sim, steps, asked)
    assert simulated == pytest.approx(preemptions, rel=0.35, abs=2)
    assert len(found) == pytest.approx(len(passes), rel=0.05)


def test_chats_find_their_pages(sim: SimpleNamespace, model: Any) -> None:
    """A prompt that begins with the last one and its answer: all of these but the last token were computed."""
    asked = [Asked(0, None, 21, 14), Asked(10**6, None, 6, 9, after=0), Asked(10**6, None, 3, 2, after=1)]
    real = real_passes(model, asked, 4000, 8, 16)
    assert simulated_passes(sim, made_up(sim, prefill_chunk=16, max_rows=8), asked) == real
    assert real[1] == [0, 34, 49]


def test_the_same_prompt_waits(sim: SimpleNamespace, model: Any) -> None:
    """For the row that computes it, up to its last token."""
    asked = [Asked(0, 0, 0, 5), Asked(1, 0, 0, 5)]
    real = real_passes(model, asked, 4000, 8, 16)
    assert simulated_passes(sim, made_up(sim, prefill_chunk=16, max_rows=8), asked) == real
    assert real[:2] == ([{0: 16}, {0: 2}, {0: 1, 1: 1}, {0: 1, 1: 1}, {0: 1, 1: 1}, {0: 1, 1: 1}, {1: 1}], [0, 17])


def test_captured_steps_run_ahead(sim: SimpleNamespace) -> None:
    """A row that joins others waits for the step that is launched already; the prompt goes before the next one."""
    steps = made_up(sim, captured=True, prefill_chunk=100)
    outcome = served(sim, steps, arrivals(sim, (0.0, 60, 20), (5.5, 60, 3)))
    first, second = outcome.rows
    assert first.first == 2.0  # the prompt, and a step
    # Comes while the step to 6 runs. The step to 7 was launched; then the prompt, to 8; a step, to 9, and its own.
    assert (second.first, second.ended) == (10.0, 12.0)
    assert first.ended == 22.0


@pytest.mark.parametrize("router", ["random", "round-robin", "least", "two-choices", "prefix"])
def test_nothing_is_lost(sim: SimpleNamespace, router: str) -> None:
    """All requests end, with all their tokens; gaps are one fewer than tokens; and a seed gives the same again."""
    shape = sim.Shape(prompt=(40, 1), output=(30, 0.8), document=(120, 0.5), context=600)
    trace = sim.synthetic("bursts", 8.0, 600, shape, seed=3)
    steps = made_up(sim, 0.02, 1e-5, max_rows=8, prefill_chunk=64, pages=400)
    outcome = served(sim, steps, trace, 4, router=router, max_waiting=10**6)
    assert len(outcome.rows) == 600
    assert all(row.left_to_make == 0 and row.request.time < row.first <= row.ended for row in outcome.rows)
    assert all(row.num_tokens == row.prompt + row.request.output for row in outcome.rows)
    assert sum(outcome.gaps.values()) == sum(arrival.output - 1 for arrival in trace)
    again = served(sim, steps, trace, 4, router=router, max_waiting=10**6)
    assert again.figures(1.0, 0.1, 1.0) == outcome.figures(1.0, 0.1, 1.0)


def test_memory_is_given_back(sim: SimpleNamespace) -> None:
    shape = sim.Shape(prompt=(40, 1), output=(30, 0.8), document=(120, 0.5), context=400)
    steps = made_up(sim, 0.02, max_rows=8, prefill_chunk=64, pages=150)
    replica = sim.Replica(steps)
    for index, arrival in enumerate(sim.synthetic("poisson", 6.0, 400, shape)):
        while replica.due <= arrival.time:
            replica.finish()
        replica.submit(sim.Row(index, arrival), arrival.time)
    while replica.due < math.inf:
        replica.finish()
    pages = replica.pages
    assert replica.scheduler.num_preemptions > 0
    assert replica.hits > 0
    assert pages.num_free + pages.evictable == 150
    assert not any([pages._computing, pages._whole, pages._awaited])
    assert all(not part.pins for part in pages._parts.values())


def test_the_end_of_a_prompt_is_forgotten_first(sim: SimpleNamespace) -> None:
    """Three parts of two pages each, and one more token, of a row that is over; then pages are needed, one by one."""
    pages = sim.Pages(sim.Engine(page=4, pages=8))
    parts = tuple(sim.Part(i, 8) for i in range(3))
    row = sim.Row(0, sim.Arrival(0.0, parts, 1, 9))
    assert pages.allocate(row)
    assert row.num_computed_tokens == 0
    assert pages.reserve(row, 24)
    assert row.num_reserved_slots == 24
    row.num_computed_tokens = 24
    row.num_tokens = 25
    pages.free(row)
    assert (pages.num_free, pages.evictable) == (2, 6)
    known = []
    for free in range(2, 9):
        assert pages.can_grow(free)
        again = sim.Row(1, sim.Arrival(0.0, parts, 5, 10))
        assert pages.allocate(again)
        known.append(again.num_computed_tokens)
        pages.free(again)
    assert known == [23, 20, 16, 12, 8, 4, 0]
    assert not pages.can_grow(9)


def test_least_spreads_evenly(sim: SimpleNamespace) -> None:
    """Two choices are better than one, and the least busy better still."""
    shape = sim.Shape(prompt=(30, 0.5), output=(20, 0.5), chats=0, documents=0)
    trace = sim.synthetic("poisson", 30.0, 1500, shape)
    steps = made_up(sim)
    steps.seconds = lambda made_of: 0.005 * (made_of.rows + made_of.tokens / 10)
    first, second, third = (
        served(sim, steps, trace, 8, router=router).figures(1, 1)["whole_p99_s"]
        for router in ("random", "two-choices", "least")
    )
    assert first > 1.3 * second > 1.3 * third


def test_prefix_routing_finds_more(sim: SimpleNamespace) -> None:
    trace = sim.synthetic("poisson", 8.0, 800, sim.Shape(prompt=(40, 1), output=(10, 0.5), context=2000))
    steps = made_up(sim, 0.02, prefill_chunk=256, pages=3000)
    hits = {router: served(sim, steps, trace, 8, router=router).figures(1, 1)["hits"] for router in ("least", "prefix")}
    assert hits["prefix"] > hits["least"] + 0.2
    forgetful = served(sim, steps, trace, 8, router="prefix", chunks=16).figures(1, 1)["hits"]
    assert forgetful < hits["prefix"] - 0.1


def test_the_prefix_router_ranks_as_the_real_one(sim: SimpleNamespace) -> None:
    """Only a few replicas are ranked: the first of all of them is the same."""
    ordered, table = sim.modules.cluster.ordered, sim.modules.cluster.PrefixTable()
    router, draw = sim.PrefixRouter(20, random.Random(0)), random.Random(1)
    for i in range(300):
        queues = np.array([draw.randrange(30) for _ in range(20)])
        arrival = sim.Arrival(0.0, (sim.Part(draw.randrange(10), 640), sim.Part(100 + i, 64)), 1, 0)
        keys = sim.chunk_keys(arrival)
        known = table.matches(keys)
        choice = str(router.choose(arrival, queues, 10**6))
        best = ordered({str(n): int(queue) for n, queue in enumerate(queues)}, known, (), sim.SLACK)[0]
        assert (known.get(choice, 0), queues[int(choice)]) == (known.get(best, 0), queues[int(best)])
        table.record(keys, choice)


def test_full_replicas(sim: SimpleNamespace) -> None:
    """Two rows each: four run, three wait in the router, and one is refused.

    Those that wait are sent when a request ends. By then the next pass has begun.
    """
    requests = arrivals(sim, *((i / 100, 1, 5) for i in range(8)))
    outcome = served(sim, made_up(sim, max_rows=2), requests, 2, max_waiting=3)
    assert outcome.refused == 1
    assert sorted(round(row.first) for row in outcome.rows) == [1, 1, 2, 2, 7, 7, 8]
    assert outcome.figures(1.5, 1.0)["good"] == pytest.approx(2 / 8)


class TestTraces:
    def test_rates_and_bursts(self, sim: SimpleNamespace) -> None:
        def spread(kind: str) -> tuple[float, float]:
            times = [arrival.time for arrival in sim.synthetic(kind, 20.0, 10_000, seed=2)]
            counts = np.histogram(times, bins=int(times[-1] / 5))[0]
            return len(times) / times[-1], float(counts.var() / counts.mean())

        rate, index = spread("poisson")
        assert (rate, index) == (pytest.approx(20), pytest.approx(1, abs=0.3))
        rate, index = spread("bursts")
        assert rate == pytest.approx(20)
        assert index > 10

    def test_lengths(self, sim: SimpleNamespace) -> None:
        trace = sim.synthetic("poisson", 1.0, 5000, sim.Shape(chats=0, documents=0, context=4000))
        assert statistics.median(arrival.prompt for arrival in trace) == pytest.approx(300, rel=0.1)
        assert statistics.median(arrival.output for arrival in trace) == pytest.approx(120, rel=0.1)
        assert max(arrival.prompt for arrival in trace) == 3000
        assert all(arrival.prompt + arrival.output <= 4000 for arrival in trace)

    def test_chats_come_back(self, sim: SimpleNamespace) -> None:
        trace = sim.synthetic("poisson", 2.0, 1000, sim.Shape(chats=1, documents=0))
        by_answer = {arrival.answer: arrival for arrival in trace}
        later = [(a, by_answer[a.parts[-2].key]) for a in trace if len(a.parts) > 1]
        assert 0.5 < len(later) / len(trace) < 0.8
        for after, before in later:
            assert after.time >= before.time + 20
            assert after.parts[:-2] == before.parts
            assert after.parts[-2].tokens == before.output

    def test_a_csv_file(self, sim: SimpleNamespace, tmp_path: Path) -> None:
        path = tmp_path / "azure.csv"
        path.write_text(
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n"
            "2023-11-16 18:15:50.9951690,396,109\n"
        )
        first, second = sim.read_trace(path)
        assert (first.time, first.prompt, first.output) == (0.0, 374, 44)
        assert second.time == pytest.approx(4.314579)
        assert first.parts[0].key != second.parts[0].key
        assert [each.time for each in sim.at_rate([first, second], 4.0)] == pytest.approx([0, 0.5])

    def test_a_jsonl_file(self, sim: SimpleNamespace, tmp_path: Path) -> None:
        path = tmp_path / "mooncake.jsonl"
        lines = [
            {"timestamp": 1000, "input_length": 1100, "output_length": 5, "hash_ids": [7, 8, 9]},
            {"timestamp": 2500, "input_length": 1024, "output_length": 6, "hash_ids": [7, 8]},
            {"timestamp": 2500, "input_length": 9, "output_length": 1},
        ]
        path.write_text("\n".join(map(json.dumps, lines)))
        first, second, third = sim.read_trace(path)
        assert [part.tokens for part in first.parts] == [512, 512, 76]
        assert first.parts[:2] == second.parts
        assert (second.time, third.prompt) == (1.5, 9)

    @pytest.mark.parametrize(
        ("name", "text", "message"),
        [
            ("a.csv", "TIMESTAMP,ContextTokens\n", "line 1: there is no column GeneratedTokens"),
            ("a.csv", "", "line 1: there is no column TIMESTAMP"),
            ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n", "has no requests"),
            ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nnoon,1,1\n", "line 2: TIMESTAMP is 'noon'"),
            ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16,1\n", "line 2: GeneratedTokens is None"),
            ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16,0,1\n", "line 2: ContextTokens is '0'"),
            (
                "a.csv",
                "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16,1,1\n2023-11-15,1,1\n",
                "request 2: it comes before",
            ),
            ("a.jsonl", "{}\n", "line 1: timestamp is None"),
            ("a.jsonl", '{"timestamp": 1, "input_length": 2.5, "output_length": 1}', "line 1: input_length is 2.5"),
            ("a.jsonl", '\n{"timestamp"', "line 2: it is no JSON"),
            ("a.jsonl", "[1]", "line 1: it is no object"),
            (
                "a.jsonl",
                '{"timestamp": 1, "input_length": 600, "output_length": 1, "hash_ids": [1]}',
                "line 1: 1 hash_ids for 600 tokens, not 2",
            ),
        ],
    )
    def test_bad_files(
        self, sim: SimpleNamespace, tmp_path: Path, name: str, text: str, message: str, refused: Callable[..., None]
    ) -> None:
        path = tmp_path / name
        path.write_text(text)
        refused(f"{path}", message, trace=path)

    def test_a_file_that_is_not_there(self, tmp_path: Path, refused: Callable[..., None]) -> None:
        refused("No such file", trace=tmp_path / "a.csv")


@pytest.fixture
def report(sim: SimpleNamespace, tmp_path: Path) -> Path:
    """Step times made up: a millisecond, and a tenth of one for each token."""
    draw, found = random.Random(0), []
    for _ in range(300):
        rows, tokens, length = draw.randrange(1, 33), draw.choice([0, 0, draw.randrange(2, 129)]), draw.randrange(500)
        made_of = sim.Pass(rows, rows * length, tokens, tokens * (tokens + 1) // 2, int(tokens > 0), int(tokens > 0))
        found.append(sim.Sample(made_of, 0.001 + 1e-4 * (rows + tokens) + 1e-7 * rows * length, 1e-5))
    path = tmp_path / "steps.json"
    engine = sim.Engine(pages=2000)
    values = {"benchmark": "steps", "machine": {"name": "none", "torch": "0"}, "commands": []}
    path.write_text(sim.compact(values | sim.report_values(engine, "made up", found)))
    return path


@pytest.fixture
def refused(sim: SimpleNamespace, report: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., None]:
    """`benchmarks/simulate run` ends with status 2 and says why, before it has done anything."""

    def check(*messages: str, trace: Any = "poisson", steps: Any = report, more: Collection[str] = ()) -> None:
        with pytest.raises(SystemExit, match="2"):
            sim.main(["run", "--steps", str(steps), "--trace", str(trace), "--rate", "1", *more])
        printed = capsys.readouterr()
        assert all(message in printed.err for message in messages)
        assert not printed.out

    return check


class TestSteps:
    def test_what_was_put_in_comes_out(self, sim: SimpleNamespace, report: Path) -> None:
        read = sim.read_report(report)
        fit = sim.fit(read.engine, read.samples)
        assert max(fit.steps.errors(fit.held_out)) < 0.01
        assert fit.steps.growth(sim.Pass(rows=10)) == pytest.approx(1e-6, rel=0.01)
        assert fit.steps.seconds(sim.Pass(rows=10)) == pytest.approx(0.002, rel=0.01)
        assert "not fitted: off by 0.0%" in fit.line()

    def test_captured_steps_are_rounded_up(self, sim: SimpleNamespace) -> None:
        """A step of 5 rows is one of 8; a prompt is a pass of its own beside it."""
        draw, found = random.Random(0), []
        for _ in range(400):
            rows, tokens = draw.randrange(1, 257), draw.choice([0, draw.randrange(2, 4097)])
            padded = sim.rounded_up(rows, sim.ROW_SIZES), sim.rounded_up(tokens, sim.TOKEN_SIZES)
            padded = padded if tokens == 0 or tokens > sim.SHORT else (padded[0], 1000)
            longest = draw.choice([10, 2000])
            made_of = sim.Pass(rows, 10 * rows + longest - 10, tokens, longest=longest)
            read = max(made_of.positions, (40 if rows > 16 else padded[0] / 2) * longest)
            found.append(sim.Sample(made_of, 0.01 + 1e-5 * padded[0] + 2e-5 * padded[1] + 1e-7 * read, 0.0))
        steps = sim.fit(sim.Engine(captured=True, prefill_chunk=4096), found).steps
        assert steps.seconds(sim.Pass(5)) == pytest.approx(0.01008, rel=0.01)
        assert steps.seconds(sim.Pass(tokens=1025)) == pytest.approx(2e-5 * 1536, rel=0.05)
        assert steps.seconds(sim.Pass()) == 0.0
        assert steps._lone == (0.5, 40)
        longer = [steps.seconds(sim.Pass(n, 1200, longest=1000)) for n in (16, 17)]
        even = [steps.seconds(sim.Pass(n, 1200)) for n in (16, 17)]
        assert np.subtract(longer, even) == pytest.approx([6.8e-4, 38.8e-4], rel=0.02)

    def test_pairs(self, sim: SimpleNamespace) -> None:
        """The third, fourth and fifth token attend to three, four and five positions."""
        assert sim.pairs(3, 5) == 3 + 4 + 5

    def test_least_squares(self, sim: SimpleNamespace) -> None:
        """Where the best weights would be negative, they are 0."""
        draw = np.random.default_rng(0)
        lines = draw.random((50, 4))
        assert sim.least_squares(lines, lines @ [1.0, 0.0, 3.0, 0.5]) == pytest.approx([1.0, 0.0, 3.0, 0.5])
        found = sim.least_squares(lines, lines @ [1.0, -2.0, 3.0, 0.5])
        assert found.min() == 0.0
        gradient = lines.T @ (lines @ [1.0, -2.0, 3.0, 0.5] - lines @ found)
        assert gradient.max() < 1e-9  # nothing is gained by more of anything

    def test_measured(self, sim: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        out = tmp_path / "steps.json"
        options = ["--shape", "tiny", "--device", "cpu", "--quick", "--cache-memory", "10000000"]
        sim.main(["measure", *options, "--out", str(out)])
        assert "samples that were not fitted: off by" in capsys.readouterr().out
        read = sim.read_report(out)
        assert (read.model, read.engine.captured, read.engine.prefill_chunk) == ("tiny", False, 128)
        assert {sample.made_of.rows for sample in read.samples} >= {1, 2, 4}
        assert {sample.made_of.tokens for sample in read.samples} >= {0, 4, 8, 40}
        assert all(sample.seconds > 0 for sample in read.samples)
        assert json.loads(out.read_text())["commands"] == [f"python benchmarks/simulate measure {' '.join(options)}"]

    @pytest.mark.parametrize("text", ["", "{}", '{"benchmark": "gpu"}', '{"benchmark": "steps", "passes": [[1]]}'])
    def test_no_report(self, tmp_path: Path, text: str, refused: Callable[..., None]) -> None:
        path = tmp_path / "a.json"
        path.write_text(text)
        refused("is no report of step times: make one with `benchmarks/simulate measure`", steps=path)


def test_a_run(sim: SimpleNamespace, report: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, picture = tmp_path / "run.json", tmp_path / "run.png"
    options = ["--trace", "bursts", "--rate", "4", "--requests", "50", "--replicas", "1", "4"]
    options += ["--router", "prefix", "random", "--price", "2"]
    sim.main(["run", "--steps", str(report), *options, "--json", str(out), "--plot", str(picture)])
    printed = capsys.readouterr().out
    values = json.loads(out.read_text())
    rows = values["sections"]["run"]
    assert [(row["replicas"], row["router"]) for row in rows] == [
        (1, "prefix"), (1, "random"), (4, "prefix"), (4, "random")
    ]  # fmt: skip
    assert [row["requests"] for row in rows] == [50, 50, 200, 200]
    assert all(row["cost"] > 0 and 0 < row["busy"] < 1 for row in rows)
    assert "off by" in printed
    assert picture.stat().st_size > 10_000


def test_an_h200(sim: SimpleNamespace) -> None:
    """nano-vllm's benchmark by its step times, beside what other H200s were measured to do (docs/performance.md)."""
    report = sim.read_report(BENCHMARKS / "reports" / "h200-llama-8b-steps.json")
    asks = importlib.import_module("serving_load").make_requests(128_256, 256, (100, 1024), (100, 1024))
    requests = arrivals(sim, *((0.0, len(ask.prompt), ask.params.max_new_tokens) for ask in asks))
    figures = served(sim, sim.fit(report.engine, report.samples).steps, requests).figures(1, 1)
    for measured in (9_933, 9_383):
        assert figures["tokens"] / figures["seconds"] == pytest.approx(measured, rel=0.15)


def test_the_pace_of_a_server(sim: SimpleNamespace) -> None:
    pace = sim.Pace.through([0.01, 0.05], [0.013, 0.055])
    assert (pace.factor, pace.more_s) == pytest.approx((1.05, 0.0025))
    assert sim.Pace.through([0.01, 0.05], [0.01, 0.06]) == pytest.approx((1.2, 0.0))
    steps = sim.PacedSteps(made_up(sim, 2.0, 0.5), pace)
    assert steps.seconds(sim.Pass(rows=1, positions=4)) == pytest.approx(1.05 * 4 + 0.0025)
    assert steps.growth(sim.Pass(rows=1, positions=4)) == pytest.approx(1.05 * 0.5)


def test_what_was_measured_beside_what_was_simulated(sim: SimpleNamespace) -> None:
    names = [f"{name}_p{p}_s" for name in ("first", "between") for p in (50, 90, 99)]
    measured = dict.fromkeys(names, 0.1) | {"tokens": 10, "seconds": 2.0, "hits": 0.5}
    simulated = dict.fromkeys(names, 0.12) | {"tokens": 10, "seconds": 2.2, "hits": 0.5, "requests": 3}
    rows = list(sim.compared(2, 1.5, measured, simulated))
    assert [row["ratio"] for row in rows] == pytest.approx([1.2] * 6 + [2.0 / 2.2, 1.0])
    assert [row["goal"] for row in rows] == ["reach 15%: NO"] * 6 + ["reach 15%: yes"] * 2


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--replicas", "0"], "--replicas"),
        (["--rate", "-1"], "--rate"),
        (["--plot", "nowhere/a.png"], "there is no folder nowhere"),
        (["--router", "best"], "invalid choice: 'best'"),
    ],
)
def test_refused(more: list[str], message: str, refused: Callable[..., None]) -> None:
    refused(message, more=more)
