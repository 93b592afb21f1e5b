"""ModelConfig from both kinds of metadata, and what it refuses."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma3TextConfig, GPT2Config, PreTrainedConfig, Qwen3Config

from infer import KVCache, ModelConfig, SlidingCache
from infer.config import RopeConfig
from infer.loader.gguf_config import config_from_gguf
from infer.loader.hf_config import config_from_hf
from infer.loader.nanogpt import config_from_nanogpt

HF = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
GGUF = {
    "general.architecture": "llama",
    "llama.embedding_length": 576,
    "llama.feed_forward_length": 1536,
    "llama.block_count": 30,
    "llama.attention.head_count": 9,
    "llama.attention.head_count_kv": 3,
    "llama.context_length": 2048,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 100000.0,
    "llama.rope.dimension_count": 64,
    "llama.vocab_size": 49152,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}
QWEN3_0_6B = {
    "model_type": "qwen3",
    "attention_bias": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
GEMMA3_1B = {
    "model_type": "gemma3_text",
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "bos_token_id": 2,
    "cache_implementation": "hybrid",
    "eos_token_id": [1, 106],
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-6,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "vocab_size": 262144,
}
LINEAR_8 = {"factor": 8.0, "rope_type": "linear"}
GEMMA3_4B = {  # with the image encoder's part beside the text's
    "model_type": "gemma3",
    "eos_token_id": [1, 106],
    "image_token_index": 262144,
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": LINEAR_8,
        "sliding_window": 1024,
    },
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model", "num_hidden_layers": 27},
}
GEMMA3_27B = GEMMA3_4B | {
    "text_config": {
        "head_dim": 128,
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "model_type": "gemma3_text",
        "num_attention_heads": 32,
        "num_hidden_layers": 62,
        "num_key_value_heads": 16,
        "query_pre_attn_scalar": 168,
        "rope_scaling": LINEAR_8,
        "sliding_window": 1024,
    }
}
GEMMA3_GGUF = {
    "general.architecture": "gemma3",
    "gemma3.context_length": 32768,
    "gemma3.embedding_length": 640,
    "gemma3.block_count": 18,
    "gemma3.feed_forward_length": 2048,
    "gemma3.attention.head_count": 4,
    "gemma3.attention.head_count_kv": 1,
    "gemma3.attention.key_length": 256,
    "gemma3.attention.value_length": 256,
    "gemma3.attention.layer_norm_rms_epsilon": 1e-6,
    "gemma3.attention.sliding_window": 512,
    "gemma3.rope.freq_base": 1e6,
    "tokenizer.ggml.tokens": ["a"] * 100,
}
SLIDING, FULL = "sliding_attention", "full_attention"


def without(values: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}


class TestFromHF:
    def test_values(self) -> None:
        config = config_from_hf(HF)
        for name in ("vocab_size", "hidden_size", "num_key_value_heads", "tie_word_embeddings", "bos_token_id"):
            assert getattr(config, name) == HF[name]
        assert config.head_dim is None
        assert config.computed_head_dim == 64
        assert config.layer_types == ("full_attention",) * 16
        assert config.window(3) is None
        assert not config.attention_bias

    def test_defaults(self) -> None:
        config = config_from_hf(without(HF, "num_key_value_heads", "rms_norm_eps", "hidden_act", "eos_token_id"))
        assert config.num_key_value_heads == 32  # plain multi-head attention
        assert config.rms_norm_eps == 1e-6
        assert config.eos_token_ids == ()
        assert config.rope == RopeConfig(theta=10_000.0)
        assert not config_from_hf(without(HF, "tie_word_embeddings")).tie_word_embeddings

    def test_head_dim_of_its_own(self) -> None:
        assert config_from_hf(HF | {"head_dim": 128}).computed_head_dim == 128

    def test_biases(self) -> None:
        config = config_from_hf(HF | {"attention_bias": True, "mlp_bias": True})
        assert config.attention_bias
        assert config.mlp_bias

    @pytest.mark.parametrize(
        "keys",
        [
            {"rope_theta": 500000.0, "rope_scaling": LLAMA3},
            {"rope_theta": 500000.0, "rope_scaling": without(LLAMA3, "rope_type") | {"type": "llama3"}},
            {"rope_parameters": LLAMA3 | {"rope_theta": 500000.0}},
            {"rope_parameters": LLAMA3 | {"rope_theta": 500000.0}, "rope_theta": 1.0, "rope_scaling": None},
        ],
        ids=["old keys", "older type", "newer keys", "newer keys win"],
    )
    def test_llama3_rope(self, keys: dict) -> None:
        assert config_from_hf(HF | keys).rope == RopeConfig(500000.0, "llama3", 32.0, 1.0, 4.0, 8192)

    @pytest.mark.parametrize(
        ("keys", "expected"),
        [
            ({"rope_theta": 5e5}, RopeConfig(5e5)),
            ({"rope_theta": 5e5, "rope_scaling": None}, RopeConfig(5e5)),
            ({"rope_parameters": {"rope_type": "default", "rope_theta": 7}}, RopeConfig(7.0)),
            ({"rope_scaling": {"type": "linear", "factor": 2.0}}, RopeConfig(1e4, "linear", 2.0)),
            (
                {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 3.0}},
                RopeConfig(3.0, "linear", 4.0),
            ),
        ],
    )
    def test_other_rope(self, keys: dict, expected: RopeConfig) -> None:
        assert config_from_hf(HF | keys).rope == expected

    @pytest.mark.parametrize(
        ("own", "generation", "expected"),
        [
            (5, None, (5,)),
            ([5, 6], None, (5, 6)),
            (None, None, ()),
            (5, {}, (5,)),
            (5, {"eos_token_id": [5, 7, 8]}, (5, 7, 8)),
            ([6, 5], {"eos_token_id": 7}, (6, 5, 7)),
            (None, {"eos_token_id": 0}, (0,)),
            (0, {"eos_token_id": None}, (0,)),
        ],
    )
    def test_eos_of_both_files(self, own: Any, generation: dict | None, expected: tuple[int, ...]) -> None:
        assert config_from_hf(HF | {"eos_token_id": own}, generation).eos_token_ids == expected

    def test_an_end_of_text_that_is_no_token(self) -> None:
        with pytest.raises(ValueError, match=r"eos_token_id must be an integer .*, not 'x'"):
            config_from_hf(HF | {"eos_token_id": "x"})

    def test_sliding_layers(self) -> None:
        kinds = ["sliding_attention", "full_attention"] * 8
        windows = {"use_sliding_window": True, "sliding_window": 512, "layer_types": kinds}
        config = config_from_hf(HF | windows | {"model_type": "qwen2"})
        assert [config.window(i) for i in range(3)] == [512, None, 512]

    @pytest.mark.parametrize(
        "name",
        [
            "model_type",
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "max_position_embeddings",
        ],
    )
    def test_missing_keys_are_named(self, name: str) -> None:
        with pytest.raises(ValueError, match=rf"config.json lacks {name}"):
            config_from_hf(without(HF, name))

    def test_all_missing_keys_are_named(self) -> None:
        with pytest.raises(ValueError, match="lacks vocab_size, hidden_size"):
            config_from_hf(without(HF, "vocab_size", "hidden_size"))

    @pytest.mark.parametrize(
        ("keys", "message"),
        [
            ({"rope_scaling": {"rope_type": "su", "factor": 2.0}}, "RoPE scaling 'su' is not supported"),
            ({"rope_scaling": {"type": "linear"}}, "linear RoPE scaling lacks factor"),
            (
                {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
                "llama3 RoPE scaling lacks low_freq_factor, high",
            ),
            ({"hidden_act": "relu"}, "hidden_act 'relu' is not supported"),
            ({"quantization_config": {"quant_method": "awq"}}, "quantized with 'awq' are not supported"),
            ({"quantization_config": {}}, "quantized with 'unknown'"),
            ({"num_key_value_heads": 5}, "32 attention heads must be a multiple of 5 KV heads"),
            ({"hidden_size": 2050}, "hidden_size 2050 is not divisible by 32 heads: set head_dim"),
            ({"head_dim": 63}, "head_dim must be even for RoPE, not 63"),
            ({"head_dim": -2}, "head_dim must be .*-2"),
            ({"head_dim": "64"}, "head_dim must be .*'64'"),
            ({"layer_types": ["full_attention"]}, "1 layer_types for 16 layers"),
            ({"layer_types": ["linear_attention"] * 16}, "layer type 'linear_attention' is not supported"),
            ({"layer_types": ["sliding_attention"] * 16}, "need a positive sliding_window, not None"),
            ({"layer_types": ["sliding_attention"] * 16, "sliding_window": 0}, "positive sliding_window, not None"),
        ],
        ids=str,
    )
    def test_unsupported(self, keys: dict, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            config_from_hf(HF | keys)

    def test_null_quantization_is_none(self) -> None:
        assert config_from_hf(HF | {"quantization_config": None}) == config_from_hf(HF)

    @pytest.mark.parametrize("name", [name for name in HF if name.startswith("num_") or name.endswith("_size")])
    @pytest.mark.parametrize("value", [-1, 1.5, "8"])
    def test_sizes_must_be_positive_integers(self, name: str, value: Any) -> None:
        with pytest.raises(ValueError, match=rf"{name} must be a positive integer up to .*, not {value!r}"):
            config_from_hf(HF | {name: value})


def assert_agrees(config: ModelConfig, reference: PreTrainedConfig, names: Mapping[str, str] | None = None) -> None:
    """Every value that transformers' config knows by the same name, or by theirs in names, and the kinds of layers."""
    ours = {field.name for field in dataclasses.fields(config)} - {"model_type", "hidden_act"}  # None: the only one
    shared = ours & set(reference.to_dict())
    for name in sorted(shared - {"layer_types"}):
        assert getattr(config, name) == getattr(reference, name), name
    for name, theirs in (names or {}).items():
        assert getattr(config, name) == getattr(reference, theirs), name
    assert list(config.layer_types) == getattr(reference, "layer_types", [FULL] * config.num_hidden_layers)


class TestQwen3:
    @pytest.mark.parametrize(
        "changes",
        [
            {},
            {"sliding_window": 64},
            {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 20},
            {"use_sliding_window": True, "sliding_window": 64, "layer_types": [SLIDING, FULL] * 14},
            {"use_sliding_window": True, "sliding_window": 64},
            {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 20},
        ],
        ids=["none", "unused", "last layers", "layer types", "last layers beyond the end", "no size"],
    )
    def test_agrees_with_the_reference(self, changes: dict) -> None:
        raw = QWEN3_0_6B | changes
        config = config_from_hf(raw)
        assert_agrees(config, Qwen3Config(**raw))
        assert config.rope == RopeConfig(1e6)
        assert config.local_rope is None
        assert config.eos_token_ids == (151645,)
        assert config.attention_scale == pytest.approx(128**-0.5)

    def test_windows(self) -> None:
        raw = QWEN3_0_6B | {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 20}
        config = config_from_hf(raw)
        assert [config.window(i) for i in range(28)] == [None] * 20 + [64] * 8
        assert not config_from_hf(QWEN3_0_6B | {"sliding_window": 64}).has_windows

    def test_head_dim_left_out(self) -> None:
        raw = without(QWEN3_0_6B, "head_dim")
        assert config_from_hf(raw).computed_head_dim == Qwen3Config(**raw).head_dim == 128

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"rope_scaling": {"rope_type": "su", "factor": 4.0}}, "RoPE scaling 'su' is not supported"),
            ({"hidden_act": "relu"}, "hidden_act 'relu' is not supported for qwen3, which takes silu, "),
            ({"layer_types": [FULL]}, "1 layer_types for 28 layers"),
            ({"layer_types": [SLIDING] * 28}, "need a positive sliding_window, not None"),
            ({"use_sliding_window": True, "sliding_window": 0, "max_window_layers": 0}, "positive sliding_window, not"),
            ({"num_hidden_layers": None}, "config.json lacks num_hidden_layers"),
            (
                {"num_hidden_layers": "28", "use_sliding_window": True, "sliding_window": 64},
                "num_hidden_layers must be a positive integer up to .*, not '28'",
            ),
        ],
        ids=str,
    )
    def test_unsupported(self, changes: dict, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            config_from_hf(QWEN3_0_6B | changes)


class TestGemma3:
    @pytest.mark.parametrize(
        ("raw", "rope"),
        [
            (GEMMA3_1B, RopeConfig(1e6)),
            (GEMMA3_4B, RopeConfig(1e6, "linear", 8.0)),
            (GEMMA3_27B, RopeConfig(1e6, "linear", 8.0)),
        ],
        ids=["1b", "4b", "27b"],
    )
    def test_published(self, raw: dict, rope: RopeConfig) -> None:
        config = config_from_hf(raw)
        assert_agrees(config, Gemma3TextConfig(**raw.get("text_config", raw)))
        assert config.model_type == raw["model_type"]
        assert config.ropes() == {SLIDING: RopeConfig(1e4), FULL: rope}
        assert config.eos_token_ids == (1, 106)
        assert config.tie_word_embeddings
        assert [i for i in range(26) if config.window(i) is None] == [5, 11, 17, 23]

    def test_defaults(self) -> None:
        config = config_from_hf(GEMMA3_4B)
        assert (config.vocab_size, config.head_dim, config.max_position_embeddings) == (262_208, 256, 131_072)
        assert (config.num_attention_heads, config.num_key_value_heads) == (8, 4)
        assert config.sliding_window == 1024
        assert config.bos_token_id == 2

    def test_scale(self) -> None:
        assert config_from_hf(GEMMA3_1B).attention_scale == 1 / 16
        assert config_from_hf(GEMMA3_27B).attention_scale == pytest.approx(168**-0.5)

    @pytest.mark.parametrize(
        ("changes", "full"),
        [
            ({"sliding_window_pattern": 2}, [1, 3, 5]),
            ({"sliding_window_pattern": 6}, [5]),
            ({"sliding_window_pattern": 1}, [0, 1, 2, 3, 4, 5, 6]),
            ({}, [5]),
            ({"_sliding_window_pattern": 6}, [5]),
            ({"layer_types": [FULL] + [SLIDING] * 6}, [0]),
            ({"layer_types": [FULL] + [SLIDING] * 6, "_sliding_window_pattern": 2}, [0]),
            ({"layer_types": None, "sliding_window_pattern": 3}, [2, 5]),
        ],
        ids=str,
    )
    def test_layers(self, changes: dict, full: list[int]) -> None:
        raw = without(GEMMA3_1B, "sliding_window_pattern") | {"num_hidden_layers": 7} | changes
        config = config_from_hf(raw)
        assert [i for i in range(7) if config.window(i) is None] == full
        assert list(config.layer_types) == Gemma3TextConfig(**raw).layer_types

    @pytest.mark.parametrize(
        ("changes", "local", "whole"),
        [
            ({"rope_theta": 5e5, "rope_local_base_freq": 7}, RopeConfig(7.0), RopeConfig(5e5)),
            ({"rope_scaling": {"type": "linear", "factor": 2}}, RopeConfig(1e4), RopeConfig(1e6, "linear", 2)),
            (
                {"rope_parameters": {FULL: LINEAR_8 | {"rope_theta": 5.0}, SLIDING: {"rope_theta": 7.0}}},
                RopeConfig(7.0),
                RopeConfig(5.0, "linear", 8.0),
            ),
            ({"rope_parameters": {FULL: {"rope_type": "default"}}}, RopeConfig(1e4), RopeConfig(1e6)),
            ({"rope_parameters": {SLIDING: None, FULL: {"rope_theta": 3.0}}}, RopeConfig(1e4), RopeConfig(3.0)),
        ],
        ids=["thetas", "scaling", "by layer type", "one of two", "null"],
    )
    def test_ropes(self, changes: dict, local: RopeConfig, whole: RopeConfig) -> None:
        raw = without(GEMMA3_1B, "rope_theta", "rope_local_base_freq", "rope_scaling") | changes
        assert config_from_hf(raw).ropes() == {SLIDING: local, FULL: whole}

    def test_null_beside_the_text_part_says_nothing(self) -> None:
        text = GEMMA3_4B["text_config"] | {"bos_token_id": 7}
        raw = GEMMA3_4B | {"text_config": text, "bos_token_id": None}
        assert config_from_hf(raw).bos_token_id == 7

    @pytest.mark.parametrize("raw", [GEMMA3_1B, GEMMA3_4B], ids=["text", "with vision"])
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0 is not supported"),
            ({"use_bidirectional_attention": True}, "use_bidirectional_attention True is not supported"),
            ({"hidden_activation": "relu"}, "'relu' is not supported for gemma3.*, which takes silu, "),
            ({"rope_scaling": {"rope_type": "su", "factor": 2.0}}, "RoPE scaling 'su' is not supported"),
            (
                {"rope_parameters": {FULL: {"rope_type": "yarn"}}, "rope_scaling": None},
                "yarn RoPE scaling lacks factor",
            ),
            ({"rope_parameters": {SLIDING: {"rope_type": "su"}}}, "RoPE scaling 'su' is not supported"),
            ({"layer_types": None, "sliding_window_pattern": 0}, "sliding_window_pattern must be a positive .*, not 0"),
            ({"sliding_window_pattern": "6"}, "sliding_window_pattern must be .*, not '6'"),
            ({"sliding_window": 0}, "need a positive sliding_window, not 0"),
            ({"layer_types": [FULL]}, r"1 layer_types for \d\d layers"),
            ({"layer_types": ["chunked_attention"] * 26, "num_hidden_layers": 26}, "'chunked_attention' is not supp"),
            ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be above 0, not 0"),
            ({"rms_norm_eps": -1}, "rms_norm_eps must be from 0 to 1, not -1"),
            ({"rms_norm_eps": "x"}, "rms_norm_eps must be from 0 to 1, not 'x'"),
            ({"rope_theta": 0}, "rope_theta must be above 0, not 0"),
            ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "factor must be above 0, not 0"),
            ({"num_key_value_heads": 0}, "num_key_value_heads must be a positive integer up to .*, not 0"),
            ({"num_hidden_layers": None}, "config.json lacks num_hidden_layers"),
            ({"num_hidden_layers": "26"}, "num_hidden_layers must be a positive integer up to .*, not '26'"),
            ({"hidden_size": None}, "config.json lacks hidden_size"),
            ({"quantization_config": {"quant_method": "bitsandbytes"}}, "quantized with 'bitsandbytes'"),
        ],
        ids=str,
    )
    def test_unsupported(self, raw: dict, changes: dict, message: str) -> None:
        raw = raw | {"text_config": raw["text_config"] | changes} if "text_config" in raw else raw | changes
        with pytest.raises(ValueError, match=message):
            config_from_hf(raw)

    def test_memory_of_a_long_context(self) -> None:
        """Gemma 3 1B at 32,768 positions in bf16."""
        config = config_from_hf(GEMMA3_1B)
        contiguous, sliding = (
            cache_type.from_model_config(config, 32_768, dtype=torch.bfloat16, device="meta").memory_bytes
            for cache_type in (KVCache, SlidingCache)
        )
        assert round(contiguous / 1e6) == 872
        assert sliding <= 160e6


class TestGPT2:
    def test_the_hub_s(self) -> None:
        """Of its config.json, what differs between the sizes; the rest are the reference's defaults."""
        config = config_from_hf({"model_type": "gpt2", "n_embd": 1024, "n_head": 16, "n_layer": 24})
        assert config == ModelConfig(
            model_type="gpt2",
            vocab_size=50_257,
            hidden_size=1024,
            intermediate_size=4096,
            num_hidden_layers=24,
            num_attention_heads=16,
            num_key_value_heads=16,
            max_position_embeddings=1024,
            rms_norm_eps=1e-5,
            rope=None,
            attention_bias=True,
            mlp_bias=True,
            norm_bias=True,
            hidden_act="gelu_tanh",
            tie_word_embeddings=True,
            bos_token_id=50_256,
            eos_token_ids=(50_256,),
        )
        assert config.ropes() == {}
        reference = GPT2Config()
        small = config_from_hf({"model_type": "gpt2"})
        assert_agrees(small, reference, reference.attribute_map)
        assert small == config_from_hf(reference.to_dict())

    def test_values(self) -> None:
        raw = {
            "n_inner": 99,
            "n_positions": 7,
            "layer_norm_epsilon": 0.5,
            "tie_word_embeddings": False,
            "vocab_size": 3,
        }
        config = config_from_hf({"model_type": "gpt2", **raw})
        assert (config.intermediate_size, config.max_position_embeddings, config.rms_norm_eps) == (99, 7, 0.5)
        assert (config.tie_word_embeddings, config.vocab_size) == (False, 3)
        assert_agrees(config, GPT2Config(**raw), GPT2Config.attribute_map)

    def test_nulls_and_other_families_keys_say_nothing(self) -> None:
        raw = {"n_inner": None, "activation_function": None, "head_dim": 7, "num_key_value_heads": 2, "hidden_act": "x"}
        assert config_from_hf({"model_type": "gpt2", **raw}) == config_from_hf({"model_type": "gpt2"})

    @pytest.mark.parametrize(
        ("name", "ours"), [("gelu_new", "gelu_tanh"), ("gelu_pytorch_tanh", "gelu_tanh"), ("gelu", "gelu")]
    )
    def test_activations(self, name: str, ours: str) -> None:
        assert config_from_hf({"model_type": "gpt2", "activation_function": name}).hidden_act == ours

    @pytest.mark.parametrize(("scaled", "scale"), [(True, 1 / 8), (False, 1.0)])
    def test_scale(self, scaled: bool, scale: float) -> None:
        assert config_from_hf({"model_type": "gpt2", "scale_attn_weights": scaled}).attention_scale == scale

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"add_cross_attention": True}, "add_cross_attention True is not supported"),
            ({"activation_function": "relu"}, "'relu' is not supported for gpt2, which takes silu, "),
            ({"n_head": 5}, "hidden_size 768 is not divisible by 5 heads"),
            ({"n_embd": "768"}, "n_embd must be a positive integer up to .*, not '768'"),
            ({"n_layer": 0}, "n_layer must be a positive integer up to .*, not 0"),
            ({"n_inner": -1}, "n_inner must be a positive integer up to .*, not -1"),
        ],
        ids=str,
    )
    def test_unsupported(self, changes: dict, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            config_from_hf({"model_type": "gpt2", **changes})

    @pytest.mark.parametrize("bias", [True, False, None])
    def test_nanogpt(self, bias: bool | None) -> None:
        """bias None: not said, as in older files, all of whose models have them, and the GELU of then."""
        args = {"n_layer": 6, "n_head": 6, "n_embd": 384, "block_size": 256, "vocab_size": 65, "dropout": 0.2}
        config = config_from_nanogpt(args if bias is None else args | {"bias": bias})
        has = bias is not False
        assert (config.attention_bias, config.mlp_bias, config.norm_bias) == (has, has, has)
        sizes = (config.hidden_size, config.intermediate_size, config.num_hidden_layers, config.computed_head_dim)
        assert sizes == (384, 1536, 6, 64)
        assert (config.max_position_embeddings, config.vocab_size, config.dropout) == (256, 65, 0.2)
        gelu = "gelu_tanh" if bias is None else "gelu"
        assert (config.model_type, config.rope, config.hidden_act) == ("gpt2", None, gelu)
        assert (config.tie_word_embeddings, config.rms_norm_eps, config.eos_token_ids) == (True, 1e-5, ())
        rotated = config_from_nanogpt(args | {"model_type": "rope_gpt"})
        assert (rotated.model_type, rotated.rope) == ("rope_gpt", RopeConfig(10_000.0))

    def test_rope_gpt_folders(self) -> None:
        """config.json in Llama's words, with an activation of GPT's."""
        raw = without(HF, "rms_norm_eps") | {"model_type": "rope_gpt", "hidden_act": "gelu", "norm_bias": True}
        config = config_from_hf(raw)
        assert (config.hidden_act, config.norm_bias, config.rope) == ("gelu", True, RopeConfig(10_000.0))
        with pytest.raises(ValueError, match="'relu' is not supported for rope_gpt"):
            config_from_hf(raw | {"hidden_act": "relu"})

    def test_gguf(self) -> None:
        metadata = {
            "general.architecture": "gpt2",
            "gpt2.context_length": 1024,
            "gpt2.embedding_length": 768,
            "gpt2.block_count": 12,
            "gpt2.feed_forward_length": 3072,
            "gpt2.attention.head_count": 12,
            "gpt2.attention.layer_norm_epsilon": 1e-5,
            "tokenizer.ggml.tokens": ["a"] * 50_257,
            "tokenizer.ggml.bos_token_id": 50_256,
            "tokenizer.ggml.eos_token_id": 50_256,
        }
        tensors = ["blk.0.attn_qkv.bias", "blk.0.attn_output.bias", "blk.0.ffn_down.bias", "output_norm.bias"]
        config = config_from_gguf(metadata, tensors)
        assert dataclasses.replace(config, head_dim=None) == config_from_hf({"model_type": "gpt2"})
        with pytest.raises(ValueError, match=r"GGUF metadata lacks gpt2\.attention\.layer_norm_epsilon"):
            config_from_gguf(without(metadata, "gpt2.attention.layer_norm_epsilon"), tensors)


class TestFromGGUF:
    def test_values(self) -> None:
        config = config_from_gguf(GGUF, ["token_embd.weight", "blk.0.attn_q.weight"])
        assert config == ModelConfig(
            model_type="llama",
            vocab_size=49152,
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
            max_position_embeddings=2048,
            head_dim=64,
            rms_norm_eps=1e-5,
            rope=RopeConfig(theta=100000.0),
            tie_word_embeddings=True,
            bos_token_id=1,
            eos_token_ids=(2,),
        )

    @pytest.mark.parametrize(
        ("tensor", "name", "value"),
        [
            ("output.weight", "tie_word_embeddings", False),
            ("blk.0.attn_q.bias", "attention_bias", True),
            ("blk.0.attn_qkv.bias", "attention_bias", True),
            ("blk.0.ffn_down.bias", "mlp_bias", True),
            ("output_norm.bias", "norm_bias", True),
        ],
    )
    def test_what_only_the_tensors_tell(self, tensor: str, name: str, value: bool) -> None:
        assert getattr(config_from_gguf(GGUF, [tensor]), name) == value
        assert getattr(config_from_gguf(GGUF, []), name) != value

    def test_defaults(self) -> None:
        metadata = without(GGUF, *(f"llama.{k}" for k in ("attention.head_count_kv", "rope.freq_base", "vocab_size")))
        config = config_from_gguf(metadata | {"tokenizer.ggml.tokens": ["a"] * 77}, [])
        assert (config.num_key_value_heads, config.rope.theta, config.vocab_size) == (9, 10_000.0, 77)

    def test_all_eos_ids(self) -> None:
        more = {"tokenizer.ggml.eot_token_id": 7, "tokenizer.ggml.eom_token_id": 2}
        assert config_from_gguf(GGUF | more, []).eos_token_ids == (2, 7)

    def test_key_length(self) -> None:
        more = {"llama.attention.key_length": 128, "llama.rope.dimension_count": 128}
        assert config_from_gguf(GGUF | more, []).computed_head_dim == 128

    def test_rope(self) -> None:
        more = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
        assert config_from_gguf(GGUF | more, []).rope == RopeConfig(100000.0, "linear", 4.0)
        assert config_from_gguf(GGUF, [], (1.0, 2.0)).rope == RopeConfig(100000.0, divisors=(1.0, 2.0))

    @pytest.mark.parametrize(
        "key",
        [
            "embedding_length",
            "feed_forward_length",
            "block_count",
            "attention.head_count",
            "context_length",
            "attention.layer_norm_rms_epsilon",
            "vocab_size",
        ],
    )
    def test_missing_keys_are_named(self, key: str) -> None:
        with pytest.raises(ValueError, match=f"GGUF metadata lacks llama.{key}"):
            config_from_gguf(without(GGUF, f"llama.{key}"), [])

    def test_keys_without_an_effect(self) -> None:
        more = {
            "llama.attention.causal": True,
            "llama.attention.clamp_kqv": 0.0,
            "llama.expert_count": 0,
            "llama.pooling_type": 3,
            "llama.rope.scaling.finetuned": False,
            "llama.tensor_data_layout": "Meta AI original pth",
            "quantize.imatrix.entries_count": 7,
        }
        assert config_from_gguf(GGUF | more, []) == config_from_gguf(GGUF, [])

    def test_yarn(self) -> None:
        more = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}
        rope = config_from_gguf(GGUF | more, []).rope
        assert rope == RopeConfig(
            100000.0, "yarn", 4.0, original_max_position_embeddings=2048, attention_factor=0.1 * math.log(4) + 1
        )
        more |= {
            "llama.rope.scaling.original_context_length": 512,
            "llama.rope.scaling.yarn_attn_factor": 1.5,
            "llama.rope.scaling.yarn_beta_fast": 16.0,
            "llama.rope.scaling.yarn_beta_slow": 2.0,
            "llama.rope.scaling.attn_factor": 2.0,  # multiplies whatever else there is
        }
        rope = config_from_gguf(GGUF | more, []).rope
        assert rope == RopeConfig(
            100000.0,
            "yarn",
            4.0,
            original_max_position_embeddings=512,
            beta_fast=16.0,
            beta_slow=2.0,
            attention_factor=3.0,
        )

    def test_a_scale_under_its_older_name(self) -> None:
        assert config_from_gguf(GGUF | {"llama.rope.scale_linear": 4.0}, []).rope == RopeConfig(100000.0, "linear", 4.0)

    @pytest.mark.parametrize(
        ("more", "message"),
        [
            ({"llama.rope.scaling.type": "yarn"}, "lacks llama.rope.scaling.factor"),
            ({"llama.rope.scaling.type": "longrope"}, "lacks the tensor rope_factors_short.weight"),
            ({"llama.rope.scaling.type": "dynamic"}, "RoPE scaling 'dynamic' is not supported"),
            ({"llama.rope.scaling.yarn_ext_factor": 0.0}, "llama.rope.scaling.yarn_ext_factor 0.0 is not supported"),
            ({"llama.rope.scaling.alpha": 2.0}, "llama.rope.scaling.alpha 2.0 is not supported"),
            ({"llama.rope.dimension_sections": [16, 24, 24, 0]}, "llama.rope.dimension_sections .* is not supported"),
            ({"llama.attention.causal": False}, "llama.attention.causal False is not supported"),
            ({"llama.attention.clamp_kqv": 8.0}, "llama.attention.clamp_kqv 8.0 is not supported"),
            ({"llama.attention.max_alibi_bias": 8.0}, "llama.attention.max_alibi_bias 8.0 is not supported"),
            ({"llama.attention.value_length": 32}, "llama.attention.value_length 32 is not supported"),
            ({"llama.attention.scale": 0.1}, "llama.attention.scale 0.1 is not supported"),
            ({"llama.attention.sliding_window_pattern": 4}, "sliding_window_pattern 4 is not supported"),
            ({"llama.nextn_predict_layers": 1}, "llama.nextn_predict_layers 1 is not supported"),
            ({"llama.logit_scale": 0.1}, "llama.logit_scale 0.1 is not supported"),
            ({"llama.rope.dimension_count": 32}, "RoPE over 32 of 64 dimensions is not supported"),
            ({"llama.attention.head_count_kv": 2}, "9 attention heads must be a multiple of 2"),
            ({"llama.attention.head_count": 0}, "llama.attention.head_count must be"),
            ({"llama.attention.head_count": [9] * 30}, "llama.attention.head_count must be"),  # one per layer
        ],
    )
    def test_unsupported(self, more: dict, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            config_from_gguf(GGUF | more, [])


class TestGemma3FromGGUF:
    def test_what_the_metadata_leaves_out(self) -> None:
        config = config_from_gguf(GEMMA3_GGUF, [])
        assert config.ropes() == {SLIDING: RopeConfig(1e4), FULL: RopeConfig(1e6)}
        assert [i for i in range(18) if config.window(i) is None] == [5, 11, 17]
        assert config.window(0) == 512
        assert config.attention_scale == 1 / 16

    def test_linear_scaling_is_of_the_global_rope(self) -> None:
        more = {"gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 8.0}
        config = config_from_gguf(GEMMA3_GGUF | more, [])
        assert config.ropes() == {SLIDING: RopeConfig(1e4), FULL: RopeConfig(1e6, "linear", 8.0)}

    @pytest.mark.parametrize("pattern", [3, [True, True, False] * 6])
    def test_what_newer_files_have(self, pattern: Any) -> None:
        more = {"gemma3.rope.freq_base_swa": 5e3, "gemma3.attention.sliding_window_pattern": pattern}
        config = config_from_gguf(GEMMA3_GGUF | more, [])
        assert config.local_rope == RopeConfig(5e3)
        assert [i for i in range(18) if config.window(i) is None] == [2, 5, 8, 11, 14, 17]

    def test_without_windows(self) -> None:
        config = config_from_gguf(GEMMA3_GGUF | {"gemma3.attention.sliding_window": 0}, [])
        assert (set(config.layer_types), config.local_rope) == ({FULL}, None)

    def test_final_softcap(self) -> None:
        more = {"gemma3.final_logit_softcapping": 30.0}
        assert config_from_gguf(GEMMA3_GGUF | more, []).final_logit_softcapping == 30.0

    @pytest.mark.parametrize(("layers", "scalar"), [(62, 168), (48, 128)], ids=["27B", "12B"])
    def test_the_27b_scales_otherwise(self, layers: int, scalar: int) -> None:
        more = {
            "gemma3.block_count": layers,
            "gemma3.embedding_length": 5376,
            "gemma3.attention.head_count": 32,
            "gemma3.attention.head_count_kv": 16,
            "gemma3.attention.key_length": 128,
            "gemma3.attention.value_length": 128,
        }
        assert config_from_gguf(GEMMA3_GGUF | more, []).attention_scale == pytest.approx(scalar**-0.5)

    @pytest.mark.parametrize(
        ("more", "message"),
        [
            ({"gemma3.rope.scaling.type": "dynamic"}, "RoPE scaling 'dynamic' is not supported"),
            ({"gemma3.attention.sliding_window_pattern": 0}, "sliding_window_pattern must be a positive .*, not 0"),
            ({"gemma3.attention.sliding_window_pattern": [True] * 17}, "17 layer_types for 18 layers"),
            ({"gemma3.attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0 is not supported"),
        ],
        ids=str,
    )
    def test_unsupported(self, more: dict, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            config_from_gguf(GEMMA3_GGUF | more, [])


class TestValue:
    def test_frozen(self, tiny_config: Callable) -> None:
        config = tiny_config()
        with pytest.raises(dataclasses.FrozenInstanceError):
            config.hidden_size = 1
        with pytest.raises(dataclasses.FrozenInstanceError):
            config.rope.theta = 1.0
        assert hash(config) == hash(tiny_config())
        assert config == tiny_config()
        assert config != tiny_config(hidden_size=64)

    def test_from_pretrained_reads_no_weights(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text(json.dumps(HF))
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [128001, 128008]}))
        config = ModelConfig.from_pretrained(str(tmp_path))
        assert config == config_from_hf(HF, {"eos_token_id": [128008]})

    def test_from_pretrained_without_the_loader(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ModelConfig, "reader", None)
        with pytest.raises(RuntimeError, match="no checkpoint reader is installed: use infer"):
            ModelConfig.from_pretrained("somewhere")

    @pytest.mark.parametrize(
        ("layers", "hidden", "heads", "kv_heads", "head_dim", "megabytes"),
        [(16, 2048, 32, 8, 64, 33.6), (28, 2048, 16, 8, 128, 117.4)],
        ids=["Llama-3.2-1B", "Qwen3-1.7B"],
    )
    def test_cache_sizes(
        self,
        tiny_config: Callable,
        layers: int,
        hidden: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        megabytes: float,
    ) -> None:
        config = tiny_config(
            num_hidden_layers=layers,
            hidden_size=hidden,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
        )
        needed = 1024 * config.cache_bytes_per_token(torch.bfloat16.itemsize)
        assert round(needed / 1e6, 1) == megabytes
        cache = KVCache.from_model_config(config, 1024, dtype=torch.bfloat16, device="meta")
        assert cache.memory_bytes == needed


class TestEndOfTurnInGGUF:
    """Many files give one EOS token and leave the mark that ends a turn to its name."""

    def metadata(self, **changes: Any) -> dict[str, Any]:
        tokens = ["<pad>", "<eos>", "<bos>", "a", "<end_of_turn>", "<|im_end|>"]
        return GGUF | {
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [3, 3, 3, 1, 4, 1],
            "tokenizer.ggml.eos_token_id": 1,
            **changes,
        }

    def test_marks_count_and_ordinary_words_do_not(self) -> None:
        assert config_from_gguf(self.metadata(), []).eos_token_ids == (1, 4)

    def test_a_list_of_ids(self) -> None:
        metadata = self.metadata(**{"tokenizer.ggml.eos_token_ids": [1, 3]})
        assert config_from_gguf(metadata, []).eos_token_ids == (1, 3, 4)


@pytest.mark.parametrize("name", ["rope_parameters", "rope_scaling", "text_config", "quantization_config"])
def test_settings_that_are_no_object(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be an object, not 'x'"):
        config_from_hf({"model_type": "llama", name: "x"})
