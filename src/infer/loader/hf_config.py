"""The config of a Hugging Face folder: `config.json`, with the names and defaults of each family."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from infer.config import (
    CONFIG_KINDS,
    FULL_ATTENTION,
    ROPE_KINDS,
    SLIDING_ATTENTION,
    ModelConfig,
    RopeConfig,
    layer_pattern,
    read_fields,
)
from infer.values import ABOVE_0, FLAG, OBJECT, TEXT, TOKEN_IDS, Kind, checked, integer, short_repr

REQUIRED = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)
# Keys of config.json, besides the fields of `ModelConfig`, that are read.
_KINDS: dict[str, Kind] = {
    "eos_token_id": TOKEN_IDS,
    "rope_theta": ABOVE_0,
    "rope_local_base_freq": ABOVE_0,
    "rope_parameters": OBJECT,
    "rope_scaling": OBJECT,
    "quantization_config": OBJECT,
    "use_sliding_window": FLAG,
    "max_window_layers": integer(0, 2**31 - 1),
    "sliding_window_pattern": integer(1, 2**31 - 1),
    "_sliding_window_pattern": integer(1, 2**31 - 1),
    "scale_attn_weights": FLAG,
}
_ROPE_KINDS: dict[str, Kind] = ROPE_KINDS | {"rope_theta": ABOVE_0, "rope_type": TEXT, "type": TEXT}
_ROPE_SETTINGS = {  # of each kind of scaling
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


@dataclass(frozen=True)
class Family:
    """How a family's config.json differs from Llama's. Values are by the names of `ModelConfig` and `_KINDS`."""

    names: Mapping[str, str] = field(default_factory=dict)  # fields of `ModelConfig` -> the family's names of them
    defaults: Mapping[str, Any] = field(default_factory=dict)  # transformers' values of what may be left out
    fixed: Mapping[str, Any] = field(default_factory=dict)  # whatever the file has
    # Names of activations -> ours; None: that of the family's `Block`.
    activations: Mapping[str, str | None] = field(default_factory=lambda: {"silu": None})
    refused: tuple[str, ...] = ()  # keys that are not supported, unless they are false, 0 or null
    pattern: int | None = None  # without layer_types: every so many layers full attention, else a sliding window
    computed: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda values: {}


def _qwen(values: Mapping[str, Any]) -> dict[str, Any]:
    """Windows, if any, from layer max_window_layers on."""
    if not values.get("use_sliding_window"):
        return {"sliding_window": None}
    layers = range(values.get("num_hidden_layers", 0))
    windows = [SLIDING_ATTENTION if i >= values["max_window_layers"] else FULL_ATTENTION for i in layers]
    return {"layer_types": values.get("layer_types") or windows}


def _gpt2(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "intermediate_size": values.get("intermediate_size") or 4 * values["hidden_size"],
        "query_pre_attn_scalar": None if values["scale_attn_weights"] else 1.0,
    }


_GELUS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
_GEMMA3 = Family(
    names={"hidden_act": "hidden_activation"},
    defaults={
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
        "hidden_act": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "tie_word_embeddings": True,
        "bos_token_id": 2,
        "eos_token_id": 1,
    },
    activations={"gelu_pytorch_tanh": None},
    refused=("final_logit_softcapping", "attn_logit_softcapping", "use_bidirectional_attention"),
    pattern=6,
)
FAMILIES = {
    "qwen2": Family(
        defaults={"sliding_window": 4096, "max_window_layers": 28},
        fixed={"attention_bias": True, "attention_output_bias": False},
        computed=_qwen,
    ),
    "qwen3": Family(defaults={"head_dim": 128, "sliding_window": 4096, "max_window_layers": 28}, computed=_qwen),
    "gemma3": _GEMMA3,
    "gemma3_text": _GEMMA3,
    "rope_gpt": Family(activations=_GELUS),
    "gpt2": Family(
        names={
            "hidden_size": "n_embd",
            "intermediate_size": "n_inner",
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "max_position_embeddings": "n_positions",
            "rms_norm_eps": "layer_norm_epsilon",
            "hidden_act": "activation_function",
        },
        defaults={
            "vocab_size": 50_257,
            "max_position_embeddings": 1024,
            "hidden_size": 768,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "rms_norm_eps": 1e-5,
            "hidden_act": "gelu_new",
            "scale_attn_weights": True,
            "tie_word_embeddings": True,
            "bos_token_id": 50_256,
            "eos_token_id": 50_256,
        },
        fixed={
            "num_key_value_heads": None,
            "head_dim": None,
            "rope_theta": None,
            "attention_bias": True,
            "mlp_bias": True,
            "norm_bias": True,
        },
        activations=_GELUS,
        refused=("scale_attn_by_inverse_layer_idx", "add_cross_attention"),
        computed=_gpt2,
    ),
}


def config_from_hf(raw: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
    """From the contents of `config.json` and, if there is one, `generation_config.json`."""
    if (text := raw.get("text_config")) is not None:  # of a multimodal model
        OBJECT.check("text_config", text)
        raw = {**text, **{name: value for name, value in raw.items() if value is not None}}
    family = FAMILIES.get(str(raw.get("model_type")), Family())
    given = checked(raw, _KINDS)
    if raw.get("sliding_window", 0) is None:  # null: Qwen 3 then has no window, instead of the default
        given.pop("use_sliding_window", None)
    given |= read_fields(raw, {name: family.names.get(name, name) for name in CONFIG_KINDS})
    generation = checked(generation or {}, {"eos_token_id": TOKEN_IDS})
    llama: dict[str, Any] = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": RopeConfig.theta}
    values = llama | {**family.defaults, **given, **family.fixed}
    values |= family.computed(values)
    if missing := [name for name in REQUIRED if values.get(name) is None]:
        raise ValueError(f"config.json lacks {', '.join(missing)}")
    for name in family.refused:
        if raw.get(name):
            raise ValueError(f"{name} {short_repr(raw[name])} is not supported")
    if "quantization_config" in values:
        method = values["quantization_config"].get("quant_method", "unknown")
        raise ValueError(
            f"safetensors quantized with {short_repr(method)} are not supported: use the original or a GGUF"
        )
    activation, known = values["hidden_act"], family.activations
    if activation not in known:
        only = f"only {' and '.join(known)} {'is' if len(known) == 1 else 'are'}"
        raise ValueError(f"hidden_act {short_repr(activation)} is not supported for {values['model_type']}: {only}")
    if family.pattern is not None and not values.get("layer_types"):
        pattern = values.get("sliding_window_pattern", values.get("_sliding_window_pattern", family.pattern))
        values["layer_types"] = layer_pattern(pattern, values["num_hidden_layers"])
    values |= {
        "num_key_value_heads": values.get("num_key_value_heads") or values["num_attention_heads"],
        "hidden_act": known[activation],
        "layer_types": tuple(values.get("layer_types") or ()),
        "eos_token_ids": unique_ids(values.get("eos_token_id"), generation.get("eos_token_id")),
    }
    fields = {name: values[name] for name in CONFIG_KINDS if values.get(name) is not None}
    return ModelConfig(**_ropes(values), **fields)


def _ropes(values: Mapping[str, Any]) -> dict[str, Any]:
    """The RoPE of all layers, or that of full and that of sliding layers; None: learned positions."""
    if values["rope_theta"] is None:
        return {"rope": None}
    settings = values.get("rope_parameters", {})
    by_type = checked(settings, {FULL_ATTENTION: OBJECT, SLIDING_ATTENTION: OBJECT})
    settings = (by_type.get(FULL_ATTENTION) if by_type else settings) or values.get("rope_scaling") or {}
    ropes = {"rope": rope_from_hf(settings, values["rope_theta"])}
    if "rope_local_base_freq" in values:
        ropes["local_rope"] = rope_from_hf(by_type.get(SLIDING_ATTENTION) or {}, values["rope_local_base_freq"])
    return ropes


def rope_from_hf(settings: Mapping[str, Any], theta: float) -> RopeConfig:
    """From `rope_parameters`, or the older `rope_scaling` with `rope_theta` beside it."""
    settings = checked(settings, _ROPE_KINDS)
    scaling = settings.get("rope_type", settings.get("type", "default"))
    if scaling not in _ROPE_SETTINGS:
        raise ValueError(f"RoPE scaling {short_repr(scaling)} is not supported: only default, linear and llama3 are")
    required = _ROPE_SETTINGS[scaling]
    if missing := [name for name in required if name not in settings]:
        raise ValueError(f"{scaling} RoPE scaling lacks {', '.join(missing)}")
    theta = float(settings.get("rope_theta", theta))
    return RopeConfig(theta=theta, scaling=scaling, **{name: settings[name] for name in required})


def unique_ids(*ids: int | list[int] | None) -> tuple[int, ...]:
    """Token ids in order, without duplicates, from single ids, lists and None."""
    flat = [i for entry in ids if entry is not None for i in (entry if isinstance(entry, list) else [entry])]
    return tuple(dict.fromkeys(flat))
