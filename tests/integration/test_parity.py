"""Small random models, saved by transformers and loaded here, must compute what transformers computes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import (
    FAMILIES,
    GEMMA3_ROPES,
    LLAMA3_ROPE,
    TOLERANCE,
    WAYS,
    WINDOW,
    byte_tokenizer,
    check_logits,
    difference,
    greedy,
    kernel_logits,
    load,
    random_ids,
    reference_model,
    save_folder,
    single_threaded,
)
from mocks import CACHES
from safetensors.torch import load_file, save_file
from torch.nn.functional import cosine_similarity
from transformers import AutoModelForCausalLM, PreTrainedModel

from infer import KVCache, SamplingParams, generate, generate_batch, load_model
from infer.backend.cpu import kernels
from infer.cache import NoCache
from infer.models.common import Decoder

Pair = tuple[PreTrainedModel, Decoder]

one_thread = pytest.fixture(scope="module", autouse=True)(single_threaded)

LLAMA: dict[str, dict[str, Any]] = {
    "untied": {},
    "tied": {"tie_word_embeddings": True},
    "gqa1": {"num_attention_heads": 4, "num_key_value_heads": 4},
    "gqa3": {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 48},
    "gqa8": {"num_attention_heads": 8, "num_key_value_heads": 1},
    "llama3-rope": {"rope_parameters": LLAMA3_ROPE},
    "linear-rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    "dynamic-rope": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}},
    "rope-theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    "head-dim": {"head_dim": 32},
    "attention-bias": {"attention_bias": True},
    "mlp-bias": {"mlp_bias": True},
    "gelu": {"hidden_act": "gelu"},
    "rms-eps": {"rms_norm_eps": 0.1},
    "all": {
        "tie_word_embeddings": True,
        "rope_parameters": LLAMA3_ROPE,
        "head_dim": 24,
        "attention_bias": True,
        "mlp_bias": True,
    },
}
QWEN2: dict[str, dict[str, Any]] = {
    "untied": {},
    "tied": {"tie_word_embeddings": True, "num_key_value_heads": 1},
    "windows": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    "window-unused": {"sliding_window": 8},
}
QWEN3: dict[str, dict[str, Any]] = {
    "untied": {},
    "tied": {"tie_word_embeddings": True},
    "gqa1": {"num_key_value_heads": 4, "head_dim": 16},
    "rope-theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "attention-bias": {"attention_bias": True},
    "windows": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    "window-unused": {"sliding_window": 8},
}
GEMMA3: dict[str, dict[str, Any]] = {
    "untied": {},
    "tied": {"tie_word_embeddings": True},
    "gqa4": {"num_key_value_heads": 1},
    "plain-ropes": {"rope_parameters": {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in GEMMA3_ROPES}},
    "scale-by-head-dim": {"query_pre_attn_scalar": 32},
    "windows-only": {"layer_types": ["sliding_attention"] * 3},
    "no-windows": {"layer_types": ["full_attention"] * 3},
    "attention-bias": {"attention_bias": True},
    "silu": {"hidden_activation": "silu"},
    "rms-eps": {"rms_norm_eps": 0.1},
}
GPT2: dict[str, dict[str, Any]] = {
    "untied": {},
    "tied": {"tie_word_embeddings": True},
    "inner": {"n_inner": None},  # four times the width
    "one-head": {"num_attention_heads": 1},
    "wide": {"hidden_size": 96, "num_attention_heads": 12},
    "odd-head-dim": {"hidden_size": 60, "num_attention_heads": 4},
    "gelu": {"activation_function": "gelu"},
    "gelu-tanh": {"activation_function": "gelu_pytorch_tanh"},
    "unscaled": {"scale_attn_weights": False},
    "by-layer": {"scale_attn_by_inverse_layer_idx": True},
    "upcast": {"reorder_and_upcast_attn": True},
    "eps": {"layer_norm_epsilon": 0.1},
    "all": {
        "tie_word_embeddings": True,
        "hidden_size": 45,
        "num_attention_heads": 3,
        "n_inner": 17,
        "activation_function": "gelu",
        "scale_attn_weights": False,
    },
}
OWN_CASES: dict[str, dict[str, dict[str, Any]]] = {
    "llama": LLAMA,
    "mistral": {"window": {}, "no-window": {"sliding_window": None, "tie_word_embeddings": True}},
    "phi3": {"longrope": {}, "plain": {"rope_parameters": None, "sliding_window": None, "num_key_value_heads": 1}},
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "qwen3_moe": {
        "plain": {},
        "norm": {"norm_topk_prob": True, "num_experts_per_tok": 4, "num_local_experts": 7},
        "all-experts": {"num_experts_per_tok": 5, "tie_word_embeddings": True},
        "some-dense": {"num_hidden_layers": 5, "decoder_sparse_step": 2, "mlp_only_layers": [3]},
        "windows": {"use_sliding_window": True, "sliding_window": 8},
    },
    "mixtral": {
        "plain": {},
        "top-1": {"num_experts_per_tok": 1, "num_local_experts": 3},
        "window": WINDOW,
        "gelu": {"hidden_act": "gelu_new"},
    },
    "olmoe": {"plain": {}, "norm": {"norm_topk_prob": True, "num_key_value_heads": 1}},
    "gpt_oss": {"plain": {}, "top-4": {"num_experts_per_tok": 4, "num_local_experts": 6, "num_hidden_layers": 2}},
    "gemma2": {"caps": {}, "no-caps": {"attn_logit_softcapping": None, "final_logit_softcapping": None}},
    "gemma3": GEMMA3,
    "smollm3": {"interval": {}, "listed": {"no_rope_layers": [0, 1, 0], "num_key_value_heads": 1}},
    "glm4": {"half": {}, "all": {"partial_rotary_factor": 1.0, "attention_bias": False}},
    "exaone4": {"windows": {}, "no-windows": {"sliding_window": None, "layer_types": ["full_attention"] * 3}},
    "starcoder2": {"window": {}, "plain": {"sliding_window": None, "use_bias": False, "tie_word_embeddings": False}},
    "stablelm": {"bias": {}, "plain": {"use_qkv_bias": False, "partial_rotary_factor": 0.5}},
    "gpt_neox": {"parallel": {}, "sequential": {"use_parallel_residual": False, "rotary_pct": 1.0}},
    "gpt2": GPT2,
}
CASES = {
    f"{family}-{name}": (family, changes)
    for family, cases in ({family: {"plain": {}} for family in FAMILIES} | OWN_CASES).items()
    for name, changes in cases.items()
}


@pytest.fixture(scope="module", params=CASES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    family, changes = CASES[request.param]
    reference = reference_model(family, **changes)
    return reference, load(save_folder(reference, tmp_path_factory.mktemp(request.param)))


@torch.inference_mode()
def test_logits_without_cache(pair: Pair) -> None:
    reference, model = pair
    check_logits(model, random_ids(), reference(random_ids()).logits)


@torch.inference_mode()
def test_logits_with_cache(pair: Pair) -> None:
    """Prefill, a second chunk, then one token at a time."""
    reference, model = pair
    ids = random_ids()
    expected = reference(ids).logits
    for cache_type, way in [*((cache_type, "kernels") for cache_type in CACHES), (KVCache, "torch")]:
        cache = cache_type.from_model_config(model.config, 60, batch_size=2, dtype="float32", device="cpu")
        for part in ids.split([20, 15, *[1] * 25], 1):
            start = cache.seq_len
            logits = WAYS[way](model, cache, part)
            assert difference(logits, expected[:, start : cache.seq_len]) <= TOLERANCE, (cache_type, way, start)
        assert cache.seq_len == 60


def test_greedy_tokens(pair: Pair) -> None:
    reference, model = pair
    ids, params = random_ids(3, 17), SamplingParams(max_new_tokens=20)
    rows = [ids[i : i + 1, :length] for i, length in enumerate((12, 5, 17))]
    expected = [greedy(reference, row, 20)[0] for row in rows]
    prompts = [row[0].tolist() for row in rows]
    assert [generate(model, byte_tokenizer(), prompt, params).token_ids for prompt in prompts] == expected
    assert generate(model, byte_tokenizer(), prompts[0], params, use_kv_cache=False).token_ids == expected[0]
    results = generate_batch(model, byte_tokenizer(), prompts, params)
    assert [result.token_ids for result in results] == expected


@torch.inference_mode()
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
@pytest.mark.parametrize("same", [True, False], ids=["same", "other"])
def test_a_head_beside_a_tied_embedding(tmp_path: Path, family: str, same: bool) -> None:
    """The config says that they are one; the file has both."""
    save_folder(reference_model(family, tie_word_embeddings=False), tmp_path)
    config, weights = tmp_path / "config.json", tmp_path / "model.safetensors"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"tie_word_embeddings": True}))
    if same:
        stored = load_file(weights)
        [embedding] = [
            tensor for name, tensor in stored.items() if name.endswith(("embed_tokens.weight", "wte.weight"))
        ]
        save_file(stored | {"lm_head.weight": embedding.clone()}, weights, {"format": "pt"})
    reference, model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32), load(tmp_path)
    assert (model.lm_head.weight is model.embed_tokens.weight) == same
    check_logits(model, random_ids(), reference(random_ids()).logits)


@torch.inference_mode()
def test_sharded(tmp_path: Path) -> None:
    reference = reference_model()
    save_folder(reference, tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    check_logits(load(tmp_path), random_ids(), reference(random_ids()).logits)


@torch.inference_mode()
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed:UserWarning")  # torch, on a CPU without bf16
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_dtypes(tmp_path: Path, stored: torch.dtype, dtype: str) -> None:
    """Any stored dtype loads into any other, rounded as torch rounds, and runs with a cache of that dtype."""
    reference = reference_model(tie_word_embeddings=True)
    save_folder(reference.to(stored), tmp_path)
    model, config = load_model(tmp_path, dtype=dtype, device="cpu")
    assert model.dtype is getattr(torch, dtype)
    stays = stored is torch.bfloat16 and dtype == "float32" and kernels() is not None  # what matrices are stored in
    narrow = stored if stays else model.dtype
    assert {parameter.dtype for parameter in model.parameters()} == {model.dtype, narrow}
    assert torch.equal(model.embed_tokens.weight, reference.model.embed_tokens.weight.to(narrow))
    ids = random_ids(1, 16)
    expected = reference.float()(ids).logits
    for run in WAYS.values():
        logits = run(model, NoCache(), ids)
        assert logits.dtype == model.dtype
        assert cosine_similarity(logits.float(), expected, dim=-1).min() > 0.99
        cache = KVCache.from_model_config(config, 16, dtype=dtype, device="cpu")
        run(model, cache, ids[:, :-1])
        assert run(model, cache, ids[:, -1:]).float().isclose(logits[:, -1:].float(), atol=0.5).all()


@torch.inference_mode()
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed:UserWarning")  # torch, on a CPU without bf16
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_16_bit(tmp_path: Path, family: str, dtype: str) -> None:
    reference = reference_model(family, hidden_size=80)  # its root, 8.94, is no 16-bit number
    save_folder(reference, tmp_path)
    model, _ = load_model(tmp_path, dtype=dtype, device="cpu")
    ids = random_ids(2, 30)
    expected = reference(ids).logits
    for run in WAYS.values():
        assert cosine_similarity(run(model, NoCache(2), ids).float(), expected, dim=-1).min() > 0.99
    embedded = reference.to(model.dtype).model.embed_tokens(ids.flatten())
    assert torch.equal(model.embed(ids.flatten(), torch.zeros(60)), embedded)  # wherever they stand


@torch.inference_mode()
@pytest.mark.parametrize("name", ["rope-theta", "linear-rope", "llama3-rope"])
@pytest.mark.parametrize("type_key", ["rope_type", "type"])
def test_older_config_keys(tmp_path: Path, name: str, type_key: str) -> None:
    """`rope_theta` and `rope_scaling` at the top level, as checkpoints before transformers 5 have them."""
    reference = reference_model(**LLAMA[name])
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
    ids = random_ids()
    assert torch.equal(kernel_logits(after, NoCache(2), ids), kernel_logits(before, NoCache(2), ids))
    check_logits(after, ids, reference(ids).logits)


def test_eos_ids_come_from_both_configs(tmp_path: Path) -> None:
    reference = reference_model()
    reference.generation_config.eos_token_id = [2, 7]
    save_folder(reference, tmp_path)
    assert load(tmp_path).config.eos_token_ids == (2, 7)
