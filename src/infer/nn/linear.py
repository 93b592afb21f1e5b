"""Linear layers and embeddings. Weights are allocated, not initialized: a checkpoint or a training script fills them.

A weight is a parameter or a `QuantizedWeight`. A parameter may have another dtype than the input; the output has the
input's dtype.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infer.nn.module import Module
from infer.nn.quantized import Quantized, QuantizedWeight, pieces_of

AT_ONCE = 1 << 22  # weights converted at a time: with fewer, torch's GEMMs take longer


class Embedding(Module):
    """One vector per token id."""

    weight: nn.Parameter | QuantizedWeight

    def __init__(self, count: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(count, size))

    def forward(self, ids: Tensor) -> Tensor:
        if isinstance(self.weight, QuantizedWeight):
            return self.weight.floats(ids)
        return F.embedding(ids, self.weight)


class Linear(Module):
    """y = W x (+ b) (+ residual)."""

    weight: nn.Parameter | Quantized
    bias: Tensor | None
    slices: int | None = None  # split-K of the GPU kernels; None: chosen by the shape
    unsharded_rows: int | None = None  # of the full weight, if this is a shard of it

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.register_parameter("bias", nn.Parameter(torch.zeros(out_features)) if bias else None)

    @property
    def in_features(self) -> int:
        return self.weight.shape[1]

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]

    def input(self, x: Tensor) -> Tensor:
        """What the weight is multiplied with; a shard gathers it from all ranks."""
        return x

    def output(self, own: Tensor) -> Tensor:
        """The layer's output; a shard gathers it from all ranks."""
        return own

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x [T, in] -> [T, out], with any leading dimensions."""
        if x.dim() != 2:
            flat = None if residual is None else residual.reshape(-1, residual.shape[-1])
            return self.forward(x.reshape(-1, x.shape[-1]), flat).view(*x.shape[:-1], -1)
        if isinstance(self.weight, Quantized):
            out: Tensor = self.weight(x, self.bias)
        elif x.dtype is self.weight.dtype:
            out = F.linear(x, self.weight, self.bias)
        else:
            out = _converted(x, self.weight, self.bias)
        if residual is None:
            return out
        # Added last: a GEMM that accumulates onto a large residual (addmm) loses digits of the small terms. Under
        # autocast the residual has more digits than the output.
        return out.add_(residual) if out.dtype is residual.dtype else out + residual


def _converted(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The product with a weight of another dtype, converted to x's in pieces."""
    if torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in (x, weight, bias)):
        return F.linear(x, weight.to(x.dtype), bias)
    out = x.new_empty(x.shape[0], weight.shape[0])
    for start in range(0, weight.shape[0], step := max(1, AT_ONCE // weight.shape[1])):
        out[:, start : start + step] = F.linear(x, weight[start : start + step].to(x.dtype))
    return out if bias is None else out.add_(bias)


class FusedLinear(Linear):
    """Several projections of one input, stacked into a single GEMM.

    At batch 1 a GEMM costs one read of its weights plus a fixed overhead: one large read beats three small ones.
    `parts` names the stacked projections in order, with their output sizes, as checkpoints store them.
    """

    def __init__(self, in_features: int, parts: Mapping[str, int], *, bias: bool = False) -> None:
        super().__init__(in_features, sum(parts.values()), bias=bias)
        self.parts = dict(parts)


class ExpertLinear(FusedLinear):
    """The same projections of each expert of a mixture, stacked expert after expert."""

    def __init__(self, in_features: int, num_experts: int, parts: Mapping[str, int], *, bias: bool = False) -> None:
        """parts: of one expert. Checkpoints name them `{expert}.{part}`."""
        names = {f"{expert}.{name}": size for expert in range(num_experts) for name, size in parts.items()}
        super().__init__(in_features, names, bias=bias)
        self.num_experts = num_experts

    def forward(self, x: Tensor, expert: int) -> Tensor:  # type: ignore[override]
        """x [T, in] -> [T, out] of one expert, whose weights alone are read."""
        size = self.weight.shape[0] // self.num_experts
        rows = slice(expert * size, (expert + 1) * size)
        bias = None if self.bias is None else self.bias[rows]
        if isinstance(self.weight, Quantized):
            pieces = pieces_of(self.weight, rows.start, rows.stop)
            out = torch.cat([part(x, rows=own) for part, own in pieces], -1)
            return out if bias is None else out + bias
        weight = self.weight[rows]
        return F.linear(x, weight, bias) if x.dtype is weight.dtype else _converted(x, weight, bias)
