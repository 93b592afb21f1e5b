"""Measure generation: time to the first token, time per decode step, and memory.

`run` measures one setting; `report`, `format_table` and `plot` show the results. Generation is greedy and ignores
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
from infer.engine.drafters import ModelDrafter, drafter_of
from infer.engine.generate import generate
from infer.engine.model import Model, model_device, model_dtype, quantized_weights, weight_bytes
from infer.engine.params import SamplingParams, check_prefill_chunk
from infer.engine.result import GenerationResult
from infer.engine.sequence import check_sequence
from infer.engine.text import SupportsDecode, SupportsEncode, encode_readable
from infer.version import install

SUITE = {"short": (32, 32), "medium": (128, 64), "long": (512, 64)}  # prompt tokens, new tokens

CURVES = {True: ("with the KV cache", "#0072b2"), False: ("without the KV cache", "#d55e00")}

PROMPT = (
    "A lighthouse keeper once wrote down everything that passed his window: the ships and their flags, the weather, "
    "the birds that rested on the rail, and the hour at which the lamp was lit. When the book was full he began "
    "another, and it is from these books that we know how the coast changed over forty years. "
)


class BenchTokenizer(SupportsEncode, SupportsDecode, Protocol): ...


MAX_TRIALS = 10**6


@dataclass(frozen=True)
class BenchConfig:
    prompt_tokens: int = 64
    new_tokens: int = 128
    trials: int = 3
    warmup: int = 1
    use_kv_cache: bool = True
    prefill_chunk: int | None = None
    cache_dtype: str = "auto"  # or "int8"
    on_full: str = "error"  # or "recompute", to continue beyond the model's context
    speculate: str | None = None  # or a drafter's name

    def __post_init__(self) -> None:
        check_prefill_chunk(self.prefill_chunk)
        for name, unset in (("prefill_chunk", None), ("cache_dtype", "auto"), ("speculate", None)):
            if not self.use_kv_cache and getattr(self, name) != unset:
                raise ValueError(f"{name} needs the cache: remove it or use_kv_cache=False")
        # Two new tokens, because the first belongs to the prefill.
        for name, least in (("prompt_tokens", 1), ("new_tokens", 2), ("trials", 1), ("warmup", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, not {getattr(self, name)}")
        if max(self.trials, self.warmup) > MAX_TRIALS:
            raise ValueError(f"trials and warmup must be at most {MAX_TRIALS:,} each")


@dataclass(frozen=True)
class StepTimes:
    """Milliseconds per decode step; with drafts, per token, as the tokens of a step share its time."""

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
    weight_bits: list[int]  # of weights stored in fewer bits than the dtype: 16, or 4 and 8; empty: none
    ttft_ms: float  # median; prefill and sampling of the first token
    prompt_tokens_per_s: float  # median
    decode_time_s: float  # median trial, without the first token
    decode_tokens_per_s: float  # median trial
    step_ms: StepTimes  # over the steps of all trials
    weight_bytes: int
    cache_bytes: int
    peak_memory_bytes: int | None  # allocated on a GPU; otherwise resident memory; None: unknown
    positions: list[int]  # of the token each step feeds
    step_times_ms: list[float]  # of the median trial, one per position
    token_ids: list[int]
    drafted: int  # of the median trial
    accepted: int


def check(model_config: ModelConfig, config: BenchConfig) -> None:
    """Refuse a setting that exceeds the model's context, before anything is measured."""
    check_sequence(model_config, [0] * config.prompt_tokens, _params(config), on_full=config.on_full)


def run(
    model: Model,
    tokenizer: BenchTokenizer,
    config: BenchConfig,
    progress: Callable[[str], None] = lambda message: None,
) -> BenchResult:
    """Measure one setting. progress: called before each trial."""
    return run_alternating(model, tokenizer, [config], progress)[0]


def run_alternating(
    model: Model, tokenizer: BenchTokenizer, configs: Sequence[BenchConfig], progress: Callable[[str], None]
) -> list[BenchResult]:
    """Measure settings with the same lengths and trials, each trial of one beside that of the others."""
    names = ("use_kv_cache", "prefill_chunk", "cache_dtype", "on_full")
    prompt = fixed_prompt(tokenizer, configs[0].prompt_tokens)
    options: list[dict[str, Any]] = [{name: getattr(config, name) for name in names} for config in configs]
    drafters = [drafter_of(config.speculate, tokenizer, model_device(model)) for config in configs]

    def trial() -> list[GenerationResult]:
        for each, config, drafter in zip(options, configs, drafters, strict=True):  # that knows nothing of others
            loaded = drafter.model if isinstance(drafter, ModelDrafter) else config.speculate
            each["speculate"] = drafter_of(loaded, tokenizer)
        return [generate(model, tokenizer, prompt, _params(configs[0]), **each) for each in options]

    for i in range(configs[0].warmup):
        progress(f"warm-up {i + 1}/{configs[0].warmup}")
        trial()
    reset_peak_memory(model_device(model))
    trials = []
    for i in range(configs[0].trials):
        progress(f"trial {i + 1}/{configs[0].trials}")
        trials.append(trial())
    return [_result(model, config, each) for config, each in zip(configs, zip(*trials, strict=True), strict=True)]


def _result(model: Model, config: BenchConfig, trials: Sequence[GenerationResult]) -> BenchResult:
    # Of an even number of trials, the faster of the two in the middle.
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
        peak_memory_bytes=peak_memory(model_device(model)),
        positions=list(range(config.prompt_tokens, config.prompt_tokens + config.new_tokens - 1)),
        step_times_ms=[time_s * 1e3 for time_s in median.timing.decode_times_s],
        token_ids=median.token_ids,
        drafted=median.drafted,
        accepted=median.accepted,
    )


def _weight_bits(model: Model) -> list[int]:
    bits = {weight.dtype.itemsize * 8 for weight in model.parameters() if weight.dtype is not model_dtype(model)}
    return sorted(bits | {weight.scheme.bits for weight in quantized_weights(model)})


def fixed_prompt(tokenizer: BenchTokenizer, length: int) -> list[int]:
    """A fixed text, repeated to this many tokens."""
    return list(islice(cycle(encode_readable(tokenizer, PROMPT)), length))


def _params(config: BenchConfig) -> SamplingParams:
    return SamplingParams(temperature=0.0, ignore_eos=True, max_new_tokens=config.new_tokens)


def comparisons(results: Sequence[BenchResult]) -> list[dict[str, Any]]:
    """For each pair of lengths measured with and without the cache, or drafts: the speed-up, and equality of tokens."""
    by_setting = {
        (config.prompt_tokens, config.new_tokens, config.use_kv_cache, config.speculate): result
        for result in results
        for config in [result.config]
    }
    return [
        {
            "prompt_tokens": prompt_tokens,
            "new_tokens": new_tokens,
            "speculate": speculate,
            "tokens_per_s": [without.decode_tokens_per_s, result.decode_tokens_per_s],
            "decode_speedup": without.decode_time_s / result.decode_time_s,
            "drafted": result.drafted,
            "accepted": result.accepted,
            "same_tokens": without.token_ids == result.token_ids,
        }
        for (prompt_tokens, new_tokens, use_kv_cache, speculate), result in by_setting.items()
        if use_kv_cache
        and (without := by_setting.get((prompt_tokens, new_tokens, speculate is not None, None))) is not None
    ]


def report(results: Sequence[BenchResult], model_name: str, machine: dict[str, Any]) -> dict[str, Any]:
    """All measurements as JSON-serializable values."""
    return {
        "benchmark": "generation",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": model_name,
        "machine": machine,
        "results": [asdict(result) | {"cache_memory_mb": result.cache_bytes / 1e6} for result in results],
        "comparisons": comparisons(results),
    }


def format_table(results: Sequence[BenchResult], model_name: str, machine: dict[str, Any]) -> str:
    """All measurements as text, one section per result."""
    lines = ["=== Generation Benchmark ===", _row("Model", model_name), _row("Machine", machine_line(machine))]
    for result in results:
        lines += ["", *_section(result)]
    for compared in comparisons(results):
        agree = "same tokens" if compared["same_tokens"] else "THE TOKENS DIFFER"
        what, drafts, digits = "the cache", "", 1
        if compared["speculate"] is not None:
            before, after = compared["tokens_per_s"]
            drafted = compared["drafted"]
            right = f"drafts {compared['accepted']} of {drafted} right" if drafted else "no drafts"
            what, digits, drafts = "drafts", 2, f" ({before:.1f} to {after:.1f} tok/s), {right}"
        lines += [
            "",
            f"Speed-up with {what} ({compared['prompt_tokens']} + {compared['new_tokens']} tokens): "
            f"{compared['decode_speedup']:.{digits}f}x decode{drafts}, {agree}",
        ]
    return "\n".join(lines)


def _precision(result: BenchResult) -> str:
    bits = " and ".join(map(str, result.weight_bits))
    return f"{result.dtype}, weights in {bits} bits" if bits else result.dtype


def _section(result: BenchResult) -> list[str]:
    config = result.config
    stored_in = "" if config.cache_dtype == "auto" else f" in {config.cache_dtype}"
    cache = f"enabled ({_megabytes(result.cache_bytes)}{stored_in})" if config.use_kv_cache else "disabled"
    peak = "unknown" if result.peak_memory_bytes is None else _megabytes(result.peak_memory_bytes)
    chunks = "" if config.prefill_chunk is None else f", prefilled in chunks of {config.prefill_chunk}"
    beyond = ", recomputed beyond the context" if config.on_full == "recompute" else ""
    return [
        _row("Dtype", _precision(result)),
        _row("KV cache", cache),
        *([] if config.speculate is None else [_row("Drafts", config.speculate)]),
        _row("Tokens", f"{config.prompt_tokens} prompt + {config.new_tokens} new{chunks}{beyond}"),
        _row("Trials", f"{config.trials} after {config.warmup} warm-up"),
        "",
        "--- Prefill ---",
        _row("TTFT (median)", f"{result.ttft_ms:.1f} ms"),
        _row("Prompt throughput", f"{result.prompt_tokens_per_s:.0f} tok/s"),
        "",
        "--- Decode ---",
        _row("Total time (median)", f"{result.decode_time_s:.2f} s"),
        _row("Throughput (median)", f"{result.decode_tokens_per_s:.1f} tok/s"),
        "Per-step latency:" if config.speculate is None else "Per-token latency:",
        *(_row(f"  {name.capitalize()}", f"{value:.2f} ms") for name, value in asdict(result.step_ms).items()),
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
    """Raise before anything is measured if matplotlib is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError(f"drawing needs matplotlib, which is not installed: {install('plot')}")


def plot(results: Sequence[BenchResult], path: str | Path, model_name: str, machine: dict[str, Any]) -> None:
    """Draw step time against position, with and without the cache, as a PNG."""
    check_plot()
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator

    figure = Figure(figsize=(8, 4.8), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    longest: dict[bool, BenchResult] = {}  # of the segments that a suite draws of each curve
    for result in results:
        use_kv_cache = result.config.use_kv_cache
        axes.plot(
            result.positions, result.step_times_ms, ".-", color=CURVES[use_kv_cache][1], linewidth=1.2, markersize=3
        )
        longest[use_kv_cache] = max(longest.get(use_kv_cache, result), result, key=lambda each: len(each.positions))
    times = [time_ms for result in results for time_ms in result.step_times_ms]
    if len(longest) == 2:  # they differ by a factor of tens: a log axis shows both
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
    axes.set_title(
        f"Time per decode step: {model_name}, {_precision(results[0])}\n{machine_line(machine)}", fontsize=10
    )
    axes.grid(True, alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    for use_kv_cache, result in longest.items():
        label, color = CURVES[use_kv_cache]
        middle = len(result.positions) // 2
        highest = max(result.step_times_ms[middle // 2 : middle * 3 // 2 + 1])  # the label is above the curve there
        above: dict[str, Any] = {"xytext": (0, 8), "textcoords": "offset points", "ha": "center", "va": "bottom"}
        axes.annotate(label, (result.positions[middle], highest), color=color, fontsize=11, fontweight="bold", **above)
    figure.savefig(path, format="png", facecolor="white")  # opaque, also on a dark page


def describe_machine(device: torch.device) -> dict[str, Any]:
    """The hardware and software that the measurements depend on."""
    machine: dict[str, Any] = {"device": device.type, "torch": torch.__version__, "python": platform.python_version()}
    if device.type == "cuda":
        return machine | {"name": torch.cuda.get_device_name(device), "cuda": torch.version.cuda}
    return machine | {"name": _cpu_name(), "cores": os.cpu_count(), "threads": torch.get_num_threads()}


def machine_line(machine: dict[str, Any]) -> str:
    cores = f", {machine['cores']} cores, {machine['threads']} threads" if "cores" in machine else ""
    return f"{machine['name']}{cores}, torch {machine['torch']}"


def _cpu_name() -> str:
    """The processor's name. On ARM, /proc/cpuinfo has only numbers; lscpu translates them."""
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
    """Make `peak_memory` start from the current usage; where unsupported, it counts from the start of the process."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory(device: torch.device) -> int | None:
    """The most bytes held at once: allocated on a GPU, otherwise resident; None if unknown."""
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
