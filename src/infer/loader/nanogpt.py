"""nanoGPT checkpoints: `ckpt.pt`, with the characters of `meta.pkl` or GPT-2's tokenizer beside it.

Both files are pickles, which could run any code when they are read. Here they cannot: torch's own restricted reader
takes tensors and plain values from the one, and ours plain values from the other; anything else is refused.
"""

from __future__ import annotations

import io
import pickle
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from infer.config import ModelConfig, RopeConfig
from infer.loader import gpt2_names
from infer.loader.checkpoint import Checkpoint, TokenizerParts
from infer.loader.hub import fetch
from infer.loader.text_tokenizers import character_tokenizer, gpt2_tokenizer

GPT2 = "openai-community/gpt2"
GPT2_VOCABULARY = 50_257  # tokens; nanoGPT rounds the size up to 50,304
END_OF_TEXT = 50_256
REOPEN_AFTER = 1 << 26  # bytes
REQUIRED = ("vocab_size", "block_size", "n_layer", "n_head", "n_embd")  # of model_args


class NanoGPTFile(Checkpoint):
    def __init__(self, path: Path) -> None:
        self.path = path
        contents = _read_checkpoint(path)
        args = contents["model_args"]
        vocab_size = args.get("vocab_size")
        ends = isinstance(vocab_size, int) and vocab_size >= GPT2_VOCABULARY  # characters have no end of text
        try:
            self.config = config_from_nanogpt(args, (END_OF_TEXT,) if ends else ())
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}: {error}") from None
        self._weights = contents["model"]
        self._read = 0  # bytes, since the file was opened
        self._names = gpt2_names.by_decoder_name(self._weights, path)
        if not self._is_tied():
            self.config = replace(self.config, tie_word_embeddings=False)
        settings = contents.get("config")
        self._dataset = settings.get("dataset") if isinstance(settings, Mapping) else None

    def _is_tied(self) -> bool:
        """nanoGPT's own always are; a head of its own may have been put in."""
        names = (self._names.get(f"{part}.weight") for part in ("lm_head", "embed_tokens"))
        found = [self._weights[name] for name in names if name is not None]
        # Where both are one tensor in the file, nothing need be read.
        return len(found) < 2 or found[0].data_ptr() == found[1].data_ptr() or torch.equal(*found)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(self._weights[stored].shape) for name, stored in self._names.items()}

    def is_bfloat16(self, name: str) -> bool | None:
        return self._weights[self._names[name]].dtype is torch.bfloat16 if name in self._names else None

    def blocks(self, name: str) -> Iterator[Tensor]:
        if self._read >= REOPEN_AFTER and _is_zip(self.path):
            # Tensors are mapped from the file, and pages of a mapping count as memory until it is closed.
            self._weights, self._read = _read_checkpoint(self.path)["model"], 0
        weights = self._weights[self._names[name]]
        self._read += weights.nbytes
        yield weights

    def tokenizer_parts(self) -> TokenizerParts:
        if self._meta is not None:
            return TokenizerParts(character_tokenizer(_characters(self._meta, self.config.vocab_size)))
        if self.config.vocab_size < GPT2_VOCABULARY:
            raise FileNotFoundError(
                f"{self.path} has {self.config.vocab_size} tokens, but no meta.pkl says which: put it beside the file"
            )
        try:
            return gpt2_tokenizer(self.path.parent)
        except FileNotFoundError as missing:
            try:
                return gpt2_tokenizer(fetch(GPT2, weights=False))
            except OSError as error:
                raise FileNotFoundError(f"{missing} ({error})") from None

    @cached_property
    def _meta(self) -> Path | None:
        """Beside the checkpoint, or where nanoGPT has it: data/DATASET/meta.pkl, from the folder it was run in."""
        places = [self.path.parent]
        if isinstance(self._dataset, str):
            places += [root / "data" / self._dataset for root in (self.path.resolve().parent.parent, Path.cwd())]
        return next((file for place in places if (file := place / "meta.pkl").is_file()), None)


def config_from_nanogpt(args: Mapping[str, Any], eos_token_ids: tuple[int, ...] = ()) -> ModelConfig:
    """From the `model_args` of a nanoGPT checkpoint; a `model_type` of "rope_gpt" there has RoPE instead."""
    missing = [name for name in REQUIRED if args.get(name) is None]
    if missing:
        raise ValueError(f"model_args lack {', '.join(missing)}")
    model_type = args.get("model_type", "gpt2")
    if model_type not in ("gpt2", "rope_gpt"):
        raise ValueError(f"model_type {model_type!r} is not supported here: only gpt2 and rope_gpt are")
    bias = args.get("bias", True)  # checkpoints from before it could be chosen have biases
    width, heads = args["n_embd"], args["n_head"]
    return ModelConfig(
        model_type=model_type,
        vocab_size=args["vocab_size"],
        hidden_size=width,
        intermediate_size=4 * width if isinstance(width, int) else width,
        num_hidden_layers=args["n_layer"],
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=args["block_size"],
        rope=None if model_type == "gpt2" else RopeConfig(),
        attention_bias=bias,
        mlp_bias=bias,
        norm_bias=bias,
        # Checkpoints from before biases could be left out are also from before nanoGPT changed to the exact GELU.
        hidden_act="gelu" if "bias" in args else "gelu_tanh",
        tie_word_embeddings=True,
        dropout=args.get("dropout", 0.0),
        eos_token_ids=eos_token_ids,
    )


def _read_checkpoint(path: Path) -> dict[str, Any]:
    mapped = _is_zip(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about files that torch did not write, which it then refuses
            contents = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # what a damaged file raises depends on where; torch's advice is to run what is in it
        asks = re.search(r"GLOBAL (\S+)", str(error))
        if asks:
            problem = f"holds more than tensors and plain values, and is not read: it asks for {asks[1]}"
        else:
            problem = "is damaged, cut short, or no torch checkpoint"
        raise ValueError(f"{path} {problem}") from None
    model, args = (contents.get(key) if isinstance(contents, Mapping) else None for key in ("model", "model_args"))
    if not isinstance(model, Mapping) or not isinstance(args, Mapping):
        raise ValueError(f"{path} is no nanoGPT checkpoint: it should hold a dict with 'model' and 'model_args'")
    if not all(isinstance(name, str) and _is_plain(tensor) for name, tensor in model.items()):
        raise ValueError(f"{path}: 'model' should hold plain tensors by their names, and nothing else")
    return dict(contents)


def _is_plain(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and tensor.layout is torch.strided and not tensor.is_complex()


def _is_zip(path: Path) -> bool:
    """What torch has written since 1.6; only that can be mapped."""
    with path.open("rb") as file:
        return file.read(4) == b"PK\x03\x04"


class Refused(pickle.UnpicklingError):
    """Names what a pickle wants to call."""


class _PlainUnpickler(pickle._Unpickler):
    """Numbers, texts, lists and dicts need no class: a pickle that names one wants to run code.

    The one in Python: that in C takes as much memory for its memo as a damaged or hostile file says.
    """

    def find_class(self, module: str, name: str) -> NoReturn:
        raise Refused(f"{module}.{name}")


def _characters(path: Path, vocab_size: int) -> dict[str, int]:
    """The ids of the characters, from meta.pkl."""
    stored = io.BytesIO(path.read_bytes())
    try:
        meta = _PlainUnpickler(stored).load()
    except Refused as error:
        raise ValueError(f"{path} holds more than plain values, and is not read: it asks for {error}") from None
    except Exception:  # what a damaged file raises depends on where
        raise ValueError(f"{path} is damaged, cut short, or no pickle") from None
    ids = meta.get("stoi") if isinstance(meta, dict) else None
    if not isinstance(ids, dict) or not all(
        isinstance(character, str) and len(character) == 1 and not "\ud800" <= character <= "\udfff" and type(i) is int
        for character, i in ids.items()
    ):
        raise ValueError(f"{path} should hold 'stoi', the id of each character")
    if sorted(ids.values()) != list(range(len(ids))) or len(ids) > vocab_size:
        raise ValueError(f"{path} should number its characters from 0, at most {vocab_size} of them")
    return ids
