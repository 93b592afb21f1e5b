"""Tiny models in each format, written field by field so that any field can be another."""

from __future__ import annotations

import json
import pickle
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import decoders, models, pre_tokenizers

WIDTH, LAYERS, HEADS, VOCABULARY = 32, 1, 2, 40
CHARACTERS = "\n abcdefghijklmnopqrstuvwxyz.,:;!?'-&$3"
TOKENS = ["<s>", "</s>", "Ġ", "Ċ", *CHARACTERS[2:]][:VOCABULARY]
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "head_dim": WIDTH // HEADS,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "layer_types": ["full_attention"],
    "sliding_window": None,
    "bos_token_id": 0,
    "eos_token_id": [1],
    "dtype": "float32",
}
GEMMA3 = {
    "model_type": "gemma3_text",
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 8,
    "sliding_window_pattern": 2,
    "query_pre_attn_scalar": 16,
    "rope_local_base_freq": 1e4,
    "rope_scaling": None,
    "layer_types": None,
}
TOKENIZER_CONFIG = {
    "bos_token": "<s>",
    "eos_token": {"content": "</s>", "special": True},
    "chat_template": "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}",
}


def tokenizer_json() -> dict[str, Any]:
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(TOKENS)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    contents: dict[str, Any] = json.loads(tokenizer.to_str())
    return contents


def weights(prefix: str = "model.") -> dict[str, torch.Tensor]:
    """Those of a Llama by Hugging Face's names."""
    generator = torch.Generator().manual_seed(0)
    layer = {f"self_attn.{name}_proj": (WIDTH, WIDTH) for name in "qkvo"}
    layer |= {f"mlp.{name}_proj": (WIDTH, WIDTH) for name in ("gate", "up", "down")}
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens": (VOCABULARY, WIDTH), "norm": (WIDTH,)}
    for i in range(LAYERS):
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
        shapes |= {f"layers.{i}.{name}_layernorm": (WIDTH,) for name in ("input", "post_attention")}
    return {f"{prefix}{name}.weight": torch.rand(shape, generator=generator) - 0.5 for name, shape in shapes.items()}


def write_folder(
    folder: Path, config: Mapping[str, Any] | None = None, tensors: Mapping[str, torch.Tensor] | None = None
) -> Path:
    """A Hugging Face folder, its weights in one file."""
    folder.mkdir(parents=True, exist_ok=True)
    contents = {
        "config.json": CONFIG | dict(config or {}),
        "generation_config.json": {"eos_token_id": [1], "temperature": 0.6},
        "tokenizer.json": tokenizer_json(),
        "tokenizer_config.json": TOKENIZER_CONFIG,
    }
    for name, values in contents.items():
        (folder / name).write_text(json.dumps(values))
    save_file(dict(weights() if tensors is None else tensors), folder / "model.safetensors")
    return folder


def write_index(folder: Path, file: Any = "model-1.safetensors") -> Path:
    """The same with the weights in a file that the index names."""
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(weights(), file)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


# GGUF

UINT8, INT32, UINT32, FLOAT32, BOOL, STRING, ARRAY, UINT64 = 0, 5, 4, 6, 7, 8, 9, 10
CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
F32, Q4_0, I32 = 0, 2, 26

GGUF_NAMES = {
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def metadata() -> dict[str, tuple[int, Any]]:
    """By key: a type and a value; of an array, the type of its elements too."""
    return {
        "general.architecture": (STRING, "llama"),
        "general.alignment": (UINT32, 32),
        "llama.context_length": (UINT32, 64),
        "llama.embedding_length": (UINT32, WIDTH),
        "llama.block_count": (UINT32, LAYERS),
        "llama.feed_forward_length": (UINT32, WIDTH),
        "llama.attention.head_count": (UINT32, HEADS),
        "llama.attention.head_count_kv": (UINT32, HEADS),
        "llama.attention.layer_norm_rms_epsilon": (FLOAT32, 1e-5),
        "llama.rope.freq_base": (FLOAT32, 1e4),
        "llama.rope.dimension_count": (UINT32, WIDTH // HEADS),
        "llama.vocab_size": (UINT32, VOCABULARY),
        "split.count": (UINT32, 1),
        "tokenizer.ggml.model": (STRING, "gpt2"),
        "tokenizer.ggml.pre": (STRING, "gpt-2"),
        "tokenizer.ggml.tokens": (ARRAY, (STRING, TOKENS)),
        "tokenizer.ggml.token_type": (ARRAY, (INT32, [3, 3] + [1] * (VOCABULARY - 2))),
        "tokenizer.ggml.merges": (ARRAY, (STRING, ["! !"][:0])),
        "tokenizer.ggml.bos_token_id": (UINT32, 0),
        "tokenizer.ggml.eos_token_id": (UINT32, 1),
        "tokenizer.ggml.add_bos_token": (BOOL, True),
        "tokenizer.chat_template": (STRING, TOKENIZER_CONFIG["chat_template"]),
    }


def sentencepiece() -> dict[str, tuple[int, Any]]:
    tokens = ["<unk>", "<s>", "</s>", "▁", *CHARACTERS.replace(" ", "")][:VOCABULARY]
    return {
        "tokenizer.ggml.model": (STRING, "llama"),
        "tokenizer.ggml.tokens": (ARRAY, (STRING, tokens)),
        "tokenizer.ggml.scores": (ARRAY, (FLOAT32, [-float(i) for i in range(len(tokens))])),
        "tokenizer.ggml.token_type": (ARRAY, (INT32, [2, 3, 3] + [1] * (len(tokens) - 3))),
        "tokenizer.ggml.unknown_token_id": (UINT32, 0),
    }


Tensors = dict[str, tuple[tuple[int, ...], int, bytes]]  # dimensions, type and bytes by name


def gguf_tensors(values: Mapping[str, torch.Tensor] | None = None) -> Tensors:
    found = {}
    for name, tensor in (weights("") if values is None else values).items():
        stem = name.removesuffix(".weight")
        if stem.startswith("layers."):
            _, layer, part = stem.split(".", 2)
            stored = f"blk.{layer}.{GGUF_NAMES[part]}.weight"
        else:
            stored = f"{GGUF_NAMES[stem]}.weight"
        found[stored] = tuple(reversed(tensor.shape)), F32, tensor.numpy().tobytes()
    return found


def gguf_bytes(
    keys: Mapping[str, tuple[int, Any]] | None = None,
    tensors: Tensors | None = None,
    *,
    version: int = 3,
    tensor_count: int | None = None,
    key_count: int | None = None,
    fields: list[tuple[int, str]] | None = None,
) -> bytes:
    """A GGUF file. fields: gets the offset and the struct code of each number of its header."""
    keys, tensors = metadata() if keys is None else keys, gguf_tensors() if tensors is None else tensors
    out = bytearray(b"GGUF")

    def pack(code: str, *values: Any) -> None:
        for value in values:
            if fields is not None:
                fields.append((len(out), code))
            out.extend(struct.pack(f"<{code}", value))

    def pack_string(text: str | bytes) -> None:
        data = text.encode() if isinstance(text, str) else text
        pack("Q", len(data))
        out.extend(data)

    def pack_value(kind: int, value: Any) -> None:
        if kind == STRING:
            pack_string(value)
        elif kind == ARRAY:
            element, entries = value
            pack("I", element)
            pack("Q", len(entries))
            for entry in entries:
                pack_value(element, entry)
        else:
            pack(CODES[kind], value)

    pack("I", version)
    pack("Q", len(tensors) if tensor_count is None else tensor_count, len(keys) if key_count is None else key_count)
    for key, (kind, value) in keys.items():
        pack_string(key)
        pack("I", kind)
        pack_value(kind, value)
    data = bytearray()
    for name, (dimensions, kind, stored) in tensors.items():
        pack_string(name)
        pack("I", len(dimensions))
        pack("Q", *dimensions)
        pack("I", kind)
        pack("Q", len(data))
        data += stored + bytes(-len(stored) % 32)
    return bytes(out) + bytes(-len(out) % 32) + bytes(data)


# nanoGPT

ARGS = {"n_layer": LAYERS, "n_head": HEADS, "n_embd": WIDTH, "block_size": 64, "vocab_size": VOCABULARY, "bias": False}


def gpt_weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {"wte": (VOCABULARY, WIDTH), "wpe": (64, WIDTH), "ln_f": (WIDTH,)}
    for i in range(LAYERS):
        shapes |= {f"h.{i}.ln_1": (WIDTH,), f"h.{i}.ln_2": (WIDTH,)}
        shapes |= {f"h.{i}.attn.c_attn": (3 * WIDTH, WIDTH), f"h.{i}.attn.c_proj": (WIDTH, WIDTH)}
        shapes |= {f"h.{i}.mlp.c_fc": (4 * WIDTH, WIDTH), f"h.{i}.mlp.c_proj": (WIDTH, 4 * WIDTH)}
    return {f"transformer.{name}.weight": torch.rand(s, generator=generator) - 0.5 for name, s in shapes.items()}


def write_nanogpt(folder: Path, /, **contents: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    whole = {"model": gpt_weights(), "model_args": ARGS, "config": {"dataset": "x"}, "iter_num": 1}
    torch.save(whole | contents, folder / "ckpt.pt")
    characters = CHARACTERS[:VOCABULARY]
    stoi = {character: i for i, character in enumerate(characters)}
    meta = {"vocab_size": len(stoi), "stoi": stoi, "itos": dict(enumerate(characters))}
    (folder / "meta.pkl").write_bytes(pickle.dumps(meta))
    return folder / "ckpt.pt"


# Values


def paths_of(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to each value inside a JSON value; of a long list or dict, to the first and last few."""
    if path:
        yield path
    entries = (
        list(value.items()) if isinstance(value, dict) else list(enumerate(value)) if isinstance(value, list) else []
    )
    for key, inner in entries if len(entries) <= 30 else [*entries[:3], *entries[-2:]]:
        yield from paths_of(inner, (*path, key))


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """A copy with another value at the end of that way."""
    if not path:
        return new
    entries = dict(value) if isinstance(value, dict) else list(value)
    entries[path[0]] = replaced(value[path[0]], path[1:], new)
    return entries


HOSTILE: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    1,
    2**31,
    10**18,
    -(2**63),
    10**400,
    0.5,
    float("nan"),
    float("inf"),
    1e-300,
    1e300,
    "",
    "x",
    "llama",
    "\0",
    "\ud800",
    "$A $B",
    "../../etc/passwd",
    "/dev/zero",
    "x" * 100_000,
    [],
    [[]],
    [0, 0],
    ["<s>"] * 3,
    {},
    {"type": "Sequence", "normalizers": []},
    {"content": ["x"]},
]


def random_floats(count: int) -> bytes:
    return np.random.default_rng(0).random(count, np.float32).tobytes()
