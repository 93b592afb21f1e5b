"""The config of a Hugging Face folder: `config.json`, with the names and defaults of each family."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field, fields, replace
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
from infer.nn.activation import CLAMP
from infer.values import ABOVE_0, FLAG, OBJECT, TEXT, TOKEN_IDS, Kind, checked, either, integer, number, short_repr

REQUIRED = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)
_COUNT, _POSITIVE = integer(0, 2**31 - 1), integer(1, 2**31 - 1)
# Keys of config.json, besides the fields of `ModelConfig`, that are read for any family.
_KINDS: dict[str, Kind] = {
    "eos_token_id": TOKEN_IDS,
    "rope_theta": ABOVE_0,
    "rope_parameters": OBJECT,
    "rope_scaling": OBJECT,
    "partial_rotary_factor": number("above 0 and at most 1", lambda value: 0 < value <= 1),
    "quantization_config": OBJECT,
}
# Fields of `ModelConfig`, and other keys, that only families read that say so (`Family.reads`).
_FAMILY_KINDS: dict[str, Kind] = {
    **{
        name: CONFIG_KINDS[name]
        for name in (
            "query_pre_attn_scalar",
            "scale_attn_by_inverse_layer_idx",
            "sliding_window",
            "attn_logit_softcapping",
            "final_logit_softcapping",
            "no_rope_layers",
            "embedding_multiplier",
            "residual_multiplier",
            "logits_scaling",
            "parallel_residual",
            "num_experts",
            "num_experts_per_tok",
            "norm_topk_prob",
            "moe_intermediate_size",
        )
    },
    "rope_local_base_freq": ABOVE_0,
    "use_sliding_window": FLAG,
    "max_window_layers": _COUNT,
    "sliding_window_pattern": either(_COUNT, TEXT),
    "_sliding_window_pattern": _POSITIVE,
    "scale_attn_weights": FLAG,
    "original_max_position_embeddings": _POSITIVE,
    "no_rope_layer_interval": _POSITIVE,
    "attention_multiplier": ABOVE_0,
    "decoder_sparse_step": _COUNT,
    "dual_chunk_attention_config": OBJECT,
    "mlp_only_layers": CONFIG_KINDS["dense_layers"],
}
# Keys without an effect on what a model computes; any other unknown key that is set is refused.
_IGNORED = re.compile(
    r"_.*|.*(dropout|dropout_prob|pdrop|_version|_token_id|_beams|_beam_groups|_labels?|label2id|id2label|_penalty"
    r"|_ngram_size)|(torch_)?dtype|(initializer|summary|unsloth|return)_.*"
    r"|output_(attentions|hidden_states|past|scores|router_logits)"
    r"|(typical|top)_[pk]|(min|max)_length|temperature|activation(_function)?|architectures|(auto|device)_map"
    r"|attn_implementation|cache_implementation|chunk_size_feed_forward|custom_pipelines|do_sample|early_stopping"
    r"|finetuning_task|full_attn_mod|gradient_checkpointing|hidden_act|interpolate_factor|is_decoder|is_llama_config"
    r"|max_sequence_length|model_max_length|n_ctx|neftune_noise_alpha|num_logits_to_keep|num_return_sequences"
    r"|predict_special_tokens|prefix|pretraining_tp|problem_type|reorder_and_upcast_attn|task_specific_params"
    r"|output_router_logits|router_(aux_loss_coef|jitter_noise)|experts_per_token|initial_context_length|tokenizer_class"
    r"|transformers\.js_config|transformers_weights|use_cache|use_flash_attn|use_flash_attention(_2)?"
)
_NEVER_FALSE = ("is_causal", "use_rope")
# null: none, not the default
_NULLABLE = (
    "sliding_window",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "num_key_value_heads",
    "bos_token_id",
)
_ROPE_KINDS: dict[str, Kind] = ROPE_KINDS | {
    "rope_theta": ABOVE_0,
    "rope_type": TEXT,
    "type": TEXT,
    "partial_rotary_factor": _KINDS["partial_rotary_factor"],
    "mscale": number("from 0 to 100", lambda value: 0 <= value <= 100),
    "mscale_all_dim": number("from 0 to 100", lambda value: 0 <= value <= 100),
    "short_factor": ROPE_KINDS["divisors"],
    "long_factor": ROPE_KINDS["divisors"],
    "short_mscale": ABOVE_0,
    "long_mscale": ABOVE_0,
    "llama_4_scaling_beta": ROPE_KINDS["query_beta"],
    "max_position_embeddings": CONFIG_KINDS["max_position_embeddings"],
    "finetuned": FLAG,
}
_PARTIAL_ROPE = ("phi3", "glm4", "stablelm", "gpt_neox")  # families that rotate only the first dimensions of a head
_ROPE_REQUIRED = {  # of each kind of scaling
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
}

_ACTIVATIONS: dict[str, str | None] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    **dict.fromkeys(("gelu_new", "gelu_pytorch_tanh", "gelu_python_tanh", "gelu_fast", "gelu_accurate"), "gelu_tanh"),
}


@dataclass(frozen=True)
class Family:
    """How a family's config.json differs from Llama's. Values are by the names of `ModelConfig` and `_FAMILY_KINDS`."""

    names: Mapping[str, str] = field(default_factory=dict)  # fields of `ModelConfig` -> the family's names of them
    defaults: Mapping[str, Any] = field(default_factory=dict)  # transformers' values of what may be left out
    fixed: Mapping[str, Any] = field(default_factory=dict)  # whatever the file has
    reads: tuple[str, ...] = ()  # keys of `_FAMILY_KINDS`; others are refused
    ignores: tuple[str, ...] = ()  # as `_IGNORED`
    # Names of activations -> ours; None: that of the family's `Block`.
    activations: Mapping[str, str | None] = field(default_factory=lambda: _ACTIVATIONS | {"silu": None})
    pattern: int | None = None  # without layer_types: every so many layers full attention, else a sliding window
    interleaved: bool = False  # RoPE rotates adjacent dimensions together
    qkv_by_head: bool = False  # q, k and v are one matrix, head by head
    computed: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda values: {}


def _qwen(values: Mapping[str, Any]) -> dict[str, Any]:
    """Windows, if any, from layer max_window_layers on."""
    if not values.get("use_sliding_window") or values["sliding_window"] is None:
        return {"sliding_window": None}
    layers = range(values.get("num_hidden_layers", 0))
    windows = [SLIDING_ATTENTION if i >= values["max_window_layers"] else FULL_ATTENTION for i in layers]
    return {"layer_types": values.get("layer_types") or windows}


def _qwen2(values: Mapping[str, Any]) -> dict[str, Any]:
    """Dual chunk attention is plain attention up to the size of a chunk, beyond which it is not supported."""
    context = values.get("max_position_embeddings", 0)
    chunk = checked(values.get("dual_chunk_attention_config", {}), {"chunk_size": _POSITIVE}).get("chunk_size", context)
    return _qwen(values) | {"max_position_embeddings": min(context, chunk) or None}


def _gpt2(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "intermediate_size": values.get("intermediate_size") or 4 * values["hidden_size"],
        "query_pre_attn_scalar": None if values["scale_attn_weights"] else 1.0,
    }


def _window_everywhere(values: Mapping[str, Any]) -> dict[str, Any]:
    kind = FULL_ATTENTION if values.get("sliding_window") is None else SLIDING_ATTENTION
    return {"layer_types": [kind] * values.get("num_hidden_layers", 0)}


def _phi3(values: Mapping[str, Any]) -> dict[str, Any]:
    settings = {**(values.get("rope_scaling") or values.get("rope_parameters") or {})}
    if settings.get("rope_type", settings.get("type")) in ("su", "yarn"):  # older names
        settings["rope_type"] = "longrope"
    return _window_everywhere(values) | {"rope_parameters": settings, "rope_scaling": None}


def _smollm3(values: Mapping[str, Any]) -> dict[str, Any]:
    layers = range(values.get("num_hidden_layers", 0))
    has_rope = values.get("no_rope_layers")  # which the file has as 1
    if has_rope is None:
        has_rope = [(i + 1) % values["no_rope_layer_interval"] != 0 for i in layers]
    without = tuple(i for i, rotated in zip(layers, has_rope, strict=False) if not rotated)
    windowed = values.get("use_sliding_window") and values.get("sliding_window")
    windows = [SLIDING_ATTENTION if windowed and i in without else FULL_ATTENTION for i in layers]
    return {"no_rope_layers": without, "layer_types": values.get("layer_types") or windows}


def _layer_pattern(pattern: int | str, layers: int) -> tuple[str, ...]:
    """pattern: as for `layer_pattern`; or like LLLG, which repeats, and whose last layer has full attention."""
    if isinstance(pattern, str):
        return layer_pattern([pattern[i % len(pattern)] == "L" and i < layers - 1 for i in range(layers)], layers)
    _POSITIVE.check("sliding_window_pattern", pattern)
    return layer_pattern(pattern, layers)


def _exaone4(values: Mapping[str, Any]) -> dict[str, Any]:
    """With windows, the layers that see everything have no RoPE."""
    layers = values.get("num_hidden_layers", 0)
    if values.get("sliding_window") is None:
        return {"layer_types": [FULL_ATTENTION] * layers}
    types = values.get("layer_types") or _layer_pattern(values["sliding_window_pattern"], layers)
    return {"layer_types": types, "no_rope_layers": [i for i, kind in enumerate(types) if kind == FULL_ATTENTION]}


def _qwen3_moe(values: Mapping[str, Any]) -> dict[str, Any]:
    step, dense = values["decoder_sparse_step"], values.get("mlp_only_layers") or ()
    layers = range(values.get("num_hidden_layers", 0))
    without = tuple(i for i in layers if i in dense or not step or (i + 1) % step)
    windowed = values.get("use_sliding_window")
    windows = _window_everywhere(values if windowed else {**values, "sliding_window": None})
    return {"dense_layers": without, **windows}


def _granite(values: Mapping[str, Any]) -> dict[str, Any]:
    return {"query_pre_attn_scalar": 1 / values["attention_multiplier"] ** 2}


_QWEN_WINDOWS = {"sliding_window": 4096, "max_window_layers": 28}
_QWEN_READS = "sliding_window", "use_sliding_window", "max_window_layers"
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
    reads=(
        "query_pre_attn_scalar",
        "sliding_window",
        "rope_local_base_freq",
        "sliding_window_pattern",
        "final_logit_softcapping",
    ),
    activations=_ACTIVATIONS | {"gelu_pytorch_tanh": None},
    pattern=6,
)
_GRANITE = Family(
    defaults={
        "vocab_size": 32_000,
        "max_position_embeddings": 2048,
        "attention_multiplier": 1.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    reads=("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"),
    computed=_granite,
)
_GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_EXPERTS = "num_experts", "num_experts_per_tok"
FAMILIES = {
    "llama": Family(),
    "mistral": Family(
        defaults={
            "num_key_value_heads": 8,
            "sliding_window": 4096,
            "max_position_embeddings": 131_072,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        fixed={"attention_bias": False, "mlp_bias": False},
        reads=("sliding_window",),
        computed=_window_everywhere,
    ),
    "ministral3": Family(
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 262_144,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1_000_000.0,
                "factor": 16.0,
                "original_max_position_embeddings": 16_384,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
            "rms_norm_eps": 1e-5,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        fixed={"attention_bias": False, "mlp_bias": False},
        reads=("sliding_window",),
        computed=_window_everywhere,
    ),
    "phi3": Family(
        defaults={
            "vocab_size": 32_064,
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "bos_token_id": 1,
            "eos_token_id": 32_000,
        },
        fixed={"attention_bias": False, "mlp_bias": False},
        reads=("sliding_window", "original_max_position_embeddings"),
        computed=_phi3,
    ),
    "qwen2": Family(
        defaults=_QWEN_WINDOWS,
        fixed={"attention_bias": True, "attention_output_bias": False, "mlp_bias": False},
        reads=(*_QWEN_READS, "dual_chunk_attention_config"),
        computed=_qwen2,
    ),
    "qwen3": Family(defaults={"head_dim": 128} | _QWEN_WINDOWS, reads=_QWEN_READS, computed=_qwen),
    "qwen3_moe": Family(
        defaults={
            "num_key_value_heads": 4,
            "head_dim": None,
            "max_position_embeddings": 32_768,
            "sliding_window": 4096,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "decoder_sparse_step": 1,
        },
        fixed={"mlp_bias": False},
        reads=(
            *_EXPERTS,
            "norm_topk_prob",
            "moe_intermediate_size",
            "decoder_sparse_step",
            "mlp_only_layers",
            *_QWEN_READS,
        ),
        ignores=("use_qk_norm",),  # which it always does
        computed=_qwen3_moe,
    ),
    "mixtral": Family(
        defaults={
            "num_key_value_heads": 8,
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1_000_000.0,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        fixed={"attention_bias": False, "mlp_bias": False, "norm_topk_prob": True},
        reads=(*_EXPERTS, "sliding_window"),
        computed=_window_everywhere,
    ),
    "granitemoe": replace(
        _GRANITE,
        defaults={**_GRANITE.defaults, "num_experts": 8, "num_experts_per_tok": 2},
        fixed={"mlp_bias": False, "norm_topk_prob": True},
        reads=(*_GRANITE.reads, *_EXPERTS),
    ),
    "olmoe": Family(
        defaults={
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "eos_token_id": 50_279,
        },
        fixed={"mlp_bias": False},
        reads=(*_EXPERTS, "norm_topk_prob"),
    ),
    "gpt_oss": Family(
        defaults={
            "head_dim": 64,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150_000.0,
            "rope_parameters": _GPT_OSS_ROPE,
            "sliding_window": 128,
            "num_experts": 128,
            "num_experts_per_tok": 4,
            "attention_bias": True,
        },
        fixed={"mlp_bias": True, "norm_topk_prob": True, "swiglu_alpha": 1.702, "swiglu_limit": CLAMP},
        reads=(*_EXPERTS, "sliding_window"),
        activations={"silu": None},
        pattern=2,
    ),
    "gemma2": Family(
        names={"hidden_act": "hidden_activation"},
        defaults={
            "vocab_size": 256_000,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "max_position_embeddings": 8192,
            "hidden_act": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "tie_word_embeddings": True,
            "bos_token_id": 2,
            "eos_token_id": 1,
        },
        reads=("query_pre_attn_scalar", "sliding_window", "attn_logit_softcapping", "final_logit_softcapping"),
        ignores=("sliding_window_size",),
        activations=_ACTIVATIONS | {"gelu_pytorch_tanh": None},
        pattern=2,
    ),
    "gemma3": _GEMMA3,
    "gemma3_text": _GEMMA3,
    "olmo2": Family(defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 2048, "eos_token_id": 50_279}),
    "olmo3": Family(
        defaults={
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 2048,
            "rope_theta": 500_000.0,
            "sliding_window": 4096,
            "eos_token_id": 50_279,
        },
        reads=("sliding_window",),
        pattern=4,
        computed=lambda values: {"rope_local_base_freq": values["rope_theta"]},
    ),
    "smollm3": Family(
        defaults={
            "num_key_value_heads": 4,
            "max_position_embeddings": 32_768,
            "rope_theta": 2_000_000.0,
            "no_rope_layer_interval": 4,
            "tie_word_embeddings": True,
            "bos_token_id": 128_000,
            "eos_token_id": 128_001,
        },
        reads=("no_rope_layers", "no_rope_layer_interval", "sliding_window", "use_sliding_window", "max_window_layers"),
        computed=_smollm3,
    ),
    "granite": _GRANITE,
    "glm4": Family(
        defaults={
            "num_key_value_heads": 2,
            "head_dim": 128,
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1.5625e-07,
            "partial_rotary_factor": 0.5,
            "attention_bias": True,
            "eos_token_id": [151_329, 151_336, 151_338],
        },
        fixed={"attention_output_bias": False, "mlp_bias": False},
        interleaved=True,
    ),
    "exaone4": Family(
        defaults={
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 2048,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
            "bos_token_id": 0,
            "eos_token_id": 2,
        },
        fixed={"attention_bias": False, "mlp_bias": False},
        reads=("sliding_window", "sliding_window_pattern"),
        computed=_exaone4,
    ),
    "starcoder2": Family(
        names={"rms_norm_eps": "norm_epsilon", "attention_bias": "use_bias"},
        defaults={
            "num_key_value_heads": 2,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "attention_bias": True,
            "hidden_act": "gelu_pytorch_tanh",
            "tie_word_embeddings": True,
            "bos_token_id": 50_256,
            "eos_token_id": 50_256,
        },
        fixed={"norm_bias": True},
        reads=("sliding_window",),
        ignores=(
            "attention_softmax_in_fp32",
            "layer_norm_epsilon",
            "mlp_type",
            "norm_type",
            "scale_attention_softmax_in_fp32",
            "scale_attn_weights",
        ),
        activations=_ACTIVATIONS,
        computed=lambda values: _window_everywhere(values) | {"mlp_bias": values["attention_bias"]},
    ),
    "stablelm": Family(
        names={"rms_norm_eps": "layer_norm_eps", "attention_bias": "use_qkv_bias"},
        defaults={
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 0.25,
            "bos_token_id": 0,
            "eos_token_id": 0,
        },
        fixed={"norm_bias": True, "mlp_bias": False, "attention_output_bias": False},
    ),
    "gpt_neox": Family(
        names={
            "rms_norm_eps": "layer_norm_eps",
            "rope_theta": "rotary_emb_base",
            "partial_rotary_factor": "rotary_pct",
            "parallel_residual": "use_parallel_residual",
        },
        defaults={
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 0.25,
            "attention_bias": True,
            "parallel_residual": True,
            "hidden_act": "gelu",
            "bos_token_id": 0,
            "eos_token_id": 2,
        },
        fixed={"num_key_value_heads": None, "head_dim": None, "norm_bias": True, "mlp_bias": True},
        reads=("parallel_residual",),
        # The first two are written beside rotary_emb_base and rotary_pct.
        ignores=("rope_theta", "partial_rotary_factor", "num_steps"),
        qkv_by_head=True,
        activations=_ACTIVATIONS,
    ),
    "rope_gpt": Family(activations=_ACTIVATIONS),
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
        reads=("scale_attn_weights", "scale_attn_by_inverse_layer_idx"),
        activations=_ACTIVATIONS,
        computed=_gpt2,
    ),
}


def model_type_of(raw: Mapping[str, Any]) -> Any:
    """That of the text part of a multimodal model, unless its own is a family's."""
    own, text = raw.get("model_type"), raw.get("text_config")
    is_family = isinstance(own, str) and own in FAMILIES
    return own if is_family or not isinstance(text, Mapping) else text.get("model_type", own)


def config_from_hf(raw: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
    """From the contents of `config.json` and, if there is one, `generation_config.json`."""
    own_keys: Set[str] = raw.keys()
    if (text := raw.get("text_config")) is not None:  # of a multimodal model
        OBJECT.check("text_config", text)
        own_keys = text.keys()
        own = {name: value for name, value in raw.items() if value is not None}
        raw = {**text, **own, "model_type": model_type_of(raw)}
    family = FAMILIES.get(str(raw.get("model_type")), FAMILIES["llama"])
    if "num_experts" in family.reads and "num_local_experts" in raw:  # both names are in use
        raw = {"num_experts": raw["num_local_experts"], **raw}
        own_keys = own_keys - {"num_local_experts"}
    kinds = _KINDS | CONFIG_KINDS | {name: _FAMILY_KINDS[name] for name in family.reads}
    names = {ours: family.names.get(ours, ours) for ours in kinds if ours in family.reads or ours not in _FAMILY_KINDS}
    for key in own_keys - {*names.values(), "quantization_config", *family.fixed}:
        if key in family.ignores or _IGNORED.fullmatch(key):
            continue
        if raw[key] is False if key in _NEVER_FALSE else raw[key] and raw[key] != getattr(ModelConfig, key, None):
            of_family = f"is not supported for {raw['model_type']}"
            raise ValueError(f"{key} {short_repr(raw[key])} {of_family}: delete the key if it has no effect")
    checked_values = checked(raw, {theirs: kinds[ours] for ours, theirs in names.items()})
    given = {ours: checked_values[theirs] for ours, theirs in names.items() if theirs in checked_values}
    given |= {name: None for name in _NULLABLE if raw.get(name, 0) is None}
    generation = checked(generation or {}, {"eos_token_id": TOKEN_IDS})
    llama: dict[str, Any] = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": RopeConfig.theta}
    values = llama | {**family.defaults, **given, **family.fixed}
    values |= family.computed(values)
    if missing := [name for name in REQUIRED if values.get(name) is None]:
        raise ValueError(f"config.json lacks {', '.join(missing)}")
    for ours, fixed in family.fixed.items():
        if (asked := raw.get(name := family.names.get(ours, ours))) and fixed is not None and asked != fixed:
            raise ValueError(f"{name} {short_repr(asked)} is not supported for {raw['model_type']}")
    method = values.get("quantization_config", {}).get("quant_method", "unknown")
    if "quantization_config" in values and (values["model_type"], method) != ("gpt_oss", "mxfp4"):
        raise ValueError(
            f"safetensors quantized with {short_repr(method)} are not supported: use the original or a GGUF"
        )
    activation, known = values["hidden_act"], family.activations
    if activation not in known:
        of_family = f"is not supported for {values['model_type']}"
        raise ValueError(f"hidden_act {short_repr(activation)} {of_family}, which takes {', '.join(known)}")
    if family.pattern is not None and not values.get("layer_types"):
        pattern = values.get("sliding_window_pattern", values.get("_sliding_window_pattern", family.pattern))
        _POSITIVE.check("sliding_window_pattern", pattern)
        values["layer_types"] = layer_pattern(pattern, values["num_hidden_layers"])
    values |= {
        "num_key_value_heads": values.get("num_key_value_heads") or values["num_attention_heads"],
        "hidden_act": known[activation],
        "layer_types": tuple(values.get("layer_types") or ()),
        "no_rope_layers": tuple(values.get("no_rope_layers") or ()),
        "eos_token_ids": unique_ids(values.get("eos_token_id"), generation.get("eos_token_id")),
    }
    names_of_fields = [each.name for each in fields(ModelConfig)]
    given = {name: values[name] for name in names_of_fields if values.get(name) is not None}
    return ModelConfig(**given | _ropes(values))


def _ropes(values: Mapping[str, Any]) -> dict[str, Any]:
    """The RoPE of all layers, or that of full and that of sliding layers; and how many positions it is made for."""
    if values["rope_theta"] is None:
        return {"rope": None}  # learned positions
    settings, scaling = values.get("rope_parameters") or {}, values.get("rope_scaling") or {}
    by_type = checked(settings, {FULL_ATTENTION: OBJECT, SLIDING_ATTENTION: OBJECT})
    settings = {**by_type.get(FULL_ATTENTION, {}), **scaling} if by_type else scaling or settings
    found = rope_from_hf(settings, values)
    if (theta := values.get("rope_local_base_freq")) is not None:
        local = by_type.get(SLIDING_ATTENTION) or {}
        found["local_rope"] = rope_from_hf(local, {**values, "rope_theta": theta})["rope"]
    return found


def rope_from_hf(settings: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `ModelConfig`, from `rope_parameters` or the older `rope_scaling`. values: of `config_from_hf`."""
    unknown = [key for key in settings if settings[key] and key not in _ROPE_KINDS]
    settings = checked(settings, _ROPE_KINDS)
    scaling, context = settings.get("rope_type", settings.get("type", "default")), values["max_position_embeddings"]
    if scaling not in _ROPE_REQUIRED:
        raise ValueError(f"RoPE scaling {short_repr(scaling)} is not supported: only {', '.join(_ROPE_REQUIRED)} are")
    if missing := [name for name in _ROPE_REQUIRED[scaling] if name not in settings]:
        raise ValueError(f"{scaling} RoPE scaling lacks {', '.join(missing)}")
    if scaling == "dynamic":  # the same up to max_position_embeddings, beyond which theta would grow with the text
        scaling = "default"
    if (beta := settings.get("llama_4_scaling_beta")) and values["model_type"] != "ministral3":
        unknown.append("llama_4_scaling_beta")
    head_dim = values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"]
    dim = int(head_dim * settings.get("partial_rotary_factor", values.get("partial_rotary_factor", 1.0)))
    if dim < head_dim and values["model_type"] not in _PARTIAL_ROPE:
        unknown.append("partial_rotary_factor")
    if unknown:
        raise ValueError(f"{', '.join(map(short_repr, unknown))} of RoPE is not supported for {values['model_type']}")
    original = values.get("original_max_position_embeddings", settings.get("original_max_position_embeddings", context))
    given: dict[str, Any] = {
        "theta": float(settings.get("rope_theta", values["rope_theta"])),
        "dim": dim if dim < head_dim else None,
        "query_beta": beta or 0.0,
    }
    if beta or scaling in ("llama3", "yarn"):
        given["original_max_position_embeddings"] = original
    given |= {name: settings[name] for name in _ROPE_REQUIRED[scaling] if name in ROPE_KINDS}
    if scaling == "yarn":
        given |= {name: settings[name] for name in ("beta_fast", "beta_slow", "truncate") if name in settings}
        given["attention_factor"] = settings.get("attention_factor", yarn_factor(settings))
    elif scaling == "longrope":
        factor = settings.get("factor", context / original)
        spread = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
        spread = settings.get("attention_factor", spread)
        short, long = (
            RopeConfig(
                **given,
                attention_factor=settings.get(f"{kind}_mscale", spread),
                divisors=tuple(settings[f"{kind}_factor"]),
            )
            for kind in ("short", "long")
        )
        return long_rope_fields(short, long, original, context)
    return {"rope": RopeConfig(scaling=scaling, **given)}


def long_rope_fields(short: RopeConfig, long: RopeConfig, original: int, context: int) -> dict[str, Any]:
    """Fields of `ModelConfig` for LongRoPE. original, context: positions of the short and of the long factors."""
    extended = {"long_rope": long, "long_context": context} if context > original else {}
    return {"rope": short, "max_position_embeddings": original, **extended}


def yarn_factor(settings: Mapping[str, Any]) -> float:
    """What cos and sin are multiplied by, unless the file says it."""

    def grown(mscale: float) -> float:
        return 0.1 * mscale * math.log(settings["factor"]) + 1 if settings["factor"] > 1 else 1.0

    mscale, all_dim = settings.get("mscale"), settings.get("mscale_all_dim")
    return grown(mscale) / grown(all_dim) if mscale and all_dim else grown(1.0)


def unique_ids(*ids: int | list[int] | None) -> tuple[int, ...]:
    """Token ids in order, without duplicates, from single ids, lists and None."""
    flat = [i for entry in ids if entry is not None for i in (entry if isinstance(entry, list) else [entry])]
    return tuple(dict.fromkeys(flat))
