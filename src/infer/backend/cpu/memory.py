"""Memory as kernels see it: arrays, weights and caches come as addresses.

Reading `data_ptr()` costs a tenth of wrapping a tensor as an array; and an array would be counted by every thread that
has a part of it, in one place. All that is read so is contiguous.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import carray, types  # type: ignore[attr-defined]
from numba.core import cgutils
from numba.extending import intrinsic

from infer.backend.cpu.units import linked


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
address: Any = intrinsic(_address_of)  # of an array, which must be kept


@linked
def records(at: int, count: int, dtype: Any) -> Any:
    return carray(_pointer(at), (count,), dtype)


@linked
def keep(one: Any, other: Any) -> None:
    """Numba frees an array behind its last use, and an address is none."""


def call_at(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """Code that calls what lies at an address, the first argument, with the others."""
    function = ir.FunctionType(ir.VoidType(), [arg.type for arg in args[1:]])
    builder.call(builder.inttoptr(args[0], function.as_pointer()), args[1:])
    return context.get_dummy_value()
