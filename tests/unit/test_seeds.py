"""docs/seeds.md: every name that it gives for one of the documents' is there."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import typer.main

from infer.cli.commands import app

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\| (?P<asked>.*?) \| (?P<here>.*?) \| (?P<differs>.*?) ?\|$", re.MULTILINE)


def rows() -> list[tuple[str, str, str]]:
    found = [match.groups() for match in ROW.finditer((ROOT / "docs" / "seeds.md").read_text(encoding="utf-8"))]
    return [row for row in found if row[0] not in ("in the document", "---")]


def names() -> list[str]:
    return sorted({name for _, here, _ in rows() for name in re.findall(r"`([^`]+)`", here)})


def resolve(name: str) -> Any:
    """infer.cache.debug.debugged: the longest beginning that is a module, and what it holds."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            value = getattr(value, part)
        return value
    raise ModuleNotFoundError(name)


def check(name: str) -> None:
    """A command with its option, a path, or a name in Python."""
    if name.startswith("infer "):
        _, command, *options = name.split()
        known = typer.main.get_command(app).commands[command]  # type: ignore[attr-defined]
        spelled = {word for parameter in known.params for word in (*parameter.opts, *parameter.secondary_opts)}
        assert set(options) <= spelled
    elif "/" in name or name.endswith(".toml"):
        assert (ROOT / name).exists(), name
    else:
        resolve(name)


@pytest.mark.parametrize("name", names())
def test_is_there(name: str) -> None:
    check(name)


@pytest.mark.parametrize("name", ["infer.KVCache.nonsense", "infer.nonsense", "infer bench --nonsense", "docs/x.md"])
def test_what_is_not_is_found_out(name: str) -> None:
    with pytest.raises((AttributeError, ModuleNotFoundError, AssertionError)):
        check(name)


def test_every_row_says_where_or_why_not() -> None:
    assert len(rows()) > 60
    for asked, here, differs in rows():
        assert re.search("`", here) or (here == "not here" and len(differs) > 40), asked
