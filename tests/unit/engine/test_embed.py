"""Embeddings: pooled hidden states of prompts that go through the engine among others."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from amount import pairs
from checkpoints import byte_tokenizer, random_ids, reference_model, save_folder
from torch import Tensor

from infer import LLM, CacheMemory, SamplingParams
from infer.engine.llm import POOLINGS
from infer.loader.find import pooling_of
from infer.models.common import Decoder

TEXTS = [[*range(3, 40)], [5], [*range(60, 3, -1)], [7] * 20]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_folder(reference_model("qwen3"), folder)
    return folder


@pytest.fixture
def llm(saved: Path) -> Iterator[LLM]:
    with LLM(saved, byte_tokenizer(), cache_memory=10**7, dtype="float32", device="cpu", prefill_chunk=16) as llm:
        yield llm


def expected(text: list[int], pooling: str) -> Tensor:
    """By transformers."""
    states = reference_model("qwen3").base_model(torch.tensor([text])).last_hidden_state[0]
    return {"last": states[-1], "first": states[0], "mean": states.mean(0)}[pooling]


@pairs(pooling=POOLINGS, normalize=[False, True])
def test_are_those_of_transformers(llm: LLM, pooling: str, normalize: bool) -> None:
    """In chunks, and after others whose prefix is cached."""
    found = llm.embed([*TEXTS, TEXTS[0]], pooling, normalize=normalize)
    assert found.dtype is torch.float32
    assert torch.equal(found[0], found[-1])
    for text, own in zip(TEXTS, found, strict=False):
        wanted = expected(text, pooling)
        wanted = torch.nn.functional.normalize(wanted, dim=0) if normalize else wanted
        assert (own - wanted).abs().max() < 5e-4
        assert torch.equal(llm.embed(text, pooling, normalize=normalize), own)  # the same bits alone


@pytest.mark.parametrize("pooling", POOLINGS)
def test_beside_texts_in_few_pages(llm: LLM, pooling: str) -> None:
    """Sequences are preempted and begin again."""
    model = llm.model
    assert isinstance(model, Decoder)
    page = CacheMemory(model, 10**6, page_size=4).pool.page_bytes
    prompts = random_ids(12, 30).tolist()
    params = SamplingParams(max_new_tokens=20, ignore_eos=True)
    texts = [each.token_ids for each in llm.generate(prompts, params)]
    embeddings = llm.embed(prompts, pooling)
    with LLM(model, byte_tokenizer(), memory=CacheMemory(model, 30 * page, page_size=4), prefill_chunk=8) as small:
        handle = small.submit_embeddings(prompts, pooling)
        assert [each.token_ids for each in small.generate(prompts, params)] == texts
        found = torch.stack([each.embedding for each in handle.result()])
    assert torch.equal(torch.nn.functional.normalize(found, dim=1), embeddings)


def test_one_that_fills_the_context(llm: LLM) -> None:
    assert llm.embed([3] * 128).shape == (64,)
    with pytest.raises(ValueError, match="exceed the model's context"):
        llm.embed([3] * 129)


def test_refused(llm: LLM) -> None:
    with pytest.raises(ValueError, match="there is no text to embed"):
        llm.embed([])
    with pytest.raises(ValueError, match="the prompt is empty"):
        llm.embed([[3], []])
    with pytest.raises(ValueError, match="pooling must be one of last, mean, first, not 'max'"):
        llm.embed("x", "max")


@pytest.mark.parametrize(
    ("modes", "pooling"),
    [
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, "last"),
        ({"pooling_mode_mean_tokens": True, "word_embedding_dimension": 64}, "mean"),
        ({"pooling_mode_cls_token": True}, "first"),
        ({"pooling_mode_max_tokens": True}, None),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, None),
        ({}, None),
    ],
)
def test_pooling_of_the_files(tmp_path: Path, modes: dict[str, object], pooling: str | None) -> None:
    assert pooling_of(tmp_path) is None
    modules = [
        {"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
        {"idx": 2, "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
    ]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(modes))
    if pooling is None:
        with pytest.raises(ValueError, match=r"the pooling of .* is not supported"):
            pooling_of(tmp_path)
    else:
        assert pooling_of(tmp_path) == pooling


@pytest.mark.parametrize("text", ["", "{}", "7", "[7]", '[{"type": ["x.Pooling"]}]', '[{"type": "x.Pooling"}]'])
def test_files_that_are_no_modules(tmp_path: Path, text: str) -> None:
    (tmp_path / "modules.json").write_text(text)
    with pytest.raises((ValueError, FileNotFoundError)):
        pooling_of(tmp_path)
