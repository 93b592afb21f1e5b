"""The compiled parts of a decode step against plain torch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import FAMILIES
from mocks import LAYOUT_NAMES, LAYOUTS
from torch import nn

from infer.cache import BaseCache, BatchCache
from infer.config import RopeConfig
from infer.models.common import MLP, Block, UngatedMLP
from infer.ops import decode
from infer.ops.activation import ACTIVATIONS
from infer.ops.attention import ring_attention, ring_span
from infer.ops.linear import Linear
from infer.ops.norm import LayerNorm, Norm, RMSNorm, ZeroCentredRMSNorm
from infer.ops.rope import Rope, apply_rope

pytestmark = pytest.mark.skipif(decode.kernels() is None, reason="numba is not installed, or INFER_KERNELS=0")

SIZES = [(2, 1, 1), (5, 7, 3), (33, 65, 17), (64, 128, 96), (576, 960, 1536)]  # hidden, rows, intermediate


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a kernel does not write shows as NaN; gradients are off, as in generation."""
    monkeypatch.setattr(decode, "_empty", lambda size: torch.full((size,), torch.nan))
    with torch.inference_mode():
        yield


def randn(*shape: int, std: float = 1.0) -> torch.Tensor:
    return torch.randn(shape) * std


def linear(in_features: int, out_features: int, bias: bool) -> Linear:
    made = Linear(in_features, out_features, bias=bias).requires_grad_(False)
    for parameter in made.parameters():
        parameter.copy_(randn(*parameter.shape, std=in_features**-0.5))
    return made


def norm(size: int, kind: Callable[[int, float], Norm] = RMSNorm) -> Norm:
    made = kind(size, 1e-5).requires_grad_(False)
    for parameter in made.parameters():
        parameter.copy_(randn(size))
    return made


def count_calls(monkeypatch: pytest.MonkeyPatch, name: str) -> list[int]:
    """An entry for each call of a part from here on."""
    calls: list[int] = []
    part = getattr(decode, name)
    monkeypatch.setattr(decode, name, lambda *args, **options: calls.append(1) or part(*args, **options))
    return calls


NORMS = [RMSNorm, ZeroCentredRMSNorm, LayerNorm, partial(LayerNorm, bias=False)]
any_norm = pytest.mark.parametrize("kind", NORMS, ids=["RMSNorm", "ZeroCentredRMSNorm", "LayerNorm", "unbiased"])
both_norms = pytest.mark.parametrize("kind", NORMS[:2])


@any_norm
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("hidden", "rows", "intermediate"), SIZES)
def test_norm_linear(hidden: int, rows: int, intermediate: int, bias: bool, batch: int, kind: Any) -> None:
    x, normed, product = randn(batch, hidden), norm(hidden, kind), linear(hidden, rows, bias)
    before = x.clone()
    torch.testing.assert_close(decode.norm_linear(x, normed, product), product(normed(x)), atol=1e-5, rtol=1e-5)
    assert torch.equal(x, before)


@any_norm
@pytest.mark.parametrize("spread", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("mean", [0.0, 30.0, -1000.0])
def test_norm_of_values_far_from_zero(kind: Any, mean: float, spread: float) -> None:
    """A mean that is large beside the spread must not swallow it."""
    x, normed = mean + randn(2, 64, std=spread), norm(64, kind)
    identity = linear(64, 64, False)
    identity.weight.copy_(torch.eye(64))
    expected = copy.deepcopy(normed).double()(x.double()).float()
    # Half a digit of the input's, seen through its spread.
    rounding = 1e-7 * max(1, (abs(mean) + spread) / max(spread, 3e-3)) * normed.weight.abs().max().item()
    torch.testing.assert_close(decode.norm_linear(x, normed, identity), expected, atol=1e-5 + 4 * rounding, rtol=1e-5)


@both_norms
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("after_attention", "after_mlp"), [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("hidden", "rows", "intermediate"), SIZES)
def test_finish(
    hidden: int,
    rows: int,
    intermediate: int,
    bias: bool,
    after_attention: bool,
    after_mlp: bool,
    activation: str,
    kind: type[RMSNorm],
) -> None:
    attended, residual = randn(2, rows, 1, 4), randn(2, hidden, std=10)
    before = attended.clone(), residual.clone()
    o, gate_up, down = (
        linear(rows * 4, hidden, bias),
        linear(hidden, 2 * intermediate, bias),
        linear(intermediate, hidden, bias),
    )
    before_mlp = norm(hidden, kind)
    sandwich = {
        "after_attention": norm(hidden, kind) if after_attention else None,
        "after_mlp": norm(hidden, kind) if after_mlp else None,
    }
    got = decode.finish(attended, residual, o, before_mlp, gate_up, down, activation=activation, **sandwich)
    x = residual + (sandwich["after_attention"] or nn.Identity())(o(attended.reshape(2, -1)))
    gate, up = gate_up(before_mlp(x)).chunk(2, -1)
    expected = x + (sandwich["after_mlp"] or nn.Identity())(down(ACTIVATIONS[activation](gate) * up))
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-5)
    assert torch.equal(attended, before[0])
    assert torch.equal(residual, before[1])


@any_norm
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("hidden", "rows", "intermediate"), SIZES)
def test_finish_without_a_gate(
    hidden: int, rows: int, intermediate: int, bias: bool, batch: int, activation: str, kind: Any
) -> None:
    attended, residual = randn(batch, rows, 1, 4), randn(batch, hidden, std=10)
    before = attended.clone(), residual.clone()
    o, up, down = linear(rows * 4, hidden, bias), linear(hidden, intermediate, bias), linear(intermediate, hidden, bias)
    before_mlp = norm(hidden, kind)
    got = decode.finish(attended, residual, o, before_mlp, up, down, activation=activation)
    x = residual + o(attended.reshape(batch, -1))
    expected = x + down(ACTIVATIONS[activation](up(before_mlp(x))))
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-5)
    assert torch.equal(attended, before[0])
    assert torch.equal(residual, before[1])


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "ungated"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_finish_at_the_far_ends_of_an_activation(activation: str, gated: bool) -> None:
    """Where the exponential overflows or vanishes."""
    gates = torch.tensor([-1e4, -200.0, -90.0, -20.0, -5.0, -1e-6, 0.0, 1e-6, 5.0, 20.0, 90.0, 1e4])
    size = len(gates)
    o, gate_up, down = linear(4, 1, False), linear(1, (1 + gated) * size, True), linear(size, 1, False)
    o.weight.zero_()
    gate_up.weight.zero_()
    gate_up.bias.copy_(torch.cat((gates, torch.ones(size))) if gated else gates)
    for i in range(size):
        down.weight.zero_()
        down.weight[0, i] = 1.0
        got = decode.finish(randn(1, 1, 1, 4), torch.zeros(1, 1), o, norm(1), gate_up, down, activation=activation)
        torch.testing.assert_close(got[0], ACTIVATIONS[activation](gates[i : i + 1]), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("kind", [None, RMSNorm, ZeroCentredRMSNorm])
@pytest.mark.parametrize("position", [0, 1234])
@pytest.mark.parametrize("head_dim", [2, 6, 64])
def test_norm_rotate(head_dim: int, position: int, kind: type[RMSNorm] | None) -> None:
    """In place, on the heads of q and of k, each with its own norm, and not on those of v."""
    heads = randn(1, 7, 1, head_dim, std=3)
    q_norm, k_norm = (None, None) if kind is None else (norm(head_dim, kind), norm(head_dim, kind))
    rope = Rope(RopeConfig(), head_dim)(torch.tensor([[position]]))
    parts = heads[:, :3], heads[:, 3:5]
    if q_norm is not None:
        k_norm.weight.mul_(1.5)
        parts = q_norm(parts[0]), k_norm(parts[1])
    expected = torch.cat((*(apply_rope(part, *rope) for part in parts), heads[:, 5:]), dim=1)
    decode.norm_rotate(heads, q_norm, k_norm, 3, 2, rope)
    torch.testing.assert_close(heads, expected, atol=1e-5, rtol=1e-5)


HEADS = [(1, 1, 2), (2, 1, 10), (6, 2, 6), (9, 3, 64), (4, 4, 12), (8, 1, 128)]  # heads, kv_heads, head_dim


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), HEADS)
@pytest.mark.parametrize("keys", [1, 2, 31, 300])
@pytest.mark.parametrize("batch", [1, 2, 5])
def test_attend(heads: int, kv_heads: int, head_dim: int, keys: int, batch: int) -> None:
    q = randn(batch, heads + 3, 1, head_dim, std=3)[:, :heads]  # as it is cut out of q, k and v together
    k, v = (randn(batch, kv_heads, keys + 9, head_dim)[:, :, 4 : keys + 4] for _ in range(2))
    assert decode.can_attend(q, k, v)
    expected = F.scaled_dot_product_attention(q, k, v, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(decode.attend(q, k, v, 0.3), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("ratio", range(1, 9))
@pytest.mark.parametrize("slots", [1, 2, 7, 33])
def test_attend_around_a_ring(slots: int, ratio: int) -> None:
    """From every slot on; what lies outside is never read."""
    kv_heads, head_dim = 2, 6
    q = randn(1, ratio * kv_heads, 1, head_dim, std=3)
    k, v = (randn(1, kv_heads, slots, head_dim) for _ in range(2))
    for first in range(slots):
        for count in {1, (slots + 1) // 2, max(1, slots - 1), slots}:
            read = torch.tensor([(first + i) % slots for i in range(count)])
            poisoned = [torch.full_like(ring, torch.nan).index_copy_(2, read, ring[:, :, read]) for ring in (k, v)]
            got = decode.attend(q, *poisoned, 0.3, first, count)
            expected = F.scaled_dot_product_attention(q, k[:, :, read], v[:, :, read], scale=0.3, enable_gqa=True)
            torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), HEADS)
def test_ring_attention_is_compiled(heads: int, kv_heads: int, head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    q = randn(1, heads, 1, head_dim, std=3)
    k, v = (randn(1, kv_heads, 11, head_dim) for _ in range(2))
    spans = [(0, 1), (0, 11), (3, 9), (7, 14), (10, 12), (21, 32), (22, 30)]
    calls = count_calls(monkeypatch, "attend")
    compiled = [ring_attention(q, k, v, first, end, scale=0.3) for first, end in spans]
    assert len(calls) == len(spans)
    monkeypatch.setattr(decode, "kernels", lambda: None)
    for (first, end), got in zip(spans, compiled, strict=True):
        torch.testing.assert_close(got, ring_attention(q, k, v, first, end, scale=0.3), atol=1e-5, rtol=1e-5)
        keys, values = ring_span(k, first, end), ring_span(v, first, end)
        expected = F.scaled_dot_product_attention(q, keys, values, scale=0.3, enable_gqa=True)
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    assert len(calls) == len(spans)


def test_attend_leaves_other_layouts_to_torch() -> None:
    q, k, v = randn(1, 4, 1, 8), randn(1, 2, 5, 8), randn(1, 2, 5, 8)
    assert decode.can_attend(q, k, v)
    many = decode.MAX_ROWS + 1
    assert not decode.can_attend(randn(many, 4, 1, 8), randn(many, 2, 5, 8), randn(many, 2, 5, 8))
    assert not decode.can_attend(randn(1, 1, 4, 8).transpose(1, 2)[..., ::2], k[..., :4], v[..., :4])
    assert not decode.can_attend(randn(1, 4, 2, 8), k, v)
    assert not decode.can_attend(q, randn(1, 2, 8, 5).transpose(2, 3), v)
    assert not decode.can_attend(q.double(), k.double(), v.double())
    with torch.inference_mode(False):
        assert not decode.can_attend(q, k, v)


VARIANTS: list[dict[str, Any]] = [
    {},
    {"attention_bias": True, "mlp_bias": True},
    {"tie_word_embeddings": True, "num_key_value_heads": 1},
    {"head_dim": 6, "num_key_value_heads": 4},
    {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 3},
    {"model_type": "qwen3"},
    {"model_type": "qwen3", "attention_bias": True, "num_key_value_heads": 4},
    {"model_type": "gemma3"},
    {"model_type": "gemma3", "mlp_bias": True, "attention_bias": True, "num_key_value_heads": 1, "sliding_window": 1},
    {"model_type": "gemma3", "sliding_window": 100, "tie_word_embeddings": False},
    {"model_type": "gpt2"},
    {"model_type": "gpt2", "hidden_size": 36, "hidden_act": "gelu", "tie_word_embeddings": False},
    {"model_type": "gpt2", "attention_bias": False, "mlp_bias": False, "norm_bias": False},
    {"model_type": "rope_gpt"},
    {"model_type": "rope_gpt", "attention_bias": True, "mlp_bias": True, "norm_bias": False, "hidden_act": "gelu_tanh"},
]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize(("cls", "options"), LAYOUTS, ids=LAYOUT_NAMES)
@pytest.mark.parametrize("batch", [1, 4])
def test_a_model_gives_the_same_logits(
    cls: type[BaseCache],
    options: dict[str, Any],
    variant: dict[str, Any],
    batch: int,
    tiny_model: Callable,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_model(**variant)
    ids = torch.randint(0, 64, (batch, 16), generator=torch.Generator().manual_seed(0))

    def logits() -> torch.Tensor:
        cache = cls.from_model_config(model.config, 16, batch_size=batch, dtype="float32", device="cpu", **options)
        model(ids[:, :4], kv_cache=cache)
        return torch.cat([model(ids[:, i : i + 1], kv_cache=cache) for i in range(4, 16)])

    layers = model.config.num_hidden_layers
    rotated = layers if model.config.rope else 0
    expected = {"norm_linear": layers + 1, "norm_rotate": rotated, "attend": layers, "finish": layers}
    calls = {name: count_calls(monkeypatch, name) for name in expected}
    compiled = logits()
    assert {name: len(calls[name]) for name in calls} == {name: 12 * count for name, count in expected.items()}
    monkeypatch.setattr(decode, "kernels", lambda: None)
    torch.testing.assert_close(compiled, logits(), atol=1e-4, rtol=1e-4)
    assert len(calls["finish"]) == 12 * layers


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_a_batch_attend_compiled(family: str, tiny_model: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products run over all rows at once, attention in each row's own cache."""
    model = tiny_model(model_type=family)
    ids = torch.randint(0, 64, (3, 9), generator=torch.Generator().manual_seed(0))

    def logits() -> torch.Tensor:
        rows = [cls.from_model_config(model.config, 9, dtype="float32", device="cpu") for cls, _ in LAYOUTS[:3]]
        for i, row in enumerate(rows):
            model(ids[i : i + 1, : 2 + 3 * i], kv_cache=row)
        return model(ids[:, -1:], kv_cache=BatchCache(rows))

    attended, finished = count_calls(monkeypatch, "attend"), count_calls(monkeypatch, "finish")
    compiled = logits()
    assert len(attended) == 3 * model.config.num_hidden_layers
    assert len(finished) == model.config.num_hidden_layers
    monkeypatch.setattr(decode, "kernels", lambda: None)
    torch.testing.assert_close(compiled, logits(), atol=1e-4, rtol=1e-4)


INSIDE = [
    "layers.0",
    "layers.0.input_layernorm",
    "layers.1.self_attn",
    "layers.0.self_attn.qkv_proj",
    "layers.1.self_attn.o_proj",
    "layers.0.post_attention_layernorm",
    "layers.1.mlp",
    "layers.0.mlp.gate_up_proj",
    "layers.1.mlp.down_proj",
]
INSIDE_GPT2 = ["layers.0.input_layernorm", "layers.1.post_attention_layernorm", "layers.0.mlp", "layers.1.mlp.up_proj"]
INSIDE_GEMMA = [
    "layers.0.self_attn.q_norm",
    "layers.1.self_attn.k_norm",
    "layers.0.input_layernorm",
    "layers.0.post_attention_layernorm",
    "layers.1.pre_feedforward_layernorm",
    "layers.2.post_feedforward_layernorm",
]


class TestIsPlain:
    """Where the modules themselves must run, or the kernels would misread memory, a block is not compiled."""

    @pytest.fixture
    def compiled(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        return count_calls(monkeypatch, "finish")

    def run(self, model: Any) -> torch.Tensor:
        return model(torch.tensor([[3]]))

    def test_a_plain_model(self, tiny_model: Callable, compiled: list[int]) -> None:
        self.run(tiny_model())
        assert len(compiled) == 2

    @pytest.mark.parametrize("kind", ["register_forward_hook", "register_forward_pre_hook"])
    @pytest.mark.parametrize("name", INSIDE)
    def test_hooks_fire(self, tiny_model: Callable, compiled: list[int], name: str, kind: str) -> None:
        model = tiny_model()
        plain = self.run(model)
        seen = []
        getattr(model.get_submodule(name), kind)(lambda *args: seen.append(1))
        compiled.clear()
        torch.testing.assert_close(self.run(model), plain, atol=1e-4, rtol=1e-4)
        assert seen == [1]
        assert len(compiled) == (2 if name.count(".") == 1 else 1)  # a block's own hooks fire either way

    @pytest.mark.parametrize(
        ("family", "name"),
        [*(("gemma3", name) for name in INSIDE_GEMMA), *(("gpt2", name) for name in INSIDE_GPT2)],
    )
    def test_hooks_of_other_families_fire(
        self, tiny_model: Callable, compiled: list[int], family: str, name: str
    ) -> None:
        model = tiny_model(model_type=family)
        plain = self.run(model)
        seen = []
        model.get_submodule(name).register_forward_hook(lambda *args: seen.append(1))
        compiled.clear()
        torch.testing.assert_close(self.run(model), plain, atol=1e-4, rtol=1e-4)
        assert seen == [1]
        assert len(compiled) == model.config.num_hidden_layers - 1

    @pytest.mark.parametrize("name", INSIDE_GEMMA)
    @pytest.mark.parametrize("change", ["eps", "kind"])
    def test_a_norm_unlike_the_others(self, tiny_model: Callable, name: str, change: str) -> None:
        """One with an epsilon, or a centre, of its own counts as it is."""
        model = tiny_model(model_type="gemma3")
        changed = model.get_submodule(name)
        if change == "eps":
            changed.eps = 3.0
        else:
            changed.__class__ = RMSNorm
        expected = model(torch.tensor([[3, 4]]))[:, :1]
        torch.testing.assert_close(self.run(model), expected, atol=1e-4, rtol=1e-4)

    @pytest.mark.parametrize("names", [("q_norm", "k_norm"), ("post_attention", "pre_feedforward", "post_feedforward")])
    def test_layer_norms_in_unusual_places(self, tiny_model: Callable, compiled: list[int], names: tuple) -> None:
        """Of heads, or behind a product: the kernels have neither, but the modules do."""
        model = tiny_model(model_type="gemma3")
        layer = model.layers[0]
        for name in names:
            module, name = (layer.self_attn, name) if name.endswith("norm") else (layer, f"{name}_layernorm")
            setattr(module, name, norm(len(getattr(module, name).weight), LayerNorm))
        torch.testing.assert_close(self.run(model), model(torch.tensor([[3, 4]]))[:, :1], atol=1e-4, rtol=1e-4)
        assert len(compiled) == 2

    def test_layer_norms_each_with_its_eps(self, tiny_model: Callable, compiled: list[int]) -> None:
        model = tiny_model(model_type="gpt2")
        for i, name in enumerate(("layers.0.input_layernorm", "layers.0.post_attention_layernorm", "norm")):
            model.get_submodule(name).eps = 1.0 + i
        torch.testing.assert_close(self.run(model), model(torch.tensor([[3, 4]]))[:, :1], atol=1e-4, rtol=1e-4)
        assert len(compiled) == 2

    @pytest.mark.parametrize("name", ["embed_tokens", "norm", "lm_head"])
    def test_hooks_around_the_blocks_fire(self, tiny_model: Callable, name: str) -> None:
        model, seen = tiny_model(), []
        getattr(model, name).register_forward_hook(lambda *args: seen.append(1))
        self.run(model)
        assert seen == [1]

    def test_changed_modules_run(self, tiny_model: Callable, compiled: list[int]) -> None:
        class Doubled(MLP):
            def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
                return 2 * super().forward(x, residual)

        class Scaled(Linear):
            def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
                return 3 * super().forward(x, residual)

        class Foreign(nn.Module):
            def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
                return residual + x

        def foreign(model: Any) -> None:
            model.layers[0].mlp = Foreign()

        def foreign_norm(model: Any) -> None:
            model.layers[0].post_attention_layernorm = nn.LayerNorm(model.config.hidden_size)

        def subclassed(model: Any) -> None:
            model.layers[0].mlp.__class__ = Doubled

        def replaced(model: Any) -> None:
            model.layers[0].self_attn.o_proj.__class__ = Scaled

        def patched(model: Any) -> None:
            model.layers[0].mlp.forward = lambda x, residual: residual

        def head(model: Any) -> None:
            model.lm_head.__class__ = Scaled

        for change in (foreign, foreign_norm, subclassed, replaced, patched, head):
            model = tiny_model()
            self.run(model)  # what is remembered of it must not outlast the change
            change(model)
            compiled.clear()
            torch.testing.assert_close(self.run(model), model(torch.tensor([[3, 4]]))[:, :1], atol=1e-4, rtol=1e-4)
            assert len(compiled) == (2 if change is head else 1)

    def test_a_hook_that_changes_the_layout(self, tiny_model: Callable) -> None:
        model = tiny_model()
        model.layers[0].register_forward_hook(lambda module, args, out: torch.stack((out, out), -1)[..., 0])
        plain = tiny_model()
        torch.testing.assert_close(self.run(model), self.run(plain))

    def test_weights_in_another_order(self, tiny_model: Callable, compiled: list[int]) -> None:
        model = tiny_model()
        plain = self.run(model)
        down = model.layers[0].mlp.down_proj
        down.weight = torch.nn.Parameter(down.weight.t().contiguous().t(), requires_grad=False)
        compiled.clear()
        torch.testing.assert_close(self.run(model), plain, atol=1e-4, rtol=1e-4)
        assert len(compiled) == 1

    def test_training(self, tiny_model: Callable, compiled: list[int]) -> None:
        with torch.inference_mode(False), torch.enable_grad():
            self.run(tiny_model())
        assert not compiled

    def test_other_dtypes(self, tiny_model: Callable, compiled: list[int]) -> None:
        self.run(tiny_model().double())
        assert not compiled

    def test_several_tokens(self, tiny_model: Callable, compiled: list[int]) -> None:
        model = tiny_model()
        model(torch.tensor([[3, 4]]))
        model(torch.tensor([[3]] * (decode.MAX_ROWS + 1)))
        assert not compiled


def test_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFER_KERNELS", "0")
    assert decode.kernels.__wrapped__() is None


class TestRemembered:
    """What is known of a model must not outlast a change that no module hears of."""

    def logits(self, model: Any) -> torch.Tensor:
        return model(torch.tensor([[3]]))

    def reference(self, model: Any) -> torch.Tensor:
        return model(torch.tensor([[3, 4]]))[:, :1]

    def test_weights_in_another_order(self, tiny_model: Callable) -> None:
        model = tiny_model()
        self.logits(model)
        weight = model.layers[0].mlp.down_proj.weight
        weight.data = weight.data.t().contiguous().t()
        torch.testing.assert_close(self.logits(model), self.reference(model), atol=1e-4, rtol=1e-4)

    @pytest.mark.parametrize(("family", "kind"), [("llama", MLP), ("gpt2", UngatedMLP), ("gpt2", LayerNorm)])
    def test_a_class_that_is_patched(
        self, tiny_model: Callable, monkeypatch: pytest.MonkeyPatch, family: str, kind: type
    ) -> None:
        model = tiny_model(model_type=family)
        before = self.logits(model)
        monkeypatch.setattr(kind, "forward", lambda self, x, residual=0: residual + x)
        assert not torch.allclose(self.logits(model), before, atol=1e-2)
        torch.testing.assert_close(self.logits(model), self.reference(model), atol=1e-4, rtol=1e-4)

    def test_a_module_that_is_added_in_place_of_another(self, tiny_model: Callable) -> None:
        class Silent(nn.Module):
            def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
                return residual

        model = tiny_model()
        before = self.logits(model)
        model.layers[0].add_module("mlp", Silent())
        assert not torch.allclose(self.logits(model), before, atol=1e-2)
        torch.testing.assert_close(self.logits(model), self.reference(model), atol=1e-4, rtol=1e-4)

    @pytest.mark.parametrize("change", ["activation", "order"])
    def test_a_block_that_computes_something_else(
        self, change: str, tiny_model: Callable, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(ACTIVATIONS, "relu", F.relu)

        class Parallel(Block):
            def plain(self, x: torch.Tensor, step: Any) -> torch.Tensor:
                return self.mlp(self.post_attention_layernorm(x), self.self_attn(self.input_layernorm(x), x, step))

        model = tiny_model()
        for layer in model.layers:
            if change == "activation":
                layer.mlp.activation = "relu"
            else:
                layer.__class__ = Parallel
        torch.testing.assert_close(self.logits(model), self.reference(model), atol=1e-4, rtol=1e-4)
