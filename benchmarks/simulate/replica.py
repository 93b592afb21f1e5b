"""One replica without a model: the real scheduler over counted pages, with passes that take their fitted time.

Passes in which the same rows decode are simulated together: until a row ends, a request arrives or pages may run out.
Rows, chunks, preemption and waiting for a row that computes the same prompt are done by the real scheduler
(`infer.engine.scheduler`); the prefix index is simulated here, in complete parts of prompts.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, ClassVar

from infer.engine.scheduler import Scheduler
from infer.engine.sequence import Status
from simulate.steps import SHORT, Engine, Pass, Steps, pairs
from simulate.traces import Arrival, Part

BINS = 200  # of a histogram, per factor of e: the error is at most half a percent


class Row:
    """A request in a replica. The first block has the attributes of a `Sequence` that the scheduler uses."""

    recompute_tokens = num_recompute_tokens = priority = 0
    draft_token_ids: ClassVar[list[int]] = []

    def __init__(self, index: int, request: Arrival) -> None:
        self.status, self.arrival, self.sort_key = Status.WAITING, 0, (0, 0)
        self.num_tokens = self.prompt = request.prompt
        self.num_computed_tokens = self.num_prefill_tokens = self.num_reserved_slots = 0
        self.capacity = request.prompt + request.output

        self.index, self.request, self.left_to_make = index, request, request.output
        self.parts: list[Part] = list(request.parts)
        self.published = 0  # tokens of these in the prefix index
        self.pending: list[tuple[int, int]] = []  # keys of parts to compute, and the page count at which each ends
        self.pinned: list[int] = []  # keys of parts that must not be evicted
        self.base = self.owned = 0  # pages in the index, and private pages
        self.new = True  # whether it has not been in a pass
        self.captured = False  # whether it is in the step that is launched ahead
        self.known: int | None = None  # cached tokens when it started
        self.first = self.last = self.ended = math.nan  # times of tokens

    @property
    def is_prefill(self) -> bool:
        return self.num_computed_tokens < self.num_prefill_tokens


class Remembered:
    """A part of a prompt in the prefix index."""

    __slots__ = ("known", "pins", "start")

    def __init__(self, start: int) -> None:
        self.start = self.known = start  # its first position, and the end of its cached positions
        self.pins = 0  # rows that use it


class Pages:
    """The memory of a replica: the pages of rows, and the cached pages of finished rows. The scheduler's allocator."""

    def __init__(self, engine: Engine, prefixes: bool = True) -> None:
        """prefixes: whether prompts are cached."""
        self.page, self.num_free, self.prefixes = engine.page, engine.pages, prefixes
        self.num_lookahead_slots = 1 if engine.captured else 0
        self.evictable = 0  # pages
        self._parts: dict[int, Remembered] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # parts that no row uses, the least recently used first
        self._computing: Counter[int] = Counter()  # parts that rows are about to compute
        self._whole: dict[int, Row] = {}  # and whole prompts, by their last part
        self._awaited: set[int] = set()  # of these, the ones that a row waits for

    # What the scheduler calls.

    def allocate(self, row: Row) -> bool:
        known = end = 0
        found: list[int] = []  # parts that are cached, the last perhaps partially
        for part in row.parts:
            remembered = self._parts.get(part.key)
            if remembered is None:
                break
            found.append(part.key)
            known, end = remembered.known, end + part.tokens
            if known < end:
                break
        known = min(known, row.num_tokens - 1)
        pages, pending = known // self.page, list[tuple[int, int]]()
        for end, part in zip(accumulate(part.tokens for part in row.request.parts), row.request.parts, strict=True):
            if end // self.page > pages and self.prefixes:
                pending.append((part.key, end // self.page))
        if pending and pending[0][0] in self._computing:
            return False
        last = row.request.parts[-1].key
        if last in self._whole and pages == row.prompt // self.page and known < row.num_tokens - 1:
            self._awaited.add(last)
            return False
        row.pending, row.num_computed_tokens, row.published, row.base = pending, known, known, pages
        row.num_prefill_tokens = row.num_tokens - self.num_lookahead_slots  # captured steps compute the last token
        self._computing.update(key for key, _ in pending)
        if known < row.num_tokens - 1 and self.prefixes:
            self._whole.setdefault(last, row)
        for key in found:
            self._pin(row, key)
        return True

    def reserve(self, row: Row, n: int) -> bool:
        most = row.prompt + row.request.output
        needed = -(-min(row.num_computed_tokens + n + self.num_lookahead_slots, most) // self.page)
        missing = needed - row.base - row.owned
        if missing > 0:
            if not self._make_room(missing):
                return False
            self.num_free -= missing
            row.owned += missing
        row.num_reserved_slots = (row.base + row.owned) * self.page
        return True

    def can_grow(self, rows: int) -> bool:
        return self._make_room(rows)

    def free(self, row: Row) -> None:
        """Pages that others may share stay cached until memory is needed."""
        if self.prefixes:
            row.parts = [*row.request.parts, Part(row.request.answer, max(0, row.num_computed_tokens - row.prompt))]
            self._publish(row, row.num_computed_tokens)
        self._settle(row, None)
        self.num_free += row.owned
        row.base = row.owned = row.num_reserved_slots = row.published = 0
        row.new, row.captured = True, False
        for key in reversed(row.pinned):  # so that the start of a prompt is evicted last
            part = self._parts[key]
            part.pins -= 1
            if not part.pins:
                self._idle[key] = None
                self.evictable += self._pages(part)
        row.pinned.clear()

    # What becomes of a prompt.

    def computed(self, row: Row) -> None:
        """After a pass with tokens of its prompt: others may share its full pages."""
        held = row.num_computed_tokens
        last, pages = row.request.parts[-1].key, held // self.page
        if not row.pending and self._whole.get(last) is not row:
            return
        if row.num_tokens - held > 1:
            self._publish(row, pages * self.page)
            self._settle(row, pages)
        else:
            whole = last in self._awaited and self._whole.get(last) is row
            self._publish(row, held if whole else pages * self.page)
            self._settle(row, None)

    def _publish(self, row: Row, until: int) -> None:
        """Move pages to the index, up to a position."""
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
        """Stop rows from waiting for parts that end within `pages` pages; None: for any part."""
        passed = [key for key, until in row.pending if pages is None or until <= pages]
        for key in passed:
            self._computing[key] -= 1
            if not self._computing[key]:
                del self._computing[key]
        row.pending = row.pending[len(passed) :]
        last = row.request.parts[-1].key
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
        """Evict until `pages` pages are free; False: impossible."""
        if pages > self.num_free + self.evictable:
            return False
        while self.num_free < pages:
            key = next(iter(self._idle))
            part = self._parts[key]
            have, missing = self._pages(part), pages - self.num_free
            if have > missing:
                part.known = (part.known // self.page - missing) * self.page
                self.num_free += missing
                self.evictable -= missing
            else:
                del self._idle[key], self._parts[key]
                self.num_free += have
                self.evictable -= have
        return True


class Replica:
    """Call `submit` for each arrival, and `finish` at each `due`, the end of the current passes."""

    def __init__(self, steps: Steps, prefixes: bool = True) -> None:
        self.steps, self.engine = steps, steps.engine
        self.pages = Pages(self.engine, prefixes)
        self.scheduler: Any = Scheduler(
            self.pages,  # type: ignore[arg-type]  # a Row is no Sequence
            max_rows=self.engine.max_rows,
            prefill_chunk=self.engine.prefill_chunk,
        )
        self.due = math.inf  # when the pass, or the last of several, ends
        self.outstanding = 0  # requests that have not ended
        self.busy = 0.0  # seconds
        self.prompt_tokens = self.hits = 0
        self.gaps: Counter[int] = Counter()  # between two tokens of a row, by `bin_of`
        self._began, self._passes, self._seconds, self._slope = 0.0, 0, 0.0, 0.0
        self._fed: dict[Row, int] = {}
        self._prefilled: Sequence[Row] = ()  # rows of which a part of the prompt is computed
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
        """End the passes that are due, and start the next ones. Returns the rows that have ended."""
        passes, began, self.busy = self._passes, self._began, self.busy + self.due - self._began
        now = self.due
        first = began + self._seconds  # when the first of these passes ended
        steady, ended = 0, []
        for row in self._prefilled:
            row.num_computed_tokens += self._fed[row]
        for row in self._takers:
            row.num_computed_tokens = row.num_tokens + passes - 1
            row.num_tokens += passes
            row.left_to_make -= passes
            if row.num_computed_tokens > row.num_reserved_slots:
                self.pages.reserve(row, 0)
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
        self.scheduler.num_steps += passes - 1
        for row in ended:
            self.scheduler.finish(row)
        self.outstanding -= len(ended)
        if self.scheduler.running or self.scheduler.waiting:
            self._begin(now)
        else:
            self.due, self._behind = math.inf, 0.0
        return ended

    def busy_since(self, now: float) -> float:
        """Seconds of the current passes until now."""
        return 0.0 if self.due == math.inf else min(now, self.due) - self._began

    def _begin(self, now: float) -> None:
        """Start the next pass, together with as many more as are certain to be equal."""
        scheduler = self.scheduler
        fed: dict[Row, int] = dict(scheduler.schedule())
        if not fed:
            raise RuntimeError(
                f"a request of {scheduler.waiting[0].num_tokens} tokens fits no replica: give it more pages"
            )
        captured = self.engine.captured
        takers, joining, prefilled = list[Row](), list[Row](), list[Row]()  # joining: a token from the next pass on
        decoding, lengths, begun = list[int](), list[tuple[int, int]](), 0
        for row, n in fed.items():
            held = row.num_computed_tokens + n
            if row.new:
                row.new, begun = False, begun + 1
                if row.known is None:
                    row.known = row.num_computed_tokens
                    self.hits += row.known
                    self.prompt_tokens += row.prompt
            left = row.num_tokens - held  # tokens of the prompt
            if n > 1 or left:
                lengths.append((n, held))
            else:
                decoding.append(held)
            (prefilled if left else joining if captured and not row.captured else takers).append(row)
        prompts = Pass(0, 0, sum(n for n, _ in lengths), sum(pairs(*each) for each in lengths), len(lengths))
        alike = not (lengths or joining or begun or self._behind or scheduler.preempted)
        if captured:
            seconds, made_of = self._captured(takers, joining, prompts, begun)
            takers = takers or joining
        else:
            made_of = prompts._replace(rows=len(decoding), positions=sum(decoding), begun=begun)
            seconds = self.steps.seconds(made_of)
        self._began, self._seconds, self._fed, self._prefilled, self._takers = now, seconds, fed, prefilled, takers
        self._passes = self._alike(takers) if alike else 1
        self._slope = self.steps.growth(made_of) if self._passes > 1 else 0.0
        self.due = self._end_of(self._passes)

    def _captured(self, takers: Sequence[Row], joining: Sequence[Row], prompts: Pass, begun: int) -> tuple[float, Pass]:
        """Seconds of a pass, and the work of its captured step.

        Rows that join after the step was launched get their token from the next one.
        """
        held = [row.num_computed_tokens + 1 for row in takers or joining]
        made_of = Pass(len(held), sum(held), begun=begun, longest=max(held, default=0))
        seconds = self._behind + self.steps.seconds(made_of)
        self._behind = self.steps.seconds(prompts)
        if not takers or prompts.tokens <= SHORT:  # nothing was launched before, or the host launches it meanwhile
            seconds, self._behind = seconds + self._behind, 0.0
        for row in joining:
            row.captured = True
        return seconds, made_of

    def _alike(self, takers: Sequence[Row]) -> int:
        passes = min(row.left_to_make for row in takers)
        spare = (self.pages.num_free + self.pages.evictable) // len(takers) - 2  # pages that each row may take
        return max(1, min(passes, spare * self.engine.page))

    def _end_of(self, passes: int) -> float:
        return self._began + passes * self._seconds + self._slope * (passes * (passes - 1) / 2)

    def _passes_by(self, seconds: float) -> int:
        """How many of these passes have started after `seconds`; at least one."""
        if self._slope > 0:
            linear = self._seconds - self._slope / 2
            count = (math.sqrt(linear * linear + 2 * self._slope * seconds) - linear) / self._slope
        else:
            count = seconds / self._seconds if self._seconds else 0.0
        return min(self._passes, max(1, math.ceil(count - 1e-9)))

    def _count_gaps(self, steady: int, rows: int) -> None:
        """Count the gaps of rows with a token in the previous pass; and of all rows from the second pass on."""
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
