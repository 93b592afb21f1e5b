"""A forward pass is a list of rows: each brings its cache and the tokens to feed behind what the cache holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from infer.cache.base import AttentionKernel, BaseCache, Cache
from infer.cache.wrapped import innermost
from infer.machine import to_device

NONE, LAST, ALL = slice(0), slice(-1, None), slice(None)  # of a row's new positions


class Row(NamedTuple):
    """One sequence of a pass; or several of one length, where one cache holds them all."""

    cache: Cache
    tokens: Sequence[int] | Tensor  # n ids, or [B, n] for a cache of B sequences
    logits: slice = LAST  # of which of the n positions logits are wanted


class Span(NamedTuple):
    """Where a row's tokens are in a pass."""

    row: Row
    batch: int  # B
    n: int
    start: int  # its B * n tokens follow each other from here on

    @property
    def stop(self) -> int:
        return self.start + self.batch * self.n

    def wanted(self) -> list[int]:
        """The tokens of which logits are wanted."""
        at = range(self.n)[self.row.logits]
        return [self.start + b * self.n + i for b in range(self.batch) for i in at]


class Packed(NamedTuple):
    """The rows of a pass behind each other: T tokens in all. Activations are [T, C]: only attention sees rows."""

    spans: Sequence[Span]
    ids: Tensor  # [T]
    positions: Tensor  # [T]
    model: nn.Module | None = None  # by the module that turns tokens into vectors

    def attend(
        self,
        layer_idx: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        window: int | None,
        kernel: AttentionKernel | None = None,
    ) -> Tensor:
        """q [T, Hq, D], k and v [T, Hkv, D] -> [T, Hq D]: each row stores its keys and attends in its own cache."""
        out = []
        for cache, batch, n, start, stop in self._bounds():
            heads = (x[start:stop].view(batch, n, -1, x.shape[2]).transpose(1, 2) for x in (q, k, v))  # [B, H, n, D]
            attended = cache.attend(layer_idx, *heads, scale=scale, window=window, kernel=kernel)
            out.append(attended.transpose(1, 2).reshape(batch * n, -1))
        return out[0] if len(out) == 1 else torch.cat(out)

    def _bounds(self) -> list[tuple[Cache, int, int, int, int]]:
        return [(span.row.cache, span.batch, span.n, span.start, span.stop) for span in self.spans]

    def wanted(self) -> list[int] | None:
        """The tokens of which logits are wanted; None: all."""
        if all(span.row.logits == ALL for span in self.spans):
            return None
        return [i for span in self.spans for i in span.wanted()]

    def choose(self, x: Tensor) -> Tensor:
        """Of x [T, C], the wanted tokens."""
        if (wanted := self.wanted()) is None or len(wanted) == len(x):
            return x
        if len(wanted) == 1:
            return x[wanted[0] : wanted[0] + 1]
        return x[to_device(torch.tensor(wanted, dtype=torch.int64), x.device)]

    def split(self, logits: Tensor) -> list[Tensor]:
        """Logits of all wanted tokens, by row: each [B, wanted, V]."""
        counts = [span.batch * len(range(span.n)[span.row.logits]) for span in self.spans]
        pieces = (logits,) if len(counts) == 1 else torch.split(logits, counts)
        return [x.view(span.batch, -1, x.shape[1]) for x, span in zip(pieces, self.spans, strict=True)]

    def advance(self) -> None:
        for span in self.spans:
            at = span.row.cache.seq_len
            span.row.cache.advance(span.n)
            record(span.row.cache, at, span.row.tokens, self.model)


def record(cache: Cache, at: int, tokens: Sequence[int] | Tensor, model: nn.Module | None) -> None:
    """Let a cache know which tokens were fed to it from position `at` on."""
    inner = innermost(cache)
    if isinstance(inner, BaseCache) and inner.seq_len:
        inner.contents.add(at, tokens, model)


def pack(
    rows: Sequence[Row],
    device: torch.device,
    positions_learned: int | None = None,
    model: nn.Module | None = None,
) -> Packed:
    """Refuses rows that do not fit their caches, or go beyond the positions that a model learned, before any work.

    model: known by the module that turns tokens into vectors, for caches to know whose keys they hold.
    """
    if len({id(row.cache) for row in rows}) < len(rows):
        raise ValueError("each row of a pass needs a cache of its own")
    spans, ids, positions, start = [], [], [], 0
    for row in rows:
        tokens = row.tokens if isinstance(row.tokens, Tensor) else torch.tensor([row.tokens], dtype=torch.int64)
        if tokens.dim() != 2 or tokens.dtype not in (torch.int64, torch.int32):
            kind = f"{str(tokens.dtype).removeprefix('torch.')} of shape {list(tokens.shape)}"
            raise ValueError(f"input_ids must be whole numbers [batch, tokens], not {kind}")
        if not tokens.numel():
            raise ValueError(f"there are no tokens in input_ids of shape {list(tokens.shape)}")
        reserve(row.cache, tokens.shape[1], positions_learned, model)
        at = row.cache.positions(tokens.shape[1])
        if at.shape[0] != tokens.shape[0]:
            raise ValueError(f"input_ids have a batch of {tokens.shape[0]}, but the cache one of {at.shape[0]}")
        spans.append(Span(row, tokens.shape[0], tokens.shape[1], start))
        start = spans[-1].stop
        ids.append(tokens.flatten())
        positions.append(at.flatten())
    if not rows:
        raise ValueError("a pass needs at least one row")
    return Packed(spans, to_device(_joined(ids), device), _joined(positions), model)


def reserve(cache: Cache, n: int, positions_learned: int | None, model: nn.Module | None) -> None:
    """Memory for n more positions, or an error; as for `pack`."""
    inner = innermost(cache)
    if isinstance(inner, BaseCache) and model is not None:
        inner.check_contents(model)
    cache.reserve(n)
    if positions_learned is not None and (end := cache.seq_len + n) > positions_learned:
        raise ValueError(f"{end} positions exceed the {positions_learned} that the model learned")


def _joined(pieces: Sequence[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces))
