"""The table of sampling settings: what derives from it has every setting, and the documentation prints it."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest

from infer import SamplingParams
from infer.backend.gpu.sampling_kernels import FLAG_BITS, FLOAT_COLUMNS, INT_COLUMNS
from infer.engine.params import DISTRIBUTION_SETTINGS, SETTINGS, Range, Setting
from infer.nn.packed import MAX_DEPTH

PAGE = Path(__file__).parents[3] / "docs" / "sampling.md"
COLUMNS = {column for setting in SETTINGS.values() for column in setting.columns}


def number(value: float) -> str:
    sign, size = "-" if value < 0 else "", abs(value)
    return f"{sign}2^{int(size).bit_length() - 1}" if size >= 2**31 else f"{value:g}"


def bounds(setting: Setting) -> str:
    """The server's own, as symbols."""
    symbols = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    return ", ".join(f"{symbols[name]} {number(bound)}" for name, bound in setting.served_bounds.items())


def line(name: str, setting: Setting) -> str:
    """A row of the page's table."""
    default = "none" if setting.default in (None, (), {}) else f"`{setting.default}`"
    accepted = setting.range.words if setting.range else ""
    server = "as in OpenAI's API" if setting.served is None else "yes"
    if setting.served is not None:
        server += f", {bounds(setting)}" if setting.served.bounds is not None else ""
        server += f", default {number(setting.served.default)}" if setting.served.default is not None else ""
        server += "" if setting.served.responses else "; not in `/v1/responses`"
    return f"| `{name}` | {default} | {accepted} | {server} | {setting.help} |"


def test_the_page_has_the_table() -> None:
    """A failure prints the lines that docs/sampling.md should have."""
    found = [each for each in PAGE.read_text(encoding="utf-8").splitlines() if each.startswith("| `")]
    assert found == [line(name, setting) for name, setting in SETTINGS.items()]


def test_kernels_read_every_column() -> None:
    assert {*INT_COLUMNS, *FLOAT_COLUMNS} == COLUMNS | {"flags"}
    assert {setting.flag for setting in SETTINGS.values()} <= {"", *FLAG_BITS}
    assert SamplingParams().packed(0, 100).columns.keys() == COLUMNS


def test_the_distribution() -> None:
    filters = {"temperature", "top_k", "top_p", "min_p"}
    penalties = {"repetition_penalty", "presence_penalty", "frequency_penalty"}
    assert filters | penalties <= {*DISTRIBUTION_SETTINGS}
    assert not {"seed", "logit_bias", "stop", "max_new_tokens"} & {*DISTRIBUTION_SETTINGS}


@pytest.mark.parametrize(
    ("options", "flags"),
    [
        ({}, []),
        ({"temperature": 0.0, "top_k": 5, "top_p": 0.5}, []),
        ({"temperature": 1.0, "top_k": 1, "top_p": 0.5}, []),
        ({"temperature": 1e-300}, ["sampled"]),
        ({"temperature": 1.0, "top_k": 0}, ["sampled"]),
        ({"temperature": 1.0, "top_k": 100}, ["sampled"]),  # as many as there are
        ({"temperature": 1.0, "top_k": 99}, ["sampled", "filtered"]),
        ({"temperature": 1.0, "top_p": 0.99}, ["sampled", "filtered"]),
        ({"temperature": 1.0, "min_p": 0.1}, ["sampled"]),
        ({"repetition_penalty": 1.1}, ["penalized"]),
        ({"presence_penalty": -0.1}, ["penalized"]),
        ({"temperature": 1.0, "frequency_penalty": 0.1, "logit_bias": {1: 1.0}}, ["sampled", "penalized", "biased"]),
        ({"logit_bias": {1: 1.0}}, ["biased"]),
    ],
    ids=str,
)
def test_flags(options: dict[str, Any], flags: list[str]) -> None:
    assert SamplingParams(**options).packed(0, 100).flags == set(flags)


def test_columns() -> None:
    params = SamplingParams(temperature=0.5, top_k=7, top_p=0.5, min_p=0.25, repetition_penalty=1.5)
    expected = {
        "per_temperature": pytest.approx(2**26 / 0.6931471805599453, rel=1e-15),
        "top_k": 7,
        "top_p": 2**63,
        "tail_depth": int(11.01 * 2**25),
        "min_p_depth": 2 << 25,
        "repetition": 1.5,
        "presence": 0.0,
        "frequency": 0.0,
        "seed_key": 6457827717110365317,  # the first number of splitmix64 for this seed, as others publish it
    }
    columns = params.packed(1234567, 2**10).columns
    assert {name: columns[name] for name in expected} == expected
    off = SamplingParams().packed(3, 2**10).columns
    assert (off["top_k"], off["top_p"], off["tail_depth"], off["min_p_depth"]) == (0, 0, 0, MAX_DEPTH)


@pytest.mark.parametrize("name", [name for name, setting in SETTINGS.items() if setting.range is not None])
def test_bounds(name: str) -> None:
    """A bound itself is accepted or refused as the table says, and so is a value on either side."""
    setting = SETTINGS[name]
    assert setting.range is not None
    for bound_name, bound in setting.range.bounds.items():
        step = 1 if setting.kind is int else 1e-9 * max(1, abs(bound))
        inside, outside = (bound + step, bound - step) if bound_name[0] == "g" else (bound - step, bound + step)
        assert getattr(SamplingParams(**{name: inside}), name) == inside
        for value in [outside] if bound_name[1] == "e" else [outside, bound]:
            with pytest.raises(ValueError, match=f"^{name} must be "):
                SamplingParams(**{name: value})
    if bound_name := next((each for each in setting.range.bounds if each[1] == "e"), None):
        assert SamplingParams(**{name: setting.range.bounds[bound_name]})


def test_words_name_the_bounds() -> None:
    for setting in SETTINGS.values():
        for bound in setting.range.bounds.values() if setting.range else ():
            written = "2**64 - 1" if bound == 2**64 else number(bound)
            assert written in (setting.range or Range("")).words


def test_no_new_token_needs_the_prompt() -> None:
    assert SamplingParams(max_new_tokens=0, prompt_logprobs=0).max_new_tokens == 0
    with pytest.raises(ValueError, match="max_new_tokens must be an integer, 1 or more, not 0"):
        SamplingParams(max_new_tokens=0)


def test_a_keyword_of_another_library() -> None:
    with pytest.raises(TypeError, match=r"'max_tokens': did you mean max_new_tokens\?"):
        SamplingParams(max_tokens=3)


def test_json() -> None:
    params = SamplingParams(temperature=0.5, stop=["a", "b"], logit_bias={3: float("-inf"), 4: 2.5}, seed=2**64 - 1)
    saved = asdict(params)
    assert SamplingParams.from_json(json.loads(json.dumps(saved))) == params
    bias = {"3": "-inf", "4": 2.5}  # as a trace has it: a browser reads no infinity
    assert SamplingParams.from_json(saved | {"logit_bias": bias}) == params


def test_fields_are_the_rows() -> None:
    assert [row.name for row in fields(SamplingParams)] == [*SETTINGS]
    assert all(getattr(SamplingParams(), name) == setting.default for name, setting in SETTINGS.items())
