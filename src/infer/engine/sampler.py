"""From logits to a token: pure functions.

A draw is a function of (seed, position) and the logits, so it does not depend on the cache, the batch, or how many
draws came before; nor on the device, as `backend/gpu/sampling.py` computes the same numbers on a GPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from infer.engine.params import SamplingParams
from infer.nn.draw import Filters, Floats, draw, is_sampled, uniform


def sample(
    logits: Tensor,
    tokens: Sequence[int],
    prompt_len: int,
    params: SamplingParams,
    seed: int,
    allowed: NDArray[np.bool_] | None = None,
) -> int:
    """The token to follow `tokens`, of which the first prompt_len are the prompt. logits: [V].

    allowed: which tokens may, [V]; None: any. -1: none can be chosen, because a logit is NaN or all are -inf.
    """
    scores = penalise(logits.detach().cpu().float().numpy(), tokens, prompt_len, params)
    if allowed is not None:  # behind penalties, which may be infinite
        scores = np.where(allowed, scores, np.float32(-np.inf))
    best = int(scores.argmax())
    if not scores[best] > -np.inf:  # NaN is the largest to argmax
        return -1
    if not is_sampled(params.temperature, params.top_k):
        return best
    filters = Filters.of(params.temperature, params.top_k, params.top_p, params.min_p)
    return draw(scores, filters, uniform(seed, len(tokens)))


def penalise(logits: Floats, tokens: Sequence[int], prompt_len: int, params: SamplingParams) -> Floats:
    """Apply penalties and bias. Repetition looks at prompt and output, presence and frequency at the output alone."""
    wanted = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
    if wanted == (1, 0, 0) and not params.logit_bias:
        return logits
    scores = logits.copy()
    with np.errstate(all="ignore"):  # penalties beyond float32 are infinite, on a device too
        repetition, presence, frequency = np.array(wanted).astype(np.float32)
        if repetition != 1:
            seen = list(set(tokens))
            x = scores[seen]
            scores[seen] = np.where(x > 0, x / repetition, x * repetition)
        if presence != 0 or frequency != 0:
            counts = Counter(tokens[prompt_len:])
            times = np.array(list(counts.values()), np.float32)
            scores[list(counts)] -= presence + frequency * times
        if params.logit_bias:
            scores[list(params.logit_bias)] += np.array(list(params.logit_bias.values())).astype(np.float32)
    return scores
