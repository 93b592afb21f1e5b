"""What a model is: one frozen value for each thing the engine needs to know about it."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

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

    @classmethod
    def from_hf(cls, settings: Mapping[str, Any], theta: float) -> RopeConfig:
        """From `rope_parameters`, or the older `rope_scaling` with `rope_theta` beside it."""
        if not isinstance(settings, Mapping):
            raise ValueError(f"RoPE settings must be an object, not {settings!r}")
        scaling = settings.get("rope_type", settings.get("type", "default"))
        if scaling not in ("default", "linear", "llama3"):
            raise ValueError(f"RoPE scaling {scaling!r} is not supported: only default, linear and llama3 are")
        theta = float(settings.get("rope_theta", theta))
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
        from infer.loader import open_checkpoint  # the one upward import: the loader builds on this module

        return open_checkpoint(name_or_path, weights=False).config

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
        """From the contents of `config.json` and, where there is one, `generation_config.json`."""
        for name in ("text_config", "rope_parameters", "rope_scaling", "quantization_config"):
            if not isinstance(raw.get(name) or {}, Mapping):
                raise ValueError(f"{name} must be an object, not {raw[name]!r}")
        raw = _FAMILIES.get(str(raw.get("model_type")), dict)(raw)
        missing = [name for name in _REQUIRED_IN_HF if raw.get(name) is None]
        if missing:
            raise ValueError(f"config.json lacks {', '.join(missing)}")
        if raw.get("quantization_config") is not None:
            method = raw["quantization_config"].get("quant_method", "unknown")
            raise ValueError(f"safetensors quantised with {method!r} are not supported: use the original or a GGUF")
        activation, known = raw.get("hidden_act", "silu"), _ACTIVATIONS.get(raw["model_type"], {"silu": None})
        if activation not in known:
            only = f"only {' and '.join(known)} {'is' if len(known) == 1 else 'are'}"
            raise ValueError(f"hidden_act {activation!r} is not supported for {raw['model_type']}: {only}")
        rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
        learned, kv_heads = raw["model_type"] == "gpt2", raw.get("num_key_value_heads")
        return cls(
            **{name: raw[name] for name in _REQUIRED_IN_HF},
            num_key_value_heads=raw["num_attention_heads"] if kv_heads is None else kv_heads,
            head_dim=raw.get("head_dim"),
            rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
            rope=None if learned else RopeConfig.from_hf(rope, raw.get("rope_theta", RopeConfig.theta)),
            local_rope=raw.get("local_rope"),
            query_pre_attn_scalar=raw.get("query_pre_attn_scalar"),
            layer_types=tuple(raw.get("layer_types") or ()),
            sliding_window=raw.get("sliding_window"),
            attention_bias=raw.get("attention_bias", False),
            mlp_bias=raw.get("mlp_bias", False),
            norm_bias=raw.get("norm_bias", False),
            hidden_act=known[activation],
            tie_word_embeddings=raw.get("tie_word_embeddings", False),
            bos_token_id=raw.get("bos_token_id"),
            eos_token_ids=_unique(raw.get("eos_token_id"), (generation or {}).get("eos_token_id")),
        )

    @classmethod
    def from_nanogpt(cls, args: Mapping[str, Any], eos_token_ids: tuple[int, ...] = ()) -> ModelConfig:
        """From the `model_args` of a nanoGPT checkpoint; a `model_type` of "rope_gpt" there has RoPE instead."""
        missing = [name for name in _REQUIRED_IN_NANOGPT if args.get(name) is None]
        if missing:
            raise ValueError(f"model_args lack {', '.join(missing)}")
        model_type = args.get("model_type", "gpt2")
        if model_type not in ("gpt2", "rope_gpt"):
            raise ValueError(f"model_type {model_type!r} is not supported here: only gpt2 and rope_gpt are")
        bias = args.get("bias", True)  # checkpoints from before it could be chosen have biases
        width, heads = args["n_embd"], args["n_head"]
        return cls(
            model_type=model_type,
            vocab_size=args["vocab_size"],
            hidden_size=width,
            intermediate_size=4 * width if isinstance(width, int) else width,
            num_hidden_layers=args["n_layer"],
            num_attention_heads=heads,
            num_key_value_heads=heads,
            max_position_embeddings=args["block_size"],
            rope=None if model_type == "gpt2" else RopeConfig(),
            attention_bias=bias,
            mlp_bias=bias,
            norm_bias=bias,
            # Checkpoints from before biases could be left out are also from before nanoGPT changed to the exact GELU.
            hidden_act="gelu" if "bias" in args else "gelu_tanh",
            tie_word_embeddings=True,
            dropout=args.get("dropout", 0.0),
            eos_token_ids=eos_token_ids,
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
        factor = get("rope.scaling.factor", 1.0)
        scaling = get("rope.scaling.type", "none" if factor == 1 else "linear")
        if scaling not in ("none", "linear"):
            raise ValueError(f"RoPE scaling {scaling!r} is not supported in GGUF files: only linear is")
        for name in ("attn_logit_softcapping", "final_logit_softcapping"):
            if get(name, 0):
                raise ValueError(f"{arch}.{name} {get(name)!r} is not supported")
        learned = arch == "gpt2"
        window = get("attention.sliding_window", 0)
        layers = get("block_count")
        local_rope = layer_types = scalar = None
        if arch == "gemma3":
            # Written by newer converters only; llama.cpp takes these values where they are missing.
            local_rope = RopeConfig(theta=get("rope.freq_base_swa", 10_000.0))
            layer_types = _layer_pattern(get("attention.sliding_window_pattern", 6), layers)
            # Nor is the scale there: the 27B alone, known by its depth, does not take head_dim.
            scalar = hidden / heads if layers == 62 else None
        return cls(
            model_type=arch,
            vocab_size=get("vocab_size", len(metadata.get("tokenizer.ggml.tokens", ())) or None),
            hidden_size=hidden,
            intermediate_size=get("feed_forward_length"),
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=get("attention.head_count_kv", heads),
            max_position_embeddings=get("context_length"),
            head_dim=head_dim,
            rms_norm_eps=get("attention.layer_norm_epsilon" if learned else "attention.layer_norm_rms_epsilon"),
            rope=None
            if learned
            else RopeConfig(
                theta=get("rope.freq_base", RopeConfig.theta),
                scaling="linear" if scaling == "linear" else "default",
                factor=factor,
                divisors=rope_divisors,
            ),
            local_rope=local_rope,
            query_pre_attn_scalar=scalar,
            layer_types=layer_types or (),
            sliding_window=window or None,
            attention_bias=any(f"blk.0.{name}.bias" in tensor_names for name in ("attn_q", "attn_qkv")),
            mlp_bias="blk.0.ffn_down.bias" in tensor_names,
            norm_bias="output_norm.bias" in tensor_names,
            hidden_act="gelu_tanh" if learned else None,
            tie_word_embeddings="output.weight" not in tensor_names,
            bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
            eos_token_ids=_gguf_eos(metadata),
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
_REQUIRED_IN_NANOGPT = ("vocab_size", "block_size", "n_layer", "n_head", "n_embd")
_REQUIRED_IN_HF = ("model_type", *(name for name in _POSITIVE if name != "num_key_value_heads"))


def _layer_pattern(pattern: int | list[bool], layers: int) -> tuple[str, ...]:
    """Every pattern-th layer sees everything; or one entry per layer, true where it slides."""
    if not isinstance(pattern, list) and (not isinstance(pattern, int) or pattern < 1):
        raise ValueError(f"sliding_window_pattern must be at least 1, not {pattern!r}")
    slides = pattern if isinstance(pattern, list) else [bool((i + 1) % pattern) for i in range(layers)]
    return tuple(SLIDING_ATTENTION if slide else FULL_ATTENTION for slide in slides)


def _given(raw: Mapping[str, Any]) -> dict[str, Any]:
    """A null says nothing."""
    return {name: value for name, value in raw.items() if value is not None}


def _layers(raw: Mapping[str, Any]) -> int:
    """0 where the number is missing or none, which is refused with the other sizes."""
    layers = raw.get("num_hidden_layers")
    return layers if isinstance(layers, int) else 0


def _qwen3(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Windows, if any, from layer max_window_layers on."""
    window = raw.get("sliding_window", 4096) if raw.get("use_sliding_window") else None
    raw = {"head_dim": 128} | _given(raw)
    if window is not None and not raw.get("layer_types"):
        full = raw.get("max_window_layers", 28)
        raw["layer_types"] = [SLIDING_ATTENTION if i >= full else FULL_ATTENTION for i in range(_layers(raw))]
    return raw | {"sliding_window": window}


def _gemma3(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The text part of a config with others, what published configs leave to the reference's defaults, two RoPEs."""
    whole = {name: value for name, value in raw.items() if name != "text_config"}
    raw = _GEMMA3_DEFAULTS | _given(raw.get("text_config") or {}) | _given(whole)
    for name in ("final_logit_softcapping", "attn_logit_softcapping", "use_bidirectional_attention"):
        if raw.get(name):
            raise ValueError(f"{name} {raw[name]!r} is not supported")
    ropes = raw.pop("rope_parameters", {})
    pattern = raw.get("sliding_window_pattern", raw.get("_sliding_window_pattern", 6))
    return raw | {
        "hidden_act": raw["hidden_activation"],
        "rope_scaling": ropes.get(FULL_ATTENTION) or raw.get("rope_scaling"),
        "local_rope": RopeConfig.from_hf(ropes.get(SLIDING_ATTENTION) or {}, raw["rope_local_base_freq"]),
        "layer_types": raw.get("layer_types") or _layer_pattern(pattern, _layers(raw)),
    }


def _gpt2(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Its own names for the same things, and the reference's defaults for what is left out."""
    for name in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        if raw.get(name):
            raise ValueError(f"{name} {raw[name]!r} is not supported")
    raw = _GPT2_DEFAULTS | _given(raw)
    return raw | {
        "hidden_size": raw["n_embd"],
        "intermediate_size": raw.get("n_inner") or 4 * raw["n_embd"],
        "num_hidden_layers": raw["n_layer"],
        "num_attention_heads": raw["n_head"],
        "num_key_value_heads": None,
        "head_dim": None,
        "max_position_embeddings": raw["n_positions"],
        "rms_norm_eps": raw["layer_norm_epsilon"],
        "hidden_act": raw["activation_function"],
        "query_pre_attn_scalar": None if raw["scale_attn_weights"] else 1.0,
        "attention_bias": True,
        "mlp_bias": True,
        "norm_bias": True,
    }


_GPT2_DEFAULTS: dict[str, Any] = {
    "vocab_size": 50_257,
    "n_positions": 1024,
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "layer_norm_epsilon": 1e-5,
    "activation_function": "gelu_new",
    "scale_attn_weights": True,
    "tie_word_embeddings": True,
    "bos_token_id": 50_256,
    "eos_token_id": 50_256,
}

_GEMMA3_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_id": 1,
}

# The names that a family without SwiGLU may give in its config, and ours; None: the only one it has.
_GELUS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
_ACTIVATIONS: dict[str, Mapping[str, str | None]] = {
    "gemma3": {"gelu_pytorch_tanh": None},
    "gemma3_text": {"gelu_pytorch_tanh": None},
    "gpt2": _GELUS,
    "rope_gpt": _GELUS,
}

# How a family's config.json differs from Llama's.
_FAMILIES: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "qwen3": _qwen3,
    "gemma3": _gemma3,
    "gemma3_text": _gemma3,
    "gpt2": _gpt2,
}


def _gguf_eos(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """What ends a text: the ids that are given, and marks for the end of a turn, which many files do not give."""
    tokens, types = (metadata.get(f"tokenizer.ggml.{name}", []) for name in ("tokens", "token_type"))
    marks = [tokens.index(mark) for mark in _END_OF_TURN if mark in tokens]
    given = (metadata.get(f"tokenizer.ggml.{name}") for name in _GGUF_EOS)
    return _unique(*given, [i for i in marks if i < len(types) and types[i] != _NORMAL_TOKEN])


_GGUF_EOS = ("eos_token_id", "eos_token_ids", "eot_token_id", "eom_token_id")
_END_OF_TURN = ("<end_of_turn>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>")
_NORMAL_TOKEN = 1


def _unique(*ids: int | list[int] | None) -> tuple[int, ...]:
    """Token ids given as one, several or none, in order, each once."""
    flat = [i for entry in ids if entry is not None for i in (entry if isinstance(entry, list) else [entry])]
    return tuple(dict.fromkeys(flat))
