"""What the compiler makes of GPU kernels, which neither their results nor Triton's interpreter shows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from amount import amount

pytest.importorskip("triton", reason="needs Triton, which is there on Linux alone")
SCRIPT = Path(__file__).parents[3] / "kernel_code.py"
EIGHT_ROWS = ["eight rows", *amount(["eight rows, gated"], [])]
SHARED = amount([(128, 2048), (256, 8192)], [])  # head_dim, bytes
PROMPTS = [("prompt, window", 3), *amount([("prompt", 2), ("long prompt", 2)], [])]
GEMMS = ["few rows, in slices", *amount(["few rows", "many rows", "few rows, all slices", "few rows, gated"], [])]


@pytest.fixture(scope="module")
def code() -> Any:
    compiled = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    kinds = [f"{kind}, {size}" for kind in EIGHT_ROWS for size in (512, 1024)]
    kinds += ["attention, 64", *(f"attention, {size}" for size, _ in SHARED)]
    kinds += [kind for kind, _ in PROMPTS] + GEMMS
    run = subprocess.run([sys.executable, SCRIPT, *kinds], env=compiled, capture_output=True, text=True, check=False)
    assert not run.returncode, run.stderr
    return json.loads(run.stdout)


@pytest.mark.parametrize("kind", EIGHT_ROWS)
def test_weights_go_straight_to_the_matrix_units(code: Any, kind: str) -> None:
    """What is stored are sums, if anything: twice as many weights are not stored more often, nor anything early."""
    half, whole = code[f"{kind}, 512"], code[f"{kind}, 1024"]
    assert half["stores"] == whole["stores"]
    assert whole["early"] == 0
    assert whole["weights"] == 2 * half["weights"] > 0
    assert whole["narrow"] == 0


def test_so_do_keys_and_values(code: Any) -> None:
    """A single warp stores nothing at all; where several have the same keys, each tells the others its scores."""
    assert code["attention, 64"]["early"] == 0
    for size, memory in SHARED:
        shared = code[f"attention, {size}"]
        assert 0 < shared["early"] <= 16
        assert shared["shared"] <= memory


@pytest.mark.parametrize(("kind", "loops"), PROMPTS)
def test_keys_of_a_prompt_are_copied_ahead(code: Any, kind: str, loops: int) -> None:
    """Of blocks that all queries see, and of those that need a mask; 16 bytes at a time, wherever a table says."""
    assert code[kind]["rounds"] == loops
    assert code[kind]["copies"] > 0
    assert code[kind]["narrow_copies"] == 0


@pytest.mark.parametrize("kind", GEMMS)
def test_a_product_is_a_loop(code: Any, kind: str) -> None:
    """Else the compiler makes what is added to it the first term of the sum, in one kernel and not in the other."""
    assert code[kind]["rounds"] == 1
