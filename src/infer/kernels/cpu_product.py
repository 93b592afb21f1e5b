"""Products of a few or many rows with a weight, in float32 or quantised, on the CPU.

A quantised weight lies in tiles of four rows. A tile is a sequence of groups, each of 32 columns:

    4 bits: 64 bytes of codes, 4 float16 scales, 4 float16 minima: w = scale * code + minimum, codes 0..15
    8 bits: 128 bytes of codes, 4 float16 scales:                  w = scale * code, codes -127..127

Codes go by quads of columns: the four bytes of row 0, of row 1, 2 and 3, then the next quad; with 4 bits, a byte's low
half is of quad j and its high half of quad j + 4. So a vector of 16 bytes meets the same four bytes of x in every row,
the sums of the four rows lie side by side in one vector, and a whole tile is read front to back.

The rows of x are rounded too, in groups of 32, to 16 bits: a high byte and a low one, each multiplied with the codes as
whole numbers, which is exact. (With 8 bits, as others do it, a last digit's difference in x flips codes, and grows to
tenths of a logit.) What remains in floating point goes group by group in one order, so that a row comes out the same
alone or among others.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, prange

from infer.kernels.cpu_memory import FASTMATH, bytes_at, vector
from infer.kernels.cpu_simd import (
    absolute,
    add,
    add_ints,
    dot,
    fused,
    high_byte,
    high_nibbles,
    lane,
    larger,
    largest,
    load_bytes,
    load_floats,
    load_half,
    load_halves,
    load_splat,
    low_nibbles,
    multiply,
    no_floats,
    no_ints,
    rounded,
    splat,
    store_as_bytes,
    store_floats,
    times_256,
    to_floats,
    to_ints,
    total,
)

# kind: bits of a weight. at, bias: addresses, or 0.
WEIGHT = np.dtype([(name, np.int64) for name in ("kind", "at", "bias", "rows", "columns")])
INT4, INT8, FLOAT32 = 4, 8, 32
GROUP, TILE = 32, 4
INT4_BYTES, INT8_BYTES = 80, 136  # of a group of a tile
X_BYTES = 2 * GROUP  # of a group of x
STEPS = 127 * 256 + 127  # of x, from 0 to the largest: so many its codes can count


@njit(fastmath=FASTMATH)
def dot_floats(x: Any, y: Any) -> Any:
    result = np.float32(0)
    for i in range(x.shape[0]):
        result += x[i] * y[i]
    return result


@njit(parallel=True, fastmath=FASTMATH)
def _float_product(weight: Any, x: Any, out: Any) -> None:
    at, bias_at, rows, columns = weight.at, weight.bias, weight.rows, weight.columns
    for row in prange(rows):
        values = vector(at + row * columns * 4, columns)
        bias = np.float32(0) if bias_at == 0 else vector(bias_at, row + 1)[row]
        for t in range(x.shape[0]):
            out[t, row] = dot_floats(values, x[t]) + bias


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


@njit(forceinline=True)
def _dot_group(codes: Any, x_at: int) -> Any:
    """Codes of four rows with those of x: with its high bytes and with its low ones, neither waiting for the other."""
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


def _quantised_product(codes_of: Any, scales_at: int, group_bytes: int, has_minimum: bool) -> Any:
    """The product for one kind of weight."""

    @njit(forceinline=True)
    def add_group(so_far: Any, w: Any, scale: Any, minimum: Any, x_at: int, x_scale_at: int) -> Any:
        so_far = fused(_dot_group(w, x_at), multiply(scale, load_splat(x_scale_at)), so_far)
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


_int4_product = _quantised_product(_int4_codes, 64, INT4_BYTES, has_minimum=True)
_int8_product = _quantised_product(_int8_codes, 128, INT8_BYTES, has_minimum=False)


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
        _float_product(weight, x, out)
        return
    groups = (weight.columns + GROUP - 1) // GROUP
    codes = np.empty((x.shape[0], groups * X_BYTES), np.int8)
    scales = np.empty((x.shape[0], groups, 2), np.float32)
    _round_rows(x, codes, scales)
    if weight.kind == INT4:
        _int4_product(weight, codes, scales, out)
    else:
        _int8_product(weight, codes, scales, out)
