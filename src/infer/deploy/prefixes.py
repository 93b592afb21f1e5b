"""Which replica has been sent which prompt prefixes."""

from __future__ import annotations

import json
import random
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence

from infer.server.wire import as_json

CHUNK = 256  # bytes of a prompt: about a page of tokens
MAX_PROMPT_CHUNKS = 1 << 10
MAX_CHUNKS = 1 << 18  # of all prompts: some 50 MB
# Fields of a request body that make its prompt, in order.
FIELDS = ("cache_salt", "tools", "instructions", "messages", "prompt", "input")


def prompt_keys(body: bytes) -> list[int]:
    """A key for each full chunk of a request's prompt. Equal keys: the prompts are equal up to the end of the chunk."""
    try:
        fields = json.loads(body)
        prompt = b"".join(as_json(fields[name]) for name in FIELDS if fields.get(name) is not None)
    except (ValueError, AttributeError, RecursionError):  # the replica reports the error
        return []
    keys, key = [], 0
    for end in range(CHUNK, min(len(prompt), MAX_PROMPT_CHUNKS * CHUNK) + 1, CHUNK):
        key = hash((key, prompt[end - CHUNK : end]))
        keys.append(key)
    return keys


class PrefixTable:
    """The replicas that have been sent each chunk; the least recently used chunks are evicted."""

    def __init__(self, max_chunks: int = MAX_CHUNKS) -> None:
        self._max_chunks = max_chunks
        self._holders: OrderedDict[int, set[str]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._holders)

    def record(self, keys: Sequence[int], replica: str) -> None:
        for key in reversed(keys):  # the beginning of a prompt is evicted last
            self._holders.setdefault(key, set()).add(replica)
            self._holders.move_to_end(key)
        while len(self._holders) > self._max_chunks:
            self._holders.popitem(last=False)

    def matches(self, keys: Sequence[int]) -> dict[str, int]:
        """How many chunks of a prompt each replica has, if any."""
        found: dict[str, int] = {}
        for count, key in enumerate(keys, 1):
            holders = self._holders.get(key)
            if not holders:
                break
            for replica in holders:
                found[replica] = count
        return found

    def retain(self, replicas: Collection[str]) -> None:
        """Drop all other replicas."""
        for key, holders in list(self._holders.items()):
            holders.intersection_update(replicas)
            if not holders:
                del self._holders[key]


def ordered(
    queues: Mapping[str, int], known: Mapping[str, int], tried: Collection[str] = (), slack: int = 0
) -> list[str]:
    """Replicas, the best for a prompt first: the longest prefix among replicas that are not much busier than others.

    queues: requests of each replica. known: chunks of the prompt that each has. tried: replicas that have failed.
    slack: a replica with at most so many requests more than the least busy one is still chosen by its prefix.
    """
    most = min(queues.values(), default=0) + slack

    def rank(name: str) -> tuple[bool, bool, int, int, float]:
        busy = queues[name] > most
        return name in tried, busy, -known.get(name, 0), queues[name], random.random()

    return sorted(queues, key=rank)
