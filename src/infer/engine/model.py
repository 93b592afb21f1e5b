"""What the engine asks of a model and its cache, and manual forward passes: `prefill`, `decode_step`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from infer.backend import Row, backend_for
from infer.cache.base import BaseCache, Cache, NoCache, resolve_cache_dtype, unwrap
from infer.cache.contiguous import KVCache
from infer.cache.debug import debugged
from infer.cache.ring import PREFILL_CHUNK, SlidingCache
from infer.cache.traced import TracedCache
from infer.config import ModelConfig
from infer.engine.params import check_prefill_chunk
from infer.engine.sequence import Sequence
from infer.engine.text import common_prefix
from infer.machine import resolve_device
from infer.models.common import Decoder
from infer.models.rows import ALL, LAST
from infer.nn.quantized import QuantizedWeight
from infer.parallel.tensor_parallel import sharded_cache
from infer.trace.record import Trace
from infer.values import CACHE, MODEL, NO_CONFIG, takes, value_or_type

AttentionTrace = dict[str, Any]  # "layer": its index; "attn_row": [B, H, keys], the weights of the last query


class Model(Protocol):
    """What generation asks of a model."""

    config: ModelConfig

    def __call__(self, input_ids: Tensor, kv_cache: Cache | None = None, *, all_logits: bool = False) -> Tensor: ...
    def parameters(self) -> Iterator[torch.nn.Parameter]: ...


class Unconfigured:
    """A model without a `.config`: each step computes all its tokens, as no cache can be made for it."""

    config = ModelConfig("unknown", 2**24, 1, 1, 1, 1, 1, 2**31 - 1, rope=None)  # any token, any number of positions

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self, input_ids: Tensor, kv_cache: Cache | None = None, *, all_logits: bool = False) -> Tensor:
        return self.model(input_ids)  # type: ignore[no-any-return]

    def parameters(self) -> Iterator[nn.Parameter]:
        return self.model.parameters()


def configured(model: Model | nn.Module, *, needed: bool) -> Model:
    """The model; one without a `.config` is wrapped, or refused if the config is needed."""
    if getattr(model, "config", None) is not None:
        return cast(Model, model)
    if needed:
        raise TypeError(f"{NO_CONFIG}, or set use_kv_cache=False to recompute everything at each step")
    return Unconfigured(cast(nn.Module, model))


# Manual forward passes.


@torch.no_grad()
def step(model: Model, cache: Cache, tokens: Tensor, prefill_chunk: int | None = None) -> Tensor:
    """Compute tokens [B, n] after those in the cache; logits [B, V] of the next token.

    prefill_chunk: tokens of one pass, which bounds the memory that a long prompt takes.
    """
    for chunk in _chunks(tokens, prefill_chunk):
        [logits] = backend_for(model).run([Row(cache, chunk, LAST)])
    return logits[:, -1]


@torch.no_grad()
def all_logits(model: Model, cache: Cache, tokens: Tensor) -> Tensor:
    """Compute tokens [B, n] after those in the cache; logits of every position [B, n, V]."""
    return backend_for(model).run([Row(cache, tokens, ALL)])[0]


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

    The trace is the attention row [B, H, n] of the last token in trace_layer, if return_attn_row is set.
    Chunks bound the memory of the passes, not of the logits: for a long prompt, `step` returns only the last ones.
    """
    check_prefill_chunk(prefill_chunk, has_cache=not isinstance(cache, NoCache))
    if cache.seq_len:
        raise ValueError(f"the cache must be empty before prefill, but it holds {cache.seq_len} positions")
    limit = min(cache.capacity, model.config.max_position_embeddings)
    if isinstance(prompt_ids, Tensor) and (prompt_ids.dim() != 2 or not 0 < prompt_ids.shape[1] <= limit):
        shape = list(prompt_ids.shape)
        raise ValueError(f"a prompt is [batch, 1 to {limit} tokens] for this model and cache, not {shape}")
    return _run(model, prompt_ids, cache, trace_layer, return_attn_row, prefill_chunk)


@torch.no_grad()
@takes(model=MODEL, cache=CACHE)
def decode_step(
    model: Model,
    last_token_ids: Tensor,
    cache: Cache,
    trace_layer: int | None = None,
    return_attn_row: bool = False,
) -> tuple[Tensor, Cache, AttentionTrace | None]:
    """Compute one token per row [B, 1] after those in the cache. Returns its logits [B, 1, V], cache and trace.

    The trace is the attention row [B, H, keys] of that token in trace_layer, its own key included.
    """
    if isinstance(last_token_ids, Tensor) and (last_token_ids.dim() != 2 or last_token_ids.shape[1] != 1):
        raise ValueError(f"decode_step requires exactly (B, 1) token ids, not {tuple(last_token_ids.shape)}")
    limit = min(cache.capacity, model.config.max_position_embeddings)
    if cache.seq_len >= limit:
        raise ValueError(f"cache overflow: {cache.seq_len} positions are filled, and there are {limit}")
    return _run(model, last_token_ids, cache, trace_layer, return_attn_row)


def _run(
    model: Model, ids: Tensor, cache: Cache, trace_layer: int | None, return_attn_row: bool, chunk: int | None = None
) -> tuple[Tensor, Cache, AttentionTrace | None]:
    """Check everything, then compute: logits of all positions, the cache, and the attention row."""
    check_ids(model, ids)
    check_mode(model)
    check_cache(model, cache, ids.shape[0])
    layers = [] if trace_layer is None else [check_trace_layer(model, trace_layer)]
    if return_attn_row and not layers:
        raise ValueError("return_attn_row needs a layer: give trace_layer")
    observed = debugged(cache, model.config.num_hidden_layers)
    traced = TracedCache(observed, layers) if return_attn_row else None
    passes = [all_logits(model, observed if traced is None else traced, part) for part in _chunks(ids, chunk)]
    trace = None if traced is None else {"layer": layers[0], "attn_row": traced.rows[layers[0]][:, :, -1]}
    return torch.cat(passes, dim=1), cache, trace


def check_ids(model: Model, ids: Tensor) -> None:
    vocabulary = model.config.vocab_size
    if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.dim() != 2:
        raise TypeError(f"token ids must be a tensor of integers, [batch, tokens], not {value_or_type(ids)}")
    if ids.numel() == 0:
        raise ValueError("there are no token ids to compute")
    if not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
        raise ValueError(f"the prompt has token ids outside the vocabulary 0..{vocabulary - 1}")


def check_trace_layer(model: Model, trace_layer: int) -> int:
    layers = model.config.num_hidden_layers
    if type(trace_layer) is not int or not 0 <= trace_layer < layers:
        raise ValueError(f"trace_layer must be from 0 to {layers - 1} for this model, not {trace_layer!r}")
    return trace_layer


def _chunks(tokens: Tensor, size: int | None) -> list[Tensor]:
    n = tokens.shape[1]
    size = n if size is None else size
    return [tokens[:, start : start + size] for start in range(0, n, size)]


# The cache of a sequence.


@takes(model=MODEL)
def make_cache(
    model: Model,
    max_seq_len: int,
    device: torch.device,
    *,
    use_kv_cache: bool = True,
    prefill_chunk: int | None = None,
    cache_dtype: str = "auto",
) -> Cache:
    """The default cache for a model, or none. max_seq_len: at most the model's context is used."""
    check_cache_dtype(cache_dtype, None, use_kv_cache)
    if not use_kv_cache:
        return NoCache(1, device)
    max_seq_len = min(max_seq_len, model.config.max_position_embeddings)
    dtype = cache_dtype_of(model, cache_dtype)
    if isinstance(model, Decoder) and model.group is not None:
        return sharded_cache(model, max_seq_len, dtype)
    if model.config.has_windows:
        return SlidingCache.from_model_config(
            model.config, max_seq_len, prefill_chunk=prefill_chunk or PREFILL_CHUNK, dtype=dtype, device=device
        )
    return KVCache.from_model_config(model.config, max_seq_len, dtype=dtype, device=device)


def check_cache(model: Model, cache: Cache | None, batch_size: int) -> None:
    """Refuse a cache that was made for another model or batch size."""
    if isinstance(cache, BaseCache):
        cache.check_model(model.config, batch_size, model_dtype(model), model_device(model))
        if isinstance(model, Decoder):
            cache.check_contents(model.embed_tokens)


def reset_if_outdated(cache: Cache, version: int) -> None:
    """Reset a cache that the engine has filled with another version of the model."""
    inner = unwrap(cache)
    if isinstance(inner, BaseCache):
        if inner.contents.version not in (None, version):
            cache.reset()
        inner.contents.version = version


def check_trace(model: Model, trace: Trace | None, sequence: Sequence) -> None:
    """Refuse what cannot be traced: a model of which this process has a shard has some of the heads."""
    if trace is None:
        return
    if not isinstance(trace, Trace):
        raise TypeError(f"trace must be a Trace, not {type(trace).__name__}")
    if isinstance(model, Decoder) and model.group is not None:
        raise ValueError("a trace records all heads, but each process has some of them: trace in one process")
    trace.check(model.config, sequence.num_tokens, sequence.params.max_new_tokens)


def keep_prefix(cache: Cache, prompt: list[int]) -> None:
    """Truncate a cache to the prefix that it shares with the prompt, less at least one token, to have its logits."""
    if not cache.seq_len:
        return
    inner = unwrap(cache)
    held = inner.contents.tokens(cache.seq_len) if isinstance(inner, BaseCache) else None
    if held is None:  # filled by hand: the caller says that it is a prefix of the prompt
        if cache.seq_len >= len(prompt):
            raise ValueError(
                f"the cache holds {cache.seq_len} positions and the prompt has {len(prompt)} tokens: nothing is "
                "left to compute; truncate the cache to a prefix of the prompt, less at least one token"
            )
        return
    keep = min(common_prefix(held, prompt), len(prompt) - 1)
    if keep < cache.seq_len:
        try:
            cache.truncate(keep)
        except ValueError:  # a ring no longer has the positions before
            cache.reset()


def check_cache_dtype(cache_dtype: str, cache: Cache | None, use_kv_cache: bool = True) -> None:
    """Refuse an unknown dtype, and one that the given cache does not have. "auto" fits any cache."""
    asked = resolve_cache_dtype(cache_dtype, torch.float32)
    if cache_dtype == "auto":
        return
    if not use_kv_cache:
        raise ValueError(f"cache_dtype={cache_dtype!r} needs a cache, but use_kv_cache=False: leave one out")
    cache = None if cache is None else unwrap(cache)
    if cache is not None and not (isinstance(cache, BaseCache) and cache.dtype is asked):
        held = cache.dtype if isinstance(cache, BaseCache) else type(cache).__name__
        raise ValueError(f"cache_dtype={cache_dtype!r} was given, but the given cache holds {held}")


# The model.


def weight_bytes(model: Model) -> int:
    """Bytes of a model's weights; quantized weights are buffers."""
    buffers = model.buffers() if isinstance(model, nn.Module) else ()
    return sum(tensor.nbytes for tensor in (*model.parameters(), *buffers))


def quantized_weights(model: Model) -> list[QuantizedWeight]:
    modules = model.modules() if isinstance(model, nn.Module) else ()
    return [module for module in modules if isinstance(module, QuantizedWeight)]


def check_mode(model: Model) -> None:
    """Refuse a model in training mode."""
    if isinstance(model, nn.Module) and model.training and model.config.dropout:
        raise ValueError("the model is in training mode, where dropout makes each run different: call model.eval()")


def summary(model: Model) -> str:
    """What it is, in a line."""
    if isinstance(model, Decoder):
        return model.summary()
    return f"{type(model).__name__}, {model.config.model_type}, on {model_device(model)}"


def model_name(model: Model) -> str:
    """The name or path that it was loaded by; of any other model its kind."""
    return (model.name if isinstance(model, Decoder) else "") or model.config.model_type


@torch.inference_mode()  # as generation runs: with gradients another backend does
def backend_name(model: Model) -> str:
    return backend_for(model).name


def verifies_drafts(backend: str) -> bool:
    """Whether several tokens of a sequence get the bits that each has alone: in plain torch they do not."""
    return backend in ("cpu", "gpu")


def model_dtype(model: Model) -> torch.dtype | None:
    """The dtype that a model computes in; None: it has no weights, and does not say."""
    if isinstance(model, Decoder):
        return model.dtype  # weights may be quantized
    weights = next(model.parameters(), None)
    return None if weights is None else weights.dtype


def cache_dtype_of(model: Model, cache_dtype: str) -> torch.dtype:
    """The dtype of a model's caches. cache_dtype: "auto" is the model's own."""
    return resolve_cache_dtype(cache_dtype, model_dtype(model) or torch.float32)


def model_device(model: Model, device: str | torch.device | None = None) -> torch.device:
    """The model's device. A device that is given must match it."""
    weights = next(model.parameters(), None)
    own = torch.device("cpu") if weights is None else weights.device
    if device is None or device == "auto":
        return own
    asked = resolve_device(device)
    if asked.type != own.type or asked.index not in (None, own.index):
        raise ValueError(f"the model is on {own}, not on {asked}: load it there, or leave device out")
    return own
