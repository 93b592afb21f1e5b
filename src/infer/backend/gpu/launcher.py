"""GPU kernels launched again without Triton's own launcher, which takes tens of microseconds to look a kernel up."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import triton
from torch import Tensor

from infer.backend.gpu import precompile
from infer.backend.gpu.tuned import SHARED


def kernel(**options: Any) -> Callable[[Callable[..., None]], Any]:
    """Decorates a Triton kernel that the host launches: kernel[grid](*args, **options).

    options: those of triton.jit. Triton's interpreter compiles nothing, and launches its own.
    """

    def decorate(function: Callable[..., None]) -> Any:
        made = triton.jit(function, **options)
        return made if triton.knobs.runtime.interpret else Kernel(made)

    return decorate


class Kernel:
    """A Triton kernel: kernel[grid](*args, **options) launches it."""

    def __init__(self, kernel: Any) -> None:
        self.jit = kernel
        self._compiled: dict[Any, Any] = {}
        self._unspecialized = [parameter.do_not_specialize for parameter in kernel.params]
        self._defaults = {p.name: p.default if p.has_default else None for p in kernel.params}
        self._names = [parameter.name for parameter in kernel.params]

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def launch(*args: Any, **options: Any) -> Any:
            if precompile.recording_launches():
                precompile.record(self.jit.warmup(*args, grid=grid, **options))
                return None
            key = (
                args[0].device.index,
                *map(_kind, args, self._unspecialized),
                *(
                    (name, _kind(value, False) if isinstance(value, Tensor) else value)
                    for name, value in options.items()
                ),
            )
            compiled = self._compiled.get(key)
            if compiled is None:
                found = self.jit[grid](*args, **options)
                if hasattr(found, "result"):  # another thread compiles it ahead
                    found = found.result()
                if hasattr(found, "run"):  # else a hook of Triton's took it over
                    self._compiled[key] = found
                    _share_memory(found)
                return found
            self.bound(compiled, grid, len(args), options)(*args)
            return compiled

        return launch

    def bound(self, compiled: Any, grid: tuple[int, ...], given: int, options: Mapping[str, Any]) -> Callable[..., Any]:
        """What launches it with the first `given` arguments, the others being these options."""
        others = [options.get(name, self._defaults[name]) for name in self._names[given:]]
        run = compiled[(*grid, 1, 1)[:3]]
        return lambda *args: run(*args, *others)


class Launch:
    """A kernel with its grid and options: called with the rest, again and again, it looks nothing up.

    Tensors are of the same dtypes in each call, and numbers none that Triton would compile another kernel for.
    """

    def __init__(self, kernel: Any, grid: tuple[int, ...], **options: Any) -> None:
        self._kernel, self._grid, self._options = kernel, grid, options
        self._run: Callable[..., Any] | None = None

    def __call__(self, *args: Any) -> None:
        quick = not precompile.recording_launches() and all(
            x.data_ptr() % 16 == 0 for x in args if isinstance(x, Tensor)
        )
        if self._run is not None and quick:
            self._run(*args)
            return
        compiled = self._kernel[self._grid](*args, **self._options)
        if quick and isinstance(self._kernel, Kernel) and hasattr(compiled, "run"):
            self._run = self._kernel.bound(compiled, self._grid, len(args), self._options)


CARVEOUT = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT


def _share_memory(compiled: Any) -> None:
    """Divide a processor's memory the same way for all kernels.

    Left alone, the driver divides it to suit each, and a kernel cannot start beside another that divides it otherwise.
    """
    with suppress(OSError, AttributeError):  # it is a hint
        ctypes.CDLL("libcuda.so.1").cuFuncSetAttribute(ctypes.c_void_p(compiled.function), CARVEOUT, SHARED)


def _kind(value: Any, unspecialized: bool) -> Any:
    """What Triton compiles another kernel for."""
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if isinstance(value, int):
        wide = not -(2**31) <= value < 2**31
        return wide if unspecialized else (wide, value == 1, value % 16 == 0)
    return type(value)
