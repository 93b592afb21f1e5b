"""The sliding cache: a layer with a sliding window stores the window instead of the sequence.

Position p of a window layer is in slot p % slots of a ring buffer. The ring has slots for the window plus one prefill
chunk, so that a pass overwrites nothing that its own queries still see, or those of the next pass if this one fails.
Positions before the window are kept until they are overwritten: `truncate` can go back that far.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from infer.cache.base import SHAPE, BaseCache, CacheShape, check_memory, first_visible
from infer.cache.table import Table
from infer.config import ModelConfig
from infer.machine import lazy_allocations
from infer.nn.attention import ring_span
from infer.values import takes

PREFILL_CHUNK = 512


class SlidingCache(BaseCache):
    """Window layers keep a ring of `window + prefill_chunk` positions, the others keep all positions.

    `allocate` takes windows (one per layer, None where it sees all positions; empty: all layers do) and prefill_chunk,
    the number of tokens that most passes do not exceed.

    k, v: one tensor per layer, [batch, num_kv_heads, slots, width]; width: head_dim, and in int8 the scales.
    """

    drops_positions = True

    @takes(shape=SHAPE)
    def __init__(
        self,
        shape: CacheShape,
        dtype: torch.dtype,
        device: torch.device,
        windows: Sequence[int | None] = (),
        prefill_chunk: int = PREFILL_CHUNK,
    ) -> None:
        super().__init__(shape, dtype, device, windows)
        if type(prefill_chunk) is not int or prefill_chunk < 1:
            raise ValueError(f"prefill_chunk must be a positive integer, not {prefill_chunk!r}")
        slots = [ring_slots(window, prefill_chunk, shape.max_seq_len) for window in self.windows]
        check_memory(sum(slots), shape, dtype, device)
        self.k, self.v = (
            [torch.zeros(*shape[1:3], count, self.width, dtype=dtype, device=device) for count in slots]
            for _ in range(2)
        )
        self._stored = [tuple(k.shape) for k in self.k]
        self._table: Table | None = None
        self._oldest = [0] * shape.num_layers  # of each layer, the first position that was not overwritten
        self._staged: dict[int, tuple[Tensor, Tensor]] = {}  # by a pass too long to be written before `advance`
        if device.type == "cpu":
            lazy_allocations.add(self)

    @property
    def memory_bytes(self) -> int:
        return sum(t.nbytes for t in self.k + self.v)

    @property
    def unwritten_bytes(self) -> int:
        return sum(t.nbytes // t.shape[2] * max(0, t.shape[2] - self._most_filled) for t in self.k + self.v)

    def positions(self, n: int) -> Tensor:
        self._check_fits(n)
        self._check_stored("k", self.k, self._stored)
        self._check_stored("v", self.v, self._stored)
        if self._interrupted():
            raise ValueError("a pass was interrupted during a write: reset the cache, and feed the tokens again")
        positions = super().positions(n)
        self._staged = {}  # by a pass that was not completed
        if self._fits_ring(n):  # then the pass writes before it attends
            self._will_overwrite(n)
        return positions

    def _store(self, layer_idx: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """As in every cache, but a window layer returns only the keys and values that the new queries can see."""
        n, k, v = self._check_and_quantize(layer_idx, k, v)
        first, end = self._first_visible(layer_idx), self.seq_len + n
        rings = self.k[layer_idx], self.v[layer_idx]
        slots = rings[0].shape[2]
        if end - first <= slots:
            self._write(layer_idx, self.seq_len, k, v)
            return ring_span(rings[0], first, end), ring_span(rings[1], first, end)
        self._staged[layer_idx] = k[:, :, -slots:].clone(), v[:, :, -slots:].clone()
        return (
            torch.cat((ring_span(rings[0], first, self.seq_len), k), 2),
            torch.cat((ring_span(rings[1], first, self.seq_len), v), 2),
        )

    def table(self, config: ModelConfig, dtype: torch.dtype, n: int) -> Any:
        if not self._is_kernel_compatible(config, dtype) or self._interrupted() or not self._fits_ring(n):
            return None
        self._staged = {}  # by a pass that was not completed
        if self._table is None or not self._table.is_of(self.k, self.v):
            self._table = Table(self.k, self.v)
        return self._table.at(self.seq_len) if self._table.aligned else None

    def advance(self, n: int) -> None:
        self._check_fits(n)
        for layer_idx, (k, v) in list(self._staged.items()):
            self._write(layer_idx, self.seq_len + n - k.shape[2], k, v)
        self._will_overwrite(n)  # for kernels that wrote without a call of `positions`
        super().advance(n)

    def _check_rewind(self, seq_len: int) -> None:
        for window, oldest in zip(self.windows, self._oldest, strict=True):
            needed = first_visible(seq_len, window)
            if needed < min(oldest, seq_len):
                raise ValueError(
                    f"cannot truncate to {seq_len}: its window begins at {needed}, "
                    f"and positions before {oldest} have been overwritten; reset, and feed the tokens again"
                )

    def _move_to(self, seq_len: int) -> None:
        self._staged = {}  # first: an interrupt before the move must not leave staged keys
        super()._move_to(seq_len)
        if seq_len == 0:
            self._oldest = [0] * self.shape.num_layers

    def _interrupted(self) -> bool:
        """Whether a pass overwrote keys that the next query sees, and was not completed."""
        return any(self._first_visible(i) < min(oldest, self.seq_len) for i, oldest in enumerate(self._oldest))

    def _fits_ring(self, n: int) -> bool:
        """Whether n more positions can be written before attention without overwriting a visible key."""
        end = self.seq_len + n
        return all(end - self._first_visible(i) <= k.shape[2] for i, k in enumerate(self.k))

    def _will_overwrite(self, n: int) -> None:
        end = self.seq_len + n
        self._oldest = [max(oldest, end - k.shape[2]) for oldest, k in zip(self._oldest, self.k, strict=True)]

    def _write(self, layer_idx: int, start: int, k: Tensor, v: Tensor) -> None:
        """Put k, v [B, Hkv, n, width] into the slots of positions start..start+n-1; n <= slots."""
        self._staged.pop(layer_idx, None)
        n, slots = k.shape[2], self.k[layer_idx].shape[2]
        slot = start % slots
        until_end = min(n, slots - slot)
        self._oldest[layer_idx] = max(self._oldest[layer_idx], start + n - slots)
        for ring, new in ((self.k[layer_idx], k), (self.v[layer_idx], v)):
            if until_end == n:
                ring.narrow(2, slot, n).copy_(new)
            else:
                ring.narrow(2, slot, until_end).copy_(new[:, :, :until_end])
                ring.narrow(2, 0, n - until_end).copy_(new[:, :, until_end:])


def ring_slots(window: int | None, prefill_chunk: int, max_seq_len: int) -> int:
    """Positions that a layer stores."""
    return max_seq_len if window is None else min(window + prefill_chunk, max_seq_len)


def layer_slots(config: ModelConfig, max_seq_len: int, prefill_chunk: int = PREFILL_CHUNK) -> list[int]:
    """Positions that each layer of a model stores."""
    return [ring_slots(window, prefill_chunk, max_seq_len) for window in config.windows]
