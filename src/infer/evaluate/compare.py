"""How far two models, or one in two precisions, are apart on a text: at each token, what each finds likely next."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from infer.engine.model import Model
from infer.evaluate.perplexity import CONTEXT, exponential, negative_log_likelihood, scored_windows


@dataclass(frozen=True)
class Comparison:
    kl_divergence: float  # mean nats per token, of the second from the first
    largest_kl_divergence: float  # at any token
    same_likeliest: float  # share of tokens at which both find the same one likeliest
    perplexity: float  # of the first
    other_perplexity: float
    tokens: int


@torch.inference_mode()
def compare(
    model: Model,
    other: Model,
    token_ids: Sequence[int],
    *,
    context: int | None = None,
    stride: int | None = None,
    prefix: Sequence[int] = (),
    progress: Callable[[int, float], None] | None = None,
) -> Comparison:
    """Compare two models with one vocabulary on a text, which is read as `perplexity` reads it.

    progress: hears after each window how many tokens have been compared, and the divergence so far.
    """
    if model.config.vocab_size != other.config.vocab_size:
        raise ValueError(
            f"the models have {model.config.vocab_size:,} and {other.config.vocab_size:,} tokens: "
            "only models of one vocabulary can be compared"
        )
    context = min(model.config.max_position_embeddings, other.config.max_position_embeddings, context or CONTEXT)
    nats, other_nats, divergence, largest, same, tokens = 0.0, 0.0, 0.0, 0.0, 0, 0
    both = (scored_windows(each, token_ids, context=context, stride=stride, prefix=prefix) for each in (model, other))
    for first, second in zip(*both, strict=True):
        for (logits, targets), (other_logits, other_targets) in zip(first.logits(), second.logits(), strict=True):
            nats += negative_log_likelihood(logits, targets)
            other_nats += negative_log_likelihood(other_logits, other_targets)
            expected = torch.log_softmax(logits, -1).cpu().double()
            apart = (expected.exp() * (expected - torch.log_softmax(other_logits, -1).cpu().double())).sum(-1)
            divergence += apart.sum().item()
            largest = max(largest, apart.max().item())
            same += int((logits.argmax(-1).cpu() == other_logits.argmax(-1).cpu()).sum())
        tokens += first.end - first.scored
        if math.isnan(divergence):
            raise ValueError(f"a model's logits hold a NaN between tokens {first.scored:,} and {first.end:,}")
        if progress is not None:
            progress(tokens, divergence / tokens)
    return Comparison(
        max(0.0, divergence / tokens),
        max(0.0, largest),
        same / tokens,
        exponential(nats / tokens),
        exponential(other_nats / tokens),
        tokens,
    )
