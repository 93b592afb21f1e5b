"""Processes of one machine exchange what they compute through memory that they share.

A gather of one token's numbers takes about 10 us. Through a connection it takes 300: threads have to be woken.
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

from infer.backend.cpu.meeting import AREA, gather_rows
from infer.backend.cpu.pool import LOOKS, YIELDS

WORDS = 1 << 16  # bytes in front of all areas: enough for 1,024 processes
NAP_S = 0.001  # between looks, once it takes longer
FOLDER = "/dev/shm"  # whose files are memory, where there is such a folder


def make_file(count: int) -> str:
    """For so many processes. To be unlinked when all have opened it."""
    number, path = mkstemp(prefix="infer-", dir=FOLDER if os.path.isdir(FOLDER) else None)
    try:
        os.ftruncate(number, WORDS + 2 * count * AREA)
    finally:
        os.close(number)
    return path


class SharedMemory:
    """A process holds a lock on its own byte of the file: who could have that lock knows that the process has ended."""

    def __init__(self, path: str, rank: int, count: int, patience: timedelta) -> None:
        self._rank, self._count, self._patience = rank, count, patience.total_seconds()
        self._file = os.open(path, os.O_RDWR)
        finalize(self, os.close, self._file)  # a lock lasts as long as its file is open
        fcntl.lockf(self._file, fcntl.LOCK_EX, 1, rank)
        self._memory = torch.frombuffer(mmap.mmap(self._file, 0), dtype=torch.uint8)
        self._met = torch.zeros(1, dtype=torch.int64)
        self._at = self._memory.data_ptr(), self._memory.data_ptr() + WORDS, rank, count
        self._widths: dict[tuple[int, ...], Tensor] = {}
        self._number, self._aborted = 0, False

    def gather(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        """x [T, sizes[rank]] of each process -> [T, sum(sizes)]. RuntimeError if a process is lost."""
        each, whole = x.element_size(), sum(sizes)
        x, out = x.contiguous(), torch.empty(len(x), whole, dtype=x.dtype)
        own, found, widths = x.data_ptr(), out.data_ptr(), self._widths_of(each, *sizes)
        most = AREA // (max(sizes) * each)
        for first in range(0, len(x), most):
            rows = min(most, len(x) - first)
            self._gather(own, rows, widths, found)
            own, found = own + rows * x.shape[1] * each, found + rows * whole * each
        return out

    def abort(self) -> None:
        """Let who waits here fail. From another thread."""
        self._aborted = True

    def _widths_of(self, each: int, *sizes: int) -> int:
        """Where the bytes of each process in a row stand."""
        if (each, *sizes) not in self._widths:
            self._widths[each, *sizes] = torch.tensor(sizes) * each
        return self._widths[each, *sizes].data_ptr()

    def _gather(self, own: int, rows: int, widths: int, out: int) -> None:
        self._number += 1
        looks, until = LOOKS + YIELDS, 0.0
        while True:
            gather_rows(*self._at, self._number, own, rows, widths, out, looks, self._met.data_ptr())
            if self._met.item():
                return
            looks, until = 0, until or time.monotonic() + self._patience
            if self._aborted or time.monotonic() > until or not all(map(self._lives, range(self._count))):
                raise RuntimeError("it has left the memory that they share")
            time.sleep(NAP_S)

    def _lives(self, rank: int) -> bool:
        if rank == self._rank:
            return True
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        except OSError:
            return True
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, rank)
        return False
