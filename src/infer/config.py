"""What a model is: one frozen value for each thing the engine needs to know about it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import ClassVar

FULL_ATTENTION = "full_attention"
SLIDING_ATTENTION = "sliding_attention"
INT8_GROUP = 32  # values of a key or value that share a scale in an int8 cache; the last group may be shorter


@dataclass(frozen=True)
class RopeConfig:
    """How positions turn into angles."""

    theta: float = 10_000.0
    scaling: str = "default"  # "default" | "linear" | "llama3"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    # One divisor per frequency, as GGUF files store llama3 scaling; empty: none.
    divisors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for name in ("theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"):
            value = getattr(self, name)
            if not isinstance(value, Real) or not 0 < float(value) < math.inf:
                raise ValueError(f"{name} of RoPE must be above 0, not {value!r}")


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a model. Field names follow Hugging Face's `config.json`."""

    reader: ClassVar[Callable[[str], ModelConfig] | None] = None  # of checkpoints: `infer.loader` provides it

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    max_position_embeddings: int
    head_dim: int | None = None
    rms_norm_eps: float = 1e-5  # of the norms, whichever kind they are
    rope: RopeConfig | None = field(default_factory=RopeConfig)  # None: positions are learned
    local_rope: RopeConfig | None = None  # of the sliding layers, where theirs differs
    query_pre_attn_scalar: float | None = None  # scores are divided by its root; None: head_dim
    layer_types: tuple[str, ...] = ()  # one kind per layer; empty: full attention everywhere
    sliding_window: int | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    norm_bias: bool = False
    hidden_act: str | None = None  # "gelu" | "gelu_tanh" where a family has either; None: the family's own
    tie_word_embeddings: bool = False
    dropout: float = 0.0  # while training
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in (*_POSITIVE, *(("head_dim",) if self.head_dim is not None else ())):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise ValueError(f"{name} must be a positive integer, not {getattr(self, name)!r}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"{self.num_attention_heads} attention heads cannot share {self.num_key_value_heads} KV heads evenly"
            )
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} is not divisible by {self.num_attention_heads} heads: set head_dim"
            )
        if self.rope is not None and self.computed_head_dim % 2:
            raise ValueError(f"head_dim must be even for RoPE, not {self.computed_head_dim}")
        if not self.layer_types:
            object.__setattr__(self, "layer_types", (FULL_ATTENTION,) * self.num_hidden_layers)
        if len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(f"{len(self.layer_types)} layer_types for {self.num_hidden_layers} layers")
        unknown = set(self.layer_types) - {FULL_ATTENTION, SLIDING_ATTENTION}
        if unknown:
            raise ValueError(f"layer type {unknown.pop()!r} is not supported")
        if self.has_windows and (not isinstance(self.sliding_window, int) or self.sliding_window < 1):
            raise ValueError(f"sliding layers need a positive sliding_window, not {self.sliding_window!r}")
        if self.query_pre_attn_scalar is not None and not self.query_pre_attn_scalar > 0:
            raise ValueError(f"query_pre_attn_scalar must be above 0, not {self.query_pre_attn_scalar!r}")
        if not isinstance(self.rms_norm_eps, Real) or not 0 <= self.rms_norm_eps < math.inf:
            raise ValueError(f"rms_norm_eps must be 0 or more, not {self.rms_norm_eps!r}")
        if not all(isinstance(token, Integral) for token in self.eos_token_ids):
            raise ValueError(f"eos_token_id must be whole numbers, not {list(self.eos_token_ids)!r}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be from 0 to below 1, not {self.dropout!r}")

    @property
    def computed_head_dim(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def attention_scale(self) -> float:
        """What scores are multiplied by."""
        return 1 / math.sqrt(self.query_pre_attn_scalar or self.computed_head_dim)

    @property
    def has_windows(self) -> bool:
        return SLIDING_ATTENTION in self.layer_types

    def window(self, layer_idx: int) -> int | None:
        """How many positions back this layer looks, itself included; None: all of them."""
        return self.sliding_window if self.layer_types[layer_idx] == SLIDING_ATTENTION else None

    def ropes(self) -> dict[str, RopeConfig]:
        """By layer type, those that the model has."""
        if self.rope is None:
            return {}
        return {
            kind: self.local_rope if kind == SLIDING_ATTENTION and self.local_rope else self.rope
            for kind in dict.fromkeys(self.layer_types)
        }

    def cache_bytes_per_token(self, element_size: int) -> int:
        """Bytes of K and V that one position adds over all layers. element_size: 1 is int8, which has scales too."""
        head_dim = self.computed_head_dim
        scales = 2 * -(-head_dim // INT8_GROUP) if element_size == 1 else 0
        return 2 * self.num_hidden_layers * self.num_key_value_heads * (head_dim * element_size + scales)

    @classmethod
    def from_pretrained(cls, name_or_path: str) -> ModelConfig:
        """Read a checkpoint's config without reading its weights."""
        if cls.reader is None:
            raise RuntimeError("no file format is known here: use infer.ModelConfig, or import infer.loader")
        return cls.reader(name_or_path)


_POSITIVE = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
)


def layer_pattern(pattern: int | list[bool], layers: int) -> tuple[str, ...]:
    """Every pattern-th layer sees everything; or one entry per layer, true where it slides."""
    if not isinstance(pattern, list) and (not isinstance(pattern, int) or pattern < 1):
        raise ValueError(f"sliding_window_pattern must be at least 1, not {pattern!r}")
    slides = pattern if isinstance(pattern, list) else [bool((i + 1) % pattern) for i in range(layers)]
    return tuple(SLIDING_ATTENTION if slide else FULL_ATTENTION for slide in slides)
