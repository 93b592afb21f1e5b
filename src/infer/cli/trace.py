"""`infer trace`: a run looked at from inside."""

import functools
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infer.cli.common import (
    DEFAULT_MODEL,
    CacheDtypeOption,
    CacheMemoryOption,
    ChatOption,
    JsonOption,
    KVCacheOption,
    Loading,
    ModelOption,
    OnFullOption,
    PrefillChunkOption,
    PrefixStoreOption,
    PromptArgument,
    SystemOption,
    ThinkingOption,
    loading_options,
    parse_size,
    sampling_options,
)
from infer.cli.generate import Pages, as_dict, cache_for, figures, prepare, read_prompt, show
from infer.cli.repeat import TraceOptions, compared, overridden, repeated
from infer.cli.streams import say
from infer.engine.params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from infer.trace import Trace
    from infer.trace.repeat import SavedRun

PIPED_WIDTH = 100
DEFAULT_LAYERS = 4
DEFAULT_PROMPT_ROWS = 256
MOST_ALTERNATIVES = 2**31


@functools.partial(sampling_options, max_new_tokens=32)
@loading_options
def trace(
    context: typer.Context,
    prompt: PromptArgument = None,
    *,
    from_page: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="PAGE.html",
            help="Repeat the run of a page that --html wrote, with its prompt and settings, and say whether the "
            "tokens are the same. Options beside it replace the page's.",
        ),
    ] = None,
    model: ModelOption = DEFAULT_MODEL,
    layers: Annotated[
        str | None,
        typer.Option(
            help="Layers to trace: all, or some, like 0,5,-1.", show_default="four, from the first to the last"
        ),
    ] = None,
    heads: Annotated[str, typer.Option(help="Heads to trace: all, or some, like 0,5,-1.")] = "all",
    alternatives: Annotated[int, typer.Option(help="How many of the likeliest tokens to keep for each step.")] = 10,
    prompt_rows: Annotated[
        int,
        typer.Option(help="Trace so many of the prompt's tokens too, the last ones; 0: none.", min=0),
    ] = DEFAULT_PROMPT_ROWS,
    show_layer: Annotated[
        int | None, typer.Option(help="Draw the attention of this layer.", show_default="the mean of those traced")
    ] = None,
    show_head: Annotated[
        int | None, typer.Option(help="Draw the attention of this head.", show_default="the mean of those traced")
    ] = None,
    show_step: Annotated[str, typer.Option(help="Draw a strip for this step, for the last, or for all.")] = "last",
    html: Annotated[Path | None, typer.Option(help="Write a page to look at in a browser.")] = None,
    save: Annotated[
        list[Path] | None, typer.Option(help="Write the numbers into this .jsonl or .npz file; may be repeated.")
    ] = None,
    chat: ChatOption = False,
    system: SystemOption = None,
    thinking: ThinkingOption = None,
    prefill_chunk: PrefillChunkOption = None,
    kv_cache: KVCacheOption = True,
    cache_dtype: CacheDtypeOption = "auto",
    on_full: OnFullOption = "error",
    cache_memory: CacheMemoryOption = None,
    prefix_store: PrefixStoreOption = None,
    as_json: JsonOption = False,
    loading: Loading,
    params: SamplingParams,
) -> None:
    """See how each token was chosen: from which others, how surely, and where attention looked.

    Probabilities and entropy are the model's own, before temperature and filters.
    """
    from infer import Trace
    from infer.engine.generate import stream
    from infer.engine.result import collect

    files = [*(save or []), *([html] if html is not None else [])]
    check_files(files, html)
    options = TraceOptions(
        model=model,
        prompt=None if prompt is None else read_prompt(prompt),
        chat=chat,
        system=system,
        thinking=thinking,
        prefill_chunk=prefill_chunk,
        kv_cache=kv_cache,
        cache_dtype=cache_dtype,
        on_full=on_full,
        layers=layers,
        heads=heads,
        alternatives=alternatives,
        prompt_rows=prompt_rows,
        loading=loading,
        params=params,
    )
    saved, given, known_ids = None, set[str](), None
    if from_page is not None:
        from infer.trace.repeat import read_page

        saved = read_page(from_page)
        given = {name for name in context.params if is_given(context, name)}
        options, known_ids = repeated(options, saved, given, from_page)
    elif options.prompt is None:
        options = replace(options, prompt=read_prompt(None, ", or a page to repeat with --from"))
    if not 1 <= options.alternatives <= MOST_ALTERNATIVES:
        raise ValueError(f"--alternatives must be 1 or more, up to {MOST_ALTERNATIVES:,}, not {options.alternatives}")
    params = options.params
    parse_step(show_step, params.max_new_tokens)
    asked_layers = None if options.layers is None else parse_numbers("--layers", options.layers)
    asked_heads = parse_numbers("--heads", options.heads)

    tokenizer, config, prompt_ids = prepare(
        options.prompt or "" if known_ids is None else known_ids,
        options.model,
        params,
        chat=options.chat,
        system=options.system,
        thinking=options.thinking,
        prefill_chunk=options.prefill_chunk,
        kv_cache=options.kv_cache,
        cache_dtype=options.cache_dtype,
        on_full=options.on_full,
    )
    if options.layers is None:
        asked_layers = spread(config.num_hidden_layers, DEFAULT_LAYERS) + ([] if show_layer is None else [show_layer])
    trace = Trace(asked_layers, asked_heads, options.alternatives, options.prompt_rows)
    trace.title = options.model
    trace.check(config, len(prompt_ids), params.max_new_tokens)  # before the weights are read
    layer = shown("layer", show_layer, config.num_hidden_layers, trace.layers)
    head = shown("head", show_head, config.num_attention_heads, trace.heads)

    pages = Pages(parse_size(cache_memory), prefix_store)
    pages.check(options.kv_cache)
    if from_page is not None:
        say(f"repeating {from_page} with {options.model}")
    positions = len(prompt_ids) + params.max_new_tokens
    network = options.loading.load(options.model, config if options.kv_cache else None, positions, options.cache_dtype)
    cache = cache_for(network, prompt_ids, params, options.prefill_chunk, options.kv_cache, options.cache_dtype, pages)
    chunk = pages.chunk(config, options.prefill_chunk)
    stepping = stream(
        network, tokenizer, prompt_ids, params, cache=cache, prefill_chunk=chunk, on_full=options.on_full, trace=trace
    )
    steps = show(stepping, quiet=as_json, most=params.max_new_tokens)
    if not steps:
        sys.exit(130)
    del trace.steps[len(steps) :]  # a step that Ctrl-C kept from being printed
    trace.settings |= options.settings()
    result = collect(prompt_ids, steps, cache.memory_bytes)
    pages.keep(cache)
    unsaved = save_all(trace, files)  # first: whoever reads the output may close it early
    same, verdict = compare(trace, saved, from_page)
    if as_json:
        about = {} if saved is None else {"from": str(from_page), "same_tokens": same}
        print(json.dumps({"model": options.model, **as_dict(result), **about, **summary(trace, layer, head)}))
    else:
        print_trace(trace, layer, head, parse_step(show_step, params.max_new_tokens, len(steps)))
    for file in files:
        if file not in unsaved:
            say(f"wrote {file}")
    say(f"[{figures(result)}{verdict and f' · {verdict}'}]")
    for file, error in unsaved.items():
        raise OSError(f"{file} could not be written: {error}")
    if result.finish_reason == "interrupted":
        sys.exit(130)
    if not same and not overridden(given):
        sys.exit(1)


def is_given(context: typer.Context, name: str) -> bool:
    """Whether an option stands on the command line."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def compare(trace: "Trace", saved: "SavedRun | None", page: Path | None) -> tuple[bool, str]:
    """With the run that was repeated, if there is one."""
    if saved is None or page is None:
        return True, ""
    return compared(saved, [step.token_id for step in trace.steps], [step.text for step in trace.steps], page)


def save_all(trace: "Trace", files: "Sequence[Path]") -> dict[Path, OSError]:
    """Returns what could not be written, and why: a run is worth showing all the same."""
    unsaved = {}
    for file in files:
        try:
            trace.save(file)
        except OSError as error:
            unsaved[file] = error
    return unsaved


def check_files(files: "Sequence[Path]", html: Path | None) -> None:
    from infer.trace.save import check_path

    if html is not None and html.suffix != ".html":
        raise ValueError(f"--html writes a page, whose name must end in .html, not {html.name!r}: see also --save")
    for file in files:
        check_path(file)


def parse_numbers(option: str, text: str) -> list[int] | None:
    if text == "all":
        return None
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise ValueError(f"{option} is all, or numbers like 0,5,-1, not {text!r}") from None


def parse_step(text: str, most: int, count: int | None = None) -> list[int]:
    """The steps to draw strips for, counted from 0. most: that there can be; count: that there were."""
    count = most if count is None else count
    if text == "all":
        return list(range(count))
    if text == "last":
        return [count - 1]
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"--show-step is a number from 1 on, last or all, not {text!r}")
    if int(text) > most:
        raise ValueError(f"--show-step {text} is beyond the {most} steps that --max-new-tokens allows")
    return [min(int(text), count) - 1]


def spread(count: int, most: int) -> list[int]:
    """From the first to the last of so many, evenly."""
    chosen = min(count, most)
    return [i * (count - 1) // max(1, chosen - 1) for i in range(chosen)]


def shown(what: str, asked: int | None, count: int, traced: "Sequence[int]") -> int | None:
    if asked is None:
        return None
    number = asked + count if asked < 0 else asked
    if number not in traced:
        raise ValueError(f"--show-{what} {asked} is not traced: --{what}s are {', '.join(map(str, traced))}")
    return number


def summary(trace: "Trace", layer: int | None, head: int | None) -> dict[str, Any]:
    """All but the attention rows."""
    from infer.trace.looks import attention, looked_at
    from infer.trace.save import without_rows

    looks = [looked_at(trace, attention(trace, i, layer=layer, head=head)) for i in range(len(trace.steps))]
    steps = [
        without_rows(step) | {"looked_at": [look._asdict() for look in found]}
        for step, found in zip(trace.steps, looks, strict=True)
    ]
    return {"layers": trace.layers, "heads": trace.heads, "steps": steps}


def print_trace(trace: "Trace", layer: int | None, head: int | None, strips: "Sequence[int]") -> None:
    from rich.console import Console

    from infer.trace.terminal import draw

    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = PIPED_WIDTH
    console.print()
    for line in draw(trace, console.width, layer=layer, head=head, strips=strips):
        console.print(line, soft_wrap=True)
