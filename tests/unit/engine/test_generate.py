"""Generation with mock models, then with tiny real ones."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from mocks import CACHES, Letters, MockModel, MockTokenizer, UniformMockModel
from tiny import FAMILIES
from torch import Tensor, nn

from infer import GenerationResult, KVCache, SamplingParams, SlidingCache, Trace, generate, prefill, stream
from infer.cache import BaseCache, NoCache, TracedCache
from infer.compat.seeds import allocate_kv_cache, generate_ids_cached, generate_ids_greedy_cached
from infer.engine.model import make_cache, step
from infer.engine.result import Timing
from infer.models.common import Decoder

WORDS = ["Hello", " wor", "ld", " ST", "OP", "!", "?", " again", "<eos>", "."]
WINDOWS = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 5}
USE_CACHE = pytest.mark.parametrize("use_kv_cache", [True, False], ids=["cached", "uncached"])


def run(model: Any, prompt: list[int] | None = None, *, words: list[str] = WORDS, **options: Any) -> GenerationResult:
    """Generate with a mock tokenizer; options of `generate` and of `SamplingParams` alike."""
    own = {name: options.pop(name) for name in ("device", "use_kv_cache", "cache", "prefill_chunk") if name in options}
    return generate(model, MockTokenizer(words), prompt or [1, 2], SamplingParams(**options), **own)


def letters(model: Decoder) -> list[str]:
    return [chr(ord("A") + i) for i in range(model.config.vocab_size)]


def empty(cls: type[BaseCache], model: Decoder, size: int = 64, **options: Any) -> BaseCache:
    return cls.from_model_config(model.config, size, dtype="float32", device="cpu", **options)


class ForeignCache:
    """Somebody's own, which says nothing of what it stores."""

    seq_len = 0
    capacity = 40


class TestFinish:
    @USE_CACHE
    def test_length(self, use_kv_cache: bool) -> None:
        model = MockModel(3)
        result = run(model, max_new_tokens=5, use_kv_cache=use_kv_cache)
        assert result.token_ids == [3] * 5
        assert result.text == " ST" * 5
        assert result.finish_reason == "length"
        assert (result.prompt_token_ids, result.prompt_tokens, result.generated_tokens) == ([1, 2], 2, 5)
        assert model.calls == 5

    @USE_CACHE
    def test_eos(self, use_kv_cache: bool) -> None:
        model = MockModel(0, 1, 8, 2, eos_token_ids=(8, 9))
        result = run(model, max_new_tokens=10, use_kv_cache=use_kv_cache)
        assert result.token_ids == [0, 1, 8]
        assert result.text == "Hello wor"  # without the end-of-sequence token
        assert result.finish_reason == "eos"
        assert model.calls == 3

    def test_second_eos(self) -> None:
        assert run(MockModel(0, 9, eos_token_ids=(8, 9)), max_new_tokens=10).finish_reason == "eos"

    def test_ignore_eos(self) -> None:
        result = run(MockModel(0, 8, 2, eos_token_ids=(8,)), max_new_tokens=4, ignore_eos=True)
        assert result.token_ids == [0, 8, 2, 2]
        assert result.text == "Hello<eos>ldld"
        assert result.finish_reason == "length"

    def test_eos_in_the_prompt_does_not_end_it(self) -> None:
        result = run(MockModel(0, eos_token_ids=(8,)), [8, 8], max_new_tokens=2)
        assert (result.token_ids, result.finish_reason) == ([0, 0], "length")

    @pytest.mark.parametrize(
        ("eos", "reason", "text"), [((), "length", "Hello"), ((0,), "eos", "")], ids=["length", "eos"]
    )
    def test_one_new_token(self, eos: tuple[int, ...], reason: str, text: str) -> None:
        result = run(MockModel(0, eos_token_ids=eos), max_new_tokens=1)
        assert (result.token_ids, result.finish_reason, result.text) == ([0], reason, text)
        assert result.timing.decode_times_s == []
        assert result.timing.decode_tokens_per_s == 0

    def test_eos_on_the_last_token_is_eos(self) -> None:
        assert run(MockModel(0, 8, eos_token_ids=(8,)), max_new_tokens=2).finish_reason == "eos"


class TestStopStrings:
    @USE_CACHE
    @pytest.mark.parametrize(
        ("stop", "text", "count"),
        [
            ("STOP", "Hello world ", 5),  # across two tokens
            (" world", "Hello", 3),
            ("o", "Hell", 1),  # inside the first
            (["nothing", "ld S"], "Hello wor", 4),
            (["STOP!", "OP"], "Hello world ST", 5),
            ("Hello", "", 1),
            ("!", "Hello world STOP", 6),  # on the last token
        ],
    )
    def test_text_ends_before_it(self, stop: str | list[str], text: str, count: int, use_kv_cache: bool) -> None:
        result = run(MockModel(0, 1, 2, 3, 4, 5), stop=stop, max_new_tokens=6, use_kv_cache=use_kv_cache)
        assert result.text == text
        assert result.finish_reason == "stop"
        assert result.token_ids == list(range(count))

    def test_its_beginning_is_held_back_and_given_in_the_end(self) -> None:
        steps = list(
            stream(MockModel(0, 1, 2, 3), MockTokenizer(WORDS), [1], SamplingParams(stop="STOP", max_new_tokens=4))
        )
        assert [s.text for s in steps] == ["Hello", " wor", "ld", " ST"]
        assert steps[-1].finish_reason == "length"
        steps = list(
            stream(MockModel(0, 3, 5), MockTokenizer(WORDS), [1], SamplingParams(stop="STOP", max_new_tokens=3))
        )
        assert [s.text for s in steps] == ["Hello", " ", "ST!"]

    def test_held_text_is_given_at_eos(self) -> None:
        result = run(MockModel(0, 3, 8, eos_token_ids=(8,)), stop="STOP", max_new_tokens=9)
        assert (result.text, result.finish_reason) == ("Hello ST", "eos")

    def test_never_in_the_stream(self) -> None:
        steps = list(
            stream(MockModel(0, 3, 4, 5), MockTokenizer(WORDS), [1], SamplingParams(stop="STOP", max_new_tokens=9))
        )
        assert [(s.text, s.finish_reason) for s in steps] == [("Hello", None), (" ", None), ("", "stop")]

    def test_in_the_prompt_does_not_end_it(self) -> None:
        assert run(MockModel(0), [3, 4], stop="STOP", max_new_tokens=2).finish_reason == "length"

    def test_found_in_text_held_for_an_unfinished_character(self) -> None:
        """A stop string whose token also begins a character that never comes."""
        result = run(MockModel(0, 1), words=["Hi", "END\N{REPLACEMENT CHARACTER}"], stop="END", max_new_tokens=2)
        assert (result.text, result.finish_reason) == ("Hi", "stop")


class TestTiming:
    @USE_CACHE
    def test_one_time_per_token(self, use_kv_cache: bool) -> None:
        result = run(MockModel(0, 1, 8, eos_token_ids=(8,)), max_new_tokens=9, use_kv_cache=use_kv_cache)
        timing = result.timing
        assert timing.prefill_time_s > 0
        assert len(timing.decode_times_s) == result.generated_tokens - 1 == 2
        assert all(t > 0 for t in timing.decode_times_s)
        assert timing.decode_time_s == pytest.approx(sum(timing.decode_times_s))

    def test_speed(self) -> None:
        assert Timing(9.0, [0.25, 0.75]).decode_tokens_per_s == 2


class TestStream:
    @pytest.mark.parametrize("options", [{"stop": "STOP"}, {}, {"temperature": 1.0, "seed": 3}])
    def test_is_what_generate_returns(self, options: dict[str, Any]) -> None:
        def model() -> MockModel:
            return MockModel(0, 1, 2, 3, 4, 5, 8, eos_token_ids=(8,))

        params = SamplingParams(max_new_tokens=9, **options)
        steps = list(stream(model(), MockTokenizer(WORDS), [1, 2], params))
        result = generate(model(), MockTokenizer(WORDS), [1, 2], params)
        assert [s.token_id for s in steps] == result.token_ids
        assert "".join(s.text for s in steps) == result.text
        assert [s.finish_reason for s in steps] == [None] * (len(steps) - 1) + [result.finish_reason]

    def test_tokens_come_one_at_a_time(self) -> None:
        model = MockModel(0, 1, 2)
        tokens = stream(model, MockTokenizer(WORDS), [1], SamplingParams(max_new_tokens=3))
        assert next(tokens).text == "Hello"
        assert model.calls == 1
        tokens.close()  # and it can be left at any time
        assert model.calls == 1

    def test_defaults(self) -> None:
        model = MockModel(0, 8, eos_token_ids=(8,), max_position_embeddings=1024)
        assert generate(model, MockTokenizer(WORDS), [1]).text == "Hello"

    def test_the_prompt_is_not_changed(self) -> None:
        prompt = [1, 2]
        run(MockModel(0), prompt, max_new_tokens=3)
        assert prompt == [1, 2]


class TestSeeds:
    def tokens(self, seed: int | None, **options: Any) -> list[int]:
        return run(UniformMockModel(), temperature=1.0, seed=seed, max_new_tokens=40, **options).token_ids

    def test_same_seed_same_tokens(self) -> None:
        assert self.tokens(1) == self.tokens(1) == self.tokens(1, use_kv_cache=False)

    def test_other_seed_other_tokens(self) -> None:
        assert len({tuple(self.tokens(seed)) for seed in range(5)}) == 5
        assert len(set(self.tokens(1))) > 3

    def test_no_seed_differs_each_time(self) -> None:
        assert self.tokens(None) != self.tokens(None)

    def test_torch_seed_is_neither_used_nor_changed(self) -> None:
        torch.manual_seed(0)
        state = torch.get_rng_state()
        first = self.tokens(7)
        assert torch.equal(torch.get_rng_state(), state)
        torch.manual_seed(1)
        assert self.tokens(7) == first

    def test_a_draw_depends_on_its_position_alone(self) -> None:
        """Continuing from half of the output gives the other half."""
        model = UniformMockModel()
        whole = run(model, [1], temperature=1.0, seed=5, max_new_tokens=20).token_ids
        rest = run(model, [1, *whole[:10]], temperature=1.0, seed=5, max_new_tokens=10).token_ids
        assert rest == whole[10:]


class Bare(nn.Module):
    """A model in plain torch that has no config and takes nothing but tokens: after t comes t + 1."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(10))

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.weight[(input_ids + 1) % 10] * 9


class TestModelsWithoutAConfig:
    @pytest.mark.parametrize("function", [generate, stream])
    def test_without_a_cache(self, function: Callable) -> None:
        params = SamplingParams(max_new_tokens=12)
        result = function(Bare(), MockTokenizer(), [7, 8], params, use_kv_cache=False)
        tokens = result.token_ids if function is generate else [token.token_id for token in result]
        assert tokens == [9, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0]

    @pytest.mark.parametrize("function", [generate, stream])
    @pytest.mark.parametrize("options", [{}, {"use_kv_cache": False, "trace": Trace()}], ids=["cache", "trace"])
    def test_refused(self, function: Callable, options: dict[str, Any]) -> None:
        empty = Bare()
        empty.config = None  # type: ignore[assignment]
        for model in (Bare(), empty):
            with pytest.raises(TypeError, match=r"has no \.config, .* or set use_kv_cache=False"):
                function(model, MockTokenizer(), [7], SamplingParams(max_new_tokens=2), **options)


class TestRefusals:
    """All before the model is called."""

    @pytest.mark.parametrize(
        ("prompt", "options", "message"),
        [
            ([], {}, "the prompt is empty"),
            ([1, 10], {}, r"token id 10 in the prompt is outside the vocabulary 0\.\.9"),
            ([-1], {}, "token id -1 in the prompt"),
            ([1], {"logit_bias": {10: 1.0}}, "token id 10 in the logit_bias"),
            ([1] * 60, {"max_new_tokens": 5}, "60 prompt tokens [+] 5 new tokens = 65 .* context of 64"),
            ([1], {"max_new_tokens": 64}, "65 positions exceed"),
            ([1], {"device": "meta"}, "the model is on cpu, not on meta"),
            ([1], {"device": "nonsense"}, "nonsense"),
        ],
        ids=["empty", "id too large", "id negative", "bias id", "context", "context by one", "device", "no device"],
    )
    @USE_CACHE
    @pytest.mark.parametrize("function", [generate, stream])
    def test_request(
        self, function: Callable, prompt: list[int], options: dict, message: str, use_kv_cache: bool
    ) -> None:
        model = MockModel(0)
        device = options.get("device")
        params = SamplingParams(**({"max_new_tokens": 2} | {k: v for k, v in options.items() if k != "device"}))
        with pytest.raises(ValueError, match=message):
            list(function(model, MockTokenizer(), prompt, params, device=device, use_kv_cache=use_kv_cache))
        assert model.calls == 0

    def test_exactly_the_context_is_enough(self) -> None:
        assert run(MockModel(0), [1] * 60, max_new_tokens=4).generated_tokens == 4

    @pytest.mark.parametrize("function", [generate, stream])
    @pytest.mark.parametrize(
        ("size", "held", "message"),
        [
            (4, 0, "3 prompt tokens [+] 2 new tokens = 5 positions exceed the cache's capacity of 4"),
            (8, 3, "the cache holds 3 positions and the prompt has 3 tokens"),
            (8, 5, "the cache holds 5 positions and the prompt has 3 tokens"),
        ],
    )
    def test_cache(self, function: Callable, size: int, held: int, message: str) -> None:
        model = MockModel(0)
        cache = KVCache.from_model_config(model.config, size, dtype="float32", device="cpu")
        cache.advance(held)
        with pytest.raises(ValueError, match=message):
            list(function(model, MockTokenizer(), [1, 2, 3], SamplingParams(max_new_tokens=2), cache=cache))
        assert model.calls == 0
        assert cache.seq_len == held

    @pytest.mark.parametrize("function", [generate, stream])
    def test_a_cache_and_none(self, function: Callable) -> None:
        model = MockModel(0)
        cache = KVCache.from_model_config(model.config, 8, dtype="float32", device="cpu")
        with pytest.raises(ValueError, match="both given"):
            function(model, MockTokenizer(), [1], SamplingParams(max_new_tokens=2), cache=cache, use_kv_cache=False)
        assert model.calls == 0

    @pytest.mark.parametrize("function", [generate, stream])
    def test_an_option_that_there_is_not(self, function: Callable) -> None:
        """Also one of `SamplingParams`, which stands in the wrong place."""
        model = MockModel(0)
        for option in ({"cash": None}, {"temperature": 1.0}):
            with pytest.raises(TypeError, match=f"unexpected keyword argument '{next(iter(option))}'"):
                function(model, MockTokenizer(), [1], SamplingParams(max_new_tokens=2), **option)
        assert model.calls == 0

    def test_memory(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("infer.cache.base.available_memory", lambda device: 10)
        model = MockModel(0)
        with pytest.raises(ValueError, match="are free on cpu"):
            run(model, max_new_tokens=4)
        assert model.calls == 0

    def test_own_device_is_accepted(self) -> None:
        assert run(MockModel(0), device="cpu", max_new_tokens=1).token_ids == [0]

    def test_model_without_parameters(self) -> None:
        model = MockModel(3)
        model.parameters = lambda: iter(())
        assert run(model, max_new_tokens=2).token_ids == [3, 3]


class TestRealModel:
    PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]  # noqa: RUF012
    SEEDED = {"temperature": 1.0, "seed": 11}  # noqa: RUF012
    MODES = pytest.mark.parametrize("mode", [{}, SEEDED], ids=["greedy", "seeded"])

    @pytest.fixture
    def model(self, tiny_model: Callable) -> Decoder:
        return tiny_model()

    @MODES
    def test_cached_is_uncached(self, model: Decoder, mode: dict) -> None:
        plain = run(model, self.PROMPT, words=letters(model), use_kv_cache=False, max_new_tokens=40, **mode)
        cached = run(model, self.PROMPT, words=letters(model), max_new_tokens=40, **mode)
        assert cached.token_ids == plain.token_ids
        assert cached.text == plain.text
        assert len(set(plain.token_ids)) > 3  # not a loop that anything would reproduce
        for cls in CACHES:
            own = run(model, self.PROMPT, words=letters(model), cache=empty(cls, model), max_new_tokens=40, **mode)
            assert own.token_ids == plain.token_ids

    def test_prefills_once_then_feeds_one_token(self, model: Decoder, passes: list[int]) -> None:
        run(model, self.PROMPT, words=letters(model), max_new_tokens=4)
        assert passes == [8, 1, 1, 1]
        passes.clear()
        run(model, self.PROMPT, words=letters(model), max_new_tokens=4, use_kv_cache=False)
        assert passes == [8, 9, 10, 11]

    def test_memory_of_the_cache(self, model: Decoder) -> None:
        result = run(model, self.PROMPT, words=letters(model), max_new_tokens=4)
        assert result.cache_memory_bytes == 12 * model.config.cache_bytes_per_token(4)
        assert (
            run(model, self.PROMPT, words=letters(model), max_new_tokens=4, use_kv_cache=False).cache_memory_bytes == 0
        )

    @MODES
    @pytest.mark.parametrize("cls", CACHES)
    def test_resumes_what_the_cache_holds(
        self, model: Decoder, passes: list[int], cls: type[BaseCache], mode: dict
    ) -> None:
        cache = empty(cls, model)
        words = letters(model)
        first = run(model, self.PROMPT, words=words, cache=cache, max_new_tokens=5, **mode)
        assert cache.seq_len == 8 + 5 - 1  # all but the last generated
        longer = [*self.PROMPT, *first.token_ids, 7, 8]
        passes.clear()
        resumed = run(model, longer, words=words, cache=cache, max_new_tokens=6, **mode)
        assert passes[0] == 3  # the last generated and two more
        assert resumed.token_ids == run(model, longer, words=words, max_new_tokens=6, **mode).token_ids
        assert resumed.prompt_tokens == len(longer)
        cache.truncate(4)
        again = run(model, self.PROMPT, words=words, cache=cache, max_new_tokens=5, **mode)
        assert again.token_ids == first.token_ids

    def test_a_stream_left_halfway_can_be_resumed(self, model: Decoder) -> None:
        cache = empty(KVCache, model)
        words = MockTokenizer(letters(model))
        params = SamplingParams(max_new_tokens=10)
        tokens = stream(model, words, self.PROMPT, params, cache=cache)
        begun = [next(tokens).token_id for _ in range(4)]
        tokens.close()
        rest = generate(model, words, self.PROMPT + begun, SamplingParams(max_new_tokens=6), cache=cache)
        assert begun + rest.token_ids == generate(model, words, self.PROMPT, params).token_ids

    def test_weights_that_ask_for_gradients(self, model: Decoder) -> None:
        model.requires_grad_(True)
        assert run(model, self.PROMPT, words=letters(model), max_new_tokens=3).generated_tokens == 3

    def test_penalties_see_the_whole_sequence(self, model: Decoder) -> None:
        """Also what the cache holds and the step is not fed."""
        banned = dict.fromkeys(range(64), -100.0) | dict.fromkeys(range(4), 0.0)
        result = run(
            model, self.PROMPT, words=letters(model), logit_bias=banned, frequency_penalty=50.0, max_new_tokens=8
        )
        assert sorted(result.token_ids) == [0, 0, 1, 1, 2, 2, 3, 3]

    def test_step(self, model: Decoder) -> None:
        ids = torch.tensor([self.PROMPT, self.PROMPT[::-1]])
        cache = KVCache.from_model_config(model.config, 8, batch_size=2, dtype="float32", device="cpu")
        expected = model(ids)
        assert torch.allclose(step(model, cache, ids[:, :5]), expected[:, 4], atol=1e-4)
        assert torch.allclose(step(model, cache, ids[:, 5:]), expected[:, 7], atol=1e-4)
        assert torch.allclose(step(model, NoCache(2), ids), expected[:, 7], atol=1e-4)


@pytest.fixture(params=[{}, WINDOWS], ids=["full", "windows"])
def model(request: pytest.FixtureRequest, tiny_model: Callable) -> Decoder:
    return tiny_model(**request.param)


LONG = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]  # past the window, twice
CHUNKS = {None: [11], 1: [1] * 11, 3: [3, 3, 3, 2], 11: [11], 50: [11]}
NOT_CHUNKS = [0, -1, 2.5, "3", True]


class TestDefaultCache:
    def test_keeps_windows_where_the_model_has_them(self, model: Decoder) -> None:
        made = make_cache(model, 40, torch.device("cpu"))
        assert type(made) is (SlidingCache if model.config.has_windows else KVCache)
        assert made.capacity == 40

    def test_memory(self, model: Decoder) -> None:
        """A ring has room for the window and one chunk."""
        per_layer = model.config.cache_bytes_per_token(4) // 2
        result = run(model, LONG, words=letters(model), max_new_tokens=30, prefill_chunk=3)
        assert result.cache_memory_bytes == per_layer * (41 + (5 + 3 if model.config.has_windows else 41))

    def test_none(self, model: Decoder) -> None:
        assert type(make_cache(model, 40, torch.device("cpu"), use_kv_cache=False)) is NoCache


class TestPrefillChunk:
    MODES = TestRealModel.MODES

    @pytest.fixture
    def expected(self, model: Decoder) -> list[int]:
        """What the run without a cache generates."""
        tokens = run(model, LONG, words=letters(model), max_new_tokens=12, use_kv_cache=False).token_ids
        assert len(set(tokens)) > 3
        return tokens

    @pytest.mark.parametrize(("chunk", "sizes"), CHUNKS.items())
    @pytest.mark.parametrize("cls", [None, *CACHES])
    def test_passes_and_tokens(
        self,
        model: Decoder,
        expected: list[int],
        passes: list[int],
        cls: type[BaseCache] | None,
        chunk: int | None,
        sizes: list[int],
    ) -> None:
        passes.clear()
        own = None if cls is None else empty(cls, model)
        result = run(model, LONG, words=letters(model), max_new_tokens=12, cache=own, prefill_chunk=chunk)
        assert passes == sizes + [1] * 11
        assert result.token_ids == expected
        assert len(result.timing.decode_times_s) == 11  # all passes of the prompt are one prefill

    def test_a_ring_of_a_narrower_chunk(self, model: Decoder, expected: list[int]) -> None:
        own = empty(SlidingCache, model, prefill_chunk=1)
        assert (
            run(model, LONG, words=letters(model), cache=own, prefill_chunk=4, max_new_tokens=12).token_ids == expected
        )

    @MODES
    def test_streams_alike(self, model: Decoder, mode: dict) -> None:
        words, params = MockTokenizer(letters(model)), SamplingParams(max_new_tokens=12, **mode)
        expected = generate(model, words, LONG, params, use_kv_cache=False)
        for chunk in (None, 4):
            steps = list(stream(model, words, LONG, params, prefill_chunk=chunk))
            assert [s.token_id for s in steps] == expected.token_ids
            assert "".join(s.text for s in steps) == expected.text

    @pytest.mark.parametrize("held", [1, 4, 10])
    @pytest.mark.parametrize("cls", CACHES)
    def test_only_what_the_cache_lacks(
        self, model: Decoder, expected: list[int], passes: list[int], cls: type[BaseCache], held: int
    ) -> None:
        own = empty(cls, model)
        step(model, own, torch.tensor([LONG[:held]]))
        passes.clear()
        result = run(model, LONG, words=letters(model), cache=own, prefill_chunk=3, max_new_tokens=12)
        rest = len(LONG) - held
        assert passes[:-11] == [3] * (rest // 3) + [rest % 3] * bool(rest % 3)
        assert result.token_ids == expected

    @pytest.mark.parametrize("where", ["before", "inside"])
    @pytest.mark.parametrize("number", [0, 2, 3])
    @pytest.mark.parametrize("cls", [None, *CACHES])
    def test_interrupted(
        self,
        model: Decoder,
        expected: list[int],
        passes: list[int],
        cls: type[BaseCache] | None,
        number: int,
        where: str,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Ctrl-C before a pass, or in its second layer: the passes before it count, and can be gone on from."""
        own = make_cache(model, 64, torch.device("cpu"), prefill_chunk=3) if cls is None else empty(cls, model)
        words = MockTokenizer(letters(model))
        params = SamplingParams(max_new_tokens=12)
        attend = own.attend
        passes.clear()

        def interrupted(layer_idx: int, *args: Any, **options: Any) -> Tensor:
            if len(passes) == number + 1 and layer_idx == (0 if where == "before" else 1):
                raise KeyboardInterrupt
            return attend(layer_idx, *args, **options)

        with monkeypatch.context() as patch:
            patch.setattr(own, "attend", interrupted)
            patch.setattr(own, "table", lambda *_: None)  # every layer attends
            with pytest.raises(KeyboardInterrupt):
                generate(model, words, LONG, params, cache=own, prefill_chunk=3)
        assert own.seq_len == 3 * number
        assert generate(model, words, LONG, params, cache=own, prefill_chunk=3).token_ids == expected

    @pytest.mark.parametrize("chunk", NOT_CHUNKS)
    @pytest.mark.parametrize("function", [generate, stream])
    def test_refused(self, function: Callable, chunk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(KVCache, "from_model_config", lambda *args, **options: pytest.fail("memory was taken"))
        mock = MockModel(0)
        with pytest.raises(ValueError, match=f"prefill_chunk must be an integer, 1 or more, not {chunk!r}"):
            function(mock, MockTokenizer(), [1], SamplingParams(max_new_tokens=2), prefill_chunk=chunk)
        assert mock.calls == 0

    @pytest.mark.parametrize("options", [{"use_kv_cache": False}, {"cache": NoCache()}], ids=["no cache", "NoCache"])
    @pytest.mark.parametrize("function", [generate, stream])
    def test_needs_a_cache(self, function: Callable, options: dict) -> None:
        mock = MockModel(0)
        with pytest.raises(ValueError, match="prefill_chunk needs a cache"):
            function(mock, MockTokenizer(), [1, 2], SamplingParams(max_new_tokens=2), prefill_chunk=1, **options)
        assert mock.calls == 0


class TestPrefill:
    IDS = torch.tensor([LONG, LONG[::-1]])

    @pytest.mark.parametrize("chunk", CHUNKS)
    @pytest.mark.parametrize("cls", CACHES)
    def test_logits_of_all_positions(
        self, model: Decoder, passes: list[int], cls: type[BaseCache], chunk: int | None
    ) -> None:
        own = empty(cls, model, batch_size=2)
        expected = model(self.IDS)
        passes.clear()
        logits, filled, trace = prefill(model, self.IDS, own, prefill_chunk=chunk)
        assert passes == CHUNKS[chunk]
        assert logits.shape == (2, 11, 64)
        assert torch.equal(logits, expected)
        assert filled is own
        assert trace is None
        assert own.seq_len == 11
        after = torch.tensor([[7], [8]])
        whole = model(torch.cat((self.IDS, after), dim=1))
        assert torch.equal(step(model, own, after), whole[:, -1])

    def test_generation_goes_on_from_it(self, model: Decoder) -> None:
        _, own, _ = prefill(model, torch.tensor([LONG[:-1]]), empty(SlidingCache, model, prefill_chunk=2))
        result = run(model, LONG, words=letters(model), cache=own, max_new_tokens=12)
        assert result.token_ids == run(model, LONG, words=letters(model), max_new_tokens=12).token_ids

    def test_no_gradients(self, model: Decoder) -> None:
        model.requires_grad_(True)
        assert not prefill(model, self.IDS, empty(KVCache, model, batch_size=2))[0].requires_grad

    @pytest.mark.parametrize(
        ("shape", "size", "held", "message"),
        [
            ((1, 3), 8, 2, "the cache must be empty before prefill, but it holds 2 positions"),
            ((1, 9), 8, 0, r"a prompt is \[batch, 1 to 8 tokens\] for this model and cache, not \[1, 9\]"),
            ((1, 65), 80, 0, r"a prompt is \[batch, 1 to 64 tokens\] for this model and cache, not \[1, 65\]"),
            ((1, 0), 8, 0, r"not \[1, 0\]"),
            ((3,), 8, 0, r"not \[3\]"),
        ],
        ids=["not empty", "cache", "context", "no tokens", "no batch"],
    )
    def test_refused(self, shape: tuple[int, ...], size: int, held: int, message: str) -> None:
        mock = MockModel(0)
        own = empty(KVCache, mock, size)
        own.advance(held)
        with pytest.raises(ValueError, match=message):
            prefill(mock, torch.ones(shape, dtype=torch.long), own)
        assert (mock.calls, own.seq_len) == (0, held)

    @pytest.mark.parametrize("token", [-1, 10])
    def test_token_outside_the_vocabulary(self, token: int) -> None:
        mock = MockModel(0)
        with pytest.raises(ValueError, match=r"token ids outside the vocabulary 0\.\.9"):
            prefill(mock, torch.tensor([[1, token]]), empty(KVCache, mock, 8))
        assert mock.calls == 0

    @pytest.mark.parametrize("chunk", NOT_CHUNKS)
    def test_refused_chunk(self, chunk: Any) -> None:
        mock = MockModel(0)
        with pytest.raises(ValueError, match="prefill_chunk must be an integer"):
            prefill(mock, torch.ones(1, 3, dtype=torch.long), empty(KVCache, mock, 8), prefill_chunk=chunk)
        assert mock.calls == 0

    def test_chunks_need_a_cache(self) -> None:
        """Without one each chunk would start at position 0."""
        mock = MockModel(0)
        with pytest.raises(ValueError, match="prefill_chunk needs a cache"):
            prefill(mock, torch.ones(1, 3, dtype=torch.long), NoCache(), prefill_chunk=2)
        assert mock.calls == 0

    def test_batch_of_another_size(self, model: Decoder) -> None:
        own = empty(KVCache, model)
        with pytest.raises(ValueError, match="the cache has 1 rows, but 2 are needed"):
            prefill(model, self.IDS, own)
        assert own.seq_len == 0


class TestPromptIds:
    """Any flat sequence of integers will do, and nothing else."""

    @pytest.mark.parametrize("convert", [tuple, torch.tensor, lambda ids: torch.tensor(ids).numpy()])
    def test_sequences(self, convert: Callable[[list[int]], Any]) -> None:
        result = generate(MockModel(3), MockTokenizer(), convert([1, 2]), SamplingParams(max_new_tokens=2))
        assert result.prompt_token_ids == [1, 2]
        assert {type(i) for i in result.prompt_token_ids} == {int}

    @pytest.mark.parametrize(
        ("prompt", "message"),
        [
            ("text", "must be token ids, not text: encode it first"),
            ([1.5], "a flat sequence of token ids"),
            ([[1, 2]], "a flat sequence of token ids"),
            (torch.tensor([[1, 2]]), "a flat sequence of token ids"),
            (3, "a flat sequence of token ids, not 3"),
        ],
        ids=["text", "floats", "nested", "two dimensions", "one number"],
    )
    def test_refused(self, prompt: Any, message: str) -> None:
        mock = MockModel(0)
        with pytest.raises(TypeError, match=message):
            stream(mock, MockTokenizer(), prompt)
        assert mock.calls == 0

    def test_params_of_another_kind(self) -> None:
        with pytest.raises(TypeError, match=r"params must be SamplingParams\(.*\), not {'temperature': 1.0}"):
            stream(MockModel(0), MockTokenizer(), [1], {"temperature": 1.0})  # type: ignore[arg-type]


class TestForeignCaches:
    """A cache that was made for something else is refused before the model runs."""

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"num_layers": 1}, "the cache has 1 layers, but 2 are needed"),
            ({"num_kv_heads": 1}, "the cache has 1 KV heads, but 2 are needed"),
            ({"head_dim": 4}, "the cache has 4 dimensions per head, but 8 are needed"),
            ({"batch_size": 2}, "the cache has 2 rows, but 1 are needed"),
            ({"dtype": torch.bfloat16}, "the cache is torch.bfloat16 on cpu, but the model is torch.float32 on cpu"),
        ],
    )
    @pytest.mark.parametrize("cls", CACHES)
    def test_shape(
        self, tiny_model: Callable, passes: list[int], cls: type[BaseCache], changes: dict[str, Any], message: str
    ) -> None:
        model = tiny_model()
        sizes = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 8, "max_seq_len": 32, "dtype": torch.float32}
        own = cls.allocate(**(sizes | changes), device="cpu")
        with pytest.raises(ValueError, match=message):
            stream(model, MockTokenizer(), [1, 2], SamplingParams(max_new_tokens=2), cache=own)
        if "batch_size" not in changes:
            with pytest.raises(ValueError, match=message):
                prefill(model, torch.tensor([[1, 2]]), own)
        assert (passes, own.seq_len) == ([], 0)

    def test_windows(self, tiny_model: Callable) -> None:
        model = tiny_model(layer_types=("sliding_attention", "full_attention"), sliding_window=8)
        own = SlidingCache.allocate(2, 2, 8, 32, dtype="float32", device="cpu", windows=[4, None])
        with pytest.raises(ValueError, match="layer 0 sees 8 positions, but its cache keeps only 4"):
            stream(model, MockTokenizer(), [1, 2], SamplingParams(max_new_tokens=2), cache=own)


class TestCacheDtype:
    """Keys and values rounded to 8 bits."""

    INT8: ClassVar = {"cache_dtype": "int8"}
    GREEDY = SamplingParams(max_new_tokens=12)

    @pytest.fixture(params=FAMILIES)
    def model(self, request: pytest.FixtureRequest, tiny_model: Callable) -> Decoder:
        return tiny_model(model_type=request.param)

    @pytest.mark.parametrize("chunk", [None, 3])
    @TestRealModel.MODES
    def test_every_kind_of_cache_agrees(self, model: Decoder, mode: dict, chunk: int | None) -> None:
        params = SamplingParams(max_new_tokens=12, **mode)
        default = generate(model, Letters(), LONG, params, prefill_chunk=chunk, **self.INT8)
        assert len(set(default.token_ids)) > 2 or not mode
        for cls in CACHES:
            own = cls.from_model_config(model.config, 64, dtype="int8", device="cpu")
            for settings in (self.INT8, {}):  # it is what it is, asked for or not
                result = generate(model, Letters(), LONG, params, cache=own, prefill_chunk=chunk, **settings)
                assert result.token_ids == default.token_ids
                own.reset()
        steps = stream(model, Letters(), LONG, params, prefill_chunk=chunk, **self.INT8)
        assert [step.token_id for step in steps] == default.token_ids

    def test_logits_are_near_those_of_a_float_cache(self, model: Decoder) -> None:
        """Not nearer than rounding allows: something was rounded."""
        ids = torch.tensor([LONG * 3])
        exact = prefill(model, ids, empty(KVCache, model))[0]
        rounded = prefill(model, ids, KVCache.from_model_config(model.config, 64, dtype="int8", device="cpu"))[0]
        assert 1e-4 < (rounded - exact).std() / exact.std() < 0.05

    def test_memory(self, model: Decoder) -> None:
        float_bytes, int8_bytes = (
            generate(model, Letters(), LONG, self.GREEDY, **settings).cache_memory_bytes for settings in ({}, self.INT8)
        )
        head_dim = model.config.computed_head_dim
        assert int8_bytes * 4 * head_dim == float_bytes * (head_dim + 2)

    @pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # torch says so once where the CPU has no bf16
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_models_of_16_bits(self, tiny_model: Callable, dtype: torch.dtype) -> None:
        for family in ("llama", "gemma3"):
            model = tiny_model(model_type=family, dtype=dtype)
            result = generate(model, Letters(), LONG, self.GREEDY, **self.INT8)
            assert result.generated_tokens == 12
            logits = [
                prefill(model, torch.tensor([LONG]), make_cache(model, 64, torch.device("cpu"), cache_dtype=name))[0]
                for name in ("auto", "int8")
            ]
            assert logits[1].dtype == dtype
            assert (logits[1] - logits[0]).float().std() < 0.1 * logits[0].float().std()

    @pytest.mark.parametrize("has_windows", [False, True])
    def test_make_cache(self, tiny_model: Callable, has_windows: bool) -> None:
        model = tiny_model(dtype=torch.bfloat16, **WINDOWS if has_windows else {})
        made = {name: make_cache(model, 40, torch.device("cpu"), cache_dtype=name) for name in ("auto", "int8")}
        assert {type(cache) for cache in made.values()} == {SlidingCache if has_windows else KVCache}
        assert (made["auto"].dtype, made["int8"].dtype) == (torch.bfloat16, torch.int8)

    def test_loops_by_hand(self, model: Decoder) -> None:
        expected = generate(model, Letters(), LONG, self.GREEDY, **self.INT8).token_ids
        settings = {"max_new_tokens": 12, "eot_token_id": 63}
        ids = generate_ids_greedy_cached(model, LONG, **settings, **self.INT8)
        assert ids == LONG + expected[: len(ids) - len(LONG)]
        sampled = generate_ids_cached(model, LONG, temperature=0.0, trace_layer=1, **settings, **self.INT8)
        assert sampled["ids"][:-1] == ids[: len(sampled["ids"]) - 1]
        cache = allocate_kv_cache(L=1, B=1, H=1, T_max=4, D=8, device="cpu", dtype="int8")
        assert cache.dtype == torch.int8

    @pytest.mark.parametrize("length", [4, 11, 13])
    def test_beyond_the_context(self, tiny_model: Callable, length: int) -> None:
        """Then nothing is cached, nor rounded."""
        model = tiny_model(max_position_embeddings=12)
        options = {"on_full": "recompute", **self.INT8}
        prompt = (LONG * 2)[:length]
        whole = generate(model, Letters(), prompt, self.GREEDY, **options).token_ids
        assert len(whole) == 12
        if length > 12:
            plain = generate(model, Letters(), prompt, self.GREEDY, on_full="recompute", use_kv_cache=False)
            assert whole == plain.token_ids

    @pytest.mark.parametrize("function", [generate, stream])
    @pytest.mark.parametrize("word", ["int4", "float32", "bfloat16", "INT8", "", None, torch.int8])
    def test_another_word_is_refused(self, function: Callable, word: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(KVCache, "from_model_config", lambda *args, **options: pytest.fail("memory was taken"))
        mock = MockModel(0)
        message = re.escape(f"cache_dtype must be one of auto, int8, not {word!r}")
        for settings in ({}, {"use_kv_cache": False}):
            with pytest.raises(ValueError, match=message):
                function(mock, MockTokenizer(), [1], self.GREEDY, cache_dtype=word, **settings)
        with pytest.raises(ValueError, match=message):
            make_cache(mock, 8, torch.device("cpu"), cache_dtype=word)
        with pytest.raises(ValueError, match=message):
            generate_ids_greedy_cached(mock, [1], max_new_tokens=2, eot_token_id=3, cache_dtype=word)
        assert mock.calls == 0

    @pytest.mark.parametrize("function", [generate, stream])
    def test_without_a_cache_it_is_refused(self, function: Callable) -> None:
        mock = MockModel(0)
        with pytest.raises(ValueError, match="cache_dtype='int8' needs a cache, but use_kv_cache=False"):
            function(mock, MockTokenizer(), [1], self.GREEDY, use_kv_cache=False, **self.INT8)
        with pytest.raises(ValueError, match="cache_dtype='int8' needs a cache"):
            make_cache(mock, 8, torch.device("cpu"), use_kv_cache=False, **self.INT8)
        assert mock.calls == 0

    @pytest.mark.parametrize(
        ("wrap", "held"),
        [
            (lambda cache: cache, "torch.float32"),
            (lambda cache: TracedCache(cache, [0]), "torch.float32"),
            (lambda cache: NoCache(), "torch.float32"),
            (lambda cache: ForeignCache(), "ForeignCache"),
        ],
        ids=["own", "watched", "none", "foreign"],
    )
    def test_a_cache_that_does_not_round_is_refused(self, wrap: Callable, held: str) -> None:
        mock = MockModel(0)
        own = wrap(KVCache.from_model_config(mock.config, 40, dtype="float32", device="cpu"))
        with pytest.raises(ValueError, match=f"cache_dtype='int8' was given, but the given cache holds {held}"):
            stream(mock, MockTokenizer(), [1], self.GREEDY, cache=own, **self.INT8)
        assert mock.calls == 0

    def test_a_watched_cache_that_rounds_is_taken(self, model: Decoder) -> None:
        own = KVCache.from_model_config(model.config, 64, dtype="int8", device="cpu")
        result = generate(model, Letters(), LONG, self.GREEDY, cache=TracedCache(own, [1]), **self.INT8)
        assert result.token_ids == generate(model, Letters(), LONG, self.GREEDY, **self.INT8).token_ids

    def test_an_odd_head_dim_is_refused(self) -> None:
        mock = MockModel(0, head_dim=5, rope=None)
        with pytest.raises(ValueError, match="an int8 cache needs an even head_dim, not 5"):
            stream(mock, MockTokenizer(), [1], self.GREEDY, **self.INT8)
        assert mock.calls == 0


class TestOnFull:
    """Beyond the positions that a model, or a cache, has."""

    PROMPT: ClassVar = [5, 3, 7, 1]

    @pytest.fixture(params=["llama", "gemma3", "gpt2", "rope_gpt"])
    def short(self, request: pytest.FixtureRequest, tiny_model: Callable[..., Decoder]) -> Decoder:
        return tiny_model(model_type=request.param, max_position_embeddings=12)

    @pytest.mark.parametrize(
        "params",
        [
            SamplingParams(max_new_tokens=20),
            SamplingParams(max_new_tokens=20, temperature=1.2, top_p=0.9, repetition_penalty=1.2, seed=4),
        ],
    )
    @pytest.mark.parametrize("length", [1, 4, 11, 12, 13, 30])
    def test_recompute_equals_the_uncached_run(self, short: Decoder, params: SamplingParams, length: int) -> None:
        prompt = (self.PROMPT * 8)[:length]
        runs = [
            generate(short, Letters(), prompt, params, on_full="recompute", **settings).token_ids
            for settings in ({}, {"use_kv_cache": False}, {"prefill_chunk": 3})
        ]
        assert runs[0] == runs[1] == runs[2]
        assert len(runs[0]) == 20

    def test_recompute_crops_to_the_last_positions(self, short: Decoder) -> None:
        """By hand: the last 12 tokens, as a text of their own."""
        tokens = list(self.PROMPT)
        with torch.inference_mode():
            for _ in range(20):
                tokens.append(int(short(torch.tensor([tokens[-12:]]))[0, -1].argmax()))
        got = generate(short, Letters(), self.PROMPT, SamplingParams(max_new_tokens=20), on_full="recompute")
        assert got.token_ids == tokens[4:]

    def test_the_cache_helps_as_long_as_it_can(self, short: Decoder, passes: list[int]) -> None:
        params = SamplingParams(max_new_tokens=12)
        cache = KVCache.from_model_config(short.config, 12, dtype="float32", device="cpu")
        generate(short, Letters(), self.PROMPT, params, cache=cache, on_full="recompute")
        assert passes == [4, *[1] * 8, *[12] * 3]
        assert cache.seq_len == 12
        passes.clear()
        generate(short, Letters(), self.PROMPT, params, on_full="recompute")
        assert passes == [4, *[1] * 8, *[12] * 3]

    def test_a_cache_shorter_than_the_context(self, short: Decoder) -> None:
        """Once it is full it is left alone: the tokens are those of a run without it."""
        params = SamplingParams(max_new_tokens=20)
        cache = KVCache.from_model_config(short.config, 7, dtype="float32", device="cpu")
        got = generate(short, Letters(), self.PROMPT, params, cache=cache, on_full="recompute").token_ids
        without = generate(short, Letters(), self.PROMPT, params, use_kv_cache=False, on_full="recompute").token_ids
        assert got == without
        assert cache.seq_len == 7

    def test_the_default_refuses(self, short: Decoder) -> None:
        for settings in ({}, {"on_full": "error"}, {"on_full": "error", "use_kv_cache": False}):
            with pytest.raises(ValueError, match="4 prompt tokens \\+ 9 new tokens = 13 positions exceed the model's"):
                generate(short, Letters(), self.PROMPT, SamplingParams(max_new_tokens=9), **settings)

    def test_unknown_policy(self, short: Decoder) -> None:
        with pytest.raises(ValueError, match="on_full must be one of error, recompute, not 'slide'"):
            generate(short, Letters(), self.PROMPT, on_full="slide")
