"""Decode attention for one new token per row, in 16 bits with up to eight query heads per KV head.

It computes what `prepare_heads` and `attend_one` in attention_kernels.py compute, in one kernel: norm and rotate the
token's heads, store its key and value, and attend. Keys and values are loaded directly into the registers of the matrix
instructions, and wait there for the query, like the weights of `gemv`. Of each block, a warp has some keys for the
scores, and some columns of all values.
"""

from __future__ import annotations

import triton
import triton.language as tl

from infer.backend.gpu.attention_kernels import (
    blocks_of_a_group,
    cache_of,
    merge_stored_partials,
    page_of,
    softmax_weights,
)
from infer.backend.gpu.gemm_kernels import as_first_factor, as_second_factor, repeated
from infer.backend.gpu.launch_kernels import is_last, let_next_start, wait_for_previous
from infer.backend.gpu.launcher import kernel
from infer.backend.gpu.row_kernels import capped, norm_scale, tree_sum


@triton.jit
def in_ring(start, key, slots):
    """The ring slots of the keys at start + key."""
    at = start % slots + key
    return tl.where(at < slots, at, at - slots)


@triton.jit
def value_columns(line, at, WARPS: tl.constexpr):
    """In a tile of values, eight rows with eight columns each are the 64 columns of a warp."""
    return line // 8 % WARPS * 64 + line % 8 * 8 + at % 8


@triton.jit
def as_values(tile, BLOCK: tl.constexpr, WARPS: tl.constexpr):
    """[2 BLOCK * WARPS, 32] -> [WARPS, 64, BLOCK], the first operand; its rows are value columns in a thread's order.

    A thread loads eight columns of one key, and four threads have adjacent pairs of keys.
    """
    parts = tl.reshape(tile, (BLOCK // 16, 2, 2, WARPS, 8, 4, 8))
    return tl.reshape(tl.permute(parts, (3, 6, 4, 0, 1, 5, 2)), (WARPS, 64, BLOCK))


@triton.jit
def load_halves(first, mask, D: tl.constexpr):
    """The tiles of the first and second half of a head's columns. mask: None: load all."""
    if mask is None:
        halves = (tl.load(first), tl.load(first + D // 2))
    else:
        halves = (tl.load(first, mask, 0.0), tl.load(first + D // 2, mask, 0.0))
    return halves


@triton.jit
def rotated_halves(
    x, weights, cosine, sine, STEPS: tl.constexpr, D: tl.constexpr, EPS: tl.constexpr, OFFSET: tl.constexpr
):
    """Like `rotated` in attention_kernels.py, for the halves of heads, each in STEPS tiles.

    weights: of a norm, or (None, None); cosine: None without RoPE.
    """
    a, b = x
    dtype: tl.constexpr = a.dtype
    if weights[0] is not None:
        scale = norm_scale(half_squares(a, STEPS) + half_squares(b, STEPS), D, EPS)
        LINES: tl.constexpr = scale.shape[0]
        scale = tl.reshape(tl.broadcast_to(scale[None, :], (STEPS, LINES)), (STEPS * LINES,))[:, None]
        a = (a.to(tl.float32) * scale * (weights[0].to(tl.float32) + OFFSET)).to(dtype)
        b = (b.to(tl.float32) * scale * (weights[1].to(tl.float32) + OFFSET)).to(dtype)
    if cosine is not None:
        wide_a, wide_b = a.to(tl.float32), b.to(tl.float32)
        a = (wide_a * cosine - wide_b * sine).to(dtype)
        b = (wide_b * cosine + wide_a * sine).to(dtype)
    return a, b


@triton.jit
def half_squares(x, STEPS: tl.constexpr):
    """The sum of squares of each line, over all its tiles."""
    wide = x.to(tl.float32)
    squares = tree_sum(tl.trans(wide * wide))  # over 32 columns each
    return tree_sum(tl.reshape(squares, (STEPS, x.shape[0] // STEPS)))


@kernel(do_not_specialize=["window"])
def attend_by_warps(
    qkv,  # [B, (Hq + 2 Hkv) D]
    out,  # [B, Hq, D]
    partials,  # float32 [B, Hkv, GROUPS + 1, MERGE_G, D + 4]: like `attend_one`
    split_counters,  # int32 [B, Hkv]: finished programs, 0 before and after
    table,  # int64 [B, COLUMNS]
    positions,  # int32 [B]: of the new tokens; -1: no token in the row
    q_norm,  # [D], or None
    k_norm,
    rope_cos_sin,  # float32 [B, 2, D], from `rope_tables`, or None
    sinks,  # float32 [Hq], for exp2; or None
    scale,
    window,  # 0: none
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads per KV head, at most 8
    MERGE_G: tl.constexpr,  # the next power of two
    D: tl.constexpr,  # 64 for each warp
    BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    ALIGNED: tl.constexpr,  # bytes: alignment of all keys and values
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    WARPS: tl.constexpr = D // 64
    STEPS: tl.constexpr = D // 64  # tiles of 32 columns of half a head
    OWN: tl.constexpr = BLOCK // WARPS  # keys per warp, for the scores
    split, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    dtype: tl.constexpr = qkv.dtype.element_ty
    # `begin` has set positions and tables, so keys of earlier steps can be loaded before this step's q, k and v exist.
    position = tl.load(positions + row, cache_modifier=".cg")
    size = blocks_of_a_group(tl.maximum(position, 0), window, BLOCK, GROUPS)
    oldest = 0
    if window > 0:
        oldest = tl.maximum(position - window + 1, 0)
    first_group, last_group = oldest // BLOCK // size, tl.maximum(position, 0) // BLOCK // size
    used = last_group - first_group + 1
    if split >= used:
        return
    keys, values, slots, pages = cache_of(table, row, head, dtype, ALIGNED)
    at = tl.arange(0, 32)[None, :]
    line = tl.arange(0, STEPS * BLOCK)[:, None]
    key = line // 8 % WARPS * OWN + line // (8 * WARPS) % (OWN // 8) * 8 + line % 8
    own_keys = keys + line // BLOCK * 32 + at
    line = tl.arange(0, 2 * BLOCK * WARPS)[:, None]
    pair = line // (8 * WARPS)
    v_key = pair // 4 * 16 + pair // 2 % 2 * 8 + at // 8 * 2 + pair % 2
    v_column = value_columns(line, at, WARPS)

    begin = tl.maximum((first_group + split) * size, oldest // BLOCK) * BLOCK
    left = tl.minimum(BLOCK, position - begin)
    page = page_of(pages, begin, slots, position >= 0, dtype, ALIGNED)
    slot = page + in_ring(begin, key, slots).to(tl.int64) * D
    block_k = load_halves(own_keys + slot, (key < left) & (begin + key >= oldest), D)
    block_v = tl.load(
        values + page + in_ring(begin, v_key, slots).to(tl.int64) * D + v_column,
        (v_key < left) & (begin + v_key >= oldest),
        0.0,
    )
    line = tl.arange(0, STEPS * 8 * WARPS)[:, None]
    half_column = line // (8 * WARPS) * 32 + at
    q_weights, k_weights, cosine, sine = (None, None), (None, None), None, None
    if q_norm is not None:
        q_weights, k_weights = load_halves(q_norm + half_column, None, D), load_halves(k_norm + half_column, None, D)
    wait_for_previous(PDL)
    if position < 0:
        return
    # Start all loads of the previous kernel's output at once: each takes longer than the computation on it.
    heads = qkv + row * (KV_HEADS * (GROUP + 2) * D)
    g = line % 8
    q = load_halves(heads + (head * GROUP + g) * D + half_column, g < GROUP, D)
    k = load_halves(heads + (KV_HEADS * GROUP + head) * D + half_column, None, D)
    v_line = tl.arange(0, 8 * WARPS)[:, None]
    own_v_column = value_columns(v_line, at, WARPS)
    own_value = heads + (KV_HEADS * (GROUP + 1) + head) * D
    v = tl.load(own_value + own_v_column)
    block_v = tl.load(own_value + v_column, begin + v_key == position, block_v)
    if rope_cos_sin is not None:  # both halves rotate by the same angles; sines are signed
        cosine = tl.load(rope_cos_sin + row * 2 * D + half_column)
        sine = tl.load(rope_cos_sin + row * 2 * D + D + D // 2 + half_column)
    q = rotated_halves(q, q_weights, cosine, sine, STEPS, D, EPS, OFFSET)
    k = rotated_halves(k, k_weights, cosine, sine, STEPS, D, EPS, OFFSET)
    if split == (used - 1) % tl.num_programs(0):  # the program with the last keys
        own_slot = page_of(pages, position, slots, True, dtype, ALIGNED) + (position % slots).to(tl.int64) * D
        tl.store(keys + own_slot + half_column, k[0], line % (8 * WARPS) == 0)
        tl.store(keys + own_slot + D // 2 + half_column, k[1], line % (8 * WARPS) == 0)
        tl.store(values + own_slot + own_v_column, v, at < 8)
        tl.debug_barrier()  # a later block may load them
    # The instruction takes 16 queries: each of the eight twice.
    factor = as_first_factor(repeated(q[0], STEPS), STEPS, WARPS)
    other_factor = as_first_factor(repeated(q[1], STEPS), STEPS, WARPS)
    # The score of the token's own key is computed separately, eight times; its value was loaded with the others.
    own_scores = tl.dot(factor, as_second_factor(k[0], STEPS, WARPS, 8))
    own_scores = tl.dot(other_factor, as_second_factor(k[1], STEPS, WARPS, 8), own_scores)
    own_scores = tl.broadcast_to(tl.reshape(own_scores, (WARPS, 16, 1, 8)), (WARPS, 16, OWN // 8, 8))
    scored = (tl.arange(0, WARPS)[:, None] * OWN + tl.arange(0, OWN)[None, :])[:, None, :]
    scores = scores_by_warps(factor, other_factor, block_k, STEPS, WARPS, OWN)
    scores = tl.where(begin + scored == position, tl.reshape(own_scores, (WARPS, 16, OWN)), scores)
    none = tl.full((8,), -float("inf"), tl.float32)
    zero = tl.zeros((8,), tl.float32)
    nothing = tl.zeros((WARPS, 64, 8), tl.float32)
    highest, total, sums = attend_block_by_warps(
        scores, block_v, begin, oldest, position, none, zero, nothing, scale, SOFTCAP, WARPS, BLOCK, OWN
    )

    g, d = tl.arange(0, 8)[None, None, :], tl.arange(0, WARPS)[:, None, None] * 64
    row_of = tl.arange(0, 64)
    d = d + (row_of % 8 * 8 + row_of // 8)[None, :, None]  # the column of each row of `as_values`
    partials += (row * KV_HEADS + head) * ((GROUPS + 1) * (D + 4) * MERGE_G)
    final = out + (row * KV_HEADS + head) * (GROUP * D)
    for group in range(first_group + split, last_group + 1, tl.num_programs(0)):
        start = tl.maximum(group * size, oldest // BLOCK)
        stop = tl.minimum((group + 1) * size, position // BLOCK + 1)
        if start * BLOCK == begin:
            start += 1
        else:
            highest, total, sums = none, zero, nothing
        next_page = page_of(pages, start * BLOCK, slots, start < stop, dtype, ALIGNED)
        for block in tl.range(start, stop, num_stages=1):
            at_key, page = block * BLOCK, next_page  # looked up one block ahead: key addresses depend on it
            next_page = page_of(pages, at_key + BLOCK, slots, block + 1 < stop, dtype, ALIGNED)
            mask = (at_key + key >= oldest) & (at_key + key <= position)
            next_k = load_halves(own_keys + page + in_ring(at_key, key, slots).to(tl.int64) * D, mask, D)
            mask = (at_key + v_key >= oldest) & (at_key + v_key <= position)
            v_slot = page + in_ring(at_key, v_key, slots).to(tl.int64) * D
            next_v = tl.load(values + v_slot + v_column, mask, 0.0)
            scores = scores_by_warps(factor, other_factor, next_k, STEPS, WARPS, OWN)
            highest, total, sums = attend_block_by_warps(
                scores, next_v, at_key, oldest, position, highest, total, sums, scale, SOFTCAP, WARPS, BLOCK, OWN
            )
        if used == 1:
            top, total, sums = merge_partial_columns(none, zero, nothing, highest, total, sums)
            of_g = tl.arange(0, 8)
            if sinks is not None:
                own_sinks = tl.load(sinks + head * GROUP + of_g, of_g < GROUP, 0.0)
                highest = tl.maximum(top, own_sinks)
                kept = tl.exp2(top - highest)
                total, sums = total * kept + tl.exp2(own_sinks - highest), sums * kept[None, None, :]
            total = tl.where(of_g < GROUP, total, 1.0)
            tl.store(final + g * D + d, (sums / total[None, None, :]).to(dtype), g < GROUP)
        else:
            piece = partials + ((group - first_group) * MERGE_G + g) * (D + 4)
            tl.store(piece + d, sums, g < MERGE_G)
            of_g = tl.arange(0, 8)
            piece = partials + ((group - first_group) * MERGE_G + of_g) * (D + 4)
            tl.store(piece + D, highest, of_g < MERGE_G)
            tl.store(piece + D + 1, total, of_g < MERGE_G)
    if used > 1:
        if is_last(split_counters + row * KV_HEADS + head, tl.minimum(used, tl.num_programs(0))):
            own_sinks = None
            if sinks is not None:
                own_sinks = sinks + head * GROUP
            merge_stored_partials(partials, final, own_sinks, used, GROUP, MERGE_G, D, D)


@triton.jit
def scores_by_warps(factor, other_factor, k, STEPS: tl.constexpr, WARPS: tl.constexpr, OWN: tl.constexpr):
    """[WARPS, 16, OWN]: eight queries, twice."""
    scores = tl.dot(factor, as_second_factor(k[0], STEPS, WARPS, OWN))
    return tl.dot(other_factor, as_second_factor(k[1], STEPS, WARPS, OWN), scores)


@triton.jit
def attend_block_by_warps(
    scores,
    v,
    start,
    oldest,
    position,
    highest,
    total,
    sums,
    scale,
    SOFTCAP: tl.constexpr,
    WARPS: tl.constexpr,
    BLOCK: tl.constexpr,
    OWN: tl.constexpr,
):
    """Like `attend_block`, for scores [WARPS, 16, OWN], values in their loaded layout, and sums [WARPS, 64, Q]."""
    scores = tl.max(tl.reshape(scores, (WARPS, 2, 8, OWN)), 1)  # of two equal values in one thread
    scores = capped(tl.reshape(tl.permute(scores, (1, 0, 2)), (8, BLOCK)) * scale, SOFTCAP)
    at = start + tl.arange(0, BLOCK)
    seen = (at >= oldest) & (at <= position)
    highest, shrink, weights, added_up = softmax_weights(scores, seen[None, :], highest, v.dtype)
    second = tl.broadcast_to(tl.trans(weights)[None, :, :], (WARPS, BLOCK, 8))
    sums = tl.dot(as_values(v, BLOCK, WARPS), second, sums * shrink[None, None, :])
    return highest, total * shrink + added_up, sums


@triton.jit
def merge_partial_columns(highest, total, sums, group_highest, group_total, group_sums):
    """Like `merge_partials`, for sums [WARPS, 64, Q]."""
    top = tl.maximum(highest, group_highest)
    base = tl.where(top == -float("inf"), 0.0, top)
    kept, share = tl.exp2(highest - base), tl.exp2(group_highest - base)
    sums = tl.fma(group_sums, share[None, None, :], sums * kept[None, None, :])
    return top, total * kept + group_total * share, sums
