"""The time of a pass of the engine: measured on the real `LLM`, written to a report, and fitted.

The time of a pass is counted from the end of the previous one, so it includes the host's time. It depends on the rows
that decode, the positions they attend to, prompt tokens and the positions these attend to, and the number of new rows.

On a CPU one pass computes all of these together. On a GPU rows decode in captured steps: the number of rows is rounded
up, the longest row may determine the time, prompts are separate passes, and the engine launches a step ahead of the
tokens it reads. So the prompt passes that one call of the engine launches delay the next call. Only short prompts,
which are launched kernel by kernel, take host time in the same call.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import time
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Collection
from dataclasses import asdict, dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from serving_load import TIMEOUT_S, LoadRequest, Passes, decodes, make_requests

from infer.engine.engine import Event
from infer.engine.llm import LLM, Handle
from infer.engine.sequence import Sequence

Array = NDArray[np.float64]
ROW_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # of captured steps
SHORT = 32  # tokens of prompts that are launched kernel by kernel
TOKEN_SIZES = (64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)  # of captured passes of prompts
MANY = 32  # with as many rows or more, a captured step attends with one program per row and head
LONE = [(few, many) for few in (0.25, 0.5, 1.0) for many in (1, 24, 40, 56)]  # see `Steps`
KNOTS = (1, 2, 3, 4, 6, 8, 12, 15, 16, 24, 32, 48, 64, 96, 128, 160, 192, 256, 512, 1024)  # tokens of other passes
MERGED = 8  # equal consecutive passes that become one sample, their median
OUTLIER = 0.5  # relative error above which a sample is dropped: the machine was busy
HELD_OUT = 5  # one of this many samples is not fitted, to test the fit


class Pass(NamedTuple):
    """The work of a pass."""

    rows: int = 0  # decoding, with one token each
    positions: int = 0  # attended by these rows, in total
    tokens: int = 0  # of prompts
    pairs: int = 0  # query-key pairs of these tokens
    prompts: int = 0  # rows with prompt tokens
    begun: int = 0  # rows that were not in the previous pass
    longest: int = 0  # positions of the longest decoding row


class Sample(NamedTuple):
    made_of: Pass
    seconds: float  # since the end of the previous pass
    host: float  # of these, between the two passes


@dataclass(frozen=True)
class Engine:
    """The parameters of an engine that its schedule depends on."""

    max_rows: int = 256
    prefill_chunk: int = 128
    captured: bool = False  # rows decode in captured steps, one of which is launched ahead
    page: int = 64
    pages: int = 4096
    context: int = 8192


@dataclass(frozen=True)
class Grid:
    """The loads to measure."""

    stairs: tuple[tuple[int, int], ...]  # rows, and tokens of their prompts; then fewer and fewer rows
    levels: tuple[int, ...]  # numbers of rows to measure
    passes: int  # at each level
    beside: tuple[int, ...]  # rows that decode while prompts are prefilled
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
    def look(engine: Any) -> Engine:
        scheduler, pool = engine.scheduler, engine.memory.pool
        pages, captured = pool.num_pages // len(engine.memory.index.windows), engine.runner.num_lookahead_slots > 0
        return Engine(scheduler.max_rows, scheduler.prefill_chunk, captured, pool.page_size, pages, engine.context)

    return llm.between_steps(look).result()


class Recorded(Passes):
    """Records the work of each step when it ends, before sequences change."""

    def __init__(self, llm: LLM) -> None:
        super().__init__(llm)
        self.held: list[dict[Sequence, int]] = []  # tokens that each cache holds after the step
        self.begin = 0  # the first step that counts

    def __enter__(self) -> Recorded:
        def listen(event: Event) -> None:
            if event.kind == "step":
                self.held.append({sequence: sequence.num_computed_tokens + n for sequence, n in event.scheduled})
                self.events.append(event)

        self._end = self._llm.watch(listen)
        return self

    def wait(self, rows: int, passes: int) -> None:
        """Wait for `passes` passes in which exactly `rows` rows decode."""
        begin, until = len(self.events), time.perf_counter() + TIMEOUT_S
        while time.perf_counter() < until:
            if sum(decodes(event.scheduled, rows) for event in self.events[begin:]) >= passes:
                return
            time.sleep(0.005)
        raise TimeoutError(f"{rows} rows do not decode after {TIMEOUT_S:.0f} seconds")

    def samples(self, captured: bool) -> list[Sample]:
        """One for each pass except the first; with captured steps, only for passes that wait for a launched step."""
        found = []
        for i in range(self.begin + 1, len(self.events)):
            event, before = self.events[i], self.events[i - 1]
            decoding = {sequence for sequence, n in event.scheduled if n == 1}
            fed = self._prompts(i)
            if captured:
                decoding &= {sequence for sequence, n in before.scheduled if n == 1}
                fed = [
                    each for at in (i - 1, i) for each in self._prompts(at) if is_short(self._prompts(at)) == (at == i)
                ]
                if not decoding:
                    continue
            held = [self.held[i][sequence] for sequence in decoding]
            made_of = Pass(
                len(held),
                sum(held),
                sum(n for n, _ in fed),
                sum(pairs(*each) for each in fed),
                len(fed),
                len(self.held[i].keys() - self.held[i - 1].keys()),
                max(held, default=0),
            )
            seconds = event.time - before.time
            found.append(Sample(made_of, seconds, seconds - event.seconds))
        return found

    def _prompts(self, i: int) -> list[tuple[int, int]]:
        """For each prompt in a step: tokens that are computed, and tokens in its cache afterwards."""
        return [(n, self.held[i][sequence]) for sequence, n in self.events[i].scheduled if n > 1]


def is_short(prompts: Collection[tuple[int, int]]) -> bool:
    return sum(n for n, _ in prompts) <= SHORT


def pairs(n: int, held: int) -> int:
    """Query-key pairs of n tokens, the last of `held` positions."""
    return n * (held - n) + n * (n + 1) // 2


def measure(llm: LLM, grid: Grid) -> Iterator[tuple[str, list[Sample]]]:
    """A description and the samples of each load. With captured steps, a first load warms up."""
    engine, vocabulary = engine_of(llm), llm.model.config.vocab_size
    seeds = iter(range(10_000, 20_000))
    most = engine.pages * engine.page * 3 // 4  # tokens at once

    def request(tokens: int, new: int = 4096) -> LoadRequest:
        """Requests are made before the measurement: that would block the engine's thread."""
        new = min(new, engine.context - tokens)
        return make_requests(vocabulary, 1, (tokens, tokens), (new, new), seed=next(seeds))[0]

    def submit(requests: Collection[LoadRequest]) -> list[Handle]:
        return [llm.submit(each.prompt, each.params) for each in requests]

    def end(handles: Collection[Handle]) -> None:
        for handle in handles:
            handle.abort()
        for handle in handles:
            handle.result(TIMEOUT_S)

    for i, (rows, context) in enumerate([*grid.stairs[: engine.captured], *grid.stairs]):
        rows = min(rows, engine.max_rows, most // (context + 256))
        levels = [level for level in grid.levels if level <= rows]
        if not levels or context >= engine.context:
            continue
        requests = [request(context) for _ in range(levels[0])]
        with Recorded(llm) as passes:
            handles = submit(requests)
            for level in levels:
                end(handles[level:])
                del handles[level:]
                passes.wait(level, grid.passes)
        end(handles)
        if i or not engine.captured:
            yield f"{levels[0]} rows of {context:,} tokens, down to 1", passes.samples(engine.captured)
    for rows in grid.beside:
        handles = submit([request(16) for _ in range(rows)])
        repeats = grid.repeats + 2 * engine.captured
        lengths = [tokens for tokens in grid.prompts if tokens + 1 < min(engine.context, most)]
        requests = [request(tokens + engine.captured, 1) for _ in range(repeats) for tokens in lengths]
        with Recorded(llm) as passes:
            passes.wait(rows, 1)
            for i, each in enumerate(requests):
                if i == 2 * engine.captured * len(lengths):  # each size is captured by now
                    passes.begin = len(passes.events)
                submit([each])[0].result(TIMEOUT_S)
        end(handles)
        yield f"prompts beside {rows} rows", passes.samples(engine.captured)


def merged(samples: Collection[Sample]) -> list[Sample]:
    """Merge up to MERGED consecutive equal passes into one sample."""
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

    def __init__(self, engine: Engine, samples: Collection[Sample]) -> None:
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
        """Positions to read, as if all rows had the same length."""
        if not self.engine.captured:
            return made_of.positions
        few, many = lone
        rows = many if made_of.rows > MANY // 2 else few * rounded_up(made_of.rows, ROW_SIZES)
        return max(made_of.positions, rows * made_of.longest)

    def fixed(self, rows: int, tokens: int) -> float:
        """Seconds of a pass without attention."""
        if (rows, tokens) not in self._fixed:
            features = self._features(Pass(rows, 0, tokens), self._lone)
            self._fixed[rows, tokens] = float(np.dot(features, self._weights))
        return self._fixed[rows, tokens]

    def seconds(self, made_of: Pass) -> float:
        rows, _, tokens, pairs, prompts, begun, _ = made_of
        more = (self._many if rows > MANY // 2 else self._few) * self._read(made_of, self._lone)
        return self.fixed(rows, tokens) + more + self._pair * pairs + self._prompt * prompts + self._begun * begun

    def growth(self, made_of: Pass) -> float:
        """Additional seconds of the next pass of the same rows."""
        later = made_of._replace(positions=made_of.positions + made_of.rows, longest=made_of.longest + 1)
        return self.seconds(later) - self.seconds(made_of)

    def errors(self, samples: Collection[Sample]) -> list[float]:
        return [abs(self.seconds(sample.made_of) / sample.seconds - 1) for sample in samples]


def fitted_weights(features: Array, samples: Collection[Sample]) -> tuple[Array, float]:
    """Weights, and the mean relative error. Outliers are dropped for a second fit."""
    lines = features / np.array([[sample.seconds] for sample in samples])
    weights = least_squares(lines, np.ones(len(lines)))
    usual = np.abs(lines @ weights - 1) < OUTLIER
    weights = least_squares(lines[usual], np.ones(int(usual.sum())))
    return weights, float(np.minimum(np.abs(lines @ weights - 1), OUTLIER).mean())


def rounded_up(value: int, sizes: Collection[int]) -> int:
    return next((size for size in sizes if size >= value > 0), value)


def climb(value: float, knots: Collection[int]) -> list[float]:
    """Shares of the way from each knot to the next; beyond the last knot the last slope continues.

    A weighted sum of them is a line from knot to knot. Nothing, if the value is 0.
    """
    if not value:
        return [0.0] * len(knots)
    steps = [(value - low) / (high - low) for low, high in pairwise(knots)]
    return [1.0, *(min(max(step, 0.0), 1.0) for step in steps[:-1]), max(steps[-1], 0.0)]


def least_squares(lines: Array, targets: Array) -> Array:
    """Weights, none negative, that bring lines @ weights closest to the targets (Lawson and Hanson, 1974)."""
    scale = np.linalg.norm(lines, axis=0)
    scale[scale == 0] = 1
    lines = lines / scale
    weights = np.zeros(lines.shape[1])
    used = np.zeros(lines.shape[1], bool)
    for _ in range(10 * lines.shape[1]):
        gradient = lines.T @ (targets - lines @ weights)
        gradient[used] = -np.inf
        if gradient.max(initial=-np.inf) < 1e-9:
            break
        used[gradient.argmax()] = True
        while used.any():
            best = np.zeros_like(weights)
            best[used] = np.linalg.lstsq(lines[:, used], targets, rcond=None)[0]
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


def fit(engine: Engine, samples: Collection[Sample]) -> Fit:
    """To all but some, which are there to be compared."""
    if len(samples) < 2 * HELD_OUT:
        raise ValueError(f"there are {len(samples)} samples of passes: at least {2 * HELD_OUT} are needed")
    mixed = list(samples)
    random.Random(0).shuffle(mixed)
    held_out, fitted = mixed[::HELD_OUT], [sample for i, sample in enumerate(mixed) if i % HELD_OUT]
    return Fit(Steps(engine, fitted), held_out)


def report_values(engine: Engine, model: str, samples: Collection[Sample]) -> dict[str, Any]:
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
        raise ValueError(f"{path} is no report of step times: make one with `benchmarks/simulate measure`") from None
