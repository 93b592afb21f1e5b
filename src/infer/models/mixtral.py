"""Mixtral (8x7B, 8x22B).

    x ──► RMSNorm ──► q, k, v ──► RoPE(q, k) ──► cache.attend ──► o_proj ──► + ──► RMSNorm ──► experts ──► + ──►
      └─────────────────────────────────────────────────────────────────────┘ └───────────────────────────┘

Differs from Llama by experts in the place of the MLP, whose weights add up to 1 for each token.
"""

from __future__ import annotations

from infer.models.common import Decoder


class Mixtral(Decoder):
    pass
