"""Many requests in one loop: each text is what its request gives alone, whatever runs beside it, and nothing leaks."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from amount import amount
from mocks import MockTokenizer
from tiny import make_tiny_model

from infer import SamplingParams, Trace, generate
from infer.backend.cpu.backend import CpuBackend
from infer.cache.pool import NoPages, pages_for
from infer.engine.loop import EngineFailed, Event, Loop, Task
from infer.engine.memory import CacheMemory
from infer.engine.request import NoToken, Request, samples
from infer.engine.result import GenerationResult
from infer.models.common import Decoder

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
    memory = CacheMemory(model, 10**6, cache_dtype=dtype, page=page)
    return CacheMemory(model, pages * memory.pool.page_bytes, cache_dtype=dtype, page=page)


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


def alone(model: Decoder, task: Task, dtype: str = "auto") -> tuple[Any, ...]:
    return outcome(generate(model, LETTERS, task.request.prompt, task.request.params, cache_dtype=dtype))


def drain(loop: Loop) -> None:
    while not loop.idle:
        loop.step()


def check_nothing_is_left(loop: Loop) -> None:
    """Of pages, beyond what the index remembers; and that can be let go of."""
    memory = loop.memory
    assert not loop.runner.flights
    assert not loop._tasks
    assert not loop._computing
    assert not loop._waiters
    assert len(memory.index.in_use()) == 0
    memory.index.check()
    memory.index.clear()
    assert memory.pool.free == memory.pool.count


class TestAnyLoad:
    @pytest.mark.parametrize("dtype", ["auto", "int8"])
    @pytest.mark.parametrize("family", FAMILIES)
    @pytest.mark.parametrize("seed", range(amount(12, 2)))
    def test_arrivals_aborts_and_preemptions(self, family: str, dtype: str, seed: int) -> None:
        """In a pool of few pages, with prompts that begin alike, in any order."""
        chance = random.Random(seed)
        model = make_tiny_model(model_type=family, seed=seed)
        groups = len(memory_of(model, 40).index.windows)
        loop = Loop(model, memory_of(model, 16 * groups, dtype), max_rows=chance.choice([2, 5]), prefill_chunk=12)
        known = [[chance.randrange(64) for _ in range(MOST)] for _ in range(3)]
        tasks: list[Task] = []
        waiting = 14
        while waiting or not loop.idle:
            if waiting and chance.random() < 0.4:
                waiting -= 1
                cut = chance.randint(0, 30)
                prompt = chance.choice(known)[:cut] + [chance.randrange(64) for _ in range(chance.randint(1, 8))]
                settings = {"max_new_tokens": chance.randint(1, MOST - len(prompt))} | chance.choice(CHOICES)
                task = Task(
                    Request(model.config, LETTERS, prompt, SamplingParams(**settings)),
                    priority=chance.choice([0, 0, 1]),
                )
                tasks.append(task)
                loop.check(task.request)
                loop.submit(task)
            if tasks and chance.random() < 0.03:
                loop.abort([chance.choice(tasks)])
            loop.step()
        for task in tasks:
            got, expected = outcome(task.result()), alone(model, task, dtype)
            if task.request.finish_reason == "interrupted":
                assert got[1] == expected[1][: len(got[1])]
                assert expected[2].startswith(got[2])
            else:
                assert got == expected
        assert loop.stats().generated_tokens == sum(len(task.times) for task in tasks)
        check_nothing_is_left(loop)

    @pytest.mark.parametrize("family", ["llama", "gemma3"])
    @pytest.mark.parametrize("seed", range(amount(20, 4)))
    def test_in_no_more_pages_than_one_needs(self, family: str, seed: int) -> None:
        """What is remembered of others that begin alike never keeps one from running."""
        chance, model = random.Random(seed), make_tiny_model(model_type=family, seed=seed)
        text = [chance.randrange(64) for _ in range(MOST)]
        tasks = []
        for i in range(12):
            prompt = [*text[: chance.randint(0, 26)], *(chance.randrange(64) for _ in range(chance.randint(1, 5)))]
            params = SamplingParams(max_new_tokens=MOST - len(prompt), temperature=1.0, seed=i % 3)
            tasks.append(Task(Request(model.config, LETTERS, prompt, params)))
        groups = len(memory_of(model, 40).index.windows)
        pages = pages_for(model.config, MOST, PAGE, 7) + groups
        loop = Loop(model, memory_of(model, pages), max_rows=3, prefill_chunk=7)
        for task in tasks:
            loop.check(task.request)
            loop.submit(task)
        drain(loop)
        assert [task.error for task in tasks] == [None] * 12
        assert [outcome(task.result()) for task in tasks] == [alone(model, task) for task in tasks]
        check_nothing_is_left(loop)

    def test_preemptions_happen(self) -> None:
        """Or the test above would test less than it says."""
        model = make_tiny_model()
        loop = Loop(model, memory_of(model, 16), max_rows=5, prefill_chunk=12)
        tasks = [
            Task(Request(model.config, LETTERS, [i, 2, 3], SamplingParams(max_new_tokens=40, temperature=1.0, seed=i)))
            for i in range(5)
        ]
        for task in tasks:
            loop.submit(task)
        drain(loop)
        assert loop.stats().preemptions >= 2
        assert [outcome(task.result()) for task in tasks] == [alone(model, task) for task in tasks]
        check_nothing_is_left(loop)

    def test_the_same_schedule(self) -> None:
        """Of the same submissions."""
        model, schedules = make_tiny_model(), []
        for _ in range(2):
            loop, passes = Loop(model, memory_of(model, 30), max_rows=3, prefill_chunk=9), list[list[tuple[str, int]]]()
            loop.watch(
                lambda event, passes=passes: passes.append([(task.name, n) for task, n in event.fed.items()])  # type: ignore[misc]
            )
            for i in range(9):
                prompt = [(i * 7 + j) % 64 for j in range(3 + 5 * i % 17)]
                params = SamplingParams(max_new_tokens=2 + i)
                loop.submit(Task(Request(model.config, LETTERS, prompt, params), name=str(i)))
            drain(loop)
            schedules.append(passes)
        assert schedules[0] == schedules[1]

    def test_many_requests_leak_nothing(self) -> None:
        model = make_tiny_model()
        loop = Loop(model, memory_of(model, 24), max_rows=8, prefill_chunk=40)
        chance = random.Random(1)
        for round_ in range(amount(500, 20)):
            tasks = []
            for _ in range(20):
                prompt = [chance.randrange(64) for _ in range(chance.randint(1, 12))]
                params = SamplingParams(max_new_tokens=chance.randint(1, 3))
                tasks.append(Task(Request(model.config, LETTERS, prompt, params)))
                loop.submit(tasks[-1])
            loop.step()
            loop.abort(tasks[::7])
            drain(loop)
            if round_ == 2:
                gc.collect()
                objects = len(gc.get_objects())
        gc.collect()
        assert len(gc.get_objects()) < objects + 2000  # what the index remembers is bounded by its pages
        assert loop.finished == amount(500, 20) * 20
        check_nothing_is_left(loop)


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


def task_of(model: Decoder, prompt: list[int], **settings: Any) -> Task:
    return Task(Request(model.config, LETTERS, prompt, SamplingParams(**{"max_new_tokens": 4} | settings)))


PROMPT = [(5 * i + i * i) % 64 for i in range(21)]


class TestSharing:
    def test_twins(self, model: Decoder, fed: Any) -> None:
        """Submitted in the same instant, one computes the prompt, and the others its last token."""
        (passes,) = fed
        loop = Loop(model, memory_of(model, 60), max_rows=8, prefill_chunk=30)
        tasks = [task_of(model, [*PROMPT, 1, 2], temperature=1.0, seed=i) for i in range(4)]
        for task in tasks:
            loop.submit(task)
        loop.step()
        loop.step()
        assert passes == [[23], [1, 1, 1, 1]]
        drain(loop)
        assert [task.known for task in tasks] == [0, 22, 22, 22]  # the last page too, which is not full
        assert [outcome(task.result()) for task in tasks] == [alone(model, task) for task in tasks]
        check_nothing_is_left(loop)

    def test_samples(self, model: Decoder, fed: Any) -> None:
        """n of them share the prompt's pages; the first has the seed itself, and each can be had alone."""
        (passes,) = fed
        loop = Loop(model, memory_of(model, 60), max_rows=8, prefill_chunk=30)
        params = SamplingParams(n=3, temperature=1.0, seed=7, max_new_tokens=6)
        tasks = [Task(request) for request in samples(model.config, LETTERS, PROMPT, params)]
        for task in tasks:
            loop.submit(task)
        drain(loop)
        assert passes[0] == [21]
        assert sum(n for some in passes for n in some if n > 1) == 21
        results = [task.result() for task in tasks]
        assert results[0].seed == 7
        assert len({result.seed for result in results}) == 3
        assert len({tuple(result.token_ids) for result in results}) == 3
        for result in results:
            own = SamplingParams(temperature=1.0, seed=result.seed, max_new_tokens=6)
            assert generate(model, LETTERS, PROMPT, own).token_ids == result.token_ids

    def test_parts_of_a_prompt_are_shared_before_it_is_through(self, model: Decoder, fed: Any) -> None:
        """Who has only its beginning in common need not wait for the end."""
        (passes,) = fed
        loop = Loop(model, memory_of(model, 60), max_rows=4, prefill_chunk=9)
        first, second = task_of(model, PROMPT), task_of(model, [*PROMPT[:8], 1, 2, 3])
        loop.submit(first)
        loop.submit(second)
        drain(loop)
        assert passes[:3] == [[9], [9], [3, 3]]
        assert second.known == 8
        assert outcome(second.result()) == alone(model, second)

    def test_who_waits_for_one_that_is_aborted(self, model: Decoder) -> None:
        loop = Loop(model, memory_of(model, 60), max_rows=4, prefill_chunk=9)
        first, second = task_of(model, PROMPT), task_of(model, PROMPT)
        loop.submit(first)
        loop.submit(second)
        loop.step()
        loop.abort([first])
        drain(loop)
        assert second.known == 9  # what was computed by then is not lost
        assert outcome(second.result()) == alone(model, second)
        check_nothing_is_left(loop)

    def test_one_that_waits_is_aborted(self, model: Decoder) -> None:
        loop = Loop(model, memory_of(model, 60), max_rows=4, prefill_chunk=30)
        first, second = task_of(model, PROMPT), task_of(model, PROMPT)
        loop.submit(first)
        loop.submit(second)
        loop.step()
        assert second.waits_for
        loop.abort([second])
        drain(loop)
        check_nothing_is_left(loop)

    def test_a_conversation_goes_on(self, model: Decoder) -> None:
        loop = Loop(model, memory_of(model, 60), max_rows=4, prefill_chunk=50)
        first = task_of(model, PROMPT)
        loop.submit(first)
        drain(loop)
        second = task_of(model, [*first.request.tokens, 5])
        loop.submit(second)
        drain(loop)
        assert second.known == len(first.request.tokens) - 1  # its last token was never fed
        assert outcome(second.result()) == alone(model, second)

    def test_a_page_that_others_wait_for_is_copied_in_time(self, model: Decoder) -> None:
        """Its row shares its last page from then on, and others take what is free before it goes on."""
        prompts = [[*range(50), *range(50)]] * 2 + [[*range(64)]]
        for pages in (4, 5):
            loop = Loop(model, memory_of(model, pages, page=64))
            tasks = [task_of(model, prompt, max_new_tokens=20) for prompt in prompts]
            for task in tasks:
                loop.submit(task)
            drain(loop)
            assert [outcome(task.result()) for task in tasks] == [alone(model, task) for task in tasks]

    @pytest.mark.parametrize("length", [2, 3, 66, 67])
    def test_twins_run_beside_each_other(self, model: Decoder, length: int) -> None:
        """As soon as one has computed the prompt: also where all but one of its tokens is a chunk of one."""
        loop = Loop(model, memory_of(model, 100, page=64))
        loop.scheduler.last_alone = True  # as on a GPU
        prompt = [i % 64 for i in range(length)]
        tasks = [task_of(model, prompt, max_new_tokens=20) for _ in range(4)]
        for task in tasks:
            loop.submit(task)
        drain(loop)
        assert loop.scheduler.passes < 30
        assert [outcome(task.result()) for task in tasks] == [alone(model, tasks[0])] * 4

    def test_scores_are_computed_even_where_pages_are_known(self, model: Decoder) -> None:
        loop = Loop(model, memory_of(model, 60), max_rows=4, prefill_chunk=9)
        tasks = [task_of(model, PROMPT), task_of(model, PROMPT, prompt_logprobs=2)]
        for task in tasks:
            loop.submit(task)
            drain(loop)
        assert tasks[1].known == 0
        assert outcome(tasks[1].result()) == alone(model, tasks[1])

    def test_scores_wait_for_nobody(self, model: Decoder, fed: Any) -> None:
        (passes,) = fed
        loop = Loop(model, memory_of(model, 60), max_rows=4, prefill_chunk=50)
        for _ in range(2):
            loop.submit(task_of(model, PROMPT, prompt_logprobs=0))
        loop.step()
        assert passes == [[21, 21]]


class TestPasses:
    def test_prompts_beside_rows_that_decode(self, model: Decoder, fed: Any) -> None:
        (passes,) = fed
        loop = Loop(model, memory_of(model, 60), max_rows=4, prefill_chunk=9)
        loop.submit(task_of(model, [1, 2], max_new_tokens=8))
        loop.step()
        loop.submit(task_of(model, PROMPT, max_new_tokens=2))
        drain(loop)
        assert passes == [[2], [1, 9], [1, 9], [1, 3], [1, 1], [1], [1], [1]]

    def test_a_row_beyond_its_context(self, tiny_model: Callable[..., Decoder]) -> None:
        model = tiny_model(max_position_embeddings=12)
        loop = Loop(model, memory_of(model, 60), max_rows=4, prefill_chunk=9)
        params = SamplingParams(max_new_tokens=9)
        tasks = [
            Task(Request(model.config, LETTERS, prompt, params, on_full="recompute"))
            for prompt in ([1, 2, 3], PROMPT[:7], PROMPT[:15])
        ]
        for task in tasks:
            loop.submit(task)
        drain(loop)
        for task in tasks:
            expected = generate(model, LETTERS, task.request.prompt, params, on_full="recompute")
            assert outcome(task.result()) == outcome(expected)
        check_nothing_is_left(loop)

    def test_times(self, model: Decoder) -> None:
        loop = Loop(model, memory_of(model, 60), max_rows=1, prefill_chunk=9)
        tasks = [task_of(model, PROMPT), task_of(model, PROMPT)]
        for task in tasks:
            loop.submit(task)
        drain(loop)
        first, second = (task.result().timing for task in tasks)
        assert len(first.decode_times_s) == 3
        assert first.prefill_time_s > 0
        assert second.queue_time_s > first.prefill_time_s + first.decode_time_s


class TestErrors:
    def test_too_large_for_the_memory(self, model: Decoder) -> None:
        loop = Loop(model, memory_of(model, 4), max_rows=4, prefill_chunk=9)
        with pytest.raises(NoPages, match=r"positions take .* MB, but the memory for caches has"):
            loop.check(Request(model.config, LETTERS, PROMPT, SamplingParams(max_new_tokens=4)))

    def test_pages_that_others_hold(self, model: Decoder) -> None:
        """Somebody outside holds all pages: the request fails, and the next one runs."""
        loop = Loop(model, memory_of(model, 8), max_rows=4, prefill_chunk=30)
        pages = loop.memory.pool.take(8)
        task = task_of(model, PROMPT)
        loop.submit(task)
        drain(loop)
        assert isinstance(task.error, NoPages)
        loop.memory.pool.release(pages)
        again = task_of(model, PROMPT)
        loop.submit(again)
        drain(loop)
        assert outcome(again.result()) == alone(model, again)

    def test_logits_that_are_no_numbers(self, model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
        """End their own row, and leave the others as they were."""
        loop = Loop(model, memory_of(model, 60), max_rows=4, prefill_chunk=30)
        tasks = [task_of(model, [i, 7, 9], max_new_tokens=8) for i in range(3)]
        for task in tasks:
            loop.submit(task)
        loop.step()
        run = CpuBackend.run

        def broken(backend: CpuBackend, rows: Any) -> list[torch.Tensor]:
            logits = run(backend, rows)
            logits[1] = torch.full_like(logits[1], float("nan"))
            return logits

        monkeypatch.setattr(CpuBackend, "run", broken)
        loop.step()
        monkeypatch.setattr(CpuBackend, "run", run)
        drain(loop)
        assert isinstance(tasks[1].error, NoToken)
        assert outcome(tasks[0].result()) == alone(model, tasks[0])
        assert outcome(tasks[2].result()) == alone(model, tasks[2])
        check_nothing_is_left(loop)

    def test_closed(self, model: Decoder) -> None:
        loop = Loop(model, memory_of(model, 60), max_rows=1, prefill_chunk=30)
        tasks = [task_of(model, PROMPT), task_of(model, PROMPT)]
        for task in tasks:
            loop.submit(task)
        loop.step()
        loop.close(EngineFailed("the device is gone"))
        assert [str(task.error) for task in tasks] == ["the device is gone"] * 2
        check_nothing_is_left(loop)

    def test_memory_of_another_model(self, model: Decoder) -> None:
        with pytest.raises(ValueError, match="of another model"):
            Loop(make_tiny_model(), memory_of(model, 60))


class TestWatching:
    def test_events(self, model: Decoder) -> None:
        loop = Loop(model, memory_of(model, 60), max_rows=4, prefill_chunk=12)
        events: list[Event] = []
        end = loop.watch(events.append)
        task = task_of(model, PROMPT, max_new_tokens=2)
        loop.submit(task)
        drain(loop)
        assert [event.kind for event in events] == ["submitted", "admitted", "pass", "pass", "pass", "ended"]
        assert [event.fed[task] for event in events if event.kind == "pass"] == [12, 9, 1]
        assert all(event.seconds > 0 for event in events if event.kind == "pass")
        end()
        loop.submit(task_of(model, PROMPT))
        drain(loop)
        assert len(events) == 6

    def test_a_listener_that_fails(self, model: Decoder, capsys: pytest.CaptureFixture[str]) -> None:
        loop = Loop(model, memory_of(model, 60))
        kinds: list[str] = []

        def fails(event: Event) -> None:
            raise KeyError(event.kind)

        end = loop.watch(fails)
        loop.watch(lambda event: kinds.append(event.kind))
        task = task_of(model, PROMPT)
        loop.submit(task)
        drain(loop)
        assert task.done
        assert kinds[-1] == "ended"
        assert capsys.readouterr().err == "a listener failed and is left out: KeyError('submitted')\n"
        end()

    def test_preempted(self, model: Decoder) -> None:
        loop = Loop(model, memory_of(model, 16), max_rows=5, prefill_chunk=12)
        kinds: list[str] = []
        loop.watch(lambda event: kinds.append(event.kind))
        for i in range(5):
            loop.submit(task_of(model, [i, 2, 3], max_new_tokens=40))
        drain(loop)
        assert kinds.count("preempted") == loop.stats().preemptions > 0
        assert kinds.count("admitted") == 5 + loop.stats().preemptions

    def test_stats(self, model: Decoder) -> None:
        loop = Loop(model, memory_of(model, 60), max_rows=1, prefill_chunk=30)
        for _ in range(2):
            loop.submit(task_of(model, PROMPT))
        loop.step()
        stats = loop.stats()
        assert (stats.running, stats.waiting, stats.passes, stats.generated_tokens) == (1, 1, 1, 1)
        assert (stats.prompt_tokens, stats.prefix_hits, stats.pages, stats.pages_free) == (21, 0, 60, 54)
        drain(loop)
        stats = loop.stats()
        assert (stats.running, stats.waiting, stats.finished, stats.generated_tokens) == (0, 0, 2, 8)
        assert (stats.prompt_tokens, stats.prefix_hits) == (21, 20)

    def test_a_trace_of_one_among_many(self, model: Decoder) -> None:
        params = SamplingParams(max_new_tokens=4)
        expected, got = Trace(), Trace()
        generate(model, LETTERS, PROMPT, params, trace=expected, prefill_chunk=9)
        loop = Loop(model, memory_of(model, 60), max_rows=4, prefill_chunk=9)
        loop.submit(task_of(model, [1, 2, 3], max_new_tokens=9))
        got.check(model.config, len(PROMPT), 4)
        loop.submit(Task(Request(model.config, LETTERS, PROMPT, params), recorder=got))
        drain(loop)
        assert len(got.steps) == len(expected.steps) == 4
        for one, other in zip(got.steps, expected.steps, strict=True):
            same = {"time_s": 0.0, "cache_bytes": 0, "attention": {}}
            assert replace(one, **same) == replace(other, **same)
            assert list(one.attention) == list(other.attention)
            for layer, rows in other.attention.items():
                assert all(map(np.array_equal, one.attention[layer], rows))
