"""Compiled kernels on disk: read as they were left, by whoever left them, and otherwise compiled again."""

from __future__ import annotations

import importlib.util
import os
import pickle
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

kernel_cache = pytest.importorskip("infer.backend.cpu.kernel_cache")

SOURCE = """
from numba import int64, njit

@njit(int64(int64), cache=True)
def twice(x):
    return 2 * x
"""
Load = Callable[[], Any]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "kernels" / "state"


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Imports a kernel anew each time, as a new process does; says whether it was compiled."""
    source = tmp_path / "small.py"
    source.write_text(SOURCE)

    def load() -> tuple[int, bool]:
        spec = importlib.util.spec_from_file_location("small", source)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.twice(21), bool(module.twice.stats.cache_misses)

    return load


def files(folder: Path, ending: str = "") -> list[Path]:
    return sorted(path for path in folder.rglob(f"*{ending}") if path.is_file())


def flip(data: bytes) -> bytes:
    at = len(data) * 2 // 3
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


class Tell:
    """A pickle that leaves a sign when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_compiled_once(load: Load, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert kernel_cache.load_cached(load, folder) == (42, True)
    assert capfd.readouterr().err == "compiling a kernel for this CPU, once: state\n"
    assert kernel_cache.load_cached(load, folder) == (42, False)
    assert capfd.readouterr().err == ""
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]  # nothing is left beside it


@pytest.mark.parametrize("mask", [0o022, 0o000])
def test_made_for_the_user_alone(load: Load, folder: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        kernel_cache.load_cached(load, folder)
    finally:
        os.umask(before)
    for path in (folder, *folder.parents[:2]):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700


DAMAGE: dict[str, Callable[[bytes], bytes | None]] = {
    "empty": lambda data: b"",
    "cut short": lambda data: data[: len(data) // 2],
    "garbage": lambda data: b"garbage" * 100,
    "zeros": lambda data: bytes(len(data)),
    "a flipped bit": flip,
    "longer": lambda data: data + b"more",
    "missing": lambda data: None,
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("ending", [".nbi", ".nbc", kernel_cache.SEAL])
def test_damage_means_compiling(load: Load, folder: Path, ending: str, damage: str) -> None:
    kernel_cache.load_cached(load, folder)
    (file,) = files(folder, ending)
    changed = DAMAGE[damage](file.read_bytes())
    if changed is None:
        file.unlink()
    else:
        file.write_bytes(changed)
    assert kernel_cache.load_cached(load, folder) == (42, True)
    assert kernel_cache.load_cached(load, folder) == (42, False)


def test_what_numba_cannot_read_is_compiled(load: Load, folder: Path) -> None:
    """Also where the seal is right."""
    kernel_cache.load_cached(load, folder)
    files(folder, ".nbi")[0].write_bytes(b"")
    kernel_cache._seal(folder)
    assert kernel_cache.load_cached(load, folder) == (42, True)
    assert kernel_cache.load_cached(load, folder) == (42, False)


def test_kernels_that_numba_adds(load: Load, folder: Path, tmp_path: Path) -> None:
    """As on another kind of CPU that shares the folder."""
    kernel_cache.load_cached(load, folder)
    source = tmp_path / "small.py"
    source.write_text(SOURCE + "# changed")
    assert kernel_cache.load_cached(load, folder) == (42, True)
    assert kernel_cache.load_cached(load, folder) == (42, False)


@pytest.mark.parametrize("number", range(3))
def test_folders_that_others_may_write_to(
    load: Load, folder: Path, number: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """None of their pickles is read, and the run goes on."""
    kernel_cache.load_cached(load, folder)
    for file in (*files(folder, ".nbi"), *files(folder, ".nbc")):
        file.write_bytes(pickle.dumps(Tell(tmp_path / "executed")))
    kernel_cache._seal(folder)
    opened = [folder, *folder.parents][number]
    opened.chmod(0o777)
    capfd.readouterr()
    assert kernel_cache.load_cached(load, folder) == (42, True)
    assert not (tmp_path / "executed").exists()
    told = capfd.readouterr().err.splitlines()
    assert told[-1].startswith("compiling a kernel")
    if number > 0:  # the folder itself is replaced
        assert told[0].endswith(
            f"others may write to {opened}: chmod go-w {opened}, or set INFER_CACHE to a folder of your own"
        )
        opened.chmod(0o755)
    assert len(told) == (2 if number else 1)


def test_a_path_that_everyone_may_write_to(
    load: Load, folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    kernel_cache.load_cached(load, folder)
    tmp_path.chmod(0o777)
    capfd.readouterr()
    assert kernel_cache.load_cached(load, folder) == (42, True)
    assert f"everyone may write to {tmp_path}: chmod o-w {tmp_path}" in capfd.readouterr().err
    tmp_path.chmod(0o1777)  # as /tmp: nobody can move what is another's
    assert kernel_cache.load_cached(load, folder) == (42, False)


def test_a_folder_of_another_user(
    load: Load, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    kernel_cache.load_cached(load, folder)
    capfd.readouterr()
    other = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: other)
    assert kernel_cache.load_cached(load, folder) == (42, True)
    assert f"{folder.parent} belongs to another user" in capfd.readouterr().err


def test_a_file_in_the_way(load: Load, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder.parent.parent.mkdir()
    folder.parent.write_text("")
    assert kernel_cache.load_cached(load, folder) == (42, True)
    assert "compiled kernels are not kept" in capfd.readouterr().err
