"""Several processes of one model, as threads of this one: a group for tests, without a second to start."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

WAIT = 300.0  # seconds: longer than anything takes


class Meeting:
    """Where threads exchange what they have."""

    def __init__(self, count: int) -> None:
        self.barrier = threading.Barrier(count, timeout=WAIT)
        self.given: list[Any] = [None] * count

    def exchange(self, rank: int, own: Any) -> list[Any]:
        self.given[rank] = own
        self.barrier.wait()
        found = list(self.given)
        self.barrier.wait()  # nobody gives anything else before all have taken
        return found


class ThreadGroup:
    """An `nn.sharded.Group`."""

    failure = None
    sharing = 1
    capturable = False

    def __init__(self, rank: int, meeting: Meeting) -> None:
        self.rank, self.world_size, self._meeting = rank, len(meeting.given), meeting

    def all_gather(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        assert x.shape[-1] == sizes[self.rank]
        return torch.cat(self._meeting.exchange(self.rank, x.clone()), -1)  # x may change once this returns

    def combine(self, x: Tensor, own: Tensor) -> Tensor:
        given = self._meeting.exchange(self.rank, (x.clone(), own))
        assert torch.stack([owned for _, owned in given]).sum(0).eq(1).all()  # each row is somebody's, and one's alone
        out = torch.empty_like(x)
        for theirs, owned in given:
            out[owned] = theirs[owned]
        return out

    def wrap_backend(self, model: Any, backend: Any) -> Any:
        return backend

    def watch(self, watcher: Any) -> Callable[[], None]:
        return lambda: None

    def close(self) -> None: ...


def on_ranks(count: int, work: Callable[[ThreadGroup], Any]) -> list[Any]:
    """What `work` returns on each of so many ranks, which run at once."""
    meeting = Meeting(count)

    def run(rank: int) -> Any:
        try:
            return work(ThreadGroup(rank, meeting))
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(count) as pool:
        futures = [pool.submit(run, rank) for rank in range(count)]
        errors = [future.exception() for future in futures]
        for error in sorted(filter(None, errors), key=lambda error: isinstance(error, threading.BrokenBarrierError)):
            raise error
        return [future.result() for future in futures]
