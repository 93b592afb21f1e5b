"""What log-probabilities are made of, computed where the logits are: the numbers of `nn/draw.py`, bit by bit."""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from infer.nn import draw

TOGETHER = 16  # rows whose temporaries are there at once
IDS = 2**32 - 1


def likelihoods(logits: Tensor, tokens: Tensor, top: int) -> Tensor:
    """Of each row of logits [n, V]: int64 [n, 3 + 2 top], as `engine.logprobs.logprobs_from_device` takes them.

    The mass of all tokens, the bits of the highest logit and of that of its token, the ids of the likeliest, and the
    bits of their logits. Of equal ones, the lower ids come first.
    """
    pieces = zip(torch.split(logits, TOGETHER), torch.split(tokens, TOGETHER), strict=True)
    return torch.cat([_of_rows(x.float() + 0.0, ids, top) for x, ids in pieces])  # of two zeros, none is the lower


def _of_rows(x: Tensor, tokens: Tensor, top: int) -> Tensor:
    highest = x.amax(1, keepdim=True)
    depth = torch.where(x == highest, 0.0, (highest - x) * (2**draw.OCTAVE / math.log(2)))
    total = _masses(depth.clamp(max=draw.MAX_DEPTH).int()).sum(1, keepdim=True)
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
    return out >> (depth >> draw.OCTAVE) + (61 - draw.MASS)


@cache
def _halvings(device: torch.device) -> Tensor:
    return torch.from_numpy(draw.HALVINGS).to(device)
