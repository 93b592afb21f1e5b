"""What goes over HTTP: JSON, server-sent events, OpenAI's errors, log-probabilities and usage, and disconnects."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive

from infer.cache.pool import PAGE_SIZE
from infer.engine.logprobs import TokenLogprobs
from infer.engine.result import GenerationResult
from infer.engine.text import Detokenizer
from infer.loader.text_tokenizers import bytes_of
from infer.loader.tokenizer import INCOMPLETE

T = TypeVar("T")
# Keys of a request's ASGI scope, for middleware and whoever runs the application.
CLIENT = "infer.client"  # the client's name, if it has an API key
ANSWER = "infer.answer"  # the request's `Answer`, if it generates text
ERROR = "infer.error"  # the `ApiError` that ended the request, if one has
DONE = b"data: [DONE]\n\n"
LINGER_S = 0.5  # for a client that is still sending a body that is too large
MIN_LOGPROB = -9999.0  # what OpenAI writes for a probability of 0: JSON has no infinity
ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}

_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode  # `json.dumps` would make one per token


def as_json(value: Any) -> bytes:
    return _encode(value).encode()


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(as_json(value), status, headers, "application/json")


def as_event(value: Any, name: str | None = None) -> bytes:
    """A server-sent event."""
    data = b"data: " + as_json(value) + b"\n\n"
    return data if name is None else b"event: " + name.encode() + b"\n" + data


class ApiError(Exception):
    """A request that is refused or has failed. Its message names nothing internal."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.headers = status, message, param, code, headers

    @property
    def body(self) -> dict[str, Any]:
        kind = ERROR_TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        return json_response(self.body, self.status, self.headers)


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def client_closed_request() -> Response:
    """The response to a client that has disconnected, by nginx's status code."""
    return Response(status_code=499)


def shut_down() -> ApiError:
    return ApiError(503, "the server shut down before the response was complete", code="draining")


async def receive_body(request: Request, max_bytes: int, seconds: float) -> bytes:
    """The body of a request, refused if it is too large or takes too long."""
    body, deadline = bytearray(), asyncio.get_running_loop().time() + seconds
    length = request.headers.get("content-length", "0")
    too_large = length.isdecimal() and int(length) > max_bytes
    try:
        async with asyncio.timeout_at(deadline) as timeout:
            async for part in request.stream():
                if not too_large:
                    body += part
                if len(body) > max_bytes:
                    too_large = True
                if too_large:  # a client that is still sending would not see the response
                    timeout.reschedule(min(deadline, asyncio.get_running_loop().time() + LINGER_S))
                    body.clear()
    except TimeoutError:
        if not too_large:
            message = f"the body did not arrive within {seconds:g} seconds"
            raise ApiError(408, message, headers={"Connection": "close"}) from None
    if too_large:
        raise ApiError(413, f"the body is larger than {max_bytes:,} bytes", headers={"Connection": "close"})
    return bytes(body)


async def while_connected(work: Coroutine[Any, Any, None], receive: Receive) -> bool:
    """Run the work, or cancel it once the client disconnects. Returns whether it was finished."""
    working, disconnect = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            return False
        working.result()
        return True
    finally:
        working.cancel()
        disconnect.cancel()
        await asyncio.gather(working, disconnect, return_exceptions=True)


async def in_thread(request: Request, function: Callable[..., T], *args: Any, executor: Executor | None = None) -> T:
    """The function's result, computed beside the event loop; not computed if the client disconnects before."""
    future = asyncio.get_running_loop().run_in_executor(executor, function, *args)

    async def wait() -> None:
        await future

    if not await while_connected(wait(), request.receive):
        raise ClientDisconnect
    return future.result()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def token_text(tokenizer: Any, token: int) -> str:
    text: str = tokenizer.decode([token], skip_special_tokens=False)
    return text


def token_bytes(tokenizer: Any, token: int) -> list[int]:
    """A token may be a part of a character, which has bytes but no text."""
    text = token_text(tokenizer, token)
    return list(text.encode() if INCOMPLETE not in text else bytes_of(tokenizer.id_to_token(token) or "", text))


def chat_logprobs(logprobs: Iterable[TokenLogprobs], tokenizer: Any) -> list[dict[str, Any]]:
    """As in the choices of a chat completion."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": token_text(tokenizer, token),
            "logprob": max(logprob, MIN_LOGPROB),
            "bytes": token_bytes(tokenizer, token),
        }

    return [
        {**entry(each.token_id, each.logprob), "top_logprobs": [entry(*other) for other in each.top]}
        for each in logprobs
    ]


def completion_logprobs(
    logprobs: Sequence[TokenLogprobs | None], tokens: Sequence[int], tokenizer: Any, offsets: list[int]
) -> dict[str, Any]:
    """As in the choices of a completion. logprobs: None for a prompt's first token. offsets: of tokens in the text."""
    return {
        "tokens": [token_text(tokenizer, token) for token in tokens],
        "token_logprobs": [None if each is None else max(each.logprob, MIN_LOGPROB) for each in logprobs],
        "top_logprobs": [None if each is None else _top_by_text(each.top, tokenizer) for each in logprobs],
        "text_offset": offsets,
    }


def text_offsets(text: Detokenizer, tokens: Iterable[int], start: int) -> list[int]:
    """Where each of the next tokens begins in a text that begins at `start`."""
    offsets = []
    for token in tokens:
        offsets.append(start + text.offset(token))
        text.push(token)
    return offsets


def _top_by_text(top: Iterable[tuple[int, float]], tokenizer: Any) -> dict[str, float]:
    """Parts of characters have the same text: the most likely one, which comes first, stands for all."""
    by_text: dict[str, float] = {}
    for token, logprob in top:
        by_text.setdefault(token_text(tokenizer, token), max(logprob, MIN_LOGPROB))
    return by_text


def finish_reason(reason: str | None) -> str | None:
    """OpenAI's name of a finish reason."""
    return "stop" if reason in ("eos", "interrupted") else reason


def cached_tokens(result: GenerationResult) -> int:
    """Of full pages: an exact count would tell how far a guess at a cached prompt is right."""
    return result.num_cached_tokens // PAGE_SIZE * PAGE_SIZE


def usage_of(
    results: Sequence[GenerationResult], first_of_prompt: Sequence[int] = (0,), reasoning: int | None = None
) -> dict[str, Any]:
    """The usage of a completion. first_of_prompt: the index of each prompt's first result."""
    prompt = sum(results[i].prompt_tokens for i in first_of_prompt)
    cached = sum(cached_tokens(results[i]) for i in first_of_prompt)
    generated = sum(result.generated_tokens for result in results)
    usage: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    if reasoning is not None:
        usage["completion_tokens_details"] = {"reasoning_tokens": reasoning}
    return usage
