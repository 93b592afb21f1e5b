"""Gemma 3, text (270M, 1B, and the text part of larger checkpoints).

    x ─► RMSNorm ─► q, k, v ─► norm(q, k) ─► RoPE(q, k) ─► cache.attend ─► o_proj ─► RMSNorm ─► + ─► (to the MLP)
      └───────────────────────────────────────────────────────────────────────────────────────┘

    x ─► RMSNorm ─► GeGLU ─► RMSNorm ─► + ─►
      └───────────────────────────────┘

Differs from Llama:
- embeddings are multiplied by the square root of the hidden size;
- each head of q and k is normalized before RoPE;
- norms before and after attention and the MLP, whose stored weights are centered on 0;
- the MLP's gate is a GELU (tanh form) instead of a SiLU.

Most layers have a sliding window and a RoPE of their own, every sixth full attention: the config says which.
"""

from __future__ import annotations

import torch

from infer.models.common import Block, Decoder, Norms
from infer.nn.norm import RMSNorm, ZeroCenteredRMSNorm


class Gemma3Block(Block):
    norm = ZeroCenteredRMSNorm
    qk_norm: type[RMSNorm] | None = ZeroCenteredRMSNorm
    norm_names = Norms(
        before_attention="input_layernorm",
        after_attention="post_attention_layernorm",
        before_mlp="pre_feedforward_layernorm",
        after_mlp="post_feedforward_layernorm",
    )
    activation = "gelu_tanh"


class Gemma3(Decoder):
    block = Gemma3Block

    @property
    def embed_scale(self) -> float:
        # Rounded to the model's dtype first, as in training: 25.25 instead of 25.298 in bf16.
        return torch.tensor(self.config.hidden_size**0.5, dtype=self.dtype).item()
