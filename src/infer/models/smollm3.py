"""SmolLM3.

    x ──► RMSNorm ──► q, k, v ──► RoPE(q, k) ──► cache.attend ──► o_proj ──► + ──► RMSNorm ──► SwiGLU ──► + ──►
      └─────────────────────────────────────────────────────────────────────┘ └──────────────────────────┘

Differs from Llama in one thing, which the config says: every fourth layer has no RoPE.
"""

from __future__ import annotations

from infer.models.common import Decoder


class SmolLM3(Decoder):
    pass
