"""Which replica was sent which beginnings of prompts."""

from __future__ import annotations

import json
import random
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence

from infer.server.text import as_json

CHUNK = 256  # bytes of a prompt: about a page of tokens
MOST_CHUNKS = 1 << 10  # of one prompt
MOST = 1 << 18  # chunks of all prompts: some 50 MB
FIELDS = ("tools", "instructions", "messages", "prompt", "input")  # of a body: what its prompt is made of, in order


def prompt_keys(body: bytes) -> list[int]:
    """A key for each whole chunk of a request's prompt. Equal keys: the prompts are alike up to the chunk's end."""
    try:
        fields = json.loads(body)
        prompt = b"".join(as_json(fields[name]) for name in FIELDS if fields.get(name) is not None)
    except (ValueError, AttributeError, RecursionError):  # the replica says what is wrong with it
        return []
    keys, key = [], 0
    for end in range(CHUNK, min(len(prompt), MOST_CHUNKS * CHUNK) + 1, CHUNK):
        key = hash((key, prompt[end - CHUNK : end]))
        keys.append(key)
    return keys


class PrefixTable:
    """Forgets what was not asked for longest."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._holders: OrderedDict[int, set[str]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._holders)

    def record(self, keys: Sequence[int], replica: str) -> None:
        for key in reversed(keys):  # so that a prompt's beginning is the last of it to be forgotten
            self._holders.setdefault(key, set()).add(replica)
            self._holders.move_to_end(key)
        while len(self._holders) > self._most:
            self._holders.popitem(last=False)

    def matches(self, keys: Sequence[int]) -> dict[str, int]:
        """How many chunks of a prompt each replica holds; those that hold none are left out."""
        found: dict[str, int] = {}
        for count, key in enumerate(keys, 1):
            holders = self._holders.get(key)
            if not holders:
                break
            for replica in holders:
                found[replica] = count
        return found

    def retain(self, replicas: Collection[str]) -> None:
        """Forget all others."""
        for key, holders in list(self._holders.items()):
            holders.intersection_update(replicas)
            if not holders:
                del self._holders[key]


def ordered(
    queues: Mapping[str, int], known: Mapping[str, int], tried: Collection[str] = (), slack: int = 0
) -> list[str]:
    """Replicas, the best for a prompt first: who knows most of it, of those that are not much busier than others.

    queues: how many requests each has. known: how many chunks of the prompt. tried: those that have failed.
    slack: requests that one may have more than the least busy, and still be preferred for what it knows.
    """
    most = min(queues.values(), default=0) + slack

    def rank(name: str) -> tuple[bool, bool, int, int, float]:
        busy = queues[name] > most
        return name in tried, busy, -known.get(name, 0), queues[name], random.random()

    return sorted(queues, key=rank)
