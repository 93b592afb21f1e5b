"""Sampling settings: one table, the fields of `SamplingParams`.

A row has a setting's type, default, help, range, how the server's request bodies name it, and the columns in which
kernels read it. Derived from the table: the checks of `SamplingParams`, the options of `infer` (cli/common.py), the
fields of request bodies (server/bodies.py), what host and GPU draw with (`SamplingParams.packed`), the settings in
session and trace files, and docs/sampling.md, which says how to add a row.

This module needs no torch, so that `infer --help` is instant.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from pathlib import Path
from typing import Any, NamedTuple, Self, TypedDict

from infer.engine.schema import Schema, SchemaSource, check_text
from infer.nn.packed import MAX_DEPTH, OCTAVE, PackedSettings, mix, to_depth
from infer.values import Kind, short_repr, suggests_keywords

SEEDS = 2**64  # number of seeds: all draw differently
# Names in other libraries: the error for such a keyword gives ours.
OTHER_NAMES = dict.fromkeys(("max_tokens", "max_completion_tokens", "max_length"), "max_new_tokens")
CONSTRAINTS = ("json_schema", "regex", "grammar")
MAX_RULES = 512  # of a grammar: a chain of thousands overflows the compiler's stack

Pack = Callable[[Any, int], int | float]  # (value, vocabulary size) -> number in a column


class Range(NamedTuple):
    """The numbers that a setting accepts. words: for errors, as in "top_p must be above 0 and at most 1, not 3"."""

    words: str
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None

    @property
    def bounds(self) -> dict[str, float]:
        return {name: bound for name, bound in self._asdict().items() if name != "words" and bound is not None}

    def holds(self, value: float) -> bool:
        return all(getattr(operator, name)(value, bound) for name, bound in self.bounds.items())


@dataclass(frozen=True)
class RequestField:
    """A setting in the server's request bodies, under the same name."""

    bounds: Mapping[str, float] | None = None  # None: those of the setting
    default: Any = None  # where a request leaves it out; None: that of the setting
    convert: Callable[[Any], Any] = lambda value: value  # from the body's value to the setting's
    responses: bool = True  # whether /v1/responses has it too


@dataclass(frozen=True)
class Setting:
    """A row of the table."""

    kind: type  # int, float, bool, str or dict; a setting whose default is None may also be None
    default: Any
    help: str  # for `infer --help` and docs/sampling.md
    range: Range | None = None  # of a number
    served: RequestField | None = None  # None: the server has no field of this name, or one with another meaning
    columns: Mapping[str, Pack] = field(default_factory=dict)  # the numbers that a draw needs, by column
    flag: str = ""  # of `sampling_kernels.py`: set where a column differs from that of the default
    option: Any = None  # type of the command line's option, where it is not `kind`
    short: str = ""  # of that option
    every_command: bool = True  # whether all commands that generate have the option, or `infer generate` alone

    def pack(self, value: Any, vocab_size: int) -> dict[str, int | float]:
        return {column: number(value, vocab_size) for column, number in self.columns.items()}

    @property
    def served_bounds(self) -> dict[str, Any]:
        if self.served is not None and self.served.bounds is not None:
            return dict(self.served.bounds)
        return {} if self.range is None else self.range.bounds

    def checked(self, name: str, value: Any, range: Range) -> int | float | None:
        """The value, as a Python number."""
        if value is None and self.default is None:
            return None
        number = _number(value)
        if number is None or (self.kind is int and not isinstance(number, int)) or not range.holds(number):
            raise ValueError(f"{name} must be {range.words}, not {short_repr(value)}")
        return number


def _row(kind: type, default: Any, help: str, range: Range | None = None, **others: Any) -> Any:
    row = Setting(kind, default, help, range, **others)
    if kind is dict:
        return field(default_factory=dict, metadata={"setting": row})
    return field(default=default, metadata={"setting": row})


def _int_keys(bias: Mapping[str, Any]) -> dict[int, Any]:
    """JSON has only strings as keys."""
    for token in bias:
        if not (token.isascii() and token.isdecimal() and len(token) < 20):  # `int` takes "1_0" and " 1", too
            raise ValueError(f"logit_bias maps token ids to numbers, and {short_repr(token)} is not a token id")
    return {int(token): number for token, number in bias.items()}


NOT_NEGATIVE = Range("an integer, 0 or more", ge=0)
POSITIVE = Range("an integer, 1 or more", ge=1)
FINITE = Range("a finite number")


@suggests_keywords({other: f"did you mean {name}?" for other, name in OTHER_NAMES.items()})
@dataclass(frozen=True)
class SamplingParams:
    """Sampling settings, checked when created. Filters apply in the order temperature, top_k, top_p, min_p."""

    temperature: float = _row(
        float,
        0.0,
        "0 takes the most likely token; higher is more varied.",
        Range("0 or more", ge=0),
        served=RequestField({"ge": 0, "le": 2}, default=1.0),
        # From a difference of logits to one of depths. Clamped, the factor is a normal float32.
        columns={"per_temperature": lambda t, _: 2**OCTAVE / math.log(2) / min(max(t, 1e-30), 1e30)},
    )
    top_k: int | None = _row(
        int,
        None,
        "Sample from the k most likely tokens only; 0 is off.",
        Range("an integer, 0 or more (0: off)", ge=0),
        served=RequestField({"ge": -1}, convert=lambda k: None if k == -1 else k),
        columns={"top_k": lambda k, vocab_size: k if k is not None and k < vocab_size else 0},
        flag="filtered",
    )
    top_p: float = _row(
        float,
        1.0,
        "Sample from the most likely tokens whose probabilities add up to this.",
        Range("above 0 and at most 1", gt=0, le=1),
        served=RequestField(),
        columns={
            "top_p": lambda p, _: max(int(p * 2**64), 1) if p < 1 else 0,
            # All tokens below this depth together have less than 1 - top_p of the most likely token's mass; 0.01 is
            # more than any rounding.
            "tail_depth": lambda p, vocab_size: to_depth(math.log2(vocab_size / (1 - p)) + 0.01) if p < 1 else 0,
        },
        flag="filtered",
    )
    min_p: float = _row(
        float,
        0.0,
        "Drop tokens less likely than this fraction of the most likely one.",
        Range("from 0 to 1", ge=0, le=1),
        served=RequestField(),
        columns={"min_p_depth": lambda p, _: to_depth(-math.log2(p)) if p > 0 else MAX_DEPTH},
    )
    repetition_penalty: float = _row(
        float,
        1.0,
        "Divide positive logits of tokens seen so far, multiply negative ones; 1 is off.",
        Range("above 0", gt=0),
        served=RequestField({"gt": 0, "le": 100}),
        columns={"repetition": lambda penalty, _: float(penalty)},
        flag="penalized",
    )
    presence_penalty: float = _row(
        float,
        0.0,
        "Subtract from the logits of tokens generated so far.",
        FINITE,
        served=RequestField({"ge": -2, "le": 2}, responses=False),
        columns={"presence": lambda penalty, _: float(penalty)},
        flag="penalized",
    )
    frequency_penalty: float = _row(
        float,
        0.0,
        "Subtract once for each time a token was generated.",
        FINITE,
        served=RequestField({"ge": -2, "le": 2}, responses=False),
        columns={"frequency": lambda penalty, _: float(penalty)},
        flag="penalized",
    )
    logit_bias: Mapping[int, float] = _row(
        dict,
        {},
        "Add BIAS to a token's logit, as ID:BIAS; may be repeated.",
        served=RequestField(responses=False, convert=_int_keys),
        option=list[str],
    )
    stop: str | Sequence[str] = _row(
        str,
        (),
        "Stop before this text, which is not printed; may be repeated.",
        served=RequestField(responses=False, convert=lambda stop: stop or None),
        option=list[str],
    )
    ignore_eos: bool = _row(bool, False, "Continue after the end-of-sequence token.", served=RequestField())
    seed: int | None = _row(
        int,
        None,
        "Makes sampling repeatable: from 0 to 2**64 - 1.",
        Range("an integer from 0 to 2**64 - 1", ge=0, lt=SEEDS),
        served=RequestField({"ge": -(2**63), "lt": SEEDS}, convert=lambda seed: seed % SEEDS),
        columns={"seed_key": lambda seed, _: mix(seed)},
    )
    max_new_tokens: int = _row(int, 256, "Generate at most this many tokens.", POSITIVE, short="-n")
    n: int = _row(
        int,
        1,
        "Number of samples, with seeds derived from one.",
        Range("an integer from 1 to 16384", ge=1, le=16384),
        served=RequestField(responses=False),
        every_command=False,
    )
    logprobs: int | None = _row(
        int,
        None,
        "Log-probabilities of each token, and of this many of the most likely ones.",
        NOT_NEGATIVE,
        every_command=False,
    )
    prompt_logprobs: int | None = _row(
        int, None, "The same for the tokens of the prompt.", NOT_NEGATIVE, every_command=False
    )
    # At most one of these constrains the text. A schema is kept as a `Schema`, whatever it was given as.
    json_schema: SchemaSource | None = _row(  # noqa: RUF009
        str, None, "Generate JSON that matches this schema.", option=Path, every_command=False
    )
    regex: str | None = _row(
        str,
        None,
        "Generate text that matches this regular expression, from start to end.",
        served=RequestField(responses=False),
        every_command=False,
    )
    grammar: str | None = _row(
        str,
        None,
        "Generate text of this grammar, in llguidance's Lark syntax.",
        served=RequestField(responses=False),
        option=Path,
        every_command=False,
    )

    def __post_init__(self) -> None:
        if not isinstance(self.stop, Sequence):
            raise ValueError(f"stop must be a string or a list of strings, not {self.stop!r}")
        checked: dict[str, Any] = {"stop": (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)}
        for text in checked["stop"]:
            if not isinstance(text, str) or not text:
                raise ValueError(f"a stop string must be a non-empty string, not {text!r}")
        if not isinstance(self.ignore_eos, bool):
            raise ValueError(f"ignore_eos must be True or False, not {self.ignore_eos!r}")
        if not isinstance(self.logit_bias, Mapping):
            raise ValueError(f"logit_bias must map token ids to numbers, not {self.logit_bias!r}")
        checked["logit_bias"] = dict(_bias(*each) for each in self.logit_bias.items())
        for name, setting in SETTINGS.items():
            if (allowed := setting.range) is not None:
                if name == "max_new_tokens" and self.prompt_logprobs is not None:
                    allowed = NOT_NEGATIVE  # log-probabilities of the prompt need no new token
                checked[name] = setting.checked(name, getattr(self, name), allowed)
        if self.json_schema is not None:
            checked["json_schema"] = Schema.of(self.json_schema)
        vars(self).update(checked)
        self._check_constraint()

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> Self:
        """Settings of a session or trace file. JSON has no number for -inf."""
        bias = _int_keys(saved["logit_bias"])
        return cls(**{**saved, "logit_bias": {token: -math.inf if x == "-inf" else x for token, x in bias.items()}})

    @property
    def is_sampled(self) -> bool:
        """Otherwise the most likely token is taken; of several, the one with the lowest id."""
        return self.temperature > 0 and self.top_k != 1

    @property
    def schema(self) -> Schema | None:
        return self.json_schema if isinstance(self.json_schema, Schema) else None

    @property
    def constraint(self) -> tuple[str, str] | None:
        """Which of `CONSTRAINTS` there is, and its text."""
        return next(((name, text) for name in CONSTRAINTS if (text := getattr(self, name)) is not None), None)

    def packed(self, seed: int, vocab_size: int) -> PackedSettings:
        """The numbers that host and GPU draw with. seed: the sequence's own, which differs where n > 1 or none is set.

        With no flag set, a GPU needs none of these numbers: it takes the token with the highest logit.
        """
        columns: dict[str, int | float] = {}
        flags = {"sampled"} if self.is_sampled else set()
        if self.logit_bias:
            flags.add("biased")
        for name, setting, inactive in _WITH_COLUMNS:
            own = setting.pack(seed if name == "seed" else getattr(self, name), vocab_size)
            columns |= own
            if setting.flag and own != inactive:
                flags.add(setting.flag)
        if not self.is_sampled:
            flags.discard("filtered")
        return PackedSettings(columns, frozenset(flags), self.logit_bias)

    def _check_constraint(self) -> None:
        given = [name for name in CONSTRAINTS if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} were given: give one of them")
        if given and self.ignore_eos:
            raise ValueError(f"ignore_eos continues after the end, which {given[0]} does not allow: leave one out")
        for name in given:
            check_text(name, getattr(self, name))
        if self.grammar is not None and (rules := sum(":" in line for line in self.grammar.splitlines())) > MAX_RULES:
            raise ValueError(f"the grammar has {rules} rules: at most {MAX_RULES} are allowed")


class SamplingKeywords(TypedDict, total=False):
    """The fields of `SamplingParams` as keywords of functions, for type checkers and editors."""

    temperature: float
    top_k: int | None
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    stop: str | Sequence[str]
    ignore_eos: bool
    seed: int | None
    max_new_tokens: int
    n: int
    logprobs: int | None
    prompt_logprobs: int | None
    json_schema: SchemaSource | None
    regex: str | None
    grammar: str | None


SETTINGS: dict[str, Setting] = {row.name: row.metadata["setting"] for row in fields(SamplingParams)}
# Those that a draw needs numbers of; and, where there is a flag, the numbers without it.
_WITH_COLUMNS = [
    (name, each, each.pack(each.default, 1) if each.flag else None) for name, each in SETTINGS.items() if each.columns
]
# Settings that change the distribution: a model's files may have their own, and a chat can change them.
DISTRIBUTION_SETTINGS = tuple(name for name, setting in SETTINGS.items() if setting.columns and name != "seed")


PARAMS = Kind(
    "SamplingParams(max_new_tokens=..., temperature=..., ...)",
    lambda value: value is None or isinstance(value, SamplingParams),
)


def _number(value: Any) -> int | float | None:
    """A Python number for one of any library, such as numpy; None: it is none, or a float cannot represent it."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        return None if not math.isfinite(value) else int(value) if isinstance(value, Integral) else float(value)
    except OverflowError:
        return None


def _bias(token_id: Any, bias: Any) -> tuple[int, float]:
    """An entry of `logit_bias`, which forbids a token with -inf."""
    token, number = _number(token_id), -math.inf if bias == -math.inf else _number(bias)
    if not isinstance(token, int) or token < 0 or number is None:
        raise ValueError(f"logit_bias maps token ids to numbers, not {short_repr(token_id)} to {short_repr(bias)}")
    return token, number


def check_prefill_chunk(prefill_chunk: int | None, *, has_cache: bool = True) -> None:
    """Refuse a number of prompt tokens per pass that is no positive integer; without a cache there are no chunks."""
    if prefill_chunk is None:
        return
    if not (type(prefill_chunk) is int and 1 <= prefill_chunk < 2**63):
        raise ValueError(f"prefill_chunk must be an integer, 1 or more, not {short_repr(prefill_chunk)}")
    if not has_cache:
        raise ValueError("prefill_chunk needs a cache: without one every pass starts from the beginning")
