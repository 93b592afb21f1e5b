"""Modules as the CPU's kernels take them: addresses, sizes and constants."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from infer.backend.cpu import kernels
from infer.backend.parts import BlockParts
from infer.nn.linear import Linear
from infer.nn.norm import Norm
from infer.nn.quantized import QuantizedWeight

Record = np.ndarray[Any, Any]

WEIGHT_KINDS = {torch.float32: 32, torch.bfloat16: 16, torch.float16: 116}  # as product.py names them
ACTIVATION_CODES = {"silu": 0, "gelu_tanh": 1, "gelu": 2}


def readable(weight: Tensor) -> bool:
    """Whether the kernels can read such a weight: in float32, packed, or a matrix of 16 bits."""
    return weight.is_cpu and (
        weight.dtype in (torch.float32, torch.uint8) or (weight.dtype in WEIGHT_KINDS and weight.dim() == 2)
    )


def block_record(parts: BlockParts) -> Record:
    made = np.zeros(1, kernels().BLOCK)
    for name, part in parts._asdict().items():
        if isinstance(part, Linear):
            made[name] = weight_record(part.weight, part.bias)
        elif isinstance(part, Norm):
            made[name] = norm_record(part)
    made["heads"], made["kv_heads"], made["head_dim"] = parts.heads, parts.kv_heads, parts.head_dim
    made["attend"] = kernels().attention.attend.address
    made["scale"], made["window"] = parts.scale, parts.window or 0
    made["activation"], made["inner"] = ACTIVATION_CODES[parts.activation], parts.down.in_features
    return made


def head_record(norm: Norm | None, linear: Linear | None) -> Record:
    made = np.zeros(1, kernels().HEAD)
    if linear is not None:
        made["weight"] = weight_record(linear.weight, linear.bias)
    if norm is not None:
        made["norm"] = norm_record(norm)
    return made


def weight_record(weight: Tensor | QuantizedWeight, bias: Tensor | None) -> tuple[int, ...]:
    """The kernel that multiplies with it is compiled, if it has not been before."""
    if isinstance(weight, QuantizedWeight):
        kind, at = weight.bits, weight.packed
    else:
        kind, at = WEIGHT_KINDS[weight.dtype], weight
    return kernels().product_of(kind).address, kind, at.data_ptr(), _address(bias), *weight.shape


def norm_record(norm: Norm) -> tuple[int, int, float, float, bool]:
    return norm.weight.data_ptr(), _address(norm.bias), norm.eps, norm.offset, norm.centred


def _address(bias: Tensor | None) -> int:
    return 0 if bias is None else bias.data_ptr()
