"""Products with a matrix: `eight_rows` for up to eight rows of 16 bits, `few_rows` for more, `many_rows` for prompts.

All three give a row the same bits. The columns K are cut into SLICES of LENGTH columns, a property of the matrix. In a
slice the matrix units add up 16 columns after 16 into one accumulator, whatever the tile; that a small and a large
matrix instruction agree on this is not documented, so it is checked on each device (`device_check.py`). The sums of
the slices are added one after the other.

The first two are W x^T: the matrix units take many rows of their first factor, and only W has as many. What becomes of
the sums is the same in each: `finished_sums`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from infer.backend.gpu.launch_kernels import fetch, is_last, let_next_start, wait_for_previous
from infer.backend.gpu.launcher import kernel
from infer.backend.gpu.row_kernels import finished_sums, norm_scale, tree_sum


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
    """[PADDED, B]: partial sums of squares of these rows."""
    part = tl.arange(0, PADDED)
    return tl.load(squares + row[None, :] * SQUARES + part[:, None], fed[None, :] & (part < SQUARES)[:, None], 0.0)


@triton.jit
def store_prepared(y, weights, next_out, next_squares, places, inside, row, fed):
    """What is stored of out [N, B] for its norm: by the norm's weights, and the sum of this program's squares."""
    tl.store(next_out + places, (y * weights).to(next_out.dtype.element_ty), inside)
    of_row = tree_sum(tl.where(inside, y * y, 0.0))
    tl.store(next_squares + row * tl.num_programs(0) + tl.program_id(0), of_row, fed)


@triton.jit
def joined(sums, inside, step, SLICES: tl.constexpr):
    """The sums of all slices, `step` apart, as other programs wrote them: past the processor's own cache."""
    y = tl.load(sums, inside, 0.0, cache_modifier=".cg")
    for i in tl.static_range(1, SLICES):
        y += tl.load(sums + i * step, inside, 0.0, cache_modifier=".cg")
    return y


@triton.jit
def split_gates(y, GATED: tl.constexpr):
    """The sums [N, B] of a block of the matrix; where GATED of the gates, and of what they are multiplied by."""
    if GATED:
        parts = tl.split(tl.permute(tl.reshape(y, (2, y.shape[0] // 2, y.shape[1])), (1, 2, 0)))
    else:
        parts = (y,)
    return parts


@kernel(do_not_specialize=["B"])
def few_rows(
    x,  # [B, K]
    weight,  # [N, K]; where GATED [2 N, K], the gate's rows first
    bias,
    residual,  # [B, N]
    out,  # [B, N]
    sums,  # float32 [SLICES, B, N]; where GATED, as much again for the other half
    split_counters,  # int32, one for each block of out: programs that are done, 0 before and after
    B,
    N,
    K: tl.constexpr,
    SLICES: tl.constexpr,
    LENGTH: tl.constexpr,  # columns of a slice
    APART: tl.constexpr,  # whether each slice has a program of its own
    BLOCK_B: tl.constexpr,
    BLOCK_N: tl.constexpr,  # rows of the matrix; where GATED half of them are gates
    BLOCK_K: tl.constexpr,  # divides LENGTH
    EVEN: tl.constexpr,  # whether blocks divide N, and slices K
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    STAGES: tl.constexpr,
    FETCHED: tl.constexpr,  # columns of a program that are fetched into the L2 cache before the wait
    PDL: tl.constexpr,
    squares=None,  # float32 [B, SQUARES]: partial sums of squares of the vectors, before their norm's weight
    SQUARES: tl.constexpr = 0,
    PADDED: tl.constexpr = 0,  # SQUARES, up to a power of two
    EPS: tl.constexpr = 0.0,
    next_weight=None,  # [N]: of the norm of out
    next_out=None,  # [B, N]: out by that weight
    next_squares=None,  # float32 [B, blocks of N]
    OFFSET: tl.constexpr = 0.0,
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
    fetch(lines + piece * LENGTH, FETCHED, PDL)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    exists, fed = column < N, row < B
    places = row[None, :] * N + column[:, None]
    inside = fed[None, :] & exists[:, None]
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
    STEPS: tl.constexpr = LENGTH // BLOCK_K
    ALL: tl.constexpr = STEPS if APART else SLICES * STEPS
    first = lines + at[None, :]
    vectors = x + row[:, None] * K + at[None, :]
    y = tl.zeros((BLOCK_N, BLOCK_B), tl.float32)
    total = y
    for step in tl.range(piece * STEPS, piece * STEPS + ALL, num_stages=STAGES):
        k = step * BLOCK_K
        real = k + at < K
        rows = tl.load(vectors + k, fed[:, None] & real[None, :], 0.0).T
        y = tl.dot(load_block(first + k, place < N, real, EVEN), rows, y, input_precision="ieee")
        if ALL > STEPS:
            if step % STEPS == STEPS - 1:
                total += y
                y = tl.zeros((BLOCK_N, BLOCK_B), tl.float32)
    summed = split_gates(total if ALL > STEPS else y, GATED)
    if SLICES > 1 and APART:
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
    rounded = finished_sums(summed, dtype, scale, biases, addend, ACTIVATION).to(dtype)
    tl.store(out + places, rounded, inside)
    if next_weight is not None:
        store_prepared(rounded.to(tl.float32), next_weights, next_out, next_squares, places, inside, row, fed)


@triton.jit
def as_first_factor(tile, STEPS: tl.constexpr, WARPS: tl.constexpr):
    """[STEPS * 16 WARPS, 32] -> [WARPS, 16, 32 STEPS], columns in another order within each 16.

    Of a tile that is loaded, four threads have a row, 16 bytes each, eight rows are a warp's, and a thread's other row
    is half a tile below. A matrix instruction takes four columns of each row from each of the four threads. So threads
    that are two apart exchange half of what they have; which column is called which within the 16 is chosen so that
    nothing else changes hands. The instruction adds up all 16 at once: their order does not matter.
    """
    parts = tl.reshape(tile, (STEPS, 2, WARPS, 8, 2, 2, 2, 2, 2))
    return tl.reshape(tl.permute(parts, (2, 1, 3, 0, 4, 7, 6, 5, 8)), (WARPS, 16, 32 * STEPS))


@triton.jit
def as_second_factor(tile, STEPS: tl.constexpr, WARPS: tl.constexpr, ROWS: tl.constexpr):
    """[STEPS * ROWS * WARPS, 32] -> [WARPS, 32 STEPS, ROWS], columns in the same order; rows in eights, by warp."""
    parts = tl.reshape(tile, (STEPS, ROWS // 8, WARPS, 8, 2, 2, 2, 2, 2))
    return tl.reshape(tl.permute(parts, (2, 0, 4, 7, 6, 5, 8, 1, 3)), (WARPS, 32 * STEPS, ROWS))


@triton.jit
def load_chunks(
    chunks,
    first,
    exists,
    k,
    K: tl.constexpr,
    SIZE: tl.constexpr,
    EVEN: tl.constexpr,
    FROM: tl.constexpr,
    TO: tl.constexpr,
):
    """Chunks, and those FROM to TO of the matrix. Read once, they would only drive others from the L2 cache."""
    for i in tl.static_range(FROM, TO):
        if EVEN:
            chunk = tl.load(first + i * SIZE, eviction_policy="evict_first")
        else:
            chunk = tl.load(first + i * SIZE, exists & (i * SIZE + k < K), 0.0, eviction_policy="evict_first")
        chunks = chunks + (chunk,)
    return chunks


@triton.jit
def load_vectors(vectors, x, fed, k, K: tl.constexpr, SIZE: tl.constexpr, FROM: tl.constexpr, TO: tl.constexpr):
    """The same of the rows that they are multiplied with."""
    for i in tl.static_range(FROM, TO):
        vectors = vectors + (tl.load(x + i * SIZE, fed & (i * SIZE + k < K), 0.0),)
    return vectors


@kernel(do_not_specialize=["B"])
def eight_rows(
    x,  # [B, K]
    weight,  # [N, K]; where GATED [2 N, K], the gate's rows first
    bias,
    residual,  # [B, N]
    out,  # [B, N]
    B,
    N,
    K: tl.constexpr,
    SLICES: tl.constexpr,  # each has a warp of its own
    LENGTH: tl.constexpr,  # columns of a slice
    HIGH: tl.constexpr,  # rows of the matrix that a warp has, 8 or 16: as its instruction's second factor, or first
    STEPS: tl.constexpr,  # loads of a chunk of columns: 32 STEPS divides LENGTH
    HELD: tl.constexpr,  # chunks that are loaded before the wait, and as many ahead of the one that is used
    VECTORS_AHEAD: tl.constexpr,  # chunks of x that are loaded ahead
    EVEN: tl.constexpr,  # whether blocks divide N, and slices K
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
    squares=None,  # as for `few_rows`
    SQUARES: tl.constexpr = 0,
    PADDED: tl.constexpr = 0,
    EPS: tl.constexpr = 0.0,
    next_weight=None,
    next_out=None,
    next_squares=None,
    OFFSET: tl.constexpr = 0.0,
):
    """For at most eight rows, of 16 bits an element.

    Matrix instructions take 16 rows of W and 8 of x. The weights are loaded straight into the registers that they are
    taken from, and wait there for x.
    """
    MATRICES: tl.constexpr = 2 if GATED else 1
    WARPS: tl.constexpr = MATRICES * SLICES
    SIZE: tl.constexpr = 32 * STEPS
    CHUNKS: tl.constexpr = LENGTH // SIZE
    let_next_start(PDL)
    line, at = tl.arange(0, STEPS * HIGH * WARPS)[:, None], tl.arange(0, 32)[None, :]
    warp, step = line // 8 % WARPS, line // (HIGH * WARPS) * 32
    place = tl.program_id(0) * HIGH + line // (8 * WARPS) % (HIGH // 8) * 8 + line % 8
    from_k = warp % SLICES * LENGTH + at
    first = weight + (place + warp // SLICES * N).to(tl.int64) * K + from_k + step
    exists, k = place < N, from_k + step
    chunks = load_chunks((), first, exists, k, K, SIZE, EVEN, 0, HELD)
    column, row = tl.program_id(0) * HIGH + tl.arange(0, HIGH), tl.arange(0, 8)
    present, fed = column < N, row < B
    places = row[None, :] * N + column[:, None]
    inside = fed[None, :] & present[:, None]
    biases = ()
    if BIAS:
        biases = load_biases(bias, column, present, N, GATED)
    if next_weight is not None:
        next_weights = tl.load(next_weight + column, present, 0.0).to(tl.float32)[:, None] + OFFSET
    wait_for_previous(PDL)
    line = tl.arange(0, STEPS * 8 * WARPS)[:, None]
    of_x, x_k = line % 8, line // 8 % SLICES * LENGTH + at + line // (8 * WARPS) * 32
    from_x = x + of_x * K + x_k
    vectors = load_vectors((), from_x, of_x < B, x_k, K, SIZE, 0, VECTORS_AHEAD)
    addend, scale = None, None
    if RESIDUAL:
        addend = tl.load(residual + places, inside, 0.0).to(tl.float32)
    if squares is not None:
        squares_of = load_squares(squares, row, fed, SQUARES, PADDED)
    dtype: tl.constexpr = x.dtype.element_ty
    sums = tl.zeros((WARPS, 16, 8), tl.float32)
    for i in tl.static_range(CHUNKS):
        if i + VECTORS_AHEAD < CHUNKS:
            vectors = load_vectors(vectors, from_x, of_x < B, x_k, K, SIZE, i + VECTORS_AHEAD, i + VECTORS_AHEAD + 1)
        if i + HELD < CHUNKS:
            chunks = load_chunks(chunks, first, exists, k, K, SIZE, EVEN, i + HELD, i + HELD + 1)
        if HIGH == 16:
            sums = tl.dot(as_first_factor(chunks[i], STEPS, WARPS), as_second_factor(vectors[i], STEPS, WARPS, 8), sums)
        else:
            twice = as_first_factor(repeated(vectors[i], STEPS), STEPS, WARPS)
            sums = tl.dot(twice, as_second_factor(chunks[i], STEPS, WARPS, 8), sums)
    if HIGH == 8:
        once = tl.max(tl.reshape(sums, (WARPS, 2, 8, 8)), 1)  # of two that are the same, in one thread
        sums = tl.permute(once, (0, 2, 1))
    totals = join_warps(sums, MATRICES, SLICES, HIGH)
    if GATED:
        gate, up = tl.split(tl.permute(totals, (1, 2, 0)))
        summed = (gate, up)
    else:
        summed = (tl.reshape(totals, (HIGH, 8)),)
    if squares is not None:
        scale = norm_scale(tree_sum(squares_of), K, EPS)[None, :]
    rounded = finished_sums(summed, dtype, scale, biases, addend, ACTIVATION).to(dtype)
    tl.store(out + places, rounded, inside)
    if next_weight is not None:
        store_prepared(rounded.to(tl.float32), next_weights, next_out, next_squares, places, inside, row, fed)


@triton.jit
def join_warps(sums, MATRICES: tl.constexpr, SLICES: tl.constexpr, HIGH: tl.constexpr):
    """`joined`, of slices that warps have: [MATRICES * SLICES, HIGH, 8] -> [MATRICES, HIGH, 8]."""
    beside = tl.permute(tl.reshape(sums, (MATRICES, SLICES, HIGH, 8)), (0, 2, 3, 1))
    parts = unstacked(beside, SLICES)
    total = parts[0]
    for i in tl.static_range(1, SLICES):
        total += parts[i]
    return total


@triton.jit
def unstacked(x, COUNT: tl.constexpr):
    """The elements of the last dimension, 1 to 8, each as a tensor."""
    A: tl.constexpr = x.shape[0]
    B: tl.constexpr = x.shape[1]
    C: tl.constexpr = x.shape[2]
    if COUNT == 1:
        parts = (tl.reshape(x, (A, B, C)),)
    elif COUNT == 2:
        parts = tl.split(x)
    elif COUNT == 4:
        even, odd = tl.split(tl.reshape(x, (A, B, C, 2, 2)))
        even, odd = tl.split(even), tl.split(odd)
        parts = (even[0], odd[0], even[1], odd[1])
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
    """Each group of rows twice, which each thread has already: an instruction's first factor has 16 rows."""
    LINES: tl.constexpr = tile.shape[0] // GROUPS
    once = tl.reshape(tile, (GROUPS, 1, LINES, 32))
    return tl.reshape(tl.broadcast_to(once, (GROUPS, 2, LINES, 32)), (2 * GROUPS * LINES, 32))


@kernel(do_not_specialize=["B"])
def many_rows(
    x,  # [B, K]
    weight,  # [N, K]
    out,  # [B, N]
    B,
    N,
    K: tl.constexpr,
    SLICES: tl.constexpr,
    LENGTH: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,  # divides LENGTH
    BESIDE: tl.constexpr,  # blocks of x that follow each other before the next block of the matrix
    EVEN: tl.constexpr,  # whether blocks divide N, and slices K
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """The product alone, x W^T: what becomes of it is left to `finish_rows` and `norm_rows`."""
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
    # Rows beyond the last read the last again: no mask for what is not stored.
    vectors = x + tl.minimum(row, B - 1)[:, None] * K + at[None, :]
    wait_for_previous(PDL)
    STEPS: tl.constexpr = LENGTH // BLOCK_K
    total = tl.zeros((BLOCK_B, BLOCK_N), tl.float32)
    y = total
    for step in tl.range(0, SLICES * STEPS, num_stages=STAGES):
        k = step * BLOCK_K
        real = k + at < K
        if EVEN:
            rows = tl.load(vectors + k)
        else:
            rows = tl.load(vectors + k, real[None, :], 0.0)
        y = tl.dot(rows, load_block(first + k, exists, real, EVEN).T, y, input_precision="ieee")
        if SLICES > 1:
            if step % STEPS == STEPS - 1:
                total += y
                y = tl.zeros((BLOCK_B, BLOCK_N), tl.float32)
    if SLICES == 1:
        total = y
    dtype: tl.constexpr = out.dtype.element_ty
    tl.store(out + row[:, None] * N + column[None, :], total.to(dtype), fed[:, None] & exists[None, :])
