"""Qwen 2 and 2.5, with Coder, Math and the R1 distillates.

    x ──► RMSNorm ──► q, k, v + bias ──► RoPE(q, k) ──► cache.attend ──► o_proj ──► + ──► RMSNorm ──► SwiGLU ──► + ──►
      └────────────────────────────────────────────────────────────────────────────┘ └──────────────────────────┘

Differs from Llama in one thing: q, k and v have biases, which the config says.
"""

from __future__ import annotations

from infer.models.common import Decoder


class Qwen2(Decoder):
    pass
