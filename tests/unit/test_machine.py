"""Choosing a device and a dtype, and finding out how much memory there is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from infer import machine
from infer.machine import available_memory, resolve_device, resolve_dtype

CPU = torch.device("cpu")
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
            (0, "cuda", "'cuda' was asked for, but torch sees no CUDA GPU here: use cpu"),
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
    @pytest.mark.parametrize(
        ("device", "capabilities", "expected"),
        [
            ("cuda", {}, torch.bfloat16),
            ("cpu", {}, torch.float32),
            ("cpu", {"avx512": True, "bf16": False}, torch.float32),
            ("cpu", {"amx_bf16": True}, torch.bfloat16),
            ("cpu", {"avx512_bf16": True}, torch.bfloat16),
            ("cpu", {"bf16": True}, torch.bfloat16),
        ],
    )
    def test_auto(
        self, monkeypatch: pytest.MonkeyPatch, device: str, capabilities: dict[str, bool], expected: torch.dtype
    ) -> None:
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
        assert resolve_dtype("auto", torch.device(device)) == expected

    def test_this_machine_answers(self) -> None:
        assert resolve_dtype("auto", CPU) in (torch.float32, torch.bfloat16)

    @pytest.mark.parametrize("name", ["float32", "bfloat16", "float16", "float64"])
    def test_as_given(self, name: str) -> None:
        assert resolve_dtype(name, CPU) == resolve_dtype(getattr(torch, name), CPU) == getattr(torch, name)

    @pytest.mark.parametrize(
        ("dtype", "message"), [("int4", "unknown dtype 'int4': use auto or"), (torch.int8, "cannot run in torch.int8")]
    )
    def test_refused(self, dtype: str | torch.dtype, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            resolve_dtype(dtype, CPU)


class TestMemory:
    @pytest.mark.parametrize(
        ("files", "expected"),
        [
            ({MEMINFO: "MemTotal: 9 kB\nMemAvailable:   4 kB\n"}, 4096),
            ({MEMINFO: "MemAvailable: 4 kB\n", **V2}, 2000),
            ({MEMINFO: "MemAvailable: 1 kB\n", **V2}, 1024),
            ({MEMINFO: "MemAvailable: 4 kB\n", **V1}, 500),
            ({MEMINFO: "MemAvailable: 4 kB\n", **V1, **V2}, 2000),
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
