"""Exact mode on a GPU: a pass through kernels that give a token the same bits in a step, a prompt, or a batch.

    norm | q, k, v | heads | attention | output + residual | norm | gate, up, activation | down + residual

A step (`launch`) and a prompt (`before_attention`, `attend`, `behind_attention`, `head`) are made of the same launches,
but for products and attention, of which each has a kernel for few rows and one for many, with equal results
(`kernels/gpu_exact.py` says why). What is compiled differs with the shapes of the model and its dtype alone: a norm, or
a head, is added up by the same code in each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from infer import kernels
from infer.kernels.table import FILLED
from infer.ops import fused, gpu_product
from infer.ops.fused import Plan
from infer.ops.linear import Linear
from infer.ops.norm import Norm
from infer.ops.parts import BlockParts, HeadParts
from infer.ops.table import alignment

FEW = 128  # rows that a product takes with the kernel for few
ROWS_COMPILED = (1, 32, 64, 128, 2 * FEW)  # as in `fused`
COLUMNS = {2: 128, 4: 32}  # of a matrix, by bytes of a number: each part of one has a multiple of them
GROUPS = 64  # of blocks of keys, about: what a query's keys are folded in
BLOCK = {2: 64, 4: 32}  # keys of a block, by bytes of a number
QUERIES = {2: 128, 4: 32}  # heads of queries that a program attends with, where a prompt has as many
BUSY = 1024  # programs that keep a GPU busy with keys
HEADS = 8  # that a program prepares
# Contracted multiplications and additions would round otherwise, wherever the compiler sees fit. (Matrix products
# of float32 are made of fused ones all the same.)
UNFUSED = {"enable_fp_fusion": False}


class BlockPlan(NamedTuple):
    """A block as the kernels take it."""

    parts: BlockParts
    pdl: bool

    def takes(self, x: Tensor) -> bool:
        weight = self.parts.before_attention.weight
        return x.dtype is weight.dtype and x.is_contiguous() and x.shape[1] == weight.shape[0]


class HeadPlan(NamedTuple):
    parts: HeadParts
    pdl: bool

    def takes(self, x: Tensor) -> bool:
        weight = self.parts.norm.weight
        return x.dtype is weight.dtype and x.shape[1] == weight.shape[0]


def plan_block(block: BlockParts) -> BlockPlan | None:
    """None where the kernels do not know the like: then neither has a model with such a block a `fused.plan`."""
    plan = fused.plan([block], HeadParts(block.after_mlp or block.before_attention, block.qkv), [None])
    return None if plan is None else BlockPlan(block, plan.pdl)


def plan_head(head: HeadParts) -> HeadPlan | None:
    weight = head.norm.weight
    return HeadPlan(head, fused.has_pdl(weight.device)) if head.linear.weight.dtype is weight.dtype else None


def step(plan: Plan, x: Tensor, tables: np.ndarray[Any, Any]) -> Tensor:
    """`fused.step`: logits [B, V] of the next token of each row, x [B, C]."""
    positions = torch.from_numpy(tables[0, :, FILLED].astype(np.int32)).to(x.device)
    return launch(plan, x, torch.from_numpy(tables).to(x.device), positions, fused.counters(plan, x.shape[0]))


def launch(plan: Plan, x: Tensor, tables: Tensor, positions: Tensor, finished: Tensor) -> Tensor:
    """`fused.launch`: the same with everything on the device."""
    with fused.on(x.device):
        turned = [turns(each, positions) for each in plan.frequencies if each.numel()]
        added, after = None, None
        for block, kind, table in zip(plan.blocks, plan.kinds, tables, strict=True):
            normed, x = _normed(x, block.before_attention, plan.pdl, added, after)
            qkv = product(block.qkv, normed, finished, pdl=plan.pdl)
            q, _, _ = _prepare(block, qkv, positions, None if kind is None else turned[kind], plan.pdl, table)
            attended = _attend_table(block, q, table, positions, finished, plan.pdl)
            x, added, after = _behind(block, attended, x, finished, plan.pdl)
        normed, _ = _normed(x, plan.head.norm, plan.pdl, added, after)
        return product(plan.head.linear, normed, finished, pdl=plan.pdl)


def turns(frequencies: Tensor, positions: Tensor) -> Tensor:
    """Cosines and signed sines [T, 2, D] of RoPE at these positions [T], int32."""
    with fused.on(positions.device):
        return fused.turns(frequencies.to(positions.device), positions)


def before_attention(
    plan: BlockPlan, x: Tensor, positions: Tensor, turned: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """q [T, Hq, D], k and v [T, Hkv, D] of tokens x [T, C] at these positions [T], int32. turned: from `turns`."""
    with fused.on(x.device):
        normed, _ = _normed(x, plan.parts.before_attention, plan.pdl)
        qkv = product(plan.parts.qkv, normed, pdl=plan.pdl)
        return _prepare(plan.parts, qkv, positions, turned, plan.pdl)


def behind_attention(plan: BlockPlan, attended: Tensor, x: Tensor) -> Tensor:
    """What a block makes of x [T, C] and what was attended to [T, Hq D]."""
    with fused.on(x.device):
        x, added, after = _behind(plan.parts, attended, x, None, plan.pdl)
        if after is None:
            return x
        return _normed(x, after, plan.pdl, added, after)[1]  # the norm that follows is another block's


def head(plan: HeadPlan, x: Tensor) -> Tensor:
    """x [T, C] -> logits [T, V]"""
    with fused.on(x.device):
        normed, _ = _normed(x, plan.parts.norm, plan.pdl)
        return product(plan.parts.linear, normed, pdl=plan.pdl)


def _behind(
    block: BlockParts, attended: Tensor, x: Tensor, finished: Tensor | None, pdl: bool
) -> tuple[Tensor, Tensor | None, Norm | None]:
    """x; and what is yet to be added, and normed before."""
    x, added = _added(block.o, attended, x, block.after_attention, finished, pdl)
    normed, x = _normed(x, block.before_mlp, pdl, added, block.after_attention)
    inner = product(block.up, normed, finished, activation=block.activation, gated=block.gated, pdl=pdl)
    return *_added(block.down, inner, x, block.after_mlp, finished, pdl), block.after_mlp


def _added(
    linear: Linear, inner: Tensor, x: Tensor, after: Norm | None, finished: Tensor | None, pdl: bool
) -> tuple[Tensor, Tensor | None]:
    """x + (W inner + b); or x, and what is to be normed first."""
    if after is None:
        return product(linear, inner, finished, residual=x, pdl=pdl), None
    return x, product(linear, inner, finished, pdl=pdl)


def _normed(
    x: Tensor, norm: Norm, pdl: bool, added: Tensor | None = None, after: Norm | None = None
) -> tuple[Tensor, Tensor]:
    """norm(x), and x; where something is added, after a norm of its own, of the sum."""
    x = _aligned(x)
    size = x.shape[1]
    out, complete = torch.empty_like(x), x if added is None else torch.empty_like(x)
    if x.shape[0]:
        kernels.gpu_modules().product.norm_rows[(x.shape[0],)](
            x if added is None else added,
            out,
            norm.weight,
            norm.weight if norm.bias is None else norm.bias,
            x if after is None else after.weight,
            x,
            complete,
            K=size,
            PARTS=gpu_product.in_parts(size),
            AFTER=after is not None,
            EPS=norm.eps,
            OFFSET=norm.offset,
            CENTRED=norm.centred,
            NORM_BIAS=norm.bias is not None,
            **UNFUSED,
            **gpu_product.late(pdl),
        )
    return out, complete


def _aligned(x: Tensor) -> Tensor:
    """Contiguous, and where Triton may load several numbers at once: it would add up otherwise where it may not."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x


def product(
    linear: Linear,
    x: Tensor,
    finished: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    activation: str = "",
    gated: bool = False,
    pdl: bool = False,
) -> Tensor:
    """activation(W x + b) [* (W' x + b')] [+ residual], each row of x [T, K] by itself.

    finished: counters, all zero; made here where there are none.
    """
    weight, bias = linear.weight, linear.bias
    assert isinstance(weight, Tensor)
    x = x.contiguous()
    rows, n, k = x.shape[0], weight.shape[0] // (2 if gated else 1), weight.shape[1]
    out = torch.empty(rows, n, dtype=x.dtype, device=x.device)
    split = gpu_product.splits_of(-(-n // gpu_product.BLOCK_N), k, gated)
    size = COLUMNS[x.element_size()]
    part = -(-k // (size * split)) * size
    tensors = x, weight, weight if bias is None else bias, x if residual is None else residual, out
    options = {
        "K": k,
        "SPLIT": split,
        "BIAS": bias is not None,
        "RESIDUAL": residual is not None,
        "GATED": gated,
        "ACTIVATION": activation,
        **UNFUSED,
        **gpu_product.late(pdl),
    }
    if not rows:
        return out
    if rows <= FEW:
        _few_rows(tensors, finished, rows, n, k, size, split, options)
    else:
        _many_rows(tensors, rows, n, k, part, split, options)
    return out


def _few_rows(
    tensors: Sequence[Tensor],
    finished: Tensor | None,
    rows: int,
    n: int,
    k: int,
    size: int,
    split: int,
    options: dict[str, Any],
) -> None:
    x = tensors[0]
    block, blocks = max(16, gpu_product.next_power(rows)), -(-n // gpu_product.BLOCK_N)
    sums = torch.empty(split, rows, n, dtype=torch.float32, device=x.device) if split > 1 else x
    if finished is None:
        finished = torch.zeros(blocks if split > 1 else 1, dtype=torch.int32, device=x.device)
    stages = 2 if x.element_size() == 4 else 6 if split > 1 and block <= 32 else 4
    weights = gpu_product.BLOCK_N * (2 if options["GATED"] else 1)
    stages = _stages(stages, size * (weights + block) * x.element_size(), x.device)
    kernels.gpu_modules().rows.few_rows[(blocks, 1, split)](
        *tensors,
        sums,
        finished,
        rows,
        n,
        BLOCK_B=block,
        BLOCK_N=gpu_product.BLOCK_N,
        BLOCK_K=size,
        EVEN=n % gpu_product.BLOCK_N == 0 and k % (size * split) == 0,
        STAGES=stages,
        num_warps=4,
        **options,
    )


def _many_rows(
    tensors: Sequence[Tensor], rows: int, n: int, k: int, part: int, split: int, options: dict[str, Any]
) -> None:
    """Tiles as large as registers allow: a program keeps a second one where it multiplies with gates, or in parts."""
    x = tensors[0]
    twice = options["GATED"] or split > 1
    block_n, block_b, block_k, stages, warps = 128, 128 if twice else 256, 64, 4, 8
    if x.element_size() == 4:
        block_n, block_b, block_k, stages, warps = 64, 64, 32, 2, 4
    block_k = math.gcd(block_k, part)
    if block_k == part:  # of a single round, Triton makes a bias or residual the first term of the sum: other bits
        block_k //= 2
    loaded = block_n * (2 if options["GATED"] else 1) + block_b
    kernels.gpu_modules().exact.many_rows[(-(-n // block_n) * -(-rows // block_b),)](
        *tensors,
        rows,
        n,
        PART=part,
        BLOCK_B=block_b,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        BESIDE=8,
        EVEN=n % block_n == 0 and k == part * split,
        STAGES=_stages(stages, block_k * loaded * x.element_size(), x.device),
        num_warps=warps,
        **options,
    )


def _stages(most: int, size: int, device: torch.device, kept: int = 4096) -> int:
    """Blocks that are on their way at once: as many of this size as a program's memory holds beside what it keeps."""
    return max(1, min(most, (gpu_product.shared_memory(device) - kept) // size))


def _attention_stages(rows: int, shape: dict[str, int], q: Tensor) -> int:
    size = q.element_size()
    kept = rows * (shape["BLOCK_D"] + shape["BLOCK"]) * size + 8192  # queries, and their weights
    return _stages(2, 2 * shape["BLOCK"] * shape["BLOCK_D"] * size, q.device, kept)


def _prepare(
    block: BlockParts,
    qkv: Tensor,
    positions: Tensor,
    turned: Tensor | None,
    pdl: bool,
    table: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """q [T, Hq, D], k and v [T, Hkv, D]; with a table, k and v are where it says instead."""
    count, size, norm = qkv.shape[0], block.head_dim, block.q_norm
    q = torch.empty(count, block.heads, size, dtype=qkv.dtype, device=qkv.device)
    k, v = q, q
    if table is None:
        k, v = (torch.empty(count, block.kv_heads, size, dtype=qkv.dtype, device=qkv.device) for _ in range(2))
    if count:
        kernels.gpu_modules().exact.prepare_heads[(count, -(-(block.heads + 2 * block.kv_heads) // HEADS))](
            qkv,
            torch.empty(1, dtype=torch.int64, device=qkv.device) if table is None else table,
            positions,
            qkv if block.q_norm is None else block.q_norm.weight,
            qkv if block.k_norm is None else block.k_norm.weight,
            qkv if turned is None else turned,
            0 if table is None else 1,
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            HEADS=block.heads,
            KV_HEADS=block.kv_heads,
            D=size,
            BLOCK_D=gpu_product.next_power(size),
            BLOCK_H=HEADS,
            NORM=norm is not None,
            EPS=0.0 if norm is None else norm.eps,
            OFFSET=0.0 if norm is None else norm.offset,
            ROPE=turned is not None,
            num_warps=2,
            **UNFUSED,
            **gpu_product.late(pdl),
        )
    return q, k, v


def can_attend(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether there is a kernel for such tensors. With a gradient to be recorded there is none."""
    return (
        all(each.is_cuda and each.dtype is q.dtype and each.stride(3) == 1 for each in (q, k, v))
        and q.dtype in fused.DTYPES
        and fused.available(q.device, {})
    )


def attend(q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None, end: int) -> Tensor:
    """q [B, Hq, n, D] at the n positions before `end`, as k and v [B, Hkv, S, D] are at the S before -> [B, Hq, n, D].

    Keys that no query sees may be left out.
    """
    batch, heads, n, size = q.shape
    out = torch.empty(batch, n, heads, size, dtype=q.dtype, device=q.device)
    strides = [stride for each in (q, k, v) for stride in each.stride()[:3]]
    pdl = fused.has_pdl(q.device)
    kv_heads = k.shape[1]
    shape = _shape(heads, kv_heads, size, q.dtype, q.device)
    group, bytes_ = gpu_product.next_power(heads // kv_heads), q.element_size()
    with fused.on(q.device):
        if n == 1:
            pieces = _pieces(batch, kv_heads, shape, group, q.device)
            finished = torch.zeros(batch * kv_heads, dtype=torch.int32, device=q.device)
            kernels.gpu_modules().exact.attend_one[(_programs(batch * kv_heads), kv_heads, batch)](
                q,
                k,
                v,
                out,
                pieces,
                finished,
                finished,
                finished,
                end,
                k.shape[2],
                _scale(scale),
                window or 0,
                *strides[:2],
                *strides[3:],
                TABLE=False,
                **_options_of_one(shape, group, q),
                **gpu_product.late(pdl),
            )
        elif out.numel():
            most = QUERIES[bytes_] // (2 if shape["BLOCK_D"] > 128 and bytes_ == 2 else 1)  # by their registers
            queries = max(1, min(most // group, shape["BLOCK"] * GROUPS))  # so that all fold as many blocks
            kernels.gpu_modules().exact.attend_many[(-(-n // queries) + 1, kv_heads, batch)](
                q,
                k,
                v,
                out,
                n,
                end,
                k.shape[2],
                _scale(scale),
                window or 0,
                *strides,
                BLOCK_G=group,
                QUERIES=queries,
                SINGLE=_blocks(end, window, shape["BLOCK"]) <= GROUPS,
                STAGES=_attention_stages(queries * group, shape, q),
                num_warps=4 if bytes_ == 4 else 8,
                **shape,
                **UNFUSED,
                **gpu_product.late(pdl),
            )
    return out.transpose(1, 2)


def _blocks(end: int, window: int | None, block: int) -> int:
    """Of keys that the last query sees, at most."""
    blocks = -(-end // block)
    return blocks if window is None else min(blocks, -(-window // block) + 1)


def _attend_table(
    block: BlockParts, q: Tensor, table: Tensor, positions: Tensor, finished: Tensor, pdl: bool
) -> Tensor:
    """q [B, Hq, D] of one token a row, whose own key and value are where the table says too -> [B, Hq D]"""
    batch, heads, size = q.shape
    out = torch.empty(batch, heads * size, dtype=q.dtype, device=q.device)
    shape = _shape(heads, block.kv_heads, size, q.dtype, q.device)
    group = gpu_product.next_power(heads // block.kv_heads)
    pieces = _pieces(batch, block.kv_heads, shape, group, q.device)
    kernels.gpu_modules().exact.attend_one[(_programs(batch * block.kv_heads), block.kv_heads, batch)](
        q,
        q,
        q,
        out,
        pieces,
        finished,
        table,
        positions,
        0,
        0,
        _scale(block.scale),
        block.window or 0,
        *q.stride()[:2],
        *(0,) * 6,
        TABLE=True,
        **_options_of_one(shape, group, q),
        **gpu_product.late(pdl),
    )
    return out


def _scale(scale: float) -> float:
    """For powers of two."""
    return scale * math.log2(math.e)


def _shape(heads: int, kv_heads: int, size: int, dtype: torch.dtype, device: torch.device) -> dict[str, int]:
    """What decides in which order keys are added up: the same for one query and many."""
    width = max(16, gpu_product.next_power(size))
    block = BLOCK[dtype.itemsize]
    if width > 128 and gpu_product.shared_memory(device) < 2**17:
        block //= 2
    return {
        "KV_HEADS": kv_heads,
        "GROUP": heads // kv_heads,
        "D": size,
        "BLOCK_D": width,
        "BLOCK": block,
        "GROUPS": GROUPS,
        "ONES": 16,
    }


def _options_of_one(shape: dict[str, int], group: int, q: Tensor) -> dict[str, Any]:
    rows = max(group, 16 if q.element_size() == 4 else 64)  # that the matrix units of a GPU take
    return {
        **shape,
        "BLOCK_G": rows,
        "MERGE_G": group,
        "ALIGNED": alignment(shape["D"], q.dtype),
        "STAGES": _attention_stages(rows, shape, q),
        "num_warps": 4,
        **UNFUSED,
    }


def _pieces(batch: int, kv_heads: int, shape: dict[str, int], group: int, device: torch.device) -> Tensor:
    return torch.empty(
        batch, kv_heads, shape["GROUPS"] + 1, group, shape["BLOCK_D"] + 2, dtype=torch.float32, device=device
    )


def _programs(heads: int) -> int:
    """That share the keys of one of so many KV heads, of all rows."""
    return max(1, min(GROUPS + 1, BUSY // heads))
