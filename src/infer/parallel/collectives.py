"""The collectives of torch.distributed, without its global process group: NCCL between GPUs, gloo between CPUs."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
import torch.nn.functional as F
from torch import Tensor

distributed: Any = torch.distributed  # untyped: it does not declare its exports
CONNECT_TIMEOUT = timedelta(minutes=1)  # between processes that have started


class Collectives:
    """Of one torch.distributed process group."""

    def __init__(self, process_group: Any, *, on_host: bool = False) -> None:
        """on_host: it takes CPU tensors only."""
        self._process_group, self._on_host = process_group, on_host

    def all_gather(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        """x [T, sizes[rank]] of each rank -> [T, sum(sizes)]"""
        most = max(sizes)
        own = x if x.shape[1] == most else F.pad(x, (0, most - x.shape[1]))
        own = (own.cpu() if self._on_host else own).contiguous()
        pieces = [torch.empty_like(own) for _ in sizes]
        self._process_group.allgather([pieces], [own]).wait()
        return torch.cat([piece[:, :size] for piece, size in zip(pieces, sizes, strict=True)], 1).to(x.device)

    def abort(self) -> None:
        self._process_group.abort()


def nccl(store: Any, rank: int, world_size: int, timeout: timedelta) -> Any:
    options = distributed.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return distributed.ProcessGroupNCCL(store, rank, world_size, options)


def gloo(store: Any, rank: int, world_size: int, timeout: timedelta, *, local: bool) -> Any:
    """local: all ranks are on this machine."""
    options = distributed.ProcessGroupGloo._Options()
    process_group = distributed.ProcessGroupGloo
    # On one machine use this address, whatever the host name resolves to.
    device = process_group.create_device(hostname="127.0.0.1") if local else process_group.create_default_device()
    options._devices, options._timeout = [device], CONNECT_TIMEOUT
    made = process_group(store, rank, world_size, options)
    made._set_default_timeout(timeout)
    return made
