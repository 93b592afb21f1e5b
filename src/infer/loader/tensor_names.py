"""Names of tensors in checkpoints -> names in `Decoder`, which are those of Hugging Face's Llama."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path

# GGUF, without .weight and .bias.
_GGUF = {
    "token_embd": "embed_tokens",
    "position_embd": "embed_positions",
    "output_norm": "norm",
    "output": "lm_head",
}
_GGUF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.router",
    "ffn_gate_up_exps": "mlp.experts.gate_up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
_GGUF_EXPERT = re.compile(r"ffn_(gate|up|down)\.(\d+)")
# Names that differ in a family, by its architecture.
_GGUF_POST_NORMS = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_GGUF_GATE_UP = {"ffn_up": "mlp.gate_up_proj"}
_GGUF_FAMILIES = {
    "gemma2": _GGUF_POST_NORMS | {"ffn_norm": "pre_feedforward_layernorm"},
    "gemma3": _GGUF_POST_NORMS | {"ffn_norm": "pre_feedforward_layernorm"},
    "olmo2": _GGUF_POST_NORMS,
    "exaone4": _GGUF_POST_NORMS,
    "gpt-oss": {"post_attention_norm": "post_attention_layernorm"},
    "phi3": _GGUF_GATE_UP,
    "glm4": _GGUF_GATE_UP | {"post_attention_norm": "post_self_attn_layernorm", "post_ffw_norm": "post_mlp_layernorm"},
}

# Hugging Face: prefixes of the text model, and the other parts of a multimodal checkpoint.
_HF_PREFIX = re.compile(r"^((model|language_model|gpt_neox)\.)+")
_HF_OTHER_PARTS = ("vision_tower.", "multi_modal_projector.")
_HF_SCALES = ("experts.gate_up_proj_scales", "experts.down_proj_scales")  # read with their blocks
_HF_LAYER = re.compile(r"^layers\.\d+\.")
# Parts that are not named as Llama's, in any family.
_HF = {
    "embed_in": "embed_tokens",
    "embed_out": "lm_head",
    "final_layer_norm": "norm",
    "attention.query_key_value": "self_attn.qkv_proj",
    "attention.dense": "self_attn.o_proj",
    "mlp.dense_h_to_4h": "mlp.up_proj",
    "mlp.dense_4h_to_h": "mlp.down_proj",
    "mlp.c_fc": "mlp.up_proj",
    "mlp.c_proj": "mlp.down_proj",
    "mlp.gate": "mlp.router",
    "mlp.router.layer": "mlp.router",
    "mlp.input_linear": "mlp.experts.gate_up_proj",
    "mlp.output_linear": "mlp.experts.down_proj",
}
_HF_MIXTRAL = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}  # of an expert
# Of all experts in one tensor.
_HF_EXPERTS = re.compile(r"(experts\.(?:gate_up|down)_proj)(_bias|_blocks)?$")
_HF_BUFFERS = ("attention.bias", "attention.masked_bias", "rotary_emb.inv_freq")  # of older checkpoints

# GPT-2, as OpenAI, Hugging Face and nanoGPT write it, after torch.compile's prefix and the model's.
_GPT2_PREFIX = re.compile(r"^(_orig_mod\.)?(transformer\.)?")
_GPT2_LAYER = re.compile(r"^h\.(\d+)\.")
_GPT2 = {
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
_GPT2_BUFFERS = ("attn.bias", "attn.masked_bias")  # causal masks in older checkpoints
GPT2_MATRICES = ("qkv_proj.weight", "o_proj.weight", "up_proj.weight", "down_proj.weight")


def by_decoder_name(stored: Iterable[str], rename: Callable[[str], str | None], path: Path) -> dict[str, str]:
    """Names in `Decoder` -> names in the checkpoint. Tensors that `rename` gives None are left out."""
    names: dict[str, str] = {}
    for name in stored:
        renamed = rename(name)
        if renamed is not None and names.setdefault(renamed, name) != name:
            raise ValueError(f"{path} holds {names[renamed]} and {name}, which are the same weight")
    return names


def from_hf(stored: str) -> str | None:
    """model.layers.3.self_attn.q_proj.weight -> layers.3.self_attn.q_proj.weight; None for parts that are not text."""
    name = _HF_PREFIX.sub("", stored)
    if name.startswith(_HF_OTHER_PARTS) or name.endswith((*_HF_BUFFERS, *_HF_SCALES)):
        return None
    layer = _HF_LAYER.match(name)
    prefix = layer[0] if layer else ""
    rest = name.removeprefix(prefix).replace("block_sparse_moe.", "mlp.")
    rest = _HF_EXPERTS.sub(lambda found: found[1] + (".bias" if found[2] == "_bias" else ".weight"), rest)
    part, _, kind = rest.rpartition(".")
    stem, _, last = part.rpartition(".")
    part = f"{stem}.{_HF_MIXTRAL[last]}" if last in _HF_MIXTRAL else _HF.get(part, part)
    return f"{prefix}{part}.{kind}"


def from_gguf(stored: str, architecture: str) -> str:
    """blk.3.attn_q.weight -> layers.3.self_attn.q_proj.weight; an unknown name stays as it is."""
    stem, _, kind = stored.rpartition(".")
    if stem in _GGUF:
        return f"{_GGUF[stem]}.{kind}"
    prefix, _, rest = stem.partition(".")
    layer, _, part = rest.partition(".")
    if prefix == "blk" and part == "attn_sinks":
        return f"layers.{layer}.self_attn.sinks"
    if prefix == "blk" and (expert := _GGUF_EXPERT.fullmatch(part)):
        return f"layers.{layer}.mlp.experts.{expert[2]}.{expert[1]}_proj.{kind}"
    known = _GGUF_LAYER | _GGUF_FAMILIES.get(architecture, {})
    return f"layers.{layer}.{known[part]}.{kind}" if prefix == "blk" and part in known else stored


def from_gpt2(stored: str) -> str | None:
    """transformer.h.3.attn.c_attn.weight -> layers.3.self_attn.qkv_proj.weight; None for buffers."""
    name = _GPT2_PREFIX.sub("", stored)
    layer = _GPT2_LAYER.match(name)
    rest = name[layer.end() :] if layer else name
    if rest in _GPT2_BUFFERS:
        return None
    part, _, kind = rest.rpartition(".")
    renamed = f"{_GPT2.get(part, part)}.{kind}"
    return f"layers.{layer[1]}.{renamed}" if layer else renamed


def to_gpt2(name: str) -> str:
    """The inverse of `from_gpt2`, with nanoGPT's prefix."""
    stored = {ours: theirs for theirs, ours in _GPT2.items()}
    layer = re.match(r"^layers\.(\d+)\.", name)
    part, _, kind = name[layer.end() if layer else 0 :].rpartition(".")
    if part == "lm_head":
        return name
    return f"transformer.{f'h.{layer[1]}.' if layer else ''}{stored.get(part, part)}.{kind}"
