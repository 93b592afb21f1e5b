"""What is printed of a model, a cache, a tokenizer, a result: what it is, in a line."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from checkpoints import reference_model, save_folder

from infer import (
    LLM,
    GrowingCache,
    KVCache,
    ModelConfig,
    PagedCache,
    SamplingParams,
    Tokenizer,
    backend,
    generate,
    generate_batch,
    load_model,
)
from infer.backend import cpu
from infer.backend.fingerprint import fingerprint
from infer.engine.model import summary

BACKEND = "cpu" if cpu.expected() else "torch"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(reference_model("llama"), tmp_path_factory.mktemp("named"))


def test_llm_and_what_it_gives(folder: Path) -> None:
    with LLM(folder, dtype="float32", device="cpu", cache_memory=10**7) as llm:
        count = sum(weight.numel() for weight in llm.model.parameters()) / 1e6
        model = f"{folder}, {count:.1f}M parameters, float32 on cpu, backend {BACKEND}"
        assert repr(llm) == f"LLM({model}, 10 MB of cache, 0 running, 0 waiting)"
        assert repr(llm.tokenizer).startswith(f"Tokenizer({llm.tokenizer.vocab_size:,} tokens, bos ")
        result = llm.generate("hello", SamplingParams(max_new_tokens=90, ignore_eos=True))
        assert repr(result).startswith("GenerationResult(")
        assert ", 90 tokens, " in repr(result)
        assert repr(result).endswith(f"ended by length, {folder})")
        assert len(repr(result)) < 300
        assert copy.copy(result) == result
        assert "90 tokens" in result._repr_html_()
        assert "log-probability" in llm.score("hello")._repr_html_()
        assert repr(llm.model) == f"Llama({model})"
        assert str(llm.model).splitlines()[1].strip().startswith("llama, ")
        assert "computes in float32 on cpu" in str(llm.model)
        session = llm.session(context=100, encode=lambda messages: llm.encode(messages[-1]["content"]))
        assert repr(session) == f"Session(0 turns, 0 of 100 positions, {model})"


def test_functions_name_the_model(folder: Path) -> None:
    model, _ = load_model(folder, dtype="float32", device="cpu")
    tokenizer, params = Tokenizer(folder), SamplingParams(max_new_tokens=2, ignore_eos=True)
    result = generate(model, tokenizer, [1, 2], params)
    assert result.model == generate_batch(model, tokenizer, [[1, 2]], params)[0].model == str(folder)


@pytest.mark.parametrize(("quantize", "stored"), [("int4", "int4"), ("int8", "int8")])
def test_quantized(quantize: str, stored: str, folder: Path) -> None:
    """The number of parameters is that of the weights before they were packed."""
    plain, _ = load_model(folder, dtype="float32", device="cpu")
    model, _ = load_model(folder, device="cpu", dtype="float32", quantize=quantize)
    assert repr(model) == repr(plain).replace("parameters, ", f"parameters in {stored}, ")


def test_a_repr_plans_no_backend(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = load_model(folder, dtype="float32", device="cpu")
    monkeypatch.setattr(backend, "_plan", None)
    assert f"backend {BACKEND}" in repr(model)


def test_a_hook_changes_the_backend(folder: Path) -> None:
    model, _ = load_model(folder, dtype="float32", device="cpu")
    with torch.inference_mode():
        backend.backend_for(model)
    assert f"backend {BACKEND}" in repr(model)
    model.layers[0].register_forward_hook(lambda *_: None)
    assert "backend torch" in repr(model)


def test_the_name_is_no_part_of_the_fingerprint(folder: Path) -> None:
    """Sessions and stored pages fit the same weights, wherever they are."""
    model, _ = load_model(folder, dtype="float32", device="cpu")
    before = fingerprint(model)
    model.name = "elsewhere"
    assert fingerprint(model) == before


class Duck:
    """A model of another kind."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.parameters = lambda: iter(())


def test_another_kind_of_model(folder: Path) -> None:
    assert summary(Duck(ModelConfig.from_pretrained(folder))) == "Duck, llama, on cpu"  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [KVCache, GrowingCache, PagedCache])
def test_caches(kind: type) -> None:
    cache = kind.allocate(2, 3, 8, max_seq_len=64, dtype="float32", device="cpu")  # type: ignore[attr-defined]
    named = (
        f"{kind.__name__}(0 of 64 positions, 2 layers of 3 heads of 8, float32 on cpu, {cache.memory_bytes:,} bytes)"
    )
    assert repr(cache) == named
