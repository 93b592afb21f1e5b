"""Rows in flight on a backend: requests are admitted and retired one by one while others go on.

A step feeds every row what its cache does not hold yet: a prompt, a chunk of one, or the token chosen last. On a GPU,
rows with one token to feed go through captured steps, one of which is launched ahead.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from infer.backend import Backend, Row, backend_for
from infer.cache.base import Cache, NoCache
from infer.cache.debug import debugged
from infer.engine.model import Model, model_device
from infer.engine.params import SamplingParams
from infer.engine.request import NoToken, Request
from infer.engine.result import GeneratedToken
from infer.models.rows import LAST, NONE
from infer.nn.module import Module

PASS_TOKENS = 8192  # that prompts are packed into one pass up to
Watch = Callable[[Cache], Cache]


class Flight:
    """A request on its way."""

    def __init__(self, request: Request, cache: Cache, prefill_chunk: int | None, watch: Watch, name: str) -> None:
        self.request, self.prefill_chunk, self.watch, self.name = request, prefill_chunk, watch, name
        self.cache = watch(cache)
        self.full = False  # whether the context is used up: each step then feeds the last tokens that fit, anew
        self.captured = False  # whether it goes through captured steps
        self.started: float | None = None  # when the pass, or the first of several, that leads to its next token began


class Output(NamedTuple):
    flight: Flight
    token: GeneratedToken
    logits: Tensor | None  # [V] that it was chosen from; None where the device chose


class Runner:
    """Drives requests through a model: within it, call `step` until all that were admitted have finished."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.flights: list[Flight] = []
        self._device = model_device(model)
        self._context = model.config.max_position_embeddings
        self._backend: Backend | None = None
        self._decided_at = -1  # by `Module.changes`; -1: asked anew, as when a row is admitted
        self._failed: list[tuple[Flight, NoToken]] = []  # of this step
        self._pending: list[Output] = []  # of the last step, in which another row failed
        self._decoding: Any = None  # the backend's captured steps, once a row goes through them

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()
        self.flights.clear()

    def admit(
        self,
        request: Request,
        cache: Cache,
        *,
        prefill_chunk: int | None = None,
        watch: Watch = debugged,
        name: str = "",
    ) -> Flight:
        """Let a request take part from the next step on.

        prefill_chunk: feed the prompt in passes of at most so many tokens. watch: what wraps its caches. name: of the
        request, for errors.
        """
        self.flights.append(Flight(request, cache, prefill_chunk, watch, name))
        self._decided_at = -1
        return self.flights[-1]

    @torch.inference_mode()
    def retire(self, flight: Flight) -> None:
        """No more of its tokens are wanted. Steps launched ahead are rolled back."""
        self.flights.remove(flight)
        self._leave(flight)

    @torch.inference_mode()
    def step(self) -> list[Output]:
        """Feed each row what it has to feed, and choose its next token where that was all. Retires those that end.

        A row from which no token can be chosen is retired with an error; the next call returns the others' tokens.
        """
        if self._pending:
            outputs, self._pending = self._pending, []
            return outputs
        backend = self._decide()
        for flight in self.flights:
            self._route(flight, backend)
        outputs = self._step_captured() if any(flight.captured for flight in self.flights) else []
        for together in self._passes([flight for flight in self.flights if not flight.captured]):
            outputs += self._pass(backend, together)
        for output in outputs:
            if output.flight.request.finish_reason is not None:
                self.retire(output.flight)
        if failed := self._failed:
            self._failed, self._pending = [], outputs
            for flight, _ in failed:
                self.retire(flight)
            raise failed[0][1]
        return outputs

    def _accept(self, flight: Flight, choose: Callable[[], GeneratedToken], logits: Tensor | None) -> list[Output]:
        """Nothing where no token can be chosen: other rows go on, and the error waits for the end of the step."""
        try:
            return [Output(flight, choose(), logits)]
        except NoToken as error:
            named = NoToken(f"{flight.name}: {error}") if flight.name else error
            self._failed.append((flight, named))
            return []

    def _decide(self) -> Backend:
        """What runs the model. If it was changed, rows leave the captured steps of what it was."""
        if self._backend is None or self._decided_at != Module.changes:
            before, self._backend, self._decided_at = self._backend, backend_for(self.model), Module.changes
            if before is not self._backend:
                self._close()
        return self._backend

    def _route(self, flight: Flight, backend: Backend) -> None:
        """Decide how a row goes on."""
        request, cache = flight.request, flight.cache
        room = min(self._context, cache.capacity)
        if len(request.tokens) > room and not flight.full:
            # Every token moves to another position, so what the cache holds no longer holds.
            self._leave(flight)
            flight.full, flight.cache = True, flight.watch(NoCache(1, self._device))
        elif not flight.captured and cache.seq_len == len(request.tokens) - 1:
            if self._decoding is None:
                self._decoding = backend.decoding()
            if self._decoding is not None and self._decoding.takes(cache):
                left = min(request.max_seq_len - len(request.tokens), room - cache.seq_len)
                name = flight.name or "the prompt"
                self._decoding.add(
                    id(flight), name, request.tokens, request.prompt_len, cache, left, *_settings(request)
                )
                flight.captured = True

    def _step_captured(self) -> list[Output]:
        self._decoding.arrange()  # what is compiled and captured once is not a token's time
        started = time.perf_counter()
        flights = {id(flight): flight for flight in self.flights}
        outputs: list[Output] = []
        for key, token in self._decoding.step().items():
            request = flights[key].request
            outputs += self._accept(flights[key], partial(request.push, token, started), None)
        return outputs

    def _passes(self, flights: Sequence[Flight]) -> Iterator[list[Flight]]:
        """Those that run together: each full one by itself, and of the others as many as a pass should have tokens."""
        together: list[Flight] = []
        tokens = 0
        for flight in flights:
            if flight.full:
                yield [flight]
                continue
            count = len(self._fed(flight))
            if together and tokens + count > PASS_TOKENS:
                yield together
                together, tokens = [], 0
            together.append(flight)
            tokens += count
        if together:
            yield together

    def _fed(self, flight: Flight) -> list[int]:
        """With a cache the prompt, then each new token alone; NoCache holds nothing, so everything."""
        fed = flight.request.tokens[flight.cache.seq_len :][-self._context :]
        return fed if flight.full else fed[: flight.prefill_chunk]

    def _pass(self, backend: Backend, flights: Sequence[Flight]) -> list[Output]:
        now = time.perf_counter()
        rows, chosen = [], []
        for flight in flights:
            flight.started = flight.started or now
            fed = self._fed(flight)
            complete = flight.full or flight.cache.seq_len + len(fed) == len(flight.request.tokens)
            rows.append(Row(flight.cache, fed, LAST if complete else NONE))
            chosen.append(complete)
        outputs: list[Output] = []
        for flight, logits, complete in zip(flights, backend.run(rows), chosen, strict=True):
            if complete:
                last, started = logits[0, -1], flight.started or now
                outputs += self._accept(flight, partial(flight.request.accept, last, started), last)
                flight.started = None
        return outputs

    def _leave(self, flight: Flight) -> None:
        if flight.captured:
            self._decoding.end(id(flight))
            flight.captured = False

    def _close(self) -> None:
        for flight in self.flights:
            flight.captured = False
        if self._decoding is not None:
            self._decoding.close()
            self._decoding = None


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
