"""OpenTelemetry spans, where they are asked for: one for each request for text, by the conventions for generative AI.

A span is made when its request is over, of times that the engine has kept anyway. It holds no text.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from infer.engine.params import SamplingParams
from infer.engine.result import GenerationResult
from infer.server.errors import ApiError
from infer.server.tokens import finish_reason
from infer.version import install

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

# How paths that generate text end, and what the conventions call that.
OPERATIONS = {"/chat/completions": "chat", "/v1/responses": "chat", "/v1/completions": "text_completion"}


@dataclass
class Noted:
    """What becomes known of a request on its way."""

    params: SamplingParams | None = None
    results: list[GenerationResult] = field(default_factory=list)
    error: ApiError | None = None


_noted: ContextVar[Noted | None] = ContextVar("noted", default=None)


def note(
    *, params: SamplingParams | None = None, result: GenerationResult | None = None, error: ApiError | None = None
) -> None:
    """Something about the request that is being answered, for its span, if it gets one."""
    noted = _noted.get()
    if noted is not None:
        noted.params = params or noted.params
        noted.error = error or noted.error
        if result is not None:
            noted.results.append(result)


@contextmanager
def exporting(endpoint: str | None) -> Iterator[Tracer | None]:
    """A tracer whose spans are sent to an OTLP endpoint over HTTP; None: there is none, and nothing is imported.

    All else is set by the usual variables, as OTEL_SERVICE_NAME and OTEL_TRACES_SAMPLER.
    """
    if endpoint is None:
        yield None
        return
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
        provider.shutdown()  # sends what is left


class Spans:
    """Makes a span of each request for text."""

    def __init__(self, app: ASGIApp, tracer: Tracer, model: str) -> None:
        self.app, self._tracer, self._model = app, tracer, model

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"] if scope["type"] == "http" and scope["method"] == "POST" else ""
        operation = next((name for end, name in OPERATIONS.items() if path.endswith(end)), None)
        if operation is None:
            await self.app(scope, receive, send)
            return
        began, noted, failure = time.time_ns(), Noted(), ""
        before = _noted.set(noted)
        try:
            await self.app(scope, receive, send)
        except Exception as error:
            failure = type(error).__name__
            raise
        finally:
            _noted.reset(before)
            self._make(scope, operation, began, noted, failure)

    def _make(self, scope: Scope, operation: str, began: int, noted: Noted, failure: str) -> None:
        from opentelemetry.propagate import extract
        from opentelemetry.trace import SpanKind, StatusCode

        attributes = {"gen_ai.operation.name": operation, "gen_ai.provider.name": "infer", **self._attributes(noted)}
        if noted.error is not None:
            failure = noted.error.code or str(noted.error.status)
        if failure:
            attributes["error.type"] = failure
        elif not noted.results:  # the client has gone
            attributes["gen_ai.response.finish_reasons"] = ["abort"]
        span = self._tracer.start_span(
            f"{operation} {self._model}",
            context=extract(dict(Headers(scope=scope))),
            kind=SpanKind.SERVER,
            attributes=attributes,
            start_time=began,
        )
        if failure and (noted.error is None or noted.error.status >= 500):  # else it is the client's
            span.set_status(StatusCode.ERROR)
        span.end()

    def _attributes(self, noted: Noted) -> dict[str, Any]:
        """By the names of the conventions; latencies by vLLM's."""
        params, results = noted.params, noted.results
        attributes: dict[str, Any] = {}
        if params is not None:
            attributes = {
                "gen_ai.request.model": self._model,
                "gen_ai.request.max_tokens": params.max_new_tokens,
                "gen_ai.request.temperature": params.temperature,
                "gen_ai.request.top_p": params.top_p,
                "gen_ai.request.choice.count": params.n,
            }
        if params is not None and results:
            timing = max((result.timing for result in results), key=lambda timing: timing.total_s)
            attributes |= {
                "gen_ai.response.model": self._model,
                "gen_ai.response.finish_reasons": [finish_reason(result.finish_reason) for result in results],
                "gen_ai.usage.input_tokens": sum(result.prompt_tokens for result in results[:: params.n]),
                "gen_ai.usage.cache_read.input_tokens": sum(result.known_tokens for result in results[:: params.n]),
                "gen_ai.usage.output_tokens": sum(result.generated_tokens for result in results),
                # Of several texts, those of the one that took longest.
                "gen_ai.latency.time_in_queue": timing.queue_time_s,
                "gen_ai.latency.time_to_first_token": timing.first_token_s,
                "gen_ai.latency.time_in_model_prefill": timing.prefill_time_s,
                "gen_ai.latency.time_in_model_decode": timing.decode_time_s,
                "gen_ai.latency.e2e": timing.total_s,
            }
        return attributes
