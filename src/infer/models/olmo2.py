"""OLMo 2 and OLMo 3.

    x ─► q, k, v ─► norm(q), norm(k) ─► RoPE(q, k) ─► cache.attend ─► o_proj ─► RMSNorm ─► + ─► (the MLP likewise)
      └───────────────────────────────────────────────────────────────────────────────────┘

Differs from Llama:
- norms stand after attention and the MLP, not before;
- q and k are normalized before RoPE, all heads together.

Three of four layers of OLMo 3 have a sliding window, and only the fourth has YaRN.
"""

from __future__ import annotations

from infer.models.common import Block, Decoder, Norms
from infer.nn.norm import RMSNorm


class Olmo2Block(Block):
    norm_names = Norms(after_attention="post_attention_layernorm", after_mlp="post_feedforward_layernorm")
    qk_norm = RMSNorm
    qk_norm_per_head = False


class Olmo2(Decoder):
    block = Olmo2Block
