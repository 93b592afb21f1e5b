"""The GPU benchmark, as far as a CPU can tell: what it counts, keeps and prints, and that all of it runs."""

from __future__ import annotations

import importlib
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from amount import ALL
from matplotlib.image import imread

from infer.loader.hf_config import config_from_hf
from infer.models.common import Decoder
from infer.models.registry import build_model

pytest.importorskip("triton", reason="needs Triton, which is there on Linux alone")

from infer.backend.gpu import attention, step

if not ALL:
    pytest.skip("benchmarks run in `make test-all`", allow_module_level=True)

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MACHINE = {"device": "cuda", "name": "Abacus 9", "torch": "2.0", "cuda": "13", "triton": None, "dtype": "bfloat16"}
RATE = 4140e9  # bytes per second
FAMILIES = ("tiny", "tiny-qwen3", "tiny-gemma3")


@pytest.fixture(scope="module")
def gpu() -> Iterator[SimpleNamespace]:
    """The benchmark's modules."""
    names = ("compare", "compare_gpu", "gpu_ceilings", "gpu_report", "gpu_shapes", "gpu_steps")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})


@pytest.fixture
def weightless(gpu: SimpleNamespace) -> Callable[[str], Decoder]:
    """A model in bf16 that takes no memory."""

    def make(shape: str) -> Decoder:
        with torch.device("meta"):
            return build_model(config_from_hf(gpu.gpu_shapes.SHAPES[shape])).to(torch.bfloat16)

    return make


class TestCounts:
    @pytest.mark.parametrize(
        ("shape", "limit"), [("llama-1b", 1675), ("qwen3-1.7b", 1203), ("gemma3-1b", 2070), ("llama-8b", 276)]
    )
    def test_weights(self, gpu: SimpleNamespace, weightless: Any, shape: str, limit: int) -> None:
        """Steps per second at a known rate."""
        assert round(RATE / gpu.gpu_shapes.step_weight_bytes(weightless(shape))) == limit

    @pytest.mark.parametrize(
        ("shape", "keys", "expected"),
        [
            ("llama-1b", 1024, 33_554_432),
            ("qwen3-1.7b", 1024, 117_440_512),
            ("gemma3-1b", 300, 26 * 300 * 1024),
            ("gemma3-1b", 2000, (4 * 2000 + 22 * 512) * 1024),
        ],
    )
    def test_cache(self, gpu: SimpleNamespace, shape: str, keys: int, expected: int) -> None:
        config = config_from_hf(gpu.gpu_shapes.SHAPES[shape])
        assert gpu.gpu_shapes.cache_bytes(config, keys, 2) == expected

    def test_mean_cache_is_that_of_the_steps(self, gpu: SimpleNamespace) -> None:
        """3 tokens from a prompt of 10 take two steps, which see 11 and 12 keys."""
        shapes = gpu.gpu_shapes
        config = config_from_hf(shapes.SHAPES["llama-1b"])
        assert shapes.mean_cache_bytes(config, 10, 3, 2) == shapes.cache_bytes(config, 23, 2) / 2

    @pytest.mark.parametrize("shape", ["llama-1b", "llama-8b"])
    def test_prefill(self, gpu: SimpleNamespace, weightless: Any, shape: str) -> None:
        n, model = 4096, weightless(shape)
        c = model.config
        heads = c.num_attention_heads * c.computed_head_dim
        kv_heads = c.num_key_value_heads * c.computed_head_dim
        products = c.hidden_size * (2 * heads + 2 * kv_heads + 3 * c.intermediate_size)
        expected = c.num_hidden_layers * (2 * products * n + 2 * 2 * n * n // 2 * heads)
        expected += 2 * c.vocab_size * c.hidden_size
        assert gpu.gpu_shapes.prefill_flops(model, n) == expected

    def test_prefill_through_windows(self, gpu: SimpleNamespace, weightless: Any) -> None:
        n, model = 400, weightless("tiny-gemma3")
        without = gpu.gpu_shapes.prefill_flops(model, n)
        pairs = sum(min(i, 8) for i in range(n)) + sum(range(n))  # one layer of each kind
        matrices = sum(weight.numel() for weight in model.layers.parameters() if weight.dim() > 1)
        expected = 2 * matrices * n + 4 * pairs * 4 * 16 + 2 * 64 * 32
        assert without == pytest.approx(expected, rel=0.01)

    def test_lengths_of_rows(self, gpu: SimpleNamespace) -> None:
        lengths = gpu.compare_gpu.lengths
        assert lengths(1, 64, 512) == [288]
        spread = lengths(32, 64, 512)
        assert len(set(spread)) == 32
        assert spread == sorted(spread)
        assert 64 <= spread[0] < 80
        assert 496 < spread[-1] <= 512


class TestModels:
    @pytest.mark.parametrize("shape", FAMILIES)
    def test_weights(self, gpu: SimpleNamespace, shape: str) -> None:
        device = torch.device("cpu")
        model = gpu.gpu_shapes.build(shape, device, torch.bfloat16)
        assert torch.get_default_dtype() is torch.float32
        again = gpu.gpu_shapes.build(shape, device, torch.bfloat16)
        for (name, weight), other in zip(model.named_parameters(), again.parameters(), strict=True):
            assert weight.dtype is torch.bfloat16
            assert torch.equal(weight, other), name
            if weight.dim() > 1:
                assert 0.015 < weight.float().std() < 0.025
        x = torch.randn(3, 32)
        torch.testing.assert_close(model.norm(x), torch.nn.functional.rms_norm(x, (32,), eps=model.config.rms_norm_eps))

    @pytest.mark.parametrize("shape", FAMILIES)
    def test_twin_has_the_same(self, gpu: SimpleNamespace, shape: str) -> None:
        model = gpu.gpu_shapes.build(shape, torch.device("cpu"), torch.float32)
        for i, weight in enumerate(model.parameters()):  # wide, and norms too, so that one that was left out shows
            weight += torch.randn(weight.shape, generator=torch.Generator().manual_seed(i)) * 0.3
        twin = gpu.compare_gpu.transformers_twin(shape, model)
        ids = torch.tensor([gpu.gpu_shapes.random_prompt(model.config, 20)])
        with torch.inference_mode():
            torch.testing.assert_close(twin(ids).logits, model(ids), rtol=1e-3, atol=1e-3)


class TestCeilings:
    @pytest.mark.parametrize(("rows", "warps"), [(1, 4), (8, 8)])
    def test_row_dot(self, gpu: SimpleNamespace, rows: int, warps: int) -> None:
        """Through Triton's interpreter."""
        pytest.importorskip("triton")
        weight, x, out = torch.randn(16, 1024), torch.randn(1024), torch.full((16,), torch.nan)
        gpu.gpu_ceilings.row_dot(weight, x, out, rows, warps)
        torch.testing.assert_close(out, weight @ x, rtol=1e-4, atol=1e-4)

    def test_limit_is_the_best(self, gpu: SimpleNamespace) -> None:
        ceilings = gpu.gpu_ceilings
        rates = {ceilings.COPY: [5], ceilings.MATRIX_VECTOR: [3, 4, 2], ceilings.MATRIX: [7, 8]}
        rows = [{"ceiling": name, "way": "", "rate": rate} for name, each in rates.items() for rate in each]
        rows[1]["way"] = ceilings.TORCH_MV
        assert ceilings.best(rows) == {name: max(each) for name, each in rates.items()} | {ceilings.TORCH_MV: 3}


def kernel_run(gpu: SimpleNamespace, layers: int, steps: int) -> list[Any]:
    """As a profile shows it that begins and ends within a step. Times tell the parts apart."""
    kernel = gpu.compare_gpu.Kernel
    block = [
        ("gemv", 6, 1.0),
        ("attend", 9, 2.0),
        ("gemv", 4, 3.0),
        ("gemv", 8, 4.0),
        ("gemv", 4, 5.0),
    ]
    step = [kernel(*run) for run in (*block * layers, ("gemv", 99, 6.0), ("pick", 1, 7.0))]
    return [*step[3:], *step * steps, *step[:4]]


class TestParts:
    def test_are_told_apart_by_their_order(self, gpu: SimpleNamespace) -> None:
        steps, named = gpu.compare_gpu.split_steps(kernel_run(gpu, layers=2, steps=4), layers=2)
        assert steps == 4
        times = {"qkv_proj": 1, "attention": 2, "o_proj": 3, "gate_up_proj": 4, "down_proj": 5, "lm_head": 6, "": 7}
        assert {(part, kernel.us) for part, kernel in named} == set(times.items())
        assert len(named) == 4 * (2 * 5 + 2)

    def test_rows(self, gpu: SimpleNamespace) -> None:
        model = gpu.gpu_shapes.build("tiny", torch.device("cpu"), torch.bfloat16)
        rows = gpu.compare_gpu.part_rows("tiny", model, 12, 100e-6, kernel_run(gpu, layers=2, steps=4))
        by_part = {row["part"]: row for row in rows}
        assert by_part["down_proj"]["bytes"] == 32 * 48 * 2
        assert by_part["down_proj"]["bytes_per_s"] == pytest.approx(32 * 48 * 2 / 5e-6)
        assert by_part["down_proj"]["calls"] == 2
        assert by_part["down_proj"]["share_of_step"] == pytest.approx(0.10)
        assert by_part["lm_head"]["bytes"] == 64 * 32 * 2
        keys = by_part["attention"]["bytes"] / (2 * 2 * 16 * 2)
        assert 12 < keys < 12 + 8 + gpu.compare_gpu.PROFILED_STEPS
        assert "bytes" not in by_part[""]
        assert rows[-1]["part"] == "all"
        assert rows[-1]["share_of_step"] == pytest.approx(0.43)
        shares = [row["share_of_step"] for row in rows[:-1]]
        assert shares == sorted(shares, reverse=True)

    def test_that_do_not_fit_have_no_names(self, gpu: SimpleNamespace) -> None:
        kernels = kernel_run(gpu, layers=2, steps=4)
        steps, named = gpu.compare_gpu.split_steps(kernels, layers=3)
        assert steps == gpu.compare_gpu.PROFILED_STEPS
        assert [kernel for _, kernel in named] == kernels
        assert {part for part, _ in named} == {"", "attention"}


@pytest.mark.parametrize(
    ("value", "goal", "options", "expected"),
    [
        (0.8, (0.75, 0.85), {}, "reach 75%: yes, try for 85%: NO"),
        (0.7, (0.75,), {}, "reach 75%: NO"),
        (7.0, (6.0,), {"form": ".0f", "lower_is_better": True}, "reach 6: NO"),
        (6.0, (6.0,), {"form": ".0f", "lower_is_better": True}, "reach 6: yes"),
        (1.0, (None,), {}, ""),
    ],
)
def test_goals(gpu: SimpleNamespace, value: float, goal: Any, options: dict[str, Any], expected: str) -> None:
    assert gpu.gpu_report.goal_status(value, *goal, **options) == expected


def speed_rows(key: str, *values: int) -> list[dict[str, Any]]:
    return [
        {"shape": "llama-1b", key: value, "tokens_per_s": 1000.0 + value, "step_s": 1e-3, "mean_step_s": 1.1e-3}
        | {"limit_tokens_per_s": 2000.0, "share_of_limit": 0.5, "share_by_torch_mv": 0.6, "goal": f"goal of {value}"}
        for value in values
    ]


class TestReport:
    def make(self, gpu: SimpleNamespace, path: Path | None = None, **machine: Any) -> Any:
        return gpu.gpu_report.Report(MACHINE | machine, ["python", "compare.py"], path)

    def test_runs_add_up(self, gpu: SimpleNamespace, tmp_path: Path) -> None:
        """Another run takes the place of what it measures again: by shape, errors included."""
        path = tmp_path / "report.json"
        first = self.make(gpu, path)
        for row in ({"shape": "a", "n": 1}, {"shape": "a", "n": 2}, {"shape": "b", "n": 3}, {"error": "oh"}):
            first.add("decode", row)
        first.add("ceilings", {"n": 4})
        second = self.make(gpu, path)
        second.add("decode", {"shape": "a", "n": 5})
        second.add("decode", {"shape": "a", "n": 6})
        second.add("batch", {"shape": "a", "n": 7})
        second.add("ceilings", {"n": 8})
        sections = gpu.gpu_report.read(path)["sections"]
        found = {name: [row["n"] for row in rows] for name, rows in sections.items()}
        assert found == {"decode": [3, 5, 6], "ceilings": [8], "batch": [7]}
        assert len(gpu.gpu_report.read(path)["commands"]) == 2
        assert list(tmp_path.iterdir()) == [path]

    def test_another_machine(self, gpu: SimpleNamespace, tmp_path: Path) -> None:
        path = tmp_path / "report.json"
        self.make(gpu, path).add("decode", {"shape": "a"})
        with pytest.raises(ValueError, match="figures of Abacus 9, not of Abacus 10"):
            self.make(gpu, path, name="Abacus 10")

    @pytest.mark.parametrize("text", ["", "[]", "{}", '{"benchmark": "generation"}'])
    def test_another_file(self, gpu: SimpleNamespace, tmp_path: Path, text: str) -> None:
        path = tmp_path / "report.json"
        path.write_text(text)
        with pytest.raises(ValueError, match="not a report of this benchmark"):
            self.make(gpu, path)
        assert path.read_text() == text

    def test_format(self, gpu: SimpleNamespace) -> None:
        report = self.make(gpu)
        for row in speed_rows("context", 512, 32_768):
            report.add("context", row)
        report.add("batch", {"error": "RuntimeError: no memory"})
        text = gpu.gpu_report.formatted(report.values)
        assert "Abacus 9, torch 2.0, cuda 13, bfloat16, random weights\n$ python compare.py" in text
        header, first, last = text[text.index("Decode with a long") :].splitlines()[1:4]
        assert header.split() == ["shape", "filled", "tok/s", "ms/step", "mean", "limit", "of", "limit", "by", "mv"]
        assert first.split()[:8] == ["llama-1b", "512", "1,512.0", "1.000", "1.100", "2,000", "50.0%", "60.0%"]
        assert last.startswith("llama-1b        32,768  33,768.0")
        assert last.endswith("goal of 32768")
        assert "FAILED: RuntimeError: no memory" in text

    @pytest.mark.parametrize("sections", [["context"], ["batch"], ["context", "batch"]])
    def test_plot(self, gpu: SimpleNamespace, tmp_path: Path, sections: list[str]) -> None:
        report = self.make(gpu)
        rows = {"context": speed_rows("context", 512, 4096, 32_768), "batch": speed_rows("rows", 1, 8, 32)}
        for section in sections:
            for row in rows[section]:
                report.add(section, row)
        picture = tmp_path / "picture.png"
        gpu.gpu_report.plot(report.values, picture)
        image = imread(picture)
        assert image.shape[1] == 720 * len(sections)
        assert image.std() > 0.05

    def test_nothing_to_plot(self, gpu: SimpleNamespace, tmp_path: Path) -> None:
        report = self.make(gpu)
        report.add("context", {"error": "oh"})
        with pytest.raises(ValueError, match="nothing to draw"):
            gpu.gpu_report.plot(report.values, tmp_path / "picture.png")


class TestArguments:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (["--new-tokens", "1"], "--new-tokens must be at least 2, not 1"),
            (["--rows", "8", "0"], "--rows must be at least 1"),
            (["--shapes"], "--shapes needs at least one"),
            (["--shapes", "llama-2t"], "invalid choice: 'llama-2t'"),
            (["--sections", "speed"], "invalid choice: 'speed'"),
            (["--contexts", "600"], "--contexts and --context-steps need 608 positions, but tiny has 512"),
            (["--prefill-tokens", "512"], "--prefill-tokens need 513 positions"),
            (["--json", "nowhere/report.json"], "there is no folder nowhere"),
            (["--from-json", "missing.json"], "missing.json"),
        ],
    )
    def test_are_checked_first(
        self,
        gpu: SimpleNamespace,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
        options: list[str],
        message: str,
    ) -> None:
        monkeypatch.setattr(gpu.compare_gpu, "run", lambda *args: pytest.fail("work began"))
        with pytest.raises(SystemExit, match="2"):
            gpu.compare_gpu.main(["--tiny", "--device", "cpu", *options])
        assert message in capsys.readouterr().err

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
    def test_without_a_gpu(self, gpu: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit, match="2"):
            gpu.compare_gpu.main([])
        assert "torch sees no CUDA GPU" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("argv", "expected"),
        [
            (["--device", "cuda", "--sections", "decode"], True),
            (["--sections", "decode", "--device=cuda:0"], True),
            (["--device", "cuda", "--model", "folder"], False),
            (["--device", "cpu"], False),
            ([], False),
        ],
    )
    def test_which_comparison(self, gpu: SimpleNamespace, argv: list[str], expected: bool) -> None:
        assert gpu.compare.on_gpu(argv) is expected

    def test_files_are_not_in_the_command(self, gpu: SimpleNamespace) -> None:
        argv = ["--device", "cuda", "--json", "/a/b.json", "--rows", "1", "8", "--plot=/a/c.png", "--tiny"]
        expected = ["python", "benchmarks/compare.py", "--device", "cuda", "--rows", "1", "8", "--tiny"]
        assert gpu.gpu_report.command_line("compare.py", argv, "--json", "--plot") == expected


def test_needs_little(gpu: SimpleNamespace, tmp_path: Path) -> None:
    """The script itself, where only torch and transformers are installed."""
    report = gpu.gpu_report.Report(MACHINE, ["python", "compare.py"], tmp_path / "report.json")
    report.add("sampling", {"shape": "llama-1b", "settings": "greedy", "tokens_per_s": 1234.5})
    code = (
        "import runpy, sys\n"
        "for name in ('typer', 'rich', 'numba', 'gguf', 'matplotlib', 'triton'): sys.modules[name] = None\n"
        "script = sys.argv.pop(1)\n"
        "sys.path.insert(0, script.rpartition('/')[0])\n"
        "runpy.run_path(script, run_name='__main__')\n"
    )
    script = [str(BENCHMARKS / "compare.py"), "--device", "cuda", "--from-json", str(report.path)]
    done = subprocess.run([sys.executable, "-c", code, *script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "1,234.5" in done.stdout


class TestRun:
    def test_everything(
        self,
        gpu: SimpleNamespace,
        monkeypatch: pytest.MonkeyPatch,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        entered = []

        @contextmanager
        def disabled() -> Iterator[None]:
            entered.append(True)
            yield

        bench = gpu.compare_gpu
        monkeypatch.setattr(bench, "uncaptured", lambda: disabled)
        path, picture = tmp_path / "report.json", tmp_path / "picture.png"
        bench.main(["--tiny", "--device", "cpu", "--compile", "tiny", "--json", str(path), "--plot", str(picture)])
        printed = capsys.readouterr().out
        report = gpu.gpu_report.read(path)
        sections = report["sections"]
        assert list(sections) == list(bench.SECTIONS)
        assert report["commands"] == ["python benchmarks/compare.py --tiny --device cpu --compile tiny"]

        limits = gpu.gpu_ceilings.best(sections["ceilings"])
        for name in ("decode", "batch", "context"):
            for row in sections[name]:
                limit_s = row["step_bytes"] / limits[gpu.gpu_ceilings.MATRIX_VECTOR]
                assert row["share_of_limit"] == pytest.approx(limit_s / row["step_s"])
                mv_s = row["step_bytes"] / limits[gpu.gpu_ceilings.TORCH_MV]
                assert row["share_by_torch_mv"] == pytest.approx(mv_s / row["step_s"])
                assert row["tokens_per_s"] == pytest.approx(row.get("rows", 1) / row["step_s"])

        decode = {(row["shape"], row["engine"]): row for row in sections["decode"]}
        engines = [bench.INFER, bench.EAGER, bench.DYNAMIC]
        assert list(decode) == [
            *(("tiny", engine) for engine in (*engines, bench.STATIC)),
            *((shape, engine) for shape in FAMILIES[1:] for engine in engines),
        ]
        assert len(entered) == len(FAMILIES) * (1 + bench.TINY["trials"])
        assert all(row["first_difference"] is None for row in decode.values())
        ours, theirs = decode["tiny", bench.INFER], decode["tiny", bench.STATIC]
        assert ours["ratio_to_static"] == pytest.approx(ours["tokens_per_s"] / theirs["tokens_per_s"])

        shapes, model = gpu.gpu_shapes, gpu.gpu_shapes.build("tiny", torch.device("cpu"), torch.float32)
        weights, cache = shapes.step_weight_bytes(model), partial(shapes.mean_cache_bytes, model.config, element_size=4)
        assert ours["step_bytes"] == weights + cache(12, 12)
        assert sections["context"][1]["step_bytes"] == weights + cache(64, 8)
        assert sections["batch"][1]["step_bytes"] == weights + sum(cache(n, 12) for n in bench.lengths(3, 4, 20))

        assert [row["rows"] for row in sections["batch"]] == [1, 3]
        assert sections["batch"][0]["ratio_to_one_row"] == 1
        assert [row["context"] for row in sections["context"]] == [16, 64]
        assert [row["shape"] for row in sections["prefill"]] == list(FAMILIES)
        for row in sections["prefill"]:
            rate = limits[gpu.gpu_ceilings.MATRIX]
            assert row["share_of_rate"] == pytest.approx(row["flops"] / row["pass_s"] / rate)
        greedy, sampled = sections["sampling"]
        assert sampled["ratio_to_greedy"] == pytest.approx(sampled["tokens_per_s"] / greedy["tokens_per_s"])

        cases = {row["case"]: row for row in sections["start"]}
        assert next(iter(cases)) == "cold"
        assert list(cases)[-1] == "warm"
        assert len(cases) > 5
        for case in ("cold", "warm"):
            row = cases[case]
            assert 0 < row["ready_s"] < row["first_s"] < row["second_s"] < row["eighth_s"]
        assert {row["shape"] for row in sections["parts"]} == set(FAMILIES)

        for name, table in gpu.gpu_report.TABLES.items():
            assert table.header() in printed
            for row in sections[name]:
                assert table.line(row) in printed
        assert imread(picture).std() > 0.05
        bench.main(["--from-json", str(path)])
        assert capsys.readouterr().out.strip() == gpu.gpu_report.formatted(report).strip()

    def test_one_section_brings_its_limit(self, gpu: SimpleNamespace, tmp_path: Path) -> None:
        path = tmp_path / "report.json"
        for section, expected in (("sampling", ["sampling"]), ("context", ["sampling", "ceilings", "context"])):
            gpu.compare_gpu.main(["--tiny", "--device", "cpu", "--sections", section, "--json", str(path)])
            assert list(gpu.gpu_report.read(path)["sections"]) == expected

    def test_a_section_that_fails(
        self,
        gpu: SimpleNamespace,
        monkeypatch: pytest.MonkeyPatch,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        """What it had found is kept, and the others run."""
        path = tmp_path / "report.json"

        def fails(setup: Any) -> Iterator[dict[str, Any]]:
            yield {"shape": "tiny", "settings": "greedy"}
            assert json.loads(path.read_text())["sections"]["sampling"]  # it is in the file before the section ends
            raise RuntimeError("out of memory\nand more")

        monkeypatch.setitem(gpu.compare_gpu.SECTIONS, "sampling", fails)
        monkeypatch.setitem(gpu.compare_gpu.SECTIONS, "parts", lambda setup: iter([{"shape": "tiny", "part": "x"}]))
        argv = ["--tiny", "--device", "cpu", "--sections", "sampling", "parts", "--json", str(path)]
        with pytest.raises(SystemExit, match="1"):
            gpu.compare_gpu.main(argv)
        sections = gpu.gpu_report.read(path)["sections"]
        assert sections["sampling"] == [
            {"shape": "tiny", "settings": "greedy"},
            {"error": "RuntimeError: out of memory"},
        ]
        assert len(sections["parts"]) == 1
        assert "FAILED: RuntimeError: out of memory" in capsys.readouterr().out

    def test_a_peer_that_fails(
        self, gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def fails(twin: Any) -> Any:
            def engine(prompt: list[int], new_tokens: int) -> None:
                raise RuntimeError("no compiler")

            return engine

        bench = gpu.compare_gpu
        monkeypatch.setattr(bench, "static_engine", fails)
        sizes = SimpleNamespace(**bench.TINY | {"compile": ["tiny"]})
        limits = dict.fromkeys((gpu.gpu_ceilings.MATRIX_VECTOR, gpu.gpu_ceilings.TORCH_MV), RATE)
        setup = bench.Setup(torch.device("cpu"), torch.float32, sizes, limits)
        engines = [row["engine"] for row in bench.decode_shape(setup, "tiny")]
        assert bench.STATIC not in engines
        assert {bench.INFER, bench.DYNAMIC} <= set(engines)
        assert "no compiler" in capsys.readouterr().out

    def test_speed_is_of_the_median_step(self, gpu: SimpleNamespace) -> None:
        trials = [SimpleNamespace(steps_s=steps) for steps in ([1, 1, 1, 9], [2, 2, 2, 2], [3, 3, 3, 3])]
        found = gpu.compare_gpu.speed(trials)
        assert found["step_s"] == 2
        assert found["tokens_per_s"] == 0.5
        assert found["mean_step_s"] == statistics.median([3, 2, 3])


class TestBareSteps:
    def test_every_way_is_captured_as_it_says(self, gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
        """They take turns, and the first turn does not count."""

        def captured(model: SimpleNamespace, caches: list[int]) -> bool:
            return step.attend_step is attention.attend_step

        seen: list[bool] = []

        def microseconds(step: bool) -> float:
            seen.append(step)
            return float(len(seen))

        for name, replacement in (("filled", lambda _, positions: positions), ("captured", captured)):
            monkeypatch.setattr(gpu.gpu_steps, name, replacement)
        monkeypatch.setattr(gpu.gpu_steps, "microseconds", microseconds)
        found = gpu.gpu_steps.measure(SimpleNamespace(), [300, 400], trials=3)
        assert seen == [True, False] * 4
        assert found == {"as it is": 5.0, "no attention": 6.0}
        assert step.attend_step is attention.attend_step

    def test_nothing_comes_of_no_attention(self, gpu: SimpleNamespace) -> None:
        with gpu.gpu_steps.without_attention():
            out = step.attend_step(SimpleNamespace(heads=4, head_dim=8), torch.empty(3, 64, dtype=torch.bfloat16))
        assert (out.shape, out.dtype) == ((3, 32), torch.bfloat16)

    def test_caches_are_filled(self, gpu: SimpleNamespace) -> None:
        model = gpu.gpu_shapes.build("tiny-gemma3", torch.device("cpu"), torch.float32)
        assert [cache.seq_len for cache in gpu.gpu_steps.filled(model, [3, 40])] == [3, 40]

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (["--rows", "0"], "at least 1"),
            (["--json", "nowhere/a.json"], "there is no folder nowhere"),
            *([] if torch.cuda.is_available() else [([], "needs a CUDA GPU")]),
        ],
    )
    def test_refused(
        self, gpu: SimpleNamespace, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit):
            gpu.gpu_steps.main(options)
        assert message in capsys.readouterr().err
