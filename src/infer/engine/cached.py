"""Cached inference by hand: the prompt in one call, then each token in another, with the attention row on request.

`generate` is what to use; these are its parts, for those who write their own loop or want to look inside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from infer.cache.base import Cache, NoCache
from infer.cache.contiguous import KVCache
from infer.cache.debug import debugged
from infer.cache.traced import TracedCache
from infer.engine.caches import check_fits, check_keeps, make_cache
from infer.engine.generate import Run, steps
from infer.engine.model import Model, all_logits, check_mode, chunks, model_device, step
from infer.engine.params import SamplingParams
from infer.engine.request import Request, check_chunk, token_ids
from infer.trace.predictions import choice
from infer.values import CACHE, MODEL, Kind, named, takes

END = Kind("a token id, or -1 for none", lambda value: type(value) is int)
AttentionTrace = dict[str, Any]  # "layer": its index; "attn_row": [B, H, keys], the last query's weights


def allocate_kv_cache(
    *, L: int, B: int, H: int, T_max: int, D: int, device: torch.device | str, dtype: torch.dtype | str
) -> KVCache:
    """An empty cache for L layers, B rows, H key/value heads of D dimensions and T_max positions; "int8" rounds."""
    return KVCache.allocate(L, H, D, T_max, batch_size=B, dtype=dtype, device=device)


@torch.no_grad()
@takes(model=MODEL, cache=CACHE)
def prefill(
    model: Model,
    prompt_ids: Tensor,
    cache: Cache,
    trace_layer: int | None = None,
    return_attn_row: bool = False,
    *,
    prefill_chunk: int | None = None,
) -> tuple[Tensor, Cache, AttentionTrace | None]:
    """Fill an empty cache with prompt_ids [B, n]. Returns logits of all positions [B, n, V], the cache, and the trace.

    The trace is the attention row [B, H, n] of the last token in trace_layer, if return_attn_row asks for it.
    Chunks bound the memory of the passes, not of those logits: for a long prompt, `step` returns the last ones alone.
    """
    check_chunk(prefill_chunk)
    check_keeps(not isinstance(cache, NoCache), prefill_chunk)
    if cache.seq_len:
        raise ValueError(f"the cache must be empty before prefill, but it holds {cache.seq_len} positions")
    limit = min(cache.capacity, model.config.max_position_embeddings)
    if isinstance(prompt_ids, Tensor) and (prompt_ids.dim() != 2 or not 0 < prompt_ids.shape[1] <= limit):
        shape = list(prompt_ids.shape)
        raise ValueError(f"a prompt is [batch, 1 to {limit} tokens] for this model and cache, not {shape}")
    held, traced = _traced(model, prompt_ids, cache, trace_layer, return_attn_row)
    logits = [all_logits(model, held, chunk) for chunk in chunks(prompt_ids, prefill_chunk)]
    return torch.cat(logits, dim=1), cache, _trace(traced, trace_layer)


@torch.no_grad()
@takes(model=MODEL, cache=CACHE)
def decode_step(
    model: Model,
    last_token_ids: Tensor,
    cache: Cache,
    trace_layer: int | None = None,
    return_attn_row: bool = False,
) -> tuple[Tensor, Cache, AttentionTrace | None]:
    """Feed one token of each row [B, 1] behind what the cache holds. Returns its logits [B, 1, V], cache and trace.

    The trace is the attention row [B, H, keys] of that token in trace_layer, its own key included.
    """
    if isinstance(last_token_ids, Tensor) and (last_token_ids.dim() != 2 or last_token_ids.shape[1] != 1):
        raise ValueError(f"decode_step requires exactly (B, 1) token ids, not {tuple(last_token_ids.shape)}")
    limit = min(cache.capacity, model.config.max_position_embeddings)
    if cache.seq_len >= limit:
        raise ValueError(f"cache overflow: {cache.seq_len} positions are filled, and there are {limit}")
    held, traced = _traced(model, last_token_ids, cache, trace_layer, return_attn_row)
    return step(model, held, last_token_ids)[:, None], cache, _trace(traced, trace_layer)


@takes(model=MODEL, eot_token_id=END)
def generate_ids_cached(
    model: Model,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    eot_token_id: int,
    temperature: float = 0.9,
    top_k: int | None = 50,
    trace_layer: int | None = None,
    seed: int | None = None,
    cache_dtype: str = "auto",
) -> dict[str, Any]:
    """Sample until eot_token_id, or max_new_tokens. Puts the model into eval mode.

    Returns "ids", prompt and generated, and "steps", each a dict of "token_id", "top_k" (the likeliest ids with the
    model's own probabilities), "entropy" (nats) and, if a layer is traced, "attn_row" (a list of weights per head).
    """
    params = SamplingParams(temperature=temperature, top_k=top_k, max_new_tokens=max_new_tokens, seed=seed)
    recorder = _StepDicts(top_k or 50, [] if trace_layer is None else [_layer(model, trace_layer)])
    ids = _generate_ids(model, prompt_ids, eot_token_id, params, recorder=recorder, cache_dtype=cache_dtype)
    return {"ids": ids, "steps": recorder.steps}


@takes(model=MODEL, eot_token_id=END)
def generate_ids_greedy_cached(
    model: Model,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    eot_token_id: int,
    cache_dtype: str = "auto",
) -> list[int]:
    """Prompt and continuation, always the likeliest token. Puts the model into eval mode."""
    params = SamplingParams(max_new_tokens=max_new_tokens)
    return _generate_ids(model, prompt_ids, eot_token_id, params, cache_dtype=cache_dtype)


@takes(model=MODEL, eot_token_id=END)
def generate_ids_greedy_full(
    model: Model, prompt_ids: Sequence[int], *, max_new_tokens: int, eot_token_id: int
) -> list[int]:
    """The same, recomputing the whole sequence at each step: what the cached way must equal."""
    params = SamplingParams(max_new_tokens=max_new_tokens)
    return _generate_ids(model, prompt_ids, eot_token_id, params, use_kv_cache=False)


@torch.no_grad()
@takes(model=MODEL)
def full_attention_matrix(
    model: Model,
    ids: Sequence[int],
    *,
    trace_layer: int,
    device: torch.device | str | None = None,
) -> Tensor:
    """What every token of the sequence looked at in a layer: weights [1, H, t, t], 0 where a key is not visible."""
    fed = torch.tensor([token_ids(ids)], dtype=torch.int64, device=model_device(model, device))
    _check_ids(model, fed)
    if fed.shape[1] > model.config.max_position_embeddings:
        raise ValueError(f"{fed.shape[1]} tokens exceed the model's context of {model.config.max_position_embeddings}")
    check_mode(model)
    cache = TracedCache(NoCache(1, fed.device), [_layer(model, trace_layer)], all_rows=True)
    step(model, cache, fed)
    return cache.rows[trace_layer]


class _StepDicts:
    """Records what `generate_ids_cached` returns of each step."""

    def __init__(self, top_k: int, layers: list[int]) -> None:
        self.top_k = top_k
        self.layers = layers
        self.steps: list[dict[str, Any]] = []

    def watch(self, cache: Cache) -> TracedCache:
        return TracedCache(cache, self.layers)

    def wanted(self, start: int, stop: int) -> int:
        return 0  # of the prompt nothing

    def add_logits(self, start: int, logits: Tensor) -> None:
        pass

    def record(self, tokens: Sequence[int], logits: Tensor, cache: TracedCache, time_s: float) -> None:
        entropy, best = choice(logits, self.top_k)
        entry: dict[str, Any] = {"token_id": tokens[-1], "top_k": best, "entropy": entropy}
        for layer in self.layers:
            entry["attn_row"] = cache.rows[layer][0].tolist()
        self.steps.append(entry)


class _NoText:
    """Ids in, ids out: nobody reads the text."""

    def decode(self, token_ids: list[int], /) -> str:
        return ""


def _generate_ids(
    model: Model,
    prompt_ids: Sequence[int],
    eot_token_id: int,
    params: SamplingParams,
    *,
    use_kv_cache: bool = True,
    recorder: _StepDicts | None = None,
    cache_dtype: str = "auto",
) -> list[int]:
    if isinstance(model, nn.Module):
        model.eval()
    ends = (eot_token_id,) if eot_token_id >= 0 else ()  # a negative one is no token: nothing ends the text
    request = Request(replace(model.config, eos_token_ids=ends), _NoText(), prompt_ids, params)
    cache = make_cache(
        model, request.max_seq_len, model_device(model), use_kv_cache=use_kv_cache, cache_dtype=cache_dtype
    )
    for _ in steps(Run(model, request, cache, recorder=recorder)):
        pass
    return request.tokens


def _traced(
    model: Model, ids: Tensor, cache: Cache, trace_layer: int | None, return_attn_row: bool
) -> tuple[Cache, TracedCache | None]:
    """The cache to run with, once all is checked; and the same again if it keeps the row."""
    _check_ids(model, ids)
    check_mode(model)
    check_fits(model, cache, ids.shape[0])
    layer = None if trace_layer is None else _layer(model, trace_layer)
    if not return_attn_row:
        return debugged(cache), None
    if layer is None:
        raise ValueError("return_attn_row needs to know of which layer: give trace_layer")
    traced = TracedCache(debugged(cache), [layer])
    return traced, traced


def _trace(traced: TracedCache | None, layer: int | None) -> AttentionTrace | None:
    return None if traced is None or layer is None else {"layer": layer, "attn_row": traced.rows[layer]}


def _check_ids(model: Model, ids: Tensor) -> None:
    vocabulary = model.config.vocab_size
    if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.dim() != 2:
        raise TypeError(f"token ids must be a tensor of integers, [batch, tokens], not {named(ids)}")
    if ids.numel() == 0:
        raise ValueError("there are no token ids to feed")
    if not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
        raise ValueError(f"the prompt has token ids outside the vocabulary 0..{vocabulary - 1}")


def _layer(model: Model, trace_layer: int) -> int:
    layers = model.config.num_hidden_layers
    if type(trace_layer) is not int or not 0 <= trace_layer < layers:
        raise ValueError(f"trace_layer must be from 0 to {layers - 1} for this model, not {trace_layer!r}")
    return trace_layer
