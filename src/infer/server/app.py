"""The routes of the API, and the middleware: API keys, origins, errors."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
from collections.abc import Awaitable, Callable, Sequence
from ipaddress import ip_address

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from infer.server import live
from infer.server.bodies import Detokenize, Tokenize
from infer.server.chat_template import for_template
from infer.server.completions import ChatAnswer, CompletionAnswer, EmbeddingAnswer
from infer.server.openapi import document
from infer.server.responses import ResponseAnswer
from infer.server.service import Answer, Service, Settings
from infer.server.sessions import Sessions
from infer.server.telemetry import Spans
from infer.server.wire import (
    CLIENT,
    ERROR,
    ApiError,
    bad_request,
    client_closed_request,
    in_thread,
    json_response,
    shut_down,
    token_text,
)

MAX_TOKENIZED = 1 << 17  # tokens of a text that is only tokenized: each takes half a kilobyte
NO_KEY_NEEDED = ("/health", "/health/live", "/health/ready")
ASK_FOR_KEY = {"WWW-Authenticate": 'Basic realm="infer", charset="UTF-8"'}  # a browser then asks its user


def guards(settings: Settings) -> list[Middleware]:
    """The middleware that refuses requests by their origin, Host header and key."""
    cors = Middleware(CORSMiddleware, allow_origins=list(settings.cors), allow_methods=["*"], allow_headers=["*"])
    return [
        *([cors] if settings.cors else []),
        Middleware(Origins, allowed=settings.cors, hosts=settings.hosts),
        Middleware(ApiKeys, keys=settings.api_keys),
    ]


def make_app(service: Service) -> Starlette:
    settings = service.settings
    middleware = [Middleware(Draining, service=service), *guards(settings)]
    if service.tracer is not None:
        middleware.append(Middleware(Spans, tracer=service.tracer, model=settings.model_id))

    async def on_error(request: Request, error: Exception) -> Response:
        request.scope[ERROR] = api_error = service.to_api_error(error)
        return api_error.response()

    return Starlette(
        routes=routes(service),
        middleware=middleware,
        exception_handlers={
            ApiError: on_error,
            ClientDisconnect: _on_disconnect,
            HTTPException: _on_unknown_path,
            Exception: on_error,
        },
    )


def routes(service: Service) -> list[BaseRoute]:
    info = InfoRoutes(service)
    return [
        Route("/v1/models", info.models),
        Route("/v1/models/", info.models),  # else a model with an empty name
        Route("/v1/models/{name:path}", info.model),
        Route("/v1/completions", generates(CompletionAnswer, service), methods=["POST"]),
        Route("/v1/chat/completions", generates(ChatAnswer, service), methods=["POST"]),
        Route("/v1/responses", generates(ResponseAnswer, service), methods=["POST"]),
        Route("/v1/embeddings", generates(EmbeddingAnswer, service), methods=["POST"]),
        Route("/tokenize", info.tokenize, methods=["POST"]),
        Route("/detokenize", info.detokenize, methods=["POST"]),
        Route("/tokenizer_info", info.tokenizer_info),
        Route("/health", info.ready),
        Route("/health/live", info.live),
        Route("/health/ready", info.ready),
        Route("/metrics", info.metrics),
        Route("/openapi.json", info.openapi),
        *Sessions(service).routes(),
        *live.routes(lambda: service.live, lambda: service.draining),
    ]


def generates(kind: type[Answer], service: Service) -> Callable[[Request], Awaitable[Response]]:
    """The handler of an endpoint that generates text."""

    async def handle(request: Request) -> Response:
        return await kind(service, await service.read(request, kind.body_type)).respond(request)

    return handle


async def _on_unknown_path(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"this API has no {request.method} {request.url.path:.100}"
    return ApiError(error.status_code, message, headers=error.headers).response()


async def _on_disconnect(request: Request, error: Exception) -> Response:
    return client_closed_request()


class Draining:
    """Middleware: answers requests that uvicorn cancels at the limit of draining, before their response has begun."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def forward(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self.app(scope, receive, forward)
        except asyncio.CancelledError:
            if begun or not self._service.draining:
                raise
            await shut_down().response()(scope, receive, send)


class Origins:
    """Middleware: refuses browsers' requests for pages of other origins, unless allowed. Other clients send no origin.

    It also checks the Host header: a page whose DNS name resolves to this machine has the same origin (DNS rebinding).
    """

    def __init__(self, app: ASGIApp, allowed: Sequence[str], hosts: Sequence[str] | None) -> None:
        """hosts: accepted in the Host header; None: any."""
        self.app, self._allowed = app, allowed
        self._hosts = None if hosts is None else {"", "localhost", *map(_host_name, hosts)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._refusal(Headers(scope=scope)) if scope["type"] == "http" else None
        await (self.app if error is None else error.response())(scope, receive, send)

    def _refusal(self, headers: Headers) -> ApiError | None:
        origin, host = headers.get("origin"), headers.get("host", "")
        if not self._is_allowed(_host_name(host)):
            message = "this Host header is not accepted: start the server with --allowed-host NAME"
            return ApiError(403, message, param="Host", code="foreign_host")
        if origin is None or "*" in self._allowed or origin in self._allowed or origin.partition("://")[2] == host:
            return None
        message = "pages of this origin may not send requests: start the server with --cors ORIGIN"
        return ApiError(403, message, code="foreign_origin")

    def _is_allowed(self, host: str) -> bool:
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


class ApiKeys:
    """Middleware: requires an API key, as a bearer token or a password, for every path but /health."""

    def __init__(self, app: ASGIApp, keys: frozenset[str]) -> None:
        self.app, self._keys = app, [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._keys or scope["path"] in NO_KEY_NEEDED or self._has_key(scope):
            await self.app(scope, receive, send)
            return
        message = "an API key is needed: send it as `Authorization: Bearer KEY`"
        error = ApiError(401, message, code="invalid_api_key", headers=ASK_FOR_KEY)
        await error.response()(scope, receive, send)

    def _has_key(self, scope: Scope) -> bool:
        given, found = _key(dict(scope["headers"]).get(b"authorization", b"")), False
        for key in self._keys:  # all of them, so that the time reveals nothing
            found |= hmac.compare_digest(given, key)
        if found:
            scope[CLIENT] = hashlib.blake2b(given, digest_size=16).hexdigest()
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


class InfoRoutes:
    """The endpoints that generate no text: models, tokens, health, metrics."""

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
            raise bad_request("send either a prompt or messages")
        return await in_thread(request, self._tokenize, body)

    def _tokenize(self, body: Tokenize) -> Response:
        tokenizer, most = self.service.tokenizer, max(self.service.max_model_len, MAX_TOKENIZED)
        try:
            if body.messages is not None:
                tokens = list(tokenizer.encode_chat(for_template(body.messages), max_tokens=most))
            else:
                tokens = list(tokenizer.encode(body.prompt, body.add_special_tokens is not False, most))
        except ValueError as error:
            raise bad_request(str(error)) from None
        answer = {"count": len(tokens), "max_model_len": self.service.max_model_len, "tokens": tokens}
        if body.return_token_strs:
            answer["token_strs"] = [token_text(tokenizer, token) for token in tokens]
        return json_response(answer)

    async def detokenize(self, request: Request) -> Response:
        body = await self.service.read(request, Detokenize)
        self.service.check_model(body.model)
        size = self.service.llm.model.config.vocab_size
        if wrong := [token for token in body.tokens if token >= size]:
            raise bad_request(f"token id {wrong[0]} is outside the vocabulary 0..{size - 1}", "tokens")
        decode = self.service.tokenizer.decode
        text = await asyncio.to_thread(decode, body.tokens, skip_special_tokens=bool(body.skip_special_tokens))
        return json_response({"prompt": text})

    async def tokenizer_info(self, request: Request) -> Response:
        """As vLLM has it, for lm-eval, which then needs no tokenizer of its own."""
        names = ("bos_token", "eos_token", "chat_template")
        return json_response({name: getattr(self.service.tokenizer, name) for name in names})

    async def live(self, request: Request) -> Response:
        """Whether the process can go on: not if its engine has failed for good."""
        service = self.service
        if service.failure is not None and not service.restarts:
            return await self.ready(request)
        return json_response({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """Whether it can answer requests now."""
        service = self.service
        try:
            service.check_open()
        except ApiError as error:
            status = {"status": "draining"}
            if service.failure is not None:
                status = {"status": "failed", "reason": type(service.failure).__name__}
            return json_response({**status, **error.body}, error.status)
        return json_response({"status": "ok"})

    async def metrics(self, request: Request) -> Response:
        return Response(self.service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def openapi(self, request: Request) -> Response:
        return json_response(document())
