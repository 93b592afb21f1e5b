"""Kernels compiled before they are needed. That this is all of them, a GPU shows: tests/integration/test_gpu.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from infer import kernels
from infer.kernels import ahead

triton = pytest.importorskip("triton", reason="needs Triton, which is there on Linux alone")


class Kernel:
    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **options: self.calls.append(("launched", grid, args, options))

    def warmup(self, *args: Any, grid: Any, **options: Any) -> None:
        self.calls.append(("compiled", grid, args, options))


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    kernel = Kernel()
    modules = SimpleNamespace(product=SimpleNamespace(one_row=kernel))
    monkeypatch.setattr(kernels, "_gpu_modules", lambda: modules)
    return kernel


def test_what_would_be_launched_is_compiled(kernel: Kernel) -> None:
    def launch() -> None:
        kernels.gpu_modules().product.one_row[(3,)]("x", K=5)

    launch()
    with ahead.compiling():
        launch()
    launch()
    assert [(kind, *rest) for kind, *rest in kernel.calls] == [
        (kind, (3,), ("x",), {"K": 5}) for kind in ("launched", "compiled", "launched")
    ]


@pytest.mark.usefixtures("kernel")
def test_what_no_disk_had_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def before(**_: Any) -> None: ...

    monkeypatch.setattr(triton.knobs.compilation, "listener", before)
    with ahead.compiling() as fresh:
        for name, hit in (("one", True), ("two", False)):
            triton.knobs.compilation.listener(
                src=SimpleNamespace(name=name), metadata={}, metadata_group={}, times=None, cache_hit=hit
            )
    assert fresh == ["two"]
    assert triton.knobs.compilation.listener is before


def test_an_error_leaves_nothing_behind(kernel: Kernel) -> None:
    with pytest.raises(KeyError), ahead.compiling():
        raise KeyError
    kernels.gpu_modules().product.one_row[(1,)]()
    assert kernel.calls[0][0] == "launched"
    with ahead.compiling():
        pass
