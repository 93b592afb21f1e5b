"""What is asked of a device, once, and what runs where it says no. That an H200 says yes, tests/integration shows."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton", reason="needs Triton, which is there on Linux alone")

from infer.backend.gpu import device_check, gemm, launcher
from infer.nn.linear import Linear

GPU = torch.device("cuda", 0)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where answers are kept: nothing yet."""
    monkeypatch.setenv("INFER_CACHE", str(tmp_path / "new"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Abacus 9")
    forget()
    yield device_check._file()
    forget()


def forget() -> None:
    """As another process begins."""
    device_check._answers.cache_clear()
    device_check._machine.cache_clear()


class TestAnswers:
    @pytest.mark.parametrize("answer", [True, False])
    def test_are_kept(self, file: Path, answer: bool) -> None:
        asked: list[int] = []

        def ask() -> bool:
            asked.append(1)
            return answer

        for _ in range(2):
            assert device_check._answer("a question", GPU, ask) is answer
        forget()
        assert device_check._answer("a question", GPU, ask) is answer
        assert len(asked) == 1
        assert list(json.loads(file.read_text()).values()) == [answer]
        device_check._answer("another question", GPU, ask)
        assert len(asked) == 2

    def test_are_of_a_device_and_versions(self, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        device_check._answer("a question", GPU, lambda: True)
        assert "Abacus 9" in file.read_text()
        assert torch.__version__ in file.read_text()
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Abacus 10")
        forget()
        assert not device_check._answer("a question", GPU, lambda: False)

    def test_of_a_question_that_fails(self, file: Path) -> None:
        def fail() -> bool:
            raise RuntimeError("out of memory")

        with pytest.raises(RuntimeError):
            device_check._answer("a question", GPU, fail)
        assert not file.exists()
        assert not device_check._answer("a question", GPU, lambda: False)

    def test_while_they_are_asked_for(self, file: Path) -> None:
        """The kernels that are compared ask too."""
        assert not device_check._answer(
            "a question", GPU, lambda: not device_check._answer("a question", GPU, lambda: False)
        )

    @pytest.mark.parametrize("text", ["", "{", "[1]", "3", "[" * 100_000, '{"a question": "yes"}'])
    def test_in_a_file_that_is_none(self, file: Path, text: str) -> None:
        file.parent.mkdir()
        file.write_text(text)
        assert device_check._answer("a question", GPU, lambda: True)

    def test_that_cannot_be_kept(self, file: Path) -> None:
        file.parent.write_text("no folder")
        assert device_check._answer("a question", GPU, lambda: True)

    def test_are_not_needed_by_the_interpreter(self, file: Path) -> None:
        assert device_check.instructions_agree(torch.device("cpu"), torch.bfloat16)
        product = lambda x, linear: F.linear(x, linear.weight)  # noqa: E731
        assert not device_check.torch_agrees(Linear(4, 4), 200, 1, product, product)
        assert not file.exists()

    def test_are_not_asked_for_while_nothing_is_launched(self, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """What is compiled ahead is what runs where they are yes."""
        monkeypatch.setattr(launcher, "recording_launches", lambda: True)
        assert device_check.instructions_agree(GPU, torch.bfloat16)
        assert not file.exists()


class Kernel:
    """Notes its name when it is launched."""

    def __init__(self, name: str, launched: list[str]) -> None:
        self.name, self.launched = name, launched

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *_, **__: self.launched.append(self.name)


class TestWhatRuns:
    @pytest.fixture
    def launched(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        names: list[str] = []
        for name in ("gemv", "gemm_small", "gemm_large"):
            monkeypatch.setattr(gemm, name, Kernel(name, names))
        monkeypatch.setattr(gemm, "_gemm_large_launch", gemm._gemm_large_launch.__wrapped__)  # none are kept

        def linear(x: Tensor, weight: Tensor) -> Tensor:
            names.append("torch")
            return x.new_empty(x.shape[0], weight.shape[0])

        monkeypatch.setattr(gemm.F, "linear", linear)
        return names

    def run(self, rows: int, slices: int = 1) -> None:
        linear, x = Linear(64, 32).bfloat16(), torch.empty(rows, 64, dtype=torch.bfloat16)
        linear.slices = slices
        gemm.gemm(linear, gemm.GemmInput(x), None)

    @pytest.mark.parametrize("agrees", [True, False])
    @pytest.mark.parametrize(("rows", "name"), [(1, "gemv"), (8, "gemv"), (9, "gemm_small")])
    def test_of_few_rows(
        self, rows: int, name: str, agrees: bool, launched: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(device_check, "instructions_agree", lambda *_: agrees)
        self.run(rows, slices=2)
        assert launched == [name if agrees else "gemm_small"]

    @pytest.mark.parametrize(
        ("agrees", "slices", "name"), [(True, 1, "torch"), (False, 1, "gemm_large"), (True, 2, "gemm_large")]
    )
    def test_of_many_rows(
        self, agrees: bool, slices: int, name: str, launched: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked: list[int] = []

        def torch_agrees(linear: Linear, rows: int, slices: int, own: Any, other: Any) -> bool:
            asked.append(rows)
            return agrees

        monkeypatch.setattr(device_check, "torch_agrees", torch_agrees)
        self.run(200, slices)
        assert launched == [name]
        assert asked == ([256] if slices == 1 else [])  # once for each multiple of 128
