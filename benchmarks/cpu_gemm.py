"""GEMMs and attention of the CPU kernels against torch: times, ratios, and whether bits depend on the number of rows.

    PYTHONPATH=src python benchmarks/cpu_gemm.py [--threads N] [--quick]

Each line is one shape, with the fastest of several alternating runs of both. "equal": some rows have the same bits
alone, among 8, and among all. Ratios below 1: the kernels are faster.

The kernels use the CPU features that numba reports. To run without AMX on a core that has it:

    NUMBA_CPU_NAME=cascadelake NUMBA_CPU_FEATURES=+avx512f,+avx512bw,+avx512vl,+avx512vnni,+fma,+f16c python ...
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from infer.backend.cpu import kernels
from infer.backend.cpu.ops import weight_record
from infer.cache.table import Table
from infer.nn.quantized import QuantizedWeight

SMOLLM2 = [(960, 576), (576, 576), (3072, 576), (576, 1536), (49152, 576)]
LLAMA_1B = [(3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192)]
SECONDS = 0.3  # of each measurement


def fastest(*functions: Callable[[], object]) -> list[float]:
    """The minimum milliseconds of each, alternating: in the first run, threads of another pool may still spin."""
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(3):
        for function, its in zip(functions, times, strict=True):
            function()
            end = time.perf_counter() + SECONDS / 3
            while time.perf_counter() < end or not its:
                start = time.perf_counter()
                function()
                its.append(time.perf_counter() - start)
    return [min(its) * 1e3 for its in times]


def gemm_call(weight: Tensor | QuantizedWeight, x: Tensor, out: Tensor) -> Callable[[], None]:
    record = weight_record(weight, None)
    return lambda: kernels().linear(record, x, out)


def gemm_output(weight: Tensor | QuantizedWeight, x: Tensor) -> Tensor:
    out = torch.full((len(x), weight.shape[0]), torch.nan)
    gemm_call(weight, x, out)()
    return out


def rows_are_equal(weight: Tensor | QuantizedWeight, x: Tensor) -> bool:
    """Whether rows have the same bits alone, among 8, and among all."""
    full = gemm_output(weight, x)
    for start in {0, len(x) // 3, max(0, len(x) - 8)}:
        among = slice(start, start + 8)
        if not torch.equal(gemm_output(weight, x[among].clone()), full[among]):
            return False
        if not torch.equal(gemm_output(weight, x[start : start + 1].clone())[0], full[start]):
            return False
    return True


def measure_gemm(shapes: list[tuple[int, int]], counts: list[int]) -> None:
    print("\nGEMM: milliseconds of the kernels and of F.linear in float32, and of the kernels with a bf16 weight")
    print(f"{'shape':>13} {'rows':>5} {'ours':>9} {'torch':>9} {'ratio':>6} {'GFLOP/s':>8} {'bf16':>9}  bits")
    for rows, columns in shapes:
        weight = torch.randn(rows, columns)
        narrow, half = weight.bfloat16(), weight.half()
        for count in counts:
            x = torch.randn(count, columns)
            out = torch.empty(count, rows)
            theirs = partial(F.linear, x, weight)
            ours, torchs, bf16 = fastest(gemm_call(weight, x, out), theirs, gemm_call(narrow, x, out))
            equal = all(rows_are_equal(w, x) for w in (weight, narrow, half))
            close = torch.allclose(gemm_output(weight, x), F.linear(x, weight), atol=1e-2, rtol=1e-3)
            rate = 2e-6 * rows * columns * count / ours
            print(
                f"{f'{rows}x{columns}':>13} {count:>5} {ours:>9.3f} {torchs:>9.3f} {ours / torchs:>6.2f} {rate:>8.0f} "
                f"{bf16:>9.3f}  {'equal' if equal else 'NOT EQUAL'}{'' if close else ', WRONG'}",
                flush=True,
            )


def measure_quantized_gemm(shapes: list[tuple[int, int]], counts: list[int]) -> None:
    print("\nGEMM with weights of 4 and 8 bits: milliseconds, and the ratio to F.linear in float32")
    print(f"{'shape':>13} {'rows':>5} {'int4':>9} {'ratio':>6} {'int8':>9} {'ratio':>6}  bits")
    for rows, columns in shapes:
        weight = torch.randn(rows, columns)
        four, eight = (QuantizedWeight.of(weight, kind) for kind in ("int4", "int8"))
        for count in counts:
            x, out = torch.randn(count, columns), torch.empty(count, rows)
            torchs = partial(F.linear, x, weight)
            by_four, by_eight, theirs = fastest(gemm_call(four, x, out), gemm_call(eight, x, out), torchs)
            equal = all(rows_are_equal(w, x) for w in (four, eight))
            print(
                f"{f'{rows}x{columns}':>13} {count:>5} {by_four:>9.3f} {by_four / theirs:>6.2f} {by_eight:>9.3f} "
                f"{by_eight / theirs:>6.2f}  {'equal' if equal else 'NOT EQUAL'}",
                flush=True,
            )


def measure_attention(heads: int, kv_heads: int, size: int, count: int, keys: int) -> None:
    """Attention of the last `count` of `keys` positions."""
    q = torch.randn(1, heads, count, size)
    k, v = torch.randn(1, kv_heads, keys, size), torch.randn(1, kv_heads, keys, size)
    shape = heads, kv_heads, size, size**-0.5
    visible = np.array([(0, keys - count + 1 + t) for t in range(count)])
    lines = q.transpose(1, 2).reshape(count, -1).contiguous()
    table = Table([k], [v]).at(0)

    def attend(part: slice) -> Tensor:
        out, queries = torch.full((len(visible[part]), heads * size), torch.nan), lines[part].contiguous()
        blocks = kernels().query_blocks([len(out)])
        arguments = queries, heads * size * 4, table, blocks, len(blocks), visible[part].copy()
        kernels().attend(*shape, *arguments, out)
        return out

    def torchs() -> Tensor:
        causal = count == keys and count > 1
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=heads != kv_heads)

    ours, theirs = fastest(lambda: attend(slice(None)), torchs)
    full = attend(slice(None))
    equal = all(torch.equal(attend(slice(t, t + 1))[0], full[t]) for t in range(count))
    close = torch.allclose(full, torchs()[0].transpose(0, 1).reshape(count, -1), atol=1e-4)
    print(
        f"{heads:>6} {kv_heads:>8} {size:>5} {count:>8} {keys:>6} {ours:>9.3f} {theirs:>9.3f} {ours / theirs:>6.2f}  "
        f"{'equal' if equal else 'NOT EQUAL'}{'' if close else ', WRONG'}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--quick", action="store_true", help="SmolLM2's shapes, without its head, and less time for each"
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 512])
    arguments = parser.parse_args()
    global SECONDS
    SECONDS = 0.1 if arguments.quick else SECONDS
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    start = time.perf_counter()
    if kernels() is None:
        raise SystemExit("there are no kernels")
    kernels().use_threads(arguments.threads)
    from infer.backend.cpu import tile

    shape = f"{tile.W_ROWS} rows of W x {tile.X_ROWS} of x, registers of {tile.WIDTH} floats"
    print(f"{arguments.threads} threads, torch {torch.__version__} ({torch.backends.cpu.get_cpu_capability()})")
    print(f"kernels ready after {time.perf_counter() - start:.1f} s; tiles of {shape}")
    with torch.inference_mode():
        shapes = SMOLLM2[:4] if arguments.quick else SMOLLM2 + LLAMA_1B
        measure_gemm(shapes, arguments.rows)
        measure_quantized_gemm(shapes, arguments.rows)
        print("\nattention: milliseconds of the kernels and of SDPA; bits: of each query alone and among all")
        print(
            f"{'heads':>6} {'kv_heads':>8} {'size':>5} {'queries':>8} {'keys':>6} {'ours':>9} {'torch':>9} {'ratio':>6}"
        )
        for heads, kv_heads, size in ((9, 3, 64),) if arguments.quick else ((9, 3, 64), (32, 8, 64), (16, 8, 128)):
            for count, keys in ((512, 512), (1, 512), (1, 4096)):
                measure_attention(heads, kv_heads, size, count, keys)


if __name__ == "__main__":
    main()
