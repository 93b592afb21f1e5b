"""From logits to what the model expected."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from infer.trace.data import Alternative, Prediction
from infer.trace.text import token_text


def choice(logits: Tensor, top_k: int) -> tuple[float, list[tuple[int, float]]]:
    """What a token is chosen from, logits [V]: the entropy in nats, and the likeliest ids with their probabilities."""
    probabilities = logits.float().softmax(-1)
    best = probabilities.topk(min(top_k, len(probabilities)))
    return _entropy(probabilities).item(), list(zip(best.indices.tolist(), best.values.tolist(), strict=True))


def predictions(
    logits: Tensor, tokens: Sequence[int], before: Sequence[int], tokenizer: Any, top_k: int
) -> list[Prediction]:
    """Of logits [n, V], how they expected n tokens. before: the token in front of each. Without attention."""
    probabilities = logits.float().softmax(-1)
    best = probabilities.topk(min(top_k, probabilities.shape[-1]))
    own = probabilities.gather(-1, torch.tensor(tokens, device=logits.device)[:, None])  # [n, 1]
    ranks = (probabilities > own).sum(-1) + 1
    numbers = zip(
        own[:, 0].tolist(),
        _entropy(probabilities).tolist(),
        ranks.tolist(),
        best.indices.tolist(),
        best.values.tolist(),
        before,
        strict=True,
    )
    return [
        Prediction(
            probability=probability,
            entropy=entropy,
            rank=rank,
            alternatives=tuple(
                Alternative(i, token_text(tokenizer, i, last), p) for i, p in zip(ids, values, strict=True)
            ),
            attention={},
        )
        for probability, entropy, rank, ids, values, last in numbers
    ]


def _entropy(probabilities: Tensor) -> Tensor:
    entropy: Tensor = torch.special.entr(probabilities).sum(-1)
    return entropy
