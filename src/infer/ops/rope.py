"""Rotary position embedding, in the rotate-half layout.

Dimension i of a head is paired with dimension i + D/2, and each pair is turned by the angle
`position * inv_freq[i]`. A dot product of two turned vectors then depends on their distance alone.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from infer.config import RopeConfig
from infer.ops import exact, prompt


class Rope:
    """cos and sin tables for any positions, in float32: bf16 cannot tell position 1000 from 1001."""

    def __init__(self, config: RopeConfig, head_dim: int) -> None:
        inv_freq = inverse_frequencies(config, head_dim)
        self.inv_freq = torch.cat((inv_freq, inv_freq))  # [D]
        self.sign = torch.cat((-torch.ones_like(inv_freq), torch.ones_like(inv_freq)))

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [B, n] -> cos, sin [B, 1, n, D]; sin carries the sign of rotate-half."""
        if self.inv_freq.device != positions.device:
            self.inv_freq, self.sign = self.inv_freq.to(positions.device), self.sign.to(positions.device)
        angles = positions[:, None, :, None] * self.inv_freq  # [B, 1, n, D], in float32
        if exact.wanted() and angles.is_cpu:
            rows = angles.reshape(-1, angles.shape[-1])
            cos, sin = (exact.by_rows(function, rows).view(angles.shape) for function in (torch.cos, torch.sin))
            return cos, sin.mul_(self.sign)
        return angles.cos(), angles.sin().mul_(self.sign)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn x [B, H, n, D]: (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin)."""
    if prompt.can_rotate(x, cos, sin):
        return prompt.rotate(x, cos, sin)
    swapped = x.roll(x.shape[-1] // 2, dims=-1)  # (x2, x1)
    if exact.wanted():  # as kernels do it: whether addcmul rounds the product first depends on where an element lies
        return (x * cos + swapped * sin).to(x.dtype)
    turned = torch.addcmul(x * cos, swapped, sin)  # in float32
    return turned if turned.dtype is x.dtype else turned.to(x.dtype)


def inverse_frequencies(config: RopeConfig, head_dim: int) -> Tensor:
    """[D/2], float32, on the CPU also while a model is being built on the meta device."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    inv_freq = 1.0 / config.theta**exponents
    if config.scaling == "linear":
        inv_freq = inv_freq / config.factor
    elif config.scaling == "llama3":
        inv_freq = _llama3(inv_freq, config)
    if config.divisors:
        if len(config.divisors) != len(inv_freq):
            raise ValueError(f"{len(config.divisors)} RoPE divisors for {len(inv_freq)} frequencies")
        inv_freq = inv_freq / torch.tensor(config.divisors, dtype=torch.float32, device="cpu")
    return inv_freq


def _llama3(inv_freq: Tensor, config: RopeConfig) -> Tensor:
    """Keep high frequencies, divide low ones by `factor`, and blend between, as Llama 3.1 and later were trained."""
    wavelength = 2 * math.pi / inv_freq
    original, low, high = (
        config.original_max_position_embeddings,
        config.low_freq_factor,
        config.high_freq_factor,
    )
    keep = ((original / wavelength - low) / (high - low)).clamp(0, 1)  # 1: as is, 0: divided
    return keep * inv_freq + (1 - keep) * inv_freq / config.factor
