"""Where two runs diverge: the first layer and tensor whose bits differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Unpack

import torch
from torch import Tensor

from infer.cache.base import AttendOptions, Cache, CacheWrapper


@dataclass(frozen=True)
class Divergence:
    """The first tensor in which two runs differ: all inputs of its computation are equal."""

    # "query", "key", "value", "attended": of a layer; "head"; "fused step": different only without recording
    what: str
    layer: int | None = None
    position: int | None = None
    element: int | None = None  # of all heads, concatenated
    expected: float | None = None
    got: float | None = None

    def __str__(self) -> str:
        if self.what == "head":
            return "all layers agree: the difference is in the last norm or the head"
        if self.what == "fused step":
            return "with every layer recorded, both agree: the difference is in the kernel that runs a step in one call"
        where = f"layer {self.layer}, {self.what}, position {self.position}, element {self.element}"
        return f"{where}: {self.got!r} instead of {self.expected!r}"


class Call(NamedTuple):
    """Inputs and output of a layer's attention, for each row's positions from `start` on."""

    rows: Sequence[int]  # the prompts
    layer: int
    start: int
    tensors: dict[str, Tensor]  # by name, [B, H, n, D]

    def until(self, position: int) -> Call:
        return self._replace(tensors={what: x[:, :, : position - self.start] for what, x in self.tensors.items()})


class RecordingCache(CacheWrapper):
    """Records the inputs and outputs of every layer's attention."""

    def __init__(self, cache: Cache, rows: Sequence[int], calls: list[Call]) -> None:
        super().__init__(cache)
        self.rows = rows
        self.calls = calls

    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, **options: Unpack[AttendOptions]) -> Tensor:
        out = super().attend(layer_idx, q, k, v, **options)
        tensors = {"query": q.clone(), "key": k.clone(), "value": v.clone(), "attended": out.clone()}
        self.calls.append(Call(self.rows, layer_idx, self.seq_len, tensors))
        return out


def first_divergence(reference: Sequence[Call], calls: Sequence[Call], prompt: int, last: int) -> Divergence | None:
    """The first difference by layer, then by order of computation, then by position, up to position `last`.

    reference: one pass over all positions.
    """
    references = {call.layer: call.tensors for call in reference}
    found: list[tuple[tuple[int, bool, int], Divergence]] = []
    for call in calls:
        for row in [at for at, index in enumerate(call.rows) if index == prompt]:
            for what, got in call.tensors.items():
                n = max(0, min(got.shape[2], last + 1 - call.start))
                expected = _by_position(references[call.layer][what][0, :, call.start : call.start + n])  # [n, H * D]
                mine = _by_position(got[row, :, :n])
                differs = bits(expected) != bits(mine)
                if differs.any():
                    at, element = (int(index) for index in differs.nonzero()[0])
                    position = call.start + at
                    pair = float(expected[at, element]), float(mine[at, element])
                    rank = call.layer, what == "attended", position
                    found.append((rank, Divergence(what, call.layer, position, element, *pair)))
    return min(found, key=lambda entry: entry[0])[1] if found else None


def bits(x: Tensor) -> Tensor:
    """As integers: equal where all bits are equal, NaN included."""
    return x.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def _by_position(x: Tensor) -> Tensor:
    return x.transpose(0, 1).flatten(1)  # [H, n, D] -> [n, H * D]
