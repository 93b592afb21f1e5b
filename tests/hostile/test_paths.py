"""Models that are not there, or are something else."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import Server, assert_refused


@pytest.mark.parametrize("name", ["", ".", "..", "no such model", "a/b/c", "/", "x" * 5000, "a\nb", "-", "~", "\udcff"])
@pytest.mark.parametrize("command", ["info", "verify"])
def test_no_model(server: Server, command: str, name: str) -> None:
    assert_refused(server.run(command, name))


def test_empty_files(server: Server, tmp_path: Path) -> None:
    for name in ("model.gguf", "ckpt.pt", "config.json", "model.safetensors"):
        path = tmp_path / name
        path.touch()
        assert_refused(server.run("info", path))
