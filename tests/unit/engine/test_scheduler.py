"""The scheduler by itself: rules, then thousands of simulated arrivals."""

from __future__ import annotations

import random

import pytest
from amount import amount
from hypothesis import given, settings
from hypothesis import strategies as st
from mocks import MockTokenizer
from tiny import make_tiny_config

from infer import SamplingParams
from infer.engine.scheduler import FIRST_ROWS, PRIORITY_STEP, Scheduler
from infer.engine.sequence import Sequence, Status

PAGE = 4


CONFIG = make_tiny_config(max_position_embeddings=10**6)
NO_TEXT = MockTokenizer([])


class Pages:
    """An allocator of so many pages, which checks what it is asked."""

    num_lookahead_slots = 0

    def __init__(self, count: int, last_alone: bool = False) -> None:
        self.count, self.last_alone = count, last_alone
        self.cached: dict[Sequence, int] = {}  # tokens found in the prefix cache
        self.held: dict[Sequence, int] = {}
        self.waits: set[Sequence] = set()  # another sequence computes their prefix

    @property
    def free_pages(self) -> int:
        return self.count - sum(self.held.values())

    def allocate(self, sequence: Sequence) -> bool:
        assert sequence not in self.held
        if sequence in self.waits:
            return False
        self.held[sequence] = 0
        sequence.num_computed_tokens = min(self.cached.get(sequence, 0), sequence.num_tokens - 1)
        sequence.num_prefill_tokens = sequence.num_tokens - self.last_alone
        return True

    def reserve(self, sequence: Sequence, n: int) -> bool:
        missing = -(-(sequence.num_computed_tokens + n) // PAGE) - self.held[sequence]
        if missing > self.free_pages:
            return False
        self.held[sequence] += max(0, missing)
        sequence.num_reserved_slots = self.held[sequence] * PAGE
        return True

    def can_grow(self, count: int) -> bool:
        return self.free_pages >= count

    def free(self, sequence: Sequence) -> None:
        del self.held[sequence]
        sequence.num_reserved_slots = 0


def scheduler(pages: int = 1000, rows: int = 4, tokens: int = 10, last_alone: bool = False) -> Scheduler:
    return Scheduler(Pages(pages, last_alone), max_rows=rows, prefill_chunk=tokens)


def sequence_of(length: int, priority: int = 0) -> Sequence:
    return Sequence(CONFIG, NO_TEXT, [0] * length, SamplingParams(max_new_tokens=10**5), priority=priority)


def scheduled(queue: Scheduler) -> dict[Sequence, int]:
    return dict(queue.schedule())


def commit(plan: dict[Sequence, int]) -> None:
    """As the engine does: what was scheduled is computed, and complete sequences get one token more."""
    for sequence, n in plan.items():
        if not sequence.recompute_tokens:
            sequence.num_computed_tokens += n
        if sequence.recompute_tokens or sequence.num_computed_tokens == sequence.num_tokens:
            sequence.append_token(0)


def step(queue: Scheduler) -> dict[Sequence, int]:
    plan = scheduled(queue)
    commit(plan)
    return plan


def submitted(to: Scheduler, *lengths: int, priority: int = 0) -> list[Sequence]:
    sequences = [sequence_of(length, priority) for length in lengths]
    for sequence in sequences:
        to.submit(sequence)
    return sequences


def left(sequence: Sequence) -> int:
    return sequence.num_tokens - sequence.num_computed_tokens


class TestSharedPasses:
    """Where prompts share a pass with the sequences that decode, as on a GPU."""

    def queue(self, tokens: int, rows: int) -> Scheduler:
        return Scheduler(Pages(10**4), max_rows=rows, prefill_chunk=tokens, shared=True)

    def test_twice_as_many_where_none_decodes(self) -> None:
        queue = self.queue(32, 16)
        a, b = submitted(queue, 31, 200)
        assert scheduled(queue) == {a: 31, b: 64 - 30 - 1}  # the last token of a is in its row of the step
        (c,) = submitted(other := self.queue(32, 16), 60)
        assert scheduled(other) == {c: 60}

    def test_few_prompts_first(self) -> None:
        """The GPU computes them while the others are admitted."""
        queue = self.queue(256, 64)
        prompts = submitted(queue, *[3] * 20)
        assert scheduled(queue) == dict.fromkeys(prompts[:FIRST_ROWS], 3)
        step(queue)
        assert set(scheduled(queue)) == {*prompts}
        alone = Scheduler(Pages(100), max_rows=64, prefill_chunk=256)  # without shared passes: as many as fit
        submitted(alone, *[3] * 20)
        assert len(scheduled(alone)) == 20

    def test_rows_are_a_power_of_two(self) -> None:
        queue = self.queue(32, 16)
        rows = submitted(queue, *[1] * 5)
        step(queue)
        (long,) = submitted(queue, 100)
        assert scheduled(queue) == dict.fromkeys(rows, 1) | {long: 32 - 8}

    @pytest.mark.parametrize("seed", range(20))
    def test_a_pass_never_has_more_tokens(self, seed: int) -> None:
        chance = random.Random(seed)
        queue = self.queue(32, 16)
        for _ in range(60):
            submitted(queue, *(chance.randint(1, 90) for _ in range(chance.choice((0, 0, 1, 5)))))
            decoding = sum(not sequence.is_prefill for sequence in queue.running)
            plan = step(queue)
            entered = sum(not sequence.is_prefill and left(sequence) == 1 for sequence in plan)
            prompts = sum(plan.values()) - entered  # without the tokens in rows of the step
            size = prompts + (1 << (entered - 1).bit_length() if entered else 0)
            assert size <= (32 if decoding else 64)
            for sequence in [each for each in queue.running if chance.random() < 0.2]:
                queue.finish(sequence)
        assert queue.num_steps == 60

    def test_not_with_so_many_rows_that_prompts_would_starve(self) -> None:
        queue = self.queue(32, 17)
        (long,) = submitted(queue, 100)
        assert scheduled(queue) == {long: 32}


class TestPasses:
    def test_prompts_share_a_pass(self) -> None:
        queue = scheduler()
        jobs = submitted(queue, 3, 4)
        assert scheduled(queue) == dict(zip(jobs, (3, 4), strict=True))

    def test_a_long_prompt_is_fed_in_chunks_beside_rows_that_decode(self) -> None:
        queue = scheduler()
        a, b = submitted(queue, 3, 25)
        passes = []
        for _ in range(5):
            fed = step(queue)
            passes.append((fed.get(a), fed.get(b)))
        assert passes == [(3, 7), (1, 10), (1, 8), (1, 1), (1, 1)]

    def test_rows_that_decode_go_first(self) -> None:
        """A prompt that came before them does not delay them."""
        queue = scheduler()
        long, *_ = submitted(queue, 100)
        step(queue)
        short, *_ = submitted(queue, 1)
        step(queue)
        assert short not in queue.running  # the chunk takes all of the budget
        for _ in range(8):
            step(queue)
        assert step(queue) == {long: 1, short: 1}
        assert list(step(queue).items()) == [(long, 1), (short, 1)]

    def test_the_last_token_alone(self) -> None:
        queue = scheduler(last_alone=True)
        (job,) = submitted(queue, 14)
        assert [step(queue)[job] for _ in range(3)] == [10, 3, 1]
        assert left(job) == 1
        (single,) = submitted(queue, 1)
        assert scheduled(queue) == {job: 1, single: 1}

    def test_what_is_known_is_not_fed(self) -> None:
        queue = scheduler()
        job, same = sequence_of(9), sequence_of(9)
        queue.allocator.cached = {job: 6, same: 9}  # type: ignore[attr-defined]
        queue.submit(job)
        queue.submit(same)
        assert scheduled(queue) == {job: 3, same: 1}

    def test_rows_at_once(self) -> None:
        queue = scheduler(rows=2)
        a, b, c = submitted(queue, 1, 1, 1)
        assert list(step(queue)) == [a, b]
        queue.finish(a)
        assert list(scheduled(queue)) == [b, c]

    def test_nothing_to_do(self) -> None:
        assert scheduler().schedule() == []

    @pytest.mark.parametrize("rows", [0, -3, 2.5])
    def test_something_must_get_on(self, rows: int) -> None:
        with pytest.raises(ValueError, match="max_rows must be an integer, 1 or more"):
            scheduler(rows=rows)

    def test_one_that_waits_for_another_lets_the_next_pass(self) -> None:
        queue = scheduler()
        a, twin, c = submitted(queue, 3, 3, 3)
        queue.allocator.waits = {twin}  # type: ignore[attr-defined]
        assert list(step(queue)) == [a, c]
        queue.allocator.waits = set()  # type: ignore[attr-defined]
        assert twin in scheduled(queue)

    def test_a_row_beyond_its_context(self) -> None:
        """It computes the last tokens again each time, and needs no pages."""
        queue = scheduler()
        (job,) = submitted(queue, 3)
        step(queue)
        job.recompute_tokens = 3
        (other,) = submitted(queue, 5)
        assert scheduled(queue) == {job: 3, other: 5}

    def test_drafts(self) -> None:
        """One token and its drafts, beside prompts: they are no part of the prompts' budget."""
        queue = scheduler()
        (job,) = submitted(queue, 3)
        step(queue)
        job.draft_token_ids, job.capacity = [1, 2, 3], 100
        (other,) = submitted(queue, 15)
        assert scheduled(queue) == {job: 4, other: 10}
        assert job.num_reserved_slots >= 3 + 4


class TestOrder:
    def test_of_arrival(self) -> None:
        queue = scheduler(rows=1)
        jobs = submitted(queue, 1, 1, 1)
        order = []
        for _ in jobs:
            (job,) = scheduled(queue)
            order.append(job)
            queue.finish(job)
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
        for _ in range(2 * PRIORITY_STEP):
            submitted(queue, 1)
            (job,) = scheduled(queue)
            queue.finish(job)
            if job is low:
                return
        raise AssertionError("it never ran")


class TestRoom:
    def test_admitted_by_the_pages_of_a_chunk(self) -> None:
        """Not by all that it may come to hold."""
        queue = scheduler(pages=6, tokens=10)
        (job,) = submitted(queue, 40)
        assert scheduled(queue) == {job: 10}

    def test_the_first_that_does_not_fit_holds_up_those_behind(self) -> None:
        """Or a long prompt would never run among short ones."""
        queue = scheduler(pages=5, tokens=100)
        a, _, _ = submitted(queue, 12, 12, 1)
        assert list(scheduled(queue)) == [a]

    def test_a_page_is_left_for_each_row(self) -> None:
        """What was just admitted should not be preempted at once."""
        queue = scheduler(pages=2, tokens=100)
        a, b = submitted(queue, 4, 4)
        assert list(scheduled(queue)) == [a]
        queue.allocator.count = 3  # type: ignore[attr-defined]
        assert b in scheduled(queue)

    def test_the_youngest_is_preempted(self) -> None:
        queue = scheduler(pages=4, tokens=100)
        a, b = submitted(queue, 7, 4)
        step(queue)
        step(queue)
        assert scheduled(queue) == {a: 1}  # to its third page, which was the other's second
        assert (b.status, b.num_computed_tokens, queue.waiting, queue.num_preemptions) == (Status.WAITING, 0, [b], 1)
        queue.finish(a)
        assert scheduled(queue) == {b: b.num_tokens}

    def test_the_preempted_is_first_again(self) -> None:
        queue = scheduler(pages=4, tokens=100)
        _, b, c = submitted(queue, 7, 4, 4)
        step(queue)
        step(queue)
        step(queue)
        assert queue.waiting == [b, c]

    def test_preempted_after_it_was_given_its_tokens(self) -> None:
        """Rows that decode go first, but a prompt that came before them has the first right to pages."""
        queue = scheduler(pages=8, tokens=10)
        (long,) = submitted(queue, 21)
        step(queue)
        (short,) = submitted(queue, 1)
        assert step(queue) == {long: 10}
        assert step(queue) == {long: 1, short: 1}
        long.token_ids += [0] * 10  # as if its prompt were longer
        long.num_prefill_tokens = long.num_tokens
        assert scheduled(queue) == {long: 10}
        assert short.status is Status.WAITING

    def test_nobody_is_admitted_while_others_have_to_go(self) -> None:
        queue = scheduler(pages=14, tokens=10)
        a, b = submitted(queue, 11, 30)
        while left(b) != 1:
            step(queue)
        queue.allocator.count = queue.allocator.count - queue.allocator.free_pages  # type: ignore[attr-defined]
        while not queue.num_preemptions:
            fed = step(queue)
        assert list(fed) == [a]
        assert queue.waiting == [b]
        assert b in scheduled(queue)

    def test_no_room_even_alone(self) -> None:
        queue = scheduler(pages=2, tokens=100)
        (job,) = submitted(queue, 30)
        assert scheduled(queue) == {}
        assert queue.unschedulable is job
        queue.finish(job)
        submitted(queue, 3)
        assert scheduled(queue)
        assert queue.unschedulable is None

    def test_ended_while_it_waits(self) -> None:
        queue = scheduler()
        a, b = submitted(queue, 1, 1)
        queue.finish(a)
        assert list(scheduled(queue)) == [b]


def simulate(seed: int, count: int, pages: int, rows: int, tokens: int, last_alone: bool) -> list[tuple[int, ...]]:
    """Random arrivals, ends and aborts until all are through, checking each pass; returns the schedule."""
    chance = random.Random(seed)
    room = Pages(pages, last_alone)
    queue = Scheduler(room, max_rows=rows, prefill_chunk=tokens)
    most = (pages - 1) * PAGE  # tokens that one may come to have
    arrivals = sorted((chance.randrange(count * 2), i) for i in range(count))
    ends: dict[Sequence, int] = {}
    numbers: dict[Sequence, int] = {}
    schedule: list[tuple[int, ...]] = []
    at = 0
    while arrivals or queue.waiting or queue.running:
        while arrivals and arrivals[0][0] <= at:
            _, number = arrivals.pop(0)
            length = chance.randint(1, most // 2)
            (job,) = submitted(queue, length, priority=chance.choice([0, 0, 0, 1]))
            ends[job], numbers[job] = chance.randint(length, most), number
        if queue.waiting and chance.random() < 0.05:
            queue.finish(chance.choice(queue.waiting))
        if queue.running and chance.random() < 0.05:
            queue.finish(chance.choice(queue.running))
        decoding = [job for job in queue.running if left(job) == 1]
        oldest = queue.running[0] if queue.running else None
        before = queue.num_preemptions
        fed = scheduled(queue)
        at += 1
        schedule.append(tuple(x for job, n in fed.items() for x in (numbers[job], n)))
        # Within its bounds; all that decoded goes on, but for the preempted; and the oldest row gets on.
        assert sum(n for job, n in fed.items() if job not in decoding) <= tokens
        assert len(queue.running) <= rows
        assert all(job in fed or job.status is not Status.RUNNING for job in decoding)
        assert set(fed) <= set(queue.running)
        assert queue.num_preemptions > before or all(job in fed or job.num_computed_tokens for job in queue.running)
        assert queue.unschedulable is None
        assert oldest is None or oldest in fed
        assert sorted(queue.waiting, key=lambda job: job.sort_key) == queue.waiting
        assert not {*queue.waiting} & {*queue.running}
        assert {*room.held} == {*queue.running}
        assert room.free_pages >= 0
        assert bool(fed) or not (queue.waiting or queue.running)
        for job, n in fed.items():
            assert n >= 1
            assert job.num_computed_tokens + n <= job.num_tokens
            assert room.held[job] * PAGE >= job.num_computed_tokens + n
            commit({job: n})
            if job.num_tokens > ends[job]:
                queue.finish(job)
    assert room.free_pages == pages
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
