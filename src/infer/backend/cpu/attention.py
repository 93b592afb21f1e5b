"""Keys and values in a cache, and attention over them.

Each query goes through its keys in the order of their positions: its output depends on the query and on those keys, not
on the queries beside it nor on where a key is stored. Keys come in blocks of KEY_BLOCK positions: each block has a
softmax of its own, and these are merged in order (as in FlashAttention). So several threads can share the keys of a
query, and heads with the same keys read them once. Keys are contiguous within a page, or up to the end of a ring. As
everywhere in these kernels, sums have one order, and nothing is compiled with `fastmath`.

All arguments are addresses, numbers of bytes (`_row`: the stride of rows) or counts.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from infer.backend.cpu.jit import address, call_at, inline, keep_alive, kernel
from infer.backend.cpu.simd import (
    add,
    divide,
    exp,
    fma_f32,
    lane,
    load_f16,
    load_f32,
    load_f32x8,
    load_f32x16,
    load_i8,
    load_i8x8,
    load_i64,
    maximum,
    multiply,
    next_f16,
    prefetch,
    reduce_add,
    reduce_max,
    splat_x8,
    splat_x16,
    store,
    store_f16,
    store_i8,
    typed_intrinsic,
    zeros_x16,
)
from infer.backend.cpu.threads import parallel_for
from infer.backend.cpu.tile import (
    LANES,
    PANELS,
    PREFETCH_KEYS_BYTES,
    PV_COLUMNS,
    PV_FEW_COLUMNS,
    PV_FEW_ROWS,
    PV_LAST_COLUMNS,
    W_ROWS,
    X_ROWS,
    gemm_tile,
    panel_rows,
    pv_last_tile,
    pv_tile,
)
from infer.cache.table import BITS, COLUMNS, PAGE_BYTES, PAGE_TABLE, SLOTS, STRIDE, K, V
from infer.nn.schemes import GROUP

KEY_BLOCK = 256  # positions of a block of keys
SCORES_ROW = (KEY_BLOCK + 16) * 4  # bytes: the scores of a block, padded to a multiple of 16
PARALLEL_SLOTS = 64  # from so many results of blocks on, several threads merge them
QUERY_ROW, ROW_BLOCKS, FIRST_QUERY, QUERY_END = 0, 2, 3, 4  # columns of `query_blocks`
QUERY_COLUMNS = 5
ATTEND = types.void(*[types.int64] * 3, *[types.float64] * 2, *[types.int64] * 8)
WEIGHTS = types.void(*ATTEND.args, types.int64)


@typed_intrinsic
def attend_at(
    context: Any,
    code: Any,
    heads: Any,
    kv_heads: Any,
    size: Any,
    scale: Any,
    softcap: Any,
    sinks: Any,
    x: Any,
    x_row: Any,
    table: Any,
    queries: Any,
    num_queries: Any,
    visible: Any,
    out: Any,
) -> Any:
    """Calls the kernel `attend` at an address."""
    return types.void(types.int64, *ATTEND.args), call_at


@inline
def _field(row: int, column: int) -> Any:
    """A column of a row of a table."""
    return load_i64(row + column * 8)


@inline(forceinline=True)
def _row_bytes(head_dim: int, bits: int) -> int:
    """Bytes of a key or value; scales follow an 8-bit one, as in `infer.cache.int8`."""
    return head_dim * 4 if bits == 32 else head_dim + 2 * ((head_dim + GROUP - 1) // GROUP)


@inline
def _slots_at(row: int, position: int, count: int, size: int) -> Any:
    """The offset of a position in bytes from the first of its head, and how many of `count` positions are contiguous.

    row: of the table. size: bytes of a position.
    """
    slots, pages = _field(row, SLOTS), _field(row, PAGE_TABLE)
    slot = position % slots
    at, contiguous = slot * size, slots - slot
    if pages != 0:
        listed = pages + position // slots * 8
        number = load_i64(listed)
        at += number * _field(row, PAGE_BYTES)
        while contiguous < count and load_i64(listed + 8) == number + 1:  # the next page is adjacent
            number, listed, contiguous = number + 1, listed + 8, contiguous + slots
    return at, min(count, contiguous)


@inline
def _as_floats(bits: int, at: int, count: int, size: int, floats: int) -> Any:
    """The address of `count` keys or values as floats: `at`, or `floats`, where 8-bit ones are dequantized."""
    if bits == 32:
        return at
    row_bytes = _row_bytes(size, bits)
    for j in range(count):
        codes, scales, out = at + j * row_bytes, at + j * row_bytes + size, floats + j * size * 4
        for first in range(0, size, GROUP):
            last, scale = min(first + GROUP, size), load_f16(scales + first // GROUP * 2)
            full = first + (last - first) // 8 * 8
            for i in range(first, full, 8):
                store(out + i * 4, multiply(load_i8x8(codes + i), splat_x8(scale)))
            for i in range(full, last):
                store(out + i * 4, np.float32(load_i8(codes + i)) * scale)
    return floats


@inline
def _score_contiguous(
    rows: int, count: int, panel: int, q: int, q_row: int, size: int, k: int, keys: int, out: int
) -> None:
    """out [rows, keys] = q k, summed as in GEMM. panel: the packed queries, `count` of its rows."""
    steps, row = size // LANES, size * 4
    for j in range(0, keys, W_ROWS):
        if steps == 0:
            for t in range(rows):
                for i in range(j, min(j + W_ROWS, keys)):
                    store(out + t * SCORES_ROW + i * 4, np.float32(0))
        elif keys >= W_ROWS:  # the last tile may overlap the one before it
            at = min(j, keys - W_ROWS)
            if PREFETCH_KEYS_BYTES > 0:
                for line in range(0, W_ROWS * row, 64):
                    prefetch(k + at * row + PREFETCH_KEYS_BYTES + line)
            gemm_tile(rows, k + at * row, row, 32, panel, steps, 0, 1, 1, out + at * 4, SCORES_ROW)
        else:
            spare = np.empty(X_ROWS * W_ROWS, np.float32)
            for i in range(keys):
                gemm_tile(rows, k + i * row, 0, 32, panel, steps, 0, 1, 1, address(spare), W_ROWS * 4)
                for t in range(rows):
                    store(out + t * SCORES_ROW + i * 4, spare[t * W_ROWS])
            keep_alive(spare)
    if steps * LANES < size:
        for t in range(count):
            for j in range(keys):
                result = load_f32(out + t * SCORES_ROW + j * 4)
                for i in range(steps * LANES, size):
                    result = fma_f32(load_f32(k + j * row + i * 4), load_f32(q + t * q_row + i * 4), result)
                store(out + t * SCORES_ROW + j * 4, result)


@inline
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
    """out [rows, keys] = q k, of up to KEY_BLOCK keys from position `first` on. head: bytes from the first head."""
    done, bits = 0, _field(row, BITS)
    while done < keys:
        at, contiguous = _slots_at(row, first + done, keys - done, _row_bytes(size, bits))
        k = _as_floats(bits, _field(row, K) + head + at, contiguous, size, floats)
        _score_contiguous(rows, count, panel, q, q_row, size, k, contiguous, out + done * 4)
        done += contiguous


@inline
def _add_values(
    rows: int, weights: int, row: int, head: int, first: int, keys: int, size: int, floats: int, out: int
) -> None:
    """out [rows, size] += weights [rows, keys] values, with the values from position `first` on, in order."""
    done, bits, line = 0, _field(row, BITS), size * 4
    wide = PV_FEW_COLUMNS if rows <= PV_FEW_ROWS else PV_COLUMNS
    full, most = size // wide * wide, size // PV_LAST_COLUMNS * PV_LAST_COLUMNS
    while done < keys:
        at, count = _slots_at(row, first + done, keys - done, _row_bytes(size, bits))
        v, w = _as_floats(bits, _field(row, V) + head + at, count, size, floats), weights + done * 4
        for i in range(0, full, wide):
            pv_tile(rows, w, SCORES_ROW, v + i * 4, line, count, out + i * 4, line)
        for i in range(full, most, PV_LAST_COLUMNS):
            pv_last_tile(rows, w, SCORES_ROW, v + i * 4, line, count, out + i * 4, line)
        for t in range(rows):
            for i in range(most, size):
                result = load_f32(out + t * line + i * 4)
                for j in range(count):
                    weight = load_f32(w + t * SCORES_ROW + j * 4)
                    result = fma_f32(load_f32(v + j * line + i * 4), weight, result)
                store(out + t * line + i * 4, result)
        done += count


@inline
def exp_scores(at: int, count: int, scale: Any, softcap: Any) -> Any:
    """x [count] = e^(score - peak), in place. Returns the peak, which is the highest score, and the sum.

    A score is scale x, or with a softcap: softcap tanh(scale x / softcap). Memory after x, up to a multiple of 16, may
    be overwritten.
    """
    full, end = count // 16 * 16, (count + 15) // 16 * 16
    for i in range(0, full, 16):
        store(at + i * 4, multiply(load_f32x16(at + i * 4), splat_x16(scale)))
    for i in range(full, count):
        store(at + i * 4, load_f32(at + i * 4) * scale)
    if softcap != 0:
        cap_scores(at, end, softcap)
    for i in range(count, end):
        store(at + i * 4, np.float32(-np.inf))
    highest, sums = splat_x16(np.float32(-np.inf)), zeros_x16()
    for i in range(0, end, 16):
        highest = maximum(highest, load_f32x16(at + i * 4))
    peak = reduce_max(highest)
    for i in range(0, end, 16):
        each = exp(add(load_f32x16(at + i * 4), splat_x16(-peak)))
        store(at + i * 4, each)
        sums = add(sums, each)
    return peak, reduce_add(sums)


@inline
def cap_scores(at: int, end: int, softcap: Any) -> None:
    """x [end] = softcap tanh(x / softcap), in place; end: a multiple of 16."""
    one, twice, cap = splat_x16(np.float32(1)), splat_x16(np.float32(2) / softcap), splat_x16(softcap)
    minus_two = splat_x16(np.float32(-2))
    for i in range(0, end, 16):
        power = exp(multiply(load_f32x16(at + i * 4), twice))
        store(at + i * 4, multiply(cap, add(one, divide(minus_two, add(one, power)))))


@inline
def _pack(rows: int, count: int, q: int, q_row: int, size: int, panel: int) -> None:
    """Packs queries for `gemm_tile`, padded with zeros."""
    for t in range(rows):
        for step in range(size // LANES):
            eight = load_f32x8(q + min(t, count - 1) * q_row + step * 32)
            store(panel + (step * rows + t) * 32, multiply(eight, splat_x8(np.float32(t < count))))


@inline
def _attend_block(
    rows: int,
    count: int,
    panel: int,
    q: int,
    q_row: int,
    row: int,
    head: int,
    visible: int,
    visible_row: int,
    start: int,
    stop: int,
    size: int,
    scale: Any,
    softcap: Any,
    scores: int,
    floats: int,
    out: int,
) -> None:
    """Several queries of a head, or of heads with the same keys, over the keys from `start` to `stop`.

    rows: of the panel; `count` of them are queries. out: [rows, size] sums of values, weighted by e^(scale q k - peak),
    [rows] peaks, and [rows] sums of these weights, 0 if none of the keys is visible to a query. A key or value is
    loaded once for all queries to which it is visible.
    """
    first, last, shared, until = stop, start, start, stop  # keys visible to some, and to all
    for t in range(count):
        oldest = load_i64(visible + t * visible_row)
        begin, end = max(start, oldest), min(stop, oldest + load_i64(visible + t * visible_row + 8))
        first, last = min(first, begin), max(last, end)
        shared, until = max(shared, begin), min(until, end)
    until = max(shared, until)
    for i in range(rows * size):
        store(out + i * 4, np.float32(0))
    if last > first:
        _score(rows, count, panel, q, q_row, row, head, first, last - first, size, floats, scores)
    peaks = out + rows * size * 4
    for t in range(count):
        oldest, peak, total = load_i64(visible + t * visible_row), np.float32(-np.inf), np.float32(0)
        begin, end = max(start, oldest), min(stop, oldest + load_i64(visible + t * visible_row + 8))
        if begin < end:
            own = scores + t * SCORES_ROW + (begin - first) * 4
            peak, total = exp_scores(own, end - begin, scale, softcap)
            _add_values(1, own, row, head, begin, max(0, min(shared, end) - begin), size, floats, out + t * size * 4)
        store(peaks + t * 4, peak)
        store(peaks + (rows + t) * 4, total)
    _add_values(rows, scores + (shared - first) * 4, row, head, shared, until - shared, size, floats, out)
    for t in range(count):
        oldest = load_i64(visible + t * visible_row)
        begin, end = max(until, oldest), min(stop, oldest + load_i64(visible + t * visible_row + 8))
        own = scores + t * SCORES_ROW + (begin - first) * 4
        _add_values(1, own, row, head, begin, max(0, end - begin), size, floats, out + t * size * 4)


@inline
def _merge(out: int, size: int, peak: Any, total: Any, part: int, part_peak: Any, part_total: Any) -> Any:
    """Adds the next block of keys (`part`) to out [size]. Returns the peak, and the total to divide out by."""
    if part_total == 0:
        return peak, total
    if total == 0:
        for i in range(size):
            store(out + i * 4, load_f32(part + i * 4))
        return part_peak, part_total
    highest = max(peak, part_peak)
    before, now = lane(exp(splat_x16(peak - highest)), 0), lane(exp(splat_x16(part_peak - highest)), 0)
    for i in range(size):
        so_far = load_f32(out + i * 4) * before
        store(out + i * 4, fma_f32(load_f32(part + i * 4), now, so_far))
    return highest, fma_f32(part_total, now, total * before)


@inline
def _with_sink(peak: Any, total: Any, sink: int) -> Any:
    """What e^(score - peak) is multiplied by, and divided by, if a sink has a share, too. sink: an address; 0: none."""
    if sink == 0:
        return np.float32(1), total
    highest = max(peak, load_f32(sink))
    kept, share = lane(exp(splat_x16(peak - highest)), 0), lane(exp(splat_x16(load_f32(sink) - highest)), 0)
    return kept, fma_f32(total, kept, share)


@inline
def _divide(out: int, size: int, peak: Any, total: Any, sink: int) -> None:
    kept, whole = _with_sink(peak, total, sink)
    for i in range(size):
        store(out + i * 4, load_f32(out + i * 4) * kept / whole)


@inline
def _attend_panel(
    rows: int,
    q: int,
    q_row: int,
    row: int,
    head: int,
    visible: int,
    size: int,
    scale: Any,
    softcap: Any,
    sink: int,
    out: int,
    out_row: int,
) -> None:
    """Several queries of a head, over all blocks of keys."""
    first, last = load_i64(visible), load_i64(visible) + load_i64(visible + 8)
    for t in range(1, rows):
        oldest = load_i64(visible + t * 16)
        first, last = min(first, oldest), max(last, oldest + load_i64(visible + t * 16 + 8))
    panel_size, scores_size, part_size = rows * size, rows * SCORES_ROW // 4, rows * (size + 2)
    floats_size = 0 if _field(row, BITS) == 32 else KEY_BLOCK * size
    scratch = np.empty(panel_size + scores_size + part_size + 2 * rows + floats_size, np.float32)
    panel = address(scratch)
    scores = panel + panel_size * 4
    part = scores + scores_size * 4
    peaks = part + part_size * 4
    floats = peaks + 2 * rows * 4
    _pack(rows, rows, q, q_row, size, panel)
    for i in range(2 * rows):
        store(peaks + i * 4, np.float32(0))
    for block in range(first // KEY_BLOCK, (last + KEY_BLOCK - 1) // KEY_BLOCK):
        start, stop = max(first, block * KEY_BLOCK), min(last, (block + 1) * KEY_BLOCK)
        _attend_block(
            rows, rows, panel, q, q_row, row, head, visible, 16, start, stop, size, scale, softcap, scores, floats, part
        )
        for t in range(rows):
            own, of_part = peaks + t * 8, part + (rows * size + t) * 4
            peak, total = _merge(
                out + t * out_row,
                size,
                load_f32(own),
                load_f32(own + 4),
                part + t * size * 4,
                load_f32(of_part),
                load_f32(of_part + rows * 4),
            )
            store(own, peak)
            store(own + 4, total)
    for t in range(rows):
        _divide(out + t * out_row, size, load_f32(peaks + t * 8), load_f32(peaks + t * 8 + 4), sink)
    keep_alive(scratch)


@inline
def _panel_heads(h: int, group: int) -> Any:
    """How many heads from h on share their keys and fit into a panel."""
    return min(X_ROWS, group - h % group)


@inline
def _panel_for(count: int) -> Any:
    """The rows of the smallest panel for so many queries."""
    rows = X_ROWS
    for size in PANELS:
        rows = size if size >= count else rows
    return rows


@inline
def _attend_token(
    x: int, h: int, row: int, visible: int, block: int, size: int, scale: Any, softcap: Any, group: int, part: int
) -> None:
    """The heads of one token from h on, which share their keys, over a block of keys."""
    count = _panel_heads(h, group)
    rows = _panel_for(count)
    panel_size, scores_size = rows * size, rows * SCORES_ROW // 4
    floats_size = 0 if _field(row, BITS) == 32 else KEY_BLOCK * size
    scratch = np.empty(panel_size + scores_size + floats_size, np.float32)
    panel, q, head = address(scratch), x + h * size * 4, h // group * _field(row, STRIDE)
    scores = panel + panel_size * 4
    floats = scores + scores_size * 4
    oldest = load_i64(visible)
    start, stop = max(oldest, block * KEY_BLOCK), min(oldest + load_i64(visible + 8), (block + 1) * KEY_BLOCK)
    _pack(rows, count, q, size * 4, size, panel)
    _attend_block(
        rows, count, panel, q, size * 4, row, head, visible, 0, start, stop, size, scale, softcap, scores, floats, part
    )
    keep_alive(scratch)


@inline
def _merge_blocks(
    h: int, group: int, size: int, blocks: int, partials: int, partials_row: int, sinks: int, out: int
) -> None:
    """Merges the blocks of keys for the heads of a token from h on."""
    count = _panel_heads(h, group)
    rows = _panel_for(count)
    for i in range(count):
        own, peak, total = out + (h + i) * size * 4, np.float32(0), np.float32(0)
        for n in range(blocks):
            part = partials + n * partials_row
            of_part = part + (rows * size + i) * 4
            peak, total = _merge(
                own, size, peak, total, part + i * size * 4, load_f32(of_part), load_f32(of_part + rows * 4)
            )
        _divide(own, size, peak, total, sinks + (h + i) * 4 if sinks != 0 else 0)


@inline
def _blocks_of(visible: int) -> Any:
    """The first block of keys visible to a query, and how many blocks."""
    oldest = load_i64(visible)
    first = oldest // KEY_BLOCK
    return first, (oldest + load_i64(visible + 8) + KEY_BLOCK - 1) // KEY_BLOCK - first


@inline
def _is_single_token(at: int) -> Any:
    """Whether a query block is a single token, and its row has no other."""
    return _field(at, QUERY_END) - _field(at, FIRST_QUERY) == 1 and _field(at, ROW_BLOCKS) == 1


@inline
def _plan(queries: int, num_queries: int, visible: int, heads: int, kv_heads: int) -> Any:
    """Items of work: a query block and a head; or, for a single token, heads with the same keys and a block of keys.

    Columns: the query block, the head, the block of keys (-1: all), and the slot for its result.
    """
    group, items, slots = heads // kv_heads, 0, 0
    panels = (group + X_ROWS - 1) // X_ROWS * kv_heads
    for p in range(num_queries):
        part = queries + p * QUERY_COLUMNS * 8
        if _is_single_token(part):
            _, blocks = _blocks_of(visible + _field(part, FIRST_QUERY) * 16)
            items, slots = items + panels * blocks, slots + panels * blocks
        else:
            items += heads
    plan, n, slot, p = np.empty((items, 4), np.int64), 0, 0, 0
    while p < num_queries:
        part = queries + p * QUERY_COLUMNS * 8
        if _is_single_token(part):
            first, blocks = _blocks_of(visible + _field(part, FIRST_QUERY) * 16)
            for kv in range(kv_heads):
                for h in range(kv * group, (kv + 1) * group, X_ROWS):
                    for block in range(first, first + blocks):
                        plan[n, 0], plan[n, 1], plan[n, 2], plan[n, 3] = p, h, block, slot
                        n, slot = n + 1, slot + 1
            p += 1
            continue
        # Row by row and head by head, so that keys stay in the processor's cache. The last queries of a prompt have the
        # most visible keys, and no thread should have them all: first, last, second, ...
        count = _field(part, ROW_BLOCKS)
        for h in range(heads):
            for i in range(count):
                plan[n, 0], plan[n, 1], plan[n, 2], plan[n, 3] = p + (count - 1 - i // 2 if i % 2 else i // 2), h, -1, 0
                n += 1
        p += count
    return plan, slots


@parallel_for
def _attend_items(
    item: int,
    plan: int,
    partials: int,
    partials_row: int,
    group: int,
    size: int,
    scale: Any,
    softcap: Any,
    sinks: int,
    x: int,
    x_row: int,
    table: int,
    queries: int,
    visible: int,
    out: int,
    out_row: int,
) -> None:
    """An item of the plan."""
    todo = plan + item * 32
    of, h, block = queries + load_i64(todo) * QUERY_COLUMNS * 8, load_i64(todo + 8), load_i64(todo + 16)
    line, stop, row = _field(of, FIRST_QUERY), _field(of, QUERY_END), table + _field(of, QUERY_ROW) * COLUMNS * 8
    if block >= 0:
        to = partials + load_i64(todo + 24) * partials_row
        _attend_token(x + line * x_row, h, row, visible + line * 16, block, size, scale, softcap, group, to)
    while block < 0 and line < stop:
        count = panel_rows(stop - line)
        q, o = x + line * x_row + h * size * 4, out + line * out_row + h * size * 4
        head, sink = h // group * _field(row, STRIDE), sinks + h * 4 if sinks != 0 else 0
        _attend_panel(count, q, x_row, row, head, visible + line * 16, size, scale, softcap, sink, o, out_row)
        line += count


@inline
def _merge_item(
    item: int,
    plan: int,
    partials: int,
    partials_row: int,
    group: int,
    size: int,
    sinks: int,
    queries: int,
    visible: int,
    out: int,
    out_row: int,
) -> None:
    """The item of a token's first block of keys merges all of them."""
    todo = plan + item * 32
    h, block = load_i64(todo + 8), load_i64(todo + 16)
    if block >= 0:
        line = _field(queries + load_i64(todo) * QUERY_COLUMNS * 8, FIRST_QUERY)
        first, blocks = _blocks_of(visible + line * 16)
        if block == first:
            slot = partials + load_i64(todo + 24) * partials_row
            _merge_blocks(h, group, size, blocks, slot, partials_row, sinks, out + line * out_row)


_merge_items = parallel_for(_merge_item)


@kernel(ATTEND)
def attend(
    heads: int,
    kv_heads: int,
    size: int,
    scale: float,
    softcap: float,
    sinks: int,
    x: int,
    x_row: int,
    table: int,
    queries: int,
    num_queries: int,
    visible: int,
    out: int,
) -> None:
    """out [Q, heads size]: attention of each head of each query. The queries come first in the rows of x.

    table: the storage of keys and values of each row. queries: from `query_blocks`. visible: the position of the first
    key of each query, and how many keys. softcap, sinks: see `softmax_attention`; 0: none.
    """
    group, out_row = heads // kv_heads, heads * size * 4
    items, slots = _plan(queries, num_queries, visible, heads, kv_heads)
    partials_row = _panel_for(min(group, X_ROWS)) * (size + 2) * 4
    results = np.empty(slots * partials_row // 4, np.float32)
    plan, partials, count = address(items), address(results), items.shape[0]
    _attend_items(
        count,
        plan,
        partials,
        partials_row,
        group,
        size,
        np.float32(scale),
        np.float32(softcap),
        sinks,
        x,
        x_row,
        table,
        queries,
        visible,
        out,
        out_row,
    )
    if slots < PARALLEL_SLOTS:
        for item in range(count):
            _merge_item(item, plan, partials, partials_row, group, size, sinks, queries, visible, out, out_row)
    else:
        _merge_items(count, plan, partials, partials_row, group, size, sinks, queries, visible, out, out_row)
    keep_alive(items, results)


@kernel(WEIGHTS)
def attention_weights(
    heads: int,
    kv_heads: int,
    size: int,
    scale: float,
    softcap: float,
    sinks: int,
    x: int,
    x_row: int,
    table: int,
    queries: int,
    num_queries: int,
    visible: int,
    out: int,
    keys: int,
) -> None:
    """out [Q, heads keys]: the weights by which `attend` sums the values, of keys at positions 0 to keys - 1."""
    group, spare = heads // kv_heads, np.empty(KEY_BLOCK * size, np.float32)
    scores = np.empty(keys + 16 + 2 * KEY_BLOCK, np.float32)
    for p in range(num_queries):
        part = queries + p * QUERY_COLUMNS * 8
        row = table + _field(part, QUERY_ROW) * COLUMNS * 8
        for t in range(_field(part, FIRST_QUERY), _field(part, QUERY_END)):
            first, count = load_i64(visible + t * 16), load_i64(visible + t * 16 + 8)
            for h in range(heads):
                q, head, line = x + t * x_row + h * size * 4, h // group * _field(row, STRIDE), (t * heads + h) * keys
                for done in range(0, count, KEY_BLOCK):
                    now, to = min(KEY_BLOCK, count - done), address(scores) + done * 4
                    _score(1, 1, q, q, 0, row, head, first + done, now, size, address(spare), to)
                peak, total = exp_scores(address(scores), count, np.float32(scale), np.float32(softcap))
                kept, whole = _with_sink(peak, total, sinks + h * 4 if sinks != 0 else 0)
                for j in range(keys):
                    weight = scores[j - first] * kept / whole if first <= j < first + count else np.float32(0)
                    store(out + (line + j) * 4, weight)
    keep_alive(spare, scores)


@inline
def write(row: int, position: int, kv: int, kv_heads: int, size: int) -> None:
    """Stores the keys and values of a token, which come head by head, at its position."""
    bits = _field(row, BITS)
    at, _ = _slots_at(row, position, 1, _row_bytes(size, bits))
    for h in range(kv_heads):
        to = h * _field(row, STRIDE) + at
        _write_one(kv + h * size * 4, _field(row, K) + to, size, bits)
        _write_one(kv + (kv_heads + h) * size * 4, _field(row, V) + to, size, bits)


@inline
def _write_one(x: int, at: int, size: int, bits: int) -> None:
    """The key or value of one head."""
    if bits == 32:
        for i in range(size):
            store(at + i * 4, load_f32(x + i * 4))
    else:
        for first in range(0, size, GROUP):
            _encode(x + first * 4, min(GROUP, size - first), at + first, at + size + first // GROUP * 2)


@inline
def _encode(x: int, count: int, at: int, scale_at: int) -> None:
    """A group in 8 bits, bit for bit as `infer.cache.int8.encode`."""
    peak = np.float32(0)
    for i in range(count):
        each = abs(load_f32(x + i * 4))
        peak = each if each > peak or each != each else peak  # a NaN stays
    step = np.float32(np.nan) if peak == np.inf else np.float32(peak / np.float32(127))
    step = np.float32(65504) if step > 65504 else step
    store_f16(scale_at, step)
    if load_f16(scale_at) < step:
        next_f16(scale_at)
    scale = load_f16(scale_at)
    for i in range(count):
        # A group of zeros, or with a NaN or infinity, is known by its scale alone.
        code = np.float32(np.rint(load_f32(x + i * 4) / scale)) if scale > 0 else np.float32(0)
        store_i8(at + i, np.int64(min(max(code, np.float32(-127)), np.float32(127))))
