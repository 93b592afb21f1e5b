"""A mixture of experts: each token goes through the experts that its router chooses, and only their weights are read.

Experts are visited in their order, each with all of its tokens: so the outputs for a token are added in one order, and
depend on nothing but its own routing.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import types

from infer.backend.cpu.activation import activate_row
from infer.backend.cpu.gemm import WEIGHT, gemm
from infer.backend.cpu.jit import address, call_at, inline, keep_alive, kernel, records
from infer.backend.cpu.simd import fma_f32, load_f32, load_i64, store, typed_intrinsic
from infer.backend.cpu.threads import parallel_for

# up, down: addresses of a WEIGHT for each expert. A tile of a quantized weight may begin with rows of the expert before
# it: an expert then has as many rows too many, whose outputs come first and are not used.
EXPERTS = np.dtype(
    [
        ("router", WEIGHT),
        ("up", "i8"),
        ("down", "i8"),
        ("top_k", "i8"),
        ("norm_topk", "i8"),  # whether the weights of a token's experts add up to 1
        ("activation", "i8"),
        ("inner", "i8"),  # the size of the activation's output
    ]
)
WEIGHT_BYTES = WEIGHT.itemsize
MIX_EXPERTS = types.void(*[types.int64] * 4)
PARALLEL_ROWS = 16  # from so many rows on, several threads share them
NOT_CHOSEN = np.float32(-1)  # in the place of a weight


@typed_intrinsic
def mix_experts_at(context: Any, code: Any, experts: Any, x: Any, count: Any, out: Any) -> Any:
    """Calls the kernel `mix_experts` at an address."""
    return types.void(types.int64, *MIX_EXPERTS.args), call_at


@inline
def _route(t: int, logits: int, num_experts: int, top_k: int, norm_topk: int, weights: int) -> None:
    """weights [T, E] from the router's logits [T, E]: of equal ones, the lower expert is chosen."""
    row, to = logits + t * num_experts * 4, weights + t * num_experts * 4
    for e in range(num_experts):
        store(to + e * 4, NOT_CHOSEN)
    peak, total = np.float32(0), np.float32(0)
    for i in range(top_k):
        best = -1
        for e in range(num_experts):
            if load_f32(to + e * 4) == NOT_CHOSEN and (best < 0 or load_f32(row + e * 4) > load_f32(row + best * 4)):
                best = e
        if i == 0:
            peak = load_f32(row + best * 4)
        weight = np.float32(math.exp(load_f32(row + best * 4) - peak))
        store(to + best * 4, weight)
        total += weight
    if norm_topk == 0:
        total = np.float32(0)
        for e in range(num_experts):
            total += np.float32(math.exp(load_f32(row + e * 4) - peak))
    for e in range(num_experts):
        if load_f32(to + e * 4) != NOT_CHOSEN:
            store(to + e * 4, load_f32(to + e * 4) / total)


_route_rows = parallel_for(_route)

GATHER, ACTIVATE, ADD = range(3)


@inline
def _expert_row(
    i: int, stage: int, experts: int, expert: int, tokens: int, x: int, width: int, weights: int, out: int
) -> None:
    """Row i of an expert: gathered from x, or after its first GEMM, or added to the output after its second."""
    mix = records(experts, 1, EXPERTS)[0]
    t, hidden = load_i64(tokens + i * 8), mix.router.columns
    if stage == GATHER:
        for j in range(hidden):
            store(out + (i * hidden + j) * 4, load_f32(x + (t * hidden + j) * 4))
    elif stage == ACTIVATE:
        unused = width - 2 * mix.inner
        activate_row(x + (i * width + unused) * 4, 2 * mix.inner, mix.inner, mix.activation, out + i * mix.inner * 4)
    else:
        unused, weight = width - hidden, load_f32(weights + (t * mix.router.rows + expert) * 4)
        for j in range(hidden):
            to = out + (t * hidden + j) * 4
            store(to, fma_f32(load_f32(x + (i * width + unused + j) * 4), weight, load_f32(to)))


_expert_rows_parallel = parallel_for(_expert_row)


@inline
def _expert_rows(
    count: int, stage: int, experts: int, expert: int, tokens: int, x: int, width: int, weights: int, out: int
) -> None:
    if count < PARALLEL_ROWS:
        for i in range(count):
            _expert_row(i, stage, experts, expert, tokens, x, width, weights, out)
    else:
        _expert_rows_parallel(count, stage, experts, expert, tokens, x, width, weights, out)


@inline
def _run_expert(experts: int, expert: int, tokens: int, count: int, x: int, weights: int, out: int) -> None:
    """Adds an expert's outputs for `count` tokens of x [T, C] to out [T, C]."""
    mix = records(experts, 1, EXPERTS)[0]
    up = records(mix.up + expert * WEIGHT_BYTES, 1, WEIGHT)[0]
    down = records(mix.down + expert * WEIGHT_BYTES, 1, WEIGHT)[0]
    own, raised = np.empty(count * up.columns, np.float32), np.empty(count * up.rows, np.float32)
    inner, lowered = np.empty(count * mix.inner, np.float32), np.empty(count * down.rows, np.float32)
    _expert_rows(count, GATHER, experts, expert, tokens, x, up.columns, 0, address(own))
    gemm(up, address(own), count, address(raised))
    _expert_rows(count, ACTIVATE, experts, expert, tokens, address(raised), up.rows, 0, address(inner))
    gemm(down, address(inner), count, address(lowered))
    _expert_rows(count, ADD, experts, expert, tokens, address(lowered), down.rows, weights, out)
    keep_alive(own, raised, inner, lowered)


@kernel(MIX_EXPERTS)
def mix_experts(experts: int, x: int, count: int, out: int) -> None:
    """out [T, C]: the weighted sum of the experts of each token of x [T, C]. experts: an EXPERTS record."""
    mix = records(experts, 1, EXPERTS)[0]
    num_experts, hidden = mix.router.rows, mix.router.columns
    logits, weights = np.empty(count * num_experts, np.float32), np.empty(count * num_experts, np.float32)
    tokens = np.empty(count, np.int64)
    gemm(mix.router, x, count, address(logits))
    if count < PARALLEL_ROWS:
        for t in range(count):
            _route(t, address(logits), num_experts, mix.top_k, mix.norm_topk, address(weights))
    else:
        _route_rows(count, address(logits), num_experts, mix.top_k, mix.norm_topk, address(weights))
    for i in range(count * hidden):
        store(out + i * 4, np.float32(0))
    for expert in range(num_experts):
        own = 0
        for t in range(count):
            if weights[t * num_experts + expert] != NOT_CHOSEN:
                tokens[own] = t
                own += 1
        if own > 0:
            _run_expert(experts, expert, address(tokens), own, x, address(weights), out)
    keep_alive(logits, weights, tokens)
