"""GPU kernels compiled before they are needed, many at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from types import SimpleNamespace
from typing import Any

_compiling: ContextVar[bool] = ContextVar("compiling", default=False)


@contextmanager
def compiling() -> Iterator[list[str]]:
    """Within, kernels are compiled in threads, and none is launched. Gives the names of those that no disk had.

    One that cannot be compiled is left out: whoever launches it is told why.
    """
    import triton

    fresh: list[str] = []

    def listen(*, src: Any, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            fresh.append(src.name)

    knobs = triton.knobs.compilation
    before, knobs.listener = knobs.listener, listen
    token = _compiling.set(True)
    try:
        with (
            ThreadPoolExecutor(os.cpu_count()) as threads,
            triton.AsyncCompileMode(threads, ignore_errors=True),
        ):
            yield fresh
    finally:
        _compiling.reset(token)
        knobs.listener = before


def possible() -> bool:
    """Whether this Triton can: neither one before 3.4, nor its interpreter."""
    import triton

    return hasattr(triton, "AsyncCompileMode") and not triton.knobs.runtime.interpret


def seen(modules: SimpleNamespace) -> Any:
    """Modules of kernels, as they are to be seen here and now: within `compiling`, what is launched is compiled."""
    if not _compiling.get():
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
