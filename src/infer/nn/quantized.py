"""Quantized weights, in 4 or 8 bits: how weights are rounded, their layout in memory, and products in plain torch.

Each row is cut into groups of 32 columns, and each group has its own scale:

    int8: w = scale * code, codes -127..127
    int4: w = scale * code + minimum, codes 0..15

Scales and minima are float16, as in GGUF files, so Q8_0, Q5_0, Q4_0 and Q4_1 are stored without loss.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from infer.nn.module import Module

GROUP = 32  # columns
BITS = {"int4": 4, "int8": 8}
AT_ONCE = 1 << 24  # weights that are dequantized at a time
TILED_AT_ONCE = 1 << 22  # weights that are moved into tiles at a time


class Groups(NamedTuple):
    """Quantized rows of a weight."""

    codes: Tensor  # int8 [N, G, 32]; 4 bits: uint8 [N, G, 16], column i in the low half of byte i, i + 16 in the high
    scale: Tensor  # float16 [N, G]
    minimum: Tensor | None  # float16 [N, G]; None for 8 bits


def quantize_rows(weights: Tensor, bits: int) -> Groups:
    """Rounds rows of weights [N, K] to the nearest codes."""
    if weights.dim() != 2 or 0 in weights.shape:
        raise ValueError(f"only a matrix of weights can be quantized, not a tensor of shape {list(weights.shape)}")
    # The last group is padded with its last column, which widens no range.
    padding = -weights.shape[1] % GROUP
    weights = F.pad(weights.float()[None], (0, padding), "replicate")[0].reshape(len(weights), -1, GROUP)
    low, high = weights.amin(2), weights.amax(2)
    if not (low.isfinite().all() and high.isfinite().all() and low.min() > -65504 and high.max() < 65504):
        raise ValueError("weights that are not finite, or beyond 65,504, cannot be quantized")
    return _int8(weights, low, high) if bits == 8 else _int4(weights, low, high)


def _int8(weights: Tensor, low: Tensor, high: Tensor) -> Groups:
    scale = (torch.maximum(high, -low) / 127).half()
    codes = (weights * _inverse(scale)[..., None]).round_().clamp_(-127, 127)
    return Groups(codes.to(torch.int8), scale, None)


def _int4(weights: Tensor, low: Tensor, high: Tensor) -> Groups:
    """From the lowest weight to the highest in 15 steps, then the least-squares line through these codes."""
    scale, minimum = (high - low) / 15, low
    codes = ((weights - minimum[..., None]) * _inverse(scale)[..., None]).round_().clamp_(0, 15)
    spread = codes - codes.mean(2, keepdim=True)
    variance = spread.square().sum(2)
    fitted = (spread * weights).sum(2) / variance.clamp_min(1e-9)
    scale = torch.where(variance > 0, fitted, scale).half()
    minimum = (weights.mean(2) - scale * codes.mean(2)).half()
    codes = ((weights - minimum.float()[..., None]) * _inverse(scale)[..., None]).round_().clamp_(0, 15)
    return Groups(pack_nibbles(codes.to(torch.uint8)), scale, minimum)


def _inverse(scale: Tensor) -> Tensor:
    # 0 also if the inverse would overflow.
    return torch.where(scale > 1e-38, 1 / scale.float(), 0.0)


def pack_nibbles(codes: Tensor) -> Tensor:
    """uint8 [..., 32] of 0..15 -> [..., 16]"""
    return codes[..., :16] | codes[..., 16:] << 4


def packed_bytes(rows: int, columns: int, bits: int) -> int:
    """The size of a weight of this shape."""
    return math.prod(_packed_shape(rows, columns, bits))


def _packed_shape(rows: int, columns: int, bits: int, tile_rows: int = 1) -> tuple[int, int, int]:
    return -(-rows // tile_rows), -(-columns // GROUP), tile_rows * _group_bytes(bits)


def _group_bytes(bits: int) -> int:
    return GROUP * bits // 8 + (4 if bits == 4 else 2)


def round_activations(x: Tensor) -> Tensor:
    """x [T, K] as the kernels round it, to 16 bits: each group of 32 in steps of 1/32,639 of its largest value."""
    padded = F.pad(x.float(), (0, -x.shape[1] % GROUP))
    groups = padded.reshape(len(x), padded.shape[1] // GROUP, GROUP)
    step = groups.abs().amax(2, keepdim=True) / 32639
    return ((groups * _inverse(step)).round_() * step).flatten(1)[:, : x.shape[1]].to(x.dtype)


class QuantizedWeight(Module):
    """A weight [rows, columns] in 4 or 8 bits.

    A tile of one or more rows is a sequence of groups. A group has the first 4 bytes of codes of each row of the tile,
    then the next 4 bytes, and so on; then the scale of each row, then the minimum of each. A backend chooses how many
    rows a tile has (`set_tile_rows`); the values do not depend on it.
    """

    packed: Tensor  # uint8 [tiles, G, bytes of a group of a tile]; the last tile may be padded

    def __init__(
        self, rows: int, columns: int, bits: int, device: torch.device | str = "cpu", tile_rows: int = 1
    ) -> None:
        super().__init__()
        if rows < 1 or columns < 1:
            raise ValueError(f"a weight of {rows} x {columns} cannot be packed")
        if bits not in (4, 8):
            raise ValueError(f"weights are quantized to 4 or 8 bits, not to {bits}")
        self.rows, self.columns, self.bits = rows, columns, bits
        shape = _packed_shape(rows, columns, bits, tile_rows)
        self.register_buffer("packed", torch.zeros(shape, dtype=torch.uint8, device=device))

    @classmethod
    def of(cls, weights: Tensor, bits: int) -> QuantizedWeight:
        """weights [N, K], quantized."""
        made = cls(weights.shape[0], weights.shape[1], bits)
        made.fill(0, quantize_rows(weights, bits))
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

    @property
    def tile_rows(self) -> int:
        return self.packed.shape[2] // _group_bytes(self.bits)

    def set_tile_rows(self, tile_rows: int) -> None:
        """Changes the layout. Only this weight is held twice meanwhile."""
        if tile_rows == self.tile_rows:
            return
        tiled = QuantizedWeight(self.rows, self.columns, self.bits, self.device, tile_rows)
        step = max(1, TILED_AT_ONCE // self.columns // tile_rows) * tile_rows
        for start in range(0, self.rows, step):
            tiled.fill(start, self.groups(slice(start, start + step)))
        self.packed = tiled.packed

    def fill(self, start: int, groups: Groups) -> None:
        """Stores rows, from row `start` on."""
        fields, tile_rows = self._fields()
        count = len(groups.codes)
        first = min(count, -start % tile_rows)
        last = first + (count - first) // tile_rows * tile_rows
        tiles = slice((start + first) // tile_rows, (start + last) // tile_rows)
        edges = torch.tensor([*range(first), *range(last, count)])  # of tiles that are filled in part
        rows = start + edges
        for field, values in zip(fields, self._values(groups, tile_rows), strict=True):
            # [n, G, ...] -> [n / tile_rows, G, ..., tile_rows]
            field[tiles] = values[first:last].reshape(-1, tile_rows, *values.shape[1:]).movedim(1, -1)
            if len(edges):
                field.movedim(-1, 1)[rows // tile_rows, rows % tile_rows] = values[edges]

    def groups(self, rows: Tensor | slice = slice(None)) -> Groups:
        """Quantized rows; their indices may have any shape."""
        fields, tile_rows = self._fields()
        if tile_rows == 1:
            # A copy, whose strides are those of a contiguous tensor even if its sizes are 1.
            found = [field[..., 0][rows].clone(memory_format=torch.contiguous_format) for field in fields]
        else:
            index = torch.arange(self.rows, device=fields[0].device)[rows]
            found = [field.movedim(-1, 1)[index // tile_rows, index % tile_rows] for field in fields]
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

    def forward(self, x: Tensor, bias: Tensor | None = None, rows: slice = slice(None)) -> Tensor:
        """x [T, K] -> [T, N], in x's dtype. x is rounded as in the CPU's kernels, unless it needs gradients.

        rows: of the weight; the bias is theirs.
        """
        if not x.is_cpu:
            raise ValueError(f"quantized weights run on the CPU only, but x is on {x.device}")
        if x.dim() != 2 or x.shape[1] != self.columns:
            raise ValueError(f"x of shape {list(x.shape)} does not fit a weight of {list(self.shape)}")
        if not (x.requires_grad and torch.is_grad_enabled()):
            x = round_activations(x)
        (first, last, _), step = rows.indices(self.rows), max(1, AT_ONCE // self.columns)
        pieces = [slice(i, min(i + step, last)) for i in range(first, last, step)]
        parts = [F.linear(x, self.floats(piece).to(x.dtype)) for piece in pieces]
        out = torch.cat(parts, -1)
        return out if bias is None else out + bias

    def _fields(self) -> tuple[list[Tensor], int]:
        """Views of `packed`: codes [tiles, G, n, tile_rows], scales and minima [tiles, G, tile_rows]; and `tile_rows`.

        Codes are words of 4 bytes, or single bytes in a tile of one row, whose groups may have an odd number of halves.
        `packed` is read once: another thread may change the layout.
        """
        packed, size = self.packed, GROUP * self.bits // 8
        tile_rows = packed.shape[2] // _group_bytes(self.bits)
        words, halves = packed if tile_rows == 1 else packed.view(torch.int32), packed.view(torch.float16)
        count = size // words.element_size()
        codes = words.as_strided((*words.shape[:2], count, tile_rows), (*words.stride()[:2], tile_rows, 1))
        fields = [codes, halves[..., size // 2 * tile_rows :][..., :tile_rows]]
        if self.bits == 4:
            fields.append(halves[..., -tile_rows:])
        return fields, tile_rows

    def _values(self, groups: Groups, tile_rows: int) -> list[Tensor]:
        """What the fields store of each row."""
        if groups.codes.shape[1:] != (self.packed.shape[1], GROUP * self.bits // 8):
            raise ValueError(f"groups of {list(groups.codes.shape)} do not fit a weight of {list(self.shape)}")
        codes = groups.codes.contiguous().view(torch.uint8 if tile_rows == 1 else torch.int32)
        return [codes, groups.scale] if groups.minimum is None else [codes, groups.scale, groups.minimum]
