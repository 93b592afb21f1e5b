"""GPU kernels compiled before they are needed, many at a time."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from contextvars import ContextVar, copy_context
from typing import Any

import triton

from infer.machine import usable_cpus

_recorded: ContextVar[list[Any] | None] = ContextVar("recorded", default=None)  # what would have been launched


def possible() -> bool:
    """Whether there is anything to compile: Triton's interpreter has nothing."""
    return not triton.knobs.runtime.interpret


def compile_all(walk: Callable[[], None], within: Callable[[], AbstractContextManager[Any]] = nullcontext) -> list[str]:
    """The kernels that `walk` would launch, in threads; it launches none. Returns the names of those that no disk had.

    within: what a thread must be in for a kernel to get onto the device. One that cannot be compiled, or loaded, is
    left out: whoever launches it is told why.
    """
    # In a context of its own, for Triton's mode stays on in one that an interrupt has left.
    return copy_context().run(_compile_all, walk, within)


def _compile_all(walk: Callable[[], None], within: Callable[[], AbstractContextManager[Any]]) -> list[str]:
    knobs = triton.knobs.compilation
    fresh: list[str] = []
    futures: list[Any] = []
    before = knobs.listener

    def listen(*, src: Any, cache_hit: bool, **others: Any) -> None:
        if not cache_hit:
            fresh.append(src.name)
        if before is not None:
            before(src=src, cache_hit=cache_hit, **others)

    def load(kernel: Any) -> None:
        try:
            with within():
                _ = kernel.run  # what launches it is a program too, which Triton has a C compiler make
        except Exception:
            kernel._run = None  # Triton would take a kernel that is half loaded for one that is

    _recorded.set(futures)
    knobs.listener = listen
    threads = ThreadPoolExecutor(usable_cpus())
    try:
        with triton.AsyncCompileMode(threads, ignore_errors=True):
            walk()
        list(threads.map(load, _different(futures)))
    finally:
        knobs.listener = before
        threads.shutdown(cancel_futures=True)  # after an interrupt, what has not begun
    return fresh


def _different(futures: list[Any]) -> list[Any]:
    """The kernels that became of them, once each."""
    kernels = {}
    for each in futures:
        with suppress(Exception):
            kernel = each.result() if hasattr(each, "result") else each
            kernels[id(kernel)] = kernel
    return [kernel for kernel in kernels.values() if kernel is not None]  # None: a hook of Triton's took it over


def recording_launches() -> bool:
    """Whether launches are compiled here and now instead: nothing runs on the device."""
    return _recorded.get() is not None


def record(compiled: Any) -> None:
    """What a launch would have run, compiled or about to be."""
    recorded = _recorded.get()
    assert recorded is not None
    recorded.append(compiled)
