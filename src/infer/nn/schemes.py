"""How quantized weights are stored: one `Scheme` for each type of block in GGUF files, and for int4 and int8.

    w = scale * code + minimum

A row is cut into blocks of 32 or 256 columns. The columns of a part of a block, 16 or 32, share a scale and a minimum:
a float16 each; or, in blocks of 256, a small integer each, which multiplies a float16 of the block; or a power of two.
All weights are the numbers that the `gguf` package dequantizes, to the last bit.

A block has, in this order: its float16 scale and minimum (or the exponent), the integers of its parts, its codes. Codes
come in groups of 32 columns, and a code in one or two planes of bits. A plane of b bits has b words of four bytes for a
group: columns 4j to 4j + 3 are in word j % b, at bit b * (j // b) of each byte. So a kernel obtains any four columns of
many rows with a shift and a mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

GROUP = 32  # columns whose codes are stored together; activations have a scale for as many
SUPER_BLOCK = 256
FLOAT16, INT8, NIBBLES, E8M0 = "float16", "int8", "nibbles", "e8m0"  # how scales are stored


def split_last(x: Tensor, *sizes: int) -> Tensor:
    """[..., n] -> [..., *sizes], a view."""
    return x.view(*x.shape[:-1], *sizes)


def pack_plane(codes: Tensor, bits: int) -> Tensor:
    """A plane [..., bytes] of codes [..., columns] that have so many bits."""
    pieces = split_last(codes, -1, 8 // bits, 4 * bits).unbind(-2)
    packed = pieces[0]
    for i, piece in enumerate(pieces[1:], 1):
        packed = packed | piece << bits * i
    return packed.flatten(-2)


@dataclass(frozen=True)
class Field:
    """Bytes of a block."""

    start: int
    count: int
    width: int  # bytes of an element

    @property
    def stop(self) -> int:
        return self.start + self.count * self.width


@dataclass(frozen=True)
class Scheme:
    """How the blocks of a weight are stored."""

    name: str
    planes: tuple[int, ...]  # bits of a code in each plane, the low bits first; one plane of 8 bits: codes are signed
    scale: str = (
        FLOAT16  # INT8, NIBBLES: integers that multiply a float16 of the block; NIBBLES: 4 bits, 4 of a minimum
    )
    minimum: bool = False
    part: int = GROUP  # columns that share a scale
    zero: int = 0  # what is subtracted from codes
    table: tuple[int, ...] = ()  # what codes stand for

    @property
    def bits(self) -> int:
        return sum(self.planes)

    @property
    def columns(self) -> int:
        """Of a block."""
        return GROUP if self.scale in (FLOAT16, E8M0) else SUPER_BLOCK

    @cached_property
    def fields(self) -> dict[str, Field]:
        parts = 0 if self.columns == GROUP else self.columns // self.part
        sizes = {
            "scale": (1, 1 if self.scale == E8M0 else 2),
            "minimum": (int(self.minimum), 2),
            "scales": (parts, 1),
            "minima": (parts if self.minimum and self.scale != NIBBLES else 0, 1),
            "codes": (self.columns // GROUP * self.bits, 4),
        }
        found, start = {}, 0
        for name, (count, width) in sizes.items():
            if count:
                found[name] = Field(start, count, width)
                start = found[name].stop
        return found

    @property
    def block_bytes(self) -> int:
        return self.fields["codes"].stop

    def row_bytes(self, columns: int) -> int:
        return -(-columns // self.columns) * self.block_bytes

    def pack(self, codes: Tensor, **fields: Tensor) -> Tensor:
        """Blocks uint8 [N, B, block_bytes] of codes [N, B, columns], before `zero` and `table`, and of other fields."""
        codes, low, planes = codes.view(torch.uint8), 0, []
        for bits in self.planes:
            planes.append(pack_plane(codes if self.bits == 8 else codes >> low & (1 << bits) - 1, bits))
            low += bits
        return self.join(planes, **fields)

    def join(self, planes: Sequence[Tensor], **fields: Tensor) -> Tensor:
        """The same of packed planes [N, B, bytes]."""
        stored = {name: value.reshape(*planes[0].shape[:2], -1) for name, value in fields.items()}
        words = [split_last(plane, -1, 4 * bits) for plane, bits in zip(planes, self.planes, strict=True)]
        stored["codes"] = planes[0] if len(planes) == 1 else torch.cat(words, -1).flatten(-2)
        return torch.cat([stored[name].contiguous().view(torch.uint8) for name in self.fields], -1)

    def field(self, blocks: Tensor, name: str) -> Tensor:
        """The bytes of a field [..., bytes]."""
        field = self.fields[name]
        return blocks[..., field.start : field.stop]

    def codes(self, blocks: Tensor) -> Tensor:
        """What weights are multiples of: int8 [..., columns]."""
        words = split_last(self.field(blocks, "codes"), -1, 4 * self.bits)
        codes, start, low = None, 0, 0
        for bits in self.planes:
            plane = words[..., start : start + 4 * bits]
            pieces = [plane >> bits * shift & (1 << bits) - 1 for shift in range(8 // bits)] if bits < 8 else [plane]
            piece = torch.cat(pieces, -1) << low
            codes = piece if codes is None else codes | piece
            start, low = start + 4 * bits, low + bits
        assert codes is not None
        codes = codes.flatten(-2)
        if self.table:
            table = torch.tensor(self.table, dtype=torch.int8, device=codes.device)
            return table[codes.int()]
        return codes.view(torch.int8) - self.zero if self.zero else codes.view(torch.int8)

    def scales(self, blocks: Tensor) -> tuple[Tensor, Tensor | None]:
        """The scales and the minima of all parts: float32 [..., parts]."""
        scale, minimum = self.block_scales(blocks)
        if self.columns == GROUP:
            return scale, minimum
        multiples = self.field(blocks, "scales")
        if self.scale == NIBBLES:
            assert minimum is not None
            return scale * (multiples & 15), minimum * (multiples >> 4)
        scale = scale * multiples.view(torch.int8)
        return scale, None if minimum is None else minimum * self.field(blocks, "minima")

    def block_scales(self, blocks: Tensor) -> tuple[Tensor, Tensor | None]:
        """Scale and minimum of each block: float32 [..., 1]."""
        scale = self.field(blocks, "scale").contiguous()
        scale = _power_of_two(scale) if self.scale == E8M0 else scale.view(torch.float16).float()
        if not self.minimum:
            return scale, None
        return scale, self.field(blocks, "minimum").contiguous().view(torch.float16).float()

    def floats(self, blocks: Tensor) -> Tensor:
        """Weights float32 [..., B * columns] of blocks [..., B, block_bytes]."""
        scale, minimum = self.scales(blocks)
        weights = split_last(self.codes(blocks), -1, self.part) * scale[..., None]
        if minimum is not None:
            weights += minimum[..., None]
        return weights.flatten(-3)


def _power_of_two(exponent: Tensor) -> Tensor:
    """2^(exponent - 128): tables of such schemes have values times two. The two smallest are denormal."""
    exponent = exponent.int()
    return torch.where(exponent < 2, 0x00200000 << exponent.clamp(max=1), (exponent - 1) << 23).view(torch.float32)


IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # times two

_SCHEMES = (
    Scheme("Q4_0", (4,), zero=8),
    Scheme("Q4_1", (4,), minimum=True),
    Scheme("Q5_0", (4, 1), zero=16),
    Scheme("Q5_1", (4, 1), minimum=True),
    Scheme("Q8_0", (8,)),
    Scheme("Q2_K", (2,), NIBBLES, minimum=True, part=16),
    Scheme("Q3_K", (2, 1), INT8, part=16, zero=4),
    Scheme("Q4_K", (4,), INT8, minimum=True),
    Scheme("Q5_K", (4, 1), INT8, minimum=True),
    Scheme("Q6_K", (4, 2), INT8, part=16, zero=32),
    Scheme("IQ4_NL", (4,), table=IQ4),
    Scheme("IQ4_XS", (4,), INT8, table=IQ4),
    Scheme("MXFP4", (4,), E8M0, table=E2M1),
)
SCHEMES = {scheme.name: scheme for scheme in _SCHEMES}
SCHEMES |= {"int4": SCHEMES["Q4_1"], "int8": SCHEMES["Q8_0"]}  # what `quantize` rounds weights to
