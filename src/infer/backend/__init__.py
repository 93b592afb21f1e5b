"""The backend interface between what a model is and how it runs: `backend_for` chooses a backend, which runs rows.

Three backends: `torch` calls the modules, on any device; `cpu` and `gpu` have kernels, and keep the promise of
exactness. The choice is made here and nowhere else.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from infer.backend import cpu
from infer.backend.parts import ModelSnapshot, UnsupportedByKernels, parts_of
from infer.backend.plain import TorchBackend
from infer.models.common import Decoder, Run
from infer.models.rows import Row
from infer.nn.module import Module

__all__ = ["Backend", "ModelVersion", "Row", "backend_for", "expected"]


class Backend(Protocol):
    """Runs passes of one model."""

    @property
    def name(self) -> str: ...  # torch, cpu or gpu
    @property
    def reason(self) -> str: ...  # why it runs the model, for users
    @property
    def compiler(self) -> str: ...  # of its kernels: name, version, and the processor it compiles for
    def run(self, rows: Sequence[Row]) -> list[Tensor]: ...  # logits of each row, [B, k, V]
    def captured_decoder(self) -> Any: ...  # a `gpu.captured.CapturedDecoder`; None: it captures no steps


class _Planned(NamedTuple):
    snapshot: ModelSnapshot
    backend: Backend | None  # None: torch's, which refers to the model
    reason: str


_planned: WeakKeyDictionary[Decoder, _Planned] = WeakKeyDictionary()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_planned.clear)  # a forked process cannot run numba's kernels


def backend_for(model: Any) -> Backend:
    """The backend that runs a model: planned once, and again when a module or a weight of the model has changed."""
    if not isinstance(model, Decoder):
        return TorchBackend(model, "not an infer model class")
    if torch.is_grad_enabled() and any(weight.requires_grad for weight in model.parameters()):
        return _torch_backend(model, "gradients are recorded")
    planned = _plan_of(model)
    if planned.snapshot.hooked():
        return _torch_backend(model, "a module has a hook")
    return _torch_backend(model, planned.reason) if planned.backend is None else planned.backend


def _plan_of(model: Decoder) -> _Planned:
    planned = _planned.get(model)
    if planned is None or planned.snapshot.changed(model):
        if planned is not None:
            Module.changes += 1  # whoever runs the model chooses its backend again
        planned = _planned[model] = _plan(model)
    return planned


class ModelVersion:
    """Numbers the states of a model: keys and values that one state has computed are not those of another.

    The state is its modules, its hooks and its weights. Not seen: what torch does not count, such as changes by
    `weight.data`, through NumPy, or of weights that were made in inference mode.
    """

    def __init__(self, model: Any) -> None:
        self._model: nn.Module = model if isinstance(model, nn.Module) else nn.ParameterList(model.parameters())
        self._snapshot: ModelSnapshot | None = None

    def number(self) -> int:
        """Of the present state."""
        if isinstance(self._model, Decoder):
            return _plan_of(self._model).snapshot.version()
        if self._snapshot is None or self._snapshot.changed(self._model):
            self._snapshot = ModelSnapshot(self._model)
        return self._snapshot.version()


def _run_of(model: Decoder) -> Run:
    """What runs a model that is called: its kernels; plain torch with gradients, with hooks, or without kernels."""
    backend = backend_for(model)
    return model.run if isinstance(backend, TorchBackend) else backend.run


def _name_of(model: Decoder) -> str:
    """The backend that runs a model; that of an unchanged model if none is planned yet, which takes time."""
    planned = _planned.get(model)
    if planned is None:
        return expected(model.device, model.dtype).partition(":")[0]
    return "torch" if planned.backend is None or planned.snapshot.hooked() else planned.backend.name


Decoder.run_of = _run_of
Decoder.backend_of = _name_of


def expected(device: torch.device, dtype: torch.dtype) -> str:
    """The backend of an unchanged model of this dtype, and why, before it is loaded."""
    if device.type == "cuda":
        from infer.backend import gpu

        try:
            gpu.check(device)
        except UnsupportedByKernels as reason:
            return f"torch: {reason}"
        return "gpu: Triton kernels"
    if device.type != "cpu":
        return f"torch: there are no kernels for {device.type}"
    if not cpu.expected() or dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return "torch: INFER_KERNELS=0, numba is missing, or it is a dtype without kernels"
    return "cpu: numba kernels"


def _torch_backend(model: Decoder, reason: str) -> Backend:
    return _for_all_ranks(model, TorchBackend(model, reason))


def _for_all_ranks(model: Decoder, backend: Backend) -> Backend:
    """Wrap the backend of a sharded model, so that the other processes run each pass, too."""
    return backend if model.group is None else model.group.wrap_backend(model, backend)


@torch.no_grad()
def _plan(model: Decoder) -> _Planned:
    try:
        backend = _for_all_ranks(model, _with_kernels(model))  # first: a plan may change the layout of weights
        return _Planned(ModelSnapshot(model), backend, "")
    except UnsupportedByKernels as reason:
        return _Planned(ModelSnapshot(model), None, str(reason))


def _with_kernels(model: Decoder) -> Backend:
    """Raises UnsupportedByKernels where no kernels run such a model."""
    kind = model.device.type
    if kind == "cpu":
        from infer.backend.cpu.backend import CpuBackend

        return CpuBackend.of(parts_of(model), model.dtype)
    if kind == "cuda":
        from infer.backend import gpu

        gpu.check(model.device)  # before Triton is imported
        from infer.backend.gpu.backend import GpuBackend

        return GpuBackend.of(parts_of(model), model.dtype)
    raise UnsupportedByKernels(f"there are no kernels for {kind}")
