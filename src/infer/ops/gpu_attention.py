"""Attention of a decode step on a GPU.

The kernels are `attend_by_warps` in `kernels/gpu_warps.py`, where it was faster, and `attend` in
`kernels/gpu_attention.py`. Their sizes are what was fastest on an H200, by the time of whole steps.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from infer import kernels
from infer.ops.gpu_product import late, next_power
from infer.ops.parts import BlockParts
from infer.ops.table import alignment


class Shape(NamedTuple):
    """Of `attend`."""

    keys: int  # that a program looks at together
    stages: int  # blocks of them under way
    warps: int
    programs: int  # an H200 should hold all at once, beside those of the next kernel: more would take turns
    splits: int = 64  # programs that share a row's keys, at most


class WarpsShape(NamedTuple):
    """Of `attend_by_warps`."""

    block: int  # keys that a warp looks at together
    warps: int
    share: int  # warps that have the same keys
    programs: int
    splits: int = 96

    @property
    def keys(self) -> int:
        return self.block * self.warps // self.share


def shape(head_dim: int, group: int, batch: int, dtype: torch.dtype) -> Shape | WarpsShape:
    """group: query heads of a KV head."""
    if dtype.itemsize == 2 and group <= 8:
        if head_dim == 64:
            return WarpsShape(32, 2, 1, 384 if batch <= 8 else 512)
        if head_dim == 128 and batch <= 8:
            return WarpsShape(32, 2, 2, 768)
    if head_dim > 64:
        return Shape(32, 2, 2 if head_dim <= 128 else 4, 512)
    return Shape(64, 3, 4, 384) if batch <= 8 else Shape(128, 2, 4, 256)


def attend(
    block: BlockParts,
    qkv: Tensor,
    table: Tensor,
    positions: Tensor,
    finished: Tensor,
    turned: Tensor | None,
    *,
    pdl: bool = False,
) -> Tensor:
    """Store the new keys and values where the table says, and attend: qkv [B, (Hq + 2 Hkv) D] -> [B, Hq D]."""
    batch, group, head_dim, norm = qkv.shape[0], block.heads // block.kv_heads, block.head_dim, block.q_norm
    sizes = shape(head_dim, group, batch, qkv.dtype)
    splits = min(sizes.splits, max(1, sizes.programs // (batch * block.kv_heads)))
    out = torch.empty(batch, block.heads * head_dim, dtype=qkv.dtype, device=qkv.device)
    pieces = torch.empty(batch, block.heads, splits, head_dim + 4, dtype=torch.float32, device=qkv.device)
    options: dict[str, Any] = {
        "KV_HEADS": block.kv_heads,
        "GROUP": group,
        "D": head_dim,
        "NORM": norm is not None,
        "EPS": 0.0 if norm is None else norm.eps,
        "OFFSET": 0.0 if norm is None else norm.offset,
        "ROPE": turned is not None,
        "ALIGNED": alignment(head_dim, qkv.dtype),
        "num_warps": sizes.warps,
        **late(pdl),
    }
    if isinstance(sizes, WarpsShape):
        kernel = kernels.gpu_modules().warps.attend_by_warps
        options |= {"JOIN_G": next_power(group), "BLOCK": sizes.block, "WARPS": sizes.warps, "SHARE": sizes.share}
    else:
        kernel = kernels.gpu_modules().attention.attend
        options |= {
            "BLOCK_D": max(16, next_power(head_dim)),
            "BLOCK_G": max(16, next_power(group)),
            "MERGE_G": next_power(group),
            "BLOCK_S": sizes.keys,
            "STAGES": sizes.stages,
        }
    kernel[(block.kv_heads, splits, batch)](
        qkv,
        out,
        pieces,
        finished,
        table,
        positions,
        qkv if block.q_norm is None else block.q_norm.weight,
        qkv if block.k_norm is None else block.k_norm.weight,
        qkv if turned is None else turned,
        block.scale,
        block.window or 0,
        **options,
    )
    return out
