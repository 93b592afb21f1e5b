"""The paths of `infer verify` in several processes that have a part of the model each, compared with one process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch import Tensor

from infer.cache import BaseCache, Cache, PagedCache
from infer.engine.batch import generate_batch
from infer.engine.generate import generate
from infer.engine.params import SamplingParams
from infer.engine.text import Decodes
from infer.evaluate.paths import Path, PathResult, Runs, Wrap, chunkings
from infer.models.common import Decoder


class SplitRuns(Runs):
    """The texts of one process, run in several."""

    def __init__(self, whole: Runs, model: Decoder, count: int) -> None:
        self.__dict__.update(vars(whole))
        self.whole, self.model, self.count = whole, model, count

    def reference(self, prompt: int, wrap: Wrap) -> Tensor:
        return self.whole.reference(prompt, wrap)

    def empty(self, kind: type[BaseCache], prompt: int, chunk: int | None = None) -> Cache:  # type: ignore[override]
        return self.default_cache(prompt)  # pages, in all processes

    def paths(self, threads: Sequence[int] = ()) -> Iterator[Path]:
        everything = list(range(len(self.texts)))
        if self.cache_dtype == "auto":
            yield self._path("no cache, stopped early", self.uncached, everything)
        for chunk in chunkings([text.tokens[: text.prompt_len] for text in self.texts]):
            longer = [i for i in everything if chunk is None or self.texts[i].prompt_len > chunk]
            name = "pages" if chunk is None else f"chunks of {chunk}"
            yield self._path(name, self.cached(PagedCache, chunk), longer)
        yield self._path("truncated", self.truncated(PagedCache), everything)
        beginnings = {"prefix hit": self.hit, "evicted": self.evicted, "forked": self.forked, "saved": self.loaded}
        for name, begin in beginnings.items():
            yield self._path(name, self.resumed(begin), everything)
        if len(everything) > 1:
            batch = f"batch of {len(everything)}"
            yield self._path(batch, self.batch(staggered=False), everything)._replace(together=True)
            yield self._path(f"{batch}, in turn", self.batch(staggered=True), everything)._replace(together=True)

    def _path(self, name: str, run: object, prompts: list[int]) -> Path:
        return Path(f"{self.count} processes, {name}", run, prompts)  # type: ignore[arg-type]

    def sampled(self, tokenizer: Decodes, params: SamplingParams) -> Iterator[PathResult]:
        """The same seed in a batch, and on a busy server, against runs in one process."""
        prompts = [tokens[:prompt_len] for tokens, prompt_len in self.texts]
        expected = [generate(self.whole.model, tokenizer, prompt, params).token_ids for prompt in prompts]
        together = generate_batch(self.model, tokenizer, prompts, params)
        name = f"{self.count} processes, sampled"
        yield self._same_texts(f"{name}, generate_batch", [result.token_ids for result in together], expected)
        yield self._same_texts(f"{name}, busy server", self._busy(tokenizer, prompts, params), expected)


def compare_split(
    model: Decoder,
    split: Decoder,
    tokenizer: Decodes,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int = 32,
    *,
    seed: int = 0,
    cache_dtype: str = "auto",
) -> Iterator[PathResult]:
    """As `paths.compare`: those of a model that several processes have, against the same model in one."""
    assert split.group is not None
    runs = SplitRuns(Runs(model, prompts, max_new_tokens, cache_dtype), split, split.group.count)
    for path in runs.paths():
        yield runs.compare(path, diagnose=False)
    if cache_dtype == "auto":
        params = SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=True)
        yield from runs.sampled(tokenizer, replace(params, temperature=0.8, top_p=0.95, seed=seed))


def number_of_split_paths(prompts: Sequence[Sequence[int]], cache_dtype: str = "auto") -> int:
    """How many `compare_split` will go."""
    return len(chunkings(prompts)) + 5 + (2 if len(prompts) > 1 else 0) + (3 if cache_dtype == "auto" else 0)
