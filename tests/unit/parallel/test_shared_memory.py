"""Processes that gather through shared memory: what each gets, and what they see when one ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from waiting import until

from infer.backend import cpu

if cpu.kernels() is None:
    pytest.skip("there are no kernels for this CPU", allow_module_level=True)

from infer.parallel import shared_memory
from infer.parallel.shared_memory import SharedMemory, make_file

WAIT = timedelta(seconds=60)
DTYPES = (torch.float32, torch.bfloat16, torch.uint8, torch.float64)
SHAPES = [(1, (3, 3, 2)), (5, (1, 7, 2)), (0, (2, 2, 2)), (700, (1000, 1, 900)), (2, (64, 64, 64)), (4000, (300,) * 3)]


def given(exchange: int, rank: int) -> torch.Tensor:
    """What a process gives in an exchange."""
    rows, sizes = SHAPES[exchange % len(SHAPES)]
    drawn = torch.randint(0, 250, (rows, sizes[rank]), generator=torch.Generator().manual_seed(exchange * 8 + rank))
    return drawn.to(DTYPES[exchange % len(DTYPES)])


def exchange_all(memory: SharedMemory, rank: int) -> None:
    for exchange in range(24):  # each shape in each dtype, twice
        sizes = SHAPES[exchange % len(SHAPES)][1]
        found = memory.all_gather(given(exchange, rank), sizes)
        assert torch.equal(found, torch.cat([given(exchange, other) for other in range(3)], 1))


@contextmanager
def others(path: str, what: str) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Two more processes, which do `what` with the memory and their rank."""
    program = "import sys, test_shared_memory as t; t.work(sys.argv[1], sys.argv[2], int(sys.argv[3]))"
    where = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    started = [subprocess.Popen([sys.executable, "-c", program, path, what, str(rank)], env=where) for rank in (1, 2)]
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.wait()


def meet(memory: SharedMemory) -> None:
    until(lambda: all(map(memory._is_alive, range(3))))
    memory.all_gather(torch.zeros(1, 1), [1] * 3)


def work(path: str, what: str, rank: int) -> None:
    memory = SharedMemory(path, rank, 3, WAIT)
    meet(memory)
    if what == "exchange":
        exchange_all(memory, rank)
    elif rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)  # until it is killed
    else:
        with pytest.raises(RuntimeError, match="left"):
            memory.all_gather(torch.zeros(1, 1), [1] * 3)


@pytest.fixture
def path() -> Iterator[str]:
    path = make_file(3)
    yield path
    os.unlink(path)


@pytest.fixture
def memory(path: str) -> SharedMemory:
    return SharedMemory(path, 0, 3, WAIT)


def test_gathers_of_all_sizes(memory: SharedMemory, path: str) -> None:
    assert any(rows * max(sizes) > shared_memory.SHM_AREA // 4 for rows, sizes in SHAPES)  # in several pieces
    with others(path, "exchange") as processes:
        meet(memory)
        exchange_all(memory, 0)
        assert [process.wait(600) for process in processes] == [0, 0]


def test_all_see_that_one_has_ended(memory: SharedMemory, path: str) -> None:
    with others(path, "end") as (ends, stays):
        meet(memory)
        ends.kill()
        with pytest.raises(RuntimeError, match="left"):
            memory.all_gather(torch.zeros(1, 1), [1] * 3)
        assert stays.wait(600) == 0


def test_two_ask_at_once_whether_one_has_ended(memory: SharedMemory, path: str) -> None:
    probe = (
        "import fcntl, sys\n"
        "with open(sys.argv[1], 'rb+') as file:\n"
        "    fcntl.lockf(file, fcntl.LOCK_SH, 1, 2)\n"
        "    print(flush=True)\n"
        "    sys.stdin.read()"
    )
    command = [sys.executable, "-c", probe, path]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()  # its probe holds the lock
        assert not memory._is_alive(2)


def test_another_thread_ends_the_wait(memory: SharedMemory) -> None:
    memory.abort()
    with pytest.raises(RuntimeError, match="left"):
        memory.all_gather(torch.zeros(1, 1), [1] * 3)
