"""What `infer models` says was compared for a family has a test behind it, and what has one is said."""

from __future__ import annotations

import ast
from pathlib import Path

import checkpoints
import pytest
import tiny

from infer.cli.catalogue import print_families
from infer.cli.common import DEFAULT_MODEL
from infer.loader.builtin import BUILTIN
from infer.loader.families import FAMILIES
from infer.models.registry import MODELS

INTEGRATION = Path(__file__).parents[2] / "integration"


def families_in(file: str, table: str) -> set[str]:
    """The families that a module-level table of a test names."""
    tree = ast.parse((INTEGRATION / file).read_text(encoding="utf-8"))
    assignments = [node for node in tree.body if isinstance(node, ast.Assign | ast.AnnAssign)]
    [value] = [node.value for node in assignments if ast.unparse(node).split(":")[0].split(" =")[0] == table]
    assert value is not None
    named = {node.value for node in ast.walk(value) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return named & FAMILIES.keys()


def test_every_family_has_a_row() -> None:
    assert {name.removesuffix("_text") for name in MODELS} == FAMILIES.keys()


def test_random_models() -> None:
    assert {name for name, family in FAMILIES.items() if family.random} == checkpoints.FAMILIES.keys()


def test_gguf() -> None:
    """Llama's are in test_gguf.py."""
    tested = {"llama"} | families_in("test_families.py", "GGUF_CASES")
    assert {name for name, family in FAMILIES.items() if family.gguf} == tested


def test_gpu() -> None:
    assert {name for name, family in FAMILIES.items() if family.gpu} == tiny.FAMILIES.keys()


@pytest.mark.parametrize("name", [family.weights for family in FAMILIES.values() if family.weights])
def test_real_weights(name: str) -> None:
    """A slow test compares them with transformers."""
    assert name in BUILTIN
    named = "DEFAULT_MODEL" if name == DEFAULT_MODEL else f'"{name}"'
    tests = [path.read_text(encoding="utf-8") for path in INTEGRATION.glob("test_*.py")]
    assert [test for test in tests if named in test and "mark.slow" in test and "AutoModelForCausalLM" in test]


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    print_families()
    lines = capsys.readouterr().out.splitlines()
    [header] = [line for line in lines if line.startswith("family")]
    assert header.split() == ["family", "random", "real", "weights", "GGUF", "GPU", "models"]
    [row] = [line for line in lines if line.startswith("llama ")]
    assert row.split()[:5] == ["llama", "yes", "smollm2-135m", "yes", "yes"]
    assert len(lines) == 3 + len(FAMILIES)
