"""The settings of a run in words."""

from __future__ import annotations

from typing import Any

from infer.trace.data import TraceData

RUN = {
    "model": "model",
    "model_type": "family",
    "dtype": "computed in",
    "quantize": "quantisation",
    "device": "device",
    "backend": "kernels",
    "chat": "chat template",
    "system": "system message",
    "thinking": "thinking",
}
FIRST = ("temperature", "seed", "max_new_tokens")  # of the sampling settings
LEFT_OUT = ("n", "logprobs", "prompt_logprobs")  # a trace is of one text, and these do not change it
CONSTRAINTS = ("json_schema", "regex", "grammar")  # which few runs have
CACHE = {
    "kv_cache": "KV cache",
    "cache_dtype": "cache dtype",
    "prefill_chunk": "prefill chunk",
    "on_full": "beyond the context",
    "top_k": "alternatives kept",
    "prompt_rows": "prompt rows kept",
}


def shown_settings(trace: TraceData) -> list[tuple[str, str]]:
    """Names and values, as texts: a browser's numbers would round a seed of 64 bits."""
    settings = trace.settings
    params = {
        name: value
        for name, value in settings.get("params", {}).items()
        if name not in LEFT_OUT and (value is not None or name not in CONSTRAINTS)
    }
    order = [name for name in FIRST if name in params] + [name for name in params if name not in FIRST]
    return [
        *((name, _shown(key, settings[key])) for key, name in RUN.items() if key in settings),
        *((name.replace("_", " "), _shown(name, params[name])) for name in order),
        *((name, _shown(key, settings[key])) for key, name in CACHE.items() if key in settings),
        *((name, str(version)) for name, version in settings.get("versions", {}).items()),
    ]


def _shown(name: str, value: Any) -> str:
    if name == "top_k" and value in (None, 0):
        return "off"
    if value is None or value in ([], {}, ""):
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(repr, value))
    if isinstance(value, dict):
        return ", ".join(f"{key}: {each}" for key, each in value.items())
    return str(value)
