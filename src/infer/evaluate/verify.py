"""What `infer verify` compares with: its prompts, its caches, and what may be expected of a model."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, cycle, islice
from typing import Any

import torch

from infer.backend import backend_for
from infer.cache import BaseCache, GrowingCache, KVCache, NoCache, PagedCache, SlidingCache
from infer.cache.base import resolve_cache_dtype
from infer.config import ModelConfig
from infer.engine.model import Model, model_device, model_dtype
from infer.engine.params import SamplingParams
from infer.engine.request import check_request
from infer.engine.text import Encodes, encode_readable
from infer.models.common import Decoder

CACHES: tuple[type[BaseCache], ...] = (KVCache, GrowingCache, SlidingCache, PagedCache)
LONG_EXTRA = 48  # tokens that the long prompt has beyond the window

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
    """Refuse what cannot be generated, before the weights are read."""
    for prompt in prompts:
        check_request(config, prompt, SamplingParams(max_new_tokens=max_new_tokens))


def own_prompts(config: ModelConfig, tokenizer: Encodes, max_new_tokens: int) -> dict[str, list[int]]:
    """The built-in prompts by their text, as far as the model can read them and its context has room for them."""
    room = max(1, config.max_position_embeddings - max_new_tokens)
    prompts = {text: encode_readable(tokenizer, text)[:room] for text in PROMPTS}
    return {text: ids for text, ids in prompts.items() if ids}


def with_long_prompt(config: ModelConfig, prompts: Sequence[list[int]], max_new_tokens: int) -> list[list[int]]:
    """The prompts, and if the context has room, all of them in a row, repeated until they are longer than a window."""
    length = (config.sliding_window or 0 if config.has_windows else LONG_EXTRA) + LONG_EXTRA
    if length + max_new_tokens > config.max_position_embeddings:
        return list(prompts)
    return [*prompts, list(islice(cycle(chain(*prompts)), length))]


class Recomputing(KVCache):
    """Rounds as a cache of its dtype does, and keeps nothing: every pass starts at position 0, as with NoCache."""

    def advance(self, n: int) -> None:
        super().advance(n)
        self.reset()


def reference_cache(model: Model, max_seq_len: int, cache_dtype: str) -> BaseCache:
    """What keeps nothing."""
    if cache_dtype == "auto":
        return NoCache(1, model_device(model))
    return empty_cache(Recomputing, model, max_seq_len, None, cache_dtype)


def empty_cache(
    kind: type[BaseCache], model: Model, max_seq_len: int, chunk: int | None, cache_dtype: str = "auto"
) -> BaseCache:
    dtype = resolve_cache_dtype(cache_dtype, model_dtype(model) or torch.float32)
    # A ring as narrow as the chunks allow: it wraps soonest.
    layout: dict[str, Any] = {"prefill_chunk": chunk or 1} if kind is SlidingCache else {}
    return kind.from_model_config(model.config, max_seq_len, dtype=dtype, device=model_device(model), **layout)


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    if a == b:
        return None
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def why_plain_torch(model: Decoder) -> str | None:
    """Why passes of this model are plain torch, so that no bits are promised; None if they go through kernels."""
    with torch.no_grad():
        backend = backend_for(model)
    return backend.why if backend.name == "torch" else None
