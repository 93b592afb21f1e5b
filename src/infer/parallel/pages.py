"""Pages of which each process has those of its own heads: the leader's pool, and what stands for it in the others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import count
from typing import Any
from weakref import finalize

import numpy as np
import torch
from torch import Tensor

from infer.backend.fingerprint import fingerprint
from infer.cache.paged import PagedCache
from infer.cache.pool import PAGE, PagePool, bytes_for
from infer.config import ModelConfig
from infer.machine import available_memory
from infer.models.common import Decoder
from infer.parallel.group import ProcessGroup

_numbers = count()


class SplitPool(PagePool):
    """The leader's: which page is whose is decided here, and what is done to a page is done in all processes."""

    group: ProcessGroup
    number: int  # by which the others know it
    heads: list[int]  # key/value heads of each process

    @classmethod
    def of(cls, model: Decoder, memory: int, dtype: torch.dtype, page: int = PAGE) -> SplitPool:
        """As many pages as so many bytes of this process hold; as many in the others. Refused if one has no room."""
        group = model.group
        assert isinstance(group, ProcessGroup)
        free = available_memory(model.device, group.sharing)
        if free is not None and memory > free:
            raise ValueError(
                f"{memory / 1e9:.2f} GB of cache were asked for in each of {group.count} processes, but "
                f"{free / 1e9:.2f} GB are free for each on {model.device}"
            )
        pool = cls.for_model(model.config, memory, dtype=dtype, device=model.device, page=page)
        pool.group, pool.number = group, next(_numbers)
        with group.doing("pool", pool.number, pool.count, pool.layers, dtype, page):
            finalize(pool, group.later, "drop", pool.number).atexit = False
            pool.heads = group.agree(pool.num_kv_heads)
        return pool

    def fingerprint(self, model: Any) -> str:
        """Of the parts of all processes."""
        with self.group.doing("fingerprint"):
            return " ".join(self.group.agree(fingerprint(model)))

    def close(self) -> None:
        super().close()
        self.group.later("drop", self.number)

    def copy(self, page: int, to: int) -> None:
        super().copy(page, to)
        self.group.later("copy", self.number, page, to)

    def read(self, pages: Sequence[int]) -> Tensor:
        """[pages, *page_shape]: the heads of all processes."""
        with self.group.doing("read", self.number, list(pages), self.heads):
            return gathered_heads(self.group, super().read(pages), self.heads)

    def write(self, pages: Sequence[int], contents: Tensor) -> None:
        with self.group.doing("write", self.number, list(pages), contents.cpu(), self.heads):
            super().write(pages, own_heads(self.group, contents, self.heads))

    @property
    def page_shape(self) -> tuple[int, ...]:
        layers, two, _, *rest = super().page_shape
        return layers, two, sum(self.heads), *rest


def gathered_heads(group: ProcessGroup, own: Tensor, heads: Sequence[int]) -> Tensor:
    """own [pages, layers, 2, heads of this process, page, width] -> with the heads of all."""
    return group.gather(own.movedim(3, -1), heads).movedim(-1, 3).contiguous()


def own_heads(group: ProcessGroup, pages: Tensor, heads: Sequence[int]) -> Tensor:
    """What `gathered_heads` would have got from this process."""
    return torch.split(pages, list(heads), 3)[group.rank]


class FollowedPool(PagePool):
    """A follower's: which pages are in use is for the leader to know."""

    def release(self, pages: Iterable[int]) -> None:
        pass


class FollowedCache(PagedCache):
    """A cache of the leader's, during one pass: its pages are where the leader says."""

    def __init__(self, pool: PagePool, windows: Sequence[int | None], seq_len: int, pages: Any) -> None:
        pages = np.asarray(pages, np.int64)  # [batch, groups, pages]
        super().__init__(pool, pages.shape[2] * pool.page, windows, pages.shape[0])
        self._put(pages, seq_len)

    def reserve(self, n: int) -> int:
        return self.capacity


def described(cache: PagedCache) -> tuple[Any, ...]:
    """For `FollowedCache`, behind the number of its pool."""
    assert isinstance(cache.pool, SplitPool)
    return cache.pool.number, cache.seq_len, cache.pages[:, :, : cache.taken].astype(np.int32)


def split_cache(model: Decoder, max_seq_len: int, dtype: torch.dtype) -> PagedCache:
    """An empty cache of one row, with a pool of its own."""
    config: ModelConfig = model.config
    size = bytes_for(config, max_seq_len, dtype.itemsize, chunk=max_seq_len)
    return PagedCache(SplitPool.of(model, size, dtype), max_seq_len, windows_of(config))


def windows_of(config: ModelConfig) -> list[int | None]:
    return [config.window(i) for i in range(config.num_hidden_layers)]
