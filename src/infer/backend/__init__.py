"""One door between what a model is and how it is run: `backend_for` a model, which then runs rows.

Three backends: `torch` calls the modules, on any device; `cpu` and `gpu` have kernels, and keep the promise of
exactness. Which one runs a model is decided here and nowhere else.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from infer.backend import cpu
from infer.backend.parts import NotPlain, Watch, parts_of
from infer.backend.plain import TorchBackend
from infer.models.common import Decoder
from infer.models.rows import Row

__all__ = ["AHEAD", "Backend", "Row", "backend_for", "expected"]

AHEAD = 1  # captured steps launched beyond the one whose tokens are awaited; any ring can be truncated by both


class Backend(Protocol):
    """Runs passes of one model."""

    @property
    def name(self) -> str: ...  # torch, cpu or gpu
    @property
    def why(self) -> str: ...  # why this one runs the model, for people
    def run(self, rows: Sequence[Row]) -> list[Tensor]: ...  # logits of each row, [B, wanted, V]
    def decoding(self, lazy: bool = False) -> Any: ...  # captured steps (`gpu.captured.Decoding`); None: there are none


class _Planned(NamedTuple):
    watch: Watch
    backend: Backend | None  # None: torch's, which refers to the model
    why: str


_planned: WeakKeyDictionary[Decoder, _Planned] = WeakKeyDictionary()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_planned.clear)  # a forked process cannot run numba's kernels


def backend_for(model: Any) -> Backend:
    """The backend that runs a model: planned once, and again when a module or a weight of the model has changed."""
    if not isinstance(model, Decoder):
        return TorchBackend(model, "it is no model of infer's own")
    if torch.is_grad_enabled():
        return _plain(model, "gradients are recorded")
    planned = _planned.get(model)
    if planned is None or planned.watch.changed(model):
        planned = _planned[model] = _plan(model)
    if planned.watch.hooked():
        return _plain(model, "a module has a hook")
    return _plain(model, planned.why) if planned.backend is None else planned.backend


def expected(device: torch.device, dtype: torch.dtype) -> str:
    """What will run a model of this dtype that nobody changes, and why, before there is one."""
    if device.type == "cuda":
        from infer.backend import gpu

        try:
            gpu.check(device)
        except NotPlain as reason:
            return f"torch: {reason}"
        return "gpu: Triton kernels"
    if device.type != "cpu":
        return f"torch: there are no kernels for {device.type}"
    if not cpu.expected() or dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return "torch: INFER_KERNELS=0, numba is missing, or it is a dtype without kernels"
    return "cpu: numba kernels"


def _plain(model: Decoder, why: str) -> Backend:
    return _led(model, TorchBackend(model, why))


def _led(model: Decoder, backend: Backend) -> Backend:
    """Where other processes have a part of the model, they run along."""
    return backend if model.group is None else model.group.led(model, backend)


def _plan(model: Decoder) -> _Planned:
    try:
        return _Planned(Watch(model), _led(model, _with_kernels(model)), "")
    except NotPlain as reason:
        return _Planned(Watch(model), None, str(reason))


def _with_kernels(model: Decoder) -> Backend:
    """Raises NotPlain where no kernels run such a model."""
    kind = model.device.type
    if kind == "cpu":
        from infer.backend.cpu.backend import CpuBackend

        return CpuBackend.of(parts_of(model), model.dtype)
    if kind == "cuda":
        from infer.backend import gpu

        gpu.check(model.device)  # before Triton is imported
        from infer.backend.gpu.backend import GpuBackend

        return GpuBackend.of(parts_of(model), model.dtype)
    raise NotPlain(f"there are no kernels for {kind}")
