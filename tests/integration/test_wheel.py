"""The wheel holds the package and nothing else, and runs where the repository is not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest
from amount import ALL

import infer

ROOT = Path(__file__).parents[2]
TRACKED = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split("\n")
INFO = f"infer_kv-{infer.__version__}.dist-info/"
pytestmark = [
    pytest.mark.skipif(not ALL, reason="a part of make test-all"),
    pytest.mark.skipif(len(TRACKED) < 2, reason="git does not say which files are the project's"),
]


def run(*command: str | Path, cwd: Path) -> str:
    """What it prints, where nothing leads to this repository. Kernels know their paths: none is kept for the user."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env["NUMBA_CACHE_DIR"] = str(cwd.parent / "kernels")
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the sdist, which is built from the tracked files: files that either lacks are missing here."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in filter(None, TRACKED):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, cwd=source)  # isolated, it asks an index
    assert len([*out.glob("*.tar.gz")]) == 1
    [wheel] = out.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of an environment with the wheel in it. Its dependencies are those of this one, so that no index is needed."""
    env = tmp_path_factory.mktemp("env")
    run(sys.executable, "-m", "venv", "--without-pip", env, cwd=env)
    python = env / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=env)
    [packages] = env.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return python


def test_files(wheel: Path) -> None:
    """Modules, pages and py.typed; no tests, benchmarks or whatever else lies about."""
    found = {name for name in zipfile.ZipFile(wheel).namelist() if not name.startswith(INFO)}
    assert found == {name.removeprefix("src/") for name in TRACKED if name.startswith("src/")}
    assert {"infer/py.typed", "infer/server/page.html", "infer/trace/page.html"} <= found


def test_metadata(wheel: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    with zipfile.ZipFile(wheel) as files:
        metadata = message_from_bytes(files.read(INFO + "METADATA"))
        assert files.read(INFO + "licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
        assert "infer = infer.cli:main" in files.read(INFO + "entry_points.txt").decode().splitlines()
    assert metadata["Version"] == infer.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["Description-Content-Type"] == "text/markdown"
    readme = metadata.get_payload(decode=True)
    assert isinstance(readme, bytes)
    assert readme.strip() == (ROOT / "README.md").read_bytes().strip()
    assert metadata.get_all("Provides-Extra") == [*project["optional-dependencies"]]
    required = [each for each in metadata.get_all("Requires-Dist", []) if "extra ==" not in each]
    assert required == project["dependencies"]


def test_runs(python: Path, folder: Path, tmp_path: Path) -> None:
    command = python.with_name("infer")
    package = run(python, "-c", "import infer; print(infer.__file__)", cwd=tmp_path)
    assert Path(package).is_relative_to(python.parents[1])
    assert run(command, "--version", cwd=tmp_path) == f"infer {infer.__version__}\n"
    assert "smollm2-135m" in run(command, "models", cwd=tmp_path)
    assert "generate" in run(python, "-m", "infer", "--help", cwd=tmp_path)
    assert run(command, "generate", "hello", "--max-new-tokens", "4", "--model", folder, cwd=tmp_path)
    assert not [*tmp_path.iterdir()]
