"""OpenAI's messages as chat templates take them."""

from __future__ import annotations

from typing import Any

import pytest

from infer.loader.chat import render_chat_template
from infer.server.chat_template import for_template

CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Zürich"}'}}
ANSWER = {"role": "tool", "tool_call_id": "call_1", "content": "sunny"}


def test_texts_stay() -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi", "name": "Ada"}]
    assert for_template(messages) == messages


def test_parts_are_joined() -> None:
    content = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert for_template([{"role": "user", "content": content}]) == [{"role": "user", "content": "one\ntwo"}]
    assert for_template([{"role": "user", "content": []}]) == [{"role": "user", "content": ""}]


def test_developer_is_system() -> None:
    assert for_template([{"role": "developer", "content": "x"}]) == [{"role": "system", "content": "x"}]


def test_calls() -> None:
    """Arguments as an object; no content is an empty text; the answer has the name of what was called."""
    call, answer = for_template([{"role": "assistant", "content": None, "tool_calls": [CALL]}, ANSWER])
    assert call["content"] == ""
    assert call["tool_calls"][0] == {**CALL, "function": {"name": "weather", "arguments": {"city": "Zürich"}}}
    assert answer == {**ANSWER, "name": "weather"}
    assert CALL["function"]["arguments"] == '{"city": "Zürich"}'  # type: ignore[index]


def test_answers_keep_a_name_of_their_own() -> None:
    messages = [{"role": "assistant", "tool_calls": [CALL]}, {**ANSWER, "name": "forecast"}]
    assert for_template(messages)[1]["name"] == "forecast"
    assert "name" not in for_template([{**ANSWER, "tool_call_id": "other"}])[0]


@pytest.mark.parametrize("arguments", ["{}", "", None, {}])
def test_no_arguments(arguments: Any) -> None:
    calls = [{"id": "a", "type": "function", "function": {"name": "now", "arguments": arguments}}]
    [message] = for_template([{"role": "assistant", "content": "", "tool_calls": calls}])
    assert message["tool_calls"][0]["function"]["arguments"] == {}


def test_fields_without_a_value_are_left_out() -> None:
    """Templates ask whether a field is there at all."""
    message = {"role": "assistant", "content": "x", "tool_calls": None, "refusal": None, "audio": None, "name": None}
    assert for_template([message]) == [{"role": "assistant", "content": "x"}]
    assert for_template([{"role": "assistant", "content": "x", "tool_calls": []}]) == [
        {"role": "assistant", "content": "x"}
    ]


@pytest.mark.parametrize("key", ["reasoning", "reasoning_content"])
def test_reasoning(key: str) -> None:
    message = {"role": "assistant", "content": "4", key: "2 + 2"}
    assert for_template([message]) == [{"role": "assistant", "content": "4", "reasoning_content": "2 + 2"}]


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ({"content": "x"}, "the role must be one of system, developer, user, assistant, tool, not None"),
        ({"role": "ipython", "content": "x"}, "the role must be .* not 'ipython'"),
        ({"role": ["user"], "content": "x"}, "the role must be"),
        ({"role": "function", "content": "x"}, "functions were replaced by tools"),
        ({"role": "assistant", "function_call": {}}, "functions were replaced by tools"),
        ({"role": "user"}, "the content must be a string or a list of parts, not None"),
        ({"role": "user", "content": 4}, "the content must be a string or a list of parts, not 4"),
        ({"role": "user", "content": ["x"]}, "a part of the content must be"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "images are not supported, only text"),
        ({"role": "user", "content": [{"type": "input_audio"}]}, "audio is not supported, only text"),
        ({"role": "user", "content": [{"type": "file"}]}, "files are not supported, only text"),
        ({"role": "user", "content": [{"type": "video"}]}, "parts of type 'video' are not supported, only text"),
        ({"role": "user", "content": [{"type": "text"}]}, "the text of a part must be a string, not None"),
        ({"role": "assistant", "audio": {"id": "x"}}, "audio is not supported, only text"),
        ({"role": "assistant", "content": "", "reasoning": 1}, "the reasoning must be a string, not 1"),
        ({"role": "tool", "content": "x"}, "the tool_call_id of a tool's message must be a string, not None"),
        ({"role": "assistant", "tool_calls": {"a": 1}}, "tool_calls must be a list"),
        ({"role": "assistant", "tool_calls": ["x"]}, r'tool_calls\[0\]: must have a "function"'),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, r"tool_calls\[0\]: the name must be a string"),
    ],
)
def test_refused(message: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=rf"^messages\[1\]: {problem}"):
        for_template([{"role": "user", "content": "x"}, message])


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ("{", "the arguments are not JSON: '{'"),
        ("[" * 100_000, "the arguments are not JSON"),
        ("[1]", r"the arguments must be a JSON object, not \[1\]"),
        (4, "the arguments must be a JSON object, not 4"),
    ],
)
def test_arguments_that_are_refused(arguments: Any, problem: str) -> None:
    calls = [CALL, {"id": "b", "function": {"name": "f", "arguments": arguments}}]
    with pytest.raises(ValueError, match=rf"^messages\[0\]: tool_calls\[1\]: {problem}"):
        for_template([{"role": "assistant", "tool_calls": calls}])


class TokenizerWith:
    bos_token = eos_token = None

    def __init__(self, chat_template: str) -> None:
        self.chat_template = chat_template


def test_a_call_renders_as_the_model_wrote_it() -> None:
    """An excerpt of the template of Llama 3.2, which writes the arguments itself."""
    template = (
        "{%- for message in messages %}{%- if 'tool_calls' in message %}"
        "{%- set tool_call = message.tool_calls[0].function %}"
        "{{- '{\"name\": \"' + tool_call.name + '\", ' }}{{- '\"parameters\": ' }}{{- tool_call.arguments | tojson }}"
        "{{- '}' }}{%- else %}{{- message['content'] | trim }}{%- endif %}{%- endfor %}"
    )
    messages = [{"role": "assistant", "content": None, "tool_calls": [CALL]}]
    rendered = render_chat_template(for_template(messages), tokenizer=TokenizerWith(template))  # type: ignore[arg-type]
    assert rendered == '{"name": "weather", "parameters": {"city": "Zürich"}}'
