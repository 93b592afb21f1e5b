"""A device of torch's that is neither a CPU nor CUDA: `fake`. Its tensors compute on the CPU, within limits.

As mps does, it has no float64; and it does not compute with tensors that are elsewhere, numbers aside.
Registering it changes torch for the whole process: `python fake_device.py ARGS` runs `infer ARGS` with it there.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

ELSEWHERE = {  # what moves numbers from one device to another
    torch.ops.aten._to_copy.default,
    torch.ops.aten.copy_.default,
    torch.ops.aten._copy_from.default,
}
DEVICE = "fake"


class FakeTensor(Tensor):
    """Has its numbers on the CPU."""

    @staticmethod
    def __new__(cls, numbers: Tensor) -> FakeTensor:
        if numbers.dtype is torch.float64:
            raise TypeError("there is no float64 on this device")
        options = {"strides": numbers.stride(), "storage_offset": numbers.storage_offset()}
        return Tensor._make_wrapper_subclass(  # type: ignore[attr-defined, no-any-return]
            cls, numbers.shape, **options, dtype=numbers.dtype, device=torch.device(DEVICE, 0), requires_grad=False
        )

    def __init__(self, numbers: Tensor) -> None:
        self.numbers = numbers

    def __repr__(self, **_: Any) -> str:
        return f"FakeTensor({self.numbers})"

    def __getitem__(self, index: Any) -> Any:
        index = index if isinstance(index, tuple) else (index,)
        return super().__getitem__(tuple(torch.tensor(i, device=DEVICE) if isinstance(i, list) else i for i in index))

    def tolist(self) -> Any:
        return self.numbers.tolist()

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(op, *args, **(kwargs or {}))


def compute(op: Any, *args: Any, **kwargs: Any) -> Any:
    moved = op in ELSEWHERE

    def numbers(value: Any) -> Any:
        if isinstance(value, FakeTensor):
            return value.numbers
        if isinstance(value, Tensor) and value.dim() > 0 and not moved:
            raise RuntimeError(f"{op}: a tensor is on {value.device}, not on {DEVICE}")
        if isinstance(value, torch.device) and value.type == DEVICE:
            return torch.device("cpu")
        return value

    target = kwargs.get("device")
    out = op(*tree_map(numbers, args), **tree_map(numbers, kwargs))
    if op is torch.ops.aten.copy_.default:
        return args[0]
    if moved and target is not None and torch.device(target).type == "cpu":
        return out
    written = {id(arg.numbers): arg for arg in args if isinstance(arg, FakeTensor)}
    return tree_map(lambda x: written.get(id(x), FakeTensor(x)) if isinstance(x, Tensor) else x, out)


def register() -> None:
    _setup_privateuseone_for_python_backend(DEVICE)
    library = torch.library.Library("_", "IMPL")
    library.fallback(lambda op, *args, **kwargs: compute(op, *args, **kwargs), "PrivateUse1")
    _libraries.append(library)  # it lives as long as this
    # Two things that torch does not do for a device written in Python.
    torch.inference_mode = torch.no_grad  # type: ignore[assignment, misc]
    make = torch.tensor
    torch.tensor = lambda *args, device=None, **options: make(*args, **options).to(device)  # type: ignore[assignment]


_libraries: list[Any] = []


if __name__ == "__main__":
    register()
    from infer.cli import main

    main(sys.argv[1:])
