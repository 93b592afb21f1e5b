"""/v1/responses: the answer to a conversation, as items. Nothing is stored."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

from infer.engine.llm import Handle
from infer.engine.params import SamplingParams
from infer.engine.result import GeneratedToken, GenerationResult
from infer.server.bodies import CreateResponse, FunctionChoice
from infer.server.chat_template import Chat
from infer.server.parser import Content, Delta, Reasoning, ToolCall
from infer.server.response_items import Event, OutputItem, items_for_template
from infer.server.service import Answer, Service
from infer.server.wire import ApiError, as_event, bad_request, cached_tokens, chat_logprobs


class ResponseAnswer(Answer):
    body_type, prompt_field = CreateResponse, "input"
    body: CreateResponse

    def __init__(self, service: Service, body: CreateResponse) -> None:
        super().__init__(service, body)
        self._items: list[OutputItem] = []  # only the last one may grow
        self._pending: list[GeneratedToken] = []  # tokens without a delta so far
        self._reasoning_tokens = 0
        self._num_events = 0
        self._head = {"id": f"resp_{secrets.token_hex(24)}", "object": "response", "created_at": int(time.time())}
        self._echo = {"model": service.settings.model_id, **_echo(body)}

    def encode(self) -> list[list[int]]:
        body = self.body
        choice: Any = body.tool_choice
        if isinstance(choice, FunctionChoice):
            choice = {"type": "function", "function": {"name": choice.name}}
        tools = [tool.model_dump(exclude_none=True, exclude={"type"}) for tool in body.tools or []]
        chat = Chat(
            items_for_template(body.input, body.instructions),
            tools=[{"type": "function", "function": tool} for tool in tools],
            tool_choice=choice,
            parallel_calls=body.parallel_tool_calls is not False,
            effort=body.reasoning.effort if body.reasoning else None,
            effort_param="reasoning.effort",
            constraint=body.text.format.constraint if body.text and body.text.format else {},
        )
        prompt = self.service.chat_template.prompt(chat, self.service.max_model_len)
        self._constraint, self._parser = prompt.constraint, prompt.parser()
        return [prompt.tokens]

    def settings(self, prompts: Sequence[list[int]]) -> SamplingParams:
        body = self.body
        if body.top_logprobs and not body.with_logprobs:
            raise bad_request('top_logprobs needs include: ["message.output_text.logprobs"]', "top_logprobs")
        return body.settings(
            max_new_tokens=self.max_new_tokens(prompts[0], body.max_output_tokens),
            logprobs=(body.top_logprobs or 0) if body.with_logprobs else None,
            **self._constraint,
        )

    def complete(self, handle: Handle) -> dict[str, Any]:
        for piece in handle:
            self._read(piece)
        return self._final(handle)

    async def events(self, handle: Handle) -> AsyncIterator[bytes]:
        start = {"response": self._response("in_progress")}
        yield self._encode([("response.created", start), ("response.in_progress", start)])
        async for pieces in handle.token_batches():
            if data := self._encode(_join_deltas([event for piece in pieces for event in self._read(piece)])):
                yield data
        response = self._final(handle)
        yield self._encode([(f"response.{response['status']}", {"response": response})])

    def error_events(self, error: ApiError) -> bytes:
        if self._items:
            self._items[-1].end_events("incomplete")
        response = self._response("failed", error={"code": "server_error", "message": error.message})
        return self._encode(
            [
                ("error", {"code": error.code, "message": error.message, "param": error.param}),
                ("response.failed", {"response": response}),
            ]
        )

    def _encode(self, events: Sequence[Event]) -> bytes:
        data = []
        for name, fields in events:
            data.append(as_event({"type": name, "sequence_number": self._num_events, **fields}, name))
            self._num_events += 1
        return b"".join(data)

    def _read(self, piece: GeneratedToken) -> list[Event]:
        """The events for another token."""
        if piece.finish_reason != "eos":  # that token has no text
            self._pending.append(piece)
        deltas = self._parser.feed(piece.text)
        if piece.finish_reason is not None:
            deltas = [*deltas, *self._parser.finish()]
            if not self._items and not deltas:  # an empty answer still has a message
                deltas = [Content("")]
        events = [event for delta in deltas for event in self._append(delta)]
        if piece.finish_reason is not None:
            events += self._items[-1].end_events("incomplete" if piece.finish_reason == "length" else "completed")
        return events

    def _append(self, delta: Delta) -> list[Event]:
        events: list[Event] = []
        starts_item = not self._items or not self._items[-1].continues_with(delta)
        if starts_item:
            if self._items:
                events += self._items[-1].end_events("completed")
            self._items.append(OutputItem(len(self._items), delta))
            events += self._items[-1].start_events()
        item, text = self._items[-1], delta.arguments if isinstance(delta, ToolCall) else delta.text
        tokens, self._pending = self._pending, []
        if isinstance(delta, Reasoning):
            self._reasoning_tokens += len(tokens)
        if starts_item and item.index:
            tokens = _last_tokens(tokens, len(text))
        logprobs = [token.logprobs for token in tokens if token.logprobs is not None]
        return events + (item.append(text, chat_logprobs(logprobs, self.service.tokenizer)) if text else [])

    def _final(self, handle: Handle) -> dict[str, Any]:
        """The response after the last token."""
        [result] = self.finish(handle)
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
            "usage": None if result is None else self._usage(result),
            **others,
        }

    def _usage(self, result: GenerationResult) -> dict[str, Any]:
        return {
            "input_tokens": result.prompt_tokens,
            # Writes to the cache cost nothing here, so they are not counted.
            "input_tokens_details": {"cached_tokens": cached_tokens(result), "cache_write_tokens": 0},
            "output_tokens": result.generated_tokens,
            "output_tokens_details": {"reasoning_tokens": self._reasoning_tokens},
            "total_tokens": result.prompt_tokens + result.generated_tokens,
        }


def _join_deltas(events: Sequence[Event]) -> list[Event]:
    """Join consecutive delta events of an item. Between two items there are other events."""
    joined: list[Event] = []
    for name, group in groupby(events, itemgetter(0)):
        fields = [own for _, own in group]
        if name.endswith(".delta"):
            merged = {**fields[0], "delta": "".join(own["delta"] for own in fields)}
            if "logprobs" in merged:
                merged["logprobs"] = [each for own in fields for each in own["logprobs"]]
            fields = [merged]
        joined += [(name, own) for own in fields]
    return joined


def _last_tokens(tokens: list[GeneratedToken], length: int) -> list[GeneratedToken]:
    """The tokens of the last characters. Earlier ones belong to the marker before the item."""
    first = len(tokens)
    while first and (length > 0 or not tokens[first - 1].text):  # a part of a character has no text
        first -= 1
        length -= len(tokens[first].text)
    return tokens[first:]


def _echo(body: CreateResponse) -> dict[str, Any]:
    """The fields of a response that repeat the request, and the fields with a fixed value."""
    given = body.model_dump(by_alias=True)
    return {
        **{name: given[name] for name in ("instructions", "max_output_tokens")},
        **{name: given[name] for name in ("prompt_cache_key", "safety_identifier", "user")},
        "metadata": given["metadata"] or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        "temperature": 1.0 if given["temperature"] is None else given["temperature"],
        "text": {"format": _format(body), "verbosity": "medium"},
        "tool_choice": given["tool_choice"] or "auto",
        "tools": given["tools"] or [],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": 1.0 if given["top_p"] is None else given["top_p"],
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
