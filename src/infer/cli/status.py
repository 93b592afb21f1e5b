"""The status line on a terminal: `prefill 1,024/4,623`. Any other output erases it.

A thread draws it on stderr when work takes longer than DELAY_S; an import, which always does, is drawn at once. stdout
and stderr are wrapped to erase it before they write. (rich's Live would instead buffer streamed text and break long
lines of JSON.)
"""

import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any, TextIO

from infer import progress
from infer.cli.streams import can_erase, columns, escaped
from infer.progress import Progress

DELAY_S, FRAME_S = 0.3, 0.1
BAR = 24  # columns
ERASE = "\r\033[K"


class Status:
    """Draws the latest unfinished stage that `progress` reports, from any thread."""

    def __init__(self) -> None:
        self.kinds: Counter[str] = Counter()  # to draw; others are ignored
        self._lock = threading.RLock()
        self._stages: dict[tuple[str, str], tuple[float, Progress]] = {}  # start time and progress
        self._thread: threading.Thread | None = None
        self._is_drawn = False
        self.is_line_open = False  # text without its line break yet: the status line would overwrite it

    def __call__(self, report: Progress) -> None:
        if not self.kinds[report.what]:
            return
        key = report.what, report.name
        with self._lock:
            began, _ = self._stages.pop(key, (time.monotonic(), report))
            if report.done < report.total:
                self._stages[key] = began, report
                if report.what == progress.IMPORTING:  # at once: an import may not let the thread run
                    self._draw(report, 0.0)
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="status", daemon=True)
                    self._thread.start()

    def forget(self) -> None:
        """Drop the stages that are not drawn any more."""
        with self._lock:
            self._stages = {key: stage for key, stage in self._stages.items() if self.kinds[key[0]]}
            if not self._stages:
                self.erase()

    def erase(self) -> None:
        with self._lock:
            if self._is_drawn:
                self._is_drawn = False
                _write(ERASE)

    def print(self, stream: TextIO, text: str) -> int:
        """Write other output. `print` writes a text and its line break one after the other."""
        with self._lock:
            self.erase()
            if text:
                self.is_line_open = not text.endswith("\n")
            return stream.write(text)

    def _run(self) -> None:
        """Draw until all stages are finished."""
        while True:
            with self._lock:
                if not self._stages:
                    self.erase()
                    self._thread = None
                    return
                began, report = list(self._stages.values())[-1]
                seconds = time.monotonic() - began
                if seconds >= DELAY_S or self._is_drawn:
                    self._draw(report, seconds)
            time.sleep(FRAME_S)

    def _draw(self, report: Progress, seconds: float) -> None:
        if self.is_line_open:
            return
        self._is_drawn = True
        _write(f"\r{line(report, seconds)[: columns(sys.stderr) - 1]}\033[K")


STATUS = Status()


class _Erasing:
    """A terminal that erases the status line before it writes."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        return STATUS.print(self.stream, text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def _erasing(stream: TextIO) -> Any:
    return _Erasing(stream) if stream.isatty() and not isinstance(stream, _Erasing) else stream


@contextmanager
def shown(*kinds: str) -> Iterator[None]:
    """Draw progress of these kinds inside the block, if stderr is a terminal that can erase a line."""
    if not can_erase(sys.stderr):
        yield
        return
    STATUS.kinds.update(kinds)
    STATUS.is_line_open = False
    with redirect_stdout(_erasing(sys.stdout)), redirect_stderr(_erasing(sys.stderr)):
        try:
            with progress.listen(STATUS):
                yield
        finally:
            STATUS.kinds.subtract(kinds)
            STATUS.forget()


class _ImportReporter(MetaPathFinder):
    """Reports the import of one package from its beginning to its end."""

    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name) if name == self.package else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            progress.report(progress.IMPORTING, 0, 1, name)
            try:
                execute(module)
            finally:
                progress.report(progress.IMPORTING, 1, 1, name)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


@contextmanager
def reporting_import(package: str) -> Iterator[None]:
    """Report the import of this package, if it comes inside the block and something listens."""
    reporter = _ImportReporter(package)
    if progress.has_listeners():
        sys.meta_path.insert(0, reporter)
    try:
        yield
    finally:
        with suppress(ValueError):
            sys.meta_path.remove(reporter)


def line(report: Progress, seconds: float) -> str:
    name = f" {escaped(report.name)}" if report.name else ""
    if report.what == progress.IMPORTING:
        return f"loading{name}... {f'({seconds:.0f} s)' if seconds >= 1 else ''}"
    if report.what == progress.COMPILING:
        return f"compiling a kernel, once:{name} ({seconds:.0f} s)"
    bar = _bar(report.done / report.total)
    if report.what not in (progress.FETCHING, progress.LOADING):
        return f"{report.what}{name} {bar} {report.done:,}/{report.total:,}{report.note and f', {report.note}'}"
    size, unit = (1e9, "GB") if report.total >= 1e9 else (1e6, "MB")
    digits = 2 if unit == "GB" else 0
    return f"{report.what}{name} {bar} {report.done / size:.{digits}f}/{report.total / size:.{digits}f} {unit}"


def _bar(share: float) -> str:
    full, empty = ("█", "░") if (sys.stderr.encoding or "").lower().startswith("utf") else ("#", "-")
    filled = int(BAR * min(1.0, share))
    return full * filled + empty * (BAR - filled)


def _write(text: str) -> None:
    """Write to the terminal, which may be closed."""
    stream = getattr(sys.stderr, "stream", sys.stderr)  # without erasing the line
    with suppress(OSError, ValueError):
        stream.write(text)
        stream.flush()
