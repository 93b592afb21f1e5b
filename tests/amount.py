"""How much is tested: `make test` covers each choice once, `make test-all` (INFER_TEST_ALL=1) all of them together."""

from __future__ import annotations

import os
from typing import TypeVar

T = TypeVar("T")
ALL = os.environ.get("INFER_TEST_ALL") == "1"


def amount(everything: T, enough: T) -> T:
    return everything if ALL else enough
