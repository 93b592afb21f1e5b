"""Who is woken, and when: tasks of event loops that wait for a request."""

import asyncio
import threading
import time
from types import SimpleNamespace

from infer.engine.driver import News, Wakeups

STREAMS, TOKENS = 8, 200


class Stream:
    """A request whose tokens come from another thread."""

    def __init__(self, wakeups: Wakeups) -> None:
        self.news, self.task, self.tokens = News(wakeups), SimpleNamespace(done=False), 0
        self.seen = 0
        self.arrivals: list[int] = []

    def take(self) -> None:
        self.tokens += 1
        self.task.done = self.tokens == TOKENS
        self.news(self.task)  # type: ignore[arg-type]

    async def read(self, busy_s: float) -> None:
        while not self.task.done or self.seen < self.tokens:
            await self.news.wait_async(lambda: self.tokens > self.seen, pieces=True)
            time.sleep(busy_s)  # what it costs to hand them on
            before, self.seen = self.seen, self.tokens
            self.arrivals.append(self.seen - before)


def run(busy_s: float, step_s: float) -> list[Stream]:
    """All streams, read in one event loop while a thread makes their tokens."""
    wakeups = Wakeups()
    streams = [Stream(wakeups) for _ in range(STREAMS)]

    def engine() -> None:
        for _ in range(TOKENS):
            for stream in streams:
                stream.take()
            wakeups.send()
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


def test_a_loop_with_much_to_do_gets_several_at_once() -> None:
    for stream in run(busy_s=0.001, step_s=0.001):
        assert len(stream.arrivals) < TOKENS / 4  # 8 ms for all of them, and a rest of 24


def test_who_is_cancelled_waits_no_more() -> None:
    news = News(Wakeups())

    async def cancelled() -> None:
        waiting = [asyncio.ensure_future(news.wait_async(lambda: False, pieces=pieces)) for pieces in (True, False)]
        await asyncio.sleep(0)
        assert (news._for_pieces, news._for_end) == (1, 1)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

    asyncio.run(cancelled())
    assert (news._for_pieces, news._for_end, news._asleep) == (0, 0, [])


def test_loops_that_are_closed_are_forgotten() -> None:
    wakeups = Wakeups()
    for _ in range(3):
        loop = asyncio.new_event_loop()
        wakeups.add(loop, loop.create_future())
        loop.close()
        wakeups.send()
    assert len(wakeups._wakers) == 1
