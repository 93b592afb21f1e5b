"""What the kernels of a GPU take for granted and no vendor promises, asked of the device at hand.

Exactness rests on two properties of matrix units and of torch's products, seen on an H200 and documented nowhere:

- `instructions_agree`: a small matrix instruction gives the same bits as a large one, in whichever order its 16 columns
  are named. Where it does not, few rows go through the large one too.
- `torch_agrees`: torch's product of many rows adds up the columns of a matrix, or of each of its slices, in order, 16
  after 16, into one sum. It does not where the library splits the columns, which depends on the number of rows: there
  our own product runs.

Answers are kept on disk, by device and versions.
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

from infer.backend.gpu import precompile
from infer.folders import cache_folder
from infer.nn.linear import Linear

_asking = RLock()  # others wait for an answer; who asks may need one meanwhile
Product = Callable[[Tensor, Linear], Tensor]
SMALL = 1 << 24  # weights of a matrix that is made for a question: in a larger one's product, any difference shows


def instructions_agree(device: torch.device, dtype: torch.dtype) -> bool:
    if device.type != "cuda" or precompile.recording_launches():
        return True  # Triton's interpreter, or nothing is launched
    return _answer(f"instructions {dtype}", device, lambda: _compare_instructions(device, dtype))


def torch_agrees(linear: Linear, rows: int, slices: int, own: Product, other: Product) -> bool:
    """Whether `other`, torch's product of so many rows with this matrix, gives the bits of `own`, our product."""
    weight = linear.weight
    assert isinstance(weight, Tensor)
    if not weight.is_cuda:
        return False
    if precompile.recording_launches():
        own(weight.new_empty(rows, weight.shape[1]), linear)  # which will be asked
        return True
    question = f"sums of {weight.dtype} {tuple(weight.shape)} {slices} {rows}"
    if torch.cuda.is_current_stream_capturing():
        return _answers().get(_key(question, weight.device), False)

    def ask() -> bool:
        n, k = weight.shape
        x, asked = _heavy_tailed(rows, k, weight), linear
        if n * k <= SMALL:
            x, asked = _sensitive(rows, n, k, slices, weight)
        return _same(other(x, asked), own(x, asked))

    return _answer(question, weight.device, ask)


def _compare_instructions(device: torch.device, dtype: torch.dtype) -> bool:
    from infer.backend.gpu import products

    for slices in (1, 2):
        x, linear = _sensitive(300, 256, 512, slices, torch.empty(0, dtype=dtype, device=device))
        many = products._many_rows(x, linear, False)
        few = products.product(linear, products.Normed(x[:100].contiguous()), None)[0]
        eight = products.product(linear, products.Normed(x[:8].contiguous()), None)[0]
        if not _same(few, many[:100]) or not _same(eight, many[:8]):
            return False
    return True


def _sensitive(rows: int, n: int, k: int, slices: int, like: Tensor) -> tuple[Tensor, Linear]:
    """Vectors and a matrix whose product is zero but for rounding, and so another one in any other order of the sums.

    Each term of the first half of the columns has its opposite in the second half, elsewhere.
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
    """Numbers of very different sizes."""
    generator = torch.Generator(like.device).manual_seed(rows)
    options = {"generator": generator, "device": like.device}
    x = torch.randn(rows, columns, **options)  # type: ignore[call-overload]
    return (x * torch.exp(torch.randn(rows, columns, **options))).to(like.dtype)  # type: ignore[call-overload, no-any-return]


def _same(x: Tensor, y: Tensor) -> bool:
    return bool((x.view(torch.int16) == y.view(torch.int16)).all())


def _answer(question: str, device: torch.device, ask: Callable[[], bool]) -> bool:
    key, known = _key(question, device), _answers()
    with _asking:
        if key not in known:
            known[key] = True  # taken for granted while it is asked
            try:
                with torch.inference_mode():
                    known[key] = ask()
            except BaseException:
                del known[key]
                raise
            with suppress(OSError):  # then the next process asks again
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
    with suppress(OSError, ValueError, RecursionError, AttributeError):  # damaged: ask the device again
        return {key: answer for key, answer in json.loads(_file().read_text()).items() if isinstance(answer, bool)}
    return {}


def _file() -> Path:
    return cache_folder() / "gpu.json"
