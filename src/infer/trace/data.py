"""What a traced run leaves behind: for each token how it was chosen, where attention looked, how full the cache was."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class Token(NamedTuple):
    token_id: int
    text: str


class Alternative(NamedTuple):
    token_id: int
    text: str
    probability: float


class AttentionRows(NamedTuple):
    """Where one layer looked: weights of the keys at positions first, first + 1, ... of the sequence."""

    first: int
    weights: npt.NDArray[np.float16]  # [heads, keys]; each row sums to 1


@dataclass(frozen=True)
class TraceStep:
    """One generated token. Probabilities are the model's own: before temperature, filters and penalties."""

    token_id: int
    text: str
    probability: float
    entropy: float  # of all probabilities, in nats
    alternatives: tuple[Alternative, ...]  # the top_k likeliest tokens, this one among them or not
    attention: dict[int, AttentionRows]  # by layer: the row of the query that the token was chosen from
    cache_positions: int  # filled after the step; 0 where no cache took part
    cache_bytes: int  # held by that cache
    time_s: float


class TraceData:
    """All that was recorded of a run."""

    def __init__(self) -> None:
        self.title = ""
        self.layers: list[int] = []
        self.heads: list[int] = []
        self.prompt: list[Token] = []
        self.steps: list[TraceStep] = []
        self.cache_capacity = 0  # positions; 0 without a cache
        self.cache_page = 0  # positions of a page; 0 where the cache has none
        self.known = 0  # positions of the prompt that the cache held before the run


def finite(x: float) -> float | None:
    """JSON has no NaN."""
    return x if math.isfinite(x) else None
