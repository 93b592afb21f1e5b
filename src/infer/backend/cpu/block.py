"""Models on the CPU: blocks and the head over any rows in one call, and the parts of a block around attention.

What comes out for a token depends on that token and on the keys that it sees, down to the last bit: each row goes
through the same operations in the same order, alone or among others, whichever thread has it. So nothing here may be
compiled with `fastmath`, which lets a sum come out otherwise wherever its function is inlined.

A decode step reads every weight once, so memory sets its pace, as long as nothing else takes time. In plain torch a
third of a step is Python and operators between the products; compiled by numba it is close to nothing. Importing this
module compiles it (a minute or two, once per machine: the result is cached on disk).
"""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np
from numba import from_dtype, njit, prange, types

from infer.backend.cpu.attention import attend_rows, weigh_rows, write
from infer.backend.cpu.memory import vector
from infer.backend.cpu.product import WEIGHT, product, unpack
from infer.backend.cpu.simd import (
    add,
    divide,
    exponential,
    fused,
    fused_one,
    lane,
    load_floats,
    multiply,
    no_floats,
    splat,
    store_floats,
    summed,
)
from infer.backend.cpu.tile import X_ROWS

# Addresses are 0 where there is nothing; centred: a LayerNorm.
NORM = np.dtype([("weight", "i8"), ("bias", "i8"), ("eps", "f8"), ("offset", "f8"), ("centred", "i8")])
HEAD = np.dtype([("norm", NORM), ("weight", WEIGHT)])
BLOCK = np.dtype(
    [
        ("before_attention", NORM),
        ("qkv", WEIGHT),
        ("q_norm", NORM),
        ("k_norm", NORM),
        ("o", WEIGHT),
        ("after_attention", NORM),
        ("before_mlp", NORM),
        ("up", WEIGHT),  # a gate and what it is multiplied with, if twice as wide as `down`
        ("down", WEIGHT),
        ("after_mlp", NORM),
        ("heads", "i8"),
        ("kv_heads", "i8"),
        ("head_dim", "i8"),
        ("scale", "f8"),
        ("window", "i8"),  # 0: none
        ("activation", "i8"),
    ]
)
RUN, BEFORE, BEHIND, ATTEND, WEIGH, NORMED, ACTIVATED = range(7)
MANY = 16  # rows that are worth handing out to several threads

ROWS, TABLE, TABLES = types.float32[:, ::1], types.int64[:, ::1], types.int64[:, :, ::1]
HEADS, BLOCKS = types.Array(from_dtype(HEAD), 1, "C"), types.Array(from_dtype(BLOCK), 1, "C")


def use_threads(count: int) -> None:
    """For calls from this Python thread."""
    numba.set_num_threads(min(count, numba.config.NUMBA_NUM_THREADS))  # type: ignore[attr-defined]


def _kernel(*arguments: Any) -> Any:
    """Compile for these argument types now, and keep the result on disk."""
    return njit(types.void(*arguments), cache=True)


@njit
def _norm(x: Any, norm: Any, out: Any) -> None:
    """out, which may be x, = RMSNorm(x), or LayerNorm(x) if centred."""
    _normed(x, norm.weight, norm.bias, norm.eps, norm.offset, norm.centred, out)


@njit
def _normed(x: Any, weight_at: int, bias_at: int, eps: float, offset: float, centred: int, out: Any) -> None:
    size, whole, at, weight = x.shape[0], x.shape[0] // 4 * 4, x.ctypes.data, vector(weight_at, x.shape[0])
    mean, sums = np.float32(0), no_floats()
    if centred:
        for i in range(0, whole, 4):
            sums = add(sums, load_floats(at + i * 4))
        mean = summed(sums)
        for i in range(whole, size):
            mean += x[i]
        mean /= np.float32(size)
        sums = no_floats()
    for i in range(0, whole, 4):
        off = add(load_floats(at + i * 4), splat(-mean))
        sums = fused(off, off, sums)
    square = summed(sums)
    for i in range(whole, size):
        square = fused_one(x[i] - mean, x[i] - mean, square)
    scale = np.float32(1 / math.sqrt(square / size + eps))
    for i in range(size):
        out[i] = (x[i] - mean) * scale * (weight[i] + np.float32(offset))
    if bias_at != 0:
        _add(out, vector(bias_at, size))


@njit
def _add(x: Any, y: Any) -> None:
    for i in range(x.shape[0]):
        x[i] += y[i]


@njit
def _add_rows(x: Any, y: Any) -> None:
    for t in range(x.shape[0]):
        _add(x[t], y[t])


@njit
def _norm_rows(x: Any, norm: Any, out: Any) -> None:
    if x.shape[0] < MANY:
        for t in range(x.shape[0]):
            _norm(x[t], norm, out[t])
    else:
        _norm_many(x, norm, out)


@njit(parallel=True)
def _norm_many(x: Any, norm: Any, out: Any) -> None:
    # Taken out one by one: numba hands no record to a thread.
    weight_at, bias_at, eps, offset, centred = norm.weight, norm.bias, norm.eps, norm.offset, norm.centred
    for t in prange(x.shape[0]):
        _normed(x[t], weight_at, bias_at, eps, offset, centred, out[t])


@njit(forceinline=True)
def _activated(gate: Any, kind: int) -> Any:
    """0: SiLU; 1: GELU in its tanh form, which is a SiLU-like product too, x sigmoid(2 y)."""
    y = gate
    if kind == 1:
        square = multiply(gate, gate)
        y = multiply(multiply(gate, splat(1.5957691216057308)), fused(square, splat(0.044715), splat(1.0)))
    return divide(gate, add(splat(1.0), exponential(multiply(y, splat(-1.0)))))


@njit
def _activate(up: Any, inner: Any, kind: int) -> None:
    """inner [I] = activation(up), or activation(gate) * up, where both lie in `up`. Kind 2 is GELU itself."""
    size, gated = inner.shape[0], up.shape[0] > inner.shape[0]
    if kind == 2:
        for i in range(size):
            inner[i] = np.float32(0.5) * up[i] * np.float32(1 + math.erf(up[i] * 0.7071067811865476))
    else:
        up_at, inner_at, whole = up.ctypes.data, inner.ctypes.data, size // 4 * 4
        for i in range(0, whole, 4):
            store_floats(inner_at + i * 4, _activated(load_floats(up_at + i * 4), kind))
        for i in range(whole, size):
            inner[i] = lane(_activated(splat(up[i]), kind), 0)
    if gated:
        for i in range(size):
            inner[i] *= up[size + i]


@njit
def _activate_rows(up: Any, inner: Any, kind: int) -> None:
    if up.shape[0] < MANY:
        for t in range(up.shape[0]):
            _activate(up[t], inner[t], kind)
    else:
        _activate_many(up, inner, kind)


@njit(parallel=True)
def _activate_many(up: Any, inner: Any, kind: int) -> None:
    for t in prange(up.shape[0]):
        _activate(up[t], inner[t], kind)


@njit(inline="always")
def _project(blocks: Any, x: Any, cos_at: int, sin_at: int, heads: Any) -> None:
    block = blocks[0]
    normed = np.empty(x.shape, np.float32)
    _norm_rows(x, block.before_attention, normed)
    product(block.qkv, normed, heads)
    if x.shape[0] < MANY:
        for t in range(x.shape[0]):
            _rotate(block, heads[t], cos_at, sin_at, t)
    else:
        _rotate_many(blocks, heads, cos_at, sin_at)


@njit(parallel=True)
def _rotate_many(blocks: Any, heads: Any, cos_at: int, sin_at: int) -> None:
    for t in prange(heads.shape[0]):
        _rotate(blocks[0], heads[t], cos_at, sin_at, t)


@njit
def _rotate(block: Any, heads: Any, cos_at: int, sin_at: int, t: int) -> None:
    """Norm and RoPE in place on the q and k of row t; cos and sin are [T, D], sin with the sign of rotate-half."""
    size, half = block.head_dim, block.head_dim // 2
    for h in range(block.heads + block.kv_heads):
        x = heads[h * size : (h + 1) * size]
        if block.q_norm.weight != 0:
            if h < block.heads:
                _norm(x, block.q_norm, x)
            else:
                _norm(x, block.k_norm, x)
        if cos_at != 0:
            cos, sin = vector(cos_at + t * size * 4, size), vector(sin_at + t * size * 4, size)
            for i in range(half):
                first, second = x[i], x[i + half]
                x[i] = first * cos[i] + second * sin[i]
                x[i + half] = second * cos[i + half] + first * sin[i + half]


@njit(inline="always")
def _finish(block: Any, attended: Any, residual: Any, out: Any) -> None:
    """x = residual + norm(O attended); out [T, C] = x + norm(Down(activation(Gate norm(x)) * Up norm(x))).

    Norms behind a product only where there are any; not gated: Down(activation(Up norm(x))).
    """
    x, normed = np.empty(residual.shape, np.float32), np.empty(residual.shape, np.float32)
    product(block.o, attended, x)
    if block.after_attention.weight != 0:
        _norm_rows(x, block.after_attention, x)
    _add_rows(x, residual)
    _norm_rows(x, block.before_mlp, normed)
    up = np.empty((x.shape[0], block.up.rows), np.float32)
    inner = np.empty((x.shape[0], block.down.columns), np.float32)
    product(block.up, normed, up)
    _activate_rows(up, inner, block.activation)
    product(block.down, inner, out)
    if block.after_mlp.weight != 0:
        _norm_rows(out, block.after_mlp, out)
    _add_rows(out, x)


@njit(inline="always")
def _block(blocks: Any, x: Any, cos_at: int, sin_at: int, table: Any, tokens: Any, parts: Any, out: Any) -> None:
    """A whole block, x [T, C] -> out [T, C]. tokens: of each, its row of the table and its position."""
    block = blocks[0]
    q_size = block.heads * block.head_dim
    projected = np.empty((x.shape[0], block.qkv.rows), np.float32)
    _project(blocks, x, cos_at, sin_at, projected)
    seen, mixed = np.empty((x.shape[0], 2), np.int64), np.empty((x.shape[0], q_size), np.float32)
    if x.shape[0] < MANY:
        for t in range(x.shape[0]):
            _store(block, table[tokens[t, 0]], tokens[t, 1], projected[t, q_size:], seen[t])
    else:
        _store_many(blocks, table, tokens, projected, q_size, seen)
    attend_rows(blocks, projected, table, parts, seen, mixed)
    _finish(block, mixed, x, out)


@njit
def _store(block: Any, row: Any, position: int, kv: Any, seen: Any) -> None:
    """A token's keys and values, and which positions it sees: the first, and how many."""
    write(block, row, kv, position)
    oldest = 0 if block.window == 0 else max(0, position - block.window + 1)
    seen[0], seen[1] = oldest, position - oldest + 1


@njit(parallel=True)
def _store_many(blocks: Any, table: Any, tokens: Any, projected: Any, q_size: int, seen: Any) -> None:
    for t in prange(projected.shape[0]):
        _store(blocks[0], table[tokens[t, 0]], tokens[t, 1], projected[t, q_size:], seen[t])


@_kernel(HEADS, types.int64[::1], ROWS)
def look_up(heads: Any, ids: Any, out: Any) -> None:
    """out [T, columns]: rows of a quantised weight."""
    for t in range(ids.shape[0]):
        if ids[t] < 0 or ids[t] >= heads[0].weight.rows:
            raise IndexError("there is no such row")
        unpack(heads[0].weight, ids[t], out[t])


@_kernel(types.int64, BLOCKS, HEADS, ROWS, ROWS, TABLE, TABLES, TABLE, TABLE, types.int64[::1], ROWS)
def _run(
    part: int,
    blocks: Any,
    heads: Any,
    x: Any,
    attended: Any,
    ropes: Any,
    tables: Any,
    tokens: Any,
    parts: Any,
    wanted: Any,
    out: Any,
) -> None:
    """All of the functions below: each as a kernel of its own would be compiled with everything that it calls."""
    if part == BEFORE:
        _project(blocks, x, ropes[0, 0], ropes[0, 1], out)
    elif part == BEHIND:
        _finish(blocks[0], attended, x, out)
    elif part == ATTEND:
        attend_rows(blocks, x, tables[0], parts, tokens, out)
    elif part == WEIGH:
        weigh_rows(blocks, x, tables[0], parts, tokens, out)
    elif part == NORMED:
        _norm_rows(x, heads[0].norm, out)
    elif part == ACTIVATED:
        _activate_rows(x, out, blocks[0].activation)
    else:
        given, done = x, np.empty(x.shape, np.float32)
        for layer in range(blocks.shape[0]):
            last = layer == blocks.shape[0] - 1 and heads.shape[0] == 0
            if last:
                done = out
            _block(
                blocks[layer : layer + 1], given, ropes[layer, 0], ropes[layer, 1], tables[layer], tokens, parts, done
            )
            given, done = done, np.empty(x.shape, np.float32) if layer == 0 else given
        if heads.shape[0] == 1:
            chosen = np.empty((wanted.shape[0], x.shape[1]), np.float32)
            for i in range(wanted.shape[0]):
                chosen[i] = given[wanted[i]]
            if heads[0].norm.weight != 0:
                _norm_rows(chosen, heads[0].norm, chosen)
            product(heads[0].weight, chosen, out)


def parts_of(counts: Any) -> Any:
    """The work of attention over rows of so many tokens each, in parts of up to X_ROWS tokens of one row.

    Of each: its row of the table, how many parts the rows before have, how many its row has, its tokens (from, to).
    """
    counts = np.asarray(counts, np.int64)
    of_row = -(-counts // X_ROWS)
    row = np.repeat(np.arange(len(counts)), of_row)
    before = np.repeat(np.cumsum(of_row) - of_row, of_row)
    ends = np.cumsum(counts)
    line = (ends - counts)[row] + (np.arange(len(row)) - before) * X_ROWS
    return np.stack((row, before, of_row[row], line, np.minimum(line + X_ROWS, ends[row])), 1)


NO_BLOCKS, NO_HEADS = np.zeros(0, BLOCK), np.zeros(0, HEAD)
NO_TABLE, NO_TABLES, NO_TOKENS = np.zeros((0, 0), np.int64), np.zeros((0, 0, 0), np.int64), np.zeros(0, np.int64)


def run(
    blocks: Any, heads: Any, x: Any, ropes: Any, tables: Any, tokens: Any, parts: Any, wanted: Any, out: Any
) -> None:
    """x [T, C] through blocks: out [T, C]; or, with a head, its logits [W, V] of the wanted tokens.

    ropes: of each layer, where its cos and sin [T, D] lie, 0 if there are none. tables: of each layer and row, where
    keys and values go. tokens: of each, its row and its position. parts: from `parts_of`.
    """
    _run(RUN, blocks, heads, x, x, ropes, tables, tokens, parts, wanted, out)


def head(heads: Any, x: Any, out: Any) -> None:
    """out [T, rows] = W norm(x [T, C]) + b, or without the norm where there is none."""
    everything = np.arange(x.shape[0])
    _run(RUN, NO_BLOCKS, heads, x, x, NO_TABLE, NO_TABLES, NO_TABLE, NO_TABLE, everything, out)


def before_attention(blocks: Any, x: Any, ropes: Any, out: Any) -> None:
    """out [T, (Hq + 2 Hkv) D] = q, k and v of x [T, C], normed and rotated; cos and sin are [T, D]."""
    _run(BEFORE, blocks, NO_HEADS, x, x, ropes, NO_TABLES, NO_TABLE, NO_TABLE, NO_TOKENS, out)


def behind_attention(blocks: Any, attended: Any, x: Any, out: Any) -> None:
    """out [T, C] from attended [T, Hq D], x being the residual."""
    _run(BEHIND, blocks, NO_HEADS, x, attended, NO_TABLE, NO_TABLES, NO_TABLE, NO_TABLE, NO_TOKENS, out)


def attend(blocks: Any, q: Any, tables: Any, seen: Any, parts: Any, out: Any) -> None:
    """out [Q, Hq D]: each head of each query of q [Q, Hq D].

    seen: of each query, the position of its first key and how many keys. parts: from `parts_of`.
    """
    _run(ATTEND, blocks, NO_HEADS, q, q, NO_TABLE, tables, seen, parts, NO_TOKENS, out)


def weigh(blocks: Any, q: Any, tables: Any, seen: Any, parts: Any, out: Any) -> None:
    """out [Q, Hq S]: by which `attend` mixes the values of S keys, which lie in order."""
    _run(WEIGH, blocks, NO_HEADS, q, q, NO_TABLE, tables, seen, parts, NO_TOKENS, out)


def norm(heads: Any, x: Any, out: Any) -> None:
    """out [T, C] = norm(x [T, C])"""
    _run(NORMED, NO_BLOCKS, heads, x, x, NO_TABLE, NO_TABLES, NO_TABLE, NO_TABLE, NO_TOKENS, out)


def activate(blocks: Any, x: Any, out: Any) -> None:
    """out [T, I] = activation(x), or activation(gate) * up, where x [T, 2 I] holds both."""
    _run(ACTIVATED, blocks, NO_HEADS, x, x, NO_TABLE, NO_TABLES, NO_TABLE, NO_TABLE, NO_TOKENS, out)
