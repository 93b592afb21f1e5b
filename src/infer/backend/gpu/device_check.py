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
from infer.machine import cache_folder

_asking = RLock()  # others wait for an answer; who asks may need one meanwhile
Product = Callable[[Tensor], Tensor]


def instructions_agree(device: torch.device, dtype: torch.dtype) -> bool:
    if device.type != "cuda" or precompile.recording_launches():
        return True  # Triton's interpreter, or nothing is launched
    return _answer(f"instructions {dtype}", device, lambda: _compare_instructions(device, dtype))


def torch_agrees(weight: Tensor, rows: int, slices: int, own: Product, other: Product) -> bool:
    """Whether `other`, torch's product of so many rows with this matrix, gives the bits of `own`, our product."""
    if not weight.is_cuda or weight.dtype.itemsize != 2:
        return False
    if precompile.recording_launches():
        own(weight.new_empty(rows, weight.shape[1]))  # which will be asked
        return True
    question = f"product {weight.dtype} {tuple(weight.shape)} {slices} {rows}"
    if torch.cuda.is_current_stream_capturing():
        return _answers().get(_key(question, weight.device), False)

    def ask() -> bool:
        x = _heavy_tailed(rows, weight.shape[1], weight)
        return _same(other(x), own(x))

    return _answer(question, weight.device, ask)


def _compare_instructions(device: torch.device, dtype: torch.dtype) -> bool:
    from infer.backend.gpu import products
    from infer.nn.linear import Linear

    linear = Linear(512, 256)
    weight = torch.empty(256, 512, dtype=dtype, device=device)
    linear.weight = torch.nn.Parameter(_heavy_tailed(256, 512, weight), requires_grad=False)
    x = _heavy_tailed(300, 512, weight)
    for slices in (1, 2):
        linear.slices = slices
        many = products._many_rows(x, linear, False)
        few = products.product(linear, products.Normed(x[:100].contiguous()), None)[0]
        eight = products.product(linear, products.Normed(x[:8].contiguous()), None)[0]
        if not _same(few, many[:100]) or not _same(eight, many[:8]):
            return False
    return True


def _heavy_tailed(rows: int, columns: int, like: Tensor) -> Tensor:
    """Numbers of very different sizes: sums in another order come out otherwise."""
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
