"""The limits of a device: copy, GEMV and GEMM, with random data."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

COPY, MATRIX_VECTOR, MATRIX = "copy", "matrix-vector", "matrix"
TORCH_MV = "torch mv"  # a GEMV implementation
ROW_DOTS = ((1, 4), (2, 4), (4, 8), (8, 8))  # rows of a program, its warps


def median_seconds(work: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """On a GPU measured with events, all queued at once, so that host time is not included."""
    for _ in range(3):
        work()
    if device.type != "cuda":
        times = []
        for _ in range(repeats):
            started = time.perf_counter()
            work()
            times.append(time.perf_counter() - started)
        return statistics.median(times)
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for begin, end in events:
        begin.record()
        work()
        end.record()
    torch.cuda.synchronize(device)
    return statistics.median(begin.elapsed_time(end) for begin, end in events) / 1e3


if triton is not None:

    @triton.jit
    def row_dot_kernel(weight, x, out, COLUMNS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
        rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        total = tl.zeros([ROWS, BLOCK], tl.float32)
        for start in range(0, COLUMNS, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            weights = tl.load(weight + rows[:, None] * COLUMNS + columns[None, :]).to(tl.float32)
            total += weights * tl.load(x + columns).to(tl.float32)[None, :]
        tl.store(out + rows, tl.sum(total, 1))


def row_dot(weight: Tensor, x: Tensor, out: Tensor, rows: int, warps: int) -> None:
    """weight [N, K] times x [K], in a kernel that does nothing else. N is a multiple of rows, K of the block."""
    count, columns = weight.shape
    block = min(columns, 4096 // rows)
    row_dot_kernel[(count // rows,)](weight, x, out, columns, rows, block, num_warps=warps)


@torch.inference_mode()
def measure(
    device: torch.device,
    dtype: torch.dtype,
    matrix: tuple[int, int],
    products: list[tuple[int, int, int]],
    repeats: int,
) -> Iterator[dict[str, Any]]:
    """One row per implementation: the limit is the best of them. products: GEMMs of [m, k] with [k, n]."""
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device).normal_(generator=generator)

    yield copy(random(*matrix), repeats)
    yield from matrix_vector(random(*matrix), random(matrix[1]), repeats)
    for m, k, n in products:
        seconds = median_seconds(partial(torch.mm, random(m, k), random(k, n)), device, repeats)
        yield {"ceiling": MATRIX, "way": f"torch mm {m} x {k} x {n}", "rate": 2 * m * k * n / seconds}


def copy(source: Tensor, repeats: int) -> dict[str, Any]:
    """Bytes read and written."""
    target = torch.empty_like(source)
    seconds = median_seconds(partial(target.copy_, source), source.device, repeats)
    return {"ceiling": COPY, "way": "torch copy_", "rate": 2 * source.nbytes / seconds}


def matrix_vector(weight: Tensor, x: Tensor, repeats: int) -> Iterator[dict[str, Any]]:
    """Bytes of the matrix read."""
    out = torch.empty(weight.shape[0], dtype=weight.dtype, device=weight.device)
    ways: dict[str, Callable[[], Any]] = {
        TORCH_MV: partial(torch.mv, weight, x, out=out),
        "torch linear": partial(F.linear, x[None], weight),
    }
    if triton is not None and weight.is_cuda:
        for rows, warps in ROW_DOTS:
            ways[f"Triton, {rows} rows, {warps} warps"] = partial(row_dot, weight, x, out, rows, warps)
    for way, work in ways.items():
        seconds = median_seconds(work, weight.device, repeats)
        yield {"ceiling": MATRIX_VECTOR, "way": way, "rate": weight.nbytes / seconds}


def best(rows: list[dict[str, Any]]) -> dict[str, float]:
    """The best rate of each kind; and that of torch.mv, which others use as the limit."""
    rates = {
        ceiling: max(row["rate"] for row in rows if row["ceiling"] == ceiling)
        for ceiling in (COPY, MATRIX_VECTOR, MATRIX)
    }
    return rates | {TORCH_MV: next(row["rate"] for row in rows if row["way"] == TORCH_MV)}
