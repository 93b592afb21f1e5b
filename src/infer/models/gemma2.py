"""Gemma 2.

    x ─► RMSNorm ─► q, k, v ─► RoPE(q, k) ─► cache.attend ─► o_proj ─► RMSNorm ─► + ─► (to the MLP, as in Gemma 3)
      └──────────────────────────────────────────────────────────────────────────┘

Differs from Gemma 3: q and k are not normalized; scores and logits are soft-capped, cap * tanh(x / cap); every second
layer has a sliding window, with the same RoPE.
"""

from __future__ import annotations

from infer.models.gemma3 import Gemma3, Gemma3Block


class Gemma2Block(Gemma3Block):
    qk_norm = None


class Gemma2(Gemma3):
    block = Gemma2Block
