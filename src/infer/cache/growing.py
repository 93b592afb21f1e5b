"""The growing cache: each new position is concatenated. The shortest cache, for teaching and comparison.

It copies all keys and values in each step, so a sequence of n tokens copies O(n^2) bytes; `KVCache` writes each
position once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from infer.cache.base import SHAPE, BaseCache, CacheShape
from infer.values import takes


class GrowingCache(BaseCache):
    """Holds exactly the filled positions, up to max_seq_len."""

    keeps_gradients = True

    @takes(shape=SHAPE)
    def __init__(self, shape: CacheShape, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(shape, dtype, device)
        empty = torch.empty(shape.batch_size, shape.num_kv_heads, 0, self.width, dtype=dtype, device=device)
        self.k = [empty] * shape.num_layers  # each [B, Hkv, filled, width]
        self.v = [empty] * shape.num_layers

    @property
    def memory_bytes(self) -> int:
        return sum(t.nbytes for t in self.k + self.v)

    def positions(self, n: int) -> Tensor:
        positions = super().positions(n)
        for name, layers in (("k", self.k), ("v", self.v)):
            # A failed pass may have left more.
            filled = [t[:, :, : self.seq_len] if isinstance(t, Tensor) and t.dim() == 4 else t for t in layers]
            self._check_stored(name, filled, [(*self.shape[1:3], self.seq_len, self.width)] * self.shape.num_layers)
        return positions

    def _store(self, layer_idx: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        _, k, v = self._check_and_quantize(layer_idx, k, v)
        # Only filled positions: a failed pass may have left more.
        self.k[layer_idx] = torch.cat((self.k[layer_idx][:, :, : self.seq_len], k), dim=2)
        self.v[layer_idx] = torch.cat((self.v[layer_idx][:, :, : self.seq_len], v), dim=2)
        return self.k[layer_idx], self.v[layer_idx]

    def _move_to(self, seq_len: int) -> None:
        super()._move_to(seq_len)
        self.k = [k[:, :, :seq_len] for k in self.k]
        self.v = [v[:, :, :seq_len] for v in self.v]
