"""StarCoder2.

    x ─► LayerNorm ─► q, k, v ─► RoPE(q, k) ─► cache.attend ─► o_proj ─► + ─► LayerNorm ─► up ─► GELU ─► down ─► + ─►
      └────────────────────────────────────────────────────────────────┘ └───────────────────────────────────┘

Differs from Llama: LayerNorm, an MLP without a gate, biases everywhere, and a sliding window in all layers.
"""

from __future__ import annotations

from infer.models.common import Decoder
from infer.models.gpt2 import GPT2Block


class Starcoder2(Decoder):
    block = GPT2Block
