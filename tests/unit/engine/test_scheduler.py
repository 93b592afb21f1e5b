"""The scheduler by itself: rules, then thousands of simulated arrivals."""

from __future__ import annotations

import random

import pytest
from amount import amount
from hypothesis import given, settings
from hypothesis import strategies as st

from infer.engine.scheduler import PATIENCE, Job, Scheduler

PAGE = 4


class Pages:
    """A room of so many pages: counts, and checks what it is asked."""

    def __init__(self, count: int, known: dict[int, int] | None = None) -> None:
        self.count, self.known = count, known or {}
        self.held: dict[Job, int] = {}
        self.waits: set[Job] = set()  # for whom a row computes more
        self.admitted: list[Job] = []

    @property
    def free(self) -> int:
        return self.count - sum(self.held.values())

    def admit(self, job: Job) -> int | None:
        assert job not in self.held
        if job in self.waits:
            return None
        self.held[job] = 0
        self.admitted.append(job)
        return min(self.known.get(id(job), 0), job.length - 1)

    def reserve(self, job: Job, n: int) -> int:
        missing = -(-(job.held + n) // PAGE) - self.held[job]
        if missing > self.free:
            return 0
        self.held[job] += max(0, missing)
        return self.held[job] * PAGE

    def spare(self, rows: int) -> bool:
        return self.free >= rows

    def release(self, job: Job) -> None:
        del self.held[job]


def scheduler(pages: int = 1000, rows: int = 4, tokens: int = 10, **options: bool) -> Scheduler:
    return Scheduler(Pages(pages), max_rows=rows, prefill_chunk=tokens, **options)


def chose(jobs: dict[Job, int]) -> None:
    """All rows that have fed everything get one token more."""
    for job in jobs:
        if job.whole or job.left == 0:
            job.length += 1


def submitted(to: Scheduler, *lengths: int, priority: int = 0) -> list[Job]:
    jobs = [Job(length, priority) for length in lengths]
    for job in jobs:
        to.submit(job)
    return jobs


class TestPasses:
    def test_prompts_share_a_pass(self) -> None:
        queue = scheduler()
        jobs = submitted(queue, 3, 4)
        assert queue.schedule() == dict(zip(jobs, (3, 4), strict=True))

    def test_a_long_prompt_is_fed_in_chunks_beside_rows_that_decode(self) -> None:
        queue = scheduler()
        a, b = submitted(queue, 3, 25)
        passes = []
        for _ in range(5):
            fed = queue.schedule()
            passes.append((fed.get(a), fed.get(b)))
            chose(fed)
        assert passes == [(3, 7), (1, 10), (1, 8), (1, 1), (1, 1)]

    def test_rows_that_decode_go_first(self) -> None:
        """A prompt that came before them does not delay them."""
        queue = scheduler()
        long, *_ = submitted(queue, 100)
        queue.schedule()
        short, *_ = submitted(queue, 1)
        queue.schedule()
        assert short not in queue.running  # the chunk takes all of the pass
        for _ in range(9):
            chose(queue.schedule())
        fed = queue.schedule()
        assert fed == {long: 1, short: 1}
        chose(fed)
        assert list(queue.schedule().items()) == [(long, 1), (short, 1)]

    def test_the_last_token_alone(self) -> None:
        queue = scheduler(last_alone=True)
        (job,) = submitted(queue, 14)
        assert [queue.schedule()[job] for _ in range(3)] == [10, 3, 1]
        assert job.left == 0
        (single,) = submitted(queue, 1)
        chose({job: 1})
        assert queue.schedule() == {job: 1, single: 1}

    def test_what_is_known_is_not_fed(self) -> None:
        queue = scheduler()
        job, same = Job(9), Job(9)
        queue.room.known = {id(job): 6, id(same): 9}  # type: ignore[attr-defined]
        queue.submit(job)
        queue.submit(same)
        assert queue.schedule() == {job: 3, same: 1}

    def test_rows_at_once(self) -> None:
        queue = scheduler(rows=2)
        a, b, c = submitted(queue, 1, 1, 1)
        assert list(queue.schedule()) == [a, b]
        queue.end(a)
        chose({b: 1})
        assert list(queue.schedule()) == [b, c]

    def test_nothing_to_do(self) -> None:
        assert scheduler().schedule() == {}

    @pytest.mark.parametrize(("rows", "tokens"), [(0, 5), (5, 0), (8, -3), (2.5, 1)])
    def test_something_must_get_on(self, rows: int, tokens: int) -> None:
        with pytest.raises(ValueError, match="must be a whole number, 1 or more"):
            scheduler(rows=rows, tokens=tokens)

    def test_one_that_waits_for_another_lets_the_next_pass(self) -> None:
        queue = scheduler()
        a, twin, c = submitted(queue, 3, 3, 3)
        queue.room.waits = {twin}  # type: ignore[attr-defined]
        assert list(queue.schedule()) == [a, c]
        queue.room.waits = set()  # type: ignore[attr-defined]
        assert twin in queue.schedule()

    def test_a_row_beyond_its_context(self) -> None:
        """It feeds everything anew each time, and holds no pages."""
        queue = scheduler()
        (job,) = submitted(queue, 3)
        queue.schedule()
        job.whole = 30
        (other,) = submitted(queue, 5)
        assert queue.schedule() == {job: 30, other: 5}


class TestOrder:
    def test_of_arrival(self) -> None:
        queue = scheduler(rows=1)
        jobs = submitted(queue, 1, 1, 1)
        order = []
        for _ in jobs:
            (job,) = queue.schedule()
            order.append(job)
            queue.end(job)
        assert order == jobs

    def test_of_priorities(self) -> None:
        queue = scheduler(rows=1)
        (low,) = submitted(queue, 1, priority=1)
        (high,) = submitted(queue, 1, priority=-1)
        (middle,) = submitted(queue, 1)
        assert queue.waiting == [high, middle, low]

    def test_nobody_waits_for_ever(self) -> None:
        """However many of a higher priority keep coming."""
        queue = scheduler(rows=1)
        (low,) = submitted(queue, 1, priority=1)
        for _ in range(2 * PATIENCE):
            submitted(queue, 1)
            (job,) = queue.schedule()
            queue.end(job)
            if job is low:
                return
        raise AssertionError("it never ran")


class TestRoom:
    def test_admitted_by_the_pages_of_a_chunk(self) -> None:
        """Not by all that it may come to hold."""
        queue = scheduler(pages=6, tokens=10)
        (job,) = submitted(queue, 40)
        assert queue.schedule() == {job: 10}

    def test_the_first_that_does_not_fit_holds_up_those_behind(self) -> None:
        """Or a long prompt would never run among short ones."""
        queue = scheduler(pages=5, tokens=100)
        a, _, _ = submitted(queue, 12, 12, 1)
        assert list(queue.schedule()) == [a]

    def test_a_page_is_left_for_each_row(self) -> None:
        """What was just admitted should not be preempted at once."""
        queue = scheduler(pages=2, tokens=100)
        a, b = submitted(queue, 4, 4)
        assert list(queue.schedule()) == [a]
        queue.room.count = 3  # type: ignore[attr-defined]
        assert b in queue.schedule()

    def test_the_youngest_is_preempted(self) -> None:
        queue = scheduler(pages=4, tokens=100)
        a, b = submitted(queue, 7, 4)
        chose(queue.schedule())
        chose(queue.schedule())
        assert queue.schedule() == {a: 1}  # to its third page, which was the other's second
        assert (b.running, b.held, queue.waiting, queue.preemptions) == (False, 0, [b], 1)
        queue.end(a)
        assert queue.schedule() == {b: b.length}

    def test_the_preempted_is_first_again(self) -> None:
        queue = scheduler(pages=4, tokens=100)
        _, b, c = submitted(queue, 7, 4, 4)
        chose(queue.schedule())
        chose(queue.schedule())
        queue.schedule()
        assert queue.waiting == [b, c]

    def test_preempted_after_it_was_given_its_tokens(self) -> None:
        """Rows that decode go first, but a prompt that came before them has the first right to pages."""
        queue = scheduler(pages=8, tokens=10)
        (long,) = submitted(queue, 21)
        queue.schedule()
        (short,) = submitted(queue, 1)
        fed = queue.schedule()
        assert fed == {long: 10}
        fed = queue.schedule()
        assert fed == {long: 1, short: 1}
        chose(fed)
        long.length = 32  # as if its prompt were longer
        assert queue.schedule() == {long: 10}
        assert not short.running

    def test_nobody_is_admitted_while_others_have_to_go(self) -> None:
        queue = scheduler(pages=14, tokens=10)
        a, b = submitted(queue, 11, 30)
        while b.left != 1:
            chose(queue.schedule())
        queue.room.count = queue.room.count - queue.room.free  # type: ignore[attr-defined]
        while not queue.preemptions:
            fed = queue.schedule()
            chose(fed)
        assert list(fed) == [a]
        assert queue.waiting == [b]
        assert b in queue.schedule()

    def test_no_room_even_alone(self) -> None:
        queue = scheduler(pages=2, tokens=100)
        (job,) = submitted(queue, 30)
        assert queue.schedule() == {}
        assert queue.stuck is job
        queue.end(job)
        submitted(queue, 3)
        assert queue.schedule()
        assert queue.stuck is None

    def test_ended_while_it_waits(self) -> None:
        queue = scheduler()
        a, b = submitted(queue, 1, 1)
        queue.end(a)
        assert list(queue.schedule()) == [b]


def simulate(seed: int, count: int, pages: int, rows: int, tokens: int, last_alone: bool) -> list[tuple[int, ...]]:
    """Random arrivals, ends and aborts until all are through, checking each pass; returns the schedule."""
    chance = random.Random(seed)
    room = Pages(pages)
    queue = Scheduler(room, max_rows=rows, prefill_chunk=tokens, last_alone=last_alone)
    most = (pages - 1) * PAGE  # tokens that one may come to have
    arrivals = sorted((chance.randrange(count * 2), i) for i in range(count))
    ends, numbers, schedule, since = dict[Job, int](), dict[Job, int](), list[tuple[int, ...]](), dict[Job, int]()
    at = 0
    while arrivals or queue.waiting or queue.running:
        while arrivals and arrivals[0][0] <= at:
            _, number = arrivals.pop(0)
            length = chance.randint(1, most // 2)
            (job,) = submitted(queue, length, priority=chance.choice([0, 0, 0, 1]))
            ends[job], numbers[job], since[job] = chance.randint(length, most), number, at
        if queue.waiting and chance.random() < 0.05:
            queue.end(chance.choice(queue.waiting))
        if queue.running and chance.random() < 0.05:
            queue.end(chance.choice(queue.running))
        decoding = [job for job in queue.running if job.left == 1]
        oldest = queue.running[0] if queue.running else None
        before = queue.preemptions
        fed = queue.schedule()
        at += 1
        schedule.append(tuple(x for job, n in fed.items() for x in (numbers[job], n)))
        # Within its bounds; all that decoded goes on, but for the preempted; and the oldest row gets on.
        assert sum(n for job, n in fed.items() if job not in decoding) <= tokens
        assert len(queue.running) <= rows
        assert all(job in fed or not job.running for job in decoding)
        assert set(fed) <= set(queue.running)
        assert queue.preemptions > before or not any(job.held == 0 for job in queue.running)
        assert queue.stuck is None
        assert oldest is None or oldest in fed
        assert sorted(queue.waiting, key=lambda job: job.order) == queue.waiting
        assert not {*queue.waiting} & {*queue.running}
        assert {*room.held} == {*queue.running}
        assert room.free >= 0
        assert bool(fed) or not (queue.waiting or queue.running)
        for job, n in fed.items():
            assert n >= 1
            assert job.held <= job.length
            assert room.held[job] * PAGE >= job.held
            if job.left == 0:
                job.length += 1
                if job.length > ends[job]:
                    queue.end(job)
    assert room.free == pages
    assert at < 40 * count * most  # it comes to an end
    return schedule


@settings(max_examples=amount(500, 60), deadline=None)
@given(st.data())
def test_any_arrivals(data: st.DataObject) -> None:
    rows = data.draw(st.integers(1, 8))
    simulate(
        data.draw(st.integers(0, 10**6)),
        data.draw(st.integers(1, 30)),
        data.draw(st.integers(4, 40)),
        rows,
        rows + data.draw(st.integers(1, 30)),
        data.draw(st.booleans()),
    )


def test_thousands_of_arrivals() -> None:
    """And the same again: a schedule depends on what was submitted, and on nothing else."""
    count = amount(5000, 1000)
    first, second = (simulate(7, count, 64, 16, 48, False) for _ in range(2))
    assert first == second
