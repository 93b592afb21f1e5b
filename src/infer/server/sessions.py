"""/v1/sessions: chats that the server remembers, to continue, fork and rewind.

A session is a list of messages. The engine shares their prefixes without knowing about sessions.
"""

from __future__ import annotations

import secrets
import sys
import time
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from infer.server.bodies import ChatCompletion, NewSession, Rewind
from infer.server.chat_template import for_template
from infer.server.completions import ChatAnswer
from infer.server.service import Service
from infer.server.wire import ApiError, bad_request, in_thread, json_response

MAX_SESSIONS, MAX_BYTES = 1024, 1 << 28  # of all sessions: the least recently used one is forgotten first
MAX_MESSAGES = 8192


class _Message(NamedTuple):
    value: dict[str, Any]
    size: int  # bytes in memory


class _Session:
    def __init__(self, held: Sequence[_Message]) -> None:
        self.id, self.created = f"sess_{secrets.token_hex(12)}", int(time.time())
        self.hold(held)
        self.busy = False

    @property
    def messages(self) -> list[dict[str, Any]]:
        return [message.value for message in self.held]

    def hold(self, held: Sequence[_Message]) -> None:
        self.held, self.size = held, sum(message.size for message in held)

    def card(self, with_messages: bool = True) -> dict[str, Any]:
        turns = sum(message.get("role") == "user" for message in self.messages)
        card = {"id": self.id, "object": "session", "created": self.created, "turns": turns}
        return {**card, "messages": self.messages} if with_messages else card


class Sessions:
    def __init__(self, service: Service) -> None:
        self.service = service
        self._sessions: OrderedDict[str, _Session] = OrderedDict()

    def routes(self) -> list[Route]:
        one = "/v1/sessions/{session}"
        return [
            Route("/v1/sessions", self.create, methods=["POST"]),
            Route("/v1/sessions", self.list_all, methods=["GET"]),
            Route(one, self.get, methods=["GET"]),
            Route(one, self.delete, methods=["DELETE"]),
            Route(f"{one}/fork", self.fork, methods=["POST"]),
            Route(f"{one}/rewind", self.rewind, methods=["POST"]),
            Route(f"{one}/chat/completions", self.chat, methods=["POST"]),
        ]

    async def create(self, request: Request) -> Response:
        """Empty, or with the messages of a saved session."""
        body = await self.service.read(request, NewSession, optional=True)
        return self._add(await in_thread(request, self._checked, [], body.messages or []))

    async def list_all(self, request: Request) -> Response:
        cards = [session.card(with_messages=False) for session in self._sessions.values()]
        return json_response({"object": "list", "data": cards})

    async def get(self, request: Request) -> Response:
        return json_response(self._find(request).card())

    async def delete(self, request: Request) -> Response:
        session = self._find(request)
        del self._sessions[session.id]
        return json_response({"id": session.id, "object": "session.deleted", "deleted": True})

    async def fork(self, request: Request) -> Response:
        return self._add(self._find(request).held)

    async def rewind(self, request: Request) -> Response:
        """Remove the last turns. A turn is the user's message and all that follows it."""
        body = await self.service.read(request, Rewind, optional=True)
        session = self._find_idle(request)
        starts = [i for i, message in enumerate(session.messages) if message.get("role") == "user"]
        if body.turns > len(starts):
            raise bad_request(f"cannot rewind {body.turns} of {len(starts)} turns", "turns")
        if body.turns:
            session.hold(session.held[: starts[-body.turns]])
        return json_response(session.card())

    async def chat(self, request: Request) -> Response:
        """A chat completion after the session's messages, added to them once it is complete."""
        body = await self.service.read(request, ChatCompletion)
        if body.n not in (None, 1):
            raise bad_request("a session continues with one answer: n must be 1", "n")
        session = self._find_idle(request)

        def on_done() -> None:
            session.busy = False
            self._evict()

        session.busy = True
        with ExitStack() as done:
            done.callback(on_done)
            held = await in_thread(request, self._checked, session.held, body.messages)

            def on_message(message: dict[str, Any]) -> None:
                session.hold([*held, _Message(message, _memory(message))])  # may be called in another thread

            body = body.model_copy(update={"messages": [message.value for message in held]})
            return await ChatAnswer(self.service, body, on_message).respond(request, done.pop_all())

    def _checked(self, held: Sequence[_Message], more: Sequence[dict[str, Any]]) -> Sequence[_Message]:
        """The messages of a session, and more."""
        messages = [*(message.value for message in held), *more]
        if len(messages) > MAX_MESSAGES:
            raise bad_request(f"a session holds at most {MAX_MESSAGES:,} messages", "messages")
        try:
            for_template(messages)
        except ValueError as error:
            raise bad_request(str(error), "messages") from None
        return [*held, *(_Message(message, _memory(message)) for message in more)]

    def _add(self, held: Sequence[_Message]) -> Response:
        session = _Session(held)
        self._sessions[session.id] = session
        self._evict()
        return json_response(session.card(), 201)

    def _evict(self) -> None:
        size = sum(session.size for session in self._sessions.values())
        while len(self._sessions) > MAX_SESSIONS or (size > MAX_BYTES and len(self._sessions) > 1):
            size -= self._sessions.popitem(last=False)[1].size

    def _find(self, request: Request) -> _Session:
        name = request.path_params["session"]
        if name not in self._sessions:
            raise ApiError(404, "there is no such session", param="session", code="session_not_found")
        self._sessions.move_to_end(name)
        return self._sessions[name]

    def _find_idle(self, request: Request) -> _Session:
        session = self._find(request)
        if session.busy:
            raise ApiError(409, "this session is generating: wait until it has finished", code="session_busy")
        return session


def _memory(value: Any) -> int:
    """The bytes that a value takes, with all that it contains."""
    size, unread = 0, [value]
    while unread:
        inner = unread.pop()
        size += sys.getsizeof(inner)
        if isinstance(inner, dict):
            unread += [*inner.keys(), *inner.values()]
        elif isinstance(inner, list):
            unread += inner
    return size
