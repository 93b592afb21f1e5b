"""A trace as a file, or as a pandas DataFrame."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from infer.trace.data import AttentionRows, Prediction, Token, TraceData, TraceStep, finite
from infer.trace.page import page

STEP = ("cache_positions", "cache_bytes", "time_s", "drafted")  # what a step has beside its token's prediction


def save(trace: TraceData, path: Path) -> None:
    """In the format of the file's suffix."""
    check_path(path)
    if path.suffix == ".jsonl":
        with path.open("w", encoding="utf-8") as file:
            file.writelines(f"{json.dumps(line)}\n" for line in json_lines(trace))
    elif path.suffix == ".npz":
        with path.open("wb") as file:
            np.savez_compressed(file, **arrays(trace))
    else:
        path.write_text(page(trace), encoding="utf-8")


def check_path(path: Path) -> None:
    """Refuse a file that cannot be written, before the run."""
    if path.suffix not in (".jsonl", ".npz", ".html"):
        raise ValueError(f"a trace is saved as .jsonl, .npz or .html, not as {path.name!r}")
    check_writable(path)


def check_writable(path: Path) -> None:
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder, not a file to write to")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {path.parent} to write {path.name} to")


def json_lines(trace: TraceData) -> Iterator[dict[str, Any]]:
    """The run, then a line for each step."""
    yield {
        "model": trace.title,
        "layers": trace.layers,
        "heads": trace.heads,
        "settings": trace.settings,
        "prompt": [_prompt_token(token) for token in trace.prompt],
        "cache_capacity": trace.cache_capacity,
        "cache_page": trace.cache_page,
        "num_cached_tokens": trace.num_cached_tokens,
    }
    for number, step in enumerate(trace.steps):
        yield {"step": number, **without_rows(step), "attention": _attention(step.attention)}


def _prompt_token(token: Token) -> dict[str, Any]:
    """With its prediction, if that was recorded."""
    about = {"token_id": token.token_id, "text": token.text}
    if token.prediction is None:
        return about
    return about | _prediction(token.prediction) | {"attention": _attention(token.prediction.attention)}


def without_rows(step: TraceStep) -> dict[str, Any]:
    """A step as JSON, without its attention."""
    return {
        "token_id": step.token_id,
        "text": step.text,
        **_prediction(step),
        "cache": {"positions": step.cache_positions, "bytes": step.cache_bytes},
        "time_s": step.time_s,
        "drafted": step.drafted,
    }


def _prediction(prediction: Prediction) -> dict[str, Any]:
    return {
        "probability": finite(prediction.probability),
        "entropy": finite(prediction.entropy),
        "rank": prediction.rank,
        "alternatives": [
            alternative._asdict() | {"probability": finite(alternative.probability)}
            for alternative in prediction.alternatives
        ],
    }


def _attention(attention: dict[int, AttentionRows]) -> dict[str, Any]:
    """Weights are rounded to the digits of float16."""
    weights = {layer: np.nan_to_num(rows.weights.astype(np.float64)).round(7) for layer, rows in attention.items()}
    return {str(layer): {"first": attention[layer].first, "weights": weights[layer].tolist()} for layer in attention}


def arrays(trace: TraceData) -> dict[str, Any]:
    """Arrays with a row for each step; attention_N: of layer N, float16 [steps, heads, positions].

    prompt_attention_N and the other prompt_ arrays have a row for each token of the prompt from prompt_from on.
    """
    steps, predicted = trace.steps, trace.predicted
    positions = len(trace.prompt) + max(0, len(steps) - 1)
    found = {
        "prompt_ids": [token.token_id for token in trace.prompt],
        "prompt_texts": [token.text for token in trace.prompt],
        "prompt_from": trace.predicted_from,
        "token_ids": [step.token_id for step in steps],
        "token_texts": [step.text for step in steps],
        "top_k_ids": [[a.token_id for a in step.alternatives] for step in steps],
        "top_k_probabilities": [[a.probability for a in step.alternatives] for step in steps],
        "layers": trace.layers,
        "heads": trace.heads,
        "settings": json.dumps(trace.settings),
    }
    for name in ("probability", "entropy", "rank"):
        found[f"prompt_{name}"] = [getattr(each, name) for each in predicted]
    for name in ("probability", "entropy", "rank", *STEP):
        found[name] = [getattr(step, name) for step in steps]
    arrays = {name: np.array(values) for name, values in found.items()}
    arrays["prompt_rank"] = arrays["prompt_rank"].astype(np.int64)  # without predictions, it would hold floats
    for layer in trace.layers:
        arrays[f"attention_{layer}"] = _dense(trace, steps, layer, positions)
        arrays[f"prompt_attention_{layer}"] = _dense(trace, predicted, layer, len(trace.prompt) - 1)
    return arrays


def _dense(trace: TraceData, recorded: Sequence[Prediction], layer: int, positions: int) -> npt.NDArray[np.float16]:
    """[recorded, heads, positions], 0 where a key was not visible."""
    weights = np.zeros((len(recorded), len(trace.heads), positions), dtype=np.float16)
    for number, each in enumerate(recorded):
        first, rows = each.attention[layer]
        weights[number, :, first : first + rows.shape[1]] = rows
    return weights


def as_frame(trace: TraceData) -> Any:
    """See `Trace.to_pandas`."""
    try:
        pandas = importlib.import_module("pandas")
    except ImportError:
        raise ImportError("to_pandas needs pandas, which is not installed: pip install pandas") from None
    tokens = [(None, token, token.prediction, None) for token in trace.prompt]
    steps = [(number, step, step, step) for number, step in enumerate(trace.steps)]
    rows = [_row(*each) for each in (*tokens, *steps)]
    if not rows:
        raise ValueError("the trace is empty: pass it to `generate` first")
    frame = pandas.DataFrame(rows)
    frame.index.name = "position"
    integers = dict.fromkeys(("step", "rank", "cache_positions", "cache_bytes"), "Int64")
    return frame.astype(integers | {"drafted": "boolean"})  # may be missing


def _row(number: int | None, token: Any, found: Prediction | None, step: TraceStep | None) -> dict[str, Any]:
    """found: the prediction of the token, step: the step that generated it; None: there is none."""
    top = found.alternatives[0] if found is not None and found.alternatives else None
    return (
        {"step": number, "token_id": token.token_id, "text": token.text}
        | {name: getattr(found, name, None) for name in ("probability", "surprisal", "entropy", "rank")}
        | {"top_token": getattr(top, "text", None), "top_probability": getattr(top, "probability", None)}
        | {name: getattr(step, name, None) for name in STEP}
    )
