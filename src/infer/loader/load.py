"""Fill a model with a checkpoint's weights, one tensor at a time."""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor, nn

from infer import progress
from infer.backend import cpu
from infer.config import ModelConfig
from infer.loader.checkpoint import Checkpoint
from infer.loader.find import open_checkpoint
from infer.loader.widths import (
    Widths,
    choose_widths,
    form,
    may_be_narrow,
    part_names,
    resolve_weights,
    weight_bytes,
)
from infer.machine import available_memory, reserved_bytes, resolve_device, use_threads
from infer.models.common import Decoder
from infer.models.registry import build_model
from infer.models.split import Part
from infer.nn.linear import FusedLinear
from infer.nn.quantized import QuantizedWeight
from infer.nn.split import Group


def load_model(
    name_or_path: str | Path,
    *,
    dtype: torch.dtype | str = "auto",
    device: torch.device | str = "auto",
    quantize: str | None = None,
    group: Group | None = None,
) -> tuple[Decoder, ModelConfig]:
    """Load a model for inference.

    name_or_path: a folder, a GGUF file, nanoGPT's ckpt.pt, a built-in short name, or a hub id. Weights go straight into
    their final form on their final device, so that memory peaks at the model's size plus one tensor.
    dtype: what it computes in. In float32 on a CPU, matrices that are stored in bfloat16 stay so (`model.float()` gives
    plain float32 weights).
    quantize: "int4" or "int8" keeps the matrices in so many bits (see `loader/widths.py`), on the CPU.
    group: of several processes, each of which loads its own part (see `infer.parallel`).
    """
    device = resolve_device(device)
    dtype = resolve_weights(dtype, device, quantize)
    checkpoint = open_checkpoint(name_or_path)
    part = None if group is None else Part(checkpoint.config, group)
    with torch.device("meta"):
        whole = build_model(checkpoint.config)
        model = whole if part is None else part.build()
    shapes = checkpoint.shapes()
    slots = checkpoint_slots(whole, shapes, part)
    check_tensors(checkpoint, shapes, slots)
    narrow = quantize is None and may_be_narrow(dtype, device)
    widths = choose_widths(model, checkpoint, quantize, narrow=narrow)
    check_memory(weight_bytes(model, widths, dtype), form(widths, quantize, dtype), device)
    if device.type == "cpu":
        use_threads()
    # The kernels now rather than between two tokens.
    ready = device.type == "cpu" and dtype is torch.float32 and cpu.kernels() is not None
    if narrow and not ready:
        widths = {}
        check_memory(weight_bytes(model, widths, dtype), form(widths, quantize, dtype), device)
    if quantize is not None and dtype is torch.float32 and not ready:
        print("without compiled kernels quantised weights are slow: each product makes floats of them", file=sys.stderr)
    if ready:
        cpu.kernels().prepare({width for width in widths.values() if isinstance(width, int)})
    needed, elements, filled = weight_bytes(model, widths, dtype), sum(slot.elements for slot in slots.values()), 0
    _materialise(model, dtype, device, widths)
    parameters = dict(model.named_parameters())
    for name, slot in slots.items():
        progress.tell(progress.LOADING, needed * filled // max(1, elements), needed)
        filled += slot.elements
        row = slot.start
        if isinstance(widths.get(slot.parameter), int):
            weight = model.get_submodule(slot.parameter)
            assert isinstance(weight, QuantizedWeight)
            for groups in (groups for rows in slot.rows for groups in checkpoint.groups(name, weight.bits, rows)):
                check_finite(checkpoint, name, groups.scale)
                if groups.minimum is not None:
                    check_finite(checkpoint, name, groups.minimum)
                weight.fill(row, groups)
                row += len(groups.codes)
            continue
        for block in (block for rows in slot.rows for block in checkpoint.blocks(name, rows)):
            check_finite(checkpoint, name, parameters[slot.parameter].data[row : row + len(block)].copy_(block))
            row += len(block)
    progress.tell(progress.LOADING, needed, needed)
    return model.eval(), checkpoint.config


@dataclass(frozen=True)
class Slot:
    """Where a checkpoint's tensor goes: the rows of a parameter from `start` on."""

    parameter: str
    start: int
    shape: tuple[int, ...]  # of the tensor
    rows: tuple[range, ...]  # of it that are wanted

    @property
    def elements(self) -> int:
        return sum(map(len, self.rows)) * math.prod(self.shape[1:])


def checkpoint_slots(model: Decoder, stored: Collection[str], part: Part | None = None) -> dict[str, Slot]:
    """A slot for each tensor that a checkpoint must have, by its name there: stacked ones apart, or as it has them.

    model: the whole. part: of it, which gets its rows alone.
    """
    slots = {}
    for name, parameter in model.named_parameters():
        module_name, _, kind = name.rpartition(".")
        module = model.get_submodule(module_name)
        sizes = {name: len(parameter)}
        if isinstance(module, FusedLinear):
            sizes = dict(zip(part_names(module, module_name, kind), module.parts.values(), strict=True))
        wanted = {each: range(size) if part is None else part.rows(each, size) for each, size in sizes.items()}
        if name in sizes or name in stored:
            first = accumulate(sizes.values(), initial=0)
            rows = tuple(range(at + own.start, at + own.stop) for at, own in zip(first, wanted.values(), strict=False))
            slots[name] = Slot(name, 0, tuple(parameter.shape), rows)
            continue
        start = 0
        for each, own in wanted.items():
            slots[each] = Slot(name, start, (sizes[each], *parameter.shape[1:]), (own,))
            start += len(own)
    return slots


def check_tensors(checkpoint: Checkpoint, shapes: Mapping[str, tuple[int, ...]], slots: Mapping[str, Slot]) -> None:
    """Refuse a checkpoint that does not hold exactly what the model needs, before anything is allocated."""
    unused = [name for name in shapes if name not in slots and not _is_redundant(name, checkpoint.config)]
    for what, names in (("lacks", [name for name in slots if name not in shapes]), ("has unknown", unused)):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise ValueError(f"{checkpoint.path} {what} tensors: {', '.join(names[:3])}{more}")
    for name, slot in slots.items():
        if shapes[name] != slot.shape:
            raise ValueError(
                f"{checkpoint.path}: {name} has shape {list(shapes[name])}, but the config asks for {list(slot.shape)}"
            )


def check_finite(checkpoint: Checkpoint, name: str, weights: Tensor) -> None:
    """Refuse weights from which no text can come. weights: as they are kept, where a float16 may overflow."""
    if not torch.isfinite(torch.stack(torch.aminmax(weights))).all():
        dtype = str(weights.dtype).removeprefix("torch.")
        raise ValueError(f"{checkpoint.path}: {name} holds a NaN, an infinity, or a number too large for {dtype}")


def check_memory(needed: int, form: str, device: torch.device, processes: int = 1) -> None:
    """Refuse weights for which there is no room. processes: of which each needs so much."""
    free = available_memory(device, processes)
    if free is not None and needed > free:
        cache = f", beside {reserved_bytes() / 1e9:.2f} GB for the cache" if reserved_bytes() else ""
        each = f" for each of {processes} processes" if processes > 1 else ""
        raise ValueError(
            f"the weights need {needed / 1e9:.2f} GB{each} in {form}, but {free / 1e9:.2f} GB are free on "
            f"{device}{cache}"
        )


def check_split_memory(
    name_or_path: str | Path, dtype: torch.dtype | str, device: torch.device, quantize: str | None, processes: int
) -> None:
    """As `load_model` checks, before several processes that share the device's memory load a part each."""
    dtype = resolve_weights(dtype, device, quantize)
    checkpoint = open_checkpoint(name_or_path)
    with torch.device("meta"):
        model = build_model(checkpoint.config)
    widths = choose_widths(model, checkpoint, quantize, narrow=quantize is None and may_be_narrow(dtype, device))
    needed = weight_bytes(model, widths, dtype) // processes
    check_memory(needed, form(widths, quantize, dtype), device, processes)


def _is_redundant(name: str, config: ModelConfig) -> bool:
    """Tensors that some checkpoints carry although they follow from the rest."""
    return name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and config.tie_word_embeddings)


def _materialise(model: Decoder, dtype: torch.dtype, device: torch.device, widths: Widths) -> None:
    """Give each parameter of a model on the meta device memory of its own, in the form that it is to have."""
    for name, parameter in list(model.named_parameters()):
        module_name, _, leaf = name.rpartition(".")
        width = widths.get(name, dtype)
        if isinstance(width, int):
            rows, columns = parameter.shape
            weight: nn.Parameter | QuantizedWeight = QuantizedWeight(rows, columns, width, device)
        else:
            weight = nn.Parameter(torch.empty(parameter.shape, dtype=width, device=device), requires_grad=False)
        setattr(model.get_submodule(module_name), leaf, weight)
    model.tie_weights()
