"""Answers while a client may go away: text as it is made, or whole."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import ExitStack
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from infer.engine.llm import Handle
from infer.server.errors import ApiError

T = TypeVar("T")
LINGER_S = 0.5  # for what a client goes on sending

_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # proxies hand events on as they come


async def read_all(request: Request, most: int, seconds: float) -> bytes:
    """The body, if it is not too large, and comes in time."""
    body, ends = bytearray(), asyncio.get_running_loop().time() + seconds
    length = request.headers.get("content-length", "0")
    too_large = length.isdecimal() and int(length) > most
    try:
        async with asyncio.timeout_at(ends) as patience:
            async for part in request.stream():
                if not too_large:
                    body += part
                if len(body) > most:
                    too_large = True
                if too_large:  # a client that is still sending would not see the answer
                    patience.reschedule(min(ends, asyncio.get_running_loop().time() + LINGER_S))
                    body.clear()
    except TimeoutError:
        if not too_large:
            message = f"the body did not arrive within {seconds:g} seconds"
            raise ApiError(408, message, headers={"Connection": "close"}) from None
    if too_large:
        raise ApiError(413, f"the body is larger than {most:,} bytes", headers={"Connection": "close"})
    return bytes(body)


async def result_of(
    handle: Handle, request: Request, answer: Callable[[Handle], T], *, in_thread: bool = False
) -> T | None:
    """What becomes of a request that is done; None if the client has gone, which ends it.

    in_thread: others go on while the answer is made.
    """
    waiting = asyncio.ensure_future(handle.finished())
    gone = asyncio.ensure_future(_disconnected(request.receive))
    try:
        await asyncio.wait({waiting, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            return None
        return await asyncio.to_thread(answer, handle) if in_thread else answer(handle)
    finally:
        handle.abort()
        await _cancelled(waiting, gone)


async def while_connected(work: Coroutine[Any, Any, None], receive: Receive) -> None:
    """Do something for a client, unless it goes away."""
    working, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
    finally:
        await _cancelled(working, gone)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancelled(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class EventStream(Response):
    """Server-sent events, as they come."""

    def __init__(
        self, events: AsyncIterator[bytes], handle: Handle, held: ExitStack, failed: Callable[[Exception], bytes]
    ) -> None:
        """held: left when it is over. failed: the events that tell of an error on the way."""
        self.status_code, self.background = 200, None
        self.media_type = "text/event-stream"
        self.init_headers(_HEADERS)
        self._events, self._handle, self._held, self._failed = events, handle, held, failed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._held:
            try:
                await while_connected(self._write(send), receive)
            finally:
                self._handle.abort()

    async def _write(self, send: Send) -> None:
        """A client that does not read is cut off by the connection: then `send` ends."""
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async for data in self._events:
                await send({"type": "http.response.body", "body": data, "more_body": True})
        except Exception as error:  # the answer has begun: it can only be told in it
            await send({"type": "http.response.body", "body": self._failed(error), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def quietly_closed() -> Response:
    """To a client that has gone."""
    return Response(status_code=499)
