"""How kernels are compiled: by units, each when it is first needed, once, with everything that it calls.

numba optimises a function and emits its code together with all functions that it calls, and does so again in each
function that calls it: with seven levels of calls, that would take most of the time. Here only units are optimised and
emitted. The functions linked into them are translated. What one unit calls of another it finds by an address.
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
from llvmlite.binding import Linkage
from numba import types
from numba.core import codegen, compiler

from infer import progress
from infer.backend.cpu.kernel_cache import is_missing, kernel_folder, load_cached

make: Any = numba  # whose types lack some options
Library: Any = codegen.JITCodeLibrary
Compiler: Any = compiler.Compiler
UNITS: list[Unit] = []
_compiling = RLock()


class Unit:
    """A function of addresses, whole numbers and floats: compiled, or read from disk, when it is first asked for."""

    def __init__(self, function: Callable[..., None], signature: Any) -> None:
        self._function, self._signature = function, signature
        self._helper: Popen[bytes] | None = None
        self.__doc__ = function.__doc__
        UNITS.append(self)

    def begin(self) -> None:
        """Have it compiled by another process, if need be, while this one goes on to other units."""
        if os.cpu_count() == 1 or not sys.executable or not is_missing(self._folder):
            return
        program = f"from {self._function.__module__} import {self._function.__name__} as unit; unit.address"
        where = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        with suppress(OSError):  # then it is compiled here
            self._helper = Popen(
                [sys.executable, "-P", "-c", program], env=where, stdin=DEVNULL, stdout=DEVNULL, stderr=DEVNULL
            )

    @property
    def address(self) -> int:
        return int(self._made.address)

    def __call__(self, *arguments: float) -> None:
        """Other Python threads go on meanwhile."""
        self._call(*arguments)

    @cached_property
    def _call(self) -> Any:
        return self._made.ctypes

    @cached_property
    def _made(self) -> Any:
        with _compiling:
            return self.__dict__.get("_made") or load_cached(self._compile, self._folder)

    @property
    def _folder(self) -> Path:
        name = self._function.__name__.strip("_")
        if self._helper is not None:
            with progress.compiling(name):
                self._helper.wait()
        return kernel_folder(name)

    def _compile(self) -> Any:
        """Or read it: numba knows where."""
        from infer.backend.cpu import pool  # which is one

        if self is not pool.pool:
            pool.start()
        made = make.cfunc(self._signature, cache=True, error_model="numpy", pipeline_class=_UnitCompiler)
        return made(self._function)


def unit(signature: Any) -> Callable[[Callable[..., None]], Unit]:
    return partial(Unit, signature=signature)


def linked(function: Any = None, **options: Any) -> Any:
    """A function that becomes part of the units that call it."""
    if function is None:
        return partial(linked, **options)
    made = make.njit(error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True, **options)(function)
    made.get_call_template = lambda args, kws: type(made).get_call_template(made, plain(args), kws)
    # Nothing that could be called from Python.
    made.add_overload = lambda result: made.overloads.update({tuple(result.signature.args): result})
    made._compile_for_args = partial(_refuse, function.__name__)
    return made


def _refuse(name: str, *arguments: Any, **named: Any) -> None:
    raise RuntimeError(f"{name} is linked into kernels, and has no code of its own that Python could call")


def plain(args: Any) -> tuple[Any, ...]:
    """Types of arguments, a number's being that of all: numba would translate a function for each constant anew."""
    unliteral: Any = types.unliteral
    return tuple(unliteral(each) for each in args)


class _UnitCompiler(Compiler):  # type: ignore[misc]
    def compile_extra(self, func: Any) -> Any:
        target = self.state.targetctx.codegen()
        self.state.library = _Whole(target, func.__qualname__)
        self.state.library.enable_object_caching()
        # What is only linked has no place to note its environment in, either.
        target._library_class, target.set_env = _Linked, lambda name, env: None
        collecting = gc.isenabled()
        gc.disable()  # a tenth of the time would go there
        try:
            return super().compile_extra(func)
        finally:
            del target._library_class, target.set_env
            if collecting:
                gc.enable()


class _Whole(Library):  # type: ignore[misc]
    """The code of a unit, with that of all functions that it calls."""

    def finalize(self) -> None:
        _link(self._final_module, self._linking_libraries)
        self._linking_libraries.clear()
        super().finalize()


class _Linked(Library):  # type: ignore[misc]
    """A function's code, as it was translated: it waits to be linked into a unit's."""

    _shared_module: Any

    def _optimize_functions(self, ll_module: Any) -> None:
        ll_module.data_layout = self._codegen._data_layout

    def finalize(self) -> None:
        self._finalized = True

    def alone(self) -> Any:
        """In a form that may be linked several times."""
        for function in self._final_module.functions:
            if not function.is_declaration and function.linkage == Linkage.external:
                function.linkage = "linkonce_odr"
        return self._final_module

    def _get_module_for_linking(self) -> Any:
        if self._shared_module is None:
            self._shared_module = self.alone().clone()
            _link(self._shared_module, self._linking_libraries)
        return self._shared_module


def _link(module: Any, libraries: list[Any]) -> None:
    """Put them into a module, and all that they call, each once."""
    waiting, seen = list(libraries), set()
    while waiting:
        library = waiting.pop()
        if library not in seen:
            seen.add(library)
            if isinstance(library, _Linked):
                waiting += library._linking_libraries
                module.link_in(library.alone(), preserve=True)
            else:
                module.link_in(library._get_module_for_linking(), preserve=True)
