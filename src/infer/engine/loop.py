"""Many requests on one model, a step at a time: what waits, what runs, and the pages that it runs in.

One step: the scheduler says who is in the next pass; the runner runs it; each request takes its token. Whoever has
computed a prompt, or is done, leaves its pages to those who come after. For one thread.
"""

from __future__ import annotations

import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from infer.backend import AHEAD, backend_for
from infer.cache.base import NoCache
from infer.cache.paged import PagedCache
from infer.cache.pool import NoPages, pages_for
from infer.cache.traced import TracedCache
from infer.engine.generate import Recorder, watching
from infer.engine.memory import CacheMemory, pass_tokens
from infer.engine.model import Model, model_device
from infer.engine.request import NoToken, Request
from infer.engine.result import GenerationResult, Timing
from infer.engine.runner import Flight, Runner
from infer.engine.scheduler import Job, Scheduler
from infer.engine.settings import run_settings
from infer.engine.store import page_keys
from infer.trace.record import Trace

MAX_ROWS = 256
CHUNKS = {"cuda": 4096}  # tokens of prompts in one pass, by the kind of device
CHUNK = 128  # on any other: a CPU is as fast as with 512, and rows that decode wait a quarter of the time
HISTORY_S, HISTORY = 5.0, 50  # over which the speed is measured, in seconds and in points


class EngineFailed(RuntimeError):
    """The engine has ended before a request has: it has failed, or was closed."""


class Event(NamedTuple):
    """Something that happened to a request, or a pass."""

    time: float  # by `time.perf_counter`
    kind: str  # "submitted" | "admitted" | "pass" | "preempted" | "ended"
    task: Task | None = None
    fed: Mapping[Task, int] = {}  # of a pass: tokens of each row
    seconds: float = 0.0  # of a pass


@dataclass(frozen=True)
class Stats:
    running: int
    waiting: int
    finished: int  # requests, ended in whatever way
    preemptions: int
    passes: int
    pages: int
    pages_free: int  # those that only the prefix index holds are not among them
    prompt_tokens: int  # that were computed
    prefix_hits: int  # tokens of prompts that did not have to be
    generated_tokens: int
    tokens_per_s: float  # generated, over the last seconds


class Task(Job):
    """A request in the loop."""

    __slots__ = (
        "began",
        "cache",
        "cache_bytes",
        "computed",
        "done",
        "error",
        "flight",
        "keys",
        "known",
        "name",
        "news",
        "recorder",
        "request",
        "submitted",
        "take",
        "times",
        "waits_for",
    )

    def __init__(
        self,
        request: Request,
        *,
        priority: int = 0,
        name: str = "",
        recorder: Recorder | None = None,
        news: Callable[[Task], None] | None = None,
    ) -> None:
        """recorder: watches the run. news: is told of each token, and of the end."""
        super().__init__(len(request.tokens), priority)
        self.request, self.name, self.recorder, self.news = request, name, recorder, news
        self.take = request.take_stopping if request.params.stop else request.take
        self.cache: PagedCache | None = None
        self.flight: Flight | None = None
        self.keys: list[str] = []  # of the prompt's pages
        self.computed = 0  # of these, how many are known or computed
        self.waits_for = ""  # the key of a page that another row is computing
        self.known = 0  # tokens of the prompt that did not have to be computed
        self.cache_bytes = 0  # that it has held at the end
        self.error: Exception | None = None
        self.submitted = time.perf_counter()
        self.began: float | None = None  # when its first pass did
        self.times: list[float] = []  # when each token came: what a reader in another thread goes by
        self.done = False  # whether all is there that `result` tells

    def result(self) -> GenerationResult:
        """Of a request that is over."""
        request, times = self.request, self.times
        began = self.submitted if self.began is None else self.began
        return GenerationResult(
            prompt_token_ids=request.prompt,
            token_ids=request.tokens[request.prompt_len :],
            text=request.text(),
            finish_reason=request.finish_reason or "interrupted",
            timing=Timing(
                times[0] - began if times else 0.0,
                [after - before for before, after in pairwise(times)],
                began - self.submitted,
            ),
            cache_memory_bytes=self.cache_bytes,
            known_tokens=self.known,
            seed=request.seed,
            logprobs=request.logprobs,
            prompt_logprobs=request.prompt_logprobs,
        )


class Loop:
    """Call `step` while there is something to do."""

    def __init__(
        self, model: Model, memory: CacheMemory, *, max_rows: int | None = None, prefill_chunk: int | None = None
    ) -> None:
        """max_rows: that run at once. prefill_chunk: tokens of prompts in one pass."""
        if memory.model is not model:
            raise ValueError("the memory is of another model: keys and values are each model's own")
        self.model, self.memory, self.runner = model, memory, Runner(model, lazy=True)
        self.context, self.device = model.config.max_position_embeddings, model_device(model)
        chunk = pass_tokens(model.config, prefill_chunk) or CHUNKS.get(self.device.type, CHUNK)
        with torch.inference_mode():
            captured = backend_for(model).decoding() is not None
        rows = MAX_ROWS if max_rows is None else max_rows
        self.scheduler: Scheduler[Task] = Scheduler(self, max_rows=rows, prefill_chunk=chunk, last_alone=captured)
        self.generated = self.prefilled = self.hits = self.finished = 0  # tokens, and requests
        self._history: deque[tuple[float, int]] = deque(maxlen=HISTORY)  # times, and tokens generated by then
        self._listeners: list[Callable[[Event], None]] = []
        self._ahead = AHEAD if captured or self.device.type == "cuda" else 0
        self._tasks: dict[Flight, Task] = {}
        self._computing: Counter[str] = Counter()  # pages of prompts that rows are about to compute
        self._waiters: dict[str, list[Task]] = {}  # and who waits for each

    @property
    def idle(self) -> bool:
        return not (self.scheduler.running or self.scheduler.waiting)

    def check(self, request: Request) -> None:
        """Refuse a request that the memory could not hold even alone."""
        pool, chunk = self.memory.pool, self.scheduler.prefill_chunk
        length = min(request.max_seq_len, self.context)
        needed = pages_for(self.model.config, length, pool.page, min(chunk, length)) + len(self.memory.index.windows)
        if needed > pool.count:
            raise NoPages(
                f"{length} positions take {needed * pool.page_bytes / 1e6:.1f} MB, but the memory for caches has "
                f"{pool.memory_bytes / 1e6:.1f}: lower max_new_tokens, or give caches more memory"
            )

    def submit(self, task: Task) -> None:
        """A request that `check` has let pass."""
        request = task.request
        if len(request.tokens) > self.context:
            task.whole = self.context
        else:
            task.keys = [*page_keys("", request.prompt, self.memory.pool.page), f"all {hash(tuple(request.prompt))}"]
        self.scheduler.submit(task)
        self._tell("submitted", task)

    def abort(self, tasks: Sequence[Task]) -> None:
        """They are not wanted any more."""
        for task in tasks:
            if not task.done:
                task.request.finish_reason = "interrupted"
                self._end(task)

    def step(self) -> bool:
        """One pass; False if nobody could be in it."""
        fed = self.scheduler.schedule()
        if self.scheduler.stuck is not None:
            self._fail(self.scheduler.stuck, NoPages("no memory is left for its cache: others hold it"))
        if not fed:
            return False
        counts = {task.flight or self._flight(task): n for task, n in fed.items()}
        started = time.perf_counter()
        outputs = self.runner.step(counts)
        now = time.perf_counter()
        if self._listeners:
            self._tell("pass", fed=fed, seconds=now - started)
        tasks = self._tasks
        for flight, token, logits, _ in outputs:
            self._take(tasks[flight], token, logits, now)
        if len(outputs) < len(counts):
            self._await(counts, {flight for flight, *_ in outputs})
        for flight, n in counts.items():
            if not flight.captured or flight.request.finish_reason is not None:
                self._passed(flight, n)
        if not self._history or now - self._history[-1][0] > HISTORY_S / HISTORY:
            self._history.append((now, self.generated))
        return True

    def stats(self) -> Stats:
        """From any thread: each number is right, if not all of the same moment."""
        scheduler, pool, history = self.scheduler, self.memory.pool, list(self._history)
        speed = 0.0
        if len(history) > 1:
            (first, before), (last, after) = history[0], history[-1]
            now = time.perf_counter()
            speed = (after - before) / (last - first) if now - last < HISTORY_S else 0.0
        return Stats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            finished=self.finished,
            preemptions=scheduler.preemptions,
            passes=scheduler.passes,
            pages=pool.count,
            pages_free=pool.free,
            prompt_tokens=self.prefilled,
            prefix_hits=self.hits,
            generated_tokens=self.generated,
            tokens_per_s=speed,
        )

    def watch(self, listener: Callable[[Event], None]) -> Callable[[], None]:
        """Let a function hear of all that happens; returns what ends that."""
        self._listeners.append(listener)

        def end() -> None:
            if listener in self._listeners:
                self._listeners.remove(listener)

        return end

    def _tell(self, kind: str, task: Task | None = None, **more: Any) -> None:
        if self._listeners:
            event = Event(time.perf_counter(), kind, task, **more)
            for listener in list(self._listeners):
                try:
                    listener(event)
                except Exception as error:  # it must not end everything
                    print(f"a listener failed and is left out: {error!r}", file=sys.stderr)
                    self._listeners.remove(listener)

    def close(self, error: EngineFailed | None = None) -> None:
        """End everything, with an error if there is one."""
        try:
            self.runner.close()  # first: a device that has failed must not be asked for each row
        finally:
            for task in [*self.scheduler.running, *self.scheduler.waiting]:
                self._fail(task, error or EngineFailed("the engine was closed"))
        self.runner.__exit__()

    # What the scheduler asks for.

    def admit(self, task: Task) -> int | None:
        if task.whole:
            return 0
        if task.waits_for in self._computing:
            return None
        self._wait_for(task, "")
        request = task.request
        cache = self.memory.cache(request.max_seq_len)
        self.memory.recall(cache, request.tokens[: request.scored])  # what has to be scored has to be computed
        computed = cache.seq_len // self.memory.pool.page
        if cache.seq_len == len(request.tokens) - 1:
            computed = len(task.keys)  # the last token is each row's own
        if request.scored is None and computed < len(task.keys) and task.keys[computed] in self._computing:
            self._wait_for(task, task.keys[computed])
            cache.reset()
            return None
        task.cache, task.computed = cache, computed
        self._computing.update(task.keys[computed:])
        return cache.seq_len

    def reserve(self, task: Task, n: int) -> int:
        cache = task.cache
        if cache is None:
            return task.held + n
        if task.flight is not None:
            self.runner.settle(task.flight)
        try:
            ready = cache.reserve(min(n + self._ahead, cache.capacity - cache.seq_len))
        except NoPages:
            return 0
        return ready if ready == cache.capacity else ready - self._ahead

    def spare(self, rows: int) -> bool:
        try:
            self.memory.pool.make_room(rows * len(self.memory.index.windows))
        except NoPages:
            return False
        return True

    def release(self, task: Task) -> None:
        if task.flight is not None and task.error is None and task.request.finish_reason is None:
            self._tell("preempted", task)
        self._let_go(task)

    # What becomes of a row.

    def _let_go(self, task: Task) -> None:
        """Of its row and its pages; what these hold is remembered."""
        if task.flight is not None:
            del self._tasks[task.flight]
            self.runner.retire(task.flight)
            task.flight = None
        if task.cache is not None:
            self._settle(task)
            task.cache_bytes = task.cache.memory_bytes
            if task.error is None:
                self.memory.keep(task.cache)
            task.cache.reset()
            task.cache = None

    def _flight(self, task: Task) -> Flight:
        if task.flight is None:
            if task.began is None:
                task.began = time.perf_counter()
                task.known = 0 if task.cache is None else task.cache.seq_len
                self.hits += task.known
                if isinstance(task.recorder, Trace):
                    self._start(task.recorder, task)
            cache = NoCache(1, self.device) if task.cache is None else task.cache
            task.flight = self.runner.admit(
                task.request, cache, watch=watching(task.recorder), name=task.name, scores=task.recorder
            )
            self._tasks[task.flight] = task
            self._tell("admitted", task)
        return task.flight

    def _start(self, trace: Trace, task: Task) -> None:
        request = task.request
        cache = NoCache(1, self.device) if task.cache is None else task.cache
        settings = run_settings(self.model, request, cache, self.scheduler.prefill_chunk)
        trace.start(self.model.config, request.tokenizer, request.tokens, task.known, settings)

    def _take(self, task: Task, token: int, logits: Tensor | None, now: float) -> None:
        request = task.request
        try:
            task.take(token)
        except NoToken as error:
            self._fail(task, error)
            return
        task.length += 1
        task.times.append(now)
        self.generated += 1
        if task.recorder is not None:
            self._record(task.recorder, task, logits, now)
        if request.finish_reason is None:
            if task.length > self.context:
                task.whole = self.context
                self._let_go(task)
            if task.news is not None:
                task.news(task)

    def _record(self, recorder: Recorder, task: Task, logits: Tensor | None, now: float) -> None:
        cache = task.flight and task.flight.cache
        if logits is not None and isinstance(cache, TracedCache):
            last = task.times[-2] if len(task.times) > 1 else task.began or now
            recorder.record(task.request.tokens, logits, cache, now - last)

    def _passed(self, flight: Flight, n: int) -> None:
        """After a pass: what it has computed of a prompt is there for others; and who has finished goes."""
        task = self._tasks.get(flight)
        if task is None:
            return
        if task.cache is not None and (n > 1 or task.computed < len(task.keys)):
            if task.cache.seq_len != task.held:
                raise TypeError(
                    "the model has not filled the cache: `generate(..., use_kv_cache=False)` runs such models"
                )
            self.prefilled += n
            self._share(task)
        if task.request.finish_reason is not None:
            self._end(task)

    def _await(self, counts: Mapping[Flight, int], given: set[Flight]) -> None:
        """Rows that have come to captured steps get their first token after those that are launched already."""
        for flight in counts:
            if flight.captured and flight not in given:
                self._tasks[flight].held -= 1

    def _share(self, task: Task) -> None:
        """Let others have what is computed of the prompt; all of it, where somebody waits for that."""
        cache = task.cache
        if cache is None or task.computed == len(task.keys):
            return
        left = len(task.request.tokens) - cache.seq_len
        if left > 1:
            self.memory.keep_prompt(cache)
            self._settle(task, cache.seq_len // self.memory.pool.page)
        else:
            others = (other for key in task.keys for other in self._waiters.get(key, ()))
            awaited = any(other.keys[-1] == task.keys[-1] for other in others)
            (self.memory.keep if awaited else self.memory.keep_prompt)(cache)
            self._settle(task)
            task.room = 0  # a page that others hold has to be copied before the next token

    def _settle(self, task: Task, computed: int | None = None) -> None:
        """Nobody need wait for pages up to here any more; None: for any."""
        passed = task.keys[task.computed : computed]
        self._computing.subtract(passed)
        for key in passed:
            if not self._computing[key]:
                del self._computing[key]
        task.computed += len(passed)

    def _wait_for(self, task: Task, key: str) -> None:
        if task.waits_for:
            self._waiters[task.waits_for].remove(task)
            if not self._waiters[task.waits_for]:
                del self._waiters[task.waits_for]
        if key:
            self._waiters.setdefault(key, []).append(task)
        task.waits_for = key

    def _end(self, task: Task) -> None:
        self._wait_for(task, "")
        self.scheduler.end(task)
        self.finished += 1
        task.done = True
        self._tell("ended", task)
        if task.news is not None:
            task.news(task)

    def _fail(self, task: Task, error: Exception) -> None:
        task.error = error
        self._end(task)
