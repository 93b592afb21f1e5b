"""Requests from an ingress to a replica, and the connections on which responses come back, as ASGI messages.

Requests go through Ray, which chooses the replica. But a message of Ray's takes milliseconds of CPU time, too much for
every token. So each replica keeps one TCP connection to each ingress for all their requests, and what a step generates
for all streams is one write.
"""

from __future__ import annotations

import asyncio
import marshal
import secrets
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from starlette.types import Message

from infer.deploy.prefixes import prompt_keys

FRAME = struct.Struct("!16sI")  # request key, bytes of the message that follows
MAX_FRAME = 1 << 28  # bytes


class ReplyAddress(NamedTuple):
    """Where a response goes. Its key is a secret: only the replica that has the request can respond."""

    host: str
    port: int
    key: bytes


NO_REPLY = ReplyAddress("", 0, b"")


@dataclass
class ForwardedRequest:
    """An HTTP request, as the ingress sends it to a replica."""

    method: str
    path: str
    query: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes
    reply_to: ReplyAddress
    tried: list[str] = field(default_factory=list)  # replicas that it was sent to

    def __reduce__(self) -> Any:
        """Without what the router has added: that stays in the ingress."""
        return ForwardedRequest, (self.method, self.path, self.query, self.headers, self.body, self.reply_to)

    @cached_property
    def prefix(self) -> list[int]:
        return prompt_keys(self.body) if self.method == "POST" else []

    def scope(self) -> dict[str, Any]:
        """The ASGI scope."""
        return {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": self.method,
            "scheme": "http",
            "path": self.path,
            "raw_path": self.path.encode(),
            "root_path": "",
            "query_string": self.query,
            "headers": self.headers,
        }


class ReplicaLost(Exception):
    """A connection was closed before a response was complete."""


class PendingResponse:
    """The ASGI messages of one response that the ingress has received."""

    def __init__(self, address: ReplyAddress) -> None:
        self.address = address
        self.source: object = None  # the connection that it comes from
        self.complete = False
        self._messages: asyncio.Queue[Message | Exception] = asyncio.Queue()

    def put(self, message: Message | Exception) -> None:
        """Add a message, or the error that ends an incomplete response."""
        self.complete = self.complete or (not isinstance(message, Exception) and is_last(message))
        self._messages.put_nowait(message)

    async def next(self) -> Message:
        """The next message. Parts of the body that have arrived by now are one."""
        message, body = await self._next(), []
        while message["type"] == "http.response.body":
            body.append(message.get("body", b""))
            if is_last(message) or self._messages.empty():
                return {**message, "body": b"".join(body)}
            message = await self._next()
        return message

    async def _next(self) -> Message:
        message = await self._messages.get()
        if isinstance(message, Exception):
            raise message
        return message


def is_last(message: Message) -> bool:
    """Whether it completes a response."""
    return message["type"] == "http.response.body" and not message.get("more_body")


class Inbox:
    """All responses that an ingress waits for."""

    def __init__(self, host: str) -> None:
        """host: the address at which replicas reach this machine."""
        self._host, self._port = host, 0
        self._responses: dict[bytes, PendingResponse] = {}
        self._writers: set[asyncio.StreamWriter] = set()

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._read, self._host, 0)
        self._port = self._server.sockets[0].getsockname()[1]

    def close(self) -> None:
        self._server.close()
        for writer in self._writers:
            writer.close()

    @contextmanager
    def response(self) -> Iterator[PendingResponse]:
        key = secrets.token_bytes(16)
        response = self._responses[key] = PendingResponse(ReplyAddress(self._host, self._port, key))
        try:
            yield response
        finally:
            del self._responses[key]

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            with suppress(asyncio.IncompleteReadError, OSError):
                while True:
                    key, size = FRAME.unpack(await reader.readexactly(FRAME.size))
                    if size > MAX_FRAME:
                        break
                    data = await reader.readexactly(size)
                    if response := self._responses.get(key):  # else the client has disconnected
                        response.source = writer
                        response.put(marshal.loads(data))  # of the replica, which alone knows the key
        finally:
            self._writers.discard(writer)
            writer.close()
            for response in self._responses.values():
                if response.source is writer:
                    response.put(ReplicaLost("the connection was closed"))


class Connection:
    """A replica's connection to an ingress."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer, self._buffer = writer, list[bytes]()
        self.lost = asyncio.ensure_future(self._wait_closed(reader))

    async def _wait_closed(self, reader: asyncio.StreamReader) -> None:
        """The ingress sends nothing: a read returns when the connection is closed."""
        with suppress(OSError):
            await reader.read(1)
        self.close()

    def send(self, key: bytes, message: Message) -> None:
        if not self._buffer:  # one write for all that is added in this round of the event loop
            asyncio.get_running_loop().call_soon(self._flush)
        data = marshal.dumps(dict(message))
        self._buffer += (FRAME.pack(key, len(data)), data)

    def close(self) -> None:
        self._writer.close()

    def _flush(self) -> None:
        self._writer.write(b"".join(self._buffer))
        self._buffer.clear()


class Connections:
    """A replica's connections, opened when they are first needed."""

    def __init__(self) -> None:
        self._connections: dict[tuple[str, int], asyncio.Future[Connection]] = {}

    async def to(self, address: ReplyAddress) -> Connection:
        place = (address.host, address.port)
        known = self._connections.get(place)
        if known is None or (known.done() and (known.exception() or known.result().lost.done())):
            known = self._connections[place] = asyncio.ensure_future(self._connect(*place))
        return await asyncio.shield(known)

    async def _connect(self, host: str, port: int) -> Connection:
        return Connection(*await asyncio.open_connection(host, port))
