"""Bodies that are meant to cost more than they may."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest

from infer.server.bodies import Body, ChatCompletion, Completion, CreateResponse, Detokenize, parse_body, validate
from infer.server.telemetry import exporting
from infer.server.wire import ApiError

MANY = 20_000
CHAT = {"model": "m", "messages": [{"role": "user", "content": "x"}]}


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (Completion, {"model": "m", "prompt": [*[1] * MANY, "x"]}),
        (Completion, {"model": "m", "prompt": [*[[1]] * MANY, "x"]}),
        (Completion, {"model": "m", "prompt": [["x"] * MANY]}),
        (Completion, {"model": "m", "prompt": "x", "logit_bias": {str(i): "x" for i in range(MANY)}}),
        (Completion, {"model": "m", "prompt": "x", **{f"x{i}": 1 for i in range(MANY)}}),
        (Completion, {"model": "m", "prompt": "x", "stream_options": {f"x{i}": 1 for i in range(MANY)}}),
        (ChatCompletion, CHAT | {"tools": [{"type": "function", "function": {f"x{i}": 1 for i in range(MANY)}}]}),
        (CreateResponse, {"model": "m", "input": "x", "include": ["x"] * MANY}),
        (CreateResponse, {"model": "m", "input": "x", "metadata": {str(i): 1 for i in range(MANY)}}),
        (Detokenize, {"tokens": ["x"] * MANY}),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_what_is_wrong_many_times_is_said_once(kind: type[Body], body: dict[str, Any]) -> None:
    """pydantic makes an error of each item: of 8 MB they would take minutes and gigabytes."""
    data = json.dumps(body).encode()
    tracemalloc.start()
    try:
        with pytest.raises(ApiError) as error:
            parse_body(kind, data)
        assert tracemalloc.get_traced_memory()[1] < 50 * len(data)
    finally:
        tracemalloc.stop()
    assert error.value.status == 400


@pytest.mark.parametrize("number", ["1e999", "-1e999", "NaN", "Infinity"])
def test_no_number(number: str) -> None:
    """JSON has no other infinity than this one, and no answer could repeat it."""
    body = json.dumps(CHAT | {"chat_template_kwargs": {"x": 0}}).replace(": 0}", f": {number}}}")
    with pytest.raises(ApiError, match="not JSON"):
        parse_body(ChatCompletion, body.encode())


def function(**fields: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": fields}]}


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": ["hello"]}, "messages[0]"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": ["weather"]}, "tools[0]"),
        (function(), "tools[0].function.name"),
        (function(name="two words"), "tools[0].function.name"),
        (function(name="x" * 65), "tools[0].function.name"),
        (function(name="f\n"), "tools[0].function.name"),
        (function(name="f", parameters=[]), "tools[0].function.parameters"),
        ({"tool_choice": "all"}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": "weather"}}, "tool_choice"),
    ],
    ids=str,
)
def test_refused(change: dict[str, Any], param: str) -> None:
    """What nothing after `parse_body` checks again."""
    with pytest.raises(ApiError) as error:
        parse_body(ChatCompletion, json.dumps(CHAT | change).encode())
    assert error.value.param == param


@pytest.mark.parametrize("key", ["1_0", " 1", "+1", "-1", "\N{ARABIC-INDIC DIGIT ONE}", "1.0", "", "9" * 30])
def test_keys_of_logit_bias_are_token_ids(key: str) -> None:
    with pytest.raises(ApiError, match="is not a token id"):
        validate(Completion, {"model": "m", "prompt": "x", "logit_bias": {key: 1.0}}).settings()


@pytest.mark.parametrize("stop", ["x" * 1001, ["x" * 1001], ["x"] * 17])
def test_stop_strings_are_bounded(stop: Any) -> None:
    with pytest.raises(ApiError, match="at most"):
        validate(Completion, {"model": "m", "prompt": "x", "stop": stop})


@pytest.mark.parametrize("endpoint", ["x", "", "http://", "ftp://a/b", "http://[::1", "http://a:99999", "http:// a"])
def test_an_endpoint_of_spans_is_a_url(endpoint: str) -> None:
    with pytest.raises(ValueError, match="--otlp-traces-endpoint"), exporting(endpoint):
        pass
