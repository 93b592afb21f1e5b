"""The benchmark: its figures agree with one another, and it refuses before it works."""

from __future__ import annotations

import importlib.util
import json
import re
import runpy
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.image import imread

from infer.engine.result import GenerationResult, Timing
from infer.evaluate import bench
from infer.evaluate.bench import BenchConfig, BenchResult, StepTimes
from infer.models.common import Decoder
from infer.nn.quantized import QuantizedWeight

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
LENGTHS = ((5, 9), (20, 12))  # prompt tokens, new tokens
MACHINE = {"device": "cpu", "name": "Abacus 1", "cores": 4, "threads": 3, "torch": "2.0"}


class LetterTokenizer:
    """One token per letter, in a vocabulary of 64."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) % 64 for letter in text]

    def decode(self, token_ids: list[int]) -> str:
        return "".join(chr(65 + i) for i in token_ids)


@pytest.fixture
def model(tiny_model: Callable[..., Decoder]) -> Decoder:
    return tiny_model(eos_token_ids=tuple(range(64)))  # any token would end a generation that minds


@pytest.fixture
def measured(model: Decoder) -> list[BenchResult]:
    """Two lengths, each with the cache and without."""
    return [
        bench.run(model, LetterTokenizer(), BenchConfig(*lengths, trials=3, use_kv_cache=use_kv_cache))
        for lengths in LENGTHS
        for use_kv_cache in (True, False)
    ]


def test_figures_are_consistent(measured: list[BenchResult], model: Decoder) -> None:
    for result in measured:
        config, step = result.config, result.step_ms
        steps = config.new_tokens - 1
        assert result.positions == list(range(config.prompt_tokens, config.prompt_tokens + steps))
        assert len(result.step_times_ms) == steps
        assert len(result.token_ids) == config.new_tokens
        assert 0 < step.min <= step.p50 <= step.p95 <= step.p99 <= step.max
        assert step.min <= step.mean <= step.max
        assert result.prompt_tokens_per_s == pytest.approx(config.prompt_tokens / result.ttft_ms * 1e3)
        assert result.decode_tokens_per_s == pytest.approx(steps / result.decode_time_s)
        assert sum(result.step_times_ms) == pytest.approx(result.decode_time_s * 1e3)
        positions = config.prompt_tokens + config.new_tokens if config.use_kv_cache else 0
        assert result.cache_bytes == model.config.cache_bytes_per_token(4) * positions
        assert result.weight_bytes == sum(parameter.nbytes for parameter in model.parameters())
        assert result.peak_memory_bytes is not None
        assert result.peak_memory_bytes > result.weight_bytes
        assert (result.dtype, result.weight_bits) == ("float32", [])


def test_the_median_trial_is_reported(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds for the prefill and for two steps: of the warm-up, then of four trials."""
    scripted = [(99, 99, 99), (4, 1, 3), (1, 5, 5), (2, 1, 1), (5, 3, 3)]
    calls = []

    def generate(model: Decoder, tokenizer: Any, prompt: list[int], params: Any, **options: Any) -> GenerationResult:
        prefill, *steps = scripted[len(calls)]
        calls.append((prompt, options))
        return GenerationResult(prompt, [len(calls)] * 3, "", "length", Timing(prefill, steps), 0)

    monkeypatch.setattr(bench, "generate", generate)
    messages: list[str] = []
    config = BenchConfig(prompt_tokens=6, new_tokens=3, trials=4, warmup=1, use_kv_cache=False)
    result = bench.run(model, LetterTokenizer(), config, progress=messages.append)
    assert result.ttft_ms == 3000  # of 4, 1, 2, 5
    assert result.step_times_ms == [1000, 3000]  # totals are 4, 10, 2, 6: the faster of the middle two
    assert result.decode_tokens_per_s == 0.5
    assert result.token_ids == [2] * 3
    assert (result.step_ms.min, result.step_ms.max, result.step_ms.mean) == (1000, 5000, 2750)
    assert messages == ["warm-up 1/1", "trial 1/4", "trial 2/4", "trial 3/4", "trial 4/4"]
    options = {"use_kv_cache": False, "prefill_chunk": None, "cache_dtype": "auto", "on_full": "error"}
    options |= {"speculate": None}
    assert calls == [(LetterTokenizer().encode(bench.PROMPT)[:6], options)] * 5


def test_drafts_are_measured_beside_none(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds of a step, and the drafts of it: of two warm-ups, then of three trials each, which alternate."""
    scripted = [(99, 0, 0), (99, 9, 9), (4, 0, 0), (1, 5, 2), (5, 0, 0), (2, 8, 6), (6, 0, 0), (9, 7, 1)]
    calls = []

    def generate(model: Decoder, tokenizer: Any, prompt: list[int], params: Any, **options: Any) -> GenerationResult:
        step, drafted, accepted = scripted[len(calls)]
        calls.append(options["speculate"] and "ngram")
        timing = Timing(1, [step, step])
        return GenerationResult(prompt, [7] * 3, "", "length", timing, 0, drafted=drafted, accepted=accepted)

    monkeypatch.setattr(bench, "generate", generate)
    messages: list[str] = []
    configs = [BenchConfig(6, 3, trials=3, speculate=name) for name in (None, "ngram")]
    results = bench.run_alternating(model, LetterTokenizer(), configs, messages.append)
    assert calls == [None, "ngram"] * 4
    assert messages == ["warm-up 1/1", "trial 1/3", "trial 2/3", "trial 3/3"]
    assert [(result.decode_time_s, result.drafted, result.accepted) for result in results] == [(10, 0, 0), (4, 8, 6)]
    assert bench.report(results, "tiny", MACHINE)["comparisons"] == [
        {
            "prompt_tokens": 6,
            "new_tokens": 3,
            "speculate": "ngram",
            "tokens_per_s": [0.2, 0.5],
            "decode_speedup": 2.5,
            "drafted": 8,
            "accepted": 6,
            "same_tokens": True,
        }
    ]
    without, *drafts = bench.format_table(results, "tiny", MACHINE).split("Drafts:  ")
    assert "Per-step latency" in without
    assert "Per-token latency" in drafts[0]
    told = "Speed-up with drafts (6 + 3 tokens): 2.50x decode (0.2 to 0.5 tok/s), drafts 6 of 8 right, same tokens"
    assert drafts[0].endswith(told)


def test_prefill_in_chunks(model: Decoder, measured: list[BenchResult], passes: list[int]) -> None:
    """The same work in narrower passes."""
    prompt, new = LENGTHS[0]
    result = bench.run(model, LetterTokenizer(), BenchConfig(prompt, new, trials=1, warmup=0, prefill_chunk=2))
    assert passes == [2, 2, 1] + [1] * (new - 1)
    assert result.token_ids == measured[0].token_ids
    assert "5 prompt + 9 new, prefilled in chunks of 2" in bench.format_table([result], "tiny", MACHINE)
    assert bench.report([result], "tiny", MACHINE)["results"][0]["config"]["prefill_chunk"] == 2
    assert [c["same_tokens"] for c in bench.comparisons([result, measured[1]])] == [True]


def test_quantised_weights_are_said_to_be(model: Decoder) -> None:
    model.lm_head.weight = QuantizedWeight.of(model.lm_head.weight.data, "int8")
    config = BenchConfig(4, 2, trials=1, warmup=0)
    assert "float32, weights in 8 bits\n" in bench.format_table(
        [bench.run(model, LetterTokenizer(), config)], "", MACHINE
    )
    down = model.layers[0].mlp.down_proj
    down.weight = QuantizedWeight.of(down.weight.data, "int4")
    result = bench.run(model, LetterTokenizer(), config)
    assert "float32, weights in 4 and 8 bits\n" in bench.format_table([result], "", MACHINE)
    assert bench.report([result], "", MACHINE)["results"][0]["weight_bits"] == [4, 8]


def test_windows_take_less_cache(tiny_model: Callable[..., Decoder]) -> None:
    windows = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 4}
    model = tiny_model(**windows)
    config = BenchConfig(20, 10, trials=1, warmup=0, prefill_chunk=3)
    layer = model.config.cache_bytes_per_token(4) // 2
    assert bench.run(model, LetterTokenizer(), config).cache_bytes == layer * (30 + 4 + 3)


def test_percentiles() -> None:
    times = StepTimes.of([float(i) for i in range(100, -1, -1)])
    assert times == StepTimes(mean=50, p50=50, p95=95, p99=99, min=0, max=100)


def test_prompt_is_fixed_and_of_any_length() -> None:
    long = bench.fixed_prompt(LetterTokenizer(), 2000)
    assert len(long) == 2000
    assert bench.fixed_prompt(LetterTokenizer(), 7) == long[:7]


def test_comparison(measured: list[BenchResult]) -> None:
    found = bench.comparisons(measured)
    assert [(c["prompt_tokens"], c["new_tokens"]) for c in found] == list(LENGTHS)
    assert all(c["same_tokens"] for c in found)
    with_cache, without = measured[:2]
    assert found[0]["decode_speedup"] == without.decode_time_s / with_cache.decode_time_s
    assert bench.comparisons(measured[:1]) == bench.comparisons(measured[1:3]) == []


def test_report_is_json(measured: list[BenchResult]) -> None:
    report = bench.report(measured, "tiny", bench.describe_machine(torch.device("cpu")))
    assert json.loads(json.dumps(report)) == report
    assert report["model"] == "tiny"
    assert report["machine"]["torch"] == torch.__version__
    assert report["machine"]["threads"] == torch.get_num_threads()
    assert report["machine"]["name"]
    assert [result["config"]["use_kv_cache"] for result in report["results"]] == [True, False] * 2
    assert [result["cache_memory_mb"] > 0 for result in report["results"]] == [True, False] * 2
    assert len(report["comparisons"]) == 2


def test_machine_is_named_without_lscpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert bench.describe_machine(torch.device("cpu"))["name"]


def test_machine_is_named_if_lscpu_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(command: list[str], timeout: float, **options: Any) -> None:
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", hang)
    monkeypatch.setattr(bench.platform, "processor", lambda: "")  # the standard library asks `uname`
    assert bench.describe_machine(torch.device("cpu"))["name"]


def test_table(measured: list[BenchResult]) -> None:
    table = bench.format_table(measured[:2], "tiny", MACHINE)
    headings = [line for line in table.splitlines() if line.startswith(("===", "---"))]
    sections = ["--- Prefill ---", "--- Decode ---", "--- Memory ---"]
    assert headings == ["=== Generation Benchmark ===", *sections, *sections]
    for text in ("Abacus 1, 4 cores, 3 threads, torch 2.0", "enabled (0.0 MB)", "disabled", "5 prompt + 9 new"):
        assert text in table
    assert table.splitlines()[-1].startswith("Speed-up with the cache (5 + 9 tokens): ")
    assert table.endswith("x decode, same tokens")
    assert "Speed-up" not in bench.format_table(measured[:1], "tiny", MACHINE)


@pytest.mark.parametrize("kinds", [{True}, {False}, {True, False}], ids=["cached", "uncached", "both"])
def test_plot(measured: list[BenchResult], tmp_path: Path, kinds: set[bool]) -> None:
    path = tmp_path / "steps.png"
    results = [result for result in measured if result.config.use_kv_cache in kinds]
    bench.plot(results, path, "tiny", MACHINE)
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    pixels = torch.tensor(imread(path))[..., :3]
    for use_kv_cache, (_, colour) in bench.CURVES.items():
        rgb = torch.tensor([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
        drawn = ((pixels - rgb).abs().amax(-1) < 0.01).sum() > 100
        assert drawn == (use_kv_cache in kinds)


def test_plot_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    bench.check_plot()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install 'infer-kv\[plot\]'"):
        bench.check_plot()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"prompt_tokens": 0}, "prompt_tokens must be at least 1, not 0"),
        ({"new_tokens": 1}, "new_tokens must be at least 2, not 1"),
        ({"trials": 0}, "trials must be at least 1, not 0"),
        ({"warmup": -1}, "warmup must be at least 0, not -1"),
        ({"prefill_chunk": 0}, "prefill_chunk must be an integer, 1 or more, not 0"),
        ({"prefill_chunk": 4, "use_kv_cache": False}, "prefill_chunk needs the cache"),
        ({"speculate": "ngram", "use_kv_cache": False}, "speculate needs the cache"),
    ],
)
def test_impossible_settings_are_refused(values: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BenchConfig(**values)


def test_overflow_is_refused_before_work(model: Decoder, passes: list[int]) -> None:
    with pytest.raises(ValueError, match=r"250 prompt tokens.*= 257 positions exceed the model's context of 256"):
        bench.run(model, LetterTokenizer(), BenchConfig(prompt_tokens=250, new_tokens=7))
    assert passes == []
    bench.check(model.config, BenchConfig(prompt_tokens=250, new_tokens=6))


def test_script_is_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[str]] = []
    command = types.ModuleType("infer.cli")
    command.main = calls.append  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "infer.cli", command)
    monkeypatch.setattr(sys, "argv", ["bench_generation.py", "--compare", "--trials", "2"])
    runpy.run_path(str(BENCHMARKS / "bench_generation.py"), run_name="__main__")
    assert calls == [["bench", "--compare", "--trials", "2"]]


@pytest.fixture
def tiny_folder(tmp_path: Path) -> Path:
    """A Llama as transformers saves it, with a tokenizer. Every token is an end-of-sequence token."""
    import tokenizers
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.3,
        eos_token_id=list(range(64)),
    )
    folder = tmp_path / "model"
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    letters = {chr(32 + i): i for i in range(64)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(letters, unk_token=" "))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    backend.save(str(folder / "tokenizer.json"))
    return folder


def test_compare_with_transformers(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    spec = importlib.util.spec_from_file_location("compare", BENCHMARKS / "compare.py")
    assert spec is not None
    assert spec.loader is not None
    compare = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(compare)
    json_file = tmp_path / "compare.json"
    sizes = ["--prompt-tokens=6", "--new-tokens=10", "--trials=2", "--steps=2", "--positions", "8", "40"]
    text = tmp_path / "text.txt"
    text.write_text("THE CACHE HOLDS KEYS AND VALUES. " * 9)
    quality = ["--text", str(text), "--agreement", "3", "4"]
    compare.main(["--model", str(tiny_folder), *sizes, *quality, "--no-cache", "--json", str(json_file)])
    report = json.loads(json_file.read_text())
    engines = {engine["engine"]: engine for engine in report["engines"]}
    assert list(engines) == ["infer float32", "infer int4", "infer int8", compare.TRANSFORMERS, compare.NO_CACHE]
    for name, engine in engines.items():
        if name not in ("infer int4", "infer int8"):
            assert engine["first_difference"] is None
        assert len(engine["trials_step_ms"]) == 2
        limit = engine["bytes_per_token"] / report["bytes_per_second"] * 1e3
        assert engine["share_of_read_limit"] == pytest.approx(limit / engine["step_ms"])
    assert engines[compare.TRANSFORMERS]["decode_ratio_to_transformers"] == 1
    read = [engine["bytes_per_token"] for engine in engines.values()]
    assert read[0] == read[3] > read[2] > read[1]
    for rows in report["parts"].values():
        assert [row["position"] for row in rows] == [8, 40]
        assert all(min(row[f"{part}_ms"] for part in ("step", "products", "attention")) > 0 for row in rows)
    first, *others = report["quality"]
    assert (first["same_runs"], first["tokens_before_parting"]) == (3, 4)
    assert [other["engine"] for other in others] == ["infer int4", "infer int8"]
    assert 0.95 < others[1]["perplexity"] / first["perplexity"] < 1.05
    printed = capsys.readouterr()
    assert "infer float32 generated the same 10 tokens as transformers." in printed.out
    assert printed.err == ""
    compare.main(["--model", str(tiny_folder), *sizes, "--no-quality", "--no-transformers", "--widths", "int8", "auto"])
    printed = capsys.readouterr()
    assert re.search(r"infer auto generated (the same 10 tokens as|.* than) infer int8\.", printed.out)
    assert "generated" not in printed.out.split("infer auto generated")[1]
    with pytest.raises(SystemExit, match="2"):
        compare.main(["--model", str(tiny_folder), "--positions", "64"])
    assert "exceed the model's context of 64" in capsys.readouterr().err
