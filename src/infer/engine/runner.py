"""Rows in flight on a backend: requests are admitted and retired one by one while others go on.

A step feeds every row what its cache does not hold yet: a prompt, a chunk of one, or the token chosen last. On a GPU,
rows with one token to feed go through captured steps, one of which is launched ahead.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import repeat
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor

from infer import progress
from infer.backend import Backend, Row, backend_for
from infer.cache.base import Cache, NoCache
from infer.cache.debug import debugged
from infer.engine.model import Model, model_device
from infer.engine.params import SamplingParams
from infer.engine.request import Request
from infer.nn.module import Module

PASS_TOKENS = 8192  # that prompts are packed into one pass up to
Watch = Callable[[Cache], Cache]


class PromptLogits(Protocol):
    """What looks at a prompt's logits while they are computed."""

    def wanted(self, start: int, stop: int) -> int: ...  # of the positions that a pass feeds, how many of the last
    def add_logits(self, start: int, logits: Tensor) -> None: ...  # [n, V], from position start on


class Flight:
    """A request on its way."""

    __slots__ = ("cache", "captured", "full", "name", "prefill_chunk", "request", "room", "scores", "started", "watch")

    def __init__(
        self,
        request: Request,
        cache: Cache,
        prefill_chunk: int | None,
        watch: Watch,
        name: str,
        scores: PromptLogits | None,
    ) -> None:
        self.request, self.prefill_chunk, self.watch, self.name = request, prefill_chunk, watch, name
        self.scores = scores
        self.cache = watch(cache)
        self.room = cache.capacity  # tokens that fit
        self.full = False  # whether the context is used up: each step then feeds the last tokens that fit, anew
        self.captured = False  # whether it goes through captured steps
        self.started: float | None = None  # when the pass, or the first of several, that leads to its next token began


class Fed(NamedTuple):
    """What a row feeds in a pass."""

    flight: Flight
    tokens: Sequence[int]
    start: int  # position of the first
    complete: bool  # whether nothing is left to be fed then

    @property
    def is_prefill(self) -> bool:
        return len(self.flight.request.tokens) == self.flight.request.prompt_len


# The next token of a row, for its request to take, or -1: none can be chosen, because the logits are no numbers. The
# logits [V] that it was chosen from, None where the device chose; and when the step began, by `time.perf_counter`.
Output = tuple[Flight, int, Tensor | None, float]


class Runner:
    """Drives requests through a model: within it, call `step`, and retire what has finished."""

    def __init__(self, model: Model, lazy: bool = False) -> None:
        """lazy: caches of rows in captured steps hear of their tokens when `settle` is called, or the row leaves."""
        self.model, self._lazy = model, lazy
        self.flights: dict[Flight, None] = {}  # in the order of their coming
        self._device = model_device(model)
        self._context = model.config.max_position_embeddings
        self._backend: Backend | None = None
        self._decided_at = -1  # by `Module.changes`; -1: asked anew, as when a row is admitted
        self._decoding: Any = None  # the backend's captured steps, once a row goes through them

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        self.flights.clear()

    def admit(
        self,
        request: Request,
        cache: Cache,
        *,
        prefill_chunk: int | None = None,
        watch: Watch = debugged,
        name: str = "",
        scores: PromptLogits | None = None,
    ) -> Flight:
        """Let a request take part from the next step on.

        prefill_chunk: feed the prompt in passes of at most so many tokens. watch: what wraps its caches. name: of the
        request, for errors. scores: what looks at the prompt's logits.
        """
        flight = Flight(request, cache, prefill_chunk, watch, name, scores)
        flight.room = min(flight.room, self._context)
        self.flights[flight] = None
        self._decided_at = -1
        return flight

    @torch.inference_mode()
    def retire(self, flight: Flight) -> None:
        """No more of its tokens are wanted. Steps launched ahead are rolled back."""
        del self.flights[flight]
        self._leave(flight)

    def settle(self, flight: Flight) -> None:
        """Let its cache know of all tokens so far."""
        if flight.captured:
            self._decoding.settle(flight)

    @torch.inference_mode()
    def step(self, counts: Mapping[Flight, int] | None = None) -> list[Output]:
        """Feed rows what they have to feed, and choose the next token of each where that was all.

        counts: tokens of each row that takes part; None: all rows do, with a chunk of the prompt each, or all of it.
        Rows that have begun to decode take part in every step.
        """
        backend = self._decide()
        flights, others = self.flights if counts is None else counts, []
        for flight in flights:
            if not flight.captured or len(flight.request.tokens) > flight.room:
                self._route(flight, backend)
                if not flight.captured:
                    others.append(self._fed(flight, counts))
        passes = [(fed, self._run(backend, fed)) for fed in _passes(others)]
        # What the passes compute is on its way: captured steps go behind it, and only their tokens are awaited.
        outputs = self._step_captured() if len(others) < len(flights) else []
        for fed, logits in passes:
            outputs += [output for each, of in zip(fed, logits, strict=True) if (output := _chosen(each, of))]
        return outputs

    def _decide(self) -> Backend:
        """What runs the model. If it was changed, rows leave the captured steps of what it was."""
        if self._backend is None or self._decided_at != Module.changes:
            before, self._backend, self._decided_at = self._backend, backend_for(self.model), Module.changes
            if before is not self._backend:
                self.close()
        return self._backend

    def _route(self, flight: Flight, backend: Backend) -> None:
        """Decide how a row goes on."""
        request, cache, room = flight.request, flight.cache, flight.room
        if len(request.tokens) > room and not flight.full:
            # Every token moves to another position, so what the cache holds no longer holds.
            self._leave(flight)
            flight.full, flight.cache = True, flight.watch(NoCache(1, self._device))
        elif request.guide is not None:
            return  # the host has to say which tokens may follow
        elif not flight.captured and cache.seq_len == len(request.tokens) - 1 and request.scored is None:
            if self._decoding is None:
                self._decoding = backend.decoding(self._lazy)
            if self._decoding is not None and self._decoding.takes(cache):
                left = min(request.max_seq_len - len(request.tokens), room - cache.seq_len)
                name = flight.name or "the prompt"
                self._decoding.add(
                    flight,
                    name,
                    request.tokens,
                    request.prompt_len,
                    cache,
                    left,
                    *_settings(request),
                    request.params.logprobs,
                )
                flight.captured = True

    def _step_captured(self) -> list[Output]:
        self._decoding.arrange()  # what is compiled and captured once is not a token's time
        started = time.perf_counter()
        tokens, numbers = self._decoding.step()
        for flight, each in numbers.items():
            flight.request.add_logprobs(tokens[flight], each)
        return [*zip(tokens.keys(), tokens.values(), repeat(None), repeat(started), strict=False)]

    def _fed(self, flight: Flight, counts: Mapping[Flight, int] | None) -> Fed:
        """With a cache the prompt, then each new token alone; NoCache holds nothing, so everything."""
        fed = flight.request.tokens[flight.cache.seq_len :][-self._context :]
        start = len(flight.request.tokens) - len(fed)
        if not flight.full:
            fed = fed[: flight.prefill_chunk if counts is None else counts[flight]]
        return Fed(flight, fed, start, start + len(fed) == len(flight.request.tokens))

    def _run(self, backend: Backend, fed: Sequence[Fed]) -> list[Tensor]:
        now = time.perf_counter()
        rows = []
        for flight, tokens, start, _ in fed:
            flight.started = flight.started or now
            rows.append(Row(flight.cache, tokens, _wanted(flight, start, start + len(tokens))))
        prefilled = next((each for each in fed if each.is_prefill), None) if progress.is_heard() else None
        if prefilled is None:
            return backend.run(rows)
        count, total = len(prefilled.tokens), len(prefilled.flight.request.tokens)
        done = prefilled.start + count
        progress.tell(progress.PREFILL, prefilled.start, total, under_way=count)
        logits = backend.run(rows)
        progress.tell(
            progress.PREFILL, total if done == total - 1 else done, total
        )  # the last may be a captured step's
        return logits

    def _leave(self, flight: Flight) -> None:
        if flight.captured:
            self._decoding.end(flight)
            flight.captured = False

    def close(self) -> None:
        """Give captured steps back, and roll back what they are ahead. Rows may go on: they will be taken anew."""
        for flight in self.flights:
            flight.captured = False
        if self._decoding is not None:
            self._decoding.close()
            self._decoding = None


def _passes(rows: Sequence[Fed]) -> Iterator[list[Fed]]:
    """What runs together: each full row by itself, and of the others as many as a pass should have tokens."""
    together: list[Fed] = []
    tokens = 0
    for fed in rows:
        if fed.flight.full:
            yield [fed]
            continue
        if together and tokens + len(fed.tokens) > PASS_TOKENS:
            yield together
            together, tokens = [], 0
        together.append(fed)
        tokens += len(fed.tokens)
    if together:
        yield together


def _wanted(flight: Flight, start: int, stop: int) -> slice:
    """Of the tokens that a row feeds, those whose logits are needed. start, stop: their positions."""
    own = flight.request.wanted(start, stop)
    last = 0 if flight.scores is None else flight.scores.wanted(start, stop)
    if not last:
        return own
    n = stop - start
    return slice(min([n - last, *range(n)[own]]), None)


def _chosen(fed: Fed, logits: Tensor) -> Output | None:
    """Let a request, and what watches it, see the logits that they wanted."""
    flight, complete = fed.flight, fed.complete
    request = flight.request
    first = fed.start + len(fed.tokens) - logits.shape[1]  # the position of the first logits
    if flight.scores is not None:
        flight.scores.add_logits(first, logits[0])
    if request.scored is not None:
        request.score(logits[0, max(0, request.scored - 1 - first) :])
    if not complete or request.finish_reason is not None:
        return None
    started, flight.started = flight.started or time.perf_counter(), None
    last = logits[0, -1]
    return flight, request.choose(last), last, started


def _settings(request: Request) -> tuple[dict[str, Any], bool]:
    """As a device samples; and whether that comes to the likeliest token by the model's own logits."""
    params: SamplingParams = request.params
    penalties = params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1
    greedy = params.temperature == 0 and not penalties and not params.logit_bias
    settings = {
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "repetition_penalty": params.repetition_penalty,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "logit_bias": params.logit_bias,
        "seed": request.seed,
    }
    return settings, greedy
