"""Several prompts at once, of whatever lengths.

Each prompt is prefilled alone; then every step decodes one token of each row that goes on. Rows have caches of their
own, so nothing is padded, and a row that is done costs nothing more. A row that has used up the context goes alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from infer.cache.base import Cache, NoCache
from infer.cache.batch import BatchCache
from infer.cache.debug import debugged
from infer.engine import graph
from infer.engine.generate import Model, check_cache_dtype, check_mode, make_cache, model_device, step
from infer.engine.params import SamplingParams
from infer.engine.request import NoToken, Request, check_chunk
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
    caches = [
        make_cache(model, request.max_seq_len, device, prefill_chunk=prefill_chunk, cache_dtype=cache_dtype)
        for request in requests
    ]
    _check_memory(caches, device)
    caches = list(map(debugged, caches))
    context = model.config.max_position_embeddings
    rows: list[list[GeneratedToken]] = [[] for _ in requests]
    while going := [i for i, request in enumerate(requests) if request.finish_reason is None]:
        full = {i for i in going if len(requests[i].tokens) > context}
        # One by one: what has more than a token to feed, which is prompts, and texts that no longer fit.
        alone = [i for i in going if i in full or not caches[i].seq_len]
        for i in alone:
            started = time.perf_counter()
            cache, chunk = (debugged(NoCache(1, device)), None) if i in full else (caches[i], prefill_chunk)
            fed = torch.tensor([requests[i].tokens[-context:]], device=device)
            with _named(i, NoToken):
                rows[i].append(requests[i].accept(step(model, cache, fed, chunk)[0], started))
        together = [i for i in going if i not in alone and requests[i].finish_reason is None]
        chosen = [requests[i] for i in together], [caches[i] for i in together]
        decoding = graph.decoding(model, *chosen, together) if together else None
        if decoding is not None:
            for i, token in _captured_steps(decoding, requests, together):
                rows[i].append(token)
        elif together:
            started = time.perf_counter()
            fed = torch.tensor([requests[i].tokens[-1:] for i in together], device=device)  # [B, 1]
            logits = step(model, BatchCache([caches[i] for i in together]), fed)
            for i, row_logits in zip(together, logits, strict=True):
                with _named(i, NoToken):
                    rows[i].append(requests[i].accept(row_logits, started))
    return [
        collect(request.prompt, row, cache.memory_bytes)
        for request, row, cache in zip(requests, rows, caches, strict=True)
    ]


def _captured_steps(
    decoding: graph.Decoding, requests: Sequence[Request], together: Sequence[int]
) -> Iterator[tuple[int, GeneratedToken]]:
    """As long as captured steps of this width are worth it. together: the requests that are its rows."""
    with decoding:
        started = time.perf_counter()
        for tokens in decoding:
            for row, token in tokens.items():
                i = together[row]
                with _named(i, NoToken):
                    generated = requests[i].push(token, started)
                yield i, generated
                if requests[i].finish_reason is not None:
                    decoding.end(row)
            started = time.perf_counter()
            if decoding.sparse:
                return


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


def _check_memory(caches: Sequence[Cache], device: torch.device) -> None:
    """Each was found to fit alone; on a CPU, memory counts as free until it is written, so ask for all together."""
    needed, free = sum(cache.memory_bytes for cache in caches), available_memory(device)
    if device.type == "cpu" and free is not None and needed > free:
        raise ValueError(
            f"the caches of {len(caches)} rows need {needed / 1e9:.2f} GB, but {free / 1e9:.2f} GB are free: "
            "generate from fewer prompts at once, or fewer tokens"
        )
