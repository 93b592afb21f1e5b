"""Tiny random models of every family."""

from __future__ import annotations

from typing import Any

import torch

from infer import ModelConfig
from infer.config import FULL_ATTENTION, SLIDING_ATTENTION, RopeConfig
from infer.models.common import Decoder
from infer.models.registry import build_model

EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2}
# What a family's tiny model has besides, with a value of its own wherever it could be taken for another.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"head_dim": 12, "rms_norm_eps": 1e-6},
    "gemma3": {
        "num_hidden_layers": 3,
        "head_dim": 12,
        "rms_norm_eps": 1e-6,
        "rope": RopeConfig(1e6, "linear", 4.0),
        "local_rope": RopeConfig(1e4),
        "query_pre_attn_scalar": 10,
        "sliding_window": 4,
        "tie_word_embeddings": True,
    },
    "qwen3_moe": {"head_dim": 12, "moe_intermediate_size": 20, "dense_layers": (0,)} | EXPERTS,
    "gpt_oss": {
        "head_dim": 12,
        "rope": RopeConfig(1e4, "yarn", 4.0, original_max_position_embeddings=16, truncate=False),
        "attention_bias": True,
        "mlp_bias": True,
        "sliding_window": 4,
        "norm_topk_prob": True,
    }
    | EXPERTS,
    "gpt2": {
        "num_key_value_heads": 4,
        "rope": None,
        "attention_bias": True,
        "mlp_bias": True,
        "norm_bias": True,
        "tie_word_embeddings": True,
    },
    "gemma2": {
        "head_dim": 12,
        "rms_norm_eps": 1e-6,
        "query_pre_attn_scalar": 10,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 9.0,
        "sliding_window": 4,
        "tie_word_embeddings": True,
    },
    "olmo2": {"rms_norm_eps": 1e-6, "rope": RopeConfig(1e4, "yarn", 4.0, attention_factor=1.2)},
    "exaone4": {"head_dim": 12, "sliding_window": 4, "no_rope_layers": (1,)},
    "granite": {
        "embedding_multiplier": 3.0,
        "query_pre_attn_scalar": 20,
        "residual_multiplier": 0.4,
        "logits_scaling": 0.7,
        "mlp_bias": True,
    },
    "ministral3": {"rope": RopeConfig(1e4, original_max_position_embeddings=2, query_beta=0.1)},
    "gpt_neox": {
        "rope": RopeConfig(dim=4, attention_factor=1.1),
        "attention_bias": True,
        "mlp_bias": True,
        "norm_bias": True,
        "parallel_residual": True,
    },
    "rope_gpt": {"num_key_value_heads": 4, "hidden_act": "gelu", "norm_bias": True, "tie_word_embeddings": True},
}


def make_tiny_config(**changes: Any) -> ModelConfig:
    """A Llama, or another family's model, small enough for a test, with grouped heads."""
    values: dict[str, Any] = {
        "model_type": "llama",
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
    }
    values |= FAMILIES.get(changes.get("model_type", "llama"), {}) | changes
    if "sliding_window" in FAMILIES.get(values["model_type"], {}) and "layer_types" not in changes:
        kinds = (SLIDING_ATTENTION, FULL_ATTENTION) * values["num_hidden_layers"]
        values["layer_types"] = kinds[: values["num_hidden_layers"]]
    return ModelConfig(**values)


def make_tiny_model(seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Decoder:
    """Random weights; large enough that attention is far from uniform and logits are far apart.

    Norms and biases vary too, around what they are made with, so that one left out or misplaced shows.
    """
    generator = torch.Generator().manual_seed(seed)
    model = build_model(make_tiny_config(**changes))
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator) * 0.3
        parameter.data = noise if parameter.dim() > 1 else parameter.data + noise
    return model.eval().requires_grad_(False).to(dtype)
