"""Exact mode on a GPU: the same bits for a token in a step, in a prompt, in chunks and in a batch, in every dtype.

First the kernels by themselves, at the sizes of real models; then models, through the public interface.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from infer import GrowingCache, KVCache, ModelConfig, SamplingParams, SlidingCache, generate, generate_batch
from infer.cache import BatchCache, TracedCache
from infer.config import FULL_ATTENTION, SLIDING_ATTENTION, RopeConfig
from infer.engine import graph
from infer.models.common import Decoder
from infer.models.registry import build_model
from infer.ops import exact, exact_gpu
from infer.ops.linear import Linear
from infer.trace.record import Trace

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.usefixtures("compiled_apart"),
]

FAMILIES = ["llama", "qwen3", "gemma3", "gpt2", "rope_gpt"]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)
WINDOW = 70


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").to(dtype)


def same(got: Tensor, expected: Tensor) -> None:
    assert not expected.isnan().any()
    torch.testing.assert_close(got, expected, atol=0, rtol=0)


@EVERY_DTYPE
@pytest.mark.parametrize(
    ("rows", "columns", "activation", "gated"),
    [
        (3072, 2048, "", False),  # in four parts
        (16384, 2048, "silu", True),
        (2048, 8192, "", False),
        (1536, 1152, "", False),  # in two, which its blocks do not divide
        (130, 1030, "gelu", False),
    ],
)
@torch.inference_mode()
def test_products(rows: int, columns: int, activation: str, gated: bool, dtype: torch.dtype) -> None:
    linear = Linear(columns, rows, bias=True).requires_grad_(False).to("cuda", dtype)
    for seed, parameter in enumerate(linear.parameters()):
        parameter.copy_(random(*parameter.shape, dtype=dtype, seed=seed) * 0.05)
    x = random(1000, columns, dtype=dtype, seed=2)

    def product(x: Tensor) -> Tensor:
        return exact_gpu.product(linear, x, activation=activation, gated=gated)

    many = product(x)
    for count in (1, 2, 16, 17, 64, exact_gpu.FEW, exact_gpu.FEW + 1, 500):
        same(product(x[100 : 100 + count]), many[100 : 100 + count])


@EVERY_DTYPE
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "window", "positions"),
    [
        (32, 8, 64, None, 4300),  # two blocks to a group from 4,096 on
        (16, 8, 128, None, 2000),
        (4, 1, 256, 512, 2000),
        (6, 2, 80, 100, 500),
        (4, 4, 12, None, 300),
    ],
)
@torch.inference_mode()
def test_attention(
    heads: int, kv_heads: int, head_dim: int, window: int | None, positions: int, dtype: torch.dtype
) -> None:
    q = random(2, positions, heads, head_dim, dtype=dtype).transpose(1, 2)
    k, v = (random(2, kv_heads, positions, head_dim, dtype=dtype, seed=seed) for seed in (1, 2))

    def attend(start: int, end: int) -> Tensor:
        return exact_gpu.attend(q[:, :, start:end], k[:, :, :end], v[:, :, :end], scale=0.2, window=window, end=end)

    whole = attend(0, positions)
    edges = [edge + d for edge in (64, 128, 512, 4096) for d in (-1, 0, 1)]
    for at in [0, *(edge for edge in edges if edge < positions), positions - 1]:
        same(attend(at, at + 1), whole[:, :, at : at + 1])
    for size in (2, 7, 64, 200):
        for start in (0, 33, positions - size):
            same(attend(start, start + size), whole[:, :, start : start + size])


def make_tiny(tiny_model: Callable[..., Decoder], family: str, dtype: torch.dtype) -> Decoder:
    own: dict[str, Any] = {"gemma3": {"sliding_window": WINDOW, "head_dim": 24}, "qwen3": {"head_dim": 24}}
    sizes = {"vocab_size": 211, "hidden_size": 96, "intermediate_size": 200, "max_position_embeddings": 4096}
    options = sizes | {"tie_word_embeddings": False} | own.get(family, {})
    return tiny_model(model_type=family, dtype=dtype, **options).to("cuda")


def tokens_for(model: Decoder, count: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(model.config.vocab_size, (1, count), generator=generator).to("cuda")


def make_cache(model: Decoder, kind: Any, positions: int) -> Any:
    return kind.from_model_config(model.config, positions, dtype=model.dtype, device=model.device)


def in_chunks(model: Decoder, tokens: Tensor, cache: Any, chunk: int) -> Tensor:
    """Logits [B, n, V] of all positions."""
    return torch.cat([model(each, kv_cache=cache, all_logits=True) for each in tokens.split(chunk, 1)], 1)


class Letters:
    def decode(self, token_ids: list[int]) -> str:
        return "".join(chr(97 + i % 26) for i in token_ids)


@EVERY_DTYPE
@pytest.mark.parametrize("family", FAMILIES)
class TestFamilies:
    @pytest.fixture
    def model(self, tiny_model: Callable[..., Decoder], family: str, dtype: torch.dtype) -> Decoder:
        model = make_tiny(tiny_model, family, dtype)
        model.exact = True
        return model

    @torch.inference_mode()
    def test_caches_and_chunks(self, model: Decoder) -> None:
        tokens = tokens_for(model, 3 * WINDOW)
        whole = model(tokens)
        for kind in (KVCache, GrowingCache, SlidingCache):
            for chunk in (1, 7, 64):
                same(in_chunks(model, tokens, make_cache(model, kind, 256), chunk), whole)

    @torch.inference_mode()
    def test_truncated_and_traced(self, model: Decoder) -> None:
        tokens = tokens_for(model, 2 * WINDOW)
        whole = model(tokens)
        cache = make_cache(model, KVCache, 256)
        in_chunks(model, tokens.flip(1), cache, 50)
        cache.truncate(0)
        in_chunks(model, torch.cat((tokens[:, :90], tokens[:, :9]), 1), cache, 64)
        cache.truncate(90)
        same(in_chunks(model, tokens[:, 90:], cache, 13), whole[:, 90:])
        traced = TracedCache(make_cache(model, KVCache, 256), range(model.config.num_hidden_layers))
        same(in_chunks(model, tokens, traced, 60), whole)

    @torch.inference_mode()
    def test_rows_together(self, model: Decoder) -> None:
        prompts = [tokens_for(model, n, seed=n) for n in (1, 130, 64, 7, 200, 65, 3)]
        caches = [make_cache(model, KVCache, 256) for _ in prompts]
        for prompt, cache in zip(prompts, caches, strict=True):
            if prompt.shape[1] > 1:
                model(prompt[:, :-1], kv_cache=cache)
        got = model(torch.cat([prompt[:, -1:] for prompt in prompts]), kv_cache=BatchCache(caches))
        same(got[:, -1], torch.cat([model(prompt)[:, -1] for prompt in prompts]))

    def test_generation(self, model: Decoder) -> None:
        """Captured, launched kernel by kernel, without a cache, traced, and in a batch."""
        params = SamplingParams(max_new_tokens=20, temperature=1.1, seed=5)
        prompts = [tokens_for(model, n, seed=n)[0].tolist() for n in (9, 150, 1)]

        def alone(**options: Any) -> list[list[int]]:
            return [generate(model, Letters(), prompt, params, **options).token_ids for prompt in prompts]

        expected = alone(use_kv_cache=False)
        assert alone() == expected
        assert alone(prefill_chunk=4) == expected
        assert [row.token_ids for row in generate_batch(model, Letters(), prompts, params)] == expected
        assert generate(model, Letters(), prompts[0], params, trace=Trace()).token_ids == expected[0]
        with graph.disabled():
            assert alone() == expected


def real_config(family: str) -> ModelConfig:
    """The shapes of Llama-3.2-1B, Qwen3-1.7B and Gemma-3-1b, with four layers and fewer words."""
    common: dict[str, Any] = {
        "vocab_size": 32064,
        "num_hidden_layers": 4,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    }
    own: dict[str, dict[str, Any]] = {
        "llama": {
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "rope": RopeConfig(5e5),
        },
        "qwen3": {
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rope": RopeConfig(1e6),
        },
        "gemma3": {
            "hidden_size": 1152,
            "intermediate_size": 6912,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "rope": RopeConfig(1e6),
            "local_rope": RopeConfig(1e4),
            "query_pre_attn_scalar": 256,
            "sliding_window": 512,
            "layer_types": (SLIDING_ATTENTION, SLIDING_ATTENTION, FULL_ATTENTION, SLIDING_ATTENTION),
        },
    }
    return ModelConfig(model_type=family, **common | own[family])


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
class TestRealShapes:
    POSITIONS = 2000

    @pytest.fixture
    def model(self, family: str) -> Decoder:
        model = build_model(real_config(family)).to("cuda", torch.bfloat16)
        for seed, parameter in enumerate(model.parameters()):
            noise = random(*parameter.shape, dtype=torch.float32, seed=seed)
            parameter.data.copy_(noise * 0.04 if parameter.dim() > 1 else parameter.data + noise * 0.1)
        model.exact = True
        return model.eval().requires_grad_(False)

    @pytest.mark.parametrize("chunk", [1, 7, 64, 512])
    @torch.inference_mode()
    def test_chunks(self, model: Decoder, family: str, chunk: int) -> None:
        tokens = tokens_for(model, self.POSITIONS)
        whole = model(tokens)
        for kind in (KVCache, SlidingCache) if family == "gemma3" else (KVCache,):
            same(in_chunks(model, tokens, make_cache(model, kind, 2048), chunk), whole)

    @torch.inference_mode()
    def test_64_rows(self, model: Decoder) -> None:
        """Each goes on for a few steps, with its 63 neighbours and without."""
        lengths = [1 + i * 977 % (self.POSITIONS - 10) for i in range(64)]
        rows = [tokens_for(model, n + 4, seed=n) for n in lengths]
        caches = [make_cache(model, KVCache, 2048) for _ in rows]
        for row, cache in zip(rows, caches, strict=True):
            model(row[:, :-4], kv_cache=cache)
        steps = [torch.cat([row[:, [i]] for row in rows]) for i in range(-4, 0)]
        together = torch.cat([model(step, kv_cache=BatchCache(caches)) for step in steps], 1)
        for i, row in enumerate(rows):
            same(together[i : i + 1], model(row)[:, -4:])

    @torch.inference_mode()
    def test_normal_mode_differs(self, model: Decoder) -> None:
        """What is compared above could well differ: without exact mode, it does."""
        tokens = tokens_for(model, 300)
        with exact.mode(False):
            whole = model(tokens)
            assert not torch.equal(in_chunks(model, tokens, make_cache(model, KVCache, 300), 1), whole)
        assert torch.equal(in_chunks(model, tokens, make_cache(model, KVCache, 300), 1), model(tokens))


def test_exact_is_close_to_normal(tiny_model: Callable[..., Decoder]) -> None:
    """Other bits, but the same function."""
    for family in FAMILIES:
        model = make_tiny(tiny_model, family, torch.float32)
        tokens = tokens_for(model, 200)
        with torch.inference_mode():
            normal = model(tokens)
            with exact.mode(True):
                torch.testing.assert_close(model(tokens), normal, atol=1e-3, rtol=1e-3)
