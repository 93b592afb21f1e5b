"""Kernels: compiled when first used, here or by another process; and loops that threads share."""

from __future__ import annotations

import importlib.util
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

numba = pytest.importorskip("numba")
use_threads = importlib.import_module("infer.backend.cpu.threads").use_threads

SOURCE = """
from numba import types

from infer.backend.cpu.jit import inline, kernel
from infer.backend.cpu.simd import load_i64, store
from infer.backend.cpu.threads import parallel_for


@parallel_for
def count_turns(i, at, step):
    store(at + i * 8, load_i64(at + i * 8) + step)


@inline
def twice(x):
    return 2 * x


@inline
def add_to(i, at, step):
    store(at + i * 8, load_i64(at + i * 8) + step)


add_to_each = parallel_for(add_to)


@kernel(types.void(types.int64, types.int64, types.int64))
def count(turns, at, rounds):
    for _ in range(rounds):
        count_turns(turns, at, twice(1))


@kernel(types.void(types.int64, types.int64))
def count_by_inline(turns, at):
    add_to_each(turns, at, 1)
    for i in range(turns):
        add_to(i, at, 1)


@kernel(types.void(types.int64, types.int64))
def wait(at, rounds):
    for i in range(rounds):
        store(at, (load_i64(at) * 31 + i) % 1000003)
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A module with kernels, imported from a folder that other processes see too."""
    folder = tmp_path_factory.mktemp("kernels")
    (folder / "some_kernels.py").write_text(SOURCE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NUMBA_CACHE_DIR", str(folder / "kernels"))
        patch.syspath_prepend(str(folder))
        import some_kernels  # type: ignore[import-not-found]

        yield some_kernels
        del sys.modules["some_kernels"]


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("turns", [0, 1, 2, 3, 7, 1000])
def test_every_turn_once(made: Any, turns: int, threads: int) -> None:
    use_threads(threads)
    counts = np.zeros(turns + 1, np.int64)
    made.count(turns, counts.ctypes.data, 3)
    assert counts.tolist() == [6] * turns + [0]


def test_a_loop_over_an_inline_function(made: Any) -> None:
    """Which other functions of the kernel call too. Arrays and tensors stand for their addresses."""
    use_threads(2)
    counts, more = np.zeros(9, np.int64), torch.zeros(9, dtype=torch.int64)
    made.count_by_inline(8, counts)
    made.count_by_inline(8, more)
    assert counts.tolist() == more.tolist() == [2] * 8 + [0]


def test_several_callers(made: Any) -> None:
    """One has the threads, the others go through their loops alone; and threads that sleep wake up."""
    use_threads(3)
    results = [np.zeros(50 + caller, np.int64) for caller in range(4)]

    def call(counts: np.ndarray) -> None:
        for i in range(300):
            made.count(len(counts), counts.ctypes.data, 2)
            if i % 100 == 99:
                time.sleep(0.05)

    callers = [threading.Thread(target=call, args=(counts,)) for counts in results]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert all((counts == 1200).all() for counts in results)


def test_other_threads_go_on_meanwhile(made: Any) -> None:
    state, seen, over = np.zeros(1, np.int64), 0, threading.Event()

    def run() -> None:
        made.wait(state.ctypes.data, 50_000_000)
        over.set()

    made.wait(state.ctypes.data, 1)  # compiled
    thread = threading.Thread(target=run)
    thread.start()
    while not over.is_set():
        seen += 1
    thread.join()
    assert seen > 1000


def test_compiled_by_another_process(made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which leaves it on the disk, and this one reads it."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    spec = importlib.util.spec_from_file_location("some_kernels", made.__file__)
    assert spec is not None
    assert spec.loader is not None
    again = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(again)
    again.count.begin()
    assert again.count._helper is not None
    counts = np.zeros(5, np.int64)
    again.count(5, counts.ctypes.data, 1)
    assert again.count._compiled._cache_hits == 1
    assert counts.tolist() == [2] * 5
    before = again.count._helper
    again.count.begin()  # there is nothing to compile any more
    assert again.count._helper is before


@pytest.mark.parametrize("compiled", [True, False])
def test_an_inline_function_cannot_be_called(made: Any, compiled: bool) -> None:
    """It has no code of its own; without a guard, a process would end."""
    if compiled:
        made.count(1, np.zeros(1, np.int64).ctypes.data, 1)
    with pytest.raises(RuntimeError, match="twice is part of kernels"):
        made.twice(3)


def test_inline_functions_in_other_functions(made: Any) -> None:
    """Also if a kernel has them."""
    made.count(1, np.zeros(1, np.int64).ctypes.data, 1)
    twice = made.twice
    assert numba.njit(lambda x: twice(x) + 1)(20) == 41
