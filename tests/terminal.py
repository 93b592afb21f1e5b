"""A command on a pseudo-terminal: keys in, and what a user would see."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from types import TracebackType
from typing import Self

ENTER, ALT_ENTER, CTRL_C, CTRL_D, TAB = "\r", "\x1b\r", "\x03", "\x04", "\t"
CTRL_G, CTRL_R, ESCAPE, UNDO = "\x07", "\x12", "\x1b", "\x1f"
UP, DOWN, LEFT, RIGHT, BACKSPACE = "\x1b[A", "\x1b[B", "\x1b[D", "\x1b[C", "\x7f"
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b[=>]|\x1b\][^\x07]*\x07")
PATIENCE_S = 300.0
# For the process of a command: `next_frame()` returns once the status line shows what is reported now, if anything is.
FRAMES = """
import threading
from infer.cli import status
status.DELAY_S, status.FRAME_S = 0.02, 0.01
drawn, write = threading.Semaphore(0), status._write
def counted(text):
    write(text)
    if text != status.ERASE:
        drawn.release()
status._write = counted
def next_frame():
    while drawn.acquire(blocking=False):
        pass
    for _ in range(2):  # the first may have been composed before
        while status.STATUS._stages and not status.STATUS.is_line_open and not drawn.acquire(timeout=0.01):
            pass
"""


def paste(text: str) -> str:
    """As a terminal sends it that says where a paste begins and ends; its line ends are those of Enter."""
    return f"\x1b[200~{text.replace(chr(10), chr(13))}\x1b[201~"


UNSET = ("NO_COLOR", "DISPLAY", "COLUMNS", "LINES")  # pytest-xdist sets the last two


class Terminal:
    """Runs `infer` with all three streams on a pseudo-terminal."""

    def __init__(self, *args: str | Path, columns: int = 100, code: str = "", **environment: str) -> None:
        """code: runs before the command does, in its process."""
        self.end, other = pty.openpty()
        fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        program = f"import sys\n{code}\nfrom infer.cli import main\nmain({[str(arg) for arg in args]!r})"
        surroundings = {name: value for name, value in os.environ.items() if name not in UNSET}
        surroundings |= {"TERM": "xterm-256color", "OMP_NUM_THREADS": "1", "BROWSER": ""} | environment
        self.process = subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=other,
            stdout=other,
            stderr=other,
            env=surroundings,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(other)
        self.raw = ""
        self._bytes = b""
        self._read = 0  # of `raw`, what `until` has gone through

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        os.close(self.end)

    def send(self, keys: str) -> None:
        data = keys.encode()
        while data:  # a terminal takes some thousand bytes at a time
            self._pump(0.0)
            _, writable, _ = select.select([], [self.end], [], 1.0)
            if writable:
                data = data[os.write(self.end, data[:512]) :]

    def until(self, text: str) -> str:
        """What is shown up to this text, from where the last call ended."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            seen = visible(self.raw[self._read :])
            if text in seen:
                raw = self.raw[self._read :]
                at = next(i for i in range(len(raw) + 1) if text in visible(raw[:i]))
                self._read += at
                return visible(raw[:at])
            assert time.monotonic() < deadline, f"no {text!r} in {seen!r}"
            assert self._pump(0.05) or self.process.poll() is None, f"it ended without {text!r}: {seen!r}"

    def until_more(self, count: int) -> None:
        """So many characters are shown after those that `until` has gone through."""
        deadline = time.monotonic() + PATIENCE_S
        while len(visible(self.raw[self._read :])) < count:
            assert time.monotonic() < deadline, f"no more than {self.raw[self._read :]!r}"
            self._pump(0.05)

    def prompt(self) -> str:
        """What is shown up to the next prompt, which waits for keys."""
        return self.until("\n> ")

    def say(self, text: str) -> str:
        """Send a message, and return all that is shown until it is answered."""
        self.send(text + ENTER)
        return self.prompt()

    def ended(self) -> int:
        """The exit status, once all has been read."""
        deadline = time.monotonic() + PATIENCE_S
        while self._pump(0.05) or self.process.poll() is None:
            assert time.monotonic() < deadline, f"it does not end: {visible(self.raw)!r}"
        return self.process.wait()

    def _pump(self, seconds: float) -> bool:
        """Read what is there; whether there was something."""
        readable, _, _ = select.select([self.end], [], [], seconds)
        if not readable:
            return False
        try:
            data = os.read(self.end, 65536)
        except OSError:  # the other end is closed
            return False
        self._bytes += data
        self.raw = self._bytes.decode(errors="replace")
        return bool(data)


def visible(raw: str) -> str:
    """Without what moves the cursor or chooses colours."""
    return ESCAPES.sub("", raw).replace("\r\n", "\n").replace("\r", "")
