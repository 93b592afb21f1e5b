"""The page pool: the memory of many caches, taken once and handed out in pages.

A page holds a fixed number of positions of several layers, all pages are alike, and any free one will do: there is
nothing to fragment. Caches that hold the same tokens hold the same pages; a page is free again when the last one that
holds it lets it go.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from infer.cache.base import CacheShape, check_memory
from infer.cache.int8 import width
from infer.config import ModelConfig
from infer.machine import promises

PAGE = 64  # positions: a multiple of the blocks of keys that attention takes, so that no sum depends on pages


class NoPages(ValueError):
    """All pages are in use."""


class LayerGroup(NamedTuple):
    """Layers that see as far back as each other: a page holds the keys and values of one group."""

    window: int | None  # None: they see everything
    layers: tuple[int, ...]


def layer_groups(windows: Sequence[int | None]) -> list[LayerGroup]:
    """All layers in groups of one size, the largest that leaves none over: then pages are alike, and none is wasted."""
    by_window: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        by_window.setdefault(window, []).append(layer)
    size = math.gcd(*map(len, by_window.values()))
    return [
        LayerGroup(window, tuple(layers[at : at + size]))
        for window, layers in by_window.items()
        for at in range(0, len(layers), size)
    ]


class PagePool:
    """Pages of `page` positions, and how many caches hold each of them."""

    def __init__(
        self,
        count: int,
        layers: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        page: int = PAGE,
    ) -> None:
        """count: of pages; layers: of which each holds keys and values, [layers, 2, num_kv_heads, page, width]."""
        if type(page) is not int or page < 1:
            raise ValueError(f"a page has a whole number of positions, 1 or more, not {page!r}")
        if type(count) is not int or count < 1:
            raise ValueError(f"a pool has a whole number of pages, 1 or more, not {count!r}")
        self.page, self.layers, self.num_kv_heads, self.head_dim = page, layers, num_kv_heads, head_dim
        self.dtype, self.device = dtype, device
        shape = CacheShape(layers, 1, num_kv_heads, count * page, head_dim)
        check_memory(layers * count * page, shape, dtype, device)
        stored = (count, layers, 2, num_kv_heads, page, width(head_dim, dtype))
        self.memory = torch.zeros(stored, dtype=dtype, device=device)
        self.holders = np.zeros(count, np.int32)  # of each page
        self.reclaim: Callable[[int], None] | None = None  # asked to let go of so many pages when there are too few
        self._free = list(range(count - 1, -1, -1))  # the lowest is taken first: a CPU's memory is touched as needed
        self._touched = 0  # pages that were ever taken
        if device.type == "cpu":
            promises.add(self)

    @classmethod
    def for_model(
        cls,
        config: ModelConfig,
        memory: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        page: int = PAGE,
    ) -> PagePool:
        """As many pages as so many bytes hold."""
        groups = layer_groups([config.window(i) for i in range(config.num_hidden_layers)])
        layers, heads, head_dim = len(groups[0].layers), config.num_key_value_heads, config.computed_head_dim
        size = page_bytes(layers, heads, head_dim, dtype, page)
        if memory < size * len(groups):
            raise ValueError(
                f"a cache of {memory / 1e6:.1f} MB holds no {page} positions of this model: "
                f"these take {size * len(groups) / 1e6:.1f} MB"
            )
        return cls(memory // size, layers, heads, head_dim, dtype=dtype, device=device, page=page)

    @property
    def count(self) -> int:
        return len(self.holders)

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def page_bytes(self) -> int:
        return self.memory[0].nbytes

    @property
    def memory_bytes(self) -> int:
        return self.memory.nbytes

    @property
    def unwritten_bytes(self) -> int:
        return (self.count - self._touched) * self.page_bytes

    def take(self, count: int) -> list[int]:
        """So many free pages, to be held by the caller; others are let go of first where that takes it."""
        if count > self.free and self.reclaim is not None:
            self.reclaim(count - self.free)
        if count > self.free:
            raise NoPages(
                f"no memory is left for the cache: {count} more pages of {self.page} positions are needed, and of "
                f"{self.count} ({self.memory_bytes / 1e6:.0f} MB) {self.free} are free"
            )
        taken = [self._free.pop() for _ in range(count)]
        self._touched = max([self._touched, *(page + 1 for page in taken)])
        self.holders[taken] = 1
        return taken

    def share(self, pages: Iterable[int]) -> None:
        """One more holds each of these."""
        for page in pages:
            if self.holders[page] < 1:
                raise RuntimeError(f"page {page} is shared, but nobody holds it")
            self.holders[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """One less holds each of these."""
        for page in pages:
            if self.holders[page] < 1:
                raise RuntimeError(f"page {page} is released, but nobody holds it")
            self.holders[page] -= 1
            if not self.holders[page]:
                self._free.append(page)

    def copy(self, page: int) -> int:
        """A page with the same contents."""
        [own] = self.take(1)
        self.memory[own].copy_(self.memory[page])
        return own

    def keys_and_values(self, layer: int) -> tuple[Tensor, Tensor]:
        """[pages, num_kv_heads, page, width] each, of one of the layers that a page holds."""
        return self.memory[:, layer, 0], self.memory[:, layer, 1]


def page_bytes(layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, page: int = PAGE) -> int:
    return layers * 2 * num_kv_heads * page * width(head_dim, dtype) * dtype.itemsize
