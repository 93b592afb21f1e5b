"""Hugging Face's tensors with the weights of all experts, in the order of `ExpertLinear`.

- [E, R, C], and biases [E, R]: R output rows of each expert, gate before up
- gpt-oss: [E, C, R], transposed; gate and up are alternate rows
- MXFP4: blocks [E, R, G, 16], two codes of 4 bits per byte, in groups of 32 columns; scales [E, R, G], powers of two
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from infer.nn.schemes import SCHEMES

BLOCKS, SCALES = "_blocks", "_scales"  # the ends of the names of the two tensors of an MXFP4 weight
_STACKED = re.compile(r".*\.experts\.(gate_up|down)_proj\.(weight|bias)")
MXFP4 = SCHEMES["MXFP4"]


def is_stacked(name: str) -> bool:
    """name: in `Decoder`."""
    return _STACKED.fullmatch(name) is not None


def stacked_shape(shape: Sequence[int], stored: str, model_type: str) -> tuple[int, ...]:
    """In `Decoder`, of a tensor of this shape in the file."""
    if stored.endswith(BLOCKS):
        return math.prod(shape[:2]), math.prod(shape[2:]) * 2
    if len(shape) != 3:
        return (math.prod(shape),)
    experts, rows, columns = shape
    return (experts * columns, rows) if model_type == "gpt_oss" else (experts * rows, columns)


def read_stacked(
    weights: Any, scales: Any, stored: str, model_type: str, rows: range, count: int, *, as_blocks: bool = False
) -> Iterator[Tensor]:
    """Rows of one expert after the other. weights, scales: slices of a file; scales: of MXFP4, or None.

    rows: in `Decoder`, of `count`. as_blocks: of MXFP4, as blocks of that scheme.
    """
    if scales is not None and scales.get_shape() != weights.get_shape()[:-1]:
        raise ValueError(f"{stored} has no scale for each of its groups of codes")
    size = count // weights.get_shape()[0]
    alternate = model_type == "gpt_oss" and "gate_up_proj" in stored
    transposed = model_type == "gpt_oss" and scales is None and len(weights.get_shape()) == 3
    for i in range(rows.start // size, -(-rows.stop // size)):
        own = range(size)[max(0, rows.start - i * size) : rows.stop - i * size]
        order = torch.arange(size).view(-1, 2).T.flatten()[own.start : own.stop] if alternate else None
        if order is not None:
            own = range(int(order.min()), int(order.max()) + 1)
        one, read = slice(i, i + 1), slice(own.start, own.stop)
        found = weights[one, :, read][0].T if transposed else weights[one, read][0]
        if scales is not None:
            codes = torch.stack((found & 15, found >> 4), -1).flatten(2)  # [R, G, 32]
            blocks = MXFP4.pack(codes, scale=scales[one, read][0])
            found = blocks if as_blocks else MXFP4.floats(blocks)
        yield found if order is None else found[order - own.start]
