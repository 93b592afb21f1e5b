"""Products of a few or many rows with a weight in floats, on the CPU.

A row of floats is multiplied in eight lanes along the columns, which are added up in one order (`tile.py`); whether
that happens for a single row, in a tile of several, or in pieces of the columns whose sums are carried on changes
nothing. (Eight: with four, one row of x would wait for its own sums rather than for memory.) So nothing here may be
compiled with `fastmath`, which reorders sums as it likes.

Up to three rows read each row of W front to back, at the speed of memory. More are packed into panels, whose tiles with
rows of W run at the speed of arithmetic. Weights of 16 bits are then widened once for all panels of a part.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from infer.backend.cpu.memory import address, keep
from infer.backend.cpu.product import BFLOAT16, FLOAT32, PRODUCT
from infer.backend.cpu.simd import (
    fused,
    fused_one,
    load_bfloat,
    load_eight,
    load_eight_bfloats,
    load_eight_halves,
    load_float,
    load_half,
    no_eight,
    prefetch,
    store_float,
    store_floats,
    sum_of_eight,
)
from infer.backend.cpu.threads import shared
from infer.backend.cpu.tile import AHEAD, LANES, W_ROWS, X_ROWS, multiply_tile, panel_rows
from infer.backend.cpu.units import linked, unit

NEAR, FAR = 32768, 262144  # bytes that stay in the first and in the second cache of most cores, with room to spare
MANY = 256  # rows of x that are worth packing W for
MOST = 512  # rows of x in a part of the work
PARTS, FEW_PARTS = 64, 256  # of the work: so many that all threads have as much, so few that each is worth handing out


def _dot_row(load: Any, load_one: Any, size: int) -> Any:
    """Of a row of x with one of W, whose weights have so many bytes; `load` takes eight as floats, `load_one` one."""

    @linked(forceinline=True)
    def dot_row(w: int, x: int, columns: int) -> Any:
        sums, whole = no_eight(), columns // 8 * 8
        many = whole // 32 * 32
        for i in range(0, many, 32):
            at, to = w + i * size, x + i * 4
            if AHEAD > 0:
                for line in range(0, 32 * size, 64):
                    prefetch(at + 3 * AHEAD + line)
            sums = fused(load(at), load_eight(to), sums)
            sums = fused(load(at + 8 * size), load_eight(to + 32), sums)
            sums = fused(load(at + 16 * size), load_eight(to + 64), sums)
            sums = fused(load(at + 24 * size), load_eight(to + 96), sums)
        for i in range(many, whole, 8):
            sums = fused(load(w + i * size), load_eight(x + i * 4), sums)
        result = sum_of_eight(sums)
        for i in range(whole, columns):
            result = fused_one(load_one(w + i * size), load_float(x + i * 4), result)
        return result

    return dot_row


_dot_float32 = _dot_row(load_eight, load_float, 4)
_dot_bfloat16 = _dot_row(load_eight_bfloats, load_bfloat, 2)
_dot_float16 = _dot_row(load_eight_halves, load_half, 2)


@shared
def _row_by_row(row: int, kind: int, at: int, bias: int, rows: int, columns: int, x: int, count: int, out: int) -> None:
    """A row of W with few of x. It is read front to back, the way memory is fastest."""
    for t in range(count):
        other = x + t * columns * 4
        if kind == FLOAT32:
            result = _dot_float32(at + row * columns * 4, other, columns)
        elif kind == BFLOAT16:
            result = _dot_bfloat16(at + row * columns * 2, other, columns)
        else:
            result = _dot_float16(at + row * columns * 2, other, columns)
        store_float(out + (t * rows + row) * 4, result if bias == 0 else result + load_float(bias + row * 4))


@linked
def _pack_panels(x: int, columns: int, first: int, last: int, panels: int) -> None:
    """Put rows of x into panels: eight columns of each row of a panel, then the next eight."""
    steps, t = columns // LANES, first
    while t < last:
        size = panel_rows(last - t)
        for i in range(size):
            at, to = x + (t + i) * columns * 4, panels + (t * steps + i) * 32
            for step in range(steps):
                store_floats(to + step * size * 32, load_eight(at + step * 32))
        t += size


@linked
def _pack_weights(kind: int, at: int, width: int, rows: int, steps: int, packed: int) -> None:
    """Put rows of W, so many bytes wide, into tiles of float32: eight columns of each row of a tile, then the next."""
    for row in range((rows + W_ROWS - 1) // W_ROWS * W_ROWS):
        w = at + min(row, rows - 1) * width  # a last tile that lacks rows is filled up
        to = packed + (row // W_ROWS * W_ROWS * steps + row % W_ROWS) * 32
        if kind == FLOAT32:
            for step in range(steps):
                store_floats(to + step * W_ROWS * 32, load_eight(w + step * 32))
        elif kind == BFLOAT16:
            for step in range(steps):
                store_floats(to + step * W_ROWS * 32, load_eight_bfloats(w + step * 16))
        else:
            for step in range(steps):
                store_floats(to + step * W_ROWS * 32, load_eight_halves(w + step * 16))


@linked
def _load_weight(kind: int, at: int, index: int) -> Any:
    if kind == FLOAT32:
        return load_float(at + index * 4)
    return load_bfloat(at + index * 2) if kind == BFLOAT16 else load_half(at + index * 2)


@linked
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
    """Rows `first` to `last` of W with rows `start` to `stop` of x: `depth` eights of columns, then as many more."""
    steps, rows, tiles = columns // LANES, last - first, (last - first + W_ROWS - 1) // W_ROWS
    size = 4 if kind == FLOAT32 else 2
    packs = kind != FLOAT32 or stop - start >= MANY or tiles * W_ROWS != rows
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
    keep(packed, carry)


@linked
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
    """A part's columns from `step` on. The strides of W as `multiply_tile` takes them, and that from tile to tile."""
    tiles, is_last, t = (last - first + W_ROWS - 1) // W_ROWS, step + now == steps, start
    spare = np.empty(X_ROWS * W_ROWS, np.float32)
    while t < stop:
        panel = panel_rows(stop - t)
        x = panels + (t * steps + step * panel) * 32
        for tile in range(tiles):
            row = first + tile * W_ROWS
            whole = row + W_ROWS <= last or not is_last
            to, to_row = (out + t * out_row + row * 4, out_row) if whole else (address(spare), W_ROWS * 4)
            carried = carry + ((t - start) * tiles + tile * panel) * W_ROWS * 32
            multiply_tile(
                panel, w + tile * w_tile, w_row, w_step, x, now, carried, int(step == 0), int(is_last), to, to_row
            )
            if not whole:
                for i in range(panel):
                    for j in range(last - row):
                        store_float(out + (t + i) * out_row + (row + j) * 4, spare[i * W_ROWS + j])
        t += panel
    keep(spare, spare)


@linked
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
    """The columns beyond the last eight, one by one, then the bias."""
    whole, size = columns // LANES * LANES, 4 if kind == FLOAT32 else 2
    for t in range(start, stop):
        for row in range(first, last):
            to = out + (t * rows + row) * 4
            result = load_float(to) if whole > 0 else np.float32(0)
            for i in range(whole, columns):
                weight = _load_weight(kind, at + row * columns * size, i)
                result = fused_one(weight, load_float(x + (t * columns + i) * 4), result)
            store_float(to, result if bias == 0 else result + load_float(bias + row * 4))


@shared
def _pack_some(part: int, x: int, columns: int, count: int, panels: int) -> None:
    _pack_panels(x, columns, part * 2 * X_ROWS, min((part + 1) * 2 * X_ROWS, count), panels)


@shared
def _multiply_some(
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
    """One part of W with one of x, of which there are x_parts."""
    first, x_part, x_panels = part // x_parts * w_rows, part % x_parts, (count + X_ROWS - 1) // X_ROWS
    last, start = min(first + w_rows, rows), x_part * x_panels // x_parts * X_ROWS
    stop = min((x_part + 1) * x_panels // x_parts * X_ROWS, count)
    if columns >= LANES:
        _multiply_part(kind, at, rows, columns, first, last, panels, start, stop, depth, out)
    if bias != 0 or columns % LANES != 0:
        _finish_part(kind, at, bias, rows, columns, first, last, x, start, stop, out)


@linked
def _in_tiles(kind: int, at: int, bias: int, rows: int, columns: int, x: int, count: int, out: int) -> None:
    """The product of many rows: panels of x with tiles of W."""
    steps = columns // LANES
    packed = np.empty(count * steps * LANES, np.float32)
    panels = address(packed)
    if count < 32:
        _pack_panels(x, columns, 0, count, panels)
    else:
        _pack_some((count + 2 * X_ROWS - 1) // (2 * X_ROWS), x, columns, count, panels)
    # What is used again stays in a core's caches: a piece of a panel for all tiles of a part of W, and the same columns
    # of that part for all panels.
    pieces = max(1, (X_ROWS * steps * 32 + NEAR - 1) // NEAR) if count > X_ROWS else 1
    depth = max(1, (steps + pieces - 1) // pieces)
    x_parts, parts, room = 1, FEW_PARTS, NEAR
    if count * steps * 32 > FAR:
        parts, room = PARTS, FAR
        while x_parts * MOST < count or (rows * x_parts < 32 * PARTS and x_parts < (count + X_ROWS - 1) // X_ROWS):
            x_parts *= 2
    w_rows = min(room // (depth * 32), (rows * x_parts + parts - 1) // parts)
    w_rows = max(1, (w_rows + W_ROWS - 1) // W_ROWS) * W_ROWS
    todo = (rows + w_rows - 1) // w_rows * x_parts
    _multiply_some(todo, kind, at, bias, rows, columns, x, count, panels, w_rows, x_parts, depth, out)
    keep(packed, packed)


@unit(PRODUCT)
def float_product(kind: int, at: int, bias: int, rows: int, columns: int, x: int, count: int, out: int) -> None:
    """out [count, rows] = x [count, columns] W^T + b"""
    if count < 4:
        _row_by_row(rows, kind, at, bias, rows, columns, x, count, out)
    else:
        _in_tiles(kind, at, bias, rows, columns, x, count, out)
