"""`infer verify`: checks that every path gives the same bits."""

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from infer import progress
from infer.cli.common import (
    CacheDtypeOption,
    JsonOption,
    ModelChoice,
    ParallelLoadOptions,
    check_cache_dtype,
    read_utf8,
)
from infer.cli.status import shown
from infer.cli.streams import say
from infer.engine.params import SamplingParams

if TYPE_CHECKING:
    from infer.config import ModelConfig
    from infer.evaluate.paths import PathResult
    from infer.loader.tokenizer import Tokenizer

MAX_THREADS = 256  # OpenMP ends the process if it cannot start that many


def verify(
    *,
    chosen: ModelChoice,
    prompts: Annotated[Path | None, typer.Option(help="A text file with one prompt per line.")] = None,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", help="Tokens to generate for each prompt.")
    ] = 32,
    seed: Annotated[int, typer.Option(help="The seed of the sampled runs.")] = 0,
    also_threads: Annotated[
        list[int] | None, typer.Option(help="On a CPU: also run with this many threads; may be repeated.")
    ] = None,
    cache_dtype: CacheDtypeOption = "auto",
    every: Annotated[bool, typer.Option("--all", help="Show all paths, not only different ones.")] = False,
    as_json: JsonOption = False,
    load: ParallelLoadOptions,
) -> None:
    """Check that the cache changes nothing: compare the logits of every path with one pass without a cache.

    Every kind of cache, chunks, truncation, traces, batches, and texts sampled with a seed. With kernels all bits must
    be equal; in plain torch, the most likely tokens. With --tensor-parallel, also in several processes.
    """
    from infer import ModelConfig, Tokenizer
    from infer.evaluate.paths import Comparison
    from infer.evaluate.verify import check, why_plain_torch
    from infer.machine import resolve_device
    from infer.models.sharding import check_world_size

    check_cache_dtype(cache_dtype)
    SamplingParams(seed=seed)  # checks the seed before the weights are read
    if also_threads and not 1 <= min(also_threads) <= max(also_threads) <= MAX_THREADS:
        raise ValueError(f"--also-threads must be from 1 to {MAX_THREADS}")
    if also_threads and resolve_device(load.device).type != "cpu":
        raise ValueError("--also-threads is for a CPU")
    texts = [] if prompts is None else [line for line in read_utf8(prompts).splitlines() if line.strip()]
    if prompts is not None and not texts:
        raise ValueError(f"{prompts} holds no prompts")
    tokenizer, config = Tokenizer(chosen.name), ModelConfig.from_pretrained(chosen.name, load.context)
    if prompts is None:
        texts, prompt_ids = built_in_prompts(config, tokenizer, max_new_tokens)
    else:
        prompt_ids = [tokenizer.encode(text) for text in texts]
    check(config, prompt_ids, max_new_tokens)
    check_world_size(config, load.tensor_parallel)
    if config.has_windows and max(map(len, prompt_ids)) <= (config.sliding_window or 0):
        say(f"note: no prompt is longer than the window of {config.sliding_window}: sliding windows are not tested")
    model = replace(load, tensor_parallel=1).load(chosen.name)
    split = load.load(chosen.name) if load.tensor_parallel > 1 else None

    plain = why_plain_torch(model)  # None: kernels run
    reference = "one pass without a cache"
    if cache_dtype != "auto":
        reference += f" that rounds as {cache_dtype} caches do"
    compare = partial(Comparison, model, tokenizer, prompt_ids, max_new_tokens, seed=seed, cache_dtype=cache_dtype)
    comparisons = [compare(threads=also_threads or [], diagnose=plain is None)]
    if split is not None:
        comparisons.append(compare(split=split, diagnose=False))
    total = sum(map(len, comparisons))

    if not as_json:
        promise = f"plain torch ({plain}): paths agree within rounding"
        print("kernels: every path must give the same bits" if plain is None else promise, flush=True)
    if every and not as_json:
        print(f"{'path':<38} {'prompts':>7} {'positions':>9}", flush=True)
    say(f"{total} paths to run, each compared with {reference}; the first takes longest, as it generates the texts")
    results: list[PathResult] = []
    times = [time.perf_counter()]
    with shown(progress.PATHS), _summary_if_stopped(results, total):
        progress.report(progress.PATHS, 0, total)
        for result in chain(*comparisons):
            results.append(result)
            times.append(time.perf_counter())
            left = time_left(times, total)
            progress.report(progress.PATHS, len(results), total, note=left)
            if not as_json and (every or result.difference is not None):
                print(path_line(result, texts, plain), flush=True)
            if not sys.stderr.isatty():
                state = f"{'equal' if result.equal else 'DIFFERS'}, {times[-1] - times[-2]:.1f} s"
                say(f"{len(results)}/{total} {result.path}: {state}{left and f'; {left}'}")
    equal = sum(result.equal for result in results)
    say(f"{equal} of {len(results)} paths give the same bits as {reference}")
    passed = equal == len(results)
    if plain is not None:
        passed = not any(result.other_tokens for result in results)
        say(f"the most likely token is the same {'everywhere, near-ties aside' if passed else 'NOT everywhere'}")
    if as_json:
        listed = [asdict(result) | {"equal": result.equal} for result in results]
        for path in listed:
            if path["difference"] is not None:
                path["difference"]["prompt"] = texts[path["difference"]["prompt"]]
        outcome = {"kernels": plain is None, "plain_torch": plain, "passed": passed}
        print(json.dumps({"model": chosen.name, **outcome, "paths": listed}))
    if not passed:
        sys.exit(1)


@contextmanager
def _summary_if_stopped(results: "Sequence[PathResult]", total: int) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        equal = sum(result.equal for result in results)
        say(f"stopped after {len(results)} of {total} paths: {equal} gave the same bits")
        raise


def built_in_prompts(
    config: "ModelConfig", tokenizer: "Tokenizer", max_new_tokens: int
) -> tuple[list[str], list[list[int]]]:
    """Texts and tokens, with one prompt that is longer than the window if the model has windows."""
    from infer.evaluate.verify import own_prompts, with_long_prompt

    own = own_prompts(config, tokenizer, max_new_tokens)
    if not own:
        raise ValueError("the model can encode none of the built-in prompts: give prompts with --prompts")
    prompt_ids = with_long_prompt(config, list(own.values()), max_new_tokens)
    long = "(a text longer than the window)" if config.has_windows else "(a longer text)"
    return [*own, *[long] * (len(prompt_ids) - len(own))], prompt_ids


def time_left(times: Sequence[float], total: int) -> str:
    """times: when the paths began, and when each ended. The first path takes longer than any other: it is left out."""
    done = len(times) - 1
    if not 1 < done < total:
        return ""
    seconds = (times[-1] - times[1]) / (done - 1) * (total - done)
    return f"about {seconds / 60:.0f} min left" if seconds >= 90 else f"about {seconds:.0f} s left"


def path_line(result: "PathResult", texts: Sequence[str], plain: str | None) -> str:
    line = f"{result.path:<38} {result.prompts:>7} {result.positions:>9}  "
    found = result.difference
    if found is None:
        return f"{line}equal"
    prompt = json.dumps(texts[found.prompt], ensure_ascii=False)
    prompt = prompt if len(prompt) <= 40 else f'{prompt[:38]}…"'
    first = f"first in {prompt}, {found}"
    if plain is not None and not result.other_tokens:
        if found.element is None:
            return f"{line}{result.different} different tokens; {first}"
        return f"{line}differs by at most {result.largest:.1e}, at {result.different} positions"
    if plain is not None:
        first = f"{result.other_tokens} different most likely tokens; {first}"
    line += f"DIFFERS at {result.different} positions; {first}"
    return line if found.divergence is None else f"{line}\n    from {found.divergence}"
