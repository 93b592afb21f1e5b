"""The families of models, and what was compared with a reference for each. Without torch, for `infer models`."""

from __future__ import annotations

from typing import NamedTuple


class Family(NamedTuple):
    """A row of `infer models`. tests/unit/loader/test_model_families.py finds the test behind each claim."""

    models: str
    weights: str | None = None  # the short name of a model whose published weights are compared with transformers
    gguf: bool = False  # GGUF files of small random models
    gpu: bool = False  # the GPU kernels, with plain torch
    random: bool = True  # logits of small random models, with transformers


FAMILIES = {  # by model_type
    "llama": Family("Llama 2 and 3, SmolLM 1 and 2, TinyLlama, Falcon 3, Yi", "smollm2-135m", gguf=True, gpu=True),
    "mistral": Family("Mistral 7B, Nemo, Small", gguf=True),
    "ministral3": Family("Ministral 3", gguf=True, gpu=True),
    "phi3": Family("Phi 3, 3.5 and 4", gguf=True),
    "qwen2": Family("Qwen 2 and 2.5, Coder, Math, R1 distillates", "qwen2.5-coder-0.5b", gguf=True),
    "qwen3": Family("Qwen 3, dense", gguf=True, gpu=True),
    "gemma2": Family("Gemma 2", gguf=True, gpu=True),
    "gemma3": Family("Gemma 3, text", "gemma-3-270m", gguf=True, gpu=True),
    "olmo2": Family("OLMo 2", gguf=True, gpu=True),
    "olmo3": Family("OLMo 3", gguf=True),
    "smollm3": Family("SmolLM 3", gguf=True),
    "granite": Family("Granite 3, dense", gguf=True, gpu=True),
    "glm4": Family("GLM 4, dense", gguf=True),
    "exaone4": Family("EXAONE 4", gguf=True, gpu=True),
    "starcoder2": Family("StarCoder 2", gguf=True),
    "stablelm": Family("StableLM", gguf=True),
    "gpt_neox": Family("GPT-NeoX, Pythia", gguf=True, gpu=True),
    "mixtral": Family("Mixtral", gguf=True),
    "qwen3_moe": Family("Qwen 3, mixture of experts", gguf=True, gpu=True),
    "olmoe": Family("OLMoE", gguf=True),
    "granitemoe": Family("Granite 3, mixture of experts", gguf=True),
    "gpt_oss": Family("gpt-oss", gguf=True, gpu=True),
    "gpt2": Family("GPT-2", gguf=True, gpu=True),
    "rope_gpt": Family("nanoGPT, and a small GPT with RoPE", gpu=True, random=False),
}
