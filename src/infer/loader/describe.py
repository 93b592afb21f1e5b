"""`infer info`: what a model is, and the memory it needs, without loading its weights."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch

from infer import backend
from infer.cache.base import resolve_cache_dtype
from infer.cache.pool import PAGE_SIZE, bytes_for, pages_for
from infer.cache.ring import layer_slots
from infer.config import SLIDING_ATTENTION, ModelConfig
from infer.loader.find import open_checkpoint
from infer.loader.load import choose_weight_dtypes, resolve_weight_dtype
from infer.machine import available_memory, resolve_device
from infer.models.registry import build_model


def cache_bytes(config: ModelConfig, positions: int, dtype: torch.dtype) -> int:
    """Bytes of the default cache. dtype: of the cache."""
    stored = sum(layer_slots(config, positions))
    return stored * config.cache_bytes_per_token(dtype.itemsize) // config.num_hidden_layers


def describe(
    name_or_path: str,
    dtype: str = "auto",
    device: str = "auto",
    context: int | None = None,
    *,
    quantize: str | None = None,
    cache_dtype: str = "auto",
) -> dict[str, Any]:
    """What `infer info --json` prints.

    context: positions to count the cache for; None: all the model has. Other arguments as for `load_model`.
    """
    target = resolve_device(device)
    computed = resolve_weight_dtype(dtype, target, quantize)
    cached = resolve_cache_dtype(cache_dtype, computed)
    checkpoint = open_checkpoint(name_or_path, weights=False)
    config = checkpoint.config.with_context(context)
    positions = config.max_position_embeddings
    with torch.device("meta"):
        model = build_model(config)
    weights = choose_weight_dtypes(model, checkpoint, dtype, target, quantize)
    weight_bytes = weights.nbytes(model)
    free = available_memory(target)
    largest, conversations = checkpoint.config.longest_context, None
    if free is not None:
        for_cache = max(0, free - weight_bytes)
        largest = bisect_right(range(1, largest + 1), for_cache, key=lambda n: cache_bytes(config, n, cached))
        conversations = for_cache // bytes_for(config, positions, cached.itemsize)
    return {
        "model": name_or_path,
        "path": str(checkpoint.path),
        "architecture": config.model_type,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "heads": config.num_attention_heads,
        "kv_heads": config.num_key_value_heads,
        "head_dim": config.computed_head_dim,
        "vocab_size": config.vocab_size,
        "dtype": str(computed).removeprefix("torch."),
        "device": str(target),
        "backend": backend.expected(target, computed),  # which will run it, and why
        "quantize": quantize,
        "weights": str(weights),  # what most of them are stored in
        "weight_bytes": weight_bytes,
        "sliding_window": config.sliding_window,
        "sliding_layers": config.layer_types.count(SLIDING_ATTENTION),
        "cache_dtype": str(cached).removeprefix("torch."),
        "cache_bytes_per_token": config.cache_bytes_per_token(cached.itemsize),  # over all layers
        "context": positions,
        "longest_context": config.longest_context,  # beyond `context`: by LongRoPE, if --context asks for it
        "cache_bytes": cache_bytes(config, positions, cached),  # of the default cache, for this context
        # If every layer kept all positions.
        "contiguous_cache_bytes": positions * config.cache_bytes_per_token(cached.itemsize),
        "free_bytes": free,
        "largest_context": largest,  # that fits in memory beside the weights, in one sequence
        "page_bytes": bytes_for(config, 1, cached.itemsize) // pages_for(config, 1),  # 64 positions of some layers
        "conversations": conversations,  # sequences of this context, in pages, that fit beside the weights
    }


def lines(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What `describe` returns, for a reader."""
    info = SimpleNamespace(**facts)
    yield "model", info.model
    yield "path", info.path
    yield "architecture", info.architecture
    yield "parameters", f"{info.parameters / 1e6:,.1f} M"
    yield "layers", f"{info.layers}, hidden size {info.hidden_size}"
    yield "heads", f"{info.heads} query, {info.kv_heads} key/value, {info.head_dim} dimensions each"
    yield "vocabulary", f"{info.vocab_size:,}"
    each = info.weight_bytes / info.parameters
    computed = "" if info.weights == info.dtype else f", computed in {info.dtype}"
    form = f"{info.weights} on {info.device}, {each:.2f} bytes per weight{computed}"
    yield "weights", f"{_size(info.weight_bytes)} in {form}"
    yield "backend", info.backend
    if info.sliding_layers:
        yield "windows", f"{info.sliding_layers} of {info.layers} layers see {info.sliding_window} positions"
    unbounded = info.cache_bytes_per_token * (info.layers - info.sliding_layers) // info.layers
    later = f", {_size(unbounded)} once the windows are full" if info.sliding_layers else ""
    rounded = "" if info.cache_dtype == info.dtype else f" in {info.cache_dtype}"
    yield "cache per token", f"{_size(info.cache_bytes_per_token)}{rounded}{later}"
    context = f"{info.context:,} positions, {_size(info.cache_bytes)} of cache"
    if info.sliding_layers:
        context += f"; {_size(info.contiguous_cache_bytes)} if every layer kept all positions"
    if info.longest_context > info.context:
        context += f"; up to {info.longest_context:,} with --context"
    yield "context", context
    if info.free_bytes is not None:
        fits = f"{info.largest_context:,} positions"
        if info.largest_context == 0:
            fits = "none: the weights alone do not fit"
        yield "largest that fits", f"{fits} ({_size(info.free_bytes)} free)"
        many = f"{info.conversations:,} of {info.context:,} positions, more if they share a prefix"
        yield "conversations", f"{many} (pages of {PAGE_SIZE} positions, {_size(info.page_bytes)})"


def _size(count: int) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count} bytes"
