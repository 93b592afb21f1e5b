"""The name of a model in files that hold its keys and values."""

from __future__ import annotations

import hashlib
import platform
import secrets
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from infer.backend import Backend, backend_for
from infer.nn.module import Module
from infer.version import version

PIECE = 1 << 22  # numbers of a tensor that a thread hashes at a time
SOURCES = ("backend", "cache", "models", "nn")  # packages whose code computes keys and values
UNHASHED = ("training", "name")  # attributes of modules that keys and values do not depend on
PROCESS = secrets.token_hex(8)


def fingerprint(model: Any) -> str:
    """A hash of everything that keys and values depend on, to the last bit: the config, all bytes of the weights, the
    constants of modules, the backend, and what else may change bits (docs/exactness.md).

    Hooks, and a `forward` that is not infer's, cannot be hashed: such a model gets a fingerprint that only this process
    can match.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"a {type(model).__name__} has no weights to hash")
    backend = backend_for(model)  # first: a plan may change the layout of weights
    config: Any = model.config
    config = config.with_context(1)  # keys and values do not depend on the context that is left
    found = hashlib.blake2b(f"{config} {_numerics(backend, model)} {_source()}".encode(), digest_size=16)
    for name, module in model.named_modules():
        constants = vars(module).items() if isinstance(module, Module) else ()
        plain = [
            (key, value) for key, value in constants if isinstance(value, int | float | str) and key not in UNHASHED
        ]
        code: list[Any] = [*module._forward_hooks, *module._forward_pre_hooks]
        if not (forward := module.forward).__module__.startswith(("infer.", "torch.")):
            code.append(id(getattr(forward, "__func__", forward)))
        kind = f"{type(module).__module__}.{type(module).__qualname__}"
        found.update(f"{name} {kind} {plain} {(PROCESS, code) if code else ''}".encode())
    tensors = [*model.named_parameters(), *model.named_buffers()]
    found.update(str([(name, tensor.shape, tensor.dtype) for name, tensor in tensors]).encode())
    pieces = [piece for _, tensor in tensors for piece in torch.split(tensor.detach().flatten(), PIECE)]
    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        for digest in threads.map(_digest, pieces):
            found.update(digest)
    return found.hexdigest()


def _digest(piece: Tensor) -> bytes:
    return hashlib.sha256(piece.cpu().view(torch.uint8).numpy().data).digest()  # processors have instructions for it


def _numerics(backend: Backend, model: nn.Module) -> str:
    """Versions and hardware that affect the numerical results."""
    names: list[Any] = [
        backend.name,
        backend.compiler,
        version(),
        torch.__version__,
        platform.machine(),
        torch.backends.cpu.get_cpu_capability(),
    ]
    if (device := next(model.parameters(), torch.empty(0)).device).type == "cuda":
        found = torch.cuda.get_device_properties(device)
        names += [found.name, found.major, found.minor, found.multi_processor_count]
    return " ".join(map(str, names))


@cache
def _source() -> str:
    folder = Path(__file__).parents[1]
    files = sorted(file for name in SOURCES for file in (folder / name).rglob("*.py"))
    return hashlib.blake2b(b"".join(file.read_bytes() for file in files), digest_size=16).hexdigest()
