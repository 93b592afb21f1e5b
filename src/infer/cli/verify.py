"""`infer verify`: does it come out the same on every path?"""

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infer.cli.common import (
    DEFAULT_MODEL,
    CacheDtypeOption,
    JsonOption,
    Loading,
    ModelArgument,
    check_cache_dtype,
    loading_options,
    read_utf8,
    say,
)

if TYPE_CHECKING:
    from infer.engine.paths import PathResult
    from infer.engine.verify import Comparison
    from infer.loader import Tokenizer
    from infer.models.common import Decoder

MOST_THREADS = 256  # OpenMP ends the process where it cannot start as many as it is asked for


@loading_options
def verify(
    model: ModelArgument = DEFAULT_MODEL,
    *,
    prompts: Annotated[Path | None, typer.Option(help="A text file with one prompt per line.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate for each prompt.")] = 32,
    seed: Annotated[int, typer.Option(help="For the sampled runs.")] = 0,
    also_threads: Annotated[
        list[int] | None, typer.Option(help="With --exact, on a CPU: on so many threads as well.")
    ] = None,
    cache_dtype: CacheDtypeOption = "auto",
    as_json: JsonOption = False,
    loading: Loading,
) -> None:
    """Check that the cache changes nothing: generate with every kind of cache, in chunks, in a batch, and without.

    With --exact, the logits of all positions are compared instead, bit by bit.
    """
    from infer import ModelConfig, Tokenizer
    from infer.engine.verify import check, own_prompts, with_long_prompt
    from infer.machine import resolve_device

    check_cache_dtype(cache_dtype)
    if also_threads and not (loading.exact and 1 <= min(also_threads) <= max(also_threads) <= MOST_THREADS):
        raise ValueError(f"--also-threads goes with --exact, and is from 1 to {MOST_THREADS}")
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
        prompt_ids = with_long_prompt(config, list(own.values()), max_new_tokens, always=loading.exact)
        long = "(a text longer than the window)" if config.has_windows else "(a longer text)"
        texts = [*own, *[long] * (len(prompt_ids) - len(own))]
    else:
        prompt_ids = [tokenizer.encode(text) for text in texts]
    check(config, prompt_ids, max_new_tokens)  # before the weights are read
    if config.has_windows and max(map(len, prompt_ids)) <= (config.sliding_window or 0):
        say(f"note: no prompt is longer than the window of {config.sliding_window}: what windows forget goes untested")
    asked = Asked(loading.load(model), tokenizer, texts, prompt_ids, max_new_tokens, seed, cache_dtype, as_json)
    found = asked.compare_bits(also_threads or []) if loading.exact else asked.compare_tokens()
    if as_json:
        print(json.dumps({"model": model, **found}))
    if not found["equal"]:
        sys.exit(1)


@dataclass(frozen=True)
class Asked:
    """What to compare, and how to tell of it."""

    network: "Decoder"
    tokenizer: "Tokenizer"
    texts: list[str]
    prompts: list[list[int]]
    max_new_tokens: int
    seed: int
    cache_dtype: str
    quiet: bool

    @property
    def reference(self) -> str:
        return "without a cache" if self.cache_dtype == "auto" else f"that recomputes everything, in {self.cache_dtype}"

    def named(self, prompt: int) -> str:
        """Its text, or how it begins."""
        text = json.dumps(self.texts[prompt], ensure_ascii=False)
        return text if len(text) <= 40 else f'{text[:38]}…"'

    def show(self, line: str = "") -> None:
        if not self.quiet:
            print(line, flush=True)

    def compare_tokens(self) -> dict[str, Any]:
        """What every path generates; then how far its logits are from the reference's, in one table."""
        from infer.engine.paths import compare
        from infer.engine.verify import number_of_comparisons
        from infer.engine.verify import verify as compare_runs

        count = number_of_comparisons(self.network.config, self.prompts)
        say(f"{count} runs to come, each compared with one {self.reference}")
        rows = []
        settings = (self.network, self.tokenizer, self.prompts, self.max_new_tokens)
        for row in compare_runs(*settings, self.seed, self.cache_dtype):
            rows.append(row)
            outcome = f"equal, {row.tokens} tokens"
            if not row.equal:
                outcome = f"DIFFERS at step {row.first_difference}; margin between the two best logits {row.margin:.2e}"
            self.show(f"{row.mode:<7} {row.path:<28} {self.named(row.prompt):<42} {outcome}")
        different = sum(not row.equal for row in rows)
        what = "the run without one does" if self.cache_dtype == "auto" else f"the run {self.reference}, does"
        say(f"{len(rows) - different} of {len(rows)} runs with a cache generate exactly what {what}")
        kinds = by_kind(rows, list(compare(*settings, exact=None, cache_dtype=self.cache_dtype)))
        self.show()
        self.show(
            f"{'path':<34} {'runs':>5} {'others':>6}  {'logits apart by':<16} {'at positions':<14} first other token"
        )
        for kind in kinds:
            self.show(self._kind_line(kind))
        comparisons = [asdict(row) | {"prompt": self.texts[row.prompt], "equal": row.equal} for row in rows]
        paths = [kind | {"prompt": _text(self.texts, kind["prompt"])} for kind in kinds]
        return {"equal": not different, "comparisons": comparisons, "paths": paths}

    def _kind_line(self, kind: dict[str, Any]) -> str:
        apart = "0" if not kind["largest"] else f"{kind['largest']:.1e}"
        first = ""
        if kind["differ"]:
            first = f"{self.named(kind['prompt'])}, step {kind['step']}, margin {kind['margin']:.1e}"
        positions = f"{kind['positions_apart']} of {kind['positions']}"
        line = f"{kind['path']:<34} {kind['runs'] or '':>5} {kind['differ'] if kind['runs'] else '':>6}"
        return f"{line}  {apart:<16} {positions:<14} {first}".rstrip()

    def compare_bits(self, threads: Sequence[int]) -> dict[str, Any]:
        from infer.engine.paths import compare, number_of_paths

        count = number_of_paths(self.prompts, threads)
        say(f"{count} paths to come, each compared bit by bit with one pass {self.reference}")
        self.show(f"{'path':<34} {'prompts':>7} {'positions':>9}")
        results = []
        settings = (self.network, self.tokenizer, self.prompts, self.max_new_tokens)
        for result in compare(*settings, exact=True, cache_dtype=self.cache_dtype, threads=threads):
            results.append(result)
            self.show(self._bits_line(result))
        equal = sum(result.equal for result in results)
        say(f"{equal} of {len(results)} paths give the same bits as one pass {self.reference}")
        paths = [asdict(result) | {"equal": result.equal} for result in results]
        for path in paths:
            if path["difference"] is not None:
                path["difference"]["prompt"] = self.texts[path["difference"]["prompt"]]
        return {"exact": True, "equal": equal == len(results), "paths": paths}

    def _bits_line(self, result: "PathResult") -> str:
        line = f"{result.path:<34} {result.prompts:>7} {result.positions:>9}  "
        found = result.difference
        if found is None:
            return f"{line}equal"
        line += f"DIFFERS at {result.different} positions; first in {self.named(found.prompt)}, {found}"
        return line if found.origin is None else f"{line}\n    from {found.origin}"


def by_kind(rows: "Sequence[Comparison]", results: "Sequence[PathResult]") -> list[dict[str, Any]]:
    """One entry for each path, its chunks of all sizes together: other tokens, and other logits."""
    kinds: dict[str, dict[str, Any]] = {}
    empty: dict[str, Any] = {"runs": 0, "differ": 0, "prompt": None, "step": None, "margin": None}
    empty |= {"positions": 0, "positions_apart": 0, "largest": 0.0}
    for row in rows:
        kind = kinds.setdefault(_kind(row.path), dict(empty))
        kind["runs"] += 1
        if not row.equal and not kind["differ"]:
            kind |= {"prompt": row.prompt, "step": row.first_difference, "margin": row.margin}
        kind["differ"] += not row.equal
    for result in results:
        if result.path.startswith("generate"):  # whose tokens the runs have been judged by
            continue
        kind = kinds.setdefault(_kind(result.path), dict(empty))
        kind["positions"] += result.positions
        kind["positions_apart"] += result.different
        kind["largest"] = max(kind["largest"], result.largest)
    return [{"path": path, **kind} for path, kind in kinds.items()]


def _kind(path: str) -> str:
    return re.sub(r"chunks of \d+", "in chunks", path)


def _text(texts: Sequence[str], prompt: int | None) -> str | None:
    return None if prompt is None else texts[prompt]
