"""What an MLP bends its input with, by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor

from infer.ops import exact, prompt
from infer.ops.parts import ACTIVATION_CODES

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


def activated(x: Tensor, activation: str) -> Tensor:
    """activation(x [T, I])"""
    bend = ACTIVATIONS[activation]
    if exact.wanted() and x.is_cpu:
        return exact.activate(x, x.shape[1], ACTIVATION_CODES[activation], bend)
    return bend(x)


def gated(x: Tensor, activation: str) -> Tensor:
    """activation(gate) * up, where x [T, 2 I] holds the gates, then what they are multiplied with."""
    if prompt.can_gate(x):
        return prompt.gate(x, activation)
    if exact.wanted() and x.is_cpu:
        return exact.activate(x, x.shape[1] // 2, ACTIVATION_CODES[activation], ACTIVATIONS[activation])
    gate, up = x.chunk(2, -1)
    return ACTIVATIONS[activation](gate) * up
