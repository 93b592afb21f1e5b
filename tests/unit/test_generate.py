"""Generation with mock models, then with tiny real ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from mocks import CACHES, MockModel, MockTokenizer, UniformMockModel

from infer import GenerationResult, KVCache, SamplingParams, generate, stream
from infer.cache import BaseCache, NoCache
from infer.engine.generate import step
from infer.engine.result import Timing
from infer.models.common import Decoder

WORDS = ["Hello", " wor", "ld", " ST", "OP", "!", "?", " again", "<eos>", "."]
USE_CACHE = pytest.mark.parametrize("use_kv_cache", [True, False], ids=["cached", "uncached"])


def run(model: Any, prompt: list[int] | None = None, *, words: list[str] = WORDS, **options: Any) -> GenerationResult:
    """Generate with a mock tokenizer; options of `generate` and of `SamplingParams` alike."""
    own = {name: options.pop(name) for name in ("device", "use_kv_cache", "cache") if name in options}
    return generate(model, MockTokenizer(words), prompt or [1, 2], SamplingParams(**options), **own)


def letters(model: Decoder) -> list[str]:
    return [chr(ord("A") + i) for i in range(model.config.vocab_size)]


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

    def test_memory(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("infer.cache.simple.available_memory", lambda device: 10)
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

    @pytest.fixture
    def fed(self, model: Decoder) -> list[tuple[int, ...]]:
        """The shapes of what the model is fed."""
        shapes: list[tuple[int, ...]] = []
        model.register_forward_pre_hook(lambda _, args: shapes.append(tuple(args[0].shape)))
        return shapes

    @staticmethod
    def cache(model: Decoder, size: int = 64, cls: type[BaseCache] = KVCache) -> BaseCache:
        return cls.from_model_config(model.config, size, dtype="float32", device="cpu")

    @MODES
    def test_cached_is_uncached(self, model: Decoder, mode: dict) -> None:
        plain = run(model, self.PROMPT, words=letters(model), use_kv_cache=False, max_new_tokens=40, **mode)
        cached = run(model, self.PROMPT, words=letters(model), max_new_tokens=40, **mode)
        assert cached.token_ids == plain.token_ids
        assert cached.text == plain.text
        assert len(set(plain.token_ids)) > 3  # not a loop that anything would reproduce
        for cls in CACHES:
            own = run(
                model, self.PROMPT, words=letters(model), cache=self.cache(model, cls=cls), max_new_tokens=40, **mode
            )
            assert own.token_ids == plain.token_ids

    def test_prefills_once_then_feeds_one_token(self, model: Decoder, fed: list) -> None:
        run(model, self.PROMPT, words=letters(model), max_new_tokens=4)
        assert fed == [(1, 8), (1, 1), (1, 1), (1, 1)]
        fed.clear()
        run(model, self.PROMPT, words=letters(model), max_new_tokens=4, use_kv_cache=False)
        assert fed == [(1, 8), (1, 9), (1, 10), (1, 11)]

    def test_memory_of_the_cache(self, model: Decoder) -> None:
        result = run(model, self.PROMPT, words=letters(model), max_new_tokens=4)
        assert result.cache_memory_bytes == 12 * model.config.cache_bytes_per_token(4)
        assert (
            run(model, self.PROMPT, words=letters(model), max_new_tokens=4, use_kv_cache=False).cache_memory_bytes == 0
        )

    @MODES
    @pytest.mark.parametrize("cls", CACHES)
    def test_resumes_what_the_cache_holds(self, model: Decoder, fed: list, cls: type[BaseCache], mode: dict) -> None:
        cache = self.cache(model, cls=cls)
        words = letters(model)
        first = run(model, self.PROMPT, words=words, cache=cache, max_new_tokens=5, **mode)
        assert cache.seq_len == 8 + 5 - 1  # all but the last generated
        longer = [*self.PROMPT, *first.token_ids, 7, 8]
        fed.clear()
        resumed = run(model, longer, words=words, cache=cache, max_new_tokens=6, **mode)
        assert fed[0] == (1, 3)  # the last generated and two more
        assert resumed.token_ids == run(model, longer, words=words, max_new_tokens=6, **mode).token_ids
        assert resumed.prompt_tokens == len(longer)
        cache.truncate(4)
        again = run(model, self.PROMPT, words=words, cache=cache, max_new_tokens=5, **mode)
        assert again.token_ids == first.token_ids

    def test_a_stream_left_halfway_can_be_resumed(self, model: Decoder) -> None:
        cache = self.cache(model)
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
