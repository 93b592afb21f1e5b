"""The next token of each row, chosen on a GPU: launches that can be captured, and what they keep on the device.

From the same logits, `engine/sampler.py` chooses the same tokens on the host.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from infer.backend.gpu import sampling_kernels as sample
from infer.machine import to_device
from infer.nn import draw

MAX_VOCAB = draw.MAX_VOCAB
WARPS = 4
MANY = 16  # rows from which a program takes several slices of each
EACH = 4  # so many
FILTERING = 2048  # programs of all rows that look for where filters cut, at most


class GreedySampler:
    """Chooses the likeliest token of each of up to `rows` rows."""

    def __init__(self, rows: int, vocab: int, device: torch.device | str, pdl: bool = False) -> None:
        """pdl: launch each kernel while the one before it still runs."""
        if not 0 < vocab <= MAX_VOCAB:
            raise ValueError(f"a vocabulary of {vocab} tokens: at most {MAX_VOCAB} are possible")
        self.rows, self.vocab = rows, vocab
        self._slices = triton.cdiv(vocab, sample.SLICE.value)
        self._best = torch.empty(rows, self._slices, dtype=torch.float32, device=device)
        self._best_at = torch.empty(rows, self._slices, dtype=torch.int32, device=device)
        self._padded = triton.next_power_of_2(self._slices)
        each = EACH if rows >= MANY else 1
        self._options: dict[str, Any] = {"PDL": pdl, "num_warps": WARPS, "enable_fp_fusion": False}
        self._by_slice = {"V": vocab, "SLICES": self._slices, "EACH": each, "num_warps": WARPS * (2 if each > 1 else 1)}
        if pdl:
            self._options["launch_pdl"] = True

    def launch(self, logits: Tensor, positions: Tensor, tokens: Tensor, sent: Tensor, steps: Tensor) -> None:
        """Write the token of each row to tokens [R] int64: -1 where a logit is NaN, or none is above -inf.

        logits: [R, V], contiguous; positions: [R] int32, of the tokens to be chosen. Below 0, nothing of that row is
        read or written. sent: [turns, R] int64, where a host reads them, in the line of the step's number, `steps`.
        """
        grid = self._grid(logits)
        nothing = (None,) * 7
        sample.best_of_slices[grid](
            logits,
            positions,
            self._best,
            self._best_at,
            *nothing,
            GREEDY=True,
            CLEARED=1,
            **self._options | self._by_slice,
        )
        sample.best_of_row[grid[1:]](
            positions,
            self._best,
            self._best_at,
            tokens,
            sent,
            steps,
            TURNS=sent.shape[0],
            SLICES=self._slices,
            PADDED=self._padded,
            **self._options,
        )

    def _grid(self, logits: Tensor) -> tuple[int, int]:
        rows, vocab = logits.shape
        if rows > self.rows or vocab != self.vocab or not logits.is_contiguous():
            raise ValueError(
                f"logits of shape {tuple(logits.shape)} and strides {logits.stride()}: "
                f"they must be contiguous, at most {self.rows} rows of {self.vocab}"
            )
        return triton.cdiv(self._slices, self._by_slice["EACH"]), rows


class DeviceSampler(GreedySampler):
    """Chooses the next token of each of up to `rows` rows, by settings that lie on the device.

    Rows are independent: a row gets the same tokens alone or among others. Until `set_rows`, it is greedy.
    """

    def __init__(self, rows: int, vocab: int, device: torch.device | str, pdl: bool = False) -> None:
        super().__init__(rows, vocab, device, pdl)

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(rows, *shape, dtype=dtype, device=device)

        self._whole = zeros(sample.WHOLE.value, dtype=torch.int64)
        self._fractions = zeros(sample.FRACTIONS.value, dtype=torch.float32)
        self._history = zeros(vocab, dtype=torch.int32)
        self._bias = zeros(vocab, dtype=torch.float32)
        self._scores = zeros(vocab, dtype=torch.float32)
        self._counts = zeros(sample.COUNTS.value, sample.BINS.value, dtype=torch.int32)
        self._masses = zeros(sample.MASSES.value, sample.BINS.value, dtype=torch.int64)
        self._notes = zeros(sample.NOTES.value, dtype=torch.int64)
        self._weights = zeros(self._slices, dtype=torch.int64)
        self._has_history = [False] * rows
        self._has_bias = [False] * rows

    def set_rows(self, rows: Sequence[int], settings: Sequence[Mapping[str, Any]]) -> None:
        """What rows are chosen by from now on: of each, those of `SamplingParams`, and

        tokens: those so far, of which the first prompt_len are the prompt. Tokens chosen by `launch` are added to them
        on the device.
        """
        device = self._whole.device
        at = to_device(torch.tensor(rows), device)
        columns = [self._columns(**each) for each in settings]
        self._whole[at] = to_device(torch.tensor([whole for whole, _ in columns]), device)
        self._fractions[at] = to_device(torch.tensor([fractions for _, fractions in columns]), device)
        for row, each in zip(rows, settings, strict=True):
            self._remember(row, penalised(**each), each["tokens"], each["prompt_len"])
            self._add_bias(row, each["logit_bias"])

    def take_over(self, other: DeviceSampler, rows: Sequence[int], theirs: Sequence[int]) -> None:
        """Let rows of another sampler go on here."""
        at, of = to_device(torch.tensor([[*rows], [*theirs]]), self._whole.device)
        self._whole[at] = other._whole[of]
        self._fractions[at] = other._fractions[of]
        for row, their in zip(rows, theirs, strict=True):
            if self._has_history[row] or other._has_history[their]:
                self._history[row].copy_(other._history[their])
            if self._has_bias[row] or other._has_bias[their]:
                self._bias[row].copy_(other._bias[their])
            self._has_history[row], self._has_bias[row] = other._has_history[their], other._has_bias[their]

    def _columns(
        self,
        temperature: float,
        top_k: int | None,
        top_p: float,
        min_p: float,
        repetition_penalty: float,
        presence_penalty: float,
        frequency_penalty: float,
        logit_bias: Mapping[int, float],
        seed: int,
        **_: Any,
    ) -> tuple[list[int], list[float]]:
        """Whole numbers, and fractions."""
        sampled = draw.is_sampled(temperature, top_k)
        filters = draw.Filters.of(temperature, top_k, top_p, min_p)
        kept = filters.top_k if filters.top_k < self.vocab else 0
        flags = {
            sample.SAMPLED: sampled,
            sample.PENALISED: penalised(repetition_penalty, presence_penalty, frequency_penalty),
            sample.BIASED: bool(logit_bias),
            sample.FILTERED: sampled and bool(kept or filters.top_p),
        }
        whole = {
            sample.FLAGS: sum(flag.value for flag, is_set in flags.items() if is_set),
            sample.TOP_K: kept,
            sample.TOP_P: filters.top_p,
            sample.MIN_P_DEPTH: filters.min_p_depth,
            # V tokens this far down have less than 1 - top_p of the likeliest's mass; 0.01 is more than any rounding.
            sample.TAIL_DEPTH: draw.to_depth(math.log2(self.vocab / (1 - top_p)) + 0.01) if top_p < 1 else 0,
            sample.SEED_KEY: draw.mix(seed),
        }
        fractions = {
            sample.PER_TEMPERATURE: filters.per_temperature,
            sample.REPETITION: repetition_penalty,
            sample.PRESENCE: presence_penalty,
            sample.FREQUENCY: frequency_penalty,
        }
        signed = {i.value: _signed(value) for i, value in whole.items()}
        plain = {i.value: float(value) for i, value in fractions.items()}
        return (
            [signed.get(i, 0) for i in range(sample.WHOLE.value)],
            [plain.get(i, 0.0) for i in range(sample.FRACTIONS.value)],
        )

    def _remember(self, row: int, wanted: bool, tokens: Sequence[int], prompt_len: int) -> None:
        if self._has_history[row]:
            self._history[row].zero_()
        self._has_history[row] = wanted  # before it has: an interrupt must not leave it behind unseen
        if wanted:
            so_far = to_device(torch.tensor(tokens, dtype=torch.int64), self._history.device)
            self._history[row].index_fill_(0, so_far[:prompt_len], 1)
            generated = so_far[prompt_len:]
            self._history[row].index_add_(0, generated, torch.full_like(generated, 2, dtype=torch.int32))

    def _add_bias(self, row: int, logit_bias: Mapping[int, float]) -> None:
        if self._has_bias[row]:
            self._bias[row].zero_()
        self._has_bias[row] = bool(logit_bias)
        if logit_bias:
            device = self._bias.device
            ids = to_device(torch.tensor(list(logit_bias)), device)
            values = to_device(torch.tensor(list(logit_bias.values()), dtype=torch.float32), device)
            self._bias[row].index_copy_(0, ids, values)

    def launch(self, logits: Tensor, positions: Tensor, tokens: Tensor, sent: Tensor, steps: Tensor) -> None:
        grid, rows = self._grid(logits), logits.shape[0]
        narrow = min(grid[0], max(1, FILTERING // rows)), rows
        options = self._options | self._by_slice
        best, scores, padded = self._best, self._scores, {"PADDED": self._padded}
        whole, fractions, notes = self._whole, self._fractions, self._notes
        counts, masses = self._counts, self._masses
        row = positions, logits, best, scores, whole, fractions
        cleared = triton.next_power_of_2(triton.cdiv(masses[0].numel(), grid[0]))
        sample.best_of_slices[grid](
            logits,
            positions,
            best,
            self._best_at,
            scores,
            whole,
            fractions,
            self._history,
            self._bias,
            counts,
            masses,
            GREEDY=False,
            CLEARED=cleared,
            **options,
        )
        sample.count[narrow](*row, counts, masses, **padded, **options)
        sample.narrow_top_k[narrow](*row, counts, masses, notes, **padded, **options)
        sample.narrow_top_p[narrow](*row, counts, masses, notes, **padded, **options)
        sample.weigh[grid](*row, masses, notes, self._weights, **padded, **options)
        sample.draw[grid[1:]](
            positions,
            logits,
            best,
            self._best_at,
            scores,
            whole,
            fractions,
            notes,
            self._weights,
            self._history,
            tokens,
            sent,
            steps,
            V=self.vocab,
            TURNS=sent.shape[0],
            SLICES=self._slices,
            **padded,
            **self._options,
        )


def penalised(repetition_penalty: float, presence_penalty: float, frequency_penalty: float, **_: Any) -> bool:
    return repetition_penalty != 1 or presence_penalty != 0 or frequency_penalty != 0


def _signed(bits: int) -> int:
    """As int64 holds them."""
    return bits - 2**64 if bits >= 2**63 else bits
