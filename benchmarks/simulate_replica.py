"""One replica without a model: the real scheduler over counted pages, with passes that take their fitted time.

Passes in which the same rows decode are taken many at a time: up to the one in which a row ends, a request arrives or
pages may run out. Rows, chunks, preemption and waiting for a row that computes the same prompt are the scheduler's own
(`infer.engine.scheduler`); what the prefix index holds is counted here, in whole parts of prompts.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Sequence
from itertools import accumulate

from simulate_steps import SHORT, Engine, Pass, Steps, pairs
from simulate_traces import Arrival, Part

from infer.engine.scheduler import Job, Scheduler

BINS = 200  # of a histogram, for each factor of e: values are off by half a percent at most


class Row(Job):
    """A request in a replica."""

    __slots__ = (
        "arrival", "base", "captured", "computed", "ended", "first", "index", "known", "last", "left_to_make", "new",
        "owned", "parts", "pending", "pinned", "prompt", "published",
    )  # fmt: skip

    def __init__(self, index: int, arrival: Arrival) -> None:
        self.prompt = arrival.prompt
        super().__init__(self.prompt)
        self.index, self.arrival, self.left_to_make = index, arrival, arrival.output
        self.parts: list[Part] = list(arrival.parts)
        self.computed = 0  # tokens whose keys and values are there
        self.published = 0  # of these, tokens that others may find
        self.pending: list[tuple[int, int]] = []  # keys, and page counts by which others need not wait for them
        self.pinned: list[int] = []  # keys of parts that must not be evicted
        self.base = self.owned = 0  # pages that the index holds for it, and its own
        self.new = True  # whether it has not been in a pass
        self.captured = False  # whether it is in the step that is launched ahead
        self.known: int | None = None  # tokens that did not have to be computed when it began
        self.first = self.last = self.ended = math.nan  # times of tokens


class Remembered:
    """A part of a prompt in the prefix index."""

    __slots__ = ("known", "pins", "start")

    def __init__(self, start: int) -> None:
        self.start = self.known = start  # positions: where it begins, and up to where keys and values are there
        self.pins = 0  # rows that use it


class Pages:
    """The memory of a replica: what rows hold, and what is remembered of rows that have ended. A scheduler's room."""

    def __init__(self, engine: Engine, prefixes: bool = True) -> None:
        """prefixes: whether anything is remembered."""
        self.page, self.free, self.prefixes = engine.page, engine.pages, prefixes
        self.ahead = 1 if engine.captured else 0
        self.evictable = 0  # pages
        self._parts: dict[int, Remembered] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # parts that no row uses, the least recently used first
        self._computing: Counter[int] = Counter()  # parts that rows are about to compute
        self._whole: dict[int, Row] = {}  # and whole prompts, by their last part
        self._awaited: set[int] = set()  # of these, those that somebody waits for

    # What the scheduler asks for.

    def admit(self, row: Row) -> int | None:
        known = end = 0
        found: list[int] = []  # parts of which something is there
        for part in row.parts:
            remembered = self._parts.get(part.key)
            if remembered is None:
                break
            found.append(part.key)
            known, end = remembered.known, end + part.tokens
            if known < end:
                break
        known = min(known, row.length - 1)
        pages, pending = known // self.page, list[tuple[int, int]]()
        for end, part in zip(accumulate(part.tokens for part in row.arrival.parts), row.arrival.parts, strict=True):
            if end // self.page > pages and self.prefixes:
                pending.append((part.key, end // self.page))
        if pending and pending[0][0] in self._computing:
            return None
        last = row.arrival.parts[-1].key
        if last in self._whole and pages == row.prompt // self.page and known < row.length - 1:
            self._awaited.add(last)
            return None
        row.pending, row.computed, row.published, row.base = pending, known, known, pages
        self._computing.update(key for key, _ in pending)
        if known < row.length - 1 and self.prefixes:
            self._whole.setdefault(last, row)
        for key in found:
            self._pin(row, key)
        return known

    def reserve(self, row: Row, n: int) -> int:
        most = row.prompt + row.arrival.output
        wanted = -(-min(row.held + n + self.ahead, most) // self.page)
        missing = wanted - row.base - row.owned
        if missing > 0:
            if not self._make_room(missing):
                return 0
            self.free -= missing
            row.owned += missing
        ready = min((row.base + row.owned) * self.page, most)
        return ready if ready == most else ready - self.ahead

    def spare(self, rows: int) -> bool:
        return self._make_room(rows)

    def release(self, row: Row) -> None:
        """Of its pages, what others may find stays as long as there is room."""
        if self.prefixes:
            row.parts = [*row.arrival.parts, Part(row.arrival.answer, max(0, row.computed - row.prompt))]
            self._publish(row, row.computed)
        self._settle(row, None)
        self.free += row.owned
        row.base = row.owned = row.computed = row.published = 0
        row.new, row.captured = True, False
        for key in reversed(row.pinned):  # so that the beginning of a prompt is the last of it to go
            part = self._parts[key]
            part.pins -= 1
            if not part.pins:
                self._idle[key] = None
                self.evictable += self._pages(part)
        row.pinned.clear()

    # What becomes of a prompt.

    def computed(self, row: Row) -> None:
        """After a pass with tokens of its prompt: others may have its whole pages."""
        row.computed = row.held
        last, pages = row.arrival.parts[-1].key, row.held // self.page
        if not row.pending and self._whole.get(last) is not row:
            return
        if row.left > 1:
            self._publish(row, pages * self.page)
            self._settle(row, pages)
        else:
            whole = last in self._awaited and self._whole.get(last) is row
            self._publish(row, row.held if whole else pages * self.page)
            self._settle(row, None)

    def _publish(self, row: Row, until: int) -> None:
        """Hand pages over to the index, up to a position."""
        start = 0
        for part in row.parts if until > row.published else ():
            end = min(start + part.tokens, until)
            if end > row.published and part.tokens:
                found = self._parts.setdefault(part.key, Remembered(start))
                self._pin(row, part.key)
                if found.known < end:
                    more = end // self.page - found.known // self.page
                    row.owned -= more
                    row.base += more
                    found.known = end
            start += part.tokens
            if start >= until:
                break
        row.published = max(row.published, until)

    def _settle(self, row: Row, pages: int | None) -> None:
        """Nobody need wait for parts that end before so many pages; None: for any."""
        passed = [key for key, until in row.pending if pages is None or until <= pages]
        for key in passed:
            self._computing[key] -= 1
            if not self._computing[key]:
                del self._computing[key]
        row.pending = row.pending[len(passed) :]
        last = row.arrival.parts[-1].key
        if pages is None and self._whole.get(last) is row:
            del self._whole[last]
            self._awaited.discard(last)

    def _pin(self, row: Row, key: int) -> None:
        if key in row.pinned:
            return
        part = self._parts[key]
        if key in self._idle:
            del self._idle[key]
            self.evictable -= self._pages(part)
        part.pins += 1
        row.pinned.append(key)

    def _pages(self, part: Remembered) -> int:
        return part.known // self.page - part.start // self.page

    def _make_room(self, pages: int) -> bool:
        """Evict until so many pages are free; False: they cannot be."""
        if pages > self.free + self.evictable:
            return False
        while self.free < pages:
            key = next(iter(self._idle))
            part = self._parts[key]
            have, missing = self._pages(part), pages - self.free
            if have > missing:
                part.known = (part.known // self.page - missing) * self.page
                self.free += missing
                self.evictable -= missing
            else:
                del self._idle[key], self._parts[key]
                self.free += have
                self.evictable -= have
        return True


class Replica:
    """Call `submit` for each arrival, and `finish` at each `due`: the end of what it computes at the moment."""

    def __init__(self, steps: Steps, prefixes: bool = True) -> None:
        self.steps, self.engine = steps, steps.engine
        self.pages = Pages(self.engine, prefixes)
        self.scheduler: Scheduler[Row] = Scheduler(
            self.pages,
            max_rows=self.engine.max_rows,
            prefill_chunk=self.engine.prefill_chunk,
            last_alone=self.engine.captured,
        )
        self.due = math.inf  # when the pass, or the last of several, ends
        self.outstanding = 0  # requests that have not ended
        self.busy = 0.0  # seconds
        self.prompt_tokens = self.hits = 0
        self.gaps: Counter[int] = Counter()  # between two tokens of a row, by `bin_of`
        self._began, self._passes, self._seconds, self._slope = 0.0, 0, 0.0, 0.0
        self._fed: dict[Row, int] = {}
        self._takers: Sequence[Row] = ()  # rows that get a token in each of these passes
        self._behind = 0.0  # seconds of prompts that the next pass waits for

    def submit(self, row: Row, now: float) -> None:
        self.outstanding += 1
        self.scheduler.submit(row)
        if self.due == math.inf:
            self._begin(now)
        elif self._passes > 1:  # the row may come in after the pass that runs
            self._passes = self._passes_by(now - self._began)
            self.due = self._end_of(self._passes)

    def finish(self) -> list[Row]:
        """At `due`: rows that have ended. What comes next has begun then."""
        passes, began, self.busy = self._passes, self._began, self.busy + self.due - self._began
        now = self.due
        first = began + self._seconds  # when the first of these passes ended
        steady, ended = 0, []
        for row in self._takers:
            row.length += passes
            row.held += passes - 1
            row.left_to_make -= passes
            row.computed = row.held
            if row.held > row.room:
                row.room = self.pages.reserve(row, 0)
            if row.last == began:
                steady += 1
            elif row.last != row.last:  # it has none yet
                row.first = first
            else:
                self.gaps[bin_of(first - row.last)] += 1
            row.last = now
            if not row.left_to_make:
                row.ended = now
                ended.append(row)
        self._count_gaps(steady, len(self._takers))
        for row, n in self._fed.items():
            if n > 1 or row.pending:
                self.pages.computed(row)
        self.scheduler.passes += passes - 1
        for row in ended:
            self.scheduler.end(row)
        self.outstanding -= len(ended)
        if self.scheduler.running or self.scheduler.waiting:
            self._begin(now)
        else:
            self.due, self._behind = math.inf, 0.0
        return ended

    def busy_since(self, now: float) -> float:
        """Seconds of what it computes at the moment."""
        return 0.0 if self.due == math.inf else min(now, self.due) - self._began

    def _begin(self, now: float) -> None:
        """The next pass, and as many more as are sure to be like it."""
        scheduler, preempted = self.scheduler, self.scheduler.preemptions
        fed = scheduler.schedule()
        if not fed:
            raise RuntimeError(f"a request of {scheduler.waiting[0].length} tokens fits no replica: give it more pages")
        captured = self.engine.captured
        takers, joining = list[Row](), list[Row]()  # who gets a token, and who will from the next pass on
        decoding, lengths, begun = list[int](), list[tuple[int, int]](), 0
        for row, n in fed.items():
            if row.new:
                row.new, begun = False, begun + 1
                if row.known is None:
                    row.known = row.held - n
                    self.hits += row.known
                    self.prompt_tokens += row.prompt
            left = row.length - row.held  # tokens of the prompt
            if n > 1 or left:
                lengths.append((n, row.held))
            else:
                decoding.append(row.held)
            if not left:
                (joining if captured and not row.captured else takers).append(row)
        prompts = Pass(0, 0, sum(n for n, _ in lengths), sum(pairs(*each) for each in lengths), len(lengths))
        alike = not (lengths or joining or begun or self._behind) and preempted == scheduler.preemptions
        if captured:
            seconds, made_of = self._captured(takers, joining, prompts, begun)
            takers = takers or joining
        else:
            made_of = prompts._replace(rows=len(decoding), positions=sum(decoding), begun=begun)
            seconds = self.steps.seconds(made_of)
        self._began, self._seconds, self._fed, self._takers = now, seconds, fed, takers
        self._passes = self._alike(takers) if alike else 1
        self._slope = self.steps.growth(made_of) if self._passes > 1 else 0.0
        self.due = self._end_of(self._passes)

    def _captured(self, takers: Sequence[Row], joining: Sequence[Row], prompts: Pass, begun: int) -> tuple[float, Pass]:
        """Seconds of a pass, and what its step is made of.

        Rows that join those of a step that is launched get their token from the next one.
        """
        held = [row.held for row in takers or joining]
        made_of = Pass(len(held), sum(held), begun=begun, longest=max(held, default=0))
        seconds = self._behind + self.steps.seconds(made_of)
        self._behind = self.steps.seconds(prompts)
        if not takers or prompts.tokens <= SHORT:  # nothing was launched before, or the host launches it meanwhile
            seconds, self._behind = seconds + self._behind, 0.0
        for row in joining:
            row.captured = True
            if takers:
                row.held -= 1
        return seconds, made_of

    def _alike(self, takers: Sequence[Row]) -> int:
        passes = min(row.left_to_make for row in takers)
        spare = (self.pages.free + self.pages.evictable) // len(takers) - 2  # pages that each row may take
        return max(1, min(passes, spare * self.engine.page))

    def _end_of(self, passes: int) -> float:
        return self._began + passes * self._seconds + self._slope * (passes * (passes - 1) / 2)

    def _passes_by(self, seconds: float) -> int:
        """How many of these passes have begun by then; at least one."""
        if self._slope > 0:
            linear = self._seconds - self._slope / 2
            count = (math.sqrt(linear * linear + 2 * self._slope * seconds) - linear) / self._slope
        else:
            count = seconds / self._seconds if self._seconds else 0.0
        return min(self._passes, max(1, math.ceil(count - 1e-9)))

    def _count_gaps(self, steady: int, rows: int) -> None:
        """Of rows whose last token came from the pass before; and all rows, from the second of these passes on."""
        if steady:
            self.gaps[bin_of(self._seconds)] += steady
        at = 1
        while at < self._passes:  # passes grow longer by little: those of a bin are counted at once
            gap = self._seconds + self._slope * at
            more = self._passes - at
            if self._slope > 0:
                more = min(more, 1 + int(gap / BINS / self._slope))
            self.gaps[bin_of(gap)] += more * rows
            at += more


def bin_of(seconds: float) -> int:
    return math.floor(BINS * math.log(max(seconds, 1e-9)))


def seconds_of(bin: int) -> float:
    return math.exp((bin + 0.5) / BINS)
