"""Hugging Face folders: what is read, what is tolerated, and what is refused before anything is allocated."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import byte_tokenizer, reference_model, save_folder
from safetensors.torch import load_file, save_file

from infer import ModelConfig, Tokenizer, load_model, render_chat_template
from infer.loader import load as load_module

INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_folder(reference_model(num_hidden_layers=2), tmp_path / "model")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return save_folder(reference_model(num_hidden_layers=2), tmp_path / "model", max_shard_size="60KB")


def load(path: Path) -> Any:
    return load_model(path, dtype="float32", device="cpu")[0]


Refuse = Callable[..., None]


def edit_json(path: Path, **changes: Any) -> None:
    """Set keys; None removes one."""
    contents = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in contents.items() if value is not None}))


def edit_weights(folder: Path, **changes: torch.Tensor | None) -> None:
    """Set tensors, by names with / for dots; None removes one."""
    path = folder / "model.safetensors"
    tensors: dict[str, Any] = load_file(path) | {name.replace("/", "."): value for name, value in changes.items()}
    save_file({name: value for name, value in tensors.items() if value is not None}, path, {"format": "pt"})


# Missing and damaged files


def test_missing_config(folder: Path, refuse: Refuse) -> None:
    (folder / "config.json").unlink()
    refuse(folder, "not a model folder: it has no config.json", FileNotFoundError)


def test_folder_of_ggufs_names_them(tmp_path: Path, refuse: Refuse) -> None:
    (tmp_path / "weights.gguf").touch()
    refuse(tmp_path, r"name it: weights\.gguf", FileNotFoundError)


def test_missing_weights(folder: Path, refuse: Refuse) -> None:
    (folder / "model.safetensors").unlink()
    refuse(folder, "no weights", FileNotFoundError)


def test_missing_shard(sharded: Path, refuse: Refuse) -> None:
    shard = sorted(sharded.glob("model-*.safetensors"))[1]
    shard.unlink()
    refuse(sharded, f"{shard.name} is missing", FileNotFoundError)


def test_index_promises_a_tensor_that_the_shard_lacks(sharded: Path, refuse: Refuse) -> None:
    weight_map = json.loads((sharded / INDEX).read_text())["weight_map"]
    weight_map["model.norm.weight"] = weight_map["model.embed_tokens.weight"]
    edit_json(sharded / INDEX, weight_map=weight_map)
    refuse(sharded, r"lacks model\.norm\.weight")


@pytest.mark.parametrize("keep", [0, 4, 1000, -1])
def test_truncated_weights(folder: Path, refuse: Refuse, keep: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    refuse(folder, r"model\.safetensors is damaged or cut short")


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", INDEX])
@pytest.mark.parametrize("contents", [b"", b'{"a": 1', b"\xff\xfe\x00", b"[1, 2]", b"null"])
def test_invalid_json(sharded: Path, refuse: Refuse, name: str, contents: bytes) -> None:
    (sharded / name).write_bytes(contents)
    refuse(sharded, f"{name} (is not valid JSON|is not UTF-8 text|should hold a JSON object)")


@pytest.mark.parametrize("weight_map", [None, {}])
def test_index_without_tensors(sharded: Path, refuse: Refuse, weight_map: dict[str, str] | None) -> None:
    edit_json(sharded / INDEX, weight_map=weight_map)
    refuse(sharded, "lacks")


def test_neither_a_folder_nor_gguf(tmp_path: Path, refuse: Refuse) -> None:
    (tmp_path / "weights.bin").write_bytes(b"x")
    refuse(tmp_path / "weights.bin", "not a checkpoint")


def test_unknown_name(refuse: Refuse) -> None:
    refuse(Path("no-such-model"), "no model 'no-such-model': .*infer models.*hub id", FileNotFoundError)


# Configs


@pytest.mark.parametrize("model_type", ["mamba", None])
def test_unsupported_model_type(folder: Path, refuse: Refuse, model_type: str | None) -> None:
    edit_json(folder / "config.json", model_type=model_type)
    refuse(folder, f"architecture {model_type!r} is not supported; supported: .*llama")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, "config.json lacks hidden_size"),
        ({"hidden_size": 0}, "hidden_size must be a positive integer up to .*, not 0"),
        ({"hidden_size": "big"}, "hidden_size must be a positive integer up to .*, not 'big'"),
        ({"num_key_value_heads": 3}, "4 attention heads must be a multiple of 3"),
        ({"hidden_act": "relu"}, "hidden_act 'relu' is not supported"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantized with 'awq'"),
        ({"rope_parameters": {"rope_type": "su", "factor": 2.0}}, "'su' is not supported"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "dynamic RoPE scaling lacks factor"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, "lacks low_freq_factor, high_freq_factor"),
        ({"head_dim": 7}, "head_dim must be even"),
        ({"layer_types": ["full_attention"]}, "1 layer_types for 2 layers"),
    ],
)
def test_unusable_configs(folder: Path, refuse: Refuse, changes: dict[str, Any], message: str) -> None:
    edit_json(folder / "config.json", **changes)
    refuse(folder, message)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("qwen3", {"rope_parameters": {"rope_type": "su", "factor": 2.0}}, "'su' is not supported"),
        ("qwen3", {"layer_types": ["sliding_attention"] * 2}, "need a positive sliding_window, not None"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention True is not supported"),
        ("gpt2", {"activation_function": "relu"}, "'relu' is not supported for gpt2"),
        ("gpt2", {"n_head": 5}, "hidden_size 64 is not divisible by 5 heads"),
        ("gemma3", {"final_logit_softcapping": 0.0}, "final_logit_softcapping must be above 0"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention True is not supported"),
        ("gemma3", {"hidden_activation": "relu"}, "'relu' is not supported"),
        ("gemma3", {"layer_types": None, "sliding_window_pattern": 0}, "pattern must be a positive integer .*, not 0"),
        ("gemma3", {"layer_types": ["sliding_attention"]}, "1 layer_types for 2 layers"),
        ("gemma3", {"sliding_window": 0}, "need a positive sliding_window, not 0"),
        ("gemma3", {"rope_parameters": {"full_attention": {"rope_type": "su"}}}, "'su' is not supported"),
    ],
)
def test_unusable_family_configs(
    tmp_path: Path, refuse: Refuse, family: str, changes: dict[str, Any], message: str
) -> None:
    folder = save_folder(reference_model(family, num_hidden_layers=2), tmp_path)
    edit_json(folder / "config.json", **changes)
    refuse(folder, rf"config\.json: .*{message}")


def test_config_without_weights(folder: Path) -> None:
    expected = load(folder).config
    (folder / "model.safetensors").unlink()
    assert ModelConfig.from_pretrained(str(folder)) == expected


# Tensors


def test_missing_tensors(folder: Path, refuse: Refuse) -> None:
    edit_weights(folder, **{"model/layers/1/mlp/up_proj/weight": None})
    refuse(folder, r"lacks tensors: layers\.1\.mlp\.up_proj\.weight$")


def test_many_missing_tensors_are_counted(folder: Path, refuse: Refuse) -> None:
    edit_json(folder / "config.json", num_hidden_layers=3)
    refuse(folder, "lacks tensors: .* and 6 more$")


def test_missing_head(folder: Path, refuse: Refuse) -> None:
    edit_weights(folder, **{"lm_head/weight": None})
    refuse(folder, r"lacks tensors: lm_head\.weight")


def test_extra_tensors(folder: Path, refuse: Refuse) -> None:
    edit_weights(folder, **{"model/layers/0/self_attn/q_norm/weight": torch.ones(16)})
    refuse(folder, r"has unknown tensors: layers\.0\.self_attn\.q_norm\.weight$")


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
@pytest.mark.parametrize("name", ["self_attn.q_norm", "self_attn.k_norm", "post_attention_layernorm"])
def test_missing_norms(tmp_path: Path, refuse: Refuse, family: str, name: str) -> None:
    folder = save_folder(reference_model(family, num_hidden_layers=2), tmp_path)
    edit_weights(folder, **{f"model.layers.1.{name}.weight": None})
    refuse(folder, rf"lacks tensors: layers\.1\.{name}\.weight$")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"h/1/mlp/c_fc/weight": None}, r"lacks tensors: layers\.1\.mlp\.up_proj\.weight$"),
        ({"wpe/weight": None}, r"lacks tensors: embed_positions\.weight$"),
        ({"h/0/ln_2/bias": None}, r"lacks tensors: layers\.0\.post_attention_layernorm\.bias$"),
        ({"h/2/ln_1/bias": torch.ones(64)}, r"has unknown tensors: layers\.2\.input_layernorm\.bias$"),
        ({"h/0/attn/q_norm/weight": torch.ones(64)}, r"has unknown tensors: layers\.0\.attn\.q_norm\.weight$"),
        # [out, in], as other families' are
        ({"h/0/mlp/c_fc/weight": torch.ones(96, 64)}, r"has shape \[64, 96\], but the config requires \[96, 64\]$"),
        ({"h/0/attn/c_attn/weight": torch.ones(64)}, r"has shape \[64\], but the config requires \[192, 64\]$"),
        ({"wpe/weight": torch.ones(64, 64)}, r"has shape \[64, 64\], but the config requires \[128, 64\]$"),
    ],
)
def test_gpt2_tensors_that_do_not_fit(
    tmp_path: Path, refuse: Refuse, changes: dict[str, torch.Tensor | None], message: str
) -> None:
    folder = save_folder(reference_model("gpt2", num_hidden_layers=2), tmp_path)
    edit_weights(folder, **{f"transformer/{name}": tensor for name, tensor in changes.items()})
    refuse(folder, message)


def test_unannounced_bias(folder: Path, refuse: Refuse) -> None:
    edit_weights(folder, **{"model/layers/0/self_attn/q_proj/bias": torch.ones(64)})
    refuse(folder, r"has unknown tensors: layers\.0\.self_attn\.q_proj\.bias$")


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("model/layers/0/self_attn/k_proj/weight", (16, 64), [32, 64]),
        ("model/layers/0/mlp/down_proj/weight", (96, 64), [64, 96]),
        ("model/norm/weight", (64, 1), [64]),
        ("lm_head/weight", (127, 64), [128, 64]),
    ],
)
def test_wrong_shapes(folder: Path, refuse: Refuse, name: str, shape: tuple[int, ...], expected: list[int]) -> None:
    edit_weights(folder, **{name: torch.ones(shape)})
    message = (
        f"{name.replace('/', '.').removeprefix('model.')} has shape {list(shape)}, but the config requires {expected}"
    )
    refuse(folder, message.translate({ord("["): r"\[", ord("]"): r"\]"}))


def test_redundant_tensors_are_tolerated(tmp_path: Path) -> None:
    reference = reference_model(num_hidden_layers=1, tie_word_embeddings=True)
    folder = save_folder(reference, tmp_path)
    before = load(folder)(torch.arange(3, 20)[None])
    edit_weights(
        folder,
        **{
            "model/layers/0/self_attn/rotary_emb/inv_freq": torch.ones(8),
            "lm_head/weight": reference.lm_head.weight.clone(),
        },
    )
    assert torch.equal(load(folder)(torch.arange(3, 20)[None]), before)


def test_names_without_the_model_prefix(folder: Path) -> None:
    before = load(folder)(torch.arange(3, 20)[None])
    path = folder / "model.safetensors"
    save_file({name.removeprefix("model."): t for name, t in load_file(path).items()}, path, {"format": "pt"})
    assert torch.equal(load(folder)(torch.arange(3, 20)[None]), before)


@pytest.mark.parametrize(
    ("prefix", "head"),
    [("", ""), ("model.", ""), ("language_model.model.", "language_model."), ("model.language_model.", "")],
)
@pytest.mark.parametrize("vision", ["vision_tower.", "model.vision_tower."])
def test_text_part_of_a_checkpoint_that_also_sees(tmp_path: Path, prefix: str, head: str, vision: str) -> None:
    folder = save_folder(reference_model("gemma3", num_hidden_layers=2), tmp_path)
    before = load(folder)(torch.arange(3, 20)[None])
    path = folder / "model.safetensors"
    tensors = {
        prefix + name.removeprefix("model.") if name.startswith("model.") else head + name: tensor
        for name, tensor in load_file(path).items()
    }
    tensors[f"{vision}encoder.layers.0.self_attn.q_proj.weight"] = torch.ones(3, 3)
    tensors[f"{vision.replace('vision_tower', 'multi_modal_projector')}mm_soft_emb_norm.weight"] = torch.ones(3)
    save_file(tensors, path, {"format": "pt"})
    text = json.loads((folder / "config.json").read_text())
    config = {"model_type": "gemma3", "text_config": text, "tie_word_embeddings": False, "vision_config": {}}
    (folder / "config.json").write_text(json.dumps(config))
    model = load(folder)
    assert model.config.model_type == "gemma3"
    assert torch.equal(model(torch.arange(3, 20)[None]), before)


def test_unknown_parts_are_refused(tmp_path: Path, refuse: Refuse) -> None:
    folder = save_folder(reference_model("gemma3", num_hidden_layers=2), tmp_path)
    edit_weights(folder, **{"audio_tower.conv.weight": torch.ones(3)})
    refuse(folder, r"has unknown tensors: audio_tower\.conv\.weight$")


def test_weights_beyond_memory(folder: Path, refuse: Refuse, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_module, "available_memory", lambda device, processes=1: 1000)
    refuse(folder, r"the weights need 0\.00 GB in float32, but 0\.00 GB are free on cpu")


def test_memory_need_follows_the_dtype(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = sum(parameter.numel() for parameter in load(folder).parameters())
    monkeypatch.setattr(load_module, "available_memory", lambda device, processes=1: 3 * count)
    load_model(folder, dtype="bfloat16", device="cpu")
    with pytest.raises(ValueError, match="in float32"):
        load(folder)


def test_unknown_memory_is_no_obstacle(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_module, "available_memory", lambda device, processes=1: None)
    load(folder)


def test_loaded_model_is_ready_for_inference(folder: Path) -> None:
    model = load(folder)
    assert not model.training
    assert not any(parameter.requires_grad or parameter.is_meta for parameter in model.parameters())


# Tokenizer and chat template


def test_tokenizer(folder: Path) -> None:
    settings = {"bos_token": {"content": "<s>", "special": True}, "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = Tokenizer(folder)
    assert tokenizer.encode("Hi there") == byte_tokenizer().encode("Hi there").ids
    assert tokenizer.encode("Hi", add_special_tokens=False) == tokenizer.encode("Hi")[1:]
    assert tokenizer.decode(tokenizer.encode("Hi there")) == "Hi there"
    assert tokenizer.decode(tokenizer.encode("Hi"), skip_special_tokens=False).startswith("<s>")
    assert (tokenizer.bos_token, tokenizer.bos_token_id) == ("<s>", 1)
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("</s>", 2)
    assert tokenizer.id_to_token(2) == "</s>"
    assert tokenizer.vocab_size == 128


def test_tokenizer_without_settings(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    assert tokenizer.chat_template is tokenizer.bos_token is tokenizer.eos_token_id is None


def test_padding_and_truncation_settings_are_ignored(folder: Path) -> None:
    backend = byte_tokenizer().from_str(byte_tokenizer().to_str())
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    backend.save(str(folder / "tokenizer.json"))
    assert Tokenizer(folder).encode("Hello there") == byte_tokenizer().encode("Hello there").ids


def test_missing_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"no tokenizer\.json"):
        Tokenizer(folder)


@pytest.mark.parametrize("contents", ["", "{}", '{"model": {"type": "Nonsense"}}'])
def test_damaged_tokenizer(folder: Path, contents: str) -> None:
    (folder / "tokenizer.json").write_text(contents)
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a tokenizer"):
        Tokenizer(folder)


TEMPLATE = "{{ bos_token }}{{ messages[0].content }}"


@pytest.mark.parametrize(
    ("setting", "jinja", "expected"),
    [
        (TEMPLATE, None, TEMPLATE),
        ([{"name": "tool_use", "template": "x"}, {"name": "default", "template": TEMPLATE}], None, TEMPLATE),
        ([{"name": "tool_use", "template": "x"}], None, None),
        (None, TEMPLATE, TEMPLATE),
        ("older", TEMPLATE, TEMPLATE),
        (None, None, None),
    ],
    ids=["string", "list", "list-without-default", "jinja-file", "jinja-file-first", "none"],
)
def test_chat_template(folder: Path, setting: Any, jinja: str | None, expected: str | None) -> None:
    settings = {"bos_token": "<s>", "chat_template": setting}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if jinja is not None:
        (folder / "chat_template.jinja").write_text(jinja)
    tokenizer = Tokenizer(folder)
    assert tokenizer.chat_template == expected
    messages = [{"role": "user", "content": "hé"}]
    if expected is None:
        with pytest.raises(ValueError, match="no chat template"):
            render_chat_template(messages, tokenizer=tokenizer)
    else:
        assert render_chat_template(messages, tokenizer=tokenizer) == "<s>hé"
