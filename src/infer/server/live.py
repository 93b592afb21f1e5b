"""The live page and what feeds it: who waits and runs, what each pass fed, who holds which page. Never a text.

The engine's thread only keeps events and, at most ten times a second, copies numbers between two steps. All else is
done by those who watch. While nobody does, nothing listens.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import aclosing, contextmanager
from dataclasses import asdict
from functools import cache
from importlib import resources
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from starlette.requests import Request
from starlette.responses import HTMLResponse, StreamingResponse
from starlette.routing import Route

from infer.engine.llm import LLM, Handle
from infer.engine.loop import Event, Loop, Task

INTERVAL_S = 0.1  # between two looks at the engine, whoever asks
QUIET_S = 15.0  # after which a comment keeps a stream open
PATIENCE_S = 1.0  # for the end of a step: the numbers that need no look are told meanwhile
CELLS = 2000  # of the map: pages of larger pools are told in blocks
ALIVE, ENDED = 96, 32  # requests that are told of at once
QUEUE = 1024  # requests among which these are looked for
PASSES = 512  # of the timeline, for those who come later
ROWS = 600  # of the passes in one update: where there are more, several passes are told as one
FREE, KEPT, SHARED = -3, -2, -1  # a page of nobody, of the prefix index alone, of several requests; else of this one

Record = dict[str, Any]
Numbers = npt.NDArray[np.int64]


class _Events:
    """What has happened since the last look, as far as it is told."""

    def __init__(self) -> None:
        self.passes: deque[Event] = deque(maxlen=PASSES)
        self.ended: deque[tuple[Task, float]] = deque(maxlen=ENDED)
        self.preempted: deque[tuple[int, float]] = deque(maxlen=ENDED)


class _Look(NamedTuple):
    """The engine between two steps."""

    time: float
    requests: list[Record]
    passes: list[Event]
    preempted: list[tuple[int, float]]
    holders: npt.NDArray[np.int32]  # of each page
    rows: list[tuple[int, Numbers]]  # requests, and the pages that each holds; -1 where it holds none


class _Told(NamedTuple):
    """What a viewer knows."""

    version: int = -1
    stats: Record | None = None


class Live:
    """What an engine does, for any number of viewers."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self._began = time.perf_counter()
        self._lock = threading.Lock()  # for viewers in several threads; the engine's thread does not take it
        self._viewers = 0
        self._events = _Events()  # replaced as a whole, as the engine's thread may be adding to it
        self._news = True  # something has happened since the last look
        # What is known from all looks, and the version since which it is.
        self._pending: Future[_Look] | None = None
        self._looked = -INTERVAL_S
        self._version = 0
        self._requests: dict[int, tuple[int, Record]] = {}  # those that ended come first, in that order
        self._told: frozenset[int] = frozenset()  # the others: they go on being told of
        self._timeline: deque[tuple[int, list[Any]]] = deque(maxlen=PASSES)
        self._marks: deque[tuple[int, tuple[int, float]]] = deque(maxlen=ENDED)
        self._pool: tuple[int, Record] = (0, {})
        self._lost = -1  # whoever knows no more than this version has missed the end of a request

    def snapshot(self) -> Record:
        """All of it. Waits for the end of a step: not for an event loop."""
        self._digest(self.llm.between_steps(self._look).result())
        return self._since(_Told())[0]

    async def updates(self, interval: float = INTERVAL_S) -> AsyncIterator[Record]:
        """First all of it, then what has changed: nothing but the time where nothing has."""
        with self._viewing():
            told = _Told()
            while True:
                try:
                    await self._refresh()
                except RuntimeError:  # it was closed, or has failed
                    yield {"time": self._now(), "stopped": True}
                    return
                if self._version:  # the first look may take a long step
                    update, told = self._since(told)
                    yield update
                await asyncio.sleep(interval)

    # In the engine's thread.

    def _listen(self, event: Event) -> None:
        self._news = True
        if event.kind == "pass":
            self._events.passes.append(event)
        elif event.task is not None and event.kind == "ended":
            self._events.ended.append((event.task, event.time))
        elif event.task is not None and event.kind == "preempted":
            self._events.preempted.append((number_of(event.task), round(event.time - self._began, 4)))

    def _look(self, loop: Loop) -> _Look:
        self._news = False
        events, self._events = self._events, _Events()
        running, waiting = loop.scheduler.running, loop.scheduler.waiting
        known, new = list[Task](), list[Task]()
        for task in chain(running, islice(waiting, QUEUE)):
            (known if number_of(task) in self._told else new).append(task)
        alive = [*known, *new][:ALIVE]
        return _Look(
            time=time.perf_counter(),
            requests=[
                *(self._record(task, ended) for task, ended in events.ended),
                *(self._record(task) for task in alive),
            ],
            passes=list(events.passes),
            preempted=list(events.preempted),
            holders=loop.memory.pool.holders.copy(),
            rows=[(number_of(task), task.cache.pages.flatten()) for task in running if task.cache is not None],
        )

    def _record(self, task: Task, ended: float | None = None) -> Record:
        request, times = task.request, task.times
        return {
            "id": number_of(task),
            "state": _state(task),
            "prompt": request.prompt_len,
            "known": task.known,
            "fed": min(task.held, request.prompt_len),
            "generated": len(times),
            "pages": 0 if task.cache is None else task.cache.held,
            "arrived": round(task.submitted - self._began, 4),
            "first_token": round(times[0] - task.submitted, 4) if times else None,
            "ended": None if ended is None else round(ended - self._began, 4),
            "reason": "failed" if task.error is not None else request.finish_reason,
        }

    # In the threads of those who watch.

    @contextmanager
    def _viewing(self) -> Iterator[None]:
        with self._lock:
            self._viewers += 1
            if self._viewers == 1:
                self._news, self._pending = True, None
                self._unwatch = self.llm.watch(self._listen)
        try:
            yield
        finally:
            with self._lock:
                self._viewers -= 1
                if not self._viewers:
                    self._unwatch()
                    self._events = _Events()

    async def _refresh(self) -> None:
        """Have a look, if something has happened; one for all who want it."""
        with self._lock:
            due = self._news and time.perf_counter() - self._looked >= INTERVAL_S
            if self._pending is None and due:
                self._looked = time.perf_counter()
                self._pending = self.llm.between_steps(self._look)
            pending = self._pending
        if pending is None:
            return
        await asyncio.wait([asyncio.wrap_future(pending)], timeout=PATIENCE_S)
        if pending.done():
            self._digest(pending.result())
            with self._lock:
                if self._pending is pending:
                    self._pending = None

    def _digest(self, look: _Look) -> None:
        at = round(look.time - self._began, 4)
        with self._lock:
            if at <= self._pool[1].get("time", -1.0):  # another viewer was here first
                return
            self._version += 1
            self._keep_requests(look.requests, at)
            for entry in _timeline(look.passes, self._requests, self._began):
                self._timeline.append((self._version, entry))
            self._marks.extend((self._version, mark) for mark in look.preempted)
            pool = _pool_map(look.holders, look.rows)
            changed = any(pool[key] != self._pool[1].get(key) for key in pool)
            self._pool = self._version if changed else self._pool[0], {**pool, "time": at}

    def _keep_requests(self, records: Sequence[Record], at: float) -> None:
        before, now = self._requests, {record["id"]: record for record in records}
        for number in self._told - now.keys():  # more have ended than were kept
            now[number] = {**before[number][1], "state": "ended", "pages": 0, "ended": at}
        merged = {number: both for number, both in before.items() if number not in now}
        for number, record in now.items():
            same = number in before and before[number][1] == record
            merged[number] = before[number] if same else (self._version, record)
        over = [number for number, (_, record) in merged.items() if record["state"] == "ended"]
        for number in over[:-ENDED]:
            self._lost = max(self._lost, merged.pop(number)[0] - 1)
        self._requests = merged
        self._told = frozenset(merged.keys() - set(over))

    def _since(self, told: _Told) -> tuple[Record, _Told]:
        stats = {**asdict(self.llm.stats())}
        stats["tokens_per_s"] = round(stats["tokens_per_s"], 1)
        with self._lock:
            known = told.version if told.version > self._lost else -1
            update: Record = {"time": self._now()}
            if known < 0:
                pool = self.llm.memory.pool
                update |= {"full": True, "page": {"tokens": pool.page, "bytes": pool.page_bytes}}
            if stats != told.stats or known < 0:
                update["stats"] = stats
            for key, kept in (
                ("requests", self._requests.values()),
                ("passes", self._timeline),
                ("preempted", self._marks),
            ):
                if (new := [each for version, each in kept if version > known]) or known < 0:
                    update[key] = new
            if self._pool[0] > known:
                update["pool"] = {key: value for key, value in self._pool[1].items() if key != "time"}
            return update, _Told(self._version, stats)

    def _now(self) -> float:
        return round(time.perf_counter() - self._began, 4)


def number_of(request: Task | Handle) -> int:
    """A request's short name: the how manyth it was. Of a handle only once a token of it has come."""
    task = request._tasks[0] if isinstance(request, Handle) else request
    return task.order[1]


def _state(task: Task) -> str:
    if task.done:
        return "ended"
    if not task.running:
        return "waiting" if task.began is None else "preempted"
    return "prefill" if not task.times or (task.left > 1 and not task.whole) else "decode"


def _timeline(passes: Sequence[Event], told: dict[int, Any], began: float) -> Iterator[list[Any]]:
    """[start, seconds, passes, [[request, tokens], ...]] of each pass, or of several at once."""
    together = max(1, -(-sum(len(event.fed) for event in passes) // ROWS))
    for at in range(0, len(passes), together):
        some = passes[at : at + together]
        start, end = some[0].time - some[0].seconds, some[-1].time
        fed: dict[int, int] = {}
        for event in some:
            for task, tokens in event.fed.items():
                if (number := number_of(task)) in told:
                    fed[number] = fed.get(number, 0) + tokens
        yield [round(start - began, 4), round(end - start, 4), len(some), [list(each) for each in fed.items()]]


def _pool_map(holders: npt.NDArray[np.int32], rows: Sequence[tuple[int, Numbers]]) -> Record:
    """Who holds each page, run by run; how many pages are held in which way."""
    count = len(holders)
    owners = np.where(holders > 0, KEPT, FREE).astype(np.int64)
    if rows:
        pages = np.concatenate([held for _, held in rows])
        requests = np.repeat([number for number, _ in rows], [len(held) for _, held in rows])
        held = pages >= 0
        owners[pages[held]] = requests[held]
        owners[np.bincount(pages[held], minlength=count) > 1] = SHARED
    block = -(-count // CELLS)
    padded = np.full(-(-count // block) * block, FREE, np.int64)
    padded[:count] = owners
    return {
        "pages": count,
        "free": int((owners == FREE).sum()),
        "kept": int((owners == KEPT).sum()),
        "shared": int((owners == SHARED).sum()),
        "own": int((owners >= 0).sum()),
        "block": block,  # pages of a cell, which is told as the one of them that is in use most: the greatest number
        "cells": _runs(padded.reshape(-1, block).max(axis=1)),
    }


def _runs(values: Numbers) -> list[int]:
    """[value, times, value, times, ...]"""
    starts = np.flatnonzero(np.concatenate([[True], values[1:] != values[:-1]]))
    times = np.diff(np.append(starts, len(values)))
    return np.stack([values[starts], times], axis=1).ravel().tolist()


@cache
def _template() -> str:
    return resources.files("infer.server").joinpath("page.html").read_text(encoding="utf-8")


def routes(live: Callable[[], Live], over: Callable[[], bool] = lambda: False) -> list[Route]:
    """The page at /, and the stream of updates that it reads at /live. over: whether the streams are to end."""

    async def page(request: Request) -> HTMLResponse:
        nonce = secrets.token_urlsafe(16)
        policy = (
            f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'; "
            "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        headers = {
            "Content-Security-Policy": policy,
            "Cache-Control": "no-store",  # a nonce is for once
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
        }
        return HTMLResponse(_template().replace("{{nonce}}", nonce), headers=headers)

    async def stream(request: Request) -> StreamingResponse:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(_events(live(), over), media_type="text/event-stream", headers=headers)

    return [Route("/", page), Route("/live", stream)]


async def _events(live: Live, over: Callable[[], bool] = lambda: False) -> AsyncIterator[str]:
    """Updates as server-sent events."""
    said = time.monotonic()
    async with aclosing(live.updates()) as updates:  # type: ignore[type-var]
        async for update in updates:
            if over():
                return
            if len(update) > 1:
                said = time.monotonic()
                yield f"data: {json.dumps(update, separators=(',', ':'))}\n\n"
            elif time.monotonic() - said > QUIET_S:
                said = time.monotonic()
                yield ": nothing new\n\n"
