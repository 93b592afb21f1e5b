"""config.json as models are published, and keys that ask for what is not supported."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from transformers import AutoConfig, PreTrainedConfig

from infer import ModelConfig
from infer.loader.hf_config import FAMILIES, config_from_hf, model_type_of

FULL, SLIDING = "full_attention", "sliding_attention"
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
USUAL = {  # keys of nearly all files
    "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_x.XConfig"},
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-05,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.46.0",
    "use_cache": True,
}


def shape(
    hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocabulary: int, context: int
) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "max_position_embeddings": context,
    }


# By model: its config.json, and what matters of its config: "rope.theta" is that of its RoPE.
PUBLISHED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Llama-3.2-1B": (
        {
            "model_type": "llama",
            **shape(2048, 8192, 16, 32, 8, 128_256, 131_072),
            "architectures": ["LlamaForCausalLM"],
            "attention_bias": False,
            "bos_token_id": 128_000,
            "eos_token_id": [128_001, 128_008, 128_009],
            "head_dim": 64,
            "mlp_bias": False,
            "pretraining_tp": 1,
            "rope_scaling": {"factor": 32.0, "rope_type": "llama3", **LLAMA3},
            "rope_theta": 500_000.0,
            "tie_word_embeddings": True,
        },
        {"rope.scaling": "llama3", "rope.factor": 32.0, "rope.theta": 5e5, "tie_word_embeddings": True},
    ),
    "TinyLlama-1.1B": (
        {
            "model_type": "llama",
            **shape(2048, 5632, 22, 32, 4, 32_000, 2048),
            "bos_token_id": 1,
            "eos_token_id": 2,
            "max_sequence_length": 2048,
            "pretraining_tp": 1,
            "rope_scaling": None,
            "rope_theta": 10_000.0,
            "tie_word_embeddings": False,
        },
        {"head_dim": 64, "rope.scaling": "default", "eos_token_ids": (2,), "tie_word_embeddings": False},
    ),
    "SmolLM2-135M": (
        {
            "model_type": "llama",
            **shape(576, 1536, 30, 9, 3, 49_152, 8192),
            "bos_token_id": 1,
            "eos_token_id": 2,
            "is_llama_config": True,
            "pad_token_id": 2,
            "pretraining_tp": 1,
            "rope_interleaved": False,
            "rope_scaling": None,
            "rope_theta": 100_000,
            "tie_word_embeddings": True,
            "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
        },
        {"head_dim": 64, "rope.theta": 1e5, "tie_word_embeddings": True},
    ),
    "Falcon3-1B": (
        {
            "model_type": "llama",
            **shape(2048, 8192, 18, 8, 4, 131_072, 8192),
            "activation": "swiglu",
            "attention_bias": False,
            "bos_token_id": None,
            "eos_token_id": 11,
            "head_dim": 256,
            "mlp_bias": False,
            "rope_scaling": None,
            "rope_theta": 1_000_042,
            "tie_word_embeddings": False,
        },
        {"head_dim": 256, "rope.theta": 1_000_042.0, "bos_token_id": None, "eos_token_ids": (11,)},
    ),
    "DeepSeek-R1-Distill-Qwen-1.5B": (
        {
            "model_type": "qwen2",
            **shape(1536, 8960, 28, 12, 2, 151_936, 131_072),
            "bos_token_id": 151_643,
            "eos_token_id": 151_643,
            "max_window_layers": 21,
            "rope_theta": 10_000,
            "sliding_window": 4096,
            "tie_word_embeddings": False,
            "use_mrope": False,
            "use_sliding_window": False,
        },
        {"layer_types": (FULL,) * 28, "attention_bias": True, "attention_output_bias": False},
    ),
    "Qwen2.5-0.5B with YaRN": (
        {
            "model_type": "qwen2",
            **shape(896, 4864, 24, 14, 2, 151_936, 32_768),
            "bos_token_id": 151_643,
            "eos_token_id": 151_645,
            "max_window_layers": 21,
            "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32_768, "type": "yarn"},
            "rope_theta": 1_000_000.0,
            "sliding_window": 32_768,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
        },
        {
            "rope.scaling": "yarn",
            "rope.factor": 4.0,
            "rope.attention_factor": pytest.approx(1.1386294),
            "layer_types": (FULL,) * 24,
        },
    ),
    "Qwen2.5-7B-1M": (
        {
            "model_type": "qwen2",
            **shape(3584, 18_944, 28, 28, 4, 152_064, 1_010_000),
            "bos_token_id": 151_643,
            "dual_chunk_attention_config": {
                "chunk_size": 262_144,
                "local_size": 8192,
                "original_max_position_embeddings": 262_144,
            },
            "eos_token_id": 151_645,
            "max_window_layers": 28,
            "rope_theta": 10_000_000.0,
            "sliding_window": 32_768,
            "tie_word_embeddings": False,
            "use_sliding_window": False,
        },
        {"max_position_embeddings": 262_144, "rope.theta": 1e7, "layer_types": (FULL,) * 28},
    ),
    "Mistral-7B-v0.1": (
        {
            "model_type": "mistral",
            **shape(4096, 14_336, 32, 32, 8, 32_000, 32_768),
            "bos_token_id": 1,
            "eos_token_id": 2,
            "rope_theta": 10_000.0,
            "sliding_window": 4096,
            "tie_word_embeddings": False,
        },
        {"layer_types": (SLIDING,) * 32, "sliding_window": 4096},
    ),
    "Mistral-Nemo": (
        {
            "model_type": "mistral",
            **shape(5120, 14_336, 40, 32, 8, 131_072, 1_024_000),
            "bos_token_id": 1,
            "eos_token_id": 2,
            "head_dim": 128,
            "rope_theta": 1_000_000.0,
            "sliding_window": None,
            "tie_word_embeddings": False,
        },
        {"layer_types": (FULL,) * 40, "head_dim": 128},
    ),
    "Mistral-Small-3.1": (
        {
            "model_type": "mistral3",
            "architectures": ["Mistral3ForConditionalGeneration"],
            "image_token_index": 10,
            "multimodal_projector_bias": False,
            "projector_hidden_act": "gelu",
            "spatial_merge_size": 2,
            "text_config": {
                "model_type": "mistral",
                **shape(5120, 32_768, 40, 32, 8, 131_072, 131_072),
                "attention_dropout": 0.0,
                "head_dim": 128,
                "hidden_act": "silu",
                "rms_norm_eps": 1e-05,
                "rope_theta": 1_000_000_000.0,
                "sliding_window": None,
            },
            "vision_config": {"model_type": "pixtral", "hidden_size": 1024},
            "vision_feature_layer": -1,
        },
        {"model_type": "mistral", "head_dim": 128, "rope.theta": 1e9, "layer_types": (FULL,) * 40},
    ),
    "Ministral-3-3B": (
        {
            "model_type": "mistral3",
            "architectures": ["Mistral3ForConditionalGeneration"],
            "dtype": "bfloat16",
            "image_token_index": 10,
            "projector_hidden_act": "gelu",
            "spatial_merge_size": 2,
            "text_config": {
                "model_type": "ministral3",
                **shape(3072, 9216, 26, 32, 8, 131_072, 262_144),
                "attention_dropout": 0.0,
                "head_dim": 128,
                "hidden_act": "silu",
                "initializer_range": 0.02,
                "rms_norm_eps": 1e-05,
                "rope_parameters": {
                    "beta_fast": 32.0,
                    "beta_slow": 1.0,
                    "factor": 16.0,
                    "llama_4_scaling_beta": 0.1,
                    "mscale": 1.0,
                    "mscale_all_dim": 1.0,
                    "original_max_position_embeddings": 16_384,
                    "rope_theta": 1_000_000.0,
                    "rope_type": "yarn",
                    "type": "yarn",
                },
                "sliding_window": None,
                "tie_word_embeddings": True,
                "use_cache": True,
            },
            "vision_config": {"model_type": "pixtral"},
        },
        {
            "model_type": "ministral3",
            "rope.scaling": "yarn",
            "rope.attention_factor": 1.0,
            "rope.query_beta": 0.1,
            "rope.original_max_position_embeddings": 16_384,
            "tie_word_embeddings": True,
        },
    ),
    "Phi-3-mini-4k": (
        {
            "model_type": "phi3",
            **shape(3072, 8192, 32, 32, 32, 32_064, 4096),
            "attention_bias": False,
            "bos_token_id": 1,
            "embd_pdrop": 0.0,
            "eos_token_id": 32_000,
            "original_max_position_embeddings": 4096,
            "pad_token_id": 32_000,
            "resid_pdrop": 0.0,
            "rope_scaling": None,
            "rope_theta": 10_000.0,
            "sliding_window": 2047,
            "tie_word_embeddings": False,
        },
        {"layer_types": (SLIDING,) * 32, "sliding_window": 2047, "rope.divisors": ()},
    ),
    "Phi-3-mini-128k": (
        {
            "model_type": "phi3",
            **shape(3072, 8192, 32, 32, 32, 32_064, 131_072),
            "attention_bias": False,
            "bos_token_id": 1,
            "embd_pdrop": 0.0,
            "eos_token_id": 32_000,
            "original_max_position_embeddings": 4096,
            "resid_pdrop": 0.0,
            "rope_scaling": {"long_factor": [2.0] * 48, "short_factor": [1.5] * 48, "type": "su"},
            "rope_theta": 10_000.0,
            "sliding_window": 262_144,
            "tie_word_embeddings": False,
        },
        {
            "rope.divisors": (1.5,) * 48,
            "rope.attention_factor": pytest.approx(1.1902380),
            "max_position_embeddings": 4096,
            "long_rope.divisors": (2.0,) * 48,
            "long_rope.attention_factor": pytest.approx(1.1902380),
            "long_context": 131_072,
        },
    ),
    "Phi-4": (
        {
            "model_type": "phi3",
            **shape(5120, 17_920, 40, 40, 10, 100_352, 16_384),
            "attention_bias": False,
            "bos_token_id": 100_257,
            "embd_pdrop": 0.0,
            "eos_token_id": 100_265,
            "original_max_position_embeddings": 16_384,
            "pad_token_id": 100_349,
            "resid_pdrop": 0.0,
            "rope_scaling": None,
            "rope_theta": 250_000,
            "sliding_window": None,
            "tie_word_embeddings": False,
        },
        {"layer_types": (FULL,) * 40, "rope.theta": 2.5e5, "max_position_embeddings": 16_384},
    ),
    "Phi-4-mini": (
        {
            "model_type": "phi3",
            **shape(3072, 8192, 32, 24, 8, 200_064, 131_072),
            "attention_bias": False,
            "bos_token_id": 199_999,
            "embd_pdrop": 0.0,
            "eos_token_id": 199_999,
            "full_attn_mod": 1,
            "interpolate_factor": 1,
            "lm_head_bias": False,
            "mlp_bias": False,
            "original_max_position_embeddings": 4096,
            "partial_rotary_factor": 0.75,
            "resid_pdrop": 0.0,
            "rope_scaling": {"long_factor": [2.0] * 48, "short_factor": [1.0] * 48, "type": "longrope"},
            "rope_theta": 10_000.0,
            "sliding_window": 262_144,
            "tie_word_embeddings": True,
        },
        {"rope.dim": 96, "head_dim": 128, "tie_word_embeddings": True},
    ),
    "gemma-2-27b": (
        {
            "model_type": "gemma2",
            **shape(4608, 36_864, 46, 32, 16, 256_000, 8192),
            "attention_bias": False,
            "attn_logit_softcapping": 50.0,
            "bos_token_id": 2,
            "cache_implementation": "hybrid",
            "eos_token_id": 1,
            "final_logit_softcapping": 30.0,
            "head_dim": 128,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": 144,
            "rope_theta": 10_000.0,
            "sliding_window": 4096,
            "sliding_window_size": 4096,
        },
        {
            "layer_types": (SLIDING, FULL) * 23,
            "scale": pytest.approx(1 / 12),
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "tie_word_embeddings": True,
        },
    ),
    "OLMo-2-7B": (
        {
            "model_type": "olmo2",
            **shape(4096, 11_008, 32, 32, 32, 100_352, 4096),
            "attention_bias": False,
            "eos_token_id": 100_257,
            "pad_token_id": 100_277,
            "rope_scaling": None,
            "rope_theta": 500_000,
            "tie_word_embeddings": False,
        },
        {"rope.theta": 5e5, "layer_types": (FULL,) * 32, "bos_token_id": None},
    ),
    "Olmo-3-7B": (
        {
            "model_type": "olmo3",
            **shape(4096, 11_008, 32, 32, 32, 100_278, 65_536),
            "attention_bias": False,
            "eos_token_id": 100_257,
            "layer_types": [SLIDING, SLIDING, SLIDING, FULL] * 8,
            "pad_token_id": 100_277,
            "rope_scaling": {
                "attention_factor": 1.2079441541679836,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "factor": 8.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "yarn",
            },
            "rope_theta": 500_000,
            "sliding_window": 4096,
            "tie_word_embeddings": False,
        },
        {
            "layer_types": (SLIDING, SLIDING, SLIDING, FULL) * 8,
            "rope.attention_factor": 1.2079441541679836,
            "local_rope.scaling": "default",
            "local_rope.theta": 5e5,
        },
    ),
    "SmolLM3-3B": (
        {
            "model_type": "smollm3",
            **shape(2048, 11_008, 36, 16, 4, 128_256, 65_536),
            "attention_bias": False,
            "bos_token_id": None,
            "eos_token_id": 128_012,
            "layer_types": [FULL] * 36,
            "max_window_layers": 28,
            "mlp_bias": False,
            "no_rope_layer_interval": 4,
            "no_rope_layers": [1, 1, 1, 0] * 9,
            "pad_token_id": 128_012,
            "pretraining_tp": 2,
            "rope_scaling": None,
            "rope_theta": 5_000_000.0,
            "sliding_window": None,
            "use_sliding_window": False,
        },
        {"no_rope_layers": tuple(range(3, 36, 4)), "layer_types": (FULL,) * 36, "tie_word_embeddings": True},
    ),
    "granite-3.3-2b": (
        {
            "model_type": "granite",
            **shape(2048, 8192, 40, 32, 8, 49_159, 131_072),
            "attention_bias": False,
            "attention_multiplier": 0.015625,
            "bos_token_id": 0,
            "embedding_multiplier": 12.0,
            "eos_token_id": 0,
            "logits_scaling": 8.0,
            "mlp_bias": False,
            "residual_multiplier": 0.22,
            "rope_scaling": None,
            "rope_theta": 10_000_000.0,
            "tie_word_embeddings": True,
        },
        {"scale": 0.015625, "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 8.0},
    ),
    "GLM-4-9B-0414": (
        {
            "model_type": "glm4",
            **shape(4096, 13_696, 40, 32, 2, 151_552, 32_768),
            "attention_bias": False,
            "eos_token_id": [151_329, 151_336, 151_338],
            "head_dim": 128,
            "pad_token_id": 151_329,
            "partial_rotary_factor": 0.5,
            "rope_theta": 10_000.0,
            "tie_word_embeddings": False,
        },
        {"rope.dim": 64, "attention_bias": False, "eos_token_ids": (151_329, 151_336, 151_338)},
    ),
    "starcoder2-3b": (
        {
            "model_type": "starcoder2",
            **shape(3072, 12_288, 30, 24, 2, 49_152, 16_384),
            "attention_softmax_in_fp32": True,
            "bos_token_id": 0,
            "embedding_dropout": 0.1,
            "eos_token_id": 0,
            "hidden_act": "gelu_pytorch_tanh",
            "layer_norm_epsilon": 1e-05,
            "mlp_type": "default",
            "norm_epsilon": 1e-05,
            "norm_type": "layer_norm",
            "residual_dropout": 0.1,
            "rope_theta": 999_999.4420358813,
            "scale_attention_softmax_in_fp32": True,
            "scale_attn_weights": True,
            "sliding_window": 4096,
            "use_bias": True,
        },
        {"layer_types": (SLIDING,) * 30, "mlp_bias": True, "hidden_act": "gelu_tanh", "tie_word_embeddings": True},
    ),
    "stablelm-2-1_6b": (
        {
            "model_type": "stablelm",
            **shape(2048, 5632, 24, 32, 32, 100_352, 4096),
            "bos_token_id": 100_257,
            "eos_token_id": 100_257,
            "hidden_dropout": 0.0,
            "layer_norm_eps": 1e-05,
            "partial_rotary_factor": 0.25,
            "qk_layernorm": False,
            "rope_theta": 10_000,
            "tie_word_embeddings": False,
            "use_parallel_residual": False,
            "use_qkv_bias": True,
        },
        {"rope.dim": 16, "attention_bias": True, "attention_output_bias": False, "mlp_bias": False, "norm_bias": True},
    ),
    "pythia-70m": (
        {
            "model_type": "gpt_neox",
            **{k: v for k, v in shape(512, 2048, 6, 8, 8, 50_304, 2048).items() if k != "num_key_value_heads"},
            "bos_token_id": 0,
            "eos_token_id": 0,
            "hidden_act": "gelu",
            "layer_norm_eps": 1e-05,
            "rotary_emb_base": 10_000,
            "rotary_pct": 0.25,
            "tie_word_embeddings": False,
            "use_parallel_residual": True,
        },
        {"rope.dim": 16, "parallel_residual": True, "num_key_value_heads": 8, "hidden_act": "gelu"},
    ),
    "gpt-neox-20b": (
        {
            "model_type": "gpt_neox",
            **{k: v for k, v in shape(6144, 24_576, 44, 64, 64, 50_432, 2048).items() if k != "num_key_value_heads"},
            "attention_probs_dropout_prob": 0.1,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "hidden_act": "gelu_fast",
            "hidden_dropout_prob": 0.1,
            "layer_norm_eps": 1e-05,
            "rotary_emb_base": 10_000,
            "rotary_pct": 0.25,
            "use_parallel_residual": True,
        },
        {"rope.dim": 24, "hidden_act": "gelu_tanh"},
    ),
    "polyglot-ko-1.3b": (
        {
            "model_type": "gpt_neox",
            **{k: v for k, v in shape(2048, 8192, 24, 16, 16, 30_080, 2048).items() if k != "num_key_value_heads"},
            "bos_token_id": 0,
            "eos_token_id": 0,
            "hidden_act": "gelu",
            "layer_norm_eps": 1e-05,
            "num_steps": "global_step301000",
            "rotary_emb_base": 10_000,
            "rotary_pct": 0.5,
            "use_parallel_residual": True,
        },
        {"rope.dim": 64, "hidden_act": "gelu"},
    ),
    "EXAONE-4.0-32B": (
        {
            "model_type": "exaone4",
            **shape(5120, 27_392, 64, 40, 8, 102_400, 131_072),
            "bos_token_id": 1,
            "eos_token_id": 361,
            "head_dim": 128,
            "layer_types": [SLIDING, SLIDING, SLIDING, FULL] * 16,
            "pad_token_id": 0,
            "rope_scaling": {"factor": 16.0, "rope_type": "llama3", **LLAMA3},
            "rope_theta": 1_000_000,
            "sliding_window": 4096,
            "sliding_window_pattern": "LLLG",
            "tie_word_embeddings": False,
        },
        {"no_rope_layers": tuple(range(3, 64, 4)), "rope.scaling": "llama3", "head_dim": 128},
    ),
    "EXAONE-4.0-1.2B": (
        {
            "model_type": "exaone4",
            **shape(2048, 4096, 30, 32, 8, 102_400, 65_536),
            "bos_token_id": 1,
            "eos_token_id": 361,
            "head_dim": 64,
            "layer_types": [FULL] * 30,
            "rope_scaling": {"factor": 16.0, "rope_type": "llama3", **LLAMA3},
            "rope_theta": 1_000_000,
            "sliding_window": None,
            "sliding_window_pattern": None,
            "tie_word_embeddings": True,
        },
        {"no_rope_layers": (), "layer_types": (FULL,) * 30},
    ),
    "Qwen3-Coder-30B-A3B": (
        {
            "model_type": "qwen3_moe",
            **shape(2048, 5472, 48, 32, 4, 151_936, 262_144),
            "decoder_sparse_step": 1,
            "eos_token_id": 151_645,
            "head_dim": 128,
            "max_window_layers": 28,
            "mlp_only_layers": [],
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "output_router_logits": False,
            "qkv_bias": False,
            "rope_scaling": None,
            "rope_theta": 10_000_000,
            "router_aux_loss_coef": 0.0,
            "shared_expert_intermediate_size": 0,
            "sliding_window": None,
            "use_qk_norm": True,
            "use_sliding_window": False,
        },
        {"rope.theta": 1e7, "num_experts": 128, "moe_intermediate_size": 768, "layer_types": (FULL,) * 48},
    ),
    "Qwen3-30B-A3B": (
        {
            "model_type": "qwen3_moe",
            **shape(2048, 6144, 48, 32, 4, 151_936, 40_960),
            "attention_bias": False,
            "bos_token_id": 151_643,
            "decoder_sparse_step": 1,
            "eos_token_id": 151_645,
            "head_dim": 128,
            "max_window_layers": 48,
            "mlp_only_layers": [],
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "output_router_logits": False,
            "rope_scaling": None,
            "rope_theta": 1_000_000.0,
            "router_aux_loss_coef": 0.001,
            "sliding_window": None,
            "tie_word_embeddings": False,
            "use_sliding_window": False,
        },
        {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True},
    ),
    "Mixtral-8x7B": (
        {
            "model_type": "mixtral",
            **shape(4096, 14_336, 32, 32, 8, 32_000, 32_768),
            "bos_token_id": 1,
            "eos_token_id": 2,
            "num_experts_per_tok": 2,
            "num_local_experts": 8,
            "output_router_logits": False,
            "rope_theta": 1_000_000.0,
            "router_aux_loss_coef": 0.02,
            "sliding_window": None,
            "tie_word_embeddings": False,
        },
        {"num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True, "layer_types": (FULL,) * 32},
    ),
    "OLMoE-1B-7B": (
        {
            "model_type": "olmoe",
            **shape(2048, 1024, 16, 16, 16, 50_304, 4096),
            "attention_bias": False,
            "clip_qkv": None,
            "eos_token_id": 50_279,
            "norm_topk_prob": False,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "output_router_logits": False,
            "pad_token_id": 1,
            "rope_scaling": None,
            "rope_theta": 10_000.0,
            "router_aux_loss_coef": 0.01,
            "tie_word_embeddings": False,
        },
        {"num_experts": 64, "norm_topk_prob": False},
    ),
    "granite-3.0-1b-a400m": (
        {
            "model_type": "granitemoe",
            **shape(1024, 512, 24, 16, 8, 49_155, 4096),
            "attention_bias": False,
            "attention_multiplier": 0.015625,
            "bos_token_id": 0,
            "embedding_multiplier": 12.0,
            "eos_token_id": 0,
            "logits_scaling": 6.0,
            "num_experts_per_tok": 8,
            "num_local_experts": 32,
            "output_router_logits": False,
            "pad_token_id": 0,
            "residual_multiplier": 0.22,
            "rope_scaling": None,
            "rope_theta": 10_000,
            "router_aux_loss_coef": 0.0,
            "tie_word_embeddings": True,
        },
        {"num_experts": 32, "num_experts_per_tok": 8, "scale": 0.015625, "logits_scaling": 6.0},
    ),
    "gpt-oss-20b": (
        {
            "model_type": "gpt_oss",
            **shape(2880, 2880, 24, 64, 8, 201_088, 131_072),
            "attention_bias": True,
            "eos_token_id": 200_002,
            "experts_per_token": 4,
            "head_dim": 64,
            "initial_context_length": 4096,
            "layer_types": [SLIDING, FULL] * 12,
            "num_experts_per_tok": 4,
            "num_local_experts": 32,
            "output_router_logits": False,
            "pad_token_id": 199_999,
            "quantization_config": {
                "modules_to_not_convert": ["model.layers.*.self_attn", "model.embed_tokens", "lm_head"],
                "quant_method": "mxfp4",
            },
            "rope_scaling": {
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "factor": 32.0,
                "original_max_position_embeddings": 4096,
                "rope_type": "yarn",
                "truncate": False,
            },
            "rope_theta": 150_000,
            "router_aux_loss_coef": 0.9,
            "sliding_window": 128,
            "swiglu_limit": 7.0,
            "tie_word_embeddings": False,
        },
        {
            "num_experts": 32,
            "num_experts_per_tok": 4,
            "rope.truncate": False,
            "rope.scaling": "yarn",
            "layer_types": (SLIDING, FULL) * 12,
        },
    ),
}


def fact(config: ModelConfig, name: str) -> Any:
    part, _, of_rope = name.rpartition(".")
    names = {"scale": "attention_scale", "head_dim": "computed_head_dim"}
    return getattr(getattr(config, part), of_rope) if part else getattr(config, names.get(name, name))


@pytest.mark.parametrize("name", PUBLISHED)
def test_published(name: str) -> None:
    raw, facts = PUBLISHED[name]
    config = config_from_hf(USUAL | raw)
    shapes = raw | raw.get("text_config", {})
    for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"):
        assert getattr(config, key) == shapes[key]
    assert {key: fact(config, key) for key in facts} == facts


@pytest.mark.parametrize("name", [name for name in PUBLISHED if "text_config" not in PUBLISHED[name][0]])
def test_saved_again_by_transformers(name: str) -> None:
    """With transformers' generic keys, and RoPE as `rope_parameters`: the same model."""
    raw = {**USUAL, **PUBLISHED[name][0]}
    raw.pop("auto_map")
    if raw["model_type"] == "phi3" and raw["rope_scaling"]:  # "su", and a context beside the factors: of older versions
        raw["rope_scaling"] = raw["rope_scaling"] | {"type": "longrope"}
    values = {key: value for key, value in raw.items() if key != "model_type"}
    saved = AutoConfig.for_model(raw["model_type"], **values).to_dict()
    configs = [config_from_hf(each) for each in (saved, raw)]
    first, second = (replace(config, head_dim=config.computed_head_dim) for config in configs)
    assert first == second


def test_longrope_with_its_own_attention_factors() -> None:
    raw = USUAL | PUBLISHED["Phi-3-mini-128k"][0]
    raw["rope_scaling"] = raw["rope_scaling"] | {"short_mscale": 1.5, "long_mscale": 1.25}
    config = config_from_hf(raw)
    assert (config.rope.attention_factor, config.long_rope.attention_factor) == (1.5, 1.25)


def test_every_family_is_published_or_tested_elsewhere() -> None:
    published = {model_type_of(raw) for raw, _ in PUBLISHED.values()}
    assert FAMILIES.keys() - published == {"qwen3", "gemma3", "gemma3_text", "gpt2", "rope_gpt"}


LLAMA = USUAL | PUBLISHED["TinyLlama-1.1B"][0]


@pytest.mark.parametrize(
    "generic",
    [
        {
            "add_cross_attention": False,
            "bad_words_ids": None,
            "chunk_size_feed_forward": 0,
            "cross_attention_hidden_size": None,
            "diversity_penalty": 0.0,
            "do_sample": False,
            "early_stopping": False,
            "encoder_no_repeat_ngram_size": 0,
            "exponential_decay_length_penalty": None,
            "id2label": {"0": "LABEL_0", "1": "LABEL_1"},
            "is_decoder": False,
            "is_encoder_decoder": False,
            "label2id": {"LABEL_0": 0, "LABEL_1": 1},
            "length_penalty": 1.0,
            "max_length": 20,
            "no_repeat_ngram_size": 0,
            "num_beam_groups": 1,
            "num_beams": 1,
            "num_return_sequences": 1,
            "output_attentions": False,
            "output_hidden_states": False,
            "pruned_heads": {},
            "repetition_penalty": 1.0,
            "return_dict": True,
            "return_dict_in_generate": False,
            "temperature": 1.0,
            "tie_encoder_decoder": False,
            "top_k": 50,
            "top_p": 1.0,
            "torchscript": False,
            "typical_p": 1.0,
            "use_bfloat16": False,
        },
        PreTrainedConfig().to_dict() | {"model_type": "llama"},
        {"unsloth_version": "2025.1", "unsloth_fixed": True, "pad_token_id": 7, "_attn_implementation": "sdpa"},
        {"use_flash_attention_2": True, "gradient_checkpointing": True, "output_hidden_states": True},
    ],
    ids=["v4", "v5", "unsloth", "training"],
)
def test_keys_without_an_effect(generic: dict[str, Any]) -> None:
    assert config_from_hf(generic | LLAMA) == config_from_hf(LLAMA)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"sliding_window": 4096}, "sliding_window 4096 is not supported for llama"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0"),
        ({"attention_sinks": True}, "attention_sinks True"),
        ({"alibi": True}, "alibi True"),
        ({"num_experts": 8}, "num_experts 8"),
        ({"num_local_experts": 8, "num_experts_per_tok": 2}, "num_local_experts 8|num_experts_per_tok 2"),
        ({"qk_layernorm": True}, "qk_layernorm True"),
        ({"use_parallel_residual": True}, "use_parallel_residual True"),
        ({"embedding_multiplier": 12.0}, "embedding_multiplier 12.0"),
        ({"output_gate": True}, "output_gate True"),
        ({"norm_type": "layer_norm"}, "norm_type 'layer_norm'"),
        ({"is_causal": False}, "is_causal False"),
        ({"rope_scaling": {"type": "su", "factor": 2.0}}, "RoPE scaling 'su' is not supported"),
        ({"rope_scaling": {"type": "default", "mrope_section": [16, 24, 24]}}, "mrope_section"),
        ({"rope_scaling": {"rope_type": "default", "llama_4_scaling_beta": 0.1}}, "llama_4_scaling_beta"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"hidden_act": "relu"}, "hidden_act 'relu' is not supported for llama, which takes silu, "),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantized with 'fp8' are not supported"),
        ({"model_type": "mistral", "attention_bias": True}, "attention_bias True is not supported for mistral"),
        ({"model_type": "stablelm", "qk_layernorm": True}, "qk_layernorm True is not supported for stablelm"),
        ({"model_type": "gemma2", "use_bidirectional_attention": True}, "use_bidirectional_attention True"),
        ({"model_type": "exaone4", "sliding_window": 8, "sliding_window_pattern": 0}, "sliding_window_pattern must be"),
    ],
    ids=str,
)
def test_what_a_file_asks_for_in_vain(more: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_from_hf(LLAMA | more)


def test_yarn_of_llama_2() -> None:
    """A key that only says how the model was trained."""
    scaling = {"factor": 16.0, "original_max_position_embeddings": 4096, "type": "yarn", "finetuned": True}
    assert config_from_hf(LLAMA | {"rope_scaling": scaling}).rope.scaling == "yarn"  # type: ignore[union-attr]


def test_a_string_of_windows() -> None:
    """EXAONE 4's pattern without layer_types; the last layer sees everything."""
    raw = {key: value for key, value in PUBLISHED["EXAONE-4.0-32B"][0].items() if key != "layer_types"}
    config = config_from_hf(USUAL | raw | {"num_hidden_layers": 6})
    assert config.layer_types == (SLIDING, SLIDING, SLIDING, FULL, SLIDING, FULL)


def test_the_newer_key_of_rope_is_overridden() -> None:
    """As transformers does with a `rope_scaling` that was added to a file with `rope_parameters`."""
    both = {
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
        "rope_scaling": {"type": "linear", "factor": 2.0},
    }
    rope = config_from_hf(LLAMA | both).rope
    assert (rope.scaling, rope.factor, rope.theta) == ("linear", 2.0, 10_000.0)  # type: ignore[union-attr]
