"""From a chat to a prompt, by the model's own template; and the grammars that constrain the answer to tool calls."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from infer.engine.guide import bounded
from infer.engine.params import SamplingParams
from infer.server.parser import HERMES, LLAMA, THINK, Format, Parser, ToolMarkers
from infer.server.wire import bad_request
from infer.values import short_repr

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_UNSUPPORTED_PARTS = {
    "image_url": "images",
    "input_audio": "audio",
    "file": "files",
    "refusal": "refusals",
}

# How templates tell the model to write a call, with quotes as Jinja strings may escape them. Templates with XML within
# <tool_call>, or with the key "parameters" within other markers, are of formats that are not supported.
_HERMES_CALL = re.compile(r'\\?"arguments\\?":')
_LLAMA_CALL = re.compile(r'\{\\?"name\\?": function name, \\?"parameters\\?":')

# JSON as the templates write it. llguidance's default allows any white space, of which weak models write no end.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


# Messages.


def for_template(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """OpenAI's messages with strings as content and objects as arguments. Raises ValueError for anything but text."""
    names: dict[str, str] = {}
    result = []
    for i, message in enumerate(messages):
        try:
            result.append(message_for_template(message, names))
        except ValueError as error:
            raise ValueError(f"messages[{i}]: {error}") from None
    return result


def message_for_template(message: Mapping[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """names: of the functions called so far, by the id of the call; this message's calls are added."""
    fields = {key: value for key, value in message.items() if value is not None}  # templates test what is defined
    role = _role(fields)
    calls = fields.pop("tool_calls", [])
    reasoning = [text for key in ("reasoning_content", "reasoning") if (text := fields.pop(key, None)) is not None]
    content = fields.pop("content", "" if role == "assistant" else None)
    plain = {**fields, "role": role, "content": _content(content)}
    if role == "assistant":
        if reasoning:
            plain["reasoning_content"] = string_of(reasoning[0], "the reasoning")
        if calls:  # templates would write an empty list as calls
            plain["tool_calls"] = _tool_calls(calls, names)
    elif role == "tool":
        call_id = string_of(fields.get("tool_call_id"), "the tool_call_id of a tool's message")
        if call_id in names:
            plain.setdefault("name", names[call_id])
    return plain


def _role(fields: Mapping[str, Any]) -> str:
    role = fields.get("role")
    if role == "function" or "function_call" in fields:
        raise ValueError("functions were replaced by tools: use tool_calls, and the role tool")
    if not isinstance(role, str) or role not in ROLES:
        raise ValueError(f"the role must be one of {', '.join(ROLES)}, not {short_repr(role)}")
    if "audio" in fields:
        raise ValueError("audio is not supported, only text")
    return ROLES[role]


def _content(content: Any) -> str:
    """A string, or parts, which are joined by newlines."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(f"the content must be a string or a list of parts, not {short_repr(content)}")
    return "\n".join(map(_part, content))


def _part(part: Any) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(part, Mapping) or not isinstance(kind, str):
        raise ValueError(f'a part of the content must be {{"type": "text", "text": ...}}, not {short_repr(part)}')
    if kind != "text":
        what = _UNSUPPORTED_PARTS.get(kind, f"parts of type {short_repr(kind)}")
        raise ValueError(f"{what} {'is' if what == 'audio' else 'are'} not supported, only text")
    return string_of(part.get("text"), "the text of a part")


def _tool_calls(calls: Any, names: dict[str, str]) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise ValueError(f"tool_calls must be a list, not {short_repr(calls)}")
    return [_tool_call(call, f"tool_calls[{i}]", names) for i, call in enumerate(calls)]


def _tool_call(call: Any, where: str, names: dict[str, str]) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise ValueError(f'{where}: must have a "function", with a name and arguments')
    name = string_of(function.get("name"), f"{where}: the name")
    if isinstance(call_id := call.get("id"), str):
        names[call_id] = name
    return {**call, "function": {**function, "name": name, "arguments": _arguments(function.get("arguments"), where)}}


def _arguments(arguments: Any, where: str) -> dict[str, Any]:
    """An object: templates of Qwen, Llama and Hermes serialize it themselves, and would quote a string."""
    if arguments is None or arguments == "":  # as some clients write a call without arguments
        return {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            raise ValueError(f"{where}: the arguments are not JSON: {short_repr(arguments)}") from None
    if not isinstance(arguments, dict):
        raise ValueError(f"{where}: the arguments must be a JSON object, not {short_repr(arguments)}")
    return arguments


def string_of(value: Any, what: str) -> str:
    """The value, refused if it is not a string. what: its name in the error."""
    if not isinstance(value, str):
        raise ValueError(f"{what} must be a string, not {short_repr(value)}")
    return value


# Prompts.


@dataclass(frozen=True)
class Chat:
    """A chat from any endpoint, in the terms of OpenAI's chat completions."""

    messages: list[dict[str, Any]]  # from `for_template`
    tools: Sequence[dict[str, Any]] = ()
    tool_choice: str | Mapping[str, Any] | None = None
    parallel_calls: bool = True
    effort: str | None = None  # of reasoning
    effort_param: str = "reasoning_effort"  # the endpoint's name for it, in errors
    variables: Mapping[str, Any] = field(default_factory=dict)  # of the template
    constraint: Mapping[str, Any] = field(default_factory=dict)  # arguments of `SamplingParams`


@dataclass(frozen=True)
class ChatPrompt:
    tokens: list[int]
    constraint: Mapping[str, Any]  # on the answer, as arguments of `SamplingParams`
    parser: Callable[[], Parser]  # makes one for each answer


class ChatTemplate:
    """The chat template of a model, and the format of reasoning and tool calls that it implies."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._format = format_of(tokenizer.chat_template)

    def prompt(self, chat: Chat, max_tokens: int | None = None) -> ChatPrompt:
        """Raises ValueError if the template refuses the messages, or if there are far more than `max_tokens`."""
        tools = self._tools(chat)
        variables = self._variables(chat, tools)
        tokens = list(self._tokenizer.encode_chat(chat.messages, max_tokens=max_tokens, **variables))
        constraint = _text_constraint(chat, bool(tools))
        # A constrained text leaves no place for reasoning.
        starts_thinking = not constraint and self._format.starts_thinking(
            self._tokenizer.decode(tokens[-8:], skip_special_tokens=False)
        )
        parser = partial(Parser, self._format, tools=bool(tools), thinking=True, starts_thinking=starts_thinking)
        return ChatPrompt(tokens, self._constraint(chat, tools, constraint, starts_thinking), parser)

    def _tools(self, chat: Chat) -> Sequence[dict[str, Any]]:
        """The tools that the model may call."""
        if not chat.tools:
            if chat.tool_choice not in (None, "none", "auto"):
                raise bad_request("tool_choice needs tools", "tool_choice")
            return ()
        if chat.tool_choice == "none":
            return ()
        if self._format.tools is None:
            raise bad_request("this model's chat template does not support tools", "tools", "unsupported_parameter")
        return chat.tools

    def _variables(self, chat: Chat, tools: Sequence[dict[str, Any]]) -> dict[str, Any]:
        variables = dict(chat.variables)
        if chat.effort is not None:
            if self._format.reasoning is not None:
                variables.setdefault("enable_thinking", chat.effort != "none")
            elif chat.effort != "none":
                raise bad_request("this model does not reason", chat.effort_param, "unsupported_parameter")
        if tools:
            variables["tools"] = list(tools)
        return variables

    def _constraint(
        self, chat: Chat, tools: Sequence[dict[str, Any]], constraint: Mapping[str, Any], starts_thinking: bool
    ) -> Mapping[str, Any]:
        """The constraint on the text, combined with the grammar of tool calls."""
        schema = constraint.get("json_schema")
        if not tools or (constraint and schema is None):
            return constraint
        try:
            SamplingParams(json_schema=schema)  # validates the schema
        except ValueError as error:
            raise bad_request(str(error)) from None
        try:
            grammar = tool_grammar(
                self._format,
                tools,
                chat.tool_choice,
                parallel=chat.parallel_calls,
                thinking=schema is None,
                starts_thinking=starts_thinking,
                answer=schema,
            )
        except ValueError as error:
            raise bad_request(str(error), "tool_choice") from None
        return grammar or constraint


def _text_constraint(chat: Chat, tools: bool) -> Mapping[str, Any]:
    """The client's constraint on the text. A schema is for answers, so it does not apply to a forced call."""
    forced = tools and chat.tool_choice not in (None, "auto")
    constraint = {name: value for name, value in chat.constraint.items() if not (forced and name == "json_schema")}
    given = [*constraint, *(["tool_choice"] if forced else [])]
    if len(given) > 1:
        raise bad_request(f"a text can have one constraint, not {' and '.join(given)}")
    return constraint


# Formats and grammars.


def format_of(template: str | None) -> Format:
    """The format of reasoning and tool calls that a chat template implies."""
    template = template or ""
    return Format(_tool_markers(template), THINK if THINK[1] in template else None)


def _tool_markers(template: str) -> ToolMarkers | None:
    if not re.search(r"\btools\b", template):
        return None
    if HERMES.opening in template and _HERMES_CALL.search(template):
        return HERMES
    return LLAMA if _LLAMA_CALL.search(template) else None


def function_schemas(tools: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The JSON schema of each function's arguments, by its name, from OpenAI's `tools`."""
    schemas: dict[str, dict[str, Any]] = {}
    for i, tool in enumerate(tools):
        name, schema = tool["function"]["name"], tool["function"].get("parameters") or {}
        if name in schemas:
            raise ValueError(f"tools[{i}]: {name} is defined twice")
        if schema.get("type", "object") != "object":
            raise ValueError(f"tools[{i}]: the parameters of {name} must be a JSON schema of an object")
        schemas[name] = {"type": "object", **schema}
    return schemas


def tool_grammar(
    format: Format,
    tools: Sequence[Mapping[str, Any]],
    choice: str | Mapping[str, Any] | None,
    *,
    parallel: bool = True,
    thinking: bool = False,
    starts_thinking: bool = False,
    answer: Mapping[str, Any] | None = None,
) -> dict[str, str] | None:
    """A grammar of tool calls, as an argument of `SamplingParams`; None if the answer is not constrained.

    choice: OpenAI's tool_choice. parallel: allow several calls, if the format has them; a named function is called
    once. thinking, starts_thinking: as for `Parser`; reasoning comes before the calls. answer: the JSON schema of an
    answer without calls, if the choice allows one.
    """
    optional = choice in (None, "auto")
    if choice == "none" or (optional and answer is None):
        return None
    assert format.tools is not None
    if optional and not format.tools.closing:
        raise ValueError(
            "this model writes calls as plain JSON, like the answer: send the tools or the schema, not both"
        )
    schemas = function_schemas(tools)
    if isinstance(choice, Mapping):
        name = choice["function"]["name"]
        if name not in schemas:
            raise ValueError(f"tool_choice: there is no tool {short_repr(name)}, only {', '.join(schemas)}")
        schemas = {name: schemas[name]}
    several = parallel and (optional or choice == "required") and format.tools.closing
    thought = _thought_rules(format.reasoning, starts_thinking) if format.reasoning and thinking else []
    start = f"start: {'thought ' if thought else ''}" + ("(calls | answer)" if optional else "calls")
    calls = "calls: call" + (r' ("\n" call)*' if several else "")
    no_call = [f"answer: %json {bounded(answer)}"] if optional and answer is not None else []
    return {"grammar": "\n".join([start, calls, *_call_rules(format.tools, schemas), *no_call, *thought])}


def _call_rules(markers: ToolMarkers, schemas: Mapping[str, Any]) -> list[str]:
    """Rules for a call of one of these functions. Each has its own, since references start at a schema's root."""
    functions = " | ".join(f"function_{i}" for i in range(len(schemas)))
    if markers.closing:
        functions = rf'"{markers.opening}\n" ({functions}) "\n{markers.closing}"'
    rules = [f"call: {functions}"]
    for i, (name, schema) in enumerate(schemas.items()):
        head = json.dumps(f'{{"name": "{name}", "{markers.arguments}": ')  # Lark quotes strings as JSON does
        rules.append(f'function_{i}: {head} %json {json.dumps({**schema, "x-guidance": _SPACING})} "}}"')
    return rules


def _thought_rules(markers: tuple[str, str], started: bool) -> list[str]:
    """Rules for any text up to the closing marker; optional unless the prompt has opened it."""
    opening, closing = markers
    end = r"until_closed /\n{0,2}/"
    return [
        f"thought: {end}" if started else f'thought: ("{opening}" {end})?',
        f'until_closed[lazy]: /(?s:.*)/ "{closing}"',
    ]
