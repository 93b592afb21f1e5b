"""The activations of an MLP, by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


def activated(x: Tensor, activation: str) -> Tensor:
    """activation(x [T, I])"""
    return ACTIVATIONS[activation](x)


def gated(x: Tensor, activation: str) -> Tensor:
    """x [T, 2 I], gate before up -> activation(gate) * up [T, I]"""
    gate, up = x.chunk(2, -1)
    return ACTIVATIONS[activation](gate) * up
