"""The cache protocol, and what every cache shares.

A forward pass over n tokens goes: `positions(n)` once, `attend` once per layer, `advance(n)` once. All layers
therefore write at the same position, and nothing counts as filled before the whole pass is through: a pass that
fails leaves `seq_len` as it was, and the next one writes over what it left. `positions` reserves memory where a cache
takes it as it grows; whoever lets kernels write without asking for positions calls `reserve` first.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor, nn

from infer.cache.contents import Contents
from infer.cache.int8 import decode, encode, width
from infer.config import ModelConfig
from infer.machine import available_memory, resolve_device, resolve_dtype
from infer.nn.attention import Masks, span_attention
from infer.values import Kind, shown

CACHE_DTYPES = ("auto", "int8")  # auto: the model's own


class Cache(Protocol):
    """What models and the engine ask of a cache."""

    @property
    def seq_len(self) -> int: ...  # positions filled
    @property
    def capacity(self) -> int: ...  # positions it can hold
    @property
    def memory_bytes(self) -> int: ...
    def positions(self, n: int) -> Tensor: ...  # [B, n], of the next n queries
    def reserve(self, n: int) -> int: ...  # refuses n more positions, or has memory for them: up to which position?
    def update(self, layer_idx: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]: ...  # n new -> all S
    def attend(
        self,
        layer_idx: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        window: int | None = None,
        kernel: AttentionKernel | None = None,
    ) -> Tensor: ...  # [B, Hq, n, D]
    def table(self, config: ModelConfig, dtype: torch.dtype, n: int) -> Any: ...  # see BaseCache.table
    def advance(self, n: int) -> None: ...  # once per forward pass
    def truncate(self, seq_len: int) -> None: ...  # rewind; refuses, never corrupts
    def reset(self) -> None: ...


class AttentionKernel(Protocol):
    """How a backend attends: q [B, Hq, n, D] at the n positions before `end`, k and v at as many before it."""

    takes_int8: bool  # keys and values of an 8-bit cache, as they are stored

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None, end: int
    ) -> Tensor: ...  # [B, Hq, n, D]
    def weights(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None, end: int
    ) -> Tensor: ...  # float32 [B, Hq, n, S], by which it mixes the values


class CacheShape(NamedTuple):
    """The shape of the key tensor, and of the value tensor, of a full cache."""

    num_layers: int
    batch_size: int
    num_kv_heads: int
    max_seq_len: int
    head_dim: int


# What caches are made of; most callers want an empty one.
TENSOR = Kind("a tensor (`allocate` makes an empty cache)", lambda value: isinstance(value, Tensor))
SHAPE = Kind("a CacheShape (`allocate` makes an empty cache)", lambda value: isinstance(value, CacheShape))


class BaseCache(ABC):
    """A cache whose rows all have the same length, and which returns keys in the order of their positions.

    One of dtype int8 takes and returns floats of any dtype, rounded: a pass attends to its own keys and values as
    they are stored, so that results do not depend on how a prompt is cut into passes.
    """

    keeps_gradients = False

    def __init_subclass__(cls, **options: Any) -> None:
        """A cache that stores or attends in a way of its own is asked to, unless it has a table of its own too."""
        super().__init_subclass__(**options)
        if vars(cls).keys() & {"_store", "update", "attend"} and "table" not in vars(cls):
            cls.table = BaseCache.table  # type: ignore[method-assign]

    def __init__(
        self, shape: CacheShape, dtype: torch.dtype, device: torch.device, windows: Sequence[int | None] = ()
    ) -> None:
        """windows: how far back each layer keeps what it was given; empty, or None where that is everything."""
        self.shape = shape
        self.dtype = dtype
        self.device = device
        self.windows = tuple(windows) or (None,) * shape.num_layers
        sizes = [window for window in self.windows if window is not None]
        if len(self.windows) != shape.num_layers or any(type(size) is not int or size < 1 for size in sizes):
            raise ValueError(f"{shape.num_layers} layers need a window of at least 1, or None, each; not {windows}")
        self.quantized = dtype is torch.int8
        self.width = width(shape.head_dim, dtype)  # elements that it stores of each vector
        if self.quantized:
            self.keeps_gradients = False
        self.seq_len = 0
        self._most_filled = 0  # positions that were ever filled
        self.contents = Contents()
        self._masks: Masks = {}  # of this forward pass
        self._suited: tuple[ModelConfig, torch.dtype, bool] | None = None  # what `_suits` has last said

    def __repr__(self) -> str:
        shape, dtype = self.shape, str(self.dtype).removeprefix("torch.")
        rows = f"{shape.batch_size} rows, " if shape.batch_size > 1 else ""
        each = f"{shape.num_layers} layers of {shape.num_kv_heads} heads of {shape.head_dim}"
        filled = f"{self.seq_len} of {self.capacity} positions"
        return f"{type(self).__name__}({rows}{filled}, {each}, {dtype} on {self.device}, {self.memory_bytes:,} bytes)"

    @classmethod
    def allocate(
        cls,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        max_seq_len: int,
        *,
        batch_size: int = 1,
        dtype: torch.dtype | str = "auto",
        device: torch.device | str = "auto",
    ) -> Self:
        """An empty cache. dtype: "int8" for one that rounds; "auto" chooses as `load_model` does."""
        shape = CacheShape(num_layers, batch_size, num_kv_heads, max_seq_len, head_dim)
        return cls._empty(*checked(shape, dtype, device))

    @classmethod
    def from_model_config(
        cls,
        config: ModelConfig,
        max_seq_len: int,
        *,
        batch_size: int = 1,
        dtype: torch.dtype | str = "auto",
        device: torch.device | str = "auto",
    ) -> Self:
        """An empty cache for a model of this config."""
        return cls.allocate(
            config.num_hidden_layers,
            config.num_key_value_heads,
            config.computed_head_dim,
            max_seq_len,
            batch_size=batch_size,
            dtype=dtype,
            device=device,
        )

    @classmethod
    def _empty(cls, shape: CacheShape, dtype: torch.dtype, device: torch.device) -> Self:
        return cls(shape, dtype, device)

    @property
    def capacity(self) -> int:
        return self.shape.max_seq_len

    @property
    @abstractmethod
    def memory_bytes(self) -> int:
        """Bytes held by keys and values."""

    @property
    def unwritten_bytes(self) -> int:
        """Of those, what has never been written: a CPU's memory counts as free until then."""
        return self.memory_bytes - self.memory_bytes * self._most_filled // self.capacity

    @abstractmethod
    def _store(self, layer_idx: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """`update`, but what it returns is as stored: [B, Hkv, seq_len + n, width]."""

    def update(self, layer_idx: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k, v [B, Hkv, n, D] behind what is filled; return all keys and values [B, Hkv, seq_len + n, D]."""
        keys, values = self._store(layer_idx, k, v)
        return (decode(keys, k.dtype), decode(values, v.dtype)) if self.quantized else (keys, values)

    def reserve(self, n: int) -> int:
        """Refuse n more positions where there is no room for them; how many there is memory for in all."""
        self._check_room(n)
        return self.capacity

    def positions(self, n: int) -> Tensor:
        self.reserve(n)
        return torch.arange(self.seq_len, self.seq_len + n, device=self.device).expand(self.shape.batch_size, n)

    def attend(
        self,
        layer_idx: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        window: int | None = None,
        kernel: AttentionKernel | None = None,
    ) -> Tensor:
        """Store k and v, then attend from q [B, Hq, n, D] to every key the rule makes visible.

        kernel: what computes attention; None: plain torch.
        """
        self._check_window(layer_idx, window)
        keys, values = self._store(layer_idx, k, v)
        if self.quantized and (kernel is None or not kernel.takes_int8):
            seen = keys.shape[2] if window is None else min(keys.shape[2], window + q.shape[2] - 1)
            keys, values = decode(keys[:, :, -seen:], k.dtype), decode(values[:, :, -seen:], v.dtype)
        if kernel is not None:
            return kernel(q, keys, values, scale=scale, window=window, end=self.seq_len + q.shape[2])
        return span_attention(q, keys, values, scale=scale, window=window, masks=self._masks)

    def table(self, config: ModelConfig, dtype: torch.dtype, n: int) -> Any:
        """Where kernels may write the next n keys and values themselves, and attend: `cache.table.Table.at`.

        For a model of this config that computes in this dtype. None: nowhere, so every layer must `attend`. It only
        asks: what a pass has written counts after `advance`.
        """
        return None

    def advance(self, n: int) -> None:
        self._check_room(n)
        self._move_to(self.seq_len + n)

    def truncate(self, seq_len: int) -> None:
        """Forget everything from position seq_len on."""
        if type(seq_len) is not int:
            raise TypeError(f"a cache is truncated to a whole number of positions, not {seq_len!r}")
        if not 0 <= seq_len <= self.seq_len:
            raise ValueError(f"cannot truncate to {seq_len}: the cache holds {self.seq_len} positions")
        self._check_rewind(seq_len)
        self._move_to(seq_len)

    def reset(self) -> None:
        self._move_to(0)

    def check_model(
        self, config: ModelConfig, batch_size: int, dtype: torch.dtype | None, device: torch.device
    ) -> None:
        """Refuse a model, or a batch, that this cache was not made for. dtype: None if any will do."""
        own = self.shape
        for name, has, needs in (
            ("layers", own.num_layers, config.num_hidden_layers),
            ("KV heads", own.num_kv_heads, config.num_key_value_heads),
            ("dimensions a head", own.head_dim, config.computed_head_dim),
            ("rows", own.batch_size, batch_size),
        ):
            if has != needs:
                raise ValueError(f"the cache has {has} {name}, but {needs} are needed")
        if (self.dtype != (dtype or self.dtype) and not self.quantized) or self.device != device:
            raise ValueError(f"the cache is {self.dtype} on {self.device}, but the model is {dtype} on {device}")
        for layer_idx in range(config.num_hidden_layers):
            self._check_window(layer_idx, config.window(layer_idx))

    def check_contents(self, model: nn.Module) -> None:
        """Refuse to go on behind keys and values of another model. model: by what turns its tokens into vectors."""
        if self.seq_len and not self.contents.is_of(model):
            raise ValueError("the cache holds keys and values of another model: reset it, or use another cache")

    def _check_window(self, layer_idx: int, window: int | None) -> None:
        kept = self.windows[layer_idx] if 0 <= layer_idx < len(self.windows) else None
        if kept is not None and (window is None or window > kept):
            raise ValueError(f"layer {layer_idx} sees {window or 'all'} positions, but its cache keeps only {kept}")

    def _check_rewind(self, seq_len: int) -> None:
        """Refuse to go back to where a layer no longer has its window."""
        return

    def _first_seen(self, layer_idx: int) -> int:
        return first_seen(self.seq_len, self.windows[layer_idx])

    def _suits_kernels(self, config: ModelConfig, dtype: torch.dtype) -> bool:
        """Whether kernels can write to this cache for such a model: what does not fit is left to `attend` to refuse."""
        if self._suited is None or self._suited[:2] != (config, dtype):
            self._suited = config, dtype, self._suits(config, dtype)
        return self._suited[2]

    def _suits(self, config: ModelConfig, dtype: torch.dtype) -> bool:
        own = self.shape
        rounds = self.quantized and self.device.type == "cpu"
        return (
            (self.dtype is dtype or rounds)
            and own.num_layers == config.num_hidden_layers
            and all(kept is None or kept == config.window(i) for i, kept in enumerate(self.windows))
            and own.num_kv_heads == config.num_key_value_heads
            and own.head_dim == config.computed_head_dim
        )

    def _move_to(self, seq_len: int) -> None:
        self.seq_len = seq_len
        self._most_filled = max(self._most_filled, seq_len)
        self.contents.cut(seq_len)
        self._masks.clear()

    def _check_room(self, n: int) -> None:
        if n < 0:
            raise ValueError(f"cannot move by {n} positions")
        if type(self.seq_len) is not int or not 0 <= self.seq_len <= self.capacity:
            raise ValueError(f"seq_len was set to {self.seq_len!r}, which is outside 0..{self.capacity}")
        if self.seq_len + n > self.capacity:
            raise ValueError(
                f"KV cache overflow: {self.seq_len} positions filled, {n} more asked for, capacity {self.capacity}"
            )

    def _check_stored(self, name: str, tensors: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]) -> None:
        """Refuse tensors set by hand that are not what the cache had: kernels know them by address alone."""
        alike = len(tensors) == len(shapes) and all(
            isinstance(t, Tensor) and t.shape == shape and t.dtype is self.dtype and t.device == self.device
            for t, shape in zip(tensors, shapes, strict=True)
        )
        if not alike:
            kept = f"{list(shapes[0])} of {self.dtype} on {self.device}"
            raise ValueError(f"the cache's {name} was set to what does not fit it: a layer has {kept}")

    def _to_store(self, layer_idx: int, k: Tensor, v: Tensor) -> tuple[int, Tensor, Tensor]:
        """Everything that could go wrong with a write, before anything is written. Returns n, and what to write."""
        num_layers, batch_size, num_kv_heads, _, head_dim = self.shape
        if not 0 <= layer_idx < num_layers:
            raise ValueError(f"layer {layer_idx} of a cache with {num_layers} layers")
        n = k.shape[2] if k.dim() == 4 else -1
        expected = (batch_size, num_kv_heads, n, head_dim)
        if k.shape != expected or v.shape != expected:
            raise ValueError(
                f"k {tuple(k.shape)} and v {tuple(v.shape)} do not fit the cache: "
                f"expected [batch {batch_size}, kv_heads {num_kv_heads}, n, head_dim {head_dim}]"
            )
        if self.quantized:
            if k.dtype != v.dtype or not k.is_floating_point():
                raise ValueError(f"k is {k.dtype} and v is {v.dtype}, but the cache takes floats of one dtype")
        elif k.dtype != self.dtype or v.dtype != self.dtype:
            raise ValueError(f"k is {k.dtype} and v is {v.dtype}, but the cache holds {self.dtype}")
        if k.requires_grad and not self.keeps_gradients and torch.is_grad_enabled():
            raise ValueError("this cache keeps no gradients: run the model under torch.no_grad() or inference_mode()")
        if k.device != self.device or v.device != self.device:
            raise ValueError(f"k is on {k.device} and v on {v.device}, but the cache is on {self.device}")
        self._check_room(n)
        if self.quantized:
            k, v = encode(torch.stack((k, v))).unbind()
        return n, k, v


def first_seen(position: int, window: int | None) -> int:
    """The furthest position that a query at this one sees."""
    return 0 if window is None else max(0, position - window + 1)


def checked(
    shape: CacheShape, dtype: torch.dtype | str, device: torch.device | str
) -> tuple[CacheShape, torch.dtype, torch.device]:
    """A shape that can be, and what "auto" stands for."""
    for name, size in shape._asdict().items():
        if not 1 <= size < 2**63:
            raise ValueError(f"{name} must be at least 1, not {shown(size)}")
    device = resolve_device(device)
    return shape, torch.int8 if dtype in ("int8", torch.int8) else resolve_dtype(dtype, device), device


def resolve_cache_dtype(cache_dtype: str, dtype: torch.dtype) -> torch.dtype:
    """What a cache stores for a model of this dtype."""
    if cache_dtype not in CACHE_DTYPES:
        raise ValueError(f"cache_dtype must be one of {', '.join(CACHE_DTYPES)}, not {cache_dtype!r}")
    return torch.int8 if cache_dtype == "int8" else dtype


def check_memory(positions: int, shape: CacheShape, dtype: torch.dtype, device: torch.device) -> None:
    """Refuse a cache that would not fit, before it is allocated. positions: stored by all layers together."""
    needed = 2 * positions * shape.batch_size * shape.num_kv_heads * width(shape.head_dim, dtype) * dtype.itemsize
    free = available_memory(device)
    if free is not None and needed > free:
        raise ValueError(
            f"a cache of {shape.max_seq_len} positions needs {needed / 1e9:.2f} GB, "
            f"but {free / 1e9:.2f} GB are free on {device}: ask for fewer positions"
        )


class NoCache(BaseCache):
    """No cache is a cache too: it keeps nothing, so that every forward pass starts at position 0."""

    def __init__(self, batch_size: int = 1, device: torch.device | str = "cpu", dropout: float = 0.0) -> None:
        """dropout: of attention weights, while a model is trained: training is a pass without a cache."""
        unlimited = CacheShape(0, batch_size, 0, sys.maxsize, 0)
        super().__init__(unlimited, torch.float32, torch.device(device))
        self._dropout = dropout

    @classmethod
    def _empty(cls, shape: CacheShape, dtype: torch.dtype, device: torch.device) -> Self:
        return cls(shape.batch_size, device)

    @property
    def memory_bytes(self) -> int:
        return 0

    def _store(self, layer_idx: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return k, v

    def attend(
        self,
        layer_idx: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        window: int | None = None,
        kernel: AttentionKernel | None = None,
    ) -> Tensor:
        if kernel is not None:
            return kernel(q, k, v, scale=scale, window=window, end=q.shape[2])
        return span_attention(q, k, v, scale=scale, window=window, masks=self._masks, dropout=self._dropout)

    def advance(self, n: int) -> None:
        self._masks.clear()

    def check_model(
        self, config: ModelConfig, batch_size: int, dtype: torch.dtype | None, device: torch.device
    ) -> None:
        pass
