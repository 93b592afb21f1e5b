"""Models through kernels that numba compiles, on the CPU in float32.

Each part stands beside its reference in plain torch: the modules of a block, and `attention`. A step should be compiled
as a whole: numba's threads and torch's are two pools, and while one of them works the other's still spin.

The kernels hold the GIL, so that no two Python threads run them at once. A process forked after their first use cannot
run them (GNU OpenMP): start it with spawn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from infer import kernels
from infer.ops.linear import Linear
from infer.ops.module import Module
from infer.ops.norm import Norm
from infer.ops.quantized import QuantizedWeight

ACTIVATION_CODES = {"silu": 0, "gelu_tanh": 1, "gelu": 2}  # those that the kernels have
MAX_ROWS = 6  # of float32 weights: with more, torch's product, which works on blocks of rows, is faster


def prepare() -> bool:
    """Compile the kernels, or read what was compiled; False where there are none."""
    return kernels.cpu() is not None


def available(x: Tensor, forwards: Mapping[type[nn.Module], Any]) -> bool:
    """Whether x [T, C] is float32 on the CPU, no gradient is asked of it, and the kernels are there.

    forwards: of the classes that the kernels stand for; if one has been replaced, they no longer do.
    """
    if not _readable(x) or torch.is_grad_enabled() or kernels.cpu() is None:
        return False
    if any(kind.forward is not forward for kind, forward in forwards.items()):
        return False
    kernels.cpu().use_threads(torch.get_num_threads())
    return True


def _readable(x: Tensor) -> bool:
    return x.dtype is torch.float32 and x.is_cpu and x.is_contiguous()


class Plan(NamedTuple):
    """Modules as the kernels take them."""

    record: Any
    quantized: bool  # all their weights: then the kernels are the faster way for any number of rows
    hidden: int  # C

    def takes(self, x: Tensor) -> bool:
        return (self.quantized or x.shape[0] <= MAX_ROWS) and x.shape[1] == self.hidden and _readable(x)


class Planner:
    """Plans a part of a model, where the kernels compute what its modules would: with known forwards, none patched.

    A plan is made again when any module has changed, or a weight has moved. Hooks, which can be set without a module's
    knowledge, are looked at each time.
    """

    def __init__(self, forwards: Mapping[type[nn.Module], Any]) -> None:
        """forwards: the classes, and what computes them."""
        self._forwards = forwards
        self._made_at = -1
        self._plan: Plan | None = None
        self._hooks: list[Any] = []
        self._weights: list[Tensor] = []
        self._places: list[int] = []

    def __call__(self, modules: Callable[[], Sequence[nn.Module] | None], record: Callable[[], Any]) -> Plan | None:
        """modules: returns them, or None where no kernel fits their like. record: describes them."""
        if self._made_at != Module.changes or self._moved():
            self._plan = self._make(modules() or (), record)
            self._made_at = Module.changes
        return None if any(self._hooks) else self._plan

    def _moved(self) -> bool:
        weights = self._weights
        # Without a line of Python for each weight: this is asked at every step.
        return self._places != _places(weights) or not all(map(Tensor.is_contiguous, weights))

    def _make(self, modules: Sequence[nn.Module], record: Callable[[], Any]) -> Plan | None:
        self._hooks, self._weights, self._places = [], [], []
        linears = [m for m in modules if isinstance(m, Linear)]
        quantized = [m.weight for m in linears if isinstance(m.weight, QuantizedWeight)]
        everything = [*modules, *quantized]
        if not modules or not all(map(self._is_plain, everything)):
            return None
        tensors = [t for m in everything for t in (*m._parameters.values(), *m._buffers.values()) if t is not None]
        self._hooks = [hooks for m in everything for hooks in (m._forward_hooks, m._forward_pre_hooks)]
        self._weights, self._places = tensors, _places(tensors)
        for t in tensors:
            if t.dtype not in (torch.float32, torch.uint8) or not t.is_cpu or not t.is_contiguous():
                return None
        described = record()
        if described is None:
            return None
        return Plan(described, len(quantized) == len(linears), linears[0].weight.shape[1])  # the first takes x

    def _is_plain(self, module: nn.Module) -> bool:
        return (
            type(module).forward in self._forwards.values()
            and "forward" not in module.__dict__
            and "parametrizations" not in module._modules  # torch computes such a weight anew at each look
            and all(type(weight) is nn.Parameter for weight in module._parameters.values() if weight is not None)
        )


def _places(weights: Sequence[Tensor]) -> list[int]:
    return [*map(Tensor.data_ptr, weights), *map(Tensor.numel, weights)]


class BlockParts(NamedTuple):
    """What a block is made of."""

    qkv: Linear
    o: Linear
    up: Linear
    down: Linear
    before_attention: Norm
    before_mlp: Norm
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    activation: str
    gated: bool = True  # `up` is a gate, and what it is multiplied with
    window: int | None = None
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    after_attention: Norm | None = None
    after_mlp: Norm | None = None

    def fit(self) -> bool:
        """Whether all shapes fit each other; where they do not, torch has an error for it."""
        hidden, inner, q_size = (
            self.before_attention.weight.shape[0],
            self.down.weight.shape[1],
            self.heads * self.head_dim,
        )
        return (
            self.heads % self.kv_heads == 0
            and _linear_fits(self.qkv, q_size + 2 * self.kv_heads * self.head_dim, hidden)
            and _linear_fits(self.o, hidden, q_size)
            and _linear_fits(self.up, inner * (2 if self.gated else 1), hidden)
            and _linear_fits(self.down, hidden, inner)
            and all(_norm_fits(norm, self.head_dim) for norm in (self.q_norm, self.k_norm))
            and all(_norm_fits(norm, hidden) for norm in (self.before_attention, self.before_mlp))
            and all(_norm_fits(norm, hidden) for norm in (self.after_attention, self.after_mlp))
        )

    def record(self) -> np.ndarray[Any, Any]:
        """As the kernels take it."""
        made = np.zeros(1, kernels.cpu().BLOCK)
        for name, part in self._asdict().items():
            if isinstance(part, Linear):
                made[name] = _weight(part)
            elif isinstance(part, Norm):
                made[name] = _norm(part)
        made["heads"], made["kv_heads"], made["head_dim"] = self.heads, self.kv_heads, self.head_dim
        made["scale"], made["window"], made["activation"] = (
            self.scale,
            self.window or 0,
            ACTIVATION_CODES[self.activation],
        )
        return made


def head_record(norm: Norm | None, linear: Linear) -> np.ndarray[Any, Any]:
    made = np.zeros(1, kernels.cpu().HEAD)
    made["weight"] = _weight(linear)
    if norm is not None:
        made["norm"] = _norm(norm)
    return made


def head_fits(norm: Norm, linear: Linear) -> bool:
    rows, columns = linear.weight.shape
    return _linear_fits(linear, rows, columns) and _norm_fits(norm, columns)


def _linear_fits(linear: Linear, rows: int, columns: int) -> bool:
    return tuple(linear.weight.shape) == (rows, columns) and (linear.bias is None or linear.bias.shape == (rows,))


def _norm_fits(norm: Norm | None, size: int) -> bool:
    return norm is None or (norm.weight.shape == (size,) and (norm.bias is None or norm.bias.shape == (size,)))


def _weight(linear: Linear) -> tuple[int, ...]:
    if isinstance(linear.weight, QuantizedWeight):
        return linear.weight.record(linear.bias)
    return 32, linear.weight.data_ptr(), _address(linear.bias), *linear.weight.shape


def _norm(norm: Norm) -> tuple[int, int, float, float, bool]:
    return norm.weight.data_ptr(), _address(norm.bias), norm.eps, norm.offset, norm.centred


def _address(bias: Tensor | None) -> int:
    return 0 if bias is None else bias.data_ptr()


def step(plan: Plan, x: Tensor, ropes: np.ndarray[Any, Any], tables: np.ndarray[Any, Any]) -> Tensor:
    """Logits [B, V] of the next token of each row, x [B, C], whose keys and values go where `tables` says.

    ropes: addresses of cos and sin [B, D] for each layer.
    """
    blocks, head = plan.record
    out = _empty(x.shape[0], int(head["weight"]["rows"][0]))
    kernels.cpu().step(blocks, head, x.numpy(), ropes, tables, out.numpy())
    return out


def head(plan: Plan, x: Tensor) -> Tensor:
    """x [T, C] -> [T, rows]: norm and product."""
    out = _empty(x.shape[0], int(plan.record["weight"]["rows"][0]))
    kernels.cpu().head(plan.record, x.numpy(), out.numpy())
    return out


def before_attention(plan: Plan, x: Tensor, rope: tuple[Tensor, Tensor] | None) -> Tensor:
    """x [T, C] -> q, k and v [T, (Hq + 2 Hkv) D], normed and rotated."""
    out = _empty(x.shape[0], int(plan.record["qkv"]["rows"][0]))
    kernels.cpu().before_attention(plan.record, x.numpy(), np.array([addresses(rope)]), out.numpy())
    return out


def behind_attention(plan: Plan, attended: Tensor, residual: Tensor) -> Tensor:
    """attended [T, Hq D], residual [T, C] -> [T, C]: output product and MLP, with their norms and residuals."""
    out = _empty(*residual.shape)
    kernels.cpu().behind_attention(plan.record, attended.contiguous().numpy(), residual.numpy(), out.numpy())
    return out


def addresses(rope: tuple[Tensor, Tensor] | None) -> tuple[int, int]:
    """Of cos and sin, as the kernels take them."""
    return (0, 0) if rope is None else (rope[0].data_ptr(), rope[1].data_ptr())


class Table:
    """Where the layers of a cache keep the keys and values of each row."""

    def __init__(self, k: Sequence[Tensor], v: Sequence[Tensor]) -> None:
        """Of each layer [B, Hkv, slots, D], in float32, or in int8 with a scale behind each vector."""
        cpu = kernels.cpu()
        self._filled = cpu.FILLED
        self._rows = np.zeros((len(k), k[0].shape[0], cpu.BITS + 1), np.int64)
        for layer, (keys, values) in enumerate(zip(k, v, strict=True)):
            size, rows = keys.element_size(), self._rows[layer]
            step = np.arange(len(rows)) * keys.stride(0) * size
            rows[:, cpu.K], rows[:, cpu.V] = keys.data_ptr() + step, values.data_ptr() + step
            rows[:, cpu.STRIDE], rows[:, cpu.SLOTS], rows[:, cpu.BITS] = keys.stride(1) * size, keys.shape[2], size * 8

    def is_of(self, k: Sequence[Tensor], v: Sequence[Tensor]) -> bool:
        """Whether keys and values are still there: a copied cache has others, and so may one whose tensors were set."""
        found = [t.data_ptr() for pair in zip(k, v, strict=True) for t in pair]
        return self._rows[: len(k), 0, :2].ravel().tolist() == found

    def at(self, filled: int) -> np.ndarray[Any, Any]:
        """[layers, B, ...] with so many positions filled."""
        self._rows[:, :, self._filled] = filled
        return self._rows


def can_attend(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether q [B, Hq, 1, D] is one query a row, and all lie in memory as `attend` reads them."""
    batch, _, n, head_dim = q.shape
    return (
        n == 1
        and batch <= MAX_ROWS
        and k.shape[0] == batch
        and q.shape[1] % k.shape[1] == 0
        and k.shape[2] > 0
        and q.dtype is k.dtype is v.dtype is torch.float32
        and q.is_cpu
        and k.is_cpu
        and v.is_cpu
        and k.stride()[2:] == (head_dim, 1)
        and v.stride() == k.stride()
        and v.shape == k.shape
        and not torch.is_grad_enabled()
        and kernels.cpu() is not None
    )


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, first: int = 0, count: int | None = None) -> Tensor:
    """q [B, Hq, 1, D] over k, v [B, Hkv, S, D] -> [B, Hq, 1, D]; first and count: over these slots of a ring."""
    batch, heads, _, head_dim = q.shape
    out, keys = _empty(batch, heads * head_dim), k.shape[2] if count is None else count
    kernels.cpu().attend(
        _attention_record(heads, k.shape[1], head_dim, scale),
        q.reshape(batch, -1).contiguous().numpy(),
        Table([k], [v]).at(0),
        np.array([(first, keys)] * batch),
        out.numpy(),
    )
    return out.view(q.shape)


@cache
def _attention_record(heads: int, kv_heads: int, head_dim: int, scale: float) -> np.ndarray[Any, Any]:
    """A block of which nothing but attention is there."""
    record = np.zeros(1, kernels.cpu().BLOCK)
    record["heads"], record["kv_heads"], record["head_dim"], record["scale"] = heads, kv_heads, head_dim, scale
    return record


def _empty(rows: int, columns: int) -> Tensor:
    return torch.empty(rows, columns, dtype=torch.float32, device="cpu")
