"""gpt-oss (20B, 120B).

    x ──► RMSNorm ──► q, k, v ──► RoPE(q, k) ──► cache.attend ──► o_proj ──► + ──► RMSNorm ──► experts ──► + ──►
      └─────────────────────────────────────────────────────────────────────┘ └───────────────────────────┘

Differs from Llama:
- each head has a learned attention sink: the score of a key without a value;
- every second layer has a sliding window of 128 positions;
- experts stand in the place of the MLP, with a clamped SwiGLU; checkpoints have their weights in 4 bits (MXFP4);
- every matrix but the embedding and the head has a bias, the router's too.
"""

from __future__ import annotations

from infer.models.common import Block, Decoder
from infer.nn.activation import CLAMPED_SWIGLU


class GptOssBlock(Block):
    sinks = True
    activation = CLAMPED_SWIGLU


class GptOss(Decoder):
    block = GptOssBlock
