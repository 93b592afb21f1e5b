"""Llama 3.x and its family (SmolLM2, TinyLlama, ...).

    x ──► RMSNorm ──► q, k, v ──► RoPE(q, k) ──► cache.attend ──► o_proj ──► + ──► RMSNorm ──► SwiGLU ──► + ──►
      └─────────────────────────────────────────────────────────────────────┘ └──────────────────────────┘

Grouped-query attention; RoPE with llama3 scaling from 3.1 on; head tied to the embedding in the small models.
The shared decoder is this model, so nothing differs.
"""

from __future__ import annotations

from infer.models.common import Decoder


class Llama(Decoder):
    pass
