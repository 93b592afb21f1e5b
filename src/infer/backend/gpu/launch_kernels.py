"""Synchronization of GPU kernels: programmatic dependent launch, prefetching, and counters of finished programs."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

COMPILED = tl.constexpr(not triton.knobs.runtime.interpret)


@triton.jit
def let_next_start(PDL: tl.constexpr):
    """With programmatic dependent launch, the next kernel may start once all programs of this one have started.

    It runs up to its own `wait_for_previous`, and before that must not read what this step writes. The exception is the
    output of the step's first kernel, which never calls this. In each kernel at least one program waits: otherwise the
    kernel could end before the previous one, and the next kernel would not wait for both.
    """
    if PDL:
        gdc_launch_dependents()


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Wait until the previous kernel has ended and its writes are visible."""
    if PDL:
        gdc_wait()


@triton.jit
def prefetch_l2(lines, COLUMNS: tl.constexpr, PDL: tl.constexpr):
    """Prefetch columns of these matrix rows [N, 1] into the L2 cache, before waiting for the previous kernel."""
    if PDL and COLUMNS > 0:
        STEP: tl.constexpr = 1024 // lines.dtype.element_ty.primitive_bitwidth  # 128 bytes
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [(lines + tl.arange(0, COLUMNS // STEP)[None, :] * STEP).to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def load_int64(address):
    """The int64 at an address; 0 for address 0.

    Inline assembly, because Triton does not pipeline a loop in which one load gives the address of another.
    """
    if COMPILED:
        number = tl.inline_asm_elementwise(
            "{ .reg .pred there; setp.ne.s64 there, $1, 0; mov.s64 $0, 0; @there ld.global.s64 $0, [$1]; }",
            "=l,l",
            [address],
            dtype=tl.int64,
            is_pure=True,
            pack=1,
        )
    else:
        number = tl.load(address.to(tl.pointer_type(tl.int64)), address != 0, 0)
    return number


@triton.jit
def is_last(counter, count):
    """Count this program as finished. True for the last of `count`, which may then read what the others wrote.

    The counter is 0 before and after.
    """
    tl.debug_barrier()  # all threads have written before one of them counts
    last = tl.atomic_add(counter, 1, sem="acq_rel") == count - 1
    if last:
        tl.store(counter, 0)
    return last


@triton.jit
def _nothing():
    pass


def check() -> None:
    """Compile and launch an empty kernel. Raises where Triton does not work."""
    _nothing[(1,)]()
