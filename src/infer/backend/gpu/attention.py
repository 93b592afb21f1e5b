"""Attention on a GPU: of a decode step, over keys where a table says they are, and of passes that bring theirs along.

The kernels are in `attention_kernels.py` and `warp_kernels.py`; all give a query the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from infer.backend.gpu import device_check
from infer.backend.gpu.attention_kernels import attend_many, attend_one, prepare_heads
from infer.backend.gpu.launcher import Launch
from infer.backend.gpu.products import UNFUSED, empty_rows, next_power, on, pdl_options, shared_memory
from infer.backend.gpu.tuned import BLOCK, BUSY, BY_ROW, GROUPS, HEADS, LAUNCHES, QUERIES, ROW_STAGES, ROW_WARPS, STAGES
from infer.backend.gpu.warp_kernels import attend_by_warps
from infer.backend.parts import BlockParts
from infer.cache.table import Table, alignment
from infer.machine import to_device


def attend_step(
    block: BlockParts,
    qkv: Tensor,
    table: Tensor,
    positions: Tensor,
    split_counters: Tensor,
    rope_cos_sin: Tensor | None,
    *,
    pdl: bool = False,
) -> Tensor:
    """Store the new keys and values where the table says, and attend: qkv [B, (Hq + 2 Hkv) D] -> [B, Hq D]."""
    batch, size, group = qkv.shape[0], block.head_dim, next_power(block.heads // block.kv_heads)
    shape = _shape(block.heads, block.kv_heads, size, qkv.dtype, qkv.device)
    # So many rows that one program for each KV head of each keeps a GPU busy.
    by_row = batch * block.kv_heads * size >= BY_ROW and qkv.element_size() == 2 and block.window is None
    if by_row or not _by_warps(shape, qkv, block.window):
        rows = _in_order(batch, qkv.device)
        q, _, _ = prepare(block, qkv, positions, rope_cos_sin, table, rows, pdl=pdl)
        if by_row:
            return _attend_by_row(q, table, positions, block.kv_heads, block.scale, pdl)
        return _attend_one(q, table, positions, split_counters, block.kv_heads, block.scale, block.window, pdl)
    out = torch.empty(batch, block.heads * size, dtype=qkv.dtype, device=qkv.device)
    norm = block.q_norm
    attend_by_warps[(_programs(batch * block.kv_heads), block.kv_heads, batch)](
        qkv,
        out,
        _pieces(batch, block.kv_heads, shape, group, qkv.device),
        split_counters,
        table,
        positions,
        None if block.q_norm is None else block.q_norm.weight,
        None if block.k_norm is None else block.k_norm.weight,
        rope_cos_sin,
        _scale(block.scale),
        block.window or 0,
        KV_HEADS=block.kv_heads,
        GROUP=shape["GROUP"],
        MERGE_G=group,
        D=size,
        BLOCK=shape["BLOCK"],
        GROUPS=GROUPS,
        EPS=0.0 if norm is None else norm.eps,
        OFFSET=0.0 if norm is None else norm.offset,
        ALIGNED=alignment(size, qkv.dtype),
        num_warps=size // 64,
        **UNFUSED,
        **pdl_options(pdl),
    )
    return out


def _by_warps(shape: dict[str, int], qkv: Tensor, window: int | None) -> bool:
    """Whether keys and values can wait in registers. A block wraps around a ring once at most."""
    return (
        qkv.element_size() == 2
        and shape["D"] in (64, 128, 256)
        and shape["GROUP"] <= 8
        and shape["BLOCK"] in (32, 64)
        and (window is None or window >= 64)
        and device_check.instructions_agree(qkv.device, qkv.dtype)
    )


def prepare(
    block: BlockParts,
    qkv: Tensor,
    positions: Tensor,
    rope_cos_sin: Tensor | None,
    table: Tensor | None = None,
    rows: Tensor | None = None,
    *,
    pdl: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """q [T, Hq, D], k and v [T, Hkv, D], normed and rotated; with a table, k and v are where it says instead.

    rows: int32 [T], the row of the table of each token.
    """
    count, size, norm = qkv.shape[0], block.head_dim, block.q_norm
    q = torch.empty(count, block.heads, size, dtype=qkv.dtype, device=qkv.device)
    k, v = q, q
    if table is None:
        k, v = (torch.empty(count, block.kv_heads, size, dtype=qkv.dtype, device=qkv.device) for _ in range(2))
    if count:
        has_norm, has_rope = block.q_norm is not None, rope_cos_sin is not None
        constants = (0.0, 0.0) if norm is None else (norm.eps, norm.offset)
        _prepare(count, block.heads, block.kv_heads, size, qkv.dtype, qkv.device, has_norm, constants, has_rope, pdl)(
            qkv,
            _no_table(qkv.device) if table is None else table,
            positions if rows is None else rows,
            positions,
            qkv if block.q_norm is None else block.q_norm.weight,
            qkv if block.k_norm is None else block.k_norm.weight,
            qkv if rope_cos_sin is None else rope_cos_sin,
            0 if table is None else 1,
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
        )
    return q, k, v


@cache
def _in_order(rows: int, device: torch.device) -> Tensor:
    return torch.arange(rows, dtype=torch.int32, device=device)


@cache
def _no_table(device: torch.device) -> Tensor:
    return torch.empty(1, dtype=torch.int64, device=device)


@lru_cache(LAUNCHES)
def _prepare(
    count: int,
    heads: int,
    kv_heads: int,
    size: int,
    dtype: torch.dtype,
    device: torch.device,
    has_norm: bool,
    constants: tuple[float, float],  # eps and offset
    has_rope: bool,
    pdl: bool,
) -> Launch:
    return Launch(
        prepare_heads,
        (count, -(-(heads + 2 * kv_heads) // HEADS)),
        HEADS=heads,
        KV_HEADS=kv_heads,
        D=size,
        BLOCK_D=next_power(size),
        BLOCK_H=HEADS,
        NORM=has_norm,
        EPS=constants[0],
        OFFSET=constants[1],
        ROPE=has_rope,
        num_warps=2,
        **UNFUSED,
        **pdl_options(pdl),
    )


class Tiles(NamedTuple):
    """The queries of a pass, cut into tiles for `attend_many`."""

    rows: Tensor  # int32 [T]: the row of the tables of each token
    tiles: Tensor  # int32 [tiles, 5]: see `attend_many`
    end: int  # one more than the highest position
    queries: int  # of a tile
    page: int = 0  # positions of a page; 0: no row has pages


def tiles_of(spans: Sequence[tuple[int, int]], queries: int, device: torch.device, *, page: int = 0) -> Tiles:
    """spans: of each row of the tables, the position of its first token, and how many there are."""
    tiles = as_tiles(spans, queries)
    rows = np.repeat(np.arange(len(spans), dtype=np.int32), [n for _, n in spans])
    padding = np.zeros(-len(rows) % 4, np.int32)  # tiles begin at a multiple of 16 bytes
    both = to_device(torch.from_numpy(np.concatenate((rows, padding, tiles.ravel()))), device)
    end = max(start + n for start, n in spans)
    return Tiles(both[: len(rows)], both[len(rows) + len(padding) :].view(-1, 5), end, queries, page)


def as_tiles(spans: Sequence[tuple[int, int]], queries: int) -> np.ndarray[Any, Any]:
    """int32 [tiles, 5]"""
    start, n = np.array(spans, np.int32).T
    end = start + n
    first = start // queries
    counts = -(-end // queries) - first  # tiles of each row
    row = np.repeat(np.arange(len(n), dtype=np.int32), counts)
    within = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    at = (first[row] + within) * queries
    tiles = np.stack((row, (np.cumsum(n) - n)[row], start[row], end[row], at), 1)
    # Most keys first, so that none of these is the last to run.
    return tiles[np.argsort(-at, kind="stable")].astype(np.int32)


@lru_cache(8)
def _tiles(start: int, n: int, batch: int, queries: int, device: torch.device) -> Tiles:
    """The same in all layers of a pass."""
    return tiles_of([(start, n)] * batch, queries, device)


def queries_of(heads: int, kv_heads: int, size: int, dtype: torch.dtype, device: torch.device) -> int:
    """Positions of a tile: so many that all fold as many blocks."""
    shape = _shape(heads, kv_heads, size, dtype, device)
    return max(1, min(QUERIES[dtype.itemsize] // next_power(heads // kv_heads), shape["BLOCK"] * GROUPS))


def reach_of(end: int, block: BlockParts, dtype: torch.dtype, device: torch.device) -> int:
    """A position as good as `end` to tell how queries take their blocks of keys: one of two."""
    shape = _shape(block.heads, block.kv_heads, block.head_dim, dtype, device)
    single = shape["BLOCK"] * GROUPS
    return single if end <= single else 2**30


def attend_rows(
    q: Tensor,
    table: Tensor,
    tiles: Tiles,
    *,
    kv_heads: int,
    scale: float,
    window: int | None,
    pdl: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """q [T, Hq, D] of rows whose keys and values, their own included, are where the table says -> [T, Hq D]

    dtype: of what it returns; None: q's.
    """
    count, heads, size = q.shape
    out = empty_rows(count, heads * size, q) if dtype is None else q.new_empty(count, heads * size, dtype=dtype)
    shape = _shape(heads, kv_heads, size, q.dtype, q.device)
    single = _blocks(tiles.end, window, shape["BLOCK"]) <= GROUPS
    wraps = 0 if window is None else 1 if window >= shape["BLOCK"] else 2
    kind = q.dtype, q.device, tuple(shape.items()), wraps, tiles.page, single, pdl
    launch = _attend_many(tiles.tiles.shape[0], tiles.queries, kind, out.dtype)
    launch(q, out, table, tiles.tiles, None, _scale(scale), window or 0)
    return out


def _attend_by_row(q: Tensor, table: Tensor, positions: Tensor, kv_heads: int, scale: float, pdl: bool) -> Tensor:
    """As `_attend_one`: a program goes through all keys of a row's head, and has nothing to share with others."""
    batch, heads, size = q.shape
    out = torch.empty(batch, heads * size, dtype=q.dtype, device=q.device)
    shape, group = _shape(heads, kv_heads, size, q.dtype, q.device), next_power(heads // kv_heads)
    small = device_check.instructions_agree(q.device, q.dtype)
    queries = max(1, (16 if small else 64) // group)
    attend_many[(batch, kv_heads)](
        q,
        out,
        table,
        None,
        positions,
        _scale(scale),
        0,
        BLOCK_G=group,
        QUERIES=queries,
        SINGLE=False,
        WINDOWED=False,
        WRAPS=0,
        POSITIONS=-1,
        ALIGNED=alignment(size, q.dtype),
        STAGES=ROW_STAGES,
        num_warps=ROW_WARPS if small else 4,
        **shape,
        **UNFUSED,
        **pdl_options(pdl),
    )
    return out


@lru_cache(LAUNCHES)
def _attend_many(tiles: int, queries: int, kind: tuple[Any, ...], _: torch.dtype) -> Launch:
    """Another for each dtype of what is returned."""
    dtype, device, sizes, wraps, page, single, pdl = kind
    shape = dict(sizes)
    group = next_power(shape["GROUP"])
    return Launch(
        attend_many,
        (tiles, shape["KV_HEADS"]),
        BLOCK_G=group,
        QUERIES=queries,
        SINGLE=single,
        WINDOWED=wraps > 0,
        WRAPS=wraps,
        POSITIONS=page,
        ALIGNED=alignment(shape["D"], dtype),
        STAGES=_stages(queries * group, shape, dtype.itemsize, device),
        num_warps=4 if shape["D"] <= 128 else 8,
        **shape,
        **UNFUSED,
        **pdl_options(pdl),
    )


class GpuAttention:
    """Attention over keys and values that a cache hands out: an `AttentionKernel`."""

    takes_int8 = False

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        window: int | None,
        end: int,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """dtype: of what it returns; None: q's."""
        batch, heads, n, size = q.shape
        kv_heads, keys = k.shape[1], k.shape[2]
        where = Table([k], [v])
        if k.stride()[2:] != (size, 1) or k.stride() != v.stride() or not where.aligned:
            k, v = k.contiguous(), v.contiguous()
            where = Table([k], [v])
        table = to_device(torch.from_numpy(where.from_position(end - keys)[0]), q.device)
        rows = q.transpose(1, 2).contiguous().view(batch * n, heads, size)
        with on(q.device):
            if n > 1:
                queries = queries_of(heads, kv_heads, size, q.dtype, q.device)
                tiles = _tiles(end - n, n, batch, queries, q.device)
                out = attend_rows(rows, table, tiles, kv_heads=kv_heads, scale=scale, window=window, dtype=dtype)
            else:
                positions = torch.full((batch,), end - 1, dtype=torch.int32, device=q.device)
                split_counters = torch.zeros(batch * kv_heads, dtype=torch.int32, device=q.device)
                out = _attend_one(rows, table, positions, split_counters, kv_heads, scale, window, False, dtype)
        return out.view(batch, n, heads, size).transpose(1, 2)

    def weights(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None, end: int) -> Tensor:
        """Found by values that are 1 in one dimension each: what is done with q and k does not depend on values."""
        keys, size = k.shape[2], q.shape[3]
        found, one = [], torch.eye(size, dtype=v.dtype, device=v.device)
        for first in range(0, keys, size):
            units, count = torch.zeros_like(k), min(size, keys - first)
            units[:, :, first : first + count] = one[:count]
            mixed = self(q, k, units, scale=scale, window=window, end=end, dtype=torch.float32)
            found.append(mixed[..., :count])
        return torch.cat(found, -1)


def _attend_one(
    q: Tensor,
    table: Tensor,
    positions: Tensor,
    split_counters: Tensor,
    kv_heads: int,
    scale: float,
    window: int | None,
    pdl: bool,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """q [B, Hq, D] of one token a row, whose own key and value are where the table says too -> [B, Hq D]"""
    batch, heads, size = q.shape
    group, shape = next_power(heads // kv_heads), _shape(heads, kv_heads, size, q.dtype, q.device)
    out = torch.empty(batch, heads * size, dtype=dtype or q.dtype, device=q.device)
    attend_one[(_programs(batch * kv_heads), kv_heads, batch)](
        q,
        out,
        _pieces(batch, kv_heads, shape, group, q.device),
        split_counters,
        table,
        positions,
        _scale(scale),
        window or 0,
        **_options_of_one(shape, group, q),
        **pdl_options(pdl),
    )
    return out


def _scale(scale: float) -> float:
    """For powers of two."""
    return scale * math.log2(math.e)


def _blocks(end: int, window: int | None, block: int) -> int:
    """Of keys that the last query sees, at most."""
    blocks = -(-end // block)
    return blocks if window is None else min(blocks, -(-window // block) + 1)


def _shape(heads: int, kv_heads: int, size: int, dtype: torch.dtype, device: torch.device) -> dict[str, int]:
    """What decides in which order keys are added up: the same for one query and many."""
    width = max(16, next_power(size))
    block = BLOCK[dtype.itemsize]
    if (dtype.itemsize == 2 and width > 64) or (width > 128 and shared_memory(device) < 2**17):
        block = max(16, block // 2)
    return {
        "KV_HEADS": kv_heads,
        "GROUP": heads // kv_heads,
        "D": size,
        "BLOCK_D": width,
        "BLOCK": block,
        "GROUPS": GROUPS,
    }


def _options_of_one(shape: dict[str, int], group: int, q: Tensor) -> dict[str, Any]:
    small = q.element_size() == 4 or device_check.instructions_agree(q.device, q.dtype)
    rows = max(group, 16 if small else 64)  # that the matrix units take, of a prompt's many too
    return {
        **shape,
        "BLOCK_G": rows,
        "MERGE_G": group,
        "ALIGNED": alignment(shape["D"], q.dtype),
        "STAGES": _stages(rows, shape, q.element_size(), q.device),
        "num_warps": 4,
        **UNFUSED,
    }


def _stages(rows: int, shape: dict[str, int], size: int, device: torch.device) -> int:
    """Blocks of keys on their way at once: as many as a program's memory holds beside queries and weights."""
    kept = rows * (shape["BLOCK_D"] + shape["BLOCK"]) * size + 8192
    block = 2 * shape["BLOCK"] * shape["BLOCK_D"] * size
    return max(1, min(STAGES, (shared_memory(device) - kept) // block))


def _pieces(batch: int, kv_heads: int, shape: dict[str, int], group: int, device: torch.device) -> Tensor:
    """Each with two numbers behind its values, and two unused, so that the next begins at a multiple of 16 bytes."""
    return torch.empty(
        batch, kv_heads, shape["GROUPS"] + 1, group, shape["BLOCK_D"] + 4, dtype=torch.float32, device=device
    )


def _programs(heads: int) -> int:
    """That share the keys of one of so many KV heads, of all rows."""
    return max(1, min(GROUPS + 1, BUSY // heads))
