"""Items of the Responses API, as the messages that templates take."""

from __future__ import annotations

from typing import Any

import pytest

from infer.server.response_items import items_for_template

CALL = {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "look", "arguments": '{"at": 1}'}
CALLED = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": {"at": 1}}}


def thought(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}


def said(text: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant", "content": [part]}


def test_a_text() -> None:
    assert items_for_template("hi", "be kind") == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "hi"},
    ]


def test_messages() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    assert items_for_template(
        [{"role": "developer", "content": "x"}, {"role": "user", "content": parts}, said("c")]
    ) == [
        {"role": "system", "content": "x"},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "c"},
    ]


def test_a_turn_is_one_message() -> None:
    output = {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "7"}]}
    assert items_for_template([thought("hm"), said("let me see"), CALL, CALL | {"call_id": "c2"}, output, CALL]) == [
        {
            "role": "assistant",
            "content": "let me see",
            "reasoning_content": "hm",
            "tool_calls": [CALLED, CALLED | {"id": "c2"}],
        },
        {"role": "tool", "tool_call_id": "c1", "name": "look", "content": "7"},
        {"role": "assistant", "content": "", "tool_calls": [CALLED]},
    ]


def test_a_thought_begins_a_turn() -> None:
    found = items_for_template([said("a"), thought("b"), thought("c"), CALL])
    assert found == [
        {"role": "assistant", "content": "a"},
        {"role": "assistant", "content": "", "reasoning_content": "b\nc", "tool_calls": [CALLED]},
    ]


def test_thoughts_that_lead_nowhere_are_left_out() -> None:
    user = {"role": "user", "content": "hi"}
    assert items_for_template([thought("a"), user, said("b"), thought("c")]) == [
        user,
        {"role": "assistant", "content": "b"},
    ]


@pytest.mark.parametrize(
    ("item", "words"),
    [
        ({"type": "item_reference", "id": "x"}, "nothing is stored"),
        ({"type": "web_search_call"}, "'web_search_call' are not supported"),
        ({"role": "tool", "content": "x"}, "function_call_output"),
        ({"role": "king", "content": "x"}, "the role must be"),
        ({"content": "x"}, "the role must be"),
        ({"role": "user"}, "the content must be"),
        ({"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}, "are not supported"),
        ({"role": "user", "content": [{"type": "input_text"}]}, "must be a string"),
        (CALL | {"call_id": None}, "call_id"),
        (CALL | {"name": 3}, "the name"),
        (CALL | {"arguments": "{"}, "not JSON"),
        ({"type": "function_call_output", "output": "x"}, "call_id"),
        ({"type": "function_call_output", "call_id": "x"}, "the content must be"),
        ({"type": "reasoning", "summary": [], "encrypted_content": "x"}, "encrypted_content"),
        ({"type": "reasoning", "content": "x"}, "list of parts"),
        ({"type": "reasoning", "content": [{"type": "reasoning_text"}]}, "have a text"),
    ],
    ids=str,
)
def test_refused(item: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=r"^input\[1\]: ") as error:
        items_for_template([{"role": "user", "content": "x"}, item])
    assert words in str(error.value)
