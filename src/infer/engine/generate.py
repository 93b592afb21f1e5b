"""Generation: prefill the prompt once, then decode one token per step.

`step` feeds tokens to the model, `stream` yields tokens as they come, `generate` collects them.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from infer.cache.base import BaseCache, Cache, NoCache, resolve_cache_dtype
from infer.cache.debug import debugged
from infer.cache.simple import KVCache
from infer.cache.sliding import PREFILL_CHUNK, SlidingCache
from infer.cache.traced import TracedCache
from infer.cache.wrapped import innermost
from infer.config import ModelConfig
from infer.engine import graph
from infer.engine.params import SamplingParams
from infer.engine.request import Request, check_chunk
from infer.engine.result import GeneratedToken, GenerationResult, collect
from infer.engine.text import Decodes
from infer.machine import resolve_device
from infer.models.common import Decoder
from infer.trace.record import Trace


class Model(Protocol):
    """What generation asks of a model."""

    config: ModelConfig

    def __call__(self, input_ids: Tensor, kv_cache: Cache | None = None, *, all_logits: bool = False) -> Tensor: ...
    def parameters(self) -> Iterator[torch.nn.Parameter]: ...


class Recorder(Protocol):
    """What watches a run, and of which layers it wants the attention rows."""

    @property
    def layers(self) -> Collection[int]: ...
    def record(self, tokens: Sequence[int], logits: Tensor, cache: TracedCache, time_s: float) -> None: ...


def step(model: Model, cache: Cache, tokens: Tensor, prefill_chunk: int | None = None) -> Tensor:
    """Feed tokens [B, n] behind what the cache holds; logits [B, V] for the token to follow.

    prefill_chunk: in passes of at most so many tokens, which bounds the memory that a long prompt takes.
    """
    for chunk in chunks(tokens, prefill_chunk):
        logits = model(chunk, kv_cache=cache)
    return logits[:, -1]


def stream(
    model: Model,
    tokenizer: Decodes,
    prompt_token_ids: Sequence[int],
    params: SamplingParams | None = None,
    *,
    device: str | torch.device | None = None,
    use_kv_cache: bool = True,
    cache: Cache | None = None,
    prefill_chunk: int | None = None,
    on_full: str = "error",
    trace: Trace | None = None,
    cache_dtype: str = "auto",
) -> Iterator[GeneratedToken]:
    """Generate token by token. What cannot be generated is refused here, before the first token is asked for.

    use_kv_cache=False recomputes the whole sequence at each step: slow, and the reference for all else.
    cache: one of your own instead of a fresh one; what it holds must be the beginning of the prompt, of which only the
    rest is then prefilled. It ends up holding every token but the last generated, as far as there is room.
    prefill_chunk: feed the prompt in passes of at most so many tokens; None: at once.
    on_full: what to do about more positions than the model or the cache has. "error": refuse. "recompute": once they
    are used up, feed the last ones that fit anew at each step, which no cache can help with.
    trace: records every step.
    cache_dtype: "int8" keeps keys and values in 8 bits, half of what bfloat16 takes. "auto": in the model's dtype.
    """
    return steps(
        _prepare(
            model,
            tokenizer,
            prompt_token_ids,
            params,
            device=device,
            use_kv_cache=use_kv_cache,
            cache=cache,
            prefill_chunk=prefill_chunk,
            on_full=on_full,
            trace=trace,
            cache_dtype=cache_dtype,
        )
    )


def generate(
    model: Model,
    tokenizer: Decodes,
    prompt_token_ids: Sequence[int],
    params: SamplingParams | None = None,
    *,
    device: str | torch.device | None = None,
    use_kv_cache: bool = True,
    cache: Cache | None = None,
    prefill_chunk: int | None = None,
    on_full: str = "error",
    trace: Trace | None = None,
    cache_dtype: str = "auto",
) -> GenerationResult:
    """Generate to the end and return it all. The arguments are those of `stream`."""
    run = _prepare(
        model,
        tokenizer,
        prompt_token_ids,
        params,
        device=device,
        use_kv_cache=use_kv_cache,
        cache=cache,
        prefill_chunk=prefill_chunk,
        on_full=on_full,
        trace=trace,
        cache_dtype=cache_dtype,
    )
    return collect(run.request.prompt, list(steps(run)), run.cache.memory_bytes)


class Run(NamedTuple):
    """A request with all that it takes."""

    model: Model
    request: Request
    cache: Cache  # watched
    prefill_chunk: int | None = None
    recorder: Recorder | None = None


@torch.inference_mode()
def steps(run: Run) -> Iterator[GeneratedToken]:
    """Run it token by token."""
    model, request, cache, prefill_chunk, recorder = run
    device = model_device(model)
    context = model.config.max_position_embeddings
    room = min(context, cache.capacity)
    asked = recorder is not None  # whether a captured step could take the run, which is asked once: never if traced
    while request.finish_reason is None:
        started = time.perf_counter()
        if not asked and cache.seq_len == len(request.tokens) - 1 < room:
            asked = True
            decoding = graph.decoding(model, [request], [cache])
            if decoding is not None:
                yield from captured_steps(request, decoding)
                continue
        if len(request.tokens) > room:
            # Every token moves to another position, so what the cache holds no longer holds: start over.
            cache, prefill_chunk, room = watched(NoCache(1, device), recorder), None, sys.maxsize
        # With a cache that is the prompt, then each new token alone; NoCache holds nothing, so everything.
        fed = torch.tensor([request.tokens[cache.seq_len :][-context:]], device=device)
        logits = step(model, cache, fed, prefill_chunk)[0]
        token = request.accept(logits, started)
        if isinstance(cache, TracedCache) and recorder is not None:
            recorder.record(request.tokens, logits, cache, token.time_s)
        yield token


def captured_steps(request: Request, decoding: graph.Decoding) -> Iterator[GeneratedToken]:
    """As far as captured steps go: to the end, or until the cache is full."""
    with decoding:
        started = time.perf_counter()  # what is compiled and captured once is not a token's time
        for tokens in decoding:
            yield request.push(tokens[0], started)
            if request.finish_reason is not None:
                return
            started = time.perf_counter()


def watched(cache: Cache, recorder: Recorder | None = None) -> Cache:
    """With what records its rows around it, and what prints its events, where these are asked for."""
    cache = debugged(cache)
    return cache if recorder is None else TracedCache(cache, recorder.layers)


def _prepare(
    model: Model,
    tokenizer: Decodes,
    prompt: Sequence[int],
    params: SamplingParams | None,
    *,
    device: str | torch.device | None,
    use_kv_cache: bool,
    cache: Cache | None,
    prefill_chunk: int | None,
    on_full: str,
    trace: Trace | None,
    cache_dtype: str,
) -> Run:
    """Check everything, then make the cache, unless there is one."""
    device = model_device(model, device)
    if cache is not None and not use_kv_cache:
        raise ValueError("use_kv_cache=False and a cache were both given: leave one out")
    check_cache_dtype(cache_dtype, cache, use_kv_cache)
    request = Request(model.config, tokenizer, prompt, params, None if cache is None else cache.capacity, on_full)
    check_chunk(prefill_chunk)
    check_mode(model)
    check_fits(model, cache, 1)
    if trace is not None:
        if not isinstance(trace, Trace):
            raise TypeError(f"trace must be a Trace, not {type(trace).__name__}")
        trace.check(model.config, len(request.tokens), request.params.max_new_tokens)
    check_keeps(use_kv_cache and not isinstance(cache, NoCache), prefill_chunk)
    if cache is None:
        helps = use_kv_cache and len(request.tokens) <= model.config.max_position_embeddings
        cache = (
            make_cache(model, request.max_seq_len, device, prefill_chunk=prefill_chunk, cache_dtype=cache_dtype)
            if helps
            else NoCache(1, device)
        )
    if cache.seq_len >= len(request.tokens):
        raise ValueError(
            f"the cache holds {cache.seq_len} positions and the prompt has {len(request.tokens)} tokens: nothing is "
            "left to feed; truncate the cache to what the prompt begins with, less at least one token"
        )
    if trace is not None:
        trace.start(model.config, tokenizer, request.tokens)
    return Run(model, request, watched(cache, trace), prefill_chunk, trace)


def make_cache(
    model: Model,
    max_seq_len: int,
    device: torch.device,
    *,
    use_kv_cache: bool = True,
    prefill_chunk: int | None = None,
    cache_dtype: str = "auto",
) -> Cache:
    """The default cache for a model, or none. max_seq_len: more than the model's context is never used."""
    check_cache_dtype(cache_dtype, None, use_kv_cache)
    if not use_kv_cache:
        return NoCache(1, device)
    max_seq_len = min(max_seq_len, model.config.max_position_embeddings)
    dtype = resolve_cache_dtype(cache_dtype, model_dtype(model) or torch.float32)
    if model.config.has_windows:
        return SlidingCache.from_model_config(
            model.config, max_seq_len, prefill_chunk=prefill_chunk or PREFILL_CHUNK, dtype=dtype, device=device
        )
    return KVCache.from_model_config(model.config, max_seq_len, dtype=dtype, device=device)


def weight_bytes(model: Model) -> int:
    """What a model's weights take; quantised ones are buffers."""
    buffers = model.buffers() if isinstance(model, nn.Module) else ()
    return sum(tensor.nbytes for tensor in (*model.parameters(), *buffers))


def check_mode(model: Model) -> None:
    """Refuse a model that is being trained."""
    if isinstance(model, nn.Module) and model.training and model.config.dropout:
        raise ValueError("the model is in training mode, where dropout makes each run another: call model.eval()")


def check_fits(model: Model, cache: Cache | None, batch_size: int) -> None:
    """Refuse a cache that was made for something else."""
    if isinstance(cache, BaseCache):
        cache.check_model(model.config, batch_size, model_dtype(model), model_device(model))


def check_cache_dtype(cache_dtype: str, cache: Cache | None, use_kv_cache: bool = True) -> None:
    """Refuse what is no dtype of a cache, and one that the cache, if there is one, does not have. "auto" has any."""
    asked = resolve_cache_dtype(cache_dtype, torch.float32)
    if cache_dtype == "auto":
        return
    if not use_kv_cache:
        raise ValueError(f"cache_dtype={cache_dtype!r} needs a cache, but use_kv_cache=False: leave one out")
    cache = None if cache is None else innermost(cache)
    if cache is not None and not (isinstance(cache, BaseCache) and cache.dtype is asked):
        held = cache.dtype if isinstance(cache, BaseCache) else type(cache).__name__
        raise ValueError(f"cache_dtype={cache_dtype!r} was asked for, but the cache that was given is {held}")


def check_keeps(keeps: bool, prefill_chunk: int | None) -> None:
    if prefill_chunk is not None and not keeps:
        raise ValueError("prefill_chunk needs a cache: without one every pass starts from the beginning")


def chunks(tokens: Tensor, size: int | None) -> Sequence[Tensor]:
    n = tokens.shape[1]
    if size is None or size >= n:
        return (tokens,)
    return [tokens[:, start : start + size] for start in range(0, n, size)]


def model_dtype(model: Model) -> torch.dtype | None:
    """What a model computes in; None where it does not say, and has no weights."""
    if isinstance(model, Decoder):
        return model.dtype  # weights may be kept in fewer bits
    weights = next(model.parameters(), None)
    return None if weights is None else weights.dtype


def model_device(model: Model, device: str | torch.device | None = None) -> torch.device:
    """The model's device, which a device that is given must match."""
    weights = next(model.parameters(), None)
    own = torch.device("cpu") if weights is None else weights.device
    if device is None or device == "auto":
        return own
    asked = resolve_device(device)
    if asked.type != own.type or asked.index not in (None, own.index):
        raise ValueError(f"the model is on {own}, not on {asked}: load it there, or leave device out")
    return own
