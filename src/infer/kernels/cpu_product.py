"""Products of a few or many rows with a weight, in floats or quantised, on the CPU.

An output depends on its row of x and its row of W alone, down to the last bit: not on the rows beside them, nor on
threads. A row of floats is multiplied in eight lanes along the columns, which are added up in one order; whether that
happens in a tile of several rows or for a single one changes nothing. (Eight: with four, one row of x would wait for
its own sums rather than for memory.) So nothing here may be compiled with `fastmath`, which reorders sums as it likes.

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

from infer.kernels.cpu_memory import bytes_at, vector
from infer.kernels.cpu_simd import (
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
    store_floats,
    sum_of_eight,
    times_256,
    to_floats,
    to_ints,
    total,
)

# kind: bits of a weight, or which 16 of them. at, bias: addresses, or 0.
WEIGHT = np.dtype([(name, np.int64) for name in ("kind", "at", "bias", "rows", "columns")])
INT4, INT8, BFLOAT16, FLOAT32, FLOAT16 = 4, 8, 16, 32, 116
NEAR = 32768  # bytes of x: half of what the smallest cache of most cores holds
GROUP, TILE = 32, 4
INT4_BYTES, INT8_BYTES = 80, 136  # of a group of a tile
X_BYTES = 2 * GROUP  # of a group of x
STEPS = 127 * 256 + 127  # of x, from 0 to the largest: so many its codes can count


def _float_product(load: Any, load_one: Any, size: int) -> Any:
    """The product for weights of so many bytes, of which `load` takes eight as floats and `load_one` one."""

    @njit(forceinline=True)
    def one_by_one(w: int, x: int, whole: int) -> Any:
        """The eight sums of a row of W with a row of x."""
        sums = no_eight()
        many = whole // 32 * 32
        for i in range(0, many, 32):
            at, to = w + i * size, x + i * 4
            sums = fused_eight(load(at), load_eight(to), sums)
            sums = fused_eight(load(at + 8 * size), load_eight(to + 32), sums)
            sums = fused_eight(load(at + 16 * size), load_eight(to + 64), sums)
            sums = fused_eight(load(at + 24 * size), load_eight(to + 96), sums)
        for i in range(many, whole, 8):
            sums = fused_eight(load(w + i * size), load_eight(x + i * 4), sums)
        return sums

    @njit(forceinline=True)
    def two_by_four(w: int, w_row: int, x: int, x_row: int, whole: int) -> Any:
        """The same of two rows of W with four of x: as much as the registers hold."""
        a0, b0, c0, d0 = no_eight(), no_eight(), no_eight(), no_eight()
        a1, b1, c1, d1 = no_eight(), no_eight(), no_eight(), no_eight()
        for i in range(0, whole, 8):
            w0, w1, at = load(w + i * size), load(w + i * size + w_row), x + i * 4
            u = load_eight(at)
            a0, a1 = fused_eight(w0, u, a0), fused_eight(w1, u, a1)
            u = load_eight(at + x_row)
            b0, b1 = fused_eight(w0, u, b0), fused_eight(w1, u, b1)
            u = load_eight(at + 2 * x_row)
            c0, c1 = fused_eight(w0, u, c0), fused_eight(w1, u, c1)
            u = load_eight(at + 3 * x_row)
            d0, d1 = fused_eight(w0, u, d0), fused_eight(w1, u, d1)
        return (a0, b0, c0, d0), (a1, b1, c1, d1)

    @njit(forceinline=True)
    def finish(sums: Any, w: int, x: int, whole: int, columns: int, bias_at: int) -> Any:
        """The columns beyond the last eight one by one, then the bias."""
        result = sum_of_eight(sums)
        for i in range(whole, columns):
            result = fused_one(load_one(w + i * size), load_float(x + i * 4), result)
        return result if bias_at == 0 else result + load_float(bias_at)

    @njit(parallel=True)
    def float_product(weight: Any, x: Any, out: Any) -> None:
        at, bias_at, rows, columns, x_at = weight.at, weight.bias, weight.rows, weight.columns, x.ctypes.data
        w_row, x_row, whole, bias_size = columns * size, columns * 4, columns // 8 * 8, 4 if weight.bias != 0 else 0
        if x.shape[0] < 4:  # no tile to fill: the shortest way, since a row of W is soon read
            for row in prange(rows):
                w, bias = at + row * w_row, bias_at + row * bias_size
                for t in range(x.shape[0]):
                    other = x_at + t * x_row
                    out[t, row] = finish(one_by_one(w, other, whole), w, other, whole, columns, bias)
            return
        near = max(4, NEAR // x_row // 4 * 4)  # rows of x that stay close while rows of W go by
        part = 32 if x.shape[0] > near else 2  # rows of W that a thread takes: these too are used again, then
        for first in prange((rows + part - 1) // part):
            for start in range(0, x.shape[0], near):
                stop = min(start + near, x.shape[0])
                for row in range(first * part, min(first * part + part, rows), 2):
                    pair = min(2, rows - row)
                    w, bias, t = at + row * w_row, bias_at + row * bias_size, start
                    while t + 4 <= stop:
                        four = x_at + t * x_row
                        tile = two_by_four(w, w_row if pair == 2 else 0, four, x_row, whole)
                        for j in range(pair):
                            for i in range(4):
                                one, other = w + j * w_row, four + i * x_row
                                out[t + i, row + j] = finish(
                                    tile[j][i], one, other, whole, columns, bias + j * bias_size
                                )
                        t += 4
                    for j in range(pair):
                        for i in range(t, stop):
                            one, other = w + j * w_row, x_at + i * x_row
                            sums = one_by_one(one, other, whole)
                            out[i, row + j] = finish(sums, one, other, whole, columns, bias + j * bias_size)

    return float_product


_float32_product = _float_product(load_eight, load_float, 4)
_bfloat16_product = _float_product(load_eight_bfloats, load_bfloat, 2)
_float16_product = _float_product(load_eight_halves, load_half, 2)


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
    if weight.kind == FLOAT32:
        _float32_product(weight, x, out)
        return
    if weight.kind == BFLOAT16:
        _bfloat16_product(weight, x, out)
        return
    if weight.kind == FLOAT16:
        _float16_product(weight, x, out)
        return
    groups = (weight.columns + GROUP - 1) // GROUP
    codes = np.empty((x.shape[0], groups * X_BYTES), np.int8)
    scales = np.empty((x.shape[0], groups, 2), np.float32)
    _round_rows(x, codes, scales)
    if weight.kind == INT4:
        _int4_product(weight, codes, scales, out)
    else:
        _int8_product(weight, codes, scales, out)
