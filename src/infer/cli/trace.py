"""`infer trace`: how each token of a run was chosen. --from repeats the run of a saved page."""

import json
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infer.cli.common import (
    DEFAULT_MODEL,
    JsonOption,
    LoadOptions,
    ModelOption,
    OptionGroup,
    PrefixCacheOptions,
    sampling_options,
)
from infer.cli.run import Run, SequenceOptions, as_dict, read_prompt, spread, stats_line
from infer.cli.streams import say
from infer.engine.params import SamplingParams
from infer.values import short_repr

if TYPE_CHECKING:
    from infer.trace import Trace
    from infer.trace.page import SavedRun

PIPED_WIDTH = 100
DEFAULT_LAYERS = 4
MAX_ALTERNATIVES = 2**31
NEUTRAL = {"layers", "heads", "alternatives", "prompt_rows"}  # options that change no token
ENCODING = ("prompt", "chat", "system", "thinking", "chat_template")  # options that change how the prompt is encoded
LOADING = ("dtype", "device", "quantize", "context")
# Settings of a page: names shared with options; values of missing ones; types where no option checks them.
SAME_NAMES = (
    *(*ENCODING, "kv_cache", "on_full", "prefill_chunk", "cache_dtype", "prompt_rows"),
    *LOADING,
)
MISSING_SETTINGS: dict[str, Any] = dict.fromkeys(("model", "context", *ENCODING)) | {"chat": False}
KINDS = {
    **dict.fromkeys(("model", "prompt", "system", "chat_template"), str | None),
    **dict.fromkeys(("chat", "kv_cache"), bool),
    **dict.fromkeys(("top_k", "prompt_rows"), int),
    "context": int | None,
    "thinking": bool | None,
}


@dataclass(frozen=True)
class RecordOptions(OptionGroup):
    """What to record."""

    layers: Annotated[
        str | None,
        typer.Option(help="Layers to trace: all, or some, like 0,5,-1.", show_default="four, evenly spaced"),
    ] = None
    heads: Annotated[str, typer.Option(help="Heads to trace: all, or some, like 0,5,-1.")] = "all"
    alternatives: Annotated[int, typer.Option(help="Number of most likely tokens to record at each step.")] = 10
    prompt_rows: Annotated[
        int, typer.Option(help="Also trace this many of the prompt's last tokens; 0: none.", min=0)
    ] = 256


def trace(
    *,
    command: typer.Context,
    from_page: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="PAGE.html",
            help="Repeat the run of a page that --html wrote, with its prompt and settings, and check that the tokens "
            "are the same. Other options override those of the page.",
        ),
    ] = None,
    model_name: ModelOption = DEFAULT_MODEL,
    record: RecordOptions,
    show_layer: Annotated[
        int | None, typer.Option(help="Draw the attention of this layer.", show_default="the mean of all traced")
    ] = None,
    show_head: Annotated[
        int | None, typer.Option(help="Draw the attention of this head.", show_default="the mean of all traced")
    ] = None,
    show_step: Annotated[
        str, typer.Option(help="Draw a heat strip for this step, for last, or for all; the page's address selects it.")
    ] = "last",
    html: Annotated[
        Path | None, typer.Option(help="Write a page to open in a browser, and print its address instead of the table.")
    ] = None,
    save: Annotated[
        list[Path] | None, typer.Option(help="Write the numbers into this .jsonl or .npz file; may be repeated.")
    ] = None,
    table: Annotated[
        bool, typer.Option("--table", help="With --html: also print the text and the table of its tokens.")
    ] = False,
    sequence: SequenceOptions,
    caches: PrefixCacheOptions,
    as_json: JsonOption = False,
    load: LoadOptions,
    params: Annotated[SamplingParams, sampling_options(max_new_tokens=32)],
) -> None:
    """See how each token was chosen: its alternatives, the model's certainty, and where attention looked.

    Probabilities and entropy are the model's, before temperature and filters.
    """
    from infer import Trace
    from infer.trace.page import read_page

    if table and as_json:
        raise ValueError("--table and --json both print the steps: give one of them")
    files = [*(save or []), *([html] if html is not None else [])]
    check_files(files, html)
    if sequence.prompt is not None:
        sequence = replace(sequence, prompt=read_prompt(sequence.prompt))
    saved, saved_ids, is_changed = None, None, False
    if from_page is not None:
        saved = read_page(from_page)
        sources = {name: command.get_parameter_source(name) for name in command.params}
        given = {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}
        values = saved_options(saved, from_page, given)
        is_changed = bool(given & values.keys() - NEUTRAL)
        model_name, sequence, caches, record, load, params = (
            model_name if "model_name" in given else values["model_name"],
            *(overridden(group, values, given) for group in (sequence, caches, record, load, params)),
        )
        saved_ids = saved_prompt(saved, from_page, given, sequence)
    elif sequence.prompt is None:
        sequence = replace(sequence, prompt=read_prompt(None, ", or a page to repeat with --from"))
    if not 1 <= record.alternatives <= MAX_ALTERNATIVES:
        raise ValueError(f"--alternatives must be 1 or more, up to {MAX_ALTERNATIVES:,}, not {record.alternatives}")
    parse_step(show_step, params.max_new_tokens)
    layers = None if record.layers is None else parse_numbers("--layers", record.layers)
    heads = parse_numbers("--heads", record.heads)

    prompt_or_ids = sequence.prompt or "" if saved_ids is None else saved_ids
    run = Run(model_name, prompt_or_ids, params, sequence, caches, load)
    config = run.config
    if record.layers is None:
        layers = spread(config.num_hidden_layers, DEFAULT_LAYERS) + ([] if show_layer is None else [show_layer])
    trace = Trace(layers, heads, record.alternatives, record.prompt_rows)
    trace.title = model_name
    trace.check(config, len(run.prompt_ids), params.max_new_tokens)  # before the weights are read
    layer = traced("layer", show_layer, config.num_hidden_layers, trace.layers)
    head = traced("head", show_head, config.num_attention_heads, trace.heads)
    if from_page is not None:
        say(f"repeating {from_page} with {model_name}")
    run.load()
    prints_text = not as_json and (html is None or table)
    result = run.generate(quiet=not prints_text, trace=trace)
    del trace.steps[result.generated_tokens :]  # a step that was interrupted before it was printed
    trace.settings |= {"model": model_name} | {name: getattr(load, name) for name in LOADING}
    trace.settings |= {name: getattr(sequence, name) for name in ENCODING}
    unsaved = save_all(trace, files)  # first: the reader of the output may close it early
    same, verdict = True, ""
    if saved is not None:
        same, verdict = compare(trace, saved, from_page)
    if as_json:
        about = {} if saved is None else {"from": str(from_page), "same_tokens": same}
        print(json.dumps({"model": model_name, **as_dict(result), **about, **summary(trace, layer, head)}))
    elif prints_text:
        print_trace(trace, layer, head, parse_step(show_step, params.max_new_tokens, result.generated_tokens))
    interrupted = "interrupted" if result.finish_reason == "interrupted" else ""
    for file in files:
        if file in unsaved:
            continue
        if file == html:
            shown = page_address(file, trace, layer, head, show_step)
            notes = [] if prints_text or as_json else [note for note in (verdict, interrupted) if note]
            say(" · ".join([f"wrote {file}: {shown}", *notes]))
        else:
            say(f"wrote {file}")
    if prints_text or as_json or html in unsaved:
        say(f"[{stats_line(result)}{verdict and f' · {verdict}'}]")
    for file, error in unsaved.items():
        raise OSError(f"{file} could not be written: {error}")
    if result.finish_reason == "interrupted":
        sys.exit(130)
    if not same and not is_changed:
        sys.exit(1)


def saved_options(saved: "SavedRun", path: Path, given: Collection[str]) -> dict[str, Any]:
    """The options that repeat a saved run. given: names of the options on the command line."""
    settings = MISSING_SETTINGS | saved.settings
    if settings["model"] is None and "model_name" not in given:
        raise ValueError(f"{path} does not say which model it ran: give it with --model")
    try:
        for name, kind in KINDS.items():
            if not isinstance(settings[name], kind):
                raise ValueError(f"{name} is {short_repr(settings[name])}")
        values = {name: settings[name] for name in SAME_NAMES}
        values |= {"model_name": settings["model"], "alternatives": settings["top_k"]}
        values |= {
            "layers": ",".join(map(str, saved.layers)) or None,
            "heads": ",".join(map(str, saved.heads)) or "all",
        }
        untraced = {"n": 1, "logprobs": None, "prompt_logprobs": None}
        return values | vars(SamplingParams.from_json({**settings["params"], **untraced}))
    except (ValueError, KeyError, TypeError) as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else error
        raise ValueError(f"{path} is not a page of a trace that can be repeated: {reason}") from None


def overridden(group: Any, saved: Mapping[str, Any], given: Collection[str]) -> Any:
    """A group of options, with saved values for options that were not given."""
    names = [field.name for field in fields(group) if field.name in saved and field.name not in given]
    return replace(group, **{name: saved[name] for name in names})


def saved_prompt(saved: "SavedRun", path: Path, given: Collection[str], sequence: SequenceOptions) -> list[int] | None:
    """The tokens of a saved prompt; None if the prompt must be encoded again."""
    encoding = {*ENCODING, "model_name"}.intersection(given)
    if not encoding or (encoding == {"model_name"} and saved.settings.get("prompt") is None):
        return saved.prompt
    if sequence.prompt is None:
        raise ValueError(f"{path} holds only the tokens of its prompt: give the prompt as well")
    return None


def compare(trace: "Trace", saved: "SavedRun", path: Path | None) -> tuple[bool, str]:
    """Whether both runs have the same tokens, as far as both go; and a sentence that says so."""
    tokens = [step.token_id for step in trace.steps]
    both = min(len(tokens), len(saved.tokens))
    at = next((i for i in range(both) if tokens[i] != saved.tokens[i]), None)
    if at is not None:
        text = trace.steps[at].text
        return False, f"DIFFERENT tokens than in {path} from step {at + 1} on: {text!r}, not {saved.texts[at]!r}"
    if len(tokens) == len(saved.tokens):
        return True, f"the same {both} tokens as in {path}"
    return True, f"the same first {both} tokens as in {path}, which has {len(saved.tokens)} of them, not {len(tokens)}"


def page_address(page: Path, trace: "Trace", layer: int | None, head: int | None, show_step: str) -> str:
    """The address of a page; what --show-step, --show-layer and --show-head select is selected when it opens."""
    shown = {"step": min(int(show_step), len(trace.steps)) if show_step.isdecimal() else None}
    shown |= {"layer": layer, "head": head}
    fragment = "&".join(f"{name}={number}" for name, number in shown.items() if number is not None)
    return page.resolve().as_uri() + (fragment and f"#{fragment}")


def save_all(trace: "Trace", files: Sequence[Path]) -> dict[Path, OSError]:
    """Returns the files that could not be written, with the errors: the run is shown regardless."""
    unsaved = {}
    for file in files:
        try:
            trace.save(file)
        except OSError as error:
            unsaved[file] = error
    return unsaved


def check_files(files: Sequence[Path], html: Path | None) -> None:
    from infer.trace.save import check_path

    if html is not None and html.suffix != ".html":
        raise ValueError(f"--html needs a file name that ends in .html, not {html.name!r}; --save writes other formats")
    for file in files:
        check_path(file)


def parse_numbers(option: str, text: str) -> list[int] | None:
    if text == "all":
        return None
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise ValueError(f"{option} must be all, or numbers like 0,5,-1, not {text!r}") from None


def parse_step(text: str, maximum: int, count: int | None = None) -> list[int]:
    """The steps to draw strips for, from 0. maximum: the limit on steps; count: the steps that were run."""
    count = maximum if count is None else count
    if text == "all":
        return list(range(count))
    if text == "last":
        return [count - 1]
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"--show-step must be a step from 1 on, last or all, not {text!r}")
    if int(text) > maximum:
        raise ValueError(f"--show-step {text} is beyond the {maximum} steps that --max-new-tokens allows")
    return [min(int(text), count) - 1]


def traced(what: str, number: int | None, count: int, numbers: Sequence[int]) -> int | None:
    """The layer or head to draw, which must be among those traced."""
    if number is None:
        return None
    index = number + count if number < 0 else number
    if index not in numbers:
        raise ValueError(f"--show-{what} {number} is not traced: --{what}s are {', '.join(map(str, numbers))}")
    return index


def summary(trace: "Trace", layer: int | None, head: int | None) -> dict[str, Any]:
    """The trace as JSON values, without its attention rows."""
    from infer.trace.data import attention, looked_at
    from infer.trace.save import without_rows

    looks = [looked_at(trace, attention(trace, i, layer=layer, head=head)) for i in range(len(trace.steps))]
    steps = [
        without_rows(step) | {"looked_at": [look._asdict() for look in found]}
        for step, found in zip(trace.steps, looks, strict=True)
    ]
    return {"layers": trace.layers, "heads": trace.heads, "steps": steps}


def print_trace(trace: "Trace", layer: int | None, head: int | None, strips: Sequence[int]) -> None:
    from rich.console import Console

    from infer.trace.terminal import draw

    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = PIPED_WIDTH
    console.print()
    for line in draw(trace, console.width, layer=layer, head=head, strips=strips):
        console.print(line, soft_wrap=True)
