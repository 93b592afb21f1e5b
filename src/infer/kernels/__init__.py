"""Compiled kernels. Nothing here is imported until something asks for it."""

from __future__ import annotations

import hashlib
import os
import sys
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from types import SimpleNamespace
from typing import Any

import torch

from infer.kernels import ahead, launcher
from infer.machine import cache_folder

_compiling = Lock()


def has_cpu() -> bool:
    """Whether there should be those for the CPU, without compiling them."""
    return os.environ.get("INFER_KERNELS") != "0" and find_spec("numba") is not None


def cpu() -> Any:
    """Those for the CPU; None with INFER_KERNELS=0, without numba, or where it cannot compile them."""
    with _compiling:
        return _cpu()


@cache
def _cpu() -> Any:
    if os.environ.get("INFER_KERNELS") == "0":
        return None
    try:
        from numba import config
        from numba.core.errors import NumbaError
    except ImportError:
        return None
    # numba compiles a kernel again when its own file has changed, not when one that it calls has: so each state of
    # the files has a folder of its own.
    before = config.CACHE_DIR  # type: ignore[attr-defined]
    folder = Path(before or cache_folder() / "kernels") / _fingerprint()
    marker = folder / "compiled"
    if not marker.exists():
        print("compiling kernels for this CPU: half a minute, once", file=sys.stderr, flush=True)
    config.CACHE_DIR = str(folder)  # type: ignore[attr-defined]
    threads = torch.get_num_threads()
    try:
        from infer.kernels import cpu_block

        cpu_block.use_threads(threads)
    except (ImportError, RuntimeError, OSError, NumbaError) as error:
        reason = str(error).strip().partition("\n")[0]
        print(f"no kernels for this CPU, so plain torch runs instead: {reason}", file=sys.stderr, flush=True)
        return None
    finally:
        config.CACHE_DIR = before  # type: ignore[attr-defined]
        # Where numba and torch share an OpenMP library, as on x86, starting the one's threads has set the other's.
        torch.set_num_threads(threads)
    with suppress(OSError):  # numba then keeps its files somewhere else
        marker.touch()
    return cpu_block


@cache
def gpu(capability: tuple[int, int]) -> bool:
    """Whether there are those for a GPU of this compute capability: not with INFER_KERNELS=0, nor without Triton."""
    if os.environ.get("INFER_KERNELS") == "0":
        return False
    if capability < (8, 0):
        reason = f"they need compute capability 8.0, and this GPU has {capability[0]}.{capability[1]}"
    else:
        try:
            gpu_modules().launch.check()
            return True
        except Exception as error:  # no Triton, no C compiler for its launchers, or whatever else it stumbles over
            reason = f"{type(error).__name__}: {error}".strip().partition("\n")[0]
    print(f"no kernels for this GPU, so plain torch runs instead: {reason}", file=sys.stderr, flush=True)
    return False


def gpu_modules() -> Any:
    """Those for a GPU. To be asked at each launch: while kernels are compiled ahead, nothing is launched."""
    return ahead.seen(_gpu_modules())


def prepared(module: str, kernel: str, grid: tuple[int, ...], **options: Any) -> launcher.Launch:
    """A kernel of one of these modules, to be launched many times."""
    return launcher.Launch(lambda: getattr(getattr(gpu_modules(), module), kernel), grid, **options)


@cache
def _gpu_modules() -> SimpleNamespace:
    from infer.kernels import (
        gpu_attention,
        gpu_launch,
        gpu_product,
        gpu_rows,
        gpu_sample,
        gpu_warps,
    )

    modules = SimpleNamespace(
        attention=gpu_attention,
        launch=gpu_launch,
        product=gpu_product,
        rows=gpu_rows,
        sample=gpu_sample,
        warps=gpu_warps,
    )
    return launcher.quick(modules)


def _fingerprint() -> str:
    folder = Path(__file__).parent
    files = [*sorted(folder.glob("cpu_*.py")), folder / "table.py"]
    contents = b"".join(file.read_bytes() for file in files)
    return hashlib.sha256(contents + str(files).encode()).hexdigest()[:16]  # numba goes by their paths too


def _without_kernels() -> None:
    """In a forked child: GNU OpenMP, whose threads were not forked along, would end the process."""
    os.environ["INFER_KERNELS"] = "0"
    _cpu.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_without_kernels)
