"""A cache that shows where attention looks, and changes nothing."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from infer.cache.base import AttentionKernel, Cache
from infer.cache.int8 import decode, encode
from infer.cache.wrapped import WrappedCache
from infer.nn.attention import softmax_attention


class TracedCache(WrappedCache):
    """Keeps the weights by which attention has mixed the values: of the very scores, maximum and sum.

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
        watching = _Watching(kernel, q.shape[2] if self.all_rows else 1) if layer_idx in self.layers else None
        out = super().attend(layer_idx, q, k, v, scale=scale, window=window, kernel=watching or kernel)
        if watching is not None:
            self.rows[layer_idx] = watching.weights if self.all_rows else watching.weights[:, :, -1]
        return out


class _Watching:
    """An attention kernel that keeps the weights of its last `rows` queries. kernel: None for plain torch."""

    weights: Tensor  # [B, Hq, rows, S]

    def __init__(self, kernel: AttentionKernel | None, rows: int) -> None:
        self.kernel, self.rows = kernel, rows
        self.takes_int8 = kernel is not None and kernel.takes_int8

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        window: int | None,
        end: int,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        if self.kernel is None:
            out, self.weights = softmax_attention(q, k, v, scale=scale, window=window, rows=self.rows)
            return out if dtype is None else out.to(dtype)
        out = self.kernel(q, k, v, scale=scale, window=window, end=end, dtype=dtype)
        self.weights = kernel_weights(self.kernel, q[:, :, -self.rows :], k, v, scale=scale, window=window, end=end)
        return out


def kernel_weights(
    kernel: AttentionKernel, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None, end: int
) -> Tensor:
    """[B, Hq, n, S]: by which a kernel mixes values, found by giving it values that are 1 in one dimension each.

    What it does with q and k does not depend on the values, and a query alone gets the bits that it gets beside others.
    """
    keys, size = k.shape[2], q.shape[3]
    weights = []
    one = torch.eye(size, device=v.device)
    for first in range(0, keys, size):
        units = torch.zeros(*v.shape[:3], size, device=v.device)
        count = min(size, keys - first)
        units[:, :, first : first + count] = one[:count]
        stored = encode(units) if v.dtype is torch.int8 else units.to(v.dtype)
        mixed = kernel(q, k, stored, scale=scale, window=window, end=end, dtype=torch.float32)
        if v.dtype is torch.int8:
            mixed = mixed / decode(encode(one), torch.float32)[0, 0]
        weights.append(mixed[..., :count])
    return torch.cat(weights, -1)
