"""Both sides of tensor parallelism: the driver sends each pass and each page operation, and workers repeat them.

Page tables exist on the driver alone. It decides which sequence has which page, and its commands name pages by number;
each rank stores the keys and values of its own heads in its pool under the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from typing import Any
from weakref import finalize

import numpy as np
import torch
from torch import Tensor

from infer.backend import backend_for
from infer.backend.fingerprint import fingerprint
from infer.cache.base import Cache, CacheWrapper, NoCache, unwrap, wrappers
from infer.cache.paged import PagedCache
from infer.cache.pool import PAGE_SIZE, PagePool, bytes_for
from infer.cache.traced import TracedCache
from infer.loader.load import load_model
from infer.machine import available_memory, use_threads
from infer.models.common import Decoder
from infer.models.rows import HiddenStates, Row, pack
from infer.parallel.group import ProcessGroup

_pool_ids = count()


class TensorParallelGroup(ProcessGroup):
    """The ranks of one sharded model: an `nn.sharded.Group`."""

    def wrap_backend(self, model: Decoder, backend: Any) -> Any:
        return DriverBackend(self, model, backend) if self.is_driver else backend


def load_shard(group: TensorParallelGroup, settings: Mapping[str, Any]) -> Any:
    """Load this rank's shard of a model, and wait for all ranks. The driver raises the error of any rank."""
    model, error = None, None
    try:
        model = load_model(**settings, device=group.device, group=group)[0]
    except Exception as reason:
        error = reason
    group.gather_objects(error=error)
    return model


class DriverBackend:
    """Runs each pass of a model on all ranks."""

    def __init__(self, group: ProcessGroup, model: Decoder, backend: Any) -> None:
        self.name, self.reason = backend.name, f"{backend.reason}, in {group.world_size} processes"
        self.compiler = backend.compiler
        learned = None if model.embed_positions is None else model.embed_positions.weight.shape[0]
        self._group, self._backend = group, backend
        self._pack_options = model.device, learned, model.embed_tokens  # not the model, which owns this backend

    def run(self, rows: Sequence[Row]) -> list[Tensor]:
        group = self._group
        pack(rows, *self._pack_options)  # raises what cannot run, before the workers begin
        rows = [row._replace(tokens=_plain_tokens(row)) for row in rows]
        message = [(row.tokens, _describe(group, row.cache), row.logits, row.hidden is not None) for row in rows]
        with group.command("run", message):
            try:
                logits: list[Tensor] = self._backend.run(rows)
                group.synchronize()
                return logits
            except BaseException as error:
                if group.failure is None:
                    group.fail(f"a pass has failed, and the processes are out of step: {error!r:.200}")
                raise

    def captured_decoder(self) -> None:
        return None


def _plain_tokens(row: Row) -> list[int] | Tensor:
    """Of the same type on all ranks: a backend may choose how to run a pass by that type."""
    if isinstance(row.tokens, Tensor):
        return row.tokens[0].tolist() if len(row.tokens) == 1 else row.tokens.cpu()
    return list(row.tokens)


def _describe(group: ProcessGroup, cache: Cache) -> tuple[Any, ...]:
    """The arguments of `Worker._cache`, with which workers make the same cache."""
    if any(isinstance(wrapper, TracedCache) for wrapper in wrappers(cache)):
        raise ValueError("a trace needs all heads, and each process has only some: trace in one process")
    inner = unwrap(cache)
    wrapped = inner is not cache
    if isinstance(inner, PagedCache) and isinstance(inner.pool, ShardedPool) and inner.pool.group is group:
        page_table = inner.page_table[:, :, : inner.table_length].astype(np.int32)
        return wrapped, inner.pool.pool_id, inner.seq_len, page_table
    if type(inner) is NoCache:
        return wrapped, None, inner.shape.batch_size
    raise ValueError(
        f"a tensor-parallel model needs a cache with pages in all processes, as `LLM` and `generate` make it, "
        f"not a {type(inner).__name__}"
    )


class ShardedPool(PagePool):
    """The driver's pool. Each operation on a page is repeated by the workers on their shard of it."""

    group: ProcessGroup
    pool_id: int  # the workers' name for it
    heads: list[int]  # KV heads of each rank

    @classmethod
    def of(cls, model: Decoder, memory: int, dtype: torch.dtype, page_size: int = PAGE_SIZE) -> ShardedPool:
        """As many pages as fit into `memory` bytes of this rank, on each rank. Raises if one does not have as much."""
        group = model.group
        assert isinstance(group, ProcessGroup)
        free = available_memory(model.device, group.sharing)
        if free is not None and memory > free:
            raise ValueError(
                f"the cache needs {memory / 1e9:.2f} GB in each of {group.world_size} processes, but "
                f"{free / 1e9:.2f} GB are free for each on {model.device}"
            )
        pool = cls.for_model(model.config, memory, dtype=dtype, device=model.device, page_size=page_size)
        pool.group, pool.pool_id = group, next(_pool_ids)
        with group.command("pool", pool.pool_id, pool.num_pages, pool.layers, dtype, page_size):
            finalize(pool, group.send_later, "drop", pool.pool_id).atexit = False
            pool.heads = group.gather_objects(pool.num_kv_heads)
        return pool

    def fingerprint(self, model: Any) -> str:
        """Of the shards of all ranks."""
        with self.group.command("fingerprint"):
            return " ".join(self.group.gather_objects(fingerprint(model)))

    def close(self) -> None:
        super().close()
        self.group.send_later("drop", self.pool_id)

    def copy(self, page: int, to: int) -> None:
        super().copy(page, to)
        self.group.send_later("copy", self.pool_id, page, to)

    def read(self, pages: Sequence[int]) -> Tensor:
        """[pages, *page_shape]: the heads of all ranks."""
        with self.group.command("read", self.pool_id, list(pages), self.heads):
            return _gather_heads(self.group, super().read(pages), self.heads)

    def write(self, pages: Sequence[int], contents: Tensor) -> None:
        with self.group.command("write", self.pool_id, list(pages), contents.cpu(), self.heads):
            super().write(pages, _own_heads(self.group, contents, self.heads))

    @property
    def page_shape(self) -> tuple[int, ...]:
        layers, two, _, *rest = super().page_shape
        return layers, two, sum(self.heads), *rest


def sharded_cache(model: Decoder, max_seq_len: int, dtype: torch.dtype) -> PagedCache:
    """An empty cache of one row, with a pool of its own."""
    size = bytes_for(model.config, max_seq_len, dtype.itemsize, chunk=max_seq_len)
    return PagedCache(ShardedPool.of(model, size, dtype), max_seq_len, model.config.windows)


def _gather_heads(group: ProcessGroup, own: Tensor, heads: Sequence[int]) -> Tensor:
    """own [pages, layers, 2, heads of this rank, page, width] -> with the heads of all ranks"""
    return group.all_gather(own.movedim(3, -1), heads).movedim(-1, 3).contiguous()


def _own_heads(group: ProcessGroup, pages: Tensor, heads: Sequence[int]) -> Tensor:
    """The inverse of `_gather_heads`."""
    return torch.split(pages, list(heads), 3)[group.rank]


class WorkerPool(PagePool):
    """A worker's pool: the driver knows which pages are in use."""

    def release(self, pages: Iterable[int]) -> None:
        pass


class WorkerCache(PagedCache):
    """A copy of one of the driver's caches, for one pass."""

    def __init__(self, pool: PagePool, windows: Sequence[int | None], seq_len: int, pages: Any) -> None:
        pages = np.asarray(pages, np.int64)  # [batch, groups, pages]
        super().__init__(pool, pages.shape[2] * pool.page_size, windows, pages.shape[0])
        self._fill(pages, seq_len)

    def reserve(self, n: int) -> int:
        return self.capacity


class Worker:
    """Executes commands. Each public method is a command of the driver."""

    def __init__(self, group: TensorParallelGroup) -> None:
        self._group = group
        self._model: Decoder
        self._pools: dict[int, WorkerPool] = {}

    def load(self, settings: Mapping[str, Any], threads: int | None) -> None:
        if threads is not None:
            use_threads(threads)
        self._model = load_shard(self._group, settings)

    def fingerprint(self) -> None:
        self._group.gather_objects(fingerprint(self._model))

    def pool(self, pool_id: int, num_pages: int, layers: int, dtype: torch.dtype, page_size: int) -> None:
        model, error = self._model, None
        heads, head_dim = model.config.num_key_value_heads, model.config.computed_head_dim
        try:
            self._pools[pool_id] = WorkerPool(
                num_pages, layers, heads, head_dim, dtype=dtype, device=model.device, page_size=page_size
            )
        except Exception as reason:
            error = reason
        self._group.gather_objects(heads, error)

    def drop(self, pool_id: int) -> None:
        self._pools.pop(pool_id, None)

    def copy(self, pool_id: int, page: int, to: int) -> None:
        if pool_id in self._pools:  # it may have been dropped meanwhile
            self._pools[pool_id].copy(page, to)

    def read(self, pool_id: int, pages: list[int], heads: list[int]) -> None:
        _gather_heads(self._group, self._pools[pool_id].read(pages), heads)

    def write(self, pool_id: int, pages: list[int], contents: Tensor, heads: list[int]) -> None:
        self._pools[pool_id].write(pages, _own_heads(self._group, contents, heads))

    def run(self, rows: list[Any]) -> None:
        backend_for(self._model).run(
            [
                Row(self._cache(*cache), tokens, logits, HiddenStates() if hidden else None)
                for tokens, cache, logits, hidden in rows
            ]
        )

    def _cache(self, wrapped: bool, pool_id: int | None, size: int, pages: Any = None) -> Cache:
        """wrapped: as the driver's cache is, so that a pass calls `attend`. size: seq_len, or the batch size."""
        if pool_id is None:
            cache: Cache = NoCache(size, self._model.device)
        else:
            cache = WorkerCache(self._pools[pool_id], self._model.config.windows, size, pages)
        return CacheWrapper(cache) if wrapped else cache


@torch.inference_mode()
def run_worker(group: TensorParallelGroup) -> None:
    """Execute commands until the driver sends "exit", or is lost."""
    worker = Worker(group)
    while True:
        for name, *arguments in group.receive():
            if name == "exit":
                return
            getattr(worker, name)(*arguments)
