"""What a model is and needs, from its config alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from infer.loader.find import open_checkpoint
from infer.machine import available_memory, resolve_device, resolve_dtype
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
    weight_bytes: int
    cache_bytes_per_token: int
    context: int
    free_bytes: int | None
    largest_context: int  # that fits in memory beside the weights

    def lines(self) -> Iterator[tuple[str, str]]:
        yield "model", self.model
        yield "path", self.path
        yield "architecture", self.architecture
        yield "parameters", f"{self.parameters / 1e6:,.1f} M"
        yield "layers", f"{self.layers}, hidden size {self.hidden_size}"
        yield "heads", f"{self.heads} query, {self.kv_heads} key/value, {self.head_dim} dimensions each"
        yield "vocabulary", f"{self.vocab_size:,}"
        yield "weights", f"{_size(self.weight_bytes)} in {self.dtype} on {self.device}"
        yield "cache per token", _size(self.cache_bytes_per_token)
        yield "context", f"{self.context:,} positions, {_size(self.context * self.cache_bytes_per_token)} of cache"
        if self.free_bytes is not None:
            fits = f"{self.largest_context:,} positions"
            if self.largest_context == 0:
                fits = "none: the weights alone do not fit"
            yield "largest that fits", f"{fits} ({_size(self.free_bytes)} free)"


def describe(name_or_path: str, dtype: str = "auto", device: str = "auto") -> Description:
    target = resolve_device(device)
    element = resolve_dtype(dtype, target)
    checkpoint = open_checkpoint(name_or_path, weights=False)
    config = checkpoint.config
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in build_model(config).parameters())
    per_token = config.cache_bytes_per_token(element.itemsize)
    free = available_memory(target)
    context = config.max_position_embeddings
    if free is not None:
        context = min(context, max(0, free - parameters * element.itemsize) // per_token)
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
        weight_bytes=parameters * element.itemsize,
        cache_bytes_per_token=per_token,
        context=config.max_position_embeddings,
        free_bytes=free,
        largest_context=context,
    )


def _size(count: int) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count} bytes"
