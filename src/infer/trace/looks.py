"""Where a step looked, in all, and at which tokens most."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from infer.trace.data import TraceData

LOOKED_AT = 3  # tokens named

Weights = npt.NDArray[np.float32]


class Look(NamedTuple):
    position: int
    token_id: int
    text: str
    weight: float


def attention(trace: TraceData, number: int, *, layer: int | None = None, head: int | None = None) -> Weights:
    """What a step gave to each token before it, [positions]: of one layer and head, or the mean of those traced."""
    layers = trace.layers if layer is None else [layer]
    heads = slice(None) if head is None else [trace.heads.index(head)]
    total = np.zeros(len(trace.prompt) + number, dtype=np.float32)
    for first, weights in (trace.steps[number].attention[i] for i in layers):
        total[first : first + weights.shape[1]] += weights[heads].mean(0, dtype=np.float32) / len(layers)
    return np.nan_to_num(total)


def looked_at(trace: TraceData, weights: Weights, count: int = LOOKED_AT) -> list[Look]:
    """The tokens that got most, the first apart: it gets whatever attention is needed nowhere else."""
    tokens = [*trace.prompt, *trace.steps]
    best = np.argsort(-weights[1:], kind="stable")[:count] + 1
    return [Look(int(i), tokens[i].token_id, tokens[i].text, float(weights[i])) for i in best if weights[i] > 0]
