"""Sizes that were fastest on an H200 in bf16, by the time of whole steps and prompts: docs/performance.md has figures.

None of them changes a bit, except those under "The order of sums".
"""

from __future__ import annotations

from typing import NamedTuple

# The order of sums: other numbers here are other bits, everywhere alike.
SLICED_BELOW = 4096  # rows of a matrix: with fewer, a chain of additions (23 ns each) takes longer than reading it
LONG = 4096  # columns beyond which a matrix of fewer than twice as many rows takes twice as many slices
MOST_SLICES = 8
BLOCK = {2: 64, 4: 32}  # keys of a block, by bytes of a number. Wide heads of 16 bits take half as many: registers
GROUPS = 64  # of blocks of keys, about: what a query's keys are folded in

# Products
BLOCK_N = 64  # rows of the matrix that a program of `few_rows` takes, at least
FEW = 32  # rows of x that it takes: more are torch's product, where that agrees
MOST_FEW = 128  # that it takes where torch's does not: more are `many_rows`
APART = 64  # rows of x up to which each slice has programs of its own: at 128 they take 14.7 us for q, k, v, not 8.7
ALONE = 768  # columns on their way where a program has a processor to itself
FETCHED = 512  # columns that it fetches into the L2 cache before its input is there
PADDED_TO = 128  # rows of torch's products, or half as many: they are checked once for each multiple
FINISHED = 2048  # columns of a program of `finish_rows`


class Tile(NamedTuple):
    """Rows of x, rows of the matrix, columns at a time, how many of those are on their way, and warps."""

    rows: int
    block_n: int
    columns: int
    stages: int
    warps: int


MANY_SLICED = Tile(128, 128, 64, 4, 8)  # 1.23 times cuBLAS at 4,096 rows
MANY_WHOLE = Tile(128, 256, 64, 3, 8)
MANY_FLOAT32 = Tile(64, 64, 32, 2, 4)

# Attention
QUERIES = {2: 64, 4: 32}  # heads of queries that a program attends with, by bytes of a number
STAGES = 3  # blocks of keys on their way at once, where memory allows
BUSY = 1024  # programs that keep a GPU busy with keys
BY_ROW = 1 << 15  # numbers in one key of all KV heads of all rows, from which each head has one program
ROW_STAGES, ROW_WARPS = 2, 1
HEADS = 8  # that a program of `prepare_heads` takes

# Launches
PASSES = (64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)  # tokens of captured passes of prompts
SHARED = 58  # percent of a processor's memory for programs to share, the rest is cache: 766 instead of 873 us a step
LAUNCHES = 1024  # that are kept of each kernel of prompts, by shapes
ROWS_COMPILED = (1, 8, 16, 32, 64, 128, 256)  # a step of any number of rows has the kernels of one of these
