"""Who is woken, and when: tasks of event loops that wait for a request."""

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from infer.engine.thread import MAX_BACKOFF_S, EngineThread, Notifier

STREAMS, TOKENS = 8, 200


def engine_thread() -> EngineThread:
    return EngineThread(SimpleNamespace())  # type: ignore[arg-type]


class Stream:
    """A request whose tokens come from another thread."""

    def __init__(self, thread: EngineThread) -> None:
        self.notifier, self.sequence, self.tokens = Notifier(thread), SimpleNamespace(is_finished=False), 0
        self.seen = 0
        self.arrivals: list[int] = []

    def append(self) -> None:
        self.tokens += 1
        self.sequence.is_finished = self.tokens == TOKENS
        self.notifier(self.sequence)  # type: ignore[arg-type]

    async def read(self, busy_s: float) -> None:
        while not self.sequence.is_finished or self.seen < self.tokens:
            await self.notifier.wait_async(lambda: self.tokens > self.seen, tokens=True)
            time.sleep(busy_s)  # what it costs to hand them on
            before, self.seen = self.seen, self.tokens
            self.arrivals.append(self.seen - before)


def run(busy_s: float, step_s: float) -> list[Stream]:
    """All streams, read in one event loop while a thread makes their tokens."""
    driver = engine_thread()
    streams = [Stream(driver) for _ in range(STREAMS)]

    def engine() -> None:
        for _ in range(TOKENS):
            for stream in streams:
                stream.append()
            driver._send_wakeups()
            time.sleep(step_s)

    async def read_all() -> None:
        thread = threading.Thread(target=engine)
        thread.start()
        await asyncio.wait_for(asyncio.gather(*(stream.read(busy_s) for stream in streams)), 60)
        thread.join()

    asyncio.run(read_all())
    return streams


def test_nothing_is_lost() -> None:
    for busy_s, step_s in ((0.0, 0.0), (0.0, 0.001), (0.001, 0.0005)):
        assert [sum(stream.arrivals) for stream in run(busy_s, step_s)] == [TOKENS] * STREAMS


class Loop:
    """An event loop with a clock that the test moves."""

    def __init__(self) -> None:
        self.now = 0.0
        self.soon: list[Callable[[], Any]] = []
        self.later: list[tuple[float, Callable[[], Any]]] = []

    def time(self) -> float:
        return self.now

    def call_soon(self, function: Any, *arguments: Any) -> None:
        self.soon.append(partial(function, *arguments))

    call_soon_threadsafe = call_soon

    def call_later(self, delay: float, function: Any) -> None:
        self.later.append((delay, function))

    def run_next(self) -> None:
        self.soon.pop(0)()


@pytest.mark.parametrize(("busy_s", "pause_s"), [(0.008, 0.024), (1.0, MAX_BACKOFF_S), (0.0001, None)])
def test_a_loop_with_much_to_do_gets_several_at_once(busy_s: float, pause_s: float | None) -> None:
    """It is left alone for three times as long as its tasks took, and then gets all tokens of that time."""
    loop, driver = Loop(), engine_thread()
    futures: list[Future[None]] = [Future() for _ in range(5)]

    def step(future: Any) -> None:
        driver.wake(loop, future)  # type: ignore[arg-type]
        driver._send_wakeups()

    step(futures[0])
    loop.run_next()
    assert [future.done() for future in futures] == [True, False, False, False, False]
    loop.now += busy_s
    loop.run_next()  # after its tasks
    for future in futures[1:]:
        step(future)
    if pause_s is None:
        assert not loop.later
        loop.run_next()
    else:
        [(delay, resume)] = loop.later
        assert delay == pytest.approx(pause_s)
        assert not loop.soon
        resume()
    assert all(future.done() for future in futures)


def test_who_is_cancelled_waits_no_more() -> None:
    notifier = Notifier(engine_thread())

    async def cancelled() -> None:
        waiting = [asyncio.ensure_future(notifier.wait_async(lambda: False, tokens=tokens)) for tokens in (True, False)]
        await asyncio.sleep(0)
        assert [waiter.tokens for waiter in notifier._waiters] == [True, False]
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

    asyncio.run(cancelled())
    assert notifier._waiters == []


def test_loops_that_are_closed_are_forgotten() -> None:
    driver = engine_thread()
    for _ in range(3):
        loop = asyncio.new_event_loop()
        driver.wake(loop, loop.create_future())
        loop.close()
        driver._send_wakeups()
    assert len(driver._wakers) == 1
