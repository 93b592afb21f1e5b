"""The parts of a decode step, compiled: for one float32 token of each of a few rows, on the CPU.

Each stands beside its reference in plain torch: norm and product (`RMSNorm`, `Linear`), `apply_rope`, `attention`, and
the second half of a block (`Linear`, `RMSNorm`, `MLP`). A step should be compiled as a whole: numba's threads and
torch's are two pools, and while one of them works the other's still spin.

The kernels hold the GIL, so that no two Python threads run them at once. A process forked after their first use cannot
run them (GNU OpenMP): start it with spawn.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from infer.ops.linear import Linear
from infer.ops.module import Module
from infer.ops.norm import Norm, RMSNorm

ACTIVATION_CODES = {"silu": 0, "gelu_tanh": 1, "gelu": 2}  # those that the kernels have
MAX_ROWS = 6  # with more, torch's product, which works on blocks of rows, is faster


@cache
def kernels() -> Any:
    """The compiled kernels; None with INFER_KERNELS=0, without numba, or where it can keep nothing on disk."""
    if os.environ.get("INFER_KERNELS") == "0":
        return None
    try:
        from infer.kernels import cpu_decode
    except (ImportError, RuntimeError):
        return None
    return cpu_decode


def available(x: Tensor, forwards: Mapping[type[nn.Module], Any]) -> bool:
    """Whether x [B, C] is a few float32 tokens on the CPU that no gradient is asked of, and the kernels are there.

    forwards: of the classes that the kernels stand for; if one has been replaced, they no longer do.
    """
    if not fits(x) or torch.is_grad_enabled() or kernels() is None:
        return False
    if any(kind.forward is not forward for kind, forward in forwards.items()):
        return False
    kernels().use_threads(torch.get_num_threads())
    return True


def fits(x: Tensor) -> bool:
    return x.shape[0] <= MAX_ROWS and x.dtype is torch.float32 and x.is_cpu and x.is_contiguous()


class PlainCheck:
    """Whether the kernels compute what some modules would: all of these classes, and none patched or hooked.

    What is in a module is found out again when any module has changed. Hooks and weights, which can be changed without
    a module's knowledge, are looked at each time.
    """

    def __init__(self, forwards: Mapping[type[nn.Module], Any]) -> None:
        """forwards: the classes, and what computes them."""
        self._forwards = forwards
        self._checked_at = -1
        self._plain = False
        self._hooks: list[Any] = []
        self._weights: list[nn.Parameter] = []

    def __call__(self, modules: Callable[[], Sequence[nn.Module] | None]) -> bool:
        """modules: returns them, or None where no kernel fits their like."""
        if self._checked_at != Module.changes:
            found = modules() or ()
            self._plain = bool(found) and all(map(self._is_plain, found))
            self._hooks = [hooks for m in found for hooks in (m._forward_hooks, m._forward_pre_hooks)]
            self._weights = [weight for m in found for weight in m._parameters.values() if weight is not None]
            self._checked_at = Module.changes
        if not self._plain or any(self._hooks):
            return False
        for weight in self._weights:
            if weight.dtype is not torch.float32 or not weight.is_cpu or not weight.is_contiguous():
                return False
        return True

    def _is_plain(self, module: nn.Module) -> bool:
        return (
            type(module) in self._forwards
            and "forward" not in module.__dict__
            and all(type(weight) is nn.Parameter for weight in module._parameters.values() if weight is not None)
        )


def norm_linear(x: Tensor, norm: Norm, linear: Linear) -> Tensor:
    """x [B, C] -> [B, rows]"""
    batch, (rows, hidden) = x.shape[0], linear.weight.shape
    out = _empty(batch * rows)
    kernels().norm_linear(
        x.data_ptr(),
        norm.weight.data_ptr(),
        _address(norm.bias),
        norm.eps,
        norm.offset,
        norm.centred,
        linear.weight.data_ptr(),
        _address(linear.bias),
        out.numpy(),
        batch,
        hidden,
    )
    return out.view(batch, rows)


def norm_rotate(
    heads: Tensor,
    q_norm: RMSNorm | None,
    k_norm: RMSNorm | None,
    q_count: int,
    k_count: int,
    rope: tuple[Tensor, Tensor],
) -> None:
    """Norms, where there are any, and RoPE, in place on heads [B, H, 1, D]: those of q, then of k, then others."""
    cos, sin = rope
    batch, count, _, head_dim = heads.shape
    eps, offset = (0.0, 0.0) if q_norm is None else (q_norm.eps, q_norm.offset)
    kernels().norm_rotate(
        heads.data_ptr(),
        _address(q_norm),
        _address(k_norm),
        eps,
        offset,
        cos.data_ptr(),
        sin.data_ptr(),
        batch,
        count,
        q_count,
        k_count,
        head_dim,
    )


def can_attend(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether q [B, Hq, 1, D] is one query a row, and all lie in memory as `attend` reads them."""
    batch, _, n, head_dim = q.shape
    return (
        n == 1
        and batch <= MAX_ROWS
        and q.dtype is k.dtype is v.dtype is torch.float32
        and q.is_cpu
        and q.stride(1) == head_dim
        and q.stride(3) == 1
        and k.is_cpu
        and v.is_cpu
        and k.stride()[2:] == (head_dim, 1)
        and v.stride() == k.stride()
        and v.shape == k.shape
        and not torch.is_grad_enabled()
        and kernels() is not None
    )


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, first: int = 0, count: int | None = None) -> Tensor:
    """q [B, Hq, 1, D] over k, v [B, Hkv, S, D] -> [B, Hq, 1, D]; first and count: over these slots of a ring."""
    batch, heads, _, head_dim = q.shape
    out = _empty(batch * heads * head_dim)
    _, kv_heads, slots, _ = k.shape
    kernels().attend(
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        out.numpy(),
        batch,
        heads,
        kv_heads,
        first,
        slots if count is None else count,
        slots,
        head_dim,
        q.stride(0),
        k.stride(0),
        k.stride(1),
        scale,
    )
    return out.view(q.shape)


def finish(
    attended: Tensor,
    residual: Tensor,
    o: Linear,
    before_mlp: Norm,
    up: Linear,
    down: Linear,
    *,
    activation: str = "silu",
    after_attention: Norm | None = None,
    after_mlp: Norm | None = None,
) -> Tensor:
    """attended [B, Hq, 1, D], residual [B, C] -> [B, C]: output product and MLP, with their norms and residuals.

    An `up` of twice the width that `down` has is a gate and what it is multiplied with.
    """
    attended = attended.contiguous()
    batch, (hidden, intermediate) = residual.shape[0], down.weight.shape
    out = _empty(batch * hidden)
    kernels().finish(
        attended.data_ptr(),
        residual.data_ptr(),
        o.weight.data_ptr(),
        _address(o.bias),
        _address(after_attention),
        before_mlp.weight.data_ptr(),
        _address(before_mlp.bias),
        up.weight.data_ptr(),
        _address(up.bias),
        down.weight.data_ptr(),
        _address(down.bias),
        _address(after_mlp),
        before_mlp.eps,
        before_mlp.offset,
        before_mlp.centred,
        out.numpy(),
        batch,
        attended.numel() // batch,
        intermediate,
        ACTIVATION_CODES[activation],
        up.weight.shape[0] > intermediate,
    )
    return out.view(batch, hidden)


def _empty(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.float32, device="cpu")


def _address(weight: Tensor | Norm | None) -> int:
    """Of a bias or of a norm's weight; 0 where there is none."""
    if weight is None:
        return 0
    return weight.weight.data_ptr() if isinstance(weight, Norm) else weight.data_ptr()
