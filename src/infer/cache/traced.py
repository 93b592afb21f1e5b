"""Caches that show where attention looks, and change nothing."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from torch import Tensor

from infer.cache.base import AttentionKernel, Cache
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
            self.rows[layer_idx] = watching.kept if self.all_rows else watching.kept[:, :, -1]
        return out


class PromptRows(Protocol):
    """What takes the rows of a prompt as they are computed."""

    def wanted(self, start: int, stop: int) -> int: ...  # of the positions that a pass feeds, how many of the last
    def add_rows(self, layer_idx: int, start: int, weights: Tensor) -> None: ...  # [Hq, n, keys], from start on


class PromptTracedCache(TracedCache):
    """Keeps the rows of a pass's last query, and hands those of the prompt's other queries on, layer by layer.

    None of these are held here: all layers' together, in float32, would be many times what is kept of them.
    """

    def __init__(self, cache: Cache, layers: Collection[int], prompt: PromptRows) -> None:
        super().__init__(cache, layers)
        self.prompt = prompt

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
        stop = self.seq_len + q.shape[2]
        wanted = self.prompt.wanted(self.seq_len, stop) if layer_idx in self.layers else 0
        if not wanted:
            return super().attend(layer_idx, q, k, v, scale=scale, window=window, kernel=kernel)
        watching = _Watching(kernel, wanted)
        out = self.cache.attend(layer_idx, q, k, v, scale=scale, window=window, kernel=watching)
        self.prompt.add_rows(layer_idx, stop - wanted, watching.kept[0])
        self.rows[layer_idx] = watching.kept[:, :, -1].clone()  # not a view of them all
        return out


class _Watching:
    """An attention kernel that keeps the weights of its last `rows` queries. kernel: None for plain torch."""

    kept: Tensor  # [B, Hq, rows, S]

    def __init__(self, kernel: AttentionKernel | None, rows: int) -> None:
        self.kernel, self.rows = kernel, rows
        self.takes_int8 = kernel is not None and kernel.takes_int8

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None, end: int) -> Tensor:
        if self.kernel is None:
            out, self.kept = softmax_attention(q, k, v, scale=scale, window=window, rows=self.rows)
            return out
        self.kept = self.weights(q[:, :, -self.rows :], k, v, scale=scale, window=window, end=end)
        return self.kernel(q, k, v, scale=scale, window=window, end=end)

    def weights(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None, end: int) -> Tensor:
        if self.kernel is None:
            return softmax_attention(q, k, v, scale=scale, window=window, rows=q.shape[2])[1]
        return self.kernel.weights(q, k, v, scale=scale, window=window, end=end)
