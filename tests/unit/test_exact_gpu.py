"""The Triton kernels of exact mode: a token gets the same bits in a step, in a prompt, in chunks, and in a batch.

Where there is no GPU they run in Triton's interpreter, where a matrix product adds up its columns in order, as the
matrix units of a GPU do; that these do, and that the kernels compile, tests/integration/test_gpu_exact.py shows.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton", reason="needs Triton, which is there on Linux alone")

from triton.runtime import interpreter  # noqa: E402

from infer import kernels  # noqa: E402
from infer.cache.base import BaseCache, Cache, NoCache  # noqa: E402
from infer.cache.growing import GrowingCache  # noqa: E402
from infer.cache.simple import KVCache  # noqa: E402
from infer.cache.sliding import SlidingCache  # noqa: E402
from infer.models.common import Block, Decoder  # noqa: E402
from infer.ops import exact_gpu, fused, gpu_product  # noqa: E402
from infer.ops.activation import ACTIVATIONS  # noqa: E402
from infer.ops.linear import Linear  # noqa: E402
from infer.ops.norm import RMSNorm  # noqa: E402
from infer.ops.parts import HeadParts  # noqa: E402
from infer.ops.table import Table  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = pytest.mark.skipif(
    DEVICE.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1", reason="needs a GPU, or TRITON_INTERPRET=1"
)
BLOCK, GROUPS = 16, 2  # small, so that few keys are several groups of several blocks
# Triton's interpreter multiplies matrices of bfloat16 as if they were integers.
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE.type == "cuda" else [])]
EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)
TOLERANCES = {torch.float32: (1e-4, 1e-4), torch.float16: (4e-3, 4e-3), torch.bfloat16: (3e-2, 3e-2)}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact_gpu, "BLOCK", {2: BLOCK, 4: BLOCK})
    monkeypatch.setattr(exact_gpu, "QUERIES", {2: 64, 4: 64})
    monkeypatch.setattr(exact_gpu, "GROUPS", GROUPS)
    monkeypatch.setattr(exact_gpu, "FEW", 4)
    monkeypatch.setattr(exact_gpu, "COLUMNS", {2: 32, 4: 32})
    if DEVICE.type == "cpu":  # what is compiled must not change
        monkeypatch.setattr(kernels.gpu_modules().exact, "FOLDED", triton.language.constexpr(2))
    monkeypatch.setattr("infer.ops.compiled.available", lambda *_: False)
    monkeypatch.setattr("infer.ops.rowwise.can_attend", lambda *_: False)


@pytest.fixture(autouse=True)
def in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """numpy adds up the columns of a product in an order that depends on how many rows there are."""

    def dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        left, right = a.data.T.astype(np.float32)[:, :, None], b.data.astype(np.float32)[:, None, :]
        terms = np.ascontiguousarray(np.concatenate((d.data[None], left * right)))  # else numpy adds them up in pairs
        return interpreter.TensorHandle(np.add.reduce(terms), d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the kernels are to write is NaN before, so that whatever they leave out, or read too early, shows."""

    def empty(*shape: int, dtype: torch.dtype, **options: Any) -> Tensor:
        return torch.full(shape, torch.nan if dtype.is_floating_point else -1, dtype=dtype, **options)

    changed = {"empty": empty, "empty_like": lambda x: torch.full_like(x, torch.nan)}
    for module in (fused, exact_gpu):
        monkeypatch.setattr(module, "torch", SimpleNamespace(**vars(torch) | changed))


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def random(generator: torch.Generator, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def same(got: Tensor, expected: Tensor) -> None:
    """The very same bits, but for the sign of a zero; and numbers."""
    assert not expected.isnan().any()
    torch.testing.assert_close(got, expected, atol=0, rtol=0)


def close(got: Tensor, expected: Tensor) -> None:
    atol, rtol = TOLERANCES[got.dtype]
    torch.testing.assert_close(got, expected, atol=atol, rtol=rtol)


# K, N, activation, gated, bias, residual
PRODUCTS = [
    (77, 5, "", False, False, False),
    (50, 70, "silu", True, False, False),
    (40, 3, "gelu_tanh", True, True, False),
    (33, 66, "gelu", False, True, False),
    (24, 66, "", False, False, True),  # all columns at once
    (1030, 66, "", False, True, True),  # in two parts, and nothing divides it
    (2048, 64, "", False, False, True),  # in four parts, evenly
]


class TestProducts:
    @pytest.fixture(params=PRODUCTS, ids=str)
    def case(self, request: pytest.FixtureRequest, generator: torch.Generator) -> Any:
        k, n, activation, gated, bias, residual = request.param
        linear = Linear(k, n * (2 if gated else 1), bias=bias).requires_grad_(False).to(DEVICE)
        for parameter in linear.parameters():
            parameter.copy_(random(generator, torch.float32, *parameter.shape) * 0.3)
        x, added = random(generator, torch.float32, 9, k), random(generator, torch.float32, 9, n)
        return linear, x, added if residual else None, activation, gated

    def product(self, case: Any, rows: Sequence[int]) -> Tensor:
        linear, x, added, activation, gated = case
        picked = None if added is None else added[rows]
        return exact_gpu.product(linear, x[rows], residual=picked, activation=activation, gated=gated)

    def test_few_rows_and_many_give_the_same(self, case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        everything = list(range(9))
        many = self.product(case, everything)
        linear, x, added, activation, gated = case
        y = linear(x)
        if activation:
            first, *second = y.chunk(2, -1) if gated else (y,)
            y = ACTIVATIONS[activation](first) * (second[0] if gated else 1)
        torch.testing.assert_close(many, y if added is None else y + added, atol=1e-3, rtol=1e-4)
        monkeypatch.setattr(exact_gpu, "FEW", 9)
        same(self.product(case, everything), many)
        for row in (0, 8):
            same(self.product(case, [row]), many[row : row + 1])
        same(self.product(case, [8, 2, 2]), many[[8, 2, 2]])

    def test_the_number_of_parts_depends_on_the_matrix_alone(self) -> None:
        assert [gpu_product.splits_of(-(-n // 64), k, False) for k, n in ((1030, 66), (2048, 64))] == [2, 4]

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
    def test_many_rows_are_never_of_a_single_round(self, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
        """Compiled, that is no loop, and the residual goes into the product: other bits, which only a GPU shows."""
        launched: list[dict[str, Any]] = []

        class Kernel:
            def __getitem__(self, grid: Any) -> Callable[..., None]:
                return lambda *_, **constants: launched.append(constants)

        modules = SimpleNamespace(exact=SimpleNamespace(many_rows=Kernel()))
        monkeypatch.setattr("infer.kernels.gpu_modules", lambda: modules)
        for k in (1, 24, 32, 33, 64, 128, 4096):
            linear, x = Linear(k, 8).to(DEVICE, dtype), torch.zeros(9, k, dtype=dtype, device=DEVICE)
            exact_gpu.product(linear, x, residual=x)
            used = launched.pop()
            assert used["PART"] % used["BLOCK_K"] == 0
            assert used["PART"] >= 2 * used["BLOCK_K"]
            assert used["PART"] * used["SPLIT"] >= k
            assert used["BLOCK_K"] >= 16  # what a product of matrices takes at least

    def test_no_rows(self, case: Any) -> None:
        assert self.product(case, []).shape[0] == 0


class Attention:
    """Queries, keys and values of all positions, and what each should give."""

    def __init__(
        self,
        generator: torch.Generator,
        dtype: torch.dtype = torch.float32,
        positions: int = 2 * BLOCK * GROUPS + 5,  # three blocks to a group by then
        *,
        batch: int = 1,
        heads: int = 3,
        kv_heads: int = 1,
        head_dim: int = 20,
        window: int | None = None,
    ) -> None:
        self.window, self.positions = window, positions
        self.q = random(generator, dtype, batch, heads, positions, head_dim)
        self.k, self.v = (random(generator, dtype, batch, kv_heads, positions, head_dim) for _ in range(2))

    def attend(self, start: int, end: int, k: Tensor | None = None, v: Tensor | None = None) -> Tensor:
        k, v = self.k[:, :, :end] if k is None else k, self.v[:, :, :end] if v is None else v
        return exact_gpu.attend(self.q[:, :, start:end], k, v, scale=0.4, window=self.window, end=end)

    def expected(self) -> Tensor:
        groups = self.q.shape[1] // self.k.shape[1]
        k, v = (each.float().repeat_interleave(groups, 1) for each in (self.k, self.v))
        at = torch.arange(self.positions, device=DEVICE)
        distance = at[:, None] - at
        seen = (distance >= 0) & (distance < (self.window or self.positions))
        scores = (self.q.float() @ k.transpose(2, 3) * 0.4).masked_fill(~seen, -torch.inf)
        return (scores.softmax(-1) @ v).to(self.q.dtype)


SHAPES: list[dict[str, Any]] = [
    {},
    {"window": BLOCK + 3},
    {"window": 3 * BLOCK, "heads": 2, "kv_heads": 2, "head_dim": 8},
    {"window": 1},
    {"heads": 4, "kv_heads": 2, "head_dim": 33, "batch": 2},
]
EVERY_SHAPE = pytest.mark.parametrize("options", SHAPES, ids=str)


class TestAttention:
    @EVERY_SHAPE
    @EVERY_DTYPE
    def test_a_prompt(self, options: dict[str, Any], dtype: torch.dtype, generator: torch.Generator) -> None:
        case = Attention(generator, dtype, **options)
        close(case.attend(0, case.positions), case.expected())

    @pytest.mark.parametrize(("options", "programs"), [*zip(SHAPES, [2, 1, 3, 100, 100], strict=True)], ids=str)
    def test_each_query_alone(
        self,
        options: dict[str, Any],
        programs: int,
        generator: torch.Generator,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """At the edges of blocks and groups, and elsewhere; by however many programs share its keys."""
        monkeypatch.setattr(exact_gpu, "BUSY", programs)
        case = Attention(generator, **options)
        whole = case.attend(0, case.positions)
        for at in (0, *(edge + d for edge in (BLOCK, BLOCK * GROUPS, 2 * BLOCK * GROUPS) for d in (-1, 0)), 68):
            same(case.attend(at, at + 1), whole[:, :, at : at + 1])

    @EVERY_SHAPE
    def test_chunks(self, options: dict[str, Any], generator: torch.Generator) -> None:
        case = Attention(generator, **options)
        cuts = [0, 7, 9, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 2, case.positions]
        chunks = [case.attend(start, end) for start, end in pairwise(cuts)]
        same(torch.cat(chunks, 2), case.attend(0, case.positions))

    def test_in_16_bits(self, generator: torch.Generator) -> None:
        case = Attention(generator, torch.float16)
        whole = case.attend(0, case.positions)
        for at in (0, BLOCK, case.positions - 1):
            same(case.attend(at, at + 1), whole[:, :, at : at + 1])
        same(case.attend(40, 60), whole[:, :, 40:60])

    @pytest.mark.parametrize("n", [1, 9])
    def test_keys_that_nobody_sees_may_be_left_out(self, n: int, generator: torch.Generator) -> None:
        case = Attention(generator, window=BLOCK + 3)
        end = 66
        first = end - n - case.window + 1
        got = case.attend(end - n, end, case.k[:, :, first:end], case.v[:, :, first:end])
        same(got, case.attend(0, case.positions)[:, :, end - n : end])

    def test_what_comes_later_is_not_looked_at(self, generator: torch.Generator) -> None:
        """Nor what lies before a window."""
        case = Attention(generator, window=BLOCK + 3)
        whole = case.attend(0, case.positions)
        for each in (case.k, case.v):
            each[:, :, 61:] = torch.nan
            each[:, :, : 60 - case.window + 1] = torch.nan
        same(case.attend(60, 61), whole[:, :, 60:61])

    def test_however_they_lie(self, generator: torch.Generator) -> None:
        """Heads beside each other, as products leave them."""
        case = Attention(generator, heads=4, kv_heads=2)
        whole = case.attend(0, case.positions)
        for name in "qkv":
            setattr(case, name, getattr(case, name).transpose(1, 2).contiguous().transpose(1, 2))
        same(case.attend(0, case.positions), whole)
        same(case.attend(33, 34), whole[:, :, 33:34])


def plan_of(model: Decoder) -> fused.Plan:
    parts = model.parts()
    assert parts is not None
    frequencies = {kind: rope.inv_freq for kind, rope in model.ropes.items()}
    plan = fused.plan(*parts, [frequencies.get(kind) for kind in model.config.layer_types])
    assert plan is not None
    return plan


class Kernels:
    """A model's passes through the kernels, as the model itself makes them on a GPU."""

    def __init__(self, model: Decoder, kind: type[BaseCache]) -> None:
        self.model, self.kind = model, kind

    def __call__(self, tokens: Tensor, cache: Cache) -> Tensor:
        """[B, n] -> logits [B, n, V], in two parts around the cache."""
        model, (batch, n) = self.model, tokens.shape
        positions = cache.positions(n)
        x = model.embed(tokens.flatten(), positions.flatten()).to(model.dtype)
        at = positions.flatten().to(torch.int32)
        turned = {kind: exact_gpu.turns(rope.inv_freq, at) for kind, rope in model.ropes.items()}
        for block in model.layers:
            assert isinstance(block, Block)
            plan = exact_gpu.plan_block(block.parts())
            attn = block.self_attn
            parts = exact_gpu.before_attention(plan, x, at, turned.get(attn.layer_type))
            q, k, v = (each.view(batch, n, -1, attn.head_dim).transpose(1, 2) for each in parts)
            keys, values = cache.update(attn.layer_idx, k, v)
            end = cache.seq_len + n
            out = exact_gpu.attend(q, keys, values, scale=attn.scale, window=attn.window, end=end)
            x = exact_gpu.behind_attention(plan, out.transpose(1, 2).reshape(batch * n, -1), x)
        cache.advance(n)
        plan = exact_gpu.plan_head(HeadParts(model.norm, model.lm_head))
        return exact_gpu.head(plan, x).view(batch, n, -1)

    def step(self, tokens: Sequence[int], caches: Sequence[Any]) -> Tensor:
        """One token a row -> [B, V], in one go."""
        model = self.model
        positions = torch.tensor([cache.seq_len for cache in caches], device=DEVICE)
        x = model.embed(torch.tensor(tokens, device=DEVICE), positions).to(model.dtype)
        tables = np.concatenate([Table(list(cache.k), list(cache.v)).at(cache.seq_len) for cache in caches], 1)
        logits = exact_gpu.step(plan_of(model), x, tables)
        for cache in caches:
            cache.advance(1)
        return logits

    def cache(self) -> Any:
        options = {"prefill_chunk": 3} if self.kind is SlidingCache else {}
        model = self.model
        return self.kind.from_model_config(model.config, 32, dtype=model.dtype, device=DEVICE, **options)


LENGTH = BLOCK + 4
CASES = [
    ("llama", torch.float32, GrowingCache),
    ("qwen3", torch.float32, KVCache),
    ("gemma3", torch.float32, SlidingCache),
    ("llama", torch.float16, KVCache),
    ("gpt2", torch.float32, KVCache),
    ("rope_gpt", torch.float32, GrowingCache),
]


class TestModels:
    @pytest.fixture(params=CASES, ids=str)
    def kernels(self, request: pytest.FixtureRequest, tiny_model: Callable[..., Decoder]) -> Kernels:
        family, dtype, kind = request.param
        layers = 2 if family == "gemma3" else 1
        sizes = {"hidden_size": 24, "intermediate_size": 13, "vocab_size": 19}
        model = tiny_model(model_type=family, dtype=dtype, num_hidden_layers=layers, **sizes).to(DEVICE)
        return Kernels(model, kind)

    @pytest.fixture
    def tokens(self, generator: torch.Generator) -> Tensor:
        return torch.randint(19, (1, LENGTH), generator=generator).to(DEVICE)

    @torch.inference_mode()
    def test_every_way_to_the_same_logits(self, kernels: Kernels, tokens: Tensor) -> None:
        whole = kernels(tokens, NoCache(1, DEVICE))
        if kernels.model.dtype is torch.float32:
            torch.testing.assert_close(whole, kernels.model(tokens), atol=1e-3, rtol=1e-3)
        cache = kernels.cache()
        chunks = [kernels(tokens[:, start:end], cache) for start, end in pairwise([0, 3, 4, LENGTH - 2])]
        same(torch.cat(chunks, 1), whole[:, : LENGTH - 2])
        if kernels.kind is not GrowingCache:  # it has no table
            same(kernels.step(tokens[0, -2:-1].tolist(), [cache]), whole[:, -2])
            cache.truncate(LENGTH - 2)
        same(kernels(tokens[:, -2:-1], cache)[:, 0], whole[:, -2])
        same(kernels(tokens[:, -1:], cache)[:, 0], whole[:, -1])

    @torch.inference_mode()
    def test_neighbours(self, kernels: Kernels, tokens: Tensor) -> None:
        """Of other lengths, in a step; of other tokens, in a prompt."""
        whole = kernels(tokens, NoCache(1, DEVICE))
        others = torch.cat((tokens.flip(1), tokens))
        same(kernels(others, NoCache(2, DEVICE))[1:2], whole)
        if kernels.kind is GrowingCache:
            return
        lengths = [LENGTH - 1, 1, 3, 2, 1]  # more than `FEW`
        caches = [kernels.cache() for _ in lengths]
        for length, cache in zip(lengths, caches, strict=True):
            kernels(tokens[:, :length], cache)
        same(kernels.step([int(tokens[0, length]) for length in lengths], caches), whole[0, lengths])

    @torch.inference_mode()
    def test_rows_without_a_token_are_left_alone(self, kernels: Kernels) -> None:
        model, cache = (
            kernels.model,
            KVCache.from_model_config(kernels.model.config, 8, dtype=kernels.model.dtype, device=DEVICE),
        )
        expected = kernels(torch.tensor([[3]], device=DEVICE), NoCache(1, DEVICE))[0]
        plan = plan_of(model)
        tables = np.zeros((len(plan.blocks), 3, 6), np.int64)
        tables[:, 1:2] = Table(list(cache.k), list(cache.v)).at(0)
        positions = torch.tensor([-1, 0, -1], dtype=torch.int32, device=DEVICE)
        x = model.embed(torch.tensor([1, 3, 5], device=DEVICE), positions.clamp(min=0)).to(model.dtype)
        finished = fused.counters(plan, 3)
        for _ in range(2):
            got = exact_gpu.launch(plan, x, torch.from_numpy(tables).to(DEVICE), positions, finished)
            same(got[1:2], expected)
            assert not finished.any()


@pytest.mark.parametrize("offset", [0, 1])
def test_a_norm_does_not_depend_on_where_a_row_lies(offset: int, generator: torch.Generator) -> None:
    norm = RMSNorm(33, 1e-5).requires_grad_(False).to(DEVICE)
    x = random(generator, torch.float32, 5 * 33 + offset)[offset:].view(5, 33)
    got, _ = exact_gpu._normed(x, norm, False)
    close(got, norm(x))
    same(exact_gpu._normed(x[3:4], norm, False)[0], got[3:4])
    assert exact_gpu._aligned(x[1:]).data_ptr() % 16 == 0


def test_a_mutant_is_found(generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where blocks of keys, or parts of a matrix, depend on how many queries or rows there are, bits differ."""
    case = Attention(generator)
    whole = case.attend(0, case.positions)
    monkeypatch.setattr(exact_gpu, "BLOCK", {2: 2 * BLOCK, 4: 2 * BLOCK})
    assert not torch.equal(case.attend(case.positions - 1, case.positions), whole[:, :, -1:])
    linear, x = Linear(2048, 8).requires_grad_(False).to(DEVICE), random(generator, torch.float32, 9, 2048)
    linear.weight.copy_(random(generator, torch.float32, 8, 2048))
    many = exact_gpu.product(linear, x)
    monkeypatch.setattr(gpu_product, "splits_of", lambda *_: 1)
    assert not torch.equal(exact_gpu.product(linear, x[:1]), many[:1])
