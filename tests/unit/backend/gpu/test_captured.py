"""Captured decode steps from the host's side: which are made, what they are told, and what they leave behind.

There is no GPU here: the kernels run in Triton's interpreter, each step at its launch, and nothing is captured. Passes
over prompts are plain torch's. Where only the host's side matters, `light` leaves the model out of a step.
"""

from __future__ import annotations

import copy
import gc
import os
import random
import weakref
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Collection
from contextlib import contextmanager
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from amount import amount, pairs
from interpreted import hurried, poison
from mocks import Letters
from torch import Tensor

pytest.importorskip("triton", reason="needs Triton, which is there on Linux alone")

from triton.runtime.interpreter import InterpretedFunction

from infer import LLM, CacheMemory, GrowingCache, KVCache, SamplingParams, SlidingCache, backend, generate, stream
from infer.backend import backend_for
from infer.backend.gpu import attention, captured, gemm, step
from infer.backend.gpu.backend import GpuBackend
from infer.backend.gpu.captured import CapturedStep
from infer.backend.gpu.sampling import MANY_ROWS
from infer.backend.gpu.tuned import ROWS_COMPILED
from infer.backend.parts import ModelSnapshot, parts_of
from infer.cache import BaseCache, Cache, TracedCache
from infer.cache.debug import debugged
from infer.config import RopeConfig
from infer.engine.draft import MAX_DRAFTS, Speculation
from infer.engine.drafters import DrafterFunction, drafter_of
from infer.engine.engine import Engine
from infer.engine.generate import generate_batch
from infer.engine.logprobs import logprobs_of
from infer.engine.result import GenerationResult
from infer.engine.sequence import Sequence
from infer.models.common import Decoder
from infer.nn.linear import Linear
from infer.nn.rope import Rope

pytestmark = [
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter; a GPU has tests of its own"
    ),
    # Of rows without a token, which have no slots and no keys.
    pytest.mark.filterwarnings("ignore:divide by zero encountered in fmod:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning"),
]
FAMILIES = ["llama", "qwen3", "gemma3", "gpt2", "rope_gpt"]
PROMPT = [1, 2, 3]
SAMPLED = {"temperature": 0.9, "seed": 4, "repetition_penalty": 1.2, "frequency_penalty": 0.4}
SAMPLED_TOP = SAMPLED | {"logprobs": 30}  # more than there are tokens
DISTINCT = {"temperature": 1.3, "seed": 9, "presence_penalty": 50.0}  # no token twice
Make = Callable[..., Decoder]


class Event:
    """Of work that is done when it is launched."""

    def record(self) -> None: ...
    def wait(self) -> None: ...
    def synchronize(self) -> None: ...


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[CapturedStep]:
    """Models decode as on a GPU. Returns the steps made for them."""

    def empty(*shape: int, pin_memory: bool = False, **options: Any) -> Tensor:
        return torch.empty(*shape, **options)

    def with_kernels(model: Decoder) -> GpuBackend:
        found, alive = GpuBackend.of(parts_of(model), model.dtype), weakref.ref(model)
        found.run = lambda rows: alive().run(rows)  # type: ignore[method-assign, union-attr]
        found.run_beside = lambda *_: False  # type: ignore[method-assign]
        return found

    changed = {"empty": empty, "cuda": SimpleNamespace(Event=Event)}
    monkeypatch.setattr(captured, "torch", SimpleNamespace(**vars(torch) | changed))
    monkeypatch.setattr(captured, "_capturing", False)
    monkeypatch.setattr(backend, "_with_kernels", with_kernels)
    # Rows without a token are computed from whatever memory holds: from NaN, they show in any other.
    poison(monkeypatch, attention, gemm, step)
    monkeypatch.setattr(attention, "MAX_PROGRAMS", 8)  # few programs, which the interpreter takes long for
    hurried(monkeypatch)
    steps: list[CapturedStep] = []
    make = CapturedStep.__init__

    def counted(self: CapturedStep, *args: Any) -> None:
        make(self, *args)
        steps.append(self)

    monkeypatch.setattr(CapturedStep, "__init__", counted)
    return steps


@pytest.fixture
def light(made: list[CapturedStep], monkeypatch: pytest.MonkeyPatch) -> list[CapturedStep]:
    """Steps go from the embedding to the head: no attention, and nothing is written to a cache."""
    monkeypatch.setattr(captured, "launch", lambda plan, fed, *_: light_logits(fed.x, plan.head.linear.weight))
    return made


def light_logits(x: Tensor, weight: Tensor) -> Tensor:
    """The same for a row, however many there are."""
    return (x[:, None] * weight).sum(-1)


@contextmanager
def plainly() -> Iterator[None]:
    """In plain torch: as if there were a hook."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelSnapshot, "hooked", lambda _: True)
        yield


@pytest.fixture
def small(tiny_model: Make) -> Make:
    """A model that the interpreter gets through; with windows, a layer of each kind."""

    def make(model_type: str = "llama", **changes: Any) -> Decoder:
        sizes = {"hidden_size": 16, "intermediate_size": 24, "vocab_size": 24}
        layers = 2 if model_type == "gemma3" else 1
        return tiny_model(**{"model_type": model_type, "num_hidden_layers": layers} | sizes | changes)

    return make


def settings(max_new_tokens: int, **options: Any) -> SamplingParams:
    return SamplingParams(**{"ignore_eos": True} | options, max_new_tokens=max_new_tokens)


def make_cache(model: Decoder, kind: type[BaseCache] = KVCache, size: int = 32, **options: Any) -> BaseCache:
    return kind.from_model_config(model.config, size, dtype="float32", device="cpu", **options)


def tokens_of(model: Decoder, prompt: Collection[int], params: SamplingParams, **options: Any) -> list[int]:
    return [token.token_id for token in stream(model, Letters(), prompt, params, **options)]


def outcome(result: GenerationResult) -> tuple[Any, ...]:
    return result.token_ids, result.text, result.finish_reason


@torch.inference_mode()
def steps_of(model: Decoder) -> list[CapturedStep]:
    found = backend_for(model)
    assert isinstance(found, GpuBackend)
    return found.captured._steps


def idle(steps: Collection[CapturedStep]) -> bool:
    return bool(steps) and not any(step.busy for step in steps)


class TestTokens:
    """As the modules choose them."""

    @pytest.mark.parametrize(
        ("family", "options"),
        [(f, each) for i, f in enumerate(FAMILIES) for each in amount(({}, SAMPLED), (({}, SAMPLED)[i % 2],))],
        ids=str,
    )
    def test_of_every_family(self, small: Make, made: list[CapturedStep], family: str, options: dict[str, Any]) -> None:
        model, params = small(family), settings(4, **options)
        with plainly():
            expected = generate(model, Letters(), PROMPT, params)
            assert not made
        assert outcome(generate(model, Letters(), PROMPT, params)) == outcome(expected)
        assert [(step.rows, step.samples) for step in made] == [(1, bool(options))]
        assert idle(made)

    @pytest.mark.parametrize("family", amount(["llama", "gemma3"], ["llama"]))
    def test_of_rows_that_end_one_by_one(self, small: Make, made: list[CapturedStep], family: str) -> None:
        """In prompts' own order, whatever rows they are: all 5, or 4 that go on after their prompt; then 2, then 1."""
        prompts = [[4, 1], [1, 2, 3], [7, 8, 9, 10, 11, 12], [2, 9], [5, 6]]
        with plainly():
            eos = tokens_of(small(family), prompts[2], settings(5, **DISTINCT))[4]
            stop = Letters().decode(tokens_of(small(family), prompts[1], settings(2, **SAMPLED)))
        params = [
            settings(1),
            settings(9, **SAMPLED, stop=stop),
            settings(9, **DISTINCT, ignore_eos=False),
            settings(8, top_k=3, top_p=0.9, min_p=0.1, temperature=0.8, seed=1),
            settings(2),
        ]
        model = small(family, eos_token_ids=(eos,))
        with plainly():
            expected = [
                outcome(generate(model, Letters(), prompt, each)) for prompt, each in zip(prompts, params, strict=True)
            ]
        got = list(map(outcome, generate_batch(model, Letters(), prompts, params)))
        assert got == expected
        assert [finish for _, _, finish in got] == ["length", "stop", "eos", "length", "length"]
        assert made[0].rows >= 4
        assert [step.rows for step in made[1:]][-2:] == [2, 1]
        assert idle(made)

    @pytest.mark.parametrize(("prompt", "count"), [(PROMPT, 1), (PROMPT, 2), ([3], 1), ([3], 2)])
    def test_of_few(self, small: Make, made: list[CapturedStep], prompt: list[int], count: int) -> None:
        """As many steps as tokens: the first computes the last token of the prompt, which may be its only one."""
        model, params = small(), settings(count)
        with plainly():
            expected = tokens_of(model, prompt, params)
        assert tokens_of(model, prompt, params) == expected
        assert [int(step.steps) for step in made] == [count]

    def test_do_not_depend_on_who_ran_before(self, small: Make, light: list[CapturedStep]) -> None:
        """Penalties, biases and seeds of a step's rows are those of its last run."""
        model = small()
        params = settings(4, temperature=1.0, seed=3)
        first = tokens_of(model, PROMPT, params)
        tokens_of(model, [4, 5], settings(6, **SAMPLED, logit_bias={first[1]: -50.0}))
        assert tokens_of(model, PROMPT, params) == first
        assert len(light) == 1


class TestCaches:
    """Hold what was asked for, whenever one looks."""

    @pytest.mark.parametrize(
        ("kind", "options"), [(SlidingCache, {"prefill_chunk": 1}), *amount([(KVCache, {})], [])], ids=str
    )
    def test_a_conversation(
        self, small: Make, made: list[CapturedStep], kind: type[BaseCache], options: dict[str, Any]
    ) -> None:
        """Over a window of 4 and its ring; the second turn goes on from what a run that was closed has left."""
        model, prompt = small("gemma3"), [1, 2, 3, 4, 5]
        params = settings(7, **SAMPLED)
        with plainly():
            expected = tokens_of(model, prompt, params)
        cache = make_cache(model, kind, **options)
        chunk = {"prefill_chunk": 1} if options else {}
        tokens = stream(model, Letters(), prompt, params, cache=cache, **chunk)
        for i in range(4):
            assert next(tokens).token_id == expected[i]
            assert cache.seq_len == len(prompt) + i
        tokens.close()
        assert cache.seq_len == len(prompt) + 3
        again = [*prompt, *expected[:3], (expected[3] + 1) % 24]  # other than what the run had launched ahead with
        with plainly():
            expected = tokens_of(model, again, settings(3))
        got = []
        for token in stream(model, Letters(), again, settings(3), cache=cache, **chunk):
            got.append(token.token_id)
            assert cache.seq_len == len(again) + len(got) - 1
        assert got == expected
        assert cache.seq_len == len(again) + 2
        cache.truncate(len(again) + 1)
        with plainly():
            expected = tokens_of(model, [*again, got[0], 7], settings(2))
        assert tokens_of(model, [*again, got[0], 7], settings(2), cache=cache, **chunk) == expected
        assert idle(made)

    @pytest.mark.parametrize("context", [6, 64], ids=["context", "cache"])
    def test_recompute_beyond_the_room(self, small: Make, made: list[CapturedStep], context: int) -> None:
        """Whichever ends first: the model's context, or the cache."""
        model = small(max_position_embeddings=context)
        cache = make_cache(model, size=70 - context)
        params = settings(6, temperature=1.0, seed=2)
        options = {"on_full": "recompute"}
        with plainly():
            expected = tokens_of(model, PROMPT, params, cache=make_cache(model, size=70 - context), **options)
        assert tokens_of(model, PROMPT, params, cache=cache, **options) == expected
        assert len(made) == 1
        assert cache.seq_len == 6
        assert idle(made)

    def test_rows_beyond_the_context(self, small: Make, made: list[CapturedStep]) -> None:
        """A row that has used it up goes on alone, and leaves the others' tokens as they are."""
        model = small(max_position_embeddings=6)
        params, options = settings(4), {"on_full": "recompute"}
        prompts = [[1, 2, 3, 4], [5, 6]]
        with plainly():
            expected = [tokens_of(model, prompt, params, **options) for prompt in prompts]
        results = generate_batch(model, Letters(), prompts, params, **options)
        assert [result.token_ids for result in results] == expected
        assert idle(made)

    @pytest.mark.parametrize("kind", [KVCache, SlidingCache])
    def test_filled_to_the_last_position(self, small: Make, light: list[CapturedStep], kind: type[BaseCache]) -> None:
        model = small("gemma3")
        cache = make_cache(model, kind, 7)
        assert len(tokens_of(model, PROMPT, settings(4), cache=cache)) == 4
        assert cache.seq_len == 6  # the last token is not fed
        assert len(tokens_of(model, PROMPT, settings(6), cache=make_cache(model, kind, 7), on_full="recompute")) == 6

    def test_a_ring_that_was_written_ahead(self, small: Make, light: list[CapturedStep]) -> None:
        """The position behind the last has overwritten one, which is gone when the run is closed."""
        model = small("gemma3")
        cache = make_cache(model, SlidingCache, prefill_chunk=1)
        tokens = stream(model, Letters(), [1, 2, 3, 4, 5], settings(9), cache=cache, prefill_chunk=1)
        assert len(list(islice(tokens, 3))) == 3
        tokens.close()
        assert cache.seq_len == 7  # and 5 slots, of which position 7 took that of 2
        with pytest.raises(ValueError, match="overwritten"):
            cache.truncate(5)
        cache.truncate(6)

    @pytest.mark.parametrize("taken", [2, 3])
    @pytest.mark.parametrize("kind", [KVCache, SlidingCache])
    def test_in_other_hands(self, small: Make, light: list[CapturedStep], kind: type[BaseCache], taken: int) -> None:
        """A run that was left standing does nothing to a cache that was reset and given to another."""
        model = small("gemma3")
        cache = make_cache(model, kind)
        expected = tokens_of(model, [4, 5, 6], settings(6))
        left = stream(model, Letters(), PROMPT, settings(6), cache=cache)
        assert len(list(islice(left, 2))) == 2
        cache.reset()
        other = stream(model, Letters(), [4, 5, 6], settings(6), cache=cache)
        got = [token.token_id for token in islice(other, taken)]
        held = cache.seq_len
        del left
        gc.collect()
        assert cache.seq_len == held
        got += [token.token_id for token in other]
        assert got == expected
        assert cache.seq_len == 3 + 5
        assert idle(light)


def changed_data(weight: Tensor) -> None:
    weight.data = weight.data.clone()


def changed_eps(model: Decoder) -> None:
    model.norm.eps = 1e-2


def changed_rope(model: Decoder) -> None:
    model.ropes = {kind: Rope(RopeConfig(99.0), model.config.computed_head_dim) for kind in model.ropes}


class TestStepsServeAgain:
    @pytest.fixture
    def model(self, small: Make, light: list[CapturedStep]) -> Decoder:
        """Which has had a run."""
        model = small()
        tokens_of(model, PROMPT, settings(3))
        assert len(light) == 1
        return model

    def test_for_other_prompts_and_lengths(self, model: Decoder, light: list[CapturedStep]) -> None:
        tokens_of(model, [5] * 9, settings(6))
        assert len(light) == 1

    @pytest.mark.parametrize("options", [{"temperature": 1.0}, {"presence_penalty": 1.0}, {"logit_bias": {3: 1.0}}])
    def test_but_not_greedy_ones_for_other_settings(
        self, model: Decoder, light: list[CapturedStep], options: dict[str, Any]
    ) -> None:
        for _ in range(2):
            tokens_of(model, PROMPT, settings(3, **options))
        assert [step.samples for step in light] == [False, True]

    def test_while_the_model_is_as_it_was(self, model: Decoder, light: list[CapturedStep], small: Make) -> None:
        model.eval()
        small(seed=1)
        tokens_of(model, PROMPT, settings(3))
        assert len(light) == 1

    @pytest.mark.parametrize(
        "change",
        [
            pytest.param(lambda model: changed_data(model.layers[0].mlp.down_proj.weight), id="layer"),
            pytest.param(lambda model: changed_data(model.embed_tokens.weight), id="embedding"),
            pytest.param(lambda model: changed_data(model.norm.weight), id="norm"),
            changed_eps,
            changed_rope,
        ],
    )
    def test_but_not_for_a_model_that_changed(
        self, model: Decoder, light: list[CapturedStep], change: Callable[[Decoder], None]
    ) -> None:
        change(model)
        for _ in range(2):
            tokens_of(model, PROMPT, settings(3))
        assert len(light) == 2
        assert steps_of(model) == light[1:]  # the other is of no use any more

    def test_but_not_two_at_a_time(self, model: Decoder, light: list[CapturedStep]) -> None:
        first = tokens_of(model, [4], settings(5))
        second = tokens_of(model, [9], settings(5))
        streams = [stream(model, Letters(), prompt, settings(5)) for prompt in ([4], [9])]
        pairs = [(a.token_id, b.token_id) for a, b in zip(*streams, strict=True)]
        assert pairs == list(zip(first, second, strict=True))
        assert len(light) == 2
        assert idle(light)

    def test_for_fewer_rows(self, small: Make, light: list[CapturedStep], monkeypatch: pytest.MonkeyPatch) -> None:
        """Those that are left out are, also where the run before has left them going."""
        model, positions = small(), []
        launch = CapturedStep.launch

        def noted(self: CapturedStep) -> None:
            positions.append(self.positions.tolist())
            launch(self)

        prompts = [[i, 2, 3] for i in range(4)]
        generate_batch(model, Letters(), prompts, [settings(2), settings(2), settings(9), settings(9)])
        assert light[0].positions[3] >= 0
        monkeypatch.setattr(CapturedStep, "launch", noted)
        generate_batch(model, Letters(), [[1, 2], [2, 3, 4], [4, 5]], settings(3))
        assert positions[-2:] == [[2, 3, 2, -1], [3, 4, 3, -1]]
        assert {each[3] for each in positions} == {-1}
        assert [step.rows for step in light] == [4, 2]

    def test_not_beyond_the_model(self, small: Make, light: list[CapturedStep]) -> None:
        model = small()
        tokens_of(model, PROMPT, settings(3))
        kept = weakref.ref(light.pop())
        assert kept() is not None
        del model
        gc.collect()
        assert kept() is None


class Refuses:
    """A tokenizer with an error of its own, at the second token that is generated."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def decode(self, token_ids: list[int]) -> str:
        if len(token_ids) > 1:
            raise self.error
        return "a"


class TestStepsAreGivenBack:
    def test_when_a_stream_is_closed(self, small: Make, light: list[CapturedStep]) -> None:
        tokens = stream(small(), Letters(), PROMPT, settings(6))
        assert len(list(islice(tokens, 3))) == 3
        assert light[0].busy
        tokens.close()
        assert idle(light)

    def test_after_an_error_of_whoever_takes_the_tokens(self, small: Make, light: list[CapturedStep]) -> None:
        tokens = stream(small(), Letters(), PROMPT, settings(6))
        assert len(list(islice(tokens, 3))) == 3
        with pytest.raises(KeyError, match="mine"):
            tokens.throw(KeyError("mine"))
        assert idle(light)

    def test_after_an_error_while_loading(
        self, small: Make, light: list[CapturedStep], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def load(*_: Any) -> None:
            raise MemoryError("no more")

        model = small()
        cache = make_cache(model)
        with monkeypatch.context() as patch:
            patch.setattr(CapturedStep, "load", load)
            with pytest.raises(MemoryError, match="no more"):
                tokens_of(model, PROMPT, settings(3), cache=cache)
        assert idle(light)
        assert cache.seq_len == 0
        tokens_of(model, PROMPT, settings(3))
        assert len(light) == 1

    @pytest.mark.parametrize("kind", [ValueError, RuntimeError])
    def test_after_an_error_of_the_tokenizer(
        self, small: Make, light: list[CapturedStep], kind: type[Exception]
    ) -> None:
        """Which is not disguised."""
        model, error = small(), kind("a tokenizer's own")
        with pytest.raises(kind) as raised:
            list(stream(model, Refuses(error), PROMPT, settings(6)))
        assert raised.value is error
        with pytest.raises(kind) as raised:
            generate_batch(model, Refuses(error), [PROMPT, [4, 5]], settings(6))
        assert raised.value is error
        assert [step.rows for step in light] == [1, 2]
        assert idle(light)


class TestNoNumbers:
    """A model whose embedding of some token is NaN, so that no token can follow it."""

    @pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
    @pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")
    def test_are_refused_at_their_position(self, small: Make, made: list[CapturedStep]) -> None:
        model, params = small(), settings(4, **DISTINCT, logit_bias=dict.fromkeys(PROMPT, -99.0))
        with plainly():
            expected = tokens_of(model, PROMPT, params)
        weight = model.embed_tokens.weight
        before = weight.data.clone()
        weight[expected[1]] = torch.nan
        cache = make_cache(model)
        tokens = stream(model, Letters(), PROMPT, params, cache=cache)
        assert [token.token_id for token in islice(tokens, 2)] == expected[:2]
        with pytest.raises(ValueError, match=r"^no token can be chosen for position 5: the logits contain a NaN"):
            next(tokens)
        assert idle(made)
        weight.copy_(before)
        cache.reset()
        assert tokens_of(model, PROMPT, params, cache=cache) == expected
        assert len(made) == 1

    @pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
    def test_are_refused_by_the_prompt(self, small: Make, made: list[CapturedStep]) -> None:
        """Whatever row it is: the first is done with its first token."""
        model = small()
        with plainly():
            follows = {token: tokens_of(model, [4, token], settings(1))[0] for token in range(24)}
        prompt, bad = next((a, b) for a, b in follows.items() if b not in (a, 4, follows[4]))
        model.embed_tokens.weight[bad] = torch.nan
        params = [settings(1), settings(2), settings(4)]
        with pytest.raises(ValueError, match=r"^prompt 2: no token can be chosen for position 3"):
            generate_batch(model, Letters(), [[4, 4], [4, 4], [4, prompt]], params)
        assert idle(made)


class TestAFailingGPU:
    @pytest.fixture
    def failing(self, light: list[CapturedStep], monkeypatch: pytest.MonkeyPatch) -> None:
        """From the third time that it is waited for; from then on, nothing can be launched either."""
        left, drop = [2], CapturedStep.drop

        def synchronize(_: Event) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise RuntimeError("device-side assert")

        def dropped(step: CapturedStep, slot: int) -> None:
            if left[0] < 0:
                raise RuntimeError("device-side assert, again")
            drop(step, slot)

        monkeypatch.setattr(Event, "synchronize", synchronize)
        monkeypatch.setattr(CapturedStep, "drop", dropped)

    @pytest.mark.usefixtures("failing")
    def test_a_stream(self, small: Make, light: list[CapturedStep]) -> None:
        model = small()
        cache = make_cache(model)
        tokens = stream(model, Letters(), PROMPT, settings(9), cache=cache)
        assert len(list(islice(tokens, 2))) == 2
        with pytest.raises(RuntimeError, match=r"decoded the prompt at position 4: device-side assert$"):
            next(tokens)
        assert cache.seq_len == 4
        assert idle(light)

    @pytest.mark.usefixtures("failing")
    def test_a_batch(self, small: Make, light: list[CapturedStep]) -> None:
        """By what the prompts are numbered, of which the first is done."""
        prompts = [[4, 4], [1, 2, 3, 4], PROMPT]
        with pytest.raises(RuntimeError, match=r"prompt 1 at position 5, prompt 2 at position 4: device-side assert$"):
            generate_batch(small(), Letters(), prompts, [settings(1), settings(9), settings(9)])
        assert idle(light)


class Text:
    """A text to generate: at which step it is submitted, and at which it is aborted."""

    def __init__(self, at: int, prompt: list[int], params: SamplingParams, *, aborted_at: int | None = None) -> None:
        self.at, self.prompt, self.params, self.aborted_at = at, prompt, params, aborted_at
        self.sequence: Sequence

    def submit(self, engine: Engine, cache: Cache) -> None:
        name = f"text {self.at}"
        self.sequence = Sequence(engine.model.config, Letters(), self.prompt, self.params, cache=cache, name=name)
        engine.submit(self.sequence)

    @property
    def tokens(self) -> list[int]:
        return generated(self.sequence)


def generated(sequence: Sequence) -> list[int]:
    return sequence.token_ids[sequence.prompt_len :]


def run_all(model: Decoder, texts: Collection[Text], kinds: Collection[type[BaseCache]]) -> list[BaseCache]:
    """Submit each text while the others are generated. Returns their caches."""
    options: dict[type[BaseCache], Any] = {SlidingCache: {"prefill_chunk": 1}}
    caches = [make_cache(model, kind, **options.get(kind, {})) for kind in kinds]
    with Engine(model) as engine:
        for i in range(60):
            for text, cache in zip(texts, caches, strict=True):
                if text.at == i:
                    text.submit(engine, cache)
                if text.aborted_at == i:
                    engine.abort([text.sequence])
            engine.step()
        assert engine.is_idle
    return caches


class TestComingAndGoing:
    """Sequences come and go while others decode, and each has the text that it has alone."""

    def check(self, model: Decoder, texts: Collection[Text], kinds: Collection[type[BaseCache]]) -> None:
        caches = run_all(model, texts, kinds)
        for text, cache in zip(texts, caches, strict=True):
            with plainly():
                assert text.tokens == tokens_of(model, text.prompt, text.params)
            assert len(text.tokens) == text.params.max_new_tokens
            assert cache.seq_len == len(text.prompt) + len(text.tokens) - 1

    @pytest.mark.parametrize("family", amount(["llama", "gemma3"], ["gemma3"]))
    def test_one_by_one(self, small: Make, made: list[CapturedStep], family: str) -> None:
        """Greedy, then sampled; into free slots and larger steps; a prompt of one token; after all others."""
        kind = SlidingCache if family == "gemma3" else KVCache
        texts = [
            Text(0, PROMPT, settings(11)),
            Text(2, [4, 5, 6, 7, 8], settings(6)),
            Text(5, [7], settings(2)),
            Text(6, [9, 1], settings(4, **SAMPLED)),
            Text(8, [5] * 6, settings(3, **DISTINCT)),
            Text(40, [2, 1], settings(2)),
        ]
        self.check(small(family), texts, [kind] * len(texts))
        assert {(step.rows, step.samples) for step in made} >= {(1, False), (2, False), (4, True)}
        assert idle(made)

    @pytest.mark.parametrize(
        ("kind", "aborted_at"),
        amount([(SlidingCache, 1), (KVCache, 2), (SlidingCache, 3)], [(SlidingCache, 3)]),
    )
    def test_one_that_is_aborted(
        self, small: Make, made: list[CapturedStep], kind: type[BaseCache], aborted_at: int
    ) -> None:
        """After its prompt, or while a step of it is launched ahead; its cache and its slot can be used again."""
        model = small("gemma3")
        texts = [
            Text(0, PROMPT, settings(5, **SAMPLED)),
            Text(0, [6, 5, 4, 3], settings(9, **DISTINCT), aborted_at=aborted_at),
            Text(aborted_at, [4], settings(4)),
        ]
        caches = run_all(model, texts, [kind] * 3)
        tokens = [*texts[1].prompt, *texts[1].tokens]
        assert len(texts[1].tokens) == aborted_at  # the first step computes the prompt
        assert caches[1].seq_len == len(tokens) - 1
        options = {"prefill_chunk": 1} if kind is SlidingCache else {}
        got = tokens_of(model, [*tokens, 3], settings(2), cache=caches[1], **options)
        with plainly():
            assert got == tokens_of(model, [*tokens, 3], settings(2))
            for text in (texts[0], texts[2]):
                assert text.tokens == tokens_of(model, text.prompt, text.params)
        assert idle(made)

    def test_a_ring_that_is_aborted_knows_what_was_written_ahead(self, small: Make, light: list[CapturedStep]) -> None:
        """At once: its next user need not wait for the engine's next step."""
        model = small("gemma3")
        cache = make_cache(model, SlidingCache, prefill_chunk=1)
        with Engine(model, prefill_chunk=1) as engine:
            text = Text(0, [1, 2, 3, 4, 5], settings(9))
            text.submit(engine, cache)
            while text.sequence.num_computed_tokens < 7:
                engine.step()
            engine.abort([text.sequence])
            assert cache.seq_len == 7  # and 5 slots, of which position 7 took that of 2
            with pytest.raises(ValueError, match="overwritten"):
                cache.truncate(5)
            cache.truncate(6)
        assert cache.seq_len == 6
        assert idle(light)

    def test_beside_a_cache_that_must_be_asked(self, small: Make, made: list[CapturedStep]) -> None:
        """It goes through passes, the others through captured steps."""
        texts = [Text(0, PROMPT, settings(6)), Text(1, [4, 5], settings(5, **SAMPLED)), Text(2, [8], settings(4))]
        self.check(small(), texts, [KVCache, GrowingCache, KVCache])
        assert [step.rows for step in made] == [1, 2]
        assert idle(made)

    def test_a_model_that_is_hooked_on_the_way(self, small: Make, made: list[CapturedStep]) -> None:
        """With the next sequence, all continue in plain torch, and steps launched ahead are rolled back."""
        model, seen = small(), []
        caches = [make_cache(model) for _ in range(3)]
        texts = [Text(0, PROMPT, settings(9)), Text(0, [4, 5], settings(3)), Text(0, [6], settings(2))]
        with Engine(model) as engine:
            for i, (text, cache) in enumerate(zip(texts, caches, strict=True)):
                text.submit(engine, cache)
                for _ in range(4):
                    engine.step()
                if i == 0:
                    hook = model.layers[0].register_forward_hook(lambda *_: seen.append(1))
                else:
                    hook.remove()
            assert engine.is_idle
            assert caches[0].seq_len == len(PROMPT) + 8
        assert len(seen) == 4
        with plainly():
            for text in texts:
                assert text.tokens == tokens_of(model, text.prompt, text.params)
        assert idle(made)


def taken(model: Decoder, *caches: Cache) -> bool:
    """Whether captured steps would decode sequences with such caches."""
    with torch.inference_mode():
        decoder = backend_for(model).captured_decoder()
    return decoder is not None and all(map(decoder.supports, caches or (make_cache(model),)))


class TestLeftToPasses:
    def test_on_a_cpu(self, small: Make) -> None:
        assert not taken(small())

    @pytest.mark.usefixtures("made")
    @pytest.mark.parametrize("family", FAMILIES)
    def test_not_as_it_is(self, small: Make, family: str) -> None:
        assert taken(small(family))

    @pytest.mark.parametrize("name", ["", "embed_tokens", "layers.0.mlp"])
    def test_with_a_hook(self, small: Make, light: list[CapturedStep], name: str) -> None:
        model, calls = small(), []
        assert taken(model)
        hook = model.get_submodule(name).register_forward_pre_hook(lambda *_: calls.append(1))
        assert not taken(model)
        tokens_of(model, PROMPT, settings(3))
        assert len(calls) == 3
        assert not light
        hook.remove()
        assert taken(model)

    @pytest.mark.usefixtures("made")
    def test_with_a_cache_that_must_be_asked(self, small: Make, monkeypatch: pytest.MonkeyPatch) -> None:
        model = small()
        cache = make_cache(model)
        assert not taken(model, TracedCache(cache, [0]))
        assert not taken(model, make_cache(model, GrowingCache))
        assert not taken(model, cache, make_cache(model, GrowingCache))
        assert not taken(model, make_cache(small(num_hidden_layers=2)))
        monkeypatch.setenv("KV_DEBUG", "1")
        assert not taken(model, debugged(cache, model.config.num_hidden_layers))
        assert taken(model, cache)

    @pytest.mark.usefixtures("made")
    def test_with_a_vocabulary_that_is_too_large(self, small: Make, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(captured, "MAX_VOCAB", 24)
        assert taken(small())
        monkeypatch.setattr(captured, "MAX_VOCAB", 23)
        assert not taken(small())


def recorded(kinds: set[Any]) -> Callable[..., Callable[..., None]]:
    """Stands for how kernels are launched: notes what would be, but for sizes and data."""

    def launcher(kernel: InterpretedFunction, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **constants: Any) -> None:
            absent = tuple(arg is None for arg in args)
            named = {name: "data" if isinstance(value, Tensor) else value for name, value in constants.items()}
            kinds.add((kernel.fn.__name__, absent, tuple(sorted(named.items()))))

        return launch

    return launcher


@pytest.mark.usefixtures("made")
@pairs(family=FAMILIES, sizes=[{}, {"head_dim": 64}, {"head_dim": 128}], dtype=[torch.float32, torch.bfloat16])
def test_what_is_compiled_serves_any_number_of_rows(
    family: str, sizes: dict[str, int], dtype: torch.dtype, small: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small(family, **sizes).to(dtype)
    plan = step.plan_of(parts_of(model))

    def kinds(rows: int, samples: bool) -> set[Any]:
        found: set[Any] = set()
        with monkeypatch.context() as patch:
            patch.setattr(InterpretedFunction, "__getitem__", recorded(found))
            CapturedStep(model.config, plan, model.device, rows, samples).run()
        return found

    compiled = ROWS_COMPILED
    known = set().union(*(kinds(rows, samples=rows in (1, MANY_ROWS)) for rows in compiled))
    for rows in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512):
        assert kinds(rows, samples=False) <= known
        assert kinds(rows, samples=True) <= known
    # Up to 16, it is up to the sizes of matrices which differ; and of 16 bits, all from 64 are alike.
    for vain in (32, 64, 128, 256) if dtype is torch.float32 else (32,):
        others = (kinds(rows, samples=rows in (1, MANY_ROWS)) for rows in compiled if rows != vain)
        assert not known <= set().union(*others), vain


def run_to_end(engine: Engine, sequences: Collection[Sequence]) -> list[list[int]]:
    """Submit and run them; the tokens of each."""
    for sequence in sequences:
        engine.submit(sequence)
    for _ in range(2000):
        if engine.is_idle:
            break
        engine.step()
    assert engine.is_idle, "some sequence never continues"
    return [*map(generated, sequences)]


def sequence_of(model: Decoder, prompt: Collection[int], params: SamplingParams) -> Sequence:
    return Sequence(model.config, Letters(), prompt, params)


class TestManySequences:
    """In an engine with one memory, whose sequences decode in captured steps."""

    def test_as_alone(self, small: Make, made: list[CapturedStep]) -> None:
        """A captured step computes the last token of a prompt, with the tokens of sequences that decode."""
        model = small()
        cases = [(PROMPT, settings(4)), ([5], settings(3, **SAMPLED)), ([4, 9, 1, 2, 8, 8, 3], settings(3))]
        with plainly():
            alone = [tokens_of(model, *case) for case in cases]
        engine = Engine(model, CacheMemory(model, 10**6), prefill_chunk=5)
        assert run_to_end(engine, [sequence_of(model, *case) for case in cases]) == alone
        assert len(engine.memory.index.pages_in_use()) == 0

    @pytest.mark.parametrize("drafts", [False, True])
    @pytest.mark.parametrize("seed", range(amount(20, 1)))
    def test_arrivals_and_aborts_in_few_pages(
        self, small: Make, light: list[CapturedStep], monkeypatch: pytest.MonkeyPatch, drafts: bool, seed: int
    ) -> None:
        """Sequences are preempted while steps are launched ahead, and enter steps that change."""
        chance, model = random.Random(seed), small()
        cases = [
            (
                [chance.randrange(24) for _ in range(chance.randint(1, 9))],
                settings(chance.randint(1, 12), **chance.choice([{}, {"logprobs": 2}, SAMPLED, SAMPLED_TOP, DISTINCT])),
            )
            for _ in range(10)
        ]
        roomy = CacheMemory(model, 10**6, page_size=4)
        alone = [sequence_of(model, *case) for case in cases]
        for sequence in alone:
            run_to_end(Engine(model, roomy, max_rows=1), [sequence])
        memory = CacheMemory(model, 10 * roomy.pool.page_bytes, page_size=4)
        drafter = drafter_of(drafts_of(alone, chance), Letters()) if drafts else None
        monkeypatch.setattr(Speculation, "_worth", lambda *_: (0.0, MAX_DRAFTS))
        engine = Engine(model, memory, max_rows=chance.choice([2, 4, 7]), prefill_chunk=6, drafter=drafter)
        sequences = [sequence_of(model, *case) for case in cases]
        aborted = [sequence_of(model, *case) for case in cases[:3]]
        coming = [*sequences, *aborted]
        chance.shuffle(coming)
        for _ in range(2000):
            if coming and chance.random() < 0.4:
                engine.submit(coming.pop())
            if chance.random() < 0.1:
                engine.abort([each for each in aborted if each not in coming])
            if not coming and engine.is_idle:
                break
            engine.step()
        for sequence, expected in zip(sequences, alone, strict=True):
            assert sequence.token_ids == expected.token_ids
            assert sequence.logprobs == expected.logprobs
        assert all(sequence.error is None for sequence in sequences)
        assert len(memory.index.pages_in_use()) == 0
        assert drafts or not engine.stats().drafted_tokens
        memory.index.clear()
        assert memory.pool.num_free_pages == memory.pool.num_pages

    def test_log_probabilities(self, small: Make, light: list[CapturedStep]) -> None:
        """Of the sequences with `logprobs`, of as many tokens as each names; they stay in captured steps."""
        model = small()
        cases = [
            (PROMPT, settings(5, logprobs=k, prompt_logprobs=p)) for k, p in ((0, None), (3, None), (None, 1), (2, 2))
        ]
        sequences = [sequence_of(model, *case) for case in cases]
        run_to_end(Engine(model, CacheMemory(model, 10**6)), sequences)
        weight = model.lm_head.weight
        for sequence in sequences:
            assert (sequence.logprobs is None) == (sequence.params.logprobs is None)
            for i, each in enumerate(sequence.logprobs or ()):
                before, token = sequence.token_ids[sequence.prompt_len + i - 1 : sequence.prompt_len + i + 1]
                logits = light_logits(model.embed_tokens.weight[before][None], weight).detach()
                assert [each] == logprobs_of(logits, [token], sequence.params.logprobs or 0)
            assert len(sequence.logprobs or [0] * 5) == 5
            assert len(sequence.prompt_logprobs or [0] * 3) == 3
        assert max(step.rows for step in light) == 4

    def test_preemptions_happen(self, small: Make, light: list[CapturedStep]) -> None:
        model = small()
        page = CacheMemory(model, 10**6, page_size=4).pool.page_bytes
        engine = Engine(model, CacheMemory(model, 8 * page, page_size=4))
        run_to_end(engine, [sequence_of(model, [i, 1 + i, 2], settings(12)) for i in range(4)])
        assert engine.stats().preemptions > 0

    @pytest.mark.parametrize("at_once", [False, True])
    def test_a_step_that_changes_after_an_end(self, small: Make, light: list[CapturedStep], at_once: bool) -> None:
        """A sequence that ends by its own token has a step launched ahead; the next one samples, and waits for that."""
        free = tokens_of(small(), PROMPT, settings(6))
        model = small(eos_token_ids=(free[3],))
        first = sequence_of(model, PROMPT, settings(6, ignore_eos=False))
        second = sequence_of(model, [5, 6, 7], settings(4, temperature=1.0, seed=3))
        engine = Engine(model, CacheMemory(model, 10**6), max_rows=1)
        if at_once:
            run_to_end(engine, [first, second])
        else:
            run_to_end(engine, [first])
            run_to_end(engine, [second])
        assert (first.finish_reason, len(second.token_times)) == ("eos", 4)

    def test_a_gpu_that_fails(self, small: Make, light: list[CapturedStep], monkeypatch: pytest.MonkeyPatch) -> None:
        """Everything after the first error fails too: all sequences get the first error, and nobody waits for ever."""
        left, drop = [2], CapturedStep.drop

        def synchronize(_: Event) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise RuntimeError("device-side assert")

        def dropped(step: CapturedStep, slot: int) -> None:
            if left[0] < 0:
                raise RuntimeError("device-side assert, again")
            drop(step, slot)

        monkeypatch.setattr(Event, "synchronize", synchronize)
        monkeypatch.setattr(CapturedStep, "drop", dropped)
        llm = LLM(small(), Letters(), cache_memory=10**6)
        handles = [llm.submit(prompt, settings(9)) for prompt in ([1, 2, 3, 4], PROMPT)]
        for handle in handles:
            with pytest.raises(
                RuntimeError, match=r"^the engine has failed: the GPU failed while it decoded .*assert$"
            ):
                handle.result(timeout=300)


@pytest.mark.parametrize("dtype", step.DTYPES, ids=str)
@pytest.mark.parametrize("gated", [False, True], ids=["", "gated"])
@pytest.mark.parametrize("memory", [101376, 166912, 232448])
def test_a_product_of_few_rows_fits_the_memory(
    memory: int, gated: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the batch: what a program loads ahead is to fit what it can have."""
    launched: list[dict[str, Any]] = []

    class Kernel:
        def __getitem__(self, grid: Any) -> Callable[..., None]:
            return lambda *_, **constants: launched.append(constants)

    monkeypatch.setattr(gemm, "gemm_small", Kernel())
    monkeypatch.setattr(gemm, "_gemv_sizes", lambda *_: None)
    monkeypatch.setattr(gemm, "_torch_is_fast", lambda *_: False)
    monkeypatch.setattr(gemm, "shared_memory", lambda _: memory)
    monkeypatch.setattr(gemm, "num_sms", lambda _: 64)
    stages: set[int] = set()
    for n, k in ((1024, 4096), (2048, 1000), (28672, 4096), (4096, 14336)):
        with torch.device("meta"):
            linear = Linear(k, n).to(dtype)
        for batch in (2, 16, 17, 32, 33, 64, 65, 128):
            x = torch.empty(batch, k, dtype=dtype, device="meta")
            activation = "silu" if gated else ""
            gemm.gemm(linear, gemm.GemmInput(x), x, activation=activation, gated=gated)
            used = launched.pop()
            assert used["STAGES"] * used["BLOCK_K"] * (used["BLOCK_N"] + used["BLOCK_B"]) * dtype.itemsize <= memory
            assert used["BLOCK_K"] >= 16  # what a product of matrices takes at least
            left_over = n % used["BLOCK_N"], k - used["LENGTH"] * used["SLICES"]
            assert used["EVEN"] == (left_over == (0, 0))
            assert used["PREFETCHED"] <= used["LENGTH"]
            stages.add(used["STAGES"])
    assert len(stages) > 1 or dtype is torch.float32


def test_a_scored_prompt_of_one_token(light: list[CapturedStep], small: Make) -> None:
    """Nothing is left to compute or to generate: it ends, and enters no captured step."""
    model = small()
    engine = Engine(model, CacheMemory(model, 10**6))
    sequence = Sequence(model.config, Letters(), [5], SamplingParams(max_new_tokens=0, prompt_logprobs=0))
    engine.submit(sequence)
    for _ in range(2):
        engine.step()
    assert sequence.is_finished
    assert sequence.prompt_logprobs == [None]
    assert not light


def test_drafts_wait_for_steps_launched_ahead(light: list[CapturedStep], small: Make) -> None:
    """Those that follow tokens which were read only while a step was launched are dropped, and asked for again."""
    model, params = small(), SamplingParams(max_new_tokens=8, ignore_eos=True)
    expected = generate(model, Letters(), PROMPT, params).token_ids
    engine = Engine(model, CacheMemory(model, 10**6))
    sequence = Sequence(model.config, Letters(), PROMPT, params)
    engine.submit(sequence)
    while len(sequence.token_times) < 3:
        engine.step()
    for drafted, accepted in ((0, 0), (3, 2)):
        done = len(sequence.token_times)
        right = expected[done : done + 2]
        sequence.draft_token_ids = [*right, (expected[done + 2] + 1) % model.config.vocab_size]
        engine.step()
        assert (sequence.num_drafted, sequence.num_accepted) == (drafted, accepted)
        assert len(sequence.token_times) == done + 1 + accepted
        assert sequence.is_captured
    while not engine.is_idle:
        engine.step()
    assert sequence.token_ids[3:] == expected


def drafts_of(alone: Collection[Sequence], chance: random.Random) -> DrafterFunction:
    """Proposes what these sequences have said, some of it wrong, or nothing."""
    texts = {tuple(each.prompt): each.token_ids for each in alone}

    def propose(sequence: Sequence, count: int) -> list[int]:
        if chance.random() < 0.3:
            return []
        right = texts[tuple(sequence.prompt)][sequence.num_tokens :][: chance.randint(1, count)]
        return [token if chance.random() < 0.8 else (token + 1) % 24 for token in right]

    return propose


class TestDrafts:
    """Verified in captured steps."""

    @pytest.mark.parametrize(
        ("family", "options"),
        amount(
            [(family, options) for family in FAMILIES for options in ({}, SAMPLED_TOP, DISTINCT)],
            [("llama", SAMPLED_TOP), ("gemma3", {}), ("qwen3", DISTINCT)],
        ),
    )
    def test_change_no_text(
        self,
        small: Make,
        made: list[CapturedStep],
        monkeypatch: pytest.MonkeyPatch,
        family: str,
        options: dict[str, Any],
    ) -> None:
        monkeypatch.setattr(Speculation, "_worth", lambda *_: (0.0, MAX_DRAFTS))
        model = small(family)
        cases = [(PROMPT, settings(14, **options)), ([5], settings(9, **options)), ([4, 9, 1, 8], settings(6))]
        alone = [sequence_of(model, *case) for case in cases]
        for sequence in alone:
            run_to_end(Engine(model, CacheMemory(model, 10**6)), [sequence])
        drafter = drafter_of(drafts_of(alone, random.Random(1)), Letters())
        engine = Engine(model, CacheMemory(model, 10**6), drafter=drafter)
        sequences = [sequence_of(model, *case) for case in cases]
        run_to_end(engine, sequences)
        for sequence, expected in zip(sequences, alone, strict=True):
            assert sequence.token_ids == expected.token_ids
            # Here the order of sums depends on the number of rows.
            logprobs, others = ([each.logprob for each in of.logprobs or ()] for of in (sequence, expected))
            assert logprobs == pytest.approx(others, abs=1e-5)
        assert 0 < sum(each.num_accepted for each in sequences) < sum(each.num_drafted for each in sequences)
        assert any(step.verifications for step in made)
        assert len(engine.memory.index.pages_in_use()) == 0

    def test_out_of_memory_for_their_steps(
        self, small: Make, light: list[CapturedStep], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Then there are none, and the rows are as they were."""

        def out_of_memory(*_: Any) -> Any:
            raise torch.OutOfMemoryError("no memory")

        model, params = small(), settings(12, **SAMPLED)
        alone = sequence_of(model, PROMPT, params)
        with Engine(model, CacheMemory(model, 10**6)) as engine:
            run_to_end(engine, [alone])
        monkeypatch.setattr(Speculation, "_worth", lambda *_: (0.0, MAX_DRAFTS))
        monkeypatch.setattr(captured, "record_graph", out_of_memory)
        monkeypatch.setattr(captured, "_capturing", True)
        light[0].captured = True
        drafter = drafter_of(drafts_of([alone], random.Random(1)), Letters())
        engine, sequence = Engine(model, CacheMemory(model, 10**6), drafter=drafter), sequence_of(model, PROMPT, params)
        run_to_end(engine, [sequence])
        assert sequence.token_ids == alone.token_ids
        assert {*light[0].verifications.values()} == {None}
        assert sequence.num_drafted == 0

    def test_a_ring_knows_what_wrong_ones_overwrote(
        self, small: Make, made: list[CapturedStep], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It goes back as far as its keys are there, and no further."""
        monkeypatch.setattr(Speculation, "_worth", lambda *_: (0.0, MAX_DRAFTS))
        model, prompt = small("gemma3"), [*range(1, 9)]
        cache = make_cache(model, SlidingCache, 64, prefill_chunk=10)
        options = {"cache": cache, "prefill_chunk": 10, "speculate": lambda _, count: [5] * count}
        running = stream(model, Letters(), prompt, settings(30), **options)
        tokens = [*prompt, *(token.token_id for token in islice(running, 18))]
        running.close()
        assert made[0].verifications
        for back in range(1, 12):
            rewound, again = copy.deepcopy(cache), [*tokens[: cache.seq_len - back], 7]
            try:
                rewound.truncate(cache.seq_len - back)
            except ValueError:
                break
            with plainly():
                expected = tokens_of(model, again, settings(3))
                assert tokens_of(model, again, settings(3), cache=rewound, prefill_chunk=10) == expected
        assert 1 < back < 11

    def test_a_model_that_is_hooked_on_the_way(
        self, small: Make, made: list[CapturedStep], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model = small()
        alone = sequence_of(model, PROMPT, settings(14))
        run_to_end(Engine(model, CacheMemory(model, 10**6)), [alone])
        monkeypatch.setattr(Speculation, "_worth", lambda *_: (0.0, MAX_DRAFTS))
        drafter = drafter_of(drafts_of([alone], random.Random(1)), Letters())
        engine, sequence = (
            Engine(model, CacheMemory(model, 10**6), drafter=drafter),
            sequence_of(model, PROMPT, settings(14)),
        )
        engine.submit(sequence)
        for _ in range(4):
            engine.step()
        hook = model.layers[0].register_forward_hook(lambda *_: None)
        engine.step()
        hook.remove()
        run_to_end(engine, [])
        assert sequence.error is None
        assert sequence.token_ids == alone.token_ids
