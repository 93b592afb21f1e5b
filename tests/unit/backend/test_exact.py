"""The same bits at every position, whichever way the tokens are fed."""

from __future__ import annotations

import hashlib
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from amount import amount, once
from mocks import CACHES, RoundingNoCache
from tiny import make_tiny_model
from torch import Tensor, nn

from infer import GrowingCache, KVCache, SlidingCache
from infer.backend import Row, backend_for
from infer.backend.cpu import backend as backend_module
from infer.backend.cpu import kernels, ops
from infer.backend.cpu.ops import ACTIVATION_CODES, CpuAttention
from infer.cache import Cache, NoCache
from infer.cache.table import Table
from infer.cache.traced import TracedCache
from infer.config import RopeConfig
from infer.engine.model import all_logits, step
from infer.models.common import Decoder
from infer.models.rows import ALL
from infer.nn.activation import ACTIVATIONS, activated, gated
from infer.nn.attention import ring_span, softmax_attention
from infer.nn.linear import Linear
from infer.nn.norm import LayerNorm, RMSNorm, ZeroCenteredRMSNorm
from infer.nn.quantized import QuantizedWeight
from infer.nn.rope import Rope, apply_rope

pytestmark = pytest.mark.skipif(kernels() is None, reason="plain torch promises no bits")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
any_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)

MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "odd llama": {
        "hidden_size": 30,
        "intermediate_size": 45,
        "vocab_size": 61,
        "head_dim": 10,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "attention_bias": True,
    },
    "qwen3": {"model_type": "qwen3"},
    "gemma3": {"model_type": "gemma3"},
    "wide gemma3": {"model_type": "gemma3", "sliding_window": 17, "num_key_value_heads": 1, "head_dim": 6},
    "gpt2": {"model_type": "gpt2"},
    "nanogpt": {
        "model_type": "gpt2",
        "hidden_size": 35,
        "num_attention_heads": 5,
        "num_key_value_heads": 5,
        "hidden_act": "gelu",
        "attention_bias": False,
        "mlp_bias": False,
        "norm_bias": False,
    },
    "rope_gpt": {"model_type": "rope_gpt"},
    "qwen3_moe": {"model_type": "qwen3_moe"},
    "odd gpt_oss": {"model_type": "gpt_oss", "hidden_size": 36, "intermediate_size": 21},  # an expert begins in a tile
}
FORMS = [*DTYPES, "int8", "int4", "int4 in bfloat16"]  # of weights: quantised ones in float32, or as said
LENGTH = 75  # tokens: more than a window, a chunk of 64 and what any product or kernel takes at once
SHORTER = 27  # where every operation is called by itself


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


def make_model(name: str, form: str, **changes: Any) -> Decoder:
    weights, _, dtype = form.partition(" in ") if " in " in form else (form, "", form)
    model = make_tiny_model(seed=1, dtype=DTYPES.get(dtype, torch.float32), **MODELS[name] | changes)
    if weights in ("int8", "int4"):
        for module in model.modules():
            if isinstance(module, Linear):
                module.weight = QuantizedWeight.of(module.weight.float(), weights)
    return model


def tokens(model: Decoder, length: int = LENGTH, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, model.config.vocab_size, (1, length), generator=generator)


def make_cache(cls: Any, model: Decoder, stored: Any = None, **options: Any) -> Cache:
    dtype = stored or model.dtype
    return cls.from_model_config(model.config, 96, dtype=dtype, device="cpu", **options)


def in_one_pass(model: Decoder, ids: Tensor) -> Tensor:
    """Logits [B, n, V] of ids [B, n], without a cache."""
    return all_logits(model, NoCache(ids.shape[0]), ids)


def feed(model: Decoder, ids: Tensor, cache: Cache, chunk: int = LENGTH) -> Tensor:
    """Logits [n, V] at each of ids [1, n], which are fed in chunks."""
    return torch.cat([all_logits(model, cache, part)[0] for part in ids.split(chunk, 1)])


# Each way to the logits of all positions, given the model, the tokens and what makes a cache.
Way = Callable[[Decoder, Tensor, Callable[[], Cache]], Tensor]


def in_chunks(chunk: int) -> Way:
    return lambda model, ids, new: feed(model, ids, new(), chunk)


def after_truncating(model: Decoder, ids: Tensor, new: Callable[[], Cache]) -> Tensor:
    cache, n = new(), ids.shape[1]
    first = feed(model, ids[:, : n // 2], cache, 7)
    feed(model, tokens(model, 9, seed=5), cache, 5)
    cache.truncate(n // 2)
    return torch.cat((first, feed(model, ids[:, n // 2 :], cache, 11)))


def traced(model: Decoder, ids: Tensor, new: Callable[[], Cache]) -> Tensor:
    cache = TracedCache(new(), range(model.config.num_hidden_layers))
    logits = feed(model, ids, cache, 13)
    assert set(cache.rows) == set(range(model.config.num_hidden_layers))
    sums = torch.stack([row.sum(-1) for row in cache.rows.values()])
    has_sinks = model.layers[0].self_attn.sinks is not None  # which take their share
    assert sums.max() < 1.01
    assert (sums.min() > 0.99) is not has_sinks
    return logits


def among_others(model: Decoder, ids: Tensor, new: Callable[[], Cache]) -> Tensor:
    """The last tokens with neighbours: prompts, single tokens, and so many that torch would multiply otherwise."""
    n = ids.shape[1]
    cache, others = new(), [new() for _ in range(8)]
    first = feed(model, ids[:, : n - 6], cache)
    for i, other in enumerate(others[1:]):  # the first one is empty
        step(model, other, tokens(model, (1, 2, 19)[i % 3], seed=i))
    last, at = [], n - 6
    for count, lengths in ((2, (1, 2, 19, 1)), (2, (2, 2, 2, 2)), (1, (1, 1, 1, 1)), (1, (1, 7, 1, 1))):
        rows = [Row(other, tokens(model, lengths[i % 4], seed=at + i)) for i, other in enumerate(others)]
        rows.insert(3, Row(cache, ids[:, at : at + count], ALL))
        last.append(backend_for(model).run(rows)[3][0])
        at += count
    return torch.cat((first, *last))


WAYS: dict[str, Way] = {
    "whole": in_chunks(LENGTH),
    "by 1": in_chunks(1),
    "by 7": in_chunks(7),
    "by 64": in_chunks(64),
    "truncated": after_truncating,
    "traced": traced,
    "among others": among_others,
}


def check(model: Decoder, ids: Tensor, caches: dict[str, Callable[[], Cache]], expected: Tensor) -> None:
    """Every way with every cache gives the expected logits."""
    for cache, new in caches.items():
        for way, run in WAYS.items():
            got = run(model, ids, new)
            wrong = (got != expected).any(1).nonzero().flatten().tolist()
            assert torch.equal(got, expected), f"{cache} {way}: position {wrong[:1]} differs"


def float_caches(model: Decoder) -> dict[str, Callable[[], Cache]]:
    made = {cls.__name__: partial(make_cache, cls, model) for cls in CACHES}
    return made | {"small rings": partial(make_cache, SlidingCache, model, prefill_chunk=16)}


def some(caches: dict[str, Callable[[], Cache]], turn: int) -> dict[str, Callable[[], Cache]]:
    """One of them, or all in `make test-all`."""
    return amount(caches, dict([list(caches.items())[turn % len(caches)]]))


@once(name=MODELS, form=FORMS)
def test_the_same_bits_whatever_the_path(name: str, form: str) -> None:
    model = make_model(name, form)
    length = LENGTH if model.dtype is torch.float32 else SHORTER
    ids = tokens(model, length)
    assert backend_for(model).name == "cpu"
    expected = in_one_pass(model, ids)[0]
    assert expected.isfinite().all()
    assert expected.std() > 0.1
    turn = list(MODELS).index(name) + FORMS.index(form)  # each model, and each form, meets every cache
    check(model, ids, some(float_caches(model), turn), expected)
    for start in range(1, length, 20):
        assert torch.equal(in_one_pass(model, ids[:, :start])[0], expected[:start])
    batch = torch.cat([tokens(model, length, seed=i) for i in range(1, 5)] + [ids, ids])
    assert torch.equal(in_one_pass(model, batch)[4:], expected.expand(2, -1, -1))
    assert torch.equal(step(model, make_cache(KVCache, model, batch_size=6), batch)[4:], expected[-1:].expand(2, -1))


# Prompt lengths around every number of rows at which some kernel, of whatever device, is another.
LENGTHS = (1, 2, 8, 9, 16, 17, 128, 129, 256, 512)


@pytest.mark.parametrize(
    ("name", "form", "cache"),
    [
        ("llama", "float32", KVCache),
        ("odd llama", "int8", GrowingCache),
        ("qwen3", "bfloat16", SlidingCache),
        ("gemma3", "float32", SlidingCache),
        ("wide gemma3", "float16", KVCache),
        ("gpt2", "int4", KVCache),
        ("nanogpt", "bfloat16", GrowingCache),
        ("rope_gpt", "float32", GrowingCache),
    ],
)
def test_prompts_of_any_length(name: str, form: str, cache: Any) -> None:
    """As a whole with a cache and without, then one token more; against the longest in one pass."""
    model = make_model(name, form, max_position_embeddings=1024)
    ids = tokens(model, LENGTHS[-1] + 1)
    expected = in_one_pass(model, ids)[0]
    for length in LENGTHS:
        held = cache.from_model_config(model.config, length + 1, dtype=model.dtype, device="cpu")
        got = feed(model, ids[:, :length], held, length), feed(model, ids[:, length : length + 1], held)
        assert torch.equal(torch.cat(got), expected[: length + 1]), length
        assert torch.equal(in_one_pass(model, ids[:, :length])[0], expected[:length]), length


@pytest.mark.parametrize(("name", "form"), [("llama", "float32"), ("gemma3", "bfloat16"), ("qwen3", "int4")])
def test_batches_of_any_size(name: str, form: str) -> None:
    """A prompt of three tokens in one pass, then one token of each row: alone, and among up to 255 others."""
    model = make_model(name, form)
    rows = torch.cat([tokens(model, 4, seed=i) for i in range(256)])
    alone = [feed(model, rows[i : i + 1], make_cache(KVCache, model), 3) for i in (0, 1, 7)]
    for count in (2, 8, 9, 16, 17, 128, 129, 256):
        cache = KVCache.from_model_config(model.config, 4, batch_size=count, dtype=model.dtype, device="cpu")
        together = torch.cat([all_logits(model, cache, rows[:count, part]) for part in (slice(3), slice(3, 4))], 1)
        for i, expected in zip((0, 1, 7), alone, strict=True):
            assert i >= count or torch.equal(together[i], expected), (count, i)


IN_8_BITS = list(itertools.product(["llama", "qwen3", "gemma3", "gpt2"], ["float32", "bfloat16", "int8"]))


@pytest.mark.parametrize(("name", "form"), IN_8_BITS)
def test_caches_of_8_bits_among_themselves(name: str, form: str) -> None:
    model = make_model(name, form)
    ids = tokens(model, LENGTH if model.dtype is torch.float32 else SHORTER)
    caches = {cls.__name__: partial(make_cache, cls, model, "int8") for cls in CACHES}
    expected = feed(model, ids, make_cache(KVCache, model, "int8"))
    turn = sum(divmod(IN_8_BITS.index((name, form)), 3))
    check(model, ids, some(caches, turn), expected)
    rounding = all_logits(model, RoundingNoCache(), ids)[0]
    torch.testing.assert_close(expected, rounding, atol=0.3, rtol=0.1)


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("form", ["float32", "bfloat16", "int4"])
def test_any_number_of_threads(form: str, threads: Callable[[int], None]) -> None:
    # Large enough that torch shares the work.
    model = make_tiny_model(dtype=DTYPES.get(form, torch.float32), hidden_size=512, head_dim=64, intermediate_size=1536)
    ids, results = tokens(model, 20), []
    for count in (1, 2, 3):
        threads(count)
        results.append(torch.cat((in_one_pass(model, ids)[0], feed(model, ids, make_cache(KVCache, model), 7))))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def digests() -> str:
    """What the logits of some models are, in short."""
    lines = []
    with torch.inference_mode():
        for name in ("llama", "gemma3", "gpt2"):
            for form in ("float32", "bfloat16", "int4"):
                model = make_model(name, form)
                logits = in_one_pass(model, tokens(model)).float().contiguous()
                lines.append(hashlib.sha256(logits.numpy().tobytes()).hexdigest())
    return "\n".join(lines)


def test_another_process() -> None:
    """With another number of threads."""
    here = Path(__file__).parent
    other = 1 if torch.get_num_threads() > 1 else 2
    program = f"import torch; torch.set_num_threads({other}); import test_exact; print(test_exact.digests())"
    path = os.pathsep.join([str(here), str(here.parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": str(other)}
    run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == digests()


def close_to(dtype: torch.dtype) -> dict[str, float]:
    digits = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    return {"atol": digits, "rtol": digits}


@pytest.mark.parametrize("name", MODELS)
@any_dtype
def test_the_same_model_as_in_plain_torch(name: str, dtype: torch.dtype) -> None:
    model = make_model(name, str(dtype).removeprefix("torch."))
    ids = tokens(model)
    got = in_one_pass(model, ids).float()
    expected = model.float()(ids)
    scale = expected.std().item()
    assert (got - expected).abs().mean() < 20 * scale * close_to(dtype)["atol"]


# Single operations

SHAPES = [(1, 1), (3, 2), (5, 7), (16, 8), (17, 9), (33, 64), (64, 95), (70, 576)]  # rows and columns of a weight


def make_product(weight: Tensor, bias: Tensor | None = None) -> Linear:
    made = Linear(1, 1, bias=bias is not None)
    made.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        made.bias = nn.Parameter(bias, requires_grad=False)
    return made


@any_dtype
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_products(rows: int, columns: int, dtype: torch.dtype) -> None:
    for bias in [False, True]:
        product = make_product(torch.randn(rows, columns).to(dtype), torch.randn(rows).to(dtype) if bias else None)
        x = (torch.randn(70, columns) * columns**-0.5).to(dtype)
        whole = ops.linear(x, product)
        expected = F.linear(x.double(), product.weight.double(), product.bias.double() if bias else None)
        torch.testing.assert_close(whole.double(), expected, **close_to(dtype))
        for count in (1, 2, 3, 4, 5, 8, 16, 23, 64):
            for start in (0, 1, 6):
                assert torch.equal(ops.linear(x[start : start + count], product), whole[start : start + count])


@any_dtype
def test_weights_of_a_product_are_read_as_they_are(dtype: torch.dtype) -> None:
    """All numbers of 16 bits, the smallest and infinite ones too."""
    values = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16 if dtype.itemsize > 2 else dtype)
    values = values.to(dtype)[:, None]
    got = ops.linear(torch.ones(1, 1, dtype=dtype), make_product(values))[0]
    assert torch.equal(got.nan_to_num(0.25), (values[:, 0] + 0.0).nan_to_num(0.25))


@any_dtype
@pytest.mark.parametrize("kind", [RMSNorm, ZeroCenteredRMSNorm, LayerNorm, partial(LayerNorm, bias=False)])
def test_norms(kind: Any, dtype: torch.dtype) -> None:
    for size in [1, 3, 4, 10, 64, 577]:
        norm = kind(size, 1e-5).requires_grad_(False).to(dtype)
        for parameter in norm.parameters():
            parameter.copy_(torch.randn(size))
        x = torch.randn(2, 3, 17, size).to(dtype)
        whole = ops.norm(x, norm)
        assert all(torch.equal(ops.norm(x[:, :, i : i + 1], norm), whole[:, :, i : i + 1]) for i in range(17))
        assert torch.equal(ops.norm(x.transpose(1, 2), norm), whole.transpose(1, 2))
        torch.testing.assert_close(whole, norm(x), **close_to(dtype))


@any_dtype
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation: str, dtype: torch.dtype) -> None:
    for inner in [1, 6, 45, 64]:
        x = (torch.randn(19, 2 * inner) * 4).to(dtype)
        for module, size in ((gated, inner), (activated, 2 * inner)):
            function = partial(ops.activate, inner=size, activation=activation)
            whole = function(x)
            assert all(torch.equal(function(x[i : i + 3]), whole[i : i + 3]) for i in range(17))
            torch.testing.assert_close(whole, module(x.float(), activation).to(dtype), **close_to(dtype))


def test_every_activation_has_a_kernel() -> None:
    assert set(ACTIVATIONS) == set(ACTIVATION_CODES)


@any_dtype
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 8), (3, 1, 7), (2, 2, 2), (1, 1, 64)])
def test_attention(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    for window in [None, 1, 5, 40]:
        keys = 40
        q = torch.randn(2, keys, heads, head_dim).to(dtype).transpose(1, 2)
        k, v = (torch.randn(2, keys, kv_heads, head_dim).to(dtype).transpose(1, 2) for _ in range(2))
        expected, _ = softmax_attention(q, k, v, scale=0.3, window=window)
        attend = partial(CpuAttention(), scale=0.3, window=window)
        whole = attend(q, k, v, end=keys)
        for start, end in [(0, 1), (0, 7), (1, 2), (7, 30), (39, 40), (5, 40)]:
            part = attend(q[:, :, start:end], k[:, :, :end], v[:, :, :end], end=end)
            assert torch.equal(part, whole[:, :, start:end])
            first = 0 if window is None else max(0, start - window + 1)
            cut = attend(q[:, :, start:end], k[:, :, first:end].contiguous(), v[:, :, first:end].contiguous(), end=end)
            assert torch.equal(cut, part)
            assert torch.equal(attend(q[1:, :, start:end], k[1:, :, :end], v[1:, :, :end], end=end), part[1:])
        torch.testing.assert_close(whole, expected, **close_to(dtype))


@pytest.mark.parametrize("head_dim", [6, 7, 8])
def test_rings_are_read_as_spans(head_dim: int) -> None:
    """A query gives the same bits wherever in a ring its keys lie."""
    slots = 13
    q = torch.randn(1, 4, 1, head_dim)
    k, v = (torch.randn(1, 2, slots, head_dim) for _ in range(2))
    table, got = Table([k], [v]).at(0), torch.empty(1, 4 * head_dim)
    for first in range(slots):
        for count in range(1, slots + 1):
            keys, values = ring_span(k, first, first + count), ring_span(v, first, first + count)
            expected = CpuAttention()(q, keys, values, scale=0.3, window=None, end=count)
            visible, queries = np.array([[first, count]]), kernels().query_blocks([1])
            kernels().attend(4, 2, head_dim, 0.3, 0.0, 0, q, 0, table, queries, 1, visible, got)
            assert torch.equal(got, expected.view(1, -1))


@any_dtype
def test_rotation(dtype: torch.dtype) -> None:
    x = torch.randn(29, 3, 10).to(dtype)
    cos, sin = torch.randn(29, 10), torch.randn(29, 10)
    whole = apply_rope(x, cos, sin)
    for i in range(29):
        part = slice(i, i + 1)
        assert torch.equal(apply_rope(x[part], cos[part], sin[part]), whole[part])


@pytest.mark.parametrize("head_dim", [6, 10, 64, 256])
def test_cos_and_sin_of_a_position(head_dim: int, threads: Callable[[int], None]) -> None:
    """Whichever positions are asked for together, in whichever order the table grows, on any number of threads."""
    everything = torch.arange(300)
    expected = Rope(RopeConfig(), head_dim)(everything)
    angles = everything[:, None].double() * Rope(RopeConfig(), head_dim).inv_freq.double()
    torch.testing.assert_close(expected[0].double(), angles.cos(), atol=1e-4, rtol=1e-4)
    for count in (1, 3):
        threads(count)
        rope = Rope(RopeConfig(), head_dim)
        for positions in ([7], [40, 3], [299, 0, 5], list(range(17, 250))):
            got = rope(torch.tensor(positions))
            assert all(torch.equal(a, b[positions]) for a, b in zip(got, expected, strict=True))


# These tests can fail: where one operation looks at how many rows there are, the comparison above says so.


def linear_by_count(x: Tensor, part: Linear) -> Tensor:
    """Columns from the last to the first, where there is more than one row."""
    order = 1 if len(x) == 1 else -1
    products = x.unflatten(1, (-1, 2))[:, None].float() * part.weight.unflatten(1, (-1, 2))[None].float()
    total = torch.zeros(len(x), len(part.weight), dtype=x.dtype)
    for i in range(products.shape[2])[::order]:
        total += products[:, :, i].sum(-1)
    return (total if part.bias is None else total + part.bias).to(x.dtype)


def norm_by_count(x: Tensor, part: Any) -> Tensor:
    """One digit less where there is more than one row."""
    out = part(x.float()).double()
    return (out if x.numel() == x.shape[-1] else out * (1 + 2**-9)).to(x.dtype)


class AttentionByCount(CpuAttention):
    """From the last key to the first, for more than one query: they then see the same in another order."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None, end: int) -> Tensor:
        if q.shape[2] == 1:
            return softmax_attention(q, k, v, scale=scale, window=window)[0]
        ends = range(k.shape[2] - q.shape[2] + 1, k.shape[2] + 1)
        rows = [
            softmax_attention(q[:, :, i : i + 1], k[:, :, :e].flip(2), v[:, :, :e].flip(2), scale=scale, window=None)
            for i, e in enumerate(ends)
        ]
        return torch.cat([out for out, _ in rows], 2)


@pytest.mark.parametrize(
    ("name", "mutant", "form"),
    [
        ("linear", linear_by_count, "bfloat16"),
        ("linear", linear_by_count, "float16"),
        ("norm", norm_by_count, "bfloat16"),
        ("ATTENTION", AttentionByCount(), "float32"),
    ],
)
def test_an_operation_that_looks_at_the_batch_is_found(
    name: str, mutant: Any, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model("llama", form)
    ids = tokens(model, 14)
    caches = {"KVCache": partial(make_cache, KVCache, model)}
    check(model, ids, caches, in_one_pass(model, ids)[0])
    monkeypatch.setattr(backend_module, name, mutant)
    with pytest.raises(AssertionError, match=r"KVCache .*: position \[\d+\] differs"):
        check(model, ids, caches, in_one_pass(model, ids)[0])


@pytest.mark.parametrize("kernel", ["run", "qkv_proj", "after_attention", "head"])
def test_a_kernel_that_looks_at_the_batch_is_found(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("llama", "float32")
    ids, compute = tokens(model, 14), getattr(kernels(), kernel)

    def mutant(*args: Any) -> None:
        compute(*args)
        if len(args[2 if kernel == "run" else 1]) > 1:  # rows of x
            args[-1][:] *= np.float32(1 + 2**-20)

    monkeypatch.setattr(kernels(), kernel, mutant)
    with pytest.raises(AssertionError, match=r"KVCache .*: position \[\d+\] differs"):
        check(model, ids, {"KVCache": partial(make_cache, KVCache, model)}, in_one_pass(model, ids)[0])
