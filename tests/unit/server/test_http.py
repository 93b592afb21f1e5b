"""The HTTP protocol: what it reads from a connection, however the bytes arrive, is what h11 reads."""

from __future__ import annotations

import asyncio
import os
import random
import resource
from collections.abc import Callable, Sequence
from typing import Any

import h11
import pytest
from uvicorn.server import ServerState

from infer.server.run import MAX_HEAD, MAX_PIPELINED, OTHER_FILES, http_config, max_connections
from infer.server.service import Settings

CASES = 20_000 if os.environ.get("INFER_TEST_ALL") else 2000
OFFER = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAA\r\n"  # as Java's client
HOSTILE = b"x\r\nupgrade: h2c\r\n\r\nGET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n"

Received = tuple[bytes, bytes, bytes]  # method, target, body


class Transport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.written, self.closed = bytearray(), False

    def write(self, data: Any) -> None:
        self.written += data

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        pass

    resume_reading = pause_reading


async def receive(parts: Sequence[bytes]) -> tuple[list[Received], Transport]:
    """What an application gets of these parts of a connection, one request after the other."""
    received: list[Received] = []

    async def app(scope: Any, receive: Callable[[], Any], send: Callable[[Any], Any]) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body, more = body + message["body"], message["more_body"]
        received.append((scope["method"].encode(), scope["raw_path"], body))
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    config = http_config(app, Settings("tiny"))
    config.load()
    protocol: Any = config.http_protocol_class(config=config, server_state=ServerState(), app_state={})  # type: ignore[call-arg, operator]
    transport = Transport()
    protocol.connection_made(transport)
    for part in parts:
        if not transport.closed:
            protocol.data_received(part)
        await asyncio.sleep(0)
    for _ in range(1000):
        if not protocol.tasks:
            break
        await asyncio.sleep(0)
    closed = transport.closed
    protocol.connection_lost(None)
    await asyncio.gather(*protocol.tasks)
    transport.closed = closed
    return received, transport


def received_by_h11(data: bytes) -> list[Received]:
    connection, received = h11.Connection(h11.SERVER), list[Received]()
    connection.receive_data(data)
    while True:
        event = connection.next_event()
        if isinstance(event, h11.Request):
            received.append((event.method, event.target, b""))
        elif isinstance(event, h11.Data):
            method, target, body = received[-1]
            received[-1] = (method, target, body + event.data)
        elif isinstance(event, h11.EndOfMessage):
            connection.send(h11.Response(status_code=200, headers=[(b"content-length", b"0")]))
            connection.send(h11.EndOfMessage())
        elif event is h11.PAUSED:
            connection.start_next_cycle()
        else:
            assert event is h11.NEED_DATA
            return received


def a_request(rng: random.Random, number: int) -> bytes:
    fields = [b"Host: x\r\n"]
    if rng.random() < 0.5:
        fields.append(rng.choice([OFFER, b"Connection: upgrade\r\nUPGRADE: websocket\r\n", b"Upgrade: h2c\r\n"]))
    if rng.random() < 0.3:
        fields.append(b"X-%d: %s\r\n" % (number, b"a" * rng.randrange(40)))
    body = rng.choice([b"", HOSTILE, HOSTILE * 3, rng.randbytes(rng.randrange(50)), b"\r\nUpgrade: x\r\n" * 9])
    kind = rng.choice(["none", "length", "chunked"])
    if kind == "length":
        fields.append(b"Content-Length: %d\r\n" % len(body))
    elif kind == "chunked":
        fields.append(b"Transfer-Encoding: chunked\r\n")
        chunks = []
        while body:
            size = rng.randrange(1, len(body) + 1)
            chunks.append(b"%x\r\n%s\r\n" % (size, body[:size]))
            body = body[size:]
        body = b"".join(chunks) + b"0\r\n" + rng.choice([b"", b"X-Trailer: 1\r\n"]) + b"\r\n"
    else:
        body = b""
    rng.shuffle(fields)
    method = b"GET" if kind == "none" else b"POST"
    return b"%s /%d HTTP/1.1\r\n" % (method, number) + b"".join(fields) + b"\r\n" + body


def split(rng: random.Random, data: bytes) -> list[bytes]:
    cuts = sorted(rng.sample(range(1, len(data)), min(len(data) - 1, rng.choice([0, 1, 2, 5, 50]))))
    return [data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]


def test_it_reads_what_h11_reads() -> None:
    """Pipelined requests with lengths and chunks, with and without an offer to upgrade, in any parts."""

    async def compare() -> None:
        for seed in range(CASES):
            rng = random.Random(seed)
            data = b"".join(a_request(rng, number) for number in range(rng.randrange(1, 6)))
            found, transport = await receive(split(rng, data))
            assert found == received_by_h11(data), seed
            assert not transport.closed

    asyncio.run(compare())


@pytest.mark.parametrize("offer", [b"", OFFER])
def test_a_body_is_not_edited(offer: bytes) -> None:
    """A declared length once swallowed the next request."""
    head = b"POST /first HTTP/1.1\r\nHost: x\r\n" + offer + b"Content-Length: %d\r\n\r\n" % len(HOSTILE)
    found, _ = asyncio.run(receive([head + HOSTILE + b"GET /second HTTP/1.1\r\nHost: x\r\n\r\n"]))
    assert found == [(b"POST", b"/first", HOSTILE), (b"GET", b"/second", b"")]


@pytest.mark.parametrize("parts", [1, 3, 50])
@pytest.mark.parametrize("line", [b"HTTP/1.1\r\nConnection: close", b"HTTP/1.0"])
def test_an_offer_on_a_connection_that_closes(line: bytes, parts: int) -> None:
    """The request is answered, and does not wait until the connection times out."""
    data = b"POST / " + line + b"\r\nHost: x\r\n" + OFFER + b"Content-Length: 3\r\n\r\nabc"
    size = -(-len(data) // parts)
    found, transport = asyncio.run(receive([data[at : at + size] for at in range(0, len(data), size)]))
    assert found == [(b"POST", b"/", b"abc")]
    assert transport.closed


def test_a_tunnel_is_refused() -> None:
    """What follows CONNECT is not HTTP."""
    tunnel = b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n"
    found, transport = asyncio.run(receive([tunnel + b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"]))
    assert found == []
    assert transport.written.startswith(b"HTTP/1.1 400 ")
    assert transport.closed


@pytest.mark.parametrize("parts", [1, 2, 500])
@pytest.mark.parametrize("lines", [[b"X: " + b"x" * MAX_HEAD], [b"X-%d: %s" % (i, b"x" * 90) for i in range(700)]])
def test_a_long_head_is_refused(lines: list[bytes], parts: int) -> None:
    """Also if it arrives at once, and if it is that of an offer to upgrade."""
    for offer in (b"", OFFER):
        data = b"GET / HTTP/1.1\r\n" + offer + b"\r\n".join(lines) + b"\r\n\r\n"
        size = len(data) // parts + 1
        found, transport = asyncio.run(receive([data[i : i + size] for i in range(0, len(data), size)]))
        assert found == []
        assert transport.written.startswith(b"HTTP/1.1 431 ")
        assert transport.closed


def test_an_endless_trailer_is_refused() -> None:
    head = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\nX-Trailer: "
    found, transport = asyncio.run(receive([head, *[b"x" * 1000] * (MAX_HEAD // 1000 + 2)]))
    assert found == []
    assert transport.closed


def test_too_many_pipelined_requests() -> None:
    found, transport = asyncio.run(receive([b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * (MAX_PIPELINED + 1)]))
    assert len(found) <= 1
    assert transport.closed


class TestFiles:
    @pytest.mark.parametrize(
        ("soft", "hard", "raised", "allowed"),
        [
            (1024, 4096, 2048 + OTHER_FILES, 2048),
            (1024, resource.RLIM_INFINITY, 2048 + OTHER_FILES, 2048),
            (1024, 1024, 1024, 1024 - OTHER_FILES),
            (100, 100, 100, 50),
            (4096, 8192, 4096, 2048),
            (resource.RLIM_INFINITY, resource.RLIM_INFINITY, resource.RLIM_INFINITY, 2048),
        ],
    )
    def test_connections_that_fit(
        self, soft: int, hard: int, raised: int, allowed: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        limits = [(soft, hard)]
        monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
        monkeypatch.setattr(resource, "setrlimit", lambda _, pair: limits.append(pair))
        assert max_connections(2048) == allowed
        assert limits[-1] == (raised, hard)
