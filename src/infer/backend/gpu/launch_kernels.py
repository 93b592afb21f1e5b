"""What GPU kernels begin with, and how those end whose programs share work."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

COMPILED = tl.constexpr(not triton.knobs.runtime.interpret)


@triton.jit
def let_next_start(PDL: tl.constexpr):
    """With programmatic dependent launch, the next kernel may start as soon as all programs of this one have.

    It then runs up to its own `wait_for_previous`, before which it may read nothing that this step writes, but for what
    its first kernel does: that one lets none start. In each kernel at least one program waits: else the kernel could be
    over before the one in front of it, and who waits for it would not wait for that one.
    """
    if PDL:
        gdc_launch_dependents()


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Until the kernel before has ended, and all that it wrote can be read."""
    if PDL:
        gdc_wait()


@triton.jit
def fetch(lines, COLUMNS: tl.constexpr, PDL: tl.constexpr):
    """So many columns of these lines [N, 1] into the L2 cache: the bus would idle until this program may go on."""
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
def number_at(address):
    """The int64 at an address; 0 for address 0.

    Triton would wait for all loads of a loop at once if one gave another its address: it does not see this one.
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
    """Whether `count` programs are done, as which this one counts now: then it may read what the others have written.

    The counter is 0 before and after.
    """
    tl.debug_barrier()  # all threads have written before one of them says so
    last = tl.atomic_add(counter, 1, sem="acq_rel") == count - 1
    if last:
        tl.store(counter, 0)
    return last


@triton.jit
def _nothing():
    pass


def check() -> None:
    """Compile and launch something, which fails where Triton cannot work."""
    _nothing[(1,)]()
