"""What the engine asks of a model: where it is, what it computes in, and a pass over tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from infer.backend import Row, backend_for
from infer.cache.base import Cache
from infer.config import ModelConfig
from infer.machine import resolve_device
from infer.models.common import Decoder
from infer.models.rows import ALL, LAST


class Model(Protocol):
    """What generation asks of a model."""

    config: ModelConfig

    def __call__(self, input_ids: Tensor, kv_cache: Cache | None = None, *, all_logits: bool = False) -> Tensor: ...
    def parameters(self) -> Iterator[torch.nn.Parameter]: ...


class Unconfigured:
    """A model that says nothing of itself: it can be fed everything at each step, and no cache can be made for it."""

    config = ModelConfig("unknown", 2**24, 1, 1, 1, 1, 1, 2**31 - 1, rope=None)  # any token, any number of positions

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self, input_ids: Tensor, kv_cache: Cache | None = None, *, all_logits: bool = False) -> Tensor:
        return self.model(input_ids)  # type: ignore[no-any-return]

    def parameters(self) -> Iterator[nn.Parameter]:
        return self.model.parameters()


def configured(model: Model | nn.Module, *, needed: bool) -> Model:
    """The model, or what stands for one without a `.config` where none is needed."""
    if getattr(model, "config", None) is not None:
        return cast(Model, model)
    if needed:
        raise TypeError(
            "the model has no .config, which KV caches and traces are made by: give it a ModelConfig, or set "
            "use_kv_cache=False to recompute everything at each step"
        )
    return Unconfigured(cast(nn.Module, model))


@torch.no_grad()
def step(model: Model, cache: Cache, tokens: Tensor, prefill_chunk: int | None = None) -> Tensor:
    """Feed tokens [B, n] behind what the cache holds; logits [B, V] for the token to follow.

    prefill_chunk: in passes of at most so many tokens, which bounds the memory that a long prompt takes.
    """
    for chunk in chunks(tokens, prefill_chunk):
        [logits] = backend_for(model).run([Row(cache, chunk, LAST)])
    return logits[:, -1]


@torch.no_grad()
def all_logits(model: Model, cache: Cache, tokens: Tensor) -> Tensor:
    """Feed tokens [B, n] behind what the cache holds; logits of each position [B, n, V]."""
    return backend_for(model).run([Row(cache, tokens, ALL)])[0]


def chunks(tokens: Tensor, size: int | None) -> Sequence[Tensor]:
    n = tokens.shape[1]
    if size is None or size >= n:
        return (tokens,)
    return [tokens[:, start : start + size] for start in range(0, n, size)]


def weight_bytes(model: Model) -> int:
    """What a model's weights take; quantised ones are buffers."""
    buffers = model.buffers() if isinstance(model, nn.Module) else ()
    return sum(tensor.nbytes for tensor in (*model.parameters(), *buffers))


def check_mode(model: Model) -> None:
    """Refuse a model that is being trained."""
    if isinstance(model, nn.Module) and model.training and model.config.dropout:
        raise ValueError("the model is in training mode, where dropout makes each run another: call model.eval()")


def check_traceable(model: Model) -> None:
    """Refuse to look into a model of which this process has a part."""
    if isinstance(model, Decoder) and model.group is not None:
        raise ValueError("a trace looks at all heads, of which each process has some: trace in one process")


def model_dtype(model: Model) -> torch.dtype | None:
    """What a model computes in; None where it does not say, and has no weights."""
    if isinstance(model, Decoder):
        return model.dtype  # weights may be kept in fewer bits
    weights = next(model.parameters(), None)
    return None if weights is None else weights.dtype


def model_device(model: Model, device: str | torch.device | None = None) -> torch.device:
    """The model's device, which a device that is given must match."""
    weights = next(model.parameters(), None)
    own = torch.device("cpu") if weights is None else weights.device
    if device is None or device == "auto":
        return own
    asked = resolve_device(device)
    if asked.type != own.type or asked.index not in (None, own.index):
        raise ValueError(f"the model is on {own}, not on {asked}: load it there, or leave device out")
    return own
