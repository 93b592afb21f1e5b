"""Attention of one new token a row, for 16 bits an element and up to eight query heads of a KV head.

As `attend` in gpu_attention.py, which takes anything else. Here each warp has a block of keys to itself, or SHARE warps
have one and each some of its columns. Keys and values are loaded into just the registers that the matrix units take
them from, and wait there for the query, as the weights of `eight_rows` do. Until its blocks are done no warp waits for
one that has other keys; those of the same add up their scores.

What is loaded are tiles of 32 columns: four threads have a row, 16 bytes each, eight rows are a warp's, and a thread's
next row is 8 * WARPS below. What is called a row or a column there is chosen so that it need not change hands.
"""

from __future__ import annotations

import triton
import triton.language as tl

from infer.kernels.gpu_attention import MERGED, cache_of, own_keys
from infer.kernels.gpu_launch import is_last, let_next_start, wait_for_previous
from infer.kernels.gpu_rows import as_first_factor, as_second_factor


@triton.jit
def key_tile(WARPS: tl.constexpr, SHARE: tl.constexpr, BLOCK: tl.constexpr, OWN: tl.constexpr):
    """Which key is in each row of a tile of keys, [n, 1], and which columns, [n, 32], in a warp's first one."""
    line = tl.arange(0, BLOCK * WARPS)[:, None]
    key = line // (8 * SHARE) % (WARPS // SHARE) * BLOCK + line // (8 * WARPS) * 8 + line % 8
    return key, line // 8 % SHARE * (OWN // 2) + tl.arange(0, 32)[None, :]


@triton.jit
def value_tile(WARPS: tl.constexpr, SHARE: tl.constexpr, BLOCK: tl.constexpr, OWN: tl.constexpr):
    """The same of the tile of values, both [n, 32]: a warp has 64 columns of four keys in every eight rows."""
    at = tl.arange(0, 32)[None, :]
    line = tl.arange(0, BLOCK * WARPS * OWN // 32)[:, None]
    four = line // (WARPS * OWN // 8)
    key = line // (8 * SHARE) % (WARPS // SHARE) * BLOCK + four // 4 * 16 + four // 2 % 2 * 8 + at // 8 * 2 + four % 2
    return key, value_column(line, at, WARPS, SHARE, OWN)


@triton.jit
def value_column(line, at, WARPS: tl.constexpr, SHARE: tl.constexpr, OWN: tl.constexpr):
    """Of a tile of values: eight rows, eight columns of each, are 64 of a warp's OWN."""
    return line // 8 % SHARE * OWN + line // (8 * WARPS) % (OWN // 64) * 64 + line % 8 * 8 + at % 8


@triton.jit
def places(start, key, column, slots, D: tl.constexpr):
    """Where these keys after `start` lie, in a ring of slots."""
    at = start % slots + key
    return tl.where(at < slots, at, at - slots).to(tl.int64) * D + column


@triton.jit
def tile_start(i: tl.constexpr, D: tl.constexpr, OWN: tl.constexpr):
    """Where tile i begins. A warp has OWN columns, half in each half of D, because RoPE turns one with the other."""
    HALF: tl.constexpr = OWN // 64
    return i // HALF * (D // 2) + i % HALF * 32


@triton.jit
def load_columns(first, there, D: tl.constexpr, OWN: tl.constexpr):
    """All tiles of a warp's columns. there: None if all are."""
    tiles = ()
    for i in tl.static_range(OWN // 32):
        places = first + tile_start(i, D, OWN)
        if there is None:
            tile = tl.load(places)
        else:
            tile = tl.load(places, there, 0.0)
        tiles = tiles + (tile,)
    return tiles


@triton.jit
def store_columns(first, tiles, there, D: tl.constexpr, OWN: tl.constexpr):
    for i in tl.static_range(OWN // 32):
        tl.store(first + tile_start(i, D, OWN), tiles[i], there)


@triton.jit
def sum_of_squares(x, SHARE: tl.constexpr):
    """Of each row, in all its tiles, and those of other warps."""
    total = tl.sum(x[0].to(tl.float32) * x[0].to(tl.float32), 1)
    for i in tl.static_range(1, len(x)):
        total += tl.sum(x[i].to(tl.float32) * x[i].to(tl.float32), 1)
    if SHARE > 1:
        LINES: tl.constexpr = total.shape[0]
        SHAPE: tl.constexpr = (LINES // (8 * SHARE), SHARE, 8)
        of_all = tl.sum(tl.reshape(total, SHAPE), 1)
        total = tl.reshape(tl.broadcast_to(of_all[:, None, :], SHAPE), (LINES,))
    return total[:, None]


@triton.jit
def rotated_tiles(
    x, weights, cosines, sines, D: tl.constexpr, SHARE: tl.constexpr, EPS: tl.constexpr, OFFSET: tl.constexpr
):
    """Heads as attention takes them, in tiles. weights: () without a norm, cosines and sines without RoPE."""
    dtype = x[0].dtype
    normed = x
    if len(weights) > 0:
        scale = tl.rsqrt(sum_of_squares(x, SHARE) / D + EPS)
        normed = ()
        for i in tl.static_range(len(x)):
            normed = normed + ((x[i].to(tl.float32) * scale * (weights[i].to(tl.float32) + OFFSET)).to(dtype),)
    out = normed
    if len(cosines) > 0:
        HALF: tl.constexpr = len(x) // 2
        out = ()
        for i in tl.static_range(HALF):
            a, b = normed[i].to(tl.float32), normed[i + HALF].to(tl.float32)
            out = out + ((a * cosines[i] - b * sines[i]).to(dtype),)
        for i in tl.static_range(HALF):
            a, b = normed[i].to(tl.float32), normed[i + HALF].to(tl.float32)
            out = out + ((b * cosines[i] + a * sines[i]).to(dtype),)
    return out


@triton.jit
def repeated(tile, TIMES: tl.constexpr):
    """The same rows TIMES over, which each thread has already."""
    LINES: tl.constexpr = tile.shape[0]
    return tl.reshape(tl.broadcast_to(tile[None, :, :], (TIMES, LINES, 32)), (TIMES * LINES, 32))


@triton.jit
def as_values(tile, WARPS: tl.constexpr, BLOCK: tl.constexpr, OWN: tl.constexpr):
    """[BLOCK * WARPS * OWN / 32, 32] -> [WARPS, OWN, BLOCK], the first factor; its rows are `columns_of` them."""
    parts = tl.reshape(tile, (BLOCK // 16, 2, 2, OWN // 64, WARPS, 8, 4, 8))
    return tl.reshape(tl.permute(parts, (4, 3, 7, 5, 0, 1, 6, 2)), (WARPS, OWN, BLOCK))


@triton.jit
def columns_of(row):
    """Which column of a warp's each row of `as_values` is: a thread has eight that follow each other."""
    return row // 64 * 64 + row % 8 * 8 + row // 8 % 8


@triton.jit
def with_block(
    q,  # [WARPS, 16, 32] each: the instruction takes 16 queries, so each of eight is there twice
    k,
    v,
    there,  # [WARPS, 1, BLOCK]
    highest,  # [WARPS, 8]: the largest score so far
    total,  # [WARPS, 8]: the sum of the weights
    sums,  # [WARPS, OWN, 8]: the values by weight
    scale,
    WARPS: tl.constexpr,
    SHARE: tl.constexpr,
    BLOCK: tl.constexpr,
    OWN: tl.constexpr,
):
    """As `looked`: one block of keys and values more."""
    twice = tl.zeros((WARPS, 16, BLOCK), tl.float32)
    for i in tl.static_range(len(q)):
        twice = tl.dot(q[i], as_second_factor(k[i], WARPS, BLOCK), twice)
    scores = tl.max(tl.reshape(twice, (WARPS, 2, 8, BLOCK)), 1)  # of two that are the same, in one thread
    if SHARE > 1:
        SHAPE: tl.constexpr = (WARPS // SHARE, SHARE, 8, BLOCK)
        of_all = tl.sum(tl.reshape(scores, SHAPE), 1)
        scores = tl.reshape(tl.broadcast_to(of_all[:, None, :, :], SHAPE), (WARPS, 8, BLOCK))
    scores = tl.where(there, scores * scale, -float("inf"))
    top = tl.maximum(highest, tl.max(scores, 2))
    finite = tl.where(top == -float("inf"), 0.0, top)  # of a warp that has no key
    shrink = tl.exp(highest - finite)
    weights = tl.exp(scores - finite[:, :, None])
    second = tl.permute(weights.to(v.dtype), (0, 2, 1))
    sums = tl.dot(as_values(v, WARPS, BLOCK, OWN), second, sums * shrink[:, None, :])
    return top, total * shrink + tl.sum(weights, 2), sums


@triton.jit(do_not_specialize=["window"])
def attend_by_warps(
    qkv,  # [B, (Hq + 2 Hkv) D]
    out,  # [B, Hq D]
    pieces,  # float32 [B, Hq, splits, D + 4]: the outcome by these keys alone, and what they weigh, as a logarithm
    finished,  # int32 [B, Hkv]: programs that are done, 0 before and after
    table,  # int64 [B, COLUMNS]
    positions,  # int32 [B]: of the new tokens; -1: no token in this row
    q_norm,
    k_norm,
    turned,  # float32 [B, 2, D], from `turns`
    scale,
    window,  # 0: none
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of a KV head, at most 8
    JOIN_G: tl.constexpr,  # the next power of two
    D: tl.constexpr,
    BLOCK: tl.constexpr,  # keys that a warp looks at together; a multiple of 16
    WARPS: tl.constexpr,
    SHARE: tl.constexpr,  # warps that have the same keys, and of these D / SHARE columns each, a multiple of 64
    NORM: tl.constexpr,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    ROPE: tl.constexpr,
    ALIGNED: tl.constexpr,  # bytes that the addresses of all keys and values are a multiple of
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    SIZE: tl.constexpr = BLOCK * WARPS // SHARE
    OWN: tl.constexpr = D // SHARE
    head, split, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    splits = tl.num_programs(1)
    # As in `attend`, what earlier steps stored is read before this one's q, k and v are there.
    position = tl.load(positions + row, cache_modifier=".cg")
    start, end, used = own_keys(position, window, split, splits, SIZE)
    if split >= used:
        return
    dtype = qkv.dtype.element_ty
    keys, values, slots = cache_of(table, row, head, dtype, ALIGNED)
    key, column = key_tile(WARPS, SHARE, BLOCK, OWN)
    v_key, v_column = value_tile(WARPS, SHARE, BLOCK, OWN)
    cached = tl.minimum(end, position) - start
    k = load_columns(keys + places(start, key, column, slots, D), key < cached, D, OWN)
    v = tl.load(values + places(start, v_key, v_column, slots, D), v_key < cached, 0.0)
    line, at = tl.arange(0, 8 * WARPS)[:, None], tl.arange(0, 32)[None, :]
    own_column = line // 8 % SHARE * (OWN // 2) + at
    q_weights, k_weights, cosines, sines = (), (), (), ()
    if NORM:
        q_weights = load_columns(q_norm + own_column, None, D, OWN)
        k_weights = load_columns(k_norm + own_column, None, D, OWN)
    wait_for_previous(PDL)
    if position < 0:
        return
    heads = qkv + row * (KV_HEADS * (GROUP + 2) * D)
    q = load_columns(heads + (head * GROUP + line % 8) * D + own_column, line % 8 < GROUP, D, OWN)
    own_k = load_columns(heads + (KV_HEADS * GROUP + head) * D + own_column, None, D, OWN)
    v_line = tl.arange(0, WARPS * OWN // 8)[:, None]
    own_v_column = value_column(v_line, at, WARPS, SHARE, OWN)
    own_v = tl.load(heads + (KV_HEADS * (GROUP + 1) + head) * D + own_v_column)
    if ROPE:
        turn = turned + row * 2 * D + own_column
        for i in tl.static_range(OWN // 64):  # the halves of D turn by the same angles, and sines have a sign
            cosines = cosines + (tl.load(turn + i * 32),)
            sines = sines + (tl.load(turn + D + D // 2 + i * 32),)
    q = rotated_tiles(q, q_weights, cosines, sines, D, SHARE, EPS, OFFSET)
    own_k = rotated_tiles(own_k, k_weights, cosines, sines, D, SHARE, EPS, OFFSET)
    factors, first_k = (), ()
    for i in tl.static_range(len(q)):
        factors = factors + (as_first_factor(repeated(q[i], 2), WARPS),)
        first_k = first_k + (tl.where(start + key == position, repeated(own_k[i], BLOCK // 8), k[i]),)
    first_v = tl.where(start + v_key == position, repeated(own_v, BLOCK // 4), v)
    if split == used - 1:
        slot = (position % slots).to(tl.int64) * D
        once = (line % 8 == 0) & (line < 8 * SHARE)
        store_columns(keys + slot + own_column, own_k, once, D, OWN)
        tl.store(values + slot + own_v_column, own_v, (v_line // 8 % WARPS < SHARE) & (at < 8))
        tl.debug_barrier()  # a later block may hold them
    index = tl.arange(0, WARPS)[:, None, None] // SHARE * BLOCK + tl.arange(0, BLOCK)[None, None, :]
    highest = tl.full((WARPS, 8), -float("inf"), tl.float32)
    total = tl.zeros((WARPS, 8), tl.float32)
    sums = tl.zeros((WARPS, OWN, 8), tl.float32)
    there = start + index < end
    highest, total, sums = with_block(
        factors, first_k, first_v, there, highest, total, sums, scale, WARPS, SHARE, BLOCK, OWN
    )
    for first in tl.range(start + SIZE, end, SIZE, num_stages=1):
        left = end - first
        next_k = load_columns(keys + places(first, key, column, slots, D), key < left, D, OWN)
        next_v = tl.load(values + places(first, v_key, v_column, slots, D), v_key < left, 0.0)
        highest, total, sums = with_block(
            factors, next_k, next_v, index < left, highest, total, sums, scale, WARPS, SHARE, BLOCK, OWN
        )
    GROUPS: tl.constexpr = WARPS // SHARE
    highest = tl.reshape(highest, (GROUPS, SHARE, 8))
    top = tl.max(highest, 0)
    shrink = tl.exp(highest - top[None, :, :])
    total = tl.sum(tl.reshape(total, (GROUPS, SHARE, 8)) * shrink, 0)[:, None, :]
    sums = tl.sum(tl.reshape(sums, (GROUPS, SHARE, OWN, 8)) * shrink[:, :, None, :], 0)
    mean = sums / total

    query = row * (KV_HEADS * GROUP) + head * GROUP
    g = tl.arange(0, 8)[None, None, :]
    d = tl.arange(0, SHARE)[:, None, None] * OWN + columns_of(tl.arange(0, OWN))[None, :, None]
    if used == 1:
        tl.store(out + (query + g) * D + d, mean.to(dtype), g < GROUP)
        return
    piece = pieces + ((query + g) * splits + split) * (D + 4)
    tl.store(piece + d, mean, g < GROUP)
    weight = tl.broadcast_to(top[:, None, :] + tl.log(total), mean.shape)
    tl.store(piece + D + d, weight, (g < GROUP) & (d < 4))  # four times, to be loaded like the rest
    if is_last(finished + row * KV_HEADS + head, used):
        join(pieces + query * splits * (D + 4), out + query * D, used, splits, GROUP, JOIN_G, D)


@triton.jit
def join(pieces, out, used, splits, GROUP: tl.constexpr, JOIN_G: tl.constexpr, D: tl.constexpr):
    """Put the pieces of a KV head's queries together: each thread has four columns of all of them.

    Other programs wrote them: past the processor's own cache.
    """
    at = tl.arange(0, JOIN_G * D)
    FOURS: tl.constexpr = JOIN_G * D // 4
    highest = tl.full((FOURS,), -float("inf"), tl.float32)
    total = tl.zeros((FOURS,), tl.float32)
    sums = tl.zeros((FOURS, 4), tl.float32)
    for first in range(0, used, MERGED):
        piece = pieces + (at // D * splits + first) * (D + 4)
        left = tl.where(at < GROUP * D, used - first, 0)
        means, weights = (), ()
        for i in tl.static_range(MERGED):
            mean = tl.load(piece + i * (D + 4) + at % D, i < left, 0.0, cache_modifier=".cg")
            weight = tl.load(piece + i * (D + 4) + D + at % 4, i < left, -float("inf"), cache_modifier=".cg")
            means = means + (tl.reshape(mean, (FOURS, 4)),)
            weights = weights + (tl.max(tl.reshape(weight, (FOURS, 4)), 1),)
        top = highest
        for i in tl.static_range(MERGED):
            top = tl.maximum(top, weights[i])
        finite = tl.where(top == -float("inf"), 0.0, top)  # of heads that there are not
        shrink = tl.exp(highest - finite)
        total *= shrink
        sums *= shrink[:, None]
        for i in tl.static_range(MERGED):
            share = tl.exp(weights[i] - finite)
            total += share
            sums += means[i] * share[:, None]
        highest = top
    joined = tl.reshape(sums / total[:, None], (JOIN_G * D,))
    tl.store(out + at, joined.to(out.dtype.element_ty), at < GROUP * D)
