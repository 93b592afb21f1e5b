"""A replica without Ray: the server's answers, by the channel."""

from __future__ import annotations

import asyncio
import json
import pickle
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from commands import CACHE_BYTES_PER_TOKEN, folder  # noqa: F401

from infer.deploy import engine as engine_module
from infer.deploy.channel import NOWHERE, Address, Answer, Inbox, Line, Lines, ReplicaLost
from infer.deploy.engine import Engine
from infer.deploy.forward import ForwardedRequest
from infer.deploy.options import DeployOptions
from infer.engine.llm import LLM
from infer.engine.loop import EngineFailed
from infer.machine import reserved_bytes

WAIT = 30.0


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:  # noqa: F811
    options = DeployOptions(model=str(folder), cache_memory=4096 * CACHE_BYTES_PER_TOKEN, max_rows=4)
    engine = Engine(options, threads=1, neighbours=1)
    yield engine
    engine._service.llm.close()


def request(body: Any, address: Address = NOWHERE, path: str = "/v1/completions") -> ForwardedRequest:
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


async def whole(answer: Answer) -> tuple[int, bytes]:
    status, _ = await answer.start()
    data = b""
    while (piece := await answer.body()) is not None:
        data += piece
    return status, data


def asked(engine: Engine, body: Any) -> tuple[int, bytes]:
    async def ask() -> tuple[int, bytes]:
        async with inbox() as box:
            with box.answer() as answer:
                engine._lines = Lines()
                await engine(pickle.loads(pickle.dumps(request(body, answer.address))))
                return await whole(answer)

    return within(ask())


class TestEngine:
    def test_whole(self, engine: Engine) -> None:
        status, data = asked(engine, {"model": "tiny", "prompt": "hello", "max_tokens": 8, "temperature": 0})
        assert status == 200
        assert json.loads(data)["choices"][0]["text"] == engine._service.llm.generate("hello", max_new_tokens=8).text

    def test_streamed(self, engine: Engine) -> None:
        body = {"model": "tiny", "prompt": "hello", "max_tokens": 8, "temperature": 0, "stream": True}
        status, data = asked(engine, body)
        events = [json.loads(line[6:]) for line in data.decode().split("\n\n") if line[6:] not in ("", "[DONE]")]
        text = "".join(event["choices"][0]["text"] for event in events)
        assert status == 200
        assert text == engine._service.llm.generate("hello", max_new_tokens=8).text
        assert data.endswith(b"data: [DONE]\n\n")

    def test_refused(self, engine: Engine) -> None:
        status, data = asked(engine, {"model": "another", "prompt": "hello"})
        assert status == 404
        assert json.loads(data)["error"]["code"] == "model_not_found"

    def test_nothing_is_told_before_there_is_text(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        """A chat's stream begins with an event that holds no text."""
        seen: list[bool] = []
        start = Line.start

        def noted(line: Line, *args: Any) -> None:
            seen.append(any(task.times for task in engine._service.llm._driver.loop.scheduler.running))
            start(line, *args)

        monkeypatch.setattr(Line, "start", noted)
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 40, "stream": True}
        asked_chat = request(body, path="/v1/chat/completions")

        async def ask() -> None:
            async with inbox() as box:
                with box.answer() as answer:
                    engine._lines, asked_chat.reply_to = Lines(), answer.address
                    await engine(asked_chat)

        within(ask())
        assert seen == [True]

    def test_one_who_goes_away(self, engine: Engine) -> None:
        """A call that is cancelled, and an ingress that has gone, free the row."""

        async def leave(how: Callable[[asyncio.Task[None], Inbox], None]) -> None:
            async with inbox() as box:
                with box.answer() as answer:
                    engine._lines = Lines()
                    body = {"model": "tiny", "prompt": "hello", "max_tokens": 200, "stream": True, "ignore_eos": True}
                    call = asyncio.ensure_future(engine(request(body, answer.address)))
                    await answer.start()
                    how(call, box)
                    await asyncio.wait({call})
            while engine._service.llm.stats().running:
                await asyncio.sleep(0.01)

        for how in (lambda call, box: call.cancel(), lambda call, box: box.close()):
            before = engine._service.llm.stats().generated_tokens
            within(leave(how))
            assert engine._service.llm.stats().generated_tokens - before < 200

    def test_one_that_has_failed(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        """Raises, so that another replica is asked, and Ray replaces it."""
        engine.check_health()
        monkeypatch.setattr(LLM, "failure", RuntimeError("broken"))
        with pytest.raises(EngineFailed):
            engine.check_health()
        with pytest.raises(EngineFailed):
            asked(engine, {"model": "tiny", "prompt": "hello"})

    def test_memory_is_shared(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
        """Each of four replicas sees a quarter of what is free."""
        left: list[int] = []
        monkeypatch.setattr(engine_module, "available_memory", lambda device, processes=1: 1000)

        def noted(*args: Any, **options: Any) -> None:
            left.append(1000 - reserved_bytes())
            raise KeyboardInterrupt

        monkeypatch.setattr(engine_module, "LLM", noted)
        with pytest.raises(KeyboardInterrupt):
            Engine(DeployOptions(model=str(folder)), threads=1, neighbours=4)
        assert left == [250]


class TestChannel:
    def test_many_at_once(self) -> None:
        async def talk() -> None:
            async with inbox() as box:
                with box.answer() as one, box.answer() as other:
                    lines = Lines()
                    line = await lines.to(one.address)
                    assert await lines.to(other.address) is line
                    for answer, status in ((one, 200), (other, 404)):
                        line.start(answer.address.name, status, [(b"a", b"\xe9")])
                    for _ in range(3):
                        line.body(one.address.name, b"x")
                        line.body(other.address.name, b"y")
                    line.end(other.address.name)
                    line.end(one.address.name)
                    assert await whole(one) == (200, b"xxx")
                    assert await whole(other) == (404, b"yyy")
                    assert one.complete

        within(talk())

    def test_a_line_that_breaks(self) -> None:
        """Answers that it was bringing are lost; the next is made anew."""

        async def talk() -> None:
            async with inbox() as box:
                with box.answer() as begun, box.answer() as waiting:
                    lines = Lines()
                    line = await lines.to(begun.address)
                    line.start(begun.address.name, 200, [])
                    await begun.start()
                    line.close()
                    with pytest.raises(ReplicaLost):
                        await begun.body()
                    again = await lines.to(waiting.address)
                    assert again is not line
                    again.start(waiting.address.name, 200, [])
                    again.end(waiting.address.name)
                    assert await whole(waiting) == (200, b"")

        within(talk())

    def test_garbage(self) -> None:
        """Who does not know an answer's name cannot speak for it."""

        async def talk() -> None:
            async with inbox() as box:
                with box.answer() as answer:
                    line = await Lines().to(answer.address)
                    line.start(b"?" * 16, 200, [])
                    line.start(answer.address.name, 201, [])
                    assert (await answer.start())[0] == 201
                    _, writer = await asyncio.open_connection(answer.address.host, answer.address.port)
                    writer.write(struct.pack("!16sBI", b"!" * 16, 9, 1 << 31))
                    line.end(answer.address.name)
                    assert await answer.body() is None
                    writer.close()

        within(talk())
