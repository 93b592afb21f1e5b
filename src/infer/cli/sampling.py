"""Sampling settings of a command: the user's options, then the model's files, then the defaults of the command."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from infer.cli.streams import say
from infer.engine.params import DISTRIBUTION_SETTINGS, SamplingParams

# For a chat where the model's files give no settings: with greedy decoding a small model soon repeats itself forever.
CHAT = {"temperature": 0.7, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.1}
SETTINGS = DISTRIBUTION_SETTINGS  # that a model's files may set


@dataclass(frozen=True)
class Settings:
    """The sampling parameters in effect, and where they come from."""

    params: SamplingParams
    sources: dict[str, str]  # by name, for each of SETTINGS that is not SamplingParams' default; of an option, its name

    def changed(self, source: str, **values: Any) -> "Settings":
        return Settings(replace(self.params, **values), self.sources | dict.fromkeys(values, source))

    def __str__(self) -> str:
        """temperature 0.6, top_k 20 (generation_config.json), top_p 0.9 (--top-p)"""
        named: dict[str, list[str]] = {}
        for name in SETTINGS:
            if source := self.sources.get(name):
                named.setdefault(source, []).append(f"{name} {getattr(self.params, name)}")
        text = ", ".join(f"{', '.join(values)} ({source})" for source, values in named.items())
        return text if self.params.temperature else f"greedy{f': {text}' if text else ''}"


def resolve(
    model_name: str, chosen: Settings, defaults: Mapping[str, float] | None = None, source: str = ""
) -> Settings:
    """The user's options, completed with the model's settings, or the defaults if its files give none.

    source: what `Settings` calls the origin of the defaults. Says which settings of the model's files are ignored.
    """
    from infer.loader.find import open_checkpoint

    found = open_checkpoint(model_name, weights=False).sampling_defaults()
    for message in found.ignored:
        say(f"note: {message}")
    # --temperature 0 is plain greedy decoding, without the penalties of the defaults.
    greedy = "temperature" in chosen.sources and not chosen.params.temperature
    values, source = (found.values, found.source) if found.values else ({} if greedy else defaults or {}, source)
    values = {name: value for name, value in values.items() if name not in chosen.sources}
    return Settings(replace(chosen.params, **values), dict.fromkeys(values, source) | chosen.sources)


def say_settings(settings: Settings) -> None:
    """Print the settings on a terminal, if some come from the model's files."""
    if sys.stderr.isatty() and any(not source.startswith("--") for source in settings.sources.values()):
        say(f"[sampling: {settings}]", dim=True)
