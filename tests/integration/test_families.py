"""Windows, the configs that Gemma 3 is published with, and GGUF files of each family, against transformers."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from amount import ALL, amount
from checkpoints import (
    GEMMA3_ROPES,
    LONGROPE,
    TOLERANCE,
    YARN,
    byte_tokenizer,
    byte_tokenizer_metadata,
    check_every_way,
    check_logits,
    difference,
    greedy,
    kernel_logits,
    load,
    logits_in_chunks,
    random_ids,
    randomised,
    reference_model,
    save_folder,
    save_gguf,
    single_threaded,
)
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    PreTrainedModel,
)

from infer import ModelConfig, SamplingParams, SlidingCache, Tokenizer, generate
from infer.backend.fingerprint import fingerprint
from infer.cache import NoCache
from infer.config import RopeConfig
from infer.models.common import Decoder

W = 8
LENGTHS = (W - 1, W, W + 1, 2 * W + 3)
CHUNKS = (1, 3, W, W + 1, 2 * W + 3)
Pair = tuple[PreTrainedModel, Decoder]

one_thread = pytest.fixture(scope="module", autouse=True)(single_threaded)

# The layers' windows in the order of the layers, and a model that has them.
WINDOWS: dict[str, tuple[list[int | None], str, dict[str, Any]]] = {
    "gemma3-untied": ([W, None, W], "gemma3", {}),
    "gemma3-tied": ([W, None, W], "gemma3", {"tie_word_embeddings": True}),
    "gemma3-pattern-3": ([W, W, None], "gemma3", {"sliding_window_pattern": 3}),
    "gemma3-pattern-6": (
        [W, W, W, W, W, None, W],
        "gemma3",
        {"sliding_window_pattern": 6, "num_hidden_layers": 7},
    ),
    "gemma3-window-1": ([1, None, 1], "gemma3", {"sliding_window": 1}),
    "gemma3-window-100": ([100, None, 100], "gemma3", {"sliding_window": 100}),
    "qwen3-untied": ([None] * 3, "qwen3", {}),
    "qwen3-tied": ([None] * 3, "qwen3", {"tie_word_embeddings": True}),
    "qwen3-windows": (
        [None, W, W],
        "qwen3",
        {"use_sliding_window": True, "sliding_window": W, "max_window_layers": 1},
    ),
    "gpt2-untied": ([None] * 3, "gpt2", {}),
    "gpt2-tied": ([None] * 3, "gpt2", {"tie_word_embeddings": True}),
}


# Heads that are tied are in test_parity.py with every cache, and without windows one length is like another.
EVERY_CASE = list(itertools.product(WINDOWS, LENGTHS))
ENOUGH_CASES = [
    (name, length)
    for name, length in EVERY_CASE
    if "-tied" not in name and (length == LENGTHS[-1] or any(WINDOWS[name][0]))
]


@pytest.fixture(scope="module")
def windowed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    windows, family, changes = WINDOWS[request.param]
    reference = reference_model(family, **changes)
    model = load(save_folder(reference, tmp_path_factory.mktemp(request.param)))
    assert [model.config.window(i) for i in range(model.config.num_hidden_layers)] == windows
    return reference, model


@torch.inference_mode()
@pytest.mark.parametrize(("windowed", "length"), amount(EVERY_CASE, ENOUGH_CASES), indirect=["windowed"])
def test_windows(windowed: Pair, length: int) -> None:
    """Every position's logits, with each cache, in chunks, for one row and for two."""
    check_every_way(*windowed, length, CHUNKS)


@torch.inference_mode()
@pytest.mark.parametrize("window", [W, 128, 150])
def test_long_passes(tmp_path: Path, window: int) -> None:
    """More queries than are attended from at once."""
    reference = reference_model("gemma3", sliding_window=window, max_position_embeddings=512)
    check_every_way(reference, load(save_folder(reference, tmp_path)), 300, (129, 150, 300))


@pytest.mark.parametrize("prefill_chunk", [None, 1, 3, W])
@pytest.mark.parametrize("name", ["gemma3-untied", "qwen3-windows", "qwen3-untied"])
def test_greedy_with_the_default_cache(tmp_path: Path, name: str, prefill_chunk: int | None) -> None:
    windows, family, changes = WINDOWS[name]
    reference = reference_model(family, **changes)
    model, tokenizer = load(save_folder(reference, tmp_path)), Tokenizer(tmp_path)
    ids, params = random_ids(1, 2 * W + 3), SamplingParams(max_new_tokens=16)
    result = generate(model, tokenizer, ids[0].tolist(), params, prefill_chunk=prefill_chunk)
    assert result.token_ids == greedy(reference, ids, 16)[0]
    positions = 2 * W + 3 + 16
    slots = sum(positions if window is None else min(window + (prefill_chunk or 512), positions) for window in windows)
    assert result.cache_memory_bytes == 2 * slots * 2 * 32 * 4  # K and V, 2 heads of 32 float32 numbers


# Configs as they are published


def rewrite_as_published(folder: Path, **more: Any) -> None:
    """config.json with the keys that Google's files have. more: those for the kinds of layers."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    ropes = config.pop("rope_parameters")
    whole, local = ropes["full_attention"], ropes["sliding_attention"]
    for name in ("layer_types", "_sliding_window_pattern", "use_bidirectional_attention"):
        config.pop(name)
    if config["tie_word_embeddings"]:
        config.pop("tie_word_embeddings")
    config |= {
        "rope_theta": whole["rope_theta"],
        "rope_local_base_freq": local["rope_theta"],
        "rope_scaling": {"rope_type": "linear", "factor": whole["factor"]} if "factor" in whole else None,
        "cache_implementation": "hybrid",
        "torch_dtype": config.pop("dtype"),
        "transformers_version": "4.50.0.dev0",
    }
    path.write_text(json.dumps(config | more))


PLAIN_ROPES = {
    "full_attention": {"rope_type": "default", "rope_theta": 5e4},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
}
PATTERNS: dict[str, tuple[int, dict[str, Any]]] = {
    "2": (2, {"sliding_window_pattern": 2}),
    "3": (3, {"sliding_window_pattern": 3}),
    "6": (6, {"sliding_window_pattern": 6}),
    "none": (6, {}),
    "private": (6, {"_sliding_window_pattern": 6}),  # as Gemma 3 270M has it
    "layer-types": (2, {"layer_types": ["sliding_attention", "full_attention"] * 3 + ["sliding_attention"]}),
    "layer-types-first": (
        2,
        {
            "layer_types": ["sliding_attention", "full_attention"] * 3 + ["sliding_attention"],
            "_sliding_window_pattern": 6,
            "use_bidirectional_attention": False,
        },
    ),
}


@torch.inference_mode()
@pytest.mark.parametrize(
    ("name", "tied"), [(name, tied) for i, name in enumerate(PATTERNS) for tied in (0, 1) if ALL or i % 2 == tied]
)
def test_published_gemma3_configs(tmp_path: Path, name: str, tied: int) -> None:
    pattern, keys = PATTERNS[name]
    reference = reference_model(
        "gemma3",
        num_hidden_layers=7,
        sliding_window_pattern=pattern,
        tie_word_embeddings=bool(tied),
        rope_parameters=PLAIN_ROPES if tied else GEMMA3_ROPES,
    )
    save_folder(reference, tmp_path)
    before = ModelConfig.from_pretrained(str(tmp_path))
    rewrite_as_published(tmp_path, **keys)
    model, ids = load(tmp_path), random_ids(2, 2 * W + 3)
    assert model.config == before
    reread = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    expected = reference(ids).logits
    assert difference(reread(ids).logits, expected) <= TOLERANCE
    check_logits(model, ids, expected)


@torch.inference_mode()
@pytest.mark.parametrize(
    "windows",
    [
        {"use_sliding_window": False, "sliding_window": None, "max_window_layers": 3},
        {"use_sliding_window": False, "sliding_window": W, "max_window_layers": 1},
        {"use_sliding_window": True, "sliding_window": W, "max_window_layers": 1},
    ],
    ids=["none", "unused", "used"],
)
def test_published_qwen3_configs(tmp_path: Path, windows: dict[str, Any]) -> None:
    """The kinds of layers follow from max_window_layers."""
    save_folder(reference_model("qwen3"), tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
    config.pop("layer_types")
    path.write_text(json.dumps(config | windows | {"rope_scaling": None}))
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = random_ids(2, 2 * W + 3)
    check_logits(load(tmp_path), ids, reference(ids).logits)


# The text part of a checkpoint that also sees

VISION = {
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
SPARSE_TEXT = {  # the keys of gemma-3-4b-it, and none besides
    "hidden_size": 16,
    "intermediate_size": 32,
    "model_type": "gemma3_text",
    "num_hidden_layers": 7,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "sliding_window": W,
}


def multimodal(**text: Any) -> PreTrainedModel:
    tied = text.get("tie_word_embeddings", True)
    config = Gemma3Config(text_config=text, vision_config=VISION, mm_tokens_per_image=4, tie_word_embeddings=tied)
    return randomised(Gemma3ForConditionalGeneration(config))


def rename_tensors(folder: Path, *renames: tuple[str, str]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for old, new in renames:
        tensors = {name.replace(old, new) if name.startswith(old) else name: t for name, t in tensors.items()}
    save_file(tensors, path, {"format": "pt"})


@torch.inference_mode()
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("names", ["language_model.model.", "model.language_model."])
def test_text_part(tmp_path: Path, names: str, tied: bool) -> None:
    text = reference_model("gemma3", tie_word_embeddings=tied).config.to_dict()
    reference = multimodal(**text)
    save_folder(reference, tmp_path)
    if names == "model.language_model.":
        rename_tensors(
            tmp_path,
            ("language_model.model.", "model.language_model."),
            ("language_model.lm_head.", "lm_head."),
            ("vision_tower.", "model.vision_tower."),
            ("multi_modal_projector.", "model.multi_modal_projector."),
        )
    stored = load_file(tmp_path / "model.safetensors")
    assert any(name.startswith(names) for name in stored)
    assert any("vision_tower." in name for name in stored)
    assert any("multi_modal_projector." in name for name in stored)
    model, ids = load(tmp_path), random_ids(2, 2 * W + 3)
    expected = reference(ids).logits
    check_logits(model, ids, expected)
    cache = SlidingCache.from_model_config(model.config, 2 * W + 3, batch_size=2, dtype="float32", device="cpu")
    assert difference(logits_in_chunks(model, ids, cache, 3), expected) <= TOLERANCE


@torch.inference_mode()
def test_sparse_config(tmp_path: Path) -> None:
    """What gemma-3-4b-it's config.json leaves out is the reference's default."""
    reference = multimodal(**SPARSE_TEXT)
    save_folder(reference, tmp_path)
    rename_tensors(tmp_path, ("vision_tower.", "vision_tower.vision_model."))  # as on the hub
    published = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "boi_token_index": 255999,
        "eoi_token_index": 256000,
        "eos_token_id": [1, 106],
        "image_token_index": 262144,
        "initializer_range": 0.02,
        "mm_tokens_per_image": 4,
        "model_type": "gemma3",
        "text_config": SPARSE_TEXT,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.50.0.dev0",
        "vision_config": VISION | {"model_type": "siglip_vision_model", "vision_use_head": False},
    }
    (tmp_path / "config.json").write_text(json.dumps(published))
    model, ids = load(tmp_path), random_ids(1, 2 * W + 3)
    expected = Gemma3TextConfig(**SPARSE_TEXT)
    for name in (
        "vocab_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
        "rms_norm_eps",
        "query_pre_attn_scalar",
        "sliding_window",
        "attention_bias",
        "tie_word_embeddings",
        "bos_token_id",
    ):
        assert getattr(model.config, name) == getattr(expected, name), name
    assert model.config.layer_types == tuple(expected.layer_types)
    assert model.config.eos_token_ids == (1, 106)
    ropes = expected.rope_parameters
    assert model.config.rope == RopeConfig(ropes["full_attention"]["rope_theta"], "linear", 8.0)
    assert model.config.local_rope == RopeConfig(ropes["sliding_attention"]["rope_theta"])
    check_logits(model, ids, reference(ids).logits)


# GGUF

GGUF_EPS = 2.0**-20  # a float32 number, which is what the file holds
GGUF_GEMMA3 = {  # what the metadata leaves out has these values
    "num_hidden_layers": 7,
    "sliding_window_pattern": 6,
    "rms_norm_eps": GGUF_EPS,
    "query_pre_attn_scalar": 32,
    "rope_parameters": GEMMA3_ROPES | {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}},
}
PATTERN_KEY, THETA_KEY = "gemma3.attention.sliding_window_pattern", "gemma3.rope.freq_base_swa"
GGUF_CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen3-untied": ("qwen3", {"rms_norm_eps": GGUF_EPS}, {}),
    "qwen3-tied": ("qwen3", {"rms_norm_eps": GGUF_EPS, "tie_word_embeddings": True}, {}),
    "gpt2-untied": ("gpt2", {}, {}),
    "gpt2-tied": ("gpt2", {"tie_word_embeddings": True}, {}),
    "gpt2-inner": ("gpt2", {"n_inner": None}, {}),
    "gemma3-untied": ("gemma3", GGUF_GEMMA3, {}),
    "gemma3-tied": ("gemma3", GGUF_GEMMA3 | {"tie_word_embeddings": True}, {}),
    "gemma3-default-ropes": (
        "gemma3",
        GGUF_GEMMA3 | {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 5e4}}},
        {},
    ),
    "gemma3-local-theta": ("gemma3", GGUF_GEMMA3 | {"rope_parameters": GEMMA3_ROPES}, {THETA_KEY: 1e3}),
    "gemma3-pattern-number": ("gemma3", GGUF_GEMMA3 | {"sliding_window_pattern": 3}, {PATTERN_KEY: 3}),
    "mistral": ("mistral", {"sliding_window": None}, {}),
    "mistral-window": ("mistral", {}, {"llama.attention.sliding_window": W}),
    "ministral3": ("ministral3", {"sliding_window": None}, {}),
    "phi3": ("phi3", {"rope_parameters": LONGROPE | {"short_factor": [1.0, 1.25, 1.5, 1.75, 2.0, 2.5]}}, {}),
    "phi3-plain": ("phi3", {"sliding_window": None, "rope_parameters": None, "num_key_value_heads": 1}, {}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}, {}),
    "gemma2": ("gemma2", {"tie_word_embeddings": True, "query_pre_attn_scalar": 32}, {}),
    "olmo2-yarn": ("olmo2", {"rope_parameters": YARN | {"beta_fast": 16.0, "beta_slow": 2.0}}, {}),
    "olmo3": ("olmo3", {}, {}),
    "smollm3": ("smollm3", {"num_hidden_layers": 5, "no_rope_layer_interval": 4}, {}),
    "granite": ("granite", {"attention_multiplier": 0.25, "residual_multiplier": 0.5, "logits_scaling": 0.75}, {}),
    "glm4": ("glm4", {}, {}),
    "exaone4": ("exaone4", {}, {}),
    "exaone4-plain": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3}, {}),
    "starcoder2": ("starcoder2", {"sliding_window": None, "tie_word_embeddings": True}, {}),
    "stablelm": ("stablelm", {}, {}),
    "gpt-neox": ("gpt_neox", {}, {}),
    "mixtral": ("mixtral", {}, {}),
    "qwen3-moe": ("qwen3_moe", {"norm_topk_prob": True}, {}),
    "olmoe": ("olmoe", {"num_key_value_heads": 1}, {}),
    "granite-moe": (
        "granitemoe",
        {"attention_multiplier": 0.25, "residual_multiplier": 0.5, "logits_scaling": 0.75},
        {},
    ),
    "gpt-oss": ("gpt_oss", {}, {}),
    "gpt-neox-sequential": ("gpt_neox", {"use_parallel_residual": False, "attention_bias": False}, {}),
    "gemma3-pattern-list": (
        "gemma3",
        GGUF_GEMMA3 | {"sliding_window_pattern": 2},
        {PATTERN_KEY: [True, False, True, False, True, False, True]},
    ),
}


def as_gguf_says(config: ModelConfig) -> dict[str, Any]:
    """The values of a folder's config in the words of a GGUF file's."""
    values = vars(config) | {"scale": config.attention_scale, "head_dim": config.computed_head_dim}
    values.pop("query_pre_attn_scalar")  # only the scale counts
    values["model_type"] = {"gemma3_text": "gemma3", "mistral": "llama"}.get(config.model_type, config.model_type)
    values["moe_intermediate_size"] = config.moe_intermediate_size or config.intermediate_size
    if config.attention_output_bias == config.attention_bias:
        values["attention_output_bias"] = None
    values["rms_norm_eps"] = torch.tensor(config.rms_norm_eps).item()
    if config.rope is not None:  # float32 in the file
        values |= {
            name: replace(rope, attention_factor=round(rope.attention_factor, 5))
            for name in ("rope", "long_rope")
            if (rope := values[name]) is not None
        }
    return values


@torch.inference_mode()
@pytest.mark.parametrize("name", GGUF_CASES)
def test_gguf(tmp_path: Path, name: str) -> None:
    family, changes, keys = GGUF_CASES[name]
    reference = reference_model(family, **changes)
    from_folder = load(save_folder(reference, tmp_path / "folder"))
    model = load(save_gguf(reference, tmp_path / "m.gguf", metadata=byte_tokenizer_metadata() | keys))
    assert as_gguf_says(model.config) == as_gguf_says(from_folder.config)
    ids = random_ids(2, 2 * W + 3)
    check_logits(model, ids, reference(ids).logits)


@torch.inference_mode()
@pytest.mark.parametrize("form", ["folder", "gguf"])
def test_longrope(tmp_path: Path, form: str) -> None:
    """Beyond the original context of 80, transformers has the long factors; here, a model loaded for a longer one."""
    reference, ids = reference_model("phi3"), random_ids(2, 100)
    path = save_folder(reference, tmp_path / "m")
    if form == "gguf":
        path = save_gguf(reference, tmp_path / "m.gguf", metadata=byte_tokenizer_metadata())
    short, long = load(path), load(path, context=120)
    check_logits(short, ids[:, :80], reference(ids[:, :80]).logits)
    check_every_way(reference, long, 100, (7, 81))
    prompt, params = ids[0].tolist(), SamplingParams(max_new_tokens=20)
    assert generate(long, byte_tokenizer(), prompt, params).token_ids == greedy(reference, ids[:1], 20)[0]
    with pytest.raises(ValueError, match=r"model's context of 80: .* longer context, up to 160 \(--context\)$"):
        generate(short, byte_tokenizer(), prompt, params)
    with pytest.raises(ValueError, match=r"model's context of 120: shorten the prompt or lower max_new_tokens$"):
        generate(long, byte_tokenizer(), [*prompt, 3], params)
    assert difference(load(path, context=80)(ids[:, :50]), short(ids[:, :50])) == 0
    assert difference(long(ids[:, :50]), short(ids[:, :50])) > 0.1


@torch.inference_mode()
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_shorter_context(tmp_path: Path, family: str) -> None:
    """It changes no number; of learned positions only the first are loaded."""
    save_folder(reference_model(family), tmp_path)
    whole, short = load(tmp_path), load(tmp_path, context=40)
    ids = random_ids(1, 40)
    assert torch.equal(kernel_logits(short, NoCache(), ids), kernel_logits(whole, NoCache(), ids))
    with pytest.raises(ValueError, match="model's context of 40"):
        generate(short, byte_tokenizer(), ids[0].tolist(), SamplingParams(max_new_tokens=1))
    for context in (0, 129, True):
        with pytest.raises(ValueError, match=f"context must be from 1 to the model's 128, not {context}"):
            load(tmp_path, context=context)


def test_keys_and_values_are_of_the_factors_not_of_the_context(tmp_path: Path) -> None:
    """In files of keys and values."""
    save_folder(reference_model("phi3"), tmp_path)
    names = [fingerprint(load(tmp_path, context)) for context in (None, 30, 80, 81, 160)]
    assert names[0] == names[1] == names[2] != names[3] == names[4]


# What transformers reads of GGUF files; sizes that it does not read have its defaults.
READ_BY_TRANSFORMERS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "phi3": {"rope_parameters": None, "sliding_window": None},
    "qwen2": {},
    "qwen3": {"head_dim": 128},
    "gemma2": {
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "gemma3": GGUF_GEMMA3
    | {
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 5e4}},
    },
    "starcoder2": {"sliding_window": None},
    "stablelm": {},
    "gpt2": {"n_inner": None},
}


@torch.inference_mode()
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", READ_BY_TRANSFORMERS)
def test_gguf_read_by_transformers(tmp_path: Path, family: str, tied: bool) -> None:
    if not tied and family == "gemma2":
        pytest.skip("llama.cpp's converter leaves an untied head out")
    reference = reference_model(family, tie_word_embeddings=tied, **READ_BY_TRANSFORMERS[family])
    metadata = byte_tokenizer_metadata() | {"tokenizer.ggml.padding_token_id": 0}
    path = save_gguf(reference, tmp_path / "m.gguf", metadata=metadata)
    reread = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32)
    ids = random_ids(2, 2 * W + 3)
    check_logits(load(path), ids, reread(ids).logits)
