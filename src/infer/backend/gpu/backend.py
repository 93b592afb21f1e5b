"""Forward passes on a GPU, through Triton kernels. A token gets the same bits in any batch.

A pass of one token per row is a decode step (`step.py`). Any other pass runs kernels for many tokens in each block:

    q, k, v | heads | attention | output | residual, norm | gate, up | activation | down | residual, norm

A captured pass has the tokens of prompts and, after them, the rows of a decode step: only attention tells them apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import triton
from torch import Tensor

from infer.backend.gpu.attention import (
    GpuAttention,
    Tiles,
    attend_rows,
    attend_step,
    max_end_of,
    prepare,
    prepare_projections_of,
    queries_of,
    tiles_of,
)
from infer.backend.gpu.captured import CapturedDecoder, CapturedStep, CapturedSteps
from infer.backend.gpu.gemm import GemmInput, add_norm, aligned, empty_rows, gemm, scale_after_gemm, scale_logits
from infer.backend.gpu.launcher import on
from infer.backend.gpu.moe import mixture
from infer.backend.gpu.prompts import MIN_STEPS, CapturedPasses, Inputs, LogitSteps, PassShape
from infer.backend.gpu.step import Plan, StepInputs, StepRows, counters, launch, plan_of, rope_tables
from infer.backend.gpu.tuned import FUSED_ROWS
from infer.backend.parts import BlockParts, ModelParts
from infer.cache.base import Cache
from infer.cache.table import PAGE_TABLE, SLOTS
from infer.machine import to_device
from infer.models.rows import PackedBatch, Row, pack, record, reserve
from infer.nn.linear import Linear
from infer.nn.norm import Norm
from infer.nn.sharded import ShardedLinear

ATTENTION = GpuAttention()


class GpuBackend:
    name = "gpu"
    reason = "Triton kernels"
    compiler = f"triton {triton.__version__}"

    def __init__(self, parts: ModelParts, plan: Plan, dtype: torch.dtype) -> None:
        self.parts, self.plan, self.dtype = parts, plan, dtype
        self.device = parts.head.norm.weight.device
        self.captured = CapturedSteps(parts.config, plan, self.device, parts.embedding.tokens)
        self.passes = CapturedPasses(parts.config.num_hidden_layers, self.device)
        block, layers = plan.blocks[0], parts.config.num_hidden_layers
        self._queries = queries_of(block.heads, block.kv_heads, block.head_dim, dtype, self.device)
        self._sharded = isinstance(parts.head.linear, ShardedLinear)  # then collectives run between kernels
        about = layers, self._queries, self.device
        self._steps: LogitSteps | None = LogitSteps(*about, self._launch_step, MIN_STEPS)
        if isinstance(parts.head.linear, ShardedLinear):
            capturable = parts.head.linear.group.capturable
            self._steps = LogitSteps(*about, self._launch_sharded_step, 1) if capturable else None
        self._no_logits = torch.empty(1, 0, parts.config.vocab_size, dtype=dtype, device=self.device)

    @staticmethod
    def of(parts: ModelParts, dtype: torch.dtype) -> GpuBackend:
        """Raises UnsupportedByKernels if there are no kernels for this model."""
        return GpuBackend(parts, plan_of(parts), dtype)

    def run(self, rows: Sequence[Row]) -> list[Tensor]:
        returns_hidden = any(row.hidden is not None for row in rows)
        if not returns_hidden and (captured := self._run_captured(rows)) is not None:
            return captured
        packed = pack(rows, self.device, self.parts.positions_learned, self.parts.embedding.tokens)
        x = self._embed(packed.ids, packed.positions)
        positions = packed.positions.to(torch.int32)
        tables, page = self.tables([span.row.cache for span in packed.spans], [span.n for span in packed.spans])
        tables = None if tables is None else to_device(torch.from_numpy(tables), self.device)
        with on(self.device):
            ropes = self._ropes(positions)
            single = all(span.n == 1 for span in packed.spans) and not returns_hidden
            if tables is not None and not self._sharded and single:
                inputs = StepInputs(x, positions, ropes)
                logits = launch(self.plan, inputs, tables, counters(self.plan, len(x)))
                logits = packed.select(logits)
            else:
                tiles = None
                if tables is not None:
                    spans = [(span.row.cache.seq_len, span.n) for span in packed.spans for _ in range(span.batch)]
                    tiles = tiles_of(spans, self._queries, self.device, page=page)
                logits = self._head(packed, self._blocks(packed, x, positions, ropes, tables, tiles))
        packed.advance()
        return packed.split(logits)

    def _run_captured(self, rows: Sequence[Row]) -> list[Tensor] | None:
        """The logits from a captured pass; None: there is none for these rows."""
        if not self._sharded and self.passes.supports(rows) and self._run_captured_prefill(rows):
            return [self._no_logits] * len(rows)
        return self._run_captured_step(rows) if self._steps is not None and self._steps.supports(rows) else None

    def run_beside(self, step: CapturedStep, rows: Sequence[Row]) -> bool:
        """Launch a captured step together with rows that only fill caches. False: there is no such pass yet."""
        return self.passes.supports(rows, step.rows) and self._run_captured_prefill(rows, step)

    def _run_captured_prefill(self, rows: Sequence[Row], step: CapturedStep | None = None) -> bool:
        """Run rows without logits through a captured prefill pass, if there is one."""

        def run_beside(inputs: Inputs) -> Tensor:
            assert step is not None
            return step.run(partial(self._launch_both, inputs))

        def warm_up(inputs: Inputs) -> Tensor:
            assert step is not None
            return self._launch_both(inputs, step.unused_rows())

        counts = [len(row.tokens) for row in rows]
        tables, page = self._reserve(rows)
        if tables is None:
            return False
        end = max(row.cache.seq_len + n for row, n in zip(rows, counts, strict=True))
        shape = PassShape(self._queries, max_end_of(end, self.plan.blocks[0], self.dtype, self.device), page)
        if step is None:
            launched = self.passes.launch(rows, tables, shape, self._launch_prefill)
        else:
            launched = self.passes.launch(rows, tables, shape, run_beside, step, warm_up)
        if launched:
            self._advance(rows)
        return launched

    def _run_captured_step(self, rows: Sequence[Row]) -> list[Tensor] | None:
        """Run one token per row through a captured step."""
        assert self._steps is not None
        tables, page = self._reserve(rows)
        if tables is None:
            return None
        if (logits := self._steps.launch(rows, tables, page)) is None:
            return None
        self._advance(rows)
        return [logits[i : i + 1, None][:, row.logits] for i, row in enumerate(rows)]

    def _reserve(self, rows: Sequence[Row]) -> tuple[Any, int]:
        """Reserve memory for the tokens of rows with one sequence each; returns their `tables`."""
        counts = [len(row.tokens) for row in rows]
        tables, page = self.tables([row.cache for row in rows], counts)
        if tables is None or tables.shape[1] != len(rows) or len({id(row.cache) for row in rows}) < len(rows):
            return None, 0
        for row, n in zip(rows, counts, strict=True):
            reserve(row.cache, n, self.parts.positions_learned, self.parts.embedding.tokens)
        return tables, page

    def _advance(self, rows: Sequence[Row]) -> None:
        for row in rows:
            at = row.cache.seq_len
            row.cache.advance(len(row.tokens))
            record(row.cache, at, row.tokens, self.parts.embedding.tokens)

    def _launch_prefill(self, inputs: Inputs) -> None:
        """Launch a pass that fills caches, kernel by kernel."""
        ids, positions, tables, tiles = inputs
        self._blocks(None, self._embed(ids, positions.clamp(min=0)), positions, self._ropes(positions), tables, tiles)

    def _launch_both(self, inputs: Inputs, step: StepRows) -> Tensor:
        """Launch a pass that fills caches together with a decode step, kernel by kernel; returns the step's logits."""
        ids, positions, tables, tiles = inputs
        count, own = len(ids), step.inputs
        x = empty_rows(count + len(own.x), own.x.shape[1], own.x)
        x[:count], x[count:] = self._embed(ids, positions.clamp(min=0)), own.x
        both = torch.cat((positions, own.positions))
        normed = self._blocks(None, x, both, self._ropes(positions), tables, tiles, step)
        squares = None if normed.squares is None else aligned(normed.squares[count:])
        return self._logits(GemmInput(aligned(normed.x[count:]), squares))

    def _launch_step(self, inputs: Inputs) -> Tensor:
        """Launch a decode step, kernel by kernel; returns its logits."""
        ids, positions, tables, _ = inputs
        x = self._embed(ids, positions.clamp(min=0))
        step = StepInputs(x, positions, self._ropes(positions))
        return launch(self.plan, step, tables, counters(self.plan, len(ids)))

    def _launch_sharded_step(self, inputs: Inputs) -> Tensor:
        """The same with the kernels of prompts, between which there are collectives."""
        ids, positions, tables, tiles = inputs
        x = self._embed(ids, positions.clamp(min=0))
        normed = self._blocks(None, x, positions, self._ropes(positions), tables, tiles)
        return self._logits(normed)

    def captured_decoder(self) -> CapturedDecoder | None:
        """Runs sequences that decode in captured steps."""
        return CapturedDecoder(self.captured, self) if self.captured.possible else None

    def tables(self, caches: Sequence[Cache], counts: Sequence[int]) -> tuple[Any, int]:
        """Addresses of keys and values [layers, R, COLUMNS], None if a cache has none; positions per page (0: none)."""
        found = [cache.table(self.parts.config, self.dtype, n) for cache, n in zip(caches, counts, strict=True)]
        if any(table is None for table in found):
            return None, 0
        tables = np.concatenate(found, 1)
        page, *others = set(tables[0, tables[0, :, PAGE_TABLE] != 0, SLOTS].tolist()) or {0}
        if others:  # pools of several page sizes: a kernel supports one
            return None, 0
        return tables, page

    def _embed(self, ids: Tensor, positions: Tensor) -> Tensor:
        """As `Decoder.embed`: [T, C]."""
        tokens, learned, factor = self.parts.embedding
        x: Tensor = tokens(ids)
        if factor != 1:
            x = x * factor
        return x if learned is None else x + learned(positions)

    def _ropes(self, positions: Tensor) -> list[Tensor]:
        factors = zip(self.plan.frequencies, self.plan.rope_factors, strict=False)
        return [rope_tables(each, positions, factor) for each, factor in factors]

    def _blocks(
        self,
        packed: PackedBatch | None,
        x: Tensor,
        positions: Tensor,
        ropes: Sequence[Tensor],
        tables: Tensor | None,
        tiles: Tiles | None,
        step: StepRows | None = None,
    ) -> GemmInput:
        """All blocks: x [T, C], normed for the head. packed: needed without tables. step: rows after all others."""
        pdl = self.plan.pdl
        norms = [*(block.before_attention for block in self.plan.blocks), self.plan.head.norm]
        normed, x = add_norm(x, norms[0], pdl=pdl)
        for i, (block, kind) in enumerate(zip(self.plan.blocks, self.plan.kinds, strict=True)):
            qkv, _ = gemm(block.qkv, normed, None, eps=_eps(block.before_attention), pdl=pdl)
            prepare_projections_of(block, self.plan.config, qkv, positions, pdl=pdl)
            table = None if tables is None else tables[i]
            rope_cos_sin = None if kind is None else ropes[kind]
            if step is None:
                attended = self._attend(packed, i, block, qkv, positions, rope_cos_sin, table, tiles)
            else:
                assert table is not None
                assert tiles is not None
                attended = self._attend_both(i, block, qkv, positions, rope_cos_sin, table, tiles, step)
            given, norm = x, None if block.parallel else block.before_mlp
            normed, x = self._add(block.o, attended, x, block.after_attention, norm, block)
            if block.parallel:
                normed, _ = add_norm(given, block.before_mlp, pdl=pdl)
            if block.routing is not None:
                added = mixture(block, normed.x, positions, None, pdl=pdl)
                normed, x = add_norm(x, norms[i + 1], added, block.after_mlp, multiplier=block.multiplier, pdl=pdl)
            else:
                eps = _eps(block.before_mlp)
                inner, _ = gemm(
                    block.up, normed, None, eps=eps, activation=block.activation, gated=block.gated, pdl=pdl
                )
                normed, x = self._add(block.down, inner, x, block.after_mlp, norms[i + 1], block)
            if packed is not None:
                packed.return_layer(i, x)
        if packed is not None:
            packed.return_final(x, self.parts.head.norm)
        return normed

    def _add(
        self, linear: Linear, inner: Tensor, x: Tensor, after: Norm | None, norm: Norm | None, block: BlockParts
    ) -> tuple[GemmInput, Tensor]:
        """x + multiplier after(W inner), normed and as it is."""
        factor, pdl = block.multiplier, self.plan.pdl
        scaled = block.routing is not None and linear is block.o  # experts get it complete
        fused = not (scaled or self._sharded) and after is None and scale_after_gemm(norm, x.dtype)
        if fused and len(x) >= FUSED_ROWS:
            complete, normed = gemm(linear, GemmInput(inner), None, addend=x, multiplier=factor, norm=norm, pdl=pdl)
            assert normed is not None
            return normed, complete
        added, _ = gemm(linear, GemmInput(linear.input(inner)), None, joined=False, pdl=pdl)
        return add_norm(x, norm, linear.output(added), after, multiplier=factor, scaled=scaled, pdl=pdl)

    def _head(self, packed: PackedBatch, normed: GemmInput) -> Tensor:
        """The logits of the positions that rows select."""
        squares = None if normed.squares is None else aligned(packed.select(normed.squares))
        return self._logits(GemmInput(aligned(packed.select(normed.x)), squares))

    def _logits(self, normed: GemmInput) -> Tensor:
        head = self.plan.head
        logits = head.linear.output(gemm(head.linear, normed, None, eps=head.norm.eps, pdl=self.plan.pdl)[0])
        return scale_logits(logits, head)

    def _attend(
        self,
        packed: PackedBatch | None,
        layer_idx: int,
        block: BlockParts,
        qkv: Tensor,
        positions: Tensor,
        rope_cos_sin: Tensor | None,
        table: Tensor | None,
        tiles: Tiles | None,
    ) -> Tensor:
        """qkv [T, (Hq + 2 Hkv) D] -> [T, Hq D]"""
        pdl = self.plan.pdl
        if table is None or tiles is None:
            assert packed is not None
            q, k, v = prepare(block, qkv, positions, rope_cos_sin, pdl=pdl)
            return packed.attend(layer_idx, q, k, v, kernel=ATTENTION, **block.score_options())
        q, _, _ = prepare(block, qkv, positions, rope_cos_sin, table, tiles.rows, pdl=pdl)
        return attend_rows(q, table, tiles, kv_heads=block.kv_heads, pdl=pdl, **block.score_options())

    def _attend_both(
        self,
        layer_idx: int,
        block: BlockParts,
        qkv: Tensor,
        positions: Tensor,
        rope_cos_sin: Tensor | None,
        table: Tensor,
        tiles: Tiles,
        step: StepRows,
    ) -> Tensor:
        """As `_attend`, where the rows of a step follow the tokens of prompts."""
        pdl, own = self.plan.pdl, step.inputs
        count = len(qkv) - len(own.x)
        out = empty_rows(len(qkv), block.heads * block.head_dim, qkv)
        q, _, _ = prepare(block, qkv[:count], positions[:count], rope_cos_sin, table, tiles.rows, pdl=pdl)
        attend_rows(q, table, tiles, out=out[:count], kv_heads=block.kv_heads, pdl=pdl, **block.score_options())
        kind = self.plan.kinds[layer_idx]
        ropes = None if kind is None else own.rope_cos_sin[kind]
        # Without PDL: a step loads the keys before its tokens early, and some of them are of this pass.
        attend_step(
            block, qkv[count:], step.tables[layer_idx], own.positions, step.split_counters, ropes, out=out[count:]
        )
        return out


def _eps(norm: Norm | None) -> float:
    return 0.0 if norm is None else norm.eps
