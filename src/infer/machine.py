"""What this machine offers: a device, a dtype that is fast on it, threads, and memory."""

from __future__ import annotations

import ctypes
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Protocol
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
    """Sums of 32 bits in the widest register whose bytes this CPU multiplies at once."""
    has = torch.cpu.get_capabilities()
    if has.get("avx512_vnni") and has.get("avx512_bw"):
        return 16
    return 8 if has.get("avx2") else 4


@cache
def allows_amx() -> bool:
    """Whether this CPU has AMX, and Linux, which wants to be asked, lets this process use its large registers."""
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
            raise ValueError(f"device {device!r} was asked for, but torch sees no CUDA GPU here: use cpu")
        resolved = torch.device("cuda", torch.cuda.current_device() if resolved.index is None else resolved.index)
        if resolved.index >= torch.cuda.device_count():
            raise ValueError(f"there is no {resolved}: this machine has {torch.cuda.device_count()} CUDA GPU(s)")
    elif resolved.type != "cpu":
        try:
            resolved = torch.empty(1, device=resolved).device  # its number too, as tensors say it
        except (RuntimeError, NotImplementedError, AssertionError, ImportError):
            raise ValueError(f"device {device!r} was asked for, but torch has no {resolved} here: use cpu") from None
    return resolved


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """A copy that the host does not wait for. From memory that is not pinned, it might wait for all launches."""
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
    """Refuse a device that models cannot run on, or not in this dtype."""
    if device.type == "meta":
        raise ValueError("models do not run on device 'meta', which holds no numbers: use auto, cpu or cuda")
    if dtype is torch.float64 and device.type not in ("cpu", "cuda"):
        raise ValueError(f"models run in float32, bfloat16 or float16 on {device}, not in float64")


def cpu_multiplies(dtype: torch.dtype) -> bool:
    """Whether torch's matrix products in a dtype of 16 bits are fast: where the CPU has instructions for them.

    Elsewhere bfloat16 takes it 30 times as long as float32, and float16 three times, even where a core computes in it.
    """
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name) for name in INSTRUCTIONS[dtype])


_threads_are_chosen = False  # of the whole process, as torch's number is


def use_threads(count: int | None = None) -> None:
    """Compute on so many threads of the CPU. None: `cpu_threads`, unless a number has been chosen before."""
    global _threads_are_chosen
    if count is None:
        if _threads_are_chosen or "OMP_NUM_THREADS" in os.environ:
            return
        count = cpu_threads()
    else:
        most = os.cpu_count() or 1
        if type(count) is not int or not 1 <= count <= most:
            raise ValueError(f"threads must be a whole number from 1 to this machine's {most} CPUs, not {count!r}")
    torch.set_num_threads(count)
    _threads_are_chosen = True


def cpu_threads() -> int:
    """Threads that can run at once: torch's number, which is the machine's cores, or as many CPUs as we may use.

    torch does not ask for a container's quota; threads beyond it would wait for each other most of the time.
    """
    return min(torch.get_num_threads(), usable_cpus())


def usable_cpus() -> int:
    """Those that this process is bound to, within the quota of its container."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([cpus, *map(math.ceil, _cgroup_cpus())]))


def _cgroup_cpus() -> Iterator[float]:
    """The CPU quotas of the cgroups this process is in."""
    for folder in _cgroups("cpu"):
        if (quota := _cpu_quota(folder)) is not None:
            yield quota


def _cgroups(controller: str) -> Iterator[Path]:
    """Folders of the cgroups this process is in, from its own up to the root: each limits those within."""
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
        # A container may see its own cgroup as the root, under the name that the host has for it: what is not there
        # is passed over.
        for path in (PurePosixPath(own), *PurePosixPath(own).parents):
            yield root / str(path).lstrip("/")


def _cpu_quota(cgroup: Path) -> float | None:
    """CPUs that a cgroup may use: v2 has a file for it, v1 two."""
    for names in (["cpu.max"], ["cpu.cfs_quota_us", "cpu.cfs_period_us"]):
        try:
            quota, period = " ".join((cgroup / name).read_text() for name in names).split()
            cpus = int(quota) / int(period)
        except (OSError, ValueError, ZeroDivisionError):  # no such file, "max", or nothing that we know
            continue
        if cpus > 0:  # v1 writes -1 where there is no limit
            return cpus
    return None


class Promise(Protocol):
    """Memory of the CPU that is taken but not written: the system counts it as free until then."""

    @property
    def unwritten_bytes(self) -> int: ...


promises: WeakSet[Promise] = WeakSet()
_reserved = 0  # bytes for what is about to be allocated


@contextmanager
def reserved(count: int) -> Iterator[None]:
    """Leave this many bytes out of `available_memory`: they are for something else that is to come."""
    global _reserved
    _reserved += count
    try:
        yield
    finally:
        _reserved -= count


def reserved_bytes() -> int:
    return _reserved


def available_memory(device: torch.device, processes: int = 1) -> int | None:
    """Bytes that can still be allocated on the device by each of so many processes; None where nobody says."""
    if device.type == "cuda":
        return max(0, torch.cuda.mem_get_info(device)[0] // processes - _reserved)
    if device.type != "cpu":
        return None
    unwritten = sum(promise.unwritten_bytes for promise in list(promises))
    limits = [(limit - unwritten) // processes for limit in (_system_memory(), *_cgroup_memory()) if limit is not None]
    limits += _rlimits()
    return max(0, min(limits) - _reserved) if limits else None


def _system_memory() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    except (OSError, ValueError):
        return None


def _cgroup_memory() -> Iterator[int]:
    """What the limits of containers leave (cgroup v2, and v1)."""
    for folder in _cgroups("memory"):
        for limit, used in (("max", "current"), ("limit_in_bytes", "usage_in_bytes")):
            with suppress(OSError, ValueError):  # no such file, or "max"
                most = int((folder / f"memory.{limit}").read_text())
                held = int((folder / f"memory.{used}").read_text())
                yield most - held + _page_cache(folder / "memory.stat")


def _rlimits() -> Iterator[int]:
    """What `ulimit -v` and `ulimit -d` leave of this process's address space: taken as soon as it is allocated."""
    try:
        import resource
    except ImportError:  # Windows
        return
    used = {}
    with suppress(OSError):
        used = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    for limit, name in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
        most = resource.getrlimit(limit)[0]
        if most != resource.RLIM_INFINITY:
            yield most - int(used.get(name, "0").split()[0]) * 1024


def _page_cache(stat: Path) -> int:
    """Bytes of files that a cgroup keeps in memory and gives back when asked: a model just read is among them."""
    try:
        counters = dict(line.split() for line in stat.read_text().splitlines())
    except (OSError, ValueError):
        return 0
    return sum(int(counters.get(name, 0)) for name in ("inactive_file", "active_file"))
