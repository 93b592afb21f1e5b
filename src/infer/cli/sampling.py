"""How a command samples: as the user says, else as the model's own files do, else as is usual for the command."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from infer.cli.streams import say
from infer.engine.params import SamplingParams

# For a chat with a model whose files give none: greedy, a small one soon repeats itself for ever.
CHAT = {"temperature": 0.7, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.1}
SETTINGS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)  # which tokens are likely: a model's files may have their own


@dataclass(frozen=True)
class Asked:
    """What the user has said."""

    params: SamplingParams
    given: frozenset[str]  # of SETTINGS, those that are the user's


@dataclass(frozen=True)
class Settings:
    """What is sampled with, and who says so."""

    params: SamplingParams
    sources: dict[str, str]  # of each of SETTINGS that is not as ever

    def changed(self, source: str, **values: Any) -> "Settings":
        return Settings(replace(self.params, **values), self.sources | dict.fromkeys(values, source))

    def __str__(self) -> str:
        """temperature 0.6, top_k 20 (generation_config.json), top_p 0.9 (--top-p)"""
        named: dict[str, list[str]] = {}
        for name in SETTINGS:
            if source := self.sources.get(name):
                named.setdefault(source, []).append(f"{name} {getattr(self.params, name)}")
        told = ", ".join(f"{', '.join(values)} ({source})" for source, values in named.items())
        return told if self.params.temperature else f"greedy{f': {told}' if told else ''}"


def resolve(model: str, asked: Asked, usual: Mapping[str, float] | None = None, whose: str = "") -> Settings:
    """usual: settings where the model's files give none; whose they are. Says what those files have wrong."""
    from infer.loader.sampling import sampling_defaults

    found = sampling_defaults(model)
    for message in found.ignored:
        say(f"note: {message}")
    greedy = "temperature" in asked.given and not asked.params.temperature  # the user wants no help against repetition
    values, source = (found.values, found.source) if found.values else ({} if greedy else usual or {}, whose)
    values = {name: value for name, value in values.items() if name not in asked.given}
    own = {name: f"--{name.replace('_', '-')}" for name in SETTINGS if name in asked.given}
    return Settings(replace(asked.params, **values), dict.fromkeys(values, source) | own)


def tell(settings: Settings) -> None:
    """On a terminal, what a model's files have chosen."""
    if sys.stderr.isatty() and any(not source.startswith("--") for source in settings.sources.values()):
        say(f"[sampling: {settings}]", dim=True)
