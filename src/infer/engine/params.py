"""How to generate. This module needs no torch, so that the command line can offer these options at once."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

from infer.values import Kind, says_unknown, shown

SEEDS = 2**64  # how many there are: all draw differently
OTHER_NAMES = dict.fromkeys(("max_tokens", "max_completion_tokens", "max_length"), "max_new_tokens")  # what others say
CONSTRAINTS = ("json_schema", "regex", "grammar")
MAX_CONSTRAINT = 2**16  # bytes of a constraint's text
MAX_NESTING = 64  # levels of a schema
MAX_RULES = 512  # of a grammar: thousands that lead to each other overflow the stack of what compiles them
_NUMBERS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "max_new_tokens",
    "n",
    "logprobs",
    "prompt_logprobs",
)


def _option(default: Any, help: str) -> Any:
    """A field with the words that `infer --help` prints for it."""
    return field(default=default, metadata={"help": help})


@says_unknown({other: f"did you mean {name}?" for other, name in OTHER_NAMES.items()})
@dataclass(frozen=True)
class SamplingParams:
    """Sampling settings, checked when made. Filters apply in the order temperature, top_k, top_p, min_p."""

    temperature: float = _option(0.0, "0 takes the likeliest token; higher is more varied.")
    top_k: int | None = _option(None, "Sample from the k likeliest tokens only; 0 is off.")
    top_p: float = _option(1.0, "Sample from the likeliest tokens that together have this probability.")
    min_p: float = _option(0.0, "Drop tokens less likely than this fraction of the likeliest.")
    repetition_penalty: float = _option(1.0, "Divide the logits of tokens seen so far; 1 is off.")
    presence_penalty: float = _option(0.0, "Subtract from the logits of tokens generated so far.")
    frequency_penalty: float = _option(0.0, "Subtract once for each time a token was generated.")
    logit_bias: Mapping[int, float] = field(
        default_factory=dict, metadata={"help": "Add BIAS to a token's logit, as ID:BIAS; may be repeated."}
    )
    stop: str | Sequence[str] = _option((), "End before this text, which is not printed; may be repeated.")
    ignore_eos: bool = _option(False, "Go on after the end-of-sequence token.")
    seed: int | None = _option(None, "Makes sampling repeatable: from 0 to 2**64 - 1.")
    max_new_tokens: int = _option(256, "Generate at most this many tokens.")
    n: int = _option(1, "Sample so many texts, with seeds derived from one.")
    logprobs: int | None = _option(None, "Log-probabilities of each token, and of so many of the likeliest.")
    prompt_logprobs: int | None = _option(None, "The same of the prompt's tokens.")
    # At most one of these constrains the text. A schema is kept as JSON text, whatever it was given as.
    json_schema: Mapping[str, Any] | str | None = _option(None, "Generate JSON that matches this schema.")
    regex: str | None = _option(None, "Generate text that matches this regular expression, from end to end.")
    grammar: str | None = _option(None, "Generate text by this grammar, in llguidance's Lark syntax.")

    def __post_init__(self) -> None:
        if not isinstance(self.stop, Sequence):
            raise ValueError(f"stop must be a text or several, not {self.stop!r}")
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        if not isinstance(self.ignore_eos, bool):
            raise ValueError(f"ignore_eos must be True or False, not {self.ignore_eos!r}")
        if not isinstance(self.logit_bias, Mapping):
            raise ValueError(f"logit_bias must map token ids to numbers, not {self.logit_bias!r}")
        for name in _NUMBERS:
            object.__setattr__(self, name, _own(getattr(self, name)))
        object.__setattr__(self, "logit_bias", {_own(token): _own(bias) for token, bias in self.logit_bias.items()})
        _check("temperature", self.temperature, "0 or more", lambda x: x >= 0)
        _check("top_k", self.top_k, "a whole number, 0 or more (0: off)", lambda x: _is_int(x) and x >= 0, None)
        _check("top_p", self.top_p, "above 0 and at most 1", lambda x: 0 < x <= 1)
        _check("min_p", self.min_p, "from 0 to 1", lambda x: 0 <= x <= 1)
        _check("repetition_penalty", self.repetition_penalty, "above 0", lambda x: x > 0)
        _check("presence_penalty", self.presence_penalty, "a finite number", lambda x: True)
        _check("frequency_penalty", self.frequency_penalty, "a finite number", lambda x: True)
        if self.prompt_logprobs is None:
            _check("max_new_tokens", self.max_new_tokens, "a whole number, 1 or more", lambda x: _is_int(x) and x >= 1)
        else:  # there is something to be had without any
            _check("max_new_tokens", self.max_new_tokens, "a whole number, 0 or more", lambda x: _is_int(x) and x >= 0)
        _check("n", self.n, "a whole number, 1 or more", lambda x: _is_int(x) and x >= 1)
        for name in ("logprobs", "prompt_logprobs"):
            _check(name, getattr(self, name), "a whole number, 0 or more", lambda x: _is_int(x) and x >= 0, None)
        _check("seed", self.seed, "a whole number from 0 to 2**64 - 1", lambda x: _is_int(x) and 0 <= x < SEEDS, None)
        for token_id, bias in self.logit_bias.items():
            if not _is_int(token_id) or token_id < 0 or not (_is_finite(bias) or bias == -math.inf):
                raise ValueError(f"logit_bias maps token ids to numbers, not {shown(token_id)} to {shown(bias)}")
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise ValueError(f"a stop string must be a non-empty text, not {text!r}")
        if self.json_schema is not None:
            object.__setattr__(self, "json_schema", _schema_text(self.json_schema))
        self._check_constraint()

    @property
    def constraint(self) -> tuple[str, str] | None:
        """Which of `CONSTRAINTS` there is, and its text."""
        return next(((name, text) for name in CONSTRAINTS if (text := getattr(self, name)) is not None), None)

    def _check_constraint(self) -> None:
        given = [name for name in CONSTRAINTS if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} were given: a text is constrained by one of them")
        if given and self.ignore_eos:
            raise ValueError(f"ignore_eos goes on after the end, which {given[0]} does not allow: leave one out")
        for name in given:
            _check_text(name, getattr(self, name))
        if self.grammar is not None and (rules := sum(":" in line for line in self.grammar.splitlines())) > MAX_RULES:
            raise ValueError(f"the grammar has {rules} rules, more than the {MAX_RULES} that are read")


PARAMS = Kind(
    "SamplingParams(max_new_tokens=..., temperature=..., ...)",
    lambda value: value is None or isinstance(value, SamplingParams),
)


def _schema_text(schema: Any) -> str:
    """As JSON, once it is clear that it is an object, and not nested too deeply to be compiled."""
    try:
        if hasattr(schema, "model_json_schema"):  # a model of pydantic's
            schema = schema.model_json_schema()
        text = schema if isinstance(schema, str) else json.dumps(schema, allow_nan=False)
        _check_text("json_schema", text)
        parsed = json.loads(text)
        text = json.dumps(parsed, allow_nan=False)
    except (TypeError, RecursionError) as error:
        raise ValueError(f"json_schema is not JSON: {error}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"json_schema is not JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise ValueError(f'json_schema must be an object, as {{"type": "object"}} is, not {shown(parsed)}')
    level: list[Any] = [parsed]
    for _ in range(MAX_NESTING):
        level = [inner for value in level for inner in _inner(value)]
    if any(isinstance(value, dict | list) for value in level):
        raise ValueError(f"json_schema is nested in more than {MAX_NESTING} levels")
    return text


def _inner(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _check_text(name: str, text: Any) -> None:
    if not isinstance(text, str):
        raise ValueError(f"{name} must be a text, not {shown(text)}")
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise ValueError(f"{name} is not Unicode: it has half a character") from None
    if size > MAX_CONSTRAINT:
        raise ValueError(f"{name} has {size:,} bytes, more than the {MAX_CONSTRAINT:,} that are read")


def _own(value: Any) -> Any:
    """Python's own number in place of another library's, numpy's say."""
    if isinstance(value, int | float) or not isinstance(value, Real):
        return value
    try:
        return int(value) if isinstance(value, Integral) else float(value)
    except OverflowError:  # a fraction beyond any float
        return value


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_finite(value: Any) -> bool:
    """Whether it is a number that a float can hold."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _check(name: str, value: Any, allowed: str, holds: Any, *also: Any) -> None:
    if value in also:
        return
    if not _is_finite(value) or not holds(value):
        raise ValueError(f"{name} must be {allowed}, not {shown(value)}")
