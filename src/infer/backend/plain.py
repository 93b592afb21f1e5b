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
    name, compiler = "torch", ""

    def __init__(self, model: Any, reason: str) -> None:
        self.model, self.reason = model, reason

    def run(self, rows: Sequence[Row]) -> list[Tensor]:
        """All rows in one pass; one by one if the model itself has a hook, or is not one of infer's."""
        model = self.model
        if isinstance(model, Decoder) and not _has_custom_call(model):
            return model.run(rows)
        logits = []
        for row in rows:
            at = row.cache.seq_len
            logits.append(self._run_by_call(row))
            if not isinstance(model, Decoder):  # which records its tokens itself
                record(row.cache, at, row.tokens, None)
        return logits

    def captured_decoder(self) -> None:
        return None

    def _run_by_call(self, row: Row) -> Tensor:
        ids = row.tokens
        more = {} if row.hidden is None else {"hidden": row.hidden}
        if more and not isinstance(self.model, Decoder):
            raise ValueError("hidden states are returned by infer's own models only")
        if not isinstance(ids, Tensor):
            weight = next(self.model.parameters(), None)
            ids = torch.tensor([ids], device=None if weight is None else weight.device)
        if row.logits in (LAST, NONE):  # a chunk of a prompt must not compute the logits of all its tokens
            return self.model(ids, kv_cache=row.cache, **more)[:, -1:][:, row.logits]  # type: ignore[no-any-return]
        logits: Tensor = self.model(ids, kv_cache=row.cache, all_logits=True, **more)
        return logits[:, row.logits]


def _has_custom_call(model: Decoder) -> bool:
    """Whether calling the model does more than its `run`."""
    return bool(
        model._forward_hooks
        or model._forward_pre_hooks
        or "forward" in vars(model)
        or type(model).forward is not METHODS["forward"]
    )
