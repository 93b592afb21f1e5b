"""`LLM`: text in, text out, from any thread and event loop; errors stay with their request."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import make_tiny_model
from waiting import WAIT, until

from infer import LLM, CacheMemory, SamplingParams, Trace, generate
from infer.backend.cpu.backend import CpuBackend
from infer.cache.pool import OutOfPages
from infer.engine.allocator import PagedAllocator
from infer.engine.result import GenerationResult
from infer.engine.sequence import ContextExceeded, NoToken, Sequence
from infer.models.common import Decoder


class Letters:
    """One token per character, 64 of them."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - 32 for letter in text]

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        return self.encode(
            "".join(f"{message['role'][0].upper()}:{message['content']}_" for message in messages) + "A:"
        )

    def decode(self, token_ids: list[int]) -> str:
        return "".join(chr(32 + i) for i in token_ids)


@pytest.fixture
def model(tiny_model: Callable[..., Decoder]) -> Decoder:
    return tiny_model()


@pytest.fixture
def llm(model: Decoder) -> Iterator[LLM]:
    with LLM(model, Letters(), cache_memory=10**6) as llm:
        yield llm
    assert not llm._thread._thread or not llm._thread._thread.is_alive()


FEW = SamplingParams(max_new_tokens=6)
DRAWN = SamplingParams(max_new_tokens=8, temperature=1.0, seed=5)


def alone(llm: LLM, prompt: str | list[int], params: SamplingParams) -> GenerationResult:
    ids = llm.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    return generate(llm.model, llm.tokenizer, ids, params)


def same(one: GenerationResult, other: GenerationResult) -> bool:
    return (one.prompt_token_ids, one.token_ids, one.text, one.finish_reason, one.logprobs, one.prompt_logprobs) == (
        other.prompt_token_ids,
        other.token_ids,
        other.text,
        other.finish_reason,
        other.logprobs,
        other.prompt_logprobs,
    )


@contextmanager
def paused(llm: LLM) -> Iterator[None]:
    """Hold the engine between two steps."""
    begun, release = threading.Event(), threading.Event()

    def hold(engine: Any) -> None:
        begun.set()
        release.wait(WAIT)

    held = llm.between_steps(hold)
    begun.wait(WAIT)
    try:
        yield
    finally:
        release.set()
        held.result(WAIT)


@contextmanager
def held_after_a_token(llm: LLM) -> Iterator[None]:
    """Hold the engine, once there is a token."""
    release = threading.Event()
    end = llm.watch(lambda event: llm.stats().generated_tokens and release.wait(WAIT))
    try:
        yield
    finally:
        end()
        release.set()


def settled(llm: LLM) -> None:
    """Wait until nothing runs or waits."""
    end = time.monotonic() + WAIT
    while not llm.between_steps(lambda engine: engine.is_idle).result():
        assert time.monotonic() < end
        time.sleep(0.005)


class TestGenerate:
    def test_a_text(self, llm: LLM) -> None:
        assert same(llm.generate("HELLO", FEW), alone(llm, "HELLO", FEW))

    @pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor])
    def test_token_ids(self, llm: LLM, kind: Callable[[list[int]], Any]) -> None:
        assert same(llm.generate(kind([1, 2, 3]), FEW), alone(llm, [1, 2, 3], FEW))
        assert same(llm.generate([kind([1, 2, 3])], FEW)[0], alone(llm, [1, 2, 3], FEW))

    def test_several(self, llm: LLM) -> None:
        params = [FEW, DRAWN, SamplingParams(max_new_tokens=3, logprobs=2)]
        results = llm.generate(["ONE", "TWO", "THREE"], params)
        for result, prompt, own in zip(results, ["ONE", "TWO", "THREE"], params, strict=True):
            assert same(result, alone(llm, prompt, own))
        assert llm.generate([]) == []

    def test_settings_by_name(self, llm: LLM) -> None:
        assert same(llm.generate("HELLO", temperature=1.0, seed=5, max_new_tokens=8), alone(llm, "HELLO", DRAWN))

    def test_chat(self, llm: LLM) -> None:
        messages = [{"role": "system", "content": "BE BRIEF"}, {"role": "user", "content": "HI"}]
        expected = alone(llm, Letters().encode_chat(messages), FEW)
        assert same(llm.chat(messages, FEW), expected)
        assert same(llm.generate(messages, FEW), expected)
        assert same(llm.generate([messages], FEW)[0], expected)
        answer = alone(llm, Letters().encode_chat(messages[1:]), FEW)
        assert same(llm.chat("HI", FEW), answer)
        handle = llm.chat("HI", FEW, stream=True)
        assert "".join(token.text for token in handle) == answer.text
        assert same(handle.result(), answer)

    def test_samples(self, llm: LLM) -> None:
        results = llm.generate("HELLO", n=3, temperature=1.0, seed=5, max_new_tokens=8)
        assert isinstance(results, list)
        assert same(results[0], alone(llm, "HELLO", DRAWN))
        assert len({tuple(result.token_ids) for result in results}) == 3
        pieces = list(llm.stream("HELLO", n=3, temperature=1.0, seed=5, max_new_tokens=8))
        for index, result in enumerate(results):
            assert [piece.token_id for piece in pieces if piece.index == index] == result.token_ids

    def test_score(self, llm: LLM) -> None:
        """The very numbers that generation sees."""
        result = llm.generate("HELLO", max_new_tokens=6, logprobs=3)
        score = llm.score([*result.prompt_token_ids, *result.token_ids], top=3)
        assert score.logprobs[0] is None
        assert score.logprobs[5:] == result.logprobs
        assert score.total == pytest.approx(sum(each.logprob for each in score.logprobs if each))
        assert llm.score("H").logprobs == [None]

    def test_log_probabilities_are_those_of_torch(self, llm: LLM) -> None:
        result = llm.generate("HELLO", max_new_tokens=3, logprobs=64, prompt_logprobs=64)
        with torch.no_grad():
            logits = llm.model(torch.tensor([result.prompt_token_ids + result.token_ids]), all_logits=True)[0]
        expected = logits.double().log_softmax(-1)
        found = [*(result.prompt_logprobs or [])[1:], *(result.logprobs or [])]
        tokens = [*result.prompt_token_ids[1:], *result.token_ids]
        for i, (each, token) in enumerate(zip(found, tokens, strict=True)):
            assert each is not None
            assert each.token_id == token
            assert each.logprob == pytest.approx(expected[i, token].item(), abs=1e-5)
            best = expected[i].sort(descending=True).values.tolist()
            assert [value for _, value in each.top] == pytest.approx(best, abs=1e-5)

    def test_a_loaded_name(self, tmp_path: Path) -> None:
        with pytest.raises((FileNotFoundError, ValueError)):
            LLM(tmp_path / "nothing")


class TestStream:
    def test_pieces(self, llm: LLM) -> None:
        params = SamplingParams(max_new_tokens=8, temperature=1.0, seed=5, logprobs=1)
        pieces = list(llm.stream("HELLO", params))
        expected = alone(llm, "HELLO", params)
        assert [piece.token_id for piece in pieces] == expected.token_ids
        assert "".join(map(str, pieces)) == expected.text
        assert [piece.logprobs for piece in pieces] == expected.logprobs
        assert [piece.finish_reason for piece in pieces] == [None] * 7 + ["length"]
        assert all(piece.time_s > 0 for piece in pieces)

    def test_done_when_all_is_there(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        """Whoever looks between two lines of the engine's thread sees nothing half done."""
        append_token = Sequence.append_token

        def slowly(sequence: Sequence, token: int) -> None:
            append_token(sequence, token)
            time.sleep(0.02)

        monkeypatch.setattr(Sequence, "append_token", slowly)
        handle = llm.submit("HELLO", FEW)
        while not handle.done:
            pass
        assert len(handle.result().timing.decode_times_s) == 5
        assert [piece.finish_reason for piece in handle] == [None] * 5 + ["length"]

    def test_stop_strings(self, llm: LLM) -> None:
        text = alone(llm, "HELLO", SamplingParams(max_new_tokens=20)).text
        params = SamplingParams(max_new_tokens=20, stop=text[4:7])
        expected = alone(llm, "HELLO", params)
        pieces = list(llm.stream("HELLO", params))
        assert "".join(map(str, pieces)) == expected.text == llm.generate("HELLO", params).text
        assert pieces[-1].finish_reason == expected.finish_reason == "stop"

    def test_end_of_sequence(self, tiny_model: Callable[..., Decoder]) -> None:
        free = generate(tiny_model(), Letters(), Letters().encode("HELLO"), FEW)
        with LLM(tiny_model(eos_token_ids=(free.token_ids[3],)), Letters(), cache_memory=10**6) as llm:
            pieces = list(llm.stream("HELLO", FEW))
            assert [piece.finish_reason for piece in pieces][-1] == "eos"
            assert "".join(map(str, pieces)) == llm.generate("HELLO", FEW).text == alone(llm, "HELLO", FEW).text

    def test_who_stops_early_leaves_nothing_behind(self, llm: LLM) -> None:
        for _ in llm.stream("HELLO", max_new_tokens=200):
            break
        settled(llm)
        assert len(llm.memory.index.pages_in_use()) == 0

    def test_a_handle_that_is_forgotten(self, llm: LLM) -> None:
        with held_after_a_token(llm):
            handle = llm.submit("HELLO", max_new_tokens=200)
            until(lambda: llm.stats().generated_tokens > 0)
            del handle
            gc.collect()
        settled(llm)
        assert llm.stats().generated_tokens < 200

    def test_abort(self, llm: LLM) -> None:
        with held_after_a_token(llm):
            handle = llm.submit("HELLO", max_new_tokens=200)
            until(lambda: llm.stats().generated_tokens > 0)
            handle.abort()
        result = handle.result(WAIT)
        assert result.finish_reason == "interrupted"
        expected = alone(llm, "HELLO", SamplingParams(max_new_tokens=200))
        assert expected.token_ids[: len(result.token_ids)] == result.token_ids
        handle.abort()

    def test_aborted_before_it_began(self, llm: LLM) -> None:
        with paused(llm):
            handles = [llm.submit("HELLO", max_new_tokens=100) for _ in range(5)]
            for handle in handles:
                handle.abort()
        assert {handle.result(WAIT).finish_reason for handle in handles} == {"interrupted"}

    def test_patience(self, llm: LLM) -> None:
        with paused(llm):
            handle = llm.submit("HELLO", max_new_tokens=200)
            with pytest.raises(TimeoutError):
                handle.result(timeout=0.0)
        assert handle.result(WAIT).finish_reason == "length"


class TestEventLoops:
    def test_pieces_and_results(self, llm: LLM) -> None:
        async def both() -> tuple[list[int], GenerationResult]:
            handle = llm.submit("HELLO", DRAWN)
            tokens = [piece.token_id async for piece in llm.stream("HELLO", DRAWN)]
            return tokens, await handle

        tokens, result = asyncio.run(both())
        assert tokens == result.token_ids
        assert same(result, alone(llm, "HELLO", DRAWN))

    def test_cancelled(self, llm: LLM) -> None:
        async def cancelled() -> None:
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(llm.submit("HELLO", max_new_tokens=200), 0.001)

        with held_after_a_token(llm):
            asyncio.run(cancelled())
        settled(llm)
        assert len(llm.memory.index.pages_in_use()) == 0

    def test_left_early(self, llm: LLM) -> None:
        async def left() -> None:
            async for _ in llm.stream("HELLO", max_new_tokens=200):
                break

        asyncio.run(left())
        settled(llm)

    def test_errors(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        nan(monkeypatch)

        async def failing() -> None:
            with pytest.raises(NoToken):
                await llm.submit("HELLO", FEW)

        asyncio.run(failing())


def nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on, logits are no numbers."""
    run = CpuBackend.run
    monkeypatch.setattr(
        CpuBackend, "run", lambda backend, rows: [torch.full_like(x, float("nan")) for x in run(backend, rows)]
    )


class TestManyThreads:
    def test_threads_and_an_event_loop(self, model: Decoder) -> None:
        """Each gets what its requests give alone, in a pool that does not hold them all."""
        memory = CacheMemory(model, 10**6, page_size=4)
        memory = CacheMemory(model, 40 * memory.pool.page_bytes, page_size=4)
        wrong: list[Any] = []
        with LLM(model, Letters(), memory=memory, max_rows=6, prefill_chunk=20) as llm:
            cases = []
            chance = random.Random(0)
            for seed in range(40):
                prompt = "THE SAME BEGINNING"[: chance.randrange(18)] + chr(chance.randrange(33, 90))
                params = SamplingParams(max_new_tokens=chance.randint(1, 20), temperature=1.0, seed=seed)
                cases.append((prompt, params, alone(llm, prompt, params)))

            def ask(own: list[Any]) -> None:
                for i, (prompt, params, expected) in enumerate(own):
                    if i % 3 == 0:
                        for _ in llm.stream(prompt, params):
                            break
                    elif i % 3 == 1 and [p.token_id for p in llm.stream(prompt, params)] != expected.token_ids:
                        wrong.append((prompt, params))
                    if not same(llm.generate(prompt, params), expected):
                        wrong.append((prompt, params))

            async def ask_all() -> None:
                results = await asyncio.gather(*(llm.submit(prompt, params) for prompt, params, _ in cases))
                wrong.extend(case for case, result in zip(cases, results, strict=True) if not same(result, case[2]))

            threads = [threading.Thread(target=ask, args=(cases[i::8],)) for i in range(8)]
            threads.append(threading.Thread(target=lambda: asyncio.run(ask_all())))
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(600)
            assert not any(thread.is_alive() for thread in threads)
            assert not wrong
            settled(llm)
            assert len(memory.index.pages_in_use()) == 0
        memory.index.clear()
        assert memory.pool.num_free_pages == memory.pool.num_pages


class TestErrors:
    def test_a_bad_request_is_refused_alone(self, llm: LLM) -> None:
        handle = llm.submit("HELLO", max_new_tokens=50)
        for prompt, settings, kind, message in [
            ("", {}, ValueError, "the prompt is empty"),
            ([99], {}, ValueError, "outside the vocabulary"),
            ("HELLO", {"max_new_tokens": 1000}, ContextExceeded, "exceed the model's context"),
            ("HELLO", {"temperature": -1}, ValueError, "temperature must be"),
            (3.5, {}, TypeError, "must be a string, token ids or a list of messages"),
            ([1.5], {}, TypeError, "flat sequence of token ids"),
            ("HELLO", {"priority": "high", "max_new_tokens": 6}, TypeError, "priority must be an integer, not 'high'"),
            ("HELLO", {"priority": None, "max_new_tokens": 6}, TypeError, "priority must be an integer, not None"),
            ("HELLO", {"n": 10**12}, ValueError, "n must be an integer from 1 to 16384"),
        ]:
            with pytest.raises(kind, match=message):
                llm.submit(prompt, **settings)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="both given"):
            llm.generate("HELLO", FEW, temperature=1.0)
        with pytest.raises(TypeError, match=r"params must be SamplingParams\(.*\), not {'temperature': 1.0}"):
            llm.generate("HELLO", {"temperature": 1.0})  # type: ignore[call-overload]
        with pytest.raises(ValueError, match="2 SamplingParams for 1 prompts"):
            llm.generate(["HELLO"], [FEW, FEW])
        with pytest.raises(ValueError, match=r"^prompt 1: token id 70"):
            llm.generate([[1], [70]], FEW)
        assert same(handle.result(WAIT), alone(llm, "HELLO", SamplingParams(max_new_tokens=50)))

    def test_memory(self, model: Decoder) -> None:
        llm = LLM(model, Letters(), cache_memory=20_000)
        with pytest.raises(OutOfPages, match="give caches more memory"):
            llm.generate("HELLO", max_new_tokens=200)

    def test_no_token(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        with monkeypatch.context() as patch:
            nan(patch)
            for fails in (lambda: llm.generate("HELLO", FEW), lambda: list(llm.stream("HELLO", FEW))):
                with pytest.raises(NoToken, match="no token can be chosen for position 5"):
                    fails()
        assert same(llm.generate("HELLO", FEW), alone(llm, "HELLO", FEW))

    def test_a_device_that_fails(self, model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
        """All hear of it, nothing hangs, and another can be made."""
        llm = LLM(model, Letters(), cache_memory=10**6)
        handles = [llm.submit("HELLO", max_new_tokens=200) for _ in range(3)]

        def fails(backend: CpuBackend, rows: Any) -> None:
            raise RuntimeError("the device is on fire")

        with monkeypatch.context() as patch:
            patch.setattr(CpuBackend, "run", fails)
            for handle in handles:
                with pytest.raises(RuntimeError, match="the engine has failed: the device is on fire"):
                    handle.result(WAIT)
        with pytest.raises(RuntimeError, match="this LLM has failed, create another: the device is on fire"):
            llm.generate("HELLO", FEW)
        llm.close()
        with LLM(model, Letters(), memory=llm.memory) as again:
            assert same(again.generate("HELLO", FEW), alone(again, "HELLO", FEW))

    def test_closed(self, model: Decoder) -> None:
        llm = LLM(model, Letters(), cache_memory=10**6)
        with paused(llm):
            handle = llm.submit("HELLO", max_new_tokens=200)
            closing = threading.Thread(target=llm.close)
            closing.start()
            until(lambda: llm._thread._closed)
        closing.join()
        llm.close()
        with pytest.raises(RuntimeError, match="closed"):
            handle.result(WAIT)
        with pytest.raises(RuntimeError, match="this LLM is closed"):
            llm.generate("HELLO", FEW)
        LLM(model, Letters(), cache_memory=10**6).close()

    def test_arguments(self, model: Decoder) -> None:
        for arguments, options, message in [
            ((model,), {}, "needs its tokenizer"),
            (((model, model.config), Letters()), {}, "model, config = load_model"),
        ]:
            with pytest.raises(TypeError, match=message):
                LLM(*arguments, **options)
        memory = CacheMemory(model, 10**6)
        with pytest.raises(ValueError, match="leave cache_memory"):
            LLM(model, Letters(), memory=memory, cache_memory=10**6)
        with pytest.raises(ValueError, match="belongs to another model"):
            LLM(make_tiny_model(), Letters(), memory=memory)


class TestWatching:
    def test_stats_and_events(self, llm: LLM) -> None:
        kinds: list[str] = []
        end = llm.watch(lambda event: kinds.append(event.kind))
        llm.generate("HELLO", FEW)
        settled(llm)
        assert kinds == ["submitted", "admitted", *["step"] * 6, "finished"]
        end()
        stats = llm.stats()
        assert (stats.finished, stats.generated_tokens, stats.prompt_tokens) == (1, 6, 5)

    def test_a_trace(self, llm: LLM) -> None:
        trace, expected = Trace(), Trace()
        others = [llm.submit("ANOTHER", max_new_tokens=30) for _ in range(2)]
        llm.generate("HELLO", FEW, trace=trace)
        generate(llm.model, llm.tokenizer, llm.encode("HELLO"), FEW, trace=expected)
        assert [step.alternatives for step in trace.steps] == [step.alternatives for step in expected.steps]
        with pytest.raises(TypeError, match="trace must be a Trace"):
            llm.submit("HELLO", FEW, trace=True)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="a trace records one text"):
            llm.submit("HELLO", trace=Trace(), n=2, max_new_tokens=3)
        for other in others:
            other.abort()


class Failing(Trace):
    """A trace that fails at one of its calls."""

    def __init__(self, where: str, error: BaseException) -> None:
        super().__init__()
        self.where, self.error = where, error

    def start(self, *arguments: Any) -> None:
        if self.where == "start":
            raise self.error
        super().start(*arguments)

    def record(self, *arguments: Any) -> None:
        if self.where == "record" and self.steps:
            raise self.error
        super().record(*arguments)


class TestCallbacks:
    """What a caller brings runs in the engine's thread, and fails that caller alone."""

    @pytest.mark.parametrize("error", [KeyError("mine"), SystemExit(3), KeyboardInterrupt()], ids=repr)
    def test_a_listener(self, llm: LLM, error: BaseException) -> None:
        def fails(event: Any) -> None:
            end()
            raise error

        end = llm.watch(fails)
        assert same(llm.generate("HELLO", FEW), alone(llm, "HELLO", FEW))
        with pytest.raises(TypeError, match="listener must be a function"):
            llm.watch("listener")  # type: ignore[arg-type]

    @pytest.mark.parametrize("error", [KeyError("mine"), SystemExit(3), KeyboardInterrupt()], ids=repr)
    def test_one_of_a_future(self, llm: LLM, error: BaseException) -> None:
        def fails(_: Any) -> None:
            raise error

        with paused(llm):
            future = llm.between_steps(lambda engine: 1)
            future.add_done_callback(fails)
        assert future.result(WAIT) == 1
        assert same(llm.generate("HELLO", FEW), alone(llm, "HELLO", FEW))

    @pytest.mark.parametrize("where", ["start", "record"])
    @pytest.mark.parametrize("error", [KeyError("mine"), SystemExit(3), KeyboardInterrupt()], ids=repr)
    def test_a_trace(self, llm: LLM, where: str, error: BaseException) -> None:
        with paused(llm):
            other = llm.submit("ANOTHER", FEW)
            handle = llm.submit("HELLO", FEW, trace=Failing(where, error))
        with pytest.raises(KeyError if isinstance(error, KeyError) else RuntimeError, match=r"mine|callback"):
            handle.result(WAIT)
        assert same(other.result(WAIT), alone(llm, "ANOTHER", FEW))
        settled(llm)
        assert llm.failure is None
        with pytest.raises(type(error)):
            generate(llm.model, llm.tokenizer, llm.encode("HELLO"), FEW, trace=Failing(where, error))

    @pytest.mark.parametrize("error", [KeyError("mine"), SystemExit(3)], ids=repr)
    def test_a_tokenizer(self, llm: LLM, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
        """With stop strings, the engine's thread decodes."""
        decode = Letters.decode

        def fails(self: Letters, token_ids: list[int]) -> str:
            if threading.current_thread().name == "infer":
                raise error
            return decode(self, token_ids)

        with monkeypatch.context() as patch:
            patch.setattr(Letters, "decode", fails)
            other = llm.submit("ANOTHER", FEW)
            with pytest.raises(KeyError if isinstance(error, KeyError) else RuntimeError, match=r"mine|callback"):
                list(llm.stream("HELLO", max_new_tokens=6, stop="~"))
            assert same(other.result(WAIT), alone(llm, "ANOTHER", FEW))
        assert same(llm.generate("HELLO", FEW), alone(llm, "HELLO", FEW))

    def test_waiting_in_the_engine_s_thread(self, llm: LLM) -> None:
        """It would wait for itself."""
        submitted: list[Any] = []

        async def awaits() -> None:
            await llm.submit("HELLO", FEW)

        def waits(event: Any) -> None:
            end()
            submitted.append(llm.submit("ANOTHER", FEW))  # without waiting: welcome
            for wait in (
                lambda: llm.generate("HELLO", FEW),
                lambda: list(llm.stream("HELLO", FEW)),
                lambda: llm.between_steps(lambda engine: None),
                lambda: asyncio.run(awaits()),
                lambda: llm.session().send("HELLO", FEW),
            ):
                with pytest.raises(RuntimeError, match="the engine's thread cannot wait for the engine"):
                    wait()
            submitted.append("seen")

        end = llm.watch(waits)
        assert same(llm.generate("HELLO", FEW), alone(llm, "HELLO", FEW))
        assert submitted[1:] == ["seen"]
        assert same(submitted[0].result(WAIT), alone(llm, "ANOTHER", FEW))


class TestEndedEngines:
    """Whatever was submitted is answered, or raises."""

    def test_memory_that_cannot_be_freed(self, model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
        llm = LLM(model, Letters(), cache_memory=10**6)

        def fails(*_: Any) -> None:
            raise RuntimeError("the device is on fire")

        with monkeypatch.context() as patch:
            patch.setattr(CpuBackend, "run", fails)
            patch.setattr(PagedAllocator, "free", fails)
            with paused(llm):
                handles = [llm.submit("HELLO", FEW) for _ in range(3)]
            for handle in handles:
                with pytest.raises(RuntimeError, match="the engine has failed: the device is on fire"):
                    handle.result(WAIT)
        llm.close()

    def test_between_the_steps_of_a_failed_engine(self, model: Decoder) -> None:
        llm = LLM(model, Letters(), cache_memory=10**6)
        called: list[Any] = []
        with paused(llm):
            llm._thread.fail(RuntimeError("on fire"))
            future, handle = llm.between_steps(called.append), llm.submit_all(["HELLO", "ANOTHER"], FEW)
        with pytest.raises(RuntimeError, match="this LLM has failed, create another: on fire"):
            future.result(WAIT)
        with pytest.raises(RuntimeError, match="the engine has failed: on fire"):
            handle.result(WAIT)
        assert not called
        llm.close()

    def test_a_thread_that_cannot_start(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        def fails(thread: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", fails)
            with pytest.raises(RuntimeError, match="can't start"):
                llm.submit("HELLO", FEW)
        assert same(llm.generate("HELLO", FEW), alone(llm, "HELLO", FEW))

    @pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
    def test_a_forked_process(self, llm: LLM) -> None:
        """It has no engine, and its locks may be held by threads that it does not have."""
        held, release = threading.Event(), threading.Event()
        with paused(llm):
            handle = llm.submit("HELLO", FEW)

            def hold() -> None:
                with llm._thread._changed, handle._notifier._lock:
                    held.set()
                    release.wait()

            holder = threading.Thread(target=hold)
            holder.start()
            held.wait()
            if not (child := os.fork()):
                status = 1
                try:
                    for wait in (
                        lambda: llm.generate("HELLO", FEW),
                        lambda: llm.between_steps(lambda engine: None),
                        handle.result,
                        lambda: next(iter(handle)),
                    ):
                        with pytest.raises(RuntimeError, match="forked from: create another LLM here"):
                            wait()
                    del handle
                    llm.close()
                    status = 0
                finally:
                    os._exit(status)
            release.set()
            holder.join()
        until(lambda: os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None, 60)
        assert os.waitpid(child, 0)[1] == 0
        assert same(handle.result(WAIT), alone(llm, "HELLO", FEW))


ENDING = """
import sys
from test_llm import LLM, Letters, make_tiny_model
llm = LLM(make_tiny_model(), Letters(), cache_memory=10**6)
handle = llm.submit("HELLO", max_new_tokens=200)
next(iter(handle))
other = llm.submit("HELLO", max_new_tokens=200)
print("done")
"""


def test_a_process_that_ends_meanwhile() -> None:
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = [{str(here)!r}, {str(here.parents[1])!r}]\n{ENDING}"],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


def test_prefixes_are_shared_within_a_salt(llm: LLM) -> None:
    prompt = [1 + i % 7 for i in range(70)]
    with paused(llm):  # at once, and then again: a sequence does not wait for the pages of another salt either
        handles = [llm.submit(prompt, FEW, cache_salt=salt) for salt in (None, "a", "b", "a")]
    results = [handle.result(WAIT) for handle in handles]
    assert [result.num_cached_tokens for result in results] == [0, 0, 0, 69]
    assert all(same(result, alone(llm, prompt, FEW)) for result in results)
    again = [llm.generate(prompt, FEW, cache_salt=salt).num_cached_tokens for salt in ("a", "b", "", "\ud800")]
    assert again == [69, 69, 69, 0]
    with pytest.raises(TypeError, match="cache_salt must be a string"):
        llm.submit(prompt, FEW, cache_salt=1)  # type: ignore[arg-type]
