"""What clients talk to: checks who asks, hands the request to a replica, and the answer back."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ray
import uvicorn
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from infer.deploy.channel import NOWHERE, Answer, Headers, Inbox, ReplicaLost
from infer.deploy.forward import ForwardedRequest
from infer.engine.loop import EngineFailed
from infer.server.app import guards
from infer.server.errors import ApiError
from infer.server.run import http_config, listen
from infer.server.service import log_error
from infer.server.settings import Settings
from infer.server.streams import quietly_closed, read_all, while_connected
from infer.server.text import as_event

ATTEMPTS = 4  # to have a request answered
METRICS_S = 10.0  # for the metrics of all replicas
LATE_S = 10.0  # for the rest of an answer, once the replica says that it is done
REPLICA_FAILED = (RayActorError, EngineFailed, ReplicaLost, DeploymentUnavailableError)
OF_ONE_ENGINE = ("/v1/sessions", "/live")  # and the page at /: a replica has them for itself alone


class Ingress:
    """One application behind two doors: Serve's HTTP proxies, and a port of its own, which is faster."""

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self, engines: DeploymentHandle[Any], settings: Settings, door: tuple[str, int] | None
    ) -> None:
        """door: a host and a port to listen on."""
        self._engines, self._settings = engines, settings
        self._inbox = Inbox(ray.util.get_node_ip_address())
        self._calls: set[asyncio.Future[None]] = set()
        await self._inbox.open()
        self._app = Starlette(
            routes=[Route("/metrics", self._metrics), Mount("/", self._forward)],
            middleware=guards(settings),
            exception_handlers={ApiError: _told, ClientDisconnect: _told, Exception: _told},
        )
        self._server = uvicorn.Server(http_config(self._app, settings))
        self._serving: asyncio.Future[None] | None = None
        if door is not None:  # shared with the ingress that follows this one, in an update
            self._serving = asyncio.ensure_future(self._server.serve([listen(*door, shared=True)]))

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return self._app

    async def __del__(self) -> None:
        """Called by Ray, and waited for."""
        self._server.should_exit = True
        if self._serving is not None:
            await self._serving

    async def _metrics(self, request: Request) -> Response:
        found = await self._engines.broadcast("metrics").results_async(timeout_s=METRICS_S)
        registry = CollectorRegistry()
        registry.register(_Together(found))
        return Response(generate_latest(registry), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if path == "/" or path.startswith(OF_ONE_ENGINE):
            message = (
                "replicas share no state: send a chat's messages each time, and the replica that holds them answers"
            )
            raise ApiError(501, message, code="not_replicated")
        body = await read_all(Request(scope, receive), self._settings.max_body, self._settings.read_seconds)
        headers = list(scope["headers"])
        asked = ForwardedRequest(scope["method"], path, scope["query_string"], headers, body, NOWHERE)
        await while_connected(self._answer(asked, send), receive)

    async def _answer(self, asked: ForwardedRequest, send: Send) -> None:
        """Have it answered. Where a replica fails before it has begun to, another one is asked."""
        for attempt in range(ATTEMPTS):
            await asyncio.sleep(max(0, attempt - 1))  # at once, then when those that have failed may be back
            with self._call(asked) as answer:
                try:
                    status, headers = await answer.start()
                except BackPressureError:
                    message = "too many requests wait: come again"
                    raise ApiError(429, message, code="queue_full", headers={"Retry-After": "1"}) from None
                except REPLICA_FAILED as error:
                    log_error(error)
                    continue
                await send({"type": "http.response.start", "status": status, "headers": headers})
                await _hand_on(answer, headers, send)
                return
        message = "no replica could answer: come again"
        raise ApiError(503, message, code="replica_failed", headers={"Retry-After": "10"})

    @contextmanager
    def _call(self, asked: ForwardedRequest) -> Iterator[Answer]:
        """Ask a replica, for as long as somebody waits for the answer."""
        with self._inbox.answer() as answer:
            asked.reply_to = answer.address
            calling = asyncio.ensure_future(self._calling(asked, answer))
            self._calls.add(calling)
            calling.add_done_callback(self._calls.discard)
            try:
                yield answer
            finally:
                if not answer.complete:
                    calling.cancel()

    async def _calling(self, asked: ForwardedRequest, answer: Answer) -> None:
        response = self._engines.remote(asked)
        try:
            await response
            if not answer.complete:
                await asyncio.sleep(LATE_S)
                answer.put(ReplicaLost("the answer was lost"))
        except asyncio.CancelledError:
            response.cancel()
            raise
        except Exception as error:
            answer.put(error)


async def _hand_on(answer: Answer, headers: Headers, send: Send) -> None:
    """The body. An event stream that breaks off says so; of others, the connection is closed before their end."""
    try:
        while (piece := await answer.body()) is not None:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
    except Exception as error:
        log_error(error)
        if not any(name == b"content-type" and value.startswith(b"text/event-stream") for name, value in headers):
            raise
        lost = ApiError(503, "the replica that was answering has failed", code="replica_failed")
        await send({"type": "http.response.body", "body": as_event(lost.body, "error"), "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _told(request: Request, error: Exception) -> Response:
    if isinstance(error, ClientDisconnect):
        return quietly_closed()
    if not isinstance(error, ApiError):
        log_error(error)
        error = ApiError(500, "something unexpected has happened", code="internal_error")
    return error.response()


class _Together:
    """The metrics of all replicas, with the number of each as a label."""

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
