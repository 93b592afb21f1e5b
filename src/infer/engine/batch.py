"""Several prompts at once, of whatever lengths.

Prompts are packed into passes behind each other; then every step decodes one token of each row that goes on. Rows have
caches of their own, so nothing is padded, and a row that is done costs nothing more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from infer.cache.base import Cache
from infer.cache.paged import PagedCache
from infer.cache.pool import NoPages, pages_for
from infer.cache.ring import PREFILL_CHUNK
from infer.engine.caches import check_cache_dtype, make_cache
from infer.engine.memory import CacheMemory
from infer.engine.model import Model, check_mode, model_device
from infer.engine.params import SamplingParams
from infer.engine.request import Request, check_chunk
from infer.engine.result import GeneratedToken, GenerationResult, collect
from infer.engine.runner import Flight, Runner
from infer.engine.store import page_keys
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
    memory: CacheMemory | None = None,
) -> list[GenerationResult]:
    """Generate from all prompts (token ids), in their order.

    params: one for all, or one each. on_full, cache_dtype: as for `stream`.
    memory: whose pages prompts that begin alike share, and as many run at once as it has room for; None: each prompt
    has a contiguous cache of its own.
    A row's times are those of the steps it took part in.
    """
    device = model_device(model, device)
    check_chunk(prefill_chunk)
    check_cache_dtype(cache_dtype, None)
    check_mode(model)
    requests = _requests(model, tokenizer, prompts, params, on_full)
    if memory is not None:
        return _generate_in_pages(model, requests, memory, prefill_chunk)
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


def _generate_in_pages(
    model: Model, requests: Sequence[Request], memory: CacheMemory, prefill_chunk: int | None
) -> list[GenerationResult]:
    """Rows are admitted in their order, as pages allow; one whose beginning another is computing waits for it."""
    if memory.model is not model:
        raise ValueError("the memory is of another model: keys and values are each model's own")
    page, chunk = memory.pool.page, prefill_chunk or (PREFILL_CHUNK if model.config.has_windows else None)
    for i, request in enumerate(requests):
        if pages_for(model.config, request.max_seq_len, page) > memory.pool.count:
            raise NoPages(f"prompt {i}: {request.max_seq_len} positions exceed what the memory for caches holds")
    rows: list[list[GeneratedToken]] = [[] for _ in requests]
    held = [0] * len(requests)
    waiting, running = deque(range(len(requests))), dict[int, tuple[Flight, PagedCache]]()
    with Runner(model) as runner:
        while waiting or running:
            prefilling = {
                key
                for i, (_, cache) in running.items()
                if not rows[i]
                for key in page_keys("", requests[i].prompt, page)
            }
            for i in list(waiting):
                request, cache = requests[i], memory.cache(requests[i].max_seq_len)
                known = memory.recall(cache, request.prompt)
                keys = page_keys("", request.prompt, page)
                if keys[known // page : known // page + 1] and keys[known // page] in prefilling:
                    continue  # a twin computes it
                if running and not _fits(model, memory, cache, request, running, requests):
                    break
                flight = runner.admit(request, cache, prefill_chunk=chunk, name=f"prompt {i}")
                running[i] = flight, cache
                prefilling.update(keys)
                waiting.remove(i)
            flights = {flight: i for i, (flight, _) in running.items()}
            for flight, token, _ in runner.step():
                i = flights[flight]
                if not rows[i]:
                    memory.keep_prompt(running[i][1])
                rows[i].append(token)
                held[i] = running[i][1].memory_bytes
            for i in [i for i, (flight, _) in running.items() if flight not in runner.flights]:
                _, cache = running.pop(i)
                memory.keep(cache)
                cache.reset()
    return [collect(request.prompt, row, size) for request, row, size in zip(requests, rows, held, strict=True)]


def _fits(
    model: Model,
    memory: CacheMemory,
    cache: PagedCache,
    request: Request,
    running: Mapping[int, tuple[Flight, PagedCache]],
    requests: Sequence[Request],
) -> bool:
    """Whether there are pages for all that these rows may still come to hold."""
    rows = [(cache, request), *((other, requests[i]) for i, (_, other) in running.items())]
    in_use = np.unique(np.concatenate([each.pages[each.pages >= 0] for each, _ in rows]))
    to_come = sum(
        max(0, pages_for(model.config, each.max_seq_len, memory.pool.page) - own.held) + len(own.groups)
        for own, each in rows
    )
    return len(in_use) + to_come <= memory.pool.count


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
