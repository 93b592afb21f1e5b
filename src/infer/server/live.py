"""The live page and its data: waiting and running requests, the tokens of each pass, the owner of each page. No text.

The engine's thread only collects events and, at most ten times a second, copies numbers between two steps; viewers do
the rest. Without viewers nothing listens.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from collections.abc import Sequence as Collection
from contextlib import aclosing, contextmanager
from dataclasses import asdict
from importlib import resources
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from starlette.requests import Request
from starlette.responses import HTMLResponse, StreamingResponse
from starlette.routing import Route

from infer.cache.base import unwrap
from infer.cache.paged import PagedCache
from infer.engine.engine import Engine, Event
from infer.engine.llm import LLM, Handle
from infer.engine.sequence import Sequence, Status

INTERVAL_S = 0.1  # between two snapshots of the engine, for all viewers together
KEEP_ALIVE_S = 15.0  # without an update, after which a comment keeps the stream open
SNAPSHOT_TIMEOUT_S = 1.0  # to wait for the end of a step; viewers get the stats meanwhile
MAX_CELLS = 2000  # of the map: a cell of a larger pool is a block of pages
MAX_ALIVE, MAX_ENDED = 96, 32  # requests in an update
MAX_QUEUE = 1024  # waiting requests that are considered for it
MAX_PASSES = 512  # of the timeline, for viewers that connect later
MAX_ROWS = 600  # of all passes in one update; beyond that, passes are merged
FREE, KEPT, SHARED = -3, -2, -1  # a page of nobody, of the prefix index alone, of several requests; else its request

Record = dict[str, Any]
Numbers = npt.NDArray[np.int64]


class _Snapshot(NamedTuple):
    """The engine between two steps."""

    time: float
    requests: list[Record]
    passes: Collection[Event]
    preempted: list[tuple[int, float]]
    holders: npt.NDArray[np.int32]  # how many hold each page
    rows: list[tuple[int, Numbers]]  # running requests and their page tables; -1 where there is no page


class _Seen(NamedTuple):
    """What a viewer has got so far."""

    version: int = -1
    stats: Record | None = None
    requests: dict[int, Record] = {}  # noqa: RUF012 - never changed
    pool: Record | None = None


class Live:
    """Snapshots and updates of an engine, for any number of viewers in one event loop."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self._start = time.perf_counter()
        self._num_viewers = 0
        self._events = _no_events()  # replaced, never cleared: the engine's thread may be adding to it
        self._changed = True  # since the last snapshot
        self._pending: asyncio.Future[_Snapshot] | None = None
        self._pending_since = -INTERVAL_S
        # Merged from all snapshots; passes and preemptions with the number of the snapshot that they came with.
        self._version = 0
        self._requests: dict[int, Record] = {}  # replaced, never changed; ended ones first, in the order of their end
        self._timeline: deque[tuple[int, list[Any]]] = deque(maxlen=MAX_PASSES)
        self._preempted: deque[tuple[int, tuple[int, float]]] = deque(maxlen=MAX_ENDED)
        self._pool: Record = {}

    async def updates(self, interval: float = INTERVAL_S) -> AsyncIterator[Record]:
        """First everything, then the changes; only the time if there are none."""
        with self._viewing():
            seen = _Seen()
            while True:
                try:
                    await self._refresh()
                except RuntimeError:  # the engine was closed or has failed
                    yield {"time": self._now(), "stopped": True}
                    return
                if self._version:  # the first snapshot may wait for a long step
                    update, seen = self._since(seen)
                    yield update
                await asyncio.sleep(interval)

    # In the engine's thread.

    def _on_event(self, event: Event) -> None:
        self._changed = True
        if event.kind in self._events:
            self._events[event.kind].append(event)

    def _take_snapshot(self, engine: Engine) -> _Snapshot:
        self._changed = False
        events, self._events = self._events, _no_events()
        running, shown = engine.scheduler.running, self._requests
        alive = sorted(  # sequences that viewers know come first, and so stay until they end
            chain(running, islice(engine.scheduler.waiting, MAX_QUEUE)),
            key=lambda sequence: number_of(sequence) not in shown,
        )
        ended = [(event.sequence, event.time) for event in events["finished"] if event.sequence is not None]
        return _Snapshot(
            time=time.perf_counter(),
            requests=[self._record(*each) for each in ended] + [self._record(each) for each in alive[:MAX_ALIVE]],
            passes=list(events["step"]),
            preempted=[
                (number_of(event.sequence), self._seconds(event.time))
                for event in events["preempted"]
                if event.sequence is not None
            ],
            holders=self.llm.memory.pool.ref_counts.copy(),
            rows=[
                (number_of(sequence), cache.page_table.flatten())
                for sequence in running
                if (cache := _paged_cache(sequence)) is not None
            ],
        )

    def _record(self, sequence: Sequence, ended: float | None = None) -> Record:
        times, cache = sequence.token_times, _paged_cache(sequence)
        return {
            "id": number_of(sequence),
            "state": _state(sequence),
            "prompt": sequence.prompt_len,
            "cached": sequence.num_cached_tokens,
            "computed": min(sequence.num_computed_tokens, sequence.prompt_len),
            "generated": len(times),
            "pages": 0 if cache is None else cache.num_pages,
            "arrived": self._seconds(sequence.submitted_at),
            "first_token": round(times[0] - sequence.submitted_at, 4) if times else None,
            "ended": None if ended is None else self._seconds(ended),
            "reason": "failed" if sequence.error is not None else sequence.finish_reason,
        }

    # In the viewers' event loop.

    @contextmanager
    def _viewing(self) -> Iterator[None]:
        self._num_viewers += 1
        if self._num_viewers == 1:
            self._changed, self._pending = True, None
            self._unwatch = self.llm.watch(self._on_event)
        try:
            yield
        finally:
            self._num_viewers -= 1
            if not self._num_viewers:
                self._unwatch()
                self._events = _no_events()

    async def _refresh(self) -> None:
        """Take and merge a snapshot, one for all viewers, if something has changed."""
        if self._pending is None and self._changed and time.perf_counter() - self._pending_since >= INTERVAL_S:
            self._pending_since = time.perf_counter()
            self._pending = asyncio.wrap_future(self.llm.between_steps(self._take_snapshot))
        if (pending := self._pending) is None:
            return
        await asyncio.wait([pending], timeout=SNAPSHOT_TIMEOUT_S)
        if pending.done() and self._pending is pending:  # else another viewer has merged it
            self._pending = None
            self._merge(pending.result())

    def _merge(self, snapshot: _Snapshot) -> None:
        self._version += 1
        self._requests = self._merged(snapshot.requests, self._seconds(snapshot.time))
        for entry in _timeline(snapshot.passes, self._requests, self._start):
            self._timeline.append((self._version, entry))
        self._preempted.extend((self._version, mark) for mark in snapshot.preempted)
        pool = _pool_map(snapshot.holders, snapshot.rows)
        self._pool = self._pool if pool == self._pool else pool

    def _merged(self, records: Collection[Record], at: float) -> dict[int, Record]:
        """The requests after a snapshot; a record that is equal to the one before is the same object."""
        before, now = self._requests, {record["id"]: record for record in records}
        for number, record in before.items():
            if record["state"] != "ended" and number not in now:  # more have ended than events are kept
                now[number] = {**record, "state": "ended", "pages": 0, "ended": at}
        merged = {number: record for number, record in before.items() if number not in now}
        for number, record in now.items():
            merged[number] = before[number] if before.get(number) == record else record
        ended = [number for number, record in merged.items() if record["state"] == "ended"]
        for number in ended[:-MAX_ENDED]:
            del merged[number]
        return merged

    def _since(self, seen: _Seen) -> tuple[Record, _Seen]:
        """What has changed since a viewer's last update."""
        if any(record["state"] != "ended" and number not in self._requests for number, record in seen.requests.items()):
            seen = _Seen()  # it has missed the end of a request
        stats = asdict(self.llm.stats())
        stats["tokens_per_s"] = round(stats["tokens_per_s"], 1)
        update: Record = {"time": self._now()}
        is_first = seen.version < 0
        if is_first:
            pool = self.llm.memory.pool
            update |= {"full": True, "page": {"tokens": pool.page_size, "bytes": pool.page_bytes}}
        changes: Record = {
            "stats": stats if stats != seen.stats else None,
            "requests": [each for number, each in self._requests.items() if seen.requests.get(number) is not each],
            "passes": [entry for version, entry in self._timeline if version > seen.version],
            "preempted": [mark for version, mark in self._preempted if version > seen.version],
            "pool": self._pool if self._pool is not seen.pool else None,
        }
        update |= {key: value for key, value in changes.items() if value or is_first}
        return update, _Seen(self._version, stats, self._requests, self._pool)

    def _now(self) -> float:
        return self._seconds(time.perf_counter())

    def _seconds(self, at: float) -> float:
        return round(at - self._start, 4)


def number_of(request: Sequence | Handle) -> int:
    """A request's number, counted in the order of arrival. A handle has it only after its first token."""
    return (request.sequences[0] if isinstance(request, Handle) else request).arrival


def _paged_cache(sequence: Sequence) -> PagedCache | None:
    cache = None if sequence.cache is None else unwrap(sequence.cache)
    return cache if isinstance(cache, PagedCache) else None


def _no_events() -> dict[str, deque[Event]]:
    """The latest events since the last snapshot, by their kind."""
    sizes = {"step": MAX_PASSES, "finished": MAX_ENDED, "preempted": MAX_ENDED}
    return {kind: deque(maxlen=size) for kind, size in sizes.items()}


def _state(sequence: Sequence) -> str:
    if sequence.status is Status.FINISHED:
        return "ended"
    if sequence.status is Status.WAITING:
        return "waiting" if sequence.started_at is None else "preempted"
    return "prefill" if not sequence.token_times or sequence.is_prefill else "decode"


def _timeline(passes: Collection[Event], requests: dict[int, Any], start: float) -> Iterator[list[Any]]:
    """[start, seconds, number of passes, [[request, tokens], ...]] of each pass, or of several merged ones."""
    size = max(1, -(-sum(len(event.scheduled) for event in passes) // MAX_ROWS))
    for at in range(0, len(passes), size):
        merged = passes[at : at + size]
        first, last = merged[0].time - merged[0].seconds, merged[-1].time
        tokens: dict[int, int] = {}
        for event in merged:
            for sequence, count in event.scheduled:
                if (number := number_of(sequence)) in requests:
                    tokens[number] = tokens.get(number, 0) + count
        yield [round(first - start, 4), round(last - first, 4), len(merged), [list(each) for each in tokens.items()]]


def _pool_map(holders: npt.NDArray[np.int32], rows: Collection[tuple[int, Numbers]]) -> Record:
    """The owner of each page, run-length encoded, and the number of pages of each kind."""
    count = len(holders)
    owners = np.where(holders > 0, KEPT, FREE).astype(np.int64)
    if rows:
        pages = np.concatenate([held for _, held in rows])
        requests = np.repeat([number for number, _ in rows], [len(held) for _, held in rows])
        held = pages >= 0
        owners[pages[held]] = requests[held]
        owners[np.bincount(pages[held], minlength=count) > 1] = SHARED
    block = -(-count // MAX_CELLS)
    padded = np.full(-(-count // block) * block, FREE, np.int64)
    padded[:count] = owners
    return {
        "pages": count,
        "free": int((owners == FREE).sum()),
        "kept": int((owners == KEPT).sum()),
        "shared": int((owners == SHARED).sum()),
        "own": int((owners >= 0).sum()),
        "block": block,  # pages per cell; a cell shows the greatest owner, so that pages in use are seen
        "cells": _run_lengths(padded.reshape(-1, block).max(axis=1)),
    }


def _run_lengths(values: Numbers) -> list[int]:
    """[value, times, value, times, ...]"""
    starts = np.flatnonzero(np.concatenate([[True], values[1:] != values[:-1]]))
    times = np.diff(np.append(starts, len(values)))
    return np.stack([values[starts], times], axis=1).ravel().tolist()


def routes(live: Callable[[], Live], closing: Callable[[], bool] = lambda: False) -> list[Route]:
    """The page at /, and its stream of updates at /live. closing: whether streams should end."""
    template = resources.files("infer.server").joinpath("page.html").read_text(encoding="utf-8")

    async def page(request: Request) -> HTMLResponse:
        nonce = secrets.token_urlsafe(16)
        policy = (
            f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'; "
            "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        headers = {
            "Content-Security-Policy": policy,
            "Cache-Control": "no-store",  # a nonce is used once
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
        }
        return HTMLResponse(template.replace("{{nonce}}", nonce), headers=headers)

    async def stream(request: Request) -> StreamingResponse:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(_events(live(), closing), media_type="text/event-stream", headers=headers)

    return [Route("/", page), Route("/live", stream)]


async def _events(live: Live, closing: Callable[[], bool] = lambda: False) -> AsyncIterator[str]:
    """Updates as server-sent events."""
    last = time.monotonic()
    async with aclosing(live.updates()) as updates:  # type: ignore[type-var]
        async for update in updates:
            if closing():
                return
            if len(update) > 1:
                last = time.monotonic()
                yield f"data: {json.dumps(update, separators=(',', ':'))}\n\n"
            elif time.monotonic() - last > KEEP_ALIVE_S:
                last = time.monotonic()
                yield ": keep-alive\n\n"
