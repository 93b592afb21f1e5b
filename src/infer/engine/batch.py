"""Several prompts at once, of whatever lengths: a `Loop` to which everything is submitted at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from infer.cache.base import resolve_cache_dtype
from infer.cache.pool import bytes_for
from infer.engine.caches import check_cache_dtype
from infer.engine.loop import Loop, Task
from infer.engine.memory import SHARE, CacheMemory
from infer.engine.model import Model, check_mode, model_device, model_dtype
from infer.engine.params import SamplingParams
from infer.engine.request import check_chunk, samples
from infer.engine.result import GenerationResult
from infer.engine.text import Decodes
from infer.machine import available_memory
from infer.values import MODEL, TOKENIZER, Kind, takes

EACH = Kind("SamplingParams, or one for each prompt", lambda value: isinstance(value, SamplingParams | list | tuple))


@takes(model=MODEL, tokenizer=TOKENIZER, params=EACH)
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
    """Generate from all prompts (token ids), in their order; with n samples of each, these follow each other.

    params: one for all, or one each. on_full, cache_dtype: as for `stream`. prefill_chunk: tokens of prompts in a pass.
    memory: whose pages the prompts share, with each other and with what it knows; None: its own. As many prompts run at
    once as it has room for. The first prompt that fails ends them all.
    """
    device = model_device(model, device)
    check_chunk(prefill_chunk)
    check_cache_dtype(cache_dtype, None)
    check_mode(model)
    tasks = _tasks(model, tokenizer, prompts, params, on_full)
    if not tasks:
        return []
    if memory is None:
        memory = _memory_for(model, tasks, device, cache_dtype)
    elif cache_dtype != "auto" and resolve_cache_dtype(cache_dtype, torch.float32) is not memory.pool.dtype:
        raise ValueError(f"cache_dtype={cache_dtype!r} was asked for, but the memory holds {memory.pool.dtype}")
    loop = Loop(model, memory, prefill_chunk=prefill_chunk)
    for task in tasks:
        with _named(task.name, ValueError):
            loop.check(task.request)
    try:
        for task in tasks:
            loop.submit(task)
        while not loop.idle:
            ended = loop.finished
            loop.step()
            for task in tasks if loop.finished > ended else ():
                if task.error is not None:
                    with _named(task.name, type(task.error)):
                        raise task.error
    finally:
        loop.close()
    return [task.result() for task in tasks]


def _memory_for(model: Model, tasks: Sequence[Task], device: torch.device, cache_dtype: str) -> CacheMemory:
    """All that the requests can come to hold; or half of what is free, and some wait for others."""
    config, item = model.config, resolve_cache_dtype(cache_dtype, model_dtype(model) or torch.float32).itemsize
    lengths = [min(task.request.max_seq_len, config.max_position_embeddings) for task in tasks]
    copied = bytes_for(config, 1, item)  # the last page, where another has it too
    sizes = [bytes_for(config, length, item, chunk=length) + copied for length in lengths]
    free = available_memory(device)
    size = sum(sizes) if free is None else min(sum(sizes), max(int(free * SHARE), max(sizes)))
    return CacheMemory(model, size, cache_dtype=cache_dtype)


def _tasks(
    model: Model,
    tokenizer: Decodes,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams] | None,
    on_full: str,
) -> list[Task]:
    if params is None or isinstance(params, SamplingParams):
        params = [params or SamplingParams()] * len(prompts)
    if len(params) != len(prompts):
        raise ValueError(f"{len(params)} SamplingParams for {len(prompts)} prompts: give one for all, or one for each")
    tasks = []
    for i, (prompt, settings) in enumerate(zip(prompts, params, strict=True)):
        with _named(f"prompt {i}", ValueError, TypeError):
            for request in samples(model.config, tokenizer, prompt, settings, on_full=on_full):
                tasks.append(Task(request, name=f"prompt {i}"))
    return tasks


@contextmanager
def _named(name: str, *kinds: type[Exception]) -> Iterator[None]:
    """Say which prompt an error of these kinds belongs to."""
    try:
        yield
    except kinds as error:
        raise type(error)(f"{name}: {error}") from None
