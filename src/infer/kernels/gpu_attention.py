"""Attention of one new token a row: norm its heads, rotate them, store its key and value, and look at all before it.

Keys are split among programs, because one row's would keep only a few of a GPU's processors busy. How long a row is
lies on the device, so the same launch serves every length: programs that a row does not need end at once. The last
one to finish for a KV head puts the pieces together, in their order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from infer.kernels import table as columns
from infer.kernels.gpu_launch import is_last, let_next_start, wait_for_previous
from infer.kernels.gpu_product import added, load_parts, store_parts

COLUMNS = tl.constexpr(columns.COLUMNS)
KEYS, VALUES = tl.constexpr(columns.K), tl.constexpr(columns.V)
STRIDE, SLOTS = tl.constexpr(columns.STRIDE), tl.constexpr(columns.SLOTS)
MERGED = tl.constexpr(16)  # pieces that are put together at a time


@triton.jit
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
    turned,  # float32 [KINDS, B, 2, D]
    FACTOR: tl.constexpr,  # of the tokens' vectors
    C: tl.constexpr,
    PARTS: tl.constexpr,
    KINDS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
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
    for kind in tl.static_range(KINDS):
        line = turned + (kind * tl.num_programs(0) + row) * 2 * D
        turn(position, frequencies + kind * D, line, D, BLOCK_D)


@triton.jit
def scaled(x, factor, dtype, PARTS: tl.constexpr):
    """x in parts, times a factor."""
    out = ()
    for i in tl.static_range(len(PARTS)):
        out = out + ((x[i] * factor).to(dtype).to(tl.float32),)
    return out


@triton.jit
def turns(positions, frequencies, out, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """How far RoPE turns the heads of each row's new token: the same in all layers that rotate alike."""
    row = tl.program_id(0)
    turn(tl.load(positions + row), frequencies, out + row * 2 * D, D, BLOCK_D)


@triton.jit
def turn(position, frequencies, out, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """out [2, D]: cosines, and sines with the sign that the halves of a head are swapped with."""
    d = tl.arange(0, BLOCK_D)
    angle = position.to(tl.float32) * tl.load(frequencies + d, d < D, 0.0)
    sine = tl.sin(angle)
    tl.store(out + d, tl.cos(angle), d < D)
    tl.store(out + D + d, tl.where(d < D // 2, -sine, sine), d < D)


@triton.jit
def partner(d, D: tl.constexpr):
    """What is turned together with dimension d."""
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
        scale = tl.rsqrt(tl.sum(wide * wide, 1) / D + EPS)[:, None]
        x = (wide * scale * weight[None, :]).to(dtype)
        y = (y.to(tl.float32) * scale * other_weight[None, :]).to(dtype)
    if ROPE:
        x = (x.to(tl.float32) * cosine[None, :] + y.to(tl.float32) * sine[None, :]).to(dtype)
    return x


@triton.jit
def own_keys(position, window, split, splits, BLOCK: tl.constexpr):
    """Which of a row's keys a program has, in blocks: the first position, the one behind; and how many have any."""
    seen = tl.maximum(position + 1, 1)  # keys, the token's own among them
    if window > 0:
        seen = tl.minimum(seen, window)
    chunk = tl.maximum(tl.cdiv(tl.cdiv(seen, splits), BLOCK), 1) * BLOCK
    start = position + 1 - seen + split * chunk
    return start, tl.minimum(start + chunk, position + 1), tl.cdiv(seen, chunk)


@triton.jit
def cache_of(table, row, head, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    """Where the keys and values of a row's KV head are, and how many slots there are."""
    line = table + row * COLUMNS
    offset = head * tl.load(line + STRIDE)
    keys = tl.multiple_of((tl.load(line + KEYS) + offset).to(tl.pointer_type(dtype)), ALIGNED)
    values = tl.multiple_of((tl.load(line + VALUES) + offset).to(tl.pointer_type(dtype)), ALIGNED)
    return keys, values, tl.load(line + SLOTS).to(tl.int32)


@triton.jit(do_not_specialize=["window"])
def attend(
    qkv,  # [B, (Hq + 2 Hkv) D]
    out,  # [B, Hq D]
    pieces,  # float32 [B, Hq, splits, D + 4]: values by weight, the largest score, the sum of the weights, two unused
    finished,  # int32 [B, Hkv]: programs that are done, 0 before and after
    table,  # int64 [B, COLUMNS]
    positions,  # int32 [B]: of the new tokens; -1: no token in this row
    q_norm,
    k_norm,
    turned,  # float32 [B, 2, D], from `turns`
    scale,
    window,  # 0: none
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of a KV head
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_G: tl.constexpr,  # GROUP, up to what a matrix product takes
    MERGE_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
    NORM: tl.constexpr,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    ROPE: tl.constexpr,
    ALIGNED: tl.constexpr,  # bytes that the addresses of all keys and values are a multiple of
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    head, split, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    splits = tl.num_programs(1)
    # Where the token and the cache are has been settled by `begin`, and what earlier steps stored can be read before
    # this one's q, k and v are there.
    position = tl.load(positions + row, cache_modifier=".cg")
    start, end, used = own_keys(position, window, split, splits, BLOCK_S)
    if split >= used:
        return

    dtype = qkv.dtype.element_ty
    keys, values, slots = cache_of(table, row, head, dtype, ALIGNED)
    g, d, s = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_S)
    within, real = g < GROUP, d < D
    at = start + s
    cached = (at < tl.minimum(end, position))[:, None] & real[None, :]
    places = (at % slots).to(tl.int64)[:, None] * D + d[None, :]
    first_k = tl.load(keys + places, cached, 0.0)
    first_v = tl.load(values + places, cached, 0.0)
    cosine, sine = d, d
    q_weight, q_other, k_weight, k_other = d, d, d, d
    if NORM:
        q_weight, q_other = norm_weights(q_norm, d, D, OFFSET)
        k_weight, k_other = norm_weights(k_norm, d, D, OFFSET)
    wait_for_previous(PDL)
    if position < 0:
        return
    # All that is waited for, at once: each load takes longer than what is done with it.
    heads = qkv + row * (KV_HEADS * (GROUP + 2) * D)
    one = tl.arange(0, 1)
    q, q_swapped = load_heads(heads, (head * GROUP + g) * D, within, d, D)
    k, k_swapped = load_heads(heads, (KV_HEADS * GROUP + head + one) * D, one == 0, d, D)
    v = tl.load(heads + (KV_HEADS * (GROUP + 1) + head) * D + d, real, 0.0)
    if ROPE:
        cosine = tl.load(turned + row * 2 * D + d, real, 0.0)
        sine = tl.load(turned + (row * 2 + 1) * D + d, real, 0.0)
    q = rotated(q, q_swapped, q_weight, q_other, cosine, sine, D, NORM, EPS, ROPE)
    k = rotated(k, k_swapped, k_weight, k_other, cosine, sine, D, NORM, EPS, ROPE)
    own = (at == position)[:, None]
    first_k = tl.where(own, k, first_k)
    first_v = tl.where(own, v[None, :], first_v)
    if split == used - 1:
        slot = (position % slots).to(tl.int64) * D
        tl.store(keys + slot + d[None, :], k, real[None, :])
        tl.store(values + slot + d, v, real)
        tl.debug_barrier()  # a later block may hold them
    highest = tl.full((BLOCK_G,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_G,), tl.float32)
    sums = tl.zeros((BLOCK_G, BLOCK_D), tl.float32)
    highest, total, sums = looked(q, first_k, first_v, at < end, highest, total, sums, scale)
    for first in tl.range(start + BLOCK_S, end, BLOCK_S, num_stages=STAGES):
        there = first + s < end
        places = ((first + s) % slots).to(tl.int64)[:, None] * D + d[None, :]
        next_k = tl.load(keys + places, there[:, None] & real[None, :], 0.0)
        next_v = tl.load(values + places, there[:, None] & real[None, :], 0.0)
        highest, total, sums = looked(q, next_k, next_v, there, highest, total, sums, scale)

    query = row * (KV_HEADS * GROUP) + head * GROUP
    if used == 1:
        outputs = (query + g)[:, None] * D + d[None, :]
        tl.store(out + outputs, (sums / total[:, None]).to(dtype), within[:, None] & real[None, :])
        return
    piece = pieces + ((query + g) * splits + split) * (D + 4)
    tl.store(piece[:, None] + d[None, :], sums, within[:, None] & real[None, :])
    tl.store(piece + D, highest, within)
    tl.store(piece + D + 1, total, within)
    if is_last(finished + row * KV_HEADS + head, used):
        merge(pieces, out, query, used, splits, GROUP, MERGE_G, D, BLOCK_D)


@triton.jit
def looked(q, k, v, there, highest, total, sums, scale):
    """One block of keys and values more: the largest score so far, the sum of the weights, the values by weight."""
    scores = tl.dot(q, k.T, input_precision="ieee") * scale
    scores = tl.where(there[None, :], scores, -float("inf"))
    top = tl.maximum(highest, tl.max(scores, 1))
    shrink = tl.exp(highest - top)
    weights = tl.exp(scores - top[:, None])
    sums = tl.dot(weights.to(v.dtype), v, sums * shrink[:, None], input_precision="ieee")
    return top, total * shrink + tl.sum(weights, 1), sums


@triton.jit
def merge(
    pieces,
    out,
    query,
    used,
    splits,
    GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Put the pieces of a KV head's queries together. Other programs wrote them: past the processor's own cache."""
    g, d, s = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D), tl.arange(0, MERGED)
    within, real = g < GROUP, d < D
    highest = tl.full((BLOCK_G,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_G,), tl.float32)
    sums = tl.zeros((BLOCK_G, BLOCK_D), tl.float32)
    for first in range(0, used, MERGED):
        there = within[:, None] & (first + s < used)[None, :]
        piece = pieces + ((query + g)[:, None] * splits + (first + s)[None, :]) * (D + 4)
        tops = tl.load(piece + D, there, -float("inf"), cache_modifier=".cg")
        totals = tl.load(piece + D + 1, there, 0.0, cache_modifier=".cg")
        inside = there[:, :, None] & real[None, None, :]
        parts = tl.load(piece[:, :, None] + d[None, None, :], inside, 0.0, cache_modifier=".cg")
        top = tl.maximum(highest, tl.max(tops, 1))
        top = tl.where(within, top, 0.0)
        share = tl.exp(tops - top[:, None])
        shrink = tl.exp(highest - top)
        total = total * shrink + tl.sum(totals * share, 1)
        sums = sums * shrink[:, None] + tl.sum(parts * share[:, :, None], 1)
        highest = top
    at = (query + g)[:, None] * D + d[None, :]
    tl.store(out + at, (sums / total[:, None]).to(out.dtype.element_ty), within[:, None] & real[None, :])
