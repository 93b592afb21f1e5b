"""StableLM (3B, Zephyr, 2-1.6B, Code).

    x ──► LayerNorm ──► q, k, v ──► RoPE(q, k) ──► cache.attend ──► o_proj ──► + ──► LayerNorm ──► SwiGLU ──► + ──►
      └───────────────────────────────────────────────────────────────────────┘ └────────────────────────────┘

Differs from Llama: LayerNorm, and RoPE over the first quarter of a head.
"""

from __future__ import annotations

from infer.models.common import Block, Decoder
from infer.nn.norm import LayerNorm


class StableLmBlock(Block):
    norm = LayerNorm


class StableLm(Decoder):
    block = StableLmBlock
