"""The config of a Hugging Face folder: `config.json`, and what a family leaves out of it or calls otherwise."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from infer.config import (
    CONFIG_KINDS,
    FULL_ATTENTION,
    ROPE_KINDS,
    SLIDING_ATTENTION,
    ModelConfig,
    RopeConfig,
    layer_pattern,
)
from infer.values import ABOVE_0, ANY, FLAG, OBJECT, TEXT, TOKEN_IDS, Kind, checked, shown, whole

REQUIRED = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)


def config_from_hf(raw: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
    """From the contents of `config.json` and, where there is one, `generation_config.json`."""
    given = checked(raw, _KINDS)
    if raw.get("sliding_window", 0) is None:  # to Qwen 3 no window, rather than the default
        given.pop("use_sliding_window", None)
    if "text_config" in given:
        given["text_config"] = checked(given["text_config"], _KINDS)
    generation = checked(generation or {}, {"eos_token_id": TOKEN_IDS})
    raw = _FAMILIES.get(str(given.get("model_type")), dict)(given)
    missing = [name for name in REQUIRED if raw.get(name) is None]
    if missing:
        raise ValueError(f"config.json lacks {', '.join(missing)}")
    if raw.get("quantization_config") is not None:
        method = raw["quantization_config"].get("quant_method", "unknown")
        raise ValueError(f"safetensors quantised with {shown(method)} are not supported: use the original or a GGUF")
    activation, known = raw.get("hidden_act", "silu"), _ACTIVATIONS.get(raw["model_type"], {"silu": None})
    if activation not in known:
        only = f"only {' and '.join(known)} {'is' if len(known) == 1 else 'are'}"
        raise ValueError(f"hidden_act {shown(activation)} is not supported for {raw['model_type']}: {only}")
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    learned, kv_heads = raw["model_type"] == "gpt2", raw.get("num_key_value_heads")
    return ModelConfig(
        **{name: raw[name] for name in REQUIRED},
        num_key_value_heads=raw["num_attention_heads"] if kv_heads is None else kv_heads,
        head_dim=raw.get("head_dim"),
        rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
        rope=None if learned else rope_from_hf(rope, raw.get("rope_theta", RopeConfig.theta)),
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
        eos_token_ids=unique_ids(raw.get("eos_token_id"), generation.get("eos_token_id")),
    )


def rope_from_hf(settings: Mapping[str, Any], theta: float) -> RopeConfig:
    """From `rope_parameters`, or the older `rope_scaling` with `rope_theta` beside it."""
    settings = checked(settings, _ROPE_KINDS)
    scaling = settings.get("rope_type", settings.get("type", "default"))
    if scaling not in ("default", "linear", "llama3"):
        raise ValueError(f"RoPE scaling {shown(scaling)} is not supported: only default, linear and llama3 are")
    theta = float(settings.get("rope_theta", theta))
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    if scaling == "default":
        return RopeConfig(theta=theta)
    required = names[:1] if scaling == "linear" else names
    missing = [name for name in required if name not in settings]
    if missing:
        raise ValueError(f"{scaling} RoPE scaling lacks {', '.join(missing)}")
    return RopeConfig(theta=theta, scaling=scaling, **{name: settings[name] for name in required})


def unique_ids(*ids: int | list[int] | None) -> tuple[int, ...]:
    """Token ids given as one, several or none, in order, each once."""
    flat = [i for entry in ids if entry is not None for i in (entry if isinstance(entry, list) else [entry])]
    return tuple(dict.fromkeys(flat))


def _qwen3(raw: dict[str, Any]) -> dict[str, Any]:
    """Windows, if any, from layer max_window_layers on."""
    window = raw.get("sliding_window", 4096) if raw.get("use_sliding_window") else None
    raw = {"head_dim": 128} | raw
    if window is not None and not raw.get("layer_types"):
        full = raw.get("max_window_layers", 28)
        layers = raw.get("num_hidden_layers", 0)
        raw["layer_types"] = [SLIDING_ATTENTION if i >= full else FULL_ATTENTION for i in range(layers)]
    return raw | {"sliding_window": window}


def _gemma3(raw: dict[str, Any]) -> dict[str, Any]:
    """The text part of a config with others, what published configs leave to the reference's defaults, two RoPEs."""
    outer = {name: value for name, value in raw.items() if name != "text_config"}
    raw = _GEMMA3_DEFAULTS | raw.get("text_config", {}) | outer
    for name in ("final_logit_softcapping", "attn_logit_softcapping", "use_bidirectional_attention"):
        if raw.get(name):
            raise ValueError(f"{name} {shown(raw[name])} is not supported")
    ropes = checked(raw.pop("rope_parameters", {}), {FULL_ATTENTION: OBJECT, SLIDING_ATTENTION: OBJECT})
    pattern = raw.get("sliding_window_pattern", raw.get("_sliding_window_pattern", 6))
    return raw | {
        "hidden_act": raw["hidden_activation"],
        "rope_scaling": ropes.get(FULL_ATTENTION) or raw.get("rope_scaling"),
        "local_rope": rope_from_hf(ropes.get(SLIDING_ATTENTION) or {}, raw["rope_local_base_freq"]),
        "layer_types": raw.get("layer_types") or layer_pattern(pattern, raw.get("num_hidden_layers", 0)),
    }


def _gpt2(raw: dict[str, Any]) -> dict[str, Any]:
    """Its own names for the same things, and the reference's defaults for what is left out."""
    for name in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        if raw.get(name):
            raise ValueError(f"{name} {shown(raw[name])} is not supported")
    raw = _GPT2_DEFAULTS | raw
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


# What is read of config.json, and what each value has to be.
_KINDS: dict[str, Kind] = CONFIG_KINDS | {
    "eos_token_id": TOKEN_IDS,
    "rope_theta": ABOVE_0,
    "rope_local_base_freq": ABOVE_0,
    "text_config": OBJECT,
    "rope_parameters": OBJECT,
    "rope_scaling": OBJECT,
    "quantization_config": OBJECT,
    "hidden_activation": TEXT,
    "use_sliding_window": FLAG,
    "max_window_layers": whole(0, 2**31 - 1),
    "sliding_window_pattern": whole(1, 2**31 - 1),
    "_sliding_window_pattern": whole(1, 2**31 - 1),
    # Refused unless they say nothing.
    "final_logit_softcapping": ANY,
    "attn_logit_softcapping": ANY,
    "use_bidirectional_attention": ANY,
    "scale_attn_by_inverse_layer_idx": ANY,
    "add_cross_attention": ANY,
    # GPT-2's names.
    "n_embd": CONFIG_KINDS["hidden_size"],
    "n_inner": CONFIG_KINDS["intermediate_size"],
    "n_layer": CONFIG_KINDS["num_hidden_layers"],
    "n_head": CONFIG_KINDS["num_attention_heads"],
    "n_positions": CONFIG_KINDS["max_position_embeddings"],
    "layer_norm_epsilon": CONFIG_KINDS["rms_norm_eps"],
    "activation_function": TEXT,
    "scale_attn_weights": FLAG,
}
_ROPE_KINDS: dict[str, Kind] = ROPE_KINDS | {"rope_theta": ABOVE_0, "rope_type": TEXT, "type": TEXT}

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

# The names that a family without SwiGLU may give in its config, and ours; None: its `Block` has only this one.
_GELUS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
_ACTIVATIONS: dict[str, Mapping[str, str | None]] = {
    "gemma3": {"gelu_pytorch_tanh": None},
    "gemma3_text": {"gelu_pytorch_tanh": None},
    "gpt2": _GELUS,
    "rope_gpt": _GELUS,
}

# How a family's config.json differs from Llama's.
_FAMILIES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "qwen3": _qwen3,
    "gemma3": _gemma3,
    "gemma3_text": _gemma3,
    "gpt2": _gpt2,
}
