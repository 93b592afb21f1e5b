"""The safetensors files of a folder: one, or several with an index of what each holds."""

from __future__ import annotations

from pathlib import Path

from infer.loader.files import read_json
from infer.values import OBJECT, TEXT, Kind, shown

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
FILE_NAME = Kind("the name of a file beside it", lambda value: TEXT.accepts(value) and is_file_name(value))


def read_index(path: Path) -> dict[str, str]:
    """Which file holds which tensor: names of files in the same folder, never elsewhere."""
    names = read_json(path).get("weight_map", {})
    try:
        OBJECT.check("weight_map", names)
        for tensor, file in names.items():
            FILE_NAME.check(f"weight_map of {shown(tensor)}", file)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return dict(names)


def is_file_name(name: str) -> bool:
    return name not in ("", ".", "..") and not set(name) & {"/", "\\", "\0"} and len(name) < 256
