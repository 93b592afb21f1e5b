"""GPT-2 and the RoPE GPT while they are trained: the textbook's loss and gradients, and dropout where it belongs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from amount import amount
from mocks import MockTokenizer
from torch import Tensor

from infer import KVCache, SamplingParams, generate, generate_batch
from infer.cache.base import NoCache
from infer.compat.seeds import full_attention_matrix
from infer.config import ModelConfig
from infer.models.common import Decoder
from infer.models.registry import build_model

VARIANTS: dict[str, dict[str, Any]] = {
    "gpt2": {"model_type": "gpt2"},
    "gpt2, exact GELU, untied": {"model_type": "gpt2", "hidden_act": "gelu", "tie_word_embeddings": False},
    "gpt2, no biases": {"model_type": "gpt2", "attention_bias": False, "mlp_bias": False, "norm_bias": False},
    "gpt2, odd heads": {"model_type": "gpt2", "hidden_size": 36},
    "rope_gpt": {"model_type": "rope_gpt"},
    "rope_gpt, biases": {"model_type": "rope_gpt", "attention_bias": True, "mlp_bias": True},
    "rope_gpt, tanh": {"model_type": "rope_gpt", "hidden_act": "gelu_tanh", "norm_bias": False},
}
BOTH = ["gpt2", "rope_gpt"]
Make = Callable[..., Decoder]
Drop = Callable[[Tensor], Tensor]


@pytest.fixture(params=VARIANTS.values(), ids=VARIANTS)
def variant(request: pytest.FixtureRequest) -> dict[str, Any]:
    return request.param


@pytest.fixture(params=BOTH)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


def trainable(tiny_model: Make, **changes: Any) -> Decoder:
    """In float64, where only formulas that differ show."""
    return tiny_model(dtype=torch.float64, **changes).requires_grad_(True).train()


def random_ids(rows: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(64, (rows, length), generator=torch.Generator().manual_seed(seed))


def textbook(model: Decoder, ids: Tensor, drop: Drop = lambda x: x) -> Tensor:
    """The logits by the formulas, from the model's weights alone. drop: stands for dropout, in nanoGPT's order."""
    config, weights = model.config, dict(model.named_parameters(remove_duplicate=False))
    batch, length = ids.shape
    heads, head_dim = config.num_attention_heads, config.hidden_size // config.num_attention_heads

    def norm(x: Tensor, name: str) -> Tensor:
        bias = weights.get(f"{name}.bias")
        return F.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], bias, config.rms_norm_eps)

    def product(x: Tensor, name: str) -> Tensor:
        y = x @ weights[f"{name}.weight"].T
        return y + weights[f"{name}.bias"] if f"{name}.bias" in weights else y

    def turn(x: Tensor) -> Tensor:
        angles = torch.arange(length)[:, None] * 10_000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
        first, second = x.chunk(2, -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    x = weights["embed_tokens.weight"][ids]
    if config.model_type == "gpt2":
        x = x + weights["embed_positions.weight"][:length]
    x = drop(x)
    for i in range(config.num_hidden_layers):
        at = f"layers.{i}"
        qkv = product(norm(x, f"{at}.input_layernorm"), f"{at}.self_attn.qkv_proj").chunk(3, -1)
        q, k, v = (part.view(batch, length, heads, head_dim).transpose(1, 2) for part in qkv)
        if config.model_type == "rope_gpt":
            q, k = turn(q), turn(k)
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        scores = (q @ k.transpose(-1, -2) / math.sqrt(head_dim)).masked_fill(future, -torch.inf)
        mixed = (drop(scores.softmax(-1)) @ v).transpose(1, 2).reshape(batch, length, -1)
        x = x + drop(product(mixed, f"{at}.self_attn.o_proj"))
        inner = product(norm(x, f"{at}.post_attention_layernorm"), f"{at}.mlp.up_proj")
        inner = F.gelu(inner, approximate="none" if config.hidden_act == "gelu" else "tanh")
        x = x + drop(product(inner, f"{at}.mlp.down_proj"))
    return norm(x, "norm") @ weights["lm_head.weight"].T


def loss_and_gradients(model: Decoder, forward: Callable[[Tensor], Tensor], ids: Tensor) -> tuple[Tensor, dict]:
    model.zero_grad()
    targets = random_ids(*ids.shape, seed=1)
    loss = F.cross_entropy(forward(ids).flatten(0, 1), targets.flatten())
    loss.backward()
    return loss.detach(), {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("shape", [(3, 9), (1, 1), (1, 256)], ids=str)
def test_loss_and_gradients(tiny_model: Make, variant: dict[str, Any], shape: tuple[int, int]) -> None:
    model, ids = trainable(tiny_model, **variant), random_ids(*shape)
    loss, gradients = loss_and_gradients(model, model, ids)
    expected_loss, expected = loss_and_gradients(model, lambda ids: textbook(model, ids), ids)
    # Angles are float32, in which position 255 has an error of 1e-5.
    atol = 1e-6 if variant["model_type"] == "gpt2" or shape[1] < 16 else 2e-5
    torch.testing.assert_close(loss, expected_loss, atol=1e-6, rtol=0)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], atol=atol, rtol=1e-6, msg=name)
        if shape != (1, 1):
            assert gradient.any(), name


def test_the_same_formulas_in_eval(tiny_model: Make, variant: dict[str, Any]) -> None:
    model, ids = tiny_model(**variant), random_ids(2, 9)
    torch.testing.assert_close(model(ids), textbook(model, ids), atol=1e-4, rtol=1e-4)


LETTERS, FOUR = MockTokenizer("x" * 64), SamplingParams(max_new_tokens=4)
RUNS: dict[str, Callable[[Decoder], Any]] = {
    "generate": lambda model: generate(model, LETTERS, [1, 2], FOUR).token_ids,
    "generate_batch": lambda model: generate_batch(model, LETTERS, [[1, 2]], FOUR)[0].token_ids,
    "full_attention_matrix": lambda model: full_attention_matrix(model, [1, 2], trace_layer=0),
}


class TestDropout:
    def test_where_it_is(self, tiny_model: Make, variant: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
        """On embeddings, attention weights and what both halves of a block add, and nowhere else."""
        masks = []

        def mask(x: Tensor) -> Tensor:
            """A new one for each call, the same for the model and for the formulas."""
            masks.append(x.numel())
            generator = torch.Generator().manual_seed(len(masks))
            return x * (torch.rand(x.numel(), generator=generator) > 0.3).view(x.shape) / 0.7

        def dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
            assert (p, training, inplace) == (0.3, True, False)
            return mask(x)

        def attention(q: Tensor, k: Tensor, v: Tensor, *settings: Any, scale: float, enable_gqa: bool) -> Tensor:
            assert settings == (None, 0.3, True)  # no mask, but a causal one
            future = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
            return mask((q @ k.transpose(-1, -2) * scale).masked_fill(future, -torch.inf).softmax(-1)) @ v

        model, ids = trainable(tiny_model, dropout=0.3, **variant), random_ids(3, 9)
        monkeypatch.setattr(F, "dropout", dropout)
        monkeypatch.setattr(F, "scaled_dot_product_attention", attention)
        got, calls = model(ids), masks.copy()
        masks.clear()
        torch.testing.assert_close(got, textbook(model, ids, mask), atol=1e-6, rtol=1e-6)
        assert masks == calls
        assert len(calls) == 1 + 3 * model.config.num_hidden_layers

    def test_random_while_training_alone(self, tiny_model: Make, family: str) -> None:
        model, plain = trainable(tiny_model, model_type=family, dropout=0.2), tiny_model(model_type=family)
        ids = random_ids(2, 9)
        torch.manual_seed(0)
        first, second = model(ids), model(ids)
        assert not torch.allclose(first, second, atol=0.1)
        torch.manual_seed(0)
        assert torch.equal(model(ids), first)
        model.eval().float()
        assert torch.equal(model(ids), model(ids))
        torch.testing.assert_close(
            model(ids), plain(ids), atol=1e-5, rtol=1e-5
        )  # its weights have gradients: plain torch

    @pytest.mark.parametrize("length", [1, 6])
    def test_weights_are_dropped_without_bias(self, length: int) -> None:
        """Each run is another, and on average they are what attention gives without."""
        torch.manual_seed(0)
        q, k, v = torch.randn(3, 1, 2, length, 4).unbind(0)
        attend = NoCache(dropout=0.5).attend
        runs = torch.stack([attend(0, q, k, v, scale=0.5) for _ in range(4000)])
        assert runs.std(0).min() > 0.05
        torch.testing.assert_close(runs.mean(0), NoCache().attend(0, q, k, v, scale=0.5), atol=0.12, rtol=0)

    @pytest.mark.parametrize("name", RUNS)
    def test_generation_refuses_it(self, tiny_model: Make, family: str, name: str) -> None:
        model = tiny_model(model_type=family, dropout=0.1).train()
        with pytest.raises(ValueError, match=r"in training mode, where dropout .*: call model\.eval\(\)$"):
            RUNS[name](model)
        without = tiny_model(model_type=family).train()  # nothing is random in it
        assert str(RUNS[name](without)) == str(RUNS[name](model.eval()))

    @pytest.mark.parametrize("dropout", [-0.1, 1.0, 2])
    def test_impossible(self, tiny_config: Callable[..., ModelConfig], dropout: float) -> None:
        with pytest.raises(ValueError, match=f"dropout must be from 0 to below 1, not {dropout}"):
            tiny_config(model_type="gpt2", dropout=dropout)


class TestTraining:
    @pytest.fixture
    def fresh(self, tiny_config: Callable[..., ModelConfig], family: str) -> Decoder:
        torch.manual_seed(0)
        return build_model(tiny_config(model_type=family, vocab_size=8, max_position_embeddings=16))

    def test_weights_to_start_from(self, tiny_config: Callable[..., ModelConfig], family: str) -> None:
        torch.manual_seed(0)
        model = build_model(tiny_config(model_type=family, hidden_size=64, num_hidden_layers=8, vocab_size=500))
        for name, weight in model.named_parameters():
            if weight.dim() == 1:
                assert torch.equal(weight, torch.full_like(weight, float(name.endswith("norm.weight")))), name
            else:
                adds = name.endswith(("o_proj.weight", "down_proj.weight"))
                assert weight.std().item() == pytest.approx(0.02 / (4 if adds else 1), rel=0.1), name
            assert weight.requires_grad
        with torch.no_grad():
            logits = model(random_ids(2, 16))
        assert logits.std() < 0.3  # next to no opinion yet

    @pytest.mark.parametrize("dropout", amount([0.0, 0.1], [0.1]))
    def test_a_few_steps_lower_the_loss(
        self, tiny_config: Callable[..., ModelConfig], family: str, dropout: float
    ) -> None:
        torch.manual_seed(0)
        config = tiny_config(model_type=family, vocab_size=8, max_position_embeddings=16, dropout=dropout)
        model = build_model(config).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        text = torch.tensor([0, 1, 2, 3, 4, 2, 5] * 20)  # after 2 comes 3 or 5: the past decides
        losses = []
        stretches = torch.stack([text[start : start + 17] for start in range(7)])
        for _ in range(100):
            loss = F.cross_entropy(model(stretches[:, :-1]).flatten(0, 1), stretches[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[0] == pytest.approx(math.log(8), abs=0.2)
        assert losses[-1] < 0.5
        model.eval().requires_grad_(False)
        result = generate(model, MockTokenizer("abcdefgh"), [0, 1, 2], SamplingParams(max_new_tokens=11))
        assert result.token_ids == [3, 4, 2, 5, 0, 1, 2, 3, 4, 2, 5]

    def test_a_cache_refuses_gradients(self, fresh: Decoder) -> None:
        """Rather than lose them in silence."""
        cache = KVCache.from_model_config(fresh.config, 8, dtype="float32", device="cpu")
        with pytest.raises(ValueError, match="this cache keeps no gradients"):
            fresh(torch.tensor([[1, 2]]), cache)


class TestAttentionTrace:
    @pytest.fixture
    def model(self, tiny_model: Make) -> Any:
        return tiny_model(model_type="rope_gpt", num_hidden_layers=3)

    @torch.inference_mode()
    @pytest.mark.parametrize("shape", [(1, 1), (1, 7), (3, 5), (2, 140)], ids=str)
    @pytest.mark.parametrize("layer", range(3))
    def test_rows(self, model: Any, layer: int, shape: tuple[int, int]) -> None:
        ids = random_ids(*shape)
        batch, length = shape
        logits, trace = model.forward_with_attn_trace(ids, layer, attn_full=True)
        torch.testing.assert_close(logits, model(ids), atol=1e-4, rtol=1e-4)
        assert trace.keys() == {"layer", "attn_row", "attn_full"}
        assert trace["layer"] == layer
        assert trace["attn_row"].shape == (batch, 4, length)
        assert trace["attn_full"].shape == (batch, 4, length, length)
        assert torch.equal(trace["attn_row"], trace["attn_full"][:, :, -1])
        torch.testing.assert_close(trace["attn_full"].sum(-1), torch.ones(batch, 4, length), atol=1e-5, rtol=0)
        assert (trace["attn_full"] >= 0).all()
        assert not trace["attn_full"].triu(1).any()
        for row in range(batch):
            matrix = full_attention_matrix(model, ids[row].tolist(), trace_layer=layer)
            torch.testing.assert_close(trace["attn_full"][row], matrix[0], atol=1e-5, rtol=0)  # of kernels
        plain_logits, plain = model.forward_with_attn_trace(ids, layer)
        assert plain.keys() == {"layer", "attn_row"}
        torch.testing.assert_close(plain["attn_row"], trace["attn_row"], atol=1e-6, rtol=1e-5)
        assert torch.equal(plain_logits, logits)

    @pytest.mark.parametrize("layer", [-1, 3, 99])
    def test_layers_that_are_not_there(self, model: Any, layer: int) -> None:
        with pytest.raises(ValueError, match=f"trace_layer must be from 0 to 2, not {layer}"):
            model.forward_with_attn_trace(random_ids(1, 3), layer)

    def test_not_while_training(self, tiny_model: Make) -> None:
        model = tiny_model(model_type="rope_gpt", dropout=0.1).train()
        with pytest.raises(ValueError, match=r"call model\.eval"):
            model.forward_with_attn_trace(random_ids(1, 3), 0)

    def test_blocks_are_the_layers(self, model: Any) -> None:
        assert model.blocks is model.layers
        assert len(model.blocks) == 3
        assert not any(name.startswith("blocks") for name in model.state_dict())


class TestPositions:
    @pytest.mark.parametrize("mode", ["train", "eval"])
    def test_beyond_those_learned(self, tiny_model: Make, mode: str) -> None:
        """In words, rather than a look-up out of range."""
        model = getattr(tiny_model(model_type="gpt2", max_position_embeddings=8), mode)()
        assert model(random_ids(2, 8)).shape == (2, 8, 64)
        with pytest.raises(ValueError, match="9 positions exceed the 8 that the model learned"):
            model(random_ids(2, 9))
        cache = KVCache.from_model_config(model.config, 20, dtype="float32", device="cpu")
        with pytest.raises(ValueError, match="9 positions exceed the 8 that the model learned"):
            model(random_ids(1, 9), cache)
        model(random_ids(1, 8), cache)
        with pytest.raises(ValueError, match="9 positions exceed the 8 that the model learned"):
            model(random_ids(1, 1), cache)
        assert cache.seq_len == 8

    def test_not_both_learned_and_rotated(self, tiny_config: Callable[..., ModelConfig]) -> None:
        with pytest.raises(ValueError, match=r"GPT-2 has learned positions, no RoPE: its config needs rope=None"):
            build_model(tiny_config(model_type="gpt2", rope=tiny_config().rope))


def test_targets_are_no_cache(tiny_model: Make, family: str) -> None:
    """As nanoGPT's models are called: the error says what to do, and doing that works."""
    model, X, Y = trainable(tiny_model, model_type=family), random_ids(2, 5), random_ids(2, 5, seed=1)
    with pytest.raises(TypeError, match=r"F\.cross_entropy\(.*\), or train a GPT of infer\.compat\.nanogpt$") as error:
        model(X, Y)
    loss = eval(str(error.value).split("pass the targets to ")[1].split(", or train")[0])
    assert loss.requires_grad
