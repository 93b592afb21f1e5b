"""What the shell completes, as its script asks for it; and the list of commands."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import atexit, sys
atexit.register(lambda: print("torch" in sys.modules, file=sys.stderr))
sys.argv = ["infer"]
from infer.cli import main
main()
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """With two models in the hub's cache, one of which has a short name."""
    for repo in ("someone--tiny", "openai-community--gpt2"):
        snapshot = tmp_path / "hub" / f"models--{repo}" / "snapshots" / ("0" * 40)
        snapshot.mkdir(parents=True)
        (snapshot / "model.safetensors").write_bytes(b"weights")
    return {**os.environ, "HF_HUB_CACHE": str(tmp_path / "hub"), "INFER_CACHE": str(tmp_path / "infer")}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("generate -m qwen3", ["qwen3-0.6b", "qwen3-1.7b", "qwen3-4b", "qwen3-8b"]),
        ("info smollm2-1", ["smollm2-135m", "smollm2-1.7b"]),
        ("compare gpt2 some", ["someone/tiny"]),
        ("rm ", ["gpt2", "someone/tiny"]),
        ("score --dtype fl", ["float32", "float16", "float64"]),
        ("serve --device c", ["cpu", "cuda"]),
        ("bench --quantize ", ["auto", "int4", "int8"]),
        ("info --cache-dtype ", ["auto", "int8"]),
        ("verify ./", []),
    ],
)
def test_bash(line: str, expected: list[str], environment: dict[str, str]) -> None:
    """Without torch: it takes seconds to import."""
    words = ["infer", *line.split(" ")]
    asked = {"_INFER_COMPLETE": "complete_bash", "COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}
    done = subprocess.run(
        [sys.executable, "-c", CODE], env=environment | asked, capture_output=True, text=True, timeout=300, check=True
    )
    assert (done.stdout.split(), done.stderr) == (expected, "False\n")


def test_no_description_is_cut(environment: dict[str, str]) -> None:
    code = "from infer.cli import main; main(['--help'])"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment | {"COLUMNS": "80"}, capture_output=True, text=True, check=True
    )
    _, _, commands = done.stdout.partition("Commands:\n")
    assert "..." not in commands
    assert "from a prompt, streaming; or from many prompts, with\n              --prompts.\n" in commands
    assert max(map(len, done.stdout.splitlines())) <= 80
