"""Mistral (7B, Nemo, Small) and Ministral 3.

    x ──► RMSNorm ──► q, k, v ──► RoPE(q, k) ──► cache.attend ──► o_proj ──► + ──► RMSNorm ──► SwiGLU ──► + ──►
      └─────────────────────────────────────────────────────────────────────┘ └──────────────────────────┘

Differs from Llama in its config alone:
- Mistral 7B v0.1 has a sliding window in all layers;
- Ministral 3 has YaRN, and queries grow with the logarithm of their position beyond the original context.
"""

from __future__ import annotations

from infer.models.common import Decoder


class Mistral(Decoder):
    pass
