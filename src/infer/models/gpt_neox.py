"""GPT-NeoX and Pythia.

    x ──► LayerNorm ──► q, k, v ──► RoPE(q, k) ──► cache.attend ──► o_proj ──► + ──► + ──►
      ├──────────────────────────────────────────────────────────────────────┘     │
      └─► LayerNorm ──► up ──► GELU ──► down ──────────────────────────────────────┘

Differs from GPT-2: RoPE over the first quarter of a head; attention and the MLP both read the input of the block. Its
files have q, k and v head by head.
"""

from __future__ import annotations

from infer.models.common import Decoder
from infer.models.gpt2 import GPT2Block


class GPTNeoX(Decoder):
    block = GPT2Block
