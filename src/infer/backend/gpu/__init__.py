"""The GPU backend: Triton kernels, and decode steps that are captured once and replayed."""

from __future__ import annotations

import os
import sys
from functools import cache

import torch

from infer.backend.parts import UnsupportedByKernels


def check(device: torch.device) -> None:
    """Raises UnsupportedByKernels where there are no kernels for this GPU. Imports Triton."""
    if (problem := _problem(torch.cuda.get_device_capability(device))) is not None:
        raise UnsupportedByKernels(f"there are no kernels for this GPU: {problem}")


@cache
def _problem(capability: tuple[int, int]) -> str | None:
    if os.environ.get("INFER_KERNELS") == "0":
        return "INFER_KERNELS=0"
    reason = f"they need compute capability 8.0, and this GPU has {capability[0]}.{capability[1]}"
    if capability >= (8, 0):
        try:
            from infer.backend.gpu import launch_kernels

            launch_kernels.check()
            return None
        except Exception as error:  # no Triton, no C compiler for its launchers, or any other failure of it
            reason = f"{type(error).__name__}: {error}".strip().partition("\n")[0]
    print(f"no kernels for this GPU, plain torch runs instead: {reason}", file=sys.stderr, flush=True)
    return reason
