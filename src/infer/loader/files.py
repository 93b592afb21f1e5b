"""Files from untrusted sources: regular files only, with a limit on their size; and the hashes of downloaded ones."""

from __future__ import annotations

import gc
import hashlib
import json
import re
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from infer.folders import cache_folder
from infer.values import OBJECT, TEXT, Kind, short_repr

MB = 2**20
# A JSON value takes up to 20 times its bytes in Python (empty lists and dicts). Real files have at most 2 MB.
MAX_SETTINGS = 4 * MB
SAFETENSORS = "model.safetensors"
INDEX = "model.safetensors.index.json"
TEKKEN, SENTENCEPIECE = "tekken.json", "tokenizer.model"  # tokenizers of folders without tokenizer.json
SPLIT_NAME = re.compile(r"(.+)-\d{5}-of-(\d{5})\.gguf")
MAX_SPLIT = 4096  # files


def is_there(path: Path) -> bool:
    """Whether there is such a file. Refuses anything but a regular file: reading a FIFO may never end."""
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is not a regular file")
    return path.is_file()


def read_text(path: Path, most: int = MAX_SETTINGS) -> str:
    if not is_there(path):
        raise FileNotFoundError(f"there is no file {path}")
    if (size := path.stat().st_size) > most:
        raise ValueError(f"{path} has {size:,} bytes: the limit is {most:,}")
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from None


def read_json(path: Path) -> dict[str, Any]:
    text = read_text(path)
    try:
        return parse_json(text)
    except ValueError as error:
        raise ValueError(f"{path} {error}") from None


def parse_json(text: str) -> dict[str, Any]:
    """A JSON object without duplicate names. The caller puts the file's name before an error message."""
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
    """JSON parsers disagree about which of two values counts."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = Counter(name for name, _ in pairs)
        raise ValueError(f"it has {short_repr(names.most_common(1)[0][0])} twice")
    return found


def read_index(path: Path) -> dict[str, str]:
    """Which safetensors file holds which tensor: names of files in the same folder, never elsewhere."""
    names = read_json(path).get("weight_map", {})
    try:
        OBJECT.check("weight_map", names)
        for tensor, file in names.items():
            _FILE_NAME.check(f"weight_map of {short_repr(tensor)}", file)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return dict(names)


def _is_file_name(name: Any) -> bool:
    return TEXT.accepts(name) and name not in ("", ".", "..") and not set(name) & {*"/\\\0"} and len(name) < 256


_FILE_NAME = Kind("the name of a file beside it", _is_file_name)


def has_hash(file: Path, sha256: str, *, again: bool = False) -> bool:
    """Whether the file has this hash. A file whose size and mtime match its last check is hashed only with `again`."""
    stat = file.stat()
    seen = f"{file.resolve()} {stat.st_size} {stat.st_mtime_ns}"
    record = cache_folder() / "checked" / sha256
    with suppress(OSError, ValueError):
        if not again and record.read_text() == seen:
            return True
    with file.open("rb") as source:
        if hashlib.file_digest(source, "sha256").hexdigest() != sha256:
            return False
    with suppress(OSError):  # files in a read-only cache are hashed each time
        record.parent.mkdir(parents=True, exist_ok=True)
        record.write_text(seen)
    return True


def split_names(name: str) -> list[str]:
    """The names of all files of a model, by that of any of them."""
    if (found := SPLIT_NAME.fullmatch(name)) is None or not 1 <= int(found[2]) <= MAX_SPLIT:
        return [name]
    return [f"{found[1]}-{number:05}-of-{found[2]}.gguf" for number in range(1, int(found[2]) + 1)]
