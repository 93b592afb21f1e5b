"""/v1/chat/completions: the answer to a chat's messages."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from infer.engine.llm import Handle
from infer.engine.logprobs import TokenLogprobs
from infer.engine.params import SamplingParams
from infer.engine.result import GeneratedToken, GenerationResult
from infer.server.answers import Answer, answered, by_text
from infer.server.bodies import ChatCompletion, ToolChoice
from infer.server.chat_prompts import Chat, ChatPrompt, ChatPrompts
from infer.server.errors import refused
from infer.server.live import number_of
from infer.server.messages import for_template
from infer.server.parser import Content, Delta, Parser, Reasoning, ToolCall
from infer.server.service import Service
from infer.server.text import DONE, as_event
from infer.server.tokens import chat_logprobs, finish_reason, usage_of

Said = Callable[[dict[str, Any]], None]
# Variables that no client may set: the template's own, and arguments of what renders it.
OURS = {"messages", "tools", "add_generation_prompt", "bos_token", "eos_token", "self", "tokenizer", "model_type"}


class ChatCompletions:
    def __init__(self, service: Service) -> None:
        self.service, self._prompts = service, ChatPrompts(service)

    async def __call__(self, request: Request) -> Response:
        body = await self.service.read(request, ChatCompletion)
        return await self.answer(request, body)

    async def answer(
        self, request: Request, body: ChatCompletion, said: Said | None = None, over: Callable[[], None] | None = None
    ) -> Response:
        """said: told of the message that was answered with. over: called at the end, whatever that is."""
        service = self.service
        with ExitStack() as stack:
            if over is not None:
                stack.callback(over)
            service.check_model(body.model)
            service.check_room(body.n or 1)
            prompt = await asyncio.to_thread(self._prompt, body)
            params = self._params(body, prompt)
            answer = partial(_Answer, service, body, prompt, params.n, said)
            return await answered(service, request, body, [prompt.tokens], params, answer, stack)

    def _prompt(self, body: ChatCompletion) -> ChatPrompt:
        variables = body.chat_template_kwargs or {}
        if taken := OURS & variables.keys():
            raise refused(f"{min(taken)} is not the client's to set", "chat_template_kwargs")
        choice = body.tool_choice
        try:
            chat = Chat(
                for_template(body.messages),
                tools=[tool.model_dump(exclude_none=True) for tool in body.tools or []],
                tool_choice=choice.model_dump() if isinstance(choice, ToolChoice) else choice,
                parallel=body.parallel_tool_calls is not False,
                effort=body.reasoning_effort,
                variables=variables,
                constraint=body.constraint | (body.response_format.constraint if body.response_format else {}),
            )
            return self._prompts.prompt(chat)
        except ValueError as error:
            raise refused(str(error), "messages") from None

    def _params(self, body: ChatCompletion, prompt: ChatPrompt) -> SamplingParams:
        if body.top_logprobs and not body.logprobs:
            raise refused("top_logprobs needs logprobs: true", "top_logprobs")
        return body.settings(
            max_new_tokens=self.service.room(prompt.tokens, body.most_tokens, "messages"),
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            **prompt.constraint,
        )


class _Choice:
    """One text of an answer, as it grows."""

    def __init__(self, parser: Parser) -> None:
        self.parser = parser
        self.parts: list[Delta] = []
        self.logprobs: list[TokenLogprobs] = []  # of tokens whose text is yet to come

    def read(self, text: str, last: bool) -> list[Delta]:
        found = self.parser.feed(text)
        if last:
            found = [*found, *self.parser.finish()]
        self.parts += found
        return found

    def message(self) -> dict[str, Any]:
        """All of it."""
        content = "".join(part.text for part in self.parts if isinstance(part, Content))
        reasoning = "".join(part.text for part in self.parts if isinstance(part, Reasoning))
        calls = _calls([part for part in self.parts if isinstance(part, ToolCall)])
        message: dict[str, Any] = {"role": "assistant", "content": content if content or not calls else None}
        if reasoning:
            message["reasoning"] = reasoning
        if calls:
            message["tool_calls"] = calls
        return message

    def ended(self, reason: str | None) -> str | None:
        reason = finish_reason(reason)
        calls = any(isinstance(part, ToolCall) for part in self.parts)
        return "tool_calls" if calls and reason == "stop" else reason


class _Answer(Answer):
    def __init__(
        self, service: Service, body: ChatCompletion, prompt: ChatPrompt, texts: int, said: Said | None
    ) -> None:
        super().__init__(service)
        self.body, self.said = body, said
        self.choices = [_Choice(prompt.parser()) for _ in range(texts)]
        self.head: dict[str, Any] = {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "object": "chat.completion.chunk" if body.stream else "chat.completion",
            "created": int(time.time()),
            "model": body.model,
        }

    def whole(self, handle: Handle) -> dict[str, Any]:
        results = handle.results()
        choices = [self._choice(index, result) for index, result in enumerate(results)]
        return {**self.head, "choices": choices, "usage": self._usage(results)}

    def _choice(self, index: int, result: GenerationResult) -> dict[str, Any]:
        choice = self.choices[index]
        choice.read(result.text, last=True)
        message = {"refusal": None, **choice.message()}
        logprobs = None if result.logprobs is None else self._logprobs(result.logprobs)
        reason = choice.ended(result.finish_reason)
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, found: Sequence[TokenLogprobs]) -> dict[str, Any]:
        return {"content": chat_logprobs(found, self.service.text_of), "refusal": None}

    def _usage(self, results: Sequence[GenerationResult]) -> dict[str, Any]:
        """Once all texts are there."""
        if self.said is not None:
            self.said(self.choices[0].message())
        for result in results:
            self.service.metrics.count(result)
        reasoned = sum(map(self._reasoned, self.choices, results))
        return usage_of(results, reasoning=reasoned)

    def _reasoned(self, choice: _Choice, result: GenerationResult) -> int:
        """Tokens of its reasoning, by encoding that: the same number whether it was streamed or not."""
        text = choice.message().get("reasoning")
        encode = self.service.tokenizer.encode
        return 0 if text is None else min(len(encode(text, add_special_tokens=False)), result.generated_tokens)

    async def events(self, handle: Handle) -> AsyncIterator[bytes]:
        opening = {"role": "assistant", "content": "", "refusal": None}
        yield b"".join(self._chunk(index, opening) for index in range(len(self.choices)))
        async for pieces in handle.arrivals():
            if self.body.numbered:
                self.head["infer"] = {"request": number_of(handle)}
            if data := b"".join(self._grown(index, own) for index, own in by_text(pieces)):
                yield data
        usage = self._usage(handle.results())
        if self.body.usage_at_the_end:
            yield as_event({**self.head, "choices": [], "usage": usage})
        yield DONE

    def _grown(self, index: int, pieces: Sequence[GeneratedToken]) -> bytes:
        """What has come of one text."""
        choice, reason = self.choices[index], pieces[-1].finish_reason
        parts: list[tuple[Delta, list[TokenLogprobs]]] = []
        for piece in pieces:
            if piece.logprobs is not None:
                choice.logprobs.append(piece.logprobs)
            for delta in choice.read(piece.text, last=piece.finish_reason is not None):
                parts.append((delta, choice.logprobs))
                choice.logprobs = []
        chunks = [self._chunk(index, _delta(delta), logprobs) for delta, logprobs in _joined(parts)]
        if reason is not None:
            chunks.append(self._chunk(index, {}, choice.logprobs, choice.ended(reason)))
        return b"".join(chunks)

    def _chunk(
        self, index: int, delta: dict[str, Any], logprobs: Sequence[TokenLogprobs] = (), reason: str | None = None
    ) -> bytes:
        found = self._logprobs(logprobs) if logprobs else None
        choice = {"index": index, "delta": delta, "logprobs": found, "finish_reason": reason}
        usage = {"usage": None} if self.body.usage_at_the_end else {}
        return as_event({**self.head, "choices": [choice], **usage})


def _joined(parts: Sequence[tuple[Delta, list[TokenLogprobs]]]) -> list[tuple[Delta, list[TokenLogprobs]]]:
    """Neighbours of one kind as one."""
    joined: list[tuple[Delta, list[TokenLogprobs]]] = []
    for delta, logprobs in parts:
        before, known = joined[-1] if joined else (None, [])
        if not isinstance(delta, ToolCall) and isinstance(before, type(delta)):
            joined[-1] = type(delta)(before.text + delta.text), known + logprobs
        else:
            joined.append((delta, logprobs))
    return joined


def _delta(delta: Delta) -> dict[str, Any]:
    if isinstance(delta, Reasoning):
        return {"reasoning": delta.text}
    if isinstance(delta, Content):
        return {"content": delta.text}
    call: dict[str, Any] = {"index": delta.index, "function": {"arguments": delta.arguments}}
    if delta.id is not None:
        call |= {"id": delta.id, "type": "function", "function": {"name": delta.name, "arguments": delta.arguments}}
    return {"tool_calls": [call]}


def _calls(pieces: Sequence[ToolCall]) -> list[dict[str, Any]]:
    """Whole calls, of their pieces."""
    calls: list[dict[str, Any]] = []
    for piece in pieces:
        if piece.id is not None:
            calls.append({"id": piece.id, "type": "function", "function": {"name": piece.name, "arguments": ""}})
        calls[piece.index]["function"]["arguments"] += piece.arguments
    return calls
