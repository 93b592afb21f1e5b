"""What a model is known by, in files that hold its keys and values."""

from __future__ import annotations

import hashlib
import platform
from typing import Any

import torch
from torch import nn

from infer.backend import backend_for

SAMPLED = 64  # values of each tensor


def fingerprint(model: Any) -> str:
    """Names a model by its config, its weights, and what runs it: keys and values depend on these, to the last bit.

    Weights by their shapes, sums over all of their bits, and some of their values: no more than a read.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"a {type(model).__name__} has no weights to be known by")
    found = hashlib.blake2b(
        f"{model.config} {backend_for(model).name} {torch.__version__} {platform.machine()}".encode(), digest_size=16
    )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        flat = tensor.detach().flatten()
        some = flat[:: max(1, len(flat) // SAMPLED)][:SAMPLED].cpu().contiguous()
        bits = flat.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])
        sums = [int(part.sum(dtype=torch.int64)) for part in (bits, bits[::2], bits[::3])]
        found.update(f"{name} {list(tensor.shape)} {tensor.dtype} {sums}".encode())
        found.update(some.view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
