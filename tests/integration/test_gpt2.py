"""GPT-2 as Hugging Face, nanoGPT and llama.cpp write it, up to the last position that it learned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import (
    CONV1D,
    WAYS,
    byte_tokenizer,
    check_every_way,
    check_logits,
    difference,
    greedy,
    kernel_logits,
    load,
    nanogpt_args,
    nanogpt_weights,
    quantised,
    random_ids,
    reference_model,
    save_folder,
    save_gguf,
    save_nanogpt,
    single_threaded,
)
from gguf import GGMLQuantizationType as Quant
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from infer import KVCache, SamplingParams, SlidingCache, Tokenizer, generate, generate_batch, load_model
from infer.cache import NoCache
from infer.loader import hf_folder, nanogpt

one_thread = pytest.fixture(scope="module", autouse=True)(single_threaded)

CLOSE = 2e-5  # half of it is seen, and another CPU adds in another order
CONTEXT = 12


def agree(path: Path, reference: PreTrainedModel) -> None:
    ids = random_ids()
    check_logits(load(path), ids, reference(ids).logits, CLOSE)


def nanogpt_model(**changes: Any) -> PreTrainedModel:
    """With what all of nanoGPT's models have: an exact GELU, an MLP of four times the width, a tied head."""
    own = {"activation_function": "gelu", "n_inner": None, "tie_word_embeddings": True, "layer_norm_epsilon": 1e-5}
    return reference_model("gpt2", **(own | changes))


# Hugging Face folders


def edit_tensors(folder: Path, edit: Any) -> None:
    path = folder / "model.safetensors"
    save_file(edit(load_file(path)), path, {"format": "pt"})


def without_prefix(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As OpenAI's checkpoints are on the hub."""
    return {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}


def with_masks(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As older versions of transformers saved them too."""
    prefix = "transformer." if any(name.startswith("transformer.") for name in tensors) else ""
    mask = torch.ones(128, 128, dtype=torch.uint8).tril().view(1, 1, 128, 128)
    for layer in range(3):
        tensors[f"{prefix}h.{layer}.attn.bias"] = mask.clone()
        tensors[f"{prefix}h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    return tensors


@torch.inference_mode()
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(
    "edits", [[], [without_prefix], [with_masks], [without_prefix, with_masks]], ids=["new", "bare", "masks", "both"]
)
def test_tensor_names(tmp_path: Path, edits: list[Any], tied: bool) -> None:
    reference = reference_model("gpt2", tie_word_embeddings=tied)
    save_folder(reference, tmp_path)
    for edit in edits:
        edit_tensors(tmp_path, edit)
    agree(tmp_path, reference)


@torch.inference_mode()
def test_a_tied_head_that_is_stored_all_the_same(tmp_path: Path) -> None:
    reference = reference_model("gpt2", tie_word_embeddings=True)
    save_folder(reference, tmp_path)
    head = reference.lm_head.weight.clone()
    edit_tensors(tmp_path, lambda tensors: tensors | {"lm_head.weight": head})
    agree(tmp_path, reference)


@torch.inference_mode()
@pytest.mark.parametrize("block_weights", [1, 1000])
@pytest.mark.parametrize("shards", ["60KB", "50GB"], ids=["sharded", "single"])
def test_shards_and_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shards: str, block_weights: int) -> None:
    """Transposed tensors are read in blocks too."""
    monkeypatch.setattr(hf_folder, "BLOCK_WEIGHTS", block_weights)
    reference = reference_model("gpt2")
    save_folder(reference, tmp_path, max_shard_size=shards)
    assert (len(list(tmp_path.glob("model-*.safetensors"))) > 2) == (shards == "60KB")
    agree(tmp_path, reference)


@torch.inference_mode()
def test_published_config(tmp_path: Path) -> None:
    """config.json as OpenAI's models have it on the hub, whose defaults are the reference's."""
    reference = reference_model("gpt2", tie_word_embeddings=True, n_inner=None, layer_norm_epsilon=1e-5)
    save_folder(reference, tmp_path)
    published = {
        "activation_function": "gelu_new",
        "architectures": ["GPT2LMHeadModel"],
        "attn_pdrop": 0.1,
        "bos_token_id": 50256,
        "embd_pdrop": 0.1,
        "eos_token_id": 50256,
        "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-05,
        "model_type": "gpt2",
        "n_ctx": 128,
        "n_embd": 64,
        "n_head": 4,
        "n_layer": 3,
        "n_positions": 128,
        "output_past": True,  # gpt2-xl
        "resid_pdrop": 0.1,
        "summary_activation": None,
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
        "vocab_size": 128,
    }
    (tmp_path / "config.json").write_text(json.dumps(published))
    agree(tmp_path, reference)
    assert load(tmp_path).config.eos_token_ids == (50256, 2)  # and the generation config's
    sparse = {name: published[name] for name in ("model_type", "n_embd", "n_head", "n_layer", "n_positions")}
    (tmp_path / "config.json").write_text(json.dumps(sparse | {"vocab_size": 128}))
    agree(tmp_path, reference)


# nanoGPT


@torch.inference_mode()
@pytest.mark.parametrize("changes", [{}, {"hidden_size": 60}, {"num_attention_heads": 1}], ids=str)
@pytest.mark.parametrize("prefix", ["", "_orig_mod."])
def test_nanogpt(tmp_path: Path, prefix: str, changes: dict[str, Any]) -> None:
    reference = nanogpt_model(**changes)
    weights = {f"{prefix}{name}": tensor for name, tensor in nanogpt_weights(reference).items()}
    agree(save_nanogpt(reference, tmp_path / "ckpt.pt", model=weights), reference)


@torch.inference_mode()
def test_nanogpt_without_biases(tmp_path: Path) -> None:
    """They are then not in the file, norms' included, and count as 0."""
    reference = nanogpt_model()
    for name, parameter in reference.named_parameters():
        if name.endswith(".bias"):
            parameter.zero_()
    weights = {name: t for name, t in nanogpt_weights(reference).items() if not name.endswith(".bias")}
    path = save_nanogpt(
        reference, tmp_path / "ckpt.pt", model=weights, model_args=nanogpt_args(reference) | {"bias": False}
    )
    agree(path, reference)
    assert not any(name.endswith(".bias") for name, _ in load(path).named_parameters())


@torch.inference_mode()
def test_older_nanogpt(tmp_path: Path) -> None:
    """No word of biases, which all models then had, nor of dropout; another GELU; causal masks among the tensors."""
    reference = nanogpt_model(activation_function="gelu_new")
    weights = with_masks(nanogpt_weights(reference))
    args = {name: value for name, value in nanogpt_args(reference).items() if name not in ("bias", "dropout")}
    agree(save_nanogpt(reference, tmp_path / "ckpt.pt", model=weights, model_args=args), reference)


@torch.inference_mode()
def test_a_nanogpt_head_of_its_own(tmp_path: Path) -> None:
    reference = nanogpt_model(tie_word_embeddings=False)
    model = load(save_nanogpt(reference, tmp_path / "ckpt.pt"))
    assert not model.config.tie_word_embeddings
    agree(tmp_path / "ckpt.pt", reference)


@torch.inference_mode()
@pytest.mark.parametrize("reopen_after", [0, 1, 100_000])
def test_nanogpt_file_opened_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reopen_after: int) -> None:
    monkeypatch.setattr(nanogpt, "REOPEN_AFTER", reopen_after)
    reference = nanogpt_model()
    agree(save_nanogpt(reference, tmp_path / "ckpt.pt"), reference)


@torch.inference_mode()
def test_all_formats_hold_the_same_model(tmp_path: Path) -> None:
    """Bit for bit, where the activation is the same."""
    reference = nanogpt_model()
    folder = load(save_folder(reference, tmp_path / "folder"))
    nano = load(save_nanogpt(reference, tmp_path / "ckpt.pt"))
    file = load(save_gguf(reference, tmp_path / "m.gguf"))
    for name, parameter in folder.named_parameters():
        assert torch.equal(nano.get_parameter(name), parameter)
        assert torch.equal(file.get_parameter(name), parameter)
    ids = random_ids()
    assert torch.equal(kernel_logits(nano, NoCache(2), ids), kernel_logits(folder, NoCache(2), ids))


# GGUF


@torch.inference_mode()
def test_quantised_gguf(tmp_path: Path) -> None:
    """Positions too, as in quantized files."""
    reference = reference_model("gpt2", tie_word_embeddings=True)
    path = save_gguf(reference, tmp_path / "m.gguf", Quant.Q8_0)
    ids, columns = random_ids(), reference_model("gpt2", tie_word_embeddings=True)
    stored = nanogpt_weights(reference)  # rows are quantized, which are columns of transformers' weights
    for name, parameter in columns.named_parameters():
        if parameter.dim() > 1:
            rows = quantised(torch.nn.ParameterList([stored[name].clone()]), Quant.Q8_0)[0]
            parameter.copy_(rows.T if name.endswith(CONV1D) else rows)
    expected = columns(ids).logits
    assert difference(expected, reference(ids).logits) > 0.01
    check_logits(load(path), ids, expected)


@torch.inference_mode()
def test_gguf_with_a_head_of_its_own(tmp_path: Path) -> None:
    """Which older converters wrote even where it is the embedding."""
    reference = reference_model("gpt2", tie_word_embeddings=True, n_inner=None)
    save_gguf(reference, tmp_path / "tied.gguf")
    untied = reference_model("gpt2", tie_word_embeddings=False, n_inner=None)
    untied.load_state_dict(reference.state_dict())
    path = save_gguf(untied, tmp_path / "m.gguf")
    assert not load(path).config.tie_word_embeddings
    agree(path, reference)
    reread = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32)
    agree(path, reread)


# Positions


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Path]:
    reference = reference_model("gpt2", max_position_embeddings=CONTEXT)
    return reference, save_folder(reference, tmp_path_factory.mktemp("short"))


@torch.inference_mode()
@pytest.mark.parametrize("length", [1, 2, CONTEXT - 1, CONTEXT])
def test_up_to_the_last_position(short: tuple[PreTrainedModel, Path], length: int) -> None:
    reference, folder = short
    check_every_way(reference, load(folder), length, (1, 5, CONTEXT - 1, CONTEXT))


@torch.inference_mode()
@pytest.mark.parametrize("filled", [0, 1, CONTEXT])
@pytest.mark.parametrize("cache_type", [KVCache, SlidingCache])
def test_beyond_the_last_position(short: tuple[PreTrainedModel, Path], cache_type: Any, filled: int) -> None:
    """Refused with a message although the cache has free slots; it stays usable."""
    reference, folder = short
    model, ids = load(folder), random_ids(1, CONTEXT + 1)
    for run in WAYS.values():
        with pytest.raises(ValueError, match="13 positions exceed the 12 that the model learned"):
            run(model, NoCache(), ids)
        cache = cache_type.from_model_config(model.config, 2 * CONTEXT, dtype="float32", device="cpu")
        if filled:
            run(model, cache, ids[:, :filled])
        with pytest.raises(ValueError, match="13 positions exceed the 12 that the model learned"):
            run(model, cache, ids[:, filled:])
        assert cache.seq_len == filled
        if filled < CONTEXT:
            logits = run(model, cache, ids[:, filled:-1])
            assert difference(logits, reference(ids[:, :-1]).logits[:, filled:]) <= CLOSE


@pytest.mark.parametrize("use_kv_cache", [True, False])
def test_on_full(short: tuple[PreTrainedModel, Path], use_kv_cache: bool) -> None:
    """Beyond the context, the last positions that fit are what transformers is fed too."""
    reference, folder = short
    model, tokenizer = load(folder), Tokenizer(folder)
    prompt, params = random_ids(1, 5)[0].tolist(), SamplingParams(max_new_tokens=20, ignore_eos=True)
    with pytest.raises(ValueError, match="25 positions exceed the model's context of 12"):
        generate(model, tokenizer, prompt, params, use_kv_cache=use_kv_cache)
    result = generate(model, tokenizer, prompt, params, use_kv_cache=use_kv_cache, on_full="recompute")
    expected = list(prompt)
    with torch.inference_mode():
        for _ in range(20):
            expected.append(int(reference(torch.tensor([expected[-CONTEXT:]])).logits[0, -1].argmax()))
    assert result.token_ids == expected[5:]


# Generation


def test_rows_of_a_batch(tmp_path: Path) -> None:
    """Rows of different lengths, each at positions of its own."""
    reference = reference_model("gpt2")
    model, tokenizer = load(save_folder(reference, tmp_path)), Tokenizer(tmp_path)
    prompts = [random_ids(1, length) for length in (1, 4, 9)]
    results = generate_batch(
        model, tokenizer, [prompt[0].tolist() for prompt in prompts], SamplingParams(max_new_tokens=15)
    )
    assert [result.token_ids for result in results] == [greedy(reference, prompt, 15)[0] for prompt in prompts]


@torch.inference_mode()
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed:UserWarning")  # torch, on a CPU without bf16
@pytest.mark.parametrize("form", ["folder", "nanogpt", "gguf"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit(tmp_path: Path, dtype: str, form: str) -> None:
    reference = nanogpt_model()
    write = {"folder": save_folder, "nanogpt": save_nanogpt, "gguf": save_gguf}[form]
    path = write(reference, tmp_path / {"folder": "m", "nanogpt": "m.pt", "gguf": "m.gguf"}[form])
    model, config = load_model(path, dtype=dtype, device="cpu")
    assert {parameter.dtype for parameter in model.parameters()} == {getattr(torch, dtype)}
    ids = random_ids(2, 16)
    expected = reference(ids).logits
    for run in WAYS.values():
        logits = run(model, NoCache(2), ids)
        assert torch.nn.functional.cosine_similarity(logits.float(), expected, dim=-1).min() > 0.99
        cache = KVCache.from_model_config(config, 16, batch_size=2, dtype=dtype, device="cpu")
        run(model, cache, ids[:, :-1])
        assert run(model, cache, ids[:, -1:]).float().isclose(logits[:, -1:].float(), atol=0.5).all()


@torch.inference_mode()
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
def test_stored_16_bit(tmp_path: Path, stored: torch.dtype) -> None:
    reference = nanogpt_model().to(stored)
    paths = save_folder(reference, tmp_path / "folder"), save_nanogpt(reference, tmp_path / "ckpt.pt")
    reference.float()
    for path in paths:
        agree(path, reference)


def test_end_of_text(tmp_path: Path) -> None:
    """Of a GPT-2 vocabulary only: characters have none."""
    small = load(save_nanogpt(nanogpt_model(), tmp_path / "small.pt"))
    assert small.config.eos_token_ids == ()
    large = nanogpt_model(vocab_size=50_304, hidden_size=4, num_hidden_layers=1)
    assert load(save_nanogpt(large, tmp_path / "large.pt")).config.eos_token_ids == (50_256,)


def test_tokenizer_of_a_folder(tmp_path: Path) -> None:
    """vocab.json and merges.txt do where there is no tokenizer.json."""
    save_folder(reference_model("gpt2"), tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    vocab = byte_tokenizer().get_vocab()
    (tmp_path / "vocab.json").write_text(json.dumps(vocab), encoding="utf-8")
    (tmp_path / "merges.txt").write_text("#version: 0.2\nh e\n", encoding="utf-8")
    tokenizer = Tokenizer(tmp_path)
    text = "the hen, he said"
    assert tokenizer.encode(text) == byte_tokenizer().encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(tokenizer.encode(text)) == text
    (tmp_path / "merges.txt").unlink()
    with pytest.raises(FileNotFoundError, match=r"put GPT-2's tokenizer\.json there, or its vocab\.json and merges"):
        Tokenizer(tmp_path)
