"""A trace as a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from infer.trace.record import Trace, TraceStep


def save(trace: Trace, path: Path) -> None:
    """By the suffix of the file's name."""
    check_path(path)
    if path.suffix == ".jsonl":
        path.write_text("".join(f"{json.dumps(line)}\n" for line in json_lines(trace)), encoding="utf-8")
    elif path.suffix == ".npz":
        with path.open("wb") as file:
            np.savez_compressed(file, **arrays(trace))
    else:
        from infer.trace.page import page

        path.write_text(page(trace), encoding="utf-8")


def check_path(path: Path) -> None:
    """Refuse a file that could not be written, before there is anything to write."""
    if path.suffix not in (".jsonl", ".npz", ".html"):
        raise ValueError(f"a trace is saved as .jsonl, .npz or .html, not as {path.name!r}")
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder, not a file to write to")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {path.parent} to write {path.name} to")


def json_lines(trace: Trace) -> list[dict[str, Any]]:
    """The run, then a line for each step."""
    run = {
        "model": trace.title,
        "layers": trace.layers,
        "heads": trace.heads,
        "prompt": [token._asdict() for token in trace.prompt],
        "cache_capacity": trace.cache_capacity,
    }
    return [run, *(_line(number, step) for number, step in enumerate(trace.steps))]


def _line(number: int, step: TraceStep) -> dict[str, Any]:
    return {
        "step": number,
        "token_id": step.token_id,
        "text": step.text,
        "probability": step.probability,
        "entropy": step.entropy,
        "alternatives": [alternative._asdict() for alternative in step.alternatives],
        "attention": {
            str(layer): {"first": rows.first, "weights": [[float(f"{w:.5g}") for w in row] for row in rows.weights]}
            for layer, rows in step.attention.items()
        },
        "cache": {"positions": step.cache_positions, "bytes": step.cache_bytes},
        "time_s": step.time_s,
    }


def arrays(trace: Trace) -> dict[str, Any]:
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
        "token_ids": np.array([step.token_id for step in steps]),
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
