"""Plain torch: the modules themselves. The reference, and what runs with hooks, gradients, or without kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from infer.backend.parts import METHODS
from infer.models.common import Decoder
from infer.models.rows import LAST, NONE, Row, record


class TorchBackend:
    name = "torch"

    def __init__(self, model: Any, why: str) -> None:
        self.model, self.why = model, why

    def run(self, rows: Sequence[Row]) -> list[Tensor]:
        """All rows in one pass; one by one where the model itself is hooked, or is somebody else's."""
        model = self.model
        if isinstance(model, Decoder) and not _is_wrapped(model):
            return model.run(rows)
        logits = []
        for row in rows:
            at = row.cache.seq_len
            logits.append(self._called(row))
            if not isinstance(model, Decoder):  # which says itself what it has fed
                record(row.cache, at, row.tokens, None)
        return logits

    def decoding(self, lazy: bool = False) -> None:
        return None

    def _called(self, row: Row) -> Tensor:
        ids = row.tokens
        if not isinstance(ids, Tensor):
            weight = next(self.model.parameters(), None)
            ids = torch.tensor([ids], device=None if weight is None else weight.device)
        if row.logits in (LAST, NONE):  # a chunk of a prompt must not compute the logits of all its tokens
            return self.model(ids, kv_cache=row.cache)[:, -1:][:, row.logits]  # type: ignore[no-any-return]
        return self.model(ids, kv_cache=row.cache, all_logits=True)[:, row.logits]  # type: ignore[no-any-return]


def _is_wrapped(model: Decoder) -> bool:
    """Whether calling the model does more than its `run` would."""
    return bool(
        model._forward_hooks
        or model._forward_pre_hooks
        or "forward" in vars(model)
        or type(model).forward is not METHODS["forward"]
    )
