"""The type and range of values that somebody else has written: files, and callers of `ModelConfig`."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any, NamedTuple


class Kind(NamedTuple):
    """What a value has to be."""

    words: str
    accepts: Callable[[Any], bool]

    def check(self, name: str, value: Any) -> None:
        if not self.accepts(value):
            raise ValueError(f"{name} must be {self.words}, not {shown(value)}")


def whole(least: int, most: int) -> Kind:
    words = f"a positive integer up to {most:,}" if least == 1 else f"a whole number from {least:,} to {most:,}"
    return Kind(words, lambda value: type(value) is int and least <= value <= most)


def number(words: str, accepts: Callable[[Any], bool]) -> Kind:
    """Comparisons are exact and never true of NaN, so `accepts` needs only those."""
    return Kind(words, lambda value: isinstance(value, Real) and not isinstance(value, bool) and accepts(value))


def list_of(kind: Kind, most: int) -> Kind:
    def accepts(value: Any) -> bool:
        return isinstance(value, list | tuple) and len(value) <= most and all(map(kind.accepts, value))

    return Kind(f"a list of at most {most:,}, each {kind.words}", accepts)


def either(*kinds: Kind) -> Kind:
    return Kind(" or ".join(kind.words for kind in kinds), lambda value: any(kind.accepts(value) for kind in kinds))


def _is_text(value: Any) -> bool:
    """Half a character is text to JSON and to Python, but cannot be encoded."""
    return isinstance(value, str) and not any("\ud800" <= c <= "\udfff" for c in value)


ABOVE_0 = number("above 0", lambda value: 0 < value < 1e30)
FLAG = Kind("true or false", lambda value: type(value) is bool)
TEXT = Kind("a text", _is_text)
OBJECT = Kind("an object", lambda value: isinstance(value, Mapping))
ANY = Kind("anything", lambda value: True)
TOKEN_ID = whole(0, 2**31 - 1)
TOKEN_IDS = either(TOKEN_ID, list_of(TOKEN_ID, 1024))


def checked(raw: Mapping[str, Any], kinds: Mapping[str, Kind]) -> dict[str, Any]:
    """Those of the values that have a kind, each of its kind. None says nothing."""
    found = {name: raw[name] for name in kinds if raw.get(name) is not None}
    for name, value in found.items():
        kinds[name].check(name, value)
    return found


_repr = reprlib.Repr()
_repr.maxlevel, _repr.maxstring, _repr.maxother = 2, 80, 80


def shown(value: Any) -> str:
    """The value as a message may hold it: not a megabyte, and no list of lists of lists."""
    if isinstance(value, int) and value.bit_length() > 128:  # Python refuses to print the longest
        return f"a number of {value.bit_length():,} bits"
    return _repr.repr(value)
