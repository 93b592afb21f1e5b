"""From logits to a token on the host: pure functions.

A draw is a function of the seed, the position and the logits. It does not depend on the cache, the batch or earlier
draws; nor on the device: `backend/gpu/sampling.py` computes the same numbers on a GPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from infer.engine.params import SamplingParams
from infer.nn.draw import Floats, draw, uniform
from infer.nn.packed import PackedSettings


def sample(
    logits: Tensor,
    tokens: Sequence[int],
    prompt_len: int,
    params: SamplingParams,
    seed: int,
    allowed: NDArray[np.bool_] | None = None,
    settings: PackedSettings | None = None,
) -> int:
    """The token that follows `tokens`, of which the first prompt_len are the prompt. logits: [V].

    allowed: mask of the tokens to choose from, [V]; None: all. settings: the params, if they are packed already.
    Returns -1 if a logit is NaN or all are -inf.
    """
    settings = params.packed(seed, logits.shape[-1]) if settings is None else settings
    scores = penalize(logits.detach().cpu().float().numpy(), tokens, prompt_len, params)
    if allowed is not None:  # after penalties, which may be infinite
        scores = np.where(allowed, scores, np.float32(-np.inf))
    best = int(scores.argmax())
    if not scores[best] > -np.inf:  # to argmax, NaN is the largest
        return -1
    if "sampled" not in settings.flags:
        return best
    return draw(scores, settings.columns, uniform(seed, len(tokens)))


def penalize(logits: Floats, tokens: Sequence[int], prompt_len: int, params: SamplingParams) -> Floats:
    """Apply penalties and bias: the repetition penalty to tokens of prompt and output, the others to the output."""
    penalties = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
    if penalties == (1, 0, 0) and not params.logit_bias:
        return logits
    scores = logits.copy()
    with np.errstate(all="ignore"):  # penalties beyond float32 are infinite, as on a GPU
        repetition, presence, frequency = np.array(penalties).astype(np.float32)
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
