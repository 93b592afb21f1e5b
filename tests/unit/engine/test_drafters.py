"""What proposes drafts: a draft model, n-grams of other outputs, functions. `test_draft.py` has what all share."""

from __future__ import annotations

import random
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from checkpoints import byte_tokenizer, reference_model, save_folder
from mocks import MockTokenizer
from tiny import make_tiny_model

from infer import LLM, CacheMemory, SamplingParams, Tokenizer, generate
from infer.engine import drafters
from infer.engine.draft import MAX_DRAFTS, Speculation
from infer.engine.drafters import CHUNK, ModelDrafter, NgramDrafter, drafter_of
from infer.engine.engine import Engine
from infer.engine.result import GenerationResult
from infer.engine.sequence import Sequence
from infer.models.common import Decoder

LETTERS = MockTokenizer([chr(33 + i) for i in range(64)])
SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.1, "seed": 3, "logprobs": 2},
    {"stop": ["T", "7F"], "temperature": 0.7, "seed": 6},
    {"prompt_logprobs": 1, "repetition_penalty": 1.5},
]


@pytest.fixture(autouse=True)
def _always_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as possible, whatever they cost, and however unsure the draft model is."""
    monkeypatch.setattr(Speculation, "_worth", lambda *_: (0.0, MAX_DRAFTS))
    monkeypatch.setattr(drafters, "SURE", 0.0)


def outcome(result: GenerationResult) -> tuple[Any, ...]:
    return result.token_ids, result.text, result.finish_reason, result.logprobs, result.prompt_logprobs


def memory(model: Decoder, positions: int) -> CacheMemory:
    page = CacheMemory(model, 10**6, page_size=4).pool.page_bytes
    groups = len(CacheMemory(model, 10**6, page_size=4).index.windows)
    return CacheMemory(model, positions // 4 * groups * page, page_size=4)


FEW = SamplingParams(max_new_tokens=30)


def sequences_of(model: Decoder, seed: int) -> list[Sequence]:
    chance = random.Random(seed)
    return [
        Sequence(
            model.config,
            LETTERS,
            [chance.randrange(64) for _ in range(chance.choice([1, 7, 40, 90]))],
            SamplingParams(max_new_tokens=chance.randint(1, 30), **SETTINGS[i % len(SETTINGS)]),
        )
        for i in range(6)
    ]


class TestModel:
    @pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
    @pytest.mark.parametrize("positions", [1000, 64])
    def test_texts_are_those_without_drafts(self, family: str, positions: int) -> None:
        """Also where the draft model has memory for few sequences, and the model for few: some are preempted."""
        model = make_tiny_model(model_type=family, max_position_embeddings=256, seed=1)
        smaller = make_tiny_model(model_type="llama", max_position_embeddings=128, num_hidden_layers=1, seed=2)
        sequences = sequences_of(model, positions)
        expected = [generate(model, LETTERS, each.prompt, each.params) for each in sequences]
        for draft_model in (smaller, model):
            drafter = ModelDrafter(draft_model, memory(draft_model, positions))
            again = [Sequence(model.config, LETTERS, each.prompt, each.params) for each in sequences]
            engine = Engine(model, memory(model, 200), drafter=drafter, max_rows=4, prefill_chunk=16)
            for sequence in again:
                engine.submit(sequence)
            while not engine.is_idle:
                engine.step()
            assert [outcome(each.result()) for each in again] == [outcome(each) for each in expected]
            assert engine.stats().drafted_tokens > 0
            assert not drafter._caches
            assert len(drafter.memory.index.pages_in_use()) == 0  # type: ignore[union-attr]

    def test_the_same_model_is_right(self) -> None:
        """At temperature 0. It drafts greedily at any temperature."""
        model = make_tiny_model(max_position_embeddings=256)
        with LLM(model, LETTERS, speculate=ModelDrafter(model)) as llm:
            greedy = llm.generate([5, 6, 7], max_new_tokens=60, temperature=0.0)
            warm = llm.generate([5, 6, 7], max_new_tokens=60, temperature=2.0, seed=1)
            steps = llm.stats().steps
        assert greedy.accepted == greedy.drafted > 40
        assert 0 < warm.accepted < warm.drafted
        assert steps < 120 - greedy.accepted

    def test_only_what_it_is_sure_of(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(drafters, "SURE", 1.1)
        model = make_tiny_model()
        assert not generate(model, LETTERS, [5, 6, 7], FEW, speculate=ModelDrafter(model)).drafted

    def test_prompts_in_chunks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """No drafts before the cache has the prompt; another sequence with its prefix finds it there."""
        model, passes = make_tiny_model(max_position_embeddings=512), list[list[int]]()
        drafter = ModelDrafter(model, memory(model, 1000))
        backend = drafters.backend_for(model)

        class Counting:
            def run(self, rows: list[Any]) -> Any:
                passes.append([len(row.tokens) for row in rows])
                return backend.run(rows)

        monkeypatch.setattr(drafters, "backend_for", lambda _: Counting())
        prompt = [i % 60 for i in range(3 * CHUNK + 5)]
        first = generate(model, LETTERS, prompt, SamplingParams(max_new_tokens=200), speculate=drafter)
        assert passes[:4] == [[CHUNK], [CHUNK], [CHUNK], [9]]  # the rest of the prompt, and a token of each step
        assert first.accepted == first.drafted > 100
        passes.clear()
        generate(model, LETTERS, prompt, SamplingParams(max_new_tokens=200), speculate=drafter)
        assert max(map(max, passes)) <= MAX_DRAFTS + 1
        passes.clear()  # a long prompt, for few tokens
        assert not generate(model, LETTERS, prompt[::-1], SamplingParams(max_new_tokens=9), speculate=drafter).drafted
        assert not passes

    def test_ids_that_it_lacks(self) -> None:
        """Models of one vocabulary may have embeddings of different lengths."""
        model, smaller = make_tiny_model(), make_tiny_model(vocab_size=60, seed=3)
        for prompt in ([1, 2, 63], [1, 2, 3]):
            expected = generate(model, LETTERS, prompt, FEW)
            found = generate(model, LETTERS, prompt, FEW, speculate=ModelDrafter(smaller))
            assert found.token_ids == expected.token_ids
            assert (found.drafted == 0) == (63 in prompt)

    def test_a_longer_sequence_gets_more_memory(self) -> None:
        model = make_tiny_model(max_position_embeddings=512)
        drafter = ModelDrafter(model)
        for count in (20, 400):
            result = generate(model, LETTERS, [1, 2, 3], SamplingParams(max_new_tokens=count), speculate=drafter)
            assert result.accepted > count / 2

    def test_its_share_of_the_memory(self) -> None:
        """Both have about as many positions."""
        model, smaller = make_tiny_model(), make_tiny_model(num_hidden_layers=1)
        drafter = ModelDrafter(smaller)
        with LLM(model, LETTERS, speculate=drafter, cache_memory=10**6) as llm:
            pools = llm.memory.pool, drafter.memory.pool  # type: ignore[union-attr]
            assert 0.9 * 10**6 < sum(pool.memory_bytes for pool in pools) <= 10**6
            assert pools[0].num_pages == pytest.approx(pools[1].num_pages, abs=1)
            with pytest.raises(ValueError, match="this drafter belongs to another LLM"):
                LLM(model, LETTERS, speculate=drafter)
        assert drafter.memory is None
        given = CacheMemory(model, 10**6)
        with LLM(model, LETTERS, speculate=drafter, memory=given):
            assert drafter.memory.pool.num_pages == pytest.approx(given.pool.num_pages, abs=1)  # type: ignore[attr-defined]

    def test_by_name(self, tmp_path: Path) -> None:
        other = tokenizers.Tokenizer.from_str(byte_tokenizer().to_str())
        other.add_tokens(["<other>"])
        folders = [save_folder(reference_model("llama", seed=i), tmp_path / str(i)) for i in range(3)]
        other.save(str(folders[2] / "tokenizer.json"))
        with LLM(folders[0], speculate=str(folders[1])) as llm:
            result = llm.generate("hello", max_new_tokens=20, temperature=0.0)
            assert result.drafted > 0
            assert result.token_ids == llm.generate("hello", max_new_tokens=20, temperature=0.0, draft=False).token_ids
        with pytest.raises(
            ValueError,
            match=r"^speculate='.*': a draft model has the same vocabulary as the model, but its token .* '<other>'",
        ):
            drafter_of(folders[2], Tokenizer(folders[0]))
        with pytest.raises(
            FileNotFoundError,
            match=r"^speculate='bigram': no model 'bigram'",
        ):
            drafter_of("bigram", LETTERS)


class TestSharedNgrams:
    def run(self, drafter: NgramDrafter, prompt: list[int], salt: str = "") -> int:
        """How many drafts are right, of a text that is generated after `prompt`."""
        with LLM(make_tiny_model(max_position_embeddings=256), LETTERS, speculate=drafter) as llm:
            text = llm.generate(prompt, max_new_tokens=40, temperature=1.0, seed=1, cache_salt=salt)
            assert (
                text.token_ids
                == llm.generate(prompt, max_new_tokens=40, temperature=1.0, seed=1, draft=False).token_ids
            )
            return text.accepted

    def test_what_others_have_said(self) -> None:
        drafter = NgramDrafter(shared=True)
        before, again = self.run(drafter, [1, 2, 3]), self.run(drafter, [1, 2, 3])
        assert again > before + 20
        assert self.run(drafter, [1, 2, 3], "another") <= before  # only those with the same salt
        alone = NgramDrafter()
        assert self.run(alone, [1, 2, 3]) == self.run(alone, [1, 2, 3]) == before

    def test_old_ones_are_forgotten(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(drafters, "SHARED_TOKENS", 100)
        model, outputs = make_tiny_model(), drafters._Outputs()
        chance = random.Random(0)
        for _ in range(50):
            sequence = Sequence(model.config, LETTERS, [1], FEW)
            sequence.token_ids += [chance.randrange(5) for _ in range(30)]
            outputs.add(sequence)
        kept = [each.tokens for each in outputs._outputs]
        assert len(kept) == 3
        assert {id(output.tokens) for output, _ in outputs._after.values()} <= {*map(id, kept)}
        for tokens in kept:
            for gram, end in drafters._grams(tokens):
                found = outputs.following("", gram, 4)
                assert any(found == other[at : at + 4] for other in kept for at in range(len(other) + 1)), end


def test_scores_leave_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor do requests that want no drafts."""
    drafter = NgramDrafter(shared=True)
    with LLM(make_tiny_model(), LETTERS, speculate=drafter) as llm:
        for _ in range(3):
            llm.score([1, 2, 3, 4])
            llm.generate([1, 2, 3], max_new_tokens=5, draft=False)
        assert not drafter._outputs._outputs  # type: ignore[union-attr]
        llm.generate([1, 2, 3], max_new_tokens=5)
        assert len(drafter._outputs._outputs) == 1  # type: ignore[union-attr]


def test_a_loaded_model() -> None:
    model = make_tiny_model()
    assert generate(model, LETTERS, [1, 2, 3], FEW, speculate=model).accepted > 15


def test_without_a_cache() -> None:
    with pytest.raises(ValueError, match="drafts need the cache"):
        generate(make_tiny_model(), LETTERS, [1, 2, 3], FEW, speculate="ngram", use_kv_cache=False)


def test_a_long_prompt_is_indexed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafters, "INDEXED", 8)
    model, prompt = make_tiny_model(), [*range(20)]
    drafter, sequence = NgramDrafter(), Sequence(model.config, LETTERS, [*prompt, 1, 2, 3], FEW)
    late = Sequence(model.config, LETTERS, [*prompt, 16, 17, 18], FEW)
    found = [drafter.propose({sequence: 2, late: 1}) for _ in range(3)]
    assert [each[sequence] for each in found] == [[4, 5]] * 3
    assert [each[late] for each in found] == [[], [], [19]]


def test_a_function() -> None:
    model = make_tiny_model()
    expected = generate(model, LETTERS, [1, 2, 3], FEW).token_ids

    def propose(sequence: Sequence, count: int) -> Collection[int]:
        return expected[sequence.num_tokens - 3 :][:count]

    result = generate(model, LETTERS, [1, 2, 3], FEW, speculate=propose)
    assert (result.token_ids, result.accepted) == (expected, result.drafted)
    assert result.drafted > 20


@pytest.mark.parametrize("speculate", [3, NgramDrafter, object(), "bigram"])
def test_unknown_drafters_are_refused(speculate: Any) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=r"^speculate"):
        LLM(make_tiny_model(), LETTERS, speculate=speculate)
