"""The data of a trace: for each token its alternatives, where attention looked, how full the cache was."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

LOOKED_AT = 3  # tokens named

Weights = npt.NDArray[np.float32]


class Alternative(NamedTuple):
    token_id: int
    text: str
    probability: float


class AttentionRows(NamedTuple):
    """The attention of one layer: weights of the keys at positions first, first + 1, ... of the sequence."""

    first: int
    weights: npt.NDArray[np.float16]  # [heads, keys]; each row sums to 1


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The model's prediction at a position. Probabilities are before temperature, filters and penalties."""

    probability: float  # of the token at this position
    entropy: float  # of the distribution, in nats
    rank: int  # of the token; 1 is the most likely
    alternatives: tuple[Alternative, ...]  # the top_k most likely tokens
    attention: dict[int, AttentionRows]  # by layer: the row of the query that predicts the token, one position before

    @property
    def surprisal(self) -> float:
        """In nats; 0 for a certain token."""
        return -math.log(self.probability) if self.probability else math.inf


class Token(NamedTuple):
    """One token of the prompt."""

    token_id: int
    text: str
    raw: bytes = b""  # its bytes, if it is part of a character: `text` then names them
    prediction: Prediction | None = None  # None if it was not recorded; the first token has none


@dataclass(frozen=True, kw_only=True)
class TraceStep(Prediction):
    """One generated token."""

    token_id: int
    text: str
    raw: bytes = b""  # as in `Token`
    cache_positions: int  # filled when it was chosen; 0 without a cache
    cache_bytes: int  # allocated by the cache
    time_s: float  # of its step, shared among the tokens that the step chose
    drafted: bool = False  # proposed by a drafter, and accepted


class TraceData:
    """Everything that was recorded of a run."""

    def __init__(self) -> None:
        self.title = ""
        self.layers: list[int] = []
        self.heads: list[int] = []
        self.prompt: list[Token] = []
        self.steps: list[TraceStep] = []
        self.cache_capacity = 0  # positions; 0 without a cache
        self.cache_page = 0  # positions of a page; 0 if the cache is not paged
        self.num_cached_tokens = 0  # of the prompt, in the cache before the run
        self.settings: dict[str, Any] = {}  # to repeat the run with; JSON values

    @property
    def predicted_from(self) -> int:
        """Every token of the prompt from this position on has a prediction."""
        missing = (i for i in reversed(range(len(self.prompt))) if self.prompt[i].prediction is None)
        return next(missing, -1) + 1

    @property
    def predicted(self) -> list[Prediction]:
        """Of the tokens of the prompt from `predicted_from` on."""
        return [token.prediction for token in self.prompt[self.predicted_from :] if token.prediction is not None]


def finite(x: float) -> float | None:
    """JSON has no NaN."""
    return x if math.isfinite(x) else None


class Look(NamedTuple):
    position: int
    token_id: int
    text: str
    weight: float


def attention(trace: TraceData, number: int, *, layer: int | None = None, head: int | None = None) -> Weights:
    """The attention of a step to each earlier token, [positions]: of one layer and head, or the mean of all traced."""
    layers = trace.layers if layer is None else [layer]
    heads = slice(None) if head is None else [trace.heads.index(head)]
    total = np.zeros(len(trace.prompt) + number, dtype=np.float32)
    for first, weights in (trace.steps[number].attention[i] for i in layers):
        total[first : first + weights.shape[1]] += weights[heads].mean(0, dtype=np.float32) / len(layers)
    return np.nan_to_num(total)


def looked_at(trace: TraceData, weights: Weights, count: int = LOOKED_AT) -> list[Look]:
    """The tokens with the most attention, without the first one, which is an attention sink."""
    tokens = [*trace.prompt, *trace.steps]
    best = np.argsort(-weights[1:], kind="stable")[:count] + 1
    return [Look(int(i), tokens[i].token_id, tokens[i].text, float(weights[i])) for i in best if weights[i] > 0]
