"""OpenAI's chat messages as chat templates expect them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from infer.values import shown

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_REFUSED = {
    "image_url": "images",
    "input_audio": "audio",
    "file": "files",
    "refusal": "refusals",
}


def for_template(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages with texts as content and objects as arguments; ValueError for what templates have no place for."""
    names: dict[str, str] = {}  # of the functions called so far, by the id of the call
    result = []
    for i, message in enumerate(messages):
        try:
            result.append(message_for_template(message, names))
        except ValueError as error:
            raise ValueError(f"messages[{i}]: {error}") from None
    return result


def message_for_template(message: Mapping[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """names: of the functions called so far, by the id of the call; it adds those that the message calls."""
    if not isinstance(message, Mapping):
        raise ValueError(f"must be an object, not {shown(message)}")
    fields = {key: value for key, value in message.items() if value is not None}  # templates ask what is defined
    role = _role(fields)
    calls = fields.pop("tool_calls", [])
    reasoning = [text for key in ("reasoning_content", "reasoning") if (text := fields.pop(key, None)) is not None]
    content = fields.pop("content", "" if role == "assistant" else None)
    plain = {**fields, "role": role, "content": _text(content)}
    if role == "assistant":
        if reasoning:
            plain["reasoning_content"] = _string(reasoning[0], "the reasoning")
        if calls:  # templates take an empty list for calls
            plain["tool_calls"] = _tool_calls(calls, names)
    elif role == "tool":
        identity = _string(fields.get("tool_call_id"), "the tool_call_id of a tool's message")
        if identity in names:
            plain.setdefault("name", names[identity])
    return plain


def _role(fields: Mapping[str, Any]) -> str:
    role = fields.get("role")
    if role == "function" or "function_call" in fields:
        raise ValueError("functions were replaced by tools: use tool_calls, and the role tool")
    if not isinstance(role, str) or role not in ROLES:
        raise ValueError(f"the role must be one of {', '.join(ROLES)}, not {shown(role)}")
    if "audio" in fields:
        raise ValueError("audio cannot be read, only text")
    return ROLES[role]


def _text(content: Any) -> str:
    """Of a text, or of parts, each on a line of its own."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(f"the content must be a text or a list of parts, not {shown(content)}")
    return "\n".join(map(_part, content))


def _part(part: Any) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(part, Mapping) or not isinstance(kind, str):
        raise ValueError(f'a part of the content must be {{"type": "text", "text": ...}}, not {shown(part)}')
    if kind != "text":
        raise ValueError(f"{_REFUSED.get(kind, f'parts of type {shown(kind)}')} cannot be read, only text")
    return _string(part.get("text"), "the text of a part")


def _tool_calls(calls: Any, names: dict[str, str]) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise ValueError(f"tool_calls must be a list, not {shown(calls)}")
    return [_tool_call(call, f"tool_calls[{i}]", names) for i, call in enumerate(calls)]


def _tool_call(call: Any, where: str, names: dict[str, str]) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise ValueError(f'{where}: must have a "function", with a name and arguments')
    name = _string(function.get("name"), f"{where}: the name")
    if isinstance(identity := call.get("id"), str):
        names[identity] = name
    return {**call, "function": {**function, "name": name, "arguments": _arguments(function.get("arguments"), where)}}


def _arguments(arguments: Any, where: str) -> dict[str, Any]:
    """As an object: templates of Qwen, Llama and Hermes write it themselves, and would write a text as a string."""
    if arguments is None or arguments == "":  # how some clients write that there are none
        return {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            raise ValueError(f"{where}: the arguments are not JSON: {shown(arguments)}") from None
    if not isinstance(arguments, dict):
        raise ValueError(f"{where}: the arguments must be a JSON object, not {shown(arguments)}")
    return arguments


def _string(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{what} must be a text, not {shown(value)}")
    return value
