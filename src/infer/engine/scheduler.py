"""Continuous batching: which sequences are in the next step, and how many tokens of each are computed.

Every sequence that decodes is in it, and chunks of prompts in the order of arrival, up to a token budget. A sequence is
admitted once there is memory for its next chunk, not for everything that it may grow to. When memory runs out, the
youngest sequence is preempted: it frees its pages and waits again. The plan depends only on what was submitted and
when; no model or tensor is involved.
"""

from __future__ import annotations

from bisect import insort
from operator import attrgetter
from typing import NamedTuple, Protocol

from infer.engine.sequence import Sequence, Status

PRIORITY_STEP = 256  # each priority level counts as arriving this many steps later
FIRST_ROWS = 8  # admitted when nothing runs, if passes are shared: the GPU runs them while others are admitted


class ScheduledTokens(NamedTuple):
    """Tokens to compute in one step: a chunk of a prompt, or one token, or one token and drafts after it."""

    sequence: Sequence
    num_tokens: int


class KVAllocator(Protocol):
    """The memory for the caches of running sequences."""

    num_lookahead_slots: int  # positions that steps launched ahead write beyond the scheduled tokens

    def allocate(self, sequence: Sequence) -> bool:
        """Attach a cache with the cached prefix. False: wait, another sequence is computing the next pages."""

    def reserve(self, sequence: Sequence, n: int) -> bool:
        """Reserve memory for n more tokens, and the lookahead. False: there is not enough."""

    def can_grow(self, count: int) -> bool:
        """Whether this many sequences could each grow by a page."""

    def free(self, sequence: Sequence) -> None:
        """Free its cache."""


class _Budget:
    """The prompt tokens that are left for a step."""

    def __init__(self, tokens: int, rows: int | None) -> None:
        """rows: that decode in the same pass, whose tokens are part of it; None: they are not."""
        self._tokens, self._rows = tokens, rows

    @property
    def left(self) -> int:
        return self._left(0)

    def chunk(self, remaining: int) -> int:
        """How many of the remaining tokens of a prompt to compute. After the last one, it decodes."""
        if self._rows is None:
            return max(0, min(remaining, self._tokens))
        if remaining - 1 <= self._left(1):
            return remaining
        return max(0, min(remaining - 1, self._left(0)))

    def spend(self, n: int, sequence: Sequence) -> None:
        if self._rows is not None and n and sequence.num_computed_tokens + n >= sequence.num_prefill_tokens:
            self._rows += 1
            n -= 1
        self._tokens -= n

    def _left(self, entering: int) -> int:
        """If so many more rows decode. Captured steps have a power of two of rows."""
        rows = 0 if self._rows is None else self._rows + entering
        return self._tokens - (1 << (rows - 1).bit_length() if rows else 0)


class Scheduler:
    """The waiting and the running sequences. Call `schedule` for each step."""

    def __init__(self, allocator: KVAllocator, *, max_rows: int, prefill_chunk: int, shared: bool = False) -> None:
        """max_rows: sequences that run at once. prefill_chunk: prompt tokens of one step, of all prompts together.

        shared: these include the tokens of sequences that decode, whose number is rounded up to a power of two; and
        without any they are twice as many.
        """
        if type(max_rows) is not int or max_rows < 1:
            raise ValueError(f"max_rows must be an integer, 1 or more, not {max_rows!r}")
        self.allocator, self.max_rows, self.prefill_chunk = allocator, max_rows, prefill_chunk
        self._shared = shared and max_rows <= prefill_chunk // 2
        self.waiting: list[Sequence] = []  # both lists are ordered by `sort_key`
        self.running: list[Sequence] = []
        self.num_steps = self.num_preemptions = 0
        self.admitted: list[Sequence] = []  # by the last `schedule`
        self.preempted: list[Sequence] = []
        self.unschedulable: Sequence | None = None  # a sequence that does not fit even alone
        self._num_arrived = 0

    def submit(self, sequence: Sequence) -> None:
        sequence.arrival = self._num_arrived
        sequence.sort_key = (self.num_steps + sequence.priority * PRIORITY_STEP, sequence.arrival)
        self._num_arrived += 1
        insort(self.waiting, sequence, key=_sort_key)

    def finish(self, sequence: Sequence) -> None:
        """Remove a sequence that has finished, or was aborted."""
        try:
            if sequence.status is Status.RUNNING:
                self.running.remove(sequence)
                self.allocator.free(sequence)
            else:
                self.waiting.remove(sequence)
        finally:
            sequence.status = Status.FINISHED

    def schedule(self) -> list[ScheduledTokens]:
        """The sequences of the next step, and how many tokens of each are computed."""
        self.num_steps += 1
        self.admitted, self.preempted, self.unschedulable = [], [], None
        scheduled: dict[Sequence, int] = {}
        lookahead = 1 + self.allocator.num_lookahead_slots
        growing: list[Sequence] = []
        prefilling: list[Sequence] = []
        for sequence in self.running:
            if sequence.num_computed_tokens < sequence.num_prefill_tokens:
                prefilling.append(sequence)
            elif (
                sequence.num_computed_tokens + lookahead <= sequence.num_reserved_slots
                and not sequence.draft_token_ids
                and not sequence.recompute_tokens
            ):  # most sequences in most steps
                scheduled[sequence] = 1
            else:
                growing.append(sequence)
        for sequence in growing:
            del sequence.draft_token_ids[max(0, sequence.capacity - sequence.num_computed_tokens - 1) :]
            if sequence.draft_token_ids and not self._reserve(sequence, 1 + len(sequence.draft_token_ids)):
                sequence.draft_token_ids = []  # no sequence is preempted for them
            self._schedule(scheduled, sequence, sequence.num_recompute_tokens or 1 + len(sequence.draft_token_ids))
        budget = _Budget(self.prefill_chunk, None)
        if self._shared:  # if no sequence decodes, none waits for its next token
            budget = _Budget(self.prefill_chunk * (1 if scheduled else 2), len(scheduled))
        for sequence in prefilling:
            budget.spend(self._schedule(scheduled, sequence, self._chunk(sequence, budget)), sequence)
        most = self.max_rows if self.running or not self._shared else min(self.max_rows, FIRST_ROWS)
        for sequence in [] if self.preempted else list(self.waiting):
            if budget.left <= 0 or len(self.running) >= most:
                break
            if not self.allocator.allocate(sequence):
                continue  # the sequences after it may run
            if not self._admit(sequence, budget):
                break
            budget.spend(self._schedule(scheduled, sequence, self._chunk(sequence, budget)), sequence)
        return [ScheduledTokens(sequence, n) for sequence, n in scheduled.items()]

    def _chunk(self, sequence: Sequence, budget: _Budget) -> int:
        """How many tokens it computes next, without drafts."""
        if not sequence.is_prefill:
            return sequence.num_recompute_tokens or 1
        return budget.chunk(sequence.num_prefill_tokens - sequence.num_computed_tokens)

    def _admit(self, sequence: Sequence, budget: _Budget) -> bool:
        """Let a sequence run if there is memory for its first tokens; otherwise the sequences after it wait, too."""
        fits = self._reserve(sequence, self._chunk(sequence, budget))
        if fits and (not self.running or self.allocator.can_grow(len(self.running))):
            self.waiting.remove(sequence)
            insort(self.running, sequence, key=_sort_key)
            sequence.status = Status.RUNNING
            self.admitted.append(sequence)
            return True
        self.allocator.free(sequence)
        sequence.num_computed_tokens = 0
        if not self.running:
            self.unschedulable = sequence
        return False

    def _schedule(self, scheduled: dict[Sequence, int], sequence: Sequence, n: int) -> int:
        """Schedule n tokens. Where there is no memory for them, preempt the youngest sequences."""
        while sequence.status is Status.RUNNING and n and not self._reserve(sequence, n):
            self._preempt(scheduled)
        if sequence.status is not Status.RUNNING or not n:
            return 0
        scheduled[sequence] = n
        return n

    def _reserve(self, sequence: Sequence, n: int) -> bool:
        if sequence.recompute_tokens:
            return True  # nothing is cached
        needed = sequence.num_computed_tokens + n + self.allocator.num_lookahead_slots
        return needed <= sequence.num_reserved_slots or self.allocator.reserve(sequence, n)

    def _preempt(self, scheduled: dict[Sequence, int]) -> None:
        sequence = next(each for each in reversed(self.running) if not each.recompute_tokens)  # has memory to free
        self.running.remove(sequence)
        self.allocator.free(sequence)
        scheduled.pop(sequence, None)
        sequence.status, sequence.num_computed_tokens, sequence.draft_token_ids = Status.WAITING, 0, []
        insort(self.waiting, sequence, key=_sort_key)
        self.preempted.append(sequence)
        self.num_preemptions += 1


_sort_key = attrgetter("sort_key")
