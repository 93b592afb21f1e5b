"""Log-probabilities of tokens by the model's own distribution, before temperature, filters and penalties.

The sum over the vocabulary adds integers (`nn/draw.py`), so it does not depend on the order: a log-probability is the
same on every path, and within 1e-7 of exact arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from infer.nn.draw import MASS, Floats, Ints, log_mass


class TokenLogprobs(NamedTuple):
    """The log-probability of a token, and the most likely tokens at its position."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # ids and log-probabilities, the most likely first


def logprobs_of(logits: Tensor, tokens: Sequence[int], top: int) -> list[TokenLogprobs]:
    """Of n tokens, from the logits [n, V] that they are chosen from. top: number of most likely tokens to include."""
    found = []
    for scores, token in zip(logits.detach().cpu().float().numpy(), tokens, strict=True):
        best = top_tokens(scores, top)
        values = _logprobs(scores, [token, *best.tolist()])
        found.append(TokenLogprobs(token, values[0], tuple(zip(best.tolist(), values[1:], strict=True))))
    return found


def logprobs_from_device(terms: Sequence[int], token: int, top: int) -> TokenLogprobs:
    """The same from a row of `backend.gpu.logprobs.logprob_terms`, which has `top` or more most likely tokens."""
    mass, count = terms[0], (len(terms) - 3) // 2
    ids = terms[3 : 3 + min(top, count)]
    highest, *scores = np.array([*terms[1:3], *terms[3 + count :]], np.int32).view(np.float32).tolist()
    values = _of_scores(scores[: 1 + len(ids)], highest, math.log(mass) - MASS * math.log(2))
    return TokenLogprobs(token, values[0], tuple(zip(ids, values[1:], strict=True)))


def top_tokens(scores: Floats, count: int) -> Ints:
    """The ids of the highest scores, in descending order; equal scores by ascending id."""
    count = min(count, len(scores))
    if count == 0:
        return np.empty(0, np.int64)
    lowest = np.partition(scores, len(scores) - count)[len(scores) - count]
    candidates = np.flatnonzero(scores >= lowest)
    return candidates[np.argsort(-scores[candidates], kind="stable")][:count]


def _logprobs(scores: Floats, tokens: Sequence[int]) -> list[float]:
    highest = float(scores.max())
    if math.isnan(highest) or highest == -math.inf:
        return [math.nan] * len(tokens)
    return _of_scores([float(scores[token]) for token in tokens], highest, log_mass(scores))


def _of_scores(scores: Sequence[float], highest: float, total: float) -> list[float]:
    """total: the logarithm of the sum of e^(score - highest) over the vocabulary."""
    if highest == math.inf:  # infinite scores share all probability
        return [-total if score == highest else -math.inf for score in scores]
    return [score - highest - total for score in scores]
