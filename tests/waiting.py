"""Waiting for something to come to pass, in tests."""

from __future__ import annotations

import time
from collections.abc import Callable

WAIT = 300.0  # seconds: longer than anything takes


def until(holds: Callable[[], bool], seconds: float = WAIT) -> None:
    ends = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < ends, "it does not come to pass"
        time.sleep(0.01)
