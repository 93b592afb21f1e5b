"""How kernels are compiled: by units, each when it is first needed, once, with everything that it calls.

numba optimises a function and emits its code together with all functions that it calls, and does so again in each
function that calls it: with seven levels of calls, that takes most of the time. Here only a unit is optimised and
emitted. Its parts are translated, and linked. What one unit calls of another it finds by an address.
"""

from __future__ import annotations

import ctypes
import gc
import inspect
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
from llvmlite import ir
from llvmlite.binding import Linkage
from numba import cfunc, njit, types
from numba.core import cgutils
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler
from numba.extending import intrinsic

from infer.backend.cpu.kernel_cache import is_cached, kernel_folder, load_cached

_compiling = RLock()
INT, POINTER = ir.IntType(64), ir.IntType(8).as_pointer()


@ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object, ctypes.py_object, ctypes.py_object)
def _refuse(*arguments: Any) -> Any:
    raise RuntimeError("this function is part of a kernel, and has no code of its own to be called from Python")


class _Part(JITCodeLibrary):
    """The code of a part, as it was translated: it waits to be linked into a unit's."""

    def _optimize_functions(self, ll_module: Any) -> None:
        ll_module.data_layout = self._codegen._data_layout

    def finalize(self) -> None:
        self._finalized = True

    def alone(self) -> Any:
        """Its own functions, in a form that may be linked several times."""
        for function in self._final_module.functions:
            if not function.is_declaration and function.linkage == Linkage.external:
                function.linkage = "linkonce_odr"
        return self._final_module

    def _get_module_for_linking(self) -> Any:
        if self._shared_module is None:
            self._shared_module = self.alone().clone()
            _link(self._shared_module, self._linking_libraries)
        return self._shared_module

    def get_pointer_to_function(self, name: str) -> int:
        return ctypes.cast(_refuse, ctypes.c_void_p).value or 0


class _Whole(JITCodeLibrary):
    """The code of a unit, with that of all its parts."""

    def finalize(self) -> None:
        _link(self._final_module, self._linking_libraries)
        self._linking_libraries.clear()
        super().finalize()


def _link(module: Any, libraries: list[Any]) -> None:
    """Put them into a module, and all that they call, each once."""
    waiting, seen = list(libraries), set()
    while waiting:
        library = waiting.pop()
        if library not in seen:
            seen.add(library)
            if isinstance(library, _Part):
                waiting += library._linking_libraries
                module.link_in(library.alone(), preserve=True)
            else:
                module.link_in(library._get_module_for_linking(), preserve=True)


class _UnitCompiler(Compiler):
    def compile_extra(self, func: Any) -> Any:
        codegen = self.state.targetctx.codegen()
        self.state.library = _Whole(codegen, func.__qualname__)
        self.state.library.enable_object_caching()
        codegen._library_class, codegen.set_env = _Part, lambda name, env: None  # a part has no place for the latter
        collecting = gc.isenabled()
        gc.disable()  # a tenth of the time goes there, for nothing
        try:
            return super().compile_extra(func)
        finally:
            del codegen._library_class, codegen.set_env
            if collecting:
                gc.enable()


class Unit:
    """A function of addresses, whole numbers and floats: compiled, or read from disk, when it is first asked for."""

    def __init__(self, function: Callable[..., None], signature: Any) -> None:
        self._function, self._signature = function, signature
        self._helper: Popen[bytes] | None = None
        self.__doc__ = function.__doc__

    @cached_property
    def _made(self) -> Any:
        with _compiling:
            return self.__dict__.get("_made") or self._compiled()

    def _compiled(self) -> Any:
        if self._helper is not None:
            self._helper.wait()
        numba.get_num_threads()  # starts threads, which the code names
        options = {"cache": True, "pipeline_class": _UnitCompiler, "error_model": "numpy"}
        return load_cached(lambda: cfunc(self._signature, **options)(self._function), self._folder)

    @property
    def _folder(self) -> Path:
        return kernel_folder(self._function.__name__.strip("_"))

    def begin(self) -> None:
        """Have it compiled by another process, if need be, while this one goes on to others."""
        if os.cpu_count() == 1 or not sys.executable or is_cached(self._folder):
            return
        program = f"from {self._function.__module__} import {self._function.__name__} as unit; unit.address"
        where = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        with suppress(OSError):  # then it is compiled here
            self._helper = Popen([sys.executable, "-c", program], env=where, stdin=DEVNULL, stdout=DEVNULL, stderr=DEVNULL)

    @property
    def address(self) -> int:
        return int(self._made.address)

    @cached_property
    def _call(self) -> Any:
        return self._made.ctypes

    def __call__(self, *arguments: float) -> None:
        """Other Python threads go on meanwhile."""
        self._call(*arguments)


def unit(signature: Any) -> Callable[[Callable[..., None]], Unit]:
    return partial(Unit, signature=signature)


def part(function: Any = None, **options: Any) -> Any:
    """A function that units call."""
    if function is None:
        return partial(part, **options)
    made = njit(error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True, **options)(function)
    made.get_call_template = lambda args, kws: type(made).get_call_template(made, _plain(args), kws)
    return made


def _plain(args: Any) -> tuple[Any, ...]:
    """Types of arguments, a number's being that of all: numba would translate a function for each constant anew."""
    return tuple(types.unliteral(each) for each in args)


def shared(function: Callable[..., None]) -> Any:
    """A loop whose turns several threads share: called with a count, it is function(i, ...) for each i below that.

    As numba's own `prange`, whose threads these are; but that takes the interpreter's lock at the end of each loop, and
    much longer to compile.
    """
    body = part(function)

    def definition(context: Any, count: Any, *arguments: Any) -> Any:
        given = types.int64, *_plain(arguments)
        body.get_call_template(given, {})
        return types.void(*given), partial(_share, body.overloads[given])

    parameters = inspect.signature(function).parameters.values()
    first = inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    definition.__signature__ = inspect.Signature([first, *parameters])  # type: ignore[attr-defined]
    return intrinsic(definition)


def _share(body: Any, context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """Code that has threads call what `_emit_turns` emits, with the arguments in memory."""
    threads_type = ir.FunctionType(ir.IntType(32), [])
    threads = cgutils.get_or_insert_function(builder.module, threads_type, "get_num_threads")
    found = builder.zext(builder.call(threads, []), INT)
    portions = builder.select(builder.icmp_signed("<", args[0], found), args[0], found)
    job = cgutils.alloca_once_value(builder, cgutils.pack_struct(builder, (*args, portions)))
    run = _emit_turns(body, context, builder.module, job.type)
    firsts = cgutils.alloca_once_value(builder, ir.Constant(POINTER, None))  # a portion's number, as an address
    steps = cgutils.alloca_once_value(builder, INT(1))
    counts = cgutils.alloca_once(builder, INT)
    builder.store(portions, counts)
    data = builder.bitcast(job, POINTER)
    with builder.if_else(builder.icmp_signed(">", portions, INT(1))) as (several, one):
        with several:
            call_types = [POINTER, firsts.type, counts.type, steps.type, POINTER, INT, INT, ir.IntType(32)]
            call_type = ir.FunctionType(ir.VoidType(), call_types)
            call = cgutils.get_or_insert_function(builder.module, call_type, "numba_parallel_for")
            threads_used = builder.trunc(portions, ir.IntType(32))
            address = builder.bitcast(run, POINTER)
            builder.call(call, [address, firsts, counts, steps, data, INT(0), INT(1), threads_used])
        with one:
            builder.call(run, [firsts, counts, steps, data])
    return context.get_dummy_value()


def _emit_turns(body: Any, context: Any, module: Any, job_type: Any) -> Any:
    """A function that takes some of the portions of a loop, and in each turn calls its body."""
    function_type = ir.FunctionType(ir.VoidType(), [POINTER.as_pointer(), *[INT.as_pointer()] * 2, POINTER])
    name = module.get_unique_name(f"turns_{body.fndesc.qualname}")
    function = ir.Function(module, function_type, cgutils.normalize_ir_text(name))
    function.linkage = "internal"
    builder = ir.IRBuilder(function.append_basic_block())
    firsts, counts, _, data = function.args
    count, *arguments, portions = cgutils.unpack_tuple(builder, builder.load(builder.bitcast(data, job_type)))
    first = builder.ptrtoint(builder.load(firsts), INT)
    last = builder.add(first, builder.load(counts))
    start, stop = (builder.sdiv(builder.mul(count, portion), portions) for portion in (first, last))
    context.add_linking_libs([body.library])
    callee = context.declare_function(module, body.fndesc)
    with cgutils.for_range_slice(builder, start, stop, INT(1)) as (turn, _):
        given = [turn, *arguments]
        context.call_conv.call_function(builder, callee, types.void, body.signature.args, given)
    builder.ret_void()
    return function
