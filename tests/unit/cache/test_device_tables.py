"""Page tables on a device, of which a CPU is one."""

import random
from contextlib import suppress

import pytest
import torch

from infer.cache.device_tables import CHUNK, DeviceTable, DeviceTables

CPU = torch.device("cpu")


def entries(table: DeviceTable, count: int) -> list[int]:
    return table.chunk.memory[table.start : table.start + count].tolist()


def test_writes_to_many_tables() -> None:
    tables, rng = DeviceTables(CPU), random.Random(0)
    held = {tables.allocate(size): [0] * size for size in (1, 2, 3, 100, 5, CHUNK - 8, 64, 2 * CHUNK)}
    for _ in range(20):
        with tables.written_together():
            for table, expected in held.items():
                for _ in range(3):  # the last write to an entry counts
                    start = rng.randrange(len(expected))
                    new = [rng.randrange(1, 1000) for _ in expected[start : start + 5]]
                    tables.write(table, dict(enumerate(new, start)))
                    expected[start : start + 5] = new
        for table, expected in held.items():
            assert entries(table, len(expected)) == expected
            assert table.address == table.chunk.memory[table.start :].data_ptr()


def test_nothing_is_written_before_the_end() -> None:
    tables = DeviceTables(CPU)
    table = tables.allocate(2)
    with suppress(KeyError), tables.written_together():
        tables.write(table, {0: 7})
        assert entries(table, 2) == [0, 0]
        raise KeyError
    assert entries(table, 2) == [7, 0]
    tables.write(table, {1: 8})
    assert entries(table, 2) == [7, 8]


def test_memory_of_freed_tables_is_reused() -> None:
    tables = DeviceTables(CPU)
    for size in range(1, 2000):
        tables.free(tables.allocate(1 + size % 100))
    assert len(tables._chunks) == 1
    assert tables._chunks[0].used < 500


@pytest.mark.parametrize("created_in", [False, True])
@pytest.mark.parametrize("written_in", [False, True])
def test_in_any_mode(created_in: bool, written_in: bool) -> None:
    tables = DeviceTables(CPU)
    with torch.inference_mode(created_in):
        table = tables.allocate(4)
    with torch.inference_mode(written_in):
        tables.write(table, {3: 9})
    assert entries(table, 4) == [0, 0, 0, 9]
