"""What generation gives: tokens one by one, and everything about a run that is over."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from infer.engine import notebook
from infer.engine.logprobs import TokenLogprobs

SHOWN = 60  # characters of a text


@dataclass(frozen=True)
class GeneratedToken:
    """One step of a stream. Text is what became certain with it: it may be empty, or belong to earlier tokens too."""

    token_id: int
    text: str
    time_s: float  # of the forward pass and sampling; the first one's includes the whole prefill
    finish_reason: str | None = None  # on the last: "eos" | "stop" | "length"
    logprobs: TokenLogprobs | None = None  # where they were asked for
    index: int = 0  # of the sample that it belongs to, where there are several

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Timing:
    prefill_time_s: float  # to the first token
    decode_times_s: list[float] = field(default_factory=list)
    queue_time_s: float = 0.0  # before the first pass

    @property
    def decode_time_s(self) -> float:
        return sum(self.decode_times_s)

    @property
    def first_token_s(self) -> float:
        """From a request's arrival."""
        return self.queue_time_s + self.prefill_time_s

    @property
    def total_s(self) -> float:
        """From a request's arrival to its last token."""
        return self.first_token_s + self.decode_time_s

    @property
    def decode_tokens_per_s(self) -> float:
        """Steady speed, the first token apart; 0 if there was only that one."""
        return len(self.decode_times_s) / self.decode_time_s if self.decode_times_s else 0.0


@dataclass(frozen=True, repr=False)
class GenerationResult:
    prompt_token_ids: list[int]
    token_ids: list[int]  # all that were generated, an end-of-sequence token included
    text: str
    finish_reason: str  # "eos" | "stop" | "length"; "interrupted" if the stream was left early
    timing: Timing
    cache_memory_bytes: int
    known_tokens: int = 0  # of the prompt, that others had computed before
    seed: int | None = None  # that its tokens were drawn with, given or not
    logprobs: list[TokenLogprobs] | None = None  # of each token, where they were asked for
    # Of each token of the prompt; the first has none, as nothing comes before it.
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        text = self.text if len(self.text) <= SHOWN else f"{self.text[: SHOWN - 1]}…"
        return f"GenerationResult({', '.join([repr(text), *self._figures()])})"

    def _repr_html_(self) -> str:
        """In a notebook."""
        return notebook.shown(self.text, self._figures())

    def _figures(self) -> list[str]:
        speed = [f"{self.timing.decode_tokens_per_s:.1f} tok/s"] if self.timing.decode_times_s else []
        return [f"{self.generated_tokens} tokens", *speed, f"ended by {self.finish_reason}"]

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def generated_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True)
class Score:
    """How likely a text is, token by token."""

    token_ids: list[int]
    texts: list[str]  # of each token
    logprobs: list[TokenLogprobs | None]  # the first has none, as nothing comes before it

    def _repr_html_(self) -> str:
        """In a notebook."""
        about = f"{self.scored} tokens", f"log-probability {self.total:.4f}", f"perplexity {self.perplexity:.3f}"
        return notebook.shaded(self.texts, [each and each.logprob for each in self.logprobs], about)

    @property
    def scored(self) -> int:
        return sum(each is not None for each in self.logprobs)

    @property
    def total(self) -> float:
        return sum(each.logprob for each in self.logprobs if each is not None)

    @property
    def perplexity(self) -> float:
        return math.exp(-self.total / self.scored) if self.scored else math.nan


def collect(
    prompt_token_ids: Sequence[int], steps: Sequence[GeneratedToken], cache_bytes: int, **others: Any
) -> GenerationResult:
    """The result of a stream that has been read. others: fields that it does not tell."""
    return GenerationResult(
        prompt_token_ids=list(prompt_token_ids),
        token_ids=[step.token_id for step in steps],
        text="".join(step.text for step in steps),
        finish_reason=(steps[-1].finish_reason or "interrupted") if steps else "length",
        timing=Timing(steps[0].time_s if steps else 0.0, [step.time_s for step in steps[1:]]),
        cache_memory_bytes=cache_bytes,
        logprobs=[step.logprobs for step in steps if step.logprobs is not None] or None,
        **others,
    )
