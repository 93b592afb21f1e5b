"""From logits to a token: pure functions.

A draw is a function of (seed, position) and the logits, so it does not depend on the cache, the batch, or how many
draws came before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from infer.engine.params import SamplingParams
from infer.ops.uniform import uniform


def sample(logits: Tensor, tokens: Sequence[int], prompt_len: int, params: SamplingParams, seed: int) -> int:
    """The token to follow `tokens`, of which the first prompt_len are the prompt. logits: [V].

    -1: none can be chosen, because a logit is NaN or all are -inf.
    """
    logits = penalise(logits.float(), tokens, prompt_len, params)
    if params.temperature == 0:
        # numpy's argmax is four times as fast as torch's on a CPU.
        best = int(logits.numpy().argmax() if logits.is_cpu else logits.argmax())
        return best if float(logits[best]) > -torch.inf else -1  # a NaN is the largest to both
    probabilities = filtered(logits, params).double()
    # Invert the cumulative distribution. Tokens of probability 0 end where they begin, so `right` passes over them.
    cumulative = probabilities.cumsum(0)
    if not float(cumulative[-1]) > 0:
        return -1
    draw = uniform(seed, len(tokens)) * cumulative[-1]
    token = int(torch.searchsorted(cumulative, draw.reshape(1), right=True))
    return min(token, int(probabilities.nonzero()[-1]))


def penalise(logits: Tensor, tokens: Sequence[int], prompt_len: int, params: SamplingParams) -> Tensor:
    """Apply penalties and bias. Repetition looks at prompt and output, presence and frequency at the output alone."""
    if params.repetition_penalty != 1:
        seen = torch.tensor(sorted(set(tokens)), device=logits.device)
        scores = logits[seen]
        scores = torch.where(scores > 0, scores / params.repetition_penalty, scores * params.repetition_penalty)
        logits = logits.index_put((seen,), scores)
    if (params.presence_penalty or params.frequency_penalty) and len(tokens) > prompt_len:
        counts = Counter(tokens[prompt_len:])
        index = torch.tensor(list(counts), device=logits.device)
        times = torch.tensor(list(counts.values()), dtype=logits.dtype, device=logits.device)
        logits = logits.index_add(0, index, -(params.presence_penalty + params.frequency_penalty * times))
    if params.logit_bias:
        index = torch.tensor(list(params.logit_bias), device=logits.device)
        bias = torch.tensor(list(params.logit_bias.values()), dtype=logits.dtype, device=logits.device)
        logits = logits.index_add(0, index, bias)
    return logits


def filtered(logits: Tensor, params: SamplingParams) -> Tensor:
    """Probabilities [V] after temperature, top_k, top_p and min_p."""
    logits = (logits - logits.max()) / params.temperature  # at most 0: a tiny temperature overflows to -inf alone
    if params.top_k and params.top_k < logits.shape[-1]:
        kth = logits.topk(params.top_k).values[-1]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    probabilities = logits.softmax(-1)
    if params.top_p < 1:
        ranked = probabilities.sort(descending=True).values
        before = ranked.cumsum(-1) - ranked  # probability of all likelier tokens
        last = ranked[(before < params.top_p).sum() - 1]
        probabilities = probabilities.masked_fill(probabilities < last, 0)  # its equals stay, as with top_k
    if params.min_p > 0:
        probabilities = probabilities.masked_fill(probabilities < params.min_p * probabilities.max(), 0)
    return probabilities / probabilities.sum()
