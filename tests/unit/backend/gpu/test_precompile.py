"""Kernels compiled before they are needed. That they then are, a GPU shows: tests/integration/test_gpu.py."""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="needs Triton, which is there on Linux alone")

from infer.backend.gpu import launcher  # noqa: E402
from infer.backend.gpu.launcher import Kernel, Launch  # noqa: E402

X = torch.zeros(16)
compile_ahead = partial(launcher.compile_ahead, X.device)
place = ContextVar("place", default="nowhere")


class Jitted:
    """Compiled as Triton compiles: by the mode that is on, or at once."""

    params = ()

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

        def compile() -> Jitted:
            self._compile()
            return self

        return submit(len(self.calls), compile, *[lambda *_: None] * rest)


@pytest.fixture(params=["kernel", "prepared"])
def launch(request: pytest.FixtureRequest, jitted: Jitted) -> Callable[[], None]:
    """A kernel that is launched each time it is called: as it is, or with its grid and options."""
    kernel = Kernel(jitted)
    if request.param == "kernel":
        return lambda: kernel[(3,)](X, K=5)
    prepared = Launch(kernel, (3,), K=5)
    return lambda: prepared(X)


@pytest.fixture
def jitted() -> Jitted:
    return Jitted()


def test_what_would_be_launched_is_compiled(launch: Callable[[], None], jitted: Jitted) -> None:
    launch()
    compile_ahead(launch)
    launch()
    assert jitted.calls == [(kind, (3,), (X,), {"K": 5}) for kind in ("launched", "compiled", "launched")]


@pytest.mark.parametrize("interpreted", [False, True])
def test_an_interpreter_has_nothing_to_compile(interpreted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.knobs.runtime, "interpret", interpreted)
    assert launcher.can_compile_ahead() is not interpreted


def test_what_is_compiled_is_loaded(
    launch: Callable[[], None], jitted: Jitted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, however often it would be launched, and on its device."""

    @contextmanager
    def on(_: torch.device) -> Iterator[None]:
        token = place.set("the device")
        yield
        place.reset(token)

    def walk() -> None:
        launch()
        launch()

    monkeypatch.setattr(launcher, "on", on)
    compile_ahead(walk)
    assert jitted.loaded == ["the device"]


def test_what_cannot_be_loaded_fails_when_it_is_launched(
    launch: Callable[[], None], jitted: Jitted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel is not taken for one that is loaded."""
    jitted._run = "half loaded"

    @contextmanager
    def full(_: torch.device) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            raise MemoryError
        yield

    monkeypatch.setattr(launcher, "on", full)
    compile_ahead(launch)
    assert jitted.loaded == []
    assert jitted._run is None


def test_what_triton_keeps_to_itself_is_left_alone(
    launch: Callable[[], None], jitted: Jitted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where somebody's hook compiles a kernel instead, there is none to load."""
    monkeypatch.setattr(jitted, "warmup", lambda *_, **__: None)
    assert compile_ahead(launch) == []
    assert jitted.loaded == []


def test_what_no_disk_had_is_named(launch: Callable[[], None], jitted: Jitted, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[str] = []

    def before(*, src: Any, **_: Any) -> None:
        heard.append(src.name)

    def tell() -> None:
        for name, hit in (("one", True), ("two", False)):
            triton.knobs.compilation.listener(
                src=SimpleNamespace(name=name), metadata={}, metadata_group={}, times=None, cache_hit=hit
            )

    jitted._compile = tell
    monkeypatch.setattr(triton.knobs.compilation, "listener", before)
    assert compile_ahead(launch) == ["two"]
    assert triton.knobs.compilation.listener is before
    assert heard == ["one", "two"]  # whoever listens is not left out


def test_what_cannot_be_compiled_is_left_out(launch: Callable[[], None], jitted: Jitted) -> None:
    def fail() -> None:
        raise ValueError

    jitted._compile = fail
    assert compile_ahead(launch) == []
    launch()
    assert jitted.calls[-1][0] == "launched"


@pytest.mark.parametrize("when", ["walking", "compiling"])
def test_an_interrupt_leaves_nothing_behind(
    when: str, launch: Callable[[], None], jitted: Jitted, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = threading.Event()

    def compile_slowly() -> None:
        started.set()
        time.sleep(0.05)

    def interrupt(futures: Any) -> Any:
        started.wait(300)
        raise KeyboardInterrupt

    def walk() -> None:
        for _ in range(50):
            launch()
        if when == "walking":
            raise KeyboardInterrupt

    jitted._compile = compile_slowly
    with monkeypatch.context() as patch:
        patch.setattr(triton.runtime._async_compile, "as_completed", interrupt)
        with pytest.raises(KeyboardInterrupt):
            compile_ahead(walk)
    launch()
    assert jitted.calls[-1][0] == "launched"
    compile_ahead(launch)
    assert jitted.calls[-1][0] == "compiled"
    assert triton.knobs.compilation.listener is None
