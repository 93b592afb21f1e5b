"""Where a cache keeps keys and values, as kernels are told."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

# The columns: addresses of keys and values, bytes from one head to the next, positions kept (position p lies in slot
# p % SLOTS), positions filled, and bits of a number. With pages, SLOTS is the positions of one, and that of position p
# lies int64 [PAGES][p // SLOTS] times PAGE bytes behind the addresses; PAGES is 0 where there are none.
K, V, STRIDE, SLOTS, FILLED, BITS, PAGES, PAGE = range(8)
COLUMNS = 8


class Table:
    """Where the layers of a cache keep the keys and values of each row."""

    def __init__(self, k: Sequence[Tensor], v: Sequence[Tensor]) -> None:
        """Of each layer [B, Hkv, slots, D]; in int8 with a scale behind each vector."""
        self._rows = np.zeros((len(k), k[0].shape[0], COLUMNS), np.int64)
        for layer, (keys, values) in enumerate(zip(k, v, strict=True)):
            size, rows = keys.element_size(), self._rows[layer]
            step = np.arange(len(rows)) * keys.stride(0) * size
            rows[:, K], rows[:, V] = keys.data_ptr() + step, values.data_ptr() + step
            rows[:, STRIDE], rows[:, SLOTS], rows[:, BITS] = keys.stride(1) * size, keys.shape[2], size * 8
        self._finish(k[0])

    @classmethod
    def of_pages(cls, memory: Tensor, layers: np.ndarray[Any, Any], lists: np.ndarray[Any, Any]) -> Table:
        """memory: [layers, 2, Hkv, pages, slots, D]; layers: which of them each layer of the model is.

        lists: of each layer and row, the address of its list of pages.
        """
        table, size = cls.__new__(cls), memory.element_size()
        table._rows = rows = np.zeros((*lists.shape, COLUMNS), np.int64)
        rows[:, :, K] = (memory.data_ptr() + layers * (memory.stride(0) * size))[:, None]
        rows[:, :, V] = rows[:, :, K] + memory.stride(1) * size
        rows[:, :, STRIDE], rows[:, :, SLOTS], rows[:, :, BITS] = memory.stride(2) * size, memory.shape[4], size * 8
        rows[:, :, PAGES], rows[:, :, PAGE] = lists, memory.stride(3) * size
        table._finish(memory)
        return table

    def _finish(self, stored: Tensor) -> None:
        # A GPU loads several numbers at once, from addresses that are a multiple of their size.
        self._vector = stored.shape[-1] * stored.element_size()  # bytes
        size = alignment(stored.shape[-1], stored.dtype)
        self.aligned = stored.is_cpu or not (self._rows[:, :, [K, V, STRIDE, PAGE]] % size).any()

    def is_of(self, k: Sequence[Tensor], v: Sequence[Tensor]) -> bool:
        """Whether keys and values are still there: a copied cache has others, and so may one whose tensors were set."""
        found = [t.data_ptr() for pair in zip(k, v, strict=True) for t in pair]
        return self._rows[: len(k), 0, :2].ravel().tolist() == found

    def at(self, filled: int) -> np.ndarray[Any, Any]:
        """[layers, B, COLUMNS] with so many positions filled."""
        rows = self._rows.copy()
        rows[:, :, FILLED] = filled
        return rows

    def from_position(self, first: int) -> np.ndarray[Any, Any]:
        """[layers, B, COLUMNS], the first slot being that of position `first`, and none ever used again."""
        rows = self._rows.copy()
        rows[:, :, [K, V]] -= first * self._vector
        rows[:, :, SLOTS] = 2**31 - 1
        return rows


def alignment(width: int, dtype: torch.dtype) -> int:
    """Bytes that the addresses of all vectors of a cache are a multiple of, where it starts at such an address."""
    return math.gcd(16, width * dtype.itemsize)


def empty_tables(layers: int, rows: int, device: torch.device) -> Tensor:
    """For tables to be copied to."""
    return torch.zeros(layers, rows, COLUMNS, dtype=torch.int64, device=device)
