"""A small GPT to train and inspect.

    x ─► LayerNorm ─► q, k, v ─► RoPE(q, k) ─► cache.attend ─► o_proj ─► + ─► LayerNorm ─► up ─► GELU ─► down ─► + ─►
      └────────────────────────────────────────────────────────────────┘ └───────────────────────────────────┘

Differs from GPT-2 in one thing: RoPE instead of learned positions.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from infer.cache.base import NoCache
from infer.cache.traced import TracedCache
from infer.config import ModelConfig
from infer.models.common import Decoder
from infer.models.gpt2 import GPT2Block, init_weights


class GPT(Decoder):
    block = GPT2Block

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        init_weights(self)

    @property
    def blocks(self) -> nn.ModuleList:
        return self.layers

    def forward_with_attn_trace(
        self, x: Tensor, trace_layer: int, *, attn_full: bool = False
    ) -> tuple[Tensor, dict[str, Any]]:
        """x [B, t] -> logits [B, t, V], and the attention weights of trace_layer in this pass.

        The trace has "layer", "attn_row" [B, H, t] of the last token and, with attn_full, "attn_full" [B, H, t, t].
        """
        if not 0 <= trace_layer < len(self.blocks):
            raise ValueError(f"trace_layer must be from 0 to {len(self.blocks) - 1}, not {trace_layer!r}")
        if self.training and self.config.dropout:
            raise ValueError("the model is in training mode, where dropout changes the trace: call model.eval()")
        cache = TracedCache(NoCache(x.shape[0], x.device), [trace_layer], queries=None if attn_full else 1)
        logits = self(x, kv_cache=cache, all_logits=True)
        rows = cache.rows[trace_layer]
        trace: dict[str, Any] = {"layer": trace_layer, "attn_row": rows[:, :, -1]}
        return logits, trace | {"attn_full": rows} if attn_full else trace
