"""Bodies that are meant to cost more than they may."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest

from infer.server.bodies import Body, ChatCompletion, Completion, CreateResponse, Detokenize, read_body
from infer.server.errors import ApiError

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
            read_body(kind, data)
        assert tracemalloc.get_traced_memory()[1] < 50 * len(data)
    finally:
        tracemalloc.stop()
    assert error.value.status == 400


@pytest.mark.parametrize("number", ["1e999", "-1e999", "NaN", "Infinity"])
def test_no_number(number: str) -> None:
    """JSON has no other infinity than this one, and no answer could repeat it."""
    body = json.dumps(CHAT | {"chat_template_kwargs": {"x": 0}}).replace(": 0}", f": {number}}}")
    with pytest.raises(ApiError, match="not JSON"):
        read_body(ChatCompletion, body.encode())
