"""The decoder and its parts, against plain formulas."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from amount import once, pairs
from mocks import LAYOUTS, naive_logits
from torch import Tensor

from infer import KVCache
from infer.backend.cpu import ops
from infer.cache import BaseCache, NoCache
from infer.config import RopeConfig
from infer.engine.model import step
from infer.models.common import Decoder
from infer.models.registry import build_model
from infer.models.rows import ALL, Row
from infer.nn import attention as attending
from infer.nn.activation import ACTIVATIONS
from infer.nn.linear import FusedLinear, Linear
from infer.nn.norm import RMSNorm, ZeroCenteredRMSNorm
from infer.nn.rope import Rope, apply_rope, inverse_frequencies

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "bias": {"attention_bias": True},
    "no grouping": {"num_key_value_heads": 4},
    "one KV head": {"num_attention_heads": 8, "num_key_value_heads": 1},
    "wide heads": {"head_dim": 16},
    "theta": {"rope": RopeConfig(theta=500_000.0)},
    "sliding": {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 3},
    "qwen3": {"model_type": "qwen3"},
    "qwen3, tied, bias, sliding": {
        "model_type": "qwen3",
        "tie_word_embeddings": True,
        "attention_bias": True,
        "layer_types": ("full_attention", "sliding_attention"),
        "sliding_window": 1,
    },
    "gemma3": {"model_type": "gemma3"},
    "gemma3, untied, MLP bias": {"model_type": "gemma3", "tie_word_embeddings": False, "mlp_bias": True},
}
LLAMA3 = RopeConfig(theta=500_000.0, scaling="llama3", factor=32.0, original_max_position_embeddings=8192)


@pytest.fixture(params=VARIANTS.values(), ids=VARIANTS.keys())
def variant(request: pytest.FixtureRequest) -> dict[str, Any]:
    return request.param


def random_ids(batch: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(64, (batch, length), generator=torch.Generator().manual_seed(seed))


def make_cache(model: Decoder, batch: int = 1, cls: type[BaseCache] = KVCache, **options: Any) -> BaseCache:
    return cls.from_model_config(model.config, 16, batch_size=batch, dtype=model.dtype, device="cpu", **options)


class TestForward:
    @pairs(variant=VARIANTS.values(), batch=[1, 3], length=[1, 5])
    def test_shapes(self, tiny_model: Callable, variant: dict, batch: int, length: int) -> None:
        model = tiny_model(**variant)
        ids = random_ids(batch, length)
        assert model(ids).shape == (batch, length, 64)
        assert model(ids, kv_cache=make_cache(model, batch)).shape == (batch, 1, 64)

    def test_plain_formulas(self, tiny_model: Callable, variant: dict) -> None:
        model = tiny_model(**variant)
        ids = random_ids(2, 7)
        torch.testing.assert_close(model(ids), naive_logits(model, ids), atol=1e-4, rtol=1e-4)

    @once({"cls, options": LAYOUTS}, variant=VARIANTS.values())
    def test_plain_formulas_through_a_cache(
        self, tiny_model: Callable, variant: dict, cls: type[BaseCache], options: dict
    ) -> None:
        model = tiny_model(**variant)
        ids = random_ids(2, 9)
        expected = naive_logits(model, ids)
        cache, other = (make_cache(model, 2, cls, **options) for _ in range(2))
        for start, end in ((0, 4), (4, 5), (5, 8), (8, 9)):
            part = ids[:, start:end]
            for logits in (model(part, kv_cache=cache)[:, 0], step(model, other, part)):  # in torch, and by a backend
                torch.testing.assert_close(logits, expected[:, end - 1], atol=1e-4, rtol=1e-4)

    @once({"cls, options": LAYOUTS}, variant=VARIANTS.values(), batch=[1, 2])
    def test_all_logits(
        self, tiny_model: Callable, variant: dict, cls: type[BaseCache], options: dict, batch: int
    ) -> None:
        """Of every position, chunk by chunk, in a single token too; the last is what is given without asking."""
        model = tiny_model(**variant)
        ids = random_ids(batch, 9)
        expected = model(ids)
        cache, other = (make_cache(model, batch, cls, **options) for _ in range(2))
        for start, end in ((0, 5), (5, 6), (6, 9)):
            logits = model(ids[:, start:end], kv_cache=cache, all_logits=True)
            torch.testing.assert_close(logits, expected[:, start:end], atol=1e-4, rtol=1e-4)
            last = model(ids[:, start:end], kv_cache=other)
            torch.testing.assert_close(last, logits[:, -1:], atol=1e-5, rtol=1e-5)

    def test_all_logits_without_a_cache_changes_nothing(self, tiny_model: Callable) -> None:
        model = tiny_model()
        ids = random_ids(2, 4)
        assert torch.equal(model(ids, all_logits=True), model(ids))

    def test_rows_do_not_touch(self, tiny_model: Callable) -> None:
        model = tiny_model()
        ids = random_ids(3, 6)
        together = model(ids)
        for i in range(3):
            torch.testing.assert_close(together[i], model(ids[i : i + 1])[0], atol=1e-5, rtol=1e-5)

    def test_later_tokens_do_not_matter(self, tiny_model: Callable, variant: dict) -> None:
        model = tiny_model(**variant)
        ids = random_ids(1, 8)
        changed = ids.clone()
        changed[:, 5:] = (changed[:, 5:] + 1) % 64
        torch.testing.assert_close(model(ids)[:, :5], model(changed)[:, :5], atol=1e-5, rtol=1e-5)
        assert not torch.allclose(model(ids)[:, 5:], model(changed)[:, 5:], atol=1e-2)

    def test_keys_are_stored_turned(self, tiny_model: Callable) -> None:
        """The cache holds keys after RoPE: the same token has different keys at different positions."""
        model = tiny_model()
        cache = make_cache(model)
        model(torch.tensor([[7, 7, 7]]), kv_cache=cache)
        k, v = cache.k[0, 0, :, :3], cache.v[0, 0, :, :3]
        assert not torch.allclose(k[:, 0], k[:, 1], atol=1e-2)
        torch.testing.assert_close(v[:, 0], v[:, 1])

    def test_heads_are_not_expanded(self, tiny_model: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
        model = tiny_model(num_attention_heads=8, num_key_value_heads=2, head_dim=4)
        shapes: list[tuple[torch.Size, ...]] = []
        attention = attending.attention

        def spy(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
            shapes.append((q.shape, k.shape, v.shape))
            return attention(q, k, v, **options)

        monkeypatch.setattr(attending, "attention", spy)
        cache = make_cache(model, 2)
        for n in (5, 1):
            model.run([Row(cache, random_ids(2, n))])
        model.run([Row(NoCache(2), random_ids(2, 6))])
        expected = [((2, 8, n, 4), (2, 2, length, 4), (2, 2, length, 4)) for n, length in ((5, 5), (1, 6), (6, 6))]
        assert shapes == [shape for shape in expected for _ in range(2)]  # two layers

    @pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # torch says so once where the CPU has no bf16
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_half_precision(self, tiny_model: Callable, variant: dict, dtype: torch.dtype) -> None:
        exact = tiny_model(**variant)
        model = copy.deepcopy(exact).to(dtype)
        assert model.dtype == dtype
        ids = random_ids(2, 6)
        whole = model(ids)
        cache = make_cache(model, 2)
        model(ids[:, :5], kv_cache=cache)
        last = model(ids[:, 5:], kv_cache=cache)
        assert whole.dtype == last.dtype == dtype
        scale = exact(ids).std()
        assert (whole.float() - exact(ids)).std() < 0.05 * scale
        assert (last[:, 0].float() - exact(ids)[:, -1]).std() < 0.05 * scale

    def test_tied_head_is_the_embedding(self, tiny_model: Callable) -> None:
        tied, untied = tiny_model(tie_word_embeddings=True), tiny_model()
        assert tied.lm_head.weight is tied.embed_tokens.weight
        assert untied.lm_head.weight is not untied.embed_tokens.weight
        assert sum(p.numel() for p in untied.parameters()) - sum(p.numel() for p in tied.parameters()) == 64 * 32

    @pytest.mark.parametrize("bias", [False, True])
    def test_biases_are_optional(self, tiny_model: Callable, bias: bool) -> None:
        names = [name for name, _ in tiny_model(attention_bias=bias, mlp_bias=bias).named_parameters()]
        assert sum(name.endswith(".bias") for name in names) == (8 if bias else 0)  # qkv, o, gate_up, down; two layers

    def test_unknown_architecture(self, tiny_config: Callable) -> None:
        with pytest.raises(ValueError, match=r"'mamba' is not supported; supported: .*llama"):
            build_model(tiny_config(model_type="mamba"))


class TestLinear:
    @pairs(rows=[1, 5], bias=[False, True], dtype=[torch.float32, torch.float16])
    def test_residual_is_added(self, rows: int, bias: bool, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)
        linear = Linear(8, 6, bias=bias).to(dtype).requires_grad_(False)
        for parameter in linear.parameters():
            parameter.normal_(generator=generator)
        x, residual = torch.randn(rows, 8, generator=generator), torch.randn(rows, 6, generator=generator)
        before = residual.clone()
        expected = x @ linear.weight.float().T + (linear.bias.float() if bias else 0)
        close = {"atol": 1e-5, "rtol": 1e-5} if dtype is torch.float32 else {"atol": 2e-2, "rtol": 2e-2}
        torch.testing.assert_close(linear(x.to(dtype)).float(), expected, **close)
        torch.testing.assert_close(linear(x.to(dtype), residual.to(dtype)).float(), expected + residual, **close)
        assert torch.equal(residual, before)

    def test_fused_parts_are_stacked_in_order(self) -> None:
        fused = FusedLinear(2, {"a": 1, "b": 2}, bias=True)
        assert fused.weight.shape == (3, 2)
        assert fused.bias.shape == (3,)
        assert list(fused.parts.items()) == [("a", 1), ("b", 2)]


class TestNorm:
    def test_formula(self) -> None:
        norm = RMSNorm(2, 0.0).requires_grad_(False)
        norm.weight.copy_(torch.tensor([1.0, 10.0]))
        expected = torch.tensor([[3.0, 40.0], [0.0, 20.0]]) / torch.tensor([[12.5], [2.0]]).sqrt()
        torch.testing.assert_close(norm(torch.tensor([[3.0, 4.0], [0.0, 2.0]])), expected)

    def test_half_precision_is_computed_in_float32(self) -> None:
        x = torch.full((2, 4), 300.0, dtype=torch.float16)  # squares overflow float16
        normed = RMSNorm(4, 1e-5).half()(x)
        assert normed.dtype == torch.float16
        torch.testing.assert_close(normed, torch.ones_like(x))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_zero_centred_weights_lack_one(self, dtype: torch.dtype) -> None:
        stored = torch.tensor([0.25, -0.5, 0.0, 2.0])
        plain, centered = RMSNorm(4, 1e-6).requires_grad_(False), ZeroCenteredRMSNorm(4, 1e-6).requires_grad_(False)
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).to(dtype)
        assert torch.equal(centered(x), plain(x))  # as they are made, both only normalise
        centered.weight.copy_(stored)
        plain.weight.copy_(stored + 1)
        assert torch.equal(centered.to(dtype)(x), plain.to(dtype)(x))

    def test_one_is_added_in_float32(self) -> None:
        """1 + 2**-9 is no bfloat16."""
        norm = ZeroCenteredRMSNorm(2, 0.0).requires_grad_(False)
        norm.weight.fill_(2.0**-9)
        normed = norm.bfloat16()(torch.tensor([[192.0, 256.0]]))
        torch.testing.assert_close(normed, torch.tensor([[192.0, 256.0]]) / (51200**0.5) * (1 + 2.0**-9))


class TestGemma3:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_embeddings_are_scaled_by_a_rounded_root(self, tiny_model: Callable, dtype: torch.dtype) -> None:
        model = tiny_model(model_type="gemma3", hidden_size=40, dtype=dtype)
        ids = random_ids(1, 5)[0]
        factor = torch.tensor(40**0.5).to(dtype)
        assert (dtype is torch.bfloat16) == (float(factor) != float(torch.tensor(40**0.5)))
        assert torch.equal(model.embed(ids, torch.arange(5)), model.embed_tokens.weight[ids] * factor)

    def test_each_kind_of_layer_has_its_rope(self, tiny_model: Callable) -> None:
        """A change of the local RoPE reaches window layers only, one of the global RoPE the others only."""
        ids = random_ids(1, 6)

        def keys(**ropes: RopeConfig) -> list[Tensor]:
            """What each layer stores, all of them being fed the embeddings."""
            model = tiny_model(model_type="gemma3", **ropes)
            for layer in model.layers:
                layer.self_attn.o_proj.weight.zero_()
                layer.mlp.down_proj.weight.zero_()
            cache = make_cache(model)
            model(ids, kv_cache=cache)
            return list(cache.k)

        plain = keys()
        local, everywhere = keys(local_rope=RopeConfig(77.0)), keys(rope=RopeConfig(77.0))
        assert [torch.equal(a, b) for a, b in zip(plain, local, strict=True)] == [False, True, False]
        assert [torch.equal(a, b) for a, b in zip(plain, everywhere, strict=True)] == [True, False, True]


class TestActivation:
    @pytest.mark.parametrize(
        ("name", "formula"),
        [
            ("silu", lambda x: x / (1 + math.exp(-x))),
            ("gelu_tanh", lambda x: 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))),
        ],
    )
    def test_formula(self, name: str, formula: Callable[[float], float]) -> None:
        values = [-9.0, -3.0, -1.0, -0.1, 0.0, 0.5, 2.0, 8.0]
        expected = torch.tensor([formula(x) for x in values])
        torch.testing.assert_close(ACTIVATIONS[name](torch.tensor(values)), expected, atol=1e-6, rtol=1e-5)


class TestRope:
    def test_distance_alone_matters(self) -> None:
        rope = Rope(RopeConfig(), 8)
        q, k = torch.randn(2, 1, 1, 8, generator=torch.Generator().manual_seed(0)).unbind()  # [T, H, D]

        def product(q_pos: int, k_pos: int) -> float:
            turned = [apply_rope(x, *rope(torch.tensor([at]))) for x, at in ((q, q_pos), (k, k_pos))]
            return float((turned[0] * turned[1]).sum())

        assert product(7, 3) == pytest.approx(product(104, 100), abs=1e-4)
        assert product(7, 3) != pytest.approx(product(7, 4), abs=1e-2)
        assert product(0, 0) == pytest.approx(float((q * k).sum()), abs=1e-5)

    def test_each_token_has_its_position(self) -> None:
        """In any order, and whoever stands beside it."""
        rope = Rope(RopeConfig(), 8)
        x = torch.randn(4, 3, 8, generator=torch.Generator().manual_seed(0))
        positions = torch.tensor([0, 5, 9, 2])
        turned = apply_rope(x, *rope(positions))
        for i in range(4):
            assert torch.equal(turned[i : i + 1], apply_rope(x[i : i + 1], *rope(positions[i : i + 1])))
        torch.testing.assert_close(turned[0], x[0])  # position 0 turns nothing

    def test_far_positions_stay_apart_in_half_precision(self) -> None:
        rope = Rope(RopeConfig(), 8)
        turned = apply_rope(torch.ones(2, 1, 8, dtype=torch.bfloat16), *rope(torch.tensor([1000, 1001])))
        assert turned.dtype == torch.bfloat16
        assert (turned[0] - turned[1]).abs().max() > 0.1

    def test_default_frequencies(self) -> None:
        inv_freq = inverse_frequencies(RopeConfig(theta=100.0), 4)
        torch.testing.assert_close(inv_freq, torch.tensor([1.0, 0.1]))

    def test_linear_scaling(self) -> None:
        plain = inverse_frequencies(RopeConfig(), 16)
        scaled = inverse_frequencies(RopeConfig(scaling="linear", factor=4.0), 16)
        torch.testing.assert_close(scaled, plain / 4)
        positions = torch.tensor([8])
        torch.testing.assert_close(
            Rope(RopeConfig(scaling="linear", factor=4.0), 16)(positions)[0], Rope(RopeConfig(), 16)(positions // 4)[0]
        )

    def test_llama3_scaling(self) -> None:
        """High frequencies stay, low ones are divided, and those between lie between."""
        plain = inverse_frequencies(RopeConfig(theta=LLAMA3.theta), 64)
        scaled = inverse_frequencies(LLAMA3, 64)
        wavelength = 2 * torch.pi / plain
        high, low = wavelength < 8192 / 4, wavelength > 8192 / 1
        assert high.any()
        assert low.any()
        torch.testing.assert_close(scaled[high], plain[high])
        torch.testing.assert_close(scaled[low], plain[low] / 32)
        between = ~high & ~low
        assert between.any()
        assert ((plain[between] / 32 < scaled[between]) & (scaled[between] < plain[between])).all()
        for i in between.nonzero().flatten().tolist():
            smooth = (8192 / float(wavelength[i]) - 1) / (4 - 1)
            expected = (1 - smooth) * float(plain[i]) / 32 + smooth * float(plain[i])
            assert float(scaled[i]) == pytest.approx(expected, rel=1e-5)

    def test_divisors_stand_for_llama3_scaling(self) -> None:
        plain, scaled = inverse_frequencies(RopeConfig(theta=LLAMA3.theta), 64), inverse_frequencies(LLAMA3, 64)
        divisors = tuple((plain / scaled).tolist())
        torch.testing.assert_close(
            inverse_frequencies(RopeConfig(theta=LLAMA3.theta, divisors=divisors), 64), scaled, atol=0, rtol=1e-6
        )

    def test_divisors_must_be_one_per_frequency(self) -> None:
        with pytest.raises(ValueError, match="3 RoPE divisors for 4 frequencies"):
            inverse_frequencies(RopeConfig(divisors=(1.0, 1.0, 1.0)), 8)

    @pytest.mark.parametrize("rope", [LLAMA3, RopeConfig(scaling="linear", factor=2.0)], ids=["llama3", "linear"])
    def test_scaled_models_run_cached(self, tiny_model: Callable, rope: RopeConfig) -> None:
        model = tiny_model(rope=rope, head_dim=32)
        ids = random_ids(1, 8)
        cache = make_cache(model)
        model(ids[:, :6], kv_cache=cache)
        model(ids[:, 6:7], kv_cache=cache)
        logits = model(ids[:, 7:], kv_cache=cache)
        torch.testing.assert_close(logits, model(ids)[:, -1:], atol=1e-4, rtol=1e-4)
        assert not torch.allclose(logits, tiny_model(head_dim=32)(ids)[:, -1:], atol=1e-2)

    def test_frequencies_are_real_in_a_model_built_on_meta(self, tiny_config: Callable) -> None:
        with torch.device("meta"):
            model = build_model(tiny_config(rope=RopeConfig(divisors=(1.0, 2.0, 3.0, 4.0))))
        assert model.ropes["full_attention"].inv_freq.device.type == "cpu"


class TestModule:
    """The lean Module is still an nn.Module."""

    def test_hooks_fire(self, tiny_model: Callable) -> None:
        model = tiny_model()
        ids = random_ids(1, 4)
        plain, before = model.run([Row(NoCache(1), ids, ALL)])[0], model(ids)
        fired: list[str] = []
        target = model.layers[0].mlp
        handles = [
            target.register_forward_pre_hook(lambda *_: fired.append("before")),
            target.register_forward_hook(lambda *_: fired.append("after")),
            model.register_forward_hook(lambda module, args, out: out * 2),
        ]
        assert torch.equal(model(ids), plain * 2)
        assert fired == ["before", "after"]
        for handle in handles:
            handle.remove()
        assert torch.equal(model(ids), before)
        assert fired == ["before", "after"]

    def test_backward_hooks_fire(self, tiny_model: Callable) -> None:
        model = tiny_model().requires_grad_(True)
        fired: list[int] = []
        model.layers[1].mlp.down_proj.register_full_backward_hook(lambda *_: fired.append(1))
        model(random_ids(1, 4)).sum().backward()
        assert fired == [1]

    def test_to_dtype_and_back(self, tiny_model: Callable, variant: dict) -> None:
        model = tiny_model(**variant)
        ids = random_ids(1, 4)
        plain = model(ids)
        model.to(torch.float64)
        assert model(ids).dtype == torch.float64
        model.to(torch.float32)
        assert torch.equal(model(ids), plain)
        assert_attributes_are_parameters(model)

    def test_to_empty_replaces_parameters(self, tiny_config: Callable) -> None:
        with torch.device("meta"):
            model = build_model(tiny_config(attention_bias=True))
        model.to_empty(device="cpu")
        assert {p.device.type for p in model.parameters()} == {"cpu"}
        assert_attributes_are_parameters(model)

    @pytest.mark.parametrize("assign", [False, True])
    def test_state_dict_round_trip(self, tiny_model: Callable, variant: dict, assign: bool) -> None:
        source, target = tiny_model(seed=1, **variant), tiny_model(seed=2, **variant)
        ids = random_ids(1, 4)
        assert not torch.allclose(source(ids), target(ids))
        target.load_state_dict(source.state_dict(), assign=assign)
        assert torch.equal(source(ids), target(ids))
        assert_attributes_are_parameters(target)

    def test_deepcopy_is_independent(self, tiny_model: Callable, variant: dict) -> None:
        model = tiny_model(**variant)
        ids = random_ids(1, 4)
        plain = model(ids)
        twin = copy.deepcopy(model)
        assert torch.equal(twin(ids), plain)
        assert (twin.lm_head.weight is twin.embed_tokens.weight) == model.config.tie_word_embeddings
        for parameter in twin.parameters():
            parameter.data.zero_()
        assert torch.equal(model(ids), plain)
        assert not twin(ids).any()

    def test_replaced_parameters_are_used(self) -> None:
        linear = Linear(2, 2)
        assert linear.bias is None
        linear.weight = torch.nn.Parameter(torch.eye(2) * 3)
        linear.bias = torch.nn.Parameter(torch.ones(2))
        assert linear(torch.ones(1, 2)).tolist() == [[4.0, 4.0]]
        linear.bias = None
        assert linear(torch.ones(1, 2)).tolist() == [[3.0, 3.0]]

    def test_replaced_children_are_used(self, tiny_model: Callable) -> None:
        model, other = tiny_model(seed=1), tiny_model(seed=2)
        ids = random_ids(1, 4)
        plain = model(ids)
        model.layers[0].mlp = other.layers[0].mlp
        assert not torch.allclose(model(ids), plain)
        assert dict(model.named_modules())["layers.0.mlp"] is other.layers[0].mlp

    @pytest.mark.parametrize("shape", [(2, 6), (1, 1)])
    def test_gradients_are_those_of_the_formulas(
        self, tiny_model: Callable, variant: dict, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model = tiny_model(**variant).requires_grad_(True).train()
        ids = random_ids(*shape)
        targets = random_ids(*shape, seed=1).flatten()

        def gradients(forward: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
            model.zero_grad()
            torch.nn.functional.cross_entropy(forward(ids).flatten(0, 1), targets).backward()
            return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}

        monkeypatch.setattr(attending, "BLOCK", 2)  # window layers attend in several blocks
        got = gradients(model)
        expected = gradients(lambda ids: naive_logits(model, ids))
        if shape != (1, 1):  # where a query sees one key, its gradient is 0, up to rounding
            assert all(gradient.any() for gradient in got.values())
        for name, gradient in got.items():
            torch.testing.assert_close(gradient, expected[name], atol=1e-4, rtol=1e-3, msg=name)


def assert_attributes_are_parameters(model: Decoder) -> None:
    """Plain attributes and registered parameters are the same objects."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        module_name, _, leaf = name.rpartition(".")
        assert getattr(model.get_submodule(module_name), leaf) is parameter, name


@pytest.mark.parametrize("shape", [(1, 0), (0, 3)])
def test_no_tokens(tiny_model: Callable[..., Decoder], shape: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="no tokens"):
        tiny_model()(torch.zeros(shape, dtype=torch.int64))


@pytest.mark.parametrize(
    ("ids", "what"),
    [
        (torch.tensor([1, 2]), r"int64 of shape \[2\]"),
        (torch.ones(1, 2), r"float32 of shape \[1, 2\]"),
        (torch.ones(1, 2, dtype=torch.uint8), "uint8"),
    ],
)
def test_no_token_ids(tiny_model: Callable[..., Decoder], ids: Tensor, what: str) -> None:
    with pytest.raises(ValueError, match=rf"integers \[batch, tokens\], not {what}"):
        tiny_model()(ids)


@pairs(
    mask=[None, "causal", torch.ones(5, 5).tril().bool()], there=[False, True], dtype=[torch.bfloat16, torch.float16]
)
def test_attention_in_sixteen_bits(dtype: torch.dtype, mask: Any, there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch attends in float32 where the CPU has no instructions for 16 bits: it would be slow."""
    asked: list[torch.dtype] = []
    functional = attending.F

    def attention(q: Tensor, *args: Any, **options: Any) -> Tensor:
        asked.append(q.dtype)
        return functional.scaled_dot_product_attention(q, *args, **options)

    changed = SimpleNamespace(**vars(functional) | {"scaled_dot_product_attention": attention})
    monkeypatch.setattr(attending, "F", changed)
    monkeypatch.setattr(attending, "has_fast_matmul", lambda _: there)
    q, k, v = (torch.randn(1, heads, 5, 8).to(dtype) for heads in (4, 2, 2))
    got = attending.attention(q, k, v, scale=0.3, mask=mask)
    assert got.dtype is dtype
    assert asked == [dtype if there else torch.float32]
    expected = attending.attention(q.float(), k.float(), v.float(), scale=0.3, mask=mask)
    torch.testing.assert_close(got.float(), expected, atol=0.02, rtol=0.02)


@pairs(rows=[1, 3, 40], bias=[False, True], dtype=[torch.bfloat16, torch.float16])
def test_products_in_sixteen_bits(rows: int, bias: bool, dtype: torch.dtype) -> None:
    """A CPU's kernels compute in float32: as close as 16 bits can hold, also of sums torch would round on the way."""
    generator = torch.Generator().manual_seed(rows)
    linear = Linear(300, 70, bias=bias).requires_grad_(False)
    for weight in linear.parameters():
        weight.copy_(torch.randn(weight.shape, generator=generator))
    linear.to(dtype)
    x = torch.randn(rows, 300, generator=generator).to(dtype)
    wide = x.double() @ linear.weight.double().T + (linear.bias.double() if bias else 0)
    got = ops.linear(x, linear)
    torch.testing.assert_close(got, wide.float().to(dtype), atol=1e-3, rtol=torch.finfo(dtype).eps)
