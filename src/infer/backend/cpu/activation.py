"""The activations of an MLP, a row at a time."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from infer.backend.cpu.jit import inline
from infer.backend.cpu.simd import add, divide, exp, fma, lane, load_f32, load_f32x16, multiply, splat_x16, store
from infer.nn.activation import CLAMP

SILU, GELU_TANH, GELU, CLAMPED_SWIGLU = range(4)
LIMIT = np.float32(CLAMP)


@inline(forceinline=True)
def _activated(gate: Any, kind: int) -> Any:
    """x sigmoid(y): y is x for SiLU, and 2 y' for the tanh form of GELU."""
    y = gate
    if kind == GELU_TANH:
        square = multiply(gate, gate)
        y = multiply(multiply(gate, splat_x16(1.5957691216057308)), fma(square, splat_x16(0.044715), splat_x16(1.0)))
    elif kind == CLAMPED_SWIGLU:
        y = multiply(gate, splat_x16(1.702))
    return divide(gate, add(splat_x16(1.0), exp(multiply(y, splat_x16(-1.0)))))


@inline
def activate_row(up: int, width: int, size: int, kind: int, out: int) -> None:
    """out [size] = activation(up), or activation(gate) * up, if `up` holds both."""
    full, gate = size // 16 * 16, up
    if kind == CLAMPED_SWIGLU:
        gate = out
        for i in range(size):
            x = load_f32(up + i * 4)
            store(out + i * 4, LIMIT if x > LIMIT else x)  # NaN stays
    if kind == GELU:
        for i in range(size):
            x = load_f32(up + i * 4)
            store(out + i * 4, np.float32(0.5) * x * np.float32(1 + math.erf(x * 0.7071067811865476)))
    else:
        for i in range(0, full, 16):
            store(out + i * 4, _activated(load_f32x16(gate + i * 4), kind))
        for i in range(full, size):
            store(out + i * 4, lane(_activated(splat_x16(load_f32(gate + i * 4)), kind), 0))
    if width > size:
        for i in range(size):
            x = load_f32(up + (size + i) * 4)
            if kind == CLAMPED_SWIGLU:
                x = (LIMIT if x > LIMIT else -LIMIT if x < -LIMIT else x) + np.float32(1)
            store(out + i * 4, load_f32(out + i * 4) * x)
