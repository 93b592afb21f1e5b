"""A replica without Ray: the server's responses, through the channel."""

from __future__ import annotations

import asyncio
import json
import pickle
import struct
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from commands import CACHE_BYTES_PER_TOKEN, folder  # noqa: F401
from starlette.applications import Starlette
from starlette.testclient import TestClient

from infer.deploy import replica as replica_module
from infer.deploy.channel import (
    NO_REPLY,
    Connection,
    Connections,
    ForwardedRequest,
    Inbox,
    PendingResponse,
    ReplicaLost,
    ReplyAddress,
    is_last,
)
from infer.deploy.options import DeployOptions
from infer.deploy.replica import Replica, settings_of
from infer.engine.engine import EngineFailed, Event
from infer.engine.llm import LLM
from infer.machine import reserved_bytes
from infer.server.app import guards

WAIT = 300.0


@pytest.fixture(scope="module")
def replica(folder: Path) -> Iterator[Replica]:  # noqa: F811
    options = DeployOptions(model=str(folder), cache_memory=4096 * CACHE_BYTES_PER_TOKEN, max_rows=4)
    replica = Replica(options, threads=1, neighbors=1)
    yield replica
    replica._service.llm.close()


def request(body: Any, address: ReplyAddress = NO_REPLY, path: str = "/v1/completions") -> ForwardedRequest:
    return ForwardedRequest(
        "POST", path, b"", [(b"content-type", b"application/json")], json.dumps(body).encode(), address
    )


def within(work: Awaitable[Any]) -> Any:
    async def bounded() -> Any:
        async with asyncio.timeout(WAIT):
            return await work

    return asyncio.run(bounded())


@asynccontextmanager
async def inbox() -> AsyncIterator[Inbox]:
    box = Inbox("127.0.0.1")
    await box.open()
    try:
        yield box
    finally:
        box.close()
        await asyncio.sleep(0.05)  # both sides hear of it


@contextmanager
def held_after_a_token(llm: LLM) -> Iterator[None]:
    """The engine waits in its next step but one, until the end of the block."""
    release, before = threading.Event(), llm.stats().generated_tokens

    def hold(event: Event) -> None:
        if event.kind == "step" and llm.stats().generated_tokens > before:
            release.wait(WAIT)

    end = llm.watch(hold)
    try:
        yield
    finally:
        end()
        release.set()


async def whole(answer: PendingResponse) -> tuple[int, bytes]:
    status, data, message = (await answer.next())["status"], b"", None
    while message is None or not is_last(message):
        message = await answer.next()
        data += message["body"]
    return status, data


def start(status: int, headers: Any = ()) -> dict[str, Any]:
    return {"type": "http.response.start", "status": status, "headers": list(headers)}


def body(data: bytes, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": more}


def asked(replica: Replica, body: Any) -> tuple[int, bytes]:
    async def ask() -> tuple[int, bytes]:
        async with inbox() as box:
            with box.response() as answer:
                replica._connections = Connections()
                await replica(pickle.loads(pickle.dumps(request(body, answer.address))))
                return await whole(answer)

    return within(ask())


class TestEngine:
    def test_whole(self, replica: Replica) -> None:
        status, data = asked(replica, {"model": "tiny", "prompt": "hello", "max_tokens": 8, "temperature": 0})
        assert status == 200
        assert json.loads(data)["choices"][0]["text"] == replica._service.llm.generate("hello", max_new_tokens=8).text

    def test_streamed(self, replica: Replica) -> None:
        ask = {"model": "tiny", "prompt": "hello", "max_tokens": 8, "temperature": 0, "stream": True}
        status, data = asked(replica, ask)
        events = [json.loads(line[6:]) for line in data.decode().split("\n\n") if line[6:] not in ("", "[DONE]")]
        text = "".join(event["choices"][0]["text"] for event in events)
        assert status == 200
        assert text == replica._service.llm.generate("hello", max_new_tokens=8).text
        assert data.endswith(b"data: [DONE]\n\n")

    def test_an_origin_that_the_ingress_has_allowed(self, folder: Path) -> None:  # noqa: F811
        options = DeployOptions(model=str(folder), cors=("https://page",), hosts=("server",))
        client = TestClient(Starlette(middleware=guards(settings_of(options))), base_url="http://server")
        assert client.get("/", headers={"origin": "https://page"}).status_code == 404
        assert client.get("/", headers={"origin": "https://other"}).status_code == 403

    def test_refused(self, replica: Replica) -> None:
        status, data = asked(replica, {"model": "another", "prompt": "hello"})
        assert status == 404
        assert json.loads(data)["error"]["code"] == "model_not_found"

    def test_nothing_is_told_before_there_is_text(self, replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
        """A chat's stream begins with an event that holds no text."""
        seen: list[bool] = []
        send, before = Connection.send, replica._service.llm.stats().generated_tokens

        def noted(line: Connection, key: bytes, message: Any) -> None:
            if message["type"] == "http.response.start":
                seen.append(replica._service.llm.stats().generated_tokens > before)
            send(line, key, message)

        monkeypatch.setattr(Connection, "send", noted)
        chat = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 40, "stream": True}
        asked_chat = request(chat, path="/v1/chat/completions")

        async def ask() -> None:
            async with inbox() as box:
                with box.response() as answer:
                    replica._connections, asked_chat.reply_to = Connections(), answer.address
                    await replica(asked_chat)

        within(ask())
        assert seen == [True]

    def test_one_who_goes_away(self, replica: Replica) -> None:
        """A call that is cancelled, and an ingress that has gone, free the row."""

        async def leave(how: Callable[[asyncio.Task[None], Inbox], None]) -> None:
            async with inbox() as box:
                with box.response() as answer, held_after_a_token(replica._service.llm):
                    replica._connections = Connections()
                    ask = {"model": "tiny", "prompt": "hello", "max_tokens": 200, "stream": True, "ignore_eos": True}
                    ask["logprobs"] = 0  # an event also for a token without text
                    call = asyncio.ensure_future(replica(request(ask, answer.address)))
                    await answer.next()
                    how(call, box)
                    await asyncio.wait({call})
            while replica._service.llm.stats().running:
                await asyncio.sleep(0.01)

        for how in (lambda call, box: call.cancel(), lambda call, box: box.close()):
            before = replica._service.llm.stats().generated_tokens
            within(leave(how))
            assert replica._service.llm.stats().generated_tokens - before < 200

    def test_one_that_has_failed(self, replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
        """Raises, so that another replica is asked, and Ray replaces it."""
        replica.check_health()
        monkeypatch.setattr(LLM, "failure", RuntimeError("broken"))
        with pytest.raises(EngineFailed):
            replica.check_health()
        with pytest.raises(EngineFailed):
            asked(replica, {"model": "tiny", "prompt": "hello"})

    def test_memory_is_shared(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
        """Each of four replicas sees a quarter of what is free."""
        left: list[int] = []
        monkeypatch.setattr(replica_module, "available_memory", lambda device, processes=1: 1000)

        def noted(*args: Any, **options: Any) -> None:
            left.append(1000 - reserved_bytes())
            raise KeyboardInterrupt

        monkeypatch.setattr(replica_module, "LLM", noted)
        with pytest.raises(KeyboardInterrupt):
            Replica(DeployOptions(model=str(folder)), threads=1, neighbors=4)
        assert left == [250]


class TestChannel:
    def test_many_at_once(self) -> None:
        async def talk() -> None:
            async with inbox() as box:
                with box.response() as one, box.response() as other:
                    lines = Connections()
                    line = await lines.to(one.address)
                    assert await lines.to(other.address) is line
                    for answer, status in ((one, 200), (other, 404)):
                        line.send(answer.address.key, start(status, [(b"a", b"\xe9")]))
                    for _ in range(3):
                        line.send(one.address.key, body(b"x"))
                        line.send(other.address.key, body(b"y"))
                    line.send(other.address.key, body(b"", more=False))
                    line.send(one.address.key, body(b"", more=False))
                    assert await whole(one) == (200, b"xxx")
                    assert await whole(other) == (404, b"yyy")
                    assert one.complete

        within(talk())

    def test_a_line_that_breaks(self) -> None:
        """Responses on it are lost; the next request opens a new one."""

        async def talk() -> None:
            async with inbox() as box:
                with box.response() as begun, box.response() as waiting:
                    lines = Connections()
                    line = await lines.to(begun.address)
                    line.send(begun.address.key, start(200))
                    await begun.next()
                    line.close()
                    with pytest.raises(ReplicaLost):
                        await begun.next()
                    again = await lines.to(waiting.address)
                    assert again is not line
                    again.send(waiting.address.key, start(200))
                    again.send(waiting.address.key, body(b"", more=False))
                    assert await whole(waiting) == (200, b"")

        within(talk())

    def test_garbage(self) -> None:
        """Frames need the key of a response."""

        async def talk() -> None:
            async with inbox() as box:
                with box.response() as answer:
                    line = await Connections().to(answer.address)
                    line.send(b"?" * 16, start(200))
                    line.send(answer.address.key, start(201))
                    assert (await answer.next())["status"] == 201
                    _, writer = await asyncio.open_connection(answer.address.host, answer.address.port)
                    writer.write(struct.pack("!16sI", b"!" * 16, 1 << 31))
                    line.send(answer.address.key, body(b"", more=False))
                    assert is_last(await answer.next())
                    writer.close()

        within(talk())
