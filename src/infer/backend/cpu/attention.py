"""Keys and values in a cache, and attention over them, on the CPU.

Each query is attended from by itself, and goes through its keys in the order of their positions: what comes out depends
on the query and on those keys, and neither on the queries beside it nor on where a key lies. Keys lie in pieces, a page
each, or up to the end of a ring. As everywhere in these kernels, sums have one order, and nothing is compiled with
`fastmath`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, prange

from infer.backend.cpu.memory import bytes_at, integer_at, vector
from infer.backend.cpu.product import GROUP, panel_rows
from infer.backend.cpu.simd import (
    add,
    exponential,
    fused,
    fused_one,
    lane,
    load_codes,
    load_eight,
    load_float,
    load_floats,
    load_half,
    no_floats,
    raise_half,
    splat,
    store_as_half,
    store_eight,
    store_floats,
    summed,
)
from infer.backend.cpu.tile import LANES, MIXED, W_ROWS, X_ROWS, mix_tile, multiply_tile
from infer.cache.table import BITS, PAGE, PAGES, SLOTS, STRIDE, K, V


@njit(forceinline=True)
def _row_bytes(head_dim: int, bits: int) -> int:
    """Of a key or value: behind 8-bit ones stand their scales, as `infer.cache.int8` has them."""
    return head_dim * 4 if bits == 32 else head_dim + 2 * ((head_dim + GROUP - 1) // GROUP)


@njit
def _piece(row: Any, position: int, count: int, size: int) -> Any:
    """Where a position lies, in bytes from the first head's, and how many of `count` lie there behind each other.

    row: of the table. size: bytes of a position.
    """
    slots = row[SLOTS]
    slot = position % slots
    at, together = slot * size, slots - slot
    if row[PAGES] != 0:
        listed = row[PAGES] + position // slots * 8
        number = integer_at(listed)
        at += number * row[PAGE]
        while together < count and integer_at(listed + 8) == number + 1:  # the next page lies right behind
            number, listed, together = number + 1, listed + 8, together + slots
    return at, min(count, together)


@njit
def _score(q: Any, row: Any, offset: int, first: int, out: Any) -> None:
    """out [keys] = q k, of the keys from position `first` on."""
    size, bits, q_at, out_at, keys, done = q.shape[0], row[BITS], q.ctypes.data, out.ctypes.data, out.shape[0], 0
    row_bytes = _row_bytes(size, bits)
    while done < keys:
        at, count = _piece(row, first + done, keys - done, row_bytes)
        at += row[K] + offset
        if bits == 32:
            _score_panel(1, q_at, q_at, 0, size, at, count, out_at + done * 4, 0)
        else:
            for j in range(count):
                out[done + j] = _dot_codes(q_at, at + j * row_bytes, size)
        done += count


@njit(forceinline=True)
def _scaled(scores: Any, scale: Any) -> Any:
    """scores *= scale, the highest of which it returns."""
    highest = np.float32(-np.inf)
    for j in range(scores.shape[0]):
        scores[j] *= scale
        highest = max(highest, scores[j])
    return highest


@njit
def _score_panel(
    rows: Any, panel: int, q_at: int, q_row: int, size: int, k_at: int, keys: int, out_at: int, out_row: int
) -> None:
    """out [rows, keys] = q k, in the order of a product. panel: where these queries are packed."""
    steps, row = size // LANES, size * 4
    for j in range(0, keys, W_ROWS):
        if steps == 0:
            for t in range(rows):
                vector(out_at + t * out_row, keys)[j : j + W_ROWS] = 0
        elif keys >= W_ROWS:  # some of the last tile's keys may be of the one before it
            at = min(j, keys - W_ROWS)
            multiply_tile(rows, k_at + at * row, row, 32, panel, steps, 0, 1, 1, out_at + at * 4, out_row)
        else:
            spare = np.empty((X_ROWS, W_ROWS), np.float32)
            for i in range(keys):
                multiply_tile(rows, k_at + i * row, 0, 32, panel, steps, 0, 1, 1, spare.ctypes.data, W_ROWS * 4)
                for t in range(rows):
                    vector(out_at + t * out_row, keys)[i] = spare[t, 0]
    if steps * LANES < size:
        for t in range(rows):
            out = vector(out_at + t * out_row, keys)
            for j in range(keys):
                for i in range(steps * LANES, size):
                    out[j] = fused_one(load_float(k_at + j * row + i * 4), load_float(q_at + t * q_row + i * 4), out[j])


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
def _mix(weights_at: Any, row: Any, offset: int, first: int, keys: int, size: int, out_at: int) -> None:
    """out [D] += the weighted sum of the values from position `first` on, one after the other."""
    bits, done = row[BITS], 0
    row_bytes = _row_bytes(size, bits)
    while done < keys:
        at, count = _piece(row, first + done, keys - done, row_bytes)
        at += row[V] + offset
        together = count // 4 * 4 if bits == 32 else 0
        for j in range(0, together, 4):
            _add_four(weights_at + (done + j) * 4, at + j * row_bytes, size, out_at)
        for j in range(together, count):
            weight = load_float(weights_at + (done + j) * 4)
            if bits == 32:
                _add_value(weight, at + j * row_bytes, size, out_at)
            else:
                _add_codes(weight, at + j * row_bytes, size, out_at)
        done += count


@njit(forceinline=True)
def _add_four(weights_at: int, v_at: int, size: int, out_at: int) -> None:
    """out += four values, weighted: read and written once for them all, and in the order of one after the other."""
    a, b = splat(load_float(weights_at)), splat(load_float(weights_at + 4))
    c, d = splat(load_float(weights_at + 8)), splat(load_float(weights_at + 12))
    row, whole, out = size * 4, size // 4 * 4, vector(out_at, size)
    for i in range(0, whole, 4):
        at = v_at + i * 4
        x = fused(load_floats(at), a, load_floats(out_at + i * 4))
        x = fused(load_floats(at + row), b, x)
        x = fused(load_floats(at + 2 * row), c, x)
        store_floats(out_at + i * 4, fused(load_floats(at + 3 * row), d, x))
    for i in range(whole, size):
        for j in range(4):
            out[i] = fused_one(load_float(v_at + j * row + i * 4), load_float(weights_at + j * 4), out[i])


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
def _attend_head(q: Any, row: Any, offset: int, first: int, scale: Any, score: Any, out: Any) -> None:
    """out [D] = softmax(scale q k) v over as many keys as `score` has room for, from position `first` on.

    row: of the table. offset: bytes from the first head's keys to this one's.
    """
    total = _weigh(q, row, offset, first, scale, score)
    for i in range(out.shape[0]):
        out[i] = 0
    _mix(score.ctypes.data, row, offset, first, score.shape[0], out.shape[0], out.ctypes.data)
    for i in range(out.shape[0]):
        out[i] /= total


@njit
def _weigh(q: Any, row: Any, offset: int, first: int, scale: Any, score: Any) -> Any:
    """score = e^(scale q k), the largest being 1; returns their sum."""
    _score(q, row, offset, first, score)
    return exponentials(score, _scaled(score, scale))


@njit
def weigh_rows(blocks: Any, x: Any, table: Any, parts: Any, seen: Any, out: Any) -> None:
    """out [T, Hq S]: what `attend_rows` mixes the values of S keys with, which are those of the first S positions."""
    heads, size, scale = blocks[0].heads, blocks[0].head_dim, np.float32(blocks[0].scale)
    group, keys = heads // blocks[0].kv_heads, out.shape[1] // heads
    for part in range(parts.shape[0]):
        row = table[parts[part, 0]]
        for t in range(parts[part, 3], parts[part, 4]):
            first, count = seen[t, 0], seen[t, 1]
            for h in range(heads):
                line = out[t, h * keys : (h + 1) * keys]
                line[:] = 0
                own = line[first : first + count]
                q = x[t, h * size : (h + 1) * size]
                total = _weigh(q, row, h // group * row[STRIDE], first, scale, own)
                for j in range(count):
                    own[j] /= total


@njit
def _attend_panel(
    rows: int, q_at: int, q_row: int, row: Any, offset: int, seen: Any, size: int, scale: Any, out_at: int, out_row: int
) -> None:
    """The same as `_attend_head`, of several queries of a head: a load of a key or a value serves all that see it."""
    first, last = seen[0, 0], seen[0, 0] + seen[0, 1]
    shared, until = first, last  # keys that all see
    for t in range(1, rows):
        first, last = min(first, seen[t, 0]), max(last, seen[t, 0] + seen[t, 1])
        shared, until = max(shared, seen[t, 0]), min(until, seen[t, 0] + seen[t, 1])
    until = max(shared, until)
    row_bytes, steps = size * 4, size // LANES
    panel, scores = np.empty(rows * size, np.float32), np.empty((rows, last - first), np.float32)
    for t in range(rows):
        for step in range(steps):
            store_eight(panel.ctypes.data + (step * rows + t) * 32, load_eight(q_at + t * q_row + step * 32))
    scores_at, scores_row, position = scores.ctypes.data, scores.strides[0], first
    while position < last:
        at, count = _piece(row, position, last - position, row_bytes)
        _score_panel(
            rows,
            panel.ctypes.data,
            q_at,
            q_row,
            size,
            row[K] + offset + at,
            count,
            scores_at + (position - first) * 4,
            scores_row,
        )
        position += count
    totals = np.empty(rows, np.float32)
    for t in range(rows):
        own, start = scores[t, seen[t, 0] - first :][: seen[t, 1]], seen[t, 0]
        totals[t] = exponentials(own, _scaled(own, scale))
        out = vector(out_at + t * out_row, size)
        out[:] = 0
        _mix(own.ctypes.data, row, offset, start, shared - start, size, out_at + t * out_row)
    position = shared
    while position < until:
        at, count = _piece(row, position, until - position, row_bytes)
        _mix_panel(
            rows,
            scores_at + (position - first) * 4,
            scores_row,
            row[V] + offset + at,
            count,
            size,
            out_at,
            out_row,
        )
        position += count
    for t in range(rows):
        out, end = vector(out_at + t * out_row, size), seen[t, 0] + seen[t, 1]
        behind_at = scores_at + t * scores_row + (until - first) * 4
        _mix(behind_at, row, offset, until, end - until, size, out_at + t * out_row)
        for i in range(size):
            out[i] /= totals[t]
    panel[0] = 0  # still there, which numba would not know from its address


@njit
def _mix_panel(
    rows: Any, weights_at: int, weights_row: int, v_at: int, count: int, size: int, out_at: int, out_row: int
) -> None:
    """out [rows, D] += weights [rows, count] values [count, D], one value after the other."""
    row_bytes, mixed = size * 4, size // MIXED * MIXED
    for column in range(0, mixed, MIXED):
        mix_tile(rows, weights_at, weights_row, v_at + column * 4, row_bytes, count, out_at + column * 4, out_row)
    for t in range(rows):
        out, weights = vector(out_at + t * out_row, size), vector(weights_at + t * weights_row, count)
        for i in range(mixed, size):
            for j in range(count):
                out[i] = fused_one(load_float(v_at + j * row_bytes + i * 4), weights[j], out[i])


@njit
def _can_share(seen: Any) -> Any:
    """Whether there are keys that all of these queries see."""
    shared, until = seen[0, 0], seen[0, 0] + seen[0, 1]
    for t in range(1, seen.shape[0]):
        shared, until = max(shared, seen[t, 0]), min(until, seen[t, 0] + seen[t, 1])
    return shared < until


@njit(parallel=True)
def attend_rows(blocks: Any, x: Any, table: Any, parts: Any, seen: Any, out: Any) -> None:
    """The heads of q are the first of each token's line of x.

    parts: as `parts_of` has them. seen: of each token, the position of its first key and how many keys.
    """
    heads, size, scale = blocks[0].heads, blocks[0].head_dim, np.float32(blocks[0].scale)
    group = heads // blocks[0].kv_heads
    for item in prange(parts.shape[0] * heads):
        # A row after the other, each a head after the other: its keys stay in the processor's cache. The last queries
        # of a prompt see the most keys, and no thread should have them all: first, last, second, ...
        before, count = parts[item // heads, 1], parts[item // heads, 2]
        h, part = (item - before * heads) // count, (item - before * heads) % count
        part = before + (count - 1 - part // 2 if part % 2 else part // 2)
        row, line, stop = table[parts[part, 0]], parts[part, 3], parts[part, 4]
        offset = h // group * row[STRIDE]
        while line < stop:
            count = panel_rows(stop - line)
            own = seen[line : line + count]
            if count > 1 and row[BITS] == 32 and _can_share(own):
                _attend_panel(
                    count,
                    x[line].ctypes.data + h * size * 4,
                    x.strides[0],
                    row,
                    offset,
                    own,
                    size,
                    scale,
                    out[line].ctypes.data + h * size * 4,
                    out.strides[0],
                )
            else:
                for t in range(line, line + count):
                    _attend_head(
                        x[t, h * size : (h + 1) * size],
                        row,
                        offset,
                        seen[t, 0],
                        scale,
                        np.empty(seen[t, 1], np.float32),
                        out[t, h * size : (h + 1) * size],
                    )
            line += count


@njit
def write(block: Any, row: Any, kv: Any, position: int) -> None:
    """Put a token's keys and values, one head after the other, where its position lies."""
    size = block.head_dim
    start, _ = _piece(row, position, 1, _row_bytes(size, row[BITS]))
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
