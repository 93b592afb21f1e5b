"""Modules as the CPU kernels take them: records of addresses, sizes and constants; and single modules run by kernels.

Each row and each query is computed by itself. 16-bit tensors are widened to float32, and the result is rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from threading import Lock
from typing import Any, NamedTuple, Unpack
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from infer.backend.cpu import kernels, tile_rows
from infer.backend.parts import BlockParts, HeadParts
from infer.cache.base import ScoreOptions
from infer.cache.table import Table
from infer.nn.activation import CLAMPED_SWIGLU
from infer.nn.linear import Embedding, Linear
from infer.nn.norm import Norm
from infer.nn.quantized import Quantized, QuantizedWeight, pieces_of
from infer.nn.sharded import ShardedEmbedding, ShardedRMSNorm

Record = np.ndarray[Any, Any]

WEIGHT_KINDS = {torch.float32: 32, torch.bfloat16: 16, torch.float16: 116}  # the kinds of gemm.py
ACTIVATION_CODES = {"silu": 0, "gelu_tanh": 1, "gelu": 2, CLAMPED_SWIGLU: 3}  # of activation.py
empty = partial(torch.empty, dtype=torch.float32, device="cpu")
_tiling = Lock()  # a plan has the address of a tiled weight: no second thread may tile it again
_part_records: WeakKeyDictionary[Quantized, Record] = WeakKeyDictionary()  # a plan has their addresses


def is_readable(weight: Tensor) -> bool:
    """Whether the kernels read such a weight: float32, packed, or a 16-bit matrix."""
    return weight.is_cpu and (
        weight.dtype in (torch.float32, torch.uint8) or (weight.dtype in WEIGHT_KINDS and weight.dim() == 2)
    )


def block_record(parts: BlockParts, experts: ExpertRecords | None = None) -> Record:
    made = np.zeros(1, kernels().BLOCK)
    for name, part in parts._asdict().items():
        if isinstance(part, Linear):
            made[name] = weight_record(part.weight, part.bias)
        elif isinstance(part, Norm) and not isinstance(part, ShardedRMSNorm):  # needs the other ranks
            made[name] = norm_record(part, part.weight, part.bias)
    made["heads"], made["kv_heads"], made["head_dim"] = parts.heads, parts.kv_heads, parts.head_dim
    made["attend"] = kernels().attend.address
    made["norms_heads_apart"] = parts.norms_heads_apart
    made["scale"], made["window"], made["softcap"] = parts.scale, parts.window or 0, parts.softcap or 0
    made["multiplier"], made["parallel"] = parts.multiplier, parts.parallel
    made["activation"], made["inner"] = ACTIVATION_CODES[parts.activation], parts.down.in_features
    made["sinks"] = _address(parts.sinks)
    if experts is not None:
        made["mix_experts"], made["experts"] = kernels().mix_experts.address, experts.mix.ctypes.data
    return made


class ExpertRecords(NamedTuple):
    """A mixture of experts, and what its record has addresses of."""

    mix: Record
    up: tuple[Record, Record | None]
    down: tuple[Record, Record | None]
    biases: Sequence[Tensor | None]  # in float32

    @classmethod
    def of(cls, parts: BlockParts) -> ExpertRecords | None:
        if (routing := parts.routing) is None:
            return None
        mix = np.zeros(1, kernels().EXPERTS)
        linears = routing.router, parts.up, parts.down
        biases = [None if part.bias is None else _floats(part.bias) for part in linears]
        up = _per_expert(parts.up.weight, biases[1], routing.num_experts)
        down = _per_expert(parts.down.weight, biases[2], routing.num_experts)
        mix["router"] = weight_record(routing.router.weight, biases[0])
        mix["up"], mix["down"] = up[0].ctypes.data, down[0].ctypes.data
        mix["top_k"], mix["norm_topk"] = routing.top_k, routing.norm_topk
        mix["activation"], mix["inner"] = ACTIVATION_CODES[parts.activation], parts.down.in_features
        mix["outer"] = parts.down.weight.shape[0] // routing.num_experts
        mix["threads"] = kernels().threads.COUNT.ctypes.data
        return cls(mix, up, down, biases)


def _per_expert(weight: Tensor | Quantized, bias: Tensor | None, count: int) -> tuple[Record, Record | None]:
    """A WEIGHT of each expert of a stack, and the PARTs that these have addresses of.

    A PART begins with a tile: the first of an expert may have rows of the expert before it.
    """
    made, size = np.zeros(count, kernels().WEIGHT), weight.shape[0] // count
    made[:], first = weight_record(weight, bias), np.arange(count) * size
    if isinstance(weight, Quantized):
        found, counts, leads = [], [], []
        for start in first.tolist():
            pieces = [*pieces_of(weight, start, start + size)]
            found += [_part(part, rows.start // part.tile_rows, rows.stop) for part, rows in pieces]
            counts.append(len(pieces))
            leads.append(pieces[0][1].start % pieces[0][0].tile_rows)
        parts = np.array(found, kernels().PART)
        made["kind"], made["rows"] = counts, np.array(leads) + size
        made["at"] = parts.ctypes.data + (np.cumsum(counts) - counts) * parts.itemsize
        first -= leads
    else:
        parts = None
        made["at"], made["rows"] = made["at"] + first * weight[0].nbytes, size
    if bias is not None:
        made["bias"] += first * 4
    return made, parts


def head_record(norm: Norm | None, linear: Linear | None, divisor: float = 1.0, softcap: float | None = None) -> Record:
    made = np.zeros(1, kernels().HEAD)
    made["divisor"], made["softcap"] = divisor, softcap or 0
    if linear is not None:
        made["weight"] = weight_record(linear.weight, linear.bias)
    if norm is not None:
        made["norm"] = norm_record(norm, norm.weight, norm.bias)
    return made


def weight_record(weight: Tensor | Quantized, bias: Tensor | None) -> tuple[int, ...]:
    """Compiles the GEMM kernel for such a weight if this has not been done before."""
    if isinstance(weight, Quantized):
        parts = _parts(weight)
        kind, at = len(parts), parts.ctypes.data
    else:
        kind, at = WEIGHT_KINDS[weight.dtype], weight.data_ptr()
    return kernels().gemm_kernel(kind).address, kind, at, _address(bias), *weight.shape


def _parts(weight: Quantized) -> Record:
    """The parts of a weight, in tiles of as many rows as a register has lanes. The loader makes it so; others change
    here, once."""
    with _tiling:
        weight.set_tile_rows(tile_rows())
        found = np.array([_part(part) for part in weight.parts], kernels().PART)
        if weight not in _part_records or not np.array_equal(_part_records[weight], found):
            _part_records[weight] = found
        return _part_records[weight]


def _part(weight: QuantizedWeight, tile: int = 0, stop: int | None = None) -> tuple[int, ...]:
    """The PART of a weight from a tile on, up to row `stop`."""
    packed, rows = weight.packed, (weight.rows if stop is None else stop) - tile * weight.tile_rows
    tile_bytes = packed[0].nbytes
    return kernels().part_record(weight.scheme, packed.data_ptr() + tile * tile_bytes, rows, tile_bytes)  # type: ignore[no-any-return]


def norm_record(norm: Norm, weight: Tensor, bias: Tensor | None) -> tuple[int, int, float, float, bool]:
    return weight.data_ptr(), _address(bias), norm.eps, norm.offset, norm.centered


def _address(bias: Tensor | None) -> int:
    return 0 if bias is None else bias.data_ptr()


def linear(x: Tensor, part: Linear) -> Tensor:
    """x [T, in] -> [T, out]"""
    x = part.input(x)
    bias, out = None if part.bias is None else _floats(part.bias), empty(x.shape[0], part.weight.shape[0])
    running().linear(weight_record(part.weight, bias), _floats(x), out)
    return part.output(out.to(x.dtype))


def mix_experts(x: Tensor, parts: BlockParts, experts: ExpertRecords | None = None) -> Tensor:
    """x [T, C] -> [T, C]: the weighted sum of the experts of each token."""
    made, routing, down, found = running(), parts.routing, parts.down, []
    experts = experts or ExpertRecords.of(parts)
    assert routing is not None
    assert experts is not None
    for some in torch.split(_floats(x), made.MAX_TOKENS):
        routed = empty(len(some), routing.num_experts)
        inner = empty(len(some) * routing.top_k, down.in_features)
        made.mix_experts(experts.mix, made.UP, some, len(some), routed, inner, 0)
        inner, out = down.input(inner), empty(len(some), down.weight.shape[0] // routing.num_experts)
        made.mix_experts(experts.mix, made.DOWN, some, len(some), routed, inner, out)
        found.append(down.output(out))
    return torch.cat(found).to(x.dtype)


def norm(x: Tensor, part: Norm) -> Tensor:
    """Normalizes each vector of x [..., C]."""
    made = running()
    if isinstance(part, ShardedRMSNorm):
        x = part.input(x)
    weight, bias = _floats(part.weight), None if part.bias is None else _floats(part.bias)
    rows = _floats(x.reshape(-1, x.shape[-1]))
    head, out = np.zeros(1, made.HEAD), empty(*rows.shape)
    head["norm"] = norm_record(part, weight, bias)
    made.norm_rows(head, rows, *rows.shape, out)
    normed = out.view(x.shape).to(x.dtype)
    return part.output(normed) if isinstance(part, ShardedRMSNorm) else normed


def scale_logits(logits: Tensor, head: HeadParts) -> Tensor:
    """Logits [S, V], divided and capped in float32."""
    if head.divisor == 1 and head.softcap is None:
        return logits
    out = _floats(logits).clone()
    running().scale_logits(out, *out.shape, head.divisor, head.softcap or 0.0)
    return out.to(logits.dtype)


def activate(x: Tensor, inner: int, activation: str) -> Tensor:
    """activation(x [T, inner]), or activation(gate) * up for x [T, 2 inner], which holds both."""
    out = empty(x.shape[0], inner)
    running().activate_rows(ACTIVATION_CODES[activation], _floats(x), *x.shape, inner, out)
    return out.to(x.dtype)


def embedding(part: Embedding) -> Callable[[Tensor], Tensor]:
    """A function from ids [T] to their vectors [T, C]."""
    weight = part.weight
    if not isinstance(weight, QuantizedWeight):
        return part.forward if isinstance(part, ShardedEmbedding) else partial(F.embedding, weight=weight)
    _parts(weight)
    return partial(_sharded_look_up, part, weight) if isinstance(part, ShardedEmbedding) else partial(look_up, weight)


def _sharded_look_up(part: ShardedEmbedding, weight: QuantizedWeight, ids: Tensor) -> Tensor:
    at, own = part.local_ids(ids)
    return part.group.combine(look_up(weight, at), own)


def look_up(weight: QuantizedWeight, ids: Tensor) -> Tensor:
    """Rows ids [T] of a quantized weight, as float32 [T, K]."""
    ids, out = ids.long().contiguous(), empty(len(ids), weight.columns)
    if not all(0 <= row < weight.rows for row in ids.tolist()):
        raise IndexError(f"a row id is outside 0..{weight.rows - 1}")
    kernels().look_up(_parts(weight), weight.columns, ids, len(ids), out)
    return out


class CpuAttention:
    """Attention over keys and values that a cache hands out: an `AttentionKernel`."""

    takes_int8 = True

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, end: int, **options: Unpack[ScoreOptions]) -> Tensor:
        batch, heads, n, head_dim = q.shape
        window = options.get("window")
        if window is not None and k.shape[2] > n + window - 1:  # no query sees the keys before the first one's window
            k, v = k[:, :, 1 - n - window :], v[:, :, 1 - n - window :]
        k, v = _contiguous(k, v)
        out = empty(batch * n, heads * head_dim)
        running().attend(*_arguments(q, k, v, end - k.shape[2], **options), out)
        return out.to(q.dtype).view(batch, n, heads, head_dim).transpose(1, 2)

    def weights(self, q: Tensor, k: Tensor, v: Tensor, *, end: int, **options: Unpack[ScoreOptions]) -> Tensor:
        batch, heads, n, _ = q.shape
        k, v = _contiguous(k, v)
        out = empty(batch * n, heads * k.shape[2])
        running().attention_weights(*_arguments(q, k, v, **options), out, k.shape[2])
        return out.view(batch, n, heads, -1).transpose(1, 2)


def _contiguous(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values in a layout that kernels read. The caller keeps them alive: kernels know only their addresses."""
    if k.dtype is not torch.int8:
        k, v = k.float(), v.float()
    if k.stride()[2:] != (k.shape[3], 1) or k.stride() != v.stride():
        k, v = k.contiguous(), v.contiguous()
    return k, v


def _arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    first: int = 0,
    *,
    scale: float,
    window: int | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> tuple[Any, ...]:
    """The arguments of the attention kernels but the output. first: the position of the first key."""
    batch, heads, n, head_dim = q.shape
    ends = np.arange(k.shape[2] - n, k.shape[2]) + 1
    counts = ends if window is None else np.minimum(ends, window)
    rows = _floats(q.transpose(1, 2).reshape(batch * n, heads * head_dim))
    table, queries = Table([k], [v]).from_position(first), kernels().query_blocks([n] * batch)
    visible = np.tile(np.stack((first + ends - counts, counts), 1), (batch, 1))
    shape = heads, k.shape[1], head_dim, scale, softcap, 0 if sinks is None else _floats(sinks)
    return *shape, rows, heads * head_dim * 4, table, queries, len(queries), visible


def running() -> Any:
    """The kernels, with as many threads as torch has."""
    made = kernels()
    made.use_threads(torch.get_num_threads())
    return made


def _floats(x: Tensor) -> Tensor:
    return x.detach().float().contiguous()
