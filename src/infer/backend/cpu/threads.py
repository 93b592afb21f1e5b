"""Loops whose turns several threads share: those of `pool.py`.

numba's own `prange` takes the interpreter's lock at the end of each loop, and much longer to compile.
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

from infer.backend.cpu.pool import POINTER, SHARE, SYMBOL
from infer.backend.cpu.simd import INT64
from infer.backend.cpu.units import linked, plain

emit: Any = cgutils  # which has no types


def shared(function: Callable[..., None]) -> Any:
    """Called with a count and more, call function(i, ...) for each i below the count."""
    body = linked(function, forceinline=True)

    def definition(context: Any, count: Any, *arguments: Any) -> Any:
        given = types.int64, *plain(arguments)
        body.get_call_template(given, {})
        return types.void(*given), partial(_share, body.overloads[given])

    parameters = inspect.signature(function).parameters.values()
    first = inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    definition.__signature__ = inspect.Signature([first, *parameters])  # type: ignore[attr-defined]
    return intrinsic(definition)


def _share(body: Any, context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """Code that has threads call what `_emit_portion` emits, with the arguments in memory."""
    job = emit.alloca_once_value(builder, emit.pack_struct(builder, args))
    function = _emit_portion(body, context, builder.module, job.type)
    share_type = ir.FunctionType(ir.VoidType(), [INT64] * 4)
    share = emit.get_or_insert_function(builder.module, share_type, SYMBOL)
    builder.call(share, [INT64(SHARE), builder.ptrtoint(function, INT64), builder.ptrtoint(job, INT64), args[0]])
    return context.get_dummy_value()


def _emit_portion(body: Any, context: Any, module: Any, job_type: Any) -> Any:
    """A function that takes one of so many portions of a loop, and in each turn calls its body."""
    function_type = ir.FunctionType(ir.VoidType(), [POINTER, INT64, INT64])
    name = module.get_unique_name(f"portion_{body.fndesc.qualname}")
    function = ir.Function(module, function_type, emit.normalize_ir_text(name))
    function.linkage = "internal"
    builder = ir.IRBuilder(function.append_basic_block())
    data, portion, portions = function.args
    count, *arguments = emit.unpack_tuple(builder, builder.load(builder.bitcast(data, job_type)))
    following = builder.add(portion, INT64(1))
    start, stop = (builder.sdiv(builder.mul(count, each), portions) for each in (portion, following))
    context.add_linking_libs([body.library])
    callee = context.declare_function(module, body.fndesc)
    with emit.for_range_slice(builder, start, stop, INT64(1)) as (turn, _):
        given = [turn, *arguments]
        context.call_conv.call_function(builder, callee, types.void, body.signature.args, given)
    builder.ret_void()
    return function
