"""A server process, and fast clients on loopback, for `bench_http.py`.

Clients store what they receive with its time and parse it later, so that parsing is not measured.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

START_TIMEOUT_S = 120.0  # until a server prints its address
TIMEOUT_S = 600.0  # for an response
TICKS = os.sysconf("SC_CLK_TCK")
SERVE = [sys.executable, str(Path(__file__).with_name("http_serve.py"))]


class ServerProcess:
    """`infer serve`, running inside a `with` block."""

    def __init__(self, arguments: Sequence[str], command: Sequence[str] = SERVE) -> None:
        self._command = [*command, *arguments, "--port", "0"]
        self.stderr_lines: list[str] = []
        self._changed = threading.Condition()

    def __enter__(self) -> Self:
        self.started = time.perf_counter()
        self._process = subprocess.Popen(self._command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        self.pid = self._process.pid
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            line = self.wait_for(" at http://", START_TIMEOUT_S)
        except BaseException:
            self.__exit__()
            raise
        self.listening = time.perf_counter()
        self.url = line.split(" at ")[1].split("/v1")[0]
        self.port = int(self.url.rpartition(":")[2])
        return self

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(40)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(5)
        assert self._process.stderr is not None
        self._process.stderr.close()

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            with self._changed:
                self.stderr_lines.append(line.rstrip())
                self._changed.notify_all()
        with self._changed:
            self.stderr_lines.append("")  # end of output
            self._changed.notify_all()

    def wait_for(self, words: str, seconds: float, begin: int = 0) -> str:
        """The first line of stderr from line `begin` on that contains these words."""

        def found() -> bool:
            return any(words in line or not line for line in self.stderr_lines[begin:])

        with self._changed:
            self._changed.wait_for(found, seconds)
            for line in self.stderr_lines[begin:]:
                if words in line:
                    return line
        raise RuntimeError(f"the server does not print {words!r}: {' / '.join(self.stderr_lines)[-2000:]}")

    def processor_s(self) -> tuple[float, float]:
        """CPU seconds so far: of the event loop, which is the first thread, and of all threads."""
        return _seconds(f"/proc/{self.pid}/task/{self.pid}/stat"), _seconds(f"/proc/{self.pid}/stat")

    def resources(self) -> dict[str, int]:
        """Resources that may leak: resident bytes, open files, threads, tasks of the event loop."""
        status = Path(f"/proc/{self.pid}/statm").read_text().split()
        begin = len(self.stderr_lines)
        os.kill(self.pid, signal.SIGUSR1)
        return {
            "memory": int(status[1]) * os.sysconf("SC_PAGE_SIZE"),
            "files": len(os.listdir(f"/proc/{self.pid}/fd")),
            "threads": len(os.listdir(f"/proc/{self.pid}/task")),
            "tasks": int(self.wait_for("tasks: ", 30, begin).split()[1]),
        }


def _seconds(path: str) -> float:
    ticks = Path(path).read_text().rpartition(")")[2].split()
    return (int(ticks[11]) + int(ticks[12])) / TICKS


@dataclass
class Response:
    """The received parts of a response, with their times."""

    sent: float
    times: list[float] = field(default_factory=list)
    parts: list[bytes] = field(default_factory=list)

    @property
    def raw(self) -> bytes:
        return b"".join(self.parts)

    @property
    def status(self) -> int:
        """0: no response yet."""
        line = self.raw[:16].split()
        return int(line[1]) if len(line) > 1 and line[1].isdigit() else 0

    @property
    def body(self) -> bytes:
        head, _, rest = self.raw.partition(b"\r\n\r\n")
        if b"chunked" not in head.lower():
            return rest
        parts = []
        while rest:
            size, _, rest = rest.partition(b"\r\n")
            parts.append(rest[: int(size, 16)])
            rest = rest[int(size, 16) + 2 :]
        return b"".join(parts)

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[dict[str, Any]]:
        lines = self.body.split(b"\n\n")
        return [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]

    @property
    def text(self) -> str:
        return "".join(choice["text"] for event in self.events for choice in event.get("choices", ()))

    @property
    def failed(self) -> bool:
        """Whether it is not a complete stream."""
        return self.status != 200 or b"data: [DONE]" not in self.parts[-1][-64:] + self.raw[-64:]

    @property
    def token_times(self) -> list[float]:
        """When each part with text came; tokens that came together count as one."""
        return [at for at, part in zip(self.times, self.parts, strict=True) if b'"choices":[{' in part]


class Connection(asyncio.Protocol):
    """One connection, one request at a time."""

    transport: asyncio.Transport
    _response: Response | None = None
    _ended: asyncio.Future[None] | None = None
    _end = b"0\r\n\r\n"
    _missing = -1  # remaining bytes of the body; -1: chunked

    @classmethod
    async def open(cls, port: int) -> Connection:
        _, protocol = await asyncio.get_running_loop().create_connection(cls, "127.0.0.1", port)
        return protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        response = self._response
        if response is None:
            return
        response.times.append(time.perf_counter())
        response.parts.append(data)
        if len(response.parts) == 1:
            head, _, body = data.partition(b"\r\n\r\n")
            length = head.lower().partition(b"content-length: ")[2].split(b"\r")[0]
            self._missing = int(length) - len(body) if length else -1
        elif self._missing > 0:
            self._missing -= len(data)
        ended = self._missing == 0 or (self._missing < 0 and response.parts[-1].endswith(self._end))
        if (ended or (len(data) < 5 and response.raw.endswith(self._end))) and self._ended and not self._ended.done():
            self._ended.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)

    def send(self, path: str, body: Any = None) -> Response:
        """Send a request. The response is filled as parts arrive."""
        data = b"" if body is None else json.dumps(body).encode()
        line = f"{'GET' if body is None else 'POST'} {path} HTTP/1.1\r\n"
        head = f"{line}Host: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
        self._ended = asyncio.get_running_loop().create_future()
        self._response = Response(time.perf_counter())
        self.transport.write(head.encode() + data)
        return self._response

    async def request(self, path: str, body: Any = None) -> Response:
        """Send a request and wait for its full response, or until the server closes."""
        response = self.send(path, body)
        await self.ended()
        return response

    async def ended(self) -> None:
        assert self._ended is not None
        await asyncio.wait_for(self._ended, TIMEOUT_S)

    def close(self) -> None:
        self.transport.abort()


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[Connection]:
    connection = await Connection.open(port)
    try:
        yield connection
    finally:
        connection.close()


async def request_once(port: int, path: str, body: Any = None) -> Response:
    async with connected(port) as connection:
        return await connection.request(path, body)
