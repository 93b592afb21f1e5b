"""The CPU backend: kernels that numba compiles. They are compiled, or read from disk, when first asked for."""

from __future__ import annotations

import hashlib
import os
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from typing import Any

import torch

from infer.machine import cache_folder

FILES = ("attention", "block", "memory", "product", "simd", "tile")  # what numba compiles
_compiling = Lock()


def expected() -> bool:
    """Whether there should be kernels; to know, they would have to be compiled."""
    return os.environ.get("INFER_KERNELS") != "0" and find_spec("numba") is not None


def kernels() -> Any:
    """The module of kernels, `block.py`; None with INFER_KERNELS=0, without numba, or where it cannot compile them."""
    with _compiling:
        return _kernels()


@cache
def _kernels() -> Any:
    if os.environ.get("INFER_KERNELS") == "0":
        return None
    try:
        from numba.core.errors import NumbaError

        from infer.backend.cpu.kernel_cache import load_cached
    except ImportError:
        return None
    threads = torch.get_num_threads()

    def load() -> Any:
        from infer.backend.cpu import block

        block.use_threads(threads)
        return block

    # numba compiles a kernel again when its own file has changed, not when one that it calls has: so each state of
    # the files has a folder of its own.
    root = Path(os.environ.get("NUMBA_CACHE_DIR") or cache_folder())
    try:
        return load_cached(load, root / "kernels" / _fingerprint())
    except (ImportError, RuntimeError, OSError, NumbaError) as error:
        reason = str(error).strip().partition("\n")[0]
        print(f"no kernels for this CPU, so plain torch runs instead: {reason}", file=sys.stderr, flush=True)
        return None
    finally:
        # Where numba and torch share an OpenMP library, as on x86, starting the one's threads has set the other's.
        torch.set_num_threads(threads)


def _fingerprint() -> str:
    folder = Path(__file__).parent
    files = [*(folder / f"{name}.py" for name in FILES), folder.parents[1] / "cache" / "table.py"]
    contents = b"".join(file.read_bytes() for file in files)
    return hashlib.sha256(contents + str(files).encode()).hexdigest()[:16]  # numba goes by their paths too


def _without_kernels() -> None:
    """In a forked child: GNU OpenMP, whose threads were not forked along, would end the process."""
    os.environ["INFER_KERNELS"] = "0"
    _kernels.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_without_kernels)
