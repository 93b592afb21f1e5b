"""Tensor parallelism: each rank has some output rows of every matrix, and gathers what the others have computed.

An output depends on one row of the weight and on the full input of that row. So it has the same bits on whichever rank
computes it, and a model gives the same logits at any world size. (A matrix sharded by input columns gives partial sums,
whose total depends on the number of ranks.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from infer.nn.linear import Embedding, ExpertLinear, Linear
from infer.nn.norm import RMSNorm


class Group(Protocol):
    """The processes that run one model."""

    failure: BaseException | None  # a process was lost: no pass runs any more
    rank: int  # of this process
    world_size: int

    @property
    def sharing(self) -> int: ...  # how many processes allocate from the same memory as this one

    @property
    def capturable(self) -> bool: ...  # whether its collectives can be captured in a CUDA graph
    def all_gather(self, x: Tensor, sizes: Sequence[int]) -> Tensor: ...  # [T, sizes[rank]] of each -> [T, sum(sizes)]
    def combine(self, x: Tensor, own: Tensor) -> Tensor: ...  # of x [T, C], each row from the rank where own [T]
    def wrap_backend(self, model: Any, backend: Any) -> Any: ...  # one that runs each pass on all ranks
    def watch(self, watcher: Callable[[BaseException], None]) -> Callable[[], None]: ...  # called if a process is lost
    def close(self) -> None: ...


def shard_ranges(total: int, count: int) -> list[range]:
    """Cut 0..total-1 into `count` ranges of nearly equal length, the longer ones first."""
    bounds = [0, *accumulate(total // count + (i < total % count) for i in range(count))]
    return [range(first, last) for first, last in pairwise(bounds)]


class ShardedLinear(Linear):
    """This rank's output rows of a linear layer. The output is gathered; the input may be sharded."""

    def __init__(
        self, group: Group, inputs: Sequence[int] | int, outputs: Sequence[int], *, bias: bool = False
    ) -> None:
        """inputs: features of x by rank, or one number if each rank has all of x. outputs: output rows by rank."""
        rows, columns = outputs[group.rank], inputs if isinstance(inputs, int) else sum(inputs)
        super().__init__(columns, rows, bias=bias)
        self.group, self.inputs, self.outputs, self.shard_shape = group, inputs, outputs, (rows, columns)

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
        return x if isinstance(self.inputs, int) else self.group.all_gather(x, self.inputs)

    def output(self, own: Tensor) -> Tensor:
        return self.group.all_gather(own, self.outputs)


class ShardedExpertLinear(ShardedLinear, ExpertLinear):
    """This rank's output rows of the down projection of each expert."""

    def __init__(
        self, group: Group, num_experts: int, inputs: Sequence[int], outputs: Sequence[int], *, bias: bool = False
    ) -> None:
        """inputs, outputs: of one expert, by rank."""
        rows, columns = outputs[group.rank], sum(inputs)
        ExpertLinear.__init__(self, columns, num_experts, {"down_proj": rows}, bias=bias)
        self.group, self.inputs, self.outputs, self.shard_shape = group, inputs, outputs, (num_experts * rows, columns)

    @property
    def out_features(self) -> int:
        return self.num_experts * sum(self.outputs)

    def forward(self, x: Tensor, expert: int) -> Tensor:  # type: ignore[override]
        return self.output(ExpertLinear.forward(self, self.input(x), expert))


class ShardedRMSNorm(RMSNorm):
    """Normalizes the heads of all ranks together. They are gathered: squares are then added as in one process."""

    def __init__(self, group: Group, norm: RMSNorm, features: Sequence[range]) -> None:
        """norm: of this rank's features alone. features: of each rank, some of which may have the same."""
        super().__init__(features[-1].stop, norm.eps)
        self.group, self.offset, self.own = group, norm.offset, features[group.rank]
        # Of ranks with the same features, the first one gives them.
        self.sizes = [0 if each in features[:rank] else len(each) for rank, each in enumerate(features)]

    def forward(self, x: Tensor) -> Tensor:
        return self.output(super().forward(self.input(x)))

    def input(self, own: Tensor) -> Tensor:
        return self.group.all_gather(own[..., : self.sizes[self.group.rank]], self.sizes)

    def output(self, x: Tensor) -> Tensor:
        return x[..., self.own.start : self.own.stop]


class ShardedEmbedding(Embedding):
    """The embeddings of this rank's part of the vocabulary."""

    def __init__(self, group: Group, vocab_size: int, size: int) -> None:
        vocab_range = shard_ranges(vocab_size, group.world_size)[group.rank]
        super().__init__(len(vocab_range), size)
        self.group, self.vocab_size, self.vocab_range = group, vocab_size, vocab_range

    def forward(self, ids: Tensor) -> Tensor:
        local_ids, own = self.local_ids(ids)
        return self.group.combine(super().forward(local_ids), own)

    def local_ids(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """ids [T] -> rows of this rank's weight (0 for tokens of other ranks), and which tokens are its own."""
        if ids.is_cpu and ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < self.vocab_size:
            raise IndexError(f"token ids must be from 0 to {self.vocab_size - 1}")
        local = ids - self.vocab_range.start
        own = (local >= 0) & (local < len(self.vocab_range))
        return torch.where(own, local, 0), own
