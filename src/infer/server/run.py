"""A server's life: it listens, answers, and ends when it is told to, or when its engine has failed."""

from __future__ import annotations

import asyncio
import logging
import re
import signal
import socket
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from http import HTTPStatus
from ipaddress import ip_address

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from infer.server.app import make_app
from infer.server.errors import ApiError
from infer.server.service import Service, log_error
from infer.server.settings import Settings

LOOK_S = 0.25  # how often the engine is asked whether it is well
MAX_HEAD = 1 << 16  # bytes of a request's path and headers

# Garbage from clients is no news, and what goes wrong is told by `log_error`.
logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL + 1)


def listen(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """A socket that clients can connect to from now on. port: 0 for any. shared: with others of this user."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Named TCP, so that asyncio sends what is written at once: it would take 40 ms to wait for an acknowledgement.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listening.bind((host, port))
        listening.listen(2048)
    except OSError as error:
        listening.close()
        raise OSError(f"cannot listen on {host}, port {port}: {error.strerror or error}") from None
    return listening


def names(listening: socket.socket, host: str, others: Sequence[str]) -> tuple[str, ...] | None:
    """By which clients may call a server: the host it was given, and others; None, for any, beyond loopback."""
    local = ip_address(listening.getsockname()[0]).is_loopback
    return (host, *others) if local or others else None


# What Java's client asks of every server. There is nothing to upgrade to, but the parser would stop, and lose the body.
UPGRADE = re.compile(rb"\r\nupgrade:[^\r\n]*(?=\r\n)", re.IGNORECASE)


def http_config(app: ASGIApp, settings: Settings) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=_protocol(settings),
        lifespan="off",
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=max(1, round(settings.drain_seconds)),
    )


class Server(uvicorn.Server):
    """Answers until it is told to end, or its engine fails."""

    def __init__(self, service: Service) -> None:
        self.service = service
        super().__init__(http_config(make_app(service), service.settings))

    def run_on(self, listening: socket.socket) -> int:
        """The exit status: 0 if it was told to end, 1 if the engine has failed."""
        asyncio.run(self._live(listening))
        return 0 if self.service.failure is None else 1

    def end(self) -> None:
        """Accept nothing more, and wait for what runs; asked twice, do not wait."""
        self.force_exit = self.service.draining
        self.service.draining = self.should_exit = True

    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
        """They are ours: uvicorn would end the process by the signal that it has caught."""
        return nullcontext()

    async def _live(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            with suppress(NotImplementedError, RuntimeError, ValueError):  # not the main thread
                loop.add_signal_handler(number, self.end)
        watching = asyncio.ensure_future(self._watch_engine())
        try:
            await self.serve(sockets=[listening])
        finally:
            watching.cancel()

    async def _watch_engine(self) -> None:
        service = self.service
        while True:
            await asyncio.sleep(LOOK_S)
            if service.failure is not None:
                log_error(service.failure)
                if not service.renews:
                    break
                try:
                    await asyncio.to_thread(service.renew)
                except Exception as error:
                    log_error(error)
                    break
        self.end()


def _protocol(settings: Settings) -> type[HttpToolsProtocol]:
    """HTTP, with bounds on connections, and on the time that clients take to say what they want and to hear it."""
    busy = _refusal(ApiError(503, "too many connections", code="too_many_connections"), b"retry-after: 1\r\n")
    too_long = _refusal(ApiError(431, f"the head of the request is larger than {MAX_HEAD:,} bytes"))

    class Protocol(HttpToolsProtocol):
        _patience: asyncio.TimerHandle | None = None  # until a request has said what it wants
        _heard = 0  # bytes meanwhile
        _in_body = False  # of a request
        _unread: asyncio.TimerHandle | None = None  # until a client has read what waits for it
        _cycles: tuple[RequestResponseCycle, ...] = ()  # requests under way

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > settings.max_connections:
                transport.write(busy)
                transport.close()
            else:
                self._wait()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_waiting()
            self._stop_watching()
            for cycle in self._cycles:  # uvicorn tells the last one only, which may be waiting for another
                cycle.disconnected = cycle.disconnected or not cycle.response_complete
                cycle.message_event.set()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            patience = self._patience
            if not self._in_body and b"pgrade" in data:
                data = UPGRADE.sub(b"", data)
            super().data_received(data)
            if patience is not None and self._patience is patience and not self.transport.is_closing():
                self._heard += len(data)
                if self._heard > MAX_HEAD:
                    self.transport.write(too_long)
                    self.transport.close()

        def on_message_begin(self) -> None:
            super().on_message_begin()
            if self._patience is None:  # the first request's time began with the connection
                self._wait()

        def on_headers_complete(self) -> None:
            self._stop_waiting()
            self._in_body = True
            super().on_headers_complete()
            self._cycles = tuple(cycle for cycle in (*self._cycles, self.cycle) if not cycle.response_complete)

        def on_message_complete(self) -> None:
            self._in_body = False
            super().on_message_complete()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._watch()

        def resume_writing(self) -> None:
            super().resume_writing()
            if not self.transport.is_closing():
                self._stop_watching()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._watch_closing()

        def timeout_keep_alive_handler(self) -> None:
            super().timeout_keep_alive_handler()
            self._watch_closing()

        def _wait(self) -> None:
            self._heard = 0
            self._patience = self.loop.call_later(settings.read_seconds, self.transport.close)

        def _stop_waiting(self) -> None:
            if self._patience is not None:
                self._patience.cancel()
                self._patience = None

        def _watch_closing(self) -> None:
            if self.transport.is_closing():  # which it is until all is read
                self._watch()

        def _watch(self) -> None:
            """End the connection if nothing of what waits is read in time. Nothing is added to it meanwhile."""
            left = self.transport.get_write_buffer_size()
            if left and self._unread is None:
                self._unread = self.loop.call_later(settings.write_seconds, self._look, left)

        def _look(self, before: int) -> None:
            self._unread = None
            if self.transport.get_write_buffer_size() < before:
                self._watch()
            else:
                self.transport.abort()

        def _stop_watching(self) -> None:
            if self._unread is not None:
                self._unread.cancel()
                self._unread = None

    return Protocol


def _refusal(error: ApiError, headers: bytes = b"") -> bytes:
    """All of an answer that ends a connection."""
    body = bytes(error.response().body)
    line = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n"
    head = f"{line}content-type: application/json\r\ncontent-length: {len(body)}\r\n"
    return head.encode() + headers + b"connection: close\r\n\r\n" + body
