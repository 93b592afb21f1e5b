"""Products of a few or many rows with a weight, in floats or quantised, on the CPU.

An output depends on its row of x and its row of W alone, down to the last bit: not on the rows beside them, nor on
threads. A row of floats is multiplied in eight lanes along the columns, which are added up in one order
(`cpu_tile.py`); whether that happens for a single row, in a tile of several, or in pieces of the columns whose sums are
carried on changes nothing. (Eight: with four, one row of x would wait for its own sums rather than for memory.) So
nothing here may be compiled with `fastmath`, which reorders sums as it likes.

Up to three rows read each row of W front to back, at the speed of memory. More are packed into panels, whose tiles with
rows of W run at the speed of arithmetic. Weights of 16 bits are then widened once for all panels of a part.

A quantised weight lies in tiles of four rows. A tile is a sequence of groups, each of 32 columns:

    4 bits: 64 bytes of codes, 4 float16 scales, 4 float16 minima: w = scale * code + minimum, codes 0..15
    8 bits: 128 bytes of codes, 4 float16 scales:                  w = scale * code, codes -127..127

Codes go by quads of columns: the four bytes of row 0, of row 1, 2 and 3, then the next quad; with 4 bits, a byte's low
half is of quad j and its high half of quad j + 4. So a vector of 16 bytes meets the same four bytes of x in every row,
the sums of the four rows lie side by side in one vector, and a whole tile is read front to back.

The rows of x are rounded too, in groups of 32, to 16 bits: a high byte and a low one, each multiplied with the codes as
whole numbers, which is exact. (With 8 bits, as others do it, a last digit's difference in x flips codes, and grows to
tenths of a logit.) What remains in floating point goes group by group in one order.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, prange

from infer.backend.cpu.memory import bytes_at, vector
from infer.backend.cpu.simd import (
    absolute,
    add,
    add_ints,
    dot,
    dot_positive,
    fused,
    fused_eight,
    fused_one,
    high_byte,
    high_nibbles,
    lane,
    larger,
    largest,
    load_bfloat,
    load_bytes,
    load_eight,
    load_eight_bfloats,
    load_eight_halves,
    load_float,
    load_floats,
    load_half,
    load_halves,
    load_splat,
    low_nibbles,
    multiply,
    no_eight,
    no_floats,
    no_ints,
    rounded,
    splat,
    store_as_bytes,
    store_eight,
    store_floats,
    sum_of_eight,
    times_256,
    to_floats,
    to_ints,
    total,
)
from infer.backend.cpu.tile import LANES, PANELS, W_ROWS, X_ROWS, multiply_tile

# kind: bits of a weight, or which 16 of them. at, bias: addresses, or 0.
WEIGHT = np.dtype([(name, np.int64) for name in ("kind", "at", "bias", "rows", "columns")])
INT4, INT8, BFLOAT16, FLOAT32, FLOAT16 = 4, 8, 16, 32, 116
NEAR, FAR = 32768, 262144  # bytes that stay in the first and in the second cache of most cores, with room to spare
MANY = 256  # rows of x that are worth packing W for
MOST = 512  # rows of x in a part of the work
PARTS, FEW_PARTS = 64, 256  # of the work: so many that all threads have as much, so few that each is worth handing out
GROUP, TILE = 32, 4
INT4_BYTES, INT8_BYTES = 80, 136  # of a group of a tile
X_BYTES = 2 * GROUP  # of a group of x
STEPS = 127 * 256 + 127  # of x, from 0 to the largest: so many its codes can count


def _dot_row(load: Any, load_one: Any, size: int) -> Any:
    """Of a row of x with one of W, whose weights have so many bytes; `load` takes eight as floats, `load_one` one."""

    @njit(forceinline=True)
    def dot_row(w: int, x: int, columns: int) -> Any:
        sums, whole = no_eight(), columns // 8 * 8
        many = whole // 32 * 32
        for i in range(0, many, 32):
            at, to = w + i * size, x + i * 4
            sums = fused_eight(load(at), load_eight(to), sums)
            sums = fused_eight(load(at + 8 * size), load_eight(to + 32), sums)
            sums = fused_eight(load(at + 16 * size), load_eight(to + 64), sums)
            sums = fused_eight(load(at + 24 * size), load_eight(to + 96), sums)
        for i in range(many, whole, 8):
            sums = fused_eight(load(w + i * size), load_eight(x + i * 4), sums)
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
    _keep(packed, carry)


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
def _keep(packed: Any, carry: Any) -> None:
    """Numba frees an array behind its last use, and an address is none."""


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
    _keep(panels, panels)


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
    """Each group's codes, its scale, and the sum of what its codes stand for; the last group is filled up with 0."""
    at, codes_at, whole = x.ctypes.data, codes.ctypes.data, x.shape[0] // GROUP
    for g in range(whole):
        scales[g, 0], scales[g, 1] = _round_group(at + g * GROUP * 4, codes_at + g * X_BYTES)
    if whole < scales.shape[0]:
        rest = np.empty(GROUP, np.float32)
        for i in range(GROUP):
            rest[i] = x[whole * GROUP + i] if whole * GROUP + i < x.shape[0] else 0
        scales[whole, 0], scales[whole, 1] = _round_group(rest.ctypes.data, codes_at + whole * X_BYTES)
        scales[whole, 1] += (
            rest[GROUP - 1] * 0
        )  # or numba may free it before the line above: an address is no use to it


@njit(forceinline=True)
def _round_group(at: int, codes_at: int) -> Any:
    """First the high bytes of all codes, rounded, then what is left of them in low ones."""
    peak = absolute(load_floats(at))
    for i in range(16, GROUP * 4, 16):
        peak = larger(peak, absolute(load_floats(at + i)))
    step = largest(peak) / np.float32(STEPS)
    inverse = splat(np.float32(1) / step if step > 0 else step)
    sums = no_ints()
    for i in range(0, GROUP, 4):
        code = to_ints(rounded(multiply(load_floats(at + 4 * i), inverse)))
        sums = add_ints(sums, code)
        store_as_bytes(codes_at + i, high_byte(code))
        store_as_bytes(codes_at + GROUP + i, code)
    return step, np.float32(total(sums)) * step


@njit(forceinline=True)
def _int4_codes(at: int) -> Any:
    """A group of a tile: the codes of its eight quads."""
    a, b, c, d = load_bytes(at), load_bytes(at + 16), load_bytes(at + 32), load_bytes(at + 48)
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
        load_bytes(at),
        load_bytes(at + 16),
        load_bytes(at + 32),
        load_bytes(at + 48),
        load_bytes(at + 64),
        load_bytes(at + 80),
        load_bytes(at + 96),
        load_bytes(at + 112),
    )


def _quantised_product(codes_of: Any, dot: Any, scales_at: int, group_bytes: int, has_minimum: bool) -> Any:
    """The product for one kind of weight."""

    @njit(forceinline=True)
    def dot_group(codes: Any, x_at: int) -> Any:
        """Codes of four rows with the high bytes of x, and with its low ones, neither waiting for the other."""
        first, second = load_bytes(x_at), load_bytes(x_at + 16)
        third, fourth = load_bytes(x_at + 32), load_bytes(x_at + 48)
        high, low = dot(no_ints(), codes[0], first, 0), dot(no_ints(), codes[0], third, 0)
        high, low = dot(high, codes[1], first, 1), dot(low, codes[1], third, 1)
        high, low = dot(high, codes[2], first, 2), dot(low, codes[2], third, 2)
        high, low = dot(high, codes[3], first, 3), dot(low, codes[3], third, 3)
        high, low = dot(high, codes[4], second, 0), dot(low, codes[4], fourth, 0)
        high, low = dot(high, codes[5], second, 1), dot(low, codes[5], fourth, 1)
        high, low = dot(high, codes[6], second, 2), dot(low, codes[6], fourth, 2)
        high, low = dot(high, codes[7], second, 3), dot(low, codes[7], fourth, 3)
        return to_floats(add_ints(times_256(high), low))

    @njit(forceinline=True)
    def add_group(so_far: Any, w: Any, scale: Any, minimum: Any, x_at: int, x_scale_at: int) -> Any:
        so_far = fused(dot_group(w, x_at), multiply(scale, load_splat(x_scale_at)), so_far)
        return fused(minimum, load_splat(x_scale_at + 4), so_far) if has_minimum else so_far

    @njit(forceinline=True)
    def take(at: int) -> Any:
        scale = load_halves(at + scales_at)
        return codes_of(at), scale, load_halves(at + scales_at + 8) if has_minimum else scale

    @njit(parallel=True)
    def quantised_product(weight: Any, codes: Any, scales: Any, out: Any) -> None:
        at, bias_at, rows, groups = weight.at, weight.bias, weight.rows, scales.shape[1]
        for tile in prange((rows + TILE - 1) // TILE):
            start = at + tile * groups * group_bytes
            t, together = 0, codes.shape[0] // 4 * 4
            while t < together:  # four rows of x at once: the codes of W are taken apart once for all
                x, s, x_row, s_row = codes[t].ctypes.data, scales[t].ctypes.data, groups * X_BYTES, groups * 8
                a, b, c, d = no_floats(), no_floats(), no_floats(), no_floats()
                for g in range(groups):
                    w, scale, minimum = take(start + g * group_bytes)
                    x_at, s_at = x + g * X_BYTES, s + g * 8
                    a = add_group(a, w, scale, minimum, x_at, s_at)
                    b = add_group(b, w, scale, minimum, x_at + x_row, s_at + s_row)
                    c = add_group(c, w, scale, minimum, x_at + 2 * x_row, s_at + 2 * s_row)
                    d = add_group(d, w, scale, minimum, x_at + 3 * x_row, s_at + 3 * s_row)
                _put(a, bias_at, out, t, tile)
                _put(b, bias_at, out, t + 1, tile)
                _put(c, bias_at, out, t + 2, tile)
                _put(d, bias_at, out, t + 3, tile)
                t += 4
            while t < codes.shape[0]:
                x, s = codes[t].ctypes.data, scales[t].ctypes.data
                a = no_floats()
                for g in range(groups):
                    w, scale, minimum = take(start + g * group_bytes)
                    a = add_group(a, w, scale, minimum, x + g * X_BYTES, s + g * 8)
                _put(a, bias_at, out, t, tile)
                t += 1

    return quantised_product


@njit(forceinline=True)
def _put(sums: Any, bias_at: int, out: Any, t: int, tile: int) -> None:
    """Four outputs of row t; the last tile of a weight may have fewer."""
    first = tile * TILE
    if first + TILE <= out.shape[1]:
        if bias_at != 0:
            sums = add(sums, load_floats(bias_at + first * 4))
        store_floats(out[t].ctypes.data + first * 4, sums)
        return
    values = (lane(sums, 0), lane(sums, 1), lane(sums, 2), lane(sums, 3))
    for i in range(out.shape[1] - first):
        out[t, first + i] = values[i]
        if bias_at != 0:
            out[t, first + i] += vector(bias_at, first + i + 1)[first + i]


_int4_product = _quantised_product(_int4_codes, dot_positive, 64, INT4_BYTES, has_minimum=True)
_int8_product = _quantised_product(_int8_codes, dot, 128, INT8_BYTES, has_minimum=False)


@njit
def unpack(weight: Any, row: int, out: Any) -> None:
    """out [columns]: a row of a quantised weight in floats."""
    groups, lane = (weight.columns + GROUP - 1) // GROUP, row % TILE
    four = weight.kind == INT4
    size, scales_at = (INT4_BYTES, 64) if four else (INT8_BYTES, 128)
    for g in range(groups):
        at = weight.at + (row // TILE * groups + g) * size
        scale, minimum = load_half(at + scales_at + lane * 2), np.float32(0)
        if four:
            minimum = load_half(at + scales_at + 8 + lane * 2)
        for i in range(min(GROUP, weight.columns - g * GROUP)):
            quad = i // 4 % (4 if four else 8)
            code = bytes_at(at + quad * 16 + lane * 4 + i % 4, 1)[0]
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
    scales = np.empty((x.shape[0], groups, 2), np.float32)
    _round_rows(x, codes, scales)
    if weight.kind == INT4:
        _int4_product(weight, codes, scales, out)
    else:
        _int8_product(weight, codes, scales, out)
