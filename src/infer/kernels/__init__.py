"""Compiled kernels. Nothing here is imported until something asks for it."""

from __future__ import annotations

import hashlib
import os
import sys
from functools import cache
from pathlib import Path
from typing import Any

from infer.machine import cache_folder


@cache
def cpu() -> Any:
    """Those for the CPU; None with INFER_KERNELS=0, without numba, or where it can keep nothing on disk."""
    if os.environ.get("INFER_KERNELS") == "0":
        return None
    try:
        from numba import config
    except ImportError:
        return None
    # numba compiles a kernel again when its own file has changed, not when one that it calls has: so each state of
    # the files has a folder of its own.
    before = config.CACHE_DIR  # type: ignore[attr-defined]
    home = Path(before or cache_folder() / "kernels")
    folder = home / _fingerprint()
    if not folder.exists():
        print("compiling kernels for this CPU: half a minute, once", file=sys.stderr, flush=True)
    config.CACHE_DIR = str(folder)  # type: ignore[attr-defined]
    try:
        from infer.kernels import cpu_block
    except (ImportError, RuntimeError):
        return None
    finally:
        config.CACHE_DIR = before  # type: ignore[attr-defined]
    return cpu_block


def _fingerprint() -> str:
    files = sorted(Path(__file__).parent.glob("cpu_*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]
