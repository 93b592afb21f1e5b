"""Drafts change no text: whatever a drafter proposes, each outcome is the one without it."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
from amount import amount
from mocks import MockTokenizer
from tiny import make_tiny_model

from infer import LLM, SamplingParams, generate, stream
from infer.backend.parts import DRAFT_LEVELS
from infer.engine import draft
from infer.engine.draft import MAX_DRAFTS, Speculation, _Cost
from infer.engine.drafters import NgramDrafter
from infer.engine.engine import Engine
from infer.engine.memory import CacheMemory
from infer.engine.result import GenerationResult
from infer.engine.scheduler import ScheduledTokens
from infer.engine.sequence import Sequence
from infer.models.common import Decoder

LETTERS = MockTokenizer([chr(33 + i) for i in range(64)])
FAMILIES = ["llama", "qwen3", "gemma3", "gpt2", "rope_gpt"]
CHOICES: list[dict[str, Any]] = [
    {},
    {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "seed": 4, "logprobs": 2},
    {"repetition_penalty": 1.7, "frequency_penalty": 0.5, "presence_penalty": 0.25},
    {"logit_bias": {9: 4.0, 12: 3.5}, "temperature": 0.7, "seed": 5},
    {"stop": ["T", "7F"], "temperature": 1.0, "seed": 6},
    {"prompt_logprobs": 1, "logprobs": 0},
]


class Scripted:
    """Proposes what will be generated, except where `spoil` says otherwise."""

    def __init__(self, spoil: Callable[[list[int]], Collection[int]]) -> None:
        self.spoil, self.known, self.finished = spoil, dict[tuple[int, ...], list[int]](), list[Sequence]()

    def propose(self, counts: Mapping[Sequence, int]) -> dict[Sequence, Collection[int]]:
        return {sequence: self.proposed(sequence, count) for sequence, count in counts.items()}

    def proposed(self, sequence: Sequence, count: int) -> Collection[int]:
        text = self.known.get(tuple(sequence.prompt), [])
        done = sequence.num_tokens - sequence.prompt_len
        return self.spoil(text[done : done + count])

    def finish(self, sequence: Sequence) -> None:
        self.finished.append(sequence)


def wrong_somewhere(right: list[int]) -> list[int]:
    chance = random.Random(len(right) + sum(right))
    return [token if chance.random() < 0.7 else chance.randrange(64) for token in right]


def failing(right: list[int]) -> list[int]:
    raise OSError("no draft today")


DRAFTERS: dict[str, Callable[[list[int]], Any]] = {
    "right": lambda right: right,
    "wrong": lambda right: [(token + 1) % 64 for token in right],
    "some": wrong_somewhere,
    "long": lambda right: right * 20,
    "none": lambda _: [],
    "unknown": lambda right: [*right[:1], 64, -1, 10**30],
    "ends": lambda right: [*right[:1], 1, 1],
    "failing": failing,
    "nonsense": lambda _: ["x", None],
}


def outcome(result: GenerationResult) -> tuple[Any, ...]:
    return result.token_ids, result.text, result.finish_reason, result.logprobs, result.prompt_logprobs


@pytest.fixture(autouse=True)
def _always_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as possible, whatever they cost."""
    monkeypatch.setattr(Speculation, "_worth", lambda *_: (0.0, MAX_DRAFTS))


def run(model: Decoder, drafter: Any, sequences: list[Sequence], pages: int = 400, **options: Any) -> Engine:
    page = CacheMemory(model, 10**6, page_size=4).pool.page_bytes
    engine = Engine(model, CacheMemory(model, pages * page, page_size=4), drafter=drafter, **options)
    for sequence in sequences:
        engine.submit(sequence)
    while not engine.is_idle:
        engine.step()
    return engine


def sequences_of(model: Decoder, seed: int, count: int = 6, **settings: Any) -> list[Sequence]:
    chance = random.Random(seed)
    found = []
    for i in range(count):
        prompt = [chance.randrange(64) for _ in range(chance.randint(1, 14))] * chance.randint(1, 2)
        params = SamplingParams(**{"max_new_tokens": chance.randint(1, 18), **CHOICES[i % len(CHOICES)], **settings})
        found.append(Sequence(model.config, LETTERS, prompt, params))
    return found


class TestTexts:
    @pytest.mark.parametrize("family", FAMILIES)
    @pytest.mark.parametrize("kind", [*DRAFTERS, "ngram"])
    def test_are_those_without_drafts(self, family: str, kind: str) -> None:
        """In a pool of many pages, and in one of few, where sequences are preempted."""
        model = make_tiny_model(model_type=family, seed=1)
        for seed in range(amount(4, 1)):
            sequences = sequences_of(model, seed)
            expected = [generate(model, LETTERS, each.prompt, each.params) for each in sequences]
            for pages in (400, 40):
                drafter = NgramDrafter() if kind == "ngram" else Scripted(DRAFTERS[kind])
                if isinstance(drafter, Scripted):
                    drafter.known = {tuple(r.prompt_token_ids): r.token_ids for r in expected}
                sequences = [Sequence(model.config, LETTERS, each.prompt, each.params) for each in sequences]
                engine = run(model, drafter, sequences, pages, max_rows=3, prefill_chunk=5)
                assert [outcome(each.result()) for each in sequences] == [outcome(each) for each in expected]
                stats, results = engine.stats(), [each.result() for each in sequences]
                assert stats.drafted_tokens == sum(each.drafted for each in results)
                assert stats.accepted_tokens == sum(each.accepted for each in results)
                assert len(engine.memory.index.pages_in_use()) == 0  # type: ignore[union-attr]
                if kind in ("none", "failing", "nonsense"):
                    assert not stats.drafted_tokens
                if kind == "right":
                    assert stats.accepted_tokens == stats.drafted_tokens > 0
                    assert stats.steps < sum(len(each.token_ids) for each in results)
                if kind == "wrong":
                    assert stats.drafted_tokens > 0 == stats.accepted_tokens
                if isinstance(drafter, Scripted):
                    assert {*drafter.finished} <= {*sequences}
                    assert not engine.speculation._drafts  # type: ignore[union-attr]
                else:
                    assert not drafter._texts

    @pytest.mark.parametrize("chunk", [1, 4, 7, None])
    @pytest.mark.parametrize("kind", ["right", "wrong", "some"])
    def test_in_a_ring(self, kind: str, chunk: int | None) -> None:
        """Which has overwritten what it would need after too many wrong ones."""
        model = make_tiny_model(model_type="gemma3")
        params = SamplingParams(max_new_tokens=60)
        expected = generate(model, LETTERS, [1, 2, 3], params, prefill_chunk=chunk)
        drafter = Scripted(DRAFTERS[kind])
        drafter.known = {(1, 2, 3): expected.token_ids}
        result = generate(model, LETTERS, [1, 2, 3], params, prefill_chunk=chunk, speculate=drafter)
        assert outcome(result) == outcome(expected)
        assert result.drafted > 0

    def test_without_kernels(self) -> None:
        """Rounding may depend on the number of tokens."""
        model, params = make_tiny_model(), SamplingParams(max_new_tokens=20)
        expected = generate(model, LETTERS, [3, 4] * 8, params).token_ids
        assert generate(model, LETTERS, [3, 4] * 8, params, speculate="ngram").drafted
        model.layers[0].mlp.register_forward_hook(lambda *_: None)  # then plain torch runs it
        result = generate(model, LETTERS, [3, 4] * 8, params, speculate="ngram")
        assert (result.drafted, result.token_ids) == (0, expected)

    def test_a_drafter_that_fails_at_the_end(self) -> None:
        class Failing(NgramDrafter):
            def finish(self, sequence: Sequence) -> None:
                raise OSError("at the end")

        with LLM(make_tiny_model(), LETTERS, speculate=Failing()) as llm:
            for _ in range(2):
                assert len(llm.generate([3, 4] * 8, max_new_tokens=9).token_ids) == 9

    def test_preempt_nobody(self) -> None:
        """Where there is no memory for drafts, there are none."""
        model = make_tiny_model()

        def preemptions(drafter: Any, pages: int) -> int:
            engine = run(model, drafter, sequences_of(model, 3, 4, max_new_tokens=18), pages=pages)
            return engine.stats().preemptions

        without = [preemptions(None, pages) for pages in range(16, 30)]
        with_drafts = [preemptions(Scripted(lambda _: [7] * MAX_DRAFTS), pages) for pages in range(16, 30)]
        assert sum(without) > 0
        assert with_drafts == without

    def test_a_sequence_may_do_without(self) -> None:
        model = make_tiny_model()
        with LLM(model, LETTERS, speculate="ngram") as llm:
            prompt = [5, 6, 7, 8] * 6
            with_drafts = llm.generate(prompt, max_new_tokens=30)
            without = llm.generate(prompt, max_new_tokens=30, draft=False)
            predicted = llm.generate([9], max_new_tokens=30, draft=without.token_ids)
            again = llm.generate(prompt, max_new_tokens=30, draft=without.token_ids)
        assert with_drafts.token_ids == without.token_ids == again.token_ids
        assert again.drafted > 0 == without.drafted
        assert again.accepted == again.drafted > 20
        assert predicted.token_ids == generate(model, LETTERS, [9], SamplingParams(max_new_tokens=30)).token_ids

    def test_of_a_session(self) -> None:
        """Its turns reuse the cache; one is taken back, and a fork goes on."""
        model, params = make_tiny_model(), SamplingParams(max_new_tokens=12)
        found = []
        for speculate in (None, "ngram"):
            with LLM(model, LETTERS, speculate=speculate) as llm:
                chat = llm.session(params=params, encode=lambda messages: [3, 4, 5] * (4 * len(messages)))
                texts = [chat.send("one").token_ids, chat.send("two").token_ids]
                chat.rewind(1)
                results = [chat.send("three"), chat.fork().send("four")]
                texts += [each.token_ids for each in results]
                found.append(texts)
                assert (speculate is None) == (not llm.stats().drafted_tokens)
        assert found[0] == found[1]

    @pytest.mark.parametrize("stream", [False, True])
    def test_of_several_samples(self, stream: bool) -> None:
        model = make_tiny_model()
        settings: dict[str, Any] = {"max_new_tokens": 20, "temperature": 0.4, "seed": 3, "n": 3}
        texts = []
        for speculate in (None, "ngram"):
            with LLM(model, LETTERS, speculate=speculate) as llm:
                if stream:
                    tokens = list(llm.stream([3, 4] * 8, **settings))
                    texts.append([[t.token_id for t in tokens if t.index == i] for i in range(3)])
                else:
                    texts.append([each.token_ids for each in llm.generate([[3, 4] * 8], **settings)[0]])  # type: ignore[attr-defined]
        assert texts[0] == texts[1]

    def test_a_wrong_draft_that_is_accepted_is_found(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The comparison above would notice it."""
        model = make_tiny_model()
        (sequence,) = sequences_of(model, 0, 1, max_new_tokens=12)
        expected = generate(model, LETTERS, sequence.prompt, sequence.params)
        drafter = Scripted(DRAFTERS["wrong"])
        drafter.known = {tuple(expected.prompt_token_ids): expected.token_ids}
        monkeypatch.setattr(Sequence, "_sample", lambda self, _: [*drafter.proposed(self, 1), 0][0])
        run(model, drafter, [sequence])
        assert sequence.result().token_ids != expected.token_ids


@pytest.mark.parametrize("wrong", ["text", [1.5], 7])
def test_unusable_predictions_are_refused(wrong: Any) -> None:
    with LLM(make_tiny_model(), LETTERS, speculate="ngram") as llm, pytest.raises(TypeError, match="token ids"):
        llm.generate([1, 2], max_new_tokens=2, draft=wrong)


class TestNgrams:
    def proposed(self, tokens: list[int], count: int = 4, prediction: Collection[int] = (), prompt: int = 1) -> Any:
        model = make_tiny_model()
        settings = SamplingParams(max_new_tokens=5)
        sequence = Sequence(model.config, LETTERS, tokens[:prompt], settings, draft=prediction or True)
        drafter = NgramDrafter()
        for end in range(prompt, len(tokens) + 1):
            sequence.token_ids = tokens[:end]
            found = drafter.propose({sequence: count})[sequence]
        return found

    def test_what_followed_before(self) -> None:
        assert self.proposed([1, 2, 3, 4, 5, 6, 1, 2, 3], prompt=9) == [4, 5, 6, 1]
        assert self.proposed([1, 2, 3, 4, 5, 6, 1, 2, 3]) == [4, 5, 6, 1]
        assert self.proposed([1, 2, 3, 4]) == []

    def test_the_last_and_the_longest(self) -> None:
        assert self.proposed([1, 2, 3, 7, 1, 2, 3, 8, 1, 2, 3], 1) == [8]
        assert self.proposed([5, 1, 2, 3, 7, 6, 1, 2, 3, 8, 5, 1, 2, 3], 1) == [7]

    def test_a_repetition_repeats(self) -> None:
        assert self.proposed([9, 1, 2, 1, 2, 1], 7) == [2, 1, 2, 1, 2, 1, 2]

    def test_a_prediction(self) -> None:
        assert self.proposed([7], prediction=[1, 2, 3, 4, 5]) == [1, 2, 3, 4]
        assert self.proposed([7, 1, 2], prediction=[1, 2, 3, 4, 5, 6]) == [3, 4, 5, 6]
        assert self.proposed([7, 1, 9, 3, 4, 5], prediction=[1, 2, 3, 4, 5, 6, 7], count=2) == [6, 7]  # after an edit
        assert self.proposed([7, 8], prediction=[1, 2, 3]) == []

    def test_any_steps_give_the_same(self) -> None:
        """As if the drafter had seen the whole text at once, unless it follows an earlier occurrence."""
        chance = random.Random(0)
        for _ in range(200):
            tokens = [chance.randrange(4) for _ in range(chance.randint(1, 40))]
            for found in (self.proposed(tokens, 3), self.proposed(tokens, 3, prompt=len(tokens))):
                at = [i for i in range(len(tokens)) if tokens[i] == tokens[-1]]
                assert not found or any((tokens + found)[i + 1] == found[0] for i in at[:-1])


class TestWorth:
    """How many drafts a sequence gets."""

    @pytest.fixture(autouse=True)
    def _measured(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.undo()
        monkeypatch.setattr(draft, "_most_for", lambda _: MAX_DRAFTS)

    def tried(
        self,
        right: float,
        cost: Callable[[int, int], float],
        rows: int = 1,
        steps: int = 400,
        padded: bool = False,
    ) -> tuple[float, float]:
        """Drafts per step, and the speed beside that without. cost: of drafts, by all and by the most of a sequence, in
        steps without.
        """
        chance, model = random.Random(1), make_tiny_model()
        drafter = Scripted(lambda _: [5 if chance.random() < right else 6 for _ in range(MAX_DRAFTS)])
        speculation = Speculation(drafter, 64, padded=padded)
        sequences = [Sequence(model.config, LETTERS, [1], SamplingParams(max_new_tokens=5)) for _ in range(rows)]
        took = tokens = drafted = 0.0
        for sequence in sequences:
            sequence.max_len = 10**6
            sequence.num_prefill_tokens = 0
        for _ in range(steps):
            speculation.draft(sequences)
            speculation._drafted_s = 0.0
            scheduled = [ScheduledTokens(each, 1 + len(each.draft_token_ids)) for each in sequences]
            plan = speculation.planned(scheduled)
            assert plan is not None
            step_s = (1 + cost(plan.drafts, plan.most)) * chance.uniform(0.95, 1.05)
            right_ones = 0
            for each in sequences:
                drafts, each.draft_token_ids = each.draft_token_ids, []
                accepted = next((i for i, token in enumerate(drafts) if token != 5), len(drafts))
                each.token_ids += [5] * (accepted + 1)
                each.num_drafted, each.num_accepted = each.num_drafted + len(drafts), each.num_accepted + accepted
                tokens, drafted, right_ones = tokens + 1 + accepted, drafted + len(drafts), right_ones + accepted
            speculation.measured(plan, step_s, right_ones)
            took += step_s
        return drafted / steps / rows, tokens / took / rows

    def test_right_ones(self) -> None:
        drafts, speed = self.tried(1.0, lambda drafts, _: 0.05 * drafts)
        assert drafts > 0.95 * MAX_DRAFTS
        assert speed > 5

    @pytest.mark.parametrize("cost", [0.02, 0.05, 0.3, 1.0])
    def test_wrong_ones_are_given_up(self, cost: float) -> None:
        drafts, speed = self.tried(0.0, lambda drafts, _: cost * drafts)
        assert drafts < 0.1
        assert speed > 0.98

    def test_half_of_them(self) -> None:
        cheap, dear = self.tried(0.5, lambda drafts, _: 0.02 * drafts), self.tried(0.5, lambda drafts, _: 0.45 * drafts)
        assert cheap[0] > 3 > 1 > dear[0]
        assert cheap[1] > 1.65
        assert dear[1] > 0.98

    @pytest.mark.parametrize(
        ("rows", "costs", "speeds"),
        [
            (1, [0.1, 0.11, 0.13, 0.18], [0.98, 1.6, 2.8, 6.5]),
            (8, [0.15, 0.24, 0.3, 0.4], [0.98, 1.35, 2.4, 5.5]),
            (32, [0.15, 0.25, 0.8, 1.45], [0.98, 1.3, 1.8, 3.2]),
        ],
    )
    def test_in_captured_steps(self, rows: int, costs: list[float], speeds: list[float]) -> None:
        """All drafts up to 1, 2, 4 or 8 of each sequence cost the same."""
        by_level = {0: 0.0} | dict(zip(DRAFT_LEVELS, costs, strict=True))
        for right, speed in zip((0.0, 0.5, 0.8, 1.0), speeds, strict=True):
            found = self.tried(
                right, lambda _, most: by_level[next(each for each in by_level if each >= most)], rows, padded=True
            )
            assert found[1] > speed

    @pytest.mark.parametrize("left_out", [False, True])
    def test_time_without_drafts(self, left_out: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        """A drafter that takes time and proposes nothing is asked rarely."""
        seconds = count()
        monkeypatch.setattr(draft, "time", SimpleNamespace(perf_counter=lambda: next(seconds)))
        model = make_tiny_model()
        sequence = Sequence(model.config, LETTERS, [1], SamplingParams(max_new_tokens=5))
        sequence.max_len, sequence.num_prefill_tokens, asked = 10**6, 0, []

        class Unsure(Scripted):
            def propose(self, counts: Mapping[Sequence, int]) -> dict[Sequence, Collection[int]]:
                asked.append(counts[sequence])
                return {} if left_out else dict.fromkeys(counts, ())

        speculation = Speculation(Unsure(lambda _: []), 64)
        speculation._costs = {(1, 1): _Cost(1.0, 1.0)}
        for _ in range(400):
            speculation.draft([sequence])
            plan = speculation.planned([ScheduledTokens(sequence, 1)])
            assert plan is not None
            speculation.measured(plan, 5.0, 0)
        assert 0 < len(asked) < 100
        assert (speculation._drafts[sequence].record.chance < 0.3) != left_out

    def test_where_rows_fill_the_device(self) -> None:
        """A draft costs what a row costs: only one that is nearly certain pays."""
        drafts, speed = self.tried(0.8, lambda drafts, _: drafts / 16, rows=16)
        assert drafts < 0.5
        assert speed > 0.97


@pytest.mark.parametrize("threaded", [False, True])
def test_an_error_takes_no_token_back(threaded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers get the tokens that the same step has chosen before it."""
    model, params = make_tiny_model(), SamplingParams(max_new_tokens=30)
    expected = generate(model, LETTERS, [1, 2, 3], params).token_ids
    drafter = Scripted(DRAFTERS["right"])
    drafter.known = {(1, 2, 3): expected}
    append = Sequence.append_token

    def failing(self: Sequence, token: int) -> None:
        append(self, -1 if self.num_tokens == 3 + 17 else token)

    monkeypatch.setattr(Sequence, "append_token", failing)
    found = list[int]()
    with LLM(model, LETTERS, speculate=drafter) as llm:
        tokens = (
            llm.stream([1, 2, 3], params) if threaded else stream(model, LETTERS, [1, 2, 3], params, speculate=drafter)
        )
        with pytest.raises(ValueError, match="no token can be chosen for position 20"):
            found.extend(token.token_id for token in tokens)
    assert found == expected[:17]
