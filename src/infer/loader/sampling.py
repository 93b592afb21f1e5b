"""How a model's own files say to sample: `generation_config.json`, or `general.sampling.*` of a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from infer.loader.find import open_checkpoint
from infer.values import FLAG, Kind, number, whole

# What is read of generation_config.json, and what each value has to be. The names are those of `SamplingParams`.
HF_KINDS: dict[str, Kind] = {
    "temperature": number("from 0 to 100", lambda value: 0 <= value <= 100),
    "top_k": whole(0, 2**31 - 1),
    "top_p": number("above 0 and at most 1", lambda value: 0 < value <= 1),
    "min_p": number("from 0 to 1", lambda value: 0 <= value <= 1),
    "repetition_penalty": number("above 0 and at most 100", lambda value: 0 < value <= 100),
}


class SamplingDefaults(NamedTuple):
    """What to sample with unless the user says otherwise."""

    values: dict[str, Any]  # by the names of `SamplingParams`; none: the files do not ask for sampling
    source: str  # the file that says so
    ignored: tuple[str, ...]  # what is wrong with other values


def sampling_defaults(name_or_path: str | Path) -> SamplingDefaults:
    checkpoint = open_checkpoint(name_or_path, weights=False)
    source, given = checkpoint.sampling()
    return read_sampling(source, given)


def read_sampling(source: str, given: Mapping[str, Any]) -> SamplingDefaults:
    """given: by the names of generation_config.json. A value of the wrong type or out of range is left out."""
    values, ignored = {}, []
    for name, kind in (HF_KINDS | {"do_sample": FLAG}).items():
        if given.get(name) is None:
            continue
        try:
            kind.check(name, given[name])
        except ValueError as error:
            ignored.append(f"{source}: {error}; it is ignored")
        else:
            values[name] = given[name]
    if not values.pop("do_sample", False) or not values.get("temperature"):
        values = {}
    # A GGUF file has them in 32 bits: 0.6 is 0.60000002384 there.
    values = {name: value if isinstance(value, int) else float(f"{value:.6g}") for name, value in values.items()}
    return SamplingDefaults(values, source, tuple(ignored))
