"""A forward pass is a list of rows: each brings its cache, the tokens to compute, and what to return of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, Unpack

import torch
from torch import Tensor, nn

from infer.cache.base import AttendOptions, BaseCache, Cache, unwrap
from infer.machine import to_device

NONE, LAST, ALL = slice(0), slice(-1, None), slice(None)  # of a row's new positions


class HiddenStates:
    """Hidden states that a pass returns of a row: the pass fills in `layers` and `final`."""

    def __init__(self, layers: Collection[int] = (), *, final: bool = False, positions: slice = ALL) -> None:
        """layers: whose outputs to return, the residual stream. final: also the output of the last norm.

        positions: of the row's new positions.
        """
        self.positions, self.returns_final = positions, final
        self.layers: dict[int, Tensor | None] = dict.fromkeys(layers)  # each [B, k, C]
        self.final: Tensor | None = None  # [B, k, C]


class Row(NamedTuple):
    """One sequence of a pass; or several of one length, if one cache holds them all."""

    cache: Cache
    tokens: Sequence[int] | Tensor  # n ids, or [B, n] for a cache of B sequences
    logits: slice = LAST  # the positions, of the n, whose logits are returned
    hidden: HiddenStates | None = None


class Span(NamedTuple):
    """Where a row's tokens are in a pass."""

    row: Row
    batch: int  # B
    n: int
    start: int  # its B * n tokens are contiguous from here

    @property
    def stop(self) -> int:
        return self.start + self.batch * self.n

    def indices(self, positions: slice) -> list[int]:
        """Of these positions of the row, in the pass."""
        at = range(self.n)[positions]
        return [self.start + b * self.n + i for b in range(self.batch) for i in at]


class PackedBatch(NamedTuple):
    """The tokens of all rows of a pass, contiguous: T in all. Activations are [T, C]: only attention sees rows."""

    spans: Sequence[Span]
    ids: Tensor  # [T]
    positions: Tensor  # [T]
    model: nn.Module | None = None  # its embedding, which identifies it

    def attend(
        self,
        layer_idx: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        **options: Unpack[AttendOptions],
    ) -> Tensor:
        """q [T, Hq, D], k and v [T, Hkv, D] -> [T, Hq D]: each row stores its keys and attends in its own cache."""
        out = []
        for span in self.spans:
            own = (x[span.start : span.stop].view(span.batch, span.n, -1, x.shape[2]) for x in (q, k, v))
            heads = (x.transpose(1, 2) for x in own)  # [B, H, n, D]
            attended = span.row.cache.attend(layer_idx, *heads, **options)
            out.append(attended.transpose(1, 2).reshape(span.batch * span.n, -1))
        return out[0] if len(out) == 1 else torch.cat(out)

    def selected(self) -> list[int] | None:
        """The tokens whose logits are returned; None: all."""
        if all(span.row.logits == ALL for span in self.spans):
            return None
        return [i for span in self.spans for i in span.indices(span.row.logits)]

    def select(self, x: Tensor) -> Tensor:
        """Of x [T, C], the tokens whose logits are returned."""
        if (selected := self.selected()) is None or len(selected) == len(x):
            return x
        if len(selected) == 1:
            return x[selected[0] : selected[0] + 1]
        return x[to_device(torch.tensor(selected, dtype=torch.int64), x.device)]

    def split(self, logits: Tensor) -> list[Tensor]:
        """Logits of all selected tokens, by row: each [B, k, V]."""
        counts = [span.batch * len(range(span.n)[span.row.logits]) for span in self.spans]
        pieces = (logits,) if len(counts) == 1 else torch.split(logits, counts)
        return [x.view(span.batch, -1, x.shape[1]) for x, span in zip(pieces, self.spans, strict=True)]

    @property
    def returns_hidden(self) -> bool:
        return any(span.row.hidden is not None for span in self.spans)

    def return_layer(self, layer_idx: int, x: Tensor) -> None:
        """x [T, C], the output of a layer, to the rows that return it."""
        for span in self.spans:
            hidden = span.row.hidden
            if hidden is not None and layer_idx in hidden.layers:
                hidden.layers[layer_idx] = self._of_row(span, hidden, x)

    def return_final(self, x: Tensor, norm: Callable[[Tensor], Tensor]) -> None:
        """x [T, C], the output of the last layer, normalized to the rows that return it."""
        for span in self.spans:
            hidden = span.row.hidden
            if hidden is not None and hidden.returns_final:
                hidden.final = norm(self._of_row(span, hidden, x))

    def _of_row(self, span: Span, hidden: HiddenStates, x: Tensor) -> Tensor:
        """[B, k, C], a copy"""
        rows = x[span.start : span.stop].view(span.batch, span.n, -1)  # [B, n, C]
        return rows[:, hidden.positions].clone()

    def advance(self) -> None:
        for span in self.spans:
            at = span.row.cache.seq_len
            span.row.cache.advance(span.n)
            record(span.row.cache, at, span.row.tokens, self.model)


def record(cache: Cache, at: int, tokens: Sequence[int] | Tensor, model: nn.Module | None) -> None:
    """Tell a cache which tokens it holds from position `at` on."""
    inner = unwrap(cache)
    if isinstance(inner, BaseCache) and inner.seq_len:
        inner.contents.add(at, tokens, model)


def pack(
    rows: Sequence[Row],
    device: torch.device,
    positions_learned: int | None = None,
    model: nn.Module | None = None,
) -> PackedBatch:
    """Refuses rows that do not fit their caches, or exceed the positions that a model learned, before any work.

    model: its embedding, by which caches know whose keys they hold.
    """
    if len({id(row.cache) for row in rows}) < len(rows):
        raise ValueError("each row of a pass needs a cache of its own")
    spans, positions, start = [], [], 0
    for row in rows:
        batch, n = _shape(row.tokens)
        if not batch * n:
            raise ValueError(f"there are no tokens in input_ids of shape {[batch, n]}")
        reserve(row.cache, n, positions_learned, model)
        at = row.cache.positions(n)
        if at.shape[0] != batch:
            raise ValueError(f"input_ids have a batch of {batch}, but the cache one of {at.shape[0]}")
        spans.append(Span(row, batch, n, start))
        start = spans[-1].stop
        positions.append(at.flatten())
    if not rows:
        raise ValueError("a pass needs at least one row")
    if any(isinstance(row.tokens, Tensor) for row in rows):
        joined = _joined([torch.as_tensor(row.tokens).flatten() for row in rows])
    else:  # at once: a tensor for each row would take longer than all else here
        joined = torch.tensor([token for row in rows for token in row.tokens], dtype=torch.int64)
    joined = joined if joined.device == device else to_device(joined, device)
    return PackedBatch(spans, joined, _joined(positions), model)


def _shape(tokens: Sequence[int] | Tensor) -> tuple[int, int]:
    """[batch, tokens]"""
    if not isinstance(tokens, Tensor):
        return 1, len(tokens)
    if tokens.dim() != 2 or tokens.dtype not in (torch.int64, torch.int32):
        kind = f"{str(tokens.dtype).removeprefix('torch.')} of shape {list(tokens.shape)}"
        raise ValueError(f"input_ids must be integers [batch, tokens], not {kind}")
    return tokens.shape[0], tokens.shape[1]


def reserve(cache: Cache, n: int, positions_learned: int | None, model: nn.Module | None) -> None:
    """Reserve memory for n more positions, or raise an error; see `pack`."""
    inner = unwrap(cache)
    if isinstance(inner, BaseCache) and model is not None:
        inner.check_contents(model)
    cache.reserve(n)
    if positions_learned is not None and (end := cache.seq_len + n) > positions_learned:
        raise ValueError(f"{end} positions exceed the {positions_learned} that the model learned")


def _joined(pieces: Sequence[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces))
