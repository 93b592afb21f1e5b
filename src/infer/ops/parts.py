"""What kernels need to know of a model: which modules stand where, and whether they are what the kernels compute."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, Generic, NamedTuple, TypeVar

from torch import Tensor, nn

from infer.ops.linear import Embedding, Linear
from infer.ops.module import Module
from infer.ops.norm import Norm
from infer.ops.quantized import QuantizedWeight

ACTIVATION_CODES = {"silu": 0, "gelu_tanh": 1, "gelu": 2}  # those that the kernels have

Plan = TypeVar("Plan")


class Planner(Generic[Plan]):
    """Plans a part of a model, where the kernels compute what its modules would: with known forwards, none patched.

    A plan is made again when any module has changed, or a weight has moved. Hooks, which can be set without a module's
    knowledge, are looked at each time.
    """

    def __init__(self, forwards: Mapping[type[nn.Module], Any], readable: Callable[[Tensor], bool]) -> None:
        """forwards: the classes, and what computes them. readable: whether the kernels can read such a weight."""
        self._forwards = forwards
        self._readable = readable
        self._made_at = -1
        self._plan: Plan | None = None
        self._hooks: list[Any] = []
        self._weights: list[Tensor] = []
        self._places: list[Any] = []

    def __call__(
        self, modules: Callable[[], Sequence[nn.Module] | None], plan: Callable[[], Plan | None]
    ) -> Plan | None:
        """modules: returns them, or None where no kernel fits their like. plan: makes one of them."""
        if self._made_at != Module.changes or self._moved():
            self._plan = self._make(modules() or (), plan)
            self._made_at = Module.changes
        return None if any(self._hooks) else self._plan

    def _moved(self) -> bool:
        weights = self._weights
        # Without a line of Python for each weight: this is asked at every step.
        return self._places != _places(weights) or not all(map(Tensor.is_contiguous, weights))

    def _make(self, modules: Sequence[nn.Module], plan: Callable[[], Plan | None]) -> Plan | None:
        self._hooks, self._weights, self._places = [], [], []
        quantized = [m.weight for m in modules if isinstance(m, Linear) and isinstance(m.weight, QuantizedWeight)]
        everything = [*modules, *quantized]
        if not modules or not all(map(self._is_plain, everything)):
            return None
        tensors = [t for m in everything for t in (*m._parameters.values(), *m._buffers.values()) if t is not None]
        self._hooks = [hooks for m in everything for hooks in (m._forward_hooks, m._forward_pre_hooks)]
        self._weights, self._places = tensors, _places(tensors)
        return plan() if all(t.is_contiguous() and self._readable(t) for t in tensors) else None

    def _is_plain(self, module: nn.Module) -> bool:
        return (
            type(module).forward in self._forwards.values()
            and "forward" not in module.__dict__
            and "parametrizations" not in module._modules  # torch computes such a weight anew at each look
            and all(type(weight) is nn.Parameter for weight in module._parameters.values() if weight is not None)
        )


def _places(weights: Sequence[Tensor]) -> list[Any]:
    return [*map(Tensor.data_ptr, weights), *map(Tensor.numel, weights), *map(_dtype, weights)]


_dtype = attrgetter("dtype")


class EmbeddingParts(NamedTuple):
    """What stands before the blocks: a token's vector, times a factor, and its position's, where they are learned."""

    tokens: Embedding
    positions: Embedding | None = None
    factor: float = 1.0

    def fit(self, vocab: int, positions: int, size: int) -> bool:
        """Whether each token and position has a vector of this size."""
        learned = self.positions
        return tuple(self.tokens.weight.shape) == (vocab, size) and (
            learned is None or tuple(learned.weight.shape) == (positions, size)
        )


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

    @property
    def linears(self) -> list[Linear]:
        return [self.qkv, self.o, self.up, self.down]

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


class HeadParts(NamedTuple):
    """What stands behind the blocks."""

    norm: Norm
    linear: Linear

    def fit(self) -> bool:
        rows, columns = self.linear.weight.shape
        return _linear_fits(self.linear, rows, columns) and _norm_fits(self.norm, columns)


def _linear_fits(linear: Linear, rows: int, columns: int) -> bool:
    return tuple(linear.weight.shape) == (rows, columns) and (linear.bias is None or linear.bias.shape == (rows,))


def _norm_fits(norm: Norm | None, size: int) -> bool:
    return norm is None or (norm.weight.shape == (size,) and (norm.bias is None or norm.bias.shape == (size,)))
