"""Blocks through the compiled kernels, against plain torch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import FAMILIES
from mocks import LAYOUT_NAMES, LAYOUTS, STORED
from torch import nn
from torch.nn.utils import parametrize

from infer import GrowingCache, KVCache, SlidingCache, kernels
from infer.cache import BaseCache, BatchCache, Cache, NoCache
from infer.cache.debug import DebugCache
from infer.cache.int8 import encode
from infer.cache.traced import TracedCache
from infer.config import RopeConfig
from infer.models.common import MLP, Block, Decoder, UngatedMLP
from infer.ops import compiled, rowwise
from infer.nn.activation import ACTIVATIONS
from infer.nn.attention import ring_attention, ring_span
from infer.nn.linear import Linear
from infer.nn.norm import LayerNorm, Norm, RMSNorm, ZeroCentredRMSNorm
from infer.backend.parts import BlockParts
from infer.nn.rope import Rope, apply_rope
from infer.cache.table import Table

pytestmark = [
    pytest.mark.skipif(kernels.cpu() is None, reason="numba is not installed, or INFER_KERNELS=0"),
    pytest.mark.usefixtures("two_threads"),
]

SIZES = [(2, 1, 1), (5, 7, 3), (33, 65, 17), (64, 128, 96), (576, 960, 1536)]  # hidden, rows, intermediate


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a kernel does not write shows as NaN; gradients are off, as in generation."""
    monkeypatch.setattr(compiled, "_empty", lambda rows, columns: torch.full((rows, columns), torch.nan))
    with torch.inference_mode():
        yield


def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "cpu", lambda: None)


def randn(*shape: int, std: float = 1.0) -> torch.Tensor:
    return torch.randn(shape) * std


def linear(in_features: int, out_features: int, bias: bool = False) -> Linear:
    made = Linear(in_features, out_features, bias=bias).requires_grad_(False)
    for parameter in made.parameters():
        parameter.copy_(randn(*parameter.shape, std=in_features**-0.5))
    return made


def norm(size: int, kind: Callable[[int, float], Norm] = RMSNorm) -> Norm:
    made = kind(size, 1e-5).requires_grad_(False)
    for parameter in made.parameters():
        parameter.copy_(randn(size))
    return made


def count_calls(monkeypatch: pytest.MonkeyPatch, *names: str) -> dict[str, int]:
    """How often each of these parts is called from here on."""
    calls = dict.fromkeys(names, 0)

    def counted(name: str, part: Callable, *args: Any, **options: Any) -> Any:
        calls[name] += 1
        return part(*args, **options)

    for name in names:
        module = rowwise if name.startswith("attend") else compiled
        monkeypatch.setattr(module, name, partial(counted, name, getattr(module, name)))
    return calls


def head_plan(norm: Norm, linear: Linear) -> compiled.Plan:
    return compiled.Plan(compiled.head_record(norm, linear), linear.weight.shape[1])


def block_plan(hidden: int, **parts: Any) -> compiled.Plan:
    """Of a block with these parts; a plan does not keep modules alive, so whoever runs it must."""
    missing = {name: Linear(1, 1) for name in ("qkv", "o", "up", "down")} | {
        "before_attention": RMSNorm(hidden, 1e-5),
        "before_mlp": RMSNorm(hidden, 1e-5),
    }
    shape = {"heads": 1, "kv_heads": 1, "head_dim": 2, "scale": 1.0, "window": None, "activation": "silu"}
    return compiled.Plan(compiled.block_record(BlockParts(**(missing | shape | parts))), hidden)


NORMS = [RMSNorm, ZeroCentredRMSNorm, LayerNorm, partial(LayerNorm, bias=False)]
NORM_NAMES = ["RMSNorm", "ZeroCentredRMSNorm", "LayerNorm", "unbiased"]
any_norm = pytest.mark.parametrize("kind", NORMS, ids=NORM_NAMES)
any_rows = pytest.mark.parametrize("rows", [1, 3, 15, 16, 17])  # from 16 on, threads share them


@any_norm
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("hidden", "rows", "intermediate"), SIZES)
def test_head(hidden: int, rows: int, intermediate: int, bias: bool, batch: int, kind: Any) -> None:
    x, normed, product = randn(batch, hidden), norm(hidden, kind), linear(hidden, rows, bias)
    before = x.clone()
    got = compiled.head(head_plan(normed, product), x)
    torch.testing.assert_close(got, product(normed(x)), atol=1e-5, rtol=1e-5)
    assert torch.equal(x, before)


@any_norm
@pytest.mark.parametrize("spread", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("mean", [0.0, 30.0, -1000.0])
def test_norm_of_values_far_from_zero(kind: Any, mean: float, spread: float) -> None:
    """A mean that is large beside the spread must not swallow it."""
    x, normed = mean + randn(2, 64, std=spread), norm(64, kind)
    identity = linear(64, 64)
    identity.weight.copy_(torch.eye(64))
    expected = copy.deepcopy(normed).double()(x.double()).float()
    # Half a digit of the input's, seen through its spread.
    rounding = 1e-7 * max(1, (abs(mean) + spread) / max(spread, 3e-3)) * normed.weight.abs().max().item()
    got = compiled.head(head_plan(normed, identity), x)
    torch.testing.assert_close(got, expected, atol=1e-5 + 4 * rounding, rtol=1e-5)


@any_norm
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("after_attention", "after_mlp"), [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("hidden", "rows", "intermediate"), SIZES)
def test_behind_attention(
    hidden: int,
    rows: int,
    intermediate: int,
    bias: bool,
    after_attention: bool,
    after_mlp: bool,
    activation: str,
    kind: Any,
) -> None:
    attended, residual = randn(2, rows * 4), randn(2, hidden, std=10)
    before = attended.clone(), residual.clone()
    parts = {
        "o": linear(rows * 4, hidden, bias),
        "up": linear(hidden, 2 * intermediate, bias),
        "down": linear(intermediate, hidden, bias),
        "before_mlp": norm(hidden, kind),
        "after_attention": norm(hidden, kind) if after_attention else None,
        "after_mlp": norm(hidden, kind) if after_mlp else None,
    }
    got = compiled.behind_attention(block_plan(hidden, activation=activation, **parts), attended, residual)
    x = residual + (parts["after_attention"] or nn.Identity())(parts["o"](attended))
    gate, up = parts["up"](parts["before_mlp"](x)).chunk(2, -1)
    expected = x + (parts["after_mlp"] or nn.Identity())(parts["down"](ACTIVATIONS[activation](gate) * up))
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-5)
    assert torch.equal(attended, before[0])
    assert torch.equal(residual, before[1])


@any_norm
@any_rows
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("hidden", "intermediate"), [(5, 3), (33, 18), (64, 96)])
def test_behind_attention_without_a_gate(
    hidden: int, rows: int, intermediate: int, bias: bool, activation: str, kind: Any
) -> None:
    attended, residual = randn(rows, 28), randn(rows, hidden, std=10)
    before = attended.clone(), residual.clone()
    parts = {
        "o": linear(28, hidden, bias),
        "up": linear(hidden, intermediate, bias),
        "down": linear(intermediate, hidden, bias),
        "before_mlp": norm(hidden, kind),
    }
    got = compiled.behind_attention(block_plan(hidden, activation=activation, **parts), attended, residual)
    x = residual + parts["o"](attended)
    expected = x + parts["down"](ACTIVATIONS[activation](parts["up"](parts["before_mlp"](x))))
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-5)
    assert torch.equal(attended, before[0])
    assert torch.equal(residual, before[1])


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "ungated"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_far_ends_of_an_activation(activation: str, gated: bool) -> None:
    """Where the exponential overflows or vanishes; the last two are left over from vectors of four."""
    gates = torch.tensor([-1e4, -200.0, -90.0, -20.0, -5.0, -1e-6, 0.0, 1e-6, 5.0, 20.0, 90.0, 1e4, -89.0, 89.0])
    size = len(gates)
    parts = {"o": linear(4, 1), "up": linear(1, (1 + gated) * size, True), "down": linear(size, 1)}
    parts["before_mlp"] = norm(1)
    parts["o"].weight.zero_()
    parts["up"].weight.zero_()
    parts["up"].bias.copy_(torch.cat((gates, torch.ones(size))) if gated else gates)
    plan = block_plan(1, activation=activation, **parts)
    for i in range(size):
        parts["down"].weight.zero_()
        parts["down"].weight[0, i] = 1.0
        got = compiled.behind_attention(plan, randn(1, 4), torch.zeros(1, 1))
        torch.testing.assert_close(got[0], ACTIVATIONS[activation](gates[i : i + 1]), atol=1e-6, rtol=1e-5)


@any_rows
@pytest.mark.parametrize("kind", [None, *NORMS], ids=["no norm", *NORM_NAMES])
@pytest.mark.parametrize("turned", [True, False], ids=["rope", "no rope"])
@pytest.mark.parametrize("head_dim", [2, 6, 64])
def test_before_attention(head_dim: int, turned: bool, kind: Any, rows: int) -> None:
    """Heads of q and of k are normed, each with its own norm, and turned; those of v are not."""
    x, qkv, before = randn(rows, 9, std=3), linear(9, 7 * head_dim, True), norm(9)
    q_norm, k_norm = (None, None) if kind is None else (norm(head_dim, kind), norm(head_dim, kind))
    rope = Rope(RopeConfig(), head_dim)(torch.arange(rows)[:, None] * 100) if turned else None
    plan = block_plan(
        9, qkv=qkv, before_attention=before, q_norm=q_norm, k_norm=k_norm, heads=3, kv_heads=2, head_dim=head_dim
    )
    heads = qkv(before(x)).view(rows, 7, 1, head_dim)
    parts = heads[:, :3], heads[:, 3:5]
    if q_norm is not None:
        parts = q_norm(parts[0]), k_norm(parts[1])
    if rope is not None:
        parts = apply_rope(parts[0], *rope), apply_rope(parts[1], *rope)
    expected = torch.cat((*parts, heads[:, 5:]), dim=1).view(rows, -1)
    torch.testing.assert_close(compiled.before_attention(plan, x, rope), expected, atol=1e-4, rtol=1e-5)


HEADS = [(1, 1, 2), (2, 1, 10), (6, 2, 6), (9, 3, 64), (4, 4, 12), (3, 1, 9), (8, 1, 128)]  # heads, kv_heads, head_dim


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), HEADS)
@pytest.mark.parametrize("keys", [1, 2, 31, 300])
@pytest.mark.parametrize("batch", [1, 2, 5])
def test_attend(heads: int, kv_heads: int, head_dim: int, keys: int, batch: int) -> None:
    q = randn(batch, heads + 3, 1, head_dim, std=3)[:, :heads]  # as it is cut out of q, k and v together
    k, v = (randn(batch, kv_heads, keys + 9, head_dim)[:, :, 4 : keys + 4] for _ in range(2))
    assert rowwise.can_attend(q, k, v)
    expected = F.scaled_dot_product_attention(q, k, v, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(rowwise.attend(q, k, v, scale=0.3, window=None), expected, atol=1e-5, rtol=1e-5)


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
            got = rowwise.attend_ring(q, *poisoned, first, count, scale=0.3)
            expected = F.scaled_dot_product_attention(q, k[:, :, read], v[:, :, read], scale=0.3, enable_gqa=True)
            torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), HEADS)
def test_ring_attention_is_compiled(heads: int, kv_heads: int, head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    q = randn(1, heads, 1, head_dim, std=3)
    k, v = (randn(1, kv_heads, 11, head_dim) for _ in range(2))
    spans = [(0, 1), (0, 11), (3, 9), (7, 14), (10, 12), (21, 32), (22, 30)]
    calls = count_calls(monkeypatch, "attend_ring")
    attended = [ring_attention(q, k, v, first, end, scale=0.3) for first, end in spans]
    assert calls == {"attend_ring": len(spans)}
    without_kernels(monkeypatch)
    for (first, end), got in zip(spans, attended, strict=True):
        torch.testing.assert_close(got, ring_attention(q, k, v, first, end, scale=0.3), atol=1e-5, rtol=1e-5)
        keys, values = ring_span(k, first, end), ring_span(v, first, end)
        expected = F.scaled_dot_product_attention(q, keys, values, scale=0.3, enable_gqa=True)
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    assert calls == {"attend_ring": len(spans)}


def test_what_is_left_to_torch_to_attend() -> None:
    q, k, v = randn(2, 4, 3, 8), randn(2, 2, 5, 8), randn(2, 2, 5, 8)
    assert rowwise.can_attend(q, k, v)
    assert rowwise.can_attend(q, k, randn(2, 2, 8, 5).transpose(2, 3))  # copied
    assert not rowwise.can_attend(q.double(), k.double(), v.double())
    assert not rowwise.can_attend(q, k.bfloat16(), v.bfloat16())
    assert not rowwise.can_attend(q, k[:1], v[:1])
    assert not rowwise.can_attend(q, k, v[..., :4])
    assert not rowwise.can_attend(q, k[..., :4], v[..., :4])
    assert not rowwise.can_attend(randn(2, 3, 3, 8), k, v)
    assert not rowwise.can_attend(q, k[:, :, :2], v[:, :, :2])
    with torch.inference_mode(False), torch.enable_grad():
        assert not rowwise.can_attend(q, k, v)


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
    {"model_type": "gpt2", "hidden_size": 36, "num_attention_heads": 6, "num_key_value_heads": 6, "hidden_act": "gelu"},
    {"model_type": "gpt2", "tie_word_embeddings": False},
    {"model_type": "gpt2", "attention_bias": False, "mlp_bias": False, "norm_bias": False},
    {"model_type": "rope_gpt"},
    {"model_type": "rope_gpt", "attention_bias": True, "mlp_bias": True, "norm_bias": False, "hidden_act": "gelu_tanh"},
]


PARTS = ("step", "before_attention", "behind_attention", "attend", "head")


def tolerance(stored: str) -> dict[str, float]:
    """A key or value that differs in its last digit may be rounded to another byte."""
    return {"atol": 5e-2, "rtol": 5e-2} if stored == "int8" else {"atol": 1e-4, "rtol": 1e-4}


def random_ids(batch: int, length: int) -> torch.Tensor:
    return torch.randint(0, 64, (batch, length), generator=torch.Generator().manual_seed(0))


def decode_all(model: Decoder, ids: torch.Tensor, cache: Cache) -> torch.Tensor:
    """The logits after each of the tokens, fed one by one."""
    return torch.cat([model(ids[:, i : i + 1], kv_cache=cache) for i in range(ids.shape[1])], 1)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize(("cls", "options"), LAYOUTS, ids=LAYOUT_NAMES)
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("batch", [1, 4])
def test_a_model_gives_the_same_logits(
    cls: type[BaseCache],
    options: dict[str, Any],
    variant: dict[str, Any],
    stored: str,
    batch: int,
    tiny_model: Callable,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_model(**variant)
    ids = random_ids(batch, 16)
    steps, layers = 12, model.config.num_hidden_layers

    def logits() -> torch.Tensor:
        cache = cls.from_model_config(model.config, 16, batch_size=batch, dtype=stored, device="cpu", **options)
        model(ids[:, :4], kv_cache=cache)
        calls.update(dict.fromkeys(calls, 0))
        return decode_all(model, ids[:, 4:], cache)

    calls = count_calls(monkeypatch, *PARTS)
    got = logits()
    # Where a cache hands out a table, a step is a single call.
    expected = dict.fromkeys(PARTS, 0) | {"step": steps}
    if cls is GrowingCache:
        expected = dict.fromkeys(PARTS, steps * layers) | {"step": 0, "head": steps}
    assert calls == expected
    without_kernels(monkeypatch)
    torch.testing.assert_close(got, logits(), **tolerance(stored))
    assert not any(calls.values())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kinds", ["tables", "all"])
def test_rows_of_a_batch(family: str, kinds: str, tiny_model: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of any lengths and kinds in one call; one that hands out no table makes all rows attend by themselves."""
    model = tiny_model(model_type=family)
    layers = model.config.num_hidden_layers
    made = [(KVCache, "float32"), (KVCache, "int8"), (SlidingCache, "float32"), (SlidingCache, "int8")]
    if kinds == "all":
        made.append((GrowingCache, "float32"))
    ids = random_ids(len(made), 20)

    def logits() -> torch.Tensor:
        rows = [cls.from_model_config(model.config, 32, dtype=stored, device="cpu") for cls, stored in made]
        for i, row in enumerate(rows):
            model(ids[i : i + 1, : 2 + 3 * i], kv_cache=row)
        calls.update(dict.fromkeys(calls, 0))
        got = decode_all(model, ids[:, -4:], BatchCache(rows))
        assert [row.seq_len for row in rows] == [6 + 3 * i for i in range(len(rows))]
        return got

    calls = count_calls(monkeypatch, "step", "behind_attention")
    got = logits()
    steps, halves = (4, 0) if kinds == "tables" else (0, 4 * layers)
    assert calls == {"step": steps, "behind_attention": halves}
    without_kernels(monkeypatch)
    expected = logits()
    for i, (_, stored) in enumerate(made):
        torch.testing.assert_close(got[i], expected[i], **tolerance(stored))


def test_a_row_of_a_batch_is_what_it_is_alone(tiny_model: Callable) -> None:
    model = tiny_model()
    ids = random_ids(4, 9)
    new = partial(KVCache.from_model_config, model.config, 9, dtype="float32", device="cpu")
    together = decode_all(model, ids, new(batch_size=4))
    in_a_batch = decode_all(model, ids, BatchCache([new() for _ in range(4)]))
    alone = torch.cat([decode_all(model, row[None], new()) for row in ids])
    assert torch.equal(together, alone)
    assert torch.equal(in_a_batch, alone)


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("prompt", [3, 4, 5, 8, 30], ids=["W-1", "W", "W+1", "2W", "far"])
@pytest.mark.parametrize("chunk", [1, 3, 512])
def test_rings_go_round(
    chunk: int, prompt: int, stored: str, tiny_model: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through prompts that end before, at and past the window, and many times around: as without a ring."""
    model = tiny_model(model_type="gemma3", sliding_window=4)
    ids = random_ids(2, 60)
    new = {"batch_size": 2, "dtype": stored, "device": "cpu"}

    def logits(cache: BaseCache) -> torch.Tensor:
        model(ids[:, :prompt], kv_cache=cache)
        return decode_all(model, ids[:, prompt:], cache)

    got = logits(SlidingCache.from_model_config(model.config, 60, prefill_chunk=chunk, **new))
    whole = logits(KVCache.from_model_config(model.config, 60, **new))
    assert torch.equal(got, whole) if stored == "int8" else torch.allclose(got, whole, atol=1e-5)
    without_kernels(monkeypatch)
    torch.testing.assert_close(got, logits(KVCache.from_model_config(model.config, 60, **new)), **tolerance(stored))


class TestTables:
    """What caches let the kernels write to, and what they know of it afterwards."""

    def cache(self, model: Decoder, kind: type[BaseCache] = KVCache, **options: Any) -> Any:
        return kind.from_model_config(model.config, 40, **({"dtype": "float32", "device": "cpu"} | options))

    @pytest.mark.parametrize("stored", STORED)
    @pytest.mark.parametrize("kind", [KVCache, SlidingCache])
    def test_who_offers_one(self, tiny_model: Callable, kind: type[BaseCache], stored: str) -> None:
        model = tiny_model(model_type="gemma3")
        cache = self.cache(model, kind, dtype=stored)
        assert cache.table(model.config, torch.zeros(1)) is not None
        for other in (self.cache(model, GrowingCache), NoCache(), TracedCache(cache, [0]), DebugCache(cache)):
            assert other.table(model.config, torch.zeros(1)) is None
        for unlike in ({"num_hidden_layers": 2}, {"num_key_value_heads": 4}, {"head_dim": 8}):
            assert cache.table(tiny_model(model_type="gemma3", **unlike).config, torch.zeros(1)) is None
        assert self.cache(model, kind, dtype="float64").table(model.config, torch.zeros(1)) is None
        assert BatchCache([cache, self.cache(model, GrowingCache)]).table(model.config, torch.zeros(1)) is None

    @pytest.mark.parametrize("kind", [KVCache, SlidingCache])
    @pytest.mark.parametrize(
        ("changes", "options"),
        [
            ({"num_hidden_layers": 2}, {}),
            ({"num_key_value_heads": 4}, {}),
            ({"head_dim": 8}, {}),
            ({}, {"dtype": "float64"}),
            ({}, {"batch_size": 2}),
        ],
        ids=str,
    )
    def test_caches_that_do_not_fit(
        self,
        kind: type[BaseCache],
        changes: dict[str, Any],
        options: dict[str, Any],
        tiny_model: Callable,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Refused as they are in plain torch, and not written to."""
        model = tiny_model(model_type="gemma3")
        cache = self.cache(tiny_model(model_type="gemma3", **changes), kind, **options)
        said = []
        for _ in range(2):
            with pytest.raises((ValueError, IndexError)) as error:
                model(torch.tensor([[3]]), kv_cache=cache)
            said.append((error.type, str(error.value)))
            without_kernels(monkeypatch)
        assert said[0] == said[1]
        assert cache.seq_len == 0

    def test_a_narrower_window_than_the_models(self, tiny_model: Callable) -> None:
        model = tiny_model(model_type="gemma3", sliding_window=5)
        cache = self.cache(tiny_model(model_type="gemma3", sliding_window=4), SlidingCache)
        with pytest.raises(ValueError, match="sees 5 positions, but its cache keeps only 4"):
            model(torch.tensor([[3]]), kv_cache=cache)

    def test_a_wider_window_than_the_models(self, tiny_model: Callable) -> None:
        model = tiny_model(model_type="gemma3", sliding_window=3)
        wide = self.cache(tiny_model(model_type="gemma3", sliding_window=6), SlidingCache, prefill_chunk=1)
        ids = random_ids(1, 30)
        expected = decode_all(model, ids, self.cache(model))
        torch.testing.assert_close(decode_all(model, ids, wide), expected, atol=1e-5, rtol=1e-5)

    def test_a_full_cache(self, tiny_model: Callable) -> None:
        """Nothing is written behind its end."""
        model = tiny_model()
        room = torch.full((2, 2, 1, 2, 9, 8), torch.nan)
        cache = KVCache(*room[..., :8, :].clone().unbind())
        decode_all(model, random_ids(1, 8), cache)
        with pytest.raises(ValueError, match="overflow"):
            model(torch.tensor([[3]]), kv_cache=cache)
        assert cache.seq_len == 8
        assert not cache.k.isnan().any()

    @pytest.mark.parametrize("layout", ["positions first", "cut out", "one row's memory twice"])
    def test_memory_in_another_order(self, layout: str, tiny_model: Callable) -> None:
        """A cache may be made around any tensors; neighbours of what is cut out stay as they are."""
        model = tiny_model()
        layers, heads, size = 2, 2, 8
        if layout == "positions first":
            room = torch.zeros(2, layers, 1, 12, heads, size)
            k, v = room.transpose(3, 4)
        elif layout == "cut out":
            room = torch.full((2, layers, 1, heads, 20, size + 4), 7.0)
            k, v = room[:, :, :, :, 4:16, 2 : 2 + size]
        else:
            room = torch.zeros(2, layers, 1, 12, heads, size)
            k, v = room[0].transpose(2, 3), torch.zeros(layers, 1, heads, 12, size)
        ids = random_ids(1, 12)
        expected = decode_all(model, ids, self.cache(model))
        torch.testing.assert_close(decode_all(model, ids, KVCache(k, v)), expected, atol=1e-5, rtol=1e-5)
        if layout == "cut out":
            assert (room[:, :, :, :, :4] == 7).all()
            assert (room[..., :2] == 7).all()
            assert (room[..., -2:] == 7).all()

    @pytest.mark.parametrize("stored", STORED)
    @pytest.mark.parametrize("kind", [KVCache, SlidingCache])
    def test_a_copied_cache_goes_its_own_way(self, kind: type[BaseCache], stored: str, tiny_model: Callable) -> None:
        model = tiny_model(model_type="gemma3")
        ids = random_ids(1, 12)
        cache = self.cache(model, kind, dtype=stored)
        decode_all(model, ids, cache)
        fork = copy.deepcopy(cache)
        before = [layer.clone() for layer in cache.k]
        expected = self.cache(model, kind, dtype=stored)
        decode_all(model, ids, expected)
        other = random_ids(1, 20)[:, 12:]
        assert torch.equal(decode_all(model, other, fork), decode_all(model, other, expected))
        assert all(map(torch.equal, cache.k, before))

    def test_exchanged_memory(self, tiny_model: Callable) -> None:
        model = tiny_model()
        ids = random_ids(1, 12)
        cache, expected = self.cache(model), self.cache(model)
        decode_all(model, ids[:, :6], cache)
        former = cache.k
        kept = former.clone()
        cache.k, cache.v = cache.k.clone(), cache.v.clone()
        decode_all(model, ids[:, :6], expected)
        assert torch.equal(decode_all(model, ids[:, 6:], cache), decode_all(model, ids[:, 6:], expected))
        assert torch.equal(former, kept)

    @pytest.mark.parametrize("stored", STORED)
    @pytest.mark.parametrize("kind", [KVCache, SlidingCache])
    def test_truncate_and_reset(self, kind: type[BaseCache], stored: str, tiny_model: Callable) -> None:
        model = tiny_model(model_type="gemma3")
        ids = random_ids(2, 24)
        new = {"batch_size": 2, "dtype": stored}
        cache, straight = self.cache(model, kind, **new), self.cache(model, kind, **new)
        decode_all(model, ids[:, :12], cache)
        cache.truncate(7)
        decode_all(model, ids[:, :7], straight)
        assert torch.equal(decode_all(model, ids[:, 12:], cache), decode_all(model, ids[:, 12:], straight))
        cache.reset()
        straight = self.cache(model, kind, **new)
        assert torch.equal(decode_all(model, ids, cache), decode_all(model, ids, straight))

    def test_what_a_ring_has_lost(self, tiny_model: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
        """Single tokens overwrite slots one by one; `truncate` refuses, and allows, as it does without kernels."""
        model = tiny_model(model_type="gemma3", sliding_window=4)
        ids = random_ids(1, 30)

        def refused() -> list[list[int]]:
            found = []
            for end in range(1, 30):
                cache = self.cache(model, SlidingCache, prefill_chunk=3)
                decode_all(model, ids[:, :end], cache)
                found.append([])
                for target in range(end, -1, -1):
                    try:
                        copy.deepcopy(cache).truncate(target)
                    except ValueError as error:
                        assert "have been overwritten" in str(error)  # noqa: PT017
                        found[-1].append(target)
            return found

        got = refused()
        assert any(got)
        assert got[5] == []
        without_kernels(monkeypatch)
        assert got == refused()

    def test_after_a_truncated_ring(self, tiny_model: Callable) -> None:
        model = tiny_model(model_type="gemma3", sliding_window=4)
        ids = random_ids(1, 40)
        cache, straight = (self.cache(model, SlidingCache, prefill_chunk=3) for _ in range(2))
        decode_all(model, ids[:, :20], cache)
        cache.truncate(18)
        with pytest.raises(ValueError, match="have been overwritten"):
            cache.truncate(15)
        decode_all(model, ids[:, :18], straight)
        torch.testing.assert_close(
            decode_all(model, ids[:, 20:], cache), decode_all(model, ids[:, 20:], straight), atol=1e-5, rtol=1e-5
        )

    @pytest.mark.parametrize("stored", STORED)
    @pytest.mark.parametrize("kind", [KVCache, SlidingCache])
    def test_an_interrupted_pass(
        self, kind: type[BaseCache], stored: str, tiny_model: Callable, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It counts as not been: the next one writes over what it left."""
        model = tiny_model(model_type="gemma3")
        ids = random_ids(1, 20)
        cache, straight = self.cache(model, kind, dtype=stored), self.cache(model, kind, dtype=stored)
        decode_all(model, ids[:, :10], cache)
        step = compiled.step

        def interrupted(*args: Any) -> torch.Tensor:
            step(*args)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(compiled, "step", interrupted)
            with pytest.raises(KeyboardInterrupt):
                model(torch.tensor([[63]]), kv_cache=cache)
        assert cache.seq_len == 10
        decode_all(model, ids[:, :10], straight)
        assert torch.equal(decode_all(model, ids[:, 10:], cache), decode_all(model, ids[:, 10:], straight))

    @pytest.mark.parametrize("kind", [KVCache, SlidingCache])
    def test_one_block_that_is_not_compiled(
        self, kind: type[BaseCache], tiny_model: Callable, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """All attend by themselves, in the cache that kernels have written to, and go on as one when it is again."""
        model = tiny_model(model_type="gemma3")
        ids = random_ids(1, 30)
        calls = count_calls(monkeypatch, "step", "behind_attention")

        def logits() -> torch.Tensor:
            cache = self.cache(model, kind)
            first = decode_all(model, ids[:, :10], cache)
            hook = model.layers[1].mlp.register_forward_hook(lambda *args: None)
            second = decode_all(model, ids[:, 10:20], cache)
            hook.remove()
            return torch.cat((first, second, decode_all(model, ids[:, 20:], cache)), 1)

        got = logits()
        assert calls == {"step": 20, "behind_attention": 10 * 2}
        without_kernels(monkeypatch)
        torch.testing.assert_close(got, logits(), atol=1e-4, rtol=1e-4)

    @pytest.mark.parametrize("head_dim", [512, 514, 1030])
    def test_vectors_of_several_scales(
        self, head_dim: int, tiny_model: Callable, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Wide heads have a scale for each group of an 8-bit cache: the kernels know that, or leave them alone."""
        model = tiny_model(head_dim=head_dim)
        ids = random_ids(1, 12)
        got = decode_all(model, ids, self.cache(model, dtype="int8"))
        without_kernels(monkeypatch)
        torch.testing.assert_close(got, decode_all(model, ids, self.cache(model, dtype="int8")), **tolerance("int8"))


def stored_by_kernel(vectors: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """vectors [2, H, D], keys and values, as a kernel puts them into a cache: [H, width] each.

    A hidden state of one 1 lets the weights through as they are.
    """
    _, heads, size = vectors.shape
    qkv, before = linear(1, 3 * heads * size), RMSNorm(1, 0.0)
    qkv.weight.copy_(torch.cat((torch.ones(heads * size), vectors.flatten()))[:, None])
    parts = {"o": linear(heads * size, 1), "up": linear(1, 2), "down": linear(1, 1)}
    block = block_plan(1, qkv=qkv, before_attention=before, heads=heads, kv_heads=heads, head_dim=size, **parts)
    plan = compiled.Plan((block.record, compiled.head_record(None, parts["down"])), 1)
    cache = KVCache.allocate(1, heads, size, 3, dtype=dtype, device="cpu")
    table = Table(cache.k.unbind(), cache.v.unbind())
    compiled.step(plan, torch.ones(1, 1), np.zeros((1, 2), np.int64), table.at(1))
    assert not cache.k[..., [0, 2], :].any()
    assert not cache.v[..., [0, 2], :].any()
    return cache.k[0, 0, :, 1], cache.v[0, 0, :, 1]


def awkward_vectors(size: int) -> torch.Tensor:
    """[2, 80, D]: of all magnitudes, and every kind of number among others."""
    generator = torch.Generator().manual_seed(size)
    x = torch.randn(2, 80, size, generator=generator) * torch.logspace(-46, 38.5, 80)[:, None]
    special = [torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1e-45, 1e-38, 65504.0 * 127, 3e38, 2.0**-24]
    for i, value in enumerate(special):
        x[:, 8 * i, i % size] = value
        x[:, 8 * i + 1] = value
    x[:, 3] = torch.linspace(-127, 127, size)  # whole steps
    x[:, 4] = torch.linspace(-127, 127, size).round() + 0.5  # half ones
    return x


@pytest.mark.parametrize("size", [2, 6, 12, 64, 80, 256])
def test_bytes_of_an_8_bit_cache(size: int) -> None:
    """The kernel writes what `encode` does, bit for bit."""
    vectors = awkward_vectors(size)
    for got, expected in zip(stored_by_kernel(vectors, torch.int8), encode(vectors), strict=True):
        wrong = (got != expected).any(-1).nonzero().flatten().tolist()
        assert wrong == [], [(vectors[:, i], got[i], expected[i]) for i in wrong[:1]]


def test_floats_of_a_cache() -> None:
    vectors = awkward_vectors(6)
    for got, expected in zip(stored_by_kernel(vectors, torch.float32), vectors, strict=True):
        assert torch.equal(got.view(torch.int32) & 0x7FFFFFFF, expected.view(torch.int32) & 0x7FFFFFFF)


class TestExponential:
    """The kernels' own, four at a time."""

    def run(self, x: np.ndarray) -> np.ndarray:
        from infer.backend.cpu.attention import exponentials

        out = x.astype(np.float32)
        exponentials(out, np.float32(0))
        return out

    def test_accuracy(self) -> None:
        x = np.linspace(-87, 88, 1_000_003, dtype=np.float32)
        exact = np.exp(x.astype(np.float64))
        off = np.abs(self.run(x) - exact) / np.spacing(exact.astype(np.float32))
        assert off.max() < 2

    def test_the_ends(self) -> None:
        x = np.array([-np.inf, -3e38, -1000, -87.5, np.nan, 88.5, 1000, 3e38, np.inf, 0, -0.0], np.float32)
        got = self.run(x)
        assert (got[:4] < 2e-38).all()
        assert np.isnan(got[4])
        assert (got[5:9] > 1.6e38).all()
        assert (got[9:] == 1).all()


def plain_logits(model: Decoder, ids: torch.Tensor | None = None) -> torch.Tensor:
    """Of one token, by the modules alone."""
    with pytest.MonkeyPatch.context() as patch:
        without_kernels(patch)
        return model(torch.tensor([[3]]) if ids is None else ids)


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
    def blocks(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """How many blocks each call of a kernel stands for."""
        found: list[int] = []
        half, step = compiled.behind_attention, compiled.step
        monkeypatch.setattr(compiled, "behind_attention", lambda *args: found.append(1) or half(*args))
        monkeypatch.setattr(
            compiled, "step", lambda plan, *args: found.append(len(plan.record[0])) or step(plan, *args)
        )
        return found

    @pytest.fixture(autouse=True, params=["uncached", "cached"])
    def with_or_without(self, request: pytest.FixtureRequest) -> None:
        self.cached = request.param == "cached"

    def run(self, model: Any) -> torch.Tensor:
        cache = KVCache.from_model_config(model.config, 4, dtype=model.dtype, device="cpu") if self.cached else None
        return model(torch.tensor([[3]]), kv_cache=cache)

    def test_a_plain_model(self, tiny_model: Callable, blocks: list[int]) -> None:
        self.run(tiny_model())
        assert sum(blocks) == 2

    @pytest.mark.parametrize("kind", ["register_forward_hook", "register_forward_pre_hook"])
    @pytest.mark.parametrize("name", INSIDE)
    def test_hooks_fire(self, tiny_model: Callable, blocks: list[int], name: str, kind: str) -> None:
        model = tiny_model()
        plain = self.run(model)
        seen = []
        getattr(model.get_submodule(name), kind)(lambda *args: seen.append(1))
        blocks.clear()
        torch.testing.assert_close(self.run(model), plain, atol=1e-4, rtol=1e-4)
        assert seen == [1]
        assert sum(blocks) == (2 if name.count(".") == 1 else 1)  # a block's own hooks fire either way

    @pytest.mark.parametrize(
        ("family", "name"),
        [*(("gemma3", name) for name in INSIDE_GEMMA), *(("gpt2", name) for name in INSIDE_GPT2)],
    )
    def test_hooks_of_other_families_fire(
        self, tiny_model: Callable, blocks: list[int], family: str, name: str
    ) -> None:
        model = tiny_model(model_type=family)
        plain = self.run(model)
        seen = []
        model.get_submodule(name).register_forward_hook(lambda *args: seen.append(1))
        blocks.clear()
        torch.testing.assert_close(self.run(model), plain, atol=1e-4, rtol=1e-4)
        assert seen == [1]
        assert sum(blocks) == model.config.num_hidden_layers - 1

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
        expected = plain_logits(model)
        torch.testing.assert_close(self.run(model), expected, atol=1e-4, rtol=1e-4)

    @pytest.mark.parametrize("names", [("q_norm", "k_norm"), ("post_attention", "pre_feedforward", "post_feedforward")])
    def test_layer_norms_in_unusual_places(self, tiny_model: Callable, blocks: list[int], names: tuple) -> None:
        """Of heads, or behind a product: no model has them, but they are norms like others."""
        model = tiny_model(model_type="gemma3")
        layer = model.layers[0]
        for name in names:
            module, name = (layer.self_attn, name) if name.endswith("norm") else (layer, f"{name}_layernorm")
            setattr(module, name, norm(len(getattr(module, name).weight), LayerNorm))
        torch.testing.assert_close(self.run(model), plain_logits(model), atol=1e-4, rtol=1e-4)
        assert sum(blocks) == 3

    def test_layer_norms_each_with_its_eps(self, tiny_model: Callable, blocks: list[int]) -> None:
        model = tiny_model(model_type="gpt2")
        for i, name in enumerate(("layers.0.input_layernorm", "layers.0.post_attention_layernorm", "norm")):
            model.get_submodule(name).eps = 1.0 + i
        torch.testing.assert_close(self.run(model), plain_logits(model), atol=1e-4, rtol=1e-4)
        assert sum(blocks) == 2

    @pytest.mark.parametrize("name", ["embed_tokens", "norm", "lm_head", "layers.1"])
    def test_hooks_around_the_blocks_fire(self, tiny_model: Callable, name: str) -> None:
        model, seen = tiny_model(), []
        self.run(model)
        model.get_submodule(name).register_forward_hook(lambda *args: seen.append(1))
        self.run(model)
        assert seen == [1]

    def test_changed_modules_run(self, tiny_model: Callable, blocks: list[int]) -> None:
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
            blocks.clear()
            torch.testing.assert_close(self.run(model), plain_logits(model), atol=1e-4, rtol=1e-4)
            assert sum(blocks) == (2 if change is head else 1)

    def test_a_hook_that_changes_the_layout(self, tiny_model: Callable) -> None:
        model = tiny_model()
        model.layers[0].register_forward_hook(lambda module, args, out: torch.stack((out, out), -1)[..., 0])
        plain = tiny_model()
        torch.testing.assert_close(self.run(model), self.run(plain))

    def test_weights_in_another_order(self, tiny_model: Callable, blocks: list[int]) -> None:
        model = tiny_model()
        plain = self.run(model)
        down = model.layers[0].mlp.down_proj
        down.weight = torch.nn.Parameter(down.weight.t().contiguous().t(), requires_grad=False)
        blocks.clear()
        torch.testing.assert_close(self.run(model), plain, atol=1e-4, rtol=1e-4)
        assert sum(blocks) == 1

    @pytest.mark.parametrize(
        ("name", "shape"),
        [
            ("layers.0.self_attn.qkv_proj", (62, 32)),
            ("layers.0.self_attn.o_proj", (32, 30)),
            ("layers.1.self_attn.o_proj", (30, 32)),
            ("layers.0.mlp.gate_up_proj", (94, 32)),
            ("layers.1.mlp.down_proj", (32, 40)),
            ("lm_head", (64, 24)),
        ],
    )
    def test_weights_that_do_not_fit_each_other(self, tiny_model: Callable, name: str, shape: tuple[int, int]) -> None:
        """Refused by torch, as ever: a kernel would read and write beside what is there."""
        model = tiny_model()
        self.run(model)
        model.get_submodule(name).weight = nn.Parameter(randn(*shape), requires_grad=False)
        with pytest.raises(RuntimeError):
            self.run(model)

    def test_training(self, tiny_model: Callable, blocks: list[int]) -> None:
        with torch.inference_mode(False), torch.enable_grad():
            self.run(tiny_model())
        assert sum(blocks) == 0

    def test_other_dtypes(self, tiny_model: Callable, blocks: list[int]) -> None:
        self.run(tiny_model().double())
        assert sum(blocks) == 0

    def test_several_tokens(self, tiny_model: Callable, blocks: list[int]) -> None:
        model = tiny_model()
        for tokens in ([[3, 4, 5], [6, 7, 8]], [[3, 5, 8] * 40], [[3]] * 40):
            blocks.clear()
            ids = torch.tensor(tokens)
            torch.testing.assert_close(model(ids), plain_logits(model, ids), atol=1e-4, rtol=1e-4)
            assert sum(blocks) == 2


def test_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFER_KERNELS", "0")
    assert kernels._cpu.__wrapped__() is None


class TestRemembered:
    """What is known of a model must not outlast a change that no module hears of."""

    @pytest.fixture(autouse=True, params=["uncached", "cached"])
    def with_or_without(self, request: pytest.FixtureRequest) -> None:
        self.cached = request.param == "cached"

    def logits(self, model: Any) -> torch.Tensor:
        cache = KVCache.from_model_config(model.config, 4, dtype=model.dtype, device="cpu") if self.cached else None
        return model(torch.tensor([[3]]), kv_cache=cache)

    def test_weights_in_another_order(self, tiny_model: Callable) -> None:
        model = tiny_model()
        self.logits(model)
        weight = model.layers[0].mlp.down_proj.weight
        weight.data = weight.data.t().contiguous().t()
        torch.testing.assert_close(self.logits(model), plain_logits(model), atol=1e-4, rtol=1e-4)

    @pytest.mark.parametrize(("family", "kind"), [("llama", MLP), ("gpt2", UngatedMLP), ("gpt2", LayerNorm)])
    def test_a_class_that_is_patched(
        self, tiny_model: Callable, monkeypatch: pytest.MonkeyPatch, family: str, kind: type
    ) -> None:
        model = tiny_model(model_type=family)
        before = self.logits(model)
        monkeypatch.setattr(kind, "forward", lambda self, x, residual=0: residual + x)
        assert not torch.allclose(self.logits(model), before, atol=1e-2)
        torch.testing.assert_close(self.logits(model), plain_logits(model), atol=1e-4, rtol=1e-4)

    def test_a_module_that_is_added_in_place_of_another(self, tiny_model: Callable) -> None:
        class Silent(nn.Module):
            def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
                return residual

        model = tiny_model()
        before = self.logits(model)
        model.layers[0].add_module("mlp", Silent())
        assert not torch.allclose(self.logits(model), before, atol=1e-2)
        torch.testing.assert_close(self.logits(model), plain_logits(model), atol=1e-4, rtol=1e-4)

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
        torch.testing.assert_close(self.logits(model), plain_logits(model), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", [KVCache, SlidingCache])
@pytest.mark.parametrize("how", ["subclass", "instance"])
def test_a_cache_with_ways_of_its_own_is_asked(kind: type[BaseCache], how: str, tiny_model: Callable) -> None:
    """Where `attend` was replaced, no kernel attends in its place."""
    calls = []

    class Counting(kind):  # type: ignore[misc, valid-type]
        def attend(self, layer_idx: int, *args: Any, **options: Any) -> torch.Tensor:
            calls.append(layer_idx)
            return super().attend(layer_idx, *args, **options)

    model = tiny_model()
    cache = (Counting if how == "subclass" else kind).from_model_config(model.config, 8, dtype="float32", device="cpu")
    if how == "instance":
        attend = cache.attend
        cache.attend = lambda layer_idx, *args, **options: (
            calls.append(layer_idx) or attend(layer_idx, *args, **options)
        )
    model(torch.tensor([[3, 4]]), kv_cache=cache)
    model(torch.tensor([[5]]), kv_cache=cache)
    assert calls == [0, 1] * 2


def decoded(model: Any) -> torch.Tensor:
    cache = KVCache.from_model_config(model.config, 8, dtype="float32", device="cpu")
    model(torch.tensor([[3, 4]]), kv_cache=cache)
    return model(torch.tensor([[5]]), kv_cache=cache)


CHANGES: dict[str, Callable[[Any], None]] = {
    "layers swapped": lambda m: m.layers.insert(0, m.layers.pop(1)),
    "a layer put in place of another": lambda m: m.layers.__setitem__(1, m.layers[0]),
    "a window": lambda m: setattr(m.layers[1].self_attn, "window", 1),
    "a bias that broadcasts": lambda m: setattr(
        m.layers[0].self_attn.o_proj, "bias", nn.Parameter(torch.tensor([0.7]))
    ),
    "a parametrised weight": lambda m: parametrize.register_parametrization(
        m.layers[0].mlp.down_proj, "weight", Doubled()
    ),
    "a head of its own": lambda m: setattr(m, "head", lambda x, step: 2 * type(m).head(m, x, step)),
}


class Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("warm", [False, True])
def test_what_was_changed_counts(
    change: str, warm: bool, tiny_model: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is done to a model, before or after its first step, a step gives what plain torch gives."""
    model = tiny_model()
    if warm:
        decoded(model)
    CHANGES[change](model)
    got = decoded(model)
    without_kernels(monkeypatch)
    torch.testing.assert_close(got, decoded(model), atol=1e-4, rtol=1e-4)


def test_more_layers_than_the_cache_has(tiny_model: Callable) -> None:
    model = tiny_model()
    decoded(model)
    model.layers.append(model.layers[0])
    assert decoded(model).isfinite().all()
    del model.layers[2], model.layers[1]
    assert decoded(model).isfinite().all()


# Around every switch: one row after the other, tiles, panels of each size, packed weights, more parts.
ROW_COUNTS = [1, 2, 3, 4, 5, 7, 8, 9, 11, 12, 13, 16, 17, 31, 32, 33, 64, 127, 128, 129, 255, 256, 257, 512]


def multiplied(weight: torch.Tensor, bias: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    """x [T, columns] -> [T, rows], by the kernel of products."""
    head, out = np.zeros(1, kernels.cpu().HEAD), torch.full((len(x), len(weight)), torch.nan)
    kind = {torch.float32: 32, torch.bfloat16: 16, torch.float16: 116}[weight.dtype]
    head["weight"] = kind, weight.data_ptr(), 0 if bias is None else bias.data_ptr(), *weight.shape
    kernels.cpu().head(head, x.contiguous().numpy(), out.numpy())
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("rows", "columns", "biased"),
    [(1, 1, True), (5, 7, False), (7, 8, False), (33, 65, True), (130, 577, True), (48, 576, False), (9, 8203, False)],
)
def test_rows_beside_it_do_not_change_a_row(rows: int, columns: int, biased: bool, dtype: torch.dtype) -> None:
    """A row of x gives the same bits alone as among any number of others, and wherever it stands."""
    weight, bias = randn(rows, columns).to(dtype), randn(rows) if biased else None
    x = randn(max(ROW_COUNTS), columns)
    alone = torch.cat([multiplied(weight, bias, row) for row in x.split(1)])
    expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    torch.testing.assert_close(alone.double(), expected, atol=1e-5 * columns**0.5, rtol=1e-5)
    for count in ROW_COUNTS:
        assert torch.equal(multiplied(weight, bias, x[:count]), alone[:count]), count
        assert torch.equal(multiplied(weight, bias, x[-count:]), alone[-count:]), count


def attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int, seen: np.ndarray) -> torch.Tensor:
    """q [Q, Hq D] over k, v [1, Hkv, S, D] -> [Q, Hq D], by the kernel of attention."""
    size = k.shape[3]
    block, out = np.zeros(1, kernels.cpu().BLOCK), torch.full(q.shape, torch.nan)
    block["heads"], block["kv_heads"], block["head_dim"], block["scale"] = heads, k.shape[1], size, size**-0.5
    kernels.cpu().attend(block, q.contiguous().numpy(), Table([k], [v]).at(0), seen, out.numpy())
    return out


@pytest.mark.parametrize("size", [4, 8, 20, 64, 80])
@pytest.mark.parametrize("window", [None, 1, 3, 50])
def test_queries_beside_it_do_not_change_a_query(size: int, window: int | None) -> None:
    """A query gives the same bits alone as among any number of others, whether they see the same keys or not."""
    heads, kv_heads, keys = 4, 2, max(ROW_COUNTS)
    k, v = randn(1, kv_heads, keys, size), randn(1, kv_heads, keys, size)
    q = randn(keys, heads * size)
    k[:, :, -1], v[:, :, -1] = torch.nan, torch.inf  # no query but the last may see it
    ends = np.arange(keys) + 1
    counts = ends if window is None else np.minimum(ends, window)
    seen = np.stack((ends - counts, counts), 1)
    alone = torch.cat([attended(q[t : t + 1], k, v, heads, seen[t : t + 1].copy()) for t in range(keys)])
    assert alone[:-1].isfinite().all()
    for count in ROW_COUNTS:
        assert torch.equal(attended(q[:count], k, v, heads, seen[:count].copy())[:511], alone[:count][:511]), count
        last = slice(keys - 1 - count, keys - 1) if count < keys else slice(0, keys - 1)
        assert torch.equal(attended(q[last], k, v, heads, seen[last].copy()), alone[last]), count
    at = keys // 2
    past = slice(seen[at, 0], at + 1)
    own = q[at].view(1, heads, 1, size), k[:, :, past], v[:, :, past]
    expected = F.scaled_dot_product_attention(*own, enable_gqa=True).view(-1)
    torch.testing.assert_close(alone[at], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("count", [2, 4, 7, 12])
def test_queries_of_a_ring_beside_each_other(count: int) -> None:
    """Some go around its end, some do not: each as alone."""
    heads, size, slots = 3, 64, 16
    k, v, q = randn(1, 1, slots, size), randn(1, 1, slots, size), randn(count, heads * size)
    seen = np.array([((10 + t) % slots, 6 + t % 3) for t in range(count)])
    alone = [attended(q[t : t + 1], k, v, heads, seen[t : t + 1].copy()) for t in range(count)]
    assert torch.equal(attended(q, k, v, heads, seen), torch.cat(alone))
