"""Root-mean-square norm."""

from __future__ import annotations

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
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)
