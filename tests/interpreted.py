"""Triton's interpreter as a stand-in for a GPU: matrix units that add up in their order, and bfloat16."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter


def matrix_units(monkeypatch: pytest.MonkeyPatch, *, coarse: bool = False) -> None:
    """Products add up 16 columns at once, in any order, to what there is; of float32, one after the other.

    numpy's own order depends on the number of rows. In 16 bits, sums in float64 are as good as exact, so that those of
    `eight_rows` may come in another order. coarse: few digits are kept then, so that another order of the 16s shows.
    bfloat16, which numpy does not have, is rounded as a GPU rounds it.
    """

    def dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        left, right, out = wide(a), wide(b), d.data
        step = 1 if a.dtype.scalar == tl.float32 else 16
        for k in range(0, left.shape[-1], step):
            terms = left[..., k : k + step] @ right[..., k : k + step, :]
            out = (out.astype(np.float64) + terms).astype(np.float32)
            if coarse and step > 1:
                out = ((out.view(np.uint32) + 0x800) & 0xFFFFF000).view(np.float32)
        return interpreter.TensorHandle(out, d.dtype.scalar)

    def cast(self: Any, x: Any, to: Any) -> Any:
        if x.dtype.scalar == tl.bfloat16 and to.scalar == tl.float32:
            return interpreter.TensorHandle(as_float32(x.data), tl.float32)
        if x.dtype.scalar == tl.float32 and to.scalar == tl.bfloat16:
            rounded = torch.from_numpy(np.ascontiguousarray(x.data)).bfloat16().view(torch.uint16)
            return interpreter.TensorHandle(rounded.numpy().reshape(x.data.shape), tl.bfloat16)
        return before(self, x, to)

    before = interpreter.InterpreterBuilder.cast_impl
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "cast_impl", cast)


def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without two habits that take most of the time.

    At each call of a function within a kernel, all of Triton's language is looked through for what is yet to be
    patched; and all additions of whole numbers are made twice, for the sake of overflows.
    """

    def patch(fn: Any) -> Any:
        if any(tl.core.is_builtin(module.load) for module in seen(fn)):
            return before(fn)
        return interpreter._LangPatchScope()

    @cache
    def seen(fn: Any) -> list[Any]:
        return [value for value in fn.__globals__.values() if value is tl or value is tl.core]

    before = interpreter._patch_lang
    if hasattr(interpreter, "_LangPatchScope"):  # not in every version of Triton
        monkeypatch.setattr(interpreter, "_patch_lang", patch)
    builder = interpreter.interpreter_builder
    monkeypatch.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))


def wide(x: Any) -> Any:
    data = as_float32(x.data) if x.dtype.scalar == tl.bfloat16 else x.data
    return data.astype(np.float64)


def as_float32(bits: Any) -> Any:
    """Of the bits of bfloat16."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def poison(monkeypatch: pytest.MonkeyPatch, *modules: Any) -> None:
    """What the kernels are to write is NaN before, so that whatever they leave out, or read too early, shows."""

    def empty(*shape: int, dtype: torch.dtype, **options: Any) -> Tensor:
        return torch.full(shape, torch.nan if dtype.is_floating_point else -1, dtype=dtype, **options)

    changed: dict[str, Callable[..., Tensor]] = {
        "empty": empty,
        "empty_like": lambda x: torch.full_like(x, torch.nan if x.is_floating_point() else -1),
    }
    for module in modules:
        monkeypatch.setattr(module, "torch", SimpleNamespace(**vars(torch) | changed))
