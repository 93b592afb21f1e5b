"""The page pool: the memory of many caches, taken once and handed out in pages.

A page holds a fixed number of positions of several layers, all pages are alike, and any free one will do: there is
nothing to fragment. Caches that hold the same tokens hold the same pages; a page is free again when the last one that
holds it lets it go.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from infer.cache.base import CacheShape, check_memory, first_seen
from infer.cache.int8 import width
from infer.config import ModelConfig
from infer.machine import available_memory, promises

PAGE = 64  # positions: a multiple of the blocks of keys that attention takes, so that no sum depends on pages
RUN = 16  # pages that a sequence takes one behind the other while there are so many: a CPU reads ahead beyond a page


class NoPages(ValueError):
    """All pages are in use."""


class LayerGroup(NamedTuple):
    """Layers that see as far back as each other: a page holds the keys and values of one group."""

    window: int | None  # None: they see everything
    layers: tuple[int, ...]


def layer_groups(windows: Sequence[int | None]) -> Sequence[LayerGroup]:
    """All layers in groups of one size, the largest that leaves none over: then pages are alike, and none is wasted."""
    return _layer_groups(tuple(windows))


@cache
def _layer_groups(windows: tuple[int | None, ...]) -> Sequence[LayerGroup]:
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
        """count: of pages. layers: of which each holds keys and values."""
        if type(page) is not int or page < 1:
            raise ValueError(f"a page has a whole number of positions, 1 or more, not {page!r}")
        if type(count) is not int or count < 1:
            raise ValueError(f"a pool has a whole number of pages, 1 or more, not {count!r}")
        self.page, self.layers, self.num_kv_heads, self.head_dim = page, layers, num_kv_heads, head_dim
        self.dtype, self.device = dtype, device
        shape = CacheShape(layers, 1, num_kv_heads, count * page, head_dim)
        check_memory(layers * count * page, shape, dtype, device)
        # A head's pages lie behind each other: a sequence that has taken its pages one after the other is read as if
        # it were contiguous.
        stored = (layers, 2, num_kv_heads, count, page, width(head_dim, dtype))
        self.memory = _zeros(stored, dtype, device)
        self.holders = np.zeros(count, np.int32)  # of each page
        self.reclaim: Callable[[int], None] | None = None  # asked to let go of so many pages when there are too few
        self._free_runs = list(range(-(-count // RUN) - 1, -1, -1))  # of which all pages are free, the lowest last
        self._free_in_run = np.minimum(count - RUN * np.arange(-(-count // RUN)), RUN)  # of each
        self._loose: OrderedDict[int, None] = OrderedDict()  # free pages of other runs
        self._free = count
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
    ) -> Self:
        """As many pages as so many bytes hold."""
        groups = layer_groups([config.window(i) for i in range(config.num_hidden_layers)])
        layers, heads, head_dim = len(groups[0].layers), config.num_key_value_heads, config.computed_head_dim
        size = page_bytes(layers, heads, head_dim, dtype, page)
        if memory < size * len(groups):
            raise ValueError(
                f"{memory:,} bytes of cache hold no {page} positions of this model: these take "
                f"{size * len(groups):,} bytes"
            )
        free = available_memory(device)
        if free is not None and memory > free:
            raise ValueError(
                f"{memory / 1e9:.2f} GB were asked for caches, but {free / 1e9:.2f} GB are free on {device}"
            )
        return cls(memory // size, layers, heads, head_dim, dtype=dtype, device=device, page=page)

    @property
    def count(self) -> int:
        return len(self.holders)

    @property
    def free(self) -> int:
        return self._free

    @property
    def page_bytes(self) -> int:
        return self.memory.nbytes // self.count

    @property
    def memory_bytes(self) -> int:
        return self.memory.nbytes

    @property
    def unwritten_bytes(self) -> int:
        return (self.count - self._touched) * self.page_bytes

    def close(self) -> None:
        """Give the memory back, whoever still knows this pool. Its caches cannot be used any more."""
        self.memory = self.memory.new_empty(0)
        promises.discard(self)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # torch would keep it for itself, and the device not call it free

    def make_room(self, count: int) -> None:
        """Have so many pages free, or raise NoPages."""
        if count > self.free and self.reclaim is not None:
            self.reclaim(max(count - self.free, min(RUN, self.count // 64)))  # in runs, rather than one by one
        if count > self.free:
            raise NoPages(
                f"no memory is left for the cache: {count} more pages of {self.page} positions are needed, and of "
                f"{self.count} ({self.memory_bytes / 1e6:.0f} MB) {self.free} are free"
            )

    def take(self, count: int, after: int = -1) -> list[int]:
        """So many free pages, to be held by the caller; others are let go of first where that takes it.

        after: a page that these should lie behind, if they can.
        """
        self.make_room(count)
        taken: list[int] = []
        for _ in range(count):
            after = self._next(after + 1)
            taken.append(after)
            self.holders[after] = 1
            self._touched = max(self._touched, after + 1)
        return taken

    def share(self, pages: Iterable[int]) -> None:
        """One more holds each of these."""
        for page in pages:
            if page < 0 or self.holders[page] < 1:
                raise RuntimeError(f"page {page} is shared, but nobody holds it")
            self.holders[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """One less holds each of these."""
        for page in pages:
            if page < 0 or self.holders[page] < 1:
                raise RuntimeError(f"page {page} is released, but nobody holds it")
            self.holders[page] -= 1
            if not self.holders[page]:
                self._give_back(page)

    def _next(self, wanted: int) -> int:
        """A free page: this one, or the first of a run that is all free, or any."""
        if wanted not in self._loose:
            if self._free_runs:
                run = self._free_runs.pop()
                wanted = run * RUN
                self._loose.update(dict.fromkeys(range(wanted, min(wanted + RUN, self.count))))
            else:  # not the last one: what lies behind a page that was free for long is likely to be free too
                wanted = next(iter(self._loose))
        del self._loose[wanted]
        self._free_in_run[wanted // RUN] -= 1
        self._free -= 1
        return wanted

    def _give_back(self, page: int) -> None:
        run = page // RUN
        self._loose[page] = None
        self._free_in_run[run] += 1
        self._free += 1
        pages = range(run * RUN, min((run + 1) * RUN, self.count))
        if self._free_in_run[run] == len(pages):
            for each in pages:
                del self._loose[each]
            self._free_runs.append(run)

    def copy(self, page: int, to: int) -> None:
        """Put the contents of one page into another."""
        self.memory[:, :, :, to] = self.memory[:, :, :, page]

    def read(self, pages: Sequence[int]) -> Tensor:
        """A copy of pages: [pages, *page_shape]."""
        return self.memory[:, :, :, list(pages)].movedim(3, 0).contiguous()

    def write(self, pages: Sequence[int], contents: Tensor) -> None:
        """Put back what `read` gave."""
        where = torch.tensor(list(pages), dtype=torch.int64, device=self.device)
        self.memory.index_copy_(3, where, contents.to(self.device).movedim(0, 3))

    @property
    def page_shape(self) -> tuple[int, ...]:
        """[layers, 2, num_kv_heads, page, width]"""
        return (*self.memory.shape[:3], *self.memory.shape[4:])

    def keys_and_values(self, layer: int) -> tuple[Tensor, Tensor]:
        """[pages, num_kv_heads, page, width] each, of one of the layers that a page holds."""
        return self.memory[layer, 0].transpose(0, 1), self.memory[layer, 1].transpose(0, 1)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """On a CPU, memory that is taken when it is first written to: torch would write to all of it now."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)


def page_bytes(layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, page: int = PAGE) -> int:
    return layers * 2 * num_kv_heads * page * width(head_dim, dtype) * dtype.itemsize


def pages_for(config: ModelConfig, length: int, page: int = PAGE, chunk: int = 0) -> int:
    """That a conversation of so many tokens holds; while a pass of `chunk` of them runs, if there is one."""
    groups = layer_groups([config.window(i) for i in range(config.num_hidden_layers)])
    last, before = -(-length // page), max(0, length - chunk)
    return sum(last - max(0, first_seen(before, group.window) - page) // page for group in groups)


def bytes_for(config: ModelConfig, length: int, itemsize: int, page: int = PAGE, chunk: int = 0) -> int:
    """That a conversation of so many tokens takes. itemsize: bytes of a number, 1 with scales. chunk: as above."""
    groups = layer_groups([config.window(i) for i in range(config.num_hidden_layers)])
    return pages_for(config, length, page, chunk) * page * config.cache_bytes_per_token(itemsize) // len(groups)
