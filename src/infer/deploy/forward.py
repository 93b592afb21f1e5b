"""A request on its way from the ingress to a replica."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from infer.deploy.channel import Address, Headers
from infer.deploy.prefixes import prompt_keys


@dataclass
class ForwardedRequest:
    method: str
    path: str
    query: bytes
    headers: Headers
    body: bytes
    reply_to: Address
    tried: list[str] = field(default_factory=list)  # replicas that it was sent to

    def __reduce__(self) -> Any:
        """Without the router's notes: those stay in the ingress."""
        return ForwardedRequest, (self.method, self.path, self.query, self.headers, self.body, self.reply_to)

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
