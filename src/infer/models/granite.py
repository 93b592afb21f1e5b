"""Granite 3 and 4, dense.

    x ──► RMSNorm ──► q, k, v ──► RoPE(q, k) ──► cache.attend ──► o_proj ──► + ──► RMSNorm ──► SwiGLU ──► + ──►
      └─────────────────────────────────────────────────────────────────────┘ └──────────────────────────┘

Differs from Llama by four numbers in its config: multipliers of the embeddings, the scores, and what attention and the
MLP add; and a divisor of the logits.
"""

from __future__ import annotations

from infer.models.common import Decoder


class Granite(Decoder):
    pass
