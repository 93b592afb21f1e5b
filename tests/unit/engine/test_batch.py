"""Several prompts at once: each row is what its prompt gives alone, and costs nothing once it is done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from mocks import MockModel, MockTokenizer

from infer import GenerationResult, SamplingParams, generate, generate_batch
from infer.backend.cpu.backend import CpuBackend
from infer.cache.pool import OutOfPages, bytes_for
from infer.engine.memory import CacheMemory
from infer.models.common import Decoder
from infer.models.rows import Row

WINDOW = 5
WINDOWS = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": WINDOW}
FAMILIES = {
    "llama": {},
    "llama with windows": WINDOWS,
    "qwen3": {"model_type": "qwen3"},
    "qwen3 with windows": {"model_type": "qwen3", **WINDOWS},
    "gemma3": {"model_type": "gemma3", "sliding_window": WINDOW},
    "gpt2": {"model_type": "gpt2"},
    "rope_gpt": {"model_type": "rope_gpt"},
}
LETTERS = MockTokenizer([chr(33 + i) for i in range(64)])
# One token, the window's edge, twice around, and the same prompt twice.
LENGTHS = [1, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW + 3, WINDOW]
PROMPTS = [[(7 * length + 11 * i * i) % 64 for i in range(length)] for length in LENGTHS]
SEEDED = SamplingParams(temperature=1.0, seed=3, max_new_tokens=12)
EACH = [
    SamplingParams(max_new_tokens=1),
    SamplingParams(max_new_tokens=14),
    SamplingParams(max_new_tokens=7, temperature=1.0, top_p=0.9, seed=1),
    SamplingParams(max_new_tokens=9, temperature=1.5, top_k=20, seed=2),
    SamplingParams(max_new_tokens=5, repetition_penalty=2.0, frequency_penalty=1.0),
    SamplingParams(max_new_tokens=14, logit_bias={9: 100.0, 12: 99.5}, frequency_penalty=1.0),
]


@pytest.fixture(params=FAMILIES.values(), ids=FAMILIES)
def model(request: pytest.FixtureRequest, tiny_model: Callable[..., Decoder]) -> Decoder:
    return tiny_model(**request.param)


@pytest.fixture
def llama(tiny_model: Callable[..., Decoder]) -> Decoder:
    return tiny_model()


def outcome(result: GenerationResult) -> tuple[Any, ...]:
    """All but the times and the memory."""
    return result.prompt_token_ids, result.token_ids, result.text, result.finish_reason


def check(model: Decoder, prompts: list[list[int]], params: Any = None, **options: Any) -> list[GenerationResult]:
    """Generate together, and compare with each prompt alone; each has held the pages of its tokens, less the last."""
    results = generate_batch(model, LETTERS, prompts, params, **options)
    each = params if isinstance(params, list) else [params] * len(prompts)
    alone = [generate(model, LETTERS, *one, **options) for one in zip(prompts, each, strict=True)]
    assert [outcome(result) for result in results] == [outcome(result) for result in alone]
    itemsize = 1 if options.get("cache_dtype") == "int8" else 4
    assert [result.cache_memory_bytes for result in results] == [
        bytes_for(model.config, result.prompt_tokens + result.generated_tokens - 1, itemsize) for result in results
    ]
    return results


class TestRowsAreThoseOfEachAlone:
    @pytest.mark.parametrize(
        "params", [SamplingParams(max_new_tokens=12), SEEDED, EACH], ids=["greedy", "seeded", "each its own"]
    )
    def test_every_family(self, model: Decoder, params: Any) -> None:
        results = check(model, PROMPTS, params)
        assert [result.prompt_tokens for result in results] == LENGTHS
        assert len({tuple(result.token_ids) for result in results}) >= 5  # the same prompt twice may give the same

    @pytest.mark.parametrize("rows", [1, 2, 4])
    @pytest.mark.parametrize("chunk", [1, 3, WINDOW, WINDOW + 1, 50])
    def test_chunks(
        self,
        tiny_model: Callable[..., Decoder],
        chunk: int,
        rows: int,
        fed: list[list[int]],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """rows: that run at once."""
        model = tiny_model(**WINDOWS)
        whole = generate_batch(model, LETTERS, PROMPTS, EACH)
        monkeypatch.setattr("infer.engine.engine.MAX_ROWS", rows)
        fed.clear()
        results = check(model, PROMPTS, EACH, prefill_chunk=chunk)
        assert max(sum(n for n in some if n > 1) for some in fed) <= chunk
        assert max(map(len, fed)) == (rows if chunk > 1 else min(rows, 3))  # some have ended before the last begin
        assert [result.token_ids for result in results] == [result.token_ids for result in whole]

    def test_without_a_cache_too(self, model: Decoder) -> None:
        params = SamplingParams(max_new_tokens=12)
        together = generate_batch(model, LETTERS, PROMPTS, params)
        for prompt, result in zip(PROMPTS, together, strict=True):
            assert result.token_ids == generate(model, LETTERS, prompt, params, use_kv_cache=False).token_ids

    @pytest.mark.parametrize("params", [SamplingParams(max_new_tokens=12), SEEDED], ids=["greedy", "seeded"])
    def test_int8_caches(self, model: Decoder, params: SamplingParams) -> None:
        results = check(model, PROMPTS, params, cache_dtype="int8", prefill_chunk=4)
        head_dim = model.config.computed_head_dim
        floats = generate_batch(model, LETTERS, PROMPTS, params, prefill_chunk=4)
        for rounded, plain in zip(results, floats, strict=True):
            assert rounded.cache_memory_bytes * 4 * head_dim == plain.cache_memory_bytes * (head_dim + 2)

    def test_one_prompt(self, llama: Decoder) -> None:
        check(llama, PROMPTS[:1], SEEDED)

    def test_defaults(self, tiny_model: Callable[..., Decoder]) -> None:
        model = tiny_model(max_position_embeddings=300, eos_token_ids=tuple(range(0, 64, 2)))
        check(model, PROMPTS)

    def test_duplicates(self, llama: Decoder) -> None:
        results = check(llama, [PROMPTS[3]] * 3, SEEDED)
        assert len({tuple(result.token_ids) for result in results}) == 1

    def test_end_of_sequence_and_stop_strings(self, tiny_model: Callable[..., Decoder]) -> None:
        free = generate(tiny_model(), LETTERS, PROMPTS[1], SamplingParams(max_new_tokens=14))
        model = tiny_model(eos_token_ids=(free.token_ids[3],))
        params = [
            SamplingParams(max_new_tokens=14),
            SamplingParams(max_new_tokens=14, ignore_eos=True),
            SamplingParams(max_new_tokens=14, ignore_eos=True, stop=free.text[5:7]),
            SamplingParams(max_new_tokens=2),
        ]
        results = check(model, [PROMPTS[1]] * 4, params)
        assert [result.finish_reason for result in results] == ["eos", "length", "stop", "length"]
        assert results[2].text == free.text[: free.text.index(free.text[5:7])]

    def test_results_keep_the_order_of_the_prompts(self, llama: Decoder) -> None:
        forwards = generate_batch(llama, LETTERS, PROMPTS, EACH)
        backwards = generate_batch(llama, LETTERS, PROMPTS[::-1], EACH[::-1])
        assert [outcome(result) for result in backwards[::-1]] == [outcome(result) for result in forwards]

    def test_other_sequences_than_lists(self, llama: Decoder) -> None:
        as_tuples = generate_batch(llama, LETTERS, tuple(map(tuple, PROMPTS)), tuple(EACH))
        assert list(map(outcome, as_tuples)) == list(map(outcome, generate_batch(llama, LETTERS, PROMPTS, EACH)))
        assert all(type(result.prompt_token_ids) is list for result in as_tuples)

    def test_arguments_are_not_changed(self, llama: Decoder) -> None:
        prompts, params = [[1, 2], [3]], [SEEDED, SEEDED]
        generate_batch(llama, LETTERS, prompts, params)
        assert (prompts, params) == ([[1, 2], [3]], [SEEDED, SEEDED])


class TestSeeds:
    def test_neighbours_do_not_matter(self, llama: Decoder) -> None:
        seeds = [SamplingParams(temperature=1.0, seed=seed, max_new_tokens=12) for seed in range(4)]
        rows = generate_batch(llama, LETTERS, [PROMPTS[2]] * 4, seeds)
        assert len({tuple(row.token_ids) for row in rows}) == 4
        for order in ([3, 1, 0, 2], [1], [2, 2, 0]):
            again = generate_batch(llama, LETTERS, [PROMPTS[2]] * len(order), [seeds[i] for i in order])
            assert [row.token_ids for row in again] == [rows[i].token_ids for i in order]

    def test_without_a_seed_rows_differ(self, llama: Decoder) -> None:
        params = SamplingParams(temperature=1.0, max_new_tokens=30)
        first, second = generate_batch(llama, LETTERS, [PROMPTS[2]] * 2, params)
        assert first.token_ids != second.token_ids


class TestSteps:
    def test_nothing_is_padded_and_rows_leave_when_done(self, llama: Decoder, fed: list[list[int]]) -> None:
        params = [SamplingParams(max_new_tokens=count) for count in (3, 1, 5)]
        results = generate_batch(llama, LETTERS, [PROMPTS[4], PROMPTS[0], PROMPTS[1]], params)
        assert fed == [[13, 1, 4], [1, 1], [1, 1], [1], [1]]
        assert [len(result.timing.decode_times_s) for result in results] == [2, 0, 4]
        assert all(result.timing.prefill_time_s > 0 for result in results)

    def test_chunks(self, llama: Decoder, fed: list[list[int]]) -> None:
        """A row goes on as soon as its own prompt is through, and the next has what it leaves of a chunk."""
        params = SamplingParams(max_new_tokens=3)
        generate_batch(llama, LETTERS, [PROMPTS[4], PROMPTS[3], PROMPTS[0]], params, prefill_chunk=5)
        assert fed == [[5], [5], [3, 2], [1, 4, 1], [1, 1, 1], [1, 1]]

    def test_done_with_the_first_token(self, llama: Decoder, fed: list[list[int]]) -> None:
        """All at once, but for the second of two that are the same: it begins with what the first has computed."""
        generate_batch(llama, LETTERS, PROMPTS, SamplingParams(max_new_tokens=1))
        assert fed == [LENGTHS[:5], [1]]

    def test_long_prompts_do_not_go_into_one_pass(
        self, llama: Decoder, fed: list[list[int]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As many as it should have tokens; the last of them in part."""
        monkeypatch.setattr("infer.engine.engine.DEFAULT_PREFILL_CHUNK", 12)
        check(llama, PROMPTS, SamplingParams(max_new_tokens=2))
        assert fed[:4] == [[1, 4, 5, 2], [1, 1, 1, 4, 8], [1, 5, 1], [1, 1]]

    def test_caches_are_as_long_as_each_row_needs(
        self, tiny_model: Callable[..., Decoder], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """In pages of 64 positions: where a layer sees a window, those of the window, and one more to go back to."""
        made: list[CacheMemory] = []

        def noted(*args: Any, **options: Any) -> CacheMemory:
            made.append(CacheMemory(*args, **options))
            return made[-1]

        monkeypatch.setattr("infer.engine.generate.CacheMemory", noted)
        model = tiny_model(**WINDOWS)
        params = [SamplingParams(max_new_tokens=14), SamplingParams(max_new_tokens=142)]
        results = generate_batch(model, LETTERS, [PROMPTS[0], PROMPTS[4]], params)
        page = model.config.cache_bytes_per_token(4) // 2 * 64  # of one layer
        assert [result.cache_memory_bytes for result in results] == [page * (1 + 1), page * (3 + 2)]
        # While its prompt runs a window may have to hold all of it, and the last page may have to be copied.
        [memory] = made
        assert memory.pool.memory_bytes == page * ((1 + 1 + 2) + (3 + 3 + 2))

    def test_weights_that_ask_for_gradients(self, llama: Decoder) -> None:
        llama.requires_grad_(True)
        check(llama, PROMPTS, SEEDED)


class TestNothing:
    @pytest.mark.parametrize("params", [None, SEEDED, []], ids=["none", "one", "one each"])
    def test_no_prompts(self, params: Any) -> None:
        assert generate_batch(MockModel(0), LETTERS, [], params) == []


class TestRefusals:
    """All before the model is called."""

    @pytest.mark.parametrize(
        ("prompts", "params", "message"),
        [
            ([[1], []], None, "^prompt 1: the prompt is empty"),
            ([[1], [2], [10]], None, r"^prompt 2: token id 10 in the prompt is outside the vocabulary 0\.\.9"),
            ([[-1], [2]], None, "^prompt 0: token id -1"),
            ([[1], [1] * 60], None, "^prompt 1: 60 prompt tokens [+] 5 new tokens = 65 positions exceed the model's"),
            ([[1], [1]], [{}, {"max_new_tokens": 64}], "^prompt 1: 1 prompt tokens [+] 64 new tokens"),
            ([[1], [1]], [{}, {"logit_bias": {10: 1.0}}], "^prompt 1: token id 10 in the logit_bias"),
            ([[1], [1]], [{}], "^1 SamplingParams for 2 prompts: give one for all, or one for each$"),
            ([[1]], [{}, {}], "^2 SamplingParams for 1 prompts"),
            ([], [{}], "^1 SamplingParams for 0 prompts"),
            ([[1]], [], "^0 SamplingParams for 1 prompts"),
            ([1, 2], None, "^prompt 0: the prompt must be a flat sequence of token ids, not 1$"),
            ([[1], "text"], None, "^prompt 1: the prompt must be token ids, not text: encode it first$"),
        ],
    )
    def test_request(self, prompts: list[list[int]], params: Any, message: str) -> None:
        model = MockModel(0)
        small = {"max_new_tokens": 5}
        each = params if params is None else [SamplingParams(**(small | values)) for values in params]
        with pytest.raises((ValueError, TypeError), match=message):
            generate_batch(model, LETTERS, prompts, SamplingParams(**small) if each is None else each)
        assert model.calls == 0

    def test_params_as_a_dict(self) -> None:
        model = MockModel(0)
        with pytest.raises(TypeError, match=r"params must be SamplingParams, or one for each prompt, not \{"):
            generate_batch(model, LETTERS, [[1], [2]], {"temperature": 1.0})  # type: ignore[arg-type]
        assert model.calls == 0

    @pytest.mark.parametrize("chunk", [0, -1, 2.5, "3", True])
    def test_chunk(self, chunk: Any) -> None:
        model = MockModel(0)
        with pytest.raises(ValueError, match=f"prefill_chunk must be an integer, 1 or more, not {chunk!r}"):
            generate_batch(model, LETTERS, [[1]], SamplingParams(max_new_tokens=2), prefill_chunk=chunk)
        assert model.calls == 0

    @pytest.mark.parametrize("prompts", [[[1]], []])
    def test_cache_dtype(self, prompts: list[list[int]]) -> None:
        model = MockModel(0)
        with pytest.raises(ValueError, match="cache_dtype must be one of auto, int8, not 'int4'"):
            generate_batch(model, LETTERS, prompts, SamplingParams(max_new_tokens=2), cache_dtype="int4")
        assert model.calls == 0

    def test_device(self) -> None:
        model = MockModel(0)
        with pytest.raises(ValueError, match="the model is on cpu, not on meta"):
            generate_batch(model, LETTERS, [[1]], SamplingParams(max_new_tokens=2), device="meta")
        assert model.calls == 0

    def test_memory_of_one_row(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("infer.cache.base.available_memory", lambda device, **_: 10)
        model = MockModel(0)
        with pytest.raises(ValueError, match="are free on cpu"):
            generate_batch(model, LETTERS, [[1, 2]], SamplingParams(max_new_tokens=8))
        assert model.calls == 0


@pytest.mark.parametrize("windows", [{}, WINDOWS], ids=["", "windows"])
@pytest.mark.parametrize(("pages", "together"), [(100, 4), (3, 2), (1, 1)])
def test_rows_wait_where_there_is_not_memory_for_all(
    tiny_model: Callable[..., Decoder],
    windows: dict[str, Any],
    pages: int,
    together: int,
    fed: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Caches may take half of what is free, or what one row needs: that is a page, and one to copy it to."""
    model = tiny_model(**windows)
    free = 2 * pages * bytes_for(model.config, 1, 4)
    monkeypatch.setattr("infer.engine.generate.available_memory", lambda device, **_: free)
    prompts, params = [PROMPTS[i] for i in (1, 2, 3, 4)], SamplingParams(max_new_tokens=8)
    check(model, prompts, params)
    passes = fed[: len(fed) - 4 * 8]  # the last are those of each alone
    assert max(map(len, passes)) == together
    assert sum(map(sum, passes)) == sum(map(len, prompts)) + 4 * 7  # nobody had to give up what it held


def test_a_mix_up_of_rows_would_be_seen(tiny_model: Callable[..., Decoder], monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompts are such that a row which was given its neighbour's keys would answer otherwise."""
    model = tiny_model(**WINDOWS)
    right = generate_batch(model, LETTERS, PROMPTS, SamplingParams(max_new_tokens=12))
    run = CpuBackend.run

    def rotated(backend: CpuBackend, rows: Sequence[Row]) -> list[torch.Tensor]:
        """Of a step, every row is fed to the next one's cache."""
        if len(rows) < 2 or {len(row.tokens) for row in rows} != {1}:
            return run(backend, rows)
        caches = [row.cache for row in rows]
        mixed = [Row(cache, *row[1:]) for cache, row in zip(caches[1:] + caches[:1], rows, strict=True)]
        return run(backend, mixed)

    monkeypatch.setattr(CpuBackend, "run", rotated)
    wrong = generate_batch(model, LETTERS, PROMPTS, SamplingParams(max_new_tokens=12))
    assert all(a.token_ids != b.token_ids for a, b in zip(right, wrong, strict=True))


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
@pytest.mark.parametrize("params", [SamplingParams(max_new_tokens=14), SEEDED])
def test_beyond_the_context(tiny_model: Callable[..., Decoder], family: str, params: SamplingParams) -> None:
    """Rows pass the end one after another, one of them with its prompt: each as it would alone."""
    model = tiny_model(**FAMILIES[family] | {"max_position_embeddings": 16})
    prompts = [*PROMPTS, [5] * 17]
    got = generate_batch(model, LETTERS, prompts, params, on_full="recompute")
    alone = [generate(model, LETTERS, prompt, params, on_full="recompute") for prompt in prompts]
    assert [row.token_ids for row in got] == [row.token_ids for row in alone]
    with pytest.raises(ValueError, match="exceed the model's context of 16"):
        generate_batch(model, LETTERS, prompts, params)


class TestPages:
    """Rows whose caches share the pages of one memory: their texts are those of rows alone."""

    COMMON = tuple(i * 7 % 64 for i in range(130))
    ENDS = (1, 30, 62, 63, 64, 0, 70)  # of prompts behind what they have in common: around the end of a page

    @pytest.fixture(params=["llama", "gemma3", "gpt2"])
    def model(self, request: pytest.FixtureRequest, tiny_model: Callable[..., Decoder]) -> Decoder:
        return tiny_model(model_type=request.param, max_position_embeddings=512)

    @pytest.fixture
    def prompts(self) -> list[list[int]]:
        ends = ([(i * j + 3) % 64 for i in range(n)] for j, n in enumerate(self.ENDS))
        return [*([*self.COMMON, *end] for end in ends), [5, 6, 7]]

    def params(self, count: int, new: int = 20) -> list[SamplingParams]:
        return [SamplingParams(max_new_tokens=new, temperature=0.9 * (i % 2), seed=i) for i in range(count)]

    @pytest.mark.parametrize("rows", [9, 2], ids=["room for all", "room for two"])
    def test_texts_are_those_of_rows_alone(self, model: Decoder, prompts: list[list[int]], rows: int) -> None:
        params = self.params(len(prompts), 70)
        expected = [generate(model, LETTERS, *each).token_ids for each in zip(prompts, params, strict=True)]
        memory = CacheMemory(model, rows * bytes_for(model.config, 330, 4))
        for _ in range(2):  # the second time nearly all is known
            results = generate_batch(model, LETTERS, prompts, params, memory=memory)
            assert [result.token_ids for result in results] == expected
        memory.index.check()
        memory.index.clear()
        assert memory.pool.num_free_pages == memory.pool.num_pages

    def test_twins_hold_their_beginning_once(self, tiny_model: Callable[..., Decoder]) -> None:
        """64 of them, submitted at once: the first is computed, the others begin with its pages."""
        model = tiny_model(max_position_embeddings=512)
        prompts = [[*self.COMMON[:128], i] for i in range(64)]
        memory = CacheMemory(model, 70 * bytes_for(model.config, 192, 4))
        most, take = [0], memory.pool.allocate

        def watched(*args: int) -> list[int]:
            taken = take(*args)
            most[0] = max(most[0], memory.pool.num_pages - memory.pool.num_free_pages)
            return taken

        memory.pool.allocate = watched  # type: ignore[method-assign, assignment]
        fed: list[int] = []
        run = CpuBackend.run

        def noted(backend: CpuBackend, rows: Sequence[Row]) -> list[torch.Tensor]:
            fed.extend(len(row.tokens) for row in rows)
            return run(backend, rows)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(CpuBackend, "run", noted)
            generate_batch(model, LETTERS, prompts, self.params(64, 4), memory=memory)
        assert most[0] == 2 + 64  # two pages in common, and one each
        assert sorted(fed, reverse=True)[:2] == [128, 1]

    def test_more_than_the_memory_holds_is_refused(self, model: Decoder) -> None:
        memory = CacheMemory(model, bytes_for(model.config, 128, 4))
        message = (
            r"^prompt 1: 420 positions take 0\.\d MB, but the memory for caches has 0\.\d: ask for fewer positions, or "
        )
        with pytest.raises(OutOfPages, match=message):
            generate_batch(model, LETTERS, [[1], [2] * 400], self.params(2), memory=memory)
        assert memory.pool.num_free_pages == memory.pool.num_pages

    def test_the_memory_of_another_model_is_refused(self, model: Decoder, tiny_model: Callable[..., Decoder]) -> None:
        with pytest.raises(ValueError, match="the memory belongs to another model"):
            generate_batch(model, LETTERS, [[1]], memory=CacheMemory(tiny_model(), 10**6))

    def test_a_row_that_waits_holds_nothing(self, llama: Decoder) -> None:
        """What is remembered for it can go for those that run."""
        text = [i * 11 % 64 for i in range(128)]
        memory = CacheMemory(llama, 9 * bytes_for(llama.config, 1, 4, 16), page_size=16)
        params = [SamplingParams(max_new_tokens=n, ignore_eos=True) for n in (4, 15)]
        generate_batch(llama, LETTERS, [text[:67]], params[:1], memory=memory)
        prompts = [text[::-1][:111], [*text[:65], 7]]
        expected = [generate(llama, LETTERS, *each).token_ids for each in zip(prompts, params, strict=True)]
        results = generate_batch(llama, LETTERS, prompts, params, memory=memory)
        assert [result.token_ids for result in results] == expected

    def test_what_others_hold_is_left_to_them(self, llama: Decoder) -> None:
        memory = CacheMemory(llama, 8 * bytes_for(llama.config, 1, 4, 16), page_size=16)
        others = memory.pool.allocate(4)
        params = SamplingParams(max_new_tokens=8, ignore_eos=True)
        prompts = [[i] * 38 for i in range(2)]
        results = generate_batch(llama, LETTERS, prompts, params, memory=memory)
        expected = [generate(llama, LETTERS, prompt, params).token_ids for prompt in prompts]
        assert [result.token_ids for result in results] == expected
        with pytest.raises(
            OutOfPages, match=r"^prompt 0: out of KV cache: caches outside the engine hold the remaining pages$"
        ):
            generate_batch(llama, LETTERS, [[1] * 70], params, memory=memory)
        memory.index.clear()
        assert memory.pool.num_free_pages == 4
        memory.pool.release(others)

    def test_what_is_remembered_does_not_decide_what_fits(self, llama: Decoder) -> None:
        text = [i * 11 % 64 for i in range(128)]
        memory = CacheMemory(llama, 5 * bytes_for(llama.config, 1, 4, 16), page_size=16)  # four, and one to copy
        for prompt, new in ((text[:20], 1), (text[:50], 14)):
            params = SamplingParams(max_new_tokens=new, ignore_eos=True)
            [result] = generate_batch(llama, LETTERS, [prompt], params, memory=memory)
            assert result.token_ids == generate(llama, LETTERS, prompt, params).token_ids

    def test_beyond_the_context(self, tiny_model: Callable[..., Decoder]) -> None:
        model = tiny_model(max_position_embeddings=32)
        memory = CacheMemory(model, 2 * bytes_for(model.config, 32, 4, 16), page_size=16)
        params = SamplingParams(max_new_tokens=20, ignore_eos=True)
        prompts = [[3] * 20, [5] * 40]
        results = generate_batch(model, LETTERS, prompts, params, on_full="recompute", memory=memory)
        expected = [generate(model, LETTERS, prompt, params, on_full="recompute").token_ids for prompt in prompts]
        assert [result.token_ids for result in results] == expected

    def test_another_dtype_is_refused(self, llama: Decoder) -> None:
        options = {"cache_dtype": "int8", "memory": CacheMemory(llama, 10**6)}
        with pytest.raises(ValueError, match=r"cache_dtype='int8' was given, but the memory holds torch\.float32"):
            generate_batch(llama, LETTERS, [[1]], SamplingParams(max_new_tokens=1), **options)
