"""The activations of an MLP, by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

CLAMPED_SWIGLU = "clamped_swiglu"  # of gpt-oss: gate sigmoid(1.702 gate) (up + 1), after clamping both
CLAMP = 7.0
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    CLAMPED_SWIGLU: lambda gate: gate * torch.sigmoid(1.702 * gate),
}


def activated(x: Tensor, activation: str) -> Tensor:
    """activation(x [T, I])"""
    return ACTIVATIONS[activation](x)


def gated(x: Tensor, activation: str) -> Tensor:
    """x [T, 2 I], gate before up -> activation(gate) * up [T, I]"""
    gate, up = x.chunk(2, -1)
    if activation == CLAMPED_SWIGLU:
        gate, up = gate.clamp(max=CLAMP), up.clamp(-CLAMP, CLAMP) + 1
    return ACTIVATIONS[activation](gate) * up
