"""Models on the CPU: blocks and the head over any rows in one call, and the parts of a block around attention.

What comes out for a token depends on that token and on the keys that it sees, down to the last bit: each row goes
through the same operations in the same order, alone or among others, whichever thread has it. So nothing here may be
compiled with `fastmath`, which lets a sum come out otherwise wherever its function is inlined.

A decode step reads every weight once, so memory sets its pace, as long as nothing else takes time. In plain torch a
third of a step is Python and operators between the products; compiled by numba it is close to nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numba import types

from infer.backend.cpu import attention, product_codes, product_floats
from infer.backend.cpu.attention import attend_at, write
from infer.backend.cpu.meeting import gather_rows
from infer.backend.cpu.memory import address, keep, records
from infer.backend.cpu.pool import use_threads as use_threads
from infer.backend.cpu.product import FLOAT32, INT4, INT8, WEIGHT, product
from infer.backend.cpu.product_codes import look_up
from infer.backend.cpu.simd import (
    add,
    divide,
    exponential,
    fused,
    fused_one,
    lane,
    load_float,
    load_integer,
    load_sixteen,
    multiply,
    no_sixteen,
    splat,
    store_float,
    store_floats,
    store_integer,
    summed,
)
from infer.backend.cpu.threads import shared
from infer.backend.cpu.tile import X_ROWS
from infer.backend.cpu.units import Unit, linked, unit
from infer.cache.table import COLUMNS

# Addresses are 0 where there is nothing; centred: a LayerNorm.
NORM = np.dtype([("weight", "i8"), ("bias", "i8"), ("eps", "f8"), ("offset", "f8"), ("centred", "i8")])
HEAD = np.dtype([("norm", NORM), ("weight", WEIGHT)])
BLOCK = np.dtype(
    [
        ("before_attention", NORM),
        ("qkv", WEIGHT),
        ("q_norm", NORM),
        ("k_norm", NORM),
        ("attend", "i8"),  # where the code for it lies
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
        ("inner", "i8"),  # how many numbers that gives
    ]
)
BLOCK_BYTES = BLOCK.itemsize
MANY = 16  # rows that are worth handing out to several threads


@linked
def _norm(x: int, size: int, norm: Any, out: int) -> None:
    """out, which may be x, = RMSNorm(x), or LayerNorm(x) if centred."""
    whole, mean, sums = size // 16 * 16, np.float32(0), no_sixteen()
    if norm.centred:
        for i in range(0, whole, 16):
            sums = add(sums, load_sixteen(x + i * 4))
        mean = summed(sums)
        for i in range(whole, size):
            mean += load_float(x + i * 4)
        mean /= np.float32(size)
        sums = no_sixteen()
    for i in range(0, whole, 16):
        off = add(load_sixteen(x + i * 4), splat(-mean))
        sums = fused(off, off, sums)
    square = summed(sums)
    for i in range(whole, size):
        off_one = load_float(x + i * 4) - mean
        square = fused_one(off_one, off_one, square)
    scale, offset = np.float32(1 / math.sqrt(square / size + norm.eps)), np.float32(norm.offset)
    for i in range(size):
        each = (load_float(x + i * 4) - mean) * scale * (load_float(norm.weight + i * 4) + offset)
        store_float(out + i * 4, each)
    if norm.bias != 0:
        _add(out, norm.bias, size)


@linked
def _add(x: int, y: int, size: int) -> None:
    for i in range(size):
        store_float(x + i * 4, load_float(x + i * 4) + load_float(y + i * 4))


@linked(forceinline=True)
def _activated(gate: Any, kind: int) -> Any:
    """0: SiLU; 1: GELU in its tanh form, which is a SiLU-like product too, x sigmoid(2 y)."""
    y = gate
    if kind == 1:
        square = multiply(gate, gate)
        y = multiply(multiply(gate, splat(1.5957691216057308)), fused(square, splat(0.044715), splat(1.0)))
    return divide(gate, add(splat(1.0), exponential(multiply(y, splat(-1.0)))))


@linked
def _activate(up: int, width: int, size: int, kind: int, out: int) -> None:
    """out [size] = activation(up), or activation(gate) * up, where both lie in `up`. Kind 2 is GELU itself."""
    whole = size // 16 * 16
    if kind == 2:
        for i in range(size):
            x = load_float(up + i * 4)
            store_float(out + i * 4, np.float32(0.5) * x * np.float32(1 + math.erf(x * 0.7071067811865476)))
    else:
        for i in range(0, whole, 16):
            store_floats(out + i * 4, _activated(load_sixteen(up + i * 4), kind))
        for i in range(whole, size):
            store_float(out + i * 4, lane(_activated(splat(load_float(up + i * 4)), kind), 0))
    if width > size:
        for i in range(size):
            store_float(out + i * 4, load_float(out + i * 4) * load_float(up + (size + i) * 4))


@linked
def _rotate(block: Any, heads: int, cos: int, sin: int) -> None:
    """Norm and RoPE in place on the q and k of a token; cos and sin are [D], sin with the sign of rotate-half."""
    size, half = block.head_dim, block.head_dim // 2
    for h in range(block.heads + block.kv_heads):
        x = heads + h * size * 4
        if block.q_norm.weight != 0:
            if h < block.heads:
                _norm(x, size, block.q_norm, x)
            else:
                _norm(x, size, block.k_norm, x)
        if cos != 0:
            for i in range(0, half * 4, 4):
                j = i + half * 4
                first, second = load_float(x + i), load_float(x + j)
                store_float(x + i, first * load_float(cos + i) + second * load_float(sin + i))
                store_float(x + j, second * load_float(cos + j) + first * load_float(sin + j))


@linked
def _store(block: Any, row: int, position: int, heads: int, seen: int) -> None:
    """A token's keys and values, and which positions it sees: the first, and how many."""
    write(row, position, heads + block.heads * block.head_dim * 4, block.kv_heads, block.head_dim)
    oldest = 0 if block.window == 0 else max(0, position - block.window + 1)
    store_integer(seen, oldest)
    store_integer(seen + 8, position - oldest + 1)


# What happens to each row between products. In all of them, a row of x has `width` floats.
BEFORE_QKV, BEHIND_QKV, BEHIND_O, BEHIND_UP, BEHIND_DOWN = range(5)


@linked
def _do(
    t: int, what: int, blocks: int, x: int, width: int, y: int, z: int, ropes: int, table: int, tokens: int, seen: int
) -> None:
    block = records(blocks, 1, BLOCK)[0]
    row = x + t * width * 4
    if what == BEFORE_QKV:
        _norm(row, width, block.before_attention, y + t * width * 4)
    elif what == BEHIND_QKV:
        of, position = load_integer(tokens + t * 16), load_integer(tokens + t * 16 + 8)
        at, cos, sin = position * block.head_dim * 4, load_integer(ropes), load_integer(ropes + 8)
        _rotate(block, row, cos + at if cos != 0 else 0, sin + at if cos != 0 else 0)
        if table != 0:
            _store(block, table + of * COLUMNS * 8, position, row, seen + t * 16)
    elif what == BEHIND_O:  # x += z, y = norm(x)
        if block.after_attention.weight != 0:
            _norm(row, width, block.after_attention, row)
        _add(row, z + t * width * 4, width)
        _norm(row, width, block.before_mlp, y + t * width * 4)
    elif what == BEHIND_UP:
        _activate(row, width, block.inner, block.activation, y + t * block.inner * 4)
    else:  # x += z
        if block.after_mlp.weight != 0:
            _norm(row, width, block.after_mlp, row)
        _add(row, z + t * width * 4, width)


@shared
def _do_some(
    t: int, what: int, blocks: int, x: int, width: int, y: int, z: int, ropes: int, table: int, tokens: int, seen: int
) -> None:
    _do(t, what, blocks, x, width, y, z, ropes, table, tokens, seen)


@linked
def _each(
    count: int,
    what: int,
    blocks: int,
    x: int,
    width: int,
    y: int,
    z: int,
    ropes: int,
    table: int,
    tokens: int,
    seen: int,
) -> None:
    if count < MANY:
        for t in range(count):
            _do(t, what, blocks, x, width, y, z, ropes, table, tokens, seen)
    else:
        _do_some(count, what, blocks, x, width, y, z, ropes, table, tokens, seen)


@linked
def _project(blocks: int, x: int, count: int, ropes: int, table: int, tokens: int, seen: int, out: int) -> None:
    """out [T, (Hq + 2 Hkv) D] = q, k and v of x [T, C], normed and rotated; with a table, k and v are stored."""
    block = records(blocks, 1, BLOCK)[0]
    width = block.qkv.columns
    normed = np.empty(count * width, np.float32)
    _each(count, BEFORE_QKV, blocks, x, width, address(normed), 0, 0, 0, 0, 0)
    product(block.qkv, address(normed), count, out)
    _each(count, BEHIND_QKV, blocks, out, block.qkv.rows, 0, 0, ropes, table, tokens, seen)
    keep(normed, normed)


@linked
def _finish(blocks: int, attended: int, residual: int, count: int, out: int) -> None:
    """x = residual + norm(O attended); out [T, C] = x + norm(Down(activation(Gate norm(x)) * Up norm(x))).

    Norms behind a product only where there are any; not gated: Down(activation(Up norm(x))).
    """
    block = records(blocks, 1, BLOCK)[0]
    x, inner = np.empty(count * block.o.rows, np.float32), np.empty(count * block.inner, np.float32)
    product(block.o, attended, count, address(x))
    _open(blocks, address(x), residual, count, address(inner))
    product(block.down, address(inner), count, out)
    _each(count, BEHIND_DOWN, blocks, out, block.down.rows, 0, address(x), 0, 0, 0, 0)
    keep(x, inner)


@linked
def _open(blocks: int, x: int, residual: int, count: int, inner: int) -> None:
    """x [T, C] = residual + norm(x); inner [T, I] = activation(Gate norm(x)) * Up norm(x)"""
    block = records(blocks, 1, BLOCK)[0]
    width, up_width = block.up.columns, block.up.rows
    normed, up = np.empty(count * width, np.float32), np.empty(count * up_width, np.float32)
    _each(count, BEHIND_O, blocks, x, width, address(normed), residual, 0, 0, 0, 0)
    product(block.up, address(normed), count, address(up))
    _each(count, BEHIND_UP, blocks, address(up), up_width, inner, 0, 0, 0, 0, 0)
    keep(normed, up)


@linked
def _block(
    blocks: int,
    x: int,
    count: int,
    ropes: int,
    table: int,
    tokens: int,
    parts: int,
    part_count: int,
    out: int,
) -> None:
    """A whole block, x [T, C] -> out [T, C]. tokens: of each, its row of the table and its position."""
    block = records(blocks, 1, BLOCK)[0]
    mixed = np.empty(count * block.o.columns, np.float32)
    _mix(blocks, x, count, ropes, table, tokens, parts, part_count, address(mixed))
    _finish(blocks, address(mixed), x, count, out)
    keep(mixed, mixed)


@linked
def _mix(
    blocks: int, x: int, count: int, ropes: int, table: int, tokens: int, parts: int, part_count: int, out: int
) -> None:
    """out [T, Hq D]: what the heads have attended to."""
    block = records(blocks, 1, BLOCK)[0]
    projected, seen = np.empty(count * block.qkv.rows, np.float32), np.empty(count * 2, np.int64)
    _project(blocks, x, count, ropes, table, tokens, address(seen), address(projected))
    attend_at(
        block.attend,
        block.heads,
        block.kv_heads,
        block.head_dim,
        block.scale,
        address(projected),
        block.qkv.rows * 4,
        table,
        parts,
        part_count,
        address(seen),
        out,
    )
    keep(seen, projected)


@unit(types.void(*[types.int64] * 15))
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
    parts: int,
    part_count: int,
    wanted: int,
    wanted_count: int,
    out: int,
) -> None:
    """As `run`; head: 0 where there is none."""
    one, other = np.empty(count * width, np.float32), np.empty(count * width, np.float32)
    given, to, spare = x, address(one), address(other)
    for layer in range(layers):
        if layer == layers - 1 and head == 0:
            to = out
        table = tables + layer * table_rows * COLUMNS * 8
        _block(blocks + layer * BLOCK_BYTES, given, count, ropes + layer * 16, table, tokens, parts, part_count, to)
        given, to, spare = to, spare, to
    if head != 0:
        _head(head, given, width, wanted, wanted_count, out)
    keep(one, other)


@linked
def _head(head: int, x: int, width: int, wanted: int, count: int, out: int) -> None:
    """out [W, rows] = W norm(x [wanted]) + b, or without the norm where there is none."""
    made = records(head, 1, HEAD)[0]
    chosen = np.empty(count * width, np.float32)
    for i in range(count):
        row, to = x + load_integer(wanted + i * 8) * width * 4, address(chosen) + i * width * 4
        if made.norm.weight != 0:
            _norm(row, width, made.norm, to)
        else:
            for j in range(0, width * 4, 4):
                store_float(to + j, load_float(row + j))
    product(made.weight, address(chosen), count, out)
    keep(chosen, chosen)


@unit(types.void(*[types.int64] * 6))
def _before_attention(blocks: int, x: int, count: int, ropes: int, tokens: int, out: int) -> None:
    _project(blocks, x, count, ropes, 0, tokens, 0, out)


@unit(types.void(*[types.int64] * 5))
def _behind_attention(blocks: int, attended: int, x: int, count: int, out: int) -> None:
    _finish(blocks, attended, x, count, out)


@unit(types.void(*[types.int64] * 9))
def _up_to_attention(
    blocks: int, x: int, count: int, ropes: int, table: int, tokens: int, parts: int, part_count: int, out: int
) -> None:
    _mix(blocks, x, count, ropes, table, tokens, parts, part_count, out)


@unit(types.void(*[types.int64] * 5))
def _before_down(blocks: int, x: int, residual: int, count: int, inner: int) -> None:
    _open(blocks, x, residual, count, inner)


@unit(types.void(*[types.int64] * 5))
def _behind_down(blocks: int, x: int, residual: int, count: int, width: int) -> None:
    _each(count, BEHIND_DOWN, blocks, x, width, 0, residual, 0, 0, 0, 0)


@unit(types.void(*[types.int64] * 5))
def _norm_rows(head: int, x: int, count: int, width: int, out: int) -> None:
    made = records(head, 1, HEAD)[0]
    for t in range(count):
        _norm(x + t * width * 4, width, made.norm, out + t * width * 4)


@unit(types.void(*[types.int64] * 6))
def _activate_rows(kind: int, x: int, count: int, width: int, size: int, out: int) -> None:
    for t in range(count):
        _activate(x + t * width * 4, width, size, kind, out + t * size * 4)


def parts_of(counts: Sequence[int]) -> Any:
    """The work of attention over rows of so many tokens each, in parts of up to X_ROWS tokens of one row.

    Of each: its row of the table, how many parts the rows before have, how many its row has, its tokens (from, to).
    """
    return _parts_of(tuple(counts))


@lru_cache  # decode steps ask for the same again and again
def _parts_of(each: tuple[int, ...]) -> Any:
    counts = np.asarray(each, np.int64)
    of_row = -(-counts // X_ROWS)
    row = np.repeat(np.arange(len(counts)), of_row)
    before = np.repeat(np.cumsum(of_row) - of_row, of_row)
    ends = np.cumsum(counts)
    line = (ends - counts)[row] + (np.arange(len(row)) - before) * X_ROWS
    return np.stack((row, before, of_row[row], line, np.minimum(line + X_ROWS, ends[row])), 1)


def compile_first() -> None:
    """What every model needs: it shows whether numba can compile for this CPU."""
    _run.address  # noqa: B018


# The units, with arrays for addresses. Those of records have one element, or one for each layer.


def run(
    blocks: Any, heads: Any, x: Any, ropes: Any, tables: Any, tokens: Any, parts: Any, wanted: Any, out: Any
) -> None:
    """x [T, C] through blocks: out [T, C]; or, with a head, its logits [W, V] of the wanted tokens.

    ropes: of each layer, where cos and sin [P, D] of all positions lie, 0 if there are none. tables: of each layer and
    row, where keys and values go. tokens: of each, its row and its position. parts: from `parts_of`.
    """
    head, rows = _at(heads) if len(heads) else 0, tables.shape[1]
    layers, places, todo = len(blocks), (_at(ropes), _at(tables), rows, _at(tokens)), (_at(parts), len(parts))
    _run(_at(blocks), layers, head, _at(x), *x.shape, *places, *todo, _at(wanted), len(wanted), _at(out))


def product_of(kind: int) -> Unit:
    """For such a weight."""
    units = {INT4: product_codes.int4_product, INT8: product_codes.int8_product}
    return units.get(kind, product_floats.float_product)


def prepare(bits: set[int], split: bool = False) -> None:
    """Compile what such weights need, if need be; of none, floats. split: for a model of which others have a part."""
    needed = [product_of(kind) for kind in bits or {FLOAT32}]
    needed += [look_up] * bool(bits)
    if split:
        needed += [attention.attend, _before_attention, _up_to_attention, _before_down, _behind_down, _norm_rows]
        needed += [gather_rows]
    for each in needed:
        each.address  # noqa: B018


def linear(weight: tuple[int, ...], x: Any, out: Any) -> None:
    """out [T, rows] = x [T, columns] W^T + b; weight: as a record has it."""
    _, kind, *rest = weight
    product_of(kind)(kind, *rest, _at(x), len(x), _at(out))


def head(heads: Any, x: Any, out: Any) -> None:
    """out [T, rows] = W norm(x [T, C]) + b, or without the norm where there is none."""
    everything = np.arange(len(x))
    _run(0, 0, _at(heads), _at(x), *x.shape, 0, 0, 0, 0, 0, 0, _at(everything), len(x), _at(out))


def before_attention(blocks: Any, x: Any, ropes: Any, tokens: Any, out: Any) -> None:
    """out [T, (Hq + 2 Hkv) D] = q, k and v of x [T, C], normed and rotated; the rest as for `run`."""
    _before_attention(_at(blocks), _at(x), len(x), _at(ropes), _at(tokens), _at(out))


def behind_attention(blocks: Any, attended: Any, x: Any, out: Any) -> None:
    """out [T, C] from attended [T, Hq D], x being the residual."""
    _behind_attention(_at(blocks), _at(attended), _at(x), len(x), _at(out))


# A block of which other processes have a part, in pieces: between them, all of `attended` and `inner` is gathered.


def attended(blocks: Any, x: Any, ropes: Any, tables: Any, tokens: Any, parts: Any, out: Any) -> None:
    """out [T, Hq D] of x [T, C]; the rest as for `run`."""
    places = _at(ropes), _at(tables), _at(tokens), _at(parts), len(parts)
    _up_to_attention(_at(blocks), _at(x), len(x), *places, _at(out))


def before_down(blocks: Any, x: Any, residual: Any, inner: Any) -> None:
    """x [T, C], which O gave, becomes residual + norm(x); inner [T, I] is what Down takes."""
    _before_down(_at(blocks), _at(x), _at(residual), len(x), _at(inner))


def behind_down(blocks: Any, x: Any, residual: Any) -> None:
    """x [T, C], which Down gave, becomes residual + norm(x)."""
    _behind_down(_at(blocks), _at(x), _at(residual), *x.shape)


def attend(blocks: Any, q: Any, tables: Any, seen: Any, parts: Any, out: Any) -> None:
    """out [Q, Hq D]: each head of each query of q [Q, Hq D].

    seen: of each query, the position of its first key and how many keys. parts: from `parts_of`.
    """
    attention.attend(*_attended(blocks, q, tables, seen, parts), _at(out))


def weigh(blocks: Any, q: Any, tables: Any, seen: Any, parts: Any, out: Any) -> None:
    """out [Q, Hq S]: by which `attend` mixes the values of S keys, which lie in order."""
    keys = out.shape[1] // int(blocks[0]["heads"])
    attention.weigh(*_attended(blocks, q, tables, seen, parts), _at(out), keys)


def _attended(blocks: Any, q: Any, tables: Any, seen: Any, parts: Any) -> tuple[float, ...]:
    block = blocks[0]
    shape = int(block["heads"]), int(block["kv_heads"]), int(block["head_dim"]), float(block["scale"])
    return *shape, _at(q), q.strides[0], _at(tables), _at(parts), len(parts), _at(seen)


def norm(heads: Any, x: Any, out: Any) -> None:
    """out [T, C] = norm(x [T, C])"""
    _norm_rows(_at(heads), _at(x), *x.shape, _at(out))


def activate(blocks: Any, x: Any, out: Any) -> None:
    """out [T, I] = activation(x), or activation(gate) * up, where x [T, 2 I] holds both."""
    _activate_rows(int(blocks[0]["activation"]), _at(x), *x.shape, out.shape[1], _at(out))


NO_HEADS = np.zeros(0, HEAD)


def _at(array: Any) -> int:
    return int(array.ctypes.data)
