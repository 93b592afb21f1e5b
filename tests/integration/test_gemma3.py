"""Gemma 3 270M itself: the same tokens as transformers reading the same file, on every path past the window too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from amount import amount
from checkpoints import read_once
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
from infer.backend import Row, backend_for
from infer.cache import NoCache
from infer.loader.builtin import BUILTIN
from infer.models.common import Decoder

pytestmark = pytest.mark.slow

NAME = "gemma-3-270m"
SHORT = ["The capital of France is", "Die drei größten Städte Deutschlands sind", "水は"]
SHORT += amount(["Once upon a time", "def fibonacci(n):\n", "1, 1, 2, 3, 5, 8,"], [])
LONG_TOKENS, NEW_TOKENS = amount((1_100, 24), (600, 8))
CLOSE = 1e-3
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
def generated(gemma: tuple[Decoder, Tokenizer], prompts: Ids) -> Ids:
    """With the default cache."""
    model, tokenizer = gemma
    return [generate(model, tokenizer, prompt, GREEDY).token_ids for prompt in prompts]


@pytest.fixture(scope="module")
@torch.inference_mode()
def expected(prompts: Ids, generated: Ids) -> list[torch.Tensor]:
    """The logits that transformers would choose each token by, with its own reading of the same GGUF file."""
    path = BUILTIN[NAME].path
    with read_once():
        reference = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    return [
        reference(torch.tensor([prompt + tokens[:-1]]), logits_to_keep=NEW_TOKENS).logits
        for prompt, tokens in zip(prompts, generated, strict=True)
    ]


def test_same_tokens_as_transformers(
    gemma: tuple[Decoder, Tokenizer], generated: Ids, expected: list[torch.Tensor]
) -> None:
    """If transformers, fed our prompt and tokens, finds each token the most likely, it would have generated them."""
    assert [logits[0].argmax(-1).tolist() for logits in expected] == generated
    assert "capital" in gemma[1].decode(generated[0])


@torch.inference_mode()
def test_same_logits_as_transformers(
    gemma: tuple[Decoder, Tokenizer], prompts: Ids, generated: Ids, expected: list[torch.Tensor]
) -> None:
    """Past the window too, through kernels and in plain torch."""
    model = gemma[0]
    for i in amount(range(len(prompts)), (2, -1)):
        fed = prompts[i] + generated[i][:-1]
        for run in (backend_for(model).run, model.run):
            [logits] = run([Row(NoCache(), fed, slice(-NEW_TOKENS, None))])
            assert (logits - expected[i]).abs().max() <= CLOSE


def test_short_prompts_in_chunks(gemma: tuple[Decoder, Tokenizer], prompts: Ids, generated: Ids) -> None:
    model, tokenizer = gemma
    for i in amount(range(len(SHORT)), (0, 1)):
        assert generate(model, tokenizer, prompts[i], GREEDY, prefill_chunk=3).token_ids == generated[i]


@pytest.mark.parametrize(
    ("kind", "chunk"),
    [
        (KVCache, None),
        (GrowingCache, 512),
        *amount([(SlidingCache, None), (SlidingCache, 100), (SlidingCache, 513), (KVCache, 512)], []),
    ],
)
def test_past_the_window(
    gemma: tuple[Decoder, Tokenizer], prompts: Ids, generated: Ids, kind: type[KVCache], chunk: int | None
) -> None:
    model, tokenizer = gemma
    cache = kind.from_model_config(model.config, LONG_TOKENS + NEW_TOKENS, dtype="float32", device="cpu")
    result = generate(model, tokenizer, prompts[-1], GREEDY, cache=cache, prefill_chunk=chunk)
    assert result.token_ids == generated[-1]


def test_default_cache_past_the_window(gemma: tuple[Decoder, Tokenizer], prompts: Ids, generated: Ids) -> None:
    """A ring as small as the chunks, far smaller than a cache of all positions."""
    model, tokenizer = gemma
    result = generate(model, tokenizer, prompts[-1], GREEDY, prefill_chunk=64)
    assert result.token_ids == generated[-1]
    everything = (LONG_TOKENS + NEW_TOKENS) * model.config.cache_bytes_per_token(4)
    assert result.cache_memory_bytes == (3 * (LONG_TOKENS + NEW_TOKENS) + 15 * (512 + 64)) * everything // (
        18 * (LONG_TOKENS + NEW_TOKENS)
    )


def test_without_cache(gemma: tuple[Decoder, Tokenizer], prompts: Ids, generated: Ids) -> None:
    model, tokenizer = gemma
    for i, count in amount(((0, 4), (1, 4), (-1, 4)), ((0, 4), (-1, 1))):
        params = SamplingParams(max_new_tokens=count, ignore_eos=True)
        assert generate(model, tokenizer, prompts[i], params, use_kv_cache=False).token_ids == generated[i][:count]


def test_batch(gemma: tuple[Decoder, Tokenizer], prompts: Ids, generated: Ids) -> None:
    """Rows from 2 tokens to more than a window side by side."""
    model, tokenizer = gemma
    results = generate_batch(model, tokenizer, prompts, GREEDY, prefill_chunk=512)
    assert [result.token_ids for result in results] == generated
