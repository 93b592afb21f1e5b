"""Streams that are closed, broken or no text, signals, limits of memory, numbers without bounds, hostile texts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from amount import amount
from harness import MB, Outcome, Server, assert_bounded, assert_refused

HUGE = "1" + "0" * 400
COMMANDS = {
    "generate": ["generate", "hello", "--max-new-tokens", "5", "--model"],
    "chat": ["chat", "--max-new-tokens", "5", "--model"],
    "trace": ["trace", "hello", "--max-new-tokens", "5", "--model"],
    "explain": ["explain", "hello", "--max-new-tokens", "5", "--model"],
    "bench": ["bench", "--prompt-tokens", "5", "--new-tokens", "5", "--trials", "1", "--model"],
    "info": ["info"],
    "verify": ["verify", "--max-new-tokens", "5"],
    "models": ["models"],
}
JSON = amount(("generate", "trace", "explain", "bench", "info", "verify"), ("generate", "info"))
SOME = amount(list(COMMANDS), ["chat", "explain", "models"])


def args_of(command: str, model: Path) -> list[str]:
    args = [*COMMANDS[command], *([] if command == "models" else [str(model)])]
    if command == "verify":  # a few tokens instead of all its own prompts
        prompts = model.with_name("prompts.txt")
        prompts.write_text("hello\n")
        args += ["--prompts", str(prompts)]
    return args


def assert_quiet(outcome: Outcome, *statuses: int) -> None:
    assert outcome.status in statuses, outcome
    assert b"Traceback" not in outcome.err, outcome.err.decode()
    assert b"Exception" not in outcome.err, outcome.err.decode()


class TestStreams:
    @pytest.mark.parametrize("command", SOME)
    def test_no_input(self, server: Server, folder: Path, command: str) -> None:
        assert_quiet(server.run(*args_of(command, folder), closed=[0]), 0)

    def test_no_input_to_read(self, server: Server, folder: Path) -> None:
        """An empty prompt is one with BOS here."""
        assert_quiet(server.run("generate", "-", "--max-new-tokens", "5", "--model", folder, closed=[0]), 0)

    @pytest.mark.parametrize("command", JSON)
    def test_no_stderr(self, server: Server, folder: Path, command: str) -> None:
        """What belongs there does not turn up among the JSON."""
        outcome = server.run(*args_of(command, folder), "--json", closed=[2])
        assert_quiet(outcome, 0)
        assert outcome.out.count(b"\n") == 1
        json.loads(outcome.out)

    @pytest.mark.parametrize("command", SOME)
    @pytest.mark.parametrize("closed", amount([[1], [1, 2], [0, 1, 2]], [[0, 1, 2]]), ids=str)
    def test_no_output(self, server: Server, folder: Path, command: str, closed: list[int]) -> None:
        outcome = server.run(*args_of(command, folder), stdin=b"hello\n", closed=closed)
        assert_quiet(outcome, 0)
        assert outcome.out == b""

    def test_no_stderr_for_an_error(self, server: Server) -> None:
        assert server.run("info", "nonsense", closed=[2])[:3] == (2, b"", b"")

    @pytest.mark.parametrize("command", SOME)
    @pytest.mark.parametrize("broken", amount([[1], [2], [1, 2]], [[1], [2]]), ids=str)
    def test_nobody_reads(self, server: Server, folder: Path, command: str, broken: list[int]) -> None:
        outcome = server.run(*args_of(command, folder), stdin=b"hello\n", broken=broken)
        assert_quiet(outcome, *([1] if 1 in broken else [0, 1]))
        assert b"error" not in outcome.err

    def test_nobody_reads_an_error(self, server: Server) -> None:
        assert_quiet(server.run("info", "nonsense", broken=[2]), 2)

    @pytest.mark.parametrize("text", amount([b"\xff", b"hello \xe2\x82", b"\xc0\x80", b"\xed\xa0\x80"], [b"\xff"]))
    def test_no_text(self, server: Server, folder: Path, text: bytes) -> None:
        for command in ("generate", "trace", "explain"):
            outcome = server.run(command, "-", "--max-new-tokens", "5", "--model", folder, stdin=text)
            assert_refused(outcome)
            assert b"text" in outcome.err
        outcome = server.run("chat", "--max-new-tokens", "5", "--model", folder, stdin=text + b"\nhello\n")
        assert_quiet(outcome, 0)  # a chat goes on
        assert b"[5 tokens" in outcome.err

    def test_no_text_as_an_argument(self, server: Server, folder: Path) -> None:
        assert_refused(server.run("generate", "\udcff", "--model", folder))
        assert_refused(server.run("generate", "hi", "--chat", "--system", "\udcff", "--model", folder))


@pytest.mark.parametrize("command", SOME)
@pytest.mark.parametrize("after", amount([i / 50 for i in range(2, 40)], [0.04, 0.2]))
def test_interrupted(server: Server, folder: Path, command: str, after: float) -> None:
    assert_quiet(server.run(*args_of(command, folder), stdin=b"hello\n", interrupt_after=after), 0, 130)


@pytest.mark.parametrize("command", SOME)
@pytest.mark.parametrize("megabytes", amount([0, 1, 2, 4, 8, 16, 32, 64, 128], [0, 16]))
def test_little_memory(server: Server, folder: Path, command: str, megabytes: int) -> None:
    outcome = server.run(*args_of(command, folder), stdin=b"hello\n", address_space=megabytes * MB)
    assert_bounded(outcome)


NUMBERS = {
    "generate": [
        *["max-new-tokens", "top-k", "seed", "temperature", "top-p", "min-p", "repetition-penalty"],
        *["presence-penalty", "frequency-penalty", "prefill-chunk", "threads"],
    ],
    "chat": ["context", "max-new-tokens", "seed", "prefill-chunk"],
    "trace": ["alternatives", "show-layer", "show-head", "show-step", "layers", "heads"],
    "explain": ["max-new-tokens"],
    "bench": ["prompt-tokens", "new-tokens", "trials", "warmup", "prefill-chunk"],
    "info": ["context"],
    "verify": ["max-new-tokens", "seed", "also-threads"],
}


OPTIONS = [(name, option) for name in NUMBERS for option in NUMBERS[name]]


@pytest.mark.parametrize(("command", "option"), amount(OPTIONS, OPTIONS[::3]))
def test_numbers_without_bounds(server: Server, folder: Path, command: str, option: str) -> None:
    for value in amount([HUGE, f"-{HUGE}", f"{HUGE}.0", "1e400", "-1", "nan", str(2**64), str(2**63)], [HUGE]):
        args = [arg for arg in args_of(command, folder) if f"--{option}" not in COMMANDS[command] or arg != "5"]
        args = [arg for arg in args if arg != f"--{option}"]
        outcome = server.run(*args, f"--{option}={value}", stdin=b"hello\n")
        assert_bounded(outcome)
        if value in (HUGE, f"-{HUGE}"):
            assert outcome.status == 2, outcome


@pytest.mark.parametrize(
    "bias", amount([f"{HUGE}:1", f"1:{HUGE}", "1:inf", "1:nan", "1e3:1", "-1:1", ":", "1:"], [f"1:{HUGE}"])
)
def test_bias(server: Server, folder: Path, bias: str) -> None:
    outcome = server.run("generate", "hi", "--max-new-tokens", "5", "--model", folder, f"--logit-bias={bias}")
    assert_refused(outcome)


def test_a_file_that_speaks_to_the_terminal(server: Server, folder: Path, tmp_path: Path) -> None:
    """What a file says about itself gets into errors without its escape sequences."""
    model = shutil.copytree(folder, tmp_path / "model")
    (model / "chat_template.jinja").write_text("{{ raise_exception('\x1b]0;owned\x07\u202e\x9b31m') }}")
    outcome = server.run("generate", "hi", "--chat", "--max-new-tokens", "5", "--model", model)
    assert_refused(outcome)
    assert not set("\x1b\x07\x9b\u202e") & set(outcome.err.decode())


def test_long_errors_are_cut(server: Server) -> None:
    outcome = server.run("info", "x" * 100_000)
    assert_refused(outcome)
    assert len(outcome.err) < 3000


def test_an_empty_name_of_a_folder(server: Server, folder: Path) -> None:
    """`--prefix-store "$UNSET"` would be the current folder."""
    outcome = server.run("generate", "x", "--model", folder, "--prefix-store", "")
    assert_bounded(outcome)
    assert outcome.status == 2
    assert b"--prefix-store" in outcome.err
