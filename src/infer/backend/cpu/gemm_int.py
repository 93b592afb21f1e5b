"""GEMM and GEMV with a quantized weight.

The weight is stored in tiles of R rows, as many as a register has sums. A tile is a sequence of groups of 32 columns:

    4 bits: 16 R bytes of codes, R float16 scales, R float16 minima: w = scale * code + minimum, codes 0..15
    8 bits: 32 R bytes of codes, R float16 scales:                   w = scale * code, codes -127..127

Codes are stored by quads of columns: the four bytes of row 0, of row 1, and so on, then the next quad; with 4 bits,
the low half of a byte belongs to quad j and its high half to quad j + 4. A register of codes is multiplied with the
same four bytes of x in every row, the sums of all rows are in one register, and a tile is read sequentially.

x is quantized too, in groups of 32, to 16 bits: a high and a low byte, each multiplied with the codes in integers,
which is exact. (With 8 bits, as other engines do it, a difference in the last bit of x flips codes and grows to tenths
of a logit.) The rest is floating point, group by group in one order.

AMX multiplies blocks of bytes on x86 cores that have it. Its registers hold up to 16 rows of 64 bytes: here two hold
the high and the low bytes of 16 rows of x, one the codes of a group of a tile, in the order of memory, and two the
sums. All are integers, so the bits are those of any other core.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core.registry import cpu_target

from infer.backend.cpu.gemm import GEMM, INT4
from infer.backend.cpu.jit import address, inline, keep_alive, kernel
from infer.backend.cpu.simd import (
    HIGH_MAGIC,
    INT8,
    LOW_MAGIC,
    TILE,
    UNSIGNED_OFFSET,
    abs_bits,
    add,
    add_ints,
    call_llvm,
    combine_bytes,
    dot,
    dot_unsigned,
    fma,
    high_byte,
    high_magic_tile,
    high_nibbles,
    load_f16,
    load_f32,
    load_f32x8,
    load_for_tile,
    load_i8,
    load_i64,
    load_int_for_tile,
    load_tile_codes,
    load_tile_floats,
    load_tile_halves,
    load_tile_ints,
    low_magic_tile,
    low_nibbles,
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
    times_256,
    to_tile_floats,
    to_unsigned,
    zeros_i32x8,
    zeros_tile,
)
from infer.backend.cpu.threads import parallel_for
from infer.backend.cpu.tile import PREFETCH_BYTES
from infer.machine import allows_amx
from infer.nn.quantized import GROUP

L2_BYTES = 262144  # fit into the L2 cache of most cores, beside other data
PARALLEL_ROWS = 16  # from so many rows of x on, several threads quantize them
INT4_BYTES, INT8_BYTES = 20 * TILE, 34 * TILE  # of a group of a tile
X_BYTES, SCALE_BYTES = 2 * GROUP, 16  # of a group of x: its codes; its scale, sum, and two initial sums
MIN_STEP = np.float32(3e-39)  # a smaller step has no finite inverse, and counts as 0
X_LEVELS = 127 * 256 + 127  # the largest code of x
AMX_ROWS = 16  # rows of x at a time
AMX_CONFIG_BYTES = 64
X_HIGH, X_LOW, CODES, HIGH, LOW = range(5)  # the AMX registers
# LLVM may know an instruction that the system does not allow, and the other way round.
AMX = TILE == 16 and allows_amx() and "+amx-int8" in cpu_target.target_context.codegen().magic_tuple()[2]


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
def amx_configure(at: int) -> None:
    """Sets the register shapes for groups of a tile. at: the address of AMX_CONFIG_BYTES bytes of scratch memory."""
    for i in range(AMX_CONFIG_BYTES):
        store_i8(at + i, 0)
    store_i8(at, 1)
    for register in range(5):
        store_i8(at + 16 + 2 * register, GROUP if register < CODES else 64)  # bytes of a row
        store_i8(at + 48 + register, GROUP // 4 if register == CODES else AMX_ROWS)
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
    sums, high_sums = zeros_i32x8(), zeros_i32x8()
    for i in range(0, GROUP, 8):
        code = round_to_int(multiply(load_f32x8(at + 4 * i), inverse))
        high = high_byte(code)
        sums, high_sums = add_ints(sums, code), add_ints(high_sums, high)
        store_i8x8(codes_at + i, high)
        store_i8x8(codes_at + GROUP + i, code)
    sum_of_codes = np.int32(reduce_add_i32(sums) - GROUP * LOW_MAGIC)
    store(scales_at, step)
    store(scales_at + 4, np.float32(sum_of_codes) * step)
    if UNSIGNED_OFFSET != 0:
        sum_of_highs = np.int32(reduce_add_i32(high_sums) - GROUP * (LOW_MAGIC >> 8))
        store(scales_at + 8, np.int32(HIGH_MAGIC - UNSIGNED_OFFSET * sum_of_highs))
        store(scales_at + 12, np.int32(LOW_MAGIC - UNSIGNED_OFFSET * (sum_of_codes - 256 * sum_of_highs)))


@inline(forceinline=True)
def _int4_codes(at: int) -> Any:
    """The codes of the eight quads of a group of a tile."""
    a, b = load_tile_codes(at), load_tile_codes(at + 4 * TILE)
    c, d = load_tile_codes(at + 8 * TILE), load_tile_codes(at + 12 * TILE)
    return (
        low_nibbles(a),
        low_nibbles(b),
        low_nibbles(c),
        low_nibbles(d),
        high_nibbles(a),
        high_nibbles(b),
        high_nibbles(c),
        high_nibbles(d),
    )


@inline(forceinline=True)
def _int8_codes(at: int) -> Any:
    return (
        to_unsigned(load_tile_codes(at)),
        to_unsigned(load_tile_codes(at + 4 * TILE)),
        to_unsigned(load_tile_codes(at + 8 * TILE)),
        to_unsigned(load_tile_codes(at + 12 * TILE)),
        to_unsigned(load_tile_codes(at + 16 * TILE)),
        to_unsigned(load_tile_codes(at + 20 * TILE)),
        to_unsigned(load_tile_codes(at + 24 * TILE)),
        to_unsigned(load_tile_codes(at + 28 * TILE)),
    )


@inline(forceinline=True)
def _unpack(at: int, to: int) -> Any:
    """The codes of a 4-bit group in the layout of an 8-bit group."""
    codes = _int4_codes(at)
    store(to, codes[0])
    store(to + 4 * TILE, codes[1])
    store(to + 8 * TILE, codes[2])
    store(to + 12 * TILE, codes[3])
    store(to + 16 * TILE, codes[4])
    store(to + 20 * TILE, codes[5])
    store(to + 24 * TILE, codes[6])
    store(to + 28 * TILE, codes[7])
    return to


@inline(forceinline=True)
def _without_amx(first: int, *rest: int) -> Any:
    return first


def _gemm_loop(codes_of: Any, dot: Any, code_bytes: int, group_bytes: int, has_minimum: bool) -> Any:
    """The loop over tiles for one kind of weight."""
    has_offset = not has_minimum and UNSIGNED_OFFSET != 0

    @inline(forceinline=True)
    def dot_two(codes: Any, xa: int, sa: int, xb: int, sb: int) -> Any:
        """Codes of a tile with two rows of x, high and low bytes: four independent sums."""
        ha = load_int_for_tile(sa + 8) if has_offset else high_magic_tile()
        la = load_int_for_tile(sa + 12) if has_offset else low_magic_tile()
        hb = load_int_for_tile(sb + 8) if has_offset else high_magic_tile()
        lb = load_int_for_tile(sb + 12) if has_offset else low_magic_tile()
        ha, la = dot(ha, codes[0], xa, 0), dot(la, codes[0], xa + GROUP, 0)
        hb, lb = dot(hb, codes[0], xb, 0), dot(lb, codes[0], xb + GROUP, 0)
        ha, la = dot(ha, codes[1], xa, 1), dot(la, codes[1], xa + GROUP, 1)
        hb, lb = dot(hb, codes[1], xb, 1), dot(lb, codes[1], xb + GROUP, 1)
        ha, la = dot(ha, codes[2], xa, 2), dot(la, codes[2], xa + GROUP, 2)
        hb, lb = dot(hb, codes[2], xb, 2), dot(lb, codes[2], xb + GROUP, 2)
        ha, la = dot(ha, codes[3], xa, 3), dot(la, codes[3], xa + GROUP, 3)
        hb, lb = dot(hb, codes[3], xb, 3), dot(lb, codes[3], xb + GROUP, 3)
        ha, la = dot(ha, codes[4], xa, 4), dot(la, codes[4], xa + GROUP, 4)
        hb, lb = dot(hb, codes[4], xb, 4), dot(lb, codes[4], xb + GROUP, 4)
        ha, la = dot(ha, codes[5], xa, 5), dot(la, codes[5], xa + GROUP, 5)
        hb, lb = dot(hb, codes[5], xb, 5), dot(lb, codes[5], xb + GROUP, 5)
        ha, la = dot(ha, codes[6], xa, 6), dot(la, codes[6], xa + GROUP, 6)
        hb, lb = dot(hb, codes[6], xb, 6), dot(lb, codes[6], xb + GROUP, 6)
        ha, la = dot(ha, codes[7], xa, 7), dot(la, codes[7], xa + GROUP, 7)
        hb, lb = dot(hb, codes[7], xb, 7), dot(lb, codes[7], xb + GROUP, 7)
        return combine_bytes(ha, la), combine_bytes(hb, lb)

    @inline(forceinline=True)
    def add_group(so_far: Any, dots: Any, scale: Any, minimum: Any, x_scale_at: int) -> Any:
        so_far = fma(dots, multiply(scale, load_for_tile(x_scale_at, 0)), so_far)
        return fma(minimum, load_for_tile(x_scale_at, 1), so_far) if has_minimum else so_far

    @inline(forceinline=True)
    def add_two(a: Any, b: Any, w: Any, scale: Any, minimum: Any, xa: int, sa: int, xb: int, sb: int) -> Any:
        dots_a, dots_b = dot_two(w, xa, sa, xb, sb)
        return add_group(a, dots_a, scale, minimum, sa), add_group(b, dots_b, scale, minimum, sb)

    @inline(forceinline=True)
    def take(at: int) -> Any:
        if PREFETCH_BYTES > 0:
            for line in range(0, group_bytes, 64):
                prefetch(at + PREFETCH_BYTES + line)
        scale = load_tile_halves(at + code_bytes)
        return codes_of(at), scale, load_tile_halves(at + code_bytes + 2 * TILE) if has_minimum else scale

    @inline(forceinline=True)
    def multiply_by_amx(at: int, x: int, x_row: int, unpacked: int) -> None:
        """A group of a tile with the same group of `AMX_ROWS` rows of x."""
        amx_load_x_high(x, x_row)
        amx_load_x_low(x + GROUP, x_row)
        amx_load_codes(_unpack(at, unpacked) if has_minimum else at, 4 * TILE)
        amx_multiply()

    @inline
    def by_amx(
        first: int,
        last: int,
        start: int,
        groups: int,
        codes: int,
        scales: int,
        bias: int,
        to: int,
        out_row: int,
        missing: int,
    ) -> Any:
        """A tile of W with rows of x, `AMX_ROWS` at a time. Returns the first of the remaining rows."""
        x_row, s_row, line = groups * X_BYTES, groups * SCALE_BYTES, 4 * TILE
        scratch = np.empty(64 + AMX_CONFIG_BYTES + (8 + 3 * AMX_ROWS) * line, np.uint8)
        config = (address(scratch) + 63) // 64 * 64
        unpacked = config + AMX_CONFIG_BYTES
        high = unpacked + 8 * line
        low = high + AMX_ROWS * line
        sums = low + AMX_ROWS * line
        amx_configure(config)
        while first + AMX_ROWS <= last:
            for r in range(AMX_ROWS):
                store(sums + r * line, zeros_tile())
            x, s = codes + first * x_row, scales + first * s_row
            multiply_by_amx(start, x, x_row, unpacked)
            for g in range(groups):
                at, s_at = start + g * group_bytes, s + g * SCALE_BYTES
                amx_store_high(high, line)
                amx_store_low(low, line)
                if g + 1 < groups:  # the next group is multiplied while this one is scaled
                    multiply_by_amx(at + group_bytes, x + (g + 1) * X_BYTES, x_row, unpacked)
                scale = load_tile_halves(at + code_bytes)
                minimum = load_tile_halves(at + code_bytes + 2 * TILE) if has_minimum else scale
                for r in range(AMX_ROWS):
                    to_sums = sums + r * line
                    highs, lows = load_tile_ints(high + r * line), load_tile_ints(low + r * line)
                    dots = to_tile_floats(add_ints(times_256(highs), lows))
                    so_far = load_tile_floats(to_sums)
                    store(to_sums, add_group(so_far, dots, scale, minimum, s_at + r * s_row))
            for r in range(AMX_ROWS):
                _put(load_tile_floats(sums + r * line), bias, to + (first + r) * out_row, missing)
            first += AMX_ROWS
        amx_release()
        keep_alive(scratch)
        return first

    if not AMX:
        by_amx = _without_amx

    @parallel_for
    def by_tile(
        item: int,
        at: int,
        bias_at: int,
        rows: int,
        groups: int,
        codes: int,
        scales: int,
        count: int,
        size: int,
        out: int,
    ) -> None:
        """A tile of W with `size` rows of x."""
        out_row, tiles = rows * 4, (rows + TILE - 1) // TILE
        x_row, s_row = groups * X_BYTES, groups * SCALE_BYTES
        tile, first = item % tiles, item // tiles * size
        last = min(first + size, count)
        together = last - (last - first) % 4
        start, to = at + tile * groups * group_bytes, out + tile * TILE * 4
        bias, missing = bias_at + tile * TILE * 4 if bias_at != 0 else 0, (tile + 1) * TILE - rows
        if last - first >= AMX_ROWS:
            first = by_amx(first, last, start, groups, codes, scales, bias, to, out_row, missing)
        for t in range(first, together, 4):  # four rows of x at once: the codes of W are unpacked once for all
            x, s = codes + t * x_row, scales + t * s_row
            a, b, c, d = zeros_tile(), zeros_tile(), zeros_tile(), zeros_tile()
            for g in range(groups):
                w, scale, minimum = take(start + g * group_bytes)
                x_at, s_at = x + g * X_BYTES, s + g * SCALE_BYTES
                a, b = add_two(a, b, w, scale, minimum, x_at, s_at, x_at + x_row, s_at + s_row)
                x_at, s_at = x_at + 2 * x_row, s_at + 2 * s_row
                c, d = add_two(c, d, w, scale, minimum, x_at, s_at, x_at + x_row, s_at + s_row)
            _put(a, bias, to + t * out_row, missing)
            _put(b, bias, to + (t + 1) * out_row, missing)
            _put(c, bias, to + (t + 2) * out_row, missing)
            _put(d, bias, to + (t + 3) * out_row, missing)
        for t in range(together, last):
            x, s = codes + t * x_row, scales + t * s_row
            a = zeros_tile()
            for g in range(groups):
                w, scale, minimum = take(start + g * group_bytes)
                x_at, s_at = x + g * X_BYTES, s + g * SCALE_BYTES
                a = add_group(a, dot_two(w, x_at, s_at, x_at, s_at)[0], scale, minimum, s_at)
            _put(a, bias, to + t * out_row, missing)

    @inline
    def gemm(at: int, bias: int, rows: int, columns: int, x: int, count: int, out: int) -> None:
        (codes, scales), groups = _quantize(x, columns, count), (columns + GROUP - 1) // GROUP
        # Rows of x in an item of work: they stay in the L2 cache for all tiles of W.
        size = max(4, L2_BYTES // (groups * (X_BYTES + SCALE_BYTES)) // 4 * 4)
        items = (count + size - 1) // size * ((rows + TILE - 1) // TILE)
        by_tile(items, at, bias, rows, groups, address(codes), address(scales), count, size, out)
        keep_alive(codes, scales)

    return gemm


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


@inline
def _quantize(x: int, columns: int, count: int) -> Any:
    """The codes of x [count, columns], and their scales."""
    groups = (columns + GROUP - 1) // GROUP
    codes, scales = np.empty(count * groups * X_BYTES, np.int8), np.empty(count * groups * 4, np.float32)
    if count < PARALLEL_ROWS:
        for t in range(count):
            _quantize_row(t, x, columns, address(codes), address(scales))
    else:
        _quantize_rows(count, x, columns, address(codes), address(scales))
    return codes, scales


_gemm_int4 = _gemm_loop(_int4_codes, dot_unsigned, 16 * TILE, INT4_BYTES, has_minimum=True)
_gemm_int8 = _gemm_loop(_int8_codes, dot, 32 * TILE, INT8_BYTES, has_minimum=False)


@kernel(GEMM)
def gemm_int4(kind: int, at: int, bias: int, rows: int, columns: int, x: int, count: int, out: int) -> None:
    """out [count, rows] = x [count, columns] W^T + b, with an int4 weight"""
    _gemm_int4(at, bias, rows, columns, x, count, out)


@kernel(GEMM)
def gemm_int8(kind: int, at: int, bias: int, rows: int, columns: int, x: int, count: int, out: int) -> None:
    """out [count, rows] = x [count, columns] W^T + b, with an int8 weight"""
    _gemm_int8(at, bias, rows, columns, x, count, out)


@kernel(types.void(*[types.int64] * 7))
def look_up(kind: int, at: int, rows: int, columns: int, ids: int, count: int, out: int) -> None:
    """out [count, columns]: rows of a quantized weight as floats."""
    groups, is_int4 = (columns + GROUP - 1) // GROUP, kind == INT4
    size, scales_at = (INT4_BYTES, 16 * TILE) if is_int4 else (INT8_BYTES, 32 * TILE)
    for t in range(count):
        row = load_i64(ids + t * 8)
        lane = row % TILE
        for g in range(groups):
            group = at + (row // TILE * groups + g) * size
            scale, minimum = load_f16(group + scales_at + lane * 2), np.float32(0)
            if is_int4:
                minimum = load_f16(group + scales_at + 2 * TILE + lane * 2)
            for i in range(min(GROUP, columns - g * GROUP)):
                quad = i // 4 % (4 if is_int4 else 8)
                code = load_i8(group + quad * 4 * TILE + lane * 4 + i % 4)
                if is_int4:
                    code = (code >> (4 if i >= 16 else 0)) & 15
                store(out + (t * columns + g * GROUP + i) * 4, scale * np.float32(code) + minimum)
