"""Input of a chat. On a terminal: history, arrow keys, pastes, completion. From a pipe: plain lines."""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from infer.cli.streams import in_color, say

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession

PROMPT = "> "
MAX_HISTORY = 2**20  # bytes kept between runs; beyond that, the older half is dropped
FILE = ("FILE",)  # completes to file names
PASTE_ON, PASTE_OFF = "\033[?2004h", "\033[?2004l"  # bracketed paste
KEYS = (
    ("Alt-Enter", "start a new line (or Esc, then Enter); a paste of several lines is one message"),
    ("Ctrl-C", "clear the line, or stop a reply and keep its beginning"),
    ("Ctrl-D", "leave"),
)


class Lines:
    """One message per line, from a pipe or a file."""

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
        """words: commands, with the completions of each one's argument."""
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
                _write(PASTE_ON)  # for pastes while the model answers, too


@contextmanager
def editor(words: Mapping[str, Sequence[str]], history: Path) -> Iterator[Lines | Editor]:
    """Reads messages. On a terminal, keys typed while the model answers are kept for the next prompt, not echoed."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()) or os.environ.get("TERM") == "dumb":
        yield Lines()
        return
    with _quiet_keys():
        yield Editor(words, history)


@contextmanager
def _quiet_keys() -> Iterator[None]:
    """Turn off echo and line buffering: a terminal buffers at most 4,095 bytes of a line."""
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
        color_depth=None if in_color() else ColorDepth.DEPTH_1_BIT,
        output=_output(sys.stderr),
    )


def _output(stream: TextIO) -> Any:
    """Never queries the cursor position: the terminal may answer when nothing reads it any more."""
    from prompt_toolkit.output import create_output

    if sys.platform == "win32":
        return create_output(stream)
    from prompt_toolkit.output.vt100 import Vt100_Output

    output = Vt100_Output.from_pty(stream, term=os.environ.get("TERM"))
    output.enable_cpr = False
    return output


def _completer(words: Mapping[str, Sequence[str]]) -> Any:
    """Completes commands and their arguments."""
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
    """The history of all runs, in a file that only this user can read; of this run, if there is no such file."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    class PrivateHistory(FileHistory):
        def store_string(self, string: str) -> None:
            with suppress(OSError, UnicodeError):  # a full disk, or a lone surrogate
                super().store_string(string)

    try:
        path.parent.mkdir(0o700, parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o600)
        with open(file, "r+b") as kept:
            os.chmod(path, 0o600)
            if os.fstat(file).st_size > MAX_HISTORY:
                kept.seek(-MAX_HISTORY // 2, os.SEEK_END)
                _, _, rest = kept.read().partition(b"\n\n")  # an empty line separates two messages
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
