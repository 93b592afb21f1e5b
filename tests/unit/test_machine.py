"""Choosing a device, a dtype and threads, and finding out how much memory there is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from weakref import WeakSet

import pytest
import torch

from infer import machine
from infer.machine import available_memory, cpu_threads, has_fast_matmul, resolve_device, resolve_dtype, use_threads

CPU = torch.device("cpu")
OWN = "/proc/self/cgroup"
MEMINFO = "/proc/meminfo"
V2 = {"/sys/fs/cgroup/memory.max": "3000", "/sys/fs/cgroup/memory.current": "1000"}
V1 = {
    "/sys/fs/cgroup/memory/memory.limit_in_bytes": "5000",
    "/sys/fs/cgroup/memory/memory.usage_in_bytes": "4500",
}


def with_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: count - 1)


def with_files(monkeypatch: pytest.MonkeyPatch, files: dict[str, str]) -> None:
    """A machine whose system files are these."""

    def read_text(path: Path) -> str:
        if str(path) not in files:
            raise FileNotFoundError(path)
        return files[str(path)]

    monkeypatch.setattr(machine.Path, "read_text", read_text)


class TestDevice:
    @pytest.mark.parametrize(("gpus", "expected"), [(0, "cpu"), (1, "cuda")])
    def test_auto(self, monkeypatch: pytest.MonkeyPatch, gpus: int, expected: str) -> None:
        with_gpus(monkeypatch, gpus)
        assert resolve_device("auto").type == expected
        assert resolve_device().type == expected

    def test_as_given(self) -> None:
        assert resolve_device("cpu") == resolve_device(CPU) == CPU

    def test_a_gpu_gets_its_number(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Tensors on "cuda" say they are on "cuda:N": the two must compare equal."""
        with_gpus(monkeypatch, 2)
        assert resolve_device("cuda") == torch.device("cuda", 1)
        assert resolve_device("cuda:0") == torch.device("cuda", 0)

    @pytest.mark.parametrize(
        ("gpus", "device", "message"),
        [
            (0, "cuda", "'cuda' is not available, torch sees no CUDA GPU: use cpu"),
            (0, "cuda:1", "no CUDA GPU"),
            (2, "cuda:2", r"there is no cuda:2: this machine has 2 CUDA GPU\(s\)"),
            (0, "gpu", "unknown device 'gpu': use auto, cpu, cuda"),
            (0, "", "unknown device ''"),
        ],
    )
    def test_refused(self, monkeypatch: pytest.MonkeyPatch, gpus: int, device: str, message: str) -> None:
        with_gpus(monkeypatch, gpus)
        with pytest.raises(ValueError, match=message):
            resolve_device(device)


class TestDtype:
    def test_auto(self) -> None:
        assert resolve_dtype("auto", torch.device("cuda")) is torch.bfloat16
        assert resolve_dtype("auto", CPU) is torch.float32

    @pytest.mark.parametrize(
        ("capabilities", "expected"),
        [
            ({}, False),
            ({"avx512": True, "bf16": False}, False),
            ({"amx_bf16": True}, True),
            ({"avx512_bf16": True}, True),
            ({"bf16": True}, True),
        ],
    )
    def test_what_is_fast_in_bfloat16(
        self, monkeypatch: pytest.MonkeyPatch, capabilities: dict[str, bool], expected: bool
    ) -> None:
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
        assert has_fast_matmul(torch.bfloat16) == expected

    def test_what_is_fast_in_half_precision(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """An ARM core that computes in float16 is none that multiplies matrices fast."""
        for capabilities, expected in (({"fp16_arith": True, "bf16": True}, False), ({"amx_fp16": True}, True)):
            monkeypatch.setattr(torch.cpu, "get_capabilities", lambda found=capabilities: found)
            assert has_fast_matmul(torch.float16) == expected

    def test_this_machine_answers(self) -> None:
        assert has_fast_matmul(torch.bfloat16) in (True, False)

    @pytest.mark.parametrize("name", ["float32", "bfloat16", "float16", "float64"])
    def test_as_given(self, name: str) -> None:
        assert resolve_dtype(name, CPU) == resolve_dtype(getattr(torch, name), CPU) == getattr(torch, name)

    @pytest.mark.parametrize(
        ("dtype", "message"), [("int4", "unknown dtype 'int4': use auto or"), (torch.int8, "cannot run in torch.int8")]
    )
    def test_refused(self, dtype: str | torch.dtype, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            resolve_dtype(dtype, CPU)


def quota_files(folder: str, quota: int, period: int = 100_000) -> dict[str, str]:
    """As cgroup v1 has them."""
    return {f"{folder}/cpu.cfs_quota_us": f"{quota}\n", f"{folder}/cpu.cfs_period_us": f"{period}\n"}


V1_ROOT = "/sys/fs/cgroup/cpu"
V2_CPUS = "/sys/fs/cgroup/cpu.max"
IN_V1 = {OWN: "5:memory:/elsewhere\n2:cpuacct:/\n1:cpu,cpuacct:/a/b\n0::/\n"}
IN_V2 = {OWN: "0::/a/b\n"}
NO_LIMIT = {V2_CPUS: "max 100000\n"}
# What the files of a machine with 8 cores say, and how many threads that leaves.
LIMITS: dict[str, tuple[dict[str, str], int]] = {
    "no files": ({}, 8),
    "no limit": ({OWN: "0::/\n", **NO_LIMIT}, 8),
    "a container": ({OWN: "0::/\n", V2_CPUS: "300000 100000\n"}, 3),
    "another period": ({OWN: "0::/\n", V2_CPUS: "100000 50000\n"}, 2),
    "part of a CPU more": ({OWN: "0::/\n", V2_CPUS: "250000 100000\n"}, 3),
    "part of a CPU": ({OWN: "0::/\n", V2_CPUS: "20000 100000\n"}, 1),
    "more than there are": ({OWN: "0::/\n", V2_CPUS: "6400000 100000\n"}, 8),
    "its own": ({**IN_V2, "/sys/fs/cgroup/a/b/cpu.max": "200000 100000", **NO_LIMIT}, 2),
    "one around it": ({**IN_V2, "/sys/fs/cgroup/a/cpu.max": "200000 100000", **NO_LIMIT}, 2),
    "the tightest, within": (
        {**IN_V2, "/sys/fs/cgroup/a/cpu.max": "500000 100000", "/sys/fs/cgroup/a/b/cpu.max": "200000 100000"},
        2,
    ),
    "the tightest, around": (
        {**IN_V2, "/sys/fs/cgroup/a/cpu.max": "200000 100000", "/sys/fs/cgroup/a/b/cpu.max": "500000 100000"},
        2,
    ),
    "someone else's": ({**IN_V2, "/sys/fs/cgroup/c/cpu.max": "100000 100000"}, 8),
    "the host's name for it": ({OWN: "0::/host/name\n", V2_CPUS: "200000 100000"}, 2),
    "outside of what it sees": ({OWN: "0::/../up\n", V2_CPUS: "200000 100000"}, 2),
    "v1": ({**IN_V1, **quota_files(f"{V1_ROOT}/a/b", 200_000)}, 2),
    "v1, around": ({**IN_V1, **quota_files(f"{V1_ROOT}/a/b", -1), **quota_files(V1_ROOT, 350_000)}, 4),
    "v1 without a limit": ({**IN_V1, **quota_files(V1_ROOT, -1)}, 8),
    "v1, half of it": ({**IN_V1, f"{V1_ROOT}/cpu.cfs_quota_us": "100000"}, 8),
    "an empty file": ({OWN: "0::/\n", V2_CPUS: ""}, 8),
    "words": ({OWN: "0::/\n", V2_CPUS: "many few"}, 8),
    "too many words": ({OWN: "0::/\n", V2_CPUS: "1 2 3"}, 8),
    "a period of 0": ({OWN: "0::/\n", V2_CPUS: "100000 0"}, 8),
    "a negative quota": ({OWN: "0::/\n", V2_CPUS: "-100000 100000"}, 8),
    "not the file we know": ({OWN: "\nnonsense\n:\n1:cpu\n0::\n", V2_CPUS: "200000 100000"}, 2),
}


class TestThreads:
    @pytest.fixture(autouse=True)
    def used(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """A machine of 16 CPUs with two threads to a core, for which torch chooses 8. Holds the numbers chosen."""
        numbers = [8]
        monkeypatch.setattr(torch, "get_num_threads", lambda: numbers[-1])
        monkeypatch.setattr(torch, "set_num_threads", numbers.append)
        monkeypatch.setattr(os, "cpu_count", lambda: 16)
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)
        monkeypatch.setattr(machine, "_threads_are_chosen", False)
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        with_files(monkeypatch, {})
        return numbers

    @pytest.mark.parametrize(("files", "expected"), LIMITS.values(), ids=LIMITS)
    def test_container(self, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], expected: int) -> None:
        with_files(monkeypatch, files)
        assert cpu_threads() == expected

    @pytest.mark.parametrize(("allowed", "expected"), [({3}, 1), ({0, 5, 9}, 3), (set(range(12)), 8)])
    def test_affinity(self, monkeypatch: pytest.MonkeyPatch, allowed: set[int], expected: int) -> None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: allowed)
        assert cpu_threads() == expected

    def test_no_affinity_to_ask_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """macOS and Windows."""
        monkeypatch.delattr(os, "sched_getaffinity")
        assert cpu_threads() == 8

    def test_least_of_all(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with_files(monkeypatch, {OWN: "0::/\n", V2_CPUS: "500000 100000"})
        assert cpu_threads() == 5
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 2})
        assert cpu_threads() == 2

    @pytest.mark.parametrize(("quota", "expected"), [("200000 100000", 2), ("max 100000", 8), ("1600000 100000", 8)])
    def test_default(self, monkeypatch: pytest.MonkeyPatch, used: list[int], quota: str, expected: int) -> None:
        """Never more than torch has chosen."""
        with_files(monkeypatch, {OWN: "0::/\n", V2_CPUS: quota})
        use_threads()
        assert used[-1] == expected

    def test_default_leaves_what_the_user_chose(self, monkeypatch: pytest.MonkeyPatch, used: list[int]) -> None:
        with_files(monkeypatch, {OWN: "0::/\n", V2_CPUS: "200000 100000"})
        with monkeypatch.context() as patch:
            patch.setenv("OMP_NUM_THREADS", "6")
            use_threads()
        assert used == [8]
        use_threads(5)
        use_threads()
        assert used == [8, 5]

    def test_default_is_chosen_once(self, monkeypatch: pytest.MonkeyPatch, used: list[int]) -> None:
        """Whoever tells torch another number after a model has been loaded keeps it when the next one is."""
        with_files(monkeypatch, {OWN: "0::/\n", V2_CPUS: "200000 100000"})
        use_threads()
        torch.set_num_threads(7)
        use_threads()
        assert used == [8, 2, 7]

    @pytest.mark.parametrize("count", [1, 12, 16])
    def test_as_given(self, monkeypatch: pytest.MonkeyPatch, used: list[int], count: int) -> None:
        """Also more than is of use, and whatever the environment says."""
        with_files(monkeypatch, {OWN: "0::/\n", V2_CPUS: "200000 100000"})
        monkeypatch.setenv("OMP_NUM_THREADS", "6")
        use_threads(count)
        assert used[-1] == count

    @pytest.mark.parametrize("count", [0, -1, 17, 2.0, "2", True])
    def test_refused(self, used: list[int], count: object) -> None:
        message = f"threads must be an integer from 1 to this machine's 16 CPUs, not {count!r}"
        with pytest.raises(ValueError, match=message):
            use_threads(count)  # type: ignore[arg-type]
        assert used == [8]


def test_threads_of_this_machine() -> None:
    assert 1 <= cpu_threads() <= torch.get_num_threads()


def memory_files(cgroup: str, most: int, used: int) -> dict[str, str]:
    return {
        f"/sys/fs/cgroup{cgroup}/memory.max": f"{most}\n",
        f"/sys/fs/cgroup{cgroup}/memory.current": f"{used}\n",
    }


V1_OWN = {
    "/sys/fs/cgroup/memory/a/memory.limit_in_bytes": "5000",
    "/sys/fs/cgroup/memory/a/memory.usage_in_bytes": "4500",
    "/sys/fs/cgroup/memory/a/memory.stat": "inactive_file 200\n",
}


class Promised:
    def __init__(self, unwritten_bytes: int) -> None:
        self.unwritten_bytes = unwritten_bytes


@pytest.fixture
def nothing_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "lazy_allocations", WeakSet())


@pytest.mark.usefixtures("nothing_promised")
class TestMemory:
    @pytest.mark.parametrize(
        ("files", "expected"),
        [
            ({MEMINFO: "MemTotal: 9 kB\nMemAvailable:   4 kB\n"}, 4096),
            ({MEMINFO: "MemAvailable: 4 kB\n", **V2}, 2000),
            ({MEMINFO: "MemAvailable: 1 kB\n", **V2}, 1024),
            ({MEMINFO: "MemAvailable: 4 kB\n", **V1}, 500),
            ({MEMINFO: "MemAvailable: 4 kB\n", **V1, **V2}, 500),
            ({MEMINFO: "MemAvailable: 4 kB\n", **IN_V2, **memory_files("/a/b", 3000, 1000), **V2}, 2000),
            ({MEMINFO: "MemAvailable: 4 kB\n", **IN_V2, **memory_files("/a/b", 1500, 1000), **V2}, 500),
            ({MEMINFO: "MemAvailable: 4 kB\n", **IN_V2, **memory_files("/a", 1300, 1000), **V2}, 300),
            ({MEMINFO: "MemAvailable: 4 kB\n", **IN_V2, **memory_files("/c", 1300, 1000), **V2}, 2000),
            ({MEMINFO: "MemAvailable: 4 kB\n", OWN: "5:memory:/a\n", **V1_OWN}, 700),
            ({MEMINFO: "MemAvailable: 4 kB\n", OWN: "5:cpu:/a\n", **V1_OWN}, 4096),
            ({MEMINFO: "MemAvailable: 4 kB\n", **V2, "/sys/fs/cgroup/memory.max": "max"}, 4096),
            ({MEMINFO: "MemAvailable: 4 kB\n", **V2, "/sys/fs/cgroup/memory.current": "9999"}, 0),
            (V2, 2000),
            ({}, None),
        ],
        ids=[
            "system",
            "container",
            "full system",
            "older container",
            "both",
            "its own cgroup, as wide",
            "its own cgroup",
            "one around it",
            "someone else's",
            "its own older cgroup",
            "an older cgroup without the controller",
            "unlimited",
            "used up",
            "no meminfo",
            "none",
        ],
    )
    def test_least_of_system_and_container(
        self, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], expected: int | None
    ) -> None:
        with_files(monkeypatch, files)
        assert available_memory(CPU) == expected

    @pytest.mark.parametrize(
        ("limits", "expected"),
        [
            ({}, 4096),
            ({"RLIMIT_AS": 5000}, 5000 - 2048),
            ({"RLIMIT_DATA": 3000}, 3000 - 1024),
            ({"RLIMIT_AS": 5000, "RLIMIT_DATA": 3000}, 3000 - 1024),
            ({"RLIMIT_AS": 10**9}, 4096),
            ({"RLIMIT_AS": 100}, 0),
        ],
        ids=str,
    )
    def test_limits_of_the_process(
        self, monkeypatch: pytest.MonkeyPatch, limits: dict[str, int], expected: int
    ) -> None:
        """`ulimit -v` and `ulimit -d`."""
        resource = pytest.importorskip("resource")
        with_files(
            monkeypatch,
            {MEMINFO: "MemAvailable: 4 kB\n", "/proc/self/status": "Name:\tx\nVmSize:\t 2 kB\nVmData:\t 1 kB\n"},
        )
        most = {getattr(resource, name): value for name, value in limits.items()}
        monkeypatch.setattr(resource, "getrlimit", lambda name: (most.get(name, resource.RLIM_INFINITY), -1))
        assert available_memory(CPU) == expected

    def test_a_limit_of_this_process(self) -> None:
        code = (
            "import resource, torch; from infer.machine import available_memory\n"
            "resource.setrlimit(resource.RLIMIT_AS, (10**11, -1))\n"
            "print(available_memory(torch.device('cpu')) < 10**11)"
        )
        assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"True\n"

    def test_promises_and_reserves(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """What is allocated but not written counts, except against limits that count it already."""
        resource = pytest.importorskip("resource")
        with_files(monkeypatch, {MEMINFO: "MemAvailable: 4 kB\n"})
        monkeypatch.setattr(resource, "getrlimit", lambda name: (resource.RLIM_INFINITY, -1))
        first, second = Promised(1000), Promised(500)
        machine.lazy_allocations.update((first, second))  # type: ignore[arg-type]
        assert available_memory(CPU) == 4096 - 1500
        with machine.reserved(100):
            assert available_memory(CPU) == 4096 - 1600
        second.unwritten_bytes = 0
        assert available_memory(CPU) == 4096 - 1000
        monkeypatch.setattr(resource, "getrlimit", lambda name: (3000, -1))
        with machine.reserved(100):
            assert available_memory(CPU) == 2900
        del first
        monkeypatch.setattr(resource, "getrlimit", lambda name: (resource.RLIM_INFINITY, -1))
        assert available_memory(CPU) == 4096
        machine.lazy_allocations.add(other := Promised(10**6))  # type: ignore[arg-type]
        assert other.unwritten_bytes > available_memory(CPU) == 0

    def test_system_without_the_line(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with_files(monkeypatch, {MEMINFO: "MemTotal: 9 kB\n"})
        monkeypatch.setattr(os, "sysconf", lambda name: {"SC_PAGE_SIZE": 4096, "SC_AVPHYS_PAGES": 3}[name])
        assert available_memory(CPU) == 3 * 4096

    def test_gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (7, 9))
        assert available_memory(torch.device("cuda", 0)) == 7

    def test_unknown_kind_of_device(self) -> None:
        assert available_memory(torch.device("meta")) is None

    def test_this_machine_answers(self) -> None:
        free = available_memory(CPU)
        assert free is None or free > 0
