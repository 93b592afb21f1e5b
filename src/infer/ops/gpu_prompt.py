"""A prompt on a GPU, block by block: the same arithmetic as a decode step's, in kernels for many rows.

    norm | q, k, v | heads | attention | output | residual, norm | gate, up | activation | down | residual

`ops/fused.py` runs decode steps; what both share is in `ops/gpu_product.py` and `ops/gpu_attention.py`.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from infer.ops import fused, gpu_attention
from infer.ops.gpu_product import Normed, normed_rows, product
from infer.ops.parts import BlockParts, HeadParts


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


def turns(frequencies: Tensor, positions: Tensor) -> Tensor:
    """Cosines and signed sines [T, 2, D] of RoPE at these positions [T], int32."""
    with fused.on(positions.device):
        return fused.turns(frequencies.to(positions.device), positions)


def before_attention(
    plan: BlockPlan, x: Tensor, positions: Tensor, turned: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """q [T, Hq, D], k and v [T, Hkv, D] of tokens x [T, C] at these positions [T], int32. turned: from `turns`."""
    block, pdl = plan
    with fused.on(x.device):
        normed, _ = normed_rows(x, block.before_attention, pdl=pdl)
        qkv, _ = product(block.qkv, normed, None, eps=block.before_attention.eps, pdl=pdl)
        return gpu_attention.prepare(block, qkv, positions, turned, pdl=pdl)


def behind_attention(plan: BlockPlan, attended: Tensor, x: Tensor) -> Tensor:
    """What a block makes of x [T, C] and what was attended to [T, Hq D]."""
    block, pdl = plan
    with fused.on(x.device):
        added, _ = product(block.o, Normed(attended), None, pdl=pdl)
        normed, x = normed_rows(x, block.before_mlp, added, block.after_attention, pdl=pdl)
        inner, _ = product(
            block.up,
            normed,
            None,
            eps=block.before_mlp.eps,
            activation=block.activation,
            gated=block.gated,
            pdl=pdl,
        )
        added, _ = product(block.down, Normed(inner), None, pdl=pdl)
        return normed_rows(x, None, added, block.after_mlp, pdl=pdl)[1]


def head(plan: HeadPlan, x: Tensor) -> Tensor:
    """x [T, C] -> logits [T, V]"""
    with fused.on(x.device):
        normed, _ = normed_rows(x, plan.parts.norm, pdl=plan.pdl)
        return product(plan.parts.linear, normed, None, eps=plan.parts.norm.eps, pdl=plan.pdl)[0]


def can_attend(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether there is a kernel for such tensors. With a gradient to be recorded there is none."""
    return (
        all(each.is_cuda and each.dtype is q.dtype and each.stride(3) == 1 for each in (q, k, v))
        and q.dtype in fused.DTYPES
        and fused.available(q.device, {})
    )


def attend(q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None, end: int) -> Tensor:
    """`gpu_attention.attend`, on the device of q."""
    with fused.on(q.device):
        return gpu_attention.attend(q, k, v, scale=scale, window=window, end=end, pdl=fused.has_pdl(q.device))
