"""Spans of requests: what they say, whose children they are, and where they are sent."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from live_server import Gate
from serving import Running, running, until

from infer import LLM
from infer.backend.cpu.backend import CpuBackend
from infer.server.telemetry import exporting

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs infer-kv[otel]")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

pytestmark = pytest.mark.usefixtures("compiled")  # nothing waits for a compiler
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SESAME: Any = {"model": "tiny", "prompt": "sesame", "max_tokens": 6, "ignore_eos": True}
CHAT: Any = {"model": "tiny", "messages": [{"role": "user", "content": "sesame"}], "max_tokens": 4, "ignore_eos": True}


class Traced:
    def __init__(self, server: Running, exporter: InMemorySpanExporter) -> None:
        self.server, self._exporter = server, exporter

    def span(self, path: str, body: Any, status: int = 200, **options: Any) -> ReadableSpan:
        """The only one that a request makes."""
        answer = self.server.post(path, body, **options)
        assert answer.status_code == status
        return self.made()

    def made(self) -> ReadableSpan:
        until(lambda: bool(self._exporter.get_finished_spans()))
        [span] = self._exporter.get_finished_spans()
        self._exporter.clear()
        assert "sesame" not in span.to_json()
        return span


@pytest.fixture(scope="module")
def traced(folder: Path) -> Iterator[Traced]:
    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with running(lambda: LLM(folder, cache_memory=10**7), restarts=True, tracer=provider.get_tracer("test")) as server:
        yield Traced(server, exporter)


@pytest.mark.parametrize("stream", [False, True])
def test_a_completion(stream: bool, traced: Traced) -> None:
    body = {**SESAME, "prompt": ["sesame", "sesame street"], "n": 2, "temperature": 0.5, "stream": stream}
    span = traced.span("/v1/completions", body)
    found = dict(span.attributes or {})
    prompts = sum(len(traced.server.service.llm.encode(prompt)) for prompt in body["prompt"])
    assert span.name == "text_completion tiny"
    assert span.kind is SpanKind.SERVER
    assert span.status.status_code is StatusCode.UNSET
    assert found["gen_ai.operation.name"] == "text_completion"
    assert found["gen_ai.request.model"] == "tiny"
    assert found["gen_ai.request.max_tokens"] == 6
    assert found["gen_ai.request.temperature"] == 0.5
    assert found["gen_ai.request.top_p"] == 1
    assert found["gen_ai.usage.input_tokens"] == prompts  # each once, however many texts follow it
    assert found["gen_ai.usage.output_tokens"] == 4 * 6
    assert found["gen_ai.response.finish_reasons"] == ("length",) * 4
    latency = {name.rsplit(".")[-1]: value for name, value in found.items() if name.startswith("gen_ai.latency.")}
    first = latency["time_in_queue"] + latency["time_in_model_prefill"]
    assert latency["time_to_first_token"] == pytest.approx(first)
    assert latency["e2e"] == pytest.approx(first + latency["time_in_model_decode"])
    assert span.start_time is not None
    assert span.end_time is not None
    assert 0 < latency["e2e"] <= (span.end_time - span.start_time) / 1e9


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_a_chat(path: str, stream: bool, traced: Traced) -> None:
    body = CHAT if "chat" in path else {"model": "tiny", "input": "sesame", "max_output_tokens": 4, "ignore_eos": True}
    found = dict(traced.span(path, {**body, "stream": stream}).attributes or {})
    assert found["gen_ai.operation.name"] == "chat"
    assert found["gen_ai.usage.output_tokens"] == 4


def test_a_session(traced: Traced) -> None:
    name = traced.server.post("/v1/sessions", {}).json()["id"]
    assert traced.span(f"/v1/sessions/{name}/chat/completions", CHAT).name == "chat tiny"


def test_its_parent(traced: Traced) -> None:
    span = traced.span("/v1/completions", SESAME, headers={"traceparent": f"00-{TRACE}-{PARENT}-01"})
    assert span.parent is not None
    assert (f"{span.parent.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE, PARENT)
    assert traced.span("/v1/completions", SESAME, headers={"traceparent": "00-no-such-01"}).parent is None


def test_a_refusal(traced: Traced) -> None:
    span = traced.span("/v1/completions", {**SESAME, "max_tokens": 10**6}, 400)
    assert dict(span.attributes or {})["error.type"] == "context_length_exceeded"
    assert span.status.status_code is StatusCode.UNSET  # the server has not failed


def test_a_client_that_goes(traced: Traced, monkeypatch: pytest.MonkeyPatch) -> None:
    with Gate(monkeypatch).held():
        connection = traced.server.begin("/v1/completions", {**SESAME, "max_tokens": 200, "stream": True})
        connection.recv(10)
        connection.close()
        until(traced.server.idle)
    assert dict(traced.made().attributes or {})["gen_ai.response.finish_reasons"] == ("abort",)


@pytest.mark.parametrize("stream", [False, True])
def test_a_failure(stream: bool, traced: Traced, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        monkeypatch.undo()
        raise RuntimeError("sesame")

    monkeypatch.setattr(CpuBackend, "run", broken)
    span = traced.span("/v1/completions", {**SESAME, "stream": stream}, 200 if stream else 503)
    assert span.status.status_code is StatusCode.ERROR
    assert "error.type" in (span.attributes or {})
    until(lambda: traced.server.service.failure is None)


def test_where_they_are_sent(folder: Path) -> None:
    """By OTLP over HTTP, at the latest when the server ends."""
    received: list[tuple[str, ExportTraceServiceRequest]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received.append((self.path, ExportTraceServiceRequest.FromString(body)))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Collector) as collector:
        thread = threading.Thread(target=collector.serve_forever)
        thread.start()
        endpoint = f"http://127.0.0.1:{collector.server_port}/v1/traces"
        with (
            exporting(endpoint) as tracer,
            running(lambda: LLM(folder, cache_memory=10**7), tracer=tracer) as server,
        ):
            server.post("/v1/completions", SESAME)
        collector.shutdown()
        thread.join()
    [(path, request)] = received
    [resource] = request.resource_spans
    [span] = resource.scope_spans[0].spans
    assert path == "/v1/traces"
    assert "infer" in [
        entry.value.string_value for entry in resource.resource.attributes if entry.key == "service.name"
    ]
    assert span.name == "text_completion tiny"
    assert b"sesame" not in request.SerializeToString()


def test_without_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ImportError, match=r"pip install 'infer-kv\[otel\]'"), exporting("http://127.0.0.1:1/v1/traces"):
        pass


def test_nothing_is_imported_unless_asked_for() -> None:
    code = (
        "import sys, infer.server.run, infer.server.telemetry as telemetry\n"
        "with telemetry.exporting(None) as tracer: assert tracer is None\n"
        "print([name for name in sys.modules if 'opentelemetry' in name])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"
