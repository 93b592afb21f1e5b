"""`infer verify`: is it the same on every path?"""

import functools
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infer.cli.common import (
    DEFAULT_MODEL,
    CacheDtypeOption,
    JsonOption,
    Loading,
    check_cache_dtype,
    loading_options,
    model_option,
    read_utf8,
)
from infer.cli.streams import say
from infer.engine.params import SamplingParams

if TYPE_CHECKING:
    from infer.evaluate.paths import PathResult
    from infer.loader import Tokenizer
    from infer.models.common import Decoder

MOST_THREADS = 256  # OpenMP ends the process where it cannot start as many as it is asked for


@model_option
@functools.partial(loading_options, split=True)
def verify(
    model: str = DEFAULT_MODEL,
    *,
    prompts: Annotated[Path | None, typer.Option(help="A text file with one prompt per line.")] = None,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", help="Tokens to generate for each prompt.")
    ] = 32,
    seed: Annotated[int, typer.Option(help="For the sampled runs.")] = 0,
    also_threads: Annotated[list[int] | None, typer.Option(help="On a CPU: on so many threads as well.")] = None,
    cache_dtype: CacheDtypeOption = "auto",
    every: Annotated[bool, typer.Option("--all", help="Show each path, not only those that differ.")] = False,
    as_json: JsonOption = False,
    loading: Loading,
) -> None:
    """Check that the cache changes nothing: compare the logits of every path with those of one pass without a cache.

    Every kind of cache, chunks, truncation, traces, batches, and texts sampled with a seed. Through kernels all bits
    must be equal; in plain torch, the likeliest tokens. With --tensor-parallel, also in several processes.
    """
    from infer import ModelConfig, Tokenizer
    from infer.evaluate.verify import check, own_prompts, why_plain_torch, with_long_prompt
    from infer.machine import resolve_device
    from infer.models.split import check_split

    check_cache_dtype(cache_dtype)
    SamplingParams(seed=seed)  # refused now, not after the weights have been read
    if also_threads and not 1 <= min(also_threads) <= max(also_threads) <= MOST_THREADS:
        raise ValueError(f"--also-threads must be from 1 to {MOST_THREADS}")
    if also_threads and resolve_device(loading.device).type != "cpu":
        raise ValueError("--also-threads is for a CPU")
    texts: list[str] = []
    if prompts is not None:
        texts = [line for line in read_utf8(prompts).splitlines() if line.strip()]
        if not texts:
            raise ValueError(f"{prompts} holds no prompts")
    tokenizer, config = Tokenizer(model), ModelConfig.from_pretrained(model)
    if prompts is None:
        own = own_prompts(config, tokenizer, max_new_tokens)
        if not own:
            raise ValueError("the model can read none of the built-in prompts: give it some of its own with --prompts")
        prompt_ids = with_long_prompt(config, list(own.values()), max_new_tokens)
        long = "(a text longer than the window)" if config.has_windows else "(a longer text)"
        texts = [*own, *[long] * (len(prompt_ids) - len(own))]
    else:
        prompt_ids = [tokenizer.encode(text) for text in texts]
    check(config, prompt_ids, max_new_tokens)  # before the weights are read
    check_split(config, loading.tensor_parallel)
    if config.has_windows and max(map(len, prompt_ids)) <= (config.sliding_window or 0):
        say(f"note: no prompt is longer than the window of {config.sliding_window}: what windows forget goes untested")
    network = replace(loading, tensor_parallel=1).load(model)
    split = loading.load(model) if loading.tensor_parallel > 1 else None
    table = Table(texts, why_plain_torch(network), quiet=as_json, every=every)
    settings = {"seed": seed, "cache_dtype": cache_dtype, "threads": also_threads or []}
    found = table.fill(network, split, tokenizer, prompt_ids, max_new_tokens, settings)
    if as_json:
        print(json.dumps({"model": model, **found}))
    if not found["passed"]:
        sys.exit(1)


@dataclass(frozen=True)
class Table:
    """One line for each path."""

    texts: list[str]  # the prompts
    plain: str | None  # why plain torch runs; None: kernels do
    quiet: bool
    every: bool  # a line for paths that agree, too

    def fill(
        self,
        network: "Decoder",
        split: "Decoder | None",
        tokenizer: "Tokenizer",
        prompts: list[list[int]],
        max_new_tokens: int,
        settings: dict[str, Any],
    ) -> dict[str, Any]:
        """split: the same model in several processes."""
        from infer.evaluate.paths import compare, number_of_paths
        from infer.evaluate.processes import compare_split, number_of_split_paths

        rounds = "" if settings["cache_dtype"] == "auto" else f" that rounds as {settings['cache_dtype']} caches do"
        reference = f"one pass without a cache{rounds}"
        if self.plain is None:
            self.show("kernels: every path must give the same bits")
        else:
            self.show(f"plain torch ({self.plain}): paths agree within rounding")
        paths_to_come = number_of_paths(prompts, settings["threads"])
        if split is not None:
            paths_to_come += number_of_split_paths(prompts, settings["cache_dtype"])
        say(f"{paths_to_come} paths to come, each compared with {reference}")
        if self.every:
            self.show(f"{'path':<38} {'prompts':>7} {'positions':>9}")

        def found() -> "Iterator[PathResult]":
            yield from compare(network, tokenizer, prompts, max_new_tokens, diagnose=self.plain is None, **settings)
            if split is not None:
                same = {name: settings[name] for name in ("seed", "cache_dtype")}
                yield from compare_split(network, split, tokenizer, prompts, max_new_tokens, **same)

        results = []
        for result in found():
            results.append(result)
            self.count(len(results), paths_to_come)
            if self.every or result.difference is not None:
                self.show(self.line(result))
        self.count(0, 0)
        equal = sum(result.equal for result in results)
        say(f"{equal} of {len(results)} paths give the same bits as {reference}")
        tokens_equal = not any(result.other_tokens for result in results)
        if self.plain is not None:
            where = "everywhere, near-ties aside" if tokens_equal else "NOT everywhere"
            say(f"the likeliest token is the same {where}")
        paths = [asdict(result) | {"equal": result.equal} for result in results]
        for path in paths:
            if path["difference"] is not None:
                path["difference"]["prompt"] = self.texts[path["difference"]["prompt"]]
        return {
            "kernels": self.plain is None,
            "plain_torch": self.plain,
            "passed": equal == len(results) if self.plain is None else tokens_equal,
            "paths": paths,
        }

    def line(self, result: "PathResult") -> str:
        line = f"{result.path:<38} {result.prompts:>7} {result.positions:>9}  "
        found = result.difference
        if found is None:
            return f"{line}equal"
        first = f"first in {self.named(found.prompt)}, {found}"
        if self.plain is not None and not result.other_tokens:
            if found.element is None:
                return f"{line}{result.different} other tokens; {first}"
            return f"{line}apart by {result.largest:.1e} at most, at {result.different} positions"
        if self.plain is not None:
            first = f"another likeliest token at {result.other_tokens}; {first}"
        line += f"DIFFERS at {result.different} positions; {first}"
        return line if found.divergence is None else f"{line}\n    from {found.divergence}"

    def named(self, prompt: int) -> str:
        """Its text, or how it begins."""
        text = json.dumps(self.texts[prompt], ensure_ascii=False)
        return text if len(text) <= 40 else f'{text[:38]}…"'

    def show(self, line: str) -> None:
        if not self.quiet:
            self.count(0, 0)
            print(line, flush=True)

    def count(self, done: int, all_paths: int) -> None:
        """On a terminal, how many paths are done; 0: erase that."""
        if sys.stderr.isatty():
            told = f"  {done} of {all_paths} paths" if done else ""
            print(f"\r\033[K{told}", end="", file=sys.stderr, flush=True)
