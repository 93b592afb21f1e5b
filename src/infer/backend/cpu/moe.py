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
from infer.backend.cpu.simd import TILE, fma_f32, load_f32, load_i64, store, typed_intrinsic
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
        ("inner", "i8"),  # the size of the activation's output, of which a shard has a part
        ("outer", "i8"),  # the size of an expert's output, of which a shard has a part
        ("threads", "i8"),  # the address of the number of threads
    ]
)
WEIGHT_BYTES = WEIGHT.itemsize
MIX_EXPERTS = types.void(*[types.int64] * 7)
PARALLEL_ROWS = 16  # from so many rows on, several threads share them
EXPERTS_PER_THREAD = 4  # from so many on, each thread runs some; few are shared, unless each thread gets as many
MAX_TOKENS = 1024  # at a time: the outputs of all their experts are held
NOT_CHOSEN = np.float32(-1)  # in the place of a weight
UP, DOWN = 1, 2  # stages; a tensor-parallel mixture gathers `inner` between them


@typed_intrinsic
def mix_experts_at(
    context: Any, code: Any, experts: Any, stages: Any, x: Any, count: Any, routed: Any, inner: Any, out: Any
) -> Any:
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

GATHER, ACTIVATE = range(2)


@inline
def _expert_row(i: int, stage: int, experts: int, tokens: int, x: int, width: int, out: int) -> None:
    """Row i of an expert: gathered from x, or the output of its first GEMM."""
    mix = records(experts, 1, EXPERTS)[0]
    if stage == GATHER:
        at = x + load_i64(tokens + i * 8) * width * 4
        for j in range(width):
            store(out + (i * width + j) * 4, load_f32(at + j * 4))
    else:
        unused = width - 2 * mix.inner
        activate_row(x + (i * width + unused) * 4, 2 * mix.inner, mix.inner, mix.activation, out + i * mix.inner * 4)


_expert_rows_parallel = parallel_for(_expert_row)


@inline
def _expert_rows(count: int, stage: int, experts: int, tokens: int, x: int, width: int, out: int) -> None:
    if count < PARALLEL_ROWS:
        for i in range(count):
            _expert_row(i, stage, experts, tokens, x, width, out)
    else:
        _expert_rows_parallel(count, stage, experts, tokens, x, width, out)


@inline
def _run_expert(i: int, experts: int, stages: int, used: int, tokens: int, x: int, inner: int, out: int) -> None:
    """The outputs of an expert for its tokens. used: the number, the first pair and the end of experts with tokens."""
    mix = records(experts, 1, EXPERTS)[0]
    expert, first = load_i64(used + i * 24), load_i64(used + i * 24 + 8)
    count = load_i64(used + i * 24 + 16) - first
    up = records(mix.up + expert * WEIGHT_BYTES, 1, WEIGHT)[0]
    down = records(mix.down + expert * WEIGHT_BYTES, 1, WEIGHT)[0]
    if stages & UP != 0:
        own, raised = np.empty(count * up.columns, np.float32), np.empty(count * up.rows, np.float32)
        at = tokens + first * 8
        _expert_rows(count, GATHER, experts, at, x, up.columns, address(own))
        gemm(up, address(own), count, address(raised))
        _expert_rows(count, ACTIVATE, experts, at, address(raised), up.rows, inner + first * mix.inner * 4)
        keep_alive(own, raised)
    if stages & DOWN != 0:
        gemm(down, inner + first * down.columns * 4, count, out + first * _row_bytes(mix))


_run_experts_parallel = parallel_for(_run_expert)


@inline
def _row_bytes(mix: Any) -> Any:
    """Of an output of an expert, and of what may come before it."""
    return (mix.outer + TILE) * 4


@inline
def _add_outputs(t: int, experts: int, outputs: int, weights: int, out: int) -> None:
    """out [T, C]: the weighted sum of the outputs of a token's experts, whose addresses are given, in their order."""
    mix = records(experts, 1, EXPERTS)[0]
    k, hidden = mix.top_k, mix.outer
    to = out + t * hidden * 4
    for j in range(hidden):
        store(to + j * 4, np.float32(0))
    for i in range(t * k, t * k + k):
        at, weight = load_i64(outputs + i * 8), load_f32(weights + i * 4)
        for j in range(hidden):
            store(to + j * 4, fma_f32(load_f32(at + j * 4), weight, load_f32(to + j * 4)))


_add_outputs_parallel = parallel_for(_add_outputs)


@inline
def _mix(experts: int, stages: int, x: int, count: int, routed: int, inner: int, out: int) -> None:
    mix = records(experts, 1, EXPERTS)[0]
    num_experts, hidden, k = mix.router.rows, mix.outer, mix.top_k
    if stages & UP != 0:
        logits = np.empty(count * num_experts, np.float32)
        gemm(mix.router, x, count, address(logits))
        if count < PARALLEL_ROWS:
            for t in range(count):
                _route(t, address(logits), num_experts, k, mix.norm_topk, routed)
        else:
            _route_rows(count, address(logits), num_experts, k, mix.norm_topk, routed)
        keep_alive(logits)
    # A pair is a token and one of its experts. Pairs are sorted by expert; those of a token then are, too.
    tokens, used, made = (
        np.empty(count * k, np.int64),
        np.empty((num_experts, 3), np.int64),
        np.empty(count * k * (hidden + TILE), np.float32),
    )
    outputs, weights, seen = np.empty(count * k, np.int64), np.empty(count * k, np.float32), np.zeros(count, np.int64)
    num_used, pair = 0, 0
    for expert in range(num_experts):
        first, down = pair, records(mix.down + expert * WEIGHT_BYTES, 1, WEIGHT)[0]
        for t in range(count):
            weight = load_f32(routed + (t * num_experts + expert) * 4)
            if weight != NOT_CHOSEN:
                own = t * k + seen[t]
                at = address(made) + first * _row_bytes(mix) + (pair - first) * down.rows * 4
                outputs[own], weights[own] = at + (down.rows - hidden) * 4, weight
                tokens[pair] = t
                seen[t] += 1
                pair += 1
        if pair > first:
            used[num_used, 0], used[num_used, 1], used[num_used, 2] = expert, first, pair
            num_used += 1
    threads = load_i64(mix.threads)
    if num_used % threads == 0 or num_used >= EXPERTS_PER_THREAD * threads:
        _run_experts_parallel(num_used, experts, stages, address(used), address(tokens), x, inner, address(made))
    else:  # threads share the GEMMs of each expert
        for i in range(num_used):
            _run_expert(i, experts, stages, address(used), address(tokens), x, inner, address(made))
    if stages & DOWN != 0:
        if count < PARALLEL_ROWS:
            for t in range(count):
                _add_outputs(t, experts, address(outputs), address(weights), out)
        else:
            _add_outputs_parallel(count, experts, address(outputs), address(weights), out)
    keep_alive(tokens, used, made, outputs, weights)


@kernel(MIX_EXPERTS)
def mix_experts(experts: int, stages: int, x: int, count: int, routed: int, inner: int, out: int) -> None:
    """out [T, C]: the weighted sum of the experts of each token of x [T, C]. experts: an EXPERTS record.

    stages: UP writes the weights routed [T, E] and the activations inner [T k, I] of at most MAX_TOKENS tokens, and
    DOWN reads them. For both at once, of any number of tokens, routed and inner are 0.
    """
    mix = records(experts, 1, EXPERTS)[0]
    held = min(count, MAX_TOKENS) if routed == 0 else 0
    weights = np.empty(held * mix.router.rows, np.float32)
    activations = np.empty(held * mix.top_k * mix.inner, np.float32)
    if routed == 0:
        routed, inner = address(weights), address(activations)
    for start in range(0, count, MAX_TOKENS):
        at, some = start * 4, min(MAX_TOKENS, count - start)
        _mix(experts, stages, x + at * mix.router.columns, some, routed, inner, out + at * mix.outer)
    keep_alive(weights, activations)
