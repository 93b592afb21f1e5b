"""A decode step on a GPU through Triton kernels: five launches a block.

    norm, q, k, v | attention | output + residual | norm, gate, up, activation | down + residual

Nothing here depends on how long a row is, or on which rows there are: that lies on the device, so a step can be
captured once and replayed (`captured.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from infer.backend.gpu import precompile
from infer.backend.gpu.attention import attend_step
from infer.backend.gpu.attention_kernels import begin as begin_kernel
from infer.backend.gpu.attention_kernels import fill_rope
from infer.backend.gpu.products import (
    UNFUSED,
    Normed,
    Residual,
    added_product,
    in_parts,
    next_power,
    normed_product,
    on,
    scales_behind,
)
from infer.backend.gpu.tuned import BLOCK_N
from infer.backend.parts import BlockParts, EmbeddingParts, HeadParts, ModelParts, NotPlain
from infer.nn.linear import Linear
from infer.nn.norm import Norm

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Plan(NamedTuple):
    """A model as the kernels take it."""

    embedding: EmbeddingParts
    blocks: Sequence[BlockParts]
    head: HeadParts
    frequencies: Tensor  # [kinds, D], of RoPE
    kinds: Sequence[int | None]  # of each block, if it rotates
    pdl: bool  # whether a kernel may start while the one before it ends


def plan_of(parts: ModelParts) -> Plan:
    """Raises NotPlain where the kernels do not know the like."""
    blocks, head = parts.blocks, parts.head
    device, dtype = head.norm.weight.device, head.norm.weight.dtype
    embedded = [part for part in parts.embedding[:2] if part is not None]
    modules = [*embedded, *head, *(part for block in blocks for part in block if isinstance(part, Linear | Norm))]
    if dtype not in DTYPES or any(part.weight.dtype is not dtype for part in modules):
        raise NotPlain("its weights are of several dtypes, or of one that no kernel computes in")
    if not _norms_agree(blocks, head):
        raise NotPlain("kernels have no such norms")
    frequencies = {kind: rope.inv_freq for kind, rope in parts.ropes.items()}
    found = [frequencies.get(block.layer_type) for block in blocks]
    values = [None if each is None else tuple(each.tolist()) for each in found]
    different = list(dict.fromkeys(value for value in values if value is not None))
    on_device = torch.tensor(different or [()], dtype=torch.float32).to(device)
    kinds = [None if value is None else different.index(value) for value in values]
    return Plan(parts.embedding, blocks, head, on_device, kinds, has_pdl(device))


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


def _kind(norm: Norm) -> tuple[float, float, bool]:
    return norm.eps, norm.offset, norm.centred


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
    rope_cos_sin: Sequence[Tensor] | Tensor  # of each kind of RoPE [B, 2, D], from `rope_tables`
    normed: Normed | None = None  # for the first norm


def begin(plan: Plan, tokens: Tensor, positions: Tensor, moves: Tensor, steps: Tensor) -> Fed:
    """Tokens int64 [B] and their positions int32 [B], below 0 where a row has none.

    Positions then go on by moves, and steps, int32, by one.
    """
    vectors, learned, factor = plan.embedding.tokens.weight, plan.embedding.positions, plan.embedding.factor
    assert isinstance(vectors, Tensor)
    rows, (kinds, head_dim), size = tokens.shape[0], plan.frequencies.shape, vectors.shape[1]
    norm = plan.blocks[0].before_attention
    x = torch.empty(rows, size, dtype=vectors.dtype, device=tokens.device)
    normed = None
    if scales_behind(norm, x.dtype):
        normed = Normed(torch.empty_like(x), torch.empty(rows, 1, dtype=torch.float32, device=tokens.device))
    rope_cos_sin = torch.empty(kinds, rows, 2, head_dim, dtype=torch.float32, device=tokens.device)
    fed = Fed(x, torch.empty_like(positions), rope_cos_sin, normed)
    with on(tokens.device):
        begin_kernel[(rows,)](
            tokens,
            positions,
            moves,
            steps,
            vectors,
            None if learned is None else learned.weight,
            plan.frequencies,
            fed.positions,
            x,
            rope_cos_sin,
            None if normed is None else norm.weight,
            None if normed is None else normed.x,
            None if normed is None else normed.squares,
            FACTOR=factor,
            C=size,
            PARTS=in_parts(size),
            KINDS=kinds if head_dim else 0,
            D=head_dim,
            BLOCK_D=next_power(head_dim),
            OFFSET=norm.offset,
            **UNFUSED,
        )
    return fed


def launch(plan: Plan, fed: Fed, tables: Tensor, split_counters: Tensor) -> Tensor:
    """One step, from what `begin` gives to the logits [B, V]. tables: int64 [layers, B, COLUMNS], on the device."""
    with on(fed.x.device):
        residual = Residual(fed.x, normed=fed.normed)
        norms = [*(block.before_attention for block in plan.blocks[1:]), plan.head.norm]
        for block, norm, kind, table in zip(plan.blocks, norms, plan.kinds, tables, strict=True):
            qkv, residual = normed_product(block.qkv, residual, block.before_attention, split_counters, pdl=plan.pdl)
            rope_cos_sin = None if kind is None else fed.rope_cos_sin[kind]
            attended = attend_step(block, qkv, table, fed.positions, split_counters, rope_cos_sin, pdl=plan.pdl)
            residual = added_product(
                block.o, attended, residual, block.after_attention, block.before_mlp, split_counters, pdl=plan.pdl
            )
            inner, residual = normed_product(
                block.up,
                residual,
                block.before_mlp,
                split_counters,
                activation=block.activation,
                gated=block.gated,
                pdl=plan.pdl,
            )
            residual = added_product(block.down, inner, residual, block.after_mlp, norm, split_counters, pdl=plan.pdl)
        return normed_product(plan.head.linear, residual, plan.head.norm, split_counters, pdl=plan.pdl)[0]


def compile_ahead(device: torch.device, walk: Callable[[], None]) -> list[str]:
    """The kernels that `walk` would launch on this device, and none is launched: see precompile.py."""
    with on(device):
        return precompile.compile_all(walk, partial(on, device))


def rope_tables(frequencies: Tensor, positions: Tensor) -> Tensor:
    """Cosines and signed sines [B, 2, D] of RoPE at these positions [B], of frequencies [D]."""
    batch, head_dim = positions.shape[0], frequencies.shape[0]
    out = torch.empty(batch, 2, head_dim, dtype=torch.float32, device=positions.device)
    fill_rope[(batch,)](positions, frequencies, out, D=head_dim, BLOCK_D=next_power(head_dim), **UNFUSED)
    return out
