"""Keys and values in a cache, and attention over them, on the CPU.

Each query is attended from by itself, and goes through its keys in the order of their positions: what comes out depends
on the query and on those keys, and neither on the queries beside it nor on where a key lies. Keys go by blocks of KEYS
positions: each gives a softmax of its own, and these are joined in their order. So several threads can share a query's
keys, and heads that have the same keys read them once. Keys lie in pieces, a page each, or up to the end of a ring. As
everywhere in these kernels, sums have one order, and nothing is compiled with `fastmath`.

All that is handed on is an address, a number of bytes (`_row`: from one row to the next) or a count.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from infer.backend.cpu.memory import address, call_at, keep
from infer.backend.cpu.simd import (
    _typed_intrinsic,
    add,
    exponential,
    fused_one,
    lane,
    larger,
    largest,
    load_byte,
    load_eight,
    load_eight_codes,
    load_float,
    load_half,
    load_integer,
    load_sixteen,
    multiply,
    no_sixteen,
    prefetch,
    raise_half,
    splat,
    splat_eight,
    store_as_half,
    store_byte,
    store_float,
    store_floats,
    summed,
)
from infer.backend.cpu.threads import shared
from infer.backend.cpu.tile import (
    AHEAD,
    FEW,
    FEW_MIXED,
    LANES,
    LAST_MIXED,
    MIXED,
    PANELS,
    W_ROWS,
    X_ROWS,
    mix_last,
    mix_tile,
    multiply_tile,
    panel_rows,
)
from infer.backend.cpu.units import linked, unit
from infer.cache.table import BITS, COLUMNS, PAGE, PAGES, SLOTS, STRIDE, K, V
from infer.nn.quantized import GROUP

KEYS = 256  # positions of a block
SCORES_ROW = (KEYS + 16) * 4  # bytes: the scores of a block, filled up to sixteens
MANY = 64  # results of blocks that are worth handing out to several threads
PART, PART_ROWS, TOKENS, TOKENS_END = 0, 2, 3, 4  # columns of `parts_of`
PART_COLUMNS = 5
ATTEND = types.void(*[types.int64] * 3, types.float64, *[types.int64] * 7)
WEIGH = types.void(*ATTEND.args, types.int64)


@_typed_intrinsic
def attend_at(
    context: Any,
    code: Any,
    heads: Any,
    kv_heads: Any,
    size: Any,
    scale: Any,
    x: Any,
    x_row: Any,
    table: Any,
    parts: Any,
    part_count: Any,
    seen: Any,
    out: Any,
) -> Any:
    """Call `attend`, whose code lies at an address."""
    return types.void(types.int64, *ATTEND.args), call_at


@linked
def _field(row: int, column: int) -> Any:
    """Of a row of the table."""
    return load_integer(row + column * 8)


@linked(forceinline=True)
def _row_bytes(head_dim: int, bits: int) -> int:
    """Of a key or value: behind 8-bit ones stand their scales, as `infer.cache.int8` has them."""
    return head_dim * 4 if bits == 32 else head_dim + 2 * ((head_dim + GROUP - 1) // GROUP)


@linked
def _piece(row: int, position: int, count: int, size: int) -> Any:
    """Where a position lies, in bytes from the first head's, and how many of `count` lie there behind each other.

    row: of the table. size: bytes of a position.
    """
    slots, pages = _field(row, SLOTS), _field(row, PAGES)
    slot = position % slots
    at, together = slot * size, slots - slot
    if pages != 0:
        listed = pages + position // slots * 8
        number = load_integer(listed)
        at += number * _field(row, PAGE)
        while together < count and load_integer(listed + 8) == number + 1:  # the next page lies right behind
            number, listed, together = number + 1, listed + 8, together + slots
    return at, min(count, together)


@linked
def _readable(bits: int, at: int, count: int, size: int, floats: int) -> Any:
    """Where `count` keys or values, which lie at an address, are floats: there, or where 8-bit ones are turned to."""
    if bits == 32:
        return at
    row_bytes = _row_bytes(size, bits)
    for j in range(count):
        codes, scales, out = at + j * row_bytes, at + j * row_bytes + size, floats + j * size * 4
        for first in range(0, size, GROUP):
            last, scale = min(first + GROUP, size), load_half(scales + first // GROUP * 2)
            whole = first + (last - first) // 8 * 8
            for i in range(first, whole, 8):
                store_floats(out + i * 4, multiply(load_eight_codes(codes + i), splat_eight(scale)))
            for i in range(whole, last):
                store_float(out + i * 4, np.float32(load_byte(codes + i)) * scale)
    return floats


@linked
def _score_piece(rows: int, count: int, panel: int, q: int, q_row: int, size: int, k: int, keys: int, out: int) -> None:
    """out [rows, keys] = q k, in the order of a product. panel: where the queries, `count` of its rows, are packed."""
    steps, row = size // LANES, size * 4
    for j in range(0, keys, W_ROWS):
        if steps == 0:
            for t in range(rows):
                for i in range(j, min(j + W_ROWS, keys)):
                    store_float(out + t * SCORES_ROW + i * 4, np.float32(0))
        elif keys >= W_ROWS:  # some of the last tile's keys may be of the one before it
            at = min(j, keys - W_ROWS)
            if AHEAD > 0:
                for line in range(0, W_ROWS * row, 64):
                    prefetch(k + at * row + AHEAD + line)
            multiply_tile(rows, k + at * row, row, 32, panel, steps, 0, 1, 1, out + at * 4, SCORES_ROW)
        else:
            spare = np.empty(X_ROWS * W_ROWS, np.float32)
            for i in range(keys):
                multiply_tile(rows, k + i * row, 0, 32, panel, steps, 0, 1, 1, address(spare), W_ROWS * 4)
                for t in range(rows):
                    store_float(out + t * SCORES_ROW + i * 4, spare[t * W_ROWS])
            keep(spare, spare)
    if steps * LANES < size:
        for t in range(count):
            for j in range(keys):
                result = load_float(out + t * SCORES_ROW + j * 4)
                for i in range(steps * LANES, size):
                    result = fused_one(load_float(k + j * row + i * 4), load_float(q + t * q_row + i * 4), result)
                store_float(out + t * SCORES_ROW + j * 4, result)


@linked
def _score(
    rows: int,
    count: int,
    panel: int,
    q: int,
    q_row: int,
    row: int,
    head: int,
    first: int,
    keys: int,
    size: int,
    floats: int,
    out: int,
) -> None:
    """out [rows, keys] = q k, of up to KEYS keys from position `first` on. head: bytes from the first head."""
    done, bits = 0, _field(row, BITS)
    while done < keys:
        at, together = _piece(row, first + done, keys - done, _row_bytes(size, bits))
        k = _readable(bits, _field(row, K) + head + at, together, size, floats)
        _score_piece(rows, count, panel, q, q_row, size, k, together, out + done * 4)
        done += together


@linked
def _mix(rows: int, weights: int, row: int, head: int, first: int, keys: int, size: int, floats: int, out: int) -> None:
    """out [rows, size] += weights [rows, keys] values, of the values from position `first` on, one after the other."""
    done, bits, line = 0, _field(row, BITS), size * 4
    wide = FEW_MIXED if rows <= FEW else MIXED
    whole, most = size // wide * wide, size // LAST_MIXED * LAST_MIXED
    while done < keys:
        at, count = _piece(row, first + done, keys - done, _row_bytes(size, bits))
        v, w = _readable(bits, _field(row, V) + head + at, count, size, floats), weights + done * 4
        for i in range(0, whole, wide):
            mix_tile(rows, w, SCORES_ROW, v + i * 4, line, count, out + i * 4, line)
        for i in range(whole, most, LAST_MIXED):
            mix_last(rows, w, SCORES_ROW, v + i * 4, line, count, out + i * 4, line)
        for t in range(rows):
            for i in range(most, size):
                result = load_float(out + t * line + i * 4)
                for j in range(count):
                    weight = load_float(w + t * SCORES_ROW + j * 4)
                    result = fused_one(load_float(v + j * line + i * 4), weight, result)
                store_float(out + t * line + i * 4, result)
        done += count


@linked
def exponentials(at: int, count: int, scale: Any) -> Any:
    """x [count] = e^(scale x - peak), in place; and the peak, which is the highest scale x, and the sum.

    Behind x, up to a multiple of 16, anything may be overwritten.
    """
    whole, end = count // 16 * 16, (count + 15) // 16 * 16
    for i in range(0, whole, 16):
        store_floats(at + i * 4, multiply(load_sixteen(at + i * 4), splat(scale)))
    for i in range(whole, count):
        store_float(at + i * 4, load_float(at + i * 4) * scale)
    for i in range(count, end):
        store_float(at + i * 4, np.float32(-np.inf))
    highest, sums = splat(np.float32(-np.inf)), no_sixteen()
    for i in range(0, end, 16):
        highest = larger(highest, load_sixteen(at + i * 4))
    peak = largest(highest)
    for i in range(0, end, 16):
        each = exponential(add(load_sixteen(at + i * 4), splat(-peak)))
        store_floats(at + i * 4, each)
        sums = add(sums, each)
    return peak, summed(sums)


@linked
def _pack(rows: int, count: int, q: int, q_row: int, size: int, panel: int) -> None:
    """Queries as `multiply_tile` takes them, filled up with zeros."""
    for t in range(rows):
        for step in range(size // LANES):
            eight = load_eight(q + min(t, count - 1) * q_row + step * 32)
            store_floats(panel + (step * rows + t) * 32, multiply(eight, splat_eight(np.float32(t < count))))


@linked
def _attend_block(
    rows: int,
    count: int,
    panel: int,
    q: int,
    q_row: int,
    row: int,
    head: int,
    seen: int,
    seen_row: int,
    start: int,
    stop: int,
    size: int,
    scale: Any,
    scores: int,
    floats: int,
    out: int,
) -> None:
    """Of several queries of a head, or of heads with the same keys, what the keys from `start` to `stop` give.

    rows: of the panel, of which `count` are queries. out: [rows, size] sums of values, weighted by
    e^(scale q k - peak), [rows] peaks, and [rows] sums of these weights, 0 where a query sees none of the keys. A load
    of a key or a value serves all queries that see it.
    """
    first, last, shared, until = stop, start, start, stop  # keys that some see, and that all see
    for t in range(count):
        oldest = load_integer(seen + t * seen_row)
        begin, end = max(start, oldest), min(stop, oldest + load_integer(seen + t * seen_row + 8))
        first, last = min(first, begin), max(last, end)
        shared, until = max(shared, begin), min(until, end)
    until = max(shared, until)
    for i in range(rows * size):
        store_float(out + i * 4, np.float32(0))
    if last > first:
        _score(rows, count, panel, q, q_row, row, head, first, last - first, size, floats, scores)
    peaks = out + rows * size * 4
    for t in range(count):
        oldest, peak, total = load_integer(seen + t * seen_row), np.float32(-np.inf), np.float32(0)
        begin, end = max(start, oldest), min(stop, oldest + load_integer(seen + t * seen_row + 8))
        if begin < end:
            own = scores + t * SCORES_ROW + (begin - first) * 4
            peak, total = exponentials(own, end - begin, scale)
            _mix(1, own, row, head, begin, max(0, min(shared, end) - begin), size, floats, out + t * size * 4)
        store_float(peaks + t * 4, peak)
        store_float(peaks + (rows + t) * 4, total)
    _mix(rows, scores + (shared - first) * 4, row, head, shared, until - shared, size, floats, out)
    for t in range(count):
        oldest = load_integer(seen + t * seen_row)
        begin, end = max(until, oldest), min(stop, oldest + load_integer(seen + t * seen_row + 8))
        own = scores + t * SCORES_ROW + (begin - first) * 4
        _mix(1, own, row, head, begin, max(0, end - begin), size, floats, out + t * size * 4)


@linked
def _join(out: int, size: int, peak: Any, total: Any, part: int, part_peak: Any, part_total: Any) -> Any:
    """Add what a further block of keys gives: out [size], and the total that it is to be divided by."""
    if part_total == 0:
        return peak, total
    if total == 0:
        for i in range(size):
            store_float(out + i * 4, load_float(part + i * 4))
        return part_peak, part_total
    highest = max(peak, part_peak)
    before, now = lane(exponential(splat(peak - highest)), 0), lane(exponential(splat(part_peak - highest)), 0)
    for i in range(size):
        so_far = load_float(out + i * 4) * before
        store_float(out + i * 4, fused_one(load_float(part + i * 4), now, so_far))
    return highest, fused_one(part_total, now, total * before)


@linked
def _divide(out: int, size: int, total: Any) -> None:
    for i in range(size):
        store_float(out + i * 4, load_float(out + i * 4) / total)


@linked
def _attend_panel(
    rows: int, q: int, q_row: int, row: int, head: int, seen: int, size: int, scale: Any, out: int, out_row: int
) -> None:
    """Several queries of a head, block by block."""
    first, last = load_integer(seen), load_integer(seen) + load_integer(seen + 8)
    for t in range(1, rows):
        oldest = load_integer(seen + t * 16)
        first, last = min(first, oldest), max(last, oldest + load_integer(seen + t * 16 + 8))
    panel_size, scores_size, part_size = rows * size, rows * SCORES_ROW // 4, rows * (size + 2)
    floats_size = 0 if _field(row, BITS) == 32 else KEYS * size
    scratch = np.empty(panel_size + scores_size + part_size + 2 * rows + floats_size, np.float32)
    panel = address(scratch)
    scores = panel + panel_size * 4
    part = scores + scores_size * 4
    peaks = part + part_size * 4
    floats = peaks + 2 * rows * 4
    _pack(rows, rows, q, q_row, size, panel)
    for i in range(2 * rows):
        store_float(peaks + i * 4, np.float32(0))
    for block in range(first // KEYS, (last + KEYS - 1) // KEYS):
        start, stop = max(first, block * KEYS), min(last, (block + 1) * KEYS)
        _attend_block(rows, rows, panel, q, q_row, row, head, seen, 16, start, stop, size, scale, scores, floats, part)
        for t in range(rows):
            own, of_part = peaks + t * 8, part + (rows * size + t) * 4
            peak, total = _join(
                out + t * out_row,
                size,
                load_float(own),
                load_float(own + 4),
                part + t * size * 4,
                load_float(of_part),
                load_float(of_part + rows * 4),
            )
            store_float(own, peak)
            store_float(own + 4, total)
    for t in range(rows):
        _divide(out + t * out_row, size, load_float(peaks + t * 8 + 4))
    keep(scratch, scratch)


@linked
def _heads_together(h: int, group: int) -> Any:
    """How many heads from h on share their keys, and fit into a panel."""
    return min(X_ROWS, group - h % group)


@linked
def _rows_for(count: int) -> Any:
    """Of the smallest panel that takes so many."""
    rows = X_ROWS
    for size in PANELS:
        rows = size if size >= count else rows
    return rows


@linked
def _attend_one(x: int, h: int, row: int, seen: int, block: int, size: int, scale: Any, group: int, part: int) -> None:
    """One token's heads from h on, which share their keys: what a block of these gives."""
    count = _heads_together(h, group)
    rows = _rows_for(count)
    panel_size, scores_size = rows * size, rows * SCORES_ROW // 4
    floats_size = 0 if _field(row, BITS) == 32 else KEYS * size
    scratch = np.empty(panel_size + scores_size + floats_size, np.float32)
    panel, q, head = address(scratch), x + h * size * 4, h // group * _field(row, STRIDE)
    scores = panel + panel_size * 4
    floats = scores + scores_size * 4
    oldest = load_integer(seen)
    start, stop = max(oldest, block * KEYS), min(oldest + load_integer(seen + 8), (block + 1) * KEYS)
    _pack(rows, count, q, size * 4, size, panel)
    _attend_block(rows, count, panel, q, size * 4, row, head, seen, 0, start, stop, size, scale, scores, floats, part)
    keep(scratch, scratch)


@linked
def _join_parts(h: int, group: int, size: int, blocks: int, made: int, made_row: int, out: int) -> None:
    """What all blocks give for a token's heads from h on."""
    count = _heads_together(h, group)
    rows = _rows_for(count)
    for i in range(count):
        own, peak, total = out + (h + i) * size * 4, np.float32(0), np.float32(0)
        for n in range(blocks):
            part = made + n * made_row
            of_part = part + (rows * size + i) * 4
            peak, total = _join(
                own, size, peak, total, part + i * size * 4, load_float(of_part), load_float(of_part + rows * 4)
            )
        _divide(own, size, total)


@linked
def _blocks_of(seen: int) -> Any:
    """The first block of the keys that a query sees, and how many blocks."""
    oldest = load_integer(seen)
    first = oldest // KEYS
    return first, (oldest + load_integer(seen + 8) + KEYS - 1) // KEYS - first


@linked
def _is_single(at: int) -> Any:
    """Whether a part is all of a row, and a single token."""
    return _field(at, TOKENS_END) - _field(at, TOKENS) == 1 and _field(at, PART_ROWS) == 1


@linked
def _plan(parts: int, part_count: int, seen: int, heads: int, kv_heads: int) -> Any:
    """The work, in items: a part's head; or of a part that is a single token, heads with the same keys and a block.

    Of each: the part, the head, the block (-1: all), and where what comes of a block goes.
    """
    group, items, slots = heads // kv_heads, 0, 0
    panels = (group + X_ROWS - 1) // X_ROWS * kv_heads
    for p in range(part_count):
        part = parts + p * PART_COLUMNS * 8
        if _is_single(part):
            _, blocks = _blocks_of(seen + _field(part, TOKENS) * 16)
            items, slots = items + panels * blocks, slots + panels * blocks
        else:
            items += heads
    plan, n, slot, p = np.empty((items, 4), np.int64), 0, 0, 0
    while p < part_count:
        part = parts + p * PART_COLUMNS * 8
        if _is_single(part):
            first, blocks = _blocks_of(seen + _field(part, TOKENS) * 16)
            for kv in range(kv_heads):
                for h in range(kv * group, (kv + 1) * group, X_ROWS):
                    for block in range(first, first + blocks):
                        plan[n, 0], plan[n, 1], plan[n, 2], plan[n, 3] = p, h, block, slot
                        n, slot = n + 1, slot + 1
            p += 1
            continue
        # A row after the other, each a head after the other: its keys stay in the processor's cache. The last queries
        # of a prompt see the most keys, and no thread should have them all: first, last, second, ...
        count = _field(part, PART_ROWS)
        for h in range(heads):
            for i in range(count):
                plan[n, 0], plan[n, 1], plan[n, 2], plan[n, 3] = p + (count - 1 - i // 2 if i % 2 else i // 2), h, -1, 0
                n += 1
        p += count
    return plan, slots


@shared
def _attend_some(
    item: int,
    plan: int,
    made: int,
    made_row: int,
    group: int,
    size: int,
    scale: Any,
    x: int,
    x_row: int,
    table: int,
    parts: int,
    seen: int,
    out: int,
    out_row: int,
) -> None:
    """An item of the plan."""
    todo = plan + item * 32
    of, h, block = parts + load_integer(todo) * PART_COLUMNS * 8, load_integer(todo + 8), load_integer(todo + 16)
    line, stop, row = _field(of, TOKENS), _field(of, TOKENS_END), table + _field(of, PART) * COLUMNS * 8
    if block >= 0:
        to = made + load_integer(todo + 24) * made_row
        _attend_one(x + line * x_row, h, row, seen + line * 16, block, size, scale, group, to)
    while block < 0 and line < stop:
        count = panel_rows(stop - line)
        q, o = x + line * x_row + h * size * 4, out + line * out_row + h * size * 4
        head = h // group * _field(row, STRIDE)
        _attend_panel(count, q, x_row, row, head, seen + line * 16, size, scale, o, out_row)
        line += count


@linked
def _join_at(
    item: int, plan: int, made: int, made_row: int, group: int, size: int, parts: int, seen: int, out: int, out_row: int
) -> None:
    """At the item of a token's first block: all of its blocks."""
    todo = plan + item * 32
    h, block = load_integer(todo + 8), load_integer(todo + 16)
    if block >= 0:
        line = _field(parts + load_integer(todo) * PART_COLUMNS * 8, TOKENS)
        first, blocks = _blocks_of(seen + line * 16)
        if block == first:
            slot = made + load_integer(todo + 24) * made_row
            _join_parts(h, group, size, blocks, slot, made_row, out + line * out_row)


@shared
def _join_some(
    item: int, plan: int, made: int, made_row: int, group: int, size: int, parts: int, seen: int, out: int, out_row: int
) -> None:
    _join_at(item, plan, made, made_row, group, size, parts, seen, out, out_row)


@unit(ATTEND)
def attend(
    heads: int,
    kv_heads: int,
    size: int,
    scale: float,
    x: int,
    x_row: int,
    table: int,
    parts: int,
    part_count: int,
    seen: int,
    out: int,
) -> None:
    """out [Q, heads size]: each head of each query, which are the first of each token's line of x.

    table: where each row's keys and values lie. parts: as `parts_of` has them. seen: of each query, the position of its
    first key and how many keys.
    """
    group, out_row = heads // kv_heads, heads * size * 4
    items, slots = _plan(parts, part_count, seen, heads, kv_heads)
    made_row = _rows_for(min(group, X_ROWS)) * (size + 2) * 4
    results = np.empty(slots * made_row // 4, np.float32)
    plan, made, count = address(items), address(results), items.shape[0]
    narrow = np.float32(scale)
    _attend_some(count, plan, made, made_row, group, size, narrow, x, x_row, table, parts, seen, out, out_row)
    if slots < MANY:
        for item in range(count):
            _join_at(item, plan, made, made_row, group, size, parts, seen, out, out_row)
    else:
        _join_some(count, plan, made, made_row, group, size, parts, seen, out, out_row)
    keep(items, results)


@unit(WEIGH)
def weigh(
    heads: int,
    kv_heads: int,
    size: int,
    scale: float,
    x: int,
    x_row: int,
    table: int,
    parts: int,
    part_count: int,
    seen: int,
    out: int,
    keys: int,
) -> None:
    """out [Q, heads keys]: what `attend` mixes the values of all keys with, which are those of the first positions."""
    group, narrow, spare = heads // kv_heads, np.float32(scale), np.empty(KEYS * size, np.float32)
    scores = np.empty(keys + 16 + 2 * KEYS, np.float32)
    for p in range(part_count):
        part = parts + p * PART_COLUMNS * 8
        row = table + _field(part, PART) * COLUMNS * 8
        for t in range(_field(part, TOKENS), _field(part, TOKENS_END)):
            first, count = load_integer(seen + t * 16), load_integer(seen + t * 16 + 8)
            for h in range(heads):
                q, head, line = x + t * x_row + h * size * 4, h // group * _field(row, STRIDE), (t * heads + h) * keys
                for done in range(0, count, KEYS):
                    now, to = min(KEYS, count - done), address(scores) + done * 4
                    _score(1, 1, q, q, 0, row, head, first + done, now, size, address(spare), to)
                _, total = exponentials(address(scores), count, narrow)
                for j in range(keys):
                    weight = scores[j - first] / total if first <= j < first + count else np.float32(0)
                    store_float(out + (line + j) * 4, weight)
    keep(spare, scores)


@linked
def write(row: int, position: int, kv: int, kv_heads: int, size: int) -> None:
    """Put a token's keys and values, one head after the other, where its position lies."""
    bits = _field(row, BITS)
    at, _ = _piece(row, position, 1, _row_bytes(size, bits))
    for h in range(kv_heads):
        to = h * _field(row, STRIDE) + at
        _write_one(kv + h * size * 4, _field(row, K) + to, size, bits)
        _write_one(kv + (kv_heads + h) * size * 4, _field(row, V) + to, size, bits)


@linked
def _write_one(x: int, at: int, size: int, bits: int) -> None:
    """One head's vector."""
    if bits == 32:
        for i in range(size):
            store_float(at + i * 4, load_float(x + i * 4))
    else:
        for first in range(0, size, GROUP):
            _encode(x + first * 4, min(GROUP, size - first), at + first, at + size + first // GROUP * 2)


@linked
def _encode(x: int, count: int, at: int, scale_at: int) -> None:
    """A group in 8 bits, with the very bits that `infer.cache.int8.encode` gives it."""
    peak = np.float32(0)
    for i in range(count):
        each = abs(load_float(x + i * 4))
        peak = each if each > peak or each != each else peak  # a NaN stays
    step = np.float32(np.nan) if peak == np.inf else np.float32(peak / np.float32(127))
    step = np.float32(65504) if step > 65504 else step
    store_as_half(scale_at, step)
    if load_half(scale_at) < step:
        raise_half(scale_at)
    scale = load_half(scale_at)
    for i in range(count):
        # Of a group that is 0, or not finite, the scale alone says so.
        code = np.float32(np.rint(load_float(x + i * 4) / scale)) if scale > 0 else np.float32(0)
        store_byte(at + i, np.int64(min(max(code, np.float32(-127)), np.float32(127))))
