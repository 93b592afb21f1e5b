"""The cache of a request: the default one for a model, and what is refused of one that is given."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from infer.cache.base import BaseCache, Cache, NoCache, resolve_cache_dtype
from infer.cache.contiguous import KVCache
from infer.cache.ring import PREFILL_CHUNK, SlidingCache
from infer.cache.wrapped import innermost
from infer.engine.model import Model, model_device, model_dtype
from infer.models.common import Decoder
from infer.parallel.pages import split_cache


def make_cache(
    model: Model,
    max_seq_len: int,
    device: torch.device,
    *,
    use_kv_cache: bool = True,
    prefill_chunk: int | None = None,
    cache_dtype: str = "auto",
) -> Cache:
    """The default cache for a model, or none. max_seq_len: more than the model's context is never used."""
    check_cache_dtype(cache_dtype, None, use_kv_cache)
    if not use_kv_cache:
        return NoCache(1, device)
    max_seq_len = min(max_seq_len, model.config.max_position_embeddings)
    dtype = resolve_cache_dtype(cache_dtype, model_dtype(model) or torch.float32)
    if isinstance(model, Decoder) and model.group is not None:
        return split_cache(model, max_seq_len, dtype)
    if model.config.has_windows:
        return SlidingCache.from_model_config(
            model.config, max_seq_len, prefill_chunk=prefill_chunk or PREFILL_CHUNK, dtype=dtype, device=device
        )
    return KVCache.from_model_config(model.config, max_seq_len, dtype=dtype, device=device)


def check_fits(model: Model, cache: Cache | None, batch_size: int) -> None:
    """Refuse a cache that was made for something else."""
    if isinstance(cache, BaseCache):
        cache.check_model(model.config, batch_size, model_dtype(model), model_device(model))
        if isinstance(model, Decoder):
            cache.check_contents(model.embed_tokens)


def keep_prefix(cache: Cache, prompt: Sequence[int]) -> None:
    """Of what a cache holds, keep what the prompt begins with, less at least one token, to have logits of it."""
    if not cache.seq_len:
        return
    inner = innermost(cache)
    held = inner.contents.tokens(cache.seq_len) if isinstance(inner, BaseCache) else None
    if held is None:  # filled by hand: the caller says that it is the prompt's beginning
        if cache.seq_len >= len(prompt):
            raise ValueError(
                f"the cache holds {cache.seq_len} positions and the prompt has {len(prompt)} tokens: nothing is "
                "left to feed; truncate the cache to what the prompt begins with, less at least one token"
            )
        return
    same = next((i for i, (a, b) in enumerate(zip(held, prompt, strict=False)) if a != b), min(len(held), len(prompt)))
    keep = min(same, len(prompt) - 1)
    if keep < cache.seq_len:
        try:
            cache.truncate(keep)
        except ValueError:  # a ring has lost what comes before
            cache.reset()


def check_cache_dtype(cache_dtype: str, cache: Cache | None, use_kv_cache: bool = True) -> None:
    """Refuse what is no dtype of a cache, and one that the cache, if there is one, does not have. "auto" has any."""
    asked = resolve_cache_dtype(cache_dtype, torch.float32)
    if cache_dtype == "auto":
        return
    if not use_kv_cache:
        raise ValueError(f"cache_dtype={cache_dtype!r} needs a cache, but use_kv_cache=False: leave one out")
    cache = None if cache is None else innermost(cache)
    if cache is not None and not (isinstance(cache, BaseCache) and cache.dtype is asked):
        held = cache.dtype if isinstance(cache, BaseCache) else type(cache).__name__
        raise ValueError(f"cache_dtype={cache_dtype!r} was asked for, but the cache that was given is {held}")


def check_keeps(keeps: bool, prefill_chunk: int | None) -> None:
    if prefill_chunk is not None and not keeps:
        raise ValueError("prefill_chunk needs a cache: without one every pass starts from the beginning")
