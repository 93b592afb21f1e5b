"""Standard input, output and error: always open, and safe to show on a terminal."""

import os
import shutil
import sys
from contextlib import suppress
from typing import TextIO

MAX_ERROR = 2000  # characters: an error may quote a hostile file
# Control characters (C0 except tab and newline, DEL, C1), and characters that change the direction of text.
_CODES = {*range(0x20), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)} - {0x09, 0x0A}
_ESCAPES = {code: f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" for code in _CODES}


def open_streams() -> None:
    """Open closed streams on the null device. Otherwise, a file opened later would get their file descriptor."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    sys.stdin = sys.stdin or open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115
    # Input that is not UTF-8 is refused later, when it is encoded; output that the locale cannot encode becomes \uXXXX.
    for stream, options in (
        (sys.stdin, {"encoding": "utf-8", "errors": "surrogateescape"}),
        (sys.stdout, {"errors": "backslashreplace"}),
        (sys.stderr, {"errors": "backslashreplace"}),
    ):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(**options)


def close_streams() -> None:
    """Flush the streams. Drop what cannot be written: Python would report it at exit."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def say(message: str = "", *, dim: bool = False) -> None:
    """Print to stderr: stdout has only the answer. On a terminal, words wrap. dim: for statistics after an answer."""
    text = escaped(message)
    if can_erase(sys.stderr) and len(text) > columns(sys.stderr) // 2:  # a wide character fills two columns
        text = wrapped(text, columns(sys.stderr))
    print(f"\033[2m{text}\033[0m" if dim and in_color() else text, file=sys.stderr, flush=True)


def columns(stream: TextIO) -> int:
    """Of its terminal. COLUMNS, which shutil reads first, does not follow a terminal that is resized."""
    with suppress(OSError, ValueError, AttributeError):
        if found := os.get_terminal_size(stream.fileno()).columns:
            return found
    return shutil.get_terminal_size().columns


def wrapped(text: str, columns: int) -> str:
    from rich.console import Console
    from rich.text import Text

    return "\n".join(line.plain.rstrip() for line in Text(text).wrap(Console(width=columns), columns))


def in_color(stream: TextIO | None = None) -> bool:
    """Whether a stream, or else stderr, is a terminal with colors, and NO_COLOR is not set (no-color.org)."""
    return can_erase(stream or sys.stderr) and not os.environ.get("NO_COLOR")


def can_erase(stream: TextIO) -> bool:
    """Whether a stream is a terminal that can erase a line."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def say_error(message: str) -> None:
    """Print an error in one line."""
    message = " ".join(message.split())
    with suppress(OSError, ValueError):  # stderr is closed
        say(f"error: {message if len(message) <= MAX_ERROR else f'{message[:MAX_ERROR]}…'}")


def escaped(text: str) -> str:
    """Control characters become \\x1b and the like."""
    return text.translate(_ESCAPES)


def on_stdout(text: str) -> str:
    """A model's text, escaped for a terminal and unchanged for a file or a pipe."""
    return escaped(text) if sys.stdout.isatty() else text


def counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'s' if count != 1 else ''}"


def print_table(*rows: tuple[str, str]) -> None:
    """Names and values, in two columns."""
    for name, value in rows:
        print(f"{name:<22} {value}")
