"""Generation: prefill the prompt once, then decode one token per step.

`stream` yields tokens as they come, `generate` collects them. Both check everything first (`_prepare`), then drive one
request through `Runner.step`, which feeds the model what the cache does not hold yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from infer.cache.base import Cache, NoCache
from infer.cache.debug import debugged
from infer.cache.traced import TracedCache
from infer.engine.caches import check_cache_dtype, check_fits, check_keeps, keep_prefix, make_cache
from infer.engine.model import Model, check_mode, check_traceable, configured, model_device
from infer.engine.params import OTHER_NAMES, SamplingParams
from infer.engine.request import Request, check_chunk
from infer.engine.result import GeneratedToken, GenerationResult, collect
from infer.engine.runner import PromptLogits, Runner
from infer.engine.settings import run_settings
from infer.engine.text import Decodes
from infer.trace.record import Trace
from infer.values import CACHE, MODEL, TOKENIZER, says_unknown, takes

_SAMPLING = OTHER_NAMES | {field.name: field.name for field in fields(SamplingParams)}


@says_unknown({other: f"write SamplingParams({name}=...)" for other, name in _SAMPLING.items()})
@dataclass(frozen=True)
class RunOptions:
    """The options of `stream`."""

    device: str | torch.device | None = None
    use_kv_cache: bool = True
    cache: Cache | None = None
    prefill_chunk: int | None = None
    on_full: str = "error"
    trace: Trace | None = None
    cache_dtype: str = "auto"


class Recorder(PromptLogits, Protocol):
    """What watches a run."""

    def watch(self, cache: Cache) -> TracedCache: ...  # with the rows that it wants
    def record(self, tokens: Sequence[int], logits: Tensor, cache: TracedCache, time_s: float) -> None: ...


@takes(model=MODEL, tokenizer=TOKENIZER, cache=CACHE)
def stream(
    model: Model,
    tokenizer: Decodes,
    prompt_token_ids: Sequence[int],
    params: SamplingParams | None = None,
    **options: Any,
) -> Iterator[GeneratedToken]:
    """Generate token by token. What cannot be generated is refused here, before the first token is asked for.

    Options, of which what is generated depends on none:

    - `device`: the model's own, which one that is given must match.
    - `use_kv_cache`: False recomputes the whole sequence at each step: slow, and the reference for all else.
    - `cache`: one of your own instead of a fresh one. What it holds of the prompt's beginning is kept, and the rest
      prefilled. It ends up holding every token but the last generated, as far as there is room.
    - `cache_dtype`: "int8" keeps keys and values in 8 bits; "auto": in the model's dtype.
    - `prefill_chunk`: feed the prompt in passes of at most so many tokens; None: at once.
    - `on_full`: what to do about more positions than the model or the cache has. "error": refuse. "recompute": once
      they are used up, feed the last ones that fit again at each step, which no cache can help with.
    - `trace`: a `Trace` that records every step.
    """
    run = _prepare(model, tokenizer, prompt_token_ids, params, RunOptions(**options))
    if run.request.prompt_logprobs is not None:
        raise ValueError("a stream has no place for prompt_logprobs: `generate` and `LLM` give them")
    return steps(run)


@takes(model=MODEL, tokenizer=TOKENIZER, cache=CACHE)
def generate(
    model: Model,
    tokenizer: Decodes,
    prompt_token_ids: Sequence[int],
    params: SamplingParams | None = None,
    **options: Any,
) -> GenerationResult:
    """Generate to the end and return it all. Arguments and options are those of `stream`."""
    run = _prepare(model, tokenizer, prompt_token_ids, params, RunOptions(**options))
    tokens, request = list(steps(run)), run.request
    return collect(
        request.prompt,
        tokens,
        run.cache.memory_bytes,
        seed=request.seed,
        prompt_logprobs=request.prompt_logprobs,
    )


class Run(NamedTuple):
    """A request with all that it takes."""

    model: Model
    request: Request
    cache: Cache
    prefill_chunk: int | None = None
    recorder: Recorder | None = None


def steps(run: Run) -> Iterator[GeneratedToken]:
    """Run it token by token."""
    model, request, cache, prefill_chunk, recorder = run
    with Runner(model) as runner:
        flight = runner.admit(request, cache, prefill_chunk=prefill_chunk, watch=watching(recorder), scores=recorder)
        while request.finish_reason is None:
            for _, chosen, logits, started in runner.step():
                token = request.push(chosen, started)
                if recorder is not None and logits is not None and isinstance(flight.cache, TracedCache):
                    recorder.record(request.tokens, logits, flight.cache, token.time_s)
                yield token


def watching(recorder: Recorder | None = None) -> Callable[[Cache], Cache]:
    """What wraps a cache: what prints its events, and what records its rows, where these are asked for."""
    if recorder is None:
        return debugged
    return lambda cache: recorder.watch(debugged(cache))


def _prepare(
    model: Model, tokenizer: Decodes, prompt: Sequence[int], params: SamplingParams | None, options: RunOptions
) -> Run:
    """Check everything, then make the cache, unless there is one."""
    model = configured(model, needed=options.use_kv_cache or options.trace is not None)
    device, cache, trace, chunk = (
        model_device(model, options.device),
        options.cache,
        options.trace,
        options.prefill_chunk,
    )
    if cache is not None and not options.use_kv_cache:
        raise ValueError("use_kv_cache=False and a cache were both given: leave one out")
    check_cache_dtype(options.cache_dtype, cache, options.use_kv_cache)
    capacity = None if cache is None else cache.capacity
    request = Request(model.config, tokenizer, prompt, params, capacity, options.on_full)
    if request.params.n != 1:
        raise ValueError(f"n={request.params.n}: this gives one text; `LLM` and `generate_batch` give several")
    check_chunk(chunk)
    check_mode(model)
    check_fits(model, cache, 1)
    if trace is not None:
        if not isinstance(trace, Trace):
            raise TypeError(f"trace must be a Trace, not {type(trace).__name__}")
        check_traceable(model)
        trace.check(model.config, len(request.tokens), request.params.max_new_tokens)
    check_keeps(options.use_kv_cache and not isinstance(cache, NoCache), chunk)
    if cache is None:
        helps = options.use_kv_cache and len(request.tokens) <= model.config.max_position_embeddings
        cache = (
            make_cache(model, request.max_seq_len, device, prefill_chunk=chunk, cache_dtype=options.cache_dtype)
            if helps
            else NoCache(1, device)
        )
    if request.prompt_logprobs is not None:
        cache.reset()  # all positions have to be computed
    if len(request.tokens) <= min(cache.capacity, model.config.max_position_embeddings):
        keep_prefix(cache, request.tokens)
    if trace is not None:
        settings = run_settings(model, request, cache, chunk, options.on_full)
        trace.start(model.config, tokenizer, request.tokens, cache.seq_len, settings)
    return Run(model, request, cache, chunk, trace)
