"""The routes of the API, and what stands in front of all of them: keys, origins, errors."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
from collections.abc import Sequence
from ipaddress import ip_address

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from infer.server import live
from infer.server.bodies import Detokenize, Tokenize
from infer.server.chat import ChatCompletions
from infer.server.completions import Completions
from infer.server.errors import ApiError, refused
from infer.server.messages import for_template
from infer.server.openapi import document
from infer.server.responses import Responses
from infer.server.service import Service
from infer.server.sessions import Sessions
from infer.server.settings import Settings
from infer.server.spans import Spans
from infer.server.streams import quietly_closed
from infer.server.text import json_response

OPEN = "/health"  # needs no key
KEY_WANTED = {"WWW-Authenticate": 'Basic realm="infer", charset="UTF-8"'}  # a browser then asks for the key


def guards(settings: Settings) -> list[Middleware]:
    """Who may ask: what stands in front of an application."""
    middleware = []
    if settings.cors:
        middleware.append(
            Middleware(CORSMiddleware, allow_origins=list(settings.cors), allow_methods=["*"], allow_headers=["*"])
        )
    return [
        *middleware,
        Middleware(Origins, allowed=settings.cors, hosts=settings.hosts),
        Middleware(Keys, keys=settings.api_keys),
    ]


def make_app(service: Service) -> Starlette:
    settings = service.settings
    middleware = guards(settings)
    if service.tracer is not None:
        middleware.append(Middleware(Spans, tracer=service.tracer, model=settings.model_id))

    async def failed(request: Request, error: Exception) -> Response:
        return service.told(error).response()

    return Starlette(
        routes=routes(service),
        middleware=middleware,
        exception_handlers={
            ApiError: failed,
            ClientDisconnect: _gone,
            HTTPException: _no_such_path,
            Exception: failed,
        },
    )


def routes(service: Service) -> list[BaseRoute]:
    other, chat = Other(service), ChatCompletions(service)
    return [
        Route("/v1/models", other.models),
        Route("/v1/models/", other.models),  # which would be a model without a name
        Route("/v1/models/{name:path}", other.model),
        Route("/v1/completions", Completions(service).__call__, methods=["POST"]),
        Route("/v1/chat/completions", chat.__call__, methods=["POST"]),
        Route("/v1/responses", Responses(service).__call__, methods=["POST"]),
        Route("/tokenize", other.tokenize, methods=["POST"]),
        Route("/detokenize", other.detokenize, methods=["POST"]),
        Route("/tokenizer_info", other.tokenizer_info),
        Route("/health", other.health),
        Route("/metrics", other.metrics),
        Route("/openapi.json", other.openapi),
        *Sessions(chat).routes(),
        *live.routes(lambda: service.live, lambda: service.draining),
    ]


async def _no_such_path(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path:.100} is not a part of this API"
    return ApiError(error.status_code, message, headers=error.headers).response()


async def _gone(request: Request, error: Exception) -> Response:
    return quietly_closed()


class Origins:
    """Refuses what a browser sends for a page of another origin, unless that may ask. Other clients name no origin.

    A page whose name its owner has resolve to this machine looks like one of our own, but for the name in Host.
    """

    def __init__(self, app: ASGIApp, allowed: Sequence[str], hosts: Sequence[str] | None) -> None:
        """hosts: names of this server; None: any."""
        self.app, self._allowed = app, allowed
        self._hosts = None if hosts is None else {"", "localhost", *map(_host_name, hosts)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._refusal(Headers(scope=scope)) if scope["type"] == "http" else None
        await (self.app if error is None else error.response())(scope, receive, send)

    def _refusal(self, headers: Headers) -> ApiError | None:
        origin, host = headers.get("origin"), headers.get("host", "")
        if not self._known(_host_name(host)):
            message = "this server does not go by this name: start it with --allowed-host NAME"
            return ApiError(403, message, param="Host", code="foreign_host")
        if origin is None or "*" in self._allowed or origin in self._allowed or origin.partition("://")[2] == host:
            return None
        message = "pages of this origin may not ask: start the server with --cors ORIGIN"
        return ApiError(403, message, code="foreign_origin")

    def _known(self, host: str) -> bool:
        if self._hosts is None or host in self._hosts or host.endswith(".localhost"):
            return True
        try:
            ip_address(host)
        except ValueError:
            return False
        return True


def _host_name(host: str) -> str:
    """A host without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.lower().partition(":")[0].removesuffix(".")


class Keys:
    """Lets only those through who have a key, as a bearer token or a password; and everybody to /health."""

    def __init__(self, app: ASGIApp, keys: frozenset[str]) -> None:
        self.app, self._keys = app, [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._keys or scope["path"] == OPEN or self._known(scope):
            await self.app(scope, receive, send)
            return
        message = "a key is needed: send it as `Authorization: Bearer KEY`"
        error = ApiError(401, message, code="invalid_api_key", headers=KEY_WANTED)
        await error.response()(scope, receive, send)

    def _known(self, scope: Scope) -> bool:
        given, found = _key(dict(scope["headers"]).get(b"authorization", b"")), False
        for key in self._keys:  # all of them, so that the time tells nothing
            found |= hmac.compare_digest(given, key)
        return found


def _key(authorization: bytes) -> bytes:
    kind, _, value = authorization.partition(b" ")
    value = value.strip()
    if kind.lower() == b"bearer":
        return value
    if kind.lower() == b"basic":
        try:
            return base64.b64decode(value, validate=True).partition(b":")[2]
        except binascii.Error:
            return b""
    return b""


class Other:
    """What is no text: the model, tokens, health, metrics."""

    def __init__(self, service: Service) -> None:
        self.service = service

    async def models(self, request: Request) -> Response:
        return json_response({"object": "list", "data": [self.service.card()]})

    async def model(self, request: Request) -> Response:
        self.service.check_model(request.path_params["name"])
        return json_response(self.service.card())

    async def tokenize(self, request: Request) -> Response:
        body = await self.service.read(request, Tokenize)
        self.service.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise refused("give a prompt or messages, one of the two")
        return await asyncio.to_thread(self._tokenized, body)

    def _tokenized(self, body: Tokenize) -> Response:
        tokens = self._encoded(body)
        answer = {"count": len(tokens), "max_model_len": self.service.longest, "tokens": tokens}
        if body.return_token_strs:
            answer["token_strs"] = [self.service.text_of(token) for token in tokens]
        return json_response(answer)

    def _encoded(self, body: Tokenize) -> list[int]:
        tokenizer = self.service.tokenizer
        try:
            if body.messages is not None:
                return list(tokenizer.encode_chat(for_template(body.messages)))
            return list(tokenizer.encode(body.prompt, add_special_tokens=body.add_special_tokens is not False))
        except ValueError as error:
            raise refused(str(error)) from None

    async def detokenize(self, request: Request) -> Response:
        body = await self.service.read(request, Detokenize)
        self.service.check_model(body.model)
        size = self.service.llm.model.config.vocab_size
        if wrong := [token for token in body.tokens if token >= size]:
            raise refused(f"token id {wrong[0]} is outside the vocabulary 0..{size - 1}", "tokens")
        decode = self.service.tokenizer.decode
        text = await asyncio.to_thread(decode, body.tokens, skip_special_tokens=bool(body.skip_special_tokens))
        return json_response({"prompt": text})

    async def tokenizer_info(self, request: Request) -> Response:
        """What lm-eval asks vLLM's servers, to do without a tokenizer of its own."""
        names = ("bos_token", "eos_token", "chat_template")
        return json_response({name: getattr(self.service.tokenizer, name) for name in names})

    async def health(self, request: Request) -> Response:
        service = self.service
        try:
            service.check_open()
        except ApiError as error:
            failure = service.failure
            status = (
                {"status": "draining"} if failure is None else {"status": "failed", "reason": type(failure).__name__}
            )
            return json_response({**status, **error.body}, error.status)
        return json_response({"status": "ok"})

    async def metrics(self, request: Request) -> Response:
        return Response(self.service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def openapi(self, request: Request) -> Response:
        return json_response(document())
