"""Vectors in 8 bits: D values, then their float16 scales, one per group of values.

A value is its byte times its scale. That product is exact in float32 (7 bits times 11), so every way to compute it
gives the same bits. Groups are small because keys have outliers: a large value costs precision only in its group.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from infer.config import INT8_GROUP as GROUP

SCALE_BYTES = 2
_STEPS = 127
_LARGEST = torch.finfo(torch.float16).max
_SMALLEST = 2.0**-24  # of float16 above 0


def width(head_dim: int, dtype: torch.dtype) -> int:
    """Elements that a cache of this dtype stores per vector."""
    if dtype is not torch.int8:
        return head_dim
    if head_dim % SCALE_BYTES:
        raise ValueError(f"an int8 cache needs an even head_dim, not {head_dim}: scales need even addresses")
    return head_dim + SCALE_BYTES * _count(head_dim, GROUP)


def values_in(width: int) -> int:
    """The head_dim of an int8 cache of this width."""
    return width - SCALE_BYTES * _count(width, GROUP + SCALE_BYTES)


def encode(x: Tensor) -> Tensor:
    """x [..., D] -> int8 [..., width]. The error is at most half a step: 1/254 of the group's largest value.

    Scales are rounded up, so that no value exceeds 127 steps; values beyond the largest float16 scale saturate.
    A NaN or an infinity makes all values of its group NaN, so that the error stays visible.
    """
    head_dim = x.shape[-1]
    size = min(GROUP, head_dim)
    count = _count(head_dim, size)
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    x = F.pad(x, (0, count * size - head_dim)).reshape(*x.shape[:-1], count, size).contiguous()
    largest = x.abs().amax(-1, keepdim=True)
    step = (largest / _STEPS).clamp(max=_LARGEST).masked_fill(largest.isinf(), torch.nan)
    nearest = step.half()
    scale = (nearest.view(torch.int16) + (nearest < step)).view(torch.float16)  # the next float16 has the next bits
    values = (x / scale.clamp(min=_SMALLEST)).round().clamp(-_STEPS, _STEPS).nan_to_num(0.0)
    values = values.to(torch.int8).flatten(-2)[..., :head_dim]
    return torch.cat((values, scale.view(torch.int8).flatten(-2)), -1)


def decode(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """int8 [..., width] -> [..., D]"""
    head_dim = values_in(stored.shape[-1])
    values = stored[..., :head_dim]
    scale = stored[..., head_dim:].view(torch.float16).to(torch.promote_types(dtype, torch.float32))
    count = scale.shape[-1]
    if count > 1 and head_dim % GROUP:
        x = values * scale.repeat_interleave(GROUP, -1)[..., :head_dim]
    else:
        x = (values.view(*values.shape[:-1], count, head_dim // count) * scale.unsqueeze(-1)).flatten(-2)
    if dtype is torch.float16:
        x = x.clamp(-_LARGEST, _LARGEST)  # the scale was rounded up: 127 steps may exceed float16
    return x.to(dtype)


def _count(total: int, size: int) -> int:
    return -(-total // size)
