"""Every script in benchmarks/ imports what it uses and explains itself; `make test-all` runs them too."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs Triton, which is there on Linux alone")

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SCRIPTS = sorted([*BENCHMARKS.glob("*.py"), *BENCHMARKS.glob("simulate/*.py")])


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: str(script.relative_to(BENCHMARKS)))
def test_help(script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.setattr(sys, "argv", [str(script), "--help"])
    if "__main__" not in script.read_text(encoding="utf-8"):  # a module of the scripts
        assert runpy.run_path(str(script))["__doc__"]
        return
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path(str(script), run_name="__main__")
    assert "--help" in capsys.readouterr().out
