"""Tool calls as JSON: where such a text ends while it comes in, and the calls in it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple, NoReturn

DEEPEST = 100  # brackets within each other: far from what Python's own decoder takes, and from what anybody means

_SPACE = re.compile(r"[ \t\r\n]*")
_OUTSIDE_STRINGS = re.compile(r"[ \t\r\na-zA-Z0-9+\-.,:]*")
_WITHIN_STRING = re.compile(r'[^"\\\x00-\x1f]*')
_BETWEEN = re.compile(r"[ \t\r\n,:]*")


class Call(NamedTuple):
    name: str
    arguments: str  # an object, as the model wrote it


class JsonText:
    """Finds the end of an object or a list, in time linear in its length, however it is cut into pieces.

    It gives up at the first character that no JSON has there, so that a text which only begins like a call is not
    waited for; whether the whole is valid is for `read_calls` to say.
    """

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self.done = False
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def feed(self, text: str) -> str | None:
        """What of the text is behind the end, "" before that; None if this is no JSON, and nothing was taken."""
        at = 0
        while at < len(text) and not self.done:
            if self._escaped:
                self._escaped = False
                at += 1
                continue
            at = self._skip(text, at)
            if at < len(text) and not self._take(text[at]):
                return None
            at += 1
        self.pieces.append(text[:at])
        return text[at:]

    def _skip(self, text: str, at: int) -> int:
        """Past all characters that change nothing."""
        pattern = _WITHIN_STRING if self._in_string else _OUTSIDE_STRINGS if self._depth else _SPACE
        match = pattern.match(text, at)
        return at if match is None else match.end()

    def _take(self, character: str) -> bool:
        """One that changes something, if it may stand here."""
        if self._in_string:
            self._in_string = character != '"'
            self._escaped = character == "\\"
            return not self._in_string or self._escaped
        if character in "{[":
            self._depth += 1
            return self._depth <= DEEPEST
        if character in "}]" and self._depth:
            self._depth -= 1
            self.done = not self._depth
            return True
        self._in_string = character == '"' and self._depth > 0
        return self._in_string


def read_calls(text: str) -> list[Call]:
    """The calls that a JSON object, or a list of them, makes; none if any part of it is something else."""
    try:
        value, _ = _DECODER.raw_decode(text, start := _end_of(_SPACE, text, 0))
    except ValueError:
        return []
    starts = [at for _, at, _ in _parts(text, start)] if isinstance(value, list) else [start]
    calls = [_call(text, at) for at in starts]
    return [] if None in calls else [call for call in calls if call is not None]


def _call(text: str, at: int) -> Call | None:
    if text[at] != "{":
        return None
    parts = list(_parts(text, at))
    members = {key: part for (key, _, _), part in zip(parts[::2], parts[1::2], strict=True)}
    name = members.get("name", (None,))[0]
    arguments, start, end = members.get("arguments") or members.get("parameters") or (None, 0, 0)
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    return Call(name, text[start:end])


def _parts(text: str, at: int) -> Iterator[tuple[Any, int, int]]:
    """The values in a valid list, or the keys and values in turn of an object, each with where it is."""
    at = _end_of(_BETWEEN, text, at + 1)
    while text[at] not in "]}":
        value, end = _DECODER.raw_decode(text, at)
        yield value, at, end
        at = _end_of(_BETWEEN, text, end)


def _end_of(pattern: re.Pattern[str], text: str, at: int) -> int:
    match = pattern.match(text, at)
    return at if match is None else match.end()


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse)  # Python's reads NaN and Infinity
