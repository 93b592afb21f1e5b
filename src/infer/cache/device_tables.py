"""The page tables that the kernels of a GPU read: parts of a few large tensors, so that one copy writes to many."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch

from infer.machine import to_device

CHUNK = 1 << 18  # entries that are allocated at once: 2 MB


class _Chunk:
    def __init__(self, size: int, device: torch.device) -> None:
        self.memory = torch.zeros(size, dtype=torch.int64, device=device)
        self.used = 0
        self.pending: dict[int, int] = {}  # entries that are yet to be written


class DeviceTable(NamedTuple):
    """A page table on a device: `size` entries of a chunk."""

    chunk: _Chunk
    start: int
    size: int

    @property
    def address(self) -> int:
        return self.chunk.memory.data_ptr() + self.start * self.chunk.memory.element_size()


class DeviceTables:
    """Allocates and writes page tables on a device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._chunks: list[_Chunk] = []
        self._free: defaultdict[int, list[DeviceTable]] = defaultdict(list)  # by size
        self._together = False

    def allocate(self, entries: int) -> DeviceTable:
        size = 1 << (entries - 1).bit_length()  # a table that was freed serves others of about its size
        if self._free[size]:
            return self._free[size].pop()
        if not self._chunks or self._chunks[-1].used + size > len(self._chunks[-1].memory):
            self._chunks.append(_Chunk(max(size, CHUNK), self._device))
        chunk = self._chunks[-1]
        chunk.used += size
        return DeviceTable(chunk, chunk.used - size, size)

    def free(self, table: DeviceTable) -> None:
        """Its memory is reused. Kernels launched before the next write still read what they need."""
        self._free[table.size].append(table)

    def write(self, table: DeviceTable, entries: Mapping[int, int]) -> None:
        """entries: page numbers by index."""
        table.chunk.pending.update({table.start + at: page for at, page in entries.items()})
        if not self._together:
            self._flush()

    @contextmanager
    def written_together(self) -> Iterator[None]:
        """Inside, writes are collected: each copy to a device takes the host as long as hundreds of them."""
        self._together = True
        try:
            yield
        finally:
            self._together = False
            self._flush()

    @torch.inference_mode()  # in which any tensor can be written to
    def _flush(self) -> None:
        for chunk in self._chunks:
            if chunk.pending:
                pending, chunk.pending = chunk.pending, {}
                at, pages = to_device(torch.tensor([[*pending], [*pending.values()]]), self._device)
                chunk.memory.scatter_(0, at, pages)
