"""Measure generation: time to the first token, time per decode step, and memory.

`run` measures one setting; `report`, `format_table` and `plot` show what came out. Generation is greedy and passes over
end-of-sequence tokens, so that every trial does the same work.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Protocol

import torch

from infer.config import ModelConfig
from infer.engine.generate import generate
from infer.engine.model import Model, model_device, model_dtype, weight_bytes
from infer.engine.params import SamplingParams
from infer.engine.request import check_chunk, check_request
from infer.engine.result import GenerationResult
from infer.engine.text import Decodes, Encodes, encode_readable
from infer.nn.quantized import QuantizedWeight
from infer.version import install

SUITE = {"short": (32, 32), "medium": (128, 64), "long": (512, 64)}  # prompt tokens, new tokens

CURVES = {True: ("with the KV cache", "#0072b2"), False: ("without it: all recomputed", "#d55e00")}

PROMPT = (
    "A lighthouse keeper once wrote down everything that passed his window: the ships and their flags, the weather, "
    "the birds that rested on the rail, and the hour at which the lamp was lit. When the book was full he began "
    "another, and it is from these books that we know how the coast changed over forty years. "
)


class BenchTokenizer(Encodes, Decodes, Protocol): ...


MOST_TRIALS = 10**6  # more would never end


@dataclass(frozen=True)
class BenchConfig:
    prompt_tokens: int = 64
    new_tokens: int = 128
    trials: int = 3
    warmup: int = 1
    use_kv_cache: bool = True
    prefill_chunk: int | None = None
    cache_dtype: str = "auto"  # or "int8"
    on_full: str = "error"  # or "recompute", to go on beyond the model's context

    def __post_init__(self) -> None:
        check_chunk(self.prefill_chunk)
        if self.prefill_chunk is not None and not self.use_kv_cache:
            raise ValueError("prefill_chunk needs the cache: leave it or use_kv_cache=False out")
        if self.cache_dtype != "auto" and not self.use_kv_cache:
            raise ValueError("cache_dtype needs the cache: leave it or use_kv_cache=False out")
        # Two new tokens, because the first belongs to the prefill.
        for name, least in (("prompt_tokens", 1), ("new_tokens", 2), ("trials", 1), ("warmup", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, not {getattr(self, name)}")
        if max(self.trials, self.warmup) > MOST_TRIALS:
            raise ValueError(f"trials and warmup must be at most {MOST_TRIALS:,} each")


@dataclass(frozen=True)
class StepTimes:
    """Milliseconds per decode step."""

    mean: float
    p50: float
    p95: float
    p99: float
    min: float
    max: float

    @classmethod
    def of(cls, times_ms: Sequence[float]) -> StepTimes:
        p50, p95, p99 = torch.tensor(times_ms, dtype=torch.float64).quantile(_QUANTILES).tolist()
        return cls(statistics.fmean(times_ms), p50, p95, p99, min(times_ms), max(times_ms))


_QUANTILES = torch.tensor([0.5, 0.95, 0.99], dtype=torch.float64)


@dataclass(frozen=True)
class BenchResult:
    config: BenchConfig
    dtype: str
    weight_bits: list[int]  # of weights that are kept in fewer than the dtype has: 16, or 4 and 8; empty: none are
    ttft_ms: float  # median; the prefill and the first token's choice
    prompt_tokens_per_s: float  # median
    decode_time_s: float  # median trial, the first token apart
    decode_tokens_per_s: float  # median trial
    step_ms: StepTimes  # over the steps of all trials
    weight_bytes: int
    cache_bytes: int
    peak_memory_bytes: int | None  # on a GPU, what was allocated there; else resident memory; None: unknown
    positions: list[int]  # of the token each step feeds
    step_times_ms: list[float]  # of the median trial, one per position
    token_ids: list[int]


def check(model_config: ModelConfig, config: BenchConfig) -> None:
    """Refuse a setting that the model's context cannot hold, as `run` would: for asking about a whole suite first."""
    check_request(model_config, [0] * config.prompt_tokens, _params(config), on_full=config.on_full)


def run(
    model: Model,
    tokenizer: BenchTokenizer,
    config: BenchConfig,
    progress: Callable[[str], None] = lambda message: None,
) -> BenchResult:
    """Measure one setting. `progress` hears of each trial before it starts."""
    prompt = fixed_prompt(tokenizer, config.prompt_tokens)
    device = model_device(model)

    def trial() -> GenerationResult:
        return generate(
            model,
            tokenizer,
            prompt,
            _params(config),
            use_kv_cache=config.use_kv_cache,
            prefill_chunk=config.prefill_chunk,
            cache_dtype=config.cache_dtype,
            on_full=config.on_full,
        )

    for i in range(config.warmup):
        progress(f"warm-up {i + 1}/{config.warmup}")
        trial()
    reset_peak_memory(device)
    trials = []
    for i in range(config.trials):
        progress(f"trial {i + 1}/{config.trials}")
        trials.append(trial())
    # An even number of trials has two in the middle: the faster one.
    median = sorted(trials, key=lambda result: result.timing.decode_time_s)[(config.trials - 1) // 2]
    ttft_s = statistics.median(result.timing.prefill_time_s for result in trials)
    return BenchResult(
        config=config,
        dtype=str(model_dtype(model)).removeprefix("torch."),
        weight_bits=_weight_bits(model),
        ttft_ms=ttft_s * 1e3,
        prompt_tokens_per_s=config.prompt_tokens / ttft_s,
        decode_time_s=median.timing.decode_time_s,
        decode_tokens_per_s=median.timing.decode_tokens_per_s,
        step_ms=StepTimes.of([time_s * 1e3 for result in trials for time_s in result.timing.decode_times_s]),
        weight_bytes=weight_bytes(model),
        cache_bytes=median.cache_memory_bytes,
        peak_memory_bytes=peak_memory(device),
        positions=list(range(config.prompt_tokens, config.prompt_tokens + config.new_tokens - 1)),
        step_times_ms=[time_s * 1e3 for time_s in median.timing.decode_times_s],
        token_ids=median.token_ids,
    )


def _weight_bits(model: Model) -> list[int]:
    modules = model.modules() if isinstance(model, torch.nn.Module) else ()
    quantised = {module.bits for module in modules if isinstance(module, QuantizedWeight)}
    bits = {weight.dtype.itemsize * 8 for weight in model.parameters() if weight.dtype is not model_dtype(model)}
    return sorted(quantised | bits)


def fixed_prompt(tokenizer: BenchTokenizer, length: int) -> list[int]:
    """The same ordinary text every time, repeated to the length asked for."""
    return list(islice(cycle(encode_readable(tokenizer, PROMPT)), length))


def _params(config: BenchConfig) -> SamplingParams:
    return SamplingParams(temperature=0.0, ignore_eos=True, max_new_tokens=config.new_tokens)


def comparisons(results: Sequence[BenchResult]) -> list[dict[str, Any]]:
    """For each prompt and output length measured both ways: what the cache gains, and that the tokens agree."""
    by_setting = {(r.config.prompt_tokens, r.config.new_tokens, r.config.use_kv_cache): r for r in results}
    found = []
    for (prompt_tokens, new_tokens, use_kv_cache), cached in by_setting.items():
        uncached = by_setting.get((prompt_tokens, new_tokens, False))
        if use_kv_cache and uncached is not None:
            found.append(
                {
                    "prompt_tokens": prompt_tokens,
                    "new_tokens": new_tokens,
                    "decode_speedup": uncached.decode_time_s / cached.decode_time_s,
                    "same_tokens": uncached.token_ids == cached.token_ids,
                }
            )
    return found


def report(results: Sequence[BenchResult], model_name: str, machine: dict[str, Any]) -> dict[str, Any]:
    """Everything measured, as plain values that JSON can hold."""
    return {
        "benchmark": "generation",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": model_name,
        "machine": machine,
        "results": [asdict(result) | {"cache_memory_mb": result.cache_bytes / 1e6} for result in results],
        "comparisons": comparisons(results),
    }


def format_table(results: Sequence[BenchResult], model_name: str, machine: dict[str, Any]) -> str:
    """The figures for people to read, one section per result."""
    lines = ["=== Generation Benchmark ===", _row("Model", model_name), _row("Machine", machine_line(machine))]
    for result in results:
        lines += ["", *_section(result)]
    for compared in comparisons(results):
        agree = "same tokens" if compared["same_tokens"] else "THE TOKENS DIFFER"
        lines += [
            "",
            f"Speed-up with the cache ({compared['prompt_tokens']} + {compared['new_tokens']} tokens): "
            f"{compared['decode_speedup']:.1f}x decode, {agree}",
        ]
    return "\n".join(lines)


def _digits(result: BenchResult) -> str:
    bits = " and ".join(map(str, result.weight_bits))
    return f"{result.dtype}, weights in {bits} bits" if bits else result.dtype


def _section(result: BenchResult) -> list[str]:
    config, step = result.config, result.step_ms
    kept_in = "" if config.cache_dtype == "auto" else f" in {config.cache_dtype}"
    cache = f"enabled ({_megabytes(result.cache_bytes)}{kept_in})" if config.use_kv_cache else "disabled"
    peak = "unknown" if result.peak_memory_bytes is None else _megabytes(result.peak_memory_bytes)
    chunks = "" if config.prefill_chunk is None else f", prefilled in chunks of {config.prefill_chunk}"
    beyond = ", recomputed beyond the context" if config.on_full == "recompute" else ""
    return [
        _row("Dtype", _digits(result)),
        _row("KV cache", cache),
        _row("Tokens", f"{config.prompt_tokens} prompt + {config.new_tokens} new{chunks}{beyond}"),
        _row("Trials", f"{config.trials} after {config.warmup} to warm up"),
        "",
        "--- Prefill ---",
        _row("TTFT (median)", f"{result.ttft_ms:.1f} ms"),
        _row("Prompt throughput", f"{result.prompt_tokens_per_s:.0f} tok/s"),
        "",
        "--- Decode ---",
        _row("Total time (median)", f"{result.decode_time_s:.2f} s"),
        _row("Throughput (median)", f"{result.decode_tokens_per_s:.1f} tok/s"),
        "Per-step latency:",
        *(
            _row(f"  {name}", f"{value:.2f} ms")
            for name, value in (
                ("Mean", step.mean),
                ("P50", step.p50),
                ("P95", step.p95),
                ("P99", step.p99),
                ("Min", step.min),
                ("Max", step.max),
            )
        ),
        "",
        "--- Memory ---",
        _row("Weights", _megabytes(result.weight_bytes)),
        _row("Cache", _megabytes(result.cache_bytes)),
        _row("Peak", peak),
    ]


def _row(name: str, value: str) -> str:
    return f"{name + ':':<22}{value}"


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"


def check_plot() -> None:
    """Ask before measuring, not after."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError(f"drawing needs matplotlib, which is not installed: {install('plot')}")


def plot(results: Sequence[BenchResult], path: str | Path, model_name: str, machine: dict[str, Any]) -> None:
    """Draw step time against position, with and without the cache, as a PNG."""
    check_plot()
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator

    figure = Figure(figsize=(8, 4.8), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    named = set()
    for result in results:  # a suite draws several stretches of each curve
        use_kv_cache = result.config.use_kv_cache
        label, colour = CURVES[use_kv_cache]
        (line,) = axes.plot(result.positions, result.step_times_ms, ".-", color=colour, linewidth=1.2, markersize=3)
        if use_kv_cache not in named:
            line.set_label(label)
            named.add(use_kv_cache)
    times = [time_ms for result in results for time_ms in result.step_times_ms]
    if len(named) == 2:  # tens of times apart: only a log axis shows both
        axes.set_yscale("log")
        axes.set_ylim(min(times) / 1.6, max(times) * 1.6)
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(lambda value, _: "")
    else:
        axes.set_ylim(0, max(times) * 1.15)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.set_xlabel("position in the sequence")
    axes.set_ylabel("ms per step")
    axes.set_title(f"Time per decode step: {model_name}, {_digits(results[0])}\n{machine_line(machine)}", fontsize=10)
    axes.grid(True, alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(path, format="png")


def describe_machine(device: torch.device) -> dict[str, Any]:
    """What the figures depend on besides the model."""
    machine: dict[str, Any] = {"device": device.type, "torch": torch.__version__, "python": platform.python_version()}
    if device.type == "cuda":
        return machine | {"name": torch.cuda.get_device_name(device), "cuda": torch.version.cuda}
    return machine | {"name": _cpu_name(), "cores": os.cpu_count(), "threads": torch.get_num_threads()}


def machine_line(machine: dict[str, Any]) -> str:
    cores = f", {machine['cores']} cores, {machine['threads']} threads" if "cores" in machine else ""
    return f"{machine['name']}{cores}, torch {machine['torch']}"


def _cpu_name() -> str:
    """The processor's name. ARM kernels give only numbers in /proc/cpuinfo; lscpu knows what they mean."""
    mac = sys.platform == "darwin"
    command = ["sysctl", "-n", "machdep.cpu.brand_string"] if mac else ["lscpu"]
    with suppress(OSError, subprocess.SubprocessError):
        english = os.environ | {"LC_ALL": "C"}
        output = subprocess.run(command, capture_output=True, text=True, check=True, env=english, timeout=5).stdout
        named = re.search(r"(.+)" if mac else r"^Model name:\s*(.+)$", output, re.MULTILINE)
        if named:
            return named[1]
    return platform.processor() or platform.machine()


def reset_peak_memory(device: torch.device) -> None:
    """Let `peak_memory` start from what is held now; where the system cannot, it counts from the process's start."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory(device: torch.device) -> int | None:
    """Most bytes held at once: allocated on a GPU, resident elsewhere; None where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    try:
        import resource
    except ImportError:  # Windows
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
