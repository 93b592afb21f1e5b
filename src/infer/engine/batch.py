"""Several prompts at once, of whatever lengths.

Prompts are packed into passes behind each other; then every step decodes one token of each row that goes on. Rows have
caches of their own, so nothing is padded, and a row that is done costs nothing more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from infer.cache.base import Cache, resolve_cache_dtype
from infer.cache.paged import PagedCache
from infer.cache.pool import NoPages, pages_for
from infer.engine.caches import check_cache_dtype, make_cache
from infer.engine.memory import CacheMemory, pass_tokens
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
        if cache_dtype != "auto" and resolve_cache_dtype(cache_dtype, torch.float32) is not memory.pool.dtype:
            raise ValueError(f"cache_dtype={cache_dtype!r} was asked for, but the memory holds {memory.pool.dtype}")
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
    page, chunk = memory.pool.page, pass_tokens(model.config, prefill_chunk)
    lengths = [min(each.max_seq_len, model.config.max_position_embeddings) for each in requests]
    needs = [pages_for(model.config, length, page, chunk or length) for length in lengths]
    others = memory.index.in_use()
    for i, (request, needed) in enumerate(zip(requests, needs, strict=True)):
        if needed > memory.pool.count - len(others):
            raise NoPages(f"prompt {i}: {request.max_seq_len} positions exceed what the memory for caches holds")
    keys = [page_keys("", request.prompt, page) for request in requests]
    rows: list[list[GeneratedToken]] = [[] for _ in requests]
    held = [0] * len(requests)
    waiting, running, changed = list(range(len(requests))), dict[int, tuple[Flight, PagedCache]](), True
    with Runner(model) as runner:
        while waiting or running:
            for i in list(waiting) if changed else []:
                request, cache = requests[i], memory.cache(lengths[i])
                if len(request.prompt) <= lengths[i]:
                    memory.recall(cache, request.prompt)
                known = cache.seq_len // page
                computed = (keys[j] for j in running if not rows[j])
                if keys[i][known:] and any(keys[i][known] in each for each in computed):
                    cache.reset()
                    continue  # its twin computes it
                if not _fits(memory, others, {i: cache} | {j: each for j, (_, each) in running.items()}, needs):
                    if running:
                        cache.reset()
                        break
                    _forget_last_page(cache)
                running[i] = runner.admit(request, cache, prefill_chunk=chunk, name=f"prompt {i}"), cache
                waiting.remove(i)
            flights = {flight: i for i, (flight, _) in running.items()}
            changed = False
            for flight, token, _ in runner.step():
                i = flights[flight]
                cache = running[i][1]
                if not rows[i]:
                    memory.keep_prompt(cache)
                    changed = True
                rows[i].append(token)
                held[i] = cache.memory_bytes
                if token.finish_reason is not None:
                    del running[i]
                    memory.keep(cache)
                    cache.reset()
                    changed = True
    return [collect(request.prompt, row, size) for request, row, size in zip(requests, rows, held, strict=True)]


def _fits(
    memory: CacheMemory, others: np.ndarray[Any, Any], caches: Mapping[int, PagedCache], needs: Sequence[int]
) -> bool:
    """Whether there are pages for all that these rows may come to hold. others: pages that are held elsewhere."""
    in_use = np.unique(np.concatenate([others, *(cache.pages[cache.pages >= 0] for cache in caches.values())]))
    # Each may have to copy its last page, which others hold.
    to_come = sum(max(0, needs[i] - cache.held) + len(cache.groups) for i, cache in caches.items())
    return len(in_use) + to_come <= memory.pool.count


def _forget_last_page(cache: PagedCache) -> None:
    """Where there is no page to copy it to."""
    try:
        cache.truncate(cache.seq_len // cache.pool.page * cache.pool.page)
    except ValueError:  # a window has lost what comes before
        cache.reset()


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
