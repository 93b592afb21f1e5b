"""GLM-4 (0414).

    x ─► RMSNorm ─► q, k, v + bias ─► RoPE(q, k) ─► cache.attend ─► o_proj ─► RMSNorm ─► + ─► (the MLP likewise)
      └─────────────────────────────────────────────────────────────────────────────────┘

Differs from Llama: norms before and after attention and the MLP; biases of q, k and v; RoPE over half of a head, which
its files have in another order (`nn/rope.py`), as they have gate and up as one matrix.
"""

from __future__ import annotations

from infer.models.common import Block, Decoder, Norms


class Glm4Block(Block):
    norm_names = Norms(
        before_attention="input_layernorm",
        after_attention="post_self_attn_layernorm",
        before_mlp="post_attention_layernorm",
        after_mlp="post_mlp_layernorm",
    )


class Glm4(Decoder):
    block = Glm4Block
