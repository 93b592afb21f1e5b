"""Products on a GPU, and what stands between them: norms in front, the residual behind.

The kernels are in `row_kernels.py` and `product_kernels.py`. Which one runs depends on the number of rows, and
what comes out does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from infer.backend.gpu import device_check
from infer.backend.gpu.launcher import Launch
from infer.backend.gpu.product_kernels import eight_rows, few_rows, many_rows
from infer.backend.gpu.row_kernels import finish_rows, norm_rows
from infer.backend.gpu.tuned import (
    ALONE,
    APART,
    BLOCK_N,
    FETCHED,
    FEW,
    FINISHED,
    LAUNCHES,
    LONG,
    MANY_FLOAT32,
    MANY_SLICED,
    MANY_WHOLE,
    MOST_FEW,
    MOST_SLICES,
    PADDED_TO,
    SLICED_BELOW,
)
from infer.nn.linear import Linear
from infer.nn.norm import Norm

# Contracted multiplications and additions would round otherwise, wherever the compiler sees fit. (Matrix products
# of float32 are made of fused ones all the same.)
UNFUSED = {"enable_fp_fusion": False}


def slices_of(linear: Linear) -> int:
    """Into how many slices the columns of a matrix are cut: a property of the matrix, never of a pass.

    A matrix instruction waits for the one before that adds to the same sum, 23 ns on an H200: 3 us for 2,048 columns.
    Where a matrix has few rows, reading it would take less than that. `Linear.slices` overrules the shape.
    """
    if linear.slices is None:
        return _slices(linear.whole_rows or linear.weight.shape[0], linear.weight.shape[1])
    if linear.slices not in (1, 2, 4, MOST_SLICES):
        raise ValueError(f"a matrix is cut into 1, 2, 4 or {MOST_SLICES} slices, not {linear.slices!r}")
    return linear.slices


@cache
def _slices(n: int, k: int) -> int:
    wanted = 1 if n >= SLICED_BELOW else next_power(-(-2 * SLICED_BELOW // n))
    if k > LONG and n < 2 * SLICED_BELOW:
        wanted *= 2
    wanted = min(wanted, MOST_SLICES)
    while k % (64 * wanted):
        wanted //= 2
        if wanted <= 1:
            return 1
    return wanted


def length_of(linear: Linear) -> int:
    """Columns of a slice."""
    slices = slices_of(linear)
    return -(-linear.weight.shape[1] // (32 * slices)) * 32


class Normed(NamedTuple):
    """Vectors [B, K] that a product takes; with squares, by their norm's weight alone: the product is scaled then."""

    x: Tensor
    squares: Tensor | None = None  # float32 [B, parts]: partial sums of squares, for the scale


class Residual(NamedTuple):
    """The residual of a step, [B, C]. With `after`, less what is yet to be normed and added."""

    x: Tensor
    added: Tensor | None = None
    after: Norm | None = None
    normed: Normed | None = None  # for the norm that follows


def scales_behind(norm: Norm, dtype: torch.dtype) -> bool:
    """Whether a norm's scale comes after the product. Not in float16, which holds no large residual by its weight."""
    return not norm.centred and norm.bias is None and dtype is not torch.float16


def normed_product(
    linear: Linear,
    residual: Residual,
    norm: Norm,
    split_counters: Tensor,
    *,
    activation: str = "",
    gated: bool = False,
    pdl: bool = False,
) -> tuple[Tensor, Residual]:
    """activation(W norm(residual) + b), where gated times the second half of W's rows; and the residual, complete."""
    x, added, after, normed = residual
    if normed is None:
        normed, x = normed_rows(x, norm, added, after, pdl=pdl)
    out, _ = product(linear, normed, split_counters, eps=norm.eps, activation=activation, gated=gated, pdl=pdl)
    return out, Residual(x)


def added_product(
    linear: Linear,
    x: Tensor,
    residual: Residual,
    after: Norm | None,
    norm: Norm,
    split_counters: Tensor,
    *,
    pdl: bool = False,
) -> Residual:
    """W x + b, added to the residual; or yet to be normed by `after`, and added then. norm: what follows."""
    if after is not None:
        return Residual(residual.x, product(linear, Normed(x), split_counters, joined=False, pdl=pdl)[0], after)
    following = norm if scales_behind(norm, x.dtype) else None
    out, normed = product(linear, Normed(x), split_counters, addend=residual.x, norm=following, pdl=pdl)
    return Residual(out, normed=normed)


def normed_rows(
    x: Tensor, norm: Norm | None, added: Tensor | None = None, after: Norm | None = None, *, pdl: bool = False
) -> tuple[Normed, Tensor]:
    """norm(x), and x; where something is added, after a norm of its own, of the sum. norm: None for the sum alone.

    added: a product, as `product` gives it.
    """
    x = aligned(x)
    rows, size = x.shape
    behind = norm is not None and scales_behind(norm, x.dtype)
    complete = x if added is None else torch.empty_like(x)
    out = x if norm is None else empty_rows(rows, size, x)
    squares = torch.empty(rows, 1, dtype=torch.float32, device=x.device) if behind else None
    kind = norm or after
    slices = 1 if added is None or added.dim() == 2 else added.shape[0]
    if rows:
        _norm_rows(
            rows,
            size,
            slices,
            x.dtype,
            x.device,
            (0.0, 0.0) if kind is None else (kind.eps, kind.offset),
            norm is not None and norm.centred,
            behind,
            (added is None, after is None, norm is None, None if norm is None else kind_of(norm.bias)),
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
    return Normed(out, squares), complete


@lru_cache(LAUNCHES)
def _norm_rows(
    rows: int,
    size: int,
    slices: int,
    dtype: torch.dtype,
    device: torch.device,
    constants: tuple[float, float],  # eps and offset
    centred: bool,
    behind: bool,
    given: tuple[bool, bool, bool, torch.dtype | None],  # of what may be left out: whether it is, and a bias' dtype
    pdl: bool,
) -> Launch:
    return Launch(
        norm_rows,
        (rows,),
        K=size,
        PARTS=in_parts(size),
        EPS=constants[0],
        OFFSET=constants[1],
        CENTRED=centred,
        PREPARED=behind,
        NORM=not given[2],
        SLICES=slices,
        **UNFUSED,
        **pdl_options(pdl),
    )


def kind_of(bias: Tensor | None) -> torch.dtype | None:
    return None if bias is None else bias.dtype


def aligned(x: Tensor) -> Tensor:
    """Contiguous, and where Triton may load several numbers at once."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x


def padded(rows: int) -> int:
    """As many rows as torch's product takes: what the last ones hold does not matter."""
    return rows if rows <= FEW else PADDED_TO // 2 if rows <= PADDED_TO // 2 else -(-rows // PADDED_TO) * PADDED_TO


def empty_rows(rows: int, size: int, like: Tensor) -> Tensor:
    """[rows, size], with room for those behind them."""
    room = padded(rows)
    out = torch.empty(room, size, dtype=like.dtype, device=like.device)
    return out if room == rows else out[:rows]


def product(
    linear: Linear,
    vectors: Normed,
    split_counters: Tensor | None,
    *,
    eps: float = 0.0,
    addend: Tensor | None = None,
    norm: Norm | None = None,
    activation: str = "",
    gated: bool = False,
    joined: bool = True,
    pdl: bool = False,
) -> tuple[Tensor, Normed | None]:
    """activation(scale W x + b) [times the other half of W's rows] [+ addend]; and that for the norm that follows.

    split_counters: counters, all zero; made here where there are none. joined: else a bare product may come as the sums
    of its slices, float32 [slices, rows or more, N], which `normed_rows` joins.
    """
    x = vectors.x
    rows = x.shape[0]
    if rows > MOST_FEW or (rows > FEW and _torch_is_fast(linear, x)):
        return _of_many(linear, vectors, eps, addend, norm, activation, gated, joined, pdl)
    weight, bias = linear.weight, linear.bias
    assert isinstance(weight, Tensor)
    n, k = weight.shape[0] // (2 if gated else 1), weight.shape[1]
    out = torch.empty(rows, n, dtype=x.dtype, device=x.device)
    if not rows:
        return out, None
    held = _held(linear, x)
    options: dict[str, Any] = {
        "K": k,
        "SLICES": slices_of(linear),
        "LENGTH": length_of(linear),
        "BIAS": bias is not None,
        "RESIDUAL": addend is not None,
        "GATED": gated,
        "ACTIVATION": activation,
        "EPS": eps,
        **UNFUSED,
        **pdl_options(pdl),
    }
    if vectors.squares is not None:
        parts = vectors.squares.shape[1]
        options |= {"squares": vectors.squares, "SQUARES": parts, "PADDED": next_power(parts)}
    if held is not None:
        blocks = -(-n // held.high)
    else:
        few = _few(linear, x)
        blocks = -(-weight.shape[0] // few.block_n)
    following = None
    if norm is not None:
        squares = torch.empty(rows, blocks, dtype=torch.float32, device=x.device)
        following = Normed(torch.empty_like(out), squares)
        options |= {"next_weight": norm.weight, "next_out": following.x, "next_squares": squares}
        options["OFFSET"] = norm.offset
    tensors = x, weight, weight if bias is None else bias, x if addend is None else addend, out
    if held is not None:
        _eight_rows(tensors, n, blocks, held, options)
    else:
        _few_rows(tensors, split_counters, n, blocks, few, options)
    return out, following


class Held(NamedTuple):
    """Sizes of `eight_rows`."""

    high: int
    steps: int
    chunks: int  # that a warp holds


def _held(linear: Linear, x: Tensor) -> Held | None:
    """None where `few_rows` is faster, through shared memory: where a slice is long."""
    slices, length = slices_of(linear), length_of(linear)
    if x.shape[0] > 8 or x.element_size() != 2 or slices == 1 or (length > 1024 and linear.weight.shape[1] > LONG):
        return None
    if not device_check.instructions_agree(x.device, x.dtype):
        return None
    high, columns = (8, 1024) if slices == 2 else (16, 512)
    steps = 4
    while length % (32 * steps):
        steps //= 2
    return Held(high, steps, columns // (32 * steps))


def _eight_rows(tensors: Sequence[Tensor], n: int, blocks: int, held: Held, options: dict[str, Any]) -> None:
    chunks = options["LENGTH"] // (32 * held.steps)
    eight_rows[(blocks,)](
        *tensors,
        tensors[0].shape[0],
        n,
        HIGH=held.high,
        STEPS=held.steps,
        HELD=min(held.chunks, chunks),
        VECTORS_AHEAD=min(512 // (32 * held.steps), chunks),
        EVEN=n % held.high == 0 and options["K"] == options["LENGTH"] * options["SLICES"],
        num_warps=(2 if options["GATED"] else 1) * options["SLICES"],
        **options,
    )


class Few(NamedTuple):
    """Sizes of `few_rows`."""

    rows: int
    block_n: int
    block_k: int
    stages: int
    warps: int
    apart: bool  # whether each slice has programs of its own


def _few(linear: Linear, x: Tensor) -> Few:
    batch, size = x.shape[0], x.element_size()
    slices, length = slices_of(linear), length_of(linear)
    apart = slices > 1 and batch <= APART
    rows, block_n, columns, ahead, warps = max(16, next_power(batch)), BLOCK_N, 128, 512, 4
    if batch > 64 and slices == 1:
        block_n, columns, ahead, warps = 2 * BLOCK_N, 64, 384, 8
    elif batch <= 16 and -(-linear.weight.shape[0] // block_n) * (slices if apart else 1) <= processors(x.device):
        ahead = ALONE
    else:
        rows = min(64, rows)
    if size == 4:
        columns, ahead = 32, 64
    columns = _block(columns, length)
    stages = _stages(ahead // columns, columns * (block_n + rows) * size, x.device)
    return Few(rows, block_n, columns, stages, warps, apart)


def _few_rows(
    tensors: Sequence[Tensor], split_counters: Tensor | None, n: int, blocks: int, few: Few, options: dict[str, Any]
) -> None:
    x, gated, slices, length = tensors[0], options["GATED"], options["SLICES"], options["LENGTH"]
    batch, pieces = x.shape[0], slices if few.apart else 1
    even = n % (few.block_n // (2 if gated else 1)) == 0 and options["K"] == length * slices
    kept = (2 if gated else 1) * slices if few.apart else 0
    sums = torch.empty(kept, batch, n, dtype=torch.float32, device=x.device)
    if split_counters is None:
        split_counters = torch.zeros(blocks, dtype=torch.int32, device=x.device)
    few_rows[(blocks, -(-batch // few.rows), pieces)](
        *tensors,
        sums if few.apart else x,
        split_counters,
        batch,
        n,
        APART=few.apart,
        BLOCK_B=few.rows,
        BLOCK_N=few.block_n,
        BLOCK_K=few.block_k,
        EVEN=even,
        STAGES=few.stages,
        FETCHED=min(FETCHED, next_power(length + 1) // 2) if even and length * x.element_size() >= 128 else 0,
        num_warps=few.warps,
        **options,
    )


def _of_many(
    linear: Linear,
    vectors: Normed,
    eps: float,
    addend: Tensor | None,
    norm: Norm | None,
    activation: str,
    gated: bool,
    joined: bool,
    pdl: bool,
) -> tuple[Tensor, Normed | None]:
    """The same for the many rows of a prompt, or of a large batch: a product alone, and what becomes of it."""
    x, squares = vectors
    out = bare_product(linear, x, pdl=pdl)
    unjoined = out.dim() == 3 and addend is None and joined
    if squares is not None or linear.bias is not None or activation or unjoined:
        rows, (n, k) = x.shape[0], linear.weight.shape
        n, last = n // (2 if gated else 1), out
        out = empty_rows(rows, n, x)
        slices, parts = (last.shape[0] if last.dim() == 3 else 1), (0 if squares is None else squares.shape[1])
        kind = x.dtype, x.device, slices, parts, kind_of(linear.bias)
        _finish_rows(rows, n, k, eps, gated, activation, kind, pdl)(last, squares, linear.bias, out, n, last.shape[-2])
    if addend is None:
        return out, None
    normed, complete = normed_rows(addend, norm, out, pdl=pdl)
    return complete, None if norm is None else normed


@lru_cache(LAUNCHES)
def _finish_rows(
    rows: int, n: int, k: int, eps: float, gated: bool, activation: str, kind: tuple[Any, ...], pdl: bool
) -> Launch:
    _, _, slices, squares, _ = kind
    return Launch(
        finish_rows,
        (rows, -(-n // FINISHED)),
        K=k,
        SLICES=slices,
        SQUARES=squares,
        PADDED=next_power(squares),
        EPS=eps,
        GATED=gated,
        ACTIVATION=activation,
        BLOCK=FINISHED,
        **UNFUSED,
        **pdl_options(pdl),
    )


def bare_product(linear: Linear, x: Tensor, *, pdl: bool = False) -> Tensor:
    """W x, rounded, of many rows: torch's own product where it adds up in our order, else `many_rows`.

    Where few programs would have to walk through all slices, the sums of each: float32 [slices, rows or more, N].
    """
    rows, whole = x.shape[0], _with_padding(x)
    if not _torch_is_fast(linear, x) or not _torch_agrees(linear, whole.shape[0], pdl):
        out = _many_rows(whole, linear, pdl)
    elif slices_of(linear) == 1:
        out = _whole_product(whole, linear)
    else:
        return sums_of_slices(whole, linear)
    return out if whole.shape[0] == rows else out[:rows]


def _torch_is_fast(linear: Linear, x: Tensor) -> bool:
    """Whether torch's product of these rows is faster than ours, where it agrees."""
    if x.dtype.itemsize != 2:
        return False
    slices, (n, k) = slices_of(linear), linear.weight.shape
    if slices == 1:
        return True
    tiles = -(-n // MANY_SLICED.block_n) * -(-padded(x.shape[0]) // MANY_SLICED.rows)
    return k == slices * length_of(linear) and tiles < processors(x.device)


def _torch_agrees(linear: Linear, rows: int, pdl: bool) -> bool:
    def ours(x: Tensor, linear: Linear) -> Tensor:
        return _many_rows(x, linear, pdl)

    def torchs(x: Tensor, linear: Linear) -> Tensor:
        return _whole_product(x, linear) if slices_of(linear) == 1 else joined(sums_of_slices(x, linear), x.dtype)

    return device_check.torch_agrees(linear, rows, slices_of(linear), ours, torchs)


def _whole_product(x: Tensor, linear: Linear) -> Tensor:
    assert isinstance(linear.weight, Tensor)
    return F.linear(x, linear.weight)


def sums_of_slices(x: Tensor, linear: Linear) -> Tensor:
    """W x of each slice, not rounded: float32 [slices, rows, N]."""
    weight, slices, length = linear.weight, slices_of(linear), length_of(linear)
    assert isinstance(weight, Tensor)
    vectors, matrices = x.view(-1, slices, length), weight.view(-1, slices, length)
    return torch.bmm(vectors.transpose(0, 1), matrices.permute(1, 2, 0), out_dtype=torch.float32)


def joined(sums: Tensor, dtype: torch.dtype) -> Tensor:
    """The product, rounded, from the sums of its slices."""
    total = sums[0]
    for each in sums[1:]:
        total = total + each
    return total.to(dtype)


def _with_padding(x: Tensor) -> Tensor:
    """x [T, K] with as many rows as torch's products were checked for: those behind it in memory, or a copy."""
    rows, size = x.shape
    wanted = padded(rows)
    if wanted == rows and x.is_contiguous() and x.data_ptr() % 16 == 0:
        return x
    if (
        x.stride() == (size, 1)
        and x.storage_offset() == 0
        and x.untyped_storage().nbytes() >= wanted * size * x.itemsize
    ):
        return x.as_strided((wanted, size), (size, 1))
    out = torch.empty(wanted, size, dtype=x.dtype, device=x.device)
    out[:rows] = x
    return out


def _many_rows(x: Tensor, linear: Linear, pdl: bool) -> Tensor:
    weight = linear.weight
    assert isinstance(weight, Tensor)
    rows, (n, k) = x.shape[0], weight.shape
    out = torch.empty(rows, n, dtype=x.dtype, device=x.device)
    _many_rows_of(rows, n, k, slices_of(linear), length_of(linear), x.dtype, x.device, pdl)(x, weight, out, rows, n)
    return out


@lru_cache(LAUNCHES)
def _many_rows_of(
    rows: int, n: int, k: int, slices: int, length: int, dtype: torch.dtype, device: torch.device, pdl: bool
) -> Launch:
    tile = MANY_FLOAT32 if dtype.itemsize == 4 else MANY_SLICED if slices > 1 else MANY_WHOLE
    block_b, block_n, block_k, stages, warps = tile
    block_k = _block(block_k, length)
    return Launch(
        many_rows,
        (-(-n // block_n) * -(-rows // block_b),),
        K=k,
        SLICES=slices,
        LENGTH=length,
        BLOCK_B=block_b,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        BESIDE=8,
        EVEN=n % block_n == 0 and k == length * slices,
        STAGES=_stages(stages, block_k * (block_b + block_n) * dtype.itemsize, device),
        num_warps=warps,
        **UNFUSED,
        **pdl_options(pdl),
    )


def _block(most: int, length: int) -> int:
    """Columns that are multiplied at a time: at least two blocks are a slice.

    Of a single one, Triton would make what the product is added to the first term of its sum: other bits.
    """
    while length % most or most == length:
        most //= 2
    return most


def _stages(most: int, size: int, device: torch.device) -> int:
    """Blocks that are on their way at once: as many of this size as a program's memory holds."""
    return max(1, min(most, (shared_memory(device) - 4096) // size))


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Within, Triton launches on this device."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes that a program can have."""
    if device.type != "cuda":
        return 2**31
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)  # type: ignore[attr-defined]


@cache
def processors(device: torch.device) -> int:
    """That programs run on."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def pdl_options(pdl: bool) -> dict[str, bool]:
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
