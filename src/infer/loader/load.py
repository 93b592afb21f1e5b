"""Load a model: choose how each weight is stored, then fill the weights from the checkpoint one tensor at a time.

In float32 on a CPU with kernels, matrices that a checkpoint has in bfloat16 stay in bfloat16: the kernels widen them as
they multiply, which gives the same numbers and reads half the memory. (float16 is widened when loaded: its conversion
instruction is slow on many cores, and takes longer at each step than reading twice the bytes.)

On a CPU, quantized matrices of a GGUF file keep their blocks, unless `dtype` asks for floats. Types that have no scheme
(`nn/schemes.py`) are rounded to int8. Of matrices that are stacked, all must be quantized; their types may differ.

quantize="int8" stores all matrices in 8 bits. "int4" keeps the blocks of a GGUF file, and stores other matrices in 4
bits, except in 8 bits:
- the embedding and the head, which affect every token;
- types without a scheme that have more than 4 bits;
- q, k and v of checkpoints in floats: a tenth of the weights, and half of the error of quantizing all (perplexity of
  Gemma 3 270M with its layers quantized from floats: +17 % with q, k, v in 4 bits, +9 % in 8).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from infer import progress
from infer.backend import cpu
from infer.config import ModelConfig
from infer.loader.checkpoint import FLOATS, Checkpoint
from infer.loader.find import open_checkpoint
from infer.machine import available_memory, check_runs_on, reserved_bytes, resolve_device, resolve_dtype, use_threads
from infer.models.common import Decoder
from infer.models.registry import build_model
from infer.models.sharding import ModelShard
from infer.nn.linear import FusedLinear, Linear
from infer.nn.quantized import BITS, Quantized, QuantizedWeight, StackedWeight, describe_kinds
from infer.nn.schemes import SCHEMES, Scheme
from infer.nn.sharded import Group

AUTO = "auto"
EXACT_IN_BFLOAT16 = {torch.bfloat16, "MXFP4"}
ABOVE_4_BITS = ("Q8_1", "Q8_K")  # GGUF types without a scheme


def load_model(
    name_or_path: str | Path,
    *,
    dtype: torch.dtype | str = "auto",
    device: torch.device | str = "auto",
    quantize: str | None = None,
    context: int | None = None,
    group: Group | None = None,
) -> tuple[Decoder, ModelConfig]:
    """Load a model for inference.

    name_or_path: a folder, a GGUF file, nanoGPT's ckpt.pt, a built-in short name, or a hub id. Weights go directly into
    their final dtype on their final device: memory peaks at the model's size plus one tensor.
    dtype: what the model computes in. With "auto" on a CPU, that is float32, and quantized matrices of a GGUF file stay
    quantized; any other dtype makes them floats. In float32 on a CPU, matrices stored in bfloat16 stay in bfloat16
    (`model.float()` converts them).
    quantize: "int4" or "int8" stores the matrices in 4 or 8 bits (see `loader/load.py`), on the CPU. "auto", like None,
    keeps what the file has.
    context: the most positions of a sequence; None: the model's context, which for LongRoPE is the original one. Beyond
    that, LongRoPE's long factors are used.
    group: the processes of a tensor-parallel model, each of which loads its shard (see `infer.parallel`).
    """
    device, quantize = resolve_device(device), resolve_quantize(quantize)
    resolve_weight_dtype(dtype, device, quantize)  # refuses before anything is read
    checkpoint = open_checkpoint(name_or_path)
    config = checkpoint.config.with_context(context)
    shard = None if group is None else ModelShard(config, group)
    with torch.device("meta"):
        full = build_model(config)
        model = full if shard is None else shard.build()
    slots = checkpoint_slots(full, checkpoint.tensors, shard)
    if learned := slots.get(name := "embed_positions.weight"):  # of which only the first rows are loaded
        slots[name] = replace(learned, shape=(checkpoint.config.max_position_embeddings, *learned.shape[1:]))
    check_tensors(checkpoint, slots)
    weights = choose_weight_dtypes(model, checkpoint, dtype, device, quantize)
    check_memory(weights.nbytes(model), weights, device)
    if device.type == "cpu":
        use_threads()
    if device.type == "cpu" and weights.dtype is torch.float32:
        # Kernels are compiled now rather than between two tokens.
        if (kernels := cpu.kernels()) is not None:
            kernels.prepare(weights.schemes, experts=checkpoint.config.num_experts > 0)
        elif quantize is None:
            weights = WeightDtypes(weights.dtype)
            check_memory(weights.nbytes(model), weights, device)
        else:
            print("without compiled kernels quantized weights are slow: each GEMM dequantizes them", file=sys.stderr)
    nbytes, elements, filled = weights.nbytes(model), sum(slot.elements for slot in slots.values()), 0
    _materialize(model, device, weights)
    for name, slot in slots.items():
        progress.report(progress.LOADING, nbytes * filled // max(1, elements), nbytes)
        filled += slot.elements
        _fill(model, checkpoint, name, slot)
    progress.report(progress.LOADING, nbytes, nbytes)
    model.name = str(name_or_path)
    return model.eval(), config


def resolve_quantize(quantize: str | None) -> str | None:
    """None: weights stay as the file has them. Refuses what does not exist."""
    if quantize is not None and quantize not in (AUTO, *BITS):
        raise ValueError(f"quantize must be one of {', '.join((AUTO, *BITS))}, not {quantize!r}")
    return None if quantize == AUTO else quantize


def resolve_weight_dtype(dtype: torch.dtype | str, device: torch.device, quantize: str | None) -> torch.dtype:
    """The dtype of weights that are not quantized. Refuses a `quantize` that does not exist or fit the device."""
    quantize = resolve_quantize(quantize)
    if quantize is not None and device.type != "cpu":
        raise ValueError(f"quantized weights run on the CPU only: use device cpu, or leave {quantize} out on {device}")
    resolved = resolve_dtype(dtype, device)
    check_runs_on(device, resolved)
    return resolved


class PackedRows(NamedTuple):
    """Rows of a matrix that are stored in one scheme."""

    rows: int
    columns: int
    kind: str  # as for `QuantizedWeight`


@dataclass(frozen=True)
class WeightDtypes:
    """How each parameter is stored: in the model's dtype, unless `stored` says otherwise."""

    dtype: torch.dtype  # what the model computes in
    stored: Mapping[str, tuple[PackedRows, ...] | torch.dtype] = field(default_factory=dict)  # by parameter

    @property
    def quantized(self) -> list[PackedRows]:
        return [rows for stored in self.stored.values() if not isinstance(stored, torch.dtype) for rows in stored]

    @property
    def schemes(self) -> set[Scheme]:
        return {SCHEMES[part.kind] for part in self.quantized}

    def nbytes(self, model: Decoder) -> int:
        total = sum(part.rows * SCHEMES[part.kind].row_bytes(part.columns) for part in self.quantized)
        for name, parameter in model.named_parameters():
            stored = self.stored.get(name, self.dtype)
            total += parameter.numel() * stored.itemsize if isinstance(stored, torch.dtype) else 0
        return total

    def __str__(self) -> str:
        """What most weights are stored in, and all types of those that are quantized."""
        dtype = torch.bfloat16 if torch.bfloat16 in self.stored.values() else self.dtype
        kinds = describe_kinds((part.kind, part.rows * part.columns) for part in self.quantized)
        return kinds or str(dtype).removeprefix("torch.")


def choose_weight_dtypes(
    model: Decoder, checkpoint: Checkpoint, dtype: torch.dtype | str, device: torch.device, quantize: str | None
) -> WeightDtypes:
    """model: of that checkpoint, not yet quantized; it may be on the meta device. Others: as for `load_model`."""
    stored: dict[str, tuple[PackedRows, ...] | torch.dtype] = {}
    quantize, computed = resolve_quantize(quantize), resolve_weight_dtype(dtype, device, quantize)
    keeps_bfloat16 = device.type == "cpu" and computed is torch.float32 and cpu.expected()
    keeps_blocks = keeps_bfloat16 and dtype == "auto"
    for name, parameter in model.named_parameters() if quantize is not None or keeps_bfloat16 else ():
        module_name, _, kind = name.rpartition(".")
        module = model.get_submodule(module_name)
        if kind != "weight" or not (isinstance(module, Linear) or module is model.embed_tokens):
            continue
        rows, columns = parameter.shape
        sizes = {name: rows}
        if isinstance(module, FusedLinear) and checkpoint.stored_dtype(name) is None:
            sizes = dict(zip(part_names(module, module_name, kind), module.parts.values(), strict=True))
        dtypes = {checkpoint.stored_dtype(each) for each in sizes} - {None}  # none: of a head that is tied
        is_router = module_name.endswith("router")  # small, and the choice of experts is sensitive to it
        if is_router or (quantize is None and not (keeps_blocks and dtypes and not dtypes & set(FLOATS.values()))):
            if dtypes and dtypes <= EXACT_IN_BFLOAT16 and keeps_bfloat16:
                stored[name] = torch.bfloat16
            continue
        is_wide = module is model.embed_tokens or module is model.lm_head
        kinds = [_kind(checkpoint.stored_dtype(each), quantize, is_wide, module_name) for each in sizes]
        runs = groupby(zip(kinds, sizes.values(), strict=True), key=itemgetter(0))
        stored[name] = tuple(PackedRows(sum(size for _, size in run), columns, kind) for kind, run in runs)
    return WeightDtypes(computed, stored)


def _kind(stored: torch.dtype | str | None, quantize: str | None, is_wide: bool, module_name: str) -> str:
    """What a quantized matrix is stored as. stored: its type in the file."""
    if quantize != "int8" and stored in SCHEMES:
        return str(stored)
    from_floats = not isinstance(stored, str)
    if quantize != "int4" or is_wide or stored in ABOVE_4_BITS or (from_floats and module_name.endswith("qkv_proj")):
        return "int8"
    return "int4"


def part_names(module: nn.Module, module_name: str, kind: str) -> list[str]:
    """The names that checkpoints have for the weights or biases that a `FusedLinear` stacks."""
    parts = module.parts if isinstance(module, FusedLinear) else ()
    return [f"{module_name.rpartition('.')[0]}.{part}.{kind}" for part in parts]


@dataclass(frozen=True)
class Slot:
    """Where a checkpoint's tensor goes: the rows of a parameter from `start` on."""

    parameter: str
    start: int
    shape: tuple[int, ...]  # of the tensor
    rows: tuple[range, ...]  # of the tensor that are loaded

    @property
    def elements(self) -> int:
        return sum(map(len, self.rows)) * math.prod(self.shape[1:])


def checkpoint_slots(model: Decoder, stored: Collection[str], shard: ModelShard | None = None) -> dict[str, Slot]:
    """A slot for each tensor that a checkpoint must have, by its name there. Fused weights may be stored either way.

    model: the full model. shard: the rows to load; None: all.
    """
    slots = {}
    for name, parameter in model.named_parameters():
        module_name, _, kind = name.rpartition(".")
        module = model.get_submodule(module_name)
        sizes = {name: len(parameter)}
        if isinstance(module, FusedLinear):
            sizes = dict(zip(part_names(module, module_name, kind), module.parts.values(), strict=True))
        loaded = {each: range(size) if shard is None else shard.rows(each, size) for each, size in sizes.items()}
        if name in sizes or name in stored:
            first = accumulate(sizes.values(), initial=0)
            rows = tuple(range(at + own.start, at + own.stop) for at, own in zip(first, loaded.values(), strict=False))
            slots[name] = Slot(name, 0, tuple(parameter.shape), (range(len(parameter)),) if shard is None else rows)
            continue
        start = 0
        for each, own in loaded.items():
            slots[each] = Slot(name, start, (sizes[each], *parameter.shape[1:]), (own,))
            start += len(own)
    return slots


def check_tensors(checkpoint: Checkpoint, slots: Mapping[str, Slot]) -> None:
    """Refuse a checkpoint that does not hold exactly the model's tensors, before anything is allocated."""
    tensors = checkpoint.tensors
    unused = [name for name in tensors if name not in slots and not _is_redundant(name, checkpoint.config)]
    for what, names in (("lacks", [name for name in slots if name not in tensors]), ("has unknown", unused)):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise ValueError(f"{checkpoint.path} {what} tensors: {', '.join(names[:3])}{more}")
    for name, slot in slots.items():
        if (shape := tensors[name].shape) != slot.shape:
            raise ValueError(
                f"{checkpoint.path}: {name} has shape {list(shape)}, but the config requires {list(slot.shape)}"
            )


def _is_redundant(name: str, config: ModelConfig) -> bool:
    """Tensors that some checkpoints store although they follow from the rest."""
    return name == "lm_head.weight" and config.tie_word_embeddings


def check_memory(nbytes: int, weights: WeightDtypes, device: torch.device, processes: int = 1) -> None:
    """Refuse weights that do not fit in memory. processes: how many share the memory, each with this many bytes."""
    free = available_memory(device, processes)
    if free is not None and nbytes > free:
        cache = f", beside {reserved_bytes() / 1e9:.2f} GB for the cache" if reserved_bytes() else ""
        each = f" for each of {processes} processes" if processes > 1 else ""
        raise ValueError(
            f"the weights need {nbytes / 1e9:.2f} GB{each} in {weights}, but {free / 1e9:.2f} GB are free on "
            f"{device}{cache}"
        )


def check_shard_memory(
    name_or_path: str | Path, dtype: torch.dtype | str, device: torch.device, quantize: str | None, processes: int
) -> WeightDtypes:
    """The check of `load_model`, before several processes that share the device's memory load a shard each."""
    resolve_weight_dtype(dtype, device, quantize)  # refuses before anything is read
    checkpoint = open_checkpoint(name_or_path)
    with torch.device("meta"):
        model = build_model(checkpoint.config)
    weights = choose_weight_dtypes(model, checkpoint, dtype, device, quantize)
    check_memory(weights.nbytes(model) // processes, weights, device, processes)
    return weights


def _materialize(model: Decoder, device: torch.device, weights: WeightDtypes) -> None:
    """Allocate each parameter of a model on the meta device in its final dtype."""
    for name, parameter in list(model.named_parameters()):
        module_name, _, leaf = name.rpartition(".")
        stored = weights.stored.get(name, weights.dtype)
        weight: nn.Parameter | Quantized
        if isinstance(stored, torch.dtype):
            weight = nn.Parameter(torch.empty(parameter.shape, dtype=stored, device=device), requires_grad=False)
        else:
            parts = [QuantizedWeight(*rows, device, cpu.tile_rows()) for rows in stored]
            weight = parts[0] if len(parts) == 1 else StackedWeight(parts)
        setattr(model.get_submodule(module_name), leaf, weight)
    model.tie_weights()


def _fill(model: Decoder, checkpoint: Checkpoint, name: str, slot: Slot) -> None:
    module_name, _, leaf = slot.parameter.rpartition(".")
    weight, row = getattr(model.get_submodule(module_name), leaf), slot.start
    for rows in slot.rows:
        if isinstance(weight, Quantized):
            part, at = weight.part(row)
            for blocks in checkpoint.quantized(name, part.kind, rows):
                for scales in part.scheme.block_scales(blocks):
                    if scales is not None:
                        check_finite(checkpoint, name, scales * max(part.scheme.table, default=1))
                part.fill(at, blocks)
                at += len(blocks)
            row += len(rows)
        else:
            for block in checkpoint.blocks(name, rows):
                check_finite(checkpoint, name, weight.data[row : row + len(block)].copy_(block))
                row += len(block)


def check_finite(checkpoint: Checkpoint, name: str, weights: Tensor) -> None:
    """Refuse NaN and infinity. weights: as they are stored, since a conversion to float16 may overflow."""
    if not torch.isfinite(torch.stack(torch.aminmax(weights))).all():
        dtype = str(weights.dtype).removeprefix("torch.")
        raise ValueError(f"{checkpoint.path}: {name} holds a NaN, an infinity, or a number too large for {dtype}")
