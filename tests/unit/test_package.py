"""The public names, the order of imports, and what importing costs."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from ctypes.util import find_library
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from amount import amount

import infer

ROOT = Path(infer.__file__).parent
PUBLIC = [
    "LLM",
    "CacheMemory",
    "GenerationResult",
    "GrowingCache",
    "KVCache",
    "ModelConfig",
    "PagePool",
    "PagedCache",
    "SamplingParams",
    "Session",
    "SlidingCache",
    "Tokenizer",
    "Trace",
    "decode_step",
    "generate",
    "generate_batch",
    "load_model",
    "perplexity",
    "prefill",
    "render_chat_template",
    "stream",
]
# What each part may import, itself apart: at module level or inside a function. A further part needs a line here.
LAYERS = {
    "machine": set(),
    "folders": set(),
    "version": set(),
    "progress": set(),
    "values": set(),
    "config": {"values"},
    "nn": {"machine", "values", "config"},
    "cache": {"machine", "values", "config", "nn"},
    "models": {"machine", "values", "config", "nn", "cache"},
    "backend": {"folders", "machine", "version", "progress", "values", "config", "nn", "cache", "models"},
    "loader": {"folders", "machine", "progress", "values", "config", "nn", "cache", "models", "backend"},
    "trace": {"machine", "values", "config", "nn", "cache"},
    "parallel": {"machine", "values", "config", "nn", "cache", "models", "backend", "loader"},
    "engine": {
        *("machine", "progress", "values", "config", "nn", "cache", "models", "backend", "trace", "loader", "parallel"),
        "version",
    },
    "evaluate": {"machine", "version", "values", "config", "nn", "cache", "models", "backend", "trace", "engine"},
    "server": {
        *("machine", "values", "config", "nn", "cache", "models", "backend", "trace", "engine", "loader"),
        *("parallel", "version"),
    },
    "deploy": {
        *("machine", "values", "config", "nn", "cache", "models", "backend", "trace", "engine", "loader", "server"),
    },
    "cli": {
        *("machine", "values", "config", "nn", "cache", "models", "backend", "trace", "engine", "evaluate", "loader"),
        *("parallel", "server", "deploy", "version", "progress", "folders"),
    },
    "__main__": {"cli"},
    "compat": {"machine", "values", "config", "nn", "cache", "models", "backend", "trace", "engine", "loader"},
}
# Compilers of kernels, and who may use them.
COMPILERS = {"numba": "backend/cpu", "llvmlite": "backend/cpu", "triton": "backend/gpu"}
HEAVY = [
    "gguf",
    "typer",
    "rich",
    "huggingface_hub",
    "jinja2",
    "llguidance",
    "matplotlib",
    "numba",
    "triton",
    "transformers",
]


def sources() -> list[Path]:
    return sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")


def part_of(module: str) -> str:
    """infer.cache.base -> cache"""
    return module.removeprefix("infer").lstrip(".").split(".")[0]


def home(name: str) -> str:
    """Where `from infer import name` finds it."""
    return getattr(infer, name).__module__ if name in PUBLIC else f"infer.{name}"


def imports(path: Path) -> Iterator[str]:
    """All modules that a file imports, wherever it does."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            module = node.module or ""
            if module == "infer":
                yield from (home(alias.name) for alias in node.names)
            else:
                yield module
                yield from (f"{module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def module_name(path: Path) -> str:
    return ".".join(("infer", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")


def imported(path: Path, names: Mapping[str, Path]) -> set[str]:
    """The modules that a file imports when it runs: at module level, or inside a function."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    checks = [node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)]
    for_types = {id(node) for check in checks for node in ast.walk(check)}
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and id(node) not in for_types:
            found |= {full if (full := f"{node.module}.{alias.name}") in names else node.module for alias in node.names}
        elif isinstance(node, ast.Import) and id(node) not in for_types:
            found |= {alias.name for alias in node.names}
    return {name for name in found if name in names}


def own_imports(path: Path) -> list[str]:
    """Those of this package."""
    return [module for module in imports(path) if module.split(".")[0] == "infer"]


def in_fresh_python(code: str, **environment: str) -> str:
    """What the code prints in an interpreter of its own."""
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | environment).stdout


class TestPublicNames:
    def test_all(self) -> None:
        """In the order that ruff puts them into: all capitals first."""
        assert infer.__all__ == PUBLIC
        assert infer.__all__ == sorted(PUBLIC, key=lambda name: (not name.isupper(), name))

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


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


class TestLayers:
    def test_imports_go_one_way(self) -> None:
        for path in sources():
            part = path.relative_to(ROOT).parts[0].removesuffix(".py")
            assert part in LAYERS, f"{part} has no place in the order of imports"
            for module in own_imports(path):
                assert part_of(module) in LAYERS[part] | {part}, f"{name_of(path)} imports {module}"

    def test_imports_are_seen(self) -> None:
        """The checker finds what it should judge: at module level, in functions, of the package itself."""
        assert "infer.nn.attention" in own_imports(ROOT / "cache" / "base.py")
        assert "infer.backend.cpu.backend" in own_imports(ROOT / "backend" / "__init__.py")
        assert "infer.backend" in own_imports(ROOT / "loader" / "describe.py")
        assert "numba" in imports(ROOT / "backend" / "cpu" / "block.py")

    def test_order_has_no_cycle(self) -> None:
        TopologicalSorter(LAYERS).prepare()

    def test_modules_import_in_one_direction(self) -> None:
        """No module imports itself through others, not even inside a function."""
        names = {module_name(path): path for path in sources()}
        TopologicalSorter({name: imported(path, names) - {name} for name, path in names.items()}).prepare()

    def test_what_a_model_is_knows_nothing_of_how_it_is_run(self) -> None:
        for part in ("nn", "cache", "models"):
            assert "backend" not in LAYERS[part]

    def test_backends_do_not_know_each_other(self) -> None:
        """And the one check of models knows neither."""
        for path in sorted((ROOT / "backend").rglob("*.py")):
            inside = path.relative_to(ROOT / "backend").parts[0]
            others = {"cpu", "gpu"} - {inside} if inside != "__init__.py" else set()
            found = {module.split(".")[2] for module in own_imports(path) if module.startswith("infer.backend.")}
            assert not found & others, name_of(path)

    def test_compilers_stay_where_kernels_are(self) -> None:
        for path in sources():
            for module in imports(path):
                home = COMPILERS.get(module.split(".")[0])
                assert home is None or name_of(path).startswith(home), f"{name_of(path)} imports {module}"


class TestCost:
    def test_importing_needs_no_torch(self) -> None:
        assert in_fresh_python("import infer, sys; print('torch' in sys.modules)") == "False\n"

    def test_params_and_config_need_no_torch(self) -> None:
        code = (
            "import sys; from infer import SamplingParams; from infer.config import ModelConfig\n"
            "print('torch' in sys.modules)"
        )
        assert in_fresh_python(code) == "False\n"

    def test_heavy_libraries_wait(self) -> None:
        code = (
            "import infer, sys; [getattr(infer, n) for n in infer.__all__]\n"
            f"print([name for name in {HEAVY} if name in sys.modules])"
        )
        assert in_fresh_python(code) == "[]\n"

    def test_listing_models_waits_for_nothing(self) -> None:
        code = (
            "import sys; from infer.cli.commands import app\n"
            "try: app(['models'])\nexcept SystemExit: pass\n"
            f"print([name for name in {['torch', 'pydantic', 'rich', 'huggingface_hub']} if name in sys.modules])"
        )
        assert in_fresh_python(code).endswith("\n[]\n")

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
            "import torch; from infer.backend.cpu import kernels; before = torch.get_num_threads()\n"
            "kernels() and kernels().use_threads(before)\n"
            "print(before, torch.get_num_threads())"
        )
        for shared in ({"LD_PRELOAD": str(find_library("gomp"))}, *amount([{}], [])):
            assert in_fresh_python(code, OMP_NUM_THREADS="1", **shared) == "1 1\n"
