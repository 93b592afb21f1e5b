"""The compiled parts of a decode step against plain torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from infer import GrowingCache, KVCache
from infer.config import RopeConfig
from infer.models.common import MLP
from infer.ops import decode
from infer.ops.linear import Linear
from infer.ops.norm import RMSNorm
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


def norm(size: int) -> RMSNorm:
    made = RMSNorm(size, 1e-5).requires_grad_(False)
    made.weight.copy_(randn(size))
    return made


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("hidden", "rows", "intermediate"), SIZES)
def test_norm_linear(hidden: int, rows: int, intermediate: int, bias: bool) -> None:
    x, normed, product = randn(1, hidden), norm(hidden), linear(hidden, rows, bias)
    torch.testing.assert_close(decode.norm_linear(x, normed, product), product(normed(x)), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("hidden", "rows", "intermediate"), SIZES)
def test_finish(hidden: int, rows: int, intermediate: int, bias: bool) -> None:
    attended, residual = randn(1, rows, 1, 4), randn(1, hidden, std=10)
    o, gate_up, down = (
        linear(rows * 4, hidden, bias),
        linear(hidden, 2 * intermediate, bias),
        linear(intermediate, hidden, bias),
    )
    normed = norm(hidden)
    got = decode.finish(attended, residual, o, normed, gate_up, down)
    x = o(attended.reshape(1, -1), residual)
    gate, up = gate_up(normed(x)).chunk(2, -1)
    torch.testing.assert_close(got, down(F.silu(gate) * up, x), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("head_dim", [2, 6, 64])
def test_rotate(head_dim: int) -> None:
    heads = randn(1, 7, 1, head_dim)
    rope = Rope(RopeConfig(), head_dim)(torch.tensor([[1234]]))
    expected = torch.cat((apply_rope(heads[:, :5], *rope), heads[:, 5:]), dim=1)
    decode.rotate(heads, rope, 5)
    torch.testing.assert_close(heads, expected)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(1, 1, 2), (6, 2, 6), (9, 3, 64), (8, 1, 128)])
@pytest.mark.parametrize("keys", [1, 2, 31, 300])
def test_attend(heads: int, kv_heads: int, head_dim: int, keys: int) -> None:
    q = randn(1, heads, 1, head_dim, std=3)
    k, v = (randn(1, kv_heads, keys + 9, head_dim)[:, :, 4 : keys + 4] for _ in range(2))
    assert decode.can_attend(q, k, v)
    expected = F.scaled_dot_product_attention(q, k, v, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(decode.attend(q, k, v, 0.3), expected, atol=1e-5, rtol=1e-5)


def test_attend_leaves_other_layouts_to_torch() -> None:
    q, k, v = randn(1, 4, 1, 8), randn(1, 2, 5, 8), randn(1, 2, 5, 8)
    assert decode.can_attend(q, k, v)
    assert not decode.can_attend(randn(2, 4, 1, 8), randn(2, 2, 5, 8), randn(2, 2, 5, 8))
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
]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("cache_class", [KVCache, GrowingCache])
def test_a_model_gives_the_same_logits(
    cache_class: Any, variant: dict[str, Any], tiny_model: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(**variant)
    ids = torch.randint(0, 64, (1, 12), generator=torch.Generator().manual_seed(0))

    def logits() -> torch.Tensor:
        cache = cache_class.from_model_config(model.config, 12, dtype="float32", device="cpu")
        model(ids[:, :4], kv_cache=cache)
        return torch.cat([model(ids[:, i : i + 1], kv_cache=cache) for i in range(4, 12)])

    calls = []
    finish = decode.finish
    monkeypatch.setattr(decode, "finish", lambda *args: calls.append(1) or finish(*args))
    compiled = logits()
    assert len(calls) == 8 * model.config.num_hidden_layers
    monkeypatch.setattr(decode, "kernels", lambda: None)
    torch.testing.assert_close(compiled, logits(), atol=1e-4, rtol=1e-4)
    assert len(calls) == 8 * model.config.num_hidden_layers


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


class TestIsPlain:
    """Where the modules themselves must run, or the kernels would misread memory, a block is not compiled."""

    @pytest.fixture
    def compiled(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        blocks: list[int] = []
        finish = decode.finish
        monkeypatch.setattr(decode, "finish", lambda *args: blocks.append(1) or finish(*args))
        return blocks

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

        def subclassed(model: Any) -> None:
            model.layers[0].mlp.__class__ = Doubled

        def replaced(model: Any) -> None:
            model.layers[0].self_attn.o_proj.__class__ = Scaled

        def patched(model: Any) -> None:
            model.layers[0].mlp.forward = lambda x, residual: residual

        def head(model: Any) -> None:
            model.lm_head.__class__ = Scaled

        for change in (subclassed, replaced, patched, head):
            model = tiny_model()
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
        model(torch.tensor([[3], [4]]))
        assert not compiled


def test_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFER_KERNELS", "0")
    assert decode.kernels.__wrapped__() is None
