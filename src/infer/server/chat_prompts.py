"""What a chat asks of the model, whichever endpoint it came by: its prompt, and what its answer has to match."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from infer.engine.params import SamplingParams
from infer.server.errors import refused
from infer.server.formats import format_of, tool_schema
from infer.server.parser import Parser
from infer.server.service import Service


@dataclass(frozen=True)
class Chat:
    """A chat in the terms of templates and of OpenAI's chat completions."""

    messages: list[dict[str, Any]]  # as templates take them
    tools: Sequence[dict[str, Any]] = ()
    tool_choice: str | Mapping[str, Any] | None = None
    parallel: bool = True  # calls
    effort: str | None = None  # of reasoning
    effort_field: str = "reasoning_effort"  # what the client calls it
    variables: Mapping[str, Any] = field(default_factory=dict)  # of the template
    constraint: Mapping[str, Any] = field(default_factory=dict)  # arguments of `SamplingParams`


@dataclass(frozen=True)
class ChatPrompt:
    """What the engine is given for a chat, and how to read what it answers."""

    tokens: list[int]
    constraint: Mapping[str, Any]  # what the answer has to match, as an argument of `SamplingParams`
    parser: Callable[[], Parser]  # makes one, of one text


class ChatPrompts:
    def __init__(self, service: Service) -> None:
        self._tokenizer = service.tokenizer
        self._format = format_of(service.tokenizer.chat_template)

    def prompt(self, chat: Chat) -> ChatPrompt:
        """By the model's own template. Raises ValueError where that refuses the messages."""
        tools = self._tools(chat)
        tokens = list(self._tokenizer.encode_chat(chat.messages, **self._variables(chat, tools)))
        wanted = _of_the_text(chat, bool(tools))
        thinks = self._format.starts_thinking(self._tokenizer.decode(tokens[-8:], skip_special_tokens=False))
        begun = thinks and not wanted  # what has to match a schema has no room for thoughts
        parser = partial(Parser, self._format, tools=bool(tools), thinking=True, starts_thinking=begun)
        return ChatPrompt(tokens, self._constraint(chat, tools, wanted, begun), parser)

    def _tools(self, chat: Chat) -> Sequence[dict[str, Any]]:
        """Those that may be called."""
        if not chat.tools:
            if chat.tool_choice not in (None, "none", "auto"):
                raise refused("tool_choice needs tools", "tool_choice")
            return ()
        if chat.tool_choice == "none":
            return ()
        if self._format.tools is None:
            raise refused("this model's chat template knows no tools", "tools", "unsupported_parameter")
        return chat.tools

    def _variables(self, chat: Chat, tools: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Of the template, besides the messages."""
        variables = dict(chat.variables)
        if chat.effort is not None:
            if self._format.reasoning is not None:
                variables.setdefault("enable_thinking", chat.effort != "none")
            elif chat.effort != "none":
                raise refused("this model does not reason", chat.effort_field, "unsupported_parameter")
        if tools:
            variables["tools"] = list(tools)
        return variables

    def _constraint(
        self, chat: Chat, tools: Sequence[dict[str, Any]], wanted: Mapping[str, Any], begun: bool
    ) -> Mapping[str, Any]:
        """wanted: what the text has to match. begun: the prompt has opened reasoning."""
        schema = wanted.get("json_schema")
        if not tools or (wanted and schema is None):
            return wanted
        try:
            SamplingParams(json_schema=schema)  # which checks it
        except ValueError as error:
            raise refused(str(error)) from None
        try:
            grammar = tool_schema(
                self._format,
                tools,
                chat.tool_choice,
                parallel=chat.parallel,
                thinking=schema is None,
                starts_thinking=begun,
                answer=schema,
            )
        except ValueError as error:
            raise refused(str(error), "tool_choice") from None
        return grammar or wanted


def _of_the_text(chat: Chat, tools: bool) -> Mapping[str, Any]:
    """What the client wants the text to match. A schema is for answers: a call that is forced is none."""
    forced = tools and chat.tool_choice not in (None, "auto")
    wanted = {name: value for name, value in chat.constraint.items() if not (forced and name == "json_schema")}
    given = [*wanted, *(["tool_choice"] if forced else [])]
    if len(given) > 1:
        raise refused(f"a text can have one constraint, not {' and '.join(given)}")
    return wanted
