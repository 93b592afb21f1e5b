"""Requests that are cancelled: by uvicorn at the limit of draining, or by whoever runs the application."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.types import ASGIApp

from infer.server.app import Draining
from infer.server.service import EventStream


def unanswered(draining: bool, begun: asyncio.Event) -> ASGIApp:
    async def app(*_: Any) -> None:
        begun.set()
        await asyncio.Event().wait()

    return Draining(app, service=SimpleNamespace(draining=draining))  # type: ignore[arg-type]


def stream(draining: bool, begun: asyncio.Event) -> ASGIApp:
    async def events() -> AsyncIterator[bytes]:
        begun.set()
        await asyncio.Event().wait()
        yield b""

    handle: Any = SimpleNamespace(abort=lambda: None)
    answer: Any = SimpleNamespace(
        events=lambda handle: events(),
        error_events=lambda error: str(error).encode(),
        service=SimpleNamespace(draining=draining),
    )
    return EventStream(answer, handle, ExitStack())


@pytest.mark.parametrize("make", [unanswered, stream])
@pytest.mark.parametrize("draining", [False, True])
def test_a_cancelled_request(make: Callable[[bool, asyncio.Event], ASGIApp], draining: bool) -> None:
    """The client is told only while the server drains; else the cancellation goes on to the caller."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def run() -> bool:
        begun = asyncio.Event()
        app = make(draining, begun)
        call = asyncio.ensure_future(app({"type": "http"}, asyncio.Event().wait, send))  # type: ignore[arg-type]
        await begun.wait()
        call.cancel()
        await asyncio.wait([call])
        return call.cancelled()

    assert asyncio.run(run()) is not draining
    assert any(b"shut down" in message.get("body", b"") for message in sent) is draining
