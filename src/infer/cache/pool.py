"""The page pool: memory for many caches, allocated once and handed out in pages.

A page holds the keys and values of `page_size` positions of several layers. All pages have the same size, so nothing
fragments. Caches that hold the same tokens share pages: a page is free again when its reference count drops to 0.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from infer.cache.base import CacheShape, check_memory, first_visible
from infer.cache.device_tables import DeviceTables
from infer.cache.int8 import width
from infer.config import ModelConfig
from infer.machine import available_memory, lazy_allocations

# In positions. The reduction order does not depend on the page layout. On a GPU only multiples of 64 have a table.
PAGE_SIZE = 64
NO_PAGE = -1  # in a page table: released, all of its positions are before the window
RUN_PAGES = 16  # contiguous pages, which one sequence gets while such runs are free: a CPU prefetches across pages


class OutOfPages(ValueError):
    """All pages are in use."""


class LayerGroup(NamedTuple):
    """Layers with the same window: a page holds the keys and values of one group."""

    window: int | None  # None: they see all positions
    layers: tuple[int, ...]


@lru_cache
def layer_groups(windows: tuple[int | None, ...]) -> list[LayerGroup]:
    """All layers in groups of one size, the largest that divides them evenly: pages have one size, without padding."""
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
    """Pages of `page_size` positions, and the reference count of each."""

    def __init__(
        self,
        num_pages: int,
        layers: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        page_size: int = PAGE_SIZE,
    ) -> None:
        """layers: how many a page holds keys and values of."""
        for name, value in (("page_size", page_size), ("num_pages", num_pages)):
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} must be a positive integer, not {value!r}")
        self.page_size, self.layers, self.num_kv_heads, self.head_dim = page_size, layers, num_kv_heads, head_dim
        self.dtype, self.device = dtype, device
        shape = CacheShape(layers, 1, num_kv_heads, num_pages * page_size, head_dim)
        check_memory(layers * num_pages * page_size, shape, dtype, device)
        # The pages of a head are contiguous: a sequence with a run of pages is read as if it had no pages.
        stored = (layers, 2, num_kv_heads, num_pages, page_size, width(head_dim, dtype))
        self.memory = _zeros(stored, dtype, device)
        self.ref_counts = np.zeros(num_pages, np.int32)
        self.evict: Callable[[int], None] | None = None  # releases cached pages when too few are free
        runs = -(-num_pages // RUN_PAGES)
        self._free_runs = list(range(runs - 1, -1, -1))  # all their pages are free; the lowest run is last
        self._free_in_run = np.minimum(num_pages - RUN_PAGES * np.arange(runs), RUN_PAGES)
        self._free_pages: OrderedDict[int, None] = OrderedDict()  # of all other runs
        self._num_free = num_pages
        self._num_touched = 0  # pages that were ever allocated
        self.device_tables = None if device.type == "cpu" else DeviceTables(device)
        if device.type == "cpu":
            lazy_allocations.add(self)

    @classmethod
    def for_model(
        cls,
        config: ModelConfig,
        memory: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        page_size: int = PAGE_SIZE,
    ) -> Self:
        """As many pages as fit into this many bytes."""
        groups = layer_groups(config.windows)
        layers, heads, head_dim = len(groups[0].layers), config.num_key_value_heads, config.computed_head_dim
        size = page_bytes(layers, heads, head_dim, dtype, page_size)
        if memory < size * len(groups):
            raise ValueError(
                f"{memory:,} bytes of cache are too few: {page_size} positions of this model take "
                f"{size * len(groups):,} bytes"
            )
        free = available_memory(device)
        if free is not None and memory > free:
            raise ValueError(
                f"{memory / 1e9:.2f} GB were requested for caches, but {free / 1e9:.2f} GB are free on {device}"
            )
        return cls(memory // size, layers, heads, head_dim, dtype=dtype, device=device, page_size=page_size)

    @property
    def num_pages(self) -> int:
        return len(self.ref_counts)

    @property
    def num_free_pages(self) -> int:
        return self._num_free

    @property
    def page_bytes(self) -> int:
        return self.memory.nbytes // self.num_pages

    @property
    def memory_bytes(self) -> int:
        return self.memory.nbytes

    @property
    def unwritten_bytes(self) -> int:
        return (self.num_pages - self._num_touched) * self.page_bytes

    def close(self) -> None:
        """Free the memory, even if references to this pool remain. Its caches cannot be used any more."""
        self.memory = self.memory.new_empty(0)
        lazy_allocations.discard(self)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # torch would keep the memory, and the device would not report it as free

    def ensure_free(self, count: int) -> None:
        """Have this many free pages, by eviction if necessary; otherwise raise OutOfPages."""
        if count > self._num_free and self.evict is not None:
            self.evict(max(count - self._num_free, min(RUN_PAGES, self.num_pages // 64)))  # fewer evictions
        if count > self._num_free:
            raise OutOfPages(
                f"the cache memory is full: {count} more pages of {self.page_size} positions are needed, but of "
                f"{self.num_pages} ({self.memory_bytes / 1e6:.0f} MB) {self._num_free} are free"
            )

    def allocate(self, count: int, after: int = NO_PAGE) -> list[int]:
        """Free pages, now with a reference count of 1. after: the page to continue contiguously, where possible."""
        self.ensure_free(count)
        pages: list[int] = []
        for _ in range(count):
            after = self._pop_free(after + 1)
            pages.append(after)
            self.ref_counts[after] = 1
            self._num_touched = max(self._num_touched, after + 1)
        return pages

    def retain(self, pages: Iterable[int]) -> None:
        """Increment the reference count of each page."""
        for page in pages:
            if page < 0 or self.ref_counts[page] < 1:
                raise RuntimeError(f"page {page} is retained, but it is free")
            self.ref_counts[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Decrement the reference count of each page, and free a page that reaches 0."""
        for page in pages:
            if page < 0 or self.ref_counts[page] < 1:
                raise RuntimeError(f"page {page} is released, but it is free")
            self.ref_counts[page] -= 1
            if not self.ref_counts[page]:
                self._push_free(page)

    def _pop_free(self, page: int) -> int:
        """This page if it is free, otherwise the first of a free run, otherwise any free page."""
        if page not in self._free_pages:
            if self._free_runs:
                page = self._free_runs.pop() * RUN_PAGES
                self._free_pages.update(dict.fromkeys(range(page, min(page + RUN_PAGES, self.num_pages))))
            else:  # the one that was freed first: the pages after it are the most likely to be free too
                page = next(iter(self._free_pages))
        del self._free_pages[page]
        self._free_in_run[page // RUN_PAGES] -= 1
        self._num_free -= 1
        return page

    def _push_free(self, page: int) -> None:
        run = page // RUN_PAGES
        self._free_pages[page] = None
        self._free_in_run[run] += 1
        self._num_free += 1
        pages = range(run * RUN_PAGES, min((run + 1) * RUN_PAGES, self.num_pages))
        if self._free_in_run[run] == len(pages):
            for each in pages:
                del self._free_pages[each]
            self._free_runs.append(run)

    def copy(self, page: int, to: int) -> None:
        self.memory[:, :, :, to] = self.memory[:, :, :, page]

    def read(self, pages: Sequence[int]) -> Tensor:
        """A copy of pages: [pages, *page_shape]."""
        return self.memory[:, :, :, list(pages)].movedim(3, 0).contiguous()

    def write(self, pages: Sequence[int], contents: Tensor) -> None:
        """contents: as returned by `read`."""
        where = torch.tensor(list(pages), dtype=torch.int64, device=self.device)
        self.memory.index_copy_(3, where, contents.to(self.device).movedim(0, 3))

    @property
    def page_shape(self) -> tuple[int, ...]:
        """[layers, 2, num_kv_heads, page_size, width]"""
        return (*self.memory.shape[:3], *self.memory.shape[4:])

    def keys_and_values(self, layer: int) -> tuple[Tensor, Tensor]:
        """Two tensors [pages, num_kv_heads, page_size, width]. layer: its index within a page."""
        return self.memory[layer, 0].transpose(0, 1), self.memory[layer, 1].transpose(0, 1)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """On a CPU, memory that the system commits on the first write: torch would write to all of it now."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)


def page_bytes(layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, page_size: int = PAGE_SIZE) -> int:
    return layers * 2 * num_kv_heads * page_size * width(head_dim, dtype) * dtype.itemsize


def pages_for(config: ModelConfig, length: int, page_size: int = PAGE_SIZE, chunk: int = 0) -> int:
    """Pages that a sequence of this many tokens holds. chunk: tokens of the pass under way, if there is one."""
    last, before = -(-length // page_size), max(0, length - chunk)
    groups = layer_groups(config.windows)
    return sum(last - max(0, first_visible(before, group.window) - page_size) // page_size for group in groups)


def bytes_for(config: ModelConfig, length: int, itemsize: int, page_size: int = PAGE_SIZE, chunk: int = 0) -> int:
    """Bytes that a sequence of this many tokens holds. itemsize: bytes of an element; 1 includes int8's scales."""
    pages = pages_for(config, length, page_size, chunk)
    return pages * page_size * config.cache_bytes_per_token(itemsize) // len(layer_groups(config.windows))
