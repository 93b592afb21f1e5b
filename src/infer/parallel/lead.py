"""The leader's side of a pass: the others are told its rows, and all run it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from infer.cache.base import Cache, NoCache
from infer.cache.paged import PagedCache
from infer.cache.traced import TracedCache
from infer.cache.wrapped import WrappedCache, innermost
from infer.models.common import Decoder
from infer.models.rows import Row, pack
from infer.parallel.group import ProcessGroup
from infer.parallel.pages import SplitPool, described


class LedBackend:
    """Runs passes of a model in all processes that have a part of it."""

    def __init__(self, group: ProcessGroup, model: Decoder, backend: Any) -> None:
        self.name, self.why = backend.name, f"{backend.why}, in {group.count} processes"
        learned = None if model.embed_positions is None else model.embed_positions.weight.shape[0]
        self._group, self._backend = group, backend
        self._packed_for = model.device, learned, model.embed_tokens  # not the model, which owns this

    def run(self, rows: Sequence[Row]) -> list[Tensor]:
        group = self._group
        pack(rows, *self._packed_for)  # refuses what cannot be run before the others begin
        rows = [row._replace(tokens=_tokens(row)) for row in rows]
        said = [(row.tokens, _described(group, row.cache), row.logits) for row in rows]
        with group.doing("run", said):
            try:
                logits: list[Tensor] = self._backend.run(rows)
                group.finish()
                return logits
            except BaseException as error:
                if group.failure is None:
                    group.fail(f"a pass has failed, and the processes are no longer in step: {error!r:.200}")
                raise

    def decoding(self, lazy: bool = False) -> None:
        return None


def _tokens(row: Row) -> list[int] | Tensor:
    """As all processes are told them: how a pass is run may go by their type."""
    if isinstance(row.tokens, Tensor):
        return row.tokens[0].tolist() if len(row.tokens) == 1 else row.tokens.cpu()
    return list(row.tokens)


def _described(group: ProcessGroup, cache: Cache) -> tuple[Any, ...]:
    """How the others make the same cache."""
    if _is_traced(cache):
        raise ValueError("a trace looks at all heads, of which each process has some: trace in one process")
    inner = innermost(cache)
    watched = inner is not cache
    if isinstance(inner, PagedCache) and isinstance(inner.pool, SplitPool) and inner.pool.group is group:
        return watched, *described(inner)
    if type(inner) is NoCache:
        return watched, None, inner.shape.batch_size
    raise ValueError(
        f"a model in several processes takes caches with pages in all of them, as `LLM` and `generate` make them, "
        f"and no {type(inner).__name__}"
    )


def _is_traced(cache: Any) -> bool:
    while isinstance(cache, WrappedCache):
        if isinstance(cache, TracedCache):
            return True
        cache = cache.cache
    return False
