"""The activations of an MLP, by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

CLAMPED_SWIGLU = "clamped_swiglu"  # of gpt-oss: gate sigmoid(1.702 gate) (up + 1), of clamped values
CLAMP = 7.0


def _clamped_swish(gate: Tensor) -> Tensor:
    gate = gate.clamp(max=CLAMP)
    return gate * torch.sigmoid(1.702 * gate)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    CLAMPED_SWIGLU: _clamped_swish,
}


def activated(x: Tensor, activation: str) -> Tensor:
    """activation(x [T, I])"""
    return ACTIVATIONS[activation](x)


def gated(x: Tensor, activation: str) -> Tensor:
    """x [T, 2 I], gate before up -> activation(gate) * up [T, I]"""
    gate, up = x.chunk(2, -1)
    if activation == CLAMPED_SWIGLU:
        up = up.clamp(-CLAMP, CLAMP) + 1
    return ACTIVATIONS[activation](gate) * up
