"""Numbers for dashboards, by the names that vLLM gave them, with our own prefix."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from infer.engine.loop import Stats
from infer.engine.result import GenerationResult
from infer.server import spans

SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
STEPS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)
TOKENS = tuple(m * 10**e for e in range(6) for m in (1, 2, 5))


class Metrics:
    """What requests took, kept here; and what the engine says of itself when it is asked."""

    def __init__(self, stats: Callable[[], Stats]) -> None:
        """stats: of the engine."""
        self.registry = registry = CollectorRegistry()
        self._stats = stats

        def histogram(name: str, words: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"infer:{name}", words, buckets=buckets, registry=registry)

        self._first = histogram("time_to_first_token_seconds", "From a request's arrival to its first token.", SECONDS)
        self._between = [0] * (len(STEPS) + 1)  # tokens by the time since the one before: too many for a `Histogram`
        self._between_s = 0.0
        self._whole = histogram("e2e_request_latency_seconds", "From a request's arrival to its end.", SECONDS)
        self._queue = histogram("request_queue_time_seconds", "From a request's arrival to its first pass.", SECONDS)
        self._prompt = histogram("request_prompt_tokens", "Tokens of a prompt.", TOKENS)
        self._text = histogram("request_generation_tokens", "Tokens of a text.", TOKENS)
        self._ended = Counter(
            "infer:request_success", "Texts by how they ended.", ["finished_reason"], registry=registry
        )
        self.refused = Counter("infer:request_refused", "Requests refused because too many waited.", registry=registry)
        registry.register(self)

    def count(self, result: GenerationResult) -> None:
        """A text that is over."""
        spans.note(result=result)
        timing = result.timing
        if result.token_ids:
            self._first.observe(timing.first_token_s)
        for seconds in timing.decode_times_s:
            self._between[bisect_left(STEPS, seconds)] += 1
        self._between_s += timing.decode_time_s
        self._whole.observe(timing.total_s)
        self._queue.observe(timing.queue_time_s)
        self._prompt.observe(result.prompt_tokens)
        self._text.observe(result.generated_tokens)
        self._ended.labels(
            {"eos": "stop", "interrupted": "abort"}.get(result.finish_reason, result.finish_reason)
        ).inc()

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        used = 1 - stats.pages_free / stats.pages
        for name, words, value in (
            ("num_requests_running", "Texts that are being generated.", stats.running),
            ("num_requests_waiting", "Texts that wait for a row or for memory.", stats.waiting),
            ("kv_cache_usage_perc", "Share of the cache's pages that are held; 1 is all of them.", used),
        ):
            yield GaugeMetricFamily(f"infer:{name}", words, float(value))
        for name, words, value in (
            ("num_preemptions", "Times that a text gave up its pages for others.", stats.preemptions),
            ("prompt_tokens", "Tokens of prompts that were computed.", stats.prompt_tokens),
            ("generation_tokens", "Tokens generated.", stats.generated_tokens),
            ("prefix_cache_queries", "Tokens of prompts.", stats.prompt_tokens + stats.prefix_hits),
            ("prefix_cache_hits", "Tokens of prompts that were in the cache.", stats.prefix_hits),
        ):
            yield CounterMetricFamily(f"infer:{name}", words, float(value))
        buckets = list(zip([*map(str, STEPS), "+Inf"], map(float, accumulate(self._between)), strict=True))
        yield HistogramMetricFamily(
            "infer:inter_token_latency_seconds", "Between two tokens of a text.", buckets, self._between_s
        )

    def text(self) -> bytes:
        return generate_latest(self.registry)
