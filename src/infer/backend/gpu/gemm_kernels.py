"""GEMM kernels: `gemv` for up to eight rows in 16 bits, `gemm_small` for more, `gemm_large` for prompts.

All three give a row the same bits. The columns K are cut into SLICES of LENGTH columns (split-K), a property of the
matrix. Within a slice the tensor cores add 16 columns at a time into one accumulator, for any tile. It is undocumented
that small and large matrix instructions agree on this, so it is checked on each device (`device_check.py`). The sums of
the slices are added one after the other.

The first two compute W x^T: a matrix instruction has many rows in its first operand, and only W has as many. All share
one `epilogue`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from infer.backend.gpu.launch_kernels import is_last, let_next_start, prefetch_l2, wait_for_previous
from infer.backend.gpu.launcher import kernel
from infer.backend.gpu.row_kernels import epilogue, norm_scale, tree_sum


@triton.jit
def load_block(places, column_mask, k_mask, EVEN: tl.constexpr):
    if EVEN:
        block = tl.load(places)
    else:
        block = tl.load(places, column_mask[:, None] & k_mask[None, :], 0.0)
    return block


@triton.jit
def load_biases(bias, column, column_mask, N, GATED: tl.constexpr):
    """For these columns of out; if GATED, of the gate and then of the other half."""
    biases = (tl.load(bias + column, column_mask, 0.0).to(tl.float32)[:, None],)
    if GATED:
        biases = biases + (tl.load(bias + N + column, column_mask, 0.0).to(tl.float32)[:, None],)
    return biases


@triton.jit
def load_squares(squares, row, row_mask, SQUARES: tl.constexpr, PADDED: tl.constexpr):
    """[PADDED, B]: the partial sums of squares of these rows."""
    part = tl.arange(0, PADDED)
    return tl.load(squares + row[None, :] * SQUARES + part[:, None], row_mask[None, :] & (part < SQUARES)[:, None], 0.0)


@triton.jit
def store_prepared(y, weights, next_out, next_squares, places, inside, row, row_mask):
    """Store the input of the next GEMM: out [N, B] times the norm's weights, and this program's sum of squares."""
    tl.store(next_out + places, (y * weights).to(next_out.dtype.element_ty), inside)
    of_row = tree_sum(tl.where(inside, y * y, 0.0))
    tl.store(next_squares + row * tl.num_programs(0) + tl.program_id(0), of_row, row_mask)


@triton.jit
def joined(sums, inside, step, SLICES: tl.constexpr):
    """Add the sums of all slices, `step` apart. Other programs wrote them, so the loads bypass the L1 cache."""
    y = tl.load(sums, inside, 0.0, cache_modifier=".cg")
    for i in tl.static_range(1, SLICES):
        y += tl.load(sums + i * step, inside, 0.0, cache_modifier=".cg")
    return y


@triton.jit
def split_gates(y, GATED: tl.constexpr):
    """The sums [N, B] of a block of the matrix; if GATED, those of the gate and of the other half."""
    if GATED:
        parts = tl.split(tl.permute(tl.reshape(y, (2, y.shape[0] // 2, y.shape[1])), (1, 2, 0)))
    else:
        parts = (y,)
    return parts


@kernel(do_not_specialize=["B"])
def gemm_small(
    x,  # [B, K]
    weight,  # [N, K]; if GATED [2 N, K], the gate's rows first
    bias,
    residual,  # [B, N]
    out,  # [B, N]
    sums,  # float32 [SLICES, B, N]; if GATED, as much again for the other half
    split_counters,  # int32, for each block of out: finished programs, 0 before and after
    B,
    N,
    K: tl.constexpr,
    SLICES: tl.constexpr,
    LENGTH: tl.constexpr,  # columns of a slice
    SPLIT_K: tl.constexpr,  # whether each slice has its own program
    BLOCK_B: tl.constexpr,
    BLOCK_N: tl.constexpr,  # rows of the matrix; if GATED, half of them are gates
    BLOCK_K: tl.constexpr,  # divides LENGTH
    EVEN: tl.constexpr,  # whether blocks divide N and slices divide K
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    STAGES: tl.constexpr,
    PREFETCHED: tl.constexpr,  # columns of a program prefetched into the L2 cache before the wait
    PDL: tl.constexpr,
    squares=None,  # float32 [B, SQUARES]: partial sums of squares of x before its norm
    SQUARES: tl.constexpr = 0,
    PADDED: tl.constexpr = 0,  # SQUARES, rounded up to a power of two
    EPS: tl.constexpr = 0.0,
    next_weight=None,  # [N]: weight of the norm of out
    next_out=None,  # [B, N]: out times that weight
    next_squares=None,  # float32 [B, blocks of N]
    OFFSET: tl.constexpr = 0.0,
    MULTIPLIER: tl.constexpr = 1.0,  # of what is added to the residual
):
    let_next_start(PDL)
    MATRICES: tl.constexpr = 2 if GATED else 1
    COLUMNS: tl.constexpr = BLOCK_N // MATRICES
    line = tl.arange(0, BLOCK_N)
    place = tl.program_id(0) * COLUMNS + line % COLUMNS
    row = (tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B)).to(tl.int64)
    piece = tl.program_id(2)
    at = tl.arange(0, BLOCK_K)
    lines = weight + (place + line // COLUMNS * N)[:, None].to(tl.int64) * K
    prefetch_l2(lines + piece * LENGTH, PREFETCHED, PDL)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    column_mask, row_mask = column < N, row < B
    places = row[None, :] * N + column[:, None]
    inside = row_mask[None, :] & column_mask[:, None]
    biases = ()
    if BIAS:
        biases = load_biases(bias, column, column_mask, N, GATED)
    if next_weight is not None:
        next_weights = tl.load(next_weight + column, column_mask, 0.0).to(tl.float32)[:, None] + OFFSET
    wait_for_previous(PDL)
    # Start all loads of the previous kernel's output now; none is used before the loop has started its weight loads.
    addend, scale = None, None
    if RESIDUAL:
        addend = tl.load(residual + places, inside, 0.0).to(tl.float32)
    if squares is not None:
        squares_of = load_squares(squares, row, row_mask, SQUARES, PADDED)
    STEPS: tl.constexpr = LENGTH // BLOCK_K
    ALL: tl.constexpr = STEPS if SPLIT_K else SLICES * STEPS
    first = lines + at[None, :]
    vectors = x + row[:, None] * K + at[None, :]
    y = tl.zeros((BLOCK_N, BLOCK_B), tl.float32)
    total = y
    for step in tl.range(piece * STEPS, piece * STEPS + ALL, num_stages=STAGES):
        k = step * BLOCK_K
        k_mask = k + at < K
        rows = tl.load(vectors + k, row_mask[:, None] & k_mask[None, :], 0.0).T
        y = tl.dot(load_block(first + k, place < N, k_mask, EVEN), rows, y, input_precision="ieee")
        if ALL > STEPS:
            if step % STEPS == STEPS - 1:
                total += y
                y = tl.zeros((BLOCK_N, BLOCK_B), tl.float32)
    summed = split_gates(total if ALL > STEPS else y, GATED)
    if SLICES > 1 and SPLIT_K:
        for i in tl.static_range(MATRICES):
            tl.store(sums + (i * SLICES + piece) * B * N + places, summed[i], inside)
        if not is_last(split_counters + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), SLICES):
            return
        totals = ()
        for i in tl.static_range(MATRICES):
            totals = totals + (joined(sums + i * SLICES * B * N + places, inside, B * N, SLICES),)
        summed = totals
    if squares is not None:
        scale = norm_scale(tree_sum(squares_of), K, EPS)[None, :]
    dtype: tl.constexpr = out.dtype.element_ty
    rounded = epilogue(summed, dtype, scale, biases, addend, ACTIVATION, MULTIPLIER).to(dtype)
    tl.store(out + places, rounded, inside)
    if next_weight is not None:
        store_prepared(rounded.to(tl.float32), next_weights, next_out, next_squares, places, inside, row, row_mask)


@triton.jit
def as_first_factor(tile, STEPS: tl.constexpr, WARPS: tl.constexpr):
    """[STEPS * 16 WARPS, 32] -> [WARPS, 16, 32 STEPS], with columns permuted within each 16.

    In a loaded tile, four threads have a row, 16 bytes each; a warp has eight rows, and each thread another row half a
    tile below. A matrix instruction takes four columns of each row from each of the four threads. So threads that are
    two apart exchange half of their elements; the permutation within the 16 columns is chosen so that no other element
    moves. The instruction adds all 16 at once: their order does not matter.
    """
    parts = tl.reshape(tile, (STEPS, 2, WARPS, 8, 2, 2, 2, 2, 2))
    return tl.reshape(tl.permute(parts, (2, 1, 3, 0, 4, 7, 6, 5, 8)), (WARPS, 16, 32 * STEPS))


@triton.jit
def as_second_factor(tile, STEPS: tl.constexpr, WARPS: tl.constexpr, ROWS: tl.constexpr):
    """[STEPS * ROWS * WARPS, 32] -> [WARPS, 32 STEPS, ROWS], columns permuted as above."""
    parts = tl.reshape(tile, (STEPS, ROWS // 8, WARPS, 8, 2, 2, 2, 2, 2))
    return tl.reshape(tl.permute(parts, (2, 0, 4, 7, 6, 5, 8, 1, 3)), (WARPS, 32 * STEPS, ROWS))


@triton.jit
def load_chunks(
    chunks,
    first,
    mask,
    k,
    K: tl.constexpr,
    SIZE: tl.constexpr,
    EVEN: tl.constexpr,
    FROM: tl.constexpr,
    TO: tl.constexpr,
):
    """Append chunks FROM to TO of the matrix. They are read once: evict_first keeps other data in the L2 cache."""
    for i in tl.static_range(FROM, TO):
        if EVEN:
            chunk = tl.load(first + i * SIZE, eviction_policy="evict_first")
        else:
            chunk = tl.load(first + i * SIZE, mask & (i * SIZE + k < K), 0.0, eviction_policy="evict_first")
        chunks = chunks + (chunk,)
    return chunks


@triton.jit
def load_vectors(vectors, x, row_mask, k, K: tl.constexpr, SIZE: tl.constexpr, FROM: tl.constexpr, TO: tl.constexpr):
    """Append the same chunks of x."""
    for i in tl.static_range(FROM, TO):
        vectors = vectors + (tl.load(x + i * SIZE, row_mask & (i * SIZE + k < K), 0.0),)
    return vectors


@kernel(do_not_specialize=["B"])
def gemv(
    x,  # [B, K]
    weight,  # [N, K]; if GATED [2 N, K], the gate's rows first
    bias,
    residual,  # [B, N]
    out,  # [B, N]
    B,
    N,
    K: tl.constexpr,
    SLICES: tl.constexpr,  # each has its own warp
    LENGTH: tl.constexpr,  # columns of a slice
    WARP_ROWS: tl.constexpr,  # rows of the matrix per warp: 8 (second operand of its instruction) or 16 (first operand)
    STEPS: tl.constexpr,  # loads per chunk of columns: 32 STEPS divides LENGTH
    CHUNKS_AHEAD: tl.constexpr,  # chunks of the matrix loaded ahead, the first ones before the wait
    VECTORS_AHEAD: tl.constexpr,  # chunks of x loaded ahead
    EVEN: tl.constexpr,  # whether blocks divide N and slices divide K
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
    squares=None,  # as for `gemm_small`
    SQUARES: tl.constexpr = 0,
    PADDED: tl.constexpr = 0,
    EPS: tl.constexpr = 0.0,
    next_weight=None,
    next_out=None,
    next_squares=None,
    OFFSET: tl.constexpr = 0.0,
    MULTIPLIER: tl.constexpr = 1.0,
):
    """For at most eight rows in 16 bits.

    Matrix instructions take 16 rows of W and 8 of x. Weights are loaded directly into the registers of those
    instructions, and wait there for x.
    """
    MATRICES: tl.constexpr = 2 if GATED else 1
    WARPS: tl.constexpr = MATRICES * SLICES
    SIZE: tl.constexpr = 32 * STEPS
    CHUNKS: tl.constexpr = LENGTH // SIZE
    let_next_start(PDL)
    line, at = tl.arange(0, STEPS * WARP_ROWS * WARPS)[:, None], tl.arange(0, 32)[None, :]
    warp, step = line // 8 % WARPS, line // (WARP_ROWS * WARPS) * 32
    place = tl.program_id(0) * WARP_ROWS + line // (8 * WARPS) % (WARP_ROWS // 8) * 8 + line % 8
    from_k = warp % SLICES * LENGTH + at
    first = weight + (place + warp // SLICES * N).to(tl.int64) * K + from_k + step
    weight_mask, k = place < N, from_k + step
    chunks = load_chunks((), first, weight_mask, k, K, SIZE, EVEN, 0, CHUNKS_AHEAD)
    column, row = tl.program_id(0) * WARP_ROWS + tl.arange(0, WARP_ROWS), tl.arange(0, 8)
    column_mask, row_mask = column < N, row < B
    places = row[None, :] * N + column[:, None]
    inside = row_mask[None, :] & column_mask[:, None]
    biases = ()
    if BIAS:
        biases = load_biases(bias, column, column_mask, N, GATED)
    if next_weight is not None:
        next_weights = tl.load(next_weight + column, column_mask, 0.0).to(tl.float32)[:, None] + OFFSET
    wait_for_previous(PDL)
    line = tl.arange(0, STEPS * 8 * WARPS)[:, None]
    of_x, x_k = line % 8, line // 8 % SLICES * LENGTH + at + line // (8 * WARPS) * 32
    from_x = x + of_x * K + x_k
    vectors = load_vectors((), from_x, of_x < B, x_k, K, SIZE, 0, VECTORS_AHEAD)
    addend, scale = None, None
    if RESIDUAL:
        addend = tl.load(residual + places, inside, 0.0).to(tl.float32)
    if squares is not None:
        squares_of = load_squares(squares, row, row_mask, SQUARES, PADDED)
    dtype: tl.constexpr = x.dtype.element_ty
    sums = tl.zeros((WARPS, 16, 8), tl.float32)
    for i in tl.static_range(CHUNKS):
        if i + VECTORS_AHEAD < CHUNKS:
            vectors = load_vectors(vectors, from_x, of_x < B, x_k, K, SIZE, i + VECTORS_AHEAD, i + VECTORS_AHEAD + 1)
        if i + CHUNKS_AHEAD < CHUNKS:
            chunks = load_chunks(chunks, first, weight_mask, k, K, SIZE, EVEN, i + CHUNKS_AHEAD, i + CHUNKS_AHEAD + 1)
        if WARP_ROWS == 16:
            sums = tl.dot(as_first_factor(chunks[i], STEPS, WARPS), as_second_factor(vectors[i], STEPS, WARPS, 8), sums)
        else:
            twice = as_first_factor(repeated(vectors[i], STEPS), STEPS, WARPS)
            sums = tl.dot(twice, as_second_factor(chunks[i], STEPS, WARPS, 8), sums)
    if WARP_ROWS == 8:
        once = tl.max(tl.reshape(sums, (WARPS, 2, 8, 8)), 1)  # of two equal values in one thread
        sums = tl.permute(once, (0, 2, 1))
    totals = join_warps(sums, MATRICES, SLICES, WARP_ROWS)
    if GATED:
        gate, up = tl.split(tl.permute(totals, (1, 2, 0)))
        summed = (gate, up)
    else:
        summed = (tl.reshape(totals, (WARP_ROWS, 8)),)
    if squares is not None:
        scale = norm_scale(tree_sum(squares_of), K, EPS)[None, :]
    rounded = epilogue(summed, dtype, scale, biases, addend, ACTIVATION, MULTIPLIER).to(dtype)
    tl.store(out + places, rounded, inside)
    if next_weight is not None:
        store_prepared(rounded.to(tl.float32), next_weights, next_out, next_squares, places, inside, row, row_mask)


@triton.jit
def join_warps(sums, MATRICES: tl.constexpr, SLICES: tl.constexpr, WARP_ROWS: tl.constexpr):
    """Like `joined`, where each warp has a slice: [MATRICES * SLICES, WARP_ROWS, 8] -> [MATRICES, WARP_ROWS, 8]."""
    stacked = tl.permute(tl.reshape(sums, (MATRICES, SLICES, WARP_ROWS, 8)), (0, 2, 3, 1))
    parts = unstacked(stacked, SLICES)
    total = parts[0]
    for i in tl.static_range(1, SLICES):
        total += parts[i]
    return total


@triton.jit
def unstacked(x, COUNT: tl.constexpr):
    """The 1, 2, 4 or 8 elements of the last dimension as tensors."""
    A: tl.constexpr = x.shape[0]
    B: tl.constexpr = x.shape[1]
    C: tl.constexpr = x.shape[2]
    if COUNT == 1:
        parts = (tl.reshape(x, (A, B, C)),)
    elif COUNT == 2:
        parts = tl.split(x)
    elif COUNT == 4:
        parts = unstacked_four(x)
    else:
        even, odd = tl.split(tl.reshape(x, (A, B, C, 4, 2)))
        even, odd = unstacked_four(even), unstacked_four(odd)
        parts = (even[0], odd[0], even[1], odd[1], even[2], odd[2], even[3], odd[3])
    return parts


@triton.jit
def unstacked_four(x):
    even, odd = tl.split(tl.reshape(x, (x.shape[0], x.shape[1], x.shape[2], 2, 2)))
    even, odd = tl.split(even), tl.split(odd)
    return (even[0], odd[0], even[1], odd[1])


@triton.jit
def repeated(tile, GROUPS: tl.constexpr):
    """Repeat each group of rows, without moving data between threads: the first operand has 16 rows."""
    LINES: tl.constexpr = tile.shape[0] // GROUPS
    once = tl.reshape(tile, (GROUPS, 1, LINES, 32))
    return tl.reshape(tl.broadcast_to(once, (GROUPS, 2, LINES, 32)), (2 * GROUPS * LINES, 32))


@kernel(do_not_specialize=["B"])
def gemm_large(
    x,  # [B, K]
    weight,  # [N, K]; if GATED [2 N, K], the gate's rows first
    bias,
    residual,  # [B, N]
    out,  # [B, N]
    B,
    N,
    K: tl.constexpr,
    SLICES: tl.constexpr,
    LENGTH: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_N: tl.constexpr,  # rows of the matrix; if GATED, every other one is a gate
    BLOCK_K: tl.constexpr,  # divides LENGTH
    GROUP_B: tl.constexpr,  # blocks of x visited before the next block of the matrix, for L2 hits
    EVEN: tl.constexpr,  # whether blocks divide N and slices divide K
    STAGES: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
    squares=None,  # as for `gemm_small`
    SQUARES: tl.constexpr = 0,
    PADDED: tl.constexpr = 0,
    EPS: tl.constexpr = 0.0,
    next_weight=None,
    next_out=None,
    next_squares=None,
    OFFSET: tl.constexpr = 0.0,
    MULTIPLIER: tl.constexpr = 1.0,
):
    """For the many rows of a prompt."""
    let_next_start(PDL)
    MATRICES: tl.constexpr = 2 if GATED else 1
    COLUMNS: tl.constexpr = BLOCK_N // MATRICES
    # Programs that run at the same time share blocks of both matrices.
    blocks_n, blocks_b = tl.cdiv(N, COLUMNS), tl.cdiv(B, BLOCK_B)
    program = tl.program_id(0)
    first_b = program // (GROUP_B * blocks_n) * GROUP_B
    group_b = tl.minimum(blocks_b - first_b, GROUP_B)
    within = program % (GROUP_B * blocks_n)
    block_n = within // group_b
    line = tl.arange(0, BLOCK_N)
    place = block_n * COLUMNS + line // MATRICES
    row = ((first_b + within % group_b) * BLOCK_B + tl.arange(0, BLOCK_B)).to(tl.int64)
    at = tl.arange(0, BLOCK_K)
    first = weight + (place + line % MATRICES * N)[:, None].to(tl.int64) * K + at[None, :]
    # Rows past the end load the last row: they are not stored, so they need no mask.
    held = tl.minimum(row, B - 1)
    vectors = x + held[:, None] * K + at[None, :]
    wait_for_previous(PDL)
    STEPS: tl.constexpr = LENGTH // BLOCK_K
    total = tl.zeros((BLOCK_B, BLOCK_N), tl.float32)
    y = total
    for step in tl.range(0, SLICES * STEPS, num_stages=STAGES):
        k = step * BLOCK_K
        k_mask = k + at < K
        if EVEN:
            rows = tl.load(vectors + k)
        else:
            rows = tl.load(vectors + k, k_mask[None, :], 0.0)
        y = tl.dot(rows, load_block(first + k, place < N, k_mask, EVEN).T, y, input_precision="ieee")
        if SLICES > 1:
            if step % STEPS == STEPS - 1:
                total += y
                y = tl.zeros((BLOCK_B, BLOCK_N), tl.float32)
    if SLICES == 1:
        total = y
    if GATED:
        summed = tl.split(tl.reshape(total, (BLOCK_B, COLUMNS, 2)))
    else:
        summed = (total,)
    column = block_n * COLUMNS + tl.arange(0, COLUMNS)
    column_mask, row_mask = column < N, row < B
    places, inside = row[:, None] * N + column[None, :], row_mask[:, None] & column_mask[None, :]
    biases, scale, addend = (), None, None
    if BIAS:
        biases = (tl.load(bias + column, column_mask, 0.0).to(tl.float32)[None, :],)
        if GATED:
            biases = biases + (tl.load(bias + N + column, column_mask, 0.0).to(tl.float32)[None, :],)
    if squares is not None:
        scale = norm_scale(tree_sum(load_squares(squares, held, held < B, SQUARES, PADDED)), K, EPS)[:, None]
    if RESIDUAL:
        addend = tl.load(residual + places, inside, 0.0).to(tl.float32)
    dtype: tl.constexpr = out.dtype.element_ty
    rounded = epilogue(summed, dtype, scale, biases, addend, ACTIVATION, MULTIPLIER).to(dtype)
    tl.store(out + places, rounded, inside)
    if next_weight is not None:
        wide = rounded.to(tl.float32)
        next_weights = tl.load(next_weight + column, column_mask, 0.0).to(tl.float32)[None, :] + OFFSET
        tl.store(next_out + places, (wide * next_weights).to(dtype), inside)
        of_row = tree_sum(tl.trans(tl.where(inside, wide * wide, 0.0)))
        tl.store(next_squares + row * blocks_n + block_n, of_row, row_mask)
