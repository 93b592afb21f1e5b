"""The machine: devices, dtypes, CPU threads, and available memory."""

from __future__ import annotations

import ctypes
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
INSTRUCTIONS = {  # as torch names them
    torch.bfloat16: ("amx_bf16", "avx512_bf16", "bf16"),
    torch.float16: ("amx_fp16", "avx512_fp16"),
}


def byte_lanes() -> int:
    """32-bit lanes of the widest register with int8 dot products on this CPU."""
    has = torch.cpu.get_capabilities()
    if has.get("avx512_vnni") and has.get("avx512_bw"):
        return 16
    return 8 if has.get("avx2") else 4


@cache
def allows_amx() -> bool:
    """Whether this CPU has AMX and Linux grants this process its tile registers, which have to be requested."""
    if sys.platform != "linux" or not torch.cpu.get_capabilities().get("amx_int8"):
        return False
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    return bool(ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0)


def resolve_device(device: str | torch.device = "auto") -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
    except RuntimeError:
        raise ValueError(
            f"unknown device {device!r}: use auto, cpu, cuda, cuda:N, or another of torch's (mps, xpu)"
        ) from None
    if resolved.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(f"device {device!r} is not available, torch sees no CUDA GPU: use cpu")
        resolved = torch.device("cuda", torch.cuda.current_device() if resolved.index is None else resolved.index)
        if resolved.index >= torch.cuda.device_count():
            raise ValueError(f"there is no {resolved}: this machine has {torch.cuda.device_count()} CUDA GPU(s)")
    elif resolved.type != "cpu":
        try:
            resolved = torch.empty(1, device=resolved).device  # with its index
        except (RuntimeError, NotImplementedError, AssertionError, ImportError):
            raise ValueError(f"device {device!r} is not available, torch has no {resolved} here: use cpu") from None
    return resolved


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """An asynchronous copy. From unpinned memory it might wait for all launched kernels."""
    if x.device == device:
        return x
    return (x.pin_memory() if device.type == "cuda" and x.device.type == "cpu" else x).to(device, non_blocking=True)


def resolve_dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype:
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if isinstance(dtype, torch.dtype):
        if dtype not in DTYPES.values():
            raise ValueError(f"cannot run in {dtype}: use one of {', '.join(DTYPES)}")
        return dtype
    if dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}: use auto or one of {', '.join(DTYPES)}")
    return DTYPES[dtype]


def check_runs_on(device: torch.device, dtype: torch.dtype) -> None:
    """Refuse a device that models cannot run on in this dtype."""
    if device.type == "meta":
        raise ValueError("models do not run on device 'meta', which holds no numbers: use auto, cpu or cuda")
    if dtype is torch.float64 and device.type not in ("cpu", "cuda"):
        raise ValueError(f"models run in float32, bfloat16 or float16 on {device}, not in float64")


def has_fast_matmul(dtype: torch.dtype) -> bool:
    """Whether torch's GEMMs in a 16-bit dtype are fast: the CPU needs matrix or dot-product instructions for it.

    Without, bfloat16 takes 30 times as long as float32, and float16 three times, even if the core computes in float16.
    """
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name) for name in INSTRUCTIONS[dtype])


_threads_are_chosen = False  # for the process, like torch's number


def use_threads(count: int | None = None) -> None:
    """Set the number of CPU threads. None: `cpu_threads`, unless a number has been set before."""
    global _threads_are_chosen
    if count is None:
        if _threads_are_chosen or "OMP_NUM_THREADS" in os.environ:
            return
        count = cpu_threads()
    else:
        most = os.cpu_count() or 1
        if type(count) is not int or not 1 <= count <= most:
            raise ValueError(f"threads must be an integer from 1 to this machine's {most} CPUs, not {count!r}")
    torch.set_num_threads(count)
    _threads_are_chosen = True


def cpu_threads() -> int:
    """Threads that can run at once: torch's number, the machine's cores, or fewer if this process has fewer CPUs.

    torch ignores a container's quota; threads beyond it would wait for each other most of the time.
    """
    return min(torch.get_num_threads(), usable_cpus())


def usable_cpus() -> int:
    """The CPUs in this process's affinity mask, within the quota of its container."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([cpus, *map(math.ceil, _cgroup_cpus())]))


def _cgroup_cpus() -> Iterator[float]:
    """The CPUs that this process's cgroups may use: one file in v2, two in v1."""
    for folder in _cgroups("cpu"):
        for names in (["cpu.max"], ["cpu.cfs_quota_us", "cpu.cfs_period_us"]):
            with suppress(OSError, ValueError, ZeroDivisionError):  # no such file, "max", or an unknown format
                quota, period = " ".join((folder / name).read_text() for name in names).split()
                if (cpus := int(quota) / int(period)) > 0:  # v1 has -1 for no limit
                    yield cpus


def _cgroups(controller: str) -> Iterator[Path]:
    """Folders of this process's cgroups, from its own up to the root: each limits those inside."""
    try:
        entries = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        entries = ["0::/", f"1:{controller}:/"]
    for entry in entries:
        _, _, rest = entry.partition(":")
        controllers, _, own = rest.partition(":")
        if controllers == "":  # v2
            root = Path("/sys/fs/cgroup")
        elif controller in controllers.split(","):  # v1
            root = Path("/sys/fs/cgroup") / controller
        else:
            continue
        # A container may see its own cgroup as the root, under the host's name for it: callers skip missing folders.
        for path in (PurePosixPath(own), *PurePosixPath(own).parents):
            yield root / str(path).lstrip("/")


# Objects whose CPU memory has `unwritten_bytes` that are allocated but not written: the system counts them as free.
lazy_allocations: WeakSet[Any] = WeakSet()
_reserved = 0  # bytes for coming allocations


@contextmanager
def reserved(count: int) -> Iterator[None]:
    """Subtract this many bytes from `available_memory`, for a coming allocation."""
    global _reserved
    _reserved += count
    try:
        yield
    finally:
        _reserved -= count


def reserved_bytes() -> int:
    return _reserved


def available_memory(device: torch.device, processes: int = 1, *, release: bool = False) -> int | None:
    """Bytes that each of `processes` processes can still allocate on the device; None if unknown.

    release: give back what torch keeps of freed GPU memory first, such as that of an earlier cache.
    """
    if device.type == "cuda":
        if release:
            torch.cuda.empty_cache()
        return max(0, torch.cuda.mem_get_info(device)[0] // processes - _reserved)
    if device.type != "cpu":
        return None
    unwritten = sum(each.unwritten_bytes for each in list(lazy_allocations))
    limits = [(limit - unwritten) // processes for limit in (_system_memory(), *_cgroup_memory()) if limit is not None]
    limits += _rlimits()
    return max(0, min(limits) - _reserved) if limits else None


def _kilobytes(path: str) -> dict[str, int]:
    """The lines of a file in /proc that give kilobytes, in bytes."""
    lines = [line.split() for line in Path(path).read_text().splitlines()]
    return {words[0]: int(words[1]) * 1024 for words in lines if words[2:] == ["kB"]}


def _system_memory() -> int | None:
    with suppress(OSError, ValueError):
        free = _kilobytes("/proc/meminfo").get("MemAvailable:")
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES") if free is None else free
    return None


def _cgroup_memory() -> Iterator[int]:
    """Bytes left within the limits of containers (cgroup v2 and v1)."""
    for folder in _cgroups("memory"):
        for limit, used in (("max", "current"), ("limit_in_bytes", "usage_in_bytes")):
            with suppress(OSError, ValueError):  # no such file, or "max"
                most = int((folder / f"memory.{limit}").read_text())
                held = int((folder / f"memory.{used}").read_text())
                counters: dict[str, str] = {}
                with suppress(OSError, ValueError):
                    counters = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                # Files in the page cache are reclaimable: a model just read is among them.
                reclaimable = sum(int(counters.get(name, 0)) for name in ("inactive_file", "active_file"))
                yield most - held + reclaimable


def _rlimits() -> Iterator[int]:
    """Bytes left within `ulimit -v` and `ulimit -d`, which count address space as soon as it is allocated."""
    try:
        import resource
    except ImportError:  # Windows
        return
    used: dict[str, int] = {}
    with suppress(OSError):
        used = _kilobytes("/proc/self/status")
    for limit, name in ((resource.RLIMIT_AS, "VmSize:"), (resource.RLIMIT_DATA, "VmData:")):
        most = resource.getrlimit(limit)[0]
        if most != resource.RLIM_INFINITY:
            yield most - used.get(name, 0)
