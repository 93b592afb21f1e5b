"""The line on a terminal that says what one waits for: `prefill 1,024/4,623`. Anything else that is printed erases it.

It is drawn on stderr by a thread, for what takes longer than DELAY_S. While it is there, stdout and stderr are wrapped,
so that no text can end up behind it.
"""

import os
import shutil
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from infer import progress
from infer.cli.streams import escaped
from infer.progress import Progress

DELAY_S, FRAME_S = 0.3, 0.1
BAR = 24  # columns
ERASE = "\r\033[K"


class Status:
    """Hears of progress and draws it, the latest stage that is not over. From any thread."""

    def __init__(self) -> None:
        self.kinds: Counter[str] = Counter()  # what is drawn; the rest is passed over
        self._lock = threading.RLock()
        self._stages: dict[tuple[str, str], tuple[float, Progress]] = {}  # when each began, and how far it is
        self._busy = threading.Event()
        self._thread: threading.Thread | None = None
        self._replaced: list[tuple[str, TextIO]] = []  # streams that are wrapped while the line is there
        # What wraps each. `print` holds no reference to sys.stdout: one that it writes to must not be freed meanwhile.
        self._wrapped: dict[TextIO, _Erasing] = {}

    def __call__(self, told: Progress) -> None:
        if not self.kinds[told.what]:
            return
        key = told.what, told.name
        with self._lock:
            began, _ = self._stages.pop(key, (time.monotonic(), told))
            if told.done < told.total:
                self._stages[key] = began, told
                self._busy.set()
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="status", daemon=True)
                    self._thread.start()

    def forget(self) -> None:
        """Draw no more of what is not to be drawn any longer."""
        with self._lock:
            self._stages = {key: stage for key, stage in self._stages.items() if self.kinds[key[0]]}
            if not self._stages:
                self.erase()

    def erase(self) -> None:
        with self._lock:
            if self._replaced:
                for name, stream in self._replaced:
                    setattr(sys, name, stream)
                self._replaced = []
                _write(ERASE)

    def _run(self) -> None:
        while self._busy.wait():
            with self._lock:
                if not self._stages:
                    self.erase()
                    self._busy.clear()
                else:
                    began, told = list(self._stages.values())[-1]
                    seconds = time.monotonic() - began
                    if seconds >= DELAY_S or self._replaced:
                        self._draw(line(told, seconds))
            time.sleep(FRAME_S)

    def _draw(self, text: str) -> None:
        if not self._replaced:
            for name in ("stdout", "stderr"):
                stream = getattr(sys, name)
                if stream.isatty():
                    self._replaced.append((name, stream))
                    setattr(sys, name, self._wrapped.setdefault(stream, _Erasing(stream, self)))
        _write(f"\r{text[: shutil.get_terminal_size().columns - 1]}\033[K")


class _Erasing:
    """A stream that erases the line before it writes."""

    def __init__(self, stream: TextIO, status: Status) -> None:
        self._stream, self._status = stream, status

    def write(self, text: str) -> int:
        self._status.erase()
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


STATUS = Status()


@contextmanager
def shown(*kinds: str) -> Iterator[None]:
    """Draw such progress meanwhile, where stderr is a terminal that can erase a line."""
    if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield
        return
    STATUS.kinds.update(kinds)
    try:
        with progress.listening(STATUS):
            yield
    finally:
        STATUS.kinds.subtract(kinds)
        STATUS.forget()


def line(told: Progress, seconds: float) -> str:
    name = f" {escaped(told.name)}" if told.name else ""
    if told.what == progress.COMPILING:
        return f"compiling a kernel, once:{name} ({seconds:.0f} s)"
    bar = _bar(told.done / told.total)
    if told.what in (progress.PREFILL, progress.GENERATING, progress.PROMPTS):
        return f"{told.what}{name} {bar} {told.done:,}/{told.total:,}{told.note and f', {told.note}'}"
    size, unit = (1e9, "GB") if told.total >= 1e9 else (1e6, "MB")
    digits = 2 if unit == "GB" else 0
    return f"{told.what}{name} {bar} {told.done / size:.{digits}f}/{told.total / size:.{digits}f} {unit}"


def _bar(share: float) -> str:
    full, empty = ("█", "░") if (sys.stderr.encoding or "").lower().startswith("utf") else ("#", "-")
    filled = int(BAR * min(1.0, share))
    return full * filled + empty * (BAR - filled)


def _write(text: str) -> None:
    """To the terminal itself, which may be gone."""
    try:
        stream = sys.stderr._stream if isinstance(sys.stderr, _Erasing) else sys.stderr
        stream.write(text)
        stream.flush()
    except (OSError, ValueError):
        pass
