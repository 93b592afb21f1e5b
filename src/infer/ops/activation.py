"""What an MLP bends its input with, by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor

from infer.ops import fused

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


def gated(x: Tensor, activation: str) -> Tensor:
    """activation(gate) * up, where x [T, 2 I] holds the gates, then what they are multiplied with."""
    if fused.can_gate(x):
        return fused.gate(x, activation)
    gate, up = x.chunk(2, -1)
    return ACTIVATIONS[activation](gate) * up
