"""How a model's chat template writes reasoning and tool calls, and grammars that make a model call tools."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from infer.engine.guide import bounded
from infer.values import shown


@dataclass(frozen=True)
class ToolMarkers:
    """What stands around tool calls, each a JSON object with a "name" and its arguments."""

    opening: str
    closing: str  # "" where the whole answer is the calls, and the opening marker may be missing
    arguments: str  # the key of the arguments


@dataclass(frozen=True)
class Format:
    """How a model writes what is not content; None where its template knows nothing of it."""

    tools: ToolMarkers | None
    reasoning: tuple[str, str] | None  # the markers around it

    def starts_thinking(self, prompt: str) -> bool:
        """Whether the prompt ends with the marker that opens reasoning, so that the answer begins within it."""
        return self.reasoning is not None and prompt.rstrip().endswith(self.reasoning[0])


HERMES = ToolMarkers("<tool_call>", "</tool_call>", "arguments")  # Qwen, SmolLM, Hermes and what follows them
LLAMA = ToolMarkers("<|python_tag|>", "", "parameters")  # Llama 3.1 and later
THINK = ("<think>", "</think>")

# How templates tell the model to write a call, with quotes as Jinja strings may escape them. Others use <tool_call>
# around XML, or the key "parameters" within other markers: those are formats that are not known here.
_HERMES_CALL = re.compile(r'\\?"arguments\\?":')
_LLAMA_CALL = re.compile(r'\{\\?"name\\?": function name, \\?"parameters\\?":')
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")  # as OpenAI has them

# JSON as the templates write it. llguidance would also allow any white space, of which weak models then write no end.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def format_of(template: str | None) -> Format:
    """The format that a chat template speaks of."""
    template = template or ""
    return Format(_tool_markers(template), THINK if THINK[1] in template else None)


def _tool_markers(template: str) -> ToolMarkers | None:
    if not re.search(r"\btools\b", template):
        return None
    if HERMES.opening in template and _HERMES_CALL.search(template):
        return HERMES
    return LLAMA if _LLAMA_CALL.search(template) else None


def function_schemas(tools: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """OpenAI's `tools`, checked: the JSON schema of each function's arguments by its name."""
    schemas: dict[str, dict[str, Any]] = {}
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) and tool.get("type") == "function" else None
        if not isinstance(function, Mapping):
            raise ValueError(
                f'tools[{i}]: must be {{"type": "function", "function": {{...}}}}; there are no other tools'
            )
        name, schema = function.get("name"), function.get("parameters")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ValueError(f"tools[{i}]: a name has 1 to 64 letters, digits, _ and -; not {shown(name)}")
        if name in schemas:
            raise ValueError(f"tools[{i}]: {name} is there twice")
        schema = {} if schema is None else schema
        if not isinstance(schema, Mapping) or schema.get("type", "object") != "object":
            raise ValueError(f"tools[{i}]: the parameters of {name} must be a JSON schema of an object")
        schemas[name] = {"type": "object", **schema}
    return schemas


def tool_schema(
    format: Format,
    tools: Sequence[Mapping[str, Any]],
    choice: str | Mapping[str, Any] | None,
    *,
    parallel: bool = True,
    thinking: bool = False,
    starts_thinking: bool = False,
    answer: Mapping[str, Any] | None = None,
) -> dict[str, str] | None:
    """What an answer has to match, as an argument of `SamplingParams`, so that it calls a tool; None if it need not.

    choice: OpenAI's tool_choice. parallel: whether there may be several calls, where the format knows that; a named
    function is called once. thinking, starts_thinking: as of the `Parser`; reasoning then stands first. answer: the
    JSON schema of an answer that calls no tool, where the choice leaves that open.
    """
    free = choice in (None, "auto")
    if choice == "none" or (free and answer is None):
        return None
    if format.tools is None:
        raise ValueError("this model's chat template knows no tools")
    if free and not format.tools.closing:
        raise ValueError("this model's calls are JSON, as its answers would be: leave the tools out, or the schema")
    schemas = function_schemas(tools)
    schemas = schemas if free else {name: schemas[name] for name in _chosen(schemas, choice)}
    several = parallel and (free or choice == "required") and format.tools.closing
    thought = _thought_rules(format.reasoning, starts_thinking) if format.reasoning and thinking else []
    start = f"start: {'thought ' if thought else ''}" + ("(calls | answer)" if free else "calls")
    calls = "calls: call" + (r' ("\n" call)*' if several else "")
    no_call = [f"answer: %json {bounded(answer)}"] if free and answer is not None else []
    return {"grammar": "\n".join([start, calls, *_call_rules(format.tools, schemas), *no_call, *thought])}


def _chosen(schemas: Mapping[str, Any], choice: Any) -> list[str]:
    """The names of the functions that may be called."""
    if not schemas:
        raise ValueError("tool_choice: there are no tools to choose from")
    if choice == "required":
        return list(schemas)
    function = choice.get("function") if isinstance(choice, Mapping) and choice.get("type") == "function" else None
    if not isinstance(function, Mapping):
        raise ValueError(f'tool_choice: must be "none", "auto", "required" or a function, not {shown(choice)}')
    name = function.get("name")
    if not isinstance(name, str) or name not in schemas:
        raise ValueError(f"tool_choice: there is no tool {shown(name)}, only {', '.join(schemas)}")
    return [name]


def _call_rules(markers: ToolMarkers, schemas: Mapping[str, Any]) -> list[str]:
    """Rules for one call of any of these functions. Each has its own, for references begin at the root of a schema."""
    functions = " | ".join(f"function_{i}" for i in range(len(schemas)))
    if markers.closing:
        functions = rf'"{markers.opening}\n" ({functions}) "\n{markers.closing}"'
    rules = [f"call: {functions}"]
    for i, (name, schema) in enumerate(schemas.items()):
        head = json.dumps(f'{{"name": "{name}", "{markers.arguments}": ')  # as Lark, too, writes strings
        rules.append(f'function_{i}: {head} %json {json.dumps({**schema, "x-guidance": _SPACING})} "}}"')
    return rules


def _thought_rules(markers: tuple[str, str], started: bool) -> list[str]:
    """Rules for any text up to the closing marker; where the prompt has not opened it, there may be none."""
    opening, closing = markers
    end = r"until_closed /\n{0,2}/"
    return [
        f"thought: {end}" if started else f'thought: ("{opening}" {end})?',
        f'until_closed[lazy]: /(?s:.*)/ "{closing}"',
    ]
