"""Products of several rows with a matrix: `eight_rows` for up to eight of 16 bits, `few_rows` for any.

Both are W x^T: the matrix units take many rows of their first factor, and only W has as many. Of an RMSNorm in front,
the product before has multiplied the weight and added up the squares: the scale comes last.
"""

from __future__ import annotations

import triton
import triton.language as tl

from infer.kernels.gpu_launch import is_last, let_next_start, wait_for_previous
from infer.kernels.gpu_product import activated


@triton.jit
def load_block(places, exists, real, EVEN: tl.constexpr):
    if EVEN:
        block = tl.load(places)
    else:
        block = tl.load(places, exists[:, None] & real[None, :], 0.0)
    return block


@triton.jit
def load_biases(bias, column, exists, N, GATED: tl.constexpr):
    """Of these columns of out; where GATED, then of what they are multiplied by."""
    biases = (tl.load(bias + column, exists, 0.0).to(tl.float32)[:, None],)
    if GATED:
        biases = biases + (tl.load(bias + N + column, exists, 0.0).to(tl.float32)[:, None],)
    return biases


@triton.jit
def load_squares(squares, row, fed, SQUARES: tl.constexpr, PADDED: tl.constexpr):
    part = tl.arange(0, PADDED)
    return tl.load(squares + row[:, None] * SQUARES + part[None, :], fed[:, None] & (part < SQUARES)[None, :], 0.0)


@triton.jit
def finished_sums(sums, scale, biases, addend, ACTIVATION: tl.constexpr):
    """What becomes of W x^T, and of W' x^T where it is gated. scale, addend: None if there is none, biases ()."""
    y = sums[0]
    if scale is not None:
        y *= scale
    if len(biases) > 0:
        y += biases[0]
    y = activated(y, ACTIVATION)
    if len(sums) > 1:
        up = sums[1]
        if scale is not None:
            up *= scale
        if len(biases) > 0:
            up += biases[1]
        y *= up
    if addend is not None:
        y += addend
    return y


@triton.jit
def store_prepared(y, weights, next_out, next_squares, places, inside, row, fed):
    """What is stored of out [N, B] for its norm: by the norm's weights, and the sum of this program's squares."""
    tl.store(next_out + places, (y * weights).to(next_out.dtype.element_ty), inside)
    of_row = tl.sum(tl.where(inside, y * y, 0.0), 0)
    tl.store(next_squares + row * tl.num_programs(0) + tl.program_id(0), of_row, fed)


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
    """`one_row` for several, without its norms."""
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
    biases = ()
    if BIAS:
        biases = load_biases(bias, column, exists, N, GATED)
    if next_weight is not None:
        next_weights = tl.load(next_weight + column, exists, 0.0).to(tl.float32)[:, None] + OFFSET
    wait_for_previous(PDL)
    # All that is waited for, at once, and none of it used before the loop has asked for its weights.
    addend, scale = None, None
    if RESIDUAL:
        addend = tl.load(residual + places, inside, 0.0).to(tl.float32)
    if squares is not None:
        squares_of = load_squares(squares, row, fed, SQUARES, PADDED)
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
        if not is_last(finished + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), SPLIT):
            return
        # Others wrote them: past the processor's own cache, and in one order.
        y = tl.load(sums + places, inside, 0.0, cache_modifier=".cg")
        for i in tl.static_range(1, SPLIT):
            y += tl.load(sums + i * B * N + places, inside, 0.0, cache_modifier=".cg")
    if squares is not None:
        scale = tl.rsqrt(tl.sum(squares_of, 1) / K + EPS)[None, :]
    summed = (y, up) if GATED else (y,)
    rounded = finished_sums(summed, scale, biases, addend, ACTIVATION).to(out.dtype.element_ty)
    tl.store(out + places, rounded, inside)
    if next_weight is not None:
        store_prepared(rounded.to(tl.float32), next_weights, next_out, next_squares, places, inside, row, fed)


@triton.jit
def load_tiles(
    tiles,
    matrices,
    exists,
    k,
    K: tl.constexpr,
    STRIDE: tl.constexpr,
    EVEN: tl.constexpr,
    FROM: tl.constexpr,
    TO: tl.constexpr,
):
    """Tiles, and those FROM to TO of each matrix, STRIDE columns apart. As with `load_rows`, others stay in L2."""
    for i in tl.static_range(FROM, TO):
        for j in tl.static_range(len(matrices)):
            if EVEN:
                tile = tl.load(matrices[j] + i * STRIDE, eviction_policy="evict_first")
            else:
                inside = exists & (i * STRIDE + k < K)
                tile = tl.load(matrices[j] + i * STRIDE, inside, 0.0, eviction_policy="evict_first")
            tiles = tiles + (tile,)
    return tiles


@triton.jit
def load_vectors(vectors, x, fed, k, K: tl.constexpr, STRIDE: tl.constexpr, FROM: tl.constexpr, TO: tl.constexpr):
    """The same of the rows that they are multiplied with."""
    for i in tl.static_range(FROM, TO):
        vectors = vectors + (tl.load(x + i * STRIDE, fed & (i * STRIDE + k < K), 0.0),)
    return vectors


@triton.jit
def as_first_factor(tile, WARPS: tl.constexpr):
    """[2 * WARPS * 8, 32] -> [WARPS, 16, 32], columns in another order.

    Of a tile that is loaded, four threads have a row, eight rows are a warp's, and a thread's other row is half a tile
    below. Its 16 bytes of both are what a matrix instruction takes from this very thread, if their columns are called
    0, 1, 8, 9, 16, 17, 24, 25, and those of the next 2, 3, 10, and so on.
    """
    parts = tl.reshape(tile, (2, WARPS, 8, 4, 2, 2, 2))
    return tl.reshape(tl.permute(parts, (1, 0, 2, 4, 5, 3, 6)), (WARPS, 16, 32))


@triton.jit
def as_second_factor(tile, WARPS: tl.constexpr, ROWS: tl.constexpr):
    """[ROWS * WARPS, 32] -> [WARPS, 32, ROWS], columns in the same order; rows in eights, of each warp in turn."""
    parts = tl.reshape(tile, (ROWS // 8, WARPS, 8, 4, 2, 2, 2))
    return tl.reshape(tl.permute(parts, (1, 4, 5, 3, 6, 0, 2)), (WARPS, 32, ROWS))


@triton.jit(do_not_specialize=["B"])
def eight_rows(
    x,  # [B, K]
    weight,  # [N, K]; where GATED [2 N, K], the gate's rows first
    bias,
    residual,  # [B, N]
    out,  # [B, N]
    B,
    N,
    K: tl.constexpr,
    TILES: tl.constexpr,  # of the matrix, that each warp multiplies with
    HELD: tl.constexpr,  # tiles that are loaded before the wait
    AHEAD: tl.constexpr,  # tiles that are on their way, or there, when one is used
    VECTORS_AHEAD: tl.constexpr,  # the same of x
    CHAINS: tl.constexpr,  # sums that take turns: what adds to one has to wait until the last has been added
    WARPS: tl.constexpr,
    EVEN: tl.constexpr,  # whether tiles divide N and K
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
    squares=None,  # float32 [B, SQUARES]: those of the vectors that x are, before their norm's weight, in parts
    SQUARES: tl.constexpr = 0,
    PADDED: tl.constexpr = 0,  # SQUARES, up to a power of two
    EPS: tl.constexpr = 0.0,
    next_weight=None,  # [N]: of the norm of out
    next_out=None,  # [B, N]: out by that weight
    next_squares=None,  # float32 [B, blocks of N]
    OFFSET: tl.constexpr = 0.0,
):
    """`few_rows` for at most eight, of 16 bits an element.

    Matrix instructions take 16 rows of W, a program's, and 8 of x. The weights are loaded straight into the registers
    that they are taken from, and wait there for x, as in `one_row`. Of all columns each warp has 32 at a time.
    """
    STRIDE: tl.constexpr = 32 * WARPS
    MATRICES: tl.constexpr = 2 if GATED else 1
    let_next_start(PDL)
    line, at = tl.arange(0, 16 * WARPS)[:, None], tl.arange(0, 32)[None, :]
    place = tl.program_id(0) * 16 + line // (8 * WARPS) * 8 + line % 8
    k = line // 8 % WARPS * 32 + at
    matrices = (weight + place.to(tl.int64) * K + k,)
    if GATED:
        matrices = matrices + (matrices[0] + tl.cast(N, tl.int64) * K,)
    tiles = load_tiles((), matrices, place < N, k, K, STRIDE, EVEN, 0, HELD)
    column, row = tl.program_id(0) * 16 + tl.arange(0, 16), tl.arange(0, 8)
    exists, fed = column < N, row < B
    places = row[None, :] * N + column[:, None]
    inside = fed[None, :] & exists[:, None]
    biases = ()
    if BIAS:
        biases = load_biases(bias, column, exists, N, GATED)
    if next_weight is not None:
        next_weights = tl.load(next_weight + column, exists, 0.0).to(tl.float32)[:, None] + OFFSET
    wait_for_previous(PDL)
    line = tl.arange(0, 8 * WARPS)[:, None]
    of_x, x_k = line % 8, line // 8 * 32 + at
    from_x = x + of_x * K + x_k
    vectors = load_vectors((), from_x, of_x < B, x_k, K, STRIDE, 0, VECTORS_AHEAD)
    addend, scale = None, None
    if RESIDUAL:
        addend = tl.load(residual + places, inside, 0.0).to(tl.float32)
    if squares is not None:
        squares_of = load_squares(squares, row, fed, SQUARES, PADDED)
    tiles = load_tiles(tiles, matrices, place < N, k, K, STRIDE, EVEN, HELD, AHEAD)
    sums = ()
    for _ in tl.static_range(CHAINS * MATRICES):
        sums = sums + (tl.zeros((WARPS, 16, 8), tl.float32),)
    for i in tl.static_range(TILES):
        if i + VECTORS_AHEAD < TILES:
            vectors = load_vectors(vectors, from_x, of_x < B, x_k, K, STRIDE, i + VECTORS_AHEAD, i + VECTORS_AHEAD + 1)
        if i + AHEAD >= HELD and i + AHEAD < TILES:
            tiles = load_tiles(tiles, matrices, place < N, k, K, STRIDE, EVEN, i + AHEAD, i + AHEAD + 1)
        turned = as_second_factor(vectors[i], WARPS, 8)
        for j in tl.static_range(MATRICES):
            factor = as_first_factor(tiles[i * MATRICES + j], WARPS)
            sums = sums + (tl.dot(factor, turned, sums[i * MATRICES + j]),)
    totals = ()
    for j in tl.static_range(MATRICES):
        total = sums[TILES * MATRICES + j]
        for chain in tl.static_range(1, CHAINS):
            total += sums[(TILES + chain) * MATRICES + j]
        totals = totals + (tl.sum(total, 0),)
    if squares is not None:
        scale = tl.rsqrt(tl.sum(squares_of, 1) / K + EPS)[None, :]
    rounded = finished_sums(totals, scale, biases, addend, ACTIVATION).to(out.dtype.element_ty)
    tl.store(out + places, rounded, inside)
    if next_weight is not None:
        store_prepared(rounded.to(tl.float32), next_weights, next_out, next_squares, places, inside, row, fed)
