"""Decode steps captured as CUDA graphs and replayed: the model, and the choice of the next token.

Everything that a step reads is on the device: the tokens, their positions, the page tables, the sampling settings. So
one captured step serves all prompts, lengths and settings, and the host launches steps ahead of the tokens it has read:
the device never waits for the host. Steps launched past the end of a sequence are rolled back.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import Lock
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from infer import progress
from infer.backend.gpu import launcher
from infer.backend.gpu.launcher import compile_ahead, next_power, on
from infer.backend.gpu.logprobs import logprob_terms
from infer.backend.gpu.sampling import MANY_ROWS, DeviceSampler, GreedySampler
from infer.backend.gpu.step import Plan, StepInputs, StepRows, begin, counters, launch, unused_inputs
from infer.backend.gpu.tuned import ROWS_COMPILED
from infer.backend.parts import DRAFT_LEVELS, STEPS_AHEAD
from infer.cache.base import Cache
from infer.cache.table import empty_tables
from infer.config import ModelConfig
from infer.machine import to_device
from infer.models.rows import Row, record
from infer.nn.draw import MAX_VOCAB
from infer.nn.packed import PackedSettings

SMALL_STEP = 8  # rows; up to here, unused rows cost no time
WIDTHS = tuple(1 + level for level in DRAFT_LEVELS)  # tokens of a sequence in steps that verify drafts
MAX_VERIFIED = 320  # tokens of such a step
_capturing = os.environ.get("INFER_GRAPHS") != "0"


def capturing() -> bool:
    """Whether steps are captured as CUDA graphs."""
    return _capturing


@contextmanager
def disabled() -> Iterator[None]:
    """Inside, steps launch their kernels one by one, as with INFER_GRAPHS=0: to debug, or to compare."""
    global _capturing
    before, _capturing = _capturing, False
    try:
        yield
    finally:
        _capturing = before


_recording = Lock()  # torch records one graph at a time in a process


def record_graph(run: Callable[[], object], pool: Any = None) -> torch.cuda.CUDAGraph:
    """Capture the launches of `run` for replay. pool: memory pool of its results; None: a private one."""
    graph = torch.cuda.CUDAGraph()
    with _recording, torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        run()
    return graph


class DecodingSequence(Protocol):
    """The attributes of a sequence that captured steps use.

    Before its first step, its cache holds all its tokens except the last, or a pass beside that step computes them.
    """

    name: str
    token_ids: list[int]
    prompt_len: int
    max_len: int
    cache: Any
    capacity: int  # positions of its cache, at most the model's context
    num_computed_tokens: int  # read by the host
    num_launched_tokens: int  # computed by the steps launched so far
    num_written_tokens: int  # positions that these have written to, those of wrong drafts included
    num_reserved_slots: int
    draft_token_ids: list[int]  # guesses at the next tokens
    is_captured: bool
    slot: int  # its row in the captured step; -1: none
    settings: PackedSettings

    @property
    def num_logprobs(self) -> int | None: ...  # top-k whose log-probabilities are returned; None: no log-probabilities


class PromptBackend(Protocol):
    """Runs tokens of prompts that only fill caches."""

    def run(self, rows: Sequence[Row]) -> Any: ...
    def run_beside(self, step: CapturedStep, rows: Sequence[Row]) -> bool: ...  # False: there is no such pass yet


class Verification:
    """A step that verifies drafts, with the rows of a captured step: each is a sequence's last token, and drafts."""

    def __init__(self, plan: Plan, device: torch.device, rows: int, width: int) -> None:
        """width: tokens of a sequence."""
        self.width = width
        self.drafts = torch.full((rows, width - 1), -1, dtype=torch.int64, device=device)  # -1: none
        self.chosen = torch.full((rows * width,), -1, dtype=torch.int64, device=device)  # after each of the tokens
        self.host_tokens = torch.empty(1, rows * width, dtype=torch.int64, pin_memory=True)  # the same
        self.split_counters = counters(plan, rows * width)
        self.logits: Tensor | None = None  # [rows * width, V]
        self.graph: torch.cuda.CUDAGraph | None = None


class CapturedStep:
    """One decode step of up to `rows` rows, with its input and output buffers."""

    def __init__(self, config: ModelConfig, plan: Plan, device: torch.device, rows: int, samples: bool) -> None:
        """samples: rows are sampled with their settings; False: all rows are greedy."""
        self.rows, self.samples, self.captured, self.busy = rows, samples, _capturing, False
        self.plan, self.device = plan, device
        self._released: torch.cuda.Event | None = None  # recorded by `release`
        self.tokens = torch.zeros(rows, dtype=torch.int64, device=device)  # inputs, then the chosen tokens
        # Positions of the inputs, -1: none; and what is added to each after a step.
        self._unused = torch.tensor([-1, 0], dtype=torch.int32).to(device)
        self._rows = self._unused[:, None].repeat(1, rows)
        self.positions, self.increments = self._rows
        self.steps = torch.zeros(1, dtype=torch.int32, device=device)  # steps since `clear`
        # A ring of the chosen tokens of the last steps, for the host.
        self.host_tokens = torch.empty(STEPS_AHEAD + 1, rows, dtype=torch.int64, pin_memory=True)
        self.logits: Tensor | None = None  # [rows, V], of the last step
        self.tables = empty_tables(config.num_hidden_layers, rows, device)
        self.sampler = DeviceSampler(rows, config.vocab_size, device, plan.pdl) if samples else None
        self._choice = self.sampler or GreedySampler(rows, config.vocab_size, device, plan.pdl)
        self._split_counters = counters(plan, rows)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._graph_logits: Tensor | None = None  # where all graphs of this step leave them
        self.passes: dict[Any, Any] = {}  # captured: this step and tokens of prompts, by their number
        self.verifications: dict[int, Verification | None] = {}  # by width; None: there was not enough memory for it

    def capture(self) -> None:
        with on(self.device):
            self.run()  # loads the kernels; all rows are unused
            if self.captured:
                self._graph = record_graph(self.run)
                self._graph_logits = self.logits

    def launch(self) -> None:
        if self._graph is None:
            self.run()
        else:
            self._graph.replay()

    def run(self, blocks: Callable[[StepRows], Tensor] | None = None) -> Tensor:
        """Launch kernel by kernel; returns the logits. blocks: computes them, beside others."""
        # Unused rows, and rows whose logits were NaN, are computed too: their results are ignored.
        rows = self._with(begin(self.plan, self.tokens, self.positions, self.increments, self.steps))
        logits = launch(self.plan, *rows) if blocks is None else blocks(rows)
        if self._graph_logits is not None:  # the memory of a pass is that of other passes, too
            logits = self._graph_logits.copy_(logits)
        self.logits = logits
        self._choice.launch(logits, self.positions, self.tokens, self.host_tokens, self.steps)
        return logits

    def add_verification(self, width: int) -> None:
        """Capture a step that verifies drafts. No row changes, if all launches were read."""
        new = Verification(self.plan, self.device, self.rows, width)
        with on(self.device):
            if launcher.can_compile_ahead():
                compile_ahead(self.device, lambda: self._run_verification(new))
            if self.captured:
                rows, steps = self._rows.clone(), self.steps.clone()
                try:
                    self._rows.copy_(self._unused[:, None])
                    self._run_verification(new)  # loads the kernels
                    new.graph = record_graph(lambda: self._run_verification(new))
                finally:
                    self._rows.copy_(rows)
                    self.steps.copy_(steps)
        self.verifications[width] = new

    def verify(self, width: int, drafts: Sequence[tuple[int, Sequence[int]]]) -> Tensor:
        """Launch a step with drafts: by slot, up to width - 1 of each sequence. Returns where the host finds tokens."""
        verification = self.verifications[width]
        assert verification is not None
        padded = [[-1] * (width - 1)] * self.rows
        for slot, tokens in drafts:
            padded[slot] = [*tokens, *padded[slot]][: width - 1]
        verification.drafts.copy_(to_device(torch.tensor(padded), self.device))
        if verification.graph is None:
            self._run_verification(verification)
        else:
            verification.graph.replay()
        return verification.host_tokens

    def _run_verification(self, step: Verification) -> None:
        inputs = begin(self.plan, self.tokens, self.positions, self.increments, self.steps, step.drafts)
        tables = self.tables[:, :, None].expand(-1, -1, step.width, -1).flatten(1, 2).contiguous()
        logits = step.logits = launch(self.plan, inputs, tables, step.split_counters, step.width)
        assert inputs.output_positions is not None
        self._choice.launch(logits, inputs.output_positions, step.chosen, step.host_tokens, self.steps, step.drafts)
        self._choice.accept(self.tokens, self.positions, step.drafts, step.chosen)

    def unused_rows(self) -> StepRows:
        """Rows without a token, as many as this step has."""
        return self._with(unused_inputs(self.plan, self.rows))

    def _with(self, inputs: StepInputs) -> StepRows:
        return StepRows(inputs, self.tables, self._split_counters)

    def logprobs(self, slots: Sequence[int], top: int, width: int = 1) -> Tensor:
        """`logprob_terms` of the tokens chosen in these rows [rows, width, ...], in pinned memory.

        They are valid once the step is done.
        """
        logits, tokens = self.logits, self.tokens
        if (verification := self.verifications.get(width)) is not None:
            logits, tokens = verification.logits, verification.chosen
        assert logits is not None
        at = to_device(torch.tensor([slot * width + i for slot in slots for i in range(width)]), self.device)
        terms = logprob_terms(logits[at], tokens[at], min(top, logits.shape[1])).view(len(slots), width, -1)
        return torch.empty(*terms.shape, dtype=terms.dtype, pin_memory=True).copy_(terms, non_blocking=True)

    def clear(self) -> None:
        """Make all rows unused."""
        if self._released is not None:
            self._released.wait()
        self._rows.copy_(self._unused[:, None])
        self.steps.zero_()

    def load(self, sequences: Sequence[DecodingSequence], tables: np.ndarray[Any, Any]) -> None:
        """Set the rows of new sequences, each at its slot. tables: [layers, rows, COLUMNS], from their caches."""
        inputs = [
            [sequence.slot for sequence in sequences],
            [sequence.token_ids[-1] for sequence in sequences],
            [len(sequence.token_ids) - 1 for sequence in sequences],
        ]
        slots, tokens, positions = to_device(torch.tensor(inputs), self.device)
        self.tokens[slots] = tokens
        self.positions[slots] = positions.int()
        self.increments.index_fill_(0, slots, 1)  # `[slots] = 1` would wait for all launches
        self.tables[:, slots] = to_device(torch.from_numpy(tables), self.device)
        self._set_sampler(sequences)

    def copy_rows_from(
        self, other: CapturedStep, sequences: Sequence[DecodingSequence], other_slots: Sequence[int]
    ) -> None:
        """Continue sequences of another step after its last launch. other_slots: their slots in that step."""
        slots = [sequence.slot for sequence in sequences]
        at, of = to_device(torch.tensor([slots, [*other_slots]]), self.device)
        self.tokens[at] = other.tokens[of]
        self.positions[at] = other.positions[of]
        self.increments[at] = other.increments[of]
        self.tables[:, at] = other.tables[:, of]
        if self.sampler is not None and other.sampler is not None:
            self.sampler.copy_rows_from(other.sampler, slots, other_slots)
        else:
            self._set_sampler(sequences)

    def _set_sampler(self, sequences: Sequence[DecodingSequence]) -> None:
        if self.sampler is not None:
            slots, settings = zip(*((each.slot, each.settings) for each in sequences), strict=True)
            tokens, prompt_lens = zip(*((each.token_ids, each.prompt_len) for each in sequences), strict=True)
            self.sampler.set_rows(slots, settings, tokens, prompt_lens)

    def drop(self, slots: Sequence[int]) -> None:
        if len(slots) == 1:
            self._rows[:, slots[0]] = self._unused
        else:
            self._rows[:, to_device(torch.tensor(slots), self.device)] = self._unused[:, None]

    def release(self) -> None:
        self._released = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with suppress(RuntimeError), on(self.device):  # a GPU that has failed reports it at its next use
            self._released.record()
        self.busy = False


class CapturedSteps:
    """The captured steps of one model, by number of rows (a power of two) and kind: greedy or sampled."""

    def __init__(
        self, config: ModelConfig, plan: Plan, device: torch.device, model: torch.nn.Module | None = None
    ) -> None:
        """model: the token embedding, which identifies the model in caches."""
        self.config, self.plan, self.device, self.model = config, plan, device, model
        self.dtype = plan.head.norm.weight.dtype
        self.possible = config.vocab_size <= MAX_VOCAB
        self._steps: list[CapturedStep] = []
        self._lock = Lock()

    def acquire(self, rows: int, samples: bool) -> CapturedStep:
        """A step that is not in use, captured now if there is none."""
        with self._lock:
            for step in self._steps:
                if (step.rows, step.samples, step.captured, step.busy) == (rows, samples, _capturing, False):
                    break
            else:
                try:
                    step = self._new_captured_step(rows, samples)
                except torch.OutOfMemoryError:  # drop the steps that are not in use
                    self._steps = [step for step in self._steps if step.busy]
                    torch.cuda.empty_cache()
                    step = self._new_captured_step(rows, samples)
                self._steps.append(step)
            step.busy = True
        return step

    def can_verify(self, step: CapturedStep, width: int) -> bool:
        """Whether a step of this width verifies drafts; it is captured now if there is none."""
        with self._lock:
            if width not in step.verifications:
                try:
                    with progress.compiling("for drafts"):
                        step.add_verification(width)
                except torch.OutOfMemoryError:
                    step.verifications[width] = None
        return step.verifications[width] is not None

    def _new_captured_step(self, rows: int, samples: bool) -> CapturedStep:
        step = self._new_step(rows, samples)
        self._compile(step)
        step.capture()
        return step

    def _new_step(self, rows: int, samples: bool) -> CapturedStep:
        return CapturedStep(self.config, self.plan, self.device, rows, samples)

    def _compile(self, step: CapturedStep) -> None:
        """Compile its kernels; if they were not on disk, also the kernels of other sizes."""

        def other_sizes() -> None:
            for rows in ROWS_COMPILED:
                self._new_step(rows, rows in (1, MANY_ROWS)).run()  # both kinds of sampler

        if launcher.can_compile_ahead() and compile_ahead(self.device, step.run):
            if not progress.has_listeners():
                print(
                    "compiling kernels for this GPU: seconds, once for each kind of model", file=sys.stderr, flush=True
                )
            with suppress(torch.OutOfMemoryError), progress.compiling("for this GPU"):
                compile_ahead(self.device, other_sizes)


class _Launched(NamedTuple):
    """A launched step whose tokens have not been read."""

    number: int
    rows: Sequence[tuple[DecodingSequence, int]]  # its sequences, and their slots
    width: int  # tokens of a sequence
    tokens: Tensor  # pinned, [rows * width]
    done: torch.cuda.Event
    drafts: Sequence[list[int]]  # of each sequence; none if the width is 1
    with_logprobs: Sequence[DecodingSequence] = ()  # sequences that return log-probabilities
    logprob_terms: Tensor | None = None  # pinned [these, width, terms]


class CapturedDecoder:
    """Decodes sequences in captured steps. They enter and leave one by one while others continue.

    The scheduler reserves cache memory `STEPS_AHEAD` positions early, for the position that a launch writes.
    """

    def __init__(self, steps: CapturedSteps, prompts: PromptBackend) -> None:
        self._steps, self._prompts = steps, prompts
        self._step: CapturedStep | None = None
        self._free: list[int] = []  # slots of the captured step
        self._members: dict[DecodingSequence, int] = {}  # all sequences, and the number of launches before each entered
        self._entering: list[DecodingSequence] = []
        self._active: tuple[tuple[DecodingSequence, int], ...] = ()  # sequences with a slot, and their slots
        self._changed = False  # whether `_active` and the next two are out of date
        self._with_logprobs: Sequence[DecodingSequence] = ()  # active sequences that return log-probabilities
        self._max_top = 0  # the largest `num_logprobs` of these
        self._launched: deque[_Launched] = deque()
        self._replaced: deque[tuple[CapturedStep, int]] = deque()  # steps with unread tokens, and their last launch
        self._launches = self._reads = 0  # of all captured steps
        self._awaits_more = False
        self._step_launches = 0  # of the current one
        self._width, self._ahead = 1, STEPS_AHEAD  # of the next launch: tokens of a sequence, and steps ahead of it

    def supports(self, cache: Cache) -> bool:
        """Whether the kernels can write to this cache."""
        return cache.table(self._steps.config, self._steps.dtype, 1) is not None

    def max_drafts(self, rows: int) -> int:
        """Drafts of a sequence that a step of so many rows verifies, at most."""
        step = self._step
        if step is None or not self._fits(step, rows, False):
            return max((width - 1 for width in _widths(next_power(rows))), default=0)
        return max((width - 1 for width in self._verified_widths(step)), default=0)

    def add(self, sequence: DecodingSequence) -> None:
        """Let a sequence enter at the next step, which computes its last token; a pass beside it may compute others."""
        sequence.is_captured, sequence.num_launched_tokens = True, sequence.num_computed_tokens
        sequence.num_written_tokens = 0
        self._members[sequence] = self._launches
        self._entering.append(sequence)

    def remove(self, sequence: DecodingSequence) -> None:
        """Remove a sequence, and roll back its steps that were launched ahead."""
        self.sync(sequence)
        self._roll_back(sequence)
        del self._members[sequence]
        if sequence.slot >= 0:
            self._vacate([sequence])
        else:
            self._entering = [other for other in self._entering if other is not sequence]

    def remove_all(self) -> None:
        """Remove all sequences, which may continue on another backend."""
        for sequence in list(self._members):
            self.remove(sequence)
        self.close()

    def sync(self, sequence: DecodingSequence) -> None:
        """Advance the cache of a sequence to the tokens that were read."""
        cache = sequence.cache
        start, end = cache.seq_len, sequence.num_computed_tokens
        if start < end:
            cache.advance(end - start)
            record(cache, start, sequence.token_ids[start:end], self._steps.model)

    def launch(self, prompts: Sequence[Row] = (), *, more: bool = False) -> None:
        """Launch steps, up to `STEPS_AHEAD` more than one, after `admit`.

        prompts: rows that only fill caches, computed beside the next step. more: others follow: wait for them, not for
        the tokens of this step.
        """
        self._awaits_more = False
        while len(self._launched) <= self._ahead and self._vacate_finished():
            self._launch(prompts)
            prompts = ()
            if more:
                self._awaits_more = True
                break
        if prompts:
            self._prompts.run(prompts)

    def read(self) -> list[tuple[DecodingSequence, list[int], list[list[int]] | None]]:
        """The tokens of the oldest launched step (-1: no valid logits), each with its `logprob_terms` if requested.

        None while more prompts are to be launched: the GPU has only one step to compute.
        """
        if not self._launched or (self._awaits_more and len(self._launched) <= STEPS_AHEAD):
            return []
        self._wait(self._launched[0].done)
        number, rows, width, tokens, _, drafts, with_logprobs, logprob_terms = self._launched.popleft()
        self._reads += 1
        while self._replaced and self._replaced[0][1] <= self._reads:
            self._replaced.popleft()[0].release()
        chosen, members = tokens.view(-1, width).tolist(), self._members
        terms = {} if logprob_terms is None else dict(zip(with_logprobs, logprob_terms.tolist(), strict=True))
        for (sequence, slot), own in zip(rows, drafts, strict=False):
            chosen[slot] = _accepted(chosen[slot], own)
            sequence.num_launched_tokens = len(sequence.token_ids) - 1 + len(chosen[slot])
        # A sequence that left after the launch, and perhaps entered again, ignores this step.
        return [
            (sequence, chosen[slot], terms.get(sequence))
            for sequence, slot in rows
            if members.get(sequence, number) < number
        ]

    def close(self) -> None:
        """Wait for all launches, roll back the unread ones, and release the captured step."""
        try:
            if self._launched:
                with suppress(RuntimeError):  # the first error of a GPU is the one to report
                    self._launched[-1].done.synchronize()
            for sequence in self._members:
                self._roll_back(sequence)
                sequence.slot = -1
        finally:
            self._launched.clear()
            for step in (self._step, *(step for step, _ in self._replaced)):
                if step is not None:
                    step.release()
            self._replaced.clear()
            self._step, self._active, self._entering = None, (), []
            self._members.clear()

    def admit(self, *, beside: bool = False) -> None:
        """Let waiting sequences enter, and decide whether the next launch verifies their drafts, or drops them.

        beside: tokens of prompts come with it.
        """
        self._width, self._ahead = 1, STEPS_AHEAD
        if not self._admit(beside):
            return
        drafts = [sequence.draft_token_ids for sequence, _ in self._current() if sequence.draft_token_ids]
        step = self._step
        if not drafts or step is None:
            return
        widths = self._verified_widths(step)
        if widths and not beside:
            if self._launched:  # the drafts follow tokens that were read: read all first
                self._ahead = 0
            else:
                longest = max(map(len, drafts))
                width = next((width for width in widths if width > longest), widths[-1])
                if self._steps.can_verify(step, width):
                    self._width, self._ahead = width, 0
        for tokens in drafts:
            del tokens[self._width - 1 :]

    def _verified_widths(self, step: CapturedStep) -> list[int]:
        """Of steps that verify drafts, those for which there was enough memory, or that are yet to be captured."""
        return [width for width in _widths(step.rows) if step.verifications.get(width, step) is not None]

    def _admit(self, beside: bool) -> bool:
        """Let waiting sequences enter; switch to a captured step of another size if this one is too small or too large.

        beside: then it has as few rows as possible, as the scheduler assumes. Returns whether there are sequences.
        """
        step = self._step
        used = 0 if step is None else step.rows - len(self._free)
        if step is not None and not self._entering and used > step.rows // 2:
            return True
        self._vacate_finished()  # a smaller step may do, or none
        active = self._current()
        count = len(active) + len(self._entering)
        if not count:
            return False
        samples = any(sequence.settings.flags for sequence in (*(each for each, _ in active), *self._entering))
        if step is None or not self._fits(step, count, beside) or (samples and not step.samples):
            step = self._switch_step(next_power(count), samples, active)
        if self._entering:
            self._enter(step)
        return True

    def _fits(self, step: CapturedStep, rows: int, beside: bool) -> bool:
        """Whether to keep this step for so many rows: a large one is kept a little longer, as more may enter."""
        fewest = step.rows // 2 if step.rows <= SMALL_STEP or beside else step.rows * 3 // 8
        return fewest < rows <= step.rows

    def _switch_step(self, rows: int, samples: bool, active: Sequence[tuple[DecodingSequence, int]]) -> CapturedStep:
        """Switch to another captured step, which continues on the device after the last launch of this one."""
        before, step = self._step, self._steps.acquire(rows, samples)
        if before is not None:
            self._replaced.append((before, self._launches))  # its last tokens have not been read
        self._step, self._free, self._step_launches = step, [*range(rows - 1, -1, -1)], 0
        with on(self._steps.device):
            step.clear()
            if before is not None and active:
                for sequence, _ in active:
                    sequence.slot = self._free.pop()
                step.copy_rows_from(before, [sequence for sequence, _ in active], [slot for _, slot in active])
        self._active, self._changed = tuple((sequence, sequence.slot) for sequence, _ in active), True
        if before is not None and self._reads == self._launches:
            self._replaced.pop()[0].release()
        return step

    def _enter(self, step: CapturedStep) -> None:
        entering, self._entering = self._entering, []
        config, dtype = self._steps.config, self._steps.dtype
        tables = np.concatenate([sequence.cache.table(config, dtype, 1) for sequence in entering], 1)
        for sequence in entering:
            sequence.slot = self._free.pop()
        with on(self._steps.device):
            step.load(entering, tables)
        self._active, self._changed = (*self._active, *((each, each.slot) for each in entering)), True

    def _current(self) -> Sequence[tuple[DecodingSequence, int]]:
        """The active sequences and their slots, in a tuple: launched steps keep a reference to it."""
        if self._changed:
            self._active = tuple((sequence, slot) for sequence, slot in self._active if sequence.slot == slot)
            self._with_logprobs = [sequence for sequence, _ in self._active if sequence.num_logprobs is not None]
            self._max_top = max((sequence.num_logprobs or 0 for sequence in self._with_logprobs), default=0)
            self._changed = False
        return self._active

    def _vacate_finished(self) -> bool:
        """Free the slots of sequences with no token left to compute. Returns whether any sequence is left."""
        finished = [
            sequence
            for sequence, _ in self._current()
            if sequence.num_launched_tokens >= min(sequence.max_len - 1, sequence.capacity)
        ]
        if finished:
            self._vacate(finished)
        return bool(self._current())

    def _vacate(self, sequences: Sequence[DecodingSequence]) -> None:
        slots = [sequence.slot for sequence in sequences]
        for sequence in sequences:
            sequence.slot = -1
        self._free += slots
        self._changed = True
        if self._step is not None:
            with on(self._steps.device):
                self._step.drop(slots)

    def _launch(self, prompts: Sequence[Row]) -> None:
        step = self._step
        assert step is not None
        self._launches += 1
        self._step_launches += 1
        tokens = step.host_tokens[self._step_launches % len(step.host_tokens)]
        with on(self._steps.device):
            drafts: list[list[int]] = []
            if self._width > 1:
                drafts = [[*sequence.draft_token_ids] for sequence, _ in self._active]
                tokens = step.verify(self._width, [*zip((slot for _, slot in self._active), drafts, strict=True)])
            elif not (prompts and self._prompts.run_beside(step, prompts)):
                if prompts:
                    self._prompts.run(prompts)
                step.launch()
            terms = None
            if self._with_logprobs:
                slots = [sequence.slot for sequence in self._with_logprobs]
                terms = step.logprobs(slots, self._max_top, self._width)
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()
        for sequence, _ in self._active:  # in its first step the last token, after those that a pass computes
            first = max(sequence.num_launched_tokens, len(sequence.token_ids) - 1)
            sequence.num_launched_tokens = first + 1 + len(sequence.draft_token_ids)
            sequence.num_written_tokens = max(sequence.num_written_tokens, sequence.num_launched_tokens)
        about = self._launches, self._active, self._width, tokens, done, drafts
        self._launched.append(_Launched(*about, self._with_logprobs, terms))

    def _roll_back(self, sequence: DecodingSequence) -> None:
        """Discard what steps wrote after the tokens that were read, unless the cache is used elsewhere by now."""
        cache, end = sequence.cache, sequence.num_computed_tokens
        ahead = max(sequence.num_launched_tokens, sequence.num_written_tokens) - end
        if ahead > 0 and cache.seq_len == end:
            cache.advance(ahead)
            cache.truncate(end)
            sequence.num_reserved_slots = 0  # pages after them are free again
        sequence.is_captured = False

    def _wait(self, done: torch.cuda.Event) -> None:
        try:
            done.synchronize()
        except RuntimeError as error:
            at = ", ".join(
                f"{each.name or 'the prompt'} at position {len(each.token_ids) - 1}" for each, _ in self._active
            )
            raise RuntimeError(f"the GPU failed while it decoded {at}: {error}") from error


def _widths(rows: int) -> list[int]:
    """Of the steps of so many rows that verify drafts."""
    return [width for width in WIDTHS if width * rows <= MAX_VERIFIED]


def _accepted(chosen: list[int], drafts: list[int]) -> list[int]:
    """The tokens chosen up to the first that differs from its draft, included."""
    count = 1
    while count <= len(drafts) and chosen[count - 1] == drafts[count - 1]:
        count += 1
    return chosen[:count]
