"""Decode steps captured once and replayed: the model, and the choice of the next token.

What a step reads lies on the device: the tokens, their positions, where the caches are, how to sample. So one captured
step serves all prompts, lengths and settings, and the host launches steps ahead of the tokens it has read: the device
never waits for it. Steps launched past the end of a sequence are rolled back.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from infer.backend.gpu import precompile
from infer.backend.gpu.products import on
from infer.backend.gpu.sampling import MAX_VOCAB, DeviceSampler, GreedySampler
from infer.backend.gpu.step import Plan, begin, compile_ahead, counters, launch
from infer.backend.gpu.tuned import ROWS_COMPILED
from infer.cache.base import Cache
from infer.cache.table import empty_tables
from infer.config import ModelConfig
from infer.models.rows import record

AHEAD = 1  # steps launched beyond the one whose tokens are awaited; any ring can be truncated by both
_capturing = os.environ.get("INFER_GRAPHS") != "0"


@contextmanager
def disabled() -> Iterator[None]:
    """Within, steps launch their kernels one by one, as with INFER_GRAPHS=0: to debug, or to compare."""
    global _capturing
    before, _capturing = _capturing, False
    try:
        yield
    finally:
        _capturing = before


class CapturedStep:
    """One step of up to `rows` rows, on buffers of its own."""

    def __init__(self, config: ModelConfig, plan: Plan, device: torch.device, rows: int, samples: bool) -> None:
        """samples: by settings of each row; else all are greedy."""
        self.rows, self.samples, self.captured, self.busy = rows, samples, _capturing, False
        self.plan, self.device = plan, device
        self._free: torch.cuda.Event | None = None  # when the last run had no more to do with it
        self.tokens = torch.zeros(rows, dtype=torch.int64, device=device)  # to be fed; then, those chosen
        self.positions = torch.full((rows,), -1, dtype=torch.int32, device=device)  # of those to be fed; -1: none
        self.moves = torch.zeros(rows, dtype=torch.int32, device=device)  # by which each row's position goes on
        self.steps = torch.zeros(1, dtype=torch.int32, device=device)  # steps since the step was taken
        self.sent = torch.empty(AHEAD + 1, rows, dtype=torch.int64, pin_memory=True)  # tokens chosen, in turns
        self.tables = empty_tables(config.num_hidden_layers, rows, device)
        self.sampler = DeviceSampler(rows, config.vocab_size, device, plan.pdl) if samples else None
        self._choice = self.sampler or GreedySampler(rows, config.vocab_size, device, plan.pdl)
        self._split_counters = counters(plan, rows)
        self._graph: torch.cuda.CUDAGraph | None = None

    def capture(self) -> None:
        with on(self.device):
            self.run()  # loads the kernels; no row takes part yet
            if self.captured:
                self._graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                    self.run()

    def launch(self) -> None:
        if self._graph is None:
            self.run()
        else:
            self._graph.replay()

    def run(self) -> None:
        """Kernel by kernel."""
        # A row without a token, or whose logits were no numbers, goes along: what it computes is not read.
        fed = begin(self.plan, self.tokens, self.positions, self.moves, self.steps)
        logits = launch(self.plan, fed, self.tables, self._split_counters)
        self._choice.launch(logits, self.positions, self.tokens, self.sent, self.steps)

    def clear(self) -> None:
        """No row takes part."""
        if self._free is not None:
            self._free.wait()
        self.positions.fill_(-1)
        self.moves.zero_()
        self.steps.zero_()

    def load(self, slots: Sequence[int], rows: Sequence[DecodingRow], tables: np.ndarray[Any, Any]) -> None:
        """Let rows take part. tables: [layers, rows, COLUMNS], as caches give them."""
        at = torch.tensor(slots).to(self.device, non_blocking=True)
        fed = [[row.tokens[-1] for row in rows], [len(row.tokens) - 1 for row in rows]]
        tokens, positions = torch.tensor(fed).to(self.device, non_blocking=True)
        self.tokens[at] = tokens
        self.positions[at] = positions.int()
        self.moves[at] = 1
        self.tables[:, at] = torch.from_numpy(tables).to(self.device, non_blocking=True)
        if self.sampler is not None:
            for slot, row in zip(slots, rows, strict=True):
                self.sampler.set_row(slot, tokens=row.tokens, prompt_len=row.prompt_len, **row.settings)

    def drop(self, slot: int) -> None:
        self.positions[slot].fill_(-1)
        self.moves[slot].fill_(0)

    def give_back(self) -> None:
        self._free = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with suppress(RuntimeError):  # a GPU that has failed says so to whoever runs it next
            self._free.record()
        self.busy = False


class CapturedSteps:
    """The captured steps of one plan: one for each power of two of rows, and as many again where rows sample."""

    def __init__(
        self, config: ModelConfig, plan: Plan, device: torch.device, model: torch.nn.Module | None = None
    ) -> None:
        """model: known by the module that turns tokens into vectors."""
        self.config, self.plan, self.device, self.model = config, plan, device, model
        self.dtype = plan.head.norm.weight.dtype
        self.possible = config.vocab_size <= MAX_VOCAB
        self._steps: list[CapturedStep] = []
        self._lock = Lock()

    def take(self, rows: int, samples: bool) -> CapturedStep:
        """One that nobody runs at the moment."""
        with self._lock:
            for step in self._steps:
                if (step.rows, step.samples, step.captured, step.busy) == (rows, samples, _capturing, False):
                    break
            else:
                step = self._made(rows, samples)
                self._compile(step)
                step.capture()
                self._steps.append(step)
            step.busy = True
        return step

    def _made(self, rows: int, samples: bool) -> CapturedStep:
        return CapturedStep(self.config, self.plan, self.device, rows, samples)

    def _compile(self, step: CapturedStep) -> None:
        """What a step needs; and where that was not on disk, what steps of other rows and settings will."""

        def others() -> None:
            for rows in ROWS_COMPILED:
                # How a token is chosen does not depend on how many are.
                self._made(rows, rows == 1).run()

        if precompile.possible() and compile_ahead(self.device, step.run):
            print("compiling kernels for this GPU: seconds, once for each kind of model", file=sys.stderr, flush=True)
            with suppress(torch.OutOfMemoryError):
                compile_ahead(self.device, others)


class DecodingRow(NamedTuple):
    """A sequence whose last token is to be fed; its cache holds all others."""

    key: Hashable  # whatever the caller knows it by
    name: str  # for errors
    tokens: list[int]  # the caller's own: it appends what is chosen
    prompt_len: int
    cache: Cache
    left: int  # steps that it has tokens, and its cache room, for
    settings: Mapping[str, Any]  # of `DeviceSampler.set_row`
    greedy: bool  # whether these come to the likeliest token by the model's own logits


class _Slot:
    """A row in a captured step."""

    def __init__(self, row: DecodingRow) -> None:
        self.row, self.left, self.held = row, row.left, row.cache.seq_len
        self.ahead = 0  # steps launched whose tokens have not been read
        self.wanted = True  # whether its tokens are still asked for


class _Launched(NamedTuple):
    """A step on its way."""

    slots: Sequence[_Slot | None]  # those that take part
    tokens: Tensor  # pinned, [rows]
    done: torch.cuda.Event


class Decoding:
    """Rows on their way through captured steps. They come and go one by one while others go on."""

    def __init__(self, steps: CapturedSteps) -> None:
        self._steps = steps
        self._step: CapturedStep | None = None
        self._slots: list[_Slot | None] = []  # of the captured step
        self._waiting: list[_Slot] = []
        self._launched: deque[_Launched] = deque()
        self._count = 0

    def takes(self, cache: Cache) -> bool:
        """Whether kernels can write to such a cache."""
        return cache.table(self._steps.config, self._steps.dtype, 1) is not None

    def add(self, *row: Any) -> None:
        """The fields of a `DecodingRow`."""
        self._waiting.append(_Slot(DecodingRow(*row)))

    def end(self, key: Hashable) -> None:
        """No more tokens are asked for in this row."""
        for i, slot in enumerate(self._slots):
            if slot is not None and slot.row.key == key:
                self._drop(i)
        self._waiting = [slot for slot in self._waiting if slot.row.key != key]

    def step(self) -> dict[Hashable, int]:
        """The tokens that the step launched longest ago has chosen, by row: -1 where none could be."""
        if self.arrange():
            while len(self._launched) <= AHEAD and self._drop_full():
                self._reserve()
                self._launch()
        if not self._launched:
            return {}
        self._wait(self._launched[0].done)
        slots, tokens, _ = self._launched.popleft()
        chosen, found = tokens.tolist(), {}
        for i, slot in enumerate(slots):
            if slot is not None and slot.wanted:
                slot.row.cache.advance(1)
                record(slot.row.cache, slot.held, slot.row.tokens[slot.held : slot.held + 1], self._steps.model)
                slot.held += 1
                slot.ahead -= 1
                found[slot.row.key] = chosen[i]
        return found

    def close(self) -> None:
        """Give the step back when what was launched is through, and roll back what that wrote beyond the tokens."""
        if self._step is None:
            return
        try:
            if self._launched:
                with suppress(RuntimeError):  # the first error that a GPU ends with is the one to be told
                    self._launched[-1].done.synchronize()
            steps = [slot for launched in self._launched for slot in launched.slots if slot is not None and slot.wanted]
            for slot in dict.fromkeys(steps):
                self._roll_back(slot, steps.count(slot))
        finally:
            self._launched.clear()
            self._step.give_back()
            self._step, self._slots = None, []

    def arrange(self) -> bool:
        """Bring in the rows that wait. Whether steps may be launched: not while others end before a change of step."""
        active = [slot for slot in self._slots if slot is not None]
        count = len(active) + len(self._waiting)
        if not count:
            return False
        samples = any(not slot.row.greedy for slot in (*active, *self._waiting))
        rows = 1 << (count - 1).bit_length()
        step = self._step
        if step is None or rows > step.rows or rows <= step.rows // 2 or (samples and not step.samples):
            if self._launched:
                return False
            if step is not None:
                step.give_back()
                self._step = None
            step = self._steps.take(rows, samples)
            self._step, self._slots, self._count = step, [None] * rows, 0
            self._waiting = [*active, *self._waiting]
            with on(self._steps.device):
                step.clear()
        if self._waiting:
            self._load(step, self._waiting)
            self._waiting = []
        return True

    def _load(self, step: CapturedStep, coming: Sequence[_Slot]) -> None:
        free = [i for i, slot in enumerate(self._slots) if slot is None][: len(coming)]
        config, dtype = self._steps.config, self._steps.dtype
        tables = np.concatenate([slot.row.cache.table(config, dtype, 1) for slot in coming], 1)
        with on(self._steps.device):
            step.load(free, [slot.row for slot in coming], tables)
        for i, slot in zip(free, coming, strict=True):
            self._slots[i] = slot

    def _drop_full(self) -> bool:
        """Leave out rows that have no token left to feed; whether any row is left."""
        for i, slot in enumerate(self._slots):
            if slot is not None and not slot.left:
                self._leave_out(i)
        return any(slot is not None for slot in self._slots)

    def _drop(self, i: int) -> None:
        slot = self._slots[i]
        if slot is not None:
            slot.wanted = False
            self._roll_back(slot, sum(slot in launched.slots for launched in self._launched))
            self._leave_out(i)

    def _leave_out(self, i: int) -> None:
        self._slots[i] = None
        if self._step is not None:
            with on(self._steps.device):
                self._step.drop(i)

    def _reserve(self) -> None:
        """Memory for the position that each row writes next: a cache of pages takes it as it grows."""
        with on(self._steps.device):
            for slot in self._slots:
                if slot is not None:
                    try:
                        slot.row.cache.reserve(slot.ahead + 1)
                    except ValueError as error:
                        raise type(error)(f"{slot.row.name}: {error}") from None

    def _launch(self) -> None:
        step = self._step
        assert step is not None
        for slot in self._slots:
            if slot is not None:
                slot.left -= 1
                slot.ahead += 1
        self._count += 1
        tokens = step.sent[self._count % len(step.sent)]
        with on(self._steps.device):
            step.launch()
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()
        self._launched.append(_Launched([*self._slots], tokens, done))

    def _roll_back(self, slot: _Slot, steps: int) -> None:
        """What steps have stored beyond the tokens that were asked for; unless the cache is in other hands by now."""
        cache = slot.row.cache
        if cache.seq_len == slot.held:
            cache.advance(steps)
            cache.truncate(slot.held)

    def _wait(self, done: torch.cuda.Event) -> None:
        try:
            done.synchronize()
        except RuntimeError as error:
            slots = [slot for slot in self._slots if slot is not None and slot.wanted]
            at = ", ".join(f"{slot.row.name} at position {slot.row.cache.seq_len}" for slot in slots)
            raise RuntimeError(f"the GPU failed while it decoded {at}: {error}") from error
