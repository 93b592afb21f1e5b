"""KV-cached generation with language models: exact, readable, visible, fast."""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from infer.cache import GrowingCache, KVCache, PagedCache, PagePool, SlidingCache
    from infer.config import ModelConfig
    from infer.engine.generate import generate, generate_batch, stream
    from infer.engine.llm import LLM
    from infer.engine.memory import CacheMemory
    from infer.engine.model import decode_step, prefill
    from infer.engine.params import SamplingParams
    from infer.engine.result import GenerationResult
    from infer.engine.session import Session
    from infer.evaluate.perplexity import perplexity
    from infer.loader.chat import render_chat_template
    from infer.loader.load import load_model
    from infer.loader.tokenizer import Tokenizer
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
    "ModelConfig": "infer.loader.find",  # which sets its reader
    "PagePool": "infer.cache",
    "PagedCache": "infer.cache",
    "SamplingParams": "infer.engine.params",
    "Session": "infer.engine.session",
    "SlidingCache": "infer.cache",
    "Tokenizer": "infer.loader.tokenizer",
    "Trace": "infer.trace",
    "decode_step": "infer.engine.model",
    "generate": "infer.engine.generate",
    "generate_batch": "infer.engine.generate",
    "load_model": "infer.loader.load",
    "perplexity": "infer.evaluate.perplexity",
    "prefill": "infer.engine.model",
    "render_chat_template": "infer.loader.chat",
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
    "decode_step",
    "generate",
    "generate_batch",
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
