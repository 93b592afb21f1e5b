"""Products of a decode step on a GPU, and what stands between them: norms in front, the residual behind.

The kernels are in `kernels/gpu_product.py`, for a single row, and `kernels/gpu_rows.py`, for several. Their sizes are
what was fastest on an H200, by the time of whole steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from infer import kernels
from infer.ops.linear import Linear
from infer.ops.norm import Norm

BLOCK_N, MAX_BLOCK_B = 64, 128  # of the product of few rows
WIDEST_OF_EIGHT = 3072  # the smaller side of a matrix that the product of eight rows is fastest with
PROCESSORS = 132  # of an H200: more programs of a product take turns


class Prepared(NamedTuple):
    """Vectors [B, C] half way through an RMSNorm: by its weight, and of each the squares, in parts, that scale it."""

    x: Tensor
    squares: Tensor  # float32 [B, parts]


class Residual(NamedTuple):
    """The residual of a step, [B, C]. With `after`, less what is yet to be normed and added."""

    x: Tensor
    added: Tensor | None = None
    after: Norm | None = None
    prepared: Prepared | None = None  # for the norm that follows


def normed_product(
    linear: Linear,
    residual: Residual,
    norm: Norm,
    finished: Tensor,
    *,
    activation: str = "",
    gated: bool = False,
    pdl: bool = False,
) -> tuple[Tensor, Residual]:
    """activation(W norm(residual) + b), where gated times the second half of W's rows; and the residual, complete."""
    x, added, after, prepared = residual
    if prepared is not None:
        return _several_rows(linear, *prepared, finished, activation, gated, pdl, eps=norm.eps)[0], Residual(x)
    complete = x if added is None else torch.empty_like(x)  # others still read x
    vectors = x if added is None else added
    weights = norm.weight, norm.weight if norm.bias is None else norm.bias, x if after is None else after.weight
    options = {
        "AFTER": after is not None,
        "EPS": norm.eps,
        "OFFSET": norm.offset,
        "CENTRED": norm.centred,
        "NORM_BIAS": norm.bias is not None,
    }
    if x.shape[0] == 1:
        norms = (*weights, x, complete)
        out = _one_row(linear, vectors, None, norms, activation, gated, pdl, NORM=True, **options)
    else:
        ready = torch.empty_like(x)
        size = x.shape[1]
        kernels.gpu_modules().product.norm_rows[(x.shape[0],)](
            vectors, ready, *weights, x, complete, K=size, PARTS=in_parts(size), **options, **late(pdl)
        )
        out = _several_rows(linear, ready, None, finished, activation, gated, pdl)[0]
    return out, Residual(complete)


def added_product(
    linear: Linear,
    x: Tensor,
    residual: Residual,
    after: Norm | None,
    norm: Norm,
    finished: Tensor,
    *,
    pdl: bool = False,
) -> Residual:
    """W x + b, added to the residual; or yet to be normed by `after`, and added then. norm: what follows."""
    addend = residual.x if after is None else None
    prepared = None
    if x.shape[0] == 1:
        options = {"NORM": False, "AFTER": False, "EPS": 0.0, "OFFSET": 0.0, "CENTRED": False, "NORM_BIAS": False}
        out = _one_row(linear, x, addend, (x,) * 5, "", False, pdl, **options)
    else:
        # Not in float16: by the weight alone, before it is scaled, a large residual is beyond what that holds.
        plain = not norm.centred and norm.bias is None and x.dtype is not torch.float16
        following = norm if after is None and plain else None
        out, prepared = _several_rows(linear, x, None, finished, "", False, pdl, addend=addend, norm=following)
    return Residual(out, prepared=prepared) if after is None else Residual(residual.x, out, after)


def _one_row(
    linear: Linear,
    x: Tensor,
    residual: Tensor | None,
    norms: tuple[Tensor, ...],
    activation: str,
    gated: bool,
    pdl: bool,
    **options: Any,
) -> Tensor:
    """norms: what stands between `out` and `N` in the kernel's arguments."""
    weight, bias = linear.weight, linear.bias
    assert isinstance(weight, Tensor)
    n, k = weight.shape[0] // (2 if gated else 1), weight.shape[1]
    out = torch.empty(1, n, dtype=x.dtype, device=x.device)
    rows, warps = _rows_and_warps(n, k, gated)
    kernels.gpu_modules().product.one_row[(-(-n // rows),)](
        x,
        weight,
        weight if bias is None else bias,
        x if residual is None else residual,
        out,
        *norms,
        n,
        K=k,
        PARTS=in_parts(k),
        ROWS=rows,
        BIAS=bias is not None,
        RESIDUAL=residual is not None,
        GATED=gated,
        ACTIVATION=activation,
        num_warps=warps,
        **options,
        **late(pdl),
    )
    return out


def _rows_and_warps(n: int, k: int, gated: bool) -> tuple[int, int]:
    """Rows of a matrix that a program takes, and its warps: what was fastest on an H200 for sizes like these.

    A thread holds 64 to 128 weights of them. Small matrices take small programs, so that all of them are there, with
    their weights, before the kernel in front has ended.
    """
    if gated:
        return 4, max(1, min(8, next_power(k + 1) // 1024))
    if k > 8192:
        return 1, 8
    if k > 4096:
        return (4, 4 if k <= 6144 else 8) if n >= 2048 else (2, 4)
    if n <= 4096:
        return 2, max(1, k // 2048)
    return 8, 4 if k <= 2048 else 8


def _several_rows(
    linear: Linear,
    x: Tensor,
    squares: Tensor | None,
    finished: Tensor,
    activation: str,
    gated: bool,
    pdl: bool,
    *,
    eps: float = 0.0,
    addend: Tensor | None = None,
    norm: Norm | None = None,
) -> tuple[Tensor, Prepared | None]:
    """squares: of what is `Prepared`. norm: to prepare the result for."""
    weight, bias = linear.weight, linear.bias
    assert isinstance(weight, Tensor)
    batch, (n, k) = x.shape[0], (weight.shape[0] // (2 if gated else 1), weight.shape[1])
    out = torch.empty(batch, n, dtype=x.dtype, device=x.device)
    eight = batch <= 8 and x.element_size() == 2 and min(n, k) <= WIDEST_OF_EIGHT
    blocks = -(-n // (16 if eight else BLOCK_N))
    options: dict[str, Any] = {
        "K": k,
        "BIAS": bias is not None,
        "RESIDUAL": addend is not None,
        "GATED": gated,
        "ACTIVATION": activation,
        **late(pdl),
    }
    if squares is not None:
        parts = squares.shape[1]
        options |= {"squares": squares, "SQUARES": parts, "PADDED": next_power(parts), "EPS": eps}
    prepared = None
    if norm is not None:
        prepared = Prepared(torch.empty_like(out), torch.empty(batch, blocks, dtype=torch.float32, device=x.device))
        options |= {"next_weight": norm.weight, "next_out": prepared.x, "next_squares": prepared.squares}
        options["OFFSET"] = norm.offset
    tensors = x, weight, weight if bias is None else bias, x if addend is None else addend, out
    if eight:
        _eight_rows(tensors, n, k, blocks, options)
    else:
        _few_rows(tensors, finished, n, k, blocks, options)
    return out, prepared


def _eight_rows(tensors: Sequence[Tensor], n: int, k: int, blocks: int, options: dict[str, Any]) -> None:
    warps, held, ahead, chains = _tiles_of_eight(n, k, options["GATED"])
    tiles = -(-k // (32 * warps))
    kernels.gpu_modules().rows.eight_rows[(blocks,)](
        *tensors,
        tensors[0].shape[0],
        n,
        TILES=tiles,
        HELD=min(held, tiles),
        AHEAD=min(ahead, tiles),
        VECTORS_AHEAD=min(8, tiles),
        CHAINS=chains,
        WARPS=warps,
        EVEN=n % 16 == 0 and k % (32 * warps) == 0,
        num_warps=warps,
        **options,
    )


def _tiles_of_eight(n: int, k: int, gated: bool) -> tuple[int, int, int, int]:
    """Warps of a program, tiles that each holds and has ahead, and chains: what was fastest for sizes like these.

    More than some 32 tiles to a warp would take long to compile.
    """
    warps = next_power(k) // 1024
    if gated:
        return min(8, max(2, warps)), 10, 8, 2
    if n > 16384:
        return min(8, max(2, warps)), 16, 16, 2
    warps = min(16, max(2 if k <= 1024 else 4, warps))
    if k > 4096:
        return warps, 14 if n >= 2048 else 16, 16, 1
    return (warps, 16, 16, 1) if n <= 3072 else (warps, 8, 8, 1)  # more programs must leave others registers


def _few_rows(
    tensors: Sequence[Tensor], finished: Tensor, n: int, k: int, blocks: int, options: dict[str, Any]
) -> None:
    x, gated = tensors[0], options["GATED"]
    batch = x.shape[0]
    rows = min(MAX_BLOCK_B, max(16, next_power(batch)))
    split = splits_of(blocks, k, gated)
    size, stages = (256, 3) if split > 1 and rows <= 32 else (128, 4 if rows <= 32 else 3)
    if x.element_size() == 4:
        size, stages = 32, 2
    early = split > 1 and (not options["RESIDUAL"] or k > 1024 * split)  # what was fastest on an H200
    column = (BLOCK_N * (2 if gated else 1) + rows) * x.element_size()
    while size * (stages + early) * column > shared_memory(x.device):
        size //= 2
    sums = torch.empty(split if split > 1 else 0, batch, n, dtype=torch.float32, device=x.device)
    kernels.gpu_modules().rows.few_rows[(blocks, -(-batch // rows), split)](
        *tensors,
        sums if split > 1 else x,
        finished,
        batch,
        n,
        BLOCK_B=rows,
        BLOCK_N=BLOCK_N,
        BLOCK_K=size,
        SPLIT=split,
        EVEN=n % BLOCK_N == 0 and k % (size * split) == 0,
        STAGES=stages,
        EARLY=early,
        num_warps=4,
        **options,
    )


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes that a program can have."""
    if device.type == "cpu":
        return 2**31
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)  # type: ignore[attr-defined]


def splits_of(blocks: int, k: int, gated: bool) -> int:
    """Programs that share the columns of a matrix, where it has few blocks of rows."""
    split = 1
    while not gated and 2 * split * blocks <= PROCESSORS and k >= 1024 * split:
        split *= 2
    return split


def late(pdl: bool) -> dict[str, bool]:
    """Launch options of a kernel that may start before the one in front of it has ended."""
    return {"PDL": True, "launch_pdl": True} if pdl else {"PDL": False}


@cache
def in_parts(size: int) -> tuple[tuple[int, int], ...]:
    """Cut a vector into up to three parts (start, size) whose sizes are powers of two, the last padded if need be."""
    parts: list[tuple[int, int]] = []
    start = 0
    while start < size:
        left = size - start
        part = next_power(left)
        if part > 1.15 * left and len(parts) < 2:
            part //= 2
        parts.append((start, part))
        start += part
    return tuple(parts)


def next_power(n: int) -> int:
    """The next power of two."""
    return 1 << max(0, n - 1).bit_length()
