"""What the compiler makes of GPU kernels, which neither their results nor Triton's interpreter shows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

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


def test_so_do_keys_and_values(code: Any) -> None:
    """No warp stores anything before its outcome; or where two have the same keys, nothing but the scores of 32."""
    assert code["attention, 64"]["early"] == 0
    shared = code["attention, 128"]
    by_a_thread = 16 * 32 / 32  # of the 16 rows that an instruction takes
    assert 0 < shared["early"] <= 2 * by_a_thread  # in the first round, and in those that follow
    assert shared["shared"] <= 2 * 8 * 32 * 4


@pytest.mark.parametrize("kind", ["few", "many"])
def test_an_exact_product_is_a_loop(code: Any, kind: str) -> None:
    """Else the compiler makes what is added to it the first term of the sum, in one kernel and not in the other."""
    assert code[f"exact, {kind} rows"]["rounds"] == 1
