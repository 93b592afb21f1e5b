"""What the user types in a chat. On a terminal: history, arrow keys, pastes, completion. From a pipe: plain lines."""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from infer.cli.streams import in_colour, say

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession

PROMPT = "> "
HISTORY_BYTES = 2**20  # that are kept between runs; the oldest half is forgotten beyond
FILE = ("FILE",)  # what completes to the names of files
PASTE_ON, PASTE_OFF = "\033[?2004h", "\033[?2004l"  # whether a terminal says where a paste begins and ends
KEYS = (
    ("Alt-Enter", "begin another line (or Esc, then Enter); a paste is one message, however many lines it has"),
    ("Ctrl-C", "clear the line, or stop a reply; what was said until then is kept"),
    ("Ctrl-D", "leave"),
)


class Lines:
    """One message a line, from a pipe or a file."""

    def ask(self) -> str | None:
        """The user's next message; None at the end."""
        try:
            print(PROMPT, end="", file=sys.stderr, flush=True)
            line = sys.stdin.readline()
        except KeyboardInterrupt:
            line = ""
        if not line:
            say()
            return None
        return line.rstrip("\r\n")


class Editor:
    """A line editor on a terminal."""

    def __init__(self, words: Mapping[str, Sequence[str]], history: Path) -> None:
        """words: commands, and what may stand behind each."""
        self._session = _prompt_session(words, history)

    def ask(self) -> str | None:
        say()
        while True:
            try:
                return self._session.prompt()
            except KeyboardInterrupt:
                say("(Ctrl-D leaves)", dim=True)
            except EOFError:
                return None
            finally:
                _write(PASTE_ON)  # also of a paste while the model answers


@contextmanager
def editor(words: Mapping[str, Sequence[str]], history: Path) -> Iterator[Lines | Editor]:
    """What to ask. On a terminal, keys typed while nobody asks are kept for the next time, and not shown."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()) or os.environ.get("TERM") == "dumb":
        yield Lines()
        return
    with _quiet_keys():
        yield Editor(words, history)


@contextmanager
def _quiet_keys() -> Iterator[None]:
    """Neither echo keys nor gather them into lines: of a line, a terminal keeps no more than 4,095 bytes."""
    try:
        import termios
    except ImportError:  # Windows
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    quiet: list[Any] = termios.tcgetattr(sys.stdin)
    quiet[3] &= ~(termios.ECHO | termios.ICANON)
    termios.tcsetattr(sys.stdin, termios.TCSADRAIN, quiet)
    try:
        yield
    finally:
        _write(PASTE_OFF)
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _prompt_session(words: Mapping[str, Sequence[str]], history: Path) -> "PromptSession[str]":
    from prompt_toolkit import PromptSession
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
    from prompt_toolkit.lexers import SimpleLexer
    from prompt_toolkit.output import ColorDepth
    from prompt_toolkit.shortcuts import CompleteStyle
    from prompt_toolkit.styles import Style

    keys = KeyBindings()

    @keys.add("enter")
    def send(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def begin_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("c-c")
    def clear(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt())

    return PromptSession(
        [("class:prompt", PROMPT)],
        multiline=True,
        prompt_continuation=" " * len(PROMPT),
        key_bindings=keys,
        history=_history(history),
        completer=_completer(words),
        complete_while_typing=False,
        complete_style=CompleteStyle.READLINE_LIKE,
        lexer=SimpleLexer("class:typed"),
        style=Style.from_dict({"typed": "ansicyan", "prompt": "ansicyan bold"}),
        color_depth=None if in_colour() else ColorDepth.DEPTH_1_BIT,
        output=_output(sys.stderr),
    )


def _output(stream: TextIO) -> Any:
    """A terminal is not asked where its cursor is: its answer may come when nobody reads it any more."""
    from prompt_toolkit.output import create_output

    if sys.platform == "win32":
        return create_output(stream)
    from prompt_toolkit.output.vt100 import Vt100_Output

    output = Vt100_Output.from_pty(stream, term=os.environ.get("TERM"))
    output.enable_cpr = False
    return output


def _completer(words: Mapping[str, Sequence[str]]) -> Any:
    """Of commands, and of what may stand behind one."""
    from prompt_toolkit.completion import Completer, Completion, PathCompleter
    from prompt_toolkit.document import Document

    class CommandCompleter(Completer):
        def get_completions(self, document: Document, complete_event: Any) -> Iterator[Completion]:
            name, space, rest = document.text_before_cursor.partition(" ")
            if not name.startswith("/"):
                return
            if space and words.get(name) == FILE:
                yield from PathCompleter(expanduser=True).get_completions(Document(rest), complete_event)
                return
            typed, known = (rest, words.get(name, ())) if space else (name, tuple(words))
            for word in known:
                if word.startswith(typed):
                    yield Completion(word, -len(typed))

    return CommandCompleter()


def _history(path: Path) -> Any:
    """What was typed in earlier runs, in a file for this user alone; where that cannot be, of this run."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    class PrivateHistory(FileHistory):
        def store_string(self, string: str) -> None:
            with suppress(OSError, UnicodeError):  # a full disk, or half a character
                super().store_string(string)

    try:
        path.parent.mkdir(0o700, parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o600)
        with open(file, "r+b") as kept:
            os.chmod(path, 0o600)
            if os.fstat(file).st_size > HISTORY_BYTES:
                kept.seek(-HISTORY_BYTES // 2, os.SEEK_END)
                _, _, rest = kept.read().partition(b"\n\n")  # an empty line is between two messages
                kept.seek(0)
                kept.truncate()
                kept.write(b"\n" + rest)
    except OSError:
        return InMemoryHistory()
    return PrivateHistory(str(path))


def _write(text: str) -> None:
    with suppress(OSError, ValueError):
        sys.stderr.write(text)
        sys.stderr.flush()
