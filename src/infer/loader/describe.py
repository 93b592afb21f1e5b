"""What a model is and needs, from its config alone."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from infer import backend
from infer.cache.base import resolve_cache_dtype
from infer.cache.pool import PAGE, bytes_for, pages_for
from infer.cache.ring import layer_slots
from infer.config import SLIDING_ATTENTION, ModelConfig
from infer.loader.find import open_checkpoint
from infer.loader.widths import choose_widths, form, may_be_narrow, resolve_weights, weight_bytes
from infer.machine import available_memory, resolve_device
from infer.models.registry import build_model


@dataclass(frozen=True)
class Description:
    model: str
    path: str
    architecture: str
    parameters: int
    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    dtype: str
    device: str
    backend: str  # what will run it, and why
    quantize: str | None
    weights: str  # what they are kept in, most of them
    weight_bytes: int
    sliding_window: int | None
    sliding_layers: int
    cache_dtype: str
    cache_bytes_per_token: int  # over all layers
    context: int
    cache_bytes: int  # of the default cache, for that context
    contiguous_cache_bytes: int  # if every layer kept everything
    free_bytes: int | None
    largest_context: int  # that fits in memory beside the weights
    page_bytes: int  # of a page: 64 positions of some layers
    conversations: int | None  # of so many positions, each in pages, that fit beside the weights

    def lines(self) -> Iterator[tuple[str, str]]:
        yield "model", self.model
        yield "path", self.path
        yield "architecture", self.architecture
        yield "parameters", f"{self.parameters / 1e6:,.1f} M"
        yield "layers", f"{self.layers}, hidden size {self.hidden_size}"
        yield "heads", f"{self.heads} query, {self.kv_heads} key/value, {self.head_dim} dimensions each"
        yield "vocabulary", f"{self.vocab_size:,}"
        each = self.weight_bytes / self.parameters
        computed = "" if self.weights == self.dtype else f", computed in {self.dtype}"
        form = f"{self.weights} on {self.device}, {each:.2f} bytes per weight{computed}"
        yield "weights", f"{_size(self.weight_bytes)} in {form}"
        yield "backend", self.backend
        if self.sliding_layers:
            yield "windows", f"{self.sliding_layers} of {self.layers} layers see {self.sliding_window} positions"
        full = self.cache_bytes_per_token * (self.layers - self.sliding_layers) // self.layers
        later = f", {_size(full)} once the windows are full" if self.sliding_layers else ""
        rounded = "" if self.cache_dtype == self.dtype else f" in {self.cache_dtype}"
        yield "cache per token", f"{_size(self.cache_bytes_per_token)}{rounded}{later}"
        kept = f"; {_size(self.contiguous_cache_bytes)} if every layer kept everything" if self.sliding_layers else ""
        yield "context", f"{self.context:,} positions, {_size(self.cache_bytes)} of cache{kept}"
        if self.free_bytes is not None:
            fits = f"{self.largest_context:,} positions"
            if self.largest_context == 0:
                fits = "none: the weights alone do not fit"
            yield "largest that fits", f"{fits} ({_size(self.free_bytes)} free)"
            many = f"{self.conversations:,} of {self.context:,} positions, more where they begin alike"
            yield "conversations", f"{many} (pages of {PAGE} positions, {_size(self.page_bytes)})"


def cache_bytes(config: ModelConfig, positions: int, dtype: torch.dtype) -> int:
    """Of the default cache. dtype: its own."""
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
) -> Description:
    """context: positions to count the cache for; None: all that the model has. The rest as for `load_model`."""
    target = resolve_device(device)
    element = resolve_weights(dtype, target, quantize)
    cached = resolve_cache_dtype(cache_dtype, element)
    checkpoint = open_checkpoint(name_or_path, weights=False)
    config = checkpoint.config
    positions = config.max_position_embeddings if context is None else context
    if not 1 <= positions <= config.max_position_embeddings:
        raise ValueError(f"context must be from 1 to the model's {config.max_position_embeddings}, not {context}")
    with torch.device("meta"):
        model = build_model(config)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    widths = choose_widths(model, checkpoint, quantize, narrow=may_be_narrow(element, target))
    weights = weight_bytes(model, widths, element)
    free = available_memory(target)
    largest = config.max_position_embeddings
    if free is not None:
        room = max(0, free - weights)
        largest = bisect_right(range(1, largest + 1), room, key=lambda count: cache_bytes(config, count, cached))
    return Description(
        model=name_or_path,
        path=str(checkpoint.path),
        architecture=config.model_type,
        parameters=parameters,
        layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.computed_head_dim,
        vocab_size=config.vocab_size,
        dtype=str(element).removeprefix("torch."),
        device=str(target),
        backend=backend.expected(target, element),
        quantize=quantize,
        weights=form(widths, quantize, element),
        weight_bytes=weights,
        sliding_window=config.sliding_window,
        sliding_layers=config.layer_types.count(SLIDING_ATTENTION),
        cache_dtype=str(cached).removeprefix("torch."),
        cache_bytes_per_token=config.cache_bytes_per_token(cached.itemsize),
        context=positions,
        cache_bytes=cache_bytes(config, positions, cached),
        contiguous_cache_bytes=positions * config.cache_bytes_per_token(cached.itemsize),
        free_bytes=free,
        largest_context=largest,
        page_bytes=bytes_for(config, 1, cached.itemsize) // pages_for(config, 1),
        conversations=None if free is None else max(0, free - weights) // bytes_for(config, positions, cached.itemsize),
    )


def _size(count: int) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count} bytes"
