"""The fastest sizes on an H200 in bf16, measured over complete steps and prompts (docs/performance.md).

Only the sizes under "The order of sums" affect the results.
"""

from __future__ import annotations

from typing import NamedTuple

# The order of sums: other values give other bits, the same in every pass.
SLICED_BELOW = 4096  # rows of a matrix: with fewer, a chain of additions (23 ns each) takes longer than reading it
LONG_K = 4096  # columns: with more, a matrix with fewer than 2 SLICED_BELOW rows gets twice as many slices
MAX_SLICES = 8
BLOCK = {2: 64, 4: 32}  # keys per block, by bytes per element; half as many for wide 16-bit heads: registers
GROUPS = 64  # groups of key blocks per query, about; their partial results are merged

# GEMM
BLOCK_N = 64  # rows of the matrix per program of `gemm_small`, at least
SMALL_ROWS = 32  # max rows of x for `gemm_small`; above, torch's GEMM, if its bits agree
MAX_SMALL_ROWS = 128  # max rows of x for `gemm_small` if torch's bits do not agree; above, `gemm_large`
SPLIT_K = 64  # max rows of x for split-K programs: at 128, q, k, v take 14.7 us with them, 8.7 without
COLUMNS_AHEAD = 512  # columns in flight per program of `gemm_small`
COLUMNS_AHEAD_ALONE = 768  # if each program has its own SM
COLUMNS_AHEAD_SHARED = 384  # from 17 rows on, if two programs share an SM: gate, up of the 8B shape 58.7 us, not 64.4
PREFETCHED = 512  # columns prefetched into the L2 cache before the input is ready
FUSED_ROWS = 1024  # rows of x from which `gemm_large` with its epilogue is faster than torch's GEMM and an epilogue
PAD_ROWS = 128  # torch's GEMM runs a multiple of this, or half of it, and each size is checked once
EPILOGUE_COLUMNS = 2048  # per program of `epilogue_rows`


class Tile(NamedTuple):
    """Rows of x, rows of the matrix, columns per block, pipeline stages, and warps."""

    rows: int
    block_n: int
    columns: int
    stages: int
    warps: int


LARGE_SLICED = Tile(128, 128, 64, 4, 8)  # 1.23 times cuBLAS at 4,096 rows
LARGE_UNSLICED = Tile(128, 256, 64, 3, 8)
LARGE_FLOAT32 = Tile(64, 64, 32, 2, 4)

# Experts
FEW_TOKENS = 16  # up to so many tokens, pairs are not grouped by expert first
PAIRS_AT_ONCE = 2048  # of `group_pairs`
EXPERTS_FEW = Tile(16, 64, 128, 3, 4)
EXPERTS_MANY = Tile(128, 128, 64, 3, 8)
EXPERTS_FLOAT32 = Tile(32, 32, 32, 2, 4)

# Attention
QUERIES = {2: 64, 4: 32}  # query heads times positions per program, by bytes per element
STAGES = 3  # key blocks in flight, if shared memory allows
MANY_STAGES = 2  # for a prompt
REGISTERS = {64: 128, 128: 168}  # per thread, by head size: with so few, more programs share an SM
MAX_PROGRAMS = 1024  # enough to saturate memory bandwidth
MIN_BY_ROW = 1 << 15  # rows * kv_heads * head_dim from which one program per row and KV head is fastest
ROW_STAGES, ROW_WARPS = 2, 1
HEADS = 8  # per program of `prepare_heads`
MANY_TOKENS = 128  # from so many on, a program has heads of HEADS_SIZE numbers together
HEADS_SIZE = 8192

# Launches
SHORT_PASSES = (32, 64, 128, 192, 256, 384, 512, 768)
PASSES = (*SHORT_PASSES, 1024, 1280, 1536, 2048, 2304, 3072, 3584, 4096, 5120, 6144, 8192)  # tokens of captured passes
SHARED_PERCENT = 58  # of an SM's memory is shared memory, the rest L1 cache: 766 instead of 873 us a step
LAUNCHES = 1024  # cached launches of each prefill kernel, by shape
ROWS_COMPILED = (1, 8, 16, 32, 64, 128, 256)  # rows of steps to compile: together, all kernels of all steps
