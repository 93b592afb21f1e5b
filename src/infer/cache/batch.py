"""Rows of different lengths as one cache: each keeps its own, and nobody is padded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from infer.cache.base import Cache, untouched
from infer.config import ModelConfig


class BatchCache:
    """Products run over all rows at once, attention row by row, each in a cache of one row, of whatever kind.

    seq_len is the longest row's; capacity is how long that one can get before any row is full.
    """

    def __init__(self, rows: Sequence[Cache]) -> None:
        if not rows:
            raise ValueError("a batch needs at least one row")
        if len({id(row) for row in rows}) < len(rows):
            raise ValueError("each row of a batch needs a cache of its own")
        self.rows = list(rows)

    @property
    def seq_len(self) -> int:
        return max(row.seq_len for row in self.rows)

    @property
    def capacity(self) -> int:
        return self.seq_len + min(row.capacity - row.seq_len for row in self.rows)

    @property
    def memory_bytes(self) -> int:
        return sum(row.memory_bytes for row in self.rows)

    def positions(self, n: int) -> Tensor:
        return torch.cat([row.positions(n) for row in self.rows])

    def update(self, layer_idx: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if len({row.seq_len for row in self.rows}) > 1:
            raise ValueError("rows of different lengths have no common keys: attend to them instead")
        pairs = [row.update(layer_idx, k[i : i + 1], v[i : i + 1]) for i, row in enumerate(self.rows)]
        return torch.cat([k for k, _ in pairs]), torch.cat([v for _, v in pairs])

    def attend(
        self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None = None
    ) -> Tensor:
        out = [
            row.attend(layer_idx, q[i : i + 1], k[i : i + 1], v[i : i + 1], scale=scale, window=window)
            for i, row in enumerate(self.rows)
        ]
        return torch.cat(out)

    def table(self, config: ModelConfig, x: Tensor) -> Any:
        if not untouched(self, METHODS):
            return None
        tables = [row.table(config, x) for row in self.rows]
        return None if any(table is None for table in tables) else np.concatenate(tables, 1)

    def advance(self, n: int) -> None:
        for row in self.rows:
            row.advance(n)

    def truncate(self, seq_len: int) -> None:
        """Cut every row that is longer. If one refuses, those before it are cut already."""
        if not 0 <= seq_len <= self.seq_len:
            raise ValueError(f"cannot truncate to {seq_len}: the longest row has {self.seq_len} positions")
        for row in self.rows:
            row.truncate(min(seq_len, row.seq_len))

    def reset(self) -> None:
        for row in self.rows:
            row.reset()


METHODS = {name: getattr(BatchCache, name) for name in ("update", "attend")}
