"""EXAONE 4.

    x ─► q, k, v ─► norm(q, k) ─► RoPE(q, k) ─► cache.attend ─► o_proj ─► RMSNorm ─► + ─► (the MLP likewise)
      └─────────────────────────────────────────────────────────────────────────────┘

Differs from OLMo 2: each head of q and k is normalized by itself. In the 32B every fourth layer sees everything and has
no RoPE, the others have a sliding window.
"""

from __future__ import annotations

from infer.models.common import Decoder
from infer.models.olmo2 import Olmo2Block


class Exaone4Block(Olmo2Block):
    qk_norm_per_head = True


class Exaone4(Decoder):
    block = Exaone4Block
