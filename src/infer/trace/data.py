"""What a traced run leaves behind: for each token how it was chosen, where attention looked, how full the cache was."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt


class Alternative(NamedTuple):
    token_id: int
    text: str
    probability: float


class AttentionRows(NamedTuple):
    """Where one layer looked: weights of the keys at positions first, first + 1, ... of the sequence."""

    first: int
    weights: npt.NDArray[np.float16]  # [heads, keys]; each row sums to 1


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What the model expected at a position. Probabilities are its own: before temperature, filters and penalties."""

    probability: float  # of the token that is there
    entropy: float  # of all probabilities, in nats
    rank: int  # of that token, from 1, the likeliest, on
    alternatives: tuple[Alternative, ...]  # the top_k likeliest tokens, that token among them or not
    attention: dict[int, AttentionRows]  # by layer: the row of the query that predicts it, the token before

    @property
    def surprisal(self) -> float:
        """In nats: 0 for a token that was certain."""
        return -math.log(self.probability) if self.probability else math.inf


class Token(NamedTuple):
    """One token of the prompt."""

    token_id: int
    text: str
    raw: bytes = b""  # its bytes, if it holds part of a character: `text` then names them
    prediction: Prediction | None = None  # None where none was kept; nothing predicts the first token


@dataclass(frozen=True, kw_only=True)
class TraceStep(Prediction):
    """One generated token."""

    token_id: int
    text: str
    raw: bytes = b""  # as of `Token`
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
        self.settings: dict[str, Any] = {}  # with which the run can be repeated, as JSON has them

    @property
    def predicted_from(self) -> int:
        """The position from which on every token of the prompt has a prediction."""
        missing = (i for i in reversed(range(len(self.prompt))) if self.prompt[i].prediction is None)
        return next(missing, -1) + 1


def finite(x: float) -> float | None:
    """JSON has no NaN."""
    return x if math.isfinite(x) else None
