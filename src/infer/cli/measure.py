"""`infer bench` and `infer perplexity`: how fast it is, and how good."""

import functools
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from infer.cli.common import (
    DEFAULT_MODEL,
    CacheDtypeOption,
    JsonOption,
    Loading,
    OnFullOption,
    PrefillChunkOption,
    check_cache_dtype,
    loading_options,
    model_option,
    read_utf8,
)
from infer.cli.streams import say


@model_option
@loading_options
def bench(
    *,
    model: str = DEFAULT_MODEL,
    prompt_tokens: Annotated[int | None, typer.Option(help="Tokens to prefill.", show_default="64")] = None,
    new_tokens: Annotated[
        int | None,
        typer.Option("--max-new-tokens", "-n", "--new-tokens", help="Tokens to generate.", show_default="128"),
    ] = None,
    suite: Annotated[bool, typer.Option("--suite", help="Measure a short, a medium and a long setting.")] = False,
    kv_cache: Annotated[bool, typer.Option(help="Measure with the cache or without it.")] = True,
    prefill_chunk: PrefillChunkOption = None,
    compare: Annotated[bool, typer.Option("--compare", help="Measure both, and the speed-up.")] = False,
    trials: Annotated[int, typer.Option(help="Timed runs of each setting.")] = 3,
    warmup: Annotated[int, typer.Option(help="Runs before those.")] = 1,
    plot: Annotated[Path | None, typer.Option(help="Draw step time against position into this PNG.")] = None,
    report: Annotated[Path | None, typer.Option(help="Write everything measured into this JSON file.")] = None,
    cache_dtype: CacheDtypeOption = "auto",
    on_full: OnFullOption = "error",
    as_json: JsonOption = False,
    loading: Loading,
) -> None:
    """Measure time to the first token, decode speed and memory."""
    from infer import ModelConfig, Tokenizer
    from infer.engine.request import ContextExceeded
    from infer.evaluate import bench as bencher

    if suite and (prompt_tokens, new_tokens) != (None, None):
        raise ValueError("--suite has lengths of its own: leave --prompt-tokens and --max-new-tokens out")
    if compare and not kv_cache:
        raise ValueError("--compare measures with the cache and without it: leave --no-kv-cache out")
    usual = 64 if prompt_tokens is None else prompt_tokens, 128 if new_tokens is None else new_tokens
    lengths = list(bencher.SUITE.values()) if suite else [usual]
    check_cache_dtype(cache_dtype, kv_cache)
    kinds = [(kv_cache, prefill_chunk, cache_dtype, on_full)]
    if compare:
        kinds = [(True, prefill_chunk, cache_dtype, on_full), (False, None, "auto", on_full)]
    configs = [bencher.BenchConfig(prompt, new, trials, warmup, *kind) for prompt, new in lengths for kind in kinds]
    if plot is not None:
        bencher.check_plot()
    for path in (plot, report):
        if path is not None and not path.parent.is_dir():
            raise FileNotFoundError(f"there is no folder {path.parent} to write {path.name} to")
        if path is not None and path.is_dir():
            raise IsADirectoryError(f"{path} is a folder, not a file to write to")
    model_config = ModelConfig.from_pretrained(model)
    for config in configs:
        try:
            bencher.check(model_config, config)
        except ContextExceeded as error:
            raise ValueError(f"{error}, or go on beyond it with --on-full recompute") from None
    tokenizer = Tokenizer(model)
    network = loading.load(model)
    results = []
    for config in configs:
        cache = "with" if config.use_kv_cache else "without"
        say(f"{config.prompt_tokens} + {config.new_tokens} tokens {cache} the cache")
        results.append(bencher.run(network, tokenizer, config, progress=lambda step: say(f"  {step}")))
    machine = bencher.describe_machine(network.device)
    everything = bencher.report(results, model, machine)
    print(json.dumps(everything) if as_json else bencher.format_table(results, model, machine))
    if report is not None:
        report.write_text(json.dumps(everything, indent=1) + "\n")
        say(f"wrote {report}")
    if plot is not None:
        bencher.plot(results, plot, model, machine)
        say(f"wrote {plot}")


@model_option
@functools.partial(loading_options, split=True)
def perplexity(
    model: str = DEFAULT_MODEL,
    *,
    text: Annotated[Path, typer.Option(help="A text file, in UTF-8.")],
    context: Annotated[
        int | None, typer.Option(help="Tokens of a window.", show_default="1024, or all the model has")
    ] = None,
    stride: Annotated[
        int | None, typer.Option(help="Tokens from one window to the next.", show_default="half a window")
    ] = None,
    cache_dtype: CacheDtypeOption = "auto",
    as_json: JsonOption = False,
    loading: Loading,
) -> None:
    """Measure how well a model predicts a text: what its weights and its cache lose in fewer bits.

    Each token is scored once, given those before it in its window.
    """
    from infer import ModelConfig, Tokenizer
    from infer.evaluate.perplexity import perplexity as measure
    from infer.evaluate.perplexity import plan

    check_cache_dtype(cache_dtype)
    contents = read_utf8(text)
    size = len(contents.encode())
    tokenizer, config = Tokenizer(model), ModelConfig.from_pretrained(model)
    token_ids = tokenizer.encode(contents, add_special_tokens=False)
    prefix = tokenizer.encode("")  # BOS, where the tokenizer puts one in front
    layout = plan(config, token_ids, context=context, stride=stride, prefix=prefix)  # before the weights are read
    network = loading.load(model)
    say(f"{layout.tokens:,} tokens to score, in windows of {layout.context:,} that move by {layout.stride:,}")

    def show(scored: int, so_far: float) -> None:
        if sys.stderr.isatty():
            end = "\n" if scored == layout.tokens else ""
            print(f"\r\033[K  {scored:,} tokens: {so_far:.3f}", end=end, file=sys.stderr, flush=True)

    started = time.perf_counter()
    found = measure(
        network,
        token_ids,
        context=layout.context,
        stride=layout.stride,
        prefix=prefix,
        cache_dtype=cache_dtype,
        progress=show,
    )
    seconds = time.perf_counter() - started
    bits_per_byte = found.bits / size
    if as_json:
        measured = {"bits_per_byte": bits_per_byte, "bytes": size, "time_s": seconds}
        settings = {"quantize": loading.quantize, "cache_dtype": cache_dtype}
        print(json.dumps({"model": model, "text": str(text), **settings, **asdict(found), **measured}))
        return
    for name, value in (
        ("perplexity", f"{found.perplexity:.4f}"),
        ("nats per token", f"{found.nats_per_token:.4f}"),
        ("bits per byte", f"{bits_per_byte:.4f}"),
        ("tokens scored", f"{found.tokens:,} in {found.windows:,} windows of {found.context:,}"),
        ("time", f"{seconds:.1f} s, {found.tokens / seconds:,.0f} tok/s"),
    ):
        print(f"{name:<22} {value}")
