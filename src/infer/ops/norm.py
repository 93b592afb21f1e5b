"""Root-mean-square norm."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infer.ops.module import Module


class RMSNorm(Module):
    """Scales each vector to unit root mean square, in float32 whatever the model's dtype."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        one_row = x.numel() == x.shape[-1]
        if one_row and x.dtype == torch.float32 and x.device.type == "cpu" and not torch.is_grad_enabled():
            return rms_norm_row(x, self.weight, self.eps)
        return rms_norm(x, self.weight, self.eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)


def rms_norm_row(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The same for a single vector on the CPU, in two operators instead of nine."""
    flat = x.view(-1)
    mean_square = flat.dot(flat).item() / flat.shape[0]
    return torch.mul(x, weight).mul_(1 / math.sqrt(mean_square + eps))
