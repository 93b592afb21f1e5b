"""Speculation: a drafter proposes tokens, and the next step verifies all of them in one pass.

The logits at a position do not depend on how many positions a pass computes, and a draw is a function of (seed,
position, logits). So a draft is right exactly when it equals the token that is chosen anyway, and no text, score or
log-probability depends on drafts: a wrong one costs time only.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from infer.backend.parts import DRAFT_LEVELS
from infer.cache.base import BaseCache, Cache, unwrap
from infer.cache.ring import SlidingCache
from infer.engine.scheduler import ScheduledTokens
from infer.engine.sequence import Sequence as EngineSequence

MAX_DRAFTS = DRAFT_LEVELS[-1]

# How many drafts are worth their time.
RIGHT, WRONG = 1.5, 0.75  # drafts before the first one
DECAY = 0.9  # of what is known, at each new observation
COST = 0.15  # of a draft, in steps of one row, before it is measured
CHEAPER = 0.998  # what a draft has cost, at each step: it may have become cheaper
MARGIN = 1.1  # a draft must be worth so much more than its time: all of this is estimated
SMOOTHING = 0.2  # share of the last step in the times
WATCHED = 2  # drafts that are not verified, but compared with the text
LOST_SHARE, LOST_STEPS = 0.01, 8  # drafts may cost this share of the time, and so many steps, more than they save
LOST_DECAY = 0.999  # at each step
CHANCES = 20  # steps from 0 to 1: chances that are told apart where the speed is estimated
LEAST_CHANCE = 0.05  # chance from which a draft is proposed where it costs nothing more
WITHOUT = 2  # steps without drafts to measure, first and after so many steps with drafts
STREAK = 200

logger = logging.getLogger("infer.engine")


@runtime_checkable
class Drafter(Protocol):
    """Proposes what may follow. After an error of its own, sequences go on without drafts."""

    def propose(self, counts: Mapping[EngineSequence, int]) -> Mapping[EngineSequence, Collection[int]]:
        """For each sequence, up to so many tokens that may follow its `token_ids`.

        A sequence may be left out. No tokens say that the time spent on it was wasted.
        """

    def finish(self, sequence: EngineSequence) -> None:
        """Forget a sequence."""


@dataclass
class _Record:
    """What is known of drafts."""

    right: float = RIGHT
    wrong: float = WRONG

    @property
    def chance(self) -> float:
        """Of a draft to be right, if those before it are."""
        return self.right / (self.right + self.wrong)

    def learn(self, drafted: int, accepted: int) -> None:
        """Of drafts after a wrong one nothing is known."""
        self.right = self.right * DECAY + accepted
        self.wrong = self.wrong * DECAY + (accepted < drafted)

    def waste(self, share: float) -> None:
        """The time of so much of a draft was spent, without one."""
        self.right *= DECAY**share
        self.wrong = self.wrong * DECAY**share + share


@dataclass
class _Time:
    """Of steps without drafts."""

    seconds: float = math.inf
    count: int = 0

    def add(self, seconds: float, *, forget: bool) -> None:
        """forget: what is known, as it is long ago."""
        if forget or self.count < WITHOUT:  # the first steps may have compiled kernels
            self.seconds = seconds if forget else min(self.seconds, seconds)
        else:
            self.seconds += SMOOTHING * (seconds - self.seconds)
        self.count += 1


@dataclass
class _Cost:
    """What drafts have cost lately."""

    seconds: float = 0.0
    drafts: float = 0.0

    def add(self, seconds: float, drafts: int) -> None:
        self.seconds, self.drafts = self.seconds * DECAY + seconds, self.drafts * DECAY + drafts

    @property
    def of_one(self) -> float:
        return max(0.0, self.seconds / self.drafts)


@dataclass
class _Drafts:
    """The drafts of a sequence."""

    record: _Record
    forced: bool = False  # the last ones: by a grammar
    drafted: int = 0  # of `Sequence.num_drafted`: counted already
    accepted: int = 0
    watched: Sequence[int] = ()  # drafts that no step verifies: the text will say whether they are right
    watched_at: int = 0  # position of the first
    asked: bool = False  # the drafter has read the prompt
    failed: bool = False


@dataclass
class _Step:
    """A step without prompts."""

    rows: int
    drafts: int
    most: int  # of a sequence
    drafted_s: float  # seconds that the drafter took
    prompt_s: float  # of these, those in which it may have read a prompt


class Speculation:
    """Drafts for the sequences that decode: of each as many as are likely to be worth their time.

    Drafts raise the time of a step. Draft number i is worth that if its chance to be right, p^i, is at least the number
    of tokens that all rows would get in this time: its cost times the speed, in tokens per second. In a captured step
    the most drafts of a sequence decide what it costs: all drafts together are worth that, or none is.

    Where drafts are not worth their time, the drafter is asked all the same, and the text shows what its drafts would
    have been worth. While they have cost more than they saved, beyond a small share of the time and a few steps, it is
    not asked.
    """

    def __init__(self, drafter: Drafter, vocab_size: int, *, padded: bool = False) -> None:
        """padded: each sequence costs what the one with most drafts costs."""
        self.drafter, self._vocab_size, self._padded = drafter, vocab_size, padded
        self._drafts: dict[EngineSequence, _Drafts] = {}
        self._all, self._forced = _Record(), _Record(9.0, 1.0)  # of all sequences: the drafter's, and a grammar's
        self._times: dict[int, _Time] = {}  # of steps without drafts, by their rows
        self._streak = 0  # steps with drafts since the last of these
        self._costs: dict[tuple[int, int], _Cost] = {}  # by rows, to a power of two, and level
        self._last: _Cost | None = None  # of the last step, if it had drafts
        self._drafted_s = self._prompt_s = 0.0  # of the last call of `draft`
        self._time = self._lost = 0.0  # recent seconds, and how many of them drafts have cost more than they saved

    def draft(self, running: Sequence[EngineSequence], most: int = MAX_DRAFTS) -> None:
        """Set `draft_token_ids` of the sequences that decode. most: of each that a step verifies."""
        self._drafted_s = self._prompt_s = 0.0
        if not most:
            return
        began = time.perf_counter()
        rows = [sequence for sequence in running if not sequence.is_prefill]
        known = {sequence: self._known(sequence) for sequence in rows if sequence.drafts}
        left = {sequence: min(_left(sequence), most) for sequence in known}
        forced = dict[EngineSequence, list[int]]()
        if self._affordable(len(rows)):
            forced = {sequence: self._forced_tokens(sequence, left[sequence]) for sequence in known if sequence.guide}
        offers = [
            (self._forced.chance, len(tokens)) if (tokens := forced.get(each)) else (drafts.record.chance, left[each])
            for each, drafts in known.items()
        ]
        worth, level = self._worth(len(rows), offers)
        watches = self._affordable(len(rows), steps=0)
        counts, watched = dict[EngineSequence, int](), set[EngineSequence]()
        for sequence, drafts in known.items():
            if tokens := forced.get(sequence, [])[: _count(self._forced.chance, worth, level)]:
                sequence.draft_token_ids, drafts.forced = tokens, True
            elif drafts.failed or not left[sequence]:
                continue
            elif count := min(left[sequence], _count(drafts.record.chance, worth, level)):
                counts[sequence] = count
            elif watches and not drafts.watched:
                counts[sequence] = min(left[sequence], WATCHED)
                watched.add(sequence)
        unsure = self._propose(counts)
        if self._padded and level:  # of the drafts that there are
            drafted = [each for each in counts if each.draft_token_ids and each not in watched]
            offers = [(known[each].record.chance, len(each.draft_token_ids)) for each in drafted]
            _, level = self._worth(len(rows), offers)
            for sequence in drafted:
                if level:
                    del sequence.draft_token_ids[level:]
                else:
                    watched.add(sequence)
        for sequence in watched:
            drafts = known[sequence]
            drafts.watched, drafts.watched_at = sequence.draft_token_ids, sequence.num_tokens
            sequence.draft_token_ids = []
        self._drafted_s = time.perf_counter() - began
        if not all(known[sequence].asked for sequence in counts):
            self._prompt_s = self._drafted_s
        for sequence in counts:
            known[sequence].asked = True
        if unsure and self._costs and not self._prompt_s:
            share = min(1.0, self._drafted_s / len(counts) / (self._cost(len(rows), 1) or math.inf))
            for record in [self._all, *(known[sequence].record for sequence in unsure)]:
                record.waste(share)

    def planned(self, scheduled: Sequence[ScheduledTokens]) -> _Step | None:
        """What to measure of a step; None: it has prompts, or drafts that it does not verify."""
        counts = [len(sequence.draft_token_ids) for sequence, _ in scheduled]
        if sum(n for _, n in scheduled) != len(scheduled) + sum(counts):
            self._lost, self._last = self._lost * LOST_DECAY + self._drafted_s, None
            self._streak = min(self._streak, STREAK // 2)  # no step to measure may come
            return None
        return _Step(len(scheduled), sum(counts), max(counts), self._drafted_s, self._prompt_s)

    def measured(self, step: _Step, seconds: float, num_accepted: int) -> None:
        """The time of a step, and how many of its drafts were right."""
        last, self._last = self._last, None
        without = self._times.setdefault(step.rows, _Time())
        known = without.seconds
        self._time, self._lost = self._time * LOST_DECAY + seconds, self._lost * LOST_DECAY + step.drafted_s
        for cost in self._costs.values():
            cost.seconds *= CHEAPER
        if step.drafts:
            self._streak += 1
            self._lost = max(0.0, self._lost + seconds - known * (1 + num_accepted / step.rows))
            without.seconds = known = min(known, seconds)
            level = next(level for level in DRAFT_LEVELS if level >= step.most)
            self._last = self._costs.setdefault(((step.rows - 1).bit_length(), level), _Cost())
            seconds += step.drafted_s - step.prompt_s - known
            self._last.add(seconds, step.rows * level if self._padded else step.drafts)
        elif last is not None and without.count >= WITHOUT:  # drafts cost it the launch ahead of the step before
            self._lost = max(0.0, self._lost + seconds - known)
            last.seconds += seconds - known
        else:
            without.add(seconds, forget=self._streak >= STREAK)
            self._streak = 0

    def finish(self, sequence: EngineSequence) -> None:
        if self._drafts.pop(sequence, None) is None:
            return  # the drafter does not know it
        try:
            self.drafter.finish(sequence)
        except Exception as error:
            logger.error("the drafter failed as a sequence ended: %r", error)

    def _known(self, sequence: EngineSequence) -> _Drafts:
        """What is known of its drafts, by the text since the last call."""
        if sequence not in self._drafts:
            chance = self._all.chance
            self._drafts[sequence] = _Drafts(_Record((RIGHT + WRONG) * chance, (RIGHT + WRONG) * (1 - chance)))
        drafts = self._drafts[sequence]
        drafted, accepted = sequence.num_drafted - drafts.drafted, sequence.num_accepted - drafts.accepted
        drafts.drafted, drafts.accepted = sequence.num_drafted, sequence.num_accepted
        records = [self._forced] if drafts.forced else [drafts.record, self._all]
        if drafted:
            for record in records:
                record.learn(drafted, accepted)
        drafts.forced = False
        while drafts.watched and drafts.watched_at < sequence.num_tokens:
            is_right = drafts.watched[0] == sequence.token_ids[drafts.watched_at]
            for record in (drafts.record, self._all):
                record.learn(1, is_right)
            drafts.watched, drafts.watched_at = drafts.watched[1:] if is_right else (), drafts.watched_at + 1
        return drafts

    def _affordable(self, rows: int, steps: int = LOST_STEPS) -> bool:
        """Whether drafts have lost too little to do without, and steps without them were measured."""
        without = self._times.get(rows)
        if without is None or without.count < WITHOUT or self._streak >= STREAK:
            return False
        return self._lost <= LOST_SHARE * self._time + steps * without.seconds

    def _worth(self, rows: int, offers: Sequence[tuple[float, int]]) -> tuple[float, int]:
        """The chance from which a draft is worth its time, and the most drafts of a sequence, for the highest speed.

        offers: of each sequence the chance of a draft, and how many there are.
        """
        found = math.inf, 0
        if not self._affordable(rows):
            return found
        step_s = self._times[rows].seconds
        best = rows / step_s
        groups = Counter((round(chance * CHANCES) / CHANCES, count) for chance, count in offers)
        for level in DRAFT_LEVELS:
            cost = MARGIN * self._cost(rows, level)
            if self._padded:
                worth = LEAST_CHANCE
                speed = (rows + _expected(groups, worth, level)[0]) / (step_s + cost * rows * level)
            else:
                worth = cost * rows / step_s
                for _ in range(2):  # the speed with drafts is higher, and the chance has to be
                    right, drafts = _expected(groups, worth, level)
                    speed = (rows + right) / (step_s + cost * drafts)
                    worth = max(worth, cost * speed)
            if speed > best:
                best, found = speed, (worth, level)
        return found

    def _cost(self, rows: int, level: int) -> float:
        """Seconds of a draft in steps of so many rows, with as many drafts of a sequence; or else with others.

        Padded, each row has as many.
        """
        found = {each: self._costs.get(((rows - 1).bit_length(), each)) for each in DRAFT_LEVELS}
        for each in sorted(DRAFT_LEVELS, key=lambda other: (other > level, abs(other - level))):
            if (cost := found[each]) is not None:
                return cost.of_one
        return COST * self._times[rows].seconds / rows if rows in self._times else 0.0

    def _forced_tokens(self, sequence: EngineSequence, count: int) -> list[int]:
        """The next tokens of the text that its grammar forces."""
        guide = sequence.guide
        if guide is None or count <= 0:
            return []
        forced = guide.forced_tokens(count)
        return forced[: guide.num_allowed(forced)]

    def _propose(self, counts: Mapping[EngineSequence, int]) -> list[EngineSequence]:
        """Set proposals, each up to the first that cannot be chosen. Returns the sequences whose proposal is empty."""
        if not counts:
            return []
        unsure = []
        try:
            for sequence, proposed in self.drafter.propose(counts).items():
                tokens = [*map(int, proposed)][: counts[sequence]]
                wrong = (i for i, token in enumerate(tokens) if not 0 <= token < self._vocab_size)
                tokens = tokens[: next(wrong, len(tokens))]
                guide = sequence.guide
                sequence.draft_token_ids = tokens if guide is None else tokens[: guide.num_allowed(tokens)]
                if not sequence.draft_token_ids:
                    unsure.append(sequence)
        except Exception as error:  # whatever it is, no text depends on it
            logger.error("the drafter failed, and drafts no more for these sequences: %r", error)
            for sequence in counts:
                self._drafts[sequence].failed, sequence.draft_token_ids = True, []
        return unsure


def _count(chance: float, worth: float, most: int) -> int:
    """How many drafts are worth their time."""
    if chance < worth:
        return 0
    return most if worth <= chance**most else int(math.log(worth) / math.log(chance))


def _expected(groups: Mapping[tuple[float, int], int], worth: float, most: int) -> tuple[float, int]:
    """Of drafts that are worth their time, how many will be right, and how many they are."""
    right, drafts = 0.0, 0
    for (chance, available), sequences in groups.items():
        count, all_right = 0, chance
        while count < most and count < available and all_right >= worth:
            count, right, all_right = count + 1, right + sequences * all_right, all_right * chance
        drafts += sequences * count
    return right, drafts


def _left(sequence: EngineSequence) -> int:
    """Drafts that a sequence may have: its last token is none."""
    if sequence.recompute_tokens:
        return 0
    return max(0, min(sequence.max_len - sequence.num_tokens - 1, _most_for(sequence.cache)))


def _most_for(cache: Cache | None) -> int:
    """Drafts that a cache can certainly take back: a ring overwrites what it would need."""
    cache = None if cache is None else unwrap(cache)
    if isinstance(cache, SlidingCache):
        spare = [k.shape[2] - window for k, window in zip(cache.k, cache.windows, strict=True) if window is not None]
        fits = all(k.shape[2] >= cache.capacity for k in cache.k)
        return MAX_DRAFTS if fits else min(spare)
    return MAX_DRAFTS if isinstance(cache, BaseCache) else 0
