"""/v1/responses: the answer to a conversation, as items. Nothing is stored."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from infer.engine.llm import Handle
from infer.engine.params import SamplingParams
from infer.engine.result import GeneratedToken, GenerationResult
from infer.server.answers import Answer, answered
from infer.server.bodies import CreateResponse, FunctionChoice
from infer.server.chat_prompts import Chat, ChatPrompt, ChatPrompts
from infer.server.errors import refused
from infer.server.items import items_for_template
from infer.server.output_items import Event, Item, item_for
from infer.server.parser import Content, Delta, Reasoning, ToolCall
from infer.server.service import Service
from infer.server.text import as_event
from infer.server.tokens import chat_logprobs, response_usage


class Responses:
    def __init__(self, service: Service) -> None:
        self.service, self._prompts = service, ChatPrompts(service)

    async def __call__(self, request: Request) -> Response:
        service = self.service
        body = await service.read(request, CreateResponse)
        service.check_model(body.model)
        service.check_room(1)
        prompt = await asyncio.to_thread(self._prompt, body)
        params = self._params(body, prompt)
        return await answered(service, request, body, [prompt.tokens], params, lambda: _Answer(service, body, prompt))

    def _prompt(self, body: CreateResponse) -> ChatPrompt:
        choice = body.tool_choice
        if isinstance(choice, FunctionChoice):
            named: Any = {"type": "function", "function": {"name": choice.name}}
        else:
            named = choice
        tools = [tool.model_dump(exclude_none=True, exclude={"type"}) for tool in body.tools or []]
        try:
            chat = Chat(
                items_for_template(body.input, body.instructions),
                tools=[{"type": "function", "function": tool} for tool in tools],
                tool_choice=named,
                parallel=body.parallel_tool_calls is not False,
                effort=body.reasoning.effort if body.reasoning else None,
                effort_field="reasoning.effort",
                constraint=body.text.format.constraint if body.text and body.text.format else {},
            )
            return self._prompts.prompt(chat)
        except ValueError as error:
            raise refused(str(error), "input") from None

    def _params(self, body: CreateResponse, prompt: ChatPrompt) -> SamplingParams:
        if body.top_logprobs and not body.with_logprobs:
            raise refused('top_logprobs needs include: ["message.output_text.logprobs"]', "top_logprobs")
        return body.sampling(
            max_new_tokens=self.service.room(prompt.tokens, body.max_output_tokens, "input"),
            logprobs=(body.top_logprobs or 0) if body.with_logprobs else None,
            **prompt.constraint,
        )


class _Answer(Answer):
    def __init__(self, service: Service, body: CreateResponse, prompt: ChatPrompt) -> None:
        super().__init__(service)
        self._parser = prompt.parser()
        self._items: list[Item] = []  # of which the last one may grow
        self._waiting: list[GeneratedToken] = []  # tokens whose text is yet to come
        self._reasoning = 0  # tokens
        self._events = 0
        self._head = {"id": f"resp_{secrets.token_hex(24)}", "object": "response", "created_at": int(time.time())}
        self._echo = _echo(body)

    def whole(self, handle: Handle) -> dict[str, Any]:
        for piece in handle:
            self._read(piece)
        return self._ended(handle)

    async def events(self, handle: Handle) -> AsyncIterator[bytes]:
        begun = self._response("in_progress")
        yield self._sent([("response.created", {"response": begun}), ("response.in_progress", {"response": begun})])
        async for pieces in handle.arrivals():
            if data := self._sent(_joined([event for piece in pieces for event in self._read(piece)])):
                yield data
        response = self._ended(handle)
        yield self._sent([(f"response.{response['status']}", {"response": response})])

    def failed(self, error: Exception) -> bytes:
        told = self.service.told(error)
        if self._items:
            self._items[-1].end("incomplete")
        response = self._response("failed", error={"code": "server_error", "message": told.message})
        return self._sent(
            [
                ("error", {"code": told.code, "message": told.message, "param": told.param}),
                ("response.failed", {"response": response}),
            ]
        )

    def _sent(self, events: Sequence[Event]) -> bytes:
        data = []
        for name, fields in events:
            data.append(as_event({"type": name, "sequence_number": self._events, **fields}, name))
            self._events += 1
        return b"".join(data)

    def _read(self, piece: GeneratedToken) -> list[Event]:
        """What happens with another token."""
        if piece.finish_reason != "eos":  # that token is no text
            self._waiting.append(piece)
        deltas = self._parser.feed(piece.text)
        if piece.finish_reason is None:
            return [event for delta in deltas for event in self._grow(delta)]
        deltas = [*deltas, *self._parser.finish()]
        if not self._items and not deltas:  # an answer has a message, be it empty
            deltas = [Content("")]
        events = [event for delta in deltas for event in self._grow(delta)]
        return events + self._items[-1].end("incomplete" if piece.finish_reason == "length" else "completed")

    def _grow(self, delta: Delta) -> list[Event]:
        events: list[Event] = []
        begins = not self._items or not self._items[-1].goes_on_with(delta)
        if begins:
            if self._items:
                events += self._items[-1].end("completed")
            self._items.append(item_for(len(self._items), delta))
            events += self._items[-1].begin()
        item, text = self._items[-1], delta.arguments if isinstance(delta, ToolCall) else delta.text
        tokens, self._waiting = self._waiting, []
        if isinstance(delta, Reasoning):
            self._reasoning += len(tokens)
        if begins and item.index:
            tokens = _last_tokens(tokens, len(text))
        logprobs = [token.logprobs for token in tokens if token.logprobs is not None]
        return events + (item.grow(text, chat_logprobs(logprobs, self.service.text_of)) if text else [])

    def _ended(self, handle: Handle) -> dict[str, Any]:
        [result] = handle.results()
        self.service.metrics.count(result)
        if result.finish_reason == "length":
            return self._response("incomplete", result, incomplete_details={"reason": "max_output_tokens"})
        return self._response("completed", result, completed_at=int(time.time()))

    def _response(self, status: str, result: GenerationResult | None = None, **others: Any) -> dict[str, Any]:
        return {
            **self._head,
            "status": status,
            "error": None,
            "incomplete_details": None,
            **self._echo,
            "output": [item.value() for item in self._items],
            "usage": None if result is None else response_usage(result, self._reasoning),
            **others,
        }


def _joined(events: Sequence[Event]) -> list[Event]:
    """Deltas of one item that follow each other, as one."""
    joined: list[Event] = []
    for name, fields in events:
        last, before = joined[-1] if joined else ("", {})
        if name == last and name.endswith(".delta"):  # of the same item: between two, one begins
            fields = {**fields, "delta": before["delta"] + fields["delta"]}
            if "logprobs" in fields:
                fields["logprobs"] = before["logprobs"] + fields["logprobs"]
            joined[-1] = name, fields
        else:
            joined.append((name, fields))
    return joined


def _last_tokens(tokens: list[GeneratedToken], length: int) -> list[GeneratedToken]:
    """Those that hold the last characters: others in front of an item belong to the marker before it."""
    first = len(tokens)
    while first and (length > 0 or not tokens[first - 1].text):  # without a text: a part of a character
        first -= 1
        length -= len(tokens[first].text)
    return tokens[first:]


def _echo(body: CreateResponse) -> dict[str, Any]:
    """What a response repeats of its request, and what it says of fields that can have one value here."""
    given = body.model_dump(by_alias=True)
    return {
        **{name: given[name] for name in ("model", "instructions", "max_output_tokens")},
        **{name: given[name] for name in ("prompt_cache_key", "safety_identifier", "user")},
        "metadata": given["metadata"] or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": {"format": _format(body), "verbosity": "medium"},
        "tool_choice": given["tool_choice"] or "auto",
        "tools": given["tools"] or [],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "background": False,
        "max_tool_calls": None,
        "previous_response_id": None,
        "service_tier": "default",
        "store": False,
        "truncation": "disabled",
    }


def _format(body: CreateResponse) -> dict[str, Any]:
    if body.text is None or body.text.format is None:
        return {"type": "text"}
    return body.text.format.model_dump(by_alias=True, exclude_none=True)
