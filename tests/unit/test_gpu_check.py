"""What is asked of a device, once, and what runs where it says no. That an H200 says yes, tests/integration shows."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="needs Triton, which is there on Linux alone")

from infer.ops import gpu_check, gpu_product
from infer.nn.linear import Linear

GPU = torch.device("cuda", 0)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where answers are kept: nothing yet."""
    monkeypatch.setenv("INFER_CACHE", str(tmp_path / "new"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Abacus 9")
    forget()
    yield gpu_check._file()
    forget()


def forget() -> None:
    """As another process begins."""
    gpu_check._answers.cache_clear()
    gpu_check._machine.cache_clear()


class TestAnswers:
    @pytest.mark.parametrize("answer", [True, False])
    def test_are_kept(self, file: Path, answer: bool) -> None:
        asked: list[int] = []

        def ask() -> bool:
            asked.append(1)
            return answer

        for _ in range(2):
            assert gpu_check._answer("a question", GPU, ask) is answer
        forget()
        assert gpu_check._answer("a question", GPU, ask) is answer
        assert len(asked) == 1
        assert list(json.loads(file.read_text()).values()) == [answer]
        gpu_check._answer("another question", GPU, ask)
        assert len(asked) == 2

    def test_are_of_a_device_and_versions(self, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        gpu_check._answer("a question", GPU, lambda: True)
        assert "Abacus 9" in file.read_text()
        assert torch.__version__ in file.read_text()
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Abacus 10")
        forget()
        assert not gpu_check._answer("a question", GPU, lambda: False)

    def test_of_a_question_that_fails(self, file: Path) -> None:
        def fail() -> bool:
            raise RuntimeError("out of memory")

        with pytest.raises(RuntimeError):
            gpu_check._answer("a question", GPU, fail)
        assert not file.exists()
        assert not gpu_check._answer("a question", GPU, lambda: False)

    def test_while_they_are_asked_for(self, file: Path) -> None:
        """The kernels that are compared ask too."""
        assert not gpu_check._answer("a question", GPU, lambda: not gpu_check._answer("a question", GPU, lambda: False))

    @pytest.mark.parametrize("text", ["", "{", "[1]", "3"])
    def test_in_a_file_that_is_none(self, file: Path, text: str) -> None:
        file.parent.mkdir()
        file.write_text(text)
        assert gpu_check._answer("a question", GPU, lambda: True)

    def test_that_cannot_be_kept(self, file: Path) -> None:
        file.parent.write_text("no folder")
        assert gpu_check._answer("a question", GPU, lambda: True)

    def test_are_not_needed_by_the_interpreter(self, file: Path) -> None:
        assert gpu_check.instructions_agree(torch.device("cpu"), torch.bfloat16)
        assert not gpu_check.torch_agrees(torch.empty(4, 4, dtype=torch.bfloat16), 200, lambda x: x)
        assert not file.exists()


class Launched:
    """Stands for modules of kernels, and notes the names of those that are launched."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __getattr__(self, name: str) -> Any:
        launches = {each: self._kernel(each) for each in ("eight_rows", "few_rows", "many_rows", "norm_rows")}
        return SimpleNamespace(**launches)

    def _kernel(self, name: str) -> Any:
        launched = self.names

        class Kernel:
            def __getitem__(self, grid: Any) -> Callable[..., None]:
                return lambda *_, **__: launched.append(name)

        return Kernel()


class TestWhatRuns:
    @pytest.fixture
    def launched(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        modules = Launched()
        monkeypatch.setattr("infer.kernels.gpu_modules", lambda: modules)

        def linear(x: Tensor, weight: Tensor) -> Tensor:
            modules.names.append("torch")
            return x.new_empty(x.shape[0], weight.shape[0])

        monkeypatch.setattr(gpu_product.F, "linear", linear)
        return modules.names

    def run(self, rows: int, slices: int = 1) -> None:
        linear, x = Linear(64, 32).bfloat16(), torch.empty(rows, 64, dtype=torch.bfloat16)
        linear.slices = slices
        gpu_product.product(linear, gpu_product.Normed(x), None)

    @pytest.mark.parametrize("agrees", [True, False])
    @pytest.mark.parametrize(("rows", "name"), [(1, "eight_rows"), (8, "eight_rows"), (9, "few_rows")])
    def test_of_few_rows(
        self, rows: int, name: str, agrees: bool, launched: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(gpu_check, "instructions_agree", lambda *_: agrees)
        self.run(rows, slices=2)
        assert launched == [name if agrees else "few_rows"]

    @pytest.mark.parametrize(
        ("agrees", "slices", "name"), [(True, 1, "torch"), (False, 1, "many_rows"), (True, 2, "many_rows")]
    )
    def test_of_many_rows(
        self, agrees: bool, slices: int, name: str, launched: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked: list[int] = []

        def torch_agrees(weight: Tensor, rows: int, own: Any) -> bool:
            asked.append(rows)
            return agrees

        monkeypatch.setattr(gpu_check, "torch_agrees", torch_agrees)
        self.run(200, slices)
        assert launched == [name]
        assert asked == ([256] if slices == 1 else [])  # once for each multiple of 128
