"""A cache that prints each operation: KV_DEBUG=1; KV_DEBUG_LAYER=N prints only the events of one layer."""

from __future__ import annotations

import os
import sys
from typing import Unpack

from torch import Tensor

from infer.cache.base import AttendOptions, Cache, CacheWrapper, NoCache, wrappers


def debugged(cache: Cache, num_layers: int) -> Cache:
    """With KV_DEBUG=1 a cache that prints, otherwise the cache itself. Called once per run, not per token."""
    # The engine passes a cache that prints to a model call.
    if not _is_on() or any(isinstance(wrapper, DebugCache) for wrapper in wrappers(cache)):
        return cache
    check_debug_layer(num_layers)
    layer = os.environ.get("KV_DEBUG_LAYER", "")
    return DebugCache(cache, int(layer) if layer else None)


def check_debug_layer(num_layers: int) -> None:
    """Refuse a KV_DEBUG_LAYER that the model does not have: nothing would be printed."""
    layer = os.environ.get("KV_DEBUG_LAYER", "")
    if _is_on() and layer and not (layer.isdecimal() and int(layer) < num_layers):
        raise ValueError(f"KV_DEBUG_LAYER must be the number of a layer, 0 to {num_layers - 1}, not {layer!r}")


def _is_on() -> bool:
    return os.environ.get("KV_DEBUG", "0") not in ("", "0")


class DebugCache(CacheWrapper):
    """Prints the positions of each pass, and for each layer the numbers of new and cached keys."""

    def __init__(self, cache: Cache, layer: int | None = None) -> None:
        """layer: the only one to print; None: all layers."""
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

    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, **options: Unpack[AttendOptions]) -> Tensor:
        n, end, window = q.shape[2], self.seq_len + q.shape[2], options.get("window")
        self._print_attention(layer_idx, n, end if window is None else min(end, window + n - 1))
        return super().attend(layer_idx, q, k, v, **options)

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
    """Positions start..start+n-1; of many, only the first three and the last."""
    shown = [str(position) for position in range(start, start + n)]
    return f"[{','.join(shown if n <= 8 else [*shown[:3], '...', shown[-1]])}]"
