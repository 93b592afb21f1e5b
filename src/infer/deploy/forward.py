"""A request on its way from the ingress to a replica."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from infer.deploy.prefixes import prompt_keys


class ForwardedRequest:
    """What a client has sent. The router's notes stay in the ingress: they are not sent along."""

    def __init__(self, method: str, path: str, query: bytes, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        self.method, self.path, self.query, self.headers, self.body = method, path, query, headers, body
        self.tried: list[str] = []  # replicas that have failed to answer it

    def __reduce__(self) -> Any:
        return ForwardedRequest, (self.method, self.path, self.query, self.headers, self.body)

    @cached_property
    def prefix(self) -> list[int]:
        return prompt_keys(self.body) if self.method == "POST" else []

    def scope(self) -> dict[str, Any]:
        """As ASGI has it."""
        return {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": self.method,
            "scheme": "http",
            "path": self.path,
            "raw_path": self.path.encode(),
            "root_path": "",
            "query_string": self.query,
            "headers": self.headers,
        }
