"""Speculation: a drafter proposes tokens, and the next step verifies all of them in one pass.

The logits at a position do not depend on how many positions a pass computes, and a draw is a function of (seed,
position, logits). So a draft is right exactly when it equals the token that is chosen anyway, and no text, score or
log-probability depends on drafts: a wrong one costs time only.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from infer.cache.base import BaseCache, Cache, unwrap
from infer.cache.ring import SlidingCache
from infer.engine.scheduler import ScheduledTokens
from infer.engine.sequence import Sequence as EngineSequence
from infer.values import short_repr

MAX_DRAFTS = 8  # per sequence and step
SIZES = (6, 4, 3)  # of the n-grams that are looked up, the longest first

# How many drafts are worth their time.
RIGHT, WRONG = 2.0, 1.0  # drafts of a sequence before the first one
DECAY = 0.9  # of what is known of a sequence's drafts, at each step with drafts
RETURN = 0.01  # share by which it returns to RIGHT and WRONG, at each step without
COST = 0.15  # of a draft, in steps of one row, before it is measured
SMOOTHING = 0.2  # share of the last step in the times

logger = logging.getLogger("infer.engine")


@runtime_checkable
class Drafter(Protocol):
    """Proposes what may follow. An error of its own ends the drafts of a sequence, not its text."""

    def propose(self, sequence: EngineSequence, count: int) -> Collection[int]:
        """Up to `count` tokens that may follow `sequence.token_ids`."""

    def finish(self, sequence: EngineSequence) -> None:
        """Forget a sequence."""


class NgramDrafter:
    """Proposes what followed the last tokens where they occurred before: in the prompt, the output or the prediction.

    A text that repeats parts of its prompt, such as an edit or a quotation, is drafted without a second model. A
    proposal takes the same time after any number of tokens.
    """

    def __init__(self) -> None:
        self.num_drafted = self.num_accepted = 0  # of the sequences that have finished
        self._texts: dict[EngineSequence, _Text] = {}

    def propose(self, sequence: EngineSequence, count: int) -> list[int]:
        if sequence not in self._texts:
            self._texts[sequence] = _Text(sequence.prediction, sequence.prompt)
        return self._texts[sequence].propose(sequence.token_ids, count)

    def finish(self, sequence: EngineSequence) -> None:
        self._texts.pop(sequence, None)
        self.num_drafted += sequence.num_drafted
        self.num_accepted += sequence.num_accepted


def drafter_of(speculate: str | Drafter | None) -> Drafter | None:
    """The drafter of this name, or a drafter itself."""
    if speculate == "ngram":
        return NgramDrafter()
    if speculate is None or (isinstance(speculate, Drafter) and not isinstance(speculate, type)):
        return speculate
    raise ValueError(f'speculate must be "ngram" or a drafter with `propose` and `finish`, not {short_repr(speculate)}')


class _Text:
    """The prediction and the tokens of one sequence, and where each n-gram occurred last."""

    def __init__(self, prediction: Sequence[int], prompt: Sequence[int]) -> None:
        self._tokens = [*prediction, *prompt]
        self._start = len(prediction)  # of the prompt
        self._after: dict[tuple[int, ...], int] = {}  # the position after the last occurrence of an n-gram
        self._indexed = 1
        self._next: int | None = 0 if prediction else None  # the position that is likely to be repeated next

    def propose(self, ids: Sequence[int], count: int) -> list[int]:
        """ids: the prompt and what was generated."""
        self._append(ids[len(self._tokens) - self._start :])
        if self._next is None:
            self._next = self._find()
        if self._next is None:
            return []
        drafts: list[int] = []
        length = len(self._tokens)
        for at in range(self._next, self._next + count):  # past the end, the repetition repeats
            drafts.append(self._tokens[at] if at < length else drafts[at - length])
        return drafts

    def _append(self, new: Sequence[int]) -> None:
        before = len(self._tokens)
        self._tokens += new
        if self._next is not None:
            stop = self._next + len(new)
            self._next = stop if self._tokens[self._next : stop] == self._tokens[before:] else None
        for end in range(self._indexed, len(self._tokens)):
            for size in SIZES:
                if size <= end:
                    self._after[tuple(self._tokens[end - size : end])] = end
        self._indexed = len(self._tokens)

    def _find(self) -> int | None:
        for size in SIZES:
            found = self._after.get(tuple(self._tokens[-size:]))
            if found is not None:
                return found
        return None


@dataclass
class _Record:
    """What is known of a sequence's drafts."""

    right: float = RIGHT
    wrong: float = WRONG
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
    of tokens that all rows would get in this time: cost * rows / time of a step.
    """

    def __init__(self, drafter: Drafter, vocab_size: int) -> None:
        self.drafter, self._vocab_size = drafter, vocab_size
        self._records: dict[EngineSequence, _Record] = {}
        self._times: dict[int, float] = {}  # of steps without drafts, by their rows
        self._cost: float | None = None  # seconds of one more token in a step
        self._drafted_s = 0.0

    def draft(self, running: Sequence[EngineSequence]) -> None:
        """Set `draft_token_ids` of the sequences that decode."""
        began = time.perf_counter()
        rows = [sequence for sequence in running if not sequence.is_prefill]
        worth = self._worth(len(rows))
        for sequence in rows:
            # A trace records tokens one by one.
            if sequence.drafts and sequence.recorder is None and not sequence.recompute_tokens:
                record = self._records.setdefault(sequence, _Record())
                self._learn(sequence, record)
                left = sequence.max_len - sequence.num_tokens - 1
                count = min(left, self._count(record, worth), _most_for(sequence.cache))
                if count > 0 and not record.failed:
                    sequence.draft_token_ids = self._propose(sequence, record, count)
        self._drafted_s = time.perf_counter() - began

    def planned(self, scheduled: Sequence[ScheduledTokens]) -> _Step | None:
        """What to measure of a step; None: it has prompts."""
        drafts = sum(len(sequence.draft_token_ids) for sequence, _ in scheduled)
        if sum(n for _, n in scheduled) != len(scheduled) + drafts:
            return None
        return _Step(len(scheduled), drafts, self._drafted_s)

    def measured(self, step: _Step, seconds: float) -> None:
        """The time of a step."""
        seconds += step.drafted_s
        known = self._times.get(step.rows)
        if not step.drafts:
            self._times[step.rows] = seconds if known is None else known + SMOOTHING * (seconds - known)
        elif known is not None:
            self._times[step.rows] = known = min(known, seconds)
            cost = (seconds - known) / step.drafts
            self._cost = cost if self._cost is None else self._cost + SMOOTHING * (cost - self._cost)

    def finish(self, sequence: EngineSequence) -> None:
        self._records.pop(sequence, None)
        try:
            self.drafter.finish(sequence)
        except Exception as error:
            logger.error("the drafter failed as a sequence ended: %r", error)

    def _worth(self, rows: int) -> float:
        """The chance from which a draft is worth its time; above 1: none is."""
        step_s = self._times.get(rows)
        if step_s is None:
            return math.inf  # measure one without drafts
        cost = COST * step_s / rows if self._cost is None else self._cost
        return cost * rows / step_s

    def _count(self, record: _Record, worth: float) -> int:
        chance = record.right / (record.right + record.wrong)
        if chance < worth:
            return 0
        return MAX_DRAFTS if worth <= chance**MAX_DRAFTS else int(math.log(worth) / math.log(chance))

    def _learn(self, sequence: EngineSequence, record: _Record) -> None:
        """From the drafts that were verified since the last call."""
        drafted, accepted = sequence.num_drafted - record.drafted, sequence.num_accepted - record.accepted
        record.drafted, record.accepted = sequence.num_drafted, sequence.num_accepted
        if drafted:  # of drafts after a wrong one nothing is known
            record.right = record.right * DECAY + accepted
            record.wrong = record.wrong * DECAY + (accepted < drafted)
        else:
            record.right += RETURN * (RIGHT - record.right)
            record.wrong += RETURN * (WRONG - record.wrong)

    def _propose(self, sequence: EngineSequence, record: _Record, count: int) -> list[int]:
        """Proposals, up to the first that cannot be chosen."""
        try:
            proposed = [*map(int, self.drafter.propose(sequence, count))][:count]
            wrong = (i for i, token in enumerate(proposed) if not 0 <= token < self._vocab_size)
            proposed = proposed[: next(wrong, len(proposed))]
            return proposed if sequence.guide is None else proposed[: sequence.guide.num_allowed(proposed)]
        except Exception as error:  # whatever it is, the text does not depend on it
            logger.error("the drafter failed, and drafts no more for this sequence: %r", error)
            record.failed = True
            return []


def _most_for(cache: Cache | None) -> int:
    """Drafts that a cache can certainly take back: a ring overwrites what it would need."""
    cache = None if cache is None else unwrap(cache)
    if isinstance(cache, SlidingCache):
        spare = [k.shape[2] - window for k, window in zip(cache.k, cache.windows, strict=True) if window is not None]
        fits = all(k.shape[2] >= cache.capacity for k in cache.k)
        return MAX_DRAFTS if fits else max(0, min(spare) + 1)
    return MAX_DRAFTS if isinstance(cache, BaseCache) else 0
