"""The way of answers from replicas to an ingress: one connection between any two, which all their requests share.

Requests go through Ray, which chooses the replica. But a message of Ray's takes milliseconds of a processor, too much
for every token. Here the pieces of a step, of all texts, are one write.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

Headers = list[tuple[bytes, bytes]]
FRAME = struct.Struct("!16sBI")  # whose answer, which part of it, how many bytes follow
START, BODY, END = range(3)
LARGEST = 1 << 28  # bytes of a frame


class Address(NamedTuple):
    """Where an answer is to go. Its name is a secret: nobody else can answer."""

    host: str
    port: int
    name: bytes


NOWHERE = Address("", 0, b"")


class ReplicaLost(Exception):
    """A connection ended before an answer did."""


class Answer:
    """What has come of one, in the ingress."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self.source: object = None  # the connection by which it comes
        self.complete = False
        self._frames: asyncio.Queue[tuple[int, bytes] | Exception] = asyncio.Queue()

    def put(self, frame: tuple[int, bytes] | Exception) -> None:
        """An exception: it goes no further, unless it is complete."""
        self.complete = self.complete or (isinstance(frame, tuple) and frame[0] == END)
        self._frames.put_nowait(frame)

    async def start(self) -> tuple[int, Headers]:
        """Its status and headers."""
        _, data = await self._next()
        status, headers = json.loads(data)
        return status, [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]

    async def body(self) -> bytes | None:
        """All that has come since the last call; None: it is complete."""
        pieces: list[bytes] = []
        while not pieces or not self._frames.empty():
            kind, data = await self._next()
            if kind == END and not pieces:
                return None
            if kind == END:
                self.put((kind, data))  # told by the next call
                break
            pieces.append(data)
        return b"".join(pieces)

    async def _next(self) -> tuple[int, bytes]:
        frame = await self._frames.get()
        if isinstance(frame, Exception):
            raise frame
        return frame


class Inbox:
    """All answers that an ingress waits for."""

    def __init__(self, host: str) -> None:
        """host: by which replicas reach this machine."""
        self._host, self._port = host, 0
        self._answers: dict[bytes, Answer] = {}
        self._lines: set[asyncio.StreamWriter] = set()

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._read, self._host, 0)
        self._port = self._server.sockets[0].getsockname()[1]

    def close(self) -> None:
        self._server.close()
        for line in self._lines:
            line.close()

    @contextmanager
    def answer(self) -> Iterator[Answer]:
        name = secrets.token_bytes(16)
        answer = self._answers[name] = Answer(Address(self._host, self._port, name))
        try:
            yield answer
        finally:
            del self._answers[name]

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._lines.add(writer)
        try:
            with suppress(asyncio.IncompleteReadError, OSError):
                while True:
                    name, kind, size = FRAME.unpack(await reader.readexactly(FRAME.size))
                    if size > LARGEST:
                        break
                    data = await reader.readexactly(size)
                    if answer := self._answers.get(name):  # whose client is still there
                        answer.source = writer
                        answer.put((kind, data))
        finally:
            self._lines.discard(writer)
            writer.close()
            for answer in self._answers.values():
                if answer.source is writer:
                    answer.put(ReplicaLost("the connection has ended"))


class Line:
    """A replica's connection to an ingress."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer, self._waiting = writer, list[bytes]()
        self.lost = asyncio.ensure_future(self._hear(reader))

    async def _hear(self, reader: asyncio.StreamReader) -> None:
        """Nothing is ever said on it: whatever is heard is its end."""
        with suppress(OSError):
            await reader.read(1)
        self.close()

    def start(self, name: bytes, status: int, headers: Headers) -> None:
        told = [(key.decode("latin-1"), value.decode("latin-1")) for key, value in headers]
        self._write(name, START, json.dumps([status, told]).encode())

    def body(self, name: bytes, data: bytes) -> None:
        self._write(name, BODY, data)

    def end(self, name: bytes) -> None:
        self._write(name, END, b"")

    def close(self) -> None:
        self._writer.close()

    def _write(self, name: bytes, kind: int, data: bytes) -> None:
        if not self._waiting:  # what others write before the loop comes round goes with it
            asyncio.get_running_loop().call_soon(self._flush)
        self._waiting += (FRAME.pack(name, kind, len(data)), data)

    def _flush(self) -> None:
        self._writer.write(b"".join(self._waiting))
        self._waiting.clear()


class Lines:
    """A replica's connections, made when they are first needed."""

    def __init__(self) -> None:
        self._lines: dict[tuple[str, int], asyncio.Future[Line]] = {}

    async def to(self, address: Address) -> Line:
        place = (address.host, address.port)
        known = self._lines.get(place)
        if known is None or (known.done() and (known.exception() or known.result().lost.done())):
            known = self._lines[place] = asyncio.ensure_future(self._connected(*place))
        return await asyncio.shield(known)

    async def _connected(self, host: str, port: int) -> Line:
        return Line(*await asyncio.open_connection(host, port))
