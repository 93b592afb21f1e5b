"""Qwen 3, dense (0.6B to 32B).

    x ─► RMSNorm ─► q, k, v ─► norm(q, k) ─► RoPE(q, k) ─► cache.attend ─► o_proj ─► + ─► RMSNorm ─► SwiGLU ─► + ─►
      └────────────────────────────────────────────────────────────────────────────┘ └───────────────────────┘

Differs from Llama in one thing: each head of q and k is normalized before RoPE.
"""

from __future__ import annotations

from infer.models.common import Block, Decoder
from infer.nn.norm import RMSNorm


class Qwen3Block(Block):
    qk_norm = RMSNorm


class Qwen3(Decoder):
    block = Qwen3Block
