"""Items of OpenAI's Responses API: the input as messages of a chat, and the output as it grows."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from infer.server.chat_template import message_for_template, string_of
from infer.server.parser import Content, Delta, Reasoning, ToolCall
from infer.values import short_repr

Event = tuple[str, dict[str, Any]]  # its name and its fields

_TEXT_PARTS = ("input_text", "output_text")
_NAMES: dict[type[Delta], tuple[str, str, str]] = {  # the prefix of ids, the type, the events of the text
    Content: ("msg", "message", "response.output_text"),
    Reasoning: ("rs", "reasoning", "response.reasoning_text"),
    ToolCall: ("fc", "function_call", "response.function_call_arguments"),
}


def items_for_template(
    given: str | Sequence[Mapping[str, Any]], instructions: str | None = None
) -> list[dict[str, Any]]:
    """Messages for the template. The assistant's reasoning, text and calls of one turn become one message."""
    items: Sequence[Mapping[str, Any]] = [{"role": "user", "content": given}] if isinstance(given, str) else given
    messages: list[dict[str, Any]] = [] if instructions is None else [{"role": "system", "content": instructions}]
    names: dict[str, str] = {}  # of the functions called so far, by the id of the call
    reasoning: list[str] = []  # of the assistant's next message; before others it is dropped
    for i, item in enumerate(items):
        try:
            if item.get("type") == "reasoning":
                reasoning += _reasoning(item)
                continue
            message = message_for_template(_message(item), names)
        except ValueError as error:
            raise ValueError(f"input[{i}]: {error}") from None
        if reasoning and message["role"] == "assistant":
            messages.append({**message, "reasoning_content": "\n".join(reasoning)})
        elif "tool_calls" in message and messages and messages[-1]["role"] == "assistant":
            messages[-1]["tool_calls"] = [*messages[-1].get("tool_calls", []), *message["tool_calls"]]
        else:
            messages.append(message)
        reasoning = []
    return messages


def _message(item: Mapping[str, Any]) -> dict[str, Any]:
    """As in a chat completion."""
    kind = item.get("type") or "message"
    if kind == "message":
        if item.get("role") == "tool":
            raise ValueError("the output of a tool must be an item of type function_call_output")
        return {"role": item.get("role"), "content": _content(item.get("content"))}
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": string_of(item.get("call_id"), "the call_id"), "type": "function", "function": function}
        return {"role": "assistant", "tool_calls": [call]}
    if kind == "function_call_output":
        return {
            "role": "tool",
            "tool_call_id": string_of(item.get("call_id"), "the call_id"),
            "content": _content(item.get("output")),
        }
    if kind == "item_reference":
        raise ValueError("nothing is stored here, so items cannot be referenced: send the item itself")
    raise ValueError(f"items of type {short_repr(kind)} are not supported")


def _content(content: Any) -> Any:
    """With text parts as in a chat completion; anything else is unchanged."""
    if not isinstance(content, list):
        return content
    return [
        {"type": "text", "text": part.get("text")}
        if isinstance(part, Mapping) and part.get("type") in _TEXT_PARTS
        else part
        for part in content
    ]


def _reasoning(item: Mapping[str, Any]) -> list[str]:
    """The texts of a reasoning item, without its summaries."""
    if item.get("encrypted_content") is not None:
        raise ValueError("encrypted_content is not supported: send the reasoning as content, or omit it")
    content = item.get("content") or []
    if not isinstance(content, list):
        raise ValueError(f"the content of reasoning must be a list of parts, not {short_repr(content)}")
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) else None
        if not isinstance(text, str):
            raise ValueError(f"a part of reasoning must have a text, unlike {short_repr(part)}")
        texts.append(text)
    return texts


class OutputItem:
    """One item of the output: a message, reasoning or a function call.

    The text of messages and reasoning is their only content part, which has events of its own.
    """

    def __init__(self, index: int, first: Delta) -> None:
        self.index, self.kind, self.status = index, type(first), "in_progress"
        self._call = first if isinstance(first, ToolCall) else None
        prefix, self._type, self._event_name = _NAMES[self.kind]
        self.id = f"{prefix}_{secrets.token_hex(24)}"
        self._pieces: list[str] = []
        self._logprobs: list[dict[str, Any]] = []
        self._place = {"item_id": self.id, "output_index": index}
        if self._call is None:
            self._place["content_index"] = 0

    def continues_with(self, delta: Delta) -> bool:
        """Whether the delta belongs to this item. A call's first delta has an id."""
        return isinstance(delta, self.kind) and not (isinstance(delta, ToolCall) and delta.id is not None)

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def value(self) -> dict[str, Any]:
        head = {"id": self.id, "type": self._type}
        if self._call is not None:
            call = {"call_id": self._call.id, "name": self._call.name}
            return {**head, **call, "status": self.status, "arguments": self.text}
        content = [] if self.status == "in_progress" else [self._part()]  # an event adds the part
        detail: dict[str, Any] = {"role": "assistant"} if self.kind is Content else {"summary": []}
        return {**head, "status": self.status, **detail, "content": content}

    def start_events(self) -> list[Event]:
        return [
            ("response.output_item.added", {"output_index": self.index, "item": self.value()}),
            *self._part_events("added"),
        ]

    def append(self, text: str, logprobs: list[dict[str, Any]]) -> list[Event]:
        self._pieces.append(text)
        self._logprobs += logprobs
        return [(f"{self._event_name}.delta", {**self._place, "delta": text, **self._logprobs_field(logprobs)})]

    def end_events(self, status: str) -> list[Event]:
        """status: completed or incomplete."""
        self.status = status
        text = {"arguments" if self._call is not None else "text": self.text}
        return [
            (f"{self._event_name}.done", {**self._place, **text, **self._logprobs_field([*self._logprobs])}),
            *self._part_events("done"),
            ("response.output_item.done", {"output_index": self.index, "item": self.value()}),
        ]

    def _part_events(self, what: str) -> list[Event]:
        if self._call is not None:
            return []
        return [(f"response.content_part.{what}", {**self._place, "part": self._part()})]

    def _part(self) -> dict[str, Any]:
        if self.kind is Reasoning:
            return {"type": "reasoning_text", "text": self.text}
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": [*self._logprobs]}

    def _logprobs_field(self, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
        return {"logprobs": logprobs} if self.kind is Content else {}
