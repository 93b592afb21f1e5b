"""A cache that shows where attention looks, and changes nothing."""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor

from infer.cache.base import AttentionKernel, Cache
from infer.cache.wrapped import WrappedCache, innermost
from infer.nn.attention import softmax_attention


class TracedCache(WrappedCache):
    """Attends as the cache inside does, and keeps the weights that a softmax in plain torch gives the same keys.

    rows: of the last pass, by traced layer, [B, Hq, keys] of its last query, or with all_rows [B, Hq, n, keys] of
    every query. The keys are those of the last positions: a window layer may have fewer than there are positions.
    """

    def __init__(self, cache: Cache, layers: Collection[int], *, all_rows: bool = False) -> None:
        super().__init__(cache)
        self.layers = frozenset(layers)
        self.all_rows = all_rows
        self.rows: dict[int, Tensor] = {}

    def positions(self, n: int) -> Tensor:
        self.rows = {}
        return super().positions(n)

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
        if layer_idx not in self.layers:
            return super().attend(layer_idx, q, k, v, scale=scale, window=window, kernel=kernel)
        out = super().attend(layer_idx, q, k, v, scale=scale, window=window, kernel=kernel)
        keys, values = innermost(self).update(layer_idx, k, v)  # stores the same again, which changes nothing
        q = q if self.all_rows else q[:, :, -1:]
        _, weights = softmax_attention(q, keys, values, scale=scale, window=window, rows=q.shape[2])
        self.rows[layer_idx] = weights if self.all_rows else weights[:, :, -1]
        return out
