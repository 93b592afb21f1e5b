"""A decode step on a GPU: five Triton kernels per block.

    norm, q, k, v | attention | output + residual | norm, gate, up, activation | down + residual

Lengths and rows are data on the device, so a step is captured once and replayed (`captured.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from infer.backend.gpu.attention import attend_step, prepare_projections_of
from infer.backend.gpu.attention_kernels import begin as begin_step_kernel
from infer.backend.gpu.attention_kernels import fill_rope
from infer.backend.gpu.gemm import (
    GemmInput,
    Residual,
    add_norm,
    gemm_add,
    in_parts,
    norm_gemm,
    scale_after_gemm,
    scale_logits,
)
from infer.backend.gpu.launcher import UNFUSED, has_pdl, next_power, on
from infer.backend.gpu.moe import mixture
from infer.backend.gpu.tuned import BLOCK_N
from infer.backend.parts import BlockParts, EmbeddingParts, HeadParts, ModelParts, UnsupportedByKernels
from infer.config import ModelConfig
from infer.nn.activation import CLAMPED_SWIGLU
from infer.nn.linear import Linear
from infer.nn.norm import Norm

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Plan(NamedTuple):
    """A model as the kernels need it."""

    config: ModelConfig
    embedding: EmbeddingParts
    blocks: Sequence[BlockParts]
    head: HeadParts
    frequencies: Tensor  # [kinds, D], of RoPE
    rope_factors: tuple[float, ...]  # by kind: of cos and sin
    kinds: Sequence[int | None]  # of RoPE, by block; None: no RoPE
    pdl: bool  # programmatic dependent launch: a kernel may start while the previous one ends


def plan_of(parts: ModelParts) -> Plan:
    """Raises UnsupportedByKernels if there are no kernels for this model."""
    blocks, head = parts.blocks, parts.head
    device, dtype = head.norm.weight.device, head.norm.weight.dtype
    embedded = [part for part in parts.embedding[:2] if part is not None]
    modules = [*embedded, *head[:2], *(part for block in blocks for part in block if isinstance(part, Linear | Norm))]
    if dtype not in DTYPES or any(part.weight.dtype is not dtype for part in modules):
        raise UnsupportedByKernels("its weights have several dtypes, or one without kernels")
    if any(block.activation == CLAMPED_SWIGLU and block.routing is None for block in blocks):
        raise UnsupportedByKernels("the clamped SwiGLU is there for experts only")
    if not _norms_agree(blocks, head):
        raise UnsupportedByKernels("no kernel computes its norms")
    ropes = {kind: (tuple(rope.inv_freq.tolist()), rope.attention_factor) for kind, rope in parts.ropes.items()}
    found = [None if block.rope_type is None else ropes[block.rope_type] for block in blocks]
    different = list(dict.fromkeys(rope for rope in found if rope is not None))
    frequencies = torch.tensor([rope[0] for rope in different] or [()], dtype=torch.float32).to(device)
    kinds = [None if rope is None else different.index(rope) for rope in found]
    factors = tuple(rope[1] for rope in different)
    return Plan(parts.config, parts.embedding, blocks, head, frequencies, factors, kinds, has_pdl(device))


def _norms_agree(blocks: Sequence[BlockParts], head: HeadParts) -> bool:
    """Whether norms that one kernel computes differ in their weights only, and the norms of heads are supported."""
    nexts = [*(block.before_attention for block in blocks[1:]), head.norm]
    pairs = [(block.after_attention, block.before_mlp) for block in blocks]
    pairs += [(block.after_mlp, norm) for block, norm in zip(blocks, nexts, strict=True)]
    for block in blocks:
        if (block.after_attention is None) != (block.after_mlp is None):
            return False
        if block.q_norm is not None and block.k_norm is not None:
            pairs.append((block.q_norm, block.k_norm))
            if any(norm.centered or norm.bias is not None for norm in (block.q_norm, block.k_norm)):
                return False
    return all(
        after is None or (after.bias is None and not after.centered and (norm is None or _kind(after) == _kind(norm)))
        for after, norm in pairs
    )


def _kind(norm: Norm) -> tuple[float, float, bool]:
    return norm.eps, norm.offset, norm.centered


def counters(plan: Plan, rows: int) -> Tensor:
    """Counters of finished programs, for split-K and split attention: all zero before and after a launch."""
    linears = [plan.head.linear, *(linear for block in plan.blocks for linear in block.linears)]
    blocks = max(-(-linear.weight.shape[0] // BLOCK_N) for linear in linears)
    count = max(rows * plan.blocks[0].kv_heads, blocks)
    return torch.zeros(count, dtype=torch.int32, device=plan.head.norm.weight.device)


class StepInputs(NamedTuple):
    """The inputs of a decode step."""

    x: Tensor  # [B, C]: embeddings of the tokens; arbitrary in rows without a token
    positions: Tensor  # int32 [B]; -1: no token
    rope_cos_sin: Sequence[Tensor] | Tensor  # by kind of RoPE [B, 2, D], from `rope_tables`
    normed: GemmInput | None = None  # output of the first norm
    output_positions: Tensor | None = None  # int32 [B], of the tokens to choose, if there are drafts


class StepRows(NamedTuple):
    """The rows of a decode step: what `launch` takes."""

    inputs: StepInputs
    tables: Tensor  # int64 [layers, B, COLUMNS], on the device
    split_counters: Tensor  # from `counters`


def unused_inputs(plan: Plan, rows: int) -> StepInputs:
    """Inputs without a token."""
    weight, (kinds, head_dim) = plan.head.norm.weight, plan.frequencies.shape
    x = torch.zeros(rows, weight.shape[0], dtype=weight.dtype, device=weight.device)
    positions = torch.full((rows,), -1, dtype=torch.int32, device=weight.device)
    return StepInputs(x, positions, torch.zeros(kinds, rows, 2, head_dim, device=weight.device))


def begin(
    plan: Plan, tokens: Tensor, positions: Tensor, increments: Tensor, steps: Tensor, drafts: Tensor | None = None
) -> StepInputs:
    """Embed tokens int64 [B] at positions int32 [B], below 0 in rows without a token.

    Then add `increments` [B] to the positions, and one to `steps`, int32 [1]. With drafts int64 [B, n], below 0 where
    there is none, the inputs are B (n + 1) rows: each token, then its drafts; and the positions remain.
    """
    vectors, learned, factor = plan.embedding.tokens.weight, plan.embedding.positions, plan.embedding.factor
    assert isinstance(vectors, Tensor)
    width = 1 if drafts is None else drafts.shape[1] + 1
    rows, (kinds, head_dim), size = tokens.shape[0] * width, plan.frequencies.shape, vectors.shape[1]
    norm = plan.blocks[0].before_attention
    x = torch.empty(rows, size, dtype=vectors.dtype, device=tokens.device)
    normed = None
    if norm is not None and scale_after_gemm(norm, x.dtype):
        normed = GemmInput(torch.empty_like(x), torch.empty(rows, 1, dtype=torch.float32, device=tokens.device))
    rope_cos_sin = torch.empty(kinds, rows, 2, head_dim, dtype=torch.float32, device=tokens.device)
    input_positions = torch.empty(rows, dtype=torch.int32, device=tokens.device)
    output_positions = None if drafts is None else torch.empty_like(input_positions)
    inputs = StepInputs(x, input_positions, rope_cos_sin, normed, output_positions)
    with on(tokens.device):
        begin_step_kernel[(rows,)](
            tokens,
            positions,
            increments,
            steps,
            drafts,
            vectors,
            None if learned is None else learned.weight,
            plan.frequencies,
            inputs.positions,
            output_positions,
            x,
            rope_cos_sin,
            None if norm is None or normed is None else norm.weight,
            None if normed is None else normed.x,
            None if normed is None else normed.squares,
            WIDTH=width,
            FACTOR=factor,
            C=size,
            PARTS=in_parts(size),
            KINDS=kinds if head_dim else 0,
            ROPE_FACTORS=plan.rope_factors,
            D=head_dim,
            BLOCK_D=next_power(head_dim),
            OFFSET=0.0 if norm is None else norm.offset,
            **UNFUSED,
        )
    return inputs


def launch(plan: Plan, inputs: StepInputs, tables: Tensor, split_counters: Tensor, width: int = 1) -> Tensor:
    """Launch one step; returns the logits [B, V]. tables: int64 [layers, B, COLUMNS], on the device.

    width: adjacent rows that share a cache: a token, and drafts after it.
    """
    with on(inputs.x.device):
        residual = Residual(inputs.x, normed=inputs.normed)
        norms = [*(block.before_attention for block in plan.blocks[1:]), plan.head.norm]
        for block, norm, kind, table in zip(plan.blocks, norms, plan.kinds, tables, strict=True):
            qkv, given = norm_gemm(block.qkv, residual, block.before_attention, split_counters, pdl=plan.pdl)
            prepare_projections_of(block, plan.config, qkv, inputs.positions, pdl=plan.pdl)
            rope_cos_sin = None if kind is None else inputs.rope_cos_sin[kind]
            attended = attend_step(
                block, qkv, table, inputs.positions, split_counters, rope_cos_sin, width=width, pdl=plan.pdl
            )
            residual = gemm_add(
                block.o,
                attended,
                given,
                block.after_attention,
                None if block.parallel or block.routing is not None else block.before_mlp,
                split_counters,
                multiplier=block.multiplier,
                pdl=plan.pdl,
            )
            if block.routing is not None:
                x, added, after, factor, _ = residual
                normed, x = add_norm(x, block.before_mlp, added, after, multiplier=factor, scaled=True, pdl=plan.pdl)
                added = mixture(block, normed.x, inputs.positions, split_counters, pdl=plan.pdl)
                residual = Residual(x, added, block.after_mlp, block.multiplier)
                continue
            inner, complete = norm_gemm(
                block.up,
                given if block.parallel else residual,
                block.before_mlp,
                split_counters,
                activation=block.activation,
                gated=block.gated,
                pdl=plan.pdl,
            )
            residual = gemm_add(
                block.down,
                inner,
                residual if block.parallel else complete,
                block.after_mlp,
                norm,
                split_counters,
                multiplier=block.multiplier,
                pdl=plan.pdl,
            )
        logits = norm_gemm(plan.head.linear, residual, plan.head.norm, split_counters, pdl=plan.pdl)[0]
        return scale_logits(logits, plan.head)


def rope_tables(frequencies: Tensor, positions: Tensor, factor: float = 1.0) -> Tensor:
    """Cosines and signed sines [B, 2, D] of RoPE at these positions [B], of frequencies [D], times a factor."""
    batch, head_dim = positions.shape[0], frequencies.shape[0]
    out = torch.empty(batch, 2, head_dim, dtype=torch.float32, device=positions.device)
    sizes = {"D": head_dim, "BLOCK_D": next_power(head_dim)}
    fill_rope[(batch,)](positions, frequencies, out, ROPE_FACTOR=factor, **sizes, **UNFUSED)
    return out
