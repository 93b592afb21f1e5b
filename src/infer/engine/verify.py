"""Does a cache, a chunk or a batch change what is generated? Compare with the run that recomputes everything."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, cycle, islice, product
from typing import Any

import torch

from infer.cache import BaseCache, GrowingCache, KVCache, NoCache, SlidingCache
from infer.cache.base import resolve_cache_dtype
from infer.config import ModelConfig
from infer.engine.batch import generate_batch
from infer.engine.generate import Model, generate, model_device, model_dtype
from infer.engine.params import SamplingParams
from infer.engine.request import check_request
from infer.engine.text import Decodes, Encodes, encode_readable

CACHES: tuple[type[BaseCache], ...] = (KVCache, GrowingCache, SlidingCache)
LONG_EXTRA = 48  # tokens that the long prompt has beyond the window

PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "Q: What is 17 + 25?\nA:",
    "Die drei größten Städte Deutschlands sind",
    "1, 1, 2, 3, 5, 8,",
    "Dear Sir or Madam,\n\nI am writing to",
    "水は",
)


@dataclass(frozen=True)
class Comparison:
    """One prompt generated with a cache and without. `margin` is between the two best logits where they part."""

    prompt: int  # its index
    mode: str  # "greedy" | "seeded"
    cache: str
    chunk: int | None = None  # of the prefill; None: whole
    batch: int = 1  # rows generated together
    tokens: int = 0
    first_difference: int | None = None
    margin: float | None = None

    @property
    def equal(self) -> bool:
        return self.first_difference is None

    @property
    def path(self) -> str:
        """Which way through the engine this was, in words."""
        chunks = "" if self.chunk is None else f", chunks of {self.chunk}"
        batch = "" if self.batch == 1 else f", batch of {self.batch}"
        return f"{self.cache}{chunks}{batch}"


def check(config: ModelConfig, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
    """Refuse what cannot be generated, as `verify` would: for asking before the weights are read."""
    for prompt in prompts:
        check_request(config, prompt, SamplingParams(max_new_tokens=max_new_tokens))


def own_prompts(config: ModelConfig, tokenizer: Encodes, max_new_tokens: int) -> dict[str, list[int]]:
    """The built-in prompts by their text, as far as the model can read them and its context has room for them."""
    room = max(1, config.max_position_embeddings - max_new_tokens)
    prompts = {text: encode_readable(tokenizer, text)[:room] for text in PROMPTS}
    return {text: ids for text, ids in prompts.items() if ids}


def with_long_prompt(
    config: ModelConfig, prompts: Sequence[list[int]], max_new_tokens: int, *, always: bool = False
) -> list[list[int]]:
    """The prompts, and where a model has windows, all of them in a row, over and over, until they pass the window.

    always: a longer one where there is no window too.
    """
    length = (config.sliding_window or 0 if config.has_windows else LONG_EXTRA) + LONG_EXTRA
    if not (config.has_windows or always) or length + max_new_tokens > config.max_position_embeddings:
        return list(prompts)
    return [*prompts, list(islice(cycle(chain(*prompts)), length))]


class Recomputing(KVCache):
    """Rounds as a cache of its dtype does, and keeps nothing: every pass starts at position 0, as with NoCache."""

    def advance(self, n: int) -> None:
        super().advance(n)
        self.reset()


def verify(
    model: Model,
    tokenizer: Decodes,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int = 32,
    seed: int = 0,
    cache_dtype: str = "auto",
) -> Iterator[Comparison]:
    """Every prompt (token ids) on every path, against the run that recomputes everything.

    Greedy: each kind of cache, prefilled whole and in chunks. Seeded: each kind of cache. Both: all prompts in a batch.
    cache_dtype: "int8" compares caches of 8 bits, with a run that rounds keys and values as they do.
    """
    check(model.config, prompts, max_new_tokens)
    modes = {
        "greedy": SamplingParams(max_new_tokens=max_new_tokens),
        "seeded": SamplingParams(temperature=0.8, top_p=0.95, seed=seed, max_new_tokens=max_new_tokens),
    }
    references = [reference_cache(model, len(prompt) + max_new_tokens, cache_dtype) for prompt in prompts]
    for mode, params in modes.items():
        expected = []
        for index, prompt in enumerate(prompts):
            expected.append(generate(model, tokenizer, prompt, params, cache=references[index]).token_ids)
            chunks = chunkings(model.config, len(prompt)) if mode == "greedy" else [None]
            for kind, chunk in product(CACHES, chunks):
                cache = empty_cache(kind, model, len(prompt) + max_new_tokens, chunk, cache_dtype)
                got = generate(model, tokenizer, prompt, params, cache=cache, prefill_chunk=chunk).token_ids
                where = Comparison(index, mode, kind.__name__, chunk)
                yield _compare(where, model, prompt, got, expected[index], references[index])
        if len(prompts) > 1:
            for index, result in enumerate(generate_batch(model, tokenizer, prompts, params, cache_dtype=cache_dtype)):
                where = Comparison(index, mode, "default cache", batch=len(prompts))
                yield _compare(where, model, prompts[index], result.token_ids, expected[index], references[index])


def number_of_comparisons(config: ModelConfig, prompts: Sequence[Sequence[int]]) -> int:
    """How many `verify` will make."""
    alone = len(CACHES) * sum(len(chunkings(config, len(prompt))) + 1 for prompt in prompts)
    return alone + (2 * len(prompts) if len(prompts) > 1 else 0)


def chunkings(config: ModelConfig, length: int) -> list[int | None]:
    """Whole, and chunks that end before, at and behind the edge of a window; short ones only for short prompts."""
    sizes = [1, 3] if length < LONG_EXTRA else [LONG_EXTRA]
    if config.has_windows and config.sliding_window is not None:
        sizes += [config.sliding_window, config.sliding_window + 1]
    return [None, *(size for size in dict.fromkeys(sizes) if size < length)]


def reference_cache(model: Model, max_seq_len: int, cache_dtype: str) -> BaseCache:
    """What keeps nothing."""
    if cache_dtype == "auto":
        return NoCache(1, model_device(model))
    return empty_cache(Recomputing, model, max_seq_len, None, cache_dtype)


def empty_cache(
    kind: type[BaseCache], model: Model, max_seq_len: int, chunk: int | None, cache_dtype: str = "auto"
) -> BaseCache:
    dtype = resolve_cache_dtype(cache_dtype, model_dtype(model) or torch.float32)
    # A ring as narrow as the chunks allow: it wraps soonest.
    layout: dict[str, Any] = {"prefill_chunk": chunk or 1} if kind is SlidingCache else {}
    return kind.from_model_config(model.config, max_seq_len, dtype=dtype, device=model_device(model), **layout)


def _compare(
    where: Comparison,
    model: Model,
    prompt: Sequence[int],
    got: Sequence[int],
    expected: Sequence[int],
    reference: BaseCache,
) -> Comparison:
    at = first_difference(got, expected)
    margin = None if at is None else logit_margin(model, [*prompt, *expected[:at]], reference)
    return replace(where, tokens=len(expected), first_difference=at, margin=margin)


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    if a == b:
        return None
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@torch.inference_mode()
def logit_margin(model: Model, token_ids: Sequence[int], cache: BaseCache | None = None) -> float:
    """How far the best logit for the next token is ahead of the second best. cache: an empty one to run through."""
    ids = torch.tensor([token_ids], device=model_device(model))
    best, second = model(ids, kv_cache=cache)[0, -1].float().topk(2).values
    return float(best - second)
