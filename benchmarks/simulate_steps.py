"""How long a pass of the engine takes: measured on the real `LLM`, kept in a report, and fitted.

The time of a pass is counted from the end of the one before, so it includes the host's share. What it depends on: rows
that decode, the positions they attend to, tokens of prompts and the positions these attend to, and rows that are new.

On a CPU one pass takes all of that together. On a GPU rows that decode go through captured steps: the number of rows is
rounded up, a row that is longer than the others keeps them waiting, prompts are passes of their own, and the engine
launches a step ahead of the tokens it reads. So what a call of the engine launches for prompts is waited for in the
next call. Only short prompts, which are launched kernel by kernel, are the host's time in the same call.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from serving_load import PATIENCE_S, Ask, Passes, make_asks

from infer.engine.llm import LLM, Handle
from infer.engine.loop import Event, Task

Array = NDArray[np.float64]
ROW_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # of captured steps
SHORT = 32  # tokens of prompts that are launched kernel by kernel
TOKEN_SIZES = (64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)  # of captured passes of prompts
MANY = 32  # rows from which on a captured step attends to each row with one program for each head
LONE = [(few, many) for few in (0.25, 0.5, 1.0) for many in (1, 24, 40, 56)]  # see `Steps`
KNOTS = (1, 2, 3, 4, 6, 8, 12, 15, 16, 24, 32, 48, 64, 96, 128, 160, 192, 256, 512, 1024)  # tokens of other passes
MERGED = 8  # passes in a row that are alike and become one sample, their median
UNUSUAL = 0.5  # that a sample may be off, else it is left out: the machine did something else
HELD_OUT = 5  # one sample of so many is not fitted


class Pass(NamedTuple):
    """What a pass is made of."""

    rows: int = 0  # that decode: each feeds one token
    positions: int = 0  # that these attend to, all rows together
    tokens: int = 0  # of prompts
    pairs: int = 0  # of a prompt's token and a position that it attends to
    prompts: int = 0  # rows that feed these tokens
    begun: int = 0  # rows that were not in the pass before
    longest: int = 0  # positions that a row which decodes attends to, at most


class Sample(NamedTuple):
    made_of: Pass
    seconds: float  # since the end of the pass before
    host: float  # of these, between the two passes


@dataclass(frozen=True)
class Engine:
    """What a replica's schedule depends on."""

    max_rows: int = 256
    prefill_chunk: int = 128
    captured: bool = False  # rows decode in captured steps, one of which is launched ahead
    page: int = 64
    pages: int = 4096
    context: int = 8192


@dataclass(frozen=True)
class Grid:
    """What is measured."""

    stairs: tuple[tuple[int, int], ...]  # rows, and tokens of their prompts: rows end until one is left
    levels: tuple[int, ...]  # rows to stop at on the way
    passes: int  # at each
    beside: tuple[int, ...]  # rows that decode while prompts come
    prompts: tuple[int, ...]  # tokens of each prompt
    repeats: int


CPU = Grid(
    ((24, 48), (10, 200), (3, 800)), (24, 18, 12, 10, 8, 6, 5, 4, 3, 2, 1), 6,
    (1, 6), (2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 300), 2,
)  # fmt: skip
GPU = Grid(
    ((256, 128), (256, 1000), (64, 4000), (16, 16_000), (1, 32_000)), ROW_SIZES[::-1], 24,
    (4, 64), (16, SHORT, *TOKEN_SIZES, 16_384), 4,
)  # fmt: skip
QUICK = Grid(((4, 8), (2, 40)), (4, 2, 1), 8, (1, 2), (4, 8, 40), 2)


def engine_of(llm: LLM) -> Engine:
    def look(loop: Any) -> Engine:
        scheduler, pool = loop.scheduler, loop.memory.pool
        pages = pool.count // len(loop.memory.index.windows)
        return Engine(scheduler.max_rows, scheduler.prefill_chunk, scheduler.last_alone, pool.page, pages, loop.context)

    return llm.between_steps(look).result()


class Recorded(Passes):
    """Notes what each pass is made of when it ends: tasks change afterwards."""

    def __init__(self, llm: LLM) -> None:
        super().__init__(llm)
        self.held: list[dict[Task, int]] = []
        self.begin = 0  # the first pass that counts

    def __enter__(self) -> Recorded:
        def listen(event: Event) -> None:
            if event.kind == "pass":
                self.held.append({task: task.held for task in event.fed})
                self.events.append(event)

        self._end = self._llm.watch(listen)
        return self

    def wait(self, rows: int, passes: int) -> None:
        """Until there are so many passes in which so many rows decode, and nothing else happens."""
        begin, until = len(self.events), time.perf_counter() + PATIENCE_S
        while time.perf_counter() < until:
            if sum(list(event.fed.values()) == [1] * rows for event in self.events[begin:]) >= passes:
                return
            time.sleep(0.005)
        raise TimeoutError(f"{rows} rows do not decode after {PATIENCE_S:.0f} seconds")

    def samples(self, captured: bool) -> list[Sample]:
        """One for each pass but the first; with captured steps, for those that waited for one launched before."""
        found = []
        for i in range(self.begin + 1, len(self.events)):
            event, before = self.events[i], self.events[i - 1]
            decoding = {task for task, n in event.fed.items() if n == 1}
            fed = self._prompts(i)
            if captured:
                decoding &= {task for task, n in before.fed.items() if n == 1}
                fed = [
                    each for at in (i - 1, i) for each in self._prompts(at) if is_short(self._prompts(at)) == (at == i)
                ]
                if not decoding:
                    continue
            held = [self.held[i][task] for task in decoding]
            made_of = Pass(
                len(held),
                sum(held),
                sum(n for n, _ in fed),
                sum(pairs(*each) for each in fed),
                len(fed),
                len(event.fed.keys() - before.fed.keys()),
                max(held, default=0),
            )
            seconds = event.time - before.time
            found.append(Sample(made_of, seconds, seconds - event.seconds))
        return found

    def _prompts(self, i: int) -> list[tuple[int, int]]:
        """Of each prompt in a pass: tokens that it feeds, and that it holds then."""
        return [(n, self.held[i][task]) for task, n in self.events[i].fed.items() if n > 1]


def is_short(prompts: Sequence[tuple[int, int]]) -> bool:
    return sum(n for n, _ in prompts) <= SHORT


def pairs(n: int, held: int) -> int:
    """Of a prompt's n tokens, the last of `held`, and the positions they attend to."""
    return n * (held - n) + n * (n + 1) // 2


def measure(llm: LLM, grid: Grid) -> Iterator[tuple[str, list[Sample]]]:
    """Samples of each load, and what it was. A first load is not counted where steps are captured when needed."""
    engine, vocabulary = engine_of(llm), llm.model.config.vocab_size
    seeds = iter(range(10_000, 20_000))
    most = engine.pages * engine.page * 3 // 4  # tokens at once

    def ask(tokens: int, new: int = 4096) -> Ask:
        """Made before anything is timed: that takes the interpreter from the engine."""
        new = min(new, engine.context - tokens)
        return make_asks(vocabulary, 1, (tokens, tokens), (new, new), seed=next(seeds))[0]

    def submit(asks: Sequence[Ask]) -> list[Handle]:
        return [llm.submit(each.prompt, each.params) for each in asks]

    def end(handles: Sequence[Handle]) -> None:
        for handle in handles:
            handle.abort()
        for handle in handles:
            handle.result(PATIENCE_S)

    for i, (rows, context) in enumerate([*grid.stairs[: engine.captured], *grid.stairs]):
        rows = min(rows, engine.max_rows, most // (context + 256))
        levels = [level for level in grid.levels if level <= rows]
        if not levels or context >= engine.context:
            continue
        asks = [ask(context) for _ in range(levels[0])]
        with Recorded(llm) as passes:
            handles = submit(asks)
            for level in levels:
                end(handles[level:])
                del handles[level:]
                passes.wait(level, grid.passes)
        end(handles)
        if i or not engine.captured:
            yield f"{levels[0]} rows of {context:,} tokens, down to 1", passes.samples(engine.captured)
    for rows in grid.beside:
        handles = submit([ask(16) for _ in range(rows)])
        repeats = grid.repeats + 2 * engine.captured
        lengths = [tokens for tokens in grid.prompts if tokens + 1 < min(engine.context, most)]
        asks = [ask(tokens + engine.captured, 1) for _ in range(repeats) for tokens in lengths]
        with Recorded(llm) as passes:
            passes.wait(rows, 1)
            for i, each in enumerate(asks):
                if i == 2 * engine.captured * len(lengths):  # each size is captured by now
                    passes.begin = len(passes.events)
                submit([each])[0].result(PATIENCE_S)
        end(handles)
        yield f"prompts beside {rows} rows", passes.samples(engine.captured)


def merged(samples: Sequence[Sample]) -> list[Sample]:
    """Up to MERGED passes in a row that feed the same become one."""
    found = []
    for _, group in groupby(samples, key=lambda sample: sample.made_of._replace(positions=0, pairs=0, longest=0)):
        alike = list(group)
        for at in range(0, len(alike), MERGED):
            some = alike[at : at + MERGED]
            middle = sorted(some, key=lambda sample: sample.seconds)[len(some) // 2]
            found.append(Sample(some[len(some) // 2].made_of, middle.seconds, middle.host))
    return found


class Steps:
    """Seconds of a pass, fitted to samples: more of anything never takes less time.

    In a captured step a row that is much longer than the others is read at a share of the speed: it takes the time of
    so many rows of its length. That number is fitted too, for few rows as a share of them, and for many.
    """

    def __init__(self, engine: Engine, samples: Sequence[Sample]) -> None:
        self.engine = engine
        most = max((sample.made_of.rows + sample.made_of.tokens for sample in samples), default=1)
        self._knots = [knot for knot in KNOTS if knot <= most]  # of passes that are not captured
        self._lone, self._weights, best = LONE[0], np.zeros(0), math.inf
        for lone in LONE if engine.captured else LONE[:1]:
            weights, error = fitted_weights(np.array([self._features(each.made_of, lone) for each in samples]), samples)
            if error < best:
                self._lone, self._weights, best = lone, weights, error
        self._few, self._many, self._pair, self._prompt, self._begun = map(float, self._weights[-5:])
        self._fixed: dict[tuple[int, int], float] = {}

    def _features(self, made_of: Pass, lone: tuple[float, float]) -> list[float]:
        rows, tokens = made_of.rows, made_of.tokens
        read = self._read(made_of, lone)
        rest = [*((0.0, read) if rows > MANY // 2 else (read, 0.0)), made_of.pairs, made_of.prompts, made_of.begun]
        if not self.engine.captured:
            return [*climb(rows + tokens, self._knots), rows, *rest]
        short, long = 0 < tokens <= SHORT, tokens if tokens > SHORT else 0
        climbs = [*climb(rounded_up(rows, ROW_SIZES), ROW_SIZES), *climb(rounded_up(long, TOKEN_SIZES), TOKEN_SIZES)]
        return [*climbs, short, *rest]

    def _read(self, made_of: Pass, lone: tuple[float, float]) -> float:
        """Positions, as if all rows were of one length."""
        if not self.engine.captured:
            return made_of.positions
        few, many = lone
        rows = many if made_of.rows > MANY // 2 else few * rounded_up(made_of.rows, ROW_SIZES)
        return max(made_of.positions, rows * made_of.longest)

    def fixed(self, rows: int, tokens: int) -> float:
        """Of a pass, before attention."""
        if (rows, tokens) not in self._fixed:
            features = self._features(Pass(rows, 0, tokens), self._lone)
            self._fixed[rows, tokens] = float(np.dot(features, self._weights))
        return self._fixed[rows, tokens]

    def seconds(self, made_of: Pass) -> float:
        rows, _, tokens, pairs, prompts, begun, _ = made_of
        more = (self._many if rows > MANY // 2 else self._few) * self._read(made_of, self._lone)
        return self.fixed(rows, tokens) + more + self._pair * pairs + self._prompt * prompts + self._begun * begun

    def growth(self, made_of: Pass) -> float:
        """Seconds that the next pass of the same rows takes more."""
        later = made_of._replace(positions=made_of.positions + made_of.rows, longest=made_of.longest + 1)
        return self.seconds(later) - self.seconds(made_of)

    def errors(self, samples: Sequence[Sample]) -> list[float]:
        return [abs(self.seconds(sample.made_of) / sample.seconds - 1) for sample in samples]


def fitted_weights(features: Array, samples: Sequence[Sample]) -> tuple[Array, float]:
    """And the mean error, relative to each sample. What is far off is left out of the second fit."""
    lines = features / np.array([[sample.seconds] for sample in samples])
    weights = least_squares(lines, np.ones(len(lines)))
    usual = np.abs(lines @ weights - 1) < UNUSUAL
    weights = least_squares(lines[usual], np.ones(int(usual.sum())))
    return weights, float(np.minimum(np.abs(lines @ weights - 1), UNUSUAL).mean())


def rounded_up(value: int, sizes: Sequence[int]) -> int:
    return next((size for size in sizes if size >= value > 0), value)


def climb(value: float, knots: Sequence[int]) -> list[float]:
    """Shares of the way from each knot to the next; what lies behind the last goes on as before it.

    A weighted sum of them is a line from knot to knot. Nothing, if the value is 0.
    """
    if not value:
        return [0.0] * len(knots)
    steps = [(value - low) / (high - low) for low, high in pairwise(knots)]
    return [1.0, *(min(max(step, 0.0), 1.0) for step in steps[:-1]), max(steps[-1], 0.0)]


def least_squares(lines: Array, wanted: Array) -> Array:
    """Weights, none negative, that bring lines @ weights closest to what is wanted (Lawson and Hanson, 1974)."""
    scale = np.linalg.norm(lines, axis=0)
    scale[scale == 0] = 1
    lines = lines / scale
    weights = np.zeros(lines.shape[1])
    used = np.zeros(lines.shape[1], bool)
    for _ in range(10 * lines.shape[1]):
        gradient = lines.T @ (wanted - lines @ weights)
        gradient[used] = -np.inf
        if gradient.max(initial=-np.inf) < 1e-9:
            break
        used[gradient.argmax()] = True
        while used.any():
            best = np.zeros_like(weights)
            best[used] = np.linalg.lstsq(lines[:, used], wanted, rcond=None)[0]
            if best[used].min() > 0:
                weights = best
                break
            falling = used & (best <= 0)
            share = (weights[falling] / np.maximum(weights[falling] - best[falling], 1e-300)).min()
            weights = weights + share * (best - weights)
            used &= weights > 1e-12
            weights[~used] = 0
    return np.asarray(weights / scale)


class Fit(NamedTuple):
    steps: Steps
    held_out: list[Sample]

    def line(self) -> str:
        """How far off it is where it was not fitted."""
        errors = sorted(self.steps.errors(self.held_out))
        seconds = sum(self.steps.seconds(sample.made_of) for sample in self.held_out)
        ratio = seconds / sum(sample.seconds for sample in self.held_out)
        return (
            f"of {len(errors)} samples that were not fitted: off by {statistics.median(errors):.1%} (median), "
            f"{errors[int(0.9 * (len(errors) - 1))]:.1%} (90 % of them); all together {ratio:.3f} x"
        )


def fit(engine: Engine, samples: Sequence[Sample]) -> Fit:
    """To all but some, which are there to be compared."""
    if len(samples) < 2 * HELD_OUT:
        raise ValueError(f"there are {len(samples)} samples of passes: at least {2 * HELD_OUT} are needed")
    mixed = list(samples)
    random.Random(0).shuffle(mixed)
    held_out, fitted = mixed[::HELD_OUT], [sample for i, sample in enumerate(mixed) if i % HELD_OUT]
    return Fit(Steps(engine, fitted), held_out)


def report_values(engine: Engine, model: str, samples: Sequence[Sample]) -> dict[str, Any]:
    """For a report file."""
    rows = [[*sample.made_of, round(sample.seconds, 7), round(sample.host, 7)] for sample in samples]
    return {"model": model, "engine": asdict(engine), "columns": [*Pass._fields, "seconds", "host"], "passes": rows}


class StepReport(NamedTuple):
    model: str
    machine: Mapping[str, Any]
    engine: Engine
    samples: list[Sample]
    front_s: float  # that the server adds to the first token; 0: not measured


def read_report(path: Path) -> StepReport:
    try:
        values = json.loads(path.read_text())
        if values["benchmark"] != "steps":
            raise ValueError
        samples = [Sample(Pass(*row[:-2]), *row[-2:]) for row in values["passes"]]
        engine = Engine(**values["engine"])
        return StepReport(values["model"], values["machine"], engine, samples, values.get("front_s", 0.0))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{path} is no report of step times: make one with `simulate.py measure`") from None
