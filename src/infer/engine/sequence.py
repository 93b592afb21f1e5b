"""A sequence: a prompt, the tokens generated so far, and everything that the engine knows about them.

The scheduler plans how many of its tokens to compute, the runner computes them, and `commit` appends the next ones.
A sequence has one length (`token_ids`) and one count of what is computed (`num_computed_tokens`).
"""

from __future__ import annotations

import operator
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Collection
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from infer.cache.base import Cache
from infer.cache.debug import check_debug_layer, debugged
from infer.cache.traced import TracedCache
from infer.config import ModelConfig
from infer.engine.guide import guide_for
from infer.engine.logprobs import TokenLogprobs, logprobs_from_device, logprobs_of
from infer.engine.params import PARAMS, SamplingParams
from infer.engine.result import GeneratedToken, GenerationResult, Timing
from infer.engine.sampler import sample
from infer.engine.text import Detokenizer, SupportsDecode, decode_all
from infer.models.rows import ALL, LAST, NONE, HiddenStates
from infer.nn.packed import U64, mix
from infer.values import INTEGER, STRING, short_repr, takes, value_or_type

ON_FULL = ("error", "recompute")
POOLINGS = ("last", "mean", "first")  # of which tokens the hidden states make the embedding of a text
EMBED = SamplingParams(max_new_tokens=0, prompt_logprobs=0)  # of a sequence that is embedded: no text follows


class ContextExceeded(ValueError):
    """More positions than the model's context has."""


class CacheExceeded(ValueError):
    """More positions than the cache has."""


class NoToken(ValueError):
    """No token can be chosen from the logits."""


class NoTokenAllowed(NoToken):
    """A constraint allows no token, although the text is incomplete."""


class Recorder(Protocol):
    """Observes one sequence: its logits, and what its cache attends to."""

    def wrap(self, cache: Cache) -> TracedCache: ...
    def num_recorded(self, start: int, stop: int) -> int: ...  # how many of the last positions of start..stop
    def add_logits(self, start: int, logits: Tensor) -> None: ...  # [n, V], of the positions from start
    def record(
        self, tokens: list[int], logits: Tensor, cache: TracedCache, time_s: float, query: int, drafted: bool
    ) -> None: ...  # a token that was chosen, by which of the cache's rows


class Status(Enum):
    WAITING = "waiting"  # for its first step, or preempted
    RUNNING = "running"
    FINISHED = "finished"


class Sequence:
    """One prompt and its continuation. A sequence that cannot be generated is refused here."""

    @takes(params=PARAMS, priority=INTEGER, cache_salt=STRING)
    def __init__(
        self,
        config: ModelConfig,
        tokenizer: SupportsDecode,
        prompt: Iterable[int],
        params: SamplingParams | None = None,
        *,
        cache: Cache | None = None,
        on_full: str = "error",
        priority: int = 0,
        cache_salt: str | None = None,
        name: str = "",
        recorder: Recorder | None = None,
        draft: bool | Collection[int] = True,
        pooling: str | None = None,
    ) -> None:
        """cache: its own; None: the engine's memory provides one. on_full: see `stream`. priority: lower runs first.

        cache_salt: only sequences with the same one share cached prefixes. name: for error messages.
        draft: whether tokens may be drafted; or tokens that are likely to be generated, as of a text to edit.
        pooling: one of POOLINGS: no text follows the prompt, and the result has its embedding.
        """
        self.params = SamplingParams() if params is None else params
        self.token_ids = token_ids(prompt)
        check_sequence(config, self.token_ids, self.params, None if cache is None else cache.capacity, on_full)
        check_debug_layer(config.num_hidden_layers)
        self._num_layers = config.num_hidden_layers
        self.prompt_len = len(self.token_ids)
        self.max_len = self.prompt_len + self.params.max_new_tokens
        self.tokenizer, self.name, self.recorder = tokenizer, name, recorder
        self.seed = secrets.randbits(63) if self.params.seed is None else self.params.seed

        self.model_name = ""  # for the result: the engine sets it

        # Scheduling.
        self.status = Status.WAITING
        self.priority = priority
        self.arrival = 0  # its place in the order of arrival
        self.sort_key = (0, 0)  # of the scheduler: a step, then the arrival
        # Tokens to compute in chunks before it decodes: the prompt, or all if preempted; without the last one, once a
        # captured step computes that.
        self.num_prefill_tokens = 0
        self.draft_token_ids: list[int] = []  # guesses at the next tokens, verified by the next step
        self.drafts = draft is not False  # whether the engine's drafter may propose them
        self.prediction = [] if isinstance(draft, bool) else token_ids(draft, "draft")
        check_ids(config, {"draft": self.prediction})
        self.num_drafted = self.num_accepted = 0  # verified drafts

        # The cache.
        self.cache = cache
        self.capacity = 0  # positions that fit both its cache and the model's context
        self.num_computed_tokens = 0  # their keys and values are in the cache
        self.num_reserved_slots = 0  # positions that the cache has memory for
        self.recompute_tokens = 0  # each step computes this many of the last tokens again; 0: they are cached
        self.num_cached_tokens = 0  # tokens of the prompt found in the prefix cache
        self.cache_salt = cache_salt or ""
        self.page_hashes: list[str] = []  # of the prompt's full pages, then of the complete prompt
        self.num_published_pages = 0  # of these: found in the prefix cache, or computed and inserted into it
        self.awaited_page = ""  # the hash of a page that another sequence is computing
        self.cache_bytes = 0  # of its cache when it was freed

        # Captured steps.
        self.is_captured = False  # whether captured steps decode it
        self.slot = -1  # its row in the captured step; -1: none
        self.num_launched_tokens = 0  # computed by the steps launched so far; some of these have not been read yet
        self.num_written_tokens = 0  # positions that these have written to, those of wrong drafts included

        # The choice of tokens.
        self.settings = self.params.packed(self.seed, config.vocab_size)
        self.guide = guide_for(self.params, tokenizer, config)  # which tokens may follow; None: any
        self._eos = () if self.params.ignore_eos else config.eos_token_ids
        self._stop_text = Detokenizer(tokenizer, self.params.stop) if self.params.stop else None
        self.logprobs: list[TokenLogprobs] | None = None if self.params.logprobs is None else []
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        self.finish_reason: str | None = None
        self.error: BaseException | None = None
        self.pooling = pooling
        self.hidden: list[Tensor] = []  # outputs of the last norm [n, C] that are pooled, of each pass
        self.pass_hidden: HiddenStates | None = None  # those that the next pass returns
        self.embedding: Tensor | None = None  # [C], float32
        if self.params.prompt_logprobs is not None and pooling is None:
            self.prompt_logprobs = [None]  # nothing comes before the first token
            self._finish_if_scored()

        # Timing, by `time.perf_counter`, and who is notified.
        self.submitted_at = time.perf_counter()
        self.started_at: float | None = None  # its first step
        self.pass_started_at = 0.0  # the first pass that leads to its next token; 0: none yet
        self.step_time_s = 0.0  # of the passes that led to its last tokens
        self.token_times: list[float] = []  # a token can be read by other threads once its time is here
        self.notify: Callable[[Sequence], None] | None = None  # called after each commit, and at the end

    def __repr__(self) -> str:
        what = f"{self.prompt_len} prompt tokens, {self.num_tokens - self.prompt_len} generated"
        return f"Sequence({what}, {self.num_computed_tokens} computed, {self.finish_reason or self.status.value})"

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def prompt(self) -> list[int]:
        return self.token_ids[: self.prompt_len]

    @property
    def is_prefill(self) -> bool:
        """Whether the next step computes a chunk of a prompt; a step that decodes computes one token, and drafts."""
        return self.num_computed_tokens < self.num_prefill_tokens

    @property
    def is_finished(self) -> bool:
        return self.status is Status.FINISHED

    @property
    def num_recompute_tokens(self) -> int:
        """Tokens that each step computes again; 0: they are cached."""
        return min(self.recompute_tokens, len(self.token_ids))

    @property
    def num_logprobs(self) -> int | None:
        """Top-k whose log-probabilities are returned with each token; None: no log-probabilities."""
        return self.params.logprobs

    def next_tokens(self, count: int) -> list[int]:
        """The next `count` tokens to compute."""
        if self.recompute_tokens:
            return self.token_ids[-self.recompute_tokens :]
        first = self.num_computed_tokens
        return (self.token_ids[first:] + self.draft_token_ids)[:count]

    def wrap(self, cache: Cache) -> Cache:
        """The cache with what observes it: a trace, KV_DEBUG."""
        cache = debugged(cache, self._num_layers)
        return cache if self.recorder is None else self.recorder.wrap(cache)

    # What a step has computed.

    @property
    def num_scored_prompt_tokens(self) -> int | None:
        """Prompt tokens whose log-probabilities are known; None: no more are needed.

        Those before it may come from the prefix cache.
        """
        if self.pooling in ("mean", "first"):
            return 0  # hidden states are not cached
        if self.prompt_logprobs is None or len(self.prompt_logprobs) == self.prompt_len:
            return None
        return len(self.prompt_logprobs)

    def logits_slice(self, start: int, stop: int) -> slice:
        """The positions, counted from start, whose logits a step has to return if it computes start..stop."""
        if self.pooling is not None:
            return NONE if self.hidden_slice(start, stop) == NONE else LAST
        n = first = stop - start
        if stop >= (length := len(self.token_ids)):
            first = n - 1 - (stop - length)  # the last token, and drafts after it
        if (scored := self.num_scored_prompt_tokens) is not None and stop >= scored:
            first = min(first, max(0, scored - 1 - start))
        if self.recorder is not None and (observed := self.recorder.num_recorded(start, stop)):
            first = min(first, n - observed)
        return NONE if first == n else LAST if first == n - 1 else slice(first, None)

    def hidden_slice(self, start: int, stop: int) -> slice:
        """The same for outputs of the last norm, of which the embedding is made."""
        if self.pooling == "mean":
            return ALL
        if self.pooling == "first" and start == 0:
            return slice(0, 1)
        return LAST if self.pooling == "last" and stop == len(self.token_ids) else NONE

    def commit(self, start: int, n: int, logits: Tensor) -> list[int]:
        """Append the next tokens. logits [k, V]: of the last k of the n tokens computed from position start.

        Log-probabilities of the prompt come first. If all tokens are computed, the next one is chosen; a draft that
        equals it is accepted, and its own logits choose the token after it. The first mismatch and all drafts after it
        are rejected, and the cache is rolled back. Returns the tokens chosen.
        """
        if self.pooling is not None:
            self._commit_hidden(start, n)
            return []
        k, length = logits.shape[0], len(self.token_ids)
        first = start + n - k  # position of the first logits
        if self.recorder is not None:
            self.recorder.add_logits(first, logits)
        if (scored := self.num_scored_prompt_tokens) is not None and k:
            self._score(logits[max(0, scored - 1 - first) :])
        drafts, self.draft_token_ids = self.draft_token_ids, []
        if not self.recompute_tokens:
            self.num_computed_tokens = start + n
        if start + n < length or self.finish_reason is not None:
            return []
        chosen = []
        try:
            for at in range(length - 1 - first, k):
                token = self._sample(logits[at])
                self.append_token(token)
                chosen.append(token)
                if self.finish_reason is not None or drafts[: len(chosen)] != chosen:
                    break
        finally:
            self.num_drafted += len(drafts)
            self.num_accepted += sum(map(operator.eq, chosen, drafts))
            if drafts and self.cache is not None:
                self.num_computed_tokens = self.num_tokens - 1
                if self.cache.seq_len > self.num_computed_tokens:
                    self.cache.truncate(self.num_computed_tokens)
                    self.num_reserved_slots = 0  # pages after them are free again
        return chosen

    def _commit_hidden(self, start: int, n: int) -> None:
        """Keep the hidden states of a pass; after the last one, pool them."""
        if start == 0:
            self.hidden = []  # of before it was preempted
        if self.pass_hidden is not None and self.pass_hidden.final is not None:
            self.hidden.append(self.pass_hidden.final[0].float())
            self.pass_hidden = None
        self.num_computed_tokens = start + n
        if self.num_computed_tokens == len(self.token_ids):
            states = torch.cat(self.hidden)
            self.embedding = (states.mean(0) if self.pooling == "mean" else states[0]).cpu()
            self.hidden, self.finish_reason = [], "length"

    def commit_from_device(self, tokens: Collection[int], logprob_terms: Collection[list[int]] | None) -> None:
        """Commit tokens that the device has chosen: all but the last are drafts."""
        drafts, self.draft_token_ids = self.draft_token_ids, []
        self.num_drafted += len(drafts)
        for i, token in enumerate(tokens):
            self.num_computed_tokens += 1
            if logprob_terms is not None and self.logprobs is not None and token >= 0:
                self.logprobs.append(logprobs_from_device(logprob_terms[i], token, self.params.logprobs or 0))
            self.append_token(token)
            self.num_accepted += drafts[i : i + 1] == [token]
            if self.finish_reason is not None:
                break

    def append_token(self, token: int) -> None:
        """Append the token chosen; -1: none could be. `finish_reason` says whether it is the last."""
        if token < 0:
            words = f"no token can be chosen for position {self.num_tokens}"
            if self.guide is not None and self.guide.error:
                raise NoTokenAllowed(f"{words}: {self.guide.error}")
            raise NoToken(f"{words}: the logits contain a NaN, or all are -inf")
        self.token_ids.append(token)
        if token in self._eos:
            self.finish_reason = "eos"
        elif self.guide is not None and self.guide.append_token(token):
            self.finish_reason = "stop"
        elif len(self.token_ids) == self.max_len:
            self.finish_reason = "length"
        if self._stop_text is not None:
            self._stop_text.push(token, self.finish_reason)
            if self._stop_text.stopped:
                self.finish_reason = "stop"

    def _sample(self, logits: Tensor) -> int:
        """The next token, from its logits [V]; -1: none can be chosen."""
        # The mask first, to overlap with a device that still computes the logits.
        allowed = None if self.guide is None else self.guide.allowed()
        logits = logits.detach().cpu().float()  # once, for the sample and its log-probabilities
        token = sample(logits, self.token_ids, self.prompt_len, self.params, self.seed, allowed, self.settings)
        if self.logprobs is not None and token >= 0:
            self.logprobs += logprobs_of(logits[None], [token], self.params.logprobs or 0)
        return token

    def _score(self, logits: Tensor) -> None:
        """Log-probabilities of the prompt's next tokens, from the logits [n, V] that each would be chosen from."""
        assert self.prompt_logprobs is not None
        following = self.token_ids[len(self.prompt_logprobs) : self.prompt_len][: len(logits)]
        self.prompt_logprobs += logprobs_of(logits[: len(following)], following, self.params.prompt_logprobs or 0)
        self._finish_if_scored()

    def _finish_if_scored(self) -> None:
        if not self.params.max_new_tokens and self.num_scored_prompt_tokens is None:
            self.finish_reason = "length"

    # What readers get.

    def read(self, at: int, text: Detokenizer, index: int = 0, time_s: float | None = None) -> GeneratedToken:
        """The generated token number `at`, with the text that it adds to the stream of those before it.

        time_s: None: the time since the token before it.
        """
        position, times = self.prompt_len + at, self.token_times
        reason = self.finish_reason  # before the length: the engine sets it before the last token can be read
        reason = reason if position + 1 == len(self.token_ids) and reason != "interrupted" else None
        token = self.token_ids[position]
        if time_s is None:
            time_s = times[at] - (times[at - 1] if at else self.started_at or self.submitted_at)
        logprobs = None if self.logprobs is None else self.logprobs[at]
        return GeneratedToken(token, text.push(token, reason), time_s, reason, logprobs, index)

    def text(self) -> str:
        """The generated text."""
        generated = self.token_ids[self.prompt_len : self.num_tokens - (self.finish_reason == "eos")]
        return decode_all(self.tokenizer, generated, self.params.stop)

    def result(self) -> GenerationResult:
        """Of a finished sequence."""
        times, started_at = self.token_times, self.started_at or self.submitted_at
        return GenerationResult(
            prompt_token_ids=self.prompt,
            token_ids=self.token_ids[self.prompt_len :],
            text=self.text(),
            finish_reason=self.finish_reason or "interrupted",
            timing=Timing(
                times[0] - started_at if times else 0.0,
                [after - before for before, after in pairwise(times)],
                started_at - self.submitted_at,
            ),
            cache_memory_bytes=self.cache_bytes,
            num_cached_tokens=self.num_cached_tokens,
            seed=self.seed,
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
            schema=self.params.schema,
            model=self.model_name,
            drafted=self.num_drafted,
            accepted=self.num_accepted,
            embedding=self.embedding,
        )


def make_sequences(
    config: ModelConfig,
    tokenizer: SupportsDecode,
    prompt: Iterable[int],
    params: SamplingParams,
    **options: Any,
) -> list[Sequence]:
    """A sequence for each of the n samples: the first with the seed itself, the others with seeds derived from it.

    options: of each `Sequence`.
    """
    if params.n > 1 and options.get("recorder") is not None:
        raise ValueError(f"a trace records one text, not n={params.n}")
    seed = secrets.randbits(63) if params.seed is None else params.seed
    seeds = [seed, *(mix((mix(seed) + i) & U64) for i in range(1, params.n))]
    prompt = token_ids(prompt)
    samples = [params] if params.n == 1 else [replace(params, n=1, seed=each) for each in seeds]
    return [Sequence(config, tokenizer, prompt, each, **options) for each in samples]


def params_of_each(prompts: Collection[object], params: Any) -> list[Any]:
    """The params of each prompt, of one for all or one each."""
    each = list(params) if isinstance(params, Collection) else [params] * len(prompts)
    if len(each) != len(prompts):
        raise ValueError(f"{len(each)} SamplingParams for {len(prompts)} prompts: give one for all, or one for each")
    return each


@contextmanager
def named(name: str, *kinds: type[Exception]) -> Iterator[None]:
    """Put the name of the prompt in front of an error."""
    try:
        yield
    except kinds as error:
        kind = ValueError if isinstance(error, UnicodeError) else type(error)  # which takes five arguments
        raise kind(f"{name}: {error}") from None


def token_ids(prompt: Iterable[int], name: str = "the prompt") -> list[int]:
    """As Python integers, from a list, an array or a tensor."""
    if isinstance(prompt, str):
        raise TypeError(f"{name} must be token ids, not text: encode it first")
    try:
        return [*map(operator.index, prompt)]
    except TypeError:
        raise TypeError(f"{name} must be a flat sequence of token ids, not {value_or_type(prompt)}") from None


def check_ids(config: ModelConfig, ids_of: Mapping[str, Collection[int] | Mapping[int, float]]) -> None:
    """Refuse token ids outside the vocabulary, of lists by their names."""
    for where, ids in ids_of.items():
        if ids and not 0 <= min(ids) <= max(ids) < config.vocab_size:
            wrong = next(i for i in ids if not 0 <= i < config.vocab_size)
            raise ValueError(
                f"token id {short_repr(wrong)} in the {where} is outside the vocabulary 0..{config.vocab_size - 1}"
            )


def check_sequence(
    config: ModelConfig,
    tokens: Collection[int],
    params: SamplingParams,
    capacity: int | None = None,
    on_full: str = "error",
) -> None:
    """Refuse what cannot be generated, before any work. capacity: of the cache, if there is one already."""
    if on_full not in ON_FULL:
        raise ValueError(f"on_full must be one of {', '.join(ON_FULL)}, not {on_full!r}")
    if not tokens:
        raise ValueError("the prompt is empty: it needs at least one token")
    check_ids(config, {"prompt": tokens, "logit_bias": params.logit_bias})
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
            longer = f", or load the model with a longer context, up to {config.longest_context} (--context)"
            hint = longer if kind is ContextExceeded and limit < config.longest_context else ""
            raise kind(
                f"{len(tokens)} prompt tokens + {params.max_new_tokens} new tokens = {needed} positions exceed the "
                f"{what} of {limit}: shorten the prompt or lower max_new_tokens{hint}"
            )
