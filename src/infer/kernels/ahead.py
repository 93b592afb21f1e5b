"""GPU kernels compiled before they are needed, many at a time."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar, copy_context
from functools import partial
from types import SimpleNamespace
from typing import Any

from infer.machine import usable_cpus

_only_compiled: ContextVar[bool] = ContextVar("only_compiled", default=False)


def possible() -> bool:
    """Whether there is anything to compile: Triton's interpreter has nothing."""
    import triton

    return not triton.knobs.runtime.interpret


def compile_all(walk: Callable[[], None]) -> list[str]:
    """The kernels that `walk` would launch, in threads; it launches none. Returns the names of those that no disk had.

    One that cannot be compiled is left out: whoever launches it is told why.
    """
    # In a context of its own, for Triton's mode stays on in one that an interrupt has left.
    return copy_context().run(_compile_all, walk)


def _compile_all(walk: Callable[[], None]) -> list[str]:
    import triton

    knobs, fresh = triton.knobs.compilation, []
    before = knobs.listener

    def listen(*, src: Any, cache_hit: bool, **others: Any) -> None:
        if not cache_hit:
            fresh.append(src.name)
        if before is not None:
            before(src=src, cache_hit=cache_hit, **others)

    _only_compiled.set(True)
    knobs.listener = listen
    threads = ThreadPoolExecutor(usable_cpus())
    try:
        with triton.AsyncCompileMode(threads, ignore_errors=True):
            walk()
    finally:
        knobs.listener = before
        threads.shutdown(cancel_futures=True)  # after an interrupt, what has not begun
    return fresh


def seen(modules: SimpleNamespace) -> Any:
    """Modules of kernels, as they are to be seen here and now: within `compile_all`, what is launched is compiled."""
    if not _only_compiled.get():
        return modules
    return SimpleNamespace(**{name: _Module(each) for name, each in vars(modules).items()})


class _Module:
    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return _Kernel(getattr(self._module, name))


class _Kernel:
    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: Any) -> Any:
        return partial(self._kernel.warmup, grid=grid)
