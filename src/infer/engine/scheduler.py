"""Who is in the next pass, and with how many tokens: continuous batching, without a model or a tensor in sight.

All rows that decode are in it, and chunks of prompts in the order of their arrival, up to a bound. A request is
admitted when there are pages for its next chunk, not for all that it may come to hold. When pages run out, the youngest
row gives its pages back and waits again. What is decided depends on what was submitted and when, and on nothing else.
"""

from __future__ import annotations

from bisect import insort
from operator import attrgetter
from typing import Generic, Protocol, TypeVar

PATIENCE = 256  # passes: a request of the next priority is served as if it had come so much later, so not never


class Job:
    """A request as the scheduler sees it: counts of tokens."""

    __slots__ = ("__weakref__", "held", "length", "order", "priority", "room", "running", "whole")

    def __init__(self, length: int, priority: int = 0) -> None:
        """length: of the prompt. priority: lower goes first."""
        self.length = length  # tokens that it has: the prompt's, and those chosen
        self.priority = priority
        self.held = 0  # tokens that its cache holds once the passes that were scheduled are through
        self.room = 0  # tokens that its cache has room for
        self.whole = 0  # tokens that each pass feeds anew where the context is used up; 0: its cache holds the rest
        self.order = (0, 0)  # when its turn is: by pass, then by arrival
        self.running = False

    @property
    def left(self) -> int:
        """Tokens to feed before the next one can be chosen."""
        return self.whole or self.length - self.held


J = TypeVar("J", bound=Job)
K = TypeVar("K", bound=Job, contravariant=True)


class Room(Protocol[K]):
    """The memory that jobs need to run."""

    def admit(self, job: K) -> int | None: ...  # tokens that are known already; None: wait for a row that shares more
    def reserve(self, job: K, n: int) -> int: ...  # for n more tokens: tokens there is room for in all; 0: no room
    def spare(self, rows: int) -> bool: ...  # whether so many rows could each grow by a page
    def release(self, job: K) -> None: ...  # it needs nothing any more


class Scheduler(Generic[J]):
    """What waits and what runs. Call `schedule` for each pass."""

    def __init__(self, room: Room[J], *, max_rows: int, prefill_chunk: int, last_alone: bool = False) -> None:
        """max_rows: that run at once. prefill_chunk: tokens of prompts in one pass, all prompts together.

        last_alone: the last token of a prompt is fed by itself, together with those of rows that decode.
        """
        for name, value in (("max_rows", max_rows), ("prefill_chunk", prefill_chunk)):
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} must be a whole number, 1 or more, not {value!r}")
        self.room, self.max_rows, self.prefill_chunk, self.last_alone = room, max_rows, prefill_chunk, last_alone
        self.waiting: list[J] = []  # both in the order of their turns
        self.running: list[J] = []
        self.passes = 0
        self.preemptions = 0
        self.stuck: J | None = None  # one for which there is not room enough even alone
        self._arrived = 0

    def submit(self, job: J) -> None:
        job.order = (self.passes + job.priority * PATIENCE, self._arrived)
        self._arrived += 1
        insort(self.waiting, job, key=_order)

    def end(self, job: J) -> None:
        """It has finished, or is not wanted any more."""
        if job.running:
            self.running.remove(job)
            job.running = False
            self.room.release(job)
        else:
            self.waiting.remove(job)

    def schedule(self) -> dict[J, int]:
        """Rows of the next pass, and how many tokens each feeds. From now on they count as held."""
        self.passes += 1
        fed: dict[J, int] = {}
        before, left = self.preemptions, self.prefill_chunk
        others: list[J] = []
        prefilling: list[J] = []
        for job in self.running:
            if job.held + 1 == job.length <= job.room and not job.whole:  # what most rows do in most passes
                job.held = job.length
                fed[job] = 1
            else:
                (prefilling if job.left > 1 and not job.whole else others).append(job)
        for job in others:
            self._feed(fed, job, job.left)
        for job in prefilling:
            left -= self._feed(fed, job, self._chunk(job, left))
        self.stuck = None
        for job in list(self.waiting) if before == self.preemptions else ():
            if left <= 0 or len(self.running) >= self.max_rows or not self._begin(job, left):
                break
            left -= self._feed(fed, job, self._chunk(job, left))
        return fed

    def _chunk(self, job: J, left: int) -> int:
        count = job.left - 1 if self.last_alone and job.left > 1 else job.left
        return max(0, min(count, left))

    def _feed(self, fed: dict[J, int], job: J, n: int) -> int:
        """Let a row feed n tokens. Where there is no room for them, the youngest rows give up theirs."""
        while job.running and n and not job.whole and not self._has_room(job, n):
            self._preempt(fed)
        if not job.running or not n:
            return 0
        fed[job] = n
        job.held += 0 if job.whole else n
        return n

    def _has_room(self, job: J, n: int) -> bool:
        if job.held + n > job.room:
            job.room = self.room.reserve(job, n)
        return job.held + n <= job.room

    def _preempt(self, fed: dict[J, int]) -> None:
        job = next(job for job in reversed(self.running) if not job.whole)  # who holds nothing has nothing to give
        self.running.remove(job)
        self.room.release(job)
        fed.pop(job, None)
        job.running, job.held, job.room = False, 0, 0
        insort(self.waiting, job, key=_order)
        self.preemptions += 1

    def _begin(self, job: J, left: int) -> bool:
        """Let a job run if there is room for its first chunk. False: those behind it have to wait as well."""
        known = self.room.admit(job)
        if known is None:
            return True
        job.held = known
        if self._has_room(job, self._chunk(job, left)) and (not self.running or self.room.spare(len(self.running))):
            self.waiting.remove(job)
            insort(self.running, job, key=_order)
            job.running = True
            return True
        self.room.release(job)
        job.held = job.room = 0
        if not self.running:
            self.stuck = job
        return False


_order = attrgetter("order")
