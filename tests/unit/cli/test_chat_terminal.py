"""A chat on a pseudo-terminal: what is typed, what arrives as a message, and what is seen."""

from __future__ import annotations

import ast
import re
import stat
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from terminal import ALT_ENTER, BACKSPACE, CTRL_C, CTRL_D, ENTER, LEFT, TAB, UP, Terminal, paste, visible

from infer.cli.chat import show_last_turns

# Notes each message that is sent, and takes its time over all passes of a reply but the first while a file is there.
PREPARED = """
import time
from pathlib import Path
from infer.cli.chat import Conversation
from infer.engine.runner import Runner
reply, launch, passes = Conversation.reply, Runner.launch, 0
def noted(self, text):
    with open({notes!r}, "a") as notes:
        print(repr(text), file=notes)
    global passes
    passes = 0
    reply(self, text)
def slow(self, scheduled, **options):
    global passes
    passes += 1
    if passes > 20 and Path({slow!r}).exists():
        time.sleep(0.5)
    return launch(self, scheduled, **options)
Conversation.reply, Runner.launch = noted, slow
"""
CYAN, DIM = "\x1b[0;36m", "\x1b[2m"


class Chat(Terminal):
    notes: Path
    slow: Path

    @property
    def messages(self) -> list[str]:
        return [ast.literal_eval(line) for line in self.notes.read_text().splitlines()] if self.notes.exists() else []


@pytest.fixture
def chat(folder: Path, tmp_path: Path) -> Callable[..., Chat]:
    def start(*options: str, columns: int = 160, **environment: str) -> Chat:
        code = PREPARED.format(notes=str(tmp_path / "notes"), slow=str(tmp_path / "slow"))
        surroundings = {"INFER_CACHE": str(tmp_path / "cache"), "INFER_KERNELS": "0"} | environment
        options = ("--temperature", "0", "--max-new-tokens", "6", *options)
        terminal = Chat("chat", "--model", folder, *options, code=code, columns=columns, **surroundings)
        terminal.notes, terminal.slow = tmp_path / "notes", tmp_path / "slow"
        return terminal

    return start


def test_typing(chat: Callable[..., Chat], tmp_path: Path) -> None:
    """Keys, pastes, history, characters of any width; a second run has the history of the first."""
    lines = "\n".join(f"{i} {'word ' * 305}{i}" for i in range(4))
    assert len(lines) > 6000
    with chat() as terminal:
        terminal.prompt()
        terminal.send(paste(lines))
        terminal.until("[pasted 4 lines, 6,115 characters]")
        shown = terminal.say("")
        assert "exceed the context of 256" in shown
        terminal.send(f"helo{LEFT}l{ENTER}")
        terminal.prompt()
        terminal.send(f"one{ALT_ENTER}two{ENTER}")
        terminal.prompt()
        terminal.send(f"{UP}{UP}{UP}!{ENTER}")  # through both lines of the last message
        terminal.prompt()
        terminal.send(f"日本語x🙂{LEFT}{BACKSPACE}{ENTER}")
        terminal.prompt()
        terminal.send(f"gone{CTRL_C}kept{ENTER}")
        terminal.prompt()
        terminal.send(CTRL_C)
        assert "(Ctrl-D leaves)" in terminal.prompt()
        terminal.send(CTRL_D)
        assert terminal.ended() == 0
        assert terminal.messages == [lines, "hello", "one\ntwo", "hello!", "日本語🙂", "kept"]
    history = tmp_path / "cache" / "chat_history"
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    with chat(columns=20, NO_COLOR="1") as terminal:
        terminal.prompt()
        terminal.send(f"{UP}{UP}{ENTER}")
        terminal.prompt()
        assert terminal.messages[-1] == "日本語🙂"
        start = len(terminal.raw)
        terminal.send("日本")
        terminal.until("日本")
        terminal.send(LEFT)  # by two columns, and a line is broken where two no longer fit
        terminal.send("語" * 12)
        terminal.until("語" * 7)
        terminal.send(ENTER)
        terminal.prompt()
        assert "\x1b[2D" in terminal.raw[start:]
        assert terminal.messages[-1] == f"日{'語' * 12}本"
        terminal.send(CTRL_D)
        assert terminal.ended() == 0
        assert not re.search(r"\x1b\[([0-9;]*;)?(3[0-7]|2)m", terminal.raw)  # neither colours nor dim


def test_replies_are_stopped_and_gone_on_with(chat: Callable[..., Chat]) -> None:
    with chat("--max-new-tokens", "60", "--ignore-eos") as terminal:
        terminal.slow.touch()
        terminal.prompt()
        terminal.send(f"hello{ENTER}")
        terminal.until("hello\n")
        terminal.until_more(4)
        terminal.send(CTRL_C)
        stopped = terminal.prompt()
        assert "; interrupted, the turn is kept: /more continues it]" in stopped
        terminal.send(f"/more{ENTER}")
        terminal.until("/more\n")
        terminal.send(paste("typed\nmeanwhile"))  # nobody asks for it yet
        terminal.slow.unlink()
        rest = terminal.prompt()
        assert "cut, at 60 new tokens: /more continues it]" in rest
        assert "typed" not in rest
        terminal.slow.touch()
        terminal.send(ENTER)
        terminal.until("meanwhile\n")
        terminal.until_more(4)
        terminal.send(CTRL_C)
        terminal.prompt()
        assert "2 turns" in terminal.say("/stats")
        assert terminal.messages == ["hello", None, "typed\nmeanwhile"]
        terminal.send(CTRL_D)
        assert terminal.ended() == 0


def test_commands(chat: Callable[..., Chat], tmp_path: Path) -> None:
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" > {tmp_path / "opened"}\n')
    browser.chmod(0o755)
    with chat("--context", "160", BROWSER=f"{browser} %s", TMPDIR=str(tmp_path)) as terminal:
        shown = terminal.prompt()
        assert "[sampling: greedy: temperature 0.0 (--temperature)" in shown
        assert "there is no command /udno: did you mean /undo?" in terminal.say("/udno")
        assert "there is no reply to trace" in terminal.say("/trace")
        assert "there is no turn to forget" in terminal.say("/undo")
        first = terminal.say("hello")
        assert "cut, at 6 new tokens: /more continues it]" in first
        assert DIM + "[6 tokens at " in terminal.raw
        assert CYAN + "hello" in terminal.raw
        assert "[12 tokens" not in terminal.say("/more")
        shown = terminal.say("/trace")
        (page,) = tmp_path.glob("infer-trace-*.html")
        assert f"[{page}, opened in the browser]" in shown
        assert (tmp_path / "opened").read_text().strip() == page.as_uri()
        assert "differs from yours" not in shown
        assert page.stat().st_size > 10_000
        terminal.send(f"/se{TAB}")
        terminal.until("/set")
        assert "temperature 0.8 (/set)" in terminal.say(" temperature 0.8")
        assert "temperature must be 0 or more, not -1" in terminal.say("/set temperature -1")
        assert "did you mean temperature?" in terminal.say("/set tempreature 1")
        assert "temperature 0.8 (/set)" in terminal.say("/stats")
        assert "[system: Be kind]" in terminal.say("/system Be kind")
        assert "[0 turns, cache holds 0]" in terminal.say("/undo")
        for i in range(3):
            shown = terminal.say(f"{i} {'x' * 40}")
            assert ("positions are left; after that, the oldest turns are forgotten" in shown) == (i == 1)
            assert ("[the context is full: the first 1 turn forgotten]" in shown) == (i == 2)
        assert "of 160 positions, 2 turns" in terminal.say("/stats")
        terminal.send(f"/exit{ENTER}")
        assert terminal.ended() == 0
    assert "\x1b[?2004l" in terminal.raw[-40:]  # pastes are again as they were


# Holds the model after three parts of a prompt, until a file is there.
HELD = """
import itertools, os, time
from infer.engine.runner import Runner
run, passes = Runner._run_pass, itertools.count(1)
def held(self, backend, inputs):
    logits = run(self, backend, inputs)
    if next(passes) == 3:
        while not os.path.exists({go!r}):
            time.sleep(0.01)
    return logits
Runner._run_pass = held
"""


def test_prefill_is_interrupted(folder: Path, tmp_path: Path) -> None:
    """The turn is undone, and the chat goes on."""
    go = tmp_path / "go"
    options = ("--temperature", "0", "--max-new-tokens", "6", "--prefill-chunk", "20", "--model", folder)
    surroundings = {"INFER_CACHE": str(tmp_path / "cache"), "INFER_KERNELS": "0"}
    with Terminal("chat", *options, code=HELD.format(go=str(go)), **surroundings) as terminal:
        terminal.prompt()
        terminal.send(f"{'x' * 120}{ENTER}")
        terminal.until(" 60/")
        terminal.send(CTRL_C)
        terminal.until("[interrupted while reading the prompt (60 of ")
        go.touch()
        assert re.fullmatch(r"1\d\d tokens\): the turn is undone\]\n\n> ", terminal.prompt())
        assert "0 turns" in terminal.say("/stats")
        terminal.say("hello")
        assert "1 turn\n" in terminal.say("/stats")
        terminal.send(CTRL_D)
        assert terminal.ended() == 0


def test_a_loaded_conversation_is_shown(chat: Callable[..., Chat], tmp_path: Path) -> None:
    with chat() as terminal:
        terminal.prompt()
        for text in ("first", "second", "third", f"fourth{ALT_ENTER}message"):
            terminal.say(text)
        terminal.say(f"/save {tmp_path / 'saved'}")
        terminal.say("/clear")
        terminal.send(f"/load {tmp_path / 'saved'}{ENTER}")
        terminal.until("4 turns, cache holds ")
        assert re.match(r"\d+\]\n\n> second\n", terminal.until("> third\n"))
        terminal.until("> fourth message\n")
        terminal.prompt()
        terminal.send(CTRL_D)
        assert terminal.ended() == 0


def test_last_turns(capsys: pytest.CaptureFixture[str]) -> None:
    """Long messages are shortened, the last answer less so."""
    contents = [f"{role} {i} \x1b {'words ' * 1000}" for i in range(3) for role in ("user", "assistant")]
    messages = [{"role": content.split()[0], "content": content} for content in contents]
    show_last_turns(SimpleNamespace(turns=0, messages=[{"role": "system", "content": "kind"}]))
    assert capsys.readouterr().err == ""
    show_last_turns(SimpleNamespace(turns=3, messages=[{"role": "system", "content": "kind"}, *messages]))
    shown = capsys.readouterr().err.strip().split("\n")
    assert [line[:14] for line in shown if line][:3] == ["> user 0 \\x1b ", "assistant 0 \\x", "> user 1 \\x1b "]
    assert "\x1b" not in "".join(shown)
    assert all(line.endswith("…") for line in shown if line)
    assert [len(line) < 200 for line in shown if line] == [True] * 5 + [False]
    assert len(shown[-1]) < 900


def test_visible() -> None:
    assert visible("\x1b[0;36ma\x1b[K\r\nb\x1b[?25h") == "a\nb"
