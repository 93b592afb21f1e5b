"""Many sequences in one engine: each text is the one that it has alone, whatever runs beside it; nothing leaks."""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from amount import amount
from mocks import MockTokenizer
from tiny import make_tiny_model

import infer
from infer import SamplingParams, Trace, generate
from infer.backend.cpu.backend import CpuBackend
from infer.cache.base import unwrap
from infer.cache.pool import OutOfPages, pages_for
from infer.engine.allocator import PagedAllocator
from infer.engine.engine import Engine, EngineFailed, Event
from infer.engine.memory import CacheMemory
from infer.engine.result import GenerationResult
from infer.engine.sequence import NoToken, Sequence, make_sequences
from infer.models.common import Decoder

PACKAGE = str(Path(infer.__file__).parent)
LETTERS = MockTokenizer([chr(33 + i) for i in range(64)])
FAMILIES = ["llama", "qwen3", "gemma3", "gpt2", "rope_gpt"]
PAGE = 4
MOST = 48  # tokens that a request may come to have
CHOICES = [
    {},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "seed": 4, "logprobs": 2},
    {"repetition_penalty": 1.7, "frequency_penalty": 0.5, "presence_penalty": 0.25},
    {"logit_bias": {9: 4.0, 12: 3.5}, "temperature": 0.7, "seed": 5},
    {"stop": ["T", "7F"], "temperature": 1.0, "seed": 6},
    {"prompt_logprobs": 1, "logprobs": 0},
    {"prompt_logprobs": 0, "max_new_tokens": 0},
]


def memory_of(model: Decoder, pages: int, dtype: str = "auto", page: int = PAGE) -> CacheMemory:
    memory = CacheMemory(model, 10**6, cache_dtype=dtype, page_size=page)
    return CacheMemory(model, pages * memory.pool.page_bytes, cache_dtype=dtype, page_size=page)


def outcome(result: GenerationResult) -> tuple[Any, ...]:
    """All that does not tell of time and memory."""
    return (
        result.prompt_token_ids,
        result.token_ids,
        result.text,
        result.finish_reason,
        result.logprobs,
        result.prompt_logprobs,
    )


def alone(model: Decoder, sequence: Sequence, dtype: str = "auto") -> tuple[Any, ...]:
    return outcome(generate(model, LETTERS, sequence.prompt, sequence.params, cache_dtype=dtype))


def check_alone(model: Decoder, sequences: list[Sequence]) -> None:
    """Each text is the one that the sequence has alone."""
    assert [outcome(each.result()) for each in sequences] == [alone(model, each) for each in sequences]


def drain(engine: Engine) -> None:
    while not engine.is_idle:
        engine.step()


def check_nothing_is_left(engine: Engine) -> None:
    """Of pages, beyond what the index remembers; and that can be let go of."""
    memory = engine.memory
    assert engine.is_idle
    assert isinstance(engine.allocator, PagedAllocator)
    assert not engine.allocator._computing
    assert not engine.allocator._waiting
    assert len(memory.index.pages_in_use()) == 0
    memory.index.check()
    memory.index.clear()
    assert memory.pool.num_free_pages == memory.pool.num_pages


class TestAnyLoad:
    @pytest.mark.parametrize("dtype", ["auto", "int8"])
    @pytest.mark.parametrize("family", FAMILIES)
    @pytest.mark.parametrize("seed", range(amount(12, 2)))
    def test_arrivals_aborts_and_preemptions(self, family: str, dtype: str, seed: int) -> None:
        """In a pool of few pages, with prompts that begin alike, in any order."""
        chance = random.Random(seed)
        model = make_tiny_model(model_type=family, seed=seed)
        groups = len(memory_of(model, 40).index.windows)
        engine = Engine(model, memory_of(model, 16 * groups, dtype), max_rows=chance.choice([2, 5]), prefill_chunk=12)
        known = [[chance.randrange(64) for _ in range(MOST)] for _ in range(3)]
        sequences: list[Sequence] = []
        waiting = 14
        while waiting or not engine.is_idle:
            if waiting and chance.random() < 0.4:
                waiting -= 1
                cut = chance.randint(0, 30)
                prompt = chance.choice(known)[:cut] + [chance.randrange(64) for _ in range(chance.randint(1, 8))]
                settings = {"max_new_tokens": chance.randint(1, MOST - len(prompt))} | chance.choice(CHOICES)
                sequence = Sequence(
                    model.config, LETTERS, prompt, SamplingParams(**settings), priority=chance.choice([0, 0, 1])
                )
                sequences.append(sequence)
                engine.check(sequence)
                engine.submit(sequence)
            if sequences and chance.random() < 0.03:
                engine.abort([chance.choice(sequences)])
            engine.step()
        for sequence in sequences:
            got, expected = outcome(sequence.result()), alone(model, sequence, dtype)
            if sequence.finish_reason == "interrupted":
                assert got[1] == expected[1][: len(got[1])]
                assert expected[2].startswith(got[2])
            else:
                assert got == expected
        assert engine.stats().generated_tokens == sum(len(sequence.token_times) for sequence in sequences)
        check_nothing_is_left(engine)

    @pytest.mark.parametrize("family", ["llama", "gemma3"])
    @pytest.mark.parametrize("seed", range(amount(20, 4)))
    def test_in_no_more_pages_than_one_needs(self, family: str, seed: int) -> None:
        """What is remembered of others that begin alike never keeps one from running."""
        chance, model = random.Random(seed), make_tiny_model(model_type=family, seed=seed)
        text = [chance.randrange(64) for _ in range(MOST)]
        sequences = []
        for i in range(12):
            prompt = [*text[: chance.randint(0, 26)], *(chance.randrange(64) for _ in range(chance.randint(1, 5)))]
            params = SamplingParams(max_new_tokens=MOST - len(prompt), temperature=1.0, seed=i % 3)
            sequences.append(Sequence(model.config, LETTERS, prompt, params))
        groups = len(memory_of(model, 40).index.windows)
        pages = pages_for(model.config, MOST, PAGE, 7) + groups
        engine = Engine(model, memory_of(model, pages), max_rows=3, prefill_chunk=7)
        for sequence in sequences:
            engine.check(sequence)
            engine.submit(sequence)
        drain(engine)
        assert [sequence.error for sequence in sequences] == [None] * 12
        assert [outcome(sequence.result()) for sequence in sequences] == [
            alone(model, sequence) for sequence in sequences
        ]
        check_nothing_is_left(engine)

    def test_preemptions_happen(self) -> None:
        """Or the test above would test less than it says."""
        model = make_tiny_model()
        engine = Engine(model, memory_of(model, 16), max_rows=5, prefill_chunk=12)
        sequences = [
            Sequence(model.config, LETTERS, [i, 2, 3], SamplingParams(max_new_tokens=40, temperature=1.0, seed=i))
            for i in range(5)
        ]
        for sequence in sequences:
            engine.submit(sequence)
        drain(engine)
        assert engine.stats().preemptions >= 2
        assert [outcome(sequence.result()) for sequence in sequences] == [
            alone(model, sequence) for sequence in sequences
        ]
        check_nothing_is_left(engine)

    def test_the_same_schedule(self) -> None:
        """Of the same submissions."""
        model, schedules = make_tiny_model(), []
        for _ in range(2):
            engine, passes = (
                Engine(model, memory_of(model, 30), max_rows=3, prefill_chunk=9),
                list[list[tuple[str, int]]](),
            )
            engine.watch(
                lambda event, passes=passes: passes.append([(sequence.name, n) for sequence, n in event.scheduled])  # type: ignore[misc]
            )
            for i in range(9):
                prompt = [(i * 7 + j) % 64 for j in range(3 + 5 * i % 17)]
                params = SamplingParams(max_new_tokens=2 + i)
                engine.submit(Sequence(model.config, LETTERS, prompt, params, name=str(i)))
            drain(engine)
            schedules.append(passes)
        assert schedules[0] == schedules[1]

    def test_many_requests_leak_nothing(self) -> None:
        model = make_tiny_model()
        engine = Engine(model, memory_of(model, 24), max_rows=8, prefill_chunk=40)
        chance = random.Random(1)
        for round_ in range(amount(500, 20)):
            sequences = []
            for _ in range(20):
                prompt = [chance.randrange(64) for _ in range(chance.randint(1, 12))]
                params = SamplingParams(max_new_tokens=chance.randint(1, 3))
                sequences.append(Sequence(model.config, LETTERS, prompt, params))
                engine.submit(sequences[-1])
            engine.step()
            engine.abort(sequences[::7])
            drain(engine)
            if round_ == 2:
                gc.collect()
                objects = len(gc.get_objects())
        gc.collect()
        assert len(gc.get_objects()) < objects + 2000  # what the index remembers is bounded by its pages
        assert engine.num_finished == amount(500, 20) * 20
        check_nothing_is_left(engine)


@pytest.fixture
def model(tiny_model: Callable[..., Decoder]) -> Decoder:
    return tiny_model()


@pytest.fixture
def fed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[int]]]:
    """Of each pass, how many tokens each row feeds."""
    passes: list[list[int]] = []
    run = CpuBackend.run

    def watched(backend: CpuBackend, rows: Any) -> Any:
        passes.append([len(row.tokens) for row in rows])
        return run(backend, rows)

    monkeypatch.setattr(CpuBackend, "run", watched)
    return iter([passes])


def sequence_of(model: Decoder, prompt: list[int], **settings: Any) -> Sequence:
    return Sequence(model.config, LETTERS, prompt, SamplingParams(**{"max_new_tokens": 4} | settings))


PROMPT = [(5 * i + i * i) % 64 for i in range(21)]


class TestSharing:
    def test_twins(self, model: Decoder, fed: Any) -> None:
        """Submitted in the same instant, one computes the prompt, and the others its last token."""
        (passes,) = fed
        engine = Engine(model, memory_of(model, 60), max_rows=8, prefill_chunk=30)
        sequences = [sequence_of(model, [*PROMPT, 1, 2], temperature=1.0, seed=i) for i in range(4)]
        for sequence in sequences:
            engine.submit(sequence)
        engine.step()
        engine.step()
        assert passes == [[23], [1, 1, 1, 1]]
        drain(engine)
        assert [sequence.num_cached_tokens for sequence in sequences] == [
            0,
            22,
            22,
            22,
        ]  # the last page too, which is not full
        assert [outcome(sequence.result()) for sequence in sequences] == [
            alone(model, sequence) for sequence in sequences
        ]
        check_nothing_is_left(engine)

    def test_samples(self, model: Decoder, fed: Any) -> None:
        """n of them share the prompt's pages; the first has the seed itself, and each can be had alone."""
        (passes,) = fed
        engine = Engine(model, memory_of(model, 60), max_rows=8, prefill_chunk=30)
        params = SamplingParams(n=3, temperature=1.0, seed=7, max_new_tokens=6)
        sequences = make_sequences(model.config, LETTERS, PROMPT, params)
        for sequence in sequences:
            engine.submit(sequence)
        drain(engine)
        assert passes[0] == [21]
        assert sum(n for some in passes for n in some if n > 1) == 21
        results = [sequence.result() for sequence in sequences]
        assert results[0].seed == 7
        assert len({result.seed for result in results}) == 3
        assert len({tuple(result.token_ids) for result in results}) == 3
        for result in results:
            own = SamplingParams(temperature=1.0, seed=result.seed, max_new_tokens=6)
            assert generate(model, LETTERS, PROMPT, own).token_ids == result.token_ids

    def test_parts_of_a_prompt_are_shared_before_it_is_through(self, model: Decoder, fed: Any) -> None:
        """Who has only its beginning in common need not wait for the end."""
        (passes,) = fed
        engine = Engine(model, memory_of(model, 60), max_rows=4, prefill_chunk=9)
        first, second = sequence_of(model, PROMPT), sequence_of(model, [*PROMPT[:8], 1, 2, 3])
        engine.submit(first)
        engine.submit(second)
        drain(engine)
        assert passes[:3] == [[9], [9], [3, 3]]
        assert second.num_cached_tokens == 8
        assert outcome(second.result()) == alone(model, second)

    def test_who_waits_for_one_that_is_aborted(self, model: Decoder) -> None:
        engine = Engine(model, memory_of(model, 60), max_rows=4, prefill_chunk=9)
        first, second = sequence_of(model, PROMPT), sequence_of(model, PROMPT)
        engine.submit(first)
        engine.submit(second)
        engine.step()
        engine.abort([first])
        drain(engine)
        assert second.num_cached_tokens == 9  # what was computed by then is not lost
        assert outcome(second.result()) == alone(model, second)
        check_nothing_is_left(engine)

    def test_one_that_waits_is_aborted(self, model: Decoder) -> None:
        engine = Engine(model, memory_of(model, 60), max_rows=4, prefill_chunk=30)
        first, second = sequence_of(model, PROMPT), sequence_of(model, PROMPT)
        engine.submit(first)
        engine.submit(second)
        engine.step()
        assert second.awaited_page
        engine.abort([second])
        drain(engine)
        check_nothing_is_left(engine)

    def test_a_conversation_goes_on(self, model: Decoder) -> None:
        engine = Engine(model, memory_of(model, 60), max_rows=4, prefill_chunk=50)
        first = sequence_of(model, PROMPT)
        engine.submit(first)
        drain(engine)
        second = sequence_of(model, [*first.token_ids, 5])
        engine.submit(second)
        drain(engine)
        assert second.num_cached_tokens == len(first.token_ids) - 1  # its last token was never fed
        assert outcome(second.result()) == alone(model, second)

    def test_a_page_that_others_wait_for_is_copied_in_time(self, model: Decoder) -> None:
        """Its row shares its last page from then on, and others take what is free before it goes on."""
        prompts = [[*range(50), *range(50)]] * 2 + [[*range(64)]]
        for pages in (4, 5):
            engine = Engine(model, memory_of(model, pages, page=64))
            sequences = [sequence_of(model, prompt, max_new_tokens=20) for prompt in prompts]
            for sequence in sequences:
                engine.submit(sequence)
            drain(engine)
            assert [outcome(sequence.result()) for sequence in sequences] == [
                alone(model, sequence) for sequence in sequences
            ]

    @pytest.mark.parametrize("length", [2, 3, 66, 67])
    def test_twins_run_beside_each_other(self, model: Decoder, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """As soon as one has computed the prompt: also where all but one of its tokens is a chunk of one."""
        engine = Engine(model, memory_of(model, 100, page=64))
        monkeypatch.setattr(engine.runner, "captures", lambda _: True)  # the last token is computed alone, as on a GPU
        monkeypatch.setattr(engine.runner, "_capture", lambda *_: False)
        prompt = [i % 64 for i in range(length)]
        sequences = [sequence_of(model, prompt, max_new_tokens=20) for _ in range(4)]
        for sequence in sequences:
            engine.submit(sequence)
        drain(engine)
        assert engine.scheduler.num_steps < 30
        assert [outcome(sequence.result()) for sequence in sequences] == [alone(model, sequences[0])] * 4

    def test_scores_are_computed_even_where_pages_are_known(self, model: Decoder) -> None:
        engine = Engine(model, memory_of(model, 60), max_rows=4, prefill_chunk=9)
        sequences = [sequence_of(model, PROMPT), sequence_of(model, PROMPT, prompt_logprobs=2)]
        for sequence in sequences:
            engine.submit(sequence)
            drain(engine)
        assert sequences[1].num_cached_tokens == 0
        assert outcome(sequences[1].result()) == alone(model, sequences[1])

    def test_scores_wait_for_nobody(self, model: Decoder, fed: Any) -> None:
        (passes,) = fed
        engine = Engine(model, memory_of(model, 60), max_rows=4, prefill_chunk=50)
        for _ in range(2):
            engine.submit(sequence_of(model, PROMPT, prompt_logprobs=0))
        engine.step()
        assert passes == [[21, 21]]


class TestPasses:
    def test_prompts_beside_rows_that_decode(self, model: Decoder, fed: Any) -> None:
        (passes,) = fed
        engine = Engine(model, memory_of(model, 60), max_rows=4, prefill_chunk=9)
        engine.submit(sequence_of(model, [1, 2], max_new_tokens=8))
        engine.step()
        engine.submit(sequence_of(model, PROMPT, max_new_tokens=2))
        drain(engine)
        assert passes == [[2], [1, 9], [1, 9], [1, 3], [1, 1], [1], [1], [1]]

    def test_a_row_beyond_its_context(self, tiny_model: Callable[..., Decoder]) -> None:
        model = tiny_model(max_position_embeddings=12)
        engine = Engine(model, memory_of(model, 60), max_rows=4, prefill_chunk=9)
        params = SamplingParams(max_new_tokens=9)
        sequences = [
            Sequence(model.config, LETTERS, prompt, params, on_full="recompute")
            for prompt in ([1, 2, 3], PROMPT[:7], PROMPT[:15])
        ]
        for sequence in sequences:
            engine.submit(sequence)
        drain(engine)
        for sequence in sequences:
            expected = generate(model, LETTERS, sequence.prompt, params, on_full="recompute")
            assert outcome(sequence.result()) == outcome(expected)
        check_nothing_is_left(engine)

    def test_times(self, model: Decoder) -> None:
        engine = Engine(model, memory_of(model, 60), max_rows=1, prefill_chunk=9)
        sequences = [sequence_of(model, PROMPT), sequence_of(model, PROMPT)]
        for sequence in sequences:
            engine.submit(sequence)
        drain(engine)
        first, second = (sequence.result().timing for sequence in sequences)
        assert len(first.decode_times_s) == 3
        assert first.prefill_time_s > 0
        assert second.queue_time_s > first.prefill_time_s + first.decode_time_s


class TestErrors:
    def test_too_large_for_the_memory(self, model: Decoder) -> None:
        engine = Engine(model, memory_of(model, 4), max_rows=4, prefill_chunk=9)
        with pytest.raises(OutOfPages, match=r"positions take .* MB, but the memory for caches has"):
            engine.check(Sequence(model.config, LETTERS, PROMPT, SamplingParams(max_new_tokens=4)))

    def test_pages_that_others_hold(self, model: Decoder) -> None:
        """Somebody outside holds all pages: the request fails, and the next one runs."""
        engine = Engine(model, memory_of(model, 8), max_rows=4, prefill_chunk=30)
        pages = engine.memory.pool.allocate(8)
        sequence = sequence_of(model, PROMPT)
        engine.submit(sequence)
        drain(engine)
        assert isinstance(sequence.error, OutOfPages)
        engine.memory.pool.release(pages)
        again = sequence_of(model, PROMPT)
        engine.submit(again)
        drain(engine)
        assert outcome(again.result()) == alone(model, again)

    def test_logits_that_are_no_numbers(self, model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
        """End their own row, and leave the others as they were."""
        engine = Engine(model, memory_of(model, 60), max_rows=4, prefill_chunk=30)
        sequences = [sequence_of(model, [i, 7, 9], max_new_tokens=8) for i in range(3)]
        for sequence in sequences:
            engine.submit(sequence)
        engine.step()
        run = CpuBackend.run

        def broken(backend: CpuBackend, rows: Any) -> list[torch.Tensor]:
            logits = run(backend, rows)
            logits[1] = torch.full_like(logits[1], float("nan"))
            return logits

        monkeypatch.setattr(CpuBackend, "run", broken)
        engine.step()
        monkeypatch.setattr(CpuBackend, "run", run)
        drain(engine)
        assert isinstance(sequences[1].error, NoToken)
        assert outcome(sequences[0].result()) == alone(model, sequences[0])
        assert outcome(sequences[2].result()) == alone(model, sequences[2])
        check_nothing_is_left(engine)

    def test_closed(self, model: Decoder) -> None:
        engine = Engine(model, memory_of(model, 60), max_rows=1, prefill_chunk=30)
        sequences = [sequence_of(model, PROMPT), sequence_of(model, PROMPT)]
        for sequence in sequences:
            engine.submit(sequence)
        engine.step()
        engine.close(EngineFailed("the device is gone"))
        assert [str(sequence.error) for sequence in sequences] == ["the device is gone"] * 2
        check_nothing_is_left(engine)

    def test_memory_of_another_model(self, model: Decoder) -> None:
        with pytest.raises(ValueError, match="belongs to another model"):
            Engine(make_tiny_model(), memory_of(model, 60))


class TestWatching:
    def test_events(self, model: Decoder) -> None:
        engine = Engine(model, memory_of(model, 60), max_rows=4, prefill_chunk=12)
        events: list[Event] = []
        end = engine.watch(events.append)
        sequence = sequence_of(model, PROMPT, max_new_tokens=2)
        engine.submit(sequence)
        drain(engine)
        assert [event.kind for event in events] == ["submitted", "admitted", "step", "step", "step", "finished"]
        assert [dict(event.scheduled)[sequence] for event in events if event.kind == "step"] == [12, 9, 1]
        assert all(event.seconds > 0 for event in events if event.kind == "step")
        end()
        engine.submit(sequence_of(model, PROMPT))
        drain(engine)
        assert len(events) == 6

    def test_a_listener_that_fails(self, model: Decoder, caplog: pytest.LogCaptureFixture) -> None:
        engine = Engine(model, memory_of(model, 60))
        kinds: list[str] = []

        def fails(event: Event) -> None:
            raise KeyError(event.kind)

        end = engine.watch(fails)
        engine.watch(lambda event: kinds.append(event.kind))
        sequence = sequence_of(model, PROMPT)
        engine.submit(sequence)
        drain(engine)
        assert sequence.is_finished
        assert kinds[-1] == "finished"
        assert caplog.messages == ["a listener failed and was removed: KeyError('submitted')"]
        end()

    def test_preempted(self, model: Decoder) -> None:
        engine = Engine(model, memory_of(model, 16), max_rows=5, prefill_chunk=12)
        kinds: list[str] = []
        engine.watch(lambda event: kinds.append(event.kind))
        for i in range(5):
            engine.submit(sequence_of(model, [i, 2, 3], max_new_tokens=40))
        drain(engine)
        assert kinds.count("preempted") == engine.stats().preemptions > 0
        assert kinds.count("admitted") == 5 + engine.stats().preemptions

    def test_stats(self, model: Decoder) -> None:
        engine = Engine(model, memory_of(model, 60), max_rows=1, prefill_chunk=30)
        for _ in range(2):
            engine.submit(sequence_of(model, PROMPT))
        engine.step()
        stats = engine.stats()
        assert (stats.running, stats.waiting, stats.steps, stats.generated_tokens) == (1, 1, 1, 1)
        assert (stats.prompt_tokens, stats.cached_tokens) == (21, 0)
        assert (stats.pages, stats.pages_free, stats.pages_used) == (60, 54, 6)
        drain(engine)
        stats = engine.stats()
        assert (stats.running, stats.waiting, stats.finished, stats.generated_tokens) == (0, 0, 2, 8)
        assert (stats.prompt_tokens, stats.cached_tokens) == (22, 20)
        assert (stats.pages_free < 60, stats.pages_used) == (True, 0)  # the prefix index holds the others

    def test_speed_after_idle_time(self, model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
        """The speed is that of the steps: the time before a request is not part of it."""
        engine, now = Engine(model, memory_of(model, 60)), [0.0]
        monkeypatch.setattr("infer.engine.engine.time", SimpleNamespace(perf_counter=lambda: now[0]))
        wait = engine.runner.wait

        def a_quarter_second() -> Any:
            now[0] += 0.25
            return wait()

        monkeypatch.setattr(engine.runner, "wait", a_quarter_second)
        for idle in (0, 1, 4, 3600):
            now[0] += idle
            engine.submit(sequence_of(model, PROMPT, max_new_tokens=4))
            while not engine.is_idle:
                engine.step()
                assert engine.stats().tokens_per_s == pytest.approx(4)
            now[0] += 5
            assert engine.stats().tokens_per_s == 0

    def test_a_trace_of_one_among_many(self, model: Decoder) -> None:
        params = SamplingParams(max_new_tokens=4)
        expected, got = Trace(), Trace()
        generate(model, LETTERS, PROMPT, params, trace=expected, prefill_chunk=9)
        engine = Engine(model, memory_of(model, 60), max_rows=4, prefill_chunk=9)
        engine.submit(sequence_of(model, [1, 2, 3], max_new_tokens=9))
        got.check(model.config, len(PROMPT), 4)
        engine.submit(Sequence(model.config, LETTERS, PROMPT, params, recorder=got))
        drain(engine)
        assert len(got.steps) == len(expected.steps) == 4
        for one, other in zip(got.steps, expected.steps, strict=True):
            same = {"time_s": 0.0, "cache_bytes": 0, "attention": {}}
            assert replace(one, **same) == replace(other, **same)
            assert list(one.attention) == list(other.attention)
            for layer, rows in other.attention.items():
                assert all(map(np.array_equal, one.attention[layer], rows))


class TestDrafts:
    def test_pages_of_rejected_drafts_are_reserved_again(self, model: Decoder) -> None:
        """The cache frees them when it is rolled back: the next step must not count on them."""
        engine = Engine(model, memory_of(model, 60))
        sequence = sequence_of(model, PROMPT, max_new_tokens=12)
        engine.submit(sequence)
        engine.step()
        while not engine.is_idle:
            if sequence.max_len - sequence.num_tokens > PAGE + 2:
                sequence.draft_token_ids = [63] * (PAGE + 1)
            engine.step()
            cache = sequence.cache
            if cache is not None:
                assert sequence.num_reserved_slots <= unwrap(cache).num_pages * PAGE  # type: ignore[attr-defined]
        assert outcome(sequence.result()) == alone(model, sequence)
        check_nothing_is_left(engine)


class TestStructure:
    @pytest.mark.usefixtures("compiled")
    @pytest.mark.parametrize(("backend", "most"), [("cpu", 11), ("torch", 17)])
    def test_files_that_a_decode_step_visits(self, model: Decoder, backend: str, most: int) -> None:
        """Few enough to be read in one sitting."""
        if backend == "torch":
            model.layers[0].mlp.register_forward_hook(lambda *_: None)
        engine, visited = Engine(model, memory_of(model, 60)), set[str]()
        engine.submit(sequence_of(model, PROMPT, max_new_tokens=20))
        for _ in range(3):
            engine.step()

        def visit(frame: FrameType, event: str, _: Any) -> None:
            if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
                visited.add(frame.f_code.co_filename.removeprefix(PACKAGE))

        before = sys.getprofile()
        sys.setprofile(visit)
        engine.step()
        sys.setprofile(before)
        assert len(visited) <= most, sorted(visited)
