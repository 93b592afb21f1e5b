"""The thread that drives an engine, and how it wakes the callers that wait for its sequences."""

from __future__ import annotations

import asyncio
import atexit
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from typing import NamedTuple, TypeVar

from infer.engine.engine import Engine, EngineFailed
from infer.engine.sequence import Sequence

T = TypeVar("T")
BACKOFF = 3.0  # after the loop spent t seconds on tokens, wait this many times t before waking it again
MIN_BACKOFF_S, MAX_BACKOFF_S = 0.001, 0.05  # timers of event loops have a resolution of a millisecond


class EngineThread:
    """Steps an engine in a thread of its own, from the first request on. Any thread may call its methods."""

    def __init__(self, engine: Engine, close_timeout_s: float | None = None) -> None:
        """close_timeout_s: for the step that runs when `close` is called; None: wait until it is done."""
        self.engine, self._close_timeout_s = engine, close_timeout_s
        self.failure: BaseException | None = None
        self._changed = threading.Condition()
        self._inbox: list[Callable[[], None]] = []
        self._closed = False
        self._thread: threading.Thread | None = None
        self._process = os.getpid()
        self._wakers: dict[asyncio.AbstractEventLoop, _LoopWaker] = {}  # used by the engine's thread only

    def submit(self, sequences: list[Sequence]) -> None:
        self._post(*(partial(self.engine.submit, sequence) for sequence in sequences))

    def abort(self, sequences: list[Sequence]) -> None:
        """No-op once the sequences are finished or the engine is closed."""
        if self._is_forked or all(sequence.is_finished for sequence in sequences):
            return
        with self._changed:
            if not self._closed and self.failure is None:
                self._inbox.append(lambda: self.engine.abort(sequences))
                self._changed.notify()

    def between_steps(self, function: Callable[[Engine], T]) -> Future[T]:
        """Run a function in the engine's thread, between two steps."""
        self.check_can_wait()
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                self._check_alive()
                settle = partial(future.set_result, function(self.engine))
            except BaseException as error:
                settle = partial(future.set_exception, error)
            with suppress(BaseException):  # of the caller's own callbacks
                settle()

        self._post(run)
        return future

    def fail(self, error: BaseException) -> None:
        """Stop the engine with an error: something that it needs is gone."""

        def fail() -> None:
            raise error

        with suppress(RuntimeError):  # it has ended
            self._post(fail)

    def close(self) -> None:
        if self._is_forked:
            return
        with self._changed:
            self._closed = True
            self._changed.notify()
        atexit.unregister(self.close)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(self._close_timeout_s)

    def wake(self, loop: asyncio.AbstractEventLoop, future: asyncio.Future[None]) -> None:
        """Complete a future of an event loop after this step, together with its others."""
        waker = self._wakers.get(loop)
        if waker is None:
            self._wakers = {open: waker for open, waker in self._wakers.items() if not open.is_closed()}
            waker = self._wakers[loop] = _LoopWaker(loop)
        waker.add(future)

    def check_can_wait(self) -> None:
        """Refuse to wait for the engine where that would never end."""
        if self._is_forked:
            raise RuntimeError("this LLM runs in the process that this one was forked from: create another LLM here")
        if threading.current_thread() is self._thread:
            raise RuntimeError(
                "the engine's thread cannot wait for the engine: listeners may submit requests, but must not wait for "
                "them"
            )

    @property
    def _is_forked(self) -> bool:
        """Whether this is a forked process: it has a copy of the locks, maybe locked, and not the engine's thread."""
        return os.getpid() != self._process

    def _check_alive(self) -> None:
        if self.failure is not None:
            raise RuntimeError(f"this LLM has failed, create another: {self.failure}") from self.failure

    def _post(self, *actions: Callable[[], None]) -> None:
        if self._is_forked:
            self.check_can_wait()
        with self._changed:
            self._check_alive()
            if self._closed:
                raise RuntimeError("this LLM is closed")
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="infer", daemon=True)
                thread.start()
                self._thread = thread
                atexit.register(self.close)  # registered last, so it runs before Triton unloads its kernels
            self._inbox += actions
            self._changed.notify()

    def _run(self) -> None:
        try:
            while self._wait_and_process():
                if not self.engine.is_idle:
                    self.engine.step()
                self._send_wakeups()
            self.engine.close()
        except BaseException as error:
            failure = EngineFailed(f"the engine has failed: {error}")
            failure.__cause__ = error
            with self._changed:
                self.failure = error
            with suppress(Exception):
                self.engine.runner.close()  # once: each call to a device that has failed may hang
            while self._inbox:  # requests posted before the failure fail too
                with suppress(Exception):
                    self._inbox.pop(0)()
            self.engine.close(failure)
        finally:
            self._send_wakeups()

    def _wait_and_process(self) -> bool:
        """Wait for work, and run what was posted. False: the engine was closed."""
        with self._changed:
            while not self._inbox and not self._closed and self.engine.is_idle:
                self._changed.wait()
            is_open = not self._closed  # nothing is posted after that
        while self._inbox:
            self._inbox.pop(0)()
        return is_open

    def _send_wakeups(self) -> None:
        for waker in self._wakers.values():
            waker.send()


class _LoopWaker:
    """Wakes the tasks of one event loop, all at once, at a limited rate.

    The loop and the engine share an interpreter: if many tasks had work after each step, the engine would have to wait.
    With a pause, each of them gets several tokens at once instead.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._due: list[asyncio.Future[None]] = []
        self._scheduled = False  # whether the loop will look at what is due

    def add(self, future: asyncio.Future[None]) -> None:
        with self._lock:
            self._due.append(future)

    def send(self) -> None:
        with self._lock:
            if self._scheduled or not self._due:
                return
            self._scheduled = True
        with suppress(RuntimeError):  # the loop was closed
            self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        began = self._loop.time()
        with self._lock:
            due, self._due = self._due, []
        for future in due:
            if not future.done():
                future.set_result(None)
        self._loop.call_soon(self._pause, began)  # after all of these tasks

    def _pause(self, began: float) -> None:
        pause = min(BACKOFF * (self._loop.time() - began), MAX_BACKOFF_S)
        if pause > MIN_BACKOFF_S:
            self._loop.call_later(pause, self._resume)
        else:
            self._resume()

    def _resume(self) -> None:
        with self._lock:
            self._scheduled = bool(self._due)
        if self._scheduled:
            self._wake()


class _Waiter(NamedTuple):
    """A thread or a task that waits."""

    tokens: bool  # for the next token; False: for the end
    wake: Callable[[], object]


class Notifier:
    """Wakes threads and tasks that wait for the tokens, or the end, of some sequences."""

    def __init__(self, thread: EngineThread) -> None:
        self._thread = thread
        self._lock = threading.Lock()
        self._waiters: list[_Waiter] = []

    def __call__(self, sequence: Sequence) -> None:
        """In the engine's thread, after each commit."""
        if not any(waiter.tokens or sequence.is_finished for waiter in self._waiters):
            return  # without the lock: most commits have nobody to wake
        with self._lock:
            due = [waiter for waiter in self._waiters if waiter.tokens or sequence.is_finished]
            self._waiters = [waiter for waiter in self._waiters if waiter not in due]
        for waiter in due:
            waiter.wake()

    def wait(self, ready: Callable[[], bool], *, tokens: bool, timeout: float | None = None) -> None:
        """tokens: whether each token may make it ready; else only the end."""
        end = math.inf if timeout is None else time.monotonic() + timeout
        while not ready():
            self._thread.check_can_wait()
            if (left := end - time.monotonic()) <= 0:
                raise TimeoutError(f"not done after {timeout} seconds")
            woken = threading.Event()
            with self._waiting(tokens, woken.set):
                if not ready():  # what happened before has notified nobody
                    woken.wait(None if timeout is None else left)

    async def wait_async(self, ready: Callable[[], bool], *, tokens: bool) -> None:
        loop = asyncio.get_running_loop()
        while not ready():
            self._thread.check_can_wait()
            future = loop.create_future()
            with self._waiting(tokens, partial(self._thread.wake, loop, future)):
                if not ready():
                    await future

    @contextmanager
    def _waiting(self, tokens: bool, wake: Callable[[], object]) -> Iterator[None]:
        waiter = _Waiter(tokens, wake)
        with self._lock:
            self._waiters.append(waiter)
        try:
            yield
        finally:
            with self._lock, suppress(ValueError):  # it was woken
                self._waiters.remove(waiter)
