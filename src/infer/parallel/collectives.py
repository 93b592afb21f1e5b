"""torch.distributed, as far as it is used here: NCCL between GPUs, gloo between CPUs, without its global group."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
import torch.nn.functional as F
from torch import Tensor

distributed: Any = torch.distributed  # which does not say what it exports
CONNECT = timedelta(minutes=1)  # for processes that are there to connect to each other


class Collectives:
    """Those of torch.distributed."""

    def __init__(self, made: Any, *, on_host: bool = False) -> None:
        """on_host: they take tensors of the CPU alone."""
        self._made, self._on_host = made, on_host

    def gather(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        """x [T, sizes[rank]] of each process -> [T, sum(sizes)]"""
        most = max(sizes)
        own = x if x.shape[1] == most else F.pad(x, (0, most - x.shape[1]))
        own = (own.cpu() if self._on_host else own).contiguous()
        pieces = [torch.empty_like(own) for _ in sizes]
        self._made.allgather([pieces], [own]).wait()
        return torch.cat([piece[:, :size] for piece, size in zip(pieces, sizes, strict=True)], 1).to(x.device)

    def abort(self) -> None:
        self._made.abort()


def nccl(store: Any, rank: int, count: int, timeout: timedelta) -> Any:
    options = distributed.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return distributed.ProcessGroupNCCL(store, rank, count, options)


def gloo(store: Any, rank: int, count: int, timeout: timedelta, *, local: bool) -> Any:
    """local: all are on this machine."""
    options = distributed.ProcessGroupGloo._Options()
    made = distributed.ProcessGroupGloo
    # On one machine by this address, whatever its name resolves to.
    options._devices = [made.create_device(hostname="127.0.0.1") if local else made.create_default_device()]
    options._timeout = CONNECT
    group = made(store, rank, count, options)
    group._set_default_timeout(timeout)
    return group


def own_device(kind: str, local_rank: int, collectives: str) -> torch.device:
    """That of a process, among those of its machine."""
    if kind != "cuda":
        return torch.device(kind)
    device = torch.device("cuda", local_rank % torch.cuda.device_count() if collectives == "gloo" else local_rank)
    torch.cuda.set_device(device)
    return device
