"""Quantized weights: how weights are rounded, their layout in memory, and products in plain torch.

`nn/schemes.py` describes the blocks that a row is stored in. Weights of GGUF files keep their blocks. Others are
rounded to int4 or int8, in groups of 32 columns with float16 scales:

    int8: w = scale * code, codes -127..127
    int4: w = scale * code + minimum, codes 0..15
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infer.nn.module import Module
from infer.nn.schemes import GROUP, SCHEMES, Scheme, split_last

BITS = {"int4": 4, "int8": 8}
AT_ONCE = 1 << 24  # weights that are dequantized at a time
TILED_AT_ONCE = 1 << 22  # weights that are moved into tiles at a time
ELEMENTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # of so many bytes


def quantize_rows(weights: Tensor, kind: str) -> Tensor:
    """Blocks of weights [N, K], rounded to the nearest codes. kind: one of BITS."""
    if weights.dim() != 2 or 0 in weights.shape:
        raise ValueError(f"only a matrix of weights can be quantized, not a tensor of shape {list(weights.shape)}")
    # The last group is padded with its last column, which widens no range.
    padding = -weights.shape[1] % GROUP
    weights = F.pad(weights.float()[None], (0, padding), "replicate")[0].reshape(len(weights), -1, GROUP)
    low, high = weights.amin(2), weights.amax(2)
    if not (low.isfinite().all() and high.isfinite().all() and low.min() > -65504 and high.max() < 65504):
        raise ValueError("weights that are not finite, or beyond 65,504, cannot be quantized")
    return _int8(weights, low, high) if kind == "int8" else _int4(weights, low, high)


def _int8(weights: Tensor, low: Tensor, high: Tensor) -> Tensor:
    scale = (torch.maximum(high, -low) / 127).half()
    codes = (weights * _inverse(scale)[..., None]).round_().clamp_(-127, 127)
    return SCHEMES["int8"].pack(codes.to(torch.int8), scale=scale)


def _int4(weights: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """From the lowest weight to the highest in 15 steps, then the least-squares line through these codes."""
    scale, minimum = (high - low) / 15, low
    codes = ((weights - minimum[..., None]) * _inverse(scale)[..., None]).round_().clamp_(0, 15)
    spread = codes - codes.mean(2, keepdim=True)
    variance = spread.square().sum(2)
    fitted = (spread * weights).sum(2) / variance.clamp_min(1e-9)
    scale = torch.where(variance > 0, fitted, scale).half()
    minimum = (weights.mean(2) - scale * codes.mean(2)).half()
    codes = ((weights - minimum.float()[..., None]) * _inverse(scale)[..., None]).round_().clamp_(0, 15)
    return SCHEMES["int4"].pack(codes.to(torch.uint8), scale=scale, minimum=minimum)


def _inverse(scale: Tensor) -> Tensor:
    # 0 also if the inverse would overflow.
    return torch.where(scale > 1e-38, 1 / scale.float(), 0.0)


def round_activations(x: Tensor) -> Tensor:
    """x [T, K] as the kernels round it, to 16 bits: each group of 32 in steps of 1/32,639 of its largest value."""
    padded = F.pad(x.float(), (0, -x.shape[1] % GROUP))
    groups = padded.reshape(len(x), padded.shape[1] // GROUP, GROUP)
    step = groups.abs().amax(2, keepdim=True) / 32639
    return ((groups * _inverse(step)).round_() * step).flatten(1)[:, : x.shape[1]].to(x.dtype)


class QuantizedWeight(Module):
    """A weight [rows, columns] in the blocks of one scheme.

    A tile of one or more rows is a sequence of blocks. Of each field of a block, a tile has the first element of each
    row, then the second of each, and so on; the elements of codes are words of 4 bytes. A backend chooses how many rows
    a tile has (`set_tile_rows`); the values do not depend on it.
    """

    packed: Tensor  # uint8 [tiles, B, bytes of a block of a tile]; the last tile may be padded

    def __init__(
        self, rows: int, columns: int, kind: str, device: torch.device | str = "cpu", tile_rows: int = 1
    ) -> None:
        """kind: the name of a scheme."""
        super().__init__()
        if rows < 1 or columns < 1:
            raise ValueError(f"a weight of {rows} x {columns} cannot be packed")
        if tile_rows != 1 and tile_rows % 4:  # elements of 4 bytes would not be aligned
            raise ValueError(f"a tile has 1 row, or a multiple of 4, not {tile_rows}")
        if kind not in SCHEMES:
            raise ValueError(f"weights are stored as one of {', '.join(SCHEMES)}, not as {kind!r}")
        self.rows, self.columns, self.kind = rows, columns, kind
        if self.scheme.columns > GROUP and columns % self.scheme.columns:
            raise ValueError(f"rows of {columns} weights cannot be cut into {kind} blocks of {self.scheme.columns}")
        shape = -(-rows // tile_rows), -(-columns // self.scheme.columns), tile_rows * self.scheme.block_bytes
        self.register_buffer("packed", torch.zeros(shape, dtype=torch.uint8, device=device))

    @classmethod
    def of(cls, weights: Tensor, kind: str) -> QuantizedWeight:
        """weights [N, K], quantized. kind: one of BITS."""
        made = cls(weights.shape[0], weights.shape[1], kind)
        made.fill(0, quantize_rows(weights, kind))
        return made

    @property
    def parts(self) -> tuple[QuantizedWeight, ...]:
        return (self,)

    @property
    def scheme(self) -> Scheme:
        return SCHEMES[self.kind]

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
        return self.packed.shape[2] // self.scheme.block_bytes

    def part(self, row: int) -> tuple[QuantizedWeight, int]:
        return self, row

    def set_tile_rows(self, tile_rows: int) -> None:
        """Changes the layout. Only this weight is held twice meanwhile."""
        if tile_rows == self.tile_rows:
            return
        tiled = QuantizedWeight(self.rows, self.columns, self.kind, self.device, tile_rows)
        step = max(1, TILED_AT_ONCE // self.columns // tile_rows) * tile_rows
        for start in range(0, self.rows, step):
            tiled.fill(start, self.blocks(slice(start, start + step)))
        self.packed = tiled.packed

    def fill(self, start: int, blocks: Tensor) -> None:
        """Stores rows of blocks [N, B, bytes of a block], from row `start` on."""
        packed = self.packed
        tile_rows = packed.shape[2] // self.scheme.block_bytes
        if blocks.shape[1:] != (packed.shape[1], self.scheme.block_bytes):
            raise ValueError(f"blocks of {list(blocks.shape)} do not fit a weight of {list(self.shape)}")
        count = len(blocks)
        if tile_rows == 1:
            packed[start : start + count] = blocks
            return
        first = min(count, -start % tile_rows)
        last = first + (count - first) // tile_rows * tile_rows
        tiles = slice((start + first) // tile_rows, (start + last) // tile_rows)
        edges = torch.tensor([*range(first), *range(last, count)])  # of tiles that are filled in part
        rows = start + edges
        for field, tiled in zip(self.scheme.fields.values(), self._fields(packed), strict=True):
            part = blocks[..., field.start : field.stop]
            values = part.clone(memory_format=torch.contiguous_format).view(tiled.dtype)  # a copy, which is aligned
            # [n, B, count] -> [n / tile_rows, B, count, tile_rows]
            tiled[tiles] = values[first:last].reshape(-1, tile_rows, *values.shape[1:]).movedim(1, -1)
            if len(edges):
                tiled.movedim(-1, 1)[rows // tile_rows, rows % tile_rows] = values[edges]

    def blocks(self, rows: Tensor | slice = slice(None)) -> Tensor:
        """Rows as blocks [..., B, bytes of a block]; their indices may have any shape."""
        packed = self.packed
        tile_rows = packed.shape[2] // self.scheme.block_bytes
        if tile_rows == 1:
            # A copy, whose strides are those of a contiguous tensor even if its sizes are 1.
            return packed[rows].clone(memory_format=torch.contiguous_format)
        index = torch.arange(self.rows, device=packed.device)[rows]
        found = [tiled.movedim(-1, 1)[index // tile_rows, index % tile_rows] for tiled in self._fields(packed)]
        return torch.cat([each.contiguous().view(torch.uint8) for each in found], -1)

    def _fields(self, packed: Tensor) -> list[Tensor]:
        """Views of the fields of tiles, [tiles, B, count, tile_rows].

        `packed` is read once by the callers: another thread may change the layout.
        """
        tile_rows = packed.shape[2] // self.scheme.block_bytes
        found = []
        for field in self.scheme.fields.values():
            tiled = packed[..., field.start * tile_rows : field.stop * tile_rows].view(ELEMENTS[field.width])
            found.append(split_last(tiled, field.count, tile_rows))
        return found

    def floats(self, rows: Tensor | slice = slice(None)) -> Tensor:
        """Rows as float32 [..., K]."""
        return self.scheme.floats(self.blocks(rows))[..., : self.columns].contiguous()

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


class StackedWeight(Module):
    """Weights of several schemes, stacked: matrices with the same input, which a file has in different types."""

    def __init__(self, parts: Sequence[QuantizedWeight]) -> None:
        super().__init__()
        self.stacked = nn.ModuleList(parts)

    @property
    def parts(self) -> tuple[QuantizedWeight, ...]:
        return tuple(cast(Iterable[QuantizedWeight], self.stacked))

    @property
    def shape(self) -> tuple[int, int]:
        return sum(part.rows for part in self.parts), self.parts[0].columns

    @property
    def device(self) -> torch.device:
        return self.parts[0].device

    def part(self, row: int) -> tuple[QuantizedWeight, int]:
        """The part that has this row, and the row's number there."""
        for part in self.parts:
            if row < part.rows:
                break
            row -= part.rows
        return part, row

    def set_tile_rows(self, tile_rows: int) -> None:
        for part in self.parts:
            part.set_tile_rows(tile_rows)

    def floats(self) -> Tensor:
        return torch.cat([part.floats() for part in self.parts])

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        out = torch.cat([part(x) for part in self.parts], -1)
        return out if bias is None else out + bias


Quantized = QuantizedWeight | StackedWeight


def pieces_of(weight: Quantized, start: int, stop: int) -> Iterator[tuple[QuantizedWeight, slice]]:
    """The parts that have rows from `start` to `stop` of a weight, and which of their rows these are."""
    while start < stop:
        part, at = weight.part(start)
        end = min(part.rows, at + stop - start)
        yield part, slice(at, end)
        start += end - at


def describe_kinds(sizes: Iterable[tuple[str, int]]) -> str:
    """The kinds that weights are stored as, the one with most weights first. sizes: kinds and numbers of weights."""
    total: dict[str, int] = {}
    for kind, size in sizes:
        total[kind] = total.get(kind, 0) + size
    if set(total) == {"int4", "int8"}:  # quantize="int4" implies some int8
        return "int4"
    return ", ".join(sorted(total, key=lambda kind: -total[kind]))
