"""A cache around another, to build watchers on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from infer.cache.base import AttentionKernel, Cache
from infer.config import ModelConfig


def innermost(cache: Cache) -> Cache:
    """Without what is wrapped around it."""
    while isinstance(cache, WrappedCache):
        cache = cache.cache
    return cache


class WrappedCache:
    """A cache that leaves all to the one inside."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache

    @property
    def seq_len(self) -> int:
        return self.cache.seq_len

    @property
    def capacity(self) -> int:
        return self.cache.capacity

    @property
    def memory_bytes(self) -> int:
        return self.cache.memory_bytes

    def positions(self, n: int) -> Tensor:
        return self.cache.positions(n)

    def reserve(self, n: int) -> int:
        return self.cache.reserve(n)

    def update(self, layer_idx: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return self.cache.update(layer_idx, k, v)

    def attend(
        self,
        layer_idx: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        window: int | None = None,
        kernel: AttentionKernel | None = None,
    ) -> Tensor:
        return self.cache.attend(layer_idx, q, k, v, scale=scale, window=window, kernel=kernel)

    def table(self, config: ModelConfig, dtype: torch.dtype, n: int) -> Any:
        return None  # a watcher sees what goes through `attend`

    def advance(self, n: int) -> None:
        self.cache.advance(n)

    def truncate(self, seq_len: int) -> None:
        self.cache.truncate(seq_len)

    def reset(self) -> None:
        self.cache.reset()
