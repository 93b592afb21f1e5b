"""`infer bench`, `infer perplexity`, `infer compare` and `infer score`: how fast a model is, and how good."""

import json
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infer import progress
from infer.cli import completion
from infer.cli.common import (
    DEFAULT_MODEL,
    MODEL_HELP,
    CacheDtypeOption,
    DeviceOption,
    JsonOption,
    LoadOptions,
    ModelChoice,
    ModelOption,
    OnFullOption,
    OptionGroup,
    ParallelLoadOptions,
    PrefillChunkOption,
    ThreadsOption,
    check_cache_dtype,
    read_utf8,
)
from infer.cli.run import RECOMPUTE_HINT, read_prompt
from infer.cli.status import shown
from infer.cli.streams import counted, on_stdout, print_table, say

if TYPE_CHECKING:
    from infer.config import ModelConfig
    from infer.engine.result import Score


def bench(
    *,
    chosen: ModelChoice,
    prompt_tokens: Annotated[int | None, typer.Option(help="Tokens to prefill.", show_default="64")] = None,
    new_tokens: Annotated[
        int | None,
        typer.Option("--max-new-tokens", "-n", "--new-tokens", help="Tokens to generate.", show_default="128"),
    ] = None,
    suite: Annotated[bool, typer.Option("--suite", help="Measure a short, a medium and a long setting.")] = False,
    kv_cache: Annotated[bool, typer.Option(help="Measure with or without the cache.")] = True,
    prefill_chunk: PrefillChunkOption = None,
    compare: Annotated[bool, typer.Option("--compare", help="Measure both, and the speed-up.")] = False,
    trials: Annotated[int, typer.Option(help="Timed runs of each setting.")] = 3,
    warmup: Annotated[int, typer.Option(help="Untimed runs before the timed ones.")] = 1,
    plot: Annotated[Path | None, typer.Option(help="Plot step time against position into this PNG file.")] = None,
    report: Annotated[Path | None, typer.Option(help="Write all measurements into this JSON file.")] = None,
    cache_dtype: CacheDtypeOption = "auto",
    on_full: OnFullOption = "error",
    speculate: Annotated[
        str | None,
        typer.Option(
            help="Measure with drafts and without, alternating: ngram, ngram-shared or a smaller model.", metavar="NAME"
        ),
    ] = None,
    as_json: JsonOption = False,
    load: LoadOptions,
) -> None:
    """Measure time to first token, decode speed and memory."""
    from infer import ModelConfig, Tokenizer
    from infer.engine.model import backend_name, verifies_drafts
    from infer.engine.sequence import ContextExceeded
    from infer.evaluate import bench as bencher
    from infer.trace.save import check_writable

    if suite and (prompt_tokens, new_tokens) != (None, None):
        raise ValueError("--suite sets the lengths: leave --prompt-tokens and --max-new-tokens out")
    if compare and not kv_cache:
        raise ValueError("--compare measures with the cache and without it: leave --no-kv-cache out")
    others = (("--compare", compare), ("--plot", plot is not None), ("--no-kv-cache", not kv_cache))
    if speculate is not None and (given := [name for name, is_given in others if is_given]):
        raise ValueError(f"--speculate measures with drafts and without, both with the cache: leave {given[0]} out")
    lengths = [(64 if prompt_tokens is None else prompt_tokens, 128 if new_tokens is None else new_tokens)]
    if suite:
        lengths = list(bencher.SUITE.values())
    check_cache_dtype(cache_dtype, kv_cache)
    kinds: list[tuple[Any, ...]] = [(kv_cache, prefill_chunk, cache_dtype, on_full)]
    if compare:
        kinds.append((False, None, "auto", on_full))
    if speculate is not None:
        kinds.append((*kinds[0], speculate))
    configs = [bencher.BenchConfig(prompt, new, trials, warmup, *kind) for prompt, new in lengths for kind in kinds]
    if plot is not None:
        bencher.check_plot()
    for path in (plot, report):
        if path is not None:
            check_writable(path)
    model_config = ModelConfig.from_pretrained(chosen.name, load.context)
    for config in configs:
        try:
            bencher.check(model_config, config)
        except ContextExceeded as error:
            raise ValueError(f"{error}{RECOMPUTE_HINT}") from None
    tokenizer = Tokenizer(chosen.name)
    model = load.load(chosen.name)
    if speculate is not None and not verifies_drafts(backend_name(model)):
        raise ValueError(f"only kernels verify drafts, not backend {backend_name(model)}: omit --speculate")
    results = []
    together, drafts = (1, "") if speculate is None else (2, ", with drafts and without")
    for at in range(0, len(configs), together):
        config, *beside = configs[at : at + together]
        cache = "with" if config.use_kv_cache else "without"
        say(f"{config.prompt_tokens} + {config.new_tokens} tokens {cache} the cache{drafts}")
        results += bencher.run_alternating(model, tokenizer, [config, *beside], lambda step: say(f"  {step}"))
    machine = bencher.describe_machine(model.device)
    everything = bencher.report(results, chosen.name, machine)
    print(json.dumps(everything) if as_json else bencher.format_table(results, chosen.name, machine))
    if report is not None:
        report.write_text(json.dumps(everything, indent=1) + "\n")
        say(f"wrote {report}")
    if plot is not None:
        bencher.plot(results, plot, chosen.name, machine)
        say(f"wrote {plot}")


WindowOption = Annotated[
    int | None, typer.Option(help="Tokens per window.", show_default="1024, or the model's context")
]


@dataclass(frozen=True)
class WindowLoadOptions(ParallelLoadOptions):
    context: WindowOption = None


@dataclass(frozen=True)
class TextOptions(OptionGroup):
    """A text file, and the windows to score it in."""

    text: Annotated[Path, typer.Option(help="A UTF-8 text file.")]
    stride: Annotated[
        int | None, typer.Option(help="Tokens between the starts of two windows.", show_default="half a window")
    ] = None


def perplexity(
    *,
    chosen: ModelChoice,
    text: TextOptions,
    cache_dtype: CacheDtypeOption = "auto",
    as_json: JsonOption = False,
    load: WindowLoadOptions,
) -> None:
    """Measure how well a model predicts a text, e.g. the loss from quantized weights or caches.

    Each token is scored once, given the tokens before it in its window.
    """
    from infer import Tokenizer
    from infer.evaluate.perplexity import perplexity as measure
    from infer.evaluate.perplexity import plan

    check_cache_dtype(cache_dtype)
    contents = read_utf8(text.text)
    size = len(contents.encode())
    tokenizer, config = Tokenizer(chosen.name), window_config(chosen.name, load.context)
    token_ids = tokenizer.encode(contents, add_special_tokens=False)
    prefix = tokenizer.encode("")  # BOS, where the tokenizer adds one
    windows = plan(config, token_ids, context=load.context, stride=text.stride, prefix=prefix)
    model = load.load(chosen.name)
    say(f"{windows.tokens:,} tokens to score, in windows of {windows.context:,} that advance by {windows.stride:,}")
    started = time.perf_counter()
    with shown(progress.SCORING):
        found = measure(
            model,
            token_ids,
            context=windows.context,
            stride=windows.stride,
            prefix=prefix,
            cache_dtype=cache_dtype,
            progress=scoring(windows.tokens, "perplexity {:.3f}"),
        )
    seconds = time.perf_counter() - started
    bits_per_byte = found.bits / size
    if as_json:
        measured = {"bits_per_byte": bits_per_byte, "bytes": size, "time_s": seconds}
        settings = {"quantize": load.quantize, "cache_dtype": cache_dtype}
        print(json.dumps({"model": chosen.name, "text": str(text.text), **settings, **asdict(found), **measured}))
        return
    print_table(
        ("perplexity", f"{found.perplexity:.4f}"),
        ("nats per token", f"{found.nats_per_token:.4f}"),
        ("bits per byte", f"{bits_per_byte:.4f}"),
        ("tokens scored", f"{found.tokens:,} in {found.windows:,} windows of {found.context:,}"),
        ("time", f"{seconds:.1f} s, {found.tokens / seconds:,.0f} tok/s"),
    )


def window_config(model_name: str, context: int | None) -> "ModelConfig":
    """The config of a model that is loaded for windows of so many tokens. `plan` refuses a window that is too short."""
    from infer import ModelConfig

    config = ModelConfig.from_pretrained(model_name)
    return config.with_context(context) if (context or 0) > config.max_position_embeddings else config


def quantize_option(which: str) -> Any:
    help = f"How the {which} model's weights are stored: auto (as in the file), or in 4 or 8 bits, on a CPU."
    return typer.Option(help=help, metavar="auto|int4|int8", autocompletion=completion.QUANTIZE)


def dtype_option(which: str) -> Any:
    help = f"The dtype of the {which} model: auto, float32, bfloat16, float16 or float64."
    return typer.Option(help=help, autocompletion=completion.DTYPES)


def compare(
    *,
    model_a: Annotated[str, typer.Argument(help=MODEL_HELP, metavar="MODEL_A", autocompletion=completion.model_names)],
    model_b: Annotated[
        str | None,
        typer.Argument(
            help="Another model with the same vocabulary.",
            metavar="MODEL_B",
            show_default="MODEL_A",
            autocompletion=completion.model_names,
        ),
    ] = None,
    text: TextOptions,
    quantize_a: Annotated[str | None, quantize_option("first")] = None,
    quantize_b: Annotated[str | None, quantize_option("second")] = None,
    dtype_a: Annotated[str, dtype_option("first")] = "auto",
    dtype_b: Annotated[str, dtype_option("second")] = "auto",
    device: DeviceOption = "auto",
    context: WindowOption = None,
    threads: ThreadsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compare the predictions of two models at each token of a text: KL divergence and top-1 agreement."""
    from infer import Tokenizer
    from infer.evaluate.perplexity import compare as measure
    from infer.evaluate.perplexity import plan

    names = (model_a, model_b or model_a)
    kinds = (dtype_a, device, quantize_a), (dtype_b, device, quantize_b)
    loads = [LoadOptions(*kind, threads, context) for kind in kinds]
    contents = read_utf8(text.text)
    tokenizer, other = map(Tokenizer, names)
    token_ids, prefix = tokenizer.encode(contents, add_special_tokens=False), tokenizer.encode("")
    if other.encode(contents, add_special_tokens=False) != token_ids:
        raise ValueError(
            "the two models split the text into different tokens: only models with one vocabulary can be compared"
        )
    where: dict[str, Any] = {"context": context, "stride": text.stride, "prefix": prefix}
    windows = [plan(window_config(name, context), token_ids, **where) for name in names]
    models = loads[0].load(names[0]), loads[1].load(names[1])
    with shown(progress.SCORING):
        found = measure(*models, token_ids, **where, progress=scoring(windows[0].tokens, "{:.6f} nats"))
    if as_json:
        settings = {"quantize_a": quantize_a, "quantize_b": quantize_b, "dtype_a": dtype_a, "dtype_b": dtype_b}
        about = {"model_a": names[0], "model_b": names[1], "text": str(text.text)}
        print(json.dumps({**about, **settings, **asdict(found)}))
        return
    if (names[0], loads[0]) == (names[1], loads[1]):
        say("note: both are the same model in the same precision; --quantize-b or --dtype-b changes the second")
    print_table(
        ("KL divergence", f"{found.kl_divergence:.6f} nats per token, {found.largest_kl_divergence:.4f} at most"),
        ("top-1 agreement", f"{found.same_top_token:.2%}"),
        ("perplexity of A", f"{found.perplexity:.4f}"),
        ("perplexity of B", f"{found.other_perplexity:.4f}"),
        ("tokens", f"{found.tokens:,}"),
    )


def scoring(total: int, note: str) -> Callable[[int, float], None]:
    """Reports progress to the status line; note: a format for the result so far."""
    return lambda done, so_far: progress.report(progress.SCORING, done, total, note=note.format(so_far))


def score(
    *,
    text: Annotated[
        str | None, typer.Argument(help="The text; - or no text reads standard input.", show_default=False)
    ] = None,
    model_name: ModelOption = DEFAULT_MODEL,
    as_json: JsonOption = False,
    load: ParallelLoadOptions,
) -> None:
    """Print the log-probability of each token of a text, and the total."""
    from infer import LLM, ModelConfig, Tokenizer

    text = read_prompt(text, what="text")
    tokenizer, config = Tokenizer(model_name), ModelConfig.from_pretrained(model_name, load.context)
    ids = tokenizer.encode(text)
    if len(ids) < 2:
        raise ValueError("the text is too short: it needs two tokens, as the first is not scored")
    if len(ids) > config.max_position_embeddings:
        raise ValueError(
            f"the text has {len(ids):,} tokens, and the model's context {config.max_position_embeddings:,}: "
            "`infer perplexity` scores longer texts in windows"
        )
    with LLM(load.load(model_name), tokenizer) as llm:
        found = llm.score(ids)
    if as_json:
        tokens = [
            {"id": token, "text": text, "logprob": None if given is None else given.logprob}
            for token, text, given in zip(found.token_ids, found.texts, found.logprobs, strict=True)
        ]
        about = {"model": model_name, "tokens": tokens}
        print(json.dumps({**about, "total": found.total, "perplexity": found.perplexity}))
        return
    for line in score_lines(found):
        print(line)


def score_lines(found: "Score") -> Iterable[str]:
    texts = [json.dumps(text, ensure_ascii=False) for text in found.texts]
    width = max(map(len, texts))
    yield f"{'token':<{width}}   log-probability   probability"
    for text, given in zip(texts, found.logprobs, strict=True):
        row = f"{on_stdout(text):<{width}}"
        yield row if given is None else f"{row} {given.logprob:>17.4f} {math.exp(given.logprob):>13.2%}"
    yield f"{'total':<{width}} {found.total:>17.4f}"
    yield f"perplexity {found.perplexity:.3f} over {counted(found.scored, 'token')}"
