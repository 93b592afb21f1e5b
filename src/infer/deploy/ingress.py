"""What clients talk to: checks who asks, hands the request to a replica, and the answer back."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from infer.deploy.engine import Head
from infer.deploy.forward import ForwardedRequest
from infer.engine.loop import EngineFailed
from infer.server.app import guards
from infer.server.errors import ApiError
from infer.server.service import log_error
from infer.server.settings import Settings
from infer.server.streams import read_all
from infer.server.text import as_event

ATTEMPTS = 4  # to have a request answered
PATIENCE_S = 10.0  # for the metrics of all replicas
REPLICA_FAILED = (RayActorError, EngineFailed)
OF_ONE_ENGINE = ("/v1/sessions", "/live")  # and the page at /: a replica has them for itself alone


class Ingress:
    def __init__(self, engines: DeploymentHandle[Any], settings: Settings) -> None:
        self._engines, self._settings = engines.options(stream=True), settings

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return Starlette(
            routes=[Route("/metrics", self._metrics), Mount("/", self._forward)],
            middleware=guards(self._settings),
            exception_handlers={ApiError: _told, Exception: _told},
        )

    async def _metrics(self, request: Request) -> Response:
        found = await self._engines.broadcast("metrics").results_async(timeout_s=PATIENCE_S)
        registry = CollectorRegistry()
        registry.register(_Together(found))
        return Response(generate_latest(registry), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/" or scope["path"].startswith(OF_ONE_ENGINE):
            message = (
                "replicas share no state: send all messages of a chat each time, and it goes to the replica that holds them"
            )
            raise ApiError(501, message, code="not_replicated")
        body = await read_all(Request(scope, receive), self._settings.max_body, self._settings.read_seconds)
        headers = [(bytes(name), bytes(value)) for name, value in scope["headers"]]
        asked = ForwardedRequest(scope["method"], scope["path"], scope["query_string"], headers, body)
        answer, (status, headers, first) = await self._begun(asked)
        try:
            await send({"type": "http.response.start", "status": status, "headers": headers})
            await send({"type": "http.response.body", "body": first, "more_body": True})
            async for piece in answer:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        except REPLICA_FAILED:
            if not _is_event_stream(headers):
                raise  # the connection is closed before the end that was announced
            lost = ApiError(503, "the replica that was answering has failed", code="replica_failed")
            await send({"type": "http.response.body", "body": as_event(lost.body, "error"), "more_body": True})
        finally:
            answer.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _begun(self, asked: ForwardedRequest) -> tuple[DeploymentResponseGenerator[Any], Head]:
        """An answer that has begun. As long as it has not, another replica is asked if one fails."""
        for attempt in range(ATTEMPTS):
            await asyncio.sleep(max(0, attempt - 1))  # at once, then when those that have failed may be back
            answer = self._engines.remote(asked)
            try:
                return answer, await anext(answer)
            except REPLICA_FAILED as error:
                log_error(error)
            except BackPressureError:
                message = "too many requests wait: come again"
                raise ApiError(429, message, code="queue_full", headers={"Retry-After": "1"}) from None
            except DeploymentUnavailableError:
                break
            except BaseException:
                answer.cancel()
                raise
        message = "no replica could answer: come again"
        raise ApiError(503, message, code="replica_failed", headers={"Retry-After": "10"})


async def _told(request: Request, error: Exception) -> Response:
    if not isinstance(error, ApiError):
        log_error(error)
        error = ApiError(500, "something unexpected has happened", code="internal_error")
    return error.response()


def _is_event_stream(headers: Sequence[tuple[bytes, bytes]]) -> bool:
    return any(name == b"content-type" and value.startswith(b"text/event-stream") for name, value in headers)


class _Together:
    """The metrics of all replicas, each with the number of its replica as a label."""

    def __init__(self, found: Sequence[Sequence[Metric]]) -> None:
        self._found = found

    def collect(self) -> Iterator[Metric]:
        together: dict[str, Metric] = {}
        for number, metrics in enumerate(self._found):
            for metric in metrics:
                family = together.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
                for sample in metric.samples:
                    family.samples.append(sample._replace(labels={**sample.labels, "replica": str(number)}))
        return iter(together.values())
