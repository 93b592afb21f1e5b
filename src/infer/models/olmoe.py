"""OLMoE (1B-7B).

    x ─► RMSNorm ─► q, k, v ─► norm(q, k) ─► RoPE(q, k) ─► cache.attend ─► o_proj ─► + ─► RMSNorm ─► experts ─► + ─►
      └────────────────────────────────────────────────────────────────────────────┘ └────────────────────────┘

Differs from Llama:
- experts stand in the place of the MLP;
- q and k are normalized before RoPE, all heads together.
"""

from __future__ import annotations

from infer.models.common import Block, Decoder
from infer.nn.norm import RMSNorm


class OlmoeBlock(Block):
    qk_norm = RMSNorm
    qk_norm_per_head = False


class Olmoe(Decoder):
    block = OlmoeBlock
