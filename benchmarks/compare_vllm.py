"""infer beside vLLM on one GPU: the same weights and requests, each engine through its `LLM` in a process of its own.

start   seconds from the start of the process until the engine is ready, and to the end of its first request
first   milliseconds until all rows have two tokens after their prompts of 256
decode  tokens per second of all rows, by the difference between 256 and two tokens
long    seconds until a prompt of 32,768 tokens has two tokens after it
nano    nano-vllm's benchmark: 256 requests at once, output tokens per second; three runs in a process

Weights are random, in the format of published models. No prompt is used twice. infer samples with a seed for each
request; vLLM without, which is faster there (--seeds: with them). `vllm-invariant` is its batch-invariant mode. Both
engines run in the process that asks them; VLLM_ENABLE_V1_MULTIPROCESSING=1 gives vLLM's one of its own. Memory follows
the settings: vLLM takes 80 % of the device, infer half of what is free. What an engine has compiled before, it reuses.

vLLM runs wherever it can be imported: `pip install vllm` in an environment of its own, and infer beside it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

STARTED = time.perf_counter()
ENGINES = ("infer", "vllm", "vllm-invariant")
SECTIONS = ("start", "first", "decode", "long", "nano")
# tokens: ids that prompts are drawn from
FULL: dict[str, Any] = {
    "rows": [1, 8, 32, 128],
    "prompt": 256,
    "new": 256,
    "long": 32_768,
    "nano": (256, 100, 1024),
    "tokens": 10_000,
}
TINY: dict[str, Any] = {"rows": [1, 3], "prompt": 12, "new": 8, "long": 64, "nano": (4, 5, 20), "tokens": 60}
REPEATS, NANO_RUNS = 3, 3
Generate = Callable[[list[list[int]], list[dict[str, Any]]], None]  # prompts, and settings of each


def infer_engine(folder: Path, sizes: dict[str, Any], seeds: bool) -> Generate:
    from gpu_shapes import NoText

    from infer import LLM, SamplingParams, load_model

    llm = LLM(load_model(str(folder))[0], NoText())

    def generate(prompts: list[list[int]], settings: list[dict[str, Any]]) -> None:
        llm.generate(prompts, [SamplingParams(ignore_eos=True, **each) for each in settings])

    return generate


def vllm_engine(folder: Path, sizes: dict[str, Any], seeds: bool) -> Generate:
    os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")  # it is compiled with a CUDA toolkit
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found, unused-ignore]

    length = sizes["long"] + 64
    llm = LLM(
        str(folder),
        skip_tokenizer_init=True,
        max_model_len=max(length, 4096),
        gpu_memory_utilization=0.8,
        enable_prefix_caching=False,
        max_num_seqs=256,
        disable_log_stats=True,
    )

    def generate(prompts: list[list[int]], settings: list[dict[str, Any]]) -> None:
        params = [
            SamplingParams(
                max_tokens=each["max_new_tokens"],
                temperature=each["temperature"],
                seed=each.get("seed") if seeds else None,
                ignore_eos=True,
                detokenize=False,
            )
            for each in settings
        ]
        llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)

    return generate


def measure(engine: str, folder: Path, sizes: dict[str, Any], seeds: bool, chosen: Sequence[str]) -> Iterator[Any]:
    """(section, what, figure, unit) of one engine."""
    import torch

    rng = random.Random(0)

    def timed(prompts: list[list[int]], settings: list[dict[str, Any]]) -> float:
        begin = time.perf_counter()
        generate(prompts, settings)
        return time.perf_counter() - begin

    def greedy(rows: int, length: int, new: int) -> float:
        prompts = [[rng.randrange(5, sizes["tokens"]) for _ in range(length)] for _ in range(rows)]
        return timed(prompts, [{"max_new_tokens": new, "temperature": 0.0}] * rows)

    generate = (infer_engine if engine == "infer" else vllm_engine)(folder, sizes, seeds)
    ready_s = time.perf_counter() - STARTED
    greedy(1, sizes["prompt"], 2)
    if "start" in chosen:
        yield "start", "engine is ready", ready_s, "s"
        yield "start", "first request is done", time.perf_counter() - STARTED, "s"
    for rows in sizes["rows"] if {"first", "decode"} & {*chosen} else ():
        for _ in range(3):  # whatever is compiled or captured by size
            greedy(rows, sizes["prompt"], 2)
        first = min(greedy(rows, sizes["prompt"], 2) for _ in range(REPEATS))
        name = f"{rows} row{'s' * (rows > 1)}"
        if "first" in chosen:
            yield "first", name, first * 1e3, "ms"
        if "decode" in chosen:
            whole = min(greedy(rows, sizes["prompt"], sizes["new"]) for _ in range(REPEATS))
            yield "decode", name, rows * (sizes["new"] - 2) / (whole - first), "tok/s"
    if "long" in chosen:
        greedy(1, sizes["long"], 2)
        yield "long", f"{sizes['long']:,} tokens", min(greedy(1, sizes["long"], 2) for _ in range(2)), "s"
    for run in range(NANO_RUNS) if "nano" in chosen else ():
        count, low, high = sizes["nano"]
        drawn = random.Random(run)
        prompts = [[drawn.randint(5, sizes["tokens"]) for _ in range(drawn.randint(low, high))] for _ in range(count)]
        settings = [{"temperature": 0.6, "seed": i, "max_new_tokens": drawn.randint(low, high)} for i in range(count)]
        seconds = timed(prompts, settings)
        speed = sum(each["max_new_tokens"] for each in settings) / seconds
        yield "nano", f"{count} requests, run {run + 1}", speed, "tok/s"
        if torch.cuda.is_available():
            free, total = torch.cuda.mem_get_info()
            yield "memory", f"after run {run + 1}", (total - free) / 1e9, "GB"


def write_weights(shape: str, folder: Path) -> None:
    """As transformers writes them, from where both engines read them."""
    import torch
    import transformers
    from gpu_shapes import SHAPES

    config = transformers.AutoConfig.for_model(**SHAPES[shape])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16 if device == "cuda" else torch.float32)
    with torch.device(device):
        model: Any = transformers.AutoModelForCausalLM
        model.from_config(config).save_pretrained(folder)


def run(engine: str, shape: str, folder: Path, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The figures of an engine, from a process of its own."""
    command = [sys.executable, __file__, "--run", engine, "--folder", str(folder), "--sections", *args.sections]
    command += ["--tiny"] * args.tiny + ["--seeds"] * args.seeds
    environment = os.environ | ({"VLLM_BATCH_INVARIANT": "1"} if engine == "vllm-invariant" else {})
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith('{"section"'):
                yield {"engine": engine, "shape": shape} | json.loads(line)
    if process.returncode:
        raise SystemExit(f"{engine} ended with exit status {process.returncode}")


def table(rows: Sequence[dict[str, Any]], engines: Sequence[str]) -> str:
    """A line per shape and figure; ratios above 1: infer is faster, or needs less."""
    found: dict[tuple[str, str, str, str], dict[str, float]] = {}
    for row in rows:
        found.setdefault((row["shape"], row["section"], row["what"], row["unit"]), {})[row["engine"]] = row["figure"]
    others = [engine for engine in engines if engine != "infer"]
    lines = ["".join([f"{'shape':<12} {'section':<8} {'what':<24}", *(f"{each:>15}" for each in engines)])]
    lines[0] += "".join(f"  to {each}" for each in others)
    for (shape, section, what, unit), figures in found.items():
        digits = 0 if unit == "tok/s" else 1 if unit in ("ms", "GB") else 2
        cells = [f"{figures[each]:,.{digits}f} {unit}" if each in figures else "" for each in engines]
        line = f"{shape:<12} {section:<8} {what:<24}" + "".join(f"{cell:>15}" for cell in cells)
        for each in others:
            ratio = figures.get("infer", 0) / figures[each] if figures.get(each) and section != "memory" else 0
            ratio = 1 / ratio if ratio and unit != "tok/s" else ratio
            line += f"{f'{ratio:.2f}x' if ratio else '':>{len(each) + 5}}"
        lines.append(line)
    return "\n".join(lines)


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """How many times as fast as vLLM infer is, by shape and section."""
    import matplotlib.pyplot as plt

    figures = {(row["engine"], row["shape"], row["section"], row["what"]): row["figure"] for row in rows}
    other = next((row["engine"] for row in rows if row["engine"] != "infer"), "vllm")
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    shown = [s for s in SECTIONS if s != "start" and any(key[2] == s for key in figures)]
    figure, axes = plt.subplots(1, max(1, len(shown)), figsize=(4 * max(1, len(shown)), 4), squeeze=False)
    for axis, section in zip(axes[0], shown, strict=False):
        names = list(dict.fromkeys(key[3] for key in figures if key[2] == section))
        for i, shape in enumerate(shapes):
            pairs = [(figures.get((e, shape, section, name)) for e in ("infer", other)) for name in names]
            ratios = [
                0 if not (own and their) else own / their if section in ("decode", "nano") else their / own
                for own, their in pairs
            ]
            axis.bar([x + i / (len(shapes) + 1) for x in range(len(names))], ratios, 1 / (len(shapes) + 1), label=shape)
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set_xticks(range(len(names)), names, rotation=30, ha="right")
        axis.set_title(f"{section}: times the speed of {other}")
    axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["llama-1b", "qwen3-0.6b", "llama-8b"], help="of gpu_shapes.py")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=["infer", "vllm"])
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=[*SECTIONS])
    parser.add_argument("--seeds", action="store_true", help="vLLM samples with seeds, too")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and few tokens, on a CPU too, as a check")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures into this file")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the ratios as a PNG")
    parser.add_argument("--run", choices=ENGINES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser


def main() -> None:
    parser = make_parser()
    args = parser.parse_args()
    sizes = TINY if args.tiny else FULL
    if args.run:
        for section, what, figure, unit in measure(args.run, args.folder, sizes, args.seeds, args.sections):
            print(json.dumps({"section": section, "what": what, "figure": figure, "unit": unit}), flush=True)
        return
    if any(engine != "infer" for engine in args.engines) and importlib.util.find_spec("vllm") is None:
        parser.error("vLLM is not installed: pip install vllm, or leave it out by --engines infer")
    from gpu_shapes import SHAPES

    shapes = ["tiny"] if args.tiny else args.shapes
    if unknown := [shape for shape in shapes if shape not in SHAPES]:
        parser.error(f"unknown shapes {', '.join(unknown)}: there are {', '.join(SHAPES)}")
    rows: list[dict[str, Any]] = []
    for shape in shapes:
        with tempfile.TemporaryDirectory() as folder:
            write_weights(shape, Path(folder))
            for engine in args.engines:
                for row in run(engine, shape, Path(folder), args):
                    rows.append(row)
                    print(f"{shape} {engine} {row['what']}: {row['figure']:,.2f} {row['unit']}", file=sys.stderr)
                    if args.json is not None:
                        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    print(table(rows, args.engines))
    if args.plot is not None:
        plot(rows, args.plot)


if __name__ == "__main__":
    main()
