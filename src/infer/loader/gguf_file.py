"""GGUF files: metadata, then tensors, quantized or not.

The header is parsed here: the reader of the `gguf` package takes seconds for a vocabulary of 50,000 entries, and maps
the entire file into memory. That package dequantizes.

Types that `nn/schemes.py` lists can stay as they are. Others are dequantized, and quantized again with quantize=...
A model may be split into files NAME-00001-of-0000N.gguf, the first of which has the metadata.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from infer.loader.checkpoint import FLOATS, Checkpoint, RowOrder, StoredTensor, TokenizerParts
from infer.loader.files import split_names
from infer.loader.gguf_blocks import blocks_of, fits_int8
from infer.loader.gguf_config import LONG_FACTORS, SHORT_FACTORS, architecture_of, config_from_gguf, sampling_from_gguf
from infer.loader.tensor_names import by_decoder_name, from_gguf
from infer.nn.schemes import SCHEMES
from infer.values import integer, short_repr

Bytes = np.ndarray[tuple[int, int], np.dtype[np.uint8]]

BLOCK_WEIGHTS = 1 << 18  # dequantized at a time: 1 MB of float32, of which numpy holds several copies

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
# Limits on a header, so that reading it takes no more memory than a small multiple of the file. The largest models have
# 3,000 tensors, 100 keys, and 800,000 strings in vocabulary and merges.
MAX_TENSORS, MAX_KEYS, MAX_STRINGS, MAX_STRING = 2**16, 2**16, 2**20, 2**24
MAX_DIMENSIONS = 4  # ggml has no more
MAX_LISTED = 4096  # numbers in an array that becomes a list; longer ones stay numpy arrays, of the size on disk

_STACKED = re.compile(r"(blk\.\d+\.ffn_(gate|up|gate_up|down))_exps\.(weight|bias)")
ROPE_TENSORS = ("rope_freqs.weight", SHORT_FACTORS, LONG_FACTORS)  # which are part of the config
ALIGNMENT = integer(1, 2**20)


@dataclass(frozen=True)
class TensorInfo:
    path: Path
    shape: tuple[int, ...]  # slowest dimension first, as in torch
    type: int
    offset: int  # from the start of the file
    nbytes: int


class GGUFFile(Checkpoint):
    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata, self._tensors = read_header(path)
        try:
            self._interleaved = architecture_of(self.metadata).interleaved
            divisors = self._rope_divisors(*ROPE_TENSORS[:2]), self._rope_divisors(LONG_FACTORS)
            self.config = config_from_gguf(self.metadata, self._tensors.keys(), *divisors)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        self._tensors = by_expert(self._tensors, self.config.num_experts)
        weights, arch = (
            (name for name in self._tensors if name not in ROPE_TENSORS),
            self.metadata["general.architecture"],
        )
        names = by_decoder_name(weights, lambda name: from_gguf(name, arch), path)
        self.tensors = {name: self._stored_tensor(stored) for name, stored in names.items()}

    def _rope_divisors(self, *names: str) -> tuple[float, ...]:
        """Those of the first of these tensors that is there."""
        name = next((name for name in names if name in self._tensors), None)
        if name is None:
            return ()
        shape = self._tensors[name].shape
        if len(shape) != 1 or not 1 <= shape[0] <= 2**15:
            raise ValueError(f"{name} has shape {list(shape)}: it should hold one divisor per frequency")
        return tuple(next(self._read(name)).tolist())

    def _stored_tensor(self, stored: str) -> StoredTensor:
        kind = str(_quantization(self._tensors[stored].type).name)
        return StoredTensor(stored, self._tensors[stored].shape, FLOATS.get(kind, kind))

    def blocks(self, name: str, rows: range | None = None) -> Iterator[Tensor]:
        stored = self.tensors[name]
        if placed := RowOrder.of(self.config, name, stored.shape[0], rows, self._interleaved):
            yield torch.cat([*self._read(stored.name, placed.rows)])[placed.order]
        elif self.config.model_type in ("gemma2", "gemma3") and name.split(".")[-2].endswith("norm"):
            yield from (block - 1 for block in self._read(stored.name, rows))  # llama.cpp stores them with the 1 added
        else:
            yield from self._read(stored.name, rows)

    def quantized(self, name: str, kind: str, rows: range | None = None) -> Iterator[Tensor]:
        stored, scheme = self.tensors[name], SCHEMES[kind]
        own = SCHEMES.get(str(stored.dtype))
        if own is None or not (own is scheme or (kind == "int8" and fits_int8(own))):
            yield from super().quantized(name, kind, rows)
            return
        placed = RowOrder.of(self.config, name, stored.shape[0], rows, self._interleaved)
        raw = self._raw(self._tensors[stored.name], placed.rows if placed else rows)
        blocks = (blocks_of(torch.from_numpy(each), own) for each in raw)
        if own is not scheme:
            blocks = (scheme.pack(own.codes(each), scale=own.scales(each)[0].half()) for each in blocks)
        yield from blocks if placed is None else (torch.cat(list(blocks))[placed.order],)

    def _read(self, stored: str, rows: range | None = None) -> Iterator[Tensor]:
        """The tensor's rows as float32, a block at a time."""
        from gguf.quants import dequantize

        tensor = self._tensors[stored]
        is_vector = len(tensor.shape) == 1  # stored as one row
        for raw in self._raw(tensor, None if is_vector else rows):
            weights = dequantize(raw, _quantization(tensor.type)).astype(np.float32, copy=False)
            found = torch.from_numpy(weights.reshape(-1, *tensor.shape[1:]))
            yield found[rows.start : rows.stop] if is_vector and rows is not None else found

    def _raw(self, tensor: TensorInfo, rows: range | None) -> Iterator[Bytes]:
        """The bytes of its rows, a block at a time."""
        in_all = tensor.shape[0] if len(tensor.shape) > 1 else 1
        rows = range(in_all) if rows is None else rows
        row_bytes = tensor.nbytes // in_all
        rows_per_block = max(1, BLOCK_WEIGHTS * in_all // math.prod(tensor.shape))
        with tensor.path.open("rb") as file:
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


def by_expert(tensors: Mapping[str, TensorInfo], experts: int) -> dict[str, TensorInfo]:
    """Tensors of all experts as `ExpertLinear` stacks them: gate and up of each apart, the others as one matrix."""
    found = {}
    for name, tensor in tensors.items():
        stack = _STACKED.fullmatch(name)
        if stack is None or tensor.shape[0] != experts or len(tensor.shape) == 1:
            found[name] = tensor
        elif stack[2] in ("gate", "up"):
            size = tensor.nbytes // experts
            for i in range(experts):
                found[f"{stack[1]}.{i}.{stack[3]}"] = replace(
                    tensor, shape=tensor.shape[1:], offset=tensor.offset + i * size, nbytes=size
                )
        else:
            found[name] = replace(tensor, shape=(experts * tensor.shape[1], *tensor.shape[2:]))
    return found


def read_header(path: Path) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
    """Metadata and tensors. The last result is cached: a model, its tokenizer and its config are read one by one."""
    files = [path.with_name(name) for name in split_names(path.name)]
    if missing := [file.name for file in files if not file.exists()]:
        raise FileNotFoundError(f"{path} is one of {len(files)} files, of which {missing[0]} is not beside it")
    stats = [file.stat() for file in files]
    return _read_headers(tuple(files), tuple((stat.st_size, stat.st_mtime_ns) for stat in stats))


@lru_cache(maxsize=1)
def _read_headers(
    files: tuple[Path, ...], stats: tuple[tuple[int, int], ...]
) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
    metadata, tensors = _read_header(files[0], stats[0][0])
    for number, (file, (size, _)) in enumerate(zip(files, stats, strict=True)):
        own, others = (metadata, tensors) if number == 0 else _read_header(file, size)
        expected = {"split.count": len(files), "split.no": number} if len(files) > 1 else {"split.count": 1}
        for key, value in expected.items():
            if own.get(key, 1 if key == "split.count" else 0) != value:
                raise ValueError(
                    f"{file}: {key} is {short_repr(own.get(key))}, but by its name it should be {value}: files of one "
                    "model are named NAME-00001-of-0000N.gguf"
                )
        if number and (twice := tensors.keys() & others.keys()):
            raise ValueError(f"{file}: another file of this model has {short_repr(min(twice))} too")
        tensors |= others
    if len(files) > 1 and (count := metadata.get("split.tensors.count", len(tensors))) != len(tensors):
        raise ValueError(f"{files[0]}: the files of this model have {len(tensors):,} tensors, not {short_repr(count)}")
    return metadata, tensors


def _read_header(path: Path, size: int) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
    if size < 24:
        raise ValueError(f"{path} is not a GGUF file: it has only {size} bytes")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        magic, version = struct.unpack_from("<4sI", data)
        if magic != b"GGUF":
            raise ValueError(f"{path} is not a GGUF file, or is damaged: it does not begin with GGUF")
        if version not in (2, 3):
            raise ValueError(f"{path} is GGUF version {version} (or big-endian); versions 2 and 3 can be read")
        try:
            metadata, tensors = _parse(_Reader(data, 8), path)
        except (struct.error, UnicodeDecodeError, KeyError, OverflowError):
            raise ValueError(f"{path} is damaged or cut short: its header does not end") from None
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
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

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.strings(1)[0]
        if kind != ARRAY:
            return self.scalar(SCALARS[kind])
        element, count = self.scalar("I"), self.scalar("Q")
        if element == STRING:
            return self.strings(count)
        if element == ARRAY:
            raise ValueError("its metadata has nested arrays, which are not supported")
        if count <= MAX_LISTED:
            return list(self.scalars(SCALARS[element], count))
        dtype = np.dtype(SCALARS[element]).newbyteorder("<")
        if count * dtype.itemsize > len(self.data) - self.offset:
            raise struct.error("array beyond the end of the file")
        values = np.frombuffer(self.data, dtype, count, self.offset).copy()
        self.offset += values.nbytes
        return values

    def strings(self, count: int) -> list[str]:
        """In one call, since a vocabulary has hundreds of thousands."""
        data, at, size, found = self.data, self.offset, len(self.data), []
        self.strings_read += count
        if 8 * count > size:
            raise struct.error("strings beyond the end of the file")
        if self.strings_read > MAX_STRINGS:
            raise ValueError(f"its header has more strings than the limit of {MAX_STRINGS:,}")
        for _ in range(count):
            start = at + 8
            length = int.from_bytes(data[at:start], "little")
            at = start + length
            if at > size:
                raise struct.error("string beyond the end of the file")
            if length > MAX_STRING:
                raise ValueError(f"a string has {length:,} bytes: the limit is {MAX_STRING:,}")
            found.append(data[start:at].decode("utf-8"))
        self.offset = at
        return found

    def table(self, what: str, count: int, most: int, value: Callable[[str], Any]) -> dict[str, Any]:
        """Names, each followed by what `value` reads."""
        if count > most:
            raise ValueError(f"it claims {count:,} {what}s: the limit is {most:,}")
        found: dict[str, Any] = {}
        for _ in range(count):
            [name] = self.strings(1)
            if name in found:
                raise ValueError(f"it has the {what} {short_repr(name)} twice")
            found[name] = value(name)
        return found

    def tensor(self, name: str) -> tuple[tuple[int, ...], int, int]:
        """Shape, type and offset."""
        dimensions = self.scalar("I")
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise ValueError(f"tensor {short_repr(name)} has {dimensions:,} dimensions, not 1 to {MAX_DIMENSIONS}")
        return self.scalars("Q", dimensions)[::-1], self.scalar("I"), self.scalar("Q")


def _parse(reader: _Reader, path: Path) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
    tensor_count, metadata_count = reader.scalars("Q", 2)
    metadata = reader.table("metadata key", metadata_count, MAX_KEYS, lambda _: reader.value(reader.scalar("I")))
    infos = reader.table("tensor", tensor_count, MAX_TENSORS, reader.tensor)
    alignment = metadata.get("general.alignment", 32)
    ALIGNMENT.check("general.alignment", alignment)
    start = -(-reader.offset // alignment) * alignment
    tensors = {}
    for name, (shape, kind, offset) in infos.items():
        tensors[name] = TensorInfo(path, shape, kind, start + offset, _nbytes(name, shape, kind))
    return metadata, tensors


def _nbytes(name: str, shape: tuple[int, ...], kind: int) -> int:
    from gguf import GGML_QUANT_SIZES

    block, block_bytes = GGML_QUANT_SIZES[_quantization(kind)]
    if shape[-1] % block:
        raise ValueError(f"{short_repr(name)}: rows of {shape[-1]} weights cannot be cut into blocks of {block}")
    if 0 in shape:
        raise ValueError(f"{short_repr(name)} has shape {list(shape)}: it is empty")
    return math.prod(shape) // block * block_bytes


@cache
def _quantization(kind: int) -> Any:
    """The type with this number, if the `gguf` package can dequantize it."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    try:
        quantization = GGMLQuantizationType(kind)
        dequantize(np.zeros((1, GGML_QUANT_SIZES[quantization][1]), dtype=np.uint8), quantization)
    except (ValueError, NotImplementedError):
        raise ValueError(f"tensors of GGUF type {kind} cannot be read by the installed gguf package") from None
    return quantization
