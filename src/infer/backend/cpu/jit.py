"""How kernels are compiled, and how they see memory.

numba optimizes a function and emits its code together with all functions that it calls, and does so again in each
caller: with seven levels of calls, that would take most of the compile time. Here only a `kernel` is optimized and
emitted, when it is first used. An `inline` function is translated and becomes part of the kernels that call it. A
kernel calls another kernel by its address.

Arrays, weights and caches come as addresses: reading `data_ptr()` costs a tenth of wrapping a tensor as an array, and
the reference count of an array would be one place that every thread writes to. All memory read so is contiguous.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from subprocess import DEVNULL, Popen
from threading import RLock
from typing import Any

import numba
import numpy as np
from llvmlite import binding, ir
from llvmlite.binding import Linkage
from numba import carray, types  # type: ignore[attr-defined]
from numba.core import cgutils, codegen
from numba.core.compiler import Compiler as NumbaCompiler
from numba.core.registry import cpu_target
from numba.extending import intrinsic
from torch import Tensor

from infer import progress
from infer.backend.cpu.kernel_cache import is_missing, kernel_folder, load_cached

make: Any = numba  # whose type stubs lack some options
Library: Any = codegen.JITCodeLibrary
Compiler: Any = NumbaCompiler
KERNELS: list[Kernel] = []
_compiling = RLock()


class Kernel:
    """A function of addresses, integers and floats: compiled, or read from disk, when it is first used."""

    def __init__(self, function: Callable[..., None], signature: Any, symbol: str | None = None) -> None:
        self._function, self._signature, self._symbol = function, signature, symbol
        self._helper: Popen[bytes] | None = None
        self.__doc__ = function.__doc__
        KERNELS.append(self)

    def begin(self) -> None:
        """Start compiling it in another process, if needed, while this one compiles other kernels."""
        if os.cpu_count() == 1 or not sys.executable or not is_missing(self._folder):
            return
        program = f"from {self._function.__module__} import {self._function.__name__} as kernel; kernel.address"
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        with suppress(OSError):  # then it is compiled here
            self._helper = Popen(
                [sys.executable, "-P", "-c", program], env=environment, stdin=DEVNULL, stdout=DEVNULL, stderr=DEVNULL
            )

    @property
    def address(self) -> int:
        return int(self._compiled.address)

    def __call__(self, *arguments: Any) -> None:
        """Arrays and tensors, which are contiguous, stand for their addresses."""
        self.call(*map(_pointer_or_number, arguments))

    @cached_property
    def call(self) -> Any:
        """The C function. It releases the interpreter's lock: other Python threads continue meanwhile."""
        return self._compiled.ctypes

    @cached_property
    def _compiled(self) -> Any:
        with _compiling:
            return self.__dict__.get("_compiled") or load_cached(self._compile, self._folder)

    @property
    def _folder(self) -> Path:
        name = self._function.__name__.strip("_")
        if self._helper is not None:
            with progress.compiling(name):
                self._helper.wait()
        return kernel_folder(name)

    def _compile(self) -> Any:
        """Compiles the kernel, or reads it from the folder that numba is set to."""
        if self._symbol is None:
            _define_symbols()
        made = make.cfunc(self._signature, cache=True, error_model="numpy", pipeline_class=_KernelCompiler)
        return made(self._function)


def compiler() -> str:
    """With the CPU's core and its features."""
    return f"numba {numba.__version__} {cpu_target.target_context.codegen().magic_tuple()}"


def _define_symbols() -> None:
    """A kernel that others call by its symbol has to be there before they are loaded."""
    for each in KERNELS:
        if each._symbol is not None and binding.address_of_symbol(each._symbol) is None:
            binding.add_symbol(each._symbol, each.address)


def _pointer_or_number(argument: Any) -> Any:
    if isinstance(argument, Tensor):
        return argument.data_ptr()
    return argument.ctypes.data if isinstance(argument, np.ndarray) else argument


def kernel(signature: Any, symbol: str | None = None) -> Callable[[Callable[..., None]], Kernel]:
    """symbol: a name by which other kernels call this one."""
    return partial(Kernel, signature=signature, symbol=symbol)


def inline(function: Any = None, **options: Any) -> Any:
    """A function that becomes part of the kernels that call it."""
    if function is None:
        return partial(inline, **options)
    made = make.njit(error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True, **options)(function)
    made.get_call_template = lambda args, kws: type(made).get_call_template(made, without_literals(args), kws)
    # Python cannot call it.
    made.add_overload = lambda result: made.overloads.update({tuple(result.signature.args): result})
    made._compile_for_args = partial(_refuse, function.__name__)
    return made


def _refuse(name: str, *arguments: Any, **named: Any) -> None:
    raise RuntimeError(f"{name} is part of kernels, and has no code of its own that Python could call")


def without_literals(args: Any) -> tuple[Any, ...]:
    """Types of arguments; of a constant, the type of any number: numba would translate a function for each constant."""
    unliteral: Any = types.unliteral
    return tuple(unliteral(each) for each in args)


class _KernelCompiler(Compiler):  # type: ignore[misc]
    def compile_extra(self, func: Any) -> Any:
        target = self.state.targetctx.codegen()
        self.state.library = _KernelLibrary(target, func.__qualname__)
        self.state.library.enable_object_caching()
        # An inline function has no place to store its environment in.
        target._library_class, target.set_env = _InlineLibrary, lambda name, env: None
        collecting = gc.isenabled()
        gc.disable()  # a tenth of the time would go there
        try:
            return super().compile_extra(func)
        finally:
            del target._library_class, target.set_env
            if collecting:
                gc.enable()


class _KernelLibrary(Library):  # type: ignore[misc]
    """The code of a kernel, with the code of all functions that it calls."""

    def finalize(self) -> None:
        _link(self._final_module, self._linking_libraries)
        self._linking_libraries.clear()
        super().finalize()


class _InlineLibrary(Library):  # type: ignore[misc]
    """The translated code of a function, not yet optimized: it is linked into kernels."""

    _shared_module: Any

    def _optimize_functions(self, ll_module: Any) -> None:
        ll_module.data_layout = self._codegen._data_layout

    def finalize(self) -> None:
        self._finalized = True

    def own_module(self) -> Any:
        """The module without what it calls, in a form that may be linked several times."""
        for function in self._final_module.functions:
            if not function.is_declaration and function.linkage == Linkage.external:
                function.linkage = "linkonce_odr"
        return self._final_module

    def _get_module_for_linking(self) -> Any:
        if self._shared_module is None:
            self._shared_module = self.own_module().clone()
            _link(self._shared_module, self._linking_libraries)
        return self._shared_module


def _link(module: Any, libraries: list[Any]) -> None:
    """Links libraries into a module, and all that they call, each once."""
    waiting, seen = list(libraries), set()
    while waiting:
        library = waiting.pop()
        if library not in seen:
            seen.add(library)
            if isinstance(library, _InlineLibrary):
                waiting += library._linking_libraries
                module.link_in(library.own_module(), preserve=True)
            else:
                module.link_in(library._get_module_for_linking(), preserve=True)


def _pointer_to(typing_context: Any, address: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(address), codegen


def _address_of(typing_context: Any, array: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        return builder.ptrtoint(data, ir.IntType(64))

    return types.int64(array), codegen


_pointer: Any = intrinsic(_pointer_to)
address: Any = intrinsic(_address_of)  # of an array, which the caller keeps alive


@inline
def records(at: int, count: int, dtype: Any) -> Any:
    return carray(_pointer(at), (count,), dtype)


@inline
def keep_alive(*arrays: Any) -> None:
    """numba frees an array after its last use, and taking its address is no use of it."""


def call_at(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """Code that calls the function at an address, the first argument, with the other arguments."""
    function = ir.FunctionType(ir.VoidType(), [arg.type for arg in args[1:]])
    builder.call(builder.inttoptr(args[0], function.as_pointer()), args[1:])
    return context.get_dummy_value()
