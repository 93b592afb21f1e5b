"""Data files out of npm packages, for tests: fetched once into the user's cache folder."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tarfile
import tempfile
import urllib.request
import zlib
from pathlib import Path

import pytest

from infer.loader.builtin import cache_folder


def json_files(package: str, version: str, inside: str) -> Path:
    """A folder with the package's JSON files under `inside`; skips the test where they cannot be fetched."""
    target = cache_folder() / "npm" / package / version
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    reasons = []
    for fetch in (_by_npm, _by_registry):
        with tempfile.TemporaryDirectory(dir=target.parent, prefix="part-") as scratch:
            try:
                whole = _unpack(fetch(package, version, Path(scratch)), inside, Path(scratch) / "whole")
                if not target.exists():  # another process may have been faster
                    whole.rename(target)
                return target
            except (OSError, EOFError, ValueError, subprocess.SubprocessError, tarfile.TarError, zlib.error) as error:
                reasons.append(f"{fetch.__name__.removeprefix('_by_')}: {error}")
    pytest.skip(f"{package} {version} cannot be fetched ({'; '.join(reasons)})")


def _by_npm(package: str, version: str, folder: Path) -> Path:
    """npm knows the user's settings."""
    npm = shutil.which("npm")
    if npm is None:
        raise FileNotFoundError("not installed")
    command = [npm, "pack", f"{package}@{version}", "--fetch-retries=1"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=300)
    return next(folder.glob("*.tgz"))


def _by_registry(package: str, version: str, folder: Path) -> Path:
    url = f"{_registry(package)}/{package}/-/{package.rpartition('/')[2]}-{version}.tgz"
    path = folder / "package.tgz"
    with urllib.request.urlopen(url, timeout=60) as response, path.open("wb") as out:
        shutil.copyfileobj(response, out)
    return path


def _registry(package: str) -> str:
    """The registry npm would ask: the scope's own, or that of the environment or a settings file."""
    settings: dict[str, str] = {}
    for file in (Path("/etc/npmrc"), Path.home() / ".npmrc"):
        if file.exists():
            lines = [line.partition("=") for line in file.read_text(encoding="utf-8").splitlines()]
            settings |= {key.strip(): value.strip().strip("\"'") for key, _, value in lines}
    for key, value in os.environ.items():
        if key.lower() == "npm_config_registry":
            settings["registry"] = value
    scope = package.partition("/")[0]
    registry = settings.get(f"{scope}:registry") or settings.get("registry")
    if registry is None:
        raise FileNotFoundError("none is configured")
    return registry.rstrip("/")


def _unpack(archive: Path, inside: str, folder: Path) -> Path:
    folder.mkdir()
    with tarfile.open(archive) as tar:
        for member in tar:
            name = Path(member.name)
            if member.isfile() and name.parent == Path("package", inside) and name.suffix == ".json":
                contents = tar.extractfile(member).read()  # type: ignore[union-attr]
                json.loads(contents)
                (folder / name.name).write_bytes(contents)
    if not any(folder.iterdir()):
        raise ValueError(f"{archive.name} holds no JSON files in {inside}/")
    return folder
