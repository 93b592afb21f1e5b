"""Matrices stored in bfloat16, in a model that computes in float32: the same numbers, half the bytes."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import (
    FAMILIES,
    check_every_way,
    check_logits,
    difference,
    kernel_logits,
    load,
    logits_in_chunks,
    nanogpt_weights,
    random_ids,
    reference_model,
    save_folder,
    save_gguf,
    save_nanogpt,
    single_threaded,
    torch_logits,
)
from gguf import GGMLQuantizationType as Quant
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from infer import KVCache, load_model
from infer.backend import cpu
from infer.backend.cpu import ops
from infer.cache import NoCache
from infer.engine.model import step
from infer.evaluate.bench import BenchConfig
from infer.evaluate.bench import run as run_bench
from infer.evaluate.explain import explain
from infer.loader import load as loader
from infer.loader.describe import describe, lines
from infer.models.common import Decoder
from infer.nn import linear
from infer.nn.linear import Linear

pytestmark = pytest.mark.skipif(cpu.kernels() is None, reason="needs numba")
_one_thread = pytest.fixture(autouse=True)(single_threaded)


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


def rounded(family: str, **changes: Any) -> PreTrainedModel:
    """transformers' model in float32, whose weights bfloat16 can hold."""
    model = reference_model(family, **changes)
    for weight in model.parameters():
        weight.copy_(weight.bfloat16())
    return model


def save(model: PreTrainedModel, folder: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    return save_folder(copy.deepcopy(model).to(dtype), folder)


def matrices(model: Decoder) -> list[Tensor]:
    products = [module.weight for module in model.modules() if isinstance(module, Linear)]
    return [*products, model.embed_tokens.weight]


def others(model: Decoder) -> list[Tensor]:
    kept = {id(weight) for weight in matrices(model)}
    return [weight for weight in model.parameters() if id(weight) not in kept]


def check_matrix_dtype(model: Decoder, dtype: torch.dtype = torch.bfloat16) -> None:
    assert model.dtype is torch.float32
    assert {weight.dtype for weight in matrices(model)} == {dtype}
    assert {weight.dtype for weight in others(model)} == {torch.float32}


def in_float32(path: Path) -> Decoder:
    model = load(path).float()
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_as_transformers_in_float32(family: str, tmp_path: Path) -> None:
    reference = rounded(family, tie_word_embeddings=family == "gemma3")
    model = load(save(reference, tmp_path))
    check_matrix_dtype(model)
    check_every_way(reference, model, 60, [1, 7, 60])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chunk", [1, 40])
def test_same_bits_as_float32_weights(family: str, chunk: int, tmp_path: Path) -> None:
    path = save(rounded(family), tmp_path)
    ids = random_ids(2, 40)
    found = []
    for model in (load(path), in_float32(path)):
        cache = KVCache.from_model_config(model.config, 40, batch_size=2, dtype="float32", device="cpu")
        found.append(logits_in_chunks(model, ids, cache, chunk))
        assert torch.equal(kernel_logits(model, NoCache(2), ids), found[-1])
    assert torch.equal(*found)


@pytest.mark.parametrize("quant", [Quant.F16, Quant.BF16])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_gguf(family: str, quant: Quant, tmp_path: Path) -> None:
    reference = rounded(family)
    model = load(save_gguf(reference, tmp_path / "model.gguf", quant))
    check_matrix_dtype(model, torch.bfloat16 if quant is Quant.BF16 else torch.float32)
    check_logits(model, ids := random_ids(), reference(ids).logits, 2e-5)


def test_nanogpt(tmp_path: Path) -> None:
    own = {"tie_word_embeddings": True, "n_inner": None, "activation_function": "gelu", "layer_norm_epsilon": 1e-5}
    reference = rounded("gpt2", **own)
    weights = nanogpt_weights(copy.deepcopy(reference).bfloat16())
    model = load(save_nanogpt(reference, tmp_path / "ckpt.pt", model=weights))
    check_matrix_dtype(model)
    check_logits(model, ids := random_ids(), reference(ids).logits, 2e-5)


def test_fused_weights_of_several_dtypes_become_float32(tmp_path: Path) -> None:
    path = save(rounded("llama"), tmp_path)
    stored = load_file(path / "model.safetensors")
    names = [name for name in stored if "k_proj" in name or "gate_proj" in name]
    stored |= {name: stored[name].half() if "k_proj" in name else stored[name].float() for name in names}
    save_file(stored, path / "model.safetensors", {"format": "pt"})
    model = load(path)
    for layer in model.layers:
        assert layer.self_attn.qkv_proj.weight.dtype is torch.float32
        assert layer.mlp.gate_up_proj.weight.dtype is torch.float32
        assert layer.self_attn.o_proj.weight.dtype is torch.bfloat16
    assert torch.equal(model.layers[0].mlp.gate_up_proj.weight[:96], stored["model.layers.0.mlp.gate_proj.weight"])
    check_logits(model, ids := random_ids(), in_float32(path)(ids), 2e-5)


@pytest.mark.parametrize("rows", [1, 4, 33, 200])
@pytest.mark.parametrize("bias", [False, True])
def test_products(rows: int, bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the kernel; or in pieces: 5 rows of a weight at a time, and 2 in the end."""
    monkeypatch.setattr(linear, "AT_ONCE", 5 * 24)
    product = Linear(24, 37, bias=bias)
    for weight in product.parameters():
        weight.normal_()
    x, residual = torch.randn(rows, 24), torch.randn(rows, 37)
    product.weight = torch.nn.Parameter(product.weight.bfloat16(), requires_grad=False)
    expected = torch.nn.functional.linear(x.double(), product.weight.double(), product.bias.double() if bias else None)
    assert difference(ops.linear(x, product).double(), expected) <= 1e-5
    assert difference(product(x).double(), expected) <= 1e-5
    assert difference(product(x, residual.clone()).double(), expected + residual) <= 1e-5


@pytest.mark.parametrize("grad", [False, True])
def test_other_shapes(grad: bool) -> None:
    """In plain torch, in grad mode too, if no tensor requires a gradient."""
    product = Linear(24, 37)
    product.weight = torch.nn.Parameter(torch.randn(37, 24).bfloat16(), requires_grad=False)
    for shape in ((24,), (2, 40, 24), (40, 2, 24), (2, 1, 3, 24)):
        x = torch.randn(shape)
        expected = torch.nn.functional.linear(x, product.weight.float())
        with torch.inference_mode(not grad):
            assert difference(product(x), expected) <= 1e-5
            assert difference(product(x, expected.clone()), 2 * expected) <= 1e-5


def test_a_hook_hears_of_a_product_once() -> None:
    product, seen = Linear(24, 37), []
    product.register_forward_hook(lambda _, inputs, out: seen.append((inputs[0].shape, out.shape)))
    product(torch.randn(2, 5, 24))
    assert seen == [((2, 5, 24), (2, 5, 37))]


def test_another_dtype_at_the_same_address(tmp_path: Path) -> None:
    model, ids = load(save(rounded("llama"), tmp_path)), random_ids(1, 1)

    def logits() -> Tensor:
        return step(model, KVCache.from_model_config(model.config, 1, dtype="float32", device="cpu"), ids)

    expected = logits()
    weight = model.lm_head.weight
    at = weight.data_ptr()
    weight.data = weight.data.view(torch.float16).copy_(weight.data.half())
    assert weight.data_ptr() == at
    assert difference(logits(), expected) <= 1e-2


def test_gradients() -> None:
    with torch.inference_mode(False), torch.enable_grad():
        product = Linear(24, 37)
        product.weight = torch.nn.Parameter(torch.randn(37, 24).bfloat16())
        x = torch.randn(3, 24, requires_grad=True)
        product(x).sum().backward()
    assert torch.allclose(x.grad, product.weight.float().sum(0).expand(3, 24), atol=1e-5)
    assert product.weight.grad.dtype is torch.bfloat16


class TestWithoutKernels:
    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        return save(rounded("llama"), tmp_path / "model")

    def check_wide(self, path: Path) -> None:
        model = load(path)
        assert {weight.dtype for weight in model.parameters()} == {torch.float32}

    def test_switched_off(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("INFER_KERNELS", "0")
        self.check_wide(path)
        assert describe(str(path), device="cpu")["weights"] == "float32"

    def test_not_to_be_compiled(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cpu, "kernels", lambda: None)
        self.check_wide(path)

    def test_not_to_be_compiled_and_then_too_large(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        needed = describe(str(path), device="cpu")["weight_bytes"]
        monkeypatch.setattr(loader, "available_memory", lambda *_: needed)
        load(path)
        monkeypatch.setattr(cpu, "kernels", lambda: None)
        with pytest.raises(ValueError, match="in float32, but"):
            load(path)

    def test_gone_once_it_is_loaded(self, path: Path) -> None:
        """As in a forked process: plain torch converts them."""
        ids, model = random_ids(), load(path)
        expected = kernel_logits(model, NoCache(2), ids)
        assert difference(model(ids), expected) <= 1e-4
        cache = KVCache.from_model_config(model.config, 60, batch_size=2, dtype="float32", device="cpu")
        assert difference(logits_in_chunks(model, ids, cache, 1, torch_logits), expected) <= 1e-4


def test_float16_becomes_float32(tmp_path: Path) -> None:
    check_matrix_dtype(load(save(rounded("llama"), tmp_path, torch.float16)), torch.float32)


def test_other_dtypes_are_what_they_were(tmp_path: Path) -> None:
    path = save(rounded("llama"), tmp_path)
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        model, _ = load_model(path, dtype=dtype, device="cpu")
        assert {weight.dtype for weight in model.parameters()} == {dtype}


class TestFigures:
    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        return save(rounded("llama"), tmp_path)

    def test_info(self, path: Path) -> None:
        described = describe(str(path), device="cpu")
        model = load(path)
        assert described["weight_bytes"] == sum(weight.nbytes for weight in model.parameters())
        assert tuple(described[key] for key in ("weights", "dtype", "cache_dtype")) == (
            "bfloat16",
            "float32",
            "float32",
        )
        line = dict(lines(described))["weights"]
        assert " in bfloat16 on cpu, 2.0" in line
        assert line.endswith(", computed in float32")
        plain = describe(str(path), dtype="bfloat16", device="cpu")
        assert "computed" not in dict(lines(plain))["weights"]

    @pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
    def test_info_by_the_config_alone(self, path: Path, key: str) -> None:
        expected = describe(str(path), device="cpu")["weight_bytes"]
        (path / "model.safetensors").unlink()
        config = json.loads((path / "config.json").read_text())
        config.pop("dtype")
        (path / "config.json").write_text(json.dumps(config | {key: "bfloat16"}))
        assert describe(str(path), device="cpu")["weight_bytes"] == expected

    @pytest.mark.parametrize("contents", [b"version https://git-lfs.github.com/spec/v1", b""])
    def test_info_where_weights_cannot_be_read(self, path: Path, contents: bytes) -> None:
        expected = describe(str(path), device="cpu")["weight_bytes"]
        (path / "model.safetensors").write_bytes(contents)
        assert describe(str(path), device="cpu")["weight_bytes"] == expected
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | {"dtype": ["bfloat16"]}))
        assert describe(str(path), device="cpu")["weights"] == "float32"

    def test_explain(self, path: Path) -> None:
        model = load(path)
        explained = explain(model, _Letters(), [3, 4, 5], 3)
        assert explained.element_size == 4
        assert explained.cache_bytes == explained.positions * model.config.cache_bytes_per_token(4)

    def test_bench(self, path: Path) -> None:
        model = load(path)
        result = run_bench(model, _Letters(), BenchConfig(prompt_tokens=4, new_tokens=3, trials=1, warmup=0))
        assert (result.dtype, result.weight_bits) == ("float32", [16])


class _Letters:
    """In place of a tokenizer."""

    def encode(self, text: str) -> list[int]:
        return [3 + ord(letter) % 100 for letter in text]

    def decode(self, token_ids: list[int]) -> str:
        return "x" * len(token_ids)
