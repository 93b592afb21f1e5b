"""`verify` finds what it should: nothing in caches that are right, the exact step in those that are not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from mocks import CACHES, MockTokenizer, naive_llama
from torch import Tensor, nn

from infer import GrowingCache, KVCache, SamplingParams, generate
from infer.cache import BaseCache
from infer.engine import verify as module
from infer.engine.verify import Comparison, first_difference, logit_margin, verify
from infer.models.common import Decoder

PROMPTS = [[5, 9, 2], [33], list(range(20))]
LETTERS = MockTokenizer([chr(33 + i) for i in range(64)])
MODES = ["greedy", "seeded"]


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
    """With one kind of cache, this model takes each token for its neighbour from a position on."""

    def __init__(self, model: Decoder, kind: type[BaseCache], position: int) -> None:
        super().__init__(model)
        self.kind = kind
        self.position = position

    def __call__(self, input_ids: Tensor, kv_cache: Any = None) -> Tensor:
        logits = super().__call__(input_ids, kv_cache)
        wrong = isinstance(kv_cache, self.kind) and kv_cache.seq_len >= self.position
        return logits.roll(1, -1) if wrong else logits


@pytest.fixture
def model(tiny_model: Callable[..., Decoder]) -> Decoder:
    return tiny_model()


def check(model: Any, prompts: list[list[int]] = PROMPTS, new: int = 10, seed: int = 0) -> list[Comparison]:
    return list(verify(model, LETTERS, prompts, new, seed))


def naive_margin(model: Decoder, tokens: list[int]) -> float:
    """Between the two best next logits, from textbook formulas."""
    best, second = naive_llama(model, torch.tensor([tokens]))[0, -1].sort(descending=True).values[:2]
    return float(best - second)


def drop_first_position(monkeypatch: pytest.MonkeyPatch, kind: type[BaseCache], after: int) -> None:
    """Let a cache lose its first position once it holds more than so many."""
    update = kind.update

    def forgetful(cache: BaseCache, layer_idx: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = update(cache, layer_idx, k, v)
        return (keys[:, :, 1:], values[:, :, 1:]) if cache.seq_len > after else (keys, values)

    monkeypatch.setattr(kind, "update", forgetful)


def test_equal(model: Decoder) -> None:
    rows = check(model)
    assert rows == [
        Comparison(prompt, mode, kind.__name__, 10)
        for prompt in range(len(PROMPTS))
        for mode in MODES
        for kind in CACHES
    ]
    assert all(row.equal and row.margin is None for row in rows)


def test_every_cache_is_checked() -> None:
    assert list(module.CACHES) == CACHES


def test_end_of_sequence_shortens_both(tiny_model: Callable[..., Decoder]) -> None:
    free = generate(tiny_model(), LETTERS, PROMPTS[0], SamplingParams(max_new_tokens=10)).token_ids
    rows = check(tiny_model(eos_token_ids=(free[3],)), PROMPTS[:1])
    assert [row.tokens for row in rows if row.mode == "greedy"] == [free.index(free[3]) + 1] * len(CACHES)
    assert all(row.equal for row in rows)


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
    rows = {row.cache: row for row in check(model, [prompt]) if row.mode == "greedy"}
    assert rows[kind.__name__].first_difference == at
    assert rows[kind.__name__].margin == pytest.approx(naive_margin(model, prompt + right[:at]), abs=1e-4)
    assert all(row.equal for name, row in rows.items() if name != kind.__name__)


def test_seed(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The seeded run is sampled, with the seed that was asked for."""
    seen: list[SamplingParams] = []

    def noted(model: Any, tokenizer: Any, prompt: Any, params: SamplingParams, **options: Any) -> Any:
        seen.append(params)
        return generate(model, tokenizer, prompt, params, **options)

    monkeypatch.setattr(module, "generate", noted)
    check(model, PROMPTS[:1], new=4, seed=77)
    assert {(params.temperature > 0, params.seed) for params in seen} == {(False, None), (True, 77)}
    assert {params.max_new_tokens for params in seen} == {4}
    assert len(seen) == 2 * (1 + len(CACHES))


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
    assert margin == float(best - second) > 0


def test_caches_of_the_models_dtype(tiny_model: Callable[..., Decoder], monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, int, torch.dtype]] = []
    for kind in (KVCache, GrowingCache):

        def noted(*args: Any, make: Any = kind.from_model_config, **options: Any) -> BaseCache:
            cache = make(*args, **options)
            made.append((type(cache).__name__, cache.capacity, cache.dtype))
            return cache

        monkeypatch.setattr(kind, "from_model_config", noted)
    check(tiny_model(dtype=torch.bfloat16), [[5, 9, 2]], new=4)
    assert made == [("KVCache", 7, torch.bfloat16), ("GrowingCache", 7, torch.bfloat16)] * 2
