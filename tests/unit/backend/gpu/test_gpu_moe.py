"""A mixture of experts by GPU kernels, under Triton's interpreter where there is no GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from interpreted import hurried, matrix_units, poison

from infer.backend.gpu import gemm, moe
from infer.backend.gpu.gemm import add_norm
from infer.backend.parts import BlockParts, Routing
from infer.nn.activation import gated
from infer.nn.linear import Linear

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HIDDEN, INNER, EXPERTS = 48, 40, 6


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch, gemm, moe)
    if DEVICE.type == "cpu":
        matrix_units(monkeypatch)
        hurried(monkeypatch)


class Mixture:
    """A block's experts, and tokens."""

    def __init__(self, dtype: torch.dtype, *, bias: bool = False, top_k: int = 2, norm: bool = True) -> None:
        generator = torch.Generator().manual_seed(0)

        def linear(rows: int, columns: int) -> Linear:
            made = Linear(columns, rows, bias=bias).requires_grad_(False)
            for weight in made.parameters():
                weight.data = (torch.randn(weight.shape, generator=generator) * 0.3).to(DEVICE, dtype)
            return made

        unused: Any = None
        self.routing = Routing(linear(EXPERTS, HIDDEN), EXPERTS, top_k, norm)
        up, down = linear(EXPERTS * 2 * INNER, HIDDEN), linear(EXPERTS * HIDDEN, INNER)
        sizes = {"heads": 1, "kv_heads": 1, "head_dim": 1, "scale": 1.0}
        self.block = BlockParts(unused, unused, up, down, activation="silu", routing=self.routing, **sizes)
        self.x = torch.randn(30, HIDDEN, generator=generator).to(DEVICE, dtype)

    def run(self, rows: slice, positions: Tensor | None = None) -> Tensor:
        """[T, C]: the sum of the experts of these tokens."""
        x = self.x[rows].contiguous()
        positions = torch.arange(len(x), dtype=torch.int32, device=DEVICE) if positions is None else positions
        out = moe.mixture(self.block, x, positions, None)
        return add_norm(torch.zeros_like(x), None, out)[1]

    def expected(self) -> Tensor:
        """In plain torch, token by token."""
        x, (router, _, top_k, norm) = self.x.float(), self.routing
        logits = router(self.x).float()
        chosen = logits.sort(descending=True, stable=True).indices[:, :top_k]
        weights = logits.softmax(-1).gather(1, chosen)
        weights = weights / weights.sum(-1, keepdim=True) if norm else weights
        out = torch.zeros_like(x)
        for t, experts in enumerate(chosen.tolist()):
            for slot, expert in enumerate(experts):
                inner = gated(_expert(self.block.up, expert, 2 * INNER, x[t]), "silu")
                out[t] += weights[t, slot] * _expert(self.block.down, expert, HIDDEN, inner)
        return out


def _expert(linear: Linear, expert: int, rows: int, x: Tensor) -> Tensor:
    at = slice(expert * rows, (expert + 1) * rows)
    assert isinstance(linear.weight, Tensor)
    y = linear.weight[at].float() @ x
    return y if linear.bias is None else y + linear.bias[at].float()


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float32, {"bias": True, "norm": False}),
        (torch.bfloat16, {"top_k": 3}),
        (torch.float16, {"top_k": 1, "bias": True}),
    ],
    ids=str,
)
def test_a_token_gets_what_it_gets_alone(dtype: torch.dtype, options: dict[str, Any]) -> None:
    """One by one, few together, and grouped by expert: the same bits; and those that plain torch computes, about."""
    case = Mixture(dtype, **options)
    together = case.run(slice(None))
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 1e-1}[dtype]
    torch.testing.assert_close(together.float(), case.expected(), atol=tolerance, rtol=tolerance)
    assert torch.equal(case.run(slice(3, 8)), together[3:8])
    assert torch.equal(case.run(slice(29, 30)), together[29:])
    assert torch.equal(case.run(slice(10, 28)), together[10:28])


def test_equal_logits_go_to_the_lower_expert() -> None:
    case = Mixture(torch.float32)
    weight = case.routing.router.weight
    assert isinstance(weight, Tensor)
    weight[4] = weight[1]
    weight[5] = weight[1]
    torch.testing.assert_close(case.run(slice(0, 20)), case.expected()[:20], atol=1e-5, rtol=1e-5)


def test_rows_without_a_token_change_nothing() -> None:
    case = Mixture(torch.float32)
    positions = torch.tensor([4, -1, 9, -1, -1], dtype=torch.int32, device=DEVICE)
    used = positions >= 0
    assert torch.equal(case.run(slice(0, 5), positions)[used], case.run(slice(0, 5))[used])
    many = torch.arange(30, dtype=torch.int32, device=DEVICE) - 20
    assert torch.equal(case.run(slice(0, 30), many)[20:], case.run(slice(0, 30))[20:])
