"""Input of a chat. On a terminal: history, arrow keys, pastes, completion. From a pipe: plain lines."""

import os
import sys
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from infer.cli.streams import counted, in_color, say

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import Completion
    from prompt_toolkit.data_structures import Size

PROMPT = "> "
MAX_HISTORY = 2**20  # bytes kept between runs; beyond that, the older half is dropped
FILE = ("FILE",)  # completes to file names
MAX_PASTE_LINES, MAX_PASTE_LENGTH = 10, 1000  # shown in full; longer pastes are shown as a summary
FIRST_FOLDED = 0x100000  # code points for private use: one for each folded paste
PASTE_ON, PASTE_OFF = "\033[?2004h", "\033[?2004l"  # bracketed paste
KEYS = (
    ("Alt-Enter", "start a new line (or Esc, then Enter); a paste of several lines is one message"),
    ("Ctrl-R", "search the history; Enter takes what is found"),
    ("Ctrl-C", "clear the line, leave a search, or stop a reply and keep its beginning"),
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


class Pastes:
    """Long pastes. In the editor, one character stands for each: it is edited, undone and recalled as one."""

    def __init__(self) -> None:
        self._texts: dict[int, str] = {}

    def fold(self, text: str) -> str:
        """A text, or the character that stands for it if it is long."""
        is_ambiguous = any(ord(char) in self._texts for char in text)
        if text.count("\n") < MAX_PASTE_LINES and len(text) <= MAX_PASTE_LENGTH and not is_ambiguous:
            return text
        code = FIRST_FOLDED + len(self._texts)
        self._texts[code] = text
        return chr(code)

    def unfold(self, text: str) -> str:
        return text.translate(self._texts)

    def shown(self, char: str) -> str:
        """How a character of the editor is shown."""
        text = self._texts.get(ord(char))
        if text is None:
            return char
        lines = text.removesuffix("\n").count("\n") + 1
        return f"[pasted {counted(lines, 'line')}, {counted(len(text), 'character')}]"


class Editor:
    """A line editor on a terminal."""

    def __init__(self, words: Mapping[str, Sequence[str]], history: Path) -> None:
        """words: commands, with the completions of each one's argument."""
        self._pastes = Pastes()
        self._session = _prompt_session(words, history, self._pastes)

    def ask(self) -> str | None:
        say()
        while True:
            try:
                return self._pastes.unfold(self._session.prompt())
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


def _prompt_session(words: Mapping[str, Sequence[str]], history: Path, pastes: Pastes) -> "PromptSession[str]":
    from prompt_toolkit import PromptSession
    from prompt_toolkit.application import run_in_terminal
    from prompt_toolkit.completion import CompleteEvent, get_common_complete_suffix
    from prompt_toolkit.enums import DEFAULT_BUFFER
    from prompt_toolkit.filters import has_focus
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
    from prompt_toolkit.key_binding.bindings.completion import display_completions_like_readline
    from prompt_toolkit.keys import Keys
    from prompt_toolkit.lexers import SimpleLexer
    from prompt_toolkit.output import ColorDepth
    from prompt_toolkit.shortcuts import CompleteStyle
    from prompt_toolkit.styles import Style

    keys = KeyBindings()
    completer = _completer(words)
    in_message = has_focus(DEFAULT_BUFFER)  # while the history is searched, prompt_toolkit's own bindings apply

    @keys.add("enter", filter=in_message)
    def send(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter", filter=in_message)
    def begin_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("c-c", filter=in_message)
    def clear(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt())

    @keys.add("c-d")
    def leave(event: KeyPressEvent) -> None:
        event.app.exit(exception=EOFError())

    @keys.add("tab", filter=in_message)
    def complete(event: KeyPressEvent) -> None:
        document = event.current_buffer.document
        found = list(completer.get_completions(document, CompleteEvent(completion_requested=True)))
        if _fit_on_screen(found, event.app.output.get_size()) or get_common_complete_suffix(document, found):
            display_completions_like_readline(event)
        else:  # prompt_toolkit would ask whether to list them, and fail at Ctrl-C
            run_in_terminal(lambda: say(f"({len(found):,} possibilities: type more of the name)", dim=True))

    @keys.add(Keys.BracketedPaste, filter=in_message)
    def paste(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text(pastes.fold(event.data.replace("\r\n", "\n").replace("\r", "\n")))

    return PromptSession(
        [("class:prompt", PROMPT)],
        multiline=True,
        prompt_continuation=" " * len(PROMPT),
        key_bindings=keys,
        history=_history(history, pastes),
        completer=completer,
        complete_while_typing=False,
        complete_style=CompleteStyle.READLINE_LIKE,
        input_processors=[_summaries(pastes)],
        lexer=SimpleLexer("class:typed"),
        style=Style.from_dict({"typed": "ansicyan", "prompt": "ansicyan bold"}),
        color_depth=None if in_color() else ColorDepth.DEPTH_1_BIT,
        output=_output(sys.stderr),
    )


def _fit_on_screen(completions: "Sequence[Completion]", size: "Size") -> bool:
    """Whether prompt_toolkit lists completions on one page."""
    from rich.cells import cell_len

    width = max((cell_len(each.display_text) + 1 for each in completions), default=1)
    return len(completions) <= max(1, size.columns // width) * (size.rows - 1)


def _summaries(pastes: Pastes) -> Any:
    """Shows the summary of a paste in place of the character that stands for it."""
    from prompt_toolkit.formatted_text.utils import fragment_list_to_text
    from prompt_toolkit.layout.processors import Processor, Transformation, TransformationInput

    class Summaries(Processor):
        def apply_transformation(self, transformation_input: TransformationInput) -> Transformation:
            fragments = transformation_input.fragments
            starts = [0]  # of each character of the line, as it is shown
            for char in fragment_list_to_text(fragments):
                starts.append(starts[-1] + len(pastes.shown(char)))
            return Transformation(
                [(style, "".join(map(pastes.shown, text))) for style, text, *_ in fragments],
                lambda at: starts[min(at, len(starts) - 1)] + max(0, at - len(starts) + 1),
                lambda at: bisect_right(starts, at) - 1,
            )

    return Summaries()


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


def _history(path: Path, pastes: Pastes) -> Any:
    """The history of all runs, in a file that only this user can read; of this run, if there is no such file.

    The file has long pastes in full. A long message of an earlier run is folded, to step over it with one key.
    """
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    class PrivateHistory(FileHistory):
        def load_history_strings(self) -> Iterable[str]:
            return map(pastes.fold, super().load_history_strings())

        def store_string(self, string: str) -> None:
            with suppress(OSError, UnicodeError):  # a full disk, or a lone surrogate
                super().store_string(pastes.unfold(string))

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
