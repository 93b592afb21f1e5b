"""Does the cache change what is generated? Compare token by token with the run that recomputes everything."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from infer.cache import BaseCache, GrowingCache, KVCache
from infer.config import ModelConfig
from infer.engine.generate import Model, check_request, generate
from infer.engine.params import SamplingParams
from infer.engine.text import Decodes

CACHES: tuple[type[BaseCache], ...] = (KVCache, GrowingCache)

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
    tokens: int
    first_difference: int | None = None
    margin: float | None = None

    @property
    def equal(self) -> bool:
        return self.first_difference is None


def check(config: ModelConfig, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
    """Refuse what cannot be generated, as `verify` would: for asking before the weights are read."""
    for prompt in prompts:
        check_request(config, prompt, SamplingParams(max_new_tokens=max_new_tokens))


def verify(
    model: Model, tokenizer: Decodes, prompts: Sequence[Sequence[int]], max_new_tokens: int = 32, seed: int = 0
) -> Iterator[Comparison]:
    """Every prompt (token ids), greedy and seeded, with each kind of cache, against the run without one."""
    check(model.config, prompts, max_new_tokens)
    modes = {
        "greedy": SamplingParams(max_new_tokens=max_new_tokens),
        "seeded": SamplingParams(temperature=0.8, top_p=0.95, seed=seed, max_new_tokens=max_new_tokens),
    }
    weights = next(model.parameters())
    for index, prompt in enumerate(prompts):
        for mode, params in modes.items():
            expected = generate(model, tokenizer, prompt, params, use_kv_cache=False).token_ids
            for kind in CACHES:
                cache = kind.from_model_config(
                    model.config, len(prompt) + max_new_tokens, dtype=weights.dtype, device=weights.device
                )
                got = generate(model, tokenizer, prompt, params, cache=cache).token_ids
                at = first_difference(got, expected)
                margin = None if at is None else logit_margin(model, [*prompt, *expected[:at]])
                yield Comparison(index, mode, kind.__name__, len(expected), at, margin)


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    if a == b:
        return None
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@torch.inference_mode()
def logit_margin(model: Model, token_ids: Sequence[int]) -> float:
    """How far the best logit for the next token is ahead of the second best."""
    device = next(model.parameters()).device
    best, second = model(torch.tensor([token_ids], device=device))[0, -1].float().topk(2).values
    return float(best - second)
