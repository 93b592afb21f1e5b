"""Forward passes on a CPU, by kernels that numba compiles. A token has the same bits, whatever runs beside it.

A whole step is compiled code: kernel threads and torch's threads are two pools, and torch's still spin for a while
after their last work. Other Python threads continue meanwhile, also with kernels of their own. A process forked after
the first use of kernels does not run them: start it with spawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from infer import progress
from infer.backend.cpu import kernels
from infer.backend.cpu.ops import (
    ACTIVATION_CODES,
    CpuAttention,
    ExpertRecords,
    Record,
    activate,
    block_record,
    embedding,
    empty,
    head_record,
    is_readable,
    linear,
    mix_experts,
    norm,
    scale_logits,
    weight_record,
)
from infer.backend.parts import BlockParts, ModelParts, UnsupportedByKernels
from infer.models.rows import PackedBatch, Row, pack
from infer.nn.norm import Norm
from infer.nn.rope import apply_rope
from infer.nn.sharded import ShardedLinear, ShardedRMSNorm

CPU = torch.device("cpu")
MAX_SINGLE_CALL = 16  # below so many tokens all blocks are one call; a longer call could not be interrupted
BLOCK_TOKENS = 256  # of more tokens, a call has as many blocks as come to so many tokens together, or one
ATTENTION = CpuAttention()


class RopeTables(NamedTuple):
    """RoPE cos and sin of positions: a table [2, P, D] for each kind of layer."""

    tables: list[Tensor]
    addresses: Record  # [layers, 3]: of cos and sin, 0 without RoPE; of query scales [P], 0 for none
    positions: int  # P of the shortest table

    @classmethod
    def of(cls, parts: ModelParts, positions: int) -> RopeTables:
        tables = {kind: rope.table(positions) for kind, rope in parts.ropes.items()}
        count = min((table.shape[1] for table in tables.values()), default=2**62)
        scales = parts.query_scales(torch.arange(count)) if tables else None
        last = [] if scales is None else [scales]
        of_scales = last[0].data_ptr() if last else 0
        addresses = {kind: [*(each.data_ptr() for each in table), of_scales] for kind, table in tables.items()}
        kinds = [block.rope_type for block in parts.blocks]
        by_layer = [[0, 0, of_scales] if kind is None else addresses[kind] for kind in kinds]
        return cls([*tables.values(), *last], np.array(by_layer, np.int64), count)


class CpuBackend:
    """Computes in float32 for any weight dtype. A 16-bit model is computed module by module, rounded after each."""

    name = "cpu"
    reason = "numba kernels"

    def __init__(self, parts: ModelParts, dtype: torch.dtype = torch.float32) -> None:
        self.parts, self.dtype, self._kernels = parts, dtype, kernels()
        self._embed_tokens, self._vocab_size = embedding(parts.embedding.tokens), parts.head.linear.out_features
        if dtype is torch.float32:
            self._experts = [ExpertRecords.of(block) for block in parts.blocks]  # `blocks` has their addresses
            self.blocks = np.concatenate([*map(block_record, parts.blocks, self._experts)])
            self._head = head_record(*parts.head)
            self._ropes = RopeTables.of(parts, 1)
        else:
            for part in (parts.head.linear, *(each for block in parts.blocks for each in block.linears)):
                weight_record(part.weight, None)  # compiles its kernel, and lays out a quantized weight

    @property
    def compiler(self) -> str:
        from infer.backend.cpu.jit import compiler  # there are kernels, so there is numba

        return compiler()

    @staticmethod
    def of(parts: ModelParts, dtype: torch.dtype) -> CpuBackend:
        """Raises UnsupportedByKernels if there are no kernels for such a model."""
        if kernels() is None:
            raise UnsupportedByKernels("there are no kernels for this CPU: INFER_KERNELS=0, or numba is missing")
        modules = [*parts.head[:2], *(part for block in parts.blocks for part in (*block.linears, *_norms(block)))]
        weights = [each for part in modules for each in (*part.parameters(), *part.buffers())]
        weights += [block.sinks for block in parts.blocks if block.sinks is not None]
        is_float32 = dtype is torch.float32
        if not all(is_readable(weight) or (not is_float32 and weight.dtype is dtype) for weight in weights):
            raise UnsupportedByKernels("kernels do not read the dtype or device of its weights")
        if any(block.activation not in ACTIVATION_CODES for block in parts.blocks):
            raise UnsupportedByKernels(f"kernels do not have the activation {parts.blocks[0].activation}")
        if dtype.itemsize != 2 and not is_float32:
            raise UnsupportedByKernels(f"kernels do not compute in {dtype}")
        if is_float32 and isinstance(parts.head.linear, ShardedLinear):
            return ShardedCpuBackend(parts)
        return CpuBackend(parts, dtype)

    def captured_decoder(self) -> None:
        return None

    def run(self, rows: Sequence[Row]) -> list[Tensor]:
        if (count := torch.get_num_threads()) != self._kernels.threads.thread_count:
            self._kernels.use_threads(count)
        packed = pack(rows, CPU, self.parts.positions_learned, self.parts.embedding.tokens)
        x = self._embed(packed)
        chosen = packed.selected()
        selected = np.arange(len(x)) if chosen is None else np.array(chosen, np.int64)
        if self.dtype is not torch.float32:
            logits = self._in_16_bits(packed, x, selected)
        elif (tables := self._tables(packed)) is not None:
            logits = self._by_table(packed, x, tables, selected)
        else:
            logits = self._by_cache(packed, x, selected)
        packed.advance()
        return packed.split(logits)

    def _embed(self, packed: PackedBatch) -> Tensor:
        """As `Decoder.embed`: [T, C]."""
        _, positions, factor = self.parts.embedding
        x = self._embed_tokens(packed.ids)
        if x.dtype is not self.dtype:
            x = x.to(self.dtype)
        if factor != 1:
            x = x * factor
        return x if positions is None else x + positions(packed.positions)

    def _tables(self, packed: PackedBatch) -> Record | None:
        """Where kernels find the keys and values of all rows; None if a cache has to attend itself."""
        tables = [span.row.cache.table(self.parts.config, torch.float32, span.n) for span in packed.spans]
        if any(table is None for table in tables):
            return None
        return tables[0] if len(tables) == 1 else np.concatenate(tables, 1)

    def _by_table(self, packed: PackedBatch, x: Tensor, tables: Record, selected: Record) -> Tensor:
        """Kernels store keys and values themselves. Returns the logits of the selected tokens."""
        made = self._kernels
        ropes, tokens, queries = self._places(packed)
        if len(x) < MAX_SINGLE_CALL and not packed.returns_hidden:
            logits = empty(len(selected), self._vocab_size)
            made.run(
                self.blocks, self._head, x.numpy(), ropes.addresses, tables, tokens, queries, selected, logits.numpy()
            )
            return logits
        each = 1 if packed.returns_hidden else max(1, BLOCK_TOKENS // len(x))
        for i in range(0, len(self.blocks), each):
            done, some = empty(*x.shape), slice(i, i + each)
            blocks, addresses = self.blocks[some], ropes.addresses[some]
            made.run(blocks, made.NO_HEAD, x.numpy(), addresses, tables[some], tokens, queries, selected, done.numpy())
            x = done
            packed.return_layer(i, x)
            progress.report_part(i + len(blocks), len(self.blocks))
        return self._outputs(packed, x, selected)

    def _places(self, packed: PackedBatch) -> tuple[RopeTables, Record, Record]:
        """RoPE cos and sin; the row and the position of each token; the query blocks of attention."""
        counts = [span.n for span in packed.spans for _ in range(span.batch)]
        positions = packed.positions.numpy()
        tokens = np.empty((len(positions), 2), np.int64)
        tokens[:, 0] = np.repeat(np.arange(len(counts)), counts)
        tokens[:, 1] = positions
        if (end := int(positions.max()) + 1) > self._ropes.positions:
            self._ropes = RopeTables.of(self.parts, end)
        return self._ropes, tokens, self._kernels.query_blocks(counts)

    def _by_cache(self, packed: PackedBatch, x: Tensor, selected: Record) -> Tensor:
        """Each block in three calls around the caches, which store keys and attend."""
        ropes, tokens, _ = self._places(packed)
        for i, block in enumerate(self.parts.blocks):
            heads = self._projected(i, x)
            self._kernels.rotate(self.blocks[i : i + 1], heads, len(x), ropes.addresses[i : i + 1], tokens)
            x = self._after_attention(i, _attend(packed, i, block, heads).contiguous(), x)
            packed.return_layer(i, x)
        return self._outputs(packed, x, selected)

    def _projected(self, layer_idx: int, x: Tensor) -> Tensor:
        """x [T, C] -> q, k and v [T, (Hq + 2 Hkv) D], before norm and RoPE"""
        heads = empty(len(x), self.parts.blocks[layer_idx].qkv.weight.shape[0])
        self._kernels.qkv_proj(self.blocks[layer_idx : layer_idx + 1], x, len(x), heads)
        return heads

    def _after_attention(self, layer_idx: int, attended: Tensor, x: Tensor) -> Tensor:
        """attended [T, Hq D] and the residual x -> [T, C]"""
        done = empty(*x.shape)
        record = self.blocks[layer_idx : layer_idx + 1]
        self._kernels.after_attention(record, attended, x, len(x), done)
        return done

    def _outputs(self, packed: PackedBatch, x: Tensor, selected: Record) -> Tensor:
        packed.return_final(x, self._final_norm)
        return self._logits(x, selected)

    def _final_norm(self, x: Tensor) -> Tensor:
        return norm(x, self.parts.head.norm)

    def _logits(self, x: Tensor, selected: Record) -> Tensor:
        """Logits of the selected tokens of x [T, C]."""
        logits = empty(len(selected), self._vocab_size)
        self._kernels.head(self._head, x.numpy()[selected], logits)
        return logits

    def _in_16_bits(self, packed: PackedBatch, x: Tensor, selected: Record) -> Tensor:
        """Each module widens its input to float32 and rounds its output. Returns the logits of the selected tokens."""
        cos_sin = {kind: rope(packed.positions) for kind, rope in self.parts.ropes.items()}
        scales, head = self.parts.query_scales(packed.positions), self.parts.head
        for i, block in enumerate(self.parts.blocks):
            heads = linear(_norm_if(x, block.before_attention), block.qkv).view(len(x), -1, block.head_dim)
            q, k, v = heads.split_with_sizes([block.heads, block.kv_heads, block.kv_heads], 1)
            if block.norms_heads_apart:
                q, k = _norm_if(q, block.q_norm), _norm_if(k, block.k_norm)
            else:
                q = _norm_if(q.flatten(1), block.q_norm).view_as(q)
                k = _norm_if(k.flatten(1), block.k_norm).view_as(k)
            if block.rope_type is not None:
                q, k = (apply_rope(each, *cos_sin[block.rope_type]) for each in (q, k))
            if scales is not None:
                q = (q * scales[:, None, None]).to(q.dtype)
            attended = _attend(packed, i, block, torch.cat((q, k, v), 1).flatten(1))
            given, x = x, x + _norm_if(linear(attended, block.o), block.after_attention) * block.multiplier
            added = _mlp(_norm_if(given if block.parallel else x, block.before_mlp), block)
            x = x + _norm_if(added, block.after_mlp) * block.multiplier
            packed.return_layer(i, x)
        packed.return_final(x, self._final_norm)
        return scale_logits(linear(norm(x[torch.from_numpy(selected)], head.norm), head.linear), head)


class ShardedCpuBackend(CpuBackend):
    """Has some rows of each matrix: before a GEMM that needs all outputs, the other processes' parts are gathered."""

    def _by_table(self, packed: PackedBatch, x: Tensor, tables: Record, selected: Record) -> Tensor:
        ropes, tokens, queries = self._places(packed)
        for i, block in enumerate(self.parts.blocks):
            attended, one = empty(len(x), block.o.in_features), slice(i, i + 1)
            places = ropes.addresses[one], tables[one], tokens, queries, len(queries)
            self._kernels.attention(self.blocks[one], self._projected(i, x), len(x), *places, attended)
            x = self._after_attention(i, attended, x)
            packed.return_layer(i, x)
        return self._outputs(packed, x, selected)

    def _projected(self, layer_idx: int, x: Tensor) -> Tensor:
        """Norms of all heads together are applied here, as they need the heads of all processes."""
        heads, block = super()._projected(layer_idx, x), self.parts.blocks[layer_idx]
        q, k, _ = heads.split_with_sizes([n * block.head_dim for n in (block.heads, block.kv_heads, block.kv_heads)], 1)
        for each, part in ((q, block.q_norm), (k, block.k_norm)):
            if isinstance(part, ShardedRMSNorm):
                each.copy_(norm(each, part))
        return heads

    def _after_attention(self, layer_idx: int, attended: Tensor, x: Tensor) -> Tensor:
        block, record = self.parts.blocks[layer_idx], self.blocks[layer_idx : layer_idx + 1]
        added, mixed = linear(attended, block.o), block.routing is not None
        inner = empty(len(x), x.shape[1] if mixed else block.down.in_features)
        self._kernels.before_down(record, added, x, len(x), inner)  # `added` becomes x + norm(added)
        done = mix_experts(inner, block, self._experts[layer_idx]) if mixed else linear(inner, block.down)
        self._kernels.after_down(record, done, added, *done.shape)
        return done

    def _logits(self, x: Tensor, selected: Record) -> Tensor:
        head = self.parts.head
        return scale_logits(linear(norm(x[torch.from_numpy(selected)], head.norm), head.linear), head)


def _norm_if(x: Tensor, part: Norm | None) -> Tensor:
    return x if part is None else norm(x, part)


def _mlp(x: Tensor, block: BlockParts) -> Tensor:
    if block.routing is not None:
        return mix_experts(x, block)
    return linear(activate(linear(x, block.up), block.down.in_features, block.activation), block.down)


def _norms(block: BlockParts) -> list[Norm]:
    return [part for part in block if isinstance(part, Norm)]


def _attend(packed: PackedBatch, layer_idx: int, block: BlockParts, heads: Tensor) -> Tensor:
    """heads [T, (Hq + 2 Hkv) D], after norm and RoPE -> [T, Hq D]"""
    q, k, v = heads.view(len(heads), -1, block.head_dim).split_with_sizes(
        [block.heads, block.kv_heads, block.kv_heads], 1
    )
    return packed.attend(layer_idx, q, k, v, kernel=ATTENTION, **block.score_options())
