"""Triton's interpreter as a stand-in for a GPU: matrix units that add up in their order, and bfloat16."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from operator import index
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
    `gemv` may come in another order. coarse: few digits are kept then, so that another order of the 16s shows.
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
    """Without habits that take most of the time.

    At each call of a function within a kernel, all of Triton's language is looked through for what is yet to be
    patched; all additions of whole numbers are made twice, for the sake of overflows; and each tensor has a shape, and
    mostly a type, of its own.
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
    one_of_each_type(monkeypatch)


def one_of_each_type(monkeypatch: pytest.MonkeyPatch) -> None:
    """Types of the same name and shape share what they are, and tensors of a type all but their numbers."""
    blocks: dict[Any, dict[str, Any]] = {}
    shapes: dict[Any, Any] = {}
    numpy_types: dict[str, Any] = {}

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *map(index, shape))
        if key not in blocks:
            make_block_type(self, element_ty, shape)
            blocks[key] = self.__dict__
        self.__dict__ = blocks[key]

    def tensor(self: Any, handle: Any, type: Any) -> None:
        if "of_tensors" not in type.__dict__:
            make_tensor(self, None, type)
            self.shape = shapes.setdefault(tuple(map(index, self.shape)), self.shape)
            type.of_tensors = dict(self.__dict__)
        self.__dict__.update(type.of_tensors, handle=handle)

    def broadcast(self: Any, left: Any, right: Any) -> Any:
        return (left, right) if left.shape is right.shape else make_broadcast(self, left, right)

    def numpy_type(type: Any) -> Any:
        name = type.scalar.name
        if name not in numpy_types:
            numpy_types[name] = find_numpy_type(type)
        return numpy_types[name]

    make_block_type, make_tensor = tl.block_type.__init__, tl.tensor.__init__
    semantic, find_numpy_type = interpreter.TritonSemantic, interpreter._get_np_dtype
    make_broadcast = semantic.broadcast_impl_value
    monkeypatch.setattr(tl.block_type, "__init__", block_type)
    monkeypatch.setattr(tl.tensor, "__init__", tensor)
    monkeypatch.setattr(semantic, "broadcast_impl_value", broadcast)
    monkeypatch.setattr(semantic, "computation_type_impl", cache(semantic.computation_type_impl))
    monkeypatch.setattr(interpreter, "_get_np_dtype", numpy_type)
    monkeypatch.setattr(
        tl.dtype, "__eq__", lambda self, other, equal=tl.dtype.__eq__: self is other or equal(self, other)
    )


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
