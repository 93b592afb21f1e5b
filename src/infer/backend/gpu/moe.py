"""A mixture of experts on a GPU: route, then run the GEMMs of the chosen experts. The kernels are in `moe_kernels.py`.

Few tokens read the weights of their experts once, in a program per expert and block of its rows. For more tokens, pairs
of token and expert are grouped by expert first. The result does not depend on which.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from infer.backend.gpu.gemm import GemmInput, block_k, gemm, stages_for
from infer.backend.gpu.launcher import launch_options, next_power
from infer.backend.gpu.moe_kernels import expert_gemm, group_pairs, route_rows
from infer.backend.gpu.tuned import EXPERTS_FEW, EXPERTS_FLOAT32, EXPERTS_MANY, FEW_TOKENS, PAIRS_AT_ONCE
from infer.backend.parts import BlockParts, Routing
from infer.nn.linear import Linear


class Pairs(NamedTuple):
    """The pairs of a token and one of its experts: pair p is token p // top_k."""

    experts: Tensor  # int32 [pairs]; -1: no token
    weights: Tensor  # float32 [pairs]
    members: Tensor | None  # int32 [E, T]: the pairs of each expert; None: few tokens
    counts: Tensor | None  # int32 [E]


def mixture(
    block: BlockParts, x: Tensor, positions: Tensor, split_counters: Tensor | None, *, pdl: bool = False
) -> Tensor:
    """x [T, C], normed -> the weighted outputs of each token's experts, float32 [top_k, T, C], for `add_norm` to add.

    positions: int32 [T]; -1: no token.
    """
    assert block.routing is not None
    pairs = _route(block.routing, x, positions, split_counters, pdl)
    inner = _expert_gemm(block.up, x, pairs, block.routing, gated=block.gated, activation=block.activation, pdl=pdl)
    return block.down.output(_expert_gemm(block.down, block.down.input(inner), pairs, block.routing, pdl=pdl))


def _route(routing: Routing, x: Tensor, positions: Tensor, split_counters: Tensor | None, pdl: bool) -> Pairs:
    tokens, top_k, options = x.shape[0], routing.top_k, launch_options(pdl)
    logits, _ = gemm(routing.router, GemmInput(x), split_counters, pdl=pdl)
    experts = torch.empty(tokens * top_k, dtype=torch.int32, device=x.device)
    weights = torch.empty(tokens * top_k, dtype=torch.float32, device=x.device)
    sizes = {"E": routing.num_experts, "BLOCK_E": next_power(routing.num_experts), "TOP_K": top_k}
    route_rows[(tokens,)](logits, positions, experts, weights, NORM=routing.norm_topk, **sizes, **options)
    if tokens <= FEW_TOKENS:
        return Pairs(experts, weights, None, None)
    members = torch.empty(routing.num_experts, tokens, dtype=torch.int32, device=x.device)
    counts = torch.empty(routing.num_experts, dtype=torch.int32, device=x.device)
    block = min(PAIRS_AT_ONCE, next_power(tokens * top_k))
    group_pairs[(routing.num_experts,)](experts, members, counts, tokens * top_k, TOP_K=top_k, BLOCK=block, **options)
    return Pairs(experts, weights, members, counts)


def _expert_gemm(
    linear: Linear,
    x: Tensor,
    pairs: Pairs,
    routing: Routing,
    *,
    gated: bool = False,
    activation: str = "",
    pdl: bool,
) -> Tensor:
    """With an activation, the inner vectors [pairs, N]; without, the weighted outputs, float32 [top_k, T, N]."""
    weight, bias, count, top_k = linear.weight, linear.bias, len(pairs.experts), routing.top_k
    assert isinstance(weight, Tensor)
    tokens, k, matrices = count // top_k, weight.shape[1], 2 if gated else 1
    n = weight.shape[0] // routing.num_experts // matrices
    in_16_bits = EXPERTS_FEW if pairs.members is None else EXPERTS_MANY
    tile = EXPERTS_FLOAT32 if x.element_size() == 4 else in_16_bits
    average = -(-count // routing.num_experts)
    rows = 16 if pairs.members is None else min(tile.rows, max(16, next_power(2 * average)))
    columns = block_k(tile.columns, -(-k // 32) * 32)
    groups = count if pairs.members is None else routing.num_experts * -(-tokens // rows)
    inner = bool(activation)
    shape = (count, n) if inner else (top_k, tokens, n)
    out = torch.empty(*shape, dtype=x.dtype if inner else torch.float32, device=x.device)
    options: dict[str, Any] = launch_options(pdl)
    expert_gemm[(-(-n * matrices // tile.block_n), groups)](
        x,
        weight,
        bias,
        out,
        pairs.experts,
        None if inner else pairs.weights,
        pairs.members,
        pairs.counts,
        count,
        N=n,
        K=k,
        TOP_K=top_k,
        SHARED=inner,
        GATED=gated,
        ACTIVATION=activation,
        PAIRS=next_power(count) if pairs.members is None else 0,
        BLOCK_B=rows,
        BLOCK_N=tile.block_n,
        BLOCK_K=columns,
        EVEN=(even := n % (tile.block_n // matrices) == 0 and k % columns == 0),
        PREFETCHED=next_power(k + 1) // 2 if even and pairs.members is None and k * x.element_size() >= 128 else 0,
        STAGES=stages_for(tile.stages, columns * (tile.block_n + rows) * x.element_size(), x.device),
        num_warps=tile.warps,
        **options,
    )
    return out
