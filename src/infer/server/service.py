"""The engine behind the API, with its limits and errors; and `Answer`, the way of a request to its response."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
import traceback
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Self

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from infer.cache.pool import OutOfPages, pages_for
from infer.engine.engine import EngineFailed
from infer.engine.guide import vocabulary_of
from infer.engine.llm import LLM, Handle
from infer.engine.params import SamplingParams
from infer.engine.result import GenerationResult
from infer.engine.sequence import EMBED, CacheExceeded, ContextExceeded, NoToken, NoTokenAllowed
from infer.loader.tokenizer import TooManyTokens
from infer.parallel.group import ProcessLost
from infer.server import bodies
from infer.server.chat_template import ChatTemplate
from infer.server.live import Live
from infer.server.telemetry import Metrics
from infer.server.wire import (
    ANSWER,
    CLIENT,
    ERROR,
    ApiError,
    as_event,
    bad_request,
    client_closed_request,
    in_thread,
    json_response,
    receive_body,
    shut_down,
    while_connected,
)

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

SMALL = 1 << 15  # bytes of a body: parsed in a few milliseconds, whatever it holds
FEW_TOKENS = 1 << 14  # of all choices, with their biases: handled in a few milliseconds
STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # proxies must not buffer events

logger = logging.getLogger("infer.server")


@dataclass(frozen=True)
class Settings:
    """Authentication and limits. A request has n choices for each of its prompts; each choice is a sequence."""

    model_id: str
    api_keys: frozenset[str] = frozenset()  # empty: no key is needed
    share_prefixes: bool = False  # between keys
    cors: tuple[str, ...] = ()  # origins whose pages may send requests; "*": all
    hosts: tuple[str, ...] | None = None  # accepted Host headers, beside localhost and addresses; None: any
    max_waiting: int = 512  # sequences, beside the running ones; further ones are refused with 429
    max_connections: int = 2048
    max_body: int = 8 << 20  # bytes
    max_n: int = 128  # choices of one request
    read_seconds: float = 30.0  # to receive a request
    write_seconds: float = 30.0  # for a client to read what was sent
    drain_seconds: float = 30.0  # to finish running sequences at shutdown
    log_prompts: bool = False


class Service:
    def __init__(
        self,
        engine: Callable[[], LLM],
        settings: Settings,
        *,
        restarts: bool = False,
        tracer: Tracer | None = None,
    ) -> None:
        """engine: makes the LLM. restarts: make another one if it fails. tracer: for spans of requests."""
        self._engine, self.restarts, self.settings, self.tracer = engine, restarts, settings, tracer
        self.llm = llm = engine()
        self.metrics, self.tokenizer = Metrics(lambda: self.llm.stats()), llm.tokenizer
        self.chat_template = ChatTemplate(llm.tokenizer)
        self.live = Live(llm)
        self.created = int(time.time())
        self.draining = False
        self._parsing = ThreadPoolExecutor(1, "parsing")  # waits for the process that parses large bodies
        self._compiling = ThreadPoolExecutor(2, "compiling")  # grammars, which may take seconds each
        self.num_sequences = 0  # admitted and not finished
        self.max_model_len = _max_model_len(llm)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.llm.close()
        self._parsing.shutdown()
        self._compiling.shutdown(wait=False, cancel_futures=True)

    def warm_up(self) -> None:
        """Load or compile what the first requests need: kernels, and the vocabulary of grammars.

        Making the vocabulary holds the interpreter for half a second, which would stop all streams later.
        """
        self._compiling.submit(vocabulary_of, self.tokenizer, self.llm.model.config)
        self.llm.generate([0], max_new_tokens=1)

    def restart(self) -> None:
        """Replace an engine that has failed. Raises if the new one fails too."""
        self.llm.close()
        _clear_frames(self.llm.failure)
        self.llm.memory.pool.close()  # memory may not hold two pools
        llm = self._engine()
        llm.generate([0], max_new_tokens=1)  # before requests can reach it
        self.llm, self.live, self.max_model_len = llm, Live(llm), _max_model_len(llm)

    @property
    def failure(self) -> BaseException | None:
        """The error that has ended the engine."""
        return self.llm.failure

    async def read(self, request: Request, kind: type[bodies.B], *, optional: bool = False) -> bodies.B:
        """The validated body of a request. optional: it may be empty."""
        if (coding := request.headers.get("content-encoding", "identity").lower()) != "identity":
            message = f"Content-Encoding {coding:.20} is not supported: send the body uncompressed"
            raise ApiError(415, message, headers={"Accept-Encoding": "identity"})
        data = await receive_body(request, self.settings.max_body, self.settings.read_seconds)
        if len(data) <= SMALL:
            return bodies.parse_body(kind, b"{}" if optional and not data else data)
        value = await in_thread(request, bodies.parse_in_process, data, executor=self._parsing)
        return bodies.validate(kind, value)

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.settings.model_id:
            message = f"the model {name!r:.100} does not exist: this server has {self.settings.model_id!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def check_open(self) -> None:
        """Refuse while the server shuts down or the engine has failed."""
        if self.failure is not None:
            raise _engine_failed()
        if self.draining:
            raise ApiError(503, "the server is shutting down", code="draining", headers={"Retry-After": "10"})

    @contextmanager
    def admit(self, model: str | None, choices: int) -> Iterator[None]:
        """Count sequences until they finish; refuse them, before their prompts are encoded, if the queue is full."""
        self.check_model(model)
        self.check_open()
        if choices > self.settings.max_n:
            raise bad_request(f"{choices} choices are too many: the limit of a request is {self.settings.max_n}", "n")
        if self.num_sequences + choices > self.llm.max_rows + self.settings.max_waiting:
            self.metrics.refused.inc()
            raise ApiError(429, "the queue is full: try again", code="queue_full", headers={"Retry-After": "1"})
        self.num_sequences += choices
        try:
            yield
        finally:
            self.num_sequences -= choices

    def cache_salt(self, request: Request, body: bodies.Request | bodies.Embedding) -> str:
        """Requests share cached prefixes if they have the same API key, or none, and the same `cache_salt`."""
        client = "" if self.settings.share_prefixes else request.scope.get(CLIENT, "")
        return f"{client} {body.cache_salt or ''}" if client or body.cache_salt else ""

    async def submit(
        self,
        request: Request,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        submit: Callable[[], Handle],
    ) -> Handle:
        if self.settings.log_prompts:
            for prompt in prompts:
                text = self.tokenizer.decode(prompt, skip_special_tokens=False)
                print(f"prompt: {text!r}", file=sys.stderr, flush=True)
        try:
            if params.constraint is None and not are_many(prompts, params):
                return submit()
            # It takes seconds to compile a grammar. If its client disconnects, the handle is deleted, and so aborted.
            return await in_thread(request, submit, executor=None if params.constraint is None else self._compiling)
        except (ContextExceeded, CacheExceeded, OutOfPages) as error:
            raise bad_request(str(error), code="context_length_exceeded") from None
        except (ValueError, TypeError) as error:
            raise bad_request(str(error)) from None
        except RuntimeError:
            raise _engine_failed() from None

    def to_api_error(self, error: Exception) -> ApiError:
        """The error that a client gets for an exception."""
        if isinstance(error, ApiError):
            return error
        if isinstance(error, NoTokenAllowed):  # the client's constraint cannot be met, or is too complex
            return bad_request(str(error), code="constraint_failed")
        if isinstance(error, NoToken):
            return ApiError(500, "the model's logits are not numbers", code="no_token")
        if isinstance(error, OutOfPages):
            return ApiError(503, "no memory is left for this sequence", code="no_memory")
        if isinstance(error, EngineFailed) or self.failure is not None:  # the failed engine may be replaced by now
            return _engine_failed()
        log_error(error)
        return ApiError(500, "an unexpected error occurred", code="internal_error")

    def card(self) -> dict[str, Any]:
        """The model, as /v1/models lists it."""
        return {
            "id": self.settings.model_id,
            "object": "model",
            "created": self.created,
            "owned_by": "infer",
            "max_model_len": self.max_model_len,
            "chat": self.tokenizer.chat_template is not None,
        }


class Answer(ABC):
    """One request that generates text, and its response in the format of its endpoint.

    A request goes through run.py (HTTP), app.py (middleware, routes), `Service.read` and bodies.py (its fields), and
    then `respond`: chat_template.py makes the prompt of a chat, `submit` gives it to the engine, and the endpoint's
    subclass (completions.py, responses.py) writes what parser.py finds in the text, with the parts of wire.py.
    """

    body_type: ClassVar[type[bodies.Request | bodies.Embedding]]
    prompt_field: ClassVar[str]  # of the body, in errors
    num_choices = 1
    params: SamplingParams | None = None
    handle: Handle | None = None

    def __init__(self, service: Service, body: Any) -> None:
        """body: of the `body_type`."""
        self.service, self.body = service, body
        self.results: list[GenerationResult] = []  # once it is finished

    @abstractmethod
    def encode(self) -> list[list[int]]:
        """The prompts' tokens. Called in a thread; a ValueError is the client's error."""

    @abstractmethod
    def settings(self, prompts: Sequence[list[int]]) -> SamplingParams:
        """Checked against the prompts and the other fields of the body."""

    def submit(self, prompts: Sequence[list[int]], params: SamplingParams, **options: Any) -> Handle:
        """Give the prompts to the engine."""
        return self.service.llm.submit_all(prompts, params, **options)

    @abstractmethod
    def complete(self, handle: Handle) -> dict[str, Any]:
        """The body of the response to a finished request. Raises the request's error."""

    @abstractmethod
    def events(self, handle: Handle) -> AsyncIterator[bytes]:
        """Server-sent events while text is generated."""

    def error_events(self, error: ApiError) -> bytes:
        """The last events of a stream that an error ends."""
        return as_event(error.body)

    async def respond(self, request: Request, held: ExitStack | None = None) -> Response:
        """The response. held: closed with it, or after the last event of a stream."""
        service, body = self.service, self.body
        request.scope[ANSWER] = self
        with held or ExitStack() as stack:
            stack.enter_context(service.admit(body.model, self.num_choices))
            prompts = await in_thread(request, self._encode_prompts)
            self.params = params = self.settings(prompts)
            salt = service.cache_salt(request, body)
            submit = partial(self.submit, prompts, params, priority=body.priority or 0, cache_salt=salt)
            self.handle = handle = await service.submit(request, prompts, params, submit)
            if body.stream:
                return EventStream(self, handle, stack.pop_all())
            try:
                if not await while_connected(handle.finished(), request.receive):
                    return client_closed_request()
                if params.logprobs is None and params is not EMBED and not are_many(prompts, params):
                    return json_response(self.complete(handle))
                # Up to 21 log-probabilities and texts per token would block the event loop, and so would embeddings.
                return await asyncio.to_thread(lambda: json_response(self.complete(handle)))
            finally:
                handle.abort()

    def _encode_prompts(self) -> list[list[int]]:
        try:
            return self.encode()
        except TooManyTokens as error:
            message = f"{error}: the limit is {self.service.max_model_len}"
            raise bad_request(message, self.prompt_field, "context_length_exceeded") from None
        except ValueError as error:
            raise bad_request(str(error), self.prompt_field) from None

    def max_new_tokens(self, prompt: Sequence[int], requested: int | None) -> int:
        """The requested number of new tokens, refused if they do not fit after the prompt; None: as many as fit."""
        limit = self.service.max_model_len
        left = limit - len(prompt)
        if left < 1 or (requested is not None and requested > left):
            new = "" if requested is None else f", and max_tokens is {requested}"
            message = f"the prompt has {len(prompt)} tokens{new}: the limit is {limit} tokens, answer included"
            raise bad_request(message, self.prompt_field, "context_length_exceeded")
        return left if requested is None else requested

    def finish(self, handle: Handle) -> list[GenerationResult]:
        """The results, counted. Raises the request's error."""
        self.results = handle.results()
        for result in self.results:
            self.service.metrics.count(result)
        return self.results


class EventStream(Response):
    """Server-sent events. Aborts the request once the client disconnects."""

    def __init__(self, answer: Answer, handle: Handle, held: ExitStack) -> None:
        """held: closed after the last event."""
        self.status_code, self.background, self.media_type = 200, None, "text/event-stream"
        self.init_headers(STREAM_HEADERS)
        self._answer, self._handle, self._held = answer, handle, held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._held:
            try:
                await while_connected(self._write(scope, send), receive)
            except asyncio.CancelledError:
                if not self._answer.service.draining:
                    raise
                await self._end(scope, send, shut_down())  # by uvicorn, at the limit of draining
            finally:
                self._handle.abort()

    async def _write(self, scope: Scope, send: Send) -> None:
        """`send` returns after the connection is closed, so a client that does not read ends the stream."""
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async for data in self._answer.events(self._handle):
                await send({"type": "http.response.body", "body": data, "more_body": True})
        except Exception as error:  # the status is sent already: only an event can report it
            await self._end(scope, send, self._answer.service.to_api_error(error))
        else:
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _end(self, scope: Scope, send: Send, error: ApiError) -> None:
        scope[ERROR] = error
        await send({"type": "http.response.body", "body": self._answer.error_events(error), "more_body": False})


def log_error(error: BaseException) -> None:
    """Log an unexpected error; its paths and texts only with INFER_TRACEBACK=1."""
    if os.environ.get("INFER_TRACEBACK") == "1":
        logger.error("unexpected error", exc_info=error)
        return
    if isinstance(error, ProcessLost):  # its message holds nothing private
        logger.error("%s", error)
        return
    frames = traceback.extract_tb(error.__traceback__)
    where = f" in {frames[-1].name}, line {frames[-1].lineno}" if frames else ""
    logger.error("%s%s (INFER_TRACEBACK=1 shows more)", type(error).__name__, where)


def _engine_failed() -> ApiError:
    return ApiError(503, "the engine has failed", code="engine_failed")


def are_many(prompts: Sequence[Sequence[int]], params: SamplingParams) -> bool:
    """Whether the tokens of all choices are too many for the event loop."""
    more = params.max_new_tokens + len(params.logit_bias)
    return params.n * sum(len(prompt) + more for prompt in prompts) > FEW_TOKENS


def _clear_frames(error: BaseException | None) -> None:
    """Free the tensors, and so the memory, that an error's traceback refers to."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _max_model_len(llm: LLM) -> int:
    """The longest sequence: the model's context, or as much of it as the KV cache's memory holds."""
    config, pool = llm.model.config, llm.memory.pool

    def pages(length: int) -> int:
        needed: int = pages_for(config, length, pool.page_size, min(llm.prefill_chunk, length))
        return needed + len(llm.memory.index.windows)

    return max(1, bisect_right(range(1, config.max_position_embeddings + 1), pool.num_pages, key=pages))
