"""Arrival times, lengths and common prefixes of requests: random, or from a file.

A prompt is a list of parts. Parts with the same key hold the same tokens, and so does everything before them. The
answer has a key as well: a chat's next prompt begins with the last one and its answer.

Files: CSV as the Azure LLM inference traces (TIMESTAMP,ContextTokens,GeneratedTokens), whose prompts have nothing in
common; JSONL as Mooncake's (timestamp in ms, input_length, output_length, hash_ids of blocks of 512 tokens).
"""

from __future__ import annotations

import csv
import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from heapq import heappop, heappush
from itertools import count, islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple

BLOCK = 512  # tokens of a Mooncake block
AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


class Part(NamedTuple):
    """A piece of a prompt."""

    key: int
    tokens: int


class Arrival(NamedTuple):
    """A request before it is sent."""

    time: float  # in seconds
    parts: tuple[Part, ...]
    output: int  # tokens of the answer
    answer: int  # the key of the answer

    @property
    def prompt(self) -> int:
        return sum(part.tokens for part in self.parts)


class BadTrace(ValueError):
    """A file that cannot be read, and where."""


@dataclass(frozen=True)
class Shape:
    """What synthetic requests look like. Lengths are log-normal: a median, and the spread of their logarithm."""

    prompt: tuple[float, float] = (300.0, 1.0)
    output: tuple[float, float] = (120.0, 0.8)
    chats: float = 0.4  # share of requests that are turns of a chat
    turns: float = 4.0  # of a chat, on average
    think_s: float = 20.0  # at least so long after a turn comes the next
    documents: float = 0.3  # share of requests that ask about a document
    document: tuple[float, float] = (1500.0, 0.6)
    asked: int = 20  # how often, on average over all documents; a few are asked about much more often
    context: int = 8192  # prompt and answer


class Bursts(NamedTuple):
    """Poisson arrivals at a rate that switches between two values."""

    factor: float = 3.0  # while a burst lasts, to the mean rate
    share: float = 0.25  # of the time
    seconds: float = 4.0  # of a burst, on average


BURSTS, SHAPE = Bursts(), Shape()


def poisson_times(rate: float, draw: random.Random) -> Iterator[float]:
    now = 0.0
    while True:
        now += draw.expovariate(rate)
        yield now


def burst_times(rate: float, draw: random.Random, bursts: Bursts = BURSTS) -> Iterator[float]:
    """Poisson arrivals in bursts and between them, at the mean rate. When bursts are, the seed alone decides."""
    quiet = max(0.0, (1 - bursts.factor * bursts.share) / (1 - bursts.share))
    quiet_s = bursts.seconds * (1 - bursts.share) / bursts.share
    now, switches = 0.0, random.Random(draw.random())
    bursting = switches.random() < bursts.share
    while True:
        end = now + switches.expovariate(1 / (bursts.seconds if bursting else quiet_s))
        while rate_now := rate * (bursts.factor if bursting else quiet):
            now += draw.expovariate(rate_now)
            if now > end:
                break
            yield now
        now, bursting = end, not bursting


SYNTHETIC: dict[str, Callable[[float, random.Random], Iterator[float]]] = {
    "poisson": poisson_times,
    "bursts": burst_times,
}


class _Chat(NamedTuple):
    ready: float  # when the next turn may come
    order: int
    parts: tuple[Part, ...]  # so far, the last answer included


def synthetic(kind: str, rate: float, requests: int, shape: Shape = SHAPE, seed: int = 0) -> list[Arrival]:
    """rate: requests per second in total, exact over the full trace."""
    times, lengths = list(islice(SYNTHETIC[kind](rate, random.Random(seed)), requests)), random.Random(seed + 1)
    share = requests / rate / times[-1]
    keys, found, chats = count(1), list[Arrival](), list[_Chat]()
    number = max(1, round(requests * shape.documents / shape.asked))
    most = shape.context * 3 // 4
    documents = [Part(next(keys), _length(lengths, shape.document, most)) for _ in range(number)]
    for time in times:
        now, kind_of = time * share, lengths.random()
        output = _length(lengths, shape.output, shape.context // 4)
        own = Part(next(keys), _length(lengths, shape.prompt, most))
        parts: tuple[Part, ...] = (own,)
        in_chat = kind_of < shape.chats
        if in_chat and chats and chats[0].ready <= now and lengths.random() >= 1 / shape.turns:
            parts = (*heappop(chats).parts, own)
        elif 0 <= kind_of - shape.chats < shape.documents:
            # The n-th document is asked about 1 / n as often as the first.
            parts = (documents[min(number - 1, int(number ** lengths.random()) - 1)], own)
        if sum(part.tokens for part in parts) + output > shape.context:
            parts = (own,)
        arrival = Arrival(now, parts, output, next(keys))
        if in_chat:
            heappush(chats, _Chat(now + shape.think_s, arrival.answer, (*parts, Part(arrival.answer, output))))
        found.append(arrival)
    return found


def _length(draw: random.Random, lengths: tuple[float, float], most: int) -> int:
    median, spread = lengths
    return min(most, max(1, round(draw.lognormvariate(math.log(median), spread))))


def read_trace(path: Path) -> list[Arrival]:
    """A file; the first request arrives at second 0."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise BadTrace(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise BadTrace(f"{path} is no text") from None
    arrivals = list(_mooncake(path, lines) if path.suffix == ".jsonl" else _azure(path, lines))
    if not arrivals:
        raise BadTrace(f"{path} has no requests")
    for number, (before, after) in enumerate(pairwise(arrivals), 2):
        if after.time < before.time:
            raise BadTrace(f"{path}, request {number}: it comes before the one in front of it")
    first = arrivals[0].time
    return [arrival._replace(time=arrival.time - first) for arrival in arrivals]


def _azure(path: Path, lines: Sequence[str]) -> Iterator[Arrival]:
    reader = csv.DictReader(lines)
    if missing := [name for name in AZURE if name not in (reader.fieldnames or ())]:
        raise BadTrace(f"{path}, line 1: there is no column {missing[0]}; a CSV trace has {','.join(AZURE)}")
    keys = count(1)
    for row in reader:
        where = f"{path}, line {reader.line_num}"
        stamp = row["TIMESTAMP"] or ""
        try:
            time = datetime.fromisoformat(stamp.strip()[:26]).timestamp()
        except ValueError:
            raise BadTrace(f"{where}: TIMESTAMP is {stamp!r}, not as 2023-11-16 18:15:46.680590") from None
        prompt, output = (_whole(where, name, row[name]) for name in AZURE[1:])
        yield Arrival(time, (Part(next(keys), prompt),), output, next(keys))


def _mooncake(path: Path, lines: Sequence[str]) -> Iterator[Arrival]:
    answers = count(-1, -1)
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except ValueError:
            raise BadTrace(f"{where}: it is no JSON") from None
        if not isinstance(row, dict):
            raise BadTrace(f"{where}: it is no object")
        time = row.get("timestamp")
        if not isinstance(time, int | float) or isinstance(time, bool) or not 0 <= time < math.inf:
            raise BadTrace(f"{where}: timestamp is {time!r}, not a number of milliseconds")
        prompt, output = (_whole(where, name, row.get(name)) for name in ("input_length", "output_length"))
        blocks = row.get("hash_ids", [])
        if not isinstance(blocks, list) or not all(type(block) is int for block in blocks):
            raise BadTrace(f"{where}: hash_ids is {str(blocks)[:40]!r}, not a list of integers")
        if blocks and len(blocks) != -(-prompt // BLOCK):
            raise BadTrace(f"{where}: {len(blocks)} hash_ids for {prompt} tokens, not {-(-prompt // BLOCK)}")
        parts, key = list[Part](), 0
        for at, block in enumerate(blocks):
            key = hash((key, block))
            parts.append(Part(key, min(BLOCK, prompt - at * BLOCK)))
        yield Arrival(time / 1e3, tuple(parts) or (Part(next(answers), prompt),), output, next(answers))


def _whole(where: str, name: str, value: Any) -> int:
    try:
        number = int(value) if isinstance(value, str) else value
        if type(number) is int and number >= 1:
            return number
    except ValueError:
        pass
    raise BadTrace(f"{where}: {name} is {value!r}, not a positive integer")


def fitted(arrivals: Sequence[Arrival], context: int) -> tuple[list[Arrival], int]:
    """Those that a context holds, and how many it does not."""
    fit = [arrival for arrival in arrivals if arrival.prompt + arrival.output <= context]
    return fit, len(arrivals) - len(fit)


def at_rate(arrivals: Sequence[Arrival], rate: float) -> list[Arrival]:
    """The same requests, sooner or later, so that so many come in a second."""
    span = arrivals[-1].time - arrivals[0].time
    share = len(arrivals) / rate / span if span else 0.0
    return [arrival._replace(time=arrival.time * share) for arrival in arrivals]
