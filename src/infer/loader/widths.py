"""How many bits each weight of a model is kept in.

"int8": all matrices in eight. "int4": in four, but the embedding and the head, which touch every token, in eight; so
too what a GGUF file keeps in five bits or more, because whoever made the file found that it needs them; and, of
checkpoints in floats, the products for q, k and v: a tenth of the weights, and half of what rounding them all would
cost (Gemma 3 270M's perplexity, if its layers are rounded from floats: +17 % with them in four bits, +9 % in eight).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from infer.loader.checkpoint import Checkpoint
from infer.machine import resolve_dtype
from infer.models.common import Decoder
from infer.ops.linear import FusedLinear, Linear
from infer.ops.quantized import BITS, packed_bytes

Widths = dict[str, int]  # by the name of a parameter; those that are not there keep the model's dtype


def resolve_weights(dtype: torch.dtype | str, device: torch.device, quantize: str | None) -> torch.dtype:
    """The dtype of what is not quantised, once it is clear that the rest can be."""
    if quantize is None:
        return resolve_dtype(dtype, device)
    if quantize not in BITS:
        raise ValueError(f"quantize must be one of {', '.join(BITS)}, or left out, not {quantize!r}")
    if device.type != "cpu":
        raise ValueError(
            f"quantised weights run on the CPU alone: ask for device cpu, or leave {quantize} out on {device}"
        )
    # The kernels that multiply quantised weights take float32.
    return torch.float32 if dtype == "auto" else resolve_dtype(dtype, device)


def choose_widths(model: Decoder, checkpoint: Checkpoint, quantize: str | None) -> Widths:
    """model: of that checkpoint, not yet quantised; it may be on the meta device."""
    if quantize is None:
        return {}
    widths = {}
    for name, parameter in model.named_parameters():
        module_name, _, kind = name.rpartition(".")
        module = model.get_submodule(module_name)
        if module is model.embed_tokens or module is model.lm_head:
            widths[name] = 8
        elif isinstance(module, Linear) and kind == "weight" and parameter.dim() == 2:
            stored = map(checkpoint.bits, [name, *part_names(module, module_name, kind)])
            rounded = 8 if module_name.endswith("qkv_proj") else 4
            widths[name] = 8 if quantize == "int8" else max((bits for bits in stored if bits < 32), default=rounded)
    return widths


def part_names(module: Linear, module_name: str, kind: str) -> list[str]:
    """The names that checkpoints have for a module's weight or bias, if it is stacked from several."""
    parts = module.parts if isinstance(module, FusedLinear) else ()
    return [f"{module_name.rpartition('.')[0]}.{part}.{kind}" for part in parts]


def weight_bytes(model: Decoder, widths: Mapping[str, int], dtype: torch.dtype) -> int:
    return sum(
        packed_bytes(parameter.shape[0], parameter.shape[1], widths[name])
        if name in widths
        else parameter.numel() * dtype.itemsize
        for name, parameter in model.named_parameters()
    )
