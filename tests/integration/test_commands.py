"""The `infer` command as a user runs it: in a process of its own, with the default model, and no network."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

import pytest
from amount import amount, everything
from commands import Run

from infer import Tokenizer
from infer.cli.common import DEFAULT_MODEL
from infer.loader.builtin import BUILTIN, pull

INFER = Path(sys.executable).with_name("infer")
ROOT = Path(__file__).parents[2]
COMMANDS = ["generate", "chat", "trace", "explain", "pull", "models", "info", "verify", "bench", "perplexity"]
QUESTION = "Why is the sky blue?"
EXACT = ["--dtype", "float32", "--device", "cpu"]  # whatever this machine would choose
HEAVY = ["torch", "numpy", "tokenizers", "safetensors", "huggingface_hub", "gguf", "jinja2", "matplotlib"]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """No package index, no hub: what is cached must do."""
    with socket.socket() as unused:  # a port where no one listens
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    closed = f"http://127.0.0.1:{port}"
    hub = str(tmp_path_factory.mktemp("hub"))
    offline = {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, "HF_HUB_OFFLINE": "1", "HF_ENDPOINT": closed}
    return os.environ | offline | {"HF_HOME": hub, "COLUMNS": "100", "PYTHONIOENCODING": "utf-8"}


@pytest.fixture(scope="module")
def offline(environment: dict[str, str], compiled: None) -> dict[str, str]:
    """The same, once the default model is cached."""
    pull(BUILTIN[DEFAULT_MODEL])
    return environment


def infer(*args: str | Path, env: dict[str, str], stdin: str = "", status: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [INFER, *args], env=env, input=stdin, capture_output=True, encoding="utf-8", timeout=300, check=False
    )
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr
    return done


class TestHelp:
    @pytest.mark.parametrize("args", [[], *([command] for command in COMMANDS)], ids=["infer", *COMMANDS])
    def test_help_does_not_wait_for_torch(self, args: list[str], environment: dict[str, str]) -> None:
        code = (
            "import sys\nfrom infer.cli import main\ntry:\n    main([*sys.argv[1:], '--help'])\n"
            f"finally:\n    print([name for name in {HEAVY} if name in sys.modules], file=sys.stderr)"
        )
        command = [sys.executable, "-c", code, *args]
        done = subprocess.run(command, env=environment, capture_output=True, encoding="utf-8", check=True)
        assert done.stderr == "[]\n"
        assert "Usage:" in done.stdout
        assert "--help" in done.stdout

    def test_every_command_is_listed(self, environment: dict[str, str]) -> None:
        listed = infer("--help", env=environment).stdout
        assert all(re.search(rf"\b{command}\b", listed) for command in COMMANDS)

    def test_without_arguments(self, environment: dict[str, str]) -> None:
        done = infer(env=environment, status=2)
        assert "Usage:" in done.stdout + done.stderr

    def test_sampling_options_are_explained(self, environment: dict[str, str]) -> None:
        text = infer("generate", "--help", env=environment).stdout
        for option in ("--temperature", "--top-p", "--logit-bias", "--stop", "--max-new-tokens", "--json"):
            assert option in text


class TestRefused:
    @pytest.mark.parametrize(
        "args",
        [["generate", "hi", "--temperature", "-1"], ["generate", "hi", "-m", "someone/nothing"], ["info", "nonsense"]],
        ids=["option", "hub", "name"],
    )
    def test_one_line(self, args: list[str], environment: dict[str, str]) -> None:
        done = infer(*args, env=environment, status=2)
        assert done.stdout == ""
        assert done.stderr.startswith("error: ")
        assert done.stderr.count("\n") == 1


@pytest.mark.slow
class TestCommands:
    def test_generate(self, offline: dict[str, str]) -> None:
        done = infer("generate", "The capital of France is", "--max-new-tokens", "8", env=offline)
        assert "Paris" in done.stdout
        assert done.stdout.endswith("\n")
        assert re.fullmatch(
            r"\[5 prompt tokens, prefill [\d.]+ s · 8 new tokens at [\d.]+ tok/s · cache [\d.]+ MB\]\n", done.stderr
        )

    def test_demo(self, offline: dict[str, str]) -> None:
        """What `make demo` runs, with fewer tokens and as JSON."""
        options = ["--chat", "--max-new-tokens", "8", "--json", *EXACT, QUESTION]
        done = infer("generate", "--compare", *options, env=offline)
        output = json.loads(done.stdout)
        assert output["model"] == DEFAULT_MODEL
        assert output["text"]
        assert output["finish_reason"] == "length"
        assert output["without_kv_cache"]["same_tokens"] is True
        assert "faster than without the cache" in done.stderr

    @everything
    def test_chunks(self, offline: dict[str, str]) -> None:
        options = ["--chat", "--max-new-tokens", "8", "--json", *EXACT, QUESTION]
        whole, chunked = (infer("generate", *chunk, *options, env=offline) for chunk in ([], ["--prefill-chunk", "2"]))
        assert json.loads(chunked.stdout)["token_ids"] == json.loads(whole.stdout)["token_ids"]

    @everything
    def test_no_switch_for_thinking(self, offline: dict[str, str]) -> None:
        done = infer("generate", QUESTION, "--chat", "--no-thinking", env=offline, status=2)
        assert done.stderr.startswith("error: this model's chat template has no switch for thinking")

    @everything
    def test_generate_from_a_pipe(self, offline: dict[str, str]) -> None:
        text = "Größe, 水, 🦙 and\n"
        done = infer("generate", "-", "--json", "--max-new-tokens", "4", stdin=text, env=offline)
        read = Tokenizer(DEFAULT_MODEL).decode(json.loads(done.stdout)["prompt_token_ids"])
        assert read == text.removesuffix("\n")

    def test_chat(self, offline: dict[str, str]) -> None:
        stdin = "What is the capital of France?\nAnd of Italy?\n/reset\nWhat is the capital of France?\n/exit\n"
        done = infer("chat", "--max-new-tokens", "24", "--temperature", "0", stdin=stdin, env=offline)
        assert "Paris" in done.stdout
        assert "Rome" in done.stdout
        assert done.stderr.count("s to the first; cache holds ") == 3
        held = [int(count) for count in re.findall(r"cache holds (\d+)", done.stderr)]
        assert held[0] < held[1]
        assert held[0] == held[2]

    def test_info(self, offline: dict[str, str]) -> None:
        facts = json.loads(infer("info", "--json", "--dtype", "float32", env=offline).stdout)
        assert facts["parameters"] == 134_515_008
        assert facts["weight_bytes"] == 4 * facts["parameters"]
        assert facts["cache_bytes_per_token"] == 2 * 30 * 3 * 64 * 4
        assert facts["context"] == 8192
        assert facts["cache_bytes"] == facts["contiguous_cache_bytes"] == 8192 * facts["cache_bytes_per_token"]

    @pytest.mark.usefixtures("offline")
    def test_info_in_words(self, run: Run) -> None:
        text = run("info", "--context", "1000", "--dtype", "float32", model=DEFAULT_MODEL).out
        assert "1,000 positions, 46.1 MB of cache" in text
        assert "134.5 M" in text

    @everything
    def test_models_and_pull(self, offline: dict[str, str]) -> None:
        path = BUILTIN[DEFAULT_MODEL].path
        done = infer("pull", DEFAULT_MODEL, env=offline)
        assert (done.stdout, done.stderr) == (f"{path}\n", "")
        _, *lines = infer("models", env=offline).stdout.splitlines()
        assert [line.split()[0] for line in lines[: len(BUILTIN)]] == list(BUILTIN)
        assert lines[0].split()[:4] == [DEFAULT_MODEL, "98", "MB", "cached"]

    def test_verify(self, offline: dict[str, str], tmp_path: Path) -> None:
        file = tmp_path / "prompts.txt"
        file.write_text(amount("The quick brown fox\nTwo and two\n", "One and"))
        options = ["--prompts", file, "--max-new-tokens", "2", "--all", *EXACT]
        done = infer("verify", DEFAULT_MODEL, *options, env=offline)
        promise, _, *lines = done.stdout.splitlines()
        assert promise == "kernels: every path must give the same bits"
        assert all(line.endswith("  equal") for line in lines)
        assert {"KVCache, chunks of 1", *amount(["default cache, batch of 2"], []), "sampled, traced"} <= {
            line[:38].strip() for line in lines
        }

    @everything
    def test_bench(self, offline: dict[str, str], tmp_path: Path) -> None:
        plot, report = tmp_path / "steps.png", tmp_path / "report.json"
        sizes = ["--prompt-tokens", "8", "--new-tokens", "4", "--trials", "1", "--warmup", "0", *EXACT]
        done = infer("bench", "--compare", *sizes, "--plot", plot, "--report", report, env=offline)
        assert "Speed-up with the cache (8 + 4 tokens)" in done.stdout
        assert json.loads(report.read_text())["comparisons"][0]["same_tokens"] is True
        assert plot.read_bytes().startswith(b"\x89PNG")

    @everything
    def test_perplexity(self, offline: dict[str, str], tmp_path: Path) -> None:
        """Of English words, and of the same without their order."""
        words = (ROOT / "docs" / "design.md").read_text(encoding="utf-8").split()[:80]
        (text := tmp_path / "text.txt").write_text(" ".join(words), encoding="utf-8")
        (shuffled := tmp_path / "shuffled.txt").write_text(" ".join(sorted(words)), encoding="utf-8")
        args = ["perplexity", DEFAULT_MODEL, "--context", "64", "--json", *EXACT]
        exact, worse = (json.loads(infer(*args, "--text", file, env=offline).stdout) for file in (text, shuffled))
        assert exact["tokens"] > 80
        assert exact["windows"] >= 2
        assert 5 < exact["perplexity"] < worse["perplexity"] / 2

    @pytest.mark.usefixtures("offline")
    def test_the_text_of_the_perplexity_that_is_shown(self) -> None:
        text = (ROOT / "benchmarks" / "text.md").read_text(encoding="utf-8")
        scored = len(Tokenizer(DEFAULT_MODEL).encode(text, add_special_tokens=False)) - 1  # nothing is before the first
        assert f"\n{scored:,} tokens to score, " in (ROOT / "docs" / "quantization.md").read_text(encoding="utf-8")

    PAGES: ClassVar = {
        "README.md": "Paris",
        "docs/kv-cache.md": "The cat sat on the",
        "docs/nanogpt.md": "True",
        "docs/python.md": "cache",
        "docs/quantization.md": "",
        "docs/speculation.md": "drafts were right",
        "docs/trace.md": "(9, 8)",
    } | amount({"docs/scale.md": "Paris"}, {})  # starts processes, as tests/integration/test_parallel.py does
    PAGES["docs/recipes.md"] = "Paris"  # at the end: it trains the model that all pages share

    def test_python_in_pages(self, offline: dict[str, str], tmp_path: Path) -> None:
        """All blocks of a page in order, as a reader would run them; not those that quote the source."""
        pages = {}
        for page in self.PAGES:
            text = (ROOT / page).read_text(encoding="utf-8")
            pages[page] = "\n".join(re.findall(r"```python\n(?!# src/)(.*?)```", text, re.DOTALL))
        # One process, which loads a model once, and generates few tokens.
        code = (
            "import functools, io, json, sys\nfrom contextlib import redirect_stdout\nimport infer.loader.load\n"
            "infer.loader.load.load_model = functools.cache(infer.loader.load.load_model)\n"
            "make, printed = infer.SamplingParams.__init__, {}\n"
            "def few(self, max_new_tokens=10, **options):\n"
            "    make(self, max_new_tokens=min(max_new_tokens, 10), **options)\n"
            "infer.SamplingParams.__init__ = few\n"
            "for page, code in json.load(sys.stdin).items():\n"
            "    with redirect_stdout(io.StringIO()) as out:\n"
            "        exec(compile(code, page, 'exec'), {'__name__': '__main__'})\n"
            "    printed[page] = out.getvalue()\n"
            "print(json.dumps(printed))"
        )
        command = [sys.executable, "-c", code]
        done = subprocess.run(
            command,
            env=offline,
            cwd=tmp_path,
            input=json.dumps(pages),
            capture_output=True,
            encoding="utf-8",
            timeout=600,
            check=False,
        )
        errors = [line for line in done.stderr.splitlines() if not line.startswith("compiling a kernel")]
        assert (done.returncode, errors) == (0, [])
        printed = json.loads(done.stdout)
        for page, says in self.PAGES.items():
            assert says in printed[page], page


@contextmanager
def listening_to_ctrl_c() -> Iterator[None]:
    """A process started from a background job ignores SIGINT, and so would its children."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.slow
class TestCtrlC:
    OPTIONS = ("--max-new-tokens", "4000", "--ignore-eos")

    def test_generate(self, offline: dict[str, str]) -> None:
        command = [INFER, "generate", "Once upon a time", *self.OPTIONS]
        with (
            listening_to_ctrl_c(),
            subprocess.Popen(command, env=offline, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process,
        ):
            assert process.stdout is not None
            begun = process.stdout.read(20)
            process.send_signal(signal.SIGINT)
            rest, messages = (stream.decode() for stream in process.communicate(timeout=600))
        assert process.returncode == 130
        assert len(begun) == 20
        assert rest.endswith("\n")
        assert "Traceback" not in messages
        figures = re.fullmatch(r"\[.* (\d+) new tokens .* · interrupted\]\n", messages)
        assert figures
        assert int(figures[1]) < 4000

    @everything
    def test_json(self, offline: dict[str, str]) -> None:
        """The process sends itself the signal with the fifth token: from outside there is nothing to wait for."""
        code = """
import os, signal, sys
from infer.cli import main
from infer.engine import generate as engine
def stream(*args, real=engine.stream, **options):
    for i, token in enumerate(real(*args, **options), start=1):
        if i == 5:
            os.kill(os.getpid(), signal.SIGINT)
        yield token
engine.stream = stream
main(sys.argv[1:])
"""
        command = [sys.executable, "-c", code, "generate", "Once upon a time", *self.OPTIONS, "--json"]
        with listening_to_ctrl_c():
            done = subprocess.run(command, env=offline, capture_output=True, encoding="utf-8", timeout=600, check=False)
        assert done.returncode == 130
        assert done.stderr.endswith("· interrupted]\n")
        assert "Traceback" not in done.stderr
        output = json.loads(done.stdout)
        assert output["finish_reason"] == "interrupted"
        assert 4 <= len(output["token_ids"]) < 4000
        tokens = Tokenizer(DEFAULT_MODEL).decode(output["token_ids"])
        assert tokens.startswith(output["text"].rstrip("\N{REPLACEMENT CHARACTER}"))

    @everything
    def test_chat(self, offline: dict[str, str]) -> None:
        """It ends the answer, not the conversation."""
        with (
            listening_to_ctrl_c(),
            subprocess.Popen(
                [INFER, "chat", *self.OPTIONS],
                env=offline,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            ) as process,
        ):
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(f"{QUESTION}\n".encode())
            process.stdin.flush()
            process.stdout.read(20)
            process.send_signal(signal.SIGINT)
            rest, messages = (stream.decode() for stream in process.communicate(b"/exit\n", timeout=600))
        assert process.returncode == 0
        assert rest.endswith("\n")
        assert "Traceback" not in messages
        assert messages.count("cache holds") == 1
