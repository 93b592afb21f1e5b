"""The line that says what one waits for: on terminals, for what takes long, and never among text."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from terminal import FRAMES, Terminal
from waiting import until

from infer import progress
from infer.cli import status
from infer.cli.status import ERASE, line
from infer.progress import Progress

SEEN = f"""{FRAMES}
from infer.loader import load
check = load.check_finite
def seen(checkpoint, name, weights):
    next_frame()
    check(checkpoint, name, weights)
load.check_finite = seen
from infer.engine import runner
run = runner.Runner._run_pass
def seen_run(self, backend, fed):
    next_frame()
    return run(self, backend, fed)
runner.Runner._run_pass = seen_run
"""
GENERATE = ("generate", "hello" * 20, "--max-new-tokens", "4", "--prefill-chunk", "20")


def test_on_a_terminal(folder: Path) -> None:
    """Loading and prefill, each erased before the text."""
    with Terminal(*GENERATE, "--model", folder, code=SEEN, INFER_KERNELS="0") as terminal:
        assert terminal.ended() == 0
    *drawn, rest = terminal.raw.replace("\r\x1b[K", "\0\x1b[K").split("\x1b[K")
    loading = [each for each in drawn if each.startswith("\rloading ")]
    prefill = [each for each in drawn if each.startswith("\rprefill ")]
    assert len(loading) > 2
    assert loading[-1].endswith(" MB")
    done = [int(each.rpartition(" ")[2].removesuffix("/81")) for each in prefill]
    assert len(set(done)) > 1
    assert done == sorted(done)
    assert done[-1] < 81
    assert drawn[-1].startswith("\0")  # erased
    text, figures, end = rest.split("\r\n")
    assert len(text) > 0
    assert "81 prompt tokens" in figures
    assert end == ""


def test_import_of_torch(folder: Path) -> None:
    """Drawn before it begins, and erased before the first output; also with --json, which is on stdout."""
    with Terminal("info", folder, "--json") as terminal:
        assert terminal.ended() == 0
    assert terminal.raw.startswith("\rloading torch... \x1b[K")
    rest = terminal.raw.rpartition("\x1b[K")[2]
    assert json.loads(rest)["model"] == str(folder)


def test_no_import_of_torch(folder: Path) -> None:
    """A command that needs none draws nothing."""
    with Terminal("models") as terminal:
        assert terminal.ended() == 0
    assert "loading" not in terminal.raw


def test_import_in_a_pipe(folder: Path) -> None:
    code = f"from infer.cli import main; main(['info', {str(folder)!r}, '--json'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert json.loads(done.stdout)["model"] == str(folder)


@pytest.mark.parametrize("slowly", ["--json", "--compare"])
def test_tokens_that_are_not_seen_coming(folder: Path, slowly: str) -> None:
    """Of an answer that is printed whole at its end, and of the run without the cache."""
    with Terminal("generate", "hello", "--ignore-eos", "-n", "8", slowly, "--model", folder, code=SEEN) as terminal:
        assert terminal.ended() == 0
    name, end = (" without the cache", "/8, Ctrl-C skips") if slowly == "--compare" else ("", " tok/s")
    drawn = [each for each in terminal.raw.split("\x1b[K") if each.startswith(f"\rgenerating{name} █")]
    assert len(drawn) > 2
    assert all("/8, " in each and each.endswith(end) for each in drawn)
    assert ("generating █" in terminal.raw) == (slowly == "--json")  # not among the text


class Screen(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


Show = Callable[[], Screen]


@pytest.fixture
def show(monkeypatch: pytest.MonkeyPatch) -> Show:
    """Makes a screen of stdout and stderr, which pytest replaces before a test begins; waits are soon too long."""
    monkeypatch.setattr(status, "DELAY_S", 0.05)
    monkeypatch.setattr(status, "FRAME_S", 0.01)
    monkeypatch.setenv("TERM", "xterm")

    def make() -> Screen:
        screen = Screen()
        monkeypatch.setattr(sys, "stdout", screen)
        monkeypatch.setattr(sys, "stderr", screen)
        return screen

    return make


def wait_for(screen: Screen, text: str) -> None:
    deadline = time.monotonic() + 300
    while text not in screen.getvalue():
        assert time.monotonic() < deadline, screen.getvalue()
        time.sleep(0.005)


def test_text_erases_it(show: Show) -> None:
    screen = show()
    with status.shown(progress.COMPILING, progress.PREFILL):
        with progress.compiling("attend"):
            wait_for(screen, "compiling a kernel, once: attend (")
            print("text")
            assert f"{ERASE}text\n" in screen.getvalue()
        progress.report(progress.PREFILL, 5, 10)
        wait_for(screen, "5/10")
    assert screen.getvalue().endswith(ERASE)  # at the latest
    assert sys.stdout is screen
    progress.report(progress.PREFILL, 5, 10)
    assert not progress.has_listeners()


def test_no_line_is_overwritten(show: Show) -> None:
    """Nothing is drawn between a text and its line break, which `print` writes one after the other."""
    screen = show()
    with status.shown(progress.PREFILL):
        progress.report(progress.PREFILL, 5, 10)
        wait_for(screen, "5/10")
        sys.stdout.write("text")
        time.sleep(0.1)
        assert screen.getvalue().endswith(f"{ERASE}text")
        sys.stdout.write("\n")
        progress.report(progress.PREFILL, 6, 10)
        wait_for(screen, "6/10")


def test_nothing_for_short_waits(show: Show, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = show()
    monkeypatch.setattr(status, "DELAY_S", 300.0)
    with status.shown(progress.PREFILL):
        progress.report(progress.PREFILL, 5, 10)
        time.sleep(0.1)
        progress.report(progress.PREFILL, 10, 10)
        until(lambda: status.STATUS._thread is None)
    assert screen.getvalue() == ""


def test_only_what_is_asked_for(show: Show) -> None:
    screen = show()
    with status.shown(progress.LOADING):
        progress.report(progress.PREFILL, 5, 10)
        time.sleep(0.1)
    assert screen.getvalue() == ""


@pytest.mark.parametrize("where", ["a pipe", "a dumb terminal"])
def test_nothing_elsewhere(show: Show, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    screen = show()
    if where == "a pipe":
        monkeypatch.setattr(Screen, "isatty", lambda self: False)
    else:
        monkeypatch.setenv("TERM", "dumb")
    with status.shown(progress.LOADING):
        assert not progress.has_listeners()
        progress.report(progress.LOADING, 5, 10)
        time.sleep(0.1)
    assert screen.getvalue() == ""


def test_parts_of_a_pass() -> None:
    heard: list[Progress] = []
    with progress.listen(heard.append):
        progress.report(progress.PREFILL, 100, 300, under_way=100)
        progress.report_part(1, 4)
        progress.report(progress.PREFILL, 200, 300)
        progress.report_part(1, 4)  # nothing is under way
    progress.report(progress.PREFILL, 300, 300)
    assert [each.done for each in heard] == [100, 125, 200]


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        (Progress(progress.LOADING, 500_000_000, 1_000_000_000), f"loading {'█' * 12}{'░' * 12} 0.50/1.00 GB"),
        (Progress(progress.FETCHING, 0, 98_000_000, "a\x1bb"), f"fetching a\\x1bb {'░' * 24} 0/98 MB"),
        (Progress(progress.PROMPTS, 1, 2, note="9 tok/s"), f"prompts {'█' * 12}{'░' * 12} 1/2, 9 tok/s"),
        (Progress(progress.PREFILL, 1024, 4623), f"prefill {'█' * 5}{'░' * 19} 1,024/4,623"),
    ],
)
def test_lines(told: Progress, expected: str, show: Show) -> None:
    show()
    assert line(told, 1.0) == expected
