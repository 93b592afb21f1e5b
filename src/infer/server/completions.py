"""/v1/completions: the text that follows a prompt."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from infer.engine.llm import Handle
from infer.engine.logprobs import TokenLogprobs
from infer.engine.params import SamplingParams
from infer.engine.result import GeneratedToken, GenerationResult
from infer.server.answers import Answer, answered, by_text
from infer.server.bodies import Completion
from infer.server.errors import refused
from infer.server.live import number_of
from infer.server.service import Service
from infer.server.text import DONE, as_event
from infer.server.tokens import completion_logprobs, finish_reason, usage_of


class Completions:
    def __init__(self, service: Service) -> None:
        self.service = service

    async def __call__(self, request: Request) -> Response:
        service = self.service
        body = await service.read(request, Completion)
        service.check_model(body.model)
        several = _several(body.prompt)
        service.check_room(len(several) * (body.n or 1))
        prompts = await asyncio.to_thread(self._encoded, several)
        params = self._params(body, prompts)
        return await answered(service, request, body, prompts, params, lambda: _Answer(service, body, prompts, params))

    def _encoded(self, several: Sequence[Any]) -> list[list[int]]:
        try:
            return [self.service.llm.encode(each) for each in several]
        except ValueError as error:
            raise refused(str(error), "prompt") from None

    def _params(self, body: Completion, prompts: Sequence[Sequence[int]]) -> SamplingParams:
        wanted = 16 if body.max_tokens is None else body.max_tokens
        if wanted == 0 and not (body.echo and body.logprobs is not None):
            raise refused("max_tokens is 0: that needs echo and logprobs", "max_tokens")
        if body.stream and body.echo and body.logprobs is not None:
            raise refused("echo with logprobs is not streamed", "stream", "unsupported_parameter")
        for prompt in prompts:
            self.service.room(prompt, wanted, "prompt")
        return body.settings(
            max_new_tokens=wanted,
            logprobs=body.logprobs,
            prompt_logprobs=body.logprobs if body.echo else None,
        )


def _several(prompt: Any) -> list[Any]:
    """The prompts of a body."""
    return prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]


class _Answer(Answer):
    def __init__(
        self, service: Service, body: Completion, prompts: Sequence[list[int]], params: SamplingParams
    ) -> None:
        super().__init__(service)
        self.text_of, self.body, self.params = service.text_of, body, params
        self.firsts = range(0, len(prompts) * params.n, params.n)
        self.head: dict[str, Any] = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": body.model,
        }
        self.echoed = [
            self.service.tokenizer.decode(prompt, skip_special_tokens=False) if body.echo else "" for prompt in prompts
        ]
        self._offsets = [len(self._echo(index)) for index in range(len(prompts) * params.n)]

    def _echo(self, index: int) -> str:
        return self.echoed[index // self.params.n]

    def whole(self, handle: Handle) -> dict[str, Any]:
        results = handle.results()
        for result in results:
            self.service.metrics.count(result)
        choices = [self._choice(index, result) for index, result in enumerate(results)]
        return {**self.head, "choices": choices, "usage": usage_of(results, self.firsts)}

    def _choice(self, index: int, result: GenerationResult) -> dict[str, Any]:
        logprobs = None
        if self.params.logprobs is not None:
            found: list[TokenLogprobs | None] = [*(result.logprobs or [])]
            tokens = result.token_ids
            offset = self._offsets[index]
            if result.prompt_logprobs is not None:
                found, tokens, offset = [*result.prompt_logprobs, *found], result.prompt_token_ids + tokens, 0
            logprobs = completion_logprobs(found, tokens, self.text_of, offset)
        return {
            "text": self._echo(index) + result.text,
            "index": index,
            "logprobs": logprobs,
            "finish_reason": finish_reason(result.finish_reason),
        }

    async def events(self, handle: Handle) -> AsyncIterator[bytes]:
        texts = len(self._offsets)
        if self.body.echo:
            yield b"".join(self._chunk(index, self._echo(index), None, None) for index in range(texts))
        async for pieces in handle.arrivals():
            if self.body.numbered:
                self.head["infer"] = {"request": number_of(handle)}
            if data := b"".join(self._grown(index, own) for index, own in by_text(pieces)):
                yield data
        results = handle.results()
        for result in results:
            self.service.metrics.count(result)
        if self.body.usage_at_the_end:
            yield as_event({**self.head, "choices": [], "usage": usage_of(results, self.firsts)})
        yield DONE

    def _grown(self, index: int, pieces: Sequence[GeneratedToken]) -> bytes:
        """What has come of one text."""
        text, reason = "".join(piece.text for piece in pieces), pieces[-1].finish_reason
        logprobs = None
        if self.params.logprobs is not None:
            found, tokens = [piece.logprobs for piece in pieces], [piece.token_id for piece in pieces]
            logprobs = completion_logprobs(found, tokens, self.text_of, self._offsets[index])
            self._offsets[index] += sum(map(len, logprobs["tokens"]))
        if not text and logprobs is None and reason is None:
            return b""
        return self._chunk(index, text, logprobs, finish_reason(reason))

    def _chunk(self, index: int, text: str, logprobs: dict[str, Any] | None, reason: str | None) -> bytes:
        choice = {"text": text, "index": index, "logprobs": logprobs, "finish_reason": reason}
        usage = {"usage": None} if self.body.usage_at_the_end else {}
        return as_event({**self.head, "choices": [choice], **usage})
