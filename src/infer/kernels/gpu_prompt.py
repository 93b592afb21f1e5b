"""What the many tokens of a prompt go through between torch's products and its attention."""

from __future__ import annotations

import triton
import triton.language as tl

from infer.kernels.gpu_attention import partner
from infer.kernels.gpu_product import activated


@triton.jit
def gate_rows(
    x,  # [T, 2 N]: gates, and what they are multiplied with
    out,  # [T, N]
    N,
    BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """activation(gate) * up, for the many tokens of a prompt."""
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(x + row * 2 * N + at, at < N, 0.0).to(tl.float32)
    up = tl.load(x + (row * 2 + 1) * N + at, at < N, 0.0).to(tl.float32)
    tl.store(out + row * N + at, (activated(gate, ACTIVATION) * up).to(out.dtype.element_ty), at < N)


@triton.jit(do_not_specialize=["n", "row_step", "head_step", "token_step"])
def turn_heads(
    x,  # [B, H, n, D], in whatever order, the D of a head next to each other
    cosines,  # float32 [B, n, D]
    sines,
    out,  # [B, n, H, D]
    n,
    row_step,  # from a row to the next, in heads; and so on
    head_step,
    token_step,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """RoPE for the many tokens of a prompt, one in each program."""
    token, h, d = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    inside = (h < H)[:, None] & (d < D)[None, :]
    heads = x + (token // n * row_step + token % n * token_step + h[:, None].to(tl.int64) * head_step) * D
    own = tl.load(heads + d[None, :], inside, 0.0).to(tl.float32)
    other = tl.load(heads + partner(d, D)[None, :], inside, 0.0).to(tl.float32)
    cosine = tl.load(cosines + token * D + d, d < D, 0.0)
    sine = tl.load(sines + token * D + d, d < D, 0.0)
    turned = own * cosine[None, :] + other * sine[None, :]
    tl.store(out + (token * H + h[:, None]) * D + d[None, :], turned.to(out.dtype.element_ty), inside)
