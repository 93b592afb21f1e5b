"""nanoGPT checkpoints: `ckpt.pt`, with the characters of `meta.pkl` or GPT-2's tokenizer beside it.

Both files are pickles, which can run arbitrary code when loaded. Not here: torch's restricted unpickler takes only
tensors and plain values from `ckpt.pt`, ours only plain values from `meta.pkl`; anything else is refused.
"""

from __future__ import annotations

import io
import pickle
import re
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from infer.config import CONFIG_KINDS, ModelConfig, RopeConfig, read_fields
from infer.loader.checkpoint import Checkpoint, StoredTensor, TokenizerParts
from infer.loader.files import MB
from infer.loader.hub import fetch
from infer.loader.tensor_names import by_decoder_name, from_gpt2
from infer.loader.text_tokenizers import character_tokenizer, gpt2_tokenizer
from infer.machine import DTYPES
from infer.values import FLAG, TEXT, checked, short_repr

GPT2 = "openai-community/gpt2"
GPT2_VOCABULARY = 50_257  # tokens; nanoGPT rounds the size up to 50,304
END_OF_TEXT = 50_256
REOPEN_AFTER = 1 << 26  # bytes
NAMES = {  # fields of `ModelConfig` -> model_args
    "vocab_size": "vocab_size",
    "max_position_embeddings": "block_size",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "hidden_size": "n_embd",
}
# A byte of a pickle takes up to 100 in memory (empty lists and dicts). nanoGPT's own have 200 kB.
MAX_PICKLE = 2 * MB
MAX_DIRECTORY = 4 * MB  # bytes of the central directory of a zip file
LEGACY = bytes.fromhex("80028a0a6cfc9c46f9206aa85019")  # the first bytes of torch's format before 1.6


class NanoGPTFile(Checkpoint):
    def __init__(self, path: Path) -> None:
        self.path = path
        contents = _read_checkpoint(path)
        try:
            self.config = config_from_nanogpt(contents["model_args"])
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        if self.config.vocab_size >= GPT2_VOCABULARY:  # character tokenizers have no end of text
            self.config = replace(self.config, eos_token_ids=(END_OF_TEXT,))
        self._weights = contents["model"]
        self._read = 0  # bytes, since the file was opened
        self.tensors = {}
        for name, stored in by_decoder_name(self._weights, from_gpt2, path).items():
            weights = self._weights[stored]
            if weights.dtype not in DTYPES.values():
                raise ValueError(f"{path}: {short_repr(stored)} is in {weights.dtype}, which is not a float dtype")
            self.tensors[name] = StoredTensor(stored, tuple(weights.shape), weights.dtype)
        if not self._is_tied():
            self.config = replace(self.config, tie_word_embeddings=False)
        settings = contents.get("config")
        self._dataset = settings.get("dataset") if isinstance(settings, Mapping) else None

    def _is_tied(self) -> bool:
        """nanoGPT always ties the head to the embedding; others may have added a head."""
        names = [name for name in ("lm_head.weight", "embed_tokens.weight") if name in self.tensors]
        found = [self._weights[self.tensors[name].name] for name in names]
        # If both are one tensor in the file, nothing is read.
        return len(found) < 2 or found[0].data_ptr() == found[1].data_ptr() or torch.equal(*found)

    def blocks(self, name: str, rows: range | None = None) -> Iterator[Tensor]:
        if self._read >= REOPEN_AFTER:
            # The pages of a mapped file count as memory until it is closed.
            self._weights, self._read = _read_checkpoint(self.path)["model"], 0
        weights = self._weights[self.tensors[name].name]
        self._read += weights.nbytes
        yield weights if rows is None else weights[rows.start : rows.stop]

    def tokenizer_parts(self) -> TokenizerParts:
        if self._meta is not None:
            return TokenizerParts(character_tokenizer(_characters(self._meta, self.config.vocab_size)))
        if self.config.vocab_size < GPT2_VOCABULARY:
            raise FileNotFoundError(
                f"{self.path} has {self.config.vocab_size} tokens, but no meta.pkl names them: put it beside the file"
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
        """Beside the checkpoint, or at nanoGPT's data/DATASET/meta.pkl, relative to the folder it was run in."""
        places = [self.path.parent]
        if isinstance(self._dataset, str):
            places += [root / "data" / self._dataset for root in (self.path.resolve().parent.parent, Path.cwd())]
        return next((file for place in places if (file := place / "meta.pkl").is_file()), None)


def config_from_nanogpt(args: Mapping[str, Any]) -> ModelConfig:
    """From the `model_args` of a nanoGPT checkpoint; with a `model_type` of "rope_gpt", a model with RoPE."""
    sizes = read_fields(args, NAMES)
    if missing := [name for ours, name in NAMES.items() if ours not in sizes]:
        raise ValueError(f"model_args lack {', '.join(missing)}")
    args = checked(args, {"model_type": TEXT, "bias": FLAG, "dropout": CONFIG_KINDS["dropout"]})
    model_type = args.get("model_type", "gpt2")
    if model_type not in ("gpt2", "rope_gpt"):
        raise ValueError(f"model_type {short_repr(model_type)} is not supported here: only gpt2 and rope_gpt are")
    bias = args.get("bias", True)  # checkpoints older than this option have biases
    return ModelConfig(
        model_type=model_type,
        intermediate_size=4 * sizes["hidden_size"],
        num_key_value_heads=sizes["num_attention_heads"],
        rope=None if model_type == "gpt2" else RopeConfig(),
        attention_bias=bias,
        mlp_bias=bias,
        norm_bias=bias,
        # Checkpoints older than the option are also older than nanoGPT's change to the exact GELU.
        hidden_act="gelu" if "bias" in args else "gelu_tanh",
        tie_word_embeddings=True,
        dropout=args.get("dropout", 0.0),
        **sizes,
    )


def _read_checkpoint(path: Path) -> dict[str, Any]:
    _check_zip(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about files not written by torch, which it then refuses
            contents = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # many types; torch's message advises to unpickle it unrestricted
        asks = re.search(r"GLOBAL (\S+)", str(error))
        if asks:
            problem = f"holds more than tensors and plain values, and is not read: it refers to {asks[1]:.80}"
        else:
            problem = "is damaged, cut short, or not a torch checkpoint"
        raise ValueError(f"{path} {problem}") from None
    model, args = (contents.get(key) if isinstance(contents, Mapping) else None for key in ("model", "model_args"))
    if not isinstance(model, Mapping) or not isinstance(args, Mapping):
        raise ValueError(f"{path} is not a nanoGPT checkpoint: it should hold a dict with 'model' and 'model_args'")
    if not all(isinstance(name, str) and _is_plain(tensor) for name, tensor in model.items()):
        raise ValueError(f"{path}: 'model' should hold plain tensors by their names, and nothing else")
    # Tensors may share storage, as the tied head does; but a small file cannot be a large model.
    if sum(tensor.numel() * tensor.itemsize for tensor in model.values()) > 2 * path.stat().st_size:
        raise ValueError(f"{path} is damaged: its tensors are larger than the file")
    return dict(contents)


def _is_plain(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and tensor.layout is torch.strided


def _check_zip(path: Path) -> None:
    """Refuse what torch never writes but would read into memory: compressed entries, and a long directory."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(len(LEGACY))
        if start == LEGACY:  # pickles of unbounded length, which take 100 times their size
            raise ValueError(f"{path} is in torch's format before 1.6: load it with torch, and save it again")
        file.seek(max(0, size - 2**17))
        end = file.read()
    try:
        # The end record, or the zip64 record before it, has the length of the directory: read it only if short.
        lengths = [int.from_bytes(end[at + 12 : at + 16], "little") for at in _all(end, b"PK\x05\x06")]
        lengths += [int.from_bytes(end[at + 40 : at + 48], "little") for at in _all(end, b"PK\x06\x06")]
        if start[:4] != b"PK\x03\x04" or max(length for length in lengths if length != 2**32 - 1) > MAX_DIRECTORY:
            raise ValueError
        with zipfile.ZipFile(path) as archive:
            parts = archive.infolist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError):
        raise ValueError(f"{path} is damaged, cut short, or not a torch checkpoint") from None
    if any(part.compress_type != zipfile.ZIP_STORED for part in parts) or sum(part.file_size for part in parts) > size:
        raise ValueError(f"{path} is a compressed zip file, which torch never writes: save it again with torch.save")
    if any(part.file_size > MAX_PICKLE for part in parts if part.filename.endswith(".pkl")):
        raise ValueError(f"{path} holds more than {MAX_PICKLE:,} bytes beside its tensors")


def _all(data: bytes, mark: bytes) -> list[int]:
    return [found.start() for found in re.finditer(re.escape(mark), data)]


class Refused(pickle.UnpicklingError):
    """Names the function that a pickle would call."""


class _PlainUnpickler(pickle._Unpickler):
    """Numbers, strings, lists and dicts need no class: a pickle that names one could run code.

    A subclass of the unpickler in Python: the one in C allocates as much memory for its memo as a hostile file says.
    """

    def find_class(self, module: str, name: str) -> NoReturn:
        raise Refused(f"{module}.{name}")


def _characters(path: Path, vocab_size: int) -> dict[str, int]:
    """The ids of the characters, from `meta.pkl`."""
    if path.stat().st_size > MAX_PICKLE:
        raise ValueError(f"{path} has {path.stat().st_size:,} bytes: the limit is {MAX_PICKLE:,}")
    stored = io.BytesIO(path.read_bytes())
    try:
        meta = _PlainUnpickler(stored).load()
    except Refused as error:
        raise ValueError(f"{path} holds more than plain values, and is not read: it refers to {error}") from None
    except Exception:  # a damaged file raises many types
        raise ValueError(f"{path} is damaged, cut short, or not a pickle") from None
    ids = meta.get("stoi") if isinstance(meta, dict) else None
    if not isinstance(ids, dict) or not all(
        isinstance(character, str) and len(character) == 1 and not "\ud800" <= character <= "\udfff" and type(i) is int
        for character, i in ids.items()
    ):
        raise ValueError(f"{path} should hold 'stoi', the id of each character")
    if sorted(ids.values()) != list(range(len(ids))) or len(ids) > vocab_size:
        raise ValueError(f"{path} should number its characters from 0, at most {vocab_size} of them")
    return ids
