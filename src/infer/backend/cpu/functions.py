"""The parts of a model one by one, through the kernels: each row and each query is computed by itself.

What has 16 bits is widened to float32, computed, and rounded at the end.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from infer.backend.cpu import kernels
from infer.backend.cpu.records import ACTIVATION_CODES, Record, weight_record
from infer.cache.table import Table
from infer.nn.linear import Embedding, Linear
from infer.nn.norm import Norm
from infer.nn.quantized import QuantizedWeight
from infer.nn.split import SplitEmbedding


def linear(x: Tensor, part: Linear) -> Tensor:
    """x [T, in] -> [T, out]"""
    x = part.input(x)
    bias, out = None if part.bias is None else _floats(part.bias), empty(x.shape[0], part.weight.shape[0])
    running().linear(weight_record(part.weight, bias), _floats(x).numpy(), out.numpy())
    return part.output(out.to(x.dtype))


def norm(x: Tensor, part: Norm) -> Tensor:
    """Each vector of x [..., C]."""
    made = running()
    weight, bias = _floats(part.weight), None if part.bias is None else _floats(part.bias)
    rows = _floats(x.reshape(-1, x.shape[-1]))
    head, out = np.zeros(1, made.HEAD), empty(*rows.shape)
    head["norm"] = weight.data_ptr(), 0 if bias is None else bias.data_ptr(), part.eps, part.offset, part.centred
    made.norm(head, rows.numpy(), out.numpy())
    return out.view(x.shape).to(x.dtype)


def activate(x: Tensor, inner: int, activation: str) -> Tensor:
    """activation(x [T, inner]), or activation(gate) * up, where x [T, 2 inner] holds both."""
    made = running()
    block, out = np.zeros(1, made.BLOCK), empty(x.shape[0], inner)
    block["activation"] = ACTIVATION_CODES[activation]
    made.activate(block, _floats(x).numpy(), out.numpy())
    return out.to(x.dtype)


def embed(part: Embedding, ids: Tensor) -> Tensor:
    """The vectors of ids [T]."""
    if isinstance(part.weight, QuantizedWeight) and isinstance(part, SplitEmbedding):
        at, own = part.places(ids)
        return part.group.combine(look_up(part.weight, at), own)
    return look_up(part.weight, ids) if isinstance(part.weight, QuantizedWeight) else part.forward(ids)


def look_up(weight: QuantizedWeight, ids: Tensor) -> Tensor:
    """Rows ids [T] of a quantised weight, as float32 [T, K]."""
    ids, out = ids.long().contiguous(), empty(len(ids), weight.columns)
    if not all(0 <= row < weight.rows for row in ids.tolist()):
        raise IndexError("there is no such row")
    kernels().look_up(weight.bits, weight.packed.data_ptr(), *weight.shape, ids.data_ptr(), len(ids), out.data_ptr())
    return out


class CpuAttention:
    """Attention over keys and values that a cache hands out: an `AttentionKernel`."""

    takes_int8 = True

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None, end: int) -> Tensor:
        batch, heads, n, head_dim = q.shape
        if window is not None and k.shape[2] > n + window - 1:  # no query sees the keys before the first one's window
            k, v = k[:, :, 1 - n - window :], v[:, :, 1 - n - window :]
        k, v = _readable(k, v)
        out = empty(batch * n, heads * head_dim)
        running().attend(*_arguments(q, k, v, scale, window, end - k.shape[2]), out.numpy())
        return out.to(q.dtype).view(batch, n, heads, head_dim).transpose(1, 2)

    def weights(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None, end: int) -> Tensor:
        batch, heads, n, _ = q.shape
        k, v = _readable(k, v)
        out = empty(batch * n, heads * k.shape[2])
        running().weigh(*_arguments(q, k, v, scale, window), out.numpy())
        return out.view(batch, n, heads, -1).transpose(1, 2)


def _readable(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """As kernels read them: the caller keeps them while kernels run, which know their addresses alone."""
    if k.dtype is not torch.int8:
        k, v = k.float(), v.float()
    if k.stride()[2:] != (k.shape[3], 1) or k.stride() != v.stride():
        k, v = k.contiguous(), v.contiguous()
    return k, v


def _arguments(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, first: int = 0) -> tuple[Any, ...]:
    """A block's record, queries [B n, Hq D], a table, the keys that each query sees, and parts.

    first: the position of the first key.
    """
    batch, heads, n, head_dim = q.shape
    ends = np.arange(k.shape[2] - n, k.shape[2]) + 1
    counts = ends if window is None else np.minimum(ends, window)
    rows = _floats(q.transpose(1, 2).reshape(batch * n, heads * head_dim)).numpy()
    seen = np.tile(np.stack((first + ends - counts, counts), 1), (batch, 1))
    record = _attention_record(heads, k.shape[1], head_dim, scale)
    return record, rows, Table([k], [v]).from_position(first), seen, kernels().parts_of([n] * batch)


@cache
def _attention_record(heads: int, kv_heads: int, head_dim: int, scale: float) -> Record:
    """A block that has attention and nothing else."""
    record = np.zeros(1, kernels().BLOCK)
    record["heads"], record["kv_heads"], record["head_dim"], record["scale"] = heads, kv_heads, head_dim, scale
    return record


def running() -> Any:
    """The kernels, with as many threads as torch has."""
    made = kernels()
    made.use_threads(torch.get_num_threads())
    return made


def empty(rows: int, columns: int) -> Tensor:
    return torch.empty(rows, columns, dtype=torch.float32, device="cpu")


def _floats(x: Tensor) -> Tensor:
    return x.detach().float().contiguous()
