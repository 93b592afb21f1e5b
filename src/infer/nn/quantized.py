"""Weights in 4 or 8 bits: how they are rounded, how they lie in memory, and the products with them.

Each row is cut into groups of 32 columns, and each group has its own scale:

    int8: w = scale * code, codes -127..127
    int4: w = scale * code + minimum, codes 0..15

Scales and minima are float16, as GGUF files have them, so that Q8_0, Q5_0, Q4_0 and Q4_1 fit in without loss.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from infer.machine import byte_lanes
from infer.nn.module import Module

GROUP, TILE = 32, byte_lanes()  # columns and rows that lie together: see backend/cpu/product_codes.py
BITS = {"int4": 4, "int8": 8}
AT_ONCE = 1 << 24  # weights turned back into floats at a time


class Groups(NamedTuple):
    """Rows of a weight, rounded."""

    codes: Tensor  # int8 [N, G, 32]; of 4 bits uint8 [N, G, 16], column i in the low half of byte i, i + 16 in the high
    scale: Tensor  # float16 [N, G]
    minimum: Tensor | None  # float16 [N, G], of 4 bits alone


def quantise(weights: Tensor, bits: int) -> Groups:
    """Round rows of weights [N, K] to the nearest codes."""
    if weights.dim() != 2 or 0 in weights.shape:
        raise ValueError(f"only a matrix of weights can be quantised, not one of shape {list(weights.shape)}")
    # The last group is filled up with its last column, which widens no range.
    padding = -weights.shape[1] % GROUP
    weights = F.pad(weights.float()[None], (0, padding), "replicate")[0].reshape(len(weights), -1, GROUP)
    low, high = weights.amin(2), weights.amax(2)
    if not (low.isfinite().all() and high.isfinite().all() and low.min() > -65504 and high.max() < 65504):
        raise ValueError("weights that are not finite, or beyond 65,504, cannot be quantised")
    return _int8(weights, low, high) if bits == 8 else _int4(weights, low, high)


def _int8(weights: Tensor, low: Tensor, high: Tensor) -> Groups:
    scale = (torch.maximum(high, -low) / 127).half()
    codes = (weights * _inverse(scale)[..., None]).round_().clamp_(-127, 127)
    return Groups(codes.to(torch.int8), scale, None)


def _int4(weights: Tensor, low: Tensor, high: Tensor) -> Groups:
    """From the lowest weight to the highest in 15 steps, then the best line through the codes that this gives."""
    scale, minimum = (high - low) / 15, low
    codes = ((weights - minimum[..., None]) * _inverse(scale)[..., None]).round_().clamp_(0, 15)
    spread = codes - codes.mean(2, keepdim=True)
    variance = spread.square().sum(2)
    fitted = (spread * weights).sum(2) / variance.clamp_min(1e-9)
    scale = torch.where(variance > 0, fitted, scale).half()
    minimum = (weights.mean(2) - scale * codes.mean(2)).half()
    codes = ((weights - minimum.float()[..., None]) * _inverse(scale)[..., None]).round_().clamp_(0, 15)
    return Groups(nibbles(codes.to(torch.uint8)), scale, minimum)


def _inverse(scale: Tensor) -> Tensor:
    # 0 also where the inverse would be beyond what a float holds.
    return torch.where(scale > 1e-38, 1 / scale.float(), 0.0)


def nibbles(codes: Tensor) -> Tensor:
    """uint8 [..., 32] of 0..15 -> [..., 16]"""
    return codes[..., :16] | codes[..., 16:] << 4


def packed_bytes(rows: int, columns: int, bits: int) -> int:
    """What a weight of this shape takes."""
    return math.prod(_packed_shape(rows, columns, bits))


def _packed_shape(rows: int, columns: int, bits: int) -> tuple[int, int, int]:
    size = TILE * (GROUP * bits // 8 + (4 if bits == 4 else 2))
    return -(-rows // TILE), -(-columns // GROUP), size


def rounded(x: Tensor) -> Tensor:
    """x [T, K] as the kernels take it, in 16 bits: each group of 32 in steps of 1/32,639 of its largest value."""
    padded = F.pad(x.float(), (0, -x.shape[1] % GROUP))
    groups = padded.reshape(len(x), padded.shape[1] // GROUP, GROUP)
    step = groups.abs().amax(2, keepdim=True) / 32639
    return ((groups * _inverse(step)).round_() * step).flatten(1)[:, : x.shape[1]].to(x.dtype)


class QuantizedWeight(Module):
    """A weight [rows, columns] in 4 or 8 bits, in the order that the kernels read it."""

    packed: Tensor

    def __init__(self, rows: int, columns: int, bits: int, device: torch.device | str = "cpu") -> None:
        super().__init__()
        if rows < 1 or columns < 1:
            raise ValueError(f"a weight of {rows} x {columns} cannot be packed")
        if bits not in (4, 8):
            raise ValueError(f"weights are quantised to 4 or 8 bits, not to {bits}")
        self.rows, self.columns, self.bits = rows, columns, bits
        shape = _packed_shape(rows, columns, bits)
        self.register_buffer("packed", torch.zeros(shape, dtype=torch.uint8, device=device))

    @classmethod
    def of(cls, weights: Tensor, bits: int) -> QuantizedWeight:
        """weights [N, K], rounded."""
        made = cls(weights.shape[0], weights.shape[1], bits)
        made.fill(0, quantise(weights, bits))
        return made

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.columns

    @property
    def device(self) -> torch.device:
        return self.packed.device

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes

    def fill(self, start: int, groups: Groups) -> None:
        """Put rows into their places, from row `start` on."""
        count = len(groups.codes)
        if start % TILE == 0 and count % TILE == 0:
            tiles = slice(start // TILE, (start + count) // TILE)
            for place, values in zip(self._fields(), self._quads(groups), strict=True):
                # [n, G, ...] -> [n / TILE, G, ..., TILE]
                place[tiles] = values.reshape(-1, TILE, *values.shape[1:]).movedim(1, -1)
        else:
            rows = torch.arange(start, start + count)
            for place, values in zip(self._fields(), self._quads(groups), strict=True):
                place.movedim(-1, 1)[rows // TILE, rows % TILE] = values

    def groups(self, rows: Tensor | slice = slice(None)) -> Groups:
        """Rows as they were before they were packed; the indices of rows may be of any shape."""
        index = torch.arange(self.rows, device=self.device)[rows]
        found = [place.movedim(-1, 1)[index // TILE, index % TILE] for place in self._fields()]
        codes = found[0].contiguous().view(torch.int8 if self.bits == 8 else torch.uint8)
        return Groups(codes, found[1], found[2] if self.bits == 4 else None)

    def floats(self, rows: Tensor | slice = slice(None)) -> Tensor:
        """Rows as float32 [..., K]."""
        codes, scale, minimum = self.groups(rows)
        if minimum is None:
            weights = codes * scale.float()[..., None]
        else:
            codes = torch.cat((codes & 15, codes >> 4), -1)
            weights = codes * scale.float()[..., None] + minimum.float()[..., None]
        return weights.flatten(-2)[..., : self.columns].contiguous()

    def look_up(self, ids: Tensor) -> Tensor:
        """Rows ids [T] as float32 [T, K]."""
        return self.floats(ids)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [T, K] -> [T, N], in x's dtype. x is `rounded`, as in the CPU's kernels, unless it is to have gradients."""
        if not x.is_cpu:
            raise ValueError(f"quantised weights multiply on the CPU alone, and x is on {x.device}")
        if x.dim() != 2 or x.shape[1] != self.columns:
            raise ValueError(f"x of shape {list(x.shape)} does not fit a weight of {list(self.shape)}")
        return self._plain(x if x.requires_grad and torch.is_grad_enabled() else rounded(x), bias)

    def _plain(self, x: Tensor, bias: Tensor | None) -> Tensor:
        step = max(1, AT_ONCE // self.columns)
        parts = [F.linear(x, self.floats(slice(i, i + step)).to(x.dtype)) for i in range(0, self.rows, step)]
        out = torch.cat(parts, -1)
        return out if bias is None else out + bias

    def _fields(self) -> list[Tensor]:
        """The packed bytes as quads of codes [tiles, G, quads, TILE], scales and minima [tiles, G, TILE]."""
        quads = GROUP * self.bits // 8 // 4
        words, halves = self.packed.view(torch.int32), self.packed.view(torch.float16)
        codes = words.as_strided((*words.shape[:2], quads, TILE), (*words.stride()[:2], TILE, 1))
        fields = [codes, halves[..., 2 * quads * TILE :][..., :TILE]]
        if self.bits == 4:
            fields.append(halves[..., -TILE:])
        return fields

    def _quads(self, groups: Groups) -> list[Tensor]:
        if groups.codes.shape[1:] != (self.packed.shape[1], GROUP * self.bits // 8):
            raise ValueError(f"groups of {list(groups.codes.shape)} do not fit a weight of {list(self.shape)}")
        codes = groups.codes.contiguous().view(torch.int32)  # [n, G, quads]
        return [codes, groups.scale] if groups.minimum is None else [codes, groups.scale, groups.minimum]
