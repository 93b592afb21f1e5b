"""GEMM and GEMV with quantized weights, whose blocks are multiplied as they are stored (`nn/schemes.py`).

A weight is stored in tiles of TILE rows, as many as a register has sums. A tile is a sequence of blocks. A register of
codes has four columns of each row, and is multiplied with the same four columns of x; the sums of all rows are in one
register, and a tile is read sequentially.

x is quantized too, in groups of 32, to 16 bits: a high and a low byte, each multiplied with the codes in integers,
which is exact. (With 8 bits, as other engines do it, a difference in the last bit of x flips codes and grows to tenths
of a logit.) The rest is floating point, part by part of the scheme in one order.

Few rows of x: the codes of a group are unpacked in registers, once for all rows (`_add_group`, `_add_group_to_rows`).
More rows: a tile is unpacked once, to bytes and float32 scales in the cache, and multiplied by a loop that all schemes
share (`_add_part`). Integers are exact, so all have the same bits.

AMX multiplies blocks of bytes on x86 cores that have it. Its registers hold up to 16 rows of 64 bytes: here two hold
the high and the low bytes of 16 rows of x, one the codes of a part of a tile, and two the sums. All are integers, so
the bits are those of any other core.
"""

from __future__ import annotations

from functools import lru_cache
from types import FunctionType
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.registry import cpu_target

from infer.backend.cpu.gemm import GEMM
from infer.backend.cpu.jit import Kernel, address, call_at, inline, keep_alive, kernel, records
from infer.backend.cpu.simd import (
    HIGH_MAGIC,
    INT8,
    INT16,
    INT32,
    INT64,
    LOW_MAGIC,
    TILE,
    TILE_CODES,
    TILE_FLOATS,
    TILE_INTS,
    UNSIGNED_OFFSET,
    abs_bits,
    add,
    add_ints,
    call_llvm,
    constant,
    emit_combined,
    emit_dot,
    emit_for_tile,
    emit_load,
    emit_look_up,
    emit_prefetch,
    emit_splat,
    emit_store,
    high_byte,
    load_f32,
    load_f32x8,
    load_i8,
    load_i64,
    load_tile_exponents,
    load_tile_floats,
    load_tile_halves,
    load_tile_ints,
    max_u32,
    multiply,
    operation,
    prefetch,
    reduce_abs_max,
    reduce_add_i32,
    round_to_int,
    splat_x8,
    store,
    store_i8,
    store_i8x8,
    tile_floats,
    times_256,
    to_tile_floats,
    typed_intrinsic,
    zeros_i32x8,
    zeros_tile,
)
from infer.backend.cpu.threads import parallel_for
from infer.backend.cpu.tile import PREFETCH_WEIGHTS_BYTES
from infer.machine import allows_amx
from infer.nn.schemes import E8M0, GROUP, NIBBLES, Scheme

PARALLEL_ROWS = 16  # from so many rows of x on, several threads quantize them
# Of a group of x: its codes; and for the group, its first half and its second half the scale, the sum of its values,
# the sums of the high and of the low bytes.
X_BYTES, SUMS_BYTES = 2 * GROUP, 16
SCALE_BYTES = 3 * SUMS_BYTES
MIN_STEP = np.float32(3e-39)  # a smaller step has no finite inverse, and counts as 0
X_LEVELS = 127 * 256 + 127  # the largest code of x
CODE_BYTES = GROUP * TILE  # of a group of an unpacked tile
AMX_ROWS = 16  # rows of x at a time
AMX_CONFIG_BYTES = 64
X_HIGH, X_LOW, CODES, HIGH, LOW = range(5)  # the AMX registers
# LLVM may know an instruction that the system does not allow, and the other way round.
AMX = TILE == 16 and allows_amx() and "+amx-int8" in cpu_target.target_context.codegen().magic_tuple()[2]
FEW_ROWS = 8 if AMX else 16  # of x, for which codes are unpacked in registers
L2_BYTES = 1048576 if AMX else 262144  # fit into the L2 cache of most such cores, beside other data
# Consecutive rows of a weight that have one scheme. code, gemm: kernels that multiply a tile, and an unpacked tile.
# offset: of unpacked codes; halves: parts of a group. Any range of rows that begins with a tile can be a part.
PART = np.dtype(
    [
        (name, np.int64)
        for name in ("code", "gemm", "at", "rows", "tile_bytes", "unpacked_bytes", "offset", "halves", "has_minimum")
    ]
)
TILE_GEMM = types.void(*[types.int64] * 10)


def _amx_emit(builder: Any, name: str, *args: Any) -> None:
    call_llvm(builder, f"llvm.x86.{name}", ir.VoidType(), *args)


def _amx_load(register: int) -> Any:
    def emit(builder: Any, at: Any, step: Any) -> None:
        _amx_emit(builder, "tileloadd64", INT8(register), builder.inttoptr(at, INT8.as_pointer()), step)

    return operation(types.void, emit, 2)


def _amx_store(register: int) -> Any:
    def emit(builder: Any, at: Any, step: Any) -> None:
        _amx_emit(builder, "tilestored64", INT8(register), builder.inttoptr(at, INT8.as_pointer()), step)

    return operation(types.void, emit, 2)


def _amx_multiply(builder: Any) -> None:
    for sums, x in ((HIGH, X_HIGH), (LOW, X_LOW)):
        _amx_emit(builder, "tilezero", INT8(sums))
        _amx_emit(builder, "tdpbssd", INT8(sums), INT8(x), INT8(CODES))


# They take an address and the stride of rows in bytes.
amx_load_x_high, amx_load_x_low, amx_load_codes = (_amx_load(register) for register in (X_HIGH, X_LOW, CODES))
amx_store_high, amx_store_low = (_amx_store(register) for register in (HIGH, LOW))
amx_multiply = operation(types.void, _amx_multiply, 0)  # the codes with the high and with the low bytes
amx_release = operation(types.void, lambda b: _amx_emit(b, "tilerelease"), 0)
_amx_configure = operation(types.void, lambda b, at: _amx_emit(b, "ldtilecfg", b.inttoptr(at, INT8.as_pointer())), 1)


@inline
def _amx_configure_for(at: int, rows: int, columns: int) -> None:
    """Sets the register shapes for so many rows of x. at: the address of AMX_CONFIG_BYTES bytes of scratch memory."""
    for i in range(AMX_CONFIG_BYTES):
        store_i8(at + i, 0)
    store_i8(at, 1)
    for register in range(5):
        store_i8(at + 16 + 2 * register, columns if register < CODES else 64)  # bytes of a row
        store_i8(at + 48 + register, columns // 4 if register == CODES else rows)
    _amx_configure(at)


@inline
def _quantize_row(t: int, x: int, columns: int, codes: int, scales: int) -> None:
    """Row t of x: of each group its codes, its scale, the sum of its dequantized values, and the initial sums.

    The last group is padded with 0.
    """
    groups, full = (columns + GROUP - 1) // GROUP, columns // GROUP
    x, codes, scales = x + t * columns * 4, codes + t * groups * X_BYTES, scales + t * groups * SCALE_BYTES
    for g in range(full):
        _quantize_group(x + g * GROUP * 4, codes + g * X_BYTES, scales + g * SCALE_BYTES)
    if full * GROUP < columns:
        rest = np.zeros(GROUP, np.float32)
        for i in range(columns - full * GROUP):
            rest[i] = load_f32(x + (full * GROUP + i) * 4)
        _quantize_group(address(rest), codes + full * X_BYTES, scales + full * SCALE_BYTES)
        keep_alive(rest)


_quantize_rows = parallel_for(_quantize_row)


@inline(forceinline=True)
def _quantize_group(at: int, codes_at: int, scales_at: int) -> None:
    """Stores the high bytes of all codes, rounded, then the remainders as low bytes."""
    peak = abs_bits(load_f32x8(at))
    for i in range(32, GROUP * 4, 32):
        peak = max_u32(peak, abs_bits(load_f32x8(at + i)))
    step = reduce_abs_max(peak) / np.float32(X_LEVELS)
    inverse = splat_x8(np.float32(1) / step if step > MIN_STEP else np.float32(0))
    total, total_of_highs = np.int32(0), np.int32(0)
    for half in range(2):
        sums, high_sums = zeros_i32x8(), zeros_i32x8()
        for i in range(half * GROUP // 2, (half + 1) * GROUP // 2, 8):
            code = round_to_int(multiply(load_f32x8(at + 4 * i), inverse))
            high = high_byte(code)
            sums, high_sums = add_ints(sums, code), add_ints(high_sums, high)
            store_i8x8(codes_at + i, high)
            store_i8x8(codes_at + GROUP + i, code)
        # Both in 32 bits, which x that is not finite exceeds.
        some = np.int32(reduce_add_i32(sums) - GROUP // 2 * LOW_MAGIC)
        highs = np.int32(reduce_add_i32(high_sums) - GROUP // 2 * (LOW_MAGIC >> 8))
        _store_sums(scales_at + (1 + half) * SUMS_BYTES, step, some, highs)
        total, total_of_highs = np.int32(total + some), np.int32(total_of_highs + highs)
    _store_sums(scales_at, step, total, total_of_highs)


@inline(forceinline=True)
def _store_sums(at: int, step: Any, sum_of_codes: Any, sum_of_highs: Any) -> None:
    store(at, step)
    store(at + 4, np.float32(np.int32(sum_of_codes)) * step)
    store(at + 8, np.int32(sum_of_highs))
    store(at + 12, np.int32(sum_of_codes - 256 * sum_of_highs))


# Code of a scheme


def _is_small(scheme: Scheme) -> bool:
    """Whether its codes, before `zero` is subtracted, are from 0 to 127."""
    return scheme.bits < 8 and not scheme.table


def _dot_offset(scheme: Scheme) -> int:
    """What is added to codes when they are multiplied; `_emit_part` subtracts it times x."""
    return scheme.zero if _is_small(scheme) else UNSIGNED_OFFSET


def _emit_codes(b: Any, scheme: Scheme, at: Any, offset: int) -> list[Any]:
    """The codes of a group of a tile, plus an offset: registers of four columns of each row."""
    codes: list[Any] = [None] * 8
    word, low = 0, 0
    for bits in scheme.planes:
        registers = [emit_load(b, b.add(at, at.type((word + i) * 4 * TILE)), TILE_CODES) for i in range(bits)]
        for quad in range(8):
            piece = _emit_bits(b, registers[quad % bits], bits * (quad // bits), bits, low)
            codes[quad] = piece if low == 0 else b.or_(codes[quad], piece)
        word, low = word + bits, low + bits
    if scheme.table:
        return [emit_look_up(b, each, [value + offset for value in scheme.table]) for each in codes]
    offset -= scheme.zero
    return [b.add(each, constant(TILE_CODES, offset % 256)) if offset else each for each in codes]


def _emit_bits(b: Any, bytes_: Any, start: int, count: int, to: int) -> Any:
    """Bits of each byte, moved to bit `to`. Shifts are of words of 16 bits, which x86 has; what enters a byte from its
    neighbor is masked."""
    if count == 8:
        return bytes_
    words, word_type = bytes_, ir.VectorType(INT16, 2 * TILE)
    if start != to:
        shift, amount = (b.lshr, start - to) if start > to else (b.shl, to - start)
        words = b.bitcast(shift(b.bitcast(bytes_, word_type), constant(word_type, amount)), TILE_CODES)
    return b.and_(words, constant(TILE_CODES, (1 << count) - 1 << to))


def _emit_multiple(b: Any, of: Any, at: Any, scheme: Scheme, *, minimum: bool) -> Any:
    """A float of each row, times an integer."""
    integers = emit_load(b, at, ir.VectorType(INT8, TILE))
    if scheme.scale == NIBBLES:
        byte = integers.type
        integers = b.lshr(integers, constant(byte, 4)) if minimum else b.and_(integers, constant(byte, 15))
    return b.fmul(of, b.sitofp(b.sext(integers, TILE_INTS), TILE_FLOATS))


def _emit_scales(b: Any, scheme: Scheme, block: Any, group: Any, scale: Any, minimum: Any) -> list[tuple[Any, Any]]:
    """Scale and minimum of each part of a group of a block; scale, minimum: of the block."""
    parts = GROUP // scheme.part
    if scheme.columns == GROUP:
        return [(scale, minimum)]
    starts = [scheme.fields.get(name, scheme.fields["scales"]).start * TILE for name in ("scales", "minima")]
    at = b.add(block, b.mul(group, group.type(parts * TILE)))
    found = []
    for part in range(parts):
        scale_at, minimum_at = (b.add(at, at.type(start + part * TILE)) for start in starts)
        part_minimum = minimum
        if scheme.minimum:
            part_minimum = _emit_multiple(b, minimum, minimum_at, scheme, minimum=True)
        found.append((_emit_multiple(b, scale, scale_at, scheme, minimum=False), part_minimum))
    return found


def _emit_sums_at(b: Any, sums: Any, part: int, parts: int) -> Any:
    """The address of the scale and the sums of a part of a group of x."""
    return sums if parts == 1 else b.add(sums, sums.type((1 + part) * SUMS_BYTES))


def _emit_start(b: Any, sums: Any, index: int, magic: int, offset: Any) -> Any:
    """What a sum of bytes starts from."""
    start = INT32(magic)
    if offset is not None:
        start = b.sub(start, b.mul(emit_load(b, b.add(sums, sums.type(4 * index)), INT32), offset))
    return emit_splat(b, start, TILE)


def _emit_part(
    b: Any,
    so_far: Any,
    codes: list[Any],
    first: int,
    x: Any,
    sums: Any,
    scale: Any,
    minimum: Any,
    offset: Any,
    small: bool,
) -> Any:
    """so_far + a part of a group times x. codes: plus an offset, or None. first: the quad of x that they begin with."""
    # Four chains of instructions, each of which waits for the one before it: adding integers is exact.
    starts = [_emit_start(b, sums, 2, HIGH_MAGIC, offset), _emit_start(b, sums, 3, LOW_MAGIC, offset)]
    chains = [*starts, constant(TILE_INTS, 0), constant(TILE_INTS, 0)]
    half, bytes_of_x = len(codes) // 2, (x, b.add(x, x.type(GROUP)))  # high, low
    for i in range(half):
        for chain in range(4):
            at = i + chain // 2 * half
            chains[chain] = emit_dot(b, chains[chain], codes[at], bytes_of_x[chain % 2], first + at, small=small)
    dots = emit_combined(b, b.add(chains[0], chains[2]), b.add(chains[1], chains[3]))
    return _emit_scaled(b, so_far, dots, sums, scale, minimum)


def _emit_scaled(b: Any, so_far: Any, dots: Any, sums: Any, scale: Any, minimum: Any) -> Any:
    fma = f"llvm.fma.v{TILE}f32"
    so_far = call_llvm(b, fma, TILE_FLOATS, dots, b.fmul(scale, emit_for_tile(b, sums, 0)), so_far)
    if minimum is None:
        return so_far
    return call_llvm(b, fma, TILE_FLOATS, minimum, emit_for_tile(b, sums, 1), so_far)


def _add_group(scheme: Scheme) -> Any:
    """so_far + a group of a tile times a group of x; a group of a block, whose scale and minimum are given."""

    def emit(b: Any, so_far: Any, block: Any, group: Any, scale: Any, minimum: Any, x: Any, sums: Any) -> Any:
        return _emit_group(b, scheme, _emit_parts(b, scheme, block, group, scale, minimum), so_far, x, sums)

    return operation(tile_floats, emit, 7)


def _add_group_to_rows(scheme: Scheme) -> Any:
    """The same for `count` rows of x, whose sums are in memory: the codes are unpacked once."""

    def emit(
        b: Any, to: Any, block: Any, group: Any, scale: Any, minimum: Any, x: Any, x_row: Any, sums: Any, s_row: Any,
        count: Any,
    ) -> None:  # fmt: skip
        parts = _emit_parts(b, scheme, block, group, scale, minimum)
        with cgutils.for_range(b, count) as loop:
            of_row = ((to, INT64(4 * TILE)), (x, x_row), (sums, s_row))
            to_at, x_at, s_at = (b.add(start, b.mul(loop.index, step)) for start, step in of_row)
            emit_prefetch(b, b.add(x_at, INT64(X_BYTES)))  # more rows than two or three exceed the L1 cache
            emit_prefetch(b, b.add(s_at, INT64(SCALE_BYTES)))
            emit_store(b, to_at, _emit_group(b, scheme, parts, emit_load(b, to_at, TILE_FLOATS), x_at, s_at))

    return operation(types.void, emit, 10)


def _emit_parts(b: Any, scheme: Scheme, block: Any, group: Any, scale: Any, minimum: Any) -> list[Any]:
    """Codes, scale and minimum of each part of a group of a tile."""
    codes_at, group_bytes = scheme.fields["codes"].start * TILE, 4 * scheme.bits * TILE
    at = b.add(b.add(block, block.type(codes_at)), b.mul(group, group.type(group_bytes)))
    codes, quads = _emit_codes(b, scheme, at, _dot_offset(scheme)), scheme.part // 4
    scales = _emit_scales(b, scheme, block, group, scale, minimum if scheme.minimum else None)
    return [(codes[i * quads : (i + 1) * quads], *each) for i, each in enumerate(scales)]


def _emit_group(b: Any, scheme: Scheme, parts: list[Any], so_far: Any, x: Any, sums: Any) -> Any:
    offset = INT32(_dot_offset(scheme)) if _dot_offset(scheme) else None
    for i, (codes, scale, minimum) in enumerate(parts):
        sums_at, first = _emit_sums_at(b, sums, i, len(parts)), i * len(codes)
        so_far = _emit_part(b, so_far, codes, first, x, sums_at, scale, minimum, offset, _is_small(scheme))
    return so_far


def _unpack_group(scheme: Scheme) -> Any:
    """Stores the codes of a group of a tile as bytes, then the scales of its parts, then their minima."""
    offset = _unpacked_offset(scheme)
    codes_at, group_bytes = scheme.fields["codes"].start * TILE, 4 * scheme.bits * TILE

    def emit(b: Any, block: Any, group: Any, scale: Any, minimum: Any, to: Any) -> None:
        at = b.add(b.add(block, block.type(codes_at)), b.mul(group, group.type(group_bytes)))
        values = _emit_codes(b, scheme, at, offset)
        scales = _emit_scales(b, scheme, block, group, scale, minimum if scheme.minimum else None)
        values += [scale for scale, _ in scales] + [minimum for _, minimum in scales if minimum is not None]
        for i, value in enumerate(values):
            emit_store(b, b.add(to, to.type(4 * TILE * i)), value)

    return operation(types.void, emit, 5)


def _tile_body(scheme: Scheme) -> Any:
    """A tile with few rows of x; or, without any, the tile unpacked."""
    add_group, add_to_rows, unpack_group = _add_group(scheme), _add_group_to_rows(scheme), _unpack_group(scheme)
    load_scale = load_tile_exponents if scheme.scale == E8M0 else load_tile_halves
    minimum_at = scheme.fields["minimum"].start * TILE if scheme.minimum else 0
    block_bytes, groups_of_block = scheme.block_bytes * TILE, scheme.columns // GROUP
    line_bytes = -(-block_bytes // groups_of_block)
    unpacked = _unpacked_bytes(scheme)

    @inline(forceinline=True)
    def fetch(at: int) -> None:
        if PREFETCH_WEIGHTS_BYTES > 0:
            for line in range(0, line_bytes, 64):
                prefetch(at + PREFETCH_WEIGHTS_BYTES + line)

    @inline(forceinline=True)
    def body(
        at: int, groups: int, bias: int, missing: int, x: int, sums: int, count: int, out: int, out_row: int, to: int
    ) -> None:
        if count == 0:
            for g in range(groups):
                block = at + g // groups_of_block * block_bytes
                fetch(block + g % groups_of_block * line_bytes)
                scale, minimum = load_scale(block), load_tile_halves(block + minimum_at)
                unpack_group(block, g % groups_of_block, scale, minimum, to + g * unpacked)
        elif count == 1:
            so_far = zeros_tile()
            for first in range(0, groups, groups_of_block):
                block = at + first // groups_of_block * block_bytes
                scale, minimum = load_scale(block), load_tile_halves(block + minimum_at)
                for g in range(groups_of_block):
                    fetch(block + g * line_bytes)
                    x_at, s_at = x + (first + g) * X_BYTES, sums + (first + g) * SCALE_BYTES
                    so_far = add_group(so_far, block, g, scale, minimum, x_at, s_at)
            _put(so_far, bias, out, missing)
        else:
            scratch = np.empty(64 + count * 4 * TILE, np.uint8)
            row_sums, x_row, s_row = (address(scratch) + 63) // 64 * 64, groups * X_BYTES, groups * SCALE_BYTES
            for t in range(count):
                store(row_sums + t * 4 * TILE, zeros_tile())
            for first in range(0, groups, groups_of_block):
                block = at + first // groups_of_block * block_bytes
                scale, minimum = load_scale(block), load_tile_halves(block + minimum_at)
                for g in range(groups_of_block):
                    fetch(block + g * line_bytes)
                    x_at, s_at = x + (first + g) * X_BYTES, sums + (first + g) * SCALE_BYTES
                    add_to_rows(row_sums, block, g, scale, minimum, x_at, x_row, s_at, s_row, count)
            for t in range(count):
                _put(load_tile_floats(row_sums + t * 4 * TILE), bias, out + t * out_row, missing)
            keep_alive(scratch)

    return body


# Code that schemes share


def _add_part(parts: int, part: int, has_minimum: bool, small: bool) -> Any:
    """so_far + a part of an unpacked group times x."""
    quads = 8 // parts
    has_offset = not has_minimum and (small or UNSIGNED_OFFSET != 0)

    def emit(b: Any, so_far: Any, at: Any, x: Any, sums: Any, offset: Any) -> Any:
        def load(register: int, llvm_type: Any) -> Any:
            return emit_load(b, b.add(at, at.type(4 * TILE * register)), llvm_type)

        codes = [load(part * quads + i, TILE_CODES) for i in range(quads)]
        scale = load(8 + part, TILE_FLOATS)
        minimum = load(8 + parts + part, TILE_FLOATS) if has_minimum else None
        start, sums_at = b.trunc(offset, INT32) if has_offset else None, _emit_sums_at(b, sums, part, parts)
        return _emit_part(b, so_far, codes, part * quads, x, sums_at, scale, minimum, start, small)

    return operation(tile_floats, emit, 5)


def _add_dots(has_minimum: bool) -> Any:
    """so_far + integer sums of a part of a group, scaled."""

    def emit(b: Any, so_far: Any, dots: Any, scale: Any, minimum: Any, sums: Any) -> Any:
        return _emit_scaled(b, so_far, dots, sums, scale, minimum if has_minimum else None)

    return operation(tile_floats, emit, 5)


def _part_body(parts: int, has_minimum: bool, small: bool) -> Any:
    """An unpacked tile with many rows of x."""
    add_first, add_second = (_add_part(parts, part, has_minimum, small) for part in (0, parts - 1))
    add_dots = _add_dots(has_minimum)
    unpacked = CODE_BYTES + 4 * TILE * parts * (2 if has_minimum else 1)
    line, columns = 4 * TILE, GROUP // parts

    @inline(forceinline=True)
    def add_group(so_far: Any, at: int, x: int, sums: int, offset: int) -> Any:
        so_far = add_first(so_far, at, x, sums, offset)
        return add_second(so_far, at, x, sums, offset) if parts == 2 else so_far

    @inline(forceinline=True)
    def by_fours(
        at: int,
        groups: int,
        bias: int,
        missing: int,
        x: int,
        sums: int,
        count: int,
        out: int,
        out_row: int,
        offset: int,
    ) -> None:
        x_row, s_row = groups * X_BYTES, groups * SCALE_BYTES
        for t in range(0, count // 4 * 4, 4):  # four rows of x at once: the codes of W are loaded once for all
            a, b, c, d = zeros_tile(), zeros_tile(), zeros_tile(), zeros_tile()
            for g in range(groups):
                w, x_at, s_at = at + g * unpacked, x + t * x_row + g * X_BYTES, sums + t * s_row + g * SCALE_BYTES
                a = add_group(a, w, x_at, s_at, offset)
                b = add_group(b, w, x_at + x_row, s_at + s_row, offset)
                c = add_group(c, w, x_at + 2 * x_row, s_at + 2 * s_row, offset)
                d = add_group(d, w, x_at + 3 * x_row, s_at + 3 * s_row, offset)
            _put(a, bias, out + t * out_row, missing)
            _put(b, bias, out + (t + 1) * out_row, missing)
            _put(c, bias, out + (t + 2) * out_row, missing)
            _put(d, bias, out + (t + 3) * out_row, missing)
        for t in range(count // 4 * 4, count):
            a = zeros_tile()
            for g in range(groups):
                w, x_at, s_at = at + g * unpacked, x + t * x_row + g * X_BYTES, sums + t * s_row + g * SCALE_BYTES
                a = add_group(a, w, x_at, s_at, offset)
            _put(a, bias, out + t * out_row, missing)

    @inline(forceinline=True)
    def multiply_part(at: int, x: int, x_row: int) -> None:
        amx_load_x_high(x, x_row)
        amx_load_x_low(x + GROUP, x_row)
        amx_load_codes(at, line)
        amx_multiply()

    @inline(forceinline=True)
    def by_amx(
        at: int,
        groups: int,
        bias: int,
        missing: int,
        x: int,
        sums: int,
        count: int,
        out: int,
        out_row: int,
        offset: int,
    ) -> None:
        x_row, s_row = groups * X_BYTES, groups * SCALE_BYTES
        scratch = np.empty(64 + AMX_CONFIG_BYTES + 3 * AMX_ROWS * line, np.uint8)
        config = (address(scratch) + 63) // 64 * 64
        high = config + AMX_CONFIG_BYTES
        low, so_far = high + AMX_ROWS * line, high + 2 * AMX_ROWS * line
        configured = 0
        for first in range(0, count, AMX_ROWS):
            rows = min(AMX_ROWS, count - first)
            if rows != configured:
                _amx_configure_for(config, rows, columns)
                configured = rows
            for r in range(rows):
                store(so_far + r * line, zeros_tile())
            x_first, s_first = x + first * x_row, sums + first * s_row
            multiply_part(at, x_first, x_row)
            for i in range(groups * parts):
                group, part = i // parts, i % parts
                amx_store_high(high, line)
                amx_store_low(low, line)
                if i + 1 < groups * parts:  # the next part is multiplied while this one is scaled
                    following, half = (i + 1) // parts, (i + 1) % parts
                    codes = at + following * unpacked + half * (CODE_BYTES // 2)
                    multiply_part(codes, x_first + following * X_BYTES + half * columns, x_row)
                scale_at = at + group * unpacked + CODE_BYTES + part * line
                scale = load_tile_floats(scale_at)
                minimum = load_tile_floats(scale_at + parts * line) if has_minimum else scale
                s_at = s_first + group * SCALE_BYTES + (0 if parts == 1 else (1 + part) * SUMS_BYTES)
                for r in range(rows):
                    to = so_far + r * line
                    dots = add_ints(times_256(load_tile_ints(high + r * line)), load_tile_ints(low + r * line))
                    scaled = add_dots(load_tile_floats(to), to_tile_floats(dots), scale, minimum, s_at + r * s_row)
                    store(to, scaled)
            for r in range(rows):
                _put(load_tile_floats(so_far + r * line), bias, out + (first + r) * out_row, missing)
        amx_release()
        keep_alive(scratch)

    return by_amx if AMX else by_fours


@inline(forceinline=True)
def _put(sums: Any, bias: int, to: int, missing: int) -> None:
    """Stores the outputs of a tile for a row of x; the last tile of a weight may have fewer. bias: an address, or 0."""
    if missing <= 0:
        store(to, sums if bias == 0 else add(sums, load_tile_floats(bias)))
    else:
        _put_some(sums, bias, to, TILE - missing)


@inline
def _put_some(sums: Any, bias: int, to: int, count: int) -> None:
    spare = np.empty(TILE, np.float32)
    store(address(spare), sums)
    for i in range(count):
        store(to + i * 4, spare[i] if bias == 0 else spare[i] + load_f32(bias + i * 4))


def _unpacked_offset(scheme: Scheme) -> int:
    """AMX multiplies signed bytes."""
    return 0 if AMX else _dot_offset(scheme)


def _unpacked_bytes(scheme: Scheme) -> int:
    """Of a group of an unpacked tile."""
    return CODE_BYTES + 4 * TILE * (GROUP // scheme.part) * (2 if scheme.minimum else 1)


def _kernel_of(body: Any, name: str, signature: Any) -> Kernel:
    """A kernel that consists of this function. Its name and globals are what tells it from others, in numba's cache."""

    def template(
        at: int, groups: int, bias: int, missing: int, x: int, sums: int, count: int, out: int, out_row: int, last: int
    ) -> None:
        BODY(at, groups, bias, missing, x, sums, count, out, out_row, last)  # type: ignore[name-defined]  # noqa: F821

    function = FunctionType(template.__code__, {"BODY": body, "__name__": __name__}, name)
    function.__qualname__ = name
    return kernel(signature)(function)


@lru_cache(None)
def tile_kernel(scheme: Scheme) -> Kernel:
    """Compiled when a model first has such a weight."""
    return _kernel_of(_tile_body(scheme), f"gemv_{scheme.name.lower()}", TILE_GEMM)


def part_kernel(scheme: Scheme) -> Kernel:
    return _part_kernel(GROUP // scheme.part, scheme.minimum, _is_small(scheme) and not AMX)


@lru_cache(None)
def _part_kernel(parts: int, has_minimum: bool, small: bool) -> Kernel:
    name = f"gemm_{GROUP // parts}{'_minimum' * has_minimum}{'_small' * small}"
    return _kernel_of(_part_body(parts, has_minimum, small), name, TILE_GEMM)


def part_record(scheme: Scheme, at: int, rows: int, tile_bytes: int) -> tuple[int, ...]:
    """A PART. tile_bytes: of a tile of its rows."""
    kernels, halves = (tile_kernel(scheme).address, part_kernel(scheme).address), GROUP // scheme.part
    return *kernels, at, rows, tile_bytes, _unpacked_bytes(scheme), _unpacked_offset(scheme), halves, scheme.minimum


@typed_intrinsic
def _call_kernel(
    context: Any, code: Any, at: Any, groups: Any, bias: Any, missing: Any, x: Any, sums: Any, count: Any, out: Any,
    out_row: Any, last: Any,
) -> Any:  # fmt: skip
    return types.void(types.int64, *TILE_GEMM.args), call_at


@parallel_for
def _by_tile(
    item: int, table: int, parts: int, bias: int, rows: int, tiles: int, groups: int, codes: int, sums: int, count: int,
    size: int, out: int,
) -> None:  # fmt: skip
    """A tile of W with `size` rows of x."""
    tile, first = item % tiles, item // tiles * size
    n, out_row, row, p, of = min(size, count - first), rows * 4, 0, 0, records(table, parts, PART)
    while tile >= (of[p].rows + TILE - 1) // TILE:
        tile -= (of[p].rows + TILE - 1) // TILE
        row += of[p].rows
        p += 1
    part = of[p]
    row += tile * TILE
    at, missing = part.at + tile * part.tile_bytes, (tile + 1) * TILE - part.rows
    x, s, to = codes + first * groups * X_BYTES, sums + first * groups * SCALE_BYTES, out + first * out_row + row * 4
    bias_at = bias + row * 4 if bias != 0 else 0
    if n <= FEW_ROWS:
        _call_kernel(part.code, at, groups, bias_at, missing, x, s, n, to, out_row, 0)
    else:
        scratch = np.empty(64 + groups * part.unpacked_bytes, np.uint8)
        unpacked = (address(scratch) + 63) // 64 * 64
        _call_kernel(part.code, at, groups, 0, 0, 0, 0, 0, 0, 0, unpacked)
        _call_kernel(part.gemm, unpacked, groups, bias_at, missing, x, s, n, to, out_row, part.offset)
        keep_alive(scratch)


@inline
def _quantize(x: int, columns: int, count: int) -> Any:
    """The codes of x [count, columns], and their scales."""
    groups = (columns + GROUP - 1) // GROUP
    codes, scales = np.empty(count * groups * X_BYTES, np.int8), np.empty(count * groups * SCALE_BYTES, np.uint8)
    if count < PARALLEL_ROWS:
        for t in range(count):
            _quantize_row(t, x, columns, address(codes), address(scales))
    else:
        _quantize_rows(count, x, columns, address(codes), address(scales))
    return codes, scales


@kernel(GEMM)
def gemm_int(kind: int, at: int, bias: int, rows: int, columns: int, x: int, count: int, out: int) -> None:
    """out [count, rows] = x [count, columns] W^T + b, with a quantized weight. at: its parts; kind: how many."""
    if count == 0:
        return
    (codes, sums), groups, tiles = _quantize(x, columns, count), (columns + GROUP - 1) // GROUP, 0
    parts = records(at, kind, PART)
    for p in range(kind):
        tiles += (parts[p].rows + TILE - 1) // TILE
    # Rows of x in an item of work: they stay in the L2 cache for all tiles of W.
    size = max(AMX_ROWS, L2_BYTES // (groups * (X_BYTES + SCALE_BYTES)) // AMX_ROWS * AMX_ROWS)
    items = (count + size - 1) // size * tiles
    _by_tile(items, at, kind, bias, rows, tiles, groups, address(codes), address(sums), count, size, out)
    keep_alive(codes, sums)


@kernel(types.void(*[types.int64] * 5))
def look_up(part: int, columns: int, ids: int, count: int, out: int) -> None:
    """out [count, columns]: rows of a quantized weight as floats. part: its PART."""
    groups, of = (columns + GROUP - 1) // GROUP, records(part, 1, PART)[0]
    scratch = np.empty(64 + groups * of.unpacked_bytes, np.uint8)
    unpacked = (address(scratch) + 63) // 64 * 64
    for t in range(count):
        row = load_i64(ids + t * 8)
        lane = row % TILE
        _call_kernel(of.code, of.at + row // TILE * of.tile_bytes, groups, 0, 0, 0, 0, 0, 0, 0, unpacked)
        for i in range(columns):
            group, column = unpacked + i // GROUP * of.unpacked_bytes, i % GROUP
            code = load_i8(group + (column // 4 * TILE + lane) * 4 + column % 4) - of.offset
            scale_at = group + CODE_BYTES + (column // (GROUP // of.halves) * TILE + lane) * 4
            weight = np.float32((code + 128 & 255) - 128) * load_f32(scale_at)
            if of.has_minimum != 0:
                weight += load_f32(scale_at + of.halves * 4 * TILE)
            store(out + (t * columns + i) * 4, weight)
    keep_alive(scratch)
