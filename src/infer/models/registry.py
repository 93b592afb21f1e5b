"""The class of each `model_type`."""

from __future__ import annotations

from infer.config import ModelConfig
from infer.models.common import Decoder
from infer.models.gemma3 import Gemma3
from infer.models.gpt2 import GPT2
from infer.models.llama import Llama
from infer.models.qwen2 import Qwen2
from infer.models.qwen3 import Qwen3
from infer.models.rope_gpt import GPT
from infer.values import short_repr

MODELS: dict[str, type[Decoder]] = {
    "llama": Llama,
    "qwen2": Qwen2,
    "qwen3": Qwen3,
    "gemma3": Gemma3,
    "gemma3_text": Gemma3,
    "gpt2": GPT2,
    "rope_gpt": GPT,
}


def check_supported(model_type: object) -> None:
    if not isinstance(model_type, str) or model_type not in MODELS:
        raise ValueError(
            f"architecture {short_repr(model_type)} is not supported; supported: {', '.join(sorted(MODELS))}"
        )


def build_model(config: ModelConfig) -> Decoder:
    check_supported(config.model_type)
    return MODELS[config.model_type](config)
