"""The config of a GGUF file, from its metadata, as llama.cpp's converter writes it."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from infer.config import (
    CONFIG_KINDS,
    FULL_ATTENTION,
    MAX_LAYERS,
    ROPE_KINDS,
    ModelConfig,
    RopeConfig,
    layer_pattern,
    read_fields,
)
from infer.loader.hf_config import long_rope_fields, unique_ids, yarn_factor
from infer.values import ABOVE_0, FLAG, TEXT, TOKEN_ID, TOKEN_IDS, Kind, checked, either, integer, list_of, short_repr

# Fields of `ModelConfig` -> the metadata, after the prefix of the architecture.
_NAMES = {
    "vocab_size": "vocab_size",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "max_position_embeddings": "context_length",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}
_REQUIRED = _NAMES.keys() - {"num_key_value_heads", "head_dim"}
# Other metadata that is read for any architecture.
_OTHER_KINDS: dict[str, Kind] = {
    "attention.value_length": CONFIG_KINDS["head_dim"],
    "rope.dimension_count": CONFIG_KINDS["head_dim"],
    "rope.freq_base": ABOVE_0,
    "rope.scale_linear": ABOVE_0,  # the older name of rope.scaling.factor
    "rope.scaling.type": TEXT,
    "rope.scaling.factor": ABOVE_0,
    "rope.scaling.original_context_length": CONFIG_KINDS["max_position_embeddings"],
    "rope.scaling.attn_factor": ABOVE_0,
    "rope.scaling.yarn_attn_factor": ABOVE_0,
    "rope.scaling.yarn_beta_fast": ABOVE_0,
    "rope.scaling.yarn_beta_slow": ABOVE_0,
    "rope.scaling.yarn_log_multiplier": ROPE_KINDS["query_beta"],
}
# What only architectures read that say so (`Architecture.reads`).
_FAMILY_KINDS: dict[str, Kind] = {
    "attention.scale": ABOVE_0,
    "attention.sliding_window_pattern": either(integer(1, 2**31 - 1), list_of(FLAG, MAX_LAYERS)),
    "attention.temperature_scale": ROPE_KINDS["query_beta"],
    "rope.freq_base_swa": ABOVE_0,
}
_ONLY = {"attention.causal": True, "rope.scaling.yarn_ext_factor": 1.0}  # values that are supported
# Without an effect on what a model computes; any other unknown key of the architecture that is set is refused.
_IGNORED = re.compile(r"tensor_data_layout|pooling_type|use_parallel_residual|rope\.scaling\.finetuned")
SHORT_FACTORS, LONG_FACTORS = "rope_factors_short.weight", "rope_factors_long.weight"  # of LongRoPE

TOKENIZER = "tokenizer.ggml."
_END_TOKENS = ("eos_token_id", "eos_token_ids", "eot_token_id", "eom_token_id")
_END_OF_TURN = (
    "<end_of_turn>",
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|return|>",
    "<|call|>",
    "[|endofturn|]",
)
_NORMAL_TOKEN = 1


def _are_numbers(values: np.ndarray) -> bool:
    return values.ndim == 1 and values.dtype.kind in "iuf" and bool(np.isfinite(values).all())


# All elements of a GGUF array have one type, so the first suffices.
_TEXTS = Kind("a list of strings", lambda value: isinstance(value, list) and isinstance((value or [""])[0], str))
_NUMBERS = Kind(
    "a list of finite numbers", lambda value: not isinstance(value, str) and _are_numbers(np.asarray(value))
)
_TOKENIZER_KINDS: dict[str, Kind] = {
    "tokenizer.chat_template": TEXT,
    f"{TOKENIZER}model": TEXT,
    f"{TOKENIZER}pre": TEXT,
    f"{TOKENIZER}tokens": _TEXTS,
    f"{TOKENIZER}merges": _TEXTS,
    f"{TOKENIZER}token_type": _NUMBERS,
    f"{TOKENIZER}scores": _NUMBERS,
    f"{TOKENIZER}bos_token_id": TOKEN_ID,
    f"{TOKENIZER}unknown_token_id": TOKEN_ID,
    f"{TOKENIZER}add_bos_token": FLAG,
    f"{TOKENIZER}add_space_prefix": FLAG,
    **{f"{TOKENIZER}{name}": TOKEN_IDS for name in _END_TOKENS},
}
_SAMPLING_NAMES = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


@dataclass(frozen=True)
class Architecture:
    """How the metadata of an architecture differs from Llama's."""

    model_type: str
    names: Mapping[str, str] = field(default_factory=dict)  # as `_NAMES`
    reads: tuple[str, ...] = ()  # keys of `_FAMILY_KINDS`; others are refused
    values: Mapping[str, Any] = field(default_factory=dict)  # of `ModelConfig`, unless the metadata has them
    only: Mapping[str, Any] = field(default_factory=dict)  # as `_ONLY`
    pattern: int = 0  # every so many layers have full attention, if there is a window; 0: none
    interleaved: bool = False  # RoPE rotates adjacent rows of q and k together
    partial_rope: bool = False  # it may rotate only the first dimensions of a head
    # That of the sliding layers, from the other and the theta that the file may have for them; None: the same.
    local_rope: Callable[[RopeConfig, float | None], RopeConfig | None] = lambda rope, theta: (
        None if theta is None else replace(rope, theta=theta)
    )
    computed: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda values: {}


def _gemma(layers_of_27b: int) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """The scale is not stored: only the 27B, known by its depth, does not use head_dim."""

    def scalar(values: Mapping[str, Any]) -> dict[str, Any]:
        is_27b = values["num_hidden_layers"] == layers_of_27b
        return {"query_pre_attn_scalar": values["hidden_size"] / values["num_attention_heads"] if is_27b else None}

    return scalar


def _exaone4(values: Mapping[str, Any]) -> dict[str, Any]:
    """With windows, the layers that see everything have no RoPE."""
    full = [i for i, kind in enumerate(values["layer_types"]) if kind == FULL_ATTENTION]
    return {"no_rope_layers": tuple(full) if values["sliding_window"] else ()}


_WINDOW = {"sliding_window": "attention.sliding_window"}
_WINDOW_READS = "attention.sliding_window_pattern", "rope.freq_base_swa"
_EXPERTS = {"num_experts": "expert_count", "num_experts_per_tok": "expert_used_count"}
_EXPERT_SIZE = {"moe_intermediate_size": "expert_feed_forward_length"}
_LAYER_NORM = {"rms_norm_eps": "attention.layer_norm_epsilon"}
_FINAL_CAP = {"final_logit_softcapping": "final_logit_softcapping"}
_GRANITE = Architecture(
    "granite",
    names={
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "logits_scaling": "logit_scale",
    },
    reads=("attention.scale",),
    only={"rope.scaling.finetuned": True},  # false: no RoPE
    interleaved=True,
)
ARCHITECTURES = {
    "llama": Architecture(
        "llama",
        names=_WINDOW | _EXPERTS,
        interleaved=True,
        computed=lambda values: {"model_type": "mixtral", "norm_topk_prob": True} if values.get("num_experts") else {},
    ),
    "mistral3": Architecture("ministral3", reads=("attention.temperature_scale",), interleaved=True),
    "phi3": Architecture("phi3", names=_WINDOW, partial_rope=True),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "qwen3moe": Architecture("qwen3_moe", names=_EXPERTS | _EXPERT_SIZE, values={"norm_topk_prob": True}),
    "olmoe": Architecture("olmoe", names=_EXPERTS),
    "gpt-oss": Architecture(
        "gpt_oss",
        names=_EXPERTS | _EXPERT_SIZE | _WINDOW,
        reads=_WINDOW_READS,
        values={"norm_topk_prob": True},
        pattern=2,
        computed=lambda values: {"rope": replace(values["rope"], truncate=False)},  # which is not stored
    ),
    "gemma2": Architecture(
        "gemma2",
        names=_WINDOW | _FINAL_CAP | {"attn_logit_softcapping": "attn_logit_softcapping"},
        reads=_WINDOW_READS,
        values={"sliding_window": 4096, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        pattern=2,
        computed=_gemma(46),
    ),
    "gemma3": Architecture(
        "gemma3",
        names=_WINDOW | _FINAL_CAP,
        reads=_WINDOW_READS,
        pattern=6,
        local_rope=lambda rope, theta: RopeConfig(theta or 10_000.0),
        computed=_gemma(62),
    ),
    "olmo2": Architecture(
        "olmo2",
        names=_WINDOW,
        reads=_WINDOW_READS,
        pattern=4,
        local_rope=lambda rope, theta: RopeConfig(theta or rope.theta),
        computed=lambda values: {"model_type": "olmo3"} if values["sliding_window"] else {},
    ),
    "smollm3": Architecture(
        "smollm3",
        interleaved=True,
        computed=lambda values: {"no_rope_layers": tuple(range(3, values["num_hidden_layers"], 4))},
    ),
    "granite": _GRANITE,
    "granitemoe": replace(
        _GRANITE,
        model_type="granitemoe",
        names={**_GRANITE.names, **_EXPERTS},
        values={"norm_topk_prob": True},
    ),
    "glm4": Architecture("glm4", interleaved=True, partial_rope=True),
    "exaone4": Architecture("exaone4", names=_WINDOW, reads=_WINDOW_READS, pattern=4, computed=_exaone4),
    "starcoder2": Architecture("starcoder2", names=_LAYER_NORM | _WINDOW, values={"hidden_act": "gelu_tanh"}),
    "stablelm": Architecture("stablelm", names=_LAYER_NORM, partial_rope=True),
    "gptneox": Architecture(
        "gpt_neox",
        names=_LAYER_NORM | {"parallel_residual": "use_parallel_residual"},
        values={"parallel_residual": True, "hidden_act": "gelu"},
        partial_rope=True,
    ),
    "gpt2": Architecture("gpt2", names=_LAYER_NORM, values={"rope": None, "hidden_act": "gelu_tanh"}),
}


def architecture_of(metadata: Mapping[str, Any]) -> Architecture:
    arch = metadata.get("general.architecture")
    if not isinstance(arch, str) or arch not in ARCHITECTURES:
        supported = ", ".join(sorted(ARCHITECTURES))
        raise ValueError(f"architecture {short_repr(arch)} is not supported; supported: {supported}")
    return ARCHITECTURES[arch]


def config_from_gguf(
    metadata: Mapping[str, Any],
    tensor_names: Collection[str],
    rope_divisors: tuple[float, ...] = (),
    long_divisors: tuple[float, ...] = (),
) -> ModelConfig:
    """From the metadata and, for biases and an untied head, from the names of the tensors.

    rope_divisors: of the tensor for llama3 scaling, or LongRoPE's for its original context; long_divisors: beyond it.
    """
    family, arch = architecture_of(metadata), metadata["general.architecture"]
    names = {ours: f"{arch}.{theirs}" for ours, theirs in (_NAMES | dict(family.names)).items()}
    kinds = {f"{arch}.{key}": kind for key, kind in _OTHER_KINDS.items()}
    kinds |= {f"{arch}.{key}": _FAMILY_KINDS[key] for key in family.reads}
    _refuse_others(metadata, arch, {*names.values(), *kinds}, _ONLY | dict(family.only))
    values = dict(family.values) | read_fields(metadata, names)
    others, vocabulary = checked(metadata, kinds), checked(metadata, _TOKENIZER_KINDS)

    def get(key: str, default: Any = None) -> Any:
        return others.get(f"{arch}.{key}", default)

    if tokens := vocabulary.get(f"{TOKENIZER}tokens"):
        values.setdefault("vocab_size", len(tokens))
    if missing := [name for ours, name in names.items() if ours in _REQUIRED and ours not in values]:
        raise ValueError(f"GGUF metadata lacks {', '.join(missing)}")
    heads, layers = values["num_attention_heads"], values["num_hidden_layers"]
    head_dim = values.setdefault("head_dim", values["hidden_size"] // heads)
    if (value_length := get("attention.value_length", head_dim)) != head_dim:
        raise ValueError(f"{arch}.attention.value_length {value_length} is not supported: keys have length {head_dim}")
    window = values.get("sliding_window") or None
    pattern = get("attention.sliding_window_pattern", family.pattern or layers + 1)
    biases = {
        name
        for name in ("attn_q", "attn_qkv", "attn_output", "ffn_down", "ffn_down_exps")
        if f"blk.0.{name}.bias" in tensor_names
    }
    attention_bias, output_bias = not biases.isdisjoint(("attn_q", "attn_qkv")), "attn_output" in biases
    values |= {
        "model_type": family.model_type,
        "num_key_value_heads": values.get("num_key_value_heads", heads),
        "sliding_window": window,
        "layer_types": layer_pattern(pattern, layers) if window else (FULL_ATTENTION,) * layers,
        "attention_bias": attention_bias,
        "attention_output_bias": None if output_bias == attention_bias else output_bias,
        "mlp_bias": not biases.isdisjoint(("ffn_down", "ffn_down_exps")),
        "norm_bias": "output_norm.bias" in tensor_names,
        "tie_word_embeddings": "output.weight" not in tensor_names,
        "bos_token_id": vocabulary.get(f"{TOKENIZER}bos_token_id"),
        "eos_token_ids": _end_of_text(vocabulary),
    }
    if (scale := get("attention.scale")) is not None:
        values["query_pre_attn_scalar"] = 1 / scale**2
    if "rope" not in values:
        is_long = SHORT_FACTORS in tensor_names
        values["rope"] = rope = _rope(family, arch, values, get, rope_divisors, is_long)
        values["local_rope"] = family.local_rope(rope, get("rope.freq_base_swa")) if window else None
        if is_long:
            long = replace(rope, divisors=long_divisors)
            context = values["max_position_embeddings"] if long_divisors else 0
            values |= long_rope_fields(rope, long, _original_context(values, get), context)
    return ModelConfig(**values | family.computed(values))


def _refuse_others(metadata: Mapping[str, Any], arch: str, known: Collection[str], only: Mapping[str, Any]) -> None:
    for key, value in metadata.items():
        name = key.removeprefix(f"{arch}.")
        if name == key or key in known:
            continue
        is_set = any(value) if isinstance(value, list | np.ndarray) else value
        if value != only[name] if name in only else is_set and not _IGNORED.fullmatch(name):
            raise ValueError(f"{key} {short_repr(value)} is not supported")


def _original_context(values: Mapping[str, Any], get: Callable[..., Any]) -> int:
    context: int = get("rope.scaling.original_context_length", values["max_position_embeddings"])
    return context


def _rope(
    family: Architecture,
    arch: str,
    values: Mapping[str, Any],
    get: Callable[..., Any],
    divisors: tuple[float, ...],
    is_long: bool,
) -> RopeConfig:
    head_dim, factor = values["head_dim"], get("rope.scaling.factor", get("rope.scale_linear"))
    scaling = get("rope.scaling.type", "none" if factor is None or is_long else "linear")
    if scaling not in ("none", "linear", "yarn", "longrope"):
        raise ValueError(f"RoPE scaling {short_repr(scaling)} is not supported: only linear, yarn and longrope are")
    if scaling in ("linear", "yarn") and factor is None:
        raise ValueError(f"GGUF metadata lacks {arch}.rope.scaling.factor")
    if scaling == "longrope" and not is_long:
        raise ValueError(f"longrope RoPE scaling lacks the tensor {SHORT_FACTORS}")
    dim = get("rope.dimension_count", head_dim)
    if dim > head_dim or (dim < head_dim and not family.partial_rope):
        raise ValueError(f"RoPE over {dim} of {head_dim} dimensions is not supported for {arch}")
    given = {
        "theta": get("rope.freq_base", RopeConfig.theta),
        "dim": dim if dim < head_dim else None,
        "divisors": divisors,
        "attention_factor": get("rope.scaling.attn_factor", 1.0),
        "query_beta": get("attention.temperature_scale", 0.0),
    }
    if scaling == "yarn" or given["query_beta"]:
        given["original_max_position_embeddings"] = _original_context(values, get)
    if scaling in ("linear", "yarn"):
        given |= {"scaling": scaling, "factor": factor}
    if scaling == "yarn":
        # mscale is not stored: llama.cpp, too, takes it for 1.
        settings = {"factor": factor, "mscale": 1.0, "mscale_all_dim": get("rope.scaling.yarn_log_multiplier")}
        given["attention_factor"] *= get("rope.scaling.yarn_attn_factor", yarn_factor(settings))
        for name in ("beta_fast", "beta_slow"):
            given[name] = get(f"rope.scaling.yarn_{name}", getattr(RopeConfig, name))
    return RopeConfig(**given)


def _end_of_text(vocabulary: Mapping[str, Any]) -> tuple[int, ...]:
    """The ids in the metadata, and end-of-turn tokens, which many files leave out."""
    tokens, types = (vocabulary.get(f"{TOKENIZER}{name}", []) for name in ("tokens", "token_type"))
    # In gpt-oss, which has <|return|>, <|end|> is the end of a message of several.
    marks = [tokens.index(m) for m in _END_OF_TURN if m in tokens and not (m == "<|end|>" and "<|return|>" in tokens)]
    given = (vocabulary.get(f"{TOKENIZER}{name}") for name in _END_TOKENS)
    return unique_ids(*given, [i for i in marks if i < len(types) and types[i] != _NORMAL_TOKEN])


def sampling_from_gguf(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """By the names of generation_config.json. A file with a temperature asks for sampling."""
    given = {name: metadata.get(f"general.sampling.{key}") for key, name in _SAMPLING_NAMES.items()}
    return given | {"do_sample": given["temperature"] is not None}
