"""Prefill passes, captured once and replayed like decode steps: all inputs are on the device.

A pass is hundreds of launches, each tens of microseconds of Python: more than a GPU takes for a short prompt. So passes
have one of a few sizes, and shorter ones are padded. They only fill caches: a pass that returns logits is launched
kernel by kernel.
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
from infer.backend.gpu.launcher import next_power, on
from infer.backend.gpu.tuned import PASSES, SMALL_ROWS
from infer.cache.paged import PagedCache
from infer.cache.table import COLUMNS
from infer.models.rows import NONE, Row

TOKENS_PER_ROW = 32  # the least average of a captured pass
MAX_ROWS = 256  # of a captured step
UNBOUNDED = 2**30  # more than any position
MIN_USES = 2  # a pass is captured the second time that its size is used


class Inputs(NamedTuple):
    """The inputs of a pass, on the device."""

    ids: Tensor  # int64 [T]
    positions: Tensor  # int32 [T]; -1: no token
    tables: Tensor  # int64 [layers, R, COLUMNS]
    tiles: Tiles


class PassShape(NamedTuple):
    """What attention of a captured pass depends on, besides its size."""

    queries: int  # per tile
    end: int  # an upper bound of all positions
    page: int  # positions per page; 0: no pages


class CapturedPass:
    """A pass of up to `size` tokens and `max_rows` rows, with its input buffers."""

    def __init__(self, size: int, max_rows: int, layers: int, shape: PassShape, device: torch.device) -> None:
        self._device = device
        max_tiles = -(-size // shape.queries) + 2 * max_rows
        self._int64_inputs = torch.zeros(size + layers * max_rows * COLUMNS, dtype=torch.int64, device=device)
        self._int32_inputs = torch.zeros(2 * size + 5 * max_tiles, dtype=torch.int32, device=device)
        ids, tables = self._split(self._int64_inputs, size)
        positions, rows, tiles = self._split(self._int32_inputs, size, size)
        by_tile = Tiles(rows, tiles.view(max_tiles, 5), shape.end, shape.queries, shape.page)
        self.inputs = Inputs(ids, positions, tables.view(layers, max_rows, COLUMNS), by_tile)
        self._graph: torch.cuda.CUDAGraph | None = None
        self.output: Tensor | None = None  # of the last launch, as `run` returns it

    def capture(self, run: Callable[[Inputs], Tensor | None], pool: Any) -> None:
        def keep_output() -> None:
            self.output = run(self.inputs)

        self.inputs.positions.fill_(-1)
        with on(self._device):
            run(self.inputs)  # loads the kernels, which a capture cannot
            self._graph = captured.record_graph(keep_output, pool)

    def launch(self, rows: Sequence[Row], tables: np.ndarray[Any, Any], tiles: np.ndarray[Any, Any]) -> None:
        """tables: [layers, rows, COLUMNS]. tiles: [tiles, 5]."""
        counts = [len(row.tokens) for row in rows]
        first, total, size = [row.cache.seq_len for row in rows], sum(counts), len(self.inputs.ids)
        # Pinned, so that the copy is asynchronous; torch reuses it when the device has read it.
        buffers = self._int64_inputs, self._int32_inputs
        int64_inputs, int32_inputs = (torch.zeros(x.shape, dtype=x.dtype, pin_memory=x.is_cuda) for x in buffers)
        ids, row_tables = (x.numpy() for x in self._split(int64_inputs, size))
        positions, token_rows, row_tiles = (x.numpy() for x in self._split(int32_inputs, size, size))
        ids[:total] = [token for row in rows for token in row.tokens]
        row_tables.reshape(self.inputs.tables.shape)[:, : len(rows)] = tables
        token_rows[:total] = np.repeat(np.arange(len(rows)), counts)
        start = np.cumsum(counts) - counts
        positions[:total] = np.arange(total) + np.repeat(first - start, counts)
        positions[total:] = -1
        row_tiles[: tiles.size] = tiles.ravel()
        with on(self._device):
            self._int64_inputs.copy_(int64_inputs, non_blocking=True)
            self._int32_inputs.copy_(int32_inputs, non_blocking=True)
            assert self._graph is not None
            self._graph.replay()

    @staticmethod
    def _split(x: Tensor, *sizes: int) -> Sequence[Tensor]:
        """Split into parts of these sizes, and the rest."""
        return torch.split(x, [*sizes, len(x) - sum(sizes)])


class CapturedPasses:
    """The captured prefill passes of one model, by size and shape."""

    def __init__(self, layers: int, device: torch.device) -> None:
        self._layers, self._device = layers, device
        self._uses: Counter[tuple[int, PassShape]] = Counter()
        self._passes: dict[tuple[int, PassShape], CapturedPass | None] = {}
        self._pool: Any = None  # their activations share one pool: only one pass runs at a time
        self._done: torch.cuda.Event | None = None  # recorded after the last launch
        self._lock = Lock()

    def supports(self, rows: Sequence[Row]) -> bool:
        """Whether a captured pass can run these rows."""
        if not captured.capturing() or not all(map(_only_fills_cache, rows)):
            return False
        size = size_of(rows)
        return size > 0 and len(rows) <= rows_of(size)

    def launch(
        self, rows: Sequence[Row], tables: np.ndarray[Any, Any], shape: PassShape, run: Callable[[Inputs], None]
    ) -> bool:
        """Fill the rows' caches, whose memory is reserved. False: no pass of this size and shape is captured.

        tables: from the caches. run: launches a pass, kernel by kernel.
        """
        key = size, _ = size_of(rows), shape
        with self._lock:
            self._uses[key] += 1
            if self._uses[key] < MIN_USES:
                return False
            if key not in self._passes:
                self._passes[key] = self._capture(size, shape, run)
            if (captured_pass := self._passes[key]) is None:
                return False
            tiles = as_tiles([(row.cache.seq_len, len(row.tokens)) for row in rows], shape.queries)
            with on(self._device):
                if self._done is not None:
                    self._done.wait()
                captured_pass.launch(rows, tables, tiles)
                self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
                self._done.record()
        return True

    def _capture(self, size: int, shape: PassShape, run: Callable[[Inputs], None]) -> CapturedPass | None:
        """Capture a pass; None if out of memory."""
        try:
            captured_pass = CapturedPass(size, rows_of(size), self._layers, shape, self._device)
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            captured_pass.capture(run, self._pool)
        except torch.OutOfMemoryError:
            return None
        return captured_pass


class ShardedSteps:
    """Decode steps of a tensor-parallel model, captured with their collectives.

    All ranks run the same rows, so all capture a step at the same time.
    """

    def __init__(self, layers: int, queries: int, device: torch.device, run: Callable[[Inputs], Tensor]) -> None:
        """run: launches a step, kernel by kernel, and returns its logits."""
        self._layers, self._queries, self._device, self._run = layers, queries, device, run
        self._steps: dict[tuple[int, int], CapturedPass] = {}
        self._pool: Any = None  # their activations share one pool: only one step runs at a time

    def supports(self, rows: Sequence[Row]) -> bool:
        single = all(not isinstance(row.tokens, Tensor) and len(row.tokens) == 1 for row in rows)
        return captured.capturing() and single and len(rows) <= MAX_ROWS

    def launch(self, rows: Sequence[Row], tables: np.ndarray[Any, Any], page: int) -> Tensor:
        """The logits [rows, V]. tables: from the caches, whose memory is reserved."""
        size = next_power(len(rows))
        if (size, page) not in self._steps:
            shape = PassShape(self._queries, UNBOUNDED, page)
            step = CapturedPass(size, size, self._layers, shape, self._device)
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            step.capture(self._run, self._pool)
            self._steps[size, page] = step
        step = self._steps[size, page]
        step.launch(rows, tables, as_tiles([(row.cache.seq_len, 1) for row in rows], self._queries))
        assert step.output is not None
        return step.output[: len(rows)].clone()


def _only_fills_cache(row: Row) -> bool:
    return (
        row.logits == NONE
        and isinstance(row.cache, PagedCache)
        and not isinstance(row.tokens, Tensor)
        and len(row.tokens) > 0
    )


def size_of(rows: Sequence[Row]) -> int:
    """The size of the smallest captured pass for these rows; 0: there is none."""
    total = sum(len(row.tokens) for row in rows)
    return next((size for size in PASSES if size >= total > SMALL_ROWS), 0)


def rows_of(size: int) -> int:
    """The maximum number of rows of a captured pass."""
    return size // TOKENS_PER_ROW
