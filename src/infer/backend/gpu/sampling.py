"""Sampling on a GPU: launches that can be captured, and the buffers they read and write.

From the same logits, `engine/sampler.py` chooses the same tokens on the host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from infer.backend.gpu import sampling_kernels as sample
from infer.backend.gpu.launcher import launch_options
from infer.machine import to_device
from infer.nn.draw import MAX_VOCAB
from infer.nn.packed import PackedSettings

WARPS = 4
MANY_ROWS = 16  # with as many rows or more, a program has several slices of a row
SLICES_PER_PROGRAM = 4  # with many rows
MAX_FILTER_PROGRAMS = 2048  # of a top_k or top_p kernel, over all rows


class _Buffers(NamedTuple):
    """What the kernels of a launch leave for those after them; the first two for greedy rows."""

    best: Tensor
    best_at: Tensor
    scores: Tensor | None = None
    counts: Tensor | None = None
    masses: Tensor | None = None
    cuts: Tensor | None = None
    weights: Tensor | None = None


class GreedySampler:
    """Chooses the most likely token of each of up to `rows` rows."""

    def __init__(self, rows: int, vocab: int, device: torch.device | str, pdl: bool = False) -> None:
        """pdl: programmatic dependent launch."""
        if not 0 < vocab <= MAX_VOCAB:
            raise ValueError(f"a vocabulary of {vocab} tokens: at most {MAX_VOCAB} are supported")
        self.rows, self.vocab, self._device = rows, vocab, device
        self._slices = triton.cdiv(vocab, sample.SLICE.value)
        self._padded = triton.next_power_of_2(self._slices)
        self._options: dict[str, Any] = {"num_warps": WARPS, **launch_options(pdl)}
        self._buffers: dict[int, _Buffers] = {}  # by the number of rows

    def launch(
        self,
        logits: Tensor,
        positions: Tensor,
        tokens: Tensor,
        host_tokens: Tensor,
        steps: Tensor,
        drafts: Tensor | None = None,
    ) -> None:
        """Write the next token of each row to tokens [R] int64: -1 where a logit is NaN, or all are -inf.

        logits: [R, V], contiguous. positions: [R] int32, of the tokens to choose; rows below 0 are skipped.
        host_tokens: [ring, R] int64, a copy for the host in row `steps` % ring. drafts: int64 [sequences, n], if each
        sequence has n + 1 of the rows.
        """
        grid, buffers, options = self._prepare(logits, drafts)
        unused = (None,) * 8
        sample.best_of_slices[grid](
            logits,
            positions,
            buffers.best,
            buffers.best_at,
            *unused,
            GREEDY=True,
            CLEARED=1,
            **options,
        )
        sample.best_of_row[grid[1:]](
            positions,
            buffers.best,
            buffers.best_at,
            tokens,
            host_tokens,
            steps,
            RING=host_tokens.shape[0],
            SLICES=self._slices,
            PADDED=self._padded,
            **self._options,
        )

    def accept(self, tokens: Tensor, positions: Tensor, drafts: Tensor, chosen: Tensor) -> None:
        """Move each sequence [R] to the token after the last draft, of [R, n], that equals the token chosen.

        chosen: int64 [R (n + 1)], from `launch`.
        """
        sample.accept[(len(tokens),)](
            tokens,
            positions,
            drafts,
            chosen,
            *self._settings_and_history(),
            V=self.vocab,
            WIDTH=drafts.shape[1] + 1,
            num_warps=1,
        )

    def _settings_and_history(self) -> tuple[Tensor | None, Tensor | None]:
        """The settings of each row, and how often it has each token; None: all rows are greedy."""
        return None, None

    def _prepare(self, logits: Tensor, drafts: Tensor | None) -> tuple[tuple[int, int], _Buffers, dict[str, Any]]:
        """The grid, buffers and options of the kernels that have a program for some slices of a row."""
        rows, vocab = logits.shape
        width = 1 if drafts is None else drafts.shape[1] + 1
        if rows > self.rows * width or vocab != self.vocab or not logits.is_contiguous():
            raise ValueError(
                f"logits of shape {tuple(logits.shape)} and strides {logits.stride()}: "
                f"they must be contiguous, at most {self.rows * width} rows of {self.vocab}"
            )
        if rows not in self._buffers:
            self._buffers[rows] = self._make_buffers(rows)
        each = SLICES_PER_PROGRAM if rows >= MANY_ROWS else 1
        options: dict[str, Any] = {"V": vocab, "WIDTH": width, "SLICES": self._slices, "BLOCK_S": each}
        options |= self._options | {"num_warps": WARPS * (2 if each > 1 else 1)}
        return (triton.cdiv(self._slices, each), rows), self._buffers[rows], options

    def _make_buffers(self, rows: int) -> _Buffers:
        best = torch.empty(rows, self._slices, dtype=torch.float32, device=self._device)
        return _Buffers(best, torch.empty_like(best, dtype=torch.int32))


class DeviceSampler(GreedySampler):
    """Samples the next token of each of up to `rows` rows, with settings in device memory.

    Rows are independent: a row gets the same tokens alone or in a batch. Until `set_rows`, a row is greedy.
    """

    def __init__(self, rows: int, vocab: int, device: torch.device | str, pdl: bool = False) -> None:
        super().__init__(rows, vocab, device, pdl)

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(rows, *shape, dtype=dtype, device=device)

        self._ints = zeros(sample.INTS.value, dtype=torch.int64)
        self._floats = zeros(sample.FLOATS.value, dtype=torch.float32)
        self._history = zeros(vocab, dtype=torch.int32)
        self._bias = zeros(vocab, dtype=torch.float32)
        self._has_history = [False] * rows
        self._has_bias = [False] * rows

    def set_rows(
        self,
        rows: Sequence[int],
        settings: Sequence[PackedSettings],
        tokens: Sequence[Sequence[int]],
        prompt_lens: Sequence[int],
    ) -> None:
        """Set the sampling settings of these rows from the next launch on.

        tokens: of each sequence so far; the first prompt_len are the prompt. `launch` adds the tokens that it chooses
        to this history, on the device.
        """
        device = self._ints.device
        at = to_device(torch.tensor(rows), device)
        columns = [_setting_columns(each) for each in settings]
        self._ints[at] = to_device(torch.tensor([ints for ints, _ in columns]), device)
        self._floats[at] = to_device(torch.tensor([floats for _, floats in columns]), device)
        for row, each, so_far, prompt_len in zip(rows, settings, tokens, prompt_lens, strict=True):
            self._set_history(row, "penalized" in each.flags, so_far, prompt_len)
            self._set_bias(row, each.logit_bias)

    def copy_rows_from(self, other: DeviceSampler, rows: Sequence[int], other_rows: Sequence[int]) -> None:
        """Continue rows of another sampler in these rows."""
        at, of = to_device(torch.tensor([[*rows], [*other_rows]]), self._ints.device)
        self._ints[at] = other._ints[of]
        self._floats[at] = other._floats[of]
        for row, other_row in zip(rows, other_rows, strict=True):
            if self._has_history[row] or other._has_history[other_row]:
                self._history[row].copy_(other._history[other_row])
            if self._has_bias[row] or other._has_bias[other_row]:
                self._bias[row].copy_(other._bias[other_row])
            self._has_history[row], self._has_bias[row] = other._has_history[other_row], other._has_bias[other_row]

    def _set_history(self, row: int, penalized: bool, tokens: Sequence[int], prompt_len: int) -> None:
        if self._has_history[row]:
            self._history[row].zero_()
        self._has_history[row] = penalized  # set first: after an interrupt, the row is cleared again
        if penalized:
            so_far = to_device(torch.tensor(tokens, dtype=torch.int64), self._history.device)
            self._history[row].index_fill_(0, so_far[:prompt_len], 1)
            generated = so_far[prompt_len:]
            self._history[row].index_add_(0, generated, torch.full_like(generated, 2, dtype=torch.int32))

    def _set_bias(self, row: int, logit_bias: Mapping[int, float]) -> None:
        if self._has_bias[row]:
            self._bias[row].zero_()
        self._has_bias[row] = bool(logit_bias)
        if logit_bias:
            device = self._bias.device
            ids = to_device(torch.tensor(list(logit_bias)), device)
            values = to_device(torch.tensor(list(logit_bias.values()), dtype=torch.float32), device)
            self._bias[row].index_copy_(0, ids, values)

    def launch(
        self,
        logits: Tensor,
        positions: Tensor,
        tokens: Tensor,
        host_tokens: Tensor,
        steps: Tensor,
        drafts: Tensor | None = None,
    ) -> None:
        grid, buffers, options = self._prepare(logits, drafts)
        best, best_at, scores, counts, masses, cuts, weights = buffers
        assert masses is not None
        filter_grid = min(grid[0], max(1, MAX_FILTER_PROGRAMS // grid[1])), grid[1]
        padded = {"PADDED": self._padded}
        ints, floats = self._ints, self._floats
        row = positions, logits, best, scores, ints, floats
        cleared = triton.next_power_of_2(triton.cdiv(masses[0].numel(), grid[0]))
        sample.best_of_slices[grid](
            logits,
            positions,
            best,
            best_at,
            scores,
            ints,
            floats,
            self._history,
            self._bias,
            counts,
            masses,
            drafts,
            GREEDY=False,
            CLEARED=cleared,
            **options,
        )
        sample.count[filter_grid](*row, counts, masses, **padded, **options)
        sample.narrow_top_k[filter_grid](*row, counts, masses, cuts, **padded, **options)
        sample.narrow_top_p[filter_grid](*row, counts, masses, cuts, **padded, **options)
        sample.weigh[grid](*row, masses, cuts, weights, **padded, **options)
        sample.draw[grid[1:]](
            positions,
            logits,
            best,
            best_at,
            scores,
            ints,
            floats,
            cuts,
            weights,
            self._history,
            tokens,
            host_tokens,
            steps,
            V=self.vocab,
            WIDTH=options["WIDTH"],
            RING=host_tokens.shape[0],
            SLICES=self._slices,
            **padded,
            **self._options,
        )

    def _settings_and_history(self) -> tuple[Tensor | None, Tensor | None]:
        return self._ints, self._history

    def _make_buffers(self, rows: int) -> _Buffers:
        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(rows, *shape, dtype=dtype, device=self._device)

        return (
            super()
            ._make_buffers(rows)
            ._replace(
                scores=zeros(self.vocab, dtype=torch.float32),
                counts=zeros(sample.COUNTS.value, sample.BINS.value, dtype=torch.int32),
                masses=zeros(sample.MASSES.value, sample.BINS.value, dtype=torch.int64),
                cuts=zeros(sample.CUTS.value, dtype=torch.int64),
                weights=zeros(self._slices, dtype=torch.int64),
            )
        )


def _setting_columns(settings: PackedSettings) -> tuple[list[int], list[float]]:
    """A row of `_ints`, and of `_floats`."""
    columns = {**settings.columns, "flags": sum(sample.FLAG_BITS[flag] for flag in settings.flags)}
    ints = [_signed(int(columns[name])) for name in sample.INT_COLUMNS]
    floats = [float(columns[name]) for name in sample.FLOAT_COLUMNS]
    return ints + [0] * (sample.INTS.value - len(ints)), floats + [0.0] * (sample.FLOATS.value - len(floats))


def _signed(bits: int) -> int:
    """An unsigned 64-bit integer as int64 with the same bits."""
    return bits - 2**64 if bits >= 2**63 else bits
