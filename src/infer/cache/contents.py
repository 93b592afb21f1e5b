"""Which tokens a cache holds, and of which model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import ref

from torch import Tensor, nn


class Contents:
    """What passes have fed to a cache of one row, as they say when they are through.

    Nobody knows what a cache holds that was filled by hand: then it is the caller's to know.
    """

    def __init__(self) -> None:
        self._pieces: list[list[int] | Tensor] = []  # what lies on a device stays there until somebody asks
        self._count = 0  # tokens in them
        self._model: ref[nn.Module] | None = None

    def add(self, at: int, tokens: Sequence[int] | Tensor, model: nn.Module | None) -> None:
        """Tokens at the positions from `at` on. model: by the module that turns tokens into vectors."""
        self.cut(at)
        if at == 0:
            self._model = None if model is None else ref(model)
        if at != self._count:
            return  # what lies before was filled by hand
        if isinstance(tokens, Tensor):
            if tokens.shape[0] > 1:
                return
            piece: list[int] | Tensor = tokens[0].tolist() if tokens.is_cpu else tokens[0].clone()
        else:
            piece = list(tokens)
        self._pieces.append(piece)
        self._count += len(piece)

    def cut(self, seq_len: int) -> None:
        """Forget what lies from that position on."""
        if seq_len < self._count:
            self._pieces, self._count = [self._ids()[:seq_len]], seq_len

    def tokens(self, seq_len: int) -> list[int] | None:
        """All of so many positions; None where nobody knows."""
        return self._ids() if self._count == seq_len else None

    def is_of(self, model: nn.Module) -> bool:
        """False where another model is known to have filled the cache."""
        return self._model is None or self._model() is model

    def _ids(self) -> list[int]:
        if len(self._pieces) > 1 or any(isinstance(piece, Tensor) for piece in self._pieces):
            ids = [i for piece in self._pieces for i in (piece.tolist() if isinstance(piece, Tensor) else piece)]
            self._pieces = [ids]
        return list(self._pieces[0]) if self._pieces else []

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_model": None}  # a reference that cannot be saved
