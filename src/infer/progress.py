"""Progress of slow work, reported to listeners: the command line shows it on a terminal.

IMPORTING counts packages, FETCHING and LOADING a model bytes, COMPILING kernels, PREFILL prompt tokens, GENERATING new
tokens, PROMPTS the prompts of a file, SCORING the tokens of a text, PATHS the checks of `infer verify`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

IMPORTING, FETCHING, LOADING, COMPILING, PREFILL = "importing", "fetching", "loading", "compiling", "prefill"
GENERATING, PROMPTS, SCORING, PATHS = "generating", "prompts", "scoring", "paths"


class Progress(NamedTuple):
    what: str  # one of the above
    done: int
    total: int  # finished when done reaches it
    name: str = ""  # of the model or the kernel
    note: str = ""  # e.g. the speed


Listener = Callable[[Progress], None]
_listeners: list[Listener] = []
_under_way = Progress("", 0, 0), 0  # the last report, and how much work has started since


@contextmanager
def listen(listener: Listener) -> Iterator[None]:
    """Call a function for every report inside the block, in the thread that reports."""
    _listeners.append(listener)
    try:
        yield
    finally:
        with suppress(ValueError):
            _listeners.remove(listener)


def has_listeners() -> bool:
    return bool(_listeners)


def report(what: str, done: int, total: int, name: str = "", *, note: str = "", under_way: int = 0) -> None:
    """under_way: the amount of work until the next call, of which `report_part` reports parts."""
    global _under_way
    if _listeners:
        progress = Progress(what, done, total, name, note)
        _under_way = progress, under_way
        for listener in list(_listeners):
            listener(progress)


def report_part(done: int, parts: int) -> None:
    """Report parts of the work under way, e.g. layers of a long pass."""
    if _listeners and _under_way[1]:
        progress, count = _under_way
        for listener in list(_listeners):
            listener(progress._replace(done=progress.done + count * done // parts))


@contextmanager
def compiling(name: str) -> Iterator[None]:
    report(COMPILING, 0, 1, name)
    try:
        yield
    finally:
        report(COMPILING, 1, 1, name)
