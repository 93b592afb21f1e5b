"""How many bits each weight of a model is kept in.

"int8": all matrices in eight. "int4": in four, but the embedding and the head, which touch every token, in eight; so too
what a GGUF file keeps in five bits or more, because whoever made the file found that it needs them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from infer.loader.checkpoint import Checkpoint
from infer.models.common import Decoder
from infer.ops.linear import FusedLinear, Linear
from infer.ops.quantized import BITS, packed_bytes

Widths = dict[str, int]  # by the name of a parameter; those that are not there keep the model's dtype


def check_quantize(quantize: str | None, device: torch.device) -> None:
    if quantize is None:
        return
    if quantize not in BITS:
        raise ValueError(f"quantize must be one of {', '.join(BITS)}, or left out, not {quantize!r}")
    if device.type != "cpu":
        raise ValueError(f"quantize={quantize!r} is for the CPU: on {device} leave it out, and load in bfloat16")


def choose_widths(model: Decoder, checkpoint: Checkpoint, quantize: str | None) -> Widths:
    """model: of that checkpoint, not yet quantised; it may be on the meta device."""
    if quantize is None:
        return {}
    stored, widths = checkpoint.shapes(), {}
    for name, parameter in model.named_parameters():
        module_name, _, kind = name.rpartition(".")
        module = model.get_submodule(module_name)
        if module is model.embed_tokens or module is model.lm_head:
            widths[name] = 8
        elif isinstance(module, Linear) and kind == "weight" and parameter.dim() == 2:
            names = [part for part in part_names(module, module_name, kind) if part in stored] or [name]
            finest = max((bits for bits in map(checkpoint.bits, names) if bits < 32), default=4)
            widths[name] = 8 if quantize == "int8" else finest
    return widths


def part_names(module: Linear, module_name: str, kind: str) -> list[str]:
    """The names that checkpoints have for a module's weight or bias, if it is stacked from several."""
    parts = module.parts if isinstance(module, FusedLinear) else ()
    return [f"{module_name.rpartition('.')[0]}.{part}.{kind}" for part in parts]


def weight_bytes(model: Decoder, widths: Mapping[str, int], dtype: torch.dtype) -> int:
    return sum(
        packed_bytes(*parameter.shape, widths[name]) if name in widths else parameter.numel() * dtype.itemsize
        for name, parameter in model.named_parameters()
    )
