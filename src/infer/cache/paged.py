"""The paged cache: pages of a pool, taken as a sequence grows.

Caches of one pool can hold the same pages: of a common beginning, or of what they were before a fork. Nobody writes to
a page that others hold: `reserve` copies it first. Layers that see a window keep only its pages.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from typing import Any, Self
from weakref import finalize

import numpy as np
import torch
from torch import Tensor, nn

from infer.cache.base import BaseCache, CacheShape, checked, first_seen
from infer.cache.pool import PAGE, PagePool, layer_groups
from infer.cache.table import Table
from infer.config import ModelConfig
from infer.machine import to_device

NONE = -1  # no page
UNBOUNDED = sys.maxsize


class PagedCache(BaseCache):
    """A list of pages for each group of layers.

    pages: [batch, groups, pages], a page's number in the pool; position p lies in page p // pool.page of the list.
    """

    def __init__(self, pool: PagePool, max_seq_len: int, windows: Sequence[int | None], batch_size: int = 1) -> None:
        """windows: of each layer, None where it sees everything."""
        shape = CacheShape(len(windows), batch_size, pool.num_kv_heads, max_seq_len, pool.head_dim)
        super().__init__(shape, pool.dtype, pool.device, windows)
        self.pool = pool
        self.groups = layer_groups(self.windows)
        if len(self.groups[0].layers) != pool.layers:
            raise ValueError(
                f"a page of this pool holds {pool.layers} layers, but this model's windows need pages of "
                f"{len(self.groups[0].layers)}"
            )
        self._places = {layer: (g, i) for g, group in enumerate(self.groups) for i, layer in enumerate(group.layers)}
        self.pages = np.full((batch_size, len(self.groups), _pages(max_seq_len, pool.page)), NONE, np.int64)
        self._on_device: Tensor | None = None  # the same, where kernels of another device read it
        if self.device.type != "cpu":
            self._on_device = torch.zeros(self.pages.shape, dtype=torch.int64, device=self.device)
        self._taken = 0  # pages of each list that were taken
        self._keep_from([0] * len(self.groups))
        self._ready = 0  # positions up to which there is nothing to reserve
        self.before_drop: Callable[[PagedCache], None] | None = None  # told before a window's pages are let go of
        self._table: tuple[int, int, Table] | None = None  # and the addresses that it is for
        finalize(self, _release_all, pool, self.pages)

    @classmethod
    def allocate(
        cls,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        max_seq_len: int,
        *,
        batch_size: int = 1,
        dtype: torch.dtype | str = "auto",
        device: torch.device | str = "auto",
        windows: Sequence[int | None] = (),
        page: int = PAGE,
    ) -> Self:
        """An empty cache with a pool of its own, of as many pages as it can need."""
        shape = CacheShape(num_layers, batch_size, num_kv_heads, max_seq_len, head_dim)
        shape, dtype, device = checked(shape, dtype, device)
        kept = tuple(windows) or (None,) * num_layers
        groups = layer_groups(kept)
        count = batch_size * len(groups) * _pages(max_seq_len, page)
        pool = PagePool(count, len(groups[0].layers), num_kv_heads, head_dim, dtype=dtype, device=device, page=page)
        return cls(pool, max_seq_len, kept, batch_size)

    @classmethod
    def from_model_config(
        cls,
        config: ModelConfig,
        max_seq_len: int,
        *,
        batch_size: int = 1,
        dtype: torch.dtype | str = "auto",
        device: torch.device | str = "auto",
        page: int = PAGE,
    ) -> Self:
        """An empty cache for a model of this config, with a pool of its own."""
        return cls.allocate(
            config.num_hidden_layers,
            config.num_key_value_heads,
            config.computed_head_dim,
            max_seq_len,
            batch_size=batch_size,
            dtype=dtype,
            device=device,
            windows=[config.window(i) for i in range(config.num_hidden_layers)],
            page=page,
        )

    @property
    def k(self) -> list[Tensor]:
        """Of each layer, all pages of the pool: [pages, num_kv_heads, page, width]."""
        return [self.pool.keys_and_values(self._places[layer][1])[0] for layer in range(self.shape.num_layers)]

    @property
    def v(self) -> list[Tensor]:
        return [self.pool.keys_and_values(self._places[layer][1])[1] for layer in range(self.shape.num_layers)]

    @property
    def taken(self) -> int:
        """Pages of each list up to the last that was taken."""
        return self._taken

    @property
    def held(self) -> int:
        """Pages that it holds, alone or with others."""
        return self.shape.batch_size * sum(self._taken - first for first in self._first)

    @property
    def memory_bytes(self) -> int:
        return self.held * self.pool.page_bytes

    def reserve(self, n: int) -> int:
        """Take the pages that n more positions need, or refuse and change nothing; how many it has pages for in all."""
        if type(self.seq_len) is int and n >= 0 <= self.seq_len <= self._ready - n:
            return self._ready
        self._check_room(n)
        if not n:
            return self._ready
        self._drop_unseen()
        page = self.pool.page
        last, tail = _pages(self.seq_len + n, page), self.seq_len // page
        copied = self._to_copy(tail) if self.seq_len % page else []
        missing = max(0, last - self._taken)
        new = self._take(len(copied), missing)
        for (row, group), own in zip(copied, new, strict=False):
            theirs = self.pages[row, group, tail]
            self.pages[row, group, tail] = own
            self._first[group] = min(self._first[group], tail)
            if theirs != NONE:
                self.pool.copy(theirs, own)
                self.pool.release([theirs])
        changed = tail if copied else self._taken
        if missing:
            self.pages[:, :, self._taken : last] = np.reshape(new[len(copied) :], (*self.pages.shape[:2], missing))
            self._taken = last
        if self._on_device is not None:
            if len(new) == 1 and self.pages.shape[:2] == (1, 1):  # as mostly: quicker than a copy
                self._on_device[0, 0, changed].fill_(new[0])
            else:
                numbers = torch.from_numpy(self.pages[:, :, changed:last])
                self._on_device[:, :, changed:last].copy_(to_device(numbers, self.device))
        self._ready = min(self._taken * page, self.capacity)
        return self._ready

    def fork(self) -> PagedCache:
        """A cache that holds the same: it costs a list of pages, and later a page where the two part."""
        twin = PagedCache(self.pool, self.capacity, self.windows, self.shape.batch_size)
        twin.before_drop = self.before_drop
        filled = _pages(self.seq_len, self.pool.page)
        twin._put(self.pages[:, :, :filled], self.seq_len)
        self.pool.share(twin._held_pages())
        twin.contents = copy.deepcopy(self.contents)
        twin.contents._model = self.contents._model  # which a copy does not know
        self._ready = 0
        return twin

    def adopt(self, pages: Sequence[tuple[int, ...]], tokens: Sequence[int], model: nn.Module | None) -> None:
        """Go on behind tokens whose pages somebody has computed: of each page, one for each group, or NONE.

        The cache must be empty, of one row, and holds the pages from now on in place of the caller. model: as for
        `Contents.add`.
        """
        if self.seq_len or self.shape.batch_size != 1:
            raise ValueError("pages can be put into an empty cache of one row only")
        self._release_from(0)
        self._put(np.array(pages, np.int64).reshape(-1, len(self.groups)).T[None], len(tokens))
        self.contents.add(0, tokens, model)

    def filled_pages(self) -> list[tuple[int, ...]]:
        """Of each page with filled positions, that of each group, for others to share; NONE where a window is past."""
        self._ready = 0
        filled = self.pages[0, :, : _pages(self.seq_len, self.pool.page)]
        return [tuple(column) for column in filled.T.tolist()]

    def table(self, config: ModelConfig, dtype: torch.dtype, n: int) -> Any:
        if not self._suits_kernels(config, dtype):
            return None
        if self._on_device is not None and self.pool.page % PAGE:
            return None  # a GPU's kernels take blocks of keys that lie behind each other
        lists = self.pages.ctypes.data if self._on_device is None else self._on_device.data_ptr()
        memory = self.pool.memory.data_ptr()
        if self._table is None or self._table[:2] != (memory, lists):
            rows, groups, length = self.pages.shape
            at = lists + 8 * length * np.arange(rows * groups, dtype=np.int64).reshape(rows, groups)
            group, within = np.array([self._places[layer] for layer in range(self.shape.num_layers)]).T
            self._table = memory, lists, Table.of_pages(self.pool.memory, within, at.T[group])
        return self._table[2].at(self.seq_len) if self._table[2].aligned else None

    def advance(self, n: int) -> None:
        self.reserve(n)
        super().advance(n)

    def _check_rewind(self, seq_len: int) -> None:
        for group, first in zip(self.groups, self._first, strict=True):
            needed, oldest = first_seen(seq_len, group.window), first * self.pool.page
            if needed < min(oldest, seq_len):
                raise ValueError(
                    f"cannot truncate to {seq_len}: its window begins at {needed}, and positions before {oldest} are "
                    "no longer held; reset, and feed the tokens again"
                )

    def _suits(self, config: ModelConfig, dtype: torch.dtype) -> bool:
        whole = self.device.type == "cpu" or self.pool.page % PAGE == 0  # blocks of keys on a GPU lie in one page
        return whole and super()._suits(config, dtype)

    def _store(self, layer_idx: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """As in every cache, but a window layer returns only the keys and values that the new queries can see."""
        n, k, v = self._to_store(layer_idx, k, v)
        self.reserve(n)
        group, within = self._places[layer_idx]
        first, end, page = self._first_seen(layer_idx), self.seq_len + n, self.pool.page
        stored = []
        for pages, new in zip(self.pool.keys_and_values(within), (k, v), strict=True):
            at = self.seq_len
            while at < end:
                count = min(end, (at // page + 1) * page) - at
                for row, own in enumerate(self.pages[:, group, at // page]):
                    pages[own, :, at % page : at % page + count] = new[row, :, at - self.seq_len :][:, :count]
                at += count
            read = torch.from_numpy(self.pages[:, group, first // page : _pages(end, page)].copy())  # [B, pages]
            found = pages[read.to(self.device)]  # [B, pages, Hkv, page, width]
            found = found.transpose(1, 2).flatten(2, 3)  # [B, Hkv, positions, width]
            stored.append(found[:, :, first % page : first % page + end - first])
        return stored[0], stored[1]

    def _move_to(self, seq_len: int) -> None:
        behind = seq_len < self.seq_len or not seq_len
        if behind or seq_len >= self._drops_at:
            self._ready = 0
        super()._move_to(seq_len)
        if behind:
            self._release_from(_pages(seq_len, self.pool.page))

    def _release_from(self, first: int) -> None:
        """Let go of the pages from the first on, by their place in the list."""
        dropped = self.pages[:, :, first : self._taken]
        gone = dropped[dropped != NONE].tolist()
        dropped[:] = NONE
        self._taken = min(self._taken, first)
        self._keep_from([min(before, self._taken) for before in self._first])
        self.pool.release(gone)

    def _drop_unseen(self) -> None:
        """Let go of pages that no query will see: one page more is kept, for a rewind of a few tokens."""
        if self.seq_len < self._drops_at:
            return
        if self.before_drop is not None:
            self.before_drop(self)
        page, kept = self.pool.page, list(self._first)
        for i, group in enumerate(self.groups):
            kept[i] = max(kept[i], (first_seen(self.seq_len, group.window) - page) // page)
            gone = self.pages[:, i, self._first[i] : kept[i]]
            self.pool.release(gone.ravel().tolist())
            gone[:] = NONE
        self._keep_from(kept)

    def _keep_from(self, first: list[int]) -> None:
        """Of each group, the first page that it holds."""
        self._first, page = first, self.pool.page
        windows = [(group.window, kept) for group, kept in zip(self.groups, first, strict=True)]
        self._drops_at = min((window - 1 + (kept + 2) * page for window, kept in windows if window), default=UNBOUNDED)

    def _to_copy(self, index: int) -> list[tuple[int, int]]:
        """The rows and groups whose page at this place of the list others hold too, or is not there.

        It is not there where a window of one position has seen nothing of it.
        """
        holders = self.pool.holders
        return [
            (row, group)
            for row, own in enumerate(self.pages[:, :, index].tolist())
            for group, page in enumerate(own)
            if page == NONE or holders[page] > 1
        ]

    def _put(self, pages: np.ndarray[Any, Any], seq_len: int) -> None:
        """Pages [batch, groups, pages] with so many positions filled, into an empty cache."""
        filled = pages.shape[2]
        self.pages[:, :, :filled] = pages
        self._taken = filled
        self._keep_from([int(filled - (row != NONE)[::-1].cumprod().sum()) for row in pages[0]])
        if self._on_device is not None:
            self._on_device[:, :, :filled] = to_device(torch.from_numpy(self.pages[:, :, :filled]), self.device)
        super()._move_to(seq_len)
        self._ready = 0

    def _take(self, copied: int, missing: int) -> list[int]:
        """Pages to copy into, and so many more for each list; all of them or none. Each list's lie in a row."""
        lists = self.shape.batch_size * len(self.groups)
        self.pool.make_room(copied + missing * lists)
        new = self.pool.take(copied)
        for row in self.pages.reshape(lists, -1):
            new += self.pool.take(missing, int(row[self._taken - 1]) if self._taken else NONE)
        return new

    def _held_pages(self) -> list[int]:
        held: list[int] = self.pages[self.pages != NONE].tolist()
        return held


def _pages(positions: int, page: int) -> int:
    """So many positions take so many pages."""
    return -(-positions // page)


def _release_all(pool: PagePool, pages: np.ndarray[Any, Any]) -> None:
    """What a cache held that nobody has any more."""
    pool.release(pages[pages != NONE].tolist())
    pages[:] = NONE
