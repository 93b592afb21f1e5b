"""The config of a GGUF file, from its metadata."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from infer.config import CONFIG_KINDS, MAX_LAYERS, ModelConfig, RopeConfig, layer_pattern, read_fields
from infer.loader.hf_config import unique_ids
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
    "sliding_window": "attention.sliding_window",
}
_FAMILY_NAMES = {"gpt2": {"rms_norm_eps": "attention.layer_norm_epsilon"}}
_OPTIONAL = ("num_key_value_heads", "head_dim", "sliding_window")
_OTHER_KINDS: dict[str, Kind] = {
    "attention.sliding_window_pattern": either(integer(1, 2**31 - 1), list_of(FLAG, MAX_LAYERS)),
    "rope.dimension_count": CONFIG_KINDS["head_dim"],
    "rope.freq_base": ABOVE_0,
    "rope.freq_base_swa": ABOVE_0,
    "rope.scaling.factor": ABOVE_0,
    "rope.scaling.type": TEXT,
}
_REFUSED = ("attn_logit_softcapping", "final_logit_softcapping")  # unless they are 0

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


def config_from_gguf(
    metadata: Mapping[str, Any], tensor_names: Collection[str], rope_divisors: tuple[float, ...] = ()
) -> ModelConfig:
    """From the metadata and, for biases and an untied head, from the names of the tensors."""
    arch = metadata["general.architecture"]
    names = {ours: f"{arch}.{theirs}" for ours, theirs in (_NAMES | _FAMILY_NAMES.get(arch, {})).items()}
    values = read_fields(metadata, names)
    others = checked(metadata, {f"{arch}.{key}": kind for key, kind in _OTHER_KINDS.items()})
    vocabulary = checked(metadata, _TOKENIZER_KINDS)

    def get(key: str, default: Any = None) -> Any:
        return others.get(f"{arch}.{key}", default)

    if tokens := vocabulary.get(f"{TOKENIZER}tokens"):
        values.setdefault("vocab_size", len(tokens))
    if missing := [name for ours, name in names.items() if ours not in values and ours not in _OPTIONAL]:
        raise ValueError(f"GGUF metadata lacks {', '.join(missing)}")
    for name in _REFUSED:
        if value := metadata.get(f"{arch}.{name}"):
            raise ValueError(f"{arch}.{name} {short_repr(value)} is not supported")
    heads, hidden, layers = (values[name] for name in ("num_attention_heads", "hidden_size", "num_hidden_layers"))
    head_dim = values.setdefault("head_dim", hidden // heads)
    if get("rope.dimension_count", head_dim) != head_dim:
        raise ValueError(f"RoPE over {get('rope.dimension_count')} of {head_dim} dimensions is not supported")
    factor = get("rope.scaling.factor", 1.0)
    scaling = get("rope.scaling.type", "none" if factor == 1 else "linear")
    if scaling not in ("none", "linear"):
        raise ValueError(f"RoPE scaling {short_repr(scaling)} is not supported in GGUF files: only linear is")
    theta, scaling = get("rope.freq_base", RopeConfig.theta), "linear" if scaling == "linear" else "default"
    values |= {
        "model_type": arch,
        "num_key_value_heads": values.get("num_key_value_heads", heads),
        "rope": RopeConfig(theta=theta, scaling=scaling, factor=factor, divisors=rope_divisors),
        "sliding_window": values.get("sliding_window") or None,
        "attention_bias": any(f"blk.0.{name}.bias" in tensor_names for name in ("attn_q", "attn_qkv")),
        "attention_output_bias": "blk.0.attn_output.bias" in tensor_names,
        "mlp_bias": "blk.0.ffn_down.bias" in tensor_names,
        "norm_bias": "output_norm.bias" in tensor_names,
        "tie_word_embeddings": "output.weight" not in tensor_names,
        "bos_token_id": vocabulary.get(f"{TOKENIZER}bos_token_id"),
        "eos_token_ids": _end_of_text(vocabulary),
    }
    if arch == "gpt2":
        values |= {"rope": None, "hidden_act": "gelu_tanh"}
    elif arch == "gemma3":
        values |= {
            # Written by newer converters only; these are llama.cpp's defaults.
            "local_rope": RopeConfig(theta=get("rope.freq_base_swa", 10_000.0)),
            "layer_types": layer_pattern(get("attention.sliding_window_pattern", 6), layers),
            # The scale is not stored: only the 27B, known by its depth, does not use head_dim.
            "query_pre_attn_scalar": hidden / heads if layers == 62 else None,
        }
    return ModelConfig(**values)


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
