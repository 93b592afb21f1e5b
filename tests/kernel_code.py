"""Run by itself, without Triton's interpreter: compiles GPU kernels, as `ops` launches them, where there is no GPU.

Prints what became of each as JSON: `rounds` (loops), `shared` (bytes of memory that threads share), `stores` (into it),
and of these `early` (before the last matrix product).
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from infer import kernels
from infer.kernels import gpu_exact, gpu_rows, gpu_warps
from infer.ops import exact_gpu, gpu_attention, gpu_product
from infer.ops.linear import Linear
from infer.ops.parts import BlockParts

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

    class Launcher:
        def __init__(self, kernel: Any) -> None:
            self._kernel = kernel

        def __getitem__(self, grid: Any) -> Callable[..., None]:
            return lambda *args, **constants: launched.append((self._kernel, args, constants))

    def launchers(module: Any) -> SimpleNamespace:
        return SimpleNamespace(**{name: Launcher(getattr(module, name, None)) for name in vars(module)})

    modules = {"rows": gpu_rows, "exact": gpu_exact, "warps": gpu_warps}
    kernels.gpu_modules = lambda: SimpleNamespace(**{name: launchers(module) for name, module in modules.items()})
    launch()
    [(kernel, args, constants)] = launched
    options = {name: constants.pop(name) for name in OPTIONS if name in constants}
    compiled = triton.compile(source(kernel, args, constants), target=TARGET, options=options)
    program = compiled.asm["ptx"]
    return {
        "rounds": compiled.asm["ttgir"].count("scf.for"),
        "shared": compiled.metadata.shared,
        "stores": program.count("st.shared"),
        "early": program[: program.rfind("mma.sync")].count("st.shared"),
    }


def product_of_eight(k: int, gated: bool) -> None:
    linear, x = Linear(k, 512).bfloat16(), torch.empty(8, k, dtype=torch.bfloat16)
    gpu_product._several_rows(linear, x, None, x, "silu" if gated else "", gated, True)


def attention(head_dim: int) -> None:
    unused: Any = None
    sizes = {"heads": 4, "kv_heads": 2, "head_dim": head_dim, "scale": 0.1, "window": None}
    block = BlockParts(*(unused,) * 6, activation="", q_norm=None, k_norm=None, **sizes)
    qkv, turned = torch.empty(1, 8 * head_dim, dtype=torch.bfloat16), torch.empty(1, 2, head_dim)
    table, integers = torch.empty(1, 6, dtype=torch.int64), torch.empty(4, dtype=torch.int32)
    gpu_attention.attend(block, qkv, table, integers, integers, turned, pdl=True)


def exact_product(rows: int) -> None:
    """All columns at once, and a residual."""
    exact_gpu.product(Linear(24, 24), torch.empty(rows, 24), residual=torch.empty(rows, 24), pdl=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, triton.knobs.cache.scope():
        triton.knobs.cache.dir = folder
        found = {
            "eight rows, 512": code(lambda: product_of_eight(512, False)),
            "eight rows, 1024": code(lambda: product_of_eight(1024, False)),
            "eight rows, gated, 512": code(lambda: product_of_eight(512, True)),
            "eight rows, gated, 1024": code(lambda: product_of_eight(1024, True)),
            "attention, 64": code(lambda: attention(64)),
            "attention, 128": code(lambda: attention(128)),
            "exact, few rows": code(lambda: exact_product(3)),
            "exact, many rows": code(lambda: exact_product(300)),
        }
    print(json.dumps(found))
