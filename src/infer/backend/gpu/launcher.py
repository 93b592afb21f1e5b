"""Compiles and launches GPU kernels.

Triton's own launcher takes tens of microseconds to look a kernel up; `Kernel` and `Launch` skip that after the first
launch. `compile_ahead` compiles all kernels of a step in threads before the first one is launched.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from contextvars import ContextVar, copy_context
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from infer.backend.gpu.tuned import SHARED_PERCENT
from infer.machine import usable_cpus

# A fused multiply-add rounds once instead of twice, and the compiler chooses where. (float32 matrix multiplication
# always uses fused multiply-adds.)
UNFUSED = {"enable_fp_fusion": False}
CARVEOUT = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
_recorded: ContextVar[list[Any] | None] = ContextVar("recorded", default=None)  # compiled instead of launched


def kernel(**options: Any) -> Callable[[Callable[..., None]], Any]:
    """Decorates a Triton kernel that the host launches: kernel[grid](*args, **options).

    options: for triton.jit. Triton's interpreter compiles nothing and uses its own launcher.
    """

    def decorate(function: Callable[..., None]) -> Any:
        jitted = triton.jit(function, **options)
        return jitted if triton.knobs.runtime.interpret else Kernel(jitted)

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
            if (recorded := _recorded.get()) is not None:
                recorded.append(self.jit.warmup(*args, grid=grid, **options))
                return None
            key = (
                args[0].device.index,
                *map(_specialization, args, self._unspecialized),
                *(
                    (name, _specialization(value, False) if isinstance(value, Tensor) else value)
                    for name, value in options.items()
                ),
            )
            compiled = self._compiled.get(key)
            if compiled is None:
                found = self.jit[grid](*args, **options)
                if hasattr(found, "result"):  # another thread is compiling it ahead
                    found = found.result()
                if hasattr(found, "run"):  # else one of Triton's hooks has handled the launch
                    self._compiled[key] = found
                    _set_carveout(found)
                return found
            self.bound(compiled, grid, len(args), options)(*args)
            return compiled

        return launch

    def bound(self, compiled: Any, grid: tuple[int, ...], given: int, options: Mapping[str, Any]) -> Callable[..., Any]:
        """A function that launches the compiled kernel with the first `given` arguments; options are the others."""
        others = [options.get(name, self._defaults[name]) for name in self._names[given:]]
        run = compiled[(*grid, 1, 1)[:3]]
        return lambda *args: run(*args, *others)


class Launch:
    """A kernel with its grid and options. Called with the remaining arguments, it looks the kernel up only once.

    Tensors must have the same dtypes in every call, and integers must not need another specialization.
    """

    def __init__(self, kernel: Any, grid: tuple[int, ...], **options: Any) -> None:
        self._kernel, self._grid, self._options = kernel, grid, options
        self._run: Callable[..., Any] | None = None

    def __call__(self, *args: Any) -> None:
        quick = not recording_launches() and all(x.data_ptr() % 16 == 0 for x in args if isinstance(x, Tensor))
        if self._run is not None and quick:
            self._run(*args)
            return
        compiled = self._kernel[self._grid](*args, **self._options)
        if quick and isinstance(self._kernel, Kernel) and hasattr(compiled, "run"):
            self._run = self._kernel.bound(compiled, self._grid, len(args), self._options)


def _set_carveout(compiled: Any) -> None:
    """Give all kernels the same split of an SM's memory into shared memory and L1 cache.

    By default the driver chooses one for each kernel, and a kernel cannot start beside another with a different split.
    """
    with suppress(OSError, AttributeError):  # it is a hint
        ctypes.CDLL("libcuda.so.1").cuFuncSetAttribute(ctypes.c_void_p(compiled.function), CARVEOUT, SHARED_PERCENT)


def _specialization(value: Any, unspecialized: bool) -> Any:
    """The properties of an argument for which Triton compiles another kernel."""
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if isinstance(value, int):
        wide = not -(2**31) <= value < 2**31
        return wide if unspecialized else (wide, value == 1, value % 16 == 0)
    return type(value)


def recording_launches() -> bool:
    """Whether launches only compile their kernels: nothing runs on the device."""
    return _recorded.get() is not None


def can_compile_ahead() -> bool:
    """False under Triton's interpreter, which compiles nothing."""
    return not triton.knobs.runtime.interpret


def compile_ahead(device: torch.device, walk: Callable[[], object]) -> list[str]:
    """Compile, in threads, the kernels that `walk` would launch on a device. Nothing is launched.

    Returns the names of kernels that were not in Triton's disk cache. A kernel that cannot be compiled or loaded is
    skipped: its first launch raises the error.
    """
    # In a separate context: after an interrupt, Triton's async mode stays on in its context.
    return copy_context().run(_compile_ahead, device, walk)


def _compile_ahead(device: torch.device, walk: Callable[[], object]) -> list[str]:
    knobs = triton.knobs.compilation
    compiled: list[str] = []
    futures: list[Any] = []
    before = knobs.listener

    def listen(*, src: Any, cache_hit: bool, **others: Any) -> None:
        if not cache_hit:
            compiled.append(src.name)
        if before is not None:
            before(src=src, cache_hit=cache_hit, **others)

    def load(kernel: Any) -> None:
        try:
            with on(device):
                _ = kernel.run  # builds the kernel's launcher too, with a C compiler
        except Exception:
            kernel._run = None  # else Triton would treat a half-loaded kernel as loaded

    _recorded.set(futures)
    knobs.listener = listen
    threads = ThreadPoolExecutor(usable_cpus())
    try:
        with on(device), triton.AsyncCompileMode(threads, ignore_errors=True):
            walk()
        list(threads.map(load, _distinct_kernels(futures)))
    finally:
        knobs.listener = before
        threads.shutdown(cancel_futures=True)
    return compiled


def _distinct_kernels(futures: list[Any]) -> list[Any]:
    kernels = {}
    for each in futures:
        with suppress(Exception):
            kernel = each.result() if hasattr(each, "result") else each
            kernels[id(kernel)] = kernel
    return [kernel for kernel in kernels.values() if kernel is not None]  # None: handled by one of Triton's hooks


def launch_options(pdl: bool) -> dict[str, bool]:
    """For all kernels with a PDL parameter. pdl: the kernel may start before the previous one has ended."""
    return {**UNFUSED, "PDL": True, "launch_pdl": True} if pdl else {**UNFUSED, "PDL": False}


@cache
def has_pdl(device: torch.device) -> bool:
    """Whether the device has programmatic dependent launch."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Within, Triton launches on this device."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program can have."""
    if device.type != "cuda":
        return 2**31
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)  # type: ignore[attr-defined]


@cache
def num_sms(device: torch.device) -> int:
    """Streaming multiprocessors of the device."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def next_power(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()
