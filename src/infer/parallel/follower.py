"""A process that follows: it loads its part of a model, and runs the passes that the leader tells it to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from infer.backend import backend_for
from infer.backend.fingerprint import fingerprint
from infer.cache.base import Cache, NoCache
from infer.cache.wrapped import WrappedCache
from infer.loader import load_model
from infer.machine import use_threads
from infer.models.common import Decoder
from infer.models.rows import Row
from infer.parallel.group import ProcessGroup
from infer.parallel.pages import FollowedCache, FollowedPool, gathered_heads, own_heads, windows_of


def load_part(group: ProcessGroup, settings: Mapping[str, Any]) -> Any:
    """This process's part of a model, once all have theirs. The leader hears what went wrong."""
    model, error = None, None
    try:
        model = load_model(**settings, device=group.device, group=group)[0]
    except Exception as problem:
        error = problem
    group.agree(error=error)
    return model


class Follower:
    """Does what it is told. Each method is something that a leader says."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._model: Decoder
        self._pools: dict[int, FollowedPool] = {}

    def load(self, settings: Mapping[str, Any], threads: int | None) -> None:
        if threads is not None:
            use_threads(threads)
        self._model = load_part(self._group, settings)

    def fingerprint(self) -> None:
        self._group.agree(fingerprint(self._model))

    def pool(self, number: int, count: int, layers: int, dtype: torch.dtype, page: int) -> None:
        model, error = self._model, None
        heads, head_dim = model.config.num_key_value_heads, model.config.computed_head_dim
        try:
            self._pools[number] = FollowedPool(
                count, layers, heads, head_dim, dtype=dtype, device=model.device, page=page
            )
        except Exception as problem:
            error = problem
        self._group.agree(heads, error)

    def drop(self, number: int) -> None:
        self._pools.pop(number, None)

    def copy(self, number: int, page: int, to: int) -> None:
        if number in self._pools:  # it may have been dropped meanwhile
            self._pools[number].copy(page, to)

    def read(self, number: int, pages: list[int], heads: list[int]) -> None:
        gathered_heads(self._group, self._pools[number].read(pages), heads)

    def write(self, number: int, pages: list[int], contents: Tensor, heads: list[int]) -> None:
        self._pools[number].write(pages, own_heads(self._group, contents, heads))

    def run(self, rows: list[Any]) -> None:
        backend_for(self._model).run([Row(self._cache(*cache), tokens, wanted) for tokens, cache, wanted in rows])

    def _cache(self, watched: bool, pool: int | None, size: int, pages: Any = None) -> Cache:
        """watched: the leader's has another around it, so a pass asks it to attend. size: positions filled, or rows."""
        if pool is None:
            cache: Cache = NoCache(size, self._model.device)
        else:
            cache = FollowedCache(self._pools[pool], windows_of(self._model.config), size, pages)
        return WrappedCache(cache) if watched else cache


@torch.inference_mode()
def follow(group: ProcessGroup) -> None:
    """Until the leader says that it is over, or is gone."""
    following = Follower(group)
    while True:
        for what, *arguments in group.hear():
            if what == "end":
                return
            getattr(following, what)(*arguments)
