"""`gemm`: x W^T + b with a weight of any kind; and the kernel for float weights (`gemm_int.py` has quantized ones).

An output depends on its row of x and its row of W alone, down to the last bit: not on the rows beside them, nor on
threads. A dot product has eight lanes along the columns, which are added in one order (`tile.py`), for a single row, in
a tile of several rows, or in pieces of the columns with carried sums. (With four lanes, one row of x would wait for its
own sums rather than for memory.) So nothing here may be compiled with `fastmath`, which reorders sums.

Up to three rows of x are a GEMV: each row of W is read sequentially, at the speed of memory. More rows are packed into
panels, whose tiles with rows of W run at the speed of arithmetic. 16-bit weights are then widened once for all panels
of a part.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from infer.backend.cpu.jit import address, call_at, inline, keep_alive, kernel
from infer.backend.cpu.simd import (
    fma,
    fma_f32,
    load_bf16,
    load_bf16x8,
    load_f16,
    load_f16x8,
    load_f32,
    load_f32x8,
    prefetch,
    reduce_add_x8,
    store,
    typed_intrinsic,
    zeros_x8,
)
from infer.backend.cpu.threads import parallel_for
from infer.backend.cpu.tile import LANES, PREFETCH_WEIGHTS_BYTES, W_ROWS, X_ROWS, gemm_tile, panel_rows

# kind: one of the next line; of a quantized weight, how many parts are at `at` (`gemm_int.py`). code: the address of
# the kernel. at, bias: addresses; bias may be 0.
WEIGHT = np.dtype([(name, np.int64) for name in ("code", "kind", "at", "bias", "rows", "columns")])
BFLOAT16, FLOAT32, FLOAT16 = 16, 32, 116
GEMM = types.void(*[types.int64] * 8)
L1_BYTES, L2_BYTES = 32768, 262144  # fit into the L1 and L2 caches of most cores, beside other data
PACK_ROWS = 256  # from so many rows of x on, packing W pays
PART_ROWS = 512  # rows of x in a part of the work, at most
PARTS, FEW_PARTS = 64, 256  # parts of the work: enough to balance threads, few enough to be worth scheduling


@typed_intrinsic
def _gemm_at(
    context: Any, code: Any, kind: Any, at: Any, bias: Any, rows: Any, columns: Any, x: Any, count: Any, out: Any
) -> Any:
    return types.void(types.int64, *GEMM.args), call_at


@inline
def gemm(weight: Any, x: int, count: int, out: int) -> None:
    """out [count, rows] = x [count, columns] W^T + b"""
    _gemm_at(weight.code, weight.kind, weight.at, weight.bias, weight.rows, weight.columns, x, count, out)


def _dot_row(load: Any, load_one: Any, size: int) -> Any:
    """The dot product of a row of x and a row of W. size: bytes of a weight; `load` loads eight, `load_one` one."""

    @inline(forceinline=True)
    def dot_row(w: int, x: int, columns: int) -> Any:
        sums, full = zeros_x8(), columns // 8 * 8
        many = full // 32 * 32
        for i in range(0, many, 32):
            at, to = w + i * size, x + i * 4
            if PREFETCH_WEIGHTS_BYTES > 0:
                for line in range(0, 32 * size, 64):
                    prefetch(at + PREFETCH_WEIGHTS_BYTES + line)
            sums = fma(load(at), load_f32x8(to), sums)
            sums = fma(load(at + 8 * size), load_f32x8(to + 32), sums)
            sums = fma(load(at + 16 * size), load_f32x8(to + 64), sums)
            sums = fma(load(at + 24 * size), load_f32x8(to + 96), sums)
        for i in range(many, full, 8):
            sums = fma(load(w + i * size), load_f32x8(x + i * 4), sums)
        result = reduce_add_x8(sums)
        for i in range(full, columns):
            result = fma_f32(load_one(w + i * size), load_f32(x + i * 4), result)
        return result

    return dot_row


_dot_float32 = _dot_row(load_f32x8, load_f32, 4)
_dot_bfloat16 = _dot_row(load_bf16x8, load_bf16, 2)
_dot_float16 = _dot_row(load_f16x8, load_f16, 2)


@parallel_for
def _gemv_row(row: int, kind: int, at: int, bias: int, rows: int, columns: int, x: int, count: int, out: int) -> None:
    """A row of W with few rows of x. W is read sequentially, the way memory is fastest."""
    for t in range(count):
        other = x + t * columns * 4
        if kind == FLOAT32:
            result = _dot_float32(at + row * columns * 4, other, columns)
        elif kind == BFLOAT16:
            result = _dot_bfloat16(at + row * columns * 2, other, columns)
        else:
            result = _dot_float16(at + row * columns * 2, other, columns)
        store(out + (t * rows + row) * 4, result if bias == 0 else result + load_f32(bias + row * 4))


@inline
def _pack_panels(x: int, columns: int, first: int, last: int, panels: int) -> None:
    """Packs rows of x into panels: eight columns of each row of a panel, then the next eight."""
    steps, t = columns // LANES, first
    while t < last:
        size = panel_rows(last - t)
        for i in range(size):
            at, to = x + (t + i) * columns * 4, panels + (t * steps + i) * 32
            for step in range(steps):
                store(to + step * size * 32, load_f32x8(at + step * 32))
        t += size


@inline
def _pack_weights(kind: int, at: int, width: int, rows: int, steps: int, packed: int) -> None:
    """Packs rows of W, `width` bytes apart, into float32 tiles: eight columns of each row of a tile, then the next."""
    for row in range((rows + W_ROWS - 1) // W_ROWS * W_ROWS):
        w = at + min(row, rows - 1) * width  # the last tile is padded
        to = packed + (row // W_ROWS * W_ROWS * steps + row % W_ROWS) * 32
        if kind == FLOAT32:
            for step in range(steps):
                store(to + step * W_ROWS * 32, load_f32x8(w + step * 32))
        elif kind == BFLOAT16:
            for step in range(steps):
                store(to + step * W_ROWS * 32, load_bf16x8(w + step * 16))
        else:
            for step in range(steps):
                store(to + step * W_ROWS * 32, load_f16x8(w + step * 16))


@inline
def _load_weight(kind: int, at: int, index: int) -> Any:
    if kind == FLOAT32:
        return load_f32(at + index * 4)
    return load_bf16(at + index * 2) if kind == BFLOAT16 else load_f16(at + index * 2)


@inline
def _multiply_part(
    kind: int,
    at: int,
    all_rows: int,
    columns: int,
    first: int,
    last: int,
    panels: int,
    start: int,
    stop: int,
    depth: int,
    out: int,
) -> None:
    """Rows `first` to `last` of W with rows `start` to `stop` of x, 8 * depth columns at a time."""
    steps, rows, tiles = columns // LANES, last - first, (last - first + W_ROWS - 1) // W_ROWS
    size = 4 if kind == FLOAT32 else 2
    packs = kind != FLOAT32 or stop - start >= PACK_ROWS or tiles * W_ROWS != rows
    packed = np.empty(tiles * W_ROWS * min(depth, steps) * LANES if packs else 0, np.float32)
    carry = np.empty((stop - start) * tiles * W_ROWS * LANES if depth < steps else 0, np.float32)
    for step in range(0, steps, depth):
        now, w = min(depth, steps - step), at + (first * columns + step * LANES) * size
        w_row, w_step = columns * 4, 32
        w_tile = W_ROWS * w_row
        if packs:
            _pack_weights(kind, w, columns * size, rows, now, address(packed))
            w, w_row, w_step, w_tile = address(packed), 32, W_ROWS * 32, W_ROWS * now * 32
        _multiply_tiles(
            w,
            w_row,
            w_step,
            w_tile,
            steps,
            first,
            last,
            panels,
            start,
            stop,
            step,
            now,
            address(carry),
            out,
            all_rows * 4,
        )
    keep_alive(packed, carry)


@inline
def _multiply_tiles(
    w: int,
    w_row: int,
    w_step: int,
    w_tile: int,
    steps: int,
    first: int,
    last: int,
    panels: int,
    start: int,
    stop: int,
    step: int,
    now: int,
    carry: int,
    out: int,
    out_row: int,
) -> None:
    """The columns of a part from `step` on. The strides of W are those of `gemm_tile`, and that between tiles."""
    tiles, is_last, t = (last - first + W_ROWS - 1) // W_ROWS, step + now == steps, start
    spare = np.empty(X_ROWS * W_ROWS, np.float32)
    while t < stop:
        panel = panel_rows(stop - t)
        x = panels + (t * steps + step * panel) * 32
        for tile in range(tiles):
            row = first + tile * W_ROWS
            full = row + W_ROWS <= last or not is_last
            to, to_row = (out + t * out_row + row * 4, out_row) if full else (address(spare), W_ROWS * 4)
            carried = carry + ((t - start) * tiles + tile * panel) * W_ROWS * 32
            gemm_tile(
                panel, w + tile * w_tile, w_row, w_step, x, now, carried, int(step == 0), int(is_last), to, to_row
            )
            if not full:
                for i in range(panel):
                    for j in range(last - row):
                        store(out + (t + i) * out_row + (row + j) * 4, spare[i * W_ROWS + j])
        t += panel
    keep_alive(spare)


@inline
def _finish_part(
    kind: int,
    at: int,
    bias: int,
    rows: int,
    columns: int,
    first: int,
    last: int,
    x: int,
    start: int,
    stop: int,
    out: int,
) -> None:
    """The columns after the last eight, one by one, then the bias."""
    full, size = columns // LANES * LANES, 4 if kind == FLOAT32 else 2
    for t in range(start, stop):
        for row in range(first, last):
            to = out + (t * rows + row) * 4
            result = load_f32(to) if full > 0 else np.float32(0)
            for i in range(full, columns):
                weight = _load_weight(kind, at + row * columns * size, i)
                result = fma_f32(weight, load_f32(x + (t * columns + i) * 4), result)
            store(to, result if bias == 0 else result + load_f32(bias + row * 4))


@parallel_for
def _pack_panel_pairs(part: int, x: int, columns: int, count: int, panels: int) -> None:
    _pack_panels(x, columns, part * 2 * X_ROWS, min((part + 1) * 2 * X_ROWS, count), panels)


@parallel_for
def _multiply_parts(
    part: int,
    kind: int,
    at: int,
    bias: int,
    rows: int,
    columns: int,
    x: int,
    count: int,
    panels: int,
    w_rows: int,
    x_parts: int,
    depth: int,
    out: int,
) -> None:
    """One part of W with one of the x_parts parts of x."""
    first, x_part, x_panels = part // x_parts * w_rows, part % x_parts, (count + X_ROWS - 1) // X_ROWS
    last, start = min(first + w_rows, rows), x_part * x_panels // x_parts * X_ROWS
    stop = min((x_part + 1) * x_panels // x_parts * X_ROWS, count)
    if columns >= LANES:
        _multiply_part(kind, at, rows, columns, first, last, panels, start, stop, depth, out)
    if bias != 0 or columns % LANES != 0:
        _finish_part(kind, at, bias, rows, columns, first, last, x, start, stop, out)


@inline
def _gemm_tiled(kind: int, at: int, bias: int, rows: int, columns: int, x: int, count: int, out: int) -> None:
    """Panels of x with tiles of W."""
    steps = columns // LANES
    packed = np.empty(count * steps * LANES, np.float32)
    panels = address(packed)
    if count < 32:
        _pack_panels(x, columns, 0, count, panels)
    else:
        _pack_panel_pairs((count + 2 * X_ROWS - 1) // (2 * X_ROWS), x, columns, count, panels)
    # Data used again stays in a core's caches: a piece of a panel for all tiles of a part of W, and the same columns
    # of that part for all panels.
    pieces = max(1, (X_ROWS * steps * 32 + L1_BYTES - 1) // L1_BYTES) if count > X_ROWS else 1
    depth = max(1, (steps + pieces - 1) // pieces)
    x_parts, parts, cache_bytes = 1, FEW_PARTS, L1_BYTES
    if count * steps * 32 > L2_BYTES:
        parts, cache_bytes = PARTS, L2_BYTES
        while x_parts * PART_ROWS < count or (rows * x_parts < 32 * PARTS and x_parts < (count + X_ROWS - 1) // X_ROWS):
            x_parts *= 2
    w_rows = min(cache_bytes // (depth * 32), (rows * x_parts + parts - 1) // parts)
    w_rows = max(1, (w_rows + W_ROWS - 1) // W_ROWS) * W_ROWS
    items = (rows + w_rows - 1) // w_rows * x_parts
    _multiply_parts(items, kind, at, bias, rows, columns, x, count, panels, w_rows, x_parts, depth, out)
    keep_alive(packed)


@kernel(GEMM)
def gemm_float(kind: int, at: int, bias: int, rows: int, columns: int, x: int, count: int, out: int) -> None:
    """out [count, rows] = x [count, columns] W^T + b"""
    if count < 4:
        _gemv_row(rows, kind, at, bias, rows, columns, x, count, out)
    else:
        _gemm_tiled(kind, at, bias, rows, columns, x, count, out)
