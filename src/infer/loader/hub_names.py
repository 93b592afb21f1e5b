"""Short names of models on the Hugging Face hub, of the families that `infer` runs. A model is one row."""

from __future__ import annotations

from typing import NamedTuple


class HubModel(NamedTuple):
    repo: str
    megabytes: int  # of the files that are fetched, rounded to 10
    license: str
    gated: bool = False  # the hub serves it to accounts that have accepted its license


LLAMA_31, LLAMA_32, GEMMA = "Llama 3.1 Community", "Llama 3.2 Community", "Gemma Terms of Use"
HUB_MODELS = {
    "smollm2-360m": HubModel("HuggingFaceTB/SmolLM2-360M-Instruct", 730, "Apache-2.0"),
    "smollm2-1.7b": HubModel("HuggingFaceTB/SmolLM2-1.7B-Instruct", 3430, "Apache-2.0"),
    "qwen3-0.6b": HubModel("Qwen/Qwen3-0.6B", 1520, "Apache-2.0"),
    "qwen3-1.7b": HubModel("Qwen/Qwen3-1.7B", 4080, "Apache-2.0"),
    "qwen3-4b": HubModel("Qwen/Qwen3-4B", 8060, "Apache-2.0"),
    "qwen3-8b": HubModel("Qwen/Qwen3-8B", 16400, "Apache-2.0"),
    "llama-3.2-1b": HubModel("meta-llama/Llama-3.2-1B-Instruct", 2480, LLAMA_32, gated=True),
    "llama-3.2-3b": HubModel("meta-llama/Llama-3.2-3B-Instruct", 6440, LLAMA_32, gated=True),
    "llama-3.1-8b": HubModel("meta-llama/Llama-3.1-8B-Instruct", 16070, LLAMA_31, gated=True),
    "gemma-3-270m-it": HubModel("google/gemma-3-270m-it", 570, GEMMA, gated=True),
    "gemma-3-1b-it": HubModel("google/gemma-3-1b-it", 2040, GEMMA, gated=True),
    "tinyllama-1.1b": HubModel("TinyLlama/TinyLlama-1.1B-Chat-v1.0", 2200, "Apache-2.0"),
    "gpt2": HubModel("openai-community/gpt2", 550, "MIT"),
    "gpt2-medium": HubModel("openai-community/gpt2-medium", 1520, "MIT"),
    "gpt2-large": HubModel("openai-community/gpt2-large", 3250, "MIT"),
    "gpt2-xl": HubModel("openai-community/gpt2-xl", 6430, "MIT"),
}
GATED = {model.repo for model in HUB_MODELS.values() if model.gated}


def hub_id(name: str) -> str:
    """The hub id of a short name; other names as they are."""
    return HUB_MODELS[name].repo if name in HUB_MODELS else name
