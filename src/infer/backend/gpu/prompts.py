"""Passes of prompts captured once and replayed, as decode steps are: what a pass reads lies on the device.

A pass is hundreds of launches, each tens of microseconds of Python: more than a GPU takes for a short prompt. So passes
have one of a few sizes, and a pass with fewer tokens leaves the others out. They fill caches; a pass of which logits
are wanted is launched kernel by kernel.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from infer.backend.gpu import captured
from infer.backend.gpu.attention import Tiles, as_tiles
from infer.backend.gpu.products import next_power, on
from infer.backend.gpu.tuned import FEW, PASSES
from infer.cache.paged import PagedCache
from infer.cache.table import COLUMNS
from infer.models.rows import NONE, Row

ROW = 32  # tokens that rows have on average, at least
MOST_ROWS = 256  # of a captured step
FAR = 2**30  # a position that no row goes beyond
USED = 2  # times that a size is needed before it is captured


class Inputs(NamedTuple):
    """What a pass reads, on the device."""

    ids: Tensor  # int64 [T]
    positions: Tensor  # int32 [T]; -1: no token
    tables: Tensor  # int64 [layers, R, COLUMNS]
    tiles: Tiles


class Reach(NamedTuple):
    """How the queries of a pass go through their keys."""

    queries: int  # of a tile
    end: int  # a position that no row goes beyond
    page: int  # positions of a page; 0: no row has pages


class CapturedPass:
    """A pass of up to `size` tokens of up to `most` rows, on buffers of its own."""

    def __init__(self, size: int, most: int, layers: int, reach: Reach, device: torch.device) -> None:
        self._device = device
        count = -(-size // reach.queries) + 2 * most  # of tiles, at most
        self._wide = torch.zeros(size + layers * most * COLUMNS, dtype=torch.int64, device=device)
        self._narrow = torch.zeros(2 * size + 5 * count, dtype=torch.int32, device=device)
        ids, tables = self._parts(self._wide, size)
        positions, rows, tiles = self._parts(self._narrow, size, size)
        by_tile = Tiles(rows, tiles.view(count, 5), reach.end, reach.queries, reach.page)
        self.inputs = Inputs(ids, positions, tables.view(layers, most, COLUMNS), by_tile)
        self._graph: torch.cuda.CUDAGraph | None = None
        self.output: Tensor | None = None  # what `run` gives, of the last launch

    def capture(self, run: Callable[[Inputs], Tensor | None], pool: Any) -> None:
        def keep() -> None:
            self.output = run(self.inputs)

        self.inputs.positions.fill_(-1)
        with on(self._device):
            run(self.inputs)  # loads the kernels
            self._graph = captured.record_graph(keep, pool)

    def launch(self, rows: Sequence[Row], tables: np.ndarray[Any, Any], tiles: np.ndarray[Any, Any]) -> None:
        """tables: of the rows, [layers, rows, COLUMNS]. tiles: [tiles, 5]."""
        counts = [len(row.tokens) for row in rows]
        first, total, size = [row.cache.seq_len for row in rows], sum(counts), len(self.inputs.ids)
        # Pinned, so that nothing waits; torch hands it out again when the device has read it.
        wide, narrow = (torch.zeros(x.shape, dtype=x.dtype, pin_memory=x.is_cuda) for x in (self._wide, self._narrow))
        ids, own_tables = (x.numpy() for x in self._parts(wide, size))
        positions, own_rows, own_tiles = (x.numpy() for x in self._parts(narrow, size, size))
        ids[:total] = [token for row in rows for token in row.tokens]
        own_tables.reshape(self.inputs.tables.shape)[:, : len(rows)] = tables
        own_rows[:total] = np.repeat(np.arange(len(rows)), counts)
        start = np.cumsum(counts) - counts
        positions[:total] = np.arange(total) + np.repeat(first - start, counts)
        positions[total:] = -1
        own_tiles[: tiles.size] = tiles.ravel()
        with on(self._device):
            self._wide.copy_(wide, non_blocking=True)
            self._narrow.copy_(narrow, non_blocking=True)
            assert self._graph is not None
            self._graph.replay()

    @staticmethod
    def _parts(x: Tensor, *sizes: int) -> Sequence[Tensor]:
        """Of these sizes, and the rest."""
        return torch.split(x, [*sizes, len(x) - sum(sizes)])


class CapturedPasses:
    """The captured passes of one model, by their size and how far their rows reach."""

    def __init__(self, layers: int, device: torch.device) -> None:
        self._layers, self._device = layers, device
        self._used: Counter[tuple[int, Reach]] = Counter()
        self._passes: dict[tuple[int, Reach], CapturedPass | None] = {}
        self._pool: Any = None  # the memory of what passes compute: only one of them runs at a time
        self._free: torch.cuda.Event | None = None  # when the last one is over
        self._lock = Lock()

    def could_take(self, rows: Sequence[Row]) -> bool:
        """Whether a captured pass does all that is asked for: fill caches."""
        if not captured.capturing() or not all(map(_only_fills, rows)):
            return False
        size = size_of(rows)
        return size > 0 and len(rows) <= rows_of(size)

    def launch(
        self, rows: Sequence[Row], tables: np.ndarray[Any, Any], reach: Reach, run: Callable[[Inputs], None]
    ) -> bool:
        """Fill the rows' caches, whose memory is there. False: there is no such pass, or not yet.

        tables: as caches give them. run: launches a pass, kernel by kernel.
        """
        key = size, _ = size_of(rows), reach
        with self._lock:
            self._used[key] += 1
            if self._used[key] < USED:
                return False
            if key not in self._passes:
                self._passes[key] = self._made(size, reach, run)
            if (found := self._passes[key]) is None:
                return False
            tiles = as_tiles([(row.cache.seq_len, len(row.tokens)) for row in rows], reach.queries)
            with on(self._device):
                if self._free is not None:
                    self._free.wait()
                found.launch(rows, tables, tiles)
                self._free = torch.cuda.Event()  # type: ignore[no-untyped-call]
                self._free.record()
        return True

    def _made(self, size: int, reach: Reach, run: Callable[[Inputs], None]) -> CapturedPass | None:
        """None where there is no memory for it."""
        try:
            made = CapturedPass(size, rows_of(size), self._layers, reach, self._device)
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            made.capture(run, self._pool)
        except torch.OutOfMemoryError:
            return None
        return made


class SplitSteps:
    """Decode steps of a model that several processes have: captured with what these exchange.

    All are told the same rows, so all capture a step at the same time.
    """

    def __init__(self, layers: int, queries: int, device: torch.device, run: Callable[[Inputs], Tensor]) -> None:
        """run: launches a step, kernel by kernel, and returns its logits."""
        self._layers, self._queries, self._device, self._run = layers, queries, device, run
        self._steps: dict[tuple[int, int], CapturedPass] = {}
        self._pool: Any = None  # the memory of what steps compute: only one of them runs at a time

    def could_take(self, rows: Sequence[Row]) -> bool:
        single = all(not isinstance(row.tokens, Tensor) and len(row.tokens) == 1 for row in rows)
        return captured.capturing() and single and len(rows) <= MOST_ROWS

    def launch(self, rows: Sequence[Row], tables: np.ndarray[Any, Any], page: int) -> Tensor:
        """The logits [rows, V]. tables: as caches give them, whose memory is there."""
        size = next_power(len(rows))
        if (size, page) not in self._steps:
            made = CapturedPass(size, size, self._layers, Reach(self._queries, FAR, page), self._device)
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            made.capture(self._run, self._pool)
            self._steps[size, page] = made
        step = self._steps[size, page]
        step.launch(rows, tables, as_tiles([(row.cache.seq_len, 1) for row in rows], self._queries))
        assert step.output is not None
        return step.output[: len(rows)].clone()


def _only_fills(row: Row) -> bool:
    return (
        row.logits == NONE
        and isinstance(row.cache, PagedCache)
        and not isinstance(row.tokens, Tensor)
        and len(row.tokens) > 0
    )


def size_of(rows: Sequence[Row]) -> int:
    """Of the captured pass that takes so many tokens; 0: there is none."""
    total = sum(len(row.tokens) for row in rows)
    return next((size for size in PASSES if size >= total > FEW), 0)


def rows_of(size: int) -> int:
    """That a captured pass takes, at most."""
    return size // ROW
