"""From logits to a token: against transformers' processors, by formula, and by counting."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from infer import SamplingParams
from infer.engine.sampler import penalize, sample
from infer.nn.draw import MAX_VOCAB, draw, masses, uniform, weights
from infer.values import short_repr

VOCAB = 50
NAN, INF = float("nan"), float("inf")
HUGE = 10**400  # an int that no float holds


def random_logits(seed: int, scale: float = 3.0) -> Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * scale


def tied_logits() -> Tensor:
    """Few different values, each many times."""
    return torch.randint(-3, 4, (VOCAB,), generator=torch.Generator().manual_seed(0)).float()


def reference(logits: Tensor, *processors: Any) -> Tensor:
    """Probabilities after transformers' processors."""
    scores = logits[None]
    for processor in processors:
        scores = processor(torch.zeros(1, 1, dtype=torch.long), scores)
    return scores.softmax(-1)[0]


def filtered(logits: Tensor, params: SamplingParams) -> Tensor:
    """Probabilities after the filters."""
    tokens, mass = weights(logits.numpy(), params.packed(0, len(logits)).columns)
    probabilities = torch.zeros(len(logits), dtype=torch.float64)
    probabilities[list(tokens)] = torch.from_numpy(mass / mass.sum())
    return probabilities.float()


class TestFilters:
    @pytest.mark.parametrize("seed", range(4))
    @pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
    def test_temperature(self, temperature: float, seed: int) -> None:
        logits = random_logits(seed)
        expected = reference(logits, TemperatureLogitsWarper(temperature))
        torch.testing.assert_close(filtered(logits, SamplingParams(temperature=temperature)), expected)

    @pytest.mark.parametrize("logits", [*map(random_logits, range(4)), tied_logits()])
    @pytest.mark.parametrize("k", [1, 2, 7, VOCAB - 1, VOCAB, 1000])
    def test_top_k(self, k: int, logits: Tensor) -> None:
        expected = reference(logits, TopKLogitsWarper(k))
        torch.testing.assert_close(filtered(logits, SamplingParams(temperature=1.0, top_k=k)), expected)

    @pytest.mark.parametrize("k", [None, 0])
    def test_top_k_off(self, k: int | None) -> None:
        logits = random_logits(0)
        torch.testing.assert_close(filtered(logits, SamplingParams(temperature=1.0, top_k=k)), logits.softmax(-1))

    @pytest.mark.parametrize("seed", range(4))
    @pytest.mark.parametrize("p", [1e-9, 0.1, 0.5, 0.9, 0.99, 1.0])
    def test_top_p(self, p: float, seed: int) -> None:
        logits = random_logits(seed)
        expected = reference(logits, TopPLogitsWarper(p))
        torch.testing.assert_close(filtered(logits, SamplingParams(temperature=1.0, top_p=p)), expected)

    @pytest.mark.parametrize("p", [5e-324, 1e-300, 1e-46, 1e-45, 1e-30])
    def test_a_tiny_top_p_keeps_the_likeliest(self, p: float) -> None:
        """Also one that is 0 in float32."""
        logits = random_logits(0)
        kept = filtered(logits, SamplingParams(temperature=1.0, top_p=p))
        assert kept.nonzero().tolist() == [[int(logits.argmax())]]
        assert kept.max() == 1

    @pytest.mark.parametrize("p", [0.05, 0.3, 0.77])
    def test_top_p_keeps_equals(self, p: float) -> None:
        """A token stays if all that are likelier have less than p together, whatever order its equals are in."""
        logits = tied_logits()
        likely = logits.softmax(-1)
        kept = torch.stack([likely[likely > own].sum() < p for own in likely])
        assert kept.sum() < VOCAB
        expected = logits.masked_fill(~kept, -torch.inf).softmax(-1)
        torch.testing.assert_close(filtered(logits, SamplingParams(temperature=1.0, top_p=p)), expected)

    @pytest.mark.parametrize("logits", [*map(random_logits, range(4)), tied_logits()])
    @pytest.mark.parametrize("p", [0.01, 0.2, 0.9, 1.0])
    def test_min_p(self, p: float, logits: Tensor) -> None:
        expected = reference(logits, MinPLogitsWarper(p))
        torch.testing.assert_close(filtered(logits, SamplingParams(temperature=1.0, min_p=p)), expected)

    @pytest.mark.parametrize("seed", range(8))
    def test_all_in_order(self, seed: int) -> None:
        logits = random_logits(seed, scale=1.5)
        params = SamplingParams(temperature=0.8, top_k=20, top_p=0.9, min_p=0.05)
        warpers = TemperatureLogitsWarper(0.8), TopKLogitsWarper(20), TopPLogitsWarper(0.9), MinPLogitsWarper(0.05)
        torch.testing.assert_close(filtered(logits, params), reference(logits, *warpers))

    @pytest.mark.parametrize("options", [{"top_k": 37}, {"top_p": 36.5 / 200}], ids=str)
    def test_the_least_that_filters_tell(self, options: dict) -> None:
        """Neighbours 2^-16 octaves apart, or more, are told apart; of those in the same step, all are kept or none."""
        order = torch.randperm(200, generator=torch.Generator().manual_seed(0))
        octave, params = np.log(2), SamplingParams(temperature=1.0, **options)
        apart = filtered(order * (1.25 * 2**-16 * octave), params)
        assert (apart > 0).sum() == 37
        assert order[apart > 0].min() == 200 - 37
        close = filtered(order * (2**-18 * octave), params)
        assert 37 <= (close > 0).sum() <= 37 + 4
        assert order[close > 0].min() == 200 - (close > 0).sum()

    @pytest.mark.parametrize("options", [{"top_k": 60}, {"top_k": 60, "min_p": 0.3}, {"top_p": 0.6}], ids=str)
    @pytest.mark.parametrize("size", [99, 1000, 2**14 + 1, 3 * 2**14])
    def test_large_vocabularies(self, size: int, options: dict) -> None:
        """Logits 1/1000 apart, so that no rounding decides; more tokens than are looked at together."""
        logits = torch.randperm(size, generator=torch.Generator().manual_seed(0)) / 1000
        params = SamplingParams(temperature=1.0, **options)
        warpers = {"top_k": TopKLogitsWarper, "top_p": TopPLogitsWarper, "min_p": MinPLogitsWarper}
        expected = reference(logits.double(), *(warpers[name](value) for name, value in options.items()))
        torch.testing.assert_close(filtered(logits, params), expected.float(), rtol=1e-6, atol=0)

    def test_input_is_not_changed(self) -> None:
        logits = random_logits(0)
        before = logits.clone()
        params = SamplingParams(
            temperature=0.5,
            top_k=5,
            top_p=0.5,
            min_p=0.1,
            repetition_penalty=2.0,
            presence_penalty=1.0,
            logit_bias={1: 2},
        )
        sample(logits, [1, 2, 3], 1, params, seed=0)
        assert torch.equal(logits, before)


def penalized_logits(logits: Tensor, tokens: list[int], prompt_len: int, **options: Any) -> Tensor:
    return torch.from_numpy(penalize(logits.numpy(), tokens, prompt_len, SamplingParams(**options)))


class TestPenalties:
    @pytest.mark.parametrize("seed", range(4))
    @pytest.mark.parametrize("penalty", [0.5, 1.3, 10.0])
    def test_repetition(self, penalty: float, seed: int) -> None:
        logits = random_logits(seed)
        tokens = [3, 7, 7, 0, VOCAB - 1]
        expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([tokens]), logits[None])[0]
        for prompt_len in (1, 3, 5):  # prompt and output alike
            got = penalized_logits(logits, tokens, prompt_len, repetition_penalty=penalty)
            torch.testing.assert_close(got, expected)

    def test_presence_and_frequency(self) -> None:
        logits = random_logits(0)
        tokens = [1, 2, 3, 3, 4, 3, 1]  # the first two are the prompt
        got = penalized_logits(logits, tokens, 2, presence_penalty=0.5, frequency_penalty=0.25)
        expected = logits.clone()
        for token, count in Counter(tokens[2:]).items():
            expected[token] -= 0.5 + 0.25 * count
        torch.testing.assert_close(got, expected)
        assert got[2] == logits[2]

    @pytest.mark.parametrize("penalty", ["presence_penalty", "frequency_penalty"])
    def test_the_prompt_is_not_penalized(self, penalty: str) -> None:
        logits = random_logits(0)
        assert torch.equal(penalized_logits(logits, [1, 2], 2, **{penalty: 2.0}), logits)
        assert penalized_logits(logits, [1, 2, 5], 2, **{penalty: 2.0})[5] == logits[5] - 2

    def test_negative_penalties_encourage(self) -> None:
        logits = torch.zeros(4)
        assert sample(logits, [0, 3], 1, SamplingParams(presence_penalty=-1.0), 0) == 3

    def test_logit_bias(self) -> None:
        logits = random_logits(0)
        got = penalized_logits(logits, [1], 1, logit_bias={4: 2.5, 9: -1.0})
        expected = logits.clone()
        expected[4] += 2.5
        expected[9] -= 1.0
        torch.testing.assert_close(got, expected)

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_logit_bias_can_ban(self, temperature: float) -> None:
        logits = torch.tensor([5.0, 1.0, 5.0])
        params = SamplingParams(temperature=temperature, logit_bias={0: float("-inf"), 2: float("-inf")})
        assert {sample(logits, [0] * i, i, params, seed=i) for i in range(1, 30)} == {1}

    def test_nothing_asked_nothing_done(self) -> None:
        logits = random_logits(0)
        assert torch.equal(penalized_logits(logits, [1, 2, 3], 1), logits)


class TestUniform:
    def test_is_a_function_of_seed_and_position(self) -> None:
        grid = {(seed, at): uniform(seed, at) for seed in range(20) for at in range(50)}
        again = {(seed, at): uniform(seed, at) for at in reversed(range(50)) for seed in reversed(range(20))}
        assert grid == again
        assert len(set(grid.values())) == len(grid)

    def test_seeds_are_all_different(self) -> None:
        """Near 0, around what fits 32, 53 and 63 bits, and at the end: no two share a stream."""
        seeds = [start + i for start in (0, 2**32 - 8, 2**53 - 8, 2**63 - 8, 2**64 - 16) for i in range(16)]
        streams = {tuple(uniform(seed, at) for at in range(3)) for seed in seeds}
        assert len(streams) == len(seeds)

    @pytest.mark.parametrize("seed", [0, 1, 2**63, 2**64 - 1])
    def test_is_in_range(self, seed: int) -> None:
        assert all(0 <= uniform(seed, at) < 1 for at in range(1000))

    @pytest.mark.parametrize("along", ["positions", "seeds"])
    def test_is_uniform(self, along: str) -> None:
        """Chi-square over 20 bins: 19 degrees of freedom, so above 50 once in 7,000 tries; these tries are fixed."""
        for fixed in range(5):
            draws = [uniform(fixed, i) if along == "positions" else uniform(i, fixed) for i in range(4000)]
            counts = Counter(int(draw * 20) for draw in draws)
            assert sum((counts[i] - 200) ** 2 / 200 for i in range(20)) < 50

    def test_neighbours_are_independent(self) -> None:
        draws = torch.tensor([[uniform(seed, at) for at in range(200)] for seed in range(20)], dtype=torch.float64)
        for left, right in ((draws[:, :-1], draws[:, 1:]), (draws[:-1], draws[1:]), (draws[:-1, 1:], draws[1:, :-1])):
            assert abs(torch.corrcoef(torch.stack((left.flatten(), right.flatten())))[0, 1]) < 0.06


class TestMasses:
    def test_halve_with_every_octave(self) -> None:
        octaves = np.arange(46)
        np.testing.assert_array_equal(masses(octaves.astype(np.int32) << 25), 2**44 >> octaves)

    def test_are_exponential_and_never_rise(self) -> None:
        """Two octaves: the steps from one line to the next, and from one octave to the next, are among them."""
        depth = (np.arange(0, 2**26, 2**8)[:, None] + [-1, 0, 1]).flatten().clip(0).astype(np.int32)
        mass = masses(depth)
        assert np.abs(mass / np.exp2(44 - depth / 2**25) - 1).max() < 7e-9
        assert (np.diff(mass)[1:] < 0).all()


class TestSample:
    def test_greedy_takes_the_best(self) -> None:
        for seed in range(5):
            logits = random_logits(seed)
            assert sample(logits, [1], 1, SamplingParams(), seed=seed) == int(logits.argmax())

    def test_greedy_takes_the_first_of_equals(self) -> None:
        assert sample(torch.tensor([0.0, 2.0, 2.0]), [1], 1, SamplingParams(), seed=0) == 1

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_half_precision_logits(self, dtype: torch.dtype) -> None:
        logits = random_logits(0).to(dtype)
        params = SamplingParams(temperature=1.0, top_p=0.9)
        for at in range(1, 20):
            assert sample(logits, [0] * at, at, params, 3) == sample(logits.float(), [0] * at, at, params, 3)

    def test_draw_depends_on_seed_and_length_alone(self) -> None:
        logits = torch.zeros(VOCAB)
        params = SamplingParams(temperature=1.0)
        assert sample(logits, [1, 2, 3], 1, params, 5) == sample(logits, [9, 9, 9], 3, params, 5)
        assert sample(logits, [1, 2, 3], 1, params, 5) == int(uniform(5, 3) * VOCAB)

    @pytest.mark.parametrize(
        "options", [{}, {"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.3}, {"temperature": 2.0}], ids=str
    )
    def test_frequencies_match_probabilities(self, options: dict) -> None:
        logits = torch.tensor([1.0, -1.0, 0.5, 0.0, 2.0, -torch.inf])
        params = SamplingParams(**({"temperature": 1.0} | options))
        probabilities = filtered(logits, params).tolist()
        tries = 3000
        counts = Counter(sample(logits, [0], 1, params, seed) for seed in range(tries))
        assert all(counts[i] == 0 for i, p in enumerate(probabilities) if p == 0)
        chi_square = sum((counts[i] - tries * p) ** 2 / (tries * p) for i, p in enumerate(probabilities) if p)
        assert chi_square < 25  # at most 4 degrees of freedom: once in 20,000 tries, and these are fixed

    @pytest.mark.parametrize("draw", [0.0, 1 - 2**-53])
    def test_impossible_tokens_are_never_drawn(self, monkeypatch: pytest.MonkeyPatch, draw: float) -> None:
        monkeypatch.setattr("infer.engine.sampler.uniform", lambda seed, position: draw)
        logits = torch.tensor([-torch.inf, 1.0, 2.0, -torch.inf])
        assert sample(logits, [0], 1, SamplingParams(temperature=1.0), 0) == (1 if draw == 0 else 2)

    def test_top_k_1_takes_the_first_of_equals(self) -> None:
        logits = torch.tensor([0.0, 2.0, 2.0])
        assert {sample(logits, [1], 1, SamplingParams(temperature=1.0, top_k=1), seed) for seed in range(20)} == {1}

    @pytest.mark.parametrize("temperature", [0.0, 1e-9, 1.0, 1e35])
    def test_infinities_and_nan(self, temperature: float) -> None:
        params = SamplingParams(temperature=temperature)
        logits = torch.tensor([-INF, 3.0, INF, -1.0, INF])
        drawn = {sample(logits, [1], 1, params, seed) for seed in range(20)}
        assert drawn == ({2, 4} if temperature else {2})
        assert sample(torch.full((5,), -INF), [1], 1, params, 0) == -1
        assert sample(torch.tensor([1.0, INF, NAN]), [1], 1, params, 0) == -1
        assert sample(torch.tensor([-INF, -3e38, -INF]), [1], 1, params, 0) == 1
        assert sample(torch.tensor([7.0]), [1], 1, params, 0) == 0

    def test_a_huge_temperature_is_uniform(self) -> None:
        logits = torch.tensor([30.0, -30.0, 0.0, -INF])
        counts = Counter(sample(logits, [1], 1, SamplingParams(temperature=1e300), seed) for seed in range(600))
        assert all(150 < counts[token] < 250 for token in range(3))
        assert counts[3] == 0

    @pytest.mark.parametrize("size", [MAX_VOCAB, MAX_VOCAB + 1, 5 * MAX_VOCAB])
    def test_any_vocabulary(self, size: int) -> None:
        """All tokens alike: their masses are as large as can be, and where a draw lies says which it takes."""
        logits = np.zeros(size, np.float32)
        for options in ({}, {"top_p": 0.25}):
            columns = SamplingParams(**{"temperature": 1.0} | options).packed(0, size).columns
            for at in (0.0, 0.1, 0.75, 1 - 2**-53):
                assert draw(logits, columns, at) == int(at * size)

    @pytest.mark.parametrize("temperature", [1e-6, 1e-40])
    def test_a_tiny_temperature_is_greedy(self, temperature: float) -> None:
        logits = random_logits(0)
        assert sample(logits, [1], 1, SamplingParams(temperature=temperature), 3) == int(logits.argmax())


BAD_VALUES: dict[str, list[Any]] = {
    "temperature": [-0.1, NAN, INF, "1", None, True, HUGE, -HUGE, Fraction(HUGE)],
    "top_k": [-1, 1.5, "3", True, HUGE],
    "top_p": [0, -0.5, 1.01, NAN, "x", None, HUGE, Fraction(HUGE)],
    "min_p": [-0.01, 1.01, NAN, None, HUGE],
    "repetition_penalty": [0, -1, NAN, INF, None, HUGE],
    "presence_penalty": [NAN, INF, -INF, "x", None, HUGE, -HUGE],
    "frequency_penalty": [NAN, INF, -INF, "x", None, HUGE, -HUGE],
    "max_new_tokens": [0, -1, 1.5, NAN, "3", None, True, HUGE, 10**5000],
    "seed": [1.5, "x", True, -1, 2**64, HUGE, -HUGE, 10**5000],
    "logit_bias": [
        *[{-1: 1.0}, {1.5: 1.0}, {"1": 1.0}, {True: 1.0}, {1: NAN}, {1: INF}, {1: "x"}, {1: None}, None],
        *[{1: HUGE}, {1: -HUGE}, {1: True}, {-HUGE: 1.0}],
    ],
    "stop": ["", ["a", ""], [1], [None], None, 3],
    "ignore_eos": [None, "no"],
}


class TestParams:
    def test_numbers_of_numpy(self) -> None:
        asked = {"temperature": 0.5, "top_k": 5, "seed": 7, "max_new_tokens": 3, "presence_penalty": 1.5}
        params = SamplingParams(
            **{
                name: np.float32(value) if isinstance(value, float) else np.int64(value)
                for name, value in asked.items()
            },
            logit_bias={np.int64(3): np.float32(-2)},
        )
        assert params == SamplingParams(**asked, logit_bias={3: -2.0})
        assert all(type(getattr(params, name)) is type(value) for name, value in asked.items())
        with pytest.raises(ValueError, match="top_k must be an integer"):
            SamplingParams(top_k=np.float32(5))

    @pytest.mark.parametrize(
        ("name", "value"), [(name, value) for name, values in BAD_VALUES.items() for value in values], ids=short_repr
    )
    def test_bad_values(self, name: str, value: Any) -> None:
        with pytest.raises(ValueError, match=name):
            SamplingParams(**{name: value})

    @pytest.mark.parametrize(
        "options",
        [
            {"temperature": 0},
            {"temperature": 2},
            {"top_k": 0},
            {"top_k": None},
            {"top_p": 1},
            {"min_p": 1.0},
            {"seed": 0},
            {"seed": 2**64 - 1},
            {"top_p": 5e-324},
            {"top_k": 10**300},
            {"logit_bias": {0: -INF}},
            {"presence_penalty": -2.0},
        ],
        ids=str,
    )
    def test_good_values(self, options: dict) -> None:
        assert all(getattr(SamplingParams(**options), name) == value for name, value in options.items())

    def test_one_stop_string_is_a_list_of_one(self) -> None:
        assert SamplingParams(stop="ab").stop == ("ab",)
        assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")

    def test_frozen(self) -> None:
        with pytest.raises(AttributeError):
            SamplingParams().temperature = 1.0
