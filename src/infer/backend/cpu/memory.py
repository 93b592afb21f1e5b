"""Memory as kernels see it: weights and caches come as addresses.

Reading `data_ptr()` costs a tenth of wrapping a tensor as an array. All that is read so is contiguous.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit, types  # type: ignore[attr-defined]
from numba.core import cgutils
from numba.extending import intrinsic


def _pointer_to(typing_context: Any, address: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(address), codegen


_pointer: Any = intrinsic(_pointer_to)


@njit
def vector(address: int, size: int) -> Any:
    return carray(_pointer(address), (size,), np.float32)


@njit
def bytes_at(address: int, size: int) -> Any:
    return carray(_pointer(address), (size,), np.int8)


@njit
def integer_at(address: int) -> Any:
    return carray(_pointer(address), (1,), np.int64)[0]


@njit
def keep(one: Any, other: Any) -> None:
    """Numba frees an array behind its last use, and an address is none."""
