"""Attention on a GPU: for one new token per row, and for the many queries of a prompt, with the same bits.

A query visits its keys in blocks counted from position 0. Prefill chunks, rings and pages, each of which holds complete
blocks, therefore change no sum. Blocks are combined in groups, whose size depends on the position of the query and the
window alone. Each group yields a partial result: its largest score, the sum of its weights, and the weighted sum of its
values. Partial results are merged in order. So several programs can share the keys of one query, as in flash-decoding
(`attend_one`, and `warp_kernels.py`), and one program can visit all keys of a prompt's queries block by block
(`attend_many`).

Scores and outputs are matrix multiplications, which add 16 columns at a time for any tile. The weights of a block are
added by one tree (`tree_sum_of_weights`). A masked key has a weight of exactly 0, if its value is finite.
"""

from __future__ import annotations

import triton
import triton.language as tl

from infer.backend.gpu.launch_kernels import is_last, let_next_start, load_int64, wait_for_previous
from infer.backend.gpu.launcher import kernel
from infer.backend.gpu.row_kernels import (
    added,
    capped,
    load_parts,
    norm_scale,
    normed,
    rounded,
    squared,
    store_parts,
    tree_sum,
    weighted,
)
from infer.cache import table as columns

COLUMNS = tl.constexpr(columns.COLUMNS)
KEYS, VALUES = tl.constexpr(columns.K), tl.constexpr(columns.V)
STRIDE, SLOTS = tl.constexpr(columns.STRIDE), tl.constexpr(columns.SLOTS)
PAGE_TABLE, PAGE_BYTES = tl.constexpr(columns.PAGE_TABLE), tl.constexpr(columns.PAGE_BYTES)
PARTIALS_AT_ONCE = tl.constexpr(8)  # partial results loaded together


@kernel()
def begin(
    tokens,  # int64 [B / WIDTH]; below 0: no token
    positions,  # int32 [B / WIDTH]; below 0: no token; incremented here, if WIDTH is 1
    increments,  # int32 [B / WIDTH]: added to positions
    steps,  # int32: incremented here
    drafts,  # int64 [B / WIDTH, WIDTH - 1]: tokens after `tokens`, below 0: none; or None
    vectors,  # [V, C]: token embeddings
    learned,  # [P, C]: position embeddings, or None
    frequencies,  # float32 [KINDS, D]
    input_positions,  # int32 [B]: of the inputs
    output_positions,  # int32 [B]: of the tokens to choose; None, if WIDTH is 1: those incremented
    x,  # [B, C]
    rope_cos_sin,  # float32 [KINDS, B, 2, D]
    norm_weight,  # [C]: weight of the first norm, if its scale comes after the GEMM; else None
    prepared,  # [B, C]
    squares,  # float32 [B]
    WIDTH: tl.constexpr,  # tokens of a sequence: its last one, and drafts
    FACTOR: tl.constexpr,  # of the token embeddings
    C: tl.constexpr,
    PARTS: tl.constexpr,
    KINDS: tl.constexpr,
    ROPE_FACTORS: tl.constexpr,  # of cos and sin, by kind
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    OFFSET: tl.constexpr,
):
    """The inputs of a step: the embeddings of its tokens, their positions, and RoPE cos and sin.

    No kernel starts before this one has ended, since kernels read the positions before `wait_for_previous`.
    """
    row = tl.program_id(0)
    if row == 0:
        tl.store(steps, tl.load(steps) + 1)
    position, token = tl.load(positions + row // WIDTH), tl.load(tokens + row // WIDTH)
    if WIDTH > 1:
        nth = row % WIDTH
        if nth > 0:
            token = tl.load(drafts + row // WIDTH * (WIDTH - 1) + nth - 1)
            position = tl.where((position < 0) | (token < 0), -1, position + nth)
        tl.store(output_positions + row, tl.where(position < 0, -1, position + 1))
    token = tl.maximum(token, 0)  # without a token, any id that exists
    tl.store(input_positions + row, position)
    if WIDTH == 1:
        tl.debug_barrier()  # all threads have read the position
        tl.store(positions + row, position + tl.load(increments + row))
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
        fill_rope_row(position, frequencies + kind * D, line, ROPE_FACTORS[kind], D, BLOCK_D)


@triton.jit
def scaled(x, factor, dtype, PARTS: tl.constexpr):
    """x in parts, times a factor."""
    out = ()
    for i in tl.static_range(len(PARTS)):
        out = out + ((x[i] * factor).to(dtype).to(tl.float32),)
    return out


@kernel()
def fill_rope(positions, frequencies, out, ROPE_FACTOR: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """RoPE cos and sin of each row's new token: the same in all layers with the same frequencies."""
    row = tl.program_id(0)
    fill_rope_row(tl.load(positions + row), frequencies, out + row * 2 * D, ROPE_FACTOR, D, BLOCK_D)


@triton.jit
def fill_rope_row(position, frequencies, out, ROPE_FACTOR: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """out [2, D]: cos, and sin with the sign for swapped halves of a head. A frequency of 0 is not rotated."""
    d = tl.arange(0, BLOCK_D)
    frequency = tl.load(frequencies + d, d < D, 0.0)
    angle = position.to(tl.float32) * frequency
    cosine, sine = tl.cos(angle), tl.sin(angle)
    if ROPE_FACTOR != 1:
        cosine = tl.where(frequency > 0, cosine * ROPE_FACTOR, cosine)
        sine *= ROPE_FACTOR
    tl.store(out + d, cosine, d < D)
    tl.store(out + D + d, tl.where(d < D // 2, -sine, sine), d < D)


@kernel()
def prepare_projections(
    qkv,  # [T, (Hq + 2 Hkv) D], changed in place
    positions,  # int32 [T]
    q_norm,  # [Hq D]: of all heads together, or None
    k_norm,  # [Hkv D]
    QUERY_SIZE: tl.constexpr,  # Hq D
    KEY_SIZE: tl.constexpr,  # Hkv D
    QUERY_PARTS: tl.constexpr,
    KEY_PARTS: tl.constexpr,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    QUERY_BETA: tl.constexpr,  # see `query_scales`; 0: none
    CONTEXT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Norm q and k of a token, all heads together, and scale q by its position."""
    let_next_start(PDL)
    token = tl.program_id(0).to(tl.int64)
    own = qkv + token * (QUERY_SIZE + 2 * KEY_SIZE)
    dtype: tl.constexpr = qkv.dtype.element_ty
    if tl.program_id(1) == 0:
        wait_for_previous(PDL)
        q = load_parts(own, QUERY_PARTS, QUERY_SIZE)
        if q_norm is not None:
            weights = load_parts(q_norm, QUERY_PARTS, QUERY_SIZE)
            q = normed(q, weights, weights, dtype, QUERY_PARTS, QUERY_SIZE, EPS, OFFSET, False, False)
        if QUERY_BETA != 0:
            step = (tl.load(positions + token) // CONTEXT).to(tl.float32)
            q = scaled(q, 1 + QUERY_BETA * tl.log(1 + step), dtype, QUERY_PARTS)
        store_parts(own, q, QUERY_PARTS, QUERY_SIZE)
    elif k_norm is not None:
        wait_for_previous(PDL)
        k = load_parts(own + QUERY_SIZE, KEY_PARTS, KEY_SIZE)
        k_weights = load_parts(k_norm, KEY_PARTS, KEY_SIZE)
        k = normed(k, k_weights, k_weights, dtype, KEY_PARTS, KEY_SIZE, EPS, OFFSET, False, False)
        store_parts(own + QUERY_SIZE, k, KEY_PARTS, KEY_SIZE)


@triton.jit
def partner(d, D: tl.constexpr):
    """The dimension that RoPE rotates together with d."""
    return tl.where(d < D // 2, d + D // 2, d - D // 2)


@triton.jit
def norm_weights(norm, d, D: tl.constexpr, OFFSET: tl.constexpr):
    """The weights of d and of its partner."""
    own = tl.load(norm + d, d < D, 0.0).to(tl.float32) + OFFSET
    return own, tl.load(norm + partner(d, D), d < D, 0.0).to(tl.float32) + OFFSET


@triton.jit
def load_heads(heads, start, mask, d, D: tl.constexpr):
    """The heads [n, D] at heads + start [n], and the same with partners swapped."""
    inside = mask[:, None] & (d < D)[None, :]
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
    """Heads x, normed and rotated. y: x with partners swapped."""
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
    """The addresses of the keys and values of a row's KV head, its slots, and its page table for `page_of`."""
    line = table + row * COLUMNS
    offset = head * tl.load(line + STRIDE)
    keys = tl.multiple_of((tl.load(line + KEYS) + offset).to(tl.pointer_type(dtype)), ALIGNED)
    values = tl.multiple_of((tl.load(line + VALUES) + offset).to(tl.pointer_type(dtype)), ALIGNED)
    return keys, values, tl.load(line + SLOTS).to(tl.int32), (tl.load(line + PAGE_TABLE), tl.load(line + PAGE_BYTES))


@triton.jit
def page_of(pages, position, slots, mask, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    """The offset of the page of a position from the addresses of `cache_of`, in elements: 0 without pages.

    mask: False: do not look it up; 0.
    """
    size: tl.constexpr = dtype.primitive_bitwidth // 8
    numbers, stride = pages
    at = tl.where(mask & (numbers != 0), numbers + (position // tl.maximum(slots, 1)).to(tl.int64) * 8, 0)
    return tl.multiple_of(load_int64(at) * (stride // size), ALIGNED // size)


@kernel(do_not_specialize=["tabled", "q_out", "k_out", "v_out"])
def prepare_heads(
    qkv,  # [T, (Hq + 2 Hkv) D]
    table,  # int64 [R, COLUMNS], if `tabled`
    rows,  # int32 [T]: the row of the table of each token
    positions,  # int32 [T]; -1: no token
    q_norm,
    k_norm,
    rope_cos_sin,  # float32 [T, 2, D], from `rope_tables`
    tabled,  # 1: keys and values go to the addresses in the table; 0: to k_out and v_out
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
    ALIGNED: tl.constexpr,  # bytes: alignment of all output addresses
    PDL: tl.constexpr,
):
    """Norm and rotate a token's heads, and store q, and k and v in the cache.

    Output addresses are integers: keys and values go to a cache or to tensors.
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
    mask = head < HEADS + 2 * KV_HEADS
    own, swapped = load_heads(qkv + token * ((HEADS + 2 * KV_HEADS) * D), head * D, mask, d, D)
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
        slots, numbers = tl.load(line + SLOTS), tl.load(line + PAGE_TABLE)
        number = load_int64(tl.where(numbers != 0, numbers + position // slots * 8, 0))
        at = position % slots * (D * size) + number * tl.load(line + PAGE_BYTES)
        keys, values = tl.load(line + KEYS) + at, tl.load(line + VALUES) + at
        stride = tl.load(line + STRIDE)
    kept = tl.where(is_v, values + (head - HEADS - KV_HEADS) * stride, keys + (head - HEADS) * stride)
    place = tl.where(is_q, q_out + (token * HEADS + head) * (D * size), kept).to(tl.pointer_type(dtype))
    place = tl.multiple_of(place[:, None], (1, ALIGNED))
    tl.store(place + d[None, :], done, mask[:, None] & (d < D)[None, :])


@triton.jit
def blocks_of_a_group(position, window, BLOCK: tl.constexpr, GROUPS: tl.constexpr):
    """Key blocks per group for a query at this position.

    As few as give about GROUPS groups over all keys that it sees: as many programs share a long row.
    """
    blocks = position // BLOCK + 1
    if window > 0:
        blocks = tl.minimum(blocks, tl.cdiv(window, BLOCK) + 1)
    return tl.cdiv(blocks, GROUPS)


@triton.jit
def tree_sum_of_weights(weights):
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
def softmax_weights(scores, seen, highest, dtype: tl.constexpr):
    """Online softmax of scores [Q, BLOCK]: the new maximum [Q], the factor of earlier sums, weights, and their sum.

    seen: the mask; None: no mask. A fully masked block changes nothing.
    """
    if seen is not None:
        scores = tl.where(seen, scores, -float("inf"))
    top = tl.maximum(highest, tl.max(scores, 1))
    base = tl.where(top == -float("inf"), 0.0, top)
    weights = rounded(tl.exp2(scores - base[:, None]), dtype)
    return top, tl.exp2(highest - base), weights, tree_sum_of_weights(weights.to(tl.float32))


@triton.jit
def attend_block(q, k, v, seen, highest, total, sums, scale, SOFTCAP: tl.constexpr):
    """Add one block of keys to the running maximum [Q], sum of weights [Q] and weighted sum of values [Q, D].

    q [Q, D]; k, v [BLOCK, D]; seen [Q, BLOCK].
    """
    scores = capped(tl.dot(q, k.T, input_precision="ieee") * scale, SOFTCAP)
    top, shrink, weights, added_up = softmax_weights(scores, seen, highest, v.dtype)
    sums = tl.dot(weights, v, sums * shrink[:, None], input_precision="ieee")
    return top, total * shrink + added_up, sums


@triton.jit
def merge_partials(highest, total, sums, group_highest, group_total, group_sums):
    """Merge a group into the groups so far: maximum [Q], sum of weights [Q], weighted sum of values [Q, D]."""
    top = tl.maximum(highest, group_highest)
    base = tl.where(top == -float("inf"), 0.0, top)
    kept, share = tl.exp2(highest - base), tl.exp2(group_highest - base)
    sums = tl.fma(group_sums, share[:, None], sums * kept[:, None])
    return top, total * kept + group_total * share, sums


@triton.jit
def with_sinks(highest, total, sums, sinks):
    """Give sinks [Q] their share: a score, for exp2, without a value. sums [Q, D]."""
    top = tl.maximum(highest, sinks)
    kept = tl.exp2(highest - top)
    return total * kept + tl.exp2(sinks - top), sums * kept[:, None]


@kernel(do_not_specialize=["window"])
def attend_one(
    q,  # [B, Hq, D]
    out,  # [B, Hq, D]
    partials,  # float32 [B, Hkv, GROUPS + 1, MERGE_G, BLOCK_D + 4]: weighted values, maximum, sum of weights
    split_counters,  # int32 [B, Hkv]: finished programs, 0 before and after
    table,  # int64 [B, COLUMNS]
    positions,  # int32 [B]; -1: no token
    sinks,  # float32 [Hq], for exp2; or None
    scale,
    window,  # 0: none
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads per KV head
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_G: tl.constexpr,  # GROUP, padded for the matrix instruction
    MERGE_G: tl.constexpr,
    BLOCK: tl.constexpr,  # keys
    GROUPS: tl.constexpr,
    SOFTCAP: tl.constexpr,  # see `capped`
    ALIGNED: tl.constexpr,  # bytes: alignment of all addresses in a table
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """One query per row. Programs share its groups of keys; the last one to finish merges them, in order."""
    let_next_start(PDL)
    split, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    dtype: tl.constexpr = q.dtype.element_ty
    # Positions and tables were set before the step began.
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
    within, d_mask = g < GROUP, d < D
    heads = q + (row * (KV_HEADS * GROUP) + head * GROUP + g)[:, None] * D
    queries = tl.load(heads + d[None, :], within[:, None] & d_mask[None, :], 0.0)
    partials += (row * KV_HEADS + head) * ((GROUPS + 1) * (BLOCK_D + 4) * MERGE_G)
    for group in range(first_group + split, last_group + 1, tl.num_programs(0)):
        highest = tl.full((BLOCK_G,), -float("inf"), tl.float32)
        total = tl.zeros((BLOCK_G,), tl.float32)
        sums = tl.zeros((BLOCK_G, BLOCK_D), tl.float32)
        start, stop = tl.maximum(group * size, first // BLOCK), tl.minimum((group + 1) * size, position // BLOCK + 1)
        for block in tl.range(start, stop, num_stages=STAGES):
            at = block * BLOCK + s
            mask = (at >= first) & (at <= position)
            page = page_of(pages, block * BLOCK, slots, True, dtype, ALIGNED)
            slot = page + (at % slots).to(tl.int64)[:, None] * D + d[None, :]
            inside = mask[:, None] & d_mask[None, :]
            next_k = tl.load(own_k + slot, inside, 0.0)
            next_v = tl.load(own_v + slot, inside, 0.0)
            highest, total, sums = attend_block(
                queries, next_k, next_v, mask[None, :], highest, total, sums, scale, SOFTCAP
            )
        piece = partials + ((group - first_group) * MERGE_G + g) * (BLOCK_D + 4)
        merged = g < MERGE_G
        tl.store(piece[:, None] + d[None, :], sums, merged[:, None])
        tl.store(piece + BLOCK_D, highest, merged)
        tl.store(piece + BLOCK_D + 1, total, merged)
    if is_last(split_counters + row * KV_HEADS + head, tl.minimum(used, tl.num_programs(0))):
        own_sinks = None
        if sinks is not None:
            own_sinks = sinks + head * GROUP
        final = out + (row * KV_HEADS + head) * (GROUP * D)
        merge_stored_partials(partials, final, own_sinks, used, GROUP, MERGE_G, D, BLOCK_D)


@triton.jit
def merge_stored_partials(
    partials, out, sinks, used, GROUP: tl.constexpr, MERGE_G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Merge the groups of a KV head's queries, in order. Other programs wrote them: loads bypass the L1 cache."""
    g, d = tl.arange(0, MERGE_G), tl.arange(0, BLOCK_D)
    highest = tl.full((MERGE_G,), -float("inf"), tl.float32)
    total = tl.zeros((MERGE_G,), tl.float32)
    sums = tl.zeros((MERGE_G, BLOCK_D), tl.float32)
    for first in range(0, used, PARTIALS_AT_ONCE):
        # Several at once: a load takes longer than the computation on it. Past the last, the maximum is -inf.
        tops, totals, values = (), (), ()
        for i in tl.static_range(PARTIALS_AT_ONCE):
            line = (first + i) * MERGE_G + g
            mask, piece = line < used * MERGE_G, partials + line * (BLOCK_D + 4)
            tops = tops + (tl.load(piece + BLOCK_D, mask, -float("inf"), cache_modifier=".cg"),)
            totals = totals + (tl.load(piece + BLOCK_D + 1, mask, 0.0, cache_modifier=".cg"),)
            values = values + (tl.load(piece[:, None] + d[None, :], mask[:, None], 0.0, cache_modifier=".cg"),)
        for i in tl.static_range(PARTIALS_AT_ONCE):
            highest, total, sums = merge_partials(highest, total, sums, tops[i], totals[i], values[i])
    inside = (g < GROUP)[:, None] & (d < D)[None, :]
    if sinks is not None:
        total, sums = with_sinks(highest, total, sums, tl.load(sinks + g, g < GROUP, 0.0))
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
    """A block of keys or values; if MASKED, only positions first to last.

    WRAPS: how often a block wraps around the end of a ring, at most; 2: any number of times.
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
    """The offset of a block, in elements, from where `load_keys` expects it by its position or slot."""
    shift = tl.full((), 0, tl.int64)
    if POSITIONS != 0:
        size: tl.constexpr = dtype.primitive_bitwidth // 8
        numbers, stride = pages
        held = slots
        if POSITIONS > 0:
            held = POSITIONS
        page = block * BLOCK // held
        mask = (numbers != 0) & (block * BLOCK <= last)
        shift = load_int64(tl.where(mask, numbers + page.to(tl.int64) * 8, 0)) * (stride // size)
        if not WINDOWED:
            shift = tl.where(mask, shift - page.to(tl.int64) * (held * D), 0)
        shift = tl.multiple_of(shift, ALIGNED // size)
    return shift


@triton.jit
def visible(position, block, span, BLOCK: tl.constexpr):
    """The mask [Q, BLOCK] of a block: keys up to each query's position, within the last `span`."""
    distance = position[:, None] - (block * BLOCK + tl.arange(0, BLOCK))[None, :]
    return (distance >= 0) & (distance < span)


@triton.jit
def attend_and_merge_block(
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
    SOFTCAP: tl.constexpr,
):
    """Add one block. SINGLE: each block is a group; else a complete group is merged when the next one begins.

    is_first: whether the block is the first of a group.
    """
    ROWS: tl.constexpr = q.shape[0]
    if SINGLE:
        # `attend_block` with no earlier keys.
        scores = capped(tl.dot(q, k.T, input_precision="ieee") * scale, SOFTCAP)
        nothing = tl.full((ROWS,), -float("inf"), tl.float32)
        top, _, weights, added_up = softmax_weights(scores, seen, nothing, v.dtype)
        new_sums = tl.dot(weights, v, input_precision="ieee")
        highest, total, sums = merge_partials(highest, total, sums, top, added_up, new_sums)
    else:
        if is_first:
            highest, total, sums = merge_partials(highest, total, sums, group_highest, group_total, group_sums)
            group_highest = tl.full((ROWS,), -float("inf"), tl.float32)
            group_total = tl.zeros((ROWS,), tl.float32)
            group_sums = tl.zeros((ROWS, v.shape[1]), tl.float32)
        group_highest, group_total, group_sums = attend_block(
            q, k, v, seen, group_highest, group_total, group_sums, scale, SOFTCAP
        )
    return highest, total, sums, group_highest, group_total, group_sums


@kernel(do_not_specialize=["window"])
def attend_many(
    q,  # [T, Hq, D]
    out,  # [T, Hq, D]
    table,  # int64 [R, COLUMNS]
    tiles,  # int32 [tiles, 5]: row of the table, its first token, its start and end position, the tile's first position
    positions,  # instead of tiles, if each row has one token: int32 [R]; -1: no token
    sinks,  # float32 [Hq], for exp2; or None
    scale,
    window,  # 0: none
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_G: tl.constexpr,  # GROUP, rounded up to a power of two
    QUERIES: tl.constexpr,  # positions per program, each with BLOCK_G heads
    BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINGLE: tl.constexpr,  # whether each block is a group, for all queries
    WINDOWED: tl.constexpr,
    WRAPS: tl.constexpr,
    POSITIONS: tl.constexpr,  # per page; 0: no pages; -1: as many as the row has slots
    ALIGNED: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """The queries of prompts of any lengths, or of many rows of one token, with the bits of `attend_one`.

    Tiles of queries are counted from position 0, so that all queries of a tile have the same blocks per group.
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
        start = tl.load(positions + row, cache_modifier=".cg")  # set before the step began
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
    d_mask = d < D
    heads = ((first_token + position - start).to(tl.int64) * (KV_HEADS * GROUP) + head * GROUP + member) * D
    queries = tl.load(q + heads[:, None] + d[None, :], within[:, None] & d_mask[None, :], 0.0)

    size = blocks_of_a_group(last_query, window, BLOCK, GROUPS)
    span, first = end, 0  # positions that a query sees
    # Blocks that are visible to all queries need no mask.
    unmasked = 0
    if WINDOWED:
        span = window
        first = tl.maximum(first_query - window + 1, 0)
        unmasked = tl.minimum(tl.cdiv(tl.maximum(last_query - window + 1, 0), BLOCK), last_query // BLOCK + 1)
    partial = tl.maximum((first_query + 1) // BLOCK, unmasked)
    highest = tl.full((ROWS,), -float("inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    sums = tl.zeros((ROWS, BLOCK_D), tl.float32)
    group_highest, group_total, group_sums = highest, total, sums
    # The page of a block is looked up during the previous block.
    shift = shift_of(pages, slots, first // BLOCK, last_query, D, BLOCK, dtype, WINDOWED, POSITIONS, ALIGNED)
    if WINDOWED:
        for block in tl.range(first // BLOCK, unmasked, num_stages=STAGES):
            next_shift = shift_of(pages, slots, block + 1, last_query, D, BLOCK, dtype, WINDOWED, POSITIONS, ALIGNED)
            next_k = load_keys(own_k + shift, block, slots, first, last_query, D, BLOCK_D, BLOCK, WRAPS, True)
            next_v = load_keys(own_v + shift, block, slots, first, last_query, D, BLOCK_D, BLOCK, WRAPS, True)
            highest, total, sums, group_highest, group_total, group_sums = attend_and_merge_block(
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
                SOFTCAP,
            )
            shift = next_shift
    for block in tl.range(unmasked, partial, num_stages=STAGES):
        next_shift = shift_of(pages, slots, block + 1, last_query, D, BLOCK, dtype, WINDOWED, POSITIONS, ALIGNED)
        next_k = load_keys(own_k + shift, block, slots, first, last_query, D, BLOCK_D, BLOCK, WRAPS, False)
        next_v = load_keys(own_v + shift, block, slots, first, last_query, D, BLOCK_D, BLOCK, WRAPS, False)
        highest, total, sums, group_highest, group_total, group_sums = attend_and_merge_block(
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
            SOFTCAP,
        )
        shift = next_shift
    for block in tl.range(partial, last_query // BLOCK + 1, num_stages=STAGES):
        next_shift = shift_of(pages, slots, block + 1, last_query, D, BLOCK, dtype, WINDOWED, POSITIONS, ALIGNED)
        next_k = load_keys(own_k + shift, block, slots, first, last_query, D, BLOCK_D, BLOCK, WRAPS, True)
        next_v = load_keys(own_v + shift, block, slots, first, last_query, D, BLOCK_D, BLOCK, WRAPS, True)
        highest, total, sums, group_highest, group_total, group_sums = attend_and_merge_block(
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
            SOFTCAP,
        )
        shift = next_shift
    if not SINGLE:
        highest, total, sums = merge_partials(highest, total, sums, group_highest, group_total, group_sums)
    if sinks is not None:
        of_head = tl.load(sinks + head * GROUP + member, member < GROUP, 0.0)
        total, sums = with_sinks(tl.where(within, highest, 0.0), total, sums, of_head)
    total = tl.where(within, total, 1.0)
    inside = within[:, None] & d_mask[None, :]
    tl.store(out + heads[:, None] + d[None, :], (sums / total[:, None]).to(out.dtype.element_ty), inside)
