"""The HTTP side of a deployment: authenticates clients, forwards requests to replicas, and streams responses back."""

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

from infer.deploy.channel import NO_REPLY, ForwardedRequest, Inbox, PendingResponse, ReplicaLost, is_last
from infer.engine.engine import EngineFailed
from infer.server.app import guards
from infer.server.run import http_config, listen
from infer.server.service import Settings, log_error
from infer.server.wire import ApiError, as_event, client_closed_request, receive_body, while_connected

ATTEMPTS = 4  # for each request
METRICS_S = 10.0  # for the metrics of all replicas
LATE_S = 10.0  # for the rest of a response, once the replica's call has returned
REPLICA_FAILED = (RayActorError, EngineFailed, ReplicaLost, DeploymentUnavailableError)
NOT_REPLICATED = ("/v1/sessions", "/live")  # and the page at /: state of one engine


class Ingress:
    """One application on two sockets: Serve's HTTP proxies, and a port of its own, which is faster."""

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self, replicas: DeploymentHandle[Any], settings: Settings, listen_on: tuple[str, int] | None
    ) -> None:
        """listen_on: host and port."""
        self._replicas, self._settings = replicas, settings
        self._inbox = Inbox(ray.util.get_node_ip_address())
        self._calls: set[asyncio.Future[None]] = set()
        await self._inbox.open()
        self._app = Starlette(
            routes=[Route("/metrics", self._metrics), Mount("/", self._forward)],
            middleware=guards(settings),
            exception_handlers={ApiError: _on_error, ClientDisconnect: _on_error, Exception: _on_error},
        )
        self._server = uvicorn.Server(http_config(self._app, settings))
        self._serving: asyncio.Future[None] | None = None
        if listen_on is not None:  # shared with the next ingress during an update
            self._serving = asyncio.ensure_future(self._server.serve([listen(*listen_on, shared=True)]))

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return self._app

    async def __del__(self) -> None:
        """Called and awaited by Ray."""
        self._server.should_exit = True
        if self._serving is not None:
            await self._serving

    async def _metrics(self, request: Request) -> Response:
        found = await self._replicas.broadcast("metrics").results_async(timeout_s=METRICS_S)
        registry = CollectorRegistry()
        registry.register(_Merged(found))
        return Response(generate_latest(registry), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if path == "/" or path.startswith(NOT_REPLICATED):
            message = (
                "replicas share no state: send all messages of a chat with each request (its cached prefix is found)"
            )
            raise ApiError(501, message, code="not_replicated")
        body = await receive_body(Request(scope, receive), self._settings.max_body, self._settings.read_seconds)
        headers = list(scope["headers"])
        request = ForwardedRequest(scope["method"], path, scope["query_string"], headers, body, NO_REPLY)
        await while_connected(self._respond(request, send), receive)

    async def _respond(self, request: ForwardedRequest, send: Send) -> None:
        """If a replica fails before its response has begun, the request goes to another."""
        for attempt in range(ATTEMPTS):
            await asyncio.sleep(max(0, attempt - 1))  # at once, then after a failed replica may have restarted
            with self._call(request) as response:
                try:
                    start = await response.next()
                except BackPressureError:
                    message = "the queue is full: try again"
                    raise ApiError(429, message, code="queue_full", headers={"Retry-After": "1"}) from None
                except REPLICA_FAILED as error:
                    log_error(error)
                    continue
                await send(start)
                await _forward_body(response, start["headers"], send)
                return
        message = "no replica could answer: try again"
        raise ApiError(503, message, code="replica_failed", headers={"Retry-After": "10"})

    @contextmanager
    def _call(self, request: ForwardedRequest) -> Iterator[PendingResponse]:
        """Call a replica; the call is cancelled if the block ends before the response is complete."""
        with self._inbox.response() as response:
            request.reply_to = response.address
            calling = asyncio.ensure_future(self._await_call(request, response))
            self._calls.add(calling)
            calling.add_done_callback(self._calls.discard)
            try:
                yield response
            finally:
                if not response.complete:
                    calling.cancel()

    async def _await_call(self, request: ForwardedRequest, response: PendingResponse) -> None:
        call = self._replicas.remote(request)
        try:
            await call
            if not response.complete:
                await asyncio.sleep(LATE_S)
                response.put(ReplicaLost("the response was lost"))
        except asyncio.CancelledError:
            call.cancel()
            raise
        except Exception as error:
            response.put(error)


async def _forward_body(response: PendingResponse, headers: list[tuple[bytes, bytes]], send: Send) -> None:
    """An event stream that breaks off ends with an error event; other connections are closed early."""
    try:
        while not is_last(message := await response.next()):
            await send(message)
    except Exception as error:
        log_error(error)
        if not any(name == b"content-type" and value.startswith(b"text/event-stream") for name, value in headers):
            raise
        lost = ApiError(503, "the replica that was answering has failed", code="replica_failed")
        message = {"type": "http.response.body", "body": as_event(lost.body, "error")}
    await send(message)


async def _on_error(request: Request, error: Exception) -> Response:
    if isinstance(error, ClientDisconnect):
        return client_closed_request()
    if not isinstance(error, ApiError):
        log_error(error)
        error = ApiError(500, "an unexpected error occurred", code="internal_error")
    return error.response()


class _Merged:
    """The metrics of all replicas, with a label `replica`."""

    def __init__(self, found: Sequence[Sequence[Metric]]) -> None:
        self._found = found

    def collect(self) -> Iterator[Metric]:
        merged: dict[str, Metric] = {}
        for number, metrics in enumerate(self._found):
            for metric in metrics:
                family = merged.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
                for sample in metric.samples:
                    family.samples.append(sample._replace(labels={**sample.labels, "replica": str(number)}))
        return iter(merged.values())
