"""Loops whose turns several threads share.

As numba's own `prange`, whose threads these are; but that takes the interpreter's lock at the end of each loop, and
much longer to compile.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from infer.backend.cpu.units import linked, plain

INT, INT32, POINTER = ir.IntType(64), ir.IntType(32), ir.IntType(8).as_pointer()
emit: Any = cgutils  # which has no types


def shared(function: Callable[..., None]) -> Any:
    """Called with a count and more, call function(i, ...) for each i below the count."""
    body = linked(function)

    def definition(context: Any, count: Any, *arguments: Any) -> Any:
        given = types.int64, *plain(arguments)
        body.get_call_template(given, {})
        return types.void(*given), partial(_share, body.overloads[given])

    parameters = inspect.signature(function).parameters.values()
    first = inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    definition.__signature__ = inspect.Signature([first, *parameters])  # type: ignore[attr-defined]
    return intrinsic(definition)


def _share(body: Any, context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """Code that has threads call what `_emit_turns` emits, with the arguments in memory."""
    threads_type = ir.FunctionType(INT32, [])
    threads = emit.get_or_insert_function(builder.module, threads_type, "get_num_threads")
    found = builder.zext(builder.call(threads, []), INT)
    portions = builder.select(builder.icmp_signed("<", args[0], found), args[0], found)
    portions = builder.select(builder.icmp_signed(">", portions, INT(1)), portions, INT(1))
    job = emit.alloca_once_value(builder, emit.pack_struct(builder, (*args, portions)))
    run = _emit_turns(body, context, builder.module, job.type)
    firsts = emit.alloca_once_value(builder, ir.Constant(POINTER, None))  # a portion's number, as an address
    steps = emit.alloca_once_value(builder, INT(1))
    counts = emit.alloca_once(builder, INT)
    builder.store(portions, counts)
    data = builder.bitcast(job, POINTER)
    with builder.if_else(builder.icmp_signed(">", portions, INT(1))) as (several, one):
        with several:
            call_types = [POINTER, firsts.type, counts.type, steps.type, POINTER, INT, INT, INT32]
            call_type = ir.FunctionType(ir.VoidType(), call_types)
            call = emit.get_or_insert_function(builder.module, call_type, "numba_parallel_for")
            threads_used = builder.trunc(portions, INT32)
            address = builder.bitcast(run, POINTER)
            builder.call(call, [address, firsts, counts, steps, data, INT(0), INT(1), threads_used])
        with one:
            builder.call(run, [firsts, counts, steps, data])
    return context.get_dummy_value()


def _emit_turns(body: Any, context: Any, module: Any, job_type: Any) -> Any:
    """A function that takes some of the portions of a loop, and in each turn calls its body."""
    function_type = ir.FunctionType(ir.VoidType(), [POINTER.as_pointer(), *[INT.as_pointer()] * 2, POINTER])
    name = module.get_unique_name(f"turns_{body.fndesc.qualname}")
    function = ir.Function(module, function_type, emit.normalize_ir_text(name))
    function.linkage = "internal"
    builder = ir.IRBuilder(function.append_basic_block())
    firsts, counts, _, data = function.args
    count, *arguments, portions = emit.unpack_tuple(builder, builder.load(builder.bitcast(data, job_type)))
    first = builder.ptrtoint(builder.load(firsts), INT)
    last = builder.add(first, builder.load(counts))
    start, stop = (builder.sdiv(builder.mul(count, portion), portions) for portion in (first, last))
    context.add_linking_libs([body.library])
    callee = context.declare_function(module, body.fndesc)
    with emit.for_range_slice(builder, start, stop, INT(1)) as (turn, _):
        given = [turn, *arguments]
        context.call_conv.call_function(builder, callee, types.void, body.signature.args, given)
    builder.ret_void()
    return function
