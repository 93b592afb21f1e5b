"""Clients that disconnect, stall and send garbage, while one requests the same text repeatedly and checks it."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

from http_client import Connection, Response, ServerProcess, request_once

PATH = "/v1/completions"
DRAIN_TIMEOUT_S = 60.0  # for a server to end abandoned requests
MAX_PAUSE_S = 3.0  # of a stalling client


class Expected(NamedTuple):
    """A request, and its result from the engine alone."""

    body: dict[str, Any]
    text: str
    logprobs: Sequence[float]


class Rough:
    """Misbehaving clients of a server: counts of their actions and of the response statuses."""

    def __init__(self, port: int, body: dict[str, Any], expected: Expected, seed: int = 0) -> None:
        """body: of a request for a text."""
        self.port, self._body, self._expected = port, body, expected
        self._draw = random.Random(seed)
        self.actions: Counter[str] = Counter()
        self.statuses: Counter[int] = Counter()
        self.checked = self.wrong = 0  # responses compared with the expected one, and different ones
        self._actions: dict[Callable[[], Awaitable[None]], int] = {  # with their weights
            self.talk: 4,
            self.vanish: 8,
            self.stall: 3,
            self.half: 8,
            self.garbage: 6,
            self.misuse: 8,
            self.silent: 4,
        }

    async def run(self, connections: int, seconds: float) -> None:
        """connections: number of concurrent ones."""
        ends = asyncio.get_running_loop().time() + seconds
        async with asyncio.TaskGroup() as group:
            for i in range(connections):
                group.create_task(self._act_repeatedly(i * min(1.0, seconds / 4) / connections, ends))
            group.create_task(self._check_repeatedly(ends))

    async def _act_repeatedly(self, delay: float, ends: float) -> None:
        await asyncio.sleep(delay)
        while asyncio.get_running_loop().time() < ends:
            [action] = self._draw.choices(list(self._actions), list(self._actions.values()))
            self.actions[action.__name__] += 1
            try:
                await action()
            except OSError:
                self.actions["refused"] += 1
                await asyncio.sleep(0.1)

    async def _check_repeatedly(self, ends: float) -> None:
        while asyncio.get_running_loop().time() < ends or not self.checked:
            response = await request_once(self.port, PATH, self._expected.body)
            if response.status == 429:
                await asyncio.sleep(0.05)
                continue
            self._count(response)
            self.checked += 1
            self.wrong += not self._is_expected(response)

    def _is_expected(self, response: Response) -> bool:
        if response.status != 200:
            return False
        [choice] = response.json["choices"]
        return (choice["text"], choice["logprobs"]["token_logprobs"]) == (
            self._expected.text,
            list(self._expected.logprobs),
        )

    def _count(self, response: Response) -> None:
        self.statuses[response.status] += 1
        if b'"server_error"' in response.raw:  # within a stream that has begun with 200
            self.statuses[500] += response.status != 500

    def _pause(self, most: float = MAX_PAUSE_S) -> Awaitable[None]:
        return asyncio.sleep(self._draw.random() * most)

    async def talk(self) -> None:
        """Behaves correctly."""
        stream = self._draw.random() < 0.5
        self._count(
            await request_once(self.port, PATH, self._body | {"stream": stream, "seed": self._draw.randrange(9)})
        )

    async def vanish(self) -> None:
        """Sends a request, and disconnects before the end."""
        connection = await Connection.open(self.port)
        connection.send(PATH, self._body | {"stream": self._draw.random() < 0.5})
        await self._pause(1.0)
        connection.close()

    async def stall(self) -> None:
        """Requests much output, and does not read it."""
        connection = await Connection.open(self.port)
        connection.transport.pause_reading()
        connection.send(PATH, self._body | {"stream": True, "n": 4, "logprobs": 20})
        await self._pause()
        connection.close()

    async def half(self) -> None:
        """Sends a part of a request."""
        connection = await Connection.open(self.port)
        data = json.dumps(self._body).encode()
        data = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data
        connection.transport.write(data[: self._draw.randrange(1, len(data))])
        await self._pause()
        connection.close()

    async def garbage(self) -> None:
        connection = await Connection.open(self.port)
        connection.transport.write(self._draw.randbytes(self._draw.randrange(1, 4096)))
        await self._pause(0.5)
        connection.close()

    async def misuse(self) -> None:
        """Sends invalid requests."""
        draw = self._draw
        path, body = draw.choice(
            [
                (PATH, self._body | {"max_tokens": -1}),
                (PATH, self._body | {"prompt": [1 << 40]}),
                (PATH, [1, 2]),
                (PATH, {"model": "other", "prompt": "x"}),
                ("/tokenize", {"prompt": None}),
                ("/nowhere", {}),
                ("/v1/models", None),
                ("/metrics", None),
            ]
        )
        self._count(await request_once(self.port, path, body))

    async def silent(self) -> None:
        connection = await Connection.open(self.port)
        await self._pause()
        connection.close()


async def idle_resources(server: ServerProcess) -> dict[str, int]:
    """Resources of the server once no request runs."""
    for _ in range(round(DRAIN_TIMEOUT_S / 0.1)):
        numbers = await metrics(server.port)
        if not numbers["num_requests_running"] and not numbers["num_requests_waiting"]:
            break
        await asyncio.sleep(0.1)
    else:
        raise RuntimeError(f"requests still run {DRAIN_TIMEOUT_S:.0f} seconds after their clients disconnected")
    await asyncio.sleep(1.0)  # for connections to be closed
    return await asyncio.to_thread(server.resources)


async def metrics(port: int) -> dict[str, float]:
    lines = (await request_once(port, "/metrics")).body.decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if line.startswith("infer:") and "{" not in line)
    return {name.removeprefix("infer:"): float(value) for name, value in pairs}
