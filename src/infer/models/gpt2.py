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

from torch import Tensor, nn

from infer.cache.base import Cache
from infer.config import ModelConfig
from infer.models.common import Block, Decoder, UngatedMLP
from infer.ops.linear import Embedding
from infer.ops.norm import LayerNorm, Norm
from infer.ops.parts import EmbeddingParts


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

    def embedding_parts(self) -> EmbeddingParts:
        return EmbeddingParts(self.embed_tokens, self.embed_positions)

    def forward(self, input_ids: Tensor, kv_cache: Cache | None = None, *, all_logits: bool = False) -> Tensor:
        end = input_ids.shape[1] + (0 if kv_cache is None else kv_cache.seq_len)
        if end > self.config.max_position_embeddings:
            raise ValueError(f"{end} positions exceed the {self.config.max_position_embeddings} that the model learned")
        return super().forward(input_ids, kv_cache, all_logits=all_logits)


def init_weights(model: Decoder) -> None:
    """Small random weights to train from; smaller where a product adds to the residual, which all layers share.

    None on the meta device: a checkpoint will fill them, and there torch would first import a compiler.
    """
    for name, weight in model.named_parameters():
        if weight.dim() > 1 and not weight.is_meta:
            adds = name.endswith(("o_proj.weight", "down_proj.weight"))
            nn.init.normal_(weight, std=0.02 / math.sqrt(2 * model.config.num_hidden_layers) if adds else 0.02)
