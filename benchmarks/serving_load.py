"""Requests for an `LLM`, all at once or in Poisson arrivals, and their measurements: for `bench_serving.py`."""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Iterable
from collections.abc import Sequence as Collection
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from gpu_shapes import cache_bytes, prefill_flops, step_weight_bytes

from infer.engine.engine import Event
from infer.engine.generate import generate
from infer.engine.llm import LLM
from infer.engine.params import SamplingParams
from infer.engine.result import GenerationResult
from infer.engine.scheduler import ScheduledTokens
from infer.engine.sequence import Sequence
from infer.models.common import Decoder

TOKENS = 10_000  # nano-vllm draws prompts from this many token ids
READ_RATE, FLOP_RATE = 4599e9, 790e12  # bytes and FLOP per second of an H200, for the roofline
TIMEOUT_S = 600.0  # of a run


class LoadRequest(NamedTuple):
    """A request before it is submitted."""

    prompt: list[int]
    params: SamplingParams


class RequestField(NamedTuple):
    """The results of requests."""

    requests: Collection[LoadRequest]
    results: Collection[GenerationResult]
    seconds: float  # from the first arrival to the end of the last
    late: Collection[float]  # seconds from each one's arrival until it was submitted

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


def make_requests(
    vocab_size: int,
    count: int,
    prompt_tokens: tuple[int, int],
    new_tokens: tuple[int, int],
    *,
    seed: int = 0,
    temperature: float = 0.6,
) -> list[LoadRequest]:
    """Random prompts and lengths, drawn in nano-vllm's order: seed 0 gives the lengths of its benchmark."""
    draw = random.Random(seed).randint
    last = min(TOKENS, vocab_size - 1)
    prompts = [[draw(0, last) for _ in range(draw(*prompt_tokens))] for _ in range(count)]
    lengths = [draw(*new_tokens) for _ in range(count)]
    return [
        LoadRequest(prompt, SamplingParams(max_new_tokens=length, temperature=temperature, seed=i, ignore_eos=True))
        for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
    ]


def poisson(rate: float, count: int, seed: int = 0) -> list[float]:
    """Arrival times in seconds. rate: requests per second."""
    draw, now, arrivals = random.Random(seed), 0.0, []
    for _ in range(count):
        now += draw.expovariate(rate)
        arrivals.append(now)
    return arrivals


def serve(llm: LLM, requests: Collection[LoadRequest], arrivals: Collection[float] | None = None) -> RequestField:
    """Submit each request when it arrives, and wait for all. arrivals: in seconds from now; None: all at once."""
    begin, handles, late = time.perf_counter(), [], []
    for request, arrival in zip(requests, arrivals or [0.0] * len(requests), strict=True):
        time.sleep(max(0.0, begin + arrival - time.perf_counter()))
        late.append(time.perf_counter() - begin - arrival)
        handles.append(llm.submit(request.prompt, request.params))
    results = [handle.result(TIMEOUT_S) for handle in handles]
    return RequestField(requests, results, time.perf_counter() - begin, late)


class Passes:
    """Records all steps of an `LLM`, inside a `with` block."""

    def __init__(self, llm: LLM) -> None:
        self._llm, self.events = llm, list[Event]()

    def __enter__(self) -> Passes:
        self._end = self._llm.watch(lambda event: self.events.append(event) if event.kind == "step" else None)
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def wait_until_decoding(self, rows: int) -> list[Sequence]:
        """Wait for a step in which exactly `rows` sequences decode; returns these sequences."""
        until = time.perf_counter() + TIMEOUT_S
        while time.perf_counter() < until:
            if full := [event for event in self.events if decodes(event.scheduled, rows)]:
                return [sequence for sequence, _ in full[0].scheduled]
            time.sleep(0.01)
        raise TimeoutError(f"{rows} rows do not decode after {TIMEOUT_S:.0f} seconds")

    def rows(self) -> float:
        """Mean rows per step."""
        return statistics.fmean(len(event.scheduled) for event in self.events)

    def host_us(self) -> float:
        """Mean host microseconds between two steps per sequence, for a load under which it is never idle."""
        between = [after.time - after.seconds - before.time for before, after in pairwise(self.events)]
        return 1e6 * sum(between) / sum(len(event.scheduled) for event in self.events[1:])


def decodes(scheduled: Collection[ScheduledTokens], rows: int) -> bool:
    """Whether exactly `rows` sequences decode, and nothing else runs."""
    return [n for _, n in scheduled] == [1] * rows


def mixed(events: Iterable[Event]) -> list[Event]:
    """Steps in which some sequences decode while a chunk of a prompt is computed."""
    counts = [(event, [n for _, n in event.scheduled]) for event in events if event.scheduled]
    return [event for event, each in counts if min(each) == 1 < max(each)]


def gaps(sequences: Collection[Sequence], begin: float, end: float) -> list[float]:
    """Seconds between two tokens of a sequence, for gaps that overlap that time."""
    return [b - a for each in sequences for a, b in pairwise(each.token_times) if a <= end and b >= begin]


def percentile(values: Collection[float], percent: float) -> float:
    """The smallest value that is at least as large as this percentage of the values."""
    ordered = sorted(values)
    return ordered[max(0, -int(-len(ordered) * percent // 100) - 1)]


def latencies(served: RequestField) -> dict[str, Any]:
    first, between = served.first_token_s, served.between_s
    return {
        "first_token_s": statistics.median(first),
        "first_token_p99_s": percentile(first, 99),
        "between_s": statistics.median(between),
        "between_p99_s": percentile(between, 99),
    }


def processor_seconds() -> tuple[float, float]:
    """CPU seconds of other programs so far, and of all CPUs including idle time; zeros without /proc/stat."""
    try:
        ticks = [int(each) for each in Path("/proc/stat").read_text().split()[1:9]]
    except OSError:
        return 0.0, 0.0
    idle, every, own, second = ticks[3] + ticks[4], sum(ticks), os.times(), os.sysconf("SC_CLK_TCK")
    return (every - idle) / second - own.user - own.system, every / second


def roofline(model: Decoder, requests: Collection[LoadRequest]) -> float:
    """Output tokens per second if decode is bound by reads of weights and caches, prefill by FLOP, without overlap."""
    config, lengths = model.config, [(len(request.prompt), request.params.max_new_tokens) for request in requests]
    positions = range(max(prompt + new for prompt, new in lengths))
    keys = list(accumulate(cache_bytes(config, count, model.dtype.itemsize) for count in positions))
    read = (max(new for _, new in lengths) - 1) * step_weight_bytes(model)
    read += sum(keys[prompt + new - 1] - keys[prompt] for prompt, new in lengths)  # the prompt gives the first token
    products = sum(prefill_flops(model, prompt) for prompt, _ in lengths)
    return sum(new for _, new in lengths) / (read / READ_RATE + products / FLOP_RATE)


def same_alone(model: Decoder, tokenizer: Any, request: LoadRequest, result: GenerationResult) -> bool:
    """Whether `generate` gives this request the same tokens alone."""
    params = replace(request.params, max_new_tokens=len(result.token_ids))  # fewer if it was aborted
    return generate(model, tokenizer, request.prompt, params).token_ids == result.token_ids
