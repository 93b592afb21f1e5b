"""Checkpoints on disk for tests: small random models of each family in the formats that the loader reads."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers
import torch
from amount import ALL
from gguf import GGMLQuantizationType as Quant
from gguf import quants
from safetensors.torch import load_file, save_file
from tokenizers import decoders, models, pre_tokenizers, processors
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from infer import GrowingCache, KVCache, SlidingCache, load_model
from infer.backend import backend_for
from infer.backend.cpu import kernels
from infer.cache import Cache, NoCache
from infer.engine.model import all_logits
from infer.models.common import Decoder

TOLERANCE = 1e-4

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


GEMMA3_ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e4},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
}

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
    "partial_rotary_factor": 0.75,
}
WINDOW = {"sliding_window": 8}
EXPERTS = {"num_local_experts": 5, "num_experts_per_tok": 2}
# What differs from Llama's values in `reference_model`. Sizes that often agree are all different: head_dim, the number
# whose root divides scores, and hidden_size / heads; the two RoPEs of Gemma.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": WINDOW,
    "ministral3": WINDOW
    | {
        "head_dim": 24,
        "rope_parameters": YARN
        | {"mscale": 1.0, "mscale_all_dim": 0.5, "llama_4_scaling_beta": 0.25, "original_max_position_embeddings": 16},
    },
    "phi3": WINDOW
    | {
        "rope_parameters": LONGROPE,
        "original_max_position_embeddings": 80,
        "max_position_embeddings": 160,
        "pad_token_id": 0,
    },
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "qwen3_moe": {"head_dim": 32, "moe_intermediate_size": 40} | EXPERTS,
    "mixtral": EXPERTS,
    "olmoe": EXPERTS | {"pad_token_id": 0},
    "gemma2": WINDOW
    | {
        "head_dim": 32,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
        "pad_token_id": 0,
    },
    "gemma3": {
        "head_dim": 32,
        "query_pre_attn_scalar": 24,
        "sliding_window": 8,
        "sliding_window_pattern": 2,
        "rope_parameters": GEMMA3_ROPES,
        "pad_token_id": 0,
    },
    "olmo2": {},
    "olmo3": WINDOW
    | {
        "num_hidden_layers": 4,
        "rope_parameters": {
            "full_attention": YARN,
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "smollm3": {"no_rope_layer_interval": 2, "pad_token_id": 0},
    "granite": {
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.4,
        "logits_scaling": 0.6,
    },
    "granitemoe": {
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.4,
        "logits_scaling": 0.6,
    }
    | EXPERTS,
    "gpt_oss": WINDOW | {"head_dim": 24, "rope_parameters": YARN | {"truncate": False}} | EXPERTS,
    "glm4": {"head_dim": 24, "pad_token_id": 0},
    "exaone4": WINDOW | {"sliding_window_pattern": 2},
    "starcoder2": WINDOW,
    "stablelm": {"use_qkv_bias": True, "num_attention_heads": 2},
    "gpt_neox": {"num_attention_heads": 2},
    "gpt2": {"n_inner": 96, "layer_norm_epsilon": 2.0**-16},
}
CENTRED = ("gemma2", "gemma3")  # families whose norms' weights are around 0


def reference_model(family: str = "llama", seed: int = 0, **changes: Any) -> PreTrainedModel:
    """transformers' own model, with weights wide enough that logits are far apart."""
    values: dict[str, Any] = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
    }
    model_type = {"gemma3": "gemma3_text"}.get(family, family)
    known = AutoConfig.for_model(model_type)
    given = {name: value for name, value in values.items() if hasattr(known, name)} | FAMILIES[family] | changes
    config = AutoConfig.for_model(model_type, **copy.deepcopy(given))  # configs keep what they are given
    return randomised(AutoModelForCausalLM.from_config(config, dtype=torch.float32), seed)


def randomised(model: PreTrainedModel, seed: int = 0) -> PreTrainedModel:
    generator = torch.Generator().manual_seed(seed)
    centre = 0 if model.config.model_type.removesuffix("_text") in CENTRED else 1  # of norms
    for name, parameter in model.eval().requires_grad_(False).named_parameters():
        noise = torch.empty_like(parameter).normal_(std=0.2, generator=generator)
        is_norm = name.endswith(("norm.weight", "ln_1.weight", "ln_2.weight", "ln_f.weight"))
        parameter.copy_(centre + noise if is_norm else noise)
    return model


def load(path: Path, context: int | None = None) -> Decoder:
    return load_model(path, dtype="float32", device="cpu", context=context)[0]


def random_ids(rows: int = 2, length: int = 60) -> torch.Tensor:
    return torch.randint(3, 128, (rows, length), generator=torch.Generator().manual_seed(1))


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    assert a.shape == b.shape
    return (a - b).abs().max().item()


# A ring as long as the sequence, one that most chunks fit, and one that only single tokens do.
CACHES: dict[str, tuple[type[KVCache | GrowingCache | SlidingCache], dict[str, Any]]] = {
    "KVCache": (KVCache, {}),
    "GrowingCache": (GrowingCache, {}),
    "SlidingCache": (SlidingCache, {}),
    "SlidingCache-4": (SlidingCache, {"prefill_chunk": 4}),
    "SlidingCache-1": (SlidingCache, {"prefill_chunk": 1}),
}


@torch.inference_mode()
def torch_logits(model: Decoder, cache: Cache, ids: torch.Tensor) -> torch.Tensor:
    """Of all positions, [B, n, V], as the modules compute them."""
    return model(ids, cache, all_logits=True)


@torch.inference_mode()
def kernel_logits(model: Decoder, cache: Cache, ids: torch.Tensor) -> torch.Tensor:
    """The same through the backend, which must have kernels for the model wherever the machine has any."""
    backend = backend_for(model)
    assert backend.name == ("torch" if kernels() is None else "cpu"), backend.reason
    return all_logits(model, cache, ids)


Run = Callable[[Decoder, Cache, torch.Tensor], torch.Tensor]
WAYS: dict[str, Run] = {"torch": torch_logits, "kernels": kernel_logits}


def check_logits(model: Decoder, ids: torch.Tensor, expected: torch.Tensor, tolerance: float = TOLERANCE) -> None:
    """Of a pass without a cache: the model as it is called, and through kernels."""
    assert expected.std() > 0.5  # equal logits would agree with anything
    with torch.inference_mode():
        assert difference(model(ids), expected) <= tolerance
    assert difference(kernel_logits(model, NoCache(len(ids)), ids), expected) <= tolerance


def logits_in_chunks(
    model: Decoder, ids: torch.Tensor, cache: Cache, chunk: int, run: Run = kernel_logits
) -> torch.Tensor:
    return torch.cat([run(model, cache, part) for part in ids.split(chunk, 1)], 1)


def ways(chunks: Sequence[int]) -> Iterator[tuple[str, int, int, str]]:
    """Caches, rows and chunks: through kernels every pair of them, in plain torch each cache and chunk once."""
    for i, name in enumerate(CACHES):
        for j, chunk in enumerate(chunks):
            for rows in (1, 2) if ALL else (1 + (i + j) % 2,):
                yield name, rows, chunk, "kernels"
        for chunk in chunks if ALL else (chunks[i % len(chunks)],):
            yield name, 1 + i % 2, chunk, "torch"


def check_every_way(reference: PreTrainedModel, model: Decoder, length: int, chunks: Sequence[int]) -> None:
    both = random_ids(2, length)
    expected = reference(both).logits
    check_logits(model, both, expected)
    for name, rows, chunk, way in ways(sorted({min(chunk, length) for chunk in chunks})):
        cache_type, settings = CACHES[name]
        cache = cache_type.from_model_config(
            model.config, length, batch_size=rows, dtype="float32", device="cpu", **settings
        )
        logits = logits_in_chunks(model, both[:rows], cache, chunk, WAYS[way])
        assert difference(logits, expected[:rows]) <= TOLERANCE, (name, rows, chunk, way)


def single_threaded() -> Iterator[None]:
    """The body of a fixture, for products so small that threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def greedy(reference: PreTrainedModel, ids: torch.Tensor, count: int) -> list[list[int]]:
    """What transformers generates after each row, up to and including an EOS."""
    eos = reference.config.eos_token_id
    rows = reference.generate(ids, max_new_tokens=count, do_sample=False, pad_token_id=0)[:, ids.shape[1] :].tolist()
    return [row[: row.index(eos) + 1] if eos in row else row for row in rows]


@cache
def byte_tokenizer() -> tokenizers.Tokenizer:
    """128 tokens: a pad, BOS, EOS, one merge, and printable bytes; enough to run text through a tiny model."""
    specials = ["<pad>", "<s>", "</s>"]
    letters = ["Ġ", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocab = {token: i for i, token in enumerate([*specials, "he", *letters[:124]])}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[("h", "e")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(specials)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def save_folder(model: PreTrainedModel, folder: Path, **settings: Any) -> Path:
    """A Hugging Face folder with a tokenizer. settings: those of `save_pretrained`."""
    model.save_pretrained(folder, **settings)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def save_mxfp4(model: PreTrainedModel, folder: Path) -> dict[str, torch.Tensor]:
    """A gpt-oss as published: random experts, which the model then has too, in MXFP4. Returns the tensors saved."""
    for weight in model.parameters():
        weight.copy_(weight.bfloat16())
    save_folder(copy.deepcopy(model).bfloat16(), folder)
    path, generator = folder / "model.safetensors", torch.Generator().manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(path).items():
        if not name.endswith(("gate_up_proj", "experts.down_proj")):
            tensors[name] = tensor
            continue
        experts, columns, rows = tensor.shape
        blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(122, 125, (experts, rows, columns // 32), generator=generator, dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        values = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        model.get_submodule(name.rpartition(".")[0]).register_parameter(
            name.rpartition(".")[2], torch.nn.Parameter(values, requires_grad=False)
        )
    save_file(tensors, path)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))
    return tensors


def quantised(model: PreTrainedModel, quant: Quant) -> PreTrainedModel:
    """The model with its matrices quantized and dequantized."""
    model = copy.deepcopy(model)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            stored = quants.quantize(parameter.numpy(), quant)
            parameter.copy_(torch.from_numpy(quants.dequantize(stored, quant).astype(np.float32)))
    return model


def byte_tokenizer_metadata() -> dict[str, Any]:
    tokens = sorted(byte_tokenizer().get_vocab(), key=byte_tokenizer().get_vocab().__getitem__)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * 3 + [1] * (len(tokens) - 3),
        "tokenizer.ggml.merges": ["h e"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": True,
    }


# What transformers stores as [in, out]: GPT-2's products.
CONV1D = ("c_attn.weight", "c_proj.weight", "c_fc.weight")


def nanogpt_weights(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """A GPT-2's tensors as nanoGPT names and turns them, its tied head among them."""
    return {name: t.T.contiguous() if name.endswith(CONV1D) else t for name, t in model.state_dict().items()}


def nanogpt_args(model: PreTrainedModel) -> dict[str, Any]:
    config = model.config
    sizes = {name: getattr(config, name) for name in ("n_layer", "n_head", "n_embd", "vocab_size")}
    return {**sizes, "block_size": config.n_positions, "bias": True, "dropout": 0.0}


def save_nanogpt(model: PreTrainedModel, path: Path, /, **contents: Any) -> Path:
    """A checkpoint as nanoGPT's train.py writes it. contents: what is to be in it instead."""
    whole = {
        "model": nanogpt_weights(model),
        "optimizer": {"state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.zeros(4)}}, "param_groups": []},
        "model_args": nanogpt_args(model),
        "iter_num": 3,
        "best_val_loss": torch.tensor(1.5),
        "config": {"dataset": "shakespeare_char", "learning_rate": 6e-4, "compile": True, "init_from": "scratch"},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(whole | contents, path)
    return path


GGUF_ARCHS = {
    "mistral": "llama",
    "ministral3": "mistral3",
    "gemma3_text": "gemma3",
    "olmo3": "olmo2",
    "gpt_neox": "gptneox",
    "mixtral": "llama",
    "qwen3_moe": "qwen3moe",
    "gpt_oss": "gpt-oss",
}


def gguf_arch(model: PreTrainedModel) -> str:
    return GGUF_ARCHS.get(model.config.model_type, model.config.model_type)


def llama_cpp_order(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k (weights or biases) as llama.cpp's converter stores them, for interleaved RoPE."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def llama3_divisors(rope: Mapping[str, Any], head_dim: int) -> np.ndarray:
    """llama3 scaling as llama.cpp's converter writes it: what each frequency is divided by."""
    divisors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (i / head_dim)
        turns = rope["original_max_position_embeddings"] / wavelength
        if turns > rope["high_freq_factor"]:
            divisors.append(1.0)
        elif turns < rope["low_freq_factor"]:
            divisors.append(rope["factor"])
        else:
            smooth = (turns - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"])
            divisors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(divisors, dtype=np.float32)


def split_experts(name: str, tensor: torch.Tensor, model_type: str) -> dict[str, torch.Tensor]:
    """A parameter of a mixture of experts as llama.cpp's converter names it, gate and up apart."""
    name = name.replace("block_sparse_moe", "mlp")
    stem, _, part = name.rpartition(".")
    if part == "sinks":
        return {f"{name}.weight": tensor}
    if not stem.endswith(".experts"):
        return {name: tensor}
    kind, part = "bias" if part.endswith("_bias") else "weight", part.removesuffix("_bias")
    is_gpt_oss = model_type == "gpt_oss"
    if is_gpt_oss and kind == "weight":
        tensor = tensor.transpose(1, 2)
    if part == "down_proj":
        return {f"{stem}.down_proj.{kind}": tensor.contiguous()}
    gate, up = (tensor[:, ::2], tensor[:, 1::2]) if is_gpt_oss else tensor.chunk(2, 1)
    return {f"{stem}.gate_proj.{kind}": gate.contiguous(), f"{stem}.up_proj.{kind}": up.contiguous()}


def gguf_tensors(model: PreTrainedModel) -> dict[str, np.ndarray]:
    """The model's tensors under their GGUF names, in float32, as llama.cpp's converter changes them."""
    config, arch = model.config, gguf_arch(model)
    heads = {"attn_q": config.num_attention_heads, "attn_k": getattr(config, "num_key_value_heads", None)}
    names = _names(next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == arch), config.num_hidden_layers)
    tensors = {}
    parameters: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():  # a tied head comes once, as the embedding
        parameters |= split_experts(name, parameter, config.model_type)
    for name, parameter in parameters.items():
        stored, tensor = names.get_name(name, (".weight", ".bias")), parameter.numpy()
        part = stored.split(".")[-2]
        if arch == "gpt2" and name.endswith(CONV1D):
            tensor = np.ascontiguousarray(tensor.T)
        elif part in heads and arch in ("llama", "mistral3", "granite", "granitemoe", "smollm3"):
            tensor = llama_cpp_order(tensor, heads[part])
        elif arch == "gptneox" and part == "attn_qkv":  # stored head by head
            by_head = tensor.reshape(heads["attn_q"], 3, -1, *tensor.shape[1:])
            tensor = np.ascontiguousarray(by_head.swapaxes(0, 1)).reshape(tensor.shape)
        elif arch in CENTRED and part.endswith("norm"):
            tensor = tensor + 1
        tensors[stored] = tensor
    rope = {} if arch == "gpt2" else config.rope_parameters
    if rope.get("rope_type") == "llama3":
        tensors["rope_freqs.weight"] = llama3_divisors(rope, config.head_dim)
    elif rope.get("rope_type") == "longrope":
        for kind in ("long", "short"):
            tensors[f"rope_factors_{kind}.weight"] = np.array(rope[f"{kind}_factor"], dtype=np.float32)
    return tensors


def gguf_metadata(model: PreTrainedModel) -> dict[str, Any]:
    """What llama.cpp's converter writes; of Gemma 3's windows their size alone, and of its RoPEs the global one."""
    config, arch = model.config, gguf_arch(model)
    if arch == "gpt2":
        return {
            "gpt2.context_length": config.n_positions,
            "gpt2.embedding_length": config.n_embd,
            "gpt2.block_count": config.n_layer,
            "gpt2.feed_forward_length": config.n_inner or 4 * config.n_embd,
            "gpt2.attention.head_count": config.n_head,
            "gpt2.attention.layer_norm_epsilon": config.layer_norm_epsilon,
        }
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    head_dim = getattr(config, "head_dim", None)
    rotated = int((head_dim or config.hidden_size // config.num_attention_heads) * rope.get("partial_rotary_factor", 1))
    window = getattr(config, "sliding_window", None)
    metadata = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": getattr(config, "num_key_value_heads", None),
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": getattr(config, "rms_norm_eps", None),
        "attention.layer_norm_epsilon": getattr(config, "layer_norm_eps", getattr(config, "norm_epsilon", None)),
    }
    if arch not in ("gemma2", "stablelm", "gptneox"):
        metadata["rope.freq_base"] = rope["rope_theta"]
    if arch in ("llama", "mistral3", "granite", "granitemoe", "smollm3", "exaone4"):
        metadata["vocab_size"] = config.vocab_size
    if arch in ("llama", "mistral3", "granite", "granitemoe", "smollm3", "glm4", "phi3", "stablelm", "gptneox"):
        metadata["rope.dimension_count"] = rotated
    if arch in ("gemma2", "gemma3", "phi3", "gpt-oss") or (arch in ("olmo2", "exaone4") and window is not None):
        metadata["attention.sliding_window"] = window or 0
    if arch in ("olmo2", "exaone4") and window is not None:
        pattern = [kind == "sliding_attention" for kind in config.layer_types]
        metadata["attention.sliding_window_pattern"] = pattern
    if arch == "olmo2" and window is not None:
        metadata["rope.freq_base_swa"] = config.rope_parameters["sliding_attention"]["rope_theta"]
    if experts := getattr(config, "num_local_experts", None):
        metadata |= {"expert_count": experts, "expert_used_count": config.num_experts_per_tok}
    if arch in ("qwen3moe", "gpt-oss"):
        metadata["expert_feed_forward_length"] = getattr(config, "moe_intermediate_size", config.intermediate_size)
    if rope["rope_type"] in ("linear", "yarn"):
        metadata |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": rope["factor"]}
    if rope["rope_type"] == "yarn":
        metadata |= {
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
            "rope.scaling.yarn_attn_factor": rope.get("attention_factor"),
            "rope.scaling.yarn_beta_fast": rope.get("beta_fast"),
            "rope.scaling.yarn_beta_slow": rope.get("beta_slow"),
        }
    match arch:
        case "mistral3":
            metadata["rope.scaling.yarn_log_multiplier"] = rope["mscale_all_dim"]
            metadata["attention.temperature_scale"] = rope["llama_4_scaling_beta"]
        case "phi3":
            original = config.original_max_position_embeddings
            metadata["rope.scaling.original_context_length"] = original
            if rope["rope_type"] == "longrope":
                spread = math.log(config.max_position_embeddings / original) / math.log(original)
                metadata["rope.scaling.attn_factor"] = math.sqrt(1 + spread)
        case "gemma2":
            metadata["attn_logit_softcapping"] = config.attn_logit_softcapping
            metadata["final_logit_softcapping"] = config.final_logit_softcapping
        case "granite" | "granitemoe":
            metadata["attention.scale"] = config.attention_multiplier
            metadata["embedding_scale"] = config.embedding_multiplier
            metadata["residual_scale"] = config.residual_multiplier
            metadata["logit_scale"] = config.logits_scaling
        case "stablelm" | "gptneox":
            metadata["use_parallel_residual"] = config.use_parallel_residual
    return {f"{arch}.{key}": value for key, value in metadata.items() if value is not None}


def write_gguf(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray | tuple[np.ndarray, Quant]] | None = None,
    *,
    arch: str = "llama",
) -> Path:
    """tensors: arrays as they are, or bytes with their quantization type."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in metadata.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        else:
            writer.add_key_value(key, value, _value_type(value))
    for name, tensor in (tensors or {}).items():
        if isinstance(tensor, tuple):
            writer.add_tensor(name, tensor[0], raw_dtype=tensor[1])
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


class _Reader(gguf.GGUFReader):  # type: ignore[misc]
    """With a plain array, of which slices are made faster than of a memmap: there is one for each string."""

    data = property(lambda self: self._data, lambda self, data: setattr(self, "_data", np.asarray(data)))


_read, _names = cache(_Reader), cache(gguf.get_tensor_name_map)


@contextmanager
def read_once() -> Iterator[None]:
    """Within it, transformers reads the same GGUF file once, and not for its config, weights and tokenizer apart."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf, "GGUFReader", _read)
        patch.setattr(gguf, "get_tensor_name_map", _names)
        yield


def _value_type(value: Any) -> gguf.GGUFValueType:
    inferred = gguf.GGUFValueType.get_type(value)
    return gguf.GGUFValueType.UINT32 if inferred == gguf.GGUFValueType.INT32 else inferred


def save_gguf(
    model: PreTrainedModel, path: Path, quant: Quant = Quant.F32, metadata: Mapping[str, Any] | None = None
) -> Path:
    """A GGUF file as llama.cpp's converter writes it: matrices in the given type, vectors in float32."""
    tensors = {
        name: (quants.quantize(tensor, quant), quant)
        if tensor.ndim > 1 and not name.endswith((".bias", "ffn_gate_inp.weight"))
        else tensor
        for name, tensor in gguf_tensors(model).items()
    }
    extra = byte_tokenizer_metadata() if metadata is None else metadata
    return write_gguf(path, gguf_metadata(model) | extra, tensors, arch=gguf_arch(model))
