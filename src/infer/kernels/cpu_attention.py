"""Keys and values in a cache, and attention over them, on the CPU.

Each query is attended from by itself, and goes through its keys in the order of their positions: what comes out depends
on the query and on those keys, and neither on the queries beside it nor on where in a ring a key lies. As everywhere in
these kernels, sums have one order, and nothing is compiled with `fastmath`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, prange

from infer.kernels.cpu_memory import bytes_at, vector
from infer.kernels.cpu_product import GROUP
from infer.kernels.cpu_simd import (
    add,
    exponential,
    fused,
    fused_one,
    lane,
    load_codes,
    load_float,
    load_floats,
    load_half,
    no_floats,
    raise_half,
    splat,
    store_as_half,
    store_floats,
    summed,
)
from infer.kernels.table import BITS, SLOTS, STRIDE, K, V


@njit(forceinline=True)
def _row_bytes(head_dim: int, bits: int) -> int:
    """Of a key or value: behind 8-bit ones stand their scales, as `infer.cache.int8` has them."""
    return head_dim * 4 if bits == 32 else head_dim + 2 * ((head_dim + GROUP - 1) // GROUP)


@njit
def _score(q: Any, k_at: int, bits: int, scale: Any, out: Any) -> Any:
    """out [keys] = scale q k; returns the highest."""
    size, row, keys, q_at = q.shape[0], _row_bytes(q.shape[0], bits), out.shape[0], q.ctypes.data
    if bits == 32:
        whole = keys // 4 * 4
        for j in range(0, whole, 4):
            out[j], out[j + 1], out[j + 2], out[j + 3] = _dot_four(q_at, k_at + j * row, size, row)
        for j in range(whole, keys):
            out[j] = _dot_four(q_at, k_at + j * row, size, 0)[0]
    else:
        for j in range(keys):
            out[j] = _dot_codes(q_at, k_at + j * row, size)
    highest = np.float32(-np.inf)
    for j in range(keys):
        out[j] *= scale
        highest = max(highest, out[j])
    return highest


@njit(forceinline=True)
def _dot_four(q_at: int, k_at: int, size: int, stride: int) -> Any:
    """Of q with four keys, so many bytes apart: a load of q serves them all."""
    a, b, c, d = no_floats(), no_floats(), no_floats(), no_floats()
    whole = size // 4 * 4
    for i in range(0, whole, 4):
        q, at = load_floats(q_at + i * 4), k_at + i * 4
        a = fused(load_floats(at), q, a)
        b = fused(load_floats(at + stride), q, b)
        c = fused(load_floats(at + 2 * stride), q, c)
        d = fused(load_floats(at + 3 * stride), q, d)
    e, f, g, h = summed(a), summed(b), summed(c), summed(d)
    for i in range(whole, size):
        x, at = load_float(q_at + i * 4), k_at + i * 4
        e = fused_one(load_float(at), x, e)
        f = fused_one(load_float(at + stride), x, f)
        g = fused_one(load_float(at + 2 * stride), x, g)
        h = fused_one(load_float(at + 3 * stride), x, h)
    return e, f, g, h


@njit(forceinline=True)
def _dot_codes(q_at: int, at: int, size: int) -> Any:
    """Of q with a key in 8 bits, group by group."""
    result = np.float32(0)
    for first in range(0, size, GROUP):
        last = min(first + GROUP, size)
        whole, sums = first + (last - first) // 4 * 4, no_floats()
        for i in range(first, whole, 4):
            sums = fused(load_codes(at + i), load_floats(q_at + i * 4), sums)
        in_group = summed(sums)
        for i in range(whole, last):
            in_group = fused_one(np.float32(bytes_at(at + i, 1)[0]), load_float(q_at + i * 4), in_group)
        result = fused_one(in_group, load_half(at + size + first // GROUP * 2), result)
    return result


@njit
def _mix(weights: Any, v_at: int, bits: int, out: Any) -> None:
    """out [D] += the weighted sum of values, one after the other."""
    size, row, out_at, together = out.shape[0], _row_bytes(out.shape[0], bits), out.ctypes.data, 0
    if bits == 32:
        together = weights.shape[0] // 4 * 4
        for j in range(0, together, 4):
            _add_four(weights[j : j + 4], v_at + j * row, size, out_at)
    for j in range(together, weights.shape[0]):
        if bits == 32:
            _add_value(weights[j], v_at + j * row, size, out_at)
        else:
            _add_codes(weights[j], v_at + j * row, size, out_at)


@njit(forceinline=True)
def _add_four(weights: Any, v_at: int, size: int, out_at: int) -> None:
    """out += four values, weighted: read and written once for them all, and in the order of one after the other."""
    a, b, c, d = splat(weights[0]), splat(weights[1]), splat(weights[2]), splat(weights[3])
    row, whole, out = size * 4, size // 4 * 4, vector(out_at, size)
    for i in range(0, whole, 4):
        at = v_at + i * 4
        x = fused(load_floats(at), a, load_floats(out_at + i * 4))
        x = fused(load_floats(at + row), b, x)
        x = fused(load_floats(at + 2 * row), c, x)
        store_floats(out_at + i * 4, fused(load_floats(at + 3 * row), d, x))
    for i in range(whole, size):
        for j in range(4):
            out[i] = fused_one(load_float(v_at + j * row + i * 4), weights[j], out[i])


@njit(forceinline=True)
def _add_value(weight: Any, v_at: int, size: int, out_at: int) -> None:
    whole, out = size // 4 * 4, vector(out_at, size)
    for i in range(0, whole, 4):
        store_floats(out_at + i * 4, fused(load_floats(v_at + i * 4), splat(weight), load_floats(out_at + i * 4)))
    for i in range(whole, size):
        out[i] = fused_one(load_float(v_at + i * 4), weight, out[i])


@njit(forceinline=True)
def _add_codes(weight: Any, v_at: int, size: int, out_at: int) -> None:
    """Of a value in 8 bits, group by group."""
    out = vector(out_at, size)
    for first in range(0, size, GROUP):
        last = min(first + GROUP, size)
        whole, by = first + (last - first) // 4 * 4, weight * load_half(v_at + size + first // GROUP * 2)
        for i in range(first, whole, 4):
            store_floats(out_at + i * 4, fused(load_codes(v_at + i), splat(by), load_floats(out_at + i * 4)))
        for i in range(whole, last):
            out[i] = fused_one(np.float32(bytes_at(v_at + i, 1)[0]), by, out[i])


@njit
def exponentials(x: Any, highest: Any) -> Any:
    """x = e^(x - highest), whose sum it returns."""
    at, whole, sums = x.ctypes.data, x.shape[0] // 4 * 4, no_floats()
    for i in range(0, whole, 4):
        four = exponential(add(load_floats(at + i * 4), splat(-highest)))
        store_floats(at + i * 4, four)
        sums = add(sums, four)
    total = summed(sums)
    for i in range(whole, x.shape[0]):
        x[i] = lane(exponential(splat(x[i] - highest)), 0)
        total += x[i]
    return total


@njit
def _attend_head(
    q: Any, k_at: int, v_at: int, bits: int, slots: int, first: int, scale: Any, score: Any, out: Any
) -> None:
    """out [D] = softmax(scale q k) v over as many keys as `score` has room for, from slot `first` on and around."""
    until_end = min(score.shape[0], slots - first)
    start = first * _row_bytes(q.shape[0], bits)
    before, behind = score[:until_end], score[until_end:]
    highest = _score(q, k_at + start, bits, scale, before)
    highest = max(highest, _score(q, k_at, bits, scale, behind))
    total = exponentials(score, highest)
    for i in range(out.shape[0]):
        out[i] = 0
    _mix(before, v_at + start, bits, out)
    _mix(behind, v_at, bits, out)
    for i in range(out.shape[0]):
        out[i] /= total


@njit(parallel=True)
def attend_rows(blocks: Any, x: Any, table: Any, seen: Any, out: Any) -> None:
    """The heads of q are the first of each line of x: as many lines, one after the other, for each row of the table.

    seen: of each line, its first slot and how many keys.
    """
    heads, size, scale = blocks[0].heads, blocks[0].head_dim, np.float32(blocks[0].scale)
    group, lines = heads // blocks[0].kv_heads, out.shape[0]
    for item in prange(lines * heads):
        # Head by head: the last queries of a prompt see the most keys, and no thread should have them all.
        h, line = item // lines, item % lines
        row = line * table.shape[0] // lines
        offset = h // group * table[row, STRIDE]
        _attend_head(
            x[line, h * size : (h + 1) * size],
            table[row, K] + offset,
            table[row, V] + offset,
            table[row, BITS],
            table[row, SLOTS],
            seen[line, 0],
            scale,
            np.empty(seen[line, 1], np.float32),
            out[line, h * size : (h + 1) * size],
        )


@njit
def write(block: Any, row: Any, kv: Any, slot: int) -> None:
    """Put a token's keys and values, one head after the other, into their slot."""
    size, start = block.head_dim, slot * _row_bytes(block.head_dim, row[BITS])
    for h in range(block.kv_heads):
        at = h * row[STRIDE] + start
        _write_one(kv, h * size, row[K] + at, size, row[BITS])
        _write_one(kv, (block.kv_heads + h) * size, row[V] + at, size, row[BITS])


@njit
def _write_one(kv: Any, start: int, at: int, size: int, bits: int) -> None:
    """One head's vector."""
    if bits == 32:
        out = vector(at, size)
        for i in range(size):
            out[i] = kv[start + i]
    else:
        for first in range(0, size, GROUP):
            count = min(GROUP, size - first)
            _encode(kv[start + first : start + first + count], at + first, at + size + first // GROUP * 2)


@njit
def _encode(x: Any, at: int, scale_at: int) -> None:
    """A group in 8 bits, with the very bits that `infer.cache.int8.encode` gives it."""
    peak = np.float32(0)
    for i in range(x.shape[0]):
        peak = abs(x[i]) if abs(x[i]) > peak or x[i] != x[i] else peak  # a NaN stays
    step = np.float32(np.nan) if peak == np.inf else np.float32(peak / np.float32(127))
    step = np.float32(65504) if step > 65504 else step
    store_as_half(scale_at, step)
    if load_half(scale_at) < step:
        raise_half(scale_at)
    scale, codes = load_half(scale_at), bytes_at(at, x.shape[0])
    for i in range(x.shape[0]):
        # Of a group that is 0, or not finite, the scale alone says so.
        code = np.float32(np.rint(x[i] / scale)) if scale > 0 else np.float32(0)
        codes[i] = np.int8(min(max(code, np.float32(-127)), np.float32(127)))
