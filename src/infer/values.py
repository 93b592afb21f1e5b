"""Types and ranges of values from files, and of arguments of public functions."""

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
F = TypeVar("F", bound=Callable[..., Any])


class Kind(NamedTuple):
    """A type or range, in words, and the check of a value."""

    words: str
    accepts: Callable[[Any], bool]

    def check(self, name: str, value: Any) -> None:
        if not self.accepts(value):
            raise ValueError(f"{name} must be {self.words}, not {short_repr(value)}")


def integer(least: int, most: int) -> Kind:
    words = f"a positive integer up to {most:,}" if least == 1 else f"an integer from {least:,} to {most:,}"
    return Kind(words, lambda value: type(value) is int and least <= value <= most)


def number(words: str, accepts: Callable[[Any], bool]) -> Kind:
    """accepts: comparisons, which are exact, and never true of NaN."""
    return Kind(words, lambda value: isinstance(value, Real) and not isinstance(value, bool) and accepts(value))


def list_of(kind: Kind, most: int) -> Kind:
    def accepts(value: Any) -> bool:
        return isinstance(value, list | tuple) and len(value) <= most and all(map(kind.accepts, value))

    return Kind(f"a list of at most {most:,}, each {kind.words}", accepts)


def either(*kinds: Kind) -> Kind:
    return Kind(" or ".join(kind.words for kind in kinds), lambda value: any(kind.accepts(value) for kind in kinds))


ABOVE_0 = number("above 0", lambda value: 0 < value < 1e30)
FLAG = Kind("true or false", lambda value: type(value) is bool)
# JSON and Python allow half of a surrogate pair in a string, which cannot be encoded.
TEXT = Kind("a string", lambda value: isinstance(value, str) and not any("\ud800" <= c <= "\udfff" for c in value))
OBJECT = Kind("an object", lambda value: isinstance(value, Mapping))
TOKEN_ID = integer(0, 2**31 - 1)
TOKEN_IDS = either(TOKEN_ID, list_of(TOKEN_ID, 1024))


def checked(raw: Mapping[str, Any], kinds: Mapping[str, Kind]) -> dict[str, Any]:
    """The values that have a kind, each checked. None counts as missing."""
    found = {name: raw[name] for name in kinds if raw.get(name) is not None}
    for name, value in found.items():
        kinds[name].check(name, value)
    return found


def _has(attribute: str) -> Callable[[Any], bool]:
    return lambda value: hasattr(value, attribute) and not isinstance(value, type)


NO_CONFIG = "the model has no .config, which KV caches and traces are made by: give it a ModelConfig"


def _is_configured(model: Any) -> bool:
    if ANY_MODEL.accepts(model) and getattr(model, "config", None) is None:
        raise TypeError(NO_CONFIG)
    return ANY_MODEL.accepts(model)


# Arguments of public functions. Models, tokenizers and caches are duck-typed.
ANY_MODEL = Kind("a loaded model, as in `model, config = load_model(name)`", _has("parameters"))
MODEL = Kind(ANY_MODEL.words, _is_configured)
TOKENIZER = Kind("a tokenizer, as in `tokenizer = Tokenizer(name)`", _has("decode"))
CACHE = Kind("a cache, as in `KVCache.allocate(...)`", _has("capacity"))
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
PROMPT = Kind("a string, token ids or a list of messages", lambda value: STRING.accepts(value) or TOKENS.accepts(value))
INTEGER = Kind("an integer", lambda value: type(value) is int)
BYTES = Kind("an integer, in bytes", lambda value: type(value) is int)
CALLABLE = Kind("a function", callable)


def takes(**kinds: Kind) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Check the types of arguments, so that swapped or forgotten ones give a clear error.

    An argument whose default is None may be None.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        parameters = inspect.signature(function).parameters
        required = {name for name, parameter in parameters.items() if parameter.default is not None}

        @functools.wraps(function)
        def checked(*args: P.args, **options: P.kwargs) -> R:
            for name, value in (*zip(parameters, args, strict=False), *options.items()):
                if name not in kinds or (value is None and name not in required):
                    continue
                if not kinds[name].accepts(value):
                    raise TypeError(f"{name} must be {kinds[name].words}, not {value_or_type(value)}")
            return function(*args, **options)

        return checked

    return decorate


def suggests_keywords(hints: Mapping[str, str]) -> Callable[[type[T]], type[T]]:
    """Make a dataclass suggest a field for an unknown keyword: that of `hints`, or one with a similar name."""

    def decorate(kind: type[T]) -> type[T]:
        init, known = kind.__init__, [field.name for field in fields(kind)]  # type: ignore[arg-type]

        @functools.wraps(init)
        def checked(self: T, *args: Any, **options: Any) -> None:
            for name in options:
                if name not in known:
                    hint = hints.get(name) or did_you_mean(name, known)
                    raise TypeError(f"{kind.__name__} got an unexpected keyword argument {name!r}: {hint}")
            init(self, *args, **options)

        kind.__init__ = checked  # type: ignore[method-assign, assignment]
        return kind

    return decorate


def keywords_of(source: Callable[..., Any]) -> Callable[[F], F]:
    """Show in `help()` and `inspect.signature` what a function's `**keywords` are: the optional parameters of source.

    Type checkers and editors read the TypedDict of their annotation.
    """

    def decorate(function: F) -> F:
        signature = inspect.signature(function)
        own = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
        keywords = [
            each.replace(kind=each.KEYWORD_ONLY)
            for each in inspect.signature(source).parameters.values()
            if each.default is not each.empty and each.name not in signature.parameters
        ]
        function.__signature__ = signature.replace(parameters=[*own, *keywords])  # type: ignore[attr-defined]
        return function

    return decorate


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A suggestion for an unknown name."""
    from difflib import get_close_matches

    near = get_close_matches(name, [*known], 1, 0.6)
    return f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"


def value_or_type(value: Any) -> str:
    """The value, if it is short and of a built-in type; else the name of its type."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    text, kind = short_repr(value), type(value)
    return text if kind.__module__ == "builtins" and len(text) <= 80 and "\n" not in text else kind.__name__


_repr = reprlib.Repr()
_repr.maxlevel, _repr.maxstring, _repr.maxother = 2, 80, 80


def short_repr(value: Any) -> str:
    """The repr, abbreviated for an error message."""
    if isinstance(value, int) and value.bit_length() > 128:  # Python does not print the longest
        return f"a number of {value.bit_length():,} bits"
    return _repr.repr(value)
