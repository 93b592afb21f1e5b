"""What the compiler makes of GPU kernels, which neither their results nor Triton's interpreter shows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from infer.ops import gpu_attention

pytest.importorskip("triton", reason="needs Triton, which is there on Linux alone")
SCRIPT = Path(__file__).parents[1] / "kernel_code.py"


@pytest.fixture(scope="module")
def code() -> Any:
    compiled = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, SCRIPT], env=compiled, capture_output=True, text=True, check=False)
    assert not run.returncode, run.stderr
    return json.loads(run.stdout)


@pytest.mark.parametrize("kind", ["eight rows", "eight rows, gated"])
def test_weights_go_straight_to_the_matrix_units(code: Any, kind: str) -> None:
    """Twice as many of them are not stored more often: what is stored are sums."""
    assert code[f"{kind}, 512"]["stores"] == code[f"{kind}, 1024"]["stores"] > 0


@pytest.mark.parametrize("head_dim", [64, 128])
def test_so_do_keys_and_values(code: Any, head_dim: int) -> None:
    """Shared memory would not hold the keys that a program looks at together: what is there are scores and sums."""
    shape = gpu_attention.shape(head_dim, 2, 1, torch.bfloat16)
    assert code[f"attention, {head_dim}"]["shared"] < shape.keys * head_dim * 2


@pytest.mark.parametrize("kind", ["few", "many"])
def test_an_exact_product_is_a_loop(code: Any, kind: str) -> None:
    """Else the compiler makes what is added to it the first term of the sum, in one kernel and not in the other."""
    assert code[f"exact, {kind} rows"]["rounds"] == 1
