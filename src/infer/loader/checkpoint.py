"""What every checkpoint format offers the rest of the loader."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from infer.config import ModelConfig
from infer.nn.quantized import quantize_rows
from infer.nn.rope import file_order
from infer.values import FLAG, Kind, integer, number

if TYPE_CHECKING:
    import tokenizers

FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}  # names in files
# What is read of generation_config.json, by the names of `SamplingParams`.
SAMPLING_KINDS: dict[str, Kind] = {
    "temperature": number("from 0 to 100", lambda value: 0 <= value <= 100),
    "top_k": integer(0, 2**31 - 1),
    "top_p": number("above 0 and at most 1", lambda value: 0 < value <= 1),
    "min_p": number("from 0 to 1", lambda value: 0 <= value <= 1),
    "repetition_penalty": number("above 0 and at most 100", lambda value: 0 < value <= 100),
}


@dataclass(frozen=True)
class TokenizerParts:
    """What a `Tokenizer` is made of."""

    backend: tokenizers.Tokenizer
    chat_template: str | None = None
    bos_token: str | None = None
    eos_token: str | None = None


class SamplingDefaults(NamedTuple):
    """The sampling settings of a model's own files."""

    values: dict[str, Any]  # by the names of `SamplingParams`; empty: the files do not ask for sampling
    source: str  # the name of the file
    ignored: tuple[str, ...] = ()  # messages about values of the wrong type or out of range


class StoredTensor(NamedTuple):
    name: str  # in the file
    shape: tuple[int, ...]  # in `Decoder`
    dtype: torch.dtype | str  # or the name of a quantized GGUF type


class RowOrder(NamedTuple):
    """Where the rows of a tensor are in a file: within a range of its rows, in this order."""

    rows: range
    order: Tensor

    @classmethod
    def of(
        cls, config: ModelConfig, name: str, count: int, rows: range | None, interleaved: bool, by_head: bool = False
    ) -> RowOrder | None:
        """Of q and k, if RoPE does not pair their rows as `infer.nn.rope` does; None: they are in order.

        count: the rows of the tensor. rows: of those, None: all. by_head: q, k and v are one matrix, head by head.
        """
        size, part = config.computed_head_dim, name.split(".")[-2]
        if config.rope is None or part not in ("q_proj", "k_proj", "qkv_proj", "q_norm", "k_norm"):
            return None
        rotated = config.rope.dim or size
        dims = file_order(size, rotated, interleaved)
        if rotated == size and not interleaved and not by_head:
            return None
        heads = torch.arange(count // size)[:, None]
        order = heads * size + dims
        if part == "qkv_proj":
            kv_heads = config.num_key_value_heads
            values = heads >= len(heads) - kv_heads
            if by_head:
                heads = heads % kv_heads * 3 + heads // kv_heads
            order = heads * size + torch.where(values, torch.arange(size), dims)
        selected = order.flatten() if rows is None else order.flatten()[rows.start : rows.stop]
        first = int(selected.min())
        return cls(range(first, int(selected.max()) + 1), selected - first)


class Checkpoint(Protocol):
    """A model on disk. Opening one reads its headers only."""

    path: Path
    config: ModelConfig
    tensors: dict[str, StoredTensor]  # by the names of `Decoder`; the parts of fused weights may be separate

    def blocks(self, name: str, rows: range | None = None) -> Iterator[Tensor]:
        """The tensor's rows in order, in blocks small enough to hold beside the model. rows: only these."""

    def stored_dtype(self, name: str) -> torch.dtype | str | None:
        """None: there is no such tensor."""
        return self.tensors[name].dtype if name in self.tensors else None

    def quantized(self, name: str, kind: str, rows: range | None = None) -> Iterator[Tensor]:
        """The rows of a matrix in order, as blocks of a scheme. kind: as for `QuantizedWeight`."""
        for block in self.blocks(name, rows):
            for some in torch.split(block, max(1, (1 << 18) // block.shape[1])):
                yield quantize_rows(some, kind)

    def tokenizer_parts(self) -> TokenizerParts: ...

    def sampling(self) -> tuple[str, Mapping[str, Any]]:
        """The name of the file with sampling settings, and the settings by the names of generation_config.json."""
        return self.path.name, {}

    def sampling_defaults(self) -> SamplingDefaults:
        """The settings that are valid. None unless the file asks for sampling at a temperature above 0."""
        source, given = self.sampling()
        values, ignored = {}, []
        for name, kind in (SAMPLING_KINDS | {"do_sample": FLAG}).items():
            if given.get(name) is None:
                continue
            try:
                kind.check(name, given[name])
            except ValueError as error:
                ignored.append(f"{source}: {error}; it is ignored")
            else:
                values[name] = given[name]
        if not values.pop("do_sample", False) or not values.get("temperature"):
            values = {}
        # GGUF files store float32: 0.6 is 0.60000002384 there.
        values = {name: value if isinstance(value, int) else float(f"{value:.6g}") for name, value in values.items()}
        return SamplingDefaults(values, source, tuple(ignored))
