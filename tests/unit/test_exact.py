"""Exact mode: the same bits at every position, whichever way the tokens were fed."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import make_tiny_model
from mocks import CACHES, RoundingNoCache
from torch import Tensor

from infer import KVCache, SlidingCache, kernels
from infer.cache import BatchCache, Cache
from infer.cache.traced import TracedCache
from infer.models.common import Decoder
from infer.ops import compiled, exact
from infer.ops.activation import ACTIVATIONS, activated, gated
from infer.ops.attention import ring_attention, ring_span, softmax_attention, span_attention
from infer.ops.linear import Linear
from infer.ops.norm import LayerNorm, RMSNorm, ZeroCentredRMSNorm
from infer.ops.parts import ACTIVATION_CODES
from infer.ops.quantized import QuantizedWeight
from infer.ops.rope import apply_rope

needs_kernels = pytest.mark.skipif(kernels.cpu() is None, reason="numba is not installed, or INFER_KERNELS=0")
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
}
FORMS = [*DTYPES, "int8", "int4", "int4 in bfloat16"]  # of weights: quantised ones in float32, or as said
LENGTH = 75  # tokens: more than a window, a chunk of 64 and what any product or kernel takes at once
SHORTER = 27  # where every operation is called by itself


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "cpu", lambda: None)


def make_model(name: str, form: str) -> Decoder:
    weights, _, dtype = form.partition(" in ") if " in " in form else (form, "", form)
    model = make_tiny_model(seed=1, dtype=DTYPES.get(dtype, torch.float32), **MODELS[name])
    if weights in ("int8", "int4"):
        for module in model.modules():
            if isinstance(module, Linear):
                module.weight = QuantizedWeight.of(module.weight.float(), int(weights[-1]))
    model.exact = True
    return model


def tokens(model: Decoder, length: int = LENGTH, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, model.config.vocab_size, (1, length), generator=generator)


def make_cache(cls: Any, model: Decoder, stored: Any = None, **options: Any) -> Cache:
    dtype = stored or model.dtype
    return cls.from_model_config(model.config, 96, dtype=dtype, device="cpu", **options)


def feed(model: Decoder, ids: Tensor, cache: Cache, chunk: int = LENGTH) -> Tensor:
    """Logits [n, V] at each of ids [1, n], which are fed in chunks."""
    parts = [model(part, kv_cache=cache, all_logits=True)[0] for part in ids.split(chunk, 1)]
    return torch.cat(parts)


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
    assert all(row.sum(-1).sub(1).abs().max() < 1e-2 for row in cache.rows.values())
    return logits


def among_others(model: Decoder, ids: Tensor, new: Callable[[], Cache]) -> Tensor:
    """The last tokens with neighbours: rows of other lengths, and so many that torch would multiply otherwise."""
    n = ids.shape[1]
    cache, others = new(), [new() for _ in range(8)]
    first = feed(model, ids[:, : n - 6], cache)
    for i, other in enumerate(others[1:]):  # the first one is empty
        model(tokens(model, (1, 2, 19)[i % 3], seed=i), kv_cache=other)
    together = BatchCache([*others[:3], cache, *others[3:]])
    last = []
    for i in range(n - 6, n, 2):  # two tokens a row, and one
        rows = torch.randint(0, model.config.vocab_size, (9, 2), generator=torch.Generator().manual_seed(i))
        rows[3] = ids[0, i : i + 2]
        if i == n - 2:
            last += [model(rows[:, j : j + 1], kv_cache=together, all_logits=True)[3] for j in range(2)]
        else:
            last.append(model(rows, kv_cache=together, all_logits=True)[3])
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


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", MODELS)
def test_the_same_bits_whatever_the_path(name: str, form: str) -> None:
    model = make_model(name, form)
    length = LENGTH if model.dtype is torch.float32 else SHORTER
    ids = tokens(model, length)
    expected = model(ids)[0]
    assert expected.isfinite().all()
    assert expected.std() > 0.1
    check(model, ids, float_caches(model), expected)
    for start in range(1, length, 20):
        assert torch.equal(model(ids[:, :start])[0], expected[:start])
    batch = torch.cat([tokens(model, length, seed=i) for i in range(1, 5)] + [ids, ids])
    assert torch.equal(model(batch)[4:], expected.expand(2, -1, -1))
    cache = make_cache(KVCache, model, batch_size=6)
    assert torch.equal(model(batch, kv_cache=cache)[4:, 0], expected[-1:].expand(2, -1))


@pytest.mark.parametrize("form", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "gpt2"])
def test_caches_of_8_bits_among_themselves(name: str, form: str) -> None:
    model = make_model(name, form)
    ids = tokens(model, LENGTH if model.dtype is torch.float32 else SHORTER)
    caches = {cls.__name__: partial(make_cache, cls, model, "int8") for cls in CACHES}
    expected = feed(model, ids, make_cache(KVCache, model, "int8"))
    check(model, ids, caches, expected)
    rounding = model(ids, kv_cache=RoundingNoCache(), all_logits=True)[0]
    torch.testing.assert_close(expected, rounding, atol=0.3, rtol=0.1)


@pytest.mark.usefixtures("no_kernels")
@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("odd llama", "float32"),
        ("odd llama", "float16"),
        ("qwen3", "int4"),
        ("gemma3", "float32"),
        ("gemma3", "bfloat16"),
        ("nanogpt", "float32"),
    ],
)
def test_without_kernels(name: str, form: str) -> None:
    model = make_model(name, form)
    ids = tokens(model, 14)
    check(model, ids, {"SlidingCache": partial(make_cache, SlidingCache, model)}, model(ids)[0])
    if model.config.computed_head_dim % 2 == 0:
        stored = partial(make_cache, KVCache, model, "int8")
        check(model, ids, {"int8": stored}, feed(model, ids, stored()))


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("kernels_there", [True, False], ids=["kernels", "torch"])
@pytest.mark.parametrize("form", ["float32", "bfloat16", "int4"])
def test_any_number_of_threads(
    form: str, kernels_there: bool, threads: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not kernels_there:
        monkeypatch.setattr(kernels, "cpu", lambda: None)
    # Large enough that torch shares the work.
    model = make_tiny_model(dtype=DTYPES.get(form, torch.float32), hidden_size=512, head_dim=64, intermediate_size=1536)
    model.exact = True
    ids, results = tokens(model, 20), []
    for count in (1, 2, 3):
        threads(count)
        results.append(torch.cat((model(ids)[0], feed(model, ids, make_cache(KVCache, model), 7))))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def digests() -> str:
    """What the logits of some models are, in short."""
    lines = []
    with torch.inference_mode():
        for name in ("llama", "gemma3", "gpt2"):
            for form in ("float32", "bfloat16", "int4"):
                model = make_model(name, form)
                logits = model(tokens(model)).float().contiguous()
                lines.append(hashlib.sha256(logits.numpy().tobytes()).hexdigest())
    return "\n".join(lines)


def test_another_process() -> None:
    """With another number of threads."""
    here = Path(__file__).parent
    other = 1 if torch.get_num_threads() > 1 else 2
    program = f"import torch; torch.set_num_threads({other}); import test_exact; print(test_exact.digests())"
    path = os.pathsep.join([str(here), str(here.parent), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": str(other)}
    run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == digests()


@needs_kernels
@pytest.mark.parametrize("name", MODELS)
def test_modules_somebody_looks_into(name: str) -> None:
    """A hook keeps the kernels of blocks away; those of single operations give the same bits."""
    model = make_model(name, "float32")
    ids = tokens(model)
    expected = model(ids)[0]
    seen = []
    for module in model.modules():
        if isinstance(module, Linear):
            module.register_forward_hook(lambda *_: seen.append(1))
    assert torch.equal(model(ids)[0], expected)
    assert torch.equal(feed(model, ids, make_cache(KVCache, model), 1), expected)
    assert len(seen) >= 4


@needs_kernels
def test_nothing_is_changed_by_asking_for_it() -> None:
    """A decode step takes the same way in both modes, and gives the same bits."""
    model = make_model("llama", "float32")
    ids = tokens(model)
    with exact.mode(False):
        normal = feed(model, ids, make_cache(KVCache, model), 1)
    assert torch.equal(normal, feed(model, ids, make_cache(KVCache, model), 1))


def close_to(dtype: torch.dtype) -> dict[str, float]:
    digits = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    return {"atol": digits, "rtol": digits}


@pytest.mark.parametrize("name", MODELS)
@any_dtype
def test_the_same_model_as_in_normal_mode(name: str, dtype: torch.dtype) -> None:
    model = make_model(name, str(dtype).removeprefix("torch."))
    ids = tokens(model)
    got = model(ids).float()
    with exact.mode(False):
        expected = model.float()(ids)
    scale = expected.std().item()
    assert (got - expected).abs().mean() < 20 * scale * close_to(dtype)["atol"]


# Single operations

SHAPES = [(1, 1), (3, 2), (5, 7), (16, 8), (17, 9), (33, 64), (64, 95), (70, 576)]  # rows and columns of a weight


@any_dtype
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_products(rows: int, columns: int, bias: bool, dtype: torch.dtype) -> None:
    weight, offset = torch.randn(rows, columns).to(dtype), torch.randn(rows).to(dtype) if bias else None
    x = (torch.randn(70, columns) * columns**-0.5).to(dtype)
    whole = exact.linear(x, weight, offset)
    expected = F.linear(x.double(), weight.double(), None if offset is None else offset.double())
    torch.testing.assert_close(whole.double(), expected, **close_to(dtype))
    for count in (1, 2, 3, 4, 5, 8, 16, 23, 64):
        for start in (0, 1, 6):
            assert torch.equal(exact.linear(x[start : start + count], weight, offset), whole[start : start + count])


@needs_kernels
@any_dtype
def test_weights_of_a_product_are_read_as_they_are(dtype: torch.dtype) -> None:
    """All numbers of 16 bits, the smallest and infinite ones too."""
    values = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16 if dtype.itemsize > 2 else dtype)
    values = values.to(dtype)[:, None]
    got = exact.linear(torch.ones(1, 1, dtype=dtype), values, None)[0]
    assert torch.equal(got.nan_to_num(0.25), (values[:, 0] + 0.0).nan_to_num(0.25))


@any_dtype
@pytest.mark.parametrize("size", [1, 3, 4, 10, 64, 577])
@pytest.mark.parametrize("kind", [RMSNorm, ZeroCentredRMSNorm, LayerNorm, partial(LayerNorm, bias=False)])
def test_norms(kind: Any, size: int, dtype: torch.dtype) -> None:
    norm = kind(size, 1e-5).requires_grad_(False).to(dtype)
    for parameter in norm.parameters():
        parameter.copy_(torch.randn(size))
    x = torch.randn(2, 3, 17, size).to(dtype)
    expected = norm(x)
    with exact.mode(True):
        whole = norm(x)
        assert all(torch.equal(norm(x[:, :, i : i + 1]), whole[:, :, i : i + 1]) for i in range(17))
        assert torch.equal(norm(x.transpose(1, 2)), whole.transpose(1, 2))
    torch.testing.assert_close(whole, expected, **close_to(dtype))


@any_dtype
@pytest.mark.parametrize("inner", [1, 6, 45, 64])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation: str, inner: int, dtype: torch.dtype) -> None:
    x = (torch.randn(19, 2 * inner) * 4).to(dtype)
    for function in (partial(gated, activation=activation), partial(activated, activation=activation)):
        expected = function(x)
        with exact.mode(True):
            whole = function(x)
            assert all(torch.equal(function(x[i : i + 3]), whole[i : i + 3]) for i in range(17))
        torch.testing.assert_close(whole, expected, **close_to(dtype))


def test_every_activation_has_a_kernel() -> None:
    assert set(ACTIVATIONS) == set(ACTIVATION_CODES)


@any_dtype
@pytest.mark.parametrize("window", [None, 1, 5, 40])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 8), (3, 1, 7), (2, 2, 2), (1, 1, 64)])
def test_attention(heads: int, kv_heads: int, head_dim: int, window: int | None, dtype: torch.dtype) -> None:
    keys = 40
    q = torch.randn(2, keys, heads, head_dim).to(dtype).transpose(1, 2)
    k, v = (torch.randn(2, keys, kv_heads, head_dim).to(dtype).transpose(1, 2) for _ in range(2))
    expected, _ = softmax_attention(q, k, v, scale=0.3, window=window)
    with exact.mode(True):
        attend = partial(span_attention, scale=0.3, window=window, masks={})
        whole = attend(q, k, v)
        for start, end in [(0, 1), (0, 7), (1, 2), (7, 30), (39, 40), (5, 40)]:
            part = attend(q[:, :, start:end], k[:, :, :end], v[:, :, :end])
            assert torch.equal(part, whole[:, :, start:end])
            first = 0 if window is None else max(0, start - window + 1)
            cut = attend(q[:, :, start:end], k[:, :, first:end].contiguous(), v[:, :, first:end].contiguous(), end=end)
            assert torch.equal(cut, part)
            assert torch.equal(attend(q[1:, :, start:end], k[1:, :, :end], v[1:, :, :end]), part[1:])
    torch.testing.assert_close(whole, expected, **close_to(dtype))


@pytest.mark.parametrize("head_dim", [6, 7, 8])
def test_rings_are_read_as_spans(head_dim: int) -> None:
    """In the kernels of a decode step, which walk around a ring, and in exact attention."""
    slots = 13
    q = torch.randn(1, 4, 1, head_dim)
    k, v = (torch.randn(1, 2, slots, head_dim) for _ in range(2))
    for first in range(slots):
        for count in range(1, slots + 1):
            keys, values = ring_span(k, first, first + count), ring_span(v, first, first + count)
            expected = exact.attend(q, keys, values, scale=0.3, window=None)
            with exact.mode(True):
                assert torch.equal(ring_attention(q, k, v, first, first + count, scale=0.3), expected)
            if compiled.can_attend(q, k, v):
                assert torch.equal(compiled.attend(q, k, v, 0.3, first, count), expected)


@any_dtype
def test_rotation(dtype: torch.dtype) -> None:
    x = torch.randn(1, 3, 29, 10).to(dtype)
    cos, sin = torch.randn(1, 1, 29, 10), torch.randn(1, 1, 29, 10)
    expected = apply_rope(x, cos, sin)
    with exact.mode(True):
        whole = apply_rope(x, cos, sin)
        for i in range(29):
            part = slice(i, i + 1)
            assert torch.equal(apply_rope(x[:, :, part], cos[:, :, part], sin[:, :, part]), whole[:, :, part])
    torch.testing.assert_close(whole, expected, **close_to(dtype))


# What is asked for, and what is refused


def test_the_mode_asked_for() -> None:
    assert not exact.wanted()
    assert exact.resolve(True)
    assert not exact.resolve(False)
    with exact.mode(True):
        assert exact.wanted()
        with exact.mode(False):
            assert not exact.wanted()
            assert not exact.resolve(True)
        with exact.mode(None):
            assert exact.resolve(True)
        assert exact.resolve(False)
    assert not exact.wanted()
    with pytest.raises(KeyError), exact.mode(True):
        raise KeyError
    assert not exact.wanted()


def test_a_model_is_exact_if_loaded_so_or_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen = make_model("llama", "float32"), []
    monkeypatch.setattr(model, "embed", lambda *args: (seen.append(exact.wanted()), Decoder.embed(model, *args))[1])
    for own, asked in [(True, None), (False, None), (True, False), (False, True)]:
        model.exact = own
        with exact.mode(asked):
            model(tokens(model, 3))
    assert seen == [True, False, False, True]
    assert not exact.wanted()


def test_gradients_and_dropout_are_refused() -> None:
    model = make_model("gpt2", "float32")
    ids = tokens(model, 3)
    with torch.inference_mode(False), torch.enable_grad():
        assert not make_model("gpt2", "float32")(ids.clone()).requires_grad
        model = make_model("gpt2", "float32").requires_grad_(True)
        with pytest.raises(ValueError, match=r"no gradients: run the model under torch\.no_grad"):
            model(ids)
        with torch.no_grad():
            model(ids)
    dropping = make_tiny_model(model_type="gpt2", dropout=0.5).train()
    dropping.exact = True
    with pytest.raises(ValueError, match=r"training mode, and drops out at random: call model\.eval"):
        dropping(ids)
    dropping.eval()(ids)


# These tests can fail: where one operation looks at how many rows there are, the comparison above says so.


def linear_by_count(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Columns from the last to the first, where there is more than one row."""
    order = 1 if len(x) == 1 else -1
    parts = x.unflatten(1, (-1, 2))[:, None].float() * weight.unflatten(1, (-1, 2))[None].float()
    total = torch.zeros(len(x), len(weight), dtype=x.dtype)
    for i in range(parts.shape[2])[::order]:
        total += parts[:, :, i].sum(-1)
    return (total if bias is None else total + bias).to(x.dtype)


def norm_by_count(x: Tensor, norm: Any, plain: Callable[[Tensor], Tensor]) -> Tensor:
    """One digit less where there is more than one row."""
    out = plain(x)
    return out if x.numel() == x.shape[-1] else (out.double() * (1 + 1e-7)).to(x.dtype)


def attention_by_count(q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None) -> Tensor:
    """From the last key to the first, for more than one query: they then see the same in another order."""
    if q.shape[2] == 1:
        return softmax_attention(q, k, v, scale=scale, window=window)[0]
    rows = [
        softmax_attention(q[:, :, i : i + 1], k[:, :, :end].flip(2), v[:, :, :end].flip(2), scale=scale, window=None)[0]
        for i, end in enumerate(range(k.shape[2] - q.shape[2] + 1, k.shape[2] + 1))
    ]
    return torch.cat(rows, 2)


@pytest.mark.parametrize(
    ("name", "mutant", "form"),
    [
        ("linear", linear_by_count, "bfloat16"),
        ("linear", linear_by_count, "float16"),
        ("norm", norm_by_count, "float32"),
        ("attend", attention_by_count, "float32"),
    ],
)
@pytest.mark.usefixtures("no_kernels")
def test_an_operation_that_looks_at_the_batch_is_found(
    name: str, mutant: Any, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model("llama", form)
    ids = tokens(model, 14)
    caches = {"KVCache": partial(make_cache, KVCache, model)}
    check(model, ids, caches, model(ids)[0])
    monkeypatch.setattr(exact, name, mutant)
    with pytest.raises(AssertionError, match=r"KVCache .*: position \[\d+\] differs"):
        check(model, ids, caches, model(ids)[0])
