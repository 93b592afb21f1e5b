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

from infer.trace.data import Alternative, TraceData, TraceStep, finite

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


def _data(trace: TraceData) -> dict[str, Any]:
    """All but the attention weights."""
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
        # The position of the first key in each step's rows, by layer; the last is the position before the token.
        "first": [[step.attention[layer].first for step in trace.steps] for layer in trace.layers],
    }


def _step(step: TraceStep) -> dict[str, Any]:
    return {
        "id": step.token_id,
        "text": step.text,
        "probability": _number(step.probability),
        "entropy": _number(step.entropy),
        "alternatives": [_alternative(alternative) for alternative in step.alternatives],
        "positions": step.cache_positions,
        "bytes": step.cache_bytes,
        "time": _number(step.time_s),
    }


def _alternative(alternative: Alternative) -> list[Any]:
    return [alternative.token_id, alternative.text, _number(alternative.probability)]


def _number(x: float) -> float | None:
    return finite(float(f"{x:.5g}"))


def _json(data: Any) -> str:
    """For a script element: without "<", no text in it can end the element or open a comment."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


def _rows(trace: TraceData, layer: int) -> str:
    """A byte for each weight, all steps' [heads, keys] one behind another: the root, so that small ones keep digits."""
    rows = (np.nan_to_num(step.attention[layer].weights.astype(np.float32)) for step in trace.steps)
    deflate = zlib.compressobj(strategy=zlib.Z_FILTERED)  # for small numbers: rows do not repeat each other
    packed = [deflate.compress(np.rint(LEVELS * np.sqrt(row)).astype(np.uint8).tobytes()) for row in rows]
    return base64.b64encode(b"".join(packed) + deflate.flush()).decode("ascii")
