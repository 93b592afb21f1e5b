"""A server on loopback, in a thread of this process, for tests; and clients that behave badly."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx2 as httpx
from openai import OpenAI
from waiting import WAIT, until

from infer import LLM
from infer.server.run import Server, listen
from infer.server.service import Service, Settings


class Running:
    def __init__(self, server: Server, port: int) -> None:
        self.server, self.service, self.port = server, server.service, port
        self.url = f"http://127.0.0.1:{port}"
        self.status: int | None = None

    def openai(self, key: str = "none", **options: Any) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=WAIT, **options)

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=WAIT, **options)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=WAIT)

    def begin(self, path: str, body: Any, headers: bytes = b"", receive: int | None = None) -> socket.socket:
        """Send a request, and leave the answer in the socket. receive: how many bytes of it are taken unread."""
        data = json.dumps(body).encode()
        connection = socket.socket()
        connection.settimeout(WAIT)
        if receive is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive)  # before it connects
        connection.connect(("127.0.0.1", self.port))
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n"
        connection.sendall(head.encode() + headers + b"\r\n" + data)
        return connection

    def idle(self) -> bool:
        """Whether nothing runs, and no page is held but for later."""
        stats = self.service.llm.stats()
        return not (stats.running or stats.waiting or self.service.num_sequences)


@contextmanager
def running(
    engine: Callable[[], LLM], *, restarts: bool = False, tracer: Any = None, **settings: Any
) -> Iterator[Running]:
    made = Service(engine, Settings("tiny", **settings), restarts=restarts, tracer=tracer)
    with listen("127.0.0.1", 0) as listening, made as service:
        server = Server(service)
        found = Running(server, listening.getsockname()[1])

        def live() -> None:
            found.status = server.run_on(listening)

        thread = threading.Thread(target=live)
        thread.start()
        until(lambda: server.started)
        try:
            yield found
        finally:
            server.stop()
            thread.join(WAIT)
            assert not thread.is_alive()
