"""What every checkpoint format offers the rest of the loader."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from infer.config import ModelConfig

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

    def blocks(self, name: str) -> Iterator[Tensor]:
        """The tensor's rows in order, in blocks small enough to be held beside the model."""

    def tokenizer_parts(self) -> TokenizerParts: ...
