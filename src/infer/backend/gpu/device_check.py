"""Checks of this GPU for two undocumented properties that exactness rests on, seen on an H200.

- `instructions_agree`: a small matrix instruction gives the same bits as a large one, for any permutation of its 16
  columns. If not, few rows use the large one too.
- `torch_agrees`: torch's GEMM for many rows adds the columns of a matrix, or of each slice, in order, 16 at a time,
  into one sum. It does not if the library uses split-K, which depends on the number of rows: then our own GEMM runs.

Results are kept on disk, by device and versions.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from threading import RLock

import torch
from torch import Tensor

from infer.backend.gpu import launcher
from infer.folders import cache_folder
from infer.nn.linear import Linear

_checking = RLock()  # reentrant: a check may need the result of another
Gemm = Callable[[Tensor, Linear], Tensor]
compare_instructions: Callable[[torch.device, torch.dtype], bool]  # `gemm` sets it: these are its kernels
SMALL = 1 << 24  # weights of a matrix made for a check; with a larger one, the model's own shows any difference


def instructions_agree(device: torch.device, dtype: torch.dtype) -> bool:
    if device.type != "cuda" or launcher.recording_launches():
        return True  # Triton's interpreter, or nothing is launched
    return _answer(f"instructions {dtype}", device, lambda: compare_instructions(device, dtype))  # noqa: F821


def torch_agrees(linear: Linear, rows: int, slices: int, own: Gemm, other: Gemm) -> bool:
    """Whether `other`, torch's GEMM of so many rows with this matrix, gives the bits of `own`, our GEMM."""
    weight = linear.weight
    assert isinstance(weight, Tensor)
    if not weight.is_cuda:
        return False
    if launcher.recording_launches():
        own(weight.new_empty(rows, weight.shape[1]), linear)  # the check will need it
        return True
    question = f"sums of {weight.dtype} {tuple(weight.shape)} {slices} {rows}"
    if torch.cuda.is_current_stream_capturing():
        return _answers().get(_key(question, weight.device), False)

    def check() -> bool:
        n, k = weight.shape
        x, checked = _heavy_tailed(rows, k, weight), linear
        if n * k <= SMALL:
            x, checked = sensitive(rows, n, k, slices, weight)
        return same(other(x, checked), own(x, checked))

    return _answer(question, weight.device, check)


def sensitive(rows: int, n: int, k: int, slices: int, like: Tensor) -> tuple[Tensor, Linear]:
    """Vectors and a matrix whose product is zero except for rounding errors, so any other order of the sums shows.

    Each term of the first half of the columns has its opposite at another place in the second half.
    """
    half = k // 2
    order = torch.randperm(half, generator=torch.Generator().manual_seed(k)).to(like.device)
    x, matrix = _heavy_tailed(rows, k, like), _heavy_tailed(n, k, like)
    x[:, half : 2 * half] = -x[:, :half][:, order]
    matrix[:, half : 2 * half] = matrix[:, :half][:, order]
    x[:, 2 * half :] = 0
    linear = Linear(0, 0)
    linear.weight, linear.slices = torch.nn.Parameter(matrix, requires_grad=False), slices
    return x, linear


def _heavy_tailed(rows: int, columns: int, like: Tensor) -> Tensor:
    """Random numbers of very different magnitudes."""
    generator = torch.Generator(like.device).manual_seed(rows)
    options = {"generator": generator, "device": like.device}
    x = torch.randn(rows, columns, **options)  # type: ignore[call-overload]
    return (x * torch.exp(torch.randn(rows, columns, **options))).to(like.dtype)  # type: ignore[call-overload, no-any-return]


def same(x: Tensor, y: Tensor) -> bool:
    return bool((x.view(torch.int16) == y.view(torch.int16)).all())


def _answer(question: str, device: torch.device, check: Callable[[], bool]) -> bool:
    key, known = _key(question, device), _answers()
    with _checking:
        if key not in known:
            known[key] = True  # assumed during the check
            try:
                with torch.inference_mode():
                    known[key] = check()
            except BaseException:
                del known[key]
                raise
            with suppress(OSError):  # then the next process checks again
                _file().parent.mkdir(parents=True, exist_ok=True)
                _file().write_text(json.dumps(known))
        return known[key]


def _key(question: str, device: torch.device) -> str:
    return f"{question}; {_machine(device)}"


@cache
def _machine(device: torch.device) -> str:
    import triton

    return f"{torch.cuda.get_device_name(device)}; torch {torch.__version__}; triton {triton.__version__}"


@cache
def _answers() -> dict[str, bool]:
    with suppress(OSError, ValueError, RecursionError, AttributeError):  # damaged: check again
        return {key: answer for key, answer in json.loads(_file().read_text()).items() if isinstance(answer, bool)}
    return {}


def _file() -> Path:
    return cache_folder() / "gpu.json"
