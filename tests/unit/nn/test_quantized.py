"""Weights in 4 and 8 bits: how they are rounded and packed, products against the same in floats, and models of them."""

from __future__ import annotations

import copy
import importlib.util
import io
import itertools
import os
import pickle
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from amount import ALL, amount
from checkpoints import FAMILIES, kernel_logits, random_ids, reference_model, save_folder, save_nanogpt
from gguf import GGMLQuantizationType as Quant
from gguf import quants
from hypothesis import given, settings
from hypothesis import strategies as st
from mocks import CACHES, Letters
from torch import Tensor, nn

from infer import KVCache, SamplingParams, generate, load_model
from infer.backend.cpu import backend as backend_module
from infer.backend.cpu import kernels, ops
from infer.cache import NoCache
from infer.engine.model import all_logits
from infer.loader.find import open_checkpoint
from infer.loader.gguf_blocks import blocks_of
from infer.loader.load import _materialize, choose_weight_dtypes, resolve_weight_dtype
from infer.models.common import Decoder
from infer.models.registry import build_model
from infer.nn import quantized
from infer.nn.linear import Embedding, Linear
from infer.nn.quantized import QuantizedWeight, StackedWeight, quantize_rows, round_activations
from infer.nn.schemes import SCHEMES

BITS = ("int4", "int8")
HALF_ULP = 2.0**-11  # relative error of a float16
TINY = 2.0**-25  # and its absolute one, at least
STEPS = {"int4": 7, "int8": 127}  # from 0 to the largest, by width

both_widths = pytest.mark.parametrize("kind", ["int4", "int8"])
pytestmark = pytest.mark.usefixtures("two_threads")
needs_kernels = pytest.mark.skipif(kernels() is None, reason="numba is not installed, or INFER_KERNELS=0")


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel does not write shows as NaN."""
    for module in (backend_module, ops):
        monkeypatch.setattr(module, "empty", lambda rows, columns: torch.full((rows, columns), torch.nan))


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def weight(rows: int, columns: int, kind: str) -> QuantizedWeight:
    return QuantizedWeight.of(randn(rows, columns, seed=rows), kind)


# Rounding


SHAPES = [(1, 1), (3, 31), (4, 32), (5, 33), (2, 1), (7, 100), (64, 576)]


@both_widths
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_rounding_error(rows: int, columns: int, kind: str) -> None:
    """Half a step, beside what float16 makes of scales and minima: that is 15 or 127 times an error in the scale."""
    for spread in [1e-3, 0.02, 1.0, 300.0]:
        weights = randn(rows, columns) * spread
        made = QuantizedWeight.of(weights, kind)
        error = (made.floats() - weights).abs()
        padded = F.pad(weights[None], (0, -columns % 32), "replicate")[0].reshape(rows, -1, 32)
        low, high = padded.amin(2), padded.amax(2)
        if kind == "int8":
            peak = torch.maximum(high, -low)
            bound = peak / 127 / 2 + peak * HALF_ULP + 127 * TINY
            assert (error <= bound.repeat_interleave(32, 1)[:, :columns]).all()
            continue
        # With 4 bits the line through the codes is fitted: a single weight may lose by it what the others gain.
        step = (high - low) / 15
        half = (low.abs() + 2 * (high - low)) * HALF_ULP + 16 * TINY
        assert (error <= (1.01 * step + half).repeat_interleave(32, 1)[:, :columns]).all()
        naive = ((padded - low[..., None]) / step.clamp_min(1e-30)[..., None]).round() * step[..., None] + low[
            ..., None
        ]
        squares = F.pad(made.floats()[None], (0, -columns % 32), "replicate")[0].reshape(padded.shape) - padded
        assert (squares.square().mean(2).sqrt() <= (naive - padded).square().mean(2).sqrt() + half).all()


@both_widths
def test_a_group_has_its_own_scale(kind: str) -> None:
    """One large weight costs the others of its group their digits, and nobody else's."""
    weights = randn(4, 96)
    expected = QuantizedWeight.of(weights, kind).floats()
    weights[1, 40] = 1000.0
    changed = QuantizedWeight.of(weights, kind).floats() != expected
    assert changed[1, 32:64].all()
    changed[1, 32:64] = False
    assert not changed.any()


@both_widths
@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -3.5, 0.1, 1e-3, 2000.0, -65503.0, 1e-6, 1e-30, 1e-38, -1e-40])
def test_constant_groups(value: float, kind: str) -> None:
    weights = torch.full((3, 40), value)
    error = (QuantizedWeight.of(weights, kind).floats() - weights).abs()
    assert (error <= abs(value) * HALF_ULP + 127 * TINY).all()


@both_widths
@pytest.mark.parametrize("spread", [10.0**-e for e in (4, 5, 6, 7, 8, 20, 30, 37, 38, 39, 40, 44)])
def test_tiny_weights(spread: float, kind: str) -> None:
    """Down to where float16 ends scales get coarse, and beyond it weights are 0; they are always numbers."""
    weights = randn(5, 70) * spread
    got = QuantizedWeight.of(weights, kind).floats()
    assert got.isfinite().all()
    assert ((got - weights).abs() <= weights.abs().max() / STEPS[kind] + 128 * TINY).all()
    assert (got.abs() <= 2 * weights.abs().max() + 128 * TINY).all()


@both_widths
def test_mixed_magnitudes(kind: str) -> None:
    """Zeros and the smallest of numbers beside ordinary ones."""
    weights = randn(8, 64)
    weights[:, ::3] = 0.0
    weights[:, 1::5] = 1e-42
    error = (QuantizedWeight.of(weights, kind).floats() - weights).abs()
    assert (error <= weights.abs().max() / STEPS[kind]).all()


def test_int8_keeps_zero_and_the_largest_weight() -> None:
    weights = randn(6, 64)
    weights[:, 5] = 0.0
    got = QuantizedWeight.of(weights, "int8").floats()
    assert (got[:, 5] == 0).all()
    peaks = weights.abs() == weights.abs().amax(1, keepdim=True)
    torch.testing.assert_close(got[peaks], weights[peaks], rtol=2e-3, atol=0)


def test_values_on_a_grid_are_kept() -> None:
    """Weights that are multiples of a float16 come back as they are."""
    codes = torch.randint(-127, 128, (8, 96), generator=torch.Generator().manual_seed(0))
    codes[:, ::32] = 127
    weights = codes * 2.0**-7
    assert torch.equal(QuantizedWeight.of(weights, "int8").floats(), weights)
    codes = torch.randint(0, 16, (8, 96), generator=torch.Generator().manual_seed(0))
    codes[:, ::32], codes[:, 1::32] = 0, 15
    weights = codes * 0.25 - 1.5
    assert torch.equal(QuantizedWeight.of(weights, "int4").floats(), weights)


@both_widths
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_weights_of_any_dtype(dtype: torch.dtype, kind: str) -> None:
    weights = randn(5, 40).to(dtype)
    assert torch.equal(QuantizedWeight.of(weights, kind).packed, QuantizedWeight.of(weights.float(), kind).packed)


@both_widths
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 65504.0, -70000.0, 1e30])
def test_weights_that_cannot_be_rounded(value: float, kind: str) -> None:
    weights = randn(4, 40)
    weights[2, 37] = value
    with pytest.raises(ValueError, match=r"not finite, or beyond 65,504, cannot be quantized") as error:
        QuantizedWeight.of(weights, kind)
    assert "\n" not in str(error.value)


@both_widths
@pytest.mark.parametrize("shape", [(4,), (0, 4), (4, 0), (2, 3, 4), ()], ids=str)
def test_shapes_that_cannot_be_packed(shape: tuple[int, ...], kind: str) -> None:
    with pytest.raises(ValueError, match=rf"only a matrix .* not a tensor of shape \[{', '.join(map(str, shape))}\]"):
        quantize_rows(torch.zeros(shape), kind)


def test_widths_that_there_are() -> None:
    with pytest.raises(ValueError, match=r"stored as one of Q4_0, .* int8, not as 'int5'"):
        QuantizedWeight(4, 32, "int5")
    with pytest.raises(ValueError, match="a weight of 0 x 32 cannot be packed"):
        QuantizedWeight(0, 32, "int4")
    with pytest.raises(ValueError, match="rows of 288 weights cannot be cut into Q4_K blocks of 256"):
        QuantizedWeight(4, 288, "Q4_K")
    with pytest.raises(ValueError, match="a multiple of 4, not 2"):
        QuantizedWeight(4, 32, "int4", tile_rows=2)


# Packing


@both_widths
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_blocks_come_back(rows: int, columns: int, kind: str) -> None:
    blocks = quantize_rows(randn(rows, columns), kind)
    made = QuantizedWeight(rows, columns, kind)
    made.fill(0, blocks)
    assert torch.equal(made.blocks(), blocks)
    assert made.nbytes == rows * made.scheme.row_bytes(columns)
    assert made.nbytes == rows * -(-columns // 32) * (20 if kind == "int4" else 34)


@both_widths
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_layouts(rows: int, columns: int, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows come back from tiles of any number of rows; a weight is moved in pieces, and once."""
    for tile_rows in [4, 8, 16]:
        monkeypatch.setattr(quantized, "TILED_AT_ONCE", 40 * columns)
        made = weight(rows, columns, kind)
        blocks, floats = made.blocks(), made.floats()
        made.set_tile_rows(tile_rows)
        assert made.tile_rows == tile_rows
        assert made.nbytes == -(-rows // tile_rows) * -(-columns // 32) * tile_rows * (20 if kind == "int4" else 34)
        before = made.packed
        made.set_tile_rows(tile_rows)
        assert made.packed is before
        assert torch.equal(made.blocks(), blocks)
        other = QuantizedWeight(rows, columns, kind, tile_rows=tile_rows)
        other.fill(0, blocks)
        assert torch.equal(other.packed, made.packed)
        made.set_tile_rows(1)
        assert torch.equal(made.floats(), floats)
        assert torch.equal(made.packed, weight(rows, columns, kind).packed)


@both_widths
def test_floats_of_some_rows(kind: str) -> None:
    made = weight(13, 50, kind)
    every = made.floats()
    assert every.shape == made.shape == (13, 50)
    for rows in (torch.tensor([3, 3, 12, 0]), torch.tensor([[1, 2], [11, 4]]), slice(5, 9), torch.tensor(7)):
        assert torch.equal(made.floats(rows), every[rows])


@both_widths
@given(cuts=st.lists(st.integers(1, 22), max_size=6))
@settings(deadline=None, max_examples=30)
def test_filling_in_pieces(cuts: list[int], kind: str) -> None:
    """Of any number of rows, as of all at once."""
    blocks = quantize_rows(randn(23, 70), kind)
    whole, pieces = QuantizedWeight(23, 70, kind), QuantizedWeight(23, 70, kind)
    whole.fill(0, blocks)
    for start, end in itertools.pairwise(sorted({0, *cuts, 23})):
        pieces.fill(start, blocks[start:end])
    assert torch.equal(pieces.packed, whole.packed)


@both_widths
def test_blocks_that_do_not_fit(kind: str) -> None:
    with pytest.raises(ValueError, match=r"do not fit a weight of \[4, 96\]"):
        QuantizedWeight(4, 96, kind).fill(0, quantize_rows(randn(4, 64), kind))
    with pytest.raises(ValueError, match=r"do not fit a weight of \[4, 64\]"):
        QuantizedWeight(4, 64, kind).fill(0, quantize_rows(randn(4, 64), "int8" if kind == "int4" else "int4"))


# Schemes

# Of each kind one: 4 bits with minima, signed bytes, two planes and integer scales, a table, minima of 16 columns.
GENERIC = ("int4", "int8", "Q6_K", "IQ4_XS", "Q2_K")
every_scheme = pytest.mark.parametrize("name", [name for name in SCHEMES if name not in BITS])
# Where a GGUF block has float16 scales: the other bytes may be any.
FLOAT16_AT: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "MXFP4": (),
}


def raw_blocks(name: str, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Bytes of a GGUF type, any but its scales, which are about as large as a model's."""
    rng = np.random.default_rng(seed)
    block, size = gguf.GGML_QUANT_SIZES[Quant[name]]
    raw = rng.integers(0, 256, (rows, columns // block, size), dtype=np.uint8)
    for at in FLOAT16_AT[name]:
        scale = rng.uniform(0.001, 0.01, raw.shape[:2]) * rng.choice([-1, 1], raw.shape[:2])
        raw[..., at : at + 2] = scale.astype(np.float16)[..., None].view(np.uint8)
    if name == "MXFP4":
        raw[..., 0] = raw[..., 0] // 16 + 116
    return raw.reshape(rows, -1)


def random_weight(name: str, rows: int, columns: int) -> QuantizedWeight:
    if name in BITS:
        return QuantizedWeight.of(randn(rows, columns, seed=rows), name)
    made = QuantizedWeight(rows, columns, name)
    made.fill(0, blocks_of(torch.from_numpy(raw_blocks(name, rows, columns, rows)), made.scheme))
    return made


def same_bits(one: np.ndarray, other: np.ndarray) -> bool:
    """Of all numbers; a NaN may be any."""
    numbers = ~np.isnan(one)
    return np.array_equal(numbers, ~np.isnan(other)) and bool((one.view("i4") == other.view("i4"))[numbers].all())


@every_scheme
@pytest.mark.parametrize("scales", ["normal", "any"])
def test_floats_are_those_of_gguf(name: str, scales: str) -> None:
    """Bit for bit, with scales that are 0, denormal, negative, infinite or NaN too."""
    rng, (block, size) = np.random.default_rng(1), gguf.GGML_QUANT_SIZES[Quant[name]]
    raw = raw_blocks(name, 200, 2 * block)
    if scales == "any":
        raw = rng.integers(0, 256, raw.shape, dtype=np.uint8)
        for at, value in itertools.product(FLOAT16_AT[name], (0x0000, 0x8000, 0x0001, 0x83FF, 0x7BFF, 0xFBFF, 0x7C00)):
            chosen = raw[rng.choice(200, 10)].reshape(10, 2, size)
            chosen[..., at : at + 2] = np.array([value], np.uint16).view(np.uint8)
            raw = np.concatenate((raw, chosen.reshape(10, -1)))
        raw = np.concatenate((raw, np.zeros_like(raw[:1]), np.full_like(raw[:1], 255)))
    with np.errstate(all="ignore"):
        expected = quants.dequantize(raw, Quant[name])
    made = QuantizedWeight(len(raw), 2 * block, name)
    made.fill(0, blocks_of(torch.from_numpy(raw), made.scheme))
    assert same_bits(made.floats().numpy(), expected)
    if kernels() is not None:
        assert same_bits(ops.look_up(made, torch.arange(len(raw))).numpy(), expected)


def test_bytes_of_schemes() -> None:
    """Bits per weight: as in the file, but for scales of 6 bits, which take a byte."""
    found = {name: 8 * scheme.block_bytes / scheme.columns for name, scheme in SCHEMES.items()}
    assert (found["Q5_0"], found["Q6_K"], found["Q4_K"]) == (5.5, 6.5625, 4.625)
    for name in FLOAT16_AT:
        block, size = gguf.GGML_QUANT_SIZES[Quant[name]]
        assert 0 <= found[name] - 8 * size / block <= 0.125, name


@needs_kernels
@every_scheme
def test_products_of_schemes(name: str, poisoned: None) -> None:
    """As those of the floats, with x rounded; each row has the same bits alone or among others."""
    for rows, columns in ((1, 256), (37, 512), (130, 1280)):
        made = random_weight(name, rows, columns)
        x = randn(70, columns, seed=2) * torch.logspace(-3, 3, 70)[:, None]
        every = by_kernel(made, x, randn(rows))
        assert_product(every, made, x, randn(rows))
        for count in (1, 2, 3, 4, 7, 15, 16, 17, 35):
            assert torch.equal(by_kernel(made, x[:count], randn(rows)), every[:count])
        for i in (5, 69):
            assert torch.equal(by_kernel(made, x[i : i + 1], randn(rows))[0], every[i])
        assert_product(made(x, randn(rows)), made, x, randn(rows), 1e-6)


@needs_kernels
@pytest.mark.parametrize("sizes", [(32, 16), (5, 33, 18), (1, 1)], ids=str)
def test_stacked_schemes(sizes: tuple[int, ...], poisoned: None) -> None:
    """Parts of several schemes have the bits that they have alone, with any number of rows of x."""
    parts = [random_weight(name, rows, 256) for name, rows in zip(("Q4_K", "Q6_K", "Q8_0"), sizes, strict=False)]
    stacked, x, bias = StackedWeight(parts), randn(20, 256), randn(sum(sizes))
    assert stacked.shape == (sum(sizes), 256)
    assert torch.equal(stacked.floats(), torch.cat([part.floats() for part in parts]))
    for count in (1, 3, 20):
        got = by_kernel(stacked, x[:count], bias)
        alone = [by_kernel(part, x[:count], some) for part, some in zip(parts, bias.split(sizes), strict=True)]
        assert torch.equal(got, torch.cat(alone, 1))
    torch.testing.assert_close(stacked(x, bias), got, atol=1e-3, rtol=1e-3)
    for row in (0, sizes[0], sum(sizes) - 1):
        part, at = stacked.part(row)
        assert torch.equal(part.floats(slice(at, at + 1)), stacked.floats()[row : row + 1])


@needs_kernels
def test_a_range_of_rows() -> None:
    """That begins with a tile: the rows of an expert."""
    from infer.backend.cpu import gemm_int

    made, x, first = random_weight("Q4_K", 96, 256), randn(5, 256), 32
    every, tile_bytes = by_kernel(made, x), made.packed[0].nbytes
    at, out = made.packed.data_ptr() + first // gemm_int.TILE * tile_bytes, torch.full((5, 40), torch.nan)
    part = gemm_int.part_record(made.scheme, at, 40, tile_bytes)
    gemm_int.gemm_int(1, np.array([part], gemm_int.PART), 0, 40, 256, x, len(x), out)
    assert torch.equal(out, every[:, first : first + 40])


# Products


def linear(made: QuantizedWeight | StackedWeight, bias: Tensor | None = None) -> Linear:
    product = Linear(1, 1, bias=bias is not None)
    product.weight = made
    if bias is not None:
        product.bias = nn.Parameter(bias, requires_grad=False)
    return product


def by_kernel(made: QuantizedWeight | StackedWeight, x: Tensor, bias: Tensor | None = None) -> Tensor:
    return ops.linear(x, linear(made, bias))


def by_torch(made: QuantizedWeight, x: Tensor, bias: Tensor | None = None) -> Tensor:
    return made(x, bias)


# Both round x alike; the kernel keeps a row's bits beside that.
both_ways = pytest.mark.parametrize(
    "multiply", [pytest.param(by_kernel, marks=needs_kernels), by_torch], ids=["kernel", "torch"]
)


def assert_product(got: Tensor, made: QuantizedWeight, x: Tensor, bias: Tensor | None, slack: float = 0.0) -> None:
    """As the weights in floats give it with x rounded, but for the order of sums."""
    floats, seen = made.floats().double(), round_activations(x.float()).double()
    expected = seen @ floats.T + (0 if bias is None else bias.double())
    size = seen.abs() @ floats.abs().T + (0 if bias is None else bias.double().abs())
    if made.scheme.minimum:  # minima are multiplied with the sum of a part
        minima = made.scheme.scales(made.blocks())[1].flatten(1).abs().double()
        size = size + seen.abs() @ minima.repeat_interleave(made.scheme.part, 1)[:, : made.columns].T
    assert ((got.double() - expected).abs() <= (1e-6 + slack) * size + 1e-30).all()


ROWS = [1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 64, 70]


@needs_kernels
@both_widths
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize(
    ("rows", "columns"), [(1, 1), (2, 1), (1, 33), (3, 31), (4, 32), (5, 64), (6, 100), (7, 2), (130, 96), (63, 577)]
)
def test_products(rows: int, columns: int, bias: bool, kind: str, poisoned: None) -> None:
    """Of any shape, with any number of rows, each of which comes out with the same bits alone or among others."""
    made, added = weight(rows, columns, kind), randn(rows, seed=9) if bias else None
    x = randn(max(ROWS), columns, seed=2) * torch.logspace(-3, 3, max(ROWS))[:, None]
    before = x.clone()
    every = by_kernel(made, x, added)
    assert_product(every, made, x, added)
    for count in ROWS:
        assert torch.equal(by_kernel(made, x[:count], added), every[:count])
    for i in (0, 1, 5, 69):
        assert torch.equal(by_kernel(made, x[i : i + 1], added)[0], every[i])
    assert torch.equal(x, before)


@needs_kernels
@both_widths
@given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 200),
    count=st.integers(1, 20),
    seed=st.integers(0, 1000),
    scale=st.sampled_from([1e-20, 1e-3, 1.0, 1e5]),
)
@settings(deadline=None, max_examples=60)
def test_random_products(rows: int, columns: int, count: int, seed: int, scale: float, kind: str) -> None:
    made = QuantizedWeight.of(randn(rows, columns, seed=seed), kind)
    x = randn(count, columns, seed=seed + 1) * scale
    x[torch.rand(x.shape) < 0.2] = 0.0
    assert_product(by_kernel(made, x), made, x, None)
    assert_product(made(x), made, x, None, 1e-6)


@both_ways
@both_widths
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_x_of_any_dtype(dtype: torch.dtype, kind: str, multiply: Callable) -> None:
    made, x, bias = weight(10, 70, kind), randn(3, 70, seed=1).to(dtype), randn(10).to(dtype)
    got = multiply(made, x, bias)
    assert got.dtype is dtype
    expected = multiply(made, x.float(), bias.float()).to(dtype)
    if multiply is by_kernel:  # widens what it is given
        assert torch.equal(got, expected)
    near = {torch.bfloat16: 0.05, torch.float16: 0.01, torch.float64: 1e-4}[dtype]
    torch.testing.assert_close(got, expected, atol=near, rtol=near)


@both_ways
@both_widths
def test_no_rows(kind: str, multiply: Callable) -> None:
    """As of a chunk of a prompt, of which no logits are wanted."""
    assert multiply(weight(10, 70, kind), torch.empty(0, 70), randn(10)).shape == (0, 10)


@both_ways
@both_widths
def test_x_in_any_layout(kind: str, multiply: Callable) -> None:
    made, x = weight(10, 70, kind), randn(70, 3)
    assert torch.equal(multiply(made, x.T), multiply(made, x.T.contiguous()))
    assert torch.equal(multiply(made, randn(3, 140)[:, ::2]), multiply(made, randn(3, 140)[:, ::2].contiguous()))


@both_ways
@both_widths
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_x_that_is_not_finite(value: float, kind: str, multiply: Callable) -> None:
    """It shows, in its own row alone."""
    made, x = weight(10, 70, kind), randn(5, 70)
    expected = multiply(made, x)
    for column in (0, 31, 32, 69):
        wrong = x.clone()
        wrong[2, column] = value
        got = multiply(made, wrong)
        assert not got[2].isfinite().any()
        got[2] = expected[2]
        assert torch.equal(got, expected)


@both_ways
@both_widths
def test_x_of_extreme_size(kind: str, multiply: Callable) -> None:
    for size in [1e-45, 1e-39, 1e-38, 1e-36, 1e-34, 1e-30, 1e30, 1e36]:
        made = QuantizedWeight.of(torch.full((4, 64), 0.01), kind)
        x = torch.full((2, 64), size)
        x[:, ::2] = 0.0
        expected = x.double() @ made.floats().double().T
        torch.testing.assert_close(multiply(made, x).double(), expected, rtol=1e-2, atol=1e-33)


@both_widths
@pytest.mark.parametrize("columns", [1, 63, 65, 96, 200])
def test_x_of_another_width(columns: int, kind: str) -> None:
    """Refused, as torch does; kernels are given no model whose weights do not fit each other."""
    with pytest.raises((ValueError, RuntimeError), match="64"):
        weight(8, 64, kind)(randn(2, columns))


@needs_kernels
@both_widths
@pytest.mark.parametrize("at_once", [1, 300, quantized.AT_ONCE])
def test_the_plain_way(at_once: int, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same sums, over floats: some rows of a weight at a time."""
    monkeypatch.setattr(quantized, "AT_ONCE", at_once)
    made, x, bias = weight(11, 70, kind), randn(4, 70, seed=5), randn(11)
    assert_product(made(x, bias), made, x, bias, 1e-6)
    torch.testing.assert_close(made(x, bias), by_kernel(made, x, bias), atol=1e-4, rtol=1e-5)
    assert made(x.bfloat16(), bias.bfloat16()).dtype is torch.bfloat16


@both_widths
def test_gradients_with_respect_to_x(kind: str) -> None:
    made, bias = weight(11, 70, kind), randn(11)
    x = randn(4, 70).requires_grad_()
    out = made(x, bias)
    torch.testing.assert_close(out, F.linear(x, made.floats(), bias))
    out.backward(randn(4, 11))
    torch.testing.assert_close(x.grad, randn(4, 11) @ made.floats())
    with torch.no_grad():
        assert not made(x, bias).requires_grad


def test_other_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="run on the CPU only, but x is on meta"):
        weight(4, 32, "int8")(torch.zeros(1, 32, device="meta"))


def vnni(builder: Any, sums: Any, weights: Any, x: Any) -> Any:
    """What x86's instruction does, by others: of its factors the first is unsigned."""
    from llvmlite import ir

    from infer.backend.cpu.simd import INT32, TILE, TILE_CODES, TILE_INTS

    wide = ir.VectorType(INT32, 4 * TILE)
    weights, x = builder.bitcast(weights, TILE_CODES), builder.bitcast(x, TILE_CODES)
    products = builder.mul(builder.zext(weights, wide), builder.sext(x, wide))
    for i in range(4):
        lanes = ir.Constant(TILE_INTS, list(range(i, 4 * TILE, 4)))
        sums = builder.add(sums, builder.shuffle_vector(products, products, lanes))
    return sums


@pytest.fixture(scope="module", params=amount(["none", "vnni"], ["none"]))
def generic(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """GEMM compiled for a core without a dot product, or for one with that of x86."""
    from infer.backend.cpu import gemm_int, simd

    def call(builder: Any, name: str, result: Any, *args: Any) -> Any:
        return vnni(builder, *args) if name == simd.VNNI else plain(builder, name, result, *args)

    plain = simd.call_llvm
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simd, "DOT", simd.VNNI if request.param == "vnni" else None)
        patch.setattr(simd, "UNSIGNED_OFFSET", 128 if request.param == "vnni" else 0)
        patch.setattr(simd, "call_llvm", call)
        patch.setattr("infer.machine.allows_amx", lambda: False)
        patch.setenv("NUMBA_CACHE_DIR", str(tmp_path_factory.mktemp("kernels")))
        spec = importlib.util.spec_from_file_location("generic_gemm", gemm_int.__file__)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        for name in GENERIC:  # compiles
            generic_gemm(module, random_weight(name, 4, 256), randn(5, 256))
    return module


def generic_gemm(module: Any, made: QuantizedWeight, x: Tensor) -> Tensor:
    out = torch.full((len(x), made.rows), torch.nan)
    made.set_tile_rows(module.TILE)
    part = module.part_record(made.scheme, made.packed.data_ptr(), made.rows, made.packed[0].nbytes)
    module.gemm_int(1, np.array([part], module.PART), 0, *made.shape, x, len(x), out)
    return out


@needs_kernels
@pytest.mark.parametrize("name", GENERIC)
@pytest.mark.parametrize(("rows", "count"), [(1, 1), (5, 3), (64, 4), (130, 9), (33, 50)])
def test_other_cores(rows: int, count: int, name: str, generic: Any) -> None:
    """The same bits, with the most extreme codes too."""
    made, x = random_weight(name, rows, 512), randn(count, 512)
    assert torch.equal(generic_gemm(generic, made, x), by_kernel(made, x))
    made.set_tile_rows(1)
    made.scheme.field(made.packed, "codes")[:, :, :16] = 0x80
    x[:, ::2] = x.abs().max()
    assert torch.equal(generic_gemm(generic, made, x), by_kernel(made, x))


OTHER_TILES = """
import sys
import infer.machine
infer.machine.byte_lanes = lambda: int(sys.argv[1])
import torch
from infer.backend.cpu.ops import linear
from infer.nn.linear import Linear
from infer.nn.quantized import QuantizedWeight
for name, blocks in torch.load(sys.argv[2]).items():
    part = Linear(1, 1, bias=False)
    part.weight = QuantizedWeight(37, 256, name)
    part.weight.fill(0, blocks)
    x = torch.randn(6, 256, generator=torch.Generator().manual_seed(0))
    torch.save(linear(x, part), f"{sys.argv[2]}.{name}")
"""
HASWELL = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+sse4.2,+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+popcnt"}


@needs_kernels
@pytest.mark.skipif(not ALL, reason="compiles for minutes: in `make test-all`")
@pytest.mark.parametrize(("lanes", "core"), [(4, {}), (8, {}), (16, {}), (8, HASWELL)])
def test_tiles_of_other_machines(lanes: int, core: dict[str, str], tmp_path: Path) -> None:
    """Weights lie otherwise, and products have the same bits."""
    if core and platform.machine() != "x86_64":
        pytest.skip("this core is of x86")
    given = {name: random_weight(name, 37, 256) for name in GENERIC}
    torch.save({name: made.blocks() for name, made in given.items()}, tmp_path / "given")
    program = [sys.executable, "-c", OTHER_TILES, str(lanes), str(tmp_path / "given")]
    folder = {"NUMBA_CACHE_DIR": str(tmp_path)}  # kernels for other tiles
    subprocess.run(program, check=True, timeout=600, env=os.environ | core | folder)
    for name, made in given.items():
        assert torch.equal(torch.load(tmp_path / f"given.{name}"), by_kernel(made, randn(6, 256)))


@needs_kernels
@pytest.mark.parametrize(("core", "lanes"), [("cascadelake", 16), ("cascadelake", 4), ("alderlake", 8)])
def test_the_instruction_of_x86(core: str, lanes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """That LLVM knows it by the name and the types it is called by, and takes x from memory itself."""
    from llvmlite import binding, ir

    from infer.backend.cpu import simd

    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    try:
        target = binding.Target.from_triple("x86_64-unknown-linux-gnu")
    except RuntimeError:
        pytest.skip("this LLVM has no x86")
    name = f"llvm.x86.avx512.vpdpbusd.{32 * lanes}"
    ints, codes = ir.VectorType(simd.INT32, lanes), ir.VectorType(simd.INT8, 4 * lanes)
    for field, value in {"TILE": lanes, "TILE_INTS": ints, "TILE_CODES": codes, "VNNI": name}.items():
        monkeypatch.setattr(simd, field, value)
    monkeypatch.setattr(simd, "DOT", name)
    module, address = ir.Module(), ir.IntType(64)
    function = ir.Function(module, ir.FunctionType(ints, [ints, codes, address]), "dot")
    builder = ir.IRBuilder(function.append_basic_block())
    builder.ret(simd.emit_dot(builder, *function.args, 3, small=True))
    parsed = binding.parse_assembly(str(module))
    parsed.verify()
    code = target.create_target_machine(cpu=core, opt=3).emit_assembly(parsed)
    assert code.count("vpdpbusd") == 1
    assert code.count("{1to") == (core == "cascadelake")


# Modules


class Pair(nn.Module):
    def __init__(self, quantized: QuantizedWeight) -> None:
        super().__init__()
        self.embedding, self.linear = Embedding(1, 1), Linear(1, 1)
        self.embedding.weight = quantized
        self.linear.weight = quantized


@both_widths
def test_embedding_and_linear(kind: str) -> None:
    made = weight(20, 48, kind)
    pair = Pair(made)
    ids = torch.tensor([3, 19, 3])
    assert torch.equal(pair.embedding(ids), made.floats()[ids])
    x, residual = randn(3, 48), randn(3, 20)
    assert torch.equal(pair.linear(x), made(x))
    torch.testing.assert_close(pair.linear(x, residual.clone()), made(x) + residual)
    assert [name for name, _ in pair.named_parameters()] == []
    assert len(list(pair.buffers())) == 1


@needs_kernels
@both_widths
def test_rows_by_the_kernel(kind: str, poisoned: None) -> None:
    """As floats have them, bit for bit; one that is not there is refused."""
    made, ids = weight(21, 70, kind), torch.tensor([3, 20, 3, 0])
    assert torch.equal(ops.look_up(made, ids), made.floats()[ids])
    for wrong in (-1, 21):
        with pytest.raises(IndexError):
            ops.look_up(made, torch.tensor([0, wrong]))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder for each family, its head tied and not; one in pieces; a nanoGPT checkpoint."""
    home = tmp_path_factory.mktemp("quantized")
    made = {
        f"{family}{'-tied' * tied}": save_folder(
            reference_model(family, tie_word_embeddings=tied), home / f"{family}-{tied}"
        )
        for family in FAMILIES
        for tied in (False, True)
    }
    made["sharded"] = save_folder(reference_model(), home / "sharded", max_shard_size="50KB")
    assert len(list(made["sharded"].glob("*.safetensors"))) > 2
    made["biases"] = save_folder(reference_model(attention_bias=True, mlp_bias=True), home / "biases")
    made["odd"] = save_folder(
        reference_model(vocab_size=131, hidden_size=36, intermediate_size=50, num_attention_heads=6), home / "odd"
    )
    made["nanogpt"] = save_nanogpt(reference_model("gpt2", tie_word_embeddings=True, n_inner=None), home / "ckpt.pt")
    return made


CHECKPOINTS = [f"{family}{tied}" for family in FAMILIES for tied in ("", "-tied")]
CHECKPOINTS += ["sharded", "biases", "odd", "nanogpt"]
every_checkpoint = pytest.mark.parametrize("name", CHECKPOINTS)
every_quantize = pytest.mark.parametrize("quantize", BITS)


def load(path: Path, quantize: str | None = None, **options: Any) -> Decoder:
    return load_model(path, device="cpu", quantize=quantize, **({"dtype": "float32"} | options))[0]


def logits(model: Decoder, ids: Tensor | None = None) -> Tensor:
    """Of all positions, through kernels where there are any."""
    ids = random_ids() if ids is None else ids
    return kernel_logits(model, NoCache(len(ids)), ids)


@every_checkpoint
@every_quantize
def test_loading(folders: dict[str, Path], name: str, quantize: str) -> None:
    """Every matrix is the checkpoint's, rounded; everything else is as it was."""
    model, reference = load(folders[name], quantize), load(folders[name])
    assert model.dtype is torch.float32
    assert not model.training
    for parameter_name, expected in reference.named_parameters():
        module_name, _, kind = parameter_name.rpartition(".")
        got = getattr(model.get_submodule(module_name), kind)
        if expected.dim() == 1 or module_name.endswith(("embed_positions", "router")):
            assert torch.equal(got, expected)
            continue
        wide = module_name in ("embed_tokens", "lm_head") or module_name.endswith("qkv_proj")
        assert got.kind == ("int8" if wide else quantize)
        assert torch.equal(got.blocks(), QuantizedWeight.of(expected, got.kind).blocks()), parameter_name
    tied = reference.lm_head.weight is reference.embed_tokens.weight
    assert (model.lm_head.weight is model.embed_tokens.weight) == tied


@every_checkpoint
@torch.inference_mode()
def test_logits_near_those_of_floats(folders: dict[str, Path], name: str) -> None:
    model = load(folders[name])
    expected = logits(model)
    most_int8 = 0.24 if model.config.num_experts else 0.08  # a token of a mixture may go to another expert
    for quantize, most in (("int8", most_int8), ("int4", 0.8)):
        off = (logits(load(folders[name], quantize)) - expected).square().mean().sqrt() / expected.std()
        assert 0 < off < most, quantize


@every_checkpoint
@every_quantize
@torch.inference_mode()
def test_a_model_computes_what_its_floats_do(folders: dict[str, Path], name: str, quantize: str) -> None:
    """Against the same model with its weights turned back into floats: what is left is the rounding of x."""
    model = load(folders[name], quantize)
    floats = copy.deepcopy(model)
    for module in floats.modules():
        if isinstance(getattr(module, "weight", None), QuantizedWeight):
            values = module.weight.floats()
            del module.weight
            module.weight = nn.Parameter(values, requires_grad=False)
    expected, got = logits(floats), logits(model)
    off = (got - expected).square().mean().sqrt() / expected.std()
    assert off < (0.08 if quantize == "int4" else 1e-3)


@needs_kernels
@every_checkpoint
@every_quantize
@torch.inference_mode()
def test_kernels_give_what_the_modules_do(folders: dict[str, Path], name: str, quantize: str, poisoned: None) -> None:
    """Without a cache, and a prompt and single tokens in one."""
    model, ids = load(folders[name], quantize), random_ids(1, 40)
    expected = model(ids)
    cache = KVCache.from_model_config(model.config, 40, dtype="float32", device="cpu")
    pieces = ids.split_with_sizes([37, 1, 1, 1], 1)
    # What differs in its last digit may be rounded to another step of x.
    near = (0.1 if quantize == "int4" else 1e-3) * expected.std()
    assert (logits(model, ids) - expected).abs().max() < near
    assert (torch.cat([kernel_logits(model, cache, part) for part in pieces], 1) - expected).abs().max() < near


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3-tied", "gpt2-tied"])
@every_quantize
def test_cached_as_uncached(folders: dict[str, Path], name: str, quantize: str) -> None:
    model = load(folders[name], quantize)
    params = SamplingParams(temperature=1.0, seed=1, max_new_tokens=30, ignore_eos=True)
    prompt = random_ids(1, 10)[0].tolist()
    expected = generate(model, Letters(), prompt, params, use_kv_cache=False).token_ids
    for cls in CACHES:
        for options in ({}, {"prefill_chunk": 3}):
            cache = cls.from_model_config(model.config, 40, dtype="float32", device="cpu")
            assert generate(model, Letters(), prompt, params, cache=cache, **options).token_ids == expected
    assert len(set(expected)) > 1


@every_quantize
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
@pytest.mark.parametrize("name", ["llama", "gemma3-tied", "gpt2-tied"])
@torch.inference_mode()
def test_other_dtypes(folders: dict[str, Path], name: str, dtype: str, quantize: str) -> None:
    """Of all that is not quantized, and of what flows between the layers: the cache's too."""
    model = load(folders[name], quantize, dtype=dtype)
    expected = logits(load(folders[name], quantize))
    got = all_logits(model, NoCache(2), random_ids())
    assert got.dtype is model.dtype is getattr(torch, dtype)
    off = (got.float() - expected).square().mean().sqrt() / expected.std()
    assert off < 0.1
    params = SamplingParams(max_new_tokens=5, ignore_eos=True)
    assert generate(model, Letters(), random_ids(1, 10)[0].tolist(), params).generated_tokens == 5


@every_quantize
def test_auto_is_float32(folders: dict[str, Path], quantize: str) -> None:
    assert load(folders["llama"], quantize, dtype="auto").dtype is torch.float32


def test_what_is_refused(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="quantize must be one of auto, int4, int8, not 'int3'"):
        load(folders["llama"], "int3")
    for quantize in BITS:
        with pytest.raises(ValueError, match=f"run on the CPU only: .* leave {quantize} out on cuda") as error:
            resolve_weight_dtype("auto", torch.device("cuda"), quantize)
        assert "\n" not in str(error.value)
    from infer.loader import load as module

    monkeypatch.setattr(module, "available_memory", lambda device, processes=1: 1000)
    with pytest.raises(ValueError, match=r"the weights need .* GB in int4, but 0.00 GB are free"):
        load(folders["llama"], "int4")


@every_quantize
def test_a_checkpoint_that_cannot_be_quantised(tmp_path: Path, quantize: str) -> None:
    reference = reference_model()
    reference.model.layers[1].mlp.down_proj.weight[3, 4] = torch.nan
    path = save_folder(reference, tmp_path / "nan")
    with pytest.raises(ValueError, match="not finite, or beyond 65,504, cannot be quantized"):
        load(path, quantize)


# Keeping them


def built_alike(path: Path, quantize: str) -> Decoder:
    """An empty model with the form of the one that would be loaded."""
    checkpoint = open_checkpoint(path)
    with torch.device("meta"):
        model = build_model(checkpoint.config)
    device = torch.device("cpu")
    _materialize(model, device, choose_weight_dtypes(model, checkpoint, torch.float32, device, quantize))
    return model.eval()


def by_torch_save(model: Decoder, into: Decoder, path: Path) -> Decoder:
    torch.save(model.state_dict(), path)
    into.load_state_dict(torch.load(path, weights_only=True))
    return into


def by_safetensors(model: Decoder, into: Decoder, path: Path) -> Decoder:
    safetensors.torch.save_model(model, str(path))
    assert safetensors.torch.load_model(into, path) == (set(), [])
    return into


def by_deepcopy(model: Decoder, into: Decoder, path: Path) -> Decoder:
    return copy.deepcopy(model)


def by_pickle(model: Decoder, into: Decoder, path: Path) -> Decoder:
    return pickle.loads(pickle.dumps(model))


def by_saving_it_whole(model: Decoder, into: Decoder, path: Path) -> Decoder:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("way", [by_torch_save, by_safetensors, by_deepcopy, by_pickle, by_saving_it_whole])
@pytest.mark.parametrize("name", ["llama", "gemma3-tied", "gpt2-tied"])
@every_quantize
@torch.inference_mode()
def test_saved_and_loaded(folders: dict[str, Path], name: str, quantize: str, way: Callable, tmp_path: Path) -> None:
    """It computes the same, and goes on to when the original is gone."""
    model = load(folders[name], quantize)
    expected = logits(model)
    again = way(model, built_alike(folders[name], quantize), tmp_path / "file")
    for buffer in model.buffers():
        buffer.zero_()
    assert not torch.equal(logits(model), expected)
    del model
    assert torch.equal(logits(again), expected)
    tied = name.endswith("tied")
    assert (again.lm_head.weight is again.embed_tokens.weight) == tied


@every_quantize
def test_casting_a_model_keeps_packed_weights(folders: dict[str, Path], quantize: str) -> None:
    model = load(folders["llama"], quantize)
    before = [buffer.clone() for buffer in model.buffers()]
    model.to(torch.bfloat16)
    assert all(buffer.dtype is torch.uint8 for buffer in model.buffers())
    assert all(map(torch.equal, model.buffers(), before))
    assert model.dtype is torch.bfloat16
    model.to(torch.float32)
    assert logits(model).isfinite().all()


@every_quantize
def test_weights_that_change_in_place(folders: dict[str, Path], quantize: str) -> None:
    """What the kernels remember of a model is where its weights are, not what they are."""
    model = load(folders["llama"], quantize)
    before = logits(model)
    model.layers[0].mlp.down_proj.weight.fill(0, quantize_rows(torch.zeros(64, 96), quantize))
    assert not torch.equal(logits(model), before)


@every_quantize
@torch.inference_mode()
def test_weights_that_are_exchanged(folders: dict[str, Path], quantize: str) -> None:
    model, reference = load(folders["llama"], quantize), load(folders["llama"], quantize)
    logits(model)
    for m in (model, reference):
        down = m.layers[0].mlp.down_proj
        down.weight = QuantizedWeight.of(randn(64, 96) * 0.1, "int4")
    model.layers[1].mlp.down_proj.weight = nn.Parameter(reference.layers[1].mlp.down_proj.weight.floats())
    got, expected = logits(model), reference(random_ids())
    assert (got - expected).abs().max() < 0.1 * expected.std()
