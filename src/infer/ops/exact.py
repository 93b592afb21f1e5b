"""Exact mode: the logits at a position depend on the tokens up to it, and on nothing else.

A sum of floats depends on its order, and libraries choose the order by the shape of the whole work: a row comes out of
a product with other bits among 64 than alone. Hence **the rule**:

    every number is made by a sequence of operations whose shape and order depend on its position alone, never on how
    many rows, queries or threads are at work beside it.

Why this suffices. Embeddings, norms, products and activations are functions of one row; under the rule they are
functions in the strict sense, equal bits in, equal bits out, in whichever company. Attention is one of a query and of
the keys and values that it sees, in the order of their positions, and how many these are depends on the query's
position and the window alone. Now by induction: the input of the first layer at position p is a function of token p.
If the input of a layer at every position up to p is a function of the tokens up to that position, then so are the keys
and values there, hence attention at p, hence the layer's output at p, whether those keys come from this pass, from an
earlier one or from another cache, since storing copies them (or, in 8 bits, rounds each vector by itself). A cache, a
chunk, a neighbour or a truncation only changes which rows are computed together, so it changes nothing.

How it is kept. On the CPU the kernels that numba compiles (`kernels/cpu_*.py`) treat each row and each query by itself
in a fixed order; they run decode steps in any mode, and in exact mode everything else too. The functions below are
for what does not go through whole blocks: activations in 16 bits, and modules that somebody has changed. (`linear` is
also the product of 16 bits in any mode, on a CPU where torch has no fast one.) Where there are no kernels, plain torch
takes one row, or one query, at a time. What is added, multiplied, copied or rounded element by element has no order to
get wrong; of functions like cos, whose vectors and leftovers torch computes in two ways, each row is computed by itself
too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from infer import kernels
from infer.ops.table import Table

PIECE = 16384  # elements that torch leaves to a single thread
KINDS = {torch.float32: 32, torch.bfloat16: 16, torch.float16: 116}  # as kernels/cpu_product.py names weights

_asked: ContextVar[bool | None] = ContextVar("exact", default=None)


def wanted() -> bool:
    """Whether what runs now is to be exact."""
    return bool(_asked.get())


def resolve(own: bool) -> bool:
    """Whether a pass is to be exact. own: what the model itself was loaded with, where nobody asked for anything."""
    asked = _asked.get()
    return own if asked is None else asked


@contextmanager
def mode(exact: bool | None) -> Iterator[None]:
    """Within, passes are exact, or are not; None: as each model was loaded. Never across a yield to a caller."""
    token = _asked.set(exact)
    try:
        yield
    finally:
        _asked.reset(token)


@contextmanager
def one_thread() -> Iterator[None]:
    """Within, MKL, where torch has it, uses a single one: it would share out even the columns of one row."""
    threads = torch.get_num_threads()
    if threads == 1 or not torch.backends.mkl.is_available():  # type: ignore[no-untyped-call]
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def by_rows(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """function(x [T, C]), a row at a time; each in memory of its own, since how it is aligned may matter too."""
    with one_thread():
        return torch.cat([function(x[i : i + 1].clone()) for i in range(len(x))]) if len(x) else function(x)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [T, in] -> [T, out]"""
    if (compiled := _kernels(x)) is None or weight.dtype not in KINDS or not weight.is_cpu:
        weight = weight.to(x.dtype)
        return by_rows(lambda row: F.linear(row, weight, bias), x)
    weight, bias = weight.contiguous(), None if bias is None else _floats(bias)
    head, out = np.zeros(1, compiled.HEAD), _empty(x.shape[0], weight.shape[0])
    head["weight"] = KINDS[weight.dtype], weight.data_ptr(), 0 if bias is None else bias.data_ptr(), *weight.shape
    compiled.head(head, _floats(x).numpy(), out.numpy())
    return out.to(x.dtype)


def norm(x: Tensor, norm: Any, plain: Callable[[Tensor], Tensor]) -> Tensor:
    """x [..., C], of which each vector is normed. norm: an `ops.norm.Norm`. plain: what it does in torch."""
    rows = x.reshape(-1, x.shape[-1])
    if (compiled := _kernels(x)) is None or norm.weight.shape != rows.shape[1:]:
        return by_rows(plain, rows).view(x.shape)
    weight, bias = _floats(norm.weight), None if norm.bias is None else _floats(norm.bias)
    head, out = np.zeros(1, compiled.HEAD), _empty(*rows.shape)
    head["norm"] = weight.data_ptr(), 0 if bias is None else bias.data_ptr(), norm.eps, norm.offset, norm.centred
    compiled.norm(head, _floats(rows).numpy(), out.numpy())
    return out.view(x.shape).to(x.dtype)


def activate(x: Tensor, inner: int, code: int, plain: Callable[[Tensor], Tensor]) -> Tensor:
    """activation(x [T, inner]), or activation(gate) * up, where x [T, 2 inner] holds both.

    code: of the activation, in `ops.parts.ACTIVATION_CODES`. plain: the activation in torch.
    """
    if (compiled := _kernels(x)) is None:
        # torch cuts what is longer among its threads, wherever that falls, and computes leftovers in another way.
        pieces = [by_rows(plain, piece) for piece in torch.split(x[:, :inner], PIECE, 1)]
        out = torch.cat(pieces, 1)
        return out if inner == x.shape[1] else out * x[:, inner:]
    block, out = np.zeros(1, compiled.BLOCK), _empty(x.shape[0], inner)
    block["activation"] = code
    compiled.activate(block, _floats(x).numpy(), out.numpy())
    return out.to(x.dtype)


def reads_codes(q: Tensor) -> bool:
    """Whether `attend` takes keys and values in 8 bits as they are stored: as the kernel of a decode step does."""
    return wanted() and _kernels(q) is not None


def attend(q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None) -> Tensor:
    """q [B, Hq, n, D] at the last n positions of k, v [B, Hkv, S, D], which lie in order -> [B, Hq, n, D]."""
    batch, heads, n, head_dim = q.shape
    if window is not None and k.shape[2] > n + window - 1:  # keys before the first query's window are no one's
        k, v = k[:, :, 1 - n - window :], v[:, :, 1 - n - window :]
    if (compiled := _kernels(q)) is None:
        return _attend_one_by_one(q, k, v, scale, window)
    if k.dtype is not torch.int8:
        k, v = k.float(), v.float()
    if k.stride()[2:] != (k.shape[3], 1) or k.stride() != v.stride():
        k, v = k.contiguous(), v.contiguous()
    ends = np.arange(k.shape[2] - n, k.shape[2]) + 1
    counts = ends if window is None else np.minimum(ends, window)
    seen = np.stack((ends - counts, counts), 1)
    rows, out = q.transpose(1, 2).reshape(batch * n, heads * head_dim), _empty(batch * n, heads * head_dim)
    record = attention_record(heads, k.shape[1], head_dim, scale)
    compiled.attend(record, _floats(rows).numpy(), Table([k], [v]).at(0), np.tile(seen, (batch, 1)), out.numpy())
    return out.to(q.dtype).view(batch, n, heads, head_dim).transpose(1, 2)


@cache
def attention_record(heads: int, kv_heads: int, head_dim: int, scale: float) -> np.ndarray[Any, Any]:
    """A block of which nothing but attention is there."""
    record = np.zeros(1, kernels.cpu().BLOCK)
    record["heads"], record["kv_heads"], record["head_dim"], record["scale"] = heads, kv_heads, head_dim, scale
    return record


def _attend_one_by_one(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
    out = torch.empty_like(q)
    # As in `ops.attention`, without cuDNN, and without the kernel for many queries.
    with one_thread(), sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        for row in range(q.shape[0]):
            for i in range(q.shape[2]):
                end = k.shape[2] - q.shape[2] + i + 1
                start = 0 if window is None else max(0, end - window)
                one = q[row : row + 1, :, i : i + 1].clone(memory_format=torch.contiguous_format)
                keys, values = (
                    t[row : row + 1, :, start:end].clone(memory_format=torch.contiguous_format) for t in (k, v)
                )
                out[row, :, i] = F.scaled_dot_product_attention(
                    one, keys, values, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
                )[0, :, 0]
    return out


def _kernels(x: Tensor) -> Any:
    """Those that take such rows; None where there are none."""
    if not x.is_cpu or x.dtype not in KINDS or (compiled := kernels.cpu()) is None:
        return None
    compiled.use_threads(torch.get_num_threads())
    return compiled


def _floats(x: Tensor) -> Tensor:
    return x.detach().float().contiguous()


def _empty(rows: int, columns: int) -> Tensor:
    return torch.empty(rows, columns, dtype=torch.float32, device="cpu")
