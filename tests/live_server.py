"""A server for tests of the live page: its routes, and as much of the API as the page asks for, on a tiny model."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from tiny import make_tiny_model

from infer import LLM, CacheMemory
from infer.engine.engine import Engine
from infer.engine.llm import Handle
from infer.engine.result import GeneratedToken
from infer.server.live import Live, number_of, routes
from infer.server.wire import usage_of

CONTEXT = 2048


class Letters:
    """A token for each of 64 characters; others are folded onto them."""

    def encode(self, text: str) -> list[int]:
        return [(ord(letter) - 32) % 64 for letter in text]

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        return self.encode("".join(f"{each['role'][0]}:{each['content']}_" for each in messages) + "A:")

    def decode(self, token_ids: list[int]) -> str:
        return "".join(chr(32 + i) for i in token_ids)


class FakeApi:
    """The three endpoints, as OpenAI's."""

    def __init__(self, llm: LLM, chat: bool = True) -> None:
        self.llm, self.chat, self.bodies = llm, chat, list[dict[str, Any]]()
        self.replies: list[str] = []  # sent instead of the model's tokens

    def routes(self) -> list[Route]:
        return [
            Route("/v1/models", self.models),
            Route("/v1/chat/completions", self.complete, methods=["POST"]),
            Route("/v1/completions", self.complete, methods=["POST"]),
        ]

    async def models(self, request: Request) -> Response:
        return JSONResponse({"data": [{"id": "tiny", "chat": self.chat, "max_model_len": CONTEXT}]})

    async def complete(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        try:
            handle = self.llm.submit(
                body.get("messages") or body["prompt"],
                max_new_tokens=body["max_tokens"],
                temperature=body.get("temperature", 1.0),
                seed=body.get("seed"),
                logprobs=5,
            )
        except ValueError as error:
            return JSONResponse({"error": {"message": str(error), "type": "invalid_request_error"}}, 400)
        return StreamingResponse(self.stream(handle, "messages" in body), media_type="text/event-stream")

    async def stream(self, handle: Handle, chat: bool) -> AsyncIterator[str]:
        count = 0
        async for piece in handle:
            text = self.replies[count] if count < len(self.replies) else str(piece)
            choice = self.chat_choice(piece, text) if chat else self.completion_choice(piece, text)
            yield event({"choices": [choice], "infer": {"request": number_of(handle)}})
            count += 1
        yield event({"choices": [], "usage": usage_of(handle.results())})
        yield "data: [DONE]\n\n"

    def chat_choice(self, piece: GeneratedToken, text: str) -> dict[str, Any]:
        assert piece.logprobs is not None
        top = [{"token": self.llm.tokenizer.decode([i]), "logprob": p} for i, p in piece.logprobs.top]
        content = [{"token": text, "logprob": piece.logprobs.logprob, "top_logprobs": top}]
        return {"delta": {"content": text}, "logprobs": {"content": content}, "finish_reason": piece.finish_reason}

    def completion_choice(self, piece: GeneratedToken, text: str) -> dict[str, Any]:
        assert piece.logprobs is not None
        logprobs = {
            "tokens": [text],
            "token_logprobs": [piece.logprobs.logprob],
            "top_logprobs": [{self.llm.tokenizer.decode([i]): p for i, p in piece.logprobs.top}],
        }
        return {"text": text, "logprobs": logprobs, "finish_reason": piece.finish_reason}


def event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data, allow_nan=False)}\n\n"


class Gate:
    """Holds the engine between two passes. Meanwhile it still handles requests and aborts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._passes: float = math.inf  # that may still run
        self._changed = threading.Condition()
        step = Engine.step
        monkeypatch.setattr(Engine, "step", lambda engine: step(engine) if self._take() else False)

    def _take(self) -> bool:
        with self._changed:
            if not self._passes:
                self._changed.wait(0.001)
            if not self._passes:
                return False
            self._passes -= 1
            return True

    @contextmanager
    def held(self) -> Iterator[None]:
        """No pass runs but those that are let through."""
        self._set(0)
        try:
            yield
        finally:
            self._set(math.inf)

    def let(self, passes: int) -> None:
        """Let so many passes through."""
        with self._changed:
            self._set(self._passes + passes)

    def _set(self, passes: float) -> None:
        with self._changed:
            self._passes = passes
            self._changed.notify()


class LiveServer:
    def __init__(self, llm: LLM, api: FakeApi, live: Live, address: str) -> None:
        self.llm, self.api, self.live, self.address = llm, api, live, address


@contextmanager
def serving(*, pages: int = 240, page: int = 8, chat: bool = True, **options: Any) -> Iterator[LiveServer]:
    """On a port of the loopback that is free."""
    model = make_tiny_model(max_position_embeddings=CONTEXT)
    size = CacheMemory(model, 10**6, page_size=page).pool.page_bytes
    with LLM(model, Letters(), memory=CacheMemory(model, pages * size, page_size=page), **options) as llm:
        live, api = Live(llm), FakeApi(llm, chat)
        config = uvicorn.Config(
            Starlette(routes=[*routes(lambda: live), *api.routes()]),
            port=0,
            log_level="error",
            ws="none",
            lifespan="off",
            timeout_graceful_shutdown=1,
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run)
        thread.start()
        try:
            while not server.started:
                time.sleep(0.01)
            port = server.servers[0].sockets[0].getsockname()[1]
            yield LiveServer(llm, api, live, f"http://127.0.0.1:{port}/")
        finally:
            server.should_exit = True
            thread.join()
