"""How kernels are compiled: by units, each when it is first needed, once, with everything that it calls.

numba optimises a function and emits its code together with all functions that it calls, and does so again in each
function that calls it: with seven levels of calls, that takes most of the time. Here only a unit is optimised and
emitted. Its parts are translated, and linked. What one unit calls of another it finds by an address.
"""

from __future__ import annotations

import ctypes
import inspect
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import numba
from llvmlite import ir
from numba import cfunc, njit, types
from numba.core import cgutils
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler
from numba.extending import intrinsic

from infer.backend.cpu import kernel_cache

INT, POINTER = ir.IntType(64), ir.IntType(8).as_pointer()


@ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object, ctypes.py_object, ctypes.py_object)
def _refuse(*arguments: Any) -> Any:
    raise RuntimeError("this function is part of a kernel, and has no code of its own to be called from Python")


class _Linked(JITCodeLibrary):
    """The code of a part, which waits to be linked into a unit's."""

    def _optimize_functions(self, ll_module: Any) -> None:
        ll_module.data_layout = self._codegen._data_layout

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        return ctypes.cast(_refuse, ctypes.c_void_p).value or 0


class _UnitCompiler(Compiler):
    def compile_extra(self, func: Any) -> Any:
        codegen = self.state.targetctx.codegen()
        self.state.library = JITCodeLibrary(codegen, func.__qualname__)
        self.state.library.enable_object_caching()
        codegen._library_class, codegen.set_env = _Linked, lambda name, env: None  # a part has no place for the latter
        try:
            return super().compile_extra(func)
        finally:
            del codegen._library_class, codegen.set_env


class Unit:
    """A function of addresses, whole numbers and floats: compiled, or read from disk, when it is first asked for."""

    def __init__(self, function: Callable[..., None], signature: Any) -> None:
        self._function, self._signature = function, signature
        self.__doc__ = function.__doc__

    @cached_property
    def _made(self) -> Any:
        numba.get_num_threads()  # starts threads, which the code names
        options = {"cache": True, "pipeline_class": _UnitCompiler, "error_model": "numpy"}
        return kernel_cache.kept(self._function.__name__, lambda: cfunc(self._signature, **options)(self._function))

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
    made = njit(error_model="numpy", **options)
    return made if function is None else made(function)


def shared(function: Callable[..., None]) -> Any:
    """A loop whose turns several threads share: called with a count, it is function(i, ...) for each i below that.

    As numba's own `prange`, whose threads these are; but that takes the interpreter's lock at the end of each loop, and
    much longer to compile.
    """
    body = part(function)

    def definition(context: Any, count: Any, *arguments: Any) -> Any:
        given = types.int64, *arguments
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
