"""Passes through the CPU's kernels: what plain torch computes, and for each row the bits that it has alone."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from amount import amount, once, pairs
from mocks import LAYOUT_NAMES, LAYOUTS, STORED
from tiny import FAMILIES
from torch import nn

from infer import GrowingCache, KVCache, SlidingCache
from infer.backend import Row, backend_for
from infer.backend.cpu import backend as backend_module
from infer.backend.cpu import kernels, ops
from infer.backend.cpu.ops import CpuAttention, block_record, head_record, weight_record
from infer.backend.parts import BlockParts
from infer.cache import BaseCache, Cache, NoCache, PagedCache
from infer.cache.debug import DebugCache
from infer.cache.int8 import encode
from infer.cache.table import Table
from infer.cache.traced import TracedCache
from infer.config import RopeConfig
from infer.engine.model import all_logits, step
from infer.models.common import Decoder
from infer.models.rows import ALL, LAST, NONE
from infer.nn.activation import ACTIVATIONS
from infer.nn.activation import gated as gated_by
from infer.nn.linear import Linear
from infer.nn.norm import LayerNorm, Norm, RMSNorm, ZeroCenteredRMSNorm
from infer.nn.rope import Rope, apply_rope

pytestmark = [
    pytest.mark.skipif(kernels() is None, reason="numba is not installed, or INFER_KERNELS=0"),
    pytest.mark.usefixtures("two_threads"),
]

SIZES = [(2, 1, 1), (5, 7, 3), (33, 65, 17), (64, 128, 96), (576, 960, 1536)]  # hidden, rows, intermediate


def poisoned(rows: int, columns: int) -> torch.Tensor:
    return torch.full((rows, columns), torch.nan, dtype=torch.float32)


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a kernel does not write shows as NaN; gradients are off, as in generation."""
    for module in (backend_module, ops):
        monkeypatch.setattr(module, "empty", poisoned)
    with torch.inference_mode():
        yield


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
    """How often each of these kernels is called from here on."""
    calls = dict.fromkeys(names, 0)

    class Counted:
        def __init__(self, name: str) -> None:
            self.name, self.kernel = name, getattr(kernels(), name)

        def __call__(self, *args: Any) -> None:
            calls[self.name] += 1
            self.kernel(*args)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.kernel, name)

    for name in names:
        monkeypatch.setattr(kernels(), name, Counted(name))
    return calls


def made_block(hidden: int, **parts: Any) -> Any:
    """The record of a block with these parts; it does not keep modules alive, so whoever runs it must."""
    missing = {name: Linear(1, 1) for name in ("qkv", "o", "up", "down")} | {
        "before_attention": RMSNorm(hidden, 1e-5),
        "before_mlp": RMSNorm(hidden, 1e-5),
    }
    shape = {"heads": 1, "kv_heads": 1, "head_dim": 2, "scale": 1.0, "window": None, "activation": "silu"}
    return block_record(BlockParts(**(missing | shape | parts)))


def run_head(normed: Norm, product: Linear, x: torch.Tensor) -> torch.Tensor:
    out = poisoned(len(x), len(product.weight))
    kernels().head(head_record(normed, product), x.numpy(), out.numpy())
    return out


def run_after_attention(block: Any, attended: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    out = poisoned(*residual.shape)
    kernels().after_attention(block, attended, residual, len(residual), out)
    return out


NORMS = [RMSNorm, ZeroCenteredRMSNorm, LayerNorm, partial(LayerNorm, bias=False)]
NORM_NAMES = ["RMSNorm", "ZeroCenteredRMSNorm", "LayerNorm", "unbiased"]
any_norm = pytest.mark.parametrize("kind", NORMS, ids=NORM_NAMES)
ROWS = [1, 3, 15, 16, 17]  # from 16 on, threads share them


@pairs({"hidden, rows, intermediate": SIZES}, bias=[False, True], batch=[1, 3], kind=NORMS)
def test_head(hidden: int, rows: int, intermediate: int, bias: bool, batch: int, kind: Any) -> None:
    x, normed, product = randn(batch, hidden), norm(hidden, kind), linear(hidden, rows, bias)
    before = x.clone()
    got = run_head(normed, product, x)
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
    got = run_head(normed, identity, x)
    torch.testing.assert_close(got, expected, atol=1e-5 + 4 * rounding, rtol=1e-5)


AFTER = [(False, False), (True, False), (False, True), (True, True)]
# Every two of the choices meet in some case.
BEHIND = amount(
    list(itertools.product(SIZES, NORMS, ACTIVATIONS, AFTER, [False, True])),
    [
        (size, kind, list(ACTIVATIONS)[(i + 2 * j) % 3], AFTER[(i + j) % 4], bool((i + j // 2) % 2))
        for i, size in enumerate(SIZES)
        for j, kind in enumerate(NORMS)
    ],
)


@pytest.mark.parametrize(("sizes", "kind", "activation", "after", "bias"), BEHIND)
def test_after_attention(
    sizes: tuple[int, int, int], kind: Any, activation: str, after: tuple[bool, bool], bias: bool
) -> None:
    hidden, rows, intermediate = sizes
    attended, residual = randn(2, rows * 4), randn(2, hidden, std=10)
    before = attended.clone(), residual.clone()
    parts = {
        "o": linear(rows * 4, hidden, bias),
        "up": linear(hidden, 2 * intermediate, bias),
        "down": linear(intermediate, hidden, bias),
        "before_mlp": norm(hidden, kind),
        "after_attention": norm(hidden, kind) if after[0] else None,
        "after_mlp": norm(hidden, kind) if after[1] else None,
    }
    got = run_after_attention(made_block(hidden, activation=activation, **parts), attended, residual)
    x = residual + (parts["after_attention"] or nn.Identity())(parts["o"](attended))
    inner = gated_by(parts["up"](parts["before_mlp"](x)), activation)
    expected = x + (parts["after_mlp"] or nn.Identity())(parts["down"](inner))
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-5)
    assert torch.equal(attended, before[0])
    assert torch.equal(residual, before[1])


@pairs(
    {"hidden, intermediate, bias": [(5, 3, True), (33, 18, False), (64, 96, True)]},
    activation=ACTIVATIONS,
    kind=NORMS,
    rows=ROWS,
)
def test_after_attention_without_a_gate(
    hidden: int, intermediate: int, bias: bool, rows: int, activation: str, kind: Any
) -> None:
    attended, residual = randn(rows, 28), randn(rows, hidden, std=10)
    before = attended.clone(), residual.clone()
    parts = {
        "o": linear(28, hidden, bias),
        "up": linear(hidden, intermediate, bias),
        "down": linear(intermediate, hidden, bias),
        "before_mlp": norm(hidden, kind),
    }
    got = run_after_attention(made_block(hidden, activation=activation, **parts), attended, residual)
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
    block = made_block(1, activation=activation, **parts)
    for i in range(size):
        parts["down"].weight.zero_()
        parts["down"].weight[0, i] = 1.0
        got = run_after_attention(block, randn(1, 4), torch.zeros(1, 1))
        gate = gates[i : i + 1]
        expected = gated_by(torch.cat((gate, torch.ones(1))), activation) if gated else ACTIVATIONS[activation](gate)
        torch.testing.assert_close(got[0], expected, atol=1e-6, rtol=1e-5)


@pairs(head_dim=[2, 6, 64], turned=[True, False], kind=[None, *NORMS], rows=ROWS)
def test_qkv_proj_and_rotate(head_dim: int, turned: bool, kind: Any, rows: int) -> None:
    """Heads of q and of k are normed, each with its own norm, and turned; those of v are not."""
    x, qkv, before = randn(rows, 9, std=3), linear(9, 7 * head_dim, True), norm(9)
    q_norm, k_norm = (None, None) if kind is None else (norm(head_dim, kind), norm(head_dim, kind))
    made, positions = Rope(RopeConfig(), head_dim), torch.arange(rows) * 100
    rope, table = (made(positions), made.table(1)) if turned else (None, None)
    block = made_block(
        9, qkv=qkv, before_attention=before, q_norm=q_norm, k_norm=k_norm, heads=3, kv_heads=2, head_dim=head_dim
    )
    got = poisoned(rows, 7 * head_dim)
    addresses = np.array([[0] * 3 if table is None else [*(each.data_ptr() for each in table), 0]], np.int64)
    tokens = torch.stack((torch.zeros_like(positions), positions), 1)
    kernels().qkv_proj(block, x, rows, got)
    kernels().rotate(block, got, rows, addresses, tokens)
    heads = qkv(before(x)).view(rows, 7, head_dim)
    parts = heads[:, :3], heads[:, 3:5]
    if q_norm is not None:
        parts = q_norm(parts[0]), k_norm(parts[1])
    if rope is not None:
        parts = apply_rope(parts[0], *rope), apply_rope(parts[1], *rope)
    expected = torch.cat((*parts, heads[:, 5:]), dim=1).view(rows, -1)
    # Two numbers that are close to each other lose digits in a LayerNorm.
    torch.testing.assert_close(got, expected, atol=1e-2 if head_dim == 2 else 1e-4, rtol=1e-5)


# Attention

HEADS = [(1, 1, 2), (2, 1, 10), (6, 2, 6), (9, 3, 64), (4, 4, 12), (3, 1, 9), (8, 1, 128)]  # heads, kv_heads, head_dim


@pairs({"heads, kv_heads, head_dim": HEADS}, batch=[1, 2, 5], keys=[1, 2, 31, 300])
def test_attention_over_keys_of_a_cache(heads: int, kv_heads: int, head_dim: int, keys: int, batch: int) -> None:
    q = randn(batch, heads + 3, 1, head_dim, std=3)[:, :heads]  # as it is cut out of q, k and v together
    k, v = (randn(batch, kv_heads, keys + 9, head_dim)[:, :, 4 : keys + 4] for _ in range(2))
    expected = F.scaled_dot_product_attention(q, k, v, scale=0.3, enable_gqa=True)
    attend = partial(CpuAttention(), q, scale=0.3, window=None, end=keys)
    # Scores of 30 and more are right to some 3e-6, and so are the weights that come of them.
    torch.testing.assert_close(attend(k, v), expected, atol=5e-5, rtol=1e-5)
    across = v.transpose(2, 3).contiguous().transpose(2, 3)  # in another order than the keys
    assert torch.equal(attend(k, across), attend(k, v))


def attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int, visible: np.ndarray) -> torch.Tensor:
    """q [Q, Hq D] over k, v [1, Hkv, S, D] -> [Q, Hq D], by the attention kernel."""
    size, out = k.shape[3], torch.full(q.shape, torch.nan)
    queries = kernels().query_blocks([len(q)])
    table, rows = Table([k], [v]).at(0), q.contiguous()
    shape = heads, k.shape[1], size, size**-0.5, 0.0, 0
    kernels().attend(*shape, rows, q.shape[1] * 4, table, queries, len(queries), visible, out)
    return out


@once(slots=[1, 2, 7, 33], ratio=range(1, 9))
def test_attention_around_a_ring(slots: int, ratio: int) -> None:
    """From every slot on; what lies outside is never read."""
    kv_heads, head_dim = 2, 6
    heads = ratio * kv_heads
    q = randn(1, heads * head_dim, std=3)
    k, v = (randn(1, kv_heads, slots, head_dim) for _ in range(2))
    for first in range(slots):
        for count in {1, (slots + 1) // 2, max(1, slots - 1), slots}:
            read = torch.tensor([(first + i) % slots for i in range(count)])
            without = [torch.full_like(ring, torch.nan).index_copy_(2, read, ring[:, :, read]) for ring in (k, v)]
            got = attended(q, *without, heads, np.array([[first, count]]))
            single = q.view(1, heads, 1, head_dim)
            expected = F.scaled_dot_product_attention(single, k[:, :, read], v[:, :, read], enable_gqa=True)
            torch.testing.assert_close(got, expected.view(1, -1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("counts", [[1], [3, 1, 40], [1] * 20, [100, 1, 17, 5]], ids=str)
def test_query_blocks(counts: list[int]) -> None:
    """Each token is in one block, and each block in one row; every item of work finds the blocks of its row."""
    blocks = kernels().query_blocks(counts)
    spans = [range(start, stop) for start, stop in blocks[:, 3:].tolist()]
    assert [t for span in spans for t in span] == list(range(sum(counts)))
    row_of = np.repeat(np.arange(len(counts)), counts)
    for i, (row, before, count, start, stop) in enumerate(blocks.tolist()):
        assert set(row_of[start:stop].tolist()) == {row}
        assert blocks[before : before + count, 0].tolist() == [row] * count
        assert before <= i < before + count


# Models

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
KERNELS = ("run", "qkv_proj", "rotate", "after_attention", "attend", "head")
# Logits [B, V] after the last of tokens [B, n] that are fed behind what a cache holds.
Pass = Callable[[Decoder, Cache, torch.Tensor], torch.Tensor]


def plain(model: Decoder, cache: Cache, ids: torch.Tensor) -> torch.Tensor:
    """As `step`, by the modules alone."""
    return model(ids, kv_cache=cache)[:, -1]


def tolerance(stored: str) -> dict[str, float]:
    """A key or value that differs in its last digit may be rounded to another byte."""
    return {"atol": 5e-2, "rtol": 5e-2} if stored == "int8" else {"atol": 1e-4, "rtol": 1e-4}


def random_ids(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 64, (batch, length), generator=torch.Generator().manual_seed(seed))


def decode_all(model: Decoder, ids: torch.Tensor, cache: Cache, by: Pass = step) -> torch.Tensor:
    """The logits after each of the tokens, fed one by one."""
    return torch.stack([by(model, cache, ids[:, i : i + 1]) for i in range(ids.shape[1])], 1)


CASES = amount(
    list(itertools.product(VARIANTS, zip(LAYOUTS, LAYOUT_NAMES, strict=True), STORED, [1, 4])),
    [
        (variant, layouts[i % 8], STORED[(i // 8) % 2], (1, 4)[(i // 4) % 2])
        for layouts in [list(zip(LAYOUTS, LAYOUT_NAMES, strict=True))]
        for i, variant in enumerate(VARIANTS)
    ],
)


@pytest.mark.parametrize(("variant", "layout", "stored", "batch"), CASES, ids=str)
def test_a_model_gives_the_logits_of_plain_torch(
    variant: dict[str, Any],
    layout: tuple[tuple[type[BaseCache], dict[str, Any]], str],
    stored: str,
    batch: int,
    tiny_model: Callable,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, (cls, options) = tiny_model(**variant), layout[0]
    ids, steps, layers = random_ids(batch, 16), 12, model.config.num_hidden_layers
    new = partial(cls.from_model_config, model.config, 16, batch_size=batch, dtype=stored, device="cpu", **options)
    cache = new()
    first = all_logits(model, cache, ids[:, :4])
    calls = count_calls(monkeypatch, *KERNELS)
    got = torch.cat((first, decode_all(model, ids[:, 4:], cache)), 1)
    # Where a cache hands out a table, a step is a single call.
    expected = dict.fromkeys(KERNELS, 0) | {"run": steps}
    if cls is GrowingCache:
        expected = dict.fromkeys(KERNELS, steps * layers) | {"run": 0, "head": steps}
    assert calls == expected
    torch.testing.assert_close(got, model.run([Row(new(), ids, ALL)])[0], **tolerance(stored))
    assert calls == expected  # plain torch called none


@pytest.mark.parametrize("shape", [(1, 1), (2, 3), (1, 15), (1, 16), (40, 1), (1, 120), (2, 70)], ids=str)
@pytest.mark.parametrize("cached", [True, False], ids=["cached", "uncached"])
def test_passes_of_any_number_of_tokens(
    shape: tuple[int, int], cached: bool, tiny_model: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 16 tokens and more, only a few blocks are one call: between them a pass can be interrupted."""
    model, ids = tiny_model(), random_ids(*shape)
    cache = KVCache.from_model_config(model.config, 120, batch_size=shape[0], dtype="float32", device="cpu")
    calls = count_calls(monkeypatch, "run", "after_attention", "head")
    got = all_logits(model, cache if cached else NoCache(shape[0]), ids)
    if not cached:
        assert calls == {"run": 0, "after_attention": 2, "head": 1}
    elif ids.numel() < 16:
        assert calls == {"run": 1, "after_attention": 0, "head": 0}
    else:
        assert calls == {"run": 1 if ids.numel() <= 128 else 2, "after_attention": 0, "head": 1}
    torch.testing.assert_close(got, model(ids), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("cls", [KVCache, GrowingCache])
def test_whatever_torchs_default_dtype_is(cls: type[BaseCache], tiny_model: Callable) -> None:
    model = tiny_model(model_type="gemma3")
    new = partial(cls.from_model_config, model.config, 8, dtype="float32", device="cpu")
    expected = step(model, new(), random_ids(1, 5))
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(step(model, new(), random_ids(1, 5)), expected)
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_row_of_a_batch_is_what_it_is_alone(tiny_model: Callable) -> None:
    """In one cache for all rows, or with one for each."""
    model = tiny_model()
    ids = random_ids(4, 9)
    new = partial(KVCache.from_model_config, model.config, 9, dtype="float32", device="cpu")
    together = decode_all(model, ids, new(batch_size=4))
    caches = [new() for _ in range(4)]
    steps = [backend_for(model).run([*map(Row, caches, ids[:, i].view(4, 1, 1))]) for i in range(9)]
    alone = torch.cat([decode_all(model, row[None], new()) for row in ids])
    assert torch.equal(together, alone)
    assert torch.equal(torch.stack([torch.cat([*each])[:, 0] for each in steps], 1), alone)


# Ragged passes


def own_logits(model: Decoder, cache: Cache, held: torch.Tensor, fed: torch.Tensor, logits: slice) -> torch.Tensor:
    """What a row gives alone: held tokens first, then the pass that is looked at."""
    if held.shape[1]:
        step(model, cache, held)
    return backend_for(model).run([Row(cache, fed, logits)])[0]


def stored_keys(cache: Any) -> list[torch.Tensor]:
    """All that a cache holds, as it is stored; behind what is filled, nothing counts."""
    filled = cache.seq_len
    layers = [*cache.k, *cache.v]
    return [layer if isinstance(cache, SlidingCache) else layer[:, :, :filled] for layer in layers]


# A cache: its class, what it is made with, what it stores, and its batch. A ring of 1 beside a window must go around.
RAGGED: list[tuple[type[BaseCache], dict[str, Any], str, int]] = [
    (KVCache, {}, "float32", 1),
    (KVCache, {}, "int8", 1),
    (SlidingCache, {}, "float32", 1),
    (SlidingCache, {"prefill_chunk": 1}, "int8", 1),
    (SlidingCache, {"prefill_chunk": 2}, "float32", 1),
    (KVCache, {}, "float32", 3),
    (PagedCache, {"page_size": 5}, "float32", 1),
    (PagedCache, {}, "int8", 1),
    (PagedCache, {"page_size": 2}, "float32", 2),
    (GrowingCache, {}, "float32", 1),
    (GrowingCache, {}, "int8", 2),
]
WITH_TABLES = [each for each in RAGGED if each[0] is not GrowingCache]


def check_ragged(
    model: Decoder, rows: Sequence[tuple[tuple[type[BaseCache], dict[str, Any], str, int], int, int, slice]]
) -> None:
    """rows: of each its cache, how many tokens it holds, how many are fed, and of which logits are wanted.

    Together each row gives the bits that it gives alone, and stores the same; and so does one more step.
    """
    backend, capacity = backend_for(model), 64
    assert backend.name == "cpu"

    def caches() -> list[Any]:
        made = []
        for (cls, options, stored, batch), *_ in rows:
            dtype = stored if stored == "int8" else model.dtype
            made.append(
                cls.from_model_config(model.config, capacity, batch_size=batch, dtype=dtype, device="cpu", **options)
            )
        return made

    ids = [random_ids(kind[3], held + n + 1, seed=i) for i, (kind, held, n, _) in enumerate(rows)]
    alone, together = caches(), caches()
    expected = [
        own_logits(model, cache, tokens[:, :held], tokens[:, held : held + n], logits)
        for cache, tokens, (_, held, n, logits) in zip(alone, ids, rows, strict=True)
    ]
    for cache, tokens, (_, held, _, _) in zip(together, ids, rows, strict=True):
        if held:
            step(model, cache, tokens[:, :held])
    got = backend.run(
        [
            Row(cache, tokens[:, held : held + n], logits)
            for cache, tokens, (_, held, n, logits) in zip(together, ids, rows, strict=True)
        ]
    )
    for i, (one, other, (kind, held, n, wanted)) in enumerate(zip(got, expected, rows, strict=True)):
        assert one.shape == (kind[3], len(range(n)[wanted]), model.config.vocab_size)
        assert torch.equal(one, other), (i, kind, held, n)
        assert one.isfinite().all()
        assert together[i].seq_len == held + n
        assert all(map(torch.equal, stored_keys(together[i]), stored_keys(alone[i]))), (i, kind, held, n)
    last = backend.run([Row(cache, tokens[:, -1:]) for cache, tokens in zip(together, ids, strict=True)])
    for i, (cache, tokens) in enumerate(zip(alone, ids, strict=True)):
        assert torch.equal(last[i][:, -1], step(model, cache, tokens[:, -1:])), i


class TestRagged:
    """Rows of any lengths and kinds in one pass."""

    @pytest.mark.parametrize("family", FAMILIES)
    @pytest.mark.parametrize("kinds", [WITH_TABLES, RAGGED], ids=["tables", "all"])
    def test_single_tokens(self, family: str, kinds: list[Any], tiny_model: Callable) -> None:
        model = tiny_model(model_type=family)
        check_ragged(model, [(kind, 2 + 3 * i, 1, LAST) for i, kind in enumerate(kinds)])

    @pytest.mark.parametrize("family", FAMILIES)
    @pytest.mark.parametrize("kinds", [WITH_TABLES, RAGGED], ids=["tables", "all"])
    def test_prompts_beside_single_tokens(self, family: str, kinds: list[Any], tiny_model: Callable) -> None:
        """Prompts from the start and behind what is held, longer than a window and than what threads share."""
        model = tiny_model(model_type=family)
        fed = [(0, 20), (7, 1), (0, 1), (3, 13), (21, 1), (0, 3), (11, 30), (5, 1), (0, 25), (9, 1), (2, 6)]
        wanted = [ALL, LAST, LAST, LAST, ALL, ALL, slice(3, 9), LAST, LAST, ALL, NONE]
        rows = [(kind, *fed[i], wanted[i]) for i, kind in enumerate(kinds)]
        check_ragged(model, rows)
        check_ragged(model, rows[::-1])

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
    def test_in_16_bits(self, family: str, dtype: torch.dtype, tiny_model: Callable) -> None:
        model = tiny_model(model_type=family, dtype=dtype)
        lengths = [(0, 20), (7, 1), (0, 1), (3, 13), (21, 1), (0, 3), (11, 8), (5, 1), (0, 25), (9, 1), (2, 6)]
        check_ragged(model, [(kind, *lengths[i], ALL) for i, kind in enumerate(RAGGED)])

    @pytest.mark.parametrize("seed", range(amount(60, 12)))
    def test_at_random(self, seed: int, tiny_model: Callable) -> None:
        """Any caches in any order, and any lengths."""
        chance = random.Random(seed)
        model = tiny_model(model_type=chance.choice(list(FAMILIES)), seed=seed)
        kinds = chance.choice([WITH_TABLES, RAGGED])
        rows = []
        for _ in range(chance.randint(2, 9)):
            n = chance.choice([1, 1, 1, 2, 5, 17, 33])
            held = chance.randint(0, 64 - n - 1) if chance.random() < 0.7 else 0
            rows.append((chance.choice(kinds), held, n, chance.choice([LAST, ALL, NONE, slice(0, 2)])))
        check_ragged(model, rows)

    @pytest.mark.parametrize("threads", [1, 2])
    def test_many_rows(self, threads: int, tiny_model: Callable) -> None:
        """More rows than one call of all blocks takes."""
        torch.set_num_threads(threads)
        kind = (KVCache, {}, "float32", 1)
        check_ragged(tiny_model(), [(kind, i % 7, 1, LAST) for i in range(40)])

    def test_one_call_where_all_have_tables(self, tiny_model: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
        """One row without a table makes all rows attend in their caches."""
        model = tiny_model()
        new = {"dtype": "float32", "device": "cpu"}
        calls = count_calls(monkeypatch, "run", "after_attention", "attend")
        tables = [KVCache.from_model_config(model.config, 8, **new) for _ in range(3)]
        backend_for(model).run([Row(cache, [3, 4, 5]) for cache in tables])
        assert calls == {"run": 1, "after_attention": 0, "attend": 0}
        growing = GrowingCache.from_model_config(model.config, 8, **new)
        backend_for(model).run([*(Row(cache, [6]) for cache in tables), Row(growing, [3, 4])])
        assert calls == {"run": 1, "after_attention": 2, "attend": 8}

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("cls", [KVCache, GrowingCache])
    def test_no_logits_wanted(self, cls: type[BaseCache], dtype: torch.dtype, tiny_model: Callable) -> None:
        model = tiny_model(dtype=dtype)
        for n in (1, 20):
            cache = cls.from_model_config(model.config, 32, dtype=dtype, device="cpu")
            [logits] = backend_for(model).run([Row(cache, random_ids(1, n), NONE)])
            assert logits.shape == (1, 0, 64)
            assert cache.seq_len == n

    def test_rows_of_no_cache(self, tiny_model: Callable) -> None:
        model, ids = tiny_model(), random_ids(2, 9)
        rows = [Row(NoCache(), ids[:1, :5], ALL), Row(NoCache(), ids[1:], ALL), Row(NoCache(2), ids, LAST)]
        got = backend_for(model).run(rows)
        for row, logits in zip(rows, got, strict=True):
            assert torch.equal(logits, backend_for(model).run([row])[0])

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_what_is_refused(self, dtype: torch.dtype, tiny_model: Callable) -> None:
        """A pass with a row that does not fit changes no cache."""
        model = tiny_model(model_type="gpt2", max_position_embeddings=12, dtype=dtype)
        new = partial(KVCache.from_model_config, model.config, dtype=dtype, device="cpu")
        fine, short, long, two = new(8), new(2), new(20), new(8, batch_size=2)
        for wrong, message in [
            (Row(short, [3, 4, 5]), "overflow"),
            (Row(fine, [3]), "a cache of its own"),
            (Row(two, [3]), "a batch of 1, but the cache one of 2"),
            (Row(short, []), "no tokens"),
            (Row(short, torch.tensor([[0.5]])), "integers"),
            (Row(long, list(range(13))), "13 positions exceed the 12"),
        ]:
            with pytest.raises(ValueError, match=message):
                backend_for(model).run([Row(fine, [1, 2]), wrong])
            assert [cache.seq_len for cache in (fine, short, long, two)] == [0] * 4
        with pytest.raises(ValueError, match="at least one row"):
            backend_for(model).run([])

    @pytest.mark.parametrize("token", [-1, 64])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_tokens_that_do_not_exist(self, token: int, dtype: torch.dtype, tiny_model: Callable) -> None:
        model = tiny_model(dtype=dtype)
        cache = KVCache.from_model_config(model.config, 8, dtype=dtype, device="cpu")
        with pytest.raises(IndexError):
            backend_for(model).run([Row(cache, [3, token])])
        assert cache.seq_len == 0


@pairs(chunk=[1, 3, 512], prompt=[3, 4, 5, 8, 30], stored=STORED)
def test_rings_go_round(chunk: int, prompt: int, stored: str, tiny_model: Callable) -> None:
    """Through prompts that end before, at and past the window, and many times around: as without a ring."""
    model = tiny_model(model_type="gemma3", sliding_window=4)
    ids = random_ids(2, 50)
    new = {"batch_size": 2, "dtype": stored, "device": "cpu"}
    ring = SlidingCache.from_model_config(model.config, 50, prefill_chunk=chunk, **new)
    first = all_logits(model, ring, ids[:, :prompt])
    got = torch.cat((first, decode_all(model, ids[:, prompt:], ring)), 1)
    whole = KVCache.from_model_config(model.config, 50, **new)
    assert torch.equal(got, all_logits(model, whole, ids))
    whole.reset()
    torch.testing.assert_close(got, model(ids, kv_cache=whole, all_logits=True), **tolerance(stored))


class TestTables:
    """What caches let the kernels write to, and what they know of it afterwards."""

    def cache(self, model: Decoder, kind: type[BaseCache] = KVCache, **options: Any) -> Any:
        return kind.from_model_config(model.config, 40, **({"dtype": "float32", "device": "cpu"} | options))

    @pytest.mark.parametrize("stored", STORED)
    @pytest.mark.parametrize("kind", [KVCache, SlidingCache])
    def test_who_offers_one(self, tiny_model: Callable, kind: type[BaseCache], stored: str) -> None:
        model = tiny_model(model_type="gemma3")
        cache = self.cache(model, kind, dtype=stored)
        asked = model.config, torch.float32, 1
        assert cache.table(*asked).shape[:2] == (3, 1)
        for other in (self.cache(model, GrowingCache), NoCache(), TracedCache(cache, [0]), DebugCache(cache)):
            assert other.table(*asked) is None
        for unlike in ({"num_hidden_layers": 2}, {"num_key_value_heads": 4}, {"head_dim": 8}):
            assert cache.table(tiny_model(model_type="gemma3", **unlike).config, torch.float32, 1) is None
        assert self.cache(model, kind, dtype="float64").table(*asked) is None

    def test_a_ring_offers_room_for_what_it_keeps(self, tiny_model: Callable) -> None:
        """A pass writes before it attends: nothing that is still seen may be lost."""
        model = tiny_model(model_type="gemma3", sliding_window=4)
        cache = self.cache(model, SlidingCache, prefill_chunk=3)  # 7 slots
        asked = model.config, torch.float32
        assert cache.table(*asked, 7) is not None
        assert cache.table(*asked, 8) is None
        step(model, cache, random_ids(1, 10))
        assert cache.table(*asked, 4) is not None  # beside the 3 before the next
        assert cache.table(*asked, 5) is None

    def test_asking_changes_nothing(self, tiny_model: Callable) -> None:
        model, ids = tiny_model(model_type="gemma3"), random_ids(1, 20)
        cache, straight = (self.cache(model, SlidingCache, prefill_chunk=3) for _ in range(2))
        for i in range(20):
            for n in (1, 3, 9):
                cache.table(model.config, torch.float32, n)
            one = ids[:, i : i + 1]
            assert torch.equal(step(model, cache, one), step(model, straight, one))
        cache.truncate(19)

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
        self, kind: type[BaseCache], changes: dict[str, Any], options: dict[str, Any], tiny_model: Callable
    ) -> None:
        """Refused as they are in plain torch, and not written to."""
        model = tiny_model(model_type="gemma3")
        cache = self.cache(tiny_model(model_type="gemma3", **changes), kind, **options)
        said = []
        for by in (step, plain):
            with pytest.raises((ValueError, IndexError)) as error:
                by(model, cache, torch.tensor([[3]]))
            said.append((error.type, str(error.value)))
        assert said[0] == said[1]
        assert cache.seq_len == 0

    def test_a_narrower_window_than_the_models(self, tiny_model: Callable) -> None:
        model = tiny_model(model_type="gemma3", sliding_window=5)
        cache = self.cache(tiny_model(model_type="gemma3", sliding_window=4), SlidingCache)
        with pytest.raises(ValueError, match="sees 5 positions, but its cache keeps only 4"):
            step(model, cache, torch.tensor([[3]]))

    def test_a_wider_window_than_the_models(self, tiny_model: Callable) -> None:
        model = tiny_model(model_type="gemma3", sliding_window=3)
        wide = self.cache(tiny_model(model_type="gemma3", sliding_window=6), SlidingCache, prefill_chunk=1)
        ids = random_ids(1, 30)
        assert torch.equal(decode_all(model, ids, wide), decode_all(model, ids, self.cache(model)))

    def test_a_full_cache(self, tiny_model: Callable) -> None:
        """Nothing is written behind its end."""
        model = tiny_model()
        room = torch.full((2, 2, 1, 2, 9, 8), torch.nan)
        cache = KVCache(*room[..., :8, :].clone().unbind())
        decode_all(model, random_ids(1, 8), cache)
        with pytest.raises(ValueError, match="overflow"):
            step(model, cache, torch.tensor([[3]]))
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
        assert torch.equal(decode_all(model, ids, KVCache(k, v)), decode_all(model, ids, self.cache(model)))
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

    def test_what_a_ring_has_lost(self, tiny_model: Callable) -> None:
        """Single tokens overwrite slots one by one; `truncate` refuses, and allows, as it does in plain torch."""
        model = tiny_model(model_type="gemma3", sliding_window=4)
        ids = random_ids(1, 30)

        def refused(by: Pass) -> list[list[int]]:
            found, cache = [], self.cache(model, SlidingCache, prefill_chunk=3)
            for end in range(1, 30):
                by(model, cache, ids[:, end - 1 : end])
                fork = copy.deepcopy(cache)
                found.append([])
                for target in range(end, -1, -1):
                    try:
                        fork.truncate(target)
                    except ValueError as error:
                        assert "have been overwritten" in str(error)  # noqa: PT017
                        found[-1].append(target)
            return found

        got = refused(step)
        assert any(got)
        assert got[5] == []
        assert got == refused(plain)

    def test_after_a_truncated_ring(self, tiny_model: Callable) -> None:
        model = tiny_model(model_type="gemma3", sliding_window=4)
        ids = random_ids(1, 40)
        cache, straight = (self.cache(model, SlidingCache, prefill_chunk=3) for _ in range(2))
        decode_all(model, ids[:, :20], cache)
        cache.truncate(18)
        with pytest.raises(ValueError, match="have been overwritten"):
            cache.truncate(15)
        decode_all(model, ids[:, :18], straight)
        assert torch.equal(decode_all(model, ids[:, 20:], cache), decode_all(model, ids[:, 20:], straight))

    @pairs(n=[1, 20], kind=[KVCache, SlidingCache], stored=STORED)
    def test_an_interrupted_pass(
        self, n: int, kind: type[BaseCache], stored: str, tiny_model: Callable, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It counts as not been, in all of its rows: the next one writes over what it left."""
        model = tiny_model(model_type="gemma3")
        ids = random_ids(1, 20)
        cache, beside, straight = (self.cache(model, kind, dtype=stored) for _ in range(3))
        decode_all(model, ids[:, :10], cache)
        run = kernels().run

        def interrupted(*args: Any) -> None:
            run(*args)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(kernels(), "run", interrupted)
            with pytest.raises(KeyboardInterrupt):
                backend_for(model).run([Row(beside, [3]), Row(cache, [63] * n)])
        assert (cache.seq_len, beside.seq_len) == (10, 0)
        decode_all(model, ids[:, :10], straight)
        assert torch.equal(decode_all(model, ids[:, 10:], cache), decode_all(model, ids[:, 10:], straight))
        straight.reset()
        assert torch.equal(decode_all(model, ids, beside), decode_all(model, ids, straight))

    @pytest.mark.parametrize("kind", [KVCache, SlidingCache])
    def test_plain_torch_in_between(
        self, kind: type[BaseCache], tiny_model: Callable, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It goes on in the cache that kernels have written to, and kernels where it has."""
        model = tiny_model(model_type="gemma3")
        ids = random_ids(1, 30)
        cache, calls = self.cache(model, kind), count_calls(monkeypatch, "run")
        first = decode_all(model, ids[:, :10], cache)
        hook = model.layers[1].mlp.register_forward_hook(lambda *args: None)
        second = decode_all(model, ids[:, 10:20], cache)
        hook.remove()
        got = torch.cat((first, second, decode_all(model, ids[:, 20:], cache)), 1)
        assert calls == {"run": 20}
        torch.testing.assert_close(got, decode_all(model, ids, self.cache(model, kind), plain), atol=1e-4, rtol=1e-4)

    @pytest.mark.parametrize("head_dim", [512, 514, 1030])
    def test_vectors_of_several_scales(self, head_dim: int, tiny_model: Callable) -> None:
        """Wide heads have a scale for each group of an 8-bit cache."""
        model = tiny_model(head_dim=head_dim)
        ids = random_ids(1, 12)
        got = decode_all(model, ids, self.cache(model, dtype="int8"))
        expected = decode_all(model, ids, self.cache(model, dtype="int8"), plain)
        torch.testing.assert_close(got, expected, **tolerance("int8"))

    @pytest.mark.parametrize("kind", [KVCache, SlidingCache])
    @pytest.mark.parametrize("method", ["attend", "_store"])
    def test_a_cache_with_ways_of_its_own_is_asked(
        self, method: str, kind: type[BaseCache], tiny_model: Callable
    ) -> None:
        """Where a subclass stores or attends otherwise, no kernel does it in its place."""
        calls = []

        def counting(self: BaseCache, layer_idx: int, *args: Any, **options: Any) -> Any:
            calls.append(layer_idx)
            return getattr(kind, method)(self, layer_idx, *args, **options)

        model = tiny_model()
        cache = self.cache(model, type("Counting", (kind,), {method: counting}))
        got = decode_all(model, random_ids(1, 2), cache)
        assert calls == [0, 1] * 2
        assert torch.equal(got, decode_all(model, random_ids(1, 2), self.cache(model)))

    def test_whose_ways_are_known(self, tiny_model: Callable) -> None:
        """A subclass that changes nothing of them, or says itself where its keys go, offers a table."""
        model = tiny_model()
        named = {"name": "mine"}
        own = {"update": KVCache.update}
        for members, offers in ((named, True), (own, False), (own | {"table": KVCache.table}, True)):
            cache = self.cache(model, type("Own", (KVCache,), members))
            assert (cache.table(model.config, torch.float32, 1) is not None) == offers


def stored_by_kernel(vectors: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """vectors [2, H, D], keys and values, as a kernel puts them into a cache: [H, width] each.

    A hidden state of one 1 lets the weights through as they are.
    """
    _, heads, size = vectors.shape
    qkv, before = linear(1, 3 * heads * size), RMSNorm(1, 0.0)
    qkv.weight.copy_(torch.cat((torch.ones(heads * size), vectors.flatten()))[:, None])
    parts = {"o": linear(heads * size, 1), "up": linear(1, 2), "down": linear(1, 1)}
    block = made_block(1, qkv=qkv, before_attention=before, heads=heads, kv_heads=heads, head_dim=size, **parts)
    cache = KVCache.allocate(1, heads, size, 3, dtype=dtype, device="cpu")
    tables = Table(cache.k.unbind(), cache.v.unbind()).at(1)
    no_ropes, tokens, selected = np.zeros((1, 3), np.int64), np.array([[0, 1]]), np.array([0])
    head, out = head_record(None, parts["down"]), poisoned(1, 1)
    one = torch.ones(1, 1).numpy()
    kernels().run(block, head, one, no_ropes, tables, tokens, kernels().query_blocks([1]), selected, out.numpy())
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
    """The kernels' own, sixteen at a time."""

    def run(self, x: np.ndarray) -> np.ndarray:
        from numba import njit

        from infer.backend.cpu.simd import exp, load_f32x16, store

        @njit
        def compute(at: int, count: int) -> None:
            for i in range(0, count, 16):
                store(at + i * 4, exp(load_f32x16(at + i * 4)))

        out = np.zeros(-(-len(x) // 16) * 16, np.float32)
        out[: len(x)] = x
        compute(out.ctypes.data, len(out))
        return out[: len(x)]

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


GEMMA_NORMS = [
    "layers.0.self_attn.q_norm",
    "layers.1.self_attn.k_norm",
    "layers.0.input_layernorm",
    "layers.0.post_attention_layernorm",
    "layers.1.pre_feedforward_layernorm",
    "layers.2.post_feedforward_layernorm",
]


class TestParts:
    """Kernels take each part as it is, where it is not what its family has."""

    def check(self, model: Decoder) -> None:
        """As in plain torch, with a cache and without."""
        assert backend_for(model).name == "cpu"
        ids = random_ids(1, 5)
        cache = KVCache.from_model_config(model.config, 5, dtype=model.dtype, device="cpu")
        for each in (cache, NoCache()):
            torch.testing.assert_close(all_logits(model, each, ids), model(ids), atol=1e-4, rtol=1e-4)

    @pytest.mark.parametrize("name", GEMMA_NORMS)
    @pytest.mark.parametrize("change", ["eps", "kind"])
    def test_a_norm_unlike_the_others(self, tiny_model: Callable, name: str, change: str) -> None:
        model = tiny_model(model_type="gemma3")
        changed = model.get_submodule(name)
        if change == "eps":
            changed.eps = 3.0
        else:
            changed.__class__ = RMSNorm
        self.check(model)

    @pytest.mark.parametrize("names", [("q_norm", "k_norm"), ("post_attention", "pre_feedforward", "post_feedforward")])
    def test_layer_norms_in_unusual_places(self, tiny_model: Callable, names: tuple[str, ...]) -> None:
        """Of heads, or behind a product: no model has them, but they are norms like others."""
        model = tiny_model(model_type="gemma3")
        layer = model.layers[0]
        for name in names:
            module, name = (layer.self_attn, name) if name.endswith("norm") else (layer, f"{name}_layernorm")
            setattr(module, name, norm(len(getattr(module, name).weight), LayerNorm))
        self.check(model)

    def test_layer_norms_each_with_its_eps(self, tiny_model: Callable) -> None:
        model = tiny_model(model_type="gpt2")
        for i, name in enumerate(("layers.0.input_layernorm", "layers.0.post_attention_layernorm", "norm")):
            model.get_submodule(name).eps = 1.0 + i
        self.check(model)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_matrices_of_16_bits(self, tiny_model: Callable, dtype: torch.dtype) -> None:
        """In a model that computes in float32, they are widened as they are multiplied."""
        model = tiny_model()
        for module in model.modules():
            if isinstance(module, Linear):
                module.weight = nn.Parameter(module.weight.to(dtype), requires_grad=False)
        self.check(model)


# Around every switch: one row after the other, tiles, panels of each size, packed weights, more parts.
ROW_COUNTS = [1, 2, 3, 4, 5, 7, 8, 9, 11, 12, 13, 16, 17, 31, 32, 33, 64, 127, 128, 129, 255, 256, 257, 512]


def multiplied(weight: torch.Tensor, bias: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    """x [T, columns] -> [T, rows], by the kernel of products."""
    out = torch.full((len(x), len(weight)), torch.nan)
    kernels().linear(weight_record(weight, bias), x.contiguous(), out)
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
