"""The examples run, and print what they should."""

from __future__ import annotations

import re
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest
import torch

from infer import GrowingCache

EXAMPLES = Path(__file__).parents[2] / "examples"
SIX_ROWS = """\
tensor([[0.4976, 0.9655, 0.7614],
        [0.7674, 1.2199, 1.2528],
        [0.8186, 1.2667, 1.3497],
        [0.7324, 1.1287, 1.2029],
        [0.6963, 1.0718, 1.1713],
        [0.6824, 1.0370, 1.1307]])
"""
FOUR_ROWS = """\
tensor([[0.6538, 0.9875, 1.0863],
        [0.6674, 1.0268, 1.1071],
        [0.5850, 0.9149, 0.9716],
        [0.6361, 0.9934, 1.0588]])
"""
# All that the proof prints besides its words: the numbers of the text it follows.
PROOF = (
    SIX_ROWS
    + """\
tensor([[0.4300, 0.1500, 0.8900],
        [0.5500, 0.8700, 0.6600],
        [0.5700, 0.8500, 0.6400],
        [0.2200, 0.5800, 0.3300],
        [0.7700, 0.2500, 0.1000],
        [0.0500, 0.8000, 0.5500],
        [0.2961, 0.5166, 0.2517]])
"""
    + SIX_ROWS.replace("]])", "],\n        [0.6538, 0.9875, 1.0863]])")
    + """\
True
tensor([[0.6538, 0.9875, 1.0863]])
True
True
True
new_tokens tensor([[0.2961, 0.5166, 0.2517],
        [0.6886, 0.0740, 0.8665],
        [0.1366, 0.1025, 0.1841],
        [0.7264, 0.3153, 0.6871]])
Prefill complete. Cached keys shape: torch.Size([6, 3]) values shape torch.Size([6, 3])
new_token tensor([[0.2961, 0.5166, 0.2517]])
context_vec tensor([[0.6538, 0.9875, 1.0863]])
new_token tensor([[0.6886, 0.0740, 0.8665]])
context_vec tensor([[0.6674, 1.0268, 1.1071]])
new_token tensor([[0.1366, 0.1025, 0.1841]])
context_vec tensor([[0.5850, 0.9149, 0.9716]])
new_token tensor([[0.7264, 0.3153, 0.6871]])
context_vec tensor([[0.6361, 0.9934, 1.0588]])
Final kv cache keys shape: torch.Size([10, 3]) values shape torch.Size([10, 3])
"""
    + FOUR_ROWS
    + FOUR_ROWS
    + "True\n"
)


def load_example(name: str) -> ModuleType:
    spec = spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def proof() -> ModuleType:
    return load_example("kv_cache_proof")


class TestProof:
    def test_numbers(self, proof: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
        """Tensors, shapes and answers in order, and nothing of the kind besides."""
        proof.main()
        printed = capsys.readouterr().out
        facts = [line for line in printed.splitlines(keepends=True) if re.search(r"^True|^False|\d\.\d{4}|Size", line)]
        assert "".join(facts) == PROOF
        assert "K_new = [X; x_new] W = [X W; x_new W]" in printed

    def test_cache_is_the_projects_own(
        self, proof: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """One that forgets its first position gives other rows, and the proof says so."""
        store = GrowingCache._store

        def drop(cache: GrowingCache, *args: object) -> tuple[torch.Tensor, ...]:
            keys, values = store(cache, *args)  # type: ignore[arg-type]
            return (keys[:, :, 1:], values[:, :, 1:]) if cache.seq_len else (keys, values)

        monkeypatch.setattr(GrowingCache, "_store", drop)
        proof.main()
        assert capsys.readouterr().out.count("False\n") == 1

    def test_leaves_the_random_numbers_alone(self) -> None:
        torch.manual_seed(0)
        expected = torch.rand(3)
        torch.manual_seed(0)
        load_example("kv_cache_proof").main()
        assert torch.equal(torch.rand(3), expected)
