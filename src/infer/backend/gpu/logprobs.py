"""The terms of log-probabilities, computed on the device, with the bits of `nn/draw.py`."""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from infer.nn import draw, packed

ROWS_AT_ONCE = 16  # limits the memory of temporaries
IDS = 2**32 - 1


def logprob_terms(logits: Tensor, tokens: Tensor, top: int) -> Tensor:
    """For each row of logits [n, V], the input of `engine.logprobs.logprobs_from_device`: int64 [n, 3 + 2 top].

    The total mass of all tokens, the bits of the highest logit and of the token's logit, the ids of the top tokens, and
    the bits of their logits. Of equal logits, lower ids come first.
    """
    pieces = zip(torch.split(logits, ROWS_AT_ONCE), torch.split(tokens, ROWS_AT_ONCE), strict=True)
    return torch.cat([_of_rows(x.float() + 0.0, ids, top) for x, ids in pieces])  # -0.0 and 0.0 are equal


def _of_rows(x: Tensor, tokens: Tensor, top: int) -> Tensor:
    highest = x.amax(1, keepdim=True)
    depth = torch.where(x == highest, 0.0, (highest - x) * (2**packed.OCTAVE / math.log(2)))
    total = _masses(depth.clamp(max=packed.MAX_DEPTH).int()).sum(1, keepdim=True)
    bits = x.view(torch.int32).long()
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    best = (ordered << 32 | IDS - torch.arange(x.shape[1], device=x.device)).topk(top, 1).values
    ids = IDS - (best & IDS)
    found = torch.cat((tokens.clamp(min=0)[:, None], ids), 1)
    return torch.cat(
        (total, highest.view(torch.int32).long(), bits.gather(1, found)[:, :1], ids, bits.gather(1, ids)), 1
    )


def _masses(depth: Tensor) -> Tensor:
    """`draw.masses`"""
    table = _halvings(depth.device)
    line = (1 << 30) - ((depth & (1 << draw.LINE) - 1) * draw.SLOPE >> 13)
    out = table[(depth >> draw.LINE & len(table) - 1).long()] * line
    return out >> (depth >> packed.OCTAVE) + (61 - draw.MASS)


@cache
def _halvings(device: torch.device) -> Tensor:
    return torch.from_numpy(draw.HALVINGS).to(device)
