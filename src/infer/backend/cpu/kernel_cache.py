"""Compiled kernels on disk, between runs.

numba stores them as pickles, which can run any code when they are read, and trusts these files. So the folder of a
kernel is read only if no other user may have written to it, and if it is unchanged: `SEAL` holds its hash. Otherwise
the kernel is compiled again, in a folder beside it, which replaces it when complete.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

from numba import config

from infer import progress
from infer.folders import cache_folder
from infer.machine import allows_amx

SEAL = "compiled"
T = TypeVar("T")


def kernel_folder(name: str) -> Path:
    """Each state of the source files has its own folder: numba compiles a kernel again if its own file has changed, but
    not if a file has changed whose functions it calls."""
    root = Path(os.environ.get("NUMBA_CACHE_DIR") or cache_folder())
    return root / "kernels" / _fingerprint() / name


@cache
def _fingerprint() -> str:
    folder = Path(__file__).parent
    files = [*sorted(folder.glob("*.py")), folder.parents[1] / "cache" / "table.py"]
    contents = b"".join(file.read_bytes() for file in files)
    # numba depends on their paths too; and kernels of a process with AMX do not run in one without.
    return hashlib.sha256(contents + str((files, allows_amx())).encode()).hexdigest()[:16]


def is_missing(folder: Path) -> bool:
    """Whether the kernel has to be compiled, and would be stored."""
    return not _make_private(folder.parent) and os.access(folder.parent, os.W_OK) and not _is_intact(folder)


def load_cached(load: Callable[[], T], folder: Path) -> T:
    """The result of `load`, which compiles a kernel: read from this folder, or compiled and then stored there."""
    folder = folder.resolve()
    if problem := _make_private(folder.parent):
        _say(f"compiled kernels are not kept, {problem}, or set INFER_CACHE to a folder of your own")
    elif _is_intact(folder):
        with suppress(Exception):  # numba cannot read it, whatever the reason: compile
            found = _load_from(load, folder)
            with suppress(OSError):
                _seal(folder)  # numba has added kernels if another kind of CPU shares the folder
            return found
    kept = not problem and os.access(folder.parent, os.W_OK)
    if not progress.has_listeners():  # a listener reports it itself
        _say(f"compiling a kernel for this CPU{', once' if kept else ''}: {folder.name}")
    scratch = TemporaryDirectory(dir=folder.parent if kept else None, ignore_cleanup_errors=True)
    with scratch as fresh, progress.compiling(folder.name):
        built = Path(fresh, folder.name)
        built.mkdir(0o700)
        found = _load_from(load, built)
        if kept:
            with suppress(OSError):  # a full disk, or another process was quicker
                _seal(built)
                shutil.rmtree(folder, ignore_errors=True)
                built.rename(folder)
    return found


def _load_from(load: Callable[[], T], folder: Path) -> T:
    before = config.CACHE_DIR  # type: ignore[attr-defined]
    config.CACHE_DIR = str(folder)  # type: ignore[attr-defined]
    try:
        return load()
    finally:
        config.CACHE_DIR = before  # type: ignore[attr-defined]


def _make_private(folder: Path) -> str | None:
    """Makes a folder that only this user may write to. Returns why it is not one, and what to do."""
    try:
        for path in reversed((folder, *folder.parents)):
            if not path.is_dir():
                path.mkdir(0o700, exist_ok=True)
        if os.name == "nt":
            return None
        for path in (folder, folder.parent):
            if path.stat().st_uid != os.geteuid():
                return f"because {path} belongs to another user: take it over"
            if path.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                return f"because others may write to {path}: chmod go-w {path}"
        for path in folder.parents:  # a user who may write to one can replace our folder
            if path.stat().st_mode & (stat.S_IWOTH | stat.S_ISVTX) == stat.S_IWOTH:
                return f"because everyone may write to {path}: chmod o-w {path}"
    except OSError as error:
        return f"{error}: make that a folder to write to"
    return None


def _is_intact(folder: Path) -> bool:
    try:
        if os.name != "nt" and folder.stat().st_mode & 0o077:  # then another user may have written to it
            return False
        return (folder / SEAL).read_bytes() == _hash(folder)
    except OSError:
        return False


def _seal(folder: Path) -> None:
    seal = _hash(folder)
    if not (folder / SEAL).exists() or (folder / SEAL).read_bytes() != seal:
        (folder / SEAL).write_bytes(seal)


def _hash(folder: Path) -> bytes:
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / SEAL)
    whole = hashlib.sha256()
    for file in files:
        content = file.read_bytes()
        whole.update(f"{file.relative_to(folder)} {len(content)}\n".encode())
        whole.update(content)
    return whole.hexdigest().encode()


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
