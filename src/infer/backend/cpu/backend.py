"""Passes on a CPU, through kernels that numba compiles. Each gives a token the same bits, whatever is beside it.

A step should be compiled as a whole: the kernels' threads and torch's are two pools, and for a while after torch's
have worked they still spin. Other Python threads go on meanwhile, also with kernels of their own. A process forked
after their first use does not run them: start it with spawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from infer import progress
from infer.backend.cpu import kernels
from infer.backend.cpu.functions import CpuAttention, activate, embed, empty, linear, norm
from infer.backend.cpu.records import ACTIVATION_CODES, Record, block_record, head_record, readable
from infer.backend.parts import BlockParts, ModelParts, NotPlain
from infer.models.rows import Packed, Row, pack
from infer.nn.norm import Norm
from infer.nn.rope import apply_rope
from infer.nn.split import SplitLinear

CPU = torch.device("cpu")
AT_ONCE = 16  # tokens of which all blocks are one call: a longer one could not be interrupted
BLOCK_TOKENS = 256  # of more tokens, a call has as many blocks as come to so many together, or one
ATTENTION = CpuAttention()


class Angles(NamedTuple):
    """cos and sin of all positions: a table [2, P, D] for each kind of layer, and where each layer's lie."""

    tables: list[Tensor]
    at: Record  # [layers, 2] addresses, 0 where there are none

    @classmethod
    def of(cls, parts: ModelParts, tables: list[Tensor]) -> Angles:
        places = {kind: [each.data_ptr() for each in table] for kind, table in zip(parts.ropes, tables, strict=True)}
        return cls(tables, np.array([places.get(block.layer_type, [0, 0]) for block in parts.blocks], np.int64))


class CpuBackend:
    """Computes in float32, whatever the weights are kept in."""

    name = "cpu"
    why = "numba kernels"

    def __init__(self, parts: ModelParts) -> None:
        self.parts, self._kernels = parts, kernels()
        self.blocks = np.concatenate([block_record(block) for block in parts.blocks])
        self._head = head_record(*parts.head)
        self._angles = Angles.of(parts, [rope.table(1) for rope in parts.ropes.values()])

    @staticmethod
    def of(parts: ModelParts, dtype: torch.dtype) -> CpuBackend | NarrowCpuBackend:
        """Raises NotPlain where there are no kernels for such a model."""
        if kernels() is None:
            raise NotPlain("there are no kernels for this CPU: INFER_KERNELS=0, or numba is missing")
        modules = [*parts.head, *(part for block in parts.blocks for part in (*block.linears, *_norms(block)))]
        weights = [each for part in modules for each in (*part.parameters(), *part.buffers())]
        wide = dtype is torch.float32
        if not all(readable(weight) or (not wide and weight.dtype is dtype) for weight in weights):
            raise NotPlain("its weights are in a form that no kernel reads")
        if any(block.activation not in ACTIVATION_CODES for block in parts.blocks):
            raise NotPlain(f"kernels have no such activation as {parts.blocks[0].activation}")
        if dtype.itemsize != 2 and not wide:
            raise NotPlain(f"kernels do not compute in {dtype}")
        if not wide:
            return NarrowCpuBackend(parts, dtype)
        return SplitCpuBackend(parts) if isinstance(parts.head.linear, SplitLinear) else CpuBackend(parts)

    def decoding(self, lazy: bool = False) -> None:
        return None

    def run(self, rows: Sequence[Row]) -> list[Tensor]:
        self._kernels.use_threads(torch.get_num_threads())
        packed = pack(rows, CPU, self.parts.positions_learned, self.parts.embedding.tokens)
        x = _embed(self.parts, packed, torch.float32)
        chosen = packed.wanted()
        wanted = np.arange(len(x)) if chosen is None else np.array(chosen, np.int64)
        tables = self._tables(packed)
        logits = self._by_cache(packed, x, wanted) if tables is None else self._by_table(packed, x, tables, wanted)
        packed.advance()
        return packed.split(logits)

    def _tables(self, packed: Packed) -> Record | None:
        """Where kernels find the keys and values of all rows; None where some cache must be asked."""
        tables = [span.row.cache.table(self.parts.config, torch.float32, span.n) for span in packed.spans]
        if any(table is None for table in tables):
            return None
        return tables[0] if len(tables) == 1 else np.concatenate(tables, 1)

    def _by_table(self, packed: Packed, x: Tensor, tables: Record, wanted: Record) -> Tensor:
        """Kernels store keys and values themselves. Returns the logits of the wanted tokens."""
        made = self._kernels
        angles, tokens, parts = self._places(packed)
        if len(x) < AT_ONCE:
            logits = empty(len(wanted), self.parts.head.linear.out_features)
            made.run(self.blocks, self._head, x.numpy(), angles.at, tables, tokens, parts, wanted, logits.numpy())
            return logits
        each = max(1, BLOCK_TOKENS // len(x))
        for i in range(0, len(self.blocks), each):
            done, some = empty(*x.shape), slice(i, i + each)
            blocks, ropes = self.blocks[some], angles.at[some]
            made.run(blocks, made.NO_HEADS, x.numpy(), ropes, tables[some], tokens, parts, wanted, done.numpy())
            x = done
            progress.tell_part(i + len(blocks), len(self.blocks))
        return self._logits(x, wanted)

    def _places(self, packed: Packed) -> tuple[Angles, Record, Record]:
        """The angles; the row and the position of each token; the work of attention."""
        counts = [span.n for span in packed.spans for _ in range(span.batch)]
        positions = packed.positions.numpy()
        tokens = np.empty((len(positions), 2), np.int64)
        tokens[:, 0] = np.repeat(np.arange(len(counts)), counts)
        tokens[:, 1] = positions
        tables = [rope.table(int(positions.max()) + 1) for rope in self.parts.ropes.values()]
        angles = self._angles
        if any(table is not known for table, known in zip(tables, angles.tables, strict=True)):
            angles = self._angles = Angles.of(self.parts, tables)
        return angles, tokens, self._kernels.parts_of(counts)

    def _by_cache(self, packed: Packed, x: Tensor, wanted: Record) -> Tensor:
        """Each block in two calls around the caches, which store and attend."""
        angles, tokens, _ = self._places(packed)
        for i, block in enumerate(self.parts.blocks):
            heads, one = empty(len(x), block.qkv.weight.shape[0]), slice(i, i + 1)
            self._kernels.before_attention(self.blocks[one], x.numpy(), angles.at[one], tokens, heads.numpy())
            x = self._behind_attention(i, _attended(packed, i, block, heads).contiguous(), x)
        return self._logits(x, wanted)

    def _behind_attention(self, layer_idx: int, attended: Tensor, x: Tensor) -> Tensor:
        """attended [T, Hq D], and the residual x -> [T, C]"""
        done = empty(*x.shape)
        record = self.blocks[layer_idx : layer_idx + 1]
        self._kernels.behind_attention(record, attended.numpy(), x.numpy(), done.numpy())
        return done

    def _logits(self, x: Tensor, wanted: Record) -> Tensor:
        """Of the wanted tokens of x [T, C]."""
        logits = empty(len(wanted), self.parts.head.linear.out_features)
        self._kernels.head(self._head, x.numpy()[wanted], logits.numpy())
        return logits


class SplitCpuBackend(CpuBackend):
    """Has some rows of each matrix, and gathers what the others have computed around the products that need all."""

    def _by_table(self, packed: Packed, x: Tensor, tables: Record, wanted: Record) -> Tensor:
        angles, tokens, parts = self._places(packed)
        for i, block in enumerate(self.parts.blocks):
            attended, one = empty(len(x), block.o.in_features), slice(i, i + 1)
            places = angles.at[one], tables[one], tokens, parts
            self._kernels.attended(self.blocks[one], x.numpy(), *places, attended.numpy())
            x = self._behind_attention(i, attended, x)
        return self._logits(x, wanted)

    def _behind_attention(self, layer_idx: int, attended: Tensor, x: Tensor) -> Tensor:
        block, record = self.parts.blocks[layer_idx], self.blocks[layer_idx : layer_idx + 1]
        added, inner = linear(attended, block.o), empty(len(x), block.down.in_features)
        self._kernels.before_down(record, added.numpy(), x.numpy(), inner.numpy())  # `added` becomes x + norm(added)
        done = linear(inner, block.down)
        self._kernels.behind_down(record, done.numpy(), added.numpy())
        return done

    def _logits(self, x: Tensor, wanted: Record) -> Tensor:
        head = self.parts.head
        return linear(norm(x[torch.from_numpy(wanted)], head.norm), head.linear)


class NarrowCpuBackend:
    """Computes in 16 bits: each part widens what it is given, and rounds what it returns."""

    name = "cpu"
    why = "numba kernels"

    def __init__(self, parts: ModelParts, dtype: torch.dtype) -> None:
        self.parts, self.dtype = parts, dtype

    def decoding(self, lazy: bool = False) -> None:
        return None

    def run(self, rows: Sequence[Row]) -> list[Tensor]:
        packed = pack(rows, CPU, self.parts.positions_learned, self.parts.embedding.tokens)
        x = _embed(self.parts, packed, self.dtype)
        rope_cos_sin = {kind: rope(packed.positions) for kind, rope in self.parts.ropes.items()}
        for i, block in enumerate(self.parts.blocks):
            x = self._block(packed, i, block, x, rope_cos_sin.get(block.layer_type))
        head = self.parts.head
        logits = linear(norm(packed.choose(x), head.norm), head.linear)
        packed.advance()
        return packed.split(logits)

    def _block(
        self, packed: Packed, layer_idx: int, block: BlockParts, x: Tensor, cos_sin: tuple[Tensor, Tensor] | None
    ) -> Tensor:
        heads = linear(norm(x, block.before_attention), block.qkv).view(len(x), -1, block.head_dim)
        q, k, v = heads.split_with_sizes([block.heads, block.kv_heads, block.kv_heads], 1)
        if block.q_norm is not None and block.k_norm is not None:
            q, k = norm(q, block.q_norm), norm(k, block.k_norm)
        if cos_sin is not None:
            q, k = apply_rope(q, *cos_sin), apply_rope(k, *cos_sin)
        attended = _attended(packed, layer_idx, block, torch.cat((q, k, v), 1).flatten(1))
        x = x + _normed(linear(attended, block.o), block.after_attention)
        up = linear(norm(x, block.before_mlp), block.up)
        inner = activate(up, block.down.in_features, block.activation)
        return x + _normed(linear(inner, block.down), block.after_mlp)


def _normed(x: Tensor, after: Norm | None) -> Tensor:
    return x if after is None else norm(x, after)


def _norms(block: BlockParts) -> list[Norm]:
    return [part for part in block if isinstance(part, Norm)]


def _embed(parts: ModelParts, packed: Packed, dtype: torch.dtype) -> Tensor:
    """As `Decoder.embed`: [T, C]."""
    tokens, positions, factor = parts.embedding
    x = embed(tokens, packed.ids)
    if x.dtype is not dtype:
        x = x.to(dtype)
    if factor != 1:
        x = x * factor
    return x if positions is None else x + positions(packed.positions)


def _attended(packed: Packed, layer_idx: int, block: BlockParts, heads: Tensor) -> Tensor:
    """heads [T, (Hq + 2 Hkv) D], normed and rotated -> [T, Hq D]"""
    q, k, v = heads.view(len(heads), -1, block.head_dim).split_with_sizes(
        [block.heads, block.kv_heads, block.kv_heads], 1
    )
    return packed.attend(layer_idx, q, k, v, scale=block.scale, window=block.window, kernel=ATTENTION)
