"""The benchmark of exact mode measures both modes, in turn, and prints what it found."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SIZES = ["--prompt-tokens", "6", "--new-tokens", "3", "--prefill-tokens", "9", "--rows", "2", "--trials", "2"]


@pytest.fixture
def cost(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("exact_cost")


def test_report(
    cost: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    modes: list[bool] = []

    def noted(*args: Any, generate: Any = cost.generate, **options: Any) -> Any:
        modes.append(options["exact"])
        return generate(*args, **options)

    monkeypatch.setattr(cost, "generate", noted)
    cost.main(["--shape", "tiny", "--device", "cpu", "--dtype", "float32", *SIZES, "--json", str(tmp_path / "a.json")])
    assert modes == [False, True] * 3 * 2  # one to warm up, two trials; decode, and prefill
    report = json.loads((tmp_path / "a.json").read_text())
    assert (report["model"], report["dtype"]) == ("tiny shape, random weights", "float32")
    assert [row["work"] for row in report["figures"]] == ["decode, one row", "decode, 2 rows", "prefill of 9"]
    for row in report["figures"]:
        assert row["time_ratio"] == pytest.approx(row["normal_tokens_per_s"] / row["exact_tokens_per_s"])
        assert len(row["trials"]["exact"]) == len(row["trials"]["normal"]) == 2
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("tiny shape, random weights, float32, ")
    assert [line[:18].strip() for line in lines[3:]] == ["decode, one row", "decode, 2 rows", "prefill of 9"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--trials", "0"], "at least 1"),
        (["--new-tokens", "1"], "at least 2"),
        (["--shape", "tiny", "--quantize", "int4"], "leave --model and --quantize out"),
        (["--json", "nowhere/a.json"], "there is no folder nowhere"),
    ],
)
def test_refused(cost: ModuleType, options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cost.main(options)
    assert message in capsys.readouterr().err
