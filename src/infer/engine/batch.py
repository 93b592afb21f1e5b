"""Several prompts at once, of whatever lengths.

Each prompt is prefilled alone; then every step decodes one token of each row that goes on. Rows have caches of their
own, so nothing is padded, and a row that is done costs nothing more.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import torch

from infer.cache.base import Cache
from infer.cache.batch import BatchCache
from infer.cache.debug import debugged
from infer.engine.generate import Model, check_mode, make_cache, model_device, step
from infer.engine.params import SamplingParams
from infer.engine.request import Request, check_chunk
from infer.engine.result import GeneratedToken, GenerationResult, collect
from infer.engine.text import Decodes
from infer.machine import available_memory


@torch.inference_mode()
def generate_batch(
    model: Model,
    tokenizer: Decodes,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams] | None = None,
    *,
    device: str | torch.device | None = None,
    prefill_chunk: int | None = None,
) -> list[GenerationResult]:
    """Generate from all prompts (token ids), in their order. params: one for all, or one each.

    A row's times are those of the steps it took part in.
    """
    device = model_device(model, device)
    check_chunk(prefill_chunk)
    check_mode(model)
    requests = _requests(model, tokenizer, prompts, params)
    caches = [make_cache(model, request.max_seq_len, device, prefill_chunk=prefill_chunk) for request in requests]
    _check_memory(caches, device)
    caches = list(map(debugged, caches))
    rows: list[list[GeneratedToken]] = []
    for request, cache in zip(requests, caches, strict=True):
        started = time.perf_counter()
        fed = torch.tensor([request.tokens], device=device)
        rows.append([request.accept(step(model, cache, fed, prefill_chunk)[0], started)])
    while going := [i for i, request in enumerate(requests) if request.finish_reason is None]:
        started = time.perf_counter()
        fed = torch.tensor([requests[i].tokens[-1:] for i in going], device=device)  # [B, 1]
        logits = step(model, BatchCache([caches[i] for i in going]), fed)
        for i, row_logits in zip(going, logits, strict=True):
            rows[i].append(requests[i].accept(row_logits, started))
    return [
        collect(request.prompt, row, cache.memory_bytes)
        for request, row, cache in zip(requests, rows, caches, strict=True)
    ]


def _requests(
    model: Model,
    tokenizer: Decodes,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams] | None,
) -> list[Request]:
    if params is None or isinstance(params, SamplingParams):
        params = [params or SamplingParams()] * len(prompts)
    if isinstance(params, Mapping):
        raise TypeError("params must be SamplingParams, or one for each prompt, not a dict")
    if len(params) != len(prompts):
        raise ValueError(f"{len(params)} SamplingParams for {len(prompts)} prompts: give one for all, or one for each")
    requests = []
    for i, (prompt, settings) in enumerate(zip(prompts, params, strict=True)):
        try:
            requests.append(Request(model.config, tokenizer, prompt, settings))
        except (ValueError, TypeError) as error:
            raise type(error)(f"prompt {i}: {error}") from None
    return requests


def _check_memory(caches: Sequence[Cache], device: torch.device) -> None:
    """Each was found to fit alone; on a CPU, memory counts as free until it is written, so ask for all together."""
    needed, free = sum(cache.memory_bytes for cache in caches), available_memory(device)
    if device.type == "cpu" and free is not None and needed > free:
        raise ValueError(
            f"the caches of {len(caches)} rows need {needed / 1e9:.2f} GB, but {free / 1e9:.2f} GB are free: "
            "generate from fewer prompts at once, or fewer tokens"
        )
