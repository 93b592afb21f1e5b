"""A model in several processes: each has some rows of every matrix, and gathers what the others have computed.

A number depends on its row of a weight and on the whole of what that row is multiplied with. So it is the same, to the
bit, whichever process computes it: a model gives the same logits in any number of processes. (Cut by its columns, a
matrix would give partial sums, and their total would depend on how many there are.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from infer.nn.linear import Embedding, Linear


class Group(Protocol):
    """The processes that run one model."""

    rank: int  # of this process
    count: int

    @property
    def sharing(self) -> int: ...  # how many processes take memory where this one does

    @property
    def capturable(self) -> bool: ...  # whether what is exchanged can be captured in a CUDA graph
    def gather(self, x: Tensor, sizes: Sequence[int]) -> Tensor: ...  # [T, sizes[rank]] of each -> [T, sum(sizes)]
    def combine(self, x: Tensor, own: Tensor) -> Tensor: ...  # of x [T, C], each row from the process where own [T]
    def led(self, model: Any, backend: Any) -> Any: ...  # a backend that has the others run along
    def watch(self, watcher: Callable[[BaseException], None]) -> Callable[[], None]: ...  # hears of a lost process
    def close(self) -> None: ...


def shares(total: int, count: int) -> list[range]:
    """What each of `count` processes has of so many: nearly the same, the first ones more."""
    bounds = [0, *accumulate(total // count + (i < total % count) for i in range(count))]
    return [range(first, last) for first, last in pairwise(bounds)]


class SplitLinear(Linear):
    """A product of which this process has some rows. What it gives is whole; what it takes may be in parts."""

    def __init__(
        self, group: Group, inputs: Sequence[int] | int, outputs: Sequence[int], *, bias: bool = False
    ) -> None:
        """inputs, outputs: how much of x, and of what comes out, each process computes; a number: all have all of x."""
        rows, columns = outputs[group.rank], inputs if isinstance(inputs, int) else sum(inputs)
        super().__init__(columns, rows, bias=bias)
        self.group, self.inputs, self.outputs, self.own_shape = group, inputs, outputs, (rows, columns)

    @property
    def in_features(self) -> int:
        return self.inputs if isinstance(self.inputs, int) else self.inputs[self.group.rank]

    @property
    def out_features(self) -> int:
        return sum(self.outputs)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        out = self.output(super().forward(self.input(x)))
        return out if residual is None else out.add_(residual)

    def input(self, x: Tensor) -> Tensor:
        return x if isinstance(self.inputs, int) else self.group.gather(x, self.inputs)

    def output(self, own: Tensor) -> Tensor:
        return self.group.gather(own, self.outputs)


class SplitEmbedding(Embedding):
    """Vectors of which this process has those of some tokens."""

    def __init__(self, group: Group, count: int, size: int) -> None:
        own = shares(count, group.count)[group.rank]
        super().__init__(len(own), size)
        self.group, self.count, self.own = group, count, own

    def forward(self, ids: Tensor) -> Tensor:
        at, own = self.places(ids)
        return self.group.combine(super().forward(at), own)

    def places(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Where the vectors of ids [T] lie here, and which of them do."""
        if ids.is_cpu and ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < self.count:
            raise IndexError("there is no such token")
        at = ids - self.own.start
        own = (at >= 0) & (at < len(self.own))
        return torch.where(own, at, 0), own
