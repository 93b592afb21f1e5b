"""Batches: tokens per second of several rows together, against one row, in one process.

Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from infer import SamplingParams, Tokenizer, generate, generate_batch, load_model
from infer.cli.common import DEFAULT_MODEL
from infer.evaluate.bench import describe_machine, machine_line
from infer.evaluate.verify import PROMPTS
from infer.models.common import Decoder


def run(model: Decoder, tokenizer: Tokenizer, rows: list[int], new_tokens: int) -> list[dict[str, Any]]:
    """Prompts of different lengths, repeated; every row generates `new_tokens` tokens."""
    params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
    prompts = [tokenizer.encode(text) for text in PROMPTS]
    alone = [generate(model, tokenizer, prompt, params) for prompt in prompts]
    steps = sum(len(result.timing.decode_times_s) for result in alone)
    single = steps / sum(result.timing.decode_time_s for result in alone)
    figures: list[dict[str, Any]] = [{"rows": 1, "tokens_per_s": single, "ratio": 1.0, "same_tokens": None}]
    for count in rows:
        results = generate_batch(model, tokenizer, [prompts[i % len(prompts)] for i in range(count)], params)
        speed = count * (new_tokens - 1) / results[0].timing.decode_time_s
        same = all(result.token_ids == alone[i % len(alone)].token_ids for i, result in enumerate(results))
        figures.append({"rows": count, "tokens_per_s": speed, "ratio": speed / single, "same_tokens": same})
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="default %(default)s")
    parser.add_argument("--rows", type=int, nargs="+", default=[2, 4, 8, 32], help="batch sizes (2 4 8 32)")
    parser.add_argument("--new-tokens", type=int, default=32, help="of each row (default %(default)s)")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--report", type=Path, help="write everything measured into this JSON file")
    args = parser.parse_args()
    if min(args.rows) < 1 or args.new_tokens < 2:
        parser.error("--rows must be at least 1, and --new-tokens at least 2")
    model, _ = load_model(args.model, dtype=args.dtype, device=args.device)
    machine = describe_machine(model.device)
    figures = run(model, Tokenizer(args.model), args.rows, args.new_tokens)
    print(f"{args.model}, {str(model.dtype).removeprefix('torch.')}, {machine_line(machine)}\n")
    print("rows   tok/s of all   to one row")
    for row in figures:
        same = "" if row["same_tokens"] is None else "   same tokens" if row["same_tokens"] else "   OTHER TOKENS"
        print(f"{row['rows']:>4} {row['tokens_per_s']:14.1f} {row['ratio']:11.2f}x{same}")
    if args.report is not None:
        report = {"model": args.model, "machine": machine, "batches": figures}
        args.report.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
