"""Sequences that come and go while others run, on caches of their own. Each text is the one that it has alone."""

from __future__ import annotations

import random
from collections.abc import Callable
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
from infer.engine.engine import Engine
from infer.engine.model import make_cache
from infer.engine.result import GeneratedToken
from infer.engine.sequence import NoToken, Sequence
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


def outcome(tokens: list[GeneratedToken]) -> Outcome:
    return Outcome(
        [token.token_id for token in tokens],
        "".join(token.text for token in tokens),
        tokens[-1].finish_reason if tokens else None,
    )


def alone(model: Any, i: int, **options: Any) -> Outcome:
    return outcome(list(stream(model, LETTERS, PROMPTS[i], PARAMS[i], **options)))


class Rows:
    """An engine whose sequences bring their own caches, by number."""

    def __init__(self, model: Any, prefill_chunk: int | None = None) -> None:
        self.model, self.engine = model, Engine(model, prefill_chunk=prefill_chunk)
        self.sequences: dict[int, Sequence] = {}

    def admit(self, i: int, cache: Cache | None = None, on_full: str = "error", recorder: Any = None) -> Sequence:
        params, chunk = PARAMS[i], self.engine.scheduler.prefill_chunk
        if cache is None:
            cache = make_cache(self.model, len(PROMPTS[i]) + params.max_new_tokens, CPU, prefill_chunk=min(chunk, 64))
        config = self.model.config
        sequence = Sequence(config, LETTERS, PROMPTS[i], params, cache=cache, on_full=on_full, recorder=recorder)
        self.sequences[i] = sequence
        self.engine.submit(sequence)
        return sequence

    def step(self) -> list[int]:
        """Which sequences got a token."""
        before = {i: sequence.num_tokens for i, sequence in self.sequences.items()}
        self.engine.step()
        return [i for i, sequence in self.sequences.items() if sequence.num_tokens > before[i]]

    def finish(self) -> None:
        while not self.engine.is_idle:
            self.step()

    def outcome(self, i: int) -> Outcome:
        sequence = self.sequences[i]
        return Outcome(sequence.token_ids[sequence.prompt_len :], sequence.text(), sequence.finish_reason)


class Watching:
    """Keeps the attention rows of a layer."""

    def wrap(self, cache: Cache) -> TracedCache:
        return TracedCache(cache, [1])

    def num_recorded(self, start: int, stop: int) -> int:
        return 0

    def add_logits(self, start: int, logits: torch.Tensor) -> None:
        pass

    def record(self, tokens: list[int], logits: torch.Tensor, cache: TracedCache, *more: Any) -> None:
        assert tokens[-1] == int(logits.argmax()) or PARAMS[3].temperature


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
        sequence = rows.admit(3, recorder=Watching())
        rows.step()
        assert sequence.cache.rows[1].shape == (1, 4, 1, 6)  # type: ignore[union-attr]
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
    def test_finished_sequences_leave(self, llama: Decoder) -> None:
        rows = Rows(llama)
        for i in range(5):
            rows.admit(i)
        assert rows.step() == [0, 1, 2, 3, 4]
        assert [sequence.finish_reason for sequence in rows.sequences.values()] == [None, None, "length", None, None]
        assert rows.engine.scheduler.running == [rows.sequences[i] for i in (0, 1, 3, 4)]
        assert rows.step() == [0, 1, 3, 4]
        rows.finish()
        assert [len(rows.outcome(i).token_ids) for i in range(5)] == [9, 14, 1, 7, 12]
        assert [rows.outcome(i) for i in range(5)] == [alone(llama, i) for i in range(5)]

    def test_aborted(self, model: Decoder) -> None:
        """It gives no more, what its cache holds can be continued from, and the others do not notice."""
        rows = Rows(model)
        cache = make_cache(model, 40, CPU)
        rows.admit(0)
        sequence = rows.admit(1, cache)
        rows.admit(4)
        for _ in range(4):
            rows.step()
        rows.engine.abort([sequence])
        rows.finish()
        assert [rows.outcome(i) for i in (0, 4)] == [alone(model, i) for i in (0, 4)]
        begun, whole = rows.outcome(1).token_ids, alone(model, 1).token_ids
        assert begun == whole[:4]
        assert cache.seq_len == 13 + 3  # all but the last generated
        params = SamplingParams(max_new_tokens=10, temperature=1.0, seed=3)
        rest = generate(model, LETTERS, PROMPTS[1] + begun, params, cache=cache)
        assert begun + rest.token_ids == whole

    def test_aborted_during_prefill(self, llama: Decoder, fed: list[list[int]]) -> None:
        rows = Rows(llama, prefill_chunk=9)
        rows.admit(0)
        sequence = rows.admit(1)
        rows.step()
        rows.engine.abort([sequence])
        rows.finish()
        assert fed[:3] == [[4, 5], [1], [1]]
        assert (rows.outcome(0), rows.outcome(1).token_ids) == (alone(llama, 0), [])

    def test_nobody(self, llama: Decoder) -> None:
        assert Rows(llama).step() == []


class TestChunks:
    def test_beside_rows_that_decode(self, model: Decoder, fed: list[list[int]]) -> None:
        rows = Rows(model, prefill_chunk=5)
        rows.admit(0)
        rows.step()
        rows.admit(1)
        given = [rows.step() for _ in range(4)]
        assert fed == [[4], [1, 5], [1, 5], [1, 3], [1, 1]]
        assert given == [[0], [0], [0, 1], [0, 1]]
        rows.finish()
        assert [rows.outcome(i) for i in range(2)] == [alone(model, i) for i in range(2)]

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

        def slow(backend: CpuBackend, rows: Any) -> list[torch.Tensor]:
            now[0] += 1
            return run(backend, rows)

        monkeypatch.setattr(CpuBackend, "run", slow)
        monkeypatch.setattr("time.perf_counter", lambda: now[0])
        tokens = stream(llama, LETTERS, PROMPTS[1], PARAMS[1], prefill_chunk=5)
        assert [next(tokens).time_s for _ in range(3)] == [3, 1, 1]


class TestFullContext:
    """A row that has used up its positions feeds the last that fit anew, in passes of its own."""

    @pytest.fixture(params=["llama", "gemma3", "gpt2"])
    def short(self, request: pytest.FixtureRequest, tiny_model: Callable[..., Decoder]) -> Decoder:
        return tiny_model(model_type=request.param, max_position_embeddings=12)

    def test_beside_others(self, short: Decoder) -> None:
        rows = Rows(short, prefill_chunk=5)
        for i in (0, 1, 3, 4, 2):
            rows.admit(i, on_full="recompute")
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

    SAID = "no token can be chosen for position 2: the logits contain a NaN, or all are -inf"

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

    def test_others_continue(self, broken: Decoder) -> None:
        """A sequence without a token fails with its own error."""
        prompts = [[1, 63], [1, 2], [3, 63], [4, 5]]
        engine = Engine(broken)
        sequences = [
            Sequence(broken.config, LETTERS, prompt, PARAMS[3], cache=make_cache(broken, 40, CPU)) for prompt in prompts
        ]
        for sequence in sequences:
            engine.submit(sequence)
        engine.step()
        for sequence, prompt in zip(sequences[::2], prompts[::2], strict=True):
            assert isinstance(sequence.error, NoToken)
            assert str(sequence.error) == self.SAID
            assert (sequence.token_ids, sequence.is_finished) == (prompt, True)
        while not engine.is_idle:
            engine.step()
        for sequence in sequences[1::2]:
            expected = generate(broken, LETTERS, sequence.prompt, PARAMS[3])
            assert sequence.token_ids[2:] == expected.token_ids
            assert len(expected.token_ids) == PARAMS[3].max_new_tokens


class TestDrafts:
    """A draft is accepted exactly if it equals the token that is chosen without it: texts never change."""

    @pytest.mark.parametrize("i", [0, 1, 4])
    @pytest.mark.parametrize("right", [0, 1, 3])
    def test_any_drafts(self, model: Decoder, i: int, right: int) -> None:
        """So many right ones, then a wrong one, in every step; beside a sequence without drafts."""
        expected, rows = alone(model, i), Rows(model)
        sequence = rows.admit(i)
        rows.admit(3)
        steps = 0
        while not rows.engine.is_idle:
            if sequence.token_times and not sequence.is_finished:
                done = len(sequence.token_times)
                left = sequence.max_len - sequence.num_tokens - 1
                sequence.draft_token_ids = [*expected.token_ids[done : done + right], 63][:left]
            rows.step()
            steps += not sequence.is_finished
            cache = sequence.cache
            assert cache is not None
            assert cache.seq_len == sequence.num_computed_tokens == sequence.num_tokens - 1
        assert rows.outcome(i) == expected
        assert rows.outcome(3) == alone(model, 3)
        assert steps <= -(-len(expected.token_ids) // (right + 1)) + 2


class TestOutputs:
    def test_logits_are_those_it_was_chosen_from(self, llama: Decoder) -> None:
        engine = Engine(llama, prefill_chunk=3)
        sequence = Sequence(llama.config, LETTERS, PROMPTS[0], PARAMS[0], cache=make_cache(llama, 40, CPU))
        engine.submit(sequence)
        while not engine.is_idle:
            outputs = [*engine.runner.launch(engine.scheduler.schedule()), *engine.runner.wait()]
            [(found, start, n, logits, *_)] = outputs
            assert found is sequence
            assert logits is not None
            complete = start + n == sequence.num_tokens
            assert len(logits) == complete
            for output in outputs:
                engine._commit(output, 0.0)
            if complete:
                assert sequence.token_ids[-1] == int(logits[-1].argmax())
        assert sequence.num_tokens == 4 + 9

    def test_no_gradients(self, llama: Decoder) -> None:
        llama.requires_grad_(True)
        engine = Engine(llama)
        engine.submit(Sequence(llama.config, LETTERS, PROMPTS[0], PARAMS[0], cache=make_cache(llama, 40, CPU)))
        [output] = [*engine.runner.launch(engine.scheduler.schedule()), *engine.runner.wait()]
        assert output.logits is not None
        assert not output.logits.requires_grad


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
    """Sequences come and go at random, with chunks, caches and contexts of their own."""
    chance = random.Random(seed)
    model = tiny_model(
        model_type=chance.choice(list(FAMILIES)), seed=seed, max_position_embeddings=chance.choice([16, 256])
    )
    rows, waiting = Rows(model, prefill_chunk=chance.choice([None, 1, 2, 5])), list(range(5))
    chance.shuffle(waiting)
    aborted = set()
    while waiting or not rows.engine.is_idle:
        if waiting and (rows.engine.is_idle or chance.random() < 0.4):
            i = waiting.pop()
            cache = None
            if chance.random() < 0.2:
                cache = GrowingCache.from_model_config(model.config, 40, dtype="float32", device="cpu")
            rows.admit(i, cache, on_full="recompute")
        rows.step()
        if (running := rows.engine.scheduler.running) and chance.random() < 0.05:
            sequence = chance.choice(running)
            rows.engine.abort([sequence])
            aborted |= {i for i, each in rows.sequences.items() if each is sequence}
    for i in range(5):
        whole = alone(model, i, on_full="recompute")
        if i in aborted:
            assert rows.outcome(i).token_ids == whole.token_ids[: len(rows.outcome(i).token_ids)]
        else:
            assert rows.outcome(i) == whole
