"""Kernels launched again without Triton's own launcher. That this launches the right one, a GPU shows."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="needs Triton, which is there on Linux alone")

from infer.backend.gpu import launcher  # noqa: E402
from infer.backend.gpu.launcher import Kernel, Launch  # noqa: E402
from infer.backend.gpu.launcher import kernel as decorated  # noqa: E402


class Compiled:
    def __init__(self, calls: list[Any]) -> None:
        self._calls = calls

    def run(self) -> None: ...

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args: self._calls.append(("again", grid, args))


class Jitted:
    """As Triton has it: each launch looks the compiled kernel up, and returns it."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.params = [
            SimpleNamespace(name="x", do_not_specialize=False, has_default=False, default=None),
            SimpleNamespace(name="B", do_not_specialize=True, has_default=False, default=None),
            SimpleNamespace(name="N", do_not_specialize=False, has_default=False, default=None),
            SimpleNamespace(name="K", do_not_specialize=False, has_default=False, default=None),
            SimpleNamespace(name="next", do_not_specialize=False, has_default=True, default=None),
            SimpleNamespace(name="EPS", do_not_specialize=False, has_default=True, default=0.5),
        ]

    def warmup(self, *args: Any, **options: Any) -> str:
        return f"compiled for {options['grid']}"

    def __getitem__(self, grid: Any) -> Any:
        def launch(*args: Any, **options: Any) -> Compiled:
            self.calls.append(("looked up", grid, args))
            return Compiled(self.calls)

        return launch


X = torch.zeros(64)


@pytest.fixture
def jitted() -> Jitted:
    return Jitted()


@pytest.fixture
def kernel(jitted: Jitted) -> Kernel:
    return Kernel(jitted)


@pytest.fixture
def recorded() -> Iterator[list[Any]]:
    """What is compiled ahead instead of being launched."""
    compiled: list[Any] = []
    token = launcher._recorded.set(compiled)
    yield compiled
    launcher._recorded.reset(token)


def test_is_looked_up_once(kernel: Kernel, jitted: Jitted) -> None:
    """Then all parameters are given, in order, and a grid of three dimensions."""
    for _ in range(2):
        kernel[(7,)](X, 2, 32, K=5, num_warps=4)
    assert jitted.calls == [("looked up", (7,), (X, 2, 32)), ("again", (7, 1, 1), (X, 2, 32, 5, None, 0.5))]


@pytest.mark.parametrize(
    ("args", "options"),
    [
        ((X.half(), 2, 32), {}),
        ((X[1:], 2, 32), {}),  # where it lies
        ((X, 2, 33), {}),  # no multiple of 16
        ((X, 2, 1), {}),
        ((X, 2**31, 32), {}),
        ((X, 2, 32), {"K": 6}),
        ((X, 2, 32), {"next": X}),
        ((X, 2, 32), {"num_warps": 8}),
        ((X, 2, 32), {"launch_pdl": True}),
    ],
)
def test_another_kind_is_another_kernel(kernel: Kernel, jitted: Jitted, args: tuple[Any, ...], options: Any) -> None:
    given = {"K": 5, "num_warps": 4}
    kernel[(7,)](X, 2, 32, **given)
    kernel[(7,)](*args, **given | options)
    assert [kind for kind, *_ in jitted.calls] == ["looked up"] * 2


@pytest.mark.parametrize("args", [(X + 1, 2, 32), (X, 1, 32), (X, 16, 32), (X, 2, 64)])
def test_the_same_kind_is_the_same(kernel: Kernel, jitted: Jitted, args: tuple[Any, ...]) -> None:
    """Whatever the numbers, and the number of rows, which nothing is compiled for."""
    kernel[(7,)](X, 2, 32, K=5)
    kernel[(3, 2)](*args, K=5)
    assert [call[:2] for call in jitted.calls] == [("looked up", (7,)), ("again", (3, 2, 1))]


class TestPrepared:
    """A kernel with its grid and options."""

    @pytest.fixture
    def launch(self, kernel: Kernel) -> Launch:
        return Launch(kernel, (7,), K=5, num_warps=4)

    def test_is_looked_up_once(self, launch: Launch, jitted: Jitted) -> None:
        for x in (X, X + 1):
            launch(x, 2, 32)
        assert [call[:2] for call in jitted.calls] == [("looked up", (7,)), ("again", (7, 1, 1))]
        assert jitted.calls[1][2][1:] == (2, 32, 5, None, 0.5)

    def test_where_a_tensor_lies(self, launch: Launch, jitted: Jitted) -> None:
        for x in (X[1:], X, X[1:], X):
            launch(x, 2, 32)
        assert [kind for kind, *_ in jitted.calls] == ["looked up"] * 2 + ["again"] * 2
        assert jitted.calls[2][2][0].data_ptr() == X[1:].data_ptr()

    def test_is_compiled_ahead(self, launch: Launch, jitted: Jitted, request: pytest.FixtureRequest) -> None:
        """Also when it has been launched before."""
        launch(X, 2, 32)
        recorded = request.getfixturevalue("recorded")
        launch(X, 2, 32)
        assert recorded == ["compiled for (7,)"]
        assert len(jitted.calls) == 1


def test_is_compiled_without_a_launch(kernel: Kernel, jitted: Jitted, recorded: list[Any]) -> None:
    kernel[(7,)](X, 2, 32, K=5)
    assert recorded == ["compiled for (7,)"]
    assert not jitted.calls


def test_what_a_hook_took_over_is_looked_up_again(
    kernel: Kernel, jitted: Jitted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Jitted, "__getitem__", lambda *_: lambda *args, **__: jitted.calls.append(args))
    for _ in range(2):
        kernel[(7,)](X, 2, 32, K=5)
    assert len(jitted.calls) == 2


def test_what_another_thread_compiles_is_waited_for(
    kernel: Kernel, jitted: Jitted, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Future:
        """As Triton's: it seems to have what the kernel will have, but cannot be launched."""

        def __getattr__(self, name: str) -> Any:
            return getattr(self.result(), name)

        def result(self) -> Compiled:
            return Compiled(jitted.calls)

    monkeypatch.setattr(Jitted, "__getitem__", lambda *_: lambda *args, **__: Future())
    for _ in range(2):
        kernel[(7,)](X, 2, 32, K=5)
    assert [kind for kind, *_ in jitted.calls] == ["again"]


@pytest.mark.parametrize("interpret", [False, True])
def test_the_interpreter_launches_its_own(interpret: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel of ours stands for one that is compiled."""
    asked: list[Any] = []

    def jit(function: Any, **options: Any) -> Jitted:
        asked.append((function, options))
        return Jitted()

    def add(x: Any) -> None: ...

    monkeypatch.setattr(triton, "jit", jit)
    monkeypatch.setattr(triton.knobs.runtime, "interpret", interpret)
    made = decorated(do_not_specialize=["x"])(add)
    assert isinstance(made, Jitted if interpret else Kernel)
    assert isinstance(made if interpret else made.jit, Jitted)
    assert asked == [(add, {"do_not_specialize": ["x"]})]
