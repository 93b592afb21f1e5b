"""infer against transformers and llama.cpp on the same weights, in one process, alternating trial by trial.

Prints the time of the prompt and of a decode step for each engine, and how close it comes to the time of one read of
the weights from memory, the limit at batch 1. infer runs with each weight dtype of --widths, and measures its cost:
perplexity on a text, and greedy tokens that differ from those of the first. llama.cpp is included if
llama-cpp-python is installed and the model is a GGUF file: as it is, and in 8 bits, converted by its own quantizer; so
are batches of sequences. Ratios within one run are reliable, figures of two runs are not comparable. Run it on an idle
machine.

With --device cuda and without --model, `compare_gpu.py` runs instead: see its --help (--device cuda --help).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import transformers
from engines import (
    BatchEngine,
    BatchTrial,
    Engine,
    Trial,
    infer_batch_engine,
    infer_engine,
    llama_cpp_batch_engine,
    llama_cpp_engine,
    llama_cpp_quantized,
    llama_cpp_version,
    load_transformers,
    transformers_engine,
)
from gpu_shapes import synchronize
from torch import Tensor

from infer import KVCache, SamplingParams, Tokenizer, load_model, perplexity
from infer.backend import backend_for, cpu
from infer.backend.cpu.backend import CpuBackend
from infer.backend.cpu.ops import head_record
from infer.engine.model import step
from infer.engine.sequence import check_sequence
from infer.engine.text import encode_readable
from infer.evaluate.bench import describe_machine, fixed_prompt, machine_line
from infer.evaluate.verify import first_difference
from infer.loader.find import open_checkpoint
from infer.machine import resolve_device, resolve_dtype
from infer.models.common import Decoder
from infer.nn.attention import attention
from infer.nn.linear import Linear
from infer.nn.quantized import BITS, QuantizedWeight

TRANSFORMERS = "transformers"
NO_CACHE = "transformers, no cache"
LLAMA_CPP, LLAMA_CPP_8 = "llama.cpp, the file", "llama.cpp, Q8_0"
PEERS = {TRANSFORMERS: "transformers", LLAMA_CPP: "llama_cpp", LLAMA_CPP_8: "llama_cpp_q8_0"}
TEXT = Path(__file__).with_name("text.md")


def decode_bytes(model: Decoder) -> int:
    """Bytes of weights that a decode step reads: of an embedding that is not tied to the head, only one row."""
    tensors = {t.data_ptr(): t.nbytes for t in (*model.parameters(), *model.buffers())}
    if not model.config.tie_word_embeddings:
        weight = model.embed_tokens.weight
        tensors.pop((weight.packed if isinstance(weight, QuantizedWeight) else weight).data_ptr())
    return sum(tensors.values())


def transformers_bytes(model: Any) -> int:
    """`decode_bytes` of transformers' model."""
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    return sum(weight.nbytes for weight in model.parameters()) - (0 if head is embedding else embedding.nbytes)


@torch.inference_mode()
def bytes_per_second(weights: list[Tensor]) -> float:
    """Memory bandwidth when weights are only summed; best of three."""
    device, weights = weights[0].device, [weight.flatten() for weight in weights]
    if device.type == "cpu":  # converting 16 bits takes longer than reading them
        weights = [weight[: weight.nbytes // 4 * 4 // weight.itemsize].view(torch.float32) for weight in weights]
    seconds = min(_seconds(lambda: [weight.sum() for weight in weights], device) for _ in range(3))
    return sum(weight.nbytes for weight in weights) / seconds


@torch.inference_mode()
def time_parts(model: Decoder, tokenizer: Tokenizer, positions: Sequence[int], repeats: int) -> list[dict[str, float]]:
    """Median times of a decode step at each position, of its GEMMs alone, and of its attention alone.

    The positions alternate, and each part runs in the same order as within a step.
    """
    caches = []
    for position in positions:
        cache = KVCache.from_model_config(model.config, position + 1, dtype=model.dtype, device=model.device)
        step(model, cache, torch.tensor([fixed_prompt(tokenizer, position)], device=model.device))
        caches.append(cache)
    token = torch.tensor([[0]], device=model.device)
    products, attends = gemms_alone(model), [attention_alone(model, cache) for cache in caches]
    rows: list[dict[str, list[float]]] = [{"step_ms": [], "products_ms": [], "attention_ms": []} for _ in positions]
    for _ in range(repeats):
        for row, cache, attend in zip(rows, caches, attends, strict=True):
            row["step_ms"].append(_seconds(partial(step, model, cache, token), model.device))
            cache.truncate(cache.seq_len - 1)
            row["products_ms"].append(_seconds(products, model.device))
            row["attention_ms"].append(_seconds(attend, model.device))
    return [
        {"position": position} | {name: statistics.median(times) * 1e3 for name, times in row.items()}
        for position, row in zip(positions, rows, strict=True)
    ]


@lru_cache
def _compiled() -> tuple[Callable[..., None], Callable[..., None]]:
    """All GEMMs in a single call, and the attention of all layers in one."""
    import numba

    from infer.backend.cpu.attention import attend_at
    from infer.backend.cpu.gemm import gemm
    from infer.backend.cpu.jit import address

    @numba.njit
    def multiply(records: Any, widest: Any, out: Any) -> None:
        for i in range(records.shape[0]):
            gemm(records[i].weight, address(widest), 1, address(out))

    @numba.njit
    def attend(blocks: Any, q: Any, tables: Any, parts: Any, seen: Any, out: Any) -> None:
        for layer in range(blocks.shape[0]):
            block, table = blocks[layer], address(tables) + layer * tables.strides[0]
            attend_at(
                block.attend,
                block.heads,
                block.kv_heads,
                block.head_dim,
                block.scale,
                block.softcap,
                block.sinks,
                address(q),
                q.strides[0],
                table,
                address(parts),
                parts.shape[0],
                address(seen),
                address(out),
            )

    return multiply, attend


def gemms_alone(model: Decoder) -> Callable[[], Any]:
    """All GEMMs of a step with one row; if CPU kernels run the model, in a single call, as in a step."""
    linears = [module for module in model.modules() if isinstance(module, Linear)]
    inputs = [torch.randn(1, m.weight.shape[1], dtype=model.dtype, device=model.device) for m in linears]
    if not isinstance(_backend(model), CpuBackend):
        return lambda: [linear(x) for linear, x in zip(linears, inputs, strict=True)]
    run, _ = _compiled()
    records = np.concatenate([head_record(None, linear) for linear in linears])
    widest = torch.randn(1, max(m.weight.shape[1] for m in linears)).numpy()
    out = np.empty((1, max(m.weight.shape[0] for m in linears)), np.float32)
    run(records, widest, out)
    return lambda: run(records, widest, out)


def attention_alone(model: Decoder, cache: KVCache) -> Callable[[], Any]:
    """One query in each layer over all cached positions and the next; otherwise like `gemms_alone`."""
    config, keys = model.config, cache.seq_len + 1
    q = torch.ones(1, config.num_attention_heads, 1, config.computed_head_dim, dtype=model.dtype, device=model.device)
    spans = [(k[:, :, :keys], v[:, :, :keys]) for k, v in zip(cache.k, cache.v, strict=True)]
    backend = _backend(model)
    if not isinstance(backend, CpuBackend):
        return lambda: [attention(q, k, v, scale=config.attention_scale, mask=None) for k, v in spans]
    _, run = _compiled()
    rows = q.view(1, -1).numpy()
    tables, seen, out = cache.table(config, torch.float32, 1), np.array([[0, keys]]), np.empty_like(rows)
    arguments = backend.blocks, rows, tables, cpu.kernels().query_blocks([1]), seen, out
    run(*arguments)
    return lambda: run(*arguments)


@torch.no_grad()
def _backend(model: Decoder) -> Any:
    return backend_for(model)


def _seconds(work: Callable[[], Any], device: torch.device) -> float:
    synchronize(device)
    started = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - started


def summarize(name: str, trials: Sequence[Trial], prompt_tokens: int, reference: Sequence[int]) -> dict[str, Any]:
    """The median over the trials of the mean step; and the first token that differs from the reference."""
    prefill_s = statistics.median(trial.prefill_s for trial in trials)
    step_s = statistics.median(statistics.fmean(trial.steps_s) for trial in trials)
    return {
        "engine": name,
        "prefill_tokens_per_s": prompt_tokens / prefill_s,
        "decode_tokens_per_s": 1 / step_s,
        "step_ms": step_s * 1e3,
        "trials_step_ms": [statistics.fmean(trial.steps_s) * 1e3 for trial in trials],
        "first_difference": first_difference(trials[0].tokens, reference),
    }


def measure_quality(
    models: dict[str, Decoder], tokenizer: Tokenizer, text: Path, agreement: tuple[int, int]
) -> list[dict[str, Any]]:
    """Perplexity of each model on a text, and its greedy tokens compared with the first model's.

    agreement: number of prompts from the text, and of new tokens.
    """
    prefix = tokenizer.encode("")
    ids = encode_readable(tokenizer, text.read_text(encoding="utf-8"))[len(prefix) :]
    prompts, new_tokens = agreement
    starts = [i * len(ids) // prompts for i in range(prompts)]
    found: list[dict[str, Any]] = []
    reference: list[list[int]] = []
    for name, model in models.items():
        engine = infer_engine(model, tokenizer)
        runs = [engine([*prefix, *ids[start : start + 24]], new_tokens).tokens for start in starts]
        reference = reference or runs
        parted = [first_difference(run, first) for run, first in zip(runs, reference, strict=True)]
        result = perplexity(model, ids, prefix=prefix)
        found.append(
            {
                "engine": name,
                "perplexity": result.perplexity,
                "tokens": result.tokens,
                "bytes": decode_bytes(model),
                "same_runs": parted.count(None),
                "tokens_before_parting": statistics.fmean(new_tokens if at is None else at for at in parted),
            }
        )
    return found


def compare_batches(
    models: dict[str, Decoder], tokenizer: Tokenizer, file: Path | None, args: argparse.Namespace
) -> list[dict[str, Any]]:
    """Tokens per second of a batch of sequences. file: for llama.cpp; None: without it."""
    engines: dict[str, BatchEngine] = {name: infer_batch_engine(model, tokenizer) for name, model in models.items()}
    if file is not None:
        engines[LLAMA_CPP] = llama_cpp_batch_engine(file, args.rows, args.prompt_tokens + args.new_tokens)
    ids = fixed_prompt(tokenizer, args.prompt_tokens + args.rows)
    prompts = [ids[i : i + args.prompt_tokens] for i in range(args.rows)]
    trials: dict[str, list[BatchTrial]] = {name: [] for name in engines}
    for engine in engines.values():
        engine(prompts, 4)  # warm up
    for _ in range(args.trials):
        for name, engine in engines.items():
            trials[name].append(engine(prompts, args.new_tokens))
    found = []
    for name, done in trials.items():
        step_s, prefill_s = (
            statistics.median(getattr(trial, what) for trial in done) for what in ("step_s", "prefill_s")
        )
        prefill = args.rows * args.prompt_tokens / prefill_s
        found.append({"engine": name, "decode_tokens_per_s": args.rows / step_s, "prefill_tokens_per_s": prefill})
    if file is not None:
        for row in found:
            for what in ("decode", "prefill"):
                each = f"{what}_tokens_per_s"
                row[f"{what}_ratio_to_llama_cpp"] = row[each] / found[-1][each]
    return found


def compare(args: argparse.Namespace, folder: str) -> dict[str, Any]:
    """folder: for temporary files."""
    load_average = os.getloadavg()[0]
    device = resolve_device(args.device)
    dtype = resolve_dtype(args.dtype, device)
    checkpoint = open_checkpoint(args.model)
    tokenizer = Tokenizer(args.model)
    prompt = fixed_prompt(tokenizer, args.prompt_tokens)
    for tokens, new_tokens in ((prompt, args.new_tokens), ([0] * max(args.positions), 1)):
        check_sequence(checkpoint.config, tokens, SamplingParams(max_new_tokens=new_tokens))
    cpu.kernels()  # compiled before any load is timed
    models, loads = {}, {}
    for width in args.widths or ["float", *(BITS if device.type == "cpu" else ())]:
        quantize, stored = (None, dtype) if width == "float" else (width, "auto")
        name = f"infer {quantize or str(dtype).removeprefix('torch.')}"
        started = time.perf_counter()
        models[name], _ = load_model(args.model, dtype=stored, device=device, quantize=quantize)
        first = Tokenizer(args.model)
        infer_engine(models[name], first)(prompt, 1)
        loads[name] = time.perf_counter() - started
    engines: dict[str, Engine] = {name: infer_engine(model, tokenizer) for name, model in models.items()}
    if args.no_transformers:
        summed = [torch.ones(1 << 27, device=device)]
    else:
        reference = load_transformers(checkpoint.path, dtype, device)
        engines[TRANSFORMERS] = transformers_engine(reference)
        summed = list(reference.parameters())
    if args.no_cache:
        engines[NO_CACHE] = transformers_engine(reference, use_cache=False)
    version = llama_cpp_version()
    if version is not None and checkpoint.path.suffix == ".gguf" and device.type == "cpu":
        length = args.prompt_tokens + args.new_tokens
        eight = llama_cpp_quantized(checkpoint.path, Path(folder, "q8_0.gguf"), "Q8_0")
        engines[LLAMA_CPP] = llama_cpp_engine(checkpoint.path, length)
        engines[LLAMA_CPP_8] = llama_cpp_engine(eight, length)
    trials: dict[str, list[Trial]] = {name: [] for name in engines}
    for engine in engines.values():
        engine(prompt, min(args.new_tokens, 8))  # warm up
    speed = 0.0
    for _ in range(args.trials):
        for name, engine in engines.items():
            trials[name].append(engine(prompt, args.new_tokens))
        speed = max(speed, bytes_per_second(summed))
    compared_with = next(iter(models)) if args.no_transformers else TRANSFORMERS
    tokens = trials[compared_with][0].tokens
    results = [summarize(name, done, args.prompt_tokens, tokens) for name, done in trials.items()]
    by_name = {result["engine"]: result for result in results}
    for result in results:
        for peer, key in PEERS.items():
            if peer in by_name:
                for what in ("decode", "prefill"):
                    each = f"{what}_tokens_per_s"
                    result[f"{what}_ratio_to_{key}"] = result[each] / by_name[peer][each]
        if result["engine"] in models:
            result["bytes_per_token"] = decode_bytes(models[result["engine"]])
            result["load_to_first_token_s"] = loads[result["engine"]]
        elif result["engine"] == LLAMA_CPP:
            result["bytes_per_token"] = checkpoint.path.stat().st_size
        elif result["engine"] == LLAMA_CPP_8:
            result["bytes_per_token"] = eight.stat().st_size
        else:
            result["bytes_per_token"] = transformers_bytes(reference)
        result["share_of_read_limit"] = result["bytes_per_token"] / speed * 1e3 / result["step_ms"]
    machine = describe_machine(device) | {"transformers": transformers.__version__}
    return {
        "model": args.model,
        "dtype": str(dtype).removeprefix("torch."),
        "machine": machine | ({"llama_cpp": version} if LLAMA_CPP in engines else {}),
        "load_average": load_average,
        "prompt_tokens": args.prompt_tokens,
        "new_tokens": args.new_tokens,
        "trials": args.trials,
        "bytes_per_second": speed,
        "engines": results,
        "compared_with": compared_with,
        "parts": {name: time_parts(model, tokenizer, args.positions, args.steps) for name, model in models.items()},
        "rows": args.rows,
        "batches": compare_batches(models, tokenizer, checkpoint.path if LLAMA_CPP in engines else None, args),
        "quality": [] if args.no_quality else measure_quality(models, tokenizer, args.text, args.agreement),
        "agreement": args.agreement,
        "text": args.text.name,
    }


def format_comparison(report: dict[str, Any]) -> str:
    machine = report["machine"]
    peers = f"transformers {machine['transformers']}"
    if "llama_cpp" in machine:
        peers += f", llama-cpp-python {machine['llama_cpp']}"
    lines = [
        f"{report['model']}, {report['prompt_tokens']} prompt + {report['new_tokens']} new tokens, "
        f"median of {report['trials']} trials",
        f"{machine_line(machine)}, {peers}",
        f"load average before: {report['load_average']:.2f} (other work makes all of this wrong)",
        "",
        f"{'':<24}{'prefill':>9}{'decode':>9}{'':>9}{'to transformers':>18}{'to llama.cpp':>18}{'to its Q8_0':>18}"
        f"{'read per':>11}{'of read':>9}",
        f"{'engine':<24}{'tok/s':>9}{'tok/s':>9}{'ms/step':>9}{'prefill  decode':>18}{'prefill  decode':>18}"
        f"{'prefill  decode':>18}{'token, MB':>11}{'limit':>9}",
    ]
    for result in report["engines"]:
        ratios = ""
        for peer in PEERS.values():
            pair = [result.get(f"{what}_ratio_to_{peer}") for what in ("prefill", "decode")]
            ratios += f"{'  '.join('' if r is None else f'{r:.2f}x' for r in pair):>18}"
        lines.append(
            f"{result['engine']:<24}{result['prefill_tokens_per_s']:>9.0f}{result['decode_tokens_per_s']:>9.1f}"
            f"{result['step_ms']:>9.2f}{ratios}{result['bytes_per_token'] / 1e6:>11.0f}"
            f"{result['share_of_read_limit']:>9.0%}"
        )
    lines += [
        "",
        f"Read limit: the weights of a step at {report['bytes_per_second'] / 1e9:.1f} GB/s, at which memory gave as "
        "much to a sum; the best pass of the run.",
    ]
    spread = max(max(r["trials_step_ms"]) / min(r["trials_step_ms"]) for r in report["engines"]) - 1
    if spread > 0.15:
        lines.append(f"The trials of one engine differ by {spread:.0%}: the machine was busy. Run it again.")
    for result in report["engines"]:
        if "load_to_first_token_s" in result:
            lines.append(
                f"{result['engine']}: {result['load_to_first_token_s']:.2f} s from loading to the first token."
            )
    lines.append("")
    for result in report["engines"]:
        if result["engine"] != report["compared_with"]:
            at = result["first_difference"]
            same = f"the same {report['new_tokens']} tokens as"
            says = same if at is None else f"other tokens, from new token {at} on, than"
            lines.append(f"{result['engine']} generated {says} {report['compared_with']}.")
    lines += ["", f"{'one step at position':<32}{'ms/step':>9}{'products':>10}{'attention':>11}{'the rest':>10}"]
    for name, rows in report["parts"].items():
        for row in rows:
            parts = [row["step_ms"], row["products_ms"], row["attention_ms"]]
            rest = parts[0] - parts[1] - parts[2]
            lines.append(
                f"{name:<24}{row['position']:>8,}{parts[0]:>9.2f}{parts[1]:>10.2f}{parts[2]:>11.2f}{rest:>10.2f}"
            )
    lines += ["", f"{report['rows']} sequences together{'':<8}{'prefill':>9}{'decode':>9}{'to llama.cpp':>18}"]
    for row in report["batches"]:
        pair = [row.get(f"{what}_ratio_to_llama_cpp") for what in ("prefill", "decode")]
        ratios = "  ".join("" if r is None else f"{r:.2f}x" for r in pair)
        lines.append(
            f"{row['engine']:<30}{row['prefill_tokens_per_s']:>9.0f}{row['decode_tokens_per_s']:>9.1f}{ratios:>18}"
        )
    if report["quality"]:
        first, (prompts, tokens) = report["quality"][0], report["agreement"]
        lines += [
            "",
            f"perplexity on {first['tokens']:,} tokens of {report['text']}; greedy runs of {tokens} tokens from "
            f"{prompts} places in it, compared with those of {first['engine']}",
            f"{'':<24}{'perplexity':>11}{'change':>9}{'same runs':>11}{'tokens before parting':>23}",
        ]
        for row in report["quality"]:
            change = row["perplexity"] / first["perplexity"] - 1
            lines.append(
                f"{row['engine']:<24}{row['perplexity']:>11.3f}{change:>9.2%}{row['same_runs']:>8}/{prompts}"
                f"{row['tokens_before_parting']:>23.1f}"
            )
    return "\n".join(lines)


def on_gpu(argv: Sequence[str] | None) -> bool:
    """Whether to run `compare_gpu.py`: a GPU, and no model."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--device", default="")
    parser.add_argument("--model")
    args, _ = parser.parse_known_args(argv)
    return str(args.device).startswith("cuda") and args.model is None


def main(argv: Sequence[str] | None = None) -> None:
    if on_gpu(argv):
        import compare_gpu

        compare_gpu.main(argv)
        return
    from infer.cli.common import DEFAULT_MODEL  # needs typer, which a GPU machine may lack

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="a folder, a GGUF file or a built-in name (%(default)s)")
    parser.add_argument(
        "--widths",
        nargs="+",
        choices=["float", "auto", *BITS],
        help="of infer's weights; float: in --dtype; auto: as in the file (on a CPU all but auto, else float)",
    )
    parser.add_argument("--prompt-tokens", type=int, default=64, help="length of the prompt (%(default)s)")
    parser.add_argument("--new-tokens", type=int, default=128, help="tokens to generate, 2 or more (%(default)s)")
    parser.add_argument("--rows", type=int, default=16, help="sequences decoded together (%(default)s)")
    parser.add_argument("--trials", type=int, default=3, help="trials of each engine (%(default)s)")
    reference = parser.add_mutually_exclusive_group()
    reference.add_argument("--no-cache", action="store_true", help="also run transformers without its cache")
    reference.add_argument("--no-transformers", action="store_true", help="for models that are too large for it")
    parser.add_argument("--dtype", default="float32", help="(%(default)s)")
    parser.add_argument("--device", default="auto", help="(%(default)s)")
    parser.add_argument(
        "--positions", type=int, nargs="+", default=[64, 1024], help="where to time single steps (64 1024)"
    )
    parser.add_argument("--steps", type=int, default=32, help="steps to time at each position (%(default)s)")
    parser.add_argument("--text", type=Path, default=TEXT, help="text for perplexity (benchmarks/text.md)")
    parser.add_argument(
        "--agreement",
        type=int,
        nargs=2,
        default=[20, 32],
        metavar=("PROMPTS", "TOKENS"),
        help="greedy runs to compare (20 32)",
    )
    parser.add_argument("--no-quality", action="store_true", help="measure neither perplexity nor agreement")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    args = parser.parse_args(argv)
    for name, least in (("prompt_tokens", 1), ("new_tokens", 2), ("trials", 1), ("steps", 1), ("rows", 2)):
        if getattr(args, name) < least:
            parser.error(f"--{name.replace('_', '-')} must be at least {least}, not {getattr(args, name)}")
    if min(args.positions) < 1 or min(args.agreement) < 1:
        parser.error("--positions and --agreement must be at least 1")
    if args.widths and args.widths[0] != "float" and not args.no_transformers:
        parser.error("--widths must begin with float, which the others are measured against")
    if not args.no_quality and not args.text.is_file():
        parser.error(f"there is no text {args.text}")
    if args.json and not args.json.parent.is_dir():
        parser.error(f"there is no folder {args.json.parent}")
    try:
        with TemporaryDirectory() as folder:
            report = compare(args, folder)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    print(format_comparison(report))
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
