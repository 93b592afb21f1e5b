"""A cache that prints what happens to it: KV_DEBUG=1, and KV_DEBUG_LAYER=N for one layer's events alone."""

from __future__ import annotations

import os
import sys

from torch import Tensor

from infer.cache.base import AttentionKernel, Cache, NoCache
from infer.cache.wrapped import WrappedCache


def debugged(cache: Cache) -> Cache:
    """The cache itself, unless KV_DEBUG=1 asks for one that prints. A run asks once: its tokens pay nothing."""
    if os.environ.get("KV_DEBUG", "0") in ("", "0") or _prints(cache):
        return cache
    layer = os.environ.get("KV_DEBUG_LAYER", "")
    if layer and not layer.isdecimal():
        raise ValueError(f"KV_DEBUG_LAYER must be the number of a layer, not {layer!r}")
    return DebugCache(cache, int(layer) if layer else None)


def _prints(cache: Cache) -> bool:
    """Whether it does so already: the engine hands such a cache to a model that is called."""
    while isinstance(cache, WrappedCache):
        if isinstance(cache, DebugCache):
            return True
        cache = cache.cache
    return False


class DebugCache(WrappedCache):
    """Prints what the cache does on each call: positions once per pass, and for each layer what is added to what."""

    def __init__(self, cache: Cache, layer: int | None = None) -> None:
        """layer: the only one to print; None: all."""
        super().__init__(cache)
        self.layer = layer

    def positions(self, n: int) -> Tensor:
        positions = super().positions(n)
        held = "present" if self.seq_len else "none"
        batch, start = positions.shape[0], self.seq_len
        self._print("GPT", f"kv_cache={held} b={batch} t={n} cache_pos={start} pos={_span(start, n)}")
        return positions

    def update(self, layer_idx: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = super().update(layer_idx, k, v)
        self._print_attention(layer_idx, k.shape[2], keys.shape[2])
        return keys, values

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
        n, end = q.shape[2], self.seq_len + q.shape[2]
        self._print_attention(layer_idx, n, end if window is None else min(end, window + n - 1))
        return super().attend(layer_idx, q, k, v, scale=scale, window=window, kernel=kernel)

    def _print_attention(self, layer_idx: int, n: int, keys: int) -> None:
        if self.layer not in (None, layer_idx):
            return
        where, start = f"Attn L{layer_idx}", self.seq_len
        if isinstance(self.cache, NoCache):
            self._print(where, f"no cache T_q={n} T_k={keys}")
        elif start == 0:
            self._print(where, f"init_cache T={n} max_ctx={self.capacity}")
            self._print(where, f"T_q={n} T_k={keys}")
        else:
            self._print(where, f"cache_pos={start} T={n} new_cache_pos={start + n} max_ctx={self.capacity}")
            self._print(where, f"using cache T_q={n} T_k={keys}")

    @staticmethod
    def _print(where: str, event: str) -> None:
        print(f"[KVDBG][{where}] {event}", file=sys.stderr, flush=True)


def _span(start: int, n: int) -> str:
    """Positions start..start+n-1; the middle of many left out."""
    shown = [str(position) for position in range(start, start + n)]
    return f"[{','.join(shown if n <= 8 else [*shown[:3], '...', shown[-1]])}]"
