"""Products of a few rows with a matrix, and all that stands between two of them in a block.

`one_row` is for a single token, `few_rows` for several. A decode step reads every weight once and does little with it,
so what counts is that the memory bus never idles: each program asks for its weights before it waits for its input.
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
def load_block(places, exists, real, EVEN: tl.constexpr):
    if EVEN:
        block = tl.load(places)
    else:
        block = tl.load(places, exists[:, None] & real[None, :], 0.0)
    return block


@triton.jit(do_not_specialize=["B"])
def few_rows(
    x,  # [B, K]
    weight,  # [N, K]; where GATED [2 N, K], the gate's rows first
    bias,
    residual,  # [B, N]
    out,  # [B, N]
    sums,  # float32 [SPLIT, B, N]
    finished,  # int32, one for each block of out: programs that are done, 0 before and after
    B,
    N,
    K: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,  # programs that share K, where blocks of out alone would not keep all processors busy
    EVEN: tl.constexpr,  # whether blocks divide N and K
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,  # not with SPLIT
    ACTIVATION: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
    squares=None,  # float32 [B, SQUARES]: those of the vectors that x are, before their norm's weight, in parts
    SQUARES: tl.constexpr = 0,
    PADDED: tl.constexpr = 0,  # SQUARES, up to a power of two
    EPS: tl.constexpr = 0.0,
    next_weight=None,  # [N]: of the norm of out
    next_out=None,  # [B, N]: out by that weight
    next_squares=None,  # float32 [B, blocks of N]
    OFFSET: tl.constexpr = 0.0,
    EARLY: tl.constexpr = False,  # whether the first weights are loaded before the wait; not with GATED
):
    """`one_row` for several, without its norms.

    The product is W x^T: the matrix units take 64 rows of their first factor at least, and only W has as many. Of an
    RMSNorm in front, the product before has multiplied the weight and added up the squares: the scale comes last.
    """
    let_next_start(PDL)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = (tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B)).to(tl.int64)
    exists, fed = column < N, row < B
    at = tl.arange(0, BLOCK_K)
    split = tl.program_id(2)
    first = weight + column[:, None].to(tl.int64) * K + at[None, :]
    second = first + tl.cast(N, tl.int64) * K
    vectors = x + row[:, None] * K + at[None, :]
    places = row[None, :] * N + column[:, None]
    inside = fed[None, :] & exists[:, None]
    STEPS: tl.constexpr = (K + BLOCK_K * SPLIT - 1) // (BLOCK_K * SPLIT)
    begin = split * STEPS
    if EARLY:
        early_k = begin * BLOCK_K
        early = load_block(first + early_k, exists, early_k + at < K, EVEN)
        begin += 1
    if BIAS:
        first_bias = tl.load(bias + column, exists, 0.0).to(tl.float32)[:, None]
        if GATED:
            second_bias = tl.load(bias + N + column, exists, 0.0).to(tl.float32)[:, None]
    if next_weight is not None:
        next_weights = tl.load(next_weight + column, exists, 0.0).to(tl.float32)[:, None] + OFFSET
    wait_for_previous(PDL)
    # All that is waited for, at once, and none of it used before the loop has asked for its weights.
    if RESIDUAL:
        addend = tl.load(residual + places, inside, 0.0).to(tl.float32)
    if squares is not None:
        part = tl.arange(0, PADDED)
        parts = fed[:, None] & (part < SQUARES)[None, :]
        squares_of = tl.load(squares + row[:, None] * SQUARES + part[None, :], parts, 0.0)
    if EARLY:
        early_vectors = tl.load(vectors + early_k, fed[:, None] & (early_k + at < K)[None, :], 0.0)
    y = tl.zeros((BLOCK_N, BLOCK_B), tl.float32)
    up = y
    for step in tl.range(begin, (split + 1) * STEPS, num_stages=STAGES):
        k = step * BLOCK_K
        real = k + at < K
        turned = tl.load(vectors + k, fed[:, None] & real[None, :], 0.0).T
        y = tl.dot(load_block(first + k, exists, real, EVEN), turned, y, input_precision="ieee")
        if GATED:
            up = tl.dot(load_block(second + k, exists, real, EVEN), turned, up, input_precision="ieee")
    if EARLY:
        y = tl.dot(early, early_vectors.T, y, input_precision="ieee")
    if SPLIT > 1:
        tl.store(sums + split * B * N + places, y, inside)
        tl.debug_barrier()  # all threads' sums are written before one of them says so
        counter = finished + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        if tl.atomic_add(counter, 1, sem="acq_rel") < SPLIT - 1:
            return
        tl.store(counter, 0)
        # Others wrote them: past the processor's own cache, and in one order.
        y = tl.load(sums + places, inside, 0.0, cache_modifier=".cg")
        for i in tl.static_range(1, SPLIT):
            y += tl.load(sums + i * B * N + places, inside, 0.0, cache_modifier=".cg")
    if squares is not None:
        scale = tl.rsqrt(tl.sum(squares_of, 1) / K + EPS)[None, :]
        y *= scale
        up *= scale
    if BIAS:
        y += first_bias
    y = activated(y, ACTIVATION)
    if GATED:
        if BIAS:
            up += second_bias
        y *= up
    if RESIDUAL:
        y += addend
    rounded = y.to(out.dtype.element_ty)
    tl.store(out + places, rounded, inside)
    if next_weight is not None:
        y = rounded.to(tl.float32)
        tl.store(next_out + places, (y * next_weights).to(out.dtype.element_ty), inside)
        of_row = tl.sum(tl.where(inside, y * y, 0.0), 0)
        tl.store(next_squares + row * tl.num_programs(0) + tl.program_id(0), of_row, fed)


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
