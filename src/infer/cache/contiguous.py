"""The contiguous cache: allocated once for all positions, each new position written in its place."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor

from infer.cache.base import TENSOR, BaseCache, CacheShape, check_memory
from infer.cache.int8 import values_in, width
from infer.cache.table import Table
from infer.config import ModelConfig
from infer.machine import lazy_allocations
from infer.values import takes


class KVCache(BaseCache):
    """Keys (after QK-norm and RoPE) and values of all layers, preallocated.

    k, v: [num_layers, batch, num_kv_heads, max_seq_len, head_dim]; seq_len: how many positions are filled.
    In formulas these are L, B, H, T_max, D and t. In int8, each vector of D is followed by its scales.
    """

    @takes(k=TENSOR, v=TENSOR)
    def __init__(self, k: Tensor, v: Tensor, seq_len: int = 0) -> None:
        if k.dim() != 5 or k.shape != v.shape or k.dtype != v.dtype or k.device != v.device:
            raise ValueError(
                "k and v must have the same shape [layers, batch, kv_heads, max_seq_len, head_dim], dtype and device; "
                f"got k {tuple(k.shape)} {k.dtype} on {k.device}, v {tuple(v.shape)} {v.dtype} on {v.device}"
            )
        head_dim = values_in(k.shape[4]) if k.dtype is torch.int8 else k.shape[4]
        super().__init__(CacheShape(*k.shape)._replace(head_dim=head_dim), k.dtype, k.device)
        if not 0 <= seq_len <= self.capacity:
            raise ValueError(f"seq_len {seq_len} is outside 0..{self.capacity}")
        self.k = k
        self.v = v
        self._stored = [tuple(k.shape)]
        self.seq_len = seq_len
        self._views: tuple[int, list[tuple[Tensor, ...]]] = -1, []  # of a pass over so many tokens
        self._table: Table | None = None

    @classmethod
    def _empty(cls, shape: CacheShape, dtype: torch.dtype, device: torch.device, **options: Any) -> Self:
        check_memory(shape.num_layers * shape.max_seq_len, shape, dtype, device)
        stored = (*shape[:4], width(shape.head_dim, dtype))
        k, v = (torch.zeros(stored, dtype=dtype, device=device) for _ in range(2))
        cache = cls(k, v, **options)
        if device.type == "cpu":
            lazy_allocations.add(cache)
        return cache

    @property
    def L(self) -> int:
        return self.shape.num_layers

    @property
    def T_max(self) -> int:
        return self.shape.max_seq_len

    @property
    def t(self) -> int:
        return self.seq_len

    @property
    def memory_bytes(self) -> int:
        return self.k.nbytes + self.v.nbytes

    def _store(self, layer_idx: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        n, k, v = self._check_and_quantize(layer_idx, k, v)
        if n != self._views[0]:  # slicing all layers at once is faster than one by one
            start, end = self.seq_len, self.seq_len + n
            spans = self.k[:, :, :, start:end], self.v[:, :, :, start:end], self.k[:, :, :, :end], self.v[:, :, :, :end]
            self._views = n, [span.unbind() for span in spans]
        new_k, new_v, all_k, all_v = self._views[1]
        new_k[layer_idx].copy_(k)
        new_v[layer_idx].copy_(v)
        return all_k[layer_idx], all_v[layer_idx]

    def positions(self, n: int) -> Tensor:
        positions = super().positions(n)
        self._check_stored("k", [self.k], self._stored)
        self._check_stored("v", [self.v], self._stored)
        return positions

    def table(self, config: ModelConfig, dtype: torch.dtype, n: int) -> Any:
        if not self._is_kernel_compatible(config, dtype):
            return None
        if self.k.stride() != self.v.stride() or self.k.stride()[3:] != (self.width, 1):
            return None
        if self._table is None or not self._table.is_of([self.k], [self.v]):
            self._table = Table(self.k.unbind(), self.v.unbind())
        return self._table.at(self.seq_len) if self._table.aligned else None

    def _move_to(self, seq_len: int) -> None:
        self._views = -1, []  # first: an interrupt before the move must not leave stale views
        super()._move_to(seq_len)
