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

    def __init__(self, k: Sequence[Tensor], v: Sequence[Tensor], pages: np.ndarray[Any, Any] | None = None) -> None:
        """Of each layer [B, Hkv, slots, D]; in int8 with a scale behind each vector.

        pages: of each layer and row, the address of its list of pages; then k and v are all pages [pages, Hkv, slots,
        D], which the lists count.
        """
        self._rows = np.zeros((len(k), k[0].shape[0] if pages is None else pages.shape[1], COLUMNS), np.int64)
        for layer, (keys, values) in enumerate(zip(k, v, strict=True)):
            size, rows = keys.element_size(), self._rows[layer]
            step = keys.stride(0) * size
            rows[:, K], rows[:, V] = keys.data_ptr(), values.data_ptr()
            if pages is None:
                rows[:, K] += np.arange(len(rows)) * step
                rows[:, V] += np.arange(len(rows)) * step
            else:
                rows[:, PAGES], rows[:, PAGE] = pages[layer], step
            rows[:, STRIDE], rows[:, SLOTS], rows[:, BITS] = keys.stride(1) * size, keys.shape[2], size * 8
        # A GPU loads several numbers at once, from addresses that are a multiple of their size.
        self._vector = k[0].shape[3] * k[0].element_size()  # bytes
        size = alignment(k[0].shape[3], k[0].dtype)
        self.aligned = k[0].is_cpu or not (self._rows[:, :, [K, V, STRIDE, PAGE]] % size).any()

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
