"""Captured decode steps from the host's side: which are made, what they are told, and what they leave behind.

There is no GPU here: the kernels run in Triton's interpreter, each step at its launch, and nothing is captured. Where
only the host's side matters, `light` leaves the model out of a step.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from interpreted import hurried, poison
from mocks import Letters
from torch import Tensor, nn

pytest.importorskip("triton", reason="needs Triton, which is there on Linux alone")

from infer import GrowingCache, KVCache, SamplingParams, SlidingCache, generate, stream
from infer.cache import BaseCache, Cache, TracedCache
from infer.cache.debug import debugged
from infer.config import RopeConfig
from infer.engine import graph
from infer.engine.batch import generate_batch
from infer.engine.request import Request
from infer.engine.result import GenerationResult
from infer.models.common import Decoder
from infer.models.llama import Llama
from infer.ops import fused, gpu_attention, gpu_product
from infer.nn.linear import Embedding, Linear
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
DISTINCT = {"temperature": 1.3, "seed": 9, "presence_penalty": 50.0}  # no token twice
Make = Callable[..., Decoder]


class Device(str):
    """Where tensors go to the CPU, while it looks like a GPU."""

    type = "cuda"


class Event:
    """Of work that is done when it is launched."""

    def record(self) -> None: ...
    def wait(self) -> None: ...
    def synchronize(self) -> None: ...


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[graph.Captured]:
    """Models built from now on decode as on a GPU. Returns the steps made for them."""

    def empty(*shape: int, pin_memory: bool = False, **options: Any) -> Tensor:
        return torch.empty(*shape, **options)

    changed = {"empty": empty, "cuda": SimpleNamespace(Event=Event)}
    monkeypatch.setattr(graph, "torch", SimpleNamespace(**vars(torch) | changed))
    monkeypatch.setattr(graph, "_capturing", False)
    monkeypatch.setattr(Decoder, "device", property(lambda _: Device("cpu")))
    monkeypatch.setattr(fused, "available", lambda *_: True)
    monkeypatch.setattr(fused, "readable", lambda _: True)
    monkeypatch.setattr(fused, "on", lambda _: nullcontext())
    # Rows without a token are computed from whatever memory holds: from NaN, they show in any other.
    poison(monkeypatch, fused, gpu_attention, gpu_product)
    # Few programs, which the interpreter takes long for; and the modules themselves are the reference.
    monkeypatch.setattr(gpu_attention, "BUSY", 8)
    hurried(monkeypatch)
    monkeypatch.setattr("infer.backend.cpu.plan.available", lambda *_: False)
    monkeypatch.setattr("infer.backend.cpu.functions.can_attend", lambda *_: False)
    monkeypatch.setattr(Decoder, "_gpu_positions", lambda *_: None)
    steps: list[graph.Captured] = []
    make = graph.Captured.__init__

    def counted(self: graph.Captured, *args: Any) -> None:
        make(self, *args)
        steps.append(self)

    monkeypatch.setattr(graph.Captured, "__init__", counted)
    return steps


@pytest.fixture
def light(made: list[graph.Captured], monkeypatch: pytest.MonkeyPatch) -> list[graph.Captured]:
    """Steps go from the embedding to the head: no attention, and nothing is written to a cache."""
    monkeypatch.setattr(fused, "launch", lambda plan, fed, *_: fed.x @ plan.head.linear.weight.T)
    return made


@contextmanager
def plainly() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graph, "decoding", lambda *_, **__: None)
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


def tokens_of(model: Decoder, prompt: Sequence[int], params: SamplingParams, **options: Any) -> list[int]:
    return [token.token_id for token in stream(model, Letters(), prompt, params, **options)]


def outcome(result: GenerationResult) -> tuple[Any, ...]:
    return result.token_ids, result.text, result.finish_reason


def idle(steps: Sequence[graph.Captured]) -> bool:
    return bool(steps) and not any(step.busy for step in steps)


class TestTokens:
    """As the modules choose them."""

    @pytest.mark.parametrize("family", FAMILIES)
    @pytest.mark.parametrize("options", [{}, SAMPLED], ids=["greedy", "sampled"])
    def test_of_every_family(
        self, small: Make, made: list[graph.Captured], family: str, options: dict[str, Any]
    ) -> None:
        model, params = small(family), settings(4, **options)
        with plainly():
            expected = generate(model, Letters(), PROMPT, params)
            assert not made
        assert outcome(generate(model, Letters(), PROMPT, params)) == outcome(expected)
        assert [(step.rows, step.samples) for step in made] == [(1, bool(options))]
        assert idle(made)

    @pytest.mark.parametrize("family", ["llama", "gemma3"])
    def test_of_rows_that_end_one_by_one(self, small: Make, made: list[graph.Captured], family: str) -> None:
        """In prompts' own order, whatever rows they are: 4 of 5 go on after their prompt, then 2, then 1."""
        prompts = [[4], [1, 2, 3], [7, 8, 9, 10, 11, 12], [2], [5, 6]]
        with plainly():
            eos = tokens_of(small(family), prompts[2], settings(3, **DISTINCT))[2]
            stop = Letters().decode(tokens_of(small(family), prompts[1], settings(2, **SAMPLED)))
        params = [
            settings(1),
            settings(9, **SAMPLED, stop=stop),
            settings(9, **DISTINCT, ignore_eos=False),
            settings(4, top_k=3, top_p=0.9, min_p=0.1, temperature=0.8, seed=1),
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
        assert [step.rows for step in made] == [4, 2, 1]
        assert idle(made)

    @pytest.mark.parametrize(("prompt", "count", "steps"), [(PROMPT, 1, 0), (PROMPT, 2, 1), ([3], 1, 1), ([3], 2, 1)])
    def test_of_few(self, small: Make, made: list[graph.Captured], prompt: list[int], count: int, steps: int) -> None:
        """No step is made where the prompt's own pass gives all; one is a pass for a prompt of one token."""
        model, params = small(), settings(count)
        with plainly():
            expected = tokens_of(model, prompt, params)
        assert tokens_of(model, prompt, params) == expected
        assert len(made) == steps

    def test_do_not_depend_on_who_ran_before(self, small: Make, light: list[graph.Captured]) -> None:
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
        ("kind", "options"), [(KVCache, {}), (SlidingCache, {"prefill_chunk": 1})], ids=["whole", "ring"]
    )
    def test_a_conversation(
        self, small: Make, made: list[graph.Captured], kind: type[BaseCache], options: dict[str, Any]
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
    def test_recompute_beyond_the_room(self, small: Make, made: list[graph.Captured], context: int) -> None:
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

    def test_rows_beyond_the_context(self, small: Make, light: list[graph.Captured]) -> None:
        """A row that has used it up goes on alone, and leaves the others' tokens as they are."""
        model = small(max_position_embeddings=6)
        params = settings(4)
        results = generate_batch(model, Letters(), [[1, 2, 3, 4], [5, 6]], params, on_full="recompute")
        assert [result.generated_tokens for result in results] == [4, 4]
        assert results[1].token_ids == tokens_of(model, [5, 6], params)
        assert idle(light)

    @pytest.mark.parametrize("kind", [KVCache, SlidingCache])
    def test_filled_to_the_last_position(self, small: Make, light: list[graph.Captured], kind: type[BaseCache]) -> None:
        model = small("gemma3")
        cache = make_cache(model, kind, 7)
        assert len(tokens_of(model, PROMPT, settings(4), cache=cache)) == 4
        assert cache.seq_len == 6  # the last token is not fed
        assert len(tokens_of(model, PROMPT, settings(6), cache=make_cache(model, kind, 7), on_full="recompute")) == 6

    def test_a_ring_that_was_written_ahead(self, small: Make, light: list[graph.Captured]) -> None:
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
    def test_in_other_hands(self, small: Make, light: list[graph.Captured], kind: type[BaseCache], taken: int) -> None:
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
    def model(self, small: Make, light: list[graph.Captured]) -> Decoder:
        """Which has had a run."""
        model = small()
        tokens_of(model, PROMPT, settings(3))
        assert len(light) == 1
        return model

    def test_for_other_prompts_and_lengths(self, model: Decoder, light: list[graph.Captured]) -> None:
        tokens_of(model, [5] * 9, settings(6))
        assert len(light) == 1

    @pytest.mark.parametrize("options", [{"temperature": 1.0}, {"presence_penalty": 1.0}, {"logit_bias": {3: 1.0}}])
    def test_but_not_greedy_ones_for_other_settings(
        self, model: Decoder, light: list[graph.Captured], options: dict[str, Any]
    ) -> None:
        for _ in range(2):
            tokens_of(model, PROMPT, settings(3, **options))
        assert [step.samples for step in light] == [False, True]

    def test_while_the_model_is_as_it_was(self, model: Decoder, light: list[graph.Captured], small: Make) -> None:
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
        self, model: Decoder, light: list[graph.Captured], change: Callable[[Decoder], None]
    ) -> None:
        change(model)
        for _ in range(2):
            tokens_of(model, PROMPT, settings(3))
        assert len(light) == 2
        assert graph._captured[model] == light[1:]  # the other is of no use any more

    def test_but_not_two_at_a_time(self, model: Decoder, light: list[graph.Captured]) -> None:
        first = tokens_of(model, [4], settings(5))
        second = tokens_of(model, [9], settings(5))
        streams = [stream(model, Letters(), prompt, settings(5)) for prompt in ([4], [9])]
        pairs = [(a.token_id, b.token_id) for a, b in zip(*streams, strict=True)]
        assert pairs == list(zip(first, second, strict=True))
        assert len(light) == 2
        assert idle(light)

    def test_for_fewer_rows(self, small: Make, light: list[graph.Captured], monkeypatch: pytest.MonkeyPatch) -> None:
        """Those that are left out are, also where the run before has left them going."""
        model, positions = small(), []
        launch = graph.Captured.launch

        def noted(self: graph.Captured) -> None:
            positions.append(self.positions.tolist())
            launch(self)

        generate_batch(model, Letters(), [PROMPT] * 4, [settings(2), settings(2), settings(9), settings(9)])
        assert light[0].positions[3] >= 0
        monkeypatch.setattr(graph.Captured, "launch", noted)
        generate_batch(model, Letters(), [[1], [2, 3], [4]], settings(3))
        assert positions == [[1, 2, 1, -1], [2, 3, 2, -1]]
        assert [step.rows for step in light] == [4, 2]

    def test_not_beyond_the_model(self, small: Make, light: list[graph.Captured]) -> None:
        model = small()
        tokens_of(model, PROMPT, settings(3))
        kept = len(graph._captured)
        del model
        gc.collect()
        assert len(graph._captured) < kept


class Refuses:
    """A tokenizer with an error of its own, at the second token that is generated."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def decode(self, token_ids: list[int]) -> str:
        if len(token_ids) > 1:
            raise self.error
        return "a"


class TestStepsAreGivenBack:
    def test_when_a_stream_is_closed(self, small: Make, light: list[graph.Captured]) -> None:
        tokens = stream(small(), Letters(), PROMPT, settings(6))
        assert len(list(islice(tokens, 3))) == 3
        assert light[0].busy
        tokens.close()
        assert idle(light)

    def test_after_an_error_of_whoever_takes_the_tokens(self, small: Make, light: list[graph.Captured]) -> None:
        tokens = stream(small(), Letters(), PROMPT, settings(6))
        assert len(list(islice(tokens, 3))) == 3
        with pytest.raises(KeyError, match="mine"):
            tokens.throw(KeyError("mine"))
        assert idle(light)

    def test_after_an_error_while_loading(
        self, small: Make, light: list[graph.Captured], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def load(*_: Any) -> None:
            raise MemoryError("no more")

        model = small()
        cache = make_cache(model)
        with monkeypatch.context() as patch:
            patch.setattr(graph.Captured, "load", load)
            with pytest.raises(MemoryError, match="no more"):
                tokens_of(model, PROMPT, settings(3), cache=cache)
        assert idle(light)
        assert cache.seq_len == len(PROMPT)
        tokens_of(model, PROMPT, settings(3))
        assert len(light) == 1

    @pytest.mark.parametrize("kind", [ValueError, RuntimeError])
    def test_after_an_error_of_the_tokenizer(
        self, small: Make, light: list[graph.Captured], kind: type[Exception]
    ) -> None:
        """Which is not disguised."""
        model, error = small(), kind("a tokenizer's own")
        with pytest.raises(kind) as raised:
            list(stream(model, Refuses(error), PROMPT, settings(6)))
        assert raised.value is error
        with pytest.raises(kind) as raised:
            generate_batch(model, Refuses(error), [PROMPT, [4]], settings(6))
        assert raised.value is error
        assert [step.rows for step in light] == [1, 2]
        assert idle(light)


class TestNoNumbers:
    """A model whose embedding of some token is NaN, so that no token can follow it."""

    @pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
    @pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")
    def test_are_refused_at_their_position(self, small: Make, made: list[graph.Captured]) -> None:
        model, params = small(), settings(4, **DISTINCT, logit_bias=dict.fromkeys(PROMPT, -99.0))
        with plainly():
            expected = tokens_of(model, PROMPT, params)
        weight = model.embed_tokens.weight
        before = weight.data.clone()
        weight[expected[1]] = torch.nan
        cache = make_cache(model)
        tokens = stream(model, Letters(), PROMPT, params, cache=cache)
        assert [token.token_id for token in islice(tokens, 2)] == expected[:2]
        with pytest.raises(ValueError, match=r"^no token can be chosen for position 5: the logits hold a NaN"):
            next(tokens)
        assert idle(made)
        weight.copy_(before)
        cache.reset()
        assert tokens_of(model, PROMPT, params, cache=cache) == expected
        assert len(made) == 1

    def test_are_refused_by_the_prompt(self, small: Make, light: list[graph.Captured]) -> None:
        """Whatever row it is: the first is done with its prompt."""
        model = small()
        with plainly():
            follows = {token: tokens_of(model, [token], settings(1))[0] for token in range(24)}
        prompt, bad = next((a, b) for a, b in follows.items() if b not in (a, 4, follows[4]))
        model.embed_tokens.weight[bad] = torch.nan
        params = [settings(1), settings(2), settings(4)]
        with pytest.raises(ValueError, match=r"^prompt 2: no token can be chosen for position 2"):
            generate_batch(model, Letters(), [[4], [4], [prompt]], params)
        assert idle(light)


class TestAFailingGPU:
    @pytest.fixture
    def failing(self, light: list[graph.Captured], monkeypatch: pytest.MonkeyPatch) -> None:
        """From the third time that it is waited for."""
        left = iter(range(2))

        def synchronize(_: Event) -> None:
            if next(left, None) is None:
                raise RuntimeError("device-side assert")

        monkeypatch.setattr(Event, "synchronize", synchronize)

    @pytest.mark.usefixtures("failing")
    def test_a_stream(self, small: Make, light: list[graph.Captured]) -> None:
        model = small()
        cache = make_cache(model)
        tokens = stream(model, Letters(), PROMPT, settings(9), cache=cache)
        assert len(list(islice(tokens, 3))) == 3
        with pytest.raises(RuntimeError, match=r"prompt 0 at position 5: device-side assert$"):
            next(tokens)
        assert cache.seq_len == 5
        assert idle(light)

    @pytest.mark.usefixtures("failing")
    def test_a_batch(self, small: Make, light: list[graph.Captured]) -> None:
        """By what the prompts are numbered, of which the first is done."""
        prompts = [[4], [1, 2, 3, 4], PROMPT]
        with pytest.raises(RuntimeError, match=r"prompt 1 at position 6, prompt 2 at position 5: device-side assert$"):
            generate_batch(small(), Letters(), prompts, [settings(1), settings(9), settings(9)])
        assert idle(light)


def taken(model: Decoder, *caches: Cache) -> bool:
    """Whether captured steps would decode behind a prompt that the caches hold all of but a token."""
    caches = caches or (make_cache(model),)
    requests = [Request(model.config, Letters(), [3], settings(3)) for _ in caches]
    return graph.decoding(model, requests, caches) is not None


def hooked(module: nn.Module) -> None:
    module.register_forward_hook(lambda *_: None)


def prehooked(module: nn.Module) -> None:
    module.register_forward_pre_hook(lambda *_: None)


def patched(module: nn.Module, name: str = "forward") -> None:
    method = getattr(module, name)
    setattr(module, name, lambda *args, **options: method(*args, **options))


class TestLeftToTheModel:
    def test_on_a_cpu(self, small: Make) -> None:
        assert not taken(small())
        assert graph.decoding(object(), [], []) is None

    @pytest.mark.usefixtures("made")
    @pytest.mark.parametrize("family", FAMILIES)
    def test_not_as_it_is(self, small: Make, family: str) -> None:
        assert taken(small(family))

    @pytest.mark.usefixtures("made")
    @pytest.mark.parametrize(
        "change",
        [
            pytest.param(hooked, id="hook"),
            pytest.param(prehooked, id="pre-hook"),
            pytest.param(lambda model: hooked(model.embed_tokens), id="embedding's hook"),
            pytest.param(lambda model: prehooked(model.layers[0].mlp), id="layer's pre-hook"),
            pytest.param(patched, id="forward"),
            pytest.param(lambda model: patched(model, "embed"), id="embed"),
            pytest.param(lambda model: patched(model, "embedding_parts"), id="embedding_parts"),
            pytest.param(lambda model: patched(model, "head"), id="head"),
            pytest.param(lambda model: patched(model.embed_tokens), id="embedding's forward"),
            pytest.param(lambda model: patched(model.layers[0].self_attn), id="attention's forward"),
        ],
    )
    def test_changed(self, small: Make, change: Callable[[Decoder], None]) -> None:
        model = small()
        assert taken(model)
        change(model)
        assert not taken(model)

    @pytest.mark.usefixtures("made")
    @pytest.mark.parametrize(
        ("kind", "name"),
        [
            (Decoder, "forward"),
            (Llama, "forward"),
            (Llama, "embed"),
            (Decoder, "embedding_parts"),
            (Embedding, "forward"),
        ],
    )
    def test_of_a_changed_class(self, small: Make, kind: type, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        model, method = small(), getattr(kind, name)
        assert taken(model)
        monkeypatch.setattr(kind, name, lambda *args, **options: method(*args, **options))
        assert not taken(model)

    @pytest.mark.usefixtures("made")
    @pytest.mark.parametrize(
        "change",
        [
            pytest.param(lambda weight: weight.double(), id="other digits"),
            pytest.param(lambda weight: weight.T.contiguous().T, id="strides"),
            pytest.param(lambda weight: torch.cat([weight, weight]), id="more vectors"),
            pytest.param(lambda weight: weight[:-1], id="fewer vectors"),
        ],
    )
    @pytest.mark.parametrize("name", ["embed_tokens", "embed_positions"])
    def test_with_vectors_that_the_kernel_cannot_read(
        self, small: Make, name: str, change: Callable[[Tensor], Tensor]
    ) -> None:
        model = small("gpt2", tie_word_embeddings=False)
        assert taken(model)
        embedding = getattr(model, name)
        embedding.weight = torch.nn.Parameter(change(embedding.weight), requires_grad=False)
        assert not taken(model)

    @pytest.mark.usefixtures("made")
    @pytest.mark.parametrize("name", ["embed_tokens", "embed_positions"])
    def test_with_an_embedding_of_its_own(self, small: Make, name: str) -> None:
        class Louder(Embedding):
            def forward(self, ids: Tensor) -> Tensor:
                return super().forward(ids) * 2

        model = small("gpt2")
        own = Louder(1, 1)
        own.weight = getattr(model, name).weight
        setattr(model, name, own)
        assert not taken(model)

    @pytest.mark.usefixtures("made")
    def test_whose_kind_embeds_in_its_own_way(self, small: Make, monkeypatch: pytest.MonkeyPatch) -> None:
        class Louder(Llama):
            def embed(self, *args: Any) -> Tensor:
                return super().embed(*args) * 2

        monkeypatch.setitem(graph.KNOWN, Louder, graph._known(Louder))
        assert not taken(Louder(small().config).eval().requires_grad_(False))

    @pytest.mark.usefixtures("made")
    def test_with_vectors_that_are_computed(self, small: Make) -> None:
        model = small(tie_word_embeddings=False)
        torch.nn.utils.parametrizations.weight_norm(model.embed_tokens)
        assert not taken(model)

    @pytest.mark.usefixtures("made")
    def test_of_a_subclass(self, small: Make) -> None:
        class Louder(Llama):
            def forward(self, *args: Any, **options: Any) -> Tensor:
                return super().forward(*args, **options) * 2

        assert not taken(Louder(small().config).eval().requires_grad_(False))

    @pytest.mark.usefixtures("made")
    def test_with_a_cache_that_must_be_asked(self, small: Make, monkeypatch: pytest.MonkeyPatch) -> None:
        model = small()
        cache = make_cache(model)
        assert not taken(model, TracedCache(cache, [0]))
        assert not taken(model, make_cache(model, GrowingCache))
        assert not taken(model, cache, make_cache(model, GrowingCache))
        assert not taken(model, make_cache(small(num_hidden_layers=2)))
        monkeypatch.setenv("KV_DEBUG", "1")
        assert not taken(model, debugged(cache))
        assert taken(model, cache)

    @pytest.mark.usefixtures("made")
    def test_with_a_vocabulary_that_is_too_large(self, small: Make, monkeypatch: pytest.MonkeyPatch) -> None:
        model = small()
        monkeypatch.setattr("infer.backend.gpu.sampling.MAX_VOCAB", model.config.vocab_size)
        assert taken(model)
        monkeypatch.setattr("infer.backend.gpu.sampling.MAX_VOCAB", model.config.vocab_size - 1)
        assert not taken(model)


class Recorded:
    """Stands for modules of kernels, a module, or a kernel: notes what would be launched, but for sizes and data."""

    def __init__(self, kinds: set[Any], name: str = "") -> None:
        self._kinds, self._name = kinds, name

    def __getattr__(self, name: str) -> Recorded:
        return Recorded(self._kinds, f"{self._name}.{name}")

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **constants: Any) -> None:
            absent = tuple(arg is None for arg in args)
            named = {name: "data" if isinstance(value, Tensor) else value for name, value in constants.items()}
            self._kinds.add((self._name, absent, tuple(sorted(named.items()))))

        return launch


@pytest.mark.usefixtures("made")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", [{}, {"head_dim": 64}, {"head_dim": 128}], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_compiled_serves_any_number_of_rows(
    family: str, sizes: dict[str, int], dtype: torch.dtype, small: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small(family, **sizes).to(dtype)
    plan = model.fused_plan()
    assert plan is not None

    def kinds(rows: int, samples: bool) -> set[Any]:
        found: set[Any] = set()
        with monkeypatch.context() as patch:
            patch.setattr("infer.kernels.gpu_modules", lambda: Recorded(found))
            graph.Captured(model, plan, rows, samples).run()
        return found

    compiled = fused.ROWS_COMPILED
    known = set().union(*(kinds(rows, samples=rows == 1) for rows in compiled))
    for rows in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512):
        assert kinds(rows, samples=False) <= known
        assert kinds(rows, samples=True) <= known
    for vain in (32, 64, 128, 256):  # up to 16, it is up to the sizes of matrices which differ
        others = (kinds(rows, samples=rows == 1) for rows in compiled if rows != vain)
        assert not known <= set().union(*others), vain


@pytest.mark.parametrize("dtype", fused.DTYPES, ids=str)
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

    modules = SimpleNamespace(rows=SimpleNamespace(few_rows=Kernel()))
    monkeypatch.setattr("infer.kernels.gpu_modules", lambda: modules)
    monkeypatch.setattr(gpu_product, "_held", lambda *_: None)
    monkeypatch.setattr(gpu_product, "shared_memory", lambda _: memory)
    monkeypatch.setattr(gpu_product, "processors", lambda _: 64)
    stages: set[int] = set()
    for n, k in ((1024, 4096), (2048, 1000), (28672, 4096), (4096, 14336)):
        with torch.device("meta"):
            linear = Linear(k, n).to(dtype)
        for batch in (2, 16, 17, 32, 33, 64, 65, 128):
            x = torch.empty(batch, k, dtype=dtype, device="meta")
            activation = "silu" if gated else ""
            gpu_product.product(linear, gpu_product.Normed(x), x, activation=activation, gated=gated)
            used = launched.pop()
            assert used["STAGES"] * used["BLOCK_K"] * (used["BLOCK_N"] + used["BLOCK_B"]) * dtype.itemsize <= memory
            assert used["BLOCK_K"] >= 16  # what a product of matrices takes at least
            left_over = n % used["BLOCK_N"], k - used["LENGTH"] * used["SLICES"]
            assert used["EVEN"] == (left_over == (0, 0))
            assert used["FETCHED"] <= used["LENGTH"]
            stages.add(used["STAGES"])
    assert len(stages) > 1 or dtype is torch.float32
