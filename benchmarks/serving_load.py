"""Requests for an `LLM`, all at once or arriving by chance, and what is seen of them: `bench_serving.py` runs it."""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from gpu_shapes import cache_bytes, prefill_flops, step_weight_bytes

from infer.engine.generate import generate
from infer.engine.llm import LLM
from infer.engine.loop import Event, Task
from infer.engine.params import SamplingParams
from infer.engine.result import GenerationResult
from infer.models.common import Decoder

TOKENS = 10_000  # nano-vllm draws prompts from so many tokens
READ_RATE, PRODUCT_RATE = 4599e9, 790e12  # bytes and FLOP per second of an H200, for the roofline
PATIENCE_S = 600.0  # a run that takes longer has failed


class Ask(NamedTuple):
    """A request before it is submitted."""

    prompt: list[int]
    params: SamplingParams


class Served(NamedTuple):
    """What became of requests."""

    asks: Sequence[Ask]
    results: Sequence[GenerationResult]
    seconds: float  # from the first arrival to the end of the last
    late: Sequence[float]  # seconds from each one's arrival until it was submitted

    @property
    def tokens(self) -> int:
        return sum(result.generated_tokens for result in self.results)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def first_token_s(self) -> list[float]:
        """Of each request, from its arrival."""
        times = [result.timing for result in self.results]
        return [late + time.queue_time_s + time.prefill_time_s for late, time in zip(self.late, times, strict=True)]

    @property
    def between_s(self) -> list[float]:
        """Between a token and the next, of all requests."""
        return [step for result in self.results for step in result.timing.decode_times_s]


def make_asks(
    vocab_size: int,
    count: int,
    prompt_tokens: tuple[int, int],
    new_tokens: tuple[int, int],
    *,
    seed: int = 0,
    temperature: float = 0.6,
) -> list[Ask]:
    """Random prompts and lengths, drawn in nano-vllm's order: seed 0 gives the lengths of its benchmark."""
    draw = random.Random(seed).randint
    last = min(TOKENS, vocab_size - 1)
    prompts = [[draw(0, last) for _ in range(draw(*prompt_tokens))] for _ in range(count)]
    lengths = [draw(*new_tokens) for _ in range(count)]
    return [
        Ask(prompt, SamplingParams(max_new_tokens=length, temperature=temperature, seed=i, ignore_eos=True))
        for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
    ]


def poisson(rate: float, count: int, seed: int = 0) -> list[float]:
    """When requests arrive, in seconds, if so many a second do."""
    draw, now, arrivals = random.Random(seed), 0.0, []
    for _ in range(count):
        now += draw.expovariate(rate)
        arrivals.append(now)
    return arrivals


def serve(llm: LLM, asks: Sequence[Ask], arrivals: Sequence[float] | None = None) -> Served:
    """Submit each when it arrives, and wait for all. arrivals: in seconds from now; None: all at once."""
    begin, handles, late = time.perf_counter(), [], []
    for ask, arrival in zip(asks, arrivals or [0.0] * len(asks), strict=True):
        time.sleep(max(0.0, begin + arrival - time.perf_counter()))
        late.append(time.perf_counter() - begin - arrival)
        handles.append(llm.submit(ask.prompt, ask.params))
    results = [handle.result(PATIENCE_S) for handle in handles]
    return Served(asks, results, time.perf_counter() - begin, late)


class Passes:
    """Listens to an `LLM` within a `with`: all passes, in their order."""

    def __init__(self, llm: LLM) -> None:
        self._llm, self.events = llm, list[Event]()

    def __enter__(self) -> Passes:
        self._end = self._llm.watch(lambda event: self.events.append(event) if event.kind == "pass" else None)
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def wait_until_decoding(self, rows: int) -> list[Task]:
        """Until so many rows take part in a pass, each with one token; these rows."""
        until = time.perf_counter() + PATIENCE_S
        while time.perf_counter() < until:
            if full := [event for event in self.events if list(event.fed.values()) == [1] * rows]:
                return list(full[0].fed)
            time.sleep(0.01)
        raise TimeoutError(f"{rows} rows do not decode after {PATIENCE_S:.0f} seconds")

    def rows(self) -> float:
        """In a pass, on average."""
        return statistics.fmean(len(event.fed) for event in self.events)

    def host_us(self) -> float:
        """Mean microseconds of the host between two passes, for each row. For a load that never lets it idle."""
        between = [after.time - after.seconds - before.time for before, after in pairwise(self.events)]
        return 1e6 * sum(between) / sum(len(event.fed) for event in self.events[1:])


def mixed(events: Iterable[Event]) -> list[Event]:
    """Passes in which some rows decode while a chunk of a prompt is computed."""
    return [event for event in events if event.fed and min(event.fed.values()) == 1 < max(event.fed.values())]


def gaps(tasks: Sequence[Task], begin: float, end: float) -> list[float]:
    """Seconds between two tokens of a row, of which at least a part lies within that time."""
    return [b - a for task in tasks for a, b in pairwise(task.times) if a <= end and b >= begin]


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that so many percent of them do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -int(-len(ordered) * percent // 100) - 1)]


def latencies(served: Served) -> dict[str, Any]:
    first, between = served.first_token_s, served.between_s
    return {
        "first_token_s": statistics.median(first),
        "first_token_p99_s": percentile(first, 99),
        "between_s": statistics.median(between),
        "between_p99_s": percentile(between, 99),
    }


def processor_seconds() -> tuple[float, float]:
    """Seconds that other programs have computed so far, and that all processors had; zeros where no file says it."""
    try:
        ticks = [int(each) for each in Path("/proc/stat").read_text().split()[1:9]]
    except OSError:
        return 0.0, 0.0
    idle, every, own, second = ticks[3] + ticks[4], sum(ticks), os.times(), os.sysconf("SC_CLK_TCK")
    return (every - idle) / second - own.user - own.system, every / second


def roofline(model: Decoder, asks: Sequence[Ask]) -> float:
    """Output tokens per second if each step reads the weights once and each row's keys, prompts are products, and
    nothing overlaps."""
    config, lengths = model.config, [(len(ask.prompt), ask.params.max_new_tokens) for ask in asks]
    positions = range(max(prompt + new for prompt, new in lengths))
    keys = list(accumulate(cache_bytes(config, count, model.dtype.itemsize) for count in positions))
    read = (max(new for _, new in lengths) - 1) * step_weight_bytes(model)
    read += sum(keys[prompt + new - 1] - keys[prompt] for prompt, new in lengths)  # the prompt gives the first token
    products = sum(prefill_flops(model, prompt) for prompt, _ in lengths)
    return sum(new for _, new in lengths) / (read / READ_RATE + products / PRODUCT_RATE)


def same_alone(model: Decoder, tokenizer: Any, ask: Ask, result: GenerationResult) -> bool:
    """Whether `generate` gives that request the same tokens when nothing runs beside it."""
    params = replace(ask.params, max_new_tokens=len(result.token_ids))  # it may have been aborted
    return generate(model, tokenizer, ask.prompt, params).token_ids == result.token_ids
