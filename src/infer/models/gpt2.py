"""GPT-2, as OpenAI trained it and as nanoGPT trains it.

    x ──► LayerNorm ──► q, k, v ──► cache.attend ──► o_proj ──► + ──► LayerNorm ──► up ──► GELU ──► down ──► + ──►
      └────────────────────────────────────────────────────────┘ └─────────────────────────────────────────┘

Differs from Llama:
- learned position embeddings instead of RoPE: keys and values depend on their absolute position in the context, so a
  full cache cannot slide;
- LayerNorm instead of RMSNorm, and an MLP without a gate; biases everywhere, or nowhere (nanoGPT);
- dropout in training, and initial weights to train from.
"""

from __future__ import annotations

import math

from torch import nn

from infer.config import ModelConfig
from infer.models.common import Block, Decoder
from infer.nn.linear import Embedding
from infer.nn.norm import LayerNorm


class GPT2Block(Block):
    norm = LayerNorm
    gated = False
    activation = "gelu_tanh"


class GPT2(Decoder):
    block = GPT2Block

    def __init__(self, config: ModelConfig) -> None:
        if config.rope is not None:
            raise ValueError("GPT-2 has learned positions, no RoPE: its config needs rope=None")
        super().__init__(config)
        self.embed_positions = Embedding(config.max_position_embeddings, config.hidden_size)
        init_weights(self)


def init_weights(model: Decoder) -> None:
    """Small random weights to train from; smaller in o_proj and down_proj, which add to the residual stream.

    Nothing on the meta device: a checkpoint will fill the weights, and torch would import a compiler there.
    """
    for name, weight in model.named_parameters():
        if weight.dim() > 1 and not weight.is_meta:
            adds = name.endswith(("o_proj.weight", "down_proj.weight"))
            nn.init.normal_(weight, std=0.02 / math.sqrt(2 * model.config.num_hidden_layers) if adds else 0.02)
