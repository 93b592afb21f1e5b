"""Run by itself, without Triton's interpreter: compiles the GPU kernels that its arguments name, without a GPU.

Prints what became of each as JSON: `rounds` (loops), `shared` (bytes of memory that threads share), `stores` (into it),
of these `early` (before the last matrix product), `weights` (loads of a thread), and of these `narrow` (of less than 16
bytes); `copies` (into that memory, ahead of their use), and of these `narrow_copies`.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from infer.backend.gpu import attention as gpu_attention
from infer.backend.gpu import gemm
from infer.backend.gpu.launcher import Kernel
from infer.backend.parts import BlockParts
from infer.nn.linear import Linear

TARGET = GPUTarget("cuda", 90, 32)
TYPES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.int32: "*i32", torch.int64: "*i64"}
OPTIONS = ("num_warps", "enable_fp_fusion", "launch_pdl")


def source(kernel: Any, args: tuple[Any, ...], constants: dict[str, Any]) -> ASTSource:
    """As Triton would make it of a launch with these, all addresses being multiples of 16."""
    given = dict(zip(kernel.arg_names, args, strict=False)) | constants
    signature: dict[str, str] = {}
    constexprs: dict[tuple[int, ...], Any] = {}
    aligned = {}
    for i, parameter in enumerate(kernel.params):
        value = given.get(parameter.name, parameter.default)
        if isinstance(value, torch.Tensor):
            signature[parameter.name] = TYPES[value.dtype]
            aligned[i,] = [["tt.divisibility", 16]]
        elif parameter.is_constexpr or value is None:
            signature[parameter.name] = "constexpr"
            constexprs[i,] = value
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
    return ASTSource(kernel, signature, constexprs, aligned)


def code(launch: Callable[[], Any]) -> dict[str, int]:
    """What the one kernel that is launched becomes."""
    launched: list[Any] = []

    def launcher(kernel: Kernel, grid: Any) -> Callable[..., None]:
        return lambda *args, **constants: launched.append((kernel.jit, args, constants))

    Kernel.__getitem__ = launcher  # type: ignore[method-assign]
    launch()
    [(kernel, args, constants)] = launched
    options = {name: constants.pop(name) for name in OPTIONS if name in constants}
    compiled = triton.compile(source(kernel, args, constants), target=TARGET, options=options)
    program = compiled.asm["ptx"]
    weights = re.findall(r"ld\.global\S*evict_first\S*", program)  # nothing else is read once
    copies = re.findall(r"cp\.async\.c[ag]\.shared\.global.*", program)
    return {
        "rounds": compiled.asm["ttgir"].count("scf.for"),
        "shared": compiled.metadata.shared,
        "stores": program.count("st.shared"),
        "early": program[: program.rfind("mma.sync")].count("st.shared"),
        "weights": len(weights),
        "narrow": sum(".v4.b32" not in load for load in weights),
        "copies": len(copies),
        "narrow_copies": sum(", 0x10," not in copy for copy in copies),
    }


def run_gemm(rows: int, k: int, *, gated: bool = False, slices: int = 1, dtype: torch.dtype = torch.bfloat16) -> None:
    linear, x = Linear(k, 512).to(dtype), torch.empty(rows, k, dtype=dtype)
    linear.slices = slices
    gemm.gemm(linear, gemm.GemmInput(x), None, activation="silu" if gated else "", gated=gated, pdl=True)


def attention(head_dim: int) -> None:
    unused: Any = None
    sizes = {"heads": 4, "kv_heads": 2, "head_dim": head_dim, "scale": 0.1, "window": None}
    block = BlockParts(*(unused,) * 4, activation="", q_norm=None, k_norm=None, **sizes)
    qkv, turned = torch.empty(1, 8 * head_dim, dtype=torch.bfloat16), torch.empty(1, 2, head_dim)
    table, integers = torch.empty(1, 6, dtype=torch.int64), torch.empty(4, dtype=torch.int32)
    gpu_attention.attend_step(block, qkv, table, integers, integers, turned, pdl=True)


def prompt(head_dim: int, end: int, window: int | None = None) -> None:
    """Queries at the last positions of two rows."""
    q = torch.empty(9, 4, head_dim, dtype=torch.bfloat16)
    table = torch.empty(2, 6, dtype=torch.int64)
    tiles = gpu_attention.tiles_of([(end - 8, 8), (0, 1)], 32, q.device)
    gpu_attention.attend_rows(q, table, tiles, kv_heads=2, scale=0.1, window=window, pdl=True)


if __name__ == "__main__":
    launches: dict[str, Callable[[], None]] = {
        "eight rows, 512": lambda: run_gemm(8, 512, slices=2),
        "eight rows, 1024": lambda: run_gemm(8, 1024, slices=2),
        "eight rows, gated, 512": lambda: run_gemm(8, 512, gated=True, slices=4),
        "eight rows, gated, 1024": lambda: run_gemm(8, 1024, gated=True, slices=4),
        "attention, 64": lambda: attention(64),
        "attention, 128": lambda: attention(128),
        "attention, 256": lambda: attention(256),
        "prompt": lambda: prompt(64, 100),
        "long prompt": lambda: prompt(64, 10_000),
        "prompt, window": lambda: prompt(128, 100, 512),
        "few rows": lambda: run_gemm(9, 24, dtype=torch.float32),
        "many rows": lambda: run_gemm(300, 24, dtype=torch.float32),
        "few rows, in slices": lambda: run_gemm(9, 128, slices=4),
        "few rows, all slices": lambda: run_gemm(65, 128, slices=4),
        "few rows, gated": lambda: run_gemm(1, 512, gated=True),
    }
    with tempfile.TemporaryDirectory() as folder, triton.knobs.cache.scope():
        triton.knobs.cache.dir = folder
        print(json.dumps({name: code(launches[name]) for name in sys.argv[1:]}))
