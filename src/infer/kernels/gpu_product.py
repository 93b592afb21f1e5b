"""The product of one row with a matrix, and all that stands between two of them in a block.

A decode step reads every weight once and does little with it, so what counts is that the memory bus never idles: each
program asks for its weights before it waits for its input. The products of several rows are in `gpu_rows.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from infer.kernels.gpu_launch import let_next_start, wait_for_previous


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == "silu":
        x = x * tl.sigmoid(x)
    elif ACTIVATION == "gelu_tanh":
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        x = x * tl.sigmoid(2 * inner)  # (1 + tanh(inner)) / 2
    elif ACTIVATION == "gelu":
        x = 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    return x


@triton.jit
def load_parts(vector, PARTS: tl.constexpr, K: tl.constexpr):
    """[K] in float32, cut into parts whose sizes are powers of two; 0 where it is over."""
    parts = ()
    for i in tl.static_range(len(PARTS)):
        at = PARTS[i][0] + tl.arange(0, PARTS[i][1])
        parts = parts + (tl.load(vector + at, at < K, 0.0).to(tl.float32),)
    return parts


@triton.jit
def store_parts(out, parts, PARTS: tl.constexpr, K: tl.constexpr):
    for i in tl.static_range(len(PARTS)):
        at = PARTS[i][0] + tl.arange(0, PARTS[i][1])
        tl.store(out + at, parts[i].to(out.dtype.element_ty), at < K)


@triton.jit
def load_rows(weight, row, exists, PARTS: tl.constexpr, K: tl.constexpr):
    """Whole rows of a matrix, cut likewise. Read once, they would only drive from the L2 cache what is read again."""
    tiles = ()
    for i in tl.static_range(len(PARTS)):
        at = PARTS[i][0] + tl.arange(0, PARTS[i][1])
        places = row[:, None].to(tl.int64) * K + at[None, :]
        inside = exists[:, None] & (at < K)[None, :]
        tiles = tiles + (tl.load(weight + places, inside, 0.0, eviction_policy="evict_first"),)
    return tiles


@triton.jit
def multiplied(tiles, parts, PARTS: tl.constexpr):
    y = tl.sum(tiles[0].to(tl.float32) * parts[0][None, :], 1)
    for i in tl.static_range(1, len(PARTS)):
        y += tl.sum(tiles[i].to(tl.float32) * parts[i][None, :], 1)
    return y


@triton.jit
def squared(x, PARTS: tl.constexpr):
    """The sum of all squares."""
    squares = tl.sum(x[0] * x[0])
    for i in tl.static_range(1, len(PARTS)):
        squares += tl.sum(x[i] * x[i])
    return squares


@triton.jit
def weighted(x, weight, PARTS: tl.constexpr, OFFSET: tl.constexpr):
    out = ()
    for i in tl.static_range(len(PARTS)):
        out = out + (x[i] * (weight[i] + OFFSET),)
    return out


@triton.jit
def normed(
    x,
    weight,
    bias,
    dtype,
    PARTS: tl.constexpr,
    K: tl.constexpr,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    CENTRED: tl.constexpr,
    BIAS: tl.constexpr,
):
    """x in parts, scaled to unit root mean square, or first centred; rounded to dtype."""
    if CENTRED:
        mean = tl.sum(x[0])
        for i in tl.static_range(1, len(PARTS)):
            mean += tl.sum(x[i])
        centred = ()
        for i in tl.static_range(len(PARTS)):
            at = PARTS[i][0] + tl.arange(0, PARTS[i][1])
            centred = centred + (tl.where(at < K, x[i] - mean / K, 0.0),)
    else:
        centred = x
    scale = tl.rsqrt(squared(centred, PARTS) / K + EPS)
    out = ()
    for i in tl.static_range(len(PARTS)):
        y = centred[i] * scale * (weight[i] + OFFSET)
        if BIAS:
            y += bias[i]
        out = out + (y.to(dtype).to(tl.float32),)
    return out


@triton.jit
def added(x, carried, dtype, PARTS: tl.constexpr):
    out = ()
    for i in tl.static_range(len(PARTS)):
        out = out + ((x[i] + carried[i]).to(dtype).to(tl.float32),)
    return out


@triton.jit
def one_row(
    x,  # [K]
    weight,  # [N, K]; where GATED [2 N, K], the gate's rows first
    bias,  # like weight's rows
    residual,  # [N]
    out,  # [N]
    norm_weight,  # [K]
    norm_bias,
    after_weight,  # [K]
    carried,  # [K]: the residual that x, normed by after_weight, is added to
    carried_out,  # [K]: where the sum is kept for later
    N,
    K: tl.constexpr,
    PARTS: tl.constexpr,  # where each begins, and its size
    ROWS: tl.constexpr,
    NORM: tl.constexpr,
    AFTER: tl.constexpr,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    CENTRED: tl.constexpr,
    NORM_BIAS: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
):
    """out = activation(W norm(x) + b) [* (W' norm(x) + b')] [+ residual], ROWS of it in each program."""
    # The scale of an RMSNorm is the same for all of x: behind the product, it is summed up while that is.
    SCALED_BEHIND: tl.constexpr = NORM and not CENTRED and not NORM_BIAS
    let_next_start(PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    exists = row < N
    first = load_rows(weight, row, exists, PARTS, K)
    if GATED:
        second = load_rows(weight + tl.cast(N, tl.int64) * K, row, exists, PARTS, K)
    dtype = x.dtype.element_ty
    if NORM:
        norm_weights = load_parts(norm_weight, PARTS, K)
        norm_biases = norm_weights
        if NORM_BIAS:
            norm_biases = load_parts(norm_bias, PARTS, K)
    if AFTER:
        after_weights = load_parts(after_weight, PARTS, K)
    if BIAS:
        first_bias = tl.load(bias + row, exists, 0.0).to(tl.float32)
        if GATED:
            second_bias = tl.load(bias + N + row, exists, 0.0).to(tl.float32)
    wait_for_previous(PDL)
    # All that is waited for, at once: each load takes longer than what is done with it.
    vector = load_parts(x, PARTS, K)
    if AFTER:
        before = load_parts(carried, PARTS, K)
    if RESIDUAL:
        addend = tl.load(residual + row, exists, 0.0).to(tl.float32)
    if AFTER:
        vector = normed(vector, after_weights, after_weights, dtype, PARTS, K, EPS, OFFSET, CENTRED, False)
        vector = added(vector, before, dtype, PARTS)
        if tl.program_id(0) == 0:
            store_parts(carried_out, vector, PARTS, K)
    scale = 1.0
    if SCALED_BEHIND:
        scale = tl.rsqrt(squared(vector, PARTS) / K + EPS)
        vector = weighted(vector, norm_weights, PARTS, OFFSET)
    elif NORM:
        vector = normed(vector, norm_weights, norm_biases, dtype, PARTS, K, EPS, OFFSET, CENTRED, NORM_BIAS)
    y = multiplied(first, vector, PARTS) * scale
    if BIAS:
        y += first_bias
    y = activated(y, ACTIVATION)
    if GATED:
        up = multiplied(second, vector, PARTS) * scale
        if BIAS:
            up += second_bias
        y *= up
    if RESIDUAL:
        y += addend
    tl.store(out + row, y.to(out.dtype.element_ty), exists)


@triton.jit
def norm_rows(
    x,  # [B, K]
    out,  # [B, K]
    norm_weight,
    norm_bias,
    after_weight,
    carried,  # [B, K]
    carried_out,
    K: tl.constexpr,
    PARTS: tl.constexpr,
    AFTER: tl.constexpr,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    CENTRED: tl.constexpr,
    NORM_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """What `one_row` does before its product, a row in each program."""
    let_next_start(PDL)
    start = tl.program_id(0).to(tl.int64) * K
    dtype = x.dtype.element_ty
    weights = load_parts(norm_weight, PARTS, K)
    biases = weights
    if NORM_BIAS:
        biases = load_parts(norm_bias, PARTS, K)
    if AFTER:
        after_weights = load_parts(after_weight, PARTS, K)
    wait_for_previous(PDL)
    vector = load_parts(x + start, PARTS, K)
    if AFTER:
        before = load_parts(carried + start, PARTS, K)
        vector = normed(vector, after_weights, after_weights, dtype, PARTS, K, EPS, OFFSET, CENTRED, False)
        vector = added(vector, before, dtype, PARTS)
        store_parts(carried_out + start, vector, PARTS, K)
    vector = normed(vector, weights, biases, dtype, PARTS, K, EPS, OFFSET, CENTRED, NORM_BIAS)
    store_parts(out + start, vector, PARTS, K)
