"""A trace as a file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from infer.trace.data import AttentionRows, Prediction, Token, TraceData, TraceStep, finite
from infer.trace.page import page


def save(trace: TraceData, path: Path) -> None:
    """By the suffix of the file's name."""
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
    """Refuse a file that could not be written, before there is anything to write."""
    if path.suffix not in (".jsonl", ".npz", ".html"):
        raise ValueError(f"a trace is saved as .jsonl, .npz or .html, not as {path.name!r}")
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
        "known": trace.known,
    }
    for number, step in enumerate(trace.steps):
        yield {"step": number, **without_rows(step), "attention": _attention(step.attention)}


def _prompt_token(token: Token) -> dict[str, Any]:
    """With what was predicted there, if that was kept."""
    known = {"token_id": token.token_id, "text": token.text}
    if token.prediction is None:
        return known
    return known | _prediction(token.prediction) | {"attention": _attention(token.prediction.attention)}


def without_rows(step: TraceStep) -> dict[str, Any]:
    """A step as JSON has it, its attention apart."""
    return {
        "token_id": step.token_id,
        "text": step.text,
        **_prediction(step),
        "cache": {"positions": step.cache_positions, "bytes": step.cache_bytes},
        "time_s": step.time_s,
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
    return {str(layer): {"first": rows.first, "weights": _numbers(rows.weights)} for layer, rows in attention.items()}


def _numbers(weights: npt.NDArray[np.float16]) -> list[list[float]]:
    """With the digits that float16 has, and no more."""
    return np.nan_to_num(weights.astype(np.float64)).round(7).tolist()  # type: ignore[no-any-return]


def arrays(trace: TraceData) -> dict[str, Any]:
    """One array for each thing, a row for each step; attention_N: layer N's, float16 [steps, heads, positions].

    prompt_attention_N and the other prompt_ arrays have a row for each token of the prompt from prompt_from on.
    """
    steps, start = trace.steps, trace.predicted_from
    predicted = [token.prediction for token in trace.prompt[start:] if token.prediction is not None]
    positions = len(trace.prompt) + max(0, len(steps) - 1)
    attention = {}
    for layer in trace.layers:
        attention[f"attention_{layer}"] = _dense(trace, steps, layer, positions)
        attention[f"prompt_attention_{layer}"] = _dense(trace, predicted, layer, len(trace.prompt) - 1)
    return {
        "prompt_ids": np.array([token.token_id for token in trace.prompt]),
        "prompt_texts": np.array([token.text for token in trace.prompt]),
        "prompt_from": np.array(start),
        "prompt_probability": np.array([each.probability for each in predicted]),
        "prompt_entropy": np.array([each.entropy for each in predicted]),
        "prompt_rank": np.array([each.rank for each in predicted], dtype=np.int64),
        "token_ids": np.array([step.token_id for step in steps]),
        "token_texts": np.array([step.text for step in steps]),
        "probability": np.array([step.probability for step in steps]),
        "entropy": np.array([step.entropy for step in steps]),
        "rank": np.array([step.rank for step in steps]),
        "top_k_ids": np.array([[a.token_id for a in step.alternatives] for step in steps]),
        "top_k_probabilities": np.array([[a.probability for a in step.alternatives] for step in steps]),
        "cache_positions": np.array([step.cache_positions for step in steps]),
        "cache_bytes": np.array([step.cache_bytes for step in steps]),
        "time_s": np.array([step.time_s for step in steps]),
        "layers": np.array(trace.layers),
        "heads": np.array(trace.heads),
        "settings": np.array(json.dumps(trace.settings)),
        **attention,
    }


def _dense(trace: TraceData, kept: Sequence[Prediction], layer: int, positions: int) -> npt.NDArray[np.float16]:
    """[kept, heads, positions], 0 where a key was not seen."""
    weights = np.zeros((len(kept), len(trace.heads), positions), dtype=np.float16)
    for number, each in enumerate(kept):
        first, rows = each.attention[layer]
        weights[number, :, first : first + rows.shape[1]] = rows
    return weights
