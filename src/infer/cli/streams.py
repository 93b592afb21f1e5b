"""Standard input, output and error: open, whatever the caller has closed, and safe to show on a terminal."""

import os
import sys
from contextlib import suppress

LONGEST = 2000  # characters of an error: what a hostile file says may be of any length
# What a terminal would obey (C0 but tab and newline, DEL, C1), and what turns the direction of text.
_CODES = {*range(0x20), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)} - {0x09, 0x0A}
_ESCAPES = {code: f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" for code in _CODES}


def open_streams() -> None:
    """Where one is closed, read nothing and write nowhere. A file opened later would get its number otherwise."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    sys.stdin = sys.stdin or open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115
    # What is no UTF-8 is refused by whoever encodes it, in one line; what a locale cannot show is shown as \uXXXX.
    for stream, options in (
        (sys.stdin, {"encoding": "utf-8", "errors": "surrogateescape"}),
        (sys.stdout, {"errors": "backslashreplace"}),
        (sys.stderr, {"errors": "backslashreplace"}),
    ):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(**options)


def close_streams() -> None:
    """Write what is left; what cannot be written is dropped, which Python would complain about when it ends."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def say(message: str = "", *, dim: bool = False) -> None:
    """Everything but the answer itself goes to stderr. dim: figures, that stand behind what they are about."""
    text = escaped(message)
    print(f"\033[2m{text}\033[0m" if dim and in_colour() else text, file=sys.stderr, flush=True)


def in_colour() -> bool:
    """Whether stderr is a terminal that shows colours, whose user wants them (no-color.org)."""
    return sys.stderr.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def say_error(message: str) -> None:
    """In one line."""
    message = " ".join(message.split())
    with suppress(OSError, ValueError):  # nobody listens any more
        say(f"error: {message if len(message) <= LONGEST else f'{message[:LONGEST]}…'}")


def escaped(text: str) -> str:
    """Without anything that a terminal would obey."""
    return text.translate(_ESCAPES)


def on_stdout(text: str) -> str:
    """A model's text, as it may be printed: a terminal obeys none of it, a file or a pipe gets it as it is."""
    return escaped(text) if sys.stdout.isatty() else text


def counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'s' if count != 1 else ''}"
