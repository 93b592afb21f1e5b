"""Attention on a GPU: of one new token a row, and of the many queries of a prompt, with the same bits.

A query goes through its keys in blocks counted from position 0, so what a pass was cut into, a ring, or pages, each of
which holds whole blocks, change no sum.
Blocks are taken together in groups, whose size follows from the position of the query and the window. A group has its
largest score, the sum of its weights, and its values by weight; groups are folded into each other in order. So programs
can share the keys of one query (`attend_one`, and `warp_kernels.py`), and a prompt's queries can go through theirs one
block after the other (`attend_many`).

Scores and values are matrix products, whose elements add up 16 columns after 16, whatever the tile. The weights of a
block are added up by one tree (`sum_of_weights`). What a query does not see weighs exactly 0, if it is finite.
"""

from __future__ import annotations

import triton
import triton.language as tl

from infer.backend.gpu.launch_kernels import is_last, let_next_start, number_at, wait_for_previous
from infer.backend.gpu.launcher import kernel
from infer.backend.gpu.row_kernels import added, load_parts, norm_scale, squared, store_parts, tree_sum, weighted
from infer.cache import table as columns

COLUMNS = tl.constexpr(columns.COLUMNS)
KEYS, VALUES = tl.constexpr(columns.K), tl.constexpr(columns.V)
STRIDE, SLOTS = tl.constexpr(columns.STRIDE), tl.constexpr(columns.SLOTS)
PAGES, PAGE = tl.constexpr(columns.PAGES), tl.constexpr(columns.PAGE)
FOLDED = tl.constexpr(8)  # groups that are loaded together


@kernel()
def begin(
    tokens,  # int64 [B]: below 0 where there is none
    positions,  # int32 [B]: likewise; moved on here
    moves,  # int32 [B]: by which
    steps,  # int32: counted up here
    vectors,  # [V, C]: of each token
    learned,  # [P, C]: of each position; None where none are
    frequencies,  # float32 [KINDS, D]
    fed_positions,  # int32 [B]: as they were
    x,  # [B, C]
    rope_cos_sin,  # float32 [KINDS, B, 2, D]
    norm_weight,  # [C]: of the norm that x is prepared for; None: it is not
    prepared,  # [B, C]
    squares,  # float32 [B]
    FACTOR: tl.constexpr,  # of the tokens' vectors
    C: tl.constexpr,
    PARTS: tl.constexpr,
    KINDS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    OFFSET: tl.constexpr,
):
    """What a step is fed: the vectors of its tokens, their positions, and how far these turn.

    No kernel starts before this one has ended: the positions are read by others before their waits.
    """
    row = tl.program_id(0)
    if row == 0:
        tl.store(steps, tl.load(steps) + 1)
    position = tl.load(positions + row)
    token = tl.maximum(tl.load(tokens + row), 0)  # where there is none, one that can be looked up
    tl.store(fed_positions + row, position)
    tl.debug_barrier()  # all threads have read it
    tl.store(positions + row, position + tl.load(moves + row))
    dtype = x.dtype.element_ty
    own = load_parts(vectors + token * C, PARTS, C)
    if FACTOR != 1:
        own = scaled(own, FACTOR, dtype, PARTS)
    if learned is not None:
        own = added(own, load_parts(learned + tl.maximum(position, 0).to(tl.int64) * C, PARTS, C), dtype, PARTS)
    store_parts(x + row.to(tl.int64) * C, own, PARTS, C)
    if norm_weight is not None:
        tl.store(squares + row, squared(own, PARTS))
        ready = weighted(own, load_parts(norm_weight, PARTS, C), dtype, PARTS, OFFSET)
        store_parts(prepared + row.to(tl.int64) * C, ready, PARTS, C)
    for kind in tl.static_range(KINDS):
        line = rope_cos_sin + (kind * tl.num_programs(0) + row) * 2 * D
        fill_rope_row(position, frequencies + kind * D, line, D, BLOCK_D)


@triton.jit
def scaled(x, factor, dtype, PARTS: tl.constexpr):
    """x in parts, times a factor."""
    out = ()
    for i in tl.static_range(len(PARTS)):
        out = out + ((x[i] * factor).to(dtype).to(tl.float32),)
    return out


@kernel()
def fill_rope(positions, frequencies, out, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """How far RoPE turns the heads of each row's new token: the same in all layers that rotate alike."""
    row = tl.program_id(0)
    fill_rope_row(tl.load(positions + row), frequencies, out + row * 2 * D, D, BLOCK_D)


@triton.jit
def fill_rope_row(position, frequencies, out, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """out [2, D]: cosines, and sines with the sign that the halves of a head are swapped with."""
    d = tl.arange(0, BLOCK_D)
    angle = position.to(tl.float32) * tl.load(frequencies + d, d < D, 0.0)
    sine = tl.sin(angle)
    tl.store(out + d, tl.cos(angle), d < D)
    tl.store(out + D + d, tl.where(d < D // 2, -sine, sine), d < D)


@triton.jit
def partner(d, D: tl.constexpr):
    """The dimension that RoPE rotates together with d."""
    return tl.where(d < D // 2, d + D // 2, d - D // 2)


@triton.jit
def norm_weights(norm, d, D: tl.constexpr, OFFSET: tl.constexpr):
    """Of d, and of its partner."""
    own = tl.load(norm + d, d < D, 0.0).to(tl.float32) + OFFSET
    return own, tl.load(norm + partner(d, D), d < D, 0.0).to(tl.float32) + OFFSET


@triton.jit
def load_heads(heads, start, there, d, D: tl.constexpr):
    """The heads [n, D] that begin at heads + start [n], and the same with partners swapped."""
    inside = there[:, None] & (d < D)[None, :]
    own = tl.load(heads + start[:, None] + d[None, :], inside, 0.0)
    return own, tl.load(heads + start[:, None] + partner(d, D)[None, :], inside, 0.0)


@triton.jit
def rotated(
    x,
    y,
    weight,
    other_weight,
    cosine,
    sine,
    D: tl.constexpr,
    NORM: tl.constexpr,
    EPS: tl.constexpr,
    ROPE: tl.constexpr,
):
    """Heads as attention takes them. y: with partners swapped."""
    dtype = x.dtype
    if NORM:
        wide = x.to(tl.float32)
        scale = norm_scale(tree_sum(tl.trans(wide * wide)), D, EPS)[:, None]
        x = (wide * scale * weight[None, :]).to(dtype)
        y = (y.to(tl.float32) * scale * other_weight[None, :]).to(dtype)
    if ROPE:
        x = (x.to(tl.float32) * cosine[None, :] + y.to(tl.float32) * sine[None, :]).to(dtype)
    return x


@triton.jit
def cache_of(table, row, head, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    """Where the keys and values of a row's KV head are, how many slots there are, and its pages: for `page_of`."""
    line = table + row * COLUMNS
    offset = head * tl.load(line + STRIDE)
    keys = tl.multiple_of((tl.load(line + KEYS) + offset).to(tl.pointer_type(dtype)), ALIGNED)
    values = tl.multiple_of((tl.load(line + VALUES) + offset).to(tl.pointer_type(dtype)), ALIGNED)
    return keys, values, tl.load(line + SLOTS).to(tl.int32), (tl.load(line + PAGES), tl.load(line + PAGE))


@triton.jit
def page_of(pages, position, slots, there, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    """How far the page of a position lies behind a table's addresses, in elements: 0 where there are no pages.

    there: whether to look at all.
    """
    size: tl.constexpr = dtype.primitive_bitwidth // 8
    numbers, stride = pages
    at = tl.where(there & (numbers != 0), numbers + (position // tl.maximum(slots, 1)).to(tl.int64) * 8, 0)
    return tl.multiple_of(number_at(at) * (stride // size), ALIGNED // size)


@kernel(do_not_specialize=["tabled", "q_out", "k_out", "v_out"])
def prepare_heads(
    qkv,  # [T, (Hq + 2 Hkv) D]
    table,  # int64 [R, COLUMNS], where `tabled`
    rows,  # int32 [T]: the row of the table of each token
    positions,  # int32 [T]; -1: no token
    q_norm,
    k_norm,
    rope_cos_sin,  # float32 [T, 2, D], from `rope_tables`
    tabled,  # 1: keys and values go where the table says; 0: to k_out and v_out
    q_out,  # addresses of [T, Hq, D]
    k_out,  # of [T, Hkv, D]
    v_out,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    NORM: tl.constexpr,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    ROPE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Norm a token's heads, rotate them, and put them where attention looks for them.

    Where that is, it is told as numbers, so that one compiled kernel serves a step and a prompt: the sum over a head
    is a tree of threads, and might be another in another kernel.
    """
    let_next_start(PDL)
    token, d = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_D)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    dtype: tl.constexpr = qkv.dtype.element_ty
    size: tl.constexpr = dtype.primitive_bitwidth // 8
    position = tl.load(positions + token)
    is_q, is_v = head < HEADS, head >= HEADS + KV_HEADS
    q_weight, q_other, k_weight, k_other = d, d, d, d
    if NORM:
        q_weight, q_other = norm_weights(q_norm, d, D, OFFSET)
        k_weight, k_other = norm_weights(k_norm, d, D, OFFSET)
    wait_for_previous(PDL)
    if position < 0:
        return
    there = head < HEADS + 2 * KV_HEADS
    own, swapped = load_heads(qkv + token * ((HEADS + 2 * KV_HEADS) * D), head * D, there, d, D)
    cosine, sine = d, d
    if ROPE:
        cosine = tl.load(rope_cos_sin + token * 2 * D + d, d < D, 0.0)
        sine = tl.load(rope_cos_sin + (token * 2 + 1) * D + d, d < D, 0.0)
    as_q = rotated(own, swapped, q_weight, q_other, cosine, sine, D, NORM, EPS, ROPE)
    as_k = rotated(own, swapped, k_weight, k_other, cosine, sine, D, NORM, EPS, ROPE)
    done = tl.where(is_q[:, None], as_q, tl.where(is_v[:, None], own, as_k))

    keys, values = k_out + token * (KV_HEADS * D * size), v_out + token * (KV_HEADS * D * size)
    stride = tl.full((), D * size, tl.int64)
    if tabled != 0:
        line = table + tl.load(rows + token).to(tl.int64) * COLUMNS
        slots, numbers = tl.load(line + SLOTS), tl.load(line + PAGES)
        number = number_at(tl.where(numbers != 0, numbers + position // slots * 8, 0))
        at = position % slots * (D * size) + number * tl.load(line + PAGE)
        keys, values = tl.load(line + KEYS) + at, tl.load(line + VALUES) + at
        stride = tl.load(line + STRIDE)
    kept = tl.where(is_v, values + (head - HEADS - KV_HEADS) * stride, keys + (head - HEADS) * stride)
    place = tl.where(is_q, q_out + (token * HEADS + head) * (D * size), kept).to(tl.pointer_type(dtype))
    tl.store(place[:, None] + d[None, :], done, there[:, None] & (d < D)[None, :])


@triton.jit
def blocks_of_a_group(position, window, BLOCK: tl.constexpr, GROUPS: tl.constexpr):
    """Blocks of keys that a query at this position takes together before it folds them into the rest.

    As few as make about GROUPS groups of all that it can see: as many programs share a long row.
    """
    blocks = position // BLOCK + 1
    if window > 0:
        blocks = tl.minimum(blocks, tl.cdiv(window, BLOCK) + 1)
    return tl.cdiv(blocks, GROUPS)


@triton.jit
def sum_of_weights(weights):
    """[Q, BLOCK] -> [Q], by a tree: keys eight apart first, then the eight that remain."""
    Q: tl.constexpr = weights.shape[0]
    x = tl.reshape(weights, (Q, weights.shape[1] // 8, 8))
    for _ in tl.static_range(8):
        if x.shape[1] > 1:
            x = tl.sum(tl.reshape(x, (Q, x.shape[1] // 2, 2, 8)), 2)
    x = tl.sum(tl.reshape(x, (Q, 4, 2)), 2)
    x = tl.sum(tl.reshape(x, (Q, 2, 2)), 2)
    return tl.sum(x, 1)


@triton.jit
def weighed(scores, seen, highest, dtype: tl.constexpr):
    """Scores [Q, BLOCK] as weights: the largest so far [Q], what it shrinks earlier ones by, weights, and their sum.

    seen: None where all keys are. Where a query sees nothing of a block, nothing changes.
    """
    if seen is not None:
        scores = tl.where(seen, scores, -float("inf"))
    top = tl.maximum(highest, tl.max(scores, 1))
    base = tl.where(top == -float("inf"), 0.0, top)
    weights = tl.exp2(scores - base[:, None]).to(dtype)
    return top, tl.exp2(highest - base), weights, sum_of_weights(weights.to(tl.float32))


@triton.jit
def looked(q, k, v, seen, highest, total, sums, scale):
    """One block of keys more: the largest score so far [Q], the sum of the weights [Q], the values by weight [Q, D].

    q [Q, D]; k, v [BLOCK, D]; seen [Q, BLOCK].
    """
    scores = tl.dot(q, k.T, input_precision="ieee") * scale
    top, shrink, weights, added_up = weighed(scores, seen, highest, v.dtype)
    sums = tl.dot(weights, v, sums * shrink[:, None], input_precision="ieee")
    return top, total * shrink + added_up, sums


@triton.jit
def folded(highest, total, sums, group_highest, group_total, group_sums):
    """What a query has of the groups so far, and of one more: largest score [Q], sum of weights [Q], values [Q, D]."""
    top = tl.maximum(highest, group_highest)
    base = tl.where(top == -float("inf"), 0.0, top)
    kept, share = tl.exp2(highest - base), tl.exp2(group_highest - base)
    sums = sums * kept[:, None] + group_sums * share[:, None]
    return top, total * kept + group_total * share, sums


@kernel(do_not_specialize=["window"])
def attend_one(
    q,  # [B, Hq, D]
    out,  # [B, Hq, D]
    pieces,  # float32 [B, Hkv, GROUPS + 1, MERGE_G, BLOCK_D + 4]: values by weight, largest score, sum of the weights
    split_counters,  # int32 [B, Hkv]: programs that are done, 0 before and after
    table,  # int64 [B, COLUMNS]
    positions,  # int32 [B]; -1: no token
    scale,
    window,  # 0: none
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of a KV head
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_G: tl.constexpr,  # GROUP, up to what a matrix product takes
    MERGE_G: tl.constexpr,
    BLOCK: tl.constexpr,  # keys
    GROUPS: tl.constexpr,
    ALIGNED: tl.constexpr,  # bytes that all addresses in a table are a multiple of
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """A single query a row. Programs share its groups of keys; the last one to finish folds them, in order."""
    let_next_start(PDL)
    split, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    dtype: tl.constexpr = q.dtype.element_ty
    # Where the token and the cache are was settled before the step began.
    position = tl.load(positions + row, cache_modifier=".cg")
    own_k, own_v, slots, pages = cache_of(table, row, head, dtype, ALIGNED)
    size = blocks_of_a_group(tl.maximum(position, 0), window, BLOCK, GROUPS)
    first = 0
    if window > 0:
        first = tl.maximum(position - window + 1, 0)
    first_group, last_group = first // BLOCK // size, tl.maximum(position, 0) // BLOCK // size
    used = last_group - first_group + 1
    if split >= used:
        return
    wait_for_previous(PDL)
    if position < 0:
        return

    g, d, s = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK)
    within, real = g < GROUP, d < D
    heads = q + (row * (KV_HEADS * GROUP) + head * GROUP + g)[:, None] * D
    queries = tl.load(heads + d[None, :], within[:, None] & real[None, :], 0.0)
    pieces += (row * KV_HEADS + head) * ((GROUPS + 1) * (BLOCK_D + 4) * MERGE_G)
    for group in range(first_group + split, last_group + 1, tl.num_programs(0)):
        highest = tl.full((BLOCK_G,), -float("inf"), tl.float32)
        total = tl.zeros((BLOCK_G,), tl.float32)
        sums = tl.zeros((BLOCK_G, BLOCK_D), tl.float32)
        start, stop = tl.maximum(group * size, first // BLOCK), tl.minimum((group + 1) * size, position // BLOCK + 1)
        for block in tl.range(start, stop, num_stages=STAGES):
            at = block * BLOCK + s
            there = (at >= first) & (at <= position)
            page = page_of(pages, block * BLOCK, slots, True, dtype, ALIGNED)
            slot = page + (at % slots).to(tl.int64)[:, None] * D + d[None, :]
            inside = there[:, None] & real[None, :]
            next_k = tl.load(own_k + slot, inside, 0.0)
            next_v = tl.load(own_v + slot, inside, 0.0)
            highest, total, sums = looked(queries, next_k, next_v, there[None, :], highest, total, sums, scale)
        piece = pieces + ((group - first_group) * MERGE_G + g) * (BLOCK_D + 4)
        merged = g < MERGE_G
        tl.store(piece[:, None] + d[None, :], sums, merged[:, None])
        tl.store(piece + BLOCK_D, highest, merged)
        tl.store(piece + BLOCK_D + 1, total, merged)
    if is_last(split_counters + row * KV_HEADS + head, tl.minimum(used, tl.num_programs(0))):
        fold_pieces(pieces, out + (row * KV_HEADS + head) * (GROUP * D), used, GROUP, MERGE_G, D, BLOCK_D)


@triton.jit
def fold_pieces(pieces, out, used, GROUP: tl.constexpr, MERGE_G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """The groups of a KV head's queries, in order. Other programs wrote them: past the processor's own cache."""
    g, d = tl.arange(0, MERGE_G), tl.arange(0, BLOCK_D)
    highest = tl.full((MERGE_G,), -float("inf"), tl.float32)
    total = tl.zeros((MERGE_G,), tl.float32)
    sums = tl.zeros((MERGE_G, BLOCK_D), tl.float32)
    for first in range(0, used, FOLDED):
        # Several at once: a load takes longer than what is done with it. Beyond the last there is nothing to be seen.
        tops, totals, values = (), (), ()
        for i in tl.static_range(FOLDED):
            line = (first + i) * MERGE_G + g
            there, piece = line < used * MERGE_G, pieces + line * (BLOCK_D + 4)
            tops = tops + (tl.load(piece + BLOCK_D, there, -float("inf"), cache_modifier=".cg"),)
            totals = totals + (tl.load(piece + BLOCK_D + 1, there, 0.0, cache_modifier=".cg"),)
            values = values + (tl.load(piece[:, None] + d[None, :], there[:, None], 0.0, cache_modifier=".cg"),)
        for i in tl.static_range(FOLDED):
            highest, total, sums = folded(highest, total, sums, tops[i], totals[i], values[i])
    inside = (g < GROUP)[:, None] & (d < D)[None, :]
    total = tl.where(g < GROUP, total, 1.0)
    tl.store(out + g[:, None] * D + d[None, :], (sums / total[:, None]).to(out.dtype.element_ty), inside)


@triton.jit
def load_keys(
    keys,
    block,
    slots,
    first,
    last,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
    WRAPS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """A block of a prompt's keys, or values: of those from first to last where MASKED.

    WRAPS: around the end of a ring, at most so often; 2: as often as it takes.
    """
    d, at = tl.arange(0, BLOCK_D)[None, :], block * BLOCK + tl.arange(0, BLOCK)
    slot = at
    if WRAPS == 1:
        slot = block * BLOCK % slots + tl.arange(0, BLOCK)
        slot = tl.where(slot < slots, slot, slot - slots)
    elif WRAPS == 2:
        slot = at % slots
    places = keys + slot.to(tl.int64)[:, None] * D + d
    if MASKED:
        loaded = tl.load(places, ((at >= first) & (at <= last))[:, None] & (d < D), 0.0)
    elif D == BLOCK_D:
        loaded = tl.load(places)
    else:
        loaded = tl.load(places, d < D, 0.0)
    return loaded


@triton.jit
def shift_of(
    pages,
    slots,
    block,
    last,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    dtype: tl.constexpr,
    WINDOWED: tl.constexpr,
    POSITIONS: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """How far, in elements, a block lies from where `load_keys` looks for it by its position, or by its slot."""
    shift = tl.full((), 0, tl.int64)
    if POSITIONS != 0:
        size: tl.constexpr = dtype.primitive_bitwidth // 8
        numbers, stride = pages
        held = slots
        if POSITIONS > 0:
            held = POSITIONS
        page = block * BLOCK // held
        there = (numbers != 0) & (block * BLOCK <= last)
        shift = number_at(tl.where(there, numbers + page.to(tl.int64) * 8, 0)) * (stride // size)
        if not WINDOWED:
            shift = tl.where(there, shift - page.to(tl.int64) * (held * D), 0)
        shift = tl.multiple_of(shift, ALIGNED // size)
    return shift


@triton.jit
def visible(position, block, span, BLOCK: tl.constexpr):
    """Which keys of a block queries at these positions see, of the last `span`: [Q, BLOCK]."""
    distance = position[:, None] - (block * BLOCK + tl.arange(0, BLOCK))[None, :]
    return (distance >= 0) & (distance < span)


@triton.jit
def fold_block(
    q,
    k,
    v,
    seen,
    scale,
    is_first,
    highest,
    total,
    sums,
    group_highest,
    group_total,
    group_sums,
    SINGLE: tl.constexpr,
):
    """One block more, in a group of its own where SINGLE; else a group that is complete is folded into the rest.

    is_first: whether the block is a group's first.
    """
    ROWS: tl.constexpr = q.shape[0]
    if SINGLE:
        # `looked`, where nothing has been seen before.
        scores = tl.dot(q, k.T, input_precision="ieee") * scale
        nothing = tl.full((ROWS,), -float("inf"), tl.float32)
        top, _, weights, added_up = weighed(scores, seen, nothing, v.dtype)
        new_sums = tl.dot(weights, v, input_precision="ieee")
        highest, total, sums = folded(highest, total, sums, top, added_up, new_sums)
    else:
        if is_first:
            highest, total, sums = folded(highest, total, sums, group_highest, group_total, group_sums)
            group_highest = tl.full((ROWS,), -float("inf"), tl.float32)
            group_total = tl.zeros((ROWS,), tl.float32)
            group_sums = tl.zeros((ROWS, v.shape[1]), tl.float32)
        group_highest, group_total, group_sums = looked(q, k, v, seen, group_highest, group_total, group_sums, scale)
    return highest, total, sums, group_highest, group_total, group_sums


@kernel(do_not_specialize=["window"])
def attend_many(
    q,  # [T, Hq, D]
    out,  # [T, Hq, D]
    table,  # int64 [R, COLUMNS]
    tiles,  # int32 [tiles, 5]: row of the table, its first token, the first one's position, the end, the tile's first
    positions,  # instead of tiles, of one token a row: int32 [R]; -1: no token
    scale,
    window,  # 0: none
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_G: tl.constexpr,  # GROUP, up to a power of two
    QUERIES: tl.constexpr,  # positions that a program takes, each with BLOCK_G heads
    BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,
    SINGLE: tl.constexpr,  # whether all queries take their blocks one by one
    WINDOWED: tl.constexpr,
    WRAPS: tl.constexpr,
    POSITIONS: tl.constexpr,  # of a page; 0: no row has pages; -1: as many as a row has slots
    ALIGNED: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """The queries of prompts, of any lengths, or of many rows of one token: what `attend_one` gives each of them.

    Tiles of queries are counted from position 0, so that all in one take as many blocks to a group.
    """
    let_next_start(PDL)
    head = tl.program_id(1)
    if tiles is not None:
        tiles += tl.program_id(0) * 5
        row, first_token, start = tl.load(tiles).to(tl.int64), tl.load(tiles + 1), tl.load(tiles + 2)
        end, tile = tl.load(tiles + 3), tl.load(tiles + 4)
        if end <= start:
            return
    else:
        row, first_token = tl.program_id(0).to(tl.int64), tl.program_id(0)
        start = tl.load(positions + row, cache_modifier=".cg")  # settled before the step began
        end, tile = start + 1, start // QUERIES * QUERIES
        if start < 0:
            return
    first_query, last_query = tl.maximum(tile, start), tl.minimum(tile + QUERIES, end) - 1
    dtype: tl.constexpr = q.dtype.element_ty
    own_k, own_v, slots, pages = cache_of(table, row, head, dtype, ALIGNED)
    wait_for_previous(PDL)
    ROWS: tl.constexpr = QUERIES * BLOCK_G
    c, d = tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    position, member = tile + c // BLOCK_G, c % BLOCK_G
    within = (position >= start) & (position < end) & (member < GROUP)
    real = d < D
    heads = ((first_token + position - start).to(tl.int64) * (KV_HEADS * GROUP) + head * GROUP + member) * D
    queries = tl.load(q + heads[:, None] + d[None, :], within[:, None] & real[None, :], 0.0)

    size = blocks_of_a_group(last_query, window, BLOCK, GROUPS)
    span, first = end, 0  # as many positions as can be seen
    # Blocks of which all queries see all keys need no mask.
    whole = 0
    if WINDOWED:
        span = window
        first = tl.maximum(first_query - window + 1, 0)
        whole = tl.minimum(tl.cdiv(tl.maximum(last_query - window + 1, 0), BLOCK), last_query // BLOCK + 1)
    partial = tl.maximum((first_query + 1) // BLOCK, whole)
    highest = tl.full((ROWS,), -float("inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    sums = tl.zeros((ROWS, BLOCK_D), tl.float32)
    group_highest, group_total, group_sums = highest, total, sums
    # Where a block lies is looked up while the one before it is attended to.
    shift = shift_of(pages, slots, first // BLOCK, last_query, D, BLOCK, dtype, WINDOWED, POSITIONS, ALIGNED)
    if WINDOWED:
        for block in tl.range(first // BLOCK, whole, num_stages=STAGES):
            next_shift = shift_of(pages, slots, block + 1, last_query, D, BLOCK, dtype, WINDOWED, POSITIONS, ALIGNED)
            next_k = load_keys(own_k + shift, block, slots, first, last_query, D, BLOCK_D, BLOCK, WRAPS, True)
            next_v = load_keys(own_v + shift, block, slots, first, last_query, D, BLOCK_D, BLOCK, WRAPS, True)
            highest, total, sums, group_highest, group_total, group_sums = fold_block(
                queries,
                next_k,
                next_v,
                visible(position, block, span, BLOCK),
                scale,
                block % size == 0,
                highest,
                total,
                sums,
                group_highest,
                group_total,
                group_sums,
                SINGLE,
            )
            shift = next_shift
    for block in tl.range(whole, partial, num_stages=STAGES):
        next_shift = shift_of(pages, slots, block + 1, last_query, D, BLOCK, dtype, WINDOWED, POSITIONS, ALIGNED)
        next_k = load_keys(own_k + shift, block, slots, first, last_query, D, BLOCK_D, BLOCK, WRAPS, False)
        next_v = load_keys(own_v + shift, block, slots, first, last_query, D, BLOCK_D, BLOCK, WRAPS, False)
        highest, total, sums, group_highest, group_total, group_sums = fold_block(
            queries,
            next_k,
            next_v,
            None,
            scale,
            block % size == 0,
            highest,
            total,
            sums,
            group_highest,
            group_total,
            group_sums,
            SINGLE,
        )
        shift = next_shift
    for block in tl.range(partial, last_query // BLOCK + 1, num_stages=STAGES):
        next_shift = shift_of(pages, slots, block + 1, last_query, D, BLOCK, dtype, WINDOWED, POSITIONS, ALIGNED)
        next_k = load_keys(own_k + shift, block, slots, first, last_query, D, BLOCK_D, BLOCK, WRAPS, True)
        next_v = load_keys(own_v + shift, block, slots, first, last_query, D, BLOCK_D, BLOCK, WRAPS, True)
        highest, total, sums, group_highest, group_total, group_sums = fold_block(
            queries,
            next_k,
            next_v,
            visible(position, block, span, BLOCK),
            scale,
            block % size == 0,
            highest,
            total,
            sums,
            group_highest,
            group_total,
            group_sums,
            SINGLE,
        )
        shift = next_shift
    if not SINGLE:
        highest, total, sums = folded(highest, total, sums, group_highest, group_total, group_sums)
    total = tl.where(within, total, 1.0)
    inside = within[:, None] & real[None, :]
    tl.store(out + heads[:, None] + d[None, :], (sums / total[:, None]).to(out.dtype.element_ty), inside)
