"""The input of OpenAI's Responses API as chat templates expect it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from infer.server.messages import message_for_template
from infer.values import shown

_TEXTS = ("input_text", "output_text")  # parts of a content


def items_for_template(
    given: str | Sequence[Mapping[str, Any]], instructions: str | None = None
) -> list[dict[str, Any]]:
    """Messages of items. What an assistant thought, said and called in one turn is one message."""
    items: Sequence[Mapping[str, Any]] = [{"role": "user", "content": given}] if isinstance(given, str) else given
    messages: list[dict[str, Any]] = [] if instructions is None else [{"role": "system", "content": instructions}]
    names: dict[str, str] = {}  # of the functions called so far, by the id of the call
    thoughts: list[str] = []  # of the assistant's next message; templates have no place for others
    for i, item in enumerate(items):
        try:
            if item.get("type") == "reasoning":
                thoughts += _thoughts(item)
                continue
            message = message_for_template(_message(item), names)
        except ValueError as error:
            raise ValueError(f"input[{i}]: {error}") from None
        if thoughts and message["role"] == "assistant":
            messages.append({**message, "reasoning_content": "\n".join(thoughts)})
        elif "tool_calls" in message and messages and messages[-1]["role"] == "assistant":
            messages[-1]["tool_calls"] = [*messages[-1].get("tool_calls", []), *message["tool_calls"]]
        else:
            messages.append(message)
        thoughts = []
    return messages


def _message(item: Mapping[str, Any]) -> dict[str, Any]:
    """As in a chat completion."""
    kind = item.get("type") or "message"
    if kind == "message":
        if item.get("role") == "tool":
            raise ValueError("what a tool gave is an item of type function_call_output")
        return {"role": item.get("role"), "content": _content(item.get("content"))}
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": _call_id(item), "type": "function", "function": function}
        return {"role": "assistant", "tool_calls": [call]}
    if kind == "function_call_output":
        return {"role": "tool", "tool_call_id": _call_id(item), "content": _content(item.get("output"))}
    if kind == "item_reference":
        raise ValueError("nothing is stored here that could be referred to: send the item itself")
    raise ValueError(f"items of type {shown(kind)} cannot be read")


def _content(content: Any) -> Any:
    """With texts as in a chat completion; anything else is left as it is."""
    if not isinstance(content, list):
        return content
    return [
        {"type": "text", "text": part.get("text")} if isinstance(part, Mapping) and part.get("type") in _TEXTS else part
        for part in content
    ]


def _call_id(item: Mapping[str, Any]) -> str:
    identity = item.get("call_id")
    if not isinstance(identity, str):
        raise ValueError(f"the call_id must be a text, not {shown(identity)}")
    return identity


def _thoughts(item: Mapping[str, Any]) -> list[str]:
    """The reasoning itself, without summaries of it."""
    if item.get("encrypted_content") is not None:
        raise ValueError("encrypted_content cannot be read: send the reasoning as content, or leave it out")
    content = item.get("content") or []
    if not isinstance(content, list):
        raise ValueError(f"the content of reasoning must be a list of parts, not {shown(content)}")
    texts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
    if wrong := [part for part, text in zip(content, texts, strict=True) if not isinstance(text, str)]:
        raise ValueError(f"the parts of reasoning must have a text, as {shown(wrong[0])} has not")
    return [text for text in texts if isinstance(text, str)]
