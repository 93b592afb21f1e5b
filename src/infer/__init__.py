"""KV-cached generation with language models: exact, readable, visible, fast."""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from infer.cache import GrowingCache, KVCache, PagedCache, PagePool, SlidingCache
    from infer.engine.batch import generate_batch
    from infer.engine.cached import (
        allocate_kv_cache,
        decode_step,
        full_attention_matrix,
        generate_ids_cached,
        generate_ids_greedy_cached,
        generate_ids_greedy_full,
        prefill,
    )
    from infer.engine.generate import generate, stream
    from infer.engine.llm import LLM
    from infer.engine.memory import CacheMemory
    from infer.engine.params import SamplingParams
    from infer.engine.result import GenerationResult
    from infer.engine.session import Session
    from infer.evaluate.perplexity import perplexity
    from infer.loader import ModelConfig, Tokenizer, load_model, render_chat_template
    from infer.trace import Trace

# How long GNU OpenMP's threads spin before they sleep; it is read when torch is loaded. By default that is a
# millisecond: on a machine that does other work too, a step of 200 parallel loops then takes ten times as long.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")

_HOMES = {
    "CacheMemory": "infer.engine.memory",
    "GenerationResult": "infer.engine.result",
    "GrowingCache": "infer.cache",
    "KVCache": "infer.cache",
    "LLM": "infer.engine.llm",
    "ModelConfig": "infer.loader",
    "PagePool": "infer.cache",
    "PagedCache": "infer.cache",
    "SamplingParams": "infer.engine.params",
    "Session": "infer.engine.session",
    "SlidingCache": "infer.cache",
    "Tokenizer": "infer.loader",
    "Trace": "infer.trace",
    "allocate_kv_cache": "infer.engine.cached",
    "decode_step": "infer.engine.cached",
    "full_attention_matrix": "infer.engine.cached",
    "generate": "infer.engine.generate",
    "generate_batch": "infer.engine.batch",
    "generate_ids_cached": "infer.engine.cached",
    "generate_ids_greedy_cached": "infer.engine.cached",
    "generate_ids_greedy_full": "infer.engine.cached",
    "load_model": "infer.loader",
    "perplexity": "infer.evaluate.perplexity",
    "prefill": "infer.engine.cached",
    "render_chat_template": "infer.loader",
    "stream": "infer.engine.generate",
}

__all__ = [
    "LLM",
    "CacheMemory",
    "GenerationResult",
    "GrowingCache",
    "KVCache",
    "ModelConfig",
    "PagePool",
    "PagedCache",
    "SamplingParams",
    "Session",
    "SlidingCache",
    "Tokenizer",
    "Trace",
    "allocate_kv_cache",
    "decode_step",
    "full_attention_matrix",
    "generate",
    "generate_batch",
    "generate_ids_cached",
    "generate_ids_greedy_cached",
    "generate_ids_greedy_full",
    "load_model",
    "perplexity",
    "prefill",
    "render_chat_template",
    "stream",
]


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: `infer --help` should not wait for torch."""
    if name == "__version__":
        from infer.version import version

        return version()
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
