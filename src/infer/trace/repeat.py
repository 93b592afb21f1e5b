"""Reading a saved page: what it takes to run it again, and what came out then."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

DATA = re.compile(r'<script type="application/json" id="data">(.*?)</script>', re.DOTALL)
MOST_BYTES = 2**30  # far more than any page that is written


class SavedRun(NamedTuple):
    settings: dict[str, Any]
    prompt: list[int]
    tokens: list[int]
    texts: list[str]  # of the tokens
    layers: list[int]
    heads: list[int]


def read_page(path: Path) -> SavedRun:
    """Refuses what is not a page that `Trace.save` wrote."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path} to repeat a run from")
    if path.stat().st_size > MOST_BYTES:
        raise ValueError(f"{path} is too large for the page of a trace")
    try:
        found = DATA.search(path.read_text(encoding="utf-8"))
        if found is None:
            raise ValueError("it holds no trace")
        return _saved_run(json.loads(found[1]))
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise ValueError(f"{path} is not a page of a trace that can be repeated: {_reason(error)}") from None


def _saved_run(data: Any) -> SavedRun:
    if "settings" not in data or not data["settings"].get("params"):
        raise ValueError("it does not say with which settings it ran")
    prompt = [token_id for token_id, _ in data["prompt"]]
    tokens = [step["id"] for step in data["steps"]]
    texts = [step["text"] for step in data["steps"]]
    numbers = (*prompt, *tokens, *data["layers"], *data["heads"])
    if not prompt or not tokens or any(type(number) is not int for number in numbers):
        raise ValueError("its tokens are no whole numbers")
    return SavedRun(data["settings"], prompt, tokens, texts, data["layers"], data["heads"])


def _reason(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return "it is not text in UTF-8"
    if isinstance(error, json.JSONDecodeError):
        return "its data are broken"
    return str(error) if type(error) is ValueError else "its data are of another form"
