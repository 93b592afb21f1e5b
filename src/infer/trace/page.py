"""A trace as a page to look at: one HTML file that needs nothing but a browser."""

from __future__ import annotations

import base64
import html
import json
import re
import zlib
from importlib import resources
from typing import Any

import numpy as np

from infer.trace.data import Alternative, Prediction, TraceData, TraceStep, finite
from infer.trace.settings import shown_settings
from infer.trace.text import joined

NOTEBOOK_HEIGHT = 900  # pixels
LEVELS = 200  # that the root of a weight is rounded to; a byte has more, which take space and cannot be seen


def page(trace: TraceData) -> str:
    """The template with the trace in it; the script in there draws everything."""
    if not trace.steps:
        raise ValueError("there is nothing to show: the trace has no steps; generate at least one token with it")
    parts = {
        "title": html.escape(trace.title),
        "data": _json(_data(trace)),
        "rows": "\n".join(
            f'<script type="text/plain" class="rows">{_rows(trace, layer)}</script>' for layer in trace.layers
        ),
    }
    template = resources.files("infer.trace").joinpath("page.html").read_text(encoding="utf-8")
    # In one pass, so that nothing inside a part is taken for a place to fill.
    return re.sub(r"@@(\w+)@@", lambda place: parts[place[1]], template)


def in_notebook(trace: TraceData) -> str:
    """The page as a notebook shows it: in a frame of its own, which can reach nothing around it."""
    return (
        f'<iframe title="{html.escape(trace.title)} · trace" sandbox="allow-scripts" '
        f'style="width: 100%; height: {NOTEBOOK_HEIGHT}px; border: 0" srcdoc="{html.escape(page(trace))}"></iframe>'
    )


def _data(trace: TraceData) -> dict[str, Any]:
    """All but the attention weights."""
    predicted = _predicted(trace)
    raw = [token.raw for token in trace.prompt] + [step.raw for step in trace.steps]
    return {
        "title": trace.title,
        "layers": trace.layers,
        "heads": trace.heads,
        "capacity": trace.cache_capacity,
        "page": trace.cache_page,
        "known": trace.known,
        "levels": LEVELS,
        "prompt": [[token.token_id, token.text] for token in trace.prompt],
        "steps": [_step(step) for step in trace.steps],
        # Of the prompt's last tokens, from that position on: how the model expected each.
        "predicted_from": trace.predicted_from,
        "predictions": [_prediction(prediction) for prediction in predicted],
        # The position of the first key in the rows of each prediction and step, by layer; the last is the position
        # before the token.
        "first": [[each.attention[layer].first for each in (*predicted, *trace.steps)] for layer in trace.layers],
        "partial": [position for position, part in enumerate(raw) if part],  # tokens with parts of characters
        "joined": joined(raw),  # and what they make together
        "settings": trace.settings,
        "about": shown_settings(trace),
    }


def _predicted(trace: TraceData) -> list[Prediction]:
    return [token.prediction for token in trace.prompt[trace.predicted_from :] if token.prediction is not None]


def _step(step: TraceStep) -> dict[str, Any]:
    return _prediction(step) | {
        "id": step.token_id,
        "text": step.text,
        "positions": step.cache_positions,
        "bytes": step.cache_bytes,
        "time": _number(step.time_s),
    }


def _prediction(prediction: Prediction) -> dict[str, Any]:
    return {
        "probability": _number(prediction.probability),
        "entropy": _number(prediction.entropy),
        "rank": prediction.rank,
        "alternatives": [_alternative(alternative) for alternative in prediction.alternatives],
    }


def _alternative(alternative: Alternative) -> list[Any]:
    return [alternative.token_id, alternative.text, _number(alternative.probability)]


def _number(x: float) -> float | None:
    return finite(float(f"{x:.5g}"))


def _json(data: Any) -> str:
    """For a script element: without "<", no text in it can end the element or open a comment."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


def _rows(trace: TraceData, layer: int) -> str:
    """A byte for each weight, [heads, keys] of one token behind another: the root, so that small ones keep digits."""
    kept = (*_predicted(trace), *trace.steps)
    rows = (np.nan_to_num(each.attention[layer].weights.astype(np.float32)) for each in kept)
    deflate = zlib.compressobj(strategy=zlib.Z_FILTERED)  # for small numbers: rows do not repeat each other
    packed = [deflate.compress(np.rint(LEVELS * np.sqrt(row)).astype(np.uint8).tobytes()) for row in rows]
    return base64.b64encode(b"".join(packed) + deflate.flush()).decode("ascii")
