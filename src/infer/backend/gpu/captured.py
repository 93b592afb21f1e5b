"""Decode steps captured once and replayed: the model, and the choice of the next token.

What a step reads lies on the device: the tokens, their positions, where the caches are, how to sample. So one captured
step serves all prompts, lengths and settings, and the host launches steps ahead of the tokens it has read: the device
never waits for it. Steps launched past the end of a sequence are rolled back.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from infer import progress
from infer.backend import AHEAD
from infer.backend.gpu import precompile
from infer.backend.gpu.likelihoods import likelihoods
from infer.backend.gpu.products import on
from infer.backend.gpu.sampling import MANY, MAX_VOCAB, DeviceSampler, GreedySampler
from infer.backend.gpu.step import Plan, begin, compile_ahead, counters, launch
from infer.backend.gpu.tuned import ROWS_COMPILED
from infer.cache.base import Cache
from infer.cache.table import empty_tables
from infer.config import ModelConfig
from infer.machine import to_device
from infer.models.rows import record

SMALL = 8  # rows up to which empty ones cost a step nothing
_capturing = os.environ.get("INFER_GRAPHS") != "0"


def capturing() -> bool:
    """Whether kernels are captured, to be launched together."""
    return _capturing


@contextmanager
def disabled() -> Iterator[None]:
    """Within, steps launch their kernels one by one, as with INFER_GRAPHS=0: to debug, or to compare."""
    global _capturing
    before, _capturing = _capturing, False
    try:
        yield
    finally:
        _capturing = before


_recording = Lock()  # torch records one graph at a time in a process


def record_graph(run: Callable[[], None], pool: Any = None) -> torch.cuda.CUDAGraph:
    """What `run` launches, to be replayed. pool: the memory for what it computes; None: its own."""
    graph = torch.cuda.CUDAGraph()
    with _recording, torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        run()
    return graph


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
        self.logits: Tensor | None = None  # [rows, V], of the last step
        self.tables = empty_tables(config.num_hidden_layers, rows, device)
        self.sampler = DeviceSampler(rows, config.vocab_size, device, plan.pdl) if samples else None
        self._choice = self.sampler or GreedySampler(rows, config.vocab_size, device, plan.pdl)
        self._split_counters = counters(plan, rows)
        self._graph: torch.cuda.CUDAGraph | None = None

    def capture(self) -> None:
        with on(self.device):
            self.run()  # loads the kernels; no row takes part yet
            if self.captured:
                self._graph = record_graph(self.run)

    def launch(self) -> None:
        if self._graph is None:
            self.run()
        else:
            self._graph.replay()

    def run(self) -> None:
        """Kernel by kernel."""
        # A row without a token, or whose logits were no numbers, goes along: what it computes is not read.
        fed = begin(self.plan, self.tokens, self.positions, self.moves, self.steps)
        self.logits = launch(self.plan, fed, self.tables, self._split_counters)
        self._choice.launch(self.logits, self.positions, self.tokens, self.sent, self.steps)

    def likelihoods(self, places: Sequence[int], top: int) -> Tensor:
        """Of rows of the last step, what log-probabilities are made of, in pinned memory: valid once that is over."""
        assert self.logits is not None
        at = to_device(torch.tensor(places), self.device)
        found = likelihoods(self.logits[at], self.tokens[at], min(top, self.logits.shape[1]))
        return torch.empty(*found.shape, dtype=found.dtype, pin_memory=True).copy_(found, non_blocking=True)

    def clear(self) -> None:
        """No row takes part."""
        if self._free is not None:
            self._free.wait()
        self.positions.fill_(-1)
        self.moves.zero_()
        self.steps.zero_()

    def load(self, slots: Sequence[int], rows: Sequence[DecodingRow], tables: np.ndarray[Any, Any]) -> None:
        """Let rows take part. tables: [layers, rows, COLUMNS], as caches give them."""
        fed = [[*slots], [row.tokens[-1] for row in rows], [len(row.tokens) - 1 for row in rows]]
        at, tokens, positions = to_device(torch.tensor(fed), self.device)
        self.tokens[at] = tokens
        self.positions[at] = positions.int()
        self.moves.index_fill_(0, at, 1)  # where `[at] = 1` would wait for all launches
        self.tables[:, at] = to_device(torch.from_numpy(tables), self.device)
        if self.sampler is not None:
            self.sampler.set_rows(slots, [row.settings | row.so_far for row in rows])

    def take_over(
        self, other: CapturedStep, slots: Sequence[int], theirs: Sequence[int], rows: Sequence[DecodingRow]
    ) -> None:
        """Let rows of another step go on here, from wherever its last launch brings them. theirs: slots there."""
        at, of = to_device(torch.tensor([[*slots], [*theirs]]), self.device)
        for own, their in ((self.tokens, other.tokens), (self.positions, other.positions), (self.moves, other.moves)):
            own[at] = their[of]
        self.tables[:, at] = other.tables[:, of]
        if self.sampler is not None and other.sampler is not None:
            self.sampler.take_over(other.sampler, slots, theirs)
        elif self.sampler is not None:
            self.sampler.set_rows(slots, [row.settings | row.so_far for row in rows])

    def drop(self, slot: int) -> None:
        self.positions[slot].fill_(-1)
        self.moves[slot].fill_(0)

    def give_back(self) -> None:
        self._free = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with suppress(RuntimeError), on(self.device):  # a GPU that has failed says so to whoever runs it next
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
                try:
                    step = self._ready(rows, samples)
                except torch.OutOfMemoryError:  # steps that nobody runs go
                    self._steps = [step for step in self._steps if step.busy]
                    torch.cuda.empty_cache()
                    step = self._ready(rows, samples)
                self._steps.append(step)
            step.busy = True
        return step

    def _ready(self, rows: int, samples: bool) -> CapturedStep:
        step = self._made(rows, samples)
        self._compile(step)
        step.capture()
        return step

    def _made(self, rows: int, samples: bool) -> CapturedStep:
        return CapturedStep(self.config, self.plan, self.device, rows, samples)

    def _compile(self, step: CapturedStep) -> None:
        """What a step needs; and where that was not on disk, what steps of other rows and settings will."""

        def others() -> None:
            for rows in ROWS_COMPILED:
                self._made(rows, rows in (1, MANY)).run()  # tokens are chosen one way or another

        if precompile.possible() and compile_ahead(self.device, step.run):
            if not progress.is_heard():
                print(
                    "compiling kernels for this GPU: seconds, once for each kind of model", file=sys.stderr, flush=True
                )
            with suppress(torch.OutOfMemoryError), progress.compiling("for this GPU"):
                compile_ahead(self.device, others)


class DecodingRow(NamedTuple):
    """A sequence whose last token is to be fed; its cache holds all others."""

    key: Hashable  # whatever the caller knows it by
    name: str  # for errors
    tokens: list[int]  # the caller's own: it appends what is chosen
    prompt_len: int
    cache: Cache
    left: int  # steps that it has tokens, and its cache room, for
    settings: dict[str, Any]  # of `DeviceSampler.set_rows`
    greedy: bool  # whether these come to the likeliest token by the model's own logits
    logprobs: int | None = None  # of how many of the likeliest tokens; None: of none, and not of the token either

    @property
    def so_far(self) -> dict[str, Any]:
        return {"tokens": self.tokens, "prompt_len": self.prompt_len}


class _Slot:
    """A row in a captured step."""

    def __init__(self, row: DecodingRow, launches: int) -> None:
        self.row, self.first = row, row.cache.seq_len
        self.place = -1  # in the captured step; -1: none
        self.since = launches  # before it came
        self.until = launches + row.left  # by then it has no token left to feed
        self.room = launches  # by then its cache has no memory for the next position
        self.settled = 0  # tokens read that its cache knows of
        self.wanted = True  # whether its tokens are still asked for


class _Launched(NamedTuple):
    """A step on its way."""

    slots: Sequence[tuple[_Slot, int]]  # those that take part, and their places
    tokens: Tensor  # pinned, [rows]
    done: torch.cuda.Event
    scored: Sequence[_Slot] = ()  # those whose log-probabilities are asked for
    numbers: Tensor | None = None  # what these are made of: pinned, a line for each


class Decoding:
    """Rows on their way through captured steps. They come and go one by one while others go on."""

    def __init__(self, steps: CapturedSteps, lazy: bool = False) -> None:
        """lazy: caches hear of their tokens when `settle` is called, or their row leaves; nobody else uses them."""
        self._steps, self._lazy = steps, lazy
        self._step: CapturedStep | None = None
        self._free: list[int] = []  # places in the captured step
        self._slots: dict[Hashable, _Slot] = {}  # by key: all that have not ended
        self._active: tuple[tuple[_Slot, int], ...] = ()  # those in the captured step, and their places
        self._changed = False  # whether these are others by now
        self._scored: Sequence[_Slot] = ()  # of them, whose log-probabilities are asked for
        self._top = 0  # of how many of the likeliest tokens, at most
        self._waiting: list[_Slot] = []
        self._launched: deque[_Launched] = deque()
        self._left: deque[tuple[CapturedStep, int]] = deque()  # steps that rows have left, and launches by then
        self._launches = self._reads = 0  # steps launched, and read
        self._until = self._room = 0  # the next launch at which a row has no token left, or no memory
        self._count = 0  # launches of the captured step

    def takes(self, cache: Cache) -> bool:
        """Whether kernels can write to such a cache."""
        return cache.table(self._steps.config, self._steps.dtype, 1) is not None

    def add(self, *row: Any) -> None:
        """The fields of a `DecodingRow`."""
        slot = _Slot(DecodingRow(*row), self._launches)
        self._slots[slot.row.key] = slot
        self._waiting.append(slot)

    def end(self, key: Hashable) -> None:
        """No more tokens are asked for in this row."""
        slot = self._slots.pop(key, None)
        if slot is None:
            return
        slot.wanted = False
        self._roll_back(slot)
        if slot.place >= 0:
            self._leave_out(slot)
        else:
            self._waiting = [other for other in self._waiting if other is not slot]

    def settle(self, key: Hashable) -> None:
        """Let a row's cache know of the tokens that were read."""
        if key in self._slots:
            self._settle(self._slots[key])

    def step(self) -> tuple[dict[Hashable, int], dict[Hashable, list[int]]]:
        """The tokens that the step launched longest ago has chosen, by row: -1 where none could be.

        And what log-probabilities are made of, of rows that ask for them.
        """
        if self.arrange():
            while len(self._launched) <= AHEAD and self._drop_full():
                self._reserve()
                self._launch()
        if not self._launched:
            return {}, {}
        self._wait(self._launched[0].done)
        slots, tokens, _, scored, numbers = self._launched.popleft()
        self._reads += 1
        chosen = tokens.tolist()
        while self._left and self._left[0][1] <= self._reads:
            self._left.popleft()[0].give_back()
        if not self._lazy:
            for slot, _ in slots:
                if slot.wanted:
                    self._settle(slot)
        found = {}
        if numbers is not None:
            found = {slot.row.key: line for slot, line in zip(scored, numbers.tolist(), strict=True) if slot.wanted}
        return {slot.row.key: chosen[place] for slot, place in slots if slot.wanted}, found

    def close(self) -> None:
        """Give the step back when what was launched is through, and roll back what that wrote beyond the tokens."""
        if self._step is None:
            return
        try:
            if self._launched:
                with suppress(RuntimeError):  # the first error that a GPU ends with is the one to be told
                    self._launched[-1].done.synchronize()
            for slot in self._slots.values():
                self._roll_back(slot)
        finally:
            self._launched.clear()
            for step in (self._step, *(step for step, _ in self._left)):
                step.give_back()
            self._left.clear()
            self._step, self._active, self._waiting = None, (), []
            self._slots.clear()

    def arrange(self) -> bool:
        """Bring in the rows that wait, and change to a step of another size where these are too many or too few.

        Whether there is any row.
        """
        step, taken = self._step, 0 if self._step is None else self._step.rows - len(self._free)
        if step is not None and not self._waiting and taken > step.rows // 2:
            return True
        active = self._taking_part()
        count = len(active) + len(self._waiting)
        if not count:
            return False
        samples = any(not slot.row.greedy for slot in (*(slot for slot, _ in active), *self._waiting))
        if step is None or not self._suits(step, count) or (samples and not step.samples):
            step = self._change(1 << (count - 1).bit_length(), samples, active)
        if self._waiting:
            self._load(step, self._waiting)
            self._waiting = []
        return True

    def _suits(self, step: CapturedStep, rows: int) -> bool:
        """A large step is kept a little longer than it has to be: rows may come again."""
        fewest = step.rows // 2 if step.rows <= SMALL else step.rows * 3 // 8
        return fewest < rows <= step.rows

    def _change(self, rows: int, samples: bool, active: Sequence[tuple[_Slot, int]]) -> CapturedStep:
        """To another step. It continues, on the device, where the last launch of this one ends."""
        before, step = self._step, self._steps.take(rows, samples)
        if before is not None:
            self._left.append((before, self._launches))  # what it has chosen is yet to be read
        self._step, self._free, self._count = step, [*range(rows - 1, -1, -1)], 0
        with on(self._steps.device):
            step.clear()
            if before is not None and active:
                for slot, _ in active:
                    slot.place = self._free.pop()
                places = [slot.place for slot, _ in active]
                step.take_over(before, places, [place for _, place in active], [slot.row for slot, _ in active])
        self._active, self._changed = tuple((slot, slot.place) for slot, _ in active), True
        if before is not None and self._reads == self._launches:
            self._left.pop()[0].give_back()
        return step

    def _load(self, step: CapturedStep, coming: Sequence[_Slot]) -> None:
        places = [self._free.pop() for _ in coming]
        config, dtype = self._steps.config, self._steps.dtype
        tables = np.concatenate([slot.row.cache.table(config, dtype, 1) for slot in coming], 1)
        with on(self._steps.device):
            step.load(places, [slot.row for slot in coming], tables)
        for place, slot in zip(places, coming, strict=True):
            slot.place = place
        self._active, self._changed = (*self._active, *((slot, slot.place) for slot in coming)), True

    def _taking_part(self) -> Sequence[tuple[_Slot, int]]:
        """Rows in the captured step, and their places. Once made, it does not change: steps on their way keep it."""
        if self._changed:
            self._active = tuple((slot, place) for slot, place in self._active if slot.place >= 0)
            self._until = min((slot.until for slot, _ in self._active), default=0)
            self._scored = [slot for slot, _ in self._active if slot.row.logprobs is not None]
            self._top = max((slot.row.logprobs or 0 for slot in self._scored), default=0)
            self._room, self._changed = 0, False
        return self._active

    def _drop_full(self) -> bool:
        """Leave out rows that have no token left to feed; whether any row is left."""
        active = self._taking_part()
        if self._launches >= self._until:
            for slot, _ in active:
                if self._launches >= slot.until:
                    self._leave_out(slot)
        return bool(self._taking_part())

    def _leave_out(self, slot: _Slot) -> None:
        place, slot.place = slot.place, -1
        self._free.append(place)
        self._changed = True
        if self._step is not None:
            with on(self._steps.device):
                self._step.drop(place)

    def _reserve(self) -> None:
        """Memory for the position that each row writes next: a cache of pages takes it as it grows."""
        if self._lazy and self._launches < self._room:
            return
        with on(self._steps.device):
            for slot, _ in self._active:
                if not self._lazy or self._launches >= slot.room:
                    self._settle(slot)
                    try:
                        ready = slot.row.cache.reserve(self._launches - max(self._reads, slot.since) + 1)
                    except ValueError as error:
                        raise type(error)(f"{slot.row.name}: {error}") from None
                    slot.room = slot.since + ready - slot.first
        self._room = min(slot.room for slot, _ in self._active)

    def _launch(self) -> None:
        step = self._step
        assert step is not None
        self._launches += 1
        self._count += 1
        tokens = step.sent[self._count % len(step.sent)]
        with on(self._steps.device):
            step.launch()
            numbers = step.likelihoods([slot.place for slot in self._scored], self._top) if self._scored else None
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()
        self._launched.append(_Launched(self._active, tokens, done, self._scored, numbers))

    def _settle(self, slot: _Slot) -> None:
        """Let a cache know of the tokens that were read, unless it is in other hands by now."""
        row, held = slot.row, slot.first + slot.settled
        n = min(self._reads, slot.until) - slot.since - slot.settled
        if n > 0 and row.cache.seq_len == held:
            row.cache.advance(n)
            record(row.cache, held, row.tokens[held : held + n], self._steps.model)
            slot.settled += n

    def _roll_back(self, slot: _Slot) -> None:
        """What steps have stored beyond the tokens that were asked for; unless the cache is in other hands by now."""
        self._settle(slot)
        cache, held = slot.row.cache, slot.first + slot.settled
        ahead = min(self._launches, slot.until) - slot.since - slot.settled
        if ahead > 0 and cache.seq_len == held:
            cache.advance(ahead)
            cache.truncate(held)

    def _wait(self, done: torch.cuda.Event) -> None:
        try:
            done.synchronize()
        except RuntimeError as error:
            at = ", ".join(f"{slot.row.name} at position {len(slot.row.tokens) - 1}" for slot, _ in self._active)
            raise RuntimeError(f"the GPU failed while it decoded {at}: {error}") from error
