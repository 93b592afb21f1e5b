"""Traces made of random numbers, for tests of what shows them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from infer.trace import Trace, TraceStep
from infer.trace.data import Alternative, AttentionRows, Prediction, Token


def make_trace(
    steps: int = 12,
    prompt: int = 5,
    layers: Sequence[int] = (0, 3),
    heads: Sequence[int] = (0, 1, 2),
    *,
    window: int | None = None,
    texts: Sequence[str] = (),
    top_k: int = 4,
    capacity: int = 40,
    seed: int = 0,
    prompt_rows: int = 0,
) -> Trace:
    """Every other token is the likeliest, the rest are not among the top_k. window: of the second layer.

    texts: of the first tokens generated; the others are words of their own. prompt_rows: tokens of the prompt, the last
    ones, that have a prediction.
    """
    random = np.random.default_rng(seed)
    trace = Trace(top_k=top_k)
    trace.title, trace.layers, trace.heads, trace.cache_capacity = "made up", list(layers), list(heads), capacity
    trace.prompt = [Token(i, f" p{i}") for i in range(prompt)]
    for i in range(prompt - prompt_rows, prompt):
        trace.prompt[i] = trace.prompt[i]._replace(prediction=_prediction(trace, i, window, random))
    for s in range(steps):
        keys = prompt + s
        probabilities = -np.sort(-random.dirichlet(np.ones(top_k + 2) * 0.5))
        text = texts[s] if s < len(texts) else f" w{s}"
        alternatives = [Alternative(1000 + i, f" alt{i}", float(probabilities[i])) for i in range(top_k)]
        if s % 2 == 0:
            alternatives[0] = Alternative(100 + s, text, float(probabilities[0]))
        attention = {}
        for number, layer in enumerate(layers):
            seen = min(keys, window) if window and number == 1 else keys
            weights = random.dirichlet(np.ones(seen) * 0.2, size=len(heads)).astype(np.float16)
            attention[layer] = AttentionRows(keys - seen, weights)
        trace.steps.append(
            TraceStep(
                token_id=100 + s,
                text=text,
                probability=float(probabilities[0 if s % 2 == 0 else -1]),
                entropy=float(random.uniform(0, 6)),
                rank=1 if s % 2 == 0 else top_k + 1,
                alternatives=tuple(alternatives),
                attention=attention,
                cache_positions=keys,
                cache_bytes=1000 * capacity,
                time_s=0.01,
            )
        )
    return trace


def _prediction(trace: Trace, position: int, window: int | None, random: np.random.Generator) -> Prediction:
    """Of a token of the prompt, which is not among the likeliest."""
    attention = {}
    for number, layer in enumerate(trace.layers):
        seen = min(position, window) if window and number == 1 else position
        weights = random.dirichlet(np.ones(seen) * 0.2, size=len(trace.heads)).astype(np.float16)
        attention[layer] = AttentionRows(position - seen, weights)
    probabilities = -np.sort(-random.dirichlet(np.ones(trace.top_k + 2)))
    return Prediction(
        probability=float(probabilities[-1]),
        entropy=float(random.uniform(0, 6)),
        rank=trace.top_k + 2,
        alternatives=tuple(Alternative(2000 + i, f" other{i}", float(probabilities[i])) for i in range(trace.top_k)),
        attention=attention,
    )
