"""Prometheus metrics, by vLLM's names with the prefix `infer:`, and OpenTelemetry spans.

A span is made after its request has ended, from times that the engine keeps anyway. It holds no text.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from infer.engine.engine import Stats
from infer.engine.params import SamplingParams
from infer.engine.result import GenerationResult
from infer.server.wire import ANSWER, ERROR, finish_reason
from infer.version import install

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
STEPS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)
TOKENS = tuple(m * 10**e for e in range(6) for m in (1, 2, 5))
HISTOGRAMS: tuple[tuple[str, str, tuple[float, ...], Callable[[GenerationResult], float | None]], ...] = (
    (
        "time_to_first_token_seconds",
        "From arrival to the first token.",
        SECONDS,
        lambda result: result.timing.first_token_s if result.token_ids else None,
    ),
    ("e2e_request_latency_seconds", "From arrival to the last token.", SECONDS, lambda result: result.timing.total_s),
    (
        "request_queue_time_seconds",
        "From arrival to the first pass.",
        SECONDS,
        lambda result: result.timing.queue_time_s,
    ),
    ("request_prompt_tokens", "Tokens of a prompt.", TOKENS, lambda result: result.prompt_tokens),
    ("request_generation_tokens", "Tokens generated for a sequence.", TOKENS, lambda result: result.generated_tokens),
)
# The end of a path that generates text, and the conventions' name of the operation.
OPERATIONS = {"/chat/completions": "chat", "/v1/responses": "chat", "/v1/completions": "text_completion"}


class Metrics:
    """Histograms of finished sequences, and the engine's own counters, which are read when metrics are collected."""

    def __init__(self, stats: Callable[[], Stats]) -> None:
        """stats: of the engine."""
        self.registry = registry = CollectorRegistry()
        self._stats = stats

        self._histograms = [
            (Histogram(f"infer:{name}", help, buckets=buckets, registry=registry), value)
            for name, help, buckets, value in HISTOGRAMS
        ]
        self._steps = [0] * (len(STEPS) + 1)  # tokens by their latency: too many for a `Histogram`
        self._steps_s = 0.0
        self._finished = Counter(
            "infer:request_success", "Finished sequences by finish reason.", ["finished_reason"], registry=registry
        )
        self.refused = Counter("infer:request_refused", "Requests refused because of a full queue.", registry=registry)
        registry.register(self)

    def count(self, result: GenerationResult) -> None:
        """A finished sequence."""
        for histogram, value in self._histograms:
            if (found := value(result)) is not None:
                histogram.observe(found)
        for seconds in result.timing.decode_times_s:
            self._steps[bisect_left(STEPS, seconds)] += 1
        self._steps_s += result.timing.decode_time_s
        reason = {"eos": "stop", "interrupted": "abort"}.get(result.finish_reason, result.finish_reason)
        self._finished.labels(reason).inc()

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        used = stats.pages_used / stats.pages
        prefixes = max(0.0, 1 - used - stats.pages_free / stats.pages)  # the two may be of different moments
        queries = stats.prompt_tokens + stats.cached_tokens
        for name, help, value in (
            ("num_requests_running", "Sequences that run.", stats.running),
            ("num_requests_waiting", "Sequences that wait for a row or for memory.", stats.waiting),
            ("kv_cache_usage_perc", "Share of the KV cache's pages that sequences use; 1 is all of them.", used),
            ("prefix_cache_usage_perc", "Share that only the prefix cache holds, and frees when needed.", prefixes),
        ):
            yield GaugeMetricFamily(f"infer:{name}", help, float(value))
        for name, help, value in (
            ("num_preemptions", "Sequences preempted to free their pages.", stats.preemptions),
            ("prompt_tokens", "Prompt tokens computed.", stats.prompt_tokens),
            ("generation_tokens", "Tokens generated.", stats.generated_tokens),
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", queries),
            ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", stats.cached_tokens),
            ("spec_decode_num_draft_tokens", "Drafted tokens that were verified.", stats.drafted_tokens),
            ("spec_decode_num_accepted_tokens", "Drafted tokens that were right.", stats.accepted_tokens),
        ):
            yield CounterMetricFamily(f"infer:{name}", help, float(value))
        buckets = list(zip([*map(str, STEPS), "+Inf"], map(float, accumulate(self._steps)), strict=True))
        yield HistogramMetricFamily(
            "infer:inter_token_latency_seconds", "Between two tokens of a sequence.", buckets, self._steps_s
        )

    def text(self) -> bytes:
        return generate_latest(self.registry)


def _is_http_url(text: str) -> bool:
    try:
        url = urlsplit(text)
        return url.scheme in ("http", "https") and bool(url.hostname) and " " not in text and url.port != 0
    except ValueError:  # of the address or the port
        return False


@contextmanager
def exporting(endpoint: str | None) -> Iterator[Tracer | None]:
    """A tracer that sends spans to an OTLP endpoint over HTTP; without an endpoint None, and nothing is imported.

    The SDK's variables, such as OTEL_SERVICE_NAME and OTEL_TRACES_SAMPLER, apply.
    """
    if endpoint is None:
        yield None
        return
    if not _is_http_url(endpoint):
        raise ValueError(f"--otlp-traces-endpoint: {endpoint!r} is not a URL like http://HOST:4318/v1/traces")
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ImportError(f"{error}: spans need more packages: {install('otel')}") from None
    resource = Resource.create()
    if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: "infer"}))
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    try:
        yield provider.get_tracer("infer")
    finally:
        provider.shutdown()  # sends the remaining spans


class Spans:
    """Middleware: one span per request that generates text, by the conventions for generative AI."""

    def __init__(self, app: ASGIApp, tracer: Tracer, model: str) -> None:
        self.app, self._tracer, self._model = app, tracer, model

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"] if scope["type"] == "http" and scope["method"] == "POST" else ""
        operation = next((name for end, name in OPERATIONS.items() if path.endswith(end)), None)
        if operation is None:
            await self.app(scope, receive, send)
            return
        start, error_type = time.time_ns(), ""
        try:
            await self.app(scope, receive, send)
        except Exception as error:
            error_type = type(error).__name__
            raise
        finally:
            self._export(scope, operation, start, error_type)

    def _export(self, scope: Scope, operation: str, start: int, error_type: str) -> None:
        from opentelemetry.propagate import extract
        from opentelemetry.trace import SpanKind, StatusCode

        answer, error = scope.get(ANSWER), scope.get(ERROR)
        attributes: dict[str, Any] = {"gen_ai.operation.name": operation, "gen_ai.provider.name": "infer"}
        if answer is not None and answer.params is not None:
            attributes |= self._attributes(answer.params, answer.results)
        if error is not None:
            error_type = error.code or str(error.status)
        if error_type:
            attributes["error.type"] = error_type
        elif answer is None or not answer.results:  # the client has disconnected
            attributes["gen_ai.response.finish_reasons"] = ["abort"]
        span = self._tracer.start_span(
            f"{operation} {self._model}",
            context=extract(dict(Headers(scope=scope))),
            kind=SpanKind.SERVER,
            attributes=attributes,
            start_time=start,
        )
        if error_type and (error is None or error.status >= 500):  # others are the client's errors
            span.set_status(StatusCode.ERROR)
        span.end()

    def _attributes(self, params: SamplingParams, results: Sequence[GenerationResult]) -> dict[str, Any]:
        """By the names of the conventions; latencies by vLLM's."""
        attributes: dict[str, Any] = {
            "gen_ai.request.model": self._model,
            "gen_ai.request.max_tokens": params.max_new_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.choice.count": params.n,
        }
        if results:
            slowest = max((result.timing for result in results), key=lambda timing: timing.total_s)
            attributes |= {
                "gen_ai.response.model": self._model,
                "gen_ai.response.finish_reasons": [finish_reason(result.finish_reason) for result in results],
                "gen_ai.usage.input_tokens": sum(result.prompt_tokens for result in results[:: params.n]),
                "gen_ai.usage.cache_read.input_tokens": sum(
                    result.num_cached_tokens for result in results[:: params.n]
                ),
                "gen_ai.usage.output_tokens": sum(result.generated_tokens for result in results),
                "gen_ai.latency.time_in_queue": slowest.queue_time_s,
                "gen_ai.latency.time_to_first_token": slowest.first_token_s,
                "gen_ai.latency.time_in_model_prefill": slowest.prefill_time_s,
                "gen_ai.latency.time_in_model_decode": slowest.decode_time_s,
                "gen_ai.latency.e2e": slowest.total_s,
            }
        return attributes
