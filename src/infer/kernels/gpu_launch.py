"""What all GPU kernels begin with."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def let_next_start(PDL: tl.constexpr):
    """With programmatic dependent launch, the next kernel may start as soon as all programs of this one have.

    It then runs up to its own `wait_for_previous`, before which it may read nothing that this step writes, but for what
    its first kernel does: that one lets none start.
    """
    if PDL:
        gdc_launch_dependents()


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Until the kernel before has ended, and all that it wrote can be read."""
    if PDL:
        gdc_wait()


@triton.jit
def _nothing():
    pass


def check() -> None:
    """Compile and launch something, which fails where Triton cannot work."""
    _nothing[(1,)]()
