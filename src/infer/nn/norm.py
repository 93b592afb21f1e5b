"""RMSNorm and LayerNorm."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infer.nn.module import Module


class RMSNorm(Module):
    """Scales each vector to unit root mean square, in float32 for any dtype of the model."""

    offset = 0.0  # added to the weight
    bias = None
    centered = False  # whether the mean is subtracted

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), 1.0 - self.offset))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda and x.dtype is self.weight.dtype and not self.offset:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)  # in float32 within a single kernel
        weight = self.weight.float()
        if self.offset:
            weight = weight + self.offset
        return F.rms_norm(x.float(), weight.shape, weight, self.eps).to(x.dtype)


class ZeroCenteredRMSNorm(RMSNorm):
    """Stores the weight minus 1, which keeps more digits in 16 bits."""

    offset = 1.0


class LayerNorm(Module):
    """Subtracts the mean of each vector and scales it to unit variance."""

    offset = 0.0
    bias: Tensor | None
    centered = True

    def __init__(self, size: int, eps: float, *, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.register_parameter("bias", nn.Parameter(torch.zeros(size)) if bias else None)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


Norm = RMSNorm | LayerNorm
