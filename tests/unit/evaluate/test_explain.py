"""What `infer explain` counts, times and weighs, and how it shows that."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import byte_tokenizer
from commands import CONTEXT, WINDOW, Run
from mocks import MockTokenizer
from rich.console import Console
from torch import Tensor

from infer import KVCache, ModelConfig, SamplingParams, SlidingCache, Tokenizer, generate, load_model
from infer.backend.cpu.backend import CpuBackend
from infer.cli.explain import counts, grids, reason, show
from infer.engine.result import GenerationResult, Timing
from infer.evaluate import explain as explaining
from infer.evaluate.explain import (
    NEW,
    NOT_YET,
    REPEATED,
    REUSED,
    Cost,
    Explanation,
    Passes,
    cache_layout,
    check,
    explain,
    tokens_fed,
    work,
)
from infer.loader import load
from infer.loader.hf_folder import HFFolder
from infer.models.common import Decoder
from infer.trace.text import token_texts

SYMBOLS = {NEW: "n", REPEATED: "x", REUSED: "r", NOT_YET: "."}
SECTIONS = [
    "1. Which keys and values each step computes",
    "2. Tokens processed",
    "3. Time",
    "4. Memory",
    "5. Where to look next",
]
SIZES = [(1, 2), (1, 10), (2, 4), (5, 24), (40, 2), (7, 7)]


def grid(prompt_tokens: int, new_tokens: int, *, use_kv_cache: bool) -> list[str]:
    return [
        "".join(SYMBOLS[work(token, step, prompt_tokens, use_kv_cache=use_kv_cache)] for step in range(new_tokens))
        for token in range(prompt_tokens + new_tokens - 1)
    ]


def make_explanation(
    prompt_tokens: int = 5,
    new_tokens: int = 8,
    *,
    fixed_ms: float = 10.0,
    per_token_ms: float = 2.0,
    step_ms: float | None = None,
    **changes: Any,
) -> Explanation:
    """A run whose passes take exactly what the line says; step_ms: of those over one token, if otherwise."""

    def passes(use_kv_cache: bool) -> Passes:
        fed = tokens_fed(prompt_tokens, new_tokens, use_kv_cache=use_kv_cache)
        return Passes(fed, [step_ms if n == 1 and step_ms else fixed_ms + n * per_token_ms for n in fed])

    values: dict[str, Any] = {
        "prompt_token_ids": [1] * prompt_tokens,
        "token_ids": [2] * new_tokens,
        "text": "b" * new_tokens,
        "same_tokens": True,
        "with_cache": passes(True),
        "without_cache": passes(False),
        "weight_bytes": 500_000_000,
        "element_size": 4,
        "cache_bytes": 1000,
        "context": 256,
    }
    return Explanation(**(values | changes))


class TestWork:
    """The grids of the prompt "A cat", as in the text that they come from."""

    def test_without_the_cache(self) -> None:
        assert grid(2, 4, use_kv_cache=False) == ["nxxx", "nxxx", ".nxx", "..nx", "...n"]

    def test_with_it(self) -> None:
        assert grid(2, 4, use_kv_cache=True) == ["nrrr", "nrrr", ".nrr", "..nr", "...n"]

    @pytest.mark.parametrize(("prompt_tokens", "new_tokens"), SIZES)
    @pytest.mark.parametrize("use_kv_cache", [True, False])
    def test_columns_are_what_is_fed(self, prompt_tokens: int, new_tokens: int, use_kv_cache: bool) -> None:
        columns = zip(*grid(prompt_tokens, new_tokens, use_kv_cache=use_kv_cache), strict=True)
        computed = [sum(symbol in "nx" for symbol in column) for column in columns]
        assert computed == tokens_fed(prompt_tokens, new_tokens, use_kv_cache=use_kv_cache)


class TestTokensFed:
    @pytest.mark.parametrize(("prompt_tokens", "new_tokens"), SIZES)
    def test_formulas(self, prompt_tokens: int, new_tokens: int) -> None:
        p, n = prompt_tokens, new_tokens
        assert sum(tokens_fed(p, n, use_kv_cache=False)) == n * p + n * (n - 1) // 2
        assert sum(tokens_fed(p, n, use_kv_cache=True)) == p + n - 1

    @pytest.mark.parametrize(("new_tokens", "speed_up"), [(10, 5.5), (50, 25.5), (128, 64.5)])
    def test_from_one_token(self, new_tokens: int, speed_up: float) -> None:
        """N(N+1)/2 against N: the published figures, of which 128 tokens are 8,256."""
        run = make_explanation(1, new_tokens)
        assert run.without_cache.tokens == new_tokens * (new_tokens + 1) // 2
        assert run.with_cache.tokens == new_tokens
        assert run.theoretical_speed_up == speed_up
        assert make_explanation(1, 128).without_cache.tokens == 8256

    @pytest.mark.parametrize("use_kv_cache", [True, False])
    def test_is_what_the_engine_feeds(
        self, tiny_model: Callable[..., Decoder], passes: list[int], use_kv_cache: bool
    ) -> None:
        tokenizer = MockTokenizer("x" * 64)
        generate(tiny_model(), tokenizer, [1, 2, 3], SamplingParams(max_new_tokens=6), use_kv_cache=use_kv_cache)
        assert passes == tokens_fed(3, 6, use_kv_cache=use_kv_cache)


class TestCost:
    def test_finds_the_line(self) -> None:
        run = make_explanation(fixed_ms=10.0, per_token_ms=2.0)
        assert (run.cost.fixed_ms, run.cost.per_token_ms) == (pytest.approx(10.0), pytest.approx(2.0))
        assert run.cost.is_plausible
        for passes in (run.with_cache, run.without_cache):
            assert run.cost.of(passes) == pytest.approx(passes.total_ms)

    def test_one_slow_step_does_not_bend_it(self) -> None:
        run = make_explanation()
        run.without_cache.times_ms[-1] = run.with_cache.times_ms[0] = 1e6
        assert run.cost == make_explanation().cost

    @pytest.mark.parametrize(("prompt_tokens", "new_tokens"), SIZES)
    def test_smallest_runs_have_one(self, prompt_tokens: int, new_tokens: int) -> None:
        run = make_explanation(prompt_tokens, new_tokens)
        assert run.cost.per_token_ms == pytest.approx(2.0)

    @pytest.mark.parametrize(("step_ms", "pass_ms"), [(10.0, 10.0), (10.0, 8.0), (10.0, 500.0)])
    def test_implausible(self, step_ms: float, pass_ms: float) -> None:
        assert not Cost(step_ms, pass_ms, 9.5).is_plausible

    def test_speed_up_is_the_count_times_the_price_of_a_token(self) -> None:
        run = make_explanation(step_ms=13.0)
        price = run.without_cache.ms_per_token / run.with_cache.ms_per_token
        assert run.speed_up == pytest.approx(run.theoretical_speed_up * price)
        assert run.speed_up < run.theoretical_speed_up


class TestCacheLayout:
    @pytest.mark.parametrize("positions", [1, WINDOW - 1, WINDOW, WINDOW + 1, 40, 1000])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("model_type", ["llama", "gemma3"])
    def test_is_what_is_allocated(
        self, tiny_config: Callable[..., ModelConfig], model_type: str, dtype: torch.dtype, positions: int
    ) -> None:
        config = tiny_config(model_type=model_type, **({"sliding_window": WINDOW} if model_type == "gemma3" else {}))
        cls = SlidingCache if config.has_windows else KVCache
        cache = cls.from_model_config(config, positions, dtype=dtype, device="cpu")
        layout = cache_layout(config, positions, dtype.itemsize)
        assert sum(kind.bytes for kind in layout) == cache.memory_bytes
        assert sum(kind.layers for kind in layout) == config.num_hidden_layers

    def test_kinds(self, tiny_config: Callable[..., ModelConfig]) -> None:
        """Two window layers of 4 + 512 slots and one that keeps all; one KV head pair of 12 numbers."""
        full, window = cache_layout(tiny_config(model_type="gemma3"), 2000, 4)
        assert (full.window, full.layers, full.slots, full.bytes) == (None, 1, 2000, 2 * 1 * 2 * 12 * 2000 * 4)
        assert (window.window, window.layers, window.slots, window.bytes) == (4, 2, 516, 2 * 2 * 2 * 12 * 516 * 4)


class TestExplain:
    def test_run(self, tiny_model: Callable[..., Decoder]) -> None:
        model, tokenizer = tiny_model(), MockTokenizer("x" * 64)
        run = explain(model, tokenizer, [1, 2, 3], 6)
        expected = generate(model, tokenizer, [1, 2, 3], SamplingParams(max_new_tokens=6))
        assert (run.prompt_token_ids, run.token_ids, run.text) == ([1, 2, 3], expected.token_ids, expected.text)
        assert run.same_tokens
        assert run.cache_bytes == expected.cache_memory_bytes
        assert run.positions == 9
        assert run.weight_bytes == 4 * sum(p.numel() for p in model.parameters())
        for passes, use_kv_cache in ((run.with_cache, True), (run.without_cache, False)):
            assert passes.fed == tokens_fed(3, 6, use_kv_cache=use_kv_cache)
            assert len(passes.times_ms) == 6
            assert min(passes.times_ms) > 0

    def test_of_each_step_the_faster_trial_counts(
        self, tiny_model: Callable[..., Decoder], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """And neither the warm-up nor the other run."""
        times = iter([[9.0, 9.0]] * 2 + [[0.1, 0.4, 0.2], [1.0, 3.0, 3.0], [0.2, 0.3, 0.3], [2.0, 2.0, 4.0]])

        def timed(*args: Any, **options: Any) -> GenerationResult:
            first, *rest = next(times)
            return GenerationResult([1, 2, 3], [4] * (1 + len(rest)), "", "length", Timing(first, rest), 0)

        monkeypatch.setattr(explaining, "generate", timed)
        run = explain(tiny_model(), MockTokenizer("x" * 64), [1, 2, 3], 3)
        assert run.with_cache.times_ms == pytest.approx([100.0, 300.0, 200.0])
        assert run.without_cache.times_ms == pytest.approx([1000.0, 2000.0, 3000.0])

    @pytest.mark.parametrize(("prompt_tokens", "new_tokens"), [(1, 16), (1, 17), (5, 12), (5, 13), (5, 20), (15, 4)])
    def test_to_the_end_of_the_context_and_beyond(
        self, tiny_model: Callable[..., Decoder], passes: list[int], prompt_tokens: int, new_tokens: int
    ) -> None:
        """N tokens after one fill a block of N; beyond it, both runs compute the last tokens that fit."""
        model = tiny_model(model_type="gpt2", max_position_embeddings=16)
        run = explain(model, MockTokenizer("x" * 64), [1] * prompt_tokens, new_tokens)
        assert run.same_tokens
        assert passes[-new_tokens:] == run.without_cache.fed
        assert passes[-2 * new_tokens : -new_tokens] == run.with_cache.fed
        beyond = max(0, prompt_tokens + new_tokens - 17)
        assert run.num_recomputed_steps == beyond
        assert run.without_cache.fed[-1] == min(16, prompt_tokens + new_tokens - 1)
        assert run.with_cache.fed.count(1) == new_tokens - beyond - (prompt_tokens > 1)
        console = Console(width=100)
        with console.capture() as capture:
            for block in (*grids(run, ["a"] * (prompt_tokens + new_tokens), 100), *counts(run)):
                console.print(block, soft_wrap=True)
        figures = [line for line in capture.get().splitlines() if line.startswith(("  without", "  with "))]
        totals = [line.rpartition("=")[2].strip() for line in figures]
        assert totals == [f"{run.without_cache.tokens:,}", f"{run.with_cache.tokens:,}"]
        for line, total in zip(figures, totals, strict=True):
            term = line.rpartition("=")[0].rpartition("=")[2]
            assert eval(term.replace("·", "*")) == int(total.replace(",", ""))

    def test_the_grid_beyond_the_context(self) -> None:
        kinds = [work(token, 3, 2, use_kv_cache=True, context=4) for token in range(5)]
        assert kinds == ["dropped", "repeated", "repeated", "repeated", "new"]

    def test_goes_past_an_end(self, tiny_model: Callable[..., Decoder]) -> None:
        model, tokenizer = tiny_model(), MockTokenizer("x" * 64)
        first = explain(model, tokenizer, [1, 2, 3], 2).token_ids[0]
        ending = tiny_model(eos_token_ids=(first,))
        assert len(explain(ending, tokenizer, [1, 2, 3], 5).token_ids) == 5

    def test_other_tokens_are_told(self, tiny_model: Callable[..., Decoder], forgetful: None) -> None:
        assert not explain(tiny_model(), MockTokenizer("x" * 64), [1, 2, 3], 24).same_tokens

    @pytest.mark.parametrize(
        ("prompt", "new_tokens", "message"),
        [
            ([], 5, "the prompt is empty"),
            ([1], 1, "max_new_tokens must be at least 2, not 1"),
            ([1], 0, "max_new_tokens must be at least 2, not 0"),
            ([1] * 256, 7, "256 prompt tokens [+] 1 new tokens = 257 positions exceed the model's context of 256"),
            ([1], 2.5, "max_new_tokens must be"),
            ([1], 1024, "1 prompt tokens [+] 1024 new tokens are more than 4 times the model's context of 256"),
            ([1], 2**64, "as far as explain goes"),
            ([64], 5, "token id 64 in the prompt"),
        ],
    )
    def test_refused(
        self, tiny_model: Callable[..., Decoder], prompt: list[int], new_tokens: int, message: str
    ) -> None:
        model = tiny_model()
        with pytest.raises(ValueError, match=message):
            check(model.config, prompt, new_tokens)
        with pytest.raises(ValueError, match=message):
            explain(model, MockTokenizer(), prompt, new_tokens)


class TestReason:
    """What is said follows from what was measured."""

    def test_arithmetic(self) -> None:
        """Without: passes over 5 to 12 tokens, 8.5 in the middle."""
        *others, last = reason(make_explanation())
        said = "\n".join(others).splitlines()
        assert "  per token   (27.00 - 12.00) / (8.5 - 1) = 2.00 ms" in said
        assert "  per pass    12.00 - 2.00 = 10.00 ms" in said
        assert "  without   8 passes x 10.00 +  68 tokens x 2.00 = 216 ms (measured: 216)" in said
        assert "  with      8 passes x 10.00 +  12 tokens x 2.00 = 104 ms (measured: 104)" in said
        assert "(500 MB; in 10.00 ms that is 50.0 GB/s)" in last
        assert "the second half of the steps took 1.3 times as long as the first" in last  # 124 ms against 92
        assert not any("% off" in line for line in said)

    def test_steps_that_do_not_grow(self) -> None:
        run = make_explanation()
        run.without_cache.times_ms[:] = [27.0] * 8
        assert list(reason(run))[-1].endswith("there are 8 either way.")

    def test_uneven_steps(self) -> None:
        run = make_explanation()
        run.without_cache.times_ms[-1] += 216
        assert any("The estimate is 50% off" in line for line in reason(run))

    @pytest.mark.parametrize(
        ("run", "words"),
        [
            (make_explanation(fixed_ms=10.0, per_token_ms=0.0), "cannot be separated"),
            (make_explanation(fixed_ms=0.0, per_token_ms=1.0, step_ms=0.2), "gained more than the count predicts"),
        ],
    )
    def test_no_line(self, run: Explanation, words: str) -> None:
        (said,) = reason(run)
        assert words in said
        assert "(medians)" in said


@pytest.fixture(scope="session")
def windowed(windowed: Path) -> Path:
    """With more positions than the windows and a chunk have."""
    path = windowed.with_name("windowed and long")
    shutil.copytree(windowed, path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2000}))
    return path


@pytest.fixture(autouse=True)
def piped(plain_machine: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The output is no terminal, 80 columns wide."""
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture
def run(run: Run) -> Run:
    return functools.partial(run, "explain")


class TestCommand:
    def test_sections(self, run: Run, folder: Path) -> None:
        """`<s>hello` is five tokens: <s>, he, l, l, o."""
        done = run("hello", "--max-new-tokens", "6")
        assert done.status == 0
        lines = done.out.splitlines()
        assert [line for line in lines if line[:2] in {f"{i}." for i in range(1, 10)}] == SECTIONS
        model, _ = load_model(folder)
        tokenizer = Tokenizer(folder)
        expected = generate(model, tokenizer, tokenizer.encode("hello"), SamplingParams(max_new_tokens=6))
        assert "The two runs generated the same 6 tokens." in done.out
        assert f"<s>hello{tokenizer.decode(expected.token_ids, skip_special_tokens=False)}" in done.out
        assert "N·P + N(N-1)/2 = 6·5 + 6·5/2 = 45" in done.out
        assert "P + N-1        = 5 + 5       = 10" in done.out
        assert "N(N+1)/2 = 21 against N = 6: (N+1)/2 = 3.5 times fewer" in " ".join(done.out.split())
        assert "for     45 tokens" in done.out
        assert "speed-up by count         4.5x" in done.out
        assert "this run, 11 positions" in done.out
        assert "2 x 3 x 2 x 16 x 11 x 4 = 8,448 bytes" in done.out
        assert "allocated: 8,448 bytes (10 filled" in done.out
        assert "the full context, 256 positions" in done.out
        assert "window" not in done.out
        assert [line.split("  ")[1] for line in lines[-4:]] == [
            "infer trace",
            "infer verify",
            "infer bench",
            "docs/kv-cache.md",
        ]

    def test_grid(self, run: Run) -> None:
        lines = run("hello", "--max-new-tokens", "4").out.splitlines()
        gap = " " * 7  # room for what stands above: "without the cache"
        start = lines.index(f"  tokens fed    5  6  7  8{gap}  5  1  1  1")
        assert lines[start - 2].index("with it") == lines[start].index("5  1")
        rows = [line.split('"')[-1] for line in lines[start + 1 : start + 9]]
        new, again, reused, none = "  ■", "  x", "  ·", "   "
        assert lines[start + 1].startswith('"<s>"')
        assert lines[start + 2].startswith('"he"')
        bodies = [row.strip(" ") for row in rows]
        first = f"{new}{again * 3}{gap}{new}{reused * 3}".strip()
        assert bodies[:5] == [first] * 5
        assert bodies[5] == f"{new}{again * 2}{none}{gap}{new}{reused * 2}".strip()
        assert bodies[6] == f"{new}{again}{none * 2}{gap}{new}{reused}".strip()
        assert bodies[7] == f"{new}{none * 3}{gap}{new}".strip()
        assert lines[start + 9] == ""

    @pytest.mark.parametrize(
        ("columns", "widest", "steps"), [(80, 80, 10), (100, 100, 13), (300, 100, 13), (40, 84, 3)]
    )
    def test_fits(self, run: Run, monkeypatch: pytest.MonkeyPatch, columns: int, widest: int, steps: int) -> None:
        """Figures keep their lines even where the terminal is too narrow for them; prose does not."""
        monkeypatch.setenv("COLUMNS", str(columns))
        done = run("x" * 30, "--max-new-tokens", "40")
        assert "\x1b" not in done.out
        assert max(map(len, done.out.splitlines())) <= widest
        assert f"… and {40 - steps} more steps" in done.out
        assert "… 25 more" in done.out

    def test_long_prompt(self, run: Run) -> None:
        """Wider cells for three digits, a cut text, and still one line each."""
        done = run("x" * 230, "--max-new-tokens", "20")
        assert max(len(line) for line in done.out.splitlines() if "■" in line) <= 80
        assert "… 225 more" in done.out
        assert "  231 232 233" in done.out

    def test_two_tokens_are_enough(self, run: Run) -> None:
        done = run("hello", "--max-new-tokens", "2")
        assert (done.status, "more step" in done.out) == (0, False)

    def test_json(self, run: Run, folder: Path) -> None:
        done = run("hello", "--max-new-tokens", "6", "--json")
        output = json.loads(done.out)
        assert done.out.count("\n") == 1
        assert output["model"] == str(folder)
        assert output["same_tokens"] is True
        assert output["prompt_token_ids"] == Tokenizer(folder).encode("hello")
        assert output["tokens"][:5] == ["<s>", "he", "l", "l", "o"]
        assert len(output["tokens"]) == 11
        assert output["with_cache"]["fed"] == [5, 1, 1, 1, 1, 1]
        assert output["without_cache"]["fed"] == [5, 6, 7, 8, 9, 10]
        assert output["theoretical_speed_up"] == 4.5
        totals = [sum(output[name]["times_ms"]) for name in ("without_cache", "with_cache")]
        assert output["speed_up"] == pytest.approx(totals[0] / totals[1])
        assert output["cost"]["fixed_ms"] + output["cost"]["per_token_ms"] == pytest.approx(output["cost"]["step_ms"])
        assert [entry["positions"] for entry in output["cache"]] == [11, CONTEXT]
        assert output["cache_bytes"] == output["cache"][0]["kinds"][0]["bytes"] == 8448

    def test_dtype(self, run: Run) -> None:
        output = json.loads(run("hello", "--max-new-tokens", "6", "--json", "--dtype", "float64").out)
        assert (output["element_size"], output["cache_bytes"]) == (8, 8448 * 2)

    def test_windows(self, run: Run, windowed: Path) -> None:
        done = run("hello", "--max-new-tokens", "6", model=windowed)
        assert "full layers: 2 x 1 x 2 x 16 x 2,000 x 4 = 512,000 bytes" in done.out
        assert f"window layers: 2 x 2 x 2 x 16 x {WINDOW + 512} x 4 = 270,336 bytes" in done.out
        assert "the full context, 2,000 positions: 0.8 MB" in done.out
        assert f"sees the last {WINDOW} positions" in done.out
        assert "would take 1.5 MB" in " ".join(done.out.split())

    def test_default_prompt(self, run: Run, folder: Path) -> None:
        output = json.loads(run("--max-new-tokens", "2", "--json").out)
        assert Tokenizer(folder).decode(output["prompt_token_ids"]) == "The cat sat on the"

    def test_stdin(self, run: Run, folder: Path) -> None:
        output = json.loads(run("-", "--max-new-tokens", "2", "--json", stdin="from a pipe").out)
        assert output["prompt_token_ids"] == Tokenizer(folder).encode("from a pipe")

    def test_other_tokens_are_told(self, run: Run, forgetful: None) -> None:
        assert "The two runs generated DIFFERENT (see `infer verify`) tokens." in run("hello").out

    def test_colour_in_a_terminal(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        plain = run("hello", "--max-new-tokens", "4").out
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("TERM", "xterm-256color")
        coloured = run("hello", "--max-new-tokens", "4").out
        assert "\x1b[" in coloured
        assert "\x1b" not in plain

    def test_markup_is_text(self, run: Run) -> None:
        """What looks like rich's own markup in a prompt is shown as it is."""
        assert "<s>[bold]:cat:[/bold]" in run("[bold]:cat:[/bold]", "--max-new-tokens", "2").out

    @pytest.mark.parametrize(
        ("args", "message"),
        [
            (["hello", "--max-new-tokens", "1"], "max_new_tokens must be at least 2, not 1"),
            (["hello", "--max-new-tokens", "0"], "max_new_tokens must be at least 2, not 0"),
            (["h" * 256, "--max-new-tokens", "2"], "exceed the model's context of 256"),
            ([""], "the prompt is empty"),
        ],
    )
    def test_refused_before_the_weights_are_read(
        self, run: Run, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: list[str], message: str
    ) -> None:
        def fail(*args: Any, **options: Any) -> None:
            pytest.fail("the weights were touched")

        monkeypatch.setattr(load, "_materialize", fail)
        monkeypatch.setattr(HFFolder, "blocks", fail)
        model = folder
        if args == [""]:  # without a BOS token, nothing is nothing
            model = Path(shutil.copytree(folder, tmp_path / "plain"))
            tokenizer = json.loads(byte_tokenizer().to_str())
            (model / "tokenizer.json").write_text(json.dumps(tokenizer | {"post_processor": None}))
        done = run(*args, model=model)
        assert (done.status, done.out) == (2, "")
        assert done.err.startswith("error: ")
        assert done.err.count("\n") == 1
        assert message in done.err

    def test_interrupt(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        calls, ran = iter(range(100)), CpuBackend.run

        def interrupted(*args: Any) -> list[Tensor]:
            if next(calls) == 9:
                raise KeyboardInterrupt
            return ran(*args)

        monkeypatch.setattr(CpuBackend, "run", interrupted)
        done = run("hello", "--max-new-tokens", "6")
        assert (done.status, done.out) == (130, "")
        assert "Traceback" not in done.err


class TestPieces:
    def test_join_to_the_text(self, folder: Path) -> None:
        tokenizer = Tokenizer(folder)
        ids = tokenizer.encode("hello there")
        assert token_texts(tokenizer, ids) == ["<s>", "he", "l", "l", "o", " ", "t", "he", "r", "e"]

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("model", "expected"),
        [("smollm2-135m", ["The", " cat", " sat"]), ("gemma-3-270m", ["<bos>", "The", " cat", " sat"])],
    )
    def test_keep_their_spaces(self, model: str, expected: list[str]) -> None:
        tokenizer = Tokenizer(model)
        assert token_texts(tokenizer, tokenizer.encode("The cat sat")) == expected


@pytest.mark.slow
def test_default_model(smollm2: tuple[Decoder, Tokenizer], capsys: pytest.CaptureFixture[str]) -> None:
    model, tokenizer = smollm2
    run = explain(model, tokenizer, tokenizer.encode("The cat sat on the"), 8)
    assert run.same_tokens
    show(run, token_texts(tokenizer, [*run.prompt_token_ids, *run.token_ids]), model.config, "smollm2-135m")
    printed = capsys.readouterr().out
    assert '" cat"          ■  x  x  x  x  x  x  x     ■  ·  ·  ·  ·  ·  ·  ·\n' in printed
    assert f"2 x 30 x 3 x 64 x 13 x 4 = {run.cache_bytes:,} bytes" in printed
    assert "allocated: 599,040 bytes" in printed
