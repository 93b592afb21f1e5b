"""Passes on a GPU, through Triton kernels. Each gives a token the same bits, whatever is beside it.

A pass of one token a row is a decode step (`step.py`). Any other goes block by block through kernels for many tokens:

    q, k, v | heads | attention | output | residual, norm | gate, up | activation | down | residual, norm
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from infer.backend.gpu.attention import GpuAttention, Tiles, attend_rows, prepare, queries_of, reach_of, tiles_of
from infer.backend.gpu.captured import CapturedSteps, Decoding
from infer.backend.gpu.products import Normed, aligned, normed_rows, on, product
from infer.backend.gpu.prompts import CapturedPasses, Inputs, Reach, SplitSteps
from infer.backend.gpu.step import Fed, Plan, counters, launch, plan_of, rope_tables
from infer.backend.parts import BlockParts, ModelParts
from infer.cache.base import Cache
from infer.cache.table import PAGES, SLOTS
from infer.machine import to_device
from infer.models.rows import Packed, Row, pack, record, reserve
from infer.nn.split import SplitLinear

ATTENTION = GpuAttention()


class GpuBackend:
    name = "gpu"
    why = "Triton kernels"

    def __init__(self, parts: ModelParts, plan: Plan, dtype: torch.dtype) -> None:
        self.parts, self.plan, self.dtype = parts, plan, dtype
        self.device = parts.head.norm.weight.device
        self.captured = CapturedSteps(parts.config, plan, self.device, parts.embedding.tokens)
        self.passes = CapturedPasses(parts.config.num_hidden_layers, self.device)
        block, layers = plan.blocks[0], parts.config.num_hidden_layers
        self._queries = queries_of(block.heads, block.kv_heads, block.head_dim, dtype, self.device)
        self._split, self._steps = False, None
        if isinstance(parts.head.linear, SplitLinear):  # then processes meet between kernels
            self._split = True
            if parts.head.linear.group.capturable:
                self._steps = SplitSteps(layers, self._queries, self.device, self._step)
        self._nothing = torch.empty(1, 0, parts.config.vocab_size, dtype=dtype, device=self.device)

    @staticmethod
    def of(parts: ModelParts, dtype: torch.dtype) -> GpuBackend:
        """Raises NotPlain where there are no kernels for such a model."""
        return GpuBackend(parts, plan_of(parts), dtype)

    def run(self, rows: Sequence[Row]) -> list[Tensor]:
        if not self._split and self.passes.could_take(rows) and self._filled(rows):
            return [self._nothing] * len(rows)
        if self._steps is not None and self._steps.could_take(rows) and (stepped := self._stepped(rows)) is not None:
            return stepped
        packed = pack(rows, self.device, self.parts.positions_learned, self.parts.embedding.tokens)
        x = self._embed(packed.ids, packed.positions)
        positions = packed.positions.to(torch.int32)
        lines, page = self.tables([span.row.cache for span in packed.spans], [span.n for span in packed.spans])
        tables = None if lines is None else to_device(torch.from_numpy(lines), self.device)
        with on(self.device):
            ropes = self._ropes(positions)
            if tables is not None and not self._split and all(span.n == 1 for span in packed.spans):
                fed = Fed(x, positions, ropes)
                logits = launch(self.plan, fed, tables, counters(self.plan, len(x)))
                logits = packed.choose(logits)
            else:
                tiles = None
                if tables is not None:
                    spans = [(span.row.cache.seq_len, span.n) for span in packed.spans for _ in range(span.batch)]
                    tiles = tiles_of(spans, self._queries, self.device, page=page)
                logits = self._head(packed, self._blocks(packed, x, positions, ropes, tables, tiles))
        packed.advance()
        return packed.split(logits)

    def _filled(self, rows: Sequence[Row]) -> bool:
        """Feed rows of which no logits are wanted through a captured pass, if there is one."""
        counts = [len(row.tokens) for row in rows]
        lines, page = self._reserved(rows)
        if lines is None:
            return False
        end = max(row.cache.seq_len + n for row, n in zip(rows, counts, strict=True))
        reach = reach_of(end, self.plan.blocks[0], self.dtype, self.device)
        if not self.passes.launch(rows, lines, Reach(self._queries, reach, page), self._fill):
            return False
        self._advance(rows)
        return True

    def _stepped(self, rows: Sequence[Row]) -> list[Tensor] | None:
        """One token of each row, through a captured step, where several processes have a part of the model."""
        assert self._steps is not None
        lines, page = self._reserved(rows)
        if lines is None:
            return None
        logits = self._steps.launch(rows, lines, page)
        self._advance(rows)
        return [logits[i : i + 1, None][:, row.logits] for i, row in enumerate(rows)]

    def _reserved(self, rows: Sequence[Row]) -> tuple[Any, int]:
        """As `tables`, of rows of one sequence each, with memory for their tokens."""
        counts = [len(row.tokens) for row in rows]
        lines, page = self.tables([row.cache for row in rows], counts)
        if lines is None or lines.shape[1] != len(rows) or len({id(row.cache) for row in rows}) < len(rows):
            return None, 0
        for row, n in zip(rows, counts, strict=True):
            reserve(row.cache, n, self.parts.positions_learned, self.parts.embedding.tokens)
        return lines, page

    def _advance(self, rows: Sequence[Row]) -> None:
        for row in rows:
            at = row.cache.seq_len
            row.cache.advance(len(row.tokens))
            record(row.cache, at, row.tokens, self.parts.embedding.tokens)

    def _fill(self, inputs: Inputs) -> None:
        """A pass that fills caches, kernel by kernel."""
        ids, positions, tables, tiles = inputs
        self._blocks(None, self._embed(ids, positions.clamp(min=0)), positions, self._ropes(positions), tables, tiles)

    def _step(self, inputs: Inputs) -> Tensor:
        """A pass over single tokens, kernel by kernel: the logits of all."""
        ids, positions, tables, tiles = inputs
        x = self._embed(ids, positions.clamp(min=0))
        normed = self._blocks(None, x, positions, self._ropes(positions), tables, tiles)
        return self._logits(normed)

    def decoding(self, lazy: bool = False) -> Decoding | None:
        """Captured steps, for rows that have one token to feed. lazy: as for `Decoding`."""
        return Decoding(self.captured, lazy) if self.captured.possible else None

    def tables(self, caches: Sequence[Cache], counts: Sequence[int]) -> tuple[Any, int]:
        """[layers, R, COLUMNS]: where kernels find keys and values; None where some cache must be asked.

        And the positions of a page, 0 where no row has pages.
        """
        tables = [cache.table(self.parts.config, self.dtype, n) for cache, n in zip(caches, counts, strict=True)]
        if any(table is None for table in tables):
            return None, 0
        lines = np.concatenate(tables, 1)
        page, *others = set(lines[0, lines[0, :, PAGES] != 0, SLOTS].tolist()) or {0}
        if others:  # pools of several sizes: a kernel knows one
            return None, 0
        return lines, page

    def _embed(self, ids: Tensor, positions: Tensor) -> Tensor:
        """As `Decoder.embed`: [T, C]."""
        tokens, learned, factor = self.parts.embedding
        x: Tensor = tokens(ids)
        if factor != 1:
            x = x * factor
        return x if learned is None else x + learned(positions)

    def _ropes(self, positions: Tensor) -> list[Tensor]:
        return [rope_tables(each, positions) for each in self.plan.frequencies if each.numel()]

    def _blocks(
        self,
        packed: Packed | None,
        x: Tensor,
        positions: Tensor,
        ropes: Sequence[Tensor],
        tables: Tensor | None,
        tiles: Tiles | None,
    ) -> Normed:
        """[T, C], normed for the head. packed: needed without tables."""
        pdl = self.plan.pdl
        norms = [*(block.before_attention for block in self.plan.blocks), self.plan.head.norm]
        normed, _ = normed_rows(x, norms[0], pdl=pdl)
        for i, (block, kind) in enumerate(zip(self.plan.blocks, self.plan.kinds, strict=True)):
            qkv, _ = product(block.qkv, normed, None, eps=block.before_attention.eps, pdl=pdl)
            table = None if tables is None else tables[i]
            rope_cos_sin = None if kind is None else ropes[kind]
            attended = self._attended(packed, i, block, qkv, positions, rope_cos_sin, table, tiles)
            added, _ = product(block.o, Normed(block.o.input(attended)), None, joined=False, pdl=pdl)
            normed, x = normed_rows(x, block.before_mlp, block.o.output(added), block.after_attention, pdl=pdl)
            inner, _ = product(
                block.up,
                normed,
                None,
                eps=block.before_mlp.eps,
                activation=block.activation,
                gated=block.gated,
                pdl=pdl,
            )
            added, _ = product(block.down, Normed(block.down.input(inner)), None, joined=False, pdl=pdl)
            normed, x = normed_rows(x, norms[i + 1], block.down.output(added), block.after_mlp, pdl=pdl)
        return normed

    def _head(self, packed: Packed, normed: Normed) -> Tensor:
        """The logits that are wanted."""
        squares = None if normed.squares is None else aligned(packed.choose(normed.squares))
        return self._logits(Normed(aligned(packed.choose(normed.x)), squares))

    def _logits(self, normed: Normed) -> Tensor:
        head = self.plan.head
        return head.linear.output(product(head.linear, normed, None, eps=head.norm.eps, pdl=self.plan.pdl)[0])

    def _attended(
        self,
        packed: Packed | None,
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
            return packed.attend(layer_idx, q, k, v, scale=block.scale, window=block.window, kernel=ATTENTION)
        q, _, _ = prepare(block, qkv, positions, rope_cos_sin, table, tiles.rows, pdl=pdl)
        return attend_rows(q, table, tiles, kv_heads=block.kv_heads, scale=block.scale, window=block.window, pdl=pdl)
