"""A server's life: it listens, answers, and ends when it is told to, or when its engine has failed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from infer.server.app import make_app
from infer.server.errors import ApiError
from infer.server.service import Service
from infer.server.streams import ABORT

LOOK_S = 0.25  # how often the engine is asked whether it is well
logger = logging.getLogger("infer.server")


def listen(host: str, port: int) -> socket.socket:
    """A socket that clients can connect to from now on. port: 0 for any."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(2048)
    except OSError as error:
        listening.close()
        raise OSError(f"cannot listen on {host}, port {port}: {error.strerror or error}") from None
    return listening


def serve(service: Service, listening: socket.socket, ready: Callable[[], None] = lambda: None) -> int:
    """Answer until a signal says that it is enough: 0; or until the engine fails: 1."""
    return asyncio.run(_serve(service, listening, ready))


async def _serve(service: Service, listening: socket.socket, ready: Callable[[], None]) -> int:
    settings = service.settings
    server = Server(
        uvicorn.Config(
            make_app(service),
            http=_protocol(settings.max_connections, settings.read_seconds),
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=True,
            proxy_headers=False,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=max(1, round(settings.drain_seconds)),
        )
    )

    def end() -> None:
        server.force_exit = service.draining  # asked twice, it does not wait
        service.draining = server.should_exit = True

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):  # not the main thread
            loop.add_signal_handler(number, end)
    watching = asyncio.ensure_future(_until_failed(service, end))
    try:
        loop.call_soon(ready)
        await server.serve(sockets=[listening])
    finally:
        watching.cancel()
    return 0 if service.failure is None else 1


async def _until_failed(service: Service, end: Callable[[], None]) -> None:
    while True:
        await asyncio.sleep(LOOK_S)
        if service.failure is not None:
            logger.error("the engine has failed: %s", service.failure)
            if not service.renews:
                break
            try:
                await asyncio.to_thread(service.renew)
            except Exception as error:
                logger.error("it could not be made anew: %s", error)
                break
    end()


class Server(uvicorn.Server):
    """Signals are ours: uvicorn would end the process by the signal that it has caught."""

    def capture_signals(self) -> Any:
        return contextlib.nullcontext()


def _protocol(most: int, seconds: float) -> type[HttpToolsProtocol]:
    """HTTP, with bounds on connections, and on the time that a client takes to say what it wants."""
    busy = ApiError(503, "too many connections", code="too_many_connections").response()
    head = f"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\ncontent-length: {len(busy.body)}\r\n"
    refusal = head.encode() + b"retry-after: 1\r\nconnection: close\r\n\r\n" + bytes(busy.body)

    class Protocol(HttpToolsProtocol):
        _patience: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > most:
                transport.write(refusal)
                transport.close()
            else:
                self._wait()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_waiting()
            super().connection_lost(exc)

        def on_message_begin(self) -> None:
            super().on_message_begin()
            if self._patience is None:  # the first request's time began with the connection
                self._wait()

        def on_headers_complete(self) -> None:
            self._stop_waiting()
            self.scope[ABORT] = self.transport.abort  # type: ignore[literal-required]
            super().on_headers_complete()

        def _wait(self) -> None:
            self._patience = self.loop.call_later(seconds, self.transport.close)

        def _stop_waiting(self) -> None:
            if self._patience is not None:
                self._patience.cancel()
                self._patience = None

    return Protocol
