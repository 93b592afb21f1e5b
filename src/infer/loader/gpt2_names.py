"""GPT-2's names for its tensors, as OpenAI, Hugging Face and nanoGPT write them, and as `Decoder` has them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

_PREFIX = re.compile(r"^(_orig_mod\.)?(transformer\.)?")  # torch.compile's, then the model's
_LAYER = re.compile(r"^h\.(\d+)\.")
_NAMES = {
    "wte": "embed_tokens",
    "wpe": "embed_positions",
    "ln_f": "norm",
    "ln_1": "input_layernorm",
    "ln_2": "post_attention_layernorm",
    "attn.c_attn": "self_attn.qkv_proj",
    "attn.c_proj": "self_attn.o_proj",
    "mlp.c_fc": "mlp.up_proj",
    "mlp.c_proj": "mlp.down_proj",
}
_BUFFERS = ("attn.bias", "attn.masked_bias")  # causal masks, which older checkpoints carry
_PRODUCTS = ("qkv_proj.weight", "o_proj.weight", "up_proj.weight", "down_proj.weight")


def decoder_name(stored: str) -> str | None:
    """transformer.h.3.attn.c_attn.weight -> layers.3.self_attn.qkv_proj.weight; None for what is no weight."""
    name = _PREFIX.sub("", stored)
    layer = _LAYER.match(name)
    rest = name[layer.end() :] if layer else name
    if rest in _BUFFERS:
        return None
    part, _, kind = rest.rpartition(".")
    renamed = f"{_NAMES.get(part, part)}.{kind}"
    return f"layers.{layer[1]}.{renamed}" if layer else renamed


def by_decoder_name(stored: Iterable[str], path: Path) -> dict[str, str]:
    """Names as `Decoder` has them -> as they are stored, of all that are weights."""
    names: dict[str, str] = {}
    for name in stored:
        renamed = decoder_name(name)
        if renamed is not None and names.setdefault(renamed, name) != name:
            raise ValueError(f"{path} holds {names[renamed]} and {name}, which are the same weight")
    return names


def stored_name(name: str) -> str:
    """The other way, as nanoGPT writes it."""
    stored = {ours: theirs for theirs, ours in _NAMES.items()}
    layer = re.match(r"^layers\.(\d+)\.", name)
    part, _, kind = name[layer.end() if layer else 0 :].rpartition(".")
    if part == "lm_head":
        return name
    return f"transformer.{f'h.{layer[1]}.' if layer else ''}{stored[part]}.{kind}"


def is_transposed(name: str) -> bool:
    """Whether Hugging Face stores this one as [in, out]: its layers multiply from the other side."""
    return name.endswith(_PRODUCTS)
