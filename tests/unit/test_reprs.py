"""What is printed of a model, a cache, a tokenizer, a result: what it is, in a line."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
from checkpoints import reference_model, save_folder

from infer import LLM, GrowingCache, KVCache, PagedCache, SamplingParams


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(reference_model("llama"), tmp_path_factory.mktemp("named"))


def test_llm_and_what_it_gives(folder: Path) -> None:
    with LLM(folder, device="cpu", cache_memory=10**7) as llm:
        assert repr(llm).startswith("LLM(llama, ")
        assert repr(llm).endswith(" MB of cache, 0 running, 0 waiting)")
        assert repr(llm.tokenizer).startswith(f"Tokenizer({llm.tokenizer.vocab_size:,} tokens, bos ")
        result = llm.generate("hello", SamplingParams(max_new_tokens=90, ignore_eos=True))
        assert repr(result).startswith("GenerationResult(")
        assert ", 90 tokens, " in repr(result)
        assert repr(result).endswith("ended by length)")
        assert len(repr(result)) < 300
        assert copy.copy(result) == result
        assert "90 tokens" in result._repr_html_()
        assert "log-probability" in llm.score("hello")._repr_html_()
        assert str(llm.model).splitlines()[1].strip().startswith("llama, ")
        assert "computes in float32 on cpu" in str(llm.model)
        session = llm.session(context=100, encode=lambda messages: llm.encode(messages[-1]["content"]))
        assert repr(session) == "Session(0 turns, 0 of 100 positions)"


@pytest.mark.parametrize("kind", [KVCache, GrowingCache, PagedCache])
def test_caches(kind: type) -> None:
    cache = kind.allocate(2, 3, 8, max_seq_len=64, dtype="float32", device="cpu")  # type: ignore[attr-defined]
    named = (
        f"{kind.__name__}(0 of 64 positions, 2 layers of 3 heads of 8, float32 on cpu, {cache.memory_bytes:,} bytes)"
    )
    assert repr(cache) == named
