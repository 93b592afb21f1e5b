"""The Triton kernels: a token gets the same bits in a step, in a prompt, in chunks, and in a batch.

Where there is no GPU they run in Triton's interpreter, with products that add up as matrix units do. That a GPU's do,
and that the kernels compile, tests/integration/test_gpu.py shows.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from amount import amount
from torch import Tensor

triton = pytest.importorskip("triton", reason="needs Triton, which is there on Linux alone")

from interpreted import hurried, matrix_units, poison  # noqa: E402

from infer.backend.gpu import attention, attention_kernels, device_check, gemm, gemm_kernels, step  # noqa: E402
from infer.backend.gpu.backend import GpuBackend  # noqa: E402
from infer.backend.parts import BlockParts, parts_of  # noqa: E402
from infer.cache.base import BaseCache, Cache, NoCache  # noqa: E402
from infer.cache.contiguous import KVCache  # noqa: E402
from infer.cache.growing import GrowingCache  # noqa: E402
from infer.cache.paged import PagedCache  # noqa: E402
from infer.cache.ring import SlidingCache  # noqa: E402
from infer.cache.table import COLUMNS, Table  # noqa: E402
from infer.models.common import Decoder  # noqa: E402
from infer.models.rows import ALL, LAST, NONE, Row  # noqa: E402
from infer.nn.linear import Linear  # noqa: E402
from infer.nn.norm import LayerNorm, Norm, RMSNorm, ZeroCenteredRMSNorm  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = pytest.mark.skipif(
    DEVICE.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1", reason="needs a GPU, or TRITON_INTERPRET=1"
)
BLOCK, GROUPS = 16, 2  # small, so that few keys are several groups of several blocks
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TOLERANCES = {torch.float32: (1e-4, 1e-4), torch.float16: (4e-3, 4e-3), torch.bfloat16: (3e-2, 3e-2)}


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch, attention, gemm, step)
    if DEVICE.type == "cpu":
        matrix_units(monkeypatch, coarse=True)
        hurried(monkeypatch)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "BLOCK", {2: BLOCK, 4: BLOCK})
    monkeypatch.setattr(attention, "QUERIES", {2: 64, 4: 64})
    monkeypatch.setattr(attention, "GROUPS", GROUPS)
    monkeypatch.setattr(attention, "MAX_PROGRAMS", 8)
    if DEVICE.type == "cpu":  # what is compiled must not change
        monkeypatch.setattr(attention_kernels, "PARTIALS_AT_ONCE", triton.language.constexpr(2))


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def random(generator: torch.Generator, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def randomised(module: Any, generator: torch.Generator, dtype: torch.dtype) -> Any:
    for parameter in module.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = noise / noise.shape[1] ** 0.5 if noise.dim() > 1 else parameter.data + noise * 0.3
    return module.requires_grad_(False).to(DEVICE, dtype)


def same(got: Tensor, expected: Tensor) -> None:
    """The very same bits, but for the sign of a zero; and numbers."""
    assert not expected.isnan().any()
    torch.testing.assert_close(got, expected, atol=0, rtol=0)


def close(got: Tensor, expected: Tensor) -> None:
    atol, rtol = TOLERANCES[got.dtype]
    torch.testing.assert_close(got, expected, atol=atol, rtol=rtol)


class Products:
    """Two products with a norm between them, as in a block: rows -> residual -> norm -> gated product."""

    def __init__(
        self,
        generator: torch.Generator,
        dtype: torch.dtype,
        slices: tuple[int, int],
        rows: int,
        *,
        sizes: tuple[int, int, int] = (256, 64, 16),
        norm: type[Norm] = RMSNorm,
        bias: bool = False,
        after: bool = False,
        activation: str = "silu",
        gated: bool = True,
    ) -> None:
        k, size, n = sizes
        self.first = randomised(Linear(k, size, bias=bias), generator, dtype)
        self.second = randomised(Linear(size, n * (2 if gated else 1), bias=bias), generator, dtype)
        self.first.slices, self.second.slices = slices
        self.norm = randomised(norm(size, 1e-5), generator, dtype)
        self.after = randomised(norm(size, 1e-5), generator, dtype) if after else None
        self.x, self.carried = random(generator, dtype, rows, k), random(generator, dtype, rows, size)
        self.options: dict[str, Any] = {"activation": activation, "gated": gated}
        self.finished = torch.zeros(16, dtype=torch.int32, device=DEVICE)

    def run(self, rows: Sequence[int] | slice) -> tuple[Tensor, Tensor]:
        """The last product, and the residual."""
        residual = gemm.Residual(self.carried[rows])
        residual = gemm.gemm_add(self.first, self.x[rows], residual, self.after, self.norm, self.finished)
        out, residual = gemm.norm_gemm(self.second, residual, self.norm, self.finished, **self.options)
        assert not self.finished.any()
        return out, residual.x

    def check(self, counts: Sequence[int]) -> None:
        """So many of the last rows give what they give among all."""
        many, residual = self.run(slice(None))
        for count in counts:
            out, after = self.run(slice(-count, None))
            same(out, many[-count:])
            same(after, residual[-count:])


CASES: list[tuple[torch.dtype, tuple[int, int], dict[str, Any]]] = [
    (torch.bfloat16, (2, 1), {"bias": True}),
    (torch.bfloat16, (4, 2), {"gated": False, "activation": ""}),
    (torch.bfloat16, (8, 2), {"sizes": (512, 64, 20), "activation": "gelu_tanh"}),
    (torch.bfloat16, (2, 2), {"sizes": (272, 70, 9), "bias": True}),  # nothing divides it
    (torch.bfloat16, (1, 1), {"sizes": (2048, 20, 5), "gated": False, "activation": "gelu"}),  # eight rows a warp
    (torch.bfloat16, (2, 1), {"after": True, "norm": ZeroCenteredRMSNorm}),
    (torch.bfloat16, (1, 2), {"after": True, "sizes": (96, 48, 9)}),
    (torch.bfloat16, (1, 2), {"norm": LayerNorm, "bias": True, "gated": False}),
    (torch.float16, (2, 4), {"sizes": (256, 128, 8)}),
    (torch.float16, (1, 1), {"after": True, "bias": True}),
    (torch.float32, (1, 2), {"sizes": (96, 64, 9)}),
    (torch.float32, (4, 1), {"sizes": (128, 40, 9), "bias": True}),
    (torch.float32, (1, 1), {"sizes": (40, 33, 9), "norm": LayerNorm, "gated": False, "activation": "gelu"}),
]


class TestProducts:
    @pytest.mark.parametrize(("dtype", "slices", "options"), CASES, ids=str)
    @torch.inference_mode()
    def test_any_number_of_rows(
        self,
        dtype: torch.dtype,
        slices: tuple[int, int],
        options: dict[str, Any],
        generator: torch.Generator,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(gemm, "MAX_SMALL_ROWS", 17)
        case = Products(generator, dtype, slices, 18, **options)
        apart = case.run(slice(None))  # the GEMM, then its epilogue
        monkeypatch.setattr(gemm, "FUSED_ROWS", 18)
        for got, expected in zip(case.run(slice(None)), apart, strict=True):
            same(got, expected)
        prepared = gemm.scale_after_gemm(case.norm, dtype) and case.after is None
        counts = amount([1, 2, 8, 9, 16, 17], [1, 8, 9, 17]) if prepared else [1, 2, 9]
        case.check(counts)  # the interpreter takes long for norms

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @torch.inference_mode()
    def test_around_what_few_rows_are(self, dtype: torch.dtype, generator: torch.Generator) -> None:
        assert gemm.MAX_SMALL_ROWS == 128
        Products(generator, dtype, (2, 1), 129, sizes=(128, 64, 8)).check([1, 128])

    @torch.inference_mode()
    def test_the_same_wherever_a_row_lies(self, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(gemm, "MAX_SMALL_ROWS", 17)
        case = Products(generator, torch.bfloat16, (2, 1), 18, sizes=(64, 32, 5))
        many, _ = case.run(slice(None))
        same(case.run([17, 3, 3])[0], many[[17, 3, 3]])

    @pytest.mark.parametrize("rows", [0, 1, 18])
    @torch.inference_mode()
    def test_a_product_alone(self, rows: int, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
        """Without counters: what a head of a prompt asks for."""
        monkeypatch.setattr(gemm, "MAX_SMALL_ROWS", 17)
        linear = randomised(Linear(64, 9), generator, torch.float16)
        linear.slices = 2
        x = random(generator, torch.float16, rows, 64)
        got, following = gemm.gemm(linear, gemm.GemmInput(x), None)
        assert got.shape == (rows, 9)
        assert following is None
        close(got, linear(x))

    @pytest.mark.parametrize("options", [{}, {"bias": True}, {"after": True}], ids=str)
    @torch.inference_mode()
    def test_slices_apart(
        self, options: dict[str, Any], generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The sums of slices, which what follows joins: as if they had come as a product."""
        monkeypatch.setattr(gemm, "MAX_SMALL_ROWS", 17)
        case = Products(generator, torch.bfloat16, (4, 2), 18, **options)

        def sums(x: Tensor, linear: Linear) -> Tensor:
            slices, (n, k) = gemm.slices_of(linear), linear.weight.shape
            assert k % slices == 0
            vectors = torch.zeros(20, slices, k // slices)  # with rows that nobody looks at
            vectors[: len(x)] = x.view(-1, slices, k // slices)
            matrices = linear.weight.float().view(n, slices, -1)
            return torch.einsum("rsk,nsk->srn", vectors, matrices).contiguous()

        bare = gemm.large_gemm
        for joins in (False, True):

            def product(linear: Linear, x: Tensor, *, pdl: bool = False, joins: bool = joins) -> Tensor:
                if gemm.slices_of(linear) == 1:
                    return bare(linear, x)
                found = sums(x, linear)
                return gemm.joined(found[:, : len(x)], x.dtype) if joins else found

            monkeypatch.setattr(gemm, "large_gemm", product)
            results = case.run(slice(None))
            if not joins:
                expected = results
        for got, wanted in zip(results, expected, strict=True):
            same(got, wanted)

    @pytest.mark.parametrize("offset", [0, 1])
    def test_a_norm_does_not_depend_on_where_a_row_lies(self, offset: int, generator: torch.Generator) -> None:
        norm = randomised(LayerNorm(33, 1e-5), generator, torch.float32)
        x = random(generator, torch.float32, 5 * 33 + offset)[offset:].view(5, 33)
        got = gemm.add_norm(x, norm)[0].x
        close(got, norm(x))
        same(gemm.add_norm(x[3:4], norm)[0].x, got[3:4])
        assert gemm.aligned(x[1:]).data_ptr() % 16 == 0


class TestSlices:
    @pytest.mark.parametrize(
        ("n", "k", "expected"),
        [
            (128, 2048, 8),
            (2048, 2048, 4),
            (2048, 8192, 8),  # long
            (4096, 4096, 1),
            (4096, 14336, 2),  # long
            (8192, 2048, 1),
            (128256, 2048, 1),
            (1536, 1152, 2),  # as many as divide it into 64 columns
            (640, 96, 1),
            (8192, 8192, 1),
        ],
    )
    def test_follow_from_the_shape(self, n: int, k: int, expected: int) -> None:
        with torch.device("meta"):
            linear = Linear(k, n)
        assert gemm.slices_of(linear) == expected

    def test_a_model_may_say_otherwise(self) -> None:
        linear = Linear(96, 4)
        linear.slices = 2
        assert gemm.slices_of(linear) == 2
        assert gemm.slice_length(linear) == 64  # the second is padded

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("rows", [9, 65, 129])
    def test_are_never_of_a_single_round(self, rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
        """Compiled, that is no loop, and the product's first term is what it is added to: other bits."""
        launched: list[dict[str, Any]] = []

        class Kernel:
            def __getitem__(self, grid: Any) -> Callable[..., None]:
                return lambda *_, **constants: launched.append(constants)

        for name in ("gemm_small", "gemm_large"):
            monkeypatch.setattr(gemm, name, Kernel())
        monkeypatch.setattr(gemm, "_gemm_large_launch", gemm._gemm_large_launch.__wrapped__)  # none are kept
        monkeypatch.setattr(device_check, "torch_agrees", lambda *_: False)
        for k in (1, 24, 32, 33, 64, 128, 1152, 4096):
            for slices in (None, 1, 2, 4, 8):
                linear, x = Linear(k, 8).to(DEVICE, dtype), torch.zeros(rows, k, dtype=dtype, device=DEVICE)
                linear.slices = slices
                gemm.gemm(linear, gemm.GemmInput(x), None)
                used = launched.pop()
                assert used["LENGTH"] % used["BLOCK_K"] == 0
                assert used["LENGTH"] >= 2 * used["BLOCK_K"]
                assert used["LENGTH"] * used["SLICES"] >= k
                assert used["BLOCK_K"] >= 16  # what a product of matrices takes at least


class Attention:
    """Queries, keys and values of all positions, and what each should give."""

    def __init__(
        self,
        generator: torch.Generator,
        dtype: torch.dtype = torch.float16,
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
        return attention.GpuAttention()(self.q[:, :, start:end], k, v, scale=0.4, window=self.window, end=end)

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
    {"window": 3 * BLOCK, "heads": 2, "kv_heads": 2, "head_dim": 16},
    {"window": 1},
    {"heads": 4, "kv_heads": 2, "head_dim": 33, "batch": 2},
]


@pytest.mark.usefixtures("small")
class TestAttention:
    @pytest.mark.parametrize(
        ("options", "dtype"),
        [*((options, torch.float16) for options in SHAPES), ({}, torch.float32), ({}, torch.bfloat16)],
        ids=str,
    )
    def test_a_prompt(self, options: dict[str, Any], dtype: torch.dtype, generator: torch.Generator) -> None:
        case = Attention(generator, dtype, **options)
        close(case.attend(0, case.positions), case.expected())

    @pytest.mark.parametrize(
        ("options", "dtype", "programs"),
        [
            *((options, torch.float16, count) for options, count in zip(SHAPES, [2, 1, 3, 100, 100], strict=True)),
            ({"window": BLOCK + 3}, torch.float32, 2),
            ({}, torch.bfloat16, 100),
        ],
        ids=str,
    )
    def test_each_query_alone(
        self,
        options: dict[str, Any],
        dtype: torch.dtype,
        programs: int,
        generator: torch.Generator,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """At the edges of blocks and groups, and elsewhere; by however many programs share its keys."""
        monkeypatch.setattr(attention, "MAX_PROGRAMS", programs)
        case = Attention(generator, dtype, **options)
        whole = case.attend(0, case.positions)
        for at in (0, *(edge + d for edge in (BLOCK, BLOCK * GROUPS, 2 * BLOCK * GROUPS) for d in (-1, 0)), 68):
            same(case.attend(at, at + 1), whole[:, :, at : at + 1])

    @pytest.mark.parametrize("options", SHAPES, ids=str)
    def test_chunks(self, options: dict[str, Any], generator: torch.Generator) -> None:
        case = Attention(generator, **options)
        cuts = [0, 7, 9, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 2, case.positions]
        chunks = [case.attend(start, end) for start, end in pairwise(cuts)]
        same(torch.cat(chunks, 2), case.attend(0, case.positions))

    @pytest.mark.parametrize(("n", "dtype"), [(1, torch.float32), (1, torch.bfloat16), (3, torch.float16)], ids=str)
    def test_weights(self, n: int, dtype: torch.dtype, generator: torch.Generator) -> None:
        """By which the values are mixed, as one sees who traces: more keys than a head has dimensions."""
        case = Attention(generator, dtype, window=BLOCK + 3)
        q, end = case.q[:, :, -n:], case.positions
        weights = attention.GpuAttention().weights(q, case.k, case.v, scale=0.4, window=case.window, end=end)
        assert weights.dtype is torch.float32
        assert ((weights > 0).sum(-1) <= BLOCK + 3).all()
        close(weights.sum(-1).to(dtype), torch.ones_like(weights[..., 0]).to(dtype))
        close((weights @ case.v.float()).to(dtype), case.attend(end - n, end))

    @pytest.mark.parametrize("n", [1, 9])
    def test_keys_that_nobody_sees_may_be_left_out(self, n: int, generator: torch.Generator) -> None:
        case = Attention(generator, window=BLOCK + 3)
        end = 66
        first = end - n - BLOCK - 2
        got = case.attend(end - n, end, case.k[:, :, first:end], case.v[:, :, first:end])
        same(got, case.attend(0, case.positions)[:, :, end - n : end])

    def test_what_comes_later_is_not_looked_at(self, generator: torch.Generator) -> None:
        """Nor what lies before a window."""
        case = Attention(generator, window=BLOCK + 3)
        whole = case.attend(0, case.positions)
        for each in (case.k, case.v):
            each[:, :, 61:] = torch.nan
            each[:, :, : 60 - BLOCK - 2] = torch.nan
        same(case.attend(60, 61), whole[:, :, 60:61])

    def test_however_they_lie(self, generator: torch.Generator) -> None:
        """Heads beside each other, as products leave them."""
        case = Attention(generator, heads=4, kv_heads=2)
        whole = case.attend(0, case.positions)
        for name in "qkv":
            setattr(case, name, getattr(case, name).transpose(1, 2).contiguous().transpose(1, 2))
        same(case.attend(0, case.positions), whole)
        same(case.attend(33, 34), whole[:, :, 33:34])


class Span(NamedTuple):
    """A row of a ragged pass."""

    start: int  # its first query's position
    n: int
    slots: int  # of its cache: fewer than positions where it is a ring


class Ragged:
    """The queries of rows of different lengths, whose keys and values are where a table says."""

    def __init__(
        self,
        generator: torch.Generator,
        spans: Sequence[Span],
        dtype: torch.dtype = torch.float16,
        *,
        heads: int = 3,
        kv_heads: int = 1,
        head_dim: int = 20,
        window: int | None = None,
    ) -> None:
        self.spans, self.window, self.kv_heads = spans, window, kv_heads
        self.q = random(generator, dtype, sum(span.n for span in spans), heads, head_dim)
        self.kept, self.expected = [], []
        tables, first = [], 0
        for start, n, slots in spans:
            end, seen = start + n, max(0, start - (window or 10**9) + 1)
            assert end - seen <= slots
            k, v = (random(generator, dtype, 1, kv_heads, end, head_dim) for _ in range(2))
            stored = [torch.full_like(k, torch.nan)[:, :, :1].repeat(1, 1, slots, 1) for _ in range(2)]
            for position in range(seen, end):  # nothing else may be looked at
                stored[0][:, :, position % slots], stored[1][:, :, position % slots] = (
                    k[:, :, position],
                    v[:, :, position],
                )
            self.kept.append(stored)
            tables.append(Table(stored[:1], stored[1:]).at(start)[0])
            self.expected.append(self.reference(self.q[first : first + n], k[0], v[0], start))
            first += n
        self.table = torch.from_numpy(np.concatenate(tables)).to(DEVICE)

    def reference(self, q: Tensor, k: Tensor, v: Tensor, start: int) -> Tensor:
        groups = q.shape[1] // self.kv_heads
        k, v = (each.float().repeat_interleave(groups, 0) for each in (k, v))
        distance = start + torch.arange(len(q), device=DEVICE)[:, None] - torch.arange(k.shape[1], device=DEVICE)
        seen = (distance >= 0) & (distance < (self.window or 10**9))
        scores = (q.float().transpose(0, 1) @ k.transpose(1, 2) * 0.4).masked_fill(~seen, -torch.inf)
        return (scores.softmax(-1) @ v).transpose(0, 1).flatten(1).to(q.dtype)

    def together(self, rows: Sequence[int] | None = None) -> Tensor:
        """[T, Hq D], of these rows."""
        rows = range(len(self.spans)) if rows is None else rows
        queries = attention.queries_of(self.q.shape[1], self.kv_heads, self.q.shape[2], self.q.dtype, DEVICE)
        tiles = attention.tiles_of([self.spans[row][:2] for row in rows], queries, DEVICE)
        q = torch.cat([self.of(row, self.q) for row in rows])
        options = {"kv_heads": self.kv_heads, "scale": 0.4, "window": self.window}
        return attention.attend_rows(q, self.table[list(rows)], tiles, **options)

    def alone(self) -> Tensor:
        """[T, Hq D], each query by itself."""
        rows = [row for row, span in enumerate(self.spans) for _ in range(span.n)]
        at = [span.start + i for span in self.spans for i in range(span.n)]
        positions = torch.tensor(at, dtype=torch.int32, device=DEVICE)
        finished = torch.zeros(len(rows) * self.kv_heads, dtype=torch.int32, device=DEVICE)
        table, out = self.table[rows], torch.empty_like(self.q).flatten(1)
        attention._attend_one(
            self.q, out, table, positions, finished, self.kv_heads, False, scale=0.4, window=self.window
        )
        assert not finished.any()
        return out

    def of(self, row: int, x: Tensor) -> Tensor:
        first = sum(span.n for span in self.spans[:row])
        return x[first : first + self.spans[row].n]


EDGE = BLOCK * GROUPS  # from here on, groups are of several blocks
SPANS = [Span(0, 5, 40), Span(37, 1, 38), Span(EDGE - 3, EDGE + 9, 80), Span(0, EDGE, EDGE), Span(2 * EDGE, 3, 90)]
WIDE = [Span(0, 5, 40), Span(60, 7, BLOCK + 9), Span(100, 30, BLOCK + 3 + 29), Span(33, 1, BLOCK + 3), Span(0, 40, 60)]


@pytest.mark.usefixtures("small")
class TestRaggedPrompts:
    """`attend_many` gives each query of each row what `attend_one` does."""

    @pytest.mark.parametrize(
        ("spans", "dtype", "options"),
        [
            pytest.param(SPANS[1:], torch.bfloat16, {"heads": 4, "kv_heads": 2, "head_dim": 33}, id="bfloat16"),
            pytest.param(SPANS[1:3], torch.float32, {"heads": 2, "kv_heads": 2, "head_dim": 16}, id="float"),
            pytest.param(WIDE, torch.float16, {"window": BLOCK + 3}, id="rings"),
            pytest.param([Span(3, 4, 7), Span(40, 3, 3), Span(0, 1, 1)], torch.float16, {"window": 1}, id="one key"),
            *amount(
                [
                    pytest.param(SPANS, torch.float16, {}, id="half"),
                    pytest.param(WIDE[:2], torch.float32, {"window": BLOCK + 3}, id="float rings"),
                    pytest.param(
                        WIDE[:2], torch.bfloat16, {"window": BLOCK + 3, "heads": 8, "kv_heads": 2}, id="heads"
                    ),
                    pytest.param(
                        [Span(50, 60, 3 * BLOCK + 59), Span(200, 1, 3 * BLOCK)],
                        torch.float16,
                        {"window": 3 * BLOCK},
                        id="three blocks",
                    ),
                ],
                [],
            ),
        ],
    )
    def test_each_query_alone(
        self, spans: list[Span], dtype: torch.dtype, options: dict[str, Any], generator: torch.Generator
    ) -> None:
        case = Ragged(generator, spans, dtype, **options)
        together = case.together()
        close(together, torch.cat(case.expected))
        same(together, case.alone())

    @pytest.mark.parametrize("window", [None, 3 * BLOCK])
    def test_whatever_is_beside_them(self, window: int | None, generator: torch.Generator) -> None:
        """Short rows take blocks one by one, by another kernel where no row is long."""
        spans = [Span(2, 9, 20), Span(0, 20, 20), Span(2 * EDGE - 7, 20, 100)]
        case = Ragged(generator, spans, window=window)
        together = case.together()
        for rows in ([0], [1], [2], [0, 1], [1, 0, 2], [2, 0]):
            same(case.together(rows), torch.cat([case.of(row, together) for row in rows]))

    @pytest.mark.parametrize("queries", [1, 4, 16])
    def test_tiles(self, queries: int) -> None:
        """Each token is in one tile; tiles are counted from position 0; those with the most keys are first."""
        spans = [(0, 1), (5, 11), (15, 1), (16, 16), (0, 70), (69, 2)]
        tiles = attention.tiles_of(spans, queries, DEVICE)
        assert tiles.rows.tolist() == [row for row, (_, n) in enumerate(spans) for _ in range(n)]
        assert (tiles.end, tiles.queries) == (71, queries)
        found = []
        for row, first, start, end, at in tiles.tiles.tolist():
            assert (start, end - start) == spans[row]
            assert at % queries == 0
            inside = range(max(at, start), min(at + queries, end))
            assert inside
            found += [(row, first + position - start) for position in inside]
        assert sorted(found) == [(row, token) for token, row in enumerate(tiles.rows.tolist())]
        starts = tiles.tiles[:, 4].tolist()
        assert starts == sorted(starts, reverse=True)


class Step:
    """Attention of one new token a row, over keys and values where a table says."""

    def __init__(
        self,
        generator: torch.Generator,
        dtype: torch.dtype,
        positions: Sequence[int],
        slots: int,
        *,
        head_dim: int = 64,
        heads: int = 3,
        window: int | None = None,
        norm: type[Norm] | None = None,
        rope: bool = True,
    ) -> None:
        rows = len(positions)
        q_norm, k_norm = (
            None if norm is None else randomised(norm(head_dim, 1e-6), generator, dtype) for _ in range(2)
        )
        unused: Any = None
        self.block = BlockParts(
            *(unused,) * 4,
            heads=heads,
            kv_heads=1,
            head_dim=head_dim,
            scale=0.1,
            activation="",
            window=window,
            q_norm=q_norm,
            k_norm=k_norm,
        )
        self.positions = torch.tensor(positions, dtype=torch.int32, device=DEVICE)
        self.stored = [random(generator, dtype, rows, 1, slots, head_dim) for _ in range(2)]
        for row, position in enumerate(positions):
            seen = range(max(0, position - (window or 10**9) + 1), position)
            for slot in set(range(slots)) - {at % slots for at in seen}:
                for each in self.stored:
                    each[row, :, slot] = torch.nan
        self.qkv = random(generator, dtype, rows, (heads + 2) * head_dim)
        frequencies = torch.rand(head_dim // 2, generator=generator).repeat(2).to(DEVICE)
        self.turned = step.rope_tables(frequencies, self.positions) if rope else None

    def run(self) -> list[Tensor]:
        """The outcome, and what is stored afterwards."""
        stored = [each.clone() for each in self.stored]
        table = torch.from_numpy(Table(stored[:1], stored[1:]).at(0)[0]).to(DEVICE)
        finished = torch.zeros(len(self.positions), dtype=torch.int32, device=DEVICE)
        out = attention.attend_step(self.block, self.qkv, table, self.positions, finished, self.turned)
        assert not finished.any()
        return [out, *stored]


class TestByWarps:
    """`attend_by_warps` gives, and stores, what `prepare_heads` and `attend_one` do."""

    @pytest.mark.parametrize(
        ("positions", "slots", "dtype", "options"),
        [
            ([0, 130, 64], 192, torch.bfloat16, {"norm": RMSNorm}),
            ([5, 300], 384, torch.float16, {"heads": 8}),
            ([63, 65], 192, torch.bfloat16, {"head_dim": 128, "norm": ZeroCenteredRMSNorm, "heads": 1}),
            ([200], 128, torch.float16, {"head_dim": 128, "window": 70, "rope": False, "heads": 2}),  # a ring
            ([70], 128, torch.bfloat16, {"head_dim": 256, "norm": ZeroCenteredRMSNorm, "window": 66, "heads": 1}),
            ([200, 3], 70, torch.bfloat16, {"window": 70}),
        ],
        ids=str,
    )
    @torch.inference_mode()
    def test_the_same(
        self,
        positions: list[int],
        slots: int,
        dtype: torch.dtype,
        options: dict[str, Any],
        generator: torch.Generator,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(attention, "GROUPS", 2)
        monkeypatch.setattr(attention, "MAX_PROGRAMS", 4)
        case = Step(generator, dtype, positions, slots, **options)
        got = case.run()
        monkeypatch.setattr(attention, "_by_warps", lambda *_: False)
        expected = case.run()
        same(got[0], expected[0])
        for one, other in zip(got[1:], expected[1:], strict=True):
            torch.testing.assert_close(one, other, atol=0, rtol=0, equal_nan=True)

    @pytest.mark.parametrize(
        ("positions", "dtype", "options"),
        [
            ([0, 130, 64, -1, 200], torch.bfloat16, {"norm": RMSNorm}),
            ([5, 255], torch.float16, {"heads": 8}),
            ([63, 65], torch.bfloat16, {"head_dim": 128, "heads": 1}),
            ([100, 31], torch.float16, {"head_dim": 20}),
        ],
        ids=str,
    )
    @torch.inference_mode()
    def test_by_row(
        self,
        positions: list[int],
        dtype: torch.dtype,
        options: dict[str, Any],
        generator: torch.Generator,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Where there are many rows, a program has all keys of a row's head."""
        monkeypatch.setattr(attention, "GROUPS", 2)
        case = Step(generator, dtype, positions, 256, **options)
        monkeypatch.setattr(attention, "MIN_BY_ROW", 1)
        got = case.run()
        monkeypatch.setattr(attention, "MIN_BY_ROW", 10**9)
        monkeypatch.setattr(attention, "_by_warps", lambda *_: False)
        expected = case.run()
        there = [row for row, position in enumerate(positions) if position >= 0]
        same(got[0][there], expected[0][there])
        for one, other in zip(got[1:], expected[1:], strict=True):
            torch.testing.assert_close(one, other, atol=0, rtol=0, equal_nan=True)

    @pytest.mark.parametrize(
        ("head_dim", "group", "dtype", "by_warps"),
        [
            (64, 8, torch.bfloat16, True),
            (128, 1, torch.float16, True),
            (64, 9, torch.bfloat16, False),
            (64, 4, torch.float32, False),
            (96, 4, torch.bfloat16, False),
            (256, 4, torch.bfloat16, True),
            (512, 4, torch.bfloat16, False),
        ],
    )
    def test_which_attention_is_by_warps(
        self, head_dim: int, group: int, dtype: torch.dtype, by_warps: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        shape = attention._shape(group, 1, head_dim, dtype, DEVICE)
        x = torch.empty(1, dtype=dtype, device=DEVICE)
        assert attention._by_warps(shape, x, None) == by_warps
        monkeypatch.setattr("infer.backend.gpu.device_check.instructions_agree", lambda *_: False)
        assert not attention._by_warps(shape, x, None)


class Kernels:
    """A model's passes through the kernels, as on a GPU."""

    def __init__(self, model: Decoder, kind: type[BaseCache] = KVCache) -> None:
        self.model, self.kind = model, kind
        self.backend = GpuBackend.of(parts_of(model), model.dtype)
        self.plan = self.backend.plan

    def __call__(self, tokens: Tensor, cache: Cache) -> Tensor:
        """[B, n] -> logits [B, n, V]"""
        return self.backend.run([Row(cache, tokens, ALL)])[0]

    def step(self, tokens: Sequence[int], caches: Sequence[Any]) -> Tensor:
        """One token a row -> [B, V], of which all but the token itself is known on the device."""
        ids = torch.tensor(tokens, device=DEVICE)
        positions = torch.tensor([cache.seq_len for cache in caches], dtype=torch.int32, device=DEVICE)
        lines, _ = self.backend.tables(caches, [1] * len(caches))
        tables = torch.from_numpy(lines).to(DEVICE)
        steps = torch.zeros(1, dtype=torch.int32, device=DEVICE)
        fed = step.begin(self.plan, ids, positions, torch.ones_like(positions), steps)
        finished = step.counters(self.plan, len(caches))
        logits = step.launch(self.plan, fed, tables, finished)
        assert not finished.any()
        assert positions.tolist() == [cache.seq_len + 1 for cache in caches]
        for cache in caches:
            cache.advance(1)
        return logits

    def cache(self, **options: Any) -> Any:
        model = self.model
        if self.kind is SlidingCache:
            options = {"prefill_chunk": 3} | options
        return self.kind.from_model_config(model.config, 32, dtype=model.dtype, device=DEVICE, **options)


LENGTH = 7
MODELS = [
    ("llama", torch.bfloat16, KVCache),
    ("qwen3", torch.float16, KVCache),
    ("gemma3", torch.bfloat16, PagedCache),
    ("gpt2", torch.float32, KVCache),
    ("rope_gpt", torch.float16, GrowingCache),
]
MODELS += amount(
    [
        ("llama", torch.float32, GrowingCache),
        ("gemma3", torch.float16, SlidingCache),
        ("llama", torch.float16, KVCache),
        ("qwen3", torch.float32, KVCache),
        ("gemma3", torch.float32, KVCache),
        ("gemma3", torch.bfloat16, KVCache),
        ("qwen3", torch.bfloat16, PagedCache),
        ("gpt2", torch.float16, KVCache),
        ("rope_gpt", torch.float32, KVCache),
    ],
    [],
)


@pytest.mark.usefixtures("small")
class TestModels:
    @pytest.fixture(params=MODELS, ids=str)
    def kernels(
        self, request: pytest.FixtureRequest, tiny_model: Callable[..., Decoder], monkeypatch: pytest.MonkeyPatch
    ) -> Kernels:
        monkeypatch.setattr(gemm, "SMALL_ROWS", 3)
        family, dtype, kind = request.param
        layers = 2 if family == "gemma3" else 1
        sizes = {"hidden_size": 24, "intermediate_size": 13, "vocab_size": 19, "num_attention_heads": 2}
        sizes["num_key_value_heads"] = 2 if "gpt" in family else 1
        model = tiny_model(model_type=family, dtype=dtype, num_hidden_layers=layers, **sizes).to(DEVICE)
        return Kernels(model, kind)

    @pytest.fixture
    def tokens(self, generator: torch.Generator) -> Tensor:
        return torch.randint(19, (1, LENGTH), generator=generator).to(DEVICE)

    @torch.inference_mode()
    def test_every_way_to_the_same_logits(self, kernels: Kernels, tokens: Tensor) -> None:
        """A prompt in one pass, in chunks of many rows and few, in steps alone, and in passes beside others."""
        whole = kernels(tokens, NoCache(1, DEVICE))
        if kernels.model.dtype is torch.float32:
            torch.testing.assert_close(whole, kernels.model(tokens), atol=1e-3, rtol=1e-3)
        cache = kernels.cache()
        chunks = [kernels(tokens[:, start:end], cache) for start, end in pairwise([0, 1, LENGTH - 2])]
        same(torch.cat(chunks, 1), whole[:, : LENGTH - 2])
        ids = tokens[0].tolist()
        if kernels.kind is GrowingCache:  # it has no table
            same(kernels(tokens[:, -2:-1], cache)[:, 0], whole[:, -2])
        else:
            same(kernels.step([ids[-2]], [cache]), whole[:, -2])
        short, empty = kernels.cache(), kernels.cache()
        kernels(tokens[:, :2], short)
        run = kernels.backend.run
        one, three = run([Row(cache, ids[-1:], ALL), Row(empty, ids[:3], ALL)])
        same(one[0], whole[0, -1:])
        same(three[0], whole[0, :3])
        two, one = run([Row(short, ids[2:3], ALL), Row(empty, ids[3:4])])
        same(torch.cat((two, one), 1)[0], whole[0, 2:4])

    @pytest.mark.filterwarnings("ignore:divide by zero encountered in fmod:RuntimeWarning")  # of no slots
    @pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")
    @torch.inference_mode()
    def test_rows_without_a_token_are_left_alone(self, tiny_model: Callable[..., Decoder]) -> None:
        sizes = {"hidden_size": 24, "intermediate_size": 13, "vocab_size": 19, "num_hidden_layers": 1}
        model = tiny_model(dtype=torch.bfloat16, **sizes).to(DEVICE)
        kernels = Kernels(model)
        cache, plan = kernels.cache(), kernels.plan
        expected = kernels(torch.tensor([[3]], device=DEVICE), NoCache(1, DEVICE))[0]
        tables = torch.zeros(1, 3, COLUMNS, dtype=torch.int64, device=DEVICE)
        tables[:, 1:2] = torch.from_numpy(kernels.backend.tables([cache], [1])[0])
        positions = torch.tensor([-1, 0, -1], dtype=torch.int32, device=DEVICE)
        steps, increments = torch.zeros(1, dtype=torch.int32, device=DEVICE), torch.zeros_like(positions)
        finished = step.counters(plan, 3)
        for _ in range(2):
            ids = torch.tensor([-1, 3, 5], device=DEVICE)
            fed = step.begin(plan, ids, positions, increments, steps)
            got = step.launch(plan, fed, tables, finished)
            same(got[1:2], expected)
            assert not finished.any()


PROMPTS = [[3, 1, 4, 1, 5, 9, 2], [6], [5, 3, 5, 8, 9, 7, 9, 3], [7, 9, 3], [2, 3, 8]]
CUTS = [(0, 3, 4, 6, 7), (0, 1), (0, 1, 2, 3, 5, 6, 7, 8), (0, 3), (0, 2, 3)]  # rings wrap, and rows come and go
KINDS: list[tuple[type[BaseCache], dict[str, Any]]] = [
    (SlidingCache, {"prefill_chunk": 3}),
    (KVCache, {}),
    (SlidingCache, {"prefill_chunk": 1}),
    (PagedCache, {}),
    (PagedCache, {}),
]


@pytest.mark.usefixtures("small")
class TestRaggedPasses:
    """Rows of different lengths, with caches of all kinds, in one pass: each has the logits that it has alone."""

    @pytest.fixture
    def make(self, tiny_model: Callable[..., Decoder], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Kernels]:
        monkeypatch.setattr(gemm, "SMALL_ROWS", 3)
        sizes = {"hidden_size": 24, "intermediate_size": 13, "vocab_size": 19, "num_attention_heads": 2}

        def make(family: str, layers: int) -> Kernels:
            config = sizes | {"num_hidden_layers": layers, "num_key_value_heads": 1}
            return Kernels(tiny_model(model_type=family, dtype=torch.float16, **config).to(DEVICE))

        return make

    @pytest.fixture
    def windows(self, make: Callable[..., Kernels]) -> Kernels:
        """One layer with a window, and one without."""
        return make("gemma3", 2)

    @pytest.fixture
    def kernels(self, make: Callable[..., Kernels]) -> Kernels:
        return make("llama", 1)

    def cache(self, kernels: Kernels, positions: int = 9, kind: type[BaseCache] = KVCache, **options: Any) -> Any:
        model = kernels.model
        return kind.from_model_config(model.config, positions, dtype=model.dtype, device=DEVICE, **options)

    def caches(self, kernels: Kernels) -> list[Any]:
        return [self.cache(kernels, 9 + i, kind, **options) for i, (kind, options) in enumerate(KINDS)]

    def alone(self, kernels: Kernels) -> list[Tensor]:
        return [kernels(torch.tensor([ids], device=DEVICE), NoCache(1, DEVICE))[0] for ids in PROMPTS]

    @torch.inference_mode()
    def test_prompts_and_single_tokens(self, windows: Kernels) -> None:
        alone, caches = self.alone(windows), self.caches(windows)
        for i in range(max(map(len, CUTS)) - 1):
            rows, expected = [], []
            for cuts, ids, cache, own in zip(CUTS, PROMPTS, caches, alone, strict=True):
                if i + 1 < len(cuts):
                    rows.append(Row(cache, ids[slice(*cuts[i : i + 2])], ALL))
                    expected.append(own[slice(*cuts[i : i + 2])])
            assert windows.backend.tables([row.cache for row in rows], [len(row.tokens) for row in rows])[0] is not None
            for got, one in zip(windows.backend.run(rows), expected, strict=True):
                same(got[0], one)
        assert [cache.seq_len for cache in caches] == [len(ids) for ids in PROMPTS]

    @torch.inference_mode()
    def test_beside_caches_without_a_table(self, windows: Kernels) -> None:
        """Then each is asked to attend: here beside one that grows, and a ring too small for its prompt."""
        alone, caches = self.alone(windows), self.caches(windows)
        caches[3] = self.cache(windows, 9, GrowingCache)
        for i in (2, 3):
            assert caches[i].table(windows.model.config, windows.model.dtype, len(PROMPTS[i])) is None
        rows = [Row(cache, ids, ALL) for cache, ids in zip(caches, PROMPTS, strict=True)]
        for got, one in zip(windows.backend.run(rows), alone, strict=True):
            same(got[0], one)
        for cache in caches:
            cache.truncate(cache.seq_len - 1)
        again = [Row(cache, ids[-1:]) for cache, ids in zip(caches, PROMPTS, strict=True)]
        for got, one in zip(windows.backend.run(again), alone, strict=True):
            same(got[0], one[-1:])

    @torch.inference_mode()
    def test_logits_of_what_is_wanted(self, kernels: Kernels) -> None:
        """In a pass of prompts, in a step, and where nothing is."""
        alone, caches = self.alone(kernels)[2:], [self.cache(kernels) for _ in PROMPTS[2:]]
        nothing = [NONE] * 3
        for start, wanted in [(0, [slice(1, 3), ALL, NONE]), (-1, [LAST, NONE, ALL]), (-1, nothing), (-2, nothing)]:
            rows = [Row(cache, ids[start:], part) for cache, ids, part in zip(caches, PROMPTS[2:], wanted, strict=True)]
            for got, one, part in zip(kernels.backend.run(rows), alone, wanted, strict=True):
                assert got.shape == (1, len(one[start:][part]), 19)
                same(got[0], one[start:][part])
            for cache, ids in zip(caches, PROMPTS[2:], strict=True):
                assert cache.seq_len == len(ids)
                cache.truncate(cache.seq_len - (2 if wanted is nothing else 1))

    @torch.inference_mode()
    def test_a_cache_of_several_rows(self, kernels: Kernels) -> None:
        """It attends beside another: to a prompt, and in a step."""
        ids = torch.tensor([[3, 1, 4, 1], [5, 9, 2, 6]], device=DEVICE)
        expected, two = kernels(ids, NoCache(2, DEVICE)), self.cache(kernels, batch_size=2)
        for start, end in [(0, 3), (3, 4)]:
            rows = [Row(self.cache(kernels), [7, 9][: end - start]), Row(two, ids[:, start:end], ALL)]
            same(kernels.backend.run(rows)[1], expected[:, start:end])


class TestMutants:
    """Where a sum depends on how many queries or rows there are, bits differ: what is compared above can fail."""

    def test_blocks_of_keys(self, small: None, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
        case = Attention(generator, torch.float32)
        whole = case.attend(0, case.positions)
        monkeypatch.setattr(attention, "BLOCK", {4: 2 * BLOCK})
        assert not torch.equal(case.attend(case.positions - 1, case.positions), whole[:, :, -1:])

    def test_groups_of_blocks(self, small: None, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
        case = Attention(generator, torch.float32)
        whole = case.attend(0, case.positions)
        monkeypatch.setattr(attention, "GROUPS", 4 * GROUPS)
        assert not torch.equal(case.attend(case.positions - 1, case.positions), whole[:, :, -1:])

    @pytest.mark.parametrize("rows", [1, 9])
    @torch.inference_mode()
    def test_slices(self, rows: int, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
        case = Products(generator, torch.bfloat16, (4, 1), 9, sizes=(256, 64, 64))
        monkeypatch.setattr(gemm, "SMALL_ROWS", 8)
        expected, _ = case.run(slice(None))
        monkeypatch.setattr(gemm, "SMALL_ROWS", 9)
        same(case.run(slice(rows))[0], expected[:rows])
        case.first.slices = 2
        assert not torch.equal(case.run(slice(rows))[0], expected[:rows])

    @torch.inference_mode()
    def test_a_rounding(self, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
        """Of a product, before anything is done with it: a kernel of few rows that leaves it out."""
        case = Products(generator, torch.bfloat16, (1, 1), 9)
        monkeypatch.setattr(gemm, "SMALL_ROWS", 8)
        expected, _ = case.run(slice(None))

        def epilogue(sums: Any, dtype: Any, *others: Any) -> Any:
            return before(sums, triton.language.float32, *others)

        before = gemm_kernels.epilogue
        monkeypatch.setattr(gemm_kernels, "epilogue", epilogue)
        assert not torch.equal(case.run(slice(1))[0], expected[:1])
