"""GEMM on a GPU, with the norm before it and the residual after it.

The kernels are in `row_kernels.py` and `gemm_kernels.py`. The number of rows decides which one runs; the result
does not depend on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from infer.backend.gpu import device_check
from infer.backend.gpu.gemm_kernels import gemm_large, gemm_small, gemv
from infer.backend.gpu.launcher import UNFUSED, Launch, launch_options, next_power, num_sms, shared_memory
from infer.backend.gpu.row_kernels import add_norm_rows, epilogue_rows, scale_logits_rows
from infer.backend.gpu.tuned import (
    BLOCK_N,
    COLUMNS_AHEAD,
    COLUMNS_AHEAD_ALONE,
    COLUMNS_AHEAD_SHARED,
    EPILOGUE_COLUMNS,
    FUSED_ROWS,
    LARGE_FLOAT32,
    LARGE_SLICED,
    LARGE_UNSLICED,
    LAUNCHES,
    LONG_K,
    MAX_SLICES,
    MAX_SMALL_ROWS,
    PAD_ROWS,
    PREFETCHED,
    SLICED_BELOW,
    SMALL_ROWS,
    SPLIT_K,
)
from infer.backend.parts import HeadParts
from infer.nn.linear import Linear
from infer.nn.norm import Norm


def slices_of(linear: Linear) -> int:
    """The number of slices (split-K) into which the columns of a matrix are cut: a property of the matrix alone.

    A matrix instruction waits for the previous one that adds to the same sum, 23 ns on an H200: 3 us for 2,048 columns.
    Reading a matrix with few rows takes less than that. `Linear.slices` overrides the choice by shape.
    """
    if linear.slices is None:
        return _slices(linear.unsharded_rows or linear.weight.shape[0], linear.weight.shape[1])
    if linear.slices not in (1, 2, 4, MAX_SLICES):
        raise ValueError(f"a matrix is cut into 1, 2, 4 or {MAX_SLICES} slices, not {linear.slices!r}")
    return linear.slices


@cache
def _slices(n: int, k: int) -> int:
    slices = 1 if n >= SLICED_BELOW else next_power(-(-2 * SLICED_BELOW // n))
    if (k > LONG_K and n < 2 * SLICED_BELOW) or (k == LONG_K and n < SLICED_BELOW):
        slices *= 2
    slices = min(slices, MAX_SLICES)
    while k % (64 * slices):
        slices //= 2
        if slices <= 1:
            return 1
    return slices


def slice_length(linear: Linear) -> int:
    """Columns of a slice."""
    slices = slices_of(linear)
    return -(-linear.weight.shape[1] // (32 * slices)) * 32


class GemmInput(NamedTuple):
    """The input [B, K] of a GEMM. With squares, the norm's scale is missing: the output is scaled instead."""

    x: Tensor
    squares: Tensor | None = None  # float32 [B, parts]: partial sums of squares, for the scale


class Residual(NamedTuple):
    """The residual [B, C]. `added` has yet to be normed by `after`, if there is such a norm, and added."""

    x: Tensor
    added: Tensor | None = None
    after: Norm | None = None
    multiplier: float = 1.0  # of `added`, normed
    normed: GemmInput | None = None  # input of the next GEMM, if it is known already


def scale_after_gemm(norm: Norm | None, dtype: torch.dtype) -> bool:
    """Whether a norm's scale is applied after the GEMM. Not in float16: an unscaled large residual would overflow."""
    return norm is not None and not norm.centered and norm.bias is None and dtype is not torch.float16


def norm_gemm(
    linear: Linear,
    residual: Residual,
    norm: Norm | None,
    split_counters: Tensor,
    *,
    activation: str = "",
    gated: bool = False,
    pdl: bool = False,
) -> tuple[Tensor, Residual]:
    """activation(W norm(residual) + b), if gated times the second half of W's rows; and the complete residual."""
    x, added, after, multiplier, normed = residual
    if normed is None:
        normed, x = add_norm(x, norm, added, after, multiplier=multiplier, pdl=pdl)
    eps = 0.0 if norm is None else norm.eps
    out, _ = gemm(linear, normed, split_counters, eps=eps, activation=activation, gated=gated, pdl=pdl)
    return out, Residual(x)


def gemm_add(
    linear: Linear,
    x: Tensor,
    residual: Residual,
    after: Norm | None,
    norm: Norm | None,
    split_counters: Tensor,
    *,
    multiplier: float = 1.0,
    pdl: bool = False,
) -> Residual:
    """multiplier (W x + b), added to the residual, or left for `after` to norm first. norm: the norm of the sum."""
    if after is not None:
        added = gemm(linear, GemmInput(x), split_counters, joined=False, pdl=pdl)[0]
        return Residual(residual.x, added, after, multiplier)
    following = norm if scale_after_gemm(norm, x.dtype) else None
    out, normed = gemm(
        linear, GemmInput(x), split_counters, addend=residual.x, multiplier=multiplier, norm=following, pdl=pdl
    )
    return Residual(out, normed=normed)


def add_norm(
    x: Tensor,
    norm: Norm | None,
    added: Tensor | None = None,
    after: Norm | None = None,
    *,
    multiplier: float = 1.0,
    scaled: bool = False,
    pdl: bool = False,
) -> tuple[GemmInput, Tensor]:
    """x += multiplier after(added), if there is something to add; returns norm(x), and x. norm: None for x itself.

    added: an output of `gemm`, which may be the sums of its slices. scaled: the scale is not left to the GEMM.
    """
    x = aligned(x)
    if norm is None and added is None:
        return GemmInput(x), x
    rows, size = x.shape
    prepared = scale_after_gemm(norm, x.dtype) and not scaled
    complete = x if added is None else empty_rows(rows, size, x) if norm is None else torch.empty_like(x)
    out = complete if norm is None else empty_rows(rows, size, x)
    squares = torch.empty(rows, 1, dtype=torch.float32, device=x.device) if prepared else None
    kind = norm or after
    slices = 1 if added is None or added.dim() == 2 else added.shape[0]
    if rows:
        _add_norm_launch(
            rows,
            size,
            slices,
            x.dtype,
            x.device,
            (0.0, 0.0, multiplier) if kind is None else (kind.eps, kind.offset, multiplier),
            norm is not None and norm.centered,
            prepared,
            (added is None, after is None, norm is None, None if norm is None else dtype_of(norm.bias)),
            pdl,
        )(
            x if added is None else aligned(added),
            None if added is None else x,
            None if after is None else after.weight,
            complete,
            None if norm is None else norm.weight,
            None if norm is None else norm.bias,
            out,
            squares,
            rows if added is None else added.shape[-2],
        )
    return GemmInput(out, squares), complete


@lru_cache(LAUNCHES)
def _add_norm_launch(
    rows: int,
    size: int,
    slices: int,
    dtype: torch.dtype,
    device: torch.device,
    constants: tuple[float, float, float],  # eps, offset and multiplier
    centered: bool,
    prepared: bool,
    given: tuple[bool, bool, bool, torch.dtype | None],  # which optional tensors are None, and the dtype of the bias
    pdl: bool,
) -> Launch:
    return Launch(
        add_norm_rows,
        (rows,),
        K=size,
        PARTS=in_parts(size),
        EPS=constants[0],
        OFFSET=constants[1],
        CENTERED=centered,
        PREPARED=prepared,
        NORM=not given[2],
        SLICES=slices,
        MULTIPLIER=constants[2],
        **launch_options(pdl),
    )


def dtype_of(bias: Tensor | None) -> torch.dtype | None:
    return None if bias is None else bias.dtype


def aligned(x: Tensor) -> Tensor:
    """Contiguous, at a multiple of 16 bytes: Triton then loads several elements at once."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x


def padded(rows: int) -> int:
    """The number of rows of torch's GEMM: the contents of the added ones do not matter."""
    return rows if rows <= SMALL_ROWS else PAD_ROWS // 2 if rows <= PAD_ROWS // 2 else -(-rows // PAD_ROWS) * PAD_ROWS


def empty_rows(rows: int, size: int, like: Tensor) -> Tensor:
    """[rows, size], with memory for the padding after them."""
    capacity = padded(rows)
    out = torch.empty(capacity, size, dtype=like.dtype, device=like.device)
    return out if capacity == rows else out[:rows]


def gemm(
    linear: Linear,
    vectors: GemmInput,
    split_counters: Tensor | None,
    *,
    eps: float = 0.0,
    addend: Tensor | None = None,
    multiplier: float = 1.0,
    norm: Norm | None = None,
    activation: str = "",
    gated: bool = False,
    joined: bool = True,
    pdl: bool = False,
) -> tuple[Tensor, GemmInput | None]:
    """activation(scale W x + b) [times the other half of W's rows] [times the multiplier, + addend]; and the input of
    the next GEMM, if norm.

    split_counters: all zero; None: made here. joined: False: the result may be the sums of the slices, float32 [slices,
    rows or more, N], which `add_norm` adds up.
    """
    x = vectors.x
    rows = x.shape[0]
    if rows > MAX_SMALL_ROWS or (rows > SMALL_ROWS and _torch_is_fast(linear, x)):
        ends = addend is not None or (joined and (vectors.squares is not None or activation or linear.bias is not None))
        if rows >= FUSED_ROWS and ends:
            return _gemm_large(linear, vectors, eps, linear.bias, addend, multiplier, norm, activation, gated, pdl)
        return _gemm_and_epilogue(linear, vectors, eps, addend, multiplier, norm, activation, gated, joined, pdl)
    weight, bias = linear.weight, linear.bias
    assert isinstance(weight, Tensor)
    n, k = weight.shape[0] // (2 if gated else 1), weight.shape[1]
    out = torch.empty(rows, n, dtype=x.dtype, device=x.device)
    if not rows:
        return out, None
    gemv_sizes = _gemv_sizes(linear, x)
    options: dict[str, Any] = {
        "K": k,
        "SLICES": slices_of(linear),
        "LENGTH": slice_length(linear),
        "BIAS": bias is not None,
        "RESIDUAL": addend is not None,
        "MULTIPLIER": multiplier,
        "GATED": gated,
        "ACTIVATION": activation,
        "EPS": eps,
        **launch_options(pdl),
    }
    if vectors.squares is not None:
        parts = vectors.squares.shape[1]
        options |= {"squares": vectors.squares, "SQUARES": parts, "PADDED": next_power(parts)}
    if gemv_sizes is not None:
        blocks = -(-n // gemv_sizes.warp_rows)
    else:
        small_sizes = _small_sizes(linear, x)
        blocks = -(-weight.shape[0] // small_sizes.block_n)
    following = None
    if norm is not None:
        squares = torch.empty(rows, blocks, dtype=torch.float32, device=x.device)
        following = GemmInput(torch.empty_like(out), squares)
        options |= {"next_weight": norm.weight, "next_out": following.x, "next_squares": squares}
        options["OFFSET"] = norm.offset
    tensors = x, weight, weight if bias is None else bias, x if addend is None else addend, out
    if gemv_sizes is not None:
        _launch_gemv(tensors, n, blocks, gemv_sizes, options)
    else:
        _launch_gemm_small(tensors, split_counters, n, blocks, small_sizes, options)
    return out, following


class GemvSizes(NamedTuple):
    """Sizes of `gemv`."""

    warp_rows: int
    steps: int
    chunks: int  # in the registers of a warp


def _gemv_sizes(linear: Linear, x: Tensor) -> GemvSizes | None:
    """None if a slice is so long that `gemm_small`, which goes through shared memory, is faster."""
    slices, length = slices_of(linear), slice_length(linear)
    if x.shape[0] > 8 or x.element_size() != 2 or slices == 1 or (length > 1024 and linear.weight.shape[1] > LONG_K):
        return None
    if not device_check.instructions_agree(x.device, x.dtype):
        return None
    warp_rows, columns = (8, 1024) if slices == 2 else (16, 512)
    steps = 4
    while length % (32 * steps):
        steps //= 2
    return GemvSizes(warp_rows, steps, columns // (32 * steps))


def _launch_gemv(tensors: Sequence[Tensor], n: int, blocks: int, sizes: GemvSizes, options: dict[str, Any]) -> None:
    chunks = options["LENGTH"] // (32 * sizes.steps)
    gemv[(blocks,)](
        *tensors,
        tensors[0].shape[0],
        n,
        WARP_ROWS=sizes.warp_rows,
        STEPS=sizes.steps,
        CHUNKS_AHEAD=min(sizes.chunks, chunks),
        VECTORS_AHEAD=min(512 // (32 * sizes.steps), chunks),
        EVEN=n % sizes.warp_rows == 0 and options["K"] == options["LENGTH"] * options["SLICES"],
        num_warps=(2 if options["GATED"] else 1) * options["SLICES"],
        **options,
    )


class SmallSizes(NamedTuple):
    """Sizes of `gemm_small`."""

    rows: int
    block_n: int
    block_k: int
    stages: int
    warps: int
    split_k: bool  # whether each slice has its own programs (split-K)


def _small_sizes(linear: Linear, x: Tensor) -> SmallSizes:
    batch, size = x.shape[0], x.element_size()
    slices, length = slices_of(linear), slice_length(linear)
    split_k = slices > 1 and batch <= SPLIT_K
    rows, block_n, columns, ahead, warps = max(16, next_power(batch)), BLOCK_N, 128, COLUMNS_AHEAD, 4
    programs = -(-linear.weight.shape[0] // block_n) * (slices if split_k else 1)
    if batch > 64 and slices == 1:
        block_n, columns, ahead, warps = 2 * BLOCK_N, 64, COLUMNS_AHEAD_SHARED, 8
    elif batch <= 32 and programs <= num_sms(x.device):
        ahead = COLUMNS_AHEAD_ALONE
    elif 16 < batch <= 32:
        ahead = COLUMNS_AHEAD_SHARED
    else:
        rows = min(64, rows)
    if size == 4:
        columns, ahead = 32, 64
    columns = block_k(columns, length)
    stages = stages_for(ahead // columns, columns * (block_n + rows) * size, x.device)
    return SmallSizes(rows, block_n, columns, stages, warps, split_k)


def _launch_gemm_small(
    tensors: Sequence[Tensor],
    split_counters: Tensor | None,
    n: int,
    blocks: int,
    sizes: SmallSizes,
    options: dict[str, Any],
) -> None:
    x, gated, slices, length = tensors[0], options["GATED"], options["SLICES"], options["LENGTH"]
    batch, pieces = x.shape[0], slices if sizes.split_k else 1
    even = n % (sizes.block_n // (2 if gated else 1)) == 0 and options["K"] == length * slices
    kept = (2 if gated else 1) * slices if sizes.split_k else 0
    sums = torch.empty(kept, batch, n, dtype=torch.float32, device=x.device)
    if split_counters is None:
        split_counters = torch.zeros(blocks, dtype=torch.int32, device=x.device)
    gemm_small[(blocks, -(-batch // sizes.rows), pieces)](
        *tensors,
        sums if sizes.split_k else x,
        split_counters,
        batch,
        n,
        SPLIT_K=sizes.split_k,
        BLOCK_B=sizes.rows,
        BLOCK_N=sizes.block_n,
        BLOCK_K=sizes.block_k,
        EVEN=even,
        STAGES=sizes.stages,
        PREFETCHED=min(PREFETCHED, next_power(length + 1) // 2) if even and length * x.element_size() >= 128 else 0,
        num_warps=sizes.warps,
        **options,
    )


def _gemm_and_epilogue(
    linear: Linear,
    vectors: GemmInput,
    eps: float,
    addend: Tensor | None,
    multiplier: float,
    norm: Norm | None,
    activation: str,
    gated: bool,
    joined: bool,
    pdl: bool,
) -> tuple[Tensor, GemmInput | None]:
    """The same for the many rows of a prompt or a large batch: a plain GEMM, then the epilogue."""
    x, squares = vectors
    out = large_gemm(linear, x, pdl=pdl)
    unjoined = out.dim() == 3 and addend is None and joined
    if squares is not None or linear.bias is not None or activation or unjoined:
        rows, (n, k) = x.shape[0], linear.weight.shape
        n, last = n // (2 if gated else 1), out
        out = empty_rows(rows, n, x)
        slices, parts = (last.shape[0] if last.dim() == 3 else 1), (0 if squares is None else squares.shape[1])
        kind = x.dtype, x.device, slices, parts, dtype_of(linear.bias)
        _epilogue_launch(rows, n, k, eps, gated, activation, kind, pdl)(
            last, squares, linear.bias, out, n, last.shape[-2]
        )
    if addend is None:
        return out, None
    normed, complete = add_norm(addend, norm, out, multiplier=multiplier, pdl=pdl)
    return complete, None if norm is None else normed


@lru_cache(LAUNCHES)
def _epilogue_launch(
    rows: int, n: int, k: int, eps: float, gated: bool, activation: str, kind: tuple[Any, ...], pdl: bool
) -> Launch:
    _, _, slices, squares, _ = kind
    return Launch(
        epilogue_rows,
        (rows, -(-n // EPILOGUE_COLUMNS)),
        K=k,
        SLICES=slices,
        SQUARES=squares,
        PADDED=next_power(squares),
        EPS=eps,
        GATED=gated,
        ACTIVATION=activation,
        BLOCK=EPILOGUE_COLUMNS,
        **launch_options(pdl),
    )


def scale_logits(logits: Tensor, head: HeadParts) -> Tensor:
    """Logits [T, V], divided and capped in place."""
    if (head.divisor != 1 or head.softcap is not None) and logits.numel():
        factor, softcap, (rows, size) = 1 / head.divisor, head.softcap or 0.0, logits.shape
        scale_logits_rows[(rows, -(-size // EPILOGUE_COLUMNS))](
            logits,
            size,
            FACTOR=factor / softcap if softcap else factor,
            SOFTCAP=softcap,
            BLOCK=EPILOGUE_COLUMNS,
            **UNFUSED,
        )
    return logits


def large_gemm(linear: Linear, x: Tensor, *, pdl: bool = False) -> Tensor:
    """W x, rounded, for many rows: torch's GEMM if it adds in the same order, else `gemm_large`.

    Returns the sums of slices, float32 [slices, rows or more, N], if too few programs would compute all slices.
    """
    rows, padded_x = x.shape[0], _with_padding(x)
    if not _torch_is_fast(linear, x) or not _torch_agrees(linear, padded_x.shape[0], pdl):
        out = _gemm_large(linear, GemmInput(padded_x), pdl=pdl)[0]
    elif slices_of(linear) == 1:
        out = _torch_gemm(padded_x, linear)
    else:
        return slice_sums(padded_x, linear)
    return out if padded_x.shape[0] == rows else out[:rows]


def _torch_is_fast(linear: Linear, x: Tensor) -> bool:
    """Whether torch's GEMM is faster than ours for these rows, if their bits agree."""
    if x.dtype.itemsize != 2:
        return False
    slices, (n, k) = slices_of(linear), linear.weight.shape
    if slices == 1:
        return True
    tiles = -(-n // LARGE_SLICED.block_n) * -(-padded(x.shape[0]) // LARGE_SLICED.rows)
    return k == slices * slice_length(linear) and tiles < num_sms(x.device)


def _torch_agrees(linear: Linear, rows: int, pdl: bool) -> bool:
    def ours(x: Tensor, linear: Linear) -> Tensor:
        return _gemm_large(linear, GemmInput(x), pdl=pdl)[0]

    def torchs(x: Tensor, linear: Linear) -> Tensor:
        return _torch_gemm(x, linear) if slices_of(linear) == 1 else joined(slice_sums(x, linear), x.dtype)

    return device_check.torch_agrees(linear, rows, slices_of(linear), ours, torchs)


def _torch_gemm(x: Tensor, linear: Linear) -> Tensor:
    assert isinstance(linear.weight, Tensor)
    return F.linear(x, linear.weight)


def slice_sums(x: Tensor, linear: Linear) -> Tensor:
    """W x of each slice, unrounded: float32 [slices, rows, N]."""
    weight, slices, length = linear.weight, slices_of(linear), slice_length(linear)
    assert isinstance(weight, Tensor)
    vectors, matrices = x.view(-1, slices, length), weight.view(-1, slices, length)
    return torch.bmm(vectors.transpose(0, 1), matrices.permute(1, 2, 0), out_dtype=torch.float32)


def joined(sums: Tensor, dtype: torch.dtype) -> Tensor:
    """The rounded output of a GEMM, from the sums of its slices."""
    total = sums[0]
    for each in sums[1:]:
        total = total + each
    return total.to(dtype)


def _with_padding(x: Tensor) -> Tensor:
    """x [T, K] padded to a number of rows that was checked: with the memory after x, or as a copy."""
    rows, size = x.shape
    capacity = padded(rows)
    if capacity == rows and x.is_contiguous() and x.data_ptr() % 16 == 0:
        return x
    if (
        x.stride() == (size, 1)
        and x.storage_offset() == 0
        and x.untyped_storage().nbytes() >= capacity * size * x.itemsize
    ):
        return x.as_strided((capacity, size), (size, 1))
    out = torch.empty(capacity, size, dtype=x.dtype, device=x.device)
    out[:rows] = x
    return out


def _gemm_large(
    linear: Linear,
    vectors: GemmInput,
    eps: float = 0.0,
    bias: Tensor | None = None,
    addend: Tensor | None = None,
    multiplier: float = 1.0,
    norm: Norm | None = None,
    activation: str = "",
    gated: bool = False,
    pdl: bool = False,
) -> tuple[Tensor, GemmInput | None]:
    """As `gemm`, for many rows. By default W x alone."""
    x, squares = vectors
    weight = linear.weight
    assert isinstance(weight, Tensor)
    rows, n = x.shape[0], weight.shape[0] // (2 if gated else 1)
    launch, blocks = _gemm_large_launch(
        rows,
        n,
        weight.shape[1],
        (slices_of(linear), slice_length(linear)),
        (x.dtype, x.device, dtype_of(bias)),
        (addend is not None, multiplier),
        (activation, gated),
        (0 if squares is None else squares.shape[1], eps),
        None if norm is None else norm.offset,
        pdl,
    )
    out = empty_rows(rows, n, x)
    following = None
    if norm is not None:
        next_squares = torch.empty(rows, blocks, dtype=torch.float32, device=x.device)
        following = GemmInput(empty_rows(rows, n, x), next_squares)
    launch(
        x,
        weight,
        weight if bias is None else bias,
        x if addend is None else addend,
        out,
        rows,
        n,
        squares=squares,
        next_weight=None if norm is None else norm.weight,
        next_out=None if following is None else following.x,
        next_squares=None if following is None else following.squares,
    )
    return out, following


@lru_cache(LAUNCHES)
def _gemm_large_launch(
    rows: int,
    n: int,
    k: int,
    slices: tuple[int, int],  # number and length
    kind: tuple[torch.dtype, torch.device, torch.dtype | None],  # the last one: of the bias
    added: tuple[bool, float],  # whether there is a residual, and the multiplier
    activation: tuple[str, bool],
    squares: tuple[int, float],  # number of partial sums, and eps
    offset: float | None,  # of the norm that follows
    pdl: bool,
) -> tuple[Callable[..., Any], int]:
    """A launch, and the number of blocks of columns."""
    dtype, device, bias = kind
    gated = activation[1]
    tile = LARGE_FLOAT32 if dtype.itemsize == 4 else LARGE_SLICED if slices[0] > 1 else LARGE_UNSLICED
    block_b, block_n, columns, stages, warps = tile
    columns, blocks = block_k(columns, slices[1]), -(-n // (block_n // (2 if gated else 1)))
    options: dict[str, Any] = {
        "K": k,
        "SLICES": slices[0],
        "LENGTH": slices[1],
        "BLOCK_B": block_b,
        "BLOCK_N": block_n,
        "BLOCK_K": columns,
        "GROUP_B": 8,
        "EVEN": n % (block_n // (2 if gated else 1)) == 0 and k == slices[0] * slices[1],
        "STAGES": stages_for(stages, columns * (block_b + block_n) * dtype.itemsize, device),
        "BIAS": bias is not None,
        "RESIDUAL": added[0],
        "MULTIPLIER": added[1],
        "GATED": gated,
        "ACTIVATION": activation[0],
        "SQUARES": squares[0],
        "PADDED": next_power(squares[0]) if squares[0] else 0,
        "EPS": squares[1],
        "OFFSET": offset or 0.0,
        "num_warps": warps,
        **launch_options(pdl),
    }
    return partial(gemm_large[(blocks * -(-rows // block_b),)], **options), blocks


def block_k(most: int, length: int) -> int:
    """BLOCK_K, such that a slice has at least two blocks.

    With a single one, Triton would start the sum from the addend: different bits.
    """
    while length % most or most == length:
        most //= 2
    return most


def stages_for(most: int, size: int, device: torch.device) -> int:
    """Pipeline stages: as many blocks of this size as fit into a program's shared memory."""
    return max(1, min(most, (shared_memory(device) - 4096) // size))


@cache
def in_parts(size: int) -> tuple[tuple[int, int], ...]:
    """Cut a vector into up to three parts (start, size) whose sizes are powers of two; the last may be padded."""
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


def compare_instructions(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether GEMMs of 8, 100 and 300 rows agree on this device."""
    like = torch.empty(0, dtype=dtype, device=device)
    for slices in (1, 2):
        x, linear = device_check.sensitive(300, 256, 512, slices, like)
        many = _gemm_large(linear, GemmInput(x))[0]
        hundred = gemm(linear, GemmInput(x[:100].contiguous()), None)[0]
        eight = gemm(linear, GemmInput(x[:8].contiguous()), None)[0]
        if not device_check.same(hundred, many[:100]) or not device_check.same(eight, many[:8]):
            return False
    return True


device_check.compare_instructions = compare_instructions
