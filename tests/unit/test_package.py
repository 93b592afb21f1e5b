"""The public names, the order of imports, and what importing costs."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from ctypes.util import find_library
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import infer

ROOT = Path(infer.__file__).parent
PUBLIC = [
    "GenerationResult",
    "GrowingCache",
    "KVCache",
    "ModelConfig",
    "SamplingParams",
    "SlidingCache",
    "Tokenizer",
    "Trace",
    "allocate_kv_cache",
    "decode_step",
    "full_attention_matrix",
    "generate",
    "generate_batch",
    "generate_ids_cached",
    "generate_ids_greedy_cached",
    "generate_ids_greedy_full",
    "load_model",
    "perplexity",
    "prefill",
    "render_chat_template",
    "stream",
]
# What each part may import at module level, itself apart. A further part needs a line here.
LAYERS = {
    "machine": set(),
    "config": set(),
    "kernels": {"machine"},
    "ops": {"machine", "config", "kernels"},
    "cache": {"machine", "config", "ops"},
    "models": {"machine", "config", "ops", "cache"},
    "loader": {"machine", "config", "ops", "cache", "models"},
    "trace": {"machine", "config", "ops", "cache"},
    "engine": {"machine", "config", "ops", "cache", "models", "trace"},
    "evaluate": {"machine", "config", "ops", "cache", "models", "loader", "engine", "trace"},
    "cli": {"machine", "config", "ops", "cache", "models", "loader", "engine", "evaluate", "trace"},
}
# The one import that goes up, inside a function: ModelConfig.from_pretrained opens a checkpoint.
UPWARD = {("config", "loader")}
HEAVY = ["gguf", "typer", "rich", "huggingface_hub", "jinja2", "matplotlib", "numba", "triton", "transformers"]


def sources() -> list[Path]:
    return sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")


def part_of(module: str) -> str:
    """infer.cache.base -> cache"""
    return module.removeprefix("infer").lstrip(".").split(".")[0]


def home(name: str) -> str:
    """Where `from infer import name` finds it."""
    return getattr(infer, name).__module__ if name in PUBLIC else f"infer.{name}"


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """The modules of this package that a file imports, and whether it does so at module level."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    inside = {
        node
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            names = [home(alias.name) for alias in node.names] if node.module == "infer" else [node.module or ""]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        yield from ((name, node not in inside) for name in names if name.split(".")[0] == "infer")


def in_fresh_python(code: str, **environment: str) -> str:
    """What the code prints in an interpreter of its own."""
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | environment).stdout


class TestPublicNames:
    def test_all(self) -> None:
        assert infer.__all__ == PUBLIC
        assert infer.__all__ == sorted(PUBLIC)

    @pytest.mark.parametrize("name", PUBLIC)
    def test_resolves(self, name: str) -> None:
        value = getattr(infer, name)
        assert value.__name__ == name
        assert value.__doc__

    def test_unknown_name(self) -> None:
        with pytest.raises(AttributeError, match="module 'infer' has no attribute 'nonsense'"):
            infer.nonsense  # noqa: B018

    def test_star_import(self) -> None:
        names: dict[str, object] = {}
        exec("from infer import *", names)
        assert set(PUBLIC) <= names.keys()

    def test_typed(self) -> None:
        assert (ROOT / "py.typed").exists()


class TestLayers:
    @pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
    def test_imports_go_one_way(self, path: Path) -> None:
        part = path.relative_to(ROOT).parts[0].removesuffix(".py")
        assert part in LAYERS, f"{part} has no place in the order of imports"
        allowed = LAYERS[part] | {part}
        for module, at_module_level in imports(path):
            target = part_of(module)
            if not at_module_level and (part, target) in UPWARD:
                continue
            assert target in allowed, f"{path.relative_to(ROOT)} imports {module}"

    def test_imports_are_seen(self) -> None:
        """The checker finds what it should judge."""
        assert ("infer.loader", False) in imports(ROOT / "config.py")
        assert ("infer.nn.attention", True) in imports(ROOT / "cache" / "base.py")

    def test_order_has_no_cycle(self) -> None:
        TopologicalSorter(LAYERS).prepare()


class TestCost:
    def test_importing_needs_no_torch(self) -> None:
        assert in_fresh_python("import infer, sys; print('torch' in sys.modules)") == "False\n"

    def test_params_and_config_need_no_torch(self) -> None:
        code = "import sys; from infer import ModelConfig, SamplingParams; print('torch' in sys.modules)"
        assert in_fresh_python(code) == "False\n"

    def test_heavy_libraries_wait(self) -> None:
        code = (
            "import infer, sys; [getattr(infer, n) for n in infer.__all__]\n"
            f"print([name for name in {HEAVY} if name in sys.modules])"
        )
        assert in_fresh_python(code) == "[]\n"

    def test_importing_works_under_any_default_device(self) -> None:
        """Names are loaded when first used, which may be inside someone's `with torch.device(...)`."""
        code = (
            "import torch\nwith torch.device('meta'): from infer.nn.norm import RMSNorm\n"
            "with torch.inference_mode(): print(RMSNorm(2, 0.0)(torch.ones(1, 2)).tolist())"
        )
        assert in_fresh_python(code) == "[[1.0, 1.0]]\n"

    def test_loading_does_not_change_torch(self) -> None:
        code = (
            "import torch; before = torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled()\n"
            "import infer; [getattr(infer, n) for n in infer.__all__]\n"
            "print(before == (torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled()))"
        )
        assert in_fresh_python(code) == "True\n"

    @pytest.mark.skipif(find_library("gomp") is None, reason="needs GNU OpenMP")
    def test_kernels_do_not_change_the_number_of_threads(self) -> None:
        """Also where numba has the same OpenMP library as torch, which is so for some builds of torch."""
        code = (
            "import torch; from infer import kernels; before = torch.get_num_threads()\n"
            "kernels.cpu(); kernels.cpu() and kernels.cpu().use_threads(before)\n"
            "print(before, torch.get_num_threads())"
        )
        for shared in ({}, {"LD_PRELOAD": str(find_library("gomp"))}):
            assert in_fresh_python(code, OMP_NUM_THREADS="1", **shared) == "1 1\n"
