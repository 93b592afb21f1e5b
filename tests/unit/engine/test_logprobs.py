"""Log-probabilities are those of exact arithmetic, whatever the logits."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from infer import SamplingParams
from infer.engine.logprobs import logprobs_of, top_tokens

INF, NAN = math.inf, math.nan


def exact(scores: torch.Tensor) -> torch.Tensor:
    return scores.double().log_softmax(-1)


@pytest.mark.parametrize("spread", [0.0, 0.1, 3.0, 20.0, 1000.0])
@pytest.mark.parametrize("vocab", [1, 2, 1000, 128_256, 300_000])
def test_of_exact_arithmetic(vocab: int, spread: float) -> None:
    scores = torch.randn(vocab, generator=torch.Generator().manual_seed(vocab)) * spread
    tokens = [0, vocab - 1, int(scores.argmax()), int(scores.argmin())]
    found = logprobs_of(scores.expand(4, -1), tokens, 5)
    for each, token in zip(found, tokens, strict=True):
        assert each.token_id == token
        assert each.logprob == pytest.approx(exact(scores)[token].item(), rel=1e-9, abs=1e-7)
        assert each.top == found[0].top
    order = sorted(range(vocab), key=lambda i: (-scores[i].item(), i))[:5] if vocab < 10_000 else None
    if order is not None:
        assert [token for token, _ in found[0].top] == order
    assert len(found[0].top) == min(5, vocab)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(dtype: torch.dtype) -> None:
    scores = (torch.randn(500) * 4).to(dtype)
    [found] = logprobs_of(scores[None], [7], 0)
    assert found == (7, pytest.approx(exact(scores)[7].item(), abs=1e-7), ())


def test_sure_of_one_token() -> None:
    """Next to nothing is left of one, and that is told exactly."""
    scores = torch.tensor([30.0, 0.0, 10.0])
    [found] = logprobs_of(scores[None], [0], 3)
    assert found.logprob == pytest.approx(exact(scores)[0].item(), abs=1e-12)
    assert [value for _, value in found.top] == pytest.approx(exact(scores)[[0, 2, 1]].tolist(), rel=1e-12)


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ([0.0, -INF, 0.0], [-math.log(2), -INF, -math.log(2)]),
        ([INF, 1.0, INF], [-math.log(2), -INF, -math.log(2)]),
        ([0.0, NAN], [NAN, NAN]),
        ([-INF, -INF], [NAN, NAN]),
    ],
)
def test_infinities(scores: list[float], expected: list[float]) -> None:
    found = logprobs_of(torch.tensor(scores).expand(len(scores), -1), range(len(scores)), 0)
    assert [each.logprob for each in found] == pytest.approx(expected, nan_ok=True)


def test_of_equal_scores_the_lower_id() -> None:
    scores = np.array([1, 3, 2, 3, 2, 2], np.float32)
    assert top_tokens(scores, 4).tolist() == [1, 3, 2, 4]
    assert top_tokens(scores, 9).tolist() == [1, 3, 2, 4, 5, 0]
    assert top_tokens(scores, 0).tolist() == []


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs", "n", "max_new_tokens"])
@pytest.mark.parametrize("value", [-1, 1.5, "2", True])
def test_refused(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{name} must be an integer"):
        SamplingParams(**{name: value})  # type: ignore[arg-type]


def test_no_new_tokens() -> None:
    """Only where something else is asked for."""
    with pytest.raises(ValueError, match="max_new_tokens must be an integer, 1 or more"):
        SamplingParams(max_new_tokens=0)
    SamplingParams(max_new_tokens=0, prompt_logprobs=0)
