"""Gemma 3 270M itself: the same tokens as transformers reading the same file, on every path past the window too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from amount import amount
from transformers import AutoModelForCausalLM

from infer import (
    GrowingCache,
    KVCache,
    SamplingParams,
    SlidingCache,
    Tokenizer,
    generate,
    generate_batch,
    load_model,
)
from infer.loader.builtin import BUILTIN
from infer.models.common import Decoder

pytestmark = pytest.mark.slow

NAME = "gemma-3-270m"
SHORT = [
    "The capital of France is",
    "Once upon a time",
    "def fibonacci(n):\n",
    "Die drei größten Städte Deutschlands sind",
    "水は",
    "1, 1, 2, 3, 5, 8,",
]
LONG_TOKENS, NEW_TOKENS = amount(1_100, 600), 24
GREEDY = SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True)
LICENSE = Path(__file__).parents[2] / "LICENSE"

Ids = list[list[int]]


@pytest.fixture(scope="module")
def gemma() -> tuple[Decoder, Tokenizer]:
    model, _ = load_model(NAME, dtype="float32", device="cpu")
    return model, Tokenizer(NAME)


@pytest.fixture(scope="module")
def prompts(gemma: tuple[Decoder, Tokenizer]) -> Ids:
    """Short ones, and one of more than a window."""
    tokenizer = gemma[1]
    long = tokenizer.encode(LICENSE.read_text(encoding="utf-8"))[:LONG_TOKENS]
    assert len(long) == LONG_TOKENS > 512
    return [*(tokenizer.encode(text) for text in SHORT), long]


@pytest.fixture(scope="module")
def expected(prompts: Ids) -> Ids:
    """What transformers generates, with its own reading of the same GGUF file."""
    path = BUILTIN[NAME].path
    reference = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    settings: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None}
    return [
        reference.generate(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), **settings)[
            0, len(ids) :
        ].tolist()
        for ids in prompts
    ]


def test_it_knows_something(gemma: tuple[Decoder, Tokenizer], expected: Ids) -> None:
    assert "capital" in gemma[1].decode(expected[0])


def test_short_prompts(gemma: tuple[Decoder, Tokenizer], prompts: Ids, expected: Ids) -> None:
    model, tokenizer = gemma
    for prompt, tokens in zip(prompts[:-1], expected, strict=False):
        assert generate(model, tokenizer, prompt, GREEDY).token_ids == tokens
        assert generate(model, tokenizer, prompt, GREEDY, prefill_chunk=3).token_ids == tokens


@pytest.mark.parametrize(
    ("kind", "chunk"),
    [
        (SlidingCache, None),
        (SlidingCache, 100),
        (SlidingCache, 513),
        (KVCache, None),
        (KVCache, 512),
        (GrowingCache, 512),
    ],
)
def test_past_the_window(
    gemma: tuple[Decoder, Tokenizer], prompts: Ids, expected: Ids, kind: type[KVCache], chunk: int | None
) -> None:
    model, tokenizer = gemma
    cache = kind.from_model_config(model.config, LONG_TOKENS + NEW_TOKENS, dtype="float32", device="cpu")
    result = generate(model, tokenizer, prompts[-1], GREEDY, cache=cache, prefill_chunk=chunk)
    assert result.token_ids == expected[-1]


def test_default_cache_past_the_window(gemma: tuple[Decoder, Tokenizer], prompts: Ids, expected: Ids) -> None:
    """A ring as narrow as the chunks, which is far smaller than a cache of everything."""
    model, tokenizer = gemma
    result = generate(model, tokenizer, prompts[-1], GREEDY, prefill_chunk=64)
    assert result.token_ids == expected[-1]
    everything = (LONG_TOKENS + NEW_TOKENS) * model.config.cache_bytes_per_token(4)
    assert result.cache_memory_bytes == (3 * (LONG_TOKENS + NEW_TOKENS) + 15 * (512 + 64)) * everything // (
        18 * (LONG_TOKENS + NEW_TOKENS)
    )


def test_without_cache(gemma: tuple[Decoder, Tokenizer], prompts: Ids, expected: Ids) -> None:
    model, tokenizer = gemma
    params = SamplingParams(max_new_tokens=4, ignore_eos=True)
    for i in (0, 3, -1):
        assert generate(model, tokenizer, prompts[i], params, use_kv_cache=False).token_ids == expected[i][:4]


def test_batch(gemma: tuple[Decoder, Tokenizer], prompts: Ids, expected: Ids) -> None:
    """Rows from 2 tokens to more than a window side by side."""
    model, tokenizer = gemma
    results = generate_batch(model, tokenizer, prompts, GREEDY, prefill_chunk=512)
    assert [result.token_ids for result in results] == expected
