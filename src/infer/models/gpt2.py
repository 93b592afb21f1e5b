"""GPT-2, as OpenAI trained it and as nanoGPT trains it.

    x ──► LayerNorm ──► q, k, v ──► cache.attend ──► o_proj ──► + ──► LayerNorm ──► up ──► GELU ──► down ──► + ──►
      └────────────────────────────────────────────────────────┘ └─────────────────────────────────────────┘

Differs from Llama:
- a learned vector for each position is added to the embedding, where others rotate q and k: keys and values are then
  bound to their position in the whole context, so a full cache cannot slide along;
- LayerNorm instead of RMSNorm, and an MLP without a gate; biases everywhere, or nowhere (nanoGPT);
- dropout while it is trained, and weights to start training from.
"""

from __future__ import annotations

import math

from torch import nn

from infer.config import ModelConfig
from infer.models.common import Block, Decoder, UngatedMLP
from infer.nn.linear import Embedding
from infer.nn.norm import LayerNorm, Norm


class GPT2Block(Block):
    @classmethod
    def make_norm(cls, config: ModelConfig) -> Norm:
        return LayerNorm(config.hidden_size, config.rms_norm_eps, bias=config.norm_bias)

    @classmethod
    def make_mlp(cls, config: ModelConfig) -> UngatedMLP:
        return UngatedMLP(config, config.hidden_act or "gelu_tanh")


class GPT2(Decoder):
    block = GPT2Block

    def __init__(self, config: ModelConfig) -> None:
        if config.rope is not None:
            raise ValueError("GPT-2 learns its positions, and rotates nothing: its config has rope=None")
        super().__init__(config)
        self.embed_positions = Embedding(config.max_position_embeddings, config.hidden_size)
        init_weights(self)


def init_weights(model: Decoder) -> None:
    """Small random weights to train from; smaller where a product adds to the residual, which all layers share.

    None on the meta device: a checkpoint will fill them, and there torch would first import a compiler.
    """
    for name, weight in model.named_parameters():
        if weight.dim() > 1 and not weight.is_meta:
            adds = name.endswith(("o_proj.weight", "down_proj.weight"))
            nn.init.normal_(weight, std=0.02 / math.sqrt(2 * model.config.num_hidden_layers) if adds else 0.02)
