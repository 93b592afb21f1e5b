"""Runs the server: listen, serve, shut down on a signal or after the engine has failed."""

from __future__ import annotations

import asyncio
import logging
import resource
import signal
import socket
import traceback
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from http import HTTPStatus
from ipaddress import ip_address
from typing import Any

import httptools
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from infer.server.app import make_app
from infer.server.service import Service, Settings, log_error, logger
from infer.server.wire import ApiError, bad_request

HEALTH_CHECK_S = 0.25  # between two checks of the engine
MAX_HEAD = 1 << 16  # bytes of a request's path and headers
QUEUED, ACCEPTED = 2048, 16  # connections: waiting for the server, and accepted at once
OTHER_FILES = 256  # open files that are no connections: the server's own, and those accepted only to be refused
MAX_PIPELINED = 64  # requests of a connection that wait for their responses

# Invalid requests are not worth a line, and unexpected errors are logged by `log_error`.
logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL + 1)


class _Listening(socket.socket):
    def listen(self, backlog: int = QUEUED) -> None:
        """asyncio sets the queue's length to the number that it accepts at once."""
        super().listen(QUEUED)


def listen(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """A listening socket. port: 0 for any free one. shared: with other processes of this user."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY only if the protocol is given; else a small write waits 40 ms for an acknowledgement.
    listening = _Listening(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listening.bind((host, port))
        listening.listen()
    except OSError as error:
        listening.close()
        raise OSError(f"cannot listen on {host}, port {port}: {error.strerror or error}") from None
    return listening


def allowed_hosts(listening: socket.socket, host: str, others: Sequence[str]) -> tuple[str, ...] | None:
    """The accepted Host headers: `host` and others. None, which is any, if it listens beyond loopback."""
    local = ip_address(listening.getsockname()[0]).is_loopback
    return (host, *others) if local or others else None


def max_connections(requested: int) -> int:
    """As many of the requested connections as files may be open, after raising the limit on them if possible."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = requested + OTHER_FILES
    if resource.RLIM_INFINITY != soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    allowed = requested if soft == resource.RLIM_INFINITY else min(requested, max(soft // 2, soft - OTHER_FILES))
    if allowed < requested:
        logger.warning("%d connections are allowed, not %d: the limit on open files is %d", allowed, requested, soft)
    return allowed


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
        backlog=ACCEPTED,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=max(1, round(settings.drain_seconds)),
    )


class Server(uvicorn.Server):
    """Serves until it is stopped or its engine fails."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self._logged: set[object] = set()
        super().__init__(http_config(make_app(service), service.settings))

    def run_on(self, listening: socket.socket) -> int:
        """Returns the exit status: 0 after `stop`, 1 after a failure of the engine."""
        asyncio.run(self._run(listening))
        return 0 if self.service.failure is None else 1

    def stop(self) -> None:
        """Accept no more requests and finish running ones; called twice, do not wait for them."""
        self.force_exit = self.service.draining
        self.service.draining = self.should_exit = True

    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
        """Handled by `_run`: uvicorn would raise the signal again and so kill the process."""
        return nullcontext()

    async def _run(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._on_loop_error)
        for number in (signal.SIGINT, signal.SIGTERM):
            with suppress(NotImplementedError, RuntimeError, ValueError):  # not the main thread
                loop.add_signal_handler(number, self.stop)
        health_checks = asyncio.ensure_future(self._check_engine())
        try:
            await self.serve(sockets=[listening])
        finally:
            health_checks.cancel()

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log an error outside of requests, once: without free files, each `accept` fails."""
        error = context.get("exception")
        kind: object = context["message"]
        if error is not None:  # the message has addresses
            where = traceback.extract_tb(error.__traceback__)[-1:]
            kind = (type(error), *((frame.filename, frame.lineno) for frame in where))
        if kind not in self._logged:
            self._logged.add(kind)
            logger.error("%s", context["message"])
            if error is not None:
                log_error(error)

    async def _check_engine(self) -> None:
        service = self.service
        while True:
            await asyncio.sleep(HEALTH_CHECK_S)
            if service.failure is not None:
                log_error(service.failure)
                if not service.restarts:
                    break
                try:
                    await asyncio.to_thread(service.restart)
                except Exception as error:
                    service.restarts = False
                    log_error(error)
                    break
        self.stop()


def _protocol(settings: Settings) -> type[HttpToolsProtocol]:
    """uvicorn's HTTP, with limits on connections, and on the time that clients take to send and to read."""
    busy = _final_response(ApiError(503, "too many connections", code="too_many_connections"), b"retry-after: 1\r\n")
    invalid = _final_response(bad_request("this is not a valid HTTP request"))
    most = max_connections(settings.max_connections)
    too_long = _final_response(ApiError(431, f"path and headers are larger than {MAX_HEAD:,} bytes"))

    class Protocol(HttpToolsProtocol):
        _read_timer: asyncio.TimerHandle | None = None  # while a request's head is incomplete
        _head_bytes = 0  # received since the last request or part of a body: of a head or a trailer
        _write_timer: asyncio.TimerHandle | None = None  # while a client has not read what was sent
        _cycles: tuple[RequestResponseCycle, ...] = ()  # unfinished requests

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > most:
                transport.write(busy)
                transport.close()
            else:
                self._start_read_timer()

        def connection_lost(self, exc: Exception | None) -> None:
            self._cancel_read_timer()
            self._cancel_write_timer()
            for cycle in self._cycles:  # uvicorn tells only the last one, which may wait for another
                cycle.disconnected = cycle.disconnected or not cycle.response_complete
                cycle.message_event.set()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            self._unset_keepalive_if_required()
            self._head_bytes += len(data)
            unread = memoryview(data)
            try:
                while unread:
                    try:
                        self.parser.feed_data(unread)
                        break
                    except httptools.HttpParserUpgrade as offer:
                        # Java's client offers HTTP/2 with every request. The parser takes all after such a head for
                        # HTTP/2, so another reads the head without the offer, and then the body.
                        unread = unread[offer.args[0] :]
                        head = self._head_without_upgrade()
                        self.parser = httptools.HttpRequestParser(self)  # the first reads no more after "close"
                        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's
                        self.parser.feed_data(head)
                if self._head_bytes > MAX_HEAD:
                    self._refuse(too_long)
            except httptools.HttpParserError:
                self._refuse(too_long if self._size_of_head() > MAX_HEAD else invalid)

        def on_message_begin(self) -> None:
            super().on_message_begin()
            if self._read_timer is None:  # the first request's timer started with the connection
                self._start_read_timer()

        def on_headers_complete(self) -> None:
            if self.parser.get_method() == b"CONNECT" or self._size_of_head() > MAX_HEAD:
                raise ValueError  # an `HttpParserError` of `feed_data`
            if self.parser.should_upgrade():
                return
            self._cancel_read_timer()
            super().on_headers_complete()
            self._cycles = tuple(cycle for cycle in (*self._cycles, self.cycle) if not cycle.response_complete)
            if len(self._cycles) > MAX_PIPELINED:
                raise ValueError

        def on_body(self, body: bytes) -> None:
            self._head_bytes = 0
            super().on_body(body)

        def on_message_complete(self) -> None:
            if not self.parser.should_upgrade():
                self._head_bytes = 0
                super().on_message_complete()

        def _size_of_head(self) -> int:
            return len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)

        def _head_without_upgrade(self) -> bytes:
            line = b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
            fields = [b"%s: %s" % field for field in self.headers if field[0] != b"upgrade"]
            return b"\r\n".join([line, *fields, b"", b""])

        def _refuse(self, response: bytes) -> None:
            """Close the connection, with a response unless that of an earlier request is unfinished."""
            if all(cycle.response_complete for cycle in self._cycles):
                self.transport.write(response)
            self.transport.close()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._start_write_timer()

        def resume_writing(self) -> None:
            super().resume_writing()
            if not self.transport.is_closing():
                self._cancel_write_timer()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._watch_closing()

        def timeout_keep_alive_handler(self) -> None:
            super().timeout_keep_alive_handler()
            self._watch_closing()

        def _start_read_timer(self) -> None:
            self._read_timer = self.loop.call_later(settings.read_seconds, self.transport.close)

        def _cancel_read_timer(self) -> None:
            if self._read_timer is not None:
                self._read_timer.cancel()
                self._read_timer = None

        def _watch_closing(self) -> None:
            if self.transport.is_closing():  # a transport stays in this state until all is read
                self._start_write_timer()

        def _start_write_timer(self) -> None:
            """Abort the connection if the client reads nothing in time. Nothing more is written meanwhile."""
            unread = self.transport.get_write_buffer_size()
            if unread and self._write_timer is None:
                self._write_timer = self.loop.call_later(settings.write_seconds, self._check_progress, unread)

        def _check_progress(self, before: int) -> None:
            self._write_timer = None
            if self.transport.get_write_buffer_size() < before:
                self._start_write_timer()
            else:
                self.transport.abort()

        def _cancel_write_timer(self) -> None:
            if self._write_timer is not None:
                self._write_timer.cancel()
                self._write_timer = None

    return Protocol


def _final_response(error: ApiError, headers: bytes = b"") -> bytes:
    """The bytes of a response that closes the connection."""
    body = bytes(error.response().body)
    line = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n"
    head = f"{line}content-type: application/json\r\ncontent-length: {len(body)}\r\n"
    return head.encode() + headers + b"connection: close\r\n\r\n" + body
