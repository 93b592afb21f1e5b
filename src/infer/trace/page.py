"""A trace as a page: one HTML file that needs only a browser. `read_page` reads what is needed to repeat its run."""

from __future__ import annotations

import base64
import html
import json
import re
import zlib
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from infer.trace.data import AttentionRows, Prediction, TraceData, TraceStep, finite
from infer.trace.text import joined

NOTEBOOK_HEIGHT = 900  # pixels
MAX_BYTES = 2**30  # far more than any page has
_DATA = re.compile(r'<script type="application/json" id="data">(.*?)</script>', re.DOTALL)
LEVELS = 200  # of the square root of a weight; the 256 of a byte would take more space, and look the same
_RUN = {
    "model": "model",
    "model_type": "family",
    "dtype": "dtype",
    "weights": "weights",
    "device": "device",
    "backend": "kernels",
    "chat": "chat template",
    "system": "system message",
    "thinking": "thinking",
}
_FIRST = ("temperature", "seed", "max_new_tokens")  # among the sampling settings
_HIDDEN = ("n", "logprobs", "prompt_logprobs")  # a trace has one sample, and log-probabilities do not change it
_CONSTRAINTS = ("json_schema", "regex", "grammar")  # shown only if they are set
_CACHE = {
    "kv_cache": "KV cache",
    "cache_dtype": "cache dtype",
    "prefill_chunk": "prefill chunk",
    "on_full": "beyond the context",
    "top_k": "alternatives kept",
    "prompt_rows": "prompt rows kept",
}


def page(trace: TraceData) -> str:
    """The template, filled with the trace; its script draws everything."""
    if not trace.steps:
        raise ValueError("the trace has no steps: generate at least one token with it")
    parts = {
        "title": html.escape(trace.title),
        "data": _json(_data(trace)),
        "rows": "\n".join(
            f'<script type="text/plain" class="rows">{_packed_rows(trace, layer)}</script>' for layer in trace.layers
        ),
    }
    template = resources.files("infer.trace").joinpath("page.html").read_text(encoding="utf-8")
    # In one pass, so that no text of the trace is treated as a placeholder.
    return re.sub(r"@@(\w+)@@", lambda place: parts[place[1]], template)


def in_notebook(trace: TraceData) -> str:
    """The page for a notebook, in a sandboxed frame."""
    return (
        f'<iframe title="{html.escape(trace.title)} · trace" sandbox="allow-scripts" '
        f'style="width: 100%; height: {NOTEBOOK_HEIGHT}px; border: 0" srcdoc="{html.escape(page(trace))}"></iframe>'
    )


def _data(trace: TraceData) -> dict[str, Any]:
    """The data of a page, without the attention weights."""
    raw = [token.raw for token in trace.prompt] + [step.raw for step in trace.steps]
    return {
        "title": trace.title,
        "layers": trace.layers,
        "heads": trace.heads,
        "capacity": trace.cache_capacity,
        "page": trace.cache_page,
        "cached": trace.num_cached_tokens,
        "levels": LEVELS,
        "prompt": [[token.token_id, token.text] for token in trace.prompt],
        "steps": [_step(step) for step in trace.steps],
        # Predictions of the prompt's tokens, from this position on.
        "predicted_from": trace.predicted_from,
        "predictions": [_prediction(prediction) for prediction in trace.predicted],
        # By layer: the position of the first key in the rows of each prediction and step. The last key is at the
        # position before the token.
        "first": [[rows.first for rows in _rows(trace, layer)] for layer in trace.layers],
        "partial": [position for position, part in enumerate(raw) if part],  # tokens that are parts of characters
        "joined": joined(raw),  # the characters they form
        "settings": trace.settings,
        "about": shown_settings(trace),
    }


def shown_settings(trace: TraceData) -> list[tuple[str, str]]:
    """Names and values, as text: JavaScript numbers would round a 64-bit seed."""
    settings = trace.settings
    params = {
        name: value
        for name, value in settings.get("params", {}).items()
        if name not in _HIDDEN and (value is not None or name not in _CONSTRAINTS)
    }
    order = [name for name in _FIRST if name in params] + [name for name in params if name not in _FIRST]
    return [
        *((name, _shown(key, settings[key])) for key, name in _RUN.items() if key in settings),
        *((name.replace("_", " "), _shown(name, params[name])) for name in order),
        *((name, _shown(key, settings[key])) for key, name in _CACHE.items() if key in settings),
        *((name, str(version)) for name, version in settings.get("versions", {}).items()),
    ]


def _shown(name: str, value: Any) -> str:
    if name == "top_k" and value in (None, 0):
        return "off"
    if value is None or value in ([], {}, ""):
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(repr, value))
    if isinstance(value, dict):
        return ", ".join(f"{key}: {each}" for key, each in value.items())
    return str(value)


def _rows(trace: TraceData, layer: int) -> list[AttentionRows]:
    """Of the predicted tokens of the prompt, then of the steps."""
    return [each.attention[layer] for each in (*trace.predicted, *trace.steps)]


def _step(step: TraceStep) -> dict[str, Any]:
    return _prediction(step) | {
        "id": step.token_id,
        "text": step.text,
        "positions": step.cache_positions,
        "bytes": step.cache_bytes,
        "time": _number(step.time_s),
        "drafted": step.drafted,
    }


def _prediction(prediction: Prediction) -> dict[str, Any]:
    return {
        "probability": _number(prediction.probability),
        "entropy": _number(prediction.entropy),
        "rank": prediction.rank,
        "alternatives": [[a.token_id, a.text, _number(a.probability)] for a in prediction.alternatives],
    }


def _number(x: float) -> float | None:
    return finite(float(f"{x:.5g}"))


def _json(data: Any) -> str:
    """For a script element: without "<", no text can end the element or open a comment."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


def _packed_rows(trace: TraceData, layer: int) -> str:
    """A byte for each weight, [heads, keys] of each token in turn: its square root, to keep digits of small ones."""
    rows = (np.nan_to_num(rows.weights.astype(np.float32)) for rows in _rows(trace, layer))
    deflate = zlib.compressobj(strategy=zlib.Z_FILTERED)  # suits small numbers; rows do not repeat each other
    packed = [deflate.compress(np.rint(LEVELS * np.sqrt(row)).astype(np.uint8).tobytes()) for row in rows]
    return base64.b64encode(b"".join(packed) + deflate.flush()).decode("ascii")


class SavedRun(NamedTuple):
    """The settings and the tokens of a page."""

    settings: dict[str, Any]
    prompt: list[int]
    tokens: list[int]
    texts: list[str]  # of the tokens
    layers: list[int]
    heads: list[int]


def read_page(path: Path) -> SavedRun:
    """Read the page of a trace; raises ValueError for other files."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path} to repeat a run from")
    if path.stat().st_size > MAX_BYTES:
        raise ValueError(f"{path} is too large to be the page of a trace")
    try:
        found = _DATA.search(path.read_text(encoding="utf-8"))
        if found is None:
            raise ValueError("it holds no trace")
        return _saved_run(json.loads(found[1]))
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise ValueError(f"{path} is not a page of a trace that can be repeated: {_reason(error)}") from None


def _saved_run(data: Any) -> SavedRun:
    if "settings" not in data or not data["settings"].get("params"):
        raise ValueError("it has no settings")
    prompt = [token_id for token_id, _ in data["prompt"]]
    tokens = [step["id"] for step in data["steps"]]
    texts = [step["text"] for step in data["steps"]]
    numbers = (*prompt, *tokens, *data["layers"], *data["heads"])
    if not prompt or not tokens or any(type(number) is not int for number in numbers):
        raise ValueError("its tokens are not integers")
    return SavedRun(data["settings"], prompt, tokens, texts, data["layers"], data["heads"])


def _reason(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8 text"
    if isinstance(error, json.JSONDecodeError):
        return "its data is not valid JSON"
    return str(error) if type(error) is ValueError else "its data has another form"
