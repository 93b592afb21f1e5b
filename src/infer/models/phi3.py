"""Phi-3 and Phi-4.

    x ──► RMSNorm ──► q, k, v ──► RoPE(q, k) ──► cache.attend ──► o_proj ──► + ──► RMSNorm ──► SwiGLU ──► + ──►
      └─────────────────────────────────────────────────────────────────────┘ └──────────────────────────┘

Differs from Llama in its config alone: LongRoPE, and in Phi-4-mini RoPE over the first three quarters of a head. Its
files have q, k, v and gate, up as one matrix each.
"""

from __future__ import annotations

from infer.models.common import Decoder


class Phi3(Decoder):
    pass
