"""What the live page is told: who waits and runs, what passes fed, who holds which page; and what that costs."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from live_server import Gate
from starlette.applications import Starlette
from starlette.testclient import TestClient
from waiting import WAIT

from infer import LLM, CacheMemory
from infer.engine.scheduler import ScheduledTokens
from infer.engine.sequence import Sequence
from infer.models.common import Decoder
from infer.server import live as module
from infer.server.live import FREE, KEPT, MAX_ALIVE, MAX_CELLS, MAX_ENDED, SHARED, Live, number_of, routes

pytestmark = pytest.mark.usefixtures("compiled")  # nothing waits for a compiler


class Letters:
    """One token per character, 64 of them."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - 32 for letter in text]

    def decode(self, token_ids: list[int]) -> str:
        return "".join(chr(32 + i) for i in token_ids)


@pytest.fixture
def llm(tiny_model: Callable[..., Decoder]) -> Iterator[LLM]:
    """Pages of 4 positions, 60 of them."""
    with engine(tiny_model(), 60) as llm:
        yield llm


@contextmanager
def engine(model: Decoder, pages: int, **options: Any) -> Iterator[LLM]:
    size = CacheMemory(model, 10**6, page_size=4).pool.page_bytes
    with LLM(model, Letters(), memory=CacheMemory(model, pages * size, page_size=4), **options) as llm:
        yield llm


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Passes run only as they are let through."""
    gate = Gate(monkeypatch)
    with gate.held():
        yield gate


@pytest.fixture
def listeners(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Who listens to the engine."""
    active: list[Any] = []
    watch = llm.watch

    def noted(listener: Callable[[Any], None]) -> Callable[[], None]:
        active.append(listener)
        unwatch = watch(listener)
        return lambda: (unwatch(), active.remove(listener))[0]

    monkeypatch.setattr(llm, "watch", noted)
    return active


def snapshot(live: Live) -> dict[str, Any]:
    """What a viewer gets first."""

    async def first() -> dict[str, Any]:
        async with Viewer(live) as viewer:
            return viewer.first

    return asyncio.run(first())


def cells(pool: dict[str, Any]) -> list[int]:
    runs = pool["cells"]
    return [value for value, times in zip(runs[::2], runs[1::2], strict=True) for _ in range(times)]


class Viewer:
    """What a page would know: each update put over what came before."""

    def __init__(self, live: Live) -> None:
        self.updates: AsyncIterator[dict[str, Any]] = live.updates(0.001)
        self.requests: dict[int, dict[str, Any]] = {}
        self.states: dict[int, list[str]] = {}
        self.passes: list[Any] = []
        self.pool: dict[str, Any] = {}
        self.stats: dict[str, Any] = {}

    async def __aenter__(self) -> Viewer:
        self.first = await self.next()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.updates.aclose()  # type: ignore[attr-defined]

    async def next(self) -> dict[str, Any]:
        update = await asyncio.wait_for(anext(self.updates), WAIT)
        if update.get("full"):
            self.requests = {}
        for record in update.get("requests", []):
            self.requests[record["id"]] = record
            states = self.states.setdefault(record["id"], [])
            if states[-1:] != [record["state"]]:
                states.append(record["state"])
        self.passes += update.get("passes", [])
        self.pool = update.get("pool", self.pool)
        self.stats = update.get("stats", self.stats)
        return update

    async def until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + WAIT
        while not condition():
            assert time.monotonic() < end
            await self.next()

    def state(self, number: int) -> str | None:
        return self.requests.get(number, {}).get("state")


def watch(live: Live, script: Callable[[Viewer], Awaitable[None]]) -> Viewer:
    viewer = Viewer(live)

    async def run() -> None:
        async with viewer:
            await script(viewer)

    asyncio.run(run())
    return viewer


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at each pass."""
    monkeypatch.setattr(module, "INTERVAL_S", 0.0)


class TestRequests:
    def test_states(self, gate: Gate, tiny_model: Callable[..., Decoder]) -> None:
        """A prompt of 12 tokens in chunks of 5, then 4 tokens; what comes second waits for the only row."""
        with engine(tiny_model(), 60, max_rows=1, prefill_chunk=5) as slow:

            async def script(viewer: Viewer) -> None:
                first, second = slow.submit("HELLO, WORLD", max_new_tokens=4), slow.submit("OTHER", max_new_tokens=1)
                await viewer.until(lambda: viewer.state(0) == viewer.state(1) == "waiting")
                gate.let(1)
                await viewer.until(lambda: viewer.state(0) == "prefill")
                assert viewer.requests[0]["computed"] == 5
                assert viewer.requests[0]["first_token"] is None
                gate.let(3)
                await viewer.until(lambda: viewer.state(0) == "decode")
                gate.let(10)
                await viewer.until(lambda: viewer.state(1) == "ended")
                assert first.done
                assert second.done

            viewer = watch(Live(slow), script)
            assert viewer.states[0] == ["waiting", "prefill", "decode", "ended"]
            assert (viewer.states[1][0], viewer.states[1][-1]) == ("waiting", "ended")
            record = viewer.requests[0]
            assert (record["prompt"], record["generated"], record["pages"], record["reason"]) == (12, 4, 0, "length")
            assert 0 < record["first_token"] < WAIT
            assert record["arrived"] < record["ended"]
            fed = [tokens for _, _, _, rows in viewer.passes for number, tokens in rows if number == 0]
            assert fed == [5, 5, 2, 1, 1, 1]
            assert viewer.stats["finished"] == 2
            assert viewer.stats["running"] == viewer.stats["waiting"] == 0

    def test_preempted(self, tiny_model: Callable[..., Decoder], gate: Gate) -> None:
        """Two that fit alone, but not together."""
        with engine(tiny_model(), 12) as llm:
            seen: list[Any] = []

            async def script(viewer: Viewer) -> None:
                handles = [llm.submit(prompt, max_new_tokens=28) for prompt in ("HELLO, WORLD", "OTHER THINGS")]
                await viewer.until(lambda: viewer.state(0) == viewer.state(1) == "waiting")
                gate.let(1000)
                while not viewer.state(1) == viewer.state(0) == "ended":
                    seen.extend((await viewer.next()).get("preempted", []))
                assert all(handle.done for handle in handles)

            live = Live(llm)
            viewer = watch(live, script)
            assert viewer.stats["preemptions"] == len(seen) >= 1
            assert {number for number, _ in seen} == {1}

    def test_known_and_shared(self, llm: LLM, gate: Gate) -> None:
        """Two that begin alike hold the same pages; what is over is kept for later."""
        same = "THE SAME BEGINNING, "  # 5 pages

        async def script(viewer: Viewer) -> None:
            gate.let(2)
            await llm.submit(same + "0", max_new_tokens=2)
            await viewer.until(lambda: viewer.pool["kept"] > 0)
            assert (viewer.pool["own"], viewer.pool["shared"]) == (0, 0)
            assert set(cells(viewer.pool)) == {FREE, KEPT}
            handles = [llm.submit(same + end, max_new_tokens=30) for end in ("1", "2")]
            await viewer.until(lambda: viewer.state(1) == viewer.state(2) == "waiting")
            gate.let(2)
            await viewer.until(lambda: viewer.state(1) == viewer.state(2) == "decode")
            assert viewer.requests[1]["cached"] == viewer.requests[2]["cached"] == 20
            found = cells(viewer.pool)
            assert found.count(SHARED) == viewer.pool["shared"] == 5
            assert found.count(1) == viewer.requests[1]["pages"] - 5 > 0
            assert found.count(2) == viewer.requests[2]["pages"] - 5 > 0
            assert viewer.stats["cached_tokens"] == 40
            gate.let(60)
            for handle in handles:
                await handle
            await viewer.until(lambda: viewer.pool["own"] == viewer.pool["shared"] == 0)

        pool = watch(Live(llm), script).pool
        assert pool["free"] + pool["kept"] == pool["pages"] == 60
        assert pool["free"] == llm.memory.pool.num_free_pages

    def test_names_of_handles(self, llm: LLM) -> None:
        for expected in range(3):
            handle = llm.submit("HELLO", max_new_tokens=2)
            handle.result(WAIT)
            assert number_of(handle) == expected

    def test_a_request_that_is_aborted(self, llm: LLM, gate: Gate) -> None:
        async def script(viewer: Viewer) -> None:
            handle = llm.submit("HELLO", max_new_tokens=200)
            gate.let(3)
            await viewer.until(lambda: viewer.state(0) == "decode")
            handle.abort()
            await viewer.until(lambda: viewer.state(0) == "ended")

        assert watch(Live(llm), script).requests[0]["reason"] == "interrupted"


class TestViewers:
    def test_a_snapshot(self, llm: LLM) -> None:
        live = Live(llm)
        empty = snapshot(live)
        assert empty["full"]
        assert empty["requests"] == empty["passes"] == []
        assert cells(empty["pool"]) == [FREE] * 60
        assert empty["page"]["tokens"] == 4
        llm.generate("HELLO", max_new_tokens=2)
        assert snapshot(live)["stats"]["finished"] == 1
        json.dumps(snapshot(live), allow_nan=False)

    def test_nobody_listens_unless_somebody_views(self, llm: LLM, listeners: list[Any]) -> None:
        threads = threading.enumerate()
        live = Live(llm)
        assert threading.enumerate() == threads, "not even a thread was started"
        assert listeners == []

        async def script(viewer: Viewer) -> None:
            assert len(listeners) == 1
            async with Viewer(live):
                assert len(listeners) == 1, "one listener for all"
            assert len(listeners) == 1
            await llm.submit("HELLO", max_new_tokens=3)

        watch(live, script)
        assert listeners == []
        assert not any(live._events.values())

    def test_an_engine_at_rest_is_left_alone(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        looks: list[float] = []
        look = Live._take_snapshot
        monkeypatch.setattr(
            Live, "_take_snapshot", lambda live, engine: looks.append(time.perf_counter()) or look(live, engine)
        )

        async def script(viewer: Viewer) -> None:
            await llm.submit("HELLO", max_new_tokens=3)
            await viewer.until(lambda: viewer.state(0) == "ended")
            before = len(looks)
            for _ in range(20):
                assert list(await viewer.next()) == ["time"]
            assert len(looks) == before

        watch(Live(llm), script)

    def test_looks_are_at_most_ten_a_second(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "INTERVAL_S", 0.1)
        looks: list[float] = []
        look = Live._take_snapshot
        monkeypatch.setattr(
            Live, "_take_snapshot", lambda live, engine: looks.append(time.perf_counter()) or look(live, engine)
        )
        live = Live(llm)

        async def script(viewer: Viewer) -> None:
            async with Viewer(live) as other:
                handle = llm.submit("HELLO", max_new_tokens=200)
                while not handle.done:
                    await viewer.next()
                    await other.next()
                await viewer.until(lambda: viewer.state(0) == "ended")
                await other.until(lambda: other.state(0) == "ended")

        watch(live, script)
        assert len(looks) <= (looks[-1] - looks[0]) / 0.1 + 2  # one may come late, the next in time

    def test_all_viewers_are_told_the_same(self, llm: LLM) -> None:
        live = Live(llm)

        async def script(viewer: Viewer) -> None:
            async with Viewer(live) as other:
                await llm.submit("HELLO", max_new_tokens=20)
                async with Viewer(live) as late:
                    for each in (viewer, other, late):
                        await each.until(lambda each=each: each.state(0) == "ended")  # type: ignore[misc]
                    assert viewer.requests == other.requests == late.requests
                    assert viewer.pool == other.pool == late.pool
                    assert viewer.passes == other.passes
                    assert sum(tokens for *_, rows in late.passes for _, tokens in rows) == 24

        watch(live, script)

    def test_who_leaves_in_the_middle(self, llm: LLM, listeners: list[Any]) -> None:
        """A viewer that is cancelled while it waits for a look takes nothing with it."""
        live = Live(llm)

        async def leave() -> None:
            async for _ in live.updates(0.0):
                pass

        async def script(viewer: Viewer) -> None:
            handle = llm.submit("HELLO", max_new_tokens=100)
            for _ in range(10):
                with pytest.raises(asyncio.TimeoutError):
                    await asyncio.wait_for(leave(), 0.003)
            await handle
            await viewer.until(lambda: viewer.state(0) == "ended")

        watch(live, script)
        assert listeners == []
        assert llm.generate("HELLO", max_new_tokens=2).finish_reason == "length"

    def test_a_look_that_is_not_wanted_any_more(self, llm: LLM) -> None:
        """Who cancels it before its turn does not end the engine."""
        begun, free = threading.Event(), threading.Event()
        first = llm.between_steps(lambda _: (begun.set(), free.wait(WAIT)))
        assert begun.wait(WAIT)
        second = llm.between_steps(lambda _: pytest.fail("it was cancelled"))
        assert second.cancel()
        free.set()
        first.result(WAIT)
        assert llm.generate("HELLO", max_new_tokens=2).finish_reason == "length"

    def test_a_closed_engine(self, tiny_model: Callable[..., Decoder]) -> None:
        llm = LLM(tiny_model(), Letters(), cache_memory=10**6)
        live = Live(llm)

        async def told() -> list[dict[str, Any]]:
            updates = []
            async for update in live.updates(0.0):
                updates.append(update)
                if len(updates) == 1:
                    llm.submit("HELLO", max_new_tokens=1).result(WAIT)
                    llm.close()
            return updates

        assert asyncio.run(told())[-1]["stopped"]
        assert live._num_viewers == 0

    def test_no_text(self, llm: LLM) -> None:
        """Keys and states are words; all else is numbers."""
        words = {"waiting", "prefill", "decode", "preempted", "ended", "length", "eos", "stop", "interrupted", "failed"}

        def check(value: Any) -> None:
            if isinstance(value, dict):
                for each in value.values():
                    check(each)
            elif isinstance(value, list | tuple):
                for each in value:
                    check(each)
            else:
                assert value is None or isinstance(value, int | float) or value in words

        async def script(viewer: Viewer) -> None:
            handle = llm.submit("HELLO", max_new_tokens=20)
            while not handle.done:
                check(await viewer.next())

        live = Live(llm)
        watch(live, script)
        check(snapshot(live))


class TestBounds:
    def test_many_requests(self, llm: LLM) -> None:
        """Far more than are told of: each viewer ends with the truth, and nothing is kept of the others."""
        live = Live(llm)
        tasks: list[weakref.ref[Sequence]] = []
        largest = 0

        async def script(viewer: Viewer) -> None:
            nonlocal largest
            handles = [llm.submit("HELLO" + chr(33 + i % 60), max_new_tokens=2) for i in range(400)]
            tasks.extend(weakref.ref(handle.sequences[0]) for handle in handles)
            while not all(handle.done for handle in handles):
                largest = max(largest, len(json.dumps(await viewer.next())))
                assert len(live._requests) <= MAX_ALIVE + MAX_ENDED
            await viewer.until(lambda: all(record["state"] == "ended" for record in viewer.requests.values()))
            assert viewer.stats["finished"] == 400

        watch(live, script)
        assert largest < 60_000
        assert len(live._requests) <= MAX_ENDED
        assert len(live._timeline) <= module.MAX_PASSES
        gc.collect()
        assert not any(task() for task in tasks), "no request is kept"

    def test_a_viewer_that_is_slow(self, llm: LLM) -> None:
        """It has missed the ends of most: it is told all anew, so that none stays for ever."""

        async def script(viewer: Viewer) -> None:
            handles = [llm.submit("HELLO", max_new_tokens=100) for _ in range(20)]
            await viewer.until(lambda: len(viewer.requests) == 20)
            async with Viewer(live) as other:
                for handle in handles:
                    handle.abort()
                for _ in range(3 * MAX_ENDED):
                    await llm.submit("HELLO", max_new_tokens=1)
                    await other.next()
            await viewer.until(lambda: viewer.state(19 + 3 * MAX_ENDED) == "ended")
            assert len(viewer.requests) <= MAX_ENDED
            assert {record["state"] for record in viewer.requests.values()} == {"ended"}

        live = Live(llm)
        watch(live, script)

    def test_many_passes_are_told_together(self) -> None:
        sequence = Sequence.__new__(Sequence)
        sequence.arrival = 7
        step = [ScheduledTokens(sequence, 1)]
        events = [module.Event(0.01 * i + 0.01, "step", scheduled=step, seconds=0.01) for i in range(3000)]
        told = list(module._timeline(events, {7: None}, 0.0))
        assert len(told) == module.MAX_ROWS
        assert told[0] == [0.0, 0.05, 5, [[7, 5]]]
        assert sum(passes for _, _, passes, _ in told) == 3000
        assert list(module._timeline(events[:2], {}, 0.0)) == [[0.0, 0.01, 1, []], [0.01, 0.01, 1, []]]

    @pytest.mark.parametrize("pages", [1, 60, MAX_CELLS, MAX_CELLS + 1, 50_000])
    def test_the_map_of_any_pool(self, pages: int) -> None:
        holders = np.zeros(pages, np.int32)
        holders[: pages // 2] = 1
        own = np.array([0, -1], np.int64)
        holders[0] = 2
        told = module._pool_map(holders, [(5, own), (9, np.array([pages // 3]))])
        found = cells(told)
        assert len(found) <= MAX_CELLS
        assert len(found) == -(-pages // told["block"])
        assert told["free"] + told["kept"] + told["shared"] + told["own"] == told["pages"] == pages
        if pages == 1:
            assert found == [SHARED]
        else:
            assert found[0] == 5
            assert found[(pages // 3) // told["block"]] == 9
            assert found[-1] == FREE


class TestRoutes:
    def test_the_page(self, llm: LLM) -> None:
        client = TestClient(Starlette(routes=routes(lambda: Live(llm))))
        one, other = client.get("/"), client.get("/")
        assert one.status_code == 200
        policy = one.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "connect-src 'self'" in policy
        nonce = policy.split("'nonce-")[1].split("'")[0]
        assert one.text.count(f'nonce="{nonce}"') == 2
        assert "{{" not in one.text
        assert one.text != other.text, "each has a nonce of its own"

    def test_the_stream(self, llm: LLM, listeners: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
        """All of it first, then comments while nothing happens; then what happens."""
        monkeypatch.setattr(module, "KEEP_ALIVE_S", 0.1)
        live = Live(llm)

        async def read() -> list[str]:
            events = module._events(live)
            lines = [await anext(events), await anext(events)]
            await llm.submit("HELLO", max_new_tokens=2)
            lines.append(await anext(events))
            await events.aclose()  # type: ignore[attr-defined]
            return lines

        first, quiet, change = asyncio.run(read())
        assert json.loads(first.removeprefix("data: "))["full"]
        assert quiet == ": keep-alive\n\n"
        assert "full" not in json.loads(change.removeprefix("data: "))
        assert first.endswith("\n\n")
        assert listeners == []
