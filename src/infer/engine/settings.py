"""With what a request runs, as JSON: a trace keeps it, so that the run can be repeated."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from infer.backend import backend_for
from infer.cache.base import BaseCache, Cache, NoCache
from infer.cache.wrapped import innermost
from infer.engine.model import Model, model_device, model_dtype
from infer.engine.request import Request
from infer.nn.quantized import QuantizedWeight
from infer.version import version


def run_settings(
    model: Model, request: Request, cache: Cache, prefill_chunk: int | None, on_full: str = "error"
) -> dict[str, Any]:
    """Everything that the text depends on, but for the weights and the prompt; and where it ran."""
    inner = innermost(cache)
    rounds = isinstance(inner, BaseCache) and inner.dtype is torch.int8
    return {
        "model_type": model.config.model_type,
        "dtype": str(model_dtype(model) or torch.float32).removeprefix("torch."),
        "quantize": _quantized(model),
        "device": str(model_device(model)),
        "backend": _backend(model),
        "kv_cache": not isinstance(inner, NoCache),
        "cache_dtype": "int8" if rounds else "auto",
        "prefill_chunk": prefill_chunk,
        "on_full": on_full,
        "params": _params(request),
        "versions": {"infer": version(), "torch": torch.__version__},
    }


@torch.inference_mode()  # as it runs: elsewhere kernels give way to what has gradients
def _backend(model: Model) -> str:
    return backend_for(model).name


def _params(request: Request) -> dict[str, Any]:
    """With the seed that was drawn, where none was given; a bias of -inf as text, since JSON has no such number."""
    bias = {str(token): x if math.isfinite(x) else str(x) for token, x in request.params.logit_bias.items()}
    stop = list(request.params.stop)
    return asdict(request.params) | {"seed": request.seed, "logit_bias": bias, "stop": stop}


def _quantized(model: Model) -> str | None:
    modules = model.modules() if isinstance(model, nn.Module) else ()
    bits = [module.bits for module in modules if isinstance(module, QuantizedWeight)]
    return f"int{min(bits)}" if bits else None  # of int4, some matrices have 8
