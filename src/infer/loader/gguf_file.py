"""GGUF files: metadata, then tensors, quantised or not.

The header is parsed here rather than by the `gguf` package, whose reader takes seconds over a vocabulary of 50,000
entries and maps the whole file into memory; that package does the dequantisation.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from infer.loader.checkpoint import Checkpoint, TokenizerParts
from infer.loader.gguf_config import config_from_gguf, sampling_from_gguf
from infer.loader.gguf_groups import FINER, FLOATS, TYPES, Bytes
from infer.models.registry import check_supported
from infer.nn.quantized import TILE, Groups
from infer.values import shown, whole

BLOCK_WEIGHTS = 1 << 18  # dequantised at a time: 1 MB of float32, of which numpy holds several copies

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
# Limits of what a header holds, so that reading it takes no more memory than a small multiple of the file. The largest
# models have 3,000 tensors, 100 keys, and 800,000 strings in vocabulary and merges.
MAX_TENSORS, MAX_KEYS, MAX_STRINGS, MAX_STRING = 2**16, 2**16, 2**20, 2**24
MAX_DIMENSIONS = 4  # ggml has no more
MAX_LISTED = 4096  # numbers of an array that becomes a list; a longer one is numpy's, and takes what it takes on disk

# GGUF names -> Decoder names, without .weight and .bias.
NAMES = {
    "token_embd": "embed_tokens",
    "position_embd": "embed_positions",
    "output_norm": "norm",
    "output": "lm_head",
}
LAYER_NAMES = {
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
}
# Where a norm stands goes by other names in this family.
GEMMA3_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
ROPE_DIVISORS = "rope_freqs.weight"
ALIGNMENT = whole(1, 2**20)


@dataclass(frozen=True)
class StoredTensor:
    shape: tuple[int, ...]  # slowest dimension first, as torch has it
    type: int
    offset: int  # from the start of the file
    nbytes: int


class GGUFFile(Checkpoint):
    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata, self._tensors = read_header(path)
        arch = self.metadata.get("general.architecture")
        try:
            check_supported(arch)
            self.config = config_from_gguf(self.metadata, self._tensors.keys(), self._rope_divisors())
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        names = LAYER_NAMES | GEMMA3_NORMS if arch == "gemma3" else LAYER_NAMES
        self._stored: dict[str, str] = {}
        for stored in self._tensors:
            name = decoder_name(stored, names)
            if stored != ROPE_DIVISORS and self._stored.setdefault(name, stored) != stored:
                raise ValueError(f"{path} holds {self._stored[name]} and {stored}, which are the same weight")

    def _rope_divisors(self) -> tuple[float, ...]:
        if ROPE_DIVISORS not in self._tensors:
            return ()
        shape = self._tensors[ROPE_DIVISORS].shape
        if len(shape) != 1 or not 1 <= shape[0] <= 2**15:
            raise ValueError(f"{ROPE_DIVISORS} has shape {list(shape)}: it should hold one divisor per frequency")
        return tuple(next(self._read(ROPE_DIVISORS)).tolist())

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: self._tensors[stored].shape for name, stored in self._stored.items()}

    def blocks(self, name: str, rows: range | None = None) -> Iterator[Tensor]:
        stored, order = self._read(self._stored[name], rows), self._order(name, rows)
        if order is not None:
            yield torch.cat(list(stored))[order]
        elif self.config.model_type == "gemma3" and name.split(".")[-2].endswith("norm"):
            yield from (block - 1 for block in stored)  # llama.cpp stores them with the 1 added
        else:
            yield from stored

    def is_bfloat16(self, name: str) -> bool | None:
        if name not in self._stored:
            return None
        return bool(_quantisation(self._tensors[self._stored[name]].type).name == "BF16")

    def bits(self, name: str) -> int:
        if name not in self._stored:
            return 32
        kind = _quantisation(self._tensors[self._stored[name]].type).name
        return 32 if kind in FLOATS else 8 if kind in FINER else 4

    def groups(self, name: str, bits: int, rows: range | None = None) -> Iterator[Groups]:
        tensor = self._tensors[self._stored[name]]
        kept_in, convert = TYPES.get(_quantisation(tensor.type).name, (None, None))
        if convert is None or kept_in != bits:
            yield from super().groups(name, bits, rows)
            return
        read, order = map(convert, self._raw(tensor, rows)), self._order(name, rows)
        if order is None:
            yield from read
        else:
            parts: list[Any] = [None if part[0] is None else torch.cat(part)[order] for part in zip(*read, strict=True)]
            yield Groups(*parts)

    def _order(self, name: str, rows: range | None) -> Tensor | None:
        """Where the rows of a tensor are to come from; None where they lie in order. rows: of whole heads.

        llama.cpp stores the rows of q and k paired for interleaved RoPE: this puts each head's halves back together.
        """
        config, part = self.config, name.split(".")[-2]
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(part)
        if config.model_type != "llama" or heads is None:
            return None
        paired = torch.arange(heads * config.computed_head_dim).view(heads, config.computed_head_dim // 2, 2)
        order = paired.transpose(1, 2).flatten()
        return order if rows is None else order[: len(rows)]  # alike in all heads

    def _read(self, stored: str, rows: range | None = None) -> Iterator[Tensor]:
        """The tensor's rows as float32, a block at a time."""
        from gguf.quants import dequantize

        tensor = self._tensors[stored]
        is_vector = len(tensor.shape) == 1  # which is one row
        for raw in self._raw(tensor, None if is_vector else rows):
            weights = dequantize(raw, _quantisation(tensor.type)).astype(np.float32, copy=False)
            found = torch.from_numpy(weights.reshape(-1, *tensor.shape[1:]))
            yield found[rows.start : rows.stop] if is_vector and rows is not None else found

    def _raw(self, tensor: StoredTensor, rows: range | None) -> Iterator[Bytes]:
        """The bytes of its rows, a block at a time: of a multiple of TILE rows, the last one apart."""
        in_all = tensor.shape[0] if len(tensor.shape) > 1 else 1
        rows = range(in_all) if rows is None else rows
        row_bytes = tensor.nbytes // in_all
        rows_per_block = max(1, BLOCK_WEIGHTS * in_all // math.prod(tensor.shape) // TILE) * TILE
        with self.path.open("rb") as file:
            file.seek(tensor.offset + rows.start * row_bytes)
            for start in range(rows.start, rows.stop, rows_per_block):
                count = min(rows_per_block, rows.stop - start)
                yield np.fromfile(file, dtype=np.uint8, count=count * row_bytes).reshape(count, row_bytes)

    def tokenizer_parts(self) -> TokenizerParts:
        from infer.loader.gguf_tokenizer import build_tokenizer

        tokens = self.metadata.get("tokenizer.ggml.tokens")
        if tokens is None:
            raise ValueError(f"{self.path} holds no tokenizer")

        def token(kind: str) -> str | None:
            token_id = self.metadata.get(f"tokenizer.ggml.{kind}_token_id")
            return tokens[token_id] if isinstance(token_id, int) and token_id < len(tokens) else None

        template = self.metadata.get("tokenizer.chat_template")
        return TokenizerParts(build_tokenizer(self.metadata), template, token("bos"), token("eos"))

    def sampling(self) -> tuple[str, dict[str, Any]]:
        return self.path.name, sampling_from_gguf(self.metadata)


def decoder_name(stored: str, layer_names: Mapping[str, str] = LAYER_NAMES) -> str:
    """blk.3.attn_q.weight -> layers.3.self_attn.q_proj.weight; a name it does not know stays as it is."""
    stem, _, kind = stored.rpartition(".")
    if stem in NAMES:
        return f"{NAMES[stem]}.{kind}"
    prefix, _, rest = stem.partition(".")
    layer, _, part = rest.partition(".")
    if prefix == "blk" and part in layer_names:
        return f"layers.{layer}.{layer_names[part]}.{kind}"
    return stored


def read_header(path: Path) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    """Metadata and tensors. The last file's are kept: a model, its tokenizer and its config are read one by one."""
    stat = path.stat()
    return _read_header(path, stat.st_size, stat.st_mtime_ns)


@lru_cache(maxsize=1)
def _read_header(path: Path, size: int, modified: int) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    if size < 24:
        raise ValueError(f"{path} is not a GGUF file: it has only {size} bytes")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        magic, version = struct.unpack_from("<4sI", data)
        if magic != b"GGUF":
            raise ValueError(f"{path} is not a GGUF file, or is damaged: it does not begin with the letters GGUF")
        if version not in (2, 3):
            raise ValueError(f"{path} is GGUF version {version} (or big-endian); versions 2 and 3 can be read")
        try:
            metadata, tensors = _parse(_Reader(data, 8))
        except (struct.error, UnicodeDecodeError, KeyError, OverflowError):
            raise ValueError(f"{path} is damaged or cut short: its header does not end") from None
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
    if (parts := metadata.get("split.count", 1)) != 1:
        raise ValueError(f"{path} is one part of {shown(parts)}: join them with llama-gguf-split --merge")
    end = max((tensor.offset + tensor.nbytes for tensor in tensors.values()), default=0)
    if end > size:
        raise ValueError(f"{path} is cut short: its tensors end at byte {end:,}, the file at {size:,}")
    if sum(tensor.nbytes for tensor in tensors.values()) > size:
        raise ValueError(f"{path} is damaged: its tensors overlap")
    return metadata, tensors


class _Reader:
    def __init__(self, data: mmap.mmap, offset: int) -> None:
        self.data = data
        self.offset = offset
        self.strings_read = 0

    def scalars(self, code: str, count: int) -> tuple[Any, ...]:
        values = struct.unpack_from(f"<{count}{code}", self.data, self.offset)
        self.offset += struct.calcsize(f"<{count}{code}")
        return values

    def scalar(self, code: str) -> Any:
        return self.scalars(code, 1)[0]

    def string(self) -> str:
        length = self.scalar("Q")
        end = self.offset + length
        if end > len(self.data):
            raise struct.error("string beyond the end of the file")
        if length > MAX_STRING:
            raise ValueError(f"a text of {length:,} bytes is longer than the {MAX_STRING:,} that are read")
        text = self.data[self.offset : end].decode("utf-8")
        self.offset = end
        return text

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind != ARRAY:
            return self.scalar(SCALARS[kind])
        element, count = self.scalar("I"), self.scalar("Q")
        if element == STRING:
            return self.strings(count)
        if element == ARRAY:
            raise ValueError("its metadata has arrays of arrays, which no model needs")
        if count <= MAX_LISTED:
            return list(self.scalars(SCALARS[element], count))
        dtype = np.dtype(SCALARS[element]).newbyteorder("<")
        if count * dtype.itemsize > len(self.data) - self.offset:
            raise struct.error("array beyond the end of the file")
        values = np.frombuffer(self.data, dtype, count, self.offset).copy()
        self.offset += values.nbytes
        return values

    def strings(self, count: int) -> list[str]:
        """As `string`, count times over: a vocabulary has hundreds of thousands, so without a call for each."""
        data, at, size, found = self.data, self.offset, len(self.data), []
        self.strings_read += count
        if 8 * count > size:
            raise struct.error("strings beyond the end of the file")
        if self.strings_read > MAX_STRINGS:
            raise ValueError(f"its metadata has more texts than the {MAX_STRINGS:,} that are read")
        for _ in range(count):
            start = at + 8
            length = int.from_bytes(data[at:start], "little")
            at = start + length
            if at > size:
                raise struct.error("string beyond the end of the file")
            if length > MAX_STRING:
                raise ValueError(f"a text of {length:,} bytes is longer than the {MAX_STRING:,} that are read")
            found.append(data[start:at].decode("utf-8"))
        self.offset = at
        return found


def _parse(reader: _Reader) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    tensor_count, metadata_count = reader.scalars("Q", 2)
    for what, count, most in (("tensors", tensor_count, MAX_TENSORS), ("metadata keys", metadata_count, MAX_KEYS)):
        if count > most:
            raise ValueError(f"it has {count:,} {what}, by its own account: {most:,} are read at most")
    metadata: dict[str, Any] = {}
    for _ in range(metadata_count):
        key = reader.string()
        if key in metadata:
            raise ValueError(f"its metadata has {shown(key)} twice")
        metadata[key] = reader.value(reader.scalar("I"))
    infos = {}
    for _ in range(tensor_count):
        name = reader.string()
        if name in infos:
            raise ValueError(f"it has the tensor {shown(name)} twice")
        dimensions = reader.scalar("I")
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise ValueError(f"tensor {shown(name)} has {dimensions:,} dimensions, not 1 to {MAX_DIMENSIONS}")
        shape = reader.scalars("Q", dimensions)[::-1]
        infos[name] = shape, reader.scalar("I"), reader.scalar("Q")
    alignment = metadata.get("general.alignment", 32)
    ALIGNMENT.check("general.alignment", alignment)
    start = -(-reader.offset // alignment) * alignment
    tensors = {}
    for name, (shape, kind, offset) in infos.items():
        tensors[name] = StoredTensor(shape, kind, start + offset, _nbytes(name, shape, kind))
    return metadata, tensors


def _nbytes(name: str, shape: tuple[int, ...], kind: int) -> int:
    from gguf import GGML_QUANT_SIZES

    block, block_bytes = GGML_QUANT_SIZES[_quantisation(kind)]
    if shape[-1] % block:
        raise ValueError(f"{shown(name)}: rows of {shape[-1]} weights are not whole blocks of {block}")
    if 0 in shape:
        raise ValueError(f"{shown(name)} has shape {list(shape)}: it is empty")
    return math.prod(shape) // block * block_bytes


@cache
def _quantisation(kind: int) -> Any:
    """The type by that number, if the `gguf` package can dequantise it."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    try:
        quantisation = GGMLQuantizationType(kind)
        dequantize(np.zeros((1, GGML_QUANT_SIZES[quantisation][1]), dtype=np.uint8), quantisation)
    except (ValueError, NotImplementedError):
        raise ValueError(f"tensors of GGUF type {kind} cannot be read by the installed gguf package") from None
    return quantisation
