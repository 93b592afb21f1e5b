"""Bodies that cost more than they are worth: parsed elsewhere, and refused before their prompts are encoded."""

from __future__ import annotations

import asyncio
import json
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import ClientDisconnect, Request

from infer.engine.llm import Handle
from infer.engine.params import SamplingParams
from infer.loader import json_process
from infer.loader.limited_process import LimitedProcess, ProcessEnded
from infer.server import sessions as sessions_module
from infer.server.bodies import ChatCompletion, Completion, parse_body, parse_in_process, validate
from infer.server.service import Service
from infer.server.sessions import Sessions
from infer.server.wire import ApiError, in_thread

MANY = json_process.MAX_VALUES


@pytest.mark.parametrize(
    "value",
    [
        {"model": "m", "prompt": '\n"\\\N{SNOWMAN}\ud800' * 1000, "temperature": 0.5, "stop": None, "echo": True},
        {"model": "m", "prompt": [list(range(100)), [1]]},
        {"model": "m", "prompt": ",".join("x" * (MANY * 5))},
    ],
)
def test_the_process_parses_as_the_server(value: Any) -> None:
    data = json.dumps(value).encode()
    assert validate(Completion, parse_in_process(data)) == parse_body(Completion, data)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'{"prompt": ' + b"[" * 10**5, json_process.NOT_JSON),
        (b"NaN", json_process.NOT_JSON),
        (b"1e999", json_process.NOT_JSON),
        (b"\xff", json_process.NOT_JSON),
        (b'{"prompt": [%s]}' % b",".join([b"[1]"] * (MANY + 1)), json_process.TOO_MANY),
        (b'{"prompt": [%s]}' % b",".join([b"[1]"] * MANY * 5), json_process.TOO_MANY),
        (b'{"prompt": [%s]}' % b",".join([b"1"] * MANY * 5), json_process.TOO_MANY),
        (b'{"prompt": {%s}}' % b",".join(b'"%d":1' % i for i in range(MANY * 4)), json_process.TOO_MANY),
    ],
)
def test_refused(data: bytes, message: str) -> None:
    with pytest.raises(ApiError, match=message):
        parse_in_process(data)


def test_a_process_that_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is ended, and the next body is parsed by another one."""
    data = json.dumps({"messages": [{}] * MANY}).encode()
    monkeypatch.setattr("infer.loader.limited_process.WAIT", 0.0)
    with pytest.raises(ApiError, match="the body was not parsed"):
        parse_in_process(data)
    monkeypatch.undo()
    assert parse_in_process(b'{"a": 1}') == {"a": 1}


def test_a_process_that_ends_within_its_reply(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os; os.write(1, (10).to_bytes(8) + b'part')")
    with pytest.raises(ProcessEnded, match="its process ended with status"):
        LimitedProcess(script).answer(b"")


def test_many_prompts_are_refused_at_once() -> None:
    for prompts in ([[1]] * 2000, ["a"] * 2000):
        with pytest.raises(ApiError, match="at most 1024 items"):
            validate(Completion, {"model": "m", "prompt": prompts})


class TestInThread:
    @staticmethod
    def request(gone: asyncio.Event) -> Request:
        async def receive() -> dict[str, str]:
            await gone.wait()
            return {"type": "http.disconnect"}

        return Request({"type": "http"}, receive)  # type: ignore[arg-type]

    def test_result_and_error(self) -> None:
        async def run() -> None:
            request = self.request(asyncio.Event())
            assert await in_thread(request, max, 1, 2) == 2
            with pytest.raises(ValueError, match="invalid literal"):
                await in_thread(request, int, "x")

        asyncio.run(run())

    def test_a_client_that_has_gone(self) -> None:
        """Its work is not begun."""
        from concurrent.futures import ThreadPoolExecutor

        async def run() -> None:
            gone, begun, end = asyncio.Event(), list[int](), threading.Event()
            with ThreadPoolExecutor(1) as pool:
                pool.submit(end.wait)
                gone.set()
                with pytest.raises(ClientDisconnect):
                    await in_thread(self.request(gone), begun.append, 1, executor=pool)
                end.set()
            assert begun == []

        asyncio.run(run())


def test_a_grammar_whose_client_has_gone() -> None:
    """What was being compiled then is not generated."""
    aborted, compiling, gone = (threading.Event() for _ in range(3))

    def submit(*_: Any, **__: Any) -> Any:
        compiling.set()
        assert gone.wait(60)
        handle = Handle.__new__(Handle)
        weakref.finalize(handle, aborted.set)
        return handle

    async def receive() -> Any:
        await asyncio.to_thread(compiling.wait, 60)
        return {"type": "http.disconnect"}

    async def ask() -> None:
        service: Any = SimpleNamespace(_compiling=None, settings=SimpleNamespace(log_prompts=False))
        with pytest.raises(ClientDisconnect):
            await Service.submit(service, Request({"type": "http"}, receive), [], SamplingParams(regex="a"), submit)
        gone.set()

    asyncio.run(ask())
    assert aborted.wait(60)


def test_a_chat_of_many_parts_is_read() -> None:
    parts = [{"type": "text", "text": "x"}] * 1000
    body = {"model": "m", "messages": [{"role": "user", "content": parts}]}
    assert validate(ChatCompletion, parse_in_process(json.dumps(body).encode())).messages == body["messages"]


def test_a_session_counts_the_memory_that_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty lists take 3 bytes of JSON each, and 64 of memory."""
    service = SimpleNamespace(service=None)
    sessions = Sessions(service)  # type: ignore[arg-type]
    monkeypatch.setattr(sessions_module, "MAX_BYTES", 200_000)
    message = json.dumps({"role": "user", "content": "x", "more": [[]] * 1000})
    assert len(message) * 10 < 64_000
    for _ in range(10):
        sessions._add(sessions._checked([], [json.loads(message)]))
    assert len(sessions._sessions) < 5


def test_a_session_is_measured_once() -> None:
    """Not again whenever another one is added: that would block the event loop."""
    sessions = Sessions(SimpleNamespace(service=None))  # type: ignore[arg-type]
    sessions._add(sessions._checked([], [{"role": "user", "content": "x"}]))
    (session,) = sessions._sessions.values()
    size = session.size
    session.held = None  # type: ignore[assignment]
    sessions._add([])
    assert session.size == size > 0
    session.hold([])
    assert session.size == 0
