"""A checkpoint with random weights, for machines that have no other: a folder that `infer serve` reads."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
import torch
from gpu_shapes import SHAPES, build
from safetensors.torch import save_file
from tokenizers import decoders, models


def make_folder(shape: str, folder: Path, dtype: torch.dtype) -> Path:
    """Every token of its vocabulary is a word, so that each has a text of its own."""
    model = build(shape, torch.device("cpu"), dtype)
    tied = SHAPES[shape].get("tie_word_embeddings")
    weights = {name: tensor for name, tensor in model.state_dict().items() if not (tied and name.startswith("lm_head"))}
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(SHAPES[shape] | {"dtype": str(dtype).rpartition(".")[2]}))
    words = {f"Ġw{i}": i for i in range(SHAPES[shape]["vocab_size"])}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=words, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
