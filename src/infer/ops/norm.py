"""Root-mean-square norm."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infer.ops.module import Module

ZERO = torch.zeros(1, dtype=torch.float32, device="cpu")


class RMSNorm(Module):
    """Scales each vector to unit root mean square, in float32 whatever the model's dtype."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.size = size
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if x.numel() == self.size and x.dtype is torch.float32 and x.is_cpu and not x.requires_grad:
            return rms_norm_row(x, self.weight, self.eps)
        return rms_norm(x, self.weight, self.eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """[..., C] in any dtype, on any device."""
    return F.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)


def rms_norm_row(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """A single float32 vector on the CPU, in two operators instead of nine."""
    flat = x.view(-1)
    mean_square = flat.dot(flat).item() / flat.shape[0]
    return torch.addcmul(ZERO, x, weight, value=1 / math.sqrt(mean_square + eps))
