"""Row-wise operations of GPU kernels: norms, activations, and the epilogue of a GEMM.

Kernels for few rows and for many share these functions, so that each number results from the same operations in the
same order:

- A sum over a vector is a balanced binary tree over its elements, padded with zeros (`tree_sum`). Each step adds two
  numbers, so neither the compiler's layout nor a cut of the vector into aligned pieces changes a bit.
- The output of a GEMM is rounded to the model's dtype, like torch's, before the epilogue.
- An RMSNorm before a GEMM is split: PREPARED vectors are multiplied by the norm's weight alone, and the output of the
  GEMM is scaled, so that no kernel has to wait for the full vector.

All kernels are launched without fused multiplication and addition (`UNFUSED` in `launcher.py`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from infer.backend.gpu.launch_kernels import COMPILED, let_next_start, wait_for_previous
from infer.backend.gpu.launcher import kernel


@triton.jit
def sigmoid(x):
    """tl.sigmoid in half the instructions: without those for subnormal numbers."""
    y = 1 + tl.exp2(x * -1.4426950408889634)
    if COMPILED:
        y = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [y], dtype=tl.float32, is_pure=True, pack=1)
    else:
        y = 1 / y
    return y


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == "silu":
        x = x * sigmoid(x)
    elif ACTIVATION == "gelu_tanh":
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        x = x * sigmoid(2 * inner)  # (1 + tanh(inner)) / 2
    elif ACTIVATION == "gelu":
        x = 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    return x


@triton.jit
def capped(x, SOFTCAP: tl.constexpr):
    """SOFTCAP tanh(x); 0: x"""
    if SOFTCAP > 0:
        x = (2 * sigmoid(2 * x) - 1) * SOFTCAP
    return x


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """x.to(dtype), in pairs: numbers that are then computed with would be rounded one by one, a quarter as fast."""
    if COMPILED and dtype == tl.bfloat16:
        y = tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        y = x.to(dtype)
    return y


@triton.jit
def tree_sum(x):
    """[N, M] -> [M]: a balanced tree over the first dimension, a power of two, adjacent elements first."""
    M: tl.constexpr = x.shape[1]
    for _ in tl.static_range(LEVELS):
        if x.shape[0] > 1:
            x = tl.sum(tl.reshape(x, (x.shape[0] // 2, 2, M)), 1)
    return tl.reshape(x, (M,))


LEVELS = tl.constexpr(20)  # more than any vector needs


@triton.jit
def load_parts(vector, PARTS: tl.constexpr, K: tl.constexpr):
    """[K] in float32, cut into parts whose sizes are powers of two; 0 past the end."""
    parts = ()
    for i in tl.static_range(len(PARTS)):
        at = PARTS[i][0] + tl.arange(0, PARTS[i][1])
        parts = parts + (tl.load(vector + at, at < K, 0.0).to(tl.float32),)
    return parts


@triton.jit
def load_sums(x, at, inside, step, dtype: tl.constexpr, SLICES: tl.constexpr):
    """Elements of a GEMM's output in float32: rounded already, or yet to be added from slices `step` apart."""
    if SLICES == 1:
        y = tl.load(x + at, inside, 0.0).to(tl.float32)
    else:
        y = tl.load(x + at, inside, 0.0)
        for i in tl.static_range(1, SLICES):
            y += tl.load(x + i * step + at, inside, 0.0)
        y = y.to(dtype).to(tl.float32)
    return y


@triton.jit
def load_sums_parts(x, step, dtype: tl.constexpr, SLICES: tl.constexpr, PARTS: tl.constexpr, K: tl.constexpr):
    """The same in the form of `load_parts`."""
    parts = ()
    for i in tl.static_range(len(PARTS)):
        at = PARTS[i][0] + tl.arange(0, PARTS[i][1])
        parts = parts + (load_sums(x, at, at < K, step, dtype, SLICES),)
    return parts


@triton.jit
def store_parts(out, parts, PARTS: tl.constexpr, K: tl.constexpr):
    for i in tl.static_range(len(PARTS)):
        at = PARTS[i][0] + tl.arange(0, PARTS[i][1])
        tl.store(out + at, parts[i].to(out.dtype.element_ty), at < K)


@triton.jit
def sum_of_parts(x, PARTS: tl.constexpr):
    """The tree over a vector in parts: each part is aligned and at least as long as all that follow it."""
    LAST: tl.constexpr = len(PARTS) - 1
    total = tl.sum(tree_sum(tl.reshape(x[LAST], (PARTS[LAST][1], 1))), 0)
    for i in tl.static_range(LAST):
        total = tl.sum(tree_sum(tl.reshape(x[LAST - 1 - i], (PARTS[LAST - 1 - i][1], 1))), 0) + total
    return total


@triton.jit
def squared(x, PARTS: tl.constexpr):
    """The sum of squares."""
    squares = ()
    for i in tl.static_range(len(PARTS)):
        squares = squares + (x[i] * x[i],)
    return sum_of_parts(squares, PARTS)


@triton.jit
def norm_scale(squares, K: tl.constexpr, EPS: tl.constexpr):
    """The scale of an RMSNorm."""
    return tl.rsqrt(squares / K + EPS)


@triton.jit
def weighted(x, weight, dtype, PARTS: tl.constexpr, OFFSET: tl.constexpr):
    out = ()
    for i in tl.static_range(len(PARTS)):
        out = out + ((x[i] * (weight[i] + OFFSET)).to(dtype).to(tl.float32),)
    return out


@triton.jit
def normed(
    x,
    weight,
    bias,
    dtype,
    PARTS: tl.constexpr,
    K: tl.constexpr,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    CENTERED: tl.constexpr,
    BIAS: tl.constexpr,
):
    """x in parts, scaled to unit root mean square, or first centered; rounded to dtype."""
    centered = x
    if CENTERED:
        mean = sum_of_parts(x, PARTS) / K
        centered = ()
        for i in tl.static_range(len(PARTS)):
            at = PARTS[i][0] + tl.arange(0, PARTS[i][1])
            centered = centered + (tl.where(at < K, x[i] - mean, 0.0),)
    scale = norm_scale(squared(centered, PARTS), K, EPS)
    out = ()
    for i in tl.static_range(len(PARTS)):
        y = centered[i] * scale * (weight[i] + OFFSET)
        if BIAS:
            y += bias[i]
        out = out + (y.to(dtype).to(tl.float32),)
    return out


@triton.jit
def added(x, carried, dtype, PARTS: tl.constexpr, MULTIPLIER: tl.constexpr = 1.0):
    """carried + MULTIPLIER x"""
    out = ()
    for i in tl.static_range(len(PARTS)):
        part = x[i]
        if MULTIPLIER != 1:
            part *= MULTIPLIER
        out = out + ((part + carried[i]).to(dtype).to(tl.float32),)
    return out


@kernel(do_not_specialize=["slice_rows"])
def add_norm_rows(
    x,  # [T, K]; with SLICES, float32 [SLICES, slice_rows, K]
    residual,  # [T, K]: x is added to it; None: x is the residual
    after_weight,  # [K]: of a norm of x before the addition, or None
    residual_out,  # [T, K]: the sum
    norm_weight,  # [K]
    norm_bias,  # [K] or None
    out,  # [T, K]: normed; if PREPARED, times the weight alone
    squares,  # float32 [T]: of the residual, if PREPARED
    slice_rows,  # rows from one slice to the next
    K: tl.constexpr,
    PARTS: tl.constexpr,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    CENTERED: tl.constexpr,
    PREPARED: tl.constexpr,
    NORM: tl.constexpr,  # False: the residual alone
    SLICES: tl.constexpr,  # of the GEMM; 1: x is its output
    MULTIPLIER: tl.constexpr,  # of x
    PDL: tl.constexpr,
):
    """Between two GEMMs, one row per program: add x to the residual, and norm the sum."""
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    start = row * K
    dtype: tl.constexpr = residual_out.dtype.element_ty
    if NORM:
        weights = load_parts(norm_weight, PARTS, K)
        biases = weights
        if norm_bias is not None:
            biases = load_parts(norm_bias, PARTS, K)
    if after_weight is not None:
        after_weights = load_parts(after_weight, PARTS, K)
    wait_for_previous(PDL)
    vector = load_sums_parts(x + start, slice_rows.to(tl.int64) * K, dtype, SLICES, PARTS, K)
    if residual is not None:
        before = load_parts(residual + start, PARTS, K)
        if after_weight is not None:
            vector = normed(vector, after_weights, after_weights, dtype, PARTS, K, EPS, OFFSET, False, False)
        vector = added(vector, before, dtype, PARTS, MULTIPLIER)
        store_parts(residual_out + start, vector, PARTS, K)
    if NORM:
        if PREPARED:
            tl.store(squares + row, squared(vector, PARTS))
            vector = weighted(vector, weights, dtype, PARTS, OFFSET)
        else:
            BIAS: tl.constexpr = norm_bias is not None
            vector = normed(vector, weights, biases, dtype, PARTS, K, EPS, OFFSET, CENTERED, BIAS)
        store_parts(out + start, vector, PARTS, K)


@triton.jit
def epilogue(
    sums, dtype: tl.constexpr, scale, biases, addend, ACTIVATION: tl.constexpr, MULTIPLIER: tl.constexpr = 1.0
):
    """The end of a GEMM, or of two of which the first is the gate of the second.

    scale, addend: optional; biases: () for none. MULTIPLIER: of what is added to the addend.
    """
    y, up = sums[0], sums[len(sums) - 1]
    if scale is None:
        y, up = y.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
    else:
        y, up = rounded(y, dtype).to(tl.float32) * scale, rounded(up, dtype).to(tl.float32) * scale
    if len(biases) > 0:
        y += biases[0]
    y = activated(y, ACTIVATION)
    if len(sums) > 1:
        if len(biases) > 0:
            up += biases[1]
        y *= up
    if addend is not None:
        if len(biases) > 0:
            y = y.to(dtype).to(tl.float32)  # as `add_norm_rows` reads it
        if MULTIPLIER != 1:
            y *= MULTIPLIER
        y += addend
    return y


@kernel(do_not_specialize=["slice_rows"])
def epilogue_rows(
    x,  # [T, N], if GATED [T, 2 N] with the gates first; with SLICES, float32 [SLICES, slice_rows, N or 2 N]
    squares,  # float32 [T, SQUARES]: partial sums of squares of the GEMM's input, or None
    bias,  # like a row of x, or None
    out,  # [T, N]
    N,
    slice_rows,  # rows from one slice to the next
    K: tl.constexpr,  # columns of the GEMM's input
    SLICES: tl.constexpr,  # 1: x is the output of the GEMM
    SQUARES: tl.constexpr,
    PADDED: tl.constexpr,  # SQUARES, rounded up to a power of two
    EPS: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """`epilogue` of `gemm_large` and of torch's GEMM."""
    let_next_start(PDL)
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    dtype: tl.constexpr = out.dtype.element_ty
    inside = at < N
    WIDE: tl.constexpr = 2 if GATED else 1
    own, step = x + row * (WIDE * N), slice_rows.to(tl.int64) * (WIDE * N)
    biases = ()
    if bias is not None:
        biases = (tl.load(bias + at, inside, 0.0).to(tl.float32),)
        if GATED:
            biases = biases + (tl.load(bias + N + at, inside, 0.0).to(tl.float32),)
    wait_for_previous(PDL)
    scale = None
    if squares is not None:
        part = tl.arange(0, PADDED)
        squares_of = tl.load(squares + row * SQUARES + part, part < SQUARES, 0.0)
        scale = norm_scale(tl.sum(tree_sum(tl.reshape(squares_of, (PADDED, 1))), 0), K, EPS)
    sums = (load_sums(own, at, inside, step, dtype, SLICES),)
    if GATED:
        sums = sums + (load_sums(own + N, at, inside, step, dtype, SLICES),)
    y = epilogue(sums, dtype, scale, biases, None, ACTIVATION)
    tl.store(out + row * N + at, y.to(dtype), inside)


@kernel()
def scale_logits_rows(x, N, FACTOR: tl.constexpr, SOFTCAP: tl.constexpr, BLOCK: tl.constexpr):
    """x [T, N] = SOFTCAP tanh(FACTOR x), in place; SOFTCAP 0: FACTOR x"""
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    own = x + tl.program_id(0).to(tl.int64) * N + at
    y = capped(tl.load(own, at < N, 0.0).to(tl.float32) * FACTOR, SOFTCAP)
    tl.store(own, y.to(x.dtype.element_ty), at < N)
