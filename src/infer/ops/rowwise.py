"""The rule that makes every pass exact, and the parts of a model as functions that keep it.

A sum of floats depends on its order, and libraries choose the order by the shape of the whole work: one row of a
product has other bits among 64 rows than alone. Hence **the rule**:

    every number is computed by a sequence of operations whose shape and order depend on its position alone, never on
    how many rows, queries or threads are at work beside it.

Why it suffices. Embeddings, norms, products and activations compute each row from that row and the weights. Under the
rule they are functions in the strict sense: equal bits in, equal bits out, whatever the other rows are. Attention
computes each query from the keys and values that it sees, in the order of their positions; which ones it sees follows
from its position and the window. Now by induction over the layers: the input of the first layer at position p is a
function of token p. If a layer's input at every position up to p is a function of the tokens up to that position, then
so are its keys and values there, hence its attention at p, hence its output at p. It does not matter whether those keys
come from this pass, from an earlier one or from another cache: storing copies them, or, in 8 bits, rounds each vector
by itself. A cache, a chunk, a batch or a truncation only changes which rows are computed together, so it changes
nothing.

How it is kept. On a CPU the kernels that numba compiles (`kernels/cpu_*.py`) compute each row and each query by itself
in a fixed order. In float32 they take whole blocks and whole decode steps (`ops/compiled.py`). The functions below are
the same kernels one by one: attention, which caches ask for, and every part of a model whose activations have 16 bits.
Those are widened to float32, computed and rounded at the end. What torch adds, multiplies, copies or rounds element by
element has no order to get wrong. On a GPU, `ops/gpu_prompt.py` keeps the rule.

Without kernels (INFER_KERNELS=0, no numba, another device), with gradients, and in modules that somebody hooked or
replaced, plain torch runs: paths then agree within rounding, and no bits are promised.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from infer import kernels
from infer.ops.table import Table

WEIGHT_KINDS = {torch.float32: 32, torch.bfloat16: 16, torch.float16: 116}  # as kernels/cpu_product.py names them


def wants_gradient(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def takes(x: Tensor, *weights: Tensor | None) -> bool:
    """Whether there are kernels for such activations, and no gradient is wanted through them."""
    return x.is_cpu and x.dtype in WEIGHT_KINDS and not wants_gradient(x, *weights) and kernels.cpu() is not None


def takes_narrow(x: Tensor, *weights: Tensor | None) -> bool:
    """The same, for activations of 16 bits: in float32 the kernels take whole blocks, and single modules are torch."""
    return x.dtype.itemsize == 2 and takes(x, *weights)


def can_multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether `linear` computes this product: of activations or weights in 16 bits."""
    narrow = x.dtype.itemsize == 2 or weight.dtype.itemsize == 2
    return narrow and weight.dtype in WEIGHT_KINDS and weight.is_cpu and takes(x, weight, bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [T, in] -> [T, out]"""
    compiled = _kernels()
    weight, bias = weight.contiguous(), None if bias is None else _floats(bias)
    head, out = np.zeros(1, compiled.HEAD), _empty(x.shape[0], weight.shape[0])
    kind = WEIGHT_KINDS[weight.dtype]
    head["weight"] = kind, weight.data_ptr(), 0 if bias is None else bias.data_ptr(), *weight.shape
    compiled.head(head, _floats(x).numpy(), out.numpy())
    return out.to(x.dtype)


def norm(x: Tensor, norm: Any) -> Tensor:
    """Each vector of x [..., C]. norm: an `ops.norm.Norm`."""
    compiled = _kernels()
    weight, bias = _floats(norm.weight), None if norm.bias is None else _floats(norm.bias)
    rows = _floats(x.reshape(-1, x.shape[-1]))
    head, out = np.zeros(1, compiled.HEAD), _empty(*rows.shape)
    head["norm"] = weight.data_ptr(), 0 if bias is None else bias.data_ptr(), norm.eps, norm.offset, norm.centred
    compiled.norm(head, rows.numpy(), out.numpy())
    return out.view(x.shape).to(x.dtype)


def activate(x: Tensor, inner: int, code: int) -> Tensor:
    """activation(x [T, inner]), or activation(gate) * up, where x [T, 2 inner] holds both.

    code: of the activation, in `ops.parts.ACTIVATION_CODES`.
    """
    compiled = _kernels()
    block, out = np.zeros(1, compiled.BLOCK), _empty(x.shape[0], inner)
    block["activation"] = code
    compiled.activate(block, _floats(x).numpy(), out.numpy())
    return out.to(x.dtype)


def takes_queries(q: Tensor) -> bool:
    """Whether `attend` takes such queries; keys and values in 8 bits it then takes as they are stored."""
    return takes(q) and not torch.is_grad_enabled()


def can_attend(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether `attend` takes queries [B, Hq, n, D] over k and v [B, Hkv, S, D], in floats or as 8-bit caches store."""
    return (
        takes_queries(q)
        and k.dtype in (q.dtype, torch.int8)
        and k.dtype is v.dtype
        and k.is_cpu
        and v.is_cpu
        and k.shape == v.shape
        and k.shape[0] == q.shape[0]
        and (k.dtype is torch.int8 or k.shape[3] == q.shape[3])
        and k.shape[2] >= q.shape[2] > 0
        and q.shape[1] % k.shape[1] == 0
    )


def attend(q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None) -> Tensor:
    """q [B, Hq, n, D] at the last n positions of k, v [B, Hkv, S, D], which lie in order -> [B, Hq, n, D]."""
    n = q.shape[2]
    if window is not None and k.shape[2] > n + window - 1:  # no query sees the keys before the first one's window
        k, v = k[:, :, 1 - n - window :], v[:, :, 1 - n - window :]
    ends = np.arange(k.shape[2] - n, k.shape[2]) + 1
    counts = ends if window is None else np.minimum(ends, window)
    return _attend(q, k, v, scale, np.stack((ends - counts, counts), 1))


def attend_ring(q: Tensor, k: Tensor, v: Tensor, first: int, count: int, *, scale: float) -> Tensor:
    """A single query [B, Hq, 1, D] over `count` slots of the rings k, v, from slot `first` on and around."""
    return _attend(q, k, v, scale, np.array([[first, count]]))


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, seen: np.ndarray[Any, Any]) -> Tensor:
    """seen [n, 2]: the first slot and the number of keys of each query, alike in all rows."""
    batch, heads, n, head_dim = q.shape
    if k.dtype is not torch.int8:
        k, v = k.float(), v.float()
    if k.stride()[2:] != (k.shape[3], 1) or k.stride() != v.stride():
        k, v = k.contiguous(), v.contiguous()
    rows = _floats(q.transpose(1, 2).reshape(batch * n, heads * head_dim))
    out, record = _empty(*rows.shape), _attention_record(heads, k.shape[1], head_dim, scale)
    _kernels().attend(record, rows.numpy(), Table([k], [v]).at(0), np.tile(seen, (batch, 1)), out.numpy())
    return out.to(q.dtype).view(batch, n, heads, head_dim).transpose(1, 2)


@cache
def _attention_record(heads: int, kv_heads: int, head_dim: int, scale: float) -> np.ndarray[Any, Any]:
    """A block that has attention and nothing else."""
    record = np.zeros(1, kernels.cpu().BLOCK)
    record["heads"], record["kv_heads"], record["head_dim"], record["scale"] = heads, kv_heads, head_dim, scale
    return record


def _kernels() -> Any:
    compiled = kernels.cpu()
    compiled.use_threads(torch.get_num_threads())
    return compiled


def _floats(x: Tensor) -> Tensor:
    return x.detach().float().contiguous()


def _empty(rows: int, columns: int) -> Tensor:
    return torch.empty(rows, columns, dtype=torch.float32, device="cpu")
