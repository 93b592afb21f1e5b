"""Generation: prefill the prompt once, then decode one token per step.

`step` is one forward pass, `stream` yields tokens as they come, `generate` collects them.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from infer.cache.base import Cache, NoCache
from infer.cache.simple import KVCache
from infer.config import ModelConfig
from infer.engine.params import SamplingParams
from infer.engine.sampler import sample
from infer.engine.text import Decodes, TextStream
from infer.machine import resolve_device


class Model(Protocol):
    """What generation asks of a model."""

    config: ModelConfig

    def __call__(self, input_ids: Tensor, kv_cache: Cache | None = None) -> Tensor: ...
    def parameters(self) -> Iterator[torch.nn.Parameter]: ...


@dataclass(frozen=True)
class GeneratedToken:
    """One step of a stream. Text is what became certain with it: it may be empty, or belong to earlier tokens too."""

    token_id: int
    text: str
    time_s: float  # of the forward pass and sampling; the first one's includes the whole prefill
    finish_reason: str | None = None  # on the last: "eos" | "stop" | "length"


@dataclass(frozen=True)
class Timing:
    prefill_time_s: float
    decode_times_s: list[float] = field(default_factory=list)

    @property
    def decode_time_s(self) -> float:
        return sum(self.decode_times_s)

    @property
    def decode_tokens_per_s(self) -> float:
        """Steady speed, the first token apart; 0 if there was only that one."""
        return len(self.decode_times_s) / self.decode_time_s if self.decode_times_s else 0.0


@dataclass(frozen=True)
class GenerationResult:
    prompt_token_ids: list[int]
    token_ids: list[int]  # all that were generated, an end-of-sequence token included
    text: str
    finish_reason: str  # "eos" | "stop" | "length"; "interrupted" if the stream was left early
    timing: Timing
    cache_memory_bytes: int

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def generated_tokens(self) -> int:
        return len(self.token_ids)


def step(model: Model, cache: Cache, tokens: Tensor) -> Tensor:
    """Feed tokens [B, n] behind what the cache holds; logits [B, V] for the token to follow."""
    return model(tokens, kv_cache=cache)[:, -1]


def stream(
    model: Model,
    tokenizer: Decodes,
    prompt_token_ids: Sequence[int],
    params: SamplingParams | None = None,
    *,
    device: str | torch.device | None = None,
    use_kv_cache: bool = True,
    cache: Cache | None = None,
) -> Iterator[GeneratedToken]:
    """Generate token by token. What cannot be generated is refused here, before the first token is asked for.

    use_kv_cache=False recomputes the whole sequence at each step: slow, and the reference for all else.
    cache: one of your own instead of a fresh `KVCache`; what it holds must be the beginning of the prompt, of which
    only the rest is then prefilled. It ends up holding every token but the last generated.
    """
    params = params or SamplingParams()
    tokens = list(prompt_token_ids)
    device = _device(model, device)
    cache = _cache_for(model, tokens, params, device, use_kv_cache, cache)
    if cache.seq_len >= len(tokens):
        raise ValueError(
            f"the cache holds {cache.seq_len} positions and the prompt has {len(tokens)} tokens: nothing is left to "
            "feed; truncate the cache to what the prompt begins with, less at least one token"
        )
    return _steps(model, cache, tokens, params, TextStream(tokenizer, params.stop), device)


@torch.inference_mode()
def _steps(
    model: Model, cache: Cache, tokens: list[int], params: SamplingParams, text: TextStream, device: torch.device
) -> Iterator[GeneratedToken]:
    seed = secrets.randbits(63) if params.seed is None else params.seed
    prompt_len = len(tokens)
    finish_reason = None
    while finish_reason is None:
        started = time.perf_counter()
        # With a cache that is the prompt, then each new token alone; NoCache holds nothing, so everything.
        fed = torch.tensor([tokens[cache.seq_len :]], device=device)
        token = sample(step(model, cache, fed)[0], tokens, prompt_len, params, seed)
        elapsed = time.perf_counter() - started
        tokens.append(token)
        is_eos = token in model.config.eos_token_ids and not params.ignore_eos
        is_last = is_eos or len(tokens) - prompt_len == params.max_new_tokens
        piece = "" if is_eos else text.push(token)
        if is_last:
            piece += text.finish()
        if text.stopped:
            finish_reason = "stop"
        elif is_last:
            finish_reason = "eos" if is_eos else "length"
        yield GeneratedToken(token, piece, elapsed, finish_reason)


def generate(
    model: Model,
    tokenizer: Decodes,
    prompt_token_ids: Sequence[int],
    params: SamplingParams | None = None,
    *,
    device: str | torch.device | None = None,
    use_kv_cache: bool = True,
    cache: Cache | None = None,
) -> GenerationResult:
    """Generate to the end and return it all. The arguments are those of `stream`."""
    params = params or SamplingParams()
    # Made here, to report its size.
    cache = _cache_for(model, prompt_token_ids, params, _device(model, device), use_kv_cache, cache)
    steps = list(stream(model, tokenizer, prompt_token_ids, params, device=device, cache=cache))
    return collect(prompt_token_ids, steps, cache.memory_bytes)


def collect(prompt_token_ids: Sequence[int], steps: Sequence[GeneratedToken], cache_bytes: int) -> GenerationResult:
    """The result of a stream that has been read."""
    return GenerationResult(
        prompt_token_ids=list(prompt_token_ids),
        token_ids=[step.token_id for step in steps],
        text="".join(step.text for step in steps),
        finish_reason=steps[-1].finish_reason or "interrupted",
        timing=Timing(steps[0].time_s, [step.time_s for step in steps[1:]]),
        cache_memory_bytes=cache_bytes,
    )


def _cache_for(
    model: Model,
    tokens: Sequence[int],
    params: SamplingParams,
    device: torch.device,
    use_kv_cache: bool,
    cache: Cache | None,
) -> Cache:
    """The caller's cache, or one for this request, once the request is found to be possible."""
    if cache is not None and not use_kv_cache:
        raise ValueError("use_kv_cache=False and a cache were both given: leave one out")
    check_request(model.config, tokens, params, None if cache is None else cache.capacity)
    if cache is not None:
        return cache
    return make_cache(model, len(tokens) + params.max_new_tokens, device, use_kv_cache=use_kv_cache)


def make_cache(model: Model, max_seq_len: int, device: torch.device, *, use_kv_cache: bool = True) -> Cache:
    """The default cache for a model, or none."""
    if not use_kv_cache:
        return NoCache(1, device)
    weights = next(model.parameters(), None)
    dtype = torch.float32 if weights is None else weights.dtype
    return KVCache.from_model_config(model.config, max_seq_len, dtype=dtype, device=device)


def check_request(
    config: ModelConfig, tokens: Sequence[int], params: SamplingParams, capacity: int | None = None
) -> None:
    """Refuse what cannot be generated, before any work. capacity: of the cache, if it is there already."""
    if not tokens:
        raise ValueError("the prompt is empty: it needs at least one token")
    for where, ids in (("prompt", tokens), ("logit_bias", params.logit_bias)):
        wrong = [i for i in ids if not 0 <= i < config.vocab_size]
        if wrong:
            raise ValueError(f"token id {wrong[0]} in the {where} is outside the vocabulary 0..{config.vocab_size - 1}")
    needed = len(tokens) + params.max_new_tokens
    for what, limit in (("model's context", config.max_position_embeddings), ("cache's capacity", capacity)):
        if limit is not None and needed > limit:
            raise ValueError(
                f"{len(tokens)} prompt tokens + {params.max_new_tokens} new tokens = {needed} positions exceed the "
                f"{what} of {limit}: shorten the prompt or lower max_new_tokens"
            )


def _device(model: Model, device: str | torch.device | None) -> torch.device:
    """The model's device, which a device that is given must match."""
    weights = next(model.parameters(), None)
    own = torch.device("cpu") if weights is None else weights.device
    if device is None or device == "auto":
        return own
    asked = resolve_device(device)
    if asked.type != own.type or asked.index not in (None, own.index):
        raise ValueError(f"the model is on {own}, not on {asked}: load it there, or leave device out")
    return own
