"""Products of a few or many rows with a weight, in floats or quantised, on the CPU.

An output depends on its row of x and its row of W alone, down to the last bit: not on the rows beside them, nor on
threads. A row of floats is multiplied in eight lanes along the columns, which are added up in one order
(`cpu_tile.py`); whether that happens for a single row, in a tile of several, or in pieces of the columns whose sums are
carried on changes nothing. (Eight: with four, one row of x would wait for its own sums rather than for memory.) So
nothing here may be compiled with `fastmath`, which reorders sums as it likes.

Up to three rows read each row of W front to back, at the speed of memory. More are packed into panels, whose tiles with
rows of W run at the speed of arithmetic. Weights of 16 bits are then widened once for all panels of a part.

A quantised weight lies in tiles of R rows, as many as a register has sums. A tile is a sequence of groups, each of 32
columns:

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
from numba import njit, prange

from infer.backend.cpu.memory import bytes_at, keep
from infer.backend.cpu.simd import (
    DOT_PRODUCT,
    VNNI,
    add,
    add_ints,
    as_factors,
    dot,
    dot_positive,
    fused,
    fused_one,
    high_byte,
    high_nibbles,
    larger_ints,
    largest_magnitude,
    load_bfloat,
    load_eight,
    load_eight_bfloats,
    load_eight_halves,
    load_float,
    load_for_tile,
    load_half,
    load_int_for_tile,
    load_tile_codes,
    load_tile_floats,
    load_tile_halves,
    low_nibbles,
    magnitudes,
    multiply,
    no_eight,
    no_eight_ints,
    no_tile_floats,
    no_tile_ints,
    prefetch,
    splat_eight,
    store_as_bytes,
    store_eight,
    store_float,
    store_int,
    store_tile_floats,
    sum_of_eight,
    times_256,
    to_eight_ints,
    to_tile_floats,
    total,
)
from infer.backend.cpu.tile import AHEAD, LANES, PANELS, W_ROWS, X_ROWS, multiply_tile
from infer.nn.quantized import GROUP, TILE

# kind: bits of a weight, or which 16 of them. at, bias: addresses, or 0.
WEIGHT = np.dtype([(name, np.int64) for name in ("kind", "at", "bias", "rows", "columns")])
INT4, INT8, BFLOAT16, FLOAT32, FLOAT16 = 4, 8, 16, 32, 116
NEAR, FAR = 32768, 262144  # bytes that stay in the first and in the second cache of most cores, with room to spare
MANY = 256  # rows of x that are worth packing W for
MOST = 512  # rows of x in a part of the work
PARTS, FEW_PARTS = 64, 256  # of the work: so many that all threads have as much, so few that each is worth handing out
INT4_BYTES, INT8_BYTES = 20 * TILE, 34 * TILE  # of a group of a tile
X_BYTES, SCALE_BYTES = 2 * GROUP, 12  # of a group of x: of its codes, and what goes with them
STEPS = 127 * 256 + 127  # of x, from 0 to the largest: so many its codes can count


def _dot_row(load: Any, load_one: Any, size: int) -> Any:
    """Of a row of x with one of W, whose weights have so many bytes; `load` takes eight as floats, `load_one` one."""

    @njit(forceinline=True)
    def dot_row(w: int, x: int, columns: int) -> Any:
        sums, whole = no_eight(), columns // 8 * 8
        many = whole // 32 * 32
        for i in range(0, many, 32):
            at, to = w + i * size, x + i * 4
            sums = fused(load(at), load_eight(to), sums)
            sums = fused(load(at + 8 * size), load_eight(to + 32), sums)
            sums = fused(load(at + 16 * size), load_eight(to + 64), sums)
            sums = fused(load(at + 24 * size), load_eight(to + 96), sums)
        for i in range(many, whole, 8):
            sums = fused(load(w + i * size), load_eight(x + i * 4), sums)
        result = sum_of_eight(sums)
        for i in range(whole, columns):
            result = fused_one(load_one(w + i * size), load_float(x + i * 4), result)
        return result

    return dot_row


_dot_float32 = _dot_row(load_eight, load_float, 4)
_dot_bfloat16 = _dot_row(load_eight_bfloats, load_bfloat, 2)
_dot_float16 = _dot_row(load_eight_halves, load_half, 2)


@njit(parallel=True)
def _row_by_row(weight: Any, x: Any, out: Any) -> None:
    """The product of few rows. Each row of W is read front to back, the way memory is fastest."""
    kind, at, bias_at, columns, x_at = weight.kind, weight.at, weight.bias, weight.columns, x.ctypes.data
    for row in prange(weight.rows):
        for t in range(x.shape[0]):
            other = x_at + t * columns * 4
            if kind == FLOAT32:
                result = _dot_float32(at + row * columns * 4, other, columns)
            elif kind == BFLOAT16:
                result = _dot_bfloat16(at + row * columns * 2, other, columns)
            else:
                result = _dot_float16(at + row * columns * 2, other, columns)
            out[t, row] = result if bias_at == 0 else result + load_float(bias_at + row * 4)


@njit
def panel_rows(rows: Any) -> Any:
    """How many of these rows of x the next panel has."""
    for size in PANELS:
        if size <= rows:
            return size
    return 0


@njit
def _pack_panels(x: Any, first: Any, last: Any, panels: Any) -> None:
    """Put rows of x into panels: eight columns of each row of a panel, then the next eight."""
    columns, steps, t = x.shape[1], x.shape[1] // LANES, first
    while t < last:
        size = panel_rows(last - t)
        for i in range(size):
            at, to = x.ctypes.data + (t + i) * columns * 4, panels.ctypes.data + (t * steps + i) * 32
            for step in range(steps):
                store_eight(to + step * size * 32, load_eight(at + step * 32))
        t += size


@njit
def _pack_weights(kind: Any, at: Any, width: Any, rows: Any, steps: Any, packed_at: Any) -> None:
    """Put rows of W, so many bytes wide, into tiles of float32: eight columns of each row of a tile, then the next."""
    for row in range((rows + W_ROWS - 1) // W_ROWS * W_ROWS):
        w = at + min(row, rows - 1) * width  # a last tile that lacks rows is filled up
        to = packed_at + (row // W_ROWS * W_ROWS * steps + row % W_ROWS) * 32
        if kind == FLOAT32:
            for step in range(steps):
                store_eight(to + step * W_ROWS * 32, load_eight(w + step * 32))
        elif kind == BFLOAT16:
            for step in range(steps):
                store_eight(to + step * W_ROWS * 32, load_eight_bfloats(w + step * 16))
        else:
            for step in range(steps):
                store_eight(to + step * W_ROWS * 32, load_eight_halves(w + step * 16))


@njit
def _load_weight(kind: int, at: int, index: int) -> Any:
    if kind == FLOAT32:
        return load_float(at + index * 4)
    return load_bfloat(at + index * 2) if kind == BFLOAT16 else load_half(at + index * 2)


@njit
def _multiply_part(
    kind: int, at: int, columns: int, first: int, last: int, panels_at: int, start: int, stop: int, depth: int, out: Any
) -> None:
    """Rows `first` to `last` of W with rows `start` to `stop` of x: `depth` eights of columns, then as many more."""
    steps, rows, tiles = columns // LANES, last - first, (last - first + W_ROWS - 1) // W_ROWS
    size, w_row = 4 if kind == FLOAT32 else 2, columns * 4
    w, w_tile = at + first * columns * size, W_ROWS * w_row
    packs = kind != FLOAT32 or stop - start >= MANY or tiles * W_ROWS != rows
    if depth >= steps and not packs:
        _multiply_tiles(w, w_row, 32, w_tile, steps, first, last, panels_at, start, stop, 0, depth, 0, out)
        return
    packed = np.empty(tiles * W_ROWS * depth * LANES if packs else 0, np.float32)
    carry = np.empty((stop - start) * tiles * W_ROWS * LANES if depth < steps else 0, np.float32)
    for step in range(0, steps, depth):
        now, piece, w_step = min(depth, steps - step), w + step * LANES * size, 32
        if packs:
            _pack_weights(kind, piece, columns * size, rows, now, packed.ctypes.data)
            piece, w_row, w_step, w_tile = packed.ctypes.data, 32, W_ROWS * 32, W_ROWS * now * 32
        carry_at = carry.ctypes.data
        _multiply_tiles(
            piece, w_row, w_step, w_tile, steps, first, last, panels_at, start, stop, step, depth, carry_at, out
        )
    keep(packed, carry)


@njit
def _multiply_tiles(
    w: int,
    w_row: int,
    w_step: int,
    w_tile: int,
    steps: int,
    first: int,
    last: int,
    panels_at: int,
    start: int,
    stop: int,
    step: int,
    depth: int,
    carry_at: int,
    out: Any,
) -> None:
    """A part's columns from `step` on. The strides of W as `multiply_tile` takes them, and that from tile to tile."""
    tiles, is_last, t = (last - first + W_ROWS - 1) // W_ROWS, step + depth >= steps, start
    while t < stop:
        panel = panel_rows(stop - t)
        x_at, out_at = panels_at + (t * steps + step * panel) * 32, out[t].ctypes.data
        for tile in range(tiles):
            row, w_at = first + tile * W_ROWS, w + tile * w_tile
            carried, now = carry_at + ((t - start) * tiles + tile * panel) * W_ROWS * 32, min(depth, steps - step)
            if row + W_ROWS <= last or not is_last:
                multiply_tile(
                    panel,
                    w_at,
                    w_row,
                    w_step,
                    x_at,
                    now,
                    carried,
                    int(step == 0),
                    int(is_last),
                    out_at + row * 4,
                    out.strides[0],
                )
            else:
                spare = np.empty((panel, W_ROWS), np.float32)
                to = spare.ctypes.data
                multiply_tile(panel, w_at, w_row, w_step, x_at, now, carried, int(step == 0), 1, to, W_ROWS * 4)
                for i in range(panel):
                    for j in range(last - row):
                        out[t + i, row + j] = spare[i, j]
        t += panel


@njit
def _finish_part(
    kind: int, at: int, bias_at: int, columns: int, first: int, last: int, x: Any, start: int, stop: int, out: Any
) -> None:
    """The columns beyond the last eight, one by one, then the bias."""
    whole, size = columns // LANES * LANES, 4 if kind == FLOAT32 else 2
    for t in range(start, stop):
        for row in range(first, last):
            result = out[t, row] if whole > 0 else np.float32(0)
            for i in range(whole, columns):
                result = fused_one(_load_weight(kind, at + row * columns * size, i), x[t, i], result)
            out[t, row] = result if bias_at == 0 else result + load_float(bias_at + row * 4)


@njit(parallel=True)
def _in_tiles(weight: Any, x: Any, out: Any) -> None:
    """The product of many rows: panels of x with tiles of W."""
    kind, at, bias_at, rows, columns = weight.kind, weight.at, weight.bias, weight.rows, weight.columns
    count, steps = x.shape[0], columns // LANES
    panels = np.empty(count * steps * LANES, np.float32)
    panels_at = panels.ctypes.data
    if count < 32:
        _pack_panels(x, 0, count, panels)
    else:
        for part in prange((count + 2 * X_ROWS - 1) // (2 * X_ROWS)):
            _pack_panels(x, part * 2 * X_ROWS, min((part + 1) * 2 * X_ROWS, count), panels)
    # What is used again stays in a core's caches: a piece of a panel for all tiles of a part of W, and the same columns
    # of that part for all panels.
    pieces = max(1, (X_ROWS * steps * 32 + NEAR - 1) // NEAR) if count > X_ROWS else 1
    depth = max(1, (steps + pieces - 1) // pieces)
    x_panels, x_parts, parts, room = (count + X_ROWS - 1) // X_ROWS, 1, FEW_PARTS, NEAR
    if count * steps * 32 > FAR:
        parts, room = PARTS, FAR
        while x_parts * MOST < count or (rows * x_parts < 32 * PARTS and x_parts < x_panels):
            x_parts *= 2
    w_rows = min(room // (depth * 32), (rows * x_parts + parts - 1) // parts)
    w_rows = max(1, (w_rows + W_ROWS - 1) // W_ROWS) * W_ROWS
    for part in prange((rows + w_rows - 1) // w_rows * x_parts):
        first, x_part = part // x_parts * w_rows, part % x_parts
        last, start = min(first + w_rows, rows), x_part * x_panels // x_parts * X_ROWS
        stop = min((x_part + 1) * x_panels // x_parts * X_ROWS, count)
        if steps > 0:
            _multiply_part(kind, at, columns, first, last, panels_at, start, stop, depth, out)
        if bias_at != 0 or columns % LANES != 0:
            _finish_part(kind, at, bias_at, columns, first, last, x, start, stop, out)
    keep(panels, panels)


@njit
def _round_rows(x: Any, codes: Any, scales: Any) -> None:
    if x.shape[0] >= 16:
        _round_many(x, codes, scales)
        return
    for t in range(x.shape[0]):  # sooner done than handed out
        _round_row(x[t], codes[t], scales[t])


@njit(parallel=True)
def _round_many(x: Any, codes: Any, scales: Any) -> None:
    for t in prange(x.shape[0]):
        _round_row(x[t], codes[t], scales[t])


@njit
def _round_row(x: Any, codes: Any, scales: Any) -> None:
    """Each group's codes, its scale, the sum of what its codes stand for, and -128 times that of the codes themselves.

    The last group is filled up with 0.
    """
    at, codes_at, scales_at, whole = x.ctypes.data, codes.ctypes.data, scales.ctypes.data, x.shape[0] // GROUP
    for g in range(whole):
        _round_group(at + g * GROUP * 4, codes_at + g * X_BYTES, scales_at + g * SCALE_BYTES)
    if whole < scales.shape[0]:
        rest = np.empty(GROUP, np.float32)
        for i in range(GROUP):
            rest[i] = x[whole * GROUP + i] if whole * GROUP + i < x.shape[0] else 0
        _round_group(rest.ctypes.data, codes_at + whole * X_BYTES, scales_at + whole * SCALE_BYTES)
        keep(rest, rest)


@njit(forceinline=True)
def _round_group(at: int, codes_at: int, scales_at: int) -> None:
    """First the high bytes of all codes, rounded, then what is left of them in low ones."""
    peak = magnitudes(load_eight(at))
    for i in range(32, GROUP * 4, 32):
        peak = larger_ints(peak, magnitudes(load_eight(at + i)))
    step = largest_magnitude(peak) / np.float32(STEPS)
    inverse = splat_eight(np.float32(1) / step if step > 0 else step)
    sums = no_eight_ints()
    for i in range(0, GROUP, 8):
        code = to_eight_ints(multiply(load_eight(at + 4 * i), inverse))
        sums = add_ints(sums, code)
        store_as_bytes(codes_at + i, high_byte(code))
        store_as_bytes(codes_at + GROUP + i, code)
    sum_of_codes = total(sums)
    store_float(scales_at, step)
    store_float(scales_at + 4, np.float32(sum_of_codes) * step)
    store_int(scales_at + 8, np.int32(-128 * sum_of_codes))


@njit(forceinline=True)
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


@njit(forceinline=True)
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


def _quantised_product(codes_of: Any, dot: Any, scales_at: int, group_bytes: int, has_minimum: bool) -> Any:
    """The product for one kind of weight."""
    raised = not has_minimum and DOT_PRODUCT == VNNI

    @njit(forceinline=True)
    def dot_group(codes: Any, x: int, x_scale_at: int) -> Any:
        """Codes of a tile with the high bytes of x, and with its low ones, neither waiting for the other."""
        high, low, below = no_tile_ints(), load_int_for_tile(x_scale_at + 8) if raised else no_tile_ints(), x + GROUP
        high, low = dot(high, codes[0], x, 0), dot(low, codes[0], below, 0)
        high, low = dot(high, codes[1], x, 1), dot(low, codes[1], below, 1)
        high, low = dot(high, codes[2], x, 2), dot(low, codes[2], below, 2)
        high, low = dot(high, codes[3], x, 3), dot(low, codes[3], below, 3)
        high, low = dot(high, codes[4], x, 4), dot(low, codes[4], below, 4)
        high, low = dot(high, codes[5], x, 5), dot(low, codes[5], below, 5)
        high, low = dot(high, codes[6], x, 6), dot(low, codes[6], below, 6)
        high, low = dot(high, codes[7], x, 7), dot(low, codes[7], below, 7)
        return to_tile_floats(add_ints(times_256(high), low))

    @njit(forceinline=True)
    def add_group(so_far: Any, w: Any, scale: Any, minimum: Any, x_at: int, x_scale_at: int) -> Any:
        so_far = fused(dot_group(w, x_at, x_scale_at), multiply(scale, load_for_tile(x_scale_at)), so_far)
        return fused(minimum, load_for_tile(x_scale_at + 4), so_far) if has_minimum else so_far

    @njit(forceinline=True)
    def take(at: int) -> Any:
        if AHEAD > 0:
            for line in range(0, group_bytes, 64):
                prefetch(at + AHEAD + line)
        scale = load_tile_halves(at + scales_at)
        return codes_of(at), scale, load_tile_halves(at + scales_at + 2 * TILE) if has_minimum else scale

    @njit(parallel=True)
    def quantised_product(weight: Any, codes: Any, scales: Any, out: Any) -> None:
        at, bias_at, rows, count, groups = weight.at, weight.bias, weight.rows, scales.shape[0], scales.shape[1]
        # Addresses: what threads have of an array is counted in one place, for which they would wait.
        codes_at, scales_at, out_at = codes.ctypes.data, scales.ctypes.data, out.ctypes.data
        x_row, s_row, out_row = groups * X_BYTES, groups * SCALE_BYTES, out.strides[0]
        # So many rows of x that they stay in a core's second cache, for all tiles of W one after the other.
        size, tiles = max(4, FAR // (x_row + s_row) // 4 * 4), (rows + TILE - 1) // TILE
        for item in prange((count + size - 1) // size * tiles):
            tile, first = item % tiles, item // tiles * size
            last = min(first + size, count)
            together = last - (last - first) % 4
            start, to = at + tile * groups * group_bytes, out_at + tile * TILE * 4
            bias, missing = bias_at + tile * TILE * 4 if bias_at != 0 else 0, (tile + 1) * TILE - rows
            for t in range(first, together, 4):  # four rows of x at once: the codes of W are taken apart once for all
                x, s = codes_at + t * x_row, scales_at + t * s_row
                a, b, c, d = no_tile_floats(), no_tile_floats(), no_tile_floats(), no_tile_floats()
                for g in range(groups):
                    w, scale, minimum = take(start + g * group_bytes)
                    x_at, s_at = x + g * X_BYTES, s + g * SCALE_BYTES
                    a = add_group(a, w, scale, minimum, x_at, s_at)
                    b = add_group(b, w, scale, minimum, x_at + x_row, s_at + s_row)
                    c = add_group(c, w, scale, minimum, x_at + 2 * x_row, s_at + 2 * s_row)
                    d = add_group(d, w, scale, minimum, x_at + 3 * x_row, s_at + 3 * s_row)
                _put(a, bias, to + t * out_row, missing)
                _put(b, bias, to + (t + 1) * out_row, missing)
                _put(c, bias, to + (t + 2) * out_row, missing)
                _put(d, bias, to + (t + 3) * out_row, missing)
            for t in range(together, last):
                x, s = codes_at + t * x_row, scales_at + t * s_row
                a = no_tile_floats()
                for g in range(groups):
                    w, scale, minimum = take(start + g * group_bytes)
                    a = add_group(a, w, scale, minimum, x + g * X_BYTES, s + g * SCALE_BYTES)
                _put(a, bias, to + t * out_row, missing)

    return quantised_product


@njit(forceinline=True)
def _put(sums: Any, bias: int, to: int, missing: int) -> None:
    """A tile's outputs of a row; the last tile of a weight may have fewer. bias: where it lies, or 0."""
    if missing <= 0:
        store_tile_floats(to, sums if bias == 0 else add(sums, load_tile_floats(bias)))
    else:
        _put_some(sums, bias, to, TILE - missing)


@njit
def _put_some(sums: Any, bias: int, to: int, count: int) -> None:
    spare = np.empty(TILE, np.float32)
    store_tile_floats(spare.ctypes.data, sums)
    for i in range(count):
        store_float(to + i * 4, spare[i] if bias == 0 else spare[i] + load_float(bias + i * 4))


_int4_product = _quantised_product(_int4_codes, dot_positive, 16 * TILE, INT4_BYTES, has_minimum=True)
_int8_product = _quantised_product(_int8_codes, dot, 32 * TILE, INT8_BYTES, has_minimum=False)


@njit
def unpack(weight: Any, row: int, out: Any) -> None:
    """out [columns]: a row of a quantised weight in floats."""
    groups, lane = (weight.columns + GROUP - 1) // GROUP, row % TILE
    four = weight.kind == INT4
    size, scales_at = (INT4_BYTES, 16 * TILE) if four else (INT8_BYTES, 32 * TILE)
    for g in range(groups):
        at = weight.at + (row // TILE * groups + g) * size
        scale, minimum = load_half(at + scales_at + lane * 2), np.float32(0)
        if four:
            minimum = load_half(at + scales_at + 2 * TILE + lane * 2)
        for i in range(min(GROUP, weight.columns - g * GROUP)):
            quad = i // 4 % (4 if four else 8)
            code = bytes_at(at + quad * 4 * TILE + lane * 4 + i % 4, 1)[0]
            if four:
                code = (code >> (4 if i >= 16 else 0)) & 15
            out[g * GROUP + i] = scale * np.float32(code) + minimum


@njit
def product(weight: Any, x: Any, out: Any) -> None:
    """out [T, rows] = x [T, columns] W^T + b"""
    if weight.kind in (FLOAT32, BFLOAT16, FLOAT16):
        if x.shape[0] < 4:
            _row_by_row(weight, x, out)
        else:
            _in_tiles(weight, x, out)
        return
    groups = (weight.columns + GROUP - 1) // GROUP
    codes = np.empty((x.shape[0], groups * X_BYTES), np.int8)
    scales = np.empty((x.shape[0], groups, 3), np.float32)
    _round_rows(x, codes, scales)
    if weight.kind == INT4:
        _int4_product(weight, codes, scales, out)
    else:
        _int8_product(weight, codes, scales, out)
