"""GGUF's quantised blocks as groups of 32 weights, taken over as they are.

Types of 4 bits become int4, those of 5 and 8 bits int8. For the rest, whose groups are not ours (Q6_K has groups of 16,
Q5_1 a minimum), there is only the way over floats.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from infer.nn.quantized import Groups, nibbles

Bytes = np.ndarray[tuple[int, int], np.dtype[np.uint8]]


def _blocks(raw: Bytes, size: int) -> Tensor:
    """[rows, row bytes] -> [rows, blocks, size]"""
    return torch.from_numpy(raw).view(len(raw), -1, size)


def _half(blocks: Tensor, at: int) -> Tensor:
    return blocks[..., at : at + 2].contiguous().view(torch.float16)[..., 0]


def _q4_0(raw: Bytes) -> Groups:
    blocks = _blocks(raw, 18)
    scale = _half(blocks, 0)
    return Groups(blocks[..., 2:], scale, scale * -8)


def _q4_1(raw: Bytes) -> Groups:
    blocks = _blocks(raw, 20)
    return Groups(blocks[..., 4:], _half(blocks, 0), _half(blocks, 2))


def _q4_k(raw: Bytes) -> Groups:
    """Eight groups to a block, their scales and minima being 6-bit multiples of the block's own."""
    blocks = _blocks(raw, 144)
    packed = blocks[..., 4:16].reshape(*blocks.shape[:2], 3, 4)
    low, high, rest = packed.unbind(-2)
    scales = torch.cat((low & 63, (rest & 15) | (low >> 6) << 4), -1)
    minima = torch.cat((high & 63, (rest >> 4) | (high >> 6) << 4), -1)
    codes = blocks[..., 16:].reshape(
        *blocks.shape[:2], 4, 32
    )  # two groups to 32 bytes, one in the low halves, one in the high
    codes = torch.stack((codes & 15, codes >> 4), -2).flatten(1, 3)  # [rows, groups, 32]
    scale = _half(blocks, 0).float()[..., None] * scales
    minimum = _half(blocks, 2).float()[..., None] * minima
    return Groups(nibbles(codes), scale.flatten(1).half(), -minimum.flatten(1).half())


def _q5_0(raw: Bytes) -> Groups:
    """Four bits of each code as in Q4_0, the fifth bits in 32 of their own."""
    blocks = _blocks(raw, 22)
    fifth = blocks[..., 2:6, None] >> torch.arange(8, dtype=torch.uint8) & 1
    codes = torch.cat((blocks[..., 6:] & 15, blocks[..., 6:] >> 4), -1) | fifth.flatten(-2) << 4
    return Groups(codes.to(torch.int8) - 16, _half(blocks, 0), None)


def _q8_0(raw: Bytes) -> Groups:
    blocks = _blocks(raw, 34)
    return Groups(blocks[..., 2:].contiguous().view(torch.int8), _half(blocks, 0), None)


# By name of the type: the bits that they are kept in, and how.
TYPES: dict[str, tuple[int, Callable[[Bytes], Groups]]] = {
    "Q4_0": (4, _q4_0),
    "Q4_1": (4, _q4_1),
    "Q4_K": (4, _q4_k),
    "Q5_0": (8, _q5_0),
    "Q8_0": (8, _q8_0),
}
FLOATS = ("F64", "F32", "F16", "BF16")
# Types of more bits than four, which a model in 4 bits keeps in eight.
FINER = ("Q5_0", "Q5_1", "Q5_K", "Q6_K", "Q8_0", "Q8_K")
