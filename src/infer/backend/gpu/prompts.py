"""Prefill passes, captured once and replayed like decode steps: all inputs are on the device.

A pass is hundreds of launches, each tens of microseconds of Python: more than a GPU takes for a short prompt. So passes
have one of a few sizes, and shorter ones are padded. The prompts' tokens only fill caches; after them, a pass can have
the rows of a captured step, so that both share one read of the weights. A pass that returns logits of prompts is
launched kernel by kernel.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any, NamedTuple
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor

from infer.backend.gpu import captured
from infer.backend.gpu.attention import Tiles, as_tiles
from infer.backend.gpu.launcher import next_power, on
from infer.backend.gpu.tuned import PASSES
from infer.cache.paged import PagedCache
from infer.cache.table import COLUMNS
from infer.models.rows import NONE, Row

TOKENS_PER_ROW = 32  # the least average of a captured pass
MAX_ROWS = 256  # of a captured step
UNBOUNDED = 2**30  # more than any position
MIN_USES = 2  # a pass is captured the second time that its size is used
MIN_STEPS = 8  # a step that returns logits, the eighth time
MAX_PASSES = 16  # captured alone, and beside each step; those used last are kept


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
    """A pass of up to `size` tokens of prompts and `max_rows` rows, with its input buffers."""

    def __init__(self, size: int, max_rows: int, layers: int, shape: PassShape, device: torch.device) -> None:
        self._device = device
        max_tiles = -(-size // shape.queries) + 2 * max_rows
        self._aligned = -(-size // 4) * 4  # the parts of the buffers start at multiples of 16 bytes
        self._int64_inputs = torch.zeros(self._aligned + layers * max_rows * COLUMNS, dtype=torch.int64, device=device)
        self._int32_inputs = torch.zeros(2 * self._aligned + 5 * max_tiles, dtype=torch.int32, device=device)
        ids, tables = self._split(self._int64_inputs, 1)
        positions, rows, tiles = self._split(self._int32_inputs, 2)
        by_tile = Tiles(rows[:size], tiles.view(max_tiles, 5), shape.end, shape.queries, shape.page)
        self.inputs = Inputs(ids[:size], positions[:size], tables.view(layers, max_rows, COLUMNS), by_tile)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._run: Callable[[Inputs], Tensor | None] | None = None  # instead of a graph
        self.output: Tensor | None = None  # of the last launch, as `run` returns it

    def capture(
        self, run: Callable[[Inputs], Tensor | None], pool: Any, warm_up: Callable[[Inputs], Any] | None = None
    ) -> None:
        """warm_up: launches the same kernels and changes nothing; None: `run` without a token does so."""

        def keep_output() -> None:
            self.output = run(self.inputs)

        if not captured.capturing():
            self._run = run
            return
        self.inputs.positions.fill_(-1)
        with on(self._device):
            (warm_up or run)(self.inputs)  # loads the kernels, which a capture cannot
            self._graph = captured.record_graph(keep_output, pool)

    def launch(self, rows: Sequence[Row], tables: np.ndarray[Any, Any], tiles: np.ndarray[Any, Any]) -> None:
        """tables: [layers, rows, COLUMNS]. tiles: [tiles, 5]."""
        counts = [len(row.tokens) for row in rows]
        first, total = [row.cache.seq_len for row in rows], sum(counts)
        # Pinned, so that the copy is asynchronous; torch reuses it when the device has read it.
        buffers = self._int64_inputs, self._int32_inputs
        int64_inputs, int32_inputs = (torch.zeros(x.shape, dtype=x.dtype, pin_memory=x.is_cuda) for x in buffers)
        ids, row_tables = (x.numpy() for x in self._split(int64_inputs, 1))
        positions, token_rows, row_tiles = (x.numpy() for x in self._split(int32_inputs, 2))
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
            if self._graph is not None:
                self._graph.replay()
            elif self._run is not None:
                self.output = self._run(self.inputs)

    def _split(self, x: Tensor, by_token: int) -> Sequence[Tensor]:
        """Split a buffer into parts with an element for each token, so many, and the rest."""
        return torch.split(x, [self._aligned] * by_token + [len(x) - by_token * self._aligned])


# By size and shape, in the order of their last uses. None: there was not enough memory for it.
Passes = dict[tuple[int, PassShape], CapturedPass | None]


class CapturedPasses:
    """The captured prefill passes of one model, by size and shape: alone, or beside a captured step."""

    def __init__(self, layers: int, device: torch.device) -> None:
        self._layers, self._device = layers, device
        self._uses: Counter[Any] = Counter()
        self._passes = Passes()  # those alone; a captured step has those beside it
        self._pool: Any = None  # their activations share one pool: only one pass runs at a time
        self._captured = WeakSet[CapturedPass]()  # the pool is gone with the last of them
        self._done: torch.cuda.Event | None = None  # recorded after the last launch
        self._lock = Lock()

    def supports(self, rows: Sequence[Row], beside: int = 0) -> bool:
        """Whether a captured pass can run these rows. beside: rows of a captured step in the same pass."""
        if not (captured.capturing() or beside) or not all(map(_only_fills_cache, rows)):
            return False
        size = size_of(rows, beside) - beside
        return size > 0 and len(rows) <= rows_of(size)

    def launch(
        self,
        rows: Sequence[Row],
        tables: np.ndarray[Any, Any],
        shape: PassShape,
        run: Callable[[Inputs], Tensor | None],
        step: captured.CapturedStep | None = None,
        warm_up: Callable[[Inputs], Any] | None = None,
    ) -> bool:
        """Fill the rows' caches, whose memory is reserved. False: no pass of this size and shape is captured.

        tables: from the caches. run: launches a pass, kernel by kernel; with a step, its rows too, and returns their
        logits. warm_up: see `capture`.
        """
        beside, passes = (0, self._passes) if step is None else (step.rows, step.passes)
        key = size, _ = size_of(rows, beside), shape
        with self._lock:
            self._uses[beside, *key] += 1
            if self._uses[beside, *key] < MIN_USES and captured.capturing():
                return False
            found = key in passes
            captured_pass = passes.pop(key) if found else self._capture(size - beside, shape, run, warm_up)
            passes[key] = captured_pass  # the last one now
            if len(passes) > MAX_PASSES:
                oldest = next(iter(passes))
                del passes[oldest], self._uses[beside, *oldest]
            if captured_pass is None:
                return False
            tiles = as_tiles([(row.cache.seq_len, len(row.tokens)) for row in rows], shape.queries)
            with on(self._device):
                if self._done is not None:
                    self._done.wait()
                captured_pass.launch(rows, tables, tiles)
                if captured.capturing():
                    self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
                    self._done.record()
        return True

    def _capture(
        self,
        size: int,
        shape: PassShape,
        run: Callable[[Inputs], Tensor | None],
        warm_up: Callable[[Inputs], Any] | None,
    ) -> CapturedPass | None:
        """Capture a pass; None if out of memory."""
        try:
            captured_pass = CapturedPass(size, rows_of(size), self._layers, shape, self._device)
            if captured.capturing() and not self._captured:
                self._pool = torch.cuda.graph_pool_handle()
            captured_pass.capture(run, self._pool, warm_up)
        except torch.OutOfMemoryError:
            return None
        self._captured.add(captured_pass)
        return captured_pass


class LogitSteps:
    """Passes of one token per row that return logits, captured; with the collectives of a tensor-parallel model.

    For tokens that the host chooses: with a grammar, or those of a draft model.
    """

    def __init__(
        self, layers: int, queries: int, device: torch.device, run: Callable[[Inputs], Tensor], min_uses: int
    ) -> None:
        """run: launches a step, kernel by kernel, and returns its logits. min_uses: of its size, before it is captured.

        The ranks of a tensor-parallel model run the same rows, so all capture a step at the same time.
        """
        self._layers, self._queries, self._device, self._run = layers, queries, device, run
        self._steps: dict[tuple[int, int], CapturedPass | None] = {}  # None: there was not enough memory for it
        self._min_uses, self._uses = min_uses, Counter[tuple[int, int]]()
        self._pool: Any = None  # their activations share one pool: only one step runs at a time
        self._done: torch.cuda.Event | None = None  # recorded after the last launch
        self._lock = Lock()

    def supports(self, rows: Sequence[Row]) -> bool:
        single = all(not isinstance(row.tokens, Tensor) and len(row.tokens) == 1 for row in rows)
        return captured.capturing() and single and len(rows) <= MAX_ROWS

    def launch(self, rows: Sequence[Row], tables: np.ndarray[Any, Any], page: int) -> Tensor | None:
        """The logits [rows, V]; None: no step of this size is captured yet. tables: of caches with reserved memory."""
        key = next_power(len(rows)), page
        with self._lock, on(self._device):
            self._uses[key] += 1
            if self._uses[key] < self._min_uses:
                return None
            if self._done is not None:
                self._done.wait()
            if key not in self._steps:
                self._steps[key] = self._capture(*key)
            if (step := self._steps[key]) is None:
                return None
            step.launch(rows, tables, as_tiles([(row.cache.seq_len, 1) for row in rows], self._queries))
            assert step.output is not None
            logits = step.output[: len(rows)].clone()
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record()
        return logits

    def _capture(self, size: int, page: int) -> CapturedPass | None:
        if not any(self._steps.values()):
            self._pool = torch.cuda.graph_pool_handle()
        try:
            step = CapturedPass(size, size, self._layers, PassShape(self._queries, UNBOUNDED, page), self._device)
            step.capture(self._run, self._pool)
        except torch.OutOfMemoryError:
            if self._min_uses == 1:  # other ranks may have captured it
                raise
            return None
        return step


def _only_fills_cache(row: Row) -> bool:
    return (
        row.logits == NONE
        and isinstance(row.cache, PagedCache)
        and not isinstance(row.tokens, Tensor)
        and len(row.tokens) > 0
    )


def size_of(rows: Sequence[Row], beside: int = 0) -> int:
    """The size of the smallest captured pass for these rows, and so many beside them; 0: there is none."""
    total = sum(len(row.tokens) for row in rows) + beside
    return next((size for size in PASSES if size >= total), 0)


def rows_of(size: int) -> int:
    """The maximum number of rows of a captured pass, without those of a step."""
    return max(1, size // TOKENS_PER_ROW)
