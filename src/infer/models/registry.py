"""The class of each `model_type`."""

from __future__ import annotations

from infer.config import ModelConfig
from infer.models.common import Decoder
from infer.models.exaone4 import Exaone4
from infer.models.gemma2 import Gemma2
from infer.models.gemma3 import Gemma3
from infer.models.glm4 import Glm4
from infer.models.gpt2 import GPT2
from infer.models.gpt_neox import GPTNeoX
from infer.models.gpt_oss import GptOss
from infer.models.granite import Granite
from infer.models.granitemoe import GraniteMoe
from infer.models.llama import Llama
from infer.models.mistral import Mistral
from infer.models.mixtral import Mixtral
from infer.models.olmo2 import Olmo2
from infer.models.olmoe import Olmoe
from infer.models.phi3 import Phi3
from infer.models.qwen2 import Qwen2
from infer.models.qwen3 import Qwen3
from infer.models.qwen3_moe import Qwen3Moe
from infer.models.rope_gpt import GPT
from infer.models.smollm3 import SmolLM3
from infer.models.stablelm import StableLm
from infer.models.starcoder2 import Starcoder2
from infer.values import short_repr

MODELS: dict[str, type[Decoder]] = {
    "llama": Llama,
    "mistral": Mistral,
    "ministral3": Mistral,
    "mixtral": Mixtral,
    "phi3": Phi3,
    "qwen2": Qwen2,
    "qwen3": Qwen3,
    "qwen3_moe": Qwen3Moe,
    "gemma2": Gemma2,
    "gemma3": Gemma3,
    "gemma3_text": Gemma3,
    "olmo2": Olmo2,
    "olmo3": Olmo2,
    "olmoe": Olmoe,
    "smollm3": SmolLM3,
    "granite": Granite,
    "granitemoe": GraniteMoe,
    "glm4": Glm4,
    "exaone4": Exaone4,
    "starcoder2": Starcoder2,
    "stablelm": StableLm,
    "gpt_neox": GPTNeoX,
    "gpt_oss": GptOss,
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
