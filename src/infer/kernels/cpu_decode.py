"""One token through a model on the CPU, a few calls per block.

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
def _rms_norm(x: Any, weight_at: int, eps: float, offset: float, out: Any) -> None:
    """out, which may be x, = norm(x); a weight at address 0 is no norm: out is left alone."""
    if weight_at == 0:
        return
    weight = _vector(weight_at, x.shape[0])
    square = np.float32(0)
    for i in range(x.shape[0]):
        square += x[i] * x[i]
    scale = np.float32(1 / math.sqrt(square / x.shape[0] + eps))
    for i in range(x.shape[0]):
        out[i] = x[i] * scale * (weight[i] + np.float32(offset))


@njit(fastmath=FASTMATH)
def _add(x: Any, y: Any) -> None:
    for i in range(x.shape[0]):
        x[i] += y[i]


@njit(fastmath=FASTMATH)
def _activate(gate: Any, gelu: int) -> Any:
    """SiLU, or GELU in its tanh form, which is a SiLU-like product too: x sigmoid(2 y)."""
    y = gate
    if gelu:
        y = np.float32(1.5957691216057308) * gate * (np.float32(1) + np.float32(0.044715) * gate * gate)
    return gate / (np.float32(1) + np.float32(math.exp(-y)))


def use_threads(count: int) -> None:
    """For calls from this Python thread."""
    numba.set_num_threads(min(count, numba.config.NUMBA_NUM_THREADS))  # type: ignore[attr-defined]


def _kernel(*arguments: Any) -> Any:
    """Compile for these argument types now, and keep the result on disk."""
    return njit(types.void(*arguments), parallel=True, fastmath=FASTMATH, cache=True)


@_kernel(*[ADDRESS] * 2, *[NUMBER] * 2, *[ADDRESS] * 2, OUT, SIZE)
def norm_linear(
    x_at: int, norm_at: int, eps: float, offset: float, weight_at: int, bias_at: int, out: Any, hidden: int
) -> None:
    """out [rows] = W norm(x) + b."""
    x = np.empty(hidden, np.float32)
    _rms_norm(_vector(x_at, hidden), norm_at, eps, offset, x)
    weight = _matrix(weight_at, out.shape[0], hidden)
    for row in prange(out.shape[0]):
        out[row] = _dot(weight, row, x) + _bias(bias_at, row)


@njit(types.void(*[ADDRESS] * 3, *[NUMBER] * 2, *[ADDRESS] * 2, *[SIZE] * 3), fastmath=FASTMATH, cache=True)
def norm_rotate(
    heads_at: int,
    q_norm_at: int,
    k_norm_at: int,
    eps: float,
    offset: float,
    cos_at: int,
    sin_at: int,
    q_heads: int,
    k_heads: int,
    head_dim: int,
) -> None:
    """Norm and RoPE on heads [Hq + Hk, D] in place; sin carries the sign of rotate-half."""
    x = _matrix(heads_at, q_heads + k_heads, head_dim)
    cos, sin = _vector(cos_at, head_dim), _vector(sin_at, head_dim)
    half = head_dim // 2
    for head in range(q_heads + k_heads):
        _rms_norm(x[head], q_norm_at if head < q_heads else k_norm_at, eps, offset, x[head])
        for i in range(half):
            a, b = x[head, i], x[head, i + half]
            x[head, i] = a * cos[i] + b * sin[i]
            x[head, i + half] = b * cos[i + half] + a * sin[i + half]


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


@_kernel(*[ADDRESS] * 3, OUT, *[SIZE] * 7, NUMBER)
def attend(
    q_at: int,
    k_at: int,
    v_at: int,
    out: Any,
    heads: int,
    kv_heads: int,
    first: int,
    keys: int,
    slots: int,
    head_dim: int,
    stride: int,
    scale: float,
) -> None:
    """out [Hq * D]: each head's softmax(scale q k) v over `keys` keys, from slot `first` on and around the end.

    One KV head every `stride` floats, of which each has `slots` keys.
    """
    q = _matrix(q_at, heads, head_dim)
    until_end = min(keys, slots - first)
    start = first * head_dim * 4
    for head in prange(heads):
        offset = (head // (heads // kv_heads)) * stride * 4
        score = np.empty(keys, np.float32)
        before, behind = score[:until_end], score[until_end:]
        highest = _score(q[head], k_at + offset + start, scale, before)
        highest = max(highest, _score(q[head], k_at + offset, scale, behind))
        total = np.float32(0)
        for j in range(keys):
            score[j] = np.float32(math.exp(score[j] - highest))
            total += score[j]
        mixed = np.zeros(head_dim, np.float32)
        _mix(before, v_at + offset + start, mixed)
        _mix(behind, v_at + offset, mixed)
        for i in range(head_dim):
            out[head * head_dim + i] = mixed[i] / total


@_kernel(*[ADDRESS] * 11, *[NUMBER] * 2, OUT, *[SIZE] * 3)
def finish(
    attended_at: int,
    residual_at: int,
    o_at: int,
    o_bias_at: int,
    after_attention_at: int,
    before_mlp_at: int,
    gate_up_at: int,
    gate_up_bias_at: int,
    down_at: int,
    down_bias_at: int,
    after_mlp_at: int,
    eps: float,
    offset: float,
    out: Any,
    attended_size: int,
    intermediate: int,
    gelu: int,
) -> None:
    """x = residual + norm(O attended); out [C] = x + norm(Down(activation(Gate norm(x)) * Up norm(x)))."""
    hidden = out.shape[0]
    attended, residual = _vector(attended_at, attended_size), _vector(residual_at, hidden)
    o_weight, down = _matrix(o_at, hidden, attended_size), _matrix(down_at, hidden, intermediate)
    gate_up = _matrix(gate_up_at, 2 * intermediate, hidden)
    x = np.empty(hidden, np.float32)
    for row in prange(hidden):
        x[row] = _dot(o_weight, row, attended) + _bias(o_bias_at, row)
    _rms_norm(x, after_attention_at, eps, offset, x)
    _add(x, residual)
    h = np.empty(hidden, np.float32)
    _rms_norm(x, before_mlp_at, eps, offset, h)
    gated = np.empty(intermediate, np.float32)
    for row in prange(intermediate):
        gate = _dot(gate_up, row, h) + _bias(gate_up_bias_at, row)
        up = _dot(gate_up, intermediate + row, h) + _bias(gate_up_bias_at, intermediate + row)
        gated[row] = _activate(gate, gelu) * up
    for row in prange(hidden):
        out[row] = _dot(down, row, gated) + _bias(down_bias_at, row)
    _rms_norm(out, after_mlp_at, eps, offset, out)
    _add(out, x)
