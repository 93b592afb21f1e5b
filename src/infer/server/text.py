"""JSON and server-sent events, as bytes."""

from __future__ import annotations

import json
from typing import Any

DONE = b"data: [DONE]\n\n"
_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode  # `json.dumps` would make one for each token


def as_json(value: Any) -> bytes:
    return _encode(value).encode()


def as_event(value: Any, name: str | None = None) -> bytes:
    """A server-sent event."""
    data = b"data: " + as_json(value) + b"\n\n"
    return data if name is None else b"event: " + name.encode() + b"\n" + data
