"""`verify` finds what it should: nothing in caches that are right, the exact step in those that are not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from mocks import CACHES, MockTokenizer, naive_logits
from torch import Tensor, nn

from infer import ModelConfig, SamplingParams, SlidingCache, generate
from infer.cache import BaseCache, BatchCache
from infer.engine import generate as engine
from infer.engine import verify as module
from infer.engine.verify import (
    LONG_EXTRA,
    Comparison,
    chunkings,
    first_difference,
    logit_margin,
    verify,
    with_long_prompt,
)
from infer.models.common import Decoder

PROMPTS = [[5, 9, 2], [33], list(range(20))]
LETTERS = MockTokenizer([chr(33 + i) for i in range(64)])
MODES = ["greedy", "seeded"]
CHUNKS = {3: [None, 1], 1: [None], 20: [None, 1, 3]}  # by the prompt's length
WINDOW = 6
WINDOWS = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": WINDOW}


class Counted:
    """A model that counts its passes."""

    def __init__(self, model: Decoder) -> None:
        self.model = model
        self.config = model.config
        self.calls = 0

    def parameters(self) -> Iterator[nn.Parameter]:
        return self.model.parameters()

    def __call__(self, input_ids: Tensor, kv_cache: Any = None) -> Tensor:
        self.calls += 1
        return self.model(input_ids, kv_cache)


class WrongAt(Counted):
    """With one kind of cache, this model likes best what it should like least, from a position on."""

    def __init__(self, model: Decoder, kind: type[BaseCache], position: int) -> None:
        super().__init__(model)
        self.kind = kind
        self.position = position

    def __call__(self, input_ids: Tensor, kv_cache: Any = None) -> Tensor:
        logits = super().__call__(input_ids, kv_cache)
        wrong = isinstance(kv_cache, self.kind) and kv_cache.seq_len >= self.position
        return -logits if wrong else logits


@pytest.fixture
def model(tiny_model: Callable[..., Decoder]) -> Decoder:
    return tiny_model()


def check(model: Any, prompts: list[list[int]] = PROMPTS, new: int = 10, seed: int = 0) -> list[Comparison]:
    return list(verify(model, LETTERS, prompts, new, seed))


def naive_margin(model: Decoder, tokens: list[int]) -> float:
    """Between the two best next logits, from textbook formulas."""
    best, second = naive_logits(model, torch.tensor([tokens]))[0, -1].sort(descending=True).values[:2]
    return float(best - second)


def paths(rows: list[Comparison], *, equal: bool) -> set[str]:
    return {row.path for row in rows if row.equal == equal}


def drop_first_position(monkeypatch: pytest.MonkeyPatch, kind: type[BaseCache], after: int) -> None:
    """Let a cache take its first position for nothing once it holds more than so many."""
    attend = kind.attend

    def forgetful(cache: Any, layer_idx: int, *args: Any, **options: Any) -> Tensor:
        if cache.seq_len > after:
            cache.k[layer_idx][:, :, 0] = cache.v[layer_idx][:, :, 0] = 0
        return attend(cache, layer_idx, *args, **options)

    monkeypatch.setattr(kind, "attend", forgetful)


def test_equal(model: Decoder) -> None:
    rows = check(model)
    expected = []
    for mode in MODES:
        for prompt, ids in enumerate(PROMPTS):
            chunks = CHUNKS[len(ids)] if mode == "greedy" else [None]
            expected += [Comparison(prompt, mode, kind.__name__, chunk, 1, 10) for kind in CACHES for chunk in chunks]
        expected += [Comparison(prompt, mode, "default cache", None, 3, 10) for prompt in range(3)]
    assert rows == expected
    assert all(row.equal and row.margin is None for row in rows)


def test_every_cache_is_checked() -> None:
    assert list(module.CACHES) == CACHES


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_windows(tiny_model: Callable[..., Decoder], family: str) -> None:
    """Prompts at the window's edge, and one well past it, in chunks that end before, at and behind it."""
    model = tiny_model(model_type=family, **WINDOWS, num_hidden_layers=2)
    prompts = with_long_prompt(model.config, [list(range(WINDOW)), list(range(WINDOW + 1))], 4)
    rows = check(model, prompts, new=4)
    assert all(row.equal for row in rows)
    whole = {kind.__name__ for kind in CACHES}
    long = {row.path for row in rows if row.prompt == 2 and row.mode == "greedy"}
    assert long == whole | {f"{name}, chunks of {size}" for name in whole for size in (48, 6, 7)} | {
        "default cache, batch of 3"
    }


@pytest.mark.parametrize(
    ("window", "length", "expected"),
    [
        (None, 1, []),
        (None, 3, [1]),
        (None, 4, [1, 3]),
        (None, LONG_EXTRA, []),
        (None, LONG_EXTRA + 1, [LONG_EXTRA]),
        (1, 20, [1, 3, 2]),
        (6, 6, [1, 3]),
        (6, 7, [1, 3, 6]),
        (6, 8, [1, 3, 6, 7]),
        (100, 20, [1, 3]),
        (100, 148, [48, 100, 101]),
    ],
)
def test_chunkings(tiny_config: Callable[..., ModelConfig], window: int | None, length: int, expected: list) -> None:
    config = tiny_config(**(WINDOWS | {"sliding_window": window} if window else {}))
    assert chunkings(config, length) == [None, *expected]


@pytest.mark.parametrize(
    ("changes", "length"),
    [
        ({}, None),
        ({"sliding_window": 6}, None),  # which no layer has
        (WINDOWS, 54),
        (WINDOWS | {"sliding_window": 198}, 246),  # the last that leaves room for 10 more
        (WINDOWS | {"sliding_window": 199}, None),
    ],
)
def test_a_long_prompt_where_there_are_windows(
    tiny_config: Callable[..., ModelConfig], changes: dict, length: int | None
) -> None:
    prompts = with_long_prompt(tiny_config(**changes), PROMPTS, 10)
    assert prompts[:3] == PROMPTS
    if length is None:
        assert len(prompts) == 3
    else:
        (long,) = prompts[3:]
        row = [token for prompt in PROMPTS for token in prompt]
        assert long == (row * 12)[:length]


def test_path() -> None:
    assert Comparison(0, "greedy", "KVCache").path == "KVCache"
    assert Comparison(0, "greedy", "KVCache", 3).path == "KVCache, chunks of 3"
    assert Comparison(0, "greedy", "default cache", batch=4).path == "default cache, batch of 4"


def test_one_prompt_is_no_batch(model: Decoder) -> None:
    assert {row.batch for row in check(model, PROMPTS[:1], new=3)} == {1}


def test_end_of_sequence_shortens_both(tiny_model: Callable[..., Decoder]) -> None:
    free = generate(tiny_model(), LETTERS, PROMPTS[0], SamplingParams(max_new_tokens=10)).token_ids
    rows = check(tiny_model(eos_token_ids=(free[3],)), PROMPTS[:1])
    assert {row.tokens for row in rows if row.mode == "greedy"} == {free.index(free[3]) + 1}
    assert all(row.equal for row in rows)


class TestPlantedBugs:
    """Each is reported on exactly the paths that it lies on."""

    @pytest.fixture
    def model(self, tiny_model: Callable[..., Decoder]) -> Decoder:
        return tiny_model(**WINDOWS)

    @pytest.fixture
    def prompts(self, model: Decoder) -> list[list[int]]:
        return with_long_prompt(model.config, [PROMPTS[0], PROMPTS[2]], 6)

    @pytest.mark.parametrize("off", [-1, 1])
    def test_a_ring_off_by_one(
        self, model: Decoder, prompts: list[list[int]], off: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def wrong(cache: SlidingCache, layer_idx: int) -> int:
            window = cache.windows[layer_idx]
            return 0 if window is None else max(0, cache.seq_len - window + 1 + off)

        monkeypatch.setattr(SlidingCache, "_first_seen", wrong)
        rows = check(model, prompts, new=6)
        assert paths(rows, equal=False) == {row.path for row in rows if row.cache in ("SlidingCache", "default cache")}
        assert all(row.equal for row in rows if row.cache in ("KVCache", "GrowingCache"))
        assert all(row.margin is not None for row in rows if not row.equal)

    def test_chunks_that_lose_their_seam(
        self, model: Decoder, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        cut = engine.chunks

        def wrong(tokens: Tensor, size: int | None) -> list[Tensor]:
            first, *rest = cut(tokens, size)
            return [first, *((chunk + 1) % 64 for chunk in rest)]

        monkeypatch.setattr(engine, "chunks", wrong)
        rows = check(model, prompts, new=6)
        assert paths(rows, equal=False) == {row.path for row in rows if row.chunk is not None}
        assert all(row.equal for row in rows if row.chunk is None)

    def test_rows_mixed_up(self, model: Decoder, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
        attend = BatchCache.attend

        def wrong(cache: BatchCache, *args: Any, **options: Any) -> Tensor:
            return attend(cache, *args, **options).roll(1, 0)

        monkeypatch.setattr(BatchCache, "attend", wrong)
        rows = check(model, prompts, new=6)
        assert paths(rows, equal=False) == {"default cache, batch of 3"}
        assert {(row.prompt, row.mode) for row in rows if not row.equal} == {(i, m) for i in range(3) for m in MODES}
        assert all(row.equal for row in rows if row.batch == 1)


@pytest.mark.parametrize("step", [0, 1, 9])
@pytest.mark.parametrize("kind", CACHES)
def test_the_first_wrong_step_and_its_margin(model: Decoder, kind: type[BaseCache], step: int) -> None:
    prompt = PROMPTS[0]
    rows = check(WrongAt(model, kind, len(prompt) + step), [prompt], seed=3)
    seeded = SamplingParams(temperature=0.8, top_p=0.95, seed=3, max_new_tokens=10)
    expected = {
        "greedy": generate(model, LETTERS, prompt, SamplingParams(max_new_tokens=10), use_kv_cache=False).token_ids,
        "seeded": generate(model, LETTERS, prompt, seeded, use_kv_cache=False).token_ids,
    }
    for row in rows:
        if row.cache == kind.__name__:
            assert row.first_difference == step
            assert not row.equal
            assert row.margin == pytest.approx(naive_margin(model, prompt + expected[row.mode][:step]), abs=1e-4)
        else:
            assert row.equal
            assert row.margin is None


@pytest.mark.parametrize("kind", CACHES)
def test_a_cache_that_loses_a_position(model: Decoder, kind: type[BaseCache], monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, params = PROMPTS[2], SamplingParams(max_new_tokens=10)
    right = generate(model, LETTERS, prompt, params, use_kv_cache=False).token_ids
    drop_first_position(monkeypatch, kind, len(prompt) + 2)
    cache = kind.from_model_config(model.config, 40, dtype="float32", device="cpu")
    wrong = generate(model, LETTERS, prompt, params, cache=cache).token_ids
    at = [a == b for a, b in zip(right, wrong, strict=True)].index(False)
    assert at >= 4  # tokens 0 to 3 come from passes that still saw everything
    rows = [row for row in check(model, [prompt]) if row.mode == "greedy"]
    assert {row.first_difference for row in rows if row.cache == kind.__name__} == {at}
    margins = [row.margin for row in rows if row.cache == kind.__name__]
    assert margins == pytest.approx([naive_margin(model, prompt + right[:at])] * 3, abs=1e-4)
    assert all(row.equal for row in rows if row.cache != kind.__name__)


def test_seed(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The seeded run is sampled, with the seed that was asked for."""
    seen: list[SamplingParams] = []

    def noted(model: Any, tokenizer: Any, prompt: Any, params: SamplingParams, **options: Any) -> Any:
        seen.append(params)
        return generate(model, tokenizer, prompt, params, **options)

    monkeypatch.setattr(module, "generate", noted)
    check(model, PROMPTS[:1], new=4, seed=77)
    greedy, seeded = SamplingParams(max_new_tokens=4), SamplingParams(0.8, top_p=0.95, seed=77, max_new_tokens=4)
    assert seen == [greedy] * (1 + 2 * len(CACHES)) + [seeded] * (1 + len(CACHES))


@pytest.mark.parametrize(
    ("prompt", "new", "message"),
    [
        ([1] * 250, 7, r"250 prompt tokens \+ 7 new tokens = 257 positions exceed the model's context of 256"),
        ([], 7, "the prompt is empty"),
        ([64], 7, "token id 64 in the prompt is outside the vocabulary"),
        ([1], 0, "max_new_tokens must be"),
    ],
)
def test_refused_before_work(model: Decoder, prompt: list[int], new: int, message: str) -> None:
    """Although the first prompt would do."""
    counted = Counted(model)
    with pytest.raises(ValueError, match=message):
        check(counted, [PROMPTS[0], prompt], new)
    assert counted.calls == 0


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [([], [], None), ([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1], [1, 2], 1), ([1, 2], [1], 1), ([], [4], 0)],
)
def test_first_difference(a: list[int], b: list[int], expected: int | None) -> None:
    assert first_difference(a, b) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_margin_is_a_plain_number(tiny_model: Callable[..., Decoder], dtype: torch.dtype) -> None:
    model = tiny_model(dtype=dtype)
    margin = logit_margin(model, [3, 1, 4])
    assert type(margin) is float
    best, second = model(torch.tensor([[3, 1, 4]]))[0, -1].float().sort(descending=True).values[:2]
    assert margin == pytest.approx(float(best - second), abs=1e-5 if dtype is torch.float32 else 0)
    assert margin > 0


def test_caches_of_the_models_dtype(tiny_model: Callable[..., Decoder], monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, int, torch.dtype]] = []
    for kind in CACHES:

        def noted(*args: Any, make: Any = kind.from_model_config, **options: Any) -> BaseCache:
            cache = make(*args, **options)
            made.append((type(cache).__name__, cache.capacity, cache.dtype))
            return cache

        monkeypatch.setattr(kind, "from_model_config", noted)
    check(tiny_model(dtype=torch.bfloat16), [[5, 9, 2]], new=4)
    assert set(made) == {(kind.__name__, 7, torch.bfloat16) for kind in CACHES}
    assert len(made) == len(CACHES) * 3  # greedy whole, greedy in chunks of 1, seeded


def test_rings_are_as_narrow_as_their_chunks_allow(tiny_model: Callable[..., Decoder]) -> None:
    """So that they wrap within a short prompt."""
    model = tiny_model(**WINDOWS)
    for chunk, slots in ((None, WINDOW + 1), (1, WINDOW + 1), (3, WINDOW + 3)):
        cache = module.empty_cache(SlidingCache, model, 30, chunk)
        assert [k.shape[2] for k in cache.k] == [slots, 30]  # type: ignore[attr-defined]


class TestOwnPrompts:
    class Characters:
        """Reads lower-case letters and spaces."""

        def encode(self, text: str) -> list[int]:
            if not set(text) <= set("abcdefghijklmnopqrstuvwxyz "):
                raise ValueError("a character has no id")
            return [ord(character) - 32 for character in text]

    def test_what_it_can_read(self, tiny_config: Callable[..., ModelConfig]) -> None:
        prompts = module.own_prompts(tiny_config(), self.Characters(), 8)
        assert list(prompts) == list(module.PROMPTS[:7])  # the last is Japanese
        assert prompts["The capital of France is"] == self.Characters().encode("he capital of rance is")

    def test_what_fits(self, tiny_config: Callable[..., ModelConfig]) -> None:
        prompts = module.own_prompts(tiny_config(max_position_embeddings=16), self.Characters(), 10)
        assert max(map(len, prompts.values())) == 6
