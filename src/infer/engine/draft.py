"""Speculation: a drafter proposes tokens, and the next step verifies all of them in one pass.

The logits at a position do not depend on how many positions a pass computes, and a draw is a function of (seed,
position, logits). So a draft is right exactly when it equals the token that is chosen anyway, and no text, score or
log-probability depends on drafts: a wrong one costs time only.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from infer.cache.base import BaseCache, Cache, unwrap
from infer.cache.ring import SlidingCache
from infer.engine.scheduler import ScheduledTokens
from infer.engine.sequence import Sequence as EngineSequence

MAX_DRAFTS = 8  # per sequence and step

# How many drafts are worth their time.
RIGHT, WRONG = 2.0, 1.0  # drafts before the first one
DECAY = 0.9  # of what is known of drafts, at each step with drafts
RETURN = 0.01  # share by which a sequence returns to what is known of all, at each step without
COST = 0.15  # of a draft, in steps of one row, before it is measured
SMOOTHING = 0.2  # share of the last step in the times
LOST_SHARE, LOST_STEPS = 0.02, 16  # drafts may cost this share of the time, and so many steps, more than they save
LOST_DECAY = 0.999  # at each step

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

    def return_to(self, other: _Record) -> None:
        self.right += RETURN * ((RIGHT + WRONG) * other.chance - self.right)
        self.wrong += RETURN * ((RIGHT + WRONG) * (1 - other.chance) - self.wrong)


@dataclass
class _Drafts:
    """The drafts of a sequence."""

    record: _Record
    forced: bool = False  # the last ones: by a grammar
    drafted: int = 0  # of `Sequence.num_drafted`: counted already
    accepted: int = 0
    failed: bool = False


@dataclass
class _Step:
    """A step without prompts."""

    rows: int
    drafts: int
    drafted_s: float  # seconds that the drafter took


class Speculation:
    """Drafts for the sequences that decode: of each as many as are likely to be worth their time.

    Drafts raise the time of a step. Draft number i is worth that if its chance to be right, p^i, is at least the number
    of tokens that all rows would get in this time: its cost times the speed, in tokens per second. While drafts have
    cost more than they saved, beyond a small share of the time and a few steps, there are none.
    """

    def __init__(self, drafter: Drafter, vocab_size: int) -> None:
        self.drafter, self._vocab_size = drafter, vocab_size
        self._drafts: dict[EngineSequence, _Drafts] = {}
        self._all, self._forced = _Record(), _Record(9.0, 1.0)  # of all sequences: the drafter's, and a grammar's
        self._times: dict[int, float] = {}  # of steps without drafts, by their rows
        self._extra_s = self._extra_drafts = 0.0  # what drafts have cost lately, and how many they were
        self._drafted_s = 0.0
        self._time = self._lost = 0.0  # recent seconds, and how many of them drafts have cost more than they saved

    def draft(self, running: Sequence[EngineSequence]) -> None:
        """Set `draft_token_ids` of the sequences that decode."""
        began = time.perf_counter()
        rows = [sequence for sequence in running if not sequence.is_prefill]
        known = {sequence: self._known(sequence) for sequence in rows if sequence.drafts}
        worth = self._worth(len(rows), [drafts.record for drafts in known.values()])
        counts = dict[EngineSequence, int]()
        for sequence, drafts in known.items():
            left = min(sequence.max_len - sequence.num_tokens - 1, _most_for(sequence.cache))
            if sequence.recompute_tokens or left <= 0:
                continue
            if forced := self._forced_tokens(sequence, min(left, _count(self._forced, worth))):
                sequence.draft_token_ids, drafts.forced = forced, True
            elif not drafts.failed and (count := min(left, _count(drafts.record, worth))) > 0:
                counts[sequence] = count
        if not counts:
            self._all.return_to(_Record())  # sequences may be others than those before
        unsure = self._propose(counts)
        self._drafted_s = time.perf_counter() - began
        if unsure and self._extra_s:
            share = min(1.0, self._drafted_s / len(counts) * self._extra_drafts / self._extra_s)
            for record in [self._all, *(known[sequence].record for sequence in unsure)]:
                record.waste(share)

    def planned(self, scheduled: Sequence[ScheduledTokens]) -> _Step | None:
        """What to measure of a step; None: it has prompts."""
        drafts = sum(len(sequence.draft_token_ids) for sequence, _ in scheduled)
        if sum(n for _, n in scheduled) != len(scheduled) + drafts:
            self._lost += self._drafted_s
            return None
        return _Step(len(scheduled), drafts, self._drafted_s)

    def measured(self, step: _Step, seconds: float, num_accepted: int) -> None:
        """The time of a step, and how many of its drafts were right."""
        known = self._times.get(step.rows)
        self._time, self._lost = self._time * LOST_DECAY + seconds, self._lost * LOST_DECAY + step.drafted_s
        if not step.drafts:
            self._times[step.rows] = seconds if known is None else known + SMOOTHING * (seconds - known)
            self._extra_s *= 1 - RETURN / 4  # they may have become cheaper: it takes drafts to find out
        elif known is not None:
            self._lost = max(0.0, self._lost + seconds - known * (1 + num_accepted / step.rows))
            self._times[step.rows] = known = min(known, seconds)
            self._extra_s = self._extra_s * DECAY + max(0.0, seconds + step.drafted_s - known)
            self._extra_drafts = self._extra_drafts * DECAY + step.drafts

    def finish(self, sequence: EngineSequence) -> None:
        if self._drafts.pop(sequence, None) is None:
            return  # the drafter does not know it
        try:
            self.drafter.finish(sequence)
        except Exception as error:
            logger.error("the drafter failed as a sequence ended: %r", error)

    def _known(self, sequence: EngineSequence) -> _Drafts:
        """What is known of its drafts, including the drafts verified since the last call."""
        if sequence not in self._drafts:
            chance = self._all.chance
            self._drafts[sequence] = _Drafts(_Record((RIGHT + WRONG) * chance, (RIGHT + WRONG) * (1 - chance)))
        drafts = self._drafts[sequence]
        drafted, accepted = sequence.num_drafted - drafts.drafted, sequence.num_accepted - drafts.accepted
        drafts.drafted, drafts.accepted = sequence.num_drafted, sequence.num_accepted
        if drafted:
            for record in [self._forced] if drafts.forced else [drafts.record, self._all]:
                record.learn(drafted, accepted)
        else:
            drafts.record.return_to(self._all)
        drafts.forced = False
        return drafts

    def _worth(self, rows: int, records: Sequence[_Record]) -> float:
        """The chance from which a draft is worth its time; above 1: none is."""
        step_s = self._times.get(rows)
        if step_s is None:
            return math.inf  # measure one without drafts
        if self._lost > LOST_SHARE * self._time + LOST_STEPS * step_s:
            return math.inf
        cost = self._extra_s / self._extra_drafts if self._extra_drafts else COST * step_s / rows
        worth = cost * rows / step_s
        for _ in range(2):  # the speed with drafts is higher, and the chance has to be
            counts = [_count(record, worth) for record in records]
            tokens = rows + sum(
                record.chance**i for record, count in zip(records, counts, strict=True) for i in range(1, count + 1)
            )
            worth = max(worth, cost * tokens / (step_s + cost * sum(counts)))
        return worth

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


def _count(record: _Record, worth: float) -> int:
    """How many drafts are worth their time."""
    chance = record.chance
    if chance < worth:
        return 0
    return MAX_DRAFTS if worth <= chance**MAX_DRAFTS else int(math.log(worth) / math.log(chance))


def _most_for(cache: Cache | None) -> int:
    """Drafts that a cache can certainly take back: a ring overwrites what it would need."""
    cache = None if cache is None else unwrap(cache)
    if isinstance(cache, SlidingCache):
        spare = [k.shape[2] - window for k, window in zip(cache.k, cache.windows, strict=True) if window is not None]
        fits = all(k.shape[2] >= cache.capacity for k in cache.k)
        return MAX_DRAFTS if fits else min(spare)
    return MAX_DRAFTS if isinstance(cache, BaseCache) else 0
