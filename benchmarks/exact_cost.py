"""What exact mode costs: decode alone, decode of a batch, and prefill, in normal mode and in exact mode.

Trials of the two alternate in one process. On a GPU, unless --model names one, random weights in the shape of a
published model. Figures of a machine that is busy with other work mean little.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gpu_shapes import SHAPES, NoText, build, random_prompt

from infer import SamplingParams, generate, generate_batch, load_model
from infer.bench import describe_machine, machine_line
from infer.machine import resolve_device, resolve_dtype
from infer.models.common import Decoder

MODEL = "smollm2-135m"
SHAPE = "llama-1b"


def measure(
    model: Decoder, *, prompt_tokens: int, new_tokens: int, prefill_tokens: int, rows: int, trials: int
) -> list[dict[str, Any]]:
    """Tokens per second of each kind of work: the median of the trials, after one to warm up."""
    params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
    short, long = (random_prompt(model.config, length) for length in (prompt_tokens, prefill_tokens))
    # Of different lengths, as rows of a batch are.
    prompts = [random_prompt(model.config, prompt_tokens + row, seed=row) for row in range(rows)]

    def decode(exact: bool) -> float:
        return generate(model, NoText(), short, params, exact=exact).timing.decode_tokens_per_s

    def decode_rows(exact: bool) -> float:
        results = generate_batch(model, NoText(), prompts, params, exact=exact)
        return rows * (new_tokens - 1) / results[0].timing.decode_time_s

    def prefill(exact: bool) -> float:
        one = SamplingParams(max_new_tokens=1)
        return prefill_tokens / generate(model, NoText(), long, one, exact=exact).timing.prefill_time_s

    work: dict[str, Callable[[bool], float]] = {
        "decode, one row": decode,
        f"decode, {rows} rows": decode_rows,
        f"prefill of {prefill_tokens}": prefill,
    }
    figures = []
    for name, trial in work.items():
        found: dict[bool, list[float]] = {False: [], True: []}
        for i in range(trials + 1):
            for exact in found:
                speed = trial(exact)
                if i:
                    found[exact].append(speed)
        normal, exact_mode = (statistics.median(found[exact]) for exact in (False, True))
        figures.append(
            {
                "work": name,
                "normal_tokens_per_s": normal,
                "exact_tokens_per_s": exact_mode,
                "time_ratio": normal / exact_mode,
                "trials": {"normal": found[False], "exact": found[True]},
            }
        )
    return figures


def format_figures(report: dict[str, Any]) -> str:
    lines = [
        f"{report['model']}, {report['dtype']}, {machine_line(report['machine'])}",
        "",
        f"{'tok/s':<18}{'normal':>10}{'exact':>10}{'time of exact to normal':>26}",
    ]
    for row in report["figures"]:
        speeds = f"{row['normal_tokens_per_s']:>10,.1f}{row['exact_tokens_per_s']:>10,.1f}"
        lines.append(f"{row['work']:<18}{speeds}{row['time_ratio']:>25.2f}x")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help=f"a folder, a GGUF file or a built-in name (on a CPU {MODEL})")
    parser.add_argument("--shape", choices=SHAPES, help=f"random weights in this shape instead (on a GPU {SHAPE})")
    parser.add_argument("--quantize", choices=["int4", "int8"], help="of a model's weights, on a CPU")
    parser.add_argument("--dtype", default="auto", help="(%(default)s)")
    parser.add_argument("--device", default="auto", help="(%(default)s)")
    parser.add_argument("--prompt-tokens", type=int, default=64, help="before what is decoded (%(default)s)")
    parser.add_argument("--new-tokens", type=int, default=128, help="to decode, 2 or more (%(default)s)")
    parser.add_argument("--prefill-tokens", type=int, default=512, help="(%(default)s)")
    parser.add_argument("--rows", type=int, default=8, help="of the batch (%(default)s)")
    parser.add_argument("--trials", type=int, default=5, help="of each mode (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    args = parser.parse_args(argv)
    sizes = {name: getattr(args, name) for name in ("prompt_tokens", "new_tokens", "prefill_tokens", "rows", "trials")}
    if min(sizes.values()) < 1 or args.new_tokens < 2:
        parser.error("sizes and trials must be at least 1, and --new-tokens at least 2")
    if args.json and not args.json.parent.is_dir():
        parser.error(f"there is no folder {args.json.parent}")
    device = resolve_device(args.device)
    shape = args.shape or (SHAPE if device.type == "cuda" and args.model is None else None)
    if shape and (args.model or args.quantize):
        parser.error("a shape has random weights in --dtype: leave --model and --quantize out")
    if shape:
        name, model = f"{shape} shape, random weights", build(shape, device, resolve_dtype(args.dtype, device))
    else:
        name = args.model or MODEL
        model, _ = load_model(name, dtype=args.dtype, device=device, quantize=args.quantize)
    report = {
        "benchmark": "exact_cost",
        "model": name,
        "dtype": args.quantize or str(model.dtype).removeprefix("torch."),
        "machine": describe_machine(model.device),
        **sizes,
        "figures": measure(model, **sizes),
    }
    print(format_figures(report))
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
