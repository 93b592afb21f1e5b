"""Choosing on the device: the tokens of the sampler on the host, always. Without a GPU, the kernels run in Triton's
interpreter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from amount import amount, once
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreted import hurried
from torch import Tensor

from infer import SamplingParams
from infer.backend.gpu.sampling import DeviceSampler, GreedySampler
from infer.backend.gpu.sampling_kernels import _mass
from infer.engine.params import DISTRIBUTION_SETTINGS, SETTINGS, Setting
from infer.engine.sampler import penalize, sample
from infer.nn.draw import MAX_VOCAB, masses, uniform, weights
from infer.nn.packed import MAX_DEPTH, OCTAVE

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
POISON = -77
INF, NAN = float("inf"), float("nan")
PROMPT = [1, 2, 3, 3]
SEEDS = (0, 1, 2**32 + 5, 2**63, 2**64 - 2, 2**64 - 1)

FILTERS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.5, "frequency_penalty": 0.5},
    {},
    {"temperature": 0.3},
    {"top_k": 3},
    {"top_k": 40, "temperature": 1.7},
    {"top_k": 10**6},
    {"top_p": 0.9},
    {"top_p": 0.5, "temperature": 0.3},
    {"top_p": 1e-30},
    {"top_p": 1e-46},
    {"top_k": 5, "top_p": 0.8},
    {"top_k": 300, "top_p": 0.95, "min_p": 0.01},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"top_p": 0.95, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.25},
    {"top_k": 50, "presence_penalty": -1.0, "logit_bias": {0: 4.0, 7: -INF, 990: 5.5}},
    {"presence_penalty": 0.1, "frequency_penalty": 0.7, "repetition_penalty": 1.1},
]


@pytest.fixture(scope="module", autouse=True)
def faster() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        hurried(patch)
        yield


def sampling(**options: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 1.0} | options))


def set_row(
    sampler: DeviceSampler, row: int, params: SamplingParams, seed: int, tokens: list[int], prompt_len: int
) -> None:
    sampler.set_rows([row], [params.packed(seed, sampler.vocab)], [tokens], [prompt_len])


def run(sampler: GreedySampler, logits: Tensor, positions: list[int]) -> list[int]:
    """The tokens; that a host reads the same, in the line of the fifth step."""
    tokens, host_tokens = torch.full((4, len(logits)), POISON, device=DEVICE).split([1, 3])
    steps = torch.tensor([5], dtype=torch.int32, device=DEVICE)
    at = torch.tensor(positions, dtype=torch.int32, device=DEVICE)
    sampler.launch(logits.to(DEVICE), at, tokens[0], host_tokens, steps)
    assert torch.equal(host_tokens[2], tokens[0])
    assert (host_tokens[:2] == POISON).all()
    return tokens[0].tolist()


def run_and_compare(
    sampler: DeviceSampler, logits: Tensor, texts: Any, prompt_len: int, params: list[SamplingParams], seeds: list[int]
) -> list[int]:
    """The tokens, which are those of the host, as are the masses that they are drawn from."""
    tokens = run(sampler, logits, [len(text) for text in texts])
    for row, (own, text, param, seed) in enumerate(zip(logits, texts, params, seeds, strict=True)):
        assert tokens[row] == sample(own, text, prompt_len, param, seed), row
        if tokens[row] >= 0 and param.is_sampled:
            scores = penalize(own.float().numpy(), text, prompt_len, param)
            _, mass = weights(scores, param.packed(seed, len(scores)).columns)
            assert int(sampler._buffers[len(logits)].weights[row].sum()) == int(mass.sum()), row
    return tokens


def make_logits(kind: str, rows: int, vocab: int, seed: int = 0) -> Tensor:
    """spread: no two within 2^-12; tied: few values, many times; close: 2^-16 apart, so in few coarse bins."""
    generator = torch.Generator().manual_seed(seed)
    if kind == "tied":
        return torch.randint(-3, 4, (rows, vocab), generator=generator).float()
    ordered = torch.arange(vocab) * 2.0**-16
    if kind == "spread":
        ordered = torch.randn(rows, vocab, generator=generator).sort().values * 3 + torch.arange(vocab) * 2.0**-12
    order = torch.rand(rows, vocab, generator=generator).argsort()
    return ordered.expand(rows, vocab).gather(1, order)


@pytest.mark.parametrize(
    ("vocab", "kind", "dtype", "steps"),
    [
        (1000, "spread", torch.float32, amount(5, 2)),
        (1000, "spread", torch.float16, amount(2, 1)),
        (1000, "close", torch.float32, amount(3, 1)),
        (5003, "tied", torch.bfloat16, 1),
        *amount(
            [
                (1000, "spread", torch.bfloat16, 2),
                (1000, "tied", torch.float32, 3),
                (4096, "spread", torch.float32, 1),
                (9001, "spread", torch.float32, 1),
            ],
            [],
        ),
    ],
)
def test_against_the_sampler(vocab: int, kind: str, dtype: torch.dtype, steps: int) -> None:
    """Every setting in a row of its own, over several steps, so that the history grows."""
    rows = len(FILTERS)
    sampler = DeviceSampler(rows + 2, vocab, DEVICE)
    params = [sampling(**options) for options in FILTERS]
    seeds = [SEEDS[row % len(SEEDS)] for row in range(rows)]
    # Of different lengths; of tokens with these counts, fused penalties would have other bits.
    texts = [PROMPT + [0] * 3 + [1] * 5 + [2] * 7 + list(range(3, row)) for row in range(rows)]
    for row in range(rows):
        set_row(sampler, row, params[row], seeds[row], texts[row], len(PROMPT))
    for step in range(steps):
        logits = make_logits(kind, rows, vocab, seed=step).to(dtype)
        chosen = run_and_compare(sampler, logits, texts, len(PROMPT), params, seeds)
        for text, token in zip(texts, chosen, strict=True):
            text.append(token)


def values(setting: Setting) -> st.SearchStrategy[float]:
    """Values of a number within its range, of moderate size."""
    assert setting.range is not None
    bounds = setting.range.bounds
    least, most = bounds.get("ge", bounds.get("gt", -2)), bounds.get("le", bounds.get("lt", 2))
    if setting.kind is int:
        return st.integers(int(least) + ("gt" in bounds), int(most) - ("lt" in bounds))
    return st.floats(least, most, exclude_min="gt" in bounds, exclude_max="lt" in bounds)


PARAMS = st.fixed_dictionaries(
    {},
    optional={name: values(SETTINGS[name]) for name in DISTRIBUTION_SETTINGS}
    | {
        "temperature": st.sampled_from([0.0, 1e-45, 1e-6, 0.3, 0.7, 1.5, 40.0, 1e35]),
        "top_k": st.integers(0, 60) | st.just(10**9),
        "top_p": st.floats(1e-12, 1.0) | st.sampled_from([1e-300, 1 - 2**-53]),
        "min_p": st.floats(0.0, 1.0),
        "repetition_penalty": st.floats(0.5, 2.0),
        "presence_penalty": st.floats(-2.0, 2.0),
        "frequency_penalty": st.floats(-2.0, 2.0),
        "logit_bias": st.dictionaries(st.integers(0, 2), st.floats(-9.0, 9.0) | st.just(-INF)),
    },
)
ROWS = 3


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, for the GPU: inf - inf, maxima of NaN alone
@settings(max_examples=amount(25, 8), deadline=None)
@given(
    vocab=st.sampled_from([3, 17, 1024, 1030]),  # few: on a GPU each is compiled
    kind=st.sampled_from(["spread", "tied", "close"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    scale=st.sampled_from([0.0, 1e-6, 0.1, 1.0, 9.0, 1e4]),
    special=st.lists(
        st.tuples(st.integers(0, ROWS - 1), st.integers(0, 2), st.sampled_from([INF, -INF, NAN])), max_size=3
    ),
    options=st.lists(PARAMS, min_size=ROWS, max_size=ROWS),
    seed=st.integers(0, 2**64 - 1),
    texts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=ROWS, max_size=ROWS),
)
def test_any_draw(
    vocab: int, kind: str, dtype: torch.dtype, scale: float, special: Any, options: Any, seed: int, texts: Any
) -> None:
    logits = make_logits(kind, ROWS, vocab, seed=seed % 2**32).mul(scale).to(dtype)
    for row, token, value in special:
        logits[row, token] = value
    sampler = DeviceSampler(ROWS, vocab, DEVICE)
    params = [sampling(**each) for each in options]
    for row in range(ROWS):
        set_row(sampler, row, params[row], seed, texts[row], 1)
    run_and_compare(sampler, logits, texts, 1, params, [seed] * ROWS)


def test_masses() -> None:
    """At every depth of the polynomial, each with another depth of the line; at the ends of octaves and of all."""
    count = 1 << 17
    ends = torch.arange(46)[:, None] * 2**OCTAVE + torch.tensor([-2, -1, 0, 1])
    depth = torch.cat([torch.arange(count) * (MAX_DEPTH // count) + torch.arange(count) % 251, ends.flatten()])
    depth = torch.nn.functional.pad(depth.clamp(0, MAX_DEPTH), (0, 2**18 - len(depth))).int()
    got = torch.empty(len(depth), dtype=torch.int64, device=DEVICE)
    _masses[(1,)](depth.to(DEVICE), got, N=len(depth))
    np.testing.assert_array_equal(got.cpu().numpy(), masses(depth.numpy()))


@triton.jit
def _masses(depth, out, N: tl.constexpr):  # type: ignore[no-untyped-def]
    for at in range(0, N, 1 << 14):
        each = at + tl.arange(0, 1 << 14)
        tl.store(out + each, _mass(tl.load(depth + each)))


class TestFilters:
    @pytest.mark.parametrize("options", [{"top_k": 37}, {"top_p": 0.5}, {"top_k": 120, "top_p": 0.7}], ids=str)
    def test_neighbours_are_told_apart(self, options: dict) -> None:
        """Steps of 2^-16 octaves, the least that the filters can tell: one token too many moves half of all draws."""
        vocab = 200
        order = torch.randperm(vocab, generator=torch.Generator().manual_seed(0))
        logits = (order * math.log(2) * 2.0**-16)[None]
        sampler = DeviceSampler(len(SEEDS), vocab, DEVICE)
        for row, seed in enumerate(SEEDS):
            set_row(sampler, row, sampling(**options), seed, PROMPT, 2)
        expected = [sample(logits[0], PROMPT, 2, sampling(**options), seed) for seed in SEEDS]
        assert run(sampler, logits.repeat(len(SEEDS), 1), [4] * len(SEEDS)) == expected

    def test_shares_are_exact(self) -> None:
        """Logits of whole octaves: the first token has half of the mass, and with any more than that others stay."""
        octave = 1 / math.log(2)
        params = [sampling(temperature=octave, top_p=top_p) for top_p in (0.5, 0.5 + 2**-53, 0.75, 0.75 + 2**-53)]
        sampler = DeviceSampler(4, 4, DEVICE)
        for row, own in enumerate(params):
            set_row(sampler, row, own, 1, PROMPT, 2)
        logits = torch.tensor([0.0, -1.0, -2.0, -2.0]).repeat(4, 1)
        run_and_compare(sampler, logits, [PROMPT] * 4, 2, params, [1] * 4)
        assert sampler._buffers[len(logits)].weights.sum(1).tolist() == [2**44, 3 * 2**43, 3 * 2**43, 2**45]

    def test_unlikely_tokens_count_in_top_p(self) -> None:
        """The second likeliest stays only because of the many that are far too unlikely to."""
        logits = torch.full((1, 1000), -9.23)
        logits[0, 0], logits[0, 500] = math.log(0.06), 0.0
        seed = next(seed for seed in range(1000) if uniform(seed, 4) < 0.03)
        sampler = DeviceSampler(1, 1000, DEVICE)
        set_row(sampler, 0, sampling(top_p=0.9), seed, PROMPT, 2)
        assert run(sampler, logits, [4]) == [0] == [sample(logits[0], PROMPT, 2, sampling(top_p=0.9), seed)]


class TestRows:
    @once(penalty=["presence_penalty", "frequency_penalty", "repetition_penalty"], temperature=[0.0, 1.0])
    def test_chosen_tokens_enter_the_history(self, penalty: str, temperature: float) -> None:
        """The same logits every time: without a history, greedy would choose the same token every time."""
        logits = make_logits("spread", 1, 1100) * 2
        params = sampling(temperature=temperature, **{penalty: 1.5})
        sampler = DeviceSampler(1, 1100, DEVICE)
        best = int(logits.argmax())
        text = [best, best, 7]  # of the prompt, repetition alone takes notice
        set_row(sampler, 0, params, 5, text, 2)
        for _ in range(6):
            expected = sample(logits[0], text, 2, params, 5)
            assert run(sampler, logits, [len(text)]) == [expected]
            text.append(expected)
        assert len(set(text[3:])) > 1

    def test_alone_and_among_others(self) -> None:
        logits = make_logits("spread", 3, 2500)
        params = [sampling(top_p=0.9), sampling(top_k=9, presence_penalty=1.0), sampling(logit_bias={5: 3.0})]

        def tokens(rows: list[int]) -> list[int]:
            sampler = DeviceSampler(len(rows), 2500, DEVICE)
            for at, row in enumerate(rows):
                set_row(sampler, at, params[row], row, PROMPT, 2)
            return run(sampler, logits[rows], [4] * len(rows))

        together = tokens([0, 1, 2])
        assert [tokens([row])[0] for row in range(3)] == together
        assert tokens([2, 0, 1]) == [together[2], together[0], together[1]]

    def test_inactive_rows_are_left_alone(self) -> None:
        sampler = DeviceSampler(3, 1500, DEVICE)
        logits = make_logits("spread", 3, 1500)
        params = sampling(top_k=20, top_p=0.9, frequency_penalty=1.0)
        for row in range(3):
            set_row(sampler, row, params, row, PROMPT, 2)
        expected = sample(logits[1], PROMPT, 2, params, 1)
        poisoned = logits.clone()
        poisoned[1] = NAN
        first = run(sampler, poisoned, [4, -1, 4])
        assert first[1] == POISON
        assert run(sampler, logits, [-1, 4, -1]) == [POISON, expected, POISON]
        third = [*PROMPT, first[0]]
        assert run(sampler, logits, [5, -1, -1])[0] == sample(logits[0], third, 2, params, 0)

    @pytest.mark.parametrize("options", [{"presence_penalty": 9.0}, {"logit_bias": {5: 1.0}}, {}], ids=str)
    def test_settings_can_change(self, options: dict) -> None:
        """Nothing of a row's former history, bias and filters stays."""
        sampler = DeviceSampler(1, 1000, DEVICE)
        logits = make_logits("spread", 1, 1000)
        best = int(logits.argmax())
        former = sampling(top_k=2, top_p=0.1, min_p=0.9, frequency_penalty=5.0, logit_bias={4: 90.0})
        set_row(sampler, 0, former, 3, [1, best, best], 1)
        assert run(sampler, logits, [3]) == [4]
        greedy = sampling(temperature=0.0, **options)
        set_row(sampler, 0, greedy, 7, [1, 2], 1)
        assert run(sampler, logits, [2]) == [best]
        sampled = sampling(temperature=3.0, **options)
        text = [1, 2, best]
        for seed in SEEDS:
            set_row(sampler, 0, sampled, seed, text, 1)
            assert run(sampler, logits, [3]) == [sample(logits[0], text, 1, sampled, seed)]

    def test_greedy_until_set(self) -> None:
        logits = make_logits("spread", 2, 1000)
        assert run(DeviceSampler(2, 1000, DEVICE), logits, [0, 9]) == logits.argmax(1).tolist()

    @pytest.mark.parametrize("options", [{"temperature": 1e-40}, {"temperature": 1e-6}, {"top_k": 1}], ids=str)
    def test_greedy_in_all_but_name(self, options: dict) -> None:
        """The second best is nearer than the filters can tell."""
        logits = torch.full((len(SEEDS), 1100), -1.0)
        logits[:, 1050] = 1.0
        logits[:, [3, 1060]] = float(torch.tensor(1.0).nextafter(torch.tensor(0.0))) if "top_k" in options else 0.9
        sampler = DeviceSampler(len(SEEDS), 1100, DEVICE)
        for row, seed in enumerate(SEEDS):
            set_row(sampler, row, sampling(**options), seed, PROMPT, 2)
        assert run(sampler, logits, [4] * len(SEEDS)) == [1050] * len(SEEDS)

    def test_frequencies(self) -> None:
        """Chi-square with at most 2 degrees of freedom: above 20 once in 20,000 tries, and these are fixed."""
        logits = torch.tensor([1.0, -1.0, -INF, 0.5, 0.0, -9.0])
        params = sampling(top_k=3)
        tries = amount(120, 60)
        sampler = DeviceSampler(tries, 6, DEVICE)
        for row in range(tries):
            set_row(sampler, row, params, 11, PROMPT, 2)
        tokens = torch.tensor(run(sampler, logits.expand(tries, 6).contiguous(), list(range(tries))))
        expected = torch.tensor([1.0, -INF, -INF, 0.5, 0.0, -INF]).softmax(0) * tries
        counts = tokens.bincount(minlength=6)
        assert counts[expected == 0].sum() == 0
        assert ((counts - expected)[expected > 0] ** 2 / expected[expected > 0]).sum() < 20


class TestErrors:
    @pytest.mark.parametrize("where", amount([0, 1023, 1024, 2099], [1023, 2099]))
    def test_nan(self, where: int) -> None:
        """It ends as -1 in its row, and changes nothing in others or later."""
        sampler = DeviceSampler(4, 2100, DEVICE)
        all_params = [
            sampling(temperature=0),
            sampling(top_k=5, top_p=0.9),
            sampling(frequency_penalty=1.0),
            sampling(),
        ]
        for row, params in enumerate(all_params):
            set_row(sampler, row, params, 3, PROMPT, 2)
        logits = make_logits("spread", 4, 2100)
        expected = [sample(own, PROMPT, 2, params, 3) for own, params in zip(logits, all_params, strict=True)]
        bad = logits.clone()
        bad[:3, where] = NAN
        assert run(sampler, bad, [4] * 4) == [-1, -1, -1, expected[3]]
        assert run(sampler, logits, [4] * 4) == expected

    @pytest.mark.filterwarnings("ignore:invalid value encountered in subtract:RuntimeWarning")  # numpy, for the GPU
    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_all_banned(self, temperature: float) -> None:
        sampler = DeviceSampler(1, 50, DEVICE)
        set_row(sampler, 0, sampling(temperature=temperature, logit_bias=dict.fromkeys(range(50), -INF)), 0, PROMPT, 2)
        assert run(sampler, torch.zeros(1, 50), [4]) == [-1]

    def test_refused(self) -> None:
        with pytest.raises(ValueError, match="vocabulary"):
            GreedySampler(1, MAX_VOCAB + 1, DEVICE)
        for logits in (torch.zeros(3, 10), torch.zeros(2, 11), torch.zeros(10, 2).T):
            with pytest.raises(ValueError, match="logits of shape"):
                run(DeviceSampler(2, 10, DEVICE), logits, [0] * len(logits))


class TestGreedy:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("vocab", [1, 1000, 4096, 5003])
    def test_takes_the_first_of_the_likeliest(self, vocab: int, dtype: torch.dtype) -> None:
        logits = torch.cat([make_logits("spread", 2, vocab), make_logits("tied", 2, vocab)]).to(dtype)
        assert run(GreedySampler(9, vocab, DEVICE), logits, [3] * 4) == [
            int(row.float().numpy().argmax()) for row in logits
        ]

    def test_errors_and_inactive_rows(self) -> None:
        logits = make_logits("spread", 4, 2100)
        logits[0, 2099] = NAN
        logits[1] = NAN
        logits[2] = -INF
        assert run(GreedySampler(4, 2100, DEVICE), logits, [1, -1, 1, 0]) == [-1, POISON, -1, int(logits[3].argmax())]
