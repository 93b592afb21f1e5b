"""Kernels whose every number is added up in one order, however many rows, queries or keys there are.

The order follows from the shape of a matrix, and from the position of a query: never from how a pass was cut, nor from
who else is in it. Three things make that so:
- Sums that more than one kernel computes are matrix products: their elements do not depend on each other, and each adds
  up its columns in order, sixteen at a time, whatever the size of the tile. (On GPUs with instructions for 64 rows all
  first factors have as many, so that it is the same instruction.) No sum is left to a tree of threads, whose shape the
  compiler chooses, but for norms, over a vector that one program alone has. (`norm_rows` exists with and without
  another norm in front, and compilers cut the same sum alike in both: tests on the device see to it.)
- Keys are taken in blocks counted from position 0. What a query does not see weighs exactly 0, if it is finite.
- Kernels are to be launched so that no multiplication is fused with an addition, unless it is written so.
"""

from __future__ import annotations

import triton
import triton.language as tl

from infer.kernels import table as columns
from infer.kernels.gpu_attention import cache_of, load_heads, norm_weights, rotated
from infer.kernels.gpu_launch import is_last, let_next_start, wait_for_previous
from infer.kernels.gpu_rows import finished_sums, load_biases, load_block

COLUMNS = tl.constexpr(columns.COLUMNS)
KEYS, VALUES = tl.constexpr(columns.K), tl.constexpr(columns.V)
STRIDE, SLOTS = tl.constexpr(columns.STRIDE), tl.constexpr(columns.SLOTS)
FOLDED = tl.constexpr(8)  # groups that are loaded together


@triton.jit(do_not_specialize=["B"])
def many_rows(
    x,  # [B, K]
    weight,  # [N, K]; where GATED [2 N, K], the gate's rows first
    bias,
    residual,  # [B, N]
    out,  # [B, N]
    B,
    N,
    K: tl.constexpr,
    PART: tl.constexpr,  # columns that `few_rows` adds up in one program: added up here, one part after the other
    SPLIT: tl.constexpr,  # how many parts
    BLOCK_B: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BESIDE: tl.constexpr,  # blocks of x that follow each other before the next block of the matrix
    EVEN: tl.constexpr,  # whether blocks divide N and K
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,  # not with SPLIT
    ACTIVATION: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """`few_rows` for the many tokens of a prompt: the same bits."""
    let_next_start(PDL)
    # Programs that run at the same time share blocks of both factors.
    blocks_n, blocks_b = tl.cdiv(N, BLOCK_N), tl.cdiv(B, BLOCK_B)
    program = tl.program_id(0)
    first_b = program // (BESIDE * blocks_n) * BESIDE
    beside = tl.minimum(blocks_b - first_b, BESIDE)
    within = program % (BESIDE * blocks_n)
    column = within // beside * BLOCK_N + tl.arange(0, BLOCK_N)
    row = ((first_b + within % beside) * BLOCK_B + tl.arange(0, BLOCK_B)).to(tl.int64)
    exists, fed = column < N, row < B
    at = tl.arange(0, BLOCK_K)
    first = weight + column[:, None].to(tl.int64) * K + at[None, :]
    second = first + tl.cast(N, tl.int64) * K
    vectors = x + row[:, None] * K + at[None, :]
    wait_for_previous(PDL)
    y = tl.zeros((BLOCK_N, BLOCK_B), tl.float32)
    up = y
    for first_k in range(0, PART * SPLIT, PART):
        part = tl.zeros((BLOCK_N, BLOCK_B), tl.float32)
        for k in tl.range(first_k, first_k + PART, BLOCK_K, num_stages=STAGES):
            real = k + at < K
            turned = tl.load(vectors + k, fed[:, None] & real[None, :], 0.0).T
            part = tl.dot(load_block(first + k, exists, real, EVEN), turned, part, input_precision="ieee")
            if GATED:
                up = tl.dot(load_block(second + k, exists, real, EVEN), turned, up, input_precision="ieee")
        y += part
    places = row[None, :] * N + column[:, None]
    inside = fed[None, :] & exists[:, None]
    biases = ()
    if BIAS:
        biases = load_biases(bias, column, exists, N, GATED)
    addend = None
    if RESIDUAL:
        addend = tl.load(residual + places, inside, 0.0).to(tl.float32)
    summed = (y, up) if GATED else (y,)
    y = finished_sums(summed, None, biases, addend, ACTIVATION)
    tl.store(out + places, y.to(out.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["tabled", "q_out", "k_out", "v_out"])
def prepare_heads(
    qkv,  # [T, (Hq + 2 Hkv) D]
    table,  # int64 [T, COLUMNS], where `tabled`
    positions,  # int32 [T]; -1: no token
    q_norm,
    k_norm,
    turned,  # float32 [T, 2, D], from `turns`
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
        cosine = tl.load(turned + token * 2 * D + d, d < D, 0.0)
        sine = tl.load(turned + (token * 2 + 1) * D + d, d < D, 0.0)
    as_q = rotated(own, swapped, q_weight, q_other, cosine, sine, D, NORM, EPS, ROPE)
    as_k = rotated(own, swapped, k_weight, k_other, cosine, sine, D, NORM, EPS, ROPE)
    done = tl.where(is_q[:, None], as_q, tl.where(is_v[:, None], own, as_k))

    keys, values = k_out + token * (KV_HEADS * D * size), v_out + token * (KV_HEADS * D * size)
    stride = tl.full((), D * size, tl.int64)
    if tabled != 0:
        line = table + token * COLUMNS
        slot = position % tl.load(line + SLOTS) * (D * size)
        keys, values = tl.load(line + KEYS) + slot, tl.load(line + VALUES) + slot
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
def looked(q, k, v, seen, highest, total, sums, scale, ONES: tl.constexpr):
    """One block of keys more: the largest score so far [Q], the sum of the weights [Q], the values by weight [Q, D].

    q [Q, D]; k, v [BLOCK, D]; seen [Q, BLOCK]. Where a query sees nothing of a block, nothing changes. The sum of a
    block's weights is a product too, with ones, the same in each of its columns.
    """
    scores = tl.dot(q, k.T, input_precision="ieee") * scale
    scores = tl.where(seen, scores, -float("inf"))
    top = tl.maximum(highest, tl.max(scores, 1))
    base = tl.where(top == -float("inf"), 0.0, top)
    shrink = tl.exp2(highest - base)
    weights = tl.exp2(scores - base[:, None]).to(v.dtype)
    sums = tl.dot(weights, v, sums * shrink[:, None], input_precision="ieee")
    added = tl.max(tl.dot(weights, tl.full((k.shape[0], ONES), 1.0, v.dtype), input_precision="ieee"), 1)
    return top, total * shrink + added, sums


@triton.jit
def folded(highest, total, sums, group_highest, group_total, group_sums):
    """What a query has of the groups so far, and of one more: largest score [Q], sum of weights [Q], values [Q, D]."""
    top = tl.maximum(highest, group_highest)
    base = tl.where(top == -float("inf"), 0.0, top)
    kept, share = tl.exp2(highest - base), tl.exp2(group_highest - base)
    sums = sums * kept[:, None] + group_sums * share[:, None]
    return top, total * kept + group_total * share, sums


@triton.jit(do_not_specialize=["end", "keys", "window"])
def attend_one(
    q,  # [B, Hq, 1, D]
    k,  # [B, Hkv, keys, D], where not TABLE
    v,
    out,  # [B, Hq, D]
    pieces,  # float32 [B, Hkv, GROUPS + 1, MERGE_G, BLOCK_D + 2]: values by weight, largest score, sum of the weights
    finished,  # int32 [B, Hkv]: programs that are done, 0 before and after
    table,  # int64 [B, COLUMNS], where TABLE
    positions,  # int32 [B], where TABLE; -1: no token
    end,  # else the position of the query and 1
    keys,
    scale,
    window,  # 0: none
    q_row,  # strides
    q_head,
    k_row,
    k_head,
    k_token,
    v_row,
    v_head,
    v_token,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of a KV head
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_G: tl.constexpr,  # GROUP, up to what a matrix product takes
    MERGE_G: tl.constexpr,
    BLOCK: tl.constexpr,  # keys
    GROUPS: tl.constexpr,
    ONES: tl.constexpr,
    TABLE: tl.constexpr,
    ALIGNED: tl.constexpr,  # bytes that all addresses in a table are a multiple of
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """A single query a row. Programs share its groups of keys; the last one to finish folds them, in order."""
    let_next_start(PDL)
    split, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    dtype: tl.constexpr = q.dtype.element_ty
    # Where the token and the cache are was settled before the step began.
    if TABLE:
        position = tl.load(positions + row, cache_modifier=".cg")
        own_k, own_v, slots = cache_of(table, row, head, dtype, ALIGNED)
        offset, step_k, step_v = 0, D, D
    else:
        position, slots, offset = end - 1, keys, end - keys
        own_k, own_v = k + row * k_row + head.to(tl.int64) * k_head, v + row * v_row + head.to(tl.int64) * v_head
        step_k, step_v = k_token, v_token
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
    heads = q + row * q_row + (head * GROUP + g)[:, None].to(tl.int64) * q_head
    queries = tl.load(heads + d[None, :], within[:, None] & real[None, :], 0.0)
    pieces += (row * KV_HEADS + head) * ((GROUPS + 1) * (BLOCK_D + 2) * MERGE_G)
    for group in range(first_group + split, last_group + 1, tl.num_programs(0)):
        highest = tl.full((BLOCK_G,), -float("inf"), tl.float32)
        total = tl.zeros((BLOCK_G,), tl.float32)
        sums = tl.zeros((BLOCK_G, BLOCK_D), tl.float32)
        start, stop = tl.maximum(group * size, first // BLOCK), tl.minimum((group + 1) * size, position // BLOCK + 1)
        for block in tl.range(start, stop, num_stages=STAGES):
            at = block * BLOCK + s
            there = (at >= first) & (at <= position)
            slot = ((at - offset) % slots).to(tl.int64)[:, None]
            inside = there[:, None] & real[None, :]
            next_k = tl.load(own_k + slot * step_k + d[None, :], inside, 0.0)
            next_v = tl.load(own_v + slot * step_v + d[None, :], inside, 0.0)
            highest, total, sums = looked(queries, next_k, next_v, there[None, :], highest, total, sums, scale, ONES)
        piece = pieces + ((group - first_group) * MERGE_G + g) * (BLOCK_D + 2)
        merged = g < MERGE_G
        tl.store(piece[:, None] + d[None, :], sums, merged[:, None])
        tl.store(piece + BLOCK_D, highest, merged)
        tl.store(piece + BLOCK_D + 1, total, merged)
    if is_last(finished + row * KV_HEADS + head, tl.minimum(used, tl.num_programs(0))):
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
            there, piece = line < used * MERGE_G, pieces + line * (BLOCK_D + 2)
            tops = tops + (tl.load(piece + BLOCK_D, there, -float("inf"), cache_modifier=".cg"),)
            totals = totals + (tl.load(piece + BLOCK_D + 1, there, 0.0, cache_modifier=".cg"),)
            values = values + (tl.load(piece[:, None] + d[None, :], there[:, None], 0.0, cache_modifier=".cg"),)
        for i in tl.static_range(FOLDED):
            highest, total, sums = folded(highest, total, sums, tops[i], totals[i], values[i])
    inside = (g < GROUP)[:, None] & (d < D)[None, :]
    total = tl.where(g < GROUP, total, 1.0)
    tl.store(out + g[:, None] * D + d[None, :], (sums / total[:, None]).to(out.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["n", "end", "keys", "window"])
def attend_many(
    q,  # [B, Hq, n, D]
    k,  # [B, Hkv, keys, D], of the positions before `end`
    v,
    out,  # [B, n, Hq, D]
    n,
    end,
    keys,
    scale,
    window,  # 0: none
    q_row,  # strides
    q_head,
    q_token,
    k_row,
    k_head,
    k_token,
    v_row,
    v_head,
    v_token,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_G: tl.constexpr,  # GROUP, up to a power of two
    QUERIES: tl.constexpr,  # positions that a program takes, each with BLOCK_G heads
    BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,
    ONES: tl.constexpr,
    SINGLE: tl.constexpr,  # whether all queries take their blocks one by one
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """The queries of a prompt, at its last n positions: what `attend_one` gives each of them.

    Tiles of queries are counted from position 0, so that all in one take as many blocks to a group.
    """
    let_next_start(PDL)
    head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    start = end - n
    # Those with the most keys first, so that none of them is the last to run.
    tile = (start // QUERIES + tl.num_programs(0) - 1 - tl.program_id(0)) * QUERIES
    first_query, last_query = tl.maximum(tile, start), tl.minimum(tile + QUERIES, end) - 1
    wait_for_previous(PDL)
    if first_query > last_query:
        return
    c, d, s = tl.arange(0, QUERIES * BLOCK_G), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK)
    position, member = tile + c // BLOCK_G, c % BLOCK_G
    within = (position >= start) & (position < end) & (member < GROUP)
    real = d < D
    token, query_head = (position - start).to(tl.int64), (head * GROUP + member).to(tl.int64)
    heads = q + row * q_row + token * q_token + query_head * q_head
    queries = tl.load(heads[:, None] + d[None, :], within[:, None] & real[None, :], 0.0)
    own_k, own_v = k + row * k_row + head.to(tl.int64) * k_head, v + row * v_row + head.to(tl.int64) * v_head

    size = blocks_of_a_group(last_query, window, BLOCK, GROUPS)
    span = end  # as many positions as can be seen
    first = 0
    if window > 0:
        span = window
        first = tl.maximum(first_query - window + 1, 0)
    highest = tl.full((QUERIES * BLOCK_G,), -float("inf"), tl.float32)
    total = tl.zeros((QUERIES * BLOCK_G,), tl.float32)
    sums = tl.zeros((QUERIES * BLOCK_G, BLOCK_D), tl.float32)
    group_highest, group_total, group_sums = highest, total, sums
    for block in tl.range(first // BLOCK, last_query // BLOCK + 1, num_stages=STAGES):
        at = block * BLOCK + s
        slot = (at - (end - keys)).to(tl.int64)[:, None]
        inside = ((at >= first) & (at <= last_query))[:, None] & real[None, :]
        next_k = tl.load(own_k + slot * k_token + d[None, :], inside, 0.0)
        next_v = tl.load(own_v + slot * v_token + d[None, :], inside, 0.0)
        distance = position[:, None] - at[None, :]
        seen = (distance >= 0) & (distance < span)
        if SINGLE or block % size == 0:
            highest, total, sums = folded(highest, total, sums, group_highest, group_total, group_sums)
            group_highest = tl.full((QUERIES * BLOCK_G,), -float("inf"), tl.float32)
            group_total = tl.zeros((QUERIES * BLOCK_G,), tl.float32)
            group_sums = tl.zeros((QUERIES * BLOCK_G, BLOCK_D), tl.float32)
        group_highest, group_total, group_sums = looked(
            queries, next_k, next_v, seen, group_highest, group_total, group_sums, scale, ONES
        )
    highest, total, sums = folded(highest, total, sums, group_highest, group_total, group_sums)
    total = tl.where(within, total, 1.0)
    place = out + ((row * n + token) * (KV_HEADS * GROUP) + query_head) * D
    inside = within[:, None] & real[None, :]
    tl.store(place[:, None] + d[None, :], (sums / total[:, None]).to(out.dtype.element_ty), inside)
