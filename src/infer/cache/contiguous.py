"""The contiguous cache: all memory taken up front, each new position written in its place."""

from __future__ import annotations

from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from infer.cache.base import TENSOR, BaseCache, CacheShape, check_memory
from infer.cache.int8 import values_in, width
from infer.cache.table import Table
from infer.config import ModelConfig
from infer.machine import promises
from infer.values import takes


class KVCache(BaseCache):
    """Keys (after QK-norm and RoPE) and values of all layers, preallocated.

    k, v: [num_layers, batch, num_kv_heads, max_seq_len, head_dim]; seq_len: how many positions are filled.
    In formulas these are L, B, H, T_max, D and t. In int8, each vector of D has its scales behind it.
    """

    @takes(k=TENSOR, v=TENSOR)
    def __init__(self, k: Tensor, v: Tensor, seq_len: int = 0) -> None:
        if k.dim() != 5 or k.shape != v.shape or k.dtype != v.dtype or k.device != v.device:
            raise ValueError(
                f"k and v must be alike, [layers, batch, kv_heads, max_seq_len, head_dim]; got "
                f"k {tuple(k.shape)} {k.dtype} on {k.device}, v {tuple(v.shape)} {v.dtype} on {v.device}"
            )
        head_dim = values_in(k.shape[4]) if k.dtype is torch.int8 else k.shape[4]
        super().__init__(CacheShape(*k.shape)._replace(head_dim=head_dim), k.dtype, k.device)
        if not 0 <= seq_len <= self.capacity:
            raise ValueError(f"seq_len {seq_len} is outside 0..{self.capacity}")
        self.k = k
        self.v = v
        self._stored = [tuple(k.shape)]
        self.seq_len = seq_len
        self._views = Views(-1, (), (), (), ())
        self._table: Table | None = None

    @classmethod
    def _empty(cls, shape: CacheShape, dtype: torch.dtype, device: torch.device) -> Self:
        check_memory(shape.num_layers * shape.max_seq_len, shape, dtype, device)
        stored = (*shape[:4], width(shape.head_dim, dtype))
        cache = cls(torch.zeros(stored, dtype=dtype, device=device), torch.zeros(stored, dtype=dtype, device=device))
        if device.type == "cpu":
            promises.add(cache)
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
        n, k, v = self._to_store(layer_idx, k, v)
        if n != self._views.n:
            self._views = self._slice(n)
        views = self._views
        views.new_k[layer_idx].copy_(k)
        views.new_v[layer_idx].copy_(v)
        return views.k[layer_idx], views.v[layer_idx]

    def positions(self, n: int) -> Tensor:
        positions = super().positions(n)
        self._check_stored("k", [self.k], self._stored)
        self._check_stored("v", [self.v], self._stored)
        return positions

    def table(self, config: ModelConfig, dtype: torch.dtype, n: int) -> Any:
        if not self._suits_kernels(config, dtype):
            return None
        if self.k.stride() != self.v.stride() or self.k.stride()[3:] != (self.width, 1):
            return None
        if self._table is None or not self._table.is_of([self.k], [self.v]):
            self._table = Table(self.k.unbind(), self.v.unbind())
        return self._table.at(self.seq_len) if self._table.aligned else None

    def _move_to(self, seq_len: int) -> None:
        self._views = Views(-1, (), (), (), ())  # first: an interrupt in between must not leave them behind
        super()._move_to(seq_len)

    def _slice(self, n: int) -> Views:
        start, end = self.seq_len, self.seq_len + n
        return Views(
            n,
            self.k[:, :, :, start:end].unbind(),
            self.v[:, :, :, start:end].unbind(),
            self.k[:, :, :, :end].unbind(),
            self.v[:, :, :, :end].unbind(),
        )


class Views(NamedTuple):
    """Views of every layer for the forward pass under way: cutting them all at once is cheaper than one by one."""

    n: int
    new_k: tuple[Tensor, ...]  # each [B, Hkv, n, width]: where the pass writes
    new_v: tuple[Tensor, ...]
    k: tuple[Tensor, ...]  # each [B, Hkv, seq_len + n, width]: what it reads
    v: tuple[Tensor, ...]
