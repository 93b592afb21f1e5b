"""Small random Llamas, saved by transformers and loaded here, must compute what transformers computes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import LLAMA3_ROPE, reference_model, save_folder
from transformers import LlamaForCausalLM

from infer import GrowingCache, KVCache, SamplingParams, Tokenizer, generate, load_model
from infer.models.common import Decoder

TOLERANCE = 1e-4
CACHES = (KVCache, GrowingCache)

CASES: dict[str, dict[str, Any]] = {
    "untied": {},
    "tied": {"tie_word_embeddings": True},
    "gqa1": {"num_attention_heads": 4, "num_key_value_heads": 4},
    "gqa3": {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 48},
    "gqa8": {"num_attention_heads": 8, "num_key_value_heads": 1},
    "llama3-rope": {"rope_parameters": LLAMA3_ROPE},
    "linear-rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    "rope-theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    "head-dim": {"head_dim": 32},
    "attention-bias": {"attention_bias": True},
    "mlp-bias": {"mlp_bias": True},
    "rms-eps": {"rms_norm_eps": 0.1},
    "all": {
        "tie_word_embeddings": True,
        "rope_parameters": LLAMA3_ROPE,
        "head_dim": 24,
        "attention_bias": True,
        "mlp_bias": True,
    },
}


def random_ids(rows: int = 2, length: int = 60) -> torch.Tensor:
    return torch.randint(3, 128, (rows, length), generator=torch.Generator().manual_seed(1))


def load(path: Path) -> Decoder:
    return load_model(path, dtype="float32", device="cpu")[0]


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    assert a.shape == b.shape
    return (a - b).abs().max().item()


@pytest.fixture(scope="module", params=CASES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[LlamaForCausalLM, Path]:
    reference = reference_model(**CASES[request.param])
    return reference, save_folder(reference, tmp_path_factory.mktemp(request.param))


@torch.inference_mode()
def test_logits_without_cache(pair: tuple[LlamaForCausalLM, Path]) -> None:
    reference, folder = pair
    expected = reference(random_ids()).logits
    assert expected.std() > 0.5  # logits that are all alike would agree with anything
    assert difference(load(folder)(random_ids()), expected) <= TOLERANCE


@torch.inference_mode()
@pytest.mark.parametrize("cache_type", CACHES)
def test_logits_with_cache(pair: tuple[LlamaForCausalLM, Path], cache_type: type[KVCache | GrowingCache]) -> None:
    """Prefill, a second chunk, then one token at a time."""
    reference, folder = pair
    model, ids = load(folder), random_ids()
    expected = reference(ids).logits
    cache = cache_type.from_model_config(model.config, 60, batch_size=2, dtype="float32", device="cpu")
    start = 0
    for n in (20, 15, *[1] * 25):
        logits = model(ids[:, start : start + n], cache)
        start += n
        assert difference(logits, expected[:, start - 1 : start]) <= TOLERANCE
    assert cache.seq_len == 60


def test_greedy_tokens(pair: tuple[LlamaForCausalLM, Path]) -> None:
    reference, folder = pair
    model, tokenizer = load(folder), Tokenizer(folder)
    params = SamplingParams(max_new_tokens=32)
    for ids in random_ids(3, 12).tolist():
        expected = reference.generate(torch.tensor([ids]), max_new_tokens=32, do_sample=False, pad_token_id=0)
        for use_kv_cache in (True, False):
            result = generate(model, tokenizer, ids, params, use_kv_cache=use_kv_cache)
            assert result.token_ids == expected[0, 12:].tolist()


@torch.inference_mode()
def test_sharded(tmp_path: Path) -> None:
    reference = reference_model()
    save_folder(reference, tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    assert difference(load(tmp_path)(random_ids()), reference(random_ids()).logits) <= TOLERANCE


@torch.inference_mode()
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed:UserWarning")  # torch, on a CPU without bf16
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_dtypes(tmp_path: Path, stored: torch.dtype, dtype: str) -> None:
    """Any stored dtype loads into any other, rounded as torch rounds, and runs with a cache of that dtype."""
    reference = reference_model(tie_word_embeddings=True)
    save_folder(reference.to(stored), tmp_path)
    model, config = load_model(tmp_path, dtype=dtype, device="cpu")
    assert {parameter.dtype for parameter in model.parameters()} == {getattr(torch, dtype)}
    assert torch.equal(model.embed_tokens.weight, reference.model.embed_tokens.weight.to(model.dtype))
    ids = random_ids(1, 16)
    expected = reference.float()(ids).logits
    logits = model(ids)
    assert logits.dtype == model.dtype
    assert torch.nn.functional.cosine_similarity(logits.float(), expected, dim=-1).min() > 0.99
    cache = KVCache.from_model_config(config, 16, dtype=dtype, device="cpu")
    model(ids[:, :-1], cache)
    assert model(ids[:, -1:], cache).float().isclose(logits[:, -1:].float(), atol=0.5).all()


@torch.inference_mode()
@pytest.mark.parametrize("name", ["rope-theta", "linear-rope", "llama3-rope"])
@pytest.mark.parametrize("type_key", ["rope_type", "type"])
def test_older_config_keys(tmp_path: Path, name: str, type_key: str) -> None:
    """`rope_theta` and `rope_scaling` at the top level, as checkpoints before transformers 5 have them."""
    reference = reference_model(**CASES[name])
    save_folder(reference, tmp_path)
    before = load(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    kind = rope.pop("rope_type")
    config["rope_scaling"] = None if kind == "default" else {type_key: kind, **rope}
    path.write_text(json.dumps(config))
    after = load(tmp_path)
    assert after.config == before.config
    assert torch.equal(after(random_ids()), before(random_ids()))
    assert difference(after(random_ids()), reference(random_ids()).logits) <= TOLERANCE


def test_eos_ids_come_from_both_configs(tmp_path: Path) -> None:
    reference = reference_model()
    reference.generation_config.eos_token_id = [2, 7]
    save_folder(reference, tmp_path)
    assert load(tmp_path).config.eos_token_ids == (2, 7)
