"""Attention on a GPU: over keys at the addresses in a table, or over keys that a cache returns.

The kernels are in `attention_kernels.py` and `warp_kernels.py`; all give a query the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple, Unpack

import numpy as np
import torch
from torch import Tensor

from infer.backend.gpu import device_check
from infer.backend.gpu.attention_kernels import attend_many, attend_one, prepare_heads, prepare_projections
from infer.backend.gpu.gemm import empty_rows, in_parts
from infer.backend.gpu.launcher import Launch, launch_options, next_power, on, shared_memory
from infer.backend.gpu.tuned import (
    BLOCK,
    GROUPS,
    HEADS,
    HEADS_SIZE,
    LAUNCHES,
    MANY_STAGES,
    MANY_TOKENS,
    MAX_PROGRAMS,
    MIN_BY_ROW,
    QUERIES,
    REGISTERS,
    ROW_STAGES,
    ROW_WARPS,
    STAGES,
)
from infer.backend.gpu.warp_kernels import attend_by_warps
from infer.backend.parts import BlockParts
from infer.cache.base import ScoreOptions
from infer.cache.table import Table, alignment
from infer.config import ModelConfig
from infer.machine import to_device
from infer.nn.sharded import ShardedRMSNorm


def attend_step(
    block: BlockParts,
    qkv: Tensor,
    table: Tensor,
    positions: Tensor,
    split_counters: Tensor,
    rope_cos_sin: Tensor | None,
    *,
    width: int = 1,
    out: Tensor | None = None,
    pdl: bool = False,
) -> Tensor:
    """Store the new keys and values in the cache, and attend: qkv [B, (Hq + 2 Hkv) D] -> out [B, Hq D].

    width: adjacent rows that share a cache, at positions one after the other: all keys are stored first.
    """
    batch, size, group = qkv.shape[0], block.head_dim, next_power(block.heads // block.kv_heads)
    shape = _shape(block.heads, block.kv_heads, size, qkv.dtype, qkv.device)
    # With so many rows, one program per KV head and row saturates the GPU.
    by_row = batch * block.kv_heads * size >= MIN_BY_ROW and qkv.element_size() == 2 and block.window is None
    if out is None:
        out = torch.empty(batch, block.heads * size, dtype=qkv.dtype, device=qkv.device)
    if by_row or width > 1 or not _by_warps(shape, qkv, block.window):
        rows = _in_order(batch, qkv.device)
        q, _, _ = prepare(block, qkv, positions, rope_cos_sin, table, rows, pdl=pdl)
        if by_row:
            return _attend_by_row(q, out, table, positions, block.kv_heads, pdl, **block.score_options())
        return _attend_one(q, out, table, positions, split_counters, block.kv_heads, pdl, **block.score_options())
    norm = block.q_norm if block.norms_heads_apart else None
    attend_by_warps[(_programs(batch * block.kv_heads), block.kv_heads, batch)](
        qkv,
        out,
        _empty_partials(batch, block.kv_heads, shape, group, qkv.device),
        split_counters,
        table,
        positions,
        None if norm is None else norm.weight,
        None if norm is None or block.k_norm is None else block.k_norm.weight,
        rope_cos_sin,
        _sinks(block.sinks),
        _scale(block.scale, block.softcap),
        block.window or 0,
        KV_HEADS=block.kv_heads,
        GROUP=shape["GROUP"],
        MERGE_G=group,
        D=size,
        BLOCK=shape["BLOCK"],
        GROUPS=GROUPS,
        SOFTCAP=_softcap(block.softcap),
        EPS=0.0 if norm is None else norm.eps,
        OFFSET=0.0 if norm is None else norm.offset,
        ALIGNED=alignment(size, qkv.dtype),
        num_warps=size // 64,
        **launch_options(pdl),
    )
    return out


def _by_warps(shape: dict[str, int], qkv: Tensor, window: int | None) -> bool:
    """Whether `attend_by_warps` supports this shape. A block must wrap around a ring at most once."""
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
    """q [T, Hq, D], k and v [T, Hkv, D], normed and rotated; with a table, k and v are stored in the cache instead.

    rows: int32 [T], the row of the table of each token.
    """
    count, size, norm = qkv.shape[0], block.head_dim, block.q_norm if block.norms_heads_apart else None
    q = torch.empty(count, block.heads, size, dtype=qkv.dtype, device=qkv.device)
    k, v = q, q
    if table is None:
        k, v = (torch.empty(count, block.kv_heads, size, dtype=qkv.dtype, device=qkv.device) for _ in range(2))
    if count:
        has_norm, has_rope = norm is not None, rope_cos_sin is not None
        constants = (0.0, 0.0) if norm is None else (norm.eps, norm.offset)
        _prepare(count, block.heads, block.kv_heads, size, qkv.dtype, qkv.device, has_norm, constants, has_rope, pdl)(
            qkv,
            _no_table(qkv.device) if table is None else table,
            positions if rows is None else rows,
            positions,
            qkv if norm is None else norm.weight,
            qkv if norm is None or block.k_norm is None else block.k_norm.weight,
            qkv if rope_cos_sin is None else rope_cos_sin,
            0 if table is None else 1,
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
        )
    return q, k, v


def prepare_projections_of(
    block: BlockParts, config: ModelConfig, qkv: Tensor, positions: Tensor, *, pdl: bool = False
) -> None:
    """Norm q and k of qkv [T, (Hq + 2 Hkv) D] where a norm is over all heads, and scale q by its position; in place."""
    norm, beta = (
        (None if block.norms_heads_apart else block.q_norm),
        0.0 if config.rope is None else config.rope.query_beta,
    )
    if (norm is None and not beta) or not len(qkv):
        return
    q_norm, k_norm, heads = block.q_norm, block.k_norm, qkv
    q_size, k_size = block.heads * block.head_dim, block.kv_heads * block.head_dim
    q, k, _ = qkv.split_with_sizes([q_size, k_size, k_size], 1)
    if isinstance(q_norm, ShardedRMSNorm) and isinstance(k_norm, ShardedRMSNorm):
        keys = k_norm.input(k)
        heads = torch.cat((q_norm.input(q), keys, keys), 1)  # the kernel expects v there, and does not read it
        q_size, k_size = q_norm.weight.shape[0], k_norm.weight.shape[0]
    prepare_projections[(len(qkv), 1 if norm is None else 2)](
        heads,
        positions,
        None if norm is None else norm.weight,
        None if norm is None or block.k_norm is None else block.k_norm.weight,
        QUERY_SIZE=q_size,
        KEY_SIZE=k_size,
        QUERY_PARTS=in_parts(q_size),
        KEY_PARTS=in_parts(k_size),
        EPS=0.0 if norm is None else norm.eps,
        OFFSET=0.0 if norm is None else norm.offset,
        QUERY_BETA=beta,
        CONTEXT=1 if config.rope is None else config.rope.original_max_position_embeddings,
        **launch_options(pdl),
    )
    if isinstance(q_norm, ShardedRMSNorm) and isinstance(k_norm, ShardedRMSNorm):
        q.copy_(q_norm.output(heads[:, :q_size]))
        k.copy_(k_norm.output(heads[:, q_size:]))


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
    all_heads = heads + 2 * kv_heads
    together = HEADS if count < MANY_TOKENS else max(1, min(next_power(all_heads), HEADS_SIZE // next_power(size)))
    return Launch(
        prepare_heads,
        (count, -(-all_heads // together)),
        HEADS=heads,
        KV_HEADS=kv_heads,
        D=size,
        BLOCK_D=next_power(size),
        BLOCK_H=together,
        NORM=has_norm,
        EPS=constants[0],
        OFFSET=constants[1],
        ROPE=has_rope,
        ALIGNED=alignment(size, dtype),
        num_warps=2 if count < MANY_TOKENS else 4,
        **launch_options(pdl),
    )


class Tiles(NamedTuple):
    """The queries of a pass, cut into tiles for `attend_many`."""

    rows: Tensor  # int32 [T]: the table row of each token
    tiles: Tensor  # int32 [tiles, 5]: see `attend_many`
    end: int  # the highest position + 1
    queries: int  # per tile
    page: int = 0  # positions per page; 0: no pages


def tiles_of(spans: Sequence[tuple[int, int]], queries: int, device: torch.device, *, page: int = 0) -> Tiles:
    """spans: for each table row, the position of its first token, and the number of tokens."""
    tiles = as_tiles(spans, queries)
    rows = np.repeat(np.arange(len(spans), dtype=np.int32), [n for _, n in spans])
    padding = np.zeros(-len(rows) % 4, np.int32)  # tiles start at a multiple of 16 bytes
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
    # The tiles with most keys run first: one that started last would delay the end.
    return tiles[np.argsort(-at, kind="stable")].astype(np.int32)


@lru_cache(8)
def _tiles(start: int, n: int, batch: int, queries: int, device: torch.device) -> Tiles:
    """Cached: the same in all layers of a pass."""
    return tiles_of([(start, n)] * batch, queries, device)


def queries_of(heads: int, kv_heads: int, size: int, dtype: torch.dtype, device: torch.device) -> int:
    """Positions per tile, such that all have the same number of blocks per group."""
    shape = _shape(heads, kv_heads, size, dtype, device)
    return max(1, min(QUERIES[dtype.itemsize] // next_power(heads // kv_heads), shape["BLOCK"] * GROUPS))


def max_end_of(end: int, block: BlockParts, dtype: torch.dtype, device: torch.device) -> int:
    """`end` rounded up to one of two values, which decide whether each block is a group."""
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
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    pdl: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """q [T, Hq, D] -> out [T, Hq D]. The cache already holds the keys and values of these tokens."""
    count, heads, size = q.shape
    out = empty_rows(count, heads * size, q) if out is None else out
    shape = _shape(heads, kv_heads, size, q.dtype, q.device)
    single = _blocks(tiles.end, window, shape["BLOCK"]) <= GROUPS
    wraps = 0 if window is None else 1 if window >= shape["BLOCK"] else 2
    kind = q.dtype, q.device, tuple(shape.items()), wraps, tiles.page, single, _softcap(softcap), pdl
    launch = _attend_many(tiles.tiles.shape[0], tiles.queries, kind, (out.dtype, sinks is None))
    launch(q, out, table, tiles.tiles, None, _sinks(sinks), _scale(scale, softcap), window or 0)
    return out


def _attend_by_row(
    q: Tensor,
    out: Tensor,
    table: Tensor,
    positions: Tensor,
    kv_heads: int,
    pdl: bool,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Like `_attend_one` without a window, with one program for all keys of a row's KV head."""
    assert window is None
    batch, heads, size = q.shape
    shape, group = _shape(heads, kv_heads, size, q.dtype, q.device), next_power(heads // kv_heads)
    small = device_check.instructions_agree(q.device, q.dtype)
    queries = max(1, (16 if small else 64) // group)
    attend_many[(batch, kv_heads)](
        q,
        out,
        table,
        None,
        positions,
        _sinks(sinks),
        _scale(scale, softcap),
        0,
        BLOCK_G=group,
        QUERIES=queries,
        SOFTCAP=_softcap(softcap),
        SINGLE=False,
        WINDOWED=False,
        WRAPS=0,
        POSITIONS=-1,
        ALIGNED=alignment(size, q.dtype),
        STAGES=ROW_STAGES,
        num_warps=ROW_WARPS if small else 4,
        **shape,
        **launch_options(pdl),
    )
    return out


@lru_cache(LAUNCHES)
def _attend_many(tiles: int, queries: int, kind: tuple[Any, ...], _: tuple[torch.dtype, bool]) -> Launch:
    """The last argument, the dtype of the result and whether there are sinks, is part of the cache key only."""
    dtype, device, sizes, wraps, page, single, softcap, pdl = kind
    shape = dict(sizes)
    group = next_power(shape["GROUP"])
    return Launch(
        attend_many,
        (tiles, shape["KV_HEADS"]),
        BLOCK_G=group,
        QUERIES=queries,
        SOFTCAP=softcap,
        SINGLE=single,
        WINDOWED=wraps > 0,
        WRAPS=wraps,
        POSITIONS=page,
        ALIGNED=alignment(shape["D"], dtype),
        STAGES=_stages(queries * group, shape, dtype.itemsize, device, MANY_STAGES),
        num_warps=4 if shape["D"] <= 128 else 8,
        maxnreg=REGISTERS.get(shape["BLOCK_D"]) if dtype.itemsize == 2 else None,
        **shape,
        **launch_options(pdl),
    )


class GpuAttention:
    """Attention over keys and values that a cache returns: an `AttentionKernel`."""

    takes_int8 = False

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        end: int,
        dtype: torch.dtype | None = None,
        **options: Unpack[ScoreOptions],
    ) -> Tensor:
        """dtype: of the result; None: q's."""
        batch, heads, n, size = q.shape
        kv_heads, keys = k.shape[1], k.shape[2]
        where = Table([k], [v])
        if k.stride()[2:] != (size, 1) or k.stride() != v.stride() or not where.aligned:
            k, v = k.contiguous(), v.contiguous()
            where = Table([k], [v])
        table = to_device(torch.from_numpy(where.from_position(end - keys)[0]), q.device)
        rows = q.transpose(1, 2).contiguous().view(batch * n, heads, size)
        out = torch.empty(batch * n, heads * size, dtype=dtype or q.dtype, device=q.device)
        with on(q.device):
            if n > 1:
                queries = queries_of(heads, kv_heads, size, q.dtype, q.device)
                tiles = _tiles(end - n, n, batch, queries, q.device)
                attend_rows(rows, table, tiles, kv_heads=kv_heads, out=out, **options)
            else:
                positions = torch.full((batch,), end - 1, dtype=torch.int32, device=q.device)
                split_counters = torch.zeros(batch * kv_heads, dtype=torch.int32, device=q.device)
                _attend_one(rows, out, table, positions, split_counters, kv_heads, False, **options)
        return out.view(batch, n, heads, size).transpose(1, 2)

    def weights(self, q: Tensor, k: Tensor, v: Tensor, *, end: int, **options: Unpack[ScoreOptions]) -> Tensor:
        """Attention with one-hot vectors as values, so that the output is the weights: they do not depend on values."""
        keys, size = k.shape[2], q.shape[3]
        found, one = [], torch.eye(size, dtype=v.dtype, device=v.device)
        for first in range(0, keys, size):
            units, count = torch.zeros_like(k), min(size, keys - first)
            units[:, :, first : first + count] = one[:count]
            mixed = self(q, k, units, end=end, dtype=torch.float32, **options)
            found.append(mixed[..., :count])
        return torch.cat(found, -1)


def _attend_one(
    q: Tensor,
    out: Tensor,
    table: Tensor,
    positions: Tensor,
    split_counters: Tensor,
    kv_heads: int,
    pdl: bool,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """q [B, Hq, D] of one token per row -> out [B, Hq D]. The cache already holds its key and value."""
    batch, heads, size = q.shape
    group, shape = next_power(heads // kv_heads), _shape(heads, kv_heads, size, q.dtype, q.device)
    attend_one[(_programs(batch * kv_heads), kv_heads, batch)](
        q,
        out,
        _empty_partials(batch, kv_heads, shape, group, q.device),
        split_counters,
        table,
        positions,
        _sinks(sinks),
        _scale(scale, softcap),
        window or 0,
        SOFTCAP=_softcap(softcap),
        **_options_of_one(shape, group, q),
        **launch_options(pdl),
    )
    return out


LOG2_E = math.log2(math.e)  # for exp2 instead of exp


def _scale(scale: float, softcap: float | None) -> float:
    return scale / softcap if softcap else scale * LOG2_E


def _softcap(softcap: float | None) -> float:
    """Of scaled scores; 0: none."""
    return softcap * LOG2_E if softcap else 0.0


def _sinks(sinks: Tensor | None) -> Tensor | None:
    return None if sinks is None else sinks.float() * LOG2_E


def _blocks(end: int, window: int | None, block: int) -> int:
    """Key blocks that the last query sees, at most."""
    blocks = -(-end // block)
    return blocks if window is None else min(blocks, -(-window // block) + 1)


def _shape(heads: int, kv_heads: int, size: int, dtype: torch.dtype, device: torch.device) -> dict[str, int]:
    """All that decides the order of sums over keys: the same for one query and many."""
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
    rows = max(group, 16 if small else 64)  # of the matrix instruction: the same as for a prompt
    return {
        **shape,
        "BLOCK_G": rows,
        "MERGE_G": group,
        "ALIGNED": alignment(shape["D"], q.dtype),
        "STAGES": _stages(rows, shape, q.element_size(), q.device),
        "num_warps": 4,
    }


def _stages(rows: int, shape: dict[str, int], size: int, device: torch.device, most: int = STAGES) -> int:
    """Pipeline stages: as many key blocks as fit into shared memory beside queries and weights."""
    kept = rows * (shape["BLOCK_D"] + shape["BLOCK"]) * size + 8192
    block = 2 * shape["BLOCK"] * shape["BLOCK_D"] * size
    return max(1, min(most, (shared_memory(device) - kept) // block))


def _empty_partials(batch: int, kv_heads: int, shape: dict[str, int], group: int, device: torch.device) -> Tensor:
    """Each has maximum and sum after its values, and two unused elements, so that the next starts at 16 bytes."""
    return torch.empty(
        batch, kv_heads, shape["GROUPS"] + 1, group, shape["BLOCK_D"] + 4, dtype=torch.float32, device=device
    )


def _programs(heads: int) -> int:
    """Programs that share the keys of one KV head. heads: KV heads of all rows."""
    return max(1, min(GROUPS + 1, MAX_PROGRAMS // heads))
