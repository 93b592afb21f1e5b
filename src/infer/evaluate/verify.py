"""Prompts and caches of `infer verify`, and whether a model runs on kernels."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, cycle, islice
from typing import Any

import torch

from infer.backend import backend_for
from infer.cache import BaseCache, GrowingCache, KVCache, NoCache, PagedCache, SlidingCache
from infer.config import ModelConfig
from infer.engine.model import Model, cache_dtype_of, model_device
from infer.engine.params import SamplingParams
from infer.engine.sequence import check_sequence
from infer.engine.text import SupportsEncode, common_prefix, encode_readable
from infer.models.common import Decoder

CACHES: tuple[type[BaseCache], ...] = (KVCache, GrowingCache, SlidingCache, PagedCache)
LONG_EXTRA = 48  # tokens of the long prompt beyond the window

PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "Q: What is 17 + 25?\nA:",
    "Die drei größten Städte Deutschlands sind",
    "1, 1, 2, 3, 5, 8,",
    "Dear Sir or Madam,\n\nI am writing to",
    "水は",
)


def check(config: ModelConfig, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
    """Refuse invalid arguments before the weights are read."""
    for prompt in prompts:
        check_sequence(config, prompt, SamplingParams(max_new_tokens=max_new_tokens))


def own_prompts(config: ModelConfig, tokenizer: SupportsEncode, max_new_tokens: int) -> dict[str, list[int]]:
    """The built-in prompts that the tokenizer can encode, by their text, cut to fit the context."""
    longest = max(1, config.max_position_embeddings - max_new_tokens)
    prompts = {text: encode_readable(tokenizer, text)[:longest] for text in PROMPTS}
    return {text: ids for text, ids in prompts.items() if ids}


def with_long_prompt(config: ModelConfig, prompts: Sequence[list[int]], max_new_tokens: int) -> list[list[int]]:
    """The prompts, and, if the context allows, one longer than the window: all prompts concatenated and repeated."""
    length = (config.sliding_window or 0 if config.has_windows else LONG_EXTRA) + LONG_EXTRA
    if length + max_new_tokens > config.max_position_embeddings:
        return list(prompts)
    return [*prompts, list(islice(cycle(chain(*prompts)), length))]


class Recomputing(KVCache):
    """Rounds to its dtype, but keeps nothing: every pass starts at position 0, as with NoCache."""

    def advance(self, n: int) -> None:
        super().advance(n)
        self.reset()


def reference_cache(model: Model, max_seq_len: int, cache_dtype: str) -> BaseCache:
    """A cache that keeps nothing."""
    if cache_dtype == "auto":
        return NoCache(1, model_device(model))
    return empty_cache(Recomputing, model, max_seq_len, None, cache_dtype)


def empty_cache(
    kind: type[BaseCache], model: Model, max_seq_len: int, chunk: int | None, cache_dtype: str = "auto"
) -> BaseCache:
    dtype = cache_dtype_of(model, cache_dtype)
    # The smallest ring that the chunks allow, because it wraps first.
    options: dict[str, Any] = {"prefill_chunk": chunk or 1} if kind is SlidingCache else {}
    return kind.from_model_config(model.config, max_seq_len, dtype=dtype, device=model_device(model), **options)


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    return None if a == b else common_prefix(a, b)


def why_plain_torch(model: Decoder) -> str | None:
    """Why this model runs in plain torch, which does not guarantee equal bits; None if it runs on kernels."""
    with torch.no_grad():
        backend = backend_for(model)
    return backend.reason if backend.name == "torch" else None
