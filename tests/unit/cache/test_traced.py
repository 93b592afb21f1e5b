"""The rows of a traced cache are those that made the output."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from infer import KVCache, SlidingCache
from infer.backend.cpu.ops import CpuAttention
from infer.cache import BaseCache
from infer.cache.int8 import decode
from infer.cache.traced import TracedCache


class Noting:
    """An attention kernel that keeps what it was last given, and gave."""

    takes_int8 = True

    def __init__(self) -> None:
        self.calls: list[tuple[Tensor, Tensor, Tensor]] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        out = CpuAttention()(q, k, v, **options)
        self.calls.append((k, v, out))
        return out

    def weights(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        return CpuAttention().weights(q, k, v, **options)


def heads(generator: torch.Generator, count: int, n: int, size: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(1, count, n, size, generator=generator).to(dtype)


@pytest.mark.parametrize(
    ("kind", "stored", "dtype", "window"),
    [
        (KVCache, torch.float32, torch.float32, None),
        (KVCache, torch.int8, torch.float32, None),
        (KVCache, torch.bfloat16, torch.bfloat16, None),
        (KVCache, torch.float16, torch.float16, 5),
        (SlidingCache, torch.int8, torch.bfloat16, 5),
        (SlidingCache, torch.float32, torch.float32, 5),
    ],
)
@pytest.mark.parametrize("n", [1, 4])
@torch.inference_mode()
def test_weights_are_those_of_the_kernel(
    kind: type[BaseCache], stored: torch.dtype, dtype: torch.dtype, window: int | None, n: int
) -> None:
    """Values mixed by them are the output, which is the untraced one."""
    generator, size = torch.Generator().manual_seed(n), 12
    options = {"windows": [window]} if kind is SlidingCache else {}
    made = [kind.allocate(1, 2, size, 60, dtype=stored, device="cpu", **options) for _ in range(2)]
    noting, traced = Noting(), TracedCache(made[0], [0])
    for count in (23, n):
        q = heads(generator, 4, count, size, dtype)
        k, v = (heads(generator, 2, count, size, dtype) for _ in range(2))
        noting.calls.clear()
        for cache in (traced, made[1]):
            cache.positions(count)
        out = traced.attend(0, q, k, v, scale=0.7, window=window, kernel=noting)
        plain = made[1].attend(0, q, k, v, scale=0.7, window=window, kernel=CpuAttention())
        for cache in (traced, made[1]):
            cache.advance(count)
    assert torch.equal(out, plain)
    row = traced.rows[0]
    assert row.dtype is torch.float32
    assert (row.sum(-1) - 1).abs().max() < 1e-6
    _, values, _ = noting.calls[0]
    values = decode(values, torch.float32) if stored is torch.int8 else values.float()
    mixed = (row.double() @ values.double().repeat_interleave(2, 1))[:, :, 0]
    torch.testing.assert_close(mixed.to(dtype), out[:, :, -1], atol=1e-6, rtol=2 * torch.finfo(dtype).eps)


def test_in_plain_torch() -> None:
    """The output of a traced layer is made of the row that is kept."""
    generator = torch.Generator().manual_seed(0)
    traced = TracedCache(KVCache.allocate(1, 2, 8, 20, dtype="float32", device="cpu"), [0])
    q, k, v = (heads(generator, count, 6, 8, torch.float32) for count in (4, 2, 2))
    traced.positions(6)
    out = traced.attend(0, q, k, v, scale=0.5)
    mixed = (traced.rows[0] @ v.repeat_interleave(2, 1))[:, :, 0]
    torch.testing.assert_close(mixed, out[:, :, -1], atol=1e-6, rtol=1e-6)
