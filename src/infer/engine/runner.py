"""Runs scheduled tokens on a backend: chunks of prompts and single tokens together, in one pass.

On a GPU, sequences that decode go through captured steps, one of which is launched ahead.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from infer import progress
from infer.backend import Backend, Row, backend_for
from infer.backend.parts import STEPS_AHEAD
from infer.cache.traced import TracedCache
from infer.engine.model import Model, model_device, verifies_drafts
from infer.engine.scheduler import ScheduledTokens
from infer.engine.sequence import Sequence
from infer.models.rows import NONE, HiddenStates
from infer.nn.module import Module

PASS_TOKENS = 8192  # tokens of prompts that are packed into one pass


class StepOutput(NamedTuple):
    """What a step has computed for one sequence."""

    sequence: Sequence
    start: int = 0  # position of the first token computed
    num_tokens: int = 1
    logits: Tensor | None = None  # [k, V], of the last k of these tokens; None: the device has chosen tokens
    token_ids: list[int] | tuple[()] = ()  # those tokens; -1: none could be chosen
    logprob_terms: list[list[int]] | None = None  # of each, from `backend.gpu.logprobs`


class Runner:
    """Runs the sequences of an engine on its model."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.device = model_device(model)
        self._backend: Backend | None = None
        self._seen_changes = -1  # `Module.changes` when the backend was chosen; -1: choose again
        self.on_change: Callable[[], None] | None = None  # called before a step that finds the model changed
        with torch.inference_mode():
            self._captured: Any = self._choose_backend().captured_decoder()  # None: the backend captures none
        self.num_lookahead_slots = 0 if self._captured is None and self.device.type != "cuda" else STEPS_AHEAD
        self._computed: list[tuple[list[_PassInput], list[Tensor]]] = []  # passes of this step, and their logits
        self._waits_for_captured = False
        self.started_at = 0.0  # when the last `launch` began to compute, after kernels were compiled

    @torch.inference_mode()
    def launch(self, scheduled: list[ScheduledTokens], *, more: bool = False) -> list[StepOutput]:
        """Begin to compute the scheduled tokens. Returns the outputs of passes that only fill caches; see `wait`.

        more: whether prompts wait. Then a pass of theirs comes before the next tokens of sequences that decode.
        """
        backend = self._choose_backend()
        passes: list[ScheduledTokens] = []  # that return logits
        prompts: list[ScheduledTokens] = []  # that fill caches beside captured steps
        num_captured = 0
        for sequence, n in scheduled:
            before_drafts = n - len(sequence.draft_token_ids)
            last = not sequence.is_captured and self._capture(sequence, before_drafts)  # which computes the last token
            if sequence.is_captured:  # so are drafts
                n, num_captured = before_drafts, num_captured + 1
            if n > last and (last or not sequence.is_captured):
                fills = self._captured is not None and self._only_fills_cache(sequence, n - last)
                (prompts if fills else passes).append(ScheduledTokens(sequence, n - last))
        self.started_at = time.perf_counter()
        self._computed = [(inputs, self._run_pass(backend, inputs)) for inputs in _passes(passes)]
        *before, beside = [*_passes(prompts)] or [[]]
        for inputs in before:
            self._run_pass(backend, inputs)
        # Captured steps are launched after the passes; only their tokens are waited for.
        self._waits_for_captured = num_captured > 0
        if num_captured:
            self._captured.admit(beside=bool(beside))  # kernels that are compiled here are not a token's time
            self.started_at = time.perf_counter()
            with _reported(beside):
                self._captured.launch([*map(self._row, beside)], more=more and bool(beside))
        elif beside:
            self._run_pass(backend, beside)
        filled = chain(*before, beside)
        return [StepOutput(sequence, start, len(tokens), _NO_LOGITS) for sequence, tokens, start in filled]

    @torch.inference_mode()
    def wait(self) -> list[StepOutput]:
        """The other outputs. A sequence that enters a captured step may get its token in the next step."""
        outputs = []
        for inputs, logits in self._computed:  # first: after the tokens before it, a captured step computes the last
            for (sequence, tokens, start), of_row in zip(inputs, logits, strict=True):
                outputs.append(StepOutput(sequence, start, len(tokens), of_row[0]))
        self._computed = []
        if self._waits_for_captured:
            outputs += [StepOutput(sequence, 0, 1, None, *chosen) for sequence, *chosen in self._captured.read()]
        return outputs

    def captures(self, sequence: Sequence) -> bool:
        """Whether it will decode in captured steps. With a guide, the host decides which tokens may follow."""
        return (
            self._captured is not None
            and sequence.guide is None
            and sequence.cache is not None
            and self._captured.supports(sequence.cache)
        )

    @torch.inference_mode()
    def max_drafts(self, rows: int) -> int:
        """Drafts of a sequence that a step of so many sequences verifies, at most."""
        if not verifies_drafts(self._choose_backend().name):
            return 0
        return sys.maxsize if self._captured is None else int(self._captured.max_drafts(rows))

    @property
    def pads_drafts(self) -> bool:
        """Whether all sequences of a step take the time of the one with most drafts."""
        return self._captured is not None

    def sync(self, sequence: Sequence) -> None:
        """Tell the cache of the tokens that captured steps have computed."""
        if sequence.is_captured:
            self._captured.sync(sequence)

    @torch.inference_mode()
    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out of captured steps. Steps launched past its last token are rolled back."""
        if sequence.is_captured:
            self._captured.remove(sequence)

    def recheck_model(self) -> None:
        """Look whether the model has changed before the next step."""
        self._seen_changes = -1

    def close(self) -> None:
        """Release captured steps, and roll back what was launched ahead."""
        if self._captured is not None:
            self._captured.close()

    def _choose_backend(self) -> Backend:
        """If the model has changed, all sequences leave the captured steps, and another backend may run them."""
        if self._backend is None or self._seen_changes != Module.changes:
            before, self._backend, self._seen_changes = self._backend, backend_for(self.model), Module.changes
            if self.on_change is not None:
                self.on_change()
            if before is not None and before is not self._backend:
                if self._captured is not None:
                    self._captured.remove_all()
                self._captured = self._backend.captured_decoder()
        return self._backend

    def _capture(self, sequence: Sequence, n: int) -> bool:
        """Let a sequence enter the captured step, if the last of its next n tokens is the last of all."""
        if (
            self._captured is None
            or sequence.num_computed_tokens + n != len(sequence.token_ids)
            or sequence.finish_reason is not None
            or sequence.recompute_tokens
            or len(sequence.token_ids) == sequence.max_len  # nothing is generated: the prompt is scored
            or not self.captures(sequence)
        ):
            return False
        self._captured.add(sequence)
        sequence.num_prefill_tokens = min(sequence.num_prefill_tokens, len(sequence.token_ids) - 1)
        return True

    def _only_fills_cache(self, sequence: Sequence, n: int) -> bool:
        start = sequence.num_computed_tokens  # hidden states are returned with logits
        return not sequence.recompute_tokens and sequence.logits_slice(start, start + n) == NONE

    def _run_pass(self, backend: Backend, inputs: list[_PassInput]) -> list[Tensor]:
        with _reported(inputs):
            return backend.run([*map(self._row, inputs)])

    def _row(self, each: _PassInput) -> Row:
        sequence, tokens, start = each
        assert sequence.cache is not None
        if isinstance(sequence.cache, TracedCache):
            sequence.cache.queries = 1 + len(sequence.draft_token_ids)
        stop = start + len(tokens)
        if (positions := sequence.hidden_slice(start, stop)) != NONE:
            sequence.pass_hidden = HiddenStates(final=True, positions=positions)
        return Row(sequence.cache, tokens, sequence.logits_slice(start, stop), sequence.pass_hidden)


_PassInput = tuple[Sequence, list[int], int]  # a sequence, its tokens to compute, and the position of the first
_NO_LOGITS = torch.empty(0, 0)


@contextmanager
def _reported(inputs: list[_PassInput]) -> Iterator[None]:
    """Report the progress of the first prompt of a pass."""
    first = next((each for each in inputs if each[0].num_tokens == each[0].prompt_len), None)
    if first is None or not progress.has_listeners():
        yield
        return
    sequence, tokens, start = first
    done, total = start + len(tokens), sequence.num_tokens
    progress.report(progress.PREFILL, start, total, under_way=len(tokens))
    yield
    progress.report(progress.PREFILL, total if done == total - 1 else done, total)  # a captured step has the last


def _passes(scheduled: list[ScheduledTokens]) -> Iterator[list[_PassInput]]:
    """Split into passes: sequences that recompute run alone, the others are packed up to PASS_TOKENS."""
    together: list[_PassInput] = []
    count = 0
    for sequence, n in scheduled:
        tokens = sequence.next_tokens(n)
        start = sequence.num_tokens - len(tokens) if sequence.recompute_tokens else sequence.num_computed_tokens
        if sequence.recompute_tokens:
            yield [(sequence, tokens, start)]
            continue
        if together and count + len(tokens) > PASS_TOKENS:
            yield together
            together, count = [], 0
        together.append((sequence, tokens, start))
        count += len(tokens)
    if together:
        yield together
