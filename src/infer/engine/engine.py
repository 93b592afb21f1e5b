"""The engine: many sequences on one model, a step at a time. A step is schedule, run, commit. For one thread."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Self

import torch

from infer.cache.base import BaseCache, NoCache, unwrap
from infer.cache.pool import OutOfPages
from infer.cache.traced import TracedCache
from infer.engine.allocator import PagedAllocator, PerSequenceCaches
from infer.engine.draft import Drafter, Speculation
from infer.engine.memory import CacheMemory, pass_tokens
from infer.engine.model import (
    Model,
    backend_name,
    check_mode,
    model_device,
    model_dtype,
    model_name,
    quantized_weights,
)
from infer.engine.params import check_prefill_chunk
from infer.engine.runner import Runner, StepOutput
from infer.engine.scheduler import ScheduledTokens, Scheduler
from infer.engine.sequence import Sequence, Status
from infer.nn.quantized import BITS, describe_kinds
from infer.trace.record import Trace
from infer.version import version

MAX_ROWS = 256
PREFILL_CHUNKS = {"cuda": 4096}  # prompt tokens of one step, by the type of device; see `Scheduler`
DEFAULT_PREFILL_CHUNK = 128  # a CPU is as fast as with 512, and sequences that decode wait a quarter of the time
HISTORY_S, HISTORY = 5.0, 50  # seconds over which the speed is measured, and number of points
IDLE_S = 2 * HISTORY_S / HISTORY  # without a step, after which the measurement starts again

logger = logging.getLogger("infer.engine")


class EngineFailed(RuntimeError):
    """The engine failed, or was closed, before a sequence was finished."""


class Event(NamedTuple):
    """Something that happened to a sequence, or a step."""

    time: float  # by `time.perf_counter`
    kind: str  # "submitted" | "admitted" | "step" | "preempted" | "finished"
    sequence: Sequence | None = None
    scheduled: list[ScheduledTokens] = []  # noqa: RUF012 - of a step; never changed
    seconds: float = 0.0  # of a step


@dataclass(frozen=True)
class Stats:
    running: int
    waiting: int
    finished: int  # sequences, for whatever reason
    preemptions: int
    steps: int
    pages: int
    pages_free: int  # pages that only the prefix index holds are neither free nor used
    pages_used: int
    prompt_tokens: int  # computed: prompts without their cached prefixes
    cached_tokens: int  # of prompts, found in the prefix cache
    generated_tokens: int
    tokens_per_s: float  # generated, over the last seconds
    drafted_tokens: int = 0  # verified
    accepted_tokens: int = 0  # of these


class Engine:
    """Submit sequences, then call `step` until the engine is idle."""

    def __init__(
        self,
        model: Model,
        memory: CacheMemory | None = None,
        *,
        max_rows: int | None = None,
        prefill_chunk: int | None = None,
        on_full: str = "error",
        drafter: Drafter | None = None,
    ) -> None:
        """memory: for the caches of all sequences; None: each sequence brings its own.

        max_rows: sequences that run at once. prefill_chunk: prompt tokens of one step, of all prompts together.
        drafter: proposes tokens that the next step verifies.
        """
        if memory is not None and memory.model is not model:
            raise ValueError("the memory belongs to another model: keys and values depend on the model")
        check_mode(model)
        check_prefill_chunk(prefill_chunk)
        self.model, self.memory, self._on_full, self._given_chunk = model, memory, on_full, prefill_chunk
        self.context = model.config.max_position_embeddings
        self.runner = Runner(model)
        self.allocator: PerSequenceCaches | PagedAllocator
        self._page_tables_written_together: Callable[[], AbstractContextManager[None]] = nullcontext
        if memory is None:
            self.allocator, chunk = PerSequenceCaches(self.runner, self.context), prefill_chunk or sys.maxsize
        else:
            default = PREFILL_CHUNKS.get(self.runner.device.type, DEFAULT_PREFILL_CHUNK)
            chunk = pass_tokens(model.config, prefill_chunk) or default
            self.allocator = PagedAllocator(memory, self.runner, self.context, chunk)
            if memory.pool.device_tables is not None:
                self._page_tables_written_together = memory.pool.device_tables.written_together
            self.runner.on_change = memory.check_version  # a hook may be removed before the next admission
        rows = MAX_ROWS if max_rows is None else max_rows
        shared = prefill_chunk is None and chunk == PREFILL_CHUNKS.get(self.runner.device.type)
        self.scheduler = Scheduler(self.allocator, max_rows=rows, prefill_chunk=chunk, shared=shared)
        self.speculation: Speculation | None = None
        if drafter is not None:
            self.speculation = Speculation(drafter, model.config.vocab_size, padded=self.runner.pads_drafts)
        if drafter is not None and not self.runner.max_drafts(1):
            logger.warning("nothing is drafted: only kernels verify drafts, not %s", backend_name(model))
        self.num_finished = 0
        self._num_drafted = self._num_accepted = 0
        self._num_generated = self._num_prompt_tokens = self._num_cached_tokens = 0
        self._history: deque[tuple[float, int]] = deque(maxlen=HISTORY)  # times, and tokens generated by then
        self._listeners: list[Callable[[Event], None]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def is_idle(self) -> bool:
        return not (self.scheduler.running or self.scheduler.waiting)

    def check(self, sequence: Sequence) -> None:
        """Refuse a sequence that the memory could not hold if all of it were free."""
        self.allocator.check(sequence)

    def submit(self, sequence: Sequence) -> None:
        """Queue a sequence that `check` has accepted."""
        sequence.model_name = model_name(self.model)
        self.scheduler.submit(sequence)  # first: `close` finishes what the scheduler has
        self.allocator.submit(sequence)
        self._emit("submitted", sequence)

    def abort(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            if not sequence.is_finished:
                sequence.finish_reason = "interrupted"
                self._finish(sequence)

    def step(self) -> bool:
        """Schedule, run, commit. False: nothing could be scheduled."""
        if self.speculation is not None:
            self.speculation.draft(self.scheduler.running, self._max_drafts())
        with self._page_tables_written_together():
            scheduled = self.scheduler.schedule()
        self._after_schedule()
        if self.scheduler.admitted:
            scheduled = [each for each in scheduled if not each.sequence.is_finished]
        if not scheduled:
            return False
        num_accepted = self._num_accepted
        started_at = time.perf_counter()
        if not self._history or started_at - self._history[-1][0] > IDLE_S:
            self._history = deque([(started_at, self._num_generated)], HISTORY)  # idle time is not part of the speed
        drafted = {sequence: len(sequence.draft_token_ids) for sequence, _ in scheduled if sequence.draft_token_ids}
        filled = self.runner.launch(scheduled, more=bool(self.scheduler.waiting))
        plan = None if self.speculation is None else self.speculation.planned(scheduled)
        if drafted:  # some were not verified
            dropped = {sequence: count - len(sequence.draft_token_ids) for sequence, count in drafted.items()}
            scheduled = [ScheduledTokens(sequence, n - dropped.get(sequence, 0)) for sequence, n in scheduled]
        for output in filled:
            self._commit(output, started_at)
        outputs = self.runner.wait()
        now = time.perf_counter()
        if self._listeners:
            self._emit("step", scheduled=scheduled, seconds=now - started_at)
        for output in outputs:
            self._commit(output, now)
        if self.speculation is not None and plan is not None:
            accepted = self._num_accepted - num_accepted
            self.speculation.measured(plan, time.perf_counter() - self.runner.started_at, accepted)
        if now - self._history[-1][0] > HISTORY_S / HISTORY:
            self._history.append((now, self._num_generated))
        return True

    def _max_drafts(self) -> int:
        """Drafts of a sequence that the next step verifies, at most: captured, it does not beside prompts."""
        running = self.scheduler.running
        if self.runner.pads_drafts and (self.scheduler.admitted or any(s.is_prefill for s in running)):
            return 0  # more may be admitted
        return self.runner.max_drafts(len(running))

    def resync_with_cache(self, sequence: Sequence) -> None:
        """Resync num_computed_tokens with its own cache: the caller may have truncated it between two steps."""
        if sequence.cache is None or sequence.is_captured or sequence.recompute_tokens:
            return
        if sequence.status is Status.RUNNING and sequence.cache.seq_len != sequence.num_computed_tokens:
            sequence.num_computed_tokens, sequence.num_prefill_tokens = sequence.cache.seq_len, sequence.num_tokens

    def stats(self) -> Stats:
        """Thread-safe; not a consistent snapshot."""
        assert self.memory is not None
        scheduler, pool, history = self.scheduler, self.memory.pool, list(self._history)
        speed = 0.0
        if len(history) > 1:
            (first, before), (last, after) = history[0], history[-1]
            speed = (after - before) / (last - first) if time.perf_counter() - last < HISTORY_S else 0.0
        return Stats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            finished=self.num_finished,
            preemptions=scheduler.num_preemptions,
            steps=scheduler.num_steps,
            pages=pool.num_pages,
            pages_free=pool.num_free_pages,
            pages_used=len(self.memory.index.pages_in_use()),
            prompt_tokens=self._num_prompt_tokens,
            cached_tokens=self._num_cached_tokens,
            generated_tokens=self._num_generated,
            tokens_per_s=speed,
            drafted_tokens=self._num_drafted,
            accepted_tokens=self._num_accepted,
        )

    def watch(self, listener: Callable[[Event], None]) -> Callable[[], None]:
        """Call a function with every event. Returns a function that ends this."""
        self._listeners.append(listener)

        def unwatch() -> None:
            with suppress(ValueError):
                self._listeners.remove(listener)

        return unwatch

    def close(self, error: EngineFailed | None = None) -> None:
        """Finish all sequences with an error."""
        try:
            self.runner.close()  # first, once: each call to a device that has failed may hang
        finally:
            for sequence in [*self.scheduler.running, *self.scheduler.waiting]:
                with suppress(Exception):  # a failed device may not free its memory: its reader gets the error anyway
                    self._finish(sequence, error or EngineFailed("the engine was closed"))

    def _after_schedule(self) -> None:
        """Emit the events of a schedule, start traces, and fail the sequence that does not fit."""
        for sequence in self.scheduler.preempted:
            self._emit("preempted", sequence)
        self.allocator.checked_version = False
        for sequence in self.scheduler.admitted:
            if sequence.started_at is None:
                sequence.started_at = time.perf_counter()
                sequence.num_cached_tokens = sequence.num_computed_tokens
                self._num_cached_tokens += sequence.num_cached_tokens
                try:
                    self._start_trace(sequence)
                except BaseException as error:
                    self._finish(sequence, error)
                    continue
            self._emit("admitted", sequence)
        if self.scheduler.unschedulable is not None:
            full = OutOfPages("out of KV cache: caches outside the engine hold the remaining pages")
            self._finish(self.scheduler.unschedulable, full)

    def _start_trace(self, sequence: Sequence) -> None:
        if isinstance(sequence.recorder, Trace):
            settings, cached = self._run_settings(sequence), sequence.num_cached_tokens
            sequence.recorder.start(self.model.config, sequence.tokenizer, sequence.token_ids, cached, settings)

    def _commit(self, output: StepOutput, now: float) -> None:
        """Append the tokens chosen; finish the sequence if it is complete."""
        sequence, _, num_tokens, logits, *_ = output
        if sequence.is_finished:  # by an error in a callback, at another output of this step
            return
        if len(sequence.token_ids) == sequence.prompt_len:
            self._num_prompt_tokens += num_tokens
        try:
            count = self._update_sequence(output, now)
        except torch.AcceleratorError:  # the device has failed, for all sequences
            raise
        except BaseException as error:  # an error of its callbacks, SystemExit included, must not fail the batch
            self._finish(sequence, error)
            return
        if logits is not None and sequence.num_published_pages < len(sequence.page_hashes):
            self.allocator.publish(sequence)
        if sequence.finish_reason is not None:
            self._finish(sequence)
        else:
            if len(sequence.token_ids) > sequence.capacity and not sequence.recompute_tokens:
                self.allocator.switch_to_recompute(sequence)
            if count and sequence.notify is not None:
                sequence.notify(sequence)

    def _update_sequence(self, output: StepOutput, now: float) -> int:
        """Append the tokens chosen, and record them. Returns how many they are."""
        sequence, start, num_tokens, logits, chosen, terms = output
        before, drafted, accepted = len(sequence.token_ids), sequence.num_drafted, sequence.num_accepted
        try:
            if logits is None:
                sequence.commit_from_device(chosen, terms)
            elif self._is_filled(sequence, start + num_tokens):
                sequence.commit(start, num_tokens, logits)
            else:
                raise TypeError(
                    "the model has not filled the cache: `generate(..., use_kv_cache=False)` runs such models"
                )
        finally:  # an error at a later draft takes no token back
            count = len(sequence.token_ids) - before
            if logits is not None or self.memory is None:
                sequence.pass_started_at = sequence.pass_started_at or self.runner.started_at
                if count:
                    sequence.step_time_s, sequence.pass_started_at = now - sequence.pass_started_at, 0.0
            sequence.token_times.extend([now] * count)
            self._num_generated += count
            self._num_drafted += sequence.num_drafted - drafted
            self._num_accepted += sequence.num_accepted - accepted
        if logits is not None and sequence.recorder is not None and isinstance(sequence.cache, TracedCache):
            first = start + num_tokens - len(logits)  # position of the first logits
            for i in range(count):
                tokens, chosen_from = sequence.token_ids[: before + i + 1], logits[before + i - 1 - first]
                time_s, is_draft = sequence.step_time_s / count, i < sequence.num_accepted - accepted
                sequence.recorder.record(tokens, chosen_from, sequence.cache, time_s, i, is_draft)
        return count

    def _is_filled(self, sequence: Sequence, end: int) -> bool:
        """Whether a pass has written to the cache: other models than those of this package may not."""
        cache = None if self.memory is None or sequence.recompute_tokens else sequence.cache
        return cache is None or cache.seq_len == end

    def _finish(self, sequence: Sequence, error: BaseException | None = None) -> None:
        sequence.error = error
        try:
            self.allocator.cancel_wait(sequence)
            self.scheduler.finish(sequence)
        finally:
            if self.speculation is not None:
                self.speculation.finish(sequence)
            self.num_finished += 1
            self._emit("finished", sequence)
            if sequence.notify is not None:
                sequence.notify(sequence)

    def _emit(self, kind: str, sequence: Sequence | None = None, **more: Any) -> None:
        if self._listeners:
            event = Event(time.perf_counter(), kind, sequence, **more)
            for listener in list(self._listeners):
                try:
                    listener(event)
                except BaseException as error:  # it must not end the engine, not even by an exit
                    logger.error("a listener failed and was removed: %r", error)
                    with suppress(ValueError):
                        self._listeners.remove(listener)

    def _run_settings(self, sequence: Sequence) -> dict[str, Any]:
        """Settings to reproduce the run, beside the weights and the prompt, as JSON; a trace keeps them."""
        model, params = self.model, sequence.params
        cache = None if sequence.cache is None else unwrap(sequence.cache)
        dtype = str(model_dtype(model) or torch.float32).removeprefix("torch.")
        kinds = describe_kinds((weight.kind, weight.rows * weight.columns) for weight in quantized_weights(model))
        # JSON has no -inf.
        bias = {str(token): x if math.isfinite(x) else str(x) for token, x in params.logit_bias.items()}
        return {
            "model_type": model.config.model_type,
            "dtype": dtype,
            "quantize": kinds if kinds in BITS else None,  # otherwise weights are as in their file
            "weights": kinds or dtype,
            "device": str(model_device(model)),
            "backend": backend_name(model),
            "kv_cache": not isinstance(cache, NoCache),
            "cache_dtype": "int8" if isinstance(cache, BaseCache) and cache.dtype is torch.int8 else "auto",
            "prefill_chunk": self._given_chunk if self.memory is None else self.scheduler.prefill_chunk,
            "on_full": self._on_full,
            "params": asdict(params) | {"seed": sequence.seed, "logit_bias": bias, "stop": list(params.stop)},
            "versions": {"infer": version(), "torch": torch.__version__},
        }
