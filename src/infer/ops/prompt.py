"""What stands between the products and the attention of a prompt on a GPU, in one pass over memory each.

The references are `ops/activation.py` and `ops/rope.py`, which ask here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from infer import kernels
from infer.ops import fused, gpu_product

GATED = 2048  # columns of a program that multiplies with gates


def can_gate(x: Tensor) -> bool:
    return (
        x.is_cuda and x.dtype in fused.DTYPES and x.dim() == 2 and x.is_contiguous() and fused.available(x.device, {})
    )


def gate(x: Tensor, activation: str) -> Tensor:
    """activation(first half of x) * second half: [T, 2 I] -> [T, I]."""
    rows, inner = x.shape[0], x.shape[1] // 2
    out = torch.empty(rows, inner, dtype=x.dtype, device=x.device)
    grid = rows, -(-inner // GATED)
    if rows:
        with fused.on(x.device):
            kernels.gpu_modules().prompt.gate_rows[grid](x, out, inner, BLOCK=GATED, ACTIVATION=activation)
    return out


def can_rotate(x: Tensor, cos: Tensor, sin: Tensor) -> bool:
    return (
        x.is_cuda
        and x.dtype in fused.DTYPES
        and x.stride(3) == 1
        and not any(stride % x.shape[3] for stride in x.stride()[:3])
        and all(
            each.shape == (x.shape[0], 1, *x.shape[2:]) and each.is_contiguous() and each.dtype is torch.float32
            for each in (cos, sin)
        )
        and fused.available(x.device, {})
    )


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`apply_rope`: x [B, H, n, D] by cos and sin [B, 1, n, D]."""
    batch, heads, n, head_dim = x.shape
    out = torch.empty(batch, n, heads, head_dim, dtype=x.dtype, device=x.device)
    blocks = {"BLOCK_H": gpu_product.next_power(heads), "BLOCK_D": gpu_product.next_power(head_dim)}
    if out.numel():
        with fused.on(x.device):
            kernels.gpu_modules().prompt.turn_heads[(batch * n,)](
                x, cos, sin, out, n, *(step // head_dim for step in x.stride()[:3]), H=heads, D=head_dim, **blocks
            )
    return out.transpose(1, 2)
