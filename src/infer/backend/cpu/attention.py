"""Keys and values in a cache, and attention over them, on the CPU.

Each query is attended from by itself, and goes through its keys in the order of their positions: what comes out depends
on the query and on those keys, and neither on the queries beside it nor on where a key lies. Keys go by blocks of KEYS
positions: each gives a softmax of its own, and these are joined in their order. So several threads can share a query's
keys, and heads that have the same keys read them once. Keys lie in pieces, a page each, or up to the end of a ring. As
everywhere in these kernels, sums have one order, and nothing is compiled with `fastmath`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, prange

from infer.backend.cpu.memory import bytes_at, integer_at, keep, vector
from infer.backend.cpu.product import panel_rows
from infer.backend.cpu.simd import (
    add,
    exponential,
    fused_one,
    lane,
    larger,
    largest,
    load_eight,
    load_eight_codes,
    load_float,
    load_floats,
    load_half,
    multiply,
    no_floats,
    prefetch,
    raise_half,
    splat,
    splat_eight,
    store_as_half,
    store_eight,
    store_floats,
    summed,
)
from infer.backend.cpu.tile import AHEAD, LANES, MIXED, PANELS, W_ROWS, X_ROWS, mix_tile, multiply_tile
from infer.cache.table import BITS, PAGE, PAGES, SLOTS, STRIDE, K, V
from infer.nn.quantized import GROUP

KEYS = 256  # positions of a block
MANY = 64  # results of blocks that are worth handing out to several threads


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
def _readable(row: Any, at: int, count: int, size: int, floats_at: int) -> Any:
    """Where `count` keys or values, which lie at an address, are floats: there, or where 8-bit ones are turned to."""
    if row[BITS] == 32:
        return at
    row_bytes = _row_bytes(size, row[BITS])
    for j in range(count):
        codes, scales, out = at + j * row_bytes, at + j * row_bytes + size, floats_at + j * size * 4
        for first in range(0, size, GROUP):
            last, scale = min(first + GROUP, size), load_half(scales + first // GROUP * 2)
            whole = first + (last - first) // 8 * 8
            for i in range(first, whole, 8):
                store_eight(out + i * 4, multiply(load_eight_codes(codes + i), splat_eight(scale)))
            for i in range(whole, last):
                vector(out, size)[i] = np.float32(bytes_at(codes + i, 1)[0]) * scale
    return np.int64(floats_at)


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
            if AHEAD > 0:
                for line in range(0, W_ROWS * row, 64):
                    prefetch(k_at + at * row + AHEAD + line)
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


@njit
def _score(
    rows: int, panel: int, q_at: int, q_row: int, row: Any, offset: int, first: int, keys: int, size: int, out: Any
) -> None:
    """out [rows, keys] = q k, of the keys from position `first` on."""
    done, row_bytes = 0, _row_bytes(size, row[BITS])
    floats = np.empty(0 if row[BITS] == 32 else keys * size, np.float32)
    while done < keys:
        at, count = _piece(row, first + done, keys - done, row_bytes)
        at = _readable(row, row[K] + offset + at, count, size, floats.ctypes.data)
        _score_panel(rows, panel, q_at, q_row, size, at, count, out.ctypes.data + done * 4, out.strides[0])
        done += count
    keep(floats, out)


@njit
def _mix(
    rows: int,
    weights_at: int,
    weights_row: int,
    row: Any,
    offset: int,
    first: int,
    keys: int,
    size: int,
    out_at: int,
    out_row: int,
) -> None:
    """out [rows, D] += weights [rows, keys] values, of the values from position `first` on, one after the other."""
    done, row_bytes, mixed = 0, _row_bytes(size, row[BITS]), size // MIXED * MIXED
    floats = np.empty(0 if row[BITS] == 32 else keys * size, np.float32)
    while done < keys:
        at, count = _piece(row, first + done, keys - done, row_bytes)
        v_at, w_at = _readable(row, row[V] + offset + at, count, size, floats.ctypes.data), weights_at + done * 4
        for column in range(0, mixed, MIXED):
            mix_tile(rows, w_at, weights_row, v_at + column * 4, size * 4, count, out_at + column * 4, out_row)
        for t in range(rows):
            out, weights = vector(out_at + t * out_row, size), vector(w_at + t * weights_row, count)
            for i in range(mixed, size):
                for j in range(count):
                    out[i] = fused_one(load_float(v_at + (j * size + i) * 4), weights[j], out[i])
        done += count
    keep(floats, floats)


@njit
def _scaled(scores: Any, scale: Any) -> Any:
    """scores *= scale, the highest of which it returns."""
    at, whole, by = scores.ctypes.data, scores.shape[0] // 4 * 4, splat(scale)
    highest = splat(np.float32(-np.inf))
    for j in range(0, whole, 4):
        four = multiply(load_floats(at + j * 4), by)
        store_floats(at + j * 4, four)
        highest = larger(highest, four)
    result = largest(highest)
    for j in range(whole, scores.shape[0]):
        scores[j] *= scale
        result = scores[j] if scores[j] > result or scores[j] != scores[j] else result
    return result


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
def _pack(rows: int, q_at: int, q_row: int, size: int) -> Any:
    """Queries as `multiply_tile` takes them."""
    panel = np.empty(rows * size, np.float32)
    for t in range(rows):
        for step in range(size // LANES):
            store_eight(panel.ctypes.data + (step * rows + t) * 32, load_eight(q_at + t * q_row + step * 32))
    return panel


@njit
def _attend_block(
    rows: int,
    panel: int,
    q_at: int,
    q_row: int,
    row: Any,
    offset: int,
    seen: Any,
    start: int,
    stop: int,
    size: int,
    scale: Any,
    out: Any,
    peaks: Any,
    totals: Any,
) -> None:
    """Of several queries of a head, or of heads with the same keys, what the keys from `start` to `stop` give.

    out [rows, D]: the sum of values, weighted by e^(scale q k - peak); totals: the sum of these weights, 0 where a
    query sees none of the keys. A load of a key or a value serves all queries that see it.
    """
    first, last, shared, until = stop, start, start, stop  # keys that some see, and that all see
    for t in range(rows):
        begin, end = max(start, seen[t, 0]), min(stop, seen[t, 0] + seen[t, 1])
        first, last = min(first, begin), max(last, end)
        shared, until = max(shared, begin), min(until, end)
    until = max(shared, until)
    out[:rows] = 0
    scores = np.empty((rows, max(0, last - first)), np.float32)
    if last > first:
        _score(rows, panel, q_at, q_row, row, offset, first, last - first, size, scores)
    at, scores_row = scores.ctypes.data, scores.strides[0]
    for t in range(rows):
        begin, end = max(start, seen[t, 0]), min(stop, seen[t, 0] + seen[t, 1])
        totals[t], peaks[t] = 0, -np.inf
        if begin < end:
            own = scores[t, begin - first : end - first]
            peaks[t] = _scaled(own, scale)
            totals[t] = exponentials(own, peaks[t])
            before = max(0, min(shared, end) - begin)
            _mix(1, own.ctypes.data, 0, row, offset, begin, before, size, out[t].ctypes.data, 0)
    _mix(
        rows,
        at + (shared - first) * 4,
        scores_row,
        row,
        offset,
        shared,
        until - shared,
        size,
        out.ctypes.data,
        out.strides[0],
    )
    for t in range(rows):
        begin, end = max(until, seen[t, 0]), min(stop, seen[t, 0] + seen[t, 1])
        if begin < end:
            own_at = at + t * scores_row + (begin - first) * 4
            _mix(1, own_at, 0, row, offset, begin, end - begin, size, out[t].ctypes.data, 0)
    keep(scores, scores)


@njit
def _join(out: Any, peak: Any, total: Any, part: Any, part_peak: Any, part_total: Any) -> Any:
    """Add what a further block of keys gives: out [D] and the total that it is to be divided by."""
    if part_total == 0:
        return peak, total
    if total == 0:
        out[:] = part
        return part_peak, part_total
    highest = max(peak, part_peak)
    before, now = lane(exponential(splat(peak - highest)), 0), lane(exponential(splat(part_peak - highest)), 0)
    for i in range(out.shape[0]):
        out[i] = fused_one(part[i], now, out[i] * before)
    return highest, fused_one(part_total, now, total * before)


@njit
def _attend_panel(
    rows: int, q_at: int, q_row: int, row: Any, offset: int, seen: Any, size: int, scale: Any, out_at: int, out_row: int
) -> None:
    """Several queries of a head, block by block."""
    first, last = seen[0, 0], seen[0, 0] + seen[0, 1]
    for t in range(1, rows):
        first, last = min(first, seen[t, 0]), max(last, seen[t, 0] + seen[t, 1])
    panel = _pack(rows, q_at, q_row, size)
    part, peaks, totals = np.empty((rows, size), np.float32), np.empty(rows, np.float32), np.empty(rows, np.float32)
    all_peaks, all_totals = np.zeros(rows, np.float32), np.zeros(rows, np.float32)
    for block in range(first // KEYS, (last + KEYS - 1) // KEYS):
        start, stop = max(first, block * KEYS), min(last, (block + 1) * KEYS)
        _attend_block(
            rows, panel.ctypes.data, q_at, q_row, row, offset, seen, start, stop, size, scale, part, peaks, totals
        )
        for t in range(rows):
            all_peaks[t], all_totals[t] = _join(
                vector(out_at + t * out_row, size), all_peaks[t], all_totals[t], part[t], peaks[t], totals[t]
            )
    for t in range(rows):
        out = vector(out_at + t * out_row, size)
        for i in range(size):
            out[i] /= all_totals[t]
    keep(panel, panel)


@njit
def _heads_together(h: int, group: int) -> Any:
    """How many heads from h on share their keys, and fit into a panel."""
    return min(X_ROWS, group - h % group)


@njit
def _attend_one(x: Any, h: int, row: Any, seen: Any, block: int, size: int, scale: Any, group: int, part: Any) -> None:
    """One token's heads from h on, which share their keys: what a block of these gives.

    part [heads, D + 2]: sums of values, peaks and totals.
    """
    count, rows = _heads_together(h, group), 1
    for panel_size in PANELS:  # filled up with zeros, as some sizes are missing
        rows = panel_size if panel_size >= count else rows
    heads, all_seen = np.zeros((rows, size), np.float32), np.empty((rows, 2), np.int64)
    heads[:count] = x[h * size : (h + count) * size].reshape(count, size)
    all_seen[:] = seen
    out, peaks, totals = np.empty((rows, size), np.float32), np.empty(rows, np.float32), np.empty(rows, np.float32)
    panel, offset = _pack(rows, heads.ctypes.data, size * 4, size), h // group * row[STRIDE]
    start, stop = max(seen[0], block * KEYS), min(seen[0] + seen[1], (block + 1) * KEYS)
    panel_at, heads_at = panel.ctypes.data, heads.ctypes.data
    _attend_block(
        rows, panel_at, heads_at, size * 4, row, offset, all_seen, start, stop, size, scale, out, peaks, totals
    )
    for i in range(count):
        part[i, :size], part[i, size], part[i, size + 1] = out[i], peaks[i], totals[i]
    keep(panel, heads)


@njit
def _join_parts(item: Any, parts: Any, seen: Any, made: Any, group: int, size: int, out: Any) -> None:
    """What all blocks give for a token's heads, at the item of the first block."""
    p, h, block, slot = item
    line = parts[p, 3]
    first, blocks = _blocks_of(seen[line])
    if block != first:
        return
    for i in range(_heads_together(h, group)):
        own, peak, total = out[line, (h + i) * size : (h + i + 1) * size], np.float32(0), np.float32(0)
        for n in range(slot, slot + blocks):
            part = made[n, i]
            peak, total = _join(own, peak, total, part[:size], part[size], part[size + 1])
        for j in range(size):
            own[j] /= total


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
                own = out[t : t + 1, h * keys + first : h * keys + first + count]
                q_at = x[t].ctypes.data + h * size * 4
                _score(1, q_at, q_at, 0, row, h // group * row[STRIDE], first, count, size, own)
                total = exponentials(own[0], _scaled(own[0], scale))
                for j in range(count):
                    own[0, j] /= total


@njit
def _blocks_of(seen: Any) -> Any:
    """The first block of the keys that a query sees, and how many blocks."""
    first = seen[0] // KEYS
    return first, (seen[0] + seen[1] + KEYS - 1) // KEYS - first


@njit
def _plan(parts: Any, seen: Any, heads: int, kv_heads: int) -> Any:
    """The work, in items: a part's head; or of a part that is a single token, heads with the same keys and a block.

    Of each: the part, the head, the block (-1: all), and where what comes of a block goes.
    """
    group, items, slots = heads // kv_heads, 0, 0
    panels = (group + X_ROWS - 1) // X_ROWS * kv_heads
    for p in range(parts.shape[0]):
        if parts[p, 4] - parts[p, 3] == parts[p, 2] == 1:
            blocks = _blocks_of(seen[parts[p, 3]])[1]
            items, slots = items + panels * blocks, slots + panels * blocks
        else:
            items += heads
    plan, n, slot, p = np.empty((items, 4), np.int64), 0, 0, 0
    while p < parts.shape[0]:
        if parts[p, 4] - parts[p, 3] == parts[p, 2] == 1:
            first, blocks = _blocks_of(seen[parts[p, 3]])
            for kv in range(kv_heads):
                for h in range(kv * group, (kv + 1) * group, X_ROWS):
                    for block in range(first, first + blocks):
                        plan[n, 0], plan[n, 1], plan[n, 2], plan[n, 3] = p, h, block, slot
                        n, slot = n + 1, slot + 1
            p += 1
            continue
        # A row after the other, each a head after the other: its keys stay in the processor's cache. The last queries
        # of a prompt see the most keys, and no thread should have them all: first, last, second, ...
        count = parts[p, 2]
        for h in range(heads):
            for i in range(count):
                plan[n, 0], plan[n, 1], plan[n, 2], plan[n, 3] = p + (count - 1 - i // 2 if i % 2 else i // 2), h, -1, 0
                n += 1
        p += count
    return plan, slots


@njit(parallel=True)
def attend_rows(blocks: Any, x: Any, table: Any, parts: Any, seen: Any, out: Any) -> None:
    """The heads of q are the first of each token's line of x.

    parts: as `parts_of` has them. seen: of each token, the position of its first key and how many keys.
    """
    heads, kv_heads, size = blocks[0].heads, blocks[0].kv_heads, blocks[0].head_dim
    group, scale = heads // kv_heads, np.float32(blocks[0].scale)
    plan, slots = _plan(parts, seen, heads, kv_heads)
    made = np.empty((slots, min(group, X_ROWS), size + 2), np.float32)
    for item in prange(plan.shape[0]):
        p, h, block, slot = plan[item]
        row, line, stop = table[parts[p, 0]], parts[p, 3], parts[p, 4]
        if block >= 0:
            _attend_one(x[line], h, row, seen[line], block, size, scale, group, made[slot])
        while block < 0 and line < stop:
            count = panel_rows(stop - line)
            _attend_panel(
                count,
                x[line].ctypes.data + h * size * 4,
                x.strides[0],
                row,
                h // group * row[STRIDE],
                seen[line : line + count],
                size,
                scale,
                out[line].ctypes.data + h * size * 4,
                out.strides[0],
            )
            line += count
    if slots < MANY:
        for item in range(plan.shape[0]):
            _join_parts(plan[item], parts, seen, made, group, size, out)
    else:
        for item in prange(plan.shape[0]):
            _join_parts(plan[item], parts, seen, made, group, size, out)


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
