"""How each weight of a model is kept.

In float32 on a CPU, matrices that a checkpoint has in bfloat16 stay so, where there are kernels: these widen them as
they multiply, so that a step gives the same numbers and reads half the memory. (float16 takes an instruction that is
slow on many cores: widening it at each step takes longer than reading twice the bytes.)

Quantised, "int8": all matrices in eight bits. "int4": in four, but the embedding and the head, which touch every
token, in eight; so too what a GGUF file keeps in five bits or more, because whoever made the file found that it needs
them; and, of checkpoints in floats, the products for q, k and v: a tenth of the weights, and half of what rounding them
all would cost (Gemma 3 270M's perplexity, if its layers are rounded from floats: +17 % with them in four bits, +9 % in
eight).
"""

from __future__ import annotations

import torch
from torch import nn

from infer.backend import cpu
from infer.loader.checkpoint import Checkpoint
from infer.machine import check_runs_on, resolve_dtype
from infer.models.common import Decoder
from infer.nn.linear import FusedLinear, Linear
from infer.nn.quantized import BITS, packed_bytes

# By the name of a parameter: its bits where it is quantised, or a dtype of its own. The rest have the model's dtype.
Widths = dict[str, int | torch.dtype]


def resolve_weights(dtype: torch.dtype | str, device: torch.device, quantize: str | None) -> torch.dtype:
    """The dtype of what is not quantised, once it is clear that the rest can be."""
    if quantize is not None and quantize not in BITS:
        raise ValueError(f"quantize must be one of {', '.join(BITS)}, or left out, not {quantize!r}")
    if quantize is not None and device.type != "cpu":
        raise ValueError(
            f"quantised weights run on the CPU alone: ask for device cpu, or leave {quantize} out on {device}"
        )
    resolved = resolve_dtype(dtype, device)
    check_runs_on(device, resolved)
    return resolved


def choose_widths(model: Decoder, checkpoint: Checkpoint, quantize: str | None, *, narrow: bool = False) -> Widths:
    """model: of that checkpoint, not yet quantised; it may be on the meta device. narrow: see `may_be_narrow`."""
    widths: Widths = {}
    if quantize is None and not narrow:
        return widths
    for name, _ in model.named_parameters():
        module_name, _, kind = name.rpartition(".")
        module = model.get_submodule(module_name)
        if kind != "weight" or not (isinstance(module, Linear) or module is model.embed_tokens):
            continue
        parts = part_names(module, module_name, kind)
        if quantize is None:
            if {checkpoint.is_bfloat16(each) for each in [name, *parts]} - {None} == {True}:
                widths[name] = torch.bfloat16
        elif module is model.embed_tokens or module is model.lm_head:
            widths[name] = 8
        else:
            stored_bits = map(checkpoint.bits, [name, *parts])
            rounded = 8 if module_name.endswith("qkv_proj") else 4
            bits = max((bits for bits in stored_bits if bits < 32), default=rounded)
            widths[name] = 8 if quantize == "int8" else bits
    return widths


def may_be_narrow(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether kernels should multiply with matrices of bfloat16, if they are there once they have been compiled."""
    return device.type == "cpu" and dtype is torch.float32 and cpu.expected()


def part_names(module: nn.Module, module_name: str, kind: str) -> list[str]:
    """The names that checkpoints have for a module's weight or bias, if it is stacked from several."""
    parts = module.parts if isinstance(module, FusedLinear) else ()
    return [f"{module_name.rpartition('.')[0]}.{part}.{kind}" for part in parts]


def weight_bytes(model: Decoder, widths: Widths, dtype: torch.dtype) -> int:
    total = 0
    for name, parameter in model.named_parameters():
        width = widths.get(name, dtype)
        if isinstance(width, int):
            total += packed_bytes(parameter.shape[0], parameter.shape[1], width)
        else:
            total += parameter.numel() * width.itemsize
    return total


def form(widths: Widths, quantize: str | None, dtype: torch.dtype) -> str:
    """What most of the weights are kept in, in words."""
    kept = torch.bfloat16 if torch.bfloat16 in widths.values() else dtype
    return quantize or str(kept).removeprefix("torch.")
