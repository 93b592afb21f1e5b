"""Products of a few or many rows with a quantised weight, on the CPU.

The weight lies in tiles of R rows, as many as a register has sums. A tile is a sequence of groups, each of 32 columns:

    4 bits: 16 R bytes of codes, R float16 scales, R float16 minima: w = scale * code + minimum, codes 0..15
    8 bits: 32 R bytes of codes, R float16 scales:                   w = scale * code, codes -127..127

Codes go by quads of columns: the four bytes of row 0, of row 1, and so on, then the next quad; with 4 bits, a byte's
low half is of quad j and its high half of quad j + 4. So a register of codes meets the same four bytes of x in every
row, the sums of all rows lie side by side in one register, and a whole tile is read front to back.

The rows of x are rounded too, in groups of 32, to 16 bits: a high byte and a low one, each multiplied with the codes as
whole numbers, which is exact. (With 8 bits, as others do it, a last digit's difference in x flips codes, and grows to
tenths of a logit.) What remains in floating point goes group by group in one order.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from infer.backend.cpu import amx
from infer.backend.cpu.memory import address, keep
from infer.backend.cpu.product import INT4, PRODUCT
from infer.backend.cpu.simd import (
    HIGH_START,
    LOW_START,
    RAISED,
    add,
    add_ints,
    as_factors,
    counted,
    dot,
    dot_positive,
    fused,
    high_byte,
    high_nibbles,
    joined,
    larger_ints,
    largest_magnitude,
    load_byte,
    load_eight,
    load_float,
    load_for_tile,
    load_half,
    load_int_for_tile,
    load_integer,
    load_tile_codes,
    load_tile_floats,
    load_tile_halves,
    load_tile_ints,
    low_nibbles,
    magnitudes,
    multiply,
    no_eight_ints,
    no_tile_floats,
    prefetch,
    splat_eight,
    store_as_bytes,
    store_codes,
    store_float,
    store_floats,
    store_int,
    tile_of_high_starts,
    tile_of_low_starts,
    times_256,
    to_tile_floats,
    total,
)
from infer.backend.cpu.threads import shared
from infer.backend.cpu.tile import AHEAD
from infer.backend.cpu.units import linked, unit
from infer.nn.quantized import GROUP, TILE

FAR = 262144  # bytes that stay in the second cache of most cores, with room to spare
MANY = 16  # rows that are worth rounding in several threads
INT4_BYTES, INT8_BYTES = 20 * TILE, 34 * TILE  # of a group of a tile
X_BYTES, SCALE_BYTES = 2 * GROUP, 16  # of a group of x: of its codes, and what goes with them
SMALLEST = np.float32(3e-39)  # step whose inverse is a number: what is smaller counts as 0
STEPS = 127 * 256 + 127  # of x, from 0 to the largest: so many its codes can count


@shared
def _round_rows(t: int, x: int, columns: int, codes: int, scales: int) -> None:
    groups = (columns + GROUP - 1) // GROUP
    _round_row(x + t * columns * 4, columns, codes + t * groups * X_BYTES, scales + t * groups * SCALE_BYTES)


@linked
def _round_row(x: int, columns: int, codes: int, scales: int) -> None:
    """Each group's codes, its scale, the sum of what its codes stand for, and where sums with its bytes start.

    The last group is filled up with 0.
    """
    whole = columns // GROUP
    for g in range(whole):
        _round_group(x + g * GROUP * 4, codes + g * X_BYTES, scales + g * SCALE_BYTES)
    if whole * GROUP < columns:
        rest = np.zeros(GROUP, np.float32)
        for i in range(columns - whole * GROUP):
            rest[i] = load_float(x + (whole * GROUP + i) * 4)
        _round_group(address(rest), codes + whole * X_BYTES, scales + whole * SCALE_BYTES)
        keep(rest, rest)


@linked(forceinline=True)
def _round_group(at: int, codes_at: int, scales_at: int) -> None:
    """First the high bytes of all codes, rounded, then what is left of them in low ones."""
    peak = magnitudes(load_eight(at))
    for i in range(32, GROUP * 4, 32):
        peak = larger_ints(peak, magnitudes(load_eight(at + i)))
    step = largest_magnitude(peak) / np.float32(STEPS)
    inverse = splat_eight(np.float32(1) / step if step > SMALLEST else np.float32(0))
    sums, high_sums = no_eight_ints(), no_eight_ints()
    for i in range(0, GROUP, 8):
        code = counted(multiply(load_eight(at + 4 * i), inverse))
        high = high_byte(code)
        sums, high_sums = add_ints(sums, code), add_ints(high_sums, high)
        store_as_bytes(codes_at + i, high)
        store_as_bytes(codes_at + GROUP + i, code)
    sum_of_codes = np.int32(total(sums) - GROUP * LOW_START)
    store_float(scales_at, step)
    store_float(scales_at + 4, np.float32(sum_of_codes) * step)
    if RAISED != 0:
        sum_of_highs = np.int32(total(high_sums) - GROUP * (LOW_START >> 8))
        store_int(scales_at + 8, np.int32(HIGH_START - RAISED * sum_of_highs))
        store_int(scales_at + 12, np.int32(LOW_START - RAISED * (sum_of_codes - 256 * sum_of_highs)))


@linked(forceinline=True)
def _int4_codes(at: int) -> Any:
    """A group of a tile: the codes of its eight quads."""
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


@linked(forceinline=True)
def _int8_codes(at: int) -> Any:
    return (
        as_factors(load_tile_codes(at)),
        as_factors(load_tile_codes(at + 4 * TILE)),
        as_factors(load_tile_codes(at + 8 * TILE)),
        as_factors(load_tile_codes(at + 12 * TILE)),
        as_factors(load_tile_codes(at + 16 * TILE)),
        as_factors(load_tile_codes(at + 20 * TILE)),
        as_factors(load_tile_codes(at + 24 * TILE)),
        as_factors(load_tile_codes(at + 28 * TILE)),
    )


@linked(forceinline=True)
def _unpack(at: int, to: int) -> Any:
    """The codes of a group of 4 bits, as one of 8 bits has them."""
    codes = _int4_codes(at)
    store_codes(to, codes[0])
    store_codes(to + 4 * TILE, codes[1])
    store_codes(to + 8 * TILE, codes[2])
    store_codes(to + 12 * TILE, codes[3])
    store_codes(to + 16 * TILE, codes[4])
    store_codes(to + 20 * TILE, codes[5])
    store_codes(to + 24 * TILE, codes[6])
    store_codes(to + 28 * TILE, codes[7])
    return to


@linked(forceinline=True)
def _not_by_amx(first: int, *rest: int) -> Any:
    return first


def _by_tile(codes_of: Any, dot: Any, code_bytes: int, group_bytes: int, has_minimum: bool) -> Any:
    """The loop for one kind of weight."""
    raised = not has_minimum and RAISED != 0

    @linked(forceinline=True)
    def dot_two(codes: Any, xa: int, sa: int, xb: int, sb: int) -> Any:
        """Codes of a tile with two rows of x, the high bytes of each and the low ones: four sums that wait for none."""
        ha = load_int_for_tile(sa + 8) if raised else tile_of_high_starts()
        la = load_int_for_tile(sa + 12) if raised else tile_of_low_starts()
        hb = load_int_for_tile(sb + 8) if raised else tile_of_high_starts()
        lb = load_int_for_tile(sb + 12) if raised else tile_of_low_starts()
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
        return joined(ha, la), joined(hb, lb)

    @linked(forceinline=True)
    def add_group(so_far: Any, dots: Any, scale: Any, minimum: Any, x_scale_at: int) -> Any:
        so_far = fused(dots, multiply(scale, load_for_tile(x_scale_at, 0)), so_far)
        return fused(minimum, load_for_tile(x_scale_at, 1), so_far) if has_minimum else so_far

    @linked(forceinline=True)
    def add_two(a: Any, b: Any, w: Any, scale: Any, minimum: Any, xa: int, sa: int, xb: int, sb: int) -> Any:
        dots_a, dots_b = dot_two(w, xa, sa, xb, sb)
        return add_group(a, dots_a, scale, minimum, sa), add_group(b, dots_b, scale, minimum, sb)

    @linked(forceinline=True)
    def take(at: int) -> Any:
        if AHEAD > 0:
            for line in range(0, group_bytes, 64):
                prefetch(at + AHEAD + line)
        scale = load_tile_halves(at + code_bytes)
        return codes_of(at), scale, load_tile_halves(at + code_bytes + 2 * TILE) if has_minimum else scale

    @linked(forceinline=True)
    def multiply_by_amx(at: int, x: int, x_row: int, unpacked: int) -> None:
        """A group of a tile with that of `amx.ROWS` rows of x."""
        amx.load_x_high(x, x_row)
        amx.load_x_low(x + GROUP, x_row)
        amx.load_codes(_unpack(at, unpacked) if has_minimum else at, 4 * TILE)
        amx.multiply()

    @linked
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
        """A tile of W with rows of x, `amx.ROWS` at a time. Returns the first of the rest, which are too few."""
        x_row, s_row, line = groups * X_BYTES, groups * SCALE_BYTES, 4 * TILE
        room = np.empty(64 + amx.CONFIG_BYTES + (8 + 3 * amx.ROWS) * line, np.uint8)
        config = (address(room) + 63) // 64 * 64
        unpacked = config + amx.CONFIG_BYTES
        high = unpacked + 8 * line
        low = high + amx.ROWS * line
        sums = low + amx.ROWS * line
        amx.configure(config)
        while first + amx.ROWS <= last:
            for r in range(amx.ROWS):
                store_floats(sums + r * line, no_tile_floats())
            x, s = codes + first * x_row, scales + first * s_row
            multiply_by_amx(start, x, x_row, unpacked)
            for g in range(groups):
                at, s_at = start + g * group_bytes, s + g * SCALE_BYTES
                amx.store_high(high, line)
                amx.store_low(low, line)
                if g + 1 < groups:  # the next products, while these are scaled
                    multiply_by_amx(at + group_bytes, x + (g + 1) * X_BYTES, x_row, unpacked)
                scale = load_tile_halves(at + code_bytes)
                minimum = load_tile_halves(at + code_bytes + 2 * TILE) if has_minimum else scale
                for r in range(amx.ROWS):
                    to_sums = sums + r * line
                    highs, lows = load_tile_ints(high + r * line), load_tile_ints(low + r * line)
                    dots = to_tile_floats(add_ints(times_256(highs), lows))
                    so_far = load_tile_floats(to_sums)
                    store_floats(to_sums, add_group(so_far, dots, scale, minimum, s_at + r * s_row))
            for r in range(amx.ROWS):
                _put(load_tile_floats(sums + r * line), bias, to + (first + r) * out_row, missing)
            first += amx.ROWS
        amx.release()
        keep(room, room)
        return first

    if not amx.AMX:
        by_amx = _not_by_amx

    @shared
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
        if last - first >= amx.ROWS:
            first = by_amx(first, last, start, groups, codes, scales, bias, to, out_row, missing)
        for t in range(first, together, 4):  # four rows of x at once: the codes of W are taken apart once for all
            x, s = codes + t * x_row, scales + t * s_row
            a, b, c, d = no_tile_floats(), no_tile_floats(), no_tile_floats(), no_tile_floats()
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
            a = no_tile_floats()
            for g in range(groups):
                w, scale, minimum = take(start + g * group_bytes)
                x_at, s_at = x + g * X_BYTES, s + g * SCALE_BYTES
                a = add_group(a, dot_two(w, x_at, s_at, x_at, s_at)[0], scale, minimum, s_at)
            _put(a, bias, to + t * out_row, missing)

    return by_tile


@linked(forceinline=True)
def _put(sums: Any, bias: int, to: int, missing: int) -> None:
    """A tile's outputs of a row; the last tile of a weight may have fewer. bias: where it lies, or 0."""
    if missing <= 0:
        store_floats(to, sums if bias == 0 else add(sums, load_tile_floats(bias)))
    else:
        _put_some(sums, bias, to, TILE - missing)


@linked
def _put_some(sums: Any, bias: int, to: int, count: int) -> None:
    spare = np.empty(TILE, np.float32)
    store_floats(address(spare), sums)
    for i in range(count):
        store_float(to + i * 4, spare[i] if bias == 0 else spare[i] + load_float(bias + i * 4))


_int4_by_tile = _by_tile(_int4_codes, dot_positive, 16 * TILE, INT4_BYTES, has_minimum=True)
_int8_by_tile = _by_tile(_int8_codes, dot, 32 * TILE, INT8_BYTES, has_minimum=False)


@linked
def _rounded(x: int, columns: int, count: int) -> Any:
    """The codes of x [count, columns], and their scales."""
    groups = (columns + GROUP - 1) // GROUP
    codes, scales = np.empty(count * groups * X_BYTES, np.int8), np.empty(count * groups * 4, np.float32)
    if count < MANY:  # sooner done than handed out
        for t in range(count):
            codes_at, scales_at = address(codes) + t * groups * X_BYTES, address(scales) + t * groups * SCALE_BYTES
            _round_row(x + t * columns * 4, columns, codes_at, scales_at)
    else:
        _round_rows(count, x, columns, address(codes), address(scales))
    return codes, scales


@linked
def _items(count: int, rows: int, groups: int) -> Any:
    """Of the work, and rows of x in each: so many that they stay in the second cache, for all tiles of W."""
    size = max(4, FAR // (groups * (X_BYTES + SCALE_BYTES)) // 4 * 4)
    return (count + size - 1) // size * ((rows + TILE - 1) // TILE), size


@unit(PRODUCT)
def int4_product(kind: int, at: int, bias: int, rows: int, columns: int, x: int, count: int, out: int) -> None:
    """out [count, rows] = x [count, columns] W^T + b"""
    (codes, scales), groups = _rounded(x, columns, count), (columns + GROUP - 1) // GROUP
    items, size = _items(count, rows, groups)
    _int4_by_tile(items, at, bias, rows, groups, address(codes), address(scales), count, size, out)
    keep(codes, scales)


@unit(PRODUCT)
def int8_product(kind: int, at: int, bias: int, rows: int, columns: int, x: int, count: int, out: int) -> None:
    """The same, of a weight of 8 bits."""
    (codes, scales), groups = _rounded(x, columns, count), (columns + GROUP - 1) // GROUP
    items, size = _items(count, rows, groups)
    _int8_by_tile(items, at, bias, rows, groups, address(codes), address(scales), count, size, out)
    keep(codes, scales)


@unit(types.void(*[types.int64] * 7))
def look_up(kind: int, at: int, rows: int, columns: int, ids: int, count: int, out: int) -> None:
    """out [count, columns]: rows of a quantised weight in floats."""
    groups, four = (columns + GROUP - 1) // GROUP, kind == INT4
    size, scales_at = (INT4_BYTES, 16 * TILE) if four else (INT8_BYTES, 32 * TILE)
    for t in range(count):
        row = load_integer(ids + t * 8)
        lane = row % TILE
        for g in range(groups):
            group = at + (row // TILE * groups + g) * size
            scale, minimum = load_half(group + scales_at + lane * 2), np.float32(0)
            if four:
                minimum = load_half(group + scales_at + 2 * TILE + lane * 2)
            for i in range(min(GROUP, columns - g * GROUP)):
                quad = i // 4 % (4 if four else 8)
                code = load_byte(group + quad * 4 * TILE + lane * 4 + i % 4)
                if four:
                    code = (code >> (4 if i >= 16 else 0)) & 15
                store_float(out + (t * columns + g * GROUP + i) * 4, scale * np.float32(code) + minimum)
