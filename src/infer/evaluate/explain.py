"""The savings of the KV cache, computed for one run: `infer explain`.

`explain` generates the same tokens with the cache and without it; the rest is arithmetic on the measurements. P is the
number of prompt tokens and N that of new tokens: N passes, the first of which is over the prompt. Once the text is
longer than the model's context, the cache is of no use: each pass is over the last tokens that fit.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from infer.cache.ring import layer_slots
from infer.config import ModelConfig
from infer.engine.generate import generate
from infer.engine.model import Model, model_dtype, weight_bytes
from infer.engine.params import SamplingParams
from infer.engine.result import GenerationResult
from infer.engine.sequence import check_sequence
from infer.engine.text import SupportsDecode
from infer.values import MODEL, takes

NEW, REPEATED, REUSED, NOT_YET, DROPPED = "new", "repeated", "reused", "not yet", "dropped"
MAX_CONTEXTS = 4  # the prompt and the tokens after it are at most so many times the model's context
TRIALS = 2  # of each run; the faster time of each step counts, because the machine runs other processes too


def work(token: int, step: int, prompt_tokens: int, *, use_kv_cache: bool, context: int = sys.maxsize) -> str:
    """Whether step number `step` computes or reuses the key and value of token number `token` (both from 0)."""
    first = max(0, token - prompt_tokens + 1)  # the step that computes it
    if step <= first:
        return NEW if step == first else NOT_YET
    if (dropped := prompt_tokens + step - context) > 0:
        return REPEATED if token >= dropped else DROPPED
    return REUSED if use_kv_cache else REPEATED


def tokens_fed(prompt_tokens: int, new_tokens: int, *, use_kv_cache: bool, context: int = sys.maxsize) -> list[int]:
    """The number of input tokens of each step; the last generated token is never an input."""
    lengths = range(prompt_tokens, prompt_tokens + new_tokens)  # of the text before each step
    if use_kv_cache:
        return [1 if prompt_tokens < length <= context else min(length, context) for length in lengths]
    return [min(length, context) for length in lengths]


@dataclass(frozen=True)
class Passes:
    """The forward passes of one run, in order."""

    fed: list[int]  # input tokens of each pass
    times_ms: list[float]

    @property
    def tokens(self) -> int:
        return sum(self.fed)

    @property
    def total_ms(self) -> float:
        return sum(self.times_ms)

    @property
    def ms_per_token(self) -> float:
        return self.total_ms / self.tokens


@dataclass(frozen=True)
class Cost:
    """A line through two medians: a pass over n tokens takes fixed_ms + n x per_token_ms."""

    step_ms: float  # of a pass over one token
    pass_ms: float  # of a pass over pass_tokens
    pass_tokens: float

    @property
    def per_token_ms(self) -> float:
        return (self.pass_ms - self.step_ms) / (self.pass_tokens - 1)

    @property
    def fixed_ms(self) -> float:
        return self.step_ms - self.per_token_ms

    @property
    def is_plausible(self) -> bool:
        """Whether both parts are positive. They are not if passes are too short, or times too noisy."""
        return self.fixed_ms > 0 and self.per_token_ms > 0

    def of(self, passes: Passes) -> float:
        """The expected time of all passes, in milliseconds."""
        return len(passes.fed) * self.fixed_ms + passes.tokens * self.per_token_ms


@dataclass(frozen=True)
class Explanation:
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    same_tokens: bool  # in both runs
    with_cache: Passes
    without_cache: Passes
    weight_bytes: int
    element_size: int  # bytes of an element of the cache
    cache_bytes: int  # as allocated
    context: int  # of the model

    @property
    def positions(self) -> int:
        """The capacity of the cache."""
        return min(len(self.prompt_token_ids) + len(self.token_ids), self.context)

    @property
    def num_recomputed_steps(self) -> int:
        """Steps at the end, whose text is longer than the context."""
        return max(0, len(self.prompt_token_ids) + len(self.token_ids) - 1 - self.context)

    @property
    def theoretical_speed_up(self) -> float:
        """Assumes equal cost per token."""
        return self.without_cache.tokens / self.with_cache.tokens

    @property
    def speed_up(self) -> float:
        return self.without_cache.total_ms / self.with_cache.total_ms

    @property
    def cost(self) -> Cost:
        uncached = self.without_cache
        return Cost(
            statistics.median(self.with_cache.times_ms[1 : len(self.token_ids) - self.num_recomputed_steps]),
            statistics.median(uncached.times_ms),
            statistics.median(uncached.fed),
        )


def check(config: ModelConfig, prompt_token_ids: Sequence[int], max_new_tokens: int) -> None:
    """Check the arguments of `explain` before the weights are read."""
    if max_new_tokens < 2:
        raise ValueError(
            f"max_new_tokens must be at least 2, not {max_new_tokens}: the first new token comes from the pass over "
            "the prompt, and only the next one can reuse anything"
        )
    _params(max_new_tokens)
    if len(prompt_token_ids) + max_new_tokens > MAX_CONTEXTS * config.max_position_embeddings:
        raise ValueError(
            f"{len(prompt_token_ids)} prompt tokens + {max_new_tokens} new tokens are more than {MAX_CONTEXTS} times "
            f"the model's context of {config.max_position_embeddings}, which is as far as explain goes"
        )
    check_sequence(config, prompt_token_ids, _params(1))  # the first step that reuses anything has to fit


@takes(model=MODEL)
def explain(
    model: Model, tokenizer: SupportsDecode, prompt_token_ids: Sequence[int], max_new_tokens: int
) -> Explanation:
    """Run with and without the cache, alternating, after a short warm-up of both."""
    check(model.config, prompt_token_ids, max_new_tokens)

    def run(new_tokens: int, use_kv_cache: bool) -> GenerationResult:
        params = _params(new_tokens)
        return generate(model, tokenizer, prompt_token_ids, params, use_kv_cache=use_kv_cache, on_full="recompute")

    for use_kv_cache in (True, False):
        run(2, use_kv_cache)
    trials = [(run(max_new_tokens, True), run(max_new_tokens, False)) for _ in range(TRIALS)]
    cached, uncached = trials[0]
    context = model.config.max_position_embeddings
    return Explanation(
        prompt_token_ids=cached.prompt_token_ids,
        token_ids=cached.token_ids,
        text=cached.text,
        same_tokens=cached.token_ids == uncached.token_ids,
        with_cache=_passes([trial[0] for trial in trials], context, use_kv_cache=True),
        without_cache=_passes([trial[1] for trial in trials], context, use_kv_cache=False),
        weight_bytes=weight_bytes(model),
        element_size=(model_dtype(model) or torch.float32).itemsize,
        cache_bytes=cached.cache_memory_bytes,
        context=context,
    )


def _params(max_new_tokens: int) -> SamplingParams:
    """Greedy, ignoring end-of-sequence tokens, so that both runs have the same length."""
    return SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=True)


def _passes(trials: Sequence[GenerationResult], context: int, *, use_kv_cache: bool) -> Passes:
    times_s = [[result.timing.prefill_time_s, *result.timing.decode_times_s] for result in trials]
    return Passes(
        tokens_fed(trials[0].prompt_tokens, trials[0].generated_tokens, use_kv_cache=use_kv_cache, context=context),
        [min(times) * 1000 for times in zip(*times_s, strict=True)],
    )


@dataclass(frozen=True)
class LayerKind:
    """The layers of a model with the same window."""

    window: int | None  # None: they see and keep all positions
    layers: int
    slots: int  # positions that each layer keeps
    bytes: int  # of all these layers


def cache_layout(config: ModelConfig, positions: int, element_size: int) -> list[LayerKind]:
    """The default cache for this many positions: 2 x layers x KV heads x head_dim x slots x bytes."""
    per_slot = config.cache_bytes_per_token(element_size) // config.num_hidden_layers  # of one layer
    windows = config.windows
    slots = dict(zip(windows, layer_slots(config, positions), strict=True))
    return [
        LayerKind(window, windows.count(window), slots[window], windows.count(window) * slots[window] * per_slot)
        for window in sorted(slots, key=lambda window: window or 0)
    ]
