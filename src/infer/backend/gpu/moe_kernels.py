"""Kernels of a mixture of experts: routing, and the GEMMs of the experts that tokens chose.

A pair is a token and one of its experts; pair p is token p // TOP_K. A program of `expert_gemm` has a block of one
expert's rows, for all pairs of that expert or some of them. As elsewhere, 16 columns at a time are added into one
accumulator, so what a pair gets does not depend on which pairs share a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from infer.backend.gpu.launch_kernels import let_next_start, prefetch_l2, wait_for_previous
from infer.backend.gpu.launcher import kernel
from infer.backend.gpu.row_kernels import activated, sigmoid, tree_sum


@kernel()
def route_rows(
    logits,  # [T, E]
    positions,  # int32 [T]; -1: no token
    experts,  # int32 [T, TOP_K]; -1: no token
    weights,  # float32 [T, TOP_K]
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    TOP_K: tl.constexpr,
    NORM: tl.constexpr,  # whether the weights of a token add up to 1
    PDL: tl.constexpr,
):
    """The experts of a token, best first, equal ones by number, and the softmax of their logits."""
    row, e = tl.program_id(0), tl.arange(0, BLOCK_E)
    position = tl.load(positions + row)
    wait_for_previous(PDL)
    let_next_start(PDL)  # not before: programs of `expert_gemm` that wait would take the place of others
    own = tl.load(logits + row.to(tl.int64) * E + e, e < E, -float("inf")).to(tl.float32)
    own = tl.where(own == own, own, -float("inf"))  # even a token of NaNs has TOP_K different experts
    highest = tl.max(own, 0)
    powers = tl.exp(own - highest)
    total = tl.sum(tree_sum(tl.reshape(powers, (BLOCK_E, 1))), 0)
    if NORM:
        free, total = e < E, 0.0
        for _ in tl.static_range(TOP_K):
            best, top = best_expert(own, free, e, BLOCK_E)
            free = free & (e != best)
            total += tl.exp(top - highest)
    free = e < E
    for i in tl.static_range(TOP_K):
        best, top = best_expert(own, free, e, BLOCK_E)
        free = free & (e != best)
        tl.store(experts + row * TOP_K + i, tl.where(position < 0, -1, best))
        tl.store(weights + row * TOP_K + i, tl.exp(top - highest) / total)


@triton.jit
def best_expert(logits, free, e, BLOCK_E: tl.constexpr):
    """The first of the free experts with the highest logit, and that logit."""
    top = tl.max(tl.where(free, logits, -float("inf")), 0)
    return tl.min(tl.where(free & (logits == top), e, BLOCK_E), 0), top


@kernel(do_not_specialize=["pairs"])
def group_pairs(
    experts,  # int32 [pairs]
    members,  # int32 [E, T]: the pairs of each expert
    counts,  # int32 [E]
    pairs,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per expert: its pairs, in order. A token chooses an expert at most once."""
    expert, at = tl.program_id(0), tl.arange(0, BLOCK)
    own = members + expert.to(tl.int64) * (pairs // TOP_K)
    wait_for_previous(PDL)
    let_next_start(PDL)
    count = 0
    for first in range(0, pairs, BLOCK):
        pair = first + at
        mine = (tl.load(experts + pair, pair < pairs, -1) == expert).to(tl.int32)
        tl.store(own + count + tl.cumsum(mine, 0) - 1, pair, mine != 0)
        count += tl.sum(mine, 0)
    tl.store(counts + expert, count)


@kernel(do_not_specialize=["pairs"])
def expert_gemm(
    x,  # [T, K], or [pairs, K]
    weight,  # [E * MATRICES N, K]: expert after expert; if GATED, its gates first
    bias,  # [E * MATRICES N], or None
    out,  # [pairs, N]; or, with routed weights, float32 [TOP_K, T, N]
    experts,  # int32 [pairs]; -1: no token
    routed,  # float32 [pairs]: what a pair's output is multiplied by, or None
    members,  # int32 [E, T], from `group_pairs`; None: program (., p) has all pairs with p's expert if p is the first
    counts,  # int32 [E]
    pairs,
    N: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    SHARED: tl.constexpr,  # whether x has one row per token
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PAIRS: tl.constexpr,  # without members: pairs, rounded up to a power of two
    BLOCK_B: tl.constexpr,  # pairs of a program
    BLOCK_N: tl.constexpr,  # rows of the matrix; if GATED, half of them are gates
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,  # whether blocks divide N and K
    STAGES: tl.constexpr,
    PREFETCHED: tl.constexpr,  # columns prefetched into the L2 cache before x is ready
    PDL: tl.constexpr,
):
    MATRICES: tl.constexpr = 2 if GATED else 1
    COLUMNS: tl.constexpr = BLOCK_N // MATRICES
    r = tl.arange(0, BLOCK_B)
    if SHARED:
        # The first of the two GEMMs waits for the routes. The second starts only then, and may read them at once.
        wait_for_previous(PDL)
    let_next_start(PDL)
    if members is not None:
        tokens = pairs // TOP_K
        blocks = tl.cdiv(tokens, BLOCK_B)
        expert = tl.program_id(1) // blocks
        first = tl.program_id(1) % blocks * BLOCK_B
        count = tl.load(counts + expert)
        if first >= count:
            return
        row_mask = first + r < count
        pair = tl.load(members + expert.to(tl.int64) * tokens + first + r, row_mask, 0)
    else:
        p, q = tl.program_id(1), tl.arange(0, PAIRS)
        expert = tl.load(experts + p)
        if expert < 0:
            return
        same = (tl.load(experts + q, q < pairs, -1) == expert).to(tl.int32)
        if tl.sum(same * (q < p).to(tl.int32), 0) > 0:
            return  # an earlier program has this expert
        place = tl.where(same != 0, tl.cumsum(same, 0) - 1, -1)
        pair = tl.sum(tl.where(place[None, :] == r[:, None], q[None, :], 0), 1)
        row_mask = r < tl.sum(same, 0)
    line, at = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    place_n = tl.program_id(0) * COLUMNS + line % COLUMNS
    in_matrix = expert.to(tl.int64) * (MATRICES * N) + place_n + line // COLUMNS * N
    lines = weight + in_matrix[:, None] * K + at[None, :]
    if not SHARED:
        prefetch_l2(weight + in_matrix[:, None] * K, PREFETCHED, PDL)
        wait_for_previous(PDL)
    row = pair.to(tl.int64)
    if SHARED:
        row = row // TOP_K
    vectors = x + row[:, None] * K + at[None, :]
    y = tl.zeros((BLOCK_N, BLOCK_B), tl.float32)
    for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        if EVEN:
            block = tl.load(lines + k)
            rows = tl.load(vectors + k, row_mask[:, None], 0.0)
        else:
            block = tl.load(lines + k, (place_n < N)[:, None] & (k + at < K)[None, :], 0.0)
            rows = tl.load(vectors + k, row_mask[:, None] & (k + at < K)[None, :], 0.0)
        y = tl.dot(block, rows.T, y, input_precision="ieee")
    dtype: tl.constexpr = x.dtype.element_ty
    y = y.to(dtype).to(tl.float32)
    if bias is not None:
        y += tl.load(bias + in_matrix, place_n < N, 0.0).to(tl.float32)[:, None]
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(y, (2, COLUMNS, BLOCK_B)), (1, 2, 0)))
        y = activated_pair(gate, up, ACTIVATION)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (column < N)[:, None] & row_mask[None, :]
    if routed is not None:
        y = y.to(dtype).to(tl.float32) * tl.load(routed + pair, row_mask, 0.0)[None, :]
        to = (pair % TOP_K * (pairs // TOP_K) + pair // TOP_K).to(tl.int64)
        tl.store(out + to[None, :] * N + column[:, None], y, inside)
    else:
        tl.store(out + pair.to(tl.int64)[None, :] * N + column[:, None], y.to(dtype), inside)


@triton.jit
def activated_pair(gate, up, ACTIVATION: tl.constexpr):
    if ACTIVATION == "clamped_swiglu":  # of gpt-oss
        gate = tl.minimum(gate, 7.0)
        up = tl.minimum(tl.maximum(up, -7.0), 7.0)
        y = (up + 1) * (gate * sigmoid(1.702 * gate))
    else:
        y = activated(gate, ACTIVATION) * up
    return y
