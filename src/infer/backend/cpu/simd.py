"""Vectors for the kernels that numba compiles: the few operations that its loops do not vectorise well.

Those of eight and of sixteen floats are one register with AVX-512, and up to four with NEON: sums have one order on all
cores. Those of a tile of a quantised weight have a lane for each of its rows, and are a register wide: four rows with
NEON, eight with AVX2, sixteen with AVX-512. `dot` is one instruction where an ARM core has the dot product extension or
an x86 core VNNI, and a few elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core.errors import RequireLiteralValue
from numba.core.registry import cpu_target
from numba.extending import intrinsic, models, register_model

from infer.backend.cpu.units import linked
from infer.nn.quantized import TILE

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


def _dot_product() -> str | None:
    """LLVM's name for the instruction that multiplies bytes in fours and adds them up, if it may use it."""
    _, core, features = cpu_target.target_context.codegen().magic_tuple()
    if "+avx512vnni" in features and "+avx512vl" in features:
        return VNNI
    if TILE < 16 and "+avxvnni" in features:
        return VNNI
    if TILE == 8 and "+avx2" in features:
        return MADD
    # Of ARM's features LLVM knows none but by the core's name.
    return SDOT if TILE == 4 and core != "generic" and torch.cpu.get_capabilities().get("dot") else None


SDOT, VNNI = "llvm.aarch64.neon.sdot.v4i32.v16i8", f"llvm.x86.avx512.vpdpbusd.{32 * TILE}"
MADD = "llvm.x86.avx2.pmadd.ub.sw"
DOT_PRODUCT = _dot_product()
# The first factor of x86's instruction is unsigned: so much is added to it, and its products taken off again.
RAISED = 128 if DOT_PRODUCT == VNNI else 0
# Sums of bytes start at the bits of a float whose unit is 1, or 256, in the last place: adding n to the bits adds n
# units to the float, as long as n is less than 2^22. To have it as a float then takes a subtraction, no conversion.
START = 1.5 * 2**23
LOW_START, HIGH_START = (int(np.float32(START * unit).view(np.int32)) for unit in (1, 256))


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


def _typed_intrinsic(function: Any) -> Any:
    """To a type checker an intrinsic would still take the typing context that numba gives it."""
    return intrinsic(function)


def _operation(result: Any, emit: Callable[..., Any], arity: int) -> Any:
    """An intrinsic of so many arguments, whose code is emit(builder, *values)."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value = emit(builder, *args)
        return context.get_dummy_value() if result is types.void else value

    # numba counts the parameters of an intrinsic.
    functions = {
        0: lambda context: (result(), codegen),
        1: lambda context, x: (result(x), codegen),
        2: lambda context, x, y: (result(x, y), codegen),
        3: lambda context, x, y, z: (result(x, y, z), codegen),
        4: lambda context, w, x, y, z: (result(w, x, y, z), codegen),
    }
    return intrinsic(functions[arity])


def _alike(emit: Callable[..., Any], arity: int) -> Any:
    """An operation whose result has the type of what it is given."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return emit(builder, *args)

    functions = {
        1: lambda context, x: (x(x), codegen),
        2: lambda context, x, y: (x(x, y), codegen),
        3: lambda context, x, y, z: (x(x, y, z), codegen),
    }
    return intrinsic(functions[arity])


def _load(builder: Any, address: Any, llvm_type: ir.Type) -> Any:
    return builder.load(builder.inttoptr(address, llvm_type.as_pointer()), align=1)


def _store(builder: Any, address: Any, value: Any) -> None:
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=1)


def _prefetch(builder: Any, address: Any) -> None:
    pointer = builder.inttoptr(address, INT8.as_pointer())
    _call(builder, "llvm.prefetch.p0", ir.VoidType(), pointer, INT32(0), INT32(3), INT32(1))


def _splat(builder: Any, value: Any, count: int) -> Any:
    first = builder.insert_element(ir.Constant(ir.VectorType(value.type, count), ir.Undefined), value, INT32(0))
    return _pick(builder, first, [0] * count)


def _pick(builder: Any, vector: Any, lanes: list[int]) -> Any:
    return builder.shuffle_vector(vector, vector, ir.Constant(ir.VectorType(INT32, len(lanes)), lanes))


def _call(builder: Any, name: str, result: ir.Type, *args: Any) -> Any:
    """One of LLVM's own functions."""
    signature = ir.FunctionType(result, [arg.type for arg in args])
    function = builder.module.globals.get(name) or ir.Function(builder.module, signature, name)
    return builder.call(function, args)


def _all(llvm_type: ir.VectorType, value: float) -> Any:
    return ir.Constant(llvm_type, [value] * llvm_type.count)


def _sum(builder: Any, x: Any) -> Any:
    """Of neighbours, of these sums, and so on, so that no core is left with a choice."""
    while x.type.count > 1:
        x = builder.fadd(*(_pick(builder, x, list(range(odd, x.type.count, 2))) for odd in (0, 1)))
    return builder.extract_element(x, INT32(0))


def _sum_of_eight(builder: Any, x: Any) -> Any:
    fours = builder.fadd(*(_pick(builder, x, half) for half in HALVES))
    twos = builder.fadd(*(_pick(builder, fours, lanes) for lanes in ([0, 2], [1, 3])))
    return builder.fadd(*(builder.extract_element(twos, INT32(n)) for n in (0, 1)))


def _half_as_float(builder: Any, address: Any) -> Any:
    return builder.fpext(_load(builder, address, HALF), FLOAT)


def _widened(builder: Any, bits: Any) -> Any:
    """bf16 is the upper half of a float."""
    if isinstance(bits.type, ir.VectorType):
        return builder.bitcast(builder.shl(builder.zext(bits, INT32X8), _all(INT32X8, 16)), FLOATX8)
    return builder.bitcast(builder.shl(builder.zext(bits, INT32), INT32(16)), FLOAT)


def _clamped(builder: Any, x: Any, low: Any, high: Any) -> Any:
    # A NaN is neither below nor above, and stays.
    x = builder.select(builder.fcmp_ordered("<", x, low), low, x)
    return builder.select(builder.fcmp_ordered(">", x, high), high, x)


def _joined(builder: Any, high: Any, low: Any) -> Any:
    """256 high + low, both counted from their starts. Only the last operation rounds."""
    high, low = (builder.bitcast(each, TILE_FLOATS) for each in (high, low))
    return builder.fadd(builder.fsub(high, _all(TILE_FLOATS, 257 * START)), low)


# Memory, at addresses that need not be aligned.
load_integer = _operation(types.int64, lambda b, at: _load(b, at, INT64), 1)
load_byte = _operation(types.int64, lambda b, at: b.sext(_load(b, at, INT8), INT64), 1)
load_sixteen = _operation(floatx16, lambda b, at: _load(b, at, FLOATX16), 1)
load_eight_codes = _operation(floatx8, lambda b, at: b.sitofp(_load(b, at, ir.VectorType(INT8, 8)), FLOATX8), 1)
load_float = _operation(types.float32, lambda b, at: _load(b, at, FLOAT), 1)
load_half = _operation(types.float32, _half_as_float, 1)
load_bfloat = _operation(types.float32, lambda b, at: _widened(b, _load(b, at, INT16)), 1)
load_eight = _operation(floatx8, lambda b, at: _load(b, at, FLOATX8), 1)
load_eight_halves = _operation(floatx8, lambda b, at: b.fpext(_load(b, at, ir.VectorType(HALF, 8)), FLOATX8), 1)
load_eight_bfloats = _operation(floatx8, lambda b, at: _widened(b, _load(b, at, ir.VectorType(INT16, 8))), 1)
store_floats = _operation(types.void, _store, 2)  # as many as there are
store_as_bytes = _operation(types.void, lambda b, at, v: _store(b, at, b.trunc(v, ir.VectorType(INT8, 8))), 2)
store_as_half = _operation(types.void, lambda b, at, x: _store(b, at, b.fptrunc(x, HALF)), 2)
# The next larger float16 than one in memory has the next bits.
raise_half = _operation(types.void, lambda b, at: _store(b, at, b.add(_load(b, at, INT16), INT16(1))), 1)
store_float = _operation(types.void, _store, 2)
# Ask for what lies at an address, which need not be there.
prefetch = _operation(types.void, _prefetch, 1)
store_int = _operation(types.void, _store, 2)
store_integer = _operation(types.void, _store, 2)
store_codes = _operation(types.void, _store, 2)
store_byte = _operation(types.void, lambda b, at, x: _store(b, at, b.trunc(x, INT8)), 2)

# The same of a tile.
load_tile_codes = _operation(tile_codes, lambda b, at: _load(b, at, TILE_CODES), 1)
load_tile_ints = _operation(tile_ints, lambda b, at: _load(b, at, TILE_INTS), 1)
load_tile_floats = _operation(tile_floats, lambda b, at: _load(b, at, TILE_FLOATS), 1)
load_tile_halves = _operation(
    tile_floats, lambda b, at: b.fpext(_load(b, at, ir.VectorType(HALF, TILE)), TILE_FLOATS), 1
)
load_int_for_tile = _operation(tile_ints, lambda b, at: _splat(b, _load(b, at, INT32), TILE), 1)

# Arithmetic.
no_eight_ints = _operation(int32x8, lambda b: _all(INT32X8, 0), 0)
no_sixteen = _operation(floatx16, lambda b: _all(FLOATX16, 0.0), 0)
tile_of_high_starts = _operation(tile_ints, lambda b: _all(TILE_INTS, HIGH_START), 0)
tile_of_low_starts = _operation(tile_ints, lambda b: _all(TILE_INTS, LOW_START), 0)
no_tile_floats = _operation(tile_floats, lambda b: _all(TILE_FLOATS, 0.0), 0)
no_eight = _operation(floatx8, lambda b: _all(FLOATX8, 0.0), 0)
add = _alike(lambda b, x, y: b.fadd(x, y), 2)
multiply = _alike(lambda b, x, y: b.fmul(x, y), 2)
divide = _alike(lambda b, x, y: b.fdiv(x, y), 2)
fused = _alike(lambda b, x, y, z: _call(b, f"llvm.fma.v{x.type.count}f32", x.type, x, y, z), 3)  # x y + z
fused_one = _operation(types.float32, lambda b, x, y, z: _call(b, "llvm.fma.f32", FLOAT, x, y, z), 3)
# The bits of absolute values, which are in the order of these, and those of a NaN behind all others.
magnitudes = _operation(int32x8, lambda b, x: b.and_(b.bitcast(x, INT32X8), _all(INT32X8, 2**31 - 1)), 1)
larger_ints = _alike(lambda b, x, y: _call(b, "llvm.umax.v8i32", INT32X8, x, y), 2)
largest_magnitude = _operation(
    types.float32, lambda b, x: b.bitcast(_call(b, "llvm.vector.reduce.umax.v8i32", INT32, x), FLOAT), 1
)
larger = _alike(lambda b, x, y: _call(b, "llvm.maximum.v16f32", FLOATX16, x, y), 2)  # NaN if one is
largest = _operation(types.float32, lambda b, x: _call(b, "llvm.vector.reduce.fmaximum.v16f32", FLOAT, x), 1)
summed = _operation(types.float32, _sum, 1)
# In the order of `tile.py`.
sum_of_eight = _operation(types.float32, _sum_of_eight, 1)
clamped = _alike(_clamped, 3)
to_tile_floats = _operation(tile_floats, lambda b, v: b.sitofp(v, TILE_FLOATS), 1)
joined = _operation(tile_floats, _joined, 2)
# The nearest whole number, counted from LOW_START: its last bytes are the number's own. Of what none is near, any.
counted = _operation(int32x8, lambda b, x: b.bitcast(b.fadd(x, _all(FLOATX8, START)), INT32X8), 1)
times_256 = _alike(lambda b, v: b.shl(v, _all(v.type, 8)), 1)
add_ints = _alike(lambda b, x, y: b.add(x, y), 2)
# Of 16 bits, such that 256 times it leaves between -128 and 127.
high_byte = _alike(lambda b, v: b.ashr(b.add(v, _all(v.type, 128)), _all(v.type, 8)), 1)
total = _operation(types.int32, lambda b, v: _call(b, "llvm.vector.reduce.add.v8i32", INT32, v), 1)
low_nibbles = _alike(lambda b, v: b.and_(v, _all(TILE_CODES, 15)), 1)
high_nibbles = _alike(lambda b, v: b.lshr(v, _all(TILE_CODES, 4)), 1)
# 2^n of whole numbers n, given START + n: by way of the exponent's bits.
_power = _alike(
    lambda b, x: b.bitcast(b.shl(b.add(b.bitcast(x, INT32X16), _all(INT32X16, 127)), _all(INT32X16, 23)), FLOATX16),
    1,
)


@_typed_intrinsic
def splat(context: Any, x: Any) -> Any:
    """The same number in every lane."""
    return floatx16(types.float32), lambda c, b, s, args: _splat(b, args[0], 16)


@_typed_intrinsic
def splat_eight(context: Any, x: Any) -> Any:
    return floatx8(types.float32), lambda c, b, s, args: _splat(b, args[0], 8)


@_typed_intrinsic
def lane(context: Any, vector: Any, index: Any) -> Any:
    """One float of a vector."""
    at = _literal(index)
    return types.float32(vector, index), lambda c, b, s, args: b.extract_element(args[0], INT32(at))


@_typed_intrinsic
def load_for_tile(context: Any, at: Any, index: Any) -> Any:
    """One of four floats, for each row."""
    chosen = _literal(index)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if DOT_PRODUCT == SDOT:  # whose core multiplies by any place of a register
            return _pick(builder, _load(builder, args[0], ir.VectorType(FLOAT, 4)), [chosen] * TILE)
        return _splat(builder, _load(builder, builder.add(args[0], args[0].type(chosen * 4)), FLOAT), TILE)

    return tile_floats(at, index), codegen


@_typed_intrinsic
def dot(context: Any, sums: Any, codes: Any, x: Any, quad: Any) -> Any:
    """sums[r] + codes[4 r ..] . x[4 quad ..]: four bytes of each row of a tile with the same four bytes at address x.

    Signed codes are to be `as_factors`; where that has raised them by 128, as with VNNI, so are the sums.
    """
    return tile_ints(sums, codes, x, quad), _dot(_literal(quad), signed=True)


@_typed_intrinsic
def dot_positive(context: Any, sums: Any, codes: Any, x: Any, quad: Any) -> Any:
    """The same, of codes from 0 to 127."""
    return tile_ints(sums, codes, x, quad), _dot(_literal(quad), signed=False)


as_factors = _alike(lambda b, codes: b.xor(codes, _all(TILE_CODES, -128)) if RAISED else codes, 1)


def _dot(quad: int, signed: bool) -> Callable[..., Any]:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        sums, codes, at, _ = args
        if DOT_PRODUCT == SDOT:  # which takes four bytes from any place of a register
            sixteen = _load(builder, builder.add(at, at.type(quad // 4 * 16)), INT32X4)
            x = _pick(builder, sixteen, [quad % 4] * TILE)
        else:
            x = _splat(builder, _load(builder, builder.add(at, at.type(quad * 4)), INT32), TILE)
        return _dot_quads(builder, sums, codes, builder.bitcast(x, TILE_CODES), signed)

    return codegen


def _dot_quads(builder: Any, sums: Any, codes: Any, x: Any, signed: bool) -> Any:
    if DOT_PRODUCT == SDOT:
        return _call(builder, SDOT, TILE_INTS, sums, codes, x)
    if DOT_PRODUCT == VNNI:
        # Of bytes, but before version 21 LLVM calls them words; later ones take both.
        return _call(builder, VNNI, TILE_INTS, sums, *(builder.bitcast(factor, TILE_INTS) for factor in (codes, x)))
    if DOT_PRODUCT == MADD and not signed:
        pairs = _call(builder, MADD, ir.VectorType(INT16, 16), codes, x)
        ones = _all(ir.VectorType(INT16, 16), 1)
        return builder.add(sums, _call(builder, "llvm.x86.avx2.pmadd.wd", TILE_INTS, pairs, ones))
    return builder.add(sums, _dot_in_steps(builder, codes, x))


def _dot_in_steps(builder: Any, x: Any, y: Any) -> Any:
    # In 16 bits first: that is a single instruction on x86 (pmaddwd).
    count = 4 * TILE
    wide = [builder.sext(builder.sext(v, ir.VectorType(INT16, count)), ir.VectorType(INT32, count)) for v in (x, y)]
    products = builder.mul(*wide)
    pairs = builder.add(*(_pick(builder, products, list(range(odd, count, 2))) for odd in (0, 1)))
    return builder.add(*(_pick(builder, pairs, list(range(odd, count // 2, 2))) for odd in (0, 1)))


def _literal(index: Any) -> int:
    if not isinstance(index, types.IntegerLiteral):
        raise RequireLiteralValue("the lane must be known when the kernel is compiled")
    return int(index.literal_value)


@linked
def exponential(x: Any) -> Any:
    """e^x to a unit or two in the last place: 2^n e^f, with |f| at most half of log 2."""
    x = clamped(x, splat(-87.0), splat(88.0))
    started = add(multiply(x, splat(1.44269504)), splat(START))  # which leaves no digits behind the point
    n = add(started, splat(-START))
    f = fused(n, splat(-0.693359375), x)
    f = fused(n, splat(2.12194440e-4), f)
    p = splat(1 / 5040)
    p = fused(p, f, splat(1 / 720))
    p = fused(p, f, splat(1 / 120))
    p = fused(p, f, splat(1 / 24))
    p = fused(p, f, splat(1 / 6))
    p = fused(p, f, splat(0.5))
    p = fused(p, f, splat(1.0))
    p = fused(p, f, splat(1.0))
    return multiply(p, _power(started))
