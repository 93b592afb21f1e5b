"""Gemma 3, text (270M, 1B, and the text part of larger checkpoints).

    x ─► RMSNorm ─► q, k, v ─► norm(q, k) ─► RoPE(q, k) ─► cache.attend ─► o_proj ─► RMSNorm ─► + ─► (to the MLP)
      └───────────────────────────────────────────────────────────────────────────────────────┘

    x ─► RMSNorm ─► GeGLU ─► RMSNorm ─► + ─►
      └───────────────────────────────┘

Differs from Llama:
- embeddings are multiplied by the root of the hidden size;
- each head of q and k is normalised before it is rotated;
- norms stand on both sides of attention and of the MLP, and their stored weights are centred on 0;
- the MLP's gate is a GELU (tanh form) instead of a SiLU.

Most layers see a window and have a RoPE of their own, every sixth sees everything: the config says which.
"""

from __future__ import annotations

import torch

from infer.config import ModelConfig
from infer.models.common import Block, Decoder, Norms
from infer.nn.norm import ZeroCentredRMSNorm


class Gemma3Block(Block):
    norm = qk_norm = ZeroCentredRMSNorm
    activation = "gelu_tanh"

    def __init__(self, config: ModelConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.pre_feedforward_layernorm = self.make_norm(config)
        self.post_feedforward_layernorm = self.make_norm(config)

    def norms(self) -> Norms:
        return Norms(
            before_attention=self.input_layernorm,
            after_attention=self.post_attention_layernorm,
            before_mlp=self.pre_feedforward_layernorm,
            after_mlp=self.post_feedforward_layernorm,
        )


class Gemma3(Decoder):
    block = Gemma3Block

    @property
    def embed_scale(self) -> float:
        # Rounded to the model's dtype first, as in training: 25.25 instead of 25.298 in bf16.
        return torch.tensor(self.config.hidden_size**0.5, dtype=self.dtype).item()
