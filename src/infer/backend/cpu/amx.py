"""AMX, x86's instructions for products of whole blocks of bytes, where the core has them and the system lets us.

Its registers are tables of up to 16 rows of 64 bytes. Here two hold the high and the low bytes of 16 rows of x, one the
codes of a group of a tile of W, which lie in memory as it takes them, two the sums. All are of whole numbers, so the
bits are those of any other core.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core.registry import cpu_target

from infer.backend.cpu.simd import INT8, _call, _operation, store_byte
from infer.backend.cpu.units import linked
from infer.machine import allows_amx
from infer.nn.quantized import GROUP, TILE

ROWS = 16  # of x at a time
CONFIG_BYTES = 64
X_HIGH, X_LOW, CODES, HIGH, LOW = range(5)  # the registers
# LLVM may know an instruction that the system does not let us use, and the other way round.
AMX = TILE == 16 and allows_amx() and "+amx-int8" in cpu_target.target_context.codegen().magic_tuple()[2]


def _emit(builder: Any, name: str, *args: Any) -> None:
    _call(builder, f"llvm.x86.{name}", ir.VoidType(), *args)


def _load(register: int) -> Any:
    def emit(builder: Any, at: Any, step: Any) -> None:
        _emit(builder, "tileloadd64", INT8(register), builder.inttoptr(at, INT8.as_pointer()), step)

    return _operation(types.void, emit, 2)


def _store(register: int) -> Any:
    def emit(builder: Any, at: Any, step: Any) -> None:
        _emit(builder, "tilestored64", INT8(register), builder.inttoptr(at, INT8.as_pointer()), step)

    return _operation(types.void, emit, 2)


def _multiply(builder: Any) -> None:
    for sums, x in ((HIGH, X_HIGH), (LOW, X_LOW)):
        _emit(builder, "tilezero", INT8(sums))
        _emit(builder, "tdpbssd", INT8(sums), INT8(x), INT8(CODES))


# With an address, and the bytes from one row to the next.
load_x_high, load_x_low, load_codes = (_load(register) for register in (X_HIGH, X_LOW, CODES))
store_high, store_low = (_store(register) for register in (HIGH, LOW))
multiply = _operation(types.void, _multiply, 0)  # the codes with the high and with the low bytes
release = _operation(types.void, lambda b: _emit(b, "tilerelease"), 0)
_configure = _operation(types.void, lambda b, at: _emit(b, "ldtilecfg", b.inttoptr(at, INT8.as_pointer())), 1)


@linked
def configure(at: int) -> None:
    """For groups of a tile; at: of CONFIG_BYTES bytes to say so in."""
    for i in range(CONFIG_BYTES):
        store_byte(at + i, 0)
    store_byte(at, 1)
    for register in range(5):
        store_byte(at + 16 + 2 * register, GROUP if register < CODES else 64)  # bytes of a row
        store_byte(at + 48 + register, GROUP // 4 if register == CODES else ROWS)
    _configure(at)
