"""Blocks of GGUF files as the schemes of `nn/schemes.py` store them: the same numbers, in another order of bits."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from infer.nn.schemes import FLOAT16, GROUP, SCHEMES, Scheme, split_last


def _half(blocks: Tensor, at: int) -> Tensor:
    return blocks[..., at : at + 2].contiguous().view(torch.float16)


def _nibbles(packed: Tensor, size: int) -> Tensor:
    """Of each `size` bytes the low halves, then the high halves."""
    packed = split_last(packed, -1, size)
    return torch.stack((packed & 15, packed >> 4), -2).flatten(-3)


def _fields(packed: Tensor, size: int, bits: int) -> Tensor:
    """Of each `size` bytes the lowest bits, then the next ones, and so on."""
    packed = split_last(packed, -1, size)
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)[:, None]
    return (packed[..., None, :] >> shifts & (1 << bits) - 1).flatten(-3)


def _q4_0(blocks: Tensor) -> Tensor:
    return SCHEMES["Q4_0"].pack(_nibbles(blocks[..., 2:], 16), scale=_half(blocks, 0))


def _q4_1(blocks: Tensor) -> Tensor:
    return SCHEMES["Q4_1"].pack(_nibbles(blocks[..., 4:], 16), scale=_half(blocks, 0), minimum=_half(blocks, 2))


def _fifth_bits(packed: Tensor) -> Tensor:
    """Bit i of four bytes, as bit 4 of element i."""
    return (packed[..., None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten(-2) << 4


def _q5_0(blocks: Tensor) -> Tensor:
    codes = _nibbles(blocks[..., 6:], 16) | _fifth_bits(blocks[..., 2:6])
    return SCHEMES["Q5_0"].pack(codes, scale=_half(blocks, 0))


def _q5_1(blocks: Tensor) -> Tensor:
    codes = _nibbles(blocks[..., 8:], 16) | _fifth_bits(blocks[..., 4:8])
    return SCHEMES["Q5_1"].pack(codes, scale=_half(blocks, 0), minimum=_half(blocks, 2))


def _q8_0(blocks: Tensor) -> Tensor:
    return SCHEMES["Q8_0"].pack(blocks[..., 2:].contiguous(), scale=_half(blocks, 0))


def _q2_k(blocks: Tensor) -> Tensor:
    codes = _fields(blocks[..., 16:80], 32, 2)
    halves = {"scale": _half(blocks, 80), "minimum": -_half(blocks, 82)}
    return SCHEMES["Q2_K"].pack(codes, scales=blocks[..., :16], **halves)


def _q3_k(blocks: Tensor) -> Tensor:
    codes = _fields(blocks[..., 32:96], 32, 2) | _fields(blocks[..., :32], 32, 1) << 2
    scales = _fields(blocks[..., 96:104], 8, 4) | _fields(blocks[..., 104:108], 4, 2) << 4
    return SCHEMES["Q3_K"].pack(codes, scales=scales.view(torch.int8) - 32, scale=_half(blocks, 108))


def _k_scales(blocks: Tensor) -> dict[str, Tensor]:
    """Of Q4_K and Q5_K: eight scales and eight minima of 6 bits, and their float16 factors."""
    low, high, rest = split_last(blocks[..., 4:16], 3, 4).unbind(-2)
    return {
        "scale": _half(blocks, 0),
        "minimum": -_half(blocks, 2),  # there it is subtracted
        "scales": torch.cat((low & 63, (rest & 15) | (low >> 6) << 4), -1),
        "minima": torch.cat((high & 63, (rest >> 4) | (high >> 6) << 4), -1),
    }


def _q4_k(blocks: Tensor) -> Tensor:
    return SCHEMES["Q4_K"].pack(_nibbles(blocks[..., 16:], 32), **_k_scales(blocks))


def _q5_k(blocks: Tensor) -> Tensor:
    codes = _nibbles(blocks[..., 48:], 32) | _fields(blocks[..., 16:48], 32, 1) << 4
    return SCHEMES["Q5_K"].pack(codes, **_k_scales(blocks))


def _q6_k(blocks: Tensor) -> Tensor:
    codes = _nibbles(blocks[..., :128], 64) | _fields(blocks[..., 128:192], 32, 2) << 4
    return SCHEMES["Q6_K"].pack(codes, scales=blocks[..., 192:208], scale=_half(blocks, 208))


def _iq4_nl(blocks: Tensor) -> Tensor:
    return SCHEMES["IQ4_NL"].pack(_nibbles(blocks[..., 2:], 16), scale=_half(blocks, 0))


def _iq4_xs(blocks: Tensor) -> Tensor:
    scales = (_nibbles(blocks[..., 4:8], 1) | _fields(blocks[..., 2:4], 1, 2) << 4).view(torch.int8) - 32
    return SCHEMES["IQ4_XS"].pack(_nibbles(blocks[..., 8:], 16), scales=scales, scale=_half(blocks, 0))


def _mxfp4(blocks: Tensor) -> Tensor:
    return SCHEMES["MXFP4"].pack(_nibbles(blocks[..., 1:], 16), scale=blocks[..., :1])


# By type: the bytes of a block in the file, and the conversion of blocks [N, B, bytes].
BLOCKS: dict[str, tuple[int, Callable[[Tensor], Tensor]]] = {
    "Q4_0": (18, _q4_0),
    "Q4_1": (20, _q4_1),
    "Q5_0": (22, _q5_0),
    "Q5_1": (24, _q5_1),
    "Q8_0": (34, _q8_0),
    "Q2_K": (84, _q2_k),
    "Q3_K": (110, _q3_k),
    "Q4_K": (144, _q4_k),
    "Q5_K": (176, _q5_k),
    "Q6_K": (210, _q6_k),
    "IQ4_NL": (18, _iq4_nl),
    "IQ4_XS": (136, _iq4_xs),
    "MXFP4": (17, _mxfp4),
}


def blocks_of(raw: Tensor, scheme: Scheme) -> Tensor:
    """Rows of a file, uint8 [N, bytes], as blocks of the scheme of this type."""
    size, convert = BLOCKS[scheme.name]
    return convert(split_last(raw, -1, size))


def fits_int8(scheme: Scheme) -> bool:
    """Whether int8 has the same codes and scales."""
    return scheme.columns == GROUP and scheme.scale == FLOAT16 and not scheme.minimum
