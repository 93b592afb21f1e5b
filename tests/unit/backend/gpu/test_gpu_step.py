"""The Triton kernels of a decode step beside the modules they stand for.

Where there is no GPU they run in Triton's interpreter, which shows that they compute the right thing, not that they
compile or are fast.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton", reason="needs Triton, which is there on Linux alone")

from amount import amount, once  # noqa: E402
from interpreted import hurried, matrix_units, poison  # noqa: E402
from tiny import FAMILIES  # noqa: E402

from infer.backend import gpu  # noqa: E402
from infer.backend.gpu import attention, device_check, gemm, launch_kernels, step  # noqa: E402
from infer.backend.gpu.backend import GpuBackend  # noqa: E402
from infer.backend.parts import BlockParts, UnsupportedByKernels, parts_of  # noqa: E402
from infer.cache.base import BaseCache  # noqa: E402
from infer.cache.contiguous import KVCache  # noqa: E402
from infer.cache.ring import SlidingCache  # noqa: E402
from infer.cache.table import Table  # noqa: E402
from infer.config import RopeConfig  # noqa: E402
from infer.models.common import Decoder  # noqa: E402
from infer.models.rows import Row  # noqa: E402
from infer.nn.activation import ACTIVATIONS  # noqa: E402
from infer.nn.linear import Linear  # noqa: E402
from infer.nn.norm import LayerNorm, Norm, RMSNorm, ZeroCenteredRMSNorm  # noqa: E402
from infer.nn.rope import Rope, apply_rope  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = pytest.mark.skipif(
    DEVICE.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1", reason="needs a GPU, or TRITON_INTERPRET=1"
)
BLOCK_S = 16
TOLERANCES = {torch.float32: (1e-4, 1e-4), torch.float16: (4e-3, 3e-3), torch.bfloat16: (3e-2, 2e-2)}
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)
BATCHES = [
    (1, torch.float32),
    (17, torch.float32),
    *((b, dtype) for dtype in DTYPES[1:] for b in (1, 2, 9)),
    (17, torch.float16),
]


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "SMALL_ROWS", 16)


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch, attention, gemm, step)
    share_keys(monkeypatch, 8)
    if DEVICE.type == "cpu":
        matrix_units(monkeypatch)
        hurried(monkeypatch)


def share_keys(monkeypatch: pytest.MonkeyPatch, programs: int, groups: int = 16) -> None:
    monkeypatch.setattr(attention, "BLOCK", {2: BLOCK_S, 4: BLOCK_S})
    monkeypatch.setattr(attention, "GROUPS", groups)
    monkeypatch.setattr(attention, "MAX_PROGRAMS", programs)


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def randomised(module: Any, generator: torch.Generator, dtype: torch.dtype) -> Any:
    for parameter in module.parameters():
        noise = torch.randn(parameter.shape, generator=generator) * 0.3
        parameter.data = noise if parameter.dim() > 1 else parameter.data + noise
    return module.requires_grad_(False).to(DEVICE, dtype)


def random(generator: torch.Generator, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def counters(count: int = 32) -> Tensor:
    return torch.zeros(count, dtype=torch.int32, device=DEVICE)


def close(got: Tensor, expected: Tensor) -> None:
    assert got.dtype is expected.dtype
    atol, rtol = TOLERANCES[got.dtype]
    torch.testing.assert_close(got, expected, atol=atol, rtol=rtol)


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (1, ((0, 1),)),
        (64, ((0, 64),)),
        (60, ((0, 64),)),  # hardly padded
        (96, ((0, 64), (64, 32))),
        (37, ((0, 32), (32, 4), (36, 1))),
        (77, ((0, 64), (64, 8), (72, 8))),  # the third is padded
        (1152, ((0, 1024), (1024, 128))),
    ],
)
def test_parts(size: int, expected: Any) -> None:
    assert gemm.in_parts(size) == expected


def test_parts_cover_every_size_once() -> None:
    for size in range(1, 700):
        parts = gemm.in_parts(size)
        starts, sizes = zip(*parts, strict=True)
        assert len(parts) <= 3
        assert starts == (0, *np.cumsum(sizes)[:-1])
        assert starts[-1] < size <= starts[-1] + sizes[-1]
        assert all(part & (part - 1) == 0 for part in sizes)


NORMS: dict[str, Callable[[int], Norm]] = {
    "rms": lambda size: RMSNorm(size, 1e-5),
    "zero_centered": lambda size: ZeroCenteredRMSNorm(size, 1e-6),
    "layer": lambda size: LayerNorm(size, 1e-5),
    "layer_without_bias": lambda size: LayerNorm(size, 1e-5, bias=False),
}
# K, N, norm, activation, gated, bias, after: each value of each, and sizes that nothing divides.
PRODUCTS = [
    (77, 3, "rms", "silu", True, False, False),
    (37, 5, "rms", "gelu_tanh", True, True, False),
    (100, 9, "layer", "gelu_tanh", False, True, False),
    (77, 18, "layer_without_bias", "gelu", False, False, False),
    (96, 7, "zero_centered", "", False, False, True),
    (77, 4, "zero_centered", "gelu_tanh", True, False, True),
    (32, 1, "rms", "", False, True, True),
    (61, 3, "layer_without_bias", "gelu", True, True, False),
]


def some(i: int) -> list[tuple[int, torch.dtype]]:
    """Of BATCHES: one row, few, and many."""
    return [(1, DTYPES[i % 3]), (2 + i % 2 * 7, DTYPES[1 + i // 2 % 2]), (17, DTYPES[i % 2])]


@pytest.mark.parametrize(
    ("case", "batch", "dtype"),
    [(case, *each) for i, case in enumerate(PRODUCTS) for each in amount(BATCHES, some(i))],
    ids=str,
)
@pytest.mark.usefixtures("few")
@torch.inference_mode()
def test_a_product_of_what_is_normed(case: Any, batch: int, dtype: torch.dtype, generator: torch.Generator) -> None:
    """One row, few, and many: with the norm's scale behind the product, or all of it in `add_norm_rows` before."""
    k, n, kind, activation, gated, bias, after = case
    linear = randomised(Linear(k, n * (2 if gated else 1), bias=bias), generator, dtype)
    norm = randomised(NORMS[kind](k), generator, dtype)
    x, added = random(generator, dtype, batch, k), random(generator, dtype, batch, k)
    behind = randomised(NORMS[kind](k), generator, dtype) if after else None
    if behind is not None:
        behind.bias = None  # as `plan` asks for
    before = x.clone()
    got, residual = gemm.norm_gemm(
        linear,
        gemm.Residual(x, added, behind) if after else gemm.Residual(x),
        norm,
        counters(),
        activation=activation,
        gated=gated,
    )
    complete = x if behind is None else x + behind(added)
    y = norm(complete).float() @ linear.weight.float().T + (linear.bias.float() if bias else 0)
    if activation:
        first, *second = y.to(dtype).float().chunk(2, -1) if gated else (y.to(dtype).float(),)
        y = ACTIVATIONS[activation](first) * (second[0] if gated else 1)
    close(got, y.to(dtype))
    assert residual.added is None
    close(residual.x, complete)
    assert torch.equal(x, before)  # others still read it


@pytest.mark.parametrize(("batch", "dtype", "bias"), [(*each, bool(i % 2)) for i, each in enumerate(BATCHES)], ids=str)
@pytest.mark.usefixtures("few")
@torch.inference_mode()
def test_a_product_that_is_added(batch: int, bias: bool, dtype: torch.dtype, generator: torch.Generator) -> None:
    linear = randomised(Linear(77, 13, bias=bias), generator, dtype)
    x, carried = random(generator, dtype, batch, 77), random(generator, dtype, batch, 13)
    norm = RMSNorm(13, 1e-5).to(DEVICE, dtype)
    done = gemm.gemm_add(linear, x, gemm.Residual(carried), None, norm, counters())
    expected = x.float() @ linear.weight.float().T + (linear.bias.float() if bias else 0)
    close(done.x, (expected + carried).to(dtype))
    assert done.added is None
    waiting = gemm.gemm_add(linear, x, gemm.Residual(carried), norm, norm, counters())
    assert waiting.x is carried
    assert waiting.after is norm
    close(waiting.added, expected.to(dtype))


@pytest.mark.parametrize(
    ("batch", "k", "n", "slices"),
    [
        (2, 530, 70, 2),  # shared by programs, and nothing divides it
        (3, 512, 128, 4),  # shared evenly
        (130, 525, 66, 8),  # by a kernel for many
        (5, 96, 64, 1),
        (130, 96, 70, 1),
    ],
)
@torch.inference_mode()
def test_a_product_in_slices(batch: int, k: int, n: int, slices: int, generator: torch.Generator) -> None:
    linear = randomised(Linear(k, n, bias=True), generator, torch.float32)
    linear.slices = slices
    x, carried = random(generator, torch.float32, batch, k), random(generator, torch.float32, batch, n)
    finished = counters(256)
    for _ in range(2):
        got, _ = gemm.gemm(linear, gemm.GemmInput(x), finished, addend=carried)
        torch.testing.assert_close(got, linear(x) + carried, atol=1e-3, rtol=1e-4)
        assert not finished.any()


@pytest.mark.parametrize(("gated", "dtype"), [(True, torch.float32), *((False, dtype) for dtype in DTYPES)], ids=str)
@pytest.mark.parametrize(("batch", "k", "n"), [(2, 40, 13), (7, 270, 150), (17, 64, 128)])
@pytest.mark.usefixtures("few")
def test_a_norm_between_two_products(
    batch: int, k: int, n: int, gated: bool, dtype: torch.dtype, generator: torch.Generator
) -> None:
    """The first multiplies its weight and adds up the squares, the second scales."""
    first = randomised(Linear(k, n), generator, dtype)
    norm = randomised(ZeroCenteredRMSNorm(n, 1e-5), generator, dtype)
    second = randomised(Linear(n, 24, bias=True), generator, dtype)
    x, carried = random(generator, dtype, batch, k), random(generator, dtype, batch, n)
    residual = gemm.gemm_add(first, x, gemm.Residual(carried), None, norm, counters(256))
    assert (residual.normed is None) == (dtype is torch.float16)
    activation = "silu" if gated else ""
    got, after = gemm.norm_gemm(second, residual, norm, counters(256), activation=activation, gated=gated)
    assert after.x is residual.x
    assert second.bias is not None
    expected = norm(residual.x.float()) @ second.weight.float().T + second.bias.float()
    if gated:
        gate, up = expected.chunk(2, -1)
        expected = torch.nn.functional.silu(gate) * up
    close(got, expected.to(dtype))


# K, N, slices, gated, bias; then rows of a warp, loads of a chunk, and chunks held; None where the sizes say.
OF_EIGHT = [
    (256, 48, 1, False, False, (16, 2, 2)),
    (256, 48, 2, True, True, (16, 1, 1)),
    (300, 37, 1, True, True, (8, 1, 3)),  # nothing divides it
    (300, 37, 2, False, True, (8, 1, 10)),  # more than there are
    (256, 20, 1, True, False, (16, 4, 1)),
    (256, 21, 8, True, False, None),
    (520, 21, 4, False, True, None),
    (2100, 16, 1, False, False, (16, 2, 8)),
    (1024, 16, 2, True, False, None),
]


@pytest.mark.parametrize("case", OF_EIGHT, ids=str)
@pytest.mark.parametrize(("batch", "dtype"), [(1, torch.float16), (5, torch.bfloat16), (8, torch.float16)], ids=str)
@torch.inference_mode()
def test_a_product_of_up_to_eight_rows(
    case: Any, batch: int, dtype: torch.dtype, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prepared for a norm, in float16 too: the numbers are small."""
    k, n, slices, gated, bias, sizes = case
    if sizes is not None:
        monkeypatch.setattr(gemm, "_gemv_sizes", lambda *_: gemm.GemvSizes(*sizes))
    monkeypatch.delattr(gemm, "_launch_gemm_small")  # it is not what is tested
    linear = randomised(Linear(k, n * (2 if gated else 1), bias=bias), generator, dtype)
    linear.weight.div_(k**0.5)
    linear.slices = slices
    x, carried = random(generator, dtype, batch, k), random(generator, dtype, batch, n)
    norm = randomised(ZeroCenteredRMSNorm(n, 1e-5), generator, dtype)
    activation = "silu" if gated else ""
    y, prepared = gemm.gemm(
        linear, gemm.GemmInput(x), None, addend=carried, norm=norm, activation=activation, gated=gated
    )
    expected = x.float() @ linear.weight.float().T + (linear.bias.float() if bias else 0)
    if gated:
        gate, up = expected.chunk(2, -1)
        expected = torch.nn.functional.silu(gate) * up
    close(y, (expected + carried).to(dtype))
    assert prepared is not None
    assert prepared.squares is not None
    close(prepared.x, (y.float() * (1 + norm.weight.float())).to(dtype))
    torch.testing.assert_close(prepared.squares.sum(1), y.float().square().sum(1))


@pytest.mark.parametrize(
    ("batch", "dtype", "n", "k", "eight"),
    [
        (1, torch.bfloat16, 2048, 2048, True),
        (8, torch.float16, 2048, 8192, True),
        (9, torch.bfloat16, 2048, 2048, False),
        (2, torch.float32, 2048, 2048, False),
        (1, torch.bfloat16, 8192, 2048, False),  # in one slice
        (8, torch.bfloat16, 4096, 14336, False),  # in two, but long ones
    ],
)
def test_which_products_are_of_eight_rows(
    batch: int, dtype: torch.dtype, n: int, k: int, eight: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with torch.device("meta"):
        linear, x = Linear(k, n).to(dtype), torch.empty(batch, k, dtype=dtype)
    assert (gemm._gemv_sizes(linear, x) is not None) == eight
    monkeypatch.setattr(device_check, "instructions_agree", lambda *_: False)
    assert gemm._gemv_sizes(linear, x) is None


class Layer:
    """An attention layer by itself: what it is made of, where it keeps keys and values, and what it should give."""

    def __init__(
        self,
        generator: torch.Generator,
        dtype: torch.dtype,
        rows: int,
        slots: int,
        *,
        heads: int = 4,
        kv_heads: int = 2,
        head_dim: int = 12,
        window: int | None = None,
        norm: type[Norm] | None = None,
        rope: bool = True,
    ) -> None:
        self.q_norm, self.k_norm = (
            None if norm is None else randomised(norm(head_dim, 1e-6), generator, dtype) for _ in range(2)
        )
        self.rope = Rope(RopeConfig(1e4), head_dim) if rope else None
        unused: Any = Linear(1, 1).to(DEVICE)
        self.block = BlockParts(
            *(unused,) * 4,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            scale=0.4,
            activation="",
            window=window,
            q_norm=self.q_norm,
            k_norm=self.k_norm,
        )
        self.k, self.v = (random(generator, dtype, rows, kv_heads, slots, head_dim) for _ in range(2))
        self.qkv = random(generator, dtype, rows, (heads + 2 * kv_heads) * head_dim)
        self.finished = counters(rows * kv_heads)

    def forget(self, positions: list[int]) -> None:
        """NaN in all slots that a row's new token must not look at."""
        slots = self.k.shape[2]
        for row, position in enumerate(positions):
            seen = [at % slots for at in self.seen(position)]
            for slot in set(range(slots)) - set(seen):
                self.k[row, :, slot] = self.v[row, :, slot] = torch.nan

    def seen(self, position: int) -> range:
        """Positions that are kept from earlier steps, and visible."""
        return range(max(0, position - (self.block.window or 10**9) + 1), position)

    def attend(self, positions: list[int]) -> Tensor:
        at = torch.tensor(positions, dtype=torch.int32, device=DEVICE)
        table = torch.from_numpy(Table([self.k], [self.v]).at(0)[0]).to(DEVICE)
        table[at < 0] = 0  # rows without a token need no cache
        turned = None if self.rope is None else step.rope_tables(self.rope.inv_freq.to(DEVICE), at)
        return attention.attend_step(self.block, self.qkv, table, at, self.finished, turned)

    def expected(self, row: int, position: int) -> tuple[Tensor, Tensor, Tensor]:
        """Of one row: the outcome [Hq D], and the new key and value [Hkv, D]."""
        block = self.block
        sizes = [block.heads, block.kv_heads, block.kv_heads]
        q, k, v = self.qkv[row].view(-1, block.head_dim).split(sizes)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rope is not None:
            turn = self.rope(torch.tensor([position], device=DEVICE))
            q, k = (apply_rope(each[None], *turn)[0] for each in (q, k))
        slots = [at % self.k.shape[2] for at in self.seen(position)]
        keys, values = (
            torch.cat((stored[row, :, slots], new[:, None]), 1).float() for stored, new in ((self.k, k), (self.v, v))
        )  # [Hkv, keys, D]
        grouped = q.view(block.kv_heads, -1, block.head_dim).float()
        weights = (grouped @ keys.transpose(1, 2) * block.scale).softmax(-1)
        return (weights @ values).flatten().to(q.dtype), k, v

    def check(self, positions: list[int]) -> None:
        self.forget(positions)
        expected = [self.expected(row, position) if position >= 0 else None for row, position in enumerate(positions)]
        after_k, after_v = self.k.clone(), self.v.clone()
        got = self.attend(positions)
        assert not self.finished.any()
        for row, (position, wanted) in enumerate(zip(positions, expected, strict=True)):
            if wanted is None:
                assert got[row].isnan().all()  # as it was: nothing was written
                continue
            slot = position % self.k.shape[2]
            out, after_k[row, :, slot], after_v[row, :, slot] = wanted
            close(got[row], out)
        for stored, after in ((self.k, after_k), (self.v, after_v)):
            atol, rtol = TOLERANCES[stored.dtype]
            torch.testing.assert_close(stored, after, atol=atol, rtol=rtol, equal_nan=True)


@pytest.mark.filterwarnings("ignore:divide by zero encountered in fmod:RuntimeWarning")  # of no slots
@once(
    options=[
        {},
        {"rope": False, "kv_heads": 4},
        {"norm": RMSNorm, "heads": 3, "kv_heads": 1, "head_dim": 20},
        {"norm": RMSNorm, "rope": False, "heads": 1, "kv_heads": 1, "head_dim": 8},
    ],
    dtype=DTYPES,
)
@torch.inference_mode()
def test_attention_at_every_length(options: dict[str, Any], dtype: torch.dtype, generator: torch.Generator) -> None:
    """Lengths around a block, in one batch; rows that have no token are left alone."""
    lengths = [0, -1, 1, BLOCK_S - 1, BLOCK_S, BLOCK_S + 1, -1, 2 * BLOCK_S + 3]
    Layer(generator, dtype, len(lengths), 3 * BLOCK_S, **options).check(lengths)


SHARES = [(2, 1), (3, 8), (20, 100)]  # groups, and programs that share them
POSITIONS = [BLOCK_S + 1, *(k * BLOCK_S + d for k in (2, 9) for d in (-1, 0, 1))]


@pytest.mark.parametrize(
    ("groups", "programs", "position"),
    [
        (*share, position)
        for i, position in enumerate(POSITIONS)
        for share in amount(SHARES, (SHARES[i % len(SHARES)],))
    ],
)
@torch.inference_mode()
def test_groups_are_folded(
    groups: int, programs: int, position: int, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More blocks than groups, fewer, and as many; nine are more than are folded at a time. Counters serve again."""
    share_keys(monkeypatch, programs, groups)
    layer = Layer(generator, torch.float16, 2, 10 * BLOCK_S, heads=6, kv_heads=2)
    for at in (position, position + 1):
        layer.check([at, at // 2])


WINDOW = 2 * BLOCK_S + 1


@once(slots=[WINDOW, WINDOW + 3, 200], programs=[20, 1])  # a tight ring, a ring, the whole
@torch.inference_mode()
def test_windows_and_rings(
    slots: int, programs: int, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a window is full, at its edge, and long after a ring has wrapped."""
    positions = [WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW, 5 * WINDOW + 2]
    share_keys(monkeypatch, programs, groups=2)
    layer = Layer(generator, torch.float32, len(positions), slots, window=WINDOW, norm=RMSNorm, heads=2, kv_heads=1)
    layer.check(positions)


@torch.inference_mode()
def test_a_window_of_one(generator: torch.Generator) -> None:
    """A token that sees itself alone."""
    Layer(generator, torch.float32, 3, 4, window=1).check([0, 1, 9])


class TestByWarps:
    """Attention that has a block's keys and values in registers."""

    @pytest.fixture(autouse=True)
    def blocks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(attention, "BLOCK", {2: 64, 4: 32})
        monkeypatch.setattr(attention, "GROUPS", 2)
        monkeypatch.delattr(attention, "_attend_one")  # it is not what is tested

    @pytest.mark.filterwarnings("ignore:divide by zero encountered in fmod:RuntimeWarning")
    @pytest.mark.parametrize(
        ("dtype", "options"),
        [
            (torch.float16, {"head_dim": 64}),
            (torch.bfloat16, {"head_dim": 64, "heads": 3, "kv_heads": 1, "norm": RMSNorm, "rope": False}),
            (torch.float16, {"head_dim": 128, "heads": 8, "kv_heads": 1}),
            (torch.bfloat16, {"head_dim": 128, "heads": 1, "kv_heads": 1, "norm": ZeroCenteredRMSNorm}),
        ],
        ids=str,
    )
    @torch.inference_mode()
    def test_at_every_length(self, dtype: torch.dtype, options: dict[str, Any], generator: torch.Generator) -> None:
        lengths = [0, -1, 1, 63, 64, 65, 200]
        Layer(generator, dtype, len(lengths), 256, **options).check(lengths)

    @once(more=[0, 3, 300], window=[64, 70])  # a tight ring, a ring, the whole
    @torch.inference_mode()
    def test_windows_and_rings(self, window: int, more: int, generator: torch.Generator) -> None:
        positions = [window - 1, window, 2 * window, 5 * window + 2]
        sizes = {"head_dim": 64, "heads": 2, "kv_heads": 1}
        Layer(generator, torch.float16, len(positions), window + more, window=window, **sizes).check(positions)


@pytest.mark.parametrize(("window", "slots"), [(1, 4), (33, 33), (63, 63)])
@torch.inference_mode()
def test_a_ring_that_a_block_wraps_around_twice(
    window: int, slots: int, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With heads that would be for attention by warps."""
    monkeypatch.setattr(attention, "BLOCK", {2: 64, 4: 32})
    positions = [0, 5, window, 167]
    sizes = {"head_dim": 64, "heads": 1, "kv_heads": 1}
    Layer(generator, torch.float16, len(positions), slots, window=window, **sizes).check(positions)


def plan_of(model: Decoder) -> step.Plan:
    return step.plan_of(parts_of(model))


def make_cache(model: Decoder, kind: type[BaseCache], positions: int) -> BaseCache:
    options = {"prefill_chunk": 3} if kind is SlidingCache else {}
    return kind.from_model_config(model.config, positions, dtype=model.dtype, device=DEVICE, **options)


@torch.inference_mode()
def decode_both(model: Decoder, caches: list[Any], tokens: list[int]) -> tuple[Tensor, Tensor]:
    """Logits [B, V] through the kernels, then through the modules, which write the same positions once more."""
    rows = [Row(cache, [token]) for cache, token in zip(caches, tokens, strict=True)]
    got = torch.cat(GpuBackend.of(parts_of(model), model.dtype).run(rows))[:, 0]
    stored = [(k.clone(), v.clone()) for cache in caches for k, v in zip(cache.k, cache.v, strict=True)]
    for cache in caches:
        cache.truncate(cache.seq_len - 1)
    expected = torch.cat(model.run(rows))[:, 0]
    plain = [pair for cache in caches for pair in zip(cache.k, cache.v, strict=True)]
    for (k, v), (plain_k, plain_v) in zip(stored, plain, strict=True):
        torch.testing.assert_close(k, plain_k, atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(v, plain_v, atol=2e-5, rtol=1e-4)
    return got, expected


@pytest.mark.parametrize(
    ("family", "kind", "batch"),
    [
        (family, kind, batch)
        for i, (family, kind) in enumerate([*((family, KVCache) for family in FAMILIES), ("gemma3", SlidingCache)])
        for batch in amount((1, 3), ((1, 3)[i % 2],))
    ],
)
def test_a_step(
    tiny_model: Callable[..., Decoder], family: str, kind: type[BaseCache], batch: int, generator: torch.Generator
) -> None:
    """Rows of different lengths, around a window of 4 and a ring that has wrapped."""
    layers = 2 if family in ("gemma2", "gemma3", "exaone4", "qwen3_moe", "gpt_oss") else 1
    sizes = {"hidden_size": 24, "intermediate_size": 13, "vocab_size": 19}
    model = tiny_model(model_type=family, num_hidden_layers=layers, **sizes).to(DEVICE)
    caches = [make_cache(model, kind, 16) for _ in range(batch)]
    with torch.inference_mode():
        for length, cache in zip((8, 1, 3), caches, strict=False):
            for token in torch.randint(19, (length,), generator=generator):
                model(token.to(DEVICE).view(1, 1), kv_cache=cache)
    got, expected = decode_both(model, caches, torch.randint(19, (batch,), generator=generator).tolist())
    torch.testing.assert_close(got, expected, atol=3e-4, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_a_plan(tiny_model: Callable[..., Decoder], family: str) -> None:
    model = tiny_model(model_type=family)
    plan = plan_of(model)
    assert len(plan.blocks) == len(plan.kinds) == model.config.num_hidden_layers
    assert len(set(plan.kinds) - {None}) == {"gemma3": 2, "gpt2": 0}.get(family, 1)


def refuse(model: Decoder, message: str) -> None:
    with pytest.raises(UnsupportedByKernels, match=message):
        GpuBackend.of(parts_of(model), model.dtype)


@pytest.mark.parametrize(
    "name",
    ["lm_head", "norm", "layers.1.mlp.down_proj", "layers.0.self_attn.qkv_proj", "layers.1.input_layernorm"],
)
def test_mixed_dtypes_have_no_plan(tiny_model: Callable[..., Decoder], name: str) -> None:
    model = tiny_model()
    model.get_submodule(name).half()
    refuse(model, "dtypes")


def test_a_dtype_without_kernels_has_no_plan(tiny_model: Callable[..., Decoder]) -> None:
    refuse(tiny_model(dtype=torch.float64), "dtype")


def set_eps(norm: str) -> Callable[[Any], None]:
    return lambda block: setattr(getattr(block, norm), "eps", 0.1)


def centre_the_norm_behind(block: Any) -> None:
    block.post_attention_layernorm = LayerNorm(32, 1e-6, bias=False)


def bias_the_norms_around(block: Any) -> None:
    block.post_attention_layernorm = block.pre_feedforward_layernorm = LayerNorm(32, 1e-6)


def centre_the_norms_around(block: Any) -> None:
    block.post_attention_layernorm = block.pre_feedforward_layernorm = LayerNorm(32, 1e-6, bias=False)


def forget_a_norm(block: Any) -> None:
    norms = block.norms()._replace(after_mlp=None)
    block.norms = lambda: norms


@pytest.mark.parametrize(
    "change",
    [
        set_eps("post_attention_layernorm"),
        set_eps("input_layernorm"),
        set_eps("pre_feedforward_layernorm"),
        set_eps("post_feedforward_layernorm"),
        centre_the_norm_behind,
        bias_the_norms_around,
        centre_the_norms_around,
        forget_a_norm,
    ],
)
def test_norms_that_differ_have_no_plan(tiny_model: Callable[..., Decoder], change: Callable[[Any], None]) -> None:
    """One kernel computes the norm behind a sublayer and the one before the next."""
    model = tiny_model(model_type="gemma3")
    change(model.layers[1])
    refuse(model, "norms")


def test_head_norms_that_differ_have_no_plan(tiny_model: Callable[..., Decoder]) -> None:
    model = tiny_model(model_type="qwen3")
    model.layers[1].self_attn.k_norm.eps = 0.1
    refuse(model, "norms")


@pytest.mark.parametrize("activation", ["", "silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("gated", [False, True])
@torch.inference_mode()
def test_what_becomes_of_a_product_of_many_rows(
    gated: bool, activation: str, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In several programs to a row."""
    monkeypatch.setattr(gemm, "SMALL_ROWS", 2)
    monkeypatch.setattr(gemm, "EPILOGUE_COLUMNS", 4)
    linear = randomised(Linear(20, 14, bias=True), generator, torch.float32)
    x = random(generator, torch.float32, 3, 20)
    gated = gated and bool(activation)
    got, _ = gemm.gemm(linear, gemm.GemmInput(x), None, activation=activation, gated=gated)
    y = linear(x)
    if activation:
        first, *second = y.chunk(2, -1) if gated else (y,)
        y = ACTIVATIONS[activation](first) * (second[0] if gated else 1)
    close(got, y)


class TestWhereThereAreNone:
    """A GPU that cannot have the kernels says so in one line, and runs plain torch."""

    @pytest.fixture(autouse=True)
    def asked_anew(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(gpu, "_problem", gpu._problem.__wrapped__)  # not what was found out before

    def check(self, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], message: str) -> None:
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: capability)
        with pytest.raises(UnsupportedByKernels, match=f"there are no kernels for this GPU: {message}"):
            gpu.check(torch.device("cuda"))

    def test_an_older_card(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        reason = "they need compute capability 8.0, and this GPU has 7.5"
        self.check(monkeypatch, (7, 5), reason)
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        assert f"plain torch runs instead: {reason}" in said

    def test_triton_that_cannot_work(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        def check() -> None:
            raise RuntimeError("no C compiler\nand more")

        monkeypatch.setattr(launch_kernels, "check", check)
        self.check(monkeypatch, (9, 0), "RuntimeError: no C compiler")
        assert capsys.readouterr().err.endswith("plain torch runs instead: RuntimeError: no C compiler\n")

    def test_switched_off(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        monkeypatch.setenv("INFER_KERNELS", "0")
        self.check(monkeypatch, (9, 0), "INFER_KERNELS=0")
        assert capsys.readouterr().err == ""

    def test_one_that_can(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        monkeypatch.delenv("INFER_KERNELS", raising=False)
        monkeypatch.setattr(launch_kernels, "check", lambda: None)
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (8, 0))
        gpu.check(torch.device("cuda"))
        assert capsys.readouterr().err == ""


@EVERY_DTYPE
@pytest.mark.parametrize("hidden_size", [16, 40])
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_what_a_step_is_fed(
    tiny_model: Callable[..., Decoder],
    family: str,
    hidden_size: int,
    dtype: torch.dtype,
) -> None:
    """To the last bit what the model looks up. Rows without a token look up something that exists, and stay without."""
    model = tiny_model(model_type=family, hidden_size=hidden_size, dtype=dtype).to(DEVICE)
    plan = plan_of(model)
    tokens = torch.tensor([5, -1, 7], device=DEVICE)
    positions, increments = torch.tensor([[3, -1, 0], [1, 0, 1]], dtype=torch.int32, device=DEVICE)
    steps = torch.tensor([6], dtype=torch.int32, device=DEVICE)
    fed = step.begin(plan, tokens, positions, increments, steps)
    assert steps.tolist() == [7]
    assert torch.equal(fed.x, model.embed(*torch.tensor([[5, 0, 7], [3, 0, 0]], device=DEVICE)))
    assert fed.positions.tolist() == [3, -1, 0]
    assert positions.tolist() == [4, -1, 1]
    assert len(set(plan.kinds) - {None}) == {"llama": 1, "gemma3": 2, "gpt2": 0}[family]
    for kind in set(plan.kinds) - {None}:
        assert torch.equal(fed.rope_cos_sin[kind], step.rope_tables(plan.frequencies[kind], fed.positions))


@pytest.mark.parametrize("batch", [1, 2])
def test_a_large_residual_in_16_bits(batch: int) -> None:
    """By the norm's weight, before it is scaled, it would be beyond what float16 holds."""
    first, second = Linear(16, 16), Linear(16, 16)
    norm = RMSNorm(16, 1e-5)
    for module in (first, second, norm):
        module.to(DEVICE, torch.float16).requires_grad_(False)
    first.weight.zero_()
    second.weight.fill_(0.01)
    norm.weight.fill_(8.0)
    carried = torch.full((batch, 16), 9000.0, dtype=torch.float16, device=DEVICE)
    residual = gemm.gemm_add(first, carried / 9000, gemm.Residual(carried), None, norm, counters())
    got, _ = gemm.norm_gemm(second, residual, norm, counters())
    close(got, torch.full_like(got, 16 * 8 * 0.01))
