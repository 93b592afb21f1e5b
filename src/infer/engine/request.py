"""One sequence on its way from prompt to end, and what is refused before it starts."""

from __future__ import annotations

import operator
import secrets
import time
from collections.abc import Sequence

from torch import Tensor

from infer.config import ModelConfig
from infer.engine.params import SamplingParams
from infer.engine.result import GeneratedToken
from infer.engine.sampler import sample
from infer.engine.text import Decodes, TextStream
from infer.values import shown

ON_FULL = ("error", "recompute")


class ContextExceeded(ValueError):
    """More positions were asked for than the model has."""


class CacheExceeded(ValueError):
    """More positions than the cache has."""


class NoToken(ValueError):
    """None can be chosen from such logits."""


class Request:
    """The tokens so far, and what turns logits into the next one. A request that is impossible is not made."""

    def __init__(
        self,
        config: ModelConfig,
        tokenizer: Decodes,
        prompt: Sequence[int],
        params: SamplingParams | None = None,
        capacity: int | None = None,
        on_full: str = "error",
    ) -> None:
        """capacity: of the cache, if it is there already; on_full: as for `stream`."""
        self.params = SamplingParams() if params is None else params
        if not isinstance(self.params, SamplingParams):
            raise TypeError(f"params must be SamplingParams, not {type(params).__name__}")
        self.tokens = token_ids(prompt)
        check_request(config, self.tokens, self.params, capacity, on_full)
        self.finish_reason: str | None = None
        self.prompt_len = len(self.tokens)
        self._text = TextStream(tokenizer, self.params.stop)
        self.seed = secrets.randbits(63) if self.params.seed is None else self.params.seed
        self._eos = () if self.params.ignore_eos else config.eos_token_ids

    @property
    def prompt(self) -> list[int]:
        return self.tokens[: self.prompt_len]

    @property
    def max_seq_len(self) -> int:
        """Positions it may come to fill."""
        return self.prompt_len + self.params.max_new_tokens

    def accept(self, logits: Tensor, started: float) -> GeneratedToken:
        """Choose the token to follow, from its logits [V]. started: when the step was, by `time.perf_counter`."""
        return self.push(sample(logits, self.tokens, self.prompt_len, self.params, self.seed), started)

    def push(self, token: int, started: float) -> GeneratedToken:
        """The token to follow, as chosen; -1: none could be."""
        elapsed = time.perf_counter() - started
        if token < 0:
            raise NoToken(
                f"no token can be chosen for position {len(self.tokens)}: the logits hold a NaN, or all are -inf"
            )
        self.tokens.append(token)
        is_eos = token in self._eos
        is_last = is_eos or len(self.tokens) == self.max_seq_len
        piece = "" if is_eos else self._text.push(token)
        if is_last:
            piece += self._text.finish()
        if self._text.stopped:
            self.finish_reason = "stop"
        elif is_last:
            self.finish_reason = "eos" if is_eos else "length"
        return GeneratedToken(token, piece, elapsed, self.finish_reason)


def token_ids(prompt: Sequence[int]) -> list[int]:
    """As plain integers, from whatever sequence of them: a list, an array, a tensor."""
    if isinstance(prompt, str):
        raise TypeError("the prompt must be token ids, not text: encode it first")
    try:
        return [operator.index(i) for i in prompt]
    except TypeError:
        raise TypeError(f"the prompt must be a flat sequence of token ids, not {prompt!r:.80}") from None


def check_request(
    config: ModelConfig,
    tokens: Sequence[int],
    params: SamplingParams,
    capacity: int | None = None,
    on_full: str = "error",
) -> None:
    """Refuse what cannot be generated, before any work. capacity: of the cache, if it is there already."""
    if on_full not in ON_FULL:
        raise ValueError(f"on_full must be one of {', '.join(ON_FULL)}, not {on_full!r}")
    if not tokens:
        raise ValueError("the prompt is empty: it needs at least one token")
    for where, ids in (("prompt", tokens), ("logit_bias", params.logit_bias)):
        wrong = [i for i in ids if not 0 <= i < config.vocab_size]
        if wrong:
            raise ValueError(
                f"token id {shown(wrong[0])} in the {where} is outside the vocabulary 0..{config.vocab_size - 1}"
            )
    if on_full == "recompute":
        return
    needed = len(tokens) + params.max_new_tokens
    for kind, what, limit in (
        (ContextExceeded, "model's context", config.max_position_embeddings),
        (CacheExceeded, "cache's capacity", capacity),
    ):
        if limit is not None and needed > limit:
            raise kind(
                f"{len(tokens)} prompt tokens + {params.max_new_tokens} new tokens = {needed} positions exceed the "
                f"{what} of {limit}: shorten the prompt or lower max_new_tokens"
            )


def check_chunk(prefill_chunk: int | None) -> None:
    if prefill_chunk is not None and not (type(prefill_chunk) is int and 1 <= prefill_chunk < 2**63):
        raise ValueError(f"prefill_chunk must be a whole number, 1 or more, not {shown(prefill_chunk)}")
