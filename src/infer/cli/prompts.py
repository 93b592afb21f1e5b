"""`infer generate --prompts`: a file of prompts, all at once; results as they finish."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from infer import progress
from infer.cli import status
from infer.cli.common import read_utf8
from infer.cli.streams import say
from infer.engine.params import SamplingParams
from infer.values import meant, shown

if TYPE_CHECKING:
    from infer.engine.llm import LLM

SETTINGS = {field.name for field in fields(SamplingParams)} - {"logit_bias", "n"}
Message = dict[str, Any]


class Line(NamedTuple):
    """A prompt, and how to go on from it."""

    number: int
    id: Any  # the caller's own; None: it has none
    prompt: str | list[Message]
    params: SamplingParams
    settings: Mapping[str, Any] = {}  # of these, those of this line


def read_lines(source: str, params: SamplingParams) -> list[Line]:
    """Prompts from a file, or - for standard input. All that is wrong is said before a model is loaded.

    A line is a text, as a JSON string; or an object with a "prompt" or "messages", and with settings and an "id" of its
    own if it likes. In a file that does not end in .jsonl or .json, it may also be the text itself.
    """
    path = Path(source)
    if source != "-" and not path.is_file():
        raise FileNotFoundError(f"there is no file {source} to read prompts from")
    text = sys.stdin.read() if source == "-" else read_utf8(path)
    plain = source != "-" and path.suffix not in (".jsonl", ".json")
    lines = [
        _line(index, line, params, plain, f"{'standard input' if source == '-' else source}, line {number}")
        for index, (number, line) in enumerate(
            (number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()
        )
    ]
    if not lines:
        raise ValueError(f"there are no prompts in {'standard input' if source == '-' else source}")
    return lines


def _line(index: int, line: str, params: SamplingParams, plain: bool, where: str) -> Line:
    try:
        value = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        if plain:
            return Line(index, None, line, params)
        raise ValueError(f"{where} is not JSON (a text needs quotes, unless the file is a .txt): {error}") from None
    if isinstance(value, str):
        return Line(index, None, value, params)
    if not isinstance(value, dict):
        if plain:
            return Line(index, None, line, params)
        raise ValueError(f"{where} is neither a text nor an object with a prompt: {shown(value)}")
    given = {"prompt", "messages"} & value.keys()
    if len(given) != 1:
        raise ValueError(f'{where} needs a "prompt" or "messages", and not both')
    prompt = value[given.pop()]
    if "messages" in value:
        if not isinstance(prompt, list) or not prompt or not all(isinstance(each, dict) for each in prompt):
            raise ValueError(f"{where}: messages must be a list of objects")
    elif not isinstance(prompt, str):
        raise ValueError(f"{where}: the prompt must be a text, not {shown(prompt)}")
    settings = {key: value[key] for key in value.keys() - {"prompt", "messages", "id"}}
    if unknown := settings.keys() - SETTINGS:
        name = min(unknown)
        raise ValueError(f"{where}: there is no setting {shown(name)}: {meant(name, sorted(SETTINGS))}")
    try:
        return Line(index, value.get("id"), prompt, replace(params, **settings), settings)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{where}: {error}") from None


def run_lines(
    llm: "LLM", lines: Sequence[Line], encode: Callable[[str | list[Message]], list[int]], as_dict: Callable[..., Any]
) -> int:
    """Print a JSON object for each line as it is done; returns how many could not be."""
    return asyncio.run(_print_all(llm, lines, encode, as_dict))


async def _print_all(llm: "LLM", lines: Sequence[Line], encode: Any, as_dict: Any) -> int:
    failed = tokens = done = 0
    with status.shown(progress.PROMPTS):
        progress.tell(progress.PROMPTS, 0, len(lines))
        async for line, result in _results(llm, lines, encode):
            done += 1
            progress.tell(progress.PROMPTS, done, len(lines), note=f"{llm.stats().tokens_per_s:.0f} tok/s")
            about = {"index": line.number} | ({} if line.id is None else {"id": line.id})
            if isinstance(result, Exception):
                failed += 1
                print(json.dumps(about | {"error": str(result)}), flush=True)
                continue
            samples = result if isinstance(result, list) else [result]
            for i, sample in enumerate(samples):
                tokens += sample.generated_tokens
                which = {"sample": i} if len(samples) > 1 else {}
                print(json.dumps(about | which | as_dict(sample)), flush=True)
    stats = llm.stats()
    known = f", {stats.prefix_hits:,} prompt tokens reused" if stats.prefix_hits else ""
    say(f"[{len(lines) - failed:,} of {len(lines):,} prompts, {tokens:,} new tokens{known}]")
    return failed


async def _results(llm: "LLM", lines: Sequence[Line], encode: Any) -> AsyncIterator[tuple[Line, Any]]:
    """Results as they finish, or n of them. What is wrong with one is told of that one."""

    async def one(line: Line) -> tuple[Line, Any]:
        try:
            return line, await llm.submit(encode(line.prompt), line.params)
        except (ValueError, TypeError) as error:
            return line, error

    for done in asyncio.as_completed([one(line) for line in lines]):
        yield await done
