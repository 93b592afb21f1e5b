"""`infer generate`: one prompt, or with --prompts a file of them."""

import asyncio
import functools
import json
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from infer import progress
from infer.cli.common import (
    DEFAULT_MODEL,
    JsonOption,
    ModelOption,
    ParallelLoadOptions,
    PrefixCacheOptions,
    read_utf8,
    sampling_options,
)
from infer.cli.run import Run, SequenceOptions, as_dict, read_prompt, stats_line
from infer.cli.sampling import Settings, resolve, say_settings
from infer.cli.status import shown
from infer.cli.streams import counted, say
from infer.engine.params import SamplingParams
from infer.values import did_you_mean, short_repr

if TYPE_CHECKING:
    from infer.engine.llm import LLM
    from infer.engine.result import GenerationResult

LINE_SETTINGS = {field.name for field in fields(SamplingParams)} - {"logit_bias", "n"}  # that a line may set
Message = dict[str, Any]


def generate(
    *,
    prompts: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.jsonl",
            help="Generate from every prompt of a file (- for standard input), and print a JSON object for each when "
            'it is finished. A line is a JSON string, or an object with "prompt" or "messages"; in a .txt file, text.',
        ),
    ] = None,
    model_name: ModelOption = DEFAULT_MODEL,
    sequence: SequenceOptions,
    caches: PrefixCacheOptions,
    compare: Annotated[bool, typer.Option("--compare", help="Generate again without the cache, and compare.")] = False,
    as_json: JsonOption = False,
    load: ParallelLoadOptions,
    params: Annotated[Settings, sampling_options(all_settings=True, fallbacks={})],
) -> None:
    """Generate from a prompt, streaming; or from many prompts, with --prompts."""
    if prompts is not None:
        if sequence.prompt is not None:
            raise ValueError("a prompt and --prompts were both given: leave one out")
        if compare or not sequence.kv_cache or sequence.on_full != "error":
            raise ValueError("--compare, --no-kv-cache and --on-full need a single prompt: leave --prompts out")
        generate_many(prompts, model_name, params, sequence, caches, load)
        return
    if params.params.n != 1 or params.params.prompt_logprobs is not None:
        raise ValueError("--n (samples; -n is the length) and --prompt-logprobs need --prompts")
    if params.params.logprobs is not None and not as_json:
        raise ValueError("--logprobs needs --json, which prints them")
    prompt = read_prompt(sequence.prompt, ", or a file of prompts with --prompts")
    if compare and not sequence.kv_cache:
        raise ValueError("--compare needs the cache: leave --no-kv-cache out")
    settings = resolve(model_name, params)
    chosen = settings.params
    if compare and chosen.seed is None:
        chosen = replace(chosen, seed=secrets.randbits(63))  # the same draws in both runs
    run = Run(model_name, prompt, chosen, sequence, caches, load)
    say_settings(settings)
    run.load()
    result = run.generate(quiet=as_json)
    output = {"model": model_name, **as_dict(result)}
    notes = f" · {result.num_cached_tokens:,} prompt tokens reused" if caches.is_paged else ""
    if chosen.constraint is not None and result.finish_reason == "length":
        notes += f" · cut at {counted(chosen.max_new_tokens, 'new token')}, before it matched"
    interrupted = result.finish_reason == "interrupted"
    if compare and not interrupted and (reference := run.without_cache(result.generated_tokens)) is not None:
        same = reference.token_ids == result.token_ids
        seconds = total_time(reference)
        speed_up = seconds / total_time(result)
        output["without_kv_cache"] = {**as_dict(reference), "same_tokens": same, "speed_up": speed_up}
        rounds = caches.cache_dtype != "auto"
        why = f"{caches.cache_dtype} rounds, see `infer perplexity`" if rounds else "see `infer verify`"
        tokens = "same tokens" if same else f"DIFFERENT tokens: {why}"
        notes += f" · {speed_up:.1f}x faster than without the cache ({seconds:.1f} s, {tokens})"
    say(f"[{stats_line(result)}{notes}]", dim=True)
    if as_json:
        print(json.dumps(output))
    if interrupted:
        sys.exit(130)


def total_time(result: "GenerationResult") -> float:
    return result.timing.prefill_time_s + result.timing.decode_time_s


class Line(NamedTuple):
    """A prompt of a file, with its parameters."""

    number: int
    id: Any  # given by the user; None: no id
    prompt: str | list[Message]
    params: SamplingParams
    settings: Mapping[str, Any] = {}  # the parameters that the line sets


def generate_many(
    source: str,
    model_name: str,
    chosen: Settings,
    sequence: SequenceOptions,
    caches: PrefixCacheOptions,
    load: ParallelLoadOptions,
) -> None:
    """`infer generate --prompts`: all prompts at once, printed as they finish."""
    from infer import LLM, ModelConfig
    from infer.engine.guide import guide_for

    lines = read_lines(source, chosen.params)
    sequence.check()
    caches.check()
    settings = resolve(model_name, chosen)
    lines = [line._replace(params=replace(settings.params, **line.settings)) for line in lines]
    tokenizer = sequence.tokenizer(model_name)
    config = ModelConfig.from_pretrained(model_name, load.context)
    for constrained in {line.params.constraint: line.params for line in lines if line.params.constraint}.values():
        guide_for(constrained, tokenizer, config)  # before the weights are read
    say_settings(settings)
    with LLM(load.load(model_name), tokenizer, **caches.for_llm()) as llm:
        if asyncio.run(_print_all(llm, lines, functools.partial(sequence.encode, tokenizer))):
            sys.exit(1)


def read_lines(source: str, params: SamplingParams) -> list[Line]:
    """The prompts of a file, or of standard input (-). Every error is found before a model is loaded.

    A line is a JSON string, or an object with "prompt" or "messages" and, optionally, settings and an "id". In a file
    that does not end in .jsonl or .json, a line may also be plain text.
    """
    path = Path(source)
    if source != "-" and not path.is_file():
        raise FileNotFoundError(f"there is no file {source} to read prompts from")
    text = sys.stdin.read() if source == "-" else read_utf8(path)
    plain = source != "-" and path.suffix not in (".jsonl", ".json")
    name = "standard input" if source == "-" else source
    numbered = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not numbered:
        raise ValueError(f"there are no prompts in {name}")
    return [
        _line(index, line, params, plain, f"{name}, line {number}") for index, (number, line) in enumerate(numbered)
    ]


def _line(index: int, line: str, params: SamplingParams, plain: bool, where: str) -> Line:
    try:
        value = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        if not plain:
            raise ValueError(f"{where} is not JSON (text needs quotes, unless the file is a .txt): {error}") from None
        value = line
    if isinstance(value, str) or (plain and not isinstance(value, dict)):
        return Line(index, None, value if isinstance(value, str) else line, params)
    if not isinstance(value, dict):
        raise ValueError(f"{where} is neither text nor an object with a prompt: {short_repr(value)}")
    given = {"prompt", "messages"} & value.keys()
    if len(given) != 1:
        raise ValueError(f'{where} needs either "prompt" or "messages"')
    prompt = value[given.pop()]
    if "messages" in value:
        if not isinstance(prompt, list) or not prompt or not all(isinstance(each, dict) for each in prompt):
            raise ValueError(f"{where}: messages must be a list of objects")
    elif not isinstance(prompt, str):
        raise ValueError(f"{where}: the prompt must be text, not {short_repr(prompt)}")
    settings = {key: value[key] for key in value.keys() - {"prompt", "messages", "id"}}
    if unknown := settings.keys() - LINE_SETTINGS:
        name = min(unknown)
        raise ValueError(
            f"{where}: there is no setting {short_repr(name)}: {did_you_mean(name, sorted(LINE_SETTINGS))}"
        )
    try:
        return Line(index, value.get("id"), prompt, replace(params, **settings), settings)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{where}: {error}") from None


async def _print_all(llm: "LLM", lines: Sequence[Line], encode: Callable[[Any], list[int]]) -> int:
    """Generate all at once, and print a JSON object for each when it is finished; returns how many failed."""

    async def run(line: Line) -> tuple[Line, Any]:
        try:
            return line, await llm.submit(encode(line.prompt), line.params)
        except (ValueError, TypeError) as error:
            return line, error

    failed = tokens = 0
    with shown(progress.PROMPTS):
        progress.report(progress.PROMPTS, 0, len(lines))
        for done, finished in enumerate(asyncio.as_completed([run(line) for line in lines]), 1):
            line, result = await finished
            progress.report(progress.PROMPTS, done, len(lines), note=f"{llm.stats().tokens_per_s:.0f} tok/s")
            about = {"index": line.number} | ({} if line.id is None else {"id": line.id})
            about["prompt" if isinstance(line.prompt, str) else "messages"] = line.prompt
            if isinstance(result, Exception):
                failed += 1
                print(json.dumps(about | {"error": str(result)}), flush=True)
                continue
            samples = result if isinstance(result, list) else [result]
            for i, sample in enumerate(samples):
                tokens += sample.generated_tokens
                which = {"sample": i} if len(samples) > 1 else {}
                output = as_dict(sample)
                del output["timing"]["decode_times_s"]  # of every step: their total is enough
                print(json.dumps(about | which | output), flush=True)
    stats = llm.stats()
    reused = f", {stats.cached_tokens:,} prompt tokens reused" if stats.cached_tokens else ""
    say(f"[{len(lines) - failed:,} of {len(lines):,} prompts, {tokens:,} new tokens{reused}]")
    return failed
