"""infer on a GPU against transformers and the limits of the device, in one process, alternating.

Models have the shapes of published ones and random weights. The limit of a decode step is the time to read the weights
and the cache once, at the matrix-vector rate measured first in the same run. Every figure is printed, and written to
--json, as soon as it is measured; a second run with other --sections adds to the same file, from which --from-json
prints the tables again and --plot draws. --tiny runs everything with small sizes, on a CPU too, as a check.

transformers runs the shapes of --peers with infer's weights, with its dynamic cache; those of --compile also with its
static cache, which it compiles for.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import gpu_ceilings
import torch
import transformers
from engines import Engine, Trial, transformers_engine
from gpu_report import TABLES, Report, Row, command_line, formatted, goal_status, heading, plot, read
from gpu_shapes import (
    SAMPLING,
    SHAPES,
    NoText,
    build,
    cache_bytes,
    lengths,
    mean_cache_bytes,
    prefill_flops,
    random_prompt,
    step_weight_bytes,
    synchronize,
)

from infer.engine.generate import generate_batch, stream
from infer.engine.model import make_cache, step
from infer.engine.params import SamplingParams
from infer.evaluate.bench import check_plot, describe_machine
from infer.evaluate.verify import first_difference
from infer.loader.load import checkpoint_slots
from infer.machine import resolve_device, resolve_dtype
from infer.models.common import Decoder

INFER, EAGER = "infer", "infer, eager"
DYNAMIC, STATIC = "transformers, dynamic cache", "transformers, static + compile"

FULL: dict[str, Any] = {
    "shapes": ["llama-1b", "qwen3-1.7b", "gemma3-1b", "llama-8b"],
    "peers": ["llama-1b", "qwen3-1.7b"],
    "compile": ["llama-1b"],
    "trials": 3,
    "prompt_tokens": 256,
    "new_tokens": 256,
    "rows": [1, 8, 32],
    "row_lengths": [64, 512],
    "contexts": [512, 4096, 16_384, 32_768],
    "context_steps": 64,
    "prefill_tokens": 4096,
    "prefill_chunk": None,
    "matrix": (524_288, 4096),
    "products": [(8192, 8192, 8192), (4096, 2048, 16_384)],
    "repeats": 20,
}
TINY: dict[str, Any] = FULL | {
    "shapes": ["tiny", "tiny-qwen3", "tiny-gemma3"],
    "peers": ["tiny", "tiny-qwen3", "tiny-gemma3"],
    "compile": [],
    "trials": 2,
    "prompt_tokens": 12,
    "new_tokens": 12,
    "rows": [1, 3],
    "row_lengths": [4, 20],
    "contexts": [16, 64],
    "context_steps": 8,
    "prefill_tokens": 32,
    "prefill_chunk": 24,
    "matrix": (4096, 1024),
    "products": [(64, 64, 64)],
    "repeats": 5,
}

DECODE_GOALS = {
    "llama-1b": (0.75, 0.85),
    "qwen3-1.7b": (0.75, 0.85),
    "gemma3-1b": (0.60, 0.75),
    "llama-8b": (0.85, 0.92),
}
PEER_GOALS = {"llama-1b": {"ratio_to_gpt_fast": 1.45, "ratio_to_static": 2.8}}
BATCH_GOALS = {8: 8.0, 32: 20.0}
PREFILL_GOALS = {"llama-1b": 0.45, "llama-8b": 0.60}
CONTEXT_LOSS = 0.10
SAMPLING_GOAL = 0.97
START_GOALS = {"cold": 25.0, "warm": 6.0}
GPT_FAST = {"llama-1b": 809.0}  # tok/s measured earlier on an H200: gpt-fast is not run here

# GEMM kernels, and the GEMMs of a block in order.
GEMM_KERNELS = ("gemv", "gemm_small")
BLOCK_GEMMS = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
ATTENTION = "attend"
PROFILED_STEPS = 20


class Setup(NamedTuple):
    """What all sections share."""

    device: torch.device
    dtype: torch.dtype
    sizes: SimpleNamespace  # the options, by the names in FULL
    limits: dict[str, float]  # from `gpu_ceilings`

    @property
    def main(self) -> str:
        """The shape of sections that measure only one."""
        return str(self.sizes.shapes[0])

    def build(self, shape: str) -> Decoder:
        free(self.device)
        return build(shape, self.device, self.dtype)


def free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def infer_trial(
    model: Decoder, prompt: list[int], new_tokens: int, *, prefill_chunk: int | None = None, **sampling: Any
) -> Trial:
    params = SamplingParams(ignore_eos=True, max_new_tokens=new_tokens, **sampling)
    trial = Trial()
    for token in stream(model, NoText(), prompt, params, prefill_chunk=prefill_chunk):
        trial.add(token.token_id)
    return trial


def uncaptured() -> Callable[[], AbstractContextManager[None]] | None:
    """A context manager that disables captured steps; None without Triton, where nothing is captured."""
    if importlib.util.find_spec("triton") is None:
        return None
    from infer.backend.gpu import captured

    return captured.disabled


def transformers_twin(shape: str, model: Decoder) -> Any:
    """transformers' model with the same weights."""
    transformers.utils.logging.set_verbosity_error()
    config = transformers.AutoConfig.for_model(**deepcopy(SHAPES[shape]))
    with torch.device(model.device):
        twin = transformers.AutoModelForCausalLM.from_config(config, dtype=model.dtype).eval().requires_grad_(False)
    twin.generation_config = transformers.GenerationConfig()
    ours = dict(model.named_parameters())
    theirs = {name.removeprefix("model."): parameter for name, parameter in twin.named_parameters()}
    slots = checkpoint_slots(model, ())
    if theirs.keys() != slots.keys():
        raise ValueError(f"{shape}: weights of only one of the models: {sorted(theirs.keys() ^ slots.keys())[:3]}")
    for name, slot in slots.items():
        theirs[name].copy_(ours[slot.parameter][slot.start : slot.start + slot.shape[0]])
    return twin


def static_engine(twin: Any) -> Engine:
    """With a static cache, generate compiles the forward pass on a GPU."""
    settings = {"cache_implementation": "static"}
    return transformers_engine(SimpleNamespace(device=twin.device, generate=partial(twin.generate, **settings)))


def speed(trials: Sequence[Trial]) -> Row:
    """The median step of the median trial; and the mean, which shows whether tokens come in bursts."""
    step_s = statistics.median(statistics.median(trial.steps_s) for trial in trials)
    mean_s = statistics.median(statistics.fmean(trial.steps_s) for trial in trials)
    return {"tokens_per_s": 1 / step_s, "step_s": step_s, "mean_step_s": mean_s}


def against_limit(setup: Setup, step_bytes: float, row: Row, rows: int = 1) -> Row:
    limit_s = step_bytes / setup.limits[gpu_ceilings.MATRIX_VECTOR]
    return {
        "step_bytes": step_bytes,
        "matrix_vector_bytes_per_s": setup.limits[gpu_ceilings.MATRIX_VECTOR],
        "limit_tokens_per_s": rows / limit_s,
        "share_of_limit": limit_s / row["step_s"],
        "share_by_torch_mv": step_bytes / setup.limits[gpu_ceilings.TORCH_MV] / row["step_s"],
    }


def ceilings(setup: Setup) -> Iterator[Row]:
    sizes = setup.sizes
    rows = []
    for row in gpu_ceilings.measure(setup.device, setup.dtype, sizes.matrix, sizes.products, sizes.repeats):
        rows.append(row)
        yield row
    setup.limits.update(gpu_ceilings.best(rows))


def decode(setup: Setup) -> Iterator[Row]:
    for shape in setup.sizes.shapes:
        yield from decode_shape(setup, shape)


def decode_shape(setup: Setup, shape: str) -> list[Row]:
    sizes = setup.sizes
    model = setup.build(shape)
    prompt = random_prompt(model.config, sizes.prompt_tokens)
    engines: dict[str, Engine] = {INFER: partial(infer_trial, model)}
    if (disabled := uncaptured()) is not None:

        def eager(prompt: list[int], new_tokens: int) -> Trial:
            with disabled():
                return infer_trial(model, prompt, new_tokens)

        engines[EAGER] = eager
    if shape in sizes.peers:
        twin = transformers_twin(shape, model)
        engines[DYNAMIC] = transformers_engine(twin)
        if shape in sizes.compile:
            engines[STATIC] = static_engine(twin)
    warm_ups = {}
    for name, engine in list(engines.items()):
        started = time.perf_counter()
        try:
            engine(prompt, sizes.new_tokens)
        except Exception:
            if name in (INFER, EAGER):
                raise
            print(f"{shape}: {name} does not run here:\n{traceback.format_exc(limit=-2)}", flush=True)
            del engines[name]
        warm_ups[name] = time.perf_counter() - started
    trials: dict[str, list[Trial]] = {name: [] for name in engines}
    for _ in range(sizes.trials):
        for name, engine in engines.items():
            trials[name].append(engine(prompt, sizes.new_tokens))
    cache = mean_cache_bytes(model.config, sizes.prompt_tokens, sizes.new_tokens, setup.dtype.itemsize)
    step_bytes = step_weight_bytes(model) + cache
    return decode_rows(setup, shape, step_bytes, trials, warm_ups)


def decode_rows(
    setup: Setup, shape: str, step_bytes: float, trials: dict[str, list[Trial]], warm_ups: dict[str, float]
) -> list[Row]:
    rows: dict[str, Row] = {}
    for name, done in trials.items():
        row = {"shape": shape, "engine": name, "warm_up_s": warm_ups[name], **speed(done)}
        row["first_difference"] = first_difference(done[0].tokens, trials[INFER][0].tokens)
        rows[name] = row | against_limit(setup, step_bytes, row)
    peers = {"dynamic": rows.get(DYNAMIC, {}).get("tokens_per_s"), "static": rows.get(STATIC, {}).get("tokens_per_s")}
    peers["gpt_fast"] = GPT_FAST.get(shape)
    for row in rows.values():
        row |= {f"ratio_to_{peer}": row["tokens_per_s"] / theirs for peer, theirs in peers.items() if theirs}
    goals = [goal_status(rows[INFER]["share_of_limit"], *DECODE_GOALS.get(shape, (None,)))]
    for key, reach in PEER_GOALS.get(shape, {}).items():
        if key in rows[INFER]:
            goals.append(
                f"{key.removeprefix('ratio_').replace('_', ' ')} " + goal_status(rows[INFER][key], reach, form=".2f")
            )
    rows[INFER]["goal"] = "; ".join(filter(None, goals))
    return list(rows.values())


def batch(setup: Setup) -> Iterator[Row]:
    """Decode only: a step lasts until its last row has its token."""
    sizes = setup.sizes
    model = setup.build(setup.main)
    params = SamplingParams(ignore_eos=True, max_new_tokens=sizes.new_tokens)
    steps: dict[int, list[float]] = {count: [] for count in sizes.rows}
    means: dict[int, list[float]] = {count: [] for count in sizes.rows}
    for trial in range(1 + sizes.trials):
        for count in sizes.rows:
            prompts = [random_prompt(model.config, n, seed=i) for i, n in enumerate(lengths(count, *sizes.row_lengths))]
            started = time.perf_counter()
            results = generate_batch(model, NoText(), prompts, params)
            decode_s = time.perf_counter() - started - sum(result.timing.prefill_time_s for result in results)
            times = zip(*(result.timing.decode_times_s for result in results), strict=True)
            if trial:  # the first warms up
                steps[count].append(statistics.median(map(max, times)))
                means[count].append(decode_s / (sizes.new_tokens - 1))
    one_row = None
    for count in sizes.rows:
        step_s = statistics.median(steps[count])
        row = {"shape": setup.main, "rows": count, "tokens_per_s": count / step_s, "step_s": step_s}
        row["mean_step_s"] = statistics.median(means[count])
        cache = sum(
            mean_cache_bytes(model.config, n, sizes.new_tokens, setup.dtype.itemsize)
            for n in lengths(count, *sizes.row_lengths)
        )
        row |= against_limit(setup, step_weight_bytes(model) + cache, row, rows=count)
        if count == 1:
            one_row = row["tokens_per_s"]
        if one_row:
            row["ratio_to_one_row"] = row["tokens_per_s"] / one_row
            row["goal"] = goal_status(row["ratio_to_one_row"], BATCH_GOALS.get(count), form=".0f")
        yield row


def context(setup: Setup) -> Iterator[Row]:
    sizes = setup.sizes
    model = setup.build(setup.main)
    first = None
    for filled in sizes.contexts:
        prompt = random_prompt(model.config, filled)
        run = partial(infer_trial, model, prompt, sizes.context_steps, prefill_chunk=sizes.prefill_chunk)
        run()
        trials = [run() for _ in range(sizes.trials)]
        row = {"shape": setup.main, "context": filled, **speed(trials)}
        cache = mean_cache_bytes(model.config, filled, sizes.context_steps, setup.dtype.itemsize)
        row |= against_limit(setup, step_weight_bytes(model) + cache, row)
        if first is None:
            first = row["share_of_limit"]
        else:
            row["goal"] = goal_status(row["share_of_limit"], first - CONTEXT_LOSS, form=".1%")
        yield row


def prefill(setup: Setup) -> Iterator[Row]:
    sizes = setup.sizes
    for shape in sizes.shapes:
        model = setup.build(shape)
        prompt = random_prompt(model.config, sizes.prefill_tokens)
        passes = [prefill_seconds(model, prompt) for _ in range(2 + sizes.trials)][2:]
        firsts = [infer_trial(model, prompt, 1).prefill_s for _ in range(2 + sizes.trials)][2:]
        flops, rate = prefill_flops(model, sizes.prefill_tokens), setup.limits[gpu_ceilings.MATRIX]
        pass_s, first_s = statistics.median(passes), statistics.median(firsts)
        share = flops / pass_s / rate
        yield {
            "shape": shape,
            "tokens": sizes.prefill_tokens,
            "flops": flops,
            "matrix_flops_per_s": rate,
            "pass_s": pass_s,
            "flops_per_s": flops / pass_s,
            "share_of_rate": share,
            "first_token_s": first_s,
            "first_token_share_of_rate": flops / first_s / rate,
            "goal": goal_status(share, PREFILL_GOALS.get(shape)),
        }
        del model


@torch.inference_mode()
def prefill_seconds(model: Decoder, prompt: list[int]) -> float:
    cache = make_cache(model, len(prompt) + 1, model.device)
    tokens = torch.tensor([prompt], device=model.device)
    synchronize(model.device)
    started = time.perf_counter()
    step(model, cache, tokens)
    synchronize(model.device)
    return time.perf_counter() - started


def sampling(setup: Setup) -> Iterator[Row]:
    sizes = setup.sizes
    model = setup.build(setup.main)
    prompt = random_prompt(model.config, sizes.prompt_tokens)
    settings: dict[str, dict[str, Any]] = {"greedy": {}, "sampled": SAMPLING}
    trials: dict[str, list[Trial]] = {name: [] for name in settings}
    for trial in range(1 + sizes.trials):
        for name, values in settings.items():
            done = infer_trial(model, prompt, sizes.new_tokens, **values)
            if trial:
                trials[name].append(done)
    greedy = speed(trials["greedy"])["tokens_per_s"]
    for name, values in settings.items():
        row = {"shape": setup.main, "settings": name, "values": values, **speed(trials[name])}
        if values:
            row["ratio_to_greedy"] = row["tokens_per_s"] / greedy
            row["goal"] = goal_status(row["ratio_to_greedy"], SAMPLING_GOAL, form=".2f")
        yield row


def start(setup: Setup) -> Iterator[Row]:
    """A fresh process with an empty kernel cache, which then continues; and one with the filled kernel cache."""
    free(setup.device)
    with tempfile.TemporaryDirectory() as folder:
        for case in ("cold", "warm"):
            found = start_process(setup, Path(folder), again=case == "cold")
            row = {"shape": setup.main, "case": case, **found["start"]}
            yield row | {"goal": goal_status(row["first_s"], START_GOALS[case], form=".0f", lower_is_better=True)}
            for later in found["again"]:
                goal = goal_status(later["compiled"], 0, form="d", lower_is_better=True)
                yield {"shape": setup.main, **later, "case": f"then {later['case']}", "goal": goal}


def start_process(setup: Setup, triton_cache: Path, *, again: bool) -> dict[str, Any]:
    here = Path(__file__).resolve().parent
    paths = [str(here.parent / "src"), str(here), *filter(None, [os.environ.get("PYTHONPATH")])]
    command = [sys.executable, str(here / "gpu_start.py"), "--shape", setup.main, "--device", str(setup.device)]
    command += ["--dtype", str(setup.dtype).removeprefix("torch.")]
    command += ["--prompt-tokens", str(setup.sizes.prompt_tokens), *(["--again"] if again else [])]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "TRITON_CACHE_DIR": str(triton_cache)}
    command += ["--started", repr(time.time())]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise RuntimeError(f"gpu_start.py ended with {done.returncode}: {done.stderr.strip()[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


class Kernel(NamedTuple):
    """One run of a kernel, from a profile."""

    name: str
    grid: int  # programs
    us: float


def parts(setup: Setup) -> Iterator[Row]:
    sizes = setup.sizes
    for shape in sizes.shapes:
        model = setup.build(shape)
        prompt = random_prompt(model.config, sizes.prompt_tokens)
        infer_trial(model, prompt, sizes.new_tokens)
        step_s = speed([infer_trial(model, prompt, sizes.new_tokens)])["step_s"]
        kernels = profile(model, prompt)
        if not kernels:
            raise RuntimeError("the profiler saw no kernels: it cannot read the device's counters here")
        yield from part_rows(shape, model, sizes.prompt_tokens, step_s, kernels)
        del model


def profile(model: Decoder, prompt: list[int]) -> list[Kernel]:
    """The kernels of some decode steps, in order."""
    before = 8  # steps until everything is captured
    params = SamplingParams(ignore_eos=True, max_new_tokens=before + PROFILED_STEPS + 1)
    tokens = stream(model, NoText(), prompt, params)
    for _ in range(before):
        next(tokens)
    on_gpu = model.device.type == "cuda"
    kind = torch.profiler.ProfilerActivity.CUDA if on_gpu else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[kind]) as profiler:
        for _ in range(PROFILED_STEPS):
            next(tokens)
        synchronize(model.device)
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    kinds = ("kernel", "gpu_memcpy", "gpu_memset") if on_gpu else ("cpu_op",)
    events = sorted((event for event in events if event.get("cat") in kinds), key=lambda event: event["ts"])
    return [Kernel(event["name"], math.prod(event.get("args", {}).get("grid", (0,))), event["dur"]) for event in events]


def part_rows(shape: str, model: Decoder, prompt_tokens: int, step_s: float, kernels: Sequence[Kernel]) -> list[Row]:
    """A row per kernel and part of the model, if known; the longest first."""
    steps, named = split_steps(kernels, model.config.num_hidden_layers)
    groups: dict[tuple[str, str], list[float]] = defaultdict(list)
    for part, kernel in named:
        groups[part, kernel.name].append(kernel.us)
    sizes = part_bytes(model, prompt_tokens)
    rows = []
    for (part, name), times in groups.items():
        row = {"shape": shape, "part": part, "kernel": name, "calls": len(times) / steps, "us": statistics.fmean(times)}
        if part in sizes:
            row |= {"bytes": sizes[part], "bytes_per_s": sizes[part] / row["us"] * 1e6}
        rows.append(row | {"share_of_step": sum(times) / steps / 1e6 / step_s})
    rows.sort(key=lambda row: -row["share_of_step"])
    total = {"shape": shape, "part": "all", "kernel": f"of a step of {step_s * 1e3:.3f} ms", "step_s": step_s}
    total |= {key: sum(row[key] for row in rows) for key in ("calls", "share_of_step")}
    return [*rows, total]


def split_steps(kernels: Sequence[Kernel], layers: int) -> tuple[float, list[tuple[str, Kernel]]]:
    """The number of complete steps, and their kernels, each with the part of the model that it computes, or "".

    All GEMMs are the same kernel, so they are identified by their order. The head has the most programs, and a step
    ends with it. If a profile does not match, no part is named.
    """
    gemms = [i for i, kernel in enumerate(kernels) if kernel.name.startswith(GEMM_KERNELS)]
    most = max((kernels[i].grid for i in gemms), default=0)
    heads = [i for i in gemms if kernels[i].grid == most]
    per_step = len(BLOCK_GEMMS) * layers + 1
    steps = [kernels[begin + 1 : end + 1] for begin, end in pairwise(heads)]
    if not steps or any(
        sum(k.name.startswith(GEMM_KERNELS) for k in kernels_of_step) != per_step for kernels_of_step in steps
    ):
        return PROFILED_STEPS, [(_attention(kernel), kernel) for kernel in kernels]
    named = []
    for kernels_of_step in steps:
        order = iter([*BLOCK_GEMMS * layers, "lm_head"])
        for kernel in kernels_of_step:
            named.append((next(order) if kernel.name.startswith(GEMM_KERNELS) else _attention(kernel), kernel))
    return len(steps), named


def _attention(kernel: Kernel) -> str:
    return "attention" if kernel.name.startswith(ATTENTION) else ""


def part_bytes(model: Decoder, prompt_tokens: int) -> dict[str, float]:
    """Bytes that one call of each part reads; for the cache, the mean over the layers."""
    layer: Any = model.layers[0]
    modules = {
        "qkv_proj": layer.self_attn.qkv_proj,
        "o_proj": layer.self_attn.o_proj,
        "gate_up_proj": layer.mlp.gate_up_proj,
        "down_proj": layer.mlp.down_proj,
        "lm_head": model.lm_head,
    }
    read: dict[str, float] = {part: module.weight.nbytes for part, module in modules.items()}
    keys = prompt_tokens + 8 + PROFILED_STEPS // 2
    cache = cache_bytes(model.config, keys, model.dtype.itemsize)
    return read | {"attention": cache / model.config.num_hidden_layers}


SECTIONS: dict[str, Callable[[Setup], Iterator[Row]]] = {
    "ceilings": ceilings,
    "decode": decode,
    "batch": batch,
    "context": context,
    "prefill": prefill,
    "sampling": sampling,
    "start": start,
    "parts": parts,
}
WITH_A_LIMIT = {"decode", "batch", "context", "prefill"}


def run(setup: Setup, chosen: Sequence[str], report: Report) -> bool:
    """Whether all sections passed. After a section fails, the others still run."""
    if WITH_A_LIMIT & set(chosen):
        chosen = ["ceilings", *chosen]
    passed = True
    for name in (name for name in SECTIONS if name in chosen):
        table = TABLES[name]
        print(f"\n{table.header()}", flush=True)
        started = time.perf_counter()
        try:
            for row in SECTIONS[name](setup):
                report.add(name, row)
                print(table.line(row), flush=True)
        except Exception as error:
            if name == "ceilings":
                raise
            traceback.print_exc()
            row = {"error": f"{type(error).__name__}: {error}".partition("\n")[0]}
            report.add(name, row)
            print(table.line(row), flush=True)
            passed = False
        took = f"({time.perf_counter() - started:.0f} s)"
        print(f"{table.note}\n{took}" if table.note else took, flush=True)
        free(setup.device)
    return passed


def describe(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    machine = describe_machine(device) | {"dtype": str(dtype).removeprefix("torch.")}
    for package in ("triton", "transformers"):
        try:
            machine[package] = version(package)
        except PackageNotFoundError:
            machine[package] = None
    return machine


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--device", default="cuda", help="(%(default)s)")
    parser.add_argument("--dtype", default="auto", help="auto: bfloat16 on a GPU (%(default)s)")
    parser.add_argument(
        "--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="(all); ceilings come with a limit"
    )
    parser.add_argument("--tiny", action="store_true", help="small models and sizes, as a check")
    parser.add_argument("--json", type=Path, metavar="FILE", help="add the figures to this JSON file")
    parser.add_argument("--from-json", type=Path, metavar="FILE", help="print the tables of FILE, without measuring")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw tok/s and share of the limit as a PNG")
    for name, what in (
        ("shapes", "of decode, prefill and parts; the first is that of the other sections"),
        ("peers", "shapes that transformers runs too"),
        ("compile", "of these, shapes that it also runs with its static cache, compiled"),
    ):
        parser.add_argument(f"--{name}", nargs="*", choices=SHAPES, help=f"{what} ({' '.join(FULL[name])})")
    for name, what in (
        ("trials", "per engine, alternating"),
        ("prompt-tokens", "of decode, sampling, start and parts"),
        ("new-tokens", "of decode, batch, sampling and parts"),
        ("context-steps", "tokens to generate in context"),
        ("prefill-tokens", "prompt of prefill"),
        ("prefill-chunk", "tokens of a pass that fills a context"),
    ):
        default = FULL[name.replace("-", "_")] or "all"
        parser.add_argument(f"--{name}", type=int, help=f"{what} ({default})")
    parser.add_argument("--rows", type=int, nargs="+", help=f"of batch ({' '.join(map(str, FULL['rows']))})")
    parser.add_argument("--contexts", type=int, nargs="+", help=f"({' '.join(map(str, FULL['contexts']))})")
    return parser


def check_sizes(sizes: SimpleNamespace) -> None:
    """Refuse invalid sizes before anything is measured. Two new tokens, because the first belongs to the prefill."""
    if not sizes.shapes:
        raise ValueError("--shapes needs at least one")
    least = {"trials": 1, "prompt_tokens": 2, "new_tokens": 2, "context_steps": 2, "prefill_tokens": 1}
    least |= {"rows": 1, "contexts": 1}
    for name, smallest in least.items():
        given = getattr(sizes, name)
        if min(given if isinstance(given, list) else [given]) < smallest:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {smallest}, not {given}")
    for shape in sizes.shapes:
        needed = {
            "--prompt-tokens and --new-tokens": sizes.prompt_tokens + sizes.new_tokens,
            "--prefill-tokens": sizes.prefill_tokens + 1,
        }
        if shape == sizes.shapes[0]:
            needed["--contexts and --context-steps"] = max(sizes.contexts) + sizes.context_steps
            needed["--new-tokens with a batch's prompts"] = max(sizes.row_lengths) + sizes.new_tokens
        context = SHAPES[shape]["max_position_embeddings"]
        for options, positions in needed.items():
            if positions > context:
                raise ValueError(f"{options} need {positions:,} positions, but {shape} has {context:,}")


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser()
    args = parser.parse_args(argv)
    try:
        if args.plot is not None:
            check_plot()
        for path in (args.json, args.plot):
            if path is not None and not path.parent.is_dir():
                raise ValueError(f"there is no folder {path.parent}")
        if args.from_json is not None:
            values = read(args.from_json)
            print(formatted(values))
            if args.plot is not None:
                plot(values, args.plot)
            return
        given = {name: value for name in FULL if (value := getattr(args, name, None)) is not None}
        sizes = SimpleNamespace(**(TINY if args.tiny else FULL) | given)
        check_sizes(sizes)
        device = resolve_device(args.device)
        dtype = resolve_dtype(args.dtype, device)
        report = Report(describe(device, dtype), command_line("compare.py", argv, "--json", "--plot"), args.json)
    except (ValueError, OSError, ImportError) as error:
        parser.error(str(error))
    print(heading(report.values["machine"], report.values["commands"][-1:]), flush=True)
    passed = run(Setup(device, dtype, sizes, {}), args.sections, report)
    if args.plot is not None:
        plot(report.values, args.plot)
    if not passed:
        sys.exit(1)


if __name__ == "__main__":
    main()
