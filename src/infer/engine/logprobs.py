"""Log-probabilities of tokens, by the model's own distribution: before temperature, filters and penalties.

The sum over the vocabulary is one of whole numbers (`nn/draw.py`), so it does not depend on its order: the numbers are
the same on every path, and within 1e-7 of those of exact arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from infer.nn.draw import MASS, Floats, Ints, log_mass


class TokenLogprobs(NamedTuple):
    """How likely a token was, and the likeliest ones in its place."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # ids and log-probabilities, the likeliest first


def logprobs_of(logits: Tensor, tokens: Sequence[int], top: int) -> list[TokenLogprobs]:
    """Of each of n tokens, from the logits [n, V] that it would be chosen from, with so many of the likeliest."""
    found = []
    for scores, token in zip(logits.detach().cpu().float().numpy(), tokens, strict=True):
        best = likeliest(scores, top)
        values = _logprobs(scores, [token, *best.tolist()])
        found.append(TokenLogprobs(token, values[0], tuple(zip(best.tolist(), values[1:], strict=True))))
    return found


def logprobs_from_device(numbers: Sequence[int], token: int, top: int) -> TokenLogprobs:
    """The same from what a device has found: `backend.gpu.likelihoods`, with at least so many of the likeliest."""
    mass, count = numbers[0], (len(numbers) - 3) // 2
    ids = numbers[3 : 3 + min(top, count)]
    highest, *scores = np.array([*numbers[1:3], *numbers[3 + count :]], np.int32).view(np.float32).tolist()
    values = _of_scores(scores[: 1 + len(ids)], highest, math.log(mass) - MASS * math.log(2))
    return TokenLogprobs(token, values[0], tuple(zip(ids, values[1:], strict=True)))


def likeliest(scores: Floats, count: int) -> Ints:
    """The ids of the highest scores, in order; of equal ones the lower ids."""
    count = min(count, len(scores))
    if count == 0:
        return np.empty(0, np.int64)
    least = np.partition(scores, len(scores) - count)[len(scores) - count]
    among = np.flatnonzero(scores >= least)
    return among[np.argsort(-scores[among], kind="stable")][:count]


def _logprobs(scores: Floats, tokens: Sequence[int]) -> list[float]:
    highest = float(scores.max())
    if math.isnan(highest) or highest == -math.inf:
        return [math.nan] * len(tokens)
    return _of_scores([float(scores[token]) for token in tokens], highest, log_mass(scores))


def _of_scores(scores: Sequence[float], highest: float, total: float) -> list[float]:
    """total: the logarithm of the sum of e^(score - highest), over all."""
    if highest == math.inf:  # these share everything
        return [-total if score == highest else -math.inf for score in scores]
    return [score - highest - total for score in scores]
