"""The paged cache: pages of a pool, allocated as a sequence grows.

Caches of one pool can share pages: those of a common prefix, or of the sequence before a fork. A shared page is never
written: `reserve` copies it first (copy-on-write). Layers with a window keep only the pages of that window.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Self
from weakref import finalize

import numpy as np
import torch
from torch import Tensor, nn

from infer.cache.base import BaseCache, CacheShape, first_visible
from infer.cache.device_tables import DeviceTable
from infer.cache.pool import NO_PAGE, PAGE_SIZE, PagePool, layer_groups
from infer.cache.table import Table
from infer.config import ModelConfig

UNBOUNDED = sys.maxsize


class PagedCache(BaseCache):
    """A page table for each group of layers with the same window. `allocate` takes windows and page_size.

    page_table: [batch, groups, pages], page numbers in the pool; position p is in entry p // pool.page_size.
    """

    drops_positions = True

    def __init__(self, pool: PagePool, max_seq_len: int, windows: Sequence[int | None], batch_size: int = 1) -> None:
        """windows: of each layer, None where it sees all positions."""
        shape = CacheShape(len(windows), batch_size, pool.num_kv_heads, max_seq_len, pool.head_dim)
        super().__init__(shape, pool.dtype, pool.device, windows)
        self.pool = pool
        self.groups = layer_groups(self.windows)
        if len(self.groups[0].layers) != pool.layers:
            raise ValueError(
                f"a page of this pool holds {pool.layers} layers, but this model's windows need pages of "
                f"{len(self.groups[0].layers)}"
            )
        self._places = _places(self.windows)
        self.page_table = np.full(
            (batch_size, len(self.groups), _pages(max_seq_len, pool.page_size)), NO_PAGE, np.int64
        )
        self._device_table: DeviceTable | None = None  # a copy for the kernels of another device
        if pool.device_tables is not None:
            self._device_table = pool.device_tables.allocate(self.page_table.size)
        self.table_length = 0  # entries of each page table up to the last allocated page
        self._set_first([0] * len(self.groups))
        self._num_slots = 0  # positions up to which `reserve` has nothing to do
        self.on_window_release: Callable[[PagedCache], None] | None = None  # called before they are released
        self.salt = ""  # only caches with the same one share pages
        self._table: tuple[int, int, Table] | None = None  # with the addresses that it was made for
        finalize(self, _release_all, pool, self.page_table, self._device_table)

    @classmethod
    def _empty(  # type: ignore[override]
        cls,
        shape: CacheShape,
        dtype: torch.dtype,
        device: torch.device,
        *,
        windows: Sequence[int | None] = (),
        page_size: int = PAGE_SIZE,
    ) -> Self:
        """With a pool of its own, large enough for a full cache."""
        windows = tuple(windows) or (None,) * shape.num_layers
        groups = layer_groups(windows)
        num_pages = shape.batch_size * len(groups) * _pages(shape.max_seq_len, page_size)
        layers, heads = len(groups[0].layers), shape.num_kv_heads
        pool = PagePool(num_pages, layers, heads, shape.head_dim, dtype=dtype, device=device, page_size=page_size)
        return cls(pool, shape.max_seq_len, windows, shape.batch_size)

    @property
    def k(self) -> list[Tensor]:
        """Of each layer, all pages of the pool: [pages, num_kv_heads, page_size, width]."""
        return [self.pool.keys_and_values(self._places[layer][1])[0] for layer in range(self.shape.num_layers)]

    @property
    def v(self) -> list[Tensor]:
        return [self.pool.keys_and_values(self._places[layer][1])[1] for layer in range(self.shape.num_layers)]

    @property
    def num_pages(self) -> int:
        """Pages that it holds, alone or with others."""
        return self.shape.batch_size * sum(self.table_length - first for first in self._first)

    @property
    def memory_bytes(self) -> int:
        return self.num_pages * self.pool.page_bytes

    def reserve(self, n: int) -> int:
        """Allocate the pages for n more positions, or raise and change nothing; returns the number of all slots."""
        if type(self.seq_len) is int and n >= 0 <= self.seq_len <= self._num_slots - n:
            return self._num_slots
        self._check_fits(n)
        if not n:
            return self._num_slots
        self._drop_invisible()
        page_size = self.pool.page_size
        length, tail = _pages(self.seq_len + n, page_size), self.seq_len // page_size
        shared = self._shared_at(tail) if self.seq_len % page_size else []
        missing = max(0, length - self.table_length)
        pages = self._allocate(len(shared), missing)
        for (row, group), own in zip(shared, pages, strict=False):
            theirs = self.page_table[row, group, tail]
            self.page_table[row, group, tail] = own
            self._first[group] = min(self._first[group], tail)
            if theirs != NO_PAGE:
                self.pool.copy(theirs, own)
                self.pool.release([theirs])
        changed = tail if shared else self.table_length
        if missing:
            entries = np.reshape(pages[len(shared) :], (*self.page_table.shape[:2], missing))
            self.page_table[:, :, self.table_length : length] = entries
            self.table_length = length
        self._copy_to_device(changed, length)
        self._num_slots = min(self.table_length * page_size, self.capacity)
        return self._num_slots

    def fork(self) -> PagedCache:
        """A cache with the same contents. It shares all pages; the first to write to the last page copies it."""
        twin = PagedCache(self.pool, self.capacity, self.windows, self.shape.batch_size)
        twin.on_window_release, twin.salt = self.on_window_release, self.salt
        twin._fill(self.page_table[:, :, : _pages(self.seq_len, self.pool.page_size)], self.seq_len)
        self.pool.retain(twin.page_table[twin.page_table != NO_PAGE].tolist())
        twin.contents = copy.deepcopy(self.contents)
        twin.contents._model, twin.contents.version = self.contents._model, self.contents.version  # lost in a copy
        self._num_slots = 0
        return twin

    def adopt(self, pages: Sequence[tuple[int, ...]], tokens: Sequence[int], model: nn.Module | None) -> None:
        """Start with tokens whose pages are computed. pages: for each entry, the page of each group, or NO_PAGE.

        The cache must be empty and have one row. It takes over the caller's references. model: see `CachedTokens.add`.
        """
        if self.seq_len or self.shape.batch_size != 1:
            raise ValueError("only an empty cache of one row can adopt pages")
        self._release_from(0)
        self._fill(np.array(pages, np.int64).reshape(-1, len(self.groups)).T[None], len(tokens))
        self.contents.add(0, tokens, model)

    def filled_pages(self) -> list[tuple[int, ...]]:
        """For each entry with filled positions, the page of each group, or NO_PAGE: for others to share."""
        self._num_slots = 0  # a page that is shared from now on is copied before the next write
        filled = self.page_table[0, :, : _pages(self.seq_len, self.pool.page_size)]
        return [tuple(column) for column in filled.T.tolist()]

    def table(self, config: ModelConfig, dtype: torch.dtype, n: int) -> Any:
        if not self._is_kernel_compatible(config, dtype):
            return None
        if self._device_table is not None and self.pool.page_size % PAGE_SIZE:
            return None  # GPU kernels read blocks of keys, each within one page
        table = self.page_table.ctypes.data if self._device_table is None else self._device_table.address
        memory = self.pool.memory.data_ptr()
        if self._table is None or self._table[:2] != (memory, table):
            rows, groups, length = self.page_table.shape
            at = table + 8 * length * np.arange(rows * groups, dtype=np.int64).reshape(rows, groups)
            group, within = _places_by_layer(self.windows)
            self._table = memory, table, Table.of_pages(self.pool.memory, within, at.T[group])
        return self._table[2].at(self.seq_len) if self._table[2].aligned else None

    def advance(self, n: int) -> None:
        self.reserve(n)
        self._move_to(self.seq_len + n)

    def _check_rewind(self, seq_len: int) -> None:
        for group, first in zip(self.groups, self._first, strict=True):
            needed, oldest = first_visible(seq_len, group.window), first * self.pool.page_size
            if needed < min(oldest, seq_len):
                raise ValueError(
                    f"cannot truncate to {seq_len}: its window begins at {needed}, and positions before {oldest} are "
                    "no longer held; reset, and feed the tokens again"
                )

    def _store(self, layer_idx: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """As in every cache, but a window layer returns only the keys and values that the new queries can see."""
        n, k, v = self._check_and_quantize(layer_idx, k, v)
        self.reserve(n)
        group, within = self._places[layer_idx]
        first, end, page_size = self._first_visible(layer_idx), self.seq_len + n, self.pool.page_size
        stored = []
        for pages, new in zip(self.pool.keys_and_values(within), (k, v), strict=True):
            at = self.seq_len
            while at < end:
                count = min(end, (at // page_size + 1) * page_size) - at
                for row, page in enumerate(self.page_table[:, group, at // page_size]):
                    slot = at % page_size
                    pages[page, :, slot : slot + count] = new[row, :, at - self.seq_len :][:, :count]
                at += count
            read = torch.from_numpy(self.page_table[:, group, first // page_size : _pages(end, page_size)].copy())
            found = pages[read.to(self.device)]  # [B, pages, Hkv, page_size, width]
            found = found.transpose(1, 2).flatten(2, 3)  # [B, Hkv, positions, width]
            stored.append(found[:, :, first % page_size : first % page_size + end - first])
        return stored[0], stored[1]

    def _move_to(self, seq_len: int) -> None:
        back = seq_len < self.seq_len or not seq_len
        if back or seq_len >= self._drops_at:
            self._num_slots = 0
        super()._move_to(seq_len)
        if back:
            self._release_from(_pages(seq_len, self.pool.page_size))

    def _release_from(self, entry: int) -> None:
        """Release the pages from this entry of the page table on."""
        dropped = self.page_table[:, :, entry : self.table_length]
        pages = dropped[dropped != NO_PAGE].tolist()
        dropped[:] = NO_PAGE
        self.table_length = min(self.table_length, entry)
        self._set_first([min(first, self.table_length) for first in self._first])
        self.pool.release(pages)

    def _drop_invisible(self) -> None:
        """Release pages that no query will see, except the last of them, so that a few tokens can be truncated."""
        if self.seq_len < self._drops_at:
            return
        if self.on_window_release is not None:
            self.on_window_release(self)
        page_size, first = self.pool.page_size, list(self._first)
        for i, group in enumerate(self.groups):
            first[i] = max(first[i], (first_visible(self.seq_len, group.window) - page_size) // page_size)
            dropped = self.page_table[:, i, self._first[i] : first[i]]
            self.pool.release(dropped.ravel().tolist())
            dropped[:] = NO_PAGE
        self._set_first(first)

    def _set_first(self, first: list[int]) -> None:
        """first: of each group, the entry of the first page that it holds."""
        self._first, page_size = first, self.pool.page_size
        windows = [(group.window, entry) for group, entry in zip(self.groups, first, strict=True)]
        self._drops_at = min(
            (window - 1 + (entry + 2) * page_size for window, entry in windows if window), default=UNBOUNDED
        )

    def _shared_at(self, entry: int) -> list[tuple[int, int]]:
        """The rows and groups whose page at this entry is shared, or missing.

        It is missing where a window of one position has seen nothing of it.
        """
        ref_counts = self.pool.ref_counts
        return [
            (row, group)
            for row, pages in enumerate(self.page_table[:, :, entry].tolist())
            for group, page in enumerate(pages)
            if page == NO_PAGE or ref_counts[page] > 1
        ]

    def _fill(self, pages: np.ndarray[Any, Any], seq_len: int) -> None:
        """Put pages [batch, groups, pages] with `seq_len` filled positions into an empty cache."""
        length = pages.shape[2]
        self.page_table[:, :, :length] = pages
        self.table_length = length
        self._set_first([int(length - (row != NO_PAGE)[::-1].cumprod().sum()) for row in pages[0]])
        self._copy_to_device(0, length)
        super()._move_to(seq_len)
        self._num_slots = 0

    def _copy_to_device(self, first: int, stop: int) -> None:
        """Copy these entries of all page tables."""
        if self._device_table is not None and self.pool.device_tables is not None and first < stop:
            width = self.page_table.shape[2]
            tables = self.page_table[:, :, first:stop].reshape(-1, stop - first).tolist()
            entries = {i * width + first + j: page for i, table in enumerate(tables) for j, page in enumerate(table)}
            self.pool.device_tables.write(self._device_table, entries)

    def _allocate(self, copies: int, missing: int) -> list[int]:
        """Pages to copy into, then `missing` pages for each page table, contiguous where possible; all or none."""
        tables = self.page_table.reshape(-1, self.page_table.shape[2])
        self.pool.ensure_free(copies + missing * len(tables))
        pages = self.pool.allocate(copies)
        for table in tables:
            pages += self.pool.allocate(missing, int(table[self.table_length - 1]) if self.table_length else NO_PAGE)
        return pages


@lru_cache
def _places(windows: tuple[int | None, ...]) -> dict[int, tuple[int, int]]:
    """Of each layer: its group, and its index within a page."""
    return {layer: (g, i) for g, group in enumerate(layer_groups(windows)) for i, layer in enumerate(group.layers)}


@lru_cache
def _places_by_layer(windows: tuple[int | None, ...]) -> np.ndarray[Any, Any]:
    """[2, layers]: the same of all layers."""
    return np.array([place for _, place in sorted(_places(windows).items())]).T


def _pages(positions: int, page_size: int) -> int:
    return -(-positions // page_size)


def _release_all(pool: PagePool, page_table: np.ndarray[Any, Any], device_table: DeviceTable | None) -> None:
    """The pages of a cache that was garbage-collected."""
    pool.release(page_table[page_table != NO_PAGE].tolist())
    page_table[:] = NO_PAGE
    if device_table is not None and pool.device_tables is not None:
        pool.device_tables.free(device_table)
