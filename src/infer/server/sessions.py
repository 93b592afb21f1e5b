"""/v1/sessions: chats that the server remembers, to go on with, fork and rewind.

A session is a list of messages. What the engine has computed of them, it finds by itself: prefixes are shared.
"""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from infer.server.bodies import ChatCompletion, NewSession, Rewind
from infer.server.chat import ChatCompletions
from infer.server.errors import ApiError, refused
from infer.server.messages import for_template
from infer.server.text import as_json, json_response

MOST, MOST_BYTES = 1024, 1 << 28  # of all sessions: the one that was not used for longest goes first
MOST_MESSAGES = 8192


class _Session:
    def __init__(self, messages: list[dict[str, Any]]) -> None:
        self.id, self.created = f"sess_{secrets.token_hex(12)}", int(time.time())
        self.messages = messages
        self.answering = False

    @property
    def messages(self) -> list[dict[str, Any]]:
        return self._messages

    @messages.setter
    def messages(self, messages: list[dict[str, Any]]) -> None:
        self._messages, self.size = messages, len(as_json(messages))

    def card(self, whole: bool = True) -> dict[str, Any]:
        turns = sum(message.get("role") == "user" for message in self.messages)
        card = {"id": self.id, "object": "session", "created": self.created, "turns": turns}
        return {**card, "messages": self.messages} if whole else card


class Sessions:
    def __init__(self, chat: ChatCompletions) -> None:
        self._chat, self.service = chat, chat.service
        self._known: OrderedDict[str, _Session] = OrderedDict()

    def routes(self) -> list[Route]:
        one = "/v1/sessions/{session}"
        return [
            Route("/v1/sessions", self.make, methods=["POST"]),
            Route("/v1/sessions", self.all, methods=["GET"]),
            Route(one, self.one, methods=["GET"]),
            Route(one, self.forget, methods=["DELETE"]),
            Route(f"{one}/fork", self.fork, methods=["POST"]),
            Route(f"{one}/rewind", self.rewind, methods=["POST"]),
            Route(f"{one}/chat/completions", self.go_on, methods=["POST"]),
        ]

    async def make(self, request: Request) -> Response:
        """An empty one, or with messages: also those of one that was saved."""
        body = await self.service.read(request, NewSession, optional=True)
        return self._kept(self._checked(body.messages or []), 201)

    async def all(self, request: Request) -> Response:
        cards = [session.card(whole=False) for session in self._known.values()]
        return json_response({"object": "list", "data": cards})

    async def one(self, request: Request) -> Response:
        return json_response(self._found(request).card())

    async def forget(self, request: Request) -> Response:
        session = self._found(request)
        del self._known[session.id]
        return json_response({"id": session.id, "object": "session.deleted", "deleted": True})

    async def fork(self, request: Request) -> Response:
        return self._kept(list(self._found(request).messages), 201)

    async def rewind(self, request: Request) -> Response:
        """Forget the last turns: what the user said, and what followed."""
        body = await self.service.read(request, Rewind, optional=True)
        session = self._idle(request)
        starts = [i for i, message in enumerate(session.messages) if message.get("role") == "user"]
        if body.turns > len(starts):
            raise refused(f"cannot rewind {body.turns} of {len(starts)} turns", "turns")
        if body.turns:
            session.messages = session.messages[: starts[-body.turns]]
        return json_response(session.card())

    async def go_on(self, request: Request) -> Response:
        """A chat completion behind the messages so far. It is remembered once it is whole."""
        body = await self.service.read(request, ChatCompletion)
        if body.n not in (None, 1):
            raise refused("a session goes on with one answer", "n")
        session = self._idle(request)
        messages = self._checked([*session.messages, *body.messages])

        def said(message: dict[str, Any]) -> None:
            session.messages = [*messages, message]  # perhaps in another thread

        def over() -> None:
            session.answering = False
            self._forget_some()

        session.answering = True
        return await self._chat.answer(request, body.model_copy(update={"messages": messages}), said, over)

    def _checked(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        if len(messages) > MOST_MESSAGES:
            raise refused(f"a session holds {MOST_MESSAGES:,} messages at most", "messages")
        try:
            for_template(messages)
        except ValueError as error:
            raise refused(str(error), "messages") from None
        return messages

    def _kept(self, messages: list[dict[str, Any]], status: int) -> Response:
        session = _Session(messages)
        self._known[session.id] = session
        self._forget_some()
        return json_response(session.card(), status)

    def _forget_some(self) -> None:
        size = sum(session.size for session in self._known.values())
        while len(self._known) > MOST or (size > MOST_BYTES and len(self._known) > 1):
            size -= self._known.popitem(last=False)[1].size

    def _found(self, request: Request) -> _Session:
        name = request.path_params["session"]
        if name not in self._known:
            raise ApiError(404, "there is no such session", param="session", code="session_not_found")
        self._known.move_to_end(name)
        return self._known[name]

    def _idle(self, request: Request) -> _Session:
        session = self._found(request)
        if session.answering:
            raise ApiError(409, "this session is answering: wait for the end", code="session_busy")
        return session
