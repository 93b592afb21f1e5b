"""Log-probabilities from what a device finds are those of the host, bit by bit."""

from __future__ import annotations

import math

import pytest
import torch

from infer.backend.gpu.logprobs import logprob_terms
from infer.engine.logprobs import logprobs_from_device, logprobs_of


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("vocab", "top"), [(1, 1), (50, 50), (3000, 0), (20_000, 7)])
def test_as_on_the_host(vocab: int, top: int, dtype: torch.dtype) -> None:
    """In 16 bits, many are equally likely: of these, the lower ids come first."""
    for spread in [0.0, 0.3, 8.0, 500.0]:
        logits = (torch.randn(40, vocab, generator=torch.Generator().manual_seed(vocab)) * spread).to(dtype)
        logits[3, 0] = math.inf
        logits[4, : vocab // 2] = -math.inf
        logits[5] = torch.where(logits[5] > 0, 0.0, -0.0).to(dtype)
        tokens = torch.arange(40) % vocab
        expected = logprobs_of(logits, tokens.tolist(), top)
        found = logprob_terms(logits, tokens, top).tolist()
        assert [
            logprobs_from_device(line, token, top) for line, token in zip(found, tokens.tolist(), strict=True)
        ] == expected
        fewer = logprobs_of(logits, tokens.tolist(), top // 2)
        assert [
            logprobs_from_device(line, token, top // 2) for line, token in zip(found, tokens.tolist(), strict=True)
        ] == fewer


def test_where_no_token_could_be_chosen() -> None:
    """It is not read; and does nothing to others."""
    logits = torch.tensor([[math.nan, 1.0, 2.0], [0.0, 1.0, 2.0]])
    found = logprob_terms(logits, torch.tensor([-1, 1]), 2).tolist()
    assert [logprobs_from_device(found[1], 1, 2)] == logprobs_of(logits[1:], [1], 2)
