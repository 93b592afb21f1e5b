"""Attacks on a server beside honest streams: their text stays the same, nothing is a 500, and memory is given back."""

from __future__ import annotations

import json
import os
import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from commands import folder  # noqa: F401
from serving import Running, running, until

from infer import LLM, SamplingParams

SECONDS = 300.0 if os.environ.get("INFER_TEST_ALL") else 0.0  # 0: each attack once
LARGE = 1 << 20 if not SECONDS else (8 << 20) - 1000  # bytes of a body
STREAMS = 2 if not SECONDS else 8
GROWTH = 64 << 20  # bytes that a process may have more after the attacks than after the first of each kind
MODEL = '{"model":"tiny",'


def repeated(item: str, before: str, after: str = "}") -> bytes:
    """A body of `LARGE` bytes."""
    return (before + ",".join([item] * (LARGE // (len(item) + 1))) + after).encode()


BODIES: dict[str, tuple[str, Callable[[], bytes]]] = {
    "digits": ("completions", lambda: (MODEL + '"prompt":"' + "1" * LARGE + '"}').encode()),
    "escapes": ("completions", lambda: (MODEL + '"prompt":"' + r"\u0031" * (LARGE // 6) + '"}').encode()),
    "lists": ("completions", lambda: repeated("[1]", MODEL + '"prompt":[', "]}")),
    "numbers": ("completions", lambda: repeated("1", MODEL + '"prompt":[', "]}")),
    "nesting": ("completions", lambda: (MODEL + '"prompt":' + "[" * LARGE).encode()),
    "parts": ("chat/completions", lambda: repeated("{}", MODEL + '"messages":[{"role":"user","content":[', "]}]}")),
    "content": (
        "chat/completions",
        lambda: (MODEL + '"messages":[{"role":"user","content":"' + "ab " * (LARGE // 3) + '"}]}').encode(),
    ),
    "input": ("responses", lambda: (MODEL + '"input":"' + "1" * LARGE + '"}').encode()),
    "session": ("sessions", lambda: repeated("[]", '{"messages":[{"role":"user","content":"x","y":[', "]}]}")),
    "alternatives": (
        "completions",
        lambda: json.dumps(
            {"model": "tiny", "prompt": "x", "max_tokens": 1, "regex": "|".join(f"{i:05}" for i in range(10_000))}
        ).encode(),
    ),
    "stops": ("completions", lambda: repeated('"x"', MODEL + '"prompt":"x","stop":[', "]}")),
    "smuggled": ("completions", lambda: b"x\r\nupgrade: h2c\r\n\r\nPOST /v1/completions HTTP/1.1\r\nHost: x\r\n\r\n"),
}


def post(server: Running, path: str, body: bytes, *, reads: bool = True) -> int | None:
    """The status of the response; None if it is not awaited, or if the server closes the connection first."""
    head = b"POST /v1/%s HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
    with server.connect() as connection, suppress(ConnectionError):
        connection.sendall(head % (path.encode(), len(body)) + body)
        if reads:
            answer = connection.makefile("rb").read()
            return int(answer.split()[1]) if answer else None
    return None


def bytes_sent(server: Running, data: bytes) -> int | None:
    """The same for bytes that are no request."""
    with server.connect() as connection, suppress(ConnectionError):
        connection.sendall(data)
        answer = connection.recv(100)
        return int(answer.split()[1]) if answer else None
    return None


def attacks(server: Running) -> dict[str, Callable[[], int | None]]:
    return {
        **{name: lambda path=path, body=body: post(server, path, body()) for name, (path, body) in BODIES.items()},  # type: ignore[misc]
        "gone": lambda: post(server, "completions", BODIES["digits"][1](), reads=False),
        "long head": lambda: bytes_sent(server, b"GET / HTTP/1.1\r\nX: " + b"x" * 200_000 + b"\r\n\r\n"),
        "pipeline": lambda: bytes_sent(server, b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n" * 5000),
        "tunnel": lambda: bytes_sent(server, b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n"),
    }


def memory() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.usefixtures("compiled")
def test_honest_streams_beside_attacks(folder: Path) -> None:  # noqa: F811
    statuses: dict[str, set[int | None]] = {}
    wrong: list[str] = []
    ended = threading.Event()
    with running(lambda: LLM(folder, cache_memory=10**7), max_body=8 << 20) as server:
        expected = server.service.llm.generate("hello the", SamplingParams(max_new_tokens=40)).text
        body: Any = {"model": "tiny", "prompt": "hello the", "max_tokens": 40, "temperature": 0, "stream": True}

        def stream() -> None:
            with server.openai() as client:
                while not ended.is_set():
                    text = "".join(chunk.choices[0].text for chunk in client.completions.create(**body))
                    if text != expected:
                        wrong.append(text)

        streams = [threading.Thread(target=stream) for _ in range(STREAMS)]
        for thread in streams:
            thread.start()
        try:
            kinds = attacks(server)
            for name, attack in kinds.items():
                statuses.setdefault(name, set()).add(attack())
            before, end = memory(), time.monotonic() + SECONDS
            rng = random.Random(0)
            while time.monotonic() < end:
                several = rng.sample(sorted(kinds), 4)
                threads = [threading.Thread(target=lambda n=n: statuses[n].add(kinds[n]())) for n in several]  # type: ignore[misc]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
            grown = memory() - before
        finally:
            ended.set()
            for thread in streams:
                thread.join()
        until(server.idle)
        assert server.service.failure is None
    assert not wrong
    answered = {name: found - {None} for name, found in statuses.items()}
    assert all(status is not None and status < 500 for found in answered.values() for status in found), statuses
    assert answered["alternatives"] == {200}
    assert answered["pipeline"] <= {200}
    refused = {name: found for name, found in answered.items() if name not in ("alternatives", "pipeline")}
    assert all(found <= {400, 431} for found in refused.values()), refused
    assert grown < GROWTH, f"{grown >> 20} MB"
