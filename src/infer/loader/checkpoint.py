"""What every checkpoint format offers the rest of the loader."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from infer.config import ModelConfig
from infer.nn.quantized import TILE, Groups, quantise

if TYPE_CHECKING:
    import tokenizers


@dataclass(frozen=True)
class TokenizerParts:
    """What a `Tokenizer` is made of."""

    backend: tokenizers.Tokenizer
    chat_template: str | None = None
    bos_token: str | None = None
    eos_token: str | None = None


class Checkpoint(Protocol):
    """A model on disk. Opening one reads its headers only."""

    path: Path
    config: ModelConfig

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Tensor shapes by name, as `Decoder` names them, fused ones still apart."""

    def blocks(self, name: str, rows: range | None = None) -> Iterator[Tensor]:
        """The tensor's rows in order, in blocks small enough to be held beside the model. rows: these alone."""

    def is_bfloat16(self, name: str) -> bool | None:
        """Whether a tensor is stored in that; None: it is not there."""

    def bits(self, name: str) -> int:
        """4 or 8: so many keep what a quantised tensor is worth. 32: it is none, or is not there."""
        return 32

    def groups(self, name: str, bits: int, rows: range | None = None) -> Iterator[Groups]:
        """The rows of a matrix in order, quantised; the number in each block but the last is a multiple of TILE."""
        for block in in_tiles(self.blocks(name, rows)):
            for some in torch.split(block, max(1, (1 << 18) // block.shape[1] // TILE) * TILE):
                yield quantise(some, bits)

    def tokenizer_parts(self) -> TokenizerParts: ...

    def sampling(self) -> tuple[str, Mapping[str, Any]]:
        """The name of the file that says how to sample, and what it says, by the names of generation_config.json."""
        return self.path.name, {}


def in_tiles(blocks: Iterable[Tensor]) -> Iterator[Tensor]:
    """Rows in blocks of a multiple of TILE, the last one apart."""
    rest: list[Tensor] = []
    for block in blocks:
        rows = torch.cat((*rest, block))
        whole = len(rows) // TILE * TILE
        if whole:
            yield rows[:whole]
        rest = [rows[whole:]]
    if rest and len(rest[0]):
        yield rest[0]
