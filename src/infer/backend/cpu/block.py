"""All blocks and the head for any rows in one call; and the parts of a block around attention.

The output for a token depends on that token and on the keys visible to it, down to the last bit: each row goes through
the same operations in the same order, alone or among others, on any thread. So nothing here may be compiled with
`fastmath`, which lets a sum have another result wherever its function is inlined.

A decode step reads every weight once, so memory bandwidth limits it, as long as nothing else takes time. In plain torch
a third of a step is Python and operators between the GEMMs; compiled by numba it is close to nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numba import types

from infer.backend.cpu import threads as threads
from infer.backend.cpu.activation import activate_row
from infer.backend.cpu.attention import attend, attend_at, cap_scores, write
from infer.backend.cpu.attention import attention_weights as attention_weights
from infer.backend.cpu.gemm import BFLOAT16, WEIGHT, gemm, gemm_float
from infer.backend.cpu.gemm_int import PART as PART
from infer.backend.cpu.gemm_int import gemm_int, look_up, part_kernel, tile_kernel
from infer.backend.cpu.gemm_int import part_record as part_record
from infer.backend.cpu.jit import Kernel, address, inline, keep_alive, kernel, records
from infer.backend.cpu.moe import DOWN as DOWN
from infer.backend.cpu.moe import EXPERTS as EXPERTS
from infer.backend.cpu.moe import MAX_TOKENS as MAX_TOKENS
from infer.backend.cpu.moe import UP as UP
from infer.backend.cpu.moe import mix_experts as mix_experts
from infer.backend.cpu.moe import mix_experts_at
from infer.backend.cpu.simd import TILE as TILE
from infer.backend.cpu.simd import (
    add,
    fma,
    fma_f32,
    load_f32,
    load_f32x16,
    load_i64,
    reduce_add,
    splat_x16,
    store,
    zeros_x16,
)
from infer.backend.cpu.threads import parallel_for, shm_allgather
from infer.backend.cpu.threads import use_threads as use_threads
from infer.backend.cpu.tile import X_ROWS
from infer.cache.table import COLUMNS
from infer.nn.schemes import Scheme

# The records that kernels read. An address is 0 if there is no such weight. centered: a LayerNorm.
NORM = np.dtype([("weight", "i8"), ("bias", "i8"), ("eps", "f8"), ("offset", "f8"), ("centered", "i8")])
HEAD = np.dtype([("norm", NORM), ("weight", WEIGHT), ("divisor", "f8"), ("softcap", "f8")])
BLOCK = np.dtype(
    [
        ("before_attention", NORM),
        ("qkv", WEIGHT),
        ("q_norm", NORM),
        ("k_norm", NORM),
        ("norms_heads_apart", "i8"),  # whether q and k are normalized head by head
        ("attend", "i8"),  # the address of the attention kernel
        ("o", WEIGHT),
        ("after_attention", NORM),
        ("before_mlp", NORM),
        ("up", WEIGHT),  # gate and up, if it has twice the rows that `down` has columns
        ("down", WEIGHT),
        ("after_mlp", NORM),
        ("heads", "i8"),
        ("kv_heads", "i8"),
        ("head_dim", "i8"),
        ("scale", "f8"),
        ("softcap", "f8"),  # 0: none
        ("sinks", "i8"),  # 0: none
        ("window", "i8"),  # 0: none
        ("multiplier", "f8"),  # of what attention and the MLP add
        ("parallel", "i8"),  # whether the MLP reads the block's input
        ("activation", "i8"),
        ("inner", "i8"),  # the size of the activation's output
        ("mix_experts", "i8"),  # of a mixture: the address of its kernel; 0: dense
        ("experts", "i8"),  # the address of an EXPERTS record
    ]
)
BLOCK_BYTES = BLOCK.itemsize
ROPE_BYTES = 24  # of a layer: the addresses of cos, sin and query scales
PARALLEL_ROWS = 16  # from so many rows on, several threads share them


@inline
def _norm(x: int, size: int, norm: Any, out: int) -> None:
    """out, which may be x, = RMSNorm(x), or LayerNorm(x) if `norm.centered`, or x if there is no norm."""
    if norm.weight == 0:
        if out != x:
            _copy(x, size, out)
        return
    full, mean, sums = size // 16 * 16, np.float32(0), zeros_x16()
    if norm.centered:
        for i in range(0, full, 16):
            sums = add(sums, load_f32x16(x + i * 4))
        mean = reduce_add(sums)
        for i in range(full, size):
            mean += load_f32(x + i * 4)
        mean /= np.float32(size)
        sums = zeros_x16()
    for i in range(0, full, 16):
        centered_x = add(load_f32x16(x + i * 4), splat_x16(-mean))
        sums = fma(centered_x, centered_x, sums)
    square = reduce_add(sums)
    for i in range(full, size):
        centered_one = load_f32(x + i * 4) - mean
        square = fma_f32(centered_one, centered_one, square)
    scale, offset = np.float32(1 / math.sqrt(square / size + norm.eps)), np.float32(norm.offset)
    for i in range(size):
        each = (load_f32(x + i * 4) - mean) * scale * (load_f32(norm.weight + i * 4) + offset)
        store(out + i * 4, each)
    if norm.bias != 0:
        _add(out, norm.bias, size)


@inline
def _copy(x: int, size: int, out: int) -> None:
    for i in range(size):
        store(out + i * 4, load_f32(x + i * 4))


@inline
def _add(x: int, y: int, size: int) -> None:
    for i in range(size):
        store(x + i * 4, load_f32(x + i * 4) + load_f32(y + i * 4))


@inline
def _add_residual(x: int, residual: int, size: int, multiplier: float) -> None:
    """x = residual + multiplier x"""
    factor = np.float32(multiplier)
    for i in range(size):
        store(x + i * 4, load_f32(x + i * 4) * factor + load_f32(residual + i * 4))


@inline
def _rotate(block: Any, heads: int, cos: int, sin: int, query_scale: Any) -> None:
    """Norm and RoPE in place on the q and k of a token; cos and sin are [D], sin with the sign of rotate-half."""
    size, half = block.head_dim, block.head_dim // 2
    if block.norms_heads_apart == 0:
        _norm(heads, block.heads * size, block.q_norm, heads)
        keys = heads + block.heads * size * 4
        _norm(keys, block.kv_heads * size, block.k_norm, keys)
    for h in range(block.heads + block.kv_heads):
        x = heads + h * size * 4
        if block.norms_heads_apart != 0:
            if h < block.heads:
                _norm(x, size, block.q_norm, x)
            else:
                _norm(x, size, block.k_norm, x)
        if cos != 0:
            for i in range(0, half * 4, 4):
                j = i + half * 4
                first, second = load_f32(x + i), load_f32(x + j)
                store(x + i, first * load_f32(cos + i) + second * load_f32(sin + i))
                store(x + j, second * load_f32(cos + j) + first * load_f32(sin + j))
    if query_scale != 1:
        for i in range(block.heads * size):
            store(heads + i * 4, load_f32(heads + i * 4) * query_scale)


@inline
def _store(block: Any, row: int, position: int, heads: int, visible: int) -> None:
    """Stores the keys and values of a token, and which positions are visible to it: the first, and how many."""
    write(row, position, heads + block.heads * block.head_dim * 4, block.kv_heads, block.head_dim)
    oldest = 0 if block.window == 0 else max(0, position - block.window + 1)
    store(visible, oldest)
    store(visible + 8, position - oldest + 1)


# The computation on each row between GEMMs. In all stages, a row of x has `width` floats.
BEFORE_QKV, AFTER_QKV, AFTER_O_PROJ, AFTER_UP_PROJ, AFTER_DOWN_PROJ = range(5)


@inline
def _row_stage(
    t: int,
    stage: int,
    blocks: int,
    x: int,
    width: int,
    y: int,
    z: int,
    ropes: int,
    table: int,
    tokens: int,
    visible: int,
) -> None:
    block = records(blocks, 1, BLOCK)[0]
    row = x + t * width * 4
    if stage == BEFORE_QKV:
        _norm(row, width, block.before_attention, y + t * width * 4)
    elif stage == AFTER_QKV:
        of, position = load_i64(tokens + t * 16), load_i64(tokens + t * 16 + 8)
        at, cos, sin = position * block.head_dim * 4, load_i64(ropes), load_i64(ropes + 8)
        scales = load_i64(ropes + 16)
        query_scale = load_f32(scales + position * 4) if scales != 0 else np.float32(1)
        _rotate(block, row, cos + at if cos != 0 else 0, sin + at if cos != 0 else 0, query_scale)
        if table != 0:
            _store(block, table + of * COLUMNS * 8, position, row, visible + t * 16)
    elif stage == AFTER_O_PROJ:  # x += z, y = norm(x)
        residual = z + t * width * 4
        _norm(row, width, block.after_attention, row)
        _add_residual(row, residual, width, block.multiplier)
        _norm(residual if block.parallel else row, width, block.before_mlp, y + t * width * 4)
    elif stage == AFTER_UP_PROJ:
        activate_row(row, width, block.inner, block.activation, y + t * block.inner * 4)
    else:  # AFTER_DOWN_PROJ: x += z
        _norm(row, width, block.after_mlp, row)
        _add_residual(row, z + t * width * 4, width, block.multiplier)


_row_stages_parallel = parallel_for(_row_stage)


@inline
def _row_stages(
    count: int,
    stage: int,
    blocks: int,
    x: int,
    width: int,
    y: int,
    z: int,
    ropes: int,
    table: int,
    tokens: int,
    visible: int,
) -> None:
    if count < PARALLEL_ROWS:
        for t in range(count):
            _row_stage(t, stage, blocks, x, width, y, z, ropes, table, tokens, visible)
    else:
        _row_stages_parallel(count, stage, blocks, x, width, y, z, ropes, table, tokens, visible)


@inline
def _qkv_proj(blocks: int, x: int, count: int, out: int) -> None:
    """out [T, (Hq + 2 Hkv) D] = q, k and v of x [T, C]"""
    block = records(blocks, 1, BLOCK)[0]
    width = block.qkv.columns
    normed = np.empty(count * width, np.float32)
    _row_stages(count, BEFORE_QKV, blocks, x, width, address(normed), 0, 0, 0, 0, 0)
    gemm(block.qkv, address(normed), count, out)
    keep_alive(normed)


@inline
def _o_proj_and_mlp(blocks: int, attended: int, residual: int, count: int, out: int) -> None:
    """x = residual + norm(O attended); out [T, C] = x + norm(Down(activation(Gate norm(x)) * Up norm(x))).

    The norms after O and Down are optional. Without a gate: Down(activation(Up norm(x))). A mixture of experts has the
    same of each of a token's experts.
    """
    block = records(blocks, 1, BLOCK)[0]
    width = block.o.rows
    x = np.empty(count * width, np.float32)
    gemm(block.o, attended, count, address(x))
    if block.mix_experts != 0:
        normed = np.empty(count * width, np.float32)
        _row_stages(count, AFTER_O_PROJ, blocks, address(x), width, address(normed), residual, 0, 0, 0, 0)
        mix_experts_at(block.mix_experts, block.experts, UP | DOWN, address(normed), count, 0, 0, out)
        keep_alive(normed)
    else:
        inner = np.empty(count * block.inner, np.float32)
        _gate_up_proj(blocks, address(x), residual, count, address(inner))
        gemm(block.down, address(inner), count, out)
        keep_alive(inner)
    _row_stages(count, AFTER_DOWN_PROJ, blocks, out, width, 0, address(x), 0, 0, 0, 0)
    keep_alive(x)


@inline
def _gate_up_proj(blocks: int, x: int, residual: int, count: int, inner: int) -> None:
    """x [T, C] = residual + norm(x); inner [T, I] = activation(Gate norm(x)) * Up norm(x)"""
    block = records(blocks, 1, BLOCK)[0]
    width, up_width = block.up.columns, block.up.rows
    normed, up = np.empty(count * width, np.float32), np.empty(count * up_width, np.float32)
    _row_stages(count, AFTER_O_PROJ, blocks, x, width, address(normed), residual, 0, 0, 0, 0)
    gemm(block.up, address(normed), count, address(up))
    _row_stages(count, AFTER_UP_PROJ, blocks, address(up), up_width, inner, 0, 0, 0, 0, 0)
    keep_alive(normed, up)


@inline
def _block(
    blocks: int,
    x: int,
    count: int,
    ropes: int,
    table: int,
    tokens: int,
    queries: int,
    num_queries: int,
    out: int,
) -> None:
    """A block, x [T, C] -> out [T, C]. tokens: the row of the table and the position of each."""
    block = records(blocks, 1, BLOCK)[0]
    heads = np.empty(count * block.qkv.rows, np.float32)
    attended = np.empty(count * block.o.columns, np.float32)
    _qkv_proj(blocks, x, count, address(heads))
    _attention(blocks, address(heads), count, ropes, table, tokens, queries, num_queries, address(attended))
    _o_proj_and_mlp(blocks, address(attended), x, count, out)
    keep_alive(heads, attended)


@inline
def _attention(
    blocks: int, heads: int, count: int, ropes: int, table: int, tokens: int, queries: int, num_queries: int, out: int
) -> None:
    """out [T, Hq D]: the attention of all heads, before O. heads: q, k and v, to which norm and RoPE are applied."""
    block = records(blocks, 1, BLOCK)[0]
    visible = np.empty(count * 2, np.int64)
    _row_stages(count, AFTER_QKV, blocks, heads, block.qkv.rows, 0, 0, ropes, table, tokens, address(visible))
    attend_at(
        block.attend,
        block.heads,
        block.kv_heads,
        block.head_dim,
        block.scale,
        block.softcap,
        block.sinks,
        heads,
        block.qkv.rows * 4,
        table,
        queries,
        num_queries,
        address(visible),
        out,
    )
    keep_alive(visible)


@kernel(types.void(*[types.int64] * 15))
def _run(
    blocks: int,
    layers: int,
    head: int,
    x: int,
    count: int,
    width: int,
    ropes: int,
    tables: int,
    table_rows: int,
    tokens: int,
    queries: int,
    num_queries: int,
    selected: int,
    num_selected: int,
    out: int,
) -> None:
    """See `run`. head: 0 for no head."""
    one, other = np.empty(count * width, np.float32), np.empty(count * width, np.float32)
    given, to, spare = x, address(one), address(other)
    for layer in range(layers):
        if layer == layers - 1 and head == 0:
            to = out
        table = tables + layer * table_rows * COLUMNS * 8
        _block(
            blocks + layer * BLOCK_BYTES,
            given,
            count,
            ropes + layer * ROPE_BYTES,
            table,
            tokens,
            queries,
            num_queries,
            to,
        )
        given, to, spare = to, spare, to
    if head != 0:
        _head(head, given, width, selected, num_selected, out)
    keep_alive(one, other)


@inline
def _head(head: int, x: int, width: int, selected: int, count: int, out: int) -> None:
    """out [S, rows] = W norm(x [selected]) + b, divided and capped; the norm is optional."""
    made = records(head, 1, HEAD)[0]
    chosen = np.empty(count * width, np.float32)
    for i in range(count):
        row, to = x + load_i64(selected + i * 8) * width * 4, address(chosen) + i * width * 4
        _norm(row, width, made.norm, to)
    gemm(made.weight, address(chosen), count, out)
    if made.divisor != 1 or made.softcap != 0:
        _scale_logits(count, out, made.weight.rows, np.float32(made.divisor), np.float32(made.softcap))
    keep_alive(chosen)


@parallel_for
def _scale_logits(row: int, logits: int, size: int, divisor: Any, softcap: Any) -> None:
    """logits = softcap tanh(logits / divisor / softcap); softcap: 0 for none"""
    at, full = logits + row * size * 4, size // 16 * 16
    for i in range(size):
        store(at + i * 4, load_f32(at + i * 4) / divisor)
    if softcap != 0:
        cap_scores(at, full, softcap)
        rest = np.zeros(16, np.float32)
        for i in range(full, size):
            rest[i - full] = load_f32(at + i * 4)
        cap_scores(address(rest), 16, softcap)
        for i in range(full, size):
            store(at + i * 4, rest[i - full])
        keep_alive(rest)


# Kernels are called with arrays and tensors for addresses. `blocks` and `head` are records.


@kernel(types.void(*[types.int64] * 4))
def qkv_proj(blocks: int, x: int, count: int, out: int) -> None:
    """out [T, (Hq + 2 Hkv) D] = q, k and v of x [T, C], before norm and RoPE."""
    _qkv_proj(blocks, x, count, out)


@kernel(types.void(*[types.int64] * 5))
def rotate(blocks: int, heads: int, count: int, ropes: int, tokens: int) -> None:
    """Norm and RoPE in place on heads, the output of `qkv_proj`; ropes and tokens as for `run`."""
    width = records(blocks, 1, BLOCK)[0].qkv.rows
    _row_stages(count, AFTER_QKV, blocks, heads, width, 0, 0, ropes, 0, tokens, 0)


@kernel(types.void(*[types.int64] * 5))
def after_attention(blocks: int, attended: int, x: int, count: int, out: int) -> None:
    """out [T, C] from attended [T, Hq D] and the residual x."""
    _o_proj_and_mlp(blocks, attended, x, count, out)


# The other pieces of a tensor-parallel block: between them, outputs of all processes are gathered.


@kernel(types.void(*[types.int64] * 9))
def attention(
    blocks: int, heads: int, count: int, ropes: int, table: int, tokens: int, queries: int, num_queries: int, out: int
) -> None:
    """out [T, Hq D] of heads, the output of `qkv_proj`; other arguments as for `run`."""
    _attention(blocks, heads, count, ropes, table, tokens, queries, num_queries, out)


@kernel(types.void(*[types.int64] * 5))
def before_down(blocks: int, x: int, residual: int, count: int, inner: int) -> None:
    """x [T, C], the output of O, becomes residual + norm(x); inner is the input of Down [T, I] or of experts [T, C]."""
    block = records(blocks, 1, BLOCK)[0]
    if block.experts != 0:
        _row_stages(count, AFTER_O_PROJ, blocks, x, block.up.columns, inner, residual, 0, 0, 0, 0)
    else:
        _gate_up_proj(blocks, x, residual, count, inner)


@kernel(types.void(*[types.int64] * 5))
def after_down(blocks: int, x: int, residual: int, count: int, width: int) -> None:
    """x [T, C], the output of Down, becomes residual + norm(x)."""
    _row_stages(count, AFTER_DOWN_PROJ, blocks, x, width, 0, residual, 0, 0, 0, 0)


@kernel(types.void(*[types.int64] * 5))
def norm_rows(head: int, x: int, count: int, width: int, out: int) -> None:
    """out [T, C] = norm(x [T, C])"""
    made = records(head, 1, HEAD)[0]
    for t in range(count):
        _norm(x + t * width * 4, width, made.norm, out + t * width * 4)


@kernel(types.void(*[types.int64] * 3, *[types.float64] * 2))
def scale_logits(logits: int, count: int, size: int, divisor: float, softcap: float) -> None:
    """logits [count, size] = softcap tanh(logits / divisor / softcap), in place; softcap: 0 for none"""
    _scale_logits(count, logits, size, np.float32(divisor), np.float32(softcap))


@kernel(types.void(*[types.int64] * 6))
def activate_rows(kind: int, x: int, count: int, width: int, size: int, out: int) -> None:
    """out [T, I] = activation(x), or activation(gate) * up for x [T, 2 I], which holds both."""
    for t in range(count):
        activate_row(x + t * width * 4, width, size, kind, out + t * size * 4)


def run(
    blocks: Any, heads: Any, x: Any, ropes: Any, tables: Any, tokens: Any, queries: Any, selected: Any, out: Any
) -> None:
    """x [T, C] through blocks: out [T, C]; or, with a head, the logits [S, V] of the selected tokens.

    All are arrays, and `heads` has one element or none. ropes: the addresses of cos and sin [P, D] of each layer, 0
    without RoPE, and of query scales [P], 0 for none. tables: the storage of keys and values, of each layer and row.
    tokens: the row and the position of each. queries: from `query_blocks`.
    """
    head = heads.ctypes.data if len(heads) else 0
    places = ropes.ctypes.data, tables.ctypes.data, tables.shape[1], tokens.ctypes.data
    todo = queries.ctypes.data, len(queries), selected.ctypes.data, len(selected)
    _run.call(blocks.ctypes.data, len(blocks), head, x.ctypes.data, *x.shape, *places, *todo, out.ctypes.data)


def head(heads: Any, x: Any, out: Any) -> None:
    """out [T, rows] = W norm(x [T, C]) + b; the norm is optional."""
    _run(0, 0, heads, x, *x.shape, 0, 0, 0, 0, 0, 0, np.arange(len(x)), len(x), out)


def linear(weight: tuple[int, ...], x: Any, out: Any) -> None:
    """out [T, rows] = x [T, columns] W^T + b; weight: the fields of a WEIGHT record."""
    _, kind, *rest = weight
    gemm_kernel(kind)(kind, *rest, x, len(x), out)


def gemm_kernel(kind: int) -> Kernel:
    """The kernel for a kind of weight."""
    return gemm_int if kind < BFLOAT16 else gemm_float


def query_blocks(counts: Sequence[int]) -> Any:
    """Blocks of up to X_ROWS queries of one row, for rows of so many tokens each: the work of attention.

    Columns: the row of the table; the number of blocks in the rows before, and in its row; the first token, the end.
    """
    return _query_blocks(tuple(counts))


@lru_cache  # the same for every decode step of a batch
def _query_blocks(each: tuple[int, ...]) -> Any:
    counts = np.asarray(each, np.int64)
    of_row = -(-counts // X_ROWS)
    row = np.repeat(np.arange(len(counts)), of_row)
    before = np.repeat(np.cumsum(of_row) - of_row, of_row)
    ends = np.cumsum(counts)
    line = (ends - counts)[row] + (np.arange(len(row)) - before) * X_ROWS
    return np.stack((row, before, of_row[row], line, np.minimum(line + X_ROWS, ends[row])), 1)


def compile_first() -> None:
    """Compiles what every model needs: it shows whether numba can compile for this CPU."""
    attend.begin()
    _run.address  # noqa: B018


def prepare(schemes: Iterable[Scheme], split: bool = False, experts: bool = False) -> None:
    """Compiles the kernels for weights of these schemes; none: float weights.

    split: for a tensor-parallel model. experts: for a mixture, whose router has float weights.
    """
    needed = [kernel for scheme in schemes for kernel in (tile_kernel(scheme), part_kernel(scheme))]
    needed += [gemm_int, look_up] if needed else [gemm_float]
    if experts:
        needed += [gemm_float, mix_experts]
    if split:
        needed += [attend, qkv_proj, rotate, attention, before_down, after_down, norm_rows, shm_allgather]
    for each in needed:
        each.address  # noqa: B018


NO_HEAD = np.zeros(0, HEAD)
