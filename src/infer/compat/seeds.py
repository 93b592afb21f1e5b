"""Functions that exist for one seed document each; `docs/seeds.md` lists them. They wrap the engine."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from infer.cache.base import Cache, NoCache
from infer.cache.contiguous import KVCache
from infer.cache.traced import TracedCache
from infer.engine.generate import run
from infer.engine.model import Model, check_ids, check_mode, check_trace_layer, make_cache, model_device, step
from infer.engine.params import SamplingParams
from infer.engine.sequence import Sequence, token_ids
from infer.trace.predictions import choice
from infer.values import MODEL, Kind, takes

END = Kind("a token id, or -1 for none", lambda value: type(value) is int)


def allocate_kv_cache(
    *, L: int, B: int, H: int, T_max: int, D: int, device: torch.device | str, dtype: torch.dtype | str
) -> KVCache:
    """An empty cache for L layers, B rows, H key/value heads of D dimensions and T_max positions; "int8" rounds."""
    return KVCache.allocate(L, H, D, T_max, batch_size=B, dtype=dtype, device=device)


@takes(model=MODEL, eot_token_id=END)
def generate_ids_cached(
    model: Model,
    prompt_ids: Iterable[int],
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

    Returns "ids", prompt and generated, and "steps", each a dict of "token_id", "top_k" (the most likely ids with the
    model's own probabilities), "entropy" (nats) and, if a layer is traced, "attn_row" (a list of weights per head).
    """
    params = SamplingParams(temperature=temperature, top_k=top_k, max_new_tokens=max_new_tokens, seed=seed)
    recorder = _StepDicts(top_k or 50, [] if trace_layer is None else [check_trace_layer(model, trace_layer)])
    ids = _generate_ids(model, prompt_ids, eot_token_id, params, recorder=recorder, cache_dtype=cache_dtype)
    return {"ids": ids, "steps": recorder.steps}


@takes(model=MODEL, eot_token_id=END)
def generate_ids_greedy_cached(
    model: Model,
    prompt_ids: Iterable[int],
    *,
    max_new_tokens: int,
    eot_token_id: int,
    cache_dtype: str = "auto",
) -> list[int]:
    """Prompt and continuation, always the most likely token. Puts the model into eval mode."""
    params = SamplingParams(max_new_tokens=max_new_tokens)
    return _generate_ids(model, prompt_ids, eot_token_id, params, cache_dtype=cache_dtype)


@takes(model=MODEL, eot_token_id=END)
def generate_ids_greedy_full(
    model: Model, prompt_ids: Iterable[int], *, max_new_tokens: int, eot_token_id: int
) -> list[int]:
    """The same, recomputing the whole sequence at each step: the cached function must equal it."""
    params = SamplingParams(max_new_tokens=max_new_tokens)
    return _generate_ids(model, prompt_ids, eot_token_id, params, use_kv_cache=False)


@torch.no_grad()
@takes(model=MODEL)
def full_attention_matrix(
    model: Model,
    ids: Iterable[int],
    *,
    trace_layer: int,
    device: torch.device | str | None = None,
) -> Tensor:
    """What every token of the sequence attended to in a layer: weights [1, H, t, t], 0 where a key is not visible."""
    tokens = torch.tensor([token_ids(ids)], dtype=torch.int64, device=model_device(model, device))
    check_ids(model, tokens)
    context = model.config.max_position_embeddings
    if tokens.shape[1] > context:
        raise ValueError(f"{tokens.shape[1]} tokens exceed the model's context of {context}")
    check_mode(model)
    cache = TracedCache(NoCache(1, tokens.device), [check_trace_layer(model, trace_layer)], queries=None)
    step(model, cache, tokens)
    return cache.rows[trace_layer]


class _StepDicts:
    """Records what `generate_ids_cached` returns of each step."""

    def __init__(self, top_k: int, layers: list[int]) -> None:
        self.top_k = top_k
        self.layers = layers
        self.steps: list[dict[str, Any]] = []

    def wrap(self, cache: Cache) -> TracedCache:
        return TracedCache(cache, self.layers)

    def num_recorded(self, start: int, stop: int) -> int:
        return 0  # nothing of the prompt

    def add_logits(self, start: int, logits: Tensor) -> None:
        pass

    def record(
        self, tokens: list[int], logits: Tensor, cache: TracedCache, time_s: float, query: int, drafted: bool
    ) -> None:
        entropy, best = choice(logits, self.top_k)
        entry: dict[str, Any] = {"token_id": tokens[-1], "top_k": best, "entropy": entropy}
        for layer in self.layers:
            entry["attn_row"] = cache.rows[layer][0, :, query].tolist()
        self.steps.append(entry)


class _NoText:
    """Ids in, ids out: the text is not needed."""

    def decode(self, token_ids: list[int], /) -> str:
        return ""


def _generate_ids(
    model: Model,
    prompt_ids: Iterable[int],
    eot_token_id: int,
    params: SamplingParams,
    *,
    use_kv_cache: bool = True,
    recorder: _StepDicts | None = None,
    cache_dtype: str = "auto",
) -> list[int]:
    if isinstance(model, nn.Module):
        model.eval()
    eos = (eot_token_id,) if eot_token_id >= 0 else ()  # a negative id ends no text
    config = replace(model.config, eos_token_ids=eos)
    sequence = Sequence(config, _NoText(), prompt_ids, params, recorder=recorder)
    sequence.cache = make_cache(
        model, sequence.max_len, model_device(model), use_kv_cache=use_kv_cache, cache_dtype=cache_dtype
    )
    for _ in run(model, sequence):
        pass
    return sequence.token_ids
