"""How a server is to behave: who may ask, and how much."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    model_id: str
    api_keys: frozenset[str] = frozenset()  # none: everybody may ask
    cors: tuple[str, ...] = ()  # origins whose pages may ask; "*": all
    hosts: tuple[str, ...] | None = None  # names of this server, beside localhost and addresses; None: any
    max_waiting: int = 512  # texts beyond those that run, before clients are told to come again
    max_connections: int = 2048
    max_body: int = 8 << 20  # bytes
    max_n: int = 128  # texts of one request, all prompts taken together
    read_seconds: float = 30.0  # for a request to arrive
    write_seconds: float = 30.0  # for a client to take what it was sent
    drain_seconds: float = 30.0  # for what runs to end, once the server is asked to
    log_prompts: bool = False
