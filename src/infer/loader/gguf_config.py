"""The config that the metadata of a GGUF file tells."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from infer.config import CONFIG_KINDS, MAX_LAYERS, ModelConfig, RopeConfig, layer_pattern
from infer.loader.hf_config import unique_ids
from infer.values import (
    ABOVE_0,
    ANY,
    FLAG,
    TEXT,
    TOKEN_ID,
    TOKEN_IDS,
    Kind,
    checked,
    either,
    list_of,
    shown,
    whole,
)


def config_from_gguf(
    metadata: Mapping[str, Any], tensor_names: Collection[str], rope_divisors: tuple[float, ...] = ()
) -> ModelConfig:
    """From a GGUF file's metadata; what it leaves to its tensors (biases, a head of its own) from their names."""
    arch = metadata["general.architecture"]
    given = checked(metadata, {f"{arch}.{key}": kind for key, kind in _KINDS.items()})
    vocabulary = checked(metadata, TOKENIZER_KINDS)

    def get(key: str, default: Any = None) -> Any:
        value = given.get(f"{arch}.{key}", default)
        if value is None:
            raise ValueError(f"GGUF metadata lacks {arch}.{key}")
        return value

    heads, hidden = get("attention.head_count"), get("embedding_length")
    head_dim = get("attention.key_length", hidden // heads)
    if get("rope.dimension_count", head_dim) != head_dim:
        raise ValueError(f"RoPE over {get('rope.dimension_count')} of {head_dim} dimensions is not supported")
    factor = get("rope.scaling.factor", 1.0)
    scaling = get("rope.scaling.type", "none" if factor == 1 else "linear")
    if scaling not in ("none", "linear"):
        raise ValueError(f"RoPE scaling {shown(scaling)} is not supported in GGUF files: only linear is")
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if get(name, 0):
            raise ValueError(f"{arch}.{name} {shown(get(name))} is not supported")
    learned = arch == "gpt2"
    window = get("attention.sliding_window", 0)
    layers = get("block_count")
    local_rope = layer_types = scalar = None
    if arch == "gemma3":
        # Written by newer converters only; llama.cpp takes these values where they are missing.
        local_rope = RopeConfig(theta=get("rope.freq_base_swa", 10_000.0))
        layer_types = layer_pattern(get("attention.sliding_window_pattern", 6), layers)
        # Nor is the scale there: the 27B alone, known by its depth, does not take head_dim.
        scalar = hidden / heads if layers == 62 else None
    return ModelConfig(
        model_type=arch,
        vocab_size=get("vocab_size", len(vocabulary.get(f"{TOKENIZER}tokens", ())) or None),
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
        bos_token_id=vocabulary.get(f"{TOKENIZER}bos_token_id"),
        eos_token_ids=_end_of_text(vocabulary),
    )


def _end_of_text(vocabulary: Mapping[str, Any]) -> tuple[int, ...]:
    """What ends a text: the ids that are given, and marks for the end of a turn, which many files do not give."""
    tokens, types = (vocabulary.get(f"{TOKENIZER}{name}", []) for name in ("tokens", "token_type"))
    marks = [tokens.index(mark) for mark in _END_OF_TURN if mark in tokens]
    given = (vocabulary.get(f"{TOKENIZER}{name}") for name in _GIVEN)
    return unique_ids(*given, [i for i in marks if i < len(types) and types[i] != _NORMAL_TOKEN])


def sampling_from_gguf(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """By the names of generation_config.json. A file that gives a temperature asks for sampling."""
    given = {name: metadata.get(f"{SAMPLING}{key}") for key, name in _SAMPLING_NAMES.items()}
    return given | {"do_sample": given["temperature"] is not None}


_GIVEN = ("eos_token_id", "eos_token_ids", "eot_token_id", "eom_token_id")
_END_OF_TURN = ("<end_of_turn>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>")
_NORMAL_TOKEN = 1

# What is read of the metadata behind the architecture's name, and what each value has to be.
_KINDS: dict[str, Kind] = {
    "vocab_size": CONFIG_KINDS["vocab_size"],
    "embedding_length": CONFIG_KINDS["hidden_size"],
    "feed_forward_length": CONFIG_KINDS["intermediate_size"],
    "block_count": CONFIG_KINDS["num_hidden_layers"],
    "context_length": CONFIG_KINDS["max_position_embeddings"],
    "attention.head_count": CONFIG_KINDS["num_attention_heads"],
    "attention.head_count_kv": CONFIG_KINDS["num_key_value_heads"],
    "attention.key_length": CONFIG_KINDS["head_dim"],
    "attention.layer_norm_epsilon": CONFIG_KINDS["rms_norm_eps"],
    "attention.layer_norm_rms_epsilon": CONFIG_KINDS["rms_norm_eps"],
    "attention.sliding_window": whole(0, 2**31 - 1),
    "attention.sliding_window_pattern": either(whole(1, 2**31 - 1), list_of(FLAG, MAX_LAYERS)),
    "rope.dimension_count": CONFIG_KINDS["head_dim"],
    "rope.freq_base": ABOVE_0,
    "rope.freq_base_swa": ABOVE_0,
    "rope.scaling.factor": ABOVE_0,
    "rope.scaling.type": TEXT,
    "attn_logit_softcapping": ANY,
    "final_logit_softcapping": ANY,
}
TOKENIZER = "tokenizer.ggml."
# All elements of a GGUF array have one type, so the first tells.
_TEXTS = Kind("a list of texts", lambda value: isinstance(value, list) and isinstance((value or [""])[0], str))
_NUMBERS = Kind(
    "a list of finite numbers", lambda value: not isinstance(value, str) and _are_numbers(np.asarray(value))
)


def _are_numbers(values: np.ndarray) -> bool:
    return values.ndim == 1 and values.dtype.kind in "iuf" and bool(np.isfinite(values).all())


TOKENIZER_KINDS: dict[str, Kind] = {
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
    **{f"{TOKENIZER}{name}": TOKEN_IDS for name in _GIVEN},
}
SAMPLING = "general.sampling."
_SAMPLING_NAMES = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
