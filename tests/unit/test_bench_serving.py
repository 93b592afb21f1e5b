"""The benchmark of many requests: what it counts, that all of it runs, and that it fails where texts differ."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from amount import ALL
from matplotlib.image import imread

from infer.loader.hf_config import config_from_hf
from infer.models.registry import build_model

if not ALL:
    pytest.skip("benchmarks run in `make test-all`", allow_module_level=True)

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def serving() -> Iterator[SimpleNamespace]:
    """The benchmark's modules."""
    names = ("bench_serving", "serving_load", "serving_report", "gpu_shapes", "gpu_report")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})


def nano_requests(serving: SimpleNamespace) -> Any:
    return serving.serving_load.make_requests(128_256, *serving.bench_serving.GPU.nano)


def test_the_lengths_are_nano_vllms(serving: SimpleNamespace) -> None:
    """Its own report names the sum of the new tokens."""
    requests = nano_requests(serving)
    assert (len(requests), sum(request.params.max_new_tokens for request in requests)) == (256, 133_966)


@pytest.mark.parametrize(("shape", "expected"), [("qwen3-0.6b", 38_200), ("llama-1b", 71_800), ("llama-8b", 14_100)])
def test_roofline(serving: SimpleNamespace, shape: str, expected: int) -> None:
    """Beside figures worked out with other lengths drawn from the same range."""
    with torch.device("meta"):
        model = build_model(config_from_hf(serving.gpu_shapes.SHAPES[shape])).to(torch.bfloat16)
    assert serving.serving_load.roofline(model, nano_requests(serving)) == pytest.approx(expected, rel=0.06)


@pytest.mark.parametrize(("percent", "expected"), [(0, 1), (1, 1), (50, 50), (99, 99), (99.5, 100), (100, 100)])
def test_percentile(serving: SimpleNamespace, percent: float, expected: int) -> None:
    assert serving.serving_load.percentile(range(100, 0, -1), percent) == expected


def test_arrivals(serving: SimpleNamespace) -> None:
    arrivals = serving.serving_load.poisson(50.0, 2000)
    assert arrivals == sorted(arrivals) == serving.serving_load.poisson(50.0, 2000)
    assert arrivals[-1] == pytest.approx(40, rel=0.1)


def test_passes(serving: SimpleNamespace) -> None:
    """The host's share, steps with a chunk of a prompt, and gaps, of made-up steps."""
    load = serving.serving_load
    row, prompt = SimpleNamespace(token_times=[1.0, 2.0, 4.5, 5.0]), SimpleNamespace(token_times=[4.6])
    watched: list[Any] = []
    passes = load.Passes(SimpleNamespace(watch=lambda listener: watched.append(listener) or watched.clear))
    with passes:
        watched[0](load.Event(0.0, "admitted"))
        for time, counts in ((1.0, {1: 1}), (2.0, {1: 1}), (4.5, {1: 1, 2: 512}), (5.0, {1: 1, 2: 1})):
            watched[0](load.Event(time, "step", None, [*counts.items()], 0.4))
    assert watched == []
    assert passes.host_us() == pytest.approx(1e6 * (0.6 + 2.1 + 0.1) / 5)
    assert passes.rows() == 1.5
    assert [event.time for event in load.mixed(passes.events)] == [4.5]
    assert load.gaps([row, prompt], 2.1, 4.6) == [2.5, 0.5]


def test_everything(serving: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, picture = tmp_path / "report.json", tmp_path / "picture.png"
    serving.bench_serving.main(["--quick", "--device", "cpu", "--out", str(out), "--plot", str(picture)])
    printed = capsys.readouterr().out
    report = json.loads(out.read_text())
    assert report["commands"] == ["python benchmarks/bench_serving.py --quick --device cpu"]
    sections = report["sections"]
    assert list(sections) == ["nano", "alone", "gaps", "prefix", "host", "load", "exact"]
    assert [len(sections[name]) for name in ("nano", "load")] == [2, len(serving.bench_serving.QUICK.rates)]
    for rows in sections.values():
        for row in rows:
            assert row["shape"] == "tiny"
            assert row.get("figure", row.get("tokens_per_s")) > 0
    for row in sections["load"]:
        assert 0 < row["first_token_s"] <= row["first_token_p99_s"]
        assert 0 < row["between_s"] <= row["between_p99_s"]
    [exact] = sections["exact"]
    assert exact["figure"] == exact["texts"] > 10
    assert serving.serving_report.formatted(report) in printed
    assert f"reach {exact['texts']}: yes" in printed
    assert imread(picture).std() > 0.05


def test_texts_that_differ(
    serving: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serving.bench_serving, "same_alone", lambda *_: False)
    with pytest.raises(SystemExit) as end:
        serving.bench_serving.main(["--quick", "--device", "cpu", "--only", "alone", "prefix"])
    assert end.value.code == "a text differs from that of `generate` alone"  # which is the exit status 1
    assert ": NO" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--only", "llama"], "llama needs llama-cpp-python"),
        (["--only", "nano", "--plot", "a.png"], "add it to --only"),
        (["--out", "nowhere/a.json"], "there is no folder nowhere"),
        (["--shape", "llama-2t"], "invalid choice: 'llama-2t'"),
    ],
)
def test_refused(
    serving: SimpleNamespace, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        serving.bench_serving.main(["--quick", "--device", "cpu", *options])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "device", "expected"),
    [
        ([], "cuda", ["start", "nano", "alone", "gaps", "prefix", "load"]),
        (["--only", "load", "start"], "cuda", ["start", "load"]),
        (["--shape", "tiny"], "cpu", ["alone", "gaps", "prefix", "load"]),
        (["--quick"], "cpu", ["nano", "alone", "gaps", "prefix", "load"]),
    ],
)
def test_what_runs_where(serving: SimpleNamespace, options: list[str], device: str, expected: list[str]) -> None:
    args = serving.bench_serving.make_parser().parse_args(options)
    assert serving.bench_serving.choose(args, torch.device(device)) == expected
