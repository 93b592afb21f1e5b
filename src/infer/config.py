"""What a model is: one frozen value for each thing the engine needs to know about it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

FULL_ATTENTION = "full_attention"
SLIDING_ATTENTION = "sliding_attention"


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

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> RopeConfig:
        """From `rope_parameters`, or the older `rope_theta` and `rope_scaling`."""
        settings = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
        scaling = settings.get("rope_type", settings.get("type", "default"))
        if scaling not in ("default", "linear", "llama3"):
            raise ValueError(f"RoPE scaling {scaling!r} is not supported: only default, linear and llama3 are")
        theta = float(settings.get("rope_theta", raw.get("rope_theta", cls.theta)))
        names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        if scaling == "default":
            return cls(theta=theta)
        required = names[:1] if scaling == "linear" else names
        missing = [name for name in required if name not in settings]
        if missing:
            raise ValueError(f"{scaling} RoPE scaling lacks {', '.join(missing)}")
        return cls(theta=theta, scaling=scaling, **{name: settings[name] for name in required})


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a model. Field names follow Hugging Face's `config.json`."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    max_position_embeddings: int
    head_dim: int | None = None
    rms_norm_eps: float = 1e-5
    rope: RopeConfig = field(default_factory=RopeConfig)
    layer_types: tuple[str, ...] = ()  # one kind per layer; empty: full attention everywhere
    sliding_window: int | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
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
        if self.computed_head_dim % 2:
            raise ValueError(f"head_dim must be even for RoPE, not {self.computed_head_dim}")
        if not self.layer_types:
            object.__setattr__(self, "layer_types", (FULL_ATTENTION,) * self.num_hidden_layers)
        if len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(f"{len(self.layer_types)} layer_types for {self.num_hidden_layers} layers")
        unknown = set(self.layer_types) - {FULL_ATTENTION, SLIDING_ATTENTION}
        if unknown:
            raise ValueError(f"layer type {unknown.pop()!r} is not supported")
        if SLIDING_ATTENTION in self.layer_types and (self.sliding_window is None or self.sliding_window < 1):
            raise ValueError(f"sliding layers need a positive sliding_window, not {self.sliding_window!r}")

    @property
    def computed_head_dim(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads

    def window(self, layer_idx: int) -> int | None:
        """How many positions back this layer looks, itself included; None: all of them."""
        return self.sliding_window if self.layer_types[layer_idx] == SLIDING_ATTENTION else None

    def cache_bytes_per_token(self, element_size: int) -> int:
        """Bytes of K and V that one position adds over all layers."""
        return 2 * self.num_hidden_layers * self.num_key_value_heads * self.computed_head_dim * element_size

    @classmethod
    def from_pretrained(cls, name_or_path: str) -> ModelConfig:
        """Read a checkpoint's config without reading its weights."""
        from infer.loader import open_checkpoint  # the one upward import: the loader builds on this module

        return open_checkpoint(name_or_path, weights=False).config

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
        """From the contents of `config.json` and, where there is one, `generation_config.json`."""
        missing = [name for name in _REQUIRED_IN_HF if raw.get(name) is None]
        if missing:
            raise ValueError(f"config.json lacks {', '.join(missing)}")
        if raw.get("quantization_config") is not None:
            method = raw["quantization_config"].get("quant_method", "unknown")
            raise ValueError(f"safetensors quantised with {method!r} are not supported: use the original or a GGUF")
        activation = raw.get("hidden_act", "silu")
        if activation != "silu":
            raise ValueError(f"hidden_act {activation!r} is not supported for {raw['model_type']}: only silu is")
        return cls(
            **{name: raw[name] for name in _REQUIRED_IN_HF},
            num_key_value_heads=raw.get("num_key_value_heads") or raw["num_attention_heads"],
            head_dim=raw.get("head_dim"),
            rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
            rope=RopeConfig.from_hf(raw),
            layer_types=tuple(raw.get("layer_types") or ()),
            sliding_window=raw.get("sliding_window"),
            attention_bias=raw.get("attention_bias", False),
            mlp_bias=raw.get("mlp_bias", False),
            tie_word_embeddings=raw.get("tie_word_embeddings", False),
            bos_token_id=raw.get("bos_token_id"),
            eos_token_ids=_unique(raw.get("eos_token_id"), (generation or {}).get("eos_token_id")),
        )

    @classmethod
    def from_gguf(
        cls, metadata: Mapping[str, Any], tensor_names: Collection[str], rope_divisors: tuple[float, ...] = ()
    ) -> ModelConfig:
        """From a GGUF file's metadata; what it leaves to its tensors (biases, a head of its own) from their names."""
        arch = metadata["general.architecture"]

        def get(key: str, default: Any = None) -> Any:
            value = metadata.get(f"{arch}.{key}", default)
            if value is None:
                raise ValueError(f"GGUF metadata lacks {arch}.{key}")
            return value

        heads, hidden = get("attention.head_count"), get("embedding_length")
        if not isinstance(heads, int) or heads < 1:
            raise ValueError(f"{arch}.attention.head_count must be a positive integer, not {heads!r}")
        head_dim = get("attention.key_length", hidden // heads)
        if get("rope.dimension_count", head_dim) != head_dim:
            raise ValueError(f"RoPE over {get('rope.dimension_count')} of {head_dim} dimensions is not supported")
        scaling = get("rope.scaling.type", "none")
        if scaling not in ("none", "linear"):
            raise ValueError(f"RoPE scaling {scaling!r} is not supported in GGUF files: only linear is")
        return cls(
            model_type=arch,
            vocab_size=get("vocab_size", len(metadata.get("tokenizer.ggml.tokens", ())) or None),
            hidden_size=hidden,
            intermediate_size=get("feed_forward_length"),
            num_hidden_layers=get("block_count"),
            num_attention_heads=heads,
            num_key_value_heads=get("attention.head_count_kv", heads),
            max_position_embeddings=get("context_length"),
            head_dim=head_dim,
            rms_norm_eps=get("attention.layer_norm_rms_epsilon"),
            rope=RopeConfig(
                theta=get("rope.freq_base", RopeConfig.theta),
                scaling="linear" if scaling == "linear" else "default",
                factor=get("rope.scaling.factor", 1.0),
                divisors=rope_divisors,
            ),
            attention_bias="blk.0.attn_q.bias" in tensor_names,
            mlp_bias="blk.0.ffn_down.bias" in tensor_names,
            tie_word_embeddings="output.weight" not in tensor_names,
            bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
            eos_token_ids=_unique(*(metadata.get(f"tokenizer.ggml.{k}_token_id") for k in ("eos", "eot", "eom"))),
        )


_POSITIVE = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
)
_REQUIRED_IN_HF = ("model_type", *(name for name in _POSITIVE if name != "num_key_value_heads"))


def _unique(*ids: int | list[int] | None) -> tuple[int, ...]:
    """Token ids given as one, several or none, in order, each once."""
    flat = [i for entry in ids if entry is not None for i in (entry if isinstance(entry, list) else [entry])]
    return tuple(dict.fromkeys(flat))
