"""Kernels compiled before they are needed. That they then are, a GPU shows: tests/integration/test_gpu.py."""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import pytest

from infer import kernels
from infer.kernels import ahead

triton = pytest.importorskip("triton", reason="needs Triton, which is there on Linux alone")

place = ContextVar("place", default="nowhere")


class Kernel:
    """Compiled as Triton compiles: by the mode that is on, or at once."""

    def __init__(self, compile: Callable[[], Any] = lambda: None) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.loaded: list[str] = []  # where
        self._run: str | None = None
        self._compile = compile

    @property
    def run(self) -> None:
        self.loaded.append(place.get())

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **options: self.calls.append(("launched", grid, args, options))

    def warmup(self, *args: Any, grid: Any, **options: Any) -> Any:
        self.calls.append(("compiled", grid, args, options))
        submit = triton.runtime._async_compile.active_mode.get().submit
        rest = len(inspect.signature(submit).parameters) - 2  # what is done afterwards: Triton's versions differ in it

        def compile() -> Kernel:
            self._compile()
            return self

        return submit(len(self.calls), compile, *[lambda *_: None] * rest)


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Kernel]:
    def make(**options: Any) -> Kernel:
        kernel = Kernel(**options)
        modules = SimpleNamespace(rows=SimpleNamespace(few_rows=kernel))
        monkeypatch.setattr(kernels, "_gpu_modules", lambda: modules)
        return kernel

    return make


def launch() -> None:
    kernels.gpu_modules().rows.few_rows[(3,)]("x", K=5)


def test_what_would_be_launched_is_compiled(make: Callable[..., Kernel]) -> None:
    kernel = make()
    launch()
    ahead.compile_all(launch)
    launch()
    assert kernel.calls == [(kind, (3,), ("x",), {"K": 5}) for kind in ("launched", "compiled", "launched")]


def test_what_is_compiled_is_loaded(make: Callable[..., Kernel]) -> None:
    """Once, however often it would be launched, and where the caller says."""

    @contextmanager
    def device() -> Iterator[None]:
        token = place.set("the device")
        yield
        place.reset(token)

    def walk() -> None:
        launch()
        launch()

    kernel = make()
    ahead.compile_all(walk, device)
    assert kernel.loaded == ["the device"]


def test_what_cannot_be_loaded_is_left_to_whoever_launches_it(make: Callable[..., Kernel]) -> None:
    """Who is then told why: the kernel does not pass for one that is loaded."""
    kernel = make()
    kernel._run = "half loaded"

    @contextmanager
    def full() -> Iterator[None]:
        raise MemoryError
        yield

    ahead.compile_all(launch, full)
    assert kernel.loaded == []
    assert kernel._run is None


def test_what_triton_keeps_to_itself_is_left_alone(
    make: Callable[..., Kernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where somebody's hook compiles a kernel instead, there is none to load."""
    kernel = make()
    monkeypatch.setattr(kernel, "warmup", lambda *_, **__: None)
    assert ahead.compile_all(launch) == []
    assert kernel.loaded == []


def test_what_no_disk_had_is_named(make: Callable[..., Kernel], monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[str] = []

    def before(*, src: Any, **_: Any) -> None:
        heard.append(src.name)

    def tell() -> None:
        for name, hit in (("one", True), ("two", False)):
            triton.knobs.compilation.listener(
                src=SimpleNamespace(name=name), metadata={}, metadata_group={}, times=None, cache_hit=hit
            )

    make(compile=tell)
    monkeypatch.setattr(triton.knobs.compilation, "listener", before)
    assert ahead.compile_all(launch) == ["two"]
    assert triton.knobs.compilation.listener is before
    assert heard == ["one", "two"]  # whoever listens is not left out


def test_what_cannot_be_compiled_is_left_out(make: Callable[..., Kernel]) -> None:
    def fail() -> None:
        raise ValueError

    kernel = make(compile=fail)
    assert ahead.compile_all(launch) == []
    launch()
    assert kernel.calls[-1][0] == "launched"


@pytest.mark.parametrize("when", ["walking", "compiling"])
def test_an_interrupt_leaves_nothing_behind(
    when: str, make: Callable[..., Kernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    started = threading.Event()

    def compile_slowly() -> None:
        started.set()
        time.sleep(0.05)

    def interrupt(futures: Any) -> Any:
        started.wait(5)
        raise KeyboardInterrupt

    def walk() -> None:
        for _ in range(50):
            launch()
        if when == "walking":
            raise KeyboardInterrupt

    kernel = make(compile=compile_slowly)
    with monkeypatch.context() as patch:
        patch.setattr(triton.runtime._async_compile, "as_completed", interrupt)
        with pytest.raises(KeyboardInterrupt):
            ahead.compile_all(walk)
    launch()
    assert kernel.calls[-1][0] == "launched"
    ahead.compile_all(launch)
    assert kernel.calls[-1][0] == "compiled"
    assert triton.knobs.compilation.listener is None
