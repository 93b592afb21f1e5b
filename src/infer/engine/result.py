"""What generation returns: tokens one by one, and results of finished runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from html import escape
from json import JSONDecodeError
from typing import Any

from torch import Tensor

from infer.engine.logprobs import TokenLogprobs
from infer.engine.schema import Schema

SHOWN = 60  # characters of a text in a repr
UNLIKELY = -10.0  # log-probability at which a token has the full shade
TEXT = "white-space: pre-wrap; overflow-wrap: anywhere"


@dataclass(frozen=True)
class GeneratedToken:
    """One token of a stream. Its text is what became certain with it: it may be empty, or include earlier tokens."""

    token_id: int
    text: str
    time_s: float  # of its passes, or of an `LLM` since the token before it; the first one's includes the prefill
    finish_reason: str | None = None  # of the last token: "eos" | "stop" | "length"
    logprobs: TokenLogprobs | None = None  # if requested
    index: int = 0  # of its sample, if there are several

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
        """Without the first token; 0 if it is the only one."""
        return len(self.decode_times_s) / self.decode_time_s if self.decode_times_s else 0.0


@dataclass(frozen=True, repr=False)
class GenerationResult:
    prompt_token_ids: list[int]
    token_ids: list[int]  # generated, the end-of-sequence token included
    text: str
    finish_reason: str  # "eos" | "stop" | "length"; "interrupted" if it was aborted
    timing: Timing
    cache_memory_bytes: int
    num_cached_tokens: int = 0  # of the prompt, found in the prefix cache
    seed: int | None = None  # given or drawn
    logprobs: list[TokenLogprobs] | None = None  # of each token, if requested
    # Of each token of the prompt; the first has none, as nothing comes before it.
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    schema: Schema | None = None  # that the text matches, if one was given
    model: str = ""  # its name, or the path that it was loaded by
    drafted: int = 0  # tokens that were drafted and verified
    accepted: int = 0  # drafts that were right
    embedding: Tensor | None = None  # [C] in float32, of a prompt with `pooling`

    @cached_property
    def parsed(self) -> Any:
        """The value of a text with a `json_schema`: an instance of its class, or of a dict's schema plain Python.

        Raises ValueError if there was no schema, if the text was cut (`finish_reason` "length"), or if a validator of
        the class refuses it.
        """
        if self.schema is None:
            raise ValueError("there is nothing to parse the text by: generate it with json_schema=...")
        if self.finish_reason == "length":
            raise ValueError(
                f"the JSON text is incomplete: it was cut at max_new_tokens={self.generated_tokens} (finish_reason "
                "'length'). Raise max_new_tokens, or limit the schema with maximum, maxLength and maxItems"
            )
        if self.finish_reason == "interrupted":
            raise ValueError("the JSON text is incomplete: the request was aborted (finish_reason 'interrupted')")
        try:
            return self.schema.parse(self.text)
        except JSONDecodeError as error:  # a stop string can end it anywhere
            raise ValueError(f"the JSON text is incomplete (finish_reason {self.finish_reason!r}): {error}") from None

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        text = self.text if len(self.text) <= SHOWN else f"{self.text[: SHOWN - 1]}…"
        return f"GenerationResult({', '.join([repr(text), *self._figures()])})"

    def _repr_html_(self) -> str:
        """In a notebook."""
        return _html_block(escape(self.text), self._figures())

    def _figures(self) -> list[str]:
        speed = [f"{self.timing.decode_tokens_per_s:.1f} tok/s"] if self.timing.decode_times_s else []
        model = [self.model] if self.model else []
        return [f"{self.generated_tokens} tokens", *speed, f"ended by {self.finish_reason}", *model]

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def generated_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True)
class Score:
    """The log-probabilities of a text, token by token."""

    token_ids: list[int]
    texts: list[str]  # of each token
    logprobs: list[TokenLogprobs | None]  # the first has none, as nothing comes before it

    def _repr_html_(self) -> str:
        """In a notebook."""
        about = f"{self.scored} tokens", f"log-probability {self.total:.4f}", f"perplexity {self.perplexity:.3f}"
        return _html_block("".join(map(_html_token, self.texts, self.logprobs)), about)

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
    """The result of a stream. others: fields that its tokens do not have."""
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


def _html_token(text: str, scored: TokenLogprobs | None) -> str:
    """A token, shaded by how unlikely it is; a tooltip shows its figures."""
    visible = escape(text.replace("\n", "↵\n"))
    if scored is None:
        return f'<span title="nothing comes before it">{visible}</span>'
    shade = 0.6 * max(0.0, min(1.0, scored.logprob / UNLIKELY))
    title = f"log-probability {scored.logprob:.4f}, probability {math.exp(scored.logprob):.2%}"
    return f'<span title="{title}" style="background: rgba(220, 60, 40, {shade:.2f})">{visible}</span>'


def _html_block(content: str, about: Sequence[str]) -> str:
    """A text, and figures below it, in the notebook's own colors."""
    below = f'<div style="opacity: 0.7; font-size: smaller">{escape(" · ".join(about))}</div>'
    return f'<div style="{TEXT}">{content}</div>{below}'
