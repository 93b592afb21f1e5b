"""A trace as a file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from infer.trace.data import TraceData, TraceStep, finite
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
        "prompt": [token._asdict() for token in trace.prompt],
        "cache_capacity": trace.cache_capacity,
        "cache_page": trace.cache_page,
        "known": trace.known,
    }
    for number, step in enumerate(trace.steps):
        attention = {
            str(layer): {"first": rows.first, "weights": _numbers(rows.weights)}
            for layer, rows in step.attention.items()
        }
        yield {"step": number, **without_rows(step), "attention": attention}


def without_rows(step: TraceStep) -> dict[str, Any]:
    """A step as JSON has it, its attention apart."""
    return {
        "token_id": step.token_id,
        "text": step.text,
        "probability": finite(step.probability),
        "entropy": finite(step.entropy),
        "alternatives": [
            alternative._asdict() | {"probability": finite(alternative.probability)}
            for alternative in step.alternatives
        ],
        "cache": {"positions": step.cache_positions, "bytes": step.cache_bytes},
        "time_s": step.time_s,
    }


def _numbers(weights: npt.NDArray[np.float16]) -> list[list[float]]:
    """With the digits that float16 has, and no more."""
    return np.nan_to_num(weights.astype(np.float64)).round(7).tolist()  # type: ignore[no-any-return]


def arrays(trace: TraceData) -> dict[str, Any]:
    """One array for each thing, a row for each step; attention_N: layer N's, float16 [steps, heads, positions]."""
    steps = trace.steps
    positions = len(trace.prompt) + max(0, len(steps) - 1)
    attention = {}
    for layer in trace.layers:
        weights = np.zeros((len(steps), len(trace.heads), positions), dtype=np.float16)
        for number, step in enumerate(steps):
            first, rows = step.attention[layer]
            weights[number, :, first : first + rows.shape[1]] = rows
        attention[f"attention_{layer}"] = weights
    return {
        "prompt_ids": np.array([token.token_id for token in trace.prompt]),
        "prompt_texts": np.array([token.text for token in trace.prompt]),
        "token_ids": np.array([step.token_id for step in steps]),
        "token_texts": np.array([step.text for step in steps]),
        "probability": np.array([step.probability for step in steps]),
        "entropy": np.array([step.entropy for step in steps]),
        "top_k_ids": np.array([[a.token_id for a in step.alternatives] for step in steps]),
        "top_k_probabilities": np.array([[a.probability for a in step.alternatives] for step in steps]),
        "cache_positions": np.array([step.cache_positions for step in steps]),
        "cache_bytes": np.array([step.cache_bytes for step in steps]),
        "time_s": np.array([step.time_s for step in steps]),
        "layers": np.array(trace.layers),
        "heads": np.array(trace.heads),
        **attention,
    }
