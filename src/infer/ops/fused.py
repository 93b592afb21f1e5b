"""A decode step on a GPU through Triton kernels: five launches a block.

    norm, q, k, v | attention | output + residual | norm, gate, up, activation | down + residual

The reference is what the modules themselves compute. Nothing here depends on how long a row is, or on which rows there
are: that lies on the device, so a step can be captured once and replayed (`engine/graph.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from infer import kernels
from infer.kernels import ahead
from infer.kernels.table import FILLED
from infer.ops.gpu_attention import attend_step
from infer.ops.gpu_product import (
    BLOCK_N,
    UNFUSED,
    Normed,
    Residual,
    added_product,
    in_parts,
    next_power,
    normed_product,
    scales_behind,
    slices_of,
)
from infer.ops.linear import Embedding, Linear
from infer.ops.norm import Norm
from infer.ops.parts import BlockParts, EmbeddingParts, HeadParts

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROWS_COMPILED = (1, 8, 16, 32, 64, 128, 256)  # a step of any number of rows has the kernels of one of these


def available(device: torch.device, forwards: Mapping[type[nn.Module], Any]) -> bool:
    """Whether the device has these kernels, no gradient is asked for, and no module's class was patched."""
    return (
        device.type == "cuda"
        and not torch.is_grad_enabled()
        and kernels.gpu(_capability(device))
        and all(kind.forward is forward for kind, forward in forwards.items())
    )


def readable(weight: Tensor) -> bool:
    return weight.is_cuda and weight.dtype in DTYPES


class Plan(NamedTuple):
    """A model as the kernels take it."""

    blocks: Sequence[BlockParts]
    head: HeadParts
    frequencies: Tensor  # [kinds, D], of RoPE
    kinds: Sequence[int | None]  # of each block, if it rotates
    pdl: bool  # whether a kernel may start while the one before it ends
    constants: Any  # all that kernels are told but for weights: what is captured holds as long as these are the same

    def takes(self, x: Tensor) -> bool:
        weight = self.head.norm.weight
        return x.dtype is weight.dtype and x.is_contiguous() and x.shape[1] == weight.shape[0]


def plan(blocks: Sequence[BlockParts], head: HeadParts, ropes: Sequence[Tensor | None]) -> Plan | None:
    """None where the kernels do not know the like. ropes: the frequencies [D] of each block, if it rotates."""
    parts = [*head, *(part for block in blocks for part in block if isinstance(part, Linear | Norm))]
    device, dtype = head.norm.weight.device, head.norm.weight.dtype
    if any(part.weight.dtype is not dtype for part in parts) or not _norms_agree(blocks, head):
        return None
    values = [None if rope is None else tuple(rope.tolist()) for rope in ropes]
    different = list(dict.fromkeys(value for value in values if value is not None))
    frequencies = torch.tensor(different or [()], dtype=torch.float32).to(device)
    kinds = [None if value is None else different.index(value) for value in values]
    constants = [*map(_constants, blocks), _kind(head.norm), *values]
    return Plan(blocks, head, frequencies, kinds, has_pdl(device), constants)


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def has_pdl(device: torch.device) -> bool:
    """Whether a kernel may start while the one before it ends."""
    return device.type == "cuda" and _capability(device) >= (9, 0)


def _norms_agree(blocks: Sequence[BlockParts], head: HeadParts) -> bool:
    """Whether norms that one kernel computes differ in nothing but their weights, and heads are normed as it knows."""
    nexts = [*(block.before_attention for block in blocks[1:]), head.norm]
    pairs = [(block.after_attention, block.before_mlp) for block in blocks]
    pairs += [(block.after_mlp, norm) for block, norm in zip(blocks, nexts, strict=True)]
    for block in blocks:
        if (block.after_attention is None) != (block.after_mlp is None) or (block.q_norm is None) != (
            block.k_norm is None
        ):
            return False
        if block.q_norm is not None and block.k_norm is not None:
            pairs.append((block.q_norm, block.k_norm))
            if any(norm.centred or norm.bias is not None for norm in (block.q_norm, block.k_norm)):
                return False
    return all(
        after is None or (after.bias is None and not after.centred and _kind(after) == _kind(norm))
        for after, norm in pairs
    )


def _constants(block: BlockParts) -> list[Any]:
    return [
        _kind(part) if isinstance(part, Norm) else slices_of(part) if isinstance(part, Linear) else part
        for part in block
    ]


def _kind(norm: Norm) -> tuple[float, float, bool]:
    return norm.eps, norm.offset, norm.centred


def step(plan: Plan, x: Tensor, tables: np.ndarray[Any, Any]) -> Tensor:
    """Logits [B, V] of the next token of each row, x [B, C], whose keys and values go where `tables` says."""
    positions = torch.from_numpy(tables[0, :, FILLED].astype(np.int32)).to(x.device)
    with on(x.device):
        turned = [turns(each, positions) for each in plan.frequencies if each.numel()]
    fed = Fed(x, positions, turned)
    return launch(plan, fed, torch.from_numpy(tables).to(x.device), counters(plan, x.shape[0]))


def counters(plan: Plan, rows: int) -> Tensor:
    """For programs that share work to count who is done: all zero before a launch and after."""
    linears = [plan.head.linear, *(linear for block in plan.blocks for linear in block.linears)]
    blocks = max(-(-linear.weight.shape[0] // BLOCK_N) for linear in linears)
    count = max(rows * plan.blocks[0].kv_heads, blocks)
    return torch.zeros(count, dtype=torch.int32, device=plan.head.norm.weight.device)


class Fed(NamedTuple):
    """What a step is fed."""

    x: Tensor  # [B, C]: the vectors of its tokens; of any where a row has none
    positions: Tensor  # int32 [B]; -1 where there is none
    turned: Sequence[Tensor] | Tensor  # of each kind of RoPE [B, 2, D], from `turns`
    normed: Normed | None = None  # for the first norm


def can_look_up(embedding: EmbeddingParts, dtype: torch.dtype) -> bool:
    """Whether `begin` finds there what the modules would."""
    modules = [module for module in (embedding.tokens, embedding.positions) if module is not None]
    return all(type(module).forward is Embedding.forward for module in modules) and all(
        type(weight) is nn.Parameter and weight.dtype is dtype and weight.is_contiguous() and readable(weight)
        for weight in (module.weight for module in modules)
    )


def begin(
    plan: Plan, embedding: EmbeddingParts, tokens: Tensor, positions: Tensor, moves: Tensor, steps: Tensor
) -> Fed:
    """Tokens int64 [B] and their positions int32 [B], below 0 where a row has none.

    Positions then go on by moves, and steps, int32, by one.
    """
    vectors, learned = embedding.tokens.weight, embedding.positions
    assert isinstance(vectors, Tensor)
    rows, (kinds, head_dim), size = tokens.shape[0], plan.frequencies.shape, vectors.shape[1]
    norm = plan.blocks[0].before_attention
    x = torch.empty(rows, size, dtype=vectors.dtype, device=tokens.device)
    normed = None
    if scales_behind(norm, x.dtype):
        normed = Normed(torch.empty_like(x), torch.empty(rows, 1, dtype=torch.float32, device=tokens.device))
    turned = torch.empty(kinds, rows, 2, head_dim, dtype=torch.float32, device=tokens.device)
    fed = Fed(x, torch.empty_like(positions), turned, normed)
    with on(tokens.device):
        kernels.gpu_modules().attention.begin[(rows,)](
            tokens,
            positions,
            moves,
            steps,
            vectors,
            None if learned is None else learned.weight,
            plan.frequencies,
            fed.positions,
            x,
            turned,
            None if normed is None else norm.weight,
            None if normed is None else normed.x,
            None if normed is None else normed.squares,
            FACTOR=embedding.factor,
            C=size,
            PARTS=in_parts(size),
            KINDS=kinds if head_dim else 0,
            D=head_dim,
            BLOCK_D=next_power(head_dim),
            OFFSET=norm.offset,
            **UNFUSED,
        )
    return fed


def launch(plan: Plan, fed: Fed, tables: Tensor, finished: Tensor) -> Tensor:
    """The same with everything on the device: tables int64 [layers, B, COLUMNS]. finished: from `counters`."""
    with on(fed.x.device):
        residual = Residual(fed.x, normed=fed.normed)
        norms = [*(block.before_attention for block in plan.blocks[1:]), plan.head.norm]
        for block, norm, kind, table in zip(plan.blocks, norms, plan.kinds, tables, strict=True):
            qkv, residual = normed_product(block.qkv, residual, block.before_attention, finished, pdl=plan.pdl)
            turned = None if kind is None else fed.turned[kind]
            attended = attend_step(block, qkv, table, fed.positions, finished, turned, pdl=plan.pdl)
            residual = added_product(
                block.o, attended, residual, block.after_attention, block.before_mlp, finished, pdl=plan.pdl
            )
            inner, residual = normed_product(
                block.up,
                residual,
                block.before_mlp,
                finished,
                activation=block.activation,
                gated=block.gated,
                pdl=plan.pdl,
            )
            residual = added_product(block.down, inner, residual, block.after_mlp, norm, finished, pdl=plan.pdl)
        return normed_product(plan.head.linear, residual, plan.head.norm, finished, pdl=plan.pdl)[0]


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Within, Triton launches on this device."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


def can_compile_ahead() -> bool:
    return ahead.possible()


def compile_ahead(device: torch.device, walk: Callable[[], None]) -> list[str]:
    """The kernels that `walk` would launch on this device, and none is launched: see kernels/ahead.py."""
    with on(device):
        return ahead.compile_all(walk, partial(on, device))


def turns(frequencies: Tensor, positions: Tensor) -> Tensor:
    """Cosines and signed sines [B, 2, D] of RoPE at these positions [B], of frequencies [D]."""
    batch, head_dim = positions.shape[0], frequencies.shape[0]
    out = torch.empty(batch, 2, head_dim, dtype=torch.float32, device=positions.device)
    kernels.gpu_modules().attention.turns[(batch,)](
        positions, frequencies, out, D=head_dim, BLOCK_D=next_power(head_dim), **UNFUSED
    )
    return out
