"""All-gather between processes of one machine, through shared memory.

One token's activations take about 10 us. Through a socket they take 300: threads have to wake up.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import time
from collections.abc import Sequence
from datetime import timedelta
from tempfile import mkstemp
from weakref import finalize

import torch
from torch import Tensor

from infer.backend.cpu.threads import SHM_AREA, SPINS, YIELDS, shm_allgather

HEADER_BYTES = 1 << 16  # before all areas: enough for the counters of 1,024 processes
POLL_S = 0.001  # once spinning has been in vain
FOLDER = "/dev/shm"  # its files are in memory


def make_file(world_size: int) -> str:
    """The caller unlinks it when all ranks have opened it."""
    number, path = mkstemp(prefix="infer-", dir=FOLDER if os.path.isdir(FOLDER) else None)
    try:
        os.ftruncate(number, HEADER_BYTES + 2 * world_size * SHM_AREA)
    finally:
        os.close(number)
    return path


class SharedMemory:
    """Each process holds a lock on its own byte of the file. If another can take that lock, the process has ended."""

    def __init__(self, path: str, rank: int, world_size: int, timeout: timedelta) -> None:
        self._rank, self._world_size, self._timeout = rank, world_size, timeout.total_seconds()
        self._file = os.open(path, os.O_RDWR)
        finalize(self, os.close, self._file)  # closing it releases the lock
        fcntl.lockf(self._file, fcntl.LOCK_EX, 1, rank)
        self._memory = torch.frombuffer(mmap.mmap(self._file, 0), dtype=torch.uint8)
        self._done = torch.zeros(1, dtype=torch.int64)
        self._at = self._memory.data_ptr(), self._memory.data_ptr() + HEADER_BYTES, rank, world_size
        self._widths: dict[tuple[int, ...], Tensor] = {}
        self._number, self._aborted = 0, False

    def all_gather(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        """x [T, sizes[rank]] of each rank -> [T, sum(sizes)]. Raises RuntimeError if a process is lost."""
        itemsize, columns = x.element_size(), sum(sizes)
        x, out = x.contiguous(), torch.empty(len(x), columns, dtype=x.dtype)
        source, target, widths = x.data_ptr(), out.data_ptr(), self._widths_of(itemsize, *sizes)
        most = SHM_AREA // (max(sizes) * itemsize)
        for first in range(0, len(x), most):
            rows = min(most, len(x) - first)
            self._gather_rows(source, rows, widths, target)
            source, target = source + rows * x.shape[1] * itemsize, target + rows * columns * itemsize
        return out

    def abort(self) -> None:
        """Make a wait in another thread fail."""
        self._aborted = True

    def _widths_of(self, itemsize: int, *sizes: int) -> int:
        """The address of the bytes per row of each rank."""
        if (itemsize, *sizes) not in self._widths:
            self._widths[itemsize, *sizes] = torch.tensor(sizes) * itemsize
        return self._widths[itemsize, *sizes].data_ptr()

    def _gather_rows(self, source: int, rows: int, widths: int, target: int) -> None:
        self._number += 1
        spins, until = SPINS + YIELDS, 0.0
        while True:
            shm_allgather(*self._at, self._number, source, rows, widths, target, spins, self._done.data_ptr())
            if self._done.item():
                return
            spins, until = 0, until or time.monotonic() + self._timeout
            if self._aborted or time.monotonic() > until or not all(map(self._is_alive, range(self._world_size))):
                raise RuntimeError("it has left the shared memory")
            time.sleep(POLL_S)

    def _is_alive(self, rank: int) -> bool:
        if rank == self._rank:
            return True
        try:
            # A shared lock: two processes may probe at once, and only the rank itself locks its byte exclusively.
            fcntl.lockf(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB, 1, rank)
        except OSError:
            return True
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, rank)
        return False
