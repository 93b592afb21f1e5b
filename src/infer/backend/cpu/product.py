"""A product with a weight, whichever kind it is: kernels find the code for it beside the weight's address.

An output depends on its row of x and its row of W alone, down to the last bit: not on the rows beside them, nor on
threads.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from infer.backend.cpu.memory import call_at
from infer.backend.cpu.simd import _typed_intrinsic
from infer.backend.cpu.units import linked

# kind: bits of a weight, or which 16 of them. code, at, bias: addresses; bias is 0 where there is none.
WEIGHT = np.dtype([(name, np.int64) for name in ("code", "kind", "at", "bias", "rows", "columns")])
INT4, INT8, BFLOAT16, FLOAT32, FLOAT16 = 4, 8, 16, 32, 116
PRODUCT = types.void(*[types.int64] * 8)


@_typed_intrinsic
def _product_at(
    context: Any, code: Any, kind: Any, at: Any, bias: Any, rows: Any, columns: Any, x: Any, count: Any, out: Any
) -> Any:
    return types.void(types.int64, *PRODUCT.args), call_at


@linked
def product(weight: Any, x: int, count: int, out: int) -> None:
    """out [count, rows] = x [count, columns] W^T + b"""
    _product_at(weight.code, weight.kind, weight.at, weight.bias, weight.rows, weight.columns, x, count, out)
