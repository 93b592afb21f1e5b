"""A server in a process of its own, and clients on loopback that cost little: `bench_http.py` measures with them.

What a client receives is kept with its time and read later, so that reading does not add to what is measured.
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

START_S = 120.0  # for a server to say where it is
PATIENCE_S = 600.0  # for an answer
TICKS = os.sysconf("SC_CLK_TCK")
SERVE = [sys.executable, str(Path(__file__).with_name("http_serve.py"))]


class ServerProcess:
    """`infer serve` within a `with`; what it says on stderr is kept in `said`."""

    def __init__(self, arguments: Sequence[str], command: Sequence[str] = SERVE) -> None:
        self._command = [*command, *arguments, "--port", "0"]
        self.said: list[str] = []
        self._news = threading.Condition()

    def __enter__(self) -> Self:
        self.started = time.perf_counter()
        self._process = subprocess.Popen(self._command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        self.pid = self._process.pid
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            line = self.wait_for(" at http://", START_S)
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
            with self._news:
                self.said.append(line.rstrip())
                self._news.notify_all()
        with self._news:
            self.said.append("")  # it has ended
            self._news.notify_all()

    def wait_for(self, words: str, seconds: float, begin: int = 0) -> str:
        """The first line from `begin` on that holds these words."""

        def found() -> bool:
            return any(words in line or not line for line in self.said[begin:])

        with self._news:
            self._news.wait_for(found, seconds)
            for line in self.said[begin:]:
                if words in line:
                    return line
        raise RuntimeError(f"the server does not say {words!r}: {' / '.join(self.said)[-2000:]}")

    def processor_s(self) -> tuple[float, float]:
        """Seconds of a processor so far: of its event loop, which is the first thread, and of all threads."""
        return _seconds(f"/proc/{self.pid}/task/{self.pid}/stat"), _seconds(f"/proc/{self.pid}/stat")

    def held(self) -> dict[str, int]:
        """What it may leak: resident bytes, open files, threads, tasks of the event loop."""
        status = Path(f"/proc/{self.pid}/statm").read_text().split()
        begin = len(self.said)
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
class Answer:
    """What has come, in parts with their times."""

    sent: float
    times: list[float] = field(default_factory=list)
    parts: list[bytes] = field(default_factory=list)

    @property
    def whole(self) -> bytes:
        return b"".join(self.parts)

    @property
    def status(self) -> int:
        """0: none has come."""
        line = self.whole[:16].split()
        return int(line[1]) if len(line) > 1 and line[1].isdigit() else 0

    @property
    def body(self) -> bytes:
        head, _, rest = self.whole.partition(b"\r\n\r\n")
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
        """Whether it is not a stream that came to its end."""
        return self.status != 200 or b"data: [DONE]" not in self.parts[-1][-64:] + self.whole[-64:]

    @property
    def token_times(self) -> list[float]:
        """When each part with text came; tokens that came together count as one."""
        return [at for at, part in zip(self.times, self.parts, strict=True) if b'"choices":[{' in part]


class Connection(asyncio.Protocol):
    """One connection, one request at a time."""

    transport: asyncio.Transport
    _answer: Answer | None = None
    _ended: asyncio.Future[None] | None = None
    _end = b"0\r\n\r\n"
    _missing = -1  # bytes of a body whose length is known; -1: it is in chunks

    @classmethod
    async def open(cls, port: int) -> Connection:
        _, protocol = await asyncio.get_running_loop().create_connection(cls, "127.0.0.1", port)
        return protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        answer = self._answer
        if answer is None:
            return
        answer.times.append(time.perf_counter())
        answer.parts.append(data)
        if len(answer.parts) == 1:
            head, _, body = data.partition(b"\r\n\r\n")
            length = head.lower().partition(b"content-length: ")[2].split(b"\r")[0]
            self._missing = int(length) - len(body) if length else -1
        elif self._missing > 0:
            self._missing -= len(data)
        ended = self._missing == 0 or (self._missing < 0 and answer.parts[-1].endswith(self._end))
        if (ended or (len(data) < 5 and answer.whole.endswith(self._end))) and self._ended and not self._ended.done():
            self._ended.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)

    def send(self, path: str, body: Any = None) -> Answer:
        """Send a request; what comes of it is in the answer."""
        data = b"" if body is None else json.dumps(body).encode()
        line = f"{'GET' if body is None else 'POST'} {path} HTTP/1.1\r\n"
        head = f"{line}Host: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
        self._ended = asyncio.get_running_loop().create_future()
        self._answer = Answer(time.perf_counter())
        self.transport.write(head.encode() + data)
        return self._answer

    async def ask(self, path: str, body: Any = None) -> Answer:
        """A request and its whole answer, or what has come of it when the server closes."""
        answer = self.send(path, body)
        await self.ended()
        return answer

    async def ended(self) -> None:
        assert self._ended is not None
        await asyncio.wait_for(self._ended, PATIENCE_S)

    def close(self) -> None:
        self.transport.abort()


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[Connection]:
    connection = await Connection.open(port)
    try:
        yield connection
    finally:
        connection.close()


async def ask_once(port: int, path: str, body: Any = None) -> Answer:
    async with connected(port) as connection:
        return await connection.ask(path, body)
