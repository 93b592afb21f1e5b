"""Where a cache stores keys and values: the addresses that kernels read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

# The columns: addresses of keys and values, bytes from one head to the next, number of slots (position p is in slot
# p % SLOTS), positions filled, bits per element, address of the page table (0: no pages), bytes per page. With pages,
# SLOTS is the page size, and the page of position p is at K (or V) + int64[PAGE_TABLE][p // SLOTS] * PAGE_BYTES.
K, V, STRIDE, SLOTS, FILLED, BITS, PAGE_TABLE, PAGE_BYTES = range(8)
COLUMNS = 8


class Table:
    """Where the layers of a cache store the keys and values of each row."""

    def __init__(self, k: Sequence[Tensor], v: Sequence[Tensor]) -> None:
        """k, v: of each layer [B, Hkv, slots, width]."""
        self._rows = np.zeros((len(k), k[0].shape[0], COLUMNS), np.int64)
        for layer, (keys, values) in enumerate(zip(k, v, strict=True)):
            size, rows = keys.element_size(), self._rows[layer]
            step = np.arange(len(rows)) * keys.stride(0) * size
            rows[:, K], rows[:, V] = keys.data_ptr() + step, values.data_ptr() + step
            rows[:, STRIDE], rows[:, SLOTS], rows[:, BITS] = keys.stride(1) * size, keys.shape[2], size * 8
        self._finish(k[0])

    @classmethod
    def of_pages(cls, memory: Tensor, layers: np.ndarray[Any, Any], page_tables: np.ndarray[Any, Any]) -> Table:
        """memory: [layers, 2, Hkv, pages, slots, width]; layers: of each layer of the model, its index in memory.

        page_tables: of each layer and row, the address of its page table.
        """
        table, size = cls.__new__(cls), memory.element_size()
        table._rows = rows = np.zeros((*page_tables.shape, COLUMNS), np.int64)
        rows[:, :, K] = (memory.data_ptr() + layers * (memory.stride(0) * size))[:, None]
        rows[:, :, V] = rows[:, :, K] + memory.stride(1) * size
        rows[:, :, STRIDE], rows[:, :, SLOTS], rows[:, :, BITS] = memory.stride(2) * size, memory.shape[4], size * 8
        rows[:, :, PAGE_TABLE], rows[:, :, PAGE_BYTES] = page_tables, memory.stride(3) * size
        table._finish(memory)
        return table

    def _finish(self, stored: Tensor) -> None:
        # A GPU loads vectors of several elements, from addresses that are multiples of the vector's size.
        self._vector = stored.shape[-1] * stored.element_size()  # bytes
        size = alignment(stored.shape[-1], stored.dtype)
        self.aligned = stored.is_cpu or not (self._rows[:, :, [K, V, STRIDE, PAGE_BYTES]] % size).any()

    def is_of(self, k: Sequence[Tensor], v: Sequence[Tensor]) -> bool:
        """Whether these are still the tensors: a copied cache has others, and a caller may have replaced them."""
        found = [t.data_ptr() for pair in zip(k, v, strict=True) for t in pair]
        return self._rows[: len(k), 0, :2].ravel().tolist() == found

    def at(self, filled: int) -> np.ndarray[Any, Any]:
        """[layers, B, COLUMNS] with this many positions filled."""
        rows = self._rows.copy()
        rows[:, :, FILLED] = filled
        return rows

    def from_position(self, first: int) -> np.ndarray[Any, Any]:
        """[layers, B, COLUMNS], where slot 0 is that of position `first` and slots are never reused."""
        rows = self._rows.copy()
        rows[:, :, [K, V]] -= first * self._vector
        rows[:, :, SLOTS] = 2**31 - 1
        return rows


def alignment(width: int, dtype: torch.dtype) -> int:
    """The alignment in bytes of all vectors of a cache whose first vector has it."""
    return math.gcd(16, width * dtype.itemsize)


def empty_tables(layers: int, rows: int, device: torch.device) -> Tensor:
    """A buffer for tables on a device."""
    return torch.zeros(layers, rows, COLUMNS, dtype=torch.int64, device=device)
