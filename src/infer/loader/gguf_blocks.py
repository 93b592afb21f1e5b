"""Blocks of GGUF files as the schemes of `nn/schemes.py` store them: the same numbers, in another order of bits."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from infer.nn.schemes import FLOAT16, GROUP, SCHEMES, Scheme, pack_plane, split_last


def _half(blocks: Tensor, at: int) -> Tensor:
    return blocks[..., at : at + 2].contiguous().view(torch.float16)


def _regrouped(packed: Tensor, size: int) -> Tensor:
    """Planes of 4 bits. Of each `size` bytes, the low halves are the codes of some groups, and the high halves of the
    next ones. A scheme has the codes of a group in 16 bytes: the first half of them in the low halves."""
    first, second = split_last(packed, -1, size // 32, 2, 16).unbind(-2)
    groups = torch.stack((first & 15 | second << 4, first >> 4 | second & 240), -3)
    return groups.flatten(-4)


def _fields(packed: Tensor, size: int, bits: int) -> Tensor:
    """Of each `size` bytes the lowest bits, then the next ones, and so on."""
    packed = split_last(packed, -1, size)
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)[:, None]
    return (packed[..., None, :] >> shifts & (1 << bits) - 1).flatten(-3)


def _plane(packed: Tensor, size: int, bits: int) -> Tensor:
    return pack_plane(_fields(packed, size, bits), bits)


def _fifth_bits(packed: Tensor) -> Tensor:
    """A plane of the bits of four bytes."""
    return pack_plane((packed[..., None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten(-2), 1)


def _q4_0(blocks: Tensor) -> Tensor:
    return SCHEMES["Q4_0"].join([blocks[..., 2:]], scale=_half(blocks, 0))


def _q4_1(blocks: Tensor) -> Tensor:
    return SCHEMES["Q4_1"].join([blocks[..., 4:]], scale=_half(blocks, 0), minimum=_half(blocks, 2))


def _q5_0(blocks: Tensor) -> Tensor:
    return SCHEMES["Q5_0"].join([blocks[..., 6:], _fifth_bits(blocks[..., 2:6])], scale=_half(blocks, 0))


def _q5_1(blocks: Tensor) -> Tensor:
    planes = [blocks[..., 8:], _fifth_bits(blocks[..., 4:8])]
    return SCHEMES["Q5_1"].join(planes, scale=_half(blocks, 0), minimum=_half(blocks, 2))


def _q8_0(blocks: Tensor) -> Tensor:
    return SCHEMES["Q8_0"].join([blocks[..., 2:]], scale=_half(blocks, 0))


def _q2_k(blocks: Tensor) -> Tensor:
    floats = {"scale": _half(blocks, 80), "minimum": -_half(blocks, 82)}  # which is subtracted in the file
    return SCHEMES["Q2_K"].join([_plane(blocks[..., 16:80], 32, 2)], scales=blocks[..., :16], **floats)


def _q3_k(blocks: Tensor) -> Tensor:
    planes = [_plane(blocks[..., 32:96], 32, 2), _plane(blocks[..., :32], 32, 1)]
    scales = _fields(blocks[..., 96:104], 8, 4) | _fields(blocks[..., 104:108], 4, 2) << 4
    return SCHEMES["Q3_K"].join(planes, scales=scales - 32, scale=_half(blocks, 108))


def _k_scales(blocks: Tensor) -> dict[str, Tensor]:
    """Of Q4_K and Q5_K: eight scales and eight minima of 6 bits, and the float16 that they multiply."""
    low, high, rest = split_last(blocks[..., 4:16], 3, 4).unbind(-2)
    return {
        "scale": _half(blocks, 0),
        "minimum": -_half(blocks, 2),
        "scales": torch.cat((low & 63, (rest & 15) | (low >> 6) << 4), -1),
        "minima": torch.cat((high & 63, (rest >> 4) | (high >> 6) << 4), -1),
    }


def _q4_k(blocks: Tensor) -> Tensor:
    return SCHEMES["Q4_K"].join([_regrouped(blocks[..., 16:], 32)], **_k_scales(blocks))


def _q5_k(blocks: Tensor) -> Tensor:
    planes = [_regrouped(blocks[..., 48:], 32), _plane(blocks[..., 16:48], 32, 1)]
    return SCHEMES["Q5_K"].join(planes, **_k_scales(blocks))


def _q6_k(blocks: Tensor) -> Tensor:
    planes = [_regrouped(blocks[..., :128], 64), _plane(blocks[..., 128:192], 32, 2)]
    return SCHEMES["Q6_K"].join(planes, scales=blocks[..., 192:208], scale=_half(blocks, 208))


def _iq4_nl(blocks: Tensor) -> Tensor:
    return SCHEMES["IQ4_NL"].join([blocks[..., 2:]], scale=_half(blocks, 0))


def _iq4_xs(blocks: Tensor) -> Tensor:
    scales = _fields(blocks[..., 4:8], 1, 4) | _fields(blocks[..., 2:4], 1, 2) << 4
    return SCHEMES["IQ4_XS"].join([blocks[..., 8:]], scales=scales - 32, scale=_half(blocks, 0))


def _mxfp4(blocks: Tensor) -> Tensor:
    return SCHEMES["MXFP4"].join([blocks[..., 1:]], scale=blocks[..., :1])


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
