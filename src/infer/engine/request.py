"""One sequence on its way from prompt to end, and what is refused before it starts."""

from __future__ import annotations

import operator
import secrets
import time
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from infer.config import ModelConfig
from infer.engine.guide import guide_for
from infer.engine.logprobs import TokenLogprobs, logprobs_from_device, logprobs_of
from infer.engine.params import PARAMS, SamplingParams
from infer.engine.result import GeneratedToken
from infer.engine.sampler import sample
from infer.engine.text import Decodes, TextStream, whole_text
from infer.models.rows import LAST, NONE
from infer.nn.draw import U64, mix
from infer.values import named, shown, takes

ON_FULL = ("error", "recompute")


class ContextExceeded(ValueError):
    """More positions were asked for than the model has."""


class CacheExceeded(ValueError):
    """More positions than the cache has."""


class NoToken(ValueError):
    """None can be chosen from such logits."""


class NoTokenAllowed(NoToken):
    """A constraint allows none, though the text is not whole."""


class Request:
    """The tokens so far, and what turns logits into the next one. A request that is impossible is not made."""

    @takes(params=PARAMS)
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
        self.tokens = token_ids(prompt)
        check_request(config, self.tokens, self.params, capacity, on_full)
        self.guide = guide_for(self.params, tokenizer, config)  # what may follow; None: anything
        self.finish_reason: str | None = None
        self.prompt_len = len(self.tokens)
        self.tokenizer = tokenizer
        self._text = TextStream(tokenizer, self.params.stop)
        self.seed = secrets.randbits(63) if self.params.seed is None else self.params.seed
        self.max_seq_len = self.prompt_len + self.params.max_new_tokens  # positions it may come to fill
        self._eos = () if self.params.ignore_eos else config.eos_token_ids
        self.logprobs: list[TokenLogprobs] | None = None if self.params.logprobs is None else []
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        if self.params.prompt_logprobs is not None:
            self.prompt_logprobs = [None]
            self._end_if_scored()

    @property
    def prompt(self) -> list[int]:
        return self.tokens[: self.prompt_len]

    def wanted(self, start: int, stop: int) -> slice:
        """Of tokens that are fed, those whose logits are needed. start, stop: their positions."""
        if self.scored is not None:
            return slice(max(0, self.scored - 1 - start), None) if stop >= self.scored else NONE
        return LAST if stop == len(self.tokens) else NONE

    @property
    def scored(self) -> int | None:
        """Tokens of the prompt whose log-probabilities are there; None: no more are wanted."""
        if self.prompt_logprobs is None or len(self.prompt_logprobs) == self.prompt_len:
            return None
        return len(self.prompt_logprobs)

    def score(self, logits: Tensor) -> None:
        """The prompt's next tokens, from the logits [n, V] that each would be chosen from."""
        assert self.prompt_logprobs is not None
        following = self.tokens[len(self.prompt_logprobs) : self.prompt_len][: len(logits)]
        self.prompt_logprobs += logprobs_of(logits[: len(following)], following, self.params.prompt_logprobs or 0)
        self._end_if_scored()

    def _end_if_scored(self) -> None:
        if not self.params.max_new_tokens and len(self.prompt_logprobs or ()) == self.prompt_len:
            self.finish_reason = "length"

    def choose(self, logits: Tensor) -> int:
        """The token to follow, from its logits [V]; -1: none can be."""
        # Asked for before the logits are: these may still be on their way from a device.
        allowed = None if self.guide is None else self.guide.allowed()
        token = sample(logits, self.tokens, self.prompt_len, self.params, self.seed, allowed)
        if self.logprobs is not None and token >= 0:
            self.logprobs += logprobs_of(logits[None], [token], self.params.logprobs or 0)
        return token

    def add_logprobs(self, token: int, numbers: Sequence[int]) -> None:
        """Of a token that a device has chosen, what its log-probabilities are made of."""
        if self.logprobs is not None and token >= 0:
            self.logprobs.append(logprobs_from_device(numbers, token, self.params.logprobs or 0))

    def take(self, token: int) -> None:
        """The token to follow, as chosen; -1: none could be. Whether it is the last shows in `finish_reason`."""
        if token < 0:
            words = f"no token can be chosen for position {len(self.tokens)}"
            if self.guide is not None and self.guide.error:
                raise NoTokenAllowed(f"{words}: {self.guide.error}")
            raise NoToken(f"{words}: the logits hold a NaN, or all are -inf")
        self.tokens.append(token)
        if token in self._eos:
            self.finish_reason = "eos"
        elif self.guide is not None and self.guide.take(token):
            self.finish_reason = "stop"
        elif len(self.tokens) == self.max_seq_len:
            self.finish_reason = "length"

    def take_stopping(self, token: int) -> None:
        """As `take`, where a stop string may end it."""
        self.take(token)
        self._shown(token)

    def push(self, token: int, started: float) -> GeneratedToken:
        """As `take`, with its text. started: when the step was, by `time.perf_counter`."""
        elapsed = time.perf_counter() - started
        self.take(token)
        piece = self._shown(token)
        return GeneratedToken(
            token, piece, elapsed, self.finish_reason, None if self.logprobs is None else self.logprobs[-1]
        )

    def text(self) -> str:
        """Of all tokens taken so far, as `push` would have given it."""
        tokens = self.tokens[self.prompt_len : len(self.tokens) - (self.finish_reason == "eos")]
        if not self.params.stop:
            return whole_text(self.tokenizer, tokens)
        stream = TextStream(self.tokenizer, self.params.stop)
        return "".join(map(stream.push, tokens)) + stream.finish()

    def _shown(self, token: int) -> str:
        """The text of the token taken last; a stop string in it ends the request."""
        piece = "" if self.finish_reason == "eos" else self._text.push(token)
        if self.finish_reason is not None:
            piece += self._text.finish()
        if self._text.stopped:
            self.finish_reason = "stop"
        return piece


def samples(
    config: ModelConfig,
    tokenizer: Decodes,
    prompt: Sequence[int],
    params: SamplingParams | None = None,
    on_full: str = "error",
) -> list[Request]:
    """A request for each of the n samples that are asked for: the first with the seed itself, the others derived."""
    first = Request(config, tokenizer, prompt, params, on_full=on_full)
    params = first.params
    seeds = [mix((mix(first.seed) + i) & U64) for i in range(1, params.n)]
    if params.n > 1:
        first.params = replace(params, n=1, seed=first.seed)
    return [
        first,
        *(Request(config, tokenizer, first.tokens, replace(params, n=1, seed=seed), on_full=on_full) for seed in seeds),
    ]


def token_ids(prompt: Sequence[int]) -> list[int]:
    """As plain integers, from whatever sequence of them: a list, an array, a tensor."""
    if isinstance(prompt, str):
        raise TypeError("the prompt must be token ids, not text: encode it first")
    try:
        return [*map(operator.index, prompt)]
    except TypeError:
        raise TypeError(f"the prompt must be a flat sequence of token ids, not {named(prompt)}") from None


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
        if ids and not 0 <= min(ids) <= max(ids) < config.vocab_size:
            wrong = next(i for i in ids if not 0 <= i < config.vocab_size)
            raise ValueError(
                f"token id {shown(wrong)} in the {where} is outside the vocabulary 0..{config.vocab_size - 1}"
            )
    if on_full == "recompute":
        if params.prompt_logprobs is not None and len(tokens) > config.max_position_embeddings:
            raise ContextExceeded(
                f"prompt_logprobs need all {len(tokens)} tokens of the prompt at once, but the model's context is "
                f"{config.max_position_embeddings}"
            )
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
