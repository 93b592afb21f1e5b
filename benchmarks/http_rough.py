"""Clients that come, talk, vanish, stall and send garbage, while one asks for the same text again and again."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

from http_client import Answer, Connection, ServerProcess, ask_once

PATH = "/v1/completions"
REST_S = 60.0  # for a server to end what nobody waits for any more
PAUSE_S = 3.0  # the longest that a client stalls


class Expected(NamedTuple):
    """A request, and what the engine gives it alone."""

    body: dict[str, Any]
    text: str
    logprobs: Sequence[float]


class Rough:
    """What the clients of a server do to it within some seconds, and what they are answered."""

    def __init__(self, port: int, body: dict[str, Any], expected: Expected, seed: int = 0) -> None:
        """body: of a request for a text."""
        self.port, self._body, self._expected = port, body, expected
        self._draw = random.Random(seed)
        self.did: Counter[str] = Counter()
        self.statuses: Counter[int] = Counter()
        self.asked = self.wrong = 0  # times that the expected text was asked for, and was another
        self._deeds: dict[Callable[[], Awaitable[None]], int] = {  # with their weights
            self.talk: 4,
            self.vanish: 8,
            self.stall: 3,
            self.half: 8,
            self.garbage: 6,
            self.misuse: 8,
            self.silent: 4,
        }

    async def run(self, connections: int, seconds: float) -> None:
        """connections: that are there at once."""
        ends = asyncio.get_running_loop().time() + seconds
        async with asyncio.TaskGroup() as group:
            for i in range(connections):
                group.create_task(self._live(i * min(1.0, seconds / 4) / connections, ends))
            group.create_task(self._ask_again(ends))

    async def _live(self, delay: float, ends: float) -> None:
        await asyncio.sleep(delay)
        while asyncio.get_running_loop().time() < ends:
            [deed] = self._draw.choices(list(self._deeds), list(self._deeds.values()))
            self.did[deed.__name__] += 1
            try:
                await deed()
            except OSError:
                self.did["refused"] += 1
                await asyncio.sleep(0.1)

    async def _ask_again(self, ends: float) -> None:
        while asyncio.get_running_loop().time() < ends or not self.asked:
            answer = await ask_once(self.port, PATH, self._expected.body)
            if answer.status == 429:
                await asyncio.sleep(0.05)
                continue
            self._note(answer)
            self.asked += 1
            self.wrong += not self._right(answer)

    def _right(self, answer: Answer) -> bool:
        if answer.status != 200:
            return False
        [choice] = answer.json["choices"]
        return (choice["text"], choice["logprobs"]["token_logprobs"]) == (
            self._expected.text,
            list(self._expected.logprobs),
        )

    def _note(self, answer: Answer) -> None:
        self.statuses[answer.status] += 1
        if b'"server_error"' in answer.whole:  # within a stream that has begun with 200
            self.statuses[500] += answer.status != 500

    def _pause(self, most: float = PAUSE_S) -> Awaitable[None]:
        return asyncio.sleep(self._draw.random() * most)

    async def talk(self) -> None:
        """Behaves."""
        stream = self._draw.random() < 0.5
        self._note(await ask_once(self.port, PATH, self._body | {"stream": stream, "seed": self._draw.randrange(9)}))

    async def vanish(self) -> None:
        """Asks, and does not wait for the end."""
        connection = await Connection.open(self.port)
        connection.send(PATH, self._body | {"stream": self._draw.random() < 0.5})
        await self._pause(1.0)
        connection.close()

    async def stall(self) -> None:
        """Asks for much, and does not read it."""
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
        """Asks for what is not there."""
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
        self._note(await ask_once(self.port, path, body))

    async def silent(self) -> None:
        connection = await Connection.open(self.port)
        await self._pause()
        connection.close()


async def at_rest(server: ServerProcess) -> dict[str, int]:
    """What the server holds once nothing runs any more."""
    for _ in range(round(REST_S / 0.1)):
        numbers = await metrics(server.port)
        if not numbers["num_requests_running"] and not numbers["num_requests_waiting"]:
            break
        await asyncio.sleep(0.1)
    else:
        raise RuntimeError(f"texts still run {REST_S:.0f} seconds after their clients have gone")
    await asyncio.sleep(1.0)  # for connections to be closed
    return await asyncio.to_thread(server.held)


async def metrics(port: int) -> dict[str, float]:
    lines = (await ask_once(port, "/metrics")).body.decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if line.startswith("infer:") and "{" not in line)
    return {name.removeprefix("infer:"): float(value) for name, value in pairs}
