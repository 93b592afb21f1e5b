"""The benchmark of the server: how it reads answers, that all of it runs, and that it fails where texts differ."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from amount import ALL

if not ALL:
    pytest.skip("benchmarks run in `make test-all`", allow_module_level=True)

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def http() -> Iterator[SimpleNamespace]:
    """The benchmark's modules."""
    names = ("bench_http", "http_client", "http_rough")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})


def test_a_stream(http: SimpleNamespace) -> None:
    """In parts as they may come: chunks are put together, and their times are kept."""
    parts = [
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
        b'24\r\ndata: {"choices":[{"text":"one"}]}\n\n\r\n',
        b'25\r\ndata: {"choices":[{"text":" two"}]}',
        b"\n\n\r\n",
        b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n",
    ]
    answer = http.http_client.Response(0.5, [1.0, 2.0, 3.0, 4.0, 5.0], parts)
    assert (answer.status, answer.text, answer.failed) == (200, "one two", False)
    assert answer.token_times == [2.0, 3.0]
    assert http.http_client.Response(0.5, [1.0, 2.0], parts[:2]).failed
    assert http.bench_http.decode_speed(answer, 7) == 6 / (5.0 - 2.0)


def test_a_stream_in_one_part(http: SimpleNamespace) -> None:
    """As a client receives it that was not scheduled in between."""
    answer = http.http_client.Response(
        0.5, [2.5], [b'HTTP/1.1 200 OK\r\n\r\ndata: {"choices":[{"text":"one two"}]}\n\n']
    )
    assert http.bench_http.decode_speed(answer, 7) == 6 / (2.5 - 0.5)


def test_everything(http: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "report.json"
    items = ["alone", "many", "first", "load", "fake", "rough"]  # starts are timed where nothing else runs
    http.bench_http.main(["--quick", "--device", "cpu", "--seconds", "1", "--out", str(out), "--only", *items])
    printed, report = capsys.readouterr().out, json.loads(out.read_text())
    assert report["commands"] == [
        f"python benchmarks/bench_http.py --quick --device cpu --seconds 1 --only {' '.join(items)}"
    ]
    sections = report["sections"]
    assert list(sections) == [*items, "exact"]
    assert len(sections["load"]) == len(http.bench_http.QUICK.rates)
    for row in sections["load"]:
        assert 0 < row["first_p50_s"] <= row["first_p90_s"] <= row["first_p99_s"]
        assert 0 <= row["between_p50_s"] <= row["between_p90_s"] <= row["between_p99_s"]
    assert all(": yes" in row["goal"] for row in sections["rough"])
    assert sections["rough"][0]["statuses"]["200"] > 0
    assert set(sections["rough"][0]["did"]) > {"vanish", "half", "garbage"}
    [exact] = sections["exact"]
    assert exact["figure"] == exact["texts"] > 30
    assert http.bench_http.formatted(report, http.bench_http.LOAD) in printed


def test_texts_that_differ(
    http: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(http.http_client.Response, "text", "another")
    with pytest.raises(SystemExit) as end:
        http.bench_http.main(["--quick", "--device", "cpu", "--only", "alone"])
    assert end.value.code == "a text is wrong, or the server failed or leaked"  # which is the exit status 1
    assert ": NO" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [(["--out", "nowhere/a.json"], "there is no folder nowhere"), (["--shape", "llama-2t"], "invalid choice")],
)
def test_refused(http: SimpleNamespace, options: list[Any], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        http.bench_http.main(["--quick", "--device", "cpu", *options])
    assert message in capsys.readouterr().err
