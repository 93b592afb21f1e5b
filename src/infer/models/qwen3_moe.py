"""Qwen 3, mixtures of experts (30B-A3B, 235B-A22B, Coder).

    x ─► RMSNorm ─► q, k, v ─► norm(q, k) ─► RoPE(q, k) ─► cache.attend ─► o_proj ─► + ─► RMSNorm ─► experts ─► + ─►
      └────────────────────────────────────────────────────────────────────────────┘ └────────────────────────┘

Differs from Qwen 3 by experts in the place of the MLP, in all layers, or in the layers that its config names.
"""

from __future__ import annotations

from infer.models.common import Decoder
from infer.models.qwen3 import Qwen3Block


class Qwen3Moe(Decoder):
    block = Qwen3Block
