"""A trace as a table for pandas: a row for each token, first of the prompt, then those generated.

position           in the sequence, from 0 on: the index of the table
step               of a generated token, from 0 on; missing for the prompt's
token_id, text     the token; bytes that are part of a character are named: <0xE2><0x82>
probability        that the model gave it, before temperature, filters and penalties
surprisal          the negative logarithm of that, in nats
entropy            of all probabilities there, in nats
rank               of the token among all, from 1, the likeliest, on
likeliest          the text of the token of rank 1, and
likeliest_probability
cache_positions    filled after the step
cache_bytes        held by the cache
time_s             that the step took

What was not recorded is missing: of the prompt's first token, which nothing predicts, and of those that were cut.
"""

from __future__ import annotations

import importlib
from typing import Any

from infer.trace.data import Token, TraceData, TraceStep


def as_frame(trace: TraceData) -> Any:
    try:
        pandas = importlib.import_module("pandas")
    except ImportError:
        raise ImportError("to_pandas needs pandas, which is not installed: pip install pandas") from None
    rows = [*(_of_prompt(token) for token in trace.prompt), *(_of_step(i, step) for i, step in enumerate(trace.steps))]
    if not rows:
        raise ValueError("nothing was recorded yet: give the trace to `generate`")
    frame = pandas.DataFrame(rows)
    frame.index.name = "position"
    whole = dict.fromkeys(("step", "rank", "cache_positions", "cache_bytes"), "Int64")  # with missing ones
    return frame.astype(whole)


def _of_prompt(token: Token) -> dict[str, Any]:
    return _row(token, token.prediction) | {"cache_positions": None, "cache_bytes": None, "time_s": None}


def _of_step(number: int, step: TraceStep) -> dict[str, Any]:
    cache = {"cache_positions": step.cache_positions, "cache_bytes": step.cache_bytes}
    return _row(step, step) | {"step": number} | cache | {"time_s": step.time_s}


def _row(token: Any, found: Any) -> dict[str, Any]:
    """found: the prediction, or None."""
    best = found.alternatives[0] if found is not None and found.alternatives else None
    return {
        "step": None,
        "token_id": token.token_id,
        "text": token.text,
        "probability": None if found is None else found.probability,
        "surprisal": None if found is None else found.surprisal,
        "entropy": None if found is None else found.entropy,
        "rank": None if found is None else found.rank,
        "likeliest": None if best is None else best.text,
        "likeliest_probability": None if best is None else best.probability,
    }
