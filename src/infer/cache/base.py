"""The cache protocol, and the parts that all caches share.

A forward pass over n tokens calls `positions(n)` once, `attend` once per layer, and `advance(n)` once. All layers
therefore write at the same position, and new positions count as filled only after the pass: a pass that fails leaves
`seq_len` as it was, and the next pass overwrites its keys and values. `positions` allocates memory in caches that
grow; code that lets kernels write without calling `positions` calls `reserve` first.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol, Required, Self, TypedDict, Unpack
from weakref import ref

import torch
from torch import Tensor, nn

from infer.cache.int8 import decode, encode, width
from infer.config import ModelConfig
from infer.machine import available_memory, resolve_device, resolve_dtype
from infer.nn.attention import Masks, span_attention
from infer.values import Kind, short_repr

CACHE_DTYPES = ("auto", "int8")  # auto: the model's dtype


class Cache(Protocol):
    """The interface that models and the engine use."""

    @property
    def seq_len(self) -> int: ...  # positions filled
    @property
    def capacity(self) -> int: ...  # positions it can hold
    @property
    def memory_bytes(self) -> int: ...
    def positions(self, n: int) -> Tensor: ...  # [B, n], of the next n queries
    def reserve(self, n: int) -> int: ...  # slots for n more positions, or an error; returns the number of slots
    def update(self, layer_idx: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]: ...  # n new -> all S
    def attend(
        self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, **options: Unpack[AttendOptions]
    ) -> Tensor: ...  # [B, Hq, n, D]
    def table(self, config: ModelConfig, dtype: torch.dtype, n: int) -> Any: ...  # see BaseCache.table
    def advance(self, n: int) -> None: ...  # once per forward pass
    def truncate(self, seq_len: int) -> None: ...  # raises if the positions are gone; never leaves stale keys
    def reset(self) -> None: ...


class AttentionKernel(Protocol):
    """A backend's attention: q [B, Hq, n, D] at the n positions before `end`; k and v at the S positions before it."""

    takes_int8: bool  # whether k and v can be int8, as an int8 cache stores them

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, end: int, **options: Unpack[ScoreOptions]
    ) -> Tensor: ...  # [B, Hq, n, D]
    def weights(
        self, q: Tensor, k: Tensor, v: Tensor, *, end: int, **options: Unpack[ScoreOptions]
    ) -> Tensor: ...  # float32 [B, Hq, n, S]: the softmax


class ScoreOptions(TypedDict, total=False):
    """How scores q·k become weights."""

    scale: Required[float]
    window: int | None
    softcap: float  # see `softmax_attention`
    sinks: Tensor


class AttendOptions(ScoreOptions, total=False):
    """The keyword arguments of `attend`."""

    kernel: AttentionKernel | None


class CacheShape(NamedTuple):
    """The shape of the key tensor, and of the value tensor, of a full cache."""

    num_layers: int
    batch_size: int
    num_kv_heads: int
    max_seq_len: int
    head_dim: int


# Constructor arguments; most callers need an empty cache.
TENSOR = Kind("a tensor (`allocate` makes an empty cache)", lambda value: isinstance(value, Tensor))
SHAPE = Kind("a CacheShape (`allocate` makes an empty cache)", lambda value: isinstance(value, CacheShape))


class CachedTokens:
    """The tokens that a cache of one row holds, and the model that computed their keys and values.

    Each pass adds its tokens. The tokens of a cache that was filled by hand are unknown.
    """

    def __init__(self) -> None:
        self._pieces: list[list[int] | Tensor] = []  # a tensor on a device stays there until the tokens are read
        self._count = 0  # tokens in all pieces
        self._model: ref[nn.Module] | None = None
        self.version: int | None = None  # of the model; None: not filled by the engine

    def add(self, at: int, tokens: Sequence[int] | Tensor, model: nn.Module | None) -> None:
        """Tokens at the positions from `at` on. model: identified by its token embedding."""
        self.truncate(at)
        if at == 0:
            self._model = None if model is None else ref(model)
        if at != self._count:
            return  # earlier positions were filled by hand
        if isinstance(tokens, Tensor):
            if tokens.shape[0] > 1:
                return
            piece: list[int] | Tensor = tokens[0].tolist() if tokens.is_cpu else tokens[0].clone()
        else:
            piece = list(tokens)
        self._pieces.append(piece)
        self._count += len(piece)

    def truncate(self, seq_len: int) -> None:
        if seq_len < self._count:
            self._pieces, self._count = [self._ids()[:seq_len]], seq_len

    def tokens(self, seq_len: int) -> list[int] | None:
        """The tokens of all `seq_len` positions; None if they are unknown."""
        return self._ids() if self._count == seq_len else None

    def is_from(self, model: nn.Module) -> bool:
        """False if another model is known to have filled the cache."""
        return self._model is None or self._model() is model

    def _ids(self) -> list[int]:
        if len(self._pieces) > 1 or any(isinstance(piece, Tensor) for piece in self._pieces):
            ids = [i for piece in self._pieces for i in (piece.tolist() if isinstance(piece, Tensor) else piece)]
            self._pieces = [ids]
        return list(self._pieces[0]) if self._pieces else []

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_model": None, "version": None}  # neither means anything in another process


class BaseCache(ABC):
    """A cache whose rows all have the same length, and which returns keys in the order of their positions.

    An int8 cache takes and returns floats of any dtype, rounded: a pass attends to its own keys and values as they are
    stored, so results do not depend on how a prompt is cut into passes.
    """

    keeps_gradients = False
    drops_positions = False  # beyond a layer's window: then `allocate` takes the windows
    dropout = 0.0  # of attention weights: NoCache in training

    def __init_subclass__(cls, **options: Any) -> None:
        """A subclass that overrides how to store or attend has no table, unless it overrides `table` too."""
        super().__init_subclass__(**options)
        if vars(cls).keys() & {"_store", "update", "attend"} and "table" not in vars(cls):
            cls.table = BaseCache.table  # type: ignore[method-assign]

    def __init__(
        self, shape: CacheShape, dtype: torch.dtype, device: torch.device, windows: Sequence[int | None] = ()
    ) -> None:
        """windows: the positions that each layer keeps, None: all of them; empty: all layers keep all positions."""
        self.shape = shape
        self.dtype = dtype
        self.device = device
        self.windows = tuple(windows) or (None,) * shape.num_layers
        sizes = [window for window in self.windows if window is not None]
        if len(self.windows) != shape.num_layers or any(type(size) is not int or size < 1 for size in sizes):
            raise ValueError(
                f"windows must have a positive integer or None for each of {shape.num_layers} layers, not {windows}"
            )
        self.quantized = dtype is torch.int8
        self.width = width(shape.head_dim, dtype)  # elements stored per vector
        if self.quantized:
            self.keeps_gradients = False
        self.seq_len = 0
        self._most_filled = 0  # the largest seq_len so far
        self.contents = CachedTokens()
        self._masks: Masks = {}  # of this forward pass
        self._kernel_compatibility: tuple[ModelConfig, torch.dtype, bool] | None = None  # the last result

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
        **options: Any,
    ) -> Self:
        """An empty cache. dtype: "int8" rounds; "auto" chooses as `load_model` does. options: see the class."""
        shape = CacheShape(num_layers, batch_size, num_kv_heads, max_seq_len, head_dim)
        for name, size in shape._asdict().items():
            if not 1 <= size < 2**63:
                raise ValueError(f"{name} must be at least 1, not {short_repr(size)}")
        device = resolve_device(device)
        dtype = torch.int8 if dtype in ("int8", torch.int8) else resolve_dtype(dtype, device)
        return cls._empty(shape, dtype, device, **options)

    @classmethod
    def from_model_config(
        cls,
        config: ModelConfig,
        max_seq_len: int,
        *,
        batch_size: int = 1,
        dtype: torch.dtype | str = "auto",
        device: torch.device | str = "auto",
        **options: Any,
    ) -> Self:
        """An empty cache for a model of this config. options: see the class."""
        if cls.drops_positions:
            options["windows"] = config.windows
        options |= {"batch_size": batch_size, "dtype": dtype, "device": device}
        layers, heads, head_dim = config.num_hidden_layers, config.num_key_value_heads, config.computed_head_dim
        return cls.allocate(layers, heads, head_dim, max_seq_len, **options)

    @classmethod
    def _empty(cls, shape: CacheShape, dtype: torch.dtype, device: torch.device, **options: Any) -> Self:
        return cls(shape, dtype, device, **options)

    @property
    def capacity(self) -> int:
        return self.shape.max_seq_len

    @property
    @abstractmethod
    def memory_bytes(self) -> int:
        """Bytes held by keys and values."""

    @property
    def unwritten_bytes(self) -> int:
        """The part of `memory_bytes` that was never written: on a CPU it still counts as free memory."""
        return self.memory_bytes - self.memory_bytes * self._most_filled // self.capacity

    @abstractmethod
    def _store(self, layer_idx: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Like `update`, but returns keys and values as they are stored: [B, Hkv, seq_len + n, width]."""

    def update(self, layer_idx: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k, v [B, Hkv, n, D] at the next positions; return all keys and values [B, Hkv, seq_len + n, D]."""
        keys, values = self._store(layer_idx, k, v)
        return (decode(keys, k.dtype), decode(values, v.dtype)) if self.quantized else (keys, values)

    def reserve(self, n: int) -> int:
        """Have slots for n more positions, or raise before anything changes; returns the number of all slots."""
        self._check_fits(n)
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
        kernel: AttentionKernel | None = None,
        **options: Unpack[ScoreOptions],
    ) -> Tensor:
        """Store k and v, then attend from q [B, Hq, n, D] to all visible keys. kernel: None for plain torch."""
        window = options.get("window")
        self._check_window(layer_idx, window)
        keys, values = self._store(layer_idx, k, v)
        if self.quantized and (kernel is None or not kernel.takes_int8):
            seen = keys.shape[2] if window is None else min(keys.shape[2], window + q.shape[2] - 1)
            keys, values = decode(keys[:, :, -seen:], k.dtype), decode(values[:, :, -seen:], v.dtype)
        if kernel is not None:
            return kernel(q, keys, values, end=self.seq_len + q.shape[2], **options)
        return span_attention(q, keys, values, masks=self._masks, dropout=self.dropout, **options)

    def table(self, config: ModelConfig, dtype: torch.dtype, n: int) -> Any:
        """Where kernels write the next n keys and values and read all others: addresses, strides, slots (`Table.at`).

        For a model of this config that computes in this dtype. None: every layer must call `attend`. The cache does
        not change: what kernels write counts as filled after `advance`.
        """
        return None

    def advance(self, n: int) -> None:
        self._check_fits(n)
        self._move_to(self.seq_len + n)

    def truncate(self, seq_len: int) -> None:
        """Keep the first `seq_len` positions."""
        if type(seq_len) is not int:
            raise TypeError(f"truncate takes an integer number of positions, not {seq_len!r}")
        if not 0 <= seq_len <= self.seq_len:
            raise ValueError(f"cannot truncate to {seq_len}: the cache holds {self.seq_len} positions")
        self._check_rewind(seq_len)
        self._move_to(seq_len)

    def reset(self) -> None:
        self._move_to(0)

    def check_model(
        self, config: ModelConfig, batch_size: int, dtype: torch.dtype | None, device: torch.device
    ) -> None:
        """Refuse a model or a batch that does not fit this cache. dtype: None for any."""
        own = self.shape
        for name, has, needs in (
            ("layers", own.num_layers, config.num_hidden_layers),
            ("KV heads", own.num_kv_heads, config.num_key_value_heads),
            ("dimensions per head", own.head_dim, config.computed_head_dim),
            ("rows", own.batch_size, batch_size),
        ):
            if has != needs:
                raise ValueError(f"the cache has {has} {name}, but {needs} are needed")
        if (self.dtype != (dtype or self.dtype) and not self.quantized) or self.device != device:
            raise ValueError(f"the cache is {self.dtype} on {self.device}, but the model is {dtype} on {device}")
        for layer_idx in range(config.num_hidden_layers):
            self._check_window(layer_idx, config.window(layer_idx))

    def check_contents(self, model: nn.Module) -> None:
        """Refuse to continue after keys and values of another model. model: identified by its token embedding."""
        if self.seq_len and not self.contents.is_from(model):
            raise ValueError("the cache holds keys and values of another model: reset it, or use another cache")

    def _check_window(self, layer_idx: int, window: int | None) -> None:
        kept = self.windows[layer_idx] if 0 <= layer_idx < len(self.windows) else None
        if kept is not None and (window is None or window > kept):
            raise ValueError(f"layer {layer_idx} sees {window or 'all'} positions, but its cache keeps only {kept}")

    def _check_rewind(self, seq_len: int) -> None:
        """Refuse a length at which a layer no longer has the keys of its window."""
        return

    def _first_visible(self, layer_idx: int) -> int:
        return first_visible(self.seq_len, self.windows[layer_idx])

    def _is_kernel_compatible(self, config: ModelConfig, dtype: torch.dtype) -> bool:
        """Whether kernels can write to this cache for this model. If not, `attend` raises the error, if it is one."""
        own, known = self.shape, self._kernel_compatibility
        if known is None or known[:2] != (config, dtype):
            compatible = (
                (self.dtype is dtype or (self.quantized and self.device.type == "cpu"))
                and own.num_layers == config.num_hidden_layers
                and all(kept is None or kept == config.window(i) for i, kept in enumerate(self.windows))
                and own.num_kv_heads == config.num_key_value_heads
                and own.head_dim == config.computed_head_dim
            )
            known = self._kernel_compatibility = config, dtype, compatible
        return known[2]

    def _move_to(self, seq_len: int) -> None:
        self.seq_len = seq_len
        self._most_filled = max(self._most_filled, seq_len)
        self.contents.truncate(seq_len)
        self._masks.clear()

    def _check_fits(self, n: int) -> None:
        if n < 0:
            raise ValueError(f"cannot move by {n} positions")
        if type(self.seq_len) is not int or not 0 <= self.seq_len <= self.capacity:
            raise ValueError(f"seq_len was set to {self.seq_len!r}, which is outside 0..{self.capacity}")
        if self.seq_len + n > self.capacity:
            raise ValueError(
                f"KV cache overflow: {self.seq_len} positions filled, {n} more requested, capacity {self.capacity}"
            )

    def _check_stored(self, name: str, tensors: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]) -> None:
        """Refuse assigned tensors of another shape, dtype or device: kernels read only their addresses."""
        fits = len(tensors) == len(shapes) and all(
            isinstance(t, Tensor) and t.shape == shape and t.dtype is self.dtype and t.device == self.device
            for t, shape in zip(tensors, shapes, strict=True)
        )
        if not fits:
            expected = f"{list(shapes[0])} of {self.dtype} on {self.device}"
            raise ValueError(f"the cache's {name} was replaced by tensors that do not fit: a layer has {expected}")

    def _check_and_quantize(self, layer_idx: int, k: Tensor, v: Tensor) -> tuple[int, Tensor, Tensor]:
        """Check everything that a write could fail at, before anything is written. Returns n, and k and v to write."""
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
        self._check_fits(n)
        if self.quantized:
            k, v = encode(torch.stack((k, v))).unbind()
        return n, k, v


class NoCache(BaseCache):
    """Keeps nothing, so that every forward pass starts at position 0: the reference that caches are compared with."""

    def __init__(self, batch_size: int = 1, device: torch.device | str = "cpu", dropout: float = 0.0) -> None:
        """dropout: of attention weights; training is a pass without a cache."""
        super().__init__(CacheShape(0, batch_size, 0, sys.maxsize, 0), torch.float32, torch.device(device))
        self.dropout = dropout

    @classmethod
    def _empty(cls, shape: CacheShape, dtype: torch.dtype, device: torch.device, **options: Any) -> Self:
        return cls(shape.batch_size, device, **options)

    @property
    def memory_bytes(self) -> int:
        return 0

    def _store(self, layer_idx: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return k, v

    def advance(self, n: int) -> None:
        self._masks.clear()

    def check_model(
        self, config: ModelConfig, batch_size: int, dtype: torch.dtype | None, device: torch.device
    ) -> None:
        pass


class CacheWrapper:
    """A cache around another, which does all the work. Subclasses observe it."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache

    @property
    def seq_len(self) -> int:
        return self.cache.seq_len

    @property
    def capacity(self) -> int:
        return self.cache.capacity

    @property
    def memory_bytes(self) -> int:
        return self.cache.memory_bytes

    def positions(self, n: int) -> Tensor:
        return self.cache.positions(n)

    def reserve(self, n: int) -> int:
        return self.cache.reserve(n)

    def update(self, layer_idx: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return self.cache.update(layer_idx, k, v)

    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, **options: Unpack[AttendOptions]) -> Tensor:
        return self.cache.attend(layer_idx, q, k, v, **options)

    def table(self, config: ModelConfig, dtype: torch.dtype, n: int) -> Any:
        return None  # an observer needs every layer to call `attend`

    def advance(self, n: int) -> None:
        self.cache.advance(n)

    def truncate(self, seq_len: int) -> None:
        self.cache.truncate(seq_len)

    def reset(self) -> None:
        self.cache.reset()


def wrappers(cache: Cache) -> Iterator[CacheWrapper]:
    """Those around a cache, the outermost first."""
    while isinstance(cache, CacheWrapper):
        yield cache
        cache = cache.cache


def unwrap(cache: Cache) -> Cache:
    """The cache inside all wrappers."""
    while isinstance(cache, CacheWrapper):
        cache = cache.cache
    return cache


def first_visible(position: int, window: int | None) -> int:
    """The first position that a query at `position` sees."""
    return 0 if window is None else max(0, position - window + 1)


def resolve_cache_dtype(cache_dtype: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype of a cache for a model of this dtype."""
    if cache_dtype not in CACHE_DTYPES:
        raise ValueError(f"cache_dtype must be one of {', '.join(CACHE_DTYPES)}, not {cache_dtype!r}")
    return torch.int8 if cache_dtype == "int8" else dtype


def check_memory(positions: int, shape: CacheShape, dtype: torch.dtype, device: torch.device) -> None:
    """Refuse a cache that does not fit into free memory, before it is allocated. positions: of all layers together."""
    needed = 2 * positions * shape.batch_size * shape.num_kv_heads * width(shape.head_dim, dtype) * dtype.itemsize
    free = available_memory(device)
    if free is not None and needed > free:
        raise ValueError(
            f"a cache of {shape.max_seq_len} positions needs {needed / 1e9:.2f} GB, "
            f"but {free / 1e9:.2f} GB are free on {device}: use fewer positions"
        )
