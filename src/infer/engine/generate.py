"""Generation: compute the prompt, then decode one token per step. Read this first.

`stream` yields tokens as they are generated, `generate` collects them, `generate_batch` does so for several prompts.
Each makes a `Sequence` per text and calls `Engine.step`, which schedules tokens, runs them and commits the next ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Collection
from dataclasses import dataclass, fields
from typing import TypedDict, Unpack

import torch

from infer.backend import ModelVersion
from infer.cache.base import Cache, NoCache
from infer.cache.pool import OutOfPages, bytes_for
from infer.engine.draft import Drafter
from infer.engine.drafters import Speculate, drafter_of
from infer.engine.engine import Engine
from infer.engine.memory import DEFAULT_MEMORY_FRACTION, CacheMemory
from infer.engine.model import (
    Model,
    cache_dtype_of,
    check_cache,
    check_cache_dtype,
    check_mode,
    check_trace,
    configured,
    keep_prefix,
    make_cache,
    model_device,
    reset_if_outdated,
)
from infer.engine.params import OTHER_NAMES, SamplingParams, check_prefill_chunk
from infer.engine.result import GeneratedToken, GenerationResult, collect
from infer.engine.sequence import NoToken, Sequence, make_sequences, named, params_of_each
from infer.engine.text import Detokenizer, SupportsDecode
from infer.machine import available_memory
from infer.models.common import Decoder
from infer.trace.record import Trace
from infer.values import ANY_MODEL, CACHE, MODEL, TOKENIZER, Kind, keywords_of, suggests_keywords, takes

_SAMPLING = OTHER_NAMES | {field.name: field.name for field in fields(SamplingParams)}
EACH = Kind("SamplingParams, or one for each prompt", lambda value: isinstance(value, SamplingParams | list | tuple))


@suggests_keywords({other: f"write SamplingParams({name}=...)" for other, name in _SAMPLING.items()})
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
    speculate: Speculate = None


class RunKeywords(TypedDict, total=False):
    """The fields of `RunOptions` as keywords of functions, for type checkers and editors."""

    device: str | torch.device | None
    use_kv_cache: bool
    cache: Cache | None
    prefill_chunk: int | None
    on_full: str
    trace: Trace | None
    cache_dtype: str
    speculate: Speculate


@takes(model=ANY_MODEL, tokenizer=TOKENIZER, cache=CACHE)
@keywords_of(RunOptions)
def stream(
    model: Model,
    tokenizer: SupportsDecode,
    prompt_token_ids: Collection[int],
    params: SamplingParams | None = None,
    **options: Unpack[RunKeywords],
) -> Iterator[GeneratedToken]:
    """Generate token by token. What cannot be generated is refused here, before the first token.

    Options; only `cache_dtype` and `on_full` can change the text:

    - `device`: must match the model's.
    - `use_kv_cache`: False recomputes the whole sequence at each step: slow, and the reference for everything else.
    - `cache`: your own, instead of a fresh one. The prefix of the prompt that it holds is kept, and the rest
      prefilled. In the end it holds every token but the last, up to its capacity.
    - `cache_dtype`: "int8" keeps keys and values in 8 bits; "auto": in the model's dtype.
    - `prefill_chunk`: compute the prompt in passes of at most this many tokens; None: in one pass.
    - `on_full`: if the text needs more positions than the model or the cache has: "error" refuses; "recompute":
      when the context is full, recompute the last tokens at every step, without a cache.
    - `trace`: a `Trace` that records every step.
    - `speculate`: "ngram", a draft model or its name, which loads it, a drafter or a function: what drafts tokens,
      several of which are verified at once.
    """
    if isinstance(params, SamplingParams) and params.prompt_logprobs is not None:
        raise ValueError("a stream does not return prompt_logprobs: use `generate` or `LLM`")
    return _start(model, tokenizer, prompt_token_ids, params, RunOptions(**options))[1]


@takes(model=ANY_MODEL, tokenizer=TOKENIZER, cache=CACHE)
@keywords_of(RunOptions)
def generate(
    model: Model,
    tokenizer: SupportsDecode,
    prompt_token_ids: Collection[int],
    params: SamplingParams | None = None,
    **options: Unpack[RunKeywords],
) -> GenerationResult:
    """Generate to the end and return everything. Arguments and options are those of `stream`."""
    sequence, tokens = _start(model, tokenizer, prompt_token_ids, params, RunOptions(**options))
    cache, steps = sequence.cache, list(tokens)
    return collect(
        sequence.prompt,
        steps,
        0 if cache is None else cache.memory_bytes,
        seed=sequence.seed,
        prompt_logprobs=sequence.prompt_logprobs,
        schema=sequence.params.schema,
        model=sequence.model_name,
        drafted=sequence.num_drafted,
        accepted=sequence.num_accepted,
    )


def run(
    model: Model,
    sequence: Sequence,
    prefill_chunk: int | None = None,
    on_full: str = "error",
    drafter: Drafter | None = None,
) -> Iterator[GeneratedToken]:
    """Run one sequence, with its own cache, token by token."""
    text = Detokenizer(sequence.tokenizer, sequence.params.stop)
    with Engine(model, prefill_chunk=prefill_chunk, on_full=on_full, drafter=drafter) as engine:
        if sequence.finish_reason is None:
            engine.submit(sequence)
        while not engine.is_idle:
            num_read = len(sequence.token_times)
            engine.resync_with_cache(sequence)
            engine.step()
            engine.runner.sync(sequence)
            new = range(num_read, len(sequence.token_times))
            for at in new:
                yield sequence.read(at, text, time_s=sequence.step_time_s / len(new))
            if sequence.error is not None:
                raise sequence.error


def _start(
    model: Model, tokenizer: SupportsDecode, prompt: Collection[int], params: SamplingParams | None, options: RunOptions
) -> tuple[Sequence, Iterator[GeneratedToken]]:
    """Check everything, then make the cache, unless one is given."""
    cache, trace, chunk = options.cache, options.trace, options.prefill_chunk
    model = configured(model, needed=options.use_kv_cache or trace is not None)
    device = model_device(model, options.device)
    if cache is not None and not options.use_kv_cache:
        raise ValueError("use_kv_cache=False and a cache were both given: leave one out")
    if options.speculate is not None and not options.use_kv_cache:
        raise ValueError("use_kv_cache=False and speculate were both given: drafts need the cache")
    check_cache_dtype(options.cache_dtype, cache, options.use_kv_cache)
    sequence = Sequence(model.config, tokenizer, prompt, params, cache=cache, on_full=options.on_full, recorder=trace)
    if sequence.params.n != 1:
        raise ValueError(f"n={sequence.params.n}: this gives one text; `LLM` and `generate_batch` give several")
    check_prefill_chunk(chunk, has_cache=options.use_kv_cache and not isinstance(cache, NoCache))
    check_mode(model)
    check_cache(model, cache, 1)
    check_trace(model, trace, sequence)
    drafter = drafter_of(options.speculate, tokenizer, device)
    context = model.config.max_position_embeddings
    if cache is None and options.use_kv_cache and sequence.num_tokens <= context:
        cache = make_cache(model, sequence.max_len, device, prefill_chunk=chunk, cache_dtype=options.cache_dtype)
    elif cache is None:
        cache = NoCache(1, device)
    if sequence.prompt_logprobs is not None:
        cache.reset()  # all positions have to be computed
    if isinstance(model, Decoder):
        reset_if_outdated(cache, ModelVersion(model).number())
    if sequence.num_tokens <= min(cache.capacity, context):
        keep_prefix(cache, sequence.token_ids)
    sequence.cache = cache
    return sequence, run(model, sequence, chunk, options.on_full, drafter)


@takes(model=MODEL, tokenizer=TOKENIZER, params=EACH)
def generate_batch(
    model: Model,
    tokenizer: SupportsDecode,
    prompts: Collection[Collection[int]],
    params: SamplingParams | Collection[SamplingParams] | None = None,
    *,
    device: str | torch.device | None = None,
    prefill_chunk: int | None = None,
    on_full: str = "error",
    cache_dtype: str = "auto",
    memory: CacheMemory | None = None,
) -> list[GenerationResult]:
    """Generate from all prompts (token ids), in their order; the n samples of a prompt follow each other.

    params: one for all, or one each. on_full, cache_dtype: see `stream`. prefill_chunk: prompt tokens of one pass.
    memory: whose pages the prompts share, with each other and with earlier ones; None: a fresh one. As many prompts
    run at once as fit into it. The first prompt that fails ends them all.
    """
    device, dtype = model_device(model, device), cache_dtype_of(model, cache_dtype)
    sequences = list[Sequence]()
    own = params_of_each(prompts, SamplingParams() if params is None else params)
    for i, (prompt, each) in enumerate(zip(prompts, own, strict=True)):
        with named(f"prompt {i}", ValueError, TypeError):
            sequences += make_sequences(model.config, tokenizer, prompt, each, on_full=on_full, name=f"prompt {i}")
    if not sequences:
        return []
    if memory is None:
        memory = _memory_for(model, sequences, device, cache_dtype)
    elif cache_dtype != "auto" and dtype is not memory.pool.dtype:
        raise ValueError(f"cache_dtype={cache_dtype!r} was given, but the memory holds {memory.pool.dtype}")
    with Engine(model, memory, prefill_chunk=prefill_chunk, on_full=on_full) as engine:
        for sequence in sequences:
            with named(sequence.name, ValueError):
                engine.check(sequence)
        for sequence in sequences:
            engine.submit(sequence)
        while not engine.is_idle:
            num_finished = engine.num_finished
            engine.step()
            for sequence in sequences if engine.num_finished > num_finished else ():
                if sequence.error is not None:
                    with named(sequence.name, NoToken, OutOfPages):
                        raise sequence.error
    return [sequence.result() for sequence in sequences]


def _memory_for(model: Model, sequences: list[Sequence], device: torch.device, cache_dtype: str) -> CacheMemory:
    """Memory for all sequences at full length; or half of what is free, and some wait for others."""
    config, item = model.config, cache_dtype_of(model, cache_dtype).itemsize
    lengths = [min(sequence.max_len, config.max_position_embeddings) for sequence in sequences]
    copied = bytes_for(config, 1, item)  # the last page, if it is shared
    sizes = [bytes_for(config, length, item, chunk=length) + copied for length in lengths]
    free = available_memory(device, release=True)
    size = sum(sizes) if free is None else min(sum(sizes), max(int(free * DEFAULT_MEMORY_FRACTION), max(sizes)))
    return CacheMemory(model, size, cache_dtype=cache_dtype)
