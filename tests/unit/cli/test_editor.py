"""The line editor on a pseudo-terminal: every key in every mode."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

import pytest
from terminal import (
    ALT_ENTER,
    BACKSPACE,
    CTRL_C,
    CTRL_D,
    CTRL_G,
    CTRL_R,
    ENTER,
    ESCAPE,
    LEFT,
    RIGHT,
    TAB,
    UNDO,
    UP,
    Terminal,
    paste,
)

# An editor without a model.
PROGRAM = """
from pathlib import Path
from infer.cli.editor import FILE, editor
words = {{"/load": FILE, "/set": ("temperature", "top_k", "top_p")}}
with editor(words, Path({history!r})) as lines:
    while (text := lines.ask()) is not None:
        print("got", ascii(text))
print("left")
sys.exit(0)
"""
LONG = "\n".join(f"line {i}" for i in range(120)) + "\n"
SUMMARY = f"[pasted 120 lines, {len(LONG)} characters]"


class Editor(Terminal):
    def type(self, *keys: str) -> None:
        """Wait for what stands before each of them, in turns: keys, what is seen, keys, ..."""
        for i, text in enumerate(keys):
            if i % 2:
                self.until(text)
            else:
                self.send(text)

    def sent(self, *keys: str) -> str:
        """The message that Enter sends after these keys; the next prompt waits for keys."""
        self.type(*keys)
        self.send(ENTER)
        self.until("got ")
        shown = self.prompt()
        return str(ast.literal_eval(shown.split("\n")[0]))

    def leaves(self) -> bool:
        self.send(CTRL_D)
        self.until("left")
        return self.ended() == 0


@pytest.fixture
def edit(tmp_path: Path) -> Callable[..., Editor]:
    def start(columns: int = 100) -> Editor:
        editor = Editor(code=PROGRAM.format(history=str(tmp_path / "history")), columns=columns)
        editor.prompt()
        return editor

    return start


SEARCH = "I-search backward:"


def test_search(edit: Callable[..., Editor]) -> None:
    with edit() as editor:
        assert editor.sent("first message") == "first message"
        assert editor.sent("second") == "second"
        # Enter takes what is found into the message, which is sent by another one.
        assert editor.sent(CTRL_R, SEARCH, "first", "first message", f"{ENTER}!") == "!first message"
        # Ctrl-C and Ctrl-G leave the search, and the message is as before.
        assert editor.sent("typed", "typed", CTRL_R, SEARCH, f"sec{CTRL_C} on") == "typed on"
        assert editor.sent(CTRL_R, SEARCH, f"{CTRL_C}alive") == "alive"
        assert editor.sent("more", "more", CTRL_R, SEARCH, f"sec{CTRL_G} on") == "more on"
        # What is not found leaves the message as it is.
        assert editor.sent(CTRL_R, SEARCH, f"absent{ENTER}here") == "here"
        # Ctrl-C after a search clears the message, and then says how to leave.
        editor.type(CTRL_R, SEARCH, f"sec{ENTER}{CTRL_C}{CTRL_C}", "(Ctrl-D leaves)")
        editor.prompt()
        assert editor.sent(CTRL_R, SEARCH, f"sec{ESCAPE}x") == "xsecond"  # Esc takes it, too
        editor.type(CTRL_R, SEARCH, f"first{ALT_ENTER}", "got '!first message'")  # and Esc, then Enter, sends it
        editor.prompt()
        editor.type(CTRL_R, SEARCH, "first", "first message")
        assert editor.leaves()


def test_several_lines(edit: Callable[..., Editor]) -> None:
    with edit() as editor:
        assert editor.sent(f"one{ALT_ENTER}two") == "one\ntwo"
        assert editor.sent(f"one{ALT_ENTER}two{UP}x") == "onex\ntwo"
        assert editor.sent(f"one{ALT_ENTER}two{CTRL_C}three") == "three"
        assert editor.sent(paste("one\ntwo")) == "one\ntwo"
        assert editor.sent(f"one{ALT_ENTER}", "one", CTRL_R, SEARCH, f"three{CTRL_C}two") == "one\ntwo"
        editor.type(f"one{ALT_ENTER}two", "two")
        assert editor.leaves()


def test_completion(edit: Callable[..., Editor], tmp_path: Path) -> None:
    few, many = tmp_path / "few", tmp_path / "many"
    for folder, count in ((few, 5), (many, 1000)):
        folder.mkdir()
        for i in range(count):
            (folder / f"file{i}").touch()
    with edit() as editor:
        assert editor.sent(f"/se{TAB} te{TAB} 1") == "/set temperature 1"
        # Completions are listed above the message: keys are read once that is shown again.
        assert editor.sent(f"/set t{TAB}", "temperature top_k", "", "> /set t", "op_p") == "/set top_p"
        assert editor.sent(f"/set to{TAB}{TAB}", "top_k top_p", "", "> /set top_", f"{CTRL_C}kept") == "kept"
        assert editor.sent(f"/load {few}/{TAB}{TAB}", "file4", "", "> /load", "3") == f"/load {few}/file3"
        listed = (f"/load {many}/{TAB}{TAB}", "(1,000 possibilities: ", "", "> /load")
        assert editor.sent(*listed, f"{CTRL_C}kept") == "kept"
        editor.type(*listed)
        assert editor.leaves()


def test_pastes(edit: Callable[..., Editor], tmp_path: Path) -> None:
    """A long paste is shown as its summary, and is edited, undone and recalled as one character."""
    with edit() as editor:
        assert editor.sent("see ", "see ", paste(LONG), SUMMARY, " there") == f"see {LONG} there"
        assert editor.sent(f"{UP}{BACKSPACE}{BACKSPACE}", SUMMARY) == f"see {LONG} the"
        assert editor.sent(f"a{paste(LONG)}b{LEFT}{LEFT}x{RIGHT}y") == f"ax{LONG}yb"
        assert editor.sent(f"a{paste(LONG)}{BACKSPACE}b") == "ab"
        assert editor.sent(f"a{paste(LONG)}{BACKSPACE}{UNDO}b") == f"a{LONG}b"
        assert editor.sent(paste("x" * 1001), "[pasted 1 line, 1,001 characters]") == "x" * 1001
        assert editor.sent(paste("x" * 1000), "x" * 90) == "x" * 1000
        assert editor.sent(paste("\U00100000"), "[pasted 1 line, 1 character]") == "\U00100000"
        assert editor.sent(f"{paste(LONG)}{CTRL_C}{paste('other')}") == "other"
        editor.type(f"{paste(LONG)}", SUMMARY)
        assert editor.leaves()
    assert "+line 119" in (tmp_path / "history").read_text()  # the text, not what stands for it
    with edit(columns=20) as editor:
        assert editor.sent(UP * 5, "[pasted 121 lines,") == f"a{LONG}b"
        assert editor.leaves()
