"""Parses JSON in a `LimitedProcess`, for the server: a parser in C would block all threads for as long as it takes.

It answers with the value in Python's own format, which is read in a tenth of the time, or with an error. Like
`template_process.py`, it imports nothing of the package when it runs as a script.
"""

from __future__ import annotations

import gc
import json
import marshal
import math
import re
import resource
import signal
import sys
from contextlib import suppress
from typing import Any

SECONDS = 2.0  # of CPU time; 8 MiB take up to 1
MEMORY = 1 << 30  # bytes of address space; 8 MiB of JSON take up to 0.6 GB
NOT_JSON = "the body is not JSON in UTF-8"
MAX_VALUES = 1 << 16  # of a body
TOO_MANY = f"the body has more than {MAX_VALUES:,} values"
TOKENS_PER_VALUE = 4  # that take as much time as another value
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)


def parse_json(data: bytes) -> Any:
    """Raises ValueError or RecursionError for what is not JSON."""
    return json.loads(data, parse_constant=_refuse_constant, parse_float=_finite)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    if math.isinf(value := float(text)):  # no response could repeat it
        raise ValueError(f"{text:.20} is too large")
    return value


def has_too_many_values(value: Any) -> bool:
    count = 0
    unread: list[Any] = [[value]]
    while unread and count <= MAX_VALUES:
        inner = unread.pop()
        inner = list(inner.values()) if isinstance(inner, dict) else inner
        is_prompt = all(type(each) is int for each in inner)
        count += 1 + len(inner) // (TOKENS_PER_VALUE if is_prompt else 1)
        unread += [each for each in inner if isinstance(each, (dict, list))]
    return count > MAX_VALUES


def answer(data: bytes) -> Any:
    """A pair: the value and no error, or None and an error."""
    most = MAX_VALUES * TOKENS_PER_VALUE
    if data.count(b",") > most and _STRING.sub(b"", data).count(b",") > most:
        return None, TOO_MANY
    try:
        value = parse_json(data)
    except (ValueError, RecursionError):
        return None, NOT_JSON
    except MemoryError:
        return None, TOO_MANY
    if has_too_many_values(value):
        return None, TOO_MANY
    return value, None


def main() -> None:
    """Serve requests until standard input closes, when the parent process ends."""
    gc.disable()  # JSON has no cycles, and looking for them takes longer than parsing
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    _, most_memory = resource.getrlimit(resource.RLIMIT_AS)
    with suppress(ValueError, OSError):  # if memory cannot be limited, the time limit bounds it
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, most_memory))
    while length := sys.stdin.buffer.read(8):
        data = sys.stdin.buffer.read(int.from_bytes(length))
        signal.setitimer(signal.ITIMER_PROF, SECONDS)  # SIGPROF ends this process
        reply = marshal.dumps(answer(data))
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(len(reply).to_bytes(8) + reply)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
