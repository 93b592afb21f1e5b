"""Replicas behind a router: the choice of a replica for each request, and the results.

random        any replica
round-robin   one after another
least         a replica with the fewest requests
two-choices   the less busy of two random replicas, as in Ray Serve
prefix        `infer deploy`'s: `PrefixTable` and `ordered` of infer.deploy.prefixes

As in `infer deploy`, a replica gets at most as many requests as it has rows. Others wait in the router, up to a limit;
more are refused.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from infer.deploy.prefixes import MAX_CHUNKS, MAX_PROMPT_CHUNKS, PrefixTable, ordered
from simulate.replica import Replica, Row, seconds_of
from simulate.steps import Steps
from simulate.traces import Arrival

Array = NDArray[np.float64]
CHUNK_TOKENS = 64  # of a prompt's chunk for the router: 256 bytes, at four to a token
SLACK = 8  # as `infer deploy` has it
PERCENTS = (50, 90, 99)


class Router(Protocol):
    def choose(self, arrival: Arrival, queues: NDArray[np.int64], most: int) -> int:
        """A replica with fewer than `most` requests. queues: the requests of each; at least one has fewer."""
        ...


class RandomRouter:
    def __init__(self, replicas: int, draw: random.Random) -> None:
        self.draw = draw

    def choose(self, arrival: Arrival, queues: NDArray[np.int64], most: int) -> int:
        choice = self.draw.randrange(len(queues))
        return choice if queues[choice] < most else int(self.draw.choice(np.flatnonzero(queues < most)))


class RoundRobin:
    def __init__(self, replicas: int, draw: random.Random) -> None:
        self._next = 0

    def choose(self, arrival: Arrival, queues: NDArray[np.int64], most: int) -> int:
        while queues[choice := self._next % len(queues)] >= most:
            self._next += 1
        self._next += 1
        return choice


class Least:
    def __init__(self, replicas: int, draw: random.Random) -> None:
        self._draw = draw

    def choose(self, arrival: Arrival, queues: NDArray[np.int64], most: int) -> int:
        return int(self._draw.choice(np.flatnonzero(queues == queues.min())))


class TwoChoices(RandomRouter):
    def choose(self, arrival: Arrival, queues: NDArray[np.int64], most: int) -> int:
        if len(queues) == 1:
            return 0
        choice = min(self.draw.sample(range(len(queues)), 2), key=queues.__getitem__)
        return choice if queues[choice] < most else super().choose(arrival, queues, most)


class PrefixRouter(Least):
    """Ranks only replicas with a cached prefix and one of the least busy: no other can be first."""

    def __init__(self, replicas: int, draw: random.Random, chunks: int = MAX_CHUNKS) -> None:
        super().__init__(replicas, draw)
        self._table = PrefixTable(chunks)

    def choose(self, arrival: Arrival, queues: NDArray[np.int64], most: int) -> int:
        keys = chunk_keys(arrival)
        known = {name: n for name, n in self._table.matches(keys).items() if queues[int(name)] < most}
        least = super().choose(arrival, queues, most)
        candidates = {name: int(queues[int(name)]) for name in (*known, str(least))}
        best = ordered(candidates, known, (), SLACK)[0]
        self._table.record(keys, best)
        return int(best)


ROUTERS: dict[str, Callable[[int, random.Random], Router]] = {
    "random": RandomRouter,
    "round-robin": RoundRobin,
    "least": Least,
    "two-choices": TwoChoices,
    "prefix": PrefixRouter,
}


def chunk_keys(arrival: Arrival) -> list[int]:
    """A key for each full chunk of a prompt, like `prompt_keys` of its bytes."""
    keys, start, at = list[int](), 0, CHUNK_TOKENS
    for part in arrival.parts:
        start += part.tokens
        while at <= start and len(keys) < MAX_PROMPT_CHUNKS:
            keys.append(hash((part.key, at)))
            at += CHUNK_TOKENS
    return keys


@dataclass(frozen=True)
class Cluster:
    steps: Steps
    replicas: int
    router: str
    front_s: float = 0.0  # from a client to the engine
    max_waiting: int = 512  # requests that wait for a replica
    prefixes: bool = True  # whether replicas remember prompts
    chunks: int = MAX_CHUNKS  # that the router remembers
    seed: int = 0


@dataclass(frozen=True)
class Outcome:
    """The results of a simulation."""

    cluster: Cluster
    rows: Sequence[Row]  # in the order of arrival; refused ones are not among them
    refused: int
    gaps: Mapping[int, int]
    hits: int
    prompt_tokens: int
    busy: float  # share of the time that replicas computed, until the last arrival
    preemptions: int

    def times(self, name: str) -> Array:
        """Times of all requests. name: `first`, `ended` or `arrival`."""
        if name == "arrival":
            return np.array([row.request.time for row in self.rows])
        return np.array([getattr(row, name) for row in self.rows])

    def figures(self, first_s: float, between_s: float, price: float = 0.0, warm_up: float = 0.0) -> dict[str, Any]:
        """first_s, between_s: targets for goodput. price: dollars per hour of a replica.

        Tokens per second and cost are measured from the first arrival to the last, without the first `warm_up` of that
        time.
        """
        arrival, first, ended = (self.times(name) for name in ("arrival", "first", "ended"))
        output = np.array([row.request.output for row in self.rows])
        mean_gap = (ended - first) / np.maximum(output - 1, 1)
        good = (first - arrival <= first_s) & (mean_gap <= between_s)
        span = float(arrival[-1] - arrival[0])
        window = max(span * (1 - warm_up), 1e-9)

        def made_by(time: float) -> float:
            """Tokens generated until a time, if each row generates its tokens evenly."""
            return float((output * np.clip((time - first) / np.maximum(ended - first, 1e-9), 0, 1)).sum())

        made = made_by(arrival[-1]) - made_by(arrival[0] + warm_up * span)
        count = len(self.rows)
        figures: dict[str, Any] = {
            "replicas": self.cluster.replicas,
            "router": self.cluster.router,
            "requests": count,
            "refused": self.refused,
            "seconds": float(ended.max() - arrival[0]),
            "tokens": int(output.sum()),
            "tokens_per_s": made / window,
            "good": int(good.sum()) / (count + self.refused),
            "goodput": int(good.sum()) / max(span, 1e-9),
            "busy": self.busy,
            "hits": self.hits / max(1, self.prompt_tokens),
            "preemptions": self.preemptions,
            "cost": price * self.cluster.replicas * window / 3600 / made * 1e6 if made else 0.0,
        }
        for name, values in (("first", first - arrival), ("whole", ended - arrival)):
            figures |= {
                f"{name}_p{p}_s": float(v) for p, v in zip(PERCENTS, np.percentile(values, PERCENTS), strict=True)
            }
        return figures | {f"between_p{p}_s": percentile_of(self.gaps, p) for p in PERCENTS}


def percentile_of(bins: Mapping[int, int], percent: float) -> float:
    left = sum(bins.values()) * percent / 100
    for each in sorted(bins):
        left -= bins[each]
        if left <= 0:
            return seconds_of(each)
    return 0.0


def run(cluster: Cluster, arrivals: Sequence[Arrival]) -> Outcome:
    """Simulate until every request has finished."""
    random.seed(cluster.seed)  # used by `ordered`
    draw = random.Random(cluster.seed)
    router = ROUTERS[cluster.router](cluster.replicas, draw)
    if isinstance(router, PrefixRouter):
        router = PrefixRouter(cluster.replicas, draw, cluster.chunks)
    replicas = [Replica(cluster.steps, cluster.prefixes) for _ in range(cluster.replicas)]
    queues = np.zeros(cluster.replicas, np.int64)
    most, waiting, rows, refused = cluster.steps.engine.max_rows, deque[Row](), list[Row](), 0
    events: list[tuple[float, int]] = []  # due times of replicas; some are outdated

    def send(row: Row, now: float) -> None:
        choice = router.choose(row.request, queues, most)
        before = replicas[choice].due
        replicas[choice].submit(row, now)
        queues[choice] += 1
        if replicas[choice].due != before:
            heappush(events, (replicas[choice].due, choice))

    def go_on(until: float) -> None:
        while events and events[0][0] <= until:
            now, which = heappop(events)
            replica = replicas[which]
            if replica.due != now:
                continue
            queues[which] -= len(replica.finish())
            if replica.due < float("inf"):
                heappush(events, (replica.due, which))
            while waiting and queues.min() < most:
                send(waiting.popleft(), now)

    for index, arrival in enumerate(arrivals):
        now = arrival.time + cluster.front_s
        go_on(now)
        row = Row(index, arrival)
        if queues.min() >= most:
            if len(waiting) >= cluster.max_waiting:
                refused += 1
                continue
            waiting.append(row)
        else:
            send(row, now)
        rows.append(row)
    end = arrivals[-1].time + cluster.front_s
    busy = sum(replica.busy + replica.busy_since(end) for replica in replicas)
    go_on(float("inf"))
    gaps: Counter[int] = Counter()
    for replica in replicas:
        gaps.update(replica.gaps)
    window = max(end - arrivals[0].time, 1e-9)
    return Outcome(
        cluster,
        rows,
        refused,
        gaps,
        sum(replica.hits for replica in replicas),
        sum(replica.prompt_tokens for replica in replicas),
        busy / window / cluster.replicas,
        sum(replica.scheduler.num_preemptions for replica in replicas),
    )
