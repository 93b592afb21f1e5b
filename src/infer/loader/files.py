"""Files that somebody else has written: plain ones, of a size that fits what they hold."""

from __future__ import annotations

import gc
import json
from collections import Counter
from pathlib import Path
from typing import Any

from infer.values import shown

MB = 2**20
# A value takes Python 20 times its bytes at worst: empty lists and dicts. Real ones have at most 2 MB.
MAX_SETTINGS = 4 * MB


def is_there(path: Path) -> bool:
    """Whether there is such a file. Anything else by that name is refused: reading a FIFO may never end."""
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is no plain file")
    return path.is_file()


def read_text(path: Path, most: int = MAX_SETTINGS) -> str:
    if not is_there(path):
        raise FileNotFoundError(f"there is no file {path}")
    if (size := path.stat().st_size) > most:
        raise ValueError(f"{path} has {size:,} bytes: {most:,} are read at most")
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text in UTF-8: {error}") from None


def read_json(path: Path) -> dict[str, Any]:
    text = read_text(path)
    try:
        return parse_json(text)
    except ValueError as error:
        raise ValueError(f"{path} {error}") from None


def parse_json(text: str) -> dict[str, Any]:
    """A JSON object that gives no name twice. A message lacks its subject: the file."""
    collects = gc.isenabled()
    gc.disable()  # a million lists of a tokenizer's merges take twice as long with it
    try:
        contents = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not valid JSON: {error}") from None
    finally:
        if collects:
            gc.enable()
    if not isinstance(contents, dict):
        raise ValueError(f"should hold a JSON object, not {type(contents).__name__}")
    return contents


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Which of two values is meant depends on who reads it."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = Counter(name for name, _ in pairs)
        raise ValueError(f"it has {shown(names.most_common(1)[0][0])} twice")
    return found
