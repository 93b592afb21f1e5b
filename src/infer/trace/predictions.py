"""Predictions from logits, of generated tokens and of the prompt; and how much of a prompt is recorded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from infer.config import ModelConfig
from infer.trace.data import Alternative, Prediction
from infer.trace.text import token_text

PROMPT_ROWS = 256  # the last tokens of a prompt, which are recorded
# Attention weights recorded of a prompt: 32 MB in memory, less than 16 MB in a page. Of a long prompt, fewer rows are.
PROMPT_WEIGHTS = 2**24


def choice(logits: Tensor, top_k: int) -> tuple[float, list[tuple[int, float]]]:
    """Of logits [V]: the entropy in nats, and the top_k ids with their probabilities."""
    probabilities = logits.float().softmax(-1)
    best = probabilities.topk(min(top_k, len(probabilities)))
    return _entropy(probabilities).item(), list(zip(best.indices.tolist(), best.values.tolist(), strict=True))


def predictions(
    logits: Tensor, tokens: Sequence[int], before: Sequence[int], tokenizer: Any, top_k: int
) -> list[Prediction]:
    """The predictions of n tokens by logits [n, V], without attention. before: the token before each."""
    probabilities = logits.float().softmax(-1)
    best = probabilities.topk(min(top_k, probabilities.shape[-1]))
    own = probabilities.gather(-1, torch.tensor(tokens, device=logits.device)[:, None])  # [n, 1]
    ranks = (probabilities > own).sum(-1) + 1
    columns = (own[:, 0], _entropy(probabilities), ranks, best.indices, best.values)
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
        for last, probability, entropy, rank, ids, values in zip(before, *(c.tolist() for c in columns), strict=True)
    ]


def _entropy(probabilities: Tensor) -> Tensor:
    entropy: Tensor = torch.special.entr(probabilities).sum(-1)
    return entropy


def first_query(config: ModelConfig, layers: Sequence[int], heads: int, prompt_len: int, limit: int) -> int:
    """The first query of a prompt to record: of the last `limit`, as many as PROMPT_WEIGHTS allows.

    Each query predicts the next token. The last query is not among them: it predicts the first generated token.
    """
    first, weights = prompt_len - 1, 0
    if prompt_len > config.max_position_embeddings:
        return first  # the context slides: each step recomputes the prompt at other positions
    while first > max(0, prompt_len - 1 - limit):
        weights += row_weights(config, layers, heads, first - 1)
        if weights > PROMPT_WEIGHTS:
            break
        first -= 1
    return first


def row_weights(config: ModelConfig, layers: Sequence[int], heads: int, query: int) -> int:
    """The number of attention weights of a query."""
    return heads * sum(min(query + 1, config.window(layer) or query + 1) for layer in layers)
