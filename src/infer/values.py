"""The type and range of values that somebody else has written: in files, and as arguments of public functions."""

from __future__ import annotations

import functools
import inspect
import os
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from numbers import Real
from typing import Any, NamedTuple, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


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


def _has(attribute: str) -> Callable[[Any], bool]:
    return lambda value: hasattr(value, attribute) and not isinstance(value, type)


# What public functions take. Models, tokenizers and caches may be anybody's: they are known by what they can do.
MODEL = Kind("a loaded model, as in `model, config = load_model(name)`", _has("parameters"))
TOKENIZER = Kind("a tokenizer, as in `tokenizer = Tokenizer(name)`", _has("decode"))
CACHE = Kind("a cache, as `KVCache.allocate` makes", _has("capacity"))
NAME = Kind("a name or path", lambda value: isinstance(value, str | os.PathLike))
STRING = Kind("a string", lambda value: isinstance(value, str))
TOKENS = Kind(
    "token ids, as in `tokenizer.encode(text)`",
    lambda value: isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping),
)
MESSAGES = Kind(
    'a list of messages, like [{"role": "user", "content": "Hello"}]',
    lambda value: isinstance(value, Sequence) and all(isinstance(message, Mapping) for message in value),
)
PROMPT = Kind("a text, token ids or a list of messages", lambda value: STRING.accepts(value) or TOKENS.accepts(value))
BYTES = Kind("a whole number of bytes", lambda value: type(value) is int)


def takes(**kinds: Kind) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Refuse arguments of another kind: those that are swapped, or stand where another was forgotten.

    None is of any kind, unless the argument is required.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        parameters = inspect.signature(function).parameters
        required = {name for name, parameter in parameters.items() if parameter.default is parameter.empty}

        @functools.wraps(function)
        def checked(*args: P.args, **options: P.kwargs) -> R:
            for name, value in (*zip(parameters, args, strict=False), *options.items()):
                if name not in kinds or (value is None and name not in required):
                    continue
                if not kinds[name].accepts(value):
                    raise TypeError(f"{name} must be {kinds[name].words}, not {named(value)}")
            return function(*args, **options)

        return checked

    return decorate


def says_unknown(hints: Mapping[str, str]) -> Callable[[type[T]], type[T]]:
    """Let a dataclass say what to write for a keyword that is none of its fields. hints: for some; else one like it."""

    def decorate(kind: type[T]) -> type[T]:
        init, known = kind.__init__, [field.name for field in fields(kind)]  # type: ignore[arg-type]

        @functools.wraps(init)
        def checked(self: T, *args: Any, **options: Any) -> None:
            for name in options:
                if name not in known:
                    hint = hints.get(name) or meant(name, known)
                    raise TypeError(f"{kind.__name__} got an unexpected keyword argument {name!r}: {hint}")
            init(self, *args, **options)

        kind.__init__ = checked  # type: ignore[method-assign, assignment]
        return kind

    return decorate


def meant(name: str, known: Iterable[str]) -> str:
    """Which of the names it may have been."""
    from difflib import get_close_matches

    near = get_close_matches(name, [*known], 1, 0.6)
    return f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"


def named(value: Any) -> str:
    """A short value of Python's own types; of another its type."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    text, kind = shown(value), type(value)
    return text if kind.__module__ == "builtins" and len(text) <= 80 and "\n" not in text else kind.__name__


_repr = reprlib.Repr()
_repr.maxlevel, _repr.maxstring, _repr.maxother = 2, 80, 80


def shown(value: Any) -> str:
    """The value as a message may hold it: not a megabyte, and no list of lists of lists."""
    if isinstance(value, int) and value.bit_length() > 128:  # Python refuses to print the longest
        return f"a number of {value.bit_length():,} bits"
    return _repr.repr(value)
