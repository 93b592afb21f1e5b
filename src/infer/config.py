"""What a model is, independent of file formats."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from infer.values import ABOVE_0, FLAG, TEXT, TOKEN_ID, Kind, checked, integer, list_of, number, short_repr

FULL_ATTENTION = "full_attention"
SLIDING_ATTENTION = "sliding_attention"
INT8_GROUP = 32  # elements of a key or value vector that share a scale in an int8 cache; the last may be shorter


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: frequencies and their scaling."""

    theta: float = 10_000.0
    scaling: str = "default"  # "default" | "linear" | "llama3" | "yarn"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    dim: int | None = None  # the first dimensions of a head, which are rotated; None: all
    beta_fast: float = 32.0  # of YaRN
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0  # of cos and sin
    # One divisor per frequency: LongRoPE's factors, and the form in which GGUF files store llama3 scaling; empty: none.
    divisors: tuple[float, ...] = ()
    query_beta: float = 0.0  # queries are multiplied by 1 + beta log(1 + position // original_max_position_embeddings)

    def __post_init__(self) -> None:
        for name, kind in ROPE_KINDS.items():
            if (value := getattr(self, name)) is not None:
                kind.check(f"{name} of RoPE", value)
        if self.scaling == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(f"high_freq_factor of RoPE must be above low_freq_factor, {self.low_freq_factor}")


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a model. Field names follow Hugging Face's `config.json`."""

    reader: ClassVar[Callable[[str], ModelConfig] | None] = None  # of checkpoints, set by `infer.loader`

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    max_position_embeddings: int
    head_dim: int | None = None
    rms_norm_eps: float = 1e-5  # of LayerNorm too
    rope: RopeConfig | None = field(default_factory=RopeConfig)  # None: learned positions
    local_rope: RopeConfig | None = None  # of the sliding layers, if different
    # LongRoPE's beyond the original context, which is max_position_embeddings until `with_context` chooses this one.
    long_rope: RopeConfig | None = None
    long_context: int | None = None  # with long_rope
    query_pre_attn_scalar: float | None = None  # scores are divided by its square root; None: head_dim
    scale_attn_by_inverse_layer_idx: bool = False  # scores of layer i are also divided by i + 1
    layer_types: tuple[str, ...] = ()  # one per layer; empty: full attention in all
    sliding_window: int | None = None
    attention_bias: bool = False  # of q, k and v
    attention_output_bias: bool | None = None  # None: as attention_bias
    attn_logit_softcapping: float | None = None  # scores become cap * tanh(scores / cap)
    final_logit_softcapping: float | None = None  # logits likewise
    no_rope_layers: tuple[int, ...] = ()  # numbers of the layers without RoPE
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0  # of what attention and the MLP add
    logits_scaling: float = 1.0  # divides the logits
    parallel_residual: bool = False  # attention and the MLP both read the input of the block
    mlp_bias: bool = False  # of a mixture's router, too
    num_experts: int = 0  # of a mixture of experts; 0: dense
    num_experts_per_tok: int = 0
    norm_topk_prob: bool = False  # whether the weights of a token's experts add up to 1
    moe_intermediate_size: int | None = None  # of an expert; None: intermediate_size
    dense_layers: tuple[int, ...] = ()  # numbers of the layers of a mixture without experts
    norm_bias: bool = False
    hidden_act: str | None = None  # "silu" | "gelu" | "gelu_tanh"; None: the family's
    tie_word_embeddings: bool = False
    dropout: float = 0.0  # in training
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, kind in CONFIG_KINDS.items():
            if (value := getattr(self, name)) is not None or name not in _OPTIONAL:
                kind.check(name, value)
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"{self.num_attention_heads} attention heads must be a multiple of {self.num_key_value_heads} KV heads"
            )
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} is not divisible by {self.num_attention_heads} heads: set head_dim"
            )
        for rope in (self.rope, self.local_rope):
            if rope is None:
                continue
            if self.computed_head_dim % 2:
                raise ValueError(f"head_dim must be even for RoPE, not {self.computed_head_dim}")
            if rope.dim is not None and (rope.dim % 2 or not 0 < rope.dim <= self.computed_head_dim):
                raise ValueError(
                    f"RoPE rotates an even number of dimensions up to {self.computed_head_dim}, not {rope.dim}"
                )
        if not self.layer_types:
            object.__setattr__(self, "layer_types", (FULL_ATTENTION,) * self.num_hidden_layers)
        if len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(f"{len(self.layer_types)} layer_types for {self.num_hidden_layers} layers")
        unknown = set(self.layer_types) - {FULL_ATTENTION, SLIDING_ATTENTION}
        if unknown:
            raise ValueError(f"layer type {short_repr(unknown.pop())} is not supported")
        if self.num_experts and not 1 <= self.num_experts_per_tok <= self.num_experts:
            raise ValueError(
                f"num_experts_per_tok must be from 1 to the {self.num_experts} experts, not {self.num_experts_per_tok}"
            )
        if self.has_windows and not self.sliding_window:
            raise ValueError(f"sliding layers need a positive sliding_window, not {self.sliding_window}")

    @property
    def computed_head_dim(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def attention_scale(self) -> float:
        """Multiplies q·k."""
        return 1 / math.sqrt(self.query_pre_attn_scalar or self.computed_head_dim)

    @property
    def has_windows(self) -> bool:
        return SLIDING_ATTENTION in self.layer_types

    def window(self, layer_idx: int) -> int | None:
        """How many positions a query of this layer sees, its own included; None: all."""
        return self.sliding_window if self.layer_types[layer_idx] == SLIDING_ATTENTION else None

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer."""
        return tuple(self.window(layer_idx) for layer_idx in range(self.num_hidden_layers))

    def has_experts(self, layer_idx: int) -> bool:
        return self.num_experts > 0 and layer_idx not in self.dense_layers

    def rope_type(self, layer_idx: int) -> str | None:
        """The key of its RoPE in `ropes`; None: it has none."""
        return None if self.rope is None or layer_idx in self.no_rope_layers else self.layer_types[layer_idx]

    def ropes(self) -> dict[str, RopeConfig]:
        """By layer type."""
        kinds = dict.fromkeys(map(self.rope_type, range(self.num_hidden_layers)))
        local = self.local_rope or self.rope
        found = {kind: local if kind == SLIDING_ATTENTION else self.rope for kind in kinds if kind is not None}
        return {kind: rope for kind, rope in found.items() if rope is not None}

    def cache_bytes_per_token(self, element_size: int) -> int:
        """Bytes of K and V of one position in all layers. element_size: 1 is int8, which has scales too."""
        head_dim = self.computed_head_dim
        scales = 2 * -(-head_dim // INT8_GROUP) if element_size == 1 else 0
        return 2 * self.num_hidden_layers * self.num_key_value_heads * (head_dim * element_size + scales)

    @property
    def longest_context(self) -> int:
        """The most that `with_context` takes."""
        return max(self.max_position_embeddings, self.long_context or 0)

    def with_context(self, context: int | None) -> ModelConfig:
        """The same model for sequences of at most so many positions; None: as it is.

        LongRoPE's factors are chosen here, once: chosen by the length of a sequence, they would change the keys of all
        its positions when it grows beyond the original context.
        """
        if context is None:
            return self
        if type(context) is not int or not 1 <= context <= self.longest_context:
            raise ValueError(f"context must be from 1 to the model's {self.longest_context}, not {context!r}")
        rope = self.long_rope if context > self.max_position_embeddings else self.rope
        return replace(self, max_position_embeddings=context, rope=rope, long_rope=None, long_context=None)

    @classmethod
    def from_pretrained(cls, name_or_path: str, context: int | None = None) -> ModelConfig:
        """Read a checkpoint's config without reading its weights. context: see `load_model`."""
        if cls.reader is None:
            raise RuntimeError("no checkpoint reader is installed: use infer.ModelConfig, or import infer.loader.find")
        return cls.reader(name_or_path).with_context(context)


# Far more than any model has, and few enough that building one on the meta device is cheap.
MAX_LAYERS = 1024
CONFIG_KINDS: dict[str, Kind] = {
    "model_type": TEXT,
    "vocab_size": integer(1, 2**24),
    "hidden_size": integer(1, 2**20),
    "intermediate_size": integer(1, 2**24),
    "num_hidden_layers": integer(1, MAX_LAYERS),
    "num_attention_heads": integer(1, 2**16),
    "num_key_value_heads": integer(1, 2**16),
    "max_position_embeddings": integer(1, 2**31 - 1),
    "head_dim": integer(1, 2**16),
    "rms_norm_eps": number("from 0 to 1", lambda value: 0 <= value <= 1),
    "query_pre_attn_scalar": ABOVE_0,
    "scale_attn_by_inverse_layer_idx": FLAG,
    "layer_types": list_of(TEXT, MAX_LAYERS),
    "sliding_window": integer(0, 2**31 - 1),
    "attention_bias": FLAG,
    "attention_output_bias": FLAG,
    "attn_logit_softcapping": ABOVE_0,
    "final_logit_softcapping": ABOVE_0,
    "no_rope_layers": list_of(integer(0, MAX_LAYERS - 1), MAX_LAYERS),
    "embedding_multiplier": ABOVE_0,
    "residual_multiplier": ABOVE_0,
    "logits_scaling": ABOVE_0,
    "parallel_residual": FLAG,
    "mlp_bias": FLAG,
    "num_experts": integer(0, 2**12),
    "num_experts_per_tok": integer(0, 2**12),
    "norm_topk_prob": FLAG,
    "moe_intermediate_size": integer(1, 2**24),
    "dense_layers": list_of(integer(0, MAX_LAYERS - 1), MAX_LAYERS),
    "norm_bias": FLAG,
    "hidden_act": TEXT,
    "tie_word_embeddings": FLAG,
    "dropout": number("from 0 to below 1", lambda value: 0 <= value < 1),
    "bos_token_id": TOKEN_ID,
    "eos_token_ids": list_of(TOKEN_ID, 4096),
}
_OPTIONAL = (
    "head_dim",
    "query_pre_attn_scalar",
    "sliding_window",
    "attention_output_bias",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "hidden_act",
    "moe_intermediate_size",
    "bos_token_id",
)
ROPE_KINDS: dict[str, Kind] = {
    "theta": ABOVE_0,
    "dim": integer(1, 2**16),
    "factor": ABOVE_0,
    "low_freq_factor": ABOVE_0,
    "high_freq_factor": ABOVE_0,
    "original_max_position_embeddings": ABOVE_0,
    "beta_fast": ABOVE_0,
    "beta_slow": ABOVE_0,
    "truncate": FLAG,
    "attention_factor": ABOVE_0,
    "divisors": list_of(ABOVE_0, 2**15),
    "query_beta": number("from 0 to 100", lambda value: 0 <= value <= 100),
}


def read_fields(raw: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """The fields of `ModelConfig` that a file has, each checked. names: the file's names of them."""
    given = checked(raw, {theirs: CONFIG_KINDS[ours] for ours, theirs in names.items()})
    return {ours: given[theirs] for ours, theirs in names.items() if theirs in given}


def layer_pattern(pattern: int | list[bool], layers: int) -> tuple[str, ...]:
    """pattern: every pattern-th layer has full attention; or one entry per layer, true for a sliding window."""
    slides = pattern if isinstance(pattern, list) else [bool((i + 1) % pattern) for i in range(layers)]
    return tuple(SLIDING_ATTENTION if slide else FULL_ATTENTION for slide in slides)
