"""How far something slow has come, told to whoever listens: the command line does, on a terminal.

What is told: FETCHING a model and LOADING it in bytes, COMPILING kernels, PREFILL in tokens of the prompt, GENERATING
in new tokens, PROMPTS of a file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

FETCHING, LOADING, COMPILING, PREFILL = "fetching", "loading", "compiling", "prefill"
GENERATING, PROMPTS = "generating", "prompts"


class Progress(NamedTuple):
    what: str  # one of the above
    done: int
    total: int  # over once done has come to it
    name: str = ""  # of what is fetched or compiled
    note: str = ""  # how fast it goes


Listener = Callable[[Progress], None]
_listeners: list[Listener] = []
_under_way = Progress("", 0, 0), 0  # the last that was told, and how much of it is being done now


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Let a function hear of all that is told meanwhile, from whatever thread tells it."""
    _listeners.append(listener)
    try:
        yield
    finally:
        with suppress(ValueError):
            _listeners.remove(listener)


def is_heard() -> bool:
    return bool(_listeners)


def tell(what: str, done: int, total: int, name: str = "", *, note: str = "", under_way: int = 0) -> None:
    """under_way: how much is being done until the next call, for `tell_part`."""
    global _under_way
    if _listeners:
        progress = Progress(what, done, total, name, note)
        _under_way = progress, under_way
        for listener in list(_listeners):
            listener(progress)


def tell_part(done: int, parts: int) -> None:
    """So many parts of what is under way are done: layers of a long pass."""
    if _listeners and _under_way[1]:
        progress, count = _under_way
        for listener in list(_listeners):
            listener(progress._replace(done=progress.done + count * done // parts))


@contextmanager
def compiling(name: str) -> Iterator[None]:
    tell(COMPILING, 0, 1, name)
    try:
        yield
    finally:
        tell(COMPILING, 1, 1, name)
