"""A decode step captured once and replayed, on a GPU: the model, and the choice of the next token.

What a step reads lies on the device: the tokens, their positions, where the caches are, how to sample. So one captured
step serves all prompts, lengths and settings, and the host launches steps ahead of the tokens it has read: it is never
waited for. What it launched too many, when a text has ended, is taken back from the caches.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple, Self
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from infer.cache.base import Cache
from infer.engine.params import SamplingParams
from infer.engine.request import Request
from infer.models.common import Decoder
from infer.models.registry import MODELS
from infer.ops import fused
from infer.ops.linear import Embedding
from infer.ops.table import empty_tables

if TYPE_CHECKING:
    from infer.ops.choice import Choice

AHEAD = 1  # steps launched beyond the one whose tokens are awaited; any ring can be truncated by both
_capturing = os.environ.get("INFER_GRAPHS") != "0"
_captured: WeakKeyDictionary[Decoder, list[Captured]] = WeakKeyDictionary()
_lock = Lock()


@contextmanager
def disabled() -> Iterator[None]:
    """Within, steps launch their kernels one by one, as with INFER_GRAPHS=0: to debug, or to compare."""
    global _capturing
    before, _capturing = _capturing, False
    try:
        yield
    finally:
        _capturing = before


def decoding(
    model: object,
    requests: Sequence[Request],
    caches: Sequence[Cache],
    prompts: Sequence[int] = (0,),
) -> Decoding | None:
    """Requests with one token each to be fed, as rows of a captured step; None where the model must run as it is.

    prompts: their numbers, for errors. As it is: not on a GPU that has the kernels,
    with a module that somebody changed or hooked, with a cache that must be asked.
    """
    if not isinstance(model, Decoder) or model.device.type != "cuda" or not _is_plain(model):
        return None
    plan, embedding, config = model.fused_plan(), model.embedding_parts(), model.config
    if plan is None or any(cache.table(config, model.norm.weight) is None for cache in caches):
        return None
    fits = embedding.fit(config.vocab_size, config.max_position_embeddings, config.hidden_size)
    if not fits or not fused.can_look_up(embedding, model.dtype):
        return None
    from infer.ops.choice import MAX_VOCAB  # which needs Triton

    return Decoding(model, plan, requests, caches, prompts) if config.vocab_size <= MAX_VOCAB else None


def _is_plain(model: Decoder) -> bool:
    kind = type(model)
    return (
        KNOWN.get(kind) == _known(kind)
        and kind.embed is Decoder.embed
        and not vars(model).keys() & {"embed", "embedding_parts"}
        and not any(m._forward_hooks or m._forward_pre_hooks or "forward" in vars(m) for m in model.modules())
    )


def _known(kind: type[Decoder]) -> tuple[object, ...]:
    """What a captured step stands for, beside what `Decoder.fused_plan` looks at."""
    return kind.forward, kind.embed, kind.embedding_parts, Decoder.forward, Embedding.forward


KNOWN = {kind: _known(kind) for kind in MODELS.values()}


def _is_greedy(params: SamplingParams) -> bool:
    """Whether the likeliest token by the model's own logits is taken."""
    penalties = params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1
    return params.temperature == 0 and not penalties and not params.logit_bias


def _take(model: Decoder, plan: fused.Plan, rows: int, samples: bool) -> Captured:
    """A captured step that nobody runs at the moment."""
    rows = 1 << (rows - 1).bit_length()
    weights = [(weight.data_ptr(), weight.dtype) for weight in model.parameters()]
    with _lock:
        steps = _captured.setdefault(model, [])
        # Those of other weights are of no use any more.
        steps[:] = [step for step in steps if step.weights == weights and step.constants == plan.constants]
        for step in steps:
            if (step.rows, step.samples, step.captured, step.busy) == (rows, samples, _capturing, False):
                break
        else:
            step = Captured(model, plan, rows, samples)
            _compile(step, model)
            step.capture()
            step.weights = weights
            steps.append(step)
        step.busy = True
    return step


def _compile(step: Captured, model: Decoder) -> None:
    """What a step needs; and where that was not on disk, what steps of other rows and settings will."""

    def others() -> None:
        for rows in fused.ROWS_COMPILED:
            # How a token is chosen does not depend on how many are.
            Captured(model, step.plan, rows, rows == 1).run()

    if fused.can_compile_ahead() and fused.compile_ahead(model.device, step.run):
        print("compiling kernels for this GPU: seconds, once for each kind of model", file=sys.stderr, flush=True)
        with suppress(torch.OutOfMemoryError):
            fused.compile_ahead(model.device, others)


class Captured:
    """One step of up to `rows` rows, on buffers of its own. It does not keep the model alive."""

    def __init__(self, model: Decoder, plan: fused.Plan, rows: int, samples: bool) -> None:
        """samples: by settings of each row; else all are greedy."""
        from infer.ops.choice import Choice, Greedy

        config, device = model.config, model.device
        self.rows, self.samples, self.captured, self.busy = rows, samples, _capturing, False
        self.weights: list[tuple[int, torch.dtype]] = []  # of the model: where they were
        self.constants = plan.constants
        self.plan, self.embedding = plan, model.embedding_parts()
        self._free: torch.cuda.Event | None = None  # when the last run had no more to do with it
        self.tokens = torch.zeros(rows, dtype=torch.int64, device=device)  # to be fed; then, those chosen
        self.positions = torch.full((rows,), -1, dtype=torch.int32, device=device)  # of those to be fed; -1: none
        self.moves = torch.zeros(rows, dtype=torch.int32, device=device)  # by which each row's position goes on
        self.steps = torch.zeros(1, dtype=torch.int32, device=device)  # steps since the rows were loaded
        self.sent = torch.empty(AHEAD + 1, rows, dtype=torch.int64, pin_memory=True)  # tokens chosen, in turns
        self.tables = empty_tables(config.num_hidden_layers, rows, device)
        self.settings = Choice(rows, config.vocab_size, device, plan.pdl) if samples else None
        self.choice = self.settings or Greedy(rows, config.vocab_size, device, plan.pdl)
        self._finished = fused.counters(plan, rows)
        self._graph: torch.cuda.CUDAGraph | None = None

    def capture(self) -> None:
        with fused.on(self.tokens.device):
            self.run()  # loads the kernels; no row takes part yet
            if self.captured:
                self._graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                    self.run()

    def launch(self) -> None:
        if self._graph is None:
            self.run()
        else:
            self._graph.replay()

    def run(self) -> None:
        """Kernel by kernel."""
        # A row without a token, or whose logits were no numbers, goes along: what it computes is not read.
        fed = fused.begin(self.plan, self.embedding, self.tokens, self.positions, self.moves, self.steps)
        logits = fused.launch(self.plan, fed, self.tables, self._finished)
        self.choice.launch(logits, self.positions, self.tokens, self.sent, self.steps)

    def load(self, requests: Sequence[Request], tables: np.ndarray[Any, Any]) -> None:
        """What the rows are. tables: [layers, rows, COLUMNS], as caches give them."""
        if self._free is not None:
            self._free.wait()
        count = len(requests)
        fed = [request.tokens[-1] for request in requests]
        positions = [len(request.tokens) - 1 for request in requests]
        self.tokens[:count].copy_(torch.tensor(fed))
        self.positions.fill_(-1)
        self.positions[:count].copy_(torch.tensor(positions))
        self.steps.zero_()
        self.moves.zero_()
        self.moves[:count].fill_(1)
        self.tables[:, :count].copy_(torch.from_numpy(tables))
        if self.settings is not None:
            for row, request in enumerate(requests):
                self._set(self.settings, row, request)

    @staticmethod
    def _set(settings: Choice, row: int, request: Request) -> None:
        params = request.params
        settings.set_row(
            row,
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            repetition_penalty=params.repetition_penalty,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            logit_bias=params.logit_bias,
            seed=request.seed,
            tokens=request.tokens,
            prompt_len=request.prompt_len,
        )

    def drop(self, row: int) -> None:
        self.positions[row].fill_(-1)
        self.moves[row].fill_(0)

    def give_back(self) -> None:
        self._free = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with suppress(RuntimeError):  # a GPU that has failed says so to whoever runs it next
            self._free.record()
        self.busy = False


class Launched(NamedTuple):
    """A step on its way."""

    rows: Sequence[int]
    tokens: Tensor  # pinned, [rows]
    done: torch.cuda.Event


class Decoding:
    """Requests on their way through a captured step. Within it, iterate for the tokens of each step, by row.

    A row goes on until `end`, or until it has all its tokens, or its cache no room.
    """

    def __init__(
        self,
        model: Decoder,
        plan: fused.Plan,
        requests: Sequence[Request],
        caches: Sequence[Cache],
        prompts: Sequence[int],
    ) -> None:
        self._model, self._plan, self._prompts = model, plan, prompts
        self._requests, self._caches = list(requests), list(caches)
        self._going = set(range(len(requests)))  # rows that take part in the next step
        self._wanted = set(self._going)  # rows whose tokens are still asked for
        context = model.config.max_position_embeddings
        self._left = [  # steps
            min(request.max_seq_len - len(request.tokens), min(cache.capacity, context) - cache.seq_len)
            for request, cache in zip(requests, caches, strict=True)
        ]
        self._held = [cache.seq_len for cache in caches]  # positions
        self._launched: deque[Launched] = deque()
        self._count = 0

    def __enter__(self) -> Self:
        for cache in self._caches:
            cache.positions(1)  # refuses what an interrupted pass has left
        samples = any(not _is_greedy(request.params) for request in self._requests)
        self._step = _take(self._model, self._plan, len(self._requests), samples)
        try:
            with fused.on(self._model.device):
                self._step.load(self._requests, np.concatenate([self._table(cache) for cache in self._caches], 1))
        except BaseException:
            self._step.give_back()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Give the step back, when what was launched is through; what that wrote beyond the tokens is forgotten."""
        try:
            if self._launched:
                with suppress(RuntimeError):  # the first error that a GPU ends with is the one to be told
                    self._launched[-1].done.synchronize()
            for row in range(len(self._caches)):
                self._forget(row, sum(row in launched.rows for launched in self._launched))
        finally:
            self._step.give_back()

    def __iter__(self) -> Iterator[dict[int, int]]:
        while True:
            while len(self._launched) <= AHEAD and self._drop_full():
                self._launch()
            if not self._launched:
                return
            self._wait(self._launched[0].done)
            rows, tokens, _ = self._launched.popleft()
            chosen = tokens.tolist()
            wanted = {row: chosen[row] for row in rows if row in self._wanted}
            for row in rows:
                if row in wanted:
                    self._written(row)
                else:
                    self._forget(row, 1)
            if wanted:
                yield wanted

    @property
    def sparse(self) -> bool:
        """Whether a smaller step would do for the rows that are left."""
        return len(self._wanted) <= self._step.rows // 2

    def end(self, row: int) -> None:
        """No more tokens are asked for in this row."""
        self._wanted.discard(row)
        self._drop(row)

    def _table(self, cache: Cache) -> Any:
        return cache.table(self._model.config, self._model.norm.weight)

    def _written(self, row: int) -> None:
        """A step has stored one more position."""
        self._table(self._caches[row])  # tells a ring which one is overwritten
        self._caches[row].advance(1)
        self._held[row] += 1

    def _forget(self, row: int, steps: int) -> None:
        """What steps have stored beyond the tokens that were asked for; unless the cache is in other hands by now."""
        held = self._held[row]
        if steps and self._caches[row].seq_len == held:
            for _ in range(steps):
                self._written(row)
            self._caches[row].truncate(held)
            self._held[row] = held

    def _drop_full(self) -> bool:
        """Leave out rows that have no token left to feed; whether any row is left."""
        for row in [row for row in self._going if not self._left[row]]:
            self._drop(row)
        return bool(self._going)

    def _drop(self, row: int) -> None:
        if row in self._going:
            self._going.discard(row)
            with fused.on(self._model.device):
                self._step.drop(row)

    def _launch(self) -> None:
        for row in self._going:
            self._left[row] -= 1
        self._count += 1
        tokens = self._step.sent[self._count % len(self._step.sent)]
        with fused.on(self._model.device):
            self._step.launch()
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()
        self._launched.append(Launched(sorted(self._going), tokens, done))

    def _wait(self, done: torch.cuda.Event) -> None:
        try:
            done.synchronize()
        except RuntimeError as error:
            at = ", ".join(
                f"prompt {self._prompts[row]} at position {self._caches[row].seq_len}" for row in sorted(self._wanted)
            )
            raise RuntimeError(f"the GPU failed while it decoded {at}: {error}") from error
