"""The functions one level below `generate`: prefill, decode_step and what is built on them, for every family."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from amount import pairs
from mocks import CACHES, MockModel, UniformMockModel
from torch import Tensor

from infer import KVCache, decode_step, prefill
from infer.backend import backend_for
from infer.cache import TracedCache
from infer.compat.seeds import (
    allocate_kv_cache,
    full_attention_matrix,
    generate_ids_cached,
    generate_ids_greedy_cached,
    generate_ids_greedy_full,
)
from infer.models.common import Decoder
from infer.models.rows import Row

FAMILIES = ["llama", "qwen3", "gemma3", "gpt2", "rope_gpt"]
NO_EOT = 63  # a token that no test generates
Make = Callable[..., Decoder]


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest, tiny_model: Make) -> Decoder:
    model = tiny_model(model_type=request.param)
    for weight in model.parameters():
        weight.data *= 0.7  # scores of a usual size: rounding grows with them
    return model


def make(model: Decoder, kind: Any = KVCache, batch_size: int = 1, positions: int = 40) -> Any:
    return kind.from_model_config(model.config, positions, batch_size=batch_size, dtype="float32", device="cpu")


def some_ids(rows: int, count: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 60, (rows, count), generator=torch.Generator().manual_seed(seed))


class TestGreedy:
    @pytest.mark.parametrize("seed", range(3))
    def test_cached_equals_full(self, model: Decoder, seed: int) -> None:
        choice = random.Random(seed)
        prompt = [choice.randrange(60) for _ in range(choice.randint(2, 12))]
        new = choice.randint(8, 24)
        cached = generate_ids_greedy_cached(model, prompt, max_new_tokens=new, eot_token_id=NO_EOT)
        assert cached == generate_ids_greedy_full(model, prompt, max_new_tokens=new, eot_token_id=NO_EOT)
        assert cached[: len(prompt)] == prompt
        assert len(cached) == len(prompt) + new or cached[-1] == NO_EOT

    def test_temperature_zero_is_greedy(self, model: Decoder) -> None:
        settings: dict[str, Any] = {"max_new_tokens": 6, "eot_token_id": NO_EOT}
        sampled = generate_ids_cached(model, [1, 2, 3], temperature=0.0, **settings)
        assert sampled["ids"] == generate_ids_greedy_cached(model, [1, 2, 3], **settings)

    @pytest.mark.parametrize("run", [generate_ids_greedy_cached, generate_ids_greedy_full])
    def test_stops_at_eot(self, run: Any) -> None:
        assert run(MockModel(5), [1, 2, 3], max_new_tokens=9, eot_token_id=5) == [1, 2, 3, 5]
        assert run(MockModel(4, 4, 5), [1, 2, 3], max_new_tokens=9, eot_token_id=5) == [1, 2, 3, 4, 4, 5]

    @pytest.mark.parametrize("run", [generate_ids_greedy_cached, generate_ids_greedy_full])
    def test_only_eot_stops_it(self, run: Any) -> None:
        """Not the end-of-sequence token of the config."""
        mock = MockModel(4, eos_token_ids=(4,))
        assert run(mock, [1], max_new_tokens=3, eot_token_id=5) == [1, 4, 4, 4]

    @pytest.mark.parametrize("run", [generate_ids_greedy_cached, generate_ids_greedy_full])
    def test_a_token_that_there_is_not_stops_nothing(self, run: Any) -> None:
        assert run(MockModel(9), [1], max_new_tokens=3, eot_token_id=-1) == [1, 9, 9, 9]

    def test_full_recomputes(self) -> None:
        mock = MockModel(4)
        generate_ids_greedy_full(mock, [1, 2], max_new_tokens=3, eot_token_id=5)
        assert mock.fed == [[1, 2], [1, 2, 4], [1, 2, 4, 4]]

    @pytest.mark.parametrize("run", [generate_ids_cached, generate_ids_greedy_cached, generate_ids_greedy_full])
    def test_hard_cap(self, run: Any) -> None:
        mock = MockModel(4)  # 64 positions
        with pytest.raises(ValueError, match="60 prompt tokens \\+ 5 new tokens = 65 positions exceed"):
            run(mock, [1] * 60, max_new_tokens=5, eot_token_id=5)
        with pytest.raises(ValueError, match="65 prompt tokens"):
            run(mock, [1] * 65, max_new_tokens=1, eot_token_id=5)
        assert mock.calls == 0
        run(mock, [1] * 60, max_new_tokens=4, eot_token_id=5)

    @pytest.mark.parametrize("run", [generate_ids_cached, generate_ids_greedy_cached, generate_ids_greedy_full])
    def test_ends_training_mode(self, tiny_model: Make, run: Any) -> None:
        model = tiny_model(model_type="rope_gpt", dropout=0.5).train()
        first, second = (run(model, [1, 2], max_new_tokens=4, eot_token_id=NO_EOT, **seeded(run)) for _ in range(2))
        assert first == second
        assert not model.training


def seeded(run: Any) -> dict[str, int]:
    return {"seed": 1} if run is generate_ids_cached else {}


class TestSampled:
    def test_steps(self, model: Decoder) -> None:
        result = generate_ids_cached(model, [1, 2, 3], max_new_tokens=5, eot_token_id=NO_EOT, top_k=7, trace_layer=1)
        assert result["ids"] == [1, 2, 3, *(step["token_id"] for step in result["steps"])]
        matrix = full_attention_matrix(model, result["ids"], trace_layer=1)
        logits = model(torch.tensor([result["ids"]]))[0]
        for at, step in enumerate(result["steps"], start=2):
            probabilities = logits[at].softmax(-1)
            assert step["entropy"] == pytest.approx(-(probabilities * probabilities.log()).sum().item(), abs=1e-4)
            ids, values = zip(*step["top_k"], strict=True)
            assert list(ids) == probabilities.topk(7).indices.tolist()
            assert values == pytest.approx(probabilities.topk(7).values.tolist(), abs=1e-5)
            row = torch.tensor(step["attn_row"])  # [H, keys]
            torch.testing.assert_close(row, matrix[0, :, at, at + 1 - row.shape[1] : at + 1], atol=1e-6, rtol=0)

    def test_no_row_unless_traced(self, model: Decoder) -> None:
        (step,) = generate_ids_cached(model, [1], max_new_tokens=1, eot_token_id=NO_EOT)["steps"]
        assert set(step) == {"token_id", "top_k", "entropy"}

    def test_seed(self, model: Decoder) -> None:
        def run(seed: int) -> Any:
            return generate_ids_cached(model, [1], max_new_tokens=20, eot_token_id=NO_EOT, temperature=3.0, seed=seed)

        assert run(1) == run(1)
        assert run(1)["ids"] != run(2)["ids"]

    def test_entropy_of_a_fair_choice(self) -> None:
        (step,) = generate_ids_cached(UniformMockModel(0), [1], max_new_tokens=1, eot_token_id=5, top_k=None)["steps"]
        assert step["entropy"] == pytest.approx(torch.tensor(10.0).log().item())
        assert [p for _, p in step["top_k"]] == pytest.approx([0.1] * 10)

    @pytest.mark.parametrize("layer", [-1, 2, True, "0"])
    def test_layer_that_is_not_there(self, tiny_model: Make, layer: Any) -> None:
        with pytest.raises(ValueError, match="trace_layer must be from 0 to 1"):
            generate_ids_cached(tiny_model(), [1], max_new_tokens=1, eot_token_id=NO_EOT, trace_layer=layer)


class TestAllocate:
    def test_shapes(self) -> None:
        cache = allocate_kv_cache(L=3, B=2, H=4, T_max=10, D=6, device="cpu", dtype=torch.bfloat16)
        assert cache.k.shape == cache.v.shape == (3, 2, 4, 10, 6)
        assert cache.k.dtype == torch.bfloat16
        assert (cache.L, cache.T_max, cache.t) == (3, 10, 0)

    def test_t_follows(self, tiny_model: Make) -> None:
        model = tiny_model()
        cache = allocate_kv_cache(L=2, B=1, H=2, T_max=8, D=8, device="cpu", dtype=torch.float32)
        prefill(model, some_ids(1, 5), cache)
        assert cache.t == 5
        decode_step(model, some_ids(1, 1), cache)
        assert cache.t == 6


class TestSteps:
    @pairs(layer=[0, 1], rows=[1, 3], kind=CACHES)
    def test_against_one_pass(self, model: Decoder, kind: Any, rows: int, layer: int) -> None:
        """Logits and attention rows of a prompt and the tokens after it, fed one by one, in every row of a batch."""
        ids, start = some_ids(rows, 16), 9
        expected = model(ids)
        matrices = torch.cat([full_attention_matrix(model, row.tolist(), trace_layer=layer) for row in ids])
        cache = make(model, kind, rows)
        logits, returned, trace = prefill(
            model, prompt_ids=ids[:, :start], cache=cache, trace_layer=layer, return_attn_row=True
        )
        assert returned is cache
        torch.testing.assert_close(logits, expected[:, :start], atol=1e-4, rtol=0)
        for at in range(start - 1, ids.shape[1]):
            if at >= start:
                logits, _, trace = decode_step(model, ids[:, at : at + 1], cache, layer, True)
                torch.testing.assert_close(logits, expected[:, at : at + 1], atol=1e-4, rtol=0)
            assert cache.seq_len == at + 1
            assert trace is not None
            assert trace["layer"] == layer
            row = trace["attn_row"]
            keys = row.shape[-1]
            assert row.shape[:2] == (rows, model.config.num_attention_heads)
            assert keys == at + 1 or cache.windows[layer] is not None
            assert row.isfinite().all()
            assert ((row >= 0) & (row <= 1)).all()
            torch.testing.assert_close(row.sum(-1), torch.ones_like(row[..., 0]), atol=1e-6, rtol=0)
            torch.testing.assert_close(row, matrices[:, :, at, at + 1 - keys : at + 1], atol=1e-6, rtol=0)
            assert matrices[:, :, at, : at + 1 - keys].abs().sum() == 0

    def test_no_trace_unless_asked(self, model: Decoder) -> None:
        cache = make(model)
        assert prefill(model, some_ids(1, 3), cache)[2] is None
        assert decode_step(model, some_ids(1, 1), cache, trace_layer=0)[2] is None
        with pytest.raises(ValueError, match="give trace_layer"):
            decode_step(model, some_ids(1, 1), cache, return_attn_row=True)
        assert cache.seq_len == 4

    @pytest.mark.parametrize("chunk", [1, 2, 5])
    def test_chunks_leave_the_last_row(self, model: Decoder, chunk: int) -> None:
        ids = some_ids(1, 9)
        whole, chunked = (prefill(model, ids, make(model), 1, True, prefill_chunk=size) for size in (None, chunk))
        torch.testing.assert_close(chunked[0], whole[0], atol=1e-4, rtol=0)
        assert whole[2] is not None
        assert chunked[2] is not None
        torch.testing.assert_close(chunked[2]["attn_row"], whole[2]["attn_row"], atol=1e-6, rtol=0)

    @pytest.mark.parametrize(
        ("ids", "complaint"),
        [
            (torch.zeros(1, 2, dtype=torch.long), "exactly \\(B, 1\\)"),
            (torch.zeros(1, dtype=torch.long), "exactly \\(B, 1\\)"),
            (torch.zeros(2, 1, dtype=torch.long), "rows"),
            (torch.zeros(0, 1, dtype=torch.long), "no token ids"),
            (torch.full((1, 1), 64), "outside the vocabulary"),
            (torch.full((1, 1), -1), "outside the vocabulary"),
        ],
    )
    def test_refused_steps(self, tiny_model: Make, ids: Tensor, complaint: str) -> None:
        model = tiny_model()
        cache = make(model)
        prefill(model, some_ids(1, 3), cache)
        with pytest.raises(ValueError, match=complaint):
            decode_step(model, ids, cache)
        assert cache.seq_len == 3

    def test_refused_prefills(self, tiny_model: Make) -> None:
        model = tiny_model()
        cache = make(model)
        prefill(model, some_ids(1, 3), cache)
        with pytest.raises(ValueError, match="must be empty before prefill"):
            prefill(model, some_ids(1, 3), cache)
        with pytest.raises(ValueError, match="1 to 40 tokens"):
            prefill(model, some_ids(1, 41), make(model))
        with pytest.raises(ValueError, match="rows"):
            prefill(model, some_ids(2, 3), make(model))
        with pytest.raises(ValueError, match="bfloat16"):
            prefill(model, some_ids(1, 3), KVCache.from_model_config(model.config, 8, dtype="bfloat16", device="cpu"))

    @pytest.mark.parametrize("positions", [3, 300])
    def test_overflow(self, tiny_model: Make, positions: int) -> None:
        """Of the cache, and of the model's own context."""
        model = tiny_model(max_position_embeddings=3 if positions == 300 else 256)
        cache = make(model, positions=positions)
        prefill(model, some_ids(1, 3), cache)
        with pytest.raises(ValueError, match="cache overflow: 3 positions are filled, and there are 3"):
            decode_step(model, some_ids(1, 1), cache)

    def test_training_mode_is_refused(self, tiny_model: Make) -> None:
        model = tiny_model(model_type="rope_gpt", dropout=0.1).train()
        with pytest.raises(ValueError, match=r"call model\.eval"):
            prefill(model, some_ids(1, 3), make(model))
        with pytest.raises(ValueError, match=r"call model\.eval"):
            full_attention_matrix(model, [1, 2], trace_layer=0)

    def test_ids_that_are_none(self, tiny_model: Make) -> None:
        model = tiny_model()
        for ids in ([[1, 2]], torch.rand(1, 2)):
            with pytest.raises(TypeError, match="must be a tensor of integers"):
                prefill(model, ids, make(model))
        with pytest.raises(TypeError, match="must be a tensor of integers"):
            decode_step(model, torch.rand(1, 1), make(model))
        with pytest.raises(TypeError, match="flat sequence of token ids"):
            full_attention_matrix(model, torch.zeros(1, 2, dtype=torch.long), trace_layer=0)
        with pytest.raises(ValueError, match="no token ids"):
            full_attention_matrix(model, [], trace_layer=0)

    def test_a_matrix_beyond_the_context(self, tiny_model: Make) -> None:
        with pytest.raises(ValueError, match="9 tokens exceed the model's context of 8"):
            full_attention_matrix(tiny_model(max_position_embeddings=8), [1] * 9, trace_layer=0)

    def test_no_gradients(self, tiny_model: Make) -> None:
        model = tiny_model().requires_grad_()
        logits, cache, _ = prefill(model, some_ids(1, 3), make(model))
        assert not logits.requires_grad
        assert not decode_step(model, some_ids(1, 1), cache)[0].requires_grad


class TestTracedCache:
    @pytest.mark.parametrize("way", ["torch", "backend"])
    def test_rows_of_a_ragged_pass(self, model: Decoder, way: str) -> None:
        """Each row's cache keeps its own."""
        prompts, lengths, last = some_ids(2, 9), (9, 4), (7, 8)
        caches = [TracedCache(make(model), [1]) for _ in prompts]
        with torch.inference_mode():
            run = model.run if way == "torch" else backend_for(model).run
            run([Row(cache, ids[None, :n]) for cache, ids, n in zip(caches, prompts, lengths, strict=True)])
            run([Row(cache, [token]) for cache, token in zip(caches, last, strict=True)])
        for cache, ids, n, token in zip(caches, prompts, lengths, last, strict=True):
            matrix = full_attention_matrix(model, [*ids[:n].tolist(), token], trace_layer=1)
            torch.testing.assert_close(cache.rows[1], matrix[:, :, -1:], atol=1e-6, rtol=0)

    def test_long_prompts_in_blocks(self, tiny_model: Make) -> None:
        """More queries than one block of the softmax in plain sight."""
        model, ids = tiny_model(model_type="gemma3", max_position_embeddings=512), some_ids(1, 300)
        cache = TracedCache(make(model, positions=300), [0, 1])
        torch.testing.assert_close(model(ids, kv_cache=cache), model(ids)[:, -1:], atol=1e-4, rtol=0)
        for layer in (0, 1):
            matrix = full_attention_matrix(model, ids[0].tolist(), trace_layer=layer)
            assert matrix.shape == (1, 4, 300, 300)
            torch.testing.assert_close(matrix.sum(-1), torch.ones(1, 4, 300), atol=1e-6, rtol=0)
            torch.testing.assert_close(cache.rows[layer], matrix[:, :, -1:], atol=1e-6, rtol=0)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
    def test_dtypes(self, tiny_model: Make, dtype: torch.dtype) -> None:
        model, ids = tiny_model(dtype=dtype), some_ids(1, 6)
        cache = TracedCache(KVCache.from_model_config(model.config, 8, dtype=dtype, device="cpu"), [0, 1])
        logits = model(ids, kv_cache=cache)
        assert logits.dtype == dtype
        tolerance = 1e-10 if dtype is torch.float64 else 0.2
        torch.testing.assert_close(logits, model(ids)[:, -1:], atol=tolerance, rtol=0.05)
        assert cache.rows[0].sum(-1).sub(1).abs().max() < 1e-6

    def test_hands_everything_through(self, model: Decoder) -> None:
        inner = make(model)
        cache = TracedCache(inner, [0])
        model(some_ids(1, 5), kv_cache=cache)
        assert (cache.seq_len, cache.capacity, cache.memory_bytes) == (5, 40, inner.memory_bytes)
        cache.truncate(3)
        assert inner.seq_len == 3
        cache.reset()
        assert inner.seq_len == 0
