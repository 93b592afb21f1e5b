"""ModelConfig from both kinds of metadata, and what it refuses."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from infer import KVCache, ModelConfig
from infer.config import RopeConfig

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


def without(values: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}


class TestFromHF:
    def test_values(self) -> None:
        config = ModelConfig.from_hf(HF)
        for name in ("vocab_size", "hidden_size", "num_key_value_heads", "tie_word_embeddings", "bos_token_id"):
            assert getattr(config, name) == HF[name]
        assert config.head_dim is None
        assert config.computed_head_dim == 64
        assert config.layer_types == ("full_attention",) * 16
        assert config.window(3) is None
        assert not config.attention_bias

    def test_defaults(self) -> None:
        config = ModelConfig.from_hf(without(HF, "num_key_value_heads", "rms_norm_eps", "hidden_act", "eos_token_id"))
        assert config.num_key_value_heads == 32  # plain multi-head attention
        assert config.rms_norm_eps == 1e-6
        assert config.eos_token_ids == ()
        assert config.rope == RopeConfig(theta=10_000.0)
        assert not ModelConfig.from_hf(without(HF, "tie_word_embeddings")).tie_word_embeddings

    def test_head_dim_of_its_own(self) -> None:
        assert ModelConfig.from_hf(HF | {"head_dim": 128}).computed_head_dim == 128

    def test_biases(self) -> None:
        config = ModelConfig.from_hf(HF | {"attention_bias": True, "mlp_bias": True})
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
        assert ModelConfig.from_hf(HF | keys).rope == RopeConfig(500000.0, "llama3", 32.0, 1.0, 4.0, 8192)

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
        assert ModelConfig.from_hf(HF | keys).rope == expected

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
        assert ModelConfig.from_hf(HF | {"eos_token_id": own}, generation).eos_token_ids == expected

    def test_sliding_layers(self) -> None:
        kinds = ["sliding_attention", "full_attention"] * 8
        config = ModelConfig.from_hf(HF | {"layer_types": kinds, "sliding_window": 512})
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
            ModelConfig.from_hf(without(HF, name))

    def test_all_missing_keys_are_named(self) -> None:
        with pytest.raises(ValueError, match="lacks vocab_size, hidden_size"):
            ModelConfig.from_hf(without(HF, "vocab_size", "hidden_size"))

    @pytest.mark.parametrize(
        ("keys", "message"),
        [
            ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "RoPE scaling 'yarn' is not supported"),
            ({"rope_scaling": {"type": "linear"}}, "linear RoPE scaling lacks factor"),
            (
                {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
                "llama3 RoPE scaling lacks low_freq_factor, high",
            ),
            ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
            ({"quantization_config": {"quant_method": "awq"}}, "quantised with 'awq' are not supported"),
            ({"quantization_config": {}}, "quantised with 'unknown'"),
            ({"num_key_value_heads": 5}, "32 attention heads cannot share 5 KV heads"),
            ({"hidden_size": 2050}, "hidden_size 2050 is not divisible by 32 heads: set head_dim"),
            ({"head_dim": 63}, "head_dim must be even for RoPE, not 63"),
            ({"head_dim": -2}, "head_dim must be .*-2"),
            ({"head_dim": "64"}, "head_dim must be .*'64'"),
            ({"layer_types": ["full_attention"]}, "1 layer_types for 16 layers"),
            ({"layer_types": ["linear_attention"] * 16}, "layer type 'linear_attention' is not supported"),
            ({"layer_types": ["sliding_attention"] * 16}, "need a positive sliding_window, not None"),
            ({"layer_types": ["sliding_attention"] * 16, "sliding_window": 0}, "positive sliding_window, not 0"),
        ],
        ids=str,
    )
    def test_unsupported(self, keys: dict, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            ModelConfig.from_hf(HF | keys)

    def test_null_quantization_is_none(self) -> None:
        assert ModelConfig.from_hf(HF | {"quantization_config": None}) == ModelConfig.from_hf(HF)

    @pytest.mark.parametrize("name", [name for name in HF if name.startswith("num_") or name.endswith("_size")])
    @pytest.mark.parametrize("value", [-1, 1.5, "8"])
    def test_sizes_must_be_positive_integers(self, name: str, value: Any) -> None:
        with pytest.raises(ValueError, match=rf"{name} must be a positive integer, not {value!r}"):
            ModelConfig.from_hf(HF | {name: value})


class TestFromGGUF:
    def test_values(self) -> None:
        config = ModelConfig.from_gguf(GGUF, ["token_embd.weight", "blk.0.attn_q.weight"])
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
            ("blk.0.ffn_down.bias", "mlp_bias", True),
        ],
    )
    def test_what_only_the_tensors_tell(self, tensor: str, name: str, value: bool) -> None:
        assert getattr(ModelConfig.from_gguf(GGUF, [tensor]), name) == value
        assert getattr(ModelConfig.from_gguf(GGUF, []), name) != value

    def test_defaults(self) -> None:
        metadata = without(GGUF, *(f"llama.{k}" for k in ("attention.head_count_kv", "rope.freq_base", "vocab_size")))
        config = ModelConfig.from_gguf(metadata | {"tokenizer.ggml.tokens": ["a"] * 77}, [])
        assert (config.num_key_value_heads, config.rope.theta, config.vocab_size) == (9, 10_000.0, 77)

    def test_all_eos_ids(self) -> None:
        more = {"tokenizer.ggml.eot_token_id": 7, "tokenizer.ggml.eom_token_id": 2}
        assert ModelConfig.from_gguf(GGUF | more, []).eos_token_ids == (2, 7)

    def test_key_length(self) -> None:
        more = {"llama.attention.key_length": 128, "llama.rope.dimension_count": 128}
        assert ModelConfig.from_gguf(GGUF | more, []).computed_head_dim == 128

    def test_rope(self) -> None:
        more = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
        assert ModelConfig.from_gguf(GGUF | more, []).rope == RopeConfig(100000.0, "linear", 4.0)
        assert ModelConfig.from_gguf(GGUF, [], (1.0, 2.0)).rope == RopeConfig(100000.0, divisors=(1.0, 2.0))

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
            ModelConfig.from_gguf(without(GGUF, f"llama.{key}"), [])

    @pytest.mark.parametrize(
        ("more", "message"),
        [
            ({"llama.rope.scaling.type": "yarn"}, "RoPE scaling 'yarn' is not supported"),
            ({"llama.rope.dimension_count": 32}, "RoPE over 32 of 64 dimensions is not supported"),
            ({"llama.attention.head_count_kv": 2}, "9 attention heads cannot share 2"),
            ({"llama.attention.head_count": 0}, "llama.attention.head_count must be"),
            ({"llama.attention.head_count": [9] * 30}, "llama.attention.head_count must be"),  # one per layer
        ],
    )
    def test_unsupported(self, more: dict, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            ModelConfig.from_gguf(GGUF | more, [])


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
        assert config == ModelConfig.from_hf(HF, {"eos_token_id": [128008]})

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
