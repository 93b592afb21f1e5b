"""Answers on a terminal: words at the margin, and colors."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from terminal import Terminal

from infer.cli.answer import BOLD, CODE, RESET, Answer, Markdown

PIECE = re.compile(r"\x1b\[(\d*)([CKm])|(.)", re.DOTALL)


class Screen:
    """A terminal with a margin, where no character may be written."""

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self.lines = [""]
        self.at = 0  # the column

    def write(self, sent: str) -> None:
        for number, action, char in PIECE.findall(sent):
            line = self.lines[-1]
            if action == "C":
                self.at += int(number)
                assert self.at < self.columns
            elif action == "K":
                while cell_len(line) > self.at:
                    line = line[:-1]
                self.lines[-1] = line
            elif char == "\r":
                self.at = 0
            elif char == "\n":
                self.lines.append("")
                self.at = 0
            elif char:
                char = " " * (8 - self.at % 8) if char == "\t" else char
                assert cell_len(line) == self.at  # nothing is overwritten
                self.lines[-1] = line + char
                self.at = cell_len(line + char)
                assert self.at <= self.columns


@pytest.fixture
def columns(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets the width of the terminal, which has no colors."""
    monkeypatch.setenv("NO_COLOR", "1")

    def set_columns(count: int) -> None:
        monkeypatch.setattr("infer.cli.answer.columns", lambda _: count)

    return set_columns


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("one two three", ["one two ", "three"]),
        ("one two 34 five", ["one two 34", "five"]),  # up to the margin
        ("12345 7890  two", ["12345 7890", "two"]),  # no blank at the beginning of a line
        ("12345 7890\ntwo", ["12345 7890", "two"]),
        ("a\n\n b", ["a", "", " b"]),
        ("abcdefghijklmnop qr", ["abcdefghij", "klmnop qr"]),  # longer than a line
        ("ab cdefghijklmnopqr", ["ab ", "cdefghijkl", "mnopqr"]),
        ("日本語日本語日本語", ["日本語日本", "語日本語"]),
        ("a日本語日本語。", ["a日本語日", "本語。"]),  # a full stop follows its word
        ("日本語日本word", ["日本語日本", "word"]),
        ("日本語 words", ["日本語 ", "words"]),
        ("caffe\u0301 lait\u0301\u0301s", ["caffe\u0301 ", "lait\u0301\u0301s"]),
        ("ten chars\u0301\u0302 e\u0301", ["ten chars\u0301\u0302 ", "e\u0301"]),
        ("12345678 👍🏽👨\u200d👩\u200d👧", ["12345678 ", "👍🏽👨\u200d👩\u200d👧"]),
        ("123456789 ❤\ufe0f", ["123456789 ", "❤\ufe0f"]),  # wide since the last character
        ("one two\N{NO-BREAK SPACE}345 6", ["one ", "two\N{NO-BREAK SPACE}345 6"]),
        ("日\u3000本12345\u3000語", ["日\u3000本", "12345\u3000語"]),
        ("1\t2\t3", ["1       2 ", "3"]),
    ],
)
def test_words_wrap(columns: Callable[[int], None], text: str, lines: list[str]) -> None:
    columns(10)
    for size in (1, 2, 100):
        screen, answer = Screen(10), Answer()
        for start in range(0, len(text), size):
            screen.write(answer.write(text[start : start + size]))
        assert screen.lines == lines
        screen.write(answer.end())
        assert screen.lines == [*lines, ""]


@given(st.text("ab 日。\n\u0301👍`*-", max_size=60), st.integers(2, 12), st.integers(1, 4))
@settings(max_examples=200, deadline=None)
def test_any_text(text: str, columns: int, size: int) -> None:
    """All characters are there but blanks at the margin, and all are seen as soon as they are sent."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("infer.cli.answer.columns", lambda _: columns)
        patch.setattr("infer.cli.answer.in_color", lambda _: True)
        screen, answer = Screen(columns), Answer()
        for start in range(0, len(text), size):
            screen.write(answer.write(text[start : start + size]))
            assert "".join("".join(screen.lines).split()) == "".join(text[: start + size].split())


def test_resized(columns: Callable[[int], None]) -> None:
    columns(20)
    answer = Answer()
    assert answer.write("one two three") == "one two three"
    columns(10)  # the terminal breaks the line after "one two th"
    assert answer.write(" for six") == " for si\r\033[8C\033[K\nsix"
    columns(40)
    assert answer.write(" seven eight nine ten") == " seven eight nine ten"
    columns(13)  # the terminal breaks the line after "six seven eig"
    assert answer.write("s eleven") == "s \neleven"
    answer = Answer()
    assert answer.write("one two thr") == "one two thr"
    columns(11)  # what is there still fits
    assert answer.write("ee") == "\r\033[8C\033[K\nthree"


def test_styles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infer.cli.answer.in_color", lambda stream: stream is sys.stdout)
    monkeypatch.setattr("infer.cli.answer.columns", lambda _: 10)
    answer = Answer()
    assert answer.write("a `b` c") == f"a {RESET}{CODE}`b`{RESET} c"
    answer = Answer()
    # The word is moved with its styles.
    assert answer.write("one **two") == f"one **{RESET}{BOLD}two"
    assert answer.write("xyz**") == (f"x\r\033[4C\033[K\n{RESET}**{RESET}{BOLD}twoxyz**{RESET}")
    answer = Answer()
    assert answer.write("`").startswith(RESET + CODE)
    assert answer.end() == RESET + "\n"
    assert answer.write("") == ""


@pytest.mark.parametrize(
    ("text", "styles"),
    [
        ("a `b` c", "  ccc  "),
        ("a `b\nc", "  cc\n "),  # a style ends with its line
        ("a **b c** d", "    bbbbb  "),
        ("**b:** c**d", "  bbbb     "),
        ("2 ** 3 ** 4", "           "),
        ("2**3**4", "       "),
        ("***b*** c", "   bbb   "),
        ("`**a**` b", "ccccccc  "),
        ("**a `b` c**", "  bbcccbbbb"),
        ("* a\n* b", "   \n   "),
        ("## ab\nc", "  bbb\n "),
        ("#a", "  "),
        ("```py\na `b` **c**\n```\nd", "ccccc\nccccccccccc\nccc\n "),
        ("````\n```\n````\na", "cccc\nccc\ncccc\n "),
        ("  ~~~\na\n  ~~~\nb", "     \nc\nccccc\n "),
        ("```a```\nb", "ccccccc\n "),
    ],
)
def test_markdown(text: str, styles: str) -> None:
    markdown = Markdown()
    names = {"": " ", CODE: "c", BOLD: "b"}
    shown = [(char, names[markdown.styles(char)[0]]) for char in text]
    assert "".join(char if char == "\n" else name for char, name in shown) == styles


TEXT = "one **two** three four \x1b five `six`\n"
PROGRAM = """
from infer.cli.run import show
from infer.engine.result import GeneratedToken
assert len(show((GeneratedToken(0, char, None, 0.1, None) for char in {text!r}), wrap=True)) == {count}
sys.exit()
"""


@pytest.mark.parametrize(
    ("environment", "shown"),
    [
        (
            {},
            f"one **{RESET}{BOLD}two**{RESET} three f\r\033[18C\033[K\nfour \\x1b five "
            f"{RESET}{CODE}`six\r\033[15C\033[K\n{RESET}{RESET}{CODE}`six`{RESET}\n\n",
        ),
        ({"NO_COLOR": "1"}, "one **two** three f\r\033[18C\033[K\nfour \\x1b five `six\r\033[15C\033[K\n`six`\n\n"),
        (
            {"NO_COLOR": "1", "COLUMNS": "30"},
            "one **two** three f\r\033[18C\033[K\nfour \\x1b five `six\r\033[15C\033[K\n`six`\n\n",
        ),
        ({"TERM": "dumb"}, "one **two** three four \\x1b five `six`\n\n"),
    ],
    ids=["colors", "NO_COLOR", "COLUMNS", "dumb"],
)
def test_on_a_terminal(environment: dict[str, str], shown: str) -> None:
    program = PROGRAM.format(text=TEXT, count=len(TEXT))
    with Terminal(code=program, columns=19, **environment) as terminal:
        assert terminal.ended() == 0
        assert terminal.raw.replace("\r\n", "\n") == shown


def test_messages_wrap_at_words() -> None:
    program = "from infer.cli.streams import say\nsay('one two 日本 https://a.example/b')\nsay('short')\nsys.exit()"
    with Terminal(code=program, columns=19) as terminal:
        assert terminal.ended() == 0
        assert terminal.raw.replace("\r\n", "\n") == "one two 日本\nhttps://a.example/b\nshort\n"


def test_a_pipe_gets_the_text_unchanged() -> None:
    program = "import sys\n" + PROGRAM.format(text=TEXT, count=len(TEXT))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, text=True)
    assert done.stdout == TEXT + "\n"
