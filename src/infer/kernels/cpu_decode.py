"""One token of each of a few rows through a model on the CPU, a few calls per block.

A decode step reads every weight once, so memory sets its pace, as long as nothing else takes time. In plain torch a
third of a step is Python and operators between the products; compiled by numba it is close to nothing. Importing this
module compiles it (seconds, once per machine: the result is cached on disk).

Inputs come in as addresses: reading `data_ptr()` costs a tenth of wrapping a tensor as an array. Outputs come in as
arrays: numba drops a parallel loop whose result it does not see reach an argument. All are contiguous float32.
"""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np
from numba import carray, njit, prange, types  # type: ignore[attr-defined]
from numba.core import cgutils
from numba.extending import intrinsic

# As Python's own ints and floats arrive: other types would be converted at each call.
ADDRESS, SIZE, NUMBER, OUT = types.int64, types.int64, types.float64, types.float32[::1]
# Let sums be reordered, so that they vectorise; infinities and NaNs keep their meaning.
FASTMATH = {"reassoc", "contract", "arcp", "nsz"}


@intrinsic
def _pointer(typing_context: Any, address: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(address), codegen


@njit
def _vector(address: int, size: int) -> Any:
    return carray(
        _pointer(address),  # type: ignore[call-arg]
        (size,),
        np.float32,
    )


@njit
def _matrix(address: int, rows: int, columns: int) -> Any:
    return carray(
        _pointer(address),  # type: ignore[call-arg]
        (rows, columns),
        np.float32,
    )


@njit(fastmath=FASTMATH)
def _dot(weight: Any, row: int, x: Any) -> Any:
    total = np.float32(0)
    for i in range(x.shape[0]):
        total += weight[row, i] * x[i]
    return total


@njit
def _bias(address: int, i: int) -> Any:
    """Entry i of a bias, or 0 where there is none."""
    return np.float32(0) if address == 0 else _vector(address, i + 1)[i]


@njit(fastmath=FASTMATH)
def _add(x: Any, y: Any) -> None:
    for i in range(x.shape[0]):
        x[i] += y[i]


@njit(fastmath=FASTMATH)
def _norm(x: Any, weight_at: int, bias_at: int, eps: float, offset: float, centred: int, out: Any) -> None:
    """out, which may be x, = RMSNorm(x), or LayerNorm(x) if centred; a weight at address 0: out is left alone."""
    if weight_at == 0:
        return
    weight = _vector(weight_at, x.shape[0])
    mean, square = np.float32(0), np.float32(0)
    if centred:
        for i in range(x.shape[0]):
            mean += x[i]
        mean /= np.float32(x.shape[0])
    for i in range(x.shape[0]):
        square += (x[i] - mean) * (x[i] - mean)
    scale = np.float32(1 / math.sqrt(square / x.shape[0] + eps))
    for i in range(x.shape[0]):
        out[i] = (x[i] - mean) * scale * (weight[i] + np.float32(offset))
    if bias_at != 0:
        _add(out, _vector(bias_at, x.shape[0]))


@njit(fastmath=FASTMATH)
def _activate(gate: Any, kind: int) -> Any:
    """0: SiLU; 1: GELU in its tanh form, which is a SiLU-like product too, x sigmoid(2 y); 2: GELU itself."""
    if kind == 2:
        return np.float32(0.5) * gate * (np.float32(1) + np.float32(math.erf(gate * np.float32(0.7071067811865476))))
    y = gate
    if kind == 1:
        y = np.float32(1.5957691216057308) * gate * (np.float32(1) + np.float32(0.044715) * gate * gate)
    return gate / (np.float32(1) + np.float32(math.exp(-y)))


def use_threads(count: int) -> None:
    """For calls from this Python thread."""
    numba.set_num_threads(min(count, numba.config.NUMBA_NUM_THREADS))  # type: ignore[attr-defined]


def _kernel(*arguments: Any) -> Any:
    """Compile for these argument types now, and keep the result on disk."""
    return njit(types.void(*arguments), parallel=True, fastmath=FASTMATH, cache=True)


@_kernel(*[ADDRESS] * 3, *[NUMBER] * 2, SIZE, *[ADDRESS] * 2, OUT, *[SIZE] * 2)
def norm_linear(
    x_at: int,
    norm_at: int,
    norm_bias_at: int,
    eps: float,
    offset: float,
    centred: int,
    weight_at: int,
    bias_at: int,
    out: Any,
    batch: int,
    hidden: int,
) -> None:
    """out [B * rows] = W norm(x) + b, for x [B, C]."""
    rows = out.shape[0] // batch
    x = np.empty((batch, hidden), np.float32)
    for b in range(batch):
        _norm(_vector(x_at + b * hidden * 4, hidden), norm_at, norm_bias_at, eps, offset, centred, x[b])
    weight = _matrix(weight_at, rows, hidden)
    for row in prange(rows):
        bias = _bias(bias_at, row)
        for b in range(batch):
            out[b * rows + row] = _dot(weight, row, x[b]) + bias


@njit(types.void(*[ADDRESS] * 3, *[NUMBER] * 2, *[ADDRESS] * 2, *[SIZE] * 5), fastmath=FASTMATH, cache=True)
def norm_rotate(
    heads_at: int,
    q_norm_at: int,
    k_norm_at: int,
    eps: float,
    offset: float,
    cos_at: int,
    sin_at: int,
    batch: int,
    heads: int,
    q_heads: int,
    k_heads: int,
    head_dim: int,
) -> None:
    """Norm and RoPE in place on the first Hq + Hk of heads [B, H, D]; sin carries the sign of rotate-half."""
    half = head_dim // 2
    for b in range(batch):
        x = _matrix(heads_at + b * heads * head_dim * 4, heads, head_dim)
        cos, sin = _vector(cos_at + b * head_dim * 4, head_dim), _vector(sin_at + b * head_dim * 4, head_dim)
        for head in range(q_heads + k_heads):
            _norm(x[head], q_norm_at if head < q_heads else k_norm_at, 0, eps, offset, 0, x[head])
            for i in range(half):
                first, second = x[head, i], x[head, i + half]
                x[head, i] = first * cos[i] + second * sin[i]
                x[head, i + half] = second * cos[i + half] + first * sin[i + half]


@njit(fastmath=FASTMATH)
def _score(q: Any, k_at: int, scale: float, out: Any) -> Any:
    """out [keys] = scale q k; returns the highest."""
    k = _matrix(k_at, out.shape[0], q.shape[0])
    highest = np.float32(-np.inf)
    for j in range(out.shape[0]):
        out[j] = _dot(k, j, q) * np.float32(scale)
        highest = max(highest, out[j])
    return highest


@njit(fastmath=FASTMATH)
def _mix(weights: Any, v_at: int, out: Any) -> None:
    """out [D] += the weighted sum of values."""
    v = _matrix(v_at, weights.shape[0], out.shape[0])
    for j in range(weights.shape[0]):
        for i in range(out.shape[0]):
            out[i] += weights[j] * v[j, i]


@_kernel(*[ADDRESS] * 3, OUT, *[SIZE] * 10, NUMBER)
def attend(
    q_at: int,
    k_at: int,
    v_at: int,
    out: Any,
    batch: int,
    heads: int,
    kv_heads: int,
    first: int,
    keys: int,
    slots: int,
    head_dim: int,
    q_stride: int,
    batch_stride: int,
    stride: int,
    scale: float,
) -> None:
    """out [B * Hq * D]: each head's softmax(scale q k) v over `keys` keys, from slot `first` on and around the end.

    A row's q every q_stride floats; a row's keys every batch_stride, a KV head's every `stride`, `slots` of them.
    """
    until_end = min(keys, slots - first)
    start = first * head_dim * 4
    for item in prange(batch * heads):
        row, head = item // heads, item % heads
        q = _vector(q_at + (row * q_stride + head * head_dim) * 4, head_dim)
        offset = (row * batch_stride + (head // (heads // kv_heads)) * stride) * 4
        score = np.empty(keys, np.float32)
        before, behind = score[:until_end], score[until_end:]
        highest = _score(q, k_at + offset + start, scale, before)
        highest = max(highest, _score(q, k_at + offset, scale, behind))
        total = np.float32(0)
        for j in range(keys):
            score[j] = np.float32(math.exp(score[j] - highest))
            total += score[j]
        mixed = np.zeros(head_dim, np.float32)
        _mix(before, v_at + offset + start, mixed)
        _mix(behind, v_at + offset, mixed)
        for i in range(head_dim):
            out[item * head_dim + i] = mixed[i] / total


@_kernel(*[ADDRESS] * 12, *[NUMBER] * 2, SIZE, OUT, *[SIZE] * 5)
def finish(
    attended_at: int,
    residual_at: int,
    o_at: int,
    o_bias_at: int,
    after_attention_at: int,
    before_mlp_at: int,
    before_mlp_bias_at: int,
    up_at: int,
    up_bias_at: int,
    down_at: int,
    down_bias_at: int,
    after_mlp_at: int,
    eps: float,
    offset: float,
    centred: int,
    out: Any,
    batch: int,
    attended_size: int,
    intermediate: int,
    activation: int,
    gated: int,
) -> None:
    """x = residual + norm(O attended); out [B * C] = x + norm(Down(activation(Gate norm(x)) * Up norm(x))).

    Gate and Up lie in one matrix, in this order. Not gated: Down(activation(Up norm(x))).
    """
    hidden = out.shape[0] // batch
    attended = _matrix(attended_at, batch, attended_size)
    o_weight, down = _matrix(o_at, hidden, attended_size), _matrix(down_at, hidden, intermediate)
    up = _matrix(up_at, intermediate * (2 if gated else 1), hidden)
    x, h = np.empty((batch, hidden), np.float32), np.empty((batch, hidden), np.float32)
    for row in prange(hidden):
        bias = _bias(o_bias_at, row)
        for b in range(batch):
            x[b, row] = _dot(o_weight, row, attended[b]) + bias
    for b in range(batch):
        _norm(x[b], after_attention_at, 0, eps, offset, centred, x[b])
        _add(x[b], _vector(residual_at + b * hidden * 4, hidden))
        _norm(x[b], before_mlp_at, before_mlp_bias_at, eps, offset, centred, h[b])
    inner = np.empty((batch, intermediate), np.float32)
    for row in prange(intermediate):
        for b in range(batch):
            y = _activate(_dot(up, row, h[b]) + _bias(up_bias_at, row), activation)
            if gated:
                y *= _dot(up, intermediate + row, h[b]) + _bias(up_bias_at, intermediate + row)
            inner[b, row] = y
    for row in prange(hidden):
        bias = _bias(down_bias_at, row)
        for b in range(batch):
            out[b * hidden + row] = _dot(down, row, inner[b]) + bias
    for b in range(batch):
        y = out[b * hidden : (b + 1) * hidden]
        _norm(y, after_mlp_at, 0, eps, offset, centred, y)
        _add(y, x[b])
