"""The CPU backend: kernels that numba compiles."""

from __future__ import annotations

import os
import sys
from functools import cache
from importlib.util import find_spec
from threading import Lock
from typing import Any

_compiling = Lock()


def expected() -> bool:
    """Whether kernels are likely to work; only compiling them shows it."""
    return os.environ.get("INFER_KERNELS") != "0" and find_spec("numba") is not None


def tile_rows() -> int:
    """Rows of a tile of a quantized weight, as the kernels read it; 1 without kernels. A plan tiles other weights."""
    return 1 if kernels() is None else int(kernels().TILE)


def kernels() -> Any:
    """The module of kernels, `block.py`; None with INFER_KERNELS=0, without numba, or if it cannot compile them."""
    with _compiling:
        return _kernels()


@cache
def _kernels() -> Any:
    if os.environ.get("INFER_KERNELS") == "0":
        return None
    try:
        from numba.core.errors import NumbaError
    except ImportError:
        return None
    try:
        from infer.backend.cpu import block

        block.compile_first()
        return block
    except (ImportError, RuntimeError, OSError, NumbaError) as error:
        reason = str(error).strip().partition("\n")[0]
        print(f"no kernels for this CPU, so plain torch runs instead: {reason}", file=sys.stderr, flush=True)
        return None


def _without_kernels() -> None:
    """In a forked child, which has no threads but one: torch's own OpenMP may wait for another forever."""
    os.environ["INFER_KERNELS"] = "0"
    _kernels.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_without_kernels)
