"""Rows in flight: admitted and retired one by one while others go on. Each text is the one it has alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from amount import amount
from mocks import CACHES, MockModel, MockTokenizer
from tiny import FAMILIES

from infer import GrowingCache, KVCache, SamplingParams, generate, generate_batch, stream
from infer.backend import backend_for
from infer.backend.cpu.backend import CpuBackend
from infer.cache import Cache, NoCache, TracedCache
from infer.engine.caches import make_cache
from infer.engine.request import NoToken, Request
from infer.engine.result import GeneratedToken
from infer.engine.runner import Flight, Runner
from infer.models.common import Decoder
from infer.models.rows import Row

CPU = torch.device("cpu")
LETTERS = MockTokenizer([chr(33 + i) for i in range(64)])
PROMPTS = [[(7 * length + 11 * i * i) % 64 for i in range(length)] for length in (4, 13, 1, 6, 5)]
PARAMS = [
    SamplingParams(max_new_tokens=9),
    SamplingParams(max_new_tokens=14, temperature=1.0, seed=3),
    SamplingParams(max_new_tokens=1),
    SamplingParams(max_new_tokens=7, temperature=1.5, top_k=20, seed=2),
    SamplingParams(max_new_tokens=12, repetition_penalty=2.0, frequency_penalty=1.0),
]


class Outcome(NamedTuple):
    token_ids: list[int]
    text: str
    finish_reason: str | None


def outcome(tokens: Sequence[GeneratedToken]) -> Outcome:
    return Outcome(
        [token.token_id for token in tokens],
        "".join(token.text for token in tokens),
        tokens[-1].finish_reason if tokens else None,
    )


def alone(model: Any, i: int, **options: Any) -> Outcome:
    return outcome(list(stream(model, LETTERS, PROMPTS[i], PARAMS[i], **options)))


class Rows:
    """A runner with rows by number, and what each has given so far."""

    def __init__(self, model: Any, **options: Any) -> None:
        self.model, self.runner, self.options = model, Runner(model), options
        self.flights: dict[int, Flight] = {}
        self.tokens: dict[int, list[GeneratedToken]] = {}

    def admit(self, i: int, cache: Cache | None = None, on_full: str = "error", **options: Any) -> Flight:
        request = Request(self.model.config, LETTERS, PROMPTS[i], PARAMS[i], on_full=on_full)
        if cache is None:
            cache = make_cache(self.model, request.max_seq_len, CPU, prefill_chunk=options.get("prefill_chunk"))
        self.flights[i] = self.runner.admit(request, cache, **self.options | options)
        self.tokens[i] = []
        return self.flights[i]

    def step(self, counts: dict[int, int] | None = None) -> list[int]:
        """Which rows gave a token; they take it, and those that it was the last of are retired.

        counts: tokens that each row feeds.
        """
        names = {id(flight): i for i, flight in self.flights.items()}
        given = []
        by_flight = None if counts is None else {self.flights[i]: count for i, count in counts.items()}
        for flight, token, _, started in self.runner.step(by_flight):
            i = names[id(flight)]
            given.append(i)
            self.tokens[i].append(flight.request.push(token, started))
            if flight.request.finish_reason is not None:
                self.runner.retire(flight)
        return given

    def finish(self) -> None:
        while self.runner.flights:
            self.step()

    def outcome(self, i: int) -> Outcome:
        return outcome(self.tokens[i])


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest, tiny_model: Callable[..., Decoder]) -> Decoder:
    return tiny_model(model_type=request.param)


@pytest.fixture
def llama(tiny_model: Callable[..., Decoder]) -> Decoder:
    return tiny_model()


@pytest.fixture
def gemma(tiny_model: Callable[..., Decoder]) -> Decoder:
    return tiny_model(model_type="gemma3")


class TestAdmission:
    def test_one_by_one_while_others_go_on(self, model: Decoder) -> None:
        rows = Rows(model)
        given = []
        for i in range(5):
            rows.admit(i)
            given += [rows.step(), rows.step()]
        rows.finish()
        assert given[0] == given[1] == [0]
        assert given[2] == [0, 1]
        assert [rows.outcome(i) for i in range(5)] == [alone(model, i) for i in range(5)]
        assert len({tuple(rows.outcome(i).token_ids) for i in range(5)}) == 5

    def test_a_prompt_beside_single_tokens_is_one_pass(self, llama: Decoder, fed: list[list[int]]) -> None:
        rows = Rows(llama)
        rows.admit(0)
        rows.step()
        rows.admit(1)
        rows.admit(2)
        rows.step()
        rows.step()
        assert fed == [[4], [1, 13, 1], [1, 1]]  # the third wanted a single token

    def test_when_all_others_have_ended(self, llama: Decoder) -> None:
        rows = Rows(llama)
        rows.admit(0)
        rows.finish()
        assert rows.step() == []
        rows.admit(1)
        rows.finish()
        assert [rows.outcome(i) for i in range(2)] == [alone(llama, i) for i in range(2)]

    @pytest.mark.parametrize("cls", [*CACHES, NoCache])
    def test_beside_any_other_cache(self, gemma: Decoder, cls: Any) -> None:
        """One that kernels may not write to, and one that keeps nothing."""
        rows = Rows(gemma)
        rows.admit(0)
        rows.step()
        rows.admit(
            1, cls() if cls is NoCache else cls.from_model_config(gemma.config, 40, dtype="float32", device="cpu")
        )
        rows.finish()
        assert [rows.outcome(i) for i in range(2)] == [alone(gemma, i) for i in range(2)]

    def test_one_that_is_watched(self, gemma: Decoder) -> None:
        """Its rows are kept; the others do not notice."""
        rows = Rows(gemma)
        rows.admit(0)
        flight = rows.admit(3, watch=lambda cache: TracedCache(cache, [1]))
        rows.step()
        assert flight.cache.rows[1].shape == (1, 4, 6)
        rows.finish()
        assert [rows.outcome(i) for i in (0, 3)] == [alone(gemma, i) for i in (0, 3)]

    def test_one_whose_cache_holds_a_beginning(self, llama: Decoder, fed: list[list[int]]) -> None:
        cache = make_cache(llama, 40, CPU)
        with torch.inference_mode():
            backend_for(llama).run([Row(cache, PROMPTS[1][:8])])
        rows = Rows(llama)
        rows.admit(0)
        rows.admit(1, cache)
        rows.step()
        assert fed[-1] == [4, 5]
        rows.finish()
        assert [rows.outcome(i) for i in range(2)] == [alone(llama, i) for i in range(2)]

    def test_a_model_of_somebody_elses(self) -> None:
        """It is called row by row."""
        model = MockModel(3, 4, 5, vocab_size=64)
        rows = Rows(model)
        rows.admit(0)
        rows.admit(3)
        assert rows.step() == [0, 3]
        assert model.fed == [PROMPTS[0], PROMPTS[3]]


class TestEnds:
    def test_rows_stay_until_they_are_retired(self, llama: Decoder) -> None:
        """A token is its request's to take, and who takes it sees whether it was the last."""
        rows = Rows(llama)
        flights = [rows.admit(i) for i in range(5)]
        outputs = rows.runner.step()
        assert [flight for flight, *_ in outputs] == [*rows.runner.flights] == flights
        for i, (flight, token, _, started) in enumerate(outputs):
            rows.tokens[i].append(flight.request.push(token, started))
        assert [*rows.runner.flights] == flights
        assert [flight.request.finish_reason for flight in flights] == [None, None, "length", None, None]
        rows.runner.retire(flights[2])
        assert [*rows.runner.flights] == [flights[i] for i in (0, 1, 3, 4)]
        assert rows.step() == [0, 1, 3, 4]
        rows.finish()
        assert not rows.runner.flights
        assert [len(rows.tokens[i]) for i in range(5)] == [9, 14, 1, 7, 12]
        assert [rows.outcome(i) for i in range(5)] == [alone(llama, i) for i in range(5)]

    def test_retired_early(self, model: Decoder) -> None:
        """It gives no more, what its cache holds can be gone on from, and the others do not notice."""
        rows = Rows(model)
        cache = make_cache(model, 40, CPU)
        rows.admit(0)
        flight = rows.admit(1, cache)
        rows.admit(4)
        for _ in range(4):
            rows.step()
        rows.runner.retire(flight)
        rows.finish()
        assert [rows.outcome(i) for i in (0, 4)] == [alone(model, i) for i in (0, 4)]
        begun, whole = rows.outcome(1).token_ids, alone(model, 1).token_ids
        assert begun == whole[:4]
        assert cache.seq_len == 13 + 3  # all but the last generated
        params = SamplingParams(max_new_tokens=10, temperature=1.0, seed=3)
        rest = generate(model, LETTERS, PROMPTS[1] + begun, params, cache=cache)
        assert begun + rest.token_ids == whole

    def test_retired_before_its_prompt_is_through(self, llama: Decoder, fed: list[list[int]]) -> None:
        rows = Rows(llama, prefill_chunk=5)
        rows.admit(0)
        flight = rows.admit(1)
        rows.step()
        rows.runner.retire(flight)
        rows.finish()
        assert fed[:3] == [[4, 5], [1], [1]]
        assert (rows.outcome(0), rows.tokens[1]) == (alone(llama, 0), [])

    def test_leaving_retires_all(self, llama: Decoder) -> None:
        with Runner(llama) as runner:
            for i in range(2):
                request = Request(llama.config, LETTERS, PROMPTS[i], PARAMS[i])
                runner.admit(request, make_cache(llama, request.max_seq_len, CPU))
            runner.step()
        assert not runner.flights

    def test_nobody(self, llama: Decoder) -> None:
        assert Runner(llama).step() == []


class TestChunks:
    def test_beside_rows_that_decode(self, model: Decoder, fed: list[list[int]]) -> None:
        rows = Rows(model)
        rows.admit(0)
        rows.step()
        rows.admit(1, prefill_chunk=5)
        given = [rows.step() for _ in range(4)]
        assert fed == [[4], [1, 5], [1, 5], [1, 3], [1, 1]]
        assert given == [[0], [0], [0, 1], [0, 1]]
        rows.finish()
        assert [rows.outcome(i) for i in range(2)] == [alone(model, i) for i in range(2)]

    def test_each_row_has_its_own(self, gemma: Decoder, fed: list[list[int]]) -> None:
        rows = Rows(gemma)
        for i, chunk in ((1, 4), (3, 1), (4, None)):
            rows.admit(i, prefill_chunk=chunk)
        rows.finish()
        assert fed[:4] == [[4, 1, 5], [4, 1, 1], [4, 1, 1], [1, 1, 1]]
        for i in (1, 3, 4):
            assert rows.outcome(i) == alone(gemma, i)

    def test_as_many_tokens_as_the_caller_says(self, model: Decoder, fed: list[list[int]]) -> None:
        """Of each row, whatever its own chunks are; who is not named does not take part."""
        rows = Rows(model, prefill_chunk=2)
        for i in (1, 3, 4):
            rows.admit(i)
        given = [rows.step(counts) for counts in ({1: 6, 4: 3}, {3: 6, 1: 7}, {1: 1, 3: 1, 4: 2}, {1: 1, 3: 1, 4: 1})]
        assert fed == [[6, 3], [6, 7], [1, 1, 2], [1, 1, 1]]
        assert given == [[], [3, 1], [1, 3, 4], [1, 3, 4]]
        rows.finish()
        for i in (1, 3, 4):
            assert rows.outcome(i) == alone(model, i)

    def test_long_prompts_do_not_go_into_one_pass(
        self, llama: Decoder, fed: list[list[int]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As many as it should have tokens, or one by itself."""
        monkeypatch.setattr("infer.engine.runner.PASS_TOKENS", 10)
        rows = Rows(llama)
        for i in (2, 0, 4, 3, 1):
            rows.admit(i)
        assert rows.step() == [2, 0, 4, 3, 1]
        assert fed == [[1, 4, 5], [6], [13]]
        rows.step()
        assert fed[3:] == [[1] * 4]
        rows.finish()
        assert [rows.outcome(i) for i in range(5)] == [alone(llama, i) for i in range(5)]

    def test_times(self, llama: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
        """The first token's is that of all passes since its prompt began; then that of each step."""
        now, run = [100.0], CpuBackend.run

        def slow(backend: CpuBackend, rows: Sequence[Row]) -> list[torch.Tensor]:
            now[0] += 1
            return run(backend, rows)

        monkeypatch.setattr(CpuBackend, "run", slow)
        monkeypatch.setattr("time.perf_counter", lambda: now[0])
        rows = Rows(llama)
        rows.admit(0)
        rows.step()
        rows.admit(1, prefill_chunk=5)
        for _ in range(5):
            rows.step()
        assert [token.time_s for token in rows.tokens[0]] == [1] * 6
        assert [token.time_s for token in rows.tokens[1]] == [3, 1, 1]


class TestFullContext:
    """A row that has used up its positions feeds the last that fit anew, in passes of its own."""

    @pytest.fixture(params=["llama", "gemma3", "gpt2"])
    def short(self, request: pytest.FixtureRequest, tiny_model: Callable[..., Decoder]) -> Decoder:
        return tiny_model(model_type=request.param, max_position_embeddings=12)

    def test_beside_others(self, short: Decoder) -> None:
        rows = Rows(short)
        for i in (0, 1, 3, 4, 2):
            rows.admit(i, on_full="recompute", prefill_chunk=None if i == 4 else 5)
            rows.step()
        rows.finish()
        expected = [alone(short, i, on_full="recompute", use_kv_cache=False) for i in range(5)]
        assert [rows.outcome(i) for i in range(5)] == expected

    def test_passes(self, short: Decoder, fed: list[list[int]]) -> None:
        rows = Rows(short)
        rows.admit(4, on_full="recompute")  # 5 tokens, and 12 new ones
        rows.admit(0, KVCache.from_model_config(short.config, 40, dtype="float32", device="cpu"), on_full="recompute")
        rows.finish()
        assert fed[0] == [5, 4]
        assert fed[1:8] == [[1, 1]] * 7
        assert fed[8:] == [[12], [1], [12], [12], [12]]

    def test_a_cache_with_fewer_positions(self, short: Decoder) -> None:
        """It is left as it is, holding what it can."""
        cache = KVCache.from_model_config(short.config, 7, dtype="float32", device="cpu")
        rows = Rows(short)
        rows.admit(0, cache, on_full="recompute")
        rows.admit(3, on_full="recompute")
        rows.finish()
        assert cache.seq_len == 7
        for i in (0, 3):
            assert rows.outcome(i) == alone(short, i, on_full="recompute", use_kv_cache=False)


class TestErrors:
    @pytest.fixture
    def broken(self, tiny_model: Callable[..., Decoder]) -> Decoder:
        """Any text with token 63 in it has no logits."""
        model = tiny_model()
        model.embed_tokens.weight[63] = torch.nan
        return model

    SAID = "no token can be chosen for position 2: the logits hold a NaN, or all are -inf"

    def test_of_several_the_prompt_is_named(self, broken: Decoder) -> None:
        params = SamplingParams(max_new_tokens=3)
        with pytest.raises(NoToken, match=f"^prompt 2: {self.SAID}"):
            generate_batch(broken, LETTERS, [[1], [1, 2], [1, 63], [3]], params)

    def test_of_one_it_is_not(self, broken: Decoder) -> None:
        with pytest.raises(NoToken, match=f"^{self.SAID}"):
            generate(broken, LETTERS, [1, 63], SamplingParams(max_new_tokens=3))

    def test_later_on(self, broken: Decoder) -> None:
        """A row that goes wrong after some tokens."""
        forced = SamplingParams(max_new_tokens=4, logit_bias={63: 1e4})
        params = [SamplingParams(max_new_tokens=4), forced]
        with pytest.raises(NoToken, match="prompt 1: no token can be chosen for position 3:"):
            generate_batch(broken, LETTERS, [[1], [1, 2]], params)

    def test_is_left_to_the_request_and_others_go_on(self, broken: Decoder) -> None:
        """A step gives -1 for a row without a token, whichever it is; its request says what is wrong."""
        prompts = [[1, 63], [1, 2], [3, 63], [4, 5]]
        requests = [Request(broken.config, LETTERS, prompt, PARAMS[3]) for prompt in prompts]
        with Runner(broken) as runner:
            flights = [runner.admit(request, make_cache(broken, 40, CPU)) for request in requests]
            outputs = runner.step()
            assert [flight for flight, *_ in outputs] == [*runner.flights] == flights
            assert [token < 0 for _, token, *_ in outputs] == [True, False, True, False]
            for (flight, token, _, started), prompt in zip(outputs, prompts, strict=True):
                if token < 0:
                    assert token == -1
                    with pytest.raises(NoToken, match=f"^{self.SAID}"):
                        flight.request.push(token, started)
                    assert (flight.request.tokens, flight.request.finish_reason) == (prompt, None)
                    runner.retire(flight)
                else:
                    flight.request.push(token, started)
            while runner.flights:
                for flight, token, _, started in runner.step():
                    flight.request.push(token, started)
                    if flight.request.finish_reason is not None:
                        runner.retire(flight)
        for request in requests[1::2]:
            expected = generate(broken, LETTERS, request.prompt, PARAMS[3])
            assert request.tokens[2:] == expected.token_ids
            assert len(expected.token_ids) == PARAMS[3].max_new_tokens


class TestOutputs:
    def test_logits_are_those_it_was_chosen_from(self, llama: Decoder) -> None:
        with Runner(llama) as runner:
            request = Request(llama.config, LETTERS, PROMPTS[0], PARAMS[0])
            flight = runner.admit(request, make_cache(llama, 40, CPU), prefill_chunk=3)
            assert runner.step() == []  # a part of the prompt
            while request.finish_reason is None:
                [(found, token, logits, started)] = runner.step()
                assert found is flight
                assert token == int(logits.argmax())
                request.push(token, started)
                assert request.tokens[-1] == token
        assert len(request.tokens) == 4 + 9

    def test_no_gradients(self, llama: Decoder) -> None:
        llama.requires_grad_(True)
        with Runner(llama) as runner:
            runner.admit(Request(llama.config, LETTERS, PROMPTS[0], PARAMS[0]), make_cache(llama, 40, CPU))
            [(_, _, logits, _)] = runner.step()
        assert not logits.requires_grad


def test_a_model_that_is_changed_on_the_way(llama: Decoder) -> None:
    """The next row that is admitted finds it as it is: a hook on a module sees the tokens of all rows from then on."""
    rows, seen = Rows(llama), []
    rows.admit(0)
    rows.step()
    hook = llama.layers[1].mlp.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    rows.admit(1)
    rows.step()
    rows.step()
    assert seen == [1 + 13, 2]
    hook.remove()
    rows.admit(3)
    rows.finish()
    assert seen == [1 + 13, 2]
    assert [rows.outcome(i) for i in (0, 3)] == [alone(llama, i) for i in (0, 3)]


@pytest.mark.parametrize("seed", range(amount(60, 12)))
def test_any_schedule(seed: int, tiny_model: Callable[..., Decoder]) -> None:
    """Rows come and go at random, with chunks, caches and contexts of their own."""
    chance = random.Random(seed)
    model = tiny_model(
        model_type=chance.choice(list(FAMILIES)), seed=seed, max_position_embeddings=chance.choice([16, 256])
    )
    rows, waiting = Rows(model), list(range(5))
    chance.shuffle(waiting)
    retired = set()
    while waiting or rows.runner.flights:
        if waiting and (not rows.runner.flights or chance.random() < 0.4):
            i = waiting.pop()
            cache = None
            if chance.random() < 0.2:
                cache = GrowingCache.from_model_config(model.config, 40, dtype="float32", device="cpu")
            rows.admit(i, cache, on_full="recompute", prefill_chunk=chance.choice([None, 1, 2, 5]))
        rows.step()
        if rows.runner.flights and chance.random() < 0.05:
            flight = chance.choice([*rows.runner.flights])
            rows.runner.retire(flight)
            retired |= {i for i, each in rows.flights.items() if each is flight}
    for i in range(5):
        whole = alone(model, i, on_full="recompute")
        if i in retired:
            assert rows.outcome(i).token_ids == whole.token_ids[: len(rows.tokens[i])]
        else:
            assert rows.outcome(i) == whole
