"""Models with random weights in the shapes of published ones, and the bytes and FLOP of a step and of a prompt.

It imports only torch and infer, because `gpu_start.py` times a fresh process that imports it.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch

from infer.config import ModelConfig
from infer.loader.hf_config import config_from_hf
from infer.models.common import Decoder
from infer.models.registry import build_model

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
GEMMA3_ROPES = {
    "full_attention": {"rope_type": "default", "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
TINY: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}

# As in config.json, so that infer and transformers read the same.
SHAPES: dict[str, dict[str, Any]] = {
    "llama-1b": {
        "model_type": "llama",
        "vocab_size": 128_256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_parameters": LLAMA3_ROPE,
        "tie_word_embeddings": True,
    },
    "qwen3-0.6b": {
        "model_type": "qwen3",
        "vocab_size": 151_936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40_960,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "tie_word_embeddings": True,
    },
    "qwen3-1.7b": {
        "model_type": "qwen3",
        "vocab_size": 151_936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40_960,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "tie_word_embeddings": True,
    },
    "gemma3-1b": {
        "model_type": "gemma3_text",
        "vocab_size": 262_144,
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_hidden_layers": 26,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-6,
        "rope_parameters": GEMMA3_ROPES,
        "query_pre_attn_scalar": 256,
        "sliding_window": 512,
        "tie_word_embeddings": True,
    },
    "llama-8b": {
        "model_type": "llama",
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_parameters": LLAMA3_ROPE | {"factor": 8.0},
        "tie_word_embeddings": False,
    },
    "qwen3-30b-a3b-8": {  # 8 of its 48 layers
        "model_type": "qwen3_moe",
        "vocab_size": 151_936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 8,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "max_position_embeddings": 40_960,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "tie_word_embeddings": False,
    },
    "tiny": TINY | {"model_type": "llama", "rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True},
    "tiny-qwen3": TINY
    | {
        "model_type": "qwen3",
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "tie_word_embeddings": False,
    },
    "tiny-gemma3": TINY
    | {
        "model_type": "gemma3_text",
        "rope_parameters": GEMMA3_ROPES,
        "query_pre_attn_scalar": 16,
        "sliding_window": 8,
        "sliding_window_pattern": 2,
        "tie_word_embeddings": True,
    },
}

SAMPLING: dict[str, Any] = {
    "temperature": 0.8,
    "top_k": 50,
    "top_p": 0.95,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.5,
    "seed": 1,
}


class NoText:
    """A tokenizer whose tokens all decode to one letter."""

    def decode(self, token_ids: list[int]) -> str:
        return "x" * len(token_ids)


def build(shape: str, device: torch.device, dtype: torch.dtype) -> Decoder:
    """Build a model on the device, with the same random weights each time; norms have unit weights."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = build_model(config_from_hf(SHAPES[shape]))
    finally:
        torch.set_default_dtype(before)
    generator = torch.Generator(device).manual_seed(0)
    for parameter in model.requires_grad_(False).parameters():
        if parameter.dim() > 1:
            parameter.normal_(std=0.02, generator=generator)
    return model.eval()


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def random_prompt(config: ModelConfig, length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(config.vocab_size, (length,), generator=generator).tolist()
    return ids


def lengths(rows: int, least: int, most: int) -> list[int]:
    """Evenly spaced lengths from least to most; the middle for a single row."""
    return [least + (most - least) * (2 * i + 1) // (2 * rows) for i in range(rows)]


def step_weight_bytes(model: Decoder) -> int:
    """Bytes of weights that a decode step of one row reads: of an embedding that is not tied to the head, about a row;
    of experts, those that a token goes through.
    """
    config, read = model.config, 0.0
    for name, parameter in model.named_parameters():
        share = config.num_experts_per_tok / config.num_experts if ".experts." in name else 1
        read += parameter.nbytes * share
    return int(read) if config.tie_word_embeddings else int(read) - model.embed_tokens.weight.nbytes


def cache_bytes(config: ModelConfig, keys: int, element_size: int) -> int:
    """Bytes of keys and values that a query reads in all layers, at `keys` positions including its own."""
    seen = sum(min(keys, config.window(i) or keys) for i in range(config.num_hidden_layers))
    return seen * 2 * config.num_key_value_heads * config.computed_head_dim * element_size


def mean_cache_bytes(config: ModelConfig, prompt_tokens: int, new_tokens: int, element_size: int) -> float:
    """Mean over the decode steps of a generation. The first token comes from the prefill."""
    keys = range(prompt_tokens + 1, prompt_tokens + new_tokens)
    return statistics.fmean(cache_bytes(config, count, element_size) for count in keys)


def prefill_flops(model: Decoder, tokens: int) -> int:
    """GEMMs of the layers for all tokens, causal attention, and the head for one position."""
    config = model.config
    matrices = sum(weight.numel() for weight in model.layers.parameters() if weight.dim() > 1)
    windows = [min(tokens, config.window(i) or tokens) for i in range(config.num_hidden_layers)]
    pairs = sum(window * tokens - window * window // 2 for window in windows)  # n * n / 2 where all is seen
    attention = 2 * 2 * pairs * config.num_attention_heads * config.computed_head_dim
    return 2 * matrices * tokens + attention + 2 * config.vocab_size * config.hidden_size
