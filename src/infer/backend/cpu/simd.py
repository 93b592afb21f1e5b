"""SIMD vectors for the kernels that numba compiles: the operations that its loops do not vectorize well.

Vectors of eight and sixteen floats are one register with AVX-512, and up to four with NEON: sums have one order on all
cores. Vectors of a tile of a quantized weight have a lane for each of its rows, and are a register wide: four rows with
NEON, eight with AVX2, sixteen with AVX-512. `dot` is one instruction on ARM cores with the dot product extension and on
x86 cores with VNNI, and a few elsewhere.
"""

from __future__ import annotations

import inspect
import platform
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core.errors import RequireLiteralValue
from numba.core.registry import cpu_target
from numba.extending import intrinsic, models, register_model

from infer.backend.cpu.jit import inline
from infer.machine import byte_lanes

TILE = byte_lanes()  # rows of a tile of a quantized weight
INT8, INT16, INT32, INT64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
HALF, FLOAT = ir.HalfType(), ir.FloatType()
INT32X4, INT32X8, INT32X16 = (ir.VectorType(INT32, count) for count in (4, 8, 16))
FLOATX8, FLOATX16 = ir.VectorType(FLOAT, 8), ir.VectorType(FLOAT, 16)
TILE_CODES, TILE_INTS, TILE_FLOATS = (
    ir.VectorType(INT8, 4 * TILE),
    ir.VectorType(INT32, TILE),
    ir.VectorType(FLOAT, TILE),
)

HALVES = [0, 1, 2, 3], [4, 5, 6, 7]


def _dot_instruction() -> str | None:
    """LLVM's name for the instruction that adds up products of four bytes, if LLVM may use it."""
    _, core, features = cpu_target.target_context.codegen().magic_tuple()
    if "+avx512vnni" in features and "+avx512vl" in features:
        return VNNI
    if TILE < 16 and "+avxvnni" in features:
        return VNNI
    if TILE == 8 and "+avx2" in features:
        return MADD
    # LLVM knows ARM's features only by the name of the core.
    return SDOT if TILE == 4 and core != "generic" and torch.cpu.get_capabilities().get("dot") else None


def _shuffle_instruction() -> str | None:
    features = cpu_target.target_context.codegen().magic_tuple()[2]
    if TILE == 4 and platform.machine() in ("aarch64", "arm64"):
        return "llvm.aarch64.neon.tbl1.v16i8"
    names = {
        16: ("+avx512bw", "llvm.x86.avx512.pshuf.b.512"),
        8: ("+avx2", "llvm.x86.avx2.pshuf.b"),
        4: ("+ssse3", "llvm.x86.ssse3.pshuf.b.128"),
    }
    feature, name = names[TILE]
    return name if feature in features else None


SDOT, VNNI = "llvm.aarch64.neon.sdot.v4i32.v16i8", f"llvm.x86.avx512.vpdpbusd.{32 * TILE}"
MADD = "llvm.x86.avx2.pmadd.ub.sw"
DOT = _dot_instruction()
# LLVM's name for the instruction that looks up bytes in a table of sixteen.
SHUFFLE = _shuffle_instruction()
# The first factor of x86's instruction is unsigned: an offset is added to it, and its products subtracted again.
UNSIGNED_OFFSET = 128 if DOT == VNNI else 0
# Sums of bytes start at the bits of a float whose last place is worth 1, or 256: adding n to the bits adds n, or 256 n,
# to the float, as long as n is less than 2^22. Converting a sum to a float is then a subtraction.
MAGIC = 1.5 * 2**23
LOW_MAGIC, HIGH_MAGIC = (int(np.float32(MAGIC * unit).view(np.int32)) for unit in (1, 256))


def _vector(name: str, llvm_type: ir.Type) -> Any:
    """A numba type whose values are vectors in registers."""

    class Vector(types.Type):
        def __init__(self) -> None:
            super().__init__(name=name)

    @register_model(Vector)
    class Model(models.PrimitiveModel):
        def __init__(self, manager: Any, numba_type: Any) -> None:
            super().__init__(manager, numba_type, llvm_type)  # type: ignore[no-untyped-call]

    return Vector()


int32x8 = _vector("int32x8", INT32X8)
floatx8 = _vector("floatx8", FLOATX8)
floatx16 = _vector("floatx16", FLOATX16)
tile_codes = _vector("tile_codes", TILE_CODES)
tile_ints = _vector("tile_ints", TILE_INTS)
tile_floats = _vector("tile_floats", TILE_FLOATS)


def typed_intrinsic(function: Any) -> Any:
    """To a type checker, `intrinsic` would still take the typing context that numba passes."""
    return intrinsic(function)


def operation(result: Any, emit: Callable[..., Any], arity: int) -> Any:
    """An intrinsic of `arity` arguments, whose code is emit(builder, *values)."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value = emit(builder, *args)
        return context.get_dummy_value() if result is types.void else value

    def definition(context: Any, *arguments: Any) -> Any:
        return result(*arguments), codegen

    # numba counts the parameters of an intrinsic.
    names = ["context", *(f"argument_{i}" for i in range(arity))]
    parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
    definition.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return intrinsic(definition)


def elementwise(emit: Callable[..., Any], arity: int) -> Any:
    """An operation whose result has the type of its arguments."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return emit(builder, *args)

    functions = {
        1: lambda context, x: (x(x), codegen),
        2: lambda context, x, y: (x(x, y), codegen),
        3: lambda context, x, y, z: (x(x, y, z), codegen),
    }
    return intrinsic(functions[arity])


def emit_load(builder: Any, address: Any, llvm_type: ir.Type) -> Any:
    return builder.load(builder.inttoptr(address, llvm_type.as_pointer()), align=1)


def emit_store(builder: Any, address: Any, value: Any) -> None:
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=1)


def emit_prefetch(builder: Any, address: Any) -> None:
    pointer = builder.inttoptr(address, INT8.as_pointer())
    call_llvm(builder, "llvm.prefetch.p0", ir.VoidType(), pointer, INT32(0), INT32(3), INT32(1))


def emit_splat(builder: Any, value: Any, count: int) -> Any:
    first = builder.insert_element(ir.Constant(ir.VectorType(value.type, count), ir.Undefined), value, INT32(0))
    return shuffle(builder, first, [0] * count)


def shuffle(builder: Any, vector: Any, lanes: list[int]) -> Any:
    return builder.shuffle_vector(vector, vector, ir.Constant(ir.VectorType(INT32, len(lanes)), lanes))


def call_llvm(builder: Any, name: str, result: ir.Type, *args: Any) -> Any:
    """Calls an LLVM intrinsic or a C function."""
    signature = ir.FunctionType(result, [arg.type for arg in args])
    function = builder.module.globals.get(name) or ir.Function(builder.module, signature, name)
    return builder.call(function, args)


def constant(llvm_type: ir.VectorType, value: float) -> Any:
    return ir.Constant(llvm_type, [value] * llvm_type.count)


def _reduce_add(builder: Any, x: Any) -> Any:
    """Adds neighbors, then neighbors of these sums, and so on: one order on every core."""
    while x.type.count > 1:
        x = builder.fadd(*(shuffle(builder, x, list(range(odd, x.type.count, 2))) for odd in (0, 1)))
    return builder.extract_element(x, INT32(0))


def _reduce_add_x8(builder: Any, x: Any) -> Any:
    fours = builder.fadd(*(shuffle(builder, x, half) for half in HALVES))
    twos = builder.fadd(*(shuffle(builder, fours, lanes) for lanes in ([0, 2], [1, 3])))
    return builder.fadd(*(builder.extract_element(twos, INT32(n)) for n in (0, 1)))


def _load_f16(builder: Any, address: Any) -> Any:
    return builder.fpext(emit_load(builder, address, HALF), FLOAT)


def _widen_bf16(builder: Any, bits: Any) -> Any:
    """A bf16 is the upper half of a float."""
    if isinstance(bits.type, ir.VectorType):
        return builder.bitcast(builder.shl(builder.zext(bits, INT32X8), constant(INT32X8, 16)), FLOATX8)
    return builder.bitcast(builder.shl(builder.zext(bits, INT32), INT32(16)), FLOAT)


def _clamp(builder: Any, x: Any, low: Any, high: Any) -> Any:
    # A NaN is neither below nor above, and stays.
    x = builder.select(builder.fcmp_ordered("<", x, low), low, x)
    return builder.select(builder.fcmp_ordered(">", x, high), high, x)


def emit_combined(builder: Any, high: Any, low: Any) -> Any:
    """256 high + low, both counted from their magic numbers. Only the last operation rounds."""
    high, low = (builder.bitcast(each, TILE_FLOATS) for each in (high, low))
    return builder.fadd(builder.fsub(high, constant(TILE_FLOATS, 257 * MAGIC)), low)


def _load_exponents(builder: Any, at: Any) -> Any:
    """Bytes n, as 2^(n - 128). The two smallest are denormal."""
    n = builder.zext(emit_load(builder, at, ir.VectorType(INT8, TILE)), TILE_INTS)
    denormal = builder.icmp_unsigned("<", n, constant(TILE_INTS, 2))
    small = builder.shl(constant(TILE_INTS, 0x00200000), builder.and_(n, constant(TILE_INTS, 1)))
    normal = builder.shl(builder.sub(n, constant(TILE_INTS, 1)), constant(TILE_INTS, 23))
    return builder.bitcast(builder.select(denormal, small, normal), TILE_FLOATS)


def _emit_exp2(builder: Any, x: Any) -> Any:
    exponent = builder.add(builder.bitcast(x, INT32X16), constant(INT32X16, 127))
    return builder.bitcast(builder.shl(exponent, constant(INT32X16, 23)), FLOATX16)


# Memory, at addresses that may be unaligned.
load_i64 = operation(types.int64, lambda b, at: emit_load(b, at, INT64), 1)
load_i8 = operation(types.int64, lambda b, at: b.sext(emit_load(b, at, INT8), INT64), 1)
load_f32x16 = operation(floatx16, lambda b, at: emit_load(b, at, FLOATX16), 1)
load_i8x8 = operation(floatx8, lambda b, at: b.sitofp(emit_load(b, at, ir.VectorType(INT8, 8)), FLOATX8), 1)
load_f32 = operation(types.float32, lambda b, at: emit_load(b, at, FLOAT), 1)
load_f16 = operation(types.float32, _load_f16, 1)
load_bf16 = operation(types.float32, lambda b, at: _widen_bf16(b, emit_load(b, at, INT16)), 1)
load_f32x8 = operation(floatx8, lambda b, at: emit_load(b, at, FLOATX8), 1)
load_f16x8 = operation(floatx8, lambda b, at: b.fpext(emit_load(b, at, ir.VectorType(HALF, 8)), FLOATX8), 1)
load_bf16x8 = operation(floatx8, lambda b, at: _widen_bf16(b, emit_load(b, at, ir.VectorType(INT16, 8))), 1)
store = operation(types.void, emit_store, 2)  # a scalar or a vector, with its own width
store_i8x8 = operation(types.void, lambda b, at, v: emit_store(b, at, b.trunc(v, ir.VectorType(INT8, 8))), 2)
store_f16 = operation(types.void, lambda b, at, x: emit_store(b, at, b.fptrunc(x, HALF)), 2)
# Replaces a float16 in memory by the next larger one, which has the next bits.
next_f16 = operation(types.void, lambda b, at: emit_store(b, at, b.add(emit_load(b, at, INT16), INT16(1))), 1)
prefetch = operation(types.void, emit_prefetch, 1)  # of any address, mapped or not
store_i8 = operation(types.void, lambda b, at, x: emit_store(b, at, b.trunc(x, INT8)), 2)

# The same for a tile.
load_tile_ints = operation(tile_ints, lambda b, at: emit_load(b, at, TILE_INTS), 1)
load_tile_floats = operation(tile_floats, lambda b, at: emit_load(b, at, TILE_FLOATS), 1)
load_tile_halves = operation(
    tile_floats, lambda b, at: b.fpext(emit_load(b, at, ir.VectorType(HALF, TILE)), TILE_FLOATS), 1
)
load_tile_exponents = operation(tile_floats, _load_exponents, 1)

# Arithmetic.
zeros_i32x8 = operation(int32x8, lambda b: constant(INT32X8, 0), 0)
zeros_x16 = operation(floatx16, lambda b: constant(FLOATX16, 0.0), 0)
zeros_tile = operation(tile_floats, lambda b: constant(TILE_FLOATS, 0.0), 0)
zeros_x8 = operation(floatx8, lambda b: constant(FLOATX8, 0.0), 0)
add = elementwise(lambda b, x, y: b.fadd(x, y), 2)
multiply = elementwise(lambda b, x, y: b.fmul(x, y), 2)
divide = elementwise(lambda b, x, y: b.fdiv(x, y), 2)
fma = elementwise(lambda b, x, y, z: call_llvm(b, f"llvm.fma.v{x.type.count}f32", x.type, x, y, z), 3)  # x y + z
fma_f32 = operation(types.float32, lambda b, x, y, z: call_llvm(b, "llvm.fma.f32", FLOAT, x, y, z), 3)
# The bits of absolute values, which have the same order; those of a NaN come last.
abs_bits = operation(int32x8, lambda b, x: b.and_(b.bitcast(x, INT32X8), constant(INT32X8, 2**31 - 1)), 1)
max_u32 = elementwise(lambda b, x, y: call_llvm(b, "llvm.umax.v8i32", INT32X8, x, y), 2)
reduce_abs_max = operation(
    types.float32, lambda b, x: b.bitcast(call_llvm(b, "llvm.vector.reduce.umax.v8i32", INT32, x), FLOAT), 1
)
maximum = elementwise(lambda b, x, y: call_llvm(b, "llvm.maximum.v16f32", FLOATX16, x, y), 2)  # NaN if one is
reduce_max = operation(types.float32, lambda b, x: call_llvm(b, "llvm.vector.reduce.fmaximum.v16f32", FLOAT, x), 1)
reduce_add = operation(types.float32, _reduce_add, 1)
# In the order of tile.py.
reduce_add_x8 = operation(types.float32, _reduce_add_x8, 1)
clamp = elementwise(_clamp, 3)
to_tile_floats = operation(tile_floats, lambda b, v: b.sitofp(v, TILE_FLOATS), 1)
# The nearest integer, counted from LOW_MAGIC: its last bytes are those of the integer. NaN and infinity give any.
round_to_int = operation(int32x8, lambda b, x: b.bitcast(b.fadd(x, constant(FLOATX8, MAGIC)), INT32X8), 1)
times_256 = elementwise(lambda b, v: b.shl(v, constant(v.type, 8)), 1)
add_ints = elementwise(lambda b, x, y: b.add(x, y), 2)
# The high byte of a 16-bit code, rounded so that the low byte is from -128 to 127.
high_byte = elementwise(lambda b, v: b.ashr(b.add(v, constant(v.type, 128)), constant(v.type, 8)), 1)
reduce_add_i32 = operation(types.int32, lambda b, v: call_llvm(b, "llvm.vector.reduce.add.v8i32", INT32, v), 1)
# 2^n of integers n, given MAGIC + n, by the bits of the exponent.
_exp2 = elementwise(_emit_exp2, 1)


@typed_intrinsic
def splat_x16(context: Any, x: Any) -> Any:
    """The same number in every lane."""
    return floatx16(types.float32), lambda c, b, s, args: emit_splat(b, args[0], 16)


@typed_intrinsic
def splat_x8(context: Any, x: Any) -> Any:
    return floatx8(types.float32), lambda c, b, s, args: emit_splat(b, args[0], 8)


@typed_intrinsic
def lane(context: Any, vector: Any, index: Any) -> Any:
    """One float of a vector."""
    at = _literal(index)
    return types.float32(vector, index), lambda c, b, s, args: b.extract_element(args[0], INT32(at))


def emit_for_tile(builder: Any, at: Any, index: int) -> Any:
    """One of four floats at an address, in every lane."""
    if DOT == SDOT:  # whose core multiplies by any lane of a register
        return shuffle(builder, emit_load(builder, at, ir.VectorType(FLOAT, 4)), [index] * TILE)
    return emit_splat(builder, emit_load(builder, builder.add(at, at.type(index * 4)), FLOAT), TILE)


def emit_dot(builder: Any, sums: Any, codes: Any, x: Any, quad: int, *, small: bool) -> Any:
    """sums[r] + codes[4 r ..] . x[4 quad ..]: four bytes of each row of a tile with the same four bytes at address x.

    small: codes are from 0 to 127. Otherwise they are signed; with VNNI they are unsigned.
    """
    if DOT == SDOT:  # which takes four bytes from any lane of a register
        sixteen = emit_load(builder, builder.add(x, x.type(quad // 4 * 16)), INT32X4)
        four = shuffle(builder, sixteen, [quad % 4] * TILE)
    else:
        four = emit_splat(builder, emit_load(builder, builder.add(x, x.type(quad * 4)), INT32), TILE)
    return _dot_quads(builder, sums, codes, builder.bitcast(four, TILE_CODES), small)


def emit_look_up(builder: Any, codes: Any, table: Sequence[int]) -> Any:
    """The bytes of a table of sixteen that codes from 0 to 15 stand for."""
    repeated = ir.Constant(TILE_CODES, [value % 256 for value in table] * (TILE // 4))
    if SHUFFLE is not None:
        return call_llvm(builder, SHUFFLE, TILE_CODES, repeated, codes)
    found = constant(TILE_CODES, table[0] % 256)
    for code in range(1, 16):
        is_code = builder.icmp_unsigned("==", codes, constant(TILE_CODES, code))
        found = builder.select(is_code, constant(TILE_CODES, table[code] % 256), found)
    return found


def _dot_quads(builder: Any, sums: Any, codes: Any, x: Any, small: bool) -> Any:
    if DOT == SDOT:
        return call_llvm(builder, SDOT, TILE_INTS, sums, codes, x)
    if DOT == VNNI:
        # They are bytes, but LLVM before version 21 types them as words; later versions take both.
        return call_llvm(builder, VNNI, TILE_INTS, sums, *(builder.bitcast(factor, TILE_INTS) for factor in (codes, x)))
    if DOT == MADD and small:
        pairs = call_llvm(builder, MADD, ir.VectorType(INT16, 16), codes, x)
        ones = constant(ir.VectorType(INT16, 16), 1)
        return builder.add(sums, call_llvm(builder, "llvm.x86.avx2.pmadd.wd", TILE_INTS, pairs, ones))
    return builder.add(sums, _dot_in_steps(builder, codes, x))


def _dot_in_steps(builder: Any, x: Any, y: Any) -> Any:
    # In 16 bits first: a single instruction on x86 (pmaddwd).
    count = 4 * TILE
    wide = [builder.sext(builder.sext(v, ir.VectorType(INT16, count)), ir.VectorType(INT32, count)) for v in (x, y)]
    products = builder.mul(*wide)
    pairs = builder.add(*(shuffle(builder, products, list(range(odd, count, 2))) for odd in (0, 1)))
    return builder.add(*(shuffle(builder, pairs, list(range(odd, count // 2, 2))) for odd in (0, 1)))


def _literal(index: Any) -> int:
    if not isinstance(index, types.IntegerLiteral):
        raise RequireLiteralValue("the lane must be a constant")
    return int(index.literal_value)


@inline
def exp(x: Any) -> Any:
    """e^x, accurate to one or two units in the last place: 2^n e^f, with |f| at most half of log 2."""
    x = clamp(x, splat_x16(-87.0), splat_x16(88.0))
    started = add(multiply(x, splat_x16(1.44269504)), splat_x16(MAGIC))  # rounds to an integer
    n = add(started, splat_x16(-MAGIC))
    f = fma(n, splat_x16(-0.693359375), x)
    f = fma(n, splat_x16(2.12194440e-4), f)
    p = splat_x16(1 / 5040)
    p = fma(p, f, splat_x16(1 / 720))
    p = fma(p, f, splat_x16(1 / 120))
    p = fma(p, f, splat_x16(1 / 24))
    p = fma(p, f, splat_x16(1 / 6))
    p = fma(p, f, splat_x16(0.5))
    p = fma(p, f, splat_x16(1.0))
    p = fma(p, f, splat_x16(1.0))
    return multiply(p, _exp2(started))
