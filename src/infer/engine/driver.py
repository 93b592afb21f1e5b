"""The thread that drives a loop, and what wakes those who wait for its requests."""

from __future__ import annotations

import asyncio
import atexit
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

from infer.engine.loop import Loop, Task

T = TypeVar("T")


class Driver:
    """The thread that drives a loop, from the first request on."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
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

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        atexit.unregister(self.close)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

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
            failure = RuntimeError(f"the engine has failed: {error}")
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
    """Tells event loops who has to be woken: each loop once after a step, however many of its tasks wait.

    To tell a loop takes a write to a pipe, and the loop then competes with the engine for the interpreter.
    """

    def __init__(self) -> None:
        self._due: dict[asyncio.AbstractEventLoop, list[asyncio.Event]] = {}  # the engine's thread alone uses it

    def add(self, loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
        self._due.setdefault(loop, []).append(event)

    def send(self) -> None:
        while self._due:
            loop, events = self._due.popitem()
            with suppress(RuntimeError):  # it is closed by now
                loop.call_soon_threadsafe(_set_all, events)


def _set_all(events: Sequence[asyncio.Event]) -> None:
    for event in events:
        event.set()


class News:
    """Wakes those who wait for a request, in threads or event loops."""

    def __init__(self, wakeups: Wakeups) -> None:
        self._wakeups = wakeups
        self._changed = threading.Condition()
        self._for_pieces = self._for_end = 0  # how many wait
        self._async: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    def __call__(self, task: Task) -> None:
        """From the engine's thread. Mostly nobody waits: then this must cost nothing."""
        if self._for_pieces or (task.done and self._for_end):
            with self._changed:
                self._changed.notify_all()
                for waiter in self._async:
                    self._wakeups.add(*waiter)

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
        waiter = asyncio.get_running_loop(), asyncio.Event()
        with self._changed:
            self._count(pieces, 1)
            self._async.append(waiter)
        try:
            while not ready():
                await waiter[1].wait()
                waiter[1].clear()
        finally:
            with self._changed:
                self._count(pieces, -1)
                self._async.remove(waiter)

    def _count(self, pieces: bool, more: int) -> None:
        if pieces:
            self._for_pieces += more
        else:
            self._for_end += more
