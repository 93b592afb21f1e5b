"""JSON and server-sent events, as clients get them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

DONE = b"data: [DONE]\n\n"
_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode  # `json.dumps` would make one for each token


def as_json(value: Any) -> bytes:
    return _encode(value).encode()


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(as_json(value), status, headers, "application/json")


def as_event(value: Any, name: str | None = None) -> bytes:
    """A server-sent event."""
    data = b"data: " + as_json(value) + b"\n\n"
    return data if name is None else b"event: " + name.encode() + b"\n" + data
