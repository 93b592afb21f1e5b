"""The thread that drives a loop, and what wakes those who wait for its requests."""

from __future__ import annotations

import asyncio
import atexit
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from infer.engine.loop import EngineFailed, Loop, Task

T = TypeVar("T")
REST = 3.0  # times as long as an event loop was busy with tokens, it is left alone
LEAST_REST_S, MOST_REST_S = 0.001, 0.05  # timers of event loops know no less than a millisecond


class Driver:
    """The thread that drives a loop, from the first request on."""

    def __init__(self, loop: Loop, patience: float | None = None) -> None:
        """patience: seconds that `close` waits for the step that runs; None: until it is over."""
        self.loop, self._patience = loop, patience
        self.wakeups = Wakeups()
        self._changed = threading.Condition()
        self._inbox: list[Callable[[], None]] = []
        self._closed = False
        self.failure: BaseException | None = None
        self._thread: threading.Thread | None = None

    def submit(self, tasks: Sequence[Task]) -> None:
        def begin() -> None:
            for task in tasks:
                self.loop.submit(task)

        self._post(begin)

    def abort(self, tasks: Sequence[Task]) -> None:
        """From any thread, at any time; also when all is over."""
        if all(task.done for task in tasks):
            return
        with self._changed:
            if not self._closed and self.failure is None:
                self._inbox.append(lambda: self.loop.abort(tasks))
                self._changed.notify()

    def call(self, function: Callable[[], T]) -> T:
        """Run a function between two steps, and wait for what it returns."""
        return self.between_steps(function).result()

    def between_steps(self, function: Callable[[], T]) -> Future[T]:
        """As `call`, without waiting."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        self._post(run)
        return future

    def fail(self, error: BaseException) -> None:
        """Something is gone without which nothing can go on: end now, not at the next step. From any thread."""

        def end() -> None:
            raise error

        with suppress(RuntimeError):  # it has ended
            self._post(end)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        atexit.unregister(self.close)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(self._patience)

    def _post(self, action: Callable[[], None]) -> None:
        with self._changed:
            if self.failure is not None:
                raise RuntimeError(f"this LLM has failed, make another: {self.failure}") from self.failure
            if self._closed:
                raise RuntimeError("this LLM is closed")
            self._inbox.append(action)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="infer", daemon=True)
                self._thread.start()
                atexit.register(self.close)  # registered last, so it runs before Triton unloads its kernels
            self._changed.notify()

    def _run(self) -> None:
        try:
            while self._wait():
                if not self.loop.idle:
                    self.loop.step()
                self.wakeups.send()
            self.loop.close()
        except BaseException as error:
            failure = EngineFailed(f"the engine has failed: {error}")
            failure.__cause__ = error
            with self._changed:
                self.failure = error
            with suppress(Exception):
                self.loop.runner.close()  # a device that has failed must not be asked for rows that are given up
            while self._inbox:  # who has asked in the meantime has to hear of it
                with suppress(Exception):
                    self._inbox.pop(0)()
            self.loop.close(failure)
        finally:
            self.wakeups.send()

    def _wait(self) -> bool:
        """Do what was asked for. False: it is time to end."""
        with self._changed:
            while not self._inbox and not self._closed and self.loop.idle:
                self._changed.wait()
            going_on = not self._closed  # nothing is asked for after that
        self._act()
        return going_on

    def _act(self) -> None:
        while self._inbox:
            self._inbox.pop(0)()


class Wakeups:
    """Wakes tasks of event loops that wait for requests: after a step, all those of a loop at once."""

    def __init__(self) -> None:
        self._wakers: dict[asyncio.AbstractEventLoop, _Waker] = {}  # the engine's thread alone uses it

    def add(self, loop: asyncio.AbstractEventLoop, future: asyncio.Future[None]) -> None:
        waker = self._wakers.get(loop)
        if waker is None:
            self._wakers = {open: waker for open, waker in self._wakers.items() if not open.is_closed()}
            waker = self._wakers[loop] = _Waker(loop)
        waker.add(future)

    def send(self) -> None:
        for waker in self._wakers.values():
            waker.send()


class _Waker:
    """Wakes tasks of one event loop, and then leaves it alone for a time.

    The loop and the engine share an interpreter: with many tasks, each of which has something to do after each step,
    the engine would have to wait. A loop that rests gives each of them several tokens at once instead.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._due: list[asyncio.Future[None]] = []
        self._asked = False  # whether the loop will look at what is due

    def add(self, future: asyncio.Future[None]) -> None:
        with self._lock:
            self._due.append(future)

    def send(self) -> None:
        with self._lock:
            if self._asked or not self._due:
                return
            self._asked = True
        with suppress(RuntimeError):  # it is closed by now
            self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        began = self._loop.time()
        with self._lock:
            due, self._due = self._due, []
        for future in due:
            if not future.done():
                future.set_result(None)
        self._loop.call_soon(self._woken, began)  # behind all of them

    def _woken(self, began: float) -> None:
        rest = min(REST * (self._loop.time() - began), MOST_REST_S)
        if rest > LEAST_REST_S:
            self._loop.call_later(rest, self._look)
        else:
            self._look()

    def _look(self) -> None:
        with self._lock:
            self._asked = bool(self._due)
        if self._asked:
            self._wake()


class News:
    """Wakes those who wait for a request, in threads or event loops."""

    def __init__(self, wakeups: Wakeups) -> None:
        self._wakeups = wakeups
        self._changed = threading.Condition()
        self._for_pieces = self._for_end = 0  # how many wait
        self._asleep: list[_Sleeper] = []  # of these, those in event loops

    def __call__(self, task: Task) -> None:
        """From the engine's thread. Mostly nobody waits: then this must cost nothing."""
        if self._for_pieces or (task.done and self._for_end):
            with self._changed:
                self._changed.notify_all()
                for sleeper in self._asleep:
                    self._count(sleeper.pieces, -1)
                    self._wakeups.add(sleeper.loop, sleeper.future)
                self._asleep.clear()

    def wait(self, ready: Callable[[], bool], *, pieces: bool, timeout: float | None = None) -> None:
        """pieces: each piece may make it ready; else only the end."""
        with self._changed:
            self._count(pieces, 1)  # before it looks: what comes after that wakes it
            try:
                if not self._changed.wait_for(ready, timeout):
                    raise TimeoutError(f"not done after {timeout} seconds")
            finally:
                self._count(pieces, -1)

    async def wait_async(self, ready: Callable[[], bool], *, pieces: bool) -> None:
        loop = asyncio.get_running_loop()
        while not ready():
            sleeper = _Sleeper(loop, loop.create_future(), pieces)
            with self._changed:
                self._count(pieces, 1)
                self._asleep.append(sleeper)
            try:
                if not ready():  # what came before it was counted has woken nobody
                    await sleeper.future
            finally:
                if not sleeper.future.done() or sleeper.future.cancelled():
                    self._leave(sleeper)

    def _leave(self, sleeper: _Sleeper) -> None:
        with self._changed:
            if sleeper in self._asleep:
                self._asleep.remove(sleeper)
                self._count(sleeper.pieces, -1)

    def _count(self, pieces: bool, more: int) -> None:
        if pieces:
            self._for_pieces += more
        else:
            self._for_end += more


@dataclass(frozen=True, eq=False)
class _Sleeper:
    """A task that waits in an event loop."""

    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[None]
    pieces: bool
