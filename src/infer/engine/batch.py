"""Several prompts at once, of whatever lengths.

Prompts are packed into passes behind each other; then every step decodes one token of each row that goes on. Rows have
caches of their own, so nothing is padded, and a row that is done costs nothing more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from infer.cache.base import Cache
from infer.engine.caches import check_cache_dtype, make_cache
from infer.engine.model import Model, check_mode, model_device
from infer.engine.params import SamplingParams
from infer.engine.request import Request, check_chunk
from infer.engine.result import GeneratedToken, GenerationResult, collect
from infer.engine.runner import Runner
from infer.engine.text import Decodes


def generate_batch(
    model: Model,
    tokenizer: Decodes,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams] | None = None,
    *,
    device: str | torch.device | None = None,
    prefill_chunk: int | None = None,
    on_full: str = "error",
    cache_dtype: str = "auto",
) -> list[GenerationResult]:
    """Generate from all prompts (token ids), in their order.

    params: one for all, or one each. on_full, cache_dtype: as for `stream`.
    A row's times are those of the steps it took part in.
    """
    device = model_device(model, device)
    check_chunk(prefill_chunk)
    check_cache_dtype(cache_dtype, None)
    check_mode(model)
    requests = _requests(model, tokenizer, prompts, params, on_full)
    caches: list[Cache] = []
    for i, request in enumerate(requests):
        with _named(i, ValueError):  # no memory, if those before it have taken it
            caches.append(
                make_cache(model, request.max_seq_len, device, prefill_chunk=prefill_chunk, cache_dtype=cache_dtype)
            )
    rows: list[list[GeneratedToken]] = [[] for _ in requests]
    with Runner(model) as runner:
        names = {
            runner.admit(request, cache, prefill_chunk=prefill_chunk, name=f"prompt {i}"): i
            for i, (request, cache) in enumerate(zip(requests, caches, strict=True))
        }
        while runner.flights:
            for flight, token, _ in runner.step():
                rows[names[flight]].append(token)
    return [
        collect(request.prompt, row, cache.memory_bytes)
        for request, row, cache in zip(requests, rows, caches, strict=True)
    ]


@contextmanager
def _named(i: int, *kinds: type[Exception]) -> Iterator[None]:
    """Say which prompt an error of these kinds belongs to."""
    try:
        yield
    except kinds as error:
        raise type(error)(f"prompt {i}: {error}") from None


def _requests(
    model: Model,
    tokenizer: Decodes,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams] | None,
    on_full: str,
) -> list[Request]:
    if params is None or isinstance(params, SamplingParams):
        params = [params or SamplingParams()] * len(prompts)
    if isinstance(params, Mapping):
        raise TypeError("params must be SamplingParams, or one for each prompt, not a dict")
    if len(params) != len(prompts):
        raise ValueError(f"{len(params)} SamplingParams for {len(prompts)} prompts: give one for all, or one for each")
    requests = []
    for i, (prompt, settings) in enumerate(zip(prompts, params, strict=True)):
        with _named(i, ValueError, TypeError):
            requests.append(Request(model.config, tokenizer, prompt, settings, on_full=on_full))
    return requests
